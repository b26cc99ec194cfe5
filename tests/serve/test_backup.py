"""Backups of runs, also of runs that are being served, and what is restored from them."""

from __future__ import annotations

import contextlib
import io
import random
import shutil
import signal
import stat
import tarfile
import threading
import time
from pathlib import Path

import httpx
import pytest
from forks import Fork
from runs import random_keys, write_random_run, write_word_run
from servers import Server, open_client, running

from mbpa import cli
from mbpa.errors import RunError
from mbpa.serve.answers import Lesson
from mbpa.serve.app import create_app
from mbpa.serve.backup import back_up, restore
from mbpa.serve.classifier import Classifier
from mbpa.serve.export import open_journal

DIM = 16
QUERIES = random_keys(30, DIM, seed=3)
KEYS = random_keys(600, DIM, seed=4)


def save(run: Path, out: Path) -> None:
    with open_journal(run) as journal:
        back_up(run, journal, out)


@pytest.fixture
def run(tmp_path) -> Path:
    """A run that was taught, renamed and made to forget."""
    write_random_run(tmp_path / "run", has_rows=True)
    with Classifier.load(tmp_path / "run") as classifier:
        classifier.learn([Lesson("new", "a text", KEYS[0])] * 3, request="r", by="ana")
        classifier.rename("label 001", "renamed")
        classifier.forget([2], by="bob")
    return tmp_path / "run"


