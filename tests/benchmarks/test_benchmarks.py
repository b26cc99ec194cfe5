"""The command behind `make bench`: what it measures, and what it says of what it cannot."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as benchmarks
from benchmarks import avalanche_plugins, estimators, streams
from benchmarks.tables import DocumentTable

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


@pytest.mark.parametrize(
    ("document", "table"),
    [
        ("integrations-sklearn.md", estimators.ESTIMATORS_TABLE),
        ("integrations-river.md", streams.STREAMS_TABLE),
        ("integrations-avalanche.md", avalanche_plugins.AVALANCHE_TABLE),
    ],
    ids=lambda given: getattr(given, "name", ""),
)
def test_pages_of_integrations_show_the_results_of_benchmarks(
    document: str, table: DocumentTable
) -> None:
    page = (ROOT / "docs" / document).read_text("utf-8")
    report = json.loads((ROOT / f"results/benchmarks/{table.name}.json").read_text("utf-8"))
    assert table.refresh(page, report) == page, f"run the benchmark that {document} names"


@pytest.mark.parametrize("name", ["SEA", "Sine"])
def test_generated_streams_change_in_the_middle(name: str) -> None:
    """A model that has learnt one half is worse on the other."""
    stream = streams.STREAMS[name](0)
    half = len(stream) // 2
    model = streams.METHODS["LogisticRegression"](0)
    for features, label in stream[: half - 500]:
        model.learn_one(features, label)

    def score(part: list[streams.Example]) -> float:
        return sum(model.predict_one(features) == label for features, label in part) / len(part)

    assert score(stream[half - 500 : half]) > score(stream[half : half + 500]) + 0.02


def test_accuracy_on_a_stream_is_that_of_rivers_own_evaluation() -> None:
    evaluate = pytest.importorskip("river.evaluate")
    metrics = pytest.importorskip("river.metrics")
    stream, make = streams.STREAMS["Hyperplane"](3)[:400], streams.METHODS["LogisticRegression"]
    metric = evaluate.progressive_val_score(iter(stream), make(0), metrics.Accuracy())
    answered = metric.cm.total_weight  # River leaves out examples without an answer: the first
    assert answered == len(stream) - 1
    right = metric.get() * answered
    assert streams.measure_accuracy(make(0), stream)[0] == pytest.approx(right / len(stream))
