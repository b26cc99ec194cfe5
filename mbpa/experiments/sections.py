"""What a report consists of: sections of text, tables and figures, made from results alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import matplotlib.figure

_NUMBER = re.compile(r"[+−-]?[\d.,]+\s*(%|±.*|\(.*\)|\*|s|ms|µs|[kMG]?B)?|[–—-]?")


@dataclass(frozen=True)
class Table:
    """Cells are shown as they are: how many digits a number gets is decided where it is made."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row must have {len(self.columns)} cells, got {row}")

    @property
    def holds_numbers(self) -> list[bool]:
        """For each column: whether it is best aligned to the right."""
        cells = [[row[column] for row in self.rows] for column in range(len(self.columns))]
        return [bool(c) and all(_NUMBER.fullmatch(cell.strip()) for cell in c) for c in cells]

    def as_text(self) -> str:
        """For a terminal."""
        lines = [self.columns, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.columns))]
        rule = ["-" * width for width in widths]
        sides = [">" if right else "<" for right in self.holds_numbers]
        text = [
            "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(*parts, strict=True))
            for parts in ((line, sides, widths) for line in (self.columns, rule, *self.rows))
        ]
        told = [self.title, "", *(line.rstrip() for line in text)]
        return "\n".join([*told, *([self.note] if self.note else [])])


@dataclass(frozen=True)
class Figure:
    """A drawing; matplotlib is imported when it is drawn, not before."""

    name: str
    """Of the files, without their ending."""
    caption: str
    draw: Callable[[matplotlib.figure.Figure], None]
    size: tuple[float, float] = (10, 4.5)
    """In inches."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w-]+", self.name):
            raise ValueError(f"name must be letters, digits, '_' or '-', got {self.name!r}")


@dataclass(frozen=True)
class Section:
    """One part of an experiment's place in the report."""

    title: str
    text: Sequence[str] = ()
    """Paragraphs; `code` may stand in backticks."""
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    command: str = ""
    """What makes it; by default the command in the results."""
