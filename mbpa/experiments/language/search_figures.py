"""What the report shows of a search for the settings of language modelling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mbpa.experiments.language.evaluation import BOTH, MBPA
from mbpa.experiments.language.figures import TITLES, Scores
from mbpa.experiments.results import Record, Result, value_of
from mbpa.experiments.sections import Figure, Section, Table

if TYPE_CHECKING:
    import matplotlib.figure
    from matplotlib.axes import Axes


def search_sections(results: Sequence[Result]) -> list[Section]:
    """How much was tried, and how rate and steps of the adaptation did."""
    scores = Scores(results)
    tried = scores.found("perplexity")
    best = []
    for method in dict.fromkeys(str(record["method"]) for record in tried):
        mine = [record for record in tried if record["method"] == method]
        most = max(int(str(record["tokens"])) for record in mine)
        value = min(value_of(record) for record in mine if record["tokens"] == most)
        best.append([method, str(len(mine)), f"{most:,}", f"{value:.2f}"])
    section = Section(
        title=f"The search, {TITLES[scores.corpus]}",
        text=[
            "Perplexity of the validation text, weights solved for. Most settings are judged by "
            "tokens spread over the text."
        ],
        tables=[Table("Tried", ["method", "settings", "tokens", "best"], best)],
        figures=[
            Figure(
                f"language-{scores.corpus}-search",
                "Perplexity by steps and rate of the adaptation, other settings alike; "
                f"left: {MBPA}, right: with the cache as well.",
                lambda canvas: _draw_search(canvas, scores),
            )
        ],
    )
    return [section]


def _draw_search(canvas: matplotlib.figure.Figure, scores: Scores) -> None:
    panels = canvas.subplots(1, 2)
    for panel, method in zip(panels, (MBPA, BOTH), strict=True):
        records = [r for r in scores.found("perplexity", method=method) if "steps" in r]
        _draw_rates(panel, _most_alike(records))
        panel.set_title(method)
        panel.set_xlabel("rate")
    panels[0].set_ylabel("perplexity")
    panels[-1].legend(fontsize=8.5, title="steps")


def _most_alike(records: list[Record]) -> list[Record]:
    """Of records that differ in more than rate and steps, the largest group that does not."""
    groups: dict[tuple[object, ...], list[Record]] = {}
    for record in records:
        rest = {k: v for k, v in record.items() if k not in ("lr", "steps", "value", "method")}
        groups.setdefault(tuple(sorted(rest.items(), key=str)), []).append(record)
    return max(groups.values(), key=len, default=[])


def _draw_rates(panel: Axes, records: list[Record]) -> None:
    for steps in sorted({int(str(record["steps"])) for record in records}):
        mine = sorted(
            (float(str(record["lr"])), value_of(record))
            for record in records
            if record["steps"] == steps
        )
        rates, values = [rate for rate, _ in mine], [value for _, value in mine]
        panel.plot(rates, values, marker="o", markersize=4, label=str(steps))
    panel.set_xscale("log")
    rates = sorted({float(str(record["lr"])) for record in records})
    panel.set_xticks(rates, [f"{rate:g}" for rate in rates], rotation=45)
    panel.set_xticks([], minor=True)
