"""Acknowledged examples survive any failure, once and complete; forgotten ones leave no trace."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.stateful
import pytest
from hypothesis import strategies as st

import reliability
from mbpa.serve.journal import Example, InputError, Journal, JournalError
from reliability.journal_process import kill_once, make_examples

CHILD = [
    sys.executable,
    "-I",
    "-S",
    str(Path(reliability.__file__).with_name("journal_process.py")),
]


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory in memory if possible, so that thousands of flushes take no time.

    Not ``tmp_path``, which other users cannot enter.
    """
    memory = Path("/dev/shm")
    directory = tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else None)
    os.chmod(directory, 0o755)
    yield Path(directory)
    shutil.rmtree(directory)


def lines(*arguments: object) -> list[Any]:
    """Return what a process without torch prints."""
    done = subprocess.run([*CHILD, *map(str, arguments)], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return [json.loads(line) for line in done.stdout.splitlines()]


def raw(path: Path) -> bytes:
    """Return all bytes of all files of a journal."""
    return b"".join(file.read_bytes() for file in path.parent.glob(path.name + "*"))


# Meaning


def test_examples_come_back_as_they_were_given_in_the_order_of_their_ids(place: Path) -> None:
    odd = "a\0b\n'\"; DROP TABLE examples --  𝔘  \u2028"
    with Journal(place / "j") as journal:
        assert journal.learn([("b", odd, None), (odd, None, b"1234")]) == [1, 2]
        assert journal.learn([("a", "", b"12345678")]) == [3]
        assert journal.learn([]) == []
    with Journal(place / "j") as journal:
        expected = [
            Example(1, "b", odd, None),
            Example(2, odd, None, b"1234"),
            Example(3, "a", "", b"12345678"),
        ]
        assert list(journal.examples()) == expected
        assert list(journal.examples(after=1, limit=1)) == expected[1:2]
        assert (len(journal), journal.change) == (3, 2)
        assert journal.labels() == {odd: 1, "a": 1, "b": 1}


def test_ids_are_never_used_again(place: Path) -> None:
    with Journal(place / "j") as journal:
        journal.learn([("a", "one", None), ("a", "two", None)])
        assert journal.forget(label="a") == [1, 2]
    with Journal(place / "j") as journal:
        assert journal.learn([("a", "three", None)]) == [3]


def test_a_request_given_again_returns_the_same_ids_and_writes_nothing(place: Path) -> None:
    call = [("a", "one", None), ("b", None, b"1234")]
    with Journal(place / "j") as journal:
        ids = journal.learn(call, request="r")
    with Journal(place / "j") as journal:
        assert journal.learn(call, request="r") == ids
        assert (len(journal), journal.change) == (2, 1)
        assert journal.learn(call, request="another") == [3, 4]
        journal.forget([1])
        assert journal.learn(call, request="r") == ids  # and what was forgotten stays so
        assert [example.id for example in journal.examples()] == [2, 3, 4]


def test_a_request_must_not_name_other_examples(place: Path) -> None:
    """Otherwise they would be acknowledged and lost."""
    with Journal(place / "j") as journal:
        journal.learn([("a", "one", None)], request="r")
        for other in ([("a", "two", None)], [("a", "one", None)] * 2, []):
            with pytest.raises(ValueError, match="request 'r' was used for other examples"):
                journal.learn(other, request="r")
        assert (len(journal), journal.read_only) == (1, None)


def test_a_text_sent_again_is_known_without_its_key(place: Path) -> None:
    """A key computed again might differ in its last bit, and the request would seem new."""
    kept = [("a", "one", b"1234"), ("b", None, b"5678")]
    with Journal(place / "j") as journal:
        assert journal.find_repeated(kept, "r") is None
        ids = journal.learn(kept, request="r")
        for again in (kept, [("a", "one", None), kept[1]]):
            assert journal.find_repeated(again, "r") == journal.learn(again, request="r") == ids
        for other in (
            [("a", "two", None), kept[1]],
            [("z", "one", None), kept[1]],
            [("a", "one", b"4321"), kept[1]],  # it was given, not computed
            [kept[0], ("b", None, b"8765")],
        ):
            with pytest.raises(InputError, match="request 'r' was used for other examples"):
                journal.find_repeated(other, "r")
        assert len(journal) == 2


def test_what_may_not_be_on_the_disk_is_not_acknowledged_again(place: Path) -> None:
    call = [("a", "one", None)]
    with Journal(place / "j") as journal:
        journal.learn(call, request="r")
        journal.refuse("a write failed")
        with pytest.raises(JournalError, match="a write failed"):
            journal.find_repeated(call, "r")


def test_only_the_newest_requests_are_remembered(place: Path) -> None:
    call = [("a", "one", None)]
    with Journal(place / "j", remembered_requests=3) as journal:
        for request in "12345":
            journal.learn(call, request=request)
        assert journal.learn(call, request="3") == [3]
        assert journal.learn(call, request="2") == [6]
    with sqlite3.connect(place / "j") as database:
        assert database.execute("SELECT count(*) FROM requests").fetchone() == (3,)
    database.close()


def test_forgetting_says_what_was_there(place: Path) -> None:
    with Journal(place / "j") as journal:
        journal.learn([("a", "1", None), ("b", "2", None), ("a", "3", None), ("c", "4", None)])
        assert journal.forget([4, 4, 99, -1, 2**70]) == [4]
        assert journal.forget([2], label="a") == [1, 2, 3]
        assert journal.forget([1], label="a") == []
        assert (len(journal), journal.labels(), journal.change) == (0, {}, 3)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (("", "text", None), "label must not be empty"),
        (("a", None, None), "must have a text or a key"),
        (("a", None, b""), "4 bytes, got 0 bytes"),
        (("a", None, b"123"), "4 bytes, got 3 bytes"),
        (("a", "\ud800", None), "without surrogates"),
        (("\udfff", "text", None), "without surrogates"),
    ],
)
def test_what_cannot_be_stored_is_refused_and_leaves_no_trace(
    place: Path, example: tuple[str, str | None, bytes | None], message: str
) -> None:
    with Journal(place / "j") as journal:
        with pytest.raises(ValueError, match=message):
            journal.learn([("a", "good", None), example])
        assert (len(journal), journal.change, journal.read_only) == (0, 0, None)


