"""Report of `illustration`, built from its records alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from experiments.results import Record, Result
from experiments.sections import Figure, Section, Table

if TYPE_CHECKING:
    import matplotlib.figure
    from matplotlib.axes import Axes

COLORS = {"parametric": "#c51b8a", "attention": "#e08214", "MbPA": "#1b7837"}
"""Colours as in the paper: magenta, orange and green; the query is blue, its memories are red."""
NEAR = 0.75
"""Half the width of the left panel, in units of the input."""


def sections(results: Sequence[Result]) -> list[Section]:
    """Return the errors, and the figure if the seed that it shows was run."""
    drawn = next((r.metrics for r in results if _of(r.metrics, "truth", "curve")), None)
    figure = Figure(
        "illustration",
        "Left: a query (blue), the memories retrieved for it (red, larger where they weigh more) "
        "and three ways to use them. Attention predicts their weighted mean, a constant; the "
        "network alone misses them; adapted to them, for this query, it passes through them. "
        "Right: the predictions at every input, each with an adaptation of its own.",
        lambda canvas: _draw(canvas, drawn or []),
        size=(11, 4.6),
    )
    return [
        Section(
            title="Local fitting, illustrated",
            text=(
                "A network with one hidden layer is trained briefly on some points of a curve and "
                "cannot explain all of them. The same points are in the memory. Attention fits a "
                "constant to the neighbours of a query, MbPA fits the network to them.",
            ),
            tables=[_errors(results)],
            figures=[figure] if drawn else [],
        )
    ]


def _errors(results: Sequence[Result]) -> Table:
    by_seed = [{method: _error(result.metrics, method) for method in COLORS} for result in results]
    rows = []
    for method in COLORS:
        errors = [found[method] for found in by_seed]
        spread = f" ± {statistics.stdev(errors):.4f}" if errors[1:] else ""
        wins = sum(found[method] == min(found.values()) for found in by_seed)
        rows.append([method, f"{statistics.fmean(errors):.4f}{spread}", str(wins)])
    seeds = f"mean ± standard deviation over {len(results)} seeds" if results[1:] else "one seed"
    return Table(
        "Error where nothing was seen",
        ["method", "mean squared error", "seeds where best"],
        rows,
        f"Against the true function, at {results[0].config['queries']} evenly spaced inputs; "
        f"{seeds}.",
    )


def _draw(canvas: matplotlib.figure.Figure, records: Sequence[Record]) -> None:
    near, everywhere = canvas.subplots(1, 2, width_ratios=(1, 1.25))
    _draw_query(near, records)
    for panel in (near, everywhere):
        _line(panel, records, "truth", "curve", "true function", "#9a9a9a", 1.2, ":")
    for method, color in COLORS.items():
        _line(everywhere, records, method, "curve", method, color, 1.8)
    x, y = _xy(_of(records, "memory", "entry"))
    everywhere.scatter(x, y, s=16, color="#404040", zorder=4, label="memories")
    everywhere.set_title("each input its own query")
    for panel in (near, everywhere):
        panel.set_xlabel("input")
        panel.legend(loc="best", fontsize=8.5)
    near.set_ylabel("value")


def _draw_query(panel: Axes, records: Sequence[Record]) -> None:
    ((query,), (attended,)) = _xy(_of(records, "attention", "prediction"))
    panel.axvline(query, color="#2166ac", linewidth=1.2, alpha=0.6, zorder=1)
    _line(panel, records, "parametric", "curve", "network", COLORS["parametric"], 1.8)
    panel.axhline(attended, color=COLORS["attention"], linewidth=1.8, label="attention")
    adapted = "network, adapted for the query"
    _line(panel, records, "MbPA", "adapted for the query", adapted, COLORS["MbPA"], 2.4)
    entries = _of(records, "memory", "entry")
    retrieved = [entry for entry in entries if entry["weight"] is not None]
    x, y = _xy([entry for entry in entries if entry["weight"] is None])
    panel.scatter(x, y, s=18, color="#b5b5b5", zorder=3, label="other memories")
    sizes = [25 + 120 * float(entry["weight"] or 0) for entry in retrieved]
    panel.scatter(*_xy(retrieved), s=sizes, color="#d7301f", zorder=4, label="memories retrieved")
    for method, color in COLORS.items():
        panel.plot(
            *_xy(_of(records, method, "prediction")), "o", color=color, mec="white", zorder=5
        )
    shown = [p for p in _of(records, "truth", "curve") if abs(float(p["x"] or 0) - query) <= NEAR]
    heights = [*_xy(shown)[1], *_xy(retrieved)[1], attended]
    margin = 0.35 * (max(heights) - min(heights))
    panel.set_xlim(query - NEAR, query + NEAR)
    panel.set_ylim(min(heights) - margin, max(heights) + margin)
    panel.plot([query], [min(heights) - margin], "^", color="#2166ac", clip_on=False, label="query")
    panel.set_title("one query")


def _line(
    panel: Axes,
    records: Sequence[Record],
    method: str,
    name: str,
    label: str,
    color: str,
    width: float,
    style: str = "-",
) -> None:
    x, y = _xy(_of(records, method, name))
    panel.plot(x, y, style, label=label, color=color, linewidth=width)


def _error(records: Sequence[Record], method: str) -> float:
    (record,) = _of(records, method, "mean_squared_error")
    return float("nan") if record["value"] is None else float(record["value"])


def _of(records: Sequence[Record], method: str, name: str) -> list[Record]:
    return [record for record in records if (record["method"], record["name"]) == (method, name)]


def _xy(records: Sequence[Record]) -> tuple[list[float], list[float]]:
    return [float(r["x"] or 0) for r in records], [float(r["value"] or 0) for r in records]
