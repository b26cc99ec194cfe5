"""What a memory costs as it grows: what is measured, and what the document shows of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import growth

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", growth.MEMORIES)
def test_recall_is_measured_over_what_is_left_after_overwriting(kind: str) -> None:
    figures = growth.measure_size(kind, 3_000, torch.float32, torch.device("cpu"), seconds=0.01)
    assert figures["entries"] == 3_000
    assert figures["recall"] == 1.0  # both compare with all entries up to this size
    assert min(figures["writes per second"], *figures["milliseconds"].values()) > 0


def test_a_memory_that_misses_entries_has_less_recall() -> None:
    memory = growth.make_memory("exact", 3_000, torch.float32, torch.device("cpu"))
    for keys in growth.draw_keys(3_000, torch.float32, memory.device):
        memory.write(keys, torch.zeros(len(keys), dtype=torch.int64))
    growth.time_writes(memory, torch.float32)
    assert growth.measure_recall(memory, 3_000, torch.float32) == 1.0
    nearest = memory.read(growth.draw_queries(growth.QUERIES_CHECKED, 20, memory.device), 1).ids
    memory.delete(nearest.flatten())
    assert growth.measure_recall(memory, 3_000, torch.float32) < 1.0


@pytest.mark.heavy
def test_a_run_writes_report_table_and_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- benchmarks: growth -->\n<!-- end of benchmarks -->\nafter\n")
    monkeypatch.setattr(
        sys, "argv",
        ["growth", "--device", "cpu", "--sizes", "500", "2000", "--seconds", "0.01",
         "--results", str(tmp_path), "--document", str(page), "--figure", str(tmp_path / "a.png")],
    )  # fmt: skip
    assert growth.main() == 0
    report = json.loads((tmp_path / "growth-exact-cpu-float32.json").read_text())
    assert [size["entries"] for size in report["sizes"]] == [500, 2000]
    assert "| 2,000 |" in page.read_text()
    assert page.read_text().startswith("before\n")
    assert page.read_text().endswith("after\n")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_document_shows_the_reports() -> None:
    page = (ROOT / "docs" / "memories.md").read_text("utf-8")
    assert growth.format_reports(growth.read_reports(ROOT / "results" / "benchmarks")) in page
