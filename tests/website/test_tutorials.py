"""The tutorials work as they stand: files are saved, blocks run, and print what is shown."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from servers import Server

from mbpa.cli import main

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"-?\+?\d+(?:,\d{3})*(?:\.\d+)?")
TIMING = re.compile(r"\d+\.\d s\b.*|estimated .*")


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    language: str
    title: str
    content: str


def read_blocks(document: Path) -> list[Block]:
    return [Block(*found) for found in FENCE.findall(document.read_text("utf-8"))]


def agrees(shown: str, printed: str) -> bool:
    """Return whether two lines have the same words, and numbers that differ by rounding at most.

    Seeds are fixed, but other processors add in another order. Times are not compared.
    """
    shown, printed = (TIMING.sub("", line).split() for line in (shown, printed))
    if [NUMBER.sub("#", word) for word in shown] != [NUMBER.sub("#", word) for word in printed]:
        return False
    pairs = zip(NUMBER.findall(" ".join(shown)), NUMBER.findall(" ".join(printed)), strict=True)
    numbers = [(float(one.replace(",", "")), float(two.replace(",", ""))) for one, two in pairs]
    return all(abs(one - two) <= 0.05 + 0.06 * max(abs(one), abs(two)) for one, two in numbers)


def require_output(shown: str, printed: str) -> None:
    """Require that each line that is shown was printed, in this order.

    An explanation is shown as a whole: readers wonder about lines that a page leaves out.
    """
    if shown.startswith("before"):
        assert len(shown.splitlines()) == len(printed.splitlines()), printed
    lines = iter(line for line in printed.splitlines() if line.strip())
    for expected in (line for line in shown.splitlines() if line.strip()):
        assert any(agrees(expected, line) for line in lines), f"{expected!r} is not in:\n{printed}"


class Reader:
    """Someone who follows a tutorial in an empty folder."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._scope: dict[str, Any] = {}
        self._url = ""

    def follow(self, blocks: list[Block]) -> None:
        printed = ""
        for block in blocks:
            if block.title:
                path = self._folder / block.title
                path.parent.mkdir(exist_ok=True)
                path.write_text(block.content)
            elif block.language == "python":
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    exec(compile(block.content, "tutorial", "exec"), self._scope)
                printed = out.getvalue()
            elif block.language == "text":
                require_output(block.content, printed)
            elif block.language == "console":
                for command, shown in re.findall(r"^\$ (.*)\n((?:[^$].*\n)*)", block.content, re.M):
                    require_output(shown, self._run(shlex.split(command)))

    def _run(self, words: list[str]) -> str:
        """Run a command and return what it prints; services keep running until the end."""
        if words[0] == "pip":
            return ""  # what it installs is installed
        if words[:2] == ["mbpa", "serve"]:
            server = self._stack.enter_context(Server(*words[2:], cwd=self._folder))
            self._url = server.url
            return ""
        with contextlib.redirect_stdout(io.StringIO()) as out:
            if words[0] == "mbpa":
                assert main(words[1:]) == 0, out.getvalue()
            else:
                assert words[0] == "python", words
                arguments = [word.replace("http://127.0.0.1:8000", self._url) for word in words[1:]]
                sys.argv = arguments
                runpy.run_path(arguments[0], run_name="__main__")
        return out.getvalue()


@pytest.mark.heavy
@pytest.mark.filterwarnings("default")  # of the libraries that a tutorial shows
@pytest.mark.parametrize(
    ("name", "outputs"),
    [("text-classifier", 5), ("vision-network", 5), ("language-model", 5), ("training-loop", 2)],
)
def test_tutorials_print_what_they_show(
    name: str, outputs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setenv("COLUMNS", "200")
    blocks = read_blocks(TUTORIALS / f"{name}.md")
    shown = [block for block in blocks if block.language == "text" or "\n" in block.content.strip()]
    assert len(shown) >= outputs
    with contextlib.ExitStack() as stack:
        Reader(tmp_path, stack).follow(blocks)


def test_every_tutorial_is_followed() -> None:
    assert {path.stem for path in TUTORIALS.glob("*.md")} == {
        *("index", "text-classifier", "vision-network", "language-model", "training-loop")
    }


def test_output_that_differs_is_noticed() -> None:
    require_output("old digits 95%", "old digits 96%\n")
    for wrong in ("old digits 60%", "new digits 95%", ""):
        with pytest.raises(AssertionError):
            require_output("old digits 95%", wrong)
