"""The books of a search: what it may spend, what it has found, and what it writes down."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

from experiments.experiment import Context
from experiments.results import Record

SAVE_EVERY = 5.0  # seconds
SPREAD, BEGINNING = "spread", "beginning"
"""Which tokens of a text the network alone is judged by, where not all: for comparison."""


def three_digits(number: float) -> float:
    """Rounded, as settings are written down."""
    return float(f"{number:.3g}")


class Ledger:
    """Nothing is computed twice, not even by a run that goes on.

    Costs are estimates, so that what is left out does not depend on the speed of the day.

    Args:
        corpus: named in every record.
        allowance: seconds.
        bar: shows what of it is spent.
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
        """Settings that were never tried, as too dear."""
        return len(self._left_out)

    def affords(self, setting: object, seconds: float, share: float = 1.0) -> bool:
        """Whether so much more may be spent of this share; if so it is, else the setting is left
        out, unless there is more to spend when it comes again.

        Args:
            setting: `None` for more tokens of what has been tried.
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
        """Count a setting as one that is too dear."""
        self._left_out.add(repr(setting))

    def known(self, identity: object, compute: Callable[[], Sequence[float]]) -> list[float]:
        """What was found for this, now or by a run that was interrupted."""
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
        """Write down the perplexity of the validation text with some setting."""
        where: Record = {"method": method, "corpus": self._corpus, "split": "valid"}
        self.records.append({**where, **setting, "name": "perplexity", "value": value})

    def chose(self, setting: str, value: str | int | float) -> None:
        """Write down what a field of the config is to be."""
        chosen: Record = {"corpus": self._corpus, "setting": setting}
        self.records.append({**chosen, "name": "chosen", "value": value})
