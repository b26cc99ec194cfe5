"""What tables and figures of several experiments share: numbers over seeds, curves, panels."""

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
    """A number over seeds."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("values must be of at least one seed, got none")

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float:
        """The standard deviation; 0 of a single seed."""
        return statistics.stdev(self.values) if self.values[1:] else 0.0

    def told(self, digits: int) -> str:
        """As a table has it, with so many digits after the point."""
        spread = f" ± {self.deviation:.{digits}f}" if self.values[1:] else ""
        return f"{self.mean:.{digits}f}{spread}"


def told(spread: Spread | None, digits: int) -> str:
    """As a table has it; nothing where nothing was measured."""
    return "" if spread is None else spread.told(digits)


def repetitions(count: int, kind: str) -> str:
    """Of how many seeds, or splits, the numbers are."""
    return f"one {kind}" if count == 1 else f"mean ± standard deviation of {count} {kind}s"


def sentence(words: str) -> str:
    """With a capital letter."""
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
    """A line through the means, in a band of one standard deviation."""
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
    """What every panel gets: words at its axes, a quiet grid, no box."""
    panel.set_xlabel(across)
    panel.set_ylabel(up)
    panel.set_title(title, fontsize=11, loc="left")
    panel.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def legend_below(canvas: matplotlib.figure.Figure, panel: Axes, columns: int = 6) -> None:
    """One legend for all panels, under them, where it covers nothing."""
    handles, labels = panel.get_legend_handles_labels()
    canvas.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(columns, max(1, len(labels))),
        fontsize=9,
        frameon=False,
    )
