"""Accounts of a search: its budget, its findings, and its records."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

from experiments.experiment import Context
from experiments.results import Record

SAVE_EVERY = 5.0  # seconds
SPREAD, BEGINNING = "spread", "beginning"
"""Which tokens of a text the network alone is judged on, if not all, for comparison."""


def three_digits(number: float) -> float:
    """Round to three significant digits, as settings are recorded."""
    return float(f"{number:.3g}")


class Ledger:
    """The budget, results and records of a search. Nothing is computed twice, even if a run is
    resumed.

    Costs are estimates, so that what is left out does not depend on the machine's current speed.

    Args:
        corpus: named in every record.
        allowance: budget in seconds.
        bar: progress bar of the budget spent.
    """

    def __init__(self, context: Context, corpus: str, allowance: float, bar: tqdm) -> None:
        self.records: list[Record] = []
        self.allowance = allowance
        self._left_out: set[str] = set()
        self._context, self._corpus, self._bar, self._spent = context, corpus, bar, 0.0
        state = context.workspace.load("search")
        self._known: dict[str, list[float]] = {} if state is None else state["known"]
        self._saved = time.monotonic()

    @property
    def left_out(self) -> int:
        """Number of settings that were never tried because they were too expensive."""
        return len(self._left_out)

    def affords(self, setting: object, seconds: float, share: float = 1.0) -> bool:
        """Spend `seconds` if this share of the budget allows it, and return whether it did.
        Otherwise the setting counts as left out, unless a later call can afford it.

        Args:
            setting: `None` for further tokens of a setting already tried.
        """
        if self._spent + seconds > share * self.allowance:
            if setting is not None:
                self.leave_out(setting)
            return False
        self._left_out.discard(repr(setting))
        before, self._spent = self._spent, self._spent + seconds
        each = self.allowance / self._bar.total
        self._bar.update(round(self._spent / each) - round(before / each))
        return True

    def leave_out(self, setting: object) -> None:
        """Count a setting as too expensive."""
        self._left_out.add(repr(setting))

    def known(self, identity: object, compute: Callable[[], Sequence[float]]) -> list[float]:
        """Return the result for `identity`, computed now or by an interrupted run."""
        key = repr(identity)
        if key not in self._known:
            self._known[key] = list(compute())
            if time.monotonic() - self._saved > SAVE_EVERY:
                self.save()
        return self._known[key]

    def save(self) -> None:
        self._context.workspace.save("search", {"known": self._known})
        self._saved = time.monotonic()

    def tried(self, method: str, setting: dict[str, Any], value: float) -> None:
        """Record the perplexity of the validation text with a setting."""
        where: Record = {"method": method, "corpus": self._corpus, "split": "valid"}
        self.records.append({**where, **setting, "name": "perplexity", "value": value})

    def chose(self, setting: str, value: str | int | float) -> None:
        """Record the chosen value of a field of the config."""
        chosen: Record = {"corpus": self._corpus, "setting": setting}
        self.records.append({**chosen, "name": "chosen", "value": value})
