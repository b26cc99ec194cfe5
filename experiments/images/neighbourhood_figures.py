"""Report on neighbourhoods.

The records name images but do not contain them. If the data set is found (`MBPA_DATA`), the figure
shows the images, otherwise the names of their classes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments import data
from experiments.images.figures import color_of
from experiments.results import Record, Result, value_of
from experiments.sections import Figure, Section, Table

if TYPE_CHECKING:
    import matplotlib.figure
    from matplotlib.axes import Axes

MOST_BARS = 4
THUMBNAIL = 64  # pixels, for larger images
SAME, OTHER = "#1b7837", "#bdbdbd"
"""Frame colours of neighbours of the query's class and of other classes."""

Picture = tuple[str, int, int]
"""Part, class, and number within the class."""


@dataclass(frozen=True)
class Shown:
    """One query with all its records."""

    query: Record
    neighbours: list[Record]
    probabilities: list[Record]
    near: Record
    """The record of the number of classes among the neighbours."""

    def probability(self, method: str, label: object) -> float:
        return next(
            value_of(r) for r in self.probabilities if r["method"] == method and r["label"] == label
        )

    def answer(self, method: str) -> str:
        """Return the class that a method ranks first, among those recorded."""
        mine = [r for r in self.probabilities if r["method"] == method]
        return str(max(mine, key=value_of)["label"])

    def bars(self) -> list[str]:
        """Return the true class, and the classes that are the most probable before or after
        adaptation.
        """
        methods = "parametric", self.query["method"]
        found: dict[str, float] = {}
        for record in self.probabilities:
            if record["method"] in methods and record["label"] != self.query["label"]:
                label = str(record["label"])
                found[label] = max(found.get(label, 0.0), value_of(record))
        others = sorted(found, key=lambda label: -found[label])
        return [str(self.query["label"]), *others][:MOST_BARS]


def shown_in(result: Result) -> list[Shown]:
    """Return the queries to show, in the order of their gains."""

    def of(name: str, query: object) -> list[Record]:
        return [r for r in result.metrics if r["name"] == name and r["query"] == query]

    return [
        Shown(
            query=record,
            neighbours=of("weight", record["query"]),
            probabilities=of("probability", record["query"]),
            near=of("classes_near", record["query"])[0],
        )
        for record in result.metrics
        if record["name"] == "gain"
    ]


def neighbourhood_sections(results: Sequence[Result]) -> list[Section]:
    """Return figure 5, right, for the first split."""
    result = results[0]
    shown = shown_in(result)
    method, epochs = result.config["adapting"], max(result.config["points"])
    rates = {r["name"]: value_of(r) for r in result.metrics if str(r["name"]).endswith("_alone")}
    text = (
        f"After {epochs:g} epochs, {method} alone is right about {rates['right_alone']:.1f}% of "
        "the images: the parametric model, the memory alone and their mixture are all wrong. It "
        f"alone is wrong about {rates['wrong_alone']:.1f}%, where all three are right.",
        "The images shown are chosen by rule: of the former, those whose class gained most in "
        "log-probability, one per class.",
    )
    figures = []
    if shown:
        figures.append(
            Figure(
                "image-neighbourhoods",
                f"Figure 5, right: images that only {method} gets right after {epochs:g} epochs, "
                "chosen by rule (largest gain in log-probability of the true class, one per "
                "class). Left: the image and its class. Middle: the nearest entries of the memory "
                "with their weights, nearest first, those of the same class framed in green. "
                "Right: probabilities before (green) and after (blue); the true class first. "
                "Without the data set, names of classes take the place of images.",
                lambda canvas: _draw(canvas, shown, result.config),
                (12, 1.5 * len(shown) + 0.4),
            )
        )
    tables = [_table(shown, str(method))] if shown else []
    return [Section("Images that only MbPA gets right", text, tables, figures)]


def _table(shown: Sequence[Shown], method: str) -> Table:
    rows = []
    for each in shown:
        truth = each.query["label"]
        near, among = each.near["value"], each.near["neighbours"]
        same = sum(value_of(r) for r in each.neighbours if r["label"] == truth)
        rows.append(
            [
                f"{truth}{' (new)' if each.query['is_new'] else ''}",
                each.answer("parametric"),
                f"{100 * each.probability('parametric', truth):.1f}",
                f"{100 * each.probability('memory only', truth):.1f}",
                f"{100 * each.probability('mixture', truth):.1f}",
                f"{100 * each.probability(method, truth):.1f}",
                f"{near} of {among}",
                f"{100 * same:.0f}",
            ]
        )
    columns = ["class", "parametric says", "parametric", "memory only", "mixture", method]
    columns += ["classes near", "weight of the class"]
    count = len(shown[0].neighbours)
    return Table(
        "Probability of the true class, percent",
        columns,
        rows,
        "Classes near: number of different classes among the neighbours. Weight of the class: "
        f"share of the weight that the true class has among the {count} nearest, in percent.",
    )


