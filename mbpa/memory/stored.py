"""Memories whose entries are kept by id in a store that outlives the process: a database, a server.

Entries are stored under their ids, which are never reused, so nobody can mistake one entry for
another. Slots are numbers that each attached memory assigns for itself. A write stores the new
entries first and then removes those it overwrites: a writer that dies in between leaves a few
entries too many, of which the next one removes the oldest.

Beside its entries a store keeps one small record, its state: the form of the entries, the lowest id
that may be assigned next, and the token of the one writer.
"""

from __future__ import annotations

import abc
import contextlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mbpa.errors import ReadOnlyError, StaleReadError, WriterError
from mbpa.memory import validation
from mbpa.memory.base import Memory
from mbpa.memory.neighbors import Candidates, Entries, Holdings, Neighbors
from mbpa.memory.ring import Ring
from mbpa.memory.schema import check_schema

MAX_READ_ATTEMPTS = 5  # while the writer removes entries that are being read

T = TypeVar("T")


class StoredState(NamedTuple):
    """The record that a store keeps beside its entries; plain JSON values."""

    schema: Mapping[str, Any]
    """Form of the entries, as in `Memory.schema`."""
    next_id: int
    """No id below this number will be assigned again."""
    writer: str | None
    """Token of the memory that may write; `None` if there is none."""


