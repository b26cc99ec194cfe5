"""HTTP connections that are given up when their client is too slow.

Uvicorn waits for ever for the headers of a request, and for ever for a client to read its answer;
a few hundred such clients would take all file descriptors. `middleware` waits for bodies.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

if sys.platform != "win32":
    import resource

if TYPE_CHECKING:  # a class that is chosen when it is imported cannot be checked
    from uvicorn.protocols.http.h11_impl import H11Protocol as Protocol
else:
    Protocol = AutoHTTPProtocol

MAX_CONNECTIONS = 2000
OTHER_FILES = 256  # that the process opens beside connections
UNLIMITED_FILES = 1 << 30  # where the system sets no limit


class WatchedProtocol(Protocol):
    """Looks at its connection from time to time, and gives it up if nothing comes or is read."""

    idle_s = 10.0
    """Seconds for a connection to bring a request, headers and all; it may have twice as long."""
    read_s = 30.0
    """Seconds for a client to read an answer; it may have up to `idle_s` more."""
    _last_cycle: Any = None
    _unread_s = 0.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > limit_connections():
            transport.abort()
            return
        self._timer = self.loop.call_later(self.idle_s, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        """Give the connection up, or look again later."""
        is_unread = self.transport.get_write_buffer_size() > 0
        self._unread_s = self._unread_s + self.idle_s if is_unread else 0.0
        is_busy = self.cycle is not None and not self.cycle.response_complete
        is_idle = not is_busy and not is_unread and self.cycle is self._last_cycle
        if is_idle or self._unread_s > self.read_s:
            self.transport.abort()
            return
        self._last_cycle = self.cycle
        self._timer = self.loop.call_later(self.idle_s, self._look)


def limit_connections() -> int:
    """Return how many connections this process may have open."""
    most = _read_file_limits()[0]
    return min(MAX_CONNECTIONS, max(OTHER_FILES, most - OTHER_FILES))


def raise_file_limit() -> None:
    """Let this process open as many files as its connections want, where it may."""
    most, allowed = _read_file_limits()
    wanted = min(MAX_CONNECTIONS + OTHER_FILES, allowed)
    if sys.platform != "win32" and most < wanted:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _read_file_limits() -> tuple[int, int]:
    """Return how many files this process may open now, and how many if it asks for more."""
    if sys.platform == "win32":
        return UNLIMITED_FILES, UNLIMITED_FILES
    soft, hard = (
        UNLIMITED_FILES if each == resource.RLIM_INFINITY else each
        for each in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    return soft, hard
