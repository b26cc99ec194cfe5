"""The directory of a language run: what survives mistakes, crashes and other processes."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_language_model import TEXT, make_model, make_tokenizer

from mbpa.errors import CheckpointError, RunError
from mbpa.language import MemoryLM, run_directory
from mbpa.language.run_directory import RunDirectory

OTHER = "The shop opens at nine. On Mondays it is closed, since the owner mends boats in the yard."


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


@pytest.fixture
def run(model: Any, tmp_path: Path) -> Path:
    lm = MemoryLM(model, make_tokenizer(), capacity=1000)
    lm.save(tmp_path / "run")
    lm.read(TEXT, source="heron")
    lm.read(OTHER, source="shop")
    lm.close()
    return tmp_path / "run"


def load(run: Path, model: Any, **options: Any) -> MemoryLM:
    return MemoryLM.load(run, model, make_tokenizer(), **options)


def get_scores(lm: MemoryLM, text: str = TEXT) -> list[float]:
    return [token.log_prob for token in lm.score(text).tokens]


def change_metadata(path: Path, **changes: str) -> None:
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = {**file.metadata(), **changes}
    save_file(tensors, path, metadata)


def test_a_run_that_has_outgrown_its_capacity_is_loaded_whole(run: Path, model: Any) -> None:
    lm = load(run, model, capacity=5000)
    for number in range(10):
        lm.read(f"{number} {TEXT}", source=str(number))
    assert len(lm) > 1000
    expected = get_scores(lm)
    lm.close()
    again = load(run, model)
    assert len(again) == len(lm)
    assert get_scores(again) == expected
    again.close()
    with pytest.raises(ValueError, match="capacity must be at least"):
        load(run, model, capacity=100)
    load(run, model)  # the failure released the lock


def test_a_document_that_could_not_be_written_is_not_half_there(
    run: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = load(run, model)
    before = get_scores(lm)

    def fail(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RunDirectory, "add", fail)
        for name in ("new", "heron"):
            with pytest.raises(KeyboardInterrupt):
                lm.read(TEXT.upper(), source=name)
    assert get_scores(lm) == before
    assert [source.name for source in lm.sources()] == ["heron", "shop"]


def test_two_files_of_one_document_are_refused(run: Path, model: Any) -> None:
    first = run / "sources/00000000.safetensors"
    second = run / "sources/00000007.safetensors"
    second.write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match="was renamed"):
        load(run, model)
    change_metadata(second, number="7")
    with pytest.raises(CheckpointError, match="two files of heron"):
        load(run, model)


@pytest.mark.parametrize("changes", [{"name": "other"}, {"replaces": "0"}, {"read_at": "1.0"}])
def test_altered_metadata_is_noticed(run: Path, model: Any, changes: dict[str, str]) -> None:
    change_metadata(run / "sources/00000001.safetensors", **changes)
    with pytest.raises(CheckpointError, match=r"00000001\.safetensors is damaged"):
        load(run, model)
    assert (run / "sources/00000000.safetensors").exists()  # nothing was removed because of it


def test_a_changed_manifest_is_noticed(run: Path, model: Any) -> None:
    path = run / "language.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "window": 99}))
    with pytest.raises(CheckpointError, match="was altered"):
        load(run, model)


def test_remains_of_a_killed_process_are_removed(run: Path, model: Any) -> None:
    remains = run / "sources/00000002.safetensors.abc.tmp"
    remains.write_bytes(b"half a document")
    load(run, model, writable=False)
    assert remains.exists()
    load(run, model)
    assert not remains.exists()


def test_a_half_done_replacement_is_completed(run: Path, model: Any) -> None:
    lm = load(run, model)
    old = (run / "sources/00000000.safetensors").read_bytes()
    lm.read(TEXT.upper(), source="heron")
    expected = get_scores(lm)
    lm.close()
    (run / "sources/00000000.safetensors").write_bytes(old)  # as if killed before it was removed
    again = load(run, model)
    assert get_scores(again) == expected
    assert not (run / "sources/00000000.safetensors").exists()


def test_what_is_open_for_reading_cannot_be_changed(run: Path, model: Any) -> None:
    reader = load(run, model, writable=False)
    closed = load(run, model)
    closed.close()
    for lm in (reader, closed):
        with pytest.raises(RunError, match="reading only"):
            lm.read("Something new.", source="new")
        with pytest.raises(RunError, match="reading only"):
            lm.forget("heron")
        assert len(lm.sources()) == 2


def test_a_save_that_fails_leaves_no_run_and_can_be_repeated(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = MemoryLM(model, make_tokenizer(), capacity=500)
    lm.read(TEXT, source="heron")
    lm.read(OTHER, source="shop")
    expected = get_scores(lm)
    from mbpa import files

    written: list[Path] = []
    write = files.write_durably

    def fail_second(path: Path, content: bytes) -> None:
        if len(written) == 1:
            raise OSError(28, "No space left on device")
        written.append(path)
        write(path, content)

    with monkeypatch.context() as patched:
        patched.setattr(files, "write_durably", fail_second)
        with pytest.raises(OSError, match="No space"):
            lm.save(tmp_path / "run")
    with pytest.raises(RunError, match="holds no language run"):
        load(tmp_path / "run", model)
    lm.save(tmp_path / "run")
    lm.close()
    assert get_scores(load(tmp_path / "run", model)) == expected


@pytest.mark.heavy
def test_a_run_can_be_made_where_a_process_was_killed_while_it_made_one(
    model: Any, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    code = (
        "import os, pathlib, signal, sys\n"
        "from mbpa.language.run_directory import RunDirectory\n"
        "replace = os.replace\n"
        "def die(one, other):\n"
        "    if pathlib.Path(other).name == 'language.json':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    replace(one, other)\n"
        "os.replace = die\n"
        "RunDirectory.create(sys.argv[1], {})\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(run)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in run.glob("*.tmp")]
    lm = MemoryLM(model, make_tokenizer(), capacity=500)
    lm.save(run)
    assert sorted(path.name for path in run.iterdir()) == ["language.json", "lock", "sources"]


def test_a_run_that_another_process_has_just_made_is_not_replaced(
    run: Path, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, lm = tmp_path / "new", MemoryLM(model, make_tokenizer(), capacity=500)
    take_lock = run_directory._take_lock

    def take_after_the_other(root: Path) -> int:
        shutil.copytree(run, root, dirs_exist_ok=True)  # the other process is quicker, and done
        return take_lock(root)

    with monkeypatch.context() as patched:
        patched.setattr(run_directory, "_take_lock", take_after_the_other)
        with pytest.raises(RunError, match="holds a run already"):
            lm.save(target)
    assert [source.name for source in load(target, model).sources()] == ["heron", "shop"]


@pytest.mark.heavy
def test_a_reader_beside_a_writer_sees_whole_documents(run: Path, model: Any) -> None:
    writer, texts = load(run, model), [TEXT, TEXT.upper()]
    done = threading.Event()

    def replace() -> None:
        try:
            for turn in range(20):
                writer.read(texts[turn % 2], source="heron")
        finally:
            done.set()

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        while not done.is_set():
            reader = load(run, model, writable=False)
            assert sorted(source.name for source in reader.sources()) == ["heron", "shop"]
    finally:
        thread.join()


@pytest.mark.heavy
@pytest.mark.parametrize("kept", [1, 2])
def test_forgetting_is_exact_in_a_small_memory(model: Any, kept: int) -> None:
    sentences = [each + "." for each in TEXT.split(".") if len(each) > 20]
    lm, never = (MemoryLM(model, make_tokenizer(), capacity=2000) for _ in range(2))
    for number, sentence in enumerate(sentences):
        lm.read(sentence, source=str(number))
        if number % (kept + 1):
            never.read(sentence, source=str(number))
    for number in range(0, len(sentences), kept + 1):
        lm.forget(str(number))
    assert len(lm) == len(never) < 150
    assert get_scores(lm, OTHER) == get_scores(never, OTHER)
    assert lm.explain(TEXT) == never.explain(TEXT)


def test_a_failure_in_the_cache_leaves_no_entries(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = MemoryLM(model, make_tokenizer(), capacity=1000)
    lm.read(OTHER, source="shop")
    before = get_scores(lm)

    def fail(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr("mbpa.adaptation.Engine.keep_summaries", fail)
        with pytest.raises(MemoryError):
            lm.read(TEXT, source="heron")
    assert [source.name for source in lm.sources()] == ["shop"]
    assert get_scores(lm) == before
