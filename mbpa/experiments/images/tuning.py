"""The search for settings: with the first split, on training images that were held out.

First the rate of the last layer, by its own accuracy. Then, with that layer as it was at some
points of the stream, every other method: one retrieval a point serves all settings. A setting is
judged by its accuracy over all classes, the mean over the points.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from torch import nn

import mbpa
from mbpa.experiments.experiment import BySeed, Context
from mbpa.experiments.images.config import ImagesConfig, Local, Vote, adapting, voting
from mbpa.experiments.images.incremental import key_length, mean_nearest, moments, scored_part
from mbpa.experiments.images.task import Task, make_task
from mbpa.experiments.results import Record

SPLIT = 0
POINTS = (0.05, 0.1, 0.3, 1.0, 3.0)
LAYER_RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
COUNTS, BANDWIDTHS = (10, 20, 50, 100, 200), (0.0, 0.3, 0.5, 0.7, 1.0)
WEIGHTS = tuple(place / 10 for place in range(1, 10))
RATES = {"gradient": (0.1, 0.3, 1.0, 3.0, 10.0), "rmsprop": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)}
STEPS = (1, 5, 10, 20)
DECAYS = (0.0, 0.02, 0.1)
SCORED = 3_000

Setting = TypeVar("Setting")


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A moment of the stream, with all that any setting asks for."""

    head: nn.Linear
    memory: mbpa.ExactMemory
    neighbors: mbpa.Neighbors
    near: float


class Search:
    """Judges settings and writes down what it finds."""

    def __init__(self, task: Task, config: ImagesConfig, tick: Callable[[], object]) -> None:
        self.task, self.config, self.tick = task, config, tick
        self.queries, self.answers = scored_part(task, config)
        self.length = key_length(task)
        self.records: list[Record] = []
        self.snapshots: list[Snapshot] = []

    def layer_rate(self) -> float:
        """The rate with which the last layer alone does best; its snapshots are kept."""
        found: dict[float, float] = {}
        for lr in LAYER_RATES:
            self.snapshots = list(self._snapshots(replace(self.config, lr=lr)))
            found[lr] = self._mean(lambda _: mbpa.Parametric())
            self._note("parametric", {"lr": lr}, found[lr])
        best = max(found, key=lambda lr: found[lr])
        self.snapshots = list(self._snapshots(replace(self.config, lr=best)))
        return best

    def best(
        self,
        method: str,
        settings: Sequence[Setting],
        make: Callable[[Setting, float], mbpa.Predictor],
    ) -> Setting:
        """The setting that does best; the first of equals."""
        found = []
        for setting in settings:
            found.append(self._mean(partial(make, setting)))
            self._note(method, vars(setting), found[-1])
        return settings[max(range(len(found)), key=lambda place: found[place])]

    def chosen(self, value: object, within: str) -> None:
        """Write down what a field of the config, or the fields of a part of it, are to be."""
        fields = vars(value) if dataclasses.is_dataclass(value) else {"": value}
        for name, each in fields.items():
            if isinstance(each, int | float):
                setting = f"{within}.{name}" if name else within
                self.records.append({"setting": setting, "name": "chosen", "value": each})

    def _mean(self, make: Callable[[float], mbpa.Predictor]) -> float:
        total = 0.0
        for snapshot in self.snapshots:
            model = mbpa.MbPA(
                head=snapshot.head, memory=snapshot.memory, predictor=make(snapshot.near)
            )
            found = model(keys=self.queries, neighbors=snapshot.neighbors).argmax(1)
            total += 100 * float((found == self.answers).double().mean())
        self.tick()
        return total / len(self.snapshots)

    def _note(self, method: str, setting: dict[str, Any], value: float) -> None:
        told = {name: each for name, each in setting.items() if isinstance(each, str | int | float)}
        self.records.append({"method": method, **told, "name": "top1", "value": value})

    def _snapshots(self, config: ImagesConfig) -> Iterator[Snapshot]:
        config = replace(config, points=POINTS)
        for moment in moments(self.task, config, SPLIT):
            count = len(moment.memory)
            memory = mbpa.ExactMemory(count, moment.memory.key_size, device=self.queries.device)
            entries = moment.memory.entries()
            memory.write(entries.keys, entries.values)  # the stream's own goes on growing
            neighbors = memory.read(self.queries, min(max(COUNTS), count))
            near = mean_nearest(memory)
            yield Snapshot(copy.deepcopy(moment.head), memory, neighbors, near)


def tune(config: ImagesConfig, context: Context) -> BySeed:
    """Records of all that was tried, and of what was chosen."""
    config = replace(config, seeds=(SPLIT,), part="validation", scored=min(SCORED, config.scored))
    task = make_task(config, context, SPLIT)
    with context.bar(_settings(), "search", "settings") as bar:
        search = Search(task, config, bar.update)
        search.chosen(search.layer_rate(), "lr")
        votes = [Vote(k, width) for k, width in itertools.product(COUNTS, BANDWIDTHS)]
        search.chosen(search.best("memory only", votes, voting), "vote")
        _mixture(search, votes)
        for rule in ("rmsprop", "gradient"):
            search.chosen(_adapted(search, rule), rule)
    return {None: search.records}


@dataclass(frozen=True)
class _Mixed:
    k: int
    bandwidth: float
    weight: float


def _mixture(search: Search, votes: Sequence[Vote]) -> None:
    def mixed(setting: _Mixed, near: float) -> mbpa.Mixture:
        vote = voting(Vote(setting.k, setting.bandwidth), near)
        shares = 1 - setting.weight, setting.weight
        return mbpa.Mixture(mbpa.Parametric(), vote, weights=shares)

    first = search.best("mixture", [_Mixed(v.k, v.bandwidth, 0.5) for v in votes], mixed)
    best = search.best("mixture", [replace(first, weight=weight) for weight in WEIGHTS], mixed)
    search.chosen(Vote(best.k, best.bandwidth), "mixture")
    search.chosen(best.weight, "mixture_weight")


def _adapted(search: Search, rule: Any) -> Local:
    """Rate and steps, neighbours and kernel, rate and steps again, then the pull back."""
    best = Local(rule)

    def make(setting: Local, near: float) -> mbpa.Adapted:
        return adapting(setting, near, search.length)

    method = "MbPA (RMSprop)" if rule == "rmsprop" else "MbPA (gradient)"
    for stage in ("steps", "neighbours", "steps", "decay"):
        if stage == "steps":
            pairs = itertools.product(RATES[rule], STEPS)
            settings = [replace(best, lr=lr, steps=steps) for lr, steps in pairs]
        elif stage == "neighbours":
            spots = itertools.product(COUNTS, BANDWIDTHS)
            settings = [replace(best, k=k, bandwidth=width) for k, width in spots]
        else:
            settings = [replace(best, decay=decay) for decay in DECAYS]
        best = search.best(method, settings, make)
    return best


def _settings() -> int:
    votes = len(COUNTS) * len(BANDWIDTHS)
    each = 2 * len(STEPS) * 5 + votes + len(DECAYS)
    return len(LAYER_RATES) + 2 * votes + len(WEIGHTS) + 2 * each
