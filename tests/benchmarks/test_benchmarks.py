"""The command behind `make bench`: what it measures, and what it says of what it cannot."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as benchmarks

ROOT = Path(__file__).parents[2]


def called(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--device", "cpu", *arguments])
    return benchmarks.main()


def test_an_unknown_name_is_an_error_that_lists_the_known_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        called(monkeypatch, "--only", "no-such")
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert told.out == ""
    for name in benchmarks.names(torch.device("cpu")):
        assert name in told.err
    assert list(tmp_path.iterdir()) == []


def test_only_what_is_asked_for_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(device: torch.device, budget: float):
        yield "retrieval random", lambda: {"case": "random keys"}
        yield "prediction", lambda: pytest.fail("this was not asked for")

    monkeypatch.setattr(benchmarks, "measurements", measured)
    assert called(monkeypatch, "--only", "random", "--out", str(tmp_path / "out.json")) == 0
    assert "random keys" in capsys.readouterr().out
    assert "random keys" in (tmp_path / "out.json").read_text()


def test_the_document_uses_existing_names() -> None:
    page = (ROOT / "docs" / "engine.md").read_text("utf-8")
    asked = re.findall(r'`--only (?:"(.+?)"|(\w+))`', page)
    assert len(asked) == 2
    for words in asked:
        for device in ("cpu", "cuda"):
            assert any(max(words) in name for name in benchmarks.names(torch.device(device)))