class AgainstADict(hypothesis.stateful.RuleBasedStateMachine):
    """A journal, closed and opened at any time, against a dict of what it should hold."""

    def __init__(self) -> None:
        super().__init__()
        directory = tempfile.TemporaryDirectory(dir="/dev/shm" if LIGHT else None)
        self.directory = directory
        self.journal = Journal(Path(directory.name) / "j")
        self.model: dict[int, tuple[str, str | bytes | None, bytes | None]] = {}
        self.requests: dict[str, tuple[list[Any], list[int]]] = {}
        self.restored: set[int] = set()
        self.last = self.change = 0

    labels = st.sampled_from(["a", "b", "ä\0"])
    call = st.lists(
        st.tuples(
            labels,
            st.text(max_size=9) | st.binary(max_size=9),  # texts and pictures
            st.sampled_from([None, b"1234", b"5" * 4000]),
        ),
        max_size=5,
    )

    @hypothesis.stateful.rule(
        call=call, request=st.sampled_from([None, "r", "s", "t"]), restoring=st.booleans()
    )
    def learn(self, call: list[Any], request: str | None, restoring: bool) -> None:
        if request in self.requests:
            call, expected = self.requests[request]
        else:
            expected = list(range(self.last + 1, self.last + 1 + len(call)))
            self.last += len(call)
            self.change += bool(call)
            self.model |= dict(zip(expected, call, strict=True))
            self.restored |= set(expected if restoring else ())
            if request and call:
                self.requests[request] = call, expected
        assert self.journal.learn(call, request=request, restoring=restoring) == expected

    @hypothesis.stateful.rule(
        ids=st.lists(st.integers(0, 30), max_size=4), label=st.none() | labels
    )
    def forget(self, ids: list[int], label: str | None) -> None:
        gone = sorted(id for id, (name, _, _) in self.model.items() if id in ids or name == label)
        assert self.journal.forget(ids, label) == gone
        self.change += bool(gone)
        for id in gone:
            del self.model[id]
        self.restored -= set(gone)

    @hypothesis.stateful.rule()
    def reopen(self) -> None:
        self.journal.close()
        self.journal = Journal(self.journal.path)

    @hypothesis.stateful.invariant()
    def agrees(self) -> None:
        found = list(self.journal.examples())
        assert [(e.id, (e.label, e.item, e.key)) for e in found] == sorted(self.model.items())
        assert not any(e.text is not None and e.image is not None for e in found)
        there = {each.id: each for each in found}
        for id in range(-1, self.last + 2):
            assert self.journal.example(id) == there.get(id)
        light = list(self.journal.examples(with_pictures=False))
        assert [replace(e, image=None) for e in found] == [replace(e, image=None) for e in light]
        assert [e.image for e in light] == [None if e.key else e.image for e in found]
        assert len(self.journal) == len(self.model)
        assert self.journal.labels() == Counter(label for label, _, _ in self.model.values())
        assert self.journal.change == self.change
        assert self.journal.restored_ids == self.restored

    def teardown(self) -> None:
        self.journal.close()
        self.directory.cleanup()


