"""Middleware applied to every request: authentication, body size, concurrency limits, metrics.

It is plain ASGI around the whole app, so a refused request costs next to nothing: its body is never
parsed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mbpa.serve.follower import PositionGate
from mbpa.serve.settings import OPEN_PATHS, Settings
from mbpa.serve.shared_journal import ReplicaStatus

MAX_DRAINED_BYTES = 1 << 26  # of an oversized body that are read before it is refused
TOKEN_NAME = "mbpa.token_name"  # in the scope of a request that was sent with a token
WAITING_PATHS = ("/predict", "/explain")
TOO_MANY_REQUESTS = "too many requests at once, try again"
LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class HttpMetrics:
    """Prometheus metrics in their own registry, so that two apps in a process stay separate."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.requests = Counter(
            "mbpa_requests", "Requests answered", ["path", "status"], registry=registry
        )
        self.seconds = Histogram(
            "mbpa_seconds",
            "Seconds until the answer",
            ["path"],
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.shed = Counter("mbpa_shed", "Requests refused with 429", registry=registry)
        self.in_flight = Gauge(
            "mbpa_in_flight", "Requests received and not answered yet", registry=registry
        )
        self.page_requests = Gauge(
            "mbpa_page_requests", "Open requests to pages, including streams", registry=registry
        )


class Metrics(HttpMetrics):
    """The metrics of a classifier."""

    def __init__(self) -> None:
        super().__init__()
        registry = self.registry
        self.batch = Histogram(
            "mbpa_batch",
            "Items per batch of the model",
            buckets=(1, 2, 4, 8, 16, 32, 64),
            registry=registry,
        )
        self.examples = Gauge("mbpa_examples", "Examples in the memory", registry=registry)
        self.labels = Gauge("mbpa_labels", "Labels", registry=registry)
        self.recall = Gauge(
            "mbpa_recall",
            "Share of the nearest examples that are found; NaN if it was not measured",
            registry=registry,
        )
        self.read_only = Gauge(
            "mbpa_read_only", "1 if the journal cannot be written, else 0", registry=registry
        )


class ReplicaMetrics:
    """Further metrics of a classifier whose journal is shared.

    Args:
        registry: the registry of its metrics.
        get_status: returns how far it has followed the log.
    """

    def __init__(
        self, registry: CollectorRegistry, get_status: Callable[[], ReplicaStatus]
    ) -> None:
        described = {
            "position": "Position in the log of all replicas that answers are given at",
            "lag": "Events of the log that are known and not yet applied",
            "stale_s": "Seconds since the replica last knew that it had applied everything",
            "snapshot": "Position at which everything was last loaded",
            "snapshot_age_s": "Seconds since everything was last loaded",
        }
        for field, text in described.items():
            name = f"mbpa_{field.removesuffix('_s')}" + ("_seconds" if field[-2:] == "_s" else "")
            gauge = Gauge(name, text, registry=registry)
            gauge.set_function(partial(lambda field: getattr(get_status(), field), field))


class Middleware:
    """An ASGI app that passes admitted requests on to another app.

    Args:
        paths: paths that the metrics count by name; all others count as "other".
        estimate_wait_s: returns the seconds that a request to one of `WAITING_PATHS` would have to
            wait at least, given the length of its body in bytes. It is called before the body is
            read, because parsing hundreds of bodies only to refuse them would delay the admitted
            requests.
        format_error: returns the body of an error response as JSON, given its status and reason.
        positions: holds requests to a replica back until it can answer them.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        metrics: HttpMetrics,
        paths: set[str],
        estimate_wait_s: Callable[[int], float] = lambda length: 0.0,
        format_error: Callable[[int, str], Any] = lambda status, why: {"error": why},
        positions: PositionGate | None = None,
    ) -> None:
        self._app, self._settings, self._metrics, self._paths = app, settings, metrics, paths
        self._estimate_wait_s, self._format_error = estimate_wait_s, format_error
        self._positions = positions
        self.in_flight = self.receiving = self.held_bytes = self._page_requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif self._is_page_path(scope["path"]):
            await self._forward_to_page(scope, receive, send)
        else:
            await self._forward(scope, receive, send)

    def _is_page_path(self, path: str) -> bool:
        pages = self._settings.open_paths
        return any(path == page or path.startswith(f"{page}/") for page in pages)

    async def _forward_to_page(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._page_requests >= self._settings.page_requests:
            self._metrics.shed.inc()
            await self._refuse(send, 429, "too many open requests, try again", retry_after=1)
            return
        self._page_requests += 1
        self._metrics.page_requests.set(self._page_requests)
        try:
            await self._app(scope, receive, send)
        finally:
            self._page_requests -= 1
            self._metrics.page_requests.set(self._page_requests)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, start, status = scope["path"], time.perf_counter(), 500
        # Clients can invent any number of paths.
        counted_path = path if path in self._paths else "other"
        state = _RequestState(self)

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self._positions is not None:
                    headers = [*message.get("headers", ()), *self._positions.make_headers()]
                    message = {**message, "headers": headers}
                state.leave()  # a client that reads slowly must not count as in flight
            await send(message)

        try:
            await self._forward_or_refuse(scope, path, state, receive, sending)
        finally:
            state.leave()
            self._metrics.requests.labels(counted_path, status).inc()
            self._metrics.seconds.labels(counted_path).observe(time.perf_counter() - start)

    async def _forward_or_refuse(
        self, scope: Scope, path: str, state: _RequestState, receive: Receive, send: Send
    ) -> None:
        settings = self._settings
        headers = dict(scope["headers"])
        has_body = b"transfer-encoding" in headers or _get_content_length(headers) > 0
        is_full = (
            self.in_flight >= settings.in_flight
            or self.receiving >= settings.receiving
            or self.held_bytes >= settings.held_bytes
        )
        wait_s = (
            self._estimate_wait_s(_get_content_length(headers)) if path in WAITING_PATHS else 0.0
        )
        if (is_full or wait_s > settings.wait_s) and path != "/health":
            self._metrics.shed.inc()
            late_s = wait_s - settings.wait_s
            await self._refuse(send, 429, TOO_MANY_REQUESTS, retry_after=late_s)
        elif not self._authenticate(scope, headers):
            text = "a valid token is required: Authorization: Bearer TOKEN"
            await self._refuse(send, 401, text, extra=[(b"www-authenticate", b"Bearer")])
        elif _get_content_length(headers) > settings.body_bytes:
            state.receive()
            await _drain(receive, _compute_deadline(settings.body_timeout_s))
            text = f"the body must have at most {settings.body_bytes} bytes"
            await self._refuse(send, 413, text)
        elif (refusal := await self._wait_for_position(headers, state)) is not None:
            await self._refuse(send, *refusal, retry_after=1 if refusal[0] == 503 else None)
        elif not has_body:
            state.enter()
            await self._app(scope, receive, send)
        else:
            state.receive()
            await self._app(scope, self._admit_whole(receive, state), send)

    async def _wait_for_position(
        self, headers: dict[bytes, bytes], state: _RequestState
    ) -> tuple[int, str] | None:
        if self._positions is None:
            return None
        state.receive()
        return await self._positions.wait(headers)

    async def _refuse(self, send: Send, status: int, why: str, **options: Any) -> None:
        await refuse(send, status, why, body=self._format_error(status, why), **options)

    def _admit_whole(self, receive: Receive, state: _RequestState) -> Receive:
        """Admit a request once its body has arrived, so that slow clients delay nobody."""
        limited = _limit_body(receive, self._settings.body_bytes, self._settings.body_timeout_s)

        async def receiving() -> Message:
            message = await limited()
            state.hold(len(message.get("body", b"")))
            is_last = message["type"] == "http.request" and not message.get("more_body", False)
            if is_last and not state.is_in_flight:
                if self.in_flight >= self._settings.in_flight:
                    self._metrics.shed.inc()
                    raise HTTPException(429, TOO_MANY_REQUESTS, {"Retry-After": "1"})
                state.enter()
            return message

        return receiving

    def count(self, change: int) -> None:
        """Change the number of requests in flight."""
        self.in_flight += change
        self._metrics.in_flight.set(self.in_flight)

    def _authenticate(self, scope: Scope, headers: dict[bytes, bytes]) -> bool:
        """Return whether a request may pass; note the name of its token in the scope."""
        if not self._settings.requires_token or scope["path"] in OPEN_PATHS:
            return True
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        scope[TOKEN_NAME] = self._settings.find_token_name(given.strip())
        is_bearer = scheme.lower() == b"bearer"  # the scheme is case-insensitive
        return is_bearer and scope[TOKEN_NAME] is not None


class _RequestState:
    """The state of a request (arriving, in flight or done), which the middleware counts."""

    def __init__(self, middleware: Middleware) -> None:
        self._middleware, self.is_in_flight = middleware, False
        self._is_receiving, self._held_bytes = False, 0

    def receive(self) -> None:
        """Record that the request is arriving; further calls do nothing."""
        self._middleware.receiving += not self._is_receiving
        self._is_receiving = True

    def hold(self, size: int) -> None:
        """Record that `size` bytes of the body have arrived."""
        self._held_bytes += size
        self._middleware.held_bytes += size

    def enter(self) -> None:
        """Record that the request has arrived completely and is in flight."""
        self._stop_receiving()
        self.is_in_flight = True
        self._middleware.count(1)

    def leave(self) -> None:
        """Record that the request was answered or has failed; further calls do nothing."""
        self._stop_receiving()
        self._middleware.held_bytes -= self._held_bytes
        self._held_bytes = 0
        if self.is_in_flight:
            self.is_in_flight = False
            self._middleware.count(-1)

    def _stop_receiving(self) -> None:
        self._middleware.receiving -= self._is_receiving
        self._is_receiving = False


async def refuse(
    send: Send,
    status: int,
    why: str,
    *,
    retry_after: float | None = None,
    extra: list[tuple[bytes, bytes]] | None = None,
    body: Any = None,
) -> None:
    """Send an error response in JSON with the reason, or with another body."""
    content = json.dumps({"error": why} if body is None else body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
    if retry_after is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(retry_after))))
    start = {"type": "http.response.start", "status": status, "headers": headers + (extra or [])}
    await send(start)
    await send({"type": "http.response.body", "body": content})


def _get_content_length(headers: dict[bytes, bytes]) -> int:
    try:
        return int(headers.get(b"content-length", b"0"))
    except ValueError:
        return 0  # the server itself refuses such requests


def _compute_deadline(timeout_s: float) -> float:
    """Return the time at which a timeout that starts now ends, by the event loop's clock."""
    return asyncio.get_running_loop().time() + timeout_s


async def _drain(receive: Receive, deadline: float) -> None:
    """Read and discard the body: many clients read no response before they have sent all of it."""
    read, more = 0, True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(deadline):
            while more and read < MAX_DRAINED_BYTES:
                message = await receive()
                read += len(message.get("body", b""))
                more = message["type"] == "http.request" and message.get("more_body", False)


def _limit_body(receive: Receive, max_bytes: int, timeout_s: float) -> Receive:
    """Wrap `receive` to limit the size of a body of unknown length, and the time it may take."""
    read, more = 0, True
    deadline = _compute_deadline(timeout_s)

    async def receiving() -> Message:
        nonlocal read, more
        if not more:
            return await receive()
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            raise HTTPException(408, f"the body must arrive within {timeout_s:g} seconds") from None
        read += len(message.get("body", b""))
        more = message.get("more_body", False)
        if read > max_bytes:
            if more:
                await _drain(receive, deadline)
            raise HTTPException(413, f"the body must have at most {max_bytes} bytes")
        return message

    return receiving
