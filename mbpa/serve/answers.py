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
    distance: float
    """Euclidean distance between keys, not squared."""


@dataclass(frozen=True)
class Reason:
    """Why an answer came out as it did."""

    answer: Answer
    before: tuple[tuple[str, float], ...]
    """The most probable labels according to the head alone, without adaptation. The head has rows
    for taught labels, too, computed from their examples if the run supports it."""
    neighbors: tuple[NearExample, ...]
    change: float
    """‖θˣ − θ‖: the distance that the head's parameters moved for this query."""


def name_answers(
    labels: Sequence[str], logs: Float[Tensor, "B C"], top: int, threshold: float
) -> list[Answer]:
    """Return one answer per row of log-probabilities."""
    if not labels:
        return [Answer(None, 0.0, ()) for _ in logs]
    # Ties keep the order of the labels, which topk does not guarantee.
    order = logs.argsort(dim=1, descending=True, stable=True)[:, : max(1, top)]
    top_probabilities = logs.gather(1, order).exp()
    answers = []
    for columns, probabilities in zip(order.tolist(), top_probabilities.tolist(), strict=True):
        named = tuple((labels[c], p) for c, p in zip(columns, probabilities, strict=True))
        label, confidence = named[0]
        answers.append(Answer(label if confidence >= threshold else None, confidence, named[:top]))
    return answers
