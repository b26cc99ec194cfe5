"""Limits on one case: peak memory, measured per case, and time."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Iterator
from types import FrameType

RESET_PEAK = b"5"  # written to `/proc/self/clear_refs`, resets the peak of resident memory
STATUS_BYTES = 8192


class CaseTimeoutError(BaseException):
    """A case did not return in time; not an `Exception`, so that no parser catches it."""


class MemoryMeter:
    """Measures how far resident memory rises above its level at `start`.

    Linux keeps the peak in `/proc/self/status` and resets it on request, which takes microseconds
    and counts what C libraries allocate. Elsewhere every growth is 0 and `is_available` is false.
    """

    def __init__(self) -> None:
        self._status = self._reset = -1
        self._before = 0
        with contextlib.suppress(OSError):
            self._reset = os.open("/proc/self/clear_refs", os.O_WRONLY)
            self._status = os.open("/proc/self/status", os.O_RDONLY)
        self.is_available = self._status >= 0

    def start(self) -> None:
        """Reset the peak to the current level."""
        if self.is_available:
            os.pwrite(self._reset, RESET_PEAK, 0)
            self._before = self._read_bytes(b"VmRSS:")

    def measure_growth_bytes(self) -> int:
        """Return the bytes by which the peak since `start` exceeds the level at `start`."""
        return self._read_bytes(b"VmHWM:") - self._before if self.is_available else 0

    def close(self) -> None:
        for descriptor in (self._status, self._reset):
            if descriptor >= 0:
                os.close(descriptor)
        self.is_available = False

    def _read_bytes(self, field: bytes) -> int:
        text = os.pread(self._status, STATUS_BYTES, 0)
        start = text.index(field) + len(field)
        return int(text[start : text.index(b"kB", start)]) << 10


def limit_address_space(extra_bytes: int) -> None:
    """Let this process map at most `extra_bytes` more than now; beyond that, `MemoryError`.

    This catches allocations that are never touched, which resident memory does not show.
    """
    with contextlib.suppress(OSError), open("/proc/self/statm", "rb") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (mapped + extra_bytes, hard))


@contextlib.contextmanager
def interrupt_after(seconds: float) -> Iterator[None]:
    """Raise `CaseTimeoutError` in the main thread if the block takes longer."""

    def expire(_: int, __: FrameType | None) -> None:
        raise CaseTimeoutError

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
