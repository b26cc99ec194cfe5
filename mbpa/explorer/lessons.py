"""What a visitor of the page does to the memory, and how each deed is undone.

All of it goes the way of HTTP requests: one writer, durable before it is acknowledged. To teach is
undone by forgetting, which is exact; to forget, by teaching the same again under a new id, with the
trained row of its label if there was one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mbpa.serve import messages
from mbpa.serve.answers import Lesson, Reason, check_label, check_text
from mbpa.serve.classifier import Classifier
from mbpa.serve.journal import InputError
from mbpa.serve.service import Service

SHOWN = 100  # labels that an explanation names: all, in most runs


@dataclass(frozen=True)
class Deed:
    """A change of the memory."""

    said: str
    """What was done, for people to read."""
    added: tuple[int, ...] = ()
    removed: tuple[Lesson, ...] = ()
    was_trained_with: bool = False
    """Whether the head was trained with what was removed."""


class Desk:
    """Where a visitor asks and teaches."""

    def __init__(self, service: Service) -> None:
        self._service = service

    @property
    def classifier(self) -> Classifier:
        return self._service.classifier

    async def ask(self, text: str) -> Reason:
        """The answer and why."""
        check_text(text)
        query = messages.Query(texts=[text], top=SHOWN)
        (reason,) = await self._service.ask(query, wants_reasons=True)
        assert isinstance(reason, Reason)
        return reason

    async def teach(self, label: str, lines: str) -> Deed:
        """Examples of a label, one a line."""
        label, texts = label.strip(), examples_in(lines)
        check_label(label)
        if not texts:
            raise InputError("give at least one example")
        if len(texts) > messages.MOST_EXAMPLES:
            raise InputError(
                f"give at most {messages.MOST_EXAMPLES} examples at a time, got {len(texts)}"
            )
        lessons = [Lesson(label, text) for text in texts]
        is_new = label not in self.classifier.labels
        ids = await self._service.writer(lambda: self.classifier.learn(lessons))
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
            # In this order a crash in between leaves the example twice rather than not at all.
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
        """Take a deed back."""

        def work() -> None:
            self.classifier.learn(deed.removed, restoring=deed.was_trained_with)
            if deed.added:
                self.classifier.forget(deed.added)

        await self._service.writer(work)


def examples_in(lines: str) -> list[str]:
    """One a line, without empty lines and what stands twice."""
    return list(dict.fromkeys(line.strip() for line in lines.splitlines() if line.strip()))


def lesson_of(classifier: Classifier, id: int) -> Lesson:
    """An example as it would be taught, its key included; `InputError` if it is not there."""
    found: Sequence[int]
    found, keys = classifier.entries()
    texts = {each.id: each for each in classifier.examples()}
    if id not in texts or id not in found:
        raise InputError(f"example {id} is not there any more")
    return Lesson(texts[id].label, texts[id].text, keys[list(found).index(id)])
