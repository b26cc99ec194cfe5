"""Exact nearest neighbours by one matrix product and a top-k, on a CPU or a GPU.

Keys and their squared norms are never moved. A read computes `‖h‖² − 2 q·h` for every key, in
blocks, and never sorts more than one block and the best so far. Empty slots have infinite norm.
Large memories on a GPU are searched in half precision first (`two_stage.py`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from mbpa.device import takes_kernels
from mbpa.memory.base import Memory
from mbpa.memory.neighbors import Candidates
from mbpa.memory.ranking import (
    SCRATCH_BYTES,
    compute_distances,
    compute_scores,
    find_smallest,
    gather_rows,
)
from mbpa.memory.two_stage import CoarseKeys

_ROWS = ("_keys", "_values", "_norms")  # one per slot


class ExactMemory(Memory):
    """A memory that holds all keys in one tensor and searches exhaustively.

    Args:
        capacity: maximum number of entries; when full, the oldest are overwritten first.
        key_dim: size or shape of a key.
        value_shape: shape of one value; `()` for class labels.
        value_dtype: an integer dtype for class labels, a floating one for regression targets.
        dtype: dtype in which keys are stored. Half precision halves the memory; distances are
            computed in float32 at least.
        device: device that stores the keys and answers queries.

    Example:
        >>> import torch, mbpa
        >>> memory = mbpa.ExactMemory(capacity=100, key_dim=2)
        >>> ids = memory.write(torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.tensor([7, 8]))
        >>> memory.read(torch.tensor([[3.0, 3.0]]), k=2).distances
        tensor([[ 1., 18.]])
    """

    def _clear(self) -> None:
        self._allocate(self.capacity)

    def _allocate(self, slots: int) -> None:
        # On a CPU the pages of an uninitialised tensor cost nothing until they are written to.
        self._keys = torch.empty(slots, self.key_size, dtype=self.dtype, device=self.device)
        shape = (slots, *self.value_shape)
        self._values = torch.empty(shape, dtype=self.value_dtype, device=self.device)
        self._norms = torch.full((slots,), math.inf, dtype=self.distance_dtype, device=self.device)
        self._coarse = CoarseKeys(self._keys) if takes_kernels(self._norms) else None

    def _get_content(self) -> dict[str, Any]:
        used = self._used_slots
        rows = {name: getattr(self, name)[:used].clone() for name in _ROWS}
        return {**self._copy_attributes("_slot_ids", "_coarse", *_ROWS), **rows}

    def _set_content(self, content: dict[str, Any]) -> None:
        rows = {name: content.pop(name) for name in _ROWS}
        super()._set_content(content)
        self._allocate(self.capacity)
        for name, stored in rows.items():
            getattr(self, name)[: len(stored)] = stored
        if self._coarse is not None:
            slots = self._norms.isfinite().nonzero()[:, 0]
            self._coarse.update(slots, self._keys[slots])

    def _describe_layout(self) -> Hashable | None:
        if self._coarse is None:
            return None
        places = (tensor.data_ptr() for tensor in (self._keys, self._values, self._norms))
        return *places, self._coarse.scale, self._coarse.lost

    @property
    def _readable_slot(self) -> int:
        return 0

    def _put(
        self, slots: Int[Tensor, "N"], keys: Float[Tensor, "N D"], values: Shaped[Tensor, "N *V"]
    ) -> None:
        self._keys[slots] = keys
        self._values[slots] = values
        self._norms[slots] = keys.to(self.distance_dtype).square().sum(1)
        if self._coarse is not None:
            self._coarse.update(slots, keys)

    def _get(self, slots: Int[Tensor, "N"]) -> tuple[Float[Tensor, "N D"], Shaped[Tensor, "N *V"]]:
        return self._keys.index_select(0, slots), self._values.index_select(0, slots)

    def _get_keys(self, slots: Int[Tensor, "N"]) -> Float[Tensor, "N D"]:
        return gather_rows(self._keys, slots)

    def _get_values(self, slots: Int[Tensor, "N"]) -> Shaped[Tensor, "N *V"]:
        return self._values.index_select(0, slots)

    def _delete(self, slots: Int[Tensor, "N"]) -> None:
        self._keys[slots] = 0
        self._values[slots] = 0
        self._norms[slots] = math.inf
        if self._coarse is not None:
            self._coarse.clear(slots)

    def _nearest(self, queries: Float[Tensor, "B D"], k: int) -> Candidates:
        count, rows = self._used_slots, len(queries)
        if k >= count:  # no slot is empty, and every entry is needed
            slots = torch.arange(count, device=self.device).flip(0)  # roughly the newest first
            return Candidates(slots.expand(rows, -1), None)
        if self._coarse is not None and self._coarse.can_find(k, count):
            return self._coarse.nearest(self._norms, queries, k, count)
        if self._coarse is not None and count * rows * queries.itemsize <= SCRATCH_BYTES:
            return self._nearest_of_few(queries, k, count)
        return search_all(self._keys[:count], self._norms[:count], queries, k)

    def _nearest_of_few(self, queries: Float[Tensor, "B D"], k: int, count: int) -> Candidates:
        """Compute every distance as Σ(h−q)²; on a GPU this takes no longer than sorting them."""
        keys, norms = self._keys[:count].to(queries.dtype), self._norms[:count]
        distances = compute_distances(queries, keys).masked_fill_(norms == math.inf, math.inf)
        distances, slots = distances.topk(k, largest=False)
        dots = compute_scores(torch.zeros_like(norms), queries, keys).mul_(-0.5)
        return Candidates(slots, distances[:, -1], (distances, dots.gather(1, slots)))


def search_all(
    keys: Float[Tensor, "N D"], norms: Float[Tensor, "N"], queries: Float[Tensor, "B D"], k: int
) -> Candidates:
    """Return the k nearest of all keys by `‖h‖² − 2 q·h`; empty slots have infinite norm.

    Args:
        keys: in any floating dtype.
        norms: their squared norms, in the dtype of the distances, like `queries`.
        queries: at least one.
        k: at most the number of keys, and at least 1.
    """
    widest = max(queries.shape)  # of the scores, or of half-precision keys
    size = max(k, SCRATCH_BYTES // (widest * queries.itemsize))
    best: tuple[Tensor, Tensor] | None = None
    for start in range(0, len(keys), size):
        stop = min(start + size, len(keys))
        scores = compute_scores(norms[start:stop], queries, keys[start:stop].to(queries.dtype))
        values, slots = find_smallest(scores, min(k, stop - start))
        if best is not None:
            slots = torch.cat([best[1], slots + start], 1)
            values, chosen = torch.cat([best[0], values], 1).topk(k, largest=False)
            slots = slots.gather(1, chosen)
        best = values, slots
    assert best is not None  # there is at least one key
    values, slots = best
    return Candidates(slots, values[:, -1] + queries.square().sum(1))
