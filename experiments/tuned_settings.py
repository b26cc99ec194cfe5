"""Settings chosen by searches: `experiments tune NAME --adopt` writes them, presets read them.

`tuned.json` holds each chosen setting by experiment and preset: a dotted name and a value, or a
list of values if a setting has one per memory size.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from experiments.errors import ExperimentError
from experiments.results import TUNED, Result
from mbpa.files import write_durably

Config = TypeVar("Config")
FILE = Path(__file__).with_name("tuned.json")
_READERS: set[tuple[str, str]] = set()  # experiments and presets that use adopted settings


def apply_tuned_settings(config: Config, experiment: str, preset: str) -> Config:
    """Return a preset with the settings adopted for it; unchanged if there are none."""
    _READERS.add((experiment, preset))
    return apply_settings(config, _load_adopted().get(experiment, {}).get(preset, {}))


def apply_settings(config: Config, settings: dict[str, Any]) -> Config:
    """Return a config with the settings that a search chose."""
    for setting, value in settings.items():
        config = _change_field(config, setting.split("."), value)
    return config


def collect_choices(result: Result) -> dict[str, Any]:
    """Return each setting that a search chose; a list if there is one value per memory size."""
    found: dict[str, Any] = {}
    for record in result.metrics:
        if record["name"] == "chosen":
            name, value = str(record["setting"]), record["value"]
            if record.get("memory_per_task") is None:
                found[name] = value
            else:
                found.setdefault(name, []).append(value)
    return found


def check_adoptable(experiment: str, label: str) -> str:
    """Check that what a search chose can be adopted, and return the preset that it was for.

    Args:
        label: preset in the name of the search's file.

    Raises:
        ExperimentError: the search was for no preset, or for one whose settings are fixed.
    """
    preset = label.removeprefix(TUNED)
    if preset.startswith("custom-"):
        raise ExperimentError(
            "only a search with the settings of a preset can be adopted: "
            "leave out --adopt, or the flags that change the settings"
        )
    if (experiment, preset) not in _READERS:
        raise ExperimentError(
            f"the settings of {experiment}'s preset {preset} are fixed: leave out --adopt, and "
            "pass the chosen settings as flags"
        )
    return preset


def adopt(result: Result) -> None:
    """Make the chosen settings those of the search's preset, from the next start on.

    Raises:
        ExperimentError: the search was not for a preset, or the file cannot be written to.
    """
    preset, known = check_adoptable(result.experiment, result.preset), _read()
    known.setdefault(result.experiment, {})[preset] = collect_choices(result)
    try:
        write_durably(FILE, _format_json(known).encode())
    except OSError as error:
        raise ExperimentError(f"cannot write {FILE} ({error.strerror or error})") from error


@functools.cache
def _load_adopted() -> dict[str, dict[str, dict[str, Any]]]:
    return _read()


def _read() -> dict[str, Any]:
    return dict(json.loads(FILE.read_text("utf-8"))) if FILE.exists() else {}


def _format_json(known: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Return the settings as JSON, one per line, so that diffs are readable."""
    experiments = []
    for experiment, presets in sorted(known.items()):
        parts = []
        for preset, settings in sorted(presets.items()):
            lines = [f"   {json.dumps(n)}: {json.dumps(v)}" for n, v in sorted(settings.items())]
            parts.append(f"  {json.dumps(preset)}: {{\n" + ",\n".join(lines) + "\n  }")
        experiments.append(f" {json.dumps(experiment)}: {{\n" + ",\n".join(parts) + "\n }")
    return "{\n" + ",\n".join(experiments) + "\n}\n"


def _change_field(config: Any, names: list[str], value: Any) -> Any:
    """Return the config with one field, or a field of a field, changed."""
    name, *rest = names
    if rest:
        value = _change_field(getattr(config, name), rest, value)
    elif isinstance(getattr(config, name), tuple):
        value = tuple(value) if isinstance(value, list) else (value,)
    return replace(config, **{name: value})
