"""The report: one self-contained HTML page, and each figure as PNG and SVG, from results alone."""

from __future__ import annotations

import base64
import html
import io
import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from experiments import EXPERIMENTS
from experiments.errors import ExperimentError
from experiments.experiment import Experiment, find
from experiments.results import PROGRAM, TUNED, Result, read_results, value_of
from experiments.sections import Figure, Section, Table
from mbpa.errors import MissingExtraError
from mbpa.files import write_durably

__all__ = [
    "Figure",
    "Section",
    "Table",
    "draw_figure",
    "make_sections",
    "tabulate_chosen",
    "write_report",
]


def write_report(
    results_folder: Path, out: Path, presets: Sequence[str] = (), *, progress: bool = False
) -> Path:
    """Write `index.html` and the figures to `out`, and return the path of the page.

    Args:
        presets: show only the results of these presets.
        progress: show a bar on standard error.

    Raises:
        ExperimentError: there are no results, a file is damaged, or `out` cannot be written to.
        MissingExtraError: matplotlib is not installed.
    """
    chapters = [
        _chapter(find(name), found)
        for name in EXPERIMENTS
        if (found := _select_presets(read_results(results_folder, name), presets))
    ]
    if not chapters:
        wanted = f" of {', '.join(presets)}" if presets else ""
        raise ExperimentError(
            f"{results_folder} holds no results{wanted}: `{PROGRAM} run NAME --out "
            f"{results_folder}` makes some, `{PROGRAM} list` names the experiments"
        )
    files: dict[str, bytes] = {}
    articles: list[str] = []
    with tqdm(chapters, file=sys.stderr, disable=not progress, leave=False) as bar:
        for chapter in bar:
            bar.set_description(f"drawing {chapter.experiment.name}")
            articles.append(_chapter_html(chapter, files))
    body = "\n".join(articles)
    files["index.html"] = _page_html(chapters, body).encode()
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_durably(out / name, content)
    except OSError as error:
        raise ExperimentError(
            f"cannot write to {out} ({error.strerror or error}): "
            "name a directory that can be written to with --out"
        ) from error
    return out / "index.html"


def tabulate_chosen(results: Sequence[Result]) -> Table:
    """Return a table of the settings that searches chose."""
    metrics = [record for result in results for record in result.metrics]
    records = [record for record in metrics if record["name"] == "chosen"]
    ours = ("setting", "value")
    others = [key for key in dict.fromkeys(itertools.chain(*records)) if key not in (*ours, "name")]
    columns = [*others, *ours]
    rows = [[_cell(record.get(key)) for key in columns] for record in records]
    left = sum(value_of(record) for record in metrics if record["name"] == "settings_left_out")
    note = f"Settings that were not tried, as too dear: {left:.0f}." if left else ""
    return Table("Chosen settings", columns, rows, note)


def make_sections(experiment: Experiment[Any], results: Sequence[Result]) -> list[Section]:
    """Return the sections for the results of one preset, or of a search for its settings."""
    if not results[0].preset.startswith(TUNED):
        return experiment.sections(results)
    more = experiment.search_sections
    section = Section("How the settings were chosen", tables=[tabulate_chosen(results)])
    return [section, *(more(results) if more is not None else ())]


def _cell(value: str | int | float | None) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


# From results to chapters


@dataclass(frozen=True)
class _Part:
    """The results of one preset, and their sections."""

    label: str
    results: Sequence[Result]
    sections: Sequence[Section]


@dataclass(frozen=True)
class _Chapter:
    experiment: Experiment[Any]
    parts: Sequence[_Part]


def _select_presets(results: Sequence[Result], presets: Sequence[str]) -> list[Result]:
    return [r for r in results if not presets or r.preset.removeprefix(TUNED) in presets]


def _chapter(experiment: Experiment[Any], results: Sequence[Result]) -> _Chapter:
    """Make one part per preset, the most thorough first, and searches at the end."""
    labels = [*reversed(list(experiment.presets)), *sorted({result.preset for result in results})]
    labels.sort(key=lambda label: label.startswith(TUNED))
    parts: list[_Part] = []
    for label in dict.fromkeys(labels):
        mine = [result for result in results if result.preset == label]
        if mine:
            parts.append(_Part(label, mine, make_sections(experiment, mine)))
    return _Chapter(experiment, parts)


# From chapters to a page. The page is also valid XML, so that tests can parse it strictly.


