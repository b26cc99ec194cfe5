"""The resumable search: every setting is judged once, within a budget, and recorded."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from experiments.experiment import Context
from experiments.search import Search, count_settings, expand_grid
from experiments.workspace import Workspace


@dataclass(frozen=True)
class Settings:
    lr: float = 0.0
    steps: float = 1


GRIDS = ({"lr": (1.0, 2.0, 3.0), "steps": (1, 2)}, {"steps": (1, 4)})


class Clock:
    """A clock that stands still unless it is advanced."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(torch.device("cpu"), tmp_path, Workspace(tmp_path / "work"), False, tmp_path)


class Judge:
    """Judges settings, which takes a second each; the best is 2.0 and 4. It may interrupt."""

    def __init__(self, search: Search, clock: Clock, stop_after: int = -1) -> None:
        self.search, self.clock, self.stop_after = search, clock, stop_after
        self.computed: list[Settings] = []

    def __call__(self, settings: Settings) -> float:
        worth = self.search.judge(settings, lambda: self._compute(settings))
        self.search.record_trial(settings, [{**vars(settings), "name": "worth", "value": worth}])
        return worth

    def _compute(self, settings: Settings) -> float:
        if len(self.computed) == self.stop_after:
            raise KeyboardInterrupt
        self.computed.append(settings)
        self.clock.now += 1.0
        return -abs(settings.lr - 2) - abs(settings.steps - 4)


def choose(
    context: Context, stop_after: int = -1, budget_s: float = math.inf
) -> tuple[Settings | None, list[Settings], Search]:
    """Return what is chosen, if nothing interrupts; what was computed; and the search."""
    clock, best = Clock(), None
    with (
        contextlib.suppress(KeyboardInterrupt),
        Search(context, budget_s=budget_s, clock=clock) as search,
    ):
        judge = Judge(search, clock, stop_after)
        best = search.choose("made-up", Settings(), GRIDS, judge)
    return best, judge.computed, search


def test_a_grid_is_expanded_to_all_combinations() -> None:
    assert expand_grid(GRIDS[0])[:3] == [
        {"lr": 1.0, "steps": 1},
        {"lr": 1.0, "steps": 2},
        {"lr": 2.0, "steps": 1},
    ]
    assert count_settings(GRIDS) == 3 * 2 + 2


def test_each_grid_starts_from_the_best_of_the_one_before(context: Context) -> None:
    best, computed, search = choose(context)
    assert best == computed[-1] == Settings(lr=2.0, steps=4)
    assert len(computed) == 3 * 2 + 1  # one of the second grid was known
    assert len(search.records) == len(computed)
    assert search.left_out == {}


def test_the_best_of_equals_is_the_first(context: Context) -> None:
    with Search(context) as search:
        best = search.choose("made-up", Settings(), GRIDS, lambda settings: 1.0)
    assert best == Settings(lr=1.0, steps=1)


@pytest.mark.parametrize("stop_after", range(7))
def test_a_search_that_was_interrupted_computes_only_the_rest(
    stop_after: int, context: Context, tmp_path: Path
) -> None:
    expected, every, whole = choose(context)
    context = replace(context, workspace=Workspace(tmp_path / "other"))
    best, first, _ = choose(context, stop_after)
    assert (best, len(first)) == (None, stop_after)
    best, rest, search = choose(context)
    assert best == expected
    assert first + rest == every
    assert search.records == whole.records
    assert choose(context)[:2] == (expected, [])


def test_judgements_are_saved_from_time_to_time(context: Context, tmp_path: Path) -> None:
    """Little is lost if the process is killed, and nothing needs saving at its end."""
    clock = Clock()
    search = Search(context, clock=clock)
    search.judge("first", lambda: 1.0)
    assert Workspace(tmp_path / "work").load("search") is None
    clock.now += 60.0
    search.judge("second", lambda: 2.0)
    search = Search(context, clock=clock)
    assert search.judge("first", lambda: pytest.fail("it was saved")) == 1.0


def test_the_budget_ends_the_search_and_stages_that_were_cut_are_counted(context: Context) -> None:
    clock, options = Clock(), [Settings(lr=lr) for lr in (1.0, 2.0, 3.0, 4.0, 5.0)]
    with Search(context, budget_s=2.5, clock=clock) as search:
        judge = Judge(search, clock)
        tried = search.try_settings("rates", options, judge)
        assert search.try_settings("more rates", options[1:], judge) == []
    assert [setting for setting, _ in tried] == judge.computed == options[:3]
    assert search.used_s == 3.0  # the third judgement was completed
    assert search.left_out == {"rates": 2, "more rates": 4}
    assert [record["lr"] for record in search.records] == [1.0, 2.0, 3.0]


def test_a_grid_that_was_cut_decides_by_what_it_tried(context: Context) -> None:
    best, computed, search = choose(context, budget_s=4.0)
    assert best == computed[-1] == Settings(lr=2.0, steps=2)
    assert search.left_out == {"made-up": 2 + 2}


@pytest.mark.parametrize("stop_after", range(4))
def test_the_time_of_an_interrupted_search_counts(
    stop_after: int, context: Context, tmp_path: Path
) -> None:
    expected, every, whole = choose(context, budget_s=3.5)
    context = replace(context, workspace=Workspace(tmp_path / "other"))
    _, first, _ = choose(context, stop_after, budget_s=3.5)
    best, rest, search = choose(context, budget_s=3.5)
    assert first + rest == every
    assert len(every) == 4
    assert (best, search.used_s) == (expected, whole.used_s)
    assert search.left_out == whole.left_out


def test_choices_are_recorded_under_the_names_of_fields(context: Context) -> None:
    with Search(context) as search:
        search.record_choice("lr", 0.5)
        search.record_choice("alone.k", 3, memory_per_task=10)
        search.record_choices("part", Settings(lr=2.0, steps=4), GRIDS)
    assert search.records == [
        {"setting": "lr", "name": "chosen", "value": 0.5},
        {"memory_per_task": 10, "setting": "alone.k", "name": "chosen", "value": 3},
        {"setting": "part.lr", "name": "chosen", "value": 2.0},
        {"setting": "part.steps", "name": "chosen", "value": 4},
    ]
