"""Claims on the settings of the language model's memory: appendix B, by our searches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from experiments.claims.claim import (
    Claim,
    Evidence,
    Outcome,
    PytestNode,
    Verdict,
    cite,
    decide,
    format_all,
    format_number,
)
from experiments.claims.language import (
    CACHE,
    CORPORA,
    LSTM,
    MARGIN,
    MBPA,
    NAME,
    RUNS,
    SHARE,
    Corpus,
)
from experiments.errors import ExperimentError
from experiments.results import Record, value_of

CLOSE_WEIGHT = 0.05
"""How far a weight of a mixture may be from the paper's: the spacing of the paper's grid."""
OPTIMUM = {"steps": 1, "lr": 0.15, "k": 256, "window": 5000}
"""The paper's chosen settings of MbPA."""
SEARCHES = tuple(corpus.search for corpus in CORPORA)
INERT = PytestNode("tests/test_theory.py", "test_decay_is_inert_at_one_step")


def _find_best(records: Sequence[Record]) -> float:
    if not records:
        raise ExperimentError("a claim of the paper needs trials of the search that are missing")
    return min(value_of(record) for record in records)


def _judge_at_optimum(corpus: Corpus, evidence: Evidence, **changed: object) -> float:
    """Return the perplexity with the paper's settings of MbPA, some of them changed."""
    wanted = {**OPTIMUM, **changed, "kernel": "inverse_distance", "decay": 0.0}
    return _find_best(corpus.trials(evidence, **wanted))


def _one_step_is_best(evidence: Evidence) -> Outcome:
    checks, told = [], []
    for corpus in CORPORA:
        one, best = (
            _find_best(corpus.trials(evidence, steps=1)),
            _find_best(corpus.trials(evidence)),
        )
        checks.append(one <= best + MARGIN)
        steps = evidence.config(NAME, corpus.preset)["mbpa"]["steps"]
        told.append(f"{corpus.name}: {one:.1f} with one step, {best:.1f} at best, {steps} chosen")
    return decide(checks, f"{'; '.join(told)} (validation text)")


def _optimum_gains_as_much(evidence: Evidence) -> Outcome:
    checks, told = [], []
    for corpus in CORPORA:
        tokens = corpus.trials(evidence)[0]["tokens"]
        alone = [
            value_of(record)
            for record in evidence.list_trials(NAME, corpus.preset, method=LSTM)
            if record["tokens"] == tokens and record.get("part") != "beginning"
        ]
        if not alone:  # an earlier search did not score the LSTM on the tokens of the trials
            continue
        found = _judge_at_optimum(corpus, evidence)
        fall = alone[0] - found
        checks.append(fall >= SHARE * corpus.valid_mbpa)
        told.append(
            f"{corpus.name}: {alone[0]:.1f} to {found:.1f}: −{fall:.1f} "
            f"(paper −{corpus.valid_mbpa:.1f}), {tokens:,} tokens of the validation text"
        )
    return decide(checks, "; ".join(told))


def _setting_is_best(
    field: str, tried: Sequence[float], words: str
) -> Callable[[Evidence], Outcome]:
    """Return a judge of whether the paper's value is the best, with its other settings."""

    def judge(evidence: Evidence) -> Outcome:
        checks, told = [], []
        for corpus in CORPORA:
            found = [_judge_at_optimum(corpus, evidence, **{field: value}) for value in tried]
            checks.append(found[tried.index(OPTIMUM[field])] == min(found))
            told.append(f"{corpus.name} {format_all(found)}")
        values = " / ".join(f"{value:,g}" for value in tried)
        chosen = [_find_chosen(evidence, corpus, field) for corpus in CORPORA]
        seen = f"{words} {values}: {'; '.join(told)}; with all settings free we chose "
        return decide(checks, seen + " and ".join(f"{value:,g}" for value in chosen))

    return judge


def _find_chosen(evidence: Evidence, corpus: Corpus, field: str) -> float:
    config = evidence.config(NAME, corpus.preset)
    return float(config["memory"] if field == "window" else config["mbpa"][field])


