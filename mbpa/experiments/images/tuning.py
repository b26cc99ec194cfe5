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
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
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
    Grid,
    Kept,
    Mixed,
    Settings,
    Situation,
    Vote,
)
from mbpa.experiments.images.task import Task, make_task
from mbpa.experiments.results import Record

SPLIT = 0
POINTS = (0.05, 0.1, 0.3, 1.0, 3.0)
AIMED = 0.1
LAYER_RATES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
SCORED = 3_000
MOST_LOST = 1.5
"""Points of accuracy on old classes; half a point less than is aimed at, for the noise."""
SAVE_EVERY = 10.0  # seconds


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
    with context.bar(_evaluations(), "search", "settings") as bar:
        search = Search(task, config, context, bar)
        search.choose_layer_rate()
        for method in WITH_SETTINGS:
            search.choose(method)
    return {None: search.records}


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
            said = self._said(replace(settings, offset=0.0)) - settings.held_back(self.situation)
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
        self.task, self.config, self.context, self.bar = task, config, context, bar
        self.queries, self.answers = scored_part(task, config)
        self.records: list[Record] = []
        state = context.workspace.load("search")
        self._known: dict[str, float] = {} if state is None else state["known"]
        self._saved = time.monotonic()
        self._written: set[str] = set()
        self._snapshots: list[Snapshot] = []
        self._snapshots_lr = math.nan

    def choose_layer_rate(self) -> None:
        """The rate with which the last layer alone does best."""

        def accuracy(setting: dict[str, Any]) -> float:
            return fmean(score.all for score in self._scores(setting["lr"], None))

        best = self._best("parametric", [{"lr": lr} for lr in LAYER_RATES], accuracy)
        self.config = replace(self.config, lr=best["lr"])
        self._note_chosen("lr", best["lr"])

    def choose(self, method: str) -> None:
        """The settings of a method, stage by stage."""
        field, stages = WITH_SETTINGS[method].settings, WITH_SETTINGS[method].stages
        best = self.config.settings(method)

        def accuracy(setting: dict[str, Any]) -> float:
            scores = self._scores(self.config.lr, type(best)(**setting))
            if WITH_SETTINGS[method].keeps_old:
                short = self.floor - scores[POINTS.index(AIMED)].old
                if short > 0:
                    return -short
            return fmean(score.all for score in scores)

        for grid in stages:
            tried = [vars(best) | setting for setting in combinations(grid)]
            best = type(best)(**self._best(method, tried, accuracy))
        changed: dict[str, Any] = {field: best}
        self.config = replace(self.config, **changed)
        for name in dict.fromkeys(itertools.chain(*stages)):
            self._note_chosen(f"{field}.{name}", getattr(best, name))

    def _best(
        self,
        method: str,
        settings: Sequence[dict[str, Any]],
        accuracy: Callable[[dict[str, Any]], float],
    ) -> dict[str, Any]:
        """Try all, and give back the one that does best; the first of equals."""
        found = []
        for setting in settings:
            key = repr((method, setting))
            if key not in self._known:
                self._known[key] = accuracy(setting)
                self._save(only_if_late=True)
            found.append(self._known[key])
            if key not in self._written:
                self._written.add(key)
                self._note_tried(method, setting, found[-1])
            self.bar.update()
        self._save()
        return settings[max(range(len(found)), key=lambda place: found[place])]

    @cached_property
    def floor(self) -> float:
        """What a method that keeps the old classes must reach on them when it is looked at."""
        found = [self._scores(self.config.lr, None)]
        for method in WITH_SETTINGS:
            settings = self.config.settings(method)
            if isinstance(settings, Vote | Mixed):
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

    def _note_tried(self, method: str, setting: dict[str, Any], value: float) -> None:
        name, value = ("top1", value) if value >= 0 else ("shortfall", -value)
        self.records.append({"method": method, **setting, "name": name, "value": value})

    def _note_chosen(self, setting: str, value: float) -> None:
        self.records.append({"setting": setting, "name": "chosen", "value": value})

    def _save(self, only_if_late: bool = False) -> None:
        if only_if_late and time.monotonic() - self._saved < SAVE_EVERY:
            return
        self.context.workspace.save("search", {"known": self._known})
        self._saved = time.monotonic()


def combinations(grid: Grid) -> list[dict[str, float]]:
    """All that a grid holds."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _evaluations() -> int:
    """How many settings there are to try, some of them twice."""
    grids = [grid for method in WITH_SETTINGS.values() for grid in method.stages]
    return len(LAYER_RATES) + sum(len(combinations(grid)) for grid in grids)
