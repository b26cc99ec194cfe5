"""A memory that several processes hold together, each on its own device or machine.

All processes of a `torch.distributed` group keep the same ring, and each stores every W-th slot.
For a read, the queries of all processes are gathered, each process finds its own nearest entries,
and the best of all are ranked as in `ExactMemory`, from the same keys with the same arithmetic. So
the neighbours are those of one memory, on a CPU to the bit. On a GPU one memory measures distances
in its search kernels, which add in another order: there the last bits differ.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int, Shaped, UInt8
from torch import Tensor

from mbpa.memory import validation
from mbpa.memory.exact import ExactMemory
from mbpa.memory.neighbors import Candidates, Neighbors
from mbpa.memory.ranking import measure_candidates, measure_each_query


class ShardedMemory(ExactMemory):
    """An exact memory whose entries are distributed over the processes of a group.

    All processes must make the same calls in the same order, from one thread each. Calls that
    change entries need the same arguments everywhere. Reads do not: each process asks for the
    neighbours of queries of its own, any number of them. Calls that differ raise `ValueError` in
    every process, and nothing changes. If a process dies, the others get a `ConnectionError`: with
    gloo at once, with NCCL after the group's timeout.

    Every process also keeps 32 bytes of bookkeeping per slot. `entries`, `resize`, `to` and saving
    bring all entries to every process.

    Args:
        capacity: number of entries that all processes hold together.
        key_dim: size or shape of a key.
        value_shape: shape of one value.
        value_dtype: dtype of the values.
        dtype: dtype in which keys are stored.
        device: device of this process; with NCCL it must be a GPU.
        group: the processes; by default all of them (`torch.distributed.init_process_group`).
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
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "ShardedMemory needs a group of processes: start them with torchrun and call "
                "torch.distributed.init_process_group first"
            )
        self._group = _Group(group, torch.device(device))
        super().__init__(
            capacity,
            key_dim,
            value_shape=value_shape,
            value_dtype=value_dtype,
            dtype=dtype,
            device=device,
        )

    @property
    def share(self) -> int:
        """Number of slots that this process stores."""
        return self._count_own(self.capacity)

    def read(
        self, queries: Float[Tensor, "B *D"], k: int, *, keys_for: int | None = None
    ) -> Neighbors:
        """Return the `k` entries nearest to each of this process's queries.

        Args:
            queries: on the memory's device; processes may have different numbers of them.
            k: number of neighbours per query, the same in all processes.
            keys_for: return the keys of only this many of the nearest, likewise.
        """
        with self._lock:
            self._prepare(change=False)
            wide = self._parse_queries(queries)
            self._group.agree("read", (validation.count("k", k), keys_for))
            everything, mine = self._group.gather_rows(wide)
            shaped = everything.reshape(-1, *self.key_shape).to(queries.dtype)
            return super().read(shaped, k, keys_for=keys_for).rows(mine)

    # Hooks of `Memory`: slot s is slot s // W of process s % W

    def _clear(self) -> None:
        self._group.agree("a new memory", tuple(self.schema.items()))
        self._allocate(self.share)

    def _store(
        self,
        ids: Int[Tensor, "N"],
        slots: Int[Tensor, "N"],
        keys: Float[Tensor, "N D"],
        values: Shaped[Tensor, "N *V"],
    ) -> None:
        self._group.agree("write", None, ids, slots, keys, values)
        is_mine = self._is_mine(slots)
        super()._put(self._to_local(slots[is_mine]), keys[is_mine], values[is_mine])

    def _delete(self, slots: Int[Tensor, "N"]) -> None:
        self._group.agree("delete", None, slots)
        super()._delete(self._to_local(slots[self._is_mine(slots)]))

    def _get(self, slots: Int[Tensor, "N"]) -> tuple[Float[Tensor, "N D"], Shaped[Tensor, "N *V"]]:
        return self._get_keys(slots), self._get_values(slots)

    def _get_keys(self, slots: Int[Tensor, "N"]) -> Float[Tensor, "N D"]:
        return self._collect(self._keys, slots)

    def _get_values(self, slots: Int[Tensor, "N"]) -> Shaped[Tensor, "N *V"]:
        return self._collect(self._values, slots)

    def _nearest(self, queries: Float[Tensor, "B D"], k: int) -> Candidates:
        self._group.agree("read", k, queries)
        slots, distances, beyond = self._find_own(queries, k)
        slots, distances = (torch.cat(self._group.gather(t), 1) for t in (slots, distances))
        beyond = torch.stack(self._group.gather(beyond)).amin(0)
        distances, order = distances.sort(1)
        if slots.shape[1] > k:
            beyond = torch.minimum(beyond, distances[:, k])
        slots = slots.gather(1, order)[:, :k]
        return Candidates(slots, beyond, self._measure(queries, slots))

    @property
    def _used_slots(self) -> int:
        return self._count_own(self._ring.used)

    @property
    def _readable_slot(self) -> int:
        return int(self._ring.oldest(1)[0])

    def _describe_layout(self) -> None:
        return None  # calls to other processes are not recorded

    # This process's share

    def _find_own(self, queries: Float[Tensor, "B D"], k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return slots and distances of this process's `k` nearest, and a bound on its others."""
        rows, used = len(queries), self._used_slots
        slots = torch.full((rows, k), -1, device=self.device)
        distances = queries.new_full((rows, k), math.inf)
        beyond = queries.new_full((rows,), math.inf)
        if used:
            found = super()._nearest(queries, min(k, used))
            width = found.slots.shape[1]
            measured, _ = measure_each_query(
                queries, found.slots, lambda rows: self._keys[rows].to(self.distance_dtype)
            )
            is_empty = self._norms[found.slots] == math.inf
            distances[:, :width] = measured.masked_fill(is_empty, math.inf)
            mine = found.slots * self._group.size + self._group.rank
            slots[:, :width] = mine.masked_fill(is_empty, -1)
            beyond = beyond if found.beyond is None else found.beyond
        return slots, distances, beyond

    def _measure(
        self, queries: Float[Tensor, "B D"], slots: Int[Tensor, "B J"]
    ) -> tuple[Float[Tensor, "B J"], Float[Tensor, "B J"]]:
        """Measure candidates exactly as a memory in one process does, from the same keys."""
        in_use = self._slot_ids[: self._ring.used]
        if 2 * slots.shape[1] > len(self):  # then every live entry is needed
            wanted = (in_use >= 0).nonzero()[:, 0]
        else:
            wanted = slots[slots >= 0].unique()
        keys = self._get_keys(wanted).to(self.distance_dtype)
        place = torch.zeros(self._ring.used, dtype=torch.int64, device=self.device)
        place[wanted] = torch.arange(len(wanted), device=self.device)
        filled = slots.where(slots >= 0, wanted[0])
        distances, dots = measure_candidates(
            queries, filled, in_use, len(self), lambda rows: keys[place[rows]]
        )
        return distances.masked_fill(slots < 0, math.inf), dots

    def _collect(self, stored: Tensor, slots: Int[Tensor, "N"]) -> Tensor:
        """Bring the content of slots from the processes that store them to all processes."""
        self._group.agree("fetch", None, slots)
        is_mine = self._is_mine(slots)
        found = stored.new_zeros(len(slots), *stored.shape[1:])
        found[is_mine] = stored[self._to_local(slots[is_mine])]
        return self._group.join(found)

    def _is_mine(self, slots: Int[Tensor, "N"]) -> Tensor:
        return slots % self._group.size == self._group.rank

    def _to_local(self, slots: Int[Tensor, "N"]) -> Int[Tensor, "N"]:
        return slots // self._group.size

    def _count_own(self, slots: int) -> int:
        """Return how many of the first slots this process stores."""
        return (slots - self._group.rank + self._group.size - 1) // self._group.size


class _Group:
    """The processes, and what they exchange: bytes, so that nothing is rounded."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("group must contain this process")
        self._device = device if dist.get_backend(group) == "nccl" else torch.device("cpu")
        self._failure: str | None = None

    def agree(self, call: str, settings: object, *tensors: Tensor) -> None:
        """Raise `ValueError` unless all processes make this call with the same arguments."""
        digest = zlib.crc32(repr(settings).encode())
        for tensor in tensors:
            digest = zlib.crc32(str(tuple(tensor.shape)).encode(), digest)
            digest = _hash(tensor, digest)
        known = zlib.crc32(call.encode())
        mine = torch.tensor([known, digest], device=self._device)
        for rank, (theirs, their_digest) in enumerate(t.tolist() for t in self.gather(mine)):
            if theirs != known:
                raise ValueError(
                    f"all processes must make the same calls in the same order, but process "
                    f"{self.rank} is at {call!r} and process {rank} is not"
                )
            if their_digest != digest:
                raise ValueError(
                    f"all processes must pass the same arguments, but those of process "
                    f"{self.rank} and process {rank} differ at {call!r}"
                )

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return this tensor of all processes; it has the same shape in each."""
        mine = _to_bytes(tensor).to(self._device)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        self._call(dist.all_gather, parts, mine)
        return [_from_bytes(part.to(tensor.device), tensor) for part in parts]

    def gather_rows(self, rows: Float[Tensor, "B D"]) -> tuple[Float[Tensor, "A D"], slice]:
        """Return the rows of all processes, one after the other, and which are this process's.

        If all processes have the same rows, they are returned once.
        """
        digest = _hash(rows)
        sizes = [t.tolist() for t in self.gather(torch.tensor([len(rows), digest]))]
        if all(size == sizes[0] for size in sizes):
            return rows, slice(0, len(rows))
        counts = [count for count, _ in sizes]
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = self.gather(padded)
        first = sum(counts[: self.rank])
        joined = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
        return joined, slice(first, first + len(rows))

    def join(self, tensor: Tensor) -> Tensor:
        """Return the tensor with the elements that one process has; the others have zeros there."""
        mine = _to_bytes(tensor).to(self._device)
        self._call(dist.all_reduce, mine)
        return _from_bytes(mine.to(tensor.device), tensor)

    def _call(self, exchange: Any, *arguments: Any) -> None:
        if self._failure is not None:
            raise ConnectionError(self._failure)
        try:
            exchange(*arguments, group=self._group)
        except RuntimeError as error:
            self._failure = (
                "a process of the group has died or does not answer, so its share of the memory "
                f"is lost; start all of them again and restore a checkpoint ({_shorten(error)})"
            )
            raise ConnectionError(self._failure) from error


def _to_bytes(tensor: Tensor) -> UInt8[Tensor, "N"]:
    return tensor.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def _hash(tensor: Tensor, before: int = 0) -> int:
    return zlib.crc32(_to_bytes(tensor).cpu().numpy().data, before)


def _from_bytes(content: UInt8[Tensor, "N"], like: Tensor) -> Tensor:
    return content.view(like.dtype).reshape(like.shape)


def _shorten(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0][:200] if lines else type(error).__name__
