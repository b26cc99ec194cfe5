"""The part of the conformance suite for memories whose entries outlive them.

Faults are injected where the base class calls the backend, so the suite needs no server that it
could stop: a connection is lost before or after a change took effect, or when half of it had.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from mbpa.memory import Entries, Memory
from mbpa.testing.claims import require, require_same
from mbpa.testing.twins import MakeMemory, Twins

AttachMemory = Callable[[Memory, bool], Memory]


class LostConnection(ConnectionError):
    """Raised by the suite in place of a backend."""


@contextlib.contextmanager
def fail_in(memory: Memory, hook: str, applied: float) -> Iterator[None]:
    """Make a hook raise `LostConnection` after it has done this share of its work."""
    work = getattr(memory, hook)

    def fail(*tensors: Tensor) -> None:
        if applied:
            count = round(applied * len(tensors[0]))
            work(*(tensor[:count] for tensor in tensors))
        raise LostConnection(f"the connection was lost in {hook}")

    setattr(memory, hook, fail)
    try:
        yield
    finally:
        delattr(memory, hook)


def require_lost_connection(part: str, call: Callable[[], object]) -> None:
    try:
        call()
    except LostConnection:
        return
    require(False, part, "the error of the connection", "none")


def _attaches(make: MakeMemory, exact: bool, attach: AttachMemory) -> None:
    twins = Twins(make, 6, exact)
    for written in (0, 4, 5):
        twins.write(twins.keys(written))
        twins.memory = attach(twins.memory, False)
        twins.agree("attaching")
        twins.read(twins.keys(3), 4)
    twins.delete([twins.ids()[1], twins.ids()[-1]])
    next_id = twins.next_id
    twins.memory = attach(twins.memory, False)
    require_same("next_id, if the newest entry was deleted", next_id, twins.memory.next_id)
    for size in (1, 2, 9):
        twins.write(twins.keys(size))
        twins.read(twins.keys(3), 6)
    twins.memory.clear()
    twins.entries.clear()
    twins.memory = attach(twins.memory, False)
    twins.agree("attaching to a memory that was cleared")
    twins.write(twins.keys(2))
    twins.memory.replace_keys(twins.ids()[:1], keys := twins.keys(1))
    twins.entries[0] = (twins.ids()[0], keys[0].cpu(), twins.entries[0][2])
    twins.memory = attach(twins.memory, False)
    twins.agree("attaching after replace_keys")


def _serves_a_second_reader(make: MakeMemory, exact: bool, attach: AttachMemory) -> None:
    twins = Twins(make, 6, exact)
    twins.write(twins.keys(5))
    writer, reader = twins.memory, attach(twins.memory, True)
    require(reader.is_read_only, "is_read_only of a reader", True, reader.is_read_only)
    twins.memory = reader
    twins.agree("attaching for reading")
    held, keys, values = reader.entries(), twins.keys(2), twins.values(2)
    changes: dict[str, Callable[[], object]] = {
        "write": lambda: reader.write(keys, values),
        "delete": lambda: reader.delete(held.ids[:1]),
        "replace_keys": lambda: reader.replace_keys(held.ids[:2], keys),
        "clear": reader.clear,
        "resize": lambda: reader.resize(3),
        "restore": lambda: reader.restore(held, reader.next_id),
    }
    for name, change in changes.items():
        _require_refusal(f"{name} of a memory attached for reading", change)
        twins.agree(f"a {name} that was refused")
    twins.memory = writer
    twins.write(twins.keys(4))  # overwrites entries that the reader knows
    twins.delete(twins.ids()[1:2])
    found = reader.read(twins.keys(3), 6)
    live = set(twins.ids())
    require_same(
        "what a reader finds that was removed", set(), set(found.ids[found.mask].tolist()) - live
    )
    reader.sync()
    twins.memory = reader
    twins.agree("sync")
    twins.read(twins.keys(3), 4)


def _lets_one_writer_write(make: MakeMemory, exact: bool, attach: AttachMemory) -> None:
    twins = Twins(make, 6, exact)
    twins.write(twins.keys(4))
    first, second = twins.memory, attach(twins.memory, False)
    keys, values = twins.keys(1), twins.values(1)
    _require_refusal(
        "write of a memory that is no longer the writer", lambda: first.write(keys, values)
    )
    _require_refusal("delete of a memory that is no longer the writer", lambda: first.delete([0]))
    first.close()
    twins.memory = second
    twins.agree("another memory's attempt to write")
    twins.write(twins.keys(4))
    twins.read(twins.keys(3), 4)


def _survives_a_lost_connection(make: MakeMemory, exact: bool, attach: AttachMemory) -> None:
    """Check that a memory agrees with its storage after a change of which it did not hear back."""
    for applied in (0.0, 0.5, 1.0):
        for hook in ("_store", "_delete"):
            twins = Twins(make, 6, exact)
            twins.write(twins.keys(8))
            known = {id_: (key, value) for id_, key, value in twins.entries}
            keys, values, ids = twins.keys(4), twins.values(4), range(8, 12)
            known |= {i: (k.cpu(), v.cpu()) for i, k, v in zip(ids, keys, values, strict=True)}
            with fail_in(twins.memory, hook, applied):
                if hook == "_store":
                    require_lost_connection("write", partial(twins.memory.write, keys, values))
                else:
                    require_lost_connection("delete", partial(twins.memory.delete, [3, 5, 6, 7]))
            _take_over(twins, twins.memory.entries(), known)
            _check_further_use(twins)
            twins.memory = attach(twins.memory, False)
            twins.agree("attaching anew after a lost connection")


def _recovers_from_a_writer_that_died(make: MakeMemory, exact: bool, attach: AttachMemory) -> None:
    """Check that another memory can take over after any part of a write."""
    for before, size in ((3, 3), (6, 4), (9, 6)):
        twins = Twins(make, 6, exact)
        twins.write(twins.keys(before))
        known = {id_: (key, value) for id_, key, value in twins.entries}
        keys, values = twins.keys(size), twins.values(size)
        for offset, (key, value) in enumerate(zip(keys.cpu(), values.cpu(), strict=True)):
            known[before + offset] = key, value
        with fail_in(twins.memory, "_store", 0.5):
            require_lost_connection("write", partial(twins.memory.write, keys, values))
        twins.memory = attach(twins.memory, False)
        held = twins.memory.entries()
        least = min(6, before)
        require(
            len(held.ids) >= least - size, "entries left", f"at least {least - size}", len(held.ids)
        )
        _take_over(twins, held, known)
        _check_further_use(twins)


def _take_over(twins: Twins, held: Entries, known: dict[int, tuple[Tensor, Tensor]]) -> None:
    """Let the list follow the memory, whose every entry must be one that was written, whole."""
    ids = held.ids.tolist()
    require_same("ids that were never written", [], [id_ for id_ in ids if id_ not in known])
    twins.entries = [(id_, *known[id_]) for id_ in ids]
    twins.next_id = twins.memory.next_id
    require(twins.next_id > max(ids, default=-1), "next_id", "above every id", twins.next_id)
    twins.agree("a change that did not end")


def _check_further_use(twins: Twins) -> None:
    twins.read(twins.keys(2), 3)
    twins.write(twins.keys(4))
    twins.read(twins.keys(3), 4)
    twins.delete(twins.ids()[1:3])
    twins.read(twins.keys(3), 4)


def _require_refusal(what: str, call: Callable[[], object]) -> None:
    try:
        call()
    except Exception:
        return
    require(False, what, "an error", "none")


ATTACHING = (
    _attaches,
    _serves_a_second_reader,
    _lets_one_writer_write,
    _survives_a_lost_connection,
    _recovers_from_a_writer_that_died,
)
