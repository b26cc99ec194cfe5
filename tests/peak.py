"""Counting, and limiting, the memory that a computation on the CPU takes."""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """The most bytes that the storages made under it took at any one time.

    Args:
        limit: raise `error` rather than let them take more bytes than this.
    """

    def __init__(
        self, limit: float = math.inf, error: Callable[[], Exception] = MemoryError
    ) -> None:
        super().__init__()
        self.limit, self.error = limit, error

    def __enter__(self) -> Peak:
        self.live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.now = self.most = 0
        return super().__enter__()

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self.live:
                self._follow(storage, storage._cdata, storage.nbytes())
        return result

    def _follow(self, storage: torch.UntypedStorage, address: int, size: int) -> None:
        if self.now + size > self.limit:
            raise self.error()

        def forget(_: object) -> None:
            del self.live[address]
            self.now -= size

        self.live[address] = weakref.ref(storage, forget)
        self.now += size
        self.most = max(self.most, self.now)


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def touch_new_memory(size: int) -> None:
    """Map and release memory that nobody used before.

    What comes from the heap may consist of pages that are resident since earlier tests.
    """
    with mmap.mmap(-1, size) as block:
        block[:: mmap.PAGESIZE] = bytes(len(block) // mmap.PAGESIZE)
