"""A resumable search for settings, shared by all experiments.

A setting is judged at most once. Judgements are saved together with the seconds that they took, so
an interrupted search continues with the remaining settings and with the rest of its budget. The
search itself is a sequence of stages: each tries the settings of a grid, with all other settings at
the best values so far.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

from experiments.experiment import Context
from experiments.results import Record

Grid = Mapping[str, tuple[float, ...]]
"""Values of some settings, to be tried in all combinations."""
SAVE_INTERVAL_S = 10.0
STATE = "search"  # name in the workspace

Setting = TypeVar("Setting")
Settings = TypeVar("Settings")
Judgement = TypeVar("Judgement", float, list[float], list[list[float]])
Worth = TypeVar("Worth")


def expand_grid(grid: Grid) -> list[dict[str, Any]]:
    """Return all combinations of a grid."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def count_settings(grids: Iterable[Grid]) -> int:
    """Return the number of settings in all grids, counting repetitions."""
    return sum(math.prod(map(len, grid.values())) for grid in grids)


class Search:
    """A search that judges settings and collects its records.

    Leaving its `with` block saves all judgements, also after an error or an interrupt.

    Args:
        context: holds the workspace in which judgements are kept.
        expected_settings: total of the progress bar, for a search without a budget.
        budget_s: seconds of judging after which `try_settings` tries nothing more. A judgement that
            has begun is completed.
        clock: returns the current time in seconds.
    """

    def __init__(
        self,
        context: Context,
        *,
        expected_settings: int = 0,
        budget_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.records: list[Record] = []
        self.left_out: dict[str, int] = {}
        """Number of settings not tried for lack of time, by stage; stages that were not cut are
        missing.
        """
        self.used_s = 0.0
        """Seconds that the judgements so far took, those of interrupted runs included."""
        self._budget_s, self._clock = budget_s, clock
        self._workspace = context.workspace
        kept = self._workspace.load(STATE)
        self._judgements: dict[str, tuple[Any, float]] = {} if kept is None else kept["judgements"]
        self._counted: set[str] = set()
        self._recorded: set[str] = set()
        self._saved_at = clock()
        self._bar = (
            context.bar(expected_settings, "search", "settings")
            if math.isinf(budget_s)
            else context.bar(math.ceil(budget_s), "search, of its budget", "s")
        )

    def __enter__(self) -> Search:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.close()
        self._save()

    def judge(self, what: object, compute: Callable[[], Judgement]) -> Judgement:
        """Return the judgement of `what`, computed at most once.

        Args:
            what: identified by its `repr`.
        """
        key = repr(what)
        if key not in self._judgements:
            start = self._clock()
            judgement = compute()
            now = self._clock()
            self._judgements[key] = judgement, now - start
            if now - self._saved_at >= SAVE_INTERVAL_S:
                self._save()
        found: Judgement
        found, seconds = self._judgements[key]
        if key not in self._counted:
            # Kept judgements count when they are reached, not when they are loaded. So a resumed
            # search runs out of time at the setting at which an uninterrupted one would.
            self._counted.add(key)
            self.used_s += seconds
        return found

    def grant(self, seconds: float) -> None:
        """Replace what is left of the budget by this many seconds, counted from now on."""
        self._budget_s = self.used_s + seconds
        self._bar.reset(math.ceil(self._budget_s))

    def try_settings(
        self, stage: str, settings: Sequence[Setting], judge: Callable[[Setting], Worth]
    ) -> list[tuple[Setting, Worth]]:
        """Judge one setting after another until the budget is used up.

        Args:
            stage: name under which settings that are not tried are counted.

        Returns:
            The settings that were tried, in order, with what `judge` returned for each.
        """
        tried: list[tuple[Setting, Worth]] = []
        for setting in settings:
            if self.used_s >= self._budget_s:
                untried = len(settings) - len(tried)
                self.left_out[stage] = self.left_out.get(stage, 0) + untried
                break
            tried.append((setting, judge(setting)))
            if math.isinf(self._budget_s):
                self._bar.update()
            else:
                self._bar.update(int(min(self.used_s, self._budget_s)) - self._bar.n)
        return tried

    def choose(
        self,
        stage: str,
        start: Settings,
        grids: Sequence[Grid],
        judge: Callable[[Settings], float | tuple[float, ...]],
    ) -> Settings:
        """Return the settings with the highest worth, grid by grid; the first of equals.

        Args:
            start: a dataclass, whose fields are the names in the grids.
        """
        best: Any = start
        for grid in grids:
            options = [replace(best, **values) for values in expand_grid(grid)]
            tried = self.try_settings(stage, options, judge)
            best = max(tried, key=lambda pair: pair[1])[0] if tried else best
        found: Settings = best
        return found

    def record_trial(self, what: object, records: Sequence[Record]) -> None:
        """Add the records of a trial, once per trial."""
        if repr(what) not in self._recorded:
            self._recorded.add(repr(what))
            self.records += records

    def record_choice(self, setting: str, value: str | float, **where: str | int | None) -> None:
        """Record the chosen value of a setting, under the name by which presets find it.

        Args:
            where: further fields of the record.
        """
        self.records.append({**where, "setting": setting, "name": "chosen", "value": value})

    def record_choices(self, field: str, settings: object, grids: Sequence[Grid]) -> None:
        """Record the chosen values of all settings in the grids, which are in `field`."""
        for name in dict.fromkeys(itertools.chain(*grids)):
            self.record_choice(f"{field}.{name}", getattr(settings, name))

    def _save(self) -> None:
        self._workspace.save(STATE, {"judgements": self._judgements})
        self._saved_at = self._clock()
