"""`python -m benchmarks`: measure everything on one device, write JSON, print tables.

Each result is written as soon as it is known, so an interrupted run leaves the results so far.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import mbpa
from benchmarks import adaptation, end_to_end, retrieval
from mbpa.device import measure_throughput

LIMITS = {"operations": 795e12 / 3, "bytes": 4.2e12}
"""Limits of an H200 per second: products of float32 accuracy, each made of three float16 products;
and bytes moved to or from its memory."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    named = "; ".join(names(torch.device(device)))
    parser.add_argument("--device", default=device)
    parser.add_argument(
        "--only", nargs="*", help=f"measure only what has one of these in its name: {named}"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="seconds to spend on each timing"
    )
    parser.add_argument("--curves", action="store_true", help="also measure growth with each size")
    parser.add_argument("--out", type=Path, help="default: results/benchmarks/DEVICE.json")
    arguments = parser.parse_args()
    chosen = torch.device(arguments.device)
    wanted = [name for name in names(chosen) if is_asked_for(name, arguments.only)]
    if not wanted:
        asked, known = " ".join(arguments.only), "\n  ".join(names(chosen))
        parser.error(
            f"no measurement on {chosen.type} is called {asked!r}; the names are\n  {known}"
        )
    # A partial run must not replace the results of a full one.
    name = f"{chosen.type}-part" if arguments.only else chosen.type
    out = arguments.out or Path("results/benchmarks") / f"{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"machine": describe_machine(chosen), "parts": {}}
    failed = False
    for name, result in parts(chosen, arguments):
        failed |= name == "failed"
        report["parts"].setdefault(name, []).append(result)
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(format_result(name, result), flush=True)
    print(f"written to {out}")
    return int(failed)


def is_asked_for(name: str, only: list[str] | None) -> bool:
    return not only or any(word in name for word in only)


def names(device: torch.device) -> list[str]:
    """Return the names of all measurements on the device."""
    return list(dict.fromkeys(name for name, _ in measurements(device, budget=0.0)))


def measurements(device: torch.device, budget: float) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield all measurements with their names; the first word names the part of the report."""
    is_gpu = device.type == "cuda"
    for case in adaptation.ADAPTATION_CASES[device.type]:
        yield (
            f"adaptation {case.name}",
            partial(adaptation.measure_adaptation, case, device, budget),
        )
    for kind in retrieval.KINDS:
        entries = 400_000 if is_gpu else 20_000
        for batch in (1, 64, 1024) if is_gpu else (1, 64):
            yield (
                f"retrieval {kind}",
                partial(retrieval.measure_retrieval, kind, entries, 512, 50, batch, device, budget),
            )
        if is_gpu:
            yield (
                f"millions {kind}",
                partial(retrieval.measure_millions, kind, 10_000_000, 256, device, budget),
            )
    for batch in (1, 64):
        yield "prediction", partial(end_to_end.measure_prediction, batch, device, budget)
    yield "query", partial(end_to_end.measure_query, device, budget)
    yield "rules", partial(end_to_end.measure_rules, device, budget)
    for block in (1024, 2048, 4096) if is_gpu else ():
        yield "stream", partial(end_to_end.measure_stream, device, block)


def parts(device: torch.device, arguments: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    for name, measure in measurements(device, arguments.seconds):
        if is_asked_for(name, arguments.only):
            part, _, case = name.partition(" ")
            try:
                yield part, measure()
            except AssertionError as error:  # wrong result: the other measurements are still useful
                yield "failed", {"case": case or part, "error": str(error)}
    if arguments.curves:
        yield "curves", adaptation.curves(device, arguments.seconds / 2)


def describe_machine(device: torch.device) -> dict[str, Any]:
    rates = measure_throughput(device)
    known = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "mbpa": mbpa.__version__,
    }
    return {**known, "measured": {"operations": rates.operations, "bytes": rates.bytes}}


def format_result(part: str, result: dict[str, Any]) -> str:
    """Return a result in one line."""
    if part == "curves":
        return "curves of " + ", ".join(result)
    head = f"{part:11} {result['case']:28}"
    if part == "adaptation":
        micro = result["microseconds"]
        times = "  ".join(f"{name} {took:.3g}" for name, took in micro.items())
        least = 1e6 * max(
            result["operations"] / LIMITS["operations"], result["bytes"] / LIMITS["bytes"]
        )
        return (
            f"{head} µs/query: {times}  (loop/engine {micro['loop'] / micro['engine']:.0f}x, "
            f"torch.func/engine {micro['torch.func'] / micro['engine']:.1f}x, path "
            f"{result['path']}, H200 limit {least:.3g}, error {result['error']:.1e})"
        )
    rest = {name: value for name, value in result.items() if name not in ("case", "operations")}
    return f"{head} {json.dumps(rest)}"


if __name__ == "__main__":
    sys.exit(main())
