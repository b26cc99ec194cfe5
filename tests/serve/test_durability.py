"""Acknowledged examples are in the files of the directory, even if others change the files."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from runs import WordEncoder, write_random_run, write_word_run
from servers import Server

from mbpa import cli, files
from mbpa.errors import RunError
from mbpa.serve import run_directory
from mbpa.serve.answers import Lesson
from mbpa.serve.classifier import Classifier
from mbpa.serve.database import Database
from mbpa.serve.journal import DamagedError, InputError, InUseError, Journal, JournalError
from mbpa.serve.run_info import RunInfo

EARLIER = Path(__file__).parents[1] / "files" / "earlier-run"
ONE, TWO = [("a", "one", None)], [("a", "two", None)]


def read_texts(path: Path) -> list[str | None]:
    with Journal(path) as journal:
        return [each.text for each in journal.examples()]


# Files that are removed, moved or replaced while the journal is open


@pytest.mark.parametrize("name", ["j-wal", "j"])
@pytest.mark.parametrize("replaced", [False, True])
def test_nothing_is_acknowledged_into_a_file_that_is_not_there(tmp_path, name, replaced):
    with Journal(tmp_path / "j") as journal:
        journal.learn(ONE)
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).unlink()
        if replaced:
            (tmp_path / name).write_bytes(content)
        for _ in range(2):
            with pytest.raises(JournalError, match=f"{name} was removed, moved or replaced"):
                journal.learn(TWO)
        assert "restart" in (journal.read_only or "")
        assert [each.text for each in journal.examples()] == ["one"]  # reads go on
    if name == "j-wal":
        shutil.copy(tmp_path / "j", tmp_path / "copy")
        assert read_texts(tmp_path / "copy") == ["one"]  # what the log held was saved


class Removing(list):
    """Examples that remove a file when they are looked at for the n-th time."""

    def __init__(self, examples, path: Path, time: int) -> None:
        super().__init__(examples)
        self.path, self.left = path, time

    def __iter__(self):
        self.left -= 1
        if self.left == 0:
            self.path.unlink()
        return super().__iter__()


@pytest.mark.parametrize("time", range(1, 7))
def test_a_file_that_is_removed_during_a_call_is_noticed_before_it_is_acknowledged(tmp_path, time):
    """Before the check at the beginning, or between it and the commit."""
    with Journal(tmp_path / "j") as journal:
        journal.learn(ONE)
        examples = Removing(TWO, tmp_path / "j-wal", time)
        with contextlib.suppress(JournalError):
            journal.learn(examples)
            assert examples.left > 0, "it was acknowledged though its file was removed"
        assert (examples.left > 0) == (journal.read_only is None)
    assert read_texts(tmp_path / "j")[0] == "one"


def test_a_moved_directory_is_noticed(tmp_path):
    (tmp_path / "run").mkdir()
    with Journal(tmp_path / "run" / "j") as journal:
        journal.learn(ONE)
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        with pytest.raises(JournalError, match="j was removed, moved or replaced"):
            journal.learn(TWO)
    assert read_texts(tmp_path / "elsewhere" / "j") == ["one"]


def test_closing_a_moved_journal_leaves_the_log_of_the_one_in_its_place(tmp_path):
    """SQLite removes the log by its name, which by then is another journal's."""
    (tmp_path / "run").mkdir()
    first = Journal(tmp_path / "run" / "j")
    first.learn(ONE)
    (tmp_path / "run").rename(tmp_path / "moved")
    (tmp_path / "run").mkdir()
    with Journal(tmp_path / "run" / "j") as second:
        second.learn(TWO)
        first.close()
        assert (tmp_path / "run" / "j-wal").exists()
        second.learn(ONE)
    assert read_texts(tmp_path / "run" / "j") == ["two", "one"]


