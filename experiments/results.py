"""The output of a run: a small JSON file of records, the only source of tables and figures.

Its path is `results/<experiment>/<run>.json`, where the run is `<preset>-seed<k>`, or
`custom-<hash>-seed<k>` for settings that match no preset. There is one record per line, so that
diffs are readable.
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
"""One number, `value`, with its `name` and any other fields that describe it."""

PROGRAM = "python -m experiments"
"""The command that starts the experiments' command line."""
TUNED = "tune-"
"""Prefix of the presets of results made by `python -m experiments tune`."""


@dataclass(frozen=True)
class Result:
    """One run with one seed, as stored in its file."""

    experiment: str
    preset: str
    """The preset in the file name: a preset, `custom-<hash>`, or either of these after `tune-`."""
    seed: int | None
    config: dict[str, Any]
    """All fields of the config; `seeds` holds only this seed."""
    environment: dict[str, Any]
    seconds: float
    """Seconds of the whole run, divided evenly among its seeds."""
    command: str
    """Command that makes this file, and those of the seeds that ran with it."""
    metrics: list[Record]

    @property
    def file_name(self) -> str:
        """File name, which identifies the contents uniquely within the experiment."""
        return file_name(self.preset, self.seed)


def value_of(record: Record) -> float:
    """Return the value as a number; NaN if there is none."""
    value = record["value"]
    return math.nan if value is None else float(value)


def file_name(preset: str, seed: int | None) -> str:
    """Return the file name of one run's result."""
    return f"{preset}.json" if seed is None else f"{preset}-seed{seed}.json"


def environment(device: torch.device) -> dict[str, Any]:
    """Return what a number may depend on besides the settings."""
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
    """Write the file atomically; a value that is not finite is written as null.

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
    rows = ",\n".join(f"  {_dump_line(record)}" for record in finite)
    parts = [f' "{key}": {_dump_line(value)}' for key, value in head.items()]
    parts.append(f' "metrics": [\n{rows}\n ]')
    write_durably(path, ("{\n" + ",\n".join(parts) + "\n}\n").encode())


def _dump_line(value: object) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def _finite(value: str | int | float | None) -> str | int | float | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value


# Reading


def read_results(folder: Path, experiment: str | None = None) -> list[Result]:
    """Return all results of one experiment or of all experiments, in the order of their names.

    Raises:
        ExperimentError: a file is damaged or not a result; the message names it.
    """
    names = EXPERIMENTS if experiment is None else (experiment,)
    return [
        read_result(path)
        for name in names
        for path in sorted((Path(folder) / name).glob("*.json"), key=_by_number)
    ]


def read_result(path: Path) -> Result:
    """Read the result in one file, whose name must match its contents.

    Raises:
        ExperimentError: it is damaged or not a result.
    """
    kind = "tune" if path.name.startswith(TUNED) else "run"
    way_out = f"move it away, and recompute it with `{PROGRAM} {kind} {path.parent.name}`"
    try:
        result = _parse(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ExperimentError(
            f"{path} is damaged, or not a result of mbpa ({why}): {way_out}"
        ) from error
    if (result.experiment, result.file_name) != (path.parent.name, path.name):
        raise ExperimentError(
            f"{path} holds the result for {result.experiment}/{result.file_name}: "
            "move it there, or away"
        )
    return result


def _parse(text: str) -> Result:
    found = json.loads(text, parse_constant=_refuse_constant)
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


def _refuse_constant(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def _by_number(path: Path) -> tuple[str, int, str]:
    """Return a sort key by which seed 10 comes after seed 9."""
    stem, _, seed = path.stem.rpartition("-seed")
    return (stem, int(seed), path.name) if seed.isdigit() else (path.stem, -1, path.name)
