"""The search for settings: on split 0, scored on held-out training images.

The learning rate of the last layer comes first, judged by that layer's own accuracy. Then every
other method is searched stage by stage (`methods.METHODS`), with the layer as it was at some points
of the stream; one retrieval from a memory serves all settings. A setting is judged by its accuracy
over all classes, averaged over the points. A method that must keep the old classes is judged by its
accuracy on new classes after `AIMED` epochs, on more held-out images. Such a setting counts only if
it is then at most `MOST_LOST` behind the best of layer, vote and mixture on the old classes; other
settings are judged by how much they fall short (`shortfall`). All trials are saved, so that an
interrupted search continues with the remaining ones.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from statistics import fmean
from typing import Any, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

import mbpa
from experiments.experiment import BySeed, Context
from experiments.images.config import ImagesConfig
from experiments.images.incremental import (
    compare_models,
    moments,
    select_scored,
    situation_of,
)
from experiments.images.methods import (
    WITH_SETTINGS,
    ImageMethodSettings,
    Model,
    PreservingAdaptation,
    Situation,
    make_model,
)
from experiments.images.task import ImageTask, make_image_task
from experiments.methods import Vote
from experiments.results import Record
from experiments.search import Notebook, best_of, count

SPLIT = 0
POINTS = (0.05, 0.1, 0.3, 1.0, 3.0)
AIMED = 0.1
LAYER_RATES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
SCORED = 3_000
"""Number of held-out images that settings are judged on."""
SCORED_FOR_AIM = 10_000
"""The same number for methods that must keep the old classes; all there are of Tiny ImageNet."""
MOST_LOST = 1.5
"""Points of accuracy on old classes that may be lost; half a point below the target, for noise."""


def searched(config: ImagesConfig) -> ImagesConfig:
    """Return the config that the search runs with."""
    fresh = ImagesConfig()
    fields = "lr", *(method.settings for method in WITH_SETTINGS.values())
    untuned: dict[str, Any] = {name: getattr(fresh, name) for name in fields}
    return replace(config, seeds=(SPLIT,), part="validation", points=POINTS, **untuned)


def tune(config: ImagesConfig, context: Context) -> BySeed:
    """Return records of all trials, and of the chosen settings."""
    config = searched(config)
    task = make_image_task(config, context, SPLIT)
    grids = [grid for method in WITH_SETTINGS.values() for grid in method.stages]
    with context.bar(len(LAYER_RATES) + count(grids), "search", "settings") as bar:
        search = Search(task, config, context, bar)
        search.choose_layer_rate()
        for method in WITH_SETTINGS:
            search.choose(method)
    return {None: search.notebook.records}


class Score(NamedTuple):
    """Accuracies on new, old and all classes, in percent."""

    new: float
    old: float
    all: float


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A moment of the stream, with everything that settings need."""

    situation: Situation
    queries: Float[Tensor, "Q D"]
    truth: Int[Tensor, "Q"]
    k: int
    """Maximum number of neighbours that a setting may need."""
    _last: list[tuple[ImageMethodSettings | None, Tensor]] = field(default_factory=list)
    _read: dict[mbpa.Memory, mbpa.Neighbors] = field(default_factory=dict)

    def score(self, settings: ImageMethodSettings | None) -> Score:
        """Score a method; without settings, the layer alone."""
        if isinstance(settings, PreservingAdaptation):  # offsets only shift the outputs
            said = self._said(replace(settings, offset=0.0))
            said = said - settings.margins(self.situation)
        else:
            said = self._said(settings)
        right, is_old = said.argmax(1) == self.truth, self.truth < self.situation.old
        return Score(*(100 * float(right[m].double().mean()) for m in (~is_old, is_old, ...)))

    def _said(self, settings: ImageMethodSettings | None) -> Float[Tensor, "Q C"]:
        """Return the outputs of the model with these settings; the last model's are cached."""
        if not self._last or self._last[0][0] != settings:
            model = make_model(settings, self.situation)
            neighbors = self._neighbors(model) if model.predictor.k else None
            self._last[:] = [(settings, model(self.queries, neighbors=neighbors))]
        return self._last[0][1]

    def _neighbors(self, model: Model) -> mbpa.Neighbors:
        """Return the neighbours of all queries in the model's memory, read once."""
        memory = model.memory
        if memory not in self._read:
            keys = model.embed(self.queries)
            self._read[memory] = memory.read(keys, min(self.k, len(memory)))
        return self._read[memory]


