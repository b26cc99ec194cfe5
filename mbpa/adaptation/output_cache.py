"""A cache of the head's outputs for memory entries, which persists between calls.

The unadapted head's output for an entry does not depend on the query. So it is computed once and
looked up by slot and id: an overwritten slot has another id. The cache is cleared when the head's
parameters differ from the snapshot that it was computed with (compared value by value, since writes
through `.data` leave no other trace), or when the memory's entries got new keys.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn import functional

from mbpa.adaptation.problem import LinearHead
from mbpa.device import have_same_bits
from mbpa.memory import Neighbors
from mbpa.replay import assume, assume_later

EVEN_ROWS = {"cpu": 64, "cuda": 512}
ROW_MULTIPLE = 16  # numbers; rows that start at a multiple of this are read four at a time


@dataclass(frozen=True, eq=False)
class StoredOutputs:
    """Outputs of B × K neighbours, or what was made of them, as rows of two tables.

    Padding points at row 0.
    """

    table: Shaped[Tensor, "N C"]
    unwritten: Shaped[Tensor, "M C"]
    """Outputs of entries that are not in the memory yet; `index` counts them as rows N, N+1, …"""
    index: Int[Tensor, "B K"]

    @staticmethod
    def make_for_call(outputs: Float[Tensor, "B K C"]) -> StoredOutputs:
        """Create a table for one call."""
        table = outputs.flatten(0, 1)
        index = torch.arange(len(table), device=table.device).view(outputs.shape[:2])
        return StoredOutputs(table, table[:0], index)

    def gather(self, below: Float[Tensor, "B C"]) -> Float[Tensor, "B L C"]:
        """Return the outputs of each query's neighbours, with the query's own row at the end."""
        rows = self._take(functional.pad(self.index, (0, 1)))
        rows[:, -1] = below
        return rows

    def take(self) -> Shaped[Tensor, "B K C"]:
        """Return the outputs of each query's neighbours."""
        return self._take(self.index)

    def _take(self, index: Int[Tensor, "B L"]) -> Shaped[Tensor, "B L C"]:
        count = len(self.table)
        if not len(self.unwritten):
            return self.table[index]
        outside, is_written = (index - count).clamp_min(0), (index < count)[..., None]
        inside = self.table[index.clamp_max(count - 1)]
        return torch.where(is_written, inside, self.unwritten[outside])

    def sum_weighted(self, weights: Float[Tensor, "B K"]) -> Float[Tensor, "B C"]:
        """Return `Σ_k weights_k output_k`."""
        count = len(self.table)
        if not len(self.unwritten):
            return _sum_rows(self.table, self.index, weights)
        is_written = self.index < count
        inside, outside = self.index.clamp_max(count - 1), (self.index - count).clamp_min(0)
        return _sum_rows(self.table, inside, weights.masked_fill(~is_written, 0)) + _sum_rows(
            self.unwritten, outside, weights.masked_fill(is_written, 0)
        )

    def pick(self, labels: Int[Tensor, "B K"]) -> Float[Tensor, "B K"]:
        """Return the output of each neighbour for its label."""
        count = len(self.table)
        if not len(self.unwritten):
            return self.table[self.index, labels]
        inside, outside = self.index.clamp_max(count - 1), (self.index - count).clamp_min(0)
        is_written = self.index < count
        return torch.where(is_written, self.table[inside, labels], self.unwritten[outside, labels])

    def rows(self, rows: slice | Tensor) -> StoredOutputs:
        return StoredOutputs(self.table, self.unwritten, self.index[rows])


def takes_product(rows: int, count: int, batch: int) -> bool:
    """Return whether sums over `count` of `rows` rows are faster as a product with all rows.

    The product reads the rows once for the whole batch, at the speed of a matrix product.
    """
    return rows * (1 + 30 / batch) <= 64 * count


