"""The page: its layout and its event handlers.

It works offline: it uses the system's fonts, sends and fetches nothing, and embeds its pictures.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from mbpa.errors import MissingExtraError
from mbpa.explorer import rendering, review
from mbpa.explorer.memory_map import MemoryMap
from mbpa.serve.classifier import Classifier
from mbpa.serve.input_checks import MAX_PICTURE_BYTES
from mbpa.serve.settings import Settings

try:
    import gradio as gr
    from fastapi import FastAPI
    from starlette.routing import Mount

    from mbpa.explorer import style
    from mbpa.explorer.actions import Actions, Change, make_data_url, make_thumbnails
    from mbpa.explorer.forms import (
        SIDE_BUTTON_OPTIONS,
        PictureForm,
        SentenceForm,
        Updates,
        make_card,
        show_busy,
    )
    from mbpa.explorer.labels_tab import LabelsTab
    from mbpa.explorer.login import LoginMiddleware
    from mbpa.explorer.review_tab import ReviewTab
    from mbpa.explorer.sessions import Session, Sessions, make_refusal, show_errors
    from mbpa.explorer.taught_tab import TaughtTab
    from mbpa.explorer.uploads import MAX_TOTAL_BYTES, UploadMiddleware, Uploads
except ImportError as error:
    raise MissingExtraError("the page", extra="explore") from error

PATH = "/explore"
UPLOAD_LIFETIME_S = 86_400  # how long a dropped picture can be used again


def mount(app: FastAPI, classifier: Classifier) -> FastAPI:
    """Mount the page on the app of a service; it requires the service's token if there is one."""
    # Otherwise Gradio would summarise all events in a pandas table after each of them.
    os.environ.setdefault("GRADIO_ANALYTICS_CACHE_FREQUENCY", str(10**9))
    service = app.state.service
    assert service.classifier is classifier
    app.state.home = PATH
    settings = service.settings
    takes_files = classifier.takes == "images"
    uploads = Uploads.create_beside(classifier.journal, MAX_TOTAL_BYTES if takes_files else 0)
    mounted: FastAPI = gr.mount_gradio_app(
        app,
        ExplorerPage(Actions(service), uploads).blocks,
        PATH,
        theme=style.make_theme(),
        css=style.CSS,
        head=style.HEAD,
        auth=_make_password_check(settings) if settings.requires_token else None,
        auth_message="The password is the token of the service. "
        + (
            "The user name is the name of the token."
            if settings.tokens
            else "Any user name will do."
        ),
        footer_links=[],
        run_history=False,
        show_error=True,
        max_file_size=MAX_PICTURE_BYTES if takes_files else 1,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        enable_monitoring=False,
    )
    _close_with_app(mounted, uploads)
    mounted.add_middleware(
        UploadMiddleware, path=PATH, uploads=uploads, max_body_bytes=service.settings.body_bytes
    )
    if settings.requires_token:
        mounted.add_middleware(LoginMiddleware, path=PATH, is_known=_make_login_check(mounted))
    return mounted


def _make_password_check(settings: Settings) -> Callable[[str, str], bool]:
    def is_right(user: str, password: str) -> bool:
        return settings.find_visitor_name(user, password) is not None

    return is_right


def _make_login_check(mounted: FastAPI) -> Callable[[Mapping[str, str]], bool]:
    """Return a function that tells whether cookies belong to a visitor who has logged in."""
    pages: list[Any] = [route.app for route in mounted.routes if isinstance(route, Mount)]
    (page,) = pages
    tokens, id = page.tokens, page.cookie_id
    names = f"access-token-{id}", f"access-token-unsecure-{id}"  # with TLS and without

    def is_known(cookies: Mapping[str, str]) -> bool:
        return any(cookies.get(name) in tokens for name in names)

    return is_known


async def _return_unchanged(path: str) -> str:
    """Return the path unchanged.

    This replaces Gradio's handling of a file that a visitor names in any component, which copies
    the file from anywhere on this machine or fetches it from another host.
    """
    return path


def _close_with_app(app: FastAPI, uploads: Uploads) -> None:
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


