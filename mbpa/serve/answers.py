"""Input and output types of a classifier, and the checks that its input must pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from mbpa.encoders import image
from mbpa.serve.journal import InputError

MOST_TEXT, MOST_LABEL = 10_000, 200  # characters
MOST_FILE = 6_000_000  # bytes per picture, so that one in base64 fits into a request
MOST_PIXELS = 2 * image.MOST_PIXELS  # total over all pictures of one call


@dataclass(frozen=True)
class Lesson:
    """An example to teach: a label with a text or picture, a key, or both.

    If both are given, the key is used and nothing is encoded.
    """

    label: str
    text: str | None = None
    key: Float[Tensor, "D"] | None = None
    image: bytes | None = None
    """Picture as returned by `mbpa.encoders.image.kept`, in place of a text."""

    @property
    def said(self) -> str | bytes | None:
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


def named_answers(
    labels: Sequence[str], logs: Float[Tensor, "B C"], top: int, threshold: float
) -> list[Answer]:
    """Return one answer per row of log-probabilities."""
    if not labels:
        return [Answer(None, 0.0, ()) for _ in logs]
    # Ties keep the order of the labels, which topk does not guarantee.
    order = logs.argsort(dim=1, descending=True, stable=True)[:, : max(1, top)]
    shares = logs.gather(1, order).exp()
    answers = []
    for columns, probabilities in zip(order.tolist(), shares.tolist(), strict=True):
        named = tuple((labels[c], p) for c, p in zip(columns, probabilities, strict=True))
        label, confidence = named[0]
        answers.append(Answer(label if confidence >= threshold else None, confidence, named[:top]))
    return answers


def check_text(text: str) -> None:
    """Raise `InputError` if a text cannot be classified."""
    if not text.strip():
        raise InputError("a text must not be empty")
    if len(text) > MOST_TEXT:
        raise InputError(f"a text must have at most {MOST_TEXT} characters, got {len(text)}")
    _check_characters("a text", text, allowed="\t\n\r")


def check_picture(picture: bytes) -> None:
    """Raise `InputError` if a file is not in the form that `mbpa.encoders.image.kept` returns."""
    try:
        image.require_kept(picture)
    except image.PictureError as error:
        raise InputError(str(error)) from error


def check_label(label: str) -> None:
    """Raise `InputError` if a string is not a valid label."""
    if not label.strip():
        raise InputError("a label must not be empty")
    if len(label) > MOST_LABEL:
        raise InputError(f"a label must have at most {MOST_LABEL} characters, got {len(label)}")
    _check_characters("a label", label, allowed="")


def kept_pictures(files: Sequence[bytes]) -> list[bytes]:
    """Convert received image files to the form in which they are stored.

    Run this in a thread of its own: a large picture takes a quarter of a second.

    Raises:
        InputError: a file is too large or cannot be read as a picture.
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
