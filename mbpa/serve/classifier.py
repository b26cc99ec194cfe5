"""A classifier that can be taught while it answers queries.

The memory is filled from the journal at every start, so the journal is the only state to protect.
Answers depend only on the examples that are present, never on their history: the order in which
they were taught, what was forgotten, or the number of restarts.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, SupportsIndex

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

import mbpa
from mbpa.encoders.base import Encoder
from mbpa.encoders.image import ImageEncoder
from mbpa.encoders.text import TextEncoder
from mbpa.errors import RunError
from mbpa.modules.new_rows import NORM_TOLERANCE, NewRows
from mbpa.serve.answers import (
    Answer,
    Lesson,
    Reason,
    check_label,
    check_picture,
    check_text,
    named_answers,
)
from mbpa.serve.example_index import Counts
from mbpa.serve.journal import Example, InputError, Journal, Row
from mbpa.serve.run_info import (
    JOURNAL,
    MOST_NORM,
    RunInfo,
    as_bytes,
    compute_norms,
    read_encoder,
    read_model,
    stack_keys,
)
from mbpa.serve.served_model import TaughtModel

SHOWN = 3  # labels named per answer
REPLAYED = 1000  # examples read from the journal at a time
MOST_EXAMPLES, MOST_LABELS, MOST_NEW_LABELS = 1_000_000, 10_000, 100  # the last one per call


class Classifier:
    """Predicts labels, explains its answers, learns examples and forgets them. Thread-safe.

    Predictions never wait for the disk. A lesson is written durably to the journal before it
    enters the memory, and predictions only lock the memory.
    """

    def __init__(
        self,
        info: RunInfo,
        head: nn.Linear,
        predictor: mbpa.Predictor,
        journal: Journal,
        encoder: Encoder[Any] | None = None,
        rows: NewRows | None = None,
    ) -> None:
        self.info = info
        self.threshold = info.threshold
        self.journal = journal
        self._encoder = encoder
        self._device = head.weight.device
        self._has_norm = info.encoder is not None or rows is not None
        self._writing = threading.RLock()  # journal and memory get writes in the same order
        self._state = threading.RLock()
        self._model = TaughtModel(head, info.labels, predictor, rows)
        self._counts = self._model.counts(0)  # replaced after each change: readers need no lock
        self._replay()

    @classmethod
    def load(
        cls,
        directory: str | Path,
        *,
        device: str | torch.device = "cpu",
        text_encoder: TextEncoder | None = None,
        image_encoder: ImageEncoder | None = None,
    ) -> Self:
        """Load the classifier from a run directory.

        Args:
            text_encoder, image_encoder: used in place of loading the run's encoder. The
                fingerprint must equal that of the run's encoder.

        Raises:
            RunError: there is no run, it is damaged, or its encoder differs from the one here.
            JournalError: its examples cannot be read.
        """
        root = Path(directory)
        RunInfo.read(root)  # first of all, report a directory that is not a run
        # The journal's lock keeps others from replacing the run while the rest of it is read.
        with contextlib.ExitStack() as stack:
            journal = stack.enter_context(Journal(root / JOURNAL, create=False))
            info = RunInfo.read(root)
            head, predictor, rows = read_model(root, info, device)
            encoder: Encoder[Any] | None = text_encoder or image_encoder
            if encoder is None:
                try:
                    encoder = read_encoder(info, device)
                except ValueError as error:
                    raise RunError(f"{root} cannot be used: {error}") from error
            if encoder is not None and encoder.fingerprint != info.fingerprint:
                raise RunError(
                    f"{root} was made with the encoder {info.encoder}, whose files have changed "
                    "since: teach it anew"
                )
            classifier = cls(info, head, predictor, journal, encoder, rows)
            stack.pop_all()
        return classifier

    def close(self) -> None:
        """Close the journal; predictions still work."""
        with self._writing:
            self.journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Contents

    @property
    def counts(self) -> Counts:
        """A consistent snapshot of the counts, taken between writes. Takes no lock."""
        return self._counts

    @property
    def labels(self) -> dict[str, int]:
        """Number of examples per label, in the order of the head's outputs."""
        return dict(self._counts.labels)

    def __len__(self) -> int:
        return self._counts.examples

    @property
    def takes(self) -> str | None:
        """Kind of items the classifier accepts, "texts" or "images"; `None`: keys only."""
        return None if self._encoder is None else self._encoder.takes

    @property
    def key_dim(self) -> int:
        return self.info.key_dim

    @property
    def trained_labels(self) -> frozenset[str]:
        """Labels whose row of the head was trained."""
        return frozenset(self._counts.trained_labels)

    def stats(self) -> dict[str, Any]:
        """Return counts and properties by name. Takes no lock."""
        counts = self._counts
        return {
            "examples": counts.examples,
            "taught": counts.taught,
            "labels": len(counts.labels),
            "new_labels": len(counts.labels) - len(counts.trained_labels),
            "change": counts.change,
            "read_only": self.journal.read_only,
            "threshold": self.threshold,
            "takes": self.takes,
            "encoder": self.info.encoder,
            "key_dim": self.key_dim,
        }

    def examples(self, label: str | None = None) -> list[Example]:
        """Return the examples in the memory, in order of ids, without keys and pictures.

        `entries` returns the keys, `image` a picture.
        """
        with self._state:
            held = sorted(self._model.known.examples.items())
        return [
            Example(id, each.label, each.text, None)
            for id, each in held
            if label is None or each.label == label
        ]

    def image(self, id: int) -> bytes | None:
        """Return the picture of an example; `None` if there is no such example, or no picture."""
        found = self.journal.example(id)
        return None if found is None else found.image

    def entries(self) -> tuple[list[int], Float[Tensor, "M D"]]:
        """Return the ids and keys of everything in the memory."""
        with self._state:
            return self._model.entries()

    # Answering

    def encode(self, items: Sequence[str | bytes]) -> Float[Tensor, "B D"]:
        """Return the keys of texts, or of pictures as returned by `mbpa.encoders.image.kept`."""
        for item in items:
            self.check_item(item)
        if self._encoder is None:
            return torch.empty(0, self.key_dim, device=self._device)
        return self._encoder(items).to(self._device)

    def check_takes(self, what: str) -> None:
        """Raise `InputError` if the run does not take this kind of items, "texts" or "images"."""
        if self.takes is None:
            raise InputError("this run takes embeddings only: it was made without an encoder")
        if what != self.takes:
            raise InputError(f"this run takes {self.takes}, not {what}")

    def check_item(self, item: str | bytes) -> None:
        """Raise `InputError` if this run cannot classify the item."""
        self.check_takes(_kind(item))
        if isinstance(item, str):
            check_text(item)

    def predict(
        self,
        items: Sequence[str | bytes] | None = None,
        *,
        keys: Float[Tensor, "B D"] | None = None,
        top: int = SHOWN,
        threshold: float | None = None,
    ) -> list[Answer]:
        """Return one answer per text or picture, or per key returned by `encode`.

        Args:
            items: texts, or pictures as `mbpa.encoders.image.kept` returns them, depending on
                what the run `takes`.
            top: number of labels named per answer.
            threshold: confidence below which the classifier abstains; by default the run's.
        """
        keys = self._queries(items, keys)
        with self._state:
            labels, logs = self._model.labels, self._model(keys)
        return named_answers(labels, logs, top, self._least(threshold))

    def explain(
        self,
        items: Sequence[str | bytes] | None = None,
        *,
        keys: Float[Tensor, "B D"] | None = None,
        top: int = SHOWN,
        threshold: float | None = None,
    ) -> list[Reason]:
        """Return the answers of `predict` together with the examples that they are based on."""
        keys = self._queries(items, keys)
        with self._state:
            labels, why = self._model.labels, self._model.explain(keys)
            if why is None:
                return [Reason(Answer(None, 0.0, ()), (), (), 0.0) for _ in keys]
            answers = named_answers(labels, why.after, top, self._least(threshold))
            before = named_answers(labels, why.before, top, 0.0)
            return [
                Reason(answer, first.top, *self._model.sources(why[i]))
                for i, (answer, first) in enumerate(zip(answers, before, strict=True))
            ]

    # Learning

    def learn(
        self,
        lessons: Sequence[Lesson],
        *,
        request: str | None = None,
        restoring: bool = False,
    ) -> list[int]:
        """Add examples durably and return their ids. The next answer uses them.

        Args:
            request: a name for this call. Repeating a call under the same name adds nothing and
                returns the same ids.
            restoring: the head was trained with these examples, and they were forgotten since.
                Adding them back also brings back the trained rows of their labels.

        Raises:
            InputError: a lesson is invalid; nothing was added.
            JournalError: the lessons could not be written; nothing was added to the memory.
        """
        self.journal.require_owner()
        if not lessons:
            return []
        self._check_lessons(lessons)
        named = [(each.label.strip(), each.text) for each in lessons]
        with self._writing:
            if request is not None:
                ids = self.journal.repeated(_as_given(lessons), request)
                if ids is not None:
                    return ids
            self._check_room({label for label, _ in named}, len(named))
            keys = self._keys_of(lessons)
            rows: list[Row] = [
                (label, each.said, as_bytes(key))
                for (label, _), each, key in zip(named, lessons, keys.cpu(), strict=True)
            ]
            with self._state:
                self._model.make_room(len(rows))  # may fail, so it comes before the write
            with self._following():
                ids = self.journal.learn(rows, request, restoring=restoring)
                with self._state:
                    self._add(ids, named, keys)
            return ids

    def was_trained_with(self, id: int) -> bool:
        """Return whether the head was trained with this example."""
        with self._state:
            held = self._model.known.examples.get(id)
            return held is not None and held.is_trained

    def forget(self, ids: Iterable[SupportsIndex] = (), label: str | None = None) -> list[int]:
        """Delete examples by id, or all of a label, permanently; return the ids that existed.

        Forgetting a taught example leaves no trace. Examples that the head was trained with are
        removed from the memory and the journal, and a label that loses all of them loses its row
        of the head. Their effect on the other rows remains until `mbpa teach` is run again.
        """
        self.journal.require_owner()
        with self._writing:
            with self._following():
                gone = self.journal.forget(list(ids), None if label is None else label.strip())
                with self._state:
                    self._model.remove(gone)
            return gone

    # Inside

    def _queries(
        self,
        items: Sequence[str | bytes] | None,
        keys: Float[Tensor, "B D"] | None,
    ) -> Float[Tensor, "B D"]:
        if (items is None) == (keys is None):
            raise ValueError("give texts or keys=, one of the two")
        if items is not None:
            return self.encode(items)
        assert keys is not None
        return self._checked(keys)

    def _least(self, threshold: float | None) -> float:
        return self.threshold if threshold is None else threshold

    def check_rows(self, rows: Float[np.ndarray, "B D"]) -> None:
        """Raise `InputError` for keys that no encoder would return."""
        if rows.ndim != 2 or rows.shape[1] != self.key_dim:
            raise InputError(f"keys must have {self.key_dim} numbers each, got {rows.shape[1:]}")
        norms = compute_norms(rows)
        if not (norms < MOST_NORM).all():
            raise InputError(f"keys must be finite numbers below {MOST_NORM:.0e}")
        off = np.abs(norms - 1)
        if self._has_norm and len(rows) and off.max() > NORM_TOLERANCE:
            worst = norms[off.argmax()]
            raise InputError(f"keys must have norm 1, as the run's own have, got {worst:.3g}")

    def _checked(self, keys: Float[Tensor, "B D"]) -> Float[Tensor, "B D"]:
        self.check_rows(keys.detach().cpu().to(torch.float32).numpy())
        return keys.to(self._device, torch.float32)

    def _check_room(self, labels: set[str], examples: int) -> None:
        new = labels - self._counts.labels.keys()
        if len(self) + examples > MOST_EXAMPLES:
            raise InputError(f"there may be {MOST_EXAMPLES} examples, and {len(self)} are there")
        if len(new) > MOST_NEW_LABELS:
            raise InputError(f"one call may bring {MOST_NEW_LABELS} new labels, got {len(new)}")
        if new and len(self._counts.labels) + len(new) > MOST_LABELS:
            raise InputError(f"there may be {MOST_LABELS} labels, {len(new)} more are too many")

    def _check_lessons(self, lessons: Sequence[Lesson]) -> None:
        for lesson in lessons:
            check_label(lesson.label)
            if lesson.text is not None and lesson.image is not None:
                raise InputError(f"an example of {lesson.label!r} has both text and image")
            if lesson.said is not None:
                self._check_said(lesson.said, has_key=lesson.key is not None)
            elif lesson.key is None:
                raise InputError(f"an example of {lesson.label!r} has neither text nor key")
            if lesson.key is not None:
                self.check_rows(lesson.key[None].detach().cpu().to(torch.float32).numpy())

    def _check_said(self, said: str | bytes, *, has_key: bool) -> None:
        """Check the text or picture of a lesson.

        In a run without an encoder, a key may come with either. Whatever is stored must be valid.
        """
        if self.takes is not None or not has_key:
            self.check_takes(_kind(said))
        if isinstance(said, str):
            check_text(said)
        else:
            check_picture(said)

    def _keys_of(self, lessons: Sequence[Lesson]) -> Float[Tensor, "N D"]:
        """Return the keys of lessons; those given without a key are encoded."""
        found = iter(self._encoded(lessons))
        keys = [next(found) if each.key is None else each.key for each in lessons]
        return torch.stack([key.to(self._device, torch.float32) for key in keys])

    def _encoded(self, given: Sequence[Lesson] | Sequence[Example]) -> Iterable[Tensor]:
        """Encode the texts or pictures that come without a key."""
        items: list[Any] = [each.said for each in given if each.key is None]
        return self.encode(items) if items else ()

    def _replay(self) -> None:
        """Fill the memory from the journal, in parts, so that few examples are held twice."""
        keys = torch.empty(len(self.journal), self.key_dim)
        ids: list[int] = []
        named: list[tuple[str, str | None]] = []
        while found := list(
            self.journal.examples(ids[-1] if ids else 0, REPLAYED, with_pictures=False)
        ):
            part = keys[len(ids) : len(ids) + len(found)]
            has_key = torch.tensor([each.key is not None for each in found])
            part[has_key] = stack_keys(self.journal.path, found, self.key_dim)
            if not has_key.all():
                part[~has_key] = torch.stack([key.cpu() for key in self._encoded(found)])
            ids += [each.id for each in found]
            named += [(each.label, each.text) for each in found]
        self._model.make_room(len(ids))
        self._add(ids, named, keys.to(self._device))
        self._counts = self._model.counts(self.journal.change)

    def _add(
        self,
        ids: Sequence[int],
        named: Sequence[tuple[str, str | None]],
        keys: Float[Tensor, "N D"],
    ) -> None:
        last, restored = self.info.trained_examples, self.journal.restored
        trained = {id for id in ids if id <= last or id in restored}
        self._model.add(ids, named, keys, trained)

    @contextlib.contextmanager
    def _following(self) -> Iterator[None]:
        """Make sure that a change of the journal reaches the memory.

        If updating the memory fails, the journal refuses further writes until a restart, which
        fills the memory anew.
        """
        change = self.journal.change
        try:
            yield
            with self._state:
                self._counts = self._model.counts(self.journal.change)
        except BaseException:
            if self.journal.change != change:
                self.journal.refuse("the memory could not follow what was written: restart")
            raise


def _kind(item: str | bytes) -> str:
    return "texts" if isinstance(item, str) else "images"


def _as_given(lessons: Sequence[Lesson]) -> list[Row]:
    """Return lessons as journal rows, without keys for those that are still to be encoded."""
    return [
        (each.label.strip(), each.said, None if each.key is None else as_bytes(each.key.cpu()))
        for each in lessons
    ]
