"""Sensitivity to settings, and the long run (the paper's appendix and section 4.2).

One pass over the stream serves the memory sizes, which are windows over it, the numbers of
neighbours, which share one retrieval, and the long run. Each learning rate of the last layer needs
another pass. Records show what was varied by the field they have: `capacity`, `k` or `lr`; those of
the long run have none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

import mbpa
from experiments.config_checks import check_rising
from experiments.experiment import BySeed, Context
from experiments.images.config import ImagesConfig
from experiments.images.incremental import (
    Moment,
    compare_models,
    describe_situation,
    follow_stream,
    most_queries,
    record_accuracies,
    select_scored,
    split_answers,
    stream_of,
)
from experiments.images.methods import Model, make_model
from experiments.images.presets import PAPER, QUICK, SMOKE, copy_fields
from experiments.images.task import ImageTask, make_image_task
from experiments.results import Record


@dataclass(frozen=True)
class SensitivityConfig(ImagesConfig):
    """The settings of the comparison itself, varied one at a time; `points` apply to the rates."""

    at: tuple[float, ...] = (0.1, 1.0, 3.0)
    """Epochs after which memory sizes and numbers of neighbours are compared."""
    capacities: tuple[float, ...] = (0.01, 0.02, 0.05, 0.1, 0.2, 0.33, 0.5, 1.0, 2.0, 3.0)
    """Sizes of the memory, in epochs of the stream."""
    counts: tuple[int, ...] = (1, 2, 5, 10, 20, 50, 100, 200, 400)
    """Numbers of neighbours."""
    rates: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
    """Learning rates of the last layer, used instead of `lr`."""
    long: tuple[float, ...] = (0.1, 0.3, 1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 40.0)
    """Epochs after which all methods are tested in the long run."""
    explained: int = 1_000
    """Number of queries whose corrections are measured in the long run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("at", "capacities", "counts", "rates", "long"):
            check_rising(name, getattr(self, name))
        if self.explained < 1:
            raise ValueError(f"explained must be at least 1, got {self.explained}")


PRESETS = {
    "smoke": SensitivityConfig(
        **copy_fields(SMOKE) | {"points": (0.1, 0.5)},
        at=(0.5,),
        capacities=(0.05, 0.5),
        counts=(1, 10),
        rates=(0.03, 0.3),
        long=(0.1, 0.5),
        explained=50,
    ),
    "quick": SensitivityConfig(
        **copy_fields(QUICK) | {"points": (0.05, 0.1, 0.2, 0.5, 1.0, 3.0)},
        at=(0.1, 1.0),
        capacities=(0.01, 0.03, 0.1, 0.3, 1.0),
        counts=(1, 5, 10, 20, 50, 100, 200),
        rates=(0.1, 0.3, 1.0, 3.0, 10.0),
        long=(0.1, 0.3, 1.0, 3.0, 10.0, 20.0, 40.0),
        explained=300,
    ),
    "paper": SensitivityConfig(
        **copy_fields(PAPER)
        | {"points": (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 3.0), "scored": 5_000}
    ),
}


def run(config: SensitivityConfig, context: Context) -> BySeed:
    """Run one pass of a split after the other, skipping those already completed."""
    records: BySeed = {}
    passes = (None, *config.rates)
    with context.bar(len(config.seeds) * len(passes), "sensitivity", "passes") as bar:
        for seed in config.seeds:
            records[seed], task = [], None
            for place, lr in enumerate(passes):
                kept = context.workspace.load(f"records-{seed}-{place}")
                if kept is None:
                    task = task or make_image_task(config, context, seed)
                    study = Study(task, config, seed)
                    kept = {"records": study.stream() if lr is None else study.rate(lr)}
                    context.workspace.save(f"records-{seed}-{place}", kept)
                records[seed] += kept["records"]
                bar.update()
    return records


