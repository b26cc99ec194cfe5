"""Report on the sensitivities and the long run, built from the records alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from math import nan
from typing import TYPE_CHECKING

from experiments.drawing import Spread, curve, finish, legend_below, sentence, told
from experiments.images.figures import (
    SUBSETS,
    Scores,
    color_of,
    data_in_words,
    draw_curves,
    find_lead,
    in_epochs,
    square_root,
    unzipped,
)
from experiments.results import Result
from experiments.sections import Figure, Section, Table

if TYPE_CHECKING:
    import matplotlib.figure
    from matplotlib.axes import Axes

DRAWN_RATES = ("parametric", "mixture", "MbPA (RMSprop)")
"""Methods drawn, as in the paper; the table has all methods."""
ENOUGH = 0.5  # points of accuracy, a negligible difference
CORRECTIONS = {
    "change": "change of the layer",
    "divergence": "divergence",
    "other_answers": "other answers, %",
}
STYLES = {"novel": "-", "pre-trained": "--"}


def sensitivity_sections(results: Sequence[Result]) -> list[Section]:
    """Return the figures of the appendix, and when the parametric model catches up."""
    scores = Scores(results)
    return [_capacities(scores), _counts(scores), _rates(scores), _long_run(scores)]


# Size of the memory, number of neighbours


def _capacities(scores: Scores) -> Section:
    return Section(
        title="Size of the memory",
        text=(
            "A memory of n entries holds the last n images of the stream. In the paper, accuracy "
            "saturates after 400,000 entries, a third of ImageNet. " + data_in_words(scores.config),
        ),
        tables=[_enough(scores, "capacity", "entries")],
        figures=[
            Figure(
                "image-memory-size",
                "Appendix, figure on memory size: top-1 accuracy against the entries of the "
                f"memory, after some epochs (rows); {scores.splits}. Dotted: the parametric model.",
                lambda canvas: _draw_varied(canvas, scores, "capacity", "entries of the memory"),
                _size(scores),
            )
        ],
    )


def _counts(scores: Scores) -> Section:
    return Section(
        title="Number of neighbours",
        text=(
            "All other settings stay as they were chosen. In the paper, more are better, up "
            "to about 50.",
        ),
        tables=[_enough(scores, "k", "neighbours")],
        figures=[
            Figure(
                "image-neighbours",
                "Appendix, figure on neighbours: top-1 accuracy against the number of neighbours, "
                f"after some epochs (rows); {scores.splits}. Dotted: the parametric model.",
                lambda canvas: _draw_varied(canvas, scores, "k", "neighbours"),
                _size(scores),
            )
        ],
    )


def _size(scores: Scores) -> tuple[float, float]:
    return 11, 1.1 + 2.8 * len(scores.config["at"])


def _draw_varied(canvas: matplotlib.figure.Figure, scores: Scores, axis: str, across: str) -> None:
    moments = list(scores.config["at"])
    grid = canvas.subplots(len(moments), len(SUBSETS), squeeze=False)
    for row, epochs in zip(grid, moments, strict=True):
        for panel, (subset, title) in zip(row, SUBSETS.items(), strict=True):
            if layer := _of_layer(scores, subset, epochs):
                color = color_of("parametric")
                panel.axhline(
                    layer.mean, color=color, linestyle=":", linewidth=1.8, label="parametric"
                )
                low, high = layer.mean - layer.deviation, layer.mean + layer.deviation
                panel.axhspan(low, high, color=color, alpha=0.15, linewidth=0)
            places: set[float] = set()
            for method in scores.methods:
                points = scores.across(axis, "top1", method, subset, epochs=epochs)
                if points and method != "parametric":
                    curve(panel, *unzipped(points), color_of(method), method, marker="o")
                    places |= set(points)
            finish(panel, "", title=f"{title}, {in_epochs(epochs)}")
            log_ticks(panel, sorted(places))
        row[0].set_ylabel("top-1 accuracy (%)")
    for panel in grid[-1]:
        panel.set_xlabel(across)
    legend_below(canvas, grid[0][0])


def log_ticks(panel: Axes, places: Sequence[float]) -> None:
    """Put ticks where measurements were made, with numbers where there is room for them."""
    room = (math.log(places[-1]) - math.log(places[0])) / 9
    words, last = [], -math.inf
    for place in places:
        has_room = math.log(place) - last >= room
        words.append(_thousands(place) if has_room else "")
        last = math.log(place) if has_room else last
    panel.set_xscale("log")
    panel.set_xticks(places, words, fontsize=8)
    panel.set_xticks([], minor=True)


def _thousands(count: float) -> str:
    return f"{count:g}" if count < 1000 else f"{count / 1000:.3g}k"


def _of_layer(scores: Scores, subset: str, epochs: float) -> Spread | None:
    """Return the parametric model's accuracy, which does not depend on the size of the memory."""
    found = scores.across("capacity", "top1", "parametric", subset, epochs=epochs)
    return next(iter(found.values()), None)


