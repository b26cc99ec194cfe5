"""`python -m benchmarks.journal`: the cost of a durable call on the disk of a folder.

Decides how large calls should be, and that forgotten examples are overwritten rather than deleted.
A call is done when its bytes are flushed, so this measures the disk more than the program.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import platform
import random
import re
import sqlite3
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.tables import DocumentTable, format_rows
from mbpa.serve.journal import Journal

TEXT, KEY = "a sentence of some forty characters, or so", bytes(4 * 384)
JOURNAL_CALLS = {
    "one text": [("label", TEXT, None)],
    "one text and its key of 384 numbers": [("label", TEXT, KEY)],
    "100 texts": [("label", TEXT, None)] * 100,
    "100 texts and their keys": [("label", TEXT, KEY)] * 100,
}
MANY = 15_000
DATABASES, ROWS = 20, 3_000  # databases in which rows are deleted, and rows per database


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.journal", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds per measurement")
    parser.add_argument("--folder", type=Path, default=Path(), help="folder on the disk to measure")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/journal.json"))
    parser.add_argument("--document", type=Path, default=Path("docs/serving.md"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        report = measure_journal(Path(folder), arguments.seconds)
    print(format_journal(report))
    JOURNAL_TABLE.publish(report, arguments.out, arguments.document)
    return 0


def measure_journal(folder: Path, seconds: float) -> dict[str, Any]:
    report: dict[str, Any] = {
        "machine": {"sqlite": sqlite3.sqlite_version, "python": platform.python_version()},
        "flush_ms": time_flush(folder / "flushed", seconds),
        "left_behind": [
            count_left_behind(folder / f"deleted {seed}", seed) for seed in range(DATABASES)
        ],
        "calls": {},
    }
    for name, call in JOURNAL_CALLS.items():
        print(f"{name} …", file=sys.stderr, flush=True)
        with Journal(folder / name) as journal:
            report["calls"][name] = _repeat(lambda j=journal, c=call: j.learn(c), seconds)
    print(f"{MANY} examples …", file=sys.stderr, flush=True)
    with Journal(folder / "many") as journal:
        journal.learn([("label", TEXT, KEY)] * MANY)
    start = time.perf_counter()
    with Journal(folder / "many") as journal:
        assert len(list(journal.examples())) == MANY
        report["opening_seconds"] = time.perf_counter() - start
        ids = itertools.count(1)
        report["calls"]["forget one"] = _repeat(lambda: journal.forget([next(ids)]), seconds)
        start = time.perf_counter()
        journal.forget(label="label")
        report["forgetting_seconds"] = time.perf_counter() - start
        assert not len(journal)
    return report


def time_flush(path: Path, seconds: float) -> float:
    """Return the median time to write and flush one page, in milliseconds."""
    with path.open("wb", buffering=0) as file:

        def flush() -> None:
            file.write(bytes(4096))
            os.fsync(file.fileno())

        return float(_repeat(flush, seconds / 3)["median_ms"])


def count_left_behind(path: Path, seed: int) -> int:
    """Count the deleted texts still readable in a database, despite SQLite's `secure_delete`."""
    draw, live = random.Random(seed), {}
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        for setting in ("secure_delete = ON", "journal_mode = MEMORY", "synchronous = OFF"):
            database.execute(f"PRAGMA {setting}")
        database.execute("CREATE TABLE examples (id INTEGER PRIMARY KEY, text BLOB)")
        for id in range(ROWS):
            live[id] = f"<{draw.getrandbits(60)}>".encode()
            text = live[id] + b"x" * draw.choice([0, 30, 900])
            database.execute("INSERT INTO examples VALUES (?, ?)", (id, text))
        for _ in range(60):
            for id in draw.sample(sorted(live), len(live) // 20):
                database.execute("DELETE FROM examples WHERE id = ?", (id,))
                del live[id]
    found = set(re.findall(rb"<\d+>", path.read_bytes()))
    assert found >= set(live.values())
    return len(found) - len(live)


def _repeat(call: Any, seconds: float) -> dict[str, float]:
    took: list[float] = []
    end = time.perf_counter() + seconds
    while not took or (time.perf_counter() < end and len(took) < MANY // 3):  # keeps some examples
        start = time.perf_counter()
        call()
        took.append(time.perf_counter() - start)
    return {"a_second": len(took) / sum(took), "median_ms": 1e3 * statistics.median(took)}


def format_journal(report: dict[str, Any]) -> str:
    rows = [["call", "answered per second", "median"]]
    for name, found in report["calls"].items():
        rows.append([name, f"{found['a_second']:.0f}", f"{found['median_ms']:.1f} ms"])
    note = (
        f"*On a disk that needs {report['flush_ms']:.1f} ms to write and flush a page. Opening, "
        f"checking and reading {MANY:,} examples with keys: {report['opening_seconds']:.2f} s; "
        f"forgetting all of them: {report['forgetting_seconds']:.1f} s. Of rows that SQLite "
        f"{report['machine']['sqlite']} deleted from {DATABASES} databases of {ROWS:,} rows, with "
        f"`secure_delete`, {sum(report['left_behind'])} texts could still be read from the files.*"
    )
    return f"{format_rows(rows)}\n{note}\n"


JOURNAL_TABLE = DocumentTable("journal", format_journal)


if __name__ == "__main__":
    sys.exit(main())