class Study:
    """The measurements of one split."""

    def __init__(self, task: ImageTask, config: SensitivityConfig, seed: int) -> None:
        self.task, self.config, self.seed = task, config, seed
        self.queries, self.answers = select_scored(task, config)
        self.groups = split_answers(task, config, self.answers)
        epoch = len(stream_of(task, config, seed)[0])
        self.sizes = [max(2, round(share * epoch)) for share in config.capacities]

    def rate(self, lr: float) -> list[Record]:
        """Measure all methods without a layer of their own, with another learning rate of the last
        layer.
        """
        records: list[Record] = []
        for moment in follow_stream(self.task, replace(self.config, lr=lr), self.seed):
            models = self.config.models(
                describe_situation(moment, self.task, self.config), with_own_layers=False
            )
            right = compare_models(models, self.queries, self.answers)
            records += self._accuracies(right, moment, lr=lr)
        return records

    def stream(self) -> list[Record]:
        """Measure everything that a single pass serves."""
        config, records = self.config, list[Record]()
        points = tuple(sorted({*config.at, *config.long}))
        wide = replace(config, points=points, capacity=max(config.capacity, *self.sizes))
        for moment in follow_stream(self.task, wide, self.seed):
            if moment.epochs in config.at:
                records += self._by_capacity(moment)
            if len(moment.memory) > config.capacity:
                moment = moment.with_capacity(config.capacity)
            if moment.epochs in config.at:
                records += self._by_count(moment)
            if moment.epochs in config.long:
                records += self._accuracies(self._answer(moment), moment)
                records += self._corrections(moment)
        return records

    def _by_capacity(self, moment: Moment) -> list[Record]:
        """Measure memories that hold only the last of the entries; the largest holds all of them.

        Beyond an epoch they hold images several times.
        """
        records: list[Record] = []
        smaller = [size for size in self.sizes if size < len(moment.memory)]
        for capacity in (*smaller, len(moment.memory)):
            right = self._answer(moment.with_capacity(capacity))
            records += self._accuracies(right, moment, capacity=capacity)
        return records

    def _by_count(self, moment: Moment) -> list[Record]:
        """Measure methods with other numbers of neighbours and otherwise the same settings."""
        situation, records = describe_situation(moment, self.task, self.config), list[Record]()
        models: dict[tuple[str, int], Model] = {}
        for name in (name for name, method in self.config.methods.items() if method.settings):
            settings: Any = self.config.settings(name)
            for k in self.config.counts if hasattr(settings, "k") else ():
                if k <= len(moment.memory):
                    models[name, k] = make_model(replace(settings, k=k), situation)
        right = compare_models(models, self.queries, self.answers) if models else {}
        for (name, k), hits in right.items():
            records += self._accuracies({name: hits}, moment, k=k)
        return records

    def _corrections(self, moment: Moment) -> list[Record]:
        """Measure how far an adaptation moves the layer and the prediction."""
        some = slice(0, self.config.explained)  # queries are in random order
        queries, records = self.queries[some], list[Record]()
        models = self.config.models(describe_situation(moment, self.task, self.config))
        for name, model in models.items():
            if not isinstance(model, mbpa.MbPA) or not model.predictor.keys_for:
                continue  # does not adapt the learning layer
            measured = corrections(model, queries)
            for subset, members in self.groups.items():
                shared: Record = {"method": name, "subset": subset, **self._describe(moment)}
                for what, values in measured.items():
                    value = float(values[members[some]].double().mean())
                    records.append({**shared, "name": what, "value": value})
        return records

    def _answer(self, moment: Moment) -> dict[str, Bool[Tensor, "Q"]]:
        models = self.config.models(describe_situation(moment, self.task, self.config))
        return compare_models(models, self.queries, self.answers)

    def _accuracies(
        self, right: Mapping[str, Bool[Tensor, "Q"]], moment: Moment, **varied: float
    ) -> list[Record]:
        return record_accuracies(right, self.groups, {**self._describe(moment), **varied})

    def _describe(self, moment: Moment) -> Record:
        return {"split": self.seed, "part": self.config.part, "epochs": moment.epochs}


def corrections(model: mbpa.MbPA, queries: Float[Tensor, "Q D"]) -> dict[str, Float[Tensor, "Q"]]:
    """Return, for each query, ‖θˣ − θ‖, KL(adapted ‖ layer), and 100 if the answer differs from
    that of the layer that is adapted, otherwise 0.
    """
    found: dict[str, list[Tensor]] = {"change": [], "divergence": [], "other_answers": []}
    for part in queries.split(most_queries(queries, max(1, model.predictor.keys_for))):
        explanation = model.explain(keys=part)
        before, after, change = explanation.before, explanation.after, explanation.change
        assert change is not None
        found["change"].append(change)
        found["divergence"].append((after.exp() * (after - before)).sum(1))
        found["other_answers"].append(100.0 * (after.argmax(1) != before.argmax(1)))
    return {name: torch.cat(parts) for name, parts in found.items()}
