"""What a run leaves behind: a small JSON file of records; tables and figures come from these alone.

`results/<experiment>/<run>.json`, where the run is `<preset>-seed<k>`, or `custom-<hash>-seed<k>`
for settings that are no preset's. One record a line, so that a diff can be read.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from experiments import EXPERIMENTS
from experiments.errors import ExperimentError
from mbpa.files import write_durably

Record = dict[str, str | int | float | None]
"""One number, `value`, with its `name` and whatever else says what it is of."""

PROGRAM = "python -m experiments"
"""How the command line of the experiments is started."""
TUNED = "tune-"
"""How the presets of results begin that `python -m experiments tune` made."""


@dataclass(frozen=True)
class Result:
    """One run with one seed, as its file has it."""

    experiment: str
    preset: str
    """As in the name of the file: of a preset, `custom-<hash>`, or `tune-` and one of these."""
    seed: int | None
    config: dict[str, Any]
    """Every field; `seeds` holds this one alone."""
    environment: dict[str, Any]
    seconds: float
    """Of the whole run, shared evenly among its seeds."""
    command: str
    """Makes this file, and those of the seeds that ran with it."""
    metrics: list[Record]

    @property
    def file_name(self) -> str:
        """Says what is inside; nothing else is ever called the same."""
        return file_name(self.preset, self.seed)


def value_of(record: Record) -> float:
    """The number; not a number where there was none to be had."""
    value = record["value"]
    return math.nan if value is None else float(value)


def file_name(preset: str, seed: int | None) -> str:
    """Of the result of one run."""
    return f"{preset}.json" if seed is None else f"{preset}-seed{seed}.json"


def environment(device: torch.device) -> dict[str, Any]:
    """What a number may depend on besides the settings."""
    from mbpa import __version__

    return {
        "mbpa": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cores": os.cpu_count(),
    }


# Writing


def write_result(result: Result, path: Path) -> None:
    """Write the file, whole or not at all; a value that is not finite is written as null.

    Raises:
        ValueError: a record is not flat, or lacks `name` or `value`.
    """
    head = {
        "experiment": result.experiment,
        "preset": result.preset,
        "seed": result.seed,
        "config": result.config,
        "environment": result.environment,
        "seconds": round(result.seconds, 2),
        "command": result.command,
    }
    for number, record in enumerate(result.metrics):
        if wrong := _wrong_with_record(record):
            raise ValueError(f"metrics[{number}] {wrong}: {record}")
    finite = [{key: _finite(value) for key, value in r.items()} for r in result.metrics]
    rows = ",\n".join(f"  {_line(record)}" for record in finite)
    parts = [f' "{key}": {_line(value)}' for key, value in head.items()]
    parts.append(f' "metrics": [\n{rows}\n ]')
    write_durably(path, ("{\n" + ",\n".join(parts) + "\n}\n").encode())


def _line(value: object) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def _finite(value: str | int | float | None) -> str | int | float | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value


# Reading


def read_results(folder: Path, experiment: str | None = None) -> list[Result]:
    """All results of an experiment, or of all experiments, in the order of their names.

    Raises:
        ExperimentError: a file is damaged, or is something else; the message names it.
    """
    names = EXPERIMENTS if experiment is None else (experiment,)
    return [
        read_result(path)
        for name in names
        for path in sorted((Path(folder) / name).glob("*.json"), key=_by_number)
    ]


def read_result(path: Path) -> Result:
    """The result in one file, which must be called as what is in it wants.

    Raises:
        ExperimentError: it is damaged, or is something else.
    """
    kind = "tune" if path.name.startswith(TUNED) else "run"
    way_out = f"move it away, and write it anew with `mbpa {kind} {path.parent.name}`"
    try:
        result = _parsed(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ExperimentError(
            f"{path} is damaged, or no result of mbpa ({why}): {way_out}"
        ) from error
    if (result.experiment, result.file_name) != (path.parent.name, path.name):
        raise ExperimentError(
            f"{path} holds what belongs into {result.experiment}/{result.file_name}: "
            "move it there, or away"
        )
    return result


def _parsed(text: str) -> Result:
    found = json.loads(text, parse_constant=_refused)
    if not isinstance(found, dict):
        raise ValueError(f"must be a JSON object, got {type(found).__name__}")
    kinds: Mapping[str, Any] = {
        "experiment": str,
        "preset": str,
        "seed": int | None,
        "config": dict,
        "environment": dict,
        "seconds": int | float,
        "command": str,
        "metrics": list,
    }
    for field in fields(Result):
        if field.name not in found:
            raise ValueError(f"lacks {field.name!r}")
        if not isinstance(found[field.name], kinds[field.name]):
            raise ValueError(f"{field.name!r} is {found[field.name]!r}"[:100])
    for number, record in enumerate(found["metrics"]):
        if wrong := _wrong_with_record(record):
            raise ValueError(f"metrics[{number}] {wrong}")
    return Result(**{field.name: found[field.name] for field in fields(Result)})


def _wrong_with_record(record: object) -> str | None:
    if not isinstance(record, dict):
        return f"must be an object, got {type(record).__name__}"
    for key, value in record.items():
        if not isinstance(key, str) or not isinstance(value, str | int | float | None):
            return f"must hold plain numbers and strings, got {value!r} for {key!r}"
    if not isinstance(record.get("name"), str) or "value" not in record:
        return "must have a 'name' and a 'value'"
    return None


def _refused(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def _by_number(path: Path) -> tuple[str, int, str]:
    """Seed 10 comes after seed 9."""
    stem, _, seed = path.stem.rpartition("-seed")
    return (stem, int(seed), path.name) if seed.isdigit() else (path.stem, -1, path.name)
