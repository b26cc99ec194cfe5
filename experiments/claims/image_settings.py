"""Claims on what the accuracy on new image classes depends on: appendix A, and the long run."""

from __future__ import annotations

import itertools

from experiments.claims.claim import (
    Claim,
    Evidence,
    Measured,
    Outcome,
    decide,
    format_all,
    format_number,
)
from experiments.claims.images import (
    ALL,
    EPOCHS,
    IN_EPOCHS,
    LAYER,
    MARGIN,
    MBPA,
    MIXTURE,
    NOVEL,
    OLD,
    RUN_SENSITIVITY,
    SENSITIVITY,
    WORDS,
    score_long_run,
    shorten,
)

STEADY = 5.0
"""Range in points of accuracy that counts as "almost at the same rate"."""
CATCHING_UP = 30.0
"""Epochs after which the paper's parametric model matches MbPA."""
ENOUGH_ENTRIES = 0.33
"""The paper's 400,000 entries, as a share of the images of an epoch."""
ENOUGH_NEIGHBOURS = 50


def _group_by_setting(
    evidence: Evidence, axis: str, method: str, subset: str, epochs: float
) -> dict[float, Measured]:
    """Return accuracies by what was varied: `capacity`, `k` or `lr`."""
    records = evidence.records(SENSITIVITY, "top1", method=method, subset=subset, epochs=epochs)
    values = sorted({float(r[axis] or 0) for r in records if r.get(axis) is not None})
    return {
        value: evidence.measure(
            SENSITIVITY, "top1", method=method, subset=subset, epochs=epochs, **{axis: value}
        )
        for value in values
    }


def _measure_range(values: dict[float, Measured]) -> float:
    means = [value.mean for value in values.values()]
    return max(means) - min(means)


def _any_rate(evidence: Evidence) -> Outcome:
    ranges = {
        method: [
            _measure_range(_group_by_setting(evidence, "lr", method, NOVEL, each))
            for each in EPOCHS
        ]
        for method in (MBPA, MIXTURE, LAYER)
    }
    told = ", ".join(f"{shorten(method)} {format_all(found)}" for method, found in ranges.items())
    rates = evidence.config(SENSITIVITY)["rates"]
    seen = f"range over rates of {min(rates):g} to {max(rates):g}, points: {told}, {IN_EPOCHS}"
    steady = all(each <= STEADY for each in ranges[MBPA])
    steadier = all(o < t for o, t in zip(ranges[MBPA], ranges[LAYER], strict=True))
    return decide([steady, steadier], seen)


def _catches_up(evidence: Evidence) -> Outcome:
    last = max(evidence.config(SENSITIVITY)["long"])
    checks, told = [], []
    for subset in (NOVEL, ALL):
        behind = [
            score_long_run(evidence, MBPA, subset, each)
            - score_long_run(evidence, LAYER, subset, each)
            for each in (CATCHING_UP, last)
        ]
        checks.append(behind[0].mean <= MARGIN)
        told.append(f"{WORDS[subset]} classes {behind[0].format()}, then {behind[1].format()}")
    seen = f"points by which the layer is behind after {CATCHING_UP:g} and {last:g} epochs: "
    return decide(checks, seen + "; ".join(told))


def _corrects_less(evidence: Evidence) -> Outcome:
    long = evidence.config(SENSITIVITY)["long"]
    names = {"change": "‖θˣ − θ‖", "divergence": "divergence", "other_answers": "changed answers"}
    checks, told = [], []
    for name, words in names.items():
        ratios = []
        for method, subset in itertools.product((MBPA, "MbPA (gradient)"), (NOVEL, OLD)):
            first, last = (
                evidence.measure(SENSITIVITY, name, method=method, subset=subset, epochs=each)
                for each in (min(long), max(long))
            )
            ratios.append((last / first).mean)
        checks += [ratio < 1 for ratio in ratios]
        told.append(f"{words} by {100 * (1 - max(ratios)):.0f} to {100 * (1 - min(ratios)):.0f}%")
    seen = f"from {min(long):g} to {max(long):g} epochs smaller: {', '.join(told)}"
    return decide(checks, seen)


def _sizes_matter_for_new(evidence: Evidence) -> Outcome:
    moments = EPOCHS[1:]
    new = [
        _measure_range(_group_by_setting(evidence, "capacity", MBPA, NOVEL, each))
        for each in moments
    ]
    old = [
        _measure_range(_group_by_setting(evidence, "capacity", MBPA, OLD, each)) for each in moments
    ]
    seen = (
        f"range over memory sizes: new classes {format_all(new)} points, "
        f"old {format_all(old)}, after 1 / 3 epochs"
    )
    return decide([n > o + MARGIN for n, o in zip(new, old, strict=True)], seen)


