"""Draws docs/figures/method-*.svg: `python -m website.draw_method`. One query, step by step.

A network with keys of two numbers, so that they can be drawn, knows three digits of scikit-learn.
Five pictures of a fourth are in the memory, and another picture of it is the query. Everything in
the drawings comes from this run. Colours are variables of the page, with a default for GitHub.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor

import mbpa

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
KNOWN, NEW = (0, 1, 2), 3  # the digits, in the order of the head's rows
DIGITS = (0, 1, 4, 3)
COLORS = ("#2f6fde", "#0a8f6a", "#b0489f", "#d97700")
NAMES = ("class-0", "class-1", "class-2", "class-new")
WIDTH, HEIGHT = 640, 330
ENTRIES, LESSONS, NEIGHBORS = 24, 5, 12
STYLE = "<style>svg{color:#1f2328}@media(prefers-color-scheme:dark){svg{color:#e6edf3}}</style>"
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Run:
    """A model and one query to it."""

    model: mbpa.MbPA
    network: torch.nn.Module
    pictures: Tensor
    query: Tensor
    lessons: Tensor
    """Ids of the examples of the new digit."""

    @property
    def key(self) -> Tensor:
        """The query's key."""
        return self.model.embed(self.query)[0]


def make_run() -> Run:
    """Train a network on three digits, and write examples of them and of a fourth."""
    torch.manual_seed(1)
    digits = load_digits()
    x = torch.tensor(digits.data / 16, dtype=torch.float32)
    y = torch.tensor(digits.target)
    parts = [x[y == digit] for digit in DIGITS]
    network = torch.nn.Sequential(
        torch.nn.Linear(64, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 2),
        torch.nn.Linear(2, 3),
    )
    inputs = torch.cat([parts[kind][:100] for kind in KNOWN])
    labels = torch.arange(3).repeat_interleave(100)
    optimiser = torch.optim.Adam(network.parameters(), lr=3e-3, weight_decay=1e-2)
    for _ in range(100):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(network(inputs), labels).backward()
        optimiser.step()
    embed, head = mbpa.split(network, at="3")
    model = mbpa.MbPA(
        embed,
        head,
        memory=mbpa.ExactMemory(capacity=1_000, key_dim=2),
        predictor=mbpa.Adapted(k=NEIGHBORS),
    )
    for kind in KNOWN:
        model.write(parts[kind][100 : 100 + ENTRIES], [kind] * ENTRIES)
    model.grow(classes=4)
    lessons = model.write(parts[NEW][:LESSONS], [NEW] * LESSONS)
    query = parts[NEW][LESSONS + 19 :][:1]  # one whose neighbours disagree
    return Run(model, network, parts[NEW], query, lessons)


# Geometry


@dataclass(frozen=True)
class Plane:
    """A rectangle on the sheet that shows a part of the plane of keys."""

    left: float
    top: float
    width: float
    height: float
    low: tuple[float, float]
    high: tuple[float, float]

    def place(self, key: Tensor | tuple[float, float]) -> tuple[float, float]:
        """Return where a key is drawn."""
        x, y = (float(number) for number in key)
        across = (x - self.low[0]) / (self.high[0] - self.low[0])
        up = (y - self.low[1]) / (self.high[1] - self.low[1])
        return self.left + across * self.width, self.top + (1 - up) * self.height

    def list_corners(self) -> list[tuple[float, float]]:
        """Return the corners in the plane of keys."""
        (x0, y0), (x1, y1) = self.low, self.high
        return [(x0, y0), (x1, y0), (x1, y1), (x0, y1)]

    def draw_frame(self) -> str:
        """Return the border."""
        return (
            f'<rect x="{self.left}" y="{self.top}" width="{self.width}" height="{self.height}" '
            'rx="4" fill="none" stroke="currentColor" stroke-opacity=".3"/>'
        )


