"""A classifier that can be taught while it answers queries.

Answers depend only on the examples that are present, never on their history: the order in which
they were taught, what was forgotten, or the number of restarts. `JournaledModel` keeps them equal
to those of the journal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self, SupportsIndex

import torch
from jaxtyping import Float
from torch import Tensor

from mbpa.encoders.image import ImageEncoder
from mbpa.encoders.own import OwnEncoder
from mbpa.encoders.text import TextEncoder
from mbpa.errors import RunError
from mbpa.serve.answers import Answer, Lesson, Reason, name_answers
from mbpa.serve.example_journal import ExampleJournal
from mbpa.serve.input_checks import Limits, check_label
from mbpa.serve.journal import Example, ExampleFilter, InputError, Journal, ListedExample, Row
from mbpa.serve.journaled_model import JournaledModel
from mbpa.serve.run_directory import remove_unused_models
from mbpa.serve.run_info import (
    JOURNAL_FILE,
    RUN_FILE,
    RunInfo,
    encode_key,
    read_encoder,
    read_model,
)
from mbpa.serve.shared_journal import SharedJournal
from mbpa.serve.shared_run import read_shared_model

LABELS_PER_ANSWER = 3


class Classifier(JournaledModel):
    """Predicts labels, explains its answers, learns examples and forgets them. Thread-safe.

    Predictions never wait for the disk. A lesson is written durably to the journal before it
    enters the memory, and predictions only lock the memory.
    """

    @classmethod
    def load(
        cls,
        directory: str | Path,
        *,
        device: str | torch.device = "cpu",
        encoder: OwnEncoder | None = None,
        text_encoder: TextEncoder | None = None,
        image_encoder: ImageEncoder | None = None,
        limits: Limits | None = None,
        encodes: bool = True,
        database: str | None = None,
    ) -> Self:
        """Load the classifier from a run directory, or from a database that holds the same run.

        Args:
            device: where to compute.
            encoder: used in place of loading the run's encoder; required if that is the user's
                own. Its fingerprint must match that of the run.
            text_encoder, image_encoder: earlier names of `encoder`.
            limits: how much the run can hold; larger than most runs by default.
            encodes: load the run's encoder; without it, only keys can be classified and taught.
            database: address of a PostgreSQL database, ``postgresql://…``, to which `mbpa journal
                copy` has copied the run. Nothing in the directory is then written. What others
                write there is known after `follow`.

        Raises:
            RunError: there is no run, it is damaged, or its encoder differs from the one here.
            JournalError: its examples cannot be read.
        """
        root = Path(directory)
        RunInfo.read(root)  # first of all, report a directory that is not a run
        given = encoder or text_encoder or image_encoder
        # The journal's lock keeps others from replacing the run while the rest of it is read.
        with contextlib.ExitStack() as stack:
            journal: ExampleJournal
            if database is None:
                journal = stack.enter_context(Journal(root / JOURNAL_FILE, create=False))
                info = RunInfo.read(root)
                model = read_model(root, info, device)
            else:
                journal = stack.enter_context(_open_shared(database, root))
                info, model = read_shared_model(journal.name, *journal.read_model(), device)
            try:
                loaded = read_encoder(info, device, given) if given or encodes else None
            except ValueError as error:
                raise RunError(f"{root} cannot be used: {error}") from error
            classifier = cls(info, model, journal, loaded, limits)
            if database is None and journal.read_only is None:
                remove_unused_models(root, info)
            stack.pop_all()
        return classifier

    # Contents

    @property
    def labels(self) -> dict[str, int]:
        """Number of examples per label, in the order of the head's outputs."""
        return dict(self._counts.labels)

    def __len__(self) -> int:
        return self._counts.examples

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
            "recall": self._model.recall,
        }

    def examples(self, label: str | None = None) -> list[Example]:
        """Return the examples in the memory, in order of ids, without keys and pictures.

        `entries` returns the keys, `image` a picture.
        """
        with self._state:
            held = sorted(self._model.index.examples.items())
        return [
            Example(id, each.label, each.text, None)
            for id, each in held
            if label is None or each.label == label
        ]

    def list_examples(
        self,
        wanted: ExampleFilter,
        *,
        limit: int,
        after: int | None = None,
        newest_first: bool = False,
    ) -> list[ListedExample]:
        """Return one page of the examples that the filter passes, by id; see `Journal`."""
        return self.journal.list_examples(
            wanted,
            limit=limit,
            after=after,
            newest_first=newest_first,
            last_trained=self.info.trained_examples,
        )

    def image(self, id: int) -> bytes | None:
        """Return the picture of an example; `None` if there is no such example, or no picture."""
        found = self.journal.example(id)
        return None if found is None else found.image

    def entries(self) -> tuple[list[int], Float[Tensor, "M D"]]:
        """Return the ids and keys of all examples, in the precision that answers use."""
        with self._state:
            ids = list(self._model.index.examples)
            return ids, self._model.get_keys(ids)

    # Answering

    def predict(
        self,
        items: Sequence[str | bytes] | None = None,
        *,
        keys: Float[Tensor, "B D"] | None = None,
        top: int = LABELS_PER_ANSWER,
        threshold: float | None = None,
    ) -> list[Answer]:
        """Return one answer per text or picture, or per key returned by `encode`.

        Args:
            items: texts, or pictures as returned by `mbpa.encoders.pictures.standardize`,
                depending on what the run `takes`.
            top: number of labels named per answer.
            threshold: confidence below which the classifier abstains; by default the run's.
        """
        keys = self._encode_queries(items, keys)
        with self._state:
            labels, found = self._model.labels, self._model(keys)
            threshold = self._choose_threshold(threshold)
        return name_answers(labels, found.logs, top, threshold, found.in_scope)

    def explain(
        self,
        items: Sequence[str | bytes] | None = None,
        *,
        keys: Float[Tensor, "B D"] | None = None,
        top: int = LABELS_PER_ANSWER,
        threshold: float | None = None,
    ) -> list[Reason]:
        """Return the answers of `predict` together with the examples that they are based on."""
        keys = self._encode_queries(items, keys)
        with self._state:
            labels = self._model.labels
            if not labels:
                return [Reason(Answer(None, 0.0, ()), (), (), 0.0) for _ in keys]
            why, threshold = self._model.explain(keys), self._choose_threshold(threshold)
        answers = name_answers(labels, why.after.logs, top, threshold, why.after.in_scope)
        before = name_answers(why.before_labels, why.before, top, 0.0)
        return [
            Reason(answer, first.top, *sources)
            for answer, first, sources in zip(answers, before, why.sources, strict=True)
        ]

    # Learning

    def learn(
        self,
        lessons: Sequence[Lesson],
        *,
        request: str | None = None,
        restoring: bool = False,
        by: str | None = None,
    ) -> list[int]:
        """Add examples durably and return their ids. The next answer uses them.

        Args:
            request: a name for this call. Repeating a call under the same name adds nothing and
                returns the same ids.
            restoring: the head was trained with these examples, and they were forgotten since.
                Adding them back also brings back the trained rows of their labels.
            by: name of the token, for the audit trail.

        Raises:
            InputError: a lesson is invalid; nothing was added.
            JournalError: the lessons could not be written; nothing was added to the memory.
        """
        self.journal.require_owner()
        if not lessons:
            return []
        with self._writing:
            self.checks.check_lessons(lessons)
            named = [(each.label.strip(), each.text) for each in lessons]
            if request is not None:
                ids = self.find_repeated(lessons, request)
                if ids is not None:
                    return ids
            counts = self._counts
            self.checks.check_room(
                counts.examples, counts.labels, len(named), {label for label, _ in named}
            )
            keys = self._compute_keys(lessons)
            rows: list[Row] = [
                (label, each.item, encode_key(key))
                for (label, _), each, key in zip(named, lessons, keys.cpu(), strict=True)
            ]
            with self._state:
                self._model.make_room(len(rows))  # may fail, so it comes before the write
            with self._applying_change() as apply:
                ids = self.journal.learn(rows, request, restoring=restoring, by=by)
                apply(lambda: self._add(ids, named, keys))
            return ids

    def find_repeated(self, lessons: Sequence[Lesson], request: str) -> list[int] | None:
        """Return the ids of an earlier call with this name and these lessons, or `None`.

        Keys computed from texts or pictures are not compared: they may differ in the last bit.

        Raises:
            InputError: the name was used for other lessons.
        """
        rows: list[Row] = [
            (
                each.label.strip(),
                each.item,
                None if each.key is None else encode_key(each.key.cpu()),
            )
            for each in lessons
        ]
        with self._catching_up_on_refusal():
            found = self.journal.find_repeated(rows, request)
        if found is not None:
            self.follow()  # another replica may have written them
        return found

    def was_trained_with(self, id: int) -> bool:
        """Return whether the head was trained with this example."""
        with self._state:
            held = self._model.index.examples.get(id)
            return held is not None and held.is_trained

    def forget(
        self,
        ids: Iterable[SupportsIndex] = (),
        label: str | None = None,
        *,
        by: str | None = None,
    ) -> list[int]:
        """Delete examples by id, or all of a label, permanently; return the ids that existed.

        Forgetting a taught example leaves no trace. Examples that the head was trained with are
        removed from the memory and the journal, and a label that loses all of them loses its row
        of the head. Their effect on the other rows remains until `mbpa teach` is run again. A head
        of the user's own keeps all its rows.
        """
        self.journal.require_owner()
        with self._writing:
            with self._applying_change() as apply:
                name = None if label is None else label.strip()
                gone = self.journal.forget(list(ids), name, by=by)
                apply(lambda: self._model.remove(gone))
            return gone

    def rename(self, label: str, new_label: str, *, by: str | None = None) -> list[int]:
        """Give a label another name; return the ids of its examples.

        A trained label keeps its row of the head. From then on the answers are those of a
        classifier that was taught with the new name from the start.

        Raises:
            InputError: there is no such label, or the new name is taken.
        """
        label, new_label = label.strip(), new_label.strip()
        check_label(new_label)
        with self._writing_alone():
            if new_label in self._counts.labels:
                raise InputError(f"there is already a label {new_label!r}: merge them instead")
            return self._change_label(label, new_label, by)

    def merge(self, label: str, into: str, *, by: str | None = None) -> list[int]:
        """Give the examples of one label another label that exists; return their ids.

        From then on the answers are those of a classifier to which the examples were taught with
        that label. If only `label` was trained, the row of the head goes to `into`. If both were,
        the examples that `label` was trained with count as taught from then on and get new ids, and
        their effect on the other rows remains until the head is trained again.

        Raises:
            InputError: there is no such label.
        """
        label, into = label.strip(), into.strip()
        with self._writing_alone():
            if into not in self._counts.labels:
                raise InputError(f"there is no label {into!r}: rename {label!r} instead")
            return self._change_label(label, into, by)

    # Inside

    def _change_label(self, label: str, new_label: str, by: str | None) -> list[int]:
        self.journal.require_owner()
        counts = self._counts
        if label not in counts.labels:
            raise InputError(f"there is no label {label!r}")
        if not counts.labels[label]:
            raise InputError(f"{label!r} has no examples: teach one before its name can change")
        if label == new_label:
            raise InputError(f"the label is already called {label!r}")
        has_row = new_label in counts.trained_labels
        last_trained = self.info.trained_examples if has_row else None
        with self._applying_change() as apply:
            ids = self.journal.rename(label, new_label, last_trained=last_trained, by=by)
            names = self._name_rows(self.info)
            apply(lambda: self._model.relabel(ids, new_label, names, keeps_trained=not has_row))
        return sorted(ids.values())

    def _encode_queries(
        self,
        items: Sequence[str | bytes] | None,
        keys: Float[Tensor, "B D"] | None,
    ) -> Float[Tensor, "B D"]:
        if (items is None) == (keys is None):
            raise ValueError("pass exactly one of items and keys")
        if items is not None:
            return self.encode(items)
        assert keys is not None
        return self._check_keys(keys)

    def _choose_threshold(self, threshold: float | None) -> float:
        return self.threshold if threshold is None else threshold

    def _check_keys(self, keys: Float[Tensor, "B D"]) -> Float[Tensor, "B D"]:
        self.checks.check_keys(keys.detach().cpu().to(torch.float32).numpy())
        return keys.to(self._device, torch.float32)

    def _compute_keys(self, lessons: Sequence[Lesson]) -> Float[Tensor, "N D"]:
        """Return the keys of lessons; those given without a key are encoded."""
        found = iter(self._encode_missing(lessons))
        keys = [next(found) if each.key is None else each.key for each in lessons]
        return torch.stack([key.to(self._device, torch.float32) for key in keys])


def _open_shared(url: str, directory: Path) -> SharedJournal:
    """Open a journal in a database, which must hold the run of a directory."""
    from mbpa.serve.postgres_journal import PostgresJournal

    journal = PostgresJournal(url)
    try:
        journal.require_same_run((directory / RUN_FILE).read_bytes(), directory)
    except BaseException:
        journal.close()
        raise
    return journal
