"""HTML and SVG for the page: bars, memories, a map. It needs no scripts, files or requests.

All texts come from users and are escaped.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor

from mbpa.explorer.review import Opinion
from mbpa.serve.answers import NearExample, Reason
from mbpa.serve.classifier import Classifier

COLOURS = ("#4f7cff", "#f08c2e", "#2fa36b", "#b065c9", "#e0566b")  # readable on light and dark
OTHER = "#98a1b3"
BARS, MEMORIES = 5, 6  # shown per answer
MOST_POINTS = 10_000  # on the map; larger memories are sampled evenly
WIDTH, HEIGHT, MARGIN = 520.0, 360.0, 14.0  # of the map, in SVG units
THUMB = 26.0  # side of a picture on the map
NONE: Mapping[int, str] = MappingProxyType({})  # thumbnails in a run that takes texts

STYLE = """
.mbpa {font-size: 15px; line-height: 1.45}
.mbpa h1 {font-size: 28px; font-weight: 700; letter-spacing: -.02em; margin: 0}
.mbpa .verdict {display: flex; align-items: baseline; gap: 10px; flex-wrap: wrap;
  margin: 2px 0 14px}
.mbpa .verdict b {font-size: 22px; font-weight: 650; overflow-wrap: anywhere}
.mbpa :is(.quiet, th), .mbpa.quiet {color: var(--body-text-color-subdued); font-weight: 400;
  font-size: 13px}
