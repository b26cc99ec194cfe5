"""Copies of memories, by `copy.deepcopy` and `pickle`: consistent, complete and independent.

A copy is made under the lock, so that writes of other threads are in it whole or not at all. It has
the same entries in the same slots, and a lock of its own. Memories whose entries live elsewhere, in
a database or in other processes, cannot be copied.
"""

from __future__ import annotations

import copy
import itertools
import threading
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mbpa.replay import Replayer

_revisions = itertools.count()  # no two memories ever share a revision


class Copyable:
    """The part of a memory that is not copied: lock, recordings, revision, sorted labels."""

    is_local = True
    """Whether the object itself holds its entries, so that copies and state dicts include them."""

    _lock: threading.RLock
    _replayer: Replayer
    _revision: int
    _sorted_labels: Tensor | None = None

    def _set_up(self) -> None:
        self._lock, self._replayer = threading.RLock(), Replayer()
        self._change_revision()

    def _change_revision(self) -> None:
        self._revision = next(_revisions)

    def _prepare(self, *, change: bool) -> None:
        raise NotImplementedError

    def _get_content(self) -> dict[str, Any]:
        """Return copies of all attributes, from which `_set_content` restores the memory.

        A backend may override both, to leave out what can be made anew.
        """
        return self._copy_attributes()

    def _set_content(self, content: dict[str, Any]) -> None:
        vars(self).update(content)

    def _copy_attributes(self, *without: str) -> dict[str, Any]:
        kept = {k: v for k, v in vars(self).items() if k not in _UNCOPIED and k not in without}
        return copy.deepcopy(kept)

    def __getstate__(self) -> dict[str, Any]:
        content = self._copy_content()
        packed = {k: Packed.of(v) if isinstance(v, Tensor) else v for k, v in content.items()}
        return {**packed, "_device": torch.empty(0, device=content["_device"])}

    def __setstate__(self, state: dict[str, Any]) -> None:
        device = state["_device"].device  # where torch.load has put it
        content = {k: v.unpack(device) if isinstance(v, Packed) else v for k, v in state.items()}
        self._set_copied({**content, "_device": device})

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin._set_copied(self._copy_content())
        return twin

    def _copy_content(self) -> dict[str, Any]:
        if not self.is_local:
            raise TypeError(
                f"a {type(self).__name__} cannot be copied or pickled, since its entries live "
                "elsewhere: attach another one there, or restore(memory.entries(), "
                "memory.next_id) into a memory of another kind"
            )
        with self._lock, torch.inference_mode(False), torch.no_grad():
            self._prepare(change=False)
            return self._get_content()

    def _set_copied(self, content: dict[str, Any]) -> None:
        self._set_up()
        with torch.inference_mode(False), torch.no_grad():  # these tensors are written to later
            self._set_content(content)


class Packed(NamedTuple):
    """A tensor as bytes, which pickle stores in place.

    A tensor would be put into shared memory when it is sent to a new process, but one that exists
    only while it is pickled is gone before that process has started.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    content: NDArray[np.uint8]

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        plain = tensor.detach().cpu().contiguous()
        return cls(plain.dtype, tuple(plain.shape), plain.flatten().view(torch.uint8).numpy())

    def unpack(self, device: torch.device) -> Tensor:
        tensor = torch.empty(self.shape, dtype=self.dtype)
        tensor.flatten().view(torch.uint8).copy_(torch.from_numpy(self.content))
        return tensor.to(device)


_UNCOPIED = {"_lock", "_replayer", "_revision", "_sorted_labels"}
