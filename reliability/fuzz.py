"""Fuzz the readers of requests and files: no input from the network or a disk may break them.

For each target, thousands of inputs per minute are derived from good ones, guided by the code that
they reach. Each must be read or refused as documented, within 1 s and a bound on memory. Inputs
that violate this are reduced in size and saved; `--replay` tries one again.

The engine is `reliability.fuzzing`, which needs only Python. On x86-64, for which it has wheels,
`--engine atheris` uses Atheris (libFuzzer) on the same targets.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from reliability.fuzzing.coverage import ArcTracer
from reliability.fuzzing.engine import Check, Finding, Fuzzer, Summary, Target, describe_error
from reliability.fuzzing.file_targets import FILE_TARGETS
from reliability.fuzzing.isolation import Announce, Death, Work, run_isolated
from reliability.fuzzing.limits import limit_address_space
from reliability.fuzzing.request_target import REQUESTS
from reliability.trial import BrokenPromiseError, Trial

TARGETS = {target.name: target for target in (REQUESTS, *FILE_TARGETS)}
ALL = "all"
SHARED_MEMORY = Path("/dev/shm")
EXTRA_ADDRESS_BYTES = 3 << 30  # far above what any case may use, far below an absurd allocation
MAX_DEATHS = 20  # processes that may die in one run before it ends
NEXT_SEED = 1_000_003  # added to the seed for each process that replaces a dead one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", choices=[*TARGETS, ALL], metavar="TARGET", help=_name_targets())
    parser.add_argument("--minutes", type=float, default=1.0, help="minutes per target")
    parser.add_argument("--cases", type=int, help="cases per process, instead of a time")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first process")
    parser.add_argument(
        "--jobs", type=int, default=1, help="number of processes, each with its own seed"
    )
    parser.add_argument(
        "--findings", type=Path, default=Path("findings"), help="directory for inputs that fail"
    )
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run one saved input again")
    parser.add_argument("--engine", choices=["own", "atheris"], default="own", help="fuzzer to use")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    names = list(TARGETS) if arguments.target == ALL else [arguments.target]
    if len(names) > 1 and (arguments.replay is not None or arguments.engine == "atheris"):
        raise SystemExit("--replay and --engine atheris take one target")
    if arguments.replay is not None:
        return replay(TARGETS[names[0]], arguments.replay.read_bytes())
    if arguments.engine == "atheris":
        run_atheris(TARGETS[names[0]], arguments.minutes * 60, arguments.seed, arguments.findings)
    seconds = None if arguments.cases else arguments.minutes * 60
    figures: dict[str, Any] = {"seed": arguments.seed, "jobs": arguments.jobs, "targets": {}}
    broken = []
    for name in names:
        summaries = fuzz(
            TARGETS[name],
            seed=arguments.seed,
            jobs=arguments.jobs,
            cases=arguments.cases,
            seconds=seconds,
        )
        total = merge(summaries)
        figures["targets"][name] = total.as_figures()
        for finding in total.findings:
            path = finding.save(arguments.findings, name)
            broken.append(f"{name}: {finding.kind}: {finding.signature} ({path})")
        print(name, figures["targets"][name], file=sys.stderr, flush=True)
    if broken:
        raise BrokenPromiseError("\n".join(broken))
    return figures


def fuzz(
    target: Target, *, seed: int, jobs: int, cases: int | None, seconds: float | None
) -> list[Summary]:
    """Fuzz in `jobs` processes; one that dies is reported as a finding and replaced."""
    seeds = [seed + job for job in range(jobs)]
    summaries: list[Summary] = []
    with make_directory() as parent:

        def take() -> Iterator[tuple[int, Work]]:
            while seeds:
                its_seed = seeds.pop(0)
                yield its_seed, make_work(target, its_seed, cases, seconds, parent)

        while seeds and len(summaries) < MAX_DEATHS:
            for its_seed, result in run_isolated(take(), jobs):
                if isinstance(result, Summary):
                    summaries.append(result)
                    continue
                assert isinstance(result, Death)
                crash = Finding("crash", result.reason, result.reason, result.last)
                summaries.append(Summary(cases=result.announced, findings=[crash]))
                seeds.append(its_seed + NEXT_SEED)
    return summaries


def make_work(
    target: Target, seed: int, cases: int | None, seconds: float | None, parent: Path
) -> Work:
    """Return the work of one process."""

    def work(announce: Announce) -> Summary:
        tracer = ArcTracer(target.traced, target.untraced)
        if target.has_threads:
            tracer.watch_new_threads()
        with silence(), open_target(target, parent) as check:
            limit_address_space(EXTRA_ADDRESS_BYTES)
            fuzzer = Fuzzer(target, check, seed=seed, announce=announce, tracer=tracer)
            return fuzzer.run(cases=cases, seconds=seconds)

    return work


@contextlib.contextmanager
def open_target(target: Target, parent: Path | None = None) -> Iterator[Check]:
    """Open the check of a target in a new directory."""
    with make_directory(parent) as directory, target.open(directory) as check:
        yield check


@contextlib.contextmanager
def make_directory(parent: Path | None = None) -> Iterator[Path]:
    """Make a temporary directory, in memory if possible, and remove it at the end.

    Args:
        parent: where to make it. A parent made by the main process also removes what a killed
            process leaves.
    """
    if parent is None and os.access(SHARED_MEMORY, os.W_OK):
        parent = SHARED_MEMORY
    directory = Path(tempfile.mkdtemp(prefix="mbpa-reliability-", dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Suppress warnings and logs about odd inputs, and limit torch to one thread."""
    import torch

    threads, disabled = torch.get_num_threads(), logging.root.manager.disable
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        torch.set_num_threads(threads)


