"""Settings that a search chose become those of the preset."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import counting
import pytest

from experiments import cli, tuned_settings
from experiments.errors import ExperimentError
from experiments.results import Result, read_result
from experiments.tuned_settings import adopt, collect_choices

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Part:
    lr: tuple[float, ...] = (0.1,)
    steps: int = 1


@dataclass(frozen=True)
class Config:
    strength: float = 1.0
    kernel: str = "uniform"
    alone: Part = field(default_factory=Part)


def result(preset: str = "tune-paper") -> Result:
    settled = [("strength", None, 3.0), ("kernel", None, "gaussian"), ("alone.steps", None, 7)]
    settled += [("alone.lr", 10, 0.5), ("alone.lr", 20, 0.25)]
    records = [
        {"memory_per_task": size, "setting": name, "name": "chosen", "value": value}
        for name, size, value in settled
    ]
    tried = {"method": "MbPA", "name": "accuracy", "value": 0.5}
    return Result(
        "made-up", preset, None, {}, {}, 1.0, "python -m experiments tune", [tried, *records]
    )


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tuned_settings, "FILE", tmp_path / "tuned.json")
    readers = {("made-up", "paper"), ("another", "paper"), *tuned_settings._READERS}
    monkeypatch.setattr(tuned_settings, "_READERS", readers)
    tuned_settings._load_adopted.cache_clear()
    yield tmp_path / "tuned.json"
    tuned_settings._load_adopted.cache_clear()


def test_what_was_adopted_is_what_the_preset_has(file: Path) -> None:
    assert tuned_settings.apply_tuned_settings(Config(), "made-up", "paper") == Config()
    adopt(result())
    tuned_settings._load_adopted.cache_clear()
    expected = Config(3.0, "gaussian", Part((0.5, 0.25), 7))
    assert tuned_settings.apply_tuned_settings(Config(), "made-up", "paper") == expected
    assert tuned_settings.apply_tuned_settings(Config(), "made-up", "quick") == Config()
    assert tuned_settings.apply_tuned_settings(Config(), "another", "paper") == Config()


def test_adopting_again_replaces_and_leaves_others_alone(file: Path) -> None:
    adopt(result())
    adopt(replace(result(), experiment="another"))
    adopt(replace(result(), metrics=result().metrics[:2]))
    found = json.loads(file.read_text())
    assert found["made-up"] == {"paper": {"strength": 3.0}}
    assert found["another"] == {"paper": collect_choices(result())}
    assert '   "alone.lr": [0.5, 0.25],\n' in file.read_text()  # a setting a line


def test_settings_of_no_preset_are_not_adopted(file: Path) -> None:
    with pytest.raises(ExperimentError, match="leave out --adopt, or the flags"):
        adopt(result("tune-custom-0123abcd"))
    with pytest.raises(ExperimentError, match="of made-up's preset quick are fixed"):
        adopt(result("tune-quick"))
    assert not file.exists()


def test_a_file_that_cannot_be_written_is_one_line(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuned_settings, "FILE", tmp_path / "none" / "tuned.json")
    with pytest.raises(ExperimentError, match=r"cannot write .*none"):
        adopt(result())


def test_the_command_adopts(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    tuned_settings._READERS.add((counting.NAME, "smoke"))
    words = ["tune", counting.NAME, "--preset", "smoke", "--out", str(tmp_path / "out")]
    assert cli.main([*words, "--no-progress"]) == 0
    assert not file.exists()
    assert cli.main([*words, "--adopt"]) == 0
    assert f"adopted in {file}" in capsys.readouterr().out
    search = read_result(tmp_path / "out" / "counting" / "tune-smoke.json")
    adopted = json.loads(file.read_text())["counting"]["smoke"]
    assert adopted == collect_choices(search) == {"units": 7}


def test_what_cannot_be_adopted_is_refused_before_the_search(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    words = ["tune", "permuted-mnist", "--out", str(tmp_path / "out"), "--adopt"]
    assert cli.main([*words, "--preset", "paper", "--tasks", "2"]) != 0
    assert "can be adopted: leave out --adopt" in capsys.readouterr().err
    assert cli.main([*words, "--preset", "quick"]) != 0
    assert "preset quick are fixed: leave out --adopt" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_is_adopted_is_what_the_committed_searches_chose() -> None:
    adopted = json.loads(tuned_settings.FILE.read_text("utf-8"))
    assert "permuted-mnist" in adopted
    for experiment, presets in adopted.items():
        for preset, settings in presets.items():
            path = ROOT / "results" / experiment / f"tune-{preset}.json"
            assert settings == collect_choices(read_result(path)), f"tune {experiment} --adopt"
