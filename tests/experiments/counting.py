"""An experiment for the tests of running: units of work, each of which depends on those before."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from experiments import EXPERIMENTS
from experiments.errors import ExperimentError
from experiments.experiment import BySeed, Context, Experiment
from experiments.results import Result
from experiments.sections import Figure, Section, Table

NAME = "counting"
EXPERIMENTS[NAME] = "counting:EXPERIMENT"


@dataclass(frozen=True)
class Inner:
    """Settings inside settings."""

    rate: float = 0.5
    shape: tuple[int, ...] = (2, 3)


@dataclass(frozen=True)
class CountingConfig:
    """Settings that the tests change."""

    seeds: tuple[int, ...] = (0, 1)
    """One count each."""
    units: int = 4
    """Number of units of work."""
    pause: float = 0.0
    """Seconds of sleep per unit."""
    loud: bool = False
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self) -> None:
        if self.units < 1:
            raise ValueError(f"units must be at least 1, got {self.units}")


def run(config: CountingConfig, context: Context) -> BySeed:
    records: BySeed = {}
    with context.bar(config.units * len(config.seeds), "counting", "units") as bar:
        for seed in config.seeds:
            generator = torch.Generator().manual_seed(seed)
            state: dict[str, Any] = {"done": 0, "total": torch.zeros(3, dtype=torch.float64)}
            if kept := context.workspace.load(f"seed-{seed}"):
                state = kept
                generator.set_state(state["generator"])
            for unit in range(state["done"], config.units):
                drawn = torch.randn(3, generator=generator, dtype=torch.float64)
                total = config.inner.rate * state["total"] + drawn
                state = {"done": unit + 1, "total": total, "generator": generator.get_state()}
                context.workspace.save(f"seed-{seed}", state)
                time.sleep(config.pause)
                bar.update()
            values = state["total"].tolist()
            records[seed] = [
                {"method": "sum", "place": place, "name": "total", "value": value}
                for place, value in enumerate(values)
            ]
    return records


def tune(config: CountingConfig, context: Context) -> BySeed:
    return {None: [{"method": "sum", "setting": "units", "name": "chosen", "value": 7}]}


def sections(results: Sequence[Result]) -> list[Section]:
    rows = [[str(r.seed), f"{record['value']:.3f}"] for r in results for record in r.metrics]
    figures = [
        Figure("counts", "Totals <of> all & more.", lambda canvas: canvas.subplots().plot([1, 2])),
        Figure("again", "The same.", lambda canvas: canvas.subplots().plot([2, 1]), size=(4, 3)),
    ]
    text = ["What `counting` came to, with < and &."]
    return [Section("Counting", text, [Table("Totals", ["seed", "total"], rows)], figures)]


EXPERIMENT = Experiment(
    name=NAME,
    summary="counting, for the tests",
    reproduces="nothing",
    presets={
        "smoke": CountingConfig(),
        "quick": CountingConfig(units=30, inner=Inner(rate=0.25)),
        "paper": CountingConfig(seeds=(0, 1, 2), units=50, loud=True, inner=Inner(shape=())),
    },
    run=run,
    sections=sections,
    tune=tune,
)


def fail(config: CountingConfig, context: Context) -> BySeed:
    raise ExperimentError("it cannot be")


FAILING = replace(EXPERIMENT, name="failing", run=fail)
