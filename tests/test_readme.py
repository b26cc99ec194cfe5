"""What the documents show is run: every Python block, and every path and command they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"]


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", document.read_text("utf-8"), re.DOTALL)


@pytest.mark.parametrize(
    ("name", "fewest"), [("README.md", 3), ("docs/extending.md", 3), ("docs/tuning.md", 2)]
)
def test_python_blocks_run_in_order(
    name: str, fewest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = blocks(ROOT / name, "python")
    assert len(found) >= fewest
    scope: dict[str, object] = {}
    for number, block in enumerate(found):
        exec(compile(block, f"{name}, block {number}", "exec"), scope)


def test_the_first_example_is_twelve_lines_and_explains_itself(
    capsys: pytest.CaptureFixture[str],
) -> None:
    example = blocks(ROOT / "README.md", "python")[0]
    statements = [line for line in example.splitlines() if line.strip()]
    assert len(statements) <= 12
    exec(compile(example, "README.md", "exec"), {})
    after = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("after"))
    assert after.split()[1:3] == ["class", "5"]  # whatever the seed: sixty of sixty tried


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_targets_exist(document: Path) -> None:
    text = document.read_text("utf-8")
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        if not link.startswith("http"):
            assert (document.parent / link).exists(), link
    makefile = (ROOT / "Makefile").read_text()
    for block in blocks(document, "console"):
        for target in re.findall(r"^\$ make (\w+)", block, re.MULTILINE):
            assert f"\n{target}:" in makefile, target
