"""The report: one self-contained HTML page, and each figure as PNG and SVG, from results alone."""

from __future__ import annotations

import base64
import io
import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape
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
TEMPLATES = Path(__file__).with_name("templates")


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
    files, images = _draw_figures(chapters, progress=progress)
    files["index.html"] = _render_page(chapters, images).encode()
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
    note = f"Settings that were not tried, for lack of time: {left:.0f}." if left else ""
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

    @property
    def preset(self) -> str:
        """The preset that was run, or that settings were searched for."""
        return self.label.removeprefix(TUNED)

    @property
    def command(self) -> str:
        """The commands that make the results, one per line."""
        return "\n".join(dict.fromkeys(_current_command(result) for result in self.results))

    @property
    def circumstances(self) -> str:
        """Seeds, time, and the machine of the run."""

        def list_values(key: str) -> str:
            values = (str(result.environment.get(key, "unknown")) for result in self.results)
            return " and ".join(dict.fromkeys(values))

        seeds = [str(result.seed) for result in self.results if result.seed is not None]
        words = [f"{'seeds' if seeds[1:] else 'seed'} {', '.join(seeds)}"] if seeds else []
        words += [f"{sum(result.seconds for result in self.results):,.1f} s in all"]
        words += [f"device {list_values('device')}", f"{list_values('cores')} cores"]
        words += [f"{name} {list_values(name)}" for name in ("torch", "python", "mbpa")]
        return " · ".join(words)


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


def _draw_figures(
    chapters: Sequence[_Chapter], *, progress: bool
) -> tuple[dict[str, bytes], dict[Figure, str]]:
    """Return the figures as files by name, and each as SVG in base64."""
    files: dict[str, bytes] = {}
    images: dict[Figure, str] = {}
    with tqdm(chapters, file=sys.stderr, disable=not progress, leave=False) as bar:
        for chapter in bar:
            bar.set_description(f"drawing {chapter.experiment.name}")
            for part in chapter.parts:
                for figure in itertools.chain(*(section.figures for section in part.sections)):
                    is_taken = f"{figure.name}.svg" in files
                    name = f"{figure.name}-{part.label}" if is_taken else figure.name
                    if f"{name}.svg" in files:
                        raise ValueError(f"two figures are called {name!r}")
                    made = draw_figure(figure)
                    files |= {f"{name}.{ending}": content for ending, content in made.items()}
                    images[figure] = base64.b64encode(made["svg"]).decode()
    return files, images


def _render_page(chapters: Sequence[_Chapter], images: Mapping[Figure, str]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    environment.filters["prose"] = _mark_code
    return environment.get_template("report.html").render(chapters=chapters, images=images)


def _mark_code(plain: str) -> Markup:
    """Escape a text, and mark up what is between backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(plain))))


def _current_command(result: Result) -> str:
    """Return the command that makes a result; older results call the program `mbpa`."""
    old = "mbpa "
    return (
        f"{PROGRAM} {result.command.removeprefix(old)}"
        if result.command.startswith(old)
        else result.command
    )


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
