"""The trials can be found, and the documents say what their reports say."""

from __future__ import annotations

from pathlib import Path

import pytest

from reliability import report
from reliability.__main__ import NAMES, find_trial

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", NAMES)
def test_every_trial_is_where_its_name_says(name: str) -> None:
    assert find_trial(name).name == name


def test_the_table_of_trials_is_that_of_the_reports() -> None:
    page = (ROOT / "docs" / "serving.md").read_text("utf-8")
    reports = report.read_reports(ROOT / "results" / "reliability")
    assert report.refresh(page, reports) == page, "run python -m reliability.report"


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="must have the lines"):
        report.refresh("nothing", {})