def _sum_rows(
    table: Float[Tensor, "N C"], index: Int[Tensor, "B K"], weights: Float[Tensor, "B K"]
) -> Float[Tensor, "B C"]:
    if not takes_product(len(table), index.shape[1], len(index)):
        return functional.embedding_bag(index, table, mode="sum", per_sample_weights=weights)
    spread = torch.zeros(len(index), len(table), dtype=table.dtype, device=table.device)
    return spread.scatter_add_(1, index, weights) @ table


class OutputStore:
    """A table of outputs by memory slot, filled as neighbours are looked up.

    Args:
        finish: function applied to outputs (N, C) before they are stored, such as softmax. It may
            overwrite them, and return rows of another length.
    """

    def __init__(self, finish: Callable[[Tensor], Tensor]) -> None:
        self._finish = finish
        self._lock = threading.Lock()
        self._form: object = None
        self._made_by: tuple[Tensor, Tensor | None, int] | None = None
        self._is_trusted = self._was_compared = False
        self._table = torch.empty(0, 0)
        self._ids = torch.empty(0, dtype=torch.int64)

    @contextmanager
    def lookup(
        self, head: LinearHead, neighbors: Neighbors, keys: Float[Tensor, "B K D"]
    ) -> Iterator[StoredOutputs]:
        """Yield the outputs of the neighbours; they are valid as long as the context is open.

        Other threads wait meanwhile, since they may overwrite rows of the table.
        """
        with self._lock:
            self._make_room(neighbors.capacity, head, keys.dtype)
            slots, ids = neighbors.slots, neighbors.ids
            missing = self._ids[slots] != ids  # slot −1 has id −1, like padding
            # Padding points at a row of the same query: any other may belong to a deleted entry.
            index = slots.where(slots >= 0, slots[:, :1]).clamp_min_(0)
            same, unwritten = self._is_current(head, neighbors.revision), self._table[:0]
            held = self._table, self._ids, self._made_by  # by a recording, which reads them
            assume_later(lambda: held[0] is self._table and held[2] is self._made_by)
            if not assume(same & ~missing.any()):
                if not same:
                    self._start_over(head, neighbors.revision)
                    missing = neighbors.mask
                places = missing.flatten().nonzero()[:, 0]
                found = [tensor.flatten(0, 1)[places] for tensor in (ids, slots, keys)]
                rows, unwritten = self._fill(head, *found)
                index = index.flatten().index_copy(0, places, rows).view_as(index)
            yield StoredOutputs(self._table, unwritten, index)

    def put(
        self,
        head: LinearHead,
        capacity: int,
        revision: int,
        ids: Int[Tensor, "N"],
        slots: Int[Tensor, "N"],
        rows: Shaped[Tensor, "N W"],
        dtype: torch.dtype,
    ) -> None:
        """Store what was made of the outputs of entries before they are looked up.

        Args:
            head: the head that computed the outputs.
            capacity: capacity of the memory.
            revision: revision of the memory.
            ids: ids of the entries.
            slots: their slots.
            rows: what `finish` returned for them.
            dtype: dtype of the outputs.
        """
        with self._lock:
            self._make_room(capacity, head, dtype)
            if not self._is_current(head, revision):
                self._start_over(head, revision)
            self._table[slots], self._ids[slots] = rows, ids

    @contextmanager
    def trust_head(self) -> Iterator[None]:
        """Compare the head with the snapshot once, and not again while the context is open."""
        self._is_trusted, self._was_compared = True, False
        try:
            yield
        finally:
            self._is_trusted = False

    def _start_over(self, head: LinearHead, revision: int) -> None:
        self._ids.fill_(-1)
        self._table.zero_()  # a product reads unused rows, too
        bias = None if head.bias is None else head.bias.clone()
        self._made_by = head.weight.clone(), bias, revision

    def _make_room(self, capacity: int, head: LinearHead, dtype: torch.dtype) -> None:
        classes, device = len(head.weight), head.weight.device
        form = capacity, classes, dtype, device
        if form == self._form:
            return
        row = self._finish(torch.zeros(0, classes, dtype=dtype, device=device))
        # The old table is freed before the new one is made.
        self._form, self._made_by, self._table = None, None, torch.empty(0, 0)
        width = _row_width(row.shape[1], device)
        # Zeros, since a product reads every row.
        rows = torch.zeros(capacity, width, dtype=row.dtype, device=device)
        self._table = rows[:, : row.shape[1]]
        self._ids = torch.full((capacity + 1,), -1, device=device)
        self._form = form

    def _is_current(self, head: LinearHead, revision: int) -> Bool[Tensor, ""]:
        """Return whether the table was computed by this head for this revision of the memory."""
        if self._made_by is not None:
            weight, bias, made_at = self._made_by
            alike = (weight.shape, weight.dtype) == (head.weight.shape, head.weight.dtype)
            alike &= (bias is None) == (head.bias is None)
            if alike and revision == made_at:
                if self._is_trusted and self._was_compared:
                    return torch.ones((), dtype=torch.bool, device=head.weight.device)
                self._was_compared = True
                same = have_same_bits(weight, head.weight)
                if bias is not None and head.bias is not None:
                    same &= have_same_bits(bias, head.bias)
                return same
        return torch.zeros((), dtype=torch.bool, device=head.weight.device)

    def _fill(
        self,
        head: LinearHead,
        ids: Int[Tensor, "M"],
        slots: Int[Tensor, "M"],
        keys: Float[Tensor, "M D"],
    ) -> tuple[Int[Tensor, "M"], Shaped[Tensor, "U W"]]:
        """Fill in the outputs of these entries and return their rows.

        Also return the outputs of entries that are not written to the memory yet. Each output is
        computed once, however many queries found the entry.
        """
        new_ids, inverse = ids.unique(return_inverse=True)
        some = torch.empty_like(new_ids)
        some[inverse] = torch.arange(len(inverse), device=some.device)
        new_slots = slots[some]
        outputs = self.compute(head, keys[some])
        kept = new_slots >= 0
        self._table[new_slots[kept]] = outputs[kept]
        self._ids[new_slots[kept]] = new_ids[kept]
        place = (~kept).cumsum(0) - 1 + len(self._table)
        rows = torch.where(kept, new_slots, place)[inverse]
        unwritten = outputs[~kept]
        if len(unwritten):
            width = self._table.stride(0)  # both tables must have the same stride
            unwritten = functional.pad(unwritten, (0, width - unwritten.shape[1]))
            unwritten = unwritten[:, : outputs.shape[1]]
        return rows, unwritten

    def compute(self, head: LinearHead, keys: Float[Tensor, "M D"]) -> Shaped[Tensor, "M W"]:
        """Return what is stored of the outputs at these keys, without storing it.

        Outputs are computed for the same number of entries at a time, with padding: their rounding
        depends on that number, and must not depend on which other entries are missing. Otherwise a
        model that was saved and loaded would differ in the last bits.
        """
        rows = EVEN_ROWS["cuda" if keys.device.type == "cuda" else "cpu"]
        padding = keys[-1:].expand(-len(keys) % rows, -1)
        parts = torch.cat([keys, padding]).split(rows)
        return torch.cat([self._finish(head(part)) for part in parts])[: len(keys)]


def table_bytes(capacity: int, outputs: Float[Tensor, "B *C"]) -> int:
    """Return the bytes that a table of such outputs takes for a memory of this capacity."""
    row = outputs[0] if len(outputs) else outputs.new_empty(outputs.shape[1:])
    return capacity * _row_width(row.numel(), outputs.device) * outputs.itemsize


def _row_width(classes: int, device: torch.device) -> int:
    multiple = ROW_MULTIPLE if device.type == "cuda" else 1
    return -(-classes // multiple) * multiple
