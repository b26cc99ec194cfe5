"""A classifier that is taught examples, forgets them exactly, and says what it does not know.

Its answers depend only on the learner and on the examples that are present, to the bit: not on the
order in which they came, nor on others that were added and forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mbpa.teaching.belief import BeliefRows
from mbpa.teaching.combination import MAX_LOST_POINTS, REHEARSED_FRACTION, Evidence
from mbpa.teaching.example_store import ExampleStore, measure_cosines, round_keys
from mbpa.teaching.learner import Learner


class Prediction(NamedTuple):
    """Answers to B queries over the labels of a classifier."""

    log_probs: Float[Tensor, "B C"]
    """Log-probability of each label, for queries that belong to one of them."""
    in_scope: Float[Tensor, "B"]
    """Probability that the query belongs to one of the labels, by how near their examples are."""

    @property
    def log_confidences(self) -> Float[Tensor, "B C"]:
        """Log-probability of each label, for any query; probabilities may add up to less than 1."""
        return self.log_probs + self.in_scope.log()[:, None]


@dataclass(frozen=True)
class SimilarExample:
    """A stored example that resembles a query."""

    id: int
    """Number under which it was added."""
    label: str
    """Its label."""
    cosine: float
    """Cosine of its key and the query's, from −1 to 1."""


@dataclass(frozen=True)
class TaughtExplanation:
    """What the witnesses say about one query."""

    labels: tuple[str, ...]
    """The most probable labels."""
    probabilities: tuple[float, ...]
    """Their probabilities, if the query belongs to one of all labels."""
    beliefs: tuple[float, ...]
    """Scaled log density of the query under each of these labels."""
    cosines: tuple[float, ...]
    """Cosine to the nearest example of each of these labels."""
    head: tuple[float | None, ...]
    """Probability according to the trained head alone; `None` for labels it does not have."""
    in_scope: float
    """Probability that the query belongs to one of all labels."""
    examples: tuple[SimilarExample, ...]
    """The nearest examples, the nearest first."""


