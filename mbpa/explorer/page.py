"""The page: layout, and what happens when something is pressed.

Offline: fonts are the system's, nothing is reported or looked up, pictures are part of the page.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from html import escape
from typing import Any, TypeVar

from fastapi import FastAPI

from mbpa.errors import MissingExtraError
from mbpa.explorer import pictures, review
from mbpa.explorer.lessons import Deed, Desk, address, thumbnails
from mbpa.explorer.pictures import Map
from mbpa.explorer.review import Opinion
from mbpa.serve.answers import MOST_FILE
from mbpa.serve.batching import Overloaded
from mbpa.serve.classifier import Classifier
from mbpa.serve.journal import InputError, JournalError

try:
    import gradio as gr

    from mbpa.explorer.forms import Pictures, Sentences
except ImportError as error:
    raise MissingExtraError("the page", extra="explore") from error

PATH = "/explore"
LISTED = 30  # examples of a review list
MOST_SESSIONS = 1000  # whose deeds are remembered
UPLOADED = 86_400  # seconds that a picture may be asked about again after it was dropped
_ON: dict[str, Any] = {"api_visibility": "private", "concurrency_limit": None}
_QUIETLY: dict[str, Any] = {**_ON, "show_progress": "hidden"}
Done = TypeVar("Done")
Updates = tuple[Any, ...]
_BESIDE: dict[str, Any] = {"scale": 0, "min_width": 120, "size": "md", "elem_classes": "beside"}

STYLE = (
    pictures.STYLE
    + """
.gradio-container {width: 100% !important; max-width: 1240px !important; margin: 0 auto !important}
footer {display: none !important}
.block.card {border: 1px solid var(--border-color-primary); border-radius: var(--radius-lg);
  padding: 6px; background: var(--block-background-fill)}
#title .html-container {padding: 0}
.beside {align-self: center; overflow-wrap: anywhere}
#said {align-self: center; text-align: right}
.list * {font-family: var(--font) !important}
.block.drop {border: 1px dashed var(--border-color-primary) !important}
.list img {width: 48px; height: 48px; object-fit: contain; border-radius: 4px}
"""
)


def mount(app: FastAPI, classifier: Classifier) -> FastAPI:
    """Put the page on the app of a service; it asks for the service's token if there is one."""
    # Gradio would summarise all events in a table of pandas after each of them, for nobody.
    os.environ.setdefault("GRADIO_ANALYTICS_CACHE_FREQUENCY", str(10**9))
    service = app.state.service
    assert service.classifier is classifier
    app.state.home = PATH
    token = service.settings.token
    system = ("ui-sans-serif", "system-ui", "sans-serif")
    theme = gr.themes.Default(
        primary_hue="indigo",
        secondary_hue="indigo",
        neutral_hue="slate",
        radius_size="lg",
        font=system,
        font_mono=("ui-monospace", "monospace"),
    )
    mounted: FastAPI = gr.mount_gradio_app(
        app,
        _Page(Desk(service)).blocks,
        PATH,
        theme=theme,
        css=STYLE,
        auth=_login(token) if token else None,
        auth_message="The password is the token of the service; any name will do.",
        footer_links=[],
        run_history=False,
        show_error=True,
        max_file_size=MOST_FILE if classifier.takes == "images" else 1,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        enable_monitoring=False,
    )
    return mounted


def _card(id: str | None = None) -> Any:
    """A frame for pictures."""
    return gr.HTML(elem_id=id, elem_classes="card", apply_default_css=False)


def _login(token: str) -> Callable[[str, str], bool]:
    def is_right(_: str, password: str) -> bool:
        return secrets.compare_digest(password.encode(), token.encode())

    return is_right


async def _told(work: Awaitable[Done]) -> Done:
    """What comes of it; what cannot be is told to the visitor, and the page stays as it is."""
    try:
        return await work
    except Overloaded as error:
        raise _refusal("too much at once, try again") from error
    except (InputError, JournalError) as error:
        raise _refusal(str(error)) from error