def _weights_agree(evidence: Evidence) -> Outcome:
    checks, told = [], []
    for corpus in CORPORA:
        found = [
            evidence.measure(NAME, "weight", corpus.preset, method=method, part=part)
            for method, part in ((MBPA, "MbPA"), (CACHE, "cache"))
        ]
        checks += [
            abs(weight.mean - paper) <= CLOSE_WEIGHT
            for weight, paper in zip(found, (0.1, 0.15), strict=True)
        ]
        told.append(f"{corpus.name} {found[0].format(2)} and {found[1].format(2)}")
    return decide(checks, f"MbPA and cache, each beside the LSTM: {'; '.join(told)}")


def _pull_helps(evidence: Evidence) -> Outcome:
    checks, told = [], []
    for corpus in CORPORA:
        trials = corpus.trials(evidence)
        free = {
            _describe_setting(record): value_of(record) for record in trials if record["decay"] == 0
        }
        gains = [
            free[_describe_setting(record)] - value_of(record)
            for record in trials
            if record["decay"] != 0 and _describe_setting(record) in free
        ]
        if not gains:
            raise ExperimentError(f"no search of {corpus.preset} tried a pull and none")
        checks.append(max(gains) > MARGIN)
        told.append(f"{corpus.name} {format_number(-max(gains), 2, sign=True)}")
    seen = "best change of the perplexity by a pull, all else the same: "
    return decide(checks, f"{seen}{'; '.join(told)} (validation text)")


def _describe_setting(record: Record) -> tuple[object, ...]:
    """Return everything in a trial but the pull and the outcome."""
    names = ("window", "lr", "steps", "k", "kernel", "kernel_scale")
    return tuple(record[name] for name in names)


CLAIMS = (
    Claim(
        "B",
        "Of 1, 5 and 10 steps, one is best",
        f"the best setting with one step is within {MARGIN:g} of the best of all",
        _one_step_is_best,
        SEARCHES,
        (32,),
    ),
    Claim(
        "B",
        "The settings of the paper (one step at 0.15, 256 of the last 5,000 tokens) give its gain",
        f"they lower our perplexity by at least {SHARE:.0%} of the paper's fall",
        _optimum_gains_as_much,
        SEARCHES,
        (32,),
    ),
    Claim(
        "B",
        "Of 500, 1,000 and 5,000 tokens, a memory of 5,000 is best",
        "it is, with the paper's other settings, on both corpora",
        _setting_is_best("window", (500, 1000, 5000), "last tokens"),
        SEARCHES,
        (32,),
    ),
    Claim(
        "B",
        "256 neighbours are better than 512",
        "they are, with the paper's other settings, on both corpora",
        _setting_is_best("k", (256, 512), "neighbours"),
        SEARCHES,
        (32,),
    ),
    Claim(
        "B",
        "Of rates from 0.01 to 1, 0.15 is best",
        "it is, with the paper's other settings, on both corpora",
        _setting_is_best("lr", (0.01, 0.1, 0.15, 0.2, 0.5, 1.0), "rate"),
        SEARCHES,
        (32,),
    ),
    Claim(
        "B",
        "Weights of 0.1 for MbPA and 0.15 for the cache are best",
        f"ours are within {CLOSE_WEIGHT:g} of them, on both corpora",
        _weights_agree,
        RUNS,
        (28,),
    ),
    Claim(
        "B",
        "The memory is small and easily overfitted; a penalty on the change remedies this",
        f"a pull back to the weights lowers the perplexity by more than {MARGIN:g}, all else the "
        "same, on both corpora",
        _pull_helps,
        SEARCHES,
        (4, 7),
    ),
    Claim(
        "B",
        "The penalty is part of the optimum, which has one step",
        "it changes the outcome of one step",
        cite(Verdict.FAILS, "its gradient is zero where the first step is taken"),
        (INERT,),
        (4,),
    ),
)
