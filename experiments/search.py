"""A search in stages: one grid after the other, with all other settings at the best values so far.

Judgements are saved, so that an interrupted search continues with the remaining ones.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from experiments.experiment import Context
from experiments.results import Record

Grid = Mapping[str, tuple[float, ...]]
"""Values of some settings, to be tried in all combinations."""
SAVE_EVERY = 10.0  # seconds
Settings = TypeVar("Settings")
Judgement = TypeVar("Judgement", float, list[list[float]])


def combinations(grid: Grid) -> list[dict[str, Any]]:
    """Return all combinations of a grid."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def count(stages: Iterable[Grid]) -> int:
    """Return the number of settings to try, counting repetitions."""
    return sum(len(combinations(grid)) for grid in stages)


def best_of(
    start: Settings, stages: Sequence[Grid], worth: Callable[[Settings], float | tuple[float, ...]]
) -> Settings:
    """Return the settings with the highest worth, stage by stage; the first of equals.

    Args:
        start: a dataclass.
    """
    best: Any = start
    for grid in stages:
        best = max((replace(best, **setting) for setting in combinations(grid)), key=worth)
    found: Settings = best
    return found


class Notebook:
    """The judgements of a search, and its records."""

    def __init__(self, context: Context) -> None:
        self.records: list[Record] = []
        self._workspace = context.workspace
        kept = self._workspace.load("search")
        self._known: dict[str, Any] = {} if kept is None else kept["known"]
        self._written: set[str] = set()
        self._saved = time.monotonic()

    def judged(self, what: str, judge: Callable[[], Judgement]) -> Judgement:
        """Return the judgement of `what`, computed at most once."""
        if what not in self._known:
            self._known[what] = judge()
            if time.monotonic() - self._saved >= SAVE_EVERY:
                self.save()
        found: Judgement = self._known[what]
        return found

    def save(self) -> None:
        """Save all judgements; this also happens automatically from time to time."""
        self._workspace.save("search", {"known": self._known})
        self._saved = time.monotonic()

    def note_tried(self, what: str, records: Sequence[Record]) -> None:
        """Add the records of a trial, once per trial."""
        if what not in self._written:
            self._written.add(what)
            self.records += records

    def note_chosen(self, setting: str, value: float) -> None:
        """Record a chosen value, under the name by which presets find it."""
        self.records.append({"setting": setting, "name": "chosen", "value": value})

    def note_all_chosen(self, field: str, settings: Any, stages: Sequence[Grid]) -> None:
        """Record all settings that the stages decided."""
        for name in dict.fromkeys(itertools.chain(*stages)):
            self.note_chosen(f"{field}.{name}", getattr(settings, name))
