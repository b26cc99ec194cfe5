"""A search stage by stage, one grid after the other, the rest as it was best so far; what it has
judged is kept, and an interrupted search judges only the rest."""

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
    """All that a grid holds."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def count(stages: Iterable[Grid]) -> int:
    """How many settings there are to try, some of them twice."""
    return sum(len(combinations(grid)) for grid in stages)


def best_of(
    start: Settings, stages: Sequence[Grid], worth: Callable[[Settings], float | tuple[float, ...]]
) -> Settings:
    """The settings that are worth most, the first of equals; stage by stage.

    Args:
        start: a dataclass.
    """
    best: Any = start
    for grid in stages:
        best = max((replace(best, **setting) for setting in combinations(grid)), key=worth)
    found: Settings = best
    return found


class Notebook:
    """What a search has judged, and what it has to tell."""

    def __init__(self, context: Context) -> None:
        self.records: list[Record] = []
        self._workspace = context.workspace
        kept = self._workspace.load("search")
        self._known: dict[str, Any] = {} if kept is None else kept["known"]
        self._written: set[str] = set()
        self._saved = time.monotonic()

    def judged(self, what: str, judge: Callable[[], Judgement]) -> Judgement:
        """What the judge says of it, or said when asked before."""
        if what not in self._known:
            self._known[what] = judge()
            if time.monotonic() - self._saved >= SAVE_EVERY:
                self.save()
        found: Judgement = self._known[what]
        return found

    def save(self) -> None:
        """Keep all that was judged; it is done now and then anyway."""
        self._workspace.save("search", {"known": self._known})
        self._saved = time.monotonic()

    def note_tried(self, what: str, records: Sequence[Record]) -> None:
        """Once for each."""
        if what not in self._written:
            self._written.add(what)
            self.records += records

    def note_chosen(self, setting: str, value: float) -> None:
        """Under the name that presets will find it by."""
        self.records.append({"setting": setting, "name": "chosen", "value": value})

    def note_all_chosen(self, field: str, settings: Any, stages: Sequence[Grid]) -> None:
        """Whatever the stages decided."""
        for name in dict.fromkeys(itertools.chain(*stages)):
            self.note_chosen(f"{field}.{name}", getattr(settings, name))