LIGHT = os.access("/dev/shm", os.W_OK)
TestAgainstADict = AgainstADict.TestCase
TestAgainstADict.settings = hypothesis.settings(max_examples=25, stateful_step_count=25)


# Threads


def test_readers_see_whole_calls_while_others_write(place: Path) -> None:
    journal = Journal(place / "j")
    failures: list[object] = []
    done = threading.Event()

    def write(writer: int) -> None:
        for call in range(60):
            ids = journal.learn([(f"{writer}.{call}", str(part), None) for part in range(7)])
            if ids != list(range(ids[0], ids[0] + 7)):
                failures.append(ids)
            if call % 3:
                journal.forget(ids[:4] if call % 3 == 1 else ids)

    def read() -> None:
        change = 0
        while not done.is_set():
            found = Counter(example.label for example in journal.examples())
            if set(found.values()) - {7, 3} or journal.change < change:
                failures.append((found, change))
            change = journal.change
            time.sleep(0)

    writers = [threading.Thread(target=write, args=(writer,)) for writer in range(3)]
    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in writers + readers:
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    for thread in readers:
        thread.join()
    assert not failures
    expected = {f"{w}.{c}": (7, 3, 0)[c % 3] for w in range(3) for c in range(60)}
    assert journal.labels() == {label: count for label, count in expected.items() if count}
    assert journal.change == 3 * (60 + 40)
    journal.close()


# Failures


@pytest.mark.heavy
def test_nothing_acknowledged_is_lost_torn_or_doubled_by_kills(place: Path) -> None:
    """`python -m reliability kills` does it ten thousand times."""
    counts = lines("kills", place / "j", 50, 0)[-1]
    assert counts["kills"] == 50
    assert counts["acknowledged"] > 50


# The number of the process, for a message; a flush by SQLite that the journal does again; and
# closing, which has nothing left to do but to tidy up.
HARMLESS = ("write .lock", "sync directory", "while closing")


def check_failures(expected: list[Any], *failures: Any, killed: bool = False) -> None:
    """``expected``: the contents after each call. The failures end with a run that had none."""
    assert [line["failed"] is None for line in failures] == [False] * (len(failures) - 1) + [True]
    assert failures[-1]["found"] == expected[-1]
    for line in failures:
        done = line["acknowledged"]
        before, after = expected[done], expected[min(done + 1, len(expected) - 1)]
        assert line["found"] in (before, after), line
        assert line["settled"] == after, line
        assert line["writable"], line
        told = {what: value for part in line["seen"] for what, value in part.items()}
        if not killed and line["failed"] and not line["failed"].endswith(HARMLESS):
            assert "closed" in told or told["end"] is not None, line
        if "error" in told:
            assert told["error"] == told["refused"] == told["read_only"]
            assert told["reads"] in (before, after), line
        for what in {"closed", "error"} & set(told):
            assert re.search(
                r": (check it|fix this|put it back|free some space|check permissions)",
                told[what],
            )
            assert "\n" not in told[what]


@pytest.fixture(scope="module")
def _system_calls_can_fail() -> None:
    if lines("available", ".") != [True]:
        pytest.skip("needs Linux 5.5 with seccomp filters")


