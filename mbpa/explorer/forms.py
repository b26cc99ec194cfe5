"""Forms for asking and teaching: sentences, or pictures that a visitor picks or drops."""

from __future__ import annotations

import abc
from pathlib import Path
from typing import Any

import gradio as gr

from mbpa.encoders import image
from mbpa.explorer.actions import Desk
from mbpa.explorer.uploads import Uploads

KINDS = list(image.SUFFIXES)
ON: dict[str, Any] = {"api_visibility": "private", "concurrency_limit": None}
QUIETLY: dict[str, Any] = {**ON, "show_progress": "hidden"}
BESIDE: dict[str, Any] = {"scale": 0, "min_width": 120, "size": "md", "elem_classes": "beside"}
Updates = tuple[Any, ...]
DROP: dict[str, Any] = {"height": 140, "elem_classes": "drop"}


def card(id: str | None = None) -> Any:
    """Return an empty framed HTML component."""
    return gr.HTML(elem_id=id, elem_classes="card", apply_default_css=False)


class Form(abc.ABC):
    """Components of a form, and the meaning of their values."""

    noun: str
    hint: str
    """What a visitor should do first."""
    nothing: Any
    """Value of the component for examples when it is empty."""
    query: Any
    examples: Any
    asking: list[Any]
    """Events that trigger an answer."""

    @abc.abstractmethod
    def lay_out_query(self) -> None:
        """Create the components in which a visitor asks."""

    @abc.abstractmethod
    def lay_out_examples(self) -> None:
        """Create the components in which a visitor gives examples of a label."""

    @abc.abstractmethod
    async def item(self, desk: Desk, given: Any) -> str | bytes | None:
        """Convert the query to what the desk takes; `None` if it is empty."""

    @abc.abstractmethod
    def lesson(self, given: Any) -> str | list[Path]:
        """Convert examples to what the desk takes; raise `InputError` if one is invalid."""

    @abc.abstractmethod
    def correction(self, query: Any) -> str | list[Path]:
        """Convert the query to the single example of a lesson."""

    @abc.abstractmethod
    def drop(self, given: Any, query: Any) -> None:
        """Delete the files of taught examples, except that of the query if it is among them."""


class Sentences(Form):
    noun, hint, nothing = "sentence", "Type a sentence", ""

    def lay_out_query(self) -> None:
        with gr.Row():
            self.query = gr.Textbox(
                label="Sentence", placeholder="Type a sentence", scale=5, autofocus=True
            )
            ask = gr.Button("Ask", variant="primary", **BESIDE)
        self.asking = [self.query.submit, ask.click]

    def lay_out_examples(self) -> None:
        self.examples = gr.Textbox(
            label="Examples, one a line", lines=4, max_lines=12, placeholder="…"
        )

    async def item(self, desk: Desk, given: str) -> str | None:
        return given if given.strip() else None

    def lesson(self, given: str | None) -> str:
        return given or ""

    def correction(self, query: str) -> str:
        return " ".join(query.split())

    def drop(self, given: str | None, query: str) -> None:
        pass


class Pictures(Form):
    noun, hint, nothing = "picture", "Drop a picture", None

    def __init__(self, uploads: Uploads) -> None:
        self._uploads = uploads

    def lay_out_query(self) -> None:
        self.query = _place_for_files(label="Picture")
        self.asking = [self.query.upload, self.query.clear]

    def lay_out_examples(self) -> None:
        self.examples = _place_for_files(label="Examples", file_count="multiple")

    async def item(self, desk: Desk, given: list[str]) -> bytes | None:
        return (await desk.read(self.lesson(given)))[0] if given else None

    def lesson(self, given: list[str]) -> list[Path]:
        return [self._uploads.path(named) for named in given]

    def correction(self, query: list[str]) -> list[Path]:
        return self.lesson(query)

    def drop(self, given: list[str], query: list[str]) -> None:
        self._uploads.drop(set(given) - set(query))


def _place_for_files(**options: Any) -> Any:
    """Return a file component whose value is a list of paths as named by the visitor, unchecked."""
    place: Any = gr.File(file_types=KINDS, **DROP, **options)

    def named(payload: Any) -> list[str]:
        files = getattr(payload, "root", payload)
        return [each.path for each in (files if isinstance(files, list) else [files]) if each]

    place.preprocess = named  # Gradio's own reads all files, or leaves an empty file for each
    return place
