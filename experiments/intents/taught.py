"""The library's learner (`mbpa.teaching`) as a method: nothing is trained after the start."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from experiments.intents.methods import Classifier, ClassifierSettings, Start
from experiments.intents.task import Sentences
from mbpa.teaching import TaughtClassifier
from mbpa.teaching.combination import MAX_LOST_POINTS


@dataclass(frozen=True)
class Teaching(ClassifierSettings):
    """A belief about each intent, its nearest example and the head, combined by rehearsals."""

    max_lost_points: float | None = MAX_LOST_POINTS
    """Accuracy on known intents that new ones may cost, in points; `None`: no limit."""

    def classifier(self, start: Start) -> TaughtIntents:
        return TaughtIntents(start, self.max_lost_points)


class TaughtIntents(Classifier):
    """A `TaughtClassifier` whose labels are the numbers of the intents."""

    def __init__(self, start: Start, max_lost_points: float | None) -> None:
        self._intents, self._learner = start.intents, start.learner
        names = [_name(label) for label in range(start.old)]
        self._model = TaughtClassifier(
            start.learner,
            names,
            max_lost_points=max_lost_points,
            device=start.known.keys.device,
        )
        self._add(start.known, is_trained=True)

    def learn(self, new: Sentences) -> None:
        self._add(new, is_trained=False)

    def log_probs(self, queries: Sentences) -> Float[Tensor, "Q C"]:
        found = self._model.predict(queries.keys).log_probs
        outputs = found.new_full((len(found), self._intents), -torch.inf)
        outputs[:, [int(label) for label in self._model.labels]] = found
        return outputs

    def score_scope(self, queries: Sentences) -> Float[Tensor, "Q"]:
        return self._model.predict(queries.keys).in_scope

    def decide(self, queries: Sentences, answered_share: float) -> Bool[Tensor, "Q"]:
        found = self._model.predict(queries.keys).log_confidences.amax(1).exp()
        return found >= self._learner.combination.find_threshold(answered_share)

    def _add(self, sentences: Sentences, is_trained: bool) -> None:
        first = len(self._model)
        ids = range(first, first + len(sentences))
        labels = [_name(label) for label in sentences.labels.tolist()]
        self._model.add(ids, labels, sentences.keys, trained=ids if is_trained else ())


def _name(label: int) -> str:
    return f"{label:06}"  # sorted by name is sorted by number
