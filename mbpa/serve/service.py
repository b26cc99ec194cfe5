"""A classifier together with its request queues: it checks requests, schedules and answers them.

One thread runs the model, one encodes examples to be taught, one writes, and one reads pictures.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float

from mbpa.errors import RunError
from mbpa.serve import schemas
from mbpa.serve.answers import Answer, Lesson, Reason
from mbpa.serve.backup import Archive, make_served_archive
from mbpa.serve.batching import Batcher, SerialWorker
from mbpa.serve.classifier import Classifier
from mbpa.serve.follower import Follower
from mbpa.serve.input_checks import (
    check_label,
    check_text,
    check_total_pixels,
    naming_picture,
    standardize_picture,
)
from mbpa.serve.journal import ExampleFilter, InputError, Journal, JournalError, ListedExample
from mbpa.serve.middleware import Metrics, ReplicaMetrics
from mbpa.serve.model_work import Chunk, ModelRequest, ModelWork, weigh
from mbpa.serve.retraining import Trainer, change_over
from mbpa.serve.run_info import RunInfo
from mbpa.serve.settings import Settings
from mbpa.serve.shared_journal import SharedJournal


class Service:
    """A classifier together with its request queues and metrics."""

    def __init__(self, classifier: Classifier, settings: Settings) -> None:
        self.classifier, self.settings = classifier, settings
        self.metrics = Metrics()
        self.metrics.examples.set_function(lambda: len(classifier))
        self.metrics.labels.set_function(lambda: len(classifier.labels))
        self.metrics.recall.set_function(lambda: _number(classifier.stats()["recall"]))
        self.metrics.read_only.set_function(lambda: classifier.journal.read_only is not None)
        self._work = ModelWork(classifier, settings.part_s)
        self.model: Batcher[Chunk, Sequence[Answer | Reason]] = Batcher(
            self._handle,
            weight=weigh,
            part=settings.part,
            part_s=settings.part_s,
            batch=settings.batch,
            wait_s=settings.wait_s,
            window_s=settings.window_s,
        )
        # Examples are encoded in a thread of their own, so predictions continue meanwhile.
        self.lessons: Batcher[Chunk, Sequence[Answer | Reason]] = Batcher(
            ModelWork(classifier, settings.part_s).handle,
            weight=weigh,
            part=settings.part,
            part_s=settings.part_s,
            batch=settings.batch,
            wait_s=settings.lesson_wait_s,
            name="mbpa-lessons",
        )
        self._trainer, self._is_retraining = Trainer(), False
        journal = classifier.journal
        self._shared = journal if isinstance(journal, SharedJournal) else None
        self._follower: Follower | None = None
        if self._shared is not None:
            shared = self._shared
            self._follower = Follower(classifier, shared)
            ReplicaMetrics(self.metrics.registry, lambda: shared.status)
        self.writer = SerialWorker(settings.writes)
        # Pictures are read one at a time: each may briefly take hundreds of megabytes.
        self.reader = SerialWorker(settings.writes, "mbpa-reader")

    def start(self) -> None:
        """Start the threads; call this from the event loop that will make the requests."""
        self.model.start()
        self.lessons.start()
        if self._follower is not None:
            self._follower.start()

    async def stop(self) -> None:
        """Finish the work that has been accepted, except training, then end the threads."""
        self._trainer.stop()
        if self._follower is not None:
            await asyncio.to_thread(self._follower.stop)
        await self.model.stop()
        await self.lessons.stop()
        await self.reader.stop()
        await self.writer.stop()

    async def ask(
        self, query: schemas.Query, *, wants_reasons: bool = False
    ) -> Sequence[Answer | Reason]:
        """Check a query, so that it cannot fail a whole batch, and return its answers."""
        rows, items = None, tuple[str | bytes, ...]()
        if query.embeddings is not None:
            rows = _to_array(query.embeddings)
            self.classifier.checks.check_keys(rows)
        elif query.images is not None:
            items = tuple(await self.read_pictures(query.images))
        else:
            self.classifier.checks.check_kind("texts")
            for text in query.texts or ():
                check_text(text)
            items = tuple(query.texts or ())
        return await self.answer(items, rows, query.top, query.threshold, wants_reasons)

    async def answer(
        self,
        items: tuple[str | bytes, ...],
        rows: Float[np.ndarray, "B D"] | None,
        top: int,
        threshold: float | None = None,
        wants_reasons: bool = False,
    ) -> Sequence[Answer | Reason]:
        """Return the answers to queries that have been checked."""
        request = ModelRequest(items, rows, top, threshold, wants_reasons)
        found = await self.model(self._work.split_request(request))
        return [answer for part in found for answer in part]

    async def read_pictures(self, encoded: Sequence[str]) -> list[bytes]:
        """Decode pictures from base64 and convert them to the form in which they are stored.

        Requests take turns in the reader's thread, one picture at a time.
        """
        self.classifier.checks.check_kind("images")
        files = await self.reader(lambda: _decode_files(encoded))
        pictures = []
        for number, file in enumerate(files, 1):
            with naming_picture(number, len(files)):
                pictures.append(await self.reader(partial(standardize_picture, file)))
        return pictures

    async def learn(
        self, request: schemas.LearnRequest, *, by: str | None = None
    ) -> tuple[list[int], int]:
        """Teach the examples of a request; return their ids and the resulting number of labels.

        Args:
            request: the examples.
            by: name of the token, for the audit trail.
        """
        encoded = [each.image for each in request.examples if each.image is not None]
        pictures = iter(await self.read_pictures(encoded) if encoded else ())
        lessons = [
            _make_lesson(each, None if each.image is None else next(pictures))
            for each in request.examples
        ]
        return await self.teach(lessons, request.request, by=by)

    async def teach(
        self, lessons: Sequence[Lesson], request: str | None = None, *, by: str | None = None
    ) -> tuple[list[int], int]:
        """Encode examples, taking turns with other requests, and then write them.

        Args:
            lessons: the examples.
            request: a name for this call. Repeating a call under the same name adds nothing and
                returns the same ids.
            by: name of the token, for the audit trail.
        """
        for each in lessons:
            check_label(each.label)
            if each.key is None and each.item is not None:
                self.classifier.checks.check_item(each.item)
        if request is not None:
            ids = await self.writer(lambda: self.classifier.find_repeated(lessons, request))
            if ids is not None:
                return ids, len(self.classifier.labels)
        items = [each.item for each in lessons if each.key is None and each.item is not None]
        encoding = ModelRequest(tuple(items))
        await self.lessons([Chunk(encoding, place) for place in range(len(items))])
        keys = iter(encoding.encoded)
        whole = [
            replace(each, key=next(keys)) if each.key is None and each.item is not None else each
            for each in lessons
        ]

        def write() -> tuple[list[int], int]:
            repeated = None if request is None else self.classifier.find_repeated(lessons, request)
            if repeated is not None:
                return repeated, len(self.classifier.labels)
            ids = self.classifier.learn(whole, request=request, by=by)
            return ids, len(self.classifier.labels)  # counted before the next write

        return await self.writer(write)

    async def forget(self, request: schemas.ForgetRequest, *, by: str | None = None) -> list[int]:
        """Delete the examples that a request names; return the ids of those that existed."""
        if request.label is not None:
            check_label(request.label)
        return await self.writer(
            lambda: self.classifier.forget(request.ids or (), request.label, by=by)
        )

    async def rename(self, request: schemas.RenameRequest, *, by: str | None = None) -> int:
        """Rename a label; return the number of its examples."""
        return await self._change_label(self.classifier.rename, request.label, request.to, by)

    async def merge(self, request: schemas.MergeRequest, *, by: str | None = None) -> int:
        """Merge a label into another; return the number of examples that changed."""
        return await self._change_label(self.classifier.merge, request.label, request.into, by)

    async def _change_label(
        self, change: Callable[..., list[int]], label: str, new_label: str, by: str | None
    ) -> int:
        for name in (label, new_label):
            check_label(name)
        return len(await self.writer(lambda: change(label, new_label, by=by)))

    async def make_backup(self) -> Archive:
        """Make an archive of the run as it is between two writes."""
        journal = self.classifier.journal
        if isinstance(journal, Journal):
            return await self.writer(lambda: make_served_archive(journal))
        from mbpa.serve.journal_copy import make_shared_archive

        return await asyncio.to_thread(make_shared_archive, journal)

    async def retrain(self) -> RunInfo:
        """Train with everything that the run holds, in another process, and change over to it.

        Raises:
            RunError: it cannot be trained, or is being trained already.
        """
        classifier = self.classifier
        if (reason := classifier.journal.read_only) is not None:
            raise JournalError(reason)
        if self._is_retraining:
            raise RunError("it is being trained already: wait until that is done")
        self._is_retraining = True
        try:
            with self._choose_model_directory() as directory:
                snapshot = await self.writer(classifier.take_snapshot)
                info = await asyncio.to_thread(
                    self._trainer.train, directory, classifier.info, snapshot
                )
                return await self.writer(lambda: change_over(classifier, directory, info))
        finally:
            self._is_retraining = False

    @contextlib.contextmanager
    def _choose_model_directory(self) -> Iterator[Path]:
        """Yield where to write a new model: the run, or for a replica a temporary directory."""
        journal = self.classifier.journal
        if isinstance(journal, Journal):
            yield journal.path.parent
        else:
            with tempfile.TemporaryDirectory(prefix="mbpa-") as folder:
                yield Path(folder)

    async def list_examples(self, query: schemas.ExamplesQuery) -> list[ListedExample]:
        """Return the examples of a page, and one more if there is a next page."""
        if query.label is not None:
            check_label(query.label)
        wanted = ExampleFilter(
            label=None if query.label is None else query.label.strip(),
            since_ms=None if query.since is None else math.ceil(query.since.timestamp() * 1000),
            is_trained=None if query.origin is None else query.origin == "trained",
        )
        return await asyncio.to_thread(
            self.classifier.list_examples,
            wanted,
            limit=query.limit + 1,
            after=query.cursor,
            newest_first=query.order == "newest",
        )

    def _handle(self, batch: list[Chunk]) -> list[Sequence[Answer | Reason]]:
        self.metrics.batch.observe(len(batch))
        return self._work.handle(batch)


def _make_lesson(example: schemas.NewExample, picture: bytes | None) -> Lesson:
    rows = None if example.embedding is None else _to_array([example.embedding])
    key = None if rows is None else torch.from_numpy(rows)[0]
    return Lesson(example.label, example.text, key, picture)


def _decode_files(encoded: Sequence[str]) -> list[bytes]:
    """Decode the files of a call; reject too many pixels before any picture is decompressed."""
    files = [_decode_picture(each) for each in encoded]
    check_total_pixels(files)
    return files


def _decode_picture(picture: str) -> bytes:
    """Decode base64, which may be a data URL or contain line breaks."""
    content = picture.partition(",")[2] if picture.startswith("data:") else picture
    try:
        return base64.b64decode("".join(content.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError("a picture must be a file encoded in base64") from error


def _to_array(embeddings: list[list[float]]) -> Float[np.ndarray, "B D"]:
    """Convert embeddings to an array.

    Uses numpy, because torch releases the interpreter lock and then waits to reacquire it.
    """
    widths = {len(row) for row in embeddings}
    if len(widths) > 1:
        raise InputError(f"embeddings must all have the same length, got {sorted(widths)}")
    with np.errstate(over="ignore"):  # what overflows becomes infinite and is rejected later
        return np.array(embeddings, np.float32)


def _number(value: float | None) -> float:
    """Return a value for a metric, which cannot be missing."""
    return math.nan if value is None else value
