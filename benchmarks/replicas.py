"""`python -m benchmarks.replicas`: several services around one PostgreSQL database.

Decides whether replicas are worth their database: how soon a lesson is known elsewhere, how many
lessons per second they take, whether three of them answer as much as one on the same cores, and how
fast one starts. PostgreSQL runs on the same machine, with flushes.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import multiprocessing
import platform
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.clients import DIM, EXAMPLES, LABELS, make_run
from benchmarks.tables import DocumentTable, format_rows
from mbpa.serve.answers import Lesson
from mbpa.serve.classifier import Classifier
from mbpa.serve.journal import Journal
from mbpa.serve.journal_copy import copy_to_database
from mbpa.serve.run_info import JOURNAL_FILE
from mbpa.serve.shared_journal import SharedJournal
from reliability.postgres import PostgresServer
from reliability.replicas import Replica, run_replicas

MANY, CLIENTS, PREDICTING_CLIENTS, REPLICAS = 100_000, 4, 8, 3
LESSONS_KNOWN, PAUSE_S = 500, 0.01
BODIES = 100  # different requests, made before the clock starts


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replicas", description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds per measurement")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/replicas.json"))
    parser.add_argument("--document", type=Path, default=Path("docs/replicas.md"))
    arguments = parser.parse_args()
    report = measure(arguments.seconds)
    print(format_report(report))
    REPLICAS_TABLE.publish(report, arguments.out, arguments.document)
    return 0


def measure(seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        make_run(run)
        with PostgresServer(is_durable=True) as database:
            copy_to_database(run, database.url)
            ((version,),) = database.execute("SHOW server_version")
            report: dict[str, Any] = {
                "machine": {"postgresql": version, "python": platform.python_version()},
                "known_elsewhere": measure_known_elsewhere(run, database.url),
            }
            for count in (1, REPLICAS):
                with run_replicas(run, [database.url] * count) as replicas:
                    report[str(count)] = {
                        "predictions": load_replicas(replicas, "/predict", seconds),
                        "lessons": load_replicas(replicas, "/learn", seconds),
                    }
        report["starting"] = measure_start(run)
    return report


def measure_known_elsewhere(run: Path, url: str) -> dict[str, float]:
    """Measure from the return of the commit to the memory of a replica in another process.

    Both processes read the same clock.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_follow, args=(run, url, theirs))
    process.start()
    try:
        assert ours.recv() == "ready"
        key = torch.nn.functional.normalize(torch.ones(DIM), dim=0)
        written = {}
        with Classifier.load(run, database=url) as classifier:
            rows = [("known", "a text", key.numpy().astype("<f4").tobytes())]
            for _ in range(LESSONS_KNOWN):
                classifier.journal.learn(rows)
                now = time.monotonic()
                classifier.follow()
                written[classifier.position] = now
                time.sleep(PAUSE_S)
            classifier.forget(label="known")
        ours.send("stop")
        applied = ours.recv()
    finally:
        process.join(10)
        process.kill()
    took = sorted(applied[position] - at for position, at in written.items() if position in applied)
    assert len(took) > 0.9 * LESSONS_KNOWN  # several at once have one time
    return {
        "lessons": len(took),
        "median_ms": 1000 * statistics.median(took),
        "p99_ms": 1000 * took[int(0.99 * len(took))],
    }


