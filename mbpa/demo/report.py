"""The text, figure and files of `mbpa demo`, built from the result of `digits.run` alone."""

from __future__ import annotations

import io
import json
import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mbpa.demo.digits import DigitsResult, Record, Rescue, as_json
from mbpa.errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUBSETS = {"pre-trained": "old digits", "novel": "new digits", "all": "all digits"}
COLORS = {
    "parametric": "#8c8c8c",
    "kernel vote": "#e08214",
    "mixture": "#35978f",
    "MbPA": "#b2182b",
}


def prepare(out: Path) -> None:
    """Create the directory and check for matplotlib, before half a minute is spent on the results.

    Raises:
        OSError: the directory cannot be created or written to.
        MissingExtraError: matplotlib is not installed.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        _write(out / "demo.json", b"", keep=False)
    except OSError as error:
        raise OSError(
            f"out must be a directory that can be written to, got {out}: {error.strerror}"
        ) from error
    try:
        import matplotlib.figure  # noqa: F401 (checks that it is installed)
    except ImportError as error:
        raise MissingExtraError("matplotlib", "demo") from error


def write(result: DigitsResult, out: Path) -> dict[str, Path]:
    """Write the figure and the records, each file atomically, and return their paths."""
    document = json.dumps(as_json(result), indent=1)
    files = {"figure": out / "demo.png", "records": out / "demo.json"}
    _write(files["figure"], figure(result.records))
    _write(files["records"], document.encode())
    return files


def text(result: DigitsResult) -> str:
    """Return the table and the explanation of one prediction as text."""
    return f"{table(result.records)}\n\n{_describe_rescue(result.rescue)}\n"


def table(records: Sequence[Record]) -> str:
    """Return a table with a block per subset, a row per number of examples, a column per method."""
    methods = _list_methods(records)
    lines = [
        "A network that was trained on five digits meets all ten, one example at a time. Its",
        "output layer is fine-tuned on each (parametric); the other methods use that layer and",
        "a memory of the same examples.",
        f"Accuracy on unseen images in percent, {_describe_repetitions(records)}; * best in a row.",
    ]
    for subset, title in SUBSETS.items():
        lines += ["", f"{title:<12}" + "".join(f"{method:>13} " for method in methods).rstrip()]
        for examples in _list_points(records):
            means = [
                f"{statistics.fmean(_select_values(records, method, subset, examples)):.1f}"
                for method in methods
            ]
            best = max(means, key=float)
            cells = (f"{mean:>13}{'*' if mean == best else ' '}" for mean in means)
            lines.append(f"{examples:>4} seen   " + "".join(cells).rstrip())
    return "\n".join(lines)


def figure(records: Sequence[Record]) -> bytes:
    """Return the same data as curves in a PNG file, with one panel per subset."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(11, 4.4), layout="constrained")
    panels = drawing.subplots(1, len(SUBSETS), sharey=True)
    for panel, (subset, title) in zip(panels, SUBSETS.items(), strict=True):
        _draw(panel, records, subset)
        panel.set_title(title, fontsize=11, loc="left")
    panels[0].set_ylabel("accuracy on unseen images (%)")
    panels[1].set_xlabel("examples seen, of all ten digits")
    lines, names = panels[-1].get_legend_handles_labels()
    panels[-1].legend(lines[::-1], names[::-1], loc="lower right", frameon=False)
    drawing.suptitle(
        "A network that was trained on five digits meets all ten",
        x=0.01,
        ha="left",
        fontsize=13,
        fontweight="bold",
    )
    drawing.supxlabel(
        f"{_describe_repetitions(records)}, band: one standard error",
        x=0.99,
        ha="right",
        fontsize=9,
        color="#666666",
    )
    buffer = io.BytesIO()
    drawing.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def _draw(panel: Axes, records: Sequence[Record], subset: str) -> None:
    points = _list_points(records)
    for method in _list_methods(records):
        runs = [_select_values(records, method, subset, examples) for examples in points]
        means = [statistics.fmean(run) for run in runs]
        errors = [statistics.stdev(run) / math.sqrt(len(run)) if run[1:] else 0.0 for run in runs]
        low = [mean - error for mean, error in zip(means, errors, strict=True)]
        high = [mean + error for mean, error in zip(means, errors, strict=True)]
        stands_out = method == "MbPA"
        color = COLORS[method]
        panel.fill_between(points, low, high, color=color, alpha=0.15, linewidth=0)
        panel.plot(
            points,
            means,
            color=color,
            label=method,
            linewidth=2.4 if stands_out else 1.6,
            marker="o",
            markersize=5 if stands_out else 3.5,
            zorder=3 if stands_out else 2,
        )
    panel.set_xscale("log")
    panel.set_xticks(points, [str(examples) for examples in points])
    panel.set_xticks([], minor=True)
    panel.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def _describe_rescue(rescue: Rescue | None) -> str:
    if rescue is None:
        return (
            "In the first repetition there was no image of a new digit that only MbPA\ngets right."
        )
    return (
        f"One prediction explained: an image of a new digit, {rescue.digit}, after "
        f"{rescue.examples} examples. Of the four methods\nonly MbPA gets it right. Before: the "
        "output layer as it is; after: adapted to the neighbours,\nthe examples in memory that "
        "are most like the image.\n\n"
        f"{rescue.explanation}"
    )


def _list_methods(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(record["method"] for record in records))


def _list_points(records: Sequence[Record]) -> list[int]:
    return sorted({record["examples"] for record in records})


def _describe_repetitions(records: Sequence[Record]) -> str:
    seeds = len({record["seed"] for record in records})
    return "one repetition" if seeds == 1 else f"mean of {seeds} repetitions"


def _select_values(
    records: Sequence[Record], method: str, subset: str, examples: int
) -> list[float]:
    wanted = method, subset, examples
    return [r["value"] for r in records if (r["method"], r["subset"], r["examples"]) == wanted]


def _write(path: Path, content: bytes, keep: bool = True) -> None:
    """Write a file atomically; with `keep=False` only check that it can be written."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_bytes(content)
        if keep:
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)
