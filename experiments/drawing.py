"""Shared parts of tables and figures: numbers over seeds, curves, panels."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import matplotlib.figure
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Spread:
    """One quantity measured over several seeds."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("values must have at least one number, got none")

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float:
        """The standard deviation; 0 for a single seed."""
        return statistics.stdev(self.values) if self.values[1:] else 0.0

    def told(self, digits: int) -> str:
        """Format as a table cell, with `digits` decimal places."""
        spread = f" ± {self.deviation:.{digits}f}" if self.values[1:] else ""
        return f"{self.mean:.{digits}f}{spread}"


def told(spread: Spread | None, digits: int) -> str:
    """Format as a table cell; empty if nothing was measured."""
    return "" if spread is None else spread.told(digits)


def repetitions(count: int, kind: str) -> str:
    """Describe over how many seeds or splits the numbers were computed."""
    return f"one {kind}" if count == 1 else f"mean ± standard deviation of {count} {kind}s"


def sentence(words: str) -> str:
    """Return the words with an initial capital."""
    return words[:1].upper() + words[1:]


def curve(
    panel: Axes,
    across: Sequence[float],
    spreads: Sequence[Spread],
    color: str,
    label: str,
    style: str = "-",
    width: float = 1.8,
    marker: str = "",
) -> None:
    """Draw a line through the means, with a band of one standard deviation."""
    low = [spread.mean - spread.deviation for spread in spreads]
    high = [spread.mean + spread.deviation for spread in spreads]
    panel.fill_between(across, low, high, color=color, alpha=0.15, linewidth=0)
    panel.plot(
        across,
        [spread.mean for spread in spreads],
        color=color,
        label=label,
        linestyle=style,
        linewidth=width,
        marker=marker,
        markersize=3.5,
    )


def finish(panel: Axes, across: str, up: str = "", title: str = "") -> None:
    """Style a panel: axis labels, title, a light grid, no box."""
    panel.set_xlabel(across)
    panel.set_ylabel(up)
    panel.set_title(title, fontsize=11, loc="left")
    panel.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def legend_below(canvas: matplotlib.figure.Figure, panel: Axes, columns: int = 6) -> None:
    """Draw one legend for all panels below them, where it covers nothing."""
    handles, labels = panel.get_legend_handles_labels()
    canvas.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(columns, max(1, len(labels))),
        fontsize=9,
        frameon=False,
    )
