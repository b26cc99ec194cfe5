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
from mbpa.explorer.lessons import Deed, Desk
from mbpa.explorer.pictures import Map
from mbpa.explorer.review import Opinion
from mbpa.serve.batching import Overloaded
from mbpa.serve.classifier import Classifier
from mbpa.serve.journal import InputError, JournalError

try:
    import gradio as gr
except ImportError as error:
    raise MissingExtraError("the page", extra="explore") from error

PATH = "/explore"
LISTED = 30  # examples of a review list
MOST_SESSIONS = 1000  # whose deeds are remembered
_ON: dict[str, Any] = {"api_visibility": "private", "concurrency_limit": None}
_QUIETLY: dict[str, Any] = {**_ON, "show_progress": "hidden"}
Done = TypeVar("Done")
Updates = tuple[Any, ...]
_BESIDE: dict[str, Any] = {"scale": 0, "min_width": 120, "size": "md", "elem_classes": "beside"}

STYLE = (
    pictures.STYLE
    + """
.gradio-container {max-width: 1240px !important; margin: 0 auto !important}
footer {display: none !important}
.block.card {border: 1px solid var(--border-color-primary); border-radius: var(--radius-lg);
  padding: 6px; background: var(--block-background-fill)}
#title .html-container {padding: 0}
.beside {align-self: center; overflow-wrap: anywhere}
#said {align-self: center; text-align: right}
.list * {font-family: var(--font) !important}
"""
)


