"""Report on permuted MNIST, built from its records alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from experiments.drawing import Spread, curve, finish, repetitions, sentence, told
from experiments.results import Result, value_of
from experiments.sections import Figure, Section, Table

if TYPE_CHECKING:
    import matplotlib.figure
    from matplotlib.axes import Axes

COLORS = {
    "MLP": "#8c8c8c",
    "EWC": "#4d4d4d",
    "replay": "#35978f",
    "DER++": "#01665e",
    "A-GEM": "#bf812d",
    "kernel vote": "#e08214",
    "random memories": "#c7a8d6",
    "MbPA": "#b2182b",
    "MbPA + EWC": "#e06a5a",
    "MbPA + replay": "#762a83",
    "MbPA + DER++": "#2166ac",
    "MbPA + DER++ (logits)": "#67a9cf",
    "MbPA + DER++ (shortcut)": "#1a9850",
}
SHADES = ("#f4a582", "#e5735c", "#c8303a", "#8e0f26")
"""Colours of MbPA, by memory size."""
REHEARSING = ("replay", "DER++", "A-GEM")
ON_MEMORY = ("kernel vote", "random memories", "MbPA")
ON_DER = ("MbPA + DER++", "MbPA + DER++ (logits)", "MbPA + DER++ (shortcut)")
COMBINED = ("MbPA + EWC", "MbPA + replay", *ON_DER)
SIZED = (*REHEARSING, *ON_MEMORY, *COMBINED)
ERRORS = (4, 5, 6, 8, 10, 15, 20, 30, 50)
"""Ticks of the axis of errors, in percent."""
TASKS = "tasks seen"
FLOAT_BYTES = 4
PIXEL_BYTES = 1  # as published; the label takes another


class Scores:
    """Records of several seeds, by name, stream, method, memory size and tasks seen."""

    def __init__(self, results: Sequence[Result]) -> None:
        self.results, self.config = results, results[0].config
        self._values: dict[tuple[object, ...], list[float]] = {}
        for result in results:
            for record in result.metrics:
                if record["name"] in ("mean_accuracy", "microseconds_per_prediction"):
                    names = ("name", "stream", "method", "memory_per_task", "tasks_seen")
                    key = tuple(record[name] for name in names)
                    self._values.setdefault(key, []).append(value_of(record))

    @property
    def sizes(self) -> list[int]:
        return sorted(self.config["memory_per_task"])

    @property
    def tasks(self) -> int:
        return int(self.config["tasks"])

    def accuracy(
        self,
        method: str,
        size: int | None = None,
        tasks: int | None = None,
        stream: str = "sequence",
    ) -> Spread | None:
        """Return the accuracy in percent after this many tasks (by default all); `None` if not
        measured.
        """
        key = "mean_accuracy", stream, method, size, tasks or self.tasks
        if key not in self._values:
            return None
        return Spread(tuple(100 * value for value in self._values[key]))

    def microseconds(self, method: str, size: int | None = None) -> Spread | None:
        """Return the time per prediction, after all tasks."""
        key = "microseconds_per_prediction", "sequence", method, size, self.tasks
        return Spread(tuple(self._values[key])) if key in self._values else None

    def at_sizes(self, method: str) -> list[Spread | None]:
        return [self.accuracy(method, size) for size in self.sizes]

    def has(self, method: str) -> bool:
        return (
            self.accuracy(method, None if method in ("MLP", "EWC") else self.sizes[0]) is not None
        )

    @property
    def seeds(self) -> str:
        return repetitions(len(self.results), "seed")


def sections(results: Sequence[Result]) -> list[Section]:
    """Return figure 3 of the paper and what it omits: other methods, cost, memory, streams."""
    scores = Scores(results)
    text = (
        f"{scores.tasks} tasks of {scores.config['examples']:,} examples each, one after the "
        "other; every task is MNIST with its own permutation of the pixels. After each task the "
        "methods are tested on all tasks so far. Methods with a memory store the same examples of "
        "the stream, n per task; only EWC is told where a task ends.",
    )
    sequence = Section(
        title="Tasks in sequence",
        text=text,
        tables=[_final(scores), _claims(scores), *_gains_on_der(scores)],
        figures=[
            Figure("permuted-mnist-left", _left_caption(scores), _drawing(scores, _draw_left)),
            Figure("permuted-mnist-right", _right_caption(scores), _drawing(scores, _draw_right)),
            Figure("permuted-mnist-sizes", _sizes_caption(scores), _drawing(scores, _draw_sizes)),
        ],
    )
    storage = Section(
        title="What is stored",
        text=(
            "EWC as published keeps the parameters and a Fisher value of each for every task. The "
            "sum of its penalties is a parabola again, so two numbers per parameter suffice, "
            "however many tasks there are; that is what ours keeps.",
        ),
        tables=[_bytes(scores)],
    )
    parts = [sequence, storage]
    if scores.accuracy("MLP", stream="switching") is not None:
        parts.append(_switching(scores))
    return parts


def sections_on_der(results: Sequence[Result]) -> list[Section]:
    """Return what MbPA adds to networks trained by DER++."""
    scores = Scores(results)
    text = (
        f"The same {scores.tasks} tasks. Networks are trained by DER++, which replays stored "
        "examples and the logits of their time. MbPA adapts them to the same examples and logits, "
        "and stores nothing more.",
    )
    rows = [
        [method, *(told(spread, 2) for spread in scores.at_sizes(method))]
        for method in ("DER++", *ON_DER)
        if scores.has(method)
    ]
    accuracy = Table(
        "MbPA on networks trained by DER++, percent",
        ["method", *(f"n = {size:,}" for size in scores.sizes)],
        rows,
        f"Accuracy on all {scores.tasks} tasks after the last; {scores.seeds}, "
        f"{scores.config['test_images']:,} test images per task.",
    )
    return [Section("MbPA on top of DER++", text, [accuracy, *_gains_on_der(scores)])]


# Tables


def _final(scores: Scores) -> Table:
    """Return the accuracies after the last task, one row per method."""
    rows = [
        [method, *([spread.told(2)] * len(scores.sizes))]
        for method in ("MLP", "EWC")
        if (spread := scores.accuracy(method)) is not None
    ]
    rows += [
        [method, *(told(spread, 2) for spread in scores.at_sizes(method))]
        for method in SIZED
        if scores.has(method)
    ]
    return Table(
        f"Accuracy on all {scores.tasks} tasks after the last, percent",
        ["method", *(f"n = {size:,}" for size in scores.sizes)],
        rows,
        f"{sentence(scores.seeds)}, {scores.config['test_images']:,} test "
        "images per task. MLP and EWC store no examples. The paper shows this as a figure without "
        "numbers.",
    )


def _claims(scores: Scores) -> Table:
    """Compare the paper's claims with the results."""
    plain, ewc = scores.accuracy("MLP"), scores.accuracy("EWC")
    ours = [spread for spread in scores.at_sizes("MbPA") if spread]
    both = [spread for spread in scores.at_sizes("MbPA + EWC") if spread]
    chance = [spread for spread in scores.at_sizes("random memories") if spread]
    assert plain
    assert ewc
    sizes = scores.sizes

    def join_means(spreads: Sequence[Spread]) -> str:
        return " / ".join(f"{spread.mean:.1f}" for spread in spreads)

    beats = [n for n, spread in zip(sizes, ours, strict=True) if spread.mean > ewc.mean]
    larger = [n for n in sizes if n > 100]
    grows = all(a.mean < b.mean for a, b in itertools.pairwise(ours))
    adds = [
        n
        for n, joint, alone in zip(sizes, both, ours, strict=True)
        if joint.mean >= max(alone.mean, ewc.mean)
    ]
    told = " / ".join(f"{n:,}" for n in sizes)
    rows = [
        [
            "MbPA beats the MLP",
            _verdict(all(spread.mean > plain.mean for spread in ours)),
            f"{join_means(ours)} against {join_means([plain])}",
        ],
        [
            "MbPA beats EWC for n > 100",
            (_verdict(all(n in beats for n in larger)) if larger else "no such n")
            + (", at 100 too" if 100 in beats else ""),
            f"{join_means(ours)} against {join_means([ewc])}",
        ],
        ["it grows with n", _verdict(grows) if ours[1:] else "one n", join_means(ours)],
        [
            "memories at random are far worse (by 5 points)",
            _verdict(all(a.mean < b.mean - 5 for a, b in zip(chance, ours, strict=True))),
            f"{join_means(chance)} against {join_means(ours)}",
        ],
        [
            "MbPA + EWC is at least as good as either",
            _verdict(adds == sizes)
            + (
                f": at {' and '.join(f'{n:,}' for n in adds)} only"
                if 0 < len(adds) < len(sizes)
                else ""
            ),
            f"{join_means(both)}; alone {join_means(ours)} and {join_means([ewc])}",
        ],
    ]
    note = "Means are compared; how far seeds differ is in the table above."
    return Table("The paper's claims", ["claim", "here", f"percent, n = {told}"], rows, note)


