"""A tab of the page for reviewing a list of examples."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import gradio as gr

from mbpa.explorer import rendering, review
from mbpa.explorer.actions import Deed, Desk
from mbpa.explorer.forms import BESIDE, ON, QUIETLY, Updates, card
from mbpa.explorer.review import Opinion
from mbpa.explorer.sessions import Session, Visits, refusal, told

LISTED = 30  # examples per list


@runtime_checkable  # the tests check annotations
class Host(Protocol):
    """The page that a tab is part of."""

    desk: Desk
    visits: Visits
    settled: set[int]
    """Ids of examples that a visitor has confirmed."""

    @property
    def query(self) -> Any:
        """The component that holds the query."""

    @property
    def after_deed(self) -> list[Any]:
        """Components that the values returned by `done` are for."""

    async def done(self, session: Session, said: str, query: Any) -> Updates:
        """Return the updates of the page after a change."""

    async def thumbnails(self, ids: list[int], side: int = 96) -> dict[int, str]:
        """Return thumbnails of examples by id; empty if the run does not take pictures."""


class ReviewTab:
    """A tab with a list of examples, and buttons for the selected one."""

    def __init__(
        self, page: Host, title: str, order: Callable[[list[Opinion]], list[Opinion]]
    ) -> None:
        self._page, self._title, self._order = page, title, order
        with gr.Tab(title) as tab, gr.Row():
            with gr.Column(scale=5):
                self._list = gr.Dataframe(
                    headers=["example", "label", "the others say", "share"],
                    interactive=False,
                    wrap=True,
                    show_label=False,
                    column_widths=["52%", "19%", "19%", "10%"],
                    datatype=["html", "str", "str", "str"],
                    max_height=640,
                    buttons=[],
                    elem_classes="list",
                )
            with gr.Column(scale=3):
                self._card = card()
                self._right = gr.Button("This is right")
                self._others = gr.Button("It is …", variant="primary", elem_classes="beside")
                with gr.Row():
                    self._label = gr.Dropdown(
                        label="It is", allow_custom_value=True, value=None, scale=3
                    )
                    self._rename = gr.Button("Relabel", **BESIDE)
                self._drop = gr.Button("Forget this example", variant="stop")
        self._connect(tab)

    def _connect(self, tab: Any) -> None:
        shown, choice = self._shown, self._shown[1:]
        tab.select(self._found, None, shown, **ON)
        self._list.select(self._picked, None, choice, **QUIETLY)
        self._right.click(self._kept, None, shown, **QUIETLY)
        query, outputs = self._page.query, [*shown, *self._page.after_deed]
        self._others.click(self._agreed, query, outputs, **QUIETLY)
        self._rename.click(self._renamed, [query, self._label], outputs, **QUIETLY)
        self._drop.click(self._dropped, query, outputs, **QUIETLY)

    @property
    def _shown(self) -> list[Any]:
        """Components that the values returned by `_listed` are for."""
        return [self._list, self._card, self._others, self._label]

    async def _found(self, request: gr.Request) -> Updates:
        """Compute the votes and show the list; takes seconds, in a thread of its own."""
        found = await asyncio.to_thread(review.opinions, self._page.desk.classifier)
        queue = [each for each in self._order(found) if each.example.id not in self._page.settled]
        session = self._page.visits.session(request)
        session.queues[self._title], session.chosen = queue[:LISTED], 0
        return await self._listed(session)

    async def _listed(self, session: Session) -> Updates:
        """Return updates for the list and the selected example."""
        queue = session.queues.get(self._title, [])
        thumbs = await self._page.thumbnails([each.example.id for each in queue])
        table = [
            (
                rendering.shown(each.example.id, each.example.text, thumbs, most=600),
                each.example.label,
                each.label,
                f"{each.share:.0%}",
            )
            for each in queue
        ]
        return (table, *await self._choice(session))

    async def _choice(self, session: Session) -> Updates:
        """Return updates for the selected example and its buttons."""
        queue = session.queues.get(self._title, [])
        if not queue:
            nothing = '<div class="mbpa quiet">Nothing is left to look at.</div>'
            return nothing, gr.Button("It is …", interactive=False), gr.Dropdown(value=None)
        session.chosen = min(session.chosen, len(queue) - 1)
        opinion = queue[session.chosen]
        agrees = opinion.label == opinion.example.label
        return (
            rendering.opinion(opinion, await self._page.thumbnails([opinion.example.id], side=320)),
            gr.Button("It is …" if agrees else f"It is {opinion.label}", interactive=not agrees),
            gr.Dropdown(choices=sorted(self._page.desk.classifier.labels), value=None),
        )

    async def _picked(self, event: gr.SelectData, request: gr.Request) -> Updates:
        session = self._page.visits.session(request)
        session.chosen = event.index[0]
        return await self._choice(session)

    async def _kept(self, request: gr.Request) -> Updates:
        session, opinion = self._at(request)
        self._page.settled.add(opinion.example.id)
        session.settle(self._title, opinion)
        return await self._listed_after(session)

    async def _agreed(self, query: Any, request: gr.Request) -> Updates:
        return await self._renamed(query, self._at(request)[1].label, request)

    async def _renamed(self, query: Any, label: str | None, request: gr.Request) -> Updates:
        if not label:
            raise refusal("say which label it is")
        session, opinion = self._at(request)
        deed = await told(self._page.desk.relabel(opinion.example.id, label))
        self._page.settled.update(deed.added)
        return await self._after(session, opinion, deed, query)

    async def _dropped(self, query: Any, request: gr.Request) -> Updates:
        session, opinion = self._at(request)
        deed = await told(self._page.desk.forget(opinion.example.id))
        return await self._after(session, opinion, deed, query)

    async def _after(self, session: Session, opinion: Opinion, deed: Deed, query: Any) -> Updates:
        session.deeds.append(deed)
        session.settle(self._title, opinion)
        page = await self._page.done(session, deed.said, query)
        return (*await self._listed_after(session), *page)

    async def _listed_after(self, session: Session) -> Updates:
        """Return the updated list after a change; skip it if it cannot be shown."""
        try:
            return await self._listed(session)
        except gr.Error:
            return (gr.skip(),) * len(self._shown)

    def _at(self, request: gr.Request) -> tuple[Session, Opinion]:
        """Return the visitor's session and the example selected in it."""
        session = self._page.visits.session(request)
        queue = session.queues.get(self._title, [])
        if not 0 <= session.chosen < len(queue):
            raise refusal("choose an example first")
        return session, queue[session.chosen]
