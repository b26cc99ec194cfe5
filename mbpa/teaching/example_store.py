"""A store of examples whose statistics depend only on what is present, to the bit.

Keys are rounded to multiples of 2⁻¹¹. Products of two such numbers are multiples of 2⁻²², and the
terms of an inner product of unit vectors add up to at most about 1 in any order, which single
precision represents exactly. So neither the place of a key in the matrix nor the order of additions
changes a cosine. Sums of keys are kept as integers. Rounding moves a cosine by about 2e-4.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mbpa.modules.new_rows import require_unit_norm

UNITS_PER_ONE = 2.0**11
QUERIES_PER_CHUNK = 512
FIRST_CAPACITY = 1024


def round_keys(keys: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
    """Round keys of unit norm, so that inner products are exact in single precision.

    Rounding may move a norm by √D / 4096, so keys that are rounded already may be as far off.
    """
    rounded = (keys * UNITS_PER_ONE).round() / UNITS_PER_ONE
    moved = math.sqrt(keys.shape[1]) / (2 * UNITS_PER_ONE)
    require_unit_norm(keys, more=moved if torch.equal(rounded, keys) else 0.0)
    return rounded


def measure_cosines(
    queries: Float[Tensor, "B D"],
    keys: Float[Tensor, "M D"],
    labels: Int[Tensor, "M"],
    classes: int,
) -> Float[Tensor, "B C"]:
    """Return the largest cosine to an example of each label; −1 for labels without examples."""
    found = queries.new_full((len(queries), classes), -1.0)
    for rows, part in zip(
        found.split(QUERIES_PER_CHUNK), queries.split(QUERIES_PER_CHUNK), strict=True
    ):
        rows.scatter_reduce_(1, labels.expand(len(part), -1), part @ keys.mT, "amax")
    return found


@dataclass(frozen=True)
class StoredExample:
    """An example, by its id."""

    label: str
    row: int
    """Row of its key in the store's matrix."""
    is_trained: bool
    """Whether the head was trained with it."""


class ExampleStore:
    """Examples by id, with their keys, and the number and the sum of keys of each label.

    Args:
        key_dim: size of the keys.
    """

    def __init__(self, key_dim: int, device: torch.device | str = "cpu") -> None:
        self._keys = torch.empty(FIRST_CAPACITY, key_dim, device=device)
        self._numbers = torch.empty(FIRST_CAPACITY, dtype=torch.int64, device=device)
        self._ids: list[int] = []  # by row
        self._examples: dict[int, StoredExample] = {}
        self._sums: dict[str, Int[Tensor, "D"]] = {}
        self._counts: dict[str, int] = {}
        self._trained_counts: dict[str, int] = {}
        self._label_numbers: dict[str, int] = {}
        self._free_numbers: list[int] = []

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, id: int) -> bool:
        return id in self._examples

    def __getitem__(self, id: int) -> StoredExample:
        return self._examples[id]

    @property
    def ids(self) -> list[int]:
        """Ids by row of the matrix of keys."""
        return list(self._ids)

    @property
    def keys(self) -> Float[Tensor, "M D"]:
        """Rounded keys, by row."""
        return self._keys[: len(self._ids)]

    @property
    def counts(self) -> dict[str, int]:
        """Number of examples of each label that has any."""
        return dict(self._counts)

    @property
    def trained_labels(self) -> set[str]:
        """Labels that have an example which the head was trained with."""
        return set(self._trained_counts)

    def average(self, label: str) -> Float[Tensor, "D"]:
        """Return the mean key of a label, in double precision, on the CPU."""
        return self._sums[label].double() / (UNITS_PER_ONE * self._counts[label])

    def add(
        self,
        ids: Sequence[int],
        labels: Sequence[str],
        keys: Float[Tensor, "N D"],
        trained: Iterable[int] = (),
    ) -> None:
        """Add examples under ids that are not in use.

        Args:
            trained: ids of the examples that the head was trained with.
        """
        if len(set(ids)) < len(ids) or any(id in self._examples for id in ids):
            raise ValueError("ids must be distinct and not in use")
        if len(labels) != len(ids) or keys.shape != (len(ids), self._keys.shape[1]):
            raise ValueError(
                f"there must be one label and one key of size {self._keys.shape[1]} per id, got "
                f"{len(labels)} labels and keys of shape {tuple(keys.shape)} for {len(ids)} ids"
            )
        rounded = round_keys(keys.detach().to(self._keys.device, torch.float32))
        first, are_trained = len(self._ids), set(trained)
        self.make_room(len(ids))
        for label in labels:
            self._enter(label)
        numbers = torch.tensor([self._label_numbers[label] for label in labels], dtype=torch.int64)
        self._keys[first : first + len(ids)] = rounded
        self._numbers[first : first + len(ids)] = numbers.to(self._numbers.device)
        units = (rounded.cpu() * UNITS_PER_ONE).to(torch.int64)
        totals = units.new_zeros(len(self._label_numbers) + len(self._free_numbers), units.shape[1])
        totals.index_add_(0, numbers, units)
        for row, (id, label) in enumerate(zip(ids, labels, strict=True), start=first):
            self._ids.append(id)
            self._examples[id] = StoredExample(label, row, id in are_trained)
            self._count(label, id in are_trained, 1)
        for label in set(labels):
            self._sums[label] = self._sums[label] + totals[self._label_numbers[label]]

    def remove(self, id: int) -> str:
        """Remove an example and return its label. The last row takes its place."""
        example = self._examples.pop(id)
        units = (self._keys[example.row].cpu() * UNITS_PER_ONE).to(torch.int64)
        self._sums[example.label] = self._sums[example.label] - units
        last = self._ids.pop()
        if last != id:
            moved, end = self._examples[last], len(self._ids)
            self._keys[example.row] = self._keys[end]
            self._numbers[example.row] = self._numbers[end]
            self._ids[example.row] = last
            self._examples[last] = StoredExample(moved.label, example.row, moved.is_trained)
        self._count(example.label, example.is_trained, -1)
        return example.label

    def number_labels(self, labels: Sequence[str]) -> Int[Tensor, "M"]:
        """Return, for each row, the position of its label among these, which must be all."""
        size = len(self._label_numbers) + len(self._free_numbers)
        numbers = torch.tensor([self._label_numbers[label] for label in labels], dtype=torch.int64)
        places = torch.zeros(size, dtype=torch.int64)
        places[numbers] = torch.arange(len(labels))
        return places.to(self._numbers.device)[self._numbers[: len(self._ids)]]

    def make_room(self, examples: int) -> None:
        """Allocate memory for this many more examples."""
        rows = len(self._ids) + examples
        if rows > len(self._keys):
            more = 2 * rows - len(self._keys)
            self._keys = torch.cat([self._keys, self._keys.new_empty(more, self._keys.shape[1])])
            self._numbers = torch.cat([self._numbers, self._numbers.new_empty(more)])

    def _enter(self, label: str) -> None:
        if label not in self._label_numbers:
            new = self._free_numbers.pop() if self._free_numbers else len(self._label_numbers)
            self._label_numbers[label] = new
            self._sums[label] = torch.zeros(self._keys.shape[1], dtype=torch.int64)

    def _count(self, label: str, is_trained: bool, change: int) -> None:
        for counts, applies in ((self._counts, True), (self._trained_counts, is_trained)):
            if applies:
                counts[label] = counts.get(label, 0) + change
                if not counts[label]:
                    del counts[label]
        if label not in self._counts:
            self._free_numbers.append(self._label_numbers.pop(label))
            del self._sums[label]
