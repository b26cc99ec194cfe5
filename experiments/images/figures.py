"""Report on new image classes, built from the records alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from experiments.drawing import (
    Spread,
    curve,
    finish,
    legend_below,
    repetitions,
    sentence,
    told,
)
from experiments.images.methods import METHODS
from experiments.results import Result, value_of
from experiments.sections import Figure, Section, Table

if TYPE_CHECKING:
    import matplotlib.figure
    from matplotlib.axes import Axes

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
"""Table 1 of the paper: top-1 at 0.1, 1 and 3 epochs, then areas up to there, on ImageNet."""
SPANS = (0.1, 1.0, 3.0)
SUBSETS = {"novel": "new classes", "pre-trained": "old classes", "all": "all classes"}


class Scores:
    """Records of several splits, by name, method, subset, epochs and, if varied, `capacity`, `k` or
    `lr`.
    """

    VARIED = ("capacity", "k", "lr")

    def __init__(self, results: Sequence[Result]) -> None:
        self.results, self.config = results, results[0].config
        self._values: dict[tuple[object, ...], list[float]] = {}
        names = "name", "method", "subset", "epochs", *self.VARIED
        for result in results:
            for record in result.metrics:
                key = tuple(record.get(name) for name in names)
                self._values.setdefault(key, []).append(value_of(record))

    @property
    def methods(self) -> list[str]:
        """The methods that were measured in every split."""
        first, *others = ([str(r["method"]) for r in each.metrics] for each in self.results)
        return [name for name in dict.fromkeys(first) if all(name in each for each in others)]

    def spread(
        self, name: str, method: str, subset: str, epochs: float, **varied: float
    ) -> Spread | None:
        """Return a measurement over splits; `None` if it was not made."""
        of = (varied.get(each) for each in self.VARIED)
        values = self._values.get((name, method, subset, epochs, *of))
        return Spread(tuple(values)) if values else None

    def across(
        self, axis: str, name: str, method: str, subset: str, **fixed: float
    ) -> dict[float, Spread]:
        """Return measurements by all values of `axis`, one of `epochs` and the varied fields; the
        other fields are as given or absent.
        """
        names = "epochs", *self.VARIED
        wanted = {other: fixed.get(other) for other in names if other != axis}
        found: dict[float, Spread] = {}
        for key, values in self._values.items():
            of = dict(zip(names, key[3:], strict=True))
            at = of.pop(axis)
            if key[:3] == (name, method, subset) and of == wanted and isinstance(at, int | float):
                found[at] = Spread(tuple(values))
        return dict(sorted(found.items()))

    @property
    def splits(self) -> str:
        return repetitions(len(self.results), "split")


def find_lead(scores: Scores, method: str, subset: str) -> dict[float, Spread]:
    """Return the lead over the parametric model by epochs, computed per split, in points."""
    ours = scores.across("epochs", "top1", method, subset)
    theirs = scores.across("epochs", "top1", "parametric", subset)
    return {epochs: subtract(spread, theirs[epochs]) for epochs, spread in ours.items()}


def subtract(ours: Spread, theirs: Spread) -> Spread:
    """Return the difference of two measurements in each split."""
    pairs = zip(ours.values, theirs.values, strict=True)
    return Spread(tuple(mine - other for mine, other in pairs))


def data_in_words(config: Mapping[str, Any]) -> str:
    """Describe the data, and what it means for a comparison with the paper's numbers."""
    size, classes = config["size"], config["classes"]
    if config.get("dataset") == "imagenet":
        return f"{classes} classes of ImageNet at {size}x{size} pixels."
    return (
        f"{classes} classes of Tiny ImageNet at {size}x{size} pixels, recompressed; the paper has "
        "ImageNet, so compare orders, not numbers."
    )


def in_epochs(count: float) -> str:
    """Return a number of epochs with its unit."""
    return f"{count:g} epoch{'' if count == 1 else 's'}"


def color_of(method: str) -> str:
    """Return a method's colour in all figures; grey for a method that no longer exists."""
    return METHODS[method].color if method in METHODS else "#8c8c8c"


