"""A claim of the paper, the evidence it is judged by, and the rules of judging.

A difference between two methods is *clear* if its mean over seeds is larger than its standard
deviation over seeds, and large enough to be seen in a table. Both methods have the same seeds, so
differences are taken seed by seed. With one seed there is no deviation, and a difference must
exceed a stated margin instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from experiments.drawing import Spread
from experiments.errors import ExperimentError
from experiments.results import PROGRAM, TUNED, Record, Result, read_results, value_of

PRESET = "paper"
"""The preset by whose results claims are judged."""
VISIBLE = 0.1
"""Smallest difference that counts: tables show one decimal place."""


class Verdict(Enum):
    """The outcome for one claim."""

    HOLDS = "holds"
    IN_PART = "holds in part"
    FAILS = "does not"
    NOT_TESTED = "not tested"


# Where a claim is tested


@dataclass(frozen=True)
class Command:
    """A command of the experiments."""

    kind: str
    """`run` or `tune`."""
    experiment: str
    preset: str = PRESET

    def __str__(self) -> str:
        return f"{PROGRAM} {self.kind} {self.experiment} --preset {self.preset}"


@dataclass(frozen=True)
class PytestNode:
    """A test function."""

    file: str
    """Path from the root of the checkout."""
    name: str

    def __str__(self) -> str:
        return f"pytest {self.file}::{self.name}"


def run(experiment: str, preset: str = PRESET) -> Command:
    """Return the command that runs an experiment."""
    return Command("run", experiment, preset)


def tune(experiment: str, preset: str = PRESET) -> Command:
    """Return the command that searches the settings of an experiment."""
    return Command("tune", experiment, preset)


# Evidence


@dataclass(frozen=True)
class Measured:
    """One quantity by seed."""

    by_seed: Mapping[int | None, float]

    @property
    def mean(self) -> float:
        return self.spread.mean

    @property
    def spread(self) -> Spread:
        return Spread(tuple(self.by_seed.values()))

    def __sub__(self, other: Measured) -> Measured:
        """Return the differences, seed by seed."""
        return Measured({seed: x - y for seed, x, y in self._pair(other)})

    def __truediv__(self, other: Measured) -> Measured:
        """Return the ratios, seed by seed."""
        return Measured({seed: x / y for seed, x, y in self._pair(other)})

    def _pair(self, other: Measured) -> list[tuple[int | None, float, float]]:
        """Return every seed with both values."""
        if self.by_seed.keys() != other.by_seed.keys():
            raise ExperimentError(
                "methods can be compared only with the same seeds, got "
                f"{list(self.by_seed)} and {list(other.by_seed)}"
            )
        return [(seed, x, other.by_seed[seed]) for seed, x in self.by_seed.items()]

    def is_above(self, other: Measured, margin: float) -> bool:
        """Return whether this is clearly above the other.

        Args:
            other: has the same seeds.
            margin: what the difference must exceed if there is only one seed.
        """
        difference = (self - other).spread
        needed = max(difference.deviation, VISIBLE) if difference.values[1:] else margin
        return difference.mean > needed

    def format(self, digits: int = 1) -> str:
        """Format the mean."""
        return format_number(self.mean, digits)


class Evidence:
    """The records of all results in a folder, by experiment and preset."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read = functools.cache(lambda experiment: read_results(folder, experiment))
        self._by_name: dict[tuple[str, str, str], list[Record]] = {}

    def results(self, experiment: str, preset: str = PRESET) -> list[Result]:
        """Return one result per seed.

        Raises:
            ExperimentError: there are none.
        """
        found = [each for each in self._read(experiment) if each.preset == preset]
        if not found:
            raise ExperimentError(f"{self.folder} holds no results of {experiment} {preset}")
        return found

    def config(self, experiment: str, preset: str = PRESET) -> dict[str, Any]:
        """Return the config of the first seed."""
        return self.results(experiment, preset)[0].config

    def list_trials(self, experiment: str, preset: str = PRESET, **fields: object) -> list[Record]:
        """Return the records of a search that have these fields and a finite value.

        Raises:
            ExperimentError: there are none.
        """
        (result,) = self.results(experiment, TUNED + preset)
        found = [r for r in result.metrics if _has(r, fields) and r["value"] is not None]
        if not found:
            raise ExperimentError(
                f"a claim of the paper needs trials with {fields} in "
                f"{experiment}/{result.file_name}, which has none"
            )
        return found

    def records(self, experiment: str, name: str, **fields: object) -> list[Record]:
        """Return the records of all seeds that have this name and these fields."""
        results = self.results(experiment)
        return [r for result in results for r in self._list_named(result, name) if _has(r, fields)]

    def measure(
        self,
        experiment: str,
        name: str,
        preset: str = PRESET,
        /,
        *,
        scale: float = 1,
        **fields: object,
    ) -> Measured:
        """Return the one value of each seed. A field given as `None` must be absent or null.

        Raises:
            ExperimentError: a seed has no such record, or several.
        """
        by_seed: dict[int | None, float] = {}
        for result in self.results(experiment, preset):
            found = [r for r in self._list_named(result, name) if _has(r, fields)]
            if len(found) != 1:
                raise ExperimentError(
                    f"a claim of the paper needs one record {name!r} with {fields} in "
                    f"{experiment}/{result.file_name}, which has {len(found)}"
                )
            by_seed[result.seed] = scale * value_of(found[0])
        return Measured(by_seed)

    def _list_named(self, result: Result, name: str) -> list[Record]:
        """Return the records of this name, and remember them for later calls."""
        key = result.experiment, result.file_name, name
        if key not in self._by_name:
            self._by_name[key] = [r for r in result.metrics if r["name"] == name]
        return self._by_name[key]


