"""A tab of the page for reviewing a list of examples."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import gradio as gr

from mbpa.explorer import rendering, review
from mbpa.explorer.actions import Actions, Change
from mbpa.explorer.forms import (
    QUIET_EVENT_OPTIONS,
    SIDE_BUTTON_OPTIONS,
    Updates,
    make_card,
    make_list,
    show_busy,
)
from mbpa.explorer.review import Opinion
from mbpa.explorer.sessions import Session, Sessions, make_refusal, show_errors

EXAMPLES_PER_LIST = 30


@runtime_checkable  # the tests check annotations
class Host(Protocol):
    """The page that a tab is part of."""

    actions: Actions
    sessions: Sessions
    confirmed: set[int]
    """Ids of examples that a visitor has confirmed."""

    @property
    def query(self) -> Any:
        """The component that holds the query."""

    @property
    def change_outputs(self) -> list[Any]:
        """Components that the values returned by `update_after` are for."""

    async def update_after(self, session: Session, description: str, query: Any) -> Updates:
        """Return the updates of the page after a change."""

    async def make_thumbnails(self, ids: list[int], side: int = 96) -> dict[int, str]:
        """Return thumbnails of examples by id; empty if the run does not take pictures."""


class ReviewTab:
    """A tab with a list of examples, and buttons for the selected one."""

    def __init__(
        self, page: Host, title: str, order: Callable[[list[Opinion]], list[Opinion]]
    ) -> None:
        self._page, self._title, self._order = page, title, order
        with gr.Tab(title) as tab, gr.Row():
            with gr.Column(scale=5):
                self._list = make_list()
            with gr.Column(scale=3):
                self._card = make_card()
                self._right = gr.Button("Its label is right")
                self._others = gr.Button("Change to the suggested label", variant="primary")
                with gr.Row():
                    self._label = gr.Dropdown(
                        label="Or to another label",
                        allow_custom_value=True,
                        value=None,
                        scale=3,
                        min_width=200,
                    )
                    self._rename = gr.Button("Change", **SIDE_BUTTON_OPTIONS)
                self._drop = gr.Button("Forget this example", variant="stop")
        self._connect(tab)

    def _connect(self, tab: Any) -> None:
        shown, choice = self._list_outputs, self._list_outputs[1:]
        listing = show_busy(self._list)
        tab.select(self._on_open, None, shown, **listing)
        self._list.select(self._on_pick, None, choice, **QUIET_EVENT_OPTIONS)
        self._right.click(self._on_confirm, None, shown, **listing)
        query, outputs = self._page.query, [*shown, *self._page.change_outputs]
        self._others.click(self._on_agree, query, outputs, **listing)
        self._rename.click(self._on_relabel, [query, self._label], outputs, **listing)
        self._drop.click(self._on_forget, query, outputs, **listing)

    @property
    def _list_outputs(self) -> list[Any]:
        """Components that the values returned by `show_list` are for."""
        return [self._list, self._card, self._others, self._label, self._right, self._drop]

    async def _on_open(self, request: gr.Request) -> Updates:
        """Compute the votes and show the list; takes seconds, in a thread of its own."""
        found = await asyncio.to_thread(review.collect_opinions, self._page.actions.classifier)
        queue = [each for each in self._order(found) if each.example.id not in self._page.confirmed]
        session = self._page.sessions.get_session(request)
        session.queues[self._title], session.chosen = queue[:EXAMPLES_PER_LIST], 0
        return await self.show_list(session)

    async def show_list(self, session: Session) -> Updates:
        """Return updates for the list and the selected example."""
        queue = session.queues.get(self._title, [])
        thumbs = await self._page.make_thumbnails([each.example.id for each in queue])
        rows = [
            rendering.Row(
                str(each.example.id),
                _describe_vote(each),
                rendering.describe_example(
                    each.example.id, each.example.text, thumbs, rendering.MAX_LONG_CHARACTERS
                ),
            )
            for each in queue
        ]
        selected = await self._show_selected(session)
        chosen = rows[session.chosen].key if rows else None
        nothing = "Nothing is left to review."
        return (rendering.render_rows(self._title, rows, chosen, nothing), *selected)

    async def _show_selected(self, session: Session) -> Updates:
        """Return updates for the selected example and its buttons."""
        queue = session.queues.get(self._title, [])
        if not queue:
            off = gr.Button(interactive=False)
            return "", off, gr.Dropdown(value=None), off, off
        session.chosen = min(session.chosen, len(queue) - 1)
        opinion = queue[session.chosen]
        on = gr.Button(interactive=True)
        return (
            rendering.render_opinion(
                opinion, await self._page.make_thumbnails([opinion.example.id], side=320)
            ),
            gr.Button(interactive=opinion.label != opinion.example.label),
            gr.Dropdown(choices=sorted(self._page.actions.classifier.labels), value=None),
            on,
            on,
        )

    async def _on_pick(self, event: gr.SelectData, request: gr.Request) -> Updates:
        session = self._page.sessions.get_session(request)
        ids = [str(each.example.id) for each in session.queues.get(self._title, [])]
        if str(event.index) in ids:
            session.chosen = ids.index(str(event.index))
        return await self._show_selected(session)

    async def _on_confirm(self, request: gr.Request) -> Updates:
        session, opinion = self._get_selected(request)
        self._page.confirmed.add(opinion.example.id)
        session.remove(self._title, opinion)
        return await self._show_list_or_skip(session)

    async def _on_agree(self, query: Any, request: gr.Request) -> Updates:
        return await self._on_relabel(query, self._get_selected(request)[1].label, request)

    async def _on_relabel(self, query: Any, label: str | None, request: gr.Request) -> Updates:
        if not label:
            raise make_refusal("choose a label first")
        session, opinion = self._get_selected(request)
        change = await show_errors(
            self._page.actions.relabel(opinion.example.id, label, by=session.by)
        )
        self._page.confirmed.update(change.added)
        return await self.finish_change(session, opinion, change, query)

    async def _on_forget(self, query: Any, request: gr.Request) -> Updates:
        session, opinion = self._get_selected(request)
        change = await show_errors(self._page.actions.forget(opinion.example.id, by=session.by))
        return await self.finish_change(session, opinion, change, query)

    async def finish_change(
        self, session: Session, opinion: Opinion, change: Change, query: Any
    ) -> Updates:
        session.record(change)
        session.remove(self._title, opinion)
        page = await self._page.update_after(session, change.description, query)
        return (*await self._show_list_or_skip(session), *page)

    async def _show_list_or_skip(self, session: Session) -> Updates:
        """Return the updated list after a change; skip it if it cannot be shown."""
        try:
            return await self.show_list(session)
        except gr.Error:
            return (gr.skip(),) * len(self._list_outputs)

    def _get_selected(self, request: gr.Request) -> tuple[Session, Opinion]:
        """Return the visitor's session and the example selected in it."""
        session = self._page.sessions.get_session(request)
        queue = session.queues.get(self._title, [])
        if not 0 <= session.chosen < len(queue):
            raise make_refusal("choose an example first")
        return session, queue[session.chosen]


def _describe_vote(opinion: Opinion) -> tuple[str, str]:
    """Return the label of an example and what its neighbours say, in words."""
    share = rendering.format_percent(opinion.share)
    if opinion.label == opinion.example.label:
        return f"labelled {opinion.example.label}", f"its neighbours agree, {share}"
    return f"labelled {opinion.example.label}", f"its neighbours suggest {opinion.label}, {share}"