def mount(app: FastAPI, classifier: Classifier) -> FastAPI:
    """Put the page on the app of a service; it asks for the service's token if there is one."""
    # Gradio would summarise all events in a table of pandas after each of them, for nobody.
    os.environ.setdefault("GRADIO_ANALYTICS_CACHE_FREQUENCY", str(10**9))
    service = app.state.service
    assert service.classifier is classifier
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
        max_file_size=1,  # there is nothing to upload
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
        self.settled: set[int] = set()
        """Examples that somebody has found right."""
        self._sessions: dict[str, _Session] = {}
        with gr.Blocks(title="mbpa explorer", analytics_enabled=False) as self.blocks:
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

    async def done(self, session: _Session, said: str, sentence: str) -> Updates:
        """The page after a deed; the sentence is asked again, so that one sees what it did."""
        try:
            shown = await self._look(sentence)
        except gr.Error:  # the deed is done all the same, and can be undone
            shown = (gr.skip(),) * len(self._shown)
        return (
            escape(said),
            gr.Button(interactive=bool(session.deeds)),
            pictures.title(self.desk.classifier.stats()),
            gr.Dropdown(choices=sorted(self.desk.classifier.labels)),
            *shown,
        )

    def _lay_out_asking(self) -> None:
        with gr.Row():
            with gr.Column(scale=5):
                with gr.Row():
                    self.sentence = gr.Textbox(
                        label="Sentence", placeholder="Type a sentence", scale=5, autofocus=True
                    )
                    self._ask = gr.Button("Ask", variant="primary", **_BESIDE)
                self._answer = _card("answer")
                with gr.Row():
                    self._correct = gr.Dropdown(
                        label="Wrong? This sentence is", allow_custom_value=True, value=None
                    )
                    self._teach_it = gr.Button("Correct it", **_BESIDE)
                self._memories = _card("memories")
            with gr.Column(scale=4):
                self._picture = _card("map")
                with gr.Group():
                    self._label = gr.Textbox(label="Teach a label", placeholder="new or known")
                    self._lines = gr.Textbox(
                        label="Examples, one a line", lines=4, max_lines=12, placeholder="…"
                    )
                self._teach = gr.Button("Teach", variant="primary")

    @property
    def _shown(self) -> list[Any]:
        return [self._answer, self._memories, self._picture]

    def _connect(self) -> None:
        asking = [self.sentence.submit, self._ask.click]
        gr.on(asking, self._asked, self.sentence, self._shown, **_QUIETLY)
        inputs, outputs = [self.sentence, self._label, self._lines], self.after_deed
        self._teach.click(self._taught, inputs, [*outputs, self._lines], **_QUIETLY)
        self._teach_it.click(self._corrected, [self.sentence, self._correct], outputs, **_QUIETLY)
        self._undo.click(self._undone, self.sentence, outputs, **_QUIETLY)
        self.blocks.load(self._opened, self.sentence, outputs, **_QUIETLY)

    async def _opened(self, sentence: str, request: gr.Request) -> Updates:
        return await self.done(self.session(request), "", sentence)

    async def _asked(self, sentence: str) -> Updates:
        if not sentence.strip():
            raise _refusal("type a sentence first")
        return await self._look(sentence)

    async def _taught(self, sentence: str, label: str, lines: str, request: gr.Request) -> Updates:
        session, deed = self.session(request), await _told(self.desk.teach(label, lines))
        session.deeds.append(deed)
        return (*await self.done(session, deed.said, sentence), "")

    async def _corrected(self, sentence: str, label: str | None, request: gr.Request) -> Updates:
        if not label:
            raise _refusal("say which label it is")
        one_line = " ".join(sentence.split())
        session, deed = self.session(request), await _told(self.desk.teach(label, one_line))
        session.deeds.append(deed)
        return await self.done(session, deed.said, sentence)

    async def _undone(self, sentence: str, request: gr.Request) -> Updates:
        session = self.session(request)
        if not session.deeds:
            raise _refusal("there is nothing to undo")
        deed = session.deeds.pop()
        try:
            await _told(self.desk.undo(deed))
        except gr.Error:
            session.deeds.append(deed)
            raise
        return await self.done(session, f"Undone: {deed.said}", sentence)

    async def _look(self, sentence: str) -> Updates:
        """The answer, its memories and the map; without a sentence, the map alone."""
        if not sentence.strip():
            hint = "Type a sentence, and see what it is taken for and why."
            if not self.desk.classifier.takes_texts:
                hint = "This run takes embeddings only: ask it over HTTP."
            quiet = f'<div class="mbpa quiet">{hint}</div>'
            return quiet, "", await asyncio.to_thread(self._map.around)
        reason = await _told(self.desk.ask(sentence))
        picture = await asyncio.to_thread(self._map.around, sentence, reason)
        threshold = self.desk.classifier.threshold
        return pictures.answer(reason, threshold), pictures.memories(reason), picture


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
        sentence, outputs = self._page.sentence, [*shown, *self._page.after_deed]
        self._others.click(self._agreed, sentence, outputs, **_QUIETLY)
        self._rename.click(self._renamed, [sentence, self._label], outputs, **_QUIETLY)
        self._drop.click(self._dropped, sentence, outputs, **_QUIETLY)

    async def _found(self, request: gr.Request) -> Updates:
        """Ask the examples about each other; a matter of seconds, in a thread of its own."""
        found = await asyncio.to_thread(review.opinions, self._page.desk.classifier)
        queue = [each for each in self._order(found) if each.example.id not in self._page.settled]
        session = self._page.session(request)
        session.queues[self._title], session.chosen = queue[:LISTED], 0
        return self._listed(session)

    def _listed(self, session: _Session) -> Updates:
        """The list and the example that is chosen."""
        table = [
            (
                each.example.text or f"example {each.example.id}",
                each.example.label,
                each.label,
                f"{each.share:.0%}",
            )
            for each in session.queues.get(self._title, ())
        ]
        return (table, *self._choice(session))

    def _choice(self, session: _Session) -> Updates:
        """The example that is chosen, and what may be said of it."""
        queue = session.queues.get(self._title, [])
        if not queue:
            nothing = '<div class="mbpa quiet">Nothing is left to look at.</div>'
            return nothing, gr.Button("It is …", interactive=False), gr.Dropdown(value=None)
        session.chosen = min(session.chosen, len(queue) - 1)
        opinion = queue[session.chosen]
        agrees = opinion.label == opinion.example.label
        return (
            pictures.opinion(opinion),
            gr.Button("It is …" if agrees else f"It is {opinion.label}", interactive=not agrees),
            gr.Dropdown(choices=sorted(self._page.desk.classifier.labels), value=None),
        )

    async def _picked(self, event: gr.SelectData, request: gr.Request) -> Updates:
        session = self._page.session(request)
        session.chosen = event.index[0]
        return self._choice(session)

    async def _kept(self, request: gr.Request) -> Updates:
        session, opinion = self._at(request)
        self._page.settled.add(opinion.example.id)
        session.settle(self._title, opinion)
        return self._listed(session)

    async def _agreed(self, sentence: str, request: gr.Request) -> Updates:
        return await self._renamed(sentence, self._at(request)[1].label, request)

    async def _renamed(self, sentence: str, label: str | None, request: gr.Request) -> Updates:
        if not label:
            raise _refusal("say which label it is")
        session, opinion = self._at(request)
        deed = await _told(self._page.desk.relabel(opinion.example.id, label))
        self._page.settled.update(deed.added)
        return await self._after(session, opinion, deed, sentence)

    async def _dropped(self, sentence: str, request: gr.Request) -> Updates:
        session, opinion = self._at(request)
        deed = await _told(self._page.desk.forget(opinion.example.id))
        return await self._after(session, opinion, deed, sentence)

    async def _after(
        self, session: _Session, opinion: Opinion, deed: Deed, sentence: str
    ) -> Updates:
        session.deeds.append(deed)
        session.settle(self._title, opinion)
        page = await self._page.done(session, deed.said, sentence)
        return (*self._listed(session), *page)

    def _at(self, request: gr.Request) -> tuple[_Session, Opinion]:
        """Who asks, and the example that they look at."""
        session = self._page.session(request)
        queue = session.queues.get(self._title, [])
        if not 0 <= session.chosen < len(queue):
            raise _refusal("choose an example first")
        return session, queue[session.chosen]