class Search:
    """A search that judges settings and records the outcome; nothing is judged twice."""

    def __init__(self, task: ImageTask, config: ImagesConfig, context: Context, bar: tqdm) -> None:
        self.task, self.config, self.bar = task, config, bar
        self.queries, self.answers = select_scored(task, config)
        self.notebook = Notebook(context)
        self._snapshots: list[Snapshot] = []
        self._snapshots_lr = math.nan

    def choose_layer_rate(self) -> None:
        """Choose the rate with which the last layer alone does best."""

        def judge(lr: float) -> float:
            return fmean(score.all for score in self._scores(lr, None))

        rates = {
            lr: self._worth("parametric", {"lr": lr}, partial(judge, lr)) for lr in LAYER_RATES
        }
        best = max(rates, key=lambda lr: rates[lr])
        self.config = replace(self.config, lr=best)
        self.notebook.note_chosen("lr", best)
        self.notebook.save()

    def choose(self, method: str) -> None:
        """Choose the settings of a method, stage by stage."""
        field, stages = WITH_SETTINGS[method].settings, WITH_SETTINGS[method].stages

        def judge(settings: ImageMethodSettings) -> float:
            return fmean(score.all for score in self._scores(self.config.lr, settings))

        judged = self._aimed_at if WITH_SETTINGS[method].keeps_old else judge
        best = best_of(
            self.config.settings(method),
            stages,
            lambda settings: self._worth(method, vars(settings), partial(judged, settings)),
        )
        changed: dict[str, Any] = {field: best}
        self.config = replace(self.config, **changed)
        self.notebook.note_all_chosen(field, best, stages)
        self.notebook.save()

    def _worth(self, method: str, settings: dict[str, Any], judge: Callable[[], float]) -> float:
        key = repr((method, settings))
        worth = self.notebook.judged(key, judge)
        keeps_old = method in WITH_SETTINGS and WITH_SETTINGS[method].keeps_old
        subset, name = "novel" if keeps_old else "all", "top1"
        if worth < 0:
            subset, name = "pre-trained", "shortfall"
        tried: Record = {"method": method, **settings, "subset": subset}
        tried |= {"name": name, "value": abs(worth)}
        self.notebook.note_tried(key, [tried])
        self.bar.update()
        return worth

    def _aimed_at(self, settings: ImageMethodSettings) -> float:
        """Return the accuracy on new classes or, if old classes suffer too much, minus the
        shortfall.
        """
        score = self._aimed.score(settings)
        short = self._floor - score.old
        return -short if short > 0 else score.new

    @cached_property
    def _aimed(self) -> Snapshot:
        """The moment of the stream after `AIMED` epochs."""
        config, some = replace(self.config, points=(AIMED,)), slice(0, SCORED_FOR_AIM)
        (moment,) = moments(self.task, config, SPLIT)
        keeping = [name for name, method in WITH_SETTINGS.items() if method.keeps_old]
        found, most = situation_of(moment, self.task), self._most(keeping)
        return Snapshot(found, self.queries[some], self.answers[some], most)

    @cached_property
    def _floor(self) -> float:
        """The accuracy on old classes that a method which keeps them must reach at that moment."""
        tried = [self.config.settings(method) for method in WITH_SETTINGS]
        votes = [None, *(settings for settings in tried if isinstance(settings, Vote))]
        at = self._aimed
        models = dict(enumerate(make_model(each, at.situation) for each in votes))
        right = compare_models(models, at.queries, at.truth)
        is_old = at.truth < self.task.old
        best = max(float(hits[is_old].double().mean()) for hits in right.values())
        return 100 * best - MOST_LOST

    def _scores(self, lr: float, settings: ImageMethodSettings | None) -> list[Score]:
        """Return the scores at each point."""
        if lr != self._snapshots_lr:
            self._snapshots = []  # frees the old ones before the new ones are made
            self._snapshots, self._snapshots_lr = list(self._taken(lr)), lr
        return [snapshot.score(settings) for snapshot in self._snapshots]

    def _taken(self, lr: float) -> Iterator[Snapshot]:
        some = slice(0, SCORED)  # queries are in random order
        for moment in moments(self.task, replace(self.config, lr=lr), SPLIT):
            still = moment.with_capacity(len(moment.memory))  # a copy, since the stream goes on
            still = replace(still, head=copy.deepcopy(moment.head))
            found = situation_of(still, self.task)
            yield Snapshot(found, self.queries[some], self.answers[some], self._most(WITH_SETTINGS))

    def _most(self, methods: Iterable[str]) -> int:
        """Return the maximum number of neighbours that any setting of these methods needs."""
        most = [0]
        for method in methods:
            most.append(getattr(self.config.settings(method), "k", 0))
            for grid in WITH_SETTINGS[method].stages:
                most += map(int, grid.get("k", ()))
        return max(most)
