"""Head outputs of memory entries, kept from call to call.

What the un-adapted head says of an entry does not depend on the query, so it is computed once and
found again by slot and id: an overwritten slot has another id. Everything is dropped when the
head's parameters differ from the snapshot they were computed with (compared value by value: writes
through `.data` leave no other trace), or when the memory re-keyed its entries.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from mbpa.adaptation.problem import LinearHead
from mbpa.memory import Neighbors


@dataclass(frozen=True, eq=False)
class StoredOutputs:
    """Outputs of B × K neighbours as rows of two tables; padding points at row 0."""

    table: Float[Tensor, "N C"]
    unwritten: Float[Tensor, "M C"]
    """Of entries that are not in the memory yet; they are rows N, N+1, …"""
    index: Int[Tensor, "B K"]

    def gathered(self) -> Float[Tensor, "B K C"]:
        count = len(self.table)
        if not len(self.unwritten):
            return self.table[self.index]
        outside = (self.index - count).clamp_min(0)
        inside = self.index.clamp_max(count - 1)
        written = (self.index < count)[..., None]
        return torch.where(written, self.table[inside], self.unwritten[outside])

    def weighted_sum(self, weights: Float[Tensor, "B K"]) -> Float[Tensor, "B C"]:
        """`Σ_k weights_k output_k`."""
        count = len(self.table)
        if not len(self.unwritten):
            return _weighted_rows(self.table, self.index, weights)
        is_written = self.index < count
        inside, outside = self.index.clamp_max(count - 1), (self.index - count).clamp_min(0)
        return _weighted_rows(
            self.table, inside, weights.masked_fill(~is_written, 0)
        ) + _weighted_rows(self.unwritten, outside, weights.masked_fill(is_written, 0))

    def rows(self, rows: slice) -> StoredOutputs:
        return StoredOutputs(self.table, self.unwritten, self.index[rows])


def takes_product(rows: int, count: int) -> bool:
    """Whether a sum over `count` of so many rows is cheaper as a product with all of them."""
    return rows <= 32 * count


def _weighted_rows(
    table: Float[Tensor, "N C"], index: Int[Tensor, "B K"], weights: Float[Tensor, "B K"]
) -> Float[Tensor, "B C"]:
    if not takes_product(len(table), index.shape[1]):
        return functional.embedding_bag(index, table, mode="sum", per_sample_weights=weights)
    spread = torch.zeros(len(index), len(table), dtype=table.dtype, device=table.device)
    return spread.scatter_add_(1, index, weights) @ table


class OutputStore:
    """A table of outputs by memory slot, filled as neighbours are looked up.

    Args:
        finish: applied to outputs before they are stored (say, softmax).
    """

    def __init__(self, finish: Callable[[Tensor], Tensor]) -> None:
        self._finish = finish
        self._lock = threading.Lock()
        self._made_by: tuple[Tensor, Tensor | None, int] | None = None
        self._table = torch.empty(0, 0)
        self._ids = torch.empty(0, dtype=torch.int64)

    @contextmanager
    def lookup(
        self, head: LinearHead, neighbors: Neighbors, keys: Float[Tensor, "B K D"]
    ) -> Iterator[StoredOutputs]:
        """Outputs of the neighbours, for as long as the context is open.

        Other threads wait meanwhile, since they may overwrite rows of the table.
        """
        with self._lock:
            shape = neighbors.capacity, len(head.weight)
            if self._table.shape != shape or not _are_alike(self._table, head.weight):
                self._table = head.weight.new_zeros(shape)  # zeros: a product reads every row
                self._ids = torch.full(shape[:1], -1, device=head.weight.device)
                self._made_by = None
            if not self._is_current(head, neighbors.revision):
                self._ids.fill_(-1)
                bias = None if head.bias is None else head.bias.clone()
                self._made_by = head.weight.clone(), bias, neighbors.revision
            yield self._filled(head, neighbors, keys)

    def _is_current(self, head: LinearHead, revision: int) -> bool:
        if self._made_by is None:
            return False
        weight, bias, made_at = self._made_by
        if weight.shape != head.weight.shape:
            return False
        if (bias is None) != (head.bias is None) or revision != made_at:
            return False
        same_bias = bias is None or head.bias is None or torch.equal(bias, head.bias)
        return same_bias and torch.equal(weight, head.weight)

    def _filled(
        self, head: LinearHead, neighbors: Neighbors, keys: Float[Tensor, "B K D"]
    ) -> StoredOutputs:
        slots, ids, mask = neighbors.slots, neighbors.ids, neighbors.mask
        index = slots.clamp_min(0)
        missing = mask & ((slots < 0) | (self._ids[index] != ids))
        unwritten = self._table[:0]
        if missing.any():
            # Each missing entry once, however many queries found it.
            new_ids, inverse = ids[missing].unique(return_inverse=True)
            some = torch.empty_like(new_ids)
            some[inverse] = torch.arange(len(inverse), device=some.device)
            new_slots = slots[missing][some]
            outputs = self._finish(head(keys[missing][some]))
            kept = new_slots >= 0
            self._table[new_slots[kept]] = outputs[kept]
            self._ids[new_slots[kept]] = new_ids[kept]
            unwritten = outputs[~kept]
            place = (~kept).cumsum(0) - 1 + len(self._table)
            index = index.masked_scatter(missing, torch.where(kept, new_slots, place)[inverse])
        return StoredOutputs(self._table, unwritten, index)


def _are_alike(one: Tensor, other: Tensor) -> bool:
    return one.device == other.device and one.dtype == other.dtype
