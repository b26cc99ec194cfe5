"""Results of a memory: the entries nearest to each query, or the entries themselves.

Shapes: B queries, K neighbours, J candidates, M live entries; D stands for the key's shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Neighbors:
    """The nearest entries of B queries, nearest first; of two equally near ones, the newer first.

    Rows with fewer than K entries are padded. Padding is False in `mask`, has id and slot −1 and
    infinite distance; its keys and values are finite but meaningless.

    Distances are squared. Printed explanations, the service and the page show their square roots.
    """

    values: Shaped[Tensor, "B K *V"]
    """Labels or targets of the neighbours."""
    distances: Float[Tensor, "B K"]
    """Squared Euclidean distance from the query."""
    dots: Float[Tensor, "B K"]
    """Inner product with the query."""
    mask: Bool[Tensor, "B K"]
    """False for padding."""
    ids: Int[Tensor, "B K"]
    """Ids of the neighbours, as `write` returned them."""
    slots: Int[Tensor, "B K"]
    """Slot in which the memory stores the entry now; −1 also for an entry not written yet."""
    keys: Float[Tensor, "B J *D"]
    """Keys of the first J neighbours: all K, unless `keys_for` was smaller."""
    revision: int
    """Number that changes whenever entries get other keys under the same ids; no two memories share
    one."""
    capacity: int
    """Capacity of the memory at the time of reading; all slots are below it."""
    label_counts: Int[Tensor, "B K"] | None = None
    """Number of entries that have the same label as the neighbour, itself included; 1 for padding.
    `None` unless `Memory.count_labels` added it."""

    def first(self, k: int) -> Neighbors:
        """Return only the first k neighbours of each query.

        Args:
            k: number of neighbours to keep.
        """
        return self._map(lambda tensor: tensor[:, :k])

    def rows(self, rows: slice | Tensor) -> Neighbors:
        """Return the neighbours of some of the queries.

        Args:
            rows: slice, or numbers, of the queries to keep.
        """
        return self._map(lambda tensor: tensor[rows])

    def with_keys(self, keys: Float[Tensor, "B J *D"]) -> Neighbors:
        """Return these neighbours with other keys, such as the same ones in another shape.

        Args:
            keys: keys of the first J neighbours.
        """
        return replace(self, keys=keys)

    def with_rows(self, rows: Int[Tensor, "R"], other: Neighbors) -> Neighbors:
        """Return these neighbours with the given rows replaced by the rows of `other`.

        Args:
            rows: numbers of the queries to replace.
            other: the neighbours of these queries, in this order.
        """
        return Neighbors(
            **{
                name: getattr(self, name).index_copy(0, rows, getattr(other, name))
                for name in TENSORS
            },
            revision=self.revision,
            capacity=self.capacity,
            label_counts=_join_counts(
                [self, other], lambda counts: counts[0].index_copy(0, rows, counts[1])
            ),
        )

    @staticmethod
    def concatenate(parts: list[Neighbors]) -> Neighbors:
        """Concatenate the neighbours of several batches of queries.

        Args:
            parts: neighbours from one memory, with the same K.
        """
        if len(parts) == 1:
            return parts[0]
        return Neighbors(
            **{name: torch.cat([getattr(part, name) for part in parts]) for name in TENSORS},
            revision=parts[0].revision,
            capacity=parts[0].capacity,
            label_counts=_join_counts(parts, torch.cat),
        )

    def _map(self, function: Callable[[Tensor], Tensor]) -> Neighbors:
        mapped: dict[str, Any] = {name: function(getattr(self, name)) for name in TENSORS}
        if self.label_counts is not None:
            mapped["label_counts"] = function(self.label_counts)
        return replace(self, **mapped)


def _join_counts(
    parts: list[Neighbors], join: Callable[[list[Tensor]], Tensor]
) -> Int[Tensor, "B K"] | None:
    """Join the label counts of several parts; `None` unless all of them have some."""
    counts = [part.label_counts for part in parts if part.label_counts is not None]
    return join(counts) if len(counts) == len(parts) else None


TENSORS = ("values", "distances", "dots", "mask", "ids", "slots", "keys")
"""Fields that every `Neighbors` has."""


class Candidates(NamedTuple):
    """The result of a backend's search: a superset of the nearest entries, in any order."""

    slots: Int[Tensor, "B J"]
    """Slots of the candidates; −1 for none."""
    beyond: Float[Tensor, "B"] | None
    """Lower bound, up to rounding, on the squared distance of every entry that is not a candidate.
    A backend that knows no bound returns `None`; its reads are then approximate."""
    measured: tuple[Float[Tensor, "B J"], Float[Tensor, "B J"]] | None = None
    """Σ(h−q)², infinite for slot −1, and q·h, if the backend has computed exactly these; otherwise
    they are computed from the keys."""


class Entries(NamedTuple):
    """Complete entries (ids, keys and values), oldest first."""

    ids: Int[Tensor, "M"]
    """Ids, ascending."""
    keys: Float[Tensor, "M *D"]
    """Keys in the memory's dtype."""
    values: Shaped[Tensor, "M *V"]
    """Labels or targets."""


class Holdings(NamedTuple):
    """What a backend already holds when a memory attaches to it."""

    ids: Int[Tensor, "M"]
    """Ids of all entries, ascending."""
    next_id: int
    """The id that the next entry will get; greater than any id ever assigned."""
    slots: Int[Tensor, "M"] | None = None
    """Slot of each entry; by default they are in slots 0, 1, …"""