def _gains_on_der(scores: Scores) -> list[Table]:
    """Compare MbPA with DER++, seed by seed: both have the same network and the same examples."""
    rows = []
    for method in ON_DER:
        if not (scores.has("DER++") and scores.has(method)):
            continue
        cells = [method]
        for ours, theirs in zip(scores.at_sizes(method), scores.at_sizes("DER++"), strict=True):
            assert ours
            assert theirs
            pairs = zip(ours.values, theirs.values, strict=True)
            gain = Spread(tuple(a - b for a, b in pairs))
            least = f", least {min(gain.values):+.2f}" if gain.values[1:] else ""
            cells.append(f"{gain.mean:+.2f} ± {gain.deviation:.2f}{least}")
        rows.append(cells)
    note = (
        "Differences of the same seed: the same network, trained by DER++, and the same stored "
        f"examples; {scores.seeds}, and the smallest of them."
    )
    columns = ["method", *(f"n = {size:,}" for size in scores.sizes)]
    return [Table("MbPA on DER++ minus DER++ alone, points", columns, rows, note)] if rows else []


def _verdict(holds: bool) -> str:
    return "yes" if holds else "no"


def _bytes(scores: Scores) -> Table:
    """Return the bytes that each method stores besides the network."""
    hidden = int(scores.config["hidden"])
    parameters = 784 * hidden + hidden + hidden * hidden + hidden + hidden * 10 + 10
    network = FLOAT_BYTES * parameters
    rows = [
        ["the network itself", _megabytes(network)],
        [
            "EWC as published, parameters and Fisher of every task",
            _megabytes(2 * scores.tasks * network),
        ],
        ["EWC as here", _megabytes(2 * network)],
    ]
    for size in scores.sizes:
        entries = scores.tasks * size
        stored = f"MbPA, kernel vote, replay, A-GEM, n = {size:,}"
        rows.append([stored, _megabytes(entries * (784 * PIXEL_BYTES + 1))])
    rows.append(
        [
            f"DER++, n = {scores.sizes[-1]:,}, with logits",
            _megabytes(
                scores.tasks * scores.sizes[-1] * (784 * PIXEL_BYTES + 1 + 10 * FLOAT_BYTES)
            ),
        ]
    )
    return Table(
        f"Bytes kept after {scores.tasks} tasks",
        ["", "megabytes"],
        rows,
        "Images take one byte per pixel, as published; in float32, in which they are searched, "
        "they take four times as much while in use.",
    )


