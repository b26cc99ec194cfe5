"""The tab that lists the labels, renames and merges them, and trains the classifier again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import gradio as gr

from mbpa.explorer import rendering
from mbpa.explorer.actions import Change
from mbpa.explorer.forms import (
    QUIET_EVENT_OPTIONS,
    SIDE_BUTTON_OPTIONS,
    Updates,
    make_card,
    make_list,
    show_busy,
)
from mbpa.explorer.review_tab import Host
from mbpa.explorer.sessions import Session, make_refusal, show_errors

TITLE = "Labels"
FINAL_MERGE = "I know that merging a label known since training cannot be undone"
TRAINING_NOTE = """Training again makes what was taught part of the classifier itself. It takes some
minutes, during which the classifier goes on answering and learning, and cannot be undone."""
IS_TRAINING = "The classifier is being trained. You may leave this page meanwhile."


class LabelsTab:
    """A tab with all labels, and what can be done to the selected one."""

    def __init__(self, page: Host) -> None:
        self._page = page
        self._training: asyncio.Task[str] | None = None
        """The training that was started last; it goes on if the visitor leaves."""
        with gr.Tab(TITLE) as tab, gr.Row():
            with gr.Column(scale=5):
                self._search = gr.Textbox("", label="Find a label", max_lines=1)
                self._list = make_list()
            with gr.Column(scale=3):
                self._card = make_card("label")
                with gr.Row():
                    self._name = gr.Textbox(
                        label="New name", max_lines=1, scale=3, min_width=200, interactive=False
                    )
                    self._rename = gr.Button("Rename", interactive=False, **SIDE_BUTTON_OPTIONS)
                with gr.Row():
                    self._into = gr.Dropdown(
                        [], label="Merge into", scale=3, min_width=200, interactive=False
                    )
                    self._merge = gr.Button("Merge", interactive=False, **SIDE_BUTTON_OPTIONS)
                self._is_final = gr.Checkbox(label=FINAL_MERGE, visible=False)
                self._state = make_card("training")
                self._train = gr.Button("Train again")
        self._connect(tab)

    def _connect(self, tab: Any) -> None:
        listing = show_busy(self._list)
        tab.select(self._on_open, self._search, self._open_outputs, **listing)
        self._search.change(self._on_search, self._search, self._list, **QUIET_EVENT_OPTIONS)
        self._list.select(self._on_pick, None, self._choice_outputs, **QUIET_EVENT_OPTIONS)
        outputs = [*self._list_outputs, *self._page.change_outputs]
        inputs = [self._page.query, self._search]
        gr.on(
            [self._rename.click, self._name.submit],
            self._on_rename,
            [*inputs, self._name],
            outputs,
            **listing,
        )
        merging = [*inputs, self._into, self._is_final]
        self._merge.click(self._on_merge, merging, outputs, **listing)
        self._train.click(
            self._on_train,
            self._page.query,
            [*self._training_outputs, *self._page.change_outputs],
            **QUIET_EVENT_OPTIONS,
        )

    def refresh_after(self, event: Any) -> None:
        """Show the list again after an event that may have changed it."""
        event.then(self._on_open, self._search, self._open_outputs, **QUIET_EVENT_OPTIONS)

    @property
    def _choice_outputs(self) -> list[Any]:
        return [self._card, self._name, self._rename, self._into, self._merge, self._is_final]

    @property
    def _list_outputs(self) -> list[Any]:
        """Components that the values returned by `show_list` are for."""
        return [self._list, *self._choice_outputs]

    @property
    def _training_outputs(self) -> list[Any]:
        return [self._state, self._train]

    @property
    def _open_outputs(self) -> list[Any]:
        return [*self._list_outputs, *self._training_outputs]

    def show_list(self, session: Session, search: str) -> Updates:
        """Return updates for the list of labels that contain a text, and for the selected one."""
        return (self._render_list(session, search), *self._show_chosen(session))

    def _render_list(self, session: Session, search: str) -> str:
        counts = self._page.actions.classifier.counts
        trained, wanted = frozenset(counts.trained_labels), search.strip().casefold()
        rows = [
            rendering.Row(label, (_describe_label(counts.labels[label], label in trained),))
            for label in sorted(counts.labels)
            if wanted in label.casefold()
        ]
        nothing = (
            "No label contains this text." if wanted else "There are no labels yet: teach one."
        )
        return rendering.render_rows(TITLE, rows, session.chosen_label, nothing)

    def _show_chosen(self, session: Session) -> Updates:
        """Return updates for the selected label and what can be done to it."""
        counts = self._page.actions.classifier.counts
        label = session.chosen_label
        if label is None or label not in counts.labels:
            session.chosen_label = None
            note = "Choose a label to rename it or to merge it into another."
            off = gr.Button(interactive=False)
            return (
                rendering.render_note(note) if counts.labels else "",
                gr.Textbox(value="", interactive=False),
                off,
                gr.Dropdown(choices=[], value=None, interactive=False),
                off,
                gr.Checkbox(value=False, visible=False),
            )
        others = sorted(each for each in counts.labels if each != label)
        is_trained = label in counts.trained_labels
        return (
            rendering.render_label(label, counts.labels[label], is_trained),
            gr.Textbox(value=label, interactive=True),
            gr.Button(interactive=True),
            gr.Dropdown(choices=others, value=None, interactive=bool(others)),
            gr.Button(interactive=bool(others)),
            gr.Checkbox(value=False, visible=is_trained and bool(others)),
        )

    async def _on_open(self, search: str, request: gr.Request) -> Updates:
        session = self._page.sessions.get_session(request)
        return (*self.show_list(session, search), *self._show_training())

    async def _on_search(self, search: str, request: gr.Request) -> str:
        return self._render_list(self._page.sessions.get_session(request), search)

    async def _on_pick(self, event: gr.SelectData, request: gr.Request) -> Updates:
        session = self._page.sessions.get_session(request)
        session.chosen_label = str(event.index)
        return self._show_chosen(session)

    async def _on_rename(self, query: Any, search: str, name: str, request: gr.Request) -> Updates:
        session, label = self._get_chosen(request)
        change = await show_errors(self._page.actions.rename(label, name, by=session.by))
        return await self._finish_change(session, change, name.strip(), query, search)

    async def _on_merge(
        self, query: Any, search: str, into: str | None, is_final: bool, request: gr.Request
    ) -> Updates:
        session, label = self._get_chosen(request)
        if not into:
            raise make_refusal("choose the label to merge it into first")
        if label in self._page.actions.classifier.trained_labels and not is_final:
            raise make_refusal("this merge cannot be undone: tick the box to confirm it")
        change = await show_errors(self._page.actions.merge(label, into, by=session.by))
        return await self._finish_change(session, change, into, query, search)

    async def _finish_change(
        self, session: Session, change: Change, chosen: str, query: Any, search: str
    ) -> Updates:
        session.record(change)
        session.chosen_label = chosen
        page = await self._page.update_after(session, change.description, query)
        return (*self.show_list(session, search), *page)

    def _get_chosen(self, request: gr.Request) -> tuple[Session, str]:
        """Return the visitor's session and the label selected in it."""
        session = self._page.sessions.get_session(request)
        if session.chosen_label is None:
            raise make_refusal("choose a label first")
        return session, session.chosen_label

    async def _on_train(self, query: Any, request: gr.Request) -> AsyncIterator[Updates]:
        """Train in the background; show that it goes on, and then what came of it."""
        session = self._page.sessions.get_session(request)
        if self._training is None or self._training.done():
            self._training = asyncio.create_task(self._page.actions.retrain())
            self._training.add_done_callback(_retrieve_error)
        training = self._training
        yield (*self._show_training(), *(gr.skip(),) * len(self._page.change_outputs))
        await asyncio.wait([training])
        if training.cancelled() or training.exception() is not None:
            yield (*self._show_training(), *(gr.skip(),) * len(self._page.change_outputs))
            return
        page = await self._page.update_after(session, training.result(), query)
        yield (*self._show_training(), *page)

    def _show_training(self) -> Updates:
        """Return updates that say whether the classifier is being trained."""
        training = self._training
        if training is not None and not training.done():
            return rendering.render_note(IS_TRAINING), gr.Button(interactive=False)
        if training is None or training.cancelled():
            note = TRAINING_NOTE
        elif (error := training.exception()) is not None:
            note = f"The last training failed: {error}. {TRAINING_NOTE}"
        else:
            note = f"{training.result()} {TRAINING_NOTE}"
        return rendering.render_note(note), gr.Button(interactive=True)


def _describe_label(count: int, is_trained: bool) -> str:
    return f"{rendering.count_examples(count)}{'' if is_trained else ', taught since training'}"


def _retrieve_error(training: asyncio.Task[str]) -> None:
    """Mark the error of a training as seen; the tab shows it."""
    if not training.cancelled():
        training.exception()
