"""The tab that lists what was taught, filters it and takes it back.

The list comes from the journal, so it also shows what was taught before the page was loaded, by
others, or over HTTP.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import gradio as gr

from mbpa.explorer import rendering
from mbpa.explorer.forms import QUIET_EVENT_OPTIONS, Updates, make_card, make_list, show_busy
from mbpa.explorer.review_tab import Host
from mbpa.explorer.sessions import Session, make_refusal, show_errors
from mbpa.serve import schemas
from mbpa.serve.journal import ListedExample

EXAMPLES_PER_PAGE = 50
TITLE = "Taught examples"
NOTHING_TAUGHT = """Nothing has been taught since the training. What you teach or correct in the tab
“Ask and teach”, and what is taught over HTTP, is listed here, and can be taken back."""
ALL_LABELS = "all labels"
PERIODS = {
    "any time": None,
    "the last hour": timedelta(hours=1),
    "the last day": timedelta(days=1),
    "the last week": timedelta(weeks=1),
}


class TaughtTab:
    """A tab with the examples that were taught, newest first."""

    def __init__(self, page: Host) -> None:
        self._page = page
        with gr.Tab("Taught") as tab, gr.Row():
            with gr.Column(scale=5):
                with gr.Row():
                    self._label = gr.Dropdown([ALL_LABELS], value=ALL_LABELS, label="Label")
                    self._period = gr.Dropdown(
                        list(PERIODS), value=next(iter(PERIODS)), label="Taught within"
                    )
                self._list = make_list()
                self._more = gr.Button("Show older ones", visible=False)
            with gr.Column(scale=3):
                self._card = make_card("taught")
                self._one = gr.Button("Take this one back", variant="stop", interactive=False)
                self._all = gr.Button("Take back all that are listed", interactive=False)
        self._connect(tab)

    def _connect(self, tab: Any) -> None:
        filters, shown, listing = self._filters, self._list_outputs, show_busy(self._list)
        tab.select(self._on_open, filters, [self._label, *shown], **listing)
        for each in filters:
            each.input(self._on_filter, filters, shown, **listing)
        self._more.click(self._on_more, filters, shown, **listing)
        self._list.select(self._on_pick, None, self._choice_outputs, **QUIET_EVENT_OPTIONS)
        inputs, outputs = [self._page.query, *filters], [*shown, *self._page.change_outputs]
        self._one.click(self._on_take_one, inputs, outputs, **listing)
        self._all.click(self._on_take_all, inputs, outputs, **listing)

    def refresh_after(self, event: Any) -> None:
        """Show the list again after an event that may have changed it."""
        event.then(
            self._on_open,
            self._filters,
            [self._label, *self._list_outputs],
            **QUIET_EVENT_OPTIONS,
        )

    @property
    def _filters(self) -> list[Any]:
        return [self._label, self._period]

    @property
    def _choice_outputs(self) -> list[Any]:
        return [self._card, self._one]

    @property
    def _list_outputs(self) -> list[Any]:
        """Components that the values returned by `show_list` are for."""
        return [self._list, self._more, self._all, *self._choice_outputs]

    async def show_list(self, session: Session, label: str, period: str, count: int) -> Updates:
        """Read the newest examples that pass the filters, and return updates that show them."""
        lasting = PERIODS.get(period)
        found: list[ListedExample] = []
        has_more = True
        while has_more and len(found) < count:
            query = schemas.ExamplesQuery(
                label=None if label == ALL_LABELS else label,
                since=None if lasting is None else datetime.now(UTC) - lasting,
                origin="taught",
                order="newest",
                limit=min(count - len(found), schemas.MAX_LISTED_PER_CALL),
                cursor=found[-1].id if found else None,
            )
            page = await show_errors(self._page.actions.list_taught(query))
            has_more = len(page) > query.limit
            found += page[: query.limit]
        session.taught = found
        thumbs = await self._page.make_thumbnails([each.id for each in found])
        chosen = self._find_chosen(session)
        rows = [
            rendering.Row(
                str(each.id),
                (each.label, _describe_origin(each)),
                rendering.describe_example(
                    each.id, each.text, thumbs, rendering.MAX_LONG_CHARACTERS
                ),
            )
            for each in found
        ]
        is_filtered = label != ALL_LABELS or lasting is not None
        nothing = "Nothing that was taught passes this filter." if is_filtered else NOTHING_TAUGHT
        listed = rendering.render_rows(
            TITLE, rows, None if chosen is None else str(chosen.id), nothing
        )
        all_of_them = f"Take back all {len(found)} that are listed"
        return (
            listed,
            gr.Button(visible=has_more),
            gr.Button(all_of_them if len(found) > 1 else "Take back all", interactive=bool(found)),
            *await self._show_chosen(session),
        )

    async def _show_chosen(self, session: Session) -> Updates:
        """Return updates for the selected example and its button."""
        chosen = self._find_chosen(session)
        if chosen is None:
            note = "Choose an example to take it back."
            shown = rendering.render_note(note) if session.taught else ""
            return shown, gr.Button(interactive=False)
        thumbs = await self._page.make_thumbnails([chosen.id], side=320)
        return rendering.render_taught(chosen, thumbs), gr.Button(interactive=True)

    def _find_chosen(self, session: Session) -> ListedExample | None:
        return next((each for each in session.taught if each.id == session.chosen_taught), None)

    async def _on_open(self, label: str, period: str, request: gr.Request) -> Updates:
        session = self._page.sessions.get_session(request)
        labels = [ALL_LABELS, *sorted(self._page.actions.classifier.labels)]
        label = label if label in labels else ALL_LABELS
        shown = await self.show_list(session, label, period, EXAMPLES_PER_PAGE)
        return (gr.Dropdown(choices=labels, value=label), *shown)

    async def _on_filter(self, label: str, period: str, request: gr.Request) -> Updates:
        session = self._page.sessions.get_session(request)
        return await self.show_list(session, label, period, EXAMPLES_PER_PAGE)

    async def _on_more(self, label: str, period: str, request: gr.Request) -> Updates:
        session = self._page.sessions.get_session(request)
        return await self.show_list(session, label, period, len(session.taught) + EXAMPLES_PER_PAGE)

    async def _on_pick(self, event: gr.SelectData, request: gr.Request) -> Updates:
        session = self._page.sessions.get_session(request)
        ids = {str(each.id): each.id for each in session.taught}
        session.chosen_taught = ids.get(str(event.index), session.chosen_taught)
        return await self._show_chosen(session)

    async def _on_take_one(
        self, query: Any, label: str, period: str, request: gr.Request
    ) -> Updates:
        session = self._page.sessions.get_session(request)
        chosen = self._find_chosen(session)
        if chosen is None:
            raise make_refusal("choose an example first")
        return await self._take_back(session, [chosen.id], query, label, period)

    async def _on_take_all(
        self, query: Any, label: str, period: str, request: gr.Request
    ) -> Updates:
        session = self._page.sessions.get_session(request)
        if not session.taught:
            raise make_refusal("nothing is listed")
        ids = [each.id for each in session.taught]
        return await self._take_back(session, ids, query, label, period)

    async def _take_back(
        self, session: Session, ids: list[int], query: Any, label: str, period: str
    ) -> Updates:
        count = max(EXAMPLES_PER_PAGE, len(session.taught))
        change = await show_errors(self._page.actions.take_back(ids, by=session.by))
        session.record(change)
        page = await self._page.update_after(session, change.description, query)
        try:
            shown = await self.show_list(session, label, period, count)
        except gr.Error:  # the change has been made nevertheless, and can be undone
            shown = (gr.skip(),) * len(self._list_outputs)
        return (*shown, *page)


def _describe_origin(example: ListedExample) -> str:
    when = rendering.format_minute(example.taught_ms)
    by = f", by {example.by}" if example.by else ""
    return f"{when} UTC{by}" if when else ""
