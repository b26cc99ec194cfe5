"""What a visitor of the page can do to the memory, and how each action is undone.

All actions take the same path as HTTP requests: one writer, durable before it is acknowledged.
Teaching is undone by forgetting, which is exact. Forgetting is undone by teaching the same example
again under a new id, together with the trained row of its label if it had one.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mbpa.encoders import image
from mbpa.serve import schemas
from mbpa.serve.answers import Lesson, Reason, check_label, kept_pictures
from mbpa.serve.app import Service
from mbpa.serve.classifier import Classifier
from mbpa.serve.journal import InputError

SHOWN = 100  # labels named per explanation: all of them, in most runs


@dataclass(frozen=True)
class Deed:
    """A change of the memory that can be undone."""

    said: str
    """Description of the change, for people to read."""
    added: tuple[int, ...] = ()
    removed: tuple[Lesson, ...] = ()
    was_trained_with: bool = False
    """Whether the head was trained with the removed examples."""


class Desk:
    """Asks and teaches the classifier on behalf of a visitor."""

    def __init__(self, service: Service) -> None:
        self._service = service

    @property
    def classifier(self) -> Classifier:
        return self._service.classifier

    async def read(self, files: Sequence[Path]) -> list[bytes]:
        """Read a visitor's pictures and convert them to the form in which they are stored.

        Only one file is in memory at a time, so their total size is not limited.
        """
        pictures = []
        for number, path in enumerate(files, 1):
            try:
                pictures.append(await self._service.reader(partial(_kept_picture, path)))
            except InputError as error:
                place = f"picture {number} of {len(files)}: " if len(files) > 1 else ""
                raise InputError(f"{place}{error}") from error
        return pictures

    async def ask(self, item: str | bytes) -> Reason:
        """Return the explained answer to a text, or to a picture returned by `read`."""
        self.classifier.check_item(item)
        (reason,) = await self._service.answers((item,), None, SHOWN, wants_reasons=True)
        assert isinstance(reason, Reason)
        return reason

    async def teach(self, label: str, given: str | Sequence[Path]) -> Deed:
        """Teach examples of a label: texts, one per line, or files of pictures."""
        label = label.strip()
        check_label(label)
        named = examples_in(given) if isinstance(given, str) else given
        if not named:
            raise InputError("give at least one example")
        if len(named) > schemas.MOST_EXAMPLES:
            raise InputError(
                f"give at most {schemas.MOST_EXAMPLES} examples at a time, got {len(named)}"
            )
        if isinstance(given, str):
            lessons = [Lesson(label, text) for text in examples_in(given)]
        else:
            lessons = [Lesson(label, image=each) for each in dict.fromkeys(await self.read(given))]
        is_new = label not in self.classifier.labels
        ids, _ = await self._service.teach(lessons)
        examples = "1 example" if len(ids) == 1 else f"{len(ids)} examples"
        new = "the new label " if is_new else ""
        return Deed(f"Taught {examples} of {new}“{label}”.", added=tuple(ids))

    async def relabel(self, id: int, label: str) -> Deed:
        """Give an example another label."""
        label = label.strip()
        check_label(label)

        def work() -> Deed:
            before = lesson_of(self.classifier, id)
            was_trained_with = self.classifier.was_trained_with(id)
            if before.label == label:
                raise InputError(f"it is “{label}” already")
            # In this order, a crash in between leaves two copies of the example rather than none.
            added = self.classifier.learn([replace(before, label=label)])
            self.classifier.forget([id])
            said = f"Now “{label}”, was “{before.label}”."
            return Deed(said, tuple(added), (before,), was_trained_with)

        return await self._service.writer(work)

    async def forget(self, id: int) -> Deed:
        """Delete an example."""

        def work() -> Deed:
            before = lesson_of(self.classifier, id)
            was_trained_with = self.classifier.was_trained_with(id)
            self.classifier.forget([id])
            said = f"Forgot one example of “{before.label}”."
            return Deed(said, removed=(before,), was_trained_with=was_trained_with)

        return await self._service.writer(work)

    async def undo(self, deed: Deed) -> None:
        """Undo a change."""

        def work() -> None:
            self.classifier.learn(deed.removed, restoring=deed.was_trained_with)
            if deed.added:
                self.classifier.forget(deed.added)

        await self._service.writer(work)


def _kept_picture(path: Path) -> bytes:
    try:
        file = path.read_bytes()
    except OSError as error:
        raise InputError("it is not there any more: drop it again") from error
    return kept_pictures([file])[0]


def examples_in(lines: str) -> list[str]:
    """Split a text into examples, one per line, without empty lines and duplicates."""
    return list(dict.fromkeys(line.strip() for line in lines.splitlines() if line.strip()))


def thumbnails(classifier: Classifier, ids: Iterable[int], side: int = 96) -> dict[int, str]:
    """Return thumbnails of examples as data URLs by id; empty if the run does not take pictures."""
    if classifier.takes != "images":
        return {}
    found = ((id, classifier.image(id)) for id in ids)
    return {
        id: address(image.thumbnail(picture, side)) for id, picture in found if picture is not None
    }


def address(picture: bytes) -> str:
    """Return a data URL that contains the picture."""
    return f"data:{image.media_type(picture)};base64,{base64.b64encode(picture).decode()}"


def lesson_of(classifier: Classifier, id: int) -> Lesson:
    """Return an example as a lesson with its key; raise `InputError` if it does not exist."""
    found: Sequence[int]
    found, keys = classifier.entries()
    texts = {each.id: each for each in classifier.examples()}
    if id not in texts or id not in found:
        raise InputError(f"example {id} is not there any more")
    key = keys[list(found).index(id)]
    return Lesson(texts[id].label, texts[id].text, key, classifier.image(id))