def incremental_sections(results: Sequence[Result]) -> list[Section]:
    """Return table 1 and figure 4."""
    scores = Scores(results)
    known = scores.spread("pretrained_top1", "parametric", "pre-trained", 0.0)
    text = (
        f"{data_in_words(scores.config)} A ResNet knows a random half of the classes "
        f"({told(known, 1)}% right on those); then all classes arrive and only the last layer "
        "learns. All methods store the same images. All but the last two use the same layer: "
        "`retrained` is a logistic regression on everything in the memory, and `MbPA (kept)` "
        "adapts such a layer and balances new and old classes by a margin.",
    )
    figure = Figure(
        "incremental-images",
        _caption(scores),
        lambda canvas: draw_curves(canvas, scores),
        (11, 4.8),
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
    """Return figure 5, left."""
    scores = Scores(results)
    share = float(results[0].config["scarce"])
    subsets = ("novel-scarce", "novel-full", "pre-trained", "all")
    last = list(scores.across("epochs", "top1", "parametric", "all"))[-1]
    rows = [
        [method, *(told(scores.spread("top1", method, subset, last), 1) for subset in subsets)]
        for method in scores.methods
    ]
    table = Table(
        f"Top-1 after {in_epochs(last)}, percent",
        ["method", "new, scarce", "new, all their images", "old", "all"],
        rows,
        scores.splits,
    )
    figure = Figure(
        "unbalanced-images",
        f"Figure 5, left: new classes of which {share:.0%} of the images are seen, and the others; "
        f"{scores.splits}.",
        lambda canvas: draw_curves(
            canvas, scores, {"novel-scarce": "new, scarce", "novel-full": "new, full", "all": "all"}
        ),
        (11, 4.8),
    )
    return [
        Section(
            title="Few images of some new classes",
            text=(
                f"Half of the new classes have {share:.0%} of their images; the test is balanced. "
                "`MbPA (balanced)` is `MbPA (gradient)` with the weight of each neighbour divided "
                "by a power of the number of entries that the memory holds of its class.",
            ),
            tables=[table, _table_of_leads(scores, last)],
            figures=[figure],
        )
    ]


def _table_of_leads(scores: Scores, last: float) -> Table:
    """Return whether the lead over the parametric model is wider on scarce classes."""
    rows, spans = [], list(dict.fromkeys((min(1.0, last), last)))
    for method in scores.methods:
        leads = [find_lead(scores, method, subset) for subset in ("novel-scarce", "novel-full")]
        if method == "parametric" or not all(span in lead for span in spans for lead in leads):
            continue
        cells: list[str] = []
        for span in spans:
            scarce, full = (lead[span] for lead in leads)
            cells += [each.told(1) for each in (scarce, full, subtract(scarce, full))]
        rows.append([method, *cells])
    words = "scarce", "others", "difference"
    return Table(
        "Lead over the parametric model on new classes, points",
        ["method", *(f"{word}, at {span:g}" for span in spans for word in words)],
        rows,
        f"By epochs. Difference: by how much the lead is wider on scarce classes. "
        f"{sentence(scores.splits)}.",
    )


def _table(scores: Scores, subset: str) -> Table:
    columns = [
        "method",
        *(f"top-1 at {span:g}" for span in SPANS),
        *(f"AUC to {span:g}" for span in SPANS),
    ]
    rows = []
    for method in scores.methods:
        rows.append(
            [
                method,
                *(
                    told(scores.spread(name, method, subset, span), 1)
                    for name in ("top1", "auc")
                    for span in SPANS
                ),
            ]
        )
    for method, numbers in PAPER.get(subset, {}).items():
        rows.append([f"paper (ImageNet): {method}", *(f"{number:.1f}" for number in numbers)])
    return Table(
        f"{SUBSETS[subset].capitalize()}, percent, by epochs", columns, rows, scores.splits
    )


def _caption(scores: Scores) -> str:
    return (
        "Figure 4: top-1 accuracy while all classes arrive, on new, old and all classes; "
        f"{scores.splits}, band: one standard deviation. Epochs are drawn as their square root."
    )


def draw_curves(
    canvas: matplotlib.figure.Figure, scores: Scores, subsets: Mapping[str, str] = SUBSETS
) -> None:
    """Draw accuracy against epochs, one panel per subset."""
    panels = canvas.subplots(1, len(subsets), squeeze=False)[0]
    for panel, (subset, title) in zip(panels, subsets.items(), strict=True):
        for method in scores.methods:
            points = scores.across("epochs", "top1", method, subset)
            curve(panel, *unzipped(points), color_of(method), method, marker="o")
        finish(panel, "epochs of all classes", title=title)
        square_root(panel)
    panels[0].set_ylabel("top-1 accuracy (%)")
    legend_below(canvas, panels[0])


def unzipped(points: Mapping[float, Spread]) -> tuple[list[float], list[Spread]]:
    """Return the positions of a curve's points and their values."""
    return list(points), list(points.values())


def square_root(panel: Axes) -> None:
    """Scale the axis of epochs by the square root, which gives the beginning more room."""
    panel.set_xscale("function", functions=(lambda x: abs(x) ** 0.5, lambda x: x**2))
    panel.set_xlim(left=0)
