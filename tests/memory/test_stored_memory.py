"""Memories in a store: attaching never wipes, one memory writes, and killed writers do no harm."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlite_memory import SqliteMemory
from torch import Tensor

import mbpa
from mbpa.errors import ReadOnlyError, StaleReadError, WriterError
from mbpa.memory import Candidates, Holdings, Memory, StoredState
from mbpa.testing import check_memory


def keys_of(labels: Tensor) -> Tensor:
    return labels[:, None].expand(-1, 3).float()


def fill(memory: Memory, *labels: int) -> None:
    written = torch.tensor(labels)
    memory.write(keys_of(written), written)


def attach(memory: Memory, read_only: bool) -> SqliteMemory:
    assert isinstance(memory, SqliteMemory)
    named: dict[str, Any] = {"read_only": True} if read_only else {"take_over": True}
    return SqliteMemory(memory.path, memory.capacity, memory.key_size, **named)


@pytest.fixture
def make(tmp_path: Path) -> Callable[[int, int], SqliteMemory]:
    numbers = itertools.count()
    return lambda capacity, key_dim: SqliteMemory(
        tmp_path / f"{next(numbers)}.sqlite", capacity, key_dim
    )


@pytest.mark.heavy
def test_a_stored_memory_fulfils_the_contract(make: Callable[[int, int], SqliteMemory]) -> None:
    check_memory(make, attach=attach)


class WipesByConnecting(SqliteMemory):
    def _attach(self) -> Holdings | None:
        held = super()._attach()
        if held is not None and self._load_state() is not None and not self.is_read_only:
            self._remove(held.ids)
            return Holdings(held.ids[:0], held.next_id)
        return held


class LetsEveryoneWrite(SqliteMemory):
    def _require_writable(self) -> None:
        pass


class ForgetsTheNextId(SqliteMemory):
    def _save_state(self, state: StoredState) -> None:
        super()._save_state(state._replace(next_id=0))


class NeverLooksAgain(SqliteMemory):
    """Goes on after a lost connection as if nothing had been written."""

    def sync(self) -> None:
        if self.is_read_only:
            super().sync()
        self._is_unsure = False


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("backend", "part"),
    [
        (WipesByConnecting, "survives_a_failed_hook"),
        (LetsEveryoneWrite, "serves_a_second_reader"),
        (ForgetsTheNextId, "attaches"),
        (NeverLooksAgain, "survives_a_lost_connection"),
    ],
)
def test_the_suite_names_the_broken_part(
    tmp_path: Path, backend: type[SqliteMemory], part: str
) -> None:
    numbers = itertools.count()

    def reattach(memory: Memory, read_only: bool) -> SqliteMemory:
        assert isinstance(memory, SqliteMemory)
        named: dict[str, Any] = {"read_only": True} if read_only else {"take_over": True}
        return backend(memory.path, memory.capacity, memory.key_size, **named)

    with pytest.raises((AssertionError, StaleReadError)) as caught:
        check_memory(
            lambda capacity, key_dim: backend(tmp_path / f"{next(numbers)}", capacity, key_dim),
            attach=reattach,
        )
    assert caught.value.__notes__ == [f"in check_memory, part {part!r}"]


def test_connecting_again_keeps_entries_ids_and_their_order(tmp_path: Path) -> None:
    with SqliteMemory(tmp_path / "m", 4, 3) as memory:
        fill(memory, 1, 2, 3, 4, 5, 6)
        memory.delete([5])
    with SqliteMemory(tmp_path / "m", 4, 3) as memory:
        assert memory.ids.tolist() == [2, 3, 4]
        assert memory.entries().values.tolist() == [3, 4, 5]
        assert memory.next_id == 6
        fill(memory, 7, 8)
        assert memory.ids.tolist() == [3, 4, 6, 7]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"capacity": 5}, r"capacity must be 4, as in the stored memory, got 5"),
        ({"key_dim": 2}, r"key_dim must be \[3\], as in the stored memory, got \[2\]"),
        ({"value_dtype": torch.int32}, r"value_dtype must be 'int64', .*, got 'int32'"),
        ({"dtype": torch.float64}, r"dtype must be 'float32', .*, got 'float64'"),
        ({"value_shape": (2,)}, r"value_shape must be \[\], .*, got \[2\]"),
    ],
)
def test_entries_of_another_form_are_refused_and_kept(
    tmp_path: Path, changed: dict[str, Any], text: str
) -> None:
    with SqliteMemory(tmp_path / "m", 4, 3) as memory:
        fill(memory, 1, 2)
    arguments: dict[str, Any] = {"capacity": 4, "key_dim": 3, **changed}
    with pytest.raises(ValueError, match=text):
        SqliteMemory(tmp_path / "m", **arguments)
    with SqliteMemory(tmp_path / "m", 4, 3) as memory:
        assert memory.ids.tolist() == [0, 1]


def test_a_second_writer_is_refused_unless_it_takes_over(tmp_path: Path) -> None:
    first = SqliteMemory(tmp_path / "m", 4, 3)
    fill(first, 1)
    with pytest.raises(WriterError, match="another memory is registered as the writer"):
        SqliteMemory(tmp_path / "m", 4, 3)
    second = SqliteMemory(tmp_path / "m", 4, 3, take_over=True)
    with pytest.raises(WriterError, match="another memory has become the writer"):
        fill(first, 2)
    first.close()  # which must not end the second one's turn
    fill(second, 3)
    assert second.entries().values.tolist() == [1, 3]


def test_a_closed_memory_lets_another_write_and_refuses_every_call(tmp_path: Path) -> None:
    memory = SqliteMemory(tmp_path / "m", 4, 3)
    memory.close()
    memory.close()
    for call in (memory.entries, memory.clear, memory.sync, lambda: fill(memory, 1)):
        with pytest.raises(ReadOnlyError, match="the memory was closed"):
            call()
    SqliteMemory(tmp_path / "m", 4, 3).close()


def test_there_must_be_something_to_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there must be a stored memory to read"):
        SqliteMemory(tmp_path / "m", 4, 3, read_only=True)


def test_a_resize_leaves_the_entries_where_they_are(tmp_path: Path) -> None:
    memory = SqliteMemory(tmp_path / "m", 4, 3)
    fill(memory, 1, 2, 3, 4)
    written = memory.connection.total_changes
    memory.resize(6)
    assert memory.connection.total_changes - written == 1  # the state
    memory.resize(2)
    memory.close()
    assert SqliteMemory(tmp_path / "m", 2, 3).entries().values.tolist() == [3, 4]


def test_a_model_predicts_from_a_stored_memory(tmp_path: Path) -> None:
    head, keys = torch.nn.Linear(3, 5), torch.randn(8, 3)
    predictor = mbpa.Adapted(mbpa.Gradient(lr=0.1, steps=2), k=4)
    stored = SqliteMemory(tmp_path / "m", 8, 3)
    exact = mbpa.ExactMemory(8, 3)
    outputs = []
    for memory in (stored, exact):
        model = mbpa.MbPA(head=head, memory=memory, predictor=predictor)
        model.write(keys=keys, values=torch.arange(8) % 5)
        outputs.append(model(keys=keys[:3] + 0.1))
    torch.testing.assert_close(outputs[0], outputs[1])


WRITER = """
import sys, torch
from pathlib import Path
from sqlite_memory import SqliteMemory
memory = SqliteMemory(Path(sys.argv[1]), 50, 3, take_over=True)
print("ready", flush=True)
while True:
    labels = torch.arange(memory.next_id, memory.next_id + 7)
    memory.write(labels[:, None].expand(-1, 3).float(), labels)
    memory.delete(memory.ids[3:5])
    print(memory.next_id, flush=True)
