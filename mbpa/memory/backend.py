"""What a backend of a memory implements, and what every memory does with it.

Entries lie in numbered slots. This part keeps track of which slots hold which ids, and ranks. A
backend only proposes candidates. Their distances are recomputed as Σ(h−q)², so that the rounding of
‖h‖² − 2q·h affects neither order nor kernel. Where an entry that was not proposed might be nearer,
more candidates are asked for.

Shapes: B queries, N entries, K neighbours, J candidates, M live entries; D is the size of a key.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from mbpa.memory import validation
from mbpa.memory.copying import Copyable
from mbpa.memory.neighbors import Candidates, Holdings, Neighbors
from mbpa.memory.ranking import (
    SCRATCH_BYTES,
    Windows,
    find_unsure,
    measure_candidates,
    order_nearest_first,
)
from mbpa.memory.ring import Ints, Ring
from mbpa.memory.schema import EntryForm
from mbpa.replay import assume


class Backend(Copyable, EntryForm, abc.ABC):
    """The hooks of a memory, the slots of its entries, and the ranking of candidates."""

    _ring: Ring
    _is_unsure: bool = False
    """Whether a change failed, so that the backend must be asked what it holds."""

    # Hooks that a backend implements

    @abc.abstractmethod
    def _clear(self) -> None:
        """Discard all entries and prepare `self.capacity` empty slots on `self.device`."""

    @abc.abstractmethod
    def _put(
        self, slots: Int[Tensor, "N"], keys: Float[Tensor, "N D"], values: Shaped[Tensor, "N *V"]
    ) -> None:
        """Store copies of these entries in distinct slots, replacing their previous content."""

    @abc.abstractmethod
    def _get(self, slots: Int[Tensor, "N"]) -> tuple[Float[Tensor, "N D"], Shaped[Tensor, "N *V"]]:
        """Return keys and values of these slots: at least one slot, and none of them empty."""

    def _get_keys(self, slots: Int[Tensor, "N"]) -> Float[Tensor, "N D"]:
        """Return the keys in a new tensor that the caller may modify; override it if faster."""
        return self._get(slots)[0].clone()

    def _get_values(self, slots: Int[Tensor, "N"]) -> Shaped[Tensor, "N *V"]:
        """Return the values, which the caller does not modify."""
        return self._get(slots)[1]

    @abc.abstractmethod
    def _nearest(self, queries: Float[Tensor, "B D"], k: int) -> Candidates:
        """Return the slots of at least the `k` nearest entries, and a bound on all others.

        `k` is at least 1 and at most the number of stored entries: `len(self)`, plus the deleted
        ones if the backend has no `_delete`.
        """

    def _delete(self, slots: Int[Tensor, "N"]) -> None:
        """Drop the entries in these slots."""

    def _attach(self) -> Holdings | None:
        """Return what the backend already holds, or `None` if there is nothing to attach to.

        Called by `__init__` and `sync`. The backend compares the form of its entries with
        `self.schema` and raises `ValueError` if they differ (`check_schema`).
        """
        return None

    def _store(
        self,
        ids: Int[Tensor, "N"],
        slots: Int[Tensor, "N"],
        keys: Float[Tensor, "N D"],
        values: Shaped[Tensor, "N *V"],
    ) -> None:
        """Store entries with their ids; a backend that outlives the process overrides it."""
        self._put(slots, keys, values)

    def _get_content(self) -> dict[str, Any]:
        return self._copy_attributes("_slot_ids")  # the ring has them, too

    def _set_content(self, content: dict[str, Any]) -> None:
        super()._set_content(content)
        slots = self._ring.oldest(len(self))
        self._set_slot_ids(self._ring.capacity)
        self._slot_ids[self._to_tensor(slots)] = self._to_tensor(self._ring.ids(slots))

    def _require_writable(self) -> None:
        """Raise an error if this memory must not change entries; called before every change."""

    def _require_open(self) -> None:
        """Raise an error if the memory was closed; called before every call."""

    def _describe_layout(self) -> Hashable | None:
        """Return the addresses of the tensors that a search on a GPU reads, and other settings.

        A backend whose searches may be recorded as a CUDA graph returns everything that they depend
        on besides the content of these tensors. By default they are not recorded.
        """
        return None

    @property
    def _used_slots(self) -> int:
        """The number of slots that have held an entry since the last `_clear`.

        They are the slots below this number; a search need not look at the others.
        """
        return self._ring.used

    # Slots and ids

    @property
    def capacity(self) -> int:
        return self._ring.capacity

    def __len__(self) -> int:
        return self._ring.live

    @property
    def _drops_entries(self) -> bool:
        """Whether the backend drops deleted entries; otherwise it keeps proposing them."""
        return type(self)._delete is not Backend._delete

    def _change(self, hook: Callable[..., None], *arguments: Any) -> None:
        """Call a hook; if it raises, remember that what the backend holds is unknown."""
        self._is_unsure = True
        self._sorted_labels = None
        hook(*arguments)
        self._is_unsure = False

    def _find_slots(self, ids: Tensor | Iterable[int]) -> Ints:
        return self._require_live(validation.parse_distinct_ids(ids).numpy())

    def _require_live(self, wanted: Ints) -> Ints:
        """Return the slots of the entries with these ids."""
        slots = self._ring.find(wanted)
        if (slots < 0).any():
            unknown = wanted[slots < 0][:8].tolist()
            raise ValueError(f"ids must belong to live entries, got unknown ids {unknown}")
        return slots

    def _to_tensor(self, array: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(self.device)

    def _shape_keys(self, neighbors: Neighbors) -> Neighbors:
        if len(self.key_shape) == 1:
            return neighbors
        return neighbors.with_keys(neighbors.keys.unflatten(2, self.key_shape))

    def _reset(self, ring: Ring) -> None:
        self._set_ring(ring)
        with torch.inference_mode(False):  # these tensors are written to later
            self._clear()

    def _adopt(self, held: Holdings) -> None:
        """Keep track of entries that the backend already holds."""
        ids = held.ids.cpu().numpy()
        slots = np.arange(len(ids)) if held.slots is None else held.slots.cpu().numpy()
        if len(ids) > self.capacity or (np.diff(ids, prepend=-1, append=held.next_id) <= 0).any():
            raise ValueError(
                f"a backend must hold at most capacity={self.capacity} entries, with ids that "
                f"ascend from 0 to below next_id={held.next_id}, got {len(ids)} entries"
            )
        self._set_ring(Ring.of(self.capacity, ids, slots, held.next_id))
        self._slot_ids[self._to_tensor(slots)] = self._to_tensor(ids)

    def _set_ring(self, ring: Ring) -> None:
        self._ring = ring
        self._sorted_labels = None
        self._change_revision()
        self._set_slot_ids(ring.capacity)

    def _set_slot_ids(self, capacity: int) -> None:
        with torch.inference_mode(False):
            # One more than there are slots: slot −1, which stands for no entry, has id −1.
            self._slot_ids: Int[Tensor, "S"] = torch.full((capacity + 1,), -1, device=self.device)

    # Ranking

    def _read(
        self,
        queries: Float[Tensor, "B D"],
        k: int,
        keys_for: int | None,
        windows: Windows | None = None,
        reach: int = 0,
    ) -> Neighbors:
        """Rank `reach` candidates per query, in chunks; retry with more where these are too few."""
        width = min(k, len(self))
        stored = len(self) if self._drops_entries else self._ring.used
        reach = min(stored, max(reach, k + k // 8 + 8))
        numbers = 16 * max(reach, self.key_size)  # roughly; `measure_candidates` has its own limit
        rows = max(1, SCRATCH_BYTES // (numbers * self.distance_dtype.itemsize))
        if len(queries) > rows:
            parts = []
            for start in range(0, len(queries), rows):
                chunk = slice(start, start + rows)
                theirs = windows and windows.rows(chunk)
                parts.append(self._read(queries[chunk], k, keys_for, theirs, reach))
            return Neighbors.concatenate(parts)
        found, beyond = self._rank(queries, width, keys_for, windows, reach)
        if width and reach < stored:
            is_unsure = find_unsure(queries, found.distances, windows and windows.needed, beyond)
            if not assume(~is_unsure.any()):
                unsure = is_unsure.nonzero()[:, 0]
                theirs = windows and windows.rows(unsure)
                wider = self._read(queries[unsure], k, keys_for, theirs, 4 * reach)
                found = found.with_rows(unsure, wider)
        return found

    def _rank(
        self,
        queries: Float[Tensor, "B D"],
        width: int,
        keys_for: int | None,
        windows: Windows | None,
        reach: int,
    ) -> tuple[Neighbors, Float[Tensor, "B"] | None]:
        """Return the `width` nearest of `reach` candidates by recomputed distance.

        Among equally near ones the newer come first.
        """
        slots, beyond, known = self._find_candidates(queries, reach, width)
        ids = self._slot_ids.take(slots)
        hidden = ids < (0 if windows is None else windows.since[:, None])
        # On a CPU looking for hidden entries is cheap, and asking the ring is not.
        may_hide = self.device.type != "cpu" or bool(hidden.any())
        if may_hide:
            slots = slots.masked_fill(hidden, self._readable_slot)
        in_use = self._slot_ids[: self._ring.used]
        distances, dots = known or measure_candidates(
            queries, slots, in_use, len(self), self._read_keys
        )
        if may_hide:
            distances = distances.masked_fill(hidden, math.inf)
        order = order_nearest_first(distances, ids)[:, :width]
        distances, slots, ids = (t.gather(1, order) for t in (distances, slots, ids))
        values, keys = self._read_values(slots), self._read_keys(slots[:, :keys_for])
        mask = distances != math.inf
        if may_hide:
            ids, slots = ids.where(mask, -1), slots.where(mask, -1)
        return Neighbors(
            values=values,
            distances=distances,
            dots=dots.gather(1, order),
            mask=mask,
            ids=ids,
            slots=slots,
            keys=keys,
            revision=self._revision,
            capacity=self.capacity,
        ), beyond

    @property
    def _readable_slot(self) -> int:
        """A slot whose key and value can be read."""
        return int(self._ring.oldest(1)[0])

    def _find_candidates(self, queries: Float[Tensor, "B D"], reach: int, width: int) -> Candidates:
        """Return the backend's candidates, padded with −1 up to `width`."""
        if not width or not len(queries):
            empty = torch.empty(len(queries), width, dtype=torch.int64, device=self.device)
            return Candidates(empty, None)
        found = self._nearest(queries, reach)
        missing = width - found.slots.shape[1]
        if missing <= 0:
            return found
        slots = torch.nn.functional.pad(found.slots, (0, missing), value=-1)
        return Candidates(slots, found.beyond)

    def _read_keys(self, slots: Int[Tensor, "*S"]) -> Float[Tensor, "*S D"]:
        keys = self._get_keys(slots.flatten()) if slots.numel() else self._nothing[0]
        return keys.to(self.distance_dtype).reshape(*slots.shape, self.key_size)

    def _read_values(self, slots: Int[Tensor, "*S"]) -> Shaped[Tensor, "*S *V"]:
        values = self._get_values(slots.flatten()) if slots.numel() else self._nothing[1]
        return values.reshape(*slots.shape, *self.value_shape)

    @property
    def _nothing(self) -> tuple[Float[Tensor, "0 D"], Shaped[Tensor, "0 *V"]]:
        keys = torch.empty(0, self.key_size, dtype=self.dtype, device=self.device)
        shape = (0, *self.value_shape)
        return keys, torch.empty(shape, dtype=self.value_dtype, device=self.device)

    def _sort_labels(self) -> Int[Tensor, "M"]:
        if self._sorted_labels is None:
            self._sorted_labels = self._read_labels().sort().values
        return self._sorted_labels

    def _read_labels(self) -> Int[Tensor, "M"]:
        """Return the labels of all entries, oldest first."""
        slots = self._to_tensor(self._ring.oldest(len(self)))
        return self._read_values(slots).to(torch.int64)
