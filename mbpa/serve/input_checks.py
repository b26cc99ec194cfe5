"""Checks that input must pass before it is classified, taught or stored.

Each check raises `InputError`, whose message is meant for the person who sent the input.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float

from mbpa.encoders import pictures
from mbpa.modules.new_rows import NORM_TOLERANCE
from mbpa.serve.answers import Lesson
from mbpa.serve.journal import InputError
from mbpa.serve.run_info import MAX_KEY_NORM, compute_norms

MAX_TEXT_CHARACTERS = 10_000
MAX_LABEL_CHARACTERS = 200
MAX_PICTURE_BYTES = 6_000_000  # such a picture fits into a request in base64
MAX_PIXELS_PER_CALL = 2 * pictures.MAX_PIXELS


def check_text(text: str) -> None:
    """Raise `InputError` if a text cannot be classified."""
    if not text.strip():
        raise InputError("a text must not be empty")
    if len(text) > MAX_TEXT_CHARACTERS:
        raise InputError(
            f"a text must have at most {MAX_TEXT_CHARACTERS} characters, got {len(text)}"
        )
    _check_characters("a text", text, allowed="\t\n\r")


def check_label(label: str) -> None:
    """Raise `InputError` if a string is not a valid label."""
    if not label.strip():
        raise InputError("a label must not be empty")
    if len(label) > MAX_LABEL_CHARACTERS:
        raise InputError(
            f"a label must have at most {MAX_LABEL_CHARACTERS} characters, got {len(label)}"
        )
    _check_characters("a label", label, allowed="")


def check_picture(picture: bytes) -> None:
    """Raise `InputError` if a file is not in the form returned by `pictures.standardize`."""
    try:
        pictures.require_standard_form(picture)
    except pictures.PictureError as error:
        raise InputError(str(error)) from error


def check_total_pixels(files: Sequence[bytes]) -> None:
    """Raise `InputError` if the files of one call have too many pixels; none is decompressed."""
    total = sum(map(pictures.count_pixels, files)) if len(files) > 1 else 0
    if total > MAX_PIXELS_PER_CALL:
        raise InputError(
            f"the pictures of one call must have at most {MAX_PIXELS_PER_CALL:,} pixels in total, "
            f"got {total:,}"
        )


def standardize_picture(file: bytes) -> bytes:
    """Convert a received image file to the form in which it is stored.

    Run this in a thread of its own: a large picture takes a quarter of a second.

    Raises:
        InputError: the file is too large or cannot be read as a picture.
    """
    if len(file) > MAX_PICTURE_BYTES:
        raise InputError(
            f"a picture must have at most {MAX_PICTURE_BYTES:,} bytes, got {len(file):,}"
        )
    try:
        return pictures.standardize(file)
    except pictures.PictureError as error:
        raise InputError(str(error)) from error


@contextlib.contextmanager
def naming_picture(number: int, count: int) -> Iterator[None]:
    """Say in error messages which picture of a call is meant, if there are several."""
    try:
        yield
    except InputError as error:
        if count == 1:
            raise
        raise InputError(f"picture {number} of {count}: {error}") from error


def _check_characters(what: str, text: str, allowed: str) -> None:
    for character in text:
        code = ord(character)
        is_control = code < 32 or 127 <= code < 160
        if (is_control and character not in allowed) or 0xD800 <= code < 0xE000:
            raise InputError(f"{what} must not contain control characters, got U+{code:04X}")


@dataclass(frozen=True)
class Limits:
    """How much a run can hold and a call can add."""

    examples: int = 1_000_000
    labels: int = 10_000
    new_labels_per_call: int = 100


@dataclass(frozen=True)
class InputChecks:
    """Checks of the input of one run."""

    takes: str | None
    """Kind of items the run accepts, "texts" or "images"; `None`: embeddings only."""
    key_dim: int
    requires_unit_norm: bool
    """Whether keys must have norm 1, as those of an encoder have."""
    limits: Limits

    def check_kind(self, kind: str) -> None:
        """Raise `InputError` if the run does not take this kind of items, "texts" or "images"."""
        if self.takes is None:
            raise InputError("this run takes embeddings only: it was made without an encoder")
        if kind != self.takes:
            raise InputError(f"this run takes {self.takes}, not {kind}")

    def check_item(self, item: str | bytes) -> None:
        """Raise `InputError` if this run cannot classify the item."""
        self.check_kind(_get_kind(item))
        if isinstance(item, str):
            check_text(item)

    def check_keys(self, keys: Float[np.ndarray, "B D"]) -> None:
        """Raise `InputError` for keys that no encoder would return."""
        if keys.ndim != 2 or keys.shape[1] != self.key_dim:
            raise InputError(f"keys must have {self.key_dim} numbers each, got {keys.shape[-1]}")
        norms = compute_norms(keys)
        if not (norms < MAX_KEY_NORM).all():
            raise InputError(f"keys must be finite, with a norm below {MAX_KEY_NORM:.0e}")
        deviations = np.abs(norms - 1)
        if self.requires_unit_norm and len(keys) and deviations.max() > NORM_TOLERANCE:
            worst = norms[deviations.argmax()]
            raise InputError(f"keys must have norm 1, as the run's own have, got {worst:.3g}")

    def check_lessons(self, lessons: Sequence[Lesson]) -> None:
        """Raise `InputError` if this run cannot learn one of the lessons."""
        for lesson in lessons:
            check_label(lesson.label)
            if lesson.text is not None and lesson.image is not None:
                raise InputError(f"an example of {lesson.label!r} has both text and image")
            if lesson.item is not None:
                self._check_lesson_item(lesson.item, has_key=lesson.key is not None)
            elif lesson.key is None:
                raise InputError(f"an example of {lesson.label!r} has neither text nor key")
            if lesson.key is not None:
                self.check_keys(lesson.key[None].detach().cpu().to(torch.float32).numpy())

    def check_room(
        self, examples: int, labels: Collection[str], added: int, added_labels: set[str]
    ) -> None:
        """Raise `InputError` if a run of these examples and labels cannot take the added ones."""
        new = added_labels - set(labels)
        if examples + added > self.limits.examples:
            raise InputError(
                f"a run can hold at most {self.limits.examples} examples, and this one has "
                f"{examples}"
            )
        if len(new) > self.limits.new_labels_per_call:
            raise InputError(
                f"one call can add at most {self.limits.new_labels_per_call} new labels, "
                f"got {len(new)}"
            )
        if new and len(labels) + len(new) > self.limits.labels:
            raise InputError(
                f"a run can hold at most {self.limits.labels} labels, and this one has "
                f"{len(labels)}: {len(new)} more are too many"
            )

    def _check_lesson_item(self, item: str | bytes, *, has_key: bool) -> None:
        """Check the text or picture of a lesson.

        In a run without an encoder, a key may come with either. Whatever is stored must be valid.
        """
        if self.takes is not None or not has_key:
            self.check_kind(_get_kind(item))
        if isinstance(item, str):
            check_text(item)
        else:
            check_picture(item)


def _get_kind(item: str | bytes) -> str:
    return "texts" if isinstance(item, str) else "images"