# Drawing


def _draw(canvas: matplotlib.figure.Figure, shown: Sequence[Shown], config: dict[str, Any]) -> None:
    pictures = _pictures(shown, config)
    across = max(len(each.neighbours) for each in shown)
    grid = canvas.add_gridspec(len(shown), across + 2, width_ratios=[1.35, *[1] * across, 3.2])
    for row, each in enumerate(shown):
        panel = canvas.add_subplot(grid[row, 0])
        picture = pictures.get(_name_of(each.query, config["part"]))
        _tile(panel, picture, str(each.query["label"]), "#000000")
        new = " (new)" if each.query["is_new"] else ""
        panel.set_title(f"{_short(each.query['label'], 17)}{new}", fontsize=9, fontweight="bold")
        for column, neighbour in enumerate(each.neighbours):
            panel = canvas.add_subplot(grid[row, column + 1])
            is_same = neighbour["label"] == each.query["label"]
            picture = pictures.get(_name_of(neighbour, "train"))
            _tile(panel, picture, str(neighbour["label"]), SAME if is_same else OTHER)
            panel.set_title(f"{value_of(neighbour):.3f}", fontsize=8, loc="center", pad=2)
            if picture is not None:
                panel.set_xlabel(_short(neighbour["label"], 13), fontsize=7, labelpad=2)
        bars = canvas.add_subplot(grid[row, across + 1])
        _bars(bars, each)
        if each is shown[-1]:
            bars.set_xlabel("probability (%)", fontsize=8)
        else:
            bars.set_xticklabels([])


def _tile(panel: Axes, picture: Any, label: str, frame: str) -> None:
    """Draw an image, or its name if there is no image."""
    panel.grid(False)
    panel.set_xticks([])
    panel.set_yticks([])
    panel.set_box_aspect(1)
    panel.spines[:].set_visible(True)
    panel.spines[:].set_color(frame)
    panel.spines[:].set_linewidth(2 if frame != OTHER else 1)
    if picture is not None:
        panel.imshow(picture, interpolation="nearest")
        return
    words = "\n".join(textwrap.wrap(label, 9)[:4])
    panel.text(0.5, 0.5, words, ha="center", va="center", fontsize=7.5, transform=panel.transAxes)


def _bars(panel: Axes, each: Shown) -> None:
    method = str(each.query["method"])
    labels = each.bars()
    for shift, name in ((-0.2, "parametric"), (0.2, method)):
        values = [100 * each.probability(name, label) for label in labels]
        places = [place + shift for place in range(len(labels))]
        panel.barh(places, values, height=0.36, color=color_of(name))
    panel.set_yticks(range(len(labels)), [_short(label, 18) for label in labels], fontsize=7.5)
    panel.get_yticklabels()[0].set_fontweight("bold")
    panel.invert_yaxis()
    panel.set_xlim(0, 100)
    panel.tick_params("x", labelsize=7.5)
    panel.grid(axis="y", visible=False)


def _short(label: object, most: int) -> str:
    words = str(label)
    return words if len(words) <= most else f"{words[: most - 1]}…"


def _name_of(record: Record, part: str) -> Picture:
    part = "test" if part == "test" else "train"
    return part, int(str(record["class"])), int(str(record["image"]))


def _pictures(shown: Sequence[Shown], config: dict[str, Any]) -> dict[Picture, Any]:
    """Load the named images as arrays; empty if the data set is not found."""
    wanted = [_name_of(each.query, config["part"]) for each in shown]
    wanted += [_name_of(record, "train") for each in shown for record in each.neighbours]
    classes = sorted({number for _, number, _ in wanted})
    try:
        if config.get("dataset") == "imagenet":
            folder = data.imagenet()
            return {name: _of_folder(folder, *name) for name in wanted}
        found = data.tiny_imagenet(size=int(config["size"]), classes=classes)
    except data.DataError:
        return {}
    pictures: dict[Picture, Any] = {}
    for part, number, image in wanted:
        images = found.test if part == "test" else found.train
        of_class = images.images[images.labels == number]
        pictures[part, number, image] = of_class[image].permute(1, 2, 0).numpy()
    return pictures


def _of_folder(folder: data.ImageFolder, part: str, number: int, image: int) -> Any:
    files = folder.test if part == "test" else folder.train
    row = int((files.labels == number).nonzero()[image, 0])
    return files.read([row], THUMBNAIL)[0].permute(1, 2, 0).numpy()
