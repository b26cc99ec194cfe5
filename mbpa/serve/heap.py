"""Keep the memory of a long-running process steady, where the C library is glibc.

By default glibc keeps large blocks that were freed, in the hope of using them again. Small blocks
allocated above them then keep them from ever being returned, so the process seems to grow.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import Any

LARGE_BLOCK_BYTES = 1 << 22
RETURN_INTERVAL_S = 60.0
_M_MMAP_THRESHOLD = -3  # parameter of `mallopt`


def return_large_blocks() -> None:
    """From now on, return blocks of 4 MiB and more to the system as soon as they are freed."""
    if hasattr(_C_LIBRARY, "mallopt"):
        _C_LIBRARY.mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


def return_free_memory() -> None:
    """Return all memory that was freed to the system, once."""
    if hasattr(_C_LIBRARY, "malloc_trim"):
        _C_LIBRARY.malloc_trim(0)


def return_free_memory_regularly(interval_s: float = RETURN_INTERVAL_S) -> threading.Event:
    """Call `return_free_memory` at this interval, in a thread, until the returned event is set."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(interval_s):
            return_free_memory()

    threading.Thread(target=run, name="heap", daemon=True).start()
    return stop


_C_LIBRARY: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
