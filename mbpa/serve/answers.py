"""What a classifier is told and what it says, in names and numbers; and what it cannot be told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from mbpa.encoders import image
from mbpa.serve.journal import InputError

MOST_TEXT, MOST_LABEL = 10_000, 200  # characters
MOST_FILE = 6_000_000  # bytes of a picture: in base64 one fits into a request
MOST_PIXELS = 2 * image.MOST_PIXELS  # of the pictures of a call together


@dataclass(frozen=True)
class Lesson:
    """An example to be taught: a label, and a text or picture, its key, or both (the key then
    counts)."""

    label: str
    text: str | None = None
    key: Float[Tensor, "D"] | None = None
    image: bytes | None = None
    """A picture as `mbpa.encoders.image.kept` gives it, in place of a text."""

    @property
    def said(self) -> str | bytes | None:
        """The text or the picture."""
        return self.text if self.image is None else self.image


@dataclass(frozen=True)
class Answer:
    """What is said of one query."""

    label: str | None
    """The most probable, or `None` where that is not probable enough: it abstains."""
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
    """Euclidean, between keys; not squared."""


@dataclass(frozen=True)
class Reason:
    """Why an answer came out as it did."""

    answer: Answer
    before: tuple[tuple[str, float], ...]
    """What the head alone would say: the most probable labels. Of taught ones it knows the row that
    their examples give, if the run has such."""
    neighbors: tuple[NearExample, ...]
    change: float
    """‖θˣ − θ‖: how far the head's parameters moved for this query."""


def named_answers(
    labels: Sequence[str], logs: Float[Tensor, "B C"], top: int, threshold: float
) -> list[Answer]:
    """Answers from log p of each label."""
    if not labels:
        return [Answer(None, 0.0, ()) for _ in logs]
    # Equally probable ones in the order of the labels, which topk does not promise.
    order = logs.argsort(dim=1, descending=True, stable=True)[:, : max(1, top)]
    shares = logs.gather(1, order).exp()
    answers = []
    for columns, probabilities in zip(order.tolist(), shares.tolist(), strict=True):
        named = tuple((labels[c], p) for c, p in zip(columns, probabilities, strict=True))
        label, confidence = named[0]
        answers.append(Answer(label if confidence >= threshold else None, confidence, named[:top]))
    return answers


def check_text(text: str) -> None:
    """`InputError` for a text that cannot be classified."""
    if not text.strip():
        raise InputError("a text must not be empty")
    if len(text) > MOST_TEXT:
        raise InputError(f"a text must have at most {MOST_TEXT} characters, got {len(text)}")
    _check_characters("a text", text, allowed="\t\n\r")


def check_picture(picture: bytes) -> None:
    """`InputError` for a file that is not as `mbpa.encoders.image.kept` gives them."""
    try:
        image.require_kept(picture)
    except image.PictureError as error:
        raise InputError(str(error)) from error


def check_label(label: str) -> None:
    """`InputError` for what cannot be the name of a label."""
    if not label.strip():
        raise InputError("a label must not be empty")
    if len(label) > MOST_LABEL:
        raise InputError(f"a label must have at most {MOST_LABEL} characters, got {len(label)}")
    _check_characters("a label", label, allowed="")


def kept_pictures(files: Sequence[bytes]) -> list[bytes]:
    """Files that somebody sent, as they are kept; `InputError` for what cannot be.

    For a thread of its own: a large one takes a quarter of a second.
    """
    for number, file in enumerate(files, 1):
        if len(file) > MOST_FILE:
            raise InputError(
                f"{_place(number, files)}a picture must have at most {MOST_FILE:,} bytes, "
                f"got {len(file):,}"
            )
    total = sum(map(image.pixels_of, files))
    if len(files) > 1 and total > MOST_PIXELS:
        raise InputError(
            f"pictures must have at most {MOST_PIXELS:,} pixels together, got {total:,}"
        )
    pictures = []
    for number, file in enumerate(files, 1):
        try:
            pictures.append(image.kept(file))
        except image.PictureError as error:
            raise InputError(f"{_place(number, files)}{error}") from error
    return pictures


def _place(number: int, files: Sequence[bytes]) -> str:
    return f"picture {number} of {len(files)}: " if len(files) > 1 else ""


def _check_characters(what: str, text: str, allowed: str) -> None:
    for character in text:
        code = ord(character)
        is_control = code < 32 or 127 <= code < 160
        if (is_control and character not in allowed) or 0xD800 <= code < 0xE000:
            raise InputError(f"{what} must have no control characters, got U+{code:04X}")
