"""A model whose examples are always those of a journal.

It is filled from the journal at every start, so the journal is the only state to protect. A change
goes to the journal first, durably, and then to the model. If several replicas share the journal, it
is a log that all of them follow: each applies what it and the others have written, in one order.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor

from mbpa.encoders.base import Encoder
from mbpa.serve.adapted_model import AdaptedModel
from mbpa.serve.answers import Lesson
from mbpa.serve.audit import apply_renames
from mbpa.serve.example_index import Counts
from mbpa.serve.example_journal import ExampleJournal, JournalState
from mbpa.serve.input_checks import InputChecks, Limits
from mbpa.serve.journal import Example, InputError, Journal
from mbpa.serve.run_info import Model, RunInfo, read_model, stack_keys
from mbpa.serve.served_model import ServedModel
from mbpa.serve.shared_journal import Changes, ReplicaStatus, SharedJournal
from mbpa.serve.shared_run import pack_model, read_shared_model
from mbpa.serve.taught_model import TaughtModel
from mbpa.teaching import Learner

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


class JournaledModel:
    """A model that answers, the journal of its examples, and what keeps them equal. Thread-safe.

    Answers only lock the model, and never wait for the disk.
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

    def close(self) -> None:
        """Close the journal; predictions still work."""
        with self._writing:
            self.journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def counts(self) -> Counts:
        """A consistent snapshot of the counts, taken between writes. Takes no lock."""
        return self._counts

    @property
    def takes(self) -> str | None:
        """Kind of items the classifier accepts, "texts" or "images"; `None`: keys only."""
        return None if self._encoder is None else self._encoder.takes

    @property
    def key_dim(self) -> int:
        return self.info.key_dim

    def encode(self, items: Sequence[str | bytes]) -> Float[Tensor, "B D"]:
        """Return the keys of texts, or of pictures as returned by `pictures.standardize`."""
        for item in items:
            self.checks.check_item(item)
        if self._encoder is None:
            return torch.empty(0, self.key_dim, device=self._device)
        return self._encoder(items).to(self._device)

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

    # Changing

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

    # Filling

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

    def _encode_missing(self, given: Sequence[Lesson] | Sequence[Example]) -> Iterable[Tensor]:
        """Encode the texts or pictures that come without a key."""
        items: list[Any] = [each.item for each in given if each.key is None]
        return self.encode(items) if items else ()

    def _add(
        self,
        ids: Sequence[int],
        named: Sequence[tuple[str, str | None]],
        keys: Float[Tensor, "N D"],
    ) -> None:
        self._model.add(ids, named, keys, self._find_trained(ids, self.info))

    def _find_trained(self, ids: Iterable[int], info: RunInfo) -> set[int]:
        restored = self.journal.restored_ids
        return {id for id in ids if id <= info.trained_examples or id in restored}

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


def _requires_unit_norm(info: RunInfo, model: Model) -> bool:
    if info.has_own_head:  # it takes whatever its network returns
        return False
    return info.encoder is not None or model.rows is not None or isinstance(model.method, Learner)