.mbpa .tag {border-radius: 99px; padding: 1px 10px; font-size: 13px; color: #fff}
.mbpa .bars {display: grid; grid-template-columns: minmax(90px, 34%) 1fr 48px; gap: 8px 12px;
  align-items: center}
.mbpa .name {overflow: hidden; text-overflow: ellipsis; white-space: nowrap; text-align: right}
.mbpa .bar {height: 8px; border-radius: 4px; min-width: 2px; margin: 2px 0}
.mbpa .bar.before {background: #98a1b3; opacity: .55; height: 5px}
.mbpa .number {font-variant-numeric: tabular-nums; text-align: right}
.mbpa table {width: 100%; border-collapse: collapse}
.mbpa td, .mbpa th {padding: 6px 0 6px 16px; text-align: left; vertical-align: baseline}
.mbpa td {border-top: 1px solid var(--border-color-primary)}
.mbpa :is(td, th):first-child {padding-left: 0}
.mbpa th.number {text-align: right}
.mbpa .chips {display: flex; flex-wrap: wrap; gap: 2px 14px}
.mbpa .chip {display: inline-flex; align-items: baseline; overflow-wrap: break-word}
.mbpa td .chip {min-width: 150px}
.mbpa .dot {flex: none; width: 9px; height: 9px; border-radius: 9px; margin-right: 7px}
.mbpa img {display: block; border-radius: 4px; object-fit: contain; background: #8882}
.mbpa.asked {display: flex; gap: 18px}
.mbpa.asked > div {flex: 1; min-width: 0}
.mbpa.asked > img {flex: none; width: 120px; height: 120px}
.mbpa td img {width: 44px; height: 44px}
.mbpa td:has(img) ~ td, .mbpa td:has(img) {vertical-align: middle}
.mbpa img.large {width: 160px; height: 160px}
.mbpa svg {width: 100%; height: auto; display: block}
.mbpa svg text {fill: var(--body-text-color); font-size: 12px}
"""


def title(stats: Mapping[str, object]) -> str:
    """Return the title of the page and a line with counts."""
    line = (
        f"{stats['examples']:,} examples · {stats['labels']} labels · "
        f"{stats['taught']:,} taught since training"
    )
    if stats["read_only"]:
        line += f" · <b>read-only: {escape(str(stats['read_only']))}</b>"
    return f'<div class="mbpa"><h1>mbpa explorer</h1><div class="quiet">{line}</div></div>'


def colours(reason: Reason) -> dict[str, str]:
    """Return a colour for each label shown, used for bars, memories and map alike."""
    return dict(zip((label for label, *_ in rows(reason)), COLOURS, strict=False))


def rows(reason: Reason) -> list[tuple[str, float, float]]:
    """Return labels with their probabilities before and after adaptation, sorted by the latter."""
    before, after = dict(reason.before), dict(reason.answer.top)
    shares = {label: (before.get(label, 0.0), after.get(label, 0.0)) for label in before | after}
    shown = sorted(shares, key=lambda label: (-max(shares[label]), label))[:BARS]
    return [(label, *shares[label]) for label in sorted(shown, key=lambda name: -shares[name][1])]


def answer(reason: Reason, threshold: float, asked: str | None = None) -> str:
    """Return the verdict and bars before and after adaptation, beside the picture, if any."""
    found = rows(reason)
    if not found:
        return '<div class="mbpa">There is no label yet: teach one.</div>'
    colour = colours(reason)
    bars = "".join(
        f'<div class="name" title="{escape(label)}">{escape(label)}</div>'
        f'<div><div class="bar before" style="width: {before:.1%}"></div>'
        f'<div class="bar" style="width: {after:.1%}; background: {colour[label]}"></div></div>'
        f'<div class="number">{percent(after)}<div class="quiet">{percent(before)}</div></div>'
        for label, before, after in found
    )
    legend = "thin and grey: the head alone · coloured: adapted to the memories below"
    body = (
        f'{_verdict(reason, threshold, colour)}<div class="bars">{bars}</div>'
        f'<div class="quiet" style="margin-top: 12px">{legend} · '
        f"the head moved by ‖θˣ − θ‖ = {reason.change:.3g}</div>"
    )
    if asked is None:
        return f'<div class="mbpa">{body}</div>'
    picture = f'<img src="{escape(asked)}" alt="your picture"/>'
    return f'<div class="mbpa asked">{picture}<div>{body}</div></div>'


def _verdict(reason: Reason, threshold: float, colour: Mapping[str, str]) -> str:
    best, share = reason.answer.top[0]
    first = reason.before[0][0] if reason.before else None
    if reason.answer.abstains:
        tag, ground = "abstains", OTHER
        why = f"{percent(share)}, and it answers from {percent(threshold)} on"
    else:
        tag, ground = "answers", colour.get(best, OTHER)
        why = f"{percent(share)} sure"
    if first is not None and first != best:
        why += f" · without its memory: {escape(first)}"
    return (
        f'<div class="verdict"><span class="tag" style="background: {ground}">{tag}</span>'
        f'<b>{breakable(best)}</b><span class="quiet">{why}</span></div>'
    )


def memories(reason: Reason, thumbs: Mapping[int, str] = NONE) -> str:
    """Return a table of the retrieved examples, sorted by falling weight."""
    if not reason.neighbors:
        return '<div class="mbpa quiet">No memory took part.</div>'
    colour = colours(reason)
    near = sorted(reason.neighbors, key=lambda each: -each.weight)
    body = "".join(_memory(each, colour.get(each.label, OTHER), thumbs) for each in near[:MEMORIES])
    more = len(near) - MEMORIES
    rest = f'<div class="quiet" style="padding-top: 6px">and {more} more</div>' if more > 0 else ""
    head = (
        "<th>retrieved memory</th><th>label</th>"
        '<th class="number">weight</th><th class="number">distance</th>'
    )
    return f'<div class="mbpa"><table><tr>{head}</tr>{body}</table>{rest}</div>'


def _memory(near: NearExample, colour: str, thumbs: Mapping[int, str]) -> str:
    return (
        f"<tr><td>{shown(near.id, near.text, thumbs)}</td>"
        f"<td>{_chip(near.label, colour)}</td>"
        f'<td class="number">{percent(near.weight)}</td>'
        f'<td class="number">{near.distance:.2f}</td></tr>'
    )


def shown(
    id: int, text: str | None, thumbs: Mapping[int, str], *, kind: str = "small", most: int = 110
) -> str:
    """Return an example as HTML: its picture, or its text cut to `most` characters."""
    if id in thumbs:
        return f'<img class="{kind}" src="{escape(thumbs[id])}" alt="example {id}"/>'
    return shown_text(id, text, most)


def shown_text(id: int, text: str | None, most: int = 110) -> str:
    """Return the text of an example, escaped and cut to `most` characters."""
    if text is None:
        return f"example {id}"
    return escape(text if len(text) <= most else text[:most].rstrip() + "…")


def breakable(label: str) -> str:
    """Return a label, escaped, with line breaks allowed after underscores."""
    return escape(label).replace("_", "_<wbr/>")


def percent(share: float) -> str:
    """Format a share as a percentage, as short as possible; 0% and 100% are always exact."""
    if share < 0.0005:
        return "0%" if share <= 0 else "&lt;0.1%"
    if share > 0.995:
        return "100%" if share >= 1 else "&gt;99%"
    return f"{100 * share:.0f}%" if share >= 0.0995 else f"{100 * share:.1f}%"


def _chip(label: str, colour: str) -> str:
    dot = f'<span class="dot" style="background: {colour}"></span>'
    return f'<span class="chip">{dot}<span>{breakable(label)}</span></span>'


@dataclass(frozen=True, eq=False)
class Plane:
    """The two directions in which keys vary most, and the part of their plane that is shown."""

    mean: Float[Tensor, "D"]
    axes: Float[Tensor, "D 2"]
    low: Float[Tensor, "2"]
    high: Float[Tensor, "2"]

    @classmethod
    def fitted(cls, keys: Float[Tensor, "M D"]) -> Plane:
        """Fit a plane by principal components, with signs that do not depend on the solver."""
        keys = keys.cpu().double()
        mean = keys.mean(0)
        centred = keys - mean
        axes = torch.linalg.eigh(centred.T @ centred).eigenvectors.flip(1)[:, :2]
        if axes.shape[1] < 2:
            axes = torch.cat([axes, torch.zeros_like(axes)], 1)
        axes = axes * torch.where(axes.gather(0, axes.abs().argmax(0)[None]) < 0, -1.0, 1.0)
        places = centred @ axes
        return cls(mean, axes, places.amin(0), places.amax(0))

    def __call__(self, keys: Float[Tensor, "B D"]) -> Float[Tensor, "B 2"]:
        """Return the positions of keys on the map, clamped to the fitted range."""
        places = (keys.cpu().double() - self.mean) @ self.axes
        shares = (places - self.low) / (self.high - self.low).clamp(min=1e-9)
        size = torch.tensor([WIDTH, HEIGHT], dtype=torch.float64) - 2 * MARGIN
        return MARGIN + shares.clamp(0, 1) * size


class Map:
    """A map of the memory. Its axes are computed once, so that no point moves during teaching."""

    def __init__(self, classifier: Classifier, noun: str = "sentence") -> None:
        self._classifier, self._noun = classifier, noun
        self._plane: Plane | None = None
        self._change = -1
        self._places: dict[int, tuple[float, float]] = {}
        self._labels: dict[int, str] = {}
        self._lock = threading.Lock()

    def around(
        self,
        item: str | bytes | None = None,
        reason: Reason | None = None,
        thumbs: Mapping[int, str] = NONE,
    ) -> str:
        """Draw the map, with the query (a text or a picture) and its neighbours if there is one."""
        with self._lock:
            self._look()
            if self._plane is None or not self._places:
                return '<div class="mbpa quiet">The memory is empty.</div>'
            query = None
            if reason is not None and item is not None:
                key = self._classifier.encode([item])
                query = tuple(self._plane(key)[0].tolist())
            return drawn(self._places, self._labels, query, reason, thumbs, self._noun)

    def _look(self) -> None:
        """Update the points if the memory has changed."""
        change = self._classifier.counts.change  # the memory's; the journal may be a step ahead
        if change == self._change:
            return
        examples = self._classifier.examples()
        ids, keys = self._classifier.entries()
        if ids and self._plane is None:
            self._plane = Plane.fitted(keys)
        places = self._plane(keys).tolist() if self._plane else []
        self._places = {id: (x, y) for id, (x, y) in zip(ids, places, strict=True)}
        self._labels = {each.id: each.label for each in examples}
        self._change = change


def drawn(
    places: Mapping[int, tuple[float, float]],
    labels: Mapping[int, str],
    query: Sequence[float] | None,
    reason: Reason | None,
    thumbs: Mapping[int, str] = NONE,
    noun: str = "sentence",
) -> str:
    """Draw all examples pale, in the colours of the answer, and the retrieved ones clearly.

    Args:
        noun: word for the query, such as "sentence".
    """
    colour = colours(reason) if reason is not None else {}
    layers: dict[str, list[str]] = {ink: [] for ink in (OTHER, *colour.values())}
    ids, shown = list(places), min(len(places), MOST_POINTS)
    for id in (ids[place * len(ids) // shown] for place in range(shown)):
        x, y = places[id]
        layers[colour.get(labels.get(id, ""), OTHER)].append(f"M{x:.0f} {y:.0f}h0")
    # One path per colour; its points are lines of zero length with round ends: small and fast.
    parts = [
        f'<path d="{"".join(points)}" stroke="{ink}" stroke-width="4" stroke-linecap="round" '
        f'stroke-opacity="{0.3 if ink == OTHER else 0.6}" fill="none"/>'
        for ink, points in layers.items()
        if points
    ]
    if reason is not None and query is not None:
        parts += _neighborhood(places, query, reason, colour, thumbs, noun)
    size = f'viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}"'
    return (
        f'<div class="mbpa"><svg {size} role="img" aria-label="Map of the memory">'
        f"{''.join(parts)}</svg>{_legend(colour, noun)}</div>"
    )


def _neighborhood(
    places: Mapping[int, tuple[float, float]],
    query: Sequence[float],
    reason: Reason,
    colour: Mapping[str, str],
    thumbs: Mapping[int, str],
    noun: str,
) -> list[str]:
    near = [each for each in reason.neighbors if each.id in places]
    most = max((each.weight for each in near), default=1.0) or 1.0
    x, y = query
    lines, dots = [], []
    for each in sorted(near, key=lambda each: each.weight):  # largest weight on top
        ink = colour.get(each.label, OTHER)
        a, b = places[each.id]
        share = each.weight / most
        title = f"<title>{escape(each.label)}: {shown_text(each.id, each.text)}</title>"
        lines.append(
            f'<path d="M{x:.1f} {y:.1f}L{a:.1f} {b:.1f}" stroke="{ink}" '
            f'stroke-opacity="{0.15 + 0.45 * share:.2f}"/>'
        )
        if each.id in thumbs:
            dots.append(_pinned(a, b, ink, thumbs[each.id], title))
            continue
        dots.append(
            f'<circle cx="{a:.1f}" cy="{b:.1f}" r="{3 + 3 * share:.1f}" fill="{ink}" '
            f'stroke="var(--background-fill-primary)">{title}</circle>'
        )
    sign = (
        f'<circle class="query" cx="{x:.1f}" cy="{y:.1f}" r="7" fill="var(--body-text-color)" '
        'stroke="var(--background-fill-primary)" stroke-width="2">'
        f"<title>your {noun}</title></circle>"
    )
    return [*lines, *dots, sign]


def _pinned(x: float, y: float, ink: str, address: str, title: str) -> str:
    """Return a small picture on the map, framed in the colour of its label."""
    box = f'x="{x - THUMB / 2:.1f}" y="{y - THUMB / 2:.1f}" width="{THUMB}" height="{THUMB}"'
    return (
        f'<g>{title}<image {box} href="{escape(address)}"/>'
        f'<rect {box} fill="none" stroke="{ink}" stroke-width="2"/></g>'
    )


def _legend(colour: Mapping[str, str], noun: str) -> str:
    if not colour:
        return '<div class="quiet">every point an example; near ones are alike</div>'
    inks = {f"your {noun}": "var(--body-text-color)"} | dict(colour)
    return f'<div class="quiet chips">{"".join(_chip(*named) for named in inks.items())}</div>'


def opinion(found: Opinion, thumbs: Mapping[int, str] = NONE) -> str:
    """Return an example with the vote of its neighbours."""
    example = found.example
    says = (
        f"Its neighbours agree, by {percent(found.share)} of their vote."
        if found.label == example.label
        else f"Its neighbours say <b>{breakable(found.label)}</b>, by {percent(found.share)} of "
        f"their vote; {percent(found.own)} speak for its own label."
    )
    return (
        f'<div class="mbpa"><div style="font-size: 17px; margin-bottom: 8px">'
        f"{shown(example.id, example.text, thumbs, kind='large', most=600)}</div>"
        f'<div class="quiet">labelled</div><b>{breakable(example.label)}</b>'
        f'<div style="margin-top: 8px">{says}</div></div>'
    )
