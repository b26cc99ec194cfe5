"""The paper's claims are judged by the results, and each says how to reproduce it."""

from __future__ import annotations

import ast
import functools
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments import EXPERIMENTS
from experiments.claims import (
    NAME,
    PARTS,
    PRESET,
    Claim,
    Command,
    Evidence,
    PytestNode,
    Verdict,
    continual,
    make_sections,
)
from experiments.claims.claim import Measured, Outcome, cite, decide, summarize_claims
from experiments.errors import ExperimentError
from experiments.experiment import find
from experiments.results import Record, read_result, write_result

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
CLAIMS = [claim for claims in PARTS.values() for claim in claims]
COMMANDS = dict.fromkeys(command for claim in CLAIMS for command in claim.tested_by)


@functools.cache
def list_tests(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text("utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_every_command_names_an_experiment_and_preset_or_a_test(
    command: Command | PytestNode,
) -> None:
    if isinstance(command, PytestNode):
        assert command.name.startswith("test_")
        assert command.name in list_tests(command.file)
        return
    experiment = find(command.experiment)
    assert command.preset in experiment.presets
    assert command.kind in ("run", "tune")
    assert command.kind == "run" or experiment.tune is not None


def test_every_claim_is_made_once_and_has_a_command_or_a_reason_why_not() -> None:
    assert len({claim.says for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        if claim.tested_by:
            assert claim.holds_if
        else:
            outcome = claim.judge(Evidence(RESULTS))
            assert outcome.verdict is Verdict.NOT_TESTED
            assert outcome.seen


def test_all_experiments_of_the_paper_are_evidence() -> None:
    named = {command.experiment for command in COMMANDS if isinstance(command, Command)}
    assert {name for name in EXPERIMENTS if find(name).reproduces.startswith("paper,")} <= named


def test_differences_are_those_of_the_list() -> None:
    text = (ROOT / "docs" / "paper.md").read_text("utf-8")
    listed = {int(number) for number in re.findall(r"^(\d+)\. \*\*", text, re.MULTILINE)}
    assert {number for claim in CLAIMS for number in claim.differences} <= listed


def test_the_page_shows_every_claim() -> None:
    page = (ROOT / "docs" / "claims.md").read_text("utf-8")
    for part in PARTS:
        assert f"<!-- results: {NAME} {PRESET}: {part} -->" in page
    assert re.findall(r"^\| (\d+)\. ", page, re.MULTILINE) == [
        str(number) for number in range(1, len(CLAIMS) + 1)
    ]


# Verdicts follow the results


def alter(tmp_path: Path, change: Callable[[Record], Record | None]) -> Evidence:
    """Return evidence in which every record of permuted MNIST is changed, or removed."""
    folder = tmp_path / continual.NAME
    shutil.copytree(RESULTS / continual.NAME, folder, ignore=shutil.ignore_patterns(".*"))
    for path in folder.glob("paper-*.json"):
        result = read_result(path)
        changed = [new for record in result.metrics if (new := change(dict(record))) is not None]
        result.metrics[:] = changed
        write_result(result, path)
    return Evidence(tmp_path)


def is_final(record: Record, method: str) -> bool:
    return (
        record["name"] == "mean_accuracy"
        and record["method"] == method
        and record["stream"] == "sequence"
        and record["tasks_seen"] == 20
    )


@pytest.mark.parametrize(
    ("sizes", "verdict"),
    [
        ((), Verdict.HOLDS),
        ((100,), Verdict.IN_PART),
        ((100, 500, 1000, 5000), Verdict.FAILS),
    ],
)
def test_a_verdict_follows_the_results(
    tmp_path: Path, sizes: tuple[int, ...], verdict: Verdict
) -> None:
    def fail_at_sizes(record: Record) -> Record:
        if is_final(record, "MbPA") and record["memory_per_task"] in sizes:
            record["value"] = 0.2
        return record

    outcome = continual.BEATS_MLP.judge(alter(tmp_path, fail_at_sizes))
    assert outcome.verdict is verdict
    assert outcome.seen.count("20.0") == len(sizes)


@pytest.mark.heavy
def test_methods_that_the_paper_does_not_have_change_nothing(tmp_path: Path) -> None:
    def rename_one(record: Record) -> Record:
        return {**record, "method": "of tomorrow"} if record.get("method") == "A-GEM" else record

    other = alter(tmp_path, rename_one)
    for claim in PARTS["Continual learning"]:
        assert claim.judge(other) == claim.judge(Evidence(RESULTS))


def test_a_missing_measurement_is_named(tmp_path: Path) -> None:
    evidence = alter(tmp_path, lambda record: None if is_final(record, "EWC") else record)
    with pytest.raises(ExperimentError, match=r"needs one record 'mean_accuracy'.*EWC.*seed0"):
        continual.BEATS_EWC.judge(evidence)
    with pytest.raises(ExperimentError, match="holds no results of permuted-mnist paper"):
        continual.BEATS_EWC.judge(Evidence(tmp_path / "nowhere"))
    with pytest.raises(ExperimentError, match=r"needs trials with .*'steps': 7.* has none"):
        evidence.list_trials(continual.NAME, method="MbPA", steps=7)


def test_claims_are_judged_by_the_preset_of_the_paper_alone() -> None:
    with pytest.raises(ExperimentError, match="judged by the preset 'paper', got 'quick'"):
        make_sections(RESULTS, "quick")


# The rules


def make_measured(*values: float) -> Measured:
    return Measured(dict(enumerate(values)))


def test_a_difference_is_clear_if_it_exceeds_its_deviation_over_seeds() -> None:
    base = make_measured(50, 60, 70)
    assert make_measured(51, 61, 71).is_above(base, 5)  # seed by seed it is always 1
    assert not make_measured(51, 65, 69).is_above(base, 0)  # 1.7 ± 3.1
    assert not base.is_above(make_measured(51, 61, 71), 0)
    assert not make_measured(50.05, 60.05, 70.05).is_above(base, 0)  # no table would show it


def test_a_single_seed_needs_a_margin() -> None:
    assert make_measured(51.1).is_above(make_measured(50), 1)
    assert not make_measured(50.9).is_above(make_measured(50), 1)


def test_other_seeds_are_not_compared() -> None:
    with pytest.raises(ExperimentError, match="only with the same seeds"):
        make_measured(1, 2).is_above(make_measured(1), 0)


def test_a_ratio_is_taken_seed_by_seed() -> None:
    ratio = make_measured(1, 9) / make_measured(2, 10)
    assert ratio.by_seed == pytest.approx({0: 0.5, 1: 0.9})  # that of the means would be 0.83
    with pytest.raises(ExperimentError, match="only with the same seeds"):
        make_measured(1, 2) / make_measured(1)


def test_checks_are_all_some_or_none() -> None:
    verdicts = [decide(checks, "").verdict for checks in ([True, True], [True, False], [False])]
    assert verdicts == [Verdict.HOLDS, Verdict.IN_PART, Verdict.FAILS]
    with pytest.raises(ExperimentError, match="checked by nothing: n = 100"):
        decide([], "n = 100")


def test_a_summary_holds_as_far_as_its_parts_do() -> None:
    def claim(verdict: Verdict) -> Claim:
        return Claim("1", f"it {verdict.value}", "always", cite(verdict, ""))

    def sum_up(*verdicts: Verdict) -> Outcome:
        return summarize_claims("abstract", "All of it", *map(claim, verdicts)).judge(
            Evidence(RESULTS)
        )

    assert sum_up(Verdict.HOLDS, Verdict.HOLDS).verdict is Verdict.HOLDS
    assert sum_up(Verdict.FAILS, Verdict.FAILS).verdict is Verdict.FAILS
    mixed = sum_up(Verdict.HOLDS, Verdict.FAILS, Verdict.FAILS)
    assert (mixed.verdict, mixed.seen) == (Verdict.IN_PART, "1 holds, 2 does not")


def test_commands_are_written_out() -> None:
    lines = [str(command) for command in COMMANDS]
    assert "python -m experiments run permuted-mnist --preset paper" in lines
    assert "pytest tests/test_theory.py::test_decay_is_inert_at_one_step" in lines
