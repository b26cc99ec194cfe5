"""HTTP connections that are closed when their client is too slow.

Uvicorn waits forever for the headers of a request, and forever for a client to read its response.
A few hundred such clients would use up all file descriptors. `middleware` limits the time for
bodies.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

if sys.platform != "win32":
    import resource

if TYPE_CHECKING:  # uvicorn chooses the class at import, which a type checker cannot follow
    from uvicorn.protocols.http.h11_impl import H11Protocol as Protocol
else:
    Protocol = AutoHTTPProtocol

MAX_CONNECTIONS = 2000
RESERVED_FILES = 256  # files that the process opens besides connections
UNLIMITED_FILES = 1 << 30  # used where the system sets no limit


class WatchedProtocol(Protocol):
    """Checks its connection periodically, and closes it if the client neither sends nor reads."""

    idle_s = 10.0
    """Seconds for a client to send a complete request header; checks are periodic, so it may get
    twice as long."""
    read_s = 30.0
    """Seconds for a client to read a response; it may get up to `idle_s` more."""
    _last_cycle: Any = None
    _unread_s = 0.0
    _timer: asyncio.TimerHandle | None = None

    # uvicorn narrows the type of the transport, too.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > compute_connection_limit():
            transport.abort()
            return
        self._timer = self.loop.call_later(self.idle_s, self._check_client)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _check_client(self) -> None:
        """Close the connection if it is idle or unread, else schedule the next check."""
        is_unread = self.transport.get_write_buffer_size() > 0
        self._unread_s = self._unread_s + self.idle_s if is_unread else 0.0
        is_busy = self.cycle is not None and not self.cycle.response_complete
        is_idle = not is_busy and not is_unread and self.cycle is self._last_cycle
        if is_idle or self._unread_s > self.read_s:
            self.transport.abort()
            return
        self._last_cycle = self.cycle
        self._timer = self.loop.call_later(self.idle_s, self._check_client)


def compute_connection_limit() -> int:
    """Return the number of connections this process may have open."""
    most = _read_file_limits()[0]
    return min(MAX_CONNECTIONS, max(RESERVED_FILES, most - RESERVED_FILES))


if sys.platform == "win32":  # where sockets are not files

    def raise_file_limit() -> None:
        """Do nothing: there is no limit."""

    def _read_file_limits() -> tuple[int, int]:
        return UNLIMITED_FILES, UNLIMITED_FILES

else:

    def raise_file_limit() -> None:
        """Raise the limit on open files to what `MAX_CONNECTIONS` needs, as far as permitted."""
        most, allowed = _read_file_limits()
        wanted = min(MAX_CONNECTIONS + RESERVED_FILES, allowed)
        if most < wanted:
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

    def _read_file_limits() -> tuple[int, int]:
        """Return the current limit on open files, and the highest that this process may set."""
        soft, hard = (
            UNLIMITED_FILES if each == resource.RLIM_INFINITY else each
            for each in resource.getrlimit(resource.RLIMIT_NOFILE)
        )
        return soft, hard
