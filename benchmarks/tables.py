"""Tables in documents, each between two markers."""

from __future__ import annotations

from collections.abc import Sequence

END = "<!-- end of benchmarks -->"


def replaced(page: str, name: str, content: str) -> str:
    """A document with this between `<!-- benchmarks: name -->` and the end of benchmarks."""
    begin = f"<!-- benchmarks: {name} -->\n"
    before, found, rest = page.partition(begin)
    if not found or END not in rest:
        raise ValueError(f"the document must have the lines {begin!r} and {END!r}")
    return before + begin + content + rest[rest.index(END) :]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """The first row is the head; all columns but the first hold numbers."""
    head, *others = rows
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *others]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
