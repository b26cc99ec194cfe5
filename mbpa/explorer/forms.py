"""How a visitor asks and gives examples: in sentences, or in pictures that they pick or drop."""

from __future__ import annotations

import abc
from typing import Any

import gradio as gr

from mbpa import image
from mbpa.explorer.lessons import Desk

KINDS = list(image.SUFFIXES)
DROP: dict[str, Any] = {"height": 140, "elem_classes": "drop"}


class Form(abc.ABC):
    """Components, and what their values stand for."""

    noun: str
    hint: str
    """What to do first."""
    nothing: Any
    """The value of no examples."""
    query: Any
    examples: Any
    asking: list[Any]
    """Events upon which an answer is wanted."""

    @abc.abstractmethod
    def lay_out_query(self, beside: dict[str, Any]) -> None:
        """Where a visitor asks."""

    @abc.abstractmethod
    def lay_out_examples(self) -> None:
        """Where examples of a label are given."""

    @abc.abstractmethod
    async def item(self, desk: Desk, given: Any) -> str | bytes | None:
        """What is asked, as the desk takes it; `None` for nothing."""

    @abc.abstractmethod
    def as_example(self, given: Any) -> Any:
        """What is asked, as an example to teach."""


class Sentences(Form):
    noun, hint, nothing = "sentence", "Type a sentence", ""

    def lay_out_query(self, beside: dict[str, Any]) -> None:
        with gr.Row():
            self.query = gr.Textbox(
                label="Sentence", placeholder="Type a sentence", scale=5, autofocus=True
            )
            ask = gr.Button("Ask", variant="primary", **beside)
        self.asking = [self.query.submit, ask.click]

    def lay_out_examples(self) -> None:
        self.examples = gr.Textbox(
            label="Examples, one a line", lines=4, max_lines=12, placeholder="…"
        )

    async def item(self, desk: Desk, given: str) -> str | None:
        return given if given.strip() else None

    def as_example(self, given: str) -> str:
        return " ".join(given.split())


class Pictures(Form):
    noun, hint, nothing = "picture", "Drop a picture", None

    def lay_out_query(self, beside: dict[str, Any]) -> None:
        self.query = gr.File(label="Picture", file_types=KINDS, type="binary", **DROP)
        self.asking = [self.query.upload, self.query.clear]

    def lay_out_examples(self) -> None:
        self.examples = gr.File(
            label="Examples", file_types=KINDS, type="binary", file_count="multiple", **DROP
        )

    async def item(self, desk: Desk, given: bytes | None) -> bytes | None:
        return (await desk.read([given]))[0] if given is not None else None

    def as_example(self, given: bytes | None) -> list[bytes]:
        return [] if given is None else [given]
