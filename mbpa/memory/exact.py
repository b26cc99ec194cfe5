"""Exact nearest neighbours by one matrix product and a top-k, on a CPU or a GPU.

Keys and their squared norms stay where they are; a read costs `‖h‖² − 2 q·h` for every key, in
blocks, and never sorts more than a block and the best so far. Empty slots have infinite norm.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from mbpa.memory.base import Memory
from mbpa.memory.neighbors import Candidates
from mbpa.memory.ranking import SCRATCH_BYTES, expanded_scores


class ExactMemory(Memory):
    """A memory in one tensor, searched exhaustively; see `Memory` for the arguments.

    Example:
        >>> import torch, mbpa
        >>> memory = mbpa.ExactMemory(capacity=100, key_dim=2)
        >>> ids = memory.write(torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.tensor([7, 8]))
        >>> memory.read(torch.tensor([[3.0, 3.0]]), k=2).distances
        tensor([[ 1., 18.]])
    """

    def _clear(self) -> None:
        # On a CPU the pages of an empty tensor cost nothing until they are written to.
        self._keys = torch.empty(self.capacity, self.key_size, dtype=self.dtype, device=self.device)
        shape = (self.capacity, *self.value_shape)
        self._values = torch.empty(shape, dtype=self.value_dtype, device=self.device)
        self._norms = torch.full(
            (self.capacity,), math.inf, dtype=self.distance_dtype, device=self.device
        )

    def _put(
        self, slots: Int[Tensor, "N"], keys: Float[Tensor, "N D"], values: Shaped[Tensor, "N *V"]
    ) -> None:
        self._keys[slots] = keys
        self._values[slots] = values
        self._norms[slots] = keys.to(self.distance_dtype).square().sum(1)

    def _get(self, slots: Int[Tensor, "N"]) -> tuple[Float[Tensor, "N D"], Shaped[Tensor, "N *V"]]:
        return self._keys.index_select(0, slots), self._values.index_select(0, slots)

    def _delete(self, slots: Int[Tensor, "N"]) -> None:
        self._keys[slots] = 0
        self._values[slots] = 0
        self._norms[slots] = math.inf

    def _nearest(self, queries: Float[Tensor, "B D"], k: int) -> Candidates:
        count, rows = self._ring.used, len(queries)
        if k >= count:  # no slot is empty, and every entry is asked for
            return Candidates(torch.arange(count, device=self.device).expand(rows, -1), None)
        widest = max(rows, self.key_size)  # of the scores, and of keys kept in half precision
        size = max(k, SCRATCH_BYTES // (widest * self.distance_dtype.itemsize))
        best: tuple[Tensor, Tensor] | None = None
        for start in range(0, count, size):
            stop = min(start + size, count)
            keys = self._keys[start:stop].to(self.distance_dtype)
            scores = expanded_scores(self._norms[start:stop], queries, keys)
            values, slots = scores.topk(min(k, stop - start), largest=False, sorted=False)
            slots += start
            if best is not None:
                values, slots = torch.cat([best[0], values], 1), torch.cat([best[1], slots], 1)
                values, chosen = values.topk(k, largest=False, sorted=False)
                slots = slots.gather(1, chosen)
            best = values, slots
        assert best is not None  # count ≥ 1
        values, slots = best
        beyond = values.amax(1) + queries.square().sum(1)
        return Candidates(slots, beyond)
