"""The contract of a memory: what its users call, the same for every backend.

Calls validate their arguments, hold the lock, and convert devices and dtypes. What a backend
implements is in `mbpa.memory.backend`.

Shapes: B queries, N entries written, K neighbours, M live entries; D is the key's shape.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from mbpa.memory import validation
from mbpa.memory.backend import Backend
from mbpa.memory.neighbors import TENSORS, Entries, Neighbors
from mbpa.memory.ranking import (
    UnwrittenEntries,
    Windows,
    count_equal,
    count_equal_between,
    full_precision,
)
from mbpa.memory.ring import Ring
from mbpa.replay import is_replayed


class Memory(Backend):
    """Pairs of keys and values in a ring of fixed capacity; safe to use from several threads.

    A backend implements four hooks: `_clear`, `_put`, `_get` and `_nearest`. It should also
    implement `_delete` if it can drop entries; otherwise deleted entries are filtered out but
    remain stored. Two more, `_get_keys` and `_get_values`, only make it faster. Hooks receive valid
    arguments only, with flat keys (N, D) of `dtype` on `device`, and are called under the lock.
    They may use the public attributes and `_used_slots`. `__init__` calls `_attach`, which by
    default finds nothing, and then `_clear`, so a backend must set its own attributes before it
    calls `super().__init__`.

    A backend whose entries outlive the process overrides `_attach` to return what it already holds;
    then `_clear` is not called. `StoredMemory` does this for stores that keep entries by id. Such
    a backend also sets `is_local = False`, so that nobody takes a copy of the object for a copy of
    the entries.

    Args:
        capacity: maximum number of entries; when full, the oldest are overwritten first.
        key_dim: size or shape of a key. Keys are flattened for search, but neighbours' keys have
            this shape. Keys and queries must be zero or have norms from 1e-12 to 6e18 (float64:
            from 1e-138 to 4e153), so that squares of their differences neither underflow nor
            overflow.
        value_shape: shape of one value; `()` for class labels.
        value_dtype: an integer dtype for class labels, a floating one for regression targets.
        dtype: dtype in which keys are stored; distances are computed in this dtype, and in float32
            at least.
        device: device that stores the keys and answers queries.
    """

    def __init__(
        self,
        capacity: int,
        key_dim: int | Sequence[int],
        *,
        value_shape: Sequence[int] = (),
        value_dtype: torch.dtype = torch.int64,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(key_dim, value_shape, value_dtype, dtype, device)
        self._set_up()
        self._ring = Ring(validation.count("capacity", capacity))
        held = self._attach()
        if held is None:
            self._reset(self._ring)
        else:
            self._adopt(held)

    # Content

    @property
    def lock(self) -> threading.RLock:
        """The lock held during every call; hold it to make several calls atomic."""
        return self._lock

    def __repr__(self) -> str:
        held = (
            f"{len(self)} of {self.capacity} entries, keys of shape {self.key_shape}, {self.kind}"
        )
        return f"{type(self).__name__}({held}, {self.dtype}, {self.device})"

    def entries(self) -> Entries:
        """Return all entries, oldest first."""
        with self._lock:
            self._prepare(change=False)
            slots = self._ring.oldest(len(self))
            keys, values = self._get(self._to_tensor(slots)) if len(slots) else self._nothing
            ids = torch.from_numpy(self._ring.ids(slots))
            return Entries(ids, keys.reshape(-1, *self.key_shape), values)

    @property
    def ids(self) -> Int[Tensor, "M"]:
        """Ids of the live entries, oldest first."""
        with self._lock:
            self._prepare(change=False)
            return torch.from_numpy(self._ring.ids(self._ring.oldest(len(self))))

    def holds(self, ids: Int[Tensor, "N"]) -> Bool[Tensor, "N"]:
        """Return, for each id, whether it belongs to a live entry.

        Args:
            ids: ids that were returned by `write`.
        """
        with self._lock:
            self._prepare(change=False)
            return torch.from_numpy(self._ring.find(validation.parse_ids(ids).numpy()) >= 0)

    @property
    def revision(self) -> int:
        """Number that changes whenever entries get other keys under the same ids."""
        return self._revision

    def get_slots(self, ids: Int[Tensor, "N"] | Sequence[int]) -> Int[Tensor, "N"]:
        """Return the slots in which entries are stored now; −1 for ids without a live entry.

        Args:
            ids: ids that were returned by `write`.
        """
        with self._lock:
            return self._to_tensor(self._ring.find(validation.parse_ids(ids).numpy()))

    def get_keys(self, ids: Int[Tensor, "*N"] | Sequence[int]) -> Float[Tensor, "*N *D"]:
        """Return the keys of live entries, in at least float32.

        Args:
            ids: of any shape; an id may occur more than once.
        """
        wanted = validation.parse_ids(ids)
        shape = ids.shape if isinstance(ids, Tensor) else wanted.shape
        with self._lock:
            self._prepare(change=False)
            slots = self._to_tensor(self._require_live(wanted.numpy()))
            return self._read_keys(slots).reshape(*shape, *self.key_shape)

    # Writing

    def write(
        self, keys: Float[Tensor, "N *D"], values: Shaped[Tensor, "N *V"] | Sequence[Any]
    ) -> Int[Tensor, "N"]:
        """Add entries and return their ids, which never change; when full, overwrite the oldest.

        Args:
            keys: one key per entry, on the memory's device.
            values: one label or target per entry.
        """
        flat, values = self._parse_entries(keys, values)
        with self._lock:
            self._prepare(change=True)
            kept = min(len(flat), self.capacity)
            first_id = self._ring.next_id
            allocation = self._ring.allocate(kept, skipped=len(flat) - kept)  # overwritten at once
            slots, ids = self._to_tensor(allocation.slots), self._to_tensor(allocation.ids)
            kept_entries = flat[len(flat) - kept :], values[len(flat) - kept :]
            self._change(self._store, ids, slots, *kept_entries)
            self._ring.commit(allocation)
            self._slot_ids[slots] = ids
            return torch.arange(first_id, first_id + len(flat))

    def replace_keys(
        self, ids: Int[Tensor, "N"] | Iterable[int], keys: Float[Tensor, "N *D"]
    ) -> None:
        """Replace the keys of entries, as after training the embedding; keep ids, values and ages.

        Args:
            ids: distinct ids of live entries.
            keys: one new key per id.
        """
        flat = self._parse_keys(keys)
        with self._lock:
            self._prepare(change=True)
            slots = self._to_tensor(self._find_slots(ids))
            if len(slots) != len(flat):
                raise ValueError(
                    f"there must be one key per id, got {len(slots)} ids and {len(flat)} keys"
                )
            values = self._read_values(slots)
            self._change(self._store, self._slot_ids[slots], slots, flat, values)
            self._change_revision()

    def delete(self, ids: Int[Tensor, "N"] | Iterable[int]) -> None:
        """Remove entries; raise `ValueError` for ids never assigned, overwritten or deleted.

        Args:
            ids: ids that were returned by `write`.
        """
        with self._lock:
            self._prepare(change=True)
            slots = self._find_slots(ids)
            self._change(self._delete, self._to_tensor(slots))
            self._ring.free(slots)
            self._slot_ids[self._to_tensor(slots)] = -1

    def clear(self) -> None:
        """Remove all entries; the numbering of ids continues."""
        with self._lock:
            self._prepare(change=True)
            self._change(self._reset, Ring(self.capacity, next_id=self._ring.next_id))

    def resize(self, capacity: int) -> Self:
        """Change the capacity, keep the newest entries that fit, and return the memory.

        Args:
            capacity: new maximum number of entries.
        """
        with self._lock:
            self._prepare(change=True)
            self._change(self._move, validation.count("capacity", capacity), self.device)
        return self

    def to(
        self, device: torch.device | str | None = None, *, dtype: torch.dtype | None = None
    ) -> Self:
        """Move the memory to a device, convert it to a dtype, and return it.

        If that is refused or fails, nothing has changed.

        Args:
            device: default: where it is.
            dtype: of keys, and of values that are regression targets, which are rounded; default:
                as they are. Only a memory that holds its entries itself can be converted.
        """
        with self._lock:
            self._prepare(change=False)
            there = self.device if device is None else torch.empty(0, device=device).device
            if dtype is None:
                self._change(self._move, self.capacity, there)
                return self
            if not self.is_local:
                raise ValueError(f"dtype must be that of the stored entries, got {dtype}")
            with self.undo_on_error():
                self._change(self._convert, dtype)
                if there != self.device:
                    self._change(self._move, self.capacity, there)
        return self

    @contextmanager
    def undo_on_error(self) -> Iterator[None]:
        """Undo `to` if the context is left by an exception; only for memories that are local."""
        with self._lock:
            before = dict(vars(self))
            try:
                yield
            except BaseException:
                vars(self).update(before)
                self._is_unsure = False
                raise

    def _convert(self, dtype: torch.dtype) -> None:
        entries = self.entries()
        self.dtype = validation.check_key_dtype(dtype)
        if not self.holds_labels:
            self.value_dtype = dtype
        keys = self._parse_keys(entries.keys, allow_tiny=True)
        converted = Entries(entries.ids, keys, self._parse_values(entries.values))
        self._refill(converted, self.capacity, self._ring.next_id)

    def restore(self, entries: Entries, next_id: int) -> None:
        """Replace the content with `entries`, as returned by `entries()` of another memory.

        Args:
            entries: at most `capacity` of them, with ascending ids.
            next_id: the `next_id` of that memory.
        """
        self.prepare_restore(entries, next_id)()

    def prepare_restore(self, entries: Entries, next_id: int) -> Callable[[], None]:
        """Check the arguments of `restore`, and return a function that does it.

        Args:
            entries: as for `restore`.
            next_id: as for `restore`.
        """
        keys = self._parse_keys(entries.keys, allow_tiny=True)  # old versions accepted tiny keys
        values = self._parse_values(entries.values)
        if entries.ids.dtype != torch.int64 or entries.ids.ndim != 1:
            raise ValueError(
                f"ids must be a row of torch.int64, got {entries.ids.dtype} "
                f"of shape {tuple(entries.ids.shape)}"
            )
        ids = entries.ids.cpu().numpy()
        if not len(ids) == len(keys) == len(values) <= self.capacity:
            raise ValueError(
                f"entries must be at most capacity={self.capacity} of each, "
                f"got {len(ids)} ids, {len(keys)} keys, {len(values)} values"
            )
        if (np.diff(ids, prepend=-1, append=next_id) <= 0).any():
            raise ValueError(f"ids must ascend from 0 to below next_id={next_id}")

        def restore() -> None:
            with self._lock:
                self._prepare(change=True)
                restored = Entries(entries.ids, keys, values)
                self._change(self._refill, restored, self.capacity, next_id)

        return restore

    @property
    def next_id(self) -> int:
        """The id that the next entry will get."""
        return self._ring.next_id

    # Storage that outlives the process

    @property
    def schema(self) -> dict[str, Any]:
        """The form of the entries in words and numbers: what must be equal to attach."""
        return {
            "capacity": self.capacity,
            "key_dim": list(self.key_shape),
            "value_shape": list(self.value_shape),
            "value_dtype": str(self.value_dtype).removeprefix("torch."),
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    @property
    def is_read_only(self) -> bool:
        """Whether the memory is attached for reading only, so that no call may change entries."""
        return False

    def sync(self) -> None:
        """Take over what others have written to the backend; nothing if it has no other users."""
        with self._lock:
            self._require_open()
            held = self._attach()
            if held is not None:
                self._adopt(held)
            self._is_unsure = False

    def close(self) -> None:
        """Release connections, threads and files; by default a backend has none."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Reading

    def read(
        self, queries: Float[Tensor, "B *D"], k: int, *, keys_for: int | None = None
    ) -> Neighbors:
        """Return the `k` entries nearest to each query; all entries if there are fewer.

        Args:
            queries: on the memory's device.
            k: number of neighbours per query.
            keys_for: return the keys of only this many of the nearest (default: all).
        """
        k = validation.count("k", k)
        keys_for = None if keys_for is None else validation.count("keys_for", keys_for, least=0)

        def read(queries: Tensor) -> tuple[Tensor, ...]:
            found = self._read(self._parse_queries(queries), k, keys_for)
            return tuple(getattr(found, name) for name in TENSORS)

        with self._lock, full_precision(self.device):
            self._prepare(change=False)
            layout = self.layout if isinstance(queries, Tensor) else None
            if layout is None or not is_replayed(queries):
                return self._shape_keys(self._read(self._parse_queries(queries), k, keys_for))
            form = queries.shape, queries.dtype, queries.device, k, keys_for, layout
            tensors = dict(zip(TENSORS, self._replayer.run(form, read, queries), strict=True))
            found = Neighbors(**tensors, revision=self._revision, capacity=self.capacity)
            return self._shape_keys(found)

    @property
    def layout(self) -> Hashable | None:
        """What a read depends on besides the content of tensors that writes modify in place.

        `None` means that reads cannot be recorded and replayed.
        """
        described = self._describe_layout()
        if described is None:
            return None
        return described, self._slot_ids.data_ptr(), self._ring.used, len(self), self._revision

    def read_causally(
        self,
        keys: Float[Tensor, "N *D"],
        values: Shaped[Tensor, "N *V"] | Sequence[Any],
        k: int,
        *,
        keys_for: int | None = None,
    ) -> Neighbors:
        """Return the neighbours each entry would find if all were read and written one by one.

        Entry t sees the current content and the entries before t, except for what writing those
        would overwrite. Nothing is written.

        Args:
            keys: one key per entry, in order of time; these are also the queries.
            values: one label or target per entry.
            k: number of neighbours per entry.
            keys_for: return the keys of only this many of the nearest (default: all).
        """
        flat, values = self._parse_entries(keys, values)
        k = validation.count("k", k)
        keys_for = None if keys_for is None else validation.count("keys_for", keys_for, least=0)
        with self._lock, full_precision(self.device):
            self._prepare(change=False)
            queries, count, live = self._parse_queries(keys), len(flat), len(self)
            gone = np.maximum(live + np.arange(count) - self.capacity, 0)
            new_ids = self._ring.next_id + np.arange(count)
            old_ids = self._ring.ids(self._ring.oldest(min(live, count)))  # gone < count: enough
            since = self._to_tensor(np.concatenate([old_ids, new_ids])[gone])
            needed = self._to_tensor(np.clip(live - gone, 0, k))
            # For the last entries many candidates may be overwritten already: ask for
            # proportionally more.
            seen = max(1, live - int(gone[-1])) if count else 1
            reach = (k + k // 4 + 8) * live // seen
            past = self._read(queries, k, keys_for, Windows(since, needed), reach)
            stored = flat.to(self.distance_dtype)
            own = UnwrittenEntries(queries, stored, values, self._to_tensor(new_ids), since)
            return self._shape_keys(own.merge_into(past, k, keys_for))

    def count_labels(
        self, neighbors: Neighbors, arriving: Int[Tensor, "B"] | None = None
    ) -> Neighbors:
        """Return these neighbours with `label_counts`, for the kernel `Balanced`.

        Hold `lock` during the read and this call if other threads write. All labels are sorted in
        the first call after a change; later calls are faster.

        Args:
            neighbors: neighbours from a read of this memory.
            arriving: for neighbours from `read_causally`, the labels that were passed there. The
                counts of each row are then of the entries that it would see.
        """
        if not self.holds_labels:
            raise ValueError("label counts are for labels, the memory holds regression targets")
        wanted = neighbors.values.to(torch.int64).contiguous()
        with self._lock:
            self._prepare(change=False)
            if arriving is None:
                counts = count_equal(self._sort_labels(), wanted)
            else:
                seen = torch.cat([self._read_labels(), arriving.to(self.device, torch.int64)])
                last = len(self) + torch.arange(len(wanted), device=self.device)
                first = (last - self.capacity).clamp_min(0)  # what came before is overwritten
                counts = count_equal_between(seen, wanted, first, last)
        # A neighbour that was removed since the read may have been the last with its label.
        counts = counts.clamp_min(1).masked_fill(~neighbors.mask, 1)
        return replace(neighbors, label_counts=counts)

    # Inside

    def _prepare(self, *, change: bool) -> None:
        """Make ready for a call, under the lock."""
        self._require_open()
        if change:
            self._require_writable()
        if self._is_unsure:
            self.sync()

    def _move(self, capacity: int, device: torch.device) -> None:
        """Change capacity and device; keep the newest entries that fit."""
        entries, before = self.entries(), self._device
        try:
            self._device = device
            self._refill(entries, capacity, self._ring.next_id)
        except BaseException:
            self._device = before
            raise

    def _refill(self, entries: Entries, capacity: int, next_id: int) -> None:
        """Replace the content with these entries; if that fails, restore the previous state."""
        before = dict(vars(self))
        first = max(0, len(entries.ids) - capacity)
        ids = entries.ids[first:].cpu().numpy()
        try:
            self._reset(Ring(capacity, ids, next_id))
            slots = torch.arange(len(ids), device=self.device)
            keys = entries.keys[first:].flatten(1).to(self.device)
            kept = entries.ids[first:].to(self.device)
            self._store(kept, slots, keys, entries.values[first:].to(self.device))
            self._slot_ids[slots] = kept
        except BaseException:
            vars(self).update(before)
            raise
