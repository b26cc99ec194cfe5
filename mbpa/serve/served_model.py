"""What a classifier answers from: labels and an index of examples, derived from current examples.

Its answers depend only on these examples, not on their history: the order in which they were added,
or others that were added and removed.
"""

from __future__ import annotations

import abc
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from mbpa.serve.answers import NearExample
from mbpa.serve.example_index import Counts, ExampleIndex

Sources = tuple[tuple[NearExample, ...], float]
"""The examples behind an answer, and how far the parameters moved for it."""


class Judgement(NamedTuple):
    """Log-probabilities of the labels of a model, for B queries."""

    logs: Float[Tensor, "B C"]
    in_scope: Float[Tensor, "B"] | None = None
    """Probability that each query belongs to any label, which `logs` include; `None`: unknown."""


class ExplainedJudgement(NamedTuple):
    """A judgement, what the head alone says, and the examples behind it."""

    after: Judgement
    before: Float[Tensor, "B O"]
    """Log-probabilities according to the head alone."""
    before_labels: tuple[str, ...]
    sources: Sequence[Sources]
    """One item per query."""


class ServedModel(abc.ABC):
    """Answers queries from a set of examples, which can be added, removed and relabelled.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self.index = ExampleIndex()
        """Index of the examples; read-only for callers."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels in the order of the columns: those with a trained row, then the others by name."""
        trained, new = self.split_labels()
        return trained + new

    @property
    def recall(self) -> float | None:
        """Measured share of the nearest examples that are found; `None` if all are, or if it was
        not measured yet. Takes no lock.
        """
        return None

    def counts(self, change: int) -> Counts:
        """Return the current counts, with `change` as the number of writes."""
        trained, new = self.split_labels()
        return Counts(
            labels={label: self.index.counts[label] for label in trained + new},
            trained_labels=trained,
            examples=len(self.index.examples),
            taught=self.index.taught,
            change=change,
        )

    def relabel(
        self,
        ids: Mapping[int, int],
        label: str,
        trained_labels: Sequence[str],
        *,
        keeps_trained: bool,
    ) -> None:
        """Give examples another label, as if they had been added with it.

        Args:
            ids: new ids by old ids of the examples.
            label: their new label.
            trained_labels: from now on the names of the rows of the trained head.
            keeps_trained: examples that the head was trained with still count as such.
        """
        held = {id: self.index.examples[id] for id in ids}
        keys = self.get_keys(list(ids))
        self.remove(held)
        self.set_trained_labels(trained_labels)
        trained = {ids[id] for id, each in held.items() if keeps_trained and each.is_trained}
        named = [(label, each.text) for each in held.values()]
        self.add(list(ids.values()), named, keys, trained)

    @abc.abstractmethod
    def split_labels(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the labels with a trained row, in the order of these, and the others by name."""

    @abc.abstractmethod
    def set_trained_labels(self, labels: Sequence[str]) -> None:
        """Name the rows of the trained head anew."""

    @abc.abstractmethod
    def get_keys(self, ids: Sequence[int]) -> Float[Tensor, "N D"]:
        """Return the keys of examples that are present, in the precision of this model."""

    @abc.abstractmethod
    def __call__(self, keys: Float[Tensor, "B D"]) -> Judgement:
        """Return log p of each of the `labels`."""

    @abc.abstractmethod
    def explain(self, keys: Float[Tensor, "B D"]) -> ExplainedJudgement:
        """Explain the answers to these queries; there must be labels."""

    @abc.abstractmethod
    def make_room(self, examples: int) -> None:
        """Make room for this many more examples, so that adding them cannot fail."""

    @abc.abstractmethod
    def add(
        self,
        ids: Sequence[int],
        named: Sequence[tuple[str, str | None]],
        keys: Float[Tensor, "N D"],
        trained: Collection[int],
    ) -> None:
        """Add examples, for which there must be room.

        Args:
            named: label and text of each example.
            trained: ids of the examples that the head was trained with.
        """

    @abc.abstractmethod
    def remove(self, ids: Iterable[int]) -> None:
        """Remove those of these examples that are present."""