class Found(NamedTuple):
    """Entries that a store found near B queries, in any order."""

    ids: Int[Tensor, "B J"]
    """−1 for none."""
    keys: Float[Tensor, "B J D"]
    """Undefined where the id is −1."""
    values: Shaped[Tensor, "B J *V"]
    """Labels or targets; undefined where the id is −1."""
    beyond: Float[Tensor, "B"] | None = None
    """As in `Candidates`."""

    @classmethod
    def stack(cls, rows: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Self:
        """Return what was found per query, (ids, keys, values), padded to the longest.

        Args:
            rows: tensors of ids (J,), keys (J, D) and values per query; J may differ.
        """
        ids = pad_sequence([row[0] for row in rows], batch_first=True, padding_value=-1)
        keys, values = (
            pad_sequence([row[place] for row in rows], batch_first=True) for place in (1, 2)
        )
        return cls(ids, keys, values)


class StoredMemory(Memory):
    """A memory that attaches to a store; one memory may write to it at a time, any number may read.

    A backend implements the abstract hooks below, which know ids but neither slots nor the ring.
    They are called under the lock and may raise any exception when the connection is lost. The call
    then raises it, too. Whether the change took effect is unknown, so the memory reads the ids in
    the store again at its next call.

    A memory that only reads sees the entries of the moment at which it attached or called `sync`.
    Entries that were removed since are not found any more; where one is needed, it calls `sync`.

    Args:
        capacity: maximum number of entries; when full, the oldest are overwritten first. This and
            the next four must be as they were when the store was created.
        key_dim: size or shape of a key.
        value_shape: shape of one value; `()` for class labels.
        value_dtype: an integer dtype for class labels, a floating one for regression targets.
        dtype: dtype in which keys are stored and distances computed, in float32 at least.
        device: device on which results are returned.
        read_only: attach for reading; other memories may write meanwhile.
        take_over: become the writer even if another memory is registered as such, as after a crash.
            The other's next change raises `WriterError`.
    """

    is_local = False

    def __init__(
        self,
        capacity: int,
        key_dim: int | Sequence[int],
        *,
        value_shape: Sequence[int] = (),
        value_dtype: torch.dtype = torch.int64,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        read_only: bool = False,
        take_over: bool = False,
    ) -> None:
        self._is_read_only, self._takes_over = read_only, take_over
        self._token = uuid.uuid4().hex
        self._is_writer = self._is_closed = False
        self._saved_next_id = 0
        self._recent: Recent | None = None
        super().__init__(
            capacity,
            key_dim,
            value_shape=value_shape,
            value_dtype=value_dtype,
            dtype=dtype,
            device=device,
        )

    # Hooks that a backend implements

    @abc.abstractmethod
    def _load_state(self) -> StoredState | None:
        """Return the state as it is now, or `None` if the store is new."""

    @abc.abstractmethod
    def _save_state(self, state: StoredState) -> None:
        """Replace the state; create the store if it is new. On return the state is durable."""

    @abc.abstractmethod
    def _list_ids(self) -> Int[Tensor, "M"]:
        """Return the ids of all entries, in any order."""

    @abc.abstractmethod
    def _upsert(
        self, ids: Int[Tensor, "N"], keys: Float[Tensor, "N D"], values: Shaped[Tensor, "N *V"]
    ) -> None:
        """Add entries, in this order, or replace those with the same ids.

        Each single entry must be stored whole or not at all. Reads that start afterwards see them.
        """

    @abc.abstractmethod
    def _fetch(
        self, ids: Int[Tensor, "N"]
    ) -> tuple[Int[Tensor, "M"], Float[Tensor, "M D"], Shaped[Tensor, "M *V"]]:
        """Return ids, keys and values of those entries that exist; `ids` are distinct."""

    @abc.abstractmethod
    def _remove(self, ids: Int[Tensor, "N"]) -> None:
        """Remove entries; ids that do not exist are ignored."""

    @abc.abstractmethod
    def _search(self, queries: Float[Tensor, "B D"], k: int) -> Found:
        """Return at least the `k` nearest entries of each query, or all if there are fewer."""

    def _replace_writer(self, old: str | None, new: str | None) -> bool:
        """Replace the writer's token if it is `old`, and return whether it was.

        A store that can do this atomically overrides it. By default two memories that attach at the
        same moment may both succeed; the one that was replaced notices at its next change.
        """
        state = self._load_state()
        if state is None or state.writer != old:
            return False
        self._save_state(state._replace(writer=new))
        return True

    def _disconnect(self) -> None:
        """Release the connection."""

    # Attaching

    @property
    def is_read_only(self) -> bool:
        return self._is_read_only

    # Entries that a reader knows may be gone: each attempt reads the ids in the store again.

    def entries(self) -> Entries:
        return self._repeat(super().entries)

    def get_keys(self, ids: Int[Tensor, "*N"] | Sequence[int]) -> Float[Tensor, "*N *D"]:
        return self._repeat(partial(super().get_keys, ids))

    def read(
        self, queries: Float[Tensor, "B *D"], k: int, *, keys_for: int | None = None
    ) -> Neighbors:
        return self._repeat(partial(super().read, queries, k, keys_for=keys_for))

    def read_causally(
        self,
        keys: Float[Tensor, "N *D"],
        values: Shaped[Tensor, "N *V"] | Sequence[Any],
        k: int,
        *,
        keys_for: int | None = None,
    ) -> Neighbors:
        return self._repeat(partial(super().read_causally, keys, values, k, keys_for=keys_for))

    def count_labels(
        self, neighbors: Neighbors, arriving: Int[Tensor, "B"] | None = None
    ) -> Neighbors:
        return self._repeat(partial(super().count_labels, neighbors, arriving))

    def _repeat(self, call: Callable[[], T]) -> T:
        for _ in range(MAX_READ_ATTEMPTS - 1):
            with contextlib.suppress(StaleReadError):
                return call()
        return call()

    def load(
        self,
        keys: Float[Tensor, "N *D"],
        values: Shaped[Tensor, "N *V"],
        *,
        rows_per_write: int = 10_000,
        tick: Callable[[int], object] | None = None,
    ) -> None:
        """Write many entries, in parts; a call that was interrupted continues where it stopped.

        Row n becomes the entry with id n, so the store must be empty or hold the first rows.

        Args:
            keys: one key per entry; at most `capacity`.
            values: one value per entry.
            rows_per_write: number of entries written at a time.
            tick: called with the number of further entries that are stored.
        """
        with self._lock:
            self._prepare(change=True)
            done = self.next_id
            if not (len(keys) == len(values) <= self.capacity):
                raise ValueError(
                    f"there must be as many values as keys and at most capacity={self.capacity}, "
                    f"got {len(keys)} keys and {len(values)} values"
                )
            is_begun = len(self) == done <= len(keys)
            if not is_begun or (done and not self._holds_row(done - 1, keys[done - 1])):
                raise ValueError("the store must be empty or hold the first of these rows")
        if tick is not None:
            tick(done)
        for start in range(done, len(keys), validation.count("rows_per_write", rows_per_write)):
            stop = min(start + rows_per_write, len(keys))
            self.write(keys[start:stop], values[start:stop])
            if tick is not None:
                tick(stop - start)

    def _holds_row(self, id_: int, key: Float[Tensor, "*D"]) -> bool:
        return torch.equal(
            self.get_keys([id_])[0].cpu(), key.cpu().to(self.dtype).to(self.distance_dtype)
        )

    def close(self) -> None:
        """Let another memory write, and release the connection; later calls raise an error."""
        with self._lock:
            if self._is_closed:
                return
            try:
                if self._is_writer:
                    self._save_next_id()
                    self._replace_writer(self._token, None)
                    self._is_writer = False
            finally:
                self._is_closed = True
                self._disconnect()

    def _attach(self) -> Holdings | None:
        self._recent = None
        state = self._load_state()
        if state is None:
            self._create()
            return Holdings(torch.empty(0, dtype=torch.int64), 0)
        check_schema(state.schema, self.schema)
        if not self._is_read_only and not self._is_writer:
            state = self._become_writer(state)
        ids = self._list_ids().cpu().sort().values
        self._saved_next_id = state.next_id
        next_id = max([state.next_id, *(ids[-1:] + 1).tolist()])
        surplus, kept = ids[: -self.capacity], ids[-self.capacity :]
        if len(surplus) and state.writer == self._token:
            self._remove(surplus)
        return Holdings(kept, next_id)

    def _create(self) -> None:
        if self._is_read_only:
            raise ValueError("there must be a stored memory to read, got an empty store")
        self._save_state(StoredState(self.schema, 0, self._token))
        self._is_writer = True

    def _become_writer(self, state: StoredState) -> StoredState:
        if state.writer is not None and not self._takes_over:
            raise WriterError(
                "another memory is registered as the writer of this store: close it, or pass "
                "take_over=True if its process has ended"
            )
        if not self._replace_writer(state.writer, self._token):
            raise WriterError("another memory became the writer of this store at the same moment")
        self._is_writer = True
        return state._replace(writer=self._token)

    def _require_open(self) -> None:
        if self._is_closed:
            raise ReadOnlyError("the memory was closed")

    def _require_writable(self) -> None:
        if self._is_read_only:
            raise ReadOnlyError("the memory is attached for reading only")
        if not self._may_write():
            raise WriterError("another memory has become the writer of this store")

    def _may_write(self) -> bool:
        state = self._load_state()
        return state is not None and state.writer == self._token

    # The hooks of `Memory`

    def _clear(self) -> None:
        self._recent = None
        self._save_next_id()
        self._remove(self._list_ids())

    def _put(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        self._store(self._slot_ids[slots], slots, keys, values)

    def _store(self, ids: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        self._recent = None
        before = self._slot_ids[slots]
        self._upsert(ids, keys, values)
        overwritten = before[(before >= 0) & (before != ids)]
        if len(overwritten):
            self._remove(overwritten)

    def _delete(self, slots: Int[Tensor, "N"]) -> None:
        self._recent = None
        self._save_next_id()  # the newest entry may be among them: its id must not come again
        self._remove(self._slot_ids[slots])

    def _get(self, slots: Int[Tensor, "N"]) -> tuple[Float[Tensor, "N D"], Shaped[Tensor, "N *V"]]:
        ids, places = self._slot_ids[slots].unique(return_inverse=True)
        if self._recent is None or not self._recent.holds(ids):
            self._recent = Recent.of(*self._fetch(ids))
        if not self._recent.holds(ids):
            self._is_unsure = True  # so that the next call reads the ids again
            raise StaleReadError("the writer keeps removing entries that are being read")
        keys, values = self._recent.get(ids)
        return keys[places], values[places]

    def _nearest(self, queries: Float[Tensor, "B D"], k: int) -> Candidates:
        found = self._search(queries, k)
        is_found = found.ids >= 0
        self._recent = Recent.of(found.ids[is_found], found.keys[is_found], found.values[is_found])
        places = self._ring.find(found.ids.flatten().cpu().numpy())  # −1 for newer entries
        slots = self._to_tensor(places).reshape(found.ids.shape)
        return Candidates(slots, found.beyond)

    @property
    def _readable_slot(self) -> int:
        """A slot of an entry that was found, since any other may have been removed."""
        if self._recent is not None:
            places = self._ring.find(self._recent.ids.cpu().numpy())
            if (places >= 0).any():
                return int(places[places >= 0][0])
        return super()._readable_slot

    def _move(self, capacity: int, device: torch.device) -> None:
        """Change capacity and device without moving the entries in the store."""
        ids, next_id = self._ring.ids(self._ring.oldest(len(self))), self._ring.next_id
        first = max(0, len(ids) - capacity)
        if capacity != self.capacity:
            schema = {**self.schema, "capacity": capacity}
            self._save_state(StoredState(schema, next_id, self._token))
            self._ring = Ring(capacity, next_id=next_id)
            self._remove(torch.from_numpy(ids[:first]))
        self._device, self._recent = device, None
        self._adopt(Holdings(torch.from_numpy(ids[first:]), next_id))

    def _refill(self, entries: Entries, capacity: int, next_id: int) -> None:
        """Store these entries, then remove all others."""
        self._recent = None
        others = np.setdiff1d(self._list_ids().cpu().numpy(), entries.ids.cpu().numpy())
        keys, values = entries.keys.flatten(1), entries.values
        self._upsert(entries.ids.to(self.device), keys.to(self.device), values.to(self.device))
        self._remove(torch.from_numpy(others))
        self._save_state(StoredState(self.schema, next_id, self._token))
        self._saved_next_id = next_id
        self._adopt(Holdings(entries.ids, next_id))

    def _save_next_id(self) -> None:
        if self._ring.next_id > self._saved_next_id and self._may_write():
            self._save_state(StoredState(self.schema, self._ring.next_id, self._token))
            self._saved_next_id = self._ring.next_id


class Recent(NamedTuple):
    """Entries fetched last, by ascending id, so that a search need not fetch them again."""

    ids: Int[Tensor, "M"]
    keys: Float[Tensor, "M D"]
    values: Shaped[Tensor, "M *V"]

    @classmethod
    def of(cls, ids: Tensor, keys: Tensor, values: Tensor) -> Self:
        """Return distinct entries of these, some of which may occur more than once."""
        distinct, inverse = ids.unique(return_inverse=True)
        first = torch.empty_like(distinct)
        first[inverse] = torch.arange(len(ids), device=ids.device)  # any of equal ones will do
        return cls(distinct, keys[first], values[first])

    def holds(self, ids: Int[Tensor, "N"]) -> bool:
        return bool(torch.isin(ids, self.ids).all())

    def get(self, ids: Int[Tensor, "N"]) -> tuple[Tensor, Tensor]:
        """Return new tensors with the keys and values of these ids, which must be here."""
        places = torch.searchsorted(self.ids, ids)
        return self.keys[places], self.values[places]