class TaughtClassifier:
    """Learns and forgets examples without training. Not thread-safe.

    Args:
        learner: the result of `fit_learner`.
        trained_labels: names of the labels known at the start, in the order of the head's rows. A
            label keeps its row as long as one of the examples that it was trained with is present.
        max_lost_points: how many points of accuracy on trained labels new labels may cost, for
            example 1.0 for 96% → 95%. Larger values answer more queries of new labels correctly.
            `None` sets no limit.
        device: where queries are answered.
    """

    def __init__(
        self,
        learner: Learner,
        trained_labels: Sequence[str],
        *,
        max_lost_points: float | None = MAX_LOST_POINTS,
        device: torch.device | str = "cpu",
    ) -> None:
        if max_lost_points is not None and not 0 <= max_lost_points < math.inf:
            raise ValueError(
                f"max_lost_points must be None or at least 0 and finite, got {max_lost_points}"
            )
        self._device = torch.device(device)
        self._learner = learner
        self.trained_labels = trained_labels
        self._lost_points = (
            None if max_lost_points is None else REHEARSED_FRACTION * max_lost_points
        )
        self._belief = learner.belief.double()
        self._combination = learner.combination.to(self._device)
        self._center = learner.belief.center.to(self._device)
        self._transform = learner.belief.transform.to(self._device)
        self._store = ExampleStore(learner.head.in_features, self._device)
        self._rows: dict[str, BeliefRows] = {}
        self._state: _State | None = None  # computed at the first query after a change

    # Contents

    def __len__(self) -> int:
        return len(self._store)

    @property
    def trained_labels(self) -> tuple[str, ...]:
        """Names of the labels known at the start, in the order of the head's rows.

        To rename one, set this while the label has no examples, or use `rename`.
        """
        return tuple(self._trained)

    @trained_labels.setter
    def trained_labels(self, labels: Sequence[str]) -> None:
        rows = self._learner.head.out_features
        if len(labels) != rows or len(set(labels)) != rows:
            raise ValueError(
                f"trained_labels must be {rows} distinct names, got {len(set(labels))}"
            )
        self._trained = {label: row for row, label in enumerate(labels)}
        self._state = None

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels in the order of the columns: those with a trained row, then the others by name."""
        old, new = self.split_labels()
        return old + new

    @property
    def counts(self) -> dict[str, int]:
        """Number of examples of each label."""
        counts = self._store.counts
        return {label: counts[label] for label in self.labels}

    def split_labels(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the labels with a trained row, in the order of these, and the others by name."""
        present = self._store.trained_labels
        old = tuple(label for label in self._trained if label in present)
        return old, tuple(sorted(set(self._store.counts) - set(old)))

    # Learning

    def make_room(self, examples: int) -> None:
        """Allocate memory for this many more examples.

        Args:
            examples: number of examples that will be added.
        """
        self._store.make_room(examples)

    def add(
        self,
        ids: Sequence[int],
        labels: Sequence[str],
        keys: Float[Tensor, "N D"],
        *,
        trained: Iterable[int] = (),
    ) -> None:
        """Add examples.

        Args:
            ids: numbers by which the examples can be forgotten.
            labels: the label of each example; labels that are new are added.
            keys: the key of each example, with norm 1.
            trained: ids of those that the head was trained with. It has no row for those whose
                label is not one of the `trained_labels`.
        """
        self._store.add(ids, labels, keys, trained)
        self._note_change(labels)

    def forget(self, ids: Iterable[int]) -> list[int]:
        """Remove examples; return the ids of those that were present.

        Afterwards it is as if they had never been added.

        Args:
            ids: numbers of the examples; those that are not present are ignored.
        """
        present = [id for id in dict.fromkeys(ids) if id in self._store]
        self._note_change([self._store.remove(id) for id in present])
        return present

    def relabel(self, id: int, label: str) -> None:
        """Give an example another label. It then counts as taught, not as trained.

        Args:
            id: number of the example.
            label: its new label.
        """
        if id not in self._store:
            raise ValueError(f"id must be of an example that is present, got {id}")
        key = self.get_keys([id])
        self.forget([id])
        self.add([id], [label], key)

    def rename(self, label: str, new_label: str) -> list[int]:
        """Give all examples of a label another one; return their ids.

        A trained label takes its row of the head along, unless the other label has one, too: then
        its examples count as taught from then on.

        Args:
            label: the present name.
            new_label: the new name; if it is that of another label, the two are merged.

        Raises:
            ValueError: there is no such label.
        """
        if label not in self._store.counts:
            raise ValueError(f"label must have examples, got {label!r}")
        ids = [id for id in self._store.ids if self._store[id].label == label]
        if label == new_label:
            return ids
        keys = self.get_keys(ids)
        trained = [id for id in ids if self._store[id].is_trained]
        old, _ = self.split_labels()
        if new_label in old:
            trained = []
        self.forget(ids)
        if trained and label in old:
            swapped = {label: new_label, new_label: label}
            self.trained_labels = [swapped.get(each, each) for each in self._trained]
        self.add(ids, [new_label] * len(ids), keys, trained=trained)
        return ids

    def get_keys(self, ids: Sequence[int]) -> Float[Tensor, "N D"]:
        """Return the keys of examples that are present, as they were rounded.

        Args:
            ids: numbers of the examples.
        """
        rows = torch.tensor([self._store[id].row for id in ids], dtype=torch.int64)
        return self._store.keys[rows.to(self._device)]

    def _note_change(self, labels: Iterable[str]) -> None:
        self._state = None
        for label in labels:
            self._rows.pop(label, None)

    # Answering

    def predict(self, keys: Float[Tensor, "B D"]) -> Prediction:
        """Return the probability of each of the `labels`, and of the query being in scope.

        Args:
            keys: keys of B queries, with norm 1.
        """
        evidence, _ = self._observe(self._get_state(), keys)
        log_probs = self._combination.log_probs(evidence, self._lost_points)
        return Prediction(log_probs, self._combination.score_scope(evidence, log_probs))

    def predict_by_head(self, keys: Float[Tensor, "B D"]) -> Float[Tensor, "B O"]:
        """Return the log-probabilities of the labels with a trained row, by the head alone.

        Args:
            keys: keys of B queries, with norm 1.
        """
        return self._observe(self._get_state(), keys)[0].head

    def explain(
        self, keys: Float[Tensor, "B D"], *, labels: int = 3, examples: int = 5
    ) -> list[TaughtExplanation]:
        """Return the witnesses of each answer, for its most probable labels.

        Args:
            keys: keys of B queries, with norm 1.
            labels: number of labels to explain per query.
            examples: number of nearest examples to return per query.
        """
        state = self._get_state()
        evidence, queries = self._observe(state, keys)
        logs = self._combination.log_probs(evidence, self._lost_points)
        scopes = self._combination.score_scope(evidence, logs)
        beliefs = torch.cat([evidence.old_belief, evidence.new_belief], 1)
        cosines = torch.cat([evidence.old_cosine, evidence.new_cosine], 1)
        order = logs.argsort(dim=1, descending=True, stable=True)[:, :labels]
        near = queries @ self._store.keys.mT
        found = []
        for row, places in enumerate(order.tolist()):
            head = [
                float(evidence.head[row, place].exp()) if place < len(state.old) else None
                for place in places
            ]
            found.append(
                TaughtExplanation(
                    labels=tuple(state.labels[place] for place in places),
                    probabilities=tuple(logs[row, places].exp().tolist()),
                    beliefs=tuple(beliefs[row, places].tolist()),
                    cosines=tuple(cosines[row, places].tolist()),
                    head=tuple(head),
                    in_scope=float(scopes[row]),
                    examples=self._find_similar(near[row], examples),
                )
            )
        return found

    def _find_similar(self, cosines: Float[Tensor, "M"], most: int) -> tuple[SimilarExample, ...]:
        """Return the nearest examples; those equally near are ordered by label, then by id."""
        if not len(cosines) or most < 1:
            return ()
        least = cosines.topk(min(most, len(cosines))).values[-1]
        ids = self._store.ids
        near = [
            SimilarExample(ids[row], self._store[ids[row]].label, float(cosines[row]))
            for row in (cosines >= least).nonzero()[:, 0].tolist()
        ]
        return tuple(sorted(near, key=lambda each: (-each.cosine, each.label, each.id))[:most])

    def _observe(
        self, state: _State, keys: Float[Tensor, "B D"]
    ) -> tuple[Evidence, Float[Tensor, "B D"]]:
        """Return what the witnesses say, and the rounded queries."""
        keys = keys.detach().to(self._device, torch.float32)
        queries = round_keys(keys)
        beliefs = state.rows.score((queries - self._center) @ self._transform)
        cosines = measure_cosines(queries, self._store.keys, state.columns, len(state.labels))
        logs = (queries @ state.weight.mT + state.bias).log_softmax(1)
        old = len(state.old)
        evidence = Evidence(
            beliefs[:, :old],
            cosines[:, :old],
            logs,
            beliefs[:, old:],
            cosines[:, old:],
            state.sizes,
        )
        return evidence, queries

    def _get_state(self) -> _State:
        if self._state is None:
            self._state = self._build_state()
        return self._state

    def _build_state(self) -> _State:
        old, new = self.split_labels()
        counts = self._store.counts
        rows = [self._make_row(label, place >= len(old)) for place, label in enumerate(old + new)]
        size = self._learner.head.in_features
        empty = [torch.empty(0, size), torch.empty(0, size), torch.empty(0)]
        parts = zip(*rows, strict=True) if rows else ([each] for each in empty)
        places = torch.tensor([self._trained[label] for label in old], dtype=torch.int64)
        head = self._learner.head
        return _State(
            old=old,
            labels=(*old, *new),
            rows=BeliefRows(*(torch.cat(list(part)).to(self._device) for part in parts)),
            columns=self._store.number_labels((*old, *new)),
            weight=head.weight.detach()[places].to(self._device),
            bias=head.bias.detach()[places].to(self._device),
            sizes=torch.tensor([float(counts[label]) for label in new], device=self._device),
        )

    def _make_row(self, label: str, is_new: bool) -> BeliefRows:
        """Return the row of a label, computed by itself: with others it might round differently."""
        if label not in self._rows:
            count = torch.tensor([self._store.counts[label]], dtype=torch.float64)
            point = self._belief.locate(self._store.average(label)[None])
            row = self._belief.make_rows(point, count, torch.tensor([is_new]))
            self._rows[label] = BeliefRows(*(part.float() for part in row))
        return self._rows[label]


class _State(NamedTuple):
    """What queries need, derived from the examples."""

    old: tuple[str, ...]
    labels: tuple[str, ...]
    rows: BeliefRows
    columns: Int[Tensor, "M"]
    """Position of each stored example's label."""
    weight: Float[Tensor, "O D"]
    bias: Float[Tensor, "O"]
    sizes: Float[Tensor, "N"]
    """Number of examples of each new label."""
