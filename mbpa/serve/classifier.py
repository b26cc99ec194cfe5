"""A classifier that is taught while it answers.

The memory is filled from the journal at every start, so the journal is all there is to lose. What
is said is a function of the examples that are there, not of their history: in what order they
were taught, what was forgotten, how often it was started.
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

SHOWN = 3  # labels an answer names
REPLAYED = 1000  # examples that are read at a time
MOST_EXAMPLES, MOST_LABELS, MOST_NEW_LABELS = 1_000_000, 10_000, 100  # the last in one call


class Classifier:
    """Answers by name, learns from examples, forgets them, explains; safe to use from threads.

    Answers wait for no disk: a lesson is in the journal, for good, before it is in the memory, and
    only the latter is a matter for those who predict.
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
        self._writing = threading.RLock()  # what the journal gets, the memory gets in that order
        self._state = threading.RLock()
        self._model = TaughtModel(head, info.labels, predictor, rows)
        self._counts = self._model.counts(0)  # another after each change: readers need no lock
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
        """The classifier in a run directory.

        Args:
            text_encoder, image_encoder: used in place of the run's own, which it must be another
                copy of.

        Raises:
            RunError: there is none, it is damaged, or made with another encoder than is here.
            JournalError: its examples cannot be read.
        """
        root = Path(directory)
        RunInfo.read(root)  # what is no run is told first
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
        """Close the journal; predictions go on."""
        with self._writing:
            self.journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What it knows

    @property
    def counts(self) -> Counts:
        """What there is, after a number of whole calls; waits for nobody."""
        return self._counts

    @property
    def labels(self) -> dict[str, int]:
        """How many examples there are of each label, in the order of the head's outputs."""
        return dict(self._counts.labels)

    def __len__(self) -> int:
        return self._counts.examples

    @property
    def takes(self) -> str | None:
        """What it can be asked about, "texts" or "images"; `None`: keys only."""
        return None if self._encoder is None else self._encoder.takes

    @property
    def key_dim(self) -> int:
        return self.info.key_dim

    @property
    def trained_labels(self) -> frozenset[str]:
        """Labels that have a trained row of the head."""
        return frozenset(self._counts.trained_labels)

    def stats(self) -> dict[str, Any]:
        """Counts, for people and for programs; waits for nobody."""
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
        """What is in the memory, in order of ids, without keys and pictures; for those ask
        `entries` and `image`."""
        with self._state:
            held = sorted(self._model.known.examples.items())
        return [
            Example(id, each.label, each.text, None)
            for id, each in held
            if label is None or each.label == label
        ]

    def image(self, id: int) -> bytes | None:
        """The picture of an example, if it is there and one of a picture."""
        found = self.journal.example(id)
        return None if found is None else found.image

    def entries(self) -> tuple[list[int], Float[Tensor, "M D"]]:
        """Ids and keys of everything in the memory."""
        with self._state:
            return self._model.entries()

    # Answering

    def encode(self, items: Sequence[str | bytes]) -> Float[Tensor, "B D"]:
        """Keys of texts, or of pictures as `mbpa.encoders.image.kept` gives them."""
        for item in items:
            self.check_item(item)
        if self._encoder is None:
            return torch.empty(0, self.key_dim, device=self._device)
        return self._encoder(items).to(self._device)

    def check_takes(self, what: str) -> None:
        """`InputError` if it cannot be asked about "texts" or "images"."""
        if self.takes is None:
            raise InputError("this run takes embeddings only: it was made without an encoder")
        if what != self.takes:
            raise InputError(f"this run takes {self.takes}, not {what}")

    def check_item(self, item: str | bytes) -> None:
        """`InputError` for what this run cannot be asked about."""
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
        """An answer for each of the texts or pictures, or of the keys that `encode` gave.

        Args:
            items: texts, or pictures as `mbpa.encoders.image.kept` returns them, as the run
                `takes`.
            top: how many labels an answer names.
            threshold: of confidence, below which it abstains; by default the run's.
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
        """The same answers, with what they come from."""
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
        """Add examples, for good; the next answer knows them. Returns their ids.

        Args:
            request: a name for this call: the same again adds nothing and returns the same ids.
            restoring: the head was trained with these; they were forgotten and are back, and so
                are the rows of their labels.

        Raises:
            InputError: a lesson cannot be; nothing was added.
            JournalError: it could not be kept; nothing was added.
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
                self._model.make_room(len(rows))  # it may fail, and nothing is promised yet
            with self._following():
                ids = self.journal.learn(rows, request, restoring=restoring)
                with self._state:
                    self._add(ids, named, keys)
            return ids

    def was_trained_with(self, id: int) -> bool:
        """Whether the head was trained with this example."""
        with self._state:
            held = self._model.known.examples.get(id)
            return held is not None and held.is_trained

    def forget(self, ids: Iterable[SupportsIndex] = (), label: str | None = None) -> list[int]:
        """Delete examples by id, or all of a label, for good; returns the ids that were there.

        What was taught is forgotten as if it never had been. Of examples that the head was trained
        with, the memory and the journal keep nothing, and a label that loses all of them loses its
        row of the head; what they did to the other rows stays until `mbpa teach` is run anew.
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
        """`InputError` for keys that no encoder would give."""
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
        """Where nothing is embedded, a key may come with either; what is kept must be sound."""
        if self.takes is not None or not has_key:
            self.check_takes(_kind(said))
        if isinstance(said, str):
            check_text(said)
        else:
            check_picture(said)

    def _keys_of(self, lessons: Sequence[Lesson]) -> Float[Tensor, "N D"]:
        """Of those without one, that of the text or picture."""
        found = iter(self._encoded(lessons))
        keys = [next(found) if each.key is None else each.key for each in lessons]
        return torch.stack([key.to(self._device, torch.float32) for key in keys])

    def _encoded(self, given: Sequence[Lesson] | Sequence[Example]) -> Iterable[Tensor]:
        """Keys of those that have none."""
        items: list[Any] = [each.said for each in given if each.key is None]
        return self.encode(items) if items else ()

    def _replay(self) -> None:
        """Fill the memory from the journal; a part at a time, so that little is there twice."""
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
        """Do in the memory what the journal has; if that fails, a start does it, and until then
        nothing more is acknowledged."""
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
    """As the journal would keep them, without the keys that texts are yet to get."""
    return [
        (each.label.strip(), each.said, None if each.key is None else as_bytes(each.key.cpu()))
        for each in lessons
    ]