class ExplorerPage:
    """The page. All its callbacks run in the event loop of the service."""

    def __init__(self, actions: Actions, uploads: Uploads) -> None:
        self._form = (
            PictureForm(uploads) if actions.classifier.takes == "images" else SentenceForm()
        )
        self.actions, self._map = actions, MemoryMap(actions.classifier, self._form.noun)
        self.confirmed: set[int] = set()
        """Ids of examples that a visitor has confirmed."""
        self.sessions = Sessions(actions.settings.name_visitor)
        with gr.Blocks(
            title="mbpa explorer",
            analytics_enabled=False,
            delete_cache=(UPLOAD_LIFETIME_S // 24, UPLOAD_LIFETIME_S),
        ) as self.blocks:
            with gr.Row(elem_id="header"):
                with gr.Column(scale=4, min_width=300):
                    self._title = gr.HTML(elem_id="title", apply_default_css=False)
                with gr.Column(scale=5, elem_id="bar"), gr.Row():
                    self._message = gr.HTML(
                        elem_id="message",
                        apply_default_css=False,
                        html_template='<div role="status">${value}</div>',
                    )
                    self._undo = gr.Button(
                        "Undo", interactive=False, elem_id="undo", **SIDE_BUTTON_OPTIONS
                    )
            with gr.Tabs(overflow_behavior="wrap"):
                with gr.Tab("Ask and teach"):
                    self._lay_out_asking()
                taught, labels = TaughtTab(self), LabelsTab(self)
                ReviewTab(self, "Least certain", review.sort_by_uncertainty)
                ReviewTab(self, "Probably mislabelled", review.find_mislabelled)
            undone = self._connect()
            taught.refresh_after(undone)
            labels.refresh_after(undone)
        for part in self.blocks.blocks.values():
            part.async_move_resource_to_block_cache = _return_unchanged

    @property
    def change_outputs(self) -> list[Any]:
        """Components that the values returned by `update_after` are for."""
        return [self._message, self._undo, self._title, self._correct, *self._answer_outputs]

    async def update_after(self, session: Session, description: str, query: Any) -> Updates:
        """Return the updates after a change. The query is asked again to show the effect."""
        try:
            shown = await self.show_answer(query)
        except gr.Error:  # the change has been made nevertheless, and can be undone
            shown = (gr.skip(),) * len(self._answer_outputs)
        return (
            rendering.render_message(description),
            gr.Button(interactive=bool(session.changes)),
            rendering.render_title(
                self.actions.classifier.stats(), self.actions.classifier.replica
            ),
            gr.Dropdown(choices=sorted(self.actions.classifier.labels)),
            *shown,
        )

    async def make_thumbnails(self, ids: list[int], side: int = 96) -> dict[int, str]:
        """Return thumbnails of examples by id; empty if the run does not take pictures."""
        return await show_errors(
            asyncio.to_thread(make_thumbnails, self.actions.classifier, ids, side)
        )

    def _lay_out_asking(self) -> None:
        with gr.Row():
            with gr.Column(scale=5):
                self._form.lay_out_query()
                self._answer = make_card("answer")
                with gr.Row(visible=False) as self._correction:
                    self._correct = gr.Dropdown(
                        label=f"Wrong? This {self._form.noun} is",
                        allow_custom_value=True,
                        value=None,
                        min_width=200,
                    )
                    self._teach_it = gr.Button("Correct it", **SIDE_BUTTON_OPTIONS)
                self._memories = make_card("memories")
            with gr.Column(scale=4):
                with gr.Group():
                    self._label = gr.Textbox(
                        label="Teach a label", placeholder="Its name, new or known", max_lines=1
                    )
                    self._form.lay_out_examples()
                self._teach = gr.Button("Teach", variant="primary")
                self._picture = make_card("map")

    @property
    def _answer_outputs(self) -> list[Any]:
        return [self._answer, self._memories, self._picture, self._correction]

    @property
    def query(self) -> Any:
        """The component that holds the query."""
        return self._form.query

    def _connect(self) -> Any:
        """Connect the events; return that of *Undo*."""
        asking = show_busy(self._answer)
        gr.on(self._form.asking, self._on_ask, self.query, self._answer_outputs, **asking)
        changing = show_busy(self._message, self._answer)
        outputs, examples = self.change_outputs, self._form.examples
        inputs = [self.query, self._label, examples]
        teaching = [self._teach.click, self._label.submit, *self._form.teaching]
        gr.on(teaching, self._on_teach, inputs, [*outputs, examples], **changing)
        self._teach_it.click(self._on_correct, [self.query, self._correct], outputs, **changing)
        self.blocks.load(self._on_load, self.query, outputs, **show_busy(self._picture))
        return self._undo.click(self._on_undo, self.query, outputs, **changing)

    async def _on_load(self, query: Any, request: gr.Request) -> Updates:
        return await self.update_after(self.sessions.get_session(request), "", query)

    async def _on_ask(self, query: Any) -> Updates:
        if isinstance(query, str) and not query.strip():
            raise make_refusal("type a sentence first")
        return await self.show_answer(query)

    async def _on_teach(self, query: Any, label: str, given: Any, request: gr.Request) -> Updates:
        session = self.sessions.get_session(request)
        change = await show_errors(
            self._teach_label(label, lambda: self._form.read_examples(given), session.by)
        )
        session.record(change)
        self._form.delete_files(given, query)
        return (
            *await self.update_after(session, change.description, query),
            self._form.no_examples,
        )

    async def _on_correct(self, query: Any, label: str | None, request: gr.Request) -> Updates:
        if not label:
            raise make_refusal("choose a label first")
        session = self.sessions.get_session(request)
        change = await show_errors(
            self._teach_label(label, lambda: self._form.read_correction(query), session.by)
        )
        session.record(change)
        return await self.update_after(session, change.description, query)

    async def _teach_label(
        self, label: str, lesson: Callable[[], str | list[Path]], by: str | None
    ) -> Change:
        return await self.actions.teach(label, lesson(), by=by)

    async def _on_undo(self, query: Any, request: gr.Request) -> Updates:
        session = self.sessions.get_session(request)
        if not session.changes:
            raise make_refusal("there is nothing to undo")
        change = session.changes.pop()
        try:
            ids = await show_errors(self.actions.undo(change, by=session.by))
        except gr.Error:
            session.changes.append(change)
            raise
        self.sessions.renumber(ids)
        return await self.update_after(session, f"Undone: {change.description}", query)

    async def show_answer(self, query: Any) -> Updates:
        """Return the answer, its memories and the map; without a query, what to do and the map."""
        item = await show_errors(self._form.read_query(self.actions, query))
        if item is None:
            map = await asyncio.to_thread(self._map.draw)
            return self._render_instructions(), "", map, gr.Row(visible=False)
        reason = await show_errors(self.actions.ask(item))
        thumbs = await self.make_thumbnails([near.id for near in reason.neighbors])
        map = await asyncio.to_thread(self._map.draw, item, reason, thumbs)
        picture = make_data_url(item) if isinstance(item, bytes) else None
        answer = rendering.render_answer(reason, self.actions.classifier.threshold, picture)
        memories = rendering.render_memories(reason, thumbs)
        return answer, memories, map, gr.Row(visible=True)

    def _render_instructions(self) -> str:
        """Return what is shown until something is asked."""
        if self.actions.classifier.takes is None:
            return rendering.render_note("This run takes embeddings only: ask it over HTTP.")
        asking = f"{self._form.hint}, to see its label and the examples behind the answer."
        if not self.actions.classifier.labels:
            teaching = "Teach a first label: give it a name and three or more examples."
            steps = [teaching, "Teach a second one in the same way.", asking]
            return rendering.render_steps("Nothing has been taught yet", steps)
        steps = [
            asking,
            "If the answer is wrong, choose the right label. The classifier learns it at once.",
            "If a label is missing, teach it with a name and three or more examples.",
            "Undo takes back what you did, step by step.",
        ]
        return rendering.render_steps("What you can do here", steps)