@pytest.mark.slow
def test_a_server_whose_log_is_removed_acknowledges_nothing_more(tmp_path):
    run = tmp_path / "run"
    write_random_run(run, key_dim=4)
    body = {"examples": [{"label": "new", "embedding": [1.0, 0.0, 0.0, 0.0]}]}
    with Server(run) as server:
        assert server.client.post("/learn", json=body).status_code == 200
        (run / "journal.sqlite-wal").unlink()
        answer = server.client.post("/learn", json=body)
        assert answer.status_code == 503
        assert "journal.sqlite-wal was removed" in answer.json()["error"]
        assert server.client.get("/health").json()["status"] == "read-only"
        with pytest.raises(RunError, match="in use by process"):
            run_directory.require_free(run, replace=True)
        (run / "journal.sqlite.lock").unlink()
        with pytest.raises(RunError, match="in use by another program"):
            run_directory.require_free(run, replace=True)
        server.kill()
    with Journal(run / "journal.sqlite") as journal:
        assert journal.labels()["new"] in (1, 2)


# Forks


ENDS = ("nothing", "exit", "close", "collect", "learn", "killed", "lives")
FORKING = """
import gc, os, shutil, signal, sys
from pathlib import Path
import pytest
from mbpa.serve.journal import InUseError, Journal, JournalError

ONE, TWO = [("a", "one", None)], [("a", "two", None)]


def end_child(journal, end):
    if end == "close":
        journal.close()
    elif end == "collect":
        del journal
        gc.collect()
    elif end == "learn":
        for use in (lambda: journal.learn(TWO), journal.examples, journal.forget):
            with pytest.raises(JournalError, match="from which this one was forked"):
                use()
    elif end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif end == "lives":
        signal.pause()
    if end == "exit":
        sys.exit(0)  # with all that Python does at its end
    os._exit(0)


for end in sys.argv[2:]:
    path = Path(sys.argv[1]) / end / "j"
    path.parent.mkdir()
    journal = Journal(path)
    journal.learn(ONE)
    pid = os.fork()
    if pid == 0:
        end_child(journal, end)
    if end == "lives":
        journal.close()
        journal = Journal(path)  # the child does not keep the lock
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) if end in ("killed", "lives") else status == 0, end
    with pytest.raises(InUseError):
        Journal(path)  # the lock is still the parent's
    journal.learn(TWO)
    shutil.copytree(path.parent, path.parent / "copy")  # what a kill would leave now
    journal.close()

# Numbers of files are used again: that of the lock is now one of these.
others = [os.open(os.devnull, os.O_RDONLY) for _ in range(10)]
pid = os.fork()
if pid == 0:
    for each in others:
        os.fstat(each)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0, "a file of others was closed"

# A child that outlives its parent does not keep the lock.
journal = Journal(Path(sys.argv[1]) / "j")
pid = os.fork()
if pid == 0:
    signal.pause()
print(pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.heavy
def test_a_forked_process_leaves_the_files_of_its_parent_alone(tmp_path):
    """In a process of its own: a fork of this one, with its threads, might wait for ever."""
    command = [sys.executable, "-c", FORKING, str(tmp_path), *ENDS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        child = process.stdout.readline()
        assert process.wait(timeout=120) == -signal.SIGKILL
        try:
            Journal(tmp_path / "j").close()
        finally:
            os.kill(int(child), signal.SIGKILL)
    for end in ENDS:
        assert read_texts(tmp_path / end / "copy" / "j") == ["one", "two"], end


# Requests


@pytest.mark.parametrize("reopened", [False, True])
def test_a_request_id_cannot_name_other_examples_after_a_forget(tmp_path, reopened):
    path = tmp_path / "j"
    journal = Journal(path)
    ids = journal.learn([("alpha", "one", b"1234"), ("alpha", None, b"5678")], request="r1")
    journal.forget(label="alpha")
    if reopened:
        journal.close()
        journal = Journal(path)
    for other in (
        [("beta", "one", b"1234"), ("alpha", None, b"5678")],
        [("alpha", "two", b"1234"), ("alpha", None, b"5678")],
        [("alpha", "one", b"4321"), ("alpha", None, b"5678")],
        [("alpha", "one", None), ("alpha", None, b"8765")],
        [("alpha", "one", None)],
    ):
        with pytest.raises(InputError, match="request 'r1' was used for other examples"):
            journal.learn(other, request="r1")
        with pytest.raises(InputError, match="request 'r1' was used for other examples"):
            journal.find_repeated(other, "r1")
    same = [("alpha", "one", None), ("alpha", None, b"5678")]
    assert journal.learn(same, request="r1") == ids  # and what was forgotten stays so
    assert len(journal) == 0
    journal.close()


def test_labels_that_lie_on_a_border_are_not_taken_for_others(tmp_path):
    with Journal(tmp_path / "j") as journal:
        journal.learn([("a", "bc", None)], request="r")
        for other in (("ab", "c", None), ("a", b"bc", None)):
            with pytest.raises(InputError):
                journal.learn([other], request="r")


# Damage


def test_flipped_bits_in_a_row_are_named(tmp_path):
    with Journal(tmp_path / "j") as journal:
        journal.learn([("a", "a text that is found", None), ("b", None, b"12345678")])
    content = (tmp_path / "j").read_bytes()
    for old, new, why in (
        (b"a text that is found", b"a text that is fount", "example 1 was altered"),
        (b"12345678", b"12345679", "example 2 was altered"),
    ):
        (tmp_path / "j").write_bytes(content.replace(old, new))
        with pytest.raises(DamagedError, match=f"{why}.*restore it from a backup"):
            Journal(tmp_path / "j")
    (tmp_path / "j").write_bytes(content)
    Journal(tmp_path / "j").close()


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM examples WHERE id = 2",
        "UPDATE examples SET live = 0 WHERE id = 2",
        "UPDATE examples SET restored = 1 WHERE id = 2",
        "INSERT INTO examples SELECT 9, 1, 0, label, text, key, checksum FROM examples LIMIT 1",
        "DELETE FROM requests",
        "UPDATE requests SET name = 'other'",
        "UPDATE counters SET last = 1",
        "CREATE TABLE other (id)",
        "PRAGMA user_version = 0",
    ],
)
def test_rows_that_are_lost_added_or_changed_are_noticed(tmp_path, statement):
    with Journal(tmp_path / "j") as journal:
        journal.learn([("a", "one", None)])
        journal.learn(TWO, request="r")
    with sqlite3.connect(tmp_path / "j") as database:
        database.execute(statement)
    database.close()
    with pytest.raises(DamagedError, match="damaged"):
        Journal(tmp_path / "j")


@pytest.mark.parametrize("size", [0, 100, 4000])
def test_a_log_that_was_cut_short_is_noticed(tmp_path, size):
    """Without its last acknowledged calls it would look like any other journal."""
    place = tmp_path / "killed"
    with Journal(tmp_path / "j") as journal:
        journal.learn(ONE)
        journal.learn(TWO)
        place.mkdir()
        for name in ("j", "j-wal", "j.lock"):
            shutil.copy(tmp_path / name, place / name)
    os.truncate(place / "j-wal", size)
    with pytest.raises(DamagedError, match="the last 2 acknowledged calls are missing"):
        Journal(place / "j")
    (place / "j.lock").unlink()  # as the message says
    assert read_texts(place / "j") == []


def test_an_emptied_or_missing_journal_of_a_run_is_noticed(tmp_path):
    write_random_run(tmp_path / "run")
    journal = tmp_path / "run" / "journal.sqlite"
    os.truncate(journal, 0)
    with pytest.raises(DamagedError, match="it is empty"):
        Classifier.load(tmp_path / "run")
    journal.unlink()
    with pytest.raises(DamagedError, match="is missing: restore it from a backup"):
        Classifier.load(tmp_path / "run")


@pytest.mark.heavy
@pytest.mark.parametrize("value", [numpy.nan, numpy.inf, 1e30])
def test_keys_that_no_key_is_like_are_named(tmp_path, value, capsys):
    write_random_run(tmp_path / "run", key_dim=4)
    key = numpy.array([value, 0, 0, 0], "<f4").tobytes()
    with Journal(tmp_path / "run" / "journal.sqlite") as journal:
        (id,) = journal.learn([("x", None, key)])
    with pytest.raises(RunError, match=rf"journal\.sqlite: keys must .* example {id} has not"):
        Classifier.load(tmp_path / "run")
    for command in (["check"], ["serve", "--port", "0"]):
        assert cli.main([*command, str(tmp_path / "run")]) == 2
        assert f"example {id}" in capsys.readouterr().err


def test_check_says_that_a_run_is_whole_or_what_is_damaged(tmp_path, capsys):
    run = tmp_path / "run"
    write_random_run(run, has_rows=True)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert cli.main(["check", str(run)]) == 0
    printed = capsys.readouterr().out
    assert "60 examples of 6 labels" in printed
    assert f"{run} is intact" in printed
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    with Classifier.load(run):
        assert cli.main(["check", str(run)]) == 2
        assert "in use by process" in capsys.readouterr().err
    for path in sorted(before):
        if not path.name.endswith(".lock"):
            content = bytearray(before[path])
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
            if cli.main(["check", str(run)]) == 0:  # a byte that nothing is kept in
                with Classifier.load(run) as classifier:
                    assert len(classifier) == 60
            else:
                assert path.name in capsys.readouterr().err
            path.write_bytes(before[path])


# Files as people have them


@pytest.mark.parametrize(
    ("name", "value"),
    [("threshold", False), ("threshold", "0.5"), ("labels", {}), ("labels", "ab")],
)
def test_wrong_types_in_a_run_without_a_check_sum_are_noticed(tmp_path, name, value):
    shutil.copytree(EARLIER, tmp_path / "run")
    content = json.loads((tmp_path / "run" / "run.json").read_text("utf-8"))
    assert "sha256" not in content
    (tmp_path / "run" / "run.json").write_text(json.dumps(content | {name: value}))
    with pytest.raises(RunError, match=r"run\.json is damaged"):
        RunInfo.read(tmp_path / "run")


def test_only_the_owner_may_read_a_journal(tmp_path):
    with Journal(tmp_path / "j") as journal:
        journal.learn(ONE)
        for name in ("j", "j-wal"):
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


@pytest.mark.heavy
@pytest.mark.parametrize("name", [b"caf\xe9", "ünïcode".encode(), b"a?b#c%20 d", b"//abs"])
def test_a_run_may_be_anywhere(tmp_path, name, capsys):
    place = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name.replace(b"//", b"")))
    write_random_run(place)
    if name.startswith(b"//"):
        place = Path(f"/{place}")
        assert str(place).startswith("//")
    with Classifier.load(place) as classifier:
        classifier.learn([Lesson("new", "text", torch.eye(16)[0])])
    assert cli.main(["check", str(place)]) == 0
    assert "61 examples" in capsys.readouterr().out


def test_a_run_and_journal_of_the_format_before_answer_as_they_did(tmp_path):
    """Written by the version before there were check sums, with requests, forgotten and restored
    examples."""
    expected = json.loads(EARLIER.with_suffix(".json").read_text())
    run = Path(shutil.copytree(EARLIER, tmp_path / "run"))
    for _ in range(2):  # it is upgraded, then opened again
        with Classifier.load(run, text_encoder=WordEncoder()) as classifier:
            assert [[e.id, e.label, e.text] for e in classifier.examples()] == expected["examples"]
            assert classifier.labels == expected["labels"]
            assert sorted(classifier.journal.restored_ids) == expected["restored"]
            assert classifier.journal.change == expected["change"]
            answers = classifier.predict(["a pizza", "apples", "hammer", "half"])
            for answer, (label, confidence, _) in zip(answers, expected["answers"], strict=True):
                assert answer.label == label
                assert answer.confidence == pytest.approx(confidence, rel=1e-5)
    with Journal(run / "journal.sqlite") as journal:
        kept = [("pizza", "one salami pizza", None), ("pizza", "pizza tonight", None)]
        assert journal.learn(kept, request="kept") == [5, 6]
        with pytest.raises(InputError, match="other examples"):
            journal.learn(kept[::-1], request="kept")
        for name in ("half forgotten", "gone"):
            with pytest.raises(InputError, match="examples forgotten since"):
                journal.learn([("gone", "gone wholly", None)], request=name)


def test_a_journal_of_the_format_before_is_read_where_it_cannot_be_written(tmp_path):
    run = Path(shutil.copytree(EARLIER, tmp_path / "run"))
    before = (run / "journal.sqlite").read_bytes()
    with Journal(run / "journal.sqlite", writable=False) as journal:
        assert len(journal) == len(json.loads(EARLIER.with_suffix(".json").read_text())["examples"])
        with pytest.raises(JournalError, match="opened for reading"):
            journal.learn(ONE)
    assert (run / "journal.sqlite").read_bytes() == before


# Runs that take the place of others


def replace_run(out: Path, write: Callable[[Path], object] = write_word_run) -> None:
    with (
        run_directory.reporting_errors(out),
        run_directory.replace_directory(out, replace=True) as directory,
    ):
        write(directory)


@pytest.fixture(params=["exchange", "two steps"])
def _either_way(request, monkeypatch):
    if request.param == "two steps":
        monkeypatch.setattr(files, "exchange", lambda one, other: False)


@pytest.mark.usefixtures("_either_way")
def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path):
    (tmp_path / "disk").mkdir()
    replace_run(tmp_path / "disk" / "run", write_random_run)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "run")
    replace_run(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert RunInfo.read(tmp_path / "link").encoder == "words"
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["run"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link"]


def test_a_link_that_leads_nowhere_is_where_the_run_comes_to_be(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "later" / "run")
    run_directory.require_free(tmp_path / "link", replace=False)
    replace_run(tmp_path / "link")
    assert RunInfo.read(tmp_path / "later" / "run")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(RunError, match="loop cannot be written"):
        run_directory.require_free(tmp_path / "loop", replace=False)


@pytest.mark.usefixtures("_either_way")
def test_what_killed_processes_left_beside_a_run_is_removed(tmp_path):
    replace_run(tmp_path / "run", write_random_run)
    for kind in ("new", "old"):
        write_word_run(tmp_path / f".run.{'0' * 32}.{kind}")
    (tmp_path / ".run.mine.new").mkdir()
    replace_run(tmp_path / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".run.mine.new", "run"]


def test_a_run_that_was_half_replaced_is_put_back(tmp_path):
    write_word_run(tmp_path / f".run.{'0' * 32}.old")
    with (
        pytest.raises(ZeroDivisionError),
        run_directory.replace_directory(tmp_path / "run", replace=True),
    ):
        raise ZeroDivisionError
    assert RunInfo.read(tmp_path / "run").encoder == "words"


def test_two_processes_that_make_a_run_leave_each_other_alone(tmp_path):
    with run_directory.replace_directory(tmp_path / "run", replace=True) as first:
        write_word_run(first)
        replace_run(tmp_path / "run", write_random_run)
        assert first.exists()
    assert RunInfo.read(tmp_path / "run").encoder == "words"


# Commands


def test_a_missing_file_is_named_before_an_existing_run(tmp_path, capsys):
    write_word_run(tmp_path / "run")
    assert cli.main(["teach", str(tmp_path / "none.csv"), "--out", str(tmp_path / "run")]) == 2
    assert "none.csv cannot be read: No such file" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("command", ["teach", "serve"])
def test_a_device_that_is_not_there_is_named(tmp_path, capsys, command):
    write_word_run(tmp_path / "run")
    (tmp_path / "data.csv").write_text("text,label\nx,a\ny,b\n")
    what = {"teach": [str(tmp_path / "data.csv"), "--out", str(tmp_path / "out")]}
    arguments = what.get(command, [str(tmp_path / "run")])
    assert cli.main([command, *arguments, "--device", "cuda"]) == 2
    printed = capsys.readouterr().err
    assert "no CUDA device" in printed
    assert printed.count("\n") == 1


# What an adversary found


def test_a_journal_that_nobody_has_any_more_is_not_in_use(tmp_path):
    journal = Journal(tmp_path / "j")
    journal.learn(ONE)
    del journal
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()
    assert read_texts(tmp_path / "j") == ["one"]


def test_a_directory_where_the_lock_belongs_is_named(tmp_path):
    (tmp_path / "j.lock").mkdir()
    with pytest.raises(
        JournalError, match=r"j\.lock must be a file, not a directory: move it away"
    ):
        Journal(tmp_path / "j")
    assert not (tmp_path / "j").exists()


@pytest.mark.parametrize("call", ["learn", "forget"])
def test_an_interrupt_after_a_commit_ends_all_writing(tmp_path, monkeypatch, call):
    """Counts in memory may be outdated; a restart reads them again."""
    with Journal(tmp_path / "j") as journal:
        journal.learn([("a", "kept", None), ("a", "secret", None)])
        rows = Database.rows

        def interrupt(self, statement, *arguments):
            found = rows(self, statement, *arguments)
            if statement == "COMMIT":
                raise KeyboardInterrupt
            return found

        with monkeypatch.context() as patch:
            patch.setattr(Database, "rows", interrupt)
            with pytest.raises(KeyboardInterrupt):
                journal.learn(TWO) if call == "learn" else journal.forget([2])
        with pytest.raises(JournalError, match="a call was interrupted: open it again"):
            journal.forget([1])
    with Journal(tmp_path / "j") as journal:
        assert len(journal) == (3 if call == "learn" else 1)
        journal.forget([2])
        assert b"secret" not in b"".join(path.read_bytes() for path in tmp_path.iterdir())


@pytest.mark.parametrize("request_id", [5, b"r", "\ud800"])
def test_request_ids_are_strings(tmp_path, request_id):
    with Journal(tmp_path / "j") as journal:
        with pytest.raises((ValueError, TypeError)):
            journal.learn(ONE, request=request_id)
        assert (len(journal), journal.read_only) == (0, None)


def test_ids_may_be_numbers_of_numpy(tmp_path):
    with Journal(tmp_path / "j") as journal:
        journal.learn(ONE)
        assert journal.forget([numpy.int64(1)]) == [1]


def test_relative_paths_and_links_lead_to_one_journal(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    monkeypatch.chdir(tmp_path / "disk")
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "j")
    with Journal(Path("j")) as journal:
        monkeypatch.chdir("/")
        journal.learn(ONE)
        with pytest.raises(InUseError, match="in use by process"):
            Journal(tmp_path / "link")
    with Journal(tmp_path / "link") as journal:
        journal.learn(TWO)
    assert read_texts(tmp_path / "disk" / "j") == ["one", "two"]
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["link"]


def test_what_came_while_a_run_was_made_is_not_replaced(tmp_path):
    def make_run_beside(others: Path) -> None:
        with run_directory.replace_directory(tmp_path / "run", replace=False) as new:
            write_random_run(new)
            others.rename(tmp_path / "run")

    write_word_run(tmp_path / "another")
    with pytest.raises(RunError, match="is a run, and what it was taught would be lost"):
        make_run_beside(tmp_path / "another")
    assert RunInfo.read(tmp_path / "run").encoder == "words"
    (tmp_path / "run").rename(tmp_path / "another")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").touch()
    with pytest.raises(RunError, match="contains thesis, which is not part of a run"):
        make_run_beside(tmp_path / "mine")
    assert (tmp_path / "run" / "thesis").exists()


def test_backups_beside_a_journal_are_no_part_of_a_run(tmp_path):
    write_word_run(tmp_path / "run")
    (tmp_path / "run" / "journal.sqlite.before").touch()
    with pytest.raises(RunError, match=r"contains journal\.sqlite\.before, which is not part of"):
        run_directory.require_free(tmp_path / "run", replace=True)


def test_a_run_that_is_being_loaded_is_not_replaced(tmp_path):
    """Otherwise the old model would answer with the new examples."""
    write_word_run(tmp_path / "run")
    seen = []

    class Probe(WordEncoder):
        @property
        def fingerprint(self) -> str:
            """Read while the run is loaded."""
            with pytest.raises(RunError, match="in use by process"):
                run_directory.require_free(tmp_path / "run", replace=True)
            seen.append(self)
            return super().fingerprint

    Classifier.load(tmp_path / "run", text_encoder=Probe()).close()
    assert seen
