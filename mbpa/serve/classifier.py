"""A classifier that can be taught while it answers queries.

The memory is filled from the journal at every start, so the journal is the only state to protect.
Answers depend only on the examples that are present, never on their history: the order in which
they were taught, what was forgotten, or the number of restarts.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, SupportsIndex

import torch
from jaxtyping import Float
from torch import Tensor

from mbpa.encoders.base import Encoder
from mbpa.encoders.image import ImageEncoder
from mbpa.encoders.own import OwnEncoder
from mbpa.encoders.text import TextEncoder
from mbpa.errors import RunError
from mbpa.serve.adapted_model import AdaptedModel
from mbpa.serve.answers import Answer, Lesson, Reason, name_answers
from mbpa.serve.audit import apply_renames
from mbpa.serve.example_index import Counts
from mbpa.serve.example_journal import ExampleJournal, JournalState
from mbpa.serve.input_checks import InputChecks, Limits, check_label
from mbpa.serve.journal import Example, ExampleFilter, InputError, Journal, ListedExample, Row
from mbpa.serve.run_directory import remove_unused_models
from mbpa.serve.run_info import (
    JOURNAL_FILE,
    RUN_FILE,
    Model,
    RunInfo,
    encode_key,
    read_encoder,
    read_model,
    stack_keys,
)
from mbpa.serve.served_model import ServedModel
from mbpa.serve.shared_journal import Changes, ReplicaStatus, SharedJournal
from mbpa.serve.shared_run import pack_model, read_shared_model
from mbpa.serve.taught_model import TaughtModel
from mbpa.teaching import Learner

LABELS_PER_ANSWER = 3
REPLAY_CHUNK_EXAMPLES = 1000  # read from the journal at a time


@dataclass(frozen=True)
class Snapshot:
    """What a head can be trained with."""

    named: tuple[tuple[str, str | None], ...]
    """Label and text of each example, by rising id."""
    keys: Float[Tensor, "N D"]
    last: int
    """Highest id ever assigned."""
    change: int
    """Number of the last change of the journal."""


class Classifier:
    """Predicts labels, explains its answers, learns examples and forgets them. Thread-safe.

    Predictions never wait for the disk. A lesson is written durably to the journal before it
    enters the memory, and predictions only lock the memory.
    """

    def __init__(
        self,
        info: RunInfo,
        model: Model,
        journal: ExampleJournal,
        encoder: Encoder[Any] | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.info = info
        self.threshold = info.threshold
        self.journal = journal
        self._encoder = encoder
        self._device = model.head.weight.device
        self.checks = InputChecks(
            takes=self.takes,
            key_dim=info.key_dim,
            requires_unit_norm=_requires_unit_norm(info, model),
            limits=limits or Limits(),
        )
        self._writing = threading.RLock()  # journal and memory get writes in the same order
        self._state = threading.RLock()
        self._shared = journal if isinstance(journal, SharedJournal) else None
        self._must_load = False  # whether the memory is not that of any position of the log
        self._model = self._make_served(info, model)
        self._counts = self._model.counts(0)  # replaced after each change: readers need no lock
        self._replay()

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

    def encode(self, items: Sequence[str | bytes]) -> Float[Tensor, "B D"]:
        """Return the keys of texts, or of pictures as returned by `pictures.standardize`."""
        for item in items:
            self.checks.check_item(item)
        if self._encoder is None:
            return torch.empty(0, self.key_dim, device=self._device)
        return self._encoder(items).to(self._device)

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

    # Training again

    def take_snapshot(self) -> Snapshot:
        """Return everything that a head can be trained with, as it is between two writes."""
        with self._writing, self.journal.load(size=REPLAY_CHUNK_EXAMPLES) as state:
            _, named, keys = self._read_examples(state)
            return Snapshot(tuple(named), keys, state.last, state.change)

    def replace_model(self, info: RunInfo, model: Model, before: Callable[[], None]) -> None:
        """Answer from another model, with the same examples, from one answer to the next.

        Args:
            info: describes the model; `info.change` is that of the snapshot it was trained with.
            model: the model.
            before: makes the change durable, once nothing can fail any more. Nothing is written
                from the time when it is called until answers come from the new model.

        Raises:
            InputError: a label was renamed or merged since the snapshot, or the model needs keys of
                norm 1 and an example has another one; nothing has changed.
        """
        with self._writing, self.journal.load(size=REPLAY_CHUNK_EXAMPLES) as state:
            if any(each.change > info.change for each in self.journal.renames()):
                raise InputError("a label was renamed meanwhile: train again")
            self._change_over(info, model, state, before)

    def publish_model(self, info: RunInfo, directory: Path, *, by: str | None = None) -> None:
        """Make a model that of all replicas; on return, this one answers from it.

        Args:
            info: describes the model; `info.change` is that of the snapshot it was trained with.
            directory: where the model is, under the name that `info` gives.
            by: name of the token, for the audit trail.

        Raises:
            InputError: as for `replace_model`.
        """
        assert self._shared is not None
        model = read_model(directory, info, "cpu")
        checks = replace(self.checks, requires_unit_norm=_requires_unit_norm(info, model))
        with self._writing_alone():
            if any(each.change > info.change for each in self.journal.renames()):
                raise InputError("a label was renamed meanwhile: train again")
            taught = list(self.journal.examples(info.trained_examples, with_pictures=False))
            checks.check_keys(stack_keys(self.journal.name, taught, self.key_dim).numpy())
            self._shared.replace_model(
                info.to_bytes(), pack_model(directory / info.model), examples=info.trained_examples
            )

    # Following other replicas

    @property
    def position(self) -> int | None:
        """Position in the log of all replicas that answers are given at; `None` without one."""
        return None if self._shared is None else self._counts.change

    @property
    def replica(self) -> ReplicaStatus | None:
        """How far this replica has followed the log; `None` if the journal is not shared."""
        return None if self._shared is None else self._shared.status

    def follow(self, position: int | None = None) -> None:
        """Apply to the memory what was written to a shared journal; otherwise do nothing.

        Answers are given at one position after another, never between two.

        Args:
            position: do nothing if this position has been reached.

        Raises:
            UnavailableError: the database cannot be used; the memory is as it was.
        """
        if self._shared is None or self._has_reached(position):
            return
        with self._writing:
            if self._has_reached(position):
                return
            changes = None if self._must_load else self._shared.read_changes()
            if changes is not None and changes.position == self._counts.change:
                return
            self._must_load = True  # until the memory is complete again
            if changes is None or changes.replaces_model:
                self._load_shared(self._shared)
            else:
                self._apply_changes(changes)
            self._must_load = False

    def _has_reached(self, position: int | None) -> bool:
        return position is not None and self._counts.change >= position and not self._must_load

    def _apply_changes(self, changes: Changes) -> None:
        ids = [each.id for each in changes.present]
        named = [(each.label, each.text) for each in changes.present]
        keys = stack_keys(self.journal.name, changes.present, self.key_dim).to(self._device)
        with self._state:
            self._model.make_room(len(ids))
            held = [id for id in changes.touched if id in self._model.index.examples]
            if held:
                self._model.remove(held)
            if changes.renames:
                self._model.set_trained_labels(self._name_rows(self.info))
            self._add(ids, named, keys)
            self._counts = self._model.counts(changes.position)

    def _load_shared(self, shared: SharedJournal) -> None:
        """Load everything anew, and answer from it once it is complete."""
        with shared.load(size=REPLAY_CHUNK_EXAMPLES) as state:
            files = state.run_file, state.model_files
            info, model = read_shared_model(shared.name, *files, self._device)
            shared.adopt(state)
            self._change_over(info, model, state)

    # Inside

    def _change_over(
        self,
        info: RunInfo,
        model: Model,
        state: JournalState,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Answer from another model with these examples, once `before` has been called."""
        replaced = self._make_served(info, model._replace(head=model.head.to(self._device)))
        ids, named, keys = self._read_examples(state)
        checks = replace(self.checks, requires_unit_norm=_requires_unit_norm(info, model))
        checks.check_keys(keys.numpy())  # lessons of other norms may have come meanwhile
        replaced.make_room(len(ids))
        replaced.add(ids, named, keys.to(self._device), self._find_trained(ids, info))
        before()
        with self._state:
            if self.threshold == self.info.threshold:  # not one that the user has set
                self.threshold = info.threshold
            self.info, self._model, self.checks = info, replaced, checks
            self._counts = replaced.counts(state.change)

    def _make_served(self, info: RunInfo, model: Model) -> ServedModel:
        """Return a model without examples."""
        names = self._name_rows(info)
        if isinstance(model.method, Learner):
            return TaughtModel(model.method, names, info.max_lost_points, self._device)
        return AdaptedModel(
            model.head,
            names,
            model.method,
            model.rows,
            keeps_rows=info.has_own_head,
            memory=info.memory,
        )

    def _name_rows(self, info: RunInfo) -> tuple[str, ...]:
        """Return the present names of the labels that the head was trained with."""
        renames = (each for each in self.journal.renames() if each.change > info.change)
        return apply_renames(info.labels, renames)

    def _find_trained(self, ids: Iterable[int], info: RunInfo) -> set[int]:
        restored = self.journal.restored_ids
        return {id for id in ids if id <= info.trained_examples or id in restored}

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

    def _encode_missing(self, given: Sequence[Lesson] | Sequence[Example]) -> Iterable[Tensor]:
        """Encode the texts or pictures that come without a key."""
        items: list[Any] = [each.item for each in given if each.key is None]
        return self.encode(items) if items else ()

    def _replay(self) -> None:
        """Fill the memory from the journal."""
        if self._shared is not None:
            self._load_shared(self._shared)
            return
        with self.journal.load(size=REPLAY_CHUNK_EXAMPLES) as state:
            ids, named, keys = self._read_examples(state)
            self._model.make_room(len(ids))
            self._add(ids, named, keys.to(self._device))
            self._counts = self._model.counts(state.change)

    def _read_examples(
        self, state: JournalState
    ) -> tuple[list[int], list[tuple[str, str | None]], Float[Tensor, "N D"]]:
        """Return the id, the label and text, and the key of each example, by rising id.

        The journal is read in parts, so that few examples are held twice.
        """
        keys = torch.empty(state.count, self.key_dim)
        ids: list[int] = []
        named: list[tuple[str, str | None]] = []
        for found in state.parts:
            part = keys[len(ids) : len(ids) + len(found)]
            has_key = torch.tensor([each.key is not None for each in found])
            part[has_key] = stack_keys(self.journal.name, found, self.key_dim)
            if not has_key.all():
                part[~has_key] = torch.stack([key.cpu() for key in self._encode_missing(found)])
            ids += [each.id for each in found]
            named += [(each.label, each.text) for each in found]
        return ids, named, keys

    def _add(
        self,
        ids: Sequence[int],
        named: Sequence[tuple[str, str | None]],
        keys: Float[Tensor, "N D"],
    ) -> None:
        self._model.add(ids, named, keys, self._find_trained(ids, self.info))

    @contextlib.contextmanager
    def _applying_change(self) -> Iterator[Callable[[Callable[[], None]], None]]:
        """Make sure that a change of the journal also reaches the memory and the counts.

        Yields a function that takes the update of the memory. If the update fails, the journal
        refuses further writes until a restart, which fills the memory anew. A replica reads the
        change back from the log instead, with those of others that came before it.
        """
        if self._shared is not None:
            with self._catching_up_on_refusal():
                yield lambda update: self.follow()
            return
        assert isinstance(self.journal, Journal)
        change = self.journal.change
        try:
            with contextlib.ExitStack() as updating:

                def apply(update: Callable[[], None]) -> None:
                    updating.enter_context(self._state)
                    update()

                yield apply
                self._counts = self._model.counts(self.journal.change)
        except BaseException:
            if self.journal.change != change:
                self.journal.refuse("the memory was not updated after a write: restart")
            raise

    @contextlib.contextmanager
    def _catching_up_on_refusal(self) -> Iterator[None]:
        """Catch up with the log before passing on a refusal by the journal.

        The cause may be a write of another replica, which the caller can then see here, too.
        """
        try:
            yield
        except InputError:
            self.follow()
            raise

    @contextlib.contextmanager
    def _writing_alone(self) -> Iterator[None]:
        """Keep others from writing, other replicas included, with the memory up to date."""
        with self._writing:
            if self._shared is None:
                yield
                return
            with self._shared.exclusively():
                self.follow()
                yield
            self.follow()


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


def _requires_unit_norm(info: RunInfo, model: Model) -> bool:
    if info.has_own_head:  # it takes whatever its network returns
        return False
    return info.encoder is not None or model.rows is not None or isinstance(model.method, Learner)
