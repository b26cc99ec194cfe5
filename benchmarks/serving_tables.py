"""Tables of the results of `benchmarks.serving`, for the documentation of the service."""

from __future__ import annotations

from typing import Any

from benchmarks.tables import DocumentTable, format_rows


def format_serving(report: dict[str, Any]) -> str:
    lines = [
        _describe_overload(report["overload"]),
        *([_describe_soak(report["soak"])] if "soak" in report else []),
    ]
    return "\n".join([_format_rates(report), *lines]) + "\n"


def _format_rates(report: dict[str, Any]) -> str:
    rows = [["clients", "per second", "median", "99%", "99%, taught", "ratio", "lessons, median"]]
    for clients, idle in report["idle"].items():
        taught = report["taught"][clients]
        rows.append([
            clients,
            f"{idle['requests_a_second']:.0f}",
            f"{idle['median_ms']:.1f} ms",
            f"{idle['p99_ms']:.1f} ms",
            f"{taught['p99_ms']:.1f} ms",
            f"{taught['p99_ms'] / idle['p99_ms']:.2f}",
            f"{taught['lessons']['median_ms']:.0f} ms",
        ])  # fmt: skip
    machine = report["machine"]
    note = (
        f"*Predictions of one embedding, {machine['memories']:,} memories, {machine['labels']} "
        f"labels, server and clients on {machine['cores']} cores. Taught: "
        f"meanwhile, {machine['lessons_a_second']} lessons of three examples per second.*"
    )
    return f"{format_rows(rows)}\n{note}\n"


def _describe_overload(found: dict[str, Any]) -> str:
    during, after = found["during"], found["after"]
    shed = during["statuses"].get("429", 0)
    total = sum(during["statuses"].values())
    others = total - shed - during["statuses"].get("200", 0)
    return (
        f"At three times that load ({found['offered_a_second']:.0f} requests per second), "
        f"{during['requests_a_second']:.0f} per second were answered, {shed / total:.0%} of all "
        f"requests were refused with 429, and {others or 'none'} failed otherwise. Right after "
        f"that, 16 clients got {after['requests_a_second']:.0f} answers per second, 99% of them "
        f"within {after['p99_ms']:.0f} ms.\n"
    )


def _describe_soak(found: dict[str, Any]) -> str:
    settled = found["samples"][len(found["samples"]) // 10 :]
    half = len(settled) // 2
    memory = [
        f"{min(part):.0f} to {max(part):.0f} MB"
        for part in (
            [each["resident_mb"] for each in settled[:half]],
            [each["resident_mb"] for each in settled[half:]],
        )
    ]
    asked = found["predictions"]
    return (
        f"Over {found['seconds'] / 60:.3g} minutes with {found['taught']:,} examples taught, "
        f"{found['forgotten']:,} of them forgotten and {asked['statuses'].get('200', 0):,} "
        f"predictions made, the process held {memory[0]} in the first half and {memory[1]} in the "
        f"second, and the journal at most {max(each['journal_mb'] for each in settled):.0f} MB.\n"
    )


SERVING_TABLE = DocumentTable("serving", format_serving)
