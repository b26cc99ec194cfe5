"""The conformance suite of memories, with one function per part of the contract."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from mbpa.memory import Entries, Memory, Neighbors
from mbpa.testing.attaching import ATTACHING, AttachMemory, fail_in, require_lost_connection
from mbpa.testing.claims import require, require_same
from mbpa.testing.twins import KEY_DIM, MakeMemory, Twins


def check_memory(
    make: MakeMemory, *, exact: bool = True, attach: AttachMemory | None = None
) -> None:
    """Check that a backend fulfils the contract of `Memory`.

    Args:
        make: returns a new memory for a capacity and a `key_dim`; its dtypes, device and value
            shape are up to you.
        exact: whether the backend always finds the true nearest entries. If not, what it finds must
            still be live, distinct, in order and with the correct distances, and must include half
            of the true nearest entries on an easy problem.
        attach: for a backend whose entries outlive the memory: returns another memory attached to
            the storage of the given one, which is still open. If the second argument is true, it is
            attached for reading only; otherwise it becomes the writer in place of the other.

    Raises:
        AssertionError: a part of the contract is broken; the message names it.

    Example:
        >>> import mbpa
        >>> mbpa.testing.check_memory(lambda capacity, key_dim: mbpa.ExactMemory(capacity, key_dim))
    """
    parts: list[Callable[[MakeMemory, bool], None]] = [
        _starts_empty,
        _overwrites_the_oldest,
        _hands_out_copies,
        _ranks_ties_newest_first,
        _measures_from_the_query,
        _deletes_and_reuses_room,
        _forgets_what_is_deleted,
        _clears_and_resizes,
        _restores,
        _replaces_keys,
        _reads_causally,
        _refuses_bad_input,
        _keeps_its_word_in_threads,
        _finds_the_nearest,
        _survives_a_failed_hook,
    ]
    if attach is not None:
        parts += [partial(part, attach=attach) for part in ATTACHING]
    for part in parts:
        try:
            part(make, exact)
        except Exception as error:
            name = (part.func if isinstance(part, partial) else part).__name__
            error.add_note(f"in check_memory, part {name.strip('_')!r}")
            raise


def _survives_a_failed_hook(make: MakeMemory, exact: bool) -> None:
    """Check that a hook which raises before it does anything, leaves the memory as it was."""
    twins = Twins(make, 6, exact)
    twins.write(twins.keys(8))
    calls: tuple[tuple[str, Callable[[], object]], ...] = (
        ("_store", lambda: twins.memory.write(twins.keys(3), twins.values(3))),
        ("_store", lambda: twins.memory.replace_keys(twins.ids()[:2], twins.keys(2))),
        ("_delete", lambda: twins.memory.delete(twins.ids()[:2])),
        ("_nearest", lambda: twins.memory.read(twins.keys(2), 3)),
    )
    for hook, call in calls:
        with fail_in(twins.memory, hook, applied=0):
            require_lost_connection(f"a call in which {hook} raises", call)
        twins.agree(f"a {hook} that raised")
        twins.read(twins.keys(2), 3)
    twins.write(twins.keys(4))
    twins.read(twins.keys(3), 4)


def _starts_empty(make: MakeMemory, exact: bool) -> None:
    twins = Twins(make, 5, exact)
    require_same("key_shape of a new memory", (KEY_DIM,), twins.memory.key_shape)
    twins.agree("being made")
    twins.read(twins.keys(2), 3)
    twins.read(twins.keys(0), 3)


def _overwrites_the_oldest(make: MakeMemory, exact: bool) -> None:
    twins = Twins(make, 6, exact)
    for size in (1, 3, 0, 4, 2, 14, 5, 6):
        twins.write(twins.keys(size))
        for k in (1, 4, 6, 9):
            twins.read(twins.keys(3), k)


def _hands_out_copies(make: MakeMemory, exact: bool) -> None:
    twins = Twins(make, 6, exact)
    twins.write(twins.keys(6))
    held, found = twins.memory.entries(), twins.memory.read(twins.keys(3), 6)
    parts = (held.keys, held.values, found.keys, found.values)
    before = [part.tolist() for part in parts]
    twins.write(twins.keys(6))
    require_same("what was returned, after a write", before, [part.tolist() for part in parts])


def _ranks_ties_newest_first(make: MakeMemory, exact: bool) -> None:
    twins = Twins(make, 70, exact)
    twins.write(twins.keys(1).expand(50, -1).clone())  # more than a read ranks at first
    twins.write(twins.keys(30))
    for k in (1, 3, 20, 70):
        twins.read(torch.cat([twins.memory.entries().keys[:2], twins.keys(2)]), k)


def _measures_from_the_query(make: MakeMemory, exact: bool) -> None:
    twins = Twins(make, 40, exact)
    twins.write(twins.keys(40, real=True))
    for keys_for in (None, 0, 2, 9):
        twins.read(twins.keys(5, real=True), 5, keys_for)


def _deletes_and_reuses_room(make: MakeMemory, exact: bool) -> None:
    twins = Twins(make, 8, exact)
    twins.write(twins.keys(7))
    twins.delete([1, 4, 5])
    for size in (3, 1, 2, 9):  # the first four entries overwrite nothing
        twins.read(twins.keys(4), 6)
        twins.write(twins.keys(size))
    twins.read(twins.keys(4), 6)
    oldest = twins.ids()[0]
    for what, ids in (
        ("was never given", [twins.next_id]),
        ("is negative", [-1]),
        ("was overwritten", [oldest - 1]),
        ("was deleted", [1]),
        ("comes twice", [oldest, oldest]),
    ):
        _check_refusal(
            twins, f"delete of an id that {what}", partial(twins.memory.delete, torch.tensor(ids))
        )
    twins.delete([])
    twins.delete(twins.ids())
    twins.read(twins.keys(2), 3)
    twins.write(twins.keys(3))
    twins.read(twins.keys(2), 3)


def _forgets_what_is_deleted(make: MakeMemory, exact: bool) -> None:
    twins = Twins(make, 60, exact)
    twins.write(twins.keys(60))
    query = twins.keys(1)
    twins.delete(twins.nearest(query[0], 55))  # all other entries are farther away than these
    for k in (1, 3, 5, 9):
        twins.read(query, k)


def _clears_and_resizes(make: MakeMemory, exact: bool) -> None:
    twins = Twins(make, 6, exact)
    twins.write(twins.keys(9))
    twins.delete(twins.ids()[2:4])
    for capacity in (9, 3, 1, 4):
        twins.resize(capacity)
        twins.read(twins.keys(3), 3)
        twins.write(twins.keys(5))
        twins.read(twins.keys(3), 3)
    twins.memory.clear()
    twins.entries.clear()
    twins.agree("clear")
    twins.read(twins.keys(2), 3)
    twins.write(twins.keys(6))
    twins.read(twins.keys(2), 3)


def _restores(make: MakeMemory, exact: bool) -> None:
    twins = Twins(make, 6, exact)
    twins.write(twins.keys(9))
    twins.delete(twins.ids()[1:3])
    held, fresh = twins.memory.entries(), make(6, KEY_DIM)
    fresh.write(twins.keys(2), twins.values(2))  # to be discarded
    fresh.restore(held, twins.next_id)
    twins.memory = fresh
    twins.agree("restore")
    twins.read(twins.keys(3), 3)
    twins.write(twins.keys(4))
    twins.read(twins.keys(3), 3)


def _replaces_keys(make: MakeMemory, exact: bool) -> None:
    twins = Twins(make, 6, exact)
    twins.write(twins.keys(8))
    moved, keys = twins.ids()[1::2], twins.keys(3)
    revision = twins.read(twins.keys(3), 4).revision
    twins.memory.replace_keys(torch.tensor(moved), keys)
    new = dict(zip(moved, keys.cpu(), strict=True))
    twins.entries = [(id_, new.get(id_, key), value) for id_, key, value in twins.entries]
    twins.agree("replace_keys")
    found = twins.read(torch.cat([keys, twins.keys(3)]), 4)
    require(
        found.revision > revision, "replace_keys raises the revision", f"> {revision}", revision
    )


def _reads_causally(make: MakeMemory, exact: bool) -> None:
    for written, k, keys_for in ((0, 3, None), (3, 1, 0), (3, 4, 2), (7, 3, None), (7, 9, None)):
        twins = Twins(make, 5, exact)
        twins.write(twins.keys(written))
        keys, values = twins.keys(12), twins.values(12)
        found = twins.memory.read_causally(keys, values, k, keys_for=keys_for)
        if twins.memory.holds_labels:
            found = twins.memory.count_labels(found, values)
        twins.agree("read_causally")
        for row in range(12):
            twins.check_row(found, row, keys[row], k, keys_for)
            twins.append(keys[row : row + 1], values[row : row + 1])


def _refuses_bad_input(make: MakeMemory, exact: bool) -> None:
    twins = Twins(make, 4, exact)
    twins.write(twins.keys(3))
    memory, keys, values = twins.memory, twins.keys(2), twins.values(2)
    ids = memory.entries().ids
    for what, bad in (
        ("NaN", torch.full_like(keys, math.nan)),
        ("infinite", torch.full_like(keys, math.inf)),
        ("of the wrong size", keys[:, 1:]),
    ):
        _check_refusal(twins, f"write of keys {what}", partial(memory.write, bad, values))
        _check_refusal(twins, f"read of queries {what}", partial(memory.read, bad, 1))
        _check_refusal(
            twins, f"replacing by keys {what}", partial(memory.replace_keys, ids[:2], bad)
        )
    wrong = -values - 1 if memory.holds_labels else torch.full_like(values, math.nan)
    _check_refusal(twins, "write of negative labels or NaN", lambda: memory.write(keys, wrong))
    _check_refusal(twins, "read with k = 0", lambda: memory.read(keys, 0))
    _check_refusal(
        twins, "replacing keys of an unknown id", lambda: memory.replace_keys([-1], keys[:1])
    )
    _check_refusal(twins, "resize to nothing", lambda: memory.resize(0))
    _check_refusal(twins, "a capacity of 0", lambda: make(0, KEY_DIM))
    backwards = Entries(ids.flip(0), memory.entries().keys, memory.entries().values)
    _check_refusal(
        twins, "restore of descending ids", lambda: memory.restore(backwards, twins.next_id)
    )


def _check_refusal(twins: Twins, what: str, call: Callable[[], object]) -> None:
    try:
        call()
    except ValueError:
        twins.agree(f"refusing {what}")
    else:
        raise AssertionError(f"{what}: expected a ValueError, got none")


def _keeps_its_word_in_threads(make: MakeMemory, exact: bool) -> None:
    """Check reads, writes and deletes from several threads.

    Every key is made of its value, so that a half-written entry would be noticed.
    """
    memory = make(16, KEY_DIM)
    written: dict[int, int] = {}
    answers: list[Neighbors] = []
    errors: list[Exception] = []

    def write(turn: int) -> None:
        labels = (torch.arange(7) + 3 * turn) % 100
        written.update(zip(_write_labels(memory, labels), labels.tolist(), strict=True))

    def delete(turn: int) -> None:
        with memory.lock:
            memory.delete(memory.entries().ids[turn % 3 :: 5])

    def read(turn: int) -> None:
        queries = torch.full((2, KEY_DIM), float(turn), dtype=memory.dtype, device=memory.device)
        answers.append(memory.read(queries, 5))

    def repeat(act: Callable[[int], None]) -> None:
        try:
            for turn in range(30):
                act(turn)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=repeat, args=(act,)) for act in (write, read, delete) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise AssertionError(
            f"calls from several threads: expected no error, got {errors[0]!r}"
        ) from errors[0]
    for found in answers:
        _check_labels_are_keys(found, written)


def _write_labels(memory: Memory, labels: Tensor) -> list[int]:
    keys = labels[:, None].expand(-1, KEY_DIM).to(memory.device, memory.dtype)
    values = labels.reshape(-1, *(1,) * len(memory.value_shape)).expand(-1, *memory.value_shape)
    ids: list[int] = memory.write(keys, values.to(memory.device, memory.value_dtype)).tolist()
    return ids


def _check_labels_are_keys(found: Neighbors, written: Mapping[int, int]) -> None:
    for row, place in found.mask.nonzero().tolist():
        label = written.get(int(found.ids[row, place]))
        for part in (found.keys, found.values):
            actual = sorted(set(part[row, place].flatten().tolist()))
            require_same("keys and values read while others write belong together", [label], actual)


def _finds_the_nearest(make: MakeMemory, exact: bool) -> None:
    twins = Twins(make, 300, exact)
    twins.write(twins.keys(300, real=True))
    queries = twins.keys(10, real=True)
    found = twins.read(queries, 10).ids.tolist()
    hits = [
        len(set(twins.nearest(q, 10)) & set(ids)) for q, ids in zip(queries, found, strict=True)
    ]
    require(
        sum(hits) >= 50, "neighbours found among the 10 nearest of 10 queries", "≥ 50", sum(hits)
    )
