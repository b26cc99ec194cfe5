"""Which examples there are, by id and by label; the memory holds their keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True)
class Held:
    """An example in the memory."""

    label: str
    text: str | None
    entry: int
    """Its id in the memory, which is not its id in the journal."""
    is_trained: bool
    """Whether the head was trained with it."""


@dataclass(frozen=True)
class Counts:
    """What there is, all of it at one moment."""

    labels: Mapping[str, int]
    """Examples of each, in the order of the head's outputs."""
    trained_labels: tuple[str, ...]
    """Those that have a trained row of the head."""
    examples: int
    taught: int
    """Examples that the head was not trained with."""
    change: int
    """Raised by every write."""


class Known:
    """Which examples there are, by id and by label."""

    def __init__(self) -> None:
        self.examples: dict[int, Held] = {}
        self.ids: dict[int, int] = {}
        """By the memory's ids."""
        self.counts: Counter[str] = Counter()
        self.taught = 0
        """How many the head was not trained with."""
        self.numbers: dict[str, int] = {}
        """What stands for a label in the memory, until its last example is gone."""
        self._free: list[int] = []
        self._trained_counts: Counter[str] = Counter()

    def number(self, label: str) -> int:
        if label not in self.numbers:
            self.numbers[label] = self._free.pop() if self._free else len(self.numbers)
        return self.numbers[label]

    def add(self, id: int, held: Held) -> None:
        self.examples[id] = held
        self.ids[held.entry] = id
        self._count(held, 1)

    def remove(self, id: int) -> int:
        """Forget an example; returns its id in the memory."""
        held = self.examples.pop(id)
        del self.ids[held.entry]
        self._count(held, -1)
        if not self.counts[held.label]:
            del self.counts[held.label]
            self._free.append(self.numbers.pop(held.label))
        return held.entry

    def split(self, labels: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Those of these labels that have a trained row, in this order, and all others by name.

        A trained row counts as long as one of the examples that it was trained with is there.
        """
        trained = tuple(label for label in labels if self._trained_counts[label])
        return trained, tuple(sorted(set(self.counts) - set(trained)))

    def columns(self, labels: Sequence[str]) -> Int[Tensor, "L"]:
        """Where each number of a label is among these labels."""
        columns = torch.zeros(len(self.numbers) + len(self._free), dtype=torch.int64)
        numbers = torch.tensor([self.numbers[label] for label in labels], dtype=torch.int64)
        columns[numbers] = torch.arange(len(labels))
        return columns

    def _count(self, held: Held, change: int) -> None:
        self.counts[held.label] += change
        if held.is_trained:
            self._trained_counts[held.label] += change
        else:
            self.taught += change
