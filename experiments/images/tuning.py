"""The search for settings: on split 0, scored on held-out training images.

The learning rate of the last layer comes first, judged by that layer's own accuracy. Then every
other method is searched stage by stage (`methods.METHODS`), with the layer as it was at some points
of the stream; one retrieval from a memory serves all settings. A setting is judged by its accuracy
over all classes, averaged over the points. A method that must keep the old classes is judged by the
same accuracy after `TARGET_EPOCHS` alone, on more held-out images. A rehearsal limits what it loses
on old classes; the accuracy over all classes also counts what the rehearsal did not foresee.

The unbalanced experiment has a search of its own, with its own stream, for `MbPA (balanced)` alone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from statistics import fmean
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

import mbpa
from experiments.experiment import BySeed, Context
from experiments.images.config import ImagesConfig
from experiments.images.incremental import (
    describe_situation,
    follow_stream,
    select_scored,
)
from experiments.images.methods import (
    METHODS,
    WITH_SETTINGS,
    BalancedAdaptation,
    ImageMethod,
    ImageMethodSettings,
    Model,
    Situation,
    make_model,
)
from experiments.images.task import ImageTask, make_image_task
from experiments.measures import percent
from experiments.results import Record
from experiments.search import Search, count_settings

SEARCHED = {name: each for name, each in WITH_SETTINGS.items() if not each.needs_scarce}
"""Methods whose settings are searched with the same number of images of every class."""
SPLIT = 0
POINTS_EPOCHS = (0.05, 0.1, 0.3, 1.0, 3.0)
"""Epochs of the stream after which settings are judged."""
TARGET_EPOCHS = 0.1
"""Epochs after which methods that must keep the old classes are judged."""
LAYER_RATES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
SCORED_IMAGES = 3_000
"""Number of held-out images that settings are judged on."""
SCORED_IMAGES_AT_TARGET = 10_000
"""The same number for methods that must keep the old classes; all there are of Tiny ImageNet."""


def make_search_config(config: ImagesConfig) -> ImagesConfig:
    """Return the config that the search runs with."""
    fresh = ImagesConfig()
    fields = "lr", *(method.settings for method in SEARCHED.values())
    untuned: dict[str, Any] = {name: getattr(fresh, name) for name in fields}
    return replace(config, seeds=(SPLIT,), part="validation", points=POINTS_EPOCHS, **untuned)


def make_balance_search_config(config: ImagesConfig) -> ImagesConfig:
    """Return the config with which the settings of `MbPA (balanced)` are searched.

    All other settings are as they were chosen.
    """
    untuned = BalancedAdaptation(**vars(config.gradient))
    return replace(
        config, seeds=(SPLIT,), part="validation", points=POINTS_EPOCHS, balanced=untuned
    )


def tune(config: ImagesConfig, context: Context) -> BySeed:
    """Return records of all trials, and of the chosen settings."""
    config = make_search_config(config)
    return {None: search_settings(make_image_task(config, context, SPLIT), config, context)}


def tune_balance(config: ImagesConfig, context: Context) -> BySeed:
    """Return the same as `tune`, for methods that are compared only if some classes are scarce."""
    config = make_balance_search_config(config)
    task = make_image_task(config, context, SPLIT)
    methods = {name: method for name, method in METHODS.items() if method.needs_scarce}
    return {None: search_settings(task, config, context, methods=methods, layer_rates=())}


def search_settings(
    task: ImageTask,
    config: ImagesConfig,
    context: Context,
    *,
    methods: Mapping[str, ImageMethod] = SEARCHED,
    layer_rates: tuple[float, ...] = LAYER_RATES,
    target_epochs: float = TARGET_EPOCHS,
    scored_images: int = SCORED_IMAGES,
) -> list[Record]:
    """Search with the stream of a task, at the points of the config; return all records.

    Args:
        layer_rates: rates of the last layer to try; with none, the layer keeps its rate.
    """
    grids = [grid for method in methods.values() for grid in method.stages]
    with Search(context, expected_settings=len(layer_rates) + count_settings(grids)) as search:
        images = ImageSearch(task, config, search, methods, target_epochs, scored_images)
        if layer_rates:
            images.choose_layer_rate(layer_rates)
        for method in methods:
            images.choose(method)
    return search.records


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A moment of the stream, with everything that settings need."""

    situation: Situation
    queries: Float[Tensor, "Q D"]
    truth: Int[Tensor, "Q"]
    k: int
    """Maximum number of neighbours that a setting may need."""
    _read: dict[mbpa.Memory, mbpa.Neighbors] = field(default_factory=dict)

    def score(self, settings: ImageMethodSettings | None) -> float:
        """Return the accuracy of a method in percent; without settings, of the layer alone."""
        model = make_model(settings, self.situation)
        neighbors = self._neighbors(model) if model.predictor.k else None
        return percent(model(self.queries, neighbors=neighbors).argmax(1) == self.truth)

    def _neighbors(self, model: Model) -> mbpa.Neighbors:
        """Return the neighbours of all queries in the model's memory, read once."""
        memory = model.memory
        if memory not in self._read:
            keys = model.embed(self.queries)
            self._read[memory] = memory.read(keys, min(self.k, len(memory)))
        return self._read[memory]


