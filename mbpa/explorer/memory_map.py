"""A map of the memory as SVG: every example is a point, and examples near each other are alike."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mbpa.explorer.rendering import (
    MAX_SHORT_CHARACTERS,
    NO_THUMBS,
    OTHER_COLOUR,
    assign_colours,
    describe_example,
    make_environment,
    render_note,
)
from mbpa.serve.answers import Reason
from mbpa.serve.classifier import Classifier

MAX_MAP_POINTS = 10_000  # larger memories are sampled evenly
WIDTH, HEIGHT, MARGIN = 520.0, 360.0, 14.0  # of the map, in SVG units
THUMB_SIDE = 26.0  # of a picture on the map, in SVG units

# One path per colour; its points are lines of zero length with round ends: small and fast.
_MAP = make_environment({}).from_string("""
{% from "parts" import show_chip %}
<div class="mbpa"><svg viewBox="0 0 {{ width }} {{ height }}" role="img"
 aria-label="Map of all examples">
{% for layer in layers %}
<path d="{{ layer.points }}" stroke="{{ layer.colour }}" stroke-width="4" stroke-linecap="round"
 stroke-opacity="{{ layer.opacity }}" fill="none"/>
{% endfor %}
{% for near in neighbors %}
<path d="M{{ '%.1f %.1f' % query }}L{{ '%.1f %.1f' % near.place }}" stroke="{{ near.colour }}"
 stroke-opacity="{{ '%.2f' % (0.15 + 0.45 * near.share) }}"/>
{% endfor %}
{% for near in neighbors %}
{% set x, y = near.place %}
{% if near.thumb %}
{% set box = {"x": "%.1f" % (x - side / 2), "y": "%.1f" % (y - side / 2), "width": side,
 "height": side} %}
<g><title>{{ near.label }}: {{ near.text }}</title>
<image{{ box | xmlattr }} href="{{ near.thumb }}"/>
<rect{{ box | xmlattr }} fill="none" stroke="{{ near.colour }}" stroke-width="2"/></g>
{% else %}
<circle cx="{{ '%.1f' % x }}" cy="{{ '%.1f' % y }}" r="{{ '%.1f' % (3 + 3 * near.share) }}"
 fill="{{ near.colour }}" stroke="var(--background-fill-primary)"
 ><title>{{ near.label }}: {{ near.text }}</title></circle>
{% endif %}
{% endfor %}
{% if query %}
<circle class="query" cx="{{ '%.1f' % query[0] }}" cy="{{ '%.1f' % query[1] }}" r="7"
 fill="var(--body-text-color)" stroke="var(--background-fill-primary)" stroke-width="2"
 ><title>your {{ noun }}</title></circle>
{% endif %}
</svg>
{% if legend %}
<div class="quiet chips">{{ show_chip("your " ~ noun, "var(--body-text-color)") }}
{% for label, colour in legend.items() %}{{ show_chip(label, colour) }}{% endfor %}
{{ show_chip("other labels", other_colour) }}</div>
{% else %}
<div class="quiet">Each point is an example. Examples near each other are similar.</div>
{% endif %}
</div>
""")


@dataclass(frozen=True, eq=False)
class Plane:
    """The two directions in which keys vary most, and the part of their plane that is shown."""

    mean: Float[Tensor, "D"]
    axes: Float[Tensor, "D 2"]
    low: Float[Tensor, "2"]
    high: Float[Tensor, "2"]

    @classmethod
    def fit(cls, keys: Float[Tensor, "M D"]) -> Plane:
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


class MemoryMap:
    """A map of the memory. Its axes are computed once, so that no point moves during teaching."""

    def __init__(self, classifier: Classifier, noun: str = "sentence") -> None:
        self._classifier, self._noun = classifier, noun
        self._plane: Plane | None = None
        self._change = -1
        self._places: dict[int, tuple[float, float]] = {}
        self._labels: dict[int, str] = {}
        self._lock = threading.Lock()

    def draw(
        self,
        item: str | bytes | None = None,
        reason: Reason | None = None,
        thumbs: Mapping[int, str] = NO_THUMBS,
    ) -> str:
        """Draw the map, with the query (a text or a picture) and its neighbours if there is one."""
        with self._lock:
            self._update()
            if self._plane is None or not self._places:
                return render_note("The memory is empty.")
            query = None
            if reason is not None and item is not None:
                key = self._classifier.encode([item])
                x, y = self._plane(key)[0].tolist()
                query = x, y
            return draw_map(self._places, self._labels, query, reason, thumbs, self._noun)

    def _update(self) -> None:
        """Update the points if the memory has changed."""
        change = self._classifier.counts.change  # the memory's; the journal may be a step ahead
        if change == self._change:
            return
        examples = self._classifier.examples()
        ids, keys = self._classifier.entries()
        if ids and self._plane is None:
            self._plane = Plane.fit(keys)
        places = self._plane(keys).tolist() if self._plane else []
        self._places = {id: (x, y) for id, (x, y) in zip(ids, places, strict=True)}
        self._labels = {each.id: each.label for each in examples}
        self._change = change


def draw_map(
    places: Mapping[int, tuple[float, float]],
    labels: Mapping[int, str],
    query: tuple[float, float] | None,
    reason: Reason | None,
    thumbs: Mapping[int, str] = NO_THUMBS,
    noun: str = "sentence",
) -> str:
    """Draw all examples pale, in the colours of the answer, and the retrieved ones clearly.

    Args:
        noun: word for the query, such as "sentence".
    """
    colours = assign_colours(reason) if reason is not None else {}
    has_query = reason is not None and query is not None
    return _MAP.render(
        width=f"{WIDTH:.0f}",
        height=f"{HEIGHT:.0f}",
        side=THUMB_SIDE,
        layers=_list_layers(places, labels, colours),
        query=query if has_query else None,
        neighbors=_list_neighbors(places, reason, colours, thumbs) if has_query else [],
        legend={name: colour for name, colour in colours.items() if colour != OTHER_COLOUR},
        other_colour=OTHER_COLOUR,
        noun=noun,
    )


def _list_layers(
    places: Mapping[int, tuple[float, float]], labels: Mapping[int, str], colours: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return the points of each colour as an SVG path."""
    points: dict[str, list[str]] = {colour: [] for colour in (OTHER_COLOUR, *colours.values())}
    ids, shown = list(places), min(len(places), MAX_MAP_POINTS)
    for id in (ids[place * len(ids) // shown] for place in range(shown)):
        x, y = places[id]
        points[colours.get(labels.get(id, ""), OTHER_COLOUR)].append(f"M{x:.0f} {y:.0f}h0")
    return [
        {
            "points": "".join(some),
            "colour": colour,
            "opacity": 0.3 if colour == OTHER_COLOUR else 0.6,
        }
        for colour, some in points.items()
        if some
    ]


def _list_neighbors(
    places: Mapping[int, tuple[float, float]],
    reason: Reason | None,
    colours: Mapping[str, str],
    thumbs: Mapping[int, str],
) -> list[dict[str, Any]]:
    """Return the retrieved examples that are on the map, the one with the largest weight last."""
    near = [each for each in (reason.neighbors if reason else ()) if each.id in places]
    most = max((each.weight for each in near), default=1.0) or 1.0
    return [
        {
            **describe_example(each.id, each.text, thumbs, MAX_SHORT_CHARACTERS),
            "label": each.label,
            "colour": colours.get(each.label, OTHER_COLOUR),
            "place": places[each.id],
            "share": each.weight / most,
        }
        for each in sorted(near, key=lambda each: each.weight)
    ]
