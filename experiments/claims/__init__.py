"""The paper's claims, judged by the results: what holds, what holds in part, what does not.

Every claim is a value, `Claim`: where the paper makes it, a criterion, a function that computes the
verdict and the figures from results, and the commands or tests behind it. docs/claims.md shows
them, in blocks that `experiments.documents` keeps up to date:

    <!-- results: claims paper: Continual learning -->
    <!-- end of results -->
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.claims import (
    continual,
    image_settings,
    images,
    language,
    language_settings,
    method,
    overall,
)
from experiments.claims.claim import (
    PRESET,
    Claim,
    Command,
    Evidence,
    Outcome,
    PytestNode,
    Verdict,
)
from experiments.errors import ExperimentError
from experiments.sections import Section, Table

__all__ = [
    "NAME",
    "PARTS",
    "PRESET",
    "Claim",
    "Command",
    "Evidence",
    "Outcome",
    "PytestNode",
    "Verdict",
    "judge_claims",
    "make_sections",
]

NAME = "claims"
"""The name that stands for an experiment in a block of a document."""
PARTS: dict[str, Sequence[Claim]] = {
    "Abstract, introduction and conclusion": overall.CLAIMS,
    "The method": method.CLAIMS,
    "Continual learning": continual.CLAIMS,
    "New image classes": images.CLAIMS,
    "New image classes: what it depends on": image_settings.CLAIMS,
    "Language modelling": language.CLAIMS,
    "Language modelling: settings": language_settings.CLAIMS,
}
"""All claims, by table."""
Judged = dict[str, list[tuple[Claim, Outcome]]]
"""Claims and their outcomes, by part."""
COUNTS = "Verdicts"
"""Title of the table of counts."""
DIFFERENCES = "paper.md#differences-numbered"


def judge_claims(evidence: Evidence) -> Judged:
    """Return all claims and their outcomes, by part.

    Raises:
        ExperimentError: results that a claim needs are missing.
    """
    return {
        part: [(claim, claim.judge(evidence)) for claim in claims] for part, claims in PARTS.items()
    }


def make_sections(folder: Path, preset: str) -> list[Section]:
    """Return the tables of claims, judged by the results in a folder, and one of counts.

    Raises:
        ExperimentError: as in `judge_claims`, or the preset is not the paper's.
    """
    if preset != PRESET:
        raise ExperimentError(f"claims are judged by the preset {PRESET!r}, got {preset!r}")
    evidence = Evidence(folder)
    judged = judge_claims(evidence)
    every = [claim for claims in PARTS.values() for claim in claims]
    numbers = {claim: number for number, claim in enumerate(every, start=1)}
    columns = ["the paper says", "seen here", "verdict", "reproduce with"]
    tables = [
        Table(
            part,
            columns,
            [_make_row(claim, outcome, numbers) for claim, outcome in found],
            _note_seeds([claim for claim, _ in found], evidence),
        )
        for part, found in judged.items()
    ]
    return [Section("The paper's claims", tables=[_count(judged), *tables])]


def _make_row(claim: Claim, outcome: Outcome, numbers: dict[Claim, int]) -> list[str]:
    """Return the row of a claim."""
    says = f"{numbers[claim]}. {claim.says} ({claim.place})"
    criterion = claim.holds_if
    if outcome.rests_on:
        rows = [str(numbers[each]) for each in outcome.rests_on]
        criterion = f"rows {', '.join(rows)} do" if rows[1:] else f"row {rows[0]} does"
    seen = outcome.seen
    if claim.differences:
        listed = ", ".join(f"[{number}]({DIFFERENCES})" for number in claim.differences)
        seen += f" · difference{'s' if claim.differences[1:] else ''} {listed}"
    return [
        f"{says} *Holds if {criterion}.*" if criterion else says,
        seen,
        f"**{outcome.verdict.value}**",
        ", ".join(f"`{command}`" for command in claim.tested_by),
    ]


def _note_seeds(claims: Sequence[Claim], evidence: Evidence) -> str:
    """Return a note on how many seeds or splits are behind the numbers of a table."""
    commands = [command for claim in claims for command in claim.tested_by]
    runs = dict.fromkeys(c for c in commands if isinstance(c, Command) and c.kind == "run")
    told = [
        f"{run.experiment}{'' if run.preset == PRESET else f' ({run.preset})'} "
        f"{len(evidence.results(run.experiment, run.preset))}"
        for run in runs
    ]
    return f"Seeds or splits: {', '.join(told)}." if told else ""


def _count(judged: Judged) -> Table:
    verdicts = {part: [outcome.verdict for _, outcome in found] for part, found in judged.items()}
    verdicts["all"] = [verdict for found in verdicts.values() for verdict in found]
    rows = [
        [part, *(str(found.count(verdict)) for verdict in Verdict), str(len(found))]
        for part, found in verdicts.items()
    ]
    return Table(COUNTS, ["", *(verdict.value for verdict in Verdict), "claims"], rows)