def _refusal(why: str) -> gr.Error:
    said = escape(why[:1].upper() + why[1:] + ".")
    return gr.Error(said, title="Not done", print_exception=False)


@dataclass
class _Session:
    """What one visitor has done and looks at.

    Kept here and not in components of Gradio, for which every open page would hold a connection.
    """

    deeds: list[Deed] = field(default_factory=list)
    queues: dict[str, list[Opinion]] = field(default_factory=dict)
    """Of the review lists, by their titles."""
    chosen: int = 0
    """Place in the list that is looked at."""

    def settle(self, title: str, opinion: Opinion) -> None:
        """Take it from a list, which may be another by now."""
        self.queues[title] = [each for each in self.queues.get(title, ()) if each != opinion]


class _Page:
    """The page, of which all callbacks run in the event loop of the service."""

    def __init__(self, desk: Desk) -> None:
        self.desk, self._map = desk, Map(desk.classifier)
        self._form = Pictures() if desk.classifier.takes == "images" else Sentences()
        self.settled: set[int] = set()
        """Examples that somebody has found right."""
        self._sessions: dict[str, _Session] = {}
        with gr.Blocks(
            title="mbpa explorer", analytics_enabled=False, delete_cache=(UPLOADED // 24, UPLOADED)
        ) as self.blocks:
            with gr.Row():
                with gr.Column(scale=4, min_width=300):
                    self._title = gr.HTML(elem_id="title", apply_default_css=False)
                with gr.Column(scale=5), gr.Row():
                    self._said = gr.HTML(elem_id="said", apply_default_css=False)
                    self._undo = gr.Button("Undo", interactive=False, **_BESIDE)
            with gr.Tab("Ask and teach"):
                self._lay_out_asking()
            _Review(self, "Least certain", review.least_certain)
            _Review(self, "Probably mislabelled", review.probably_mislabelled)
            self._connect()

    def session(self, request: gr.Request) -> _Session:
        """Of whoever asks; the least recent are forgotten when there are too many."""
        name = request.session_hash or ""
        session = self._sessions.pop(name, None) or _Session()
        self._sessions[name] = session
        if len(self._sessions) > MOST_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        return session

    @property
    def after_deed(self) -> list[Any]:
        """What `done` gives values for."""
        return [self._said, self._undo, self._title, self._correct, *self._shown]

    async def done(self, session: _Session, said: str, query: Any) -> Updates:
        """The page after a deed; what was asked is asked again, so that one sees what it did."""
        try:
            shown = await self._look(query)
        except gr.Error:  # the deed is done all the same, and can be undone
            shown = (gr.skip(),) * len(self._shown)
        return (
            escape(said),
            gr.Button(interactive=bool(session.deeds)),
            pictures.title(self.desk.classifier.stats()),
            gr.Dropdown(choices=sorted(self.desk.classifier.labels)),
            *shown,
        )

    @property
    def shows_pictures(self) -> bool:
        return isinstance(self._form, Pictures)

    async def thumbnails(self, found: list[Opinion], side: int = 96) -> dict[int, str]:
        """Of the examples that these are about."""
        ids = [each.example.id for each in found]
        return await asyncio.to_thread(thumbnails, self.desk.classifier, ids, side)

    def _lay_out_asking(self) -> None:
        with gr.Row():
            with gr.Column(scale=5):
                self._form.lay_out_query(_BESIDE)
                self._answer = _card("answer")
                with gr.Row():
                    self._correct = gr.Dropdown(
                        label=f"Wrong? This {self._form.noun} is",
                        allow_custom_value=True,
                        value=None,
                    )
                    self._teach_it = gr.Button("Correct it", **_BESIDE)
                self._memories = _card("memories")
            with gr.Column(scale=4):
                self._picture = _card("map")
                with gr.Group():
                    self._label = gr.Textbox(label="Teach a label", placeholder="new or known")
                    self._form.lay_out_examples()
                self._teach = gr.Button("Teach", variant="primary")

    @property
    def _shown(self) -> list[Any]:
        return [self._answer, self._memories, self._picture]

    @property
    def query(self) -> Any:
        """The component that holds what is asked."""
        return self._form.query

    def _connect(self) -> None:
        gr.on(self._form.asking, self._asked, self.query, self._shown, **_QUIETLY)
        outputs, examples = self.after_deed, self._form.examples
        inputs = [self.query, self._label, examples]
        self._teach.click(self._taught, inputs, [*outputs, examples], **_QUIETLY)
        self._teach_it.click(self._corrected, [self.query, self._correct], outputs, **_QUIETLY)
        self._undo.click(self._undone, self.query, outputs, **_QUIETLY)
        self.blocks.load(self._opened, self.query, outputs, **_QUIETLY)

    async def _opened(self, query: Any, request: gr.Request) -> Updates:
        return await self.done(self.session(request), "", query)

    async def _asked(self, query: Any) -> Updates:
        if isinstance(query, str) and not query.strip():
            raise _refusal("type a sentence first")
        return await self._look(query)

    async def _taught(self, query: Any, label: str, given: Any, request: gr.Request) -> Updates:
        session, deed = self.session(request), await _told(self.desk.teach(label, given or ""))
        session.deeds.append(deed)
        return (*await self.done(session, deed.said, query), self._form.nothing)

    async def _corrected(self, query: Any, label: str | None, request: gr.Request) -> Updates:
        if not label:
            raise _refusal("say which label it is")
        example = self._form.as_example(query)
        session, deed = self.session(request), await _told(self.desk.teach(label, example))
        session.deeds.append(deed)
        return await self.done(session, deed.said, query)

    async def _undone(self, query: Any, request: gr.Request) -> Updates:
        session = self.session(request)
        if not session.deeds:
            raise _refusal("there is nothing to undo")
        deed = session.deeds.pop()
        try:
            await _told(self.desk.undo(deed))
        except gr.Error:
            session.deeds.append(deed)
            raise
        return await self.done(session, f"Undone: {deed.said}", query)

    async def _look(self, query: Any) -> Updates:
        """The answer, its memories and the map; without a query, the map alone."""
        item = await _told(self._form.item(self.desk, query))
        if item is None:
            quiet = f'<div class="mbpa quiet">{self._hint}</div>'
            return quiet, "", await asyncio.to_thread(self._map.around)
        reason = await _told(self.desk.ask(item))
        thumbs = await asyncio.to_thread(
            thumbnails, self.desk.classifier, [near.id for near in reason.neighbors]
        )
        drawn = await asyncio.to_thread(self._map.around, item, reason, thumbs)
        asked = address(item) if isinstance(item, bytes) else None
        shown = pictures.answer(reason, self.desk.classifier.threshold, asked)
        return shown, pictures.memories(reason, thumbs), drawn

    @property
    def _hint(self) -> str:
        if self.desk.classifier.takes is None:
            return "This run takes embeddings only: ask it over HTTP."
        return f"{self._form.hint}, and see what it is taken for and why."


class _Review:
    """A tab: a list of examples, and what is to be done with the one that is chosen."""

    def __init__(
        self, page: _Page, title: str, order: Callable[[list[Opinion]], list[Opinion]]
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
                    datatype=["html" if page.shows_pictures else "str", "str", "str", "str"],
                    max_height=640,
                    buttons=[],
                    elem_classes="list",
                )
            with gr.Column(scale=3):
                self._card = _card()
                self._right = gr.Button("This is right")
                self._others = gr.Button("It is …", variant="primary", elem_classes="beside")
                with gr.Row():
                    self._label = gr.Dropdown(
                        label="It is", allow_custom_value=True, value=None, scale=3
                    )
                    self._rename = gr.Button("Relabel", **_BESIDE)
                self._drop = gr.Button("Forget this example", variant="stop")
        self._connect(tab)

    def _connect(self, tab: Any) -> None:
        choice = [self._card, self._others, self._label]
        shown = [self._list, *choice]
        tab.select(self._found, None, shown, **_ON)
        self._list.select(self._picked, None, choice, **_QUIETLY)
        self._right.click(self._kept, None, shown, **_QUIETLY)
        query, outputs = self._page.query, [*shown, *self._page.after_deed]
        self._others.click(self._agreed, query, outputs, **_QUIETLY)
        self._rename.click(self._renamed, [query, self._label], outputs, **_QUIETLY)
        self._drop.click(self._dropped, query, outputs, **_QUIETLY)

    async def _found(self, request: gr.Request) -> Updates:
        """Ask the examples about each other; a matter of seconds, in a thread of its own."""
        found = await asyncio.to_thread(review.opinions, self._page.desk.classifier)
        queue = [each for each in self._order(found) if each.example.id not in self._page.settled]
        session = self._page.session(request)
        session.queues[self._title], session.chosen = queue[:LISTED], 0
        return await self._listed(session)

    async def _listed(self, session: _Session) -> Updates:
        """The list and the example that is chosen."""
        queue = session.queues.get(self._title, [])
        thumbs = await self._page.thumbnails(queue)
        table = [
            (
                pictures.shown(each.example.id, None, thumbs)
                if each.example.id in thumbs
                else each.example.text or f"example {each.example.id}",
                each.example.label,
                each.label,
                f"{each.share:.0%}",
            )
            for each in queue
        ]
        return (table, *await self._choice(session))

    async def _choice(self, session: _Session) -> Updates:
        """The example that is chosen, and what may be said of it."""
        queue = session.queues.get(self._title, [])
        if not queue:
            nothing = '<div class="mbpa quiet">Nothing is left to look at.</div>'
            return nothing, gr.Button("It is …", interactive=False), gr.Dropdown(value=None)
        session.chosen = min(session.chosen, len(queue) - 1)
        opinion = queue[session.chosen]
        agrees = opinion.label == opinion.example.label
        return (
            pictures.opinion(opinion, await self._page.thumbnails([opinion], side=320)),
            gr.Button("It is …" if agrees else f"It is {opinion.label}", interactive=not agrees),
            gr.Dropdown(choices=sorted(self._page.desk.classifier.labels), value=None),
        )

    async def _picked(self, event: gr.SelectData, request: gr.Request) -> Updates:
        session = self._page.session(request)
        session.chosen = event.index[0]
        return await self._choice(session)

    async def _kept(self, request: gr.Request) -> Updates:
        session, opinion = self._at(request)
        self._page.settled.add(opinion.example.id)
        session.settle(self._title, opinion)
        return await self._listed(session)

    async def _agreed(self, query: Any, request: gr.Request) -> Updates:
        return await self._renamed(query, self._at(request)[1].label, request)

    async def _renamed(self, query: Any, label: str | None, request: gr.Request) -> Updates:
        if not label:
            raise _refusal("say which label it is")
        session, opinion = self._at(request)
        deed = await _told(self._page.desk.relabel(opinion.example.id, label))
        self._page.settled.update(deed.added)
        return await self._after(session, opinion, deed, query)

    async def _dropped(self, query: Any, request: gr.Request) -> Updates:
        session, opinion = self._at(request)
        deed = await _told(self._page.desk.forget(opinion.example.id))
        return await self._after(session, opinion, deed, query)

    async def _after(self, session: _Session, opinion: Opinion, deed: Deed, query: Any) -> Updates:
        session.deeds.append(deed)
        session.settle(self._title, opinion)
        page = await self._page.done(session, deed.said, query)
        return (*await self._listed(session), *page)

    def _at(self, request: gr.Request) -> tuple[_Session, Opinion]:
        """Who asks, and the example that they look at."""
        session = self._page.session(request)
        queue = session.queues.get(self._title, [])
        if not 0 <= session.chosen < len(queue):
            raise _refusal("choose an example first")
        return session, queue[session.chosen]
