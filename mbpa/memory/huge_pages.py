"""Huge pages for large blocks of memory, on Linux.

A search in a graph jumps from key to key through the whole block. With pages of 4 KiB the processor
spends a fifth of its time looking up addresses, or more; with pages of 2 MiB it does not.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

MIN_BYTES = 32 << 20  # smaller blocks gain little, and some are the stacks of threads
MADV_HUGEPAGE = 14
ANONYMOUS = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p 0+ 00:00 0\s*")


def use_huge_pages() -> None:
    """Ask for huge pages in the large private blocks of this process; elsewhere, do nothing.

    Pages that are in use already change in time, new ones at once. It is a hint: the kernel may
    ignore it.
    """
    try:
        blocks = list(_find_large_blocks())
        advise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError, TypeError):  # another system, or /proc is hidden
        return
    for start, size in blocks:
        advise(ctypes.c_void_p(start), ctypes.c_size_t(size), MADV_HUGEPAGE)


def _find_large_blocks() -> Iterator[tuple[int, int]]:
    """Yield address and size of each large private block that can be written to."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        if found := ANONYMOUS.fullmatch(line):
            start, end = (int(number, 16) for number in found.groups())
            if end - start >= MIN_BYTES:
                yield start, end - start