def _enough(scores: Scores, axis: str, what: str) -> Table:
    """Return a table of how many are enough to be as good as the best, per method."""
    rows = []
    for epochs in scores.config["at"]:
        for method in scores.methods:
            cells = []
            for subset in SUBSETS:
                points = scores.across(axis, "top1", method, subset, epochs=epochs)
                cells += _saturation(points)
            if method != "parametric":
                rows.append([f"{epochs:g}", method, *cells])
    columns = [f"{word}, {subset}" for subset in SUBSETS.values() for word in ("enough", "best")]
    return Table(
        f"How many {what} are enough",
        ["epochs", "method", *columns],
        rows,
        f"Enough: the smallest number of {what} that comes within {ENOUGH} points of the best. "
        "Best: the top-1 accuracy of the best number. "
        f"{sentence(scores.splits)}.",
    )


def _saturation(points: Mapping[float, Spread]) -> list[str]:
    if not points:
        return ["", ""]
    best = max(points.values(), key=lambda spread: spread.mean)
    enough = min(value for value, spread in points.items() if spread.mean >= best.mean - ENOUGH)
    return [f"{enough:,.0f}", told(best, 1)]


# The rate of the last layer


def _rates(scores: Scores) -> Section:
    spans = [span for span in (0.1, 1.0, 3.0) if span in scores.config["points"]]
    spans = spans or list(scores.config["points"])[-1:]
    rows = []
    for method in scores.methods:
        for lr in scores.config["rates"]:
            spreads = [
                scores.spread("top1", method, subset, span, lr=lr)
                for subset in ("novel", "all")
                for span in spans
            ]
            if any(spreads):
                rows.append([method, f"{lr:g}", *(told(spread, 1) for spread in spreads)])
    columns = [f"{word} at {span:g}" for word in ("new", "all") for span in spans]
    drawn = ", ".join(DRAWN_RATES)
    return Section(
        title="Learning rate of the last layer",
        text=(
            "In the paper, MbPA learns new classes almost equally fast whatever the rate of the "
            "parametric model. Rates are divided by the mean square of a key's length.",
        ),
        tables=[
            Table(
                "Top-1 by rate and epochs, percent",
                ["method", "rate", *columns],
                rows,
                f"{sentence(scores.splits)}.",
            )
        ],
        figures=[
            Figure(
                "image-learning-rate",
                f"Appendix, figure on the learning rate: {drawn}. Thicker lines: higher rates of "
                f"the parametric model; {scores.splits}.",
                lambda canvas: _draw_rates(canvas, scores),
                (11, 4.8),
            )
        ],
    )


def _draw_rates(canvas: matplotlib.figure.Figure, scores: Scores) -> None:
    from matplotlib.lines import Line2D

    panels = canvas.subplots(1, len(SUBSETS))
    rates = sorted(scores.config["rates"])
    widths = {lr: 0.7 + 3.0 * place / max(1, len(rates) - 1) for place, lr in enumerate(rates)}
    methods = [method for method in DRAWN_RATES if method in scores.methods]
    for panel, (subset, title) in zip(panels, SUBSETS.items(), strict=True):
        for method in methods:
            for lr in rates:
                points = scores.across("epochs", "top1", method, subset, lr=lr)
                curve(panel, *unzipped(points), color_of(method), "", width=widths[lr])
        finish(panel, "epochs of all classes", title=title)
        square_root(panel)
    panels[0].set_ylabel("top-1 accuracy (%)")
    lines = [Line2D([], [], color=color_of(m), label=m, linewidth=2) for m in methods]
    lines += [
        Line2D([], [], color="#555555", linewidth=widths[lr], label=f"rate {lr:g}") for lr in rates
    ]
    canvas.legend(handles=lines, loc="outside lower center", ncols=5, fontsize=9, frameon=False)


# The long run


