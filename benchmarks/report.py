"""`python -m benchmarks.report`: write the tables of the documentation, and plot growth curves."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from benchmarks.__main__ import LIMITS
from benchmarks.tables import replace_block, round_number
from mbpa.adaptation.engine import OLD_NAMES


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results/benchmarks"))
    parser.add_argument("--document", type=Path, default=Path("docs/engine.md"))
    parser.add_argument("--figure", type=Path, default=Path("docs/engine.png"))
    arguments = parser.parse_args()
    found = read_reports(arguments.results)
    page = arguments.document.read_text("utf-8")
    arguments.document.write_text(refresh_tables(page, found), "utf-8")
    print(f"tables: {arguments.document}")
    curves = {
        device: report["parts"]["curves"][0]
        for device, report in found.items()
        if "curves" in report["parts"]
    }
    if curves:
        draw_curves(curves, arguments.figure)
        print(f"figure: {arguments.figure}")


def read_reports(folder: Path) -> dict[str, dict[str, Any]]:
    """Read the measurements, by device."""
    found = (folder / f"{device}.json" for device in ("cpu", "cuda"))
    return {path.stem: json.loads(path.read_text()) for path in found if path.exists()}


def adaptation_table(results: list[dict[str, Any]], with_limit: bool) -> str:
    names = ["adaptation", "engine", "vote", "torch.func", "loop"]
    head = ["case", "path", *names, "loop / engine", "off by", *(["limit"] if with_limit else [])]
    rows = [head, ["---", "---", *["---:"] * (len(head) - 2)]]
    for result in results:
        micro = result["microseconds"]
        cells = [
            describe_case(result),
            OLD_NAMES.get(result["path"], result["path"]),
            *(round_number(micro[name]) for name in names),
        ]
        cells += [round_number(micro["loop"] / micro["engine"]), f"{result['error']:.0e}"]
        if with_limit:
            least = max(result[kind] / LIMITS[kind] for kind in ("operations", "bytes"))
            cells.append(round_number(1e6 * least))
        rows.append(cells)
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def describe_case(result: dict[str, Any]) -> str:
    """Describe a case by its sizes."""
    *sizes, classes = result["sizes"]
    rule, _, settings = result["rule"].partition("(")
    steps = re.search(r"steps=(\d+)", settings)
    assert steps
    head = f"D {sizes[0]}, C {classes:,}" if not sizes[1:] else "-".join(map(str, result["sizes"]))
    told = [head, f"K {result['k']}", f"T {steps[1]}", f"batch {result['batch']:,}"]
    return ", ".join(told + ([rule] if rule != "Gradient" else []))


def refresh_tables(page: str, reports: dict[str, dict[str, Any]]) -> str:
    """Return the document with each table between its two markers rebuilt from the results."""
    for device, report in reports.items():
        table = adaptation_table(report["parts"]["adaptation"], device == "cuda")
        if f"<!-- benchmarks: {device} -->\n" in page:
            page = replace_block(page, device, table)
    return page


def draw_curves(curves: dict[str, dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    axes = next(iter(curves.values()))
    figure, panels = pyplot.subplots(2, 3, figsize=(12, 7), sharey=True)
    for panel, axis in zip(panels.flat, axes, strict=True):
        for device, points in curves.items():
            name = {"cuda": "GPU", "cpu": "CPU"}[device]
            color = {"cuda": "tab:green", "cpu": "tab:blue"}[device]
            own = points[axis]
            panel.loglog(own["values"], own["engine"], "o-", color=color, label=f"{name}, engine")
            panel.loglog(
                own["values"], own["torch.func"], "s:", color=color, label=f"{name}, torch.func"
            )
        panel.set_xlabel(axis)
        panel.grid(alpha=0.3)
    for panel in panels[:, 0]:
        panel.set_ylabel("µs per query")
    panels[0, 0].legend(fontsize=8)
    figure.suptitle("Linear head, gradient steps; D 512, C 1000, K 50, T 10 unless on the axis")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