def _megabytes(count: float) -> str:
    return f"{count / 1e6:.1f}"


def _switching(scores: Scores) -> Section:
    """Return the results on the stream without known task boundaries."""
    methods = ["MLP", "EWC", "EWC, told every switch"]
    rows = [
        [method, *([spread.told(2)] * len(scores.sizes))]
        for method in methods
        if (spread := scores.accuracy(method, stream="switching")) is not None
    ]
    for method in SIZED:
        spreads = [scores.accuracy(method, size, stream="switching") for size in scores.sizes]
        if any(spreads):
            rows.append([method, *(told(spread, 2) for spread in spreads)])
    every, examples = scores.config["switch_every"], scores.config["examples"]
    return Section(
        title=f"A stream that changes its task every {every} examples",
        text=(
            f"The same examples in another order: in every round, each task has {every} of them. "
            "MbPA works as before. EWC has to know when a task ends: it assumes an end every "
            f"{examples:,} examples, or is told of every change.",
        ),
        tables=[
            Table(
                f"Accuracy on all {scores.tasks} tasks at the end, percent",
                ["method", *(f"n = {size:,}" for size in scores.sizes)],
                rows,
                f"{sentence(scores.seeds)}. Settings are those chosen for the tasks in sequence.",
            )
        ],
    )


# Figures


def _drawing(
    scores: Scores, draw: Callable[[matplotlib.figure.Figure, Scores], None]
) -> Callable[[matplotlib.figure.Figure], None]:
    return lambda canvas: draw(canvas, scores)


def _left_caption(scores: Scores) -> str:
    return (
        "Figure 3, left: mean accuracy on the tasks seen so far. MbPA on the plain MLP with "
        f"memories of n examples per task, and the baselines; {scores.seeds}."
    )


def _right_caption(scores: Scores) -> str:
    return (
        "Figure 3, right: MbPA on a network that EWC has trained, and either alone; "
        f"{scores.seeds}."
    )


def _sizes_caption(scores: Scores) -> str:
    return (
        "Left: error after the last task against the examples stored per task, all methods. Right: "
        "the same against the cost of a prediction, including retrieval, on the device of the run; "
        f"one point per memory size, larger points for larger memories; {scores.seeds}."
    )


