"""Report on the few-shot learner in all situations, built from the records alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from experiments.drawing import Spread, curve, finish, legend_below, sentence, told
from experiments.intents.comparison import METHODS
from experiments.intents.figures import Scores, format_cost, name_machine
from experiments.intents.incremental import ANSWERED_SHARE
from experiments.results import Result
from experiments.sections import Figure, Section, Table
from experiments.teaching.situations import SITUATIONS

if TYPE_CHECKING:
    import matplotlib.figure

OURS = ("MbPA (taught)", "MbPA (taught, free)")
CLOSE_POINTS = 0.5  # within this of the best is as good
SUBSETS = {"novel": "new", "pre-trained": "old", "all": "all"}


def sections(results: Sequence[Result]) -> list[Section]:
    """Return the tables of all situations, and the figure of labels that come one by one."""
    scores = Scores(results)
    about = "; ".join(
        f"*{SITUATIONS[name].title}*: {SITUATIONS[name].about}"
        for name in scores.corpora
        if name in SITUATIONS
    )
    text = [
        "Some labels are known, and a head was trained on them. Others are taught with a few "
        "examples each, and all are tested. All methods have the settings of the experiment on new "
        f"intents, in every situation. {about}.",
    ]
    tables = [_compare_situations(scores, count) for count in scores.shots]
    tables += [_list_defeats(scores), _compare_abstention(scores)]
    for situation in scores.corpora:
        tables += [_describe(scores, situation, count) for count in scores.shots]
    tables += [_costs(scores, situation) for situation in scores.corpora]
    figures = [
        Figure(
            f"teaching-lessons-{situation}",
            f"{_title(situation)}: accuracy while new labels come one after another, "
            f"{results[0].config['lesson_examples']} examples each; {scores.splits}, "
            "band: one standard deviation.",
            partial(_draw_lessons, scores=scores, situation=situation),
            (11, 4.6),
        )
        for situation in scores.corpora
        if len(_find_lessons(scores, situation)) > 1
    ]
    return [Section("The few-shot learner in new situations", text, tables, figures)]


def _title(situation: str) -> str:
    found = SITUATIONS.get(situation)
    return situation if found is None else found.title


def _examples(count: int) -> str:
    return f"{count} {'example' if count == 1 else 'examples'} of each new label"


def _measure(scores: Scores, situation: str, method: str, shots: int) -> Spread | None:
    """Return the accuracy over all labels."""
    return scores.spread(situation, method, "top1", subset="all", shots=shots)


def _compare_situations(scores: Scores, shots: int) -> Table:
    rows = [
        [method, *(told(_measure(scores, each, method, shots), 1) for each in scores.corpora)]
        for method in scores.methods
    ]
    return Table(
        f"All situations, {_examples(shots)}",
        ["method", *map(_title, scores.corpora)],
        rows,
        f"Top-1 accuracy over all labels in percent, {scores.splits}.",
    )


def _list_defeats(scores: Scores) -> Table:
    """List where the default one of our two is neither first nor close to the first."""
    rows = []
    for situation in scores.corpora:
        for shots in scores.shots:
            means = {
                method: spread.mean
                for method in scores.methods
                if (spread := _measure(scores, situation, method, shots)) is not None
            }
            ours = [means.pop(method, None) for method in OURS]
            best = max(means, key=means.__getitem__, default="")
            if ours[0] is not None and best and means[best] > ours[0] + CLOSE_POINTS:
                rows.append(
                    [
                        _title(situation),
                        str(shots),
                        best,
                        f"{means[best]:.1f}",
                        *("" if mean is None else f"{mean:.1f}" for mean in ours),
                    ]
                )
    return Table(
        "Where another method is ahead",
        ["situation", "examples", "best other", "its accuracy", *OURS],
        rows,
        f"All cases in which another method leads {OURS[0]} by more than {CLOSE_POINTS} points "
        f"over all labels, of {len(scores.corpora) * len(scores.shots)}.",
    )


def _compare_abstention(scores: Scores) -> Table:
    """Return what is answered with the threshold for a share of out-of-scope queries."""
    rows = [
        [_title(situation), *(_tell_answered(scores, situation, count) for count in scores.shots)]
        for situation in scores.corpora
    ]
    return Table(
        "Abstention",
        [
            "situation",
            *(f"{count} {'example' if count == 1 else 'examples'}" for count in scores.shots),
        ],
        [row for row in rows if any(row[1:])],
        f"{OURS[0]} with the threshold for at most {ANSWERED_SHARE:.0%} of out-of-scope queries "
        "answered: the share of them that is, and of all others, in percent; "
        f"{scores.splits}.",
    )


def _tell_answered(scores: Scores, situation: str, shots: int) -> str:
    outside, inside = (
        scores.spread(situation, OURS[0], name, shots=shots)
        for name in ("answered_out_of_scope", "answered")
    )
    return f"{outside.mean:.1f} and {inside.mean:.1f}" if outside and inside else ""


def _describe(scores: Scores, situation: str, shots: int) -> Table:
    """Return accuracies on new, old and all labels, calibration and scope."""
    rows = []
    for method in scores.methods:
        found = [
            scores.spread(situation, method, "top1", subset=subset, shots=shots)
            for subset in SUBSETS
        ]
        found.append(
            scores.spread(situation, method, "calibration_error", subset="all", shots=shots)
        )
        found.append(scores.spread(situation, method, "out_of_scope_auroc", shots=shots))
        rows.append([method, *(told(spread, 1) for spread in found)])
    return Table(
        f"{_title(situation)}, {_examples(shots)}",
        ["method", *SUBSETS.values(), "calibration error", "out-of-scope AUROC"],
        rows,
        f"Top-1 accuracy, calibration error (15 bins of equal mass) and AUROC in percent, "
        f"{scores.splits}.",
    )


def _costs(scores: Scores, situation: str) -> Table:
    last, predict = scores.shots[-1], "predict_microseconds"
    rows = [
        [
            method,
            format_cost(scores.spread(situation, method, "learn_seconds", shots=last), 1e3),
            format_cost(scores.spread(situation, method, predict, shots=last, batch=1)),
            format_cost(scores.spread(situation, method, predict, shots=last, batch=256)),
        ]
        for method in scores.methods
    ]
    return Table(
        f"{_title(situation)}, costs",
        [
            "method",
            "ms to learn an example",
            "µs per prediction, alone",
            "µs, in batches of 256",
        ],
        rows,
        f"After {last} examples, keys given, {name_machine(scores.results)}: the time from "
        "receiving one more example to an answer that uses it, and that of a prediction; the "
        "minimum over all splits.",
    )


def _find_lessons(scores: Scores, situation: str) -> list[int]:
    counts = sorted(int(str(count)) for count in scores.all_of("lessons"))
    return [count for count in counts if _has_lesson(scores, situation, count)]


def _has_lesson(scores: Scores, situation: str, lessons: int) -> bool:
    return any(
        scores.spread(situation, method, "top1", subset="all", lessons=lessons)
        for method in scores.methods
    )


def _draw_lessons(canvas: matplotlib.figure.Figure, scores: Scores, situation: str) -> None:
    """Draw the accuracy on new, old and all labels so far, against the number of lessons."""
    panels = canvas.subplots(1, len(SUBSETS))
    counts = _find_lessons(scores, situation)
    for panel, (subset, title) in zip(panels, SUBSETS.items(), strict=True):
        for method in scores.methods:
            found = {
                count: scores.spread(situation, method, "top1", subset=subset, lessons=count)
                for count in counts
            }
            points = {count: spread for count, spread in found.items() if spread is not None}
            if method == "parametric" and subset != "pre-trained":
                continue  # it cannot learn
            look = METHODS[method]
            curve(panel, list(points), list(points.values()), look.color, method, look.style)
        finish(panel, "new labels taught so far", title=sentence(f"{title} labels"))
    panels[0].set_ylabel("top-1 accuracy (%)")
    legend_below(canvas, panels[1], columns=4)
