"""The page: its layout and its event handlers.

It works offline: it uses the system's fonts, sends and fetches nothing, and embeds its pictures.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from html import escape
from pathlib import Path
from typing import Any

from mbpa.errors import MissingExtraError
from mbpa.explorer import rendering, review
from mbpa.explorer.rendering import Map
from mbpa.serve.answers import MOST_FILE
from mbpa.serve.classifier import Classifier

try:
    import gradio as gr
    from fastapi import FastAPI
    from starlette.routing import Mount

    from mbpa.explorer.actions import Deed, Desk, address, thumbnails
    from mbpa.explorer.forms import BESIDE, QUIETLY, Pictures, Sentences, Updates, card
    from mbpa.explorer.login import Guard
    from mbpa.explorer.review_tab import ReviewTab
    from mbpa.explorer.sessions import Session, Visits, refusal, told
    from mbpa.explorer.uploads import MOST_BYTES, Entrance, Uploads
except ImportError as error:
    raise MissingExtraError("the page", extra="explore") from error

PATH = "/explore"
UPLOADED = 86_400  # seconds for which a dropped picture can be used again

STYLE = (
    rendering.STYLE
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
    """Mount the page on the app of a service; it requires the service's token if there is one."""
    # Gradio would summarise all events in a pandas table after each of them, to no use.
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
    takes_files = classifier.takes == "images"
    uploads = Uploads.beside(classifier.journal, MOST_BYTES if takes_files else 0)
    mounted: FastAPI = gr.mount_gradio_app(
        app,
        _Page(Desk(service), uploads).blocks,
        PATH,
        theme=theme,
        css=STYLE,
        auth=_login(token) if token else None,
        auth_message="The password is the token of the service; any name will do.",
        footer_links=[],
        run_history=False,
        show_error=True,
        max_file_size=MOST_FILE if takes_files else 1,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        enable_monitoring=False,
    )
    _closing(mounted, uploads)
    most = service.settings.body_bytes
    mounted.add_middleware(Entrance, path=PATH, uploads=uploads, most=most)
    if token:
        mounted.add_middleware(Guard, path=PATH, is_known=_find_logins(mounted))
    return mounted


def _login(token: str) -> Callable[[str, str], bool]:
    def is_right(_: str, password: str) -> bool:
        return secrets.compare_digest(password.encode(), token.encode())

    return is_right


def _find_logins(mounted: FastAPI) -> Callable[[Mapping[str, str]], bool]:
    """Return a function that tells whether cookies belong to a visitor who has logged in."""
    pages: list[Any] = [route.app for route in mounted.routes if isinstance(route, Mount)]
    (page,) = pages
    tokens, id = page.tokens, page.cookie_id
    names = f"access-token-{id}", f"access-token-unsecure-{id}"  # with TLS and without

    def is_known(cookies: Mapping[str, str]) -> bool:
        return any(cookies.get(name) in tokens for name in names)

    return is_known


async def _as_named(path: str) -> str:
    """Return the path unchanged.

    This replaces Gradio's handling of a file that a visitor names in any component, which copies
    the file from anywhere on this machine or fetches it from another host.
    """
    return path


def _closing(app: FastAPI, uploads: Uploads) -> None:
    """Delete uploaded files when the app shuts down."""
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        try:
            async with inner(app) as state:
                yield state
        finally:
            uploads.close()

    app.router.lifespan_context = lifespan