class ImageSearch:
    """Judges the settings of methods on one stream, and chooses the best.

    Args:
        config: as chosen so far; its `points` are where most settings are judged.
        methods: methods to search for, with their grids.
    """

    def __init__(
        self,
        task: ImageTask,
        config: ImagesConfig,
        search: Search,
        methods: Mapping[str, ImageMethod],
        target_epochs: float,
        scored_images: int,
    ) -> None:
        self.task, self.config, self.search, self.methods = task, config, search, methods
        self.queries, self.answers = select_scored(task, config)
        self._target_epochs, self._scored_images = target_epochs, scored_images
        self._snapshots: list[Snapshot] = []
        self._snapshots_lr = math.nan

    def choose_layer_rate(self, rates: tuple[float, ...]) -> None:
        """Choose the rate with which the last layer alone does best."""

        def judge(lr: float) -> float:
            return fmean(self._scores(lr, None))

        tried = self.search.try_settings(
            "parametric",
            rates,
            lambda lr: self._judge("parametric", {"lr": lr}, partial(judge, lr)),
        )
        best = max(tried, key=lambda pair: pair[1])[0]
        self.config = replace(self.config, lr=best)
        self.search.record_choice("lr", best)

    def choose(self, method: str) -> None:
        """Choose the settings of a method, grid by grid."""
        field, grids = self.methods[method].settings, self.methods[method].stages

        def judge_at_points(settings: ImageMethodSettings) -> float:
            return fmean(self._scores(self.config.lr, settings))

        def judge_at_target(settings: ImageMethodSettings) -> float:
            return self._target.score(settings)

        judge = judge_at_target if self.methods[method].keeps_old else judge_at_points
        best = self.search.choose(
            method,
            self.config.settings(method),
            grids,
            lambda settings: self._judge(method, vars(settings), partial(judge, settings)),
        )
        changed: dict[str, Any] = {field: best}
        self.config = replace(self.config, **changed)
        self.search.record_choices(field, best, grids)

    def _judge(self, method: str, settings: dict[str, Any], compute: Callable[[], float]) -> float:
        """Return the accuracy of a setting, and record it."""
        accuracy = self.search.judge((method, settings), compute)
        trial: Record = {"method": method, **settings, "subset": "all"}
        trial |= {"name": "top1", "value": accuracy}
        self.search.record_trial((method, settings), [trial])
        return accuracy

    @cached_property
    def _target(self) -> Snapshot:
        """The moment of the stream at which methods that must keep the old classes are judged."""
        config = replace(self.config, points=(self._target_epochs,))
        some = slice(0, SCORED_IMAGES_AT_TARGET)
        (moment,) = follow_stream(self.task, config, SPLIT)
        keeping = [name for name, method in self.methods.items() if method.keeps_old]
        situation = describe_situation(moment, self.task, self.config)
        k = self._find_max_neighbors(keeping)
        return Snapshot(situation, self.queries[some], self.answers[some], k)

    def _scores(self, lr: float, settings: ImageMethodSettings | None) -> list[float]:
        """Return the accuracy at each point."""
        if lr != self._snapshots_lr:
            self._snapshots = []  # frees the old ones before the new ones are made
            self._snapshots, self._snapshots_lr = list(self._take_snapshots(lr)), lr
        return [snapshot.score(settings) for snapshot in self._snapshots]

    def _take_snapshots(self, lr: float) -> Iterator[Snapshot]:
        some = slice(0, self._scored_images)  # queries are in random order
        k = self._find_max_neighbors(self.methods)
        for moment in follow_stream(self.task, replace(self.config, lr=lr), SPLIT):
            still = moment.with_capacity(len(moment.memory))  # a copy, since the stream goes on
            still = replace(still, head=copy.deepcopy(moment.head))
            found = describe_situation(still, self.task, self.config)
            yield Snapshot(found, self.queries[some], self.answers[some], k)

    def _find_max_neighbors(self, methods: Iterable[str]) -> int:
        """Return the maximum number of neighbours that any setting of these methods needs."""
        most = [0]
        for method in methods:
            most.append(getattr(self.config.settings(method), "k", 0))
            for grid in self.methods[method].stages:
                most += map(int, grid.get("k", ()))
        return max(most)
