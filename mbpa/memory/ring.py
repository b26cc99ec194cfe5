"""Bookkeeping of a fixed-capacity ring: which slot holds which entry, without the entries.

Every entry gets the next integer as its permanent id. A write takes slots freed by deletion first,
then slots never used, then those of the oldest entries. So an entry is overwritten only when the
memory is full, and a deleted entry leaves the memory as if it had never been written. A write costs
O(batch) however full the ring is; a deletion costs O(live entries).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Allocation:
    """The slots and ids of the next entries; nothing changes until it is committed."""

    ids: Ints
    slots: Ints
    reused: int
    """Number of slots that were freed by deletion."""
    evicted: int
    """Number of slots that the oldest entries still occupy."""


class Ring:
    """Slots `0 … capacity−1`, each empty (id −1) or holding one entry, in order of age."""

    def __init__(self, capacity: int, ids: Ints | None = None, next_id: int = 0) -> None:
        """Create a ring: empty, or with entries of these ascending ids in slots `0, 1, …`."""
        ids = np.zeros(0, np.int64) if ids is None else ids
        self.capacity = capacity
        self.next_id: int = next_id
        self.live: int = len(ids)
        self.used: int = len(ids)  # slots used … capacity−1 have never held an entry
        self._ids: Ints = np.full(capacity, -1, np.int64)
        self._ids[: len(ids)] = ids
        self._order: Ints = np.arange(capacity)  # circular: slots, oldest first
        self._head = 0
        self._free: Ints = np.zeros(0, np.int64)

    @classmethod
    def of(cls, capacity: int, ids: Ints, slots: Ints, next_id: int) -> Ring:
        """Return a ring with entries of these ascending ids in these slots."""
        ring = cls(capacity, next_id=next_id)
        ring.live, ring.used = len(ids), int(slots.max(initial=-1)) + 1
        ring._ids[slots] = ids
        ring._order[: len(ids)] = slots
        ring._free = np.flatnonzero(ring._ids[: ring.used] < 0)
        return ring

    def __getstate__(self) -> dict[str, Any]:
        """Return copies of what is in use, for `copy` and `pickle`; a large ring may be empty."""
        used = {"_ids": self._ids[: self.used].copy(), "_order": self.oldest(self.live)}
        return {**vars(self), **used, "_head": 0, "_free": self._free.copy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ids, order = state["_ids"], state["_order"]
        vars(self).update(state)
        self._ids, self._order = np.full(self.capacity, -1, np.int64), np.arange(self.capacity)
        self._ids[: len(ids)], self._order[: len(order)] = ids, order

    def allocate(self, count: int, skipped: int = 0) -> Allocation:
        """Return slots and ids for `count` new entries (at most `capacity`), oldest first.

        The first `skipped` ids are left unused.
        """
        reused = min(count, len(self._free))
        fresh = min(count - reused, self.capacity - self.used)
        evicted = count - reused - fresh
        slots = np.concatenate(
            [self._free[:reused], np.arange(self.used, self.used + fresh), self.oldest(evicted)]
        )
        first = self.next_id + skipped
        return Allocation(np.arange(first, first + count), slots, reused, evicted)

    def commit(self, allocation: Allocation) -> None:
        count = len(allocation.slots)
        fresh = count - allocation.reused - allocation.evicted
        self._free = self._free[allocation.reused :]
        self.used += fresh
        self._head = (self._head + allocation.evicted) % self.capacity
        self.live -= allocation.evicted
        tail = self._head + self.live + np.arange(count)
        self._order[tail % self.capacity] = allocation.slots
        self._ids[allocation.slots] = allocation.ids
        self.live += count
        if count:
            self.next_id = int(allocation.ids[-1]) + 1

    def oldest(self, count: int) -> Ints:
        """Return the slots of the `count` oldest entries, oldest first."""
        return self._order[(self._head + np.arange(count)) % self.capacity]

    def ids(self, slots: Ints) -> Ints:
        return self._ids[slots]

    def find(self, ids: Ints) -> Ints:
        """Return the slots of the entries with these ids; −1 where there is no such entry."""
        slots = self.oldest(self.live)
        if not len(slots):
            return np.full(len(ids), -1, np.int64)
        live_ids = self._ids[slots]  # ascending: order of age is order of id
        places = np.minimum(np.searchsorted(live_ids, ids), len(slots) - 1)
        return np.where(live_ids[places] == ids, slots[places], -1)

    def free(self, slots: Ints) -> None:
        """Empty these slots, all of which must hold an entry."""
        order = self.oldest(self.live)
        self._ids[slots] = -1
        kept = order[self._ids[order] >= 0]
        self._order[: len(kept)] = kept
        self._head, self.live = 0, len(kept)
        self._free = np.concatenate([self._free, slots])
