"""A memory and rows of a head whose values depend only on their contents, not on their history.

`ExactMemory` puts the newer of two equally near entries first, and the rounding of its inner
products depends on where entries are stored. Here equally near entries are ordered by content,
products are computed in that order, and labels are columns of the current head. Two memories with
the same entries therefore return the same neighbours, to the bit, whatever was written, deleted or
moved before.

Rows of taught labels are computed from sums of keys in whole numbers, so the order of addition does
not matter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mbpa.memory import Memory, Neighbors, validation
from mbpa.modules.new_rows import NewRows

SPARE_NEIGHBORS = 8  # extra neighbours read to detect ties at the cut
KEYS_PER_CHUNK = 4096  # keys per chunk, to bound the memory for their integers
UNITS_PER_ONE = 2.0**40  # in integer sums of keys; sums up to eight million fit into 64 bits


class OrderIndependentReader:
    """Entries in a memory, of which `read` returns neighbours by their content alone.

    It is not a `Memory` itself: a memory puts the newer of two equally near entries first.

    Args:
        memory: stores the entries, which are written and deleted there. If its reads are
            approximate, the order of what is found still depends on content alone, but what is
            found may depend on history.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.columns: Int[Tensor, "L"] | None = None
        """The head's column for each label number that entries are written with; `None`: they are
        the same."""

    def read(
        self, queries: Float[Tensor, "B D"], k: int, *, with_label_counts: bool = False
    ) -> Neighbors:
        """Return the `k` entries nearest to each query, with columns of the head as values.

        Equally near entries are ordered by key, then by column.

        Args:
            queries: keys to search for.
            k: number of neighbours per query.
            with_label_counts: also count the entries of each neighbour's label, for `Balanced`.
        """
        k = validation.count("k", k)
        with self.memory.lock:
            reach = k + SPARE_NEIGHBORS
            found = self.memory.read(queries, reach, keys_for=0)
            while reach < len(self.memory) and _is_cut(found.distances, k):
                reach *= 4
                found = self.memory.read(queries, reach, keys_for=0)
            if with_label_counts:
                found = self.memory.count_labels(found)
            columns = found.values if self.columns is None else self.columns[found.values]
            order = self._order(found, columns)[:, :k]
            ids, counts = found.ids.gather(1, order), found.label_counts
            keys = self.memory.get_keys(ids)
        return replace(
            found,
            values=columns.gather(1, order),
            distances=found.distances.gather(1, order),
            dots=torch.bmm(queries.to(keys.dtype)[:, None], keys.mT)[:, 0],
            mask=found.mask.gather(1, order),
            ids=ids,
            slots=found.slots.gather(1, order),
            keys=keys,
            label_counts=None if counts is None else counts.gather(1, order),
        )

    def _order(self, found: Neighbors, columns: Int[Tensor, "B R"]) -> Int[Tensor, "B R"]:
        """Return positions by distance, which is already rising; ties by key digest, then label."""
        distances = found.distances
        order = torch.arange(distances.shape[1], device=distances.device).expand(distances.shape)
        rows = _find_ties(distances).any(1).nonzero()[:, 0]
        if not len(rows):
            return order
        order = order.clone()
        places = columns[rows].argsort(dim=1, stable=True)
        ids, inverse = found.ids[rows].unique(return_inverse=True)
        digests = torch.cat(
            [_compute_digests(self.memory.get_keys(part)) for part in ids.split(KEYS_PER_CHUNK)]
        )
        for part in (digests[inverse], distances[rows]):
            places = places.gather(1, part.gather(1, places).argsort(dim=1, stable=True))
        order[rows] = places
        return order


class LabelRows:
    """Rows of the head by label, computed from the keys of the examples, which have unit norm.

    Keys are summed as integers in fixed units much finer than their own precision. The sum does
    not depend on the order of additions, and adding and removing a key leaves no trace.
    """

    def __init__(self, made: NewRows) -> None:
        self._made = replace(made, direction=made.direction.double(), weight=made.weight.double())
        self._none = np.zeros(len(made.direction), np.int64)
        self._sums: dict[str, Int[np.ndarray, "D"]] = {}
        self._weights: dict[str, Float[Tensor, "D"]] = {}

    @property
    def bias(self) -> Float[Tensor, ""]:
        """Bias of every row."""
        return self._made.biases

    def weight(self, label: str) -> Float[Tensor, "D"]:
        """Return the weight of a label's row, computed on first use after a change.

        Each row is computed by itself, because in a batch with others it might round differently.
        """
        if label not in self._weights:
            total = torch.from_numpy(self._sums.get(label, self._none)).double()
            self._weights[label] = self._made.weights(total[None])[0].float()
        return self._weights[label]

    def add(self, labels: Sequence[str], keys: Float[Tensor, "N D"]) -> None:
        """Add the keys of examples with these labels."""
        self._count(labels, keys, 1)

    def remove(self, labels: Sequence[str], keys: Float[Tensor, "N D"]) -> None:
        """Subtract the keys of examples with these labels."""
        self._count(labels, keys, -1)

    def _count(self, labels: Sequence[str], keys: Float[Tensor, "N D"], sign: int) -> None:
        given = keys.cpu().numpy()  # torch would split even this little work among threads
        places = defaultdict(list)
        for place, label in enumerate(labels):
            places[label].append(place)
        for label, rows in places.items():
            total = self._sums.get(label, self._none)
            for start in range(0, len(rows), KEYS_PER_CHUNK):
                part = np.multiply(
                    given[rows[start : start + KEYS_PER_CHUNK]], UNITS_PER_ONE, dtype=np.float64
                )
                total = total + sign * part.round().astype(np.int64).sum(0)
            if total.any():
                self._sums[label] = total
            else:
                self._sums.pop(label, None)
            self._weights.pop(label, None)


def _is_cut(distances: Float[Tensor, "B R"], k: int) -> bool:
    """Return whether some row has a tie between the k-th and the last neighbour.

    If so, more equally near entries may have been left out.
    """
    return distances.shape[1] > k and bool((distances[:, k - 1] == distances[:, -1]).any())


def _find_ties(distances: Float[Tensor, "B R"]) -> Bool[Tensor, "B S"]:
    return distances[:, 1:] == distances[:, :-1]


@cache
def _draw_factors(words: int, device: torch.device) -> Int[Tensor, "W"]:
    limits = torch.iinfo(torch.int64)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(limits.min, limits.max, (words,), generator=generator).to(device)


def _compute_digests(keys: Float[Tensor, "N D"]) -> Int[Tensor, "N"]:
    """Return a 64-bit digest per key; two different keys collide only by chance."""
    halves = keys.contiguous().view(torch.int16).to(torch.int64)
    digests: Tensor = (halves * _draw_factors(halves.shape[1], keys.device)).sum(1)  # wraps around
    return digests