def clip(polygon: Points, normal: tuple[float, float], offset: float) -> list[tuple[float, float]]:
    """Return the part of a polygon where `normal · point + offset` is positive."""
    kept = []
    values = [normal[0] * x + normal[1] * y + offset for x, y in polygon]
    for place, (point, value) in enumerate(zip(polygon, values, strict=True)):
        after, after_value = polygon[place - 1], values[place - 1]
        if (value > 0) != (after_value > 0):
            share = value / (value - after_value)
            kept.append(
                (
                    point[0] + share * (after[0] - point[0]),
                    point[1] + share * (after[1] - point[1]),
                )
            )
        if value > 0:
            kept.append(point)
    return kept


def find_regions(log_probs: Tensor, plane: Plane) -> dict[int, list[tuple[float, float]]]:
    """Return the part of the plane in which each class is the most probable.

    Args:
        log_probs: of a linear head at the keys (0, 0), (1, 0) and (0, 1), shape (3, C). They fix
            the differences between classes everywhere.
        plane: the part of the plane that is drawn.
    """
    regions = {}
    for kind in range(log_probs.shape[1]):
        polygon = plane.list_corners()
        for other in range(log_probs.shape[1]):
            if other != kind and polygon:
                origin, right, up = (log_probs[:, kind] - log_probs[:, other]).tolist()
                polygon = clip(polygon, (right - origin, up - origin), origin)
        regions[kind] = polygon
    return regions


def evaluate(run: Run, neighbors: mbpa.Neighbors | None) -> Tensor:
    """Return log-probabilities at three keys, by the head adapted to these neighbours."""
    from dataclasses import replace

    keys = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    if neighbors is None:
        return run.model.head(keys).detach().log_softmax(1)
    same = neighbors.rows(torch.zeros(3, dtype=torch.int64))
    same = replace(same, dots=(keys[:, None] * same.keys).sum(-1))
    return run.model(keys=keys, neighbors=same)


# Pieces of a drawing


def color(kind: int) -> str:
    """Return the colour of a class."""
    return f"var(--{NAMES[kind]}, {COLORS[kind]})"


def write(
    x: float, y: float, text: str, *, size: int = 15, anchor: str = "start", **more: str
) -> str:
    """Return a piece of text."""
    rest = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
        f'fill="{more.pop("fill", "currentColor")}"{rest}>{html.escape(text)}</text>'
    )


def draw_dot(
    plane: Plane, key: Tensor, kind: int, radius: float = 4.0, opacity: float = 0.8
) -> str:
    """Return an entry of the memory."""
    x, y = plane.place(key)
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{color(kind)}" '
        f'fill-opacity="{opacity}"/>'
    )


def draw_query(plane: Plane, key: Tensor) -> str:
    """Return the query: a ring with a cross."""
    x, y = plane.place(key)
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="8" fill="none" stroke="currentColor" '
        f'stroke-width="2"/><path d="M{x - 4:.1f} {y:.1f}h8M{x:.1f} {y - 4:.1f}v8" '
        'stroke="currentColor" stroke-width="2"/>'
    )


def draw_picture(picture: Tensor, left: float, top: float, size: float) -> str:
    """Return a picture of 8 × 8 pixels, in which more ink is more opaque."""
    side = size / 8
    cells = [
        f'<rect x="{left + column * side:.1f}" y="{top + row * side:.1f}" width="{side:.1f}" '
        f'height="{side:.1f}" fill-opacity="{ink:.2f}"/>'
        for row, line in enumerate(picture.reshape(8, 8).tolist())
        for column, ink in enumerate(line)
        if ink > 0
    ]
    frame = (
        f'<rect x="{left - 3}" y="{top - 3}" width="{size + 6}" height="{size + 6}" rx="4" '
        'fill="none" stroke="currentColor" stroke-opacity=".3"/>'
    )
    return f'<g fill="currentColor">{"".join(cells)}</g>{frame}'


def draw_entries(run: Run, plane: Plane, opacity: float = 0.8) -> str:
    """Return all entries of the memory."""
    entries = run.model.memory.entries()
    pairs = zip(entries.keys, entries.values.tolist(), strict=True)
    return "".join(draw_dot(plane, key, kind, opacity=opacity) for key, kind in pairs)


