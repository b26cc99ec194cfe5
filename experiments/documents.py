"""Tables and figures in documents, generated from results and never edited by hand.

A block between these two lines shows a table (by title) or a figure (by name) made from the results
of one preset. `experiments report results --documents README.md docs/*.md` rewrites all blocks:

    <!-- results: permuted-mnist paper: Accuracy after 20 tasks -->
    <!-- end of results -->

`claims` in place of an experiment stands for the paper's claims (`experiments.claims`).

A title may be followed by the rows to show, given by their first cells: `TITLE | MLP | MbPA`. A
figure is a PNG file in the folder `figures` beside the document. It carries a digest of the results
and of the code it was drawn with, so that a test can tell whether it is current.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from experiments import EXPERIMENTS, claims
from experiments.errors import ExperimentError
from experiments.experiment import find
from experiments.report import draw_figure, make_sections
from experiments.results import PROGRAM, Result, read_results
from experiments.sections import Figure, Section, Table
from mbpa.files import write_durably

END_MARKER = "<!-- end of results -->"
_BLOCK = re.compile(
    r"(?P<begin>^<!-- results: (?P<experiment>[\w-]+) (?P<preset>[\w-]+): (?P<title>.+?) -->\n)"
    rf"(?P<body>(?:(?!<!--).*\n)*?)(?P<end>{END_MARKER}$)",
    re.MULTILINE,
)
_MARKER = re.compile(r"^.*<!--[^\n]*results?\b[^\n]*$", re.MULTILINE)
FIGURES = "figures"
"""Folder of a document's figures, beside the document."""
DIGEST = "Source"
"""Text field of a PNG file that holds the digest of its sources."""


@dataclass(frozen=True)
class Document:
    """The updated text of a document, and the figures that it shows."""

    text: str
    figures: dict[str, tuple[Figure, str]]
    """Figures by file name, each with the digest of its sources."""


def render_document(text: str, results_folder: Path) -> Document:
    """Return the document with the tables and figures that the current results give.

    Raises:
        ExperimentError: a block names something that does not exist, or a marker is malformed.
    """
    markers = Counter(_MARKER.findall(text))
    for found in _BLOCK.finditer(text):
        markers.subtract([found["begin"][:-1], END_MARKER])
    if strange := [line for line, count in markers.items() if count]:
        raise ExperimentError(
            "a block of results must be '<!-- results: EXPERIMENT PRESET: TITLE -->', its content, "
            f"and '{END_MARKER}', each on a line: {strange[0]!r} is not part of one"
        )
    figures: dict[str, tuple[Figure, str]] = {}
    load_sections = functools.cache(functools.partial(_load_sections, results_folder))

    def block(match: re.Match[str]) -> str:
        experiment, preset = match["experiment"], match["preset"]
        title, *rows = match["title"].split(" | ")
        results, sections = load_sections(experiment, preset)
        found = _find_shown(sections, title)
        if found is None:
            names = [t.title for s in sections for t in s.tables]
            names += [f.name for s in sections for f in s.figures]
            raise ExperimentError(
                f"{experiment} {preset} shows no {title!r}: name one of {', '.join(names)}"
            )
        if isinstance(found, Table):
            return match["begin"] + format_markdown(_with_rows(found, rows)) + match["end"]
        name = f"{found.name}-{preset}.png"
        figures[name] = found, digest(found, results)
        return f"{match['begin']}![{found.caption}]({FIGURES}/{name})\n{match['end']}"

    return Document(_BLOCK.sub(block, text), figures)


def refresh_document(path: Path, results_folder: Path) -> bool:
    """Update a document and its figures, and return whether anything changed.

    Raises:
        ExperimentError: as in `render_document`.
        MissingExtraError: matplotlib is not installed.
    """
    before = path.read_text("utf-8")
    document = render_document(before, results_folder)
    stale = {
        name: (figure, told)
        for name, (figure, told) in document.figures.items()
        if digest_in(path.parent / FIGURES / name) != told
    }
    for name, (figure, told) in stale.items():
        (path.parent / FIGURES).mkdir(exist_ok=True)
        write_durably(path.parent / FIGURES / name, draw_figure(figure, {DIGEST: told})["png"])
    if document.text != before:
        write_durably(path, document.text.encode())
    return bool(stale) or document.text != before


def digest(figure: Figure, results: Sequence[Result]) -> str:
    """Return a digest of everything a figure depends on: results, and the module that draws it."""
    told: list[object] = [[result.seed, result.config, result.metrics] for result in results]
    told.append(inspect.getsource(sys.modules[figure.draw.__module__]))
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def digest_in(path: Path) -> str | None:
    """Return the digest stored in a PNG file; `None` if it has none or does not exist."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    found = re.search(DIGEST.encode() + rb"\0([0-9a-f]{16})", content)
    return found[1].decode() if found else None


def format_markdown(table: Table) -> str:
    """Return the table as GitHub Markdown, with its note below."""
    rules = ["---:" if right else "---" for right in table.holds_numbers]
    rows = [[_escape_cell(cell) for cell in row] for row in (table.columns, *table.rows)]
    lines = ["| " + " | ".join(row) + " |" for row in (rows[0], rules, *rows[1:])]
    return "\n".join([*lines, *(["", f"*{table.note}*"] if table.note else [])]) + "\n"


def _escape_cell(cell: str) -> str:
    """Escape characters that would end the cell or start a tag; code is kept, except for pipes."""
    plain = re.sub(r"(`[^`]+`)|([<\\])", lambda found: found[1] or f"\\{found[2]}", cell)
    return plain.replace("|", r"\|")


def _load_sections(
    folder: Path, experiment: str, preset: str
) -> tuple[list[Result], Sequence[Section]]:
    if experiment == claims.NAME:
        return [], claims.make_sections(folder, preset)
    if experiment not in EXPERIMENTS:
        raise ExperimentError(f"no experiment is called {experiment!r}: see `{PROGRAM} list`")
    results = [found for found in read_results(folder, experiment) if found.preset == preset]
    if not results:
        raise ExperimentError(f"{folder} holds no results of {experiment} {preset}")
    return results, make_sections(find(experiment), results)


def _find_shown(sections: Sequence[Section], title: str) -> Table | Figure | None:
    shown: list[Table | Figure] = [table for section in sections for table in section.tables]
    shown += [figure for section in sections for figure in section.figures]
    names = [each.title if isinstance(each, Table) else each.name for each in shown]
    return shown[names.index(title)] if title in names else None


def _with_rows(table: Table, names: Sequence[str]) -> Table:
    """Keep only the named rows, in the table's order; keep all if none is named."""
    known = [row[0] for row in table.rows]
    if strange := [name for name in names if name not in known]:
        raise ExperimentError(f"{table.title!r} has no row {strange[0]!r}: {', '.join(known)}")
    return replace(table, rows=[row for row in table.rows if not names or row[0] in names])
