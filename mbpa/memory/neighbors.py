"""What a memory gives back: the entries nearest to each query, or the entries themselves.

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
    """The nearest entries of B queries, nearest first, the newer first where two are equally near.

    Rows that found fewer than K entries are padded; the padding is False in `mask`, has id and
    slot −1 and infinite distance, and its keys and values are finite but mean nothing.

    Distances are squared. What people read, printed explanations, the service and the page, has
    their square roots.
    """

    values: Shaped[Tensor, "B K *V"]
    distances: Float[Tensor, "B K"]
    """Squared Euclidean distance from the query."""
    dots: Float[Tensor, "B K"]
    """Inner product with the query."""
    mask: Bool[Tensor, "B K"]
    ids: Int[Tensor, "B K"]
    slots: Int[Tensor, "B K"]
    """Where the memory keeps the entry now; −1 also for one that is not written yet."""
    keys: Float[Tensor, "B J *D"]
    """Keys of the first J neighbours: all K, unless the reader asked for fewer."""
    revision: int
    """Another number whenever a memory gives entries other keys under the same ids; no two
    memories share one."""
    capacity: int
    """Of the memory, at the time; slots are below it."""

    def first(self, k: int) -> Neighbors:
        """The k nearest of these."""
        return self._mapped(lambda tensor: tensor[:, :k])

    def rows(self, rows: slice) -> Neighbors:
        """The neighbours of some of the queries."""
        return self._mapped(lambda tensor: tensor[rows])

    def with_keys(self, keys: Float[Tensor, "B J *D"]) -> Neighbors:
        """These, with their keys in another shape."""
        return replace(self, keys=keys)

    def with_rows(self, rows: Int[Tensor, "R"], other: Neighbors) -> Neighbors:
        """These, with the given rows replaced by the rows of `other`."""
        return Neighbors(
            **{
                name: getattr(self, name).index_copy(0, rows, getattr(other, name))
                for name in TENSORS
            },
            revision=self.revision,
            capacity=self.capacity,
        )

    @staticmethod
    def concatenated(parts: list[Neighbors]) -> Neighbors:
        """The neighbours of several batches of queries, in one."""
        if len(parts) == 1:
            return parts[0]
        return Neighbors(
            **{name: torch.cat([getattr(part, name) for part in parts]) for name in TENSORS},
            revision=parts[0].revision,
            capacity=parts[0].capacity,
        )

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> Neighbors:
        mapped: dict[str, Any] = {name: function(getattr(self, name)) for name in TENSORS}
        return replace(self, **mapped)


TENSORS = ("values", "distances", "dots", "mask", "ids", "slots", "keys")


class Candidates(NamedTuple):
    """What a backend found: a superset of the nearest, in any order."""

    slots: Int[Tensor, "B J"]
    """−1 where it found nothing."""
    beyond: Float[Tensor, "B"] | None
    """Squared distance, up to rounding, that nothing left out falls short of; `None` from a
    backend that cannot tell, which makes its reads approximate."""
    measured: tuple[Float[Tensor, "B J"], Float[Tensor, "B J"]] | None = None
    """Σ(h−q)², infinite where there is nothing, and q·h, from a backend that has computed just
    these; else they are computed from the keys."""


class Entries(NamedTuple):
    """Whole entries, oldest first."""

    ids: Int[Tensor, "M"]
    keys: Float[Tensor, "M *D"]
    values: Shaped[Tensor, "M *V"]
