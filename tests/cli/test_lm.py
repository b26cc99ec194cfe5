"""The commands of `mbpa lm`, on a tiny model."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from tiny_language_model import TEXT, make_model, make_tokenizer

from mbpa.cli import main

OTHER = "The shop opens at nine. On Mondays it is closed, since the owner mends boats in the yard."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "docs"
    (folder / "deep").mkdir(parents=True)
    (folder / "heron.md").write_text(TEXT)
    (folder / "deep/shop.txt").write_text(OTHER)
    (folder / "page.html").write_text("<p>Boats &amp; birds</p><script>hidden()</script>")
    (folder / "empty.txt").write_text("")
    (folder / "binary.txt").write_bytes(b"\0\1\xff\xfe" * 50)
    return folder


def run(*arguments: str) -> int:
    return main(["lm", *arguments])


@pytest.mark.heavy
def test_a_folder_is_read_scored_completed_and_forgotten(
    docs: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("read", "docs", "--model", model) == 0
    printed = capsys.readouterr()
    assert "read 3 documents" in printed.out
    assert "2 documents skipped" in printed.out
    assert "skipped docs/empty.txt: must contain text" in printed.err
    assert "skipped docs/binary.txt" in printed.err

    held = printed.out.splitlines()[-1].removeprefix("run holds ")

    assert run("sources", "run") == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1].split() == held.split()
    assert all(name in printed.out for name in ("docs/heron.md", "docs/deep/shop.txt"))

    assert run("score", "run", "docs/heron.md", "--json") == 0
    tokens = json.loads(capsys.readouterr().out)["tokens"]
    assert sum(each["log_prob"] - each["log_prob_alone"] for each in tokens) > len(tokens)

    assert run("complete", "run", "The heron stands", "--max-tokens", "5") == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("The heron stands")
    assert "\x1b" not in printed.out  # no colours unless it is a terminal
    assert printed.out.count("\n") == 2 + 5

    assert run("complete", "run", "The heron stands", "--max-tokens", "5", "--json") == 0
    written = json.loads(capsys.readouterr().out)
    assert len(written["tokens"]) == 5
    assert written["tokens"][0]["origins"][0]["source"].startswith("docs/")

    assert run("forget", "run", "docs/heron.md") == 0
    assert "forgot docs/heron.md" in capsys.readouterr().out
    assert run("sources", "run", "--json") == 0
    names = [each["name"] for each in json.loads(capsys.readouterr().out)]
    assert names == ["docs/page.html", "docs/deep/shop.txt"]


def test_a_run_is_used_from_another_working_directory(
    docs: Path, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(model).parent)
    out = str(tmp_path / "run")
    assert run("read", str(docs), "--model", Path(model).name, "--out", out) == 0
    monkeypatch.chdir(docs)
    assert run("score", "../run", "heron.md") == 0
    assert run("read", ".", "--out", "../run") == 0


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_a_model_that_was_moved_is_named_once(
    docs: Path, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copytree(model, first)
    assert run("read", "docs/heron.md", "--model", str(first)) == 0
    first.rename(second)
    assert run("complete", "run", "The heron", "--max-tokens", "2") == 2
    assert "if it was moved: mbpa lm read --model FOLDER" in capsys.readouterr().err
    assert run("read", "docs/heron.md", "--model", str(second)) == 0
    assert run("complete", "run", "The heron", "--max-tokens", "2") == 0
    assert main(["check", "run"]) == 0


def test_a_file_whose_name_is_not_unicode_is_skipped(
    docs: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(os.fsdecode(bytes(docs / "a\udcff.txt"))).write_text(TEXT)
    assert run("read", "docs", "--model", model) == 0
    printed = capsys.readouterr()
    assert "read 3 documents" in printed.out
    assert "the name of a document must be valid Unicode" in printed.err


def test_the_document_for_which_there_is_no_room_is_named(
    docs: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("read", "docs", "--model", model, "--capacity", "60") == 2
    assert "docs/heron.md: text must have at most 61 tokens" in capsys.readouterr().err


def test_reading_again_reads_only_what_has_changed(
    docs: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("read", "docs/heron.md", "docs/deep", "--model", model) == 0
    (docs / "heron.md").write_text(TEXT + " It sleeps.")
    capsys.readouterr()
    assert run("read", "docs") == 0
    printed = capsys.readouterr().out
    assert "read 2 documents" in printed  # the changed one, and the new page
    assert "1 document had not changed" in printed
    assert "of 3 documents" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["read", "nowhere"], "nowhere"),
        (["read", "docs/empty.txt", "--model", "MODEL"], "0 documents"),
        (["score", "nowhere", "docs/heron.md"], "holds no language run"),
        (["complete", "nowhere", "A"], "holds no language run"),
        (["forget", "nowhere", "a"], "holds no language run"),
        (["sources", "docs"], "holds no language run"),
        (["read", "docs", "--model", "no/such/model"], "no/such/model"),
        (["read", "docs", "--out", "docs", "--model", "MODEL"], "new or an empty directory"),
    ],
)
def test_errors_are_one_line(
    docs: Path, model: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*(model if each == "MODEL" else each for each in arguments)) == 2
    printed = capsys.readouterr()
    assert message in printed.err + printed.out
    assert "Traceback" not in printed.err


def test_a_run_is_verified(docs: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("read", "docs/deep", "--model", model) == 0
    assert main(["check", "run"]) == 0
    assert "run is intact: 1 documents" in capsys.readouterr().out
    (path,) = Path("run/sources").iterdir()
    path.write_bytes(path.read_bytes()[:-8] + bytes(8))
    assert main(["check", "run"]) == 2
    assert path.name in capsys.readouterr().err


def test_an_unknown_source_cannot_be_forgotten(
    docs: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("read", "docs/deep", "--model", model) == 0
    assert run("forget", "run", "docs/deep/shop.txt", "docs/heron.md") == 2
    assert "holds no document docs/heron.md" in capsys.readouterr().err
    assert run("sources", "run", "--json") == 0
    assert "docs/deep/shop.txt" in capsys.readouterr().out  # nothing was forgotten


def test_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lm"]) == 0
    assert "complete" in capsys.readouterr().out
    assert main(["--help"]) == 0
    assert "lm" in capsys.readouterr().out
