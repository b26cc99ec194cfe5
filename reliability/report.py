"""`python -m reliability.report`: update the table of trials in docs/serving.md."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reliability.trial import RESULTS

DOCUMENT = Path("docs/serving.md")
BEGIN, END = "<!-- reliability -->\n", "<!-- end of reliability -->"
Report = dict[str, Any]


def main() -> None:
    reports = read_reports(RESULTS)
    DOCUMENT.write_text(refresh(DOCUMENT.read_text("utf-8"), reports), "utf-8")
    print(f"{DOCUMENT}: {', '.join(reports)}")


def read_reports(folder: Path) -> dict[str, Report]:
    """Read the existing reports, by name of the trial."""
    found = (folder / f"{name}.json" for name in DESCRIBE)
    return {path.stem: json.loads(path.read_text("utf-8")) for path in found if path.exists()}


def refresh(page: str, reports: dict[str, Report]) -> str:
    """Return the document with the table between its two markers rebuilt from the reports."""
    before, found, rest = page.partition(BEGIN)
    if not found or END not in rest:
        raise ValueError(f"the document must have the lines {BEGIN!r} and {END!r}")
    rows = ["| command | result | minutes |", "| --- | --- | ---: |"]
    for name, report in reports.items():
        minutes = f"{report['seconds'] / 60:.0f}"
        rows.append(f"| `{report['command']}` | {DESCRIBE[name](report)} | {minutes} |")
    return before + BEGIN + "\n".join(rows) + "\n" + rest[rest.index(END) :]


def _describe_kills(report: Report) -> str:
    journal, server = report.get("journal"), report.get("server")
    parts = []
    if journal:
        parts.append(
            f"{journal['kills']:,} kills of a teaching process, {journal['acknowledged']:,} "
            f"acknowledged calls, {journal['in_doubt']:,} in progress"
        )
    if server:
        parts.append(
            f"{server['kills']} kills of a whole server, {server['acknowledged learn']:,} "
            f"acknowledged lessons, {server['acknowledged forget']:,} forgotten, and "
            f"{server['replacements']} of a process that replaces its run"
        )
    return "; ".join(parts) + ": nothing lost, doubled or torn"


def _describe_power(report: Report) -> str:
    tried = {name: part for name, part in report.items() if isinstance(part, dict)}
    del tried["machine"]
    counts = Counter[str]()
    for part in tried.values():
        for name, count in part.items():
            counts["cuts"] += count if name in ("cuts", "cuts after a failed flush") else 0
            counts["faults"] += count if name.endswith("at a call") else 0
    return (
        f"{counts['cuts']:,} power cuts and {counts['faults']:,} failing system calls "
        f"({', '.join(tried)}): each leaves the old state or the new one, complete"
    )


def _describe_damage(report: Report) -> str:
    kinds = {"truncated", "bits", "byte", "zeroed sector", "swapped sectors", "duplicated sector"}
    detected = harmless = 0
    for file in report["files"].values():
        for kind in kinds & set(file):
            detected += file[kind].get("detected", 0)
            harmless += file[kind].get("harmless", 0)
    return (
        f"{detected + harmless:,} cases of damage to {len(report['files'])} files and whole runs: "
        f"{detected:,} detected, {harmless:,} harmless, none unnoticed"
    )


def _describe_operations(report: Report) -> str:
    return (
        f"{report['operations']:,} random operations: every answer agrees with the reference, "
        "and to the bit with a fresh classifier"
    )


def _describe_histories(report: Report) -> str:
    return (
        f"{report['verdicts']['linearizable']} of {report['histories']} histories of "
        f"{report['clients']} clients linearizable, {report['operations']:,} requests"
    )


def _describe_load(report: Report) -> str:
    offered = [each["offered_per_second"] for each in report["rounds"]]
    without = [each["without_load"] for each in report["rounds"]]
    under = [each["under_load"] for each in report["rounds"]]
    slow = ", ".join(
        f"{found['ratio']} times beside slow {kind}"
        for kind, found in report["slow_clients"].items()
    )
    return (
        f"{report['saturating_clients']} clients get {_middle(without)} answers per second; of "
        f"{statistics.median(offered):.0f} requests per second, {_middle(under)} are answered, "
        f"with a 99th percentile {report['median_ratio']} times that without load "
        f"({_middle(under, 'p99_ms')} and {_middle(without, 'p99_ms')} ms; "
        f"{report['one_client']['p99_ms']:.0f} ms for one client alone); {slow}"
    )


def _middle(measured: list[Report], name: str = "answers_per_second") -> str:
    return f"{statistics.median(each[name] for each in measured):.0f}"


def _describe_soak(report: Report) -> str:
    growth, after = report["growth_per_hour"]["anonymous_mb"], report["quiet_after"]
    return (
        f"{sum(report['operations'].values()):,} operations in {report['minutes']:.0f} minutes: "
        f"memory grows by {growth['slope']:.2f} ± {growth['error']:.2f} MB per hour after the "
        f"first ten minutes; {after['descriptors']:.0f} descriptors and {after['threads']:.0f} "
        f"threads, {report['quiet_before']['descriptors']:.0f} and "
        f"{report['quiet_before']['threads']:.0f} before"
    )


def _describe_fuzzing(report: Report) -> str:
    cases = {name: target["cases"] for name, target in report["targets"].items()}
    told = ", ".join(f"{name} {count:,}" for name, count in cases.items())
    return f"{sum(cases.values()):,} cases ({told}): no finding"


def _describe_replicas(report: Report) -> str:
    kills, found, cuts = report["kills"], report["histories"], report["cuts"]
    return (
        f"{kills['kills']} kills of replicas, writers, backends and the database around "
        f"{kills['replicas']} replicas: {kills['acknowledged_lessons']:,} acknowledged lessons and "
        f"{kills['acknowledged_forgets']:,} forgets, none lost or doubled, the replicas equal to "
        f"the bit; {found['verdicts']['linearizable']} of {found['histories']} histories of "
        f"{found['clients']} clients linearizable; {cuts['cuts']} cuts of the network: predictions "
        f"within {cuts['longest_prediction_s']} s, recovery within {cuts['longest_recovery_s']} s"
    )


DESCRIBE: dict[str, Callable[[Report], str]] = {
    "kills": _describe_kills,
    "power": _describe_power,
    "damage": _describe_damage,
    "operations": _describe_operations,
    "histories": _describe_histories,
    "load": _describe_load,
    "soak": _describe_soak,
    "fuzz": _describe_fuzzing,
    "replicas": _describe_replicas,
}


if __name__ == "__main__":
    main()
