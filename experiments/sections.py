"""The parts of a report: sections of text, tables and figures, made from results alone."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import matplotlib.figure

_NUMBER = re.compile(r"[+−-]?[\d.,]+\s*(%|±.*|\(.*\)|\*|s|ms|µs|[kMG]?B)?|[–—-]?")

GAP = "  "  # between columns
READABLE = 20  # minimum width of a column of words, in characters


@dataclass(frozen=True)
class Table:
    """A table whose cells are shown unchanged: digits are decided where a cell is made."""

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
        """Whether each column holds numbers, and so is aligned to the right."""
        cells = [[row[column] for row in self.rows] for column in range(len(self.columns))]
        return [bool(c) and all(_NUMBER.fullmatch(cell.strip()) for cell in c) for c in cells]

    def as_text(self, width: int | None = None) -> str:
        """Format for a terminal or another width: long cells are broken into lines."""
        widths = self._widths(width)
        rule = ["-" * each for each in widths]
        sides = [">" if right else "<" for right in self.holds_numbers]
        told = [self.title, ""]
        for row in (self.columns, rule, *self.rows):
            broken = [
                [cell] if len(cell) <= each else textwrap.wrap(cell, each, break_on_hyphens=False)
                for cell, each in zip(row, widths, strict=True)
            ]
            for cells in itertools.zip_longest(*broken, fillvalue=""):
                parts = zip(cells, sides, widths, strict=True)
                told.append(GAP.join(f"{cell:{side}{each}}" for cell, side, each in parts).rstrip())
        if self.note:
            told += [self.note] if width is None else textwrap.wrap(self.note, width)
        return "\n".join(told)

    def _widths(self, most: int | None) -> list[int]:
        """Return the column widths; the widest columns of words shrink, as long as they stay
        readable.
        """
        lines, numbers = [self.columns, *self.rows], self.holds_numbers
        widths = [max(1, *(len(line[c]) for line in lines)) for c in range(len(self.columns))]
        while most is not None and sum(widths) + len(GAP) * (len(widths) - 1) > most:
            wide = [c for c, each in enumerate(widths) if each > READABLE and not numbers[c]]
            if not wide:
                break
            widths[max(wide, key=widths.__getitem__)] -= 1
        return widths


@dataclass(frozen=True)
class Figure:
    """A drawing; matplotlib is imported only when it is drawn."""

    name: str
    """File name without its ending."""
    caption: str
    draw: Callable[[matplotlib.figure.Figure], None]
    size: tuple[float, float] = (10, 4.5)
    """Width and height in inches."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w-]+", self.name):
            raise ValueError(f"name must be letters, digits, '_' or '-', got {self.name!r}")


@dataclass(frozen=True)
class Section:
    """One section of an experiment's chapter in the report."""

    title: str
    text: Sequence[str] = ()
    """Paragraphs; backticks mark `code`."""
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    command: str = ""
    """Command that produces the section; by default the command in the results."""
