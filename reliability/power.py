"""Cut the power at every point, and let every system call fail, while something is written.

Each scenario runs in a forked process whose system calls are traced (`system_calls`). After every
call, the disk is rebuilt as a power cut may leave it (`disk`). It must hold either the old state or
all of the new one, and only the new one once the process has reported that it is done. Then each
call fails in turn: with an input/output error, with a full disk from there on, or after half of a
write.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reliability import system_calls
from reliability.disk import Disk, restore
from reliability.kills import JOURNAL_PROGRAM
from reliability.system_calls import SHORT, Call, Verdict
from reliability.trial import BrokenPromiseError, Trial

KEPT = (0.0, 0.5, 1.0)  # shares of unflushed changes that survive a power cut
FAULTS = {"error": errno.EIO, "full": errno.ENOSPC, "short": SHORT}


@dataclass(frozen=True)
class Scenario:
    """A piece of work that writes files, and how to read its result.

    Args:
        prepare: creates the initial state in an empty directory.
        write: does the work there; it is acknowledged when this returns.
        read: returns "before", "after", or a line on what is wrong.
    """

    name: str
    prepare: Callable[[Path], None]
    write: Callable[[Path], None]
    read: Callable[[Path], str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="seed of what survives a cut")
    parser.add_argument(
        "--only", nargs="*", default=[], help="names of the scenarios to run; all by default"
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    if not system_calls.available():
        raise BrokenPromiseError("this needs Linux 5.5 with seccomp filters")
    figures: dict[str, Any] = {}
    memory = Path("/dev/shm")
    for name in arguments.only or ["journal", *(each.name for each in make_scenarios())]:
        with tempfile.TemporaryDirectory(
            dir=memory if os.access(memory, os.W_OK) else None
        ) as folder:
            if name == "journal":
                figures[name] = try_journal(Path(folder))
            else:
                (scenario,) = [each for each in make_scenarios() if each.name == name]
                figures[name] = try_scenario(scenario, Path(folder), arguments.seed)
        print(f"{name}: {figures[name]}", file=sys.stderr, flush=True)
    return figures


def try_scenario(scenario: Scenario, folder: Path, seed: int = 0) -> dict[str, int]:
    """Cut the power after every call, then let every call fail; return counts."""
    trace, counts = _trace(scenario, folder / "traced"), Counter[str]()
    start = folder / "start"
    start.mkdir()
    scenario.prepare(start)
    disk, draw, is_done = Disk(start), random.Random(seed), False
    traced = str(folder / "traced")
    for number, (call, _) in enumerate(trace):
        if call.name == "report":
            is_done = is_done or call.data.startswith(b"done")
            continue
        disk.do(_rename_paths(call, traced, str(start)))
        counts["calls"] += 1
        for kept in KEPT:
            found = _read_cut(scenario, disk.after_power_loss(draw, kept), folder / "cut")
            counts["cuts"] += 1
            counts[f"cuts that find {found}"] += 1
            if found not in (("after",) if is_done else ("before", "after")):
                raise BrokenPromiseError(
                    f"{scenario.name}: power cut after call {number} ({call.name} {call.path}), "
                    f"{kept} kept, {'done' if is_done else 'not done'}: {found}"
                )
    if not is_done or not counts["cuts that find after"] or not counts["calls"]:
        raise BrokenPromiseError(f"{scenario.name}: the trial saw nothing: {dict(counts)}")
    for kind in FAULTS:
        counts[f"{kind} at a call"] = _fail_calls(scenario, folder, kind, counts["calls"])
    return dict(counts)


def _fail_calls(scenario: Scenario, folder: Path, kind: str, calls: int) -> int:
    """Let each call fail in turn; return how many did."""
    failed = 0
    for number in range(1, calls + 1):
        place = folder / "failing"
        seen = itertools.count(1)
        hit: list[Call] = []

        def decide(call: Call, seen: Any = seen, hit: Any = hit, number: int = number) -> Verdict:
            if call.name == "report" or (kind == "short" and call.name != "write"):
                return None
            n = next(seen)
            if n == number or (n > number and kind == "full"):
                hit.append(call)
                return FAULTS[kind]
            return None

        trace = _trace(scenario, place, decide)
        said = [call.data for call, _ in trace if call.name == "report"]
        found = scenario.read(place)
        allowed = ("after",) if any(each.startswith(b"done") for each in said) else (
            "before", "after"
        )  # fmt: skip
        is_told = all(each.startswith((b"done", b"error")) for each in said) and said
        if found not in allowed or not is_told:
            what = f"{hit[0].name} {hit[0].path}" if hit else "nothing"
            raise BrokenPromiseError(
                f"{scenario.name}: {kind} at call {number} ({what}): {found}; it said {said}"
            )
        failed += bool(hit)
        shutil.rmtree(place)
    return failed


def _trace(
    scenario: Scenario, place: Path, decide: Callable[[Call], Verdict] = lambda call: None
) -> list[tuple[Call, Verdict]]:
    """Run a scenario in a process of its own; return its calls that change files there."""
    place.mkdir()
    scenario.prepare(place)
    trace: list[tuple[Call, Verdict]] = []

    def verdict(call: Call) -> Verdict:
        if call.name != "report" and not (call.path + "/").startswith(f"{place}/"):
            return None
        answer = decide(call)
        trace.append((call, answer))
        return answer

    def child(report: int) -> None:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        try:
            scenario.write(place)
            os.write(report, b"done")
        except Exception as error:
            os.write(report, f"{_classify(error)}: {error}".encode())

    system_calls.supervise(child, verdict)
    return trace


def _classify(error: Exception) -> str:
    """Return "error" for errors reported to users in one line; any other is a bug of ours."""
    from experiments.errors import ExperimentError
    from mbpa.errors import CheckpointError, RunError

    told = CheckpointError, ExperimentError, RunError, OSError
    return "error" if isinstance(error, told) else type(error).__name__


def _read_cut(scenario: Scenario, files: dict[str, bytes | None], place: Path) -> str:
    place.mkdir()
    restore(files, place)
    try:
        return scenario.read(place)
    finally:
        shutil.rmtree(place)


def _rename_paths(call: Call, old: str, new: str) -> Call:
    def move(path: str) -> str:
        return new + path[len(old) :] if path.startswith(old) else path

    return Call(call.name, move(call.path), call.offset, call.data, move(call.other), call.cuts)


# Scenarios


def make_scenarios() -> list[Scenario]:
    """Make the scenarios; import and train what they need once, before any process forks."""
    import torch

    import mbpa
    from experiments.results import Result, read_results, write_result
    from experiments.workspace import Workspace
    from mbpa.serve.answers import Lesson
    from mbpa.serve.classifier import Classifier
    from mbpa.serve.run_directory import replace_directory, reporting_errors
    from reliability.small_run import KEY_DIM, draw_keys, write_small_run

    torch.set_num_threads(1)

    def teach(place: Path) -> None:
        with reporting_errors(place / "run"), replace_directory(place / "run", replace=True) as new:
            write_small_run(new)

    def make_taught(place: Path) -> None:
        write_small_run(place / "run")
        with Classifier.load(place / "run") as classifier:
            classifier.learn([Lesson("taught", "text", draw_keys(1, 3)[0])])

    def read_run(place: Path) -> str:
        if not (place / "run").exists():
            return "before"
        try:
            with Classifier.load(place / "run") as classifier:
                classifier.predict(keys=draw_keys(2, 4))
                return "before" if "taught" in classifier.labels else "after"
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    head = torch.nn.Linear(KEY_DIM, 3)
    metrics = [{"name": "loss", "value": 0.5}]
    result = Result(
        "illustration", "smoke", 0, {"seeds": [0]}, {}, 1.0, "python -m experiments run", metrics
    )

    def save_model(place: Path, seed: int) -> None:
        memory = mbpa.ExactMemory(10, KEY_DIM)
        memory.write(draw_keys(5, seed), [0, 1, 2, 0, 1])
        mbpa.MbPA(head=head, memory=memory, predictor=mbpa.Adapted()).save(place / "saved")

    def read_saved(place: Path) -> str:
        try:
            keys = mbpa.MbPA.load(place / "saved", head=head).memory.entries().keys
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        for seed, name in ((1, "before"), (2, "after")):
            if torch.equal(keys, draw_keys(5, seed)):
                return name
        return "it holds something else"

    def write_results(place: Path) -> None:
        """Write files as an experiment does: keep state, write a result, discard the state."""
        workspace = Workspace(place / "results" / "illustration" / ".unfinished" / "run")
        with workspace.alone():
            for step in range(2):
                workspace.save("state", {"step": step, "weights": torch.ones(3)})
            write_result(result, place / "results" / "illustration" / result.file_name)
            workspace.discard()

    def read_written(place: Path) -> str:
        try:
            workspace = Workspace(place / "results" / "illustration" / ".unfinished" / "run")
            workspace.load("state")
            found = read_results(place / "results")
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "before" if not found else "after" if found == [result] else "another result"

    return [
        Scenario("teach", lambda place: None, teach, read_run),
        Scenario("teach --again", make_taught, teach, read_run),
        Scenario(
            "save",
            lambda place: save_model(place, 1),
            lambda place: save_model(place, 2),
            read_saved,
        ),
        Scenario("run", lambda place: None, write_results, read_written),
    ]


# The journal, in processes without torch


def try_journal(folder: Path) -> dict[str, int]:
    """Try `learn` and `forget` of a journal, call by call; return counts."""
    counts = Counter[str]()
    for moment in _journal_process("power", folder):
        done, found = moment["acknowledged"], moment["found"]
        counts["cuts after a failed flush" if moment["failing"] else "cuts"] += 1
        if found not in (done, done + 1) or moment["not gone"]:
            raise BrokenPromiseError(f"journal: power cut: {moment}")
    for kind in ("full", "flush", "kill", "once", "dead", "short"):
        place = folder / kind
        place.mkdir()
        expected, *failures = _journal_process("faults", place, kind)
        for line in failures:
            done = line["acknowledged"]
            after = expected[min(done + 1, len(expected) - 1)]
            if line["found"] not in (expected[done], after) or line["settled"] != after:
                raise BrokenPromiseError(f"journal: {kind}: {line}")
        counts[f"{kind} at a call"] = len(failures) - 1
    return dict(counts)


def _journal_process(*arguments: object) -> list[Any]:
    command = [sys.executable, "-I", "-S", str(JOURNAL_PROGRAM), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise BrokenPromiseError(f"journal: {done.stderr.decode()}")
    return [json.loads(line) for line in done.stdout.splitlines()]


TRIAL = Trial(
    "power",
    "cut the power after every system call, and let every call fail, while something is written",
    add_arguments,
    run,
)
