"""A served model that learns labels in closed form, with a `Learner` (`mbpa.teaching`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from mbpa.serve.answers import NearExample
from mbpa.serve.example_index import IndexedExample
from mbpa.serve.served_model import ExplainedJudgement, Judgement, ServedModel
from mbpa.teaching import Learner, SimilarExample, TaughtClassifier
from mbpa.teaching.combination import COSINE_SCALE
from mbpa.teaching.example_store import round_keys

EXAMPLES_PER_EXPLANATION = 10


class TaughtModel(ServedModel):
    """A `TaughtClassifier` together with the texts of its examples.

    Args:
        learner: the learner, with one row of its head per label in `trained_labels`.
        max_lost_points: see `TaughtClassifier`.
        device: where to answer queries.
    """

    def __init__(
        self,
        learner: Learner,
        trained_labels: Sequence[str],
        max_lost_points: float | None,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self._classifier = TaughtClassifier(
            learner, trained_labels, max_lost_points=max_lost_points, device=device
        )

    def split_labels(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return self._classifier.split_labels()

    def set_trained_labels(self, labels: Sequence[str]) -> None:
        self._classifier.trained_labels = labels

    def get_keys(self, ids: Sequence[int]) -> Float[Tensor, "N D"]:
        return self._classifier.get_keys(ids)

    # Answering

    def __call__(self, keys: Float[Tensor, "B D"]) -> Judgement:
        found = self._classifier.predict(keys)
        return Judgement(found.log_confidences, found.in_scope)

    def explain(self, keys: Float[Tensor, "B D"]) -> ExplainedJudgement:
        before = self._classifier.predict_by_head(keys)
        found = self._classifier.explain(keys, labels=0, examples=EXAMPLES_PER_EXPLANATION)
        queries = round_keys(keys.to(torch.float32))
        sources = [
            (self._list_sources(query, each.examples), 0.0)
            for query, each in zip(queries, found, strict=True)
        ]
        return ExplainedJudgement(self(keys), before, self.split_labels()[0], sources)

    def _list_sources(
        self, query: Float[Tensor, "D"], examples: Sequence[SimilarExample]
    ) -> tuple[NearExample, ...]:
        cosines = torch.tensor([each.cosine for each in examples], dtype=torch.float64)
        weights = (COSINE_SCALE * cosines).softmax(0).tolist()
        distances = (self.get_keys([each.id for each in examples]) - query).norm(dim=1).tolist()
        return tuple(
            NearExample(each.id, each.label, self.index.examples[each.id].text, weight, distance)
            for each, weight, distance in zip(examples, weights, distances, strict=True)
        )

    # Learning

    def make_room(self, examples: int) -> None:
        self._classifier.make_room(examples)

    def add(
        self,
        ids: Sequence[int],
        named: Sequence[tuple[str, str | None]],
        keys: Float[Tensor, "N D"],
        trained: Collection[int],
    ) -> None:
        labels = [label for label, _ in named]
        self._classifier.add(ids, labels, keys, trained=set(trained).intersection(ids))
        for id, (label, text) in zip(ids, named, strict=True):
            self.index.add(id, IndexedExample(label, text, id, id in trained))

    def remove(self, ids: Iterable[int]) -> None:
        for id in self._classifier.forget(ids):
            self.index.remove(id)
