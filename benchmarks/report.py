"""`python -m benchmarks.report`: tables for the documentation, and growth curves as a figure."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.__main__ import LIMITS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results/benchmarks"))
    parser.add_argument("--figure", type=Path, default=Path("docs/engine.png"))
    arguments = parser.parse_args()
    found = {path.stem: json.loads(path.read_text()) for path in arguments.results.glob("*.json")}
    for device, report in found.items():
        print(f"\n{device}: {report['machine']['device']}, torch {report['machine']['torch']}\n")
        print(adaptation_table(report["parts"].get("adaptation", []), device == "cuda"))
    curves = {
        device: report["parts"]["curves"][0]
        for device, report in found.items()
        if "curves" in report["parts"]
    }
    if curves:
        draw(curves, arguments.figure)
        print(f"\nfigure: {arguments.figure}")


def adaptation_table(results: list[dict[str, Any]], with_limit: bool) -> str:
    names = ["adaptation", "engine", "vote", "head", "torch.func", "loop"]
    head = ["case", "path", *names, "loop / engine", "torch.func / engine", "off by"]
    head += ["limit"] if with_limit else []
    rows = [head, ["---", "---", *["---:"] * (len(head) - 2)]]
    for result in results:
        micro = result["microseconds"]
        cells = [result["case"], result["path"], *(f"{micro[name]:.3g}" for name in names)]
        cells += [f"{micro[slow] / micro['engine']:.3g}" for slow in ("loop", "torch.func")]
        cells.append(f"{result['error']:.0e}")
        if with_limit:
            least = max(result[kind] / LIMITS[kind] for kind in ("operations", "bytes"))
            cells.append(f"{1e6 * least:.2g}")
        rows.append(cells)
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def draw(curves: dict[str, dict[str, Any]], path: Path) -> None:
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
        panel.set_ylabel("µs a query")
    panels[0, 0].legend(fontsize=8)
    figure.suptitle("Linear head, gradient steps; D 512, C 1000, K 50, T 10 unless on the axis")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
