"""What an experiment is: named settings, a function that runs them, and how its results are shown.

An experiment is a value, `EXPERIMENT`, in a module of its own; `experiments.EXPERIMENTS` says
where. Its config is a frozen dataclass of plain fields, with the docstrings under the fields as
help on the command line, and one of them is `seeds: tuple[int, ...]`.
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
"""Records of each seed; `None` where the seeds make one result together."""


@dataclass(frozen=True)
class Context:
    """What a run is given besides its config."""

    device: torch.device
    data_dir: Path | None
    """Where the data sets are; `None`: where `experiments.data` looks by itself."""
    workspace: Workspace
    progress: bool = True
    cache: Path = Path("results") / ".cache"
    """For what takes long to compute and serves many runs; can be deleted whenever nothing runs."""

    def bar(self, total: int, description: str, unit: str, initial: int = 0) -> tqdm:
        """A progress bar on stderr, with the time that remains.

        Args:
            initial: how much of the total an interrupted run has done already.
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
    """One experiment; the frame does the rest: flags, files, resuming, the report."""

    name: str
    summary: str
    """A line."""
    reproduces: str
    """As in "paper, section 4.1, figure 3"."""
    presets: Mapping[str, Config]
    """`smoke`, `quick`, `paper`, from the cheapest to the most thorough."""
    run: Callable[[Config, Context], BySeed]
    """Records for each of `config.seeds`; what one seed gives must not depend on the others.

    To be resumable it saves to the workspace, and goes on from what it finds there; a run that was
    interrupted must end with the records of one that was not.
    """
    sections: Callable[[Sequence[Result]], list[Section]]
    """What the report shows of the results of one preset, one result a seed."""
    searched: Callable[[Config], Config] | None = None
    """What a search runs with, given a preset: other seeds, other data, and what it is to choose as
    it was before; so that its file says so, and is the same before and after."""
    tune: Callable[[Config, Context], BySeed] | None = None
    """The search for hyper-parameters: records of what was tried, and for each field of the config
    that was settled one with the name `chosen`, the field as `setting`, and its `value`."""
    of_the_search: tuple[str, ...] = ()
    """Fields of the config on which a search depends and a run does not."""
    search_sections: Callable[[Sequence[Result]], list[Section]] | None = None
    """What the report shows of a search, after the table of what it chose."""


def find(name: str) -> Experiment[Any]:
    """The experiment of this name.

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
    """The experiment's config of this name.

    Raises:
        ExperimentError: there is none.
    """
    if name not in experiment.presets:
        known = ", ".join(experiment.presets)
        raise ExperimentError(f"{experiment.name} has no preset {name!r}: name one of {known}")
    return experiment.presets[name]
