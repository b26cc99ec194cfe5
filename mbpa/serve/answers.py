"""Input and output types of a classifier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Lesson:
    """An example to teach: a label with a text or picture, a key, or both.

    If both are given, the key is used and nothing is encoded.
    """

    label: str
    text: str | None = None
    key: Float[Tensor, "D"] | None = None
    image: bytes | None = None
    """Picture as returned by `mbpa.encoders.pictures.standardize`, in place of a text."""

    @property
    def item(self) -> str | bytes | None:
        """The text or the picture."""
        return self.text if self.image is None else self.image


@dataclass(frozen=True)
class Answer:
    """The answer to one query."""

    label: str | None
    """The most probable label, or `None` if its probability is below the threshold (abstention)."""
    confidence: float
    """Probability of the most probable label."""
    top: tuple[tuple[str, float], ...]
    """The most probable labels and their probabilities."""
    in_scope: float | None = None
    """Probability that the query belongs to any label, by how near their examples are; all other
    probabilities include it. `None` if the run does not estimate it."""

    @property
    def abstains(self) -> bool:
        return self.label is None


@dataclass(frozen=True)
class NearExample:
    """An example that took part in an answer."""

    id: int
    label: str
    text: str | None
    weight: float
    """Share of the example among those that took part. If the run has a learner: among the nearest
    examples, by similarity."""
    distance: float
    """Euclidean distance between keys, not squared."""


@dataclass(frozen=True)
class Reason:
    """Why an answer came out as it did."""

    answer: Answer
    before: tuple[tuple[str, float], ...]
    """The most probable labels according to the head alone. If the run has a learner, the head only
    knows the labels that it was trained with. Else it also has rows for taught labels, and answers
    without adaptation."""
    neighbors: tuple[NearExample, ...]
    change: float
    """‖θˣ − θ‖: the distance that the head's parameters moved for this query; 0 if the run has a
    learner, which adapts nothing."""


def name_answers(
    labels: Sequence[str],
    logs: Float[Tensor, "B C"],
    top: int,
    threshold: float,
    in_scope: Float[Tensor, "B"] | None = None,
) -> list[Answer]:
    """Return one answer per row of log-probabilities."""
    if not labels:
        return [Answer(None, 0.0, ()) for _ in logs]
    # Ties keep the order of the labels, which topk does not guarantee.
    order = logs.argsort(dim=1, descending=True, stable=True)[:, : max(1, top)]
    probabilities = logs.gather(1, order).exp().tolist()
    scopes = [None] * len(logs) if in_scope is None else in_scope.tolist()
    answers = []
    for columns, shares, scope in zip(order.tolist(), probabilities, scopes, strict=True):
        named = tuple((labels[c], p) for c, p in zip(columns, shares, strict=True))
        label, confidence = named[0]
        chosen = label if confidence >= threshold else None
        answers.append(Answer(chosen, confidence, named[:top], scope))
    return answers
