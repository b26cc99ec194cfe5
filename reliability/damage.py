"""Damage every file of a run and of a checkpoint: all damage is detected or does no harm.

Detected: reading raises `RunError`, `CheckpointError` or `JournalError` with a message that names
the file. Harmless: the contents read are equal to the original, to the bit, and the journal assigns
the same next id. Anything else breaks the promise: other contents (unnoticed), an error that names
another file (misnamed), another exception (raised), a crash or hang (died), or more memory than
twice the file (allocated).

Every file is cut at every length (large files at those chosen by `mutation.list_truncations`) and
gets `--mutations` random mutations, divided equally among the kinds in `mutation.KINDS`. The file's
own reader checks these. `--whole` more per file are checked by loading the classifier and comparing
its answers. The damage of case N depends only on the seed, the file's name and size, and N.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
import struct
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from reliability.fuzz import make_directory, silence
from reliability.fuzzing.isolation import Announce, Death, Work, run_isolated
from reliability.fuzzing.limits import MemoryMeter, limit_address_space
from reliability.mutation import KINDS, list_truncations, mutate_file
from reliability.trial import BrokenPromiseError, Trial

RUN_JSON, JOURNAL, MODEL = "run.json", "journal.sqlite", "model"
GOOD = ("detected", "harmless")
IMPOSSIBLE = "impossible"  # no damage of this kind changes the file: it is one byte, or all zeros
SLACK_BYTES = 16 << 20  # allowed besides twice the file: page caches, objects, torch's caches
EXTRA_ADDRESS_BYTES = 1 << 30
CASES_PER_PROCESS = 5_000
SHOWN_FAILURES = 5  # per kind and outcome of a file
KEY_DIM, LABELS, EXAMPLES, QUERIES = 16, 6, 60, 8

Read = Callable[[Path], Any]
"""Reads a directory and returns its contents for comparison."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A file to damage, and how to read it.

    Args:
        name: name in the report.
        files: contents of a directory, by path; all of them exist before every reading.
        damaged: path of the file to damage.
        read: reads the directory.
        errors: returns the types of exceptions by which damage may be reported.
        named: text that an error message must contain.
        keeps: whether reading leaves the files unchanged; if not, all are rewritten each time.
    """

    name: str
    files: dict[str, bytes]
    damaged: str
    read: Read
    errors: Callable[[], tuple[type[Exception], ...]]
    named: str
    keeps: bool = True

    @property
    def data(self) -> bytes:
        return self.files[self.damaged]


@dataclass
class Tally:
    """Outcomes by kind of damage, and the first failures."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[tuple[int, str, str, str]] = field(default_factory=list)
    """Case, kind, outcome and details of each."""
    largest_growth_bytes: int = 0

    def add(self, case: int, kind: str, outcome: str, details: str) -> None:
        counts = self.counts.setdefault(kind, Counter())
        counts[outcome] += 1
        if is_broken(outcome) and counts[outcome] <= SHOWN_FAILURES:
            self.failures.append((case, kind, outcome, details))

    def merge(self, other: Tally) -> None:
        for case, kind, outcome, details in other.failures:
            known = self.counts.get(kind, Counter())[outcome]
            if known < SHOWN_FAILURES:
                self.failures.append((case, kind, outcome, details))
        for kind, counts in other.counts.items():
            self.counts[kind] = self.counts.get(kind, Counter()) + counts
        self.largest_growth_bytes = max(self.largest_growth_bytes, other.largest_growth_bytes)

    @property
    def broken(self) -> int:
        """Number of cases that were neither detected nor harmless."""
        return sum(
            count
            for counts in self.counts.values()
            for outcome, count in counts.items()
            if is_broken(outcome)
        )

    def as_figures(self) -> dict[str, Any]:
        counts = {kind: dict(sorted(counts.items())) for kind, counts in self.counts.items()}
        return {
            **counts,
            "largest_growth_mib": round(self.largest_growth_bytes / 2**20, 2),
            "failures": [
                f"case {case}, {kind}: {outcome}: {details.strip().splitlines()[-1]}"
                for case, kind, outcome, details in self.failures
            ],
        }


