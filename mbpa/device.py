"""Capabilities of a device: whether it runs our Triton kernels, its free memory and its speed.

The kernels need a recent NVIDIA GPU and float32. Everything they compute has a plain torch
equivalent with the same result, which runs elsewhere. Setting the environment variable
`MBPA_TRITON=0` disables the kernels; `MBPA_TRITON=1` with `TRITON_INTERPRET=1` runs them on a CPU,
slowly.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from threading import Thread

import torch
from torch import Tensor

OLDEST_CAPABILITY = (8, 0)
BYTES_PER_THREAD = 1 << 22  # fewer are compared faster than a thread starts


@dataclass(frozen=True)
class Throughput:
    """The speed of a device, used to choose the fastest of several equivalent computations."""

    operations: float
    """Floating-point operations per second in large matrix products."""
    bytes: float
    """Bytes read and written per second."""
    call: float
    """Seconds that even the smallest operation takes."""


def choose_device(name: str) -> torch.device:
    """Return the device called `name`: "cpu", "cuda", or "auto" for CUDA if available, else CPU.

    Raises:
        ValueError: `name` is "cuda" and there is no CUDA device.
    """
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ValueError("there is no CUDA device: pass --device cpu, or leave it out")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and has_cuda) else "cpu")


@contextlib.contextmanager
def use_one_thread() -> Iterator[None]:
    """Limit torch to one thread: with tiny tensors more threads gain nothing and may cost a lot."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@cache
def measure_throughput(device: torch.device) -> Throughput:
    """Measure how fast a device computes; takes a few hundredths of a second, once per process.

    The results are rounded to powers of two, so that noise does not change decisions based on them.
    """
    size, numbers = (4096, 1 << 26) if device.type == "cuda" else (512, 1 << 22)
    square = torch.full((size, size), 1e-3, device=device)
    row, few = square.new_ones(numbers), square.new_ones(8)
    operations = 2 * size**3 / _seconds(lambda: square @ square, device)
    moved = 2 * row.nbytes / _seconds(lambda: row.add_(1), device)
    call = _seconds(lambda: [few.add_(1) for _ in range(100)], device) / 100
    return Throughput(*(2.0 ** round(math.log2(rate)) for rate in (operations, moved, call)))


def have_same_bits(some: Tensor, others: Tensor) -> Tensor:
    """Return whether two tensors of the same shape and dtype hold the same numbers.

    On a CPU this takes as long as reading them once, an eighth of the time of `eq` and `all`.
    """
    is_plain = some.is_contiguous() and others.is_contiguous() and some.device.type == "cpu"
    if _MEMCMP is None or not is_plain:
        return some.eq(others).all()
    return torch.tensor(_compare_bytes(_MEMCMP, some, others))


def _compare_bytes(compare: Callable[..., int], some: Tensor, others: Tensor) -> bool:
    """Compare two contiguous tensors on the CPU, large ones with as many threads as torch uses."""
    threads = max(1, min(torch.get_num_threads(), some.nbytes // BYTES_PER_THREAD))
    size = -(-some.nbytes // threads)
    differences = [1] * threads

    def compare_part(part: int) -> None:
        start = part * size
        count = min(size, some.nbytes - start)
        differences[part] = compare(some.data_ptr() + start, others.data_ptr() + start, count)

    helpers = [Thread(target=compare_part, args=(part,)) for part in range(1, threads)]
    for helper in helpers:
        helper.start()
    compare_part(0)
    for helper in helpers:
        helper.join()
    return not any(differences)


def takes_kernels(tensor: Tensor) -> bool:
    """Return whether our kernels can process this tensor."""
    return tensor.dtype == torch.float32 and runs_kernels(tensor.device)


def runs_kernels(device: torch.device) -> bool:
    """Return whether our kernels run on this device."""
    wanted = os.environ.get("MBPA_TRITON")
    if wanted == "0" or not _has_triton():
        return False
    if device.type == "cuda":
        return _is_recent(device)
    return wanted == "1" and is_interpreted()


def is_interpreted() -> bool:
    """Return whether Triton interprets kernels in Python, one program after the other."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def free_bytes(device: torch.device) -> int:
    """Return how many bytes can still be allocated on this device."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if sys.platform != "win32":
        with contextlib.suppress(ValueError, OSError):  # macOS does not report this
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 1 << 32


def ran_out_of_memory(error: BaseException) -> bool:
    """Return whether this error means that memory ran out.

    Torch has an exception class for some of these errors only; the rest are known by their message.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    texts = "DefaultCPUAllocator: ", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED"
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _is_recent(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= OLDEST_CAPABILITY


def _seconds(work: object, device: torch.device) -> float:
    """Return the shortest of a few timings of `work`, in seconds."""
    assert callable(work)
    took = []
    for _ in range(4):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took.append(time.perf_counter() - start)
    return min(took)


def _find_memcmp() -> Callable[[int, int, int], int] | None:
    try:
        memcmp = ctypes.CDLL(None).memcmp
    except (AttributeError, OSError, TypeError):  # not every system offers it in this way
        return None
    memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    return memcmp


_MEMCMP = _find_memcmp()
