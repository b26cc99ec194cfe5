"""A memory and a reference list that get the same calls, and whose answers are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from mbpa.memory import Memory, Neighbors
from mbpa.memory.ranking import get_matmul_roundoff
from mbpa.testing.claims import require, require_same

MakeMemory = Callable[[int, int], Memory]
KEY_DIM = 3


class Twins:
    """A memory and a list of (id, key, value), oldest first, that must agree after the same calls.

    Keys are small integers unless stated otherwise, so ties are frequent and distances exact.
    """

    def __init__(self, make: MakeMemory, capacity: int, exact: bool) -> None:
        self.exact = exact
        self.memory: Memory = make(capacity, KEY_DIM)
        self.capacity: int = capacity
        self.entries: list[tuple[int, Tensor, Tensor]] = []
        self.next_id: int = 0
        self._generator = torch.Generator().manual_seed(capacity)

    def keys(self, count: int, *, real: bool = False) -> Tensor:
        keys = torch.randint(-3, 4, (count, KEY_DIM), generator=self._generator).double()
        if real:
            keys += torch.randn(keys.shape, generator=self._generator, dtype=keys.dtype)
        return keys.to(self.memory.device, self.memory.dtype)

    def values(self, count: int) -> Tensor:
        shape = (count, *self.memory.value_shape)
        values = torch.randint(0, 100, shape, generator=self._generator)
        return values.to(self.memory.device, self.memory.value_dtype)

    def ids(self) -> list[int]:
        return [entry[0] for entry in self.entries]

    def write(self, keys: Tensor) -> None:
        values = self.values(len(keys))
        given = keys.clone(), values.clone()
        ids = self.memory.write(keys, values).tolist()
        require_same("write returns ids that continue from the last", self.append(*given), ids)
        require_same("write leaves its keys as they are", given[0].tolist(), keys.tolist())
        require_same("write leaves its values as they are", given[1].tolist(), values.tolist())
        self.agree("write")

    def append(self, keys: Tensor, values: Tensor) -> list[int]:
        ids = list(range(self.next_id, self.next_id + len(keys)))
        self.entries += zip(ids, keys.cpu(), values.cpu(), strict=True)
        del self.entries[: -self.capacity]
        self.next_id += len(keys)
        return ids

    def delete(self, ids: Iterable[int]) -> None:
        gone = list(ids)
        self.memory.delete(torch.tensor(gone, dtype=torch.int64))
        self.entries = [entry for entry in self.entries if entry[0] not in gone]
        self.agree("delete")

    def resize(self, capacity: int) -> None:
        self.memory.resize(capacity)
        self.capacity = capacity
        del self.entries[:-capacity]
        self.agree("resize")

    def agree(self, after: str) -> None:
        memory = self.memory
        held = memory.entries()
        require_same(f"ids in entries() after {after}", self.ids(), held.ids.tolist())
        keys = [key.tolist() for _, key, _ in self.entries]
        values = [value.tolist() for _, _, value in self.entries]
        require_same(f"keys in entries() after {after}", keys, held.keys.tolist())
        require_same(f"values in entries() after {after}", values, held.values.tolist())
        require_same(f"len() after {after}", len(self.entries), len(memory))
        require_same(f"next_id after {after}", self.next_id, memory.next_id)
        require_same(f"capacity after {after}", self.capacity, memory.capacity)
        live = memory.holds(torch.arange(self.next_id)).nonzero()[:, 0].tolist()
        require_same(f"what holds() says after {after}", self.ids(), live)

    def read(self, queries: Tensor, k: int, keys_for: int | None = None) -> Neighbors:
        given = queries.clone()
        found = self.memory.read(queries, k, keys_for=keys_for)
        if self.memory.holds_labels:
            found = self.memory.count_labels(found)
        require_same("read leaves its queries as they are", given.tolist(), queries.tolist())
        width = min(k, len(self.entries))
        require_same("shape of what read returns", (len(queries), width), tuple(found.mask.shape))
        for row, query in enumerate(given):
            self.check_row(found, row, query, k, keys_for)
        return found

    def check_row(
        self, found: Neighbors, row: int, query: Tensor, k: int, keys_for: int | None
    ) -> None:
        """Compare the neighbours found for one query with the list in its current state."""
        ids, mask = found.ids[row].tolist(), found.mask[row].tolist()
        distances, count = found.distances[row].tolist(), sum(mask)
        require_same("the mask is True, then False", sorted(mask, reverse=True), mask)
        padding = ids[count:], found.slots[row].tolist()[count:], distances[count:]
        blank = [-1] * (len(ids) - count)
        require_same(
            "padding has id −1, slot −1, distance ∞",
            (blank, blank, [math.inf] * len(blank)),
            padding,
        )
        finite = [bool(t[row].isfinite().all()) for t in (found.keys, found.values, found.dots)]
        require_same("keys, values and dots are finite, padding too", [True] * 3, finite)
        ids, distances = ids[:count], distances[:count]
        require_same("an entry is found once", len(ids), len(set(ids)))
        require_same("only live entries are found", set(), set(ids) - set(self.ids()))
        order = sorted(range(count), key=lambda place: (distances[place], -ids[place]))
        require_same(
            "nearest first, newest first among equals", [ids[place] for place in order], ids
        )
        nearest = self.nearest(query, k)
        if self.exact:
            require_same(f"ids of the {k} nearest", nearest, ids)
        width = min(found.mask.shape[1], k if keys_for is None else keys_for)
        require_same("number of neighbours with keys", width, found.keys.shape[1])
        if found.label_counts is not None:
            labels = [value.tolist() for _, _, value in self.entries]
            expected = [labels.count(label) for label in found.values[row].tolist()[:count]]
            counts = found.label_counts[row].tolist()
            require_same("entries of each neighbour's label", expected, counts[:count])
            require_same("label counts of padding", [1] * len(blank), counts[count:])
        entries = {id_: (key.tolist(), value.tolist()) for id_, key, value in self.entries}
        for place, id_ in enumerate(ids):
            self._check_neighbor(found, row, place, id_, *entries[id_], query.tolist())

    def _check_neighbor(
        self,
        found: Neighbors,
        row: int,
        place: int,
        id_: int,
        key: list[float],
        value: Any,
        query: list[float],
    ) -> None:
        memory = self.memory
        require_same(f"value of entry {id_}", value, found.values[row, place].tolist())
        if place < found.keys.shape[1]:
            require_same(f"key of entry {id_}", key, found.keys[row, place].tolist())
        slot = int(found.slots[row, place])
        is_written = id_ < memory.next_id
        in_range = 0 <= slot < self.capacity if is_written else slot == -1
        require(in_range, f"slot of entry {id_}", "−1 or one of the memory's", slot)
        distance, actual = _square_distance(key, query), float(found.distances[row, place])
        close = math.isclose(distance, actual, rel_tol=64 * torch.finfo(memory.distance_dtype).eps)
        require(close, f"distance Σ(h − q)² of entry {id_}", distance, actual)
        dot, actual = _multiply(key, query), float(found.dots[row, place])
        roundoff = get_matmul_roundoff(memory.distance_dtype, memory.device)
        slack = (KEY_DIM + 8) * roundoff * math.hypot(*key) * math.hypot(*query)
        require(abs(dot - actual) <= slack, f"inner product of entry {id_}", dot, actual)

    def nearest(self, query: Tensor, k: int) -> list[int]:
        place = query.tolist()
        ranked = sorted(
            (_square_distance(key.tolist(), place), -id_) for id_, key, _ in self.entries
        )
        return [-negative for _, negative in ranked[:k]]


def _square_distance(one: list[float], other: list[float]) -> float:
    return math.fsum((a - b) ** 2 for a, b in zip(one, other, strict=True))


def _multiply(one: list[float], other: list[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))