def is_broken(outcome: str) -> bool:
    return outcome not in (*GOOD, IMPOSSIBLE)


# Cases


@dataclass(frozen=True)
class Cases:
    """The cases of one subject, by number: first truncations, then mutations.

    Args:
        lengths: lengths to cut the file to.
        mutations: number of mutations, of all kinds together.
    """

    subject: Subject
    lengths: Sequence[int]
    mutations: int
    seed: int

    def __len__(self) -> int:
        return len(self.lengths) + self.mutations

    def make(self, number: int) -> tuple[str, bytes]:
        """Return the kind and the file content of a case."""
        if number < len(self.lengths):
            return "truncated", self.subject.data[: self.lengths[number]]
        kind = list(KINDS)[number % len(KINDS)]
        random = Random(f"{self.seed} {self.subject.name} {number}")
        return kind, mutate_file(random, self.subject.data, kind)


class Checker:
    """Writes damaged files into a directory and reads it.

    Args:
        directory: an empty directory, preferably in memory.
    """

    def __init__(self, subject: Subject, directory: Path) -> None:
        self._subject, self._directory = subject, directory
        self._errors = subject.errors()
        self._meter = MemoryMeter()
        self._restore()
        self._expected = subject.read(directory)  # also triggers lazy loading
        self._write(subject.data)
        if subject.read(directory) != self._expected:
            raise AssertionError(f"{subject.name} is not read the same way twice")

    def check(self, data: bytes) -> tuple[str, str, int]:
        """Return the outcome, details, and the growth of memory in bytes."""
        subject = self._subject
        self._write(data)
        self._meter.start()
        outcome, details = self._read()
        growth = self._meter.measure_growth_bytes()
        if outcome in GOOD and growth > 2 * len(subject.data) + SLACK_BYTES:
            outcome, details = "allocated", f"{growth:,} bytes for {len(subject.data):,}"
        return outcome, details, growth

    def close(self) -> None:
        self._meter.close()

    def _read(self) -> tuple[str, str]:
        try:
            found = self._subject.read(self._directory)
        except self._errors as error:
            is_named = self._subject.named in str(error)
            return ("detected" if is_named else "misnamed"), str(error)
        except Exception:
            return "raised", traceback.format_exc()
        if found == self._expected:
            return "harmless", ""
        return "unnoticed", describe_difference(found, self._expected)

    def _write(self, data: bytes) -> None:
        if not self._subject.keeps:
            self._restore()
        (self._directory / self._subject.damaged).write_bytes(data)

    def _restore(self) -> None:
        files = self._subject.files
        for path in self._directory.iterdir():
            if path.is_file() and path.name not in files:
                path.unlink()
        for name, content in files.items():
            path = self._directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def describe_difference(found: Any, expected: Any, where: str = "") -> str:
    """Return one line on the first difference between two contents."""
    if isinstance(found, tuple | list) and isinstance(expected, tuple | list):
        for place, (one, other) in enumerate(zip(found, expected, strict=False)):
            if one != other:
                return describe_difference(one, other, f"{where}[{place}]")
        return f"{where}: read {len(found)} parts, were {len(expected)}"
    return f"{where}: read {found!r:.100}, was {expected!r:.100}"


def make_work(cases: Cases, start: int, stop: int, parent: Path) -> Work:
    """Return the work of one process: check the cases from `start` to `stop`."""

    def work(announce: Announce) -> Tally:
        with silence(), make_directory(parent) as directory:
            checker = Checker(cases.subject, directory)
            limit_address_space(EXTRA_ADDRESS_BYTES)
            return check_cases(cases, checker, range(start, stop), announce)

    return work