def _long_run(scores: Scores) -> Section:
    last = max(scores.config["long"])
    return Section(
        title="The long run",
        text=(
            "In the paper, the parametric model matches MbPA after around 30 epochs. As it catches "
            "up there should be less to correct: below, how far an adaptation moves the layer, how "
            "far the prediction, and how many answers it changes.",
        ),
        tables=[_caught_up(scores, last), _corrections(scores)],
        figures=[
            Figure(
                "image-long-run",
                f"Top-1 accuracy up to {last:g} epochs; {scores.splits}. Epochs are drawn as their "
                "square root.",
                lambda canvas: draw_curves(canvas, scores),
                (11, 4.8),
            ),
            Figure(
                "image-corrections",
                "The correction during the long run: the lead over the parametric model in top-1, "
                "the mean size of the change of the layer, the mean divergence of the "
                "adapted prediction from that of the layer it adapts, and the share of answers "
                f"that the adaptation changes; {scores.splits}.",
                lambda canvas: _draw_corrections(canvas, scores),
                (11, 7.2),
            ),
        ],
    )


def _caught_up(scores: Scores, last: float) -> Table:
    rows = []
    for method in scores.methods:
        if method != "parametric":
            cells = [_when(scores, method, subset, last) for subset in SUBSETS]
            rows.append([method, *cells])
    return Table(
        "Epochs after which the parametric model is as good, and stays so",
        ["method", *SUBSETS.values()],
        rows,
        f"Among the points that were tested, by the means of {len(scores.results)} "
        f"{'splits' if scores.results[1:] else 'split'}. In the paper about 30, for MbPA.",
    )


def _when(scores: Scores, method: str, subset: str, last: float) -> str:
    lead = find_lead(scores, method, subset)
    for epochs in lead:
        if all(later.mean <= 0 for at, later in lead.items() if at >= epochs):
            return f"{epochs:g}"
    return f"not within {last:g}"


def _adapting(scores: Scores) -> list[str]:
    return [m for m in scores.methods if scores.across("epochs", "change", m, "all")]


def _corrections(scores: Scores) -> Table:
    points = sorted(scores.config["long"])
    rows = []
    for method in _adapting(scores):
        for name, words in CORRECTIONS.items():
            for subset in ("novel", "pre-trained"):
                of = scores.across("epochs", name, method, subset)
                first, last = of[points[0]], of[points[-1]]
                pairs = zip(first.values, last.values, strict=True)
                ratio = Spread(tuple(after / before for before, after in pairs if before) or (nan,))
                cells = [_significant(first), _significant(last), ratio.told(2)]
                rows.append([method, words, SUBSETS[subset], *cells])
    return Table(
        "Does the correction shrink?",
        ["method", "", "", *(f"after {point:g}" for point in (points[0], points[-1])), "ratio"],
        rows,
        "‖θˣ − θ‖, and KL(adapted ‖ layer) in nats, each averaged over "
        f"{scores.config['explained']:,} images; how many answers the adaptation changes. "
        f"{sentence(scores.splits)}.",
    )


def _significant(spread: Spread) -> str:
    """Format with three significant digits, and the deviation with as many decimal places."""
    size = math.floor(math.log10(abs(spread.mean))) if spread.mean else 0
    return spread.told(max(0, 2 - size))


def _draw_corrections(canvas: matplotlib.figure.Figure, scores: Scores) -> None:
    lead, *panels = canvas.subplots(2, 2).flatten()
    measured = dict(zip(CORRECTIONS, panels, strict=True))
    for method in _adapting(scores):
        for subset, style in STYLES.items():
            label, color = f"{method}, {SUBSETS[subset]}", color_of(method)
            points = find_lead(scores, method, subset)
            curve(lead, *unzipped(points), color, label, style, marker="o")
            for name, panel in measured.items():
                points = scores.across("epochs", name, method, subset)
                curve(panel, *unzipped(points), color, label, style, marker="o")
    lead.axhline(0, color="#555555", linewidth=0.8)
    titles = [
        "lead over the parametric model (points)",
        "change of the layer, ‖θˣ − θ‖",
        "divergence from the parametric model (nats)",
        "answers that are changed (%)",
    ]
    for panel, title in zip((lead, *panels), titles, strict=True):
        finish(panel, "", title=title)
        square_root(panel)
        if panel is not lead:
            panel.set_ylim(bottom=0)
    for panel in panels[1:]:
        panel.set_xlabel("epochs of all classes")
    legend_below(canvas, lead, 4)
