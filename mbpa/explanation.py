"""Explanations of predictions: neighbours, their weights, and the prediction before and after."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from mbpa.adaptation import Adaptation
from mbpa.memory import Neighbors
from mbpa.predictors import Part


@dataclass(frozen=True, eq=False)
class Explanation:
    """The result of `MbPA.explain` for B queries; index or iterate to get one query at a time.

    Print it for a readable summary. If class names were passed to `explain`, they are printed
    instead of label numbers.
    """

    before: Float[Tensor, "B *C"]
    """The parametric prediction: log-probabilities, or values for regression."""
    after: Float[Tensor, "B *C"]
    """The final prediction, in the same form."""
    neighbors: Neighbors | None
    """The neighbours, or `None` if the predictor uses none. Their distances are squared; printed
    distances are not."""
    parts: tuple[Part, ...]
    """The components of the prediction; one, unless the predictor is a mixture."""
    has_labels: bool
    """Whether the values are labels, rather than regression targets."""
    labels: tuple[str, ...] | None = None
    """Names of the classes, if they were passed to `explain`."""

    @property
    def weights(self) -> Float[Tensor, "B K"] | None:
        """Weights of the neighbours in the adaptation if there was one, else in the vote."""
        found = [part for part in self.parts if part.weights is not None]
        found.sort(key=lambda part: part.adaptation is None)
        return found[0].weights if found else None

    @property
    def change(self) -> Float[Tensor, "B"] | None:
        """The distance that the parameters moved, ‖θˣ − θ‖; `None` if nothing adapted."""
        changes = [part.adaptation.change for part in self.parts if part.adaptation]
        return changes[0] if changes else None

    @property
    def path(self) -> str | None:
        """Name of the method that computed the adaptation; `None` if nothing adapted."""
        paths = [part.adaptation.path for part in self.parts if part.adaptation]
        return paths[0] if paths else None

    def __len__(self) -> int:
        return len(self.before)

    def __getitem__(self, query: int) -> Explanation:
        if not -len(self) <= query < len(self):
            raise IndexError(f"query must be below {len(self)}, got {query}")
        start = query % len(self)
        rows = slice(start, start + 1)
        return replace(
            self,
            before=self.before[rows],
            after=self.after[rows],
            neighbors=self.neighbors and self.neighbors.rows(rows),
            parts=tuple(part.rows(rows) for part in self.parts),
        )

    def __iter__(self) -> Iterator[Explanation]:
        return (self[query] for query in range(len(self)))

    def __str__(self) -> str:
        if len(self) == 1:
            return "\n".join(_write_lines(self))
        return "\n\n".join(f"query {i}\n{one}" for i, one in enumerate(self))


MAX_PRINTED_NEIGHBORS = 5


def _write_lines(one: Explanation) -> Iterator[str]:
    yield f"before  {_format_prediction(one, one.before[0])}"
    yield f"after   {_format_prediction(one, one.after[0])}"
    for part in one.parts:
        share = "" if len(one.parts) == 1 else f"{part.share:.0%} "
        how = ""
        if part.adaptation is not None:
            assert part.adaptation.change is not None  # explain asks for it
            moved = float(part.adaptation.change[0])
            how = f", parameters moved by {moved:.3g} ({_describe_path(part.adaptation)})"
            how += _describe_report(part.adaptation)
        if len(one.parts) > 1 or how:
            yield f"{share}{part.name}{how}"
    found = 0 if one.neighbors is None else int(one.neighbors.mask.sum())
    if one.neighbors is None or not found:
        yield "no neighbours: this is the parametric prediction"
        return
    yield f"neighbours ({min(MAX_PRINTED_NEIGHBORS, found)} of {found})"
    weights = [] if one.weights is None else one.weights[0].tolist()
    for i in range(min(MAX_PRINTED_NEIGHBORS, found)):
        weight = f"  weight {weights[i]:.3f}" if i < len(weights) else ""
        yield (
            f"  id {int(one.neighbors.ids[0, i])}: {_format_value(one, one.neighbors.values[0, i])}"
            f"{weight}  distance {float(one.neighbors.distances[0, i]) ** 0.5:.3g}"
        )


def _describe_path(adaptation: Adaptation) -> str:
    """Describe how the adaptation was computed, with estimated times of it and the alternatives."""
    others = dict(sorted(adaptation.seconds.items(), key=lambda pair: pair[1]))
    own = others.pop(adaptation.path, 0.0)
    beside = "".join(f", {name} {_format_micros(took)}" for name, took in others.items())
    return f"path: {adaptation.path}, estimated {_format_micros(own)} µs per query{beside}"


def _describe_report(adaptation: Adaptation) -> str:
    """Describe what an active vocabulary left out; nothing if there was none."""
    if adaptation.report is None:
        return ""
    report, classes = adaptation.report, adaptation.outputs.shape[1]
    if int(report.sizes[0]) == classes:
        return f", all {classes:,} classes"
    return (
        f", {int(report.sizes[0]):,} of {classes:,} classes, others have probability "
        f"{float(report.rest[0]):.2g}, log-probabilities are within {float(report.bound[0]):.2g} "
        "of the exact ones"
    )


def _format_micros(seconds: float) -> str:
    micros = 1e6 * seconds
    return f"{micros:.2g}" if micros < 99.5 else f"{micros:,.0f}"


def _format_prediction(one: Explanation, prediction: Tensor) -> str:
    if not one.has_labels:
        return _format_value(one, prediction)
    top = prediction.exp().topk(min(3, len(prediction)))
    return ", ".join(
        f"{_get_name(one.labels, int(label))} {float(share):.1%}"
        for share, label in zip(top.values, top.indices, strict=True)
    )


def _format_value(one: Explanation, value: Tensor) -> str:
    if one.has_labels:
        return _get_name(one.labels, int(value))
    numbers = ", ".join(f"{number:.4g}" for number in value.flatten()[:8].tolist())
    return f"[{numbers}{', …' if value.numel() > 8 else ''}]"


def _get_name(labels: Sequence[str] | None, label: int) -> str:
    return labels[label] if labels is not None and label < len(labels) else f"class {label}"