"""


@pytest.mark.heavy
def test_writers_that_are_killed_leave_whole_entries_in_order(tmp_path: Path) -> None:
    """Keys and values say which id an entry got, so an entry under another's id would show."""
    path, acknowledged = tmp_path / "m", 0
    with SqliteMemory(path, 50, 3):
        pass
    tests = Path(__file__).parents[1]
    search = os.pathsep.join([str(tests), str(tests.parent)])
    for turns, delay in ((1, 0.0), (4, 0.003), (9, 0.007)):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": search},
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        told = [writer.stdout.readline().strip() for _ in range(turns)]
        time.sleep(delay)
        writer.kill()
        told += writer.stdout.read().split("\n")[:-1]
        writer.wait()
        writer.stdout.close()
        acknowledged = int(told[-1])
        with SqliteMemory(path, 50, 3, take_over=True) as memory:
            held = memory.entries()
            assert memory.next_id >= acknowledged
            assert held.values.tolist() == held.ids.tolist()
            assert torch.equal(held.keys, keys_of(held.ids))
            assert held.ids.tolist() == sorted(held.ids.tolist())
    assert acknowledged > 50, "the ring was never full"


class Forgetful(mbpa.Memory):
    """A backend of today's four hooks, with entries of its own to attach to."""

    def __init__(self, held: Holdings | None) -> None:
        self.held, self.cleared = held, 0
        super().__init__(4, 2)

    def _attach(self) -> Holdings | None:
        return self.held

    def _clear(self) -> None:
        self.cleared += 1

    def _put(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        raise AssertionError

    def _get(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        return slots[:, None].expand(-1, 2).float(), slots

    def _nearest(self, queries: Tensor, k: int) -> Candidates:
        return Candidates(torch.tensor([[3, 1]]).expand(len(queries), -1), None)


def test_what_a_backend_holds_is_taken_over_without_clearing_it() -> None:
    memory = Forgetful(Holdings(torch.tensor([5, 8]), 11, torch.tensor([3, 1])))
    assert memory.cleared == 0
    assert memory.entries().values.tolist() == [3, 1]
    assert memory.next_id == 11
    found = memory.read(torch.tensor([[3.0, 3.0]]), 2)
    assert found.ids.tolist() == [[5, 8]]
    assert Forgetful(None).cleared == 1


@pytest.mark.parametrize(
    "held",
    [
        Holdings(torch.tensor([5, 5]), 11),
        Holdings(torch.tensor([5, 11]), 11),
        Holdings(torch.arange(5), 11),
    ],
)
def test_a_backend_cannot_hold_what_a_memory_cannot(held: Holdings) -> None:
    with pytest.raises(ValueError, match="a backend must hold at most capacity=4 entries"):
        Forgetful(held)


def test_the_state_survives_json() -> None:
    import json

    state = StoredState(mbpa.ExactMemory(4, 3).schema, 7, None)
    assert StoredState(*json.loads(json.dumps(state))) == state