def _draw_left(canvas: matplotlib.figure.Figure, scores: Scores) -> None:
    panel = canvas.subplots()
    middle = scores.sizes[len(scores.sizes) // 2]
    for method in ("MLP", "EWC"):
        _curve(panel, scores, method, None, method, COLORS[method])
    for method in (*REHEARSING, "random memories"):
        if scores.has(method):
            label = f"{method}, n = {middle:,}"
            _curve(panel, scores, method, middle, label, COLORS[method], "--")
    for place, size in enumerate(reversed(scores.sizes)):
        shade = SHADES[max(0, len(SHADES) - 1 - place)]
        _curve(panel, scores, "MbPA", size, f"MbPA, n = {size:,}", shade, width=2.2)
    _finish(panel, TASKS)


def _draw_right(canvas: matplotlib.figure.Figure, scores: Scores) -> None:
    panels = canvas.subplots(1, len(scores.sizes), sharey=True, squeeze=False)[0]
    for panel, size in zip(panels, scores.sizes, strict=True):
        _curve(panel, scores, "MLP", None, "MLP", COLORS["MLP"])
        _curve(panel, scores, "EWC", None, "EWC", COLORS["EWC"])
        for method in ("MbPA", "MbPA + EWC"):
            _curve(panel, scores, method, size, method, COLORS[method], width=2.2)
        _finish(panel, TASKS, legend=size == scores.sizes[0])
        panel.set_title(f"n = {size:,}", fontsize=10, loc="left")
        panel.set_ylabel("" if size != scores.sizes[0] else panel.get_ylabel())


def _draw_sizes(canvas: matplotlib.figure.Figure, scores: Scores) -> None:
    by_size, by_cost = canvas.subplots(1, 2, sharey=True)
    for method in ("MLP", "EWC"):
        spread = scores.accuracy(method)
        if spread:
            by_size.axhline(_error(spread), color=COLORS[method], linewidth=1.2, linestyle=":")
            by_size.annotate(
                method,
                (scores.sizes[-1], _error(spread)),
                fontsize=8,
                color=COLORS[method],
                va="bottom",
                ha="right",
            )
            _point(by_cost, scores, method, None, 30)
    for method in SIZED:
        if not scores.has(method):
            continue
        ours = method.startswith("MbPA")
        spreads = [spread for spread in scores.at_sizes(method) if spread]
        by_size.errorbar(
            scores.sizes,
            [_error(spread) for spread in spreads],
            [spread.deviation for spread in spreads],
            color=COLORS[method],
            label=method,
            marker="o",
            markersize=4,
            linewidth=2.2 if ours else 1.4,
            linestyle="-" if ours else "--",
            capsize=2,
        )
        for place, size in enumerate(scores.sizes):
            _point(by_cost, scores, method, size, 20 + 25 * place)
    by_size.set_xscale("log")
    by_size.set_xticks(scores.sizes, [f"{size:,}" for size in scores.sizes])
    by_size.set_xticks([], minor=True)
    by_cost.set_xscale("log")
    by_size.set_yscale("log")
    _finish(by_size, "examples stored per task", legend=False)
    _finish(by_cost, "microseconds per prediction", legend=False)
    by_size.set_yticks(ERRORS, [str(error) for error in ERRORS])
    by_size.set_yticks([], minor=True)
    by_size.set_ylabel("error on all tasks (%)")
    by_cost.set_ylabel("")
    canvas.legend(fontsize=8.5, frameon=False, loc="outside right center")


def _error(spread: Spread) -> float:
    return 100 - spread.mean


def _point(panel: Axes, scores: Scores, method: str, size: int | None, area: float) -> None:
    accuracy, cost = scores.accuracy(method, size), scores.microseconds(method, size)
    if accuracy and cost:
        panel.scatter([cost.mean], [_error(accuracy)], s=area, color=COLORS[method], alpha=0.8)


def _curve(
    panel: Axes,
    scores: Scores,
    method: str,
    size: int | None,
    label: str,
    color: str,
    style: str = "-",
    width: float = 1.5,
) -> None:
    found = [
        (tasks, spread)
        for tasks in range(1, scores.tasks + 1)
        if (spread := scores.accuracy(method, size, tasks)) is not None
    ]
    seen = [tasks for tasks, _ in found]
    curve(panel, seen, [spread for _, spread in found], color, label, style, width)


def _finish(panel: Axes, across: str, legend: bool = True) -> None:
    finish(panel, across, "accuracy on all tasks so far (%)")
    if across == TASKS:
        from matplotlib.ticker import MaxNLocator

        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    if legend:
        panel.legend(fontsize=8, frameon=False)
