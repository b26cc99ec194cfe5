"""Report on a search for the settings of language modelling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from experiments.language.evaluation import ADAM, BOTH, DYNAMIC, LSTM, MBPA
from experiments.language.figures import TITLES, Scores
from experiments.results import Record, Result, value_of
from experiments.sections import Figure, Section, Table

if TYPE_CHECKING:
    import matplotlib.figure
    from matplotlib.axes import Axes

SPREAD, BEGINNING = "spread", "beginning"
"""Which tokens of the text the network alone was judged on, if not all, for comparison."""


def search_sections(results: Sequence[Result]) -> list[Section]:
    """Return how much was tried, and the perplexity by rate and steps of the adaptation."""
    scores = Scores(results)
    common = _describe_common_settings(scores)
    section = Section(
        title=f"The search, {TITLES[scores.corpus]}",
        text=[
            "Perplexity of the validation text, weights solved for. Most settings are judged on "
            "tokens spread over the text, dynamic evaluation on its beginning."
        ],
        tables=[_make_trials_table(scores)],
        figures=[
            Figure(
                f"language-{scores.corpus}-search",
                f"Perplexity by steps and rate of the adaptation, {common}; "
                f"left: {MBPA}, right: with the cache as well.",
                lambda canvas: _draw_search(canvas, scores),
            )
        ],
    )
    return [section]


def _make_trials_table(scores: Scores) -> Table:
    rows = []
    for method in dict.fromkeys(str(record["method"]) for record in scores.found("perplexity")):
        mine = scores.found("perplexity", method=method)
        most = max(int(str(record["tokens"])) for record in mine)
        values = [value_of(record) for record in mine if record["tokens"] == most]
        best = min((value for value in values if math.isfinite(value)), default=math.inf)
        of = {"method": LSTM, "tokens": most}
        part = BEGINNING if method in (DYNAMIC, ADAM) else SPREAD
        alone = scores.values("perplexity", **of, part=part) or scores.values("perplexity", **of)
        settings = {_drop_fields(record, "tokens", "part", "value") for record in mine}
        shown = [f"{alone[0]:.2f}" if alone else "", f"{best:.2f}"]
        rows.append([method, str(len(settings)), f"{most:,}", *shown])
    columns = ["method", "settings", "tokens", f"{LSTM} alone", "best"]
    note = "Perplexities are those on the largest number of tokens that a method was judged on."
    cut = [
        f"{r['stage']} ({r['value']})" for r in scores.found("settings_left_out") if "stage" in r
    ]
    if cut:
        note += f" Not tried for lack of time: {', '.join(cut)}."
    return Table("Tried", columns, rows, note)


def _drop_fields(record: Record, *names: str) -> tuple[object, ...]:
    """Return the other fields of a record, in a comparable form."""
    return tuple(sorted(((k, v) for k, v in record.items() if k not in names), key=str))


def _describe_common_settings(scores: Scores) -> str:
    drawn = _find_largest_group(
        [r for r in scores.found("perplexity", method=MBPA) if "steps" in r]
    )
    if not drawn:
        return "with all other settings equal"
    one = drawn[0]
    kernel = str(one["kernel"]).replace("_", " ")
    return f"{one['k']} neighbours of the last {one['window']:,} tokens, weighted by {kernel}"


def _draw_search(canvas: matplotlib.figure.Figure, scores: Scores) -> None:
    panels = canvas.subplots(1, 2)
    for panel, method in zip(panels, (MBPA, BOTH), strict=True):
        records = [r for r in scores.found("perplexity", method=method) if "steps" in r]
        _draw_rates(panel, _find_largest_group(records))
        panel.set_title(method)
        panel.set_xlabel("rate")
    panels[0].set_ylabel("perplexity")
    panels[-1].legend(fontsize=8.5, title="steps")


def _find_largest_group(records: list[Record]) -> list[Record]:
    """Return the largest group of records that differ in rate and steps only."""
    groups: dict[tuple[object, ...], list[Record]] = {}
    for record in records:
        common = _drop_fields(record, "lr", "steps", "value", "method")
        groups.setdefault(common, []).append(record)
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
