"""Everything in the documents works: each Python block, path and command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "CONTRIBUTING.md",
]


def blocks(document: Path, language: str) -> list[str]:
    """Return the blocks in this language, except for one that tests/memory runs with torchrun."""
    pattern = rf"(?<!<!-- torchrun -->\n)```{language}\n(.*?)```"
    return re.findall(pattern, document.read_text("utf-8"), re.DOTALL)


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:.*(many workers|LeafSpec|training batches|not empty)")
@pytest.mark.parametrize(
    ("name", "fewest"),
    [
        ("README.md", 2),
        ("docs/guide.md", 5),
        ("docs/extending.md", 3),
        ("docs/integrations-river.md", 1),
        ("docs/integrations-sklearn.md", 3),
        ("docs/memories.md", 1),
        ("docs/tuning.md", 2),
        ("docs/integrations-huggingface.md", 3),
        ("docs/integrations-lightning.md", 3),
    ],
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


@pytest.mark.parametrize("seed", range(5))
def test_three_examples_teach_a_class_in_twelve_lines(
    seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    network, example = blocks(ROOT / "README.md", "python")
    assert len([line for line in example.splitlines() if line.strip()]) <= 12
    torch.manual_seed(seed)
    scope: dict[str, object] = {}
    exec(compile(network + example, "README.md", "exec"), scope)
    assert scope["before"] < 0.2
    assert scope["after"] > 0.9
    explained = capsys.readouterr().out.splitlines()
    assert next(line for line in explained if line.startswith("after")).split()[2] == "5"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_and_targets_exist(document: Path) -> None:
    text = document.read_text("utf-8")
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        if not link.startswith("http"):
            assert (document.parent / link).exists(), link
    makefile = (ROOT / "Makefile").read_text()
    for block in blocks(document, "console"):
        for target in re.findall(r"^\$ make ([\w-]+)", block, re.MULTILINE):
            assert f"\n{target}:" in makefile, target
