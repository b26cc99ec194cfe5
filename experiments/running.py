"""Running an experiment: reusing existing results, resuming interrupted runs, writing results.

A run is identified by a fingerprint of everything that its state may depend on: settings, seeds,
kind of device, and the code that it imports. Its workspace lies under
`<out>/<experiment>/.unfinished/` until all its results are written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from experiments import EXPERIMENTS
from experiments.errors import ExperimentError
from experiments.experiment import BySeed, Context, Experiment, preset
from experiments.identity import digest_code
from experiments.results import (
    PROGRAM,
    TUNED,
    Record,
    Result,
    environment,
    file_name,
    read_result,
    write_result,
)
from experiments.workspace import Workspace
from mbpa.device import choose_device

UNFINISHED, CACHE = ".unfinished", ".cache"
Say = Callable[[str], None]
_digest_code = functools.cache(digest_code)


@dataclass(frozen=True)
class Run:
    """A requested run: an experiment with its settings."""

    experiment: Experiment[Any]
    preset: str
    config: Any
    """The preset's config, or a modified one."""
    out: Path
    kind: Literal["run", "tune"] = "run"

    @property
    def settings(self) -> Any:
        """The config that is actually run."""
        return self._effective(self.config)

    @property
    def label(self) -> str:
        """The prefix of its files: the preset's name only if the settings are the preset's."""
        mine = self.relevant(_plain(self.settings))
        given = self.relevant(_plain(self._effective(preset(self.experiment, self.preset))))
        if self.kind == "run":  # its file names contain the seed
            mine, given = {**mine, "seeds": None}, {**given, "seeds": None}
        label = self.preset if mine == given else f"custom-{_digest_value(mine)[:8]}"
        return label if self.kind == "run" else f"{TUNED}{label}"

    @property
    def command(self) -> str:
        """The command that reproduces this run."""
        words = [*PROGRAM.split(), self.kind, self.experiment.name, "--preset", self.preset]
        return shlex.join(words + flags(self.config, preset(self.experiment, self.preset)))

    @property
    def folder(self) -> Path:
        """Directory of the results."""
        return self.out / self.experiment.name

    def path(self, seed: int | None) -> Path:
        """Return the path of one seed's result."""
        return self.folder / file_name(self.label, seed)

    def config_of(self, seed: int | None) -> dict[str, Any]:
        """Return the settings of one seed, as stored in its result."""
        config = _plain(self.settings)
        return config if seed is None else {**config, "seeds": [seed]}

    def relevant(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the settings that a result depends on."""
        without = self.experiment.of_the_search if self.kind == "run" else ()
        return {name: value for name, value in config.items() if name not in without}

    def result(
        self, device: torch.device, seconds: float, seed: int | None, metrics: list[Record]
    ) -> Result:
        """Return the result of one seed, ready to be written."""
        return Result(
            experiment=self.experiment.name,
            preset=self.label,
            seed=seed,
            config=self.config_of(seed),
            environment=environment(device),
            seconds=seconds,
            command=self.command,
            metrics=metrics,
        )

    def _effective(self, config: Any) -> Any:
        searched = self.experiment.searched
        return searched(config) if self.kind == "tune" and searched else config

    def with_seeds(self, seeds: Sequence[int]) -> Run:
        """Return the same run for other seeds."""
        return dataclasses.replace(
            self, config=dataclasses.replace(self.config, seeds=tuple(seeds))
        )

    def workspace(self, device: torch.device) -> Workspace:
        """Return the workspace, which is the same for all requests of the same work."""
        identity = {
            "kind": self.kind,
            "experiment": self.experiment.name,
            "config": _plain(self.settings),
            "device": device.type,
            "torch": str(torch.__version__),
            "code": _digest_code(EXPERIMENTS[self.experiment.name].partition(":")[0]),
        }
        return Workspace(self.folder / UNFINISHED / _digest_value(identity)[:16])


def execute(
    run: Run,
    *,
    device: torch.device,
    data_dir: Path | None = None,
    progress: bool = True,
    again: bool = False,
    say: Say = print,
) -> list[Result]:
    """Compute the missing results, write them, and return the results of all seeds.

    Args:
        again: also recompute and replace existing results.
        say: called with messages about what is skipped or resumed, and which files were written.

    Raises:
        ExperimentError: a file is in the way, or another process is working on the same run.
        OSError: the folder for results cannot be written to.
    """
    work = _work(run)
    there = {} if again else _present(run)
    if there:
        names = ", ".join(run.path(seed).name for seed in there)
        say(f"already in {run.folder}, recomputed only with --again: {names}")
    missing = [seed for seed in run.config.seeds if seed not in there]
    if None in there or not missing:
        _clear_away(run.workspace(device))
        return list(there.values())
    if there and not run.workspace(device).is_begun():  # else continue with all seeds
        run = run.with_seeds(missing)
    with _alone(run, device) as workspace:
        if workspace.is_begun():
            say("continuing where an interrupted run left off")
        context = Context(device, data_dir, workspace, progress, run.out / CACHE)
        found = _check_seeds(work(run.settings, context), run)
        seconds = workspace.seconds / len(found)
        for seed, records in found.items():
            if seed not in there:
                there[seed] = run.result(device, seconds, seed, records)
                write_result(there[seed], run.path(seed))
                say(f"wrote {run.path(seed)}")
        workspace.discard()
    return [there[seed] for seed in sorted(there, key=lambda seed: -1 if seed is None else seed)]


def device_named(name: str) -> torch.device:
    """Return the device of this name; `auto` is a CUDA device if there is one, otherwise the CPU.

    Raises:
        ExperimentError: it is not available.
    """
    try:
        return choose_device(name)
    except ValueError as error:
        raise ExperimentError(str(error)) from error


def _work(run: Run) -> Callable[[Any, Context], BySeed]:
    if run.kind == "run":
        return run.experiment.run
    if run.experiment.tune is None:
        raise ExperimentError(f"{run.experiment.name} has no settings to search for")
    tune = run.experiment.tune
    return lambda config, context: {None: [*itertools.chain(*tune(config, context).values())]}


def _present(run: Run) -> dict[int | None, Result]:
    """Return the results that need not be computed."""
    there: dict[int | None, Result] = {}
    for seed in (None, *run.config.seeds):
        path = run.path(seed)
        if not path.exists():
            continue
        there[seed] = read_result(path)
        if run.relevant(there[seed].config) != run.relevant(run.config_of(seed)):
            raise ExperimentError(
                f"{path} was made with other settings: move it away, or pass --again to replace it"
            )
    return there


@contextlib.contextmanager
def _alone(run: Run, device: torch.device) -> Iterator[Workspace]:
    workspace = run.workspace(device)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(workspace.alone())
        except OSError as error:
            raise ExperimentError(
                f"cannot write to {run.out} ({error.strerror or error}): "
                "name a directory that can be written to with --out"
            ) from error
        yield workspace


def _clear_away(workspace: Workspace) -> None:
    """Remove what a run leaves behind if it is killed after writing its last result."""
    if workspace.folder.parent.exists():
        with contextlib.suppress(ExperimentError, OSError), workspace.alone():
            workspace.discard()


def _check_seeds(found: BySeed, run: Run) -> BySeed:
    if set(found) not in ({None}, set(run.config.seeds)):
        raise ValueError(
            f"{run.experiment.name} must return records for the seeds {run.config.seeds}, "
            f"or for None alone, got {tuple(found)}"
        )
    return found


def _plain(config: Any) -> dict[str, Any]:
    """Return the config as in JSON: tuples become lists, paths become strings."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    return plain


def _digest_value(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def flags(config: Any, default: Any, prefix: str = "") -> list[str]:
    """Return the command-line arguments that turn `default` into `config`."""
    words: list[str] = []
    for field in dataclasses.fields(config):
        value, other = getattr(config, field.name), getattr(default, field.name)
        flag = field.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            words += flags(value, other, f"{prefix}{flag}.")
        elif value != other and isinstance(value, bool):
            words.append(f"--{prefix}{flag}" if value else f"--{prefix}no-{flag}")
        elif value != other:
            words += [
                f"--{prefix}{flag}",
                *map(str, value if isinstance(value, tuple) else [value]),
            ]
    return words
