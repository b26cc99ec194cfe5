"""Tables in documents, each between two markers."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

END_OF_BENCHMARKS = "<!-- end of benchmarks -->"


@dataclass(frozen=True)
class DocumentTable:
    """The results of a benchmark in a document, rebuilt from its report."""

    name: str
    """The name in `<!-- benchmarks: name -->`, the line before the table."""
    format: Callable[[dict[str, Any]], str]
    """Return the table, and what is said with it, for a report."""

    def refresh(self, page: str, report: dict[str, Any]) -> str:
        """Return the document with the table of this report."""
        return replace_block(page, self.name, self.format(report))

    def publish(self, report: dict[str, Any], out: Path, document: Path) -> None:
        """Write a report, and update the document that shows it."""
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        document.write_text(self.refresh(document.read_text("utf-8"), report), "utf-8")
        print(f"written to {out} and {document}")


def replace_block(page: str, name: str, content: str) -> str:
    """Return the document with `content` between `<!-- benchmarks: name -->` and the end marker."""
    begin = f"<!-- benchmarks: {name} -->\n"
    before, found, rest = page.partition(begin)
    if not found or END_OF_BENCHMARKS not in rest:
        raise ValueError(f"the document must have the lines {begin!r} and {END_OF_BENCHMARKS!r}")
    return before + begin + content + rest[rest.index(END_OF_BENCHMARKS) :]


def format_rows(rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table: the first row is the head; all columns but the first are numbers."""
    head, *others = rows
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *others]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def round_number(number: float) -> str:
    """Format a number to three significant digits, or two if it is below 1."""
    if number >= 100:
        return f"{float(f'{number:.3g}'):,.0f}"
    return f"{number:.3g}" if number >= 1 else f"{number:.2g}"


def format_spread(numbers: Sequence[float], digits: int) -> str:
    """Format the mean and the standard deviation, with this many decimal places."""
    spread = statistics.stdev(numbers) if len(numbers) > 1 else 0.0
    return f"{statistics.mean(numbers):.{digits}f} ± {spread:.{digits}f}"
