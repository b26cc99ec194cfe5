"""The search for settings: with the first split, on training images that were held out.

First the rate of the last layer, by its own accuracy. Then, with that layer as it was at some
points of the stream, every other method, stage by stage (`methods.METHODS`): one retrieval a point
serves all settings. A setting is judged by its accuracy over all classes, the mean over the points.
Of a method that is to keep the old classes, only settings count that are after `AIMED` epochs at
most `MOST_LOST` behind the best of layer, vote and mixture on the old ones; the others are judged
by how much they lack (`shortfall`). Before that point the layer knows nothing but the old classes,
and nothing that learns new ones could keep up with it on these. What has been tried is kept, and an
interrupted search tries only the rest.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from statistics import fmean
from typing import Any, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

import mbpa
from mbpa.experiments.experiment import BySeed, Context
from mbpa.experiments.images.config import ImagesConfig
from mbpa.experiments.images.incremental import moments, scored_part, situation_of
from mbpa.experiments.images.methods import (
    WITH_SETTINGS,
    Kept,
    Settings,
    Situation,
    Vote,
)
from mbpa.experiments.images.task import Task, make_task
from mbpa.experiments.results import Record
from mbpa.experiments.searching import Notebook, best_of, count

SPLIT = 0
POINTS = (0.05, 0.1, 0.3, 1.0, 3.0)
AIMED = 0.1
LAYER_RATES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
SCORED = 3_000
MOST_LOST = 1.5
"""Points of accuracy on old classes; half a point less than is aimed at, for the noise."""


def searched(config: ImagesConfig) -> ImagesConfig:
    """What the search runs with."""
    fresh = ImagesConfig()
    fields = "lr", *(method.settings for method in WITH_SETTINGS.values())
    untuned: dict[str, Any] = {name: getattr(fresh, name) for name in fields}
    scored = min(SCORED, config.scored)
    return replace(
        config, seeds=(SPLIT,), part="validation", points=POINTS, scored=scored, **untuned
    )


def tune(config: ImagesConfig, context: Context) -> BySeed:
    """Records of all that was tried, and of what was chosen."""
    config = searched(config)
    task = make_task(config, context, SPLIT)
    grids = [grid for method in WITH_SETTINGS.values() for grid in method.stages]
    with context.bar(len(LAYER_RATES) + count(grids), "search", "settings") as bar:
        search = Search(task, config, context, bar)
        search.choose_layer_rate()
        for method in WITH_SETTINGS:
            search.choose(method)
    return {None: search.notebook.records}


class Score(NamedTuple):
    """Accuracies, in percent."""

    new: float
    old: float
    all: float


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A moment of the stream, with all that any setting asks for."""

    situation: Situation
    queries: Float[Tensor, "Q D"]
    truth: Int[Tensor, "Q"]
    k: int
    """Neighbours that a setting may ask for, at most."""
    _last: list[tuple[Settings | None, Tensor]] = field(default_factory=list)

    @cached_property
    def neighbors(self) -> mbpa.Neighbors:
        memory = self.situation.memory
        return memory.read(self.queries, min(self.k, len(memory)))

    def score(self, settings: Settings | None) -> Score:
        """How a method does; without settings, the layer alone."""
        if isinstance(settings, Kept):  # what is held back is subtracted from what is said anyway
            said = self._said(replace(settings, offset=0.0, entries=1.0)) - settings.held_back(
                self.situation
            )
        else:
            said = self._said(settings)
        right, is_old = said.argmax(1) == self.truth, self.truth < self.situation.old
        return Score(*(100 * float(right[m].double().mean()) for m in (~is_old, is_old, ...)))

    def _said(self, settings: Settings | None) -> Float[Tensor, "Q C"]:
        """By the model that has these settings; the last one's answers are at hand."""
        if not self._last or self._last[0][0] != settings:
            at = self.situation
            alone = mbpa.MbPA(head=at.head, memory=at.memory, predictor=mbpa.Parametric())
            model = alone if settings is None else settings.model(at)
            neighbors = self.neighbors if model.predictor.k else None
            self._last[:] = [(settings, model(keys=self.queries, neighbors=neighbors))]
        return self._last[0][1]


class Search:
    """Judges settings and writes down what it finds; nothing is judged twice."""

    def __init__(self, task: Task, config: ImagesConfig, context: Context, bar: tqdm) -> None:
        self.task, self.config, self.bar = task, config, bar
        self.queries, self.answers = scored_part(task, config)
        self.notebook = Notebook(context)
        self._snapshots: list[Snapshot] = []
        self._snapshots_lr = math.nan

    def choose_layer_rate(self) -> None:
        """The rate with which the last layer alone does best."""

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
        """The settings of a method, stage by stage."""
        field, stages = WITH_SETTINGS[method].settings, WITH_SETTINGS[method].stages

        def judge(settings: Settings) -> float:
            scores = self._scores(self.config.lr, settings)
            if WITH_SETTINGS[method].keeps_old:
                short = self.floor - scores[POINTS.index(AIMED)].old
                if short > 0:
                    return -short
            return fmean(score.all for score in scores)

        best = best_of(
            self.config.settings(method),
            stages,
            lambda settings: self._worth(method, vars(settings), partial(judge, settings)),
        )
        changed: dict[str, Any] = {field: best}
        self.config = replace(self.config, **changed)
        self.notebook.note_all_chosen(field, best, stages)
        self.notebook.save()

    def _worth(self, method: str, settings: dict[str, Any], judge: Callable[[], float]) -> float:
        key = repr((method, settings))
        worth = self.notebook.judged(key, judge)
        name, value = ("top1", worth) if worth >= 0 else ("shortfall", -worth)
        tried: Record = {"method": method, **settings, "name": name, "value": value}
        self.notebook.note_tried(key, [tried])
        self.bar.update()
        return worth

    @cached_property
    def floor(self) -> float:
        """What a method that keeps the old classes must reach on them when it is looked at."""
        found = [self._scores(self.config.lr, None)]
        for method in WITH_SETTINGS:
            settings = self.config.settings(method)
            if isinstance(settings, Vote):
                found.append(self._scores(self.config.lr, settings))
        return max(scores[POINTS.index(AIMED)].old for scores in found) - MOST_LOST

    def _scores(self, lr: float, settings: Settings | None) -> list[Score]:
        """At each point."""
        if lr != self._snapshots_lr:
            self._snapshots = []  # the old ones need not be there while the new ones are made
            self._snapshots, self._snapshots_lr = list(self._taken(lr)), lr
        return [snapshot.score(settings) for snapshot in self._snapshots]

    def _taken(self, lr: float) -> Iterator[Snapshot]:
        counts = {int(k) for m in WITH_SETTINGS.values() for g in m.stages for k in g.get("k", ())}
        given = {getattr(self.config.settings(method), "k", 0) for method in WITH_SETTINGS}
        most = max(counts | given)
        for moment in moments(self.task, replace(self.config, lr=lr), SPLIT):
            found = situation_of(moment, self.task)
            memory = moment.with_capacity(len(moment.memory)).memory  # the stream's goes on growing
            kept = replace(found, head=copy.deepcopy(moment.head), memory=memory)
            yield Snapshot(kept, self.queries, self.answers, most)
