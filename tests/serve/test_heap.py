"""Freed memory is returned to the system, where the C library is glibc."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from mbpa.serve import heap

PROGRAM = """
import ctypes, runpy, sys, time
from pathlib import Path

heap = runpy.run_path(sys.argv[1])  # without importing torch
library, block = ctypes.CDLL(None), 24 << 20
library.malloc.restype = ctypes.c_void_p
library.malloc.argtypes, library.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]

def allocate(size):
    address = library.malloc(size)
    ctypes.memset(address, 1, size)
    return address

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

if "large" in sys.argv:
    heap["return_large_blocks"]()
library.free(allocate(block))  # from now on glibc takes blocks of this size from its heap
before = resident()
large = allocate(block)
small = [allocate(100_000) for _ in range(8)]  # above the large block, which they lock in
library.free(large)
if "all" in sys.argv:
    heap["return_free_memory"]()
if "regularly" in sys.argv:
    stop = heap["return_free_memory_regularly"](0.05)
    time.sleep(0.5)
    stop.set()
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
@pytest.mark.parametrize("what", ["large", "all", "regularly"])
def test_freed_memory_is_returned(what):
    assert grow_resident() > 20 << 20  # otherwise there would be nothing to mend
    assert grow_resident(what) < 4 << 20


def grow_resident(*arguments: str) -> int:
    command = [sys.executable, "-c", PROGRAM, heap.__file__, *arguments]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