def check_cases(
    cases: Cases, checker: Checker, numbers: range, announce: Announce = lambda data: None
) -> Tally:
    """Check cases in this process and count their outcomes."""
    tally = Tally()
    for number in numbers:
        kind, data = cases.make(number)
        announce(struct.pack("<Q", number))
        if data == cases.subject.data:
            tally.add(number, kind, IMPOSSIBLE, "")
            continue
        outcome, details, growth = checker.check(data)
        tally.add(number, kind, outcome, details)
        tally.largest_growth_bytes = max(tally.largest_growth_bytes, growth)
    checker.close()
    return tally


def check_all(cases: Sequence[Cases], jobs: int) -> dict[str, Tally]:
    """Check every case of every subject in processes; count a case that kills one as "died"."""
    tallies = {each.subject.name: Tally() for each in cases}
    queue = [
        (each, start, min(start + CASES_PER_PROCESS, len(each)))
        for each in cases
        for start in range(0, len(each), CASES_PER_PROCESS)
    ]

    with make_directory() as parent:

        def take() -> Iterator[tuple[Any, Work]]:
            while queue:
                each, start, stop = queue.pop(0)
                yield (each, start, stop), make_work(each, start, stop, parent)

        while queue:
            for (each, start, stop), result in run_isolated(take(), jobs):
                tally = tallies[each.subject.name]
                if isinstance(result, Tally):
                    tally.merge(result)
                    continue
                assert isinstance(result, Death)
                if not result.announced:
                    raise RuntimeError(f"{each.subject.name}: {result.reason} before any case")
                number = start + result.announced - 1
                kind, _ = each.make(number)
                tally.add(number, kind, "died", result.reason)
                # The results of the dead process are lost, so its other cases run again.
                parts = ((each, start, number), (each, number + 1, stop))
                queue += [part for part in parts if part[1] < part[2]]
    return tallies


# Subjects


def make_subjects() -> list[Subject]:
    """Make subjects from a closed run, from one whose process was killed, and a checkpoint."""
    from reliability.fuzzing.file_targets import write_checkpoint
    from reliability.fuzzing.runs import write_random_run

    with make_directory() as directory:
        run, killed, saved = directory / "run", directory / "killed", directory / "saved"
        write_random_run(run, labels=LABELS, examples=EXAMPLES, key_dim=KEY_DIM, has_rows=True)
        teach(run / JOURNAL)
        shutil.copytree(run, killed)
        teach_and_die(killed / JOURNAL)
        write_checkpoint(saved)
        closed_files, killed_files, saved_files = map(read_files, (run, killed, saved))
    return [
        *make_file_subjects(closed_files, saved_files),
        *make_journal_subjects(closed_files, killed_files),
    ]


def make_file_subjects(run: dict[str, bytes], saved: dict[str, bytes]) -> list[Subject]:
    """Return the subjects that are read without a journal."""
    subjects = [Subject(RUN_JSON, run, RUN_JSON, read_info, list_run_errors, RUN_JSON)]
    for folder, files, read in (
        (f"{MODEL}/", run, read_model_directory),
        ("checkpoint/", {f"checkpoint/{name}": data for name, data in saved.items()}, read_saved),
    ):
        for path in sorted(files):
            if path.startswith(folder) and path.endswith((".json", ".safetensors")):
                named = Path(path).name
                subjects.append(Subject(path, files, path, read, list_checkpoint_errors, named))
    return subjects


def make_journal_subjects(run: dict[str, bytes], killed: dict[str, bytes]) -> list[Subject]:
    """Return subjects for the database and its lock and, after a kill, also for its log."""
    alone = {path: data for path, data in run.items() if path.startswith(JOURNAL)}
    left = {path: data for path, data in killed.items() if path.startswith(JOURNAL)}
    parts = [
        (JOURNAL, alone, JOURNAL),
        (f"{JOURNAL}.lock", alone, f"{JOURNAL}.lock"),
        (f"{JOURNAL} after a kill", left, JOURNAL),
        (f"{JOURNAL}-wal after a kill", left, f"{JOURNAL}-wal"),
        (f"{JOURNAL}.lock after a kill", left, f"{JOURNAL}.lock"),
    ]
    return [
        Subject(name, files, path, read_journal, list_journal_errors, JOURNAL, keeps=False)
        for name, files, path in parts
        if files.get(path)
    ]


