"""The HTTP interface of a classifier: predict, learn, explain, forget, and monitor.

The answers are consistent with some order of the requests: a prediction sees all of a lesson or
none of it, and every prediction requested after a lesson is acknowledged sees that lesson. Invalid
input changes nothing; the response is a JSON object with a one-line error message.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
from fastapi import FastAPI, Path, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse
from jaxtyping import Float
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

import mbpa
from mbpa.encoders import image
from mbpa.serve import docs_page, schemas
from mbpa.serve.answers import (
    MOST_PIXELS,
    Answer,
    Lesson,
    Reason,
    check_label,
    check_text,
    kept_pictures,
)
from mbpa.serve.batching import Batcher, Overloaded, Writer
from mbpa.serve.classifier import Classifier
from mbpa.serve.journal import InputError, JournalError
from mbpa.serve.middleware import Metrics, Middleware
from mbpa.serve.model_work import BYTES_PER_TOKEN, Asked, ModelWork, Piece, weigh
from mbpa.serve.run_info import as_bytes
from mbpa.serve.schemas import Error
from mbpa.serve.settings import Settings

Done = TypeVar("Done")

ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": Error, "description": "Not JSON"},
    401: {"model": Error, "description": "No token, or a wrong one"},
    408: {"model": Error, "description": "The body took too long to arrive"},
    413: {"model": Error, "description": "The body is too large"},
    422: {"model": Error, "description": "Unprocessable request"},
    429: {"model": Error, "description": "Too many requests; Retry-After says when to try again"},
}
FAILED: dict[int | str, dict[str, Any]] = {
    **ERRORS,
    503: {"model": Error, "description": "The journal can no longer be written"},
}
PATHS = {
    *("/predict", "/learn", "/explain", "/forget"),
    *("/labels", "/stats", "/health", "/metrics", "/", "/docs", "/openapi.json", "/favicon.ico"),
}
log = logging.getLogger("mbpa.serve")


class Service:
    """A classifier together with its request queues and metrics."""

    def __init__(self, classifier: Classifier, settings: Settings) -> None:
        self.classifier, self.settings = classifier, settings
        self.metrics = Metrics()
        self.metrics.examples.set_function(lambda: len(classifier))
        self.metrics.labels.set_function(lambda: len(classifier.labels))
        self.metrics.read_only.set_function(lambda: classifier.journal.read_only is not None)
        self._work = ModelWork(classifier, settings.part_s)
        self.model: Batcher[Piece, Sequence[Answer | Reason]] = Batcher(
            self._handle,
            weight=weigh,
            part=settings.part,
            part_s=settings.part_s,
            batch=settings.batch,
            wait_s=settings.wait_s,
            window_s=settings.window_s,
        )
        # Examples are encoded in a thread of their own, so predictions continue meanwhile.
        studied = ModelWork(classifier, settings.part_s)
        self.lessons: Batcher[Piece, Sequence[Answer | Reason]] = Batcher(
            studied.handle,
            weight=weigh,
            part=settings.part,
            part_s=settings.part_s,
            batch=settings.batch,
            wait_s=settings.lesson_wait_s,
            name="mbpa-lessons",
        )
        self.writer = Writer(settings.writes)
        # Pictures are read one at a time: each may briefly take hundreds of megabytes.
        self.reader = Writer(settings.writes, "mbpa-reader")

    async def ask(
        self, query: schemas.Query, *, wants_reasons: bool = False
    ) -> Sequence[Answer | Reason]:
        """Check a query, so that it cannot fail a whole batch, and return its answers."""
        rows, items = None, tuple[str | bytes, ...]()
        if query.embeddings is not None:
            rows = _rows(query.embeddings)
            self.classifier.check_rows(rows)
        elif query.images is not None:
            items = tuple(await self.read(query.images))
        else:
            self.classifier.check_takes("texts")
            for text in query.texts or ():
                check_text(text)
            items = tuple(query.texts or ())
        return await self.answers(items, rows, query.top, query.threshold, wants_reasons)

    async def answers(
        self,
        items: tuple[str | bytes, ...],
        rows: Float[np.ndarray, "B D"] | None,
        top: int,
        threshold: float | None = None,
        wants_reasons: bool = False,
    ) -> Sequence[Answer | Reason]:
        """Return the answers to queries that have been checked."""
        asked = Asked(items, rows, top, threshold, wants_reasons)
        found = await self.model(self._work.cut(asked))
        return [answer for part in found for answer in part]

    async def read(self, encoded: Sequence[str]) -> list[bytes]:
        """Decode pictures from base64 and convert them to the form in which they are stored.

        Requests take turns in the reader's thread, one picture at a time.
        """
        self.classifier.check_takes("images")
        files = await self.reader(lambda: _decode_files(encoded))
        pictures = []
        for number, file in enumerate(files, 1):
            try:
                pictures += await self.reader(partial(kept_pictures, [file]))
            except InputError as error:
                place = f"picture {number} of {len(files)}: " if len(files) > 1 else ""
                raise InputError(f"{place}{error}") from error
        return pictures

    async def learn(self, lessons: schemas.Lessons) -> tuple[list[int], int]:
        """Teach the examples of a request; return their ids and the resulting number of labels."""
        sent = [each.image for each in lessons.examples if each.image is not None]
        pictures = iter(await self.read(sent) if sent else ())
        taught = [
            _lesson(each, None if each.image is None else next(pictures))
            for each in lessons.examples
        ]
        return await self.teach(taught, lessons.request)

    async def teach(
        self, lessons: Sequence[Lesson], request: str | None = None
    ) -> tuple[list[int], int]:
        """Encode examples, taking turns with other requests, and then write them.

        Args:
            request: a name for this call. Repeating a call under the same name adds nothing and
                returns the same ids.
        """
        for each in lessons:
            check_label(each.label)
            if each.key is None and each.said is not None:
                self.classifier.check_item(each.said)
        if request is not None:
            known = await self.writer(lambda: self._find_repeated(lessons, request))
            if known is not None:
                return known, len(self.classifier.labels)
        items = [each.said for each in lessons if each.key is None and each.said is not None]
        asked = Asked(tuple(items))
        await self.lessons([Piece(asked, place) for place in range(len(items))])
        keys = iter(asked.encoded)
        whole = [
            replace(each, key=next(keys)) if each.key is None and each.said is not None else each
            for each in lessons
        ]

        def write() -> tuple[list[int], int]:
            known = None if request is None else self._find_repeated(lessons, request)
            ids = self.classifier.learn(whole, request=request) if known is None else known
            return ids, len(self.classifier.labels)  # counted before the next write

        return await self.writer(write)

    async def forget(self, asked: schemas.Forgetting) -> list[int]:
        if asked.label is not None:
            check_label(asked.label)
        return await self.writer(lambda: self.classifier.forget(asked.ids or (), asked.label))

    def _find_repeated(self, lessons: Sequence[Lesson], request: str) -> list[int] | None:
        """Return the ids of an earlier call with this name, or `None`.

        The comparison leaves out keys computed from texts or pictures: they may differ in the last
        bit.
        """
        rows = [
            (each.label.strip(), each.said, None if each.key is None else as_bytes(each.key.cpu()))
            for each in lessons
        ]
        return self.classifier.journal.repeated(rows, request)

    def _handle(self, batch: list[Piece]) -> list[Sequence[Answer | Reason]]:
        self.metrics.batch.observe(len(batch))
        return self._work.handle(batch)


def _lesson(taught: schemas.Taught, picture: bytes | None) -> Lesson:
    rows = None if taught.embedding is None else _rows([taught.embedding])
    key = None if rows is None else torch.from_numpy(rows)[0]
    return Lesson(taught.label, taught.text, key, picture)


def _decode_files(encoded: Sequence[str]) -> list[bytes]:
    """Decode the files of a call; reject too many pixels before any picture is decompressed."""
    files = [_decoded(each) for each in encoded]
    total = sum(map(image.pixels_of, files)) if len(files) > 1 else 0
    if total > MOST_PIXELS:
        raise InputError(
            f"pictures must have at most {MOST_PIXELS:,} pixels together, got {total:,}"
        )
    return files


def _decoded(picture: str) -> bytes:
    """Decode base64, which may be a data URL or contain line breaks."""
    content = picture.partition(",")[2] if picture.startswith("data:") else picture
    try:
        return base64.b64decode("".join(content.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError("a picture must be the bytes of its file in base64") from error


def _rows(embeddings: list[list[float]]) -> Float[np.ndarray, "B D"]:
    """Convert embeddings to an array.

    Uses numpy, because torch releases the interpreter lock and then waits to reacquire it.
    """
    widths = {len(row) for row in embeddings}
    if len(widths) > 1:
        raise InputError(f"embeddings must have as many numbers each, got {sorted(widths)}")
    with np.errstate(over="ignore"):  # too large numbers become infinite and are rejected later
        return np.array(embeddings, np.float32)


def create_app(classifier: Classifier, settings: Settings | None = None) -> FastAPI:
    """Return the app. Pages mounted on it find the classifier at `app.state.service.classifier`."""
    settings = settings or Settings()
    service = Service(classifier, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.model.start()
        service.lessons.start()
        yield
        await service.model.stop()
        await service.lessons.stop()
        await service.reader.stop()
        await service.writer.stop()

    app = FastAPI(
        title="mbpa",
        version=mbpa.__version__,
        description=__doc__,
        lifespan=lifespan,
        docs_url=None,  # FastAPI's own pages load scripts from other hosts
        redoc_url=None,
    )
    app.state.service = service
    app.state.home = "/docs"
    app.add_middleware(
        Middleware,
        settings=settings,
        metrics=service.metrics,
        paths=PATHS,
        estimate_wait_s=lambda length: service.model.estimate_wait_s(length / BYTES_PER_TOKEN),
    )
    _add_errors(app)
    _add_asking(app, service)
    _add_teaching(app, service)
    _add_looking(app, service)
    if classifier.takes == "images":
        _add_pictures(app, classifier)
    docs_page.fit(app.openapi(), classifier.takes)
    return app


def _add_asking(app: FastAPI, service: Service) -> None:
    @app.post("/predict", responses=ERRORS, response_model=schemas.Predictions)
    async def predict(query: schemas.Query, request: Request) -> Response:
        """Predict labels; `null` where the confidence is below the threshold."""
        answers = await _unless_gone(request, query.size, service.ask(query))
        made = [schemas.prediction(each) for each in answers if isinstance(each, Answer)]
        return _json(schemas.Predictions.model_construct(answers=made))

    @app.post("/explain", responses=ERRORS, response_model=schemas.Explanations)
    async def explain(query: schemas.Why, request: Request) -> Response:
        """Predict labels and return the examples that each answer is based on."""
        asking = service.ask(query, wants_reasons=True)
        reasons = await _unless_gone(request, query.size, asking)
        made = [schemas.explained(each) for each in reasons if isinstance(each, Reason)]
        return _json(schemas.Explanations.model_construct(reasons=made))


def _add_teaching(app: FastAPI, service: Service) -> None:
    @app.post("/learn", responses=FAILED, response_model=schemas.Learnt)
    async def learn(lessons: schemas.Lessons, request: Request) -> Response:
        """Add examples. When the response arrives they are on disk and used by every prediction."""
        ids, labels = await _unless_gone(request, len(lessons.examples), service.learn(lessons))
        return _json(schemas.Learnt.model_construct(ids=ids, labels=labels))

    @app.post("/forget", responses=FAILED, response_model=schemas.Forgotten)
    async def forget(asked: schemas.Forgetting) -> Response:
        """Delete examples from the memory and from the files on disk."""
        return _json(schemas.Forgotten.model_construct(ids=await service.forget(asked)))


def _add_looking(app: FastAPI, service: Service) -> None:
    classifier = service.classifier
    refused: dict[int | str, Any] = {status: ERRORS[status] for status in (401, 429)}

    @app.get("/labels", responses=refused, response_model=schemas.Labels)
    async def labels() -> Response:
        """List all labels in the order of the head's outputs."""
        counts = classifier.counts
        trained = frozenset(counts.trained_labels)
        made = [
            schemas.LabelCount(label=label, examples=count, trained=label in trained)
            for label, count in counts.labels.items()
        ]
        return _json(schemas.Labels.model_construct(labels=made))

    @app.get("/stats", responses=refused, response_model=schemas.Stats)
    async def stats() -> Response:
        """Return counts of examples and labels, and the state of the service."""
        return _json(schemas.Stats(**classifier.stats(), waiting=service.model.waiting))

    @app.get("/health", response_model=schemas.Health)
    async def health() -> Response:
        """Report whether the service responds and can still learn. Requires no token."""
        reason = classifier.journal.read_only
        status = "ok" if reason is None else "read-only"
        return _json(schemas.Health(status=status, reason=reason))

    @app.get("/", include_in_schema=False)
    async def home(request: Request) -> Response:
        return RedirectResponse(f"{request.scope.get('root_path', '')}{app.state.home}")

    @app.get("/favicon.ico", include_in_schema=False)
    async def icon() -> Response:
        return Response(docs_page.ICON, media_type="image/svg+xml")

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        page = docs_page.page(app.openapi(), str(request.base_url))
        return HTMLResponse(page, headers=docs_page.HEADERS)

    @app.get("/metrics", responses=refused, response_class=Response)
    async def metrics() -> Response:
        """Return metrics in the Prometheus text format."""
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _add_pictures(app: FastAPI, classifier: Classifier) -> None:
    described: dict[int | str, Any] = {
        200: {"content": {"image/png": {}, "image/jpeg": {}}},
        404: {"model": Error, "description": "There is no such example"},
        503: {"model": Error, "description": "The journal cannot be read"},
        **{status: ERRORS[status] for status in (401, 422, 429)},
    }

    @app.get("/examples/{id}/image", responses=described, response_class=Response)
    async def picture(id: Annotated[int, Path(ge=1, le=2**62)]) -> Response:
        """Return the picture of an example as it is stored."""
        found = await asyncio.to_thread(classifier.image, id)
        if found is None:
            raise HTTPException(404, f"example {id} is not there")
        headers = {"Cache-Control": "no-store"}  # no cache must keep a forgotten picture
        return Response(found, media_type=image.media_type(found), headers=headers)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def misshapen(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return _error(400, f"the body must be JSON: {first.get('ctx', {}).get('error', '')}")
        if first["type"] == "model_attributes_type":
            return _error(422, "send a JSON object, with Content-Type: application/json")
        place = [str(part) for part in first["loc"] if part not in ("body", "path")]
        why = str(first["msg"]).removeprefix("Value error, ")  # pydantic's prefix for our errors
        if first["type"] == schemas.UNKNOWN_FIELD:
            place.append(first["ctx"]["name"])
            why = first["ctx"]["why"]
        where = ".".join(place)
        return _error(422, f"{where}: {why}" if where else why)

    @app.exception_handler(InputError)
    async def impossible(_: Request, error: InputError) -> Response:
        return _error(422, str(error))

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> Response:
        return _error(error.status_code, str(error.detail), error.headers)

    @app.exception_handler(Overloaded)
    async def shed(_: Request, error: Overloaded) -> Response:
        app.state.service.metrics.shed.inc()
        retry_after_s = max(1, math.ceil(error.retry_after_s))
        return _error(429, str(error), {"Retry-After": str(retry_after_s)})

    @app.exception_handler(JournalError)
    async def unwritable(_: Request, error: JournalError) -> Response:
        return _error(503, str(error))

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        log.error("a request failed", exc_info=error)
        return _error(500, "this should not have happened; the server's log says more")


async def _unless_gone(request: Request, size: int, work: Coroutine[Any, Any, Done]) -> Done:
    """Await the work for a request, and cancel it if the client disconnects.

    A request of one item is not watched: it finishes before a disconnect could be noticed.
    """
    if size == 1:
        return await work
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_wait_until_gone(request))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HTTPException(499, "the client went away")
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch


async def _wait_until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _error(status: int, why: str, headers: Any = None) -> Response:
    plain = why.encode("utf-8", "backslashreplace").decode()
    return JSONResponse({"error": plain}, status, headers)


def _json(message: schemas.Message) -> Response:
    """Serialise a message without validation.

    We built the message ourselves, and validating it again would take as long as the model.
    """
    return Response(message.model_dump_json().encode(), media_type="application/json")
