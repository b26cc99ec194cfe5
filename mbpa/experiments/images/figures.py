"""What the report shows of new image classes, made from the records alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mbpa.experiments.results import Result, value_of
from mbpa.experiments.sections import Figure, Section, Table

if TYPE_CHECKING:
    import matplotlib.figure
    from matplotlib.axes import Axes

COLORS = {
    "parametric": "#1b7837",
    "memory only": "#e08214",
    "mixture": "#b2182b",
    "MbPA (RMSprop)": "#2166ac",
    "MbPA (gradient)": "#67a9cf",
}
"""As in the paper: MbPA blue, the parametric model green, the mixture red."""
PAPER = {
    "novel": {
        "MbPA": (46.2, 64.5, 65.7, 27.4, 57.7, 63.0),
        "memory only": (40.0, 53.3, 52.9, 28.3, 47.9, 51.8),
        "mixture": (31.6, 56.0, 59.1, 18.6, 47.4, 54.7),
        "parametric": (16.2, 53.6, 57.9, 5.7, 41.7, 51.9),
    },
    "pre-trained": {
        "MbPA": (68.5, 70.9, 70.9, 71.4, 70.3, 70.3),
        "memory only": (62.7, 69.4, 70.0, 45.9, 65.8, 68.7),
        "mixture": (71.9, 70.3, 70.2, 74.8, 70.6, 70.1),
        "parametric": (71.4, 68.1, 68.8, 76.0, 68.6, 68.3),
    },
}
"""Table 1: top-1 at 0.1, 1 and 3 epochs, then areas up to there, on ImageNet."""
SPANS = (0.1, 1.0, 3.0)
SUBSETS = {"novel": "new classes", "pre-trained": "old classes", "all": "all classes"}


class Scores:
    """The records of some splits, by what they are of."""

    def __init__(self, results: Sequence[Result]) -> None:
        self.results = results
        self._values: dict[tuple[object, ...], list[float]] = {}
        self.methods: list[str] = []
        for result in results:
            for record in result.metrics:
                key = record["name"], record["method"], record["subset"], record["epochs"]
                self._values.setdefault(key, []).append(value_of(record))
                if str(record["method"]) not in self.methods:
                    self.methods.append(str(record["method"]))

    def values(self, name: str, method: str, subset: str, epochs: float) -> list[float]:
        """Of each split."""
        return self._values.get((name, method, subset, epochs), [])

    def points(self, method: str, subset: str) -> list[float]:
        return sorted(
            float(str(key[3])) for key in self._values if key[:3] == ("top1", method, subset)
        )

    @property
    def splits(self) -> str:
        count = len(self.results)
        return "one split" if count == 1 else f"mean ± standard deviation of {count} splits"


def incremental_sections(results: Sequence[Result]) -> list[Section]:
    """Table 1 and figure 4."""
    scores = Scores(results)
    known = scores.values("pretrained_top1", "parametric", "pre-trained", 0.0)
    text = (
        "Tiny ImageNet at 40x40 pixels, recompressed; the paper has ImageNet, so compare orders, "
        "not numbers. A ResNet knows a random half of the classes "
        f"({_spread(known)}% right on those); then all classes arrive and only the last layer "
        "learns. All methods have the same layer and the same memory.",
    )
    figure = Figure(
        "incremental-images", _caption(scores), lambda canvas: _draw(canvas, scores), (11, 4.8)
    )
    return [
        Section(
            title="New classes, as quickly as possible",
            text=text,
            tables=[_table(scores, subset) for subset in SUBSETS],
            figures=[figure],
        )
    ]


def unbalanced_sections(results: Sequence[Result]) -> list[Section]:
    """Figure 5, left."""
    scores = Scores(results)
    share = float(results[0].config["scarce"])
    subsets = ("novel-scarce", "novel-full", "pre-trained", "all")
    last = scores.points("parametric", "all")[-1]
    rows = [
        [method, *(_spread(scores.values("top1", method, subset, last)) for subset in subsets)]
        for method in scores.methods
    ]
    table = Table(
        f"Top-1 after {last:g} epochs, percent",
        ["method", "new, scarce", "new, all their images", "old", "all"],
        rows,
        scores.splits,
    )
    figure = Figure(
        "unbalanced-images",
        f"Figure 5, left: new classes of which {share:.0%} of the images are seen, and the others; "
        f"{scores.splits}.",
        lambda canvas: _draw(
            canvas, scores, {"novel-scarce": "new, scarce", "novel-full": "new, full", "all": "all"}
        ),
        (11, 4.8),
    )
    return [
        Section(
            title="Few images of some new classes",
            text=(
                f"Half of the new classes have {share:.0%} of their images; the test is balanced.",
            ),
            tables=[table],
            figures=[figure],
        )
    ]


def _table(scores: Scores, subset: str) -> Table:
    columns = [
        "method",
        *(f"top-1 at {span:g}" for span in SPANS),
        *(f"AUC to {span:g}" for span in SPANS),
    ]
    rows = []
    for method in scores.methods:
        cells = [_spread(scores.values("top1", method, subset, span)) for span in SPANS]
        cells += [_spread(scores.values("auc", method, subset, span)) for span in SPANS]
        rows.append([method, *cells])
    for method, numbers in PAPER.get(subset, {}).items():
        rows.append([f"paper (ImageNet): {method}", *(f"{number:.1f}" for number in numbers)])
    return Table(
        f"{SUBSETS[subset].capitalize()}, percent, by epochs", columns, rows, scores.splits
    )


def _spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{statistics.fmean(values):.1f}" + (
        f" ± {statistics.stdev(values):.1f}" if values[1:] else ""
    )


def _caption(scores: Scores) -> str:
    return (
        "Figure 4: top-1 accuracy while all classes arrive, on new, old and all classes; "
        f"{scores.splits}, band: one standard deviation. Epochs are drawn as their square root."
    )


def _draw(
    canvas: matplotlib.figure.Figure, scores: Scores, subsets: dict[str, str] | None = None
) -> None:
    subsets = subsets or SUBSETS
    panels = canvas.subplots(1, len(subsets), squeeze=False)[0]
    for panel, (subset, title) in zip(panels, subsets.items(), strict=True):
        for method in scores.methods:
            _curve(panel, scores, method, subset)
        panel.set_title(title, fontsize=11, loc="left")
        panel.set_xlabel("epochs of all classes")
        panel.set_xscale("function", functions=(lambda x: x**0.5, lambda x: x**2))
        panel.grid(axis="y", color="#e5e5e5", linewidth=0.8)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("top-1 accuracy (%)")
    panels[-1].legend(fontsize=8.5, frameon=False)


def _curve(panel: Axes, scores: Scores, method: str, subset: str) -> None:
    points = scores.points(method, subset)
    runs = [scores.values("top1", method, subset, point) for point in points]
    mean = [statistics.fmean(run) for run in runs]
    deviation = [statistics.stdev(run) if run[1:] else 0.0 for run in runs]
    color = COLORS.get(method, "#762a83")
    low = [m - d for m, d in zip(mean, deviation, strict=True)]
    high = [m + d for m, d in zip(mean, deviation, strict=True)]
    panel.fill_between(points, low, high, color=color, alpha=0.15, linewidth=0)
    panel.plot(points, mean, color=color, label=method, linewidth=1.8, marker="o", markersize=3)