def merge(summaries: Sequence[Summary]) -> Summary:
    """Combine the summaries of several processes; keep the smallest finding per signature."""
    total = Summary()
    found: dict[str, Finding] = {}
    for each in summaries:
        total.cases += each.cases
        total.seconds = max(total.seconds, each.seconds)
        total.features = max(total.features, each.features)
        total.corpus = max(total.corpus, each.corpus)
        total.slowest_case_s = max(total.slowest_case_s, each.slowest_case_s)
        total.largest_growth_bytes = max(total.largest_growth_bytes, each.largest_growth_bytes)
        for outcome, count in each.outcomes.items():
            total.outcomes[outcome] = total.outcomes.get(outcome, 0) + count
        for finding in each.findings:
            known = found.setdefault(finding.signature, finding)
            if len(finding.data) < len(known.data):
                found[finding.signature] = finding
    total.findings = list(found.values())
    return total


def replay(target: Target, data: bytes) -> dict[str, Any]:
    """Try one input without tracing, in this process; raise if it breaks a promise."""
    with silence(), open_target(target) as check:
        outcome = Fuzzer(target, check, seed=0).execute(data, is_traced=False)
    if outcome.finding is not None:
        raise BrokenPromiseError(f"{outcome.finding.signature}\n{outcome.finding.message}")
    return {
        "replayed_bytes": len(data),
        "seconds_taken": round(outcome.seconds, 3),
        "growth_mib": round(outcome.growth_bytes / 2**20, 1),
        "outcome": sorted(map(str, outcome.features)),
    }


def run_atheris(target: Target, seconds: float, seed: int, findings: Path) -> None:
    """Let libFuzzer drive a target; it ends the process itself, with a status for the outcome."""
    try:
        # Optional, and without types where it is installed.
        import atheris  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError as error:
        raise SystemExit(
            "atheris is not installed: pip install atheris (wheels are for Python 3.11 on x86-64; "
            "elsewhere it is built with Clang's libFuzzer); --engine own needs nothing"
        ) from error
    with contextlib.ExitStack() as stack:
        with atheris.instrument_imports(include=["mbpa"]):
            check = stack.enter_context(open_target(target))
        stack.enter_context(silence())
        corpus = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for number, data in enumerate(target.seeds()):
            (corpus / f"{number:03}").write_bytes(data)
        findings.mkdir(parents=True, exist_ok=True)

        def try_one(data: bytes) -> None:
            try:
                check(data)
            except Exception as error:
                print(describe_error(error), file=sys.stderr)
                raise

        options = [f"-max_total_time={int(seconds)}", f"-seed={seed or 1}", "-timeout=20"]
        prefix = f"-artifact_prefix={findings}/{target.name}-"
        atheris.Setup([sys.argv[0], *options, prefix, str(corpus)], try_one)
        atheris.Fuzz()


def _name_targets() -> str:
    return f"one of {', '.join(TARGETS)}, or {ALL}"


TRIAL = Trial(
    name="fuzz",
    summary="derive bad requests and files from good ones, guided by coverage",
    add_arguments=add_arguments,
    run=run,
)
