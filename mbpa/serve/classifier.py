"""A classifier that is taught while it answers.

The memory is filled from the journal at every start, so the journal is all there is to lose. What
is said is a function of the examples that are there, not of their history: in what order they
were taught, what was forgotten, how often it was started.
"""

from __future__ import annotations

import contextlib
import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

import mbpa
from mbpa.device import Rates
from mbpa.embedding import Encoder
from mbpa.errors import RunError
from mbpa.image import ImageEncoder
from mbpa.rows import NORM_TOLERANCE, NewRows
from mbpa.serve.answers import (
    Answer,
    Lesson,
    NearExample,
    Reason,
    check_label,
    check_picture,
    check_text,
)
from mbpa.serve.journal import Example, InputError, Journal, Row
from mbpa.serve.known import Counts, Held, Known
from mbpa.serve.run import (
    JOURNAL,
    RunInfo,
    as_bytes,
    from_bytes,
    read_encoder,
    read_model,
)
from mbpa.serve.taught import TaughtMemory, TaughtRows
from mbpa.split import grow
from mbpa.text import TextEncoder

# Fixed, not measured: another start must not choose another way to compute the same.
RATES = Rates(operations=2.0**36, bytes=2.0**33, call=2.0**-19)
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
        self._head, self._predictor = head, predictor
        self._rows = None if rows is None else TaughtRows(rows)
        self._engine = mbpa.Engine(store_bytes=0, rates=RATES)  # kept rows would tell of the past
        self._device = head.weight.device
        self._writing = threading.RLock()  # what the journal gets, the memory gets in that order
        self._state = threading.RLock()
        self._known = Known()
        self._trained_labels: tuple[str, ...] = ()
        self._new_labels: tuple[str, ...] = ()
        self._counts = Counts({}, (), 0, 0, 0)  # another after each change: readers need no lock
        self._model: mbpa.MbPA | None = None
        self._memory = TaughtMemory(1024, info.key_dim, device=self._device)
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
                f"{root} was made with the encoder {info.encoder}, whose files have changed since: "
                "teach it anew"
            )
        journal = Journal(root / JOURNAL)
        try:
            return cls(info, head, predictor, journal, encoder, rows)
        except BaseException:
            journal.close()
            raise

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
            held = sorted(self._known.examples.items())
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
            held = self._memory.entries()
            return [self._known.ids[slot] for slot in held.ids.tolist()], held.keys

    # Answering

    def encode(self, items: Sequence[str | bytes]) -> Float[Tensor, "B D"]:
        """Keys of texts, or of pictures as `mbpa.image.kept` gives them."""
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
            items: texts, or pictures as `mbpa.image.kept` gives them: what the run `takes`.
            top: how many labels an answer names.
            threshold: of confidence, below which it abstains; by default the run's.
        """
        keys = self._queries(items, keys)
        with self._state:
            labels = self._labels
            logs = self._model(keys=keys) if self._model else keys.new_empty(len(keys), 0)
        return self._answers(labels, logs, top, threshold)

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
            labels = self._labels
            if self._model is None:
                nothing = self._answers(labels, keys.new_empty(len(keys), 0), top, threshold)
                return [Reason(answer, (), (), 0.0) for answer in nothing]
            why = self._model.explain(keys=keys)
            answers = self._answers(labels, why.after, top, threshold)
            before = self._answers(labels, why.before, top, 0.0)
            return [
                Reason(answer, first.top, *self._sources(why[i]))
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
                self._make_room(len(rows))  # it may fail, and nothing is promised yet
            ids = self.journal.learn(rows, request, restoring=restoring)
            with self._following():
                self._add(ids, named, keys)
            return ids

    def was_trained_with(self, id: int) -> bool:
        """Whether the head was trained with this example."""
        with self._state:
            held = self._known.examples.get(id)
            return held is not None and held.is_trained

    def forget(self, ids: Iterable[int] = (), label: str | None = None) -> list[int]:
        """Delete examples by id, or all of a label, for good; returns the ids that were there.

        What was taught is forgotten as if it never had been. Of examples that the head was trained
        with, the memory and the journal keep nothing, and a label that loses all of them loses its
        row of the head; what they did to the other rows stays until `mbpa teach` is run anew.
        """
        with self._writing:
            gone = self.journal.forget(list(ids), None if label is None else label.strip())
            with self._following():
                self._remove(gone)
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

    def check_rows(self, rows: Float[np.ndarray, "B D"]) -> None:
        """`InputError` for keys that no encoder would give."""
        if rows.ndim != 2 or rows.shape[1] != self.key_dim:
            raise InputError(f"keys must have {self.key_dim} numbers each, got {rows.shape[1:]}")
        norms = np.sqrt(np.einsum("bd,bd->b", rows, rows, dtype=np.float64))
        if not (norms < 1e15).all():
            raise InputError("keys must be finite numbers below 1e15")
        off = np.abs(norms - 1)
        has_norm = self.info.encoder is not None or self._rows is not None
        if has_norm and len(rows) and off.max() > NORM_TOLERANCE:
            worst = norms[off.argmax()]
            raise InputError(f"keys must have norm 1, as the run's own have, got {worst:.3g}")

    def _checked(self, keys: Float[Tensor, "B D"]) -> Float[Tensor, "B D"]:
        self.check_rows(keys.detach().cpu().to(torch.float32).numpy())
        return keys.to(self._device, torch.float32)

    def _check_room(self, labels: set[str], examples: int) -> None:
        new = labels - self._known.counts.keys()
        if len(self) + examples > MOST_EXAMPLES:
            raise InputError(f"there may be {MOST_EXAMPLES} examples, and {len(self)} are there")
        if len(new) > MOST_NEW_LABELS:
            raise InputError(f"one call may bring {MOST_NEW_LABELS} new labels, got {len(new)}")
        if new and len(self._known.counts) + len(new) > MOST_LABELS:
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

    def _answers(
        self, labels: tuple[str, ...], logs: Float[Tensor, "B C"], top: int, threshold: float | None
    ) -> list[Answer]:
        threshold = self.threshold if threshold is None else threshold
        if not labels:
            return [Answer(None, 0.0, ()) for _ in logs]
        # Equally probable ones in the order of the labels, which topk does not promise.
        order = logs.argsort(dim=1, descending=True, stable=True)[:, : max(1, top)]
        shares = logs.gather(1, order).exp()
        answers = []
        for columns, probabilities in zip(order.tolist(), shares.tolist(), strict=True):
            named = tuple((labels[c], p) for c, p in zip(columns, probabilities, strict=True))
            label, confidence = named[0]
            answers.append(
                Answer(label if confidence >= threshold else None, confidence, named[:top])
            )
        return answers

    def _sources(self, why: mbpa.Explanation) -> tuple[tuple[NearExample, ...], float]:
        if why.neighbors is None or why.weights is None:
            return (), 0.0
        rows = zip(
            why.neighbors.ids[0].tolist(),
            why.weights[0].tolist(),
            why.neighbors.distances[0].sqrt().tolist(),
            strict=True,
        )
        near = []
        for entry, weight, distance in rows:
            id = self._known.ids[entry]
            known = self._known.examples[id]
            near.append(NearExample(id, known.label, known.text, weight, distance))
        return tuple(near), 0.0 if why.change is None else float(why.change[0])

    def _replay(self) -> None:
        """Fill the memory from the journal; a part at a time, so that little is there twice."""
        keys = torch.empty(len(self.journal), self.key_dim)
        ids: list[int] = []
        named: list[tuple[str, str | None]] = []
        while found := list(
            self.journal.examples(ids[-1] if ids else 0, REPLAYED, with_pictures=False)
        ):
            encoded = iter(self._encoded(found))
            for row, each in zip(keys[len(ids) :].numpy(), found, strict=False):
                key = next(encoded).cpu().numpy() if each.key is None else from_bytes(each.key)
                if key.shape != row.shape:
                    raise RunError(
                        f"{self.journal.path}: example {each.id} has a key of {len(key)} numbers, "
                        f"the run's have {self.key_dim}"
                    )
                row[:] = key
            ids += [each.id for each in found]
            named += [(each.label, each.text) for each in found]
        self._make_room(len(ids))
        self._add(ids, named, keys.to(self._device))

    def _add(
        self,
        ids: Sequence[int],
        named: Sequence[tuple[str, str | None]],
        keys: Float[Tensor, "N D"],
    ) -> None:
        numbers = [self._known.number(label) for label, _ in named]
        entries = self._memory.write(keys, torch.tensor(numbers, dtype=torch.int64)).tolist()
        restored = self.journal.restored
        for id, (label, text), entry in zip(ids, named, entries, strict=True):
            is_trained = id <= self.info.trained_examples or id in restored
            self._known.add(id, Held(label, text, entry, is_trained))
        labels = [label for label, _ in named]
        if self._rows is not None:
            self._rows.add(labels, keys)
        self._rebind(labels)

    def _make_room(self, examples: int) -> None:
        """For so many more: nothing is ever overwritten."""
        if len(self) + examples > self._memory.capacity:
            self._memory.resize(2 * (len(self) + examples))

    @contextlib.contextmanager
    def _following(self) -> Iterator[None]:
        """Do in the memory what the journal has; if that fails, a start does it, and until then
        nothing more is acknowledged."""
        try:
            with self._state:
                yield
        except BaseException:
            self.journal.refuse("the memory could not follow what was written: restart")
            raise

    def _remove(self, ids: Sequence[int]) -> None:
        here = [id for id in ids if id in self._known.examples]
        labels = [self._known.examples[id].label for id in here]
        entries = [self._known.remove(id) for id in here]
        if self._rows is not None:
            self._rows.remove(labels, self._memory.keys_of(entries))
        self._memory.delete(entries)
        self._rebind(labels)

    def _rebind(self, changed: Iterable[str]) -> None:
        """Head, labels and columns as the examples that are there want them.

        Args:
            changed: labels that have other examples than before.
        """
        trained, new = self._known.split(self.info.labels)
        if (trained, new) != (self._trained_labels, self._new_labels):
            self._trained_labels, self._new_labels = trained, new
            self._model = self._bound()
        elif self._model is not None:
            self._put_rows(self._model.head, changed)
        self._memory.columns = self._known.columns(self._labels).to(self._device)
        self._counts = Counts(
            labels={label: self._known.counts[label] for label in self._labels},
            trained_labels=trained,
            examples=len(self._known.examples),
            taught=self._known.taught,
            change=self.journal.change,
        )

    def _bound(self) -> mbpa.MbPA | None:
        """The memory with a head for the labels there are; `None` if there are none."""
        if not self._labels:
            return None
        head = grow(self._trained_head(), len(self._labels)).requires_grad_(False)
        self._put_rows(head, self._new_labels)
        return mbpa.MbPA(
            head=head, memory=self._memory, predictor=self._predictor, engine=self._engine
        )

    def _put_rows(self, head: nn.Module, labels: Iterable[str]) -> None:
        """Of those of these labels that the head was not trained with, as their examples say."""
        rows, new = self._rows, set(self._new_labels)
        here = sorted(new.intersection(labels))
        if rows is None or not here:
            return
        assert isinstance(head, nn.Linear)
        first = len(self._trained_labels)
        places = torch.tensor([first + bisect_left(self._new_labels, label) for label in here])
        with torch.no_grad():
            weights = torch.stack([rows.weight(label) for label in here])
            head.weight[places] = weights.to(self._device)
            head.bias[places] = rows.bias.to(self._device)

    @property
    def _labels(self) -> tuple[str, ...]:
        """In the order of the head's outputs."""
        return self._trained_labels + self._new_labels

    def _trained_head(self) -> nn.Linear:
        """The rows that were trained, for the labels that are left; a row of zeros if none is."""
        places = {label: row for row, label in enumerate(self.info.labels)}
        rows = [places[label] for label in self._trained_labels]
        head = nn.Linear(self.key_dim, max(1, len(rows)), device=self._device)
        with torch.no_grad():
            for own, trained in ((head.weight, self._head.weight), (head.bias, self._head.bias)):
                own.zero_()[: len(rows)] = trained[torch.tensor(rows, dtype=torch.int64)]
        return head


def _kind(item: str | bytes) -> str:
    return "texts" if isinstance(item, str) else "images"


def _as_given(lessons: Sequence[Lesson]) -> list[Row]:
    """As the journal would keep them, without the keys that texts are yet to get."""
    return [
        (each.label.strip(), each.said, None if each.key is None else as_bytes(each.key.cpu()))
        for each in lessons
    ]