def _follow(run: Path, url: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    applied = {}
    with Classifier.load(run, database=url) as classifier:
        journal = classifier.journal
        assert isinstance(journal, SharedJournal)
        journal.wait_for_news(0.0)
        pipe.send("ready")
        while not pipe.poll():
            journal.wait_for_news(0.2)
            classifier.follow()
            applied[classifier.position] = time.monotonic()
    pipe.send(applied)


def load_replicas(replicas: list[Replica], path: str, seconds: float) -> dict[str, float]:
    """Send requests from several clients for some seconds; return rate and latency."""
    took: list[float] = []
    draw = random.Random(0)
    bodies = [json.dumps(_draw_body(draw, path)) for _ in range(BODIES)]
    end = time.monotonic() + seconds
    count = CLIENTS if path == "/learn" else PREDICTING_CLIENTS

    def ask(number: int) -> None:
        replica = replicas[number % len(replicas)]
        connection = http.client.HTTPConnection("127.0.0.1", replica.port, timeout=30)
        for body in itertools.islice(itertools.cycle(bodies), 7 * number, None):
            start = time.monotonic()
            if start > end:
                break
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
            assert answer.status == 200, content
            took.append(time.monotonic() - start)
        connection.close()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rate = len(took) / (time.monotonic() - start)
    replicas[0].ask("POST", "/forget", {"label": "taught"})
    took.sort()
    return {
        "clients": count,
        "per_second": rate,
        "median_ms": 1000 * statistics.median(took),
        "p99_ms": 1000 * took[int(0.99 * len(took))],
    }


def _draw_body(draw: random.Random, path: str) -> Any:
    numbers = [draw.gauss(0, 1) for _ in range(DIM)]
    norm = sum(number**2 for number in numbers) ** 0.5
    embedding = [number / norm for number in numbers]
    if path == "/predict":
        return {"embeddings": [embedding]}
    return {"examples": [{"label": "taught", "embedding": embedding}]}


def measure_start(run: Path) -> dict[str, float]:
    """Measure the seconds to load many examples from a database, without the imports."""
    keys = torch.nn.functional.normalize(torch.randn(MANY - EXAMPLES, DIM), dim=1)
    with Journal(run / JOURNAL_FILE) as journal:
        for start in range(0, len(keys), 1000):
            journal.learn(
                [
                    (f"label {i % LABELS:03}", f"text {start + i}", key.numpy().tobytes())
                    for i, key in enumerate(keys[start : start + 1000])
                ]
            )
    with PostgresServer(is_durable=True) as database:
        start_s = time.perf_counter()
        copy_to_database(run, database.url)
        copied_s = time.perf_counter() - start_s
        start_s = time.perf_counter()
        with Classifier.load(run, database=database.url) as classifier:
            loaded_s = time.perf_counter() - start_s
            assert len(classifier) == MANY
            start_s = time.perf_counter()
            classifier.learn([Lesson("new", "a text", keys[0])])
            learnt_s = time.perf_counter() - start_s
    return {"examples": MANY, "seconds": loaded_s, "copy_s": copied_s, "lesson_s": learnt_s}


def format_report(report: dict[str, Any]) -> str:
    rows = [["", "one replica", f"{REPLICAS} replicas"]]
    for name in ("predictions", "lessons"):
        found = [report[str(count)][name] for count in (1, REPLICAS)]
        rows.append([f"{name} per second", *(f"{each['per_second']:.0f}" for each in found)])
        rows.append(["median", *(f"{each['median_ms']:.1f} ms" for each in found)])
        rows.append(["99%", *(f"{each['p99_ms']:.1f} ms" for each in found)])
    known, start = report["known_elsewhere"], report["starting"]
    return (
        f"{format_rows(rows)}\n*{PREDICTING_CLIENTS} clients predict, {CLIENTS} teach one example "
        f"per call, with embeddings; {EXAMPLES:,} memories. Clients, replicas and PostgreSQL "
        f"{report['machine']['postgresql']} (with flushes) on 2 cores.*\n\n"
        f"From the commit to the memory of another replica: median {known['median_ms']:.1f} ms, "
        f"99% {known['p99_ms']:.1f} ms. Starting with {start['examples']:,} examples of {DIM} "
        f"numbers: {start['seconds']:.1f} s; copying them: {start['copy_s']:.1f} s.\n"
    )


REPLICAS_TABLE = DocumentTable("replicas", format_report)


if __name__ == "__main__":
    sys.exit(main())