def test_a_restored_run_is_the_run(run, tmp_path, capsys):
    out = tmp_path / "run.tar"
    assert cli.main(["backup", str(run), "--out", str(out)]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {out}, 0.")
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert cli.main(["restore", str(out), "--out", str(tmp_path / "restored")]) == 0
    assert "62 examples of 7 labels after 4 changes" in capsys.readouterr().out
    assert stat.S_IMODE((tmp_path / "restored" / "journal.sqlite").stat().st_mode) == 0o600
    assert not list(tmp_path.glob("*.tmp"))
    with Classifier.load(run) as one, Classifier.load(tmp_path / "restored") as other:
        assert one.predict(keys=QUERIES, top=9) == other.predict(keys=QUERIES, top=9)
        assert one.examples() == other.examples()
        assert one.journal.audit(limit=9) == other.journal.audit(limit=9)
        lessons = [Lesson("new", "a text", KEYS[0])] * 3
        assert other.learn(lessons, request="r") == one.learn(lessons, request="r")
        assert other.learn(lessons) == one.learn(lessons)


def test_an_existing_file_or_run_is_not_replaced_unasked(run, tmp_path, capsys):
    out = tmp_path / "run.tar"
    out.write_text("mine")
    assert cli.main(["backup", str(run), "--out", str(out)]) == 2
    assert out.read_text() == "mine"
    assert cli.main(["backup", str(run), "--out", str(out), "--again"]) == 0
    assert cli.main(["restore", str(out), "--out", str(run)]) == 2
    assert "what it was taught would be lost: use --again" in capsys.readouterr().err
    with Classifier.load(run) as classifier:
        classifier.learn([Lesson("later", "text", KEYS[1])])
        assert cli.main(["restore", str(out), "--out", str(run), "--again"]) == 2
        assert "is in use by process" in capsys.readouterr().err
        assert cli.main(["backup", str(run), "--out", str(out), "--again"]) == 2
        assert "give the URL of the service" in capsys.readouterr().err
    assert cli.main(["restore", str(out), "--out", str(run), "--again"]) == 0
    with Classifier.load(run) as classifier:
        assert "later" not in classifier.labels


def test_what_a_killed_service_left_in_its_log_is_in_the_backup(run, tmp_path):
    killed = tmp_path / "killed"
    with Classifier.load(run) as classifier:
        classifier.learn([Lesson("logged", "text", KEYS[2])])
        shutil.copytree(run, killed)
    assert (killed / "journal.sqlite-wal").stat().st_size > 0
    save(killed, tmp_path / "run.tar")
    restore(tmp_path / "run.tar", tmp_path / "restored")
    with Classifier.load(tmp_path / "restored") as classifier:
        assert "logged" in classifier.labels


@pytest.mark.heavy
def test_backups_under_load_hold_what_was_acknowledged_and_whole_calls(run, tmp_path):
    before = len(KEYS)
    with Classifier.load(run) as classifier, running(create_app(classifier)) as url:
        told: list[list[int]] = []
        failures: list[object] = []
        stopping = threading.Event()

        def teach(number: int) -> None:
            draw = random.Random(number)
            with open_client(url) as client:
                while not stopping.is_set():
                    keys = KEYS[draw.randrange(before)].tolist()
                    example = {"label": f"load {number}", "embedding": keys, "text": "t"}
                    answer = client.post("/learn", json={"examples": [example] * 3})
                    if answer.status_code != 200:
                        failures.append(answer.text)
                        return
                    told.append(answer.json()["ids"])
                    answer = client.post("/predict", json={"embeddings": [keys]})
                    if answer.status_code != 200:
                        failures.append(answer.text)

        threads = [threading.Thread(target=teach, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for number in range(5):
            time.sleep(0.2)
            acknowledged = {id for ids in list(told) for id in ids}
            out = tmp_path / f"{number}.tar"
            assert cli.main(["backup", url, "--out", str(out)]) == 0
            restore(out, tmp_path / f"restored {number}")
            with Classifier.load(tmp_path / f"restored {number}") as restored:
                ids = {each.id for each in restored.examples() if each.label.startswith("load")}
            assert acknowledged <= ids
            stopped = {id for call in list(told) for id in call}
            assert len(ids) % 3 == 0
            assert all(set(call) <= ids or not set(call) & ids for call in list(told))
            assert len(ids - stopped) <= 3 * len(threads)
        stopping.set()
        for thread in threads:
            thread.join()
        assert not failures
        assert len(told) > 10
        assert not (run / "journal.sqlite-backup").exists()


@pytest.mark.heavy
@pytest.mark.parametrize("rounds", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_a_kill_during_a_backup_leaves_a_run_that_serves_and_no_copy(tmp_path, rounds):
    run = tmp_path / "run"
    write_random_run(run, examples=6000, labels=3, key_dim=64)
    draw, left = random.Random(1), 0
    for round in range(rounds):
        with Server(run) as server:
            assert not (run / "journal.sqlite-backup").exists()
            key = random_keys(1, 64, seed=round)[0].tolist()
            example = {"label": "taught", "embedding": key, "text": "t"}
            server.client.post("/learn", json={"examples": [example]}).raise_for_status()
            reading = threading.Thread(target=_download, args=(server.url,))
            reading.start()
            time.sleep(draw.random() * 0.03)
            server.kill()
            reading.join()
        left += (run / "journal.sqlite-backup").exists()
    print(f"{left} of {rounds} kills left an unfinished copy")
    (run / "journal.sqlite-backup").write_bytes(b"an unfinished copy")
    assert cli.main(["check", str(run)]) == 0
    with Classifier.load(run) as classifier:
        assert classifier.labels["taught"] == rounds
        assert not (run / "journal.sqlite-backup").exists()


def _download(url: str) -> None:
    with contextlib.suppress(httpx.HTTPError):
        httpx.get(f"{url}/backup", timeout=30)


@pytest.mark.heavy
def test_a_killed_command_leaves_no_half_backup(tmp_path):
    run, out = tmp_path / "run", tmp_path / "out" / "run.tar"
    out.parent.mkdir()
    write_random_run(run, examples=6000, labels=3, key_dim=64)
    script = (
        "from pathlib import Path; import sys; from mbpa.serve.export import open_journal\n"
        "from mbpa.serve.backup import back_up\n"
        "print('ready', flush=True); run, out = map(Path, sys.argv[1:])\n"
        "with open_journal(run) as journal: back_up(run, journal, out)\n"
    )
    draw, finished = random.Random(0), 0
    for _ in range(5):
        process = Fork(run, out, script=script)
        process.stdout.readline()
        time.sleep(draw.random() * 0.25)
        process.send_signal(signal.SIGKILL)
        process.stdout.close()
        process.wait()
        if out.exists():
            finished += 1
            restore(out, tmp_path / "restored", replace=True)
            out.unlink()
        assert cli.main(["check", str(run)]) == 0
    print(f"{finished} of 5 backups were finished")
    assert {each.suffix for each in out.parent.iterdir()} <= {".tmp"}


def test_damaged_and_foreign_archives_are_refused_and_change_nothing(run, tmp_path):
    save(run, tmp_path / "run.tar")
    content = (tmp_path / "run.tar").read_bytes()
    restored = tmp_path / "restored"
    write_word_run(restored)
    kept = {each: each.read_bytes() for each in restored.rglob("*") if each.is_file()}
    draw = random.Random(0)
    places = [content.index(text) + 3 for text in (b"text 7", b'"labels"', b"renamed")]
    with tarfile.open(tmp_path / "run.tar") as archive:
        offsets = [each.offset_data + 100 for each in archive if each.name.startswith("model/")]
    cases = [content[:length] for length in (0, 100, 700, 5000, len(content) - 20_000)]
    for place in places + offsets:
        cases.append(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    foreign = io.BytesIO()
    with tarfile.open(fileobj=foreign, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("../outside"))
    cases += [foreign.getvalue(), draw.randbytes(5000)]
    for case in cases:
        (tmp_path / "damaged.tar").write_bytes(case)
        with pytest.raises(RunError) as error:
            restore(tmp_path / "damaged.tar", restored, replace=True)
        assert "damaged.tar" in str(error.value)
        assert "\n" not in str(error.value)
        found = {each: each.read_bytes() for each in restored.rglob("*") if each.is_file()}
        found.pop(restored / "journal.sqlite.lock", None)
        kept.pop(restored / "journal.sqlite.lock", None)
        assert found == kept
    assert not (tmp_path / "outside").exists()
    with pytest.raises(OSError, match="No such file"):
        restore(tmp_path / "none.tar", restored, replace=True)
