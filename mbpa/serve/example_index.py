"""An index of the examples by id and by label; the memory holds their keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from mbpa.serve.audit import is_label


@dataclass(frozen=True)
class IndexedExample:
    """An example in the memory."""

    label: str
    text: str | None
    entry: int
    """Id in the memory, which differs from the id in the journal."""
    is_trained: bool
    """Whether the head was trained with it."""


@dataclass(frozen=True)
class Counts:
    """A consistent snapshot of the counts."""

    labels: Mapping[str, int]
    """Number of examples per label, in the order of the head's outputs."""
    trained_labels: tuple[str, ...]
    """Labels whose row of the head was trained."""
    examples: int
    taught: int
    """Number of examples that the head was not trained with."""
    change: int
    """Number of the last write; every write increases it."""


class ExampleIndex:
    """An index of the examples by id and by label."""

    def __init__(self) -> None:
        self.examples: dict[int, IndexedExample] = {}
        self.ids: dict[int, int] = {}
        """Ids in the journal by ids in the memory."""
        self.counts: Counter[str] = Counter()
        self.taught = 0
        """Number of examples that the head was not trained with."""
        self.numbers: dict[str, int] = {}
        """Number that stands for each label in the memory until its last example is removed."""
        self._free: list[int] = []
        self._trained_counts: Counter[str] = Counter()

    def number(self, label: str) -> int:
        if label not in self.numbers:
            self.numbers[label] = self._free.pop() if self._free else len(self.numbers)
        return self.numbers[label]

    def add(self, id: int, held: IndexedExample) -> None:
        self.number(held.label)
        self.examples[id] = held
        self.ids[held.entry] = id
        self._count(held, 1)

    def remove(self, id: int) -> int:
        """Remove an example and return its id in the memory."""
        held = self.examples.pop(id)
        del self.ids[held.entry]
        self._count(held, -1)
        if not self.counts[held.label]:
            del self.counts[held.label]
            self._free.append(self.numbers.pop(held.label))
        return held.entry

    def split(
        self, labels: Sequence[str], *, keeps_rows: bool = False
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return those of these labels with a trained row, in this order, and all others by name.

        A label keeps its trained row as long as one of the examples that it was trained with is
        present; with `keeps_rows` always, unless it was merged into another one with a row.
        """
        trained = tuple(
            label
            for label in labels
            if (is_label(label) if keeps_rows else self._trained_counts[label])
        )
        return trained, tuple(sorted(set(self.counts) - set(trained)))

    def columns(self, labels: Sequence[str]) -> Int[Tensor, "L"]:
        """Return, for each label number, the position of its label among these labels."""
        columns = torch.zeros(len(self.numbers) + len(self._free), dtype=torch.int64)
        found = [column for column, label in enumerate(labels) if label in self.numbers]
        numbers = [self.numbers[labels[column]] for column in found]
        columns[torch.tensor(numbers, dtype=torch.int64)] = torch.tensor(found, dtype=torch.int64)
        return columns

    def _count(self, held: IndexedExample, change: int) -> None:
        self.counts[held.label] += change
        if held.is_trained:
            self._trained_counts[held.label] += change
        else:
            self.taught += change
