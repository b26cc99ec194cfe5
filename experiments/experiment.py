"""The definition of an experiment: named settings, a function that runs them, and its report.

An experiment is a value, `EXPERIMENT`, in a module of its own; `experiments.EXPERIMENTS` says
where. Its config is a frozen dataclass of plain fields, one of which is `seeds: tuple[int, ...]`.
Docstrings under the fields are the help texts on the command line.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from tqdm import tqdm

from experiments import EXPERIMENTS
from experiments.errors import ExperimentError
from experiments.results import Record, Result
from experiments.sections import Section
from experiments.workspace import Workspace

Config = TypeVar("Config")
BySeed = dict[int | None, list[Record]]
"""Records by seed; the key is `None` if all seeds together give one result."""


@dataclass(frozen=True)
class Context:
    """Everything a run receives besides its config."""

    device: torch.device
    data_dir: Path | None
    """Directory of the data sets; `None` selects the default of `experiments.data`."""
    workspace: Workspace
    progress: bool = True
    cache: Path = Path("results") / ".cache"
    """Directory for expensive results shared by many runs; may be deleted when nothing runs."""

    def bar(self, total: int, description: str, unit: str, initial: int = 0) -> tqdm:
        """Return a progress bar on stderr that shows the remaining time.

        Args:
            initial: how much of the total an interrupted run has already done.
        """
        return tqdm(
            total=total,
            desc=description,
            unit=f" {unit}",
            initial=initial,
            file=sys.stderr,
            disable=not self.progress,
            dynamic_ncols=True,
        )


@dataclass(frozen=True)
class Experiment(Generic[Config]):
    """One experiment. The framework adds flags, files, resuming, and the report."""

    name: str
    summary: str
    """One line that describes the experiment."""
    reproduces: str
    """The part of the paper it reproduces, such as "paper, section 4.1, figure 3"."""
    presets: Mapping[str, Config]
    """Configs by name: `smoke`, `quick`, `paper`, from the cheapest to the most thorough."""
    run: Callable[[Config, Context], BySeed]
    """Compute the records of each of `config.seeds`; those of one seed must not depend on the
    others.

    To be resumable, the function saves to the workspace and continues from what it finds there. An
    interrupted run must end with the same records as an uninterrupted one.
    """
    sections: Callable[[Sequence[Result]], list[Section]]
    """Return the report sections for the results of one preset, one result per seed."""
    searched: Callable[[Config], Config] | None = None
    """Return the config that a search runs with, given a preset: other seeds and data, and the
    fields to be chosen reset to their defaults. The file of the search then shows this config,
    which is the same before and after the settings are adopted.
    """
    tune: Callable[[Config, Context], BySeed] | None = None
    """Search for hyper-parameters. The records describe what was tried; each chosen field of the
    config has one record named `chosen`, with the field as `setting`, and its `value`.
    """
    of_the_search: tuple[str, ...] = ()
    """Fields of the config on which a search depends but a run does not."""
    search_sections: Callable[[Sequence[Result]], list[Section]] | None = None
    """Return the report sections of a search, shown after the table of the chosen settings."""


def run_each_seed(
    seeds: Sequence[int],
    context: Context,
    run_seed: Callable[[int], list[Record]],
    tick: Callable[[], object] = lambda: None,
) -> BySeed:
    """Return the records of each seed; those that an interrupted run has completed are not computed
    again.

    Args:
        run_seed: computes the records of one seed.
        tick: called after each seed.
    """
    records: BySeed = {}
    for seed in seeds:
        kept = context.workspace.load(f"records-{seed}")
        if kept is None:
            kept = {"records": run_seed(seed)}
            context.workspace.save(f"records-{seed}", kept)
        records[seed] = kept["records"]
        tick()
    return records


def find(name: str) -> Experiment[Any]:
    """Return the experiment of this name.

    Raises:
        ExperimentError: there is none.
    """
    if name not in EXPERIMENTS:
        known = ", ".join(EXPERIMENTS)
        raise ExperimentError(f"no experiment is called {name!r}: name one of {known}")
    module, _, attribute = EXPERIMENTS[name].partition(":")
    experiment = getattr(importlib.import_module(module), attribute)
    assert isinstance(experiment, Experiment)
    return experiment


def preset(experiment: Experiment[Config], name: str) -> Config:
    """Return the experiment's config of this name.

    Raises:
        ExperimentError: there is none.
    """
    if name not in experiment.presets:
        known = ", ".join(experiment.presets)
        raise ExperimentError(f"{experiment.name} has no preset {name!r}: name one of {known}")
    return experiment.presets[name]