def _has(record: Record, fields: Mapping[str, object]) -> bool:
    return all(record.get(key) == value for key, value in fields.items())


# Claims


@dataclass(frozen=True)
class Outcome:
    """What was seen, and whether the claim holds."""

    verdict: Verdict
    seen: str
    rests_on: tuple[Claim, ...] = ()
    """Claims that this one sums up. The table names them by their row numbers as the criterion."""


@dataclass(frozen=True)
class Claim:
    """One statement of the paper."""

    place: str
    """Section, table or figure."""
    says: str
    holds_if: str
    """The criterion, in words that continue “holds if”."""
    judge: Callable[[Evidence], Outcome]
    tested_by: tuple[Command | PytestNode, ...] = ()
    differences: tuple[int, ...] = ()
    """Numbers in the list of differences, docs/paper.md, that bear on this claim."""


def decide(checks: Iterable[bool], seen: str) -> Outcome:
    """Return an outcome that holds if all checks do, and in part if some do."""
    found = list(checks)
    if not found:
        raise ExperimentError(f"a claim of the paper was checked by nothing: {seen}")
    if all(found):
        return Outcome(Verdict.HOLDS, seen)
    return Outcome(Verdict.IN_PART if any(found) else Verdict.FAILS, seen)


def cite(verdict: Verdict, seen: str) -> Callable[[Evidence], Outcome]:
    """Return a judge with a fixed outcome, for a claim that tests decide or that is not tested."""
    return lambda _: Outcome(verdict, seen)


def make_untested(place: str, says: str, why: str) -> Claim:
    """Return a claim that cannot be tested here."""
    return Claim(place, says, "", cite(Verdict.NOT_TESTED, why))


def summarize_claims(place: str, says: str, *parts: Claim) -> Claim:
    """Return a claim that sums up others: with their verdict if it is the same, else in part."""

    def judge(evidence: Evidence) -> Outcome:
        verdicts = [part.judge(evidence).verdict for part in parts]
        verdict = verdicts[0] if len(set(verdicts)) == 1 else Verdict.IN_PART
        counts = [(verdicts.count(each), each.value) for each in Verdict]
        seen = ", ".join(f"{count} {word}" for count, word in counts if count)
        return Outcome(verdict, seen if verdicts[1:] else verdict.value, parts)

    commands = dict.fromkeys(command for part in parts for command in part.tested_by)
    differences = sorted({number for part in parts for number in part.differences})
    criterion = "the claims that it sums up do"
    return Claim(place, says, criterion, judge, tuple(commands), differences=tuple(differences))


def format_number(value: float, digits: int = 1, *, sign: bool = False) -> str:
    """Format a number with a typographic minus sign; if `sign`, with a plus sign as well."""
    return f"{value:{'+' if sign else ''}.{digits}f}".replace("-", "−")


def format_all(values: Iterable[Measured | float], digits: int = 1) -> str:
    """Format numbers, or the means of measurements, separated by slashes."""
    means = [value.mean if isinstance(value, Measured) else value for value in values]
    return " / ".join(format_number(mean, digits) for mean in means)