def draw_legend(left: float, top: float) -> str:
    """Return the names of the classes."""
    rows = []
    for kind, digit in enumerate(DIGITS):
        y = top + 20 * kind
        name = f"digit {digit}" + (f", new: {LESSONS} examples" if kind == NEW else "")
        rows.append(f'<circle cx="{left}" cy="{y - 4}" r="5" fill="{color(kind)}"/>')
        rows.append(write(left + 12, y, name))
    return "".join(rows)


def draw_arrow(x0: float, y: float, x1: float) -> str:
    """Return an arrow to the right."""
    return (
        f'<path d="M{x0} {y}H{x1}m-7 -5l7 5l-7 5" fill="none" stroke="currentColor" '
        'stroke-width="1.5"/>'
    )


def draw_bars(left: float, top: float, probabilities: Iterable[float], title: str) -> str:
    """Return the probabilities of all classes as bars."""
    rows = [write(left, top, title, font_weight="600")]
    for kind, probability in enumerate(probabilities):
        y = top + 18 + 26 * kind
        rows.append(write(left + 18, y + 13, str(DIGITS[kind]), anchor="end"))
        rows.append(
            f'<rect x="{left + 26}" y="{y}" width="{max(1, 160 * probability):.1f}" height="17" '
            f'rx="2" fill="{color(kind)}"/>'
        )
        label = f"{probability:.0%}"
        rows.append(write(left + 32 + 160 * probability, y + 13, label))
    return "".join(rows)