@pytest.mark.heavy
@pytest.mark.usefixtures("_system_calls_can_fail")
@pytest.mark.parametrize(
    "kind",
    [
        *("full", "flush", "kill"),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("short", "once", "dead")),
    ],
)
def test_a_failure_of_any_system_call_loses_nothing_acknowledged(place: Path, kind: str) -> None:
    """There is no space from then on; one flush fails; the process is killed just before; any one
    call fails; all fail from then on."""
    expected, *failures = lines("faults", place, kind)
    failed = {str(line["failed"]) for line in failures}
    print(f"{kind}: {len(failures) - 1} calls")
    if kind != "short":
        assert {"sync .sqlite", "sync .sqlite-wal", "sync directory"} <= failed
    if kind not in ("flush", "short"):
        assert {"open .sqlite-wal", "write .sqlite-wal", "truncate .sqlite-wal"} <= failed
    check_failures(expected, *failures, killed=kind in ("kill", "short"))


def test_files_that_cannot_grow_lose_nothing(place: Path) -> None:
    """A limit on their size, which any system has: some writes are then cut short."""
    expected, *failures = lines("limits", place)
    print(f"{len(failures) - 1} sizes")
    check_failures(expected, *failures)


@pytest.mark.heavy
@pytest.mark.usefixtures("_system_calls_can_fail")
def test_a_power_cut_at_any_moment_loses_nothing_acknowledged(place: Path) -> None:
    """Nothing, or any half of the sectors, survives of what was not flushed. The same holds after a
    flush failed, the kernel dropped what it was to write, and another process continued."""
    moments = lines("power", place)
    alone = sum(moment["failing"] == 0 for moment in moments)
    print(f"{alone} moments, and {len(moments) - alone} after a flush failed")
    assert len(moments) > 1000
    for moment in moments:
        done = moment["acknowledged"]
        assert moment["found"] in (done, done + 1), moment
        assert not moment["not gone"], moment


# Files that cannot be used


def test_a_read_only_directory_is_read(place: Path) -> None:
    """It does not matter whether the last process closed the journal or was killed."""
    log, draw = place / "j-wal", random.Random(0)
    with Journal(place / "j") as journal:
        journal.learn(make_examples(1), request="1")
    for after_a_kill in (False, True):
        while after_a_kill and not (log.exists() and log.stat().st_size):
            kill_once(place / "j", draw)
        before = raw(place / "j")
        for file in place.iterdir():
            os.chmod(file, 0o644)  # others may not even read it otherwise
        os.chmod(place, 0o555)
        reading, refused = lines("visit", place / "j")
        (missing,) = lines("visit", place / "missing")
        os.chmod(place, 0o755)
        assert raw(place / "j") == before
        assert "is read-only (Permission denied)" in reading["read_only"]
        assert refused["error"] == reading["read_only"]
        assert "cannot be created (Permission denied)" in missing["error"]
        with Journal(place / "j") as journal:
            assert len(journal) >= len(make_examples(1))
            found = [[e.id, e.label, e.text, e.key] for e in journal.examples()]
            assert found == reading["found"]


def test_a_read_only_file_is_read(place: Path) -> None:
    with Journal(place / "j") as journal:
        journal.learn([("a", "one", None)])
    os.chmod(place / "j", 0o444)
    os.chmod(place, 0o777)
    os.chmod(place / "j.lock", 0o666)
    reading, refused = lines("visit", place / "j")
    assert reading["found"] == [[1, "a", "one", None]]
    assert (
        refused["error"]
        == reading["read_only"]
        == (f"{place / 'j'} is read-only: make it writable and restart")
    )


def test_one_process_at_a_time(place: Path) -> None:
    with Journal(place / "j") as journal:
        with pytest.raises(JournalError, match=f"in use by process {os.getpid()}: stop it"):
            Journal(place / "j")
        (refused,) = lines("visit", place / "j")
        assert f"in use by process {os.getpid()}" in refused["error"]
        assert journal.learn([("a", "one", None)]) == [1]
        with (
            contextlib.closing(sqlite3.connect(place / "j", timeout=0)) as other,
            pytest.raises(sqlite3.OperationalError, match="locked"),
        ):
            other.execute("SELECT count(*) FROM examples")
    Journal(place / "j").close()


