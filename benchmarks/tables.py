"""Tables in documents, each between two markers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

END = "<!-- end of benchmarks -->"


def replaced(page: str, name: str, content: str) -> str:
    """Return the document with `content` between `<!-- benchmarks: name -->` and the end marker."""
    begin = f"<!-- benchmarks: {name} -->\n"
    before, found, rest = page.partition(begin)
    if not found or END not in rest:
        raise ValueError(f"the document must have the lines {begin!r} and {END!r}")
    return before + begin + content + rest[rest.index(END) :]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table: the first row is the head; all columns but the first are numbers."""
    head, *others = rows
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *others]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def write(
    report: dict[str, Any],
    out: Path,
    document: Path,
    refreshed: Callable[[str, dict[str, Any]], str],
) -> None:
    """Write a report, and update the document that shows it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    document.write_text(refreshed(document.read_text("utf-8"), report), "utf-8")
    print(f"written to {out} and {document}")
