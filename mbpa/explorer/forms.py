"""Forms for asking and teaching: sentences, or pictures that a visitor picks or drops."""

from __future__ import annotations

import abc
from pathlib import Path
from typing import Any

import gradio as gr

from mbpa.encoders.pictures import SUFFIXES
from mbpa.explorer.actions import Actions
from mbpa.explorer.uploads import Uploads

CHOOSE_ROW = """element.addEventListener("change", event =>
  trigger("select", {index: event.target.value, value: event.target.value}))"""
EVENT_OPTIONS: dict[str, Any] = {"api_visibility": "private", "concurrency_limit": None}
QUIET_EVENT_OPTIONS: dict[str, Any] = {**EVENT_OPTIONS, "show_progress": "hidden"}
SIDE_BUTTON_OPTIONS: dict[str, Any] = {
    "scale": 0,
    "min_width": 120,
    "size": "md",
    "elem_classes": "beside",
}
Updates = tuple[Any, ...]
DROP_AREA_OPTIONS: dict[str, Any] = {"height": 140, "elem_classes": "drop"}


def make_card(id: str | None = None) -> Any:
    """Return an empty framed HTML component."""
    return gr.HTML(elem_id=id, elem_classes="card", apply_default_css=False)


def make_list() -> Any:
    """Return a framed list; a row that a visitor chooses is a `select` event with its key."""
    return gr.HTML(elem_classes="card list", apply_default_css=False, js_on_load=CHOOSE_ROW)


def show_busy(*components: Any) -> dict[str, Any]:
    """Return options of an event during which these components show that they are updated."""
    return {**EVENT_OPTIONS, "show_progress": "minimal", "show_progress_on": list(components)}


class InputForm(abc.ABC):
    """Components of a form, and the meaning of their values."""

    noun: str
    hint: str
    """What a visitor should do to ask."""
    no_examples: Any
    """Value of the component for examples when it is empty."""
    query: Any
    examples: Any
    asking: list[Any]
    """Events that trigger an answer."""
    teaching: list[Any]
    """Events of the examples that teach them."""

    @abc.abstractmethod
    def lay_out_query(self) -> None:
        """Create the components in which a visitor asks."""

    @abc.abstractmethod
    def lay_out_examples(self) -> None:
        """Create the components in which a visitor gives examples of a label."""

    @abc.abstractmethod
    async def read_query(self, actions: Actions, given: Any) -> str | bytes | None:
        """Convert the query to what `Actions` takes; `None` if it is empty."""

    @abc.abstractmethod
    def read_examples(self, given: Any) -> str | list[Path]:
        """Convert examples to what `Actions` takes; raise `InputError` if one is invalid."""

    @abc.abstractmethod
    def read_correction(self, query: Any) -> str | list[Path]:
        """Convert the query to the single example of a lesson."""

    @abc.abstractmethod
    def delete_files(self, given: Any, query: Any) -> None:
        """Delete the files of taught examples, except that of the query if it is among them."""


class SentenceForm(InputForm):
    """A form for sentences, which a visitor types."""

    noun, hint, no_examples = "sentence", "Type a sentence and press Enter", ""

    def lay_out_query(self) -> None:
        with gr.Row():
            self.query = gr.Textbox(
                label="Sentence",
                placeholder="Type a sentence and press Enter",
                scale=5,
                min_width=200,
                autofocus=True,
            )
            ask = gr.Button("Ask", variant="primary", **SIDE_BUTTON_OPTIONS)
        self.asking = [self.query.submit, ask.click]

    def lay_out_examples(self) -> None:
        self.examples = gr.Textbox(
            label="Examples, one per line",
            lines=4,
            max_lines=12,
            placeholder="Three or more sentences that have this label",
        )
        self.teaching = [self.examples.submit]  # Shift and Enter

    async def read_query(self, actions: Actions, given: str) -> str | None:
        return given if given.strip() else None

    def read_examples(self, given: str | None) -> str:
        return given or ""

    def read_correction(self, query: str) -> str:
        return " ".join(query.split())

    def delete_files(self, given: str | None, query: str) -> None:
        pass


class PictureForm(InputForm):
    """A form for pictures, which a visitor uploads."""

    noun, hint, no_examples = "picture", "Drop a picture", None

    def __init__(self, uploads: Uploads) -> None:
        self._uploads = uploads

    def lay_out_query(self) -> None:
        self.query = _make_file_input(label="Picture")
        self.asking = [self.query.upload, self.query.clear]

    def lay_out_examples(self) -> None:
        self.examples = _make_file_input(label="Examples", file_count="multiple")
        self.teaching = []

    async def read_query(self, actions: Actions, given: list[str]) -> bytes | None:
        return (await actions.read(self.read_examples(given)))[0] if given else None

    def read_examples(self, given: list[str]) -> list[Path]:
        return [self._uploads.path(named) for named in given]

    def read_correction(self, query: list[str]) -> list[Path]:
        return self.read_examples(query)

    def delete_files(self, given: list[str], query: list[str]) -> None:
        self._uploads.drop(set(given) - set(query))


def _make_file_input(**options: Any) -> Any:
    """Return a file component whose value is a list of paths as named by the visitor, unchecked."""
    component: Any = gr.File(file_types=list(SUFFIXES), **DROP_AREA_OPTIONS, **options)

    def get_paths(payload: Any) -> list[str]:
        files = getattr(payload, "root", payload)
        return [each.path for each in (files if isinstance(files, list) else [files]) if each]

    component.preprocess = get_paths  # Gradio's reads all files, or leaves an empty one for each
    return component