def write_damaged(path: Path) -> None:
    with Journal(path) as journal:
        journal.learn([("a", "x" * 500, None)] * 100)
    data = bytearray(path.read_bytes())
    data[8192:24576] = random.Random(0).randbytes(16384)
    path.write_bytes(data)


def of_a_later_format(path: Path) -> None:
    Journal(path).close()
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 4")
    database.close()


def somebody_elses(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE examples (id)")
    database.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_text("notes\n" * 1000), "not a journal: use another path"),
        (somebody_elses, "not a journal: use another path"),
        (
            of_a_later_format,
            "has format 4, and this version of mbpa reads formats up to 3: use the version",
        ),
        (write_damaged, "damaged .*: restore it from a backup"),
        (lambda path: path.mkdir(), "must be a file in an existing directory"),
    ],
)
def test_a_file_that_is_no_journal_is_refused_and_left_alone(
    place: Path, make: Any, message: str
) -> None:
    make(place / "j")
    before = None if (place / "j").is_dir() else (place / "j").read_bytes()
    for _ in range(2):  # the lock of the first is released
        with pytest.raises(JournalError, match=message) as error:
            Journal(place / "j")
        assert "\n" not in str(error.value)
    assert before is None or (place / "j").read_bytes() == before


def test_a_directory_must_exist(place: Path) -> None:
    with pytest.raises(JournalError, match="in an existing directory"):
        Journal(place / "missing" / "j")


def test_a_closed_journal_says_so(place: Path) -> None:
    journal = Journal(place / "j")
    journal.close()
    journal.close()
    for use in (journal.examples, lambda: journal.learn([("a", "b", None)]), journal.forget):
        with pytest.raises(JournalError, match="is closed: open it again"):
            use()


# Forgetting, and size


def test_the_bytes_of_what_is_forgotten_are_in_no_file(place: Path) -> None:
    """Rows have many sizes, so that SQLite splits, chains and moves pages."""
    draw, marks, copied = random.Random(0), dict[int, bytes](), 0
    with Journal(place / "j", waste_bytes=1 << 14) as journal:
        for _ in range(150):
            call, named = [], []
            for _ in range(draw.randint(1, 30)):
                mark = f"<{draw.getrandbits(60)}>"
                padding = "x" * draw.choice([0, 30, 900, 6000])
                as_key = (mark + padding).encode().ljust(len(mark + padding) // 4 * 4 + 4)
                text, key = draw.choice([(mark + padding, None), (None, as_key)])
                call.append((draw.choice(["label", mark]), text, key))
                named.append(mark.encode())
            ids = journal.learn(call)
            marks |= dict(zip(ids, named, strict=True))
            if draw.random() < 0.7:
                gone = journal.forget(draw.sample(sorted(marks), draw.randint(0, len(marks))))
                marks = {id: mark for id, mark in marks.items() if id not in gone}
                assert set(re.findall(rb"<\d+>", raw(place / "j"))) == set(marks.values())
                copied += journal._waste == 0
    assert copied > 10


def test_the_log_stays_short_while_examples_are_only_taught(place: Path) -> None:
    with Journal(place / "j") as journal:
        for _ in range(30):
            journal.learn([("a", "x" * 1_000_000, None)])
            assert (place / "j-wal").stat().st_size < 6e6
        assert (place / "j").stat().st_size > 20e6


@pytest.mark.heavy
def test_files_stay_small_over_a_soak(place: Path) -> None:
    """Four hundred calls, 30 kept: of 22 MB that pass through, few are ever there."""
    largest = written = 0
    with Journal(place / "j") as journal:
        kept: list[list[int]] = []
        for call in range(400):
            text = f"{call} ".ljust(9000 + call % 1000, ".")
            kept.append(journal.learn([("a", text, None)] * 6, request=str(call)))
            written += 6 * len(text)
            if len(kept) > 30:
                journal.forget(kept.pop(0))
            if call % 50 == 0:
                largest = max(largest, len(raw(place / "j")))
        assert written > 20e6
        assert largest < 10e6
        journal.forget(label="a")
        assert len(raw(place / "j")) < 1e6