def _page_html(chapters: Sequence[_Chapter], body: str) -> str:
    links = "\n".join(
        f'<li><a href="#{_text(c.experiment.name)}">{_text(c.experiment.name)}</a> '
        f"<span>{_text(c.experiment.reproduces)}</span></li>"
        for c in chapters
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8" />
<meta name="viewport" content="width=device-width, initial-scale=1" />
<meta name="color-scheme" content="light dark" />
<title>mbpa: results</title>
<style>{CSS}</style>
</head>
<body>
<header>
<h1>Memory-based Parameter Adaptation</h1>
<p class="lead">Results, drawn from the records of the runs; where the paper states a number, it
stands beside ours.</p>
<nav aria-label="Experiments"><ol>
{links}
</ol></nav>
</header>
<main>
{body}
</main>
</body>
</html>
"""


def _chapter_html(chapter: _Chapter, files: dict[str, bytes]) -> str:
    """Return a chapter as HTML, and add its figures to `files`."""
    experiment = chapter.experiment
    parts = "\n".join(_part_html(part, files) for part in chapter.parts)
    return f"""<article id="{_text(experiment.name)}">
<h2>{_text(experiment.name)}</h2>
<p class="lead">{_prose(experiment.summary)} <span class="source">({_text(experiment.reproduces)})
</span></p>
{parts}
</article>"""


def _current_command(result: Result) -> str:
    """Return the command that makes a result; older results call the program `mbpa`."""
    old = "mbpa "
    return (
        f"{PROGRAM} {result.command.removeprefix(old)}"
        if result.command.startswith(old)
        else result.command
    )


def _part_html(part: _Part, files: dict[str, bytes]) -> str:
    made_by = "\n".join(dict.fromkeys(_current_command(result) for result in part.results))
    sections = "\n".join(
        _section_html(section, part.label, section.command or made_by, files)
        for section in part.sections
    )
    return f"""<section class="part">
{sections}
<p class="meta">{_text(_circumstances(part))}</p>
</section>"""


def _section_html(section: Section, label: str, command: str, files: dict[str, bytes]) -> str:
    preset = label.removeprefix(TUNED)
    parts = [f'<h3>{_text(section.title)} <span class="preset">{_text(preset)}</span></h3>']
    parts += [f"<p>{_prose(paragraph)}</p>" for paragraph in section.text]
    parts += [_figure_html(figure, label, files) for figure in section.figures]
    parts += [_table_html(table) for table in section.tables]
    shown = "\n".join(f"$ {line}" for line in command.splitlines())
    parts.append(f"<pre><code>{_text(shown)}</code></pre>")
    return "\n".join(parts)


def _table_html(table: Table) -> str:
    sides = [' class="number"' if right else "" for right in table.holds_numbers]
    head = "".join(
        f'<th scope="col"{side}>{_prose(column)}</th>'
        for column, side in zip(table.columns, sides, strict=True)
    )
    rows = "\n".join(
        "<tr>"
        + "".join(f"<td{side}>{_prose(cell)}</td>" for cell, side in zip(row, sides, strict=True))
        + "</tr>"
        for row in table.rows
    )
    note = f'<p class="note">{_prose(table.note)}</p>' if table.note else ""
    return f"""<div class="table"><table>
<caption>{_prose(table.title)}</caption>
<thead><tr>{head}</tr></thead>
<tbody>
{rows}
</tbody></table></div>
{note}"""


def _figure_html(figure: Figure, label: str, files: dict[str, bytes]) -> str:
    is_taken = f"{figure.name}.svg" in files
    name = f"{figure.name}-{label}" if is_taken else figure.name
    if f"{name}.svg" in files:
        raise ValueError(f"two figures are called {name!r}")
    pictures = draw_figure(figure)
    files.update({f"{name}.{ending}": content for ending, content in pictures.items()})
    image = base64.b64encode(pictures["svg"]).decode()
    return f"""<figure>
<img alt="{_text(figure.caption)}" src="data:image/svg+xml;base64,{image}" />
<figcaption>{_prose(figure.caption)}</figcaption>
</figure>"""


def _circumstances(part: _Part) -> str:
    """Describe seeds, time, and the machine of the run."""

    def of(key: str) -> str:
        values = (str(result.environment.get(key, "unknown")) for result in part.results)
        return " and ".join(dict.fromkeys(values))

    seeds = [str(result.seed) for result in part.results if result.seed is not None]
    told = [f"{'seeds' if seeds[1:] else 'seed'} {', '.join(seeds)}"] if seeds else []
    told += [f"{sum(result.seconds for result in part.results):,.1f} s in all"]
    told += [f"device {of('device')}", f"{of('cores')} cores"]
    told += [f"{name} {of(name)}" for name in ("torch", "python", "mbpa")]
    return " · ".join(told)


def _text(plain: str) -> str:
    return html.escape(plain)


def _prose(plain: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(plain))


# Drawing

STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11.0,
    "figure.facecolor": "white",
    "font.size": 10.0,
    "grid.color": "#e5e5e5",
    "legend.frameon": False,
    "savefig.dpi": 150,
    "svg.hashsalt": "mbpa",  # makes the bytes reproducible
}
COLOR_CYCLE = (
    "#b2182b",
    "#2166ac",
    "#e08214",
    "#35978f",
    "#762a83",
    "#8c8c8c",
    "#1b7837",
    "#c51b7d",
)


def draw_figure(figure: Figure, told: Mapping[str, str] | None = None) -> dict[str, bytes]:
    """Return the figure as `svg` and as `png`.

    Args:
        told: text fields of the PNG file.
    """
    try:
        import matplotlib
        from cycler import cycler
        from matplotlib.figure import Figure as Canvas
    except ImportError as error:
        raise MissingExtraError("matplotlib", "experiments") from error
    files: dict[str, bytes] = {}
    style: Any = {**STYLE, "axes.prop_cycle": cycler(color=COLOR_CYCLE)}
    with matplotlib.rc_context(style):
        canvas = Canvas(figsize=figure.size, layout="constrained")
        figure.draw(canvas)
        for ending, metadata in (
            ("svg", {"Date": None}),
            ("png", {"Software": None, **(told or {})}),
        ):
            buffer = io.BytesIO()
            canvas.savefig(buffer, format=ending, metadata=metadata)
            files[ending] = buffer.getvalue()
    return files


CSS = """
:root { color-scheme: light dark; --text: #1c1e21; --soft: #5c636b; --line: #dfe2e6;
  --page: #ffffff; --panel: #f5f6f8; --accent: #b2182b; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e4e6e8; --soft: #9aa2ab; --line: #343a41; --page: #15181b; --panel: #1e2226;
    --accent: #f4857b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 2.5rem 1.25rem 5rem; background: var(--page);
  color: var(--text); font: 1rem/1.6 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1, h2, h3 { line-height: 1.25; text-wrap: balance; }
h1 { font-size: 2rem; margin: 0 0 .5rem; }
h2 { font-size: 1.5rem; margin: 0 0 .25rem; }
h3 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { max-width: 44rem; margin: .75rem 0; }
a { color: var(--accent); text-underline-offset: .15em; }
.lead { font-size: 1.05rem; }
.lead, .source, nav span, .meta, .note, figcaption { color: var(--soft); }
nav ol { padding: 0; margin: 1.5rem 0 0; list-style: none; border-top: 1px solid var(--line); }
nav li { padding: .45rem 0; border-bottom: 1px solid var(--line); }
nav span { margin-left: .5rem; font-size: .9rem; }
article { margin-top: 4rem; padding-top: 1.5rem; border-top: 3px solid var(--accent); }
.part + .part { margin-top: 3rem; border-top: 1px solid var(--line); }
.preset { margin-left: .35rem; padding: .1rem .5rem; border-radius: 1rem; background: var(--panel);
  color: var(--soft); font-size: .8rem; font-weight: 500; white-space: nowrap; }
figure { margin: 1.25rem 0; }
figure img { display: block; width: 100%; height: auto; padding: .5rem; border-radius: .5rem;
  background: #ffffff; border: 1px solid var(--line); }
figcaption, .note { font-size: .9rem; margin-top: .5rem; max-width: 44rem; }
.table { overflow-x: auto; margin: 1.25rem 0 .5rem; }
table { border-collapse: collapse; font-size: .93rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: .4rem; }
th, td { padding: .35rem .9rem .35rem 0; text-align: left; border-bottom: 1px solid var(--line);
  vertical-align: baseline; white-space: nowrap; }
th { color: var(--soft); font-weight: 500; }
.number { text-align: right; }
code { font: .9em ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
pre { overflow-x: auto; padding: .7rem .9rem; border-radius: .5rem; background: var(--panel); }
.meta { font-size: .85rem; max-width: none; }
@media (max-width: 40rem) { body { padding-top: 1.5rem; } h1 { font-size: 1.6rem; }
  nav span { display: block; margin: 0; } }
"""