def make_sheet(*parts: str, height: int = HEIGHT) -> str:
    """Return a whole drawing."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif">'
    )
    return f"{head}{STYLE}{''.join(parts)}</svg>\n"


# The drawings


def make_plane(run: Run, left: float, width: float, *, near: bool = False) -> Plane:
    """Return a plane that shows all entries, or those around the query."""
    keys = run.model.memory.entries().keys
    if near:
        found = run.model.memory.read(run.key[None], k=NEIGHBORS)
        reach = float(found.distances[0].max().sqrt()) * 1.15
        low, high = run.key - reach, run.key + reach
        return Plane(left, 20, width, width, tuple(low.tolist()), tuple(high.tolist()))
    low, high = keys.amin(0), keys.amax(0)
    margin = 0.08 * (high - low)
    bounds = [tuple(each.tolist()) for each in (low - margin, high + margin)]
    return Plane(left, 20, width, HEIGHT - 40, *bounds)


def draw_embed(run: Run) -> str:
    """A picture, the network, and its key among those of the memory."""
    plane = make_plane(run, 300, 320)
    x, y = plane.place(run.key)
    box = (
        '<rect x="150" y="125" width="96" height="80" rx="6" fill="none" stroke="currentColor"/>'
        + write(198, 160, "f", size=18, anchor="middle", font_style="italic")
        + write(198, 182, "embed", anchor="middle")
    )
    return make_sheet(
        draw_picture(run.query[0], 24, 117, 96),
        write(72, 240, "query x", anchor="middle"),
        draw_arrow(128, 165, 148),
        box,
        draw_arrow(248, 165, 296),
        plane.draw_frame(),
        draw_entries(run, plane, opacity=0.3),
        draw_query(plane, run.key),
        write(x + 14, y + 5, "q = f(x)", font_style="italic"),
    )


def draw_retrieve(run: Run) -> str:
    """The nearest entries, connected with the query."""
    plane = make_plane(run, 20, 400)
    found = run.model.memory.read(run.key[None], k=NEIGHBORS)
    x, y = plane.place(run.key)
    lines = []
    for key in found.keys[0]:
        x1, y1 = plane.place(key)
        lines.append(f'<path d="M{x:.1f} {y:.1f}L{x1:.1f} {y1:.1f}"/>')
    counts = torch.bincount(found.values[0], minlength=len(DIGITS)).tolist()
    rows = [
        write(445, 150 + 20 * row, f"{count} × digit {DIGITS[kind]}")
        for row, (kind, count) in enumerate((k, c) for k, c in enumerate(counts) if c)
    ]
    return make_sheet(
        plane.draw_frame(),
        f'<g stroke="currentColor" stroke-opacity=".55">{"".join(lines)}</g>',
        draw_entries(run, plane),
        draw_query(plane, run.key),
        draw_legend(450, 40),
        write(445, 128, f"{NEIGHBORS} nearest:", font_weight="600"),
        *rows,
    )


def draw_weigh(run: Run) -> str:
    """The same entries, as large as their weights."""
    plane = make_plane(run, 20, 290, near=True)
    why = run.model.explain(run.query)
    assert why.neighbors is not None
    assert why.weights is not None
    weights = why.weights[0].tolist()
    triples = list(
        zip(why.neighbors.keys[0], why.neighbors.values[0].tolist(), weights, strict=True)
    )
    dots = [
        draw_dot(plane, key, kind, radius=2 + 26 * weight**0.5, opacity=0.55)
        for key, kind, weight in triples
    ]
    bars = [write(345, 34, "weight of each neighbour", font_weight="600")]
    for row, (_, kind, weight) in enumerate(triples):
        y = 46 + 22 * row
        bars.append(write(358, y + 12, str(DIGITS[kind]), anchor="end"))
        bars.append(
            f'<rect x="366" y="{y}" width="{max(1, 190 * weight / max(weights)):.1f}" height="14" '
            f'rx="2" fill="{color(kind)}"/>'
        )
        bars.append(write(372 + 190 * weight / max(weights), y + 12, f"{weight:.2f}"))
    return make_sheet(plane.draw_frame(), *dots, draw_query(plane, run.key), *bars)


def draw_adapt(run: Run) -> str:
    """Which digit the head answers where, before and after."""
    neighbors = run.model.memory.read(run.key[None], k=NEIGHBORS)
    sheets = []
    for left, title, found in (
        (20, "head g, before", None),
        (335, "adapted for this query", neighbors),
    ):
        plane = make_plane(run, left, 285)
        plane = Plane(plane.left, 40, plane.width, HEIGHT - 60, plane.low, plane.high)
        for kind, polygon in find_regions(evaluate(run, found), plane).items():
            if polygon:
                path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(plane.place, polygon))
                sheets.append(f'<polygon points="{path}" fill="{color(kind)}" fill-opacity=".22"/>')
        sheets += [plane.draw_frame(), draw_entries(run, plane, opacity=0.75)]
        sheets += [draw_query(plane, run.key), write(left, 28, title, font_weight="600")]
    return make_sheet(*sheets)


def draw_predict(run: Run) -> str:
    """Probabilities of the query before and after."""
    why = run.model.explain(run.query)
    return make_sheet(
        draw_picture(run.query[0], 24, 40, 80),
        draw_bars(140, 34, why.before[0].exp().tolist(), "head alone"),
        draw_bars(395, 34, why.after[0].exp().tolist(), "after adapting"),
        height=165,
    )


def draw_forget(run: Run) -> str:
    """Probabilities once the lessons are deleted: those of a memory that never held them."""
    after = run.model(run.query).exp()[0].tolist()
    run.model.memory.delete(run.lessons)
    left = run.model(run.query).exp()[0].tolist()
    return make_sheet(
        draw_picture(run.query[0], 24, 40, 80),
        draw_bars(140, 34, after, f"with the {LESSONS} examples"),
        draw_bars(395, 34, left, "after deleting them"),
        height=165,
    )


def draw_all() -> dict[str, str]:
    """Return all drawings, by the name of the file."""
    run = make_run()
    steps = (draw_embed, draw_retrieve, draw_weigh, draw_adapt, draw_predict, draw_forget)
    return {f"method-{step.__name__.removeprefix('draw_')}.svg": step(run) for step in steps}


if __name__ == "__main__":
    for name, drawing in draw_all().items():
        (FIGURES / name).write_text(drawing, "utf-8")
