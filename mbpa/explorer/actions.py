"""What visitors of the page can do to the memory, and how each action is undone.

All actions take the same path as HTTP requests: one writer, durable before it is acknowledged.
Teaching is undone by forgetting, which is exact. Forgetting is undone by teaching the same example
again under a new id, together with the trained row of its label if it had one.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from mbpa.encoders import pictures
from mbpa.explorer.rendering import count_examples
from mbpa.serve import schemas
from mbpa.serve.answers import Lesson, Reason
from mbpa.serve.classifier import Classifier
from mbpa.serve.input_checks import check_label, naming_picture, standardize_picture
from mbpa.serve.journal import InputError, ListedExample
from mbpa.serve.service import Service
from mbpa.serve.settings import Settings

LABELS_PER_EXPLANATION = 100  # all of them, in most runs


@dataclass(frozen=True)
class Change:
    """A change of the memory that can be undone."""

    description: str
    """Description of the change, for people to read."""
    added: tuple[int, ...] = ()
    """Ids of the examples that were added."""
    removed: Mapping[int, Lesson] = field(default_factory=dict)
    """Examples that were removed, by the id that they had."""
    was_trained_with: bool = False
    """Whether the head was trained with the removed examples."""
    renamed: tuple[str, str] | None = None
    """Old and new name of a label that was renamed."""
    can_be_undone: bool = True


class Actions:
    """Asks and teaches the classifier on behalf of a visitor."""

    def __init__(self, service: Service) -> None:
        self._service = service

    @property
    def classifier(self) -> Classifier:
        return self._service.classifier

    @property
    def settings(self) -> Settings:
        return self._service.settings

    async def read(self, files: Sequence[Path]) -> list[bytes]:
        """Read a visitor's pictures and convert them to the form in which they are stored.

        Only one file is in memory at a time, so their total size is not limited.
        """
        found = []
        for number, path in enumerate(files, 1):
            with naming_picture(number, len(files)):
                found.append(await self._service.reader(partial(_read_picture, path)))
        return found

    async def ask(self, item: str | bytes) -> Reason:
        """Return the explained answer to a text, or to a picture returned by `read`."""
        self.classifier.checks.check_item(item)
        (reason,) = await self._service.answer(
            (item,), None, LABELS_PER_EXPLANATION, wants_reasons=True
        )
        assert isinstance(reason, Reason)
        return reason

    async def teach(
        self, label: str, given: str | Sequence[Path], *, by: str | None = None
    ) -> Change:
        """Teach examples of a label: texts, one per line, or files of pictures.

        As for the other actions, `by` is the name of the visitor's token, for the audit trail.
        """
        label = label.strip()
        check_label(label)
        examples = split_examples(given) if isinstance(given, str) else given
        if not examples:
            raise InputError("give at least one example")
        if len(examples) > schemas.MAX_EXAMPLES_PER_CALL:
            raise InputError(
                f"give at most {schemas.MAX_EXAMPLES_PER_CALL} examples at a time, "
                f"got {len(examples)}"
            )
        if isinstance(given, str):
            lessons = [Lesson(label, text) for text in split_examples(given)]
        else:
            lessons = [Lesson(label, image=each) for each in dict.fromkeys(await self.read(given))]
        is_new = label not in self.classifier.labels
        ids, _ = await self._service.teach(lessons, by=by)
        count = count_examples(len(ids))
        new = "the new label " if is_new else ""
        return Change(f"Taught {count} of {new}“{label}”.", added=tuple(ids))

    async def relabel(self, id: int, label: str, *, by: str | None = None) -> Change:
        """Give an example another label."""
        label = label.strip()
        check_label(label)

        def work() -> Change:
            before = get_lesson(self.classifier, id)
            was_trained_with = self.classifier.was_trained_with(id)
            if before.label == label:
                raise InputError(f"it already has the label “{label}”")
            # In this order, a crash in between leaves two copies of the example rather than none.
            added = self.classifier.learn([replace(before, label=label)], by=by)
            self.classifier.forget([id], by=by)
            description = f"Now “{label}”, was “{before.label}”."
            return Change(description, tuple(added), {id: before}, was_trained_with)

        return await self._service.writer(work)

    async def forget(self, id: int, *, by: str | None = None) -> Change:
        """Delete an example."""

        def work() -> Change:
            before = get_lesson(self.classifier, id)
            was_trained_with = self.classifier.was_trained_with(id)
            self.classifier.forget([id], by=by)
            description = f"Forgot one example of “{before.label}”."
            return Change(description, removed={id: before}, was_trained_with=was_trained_with)

        return await self._service.writer(work)

    async def take_back(self, ids: Sequence[int], *, by: str | None = None) -> Change:
        """Delete examples that were taught; those that no longer exist are left out."""

        def work() -> Change:
            removed = get_lessons(self.classifier, ids)
            if not removed:
                raise InputError("these examples no longer exist")
            if any(self.classifier.was_trained_with(id) for id in removed):
                raise InputError("only what was taught can be taken back")
            self.classifier.forget(removed, by=by)
            labels = {each.label for each in removed.values()}
            of = f" of “{next(iter(labels))}”" if len(labels) == 1 else ""
            count = count_examples(len(removed))
            return Change(f"Took back {count}{of}.", removed=removed)

        return await self._service.writer(work)

    async def rename(self, label: str, new_label: str, *, by: str | None = None) -> Change:
        """Give a label another name."""
        new_label = new_label.strip()
        check_label(new_label)

        def work() -> Change:
            self.classifier.rename(label, new_label, by=by)
            return Change(f"Renamed “{label}” to “{new_label}”.", renamed=(label, new_label))

        return await self._service.writer(work)

    async def merge(self, label: str, into: str, *, by: str | None = None) -> Change:
        """Give all examples of a label another label that exists.

        This can be undone unless the head was trained with the label: it loses its trained row.
        """

        def work() -> Change:
            can_be_undone = label not in self.classifier.trained_labels
            ids = [each.id for each in self.classifier.examples(label)] if can_be_undone else ()
            removed = get_lessons(self.classifier, ids)
            added = self.classifier.merge(label, into, by=by)
            description = f"Merged {count_examples(len(added))} of “{label}” into “{into}”."
            return Change(description, tuple(added), removed, can_be_undone=can_be_undone)

        return await self._service.writer(work)

    async def retrain(self) -> str:
        """Train the classifier again with everything it holds; return a description in words."""
        info = await self._service.retrain()
        summary = info.summary or {}
        accuracy = summary.get("accuracy")
        tested = (
            "" if accuracy is None else f" It labels {accuracy:.0%} of unseen examples rightly."
        )
        return f"Trained with {count_examples(summary['examples'])}.{tested}"

    async def list_taught(self, query: schemas.ExamplesQuery) -> list[ListedExample]:
        """Return a page of examples, and one more if there is a next page."""
        return await self._service.list_examples(query)

    async def undo(self, change: Change, *, by: str | None = None) -> dict[int, int]:
        """Undo a change; return the new ids of examples that were brought back, by their old id."""

        def work() -> dict[int, int]:
            if change.renamed is not None:
                old, new = change.renamed
                self.classifier.rename(new, old, by=by)
            lessons = list(change.removed.values())
            ids = self.classifier.learn(lessons, restoring=change.was_trained_with, by=by)
            if change.added:
                self.classifier.forget(change.added, by=by)
            return dict(zip(change.removed, ids, strict=True))

        return await self._service.writer(work)


def _read_picture(path: Path) -> bytes:
    try:
        file = path.read_bytes()
    except OSError as error:
        raise InputError("it is no longer available: drop it again") from error
    return standardize_picture(file)


def split_examples(lines: str) -> list[str]:
    """Split a text into examples, one per line, without empty lines and duplicates."""
    return list(dict.fromkeys(line.strip() for line in lines.splitlines() if line.strip()))


def make_thumbnails(classifier: Classifier, ids: Iterable[int], side: int = 96) -> dict[int, str]:
    """Return thumbnails of examples as data URLs by id; empty if the run does not take pictures."""
    if classifier.takes != "images":
        return {}
    found = ((id, classifier.image(id)) for id in ids)
    return {
        id: make_data_url(pictures.make_thumbnail(picture, side))
        for id, picture in found
        if picture is not None
    }


def make_data_url(picture: bytes) -> str:
    """Return a data URL that contains the picture."""
    return f"data:{pictures.get_media_type(picture)};base64,{base64.b64encode(picture).decode()}"


def get_lesson(classifier: Classifier, id: int) -> Lesson:
    """Return an example as a lesson with its key; raise `InputError` if it does not exist."""
    found = get_lessons(classifier, [id])
    if id not in found:
        raise InputError(f"example {id} no longer exists")
    return found[id]


def get_lessons(classifier: Classifier, ids: Iterable[int]) -> dict[int, Lesson]:
    """Return those of these examples that exist, as lessons with their keys, by id."""
    wanted = set(ids)
    held, keys = classifier.entries()
    places = {id: place for place, id in enumerate(held) if id in wanted}
    return {
        each.id: Lesson(each.label, each.text, keys[places[each.id]], classifier.image(each.id))
        for each in classifier.examples()
        if each.id in places
    }