class _Page:
    """The page. All its callbacks run in the event loop of the service."""

    def __init__(self, desk: Desk, uploads: Uploads) -> None:
        self._form = Pictures(uploads) if desk.classifier.takes == "images" else Sentences()
        self.desk, self._map = desk, Map(desk.classifier, self._form.noun)
        self.settled: set[int] = set()
        """Ids of examples that a visitor has confirmed."""
        self.visits = Visits()
        with gr.Blocks(
            title="mbpa explorer", analytics_enabled=False, delete_cache=(UPLOADED // 24, UPLOADED)
        ) as self.blocks:
            with gr.Row():
                with gr.Column(scale=4, min_width=300):
                    self._title = gr.HTML(elem_id="title", apply_default_css=False)
                with gr.Column(scale=5), gr.Row():
                    self._said = gr.HTML(elem_id="said", apply_default_css=False)
                    self._undo = gr.Button("Undo", interactive=False, **BESIDE)
            with gr.Tab("Ask and teach"):
                self._lay_out_asking()
            ReviewTab(self, "Least certain", review.least_certain)
            ReviewTab(self, "Probably mislabelled", review.probably_mislabelled)
            self._connect()
        for part in self.blocks.blocks.values():
            part.async_move_resource_to_block_cache = _as_named

    @property
    def after_deed(self) -> list[Any]:
        """Components that the values returned by `done` are for."""
        return [self._said, self._undo, self._title, self._correct, *self._shown]

    async def done(self, session: Session, said: str, query: Any) -> Updates:
        """Return the updates after a change. The query is asked again to show the effect."""
        try:
            shown = await self._look(query)
        except gr.Error:  # the change has been made all the same, and can be undone
            shown = (gr.skip(),) * len(self._shown)
        return (
            escape(said),
            gr.Button(interactive=bool(session.deeds)),
            rendering.title(self.desk.classifier.stats()),
            gr.Dropdown(choices=sorted(self.desk.classifier.labels)),
            *shown,
        )

    async def thumbnails(self, ids: list[int], side: int = 96) -> dict[int, str]:
        """Return thumbnails of examples by id; empty if the run does not take pictures."""
        return await told(asyncio.to_thread(thumbnails, self.desk.classifier, ids, side))

    def _lay_out_asking(self) -> None:
        with gr.Row():
            with gr.Column(scale=5):
                self._form.lay_out_query()
                self._answer = card("answer")
                with gr.Row():
                    self._correct = gr.Dropdown(
                        label=f"Wrong? This {self._form.noun} is",
                        allow_custom_value=True,
                        value=None,
                    )
                    self._teach_it = gr.Button("Correct it", **BESIDE)
                self._memories = card("memories")
            with gr.Column(scale=4):
                self._picture = card("map")
                with gr.Group():
                    self._label = gr.Textbox(label="Teach a label", placeholder="new or known")
                    self._form.lay_out_examples()
                self._teach = gr.Button("Teach", variant="primary")

    @property
    def _shown(self) -> list[Any]:
        return [self._answer, self._memories, self._picture]

    @property
    def query(self) -> Any:
        """The component that holds the query."""
        return self._form.query

    def _connect(self) -> None:
        gr.on(self._form.asking, self._asked, self.query, self._shown, **QUIETLY)
        outputs, examples = self.after_deed, self._form.examples
        inputs = [self.query, self._label, examples]
        self._teach.click(self._taught, inputs, [*outputs, examples], **QUIETLY)
        self._teach_it.click(self._corrected, [self.query, self._correct], outputs, **QUIETLY)
        self._undo.click(self._undone, self.query, outputs, **QUIETLY)
        self.blocks.load(self._opened, self.query, outputs, **QUIETLY)

    async def _opened(self, query: Any, request: gr.Request) -> Updates:
        return await self.done(self.visits.session(request), "", query)

    async def _asked(self, query: Any) -> Updates:
        if isinstance(query, str) and not query.strip():
            raise refusal("type a sentence first")
        return await self._look(query)

    async def _taught(self, query: Any, label: str, given: Any, request: gr.Request) -> Updates:
        session = self.visits.session(request)
        deed = await told(self._learnt(label, lambda: self._form.lesson(given)))
        session.deeds.append(deed)
        self._form.drop(given, query)
        return (*await self.done(session, deed.said, query), self._form.nothing)

    async def _corrected(self, query: Any, label: str | None, request: gr.Request) -> Updates:
        if not label:
            raise refusal("say which label it is")
        session = self.visits.session(request)
        deed = await told(self._learnt(label, lambda: self._form.correction(query)))
        session.deeds.append(deed)
        return await self.done(session, deed.said, query)

    async def _learnt(self, label: str, lesson: Callable[[], str | list[Path]]) -> Deed:
        return await self.desk.teach(label, lesson())

    async def _undone(self, query: Any, request: gr.Request) -> Updates:
        session = self.visits.session(request)
        if not session.deeds:
            raise refusal("there is nothing to undo")
        deed = session.deeds.pop()
        try:
            await told(self.desk.undo(deed))
        except gr.Error:
            session.deeds.append(deed)
            raise
        return await self.done(session, f"Undone: {deed.said}", query)

    async def _look(self, query: Any) -> Updates:
        """Return the answer, its memories and the map; without a query, only the map."""
        item = await told(self._form.item(self.desk, query))
        if item is None:
            quiet = f'<div class="mbpa quiet">{self._hint}</div>'
            return quiet, "", await asyncio.to_thread(self._map.around)
        reason = await told(self.desk.ask(item))
        thumbs = await self.thumbnails([near.id for near in reason.neighbors])
        drawn = await asyncio.to_thread(self._map.around, item, reason, thumbs)
        asked = address(item) if isinstance(item, bytes) else None
        shown = rendering.answer(reason, self.desk.classifier.threshold, asked)
        return shown, rendering.memories(reason, thumbs), drawn

    @property
    def _hint(self) -> str:
        if self.desk.classifier.takes is None:
            return "This run takes embeddings only: ask it over HTTP."
        return f"{self._form.hint}, and see what it is taken for and why."
