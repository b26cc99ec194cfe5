"""Report on new intents, built from the records alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from experiments.drawing import (
    Spread,
    curve,
    finish,
    legend_below,
    repetitions,
    sentence,
    told,
)
from experiments.intents.comparison import METHODS, PEERS
from experiments.intents.incremental import EMBEDDING, REPEATS
from experiments.results import Result, value_of
from experiments.sections import Figure, Section, Table

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

TITLES = {"clinc150": "CLINC150", "banking77": "Banking77"}
SUBSETS = {"novel": "new intents", "pre-trained": "old intents"}


class Scores:
    """Records of several splits, by corpus, method, name, subset, shots, batch and lessons."""

    FIELDS = ("corpus", "method", "name", "subset", "shots", "batch", "lessons")

    def __init__(self, results: Sequence[Result]) -> None:
        self.results = results
        self._values: dict[tuple[object, ...], list[float]] = {}
        for result in results:
            for record in result.metrics:
                key = tuple(record.get(name) for name in self.FIELDS)
                self._values.setdefault(key, []).append(value_of(record))

    def spread(self, corpus: str, method: str | None, name: str, **of: object) -> Spread | None:
        """Return a measurement over splits; `None` if it was not made. Measurements that belong to
        no method have the method `None`.
        """
        rest = (of.get(each) for each in self.FIELDS[3:])
        values = self._values.get((corpus, method, name, *rest))
        return Spread(tuple(values)) if values else None

    def all_of(self, field: str) -> list[object]:
        """Return the values of a field, in the order of the records."""
        place = self.FIELDS.index(field)
        return list(dict.fromkeys(key[place] for key in self._values if key[place] is not None))

    @property
    def corpora(self) -> list[str]:
        return [str(corpus) for corpus in self.all_of("corpus")]

    @property
    def methods(self) -> list[str]:
        return [str(method) for method in self.all_of("method")]

    @property
    def peers(self) -> list[str]:
        """Methods of other libraries."""
        return [method for method in self.methods if method in PEERS]

    @property
    def shots(self) -> list[int]:
        return sorted(int(str(count)) for count in self.all_of("shots"))

    @property
    def splits(self) -> str:
        return repetitions(len(self.results), "split")

    def missing(self, corpus: str, shots: int) -> str:
        """List the methods that were not run in all splits, if any, as the end of a note."""
        found = []
        for method in self.methods:
            spread = self.spread(corpus, method, "top1", subset="all", shots=shots)
            count = 0 if spread is None else len(spread.values)
            if count < len(self.results):
                found.append(f"{method}: {count} of {len(self.results)} splits")
        return f" {', '.join(found)}." if found else ""


def sections(results: Sequence[Result]) -> list[Section]:
    """Return the tables by corpus, the costs, and the figure."""
    scores = Scores(results)
    part = results[0].config["part"]
    text = [
        "A linear head over frozen sentence embeddings "
        f"(`{results[0].config['encoder']}`) knows two thirds of the intents. The others are "
        f"taught with a few examples each, and all are tested ({part} sentences). Each method has "
        "one setting for both corpora and any number of examples, chosen with another split, on "
        "validation sentences.",
        "`rows alone` puts the means of the taught examples into the head as rows of the new "
        "intents, and `MbPA (rows)` adapts that head per query; the other variants of MbPA start "
        "from rows of zeros. `MbPA (auto)` has no settings at all, `MbPA (auto step)` all except "
        "the step size. The optimum of a logistic regression on everything is what training could "
        "reach; if it is balanced, every intent has the same weight.",
    ]
    if scores.peers:
        text.append(_of_peers(results[0]))
    tables = []
    for corpus in scores.corpora:
        tables += [_accuracies(scores, corpus, count) for count in scores.shots]
        tables.append(_trust(scores, corpus))
    if scores.corpora[1:]:
        tables += [_compare_corpora(scores, count) for count in scores.shots]
    figure = Figure(
        "new-intents",
        "Accuracy on new and on old intents against the examples given of each new one; "
        f"{scores.splits}, band: one standard deviation.",
        lambda canvas: draw(canvas, scores),
        (11, 4.2 * len(scores.corpora) + 1.2),
    )
    figures = [figure] if scores.shots[1:] else []  # one number of examples gives no curve
    return [Section("New intents from a few examples", text, tables, figures)]


def _of_peers(result: Result) -> str:
    limits = result.config["setfit"]
    return (
        "`adaptive-classifier`, `semantic-router` and `SetFit` are those libraries, with the same "
        "encoder and at their defaults, except for the work and the head of SetFit: it gets "
        f"{limits['examples']} sentences of each known intent besides all new ones, and fine-tunes "
        f"the encoder for {limits['steps']} steps of 16 pairs"
        f"{'; its head is balanced' if limits['balanced'] else ''}. The confidence of the router "
        "is its score, a cosine; no threshold is set, since the AUROC covers all."
    )


def _accuracies(scores: Scores, corpus: str, shots: int) -> Table:
    """Return the accuracies on new, old and all intents."""
    subsets = ("novel", "pre-trained", "all")
    rows = [
        [
            method,
            *(
                told(scores.spread(corpus, method, "top1", subset=subset, shots=shots), 1)
                for subset in subsets
            ),
        ]
        for method in scores.methods
    ]
    each = "example" if shots == 1 else "examples"
    return Table(
        f"{TITLES.get(corpus, corpus)}, {shots} {each} of each new intent",
        ["method", "new", "old", "all"],
        rows,
        f"Top-1 accuracy in percent, {scores.splits}.{scores.missing(corpus, shots)}",
    )


def _compare_corpora(scores: Scores, shots: int) -> Table:
    """Return the accuracies on new and old intents of all corpora, side by side."""
    subsets = {"novel": "new", "pre-trained": "old", "all": "all"}
    columns = [(corpus, subset) for corpus in scores.corpora for subset in subsets]
    rows = []
    for method in scores.methods:
        spreads = [
            scores.spread(corpus, method, "top1", subset=subset, shots=shots)
            for corpus, subset in columns
        ]
        rows.append([method, *(told(spread, 1) for spread in spreads)])
    names = [f"{TITLES.get(corpus, corpus)}: {subsets[subset]}" for corpus, subset in columns]
    return Table(
        f"All corpora, {shots} {'example' if shots == 1 else 'examples'} of each new intent",
        ["method", *names],
        rows,
        f"Top-1 accuracy in percent, {scores.splits}.",
    )


def _trust(scores: Scores, corpus: str) -> Table:
    """Return calibration and scope at the second number of examples, and costs after the last."""
    shots, last = scores.shots[min(1, len(scores.shots) - 1)], scores.shots[-1]
    rows = []
    for method in scores.methods:
        error = scores.spread(corpus, method, "calibration_error", subset="all", shots=shots)
        scope = scores.spread(corpus, method, "out_of_scope_auroc", shots=shots)
        learn = scores.spread(corpus, method, "learn_seconds", shots=last)
        name = "predict_microseconds"
        one = scores.spread(corpus, method, name, shots=last, batch=1)
        many = scores.spread(corpus, method, name, shots=last, batch=256)
        rows.append(
            [
                method,
                told(error, 1),
                told(scope, 1),
                format_cost(learn, 1e3),
                format_cost(one),
                format_cost(many),
            ]
        )
    return Table(
        f"{TITLES.get(corpus, corpus)}, trust and cost",
        [
            "method",
            "calibration error",
            "out-of-scope AUROC",
            "ms to learn an example",
            "µs per prediction, alone",
            "µs, in batches of 256",
        ],
        rows,
        f"Calibration error (15 bins of equal mass) and AUROC of the confidence, in percent, at "
        f"{shots} examples. Costs after {last}, keys given, {name_machine(scores.results)}: the "
        "time from receiving one more example to an answer that uses it, and that of a prediction; "
        "the minimum over all splits. "
        f"{_embedding(scores, corpus)}{sentence(scores.splits)}.{scores.missing(corpus, last)}",
    )


def format_cost(spread: Spread | None, factor: float = 1.0) -> str:
    """Format the minimum over splits, since other load only adds time; two digits are enough."""
    if spread is None:
        return ""
    value = factor * min(spread.values)
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _embedding(scores: Scores, corpus: str) -> str:
    """Name the methods whose times include embedding, and say how much to subtract."""
    methods = [method for method in scores.peers if PEERS[method].embeds]
    alone, many = (scores.spread(corpus, None, EMBEDDING, batch=batch) for batch in REPEATS)
    if not methods or alone is None or many is None:
        return ""
    return (
        f"{' and '.join(methods)} embed sentences themselves, which takes our encoder "
        f"{format_cost(alone)} µs alone and {format_cost(many)} µs in batches. "
    )


def name_machine(results: Sequence[Result]) -> str:
    """Say on what the results were computed."""
    environment = results[0].environment
    return f"on {environment.get('device', 'unknown')} ({environment.get('cores', '?')} cores)"


def draw(canvas: matplotlib.figure.Figure, scores: Scores) -> None:
    """Draw one row of panels per corpus, one panel per subset."""
    panels = canvas.subplots(len(scores.corpora), len(SUBSETS), squeeze=False)
    for row, corpus in zip(panels, scores.corpora, strict=True):
        for panel, (subset, title) in zip(row, SUBSETS.items(), strict=True):
            for method in scores.methods:
                found = {
                    count: scores.spread(corpus, method, "top1", subset=subset, shots=count)
                    for count in scores.shots
                }
                points = {count: spread for count, spread in found.items() if spread is not None}
                color, style = _look(method)
                curve(panel, list(points), list(points.values()), color, method, style, marker="o")
            finish(
                panel,
                "examples of each new intent",
                title=f"{TITLES.get(corpus, corpus)}: {title}",
            )
            panel.set_xscale("log")
            panel.set_xticks(scores.shots, [str(count) for count in scores.shots])
            panel.minorticks_off()
        row[0].set_ylabel("top-1 accuracy (%)")
        _keep_readable(row[1])
    legend_below(canvas, panels[0][0], columns=4)


def _keep_readable(panel: matplotlib.axes.Axes) -> None:
    """Limit the axis, so that a method that forgets everything does not flatten the others."""
    low, high = panel.get_ylim()
    panel.set_ylim(max(low, high - 25), high)


def _look(method: str) -> tuple[str, str]:
    """Return colour and line style; grey for a method that no longer exists."""
    known = METHODS.get(method) or PEERS.get(method)
    return ("#8c8c8c", "-") if known is None else (known.color, known.style)