def _size_saturates(evidence: Evidence) -> Outcome:
    full = evidence.config(SENSITIVITY)["capacity"]
    thirds, bests = [], []
    for epochs in EPOCHS[1:]:
        by_size = _group_by_setting(evidence, "capacity", MBPA, NOVEL, epochs)
        third = max(size for size in by_size if size <= ENOUGH_ENTRIES * full)
        thirds.append(by_size[third])
        bests.append(max(by_size.values(), key=lambda each: each.mean))
    seen = (
        f"new classes: {format_all(thirds)}% with {third:,.0f} entries, {format_all(bests)}% at "
        "best, after 1 / 3 epochs"
    )
    pairs = zip(bests, thirds, strict=True)
    return decide([(best - some).mean <= MARGIN for best, some in pairs], seen)


def _more_neighbours(evidence: Evidence) -> Outcome:
    checks, told = [], []
    for epochs in EPOCHS:
        by_count = _group_by_setting(evidence, "k", MBPA, NOVEL, epochs)
        rising = [value for count, value in by_count.items() if count <= ENOUGH_NEIGHBOURS]
        checks.append(all(a.mean < b.mean for a, b in itertools.pairwise(rising)))
        told.append(f"{rising[0].format()} to {rising[-1].format()}%")
    seen = f"new classes, 1 to {ENOUGH_NEIGHBOURS} neighbours: {', '.join(told)}, {IN_EPOCHS}"
    return decide(checks, seen)


def _neighbours_saturate(evidence: Evidence) -> Outcome:
    checks, gains = [], []
    for epochs in EPOCHS:
        by_count = _group_by_setting(evidence, "k", MBPA, NOVEL, epochs)
        most = max(value.mean for count, value in by_count.items() if count > ENOUGH_NEIGHBOURS)
        gain = most - by_count[ENOUGH_NEIGHBOURS].mean
        checks.append(gain <= MARGIN)
        gains.append(format_number(gain, sign=True))
    seen = f"more than {ENOUGH_NEIGHBOURS} neighbours add {' / '.join(gains)} points, {IN_EPOCHS}"
    return decide(checks, seen)


CORRECTS_LESS = Claim(
    "2",
    "The correction diminishes as the parametric model gets better",
    "in the long run, its size and effect are smaller at the end than at the start, for both rules "
    "and for new and old classes",
    _corrects_less,
    (RUN_SENSITIVITY,),
)

CLAIMS = (
    Claim(
        "4.2",
        "After around 30 epochs the parametric model matches MbPA",
        f"it is at most {MARGIN:g} point behind on new and on all classes after 30 epochs",
        _catches_up,
        (RUN_SENSITIVITY,),
        (19, 21, 24),
    ),
    Claim(
        "A, figure 6, right",
        "MbPA performs well almost at the same rate whatever the learning rate of the parametric "
        "model",
        f"over all rates, its accuracy on new classes ranges over at most {STEADY:g} points, and "
        "over fewer than the parametric model's",
        _any_rate,
        (RUN_SENSITIVITY,),
        (22, 24),
    ),
    Claim(
        "A, figure 6, left",
        "New classes are more sensitive to the size of the memory than old ones",
        f"their accuracy ranges over at least {MARGIN:g} point more",
        _sizes_matter_for_new,
        (RUN_SENSITIVITY,),
        (24,),
    ),
    Claim(
        "A, figure 6, left",
        "Performance saturates after about 400,000 entries, a third of ImageNet",
        f"a memory of a third of an epoch's images is at most {MARGIN:g} point behind the best, on "
        "new classes",
        _size_saturates,
        (RUN_SENSITIVITY,),
        (23, 24),
    ),
    Claim(
        "A, figure 7",
        "More neighbours are better",
        "accuracy on new classes rises with each number of neighbours up to 50",
        _more_neighbours,
        (RUN_SENSITIVITY,),
        (24,),
    ),
    Claim(
        "A, figure 7",
        "Performance saturates quickly after 50 neighbours",
        f"more than 50 add at most {MARGIN:g} point on new classes, after 0.1, 1 and 3 epochs",
        _neighbours_saturate,
        (RUN_SENSITIVITY,),
        (23, 24),
    ),
)
