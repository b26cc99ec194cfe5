"""The search for settings: on split 0, scored on validation sentences.

One setting per method serves both corpora and all numbers of examples. A setting is judged by its
accuracy over all intents, averaged over corpora and numbers of examples; ties are broken by
calibration. A method that must keep the old intents is judged by its accuracy on the new ones, as
long as its accuracy on the old ones, averaged over numbers of examples, is on no corpus more than
`MAX_LOST_POINTS` below the deployed head's; otherwise it is judged by the excess (`shortfall`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from statistics import fmean
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor, nn

import mbpa
from experiments.experiment import BySeed, Context
from experiments.intents.comparison import METHODS, IntentMethod
from experiments.intents.config import IntentsConfig
from experiments.intents.incremental import confidences, start_of, teach
from experiments.intents.methods import (
    DeployedHead,
    HeadTraining,
    IntentMethodSettings,
    RetrainedClassifier,
    Start,
    make_classifier,
    make_memory,
    make_memory_classifier,
)
from experiments.intents.task import IntentTask, embed_corpus, make_intent_task, require_corpora
from experiments.measures import calibration_error, percent, split_labels
from experiments.methods import PredictorSettings
from experiments.results import Record
from experiments.search import Grid, Search, count_settings
from mbpa.encoders import text

SPLIT = 0
SHOTS = (3, 10)
"""Numbers of examples per new intent that settings are judged with."""
MAX_LOST_POINTS = 0.7
"""Percentage points of accuracy on old intents that may be lost; 0.3 below the actual limit, for
noise.
"""
SEARCHED_METHODS = {name: method for name, method in METHODS.items() if method.stages}


def make_search_config(config: IntentsConfig) -> IntentsConfig:
    """Return the config that the search runs with."""
    fresh = IntentsConfig()
    untuned: dict[str, Any] = {
        name: getattr(fresh, name) for name in map(_get_field, SEARCHED_METHODS.values())
    }
    shots = tuple(shots for shots in SHOTS if shots <= max(config.shots)) or config.shots
    return replace(config, seeds=(SPLIT,), part="validation", shots=shots, peers=(), **untuned)


def tune(
    config: IntentsConfig, context: Context, methods: Mapping[str, IntentMethod] = SEARCHED_METHODS
) -> BySeed:
    """Return records of all trials, and of the chosen settings.

    Args:
        methods: methods to search for, with their grids.
    """
    config = make_search_config(config)
    require_corpora(config.corpora, context)
    encoder = text.encoder(config.encoder, device=context.device)
    grids = [grid for method in methods.values() for grid in method.stages]
    situations = []
    for name in config.corpora:
        corpus = embed_corpus(name, config.part, config.size, encoder, context)
        situations.append(Situation(make_intent_task(corpus, SPLIT), config, grids))
    with Search(context, expected_settings=count_settings(grids)) as search:
        intents = IntentSearch(situations, config, search, methods)
        for method in methods:
            intents.choose(method)
    return {None: search.records}


class Score(NamedTuple):
    """Accuracies on new, old and all intents, and the calibration error, in percent."""

    new: float
    old: float
    all: float
    calibration_error: float


@dataclass(frozen=True, eq=False)
class Situation:
    """One corpus. One reading of the memory per number of examples serves all settings."""

    task: IntentTask
    config: IntentsConfig
    grids: Sequence[Grid]
    """Grids of all settings to try."""

    @cached_property
    def start(self) -> Start:
        return start_of(self.task, self.config, SPLIT)

    @cached_property
    def memories(self) -> list[mbpa.Memory]:
        """Memories, by number of examples."""
        return [
            make_memory(self.task.known + self.task.examples(count)) for count in self.config.shots
        ]

    @cached_property
    def neighbors(self) -> list[mbpa.Neighbors]:
        """Neighbours of all queries per memory, as many as any setting needs."""
        most = max(int(k) for grid in self.grids for k in grid.get("k", (0,)))
        queries = self.task.scored.keys
        return [memory.read(queries, min(most, len(memory))) for memory in self.memories]

    def scores(self, settings: IntentMethodSettings) -> list[Score]:
        """Return the scores after each number of examples."""
        task, shots = self.task, self.config.shots
        if not isinstance(settings, PredictorSettings):
            found = teach(make_classifier(settings, self.start), task, shots)
            return [self._score(classifier.log_probs(task.scored)) for _, classifier in found]
        scores = []
        for place, memory in enumerate(self.memories):
            classifier = make_memory_classifier(settings, self.start, memory)
            if isinstance(classifier, RetrainedClassifier):
                classifier.use(self._retrain_head(classifier.settings.retraining, place))
            neighbors = self.neighbors[place] if classifier.model.predictor.k else None
            scores.append(self._score(classifier.log_probs(task.scored, neighbors)))
        return scores

    @cached_property
    def _heads(self) -> dict[tuple[HeadTraining, int], nn.Linear]:
        return {}

    def _retrain_head(self, settings: HeadTraining, place: int) -> nn.Linear:
        if (settings, place) not in self._heads:
            new = self.task.examples(self.config.shots[place])
            self._heads[settings, place] = settings.head(self.start, new)
        return self._heads[settings, place]

    def _score(self, found: Float[Tensor, "Q C"]) -> Score:
        labels = self.task.scored.labels
        right = found.argmax(1) == labels
        of = {
            name: percent(right[rows]) for name, rows in split_labels(labels, self.task.old).items()
        }
        error = calibration_error(confidences(found), right)
        return Score(of["novel"], of["pre-trained"], of["all"], error)


class IntentSearch:
    """Judges the settings of methods on all corpora, and chooses the best."""

    def __init__(
        self,
        situations: list[Situation],
        config: IntentsConfig,
        search: Search,
        methods: Mapping[str, IntentMethod],
    ) -> None:
        self.situations, self.config, self.search = situations, config, search
        self.methods = methods

    def choose(self, method: str) -> None:
        """Choose the settings of a method, grid by grid."""
        field, grids = _get_field(self.methods[method]), self.methods[method].stages
        start = self.config.settings(method)
        best = self.search.choose(method, start, grids, partial(self._judge, method))
        changed: dict[str, Any] = {field: best}
        self.search.record_choices(field, best, grids)
        if isinstance(best, HeadTraining) and best.on == "everything":
            changed["on_retrained"] = replace(self.config.on_retrained, retraining=best)
            self.search.record_choice("on_retrained.retraining.lr", best.lr)
        self.config = replace(self.config, **changed)

    def _judge(self, method: str, settings: IntentMethodSettings) -> tuple[float, float]:
        """Return the worth of a setting and minus its calibration error, and record both."""
        scores = self._score(method, settings)
        error = fmean(score.calibration_error for score in scores)
        if not self.methods[method].keeps_old:
            name, value = "top1", fmean(score.all for score in scores)
        else:
            excess = self._measure_loss(scores) - MAX_LOST_POINTS
            name, value = "new_top1", fmean(score.new for score in scores)
            if excess > 0:
                name, value = "shortfall", excess
        shown: Record = {
            f.name: getattr(settings, f.name)
            for f in fields(settings)
            if not isinstance(getattr(settings, f.name), HeadTraining)
        }
        trial: list[Record] = [
            {"method": method, **shown, "name": what, "value": number}
            for what, number in ((name, value), ("calibration_error", error))
        ]
        self.search.record_trial((method, settings), trial)
        return -value if name == "shortfall" else value, -error

    def _measure_loss(self, scores: list[Score]) -> float:
        """Return the points lost on old intents, on the corpus where the loss is largest."""
        before, each = self._score("parametric", DeployedHead()), len(self.config.shots)
        lost = [was.old - score.old for was, score in zip(before, scores, strict=True)]
        return max(fmean(lost[place : place + each]) for place in range(0, len(lost), each))

    def _score(self, method: str, settings: IntentMethodSettings) -> list[Score]:
        """Return the scores on each corpus, after each number of examples."""

        def compute() -> list[list[float]]:
            return [list(score) for each in self.situations for score in each.scores(settings)]

        return [Score(*score) for score in self.search.judge((method, settings), compute)]


def _get_field(method: IntentMethod) -> str:
    assert isinstance(method.settings, str), "what is searched for is in the config"
    return method.settings