def make_whole_subjects(subjects: Sequence[Subject], run: dict[str, bytes]) -> list[Subject]:
    """Return the subjects of a run again, but read by loading the classifier."""
    whole = []
    for subject in subjects:
        if subject.read is read_saved:
            continue  # not part of a run
        files = {**run, **subject.files}
        whole.append(
            dataclasses.replace(
                subject,
                name=f"{subject.name}, whole run",
                files=files,
                read=read_classifier,
                errors=list_all_errors,
                keeps=False,
            )
        )
    return whole


def read_files(directory: Path) -> dict[str, bytes]:
    """Return the contents of all files below a directory, by relative path."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def teach(path: Path) -> None:
    """Fill a journal with named calls, forgotten examples, pictures and restored examples."""
    from mbpa.serve.journal import Journal

    with Journal(path) as journal:
        for call in range(3):
            journal.learn(make_rows(call), f"request {call}")
        journal.forget([2, 3])
        journal.learn([("label 000", "text 1", make_key(1))], restoring=True)


def teach_and_die(path: Path) -> None:
    """Teach in another process and kill it, so that its log remains."""
    from mbpa.serve.journal import Journal

    pid = os.fork()
    if pid == 0:
        try:
            journal = Journal(path)
            for call in range(3, 6):
                journal.learn(make_rows(call), f"request {call}")
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)


def make_rows(call: int) -> list[tuple[str, str | bytes | None, bytes | None]]:
    """Return the examples of a call: a text, the file of a picture, and a key alone."""
    said: tuple[str | bytes | None, ...] = (f"taught {call}", bytes([call]) * 300, None)
    return [(f"new {part % 2}", each, make_key(10 * call + part)) for part, each in enumerate(said)]


def make_key(number: int) -> bytes:
    """Return a key of unit norm."""
    random = Random(number)
    values = [random.gauss(0, 1) for _ in range(KEY_DIM)]
    norm = sum(value * value for value in values) ** 0.5
    return struct.pack(f"<{KEY_DIM}f", *(value / norm for value in values))


# Readers


def read_info(directory: Path) -> Any:
    from mbpa.serve.run_info import RunInfo

    return tuple(vars(RunInfo.read(directory)).items())


def read_model_directory(directory: Path) -> Any:
    return read_saved(directory, MODEL)


def read_saved(directory: Path, name: str = "checkpoint") -> Any:
    from mbpa.checkpoint import load_checkpoint
    from reliability.fuzzing.file_targets import flatten_tensors

    found = load_checkpoint(directory / name)
    return found.description, flatten_tensors(found)


def read_journal(directory: Path) -> Any:
    """Return the contents of a journal, then the id of one more example."""
    from mbpa.serve.journal import InputError, Journal, JournalError

    with Journal(directory / JOURNAL) as journal:
        if journal.read_only is not None:
            raise JournalError(journal.read_only)
        requests: list[Any] = []
        for call in range(7):
            try:
                requests.append(journal.find_repeated(make_rows(call), f"request {call}"))
            except InputError:
                requests.append("refused")
        state = journal.change, len(journal), journal.labels(), sorted(journal.restored_ids)
        examples = list(journal.examples())
        plain = list(journal.examples(with_pictures=False))
        ids = journal.learn([("probe", "probe", None)])
        return *state, examples, plain, requests, ids, list(journal.examples())


def read_classifier(directory: Path) -> Any:
    """Return the answers of a run, and the contents it reports."""
    import torch

    from mbpa.serve.classifier import Classifier
    from mbpa.serve.journal import JournalError

    with Classifier.load(directory) as classifier:
        if classifier.journal.read_only is not None:
            raise JournalError(classifier.journal.read_only)
        keys = torch.frombuffer(
            bytearray(b"".join(make_key(1000 + number) for number in range(QUERIES))),
            dtype=torch.float32,
        ).reshape(QUERIES, KEY_DIM)
        answers = classifier.predict(keys=keys) if classifier.key_dim == KEY_DIM else []
        reasons = classifier.explain(keys=keys) if classifier.key_dim == KEY_DIM else []
        return answers, reasons, classifier.labels, classifier.stats(), classifier.examples()


def list_run_errors() -> tuple[type[Exception], ...]:
    from mbpa.errors import RunError

    return (RunError,)


def list_checkpoint_errors() -> tuple[type[Exception], ...]:
    from mbpa.errors import CheckpointError

    return (CheckpointError,)


def list_journal_errors() -> tuple[type[Exception], ...]:
    from mbpa.serve.journal import JournalError

    return (JournalError,)


def list_all_errors() -> tuple[type[Exception], ...]:
    return (*list_run_errors(), *list_checkpoint_errors(), *list_journal_errors())


# The trial


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mutations", type=int, default=10_000, help="mutations per file")
    parser.add_argument(
        "--whole", type=int, default=1_000, help="mutations per file that a classifier loads"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the damage")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    parser.add_argument("--only", metavar="FILE", help="damage only files whose name contains this")
    parser.add_argument("--case", type=int, help="with --only: check this case and print details")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    cases = make_cases(arguments.mutations, arguments.whole, arguments.seed)
    if arguments.only is not None:
        cases = [each for each in cases if arguments.only in each.subject.name]
    if not cases:
        raise SystemExit(f"no file is called {arguments.only}")
    if arguments.case is not None:
        return check_one(cases[0], arguments.case)
    figures: dict[str, Any] = {"seed": arguments.seed, "jobs": arguments.jobs, "files": {}}
    broken = []
    for each in cases:
        start = time.perf_counter()
        tally = check_all([each], arguments.jobs)[each.subject.name]
        seconds = time.perf_counter() - start
        figures["files"][each.subject.name] = {
            "bytes": len(each.subject.data),
            "cases_per_second": round(len(each) / seconds, 1),
            **tally.as_figures(),
        }
        shown = json.dumps(figures["files"][each.subject.name])
        print(each.subject.name, shown, file=sys.stderr, flush=True)
        if tally.broken:
            broken.append(f"{each.subject.name}: {tally.broken} of {len(each)} cases")
    if broken:
        print(json.dumps(figures, indent=1))
        raise BrokenPromiseError("neither detected nor harmless: " + "; ".join(broken))
    return figures


def make_cases(mutations: int, whole: int, seed: int) -> list[Cases]:
    """Return the cases of every file, first for its own reader and then for a classifier."""
    subjects = make_subjects()
    cases = [
        Cases(
            each, list_truncations(len(each.data), Random(f"{seed} {each.name}")), mutations, seed
        )
        for each in subjects
    ]
    if whole:
        files = next(each.files for each in subjects if each.name == RUN_JSON)
        cases += [Cases(each, (), whole, seed) for each in make_whole_subjects(subjects, files)]
    return cases


def check_one(cases: Cases, number: int) -> dict[str, Any]:
    """Check one case in this process and return its details."""
    kind, data = cases.make(number)
    with make_directory() as directory:
        outcome, details, growth = Checker(cases.subject, directory).check(data)
    told = f"{cases.subject.name}, case {number}, {kind}: {outcome}: {details}"
    if is_broken(outcome):
        raise BrokenPromiseError(told)
    return {"case": told, "growth_mib": round(growth / 2**20, 2)}


TRIAL = Trial(
    name="damage",
    summary="damage every file of a run: all damage is detected or harmless",
    add_arguments=add_arguments,
    run=run,
)
