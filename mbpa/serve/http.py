"""What the HTTP apps share: errors, pages about the service, and watching for disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from mbpa.serve import docs_page, schemas
from mbpa.serve.batching import Overloaded
from mbpa.serve.middleware import HttpMetrics

ResultT = TypeVar("ResultT")
log = logging.getLogger("mbpa.serve")


class MakeError(Protocol):
    """Makes the response to a request that failed."""

    def __call__(
        self, status: int, why: str, headers: Mapping[str, str] | None = None
    ) -> Response: ...


def add_error_handlers(app: FastAPI, metrics: HttpMetrics, make_error: MakeError) -> None:
    """Answer unknown paths, overload and unexpected errors in the form of the app."""

    @app.exception_handler(HTTPException)
    async def report_http_error(_: Request, error: HTTPException) -> Response:
        return make_error(error.status_code, str(error.detail), error.headers)

    @app.exception_handler(Overloaded)
    async def report_overload(_: Request, error: Overloaded) -> Response:
        metrics.shed.inc()
        retry_after_s = max(1, math.ceil(error.retry_after_s))
        return make_error(429, str(error), {"Retry-After": str(retry_after_s)})

    @app.exception_handler(Exception)
    async def report_unexpected_error(_: Request, error: Exception) -> Response:
        log.error("a request failed", exc_info=error)
        return make_error(500, "internal error: see the server's log")


def describe_invalid_body(error: RequestValidationError) -> tuple[int, str, str]:
    """Return a status, the place of the first error in a body (or "") and what is wrong with it."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return 400, "", f"the body must be JSON: {first.get('ctx', {}).get('error', '')}"
    if first["type"] == "model_attributes_type":
        return 422, "", "send a JSON object, with Content-Type: application/json"
    place = [str(part) for part in first["loc"] if part not in ("body", "path", "query")]
    why = str(first["msg"]).removeprefix("Value error, ")  # pydantic's prefix for our errors
    if first["type"] == schemas.UNKNOWN_FIELD:
        place.append(first["ctx"]["name"])
        why = first["ctx"]["why"]
    return 422, ".".join(place), why


def add_pages(app: FastAPI, http_metrics: HttpMetrics, refused: dict[int | str, Any]) -> None:
    """Add the pages about the service: /, /favicon.ico, /docs and /metrics.

    Args:
        app: the app. `app.state.home` is the path to which / leads.
        http_metrics: what /metrics shows.
        refused: descriptions of the errors that any path may return.
    """

    @app.get("/", include_in_schema=False)
    async def home(request: Request) -> Response:
        return RedirectResponse(f"{request.scope.get('root_path', '')}{app.state.home}")

    @app.get("/favicon.ico", include_in_schema=False)
    async def icon() -> Response:
        return Response(docs_page.ICON_SVG, media_type="image/svg+xml")

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        page = docs_page.render_page(app.openapi(), str(request.base_url))
        return HTMLResponse(page, headers=docs_page.HEADERS)

    @app.get("/metrics", responses=refused, response_class=Response)
    async def metrics() -> Response:
        """Return metrics in the Prometheus text format."""
        return Response(generate_latest(http_metrics.registry), media_type=CONTENT_TYPE_LATEST)


async def cancel_if_disconnected(request: Request, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Await the work for a request, and cancel it if the client disconnects."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_wait_for_disconnect(request))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HTTPException(499, "the client disconnected")
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def escape_surrogates(text: str) -> str:
    """Return a text that can be encoded: JSON may hold surrogates, and errors repeat the input."""
    return text.encode("utf-8", "backslashreplace").decode()


def serialize(message: schemas.ApiModel) -> Response:
    """Serialise a message without validation.

    We built the message ourselves, and validating it again would take as long as the model.
    """
    return Response(message.model_dump_json().encode(), media_type="application/json")
