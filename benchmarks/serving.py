"""`python -m benchmarks.serving`: throughput and latency of the service.

Decides the sizes of batches and queues, and shows how much teaching slows predictions down.
Server and clients share this machine. The server is `mbpa serve` in a process of its own. The
clients are coroutines here that send prepared bytes, so that they cost as little as possible.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import mbpa
from benchmarks.clients import (
    DIM,
    EXAMPLES,
    LABELS,
    PREDICTOR,
    Client,
    Server,
    Tally,
    lessons,
    make_prediction_requests,
    make_run,
    request,
    start_server,
)
from benchmarks.serving_tables import SERVING_TABLE
from mbpa.serve.classifier import Classifier

LESSONS = 10  # per second, during steady teaching
PREPARED = 500  # distinct lessons
SAMPLES = 60  # per soak
ASKING = 4  # clients that query during a soak
KEPT = 1000  # examples; if there are more, half as many are forgotten


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds per measurement")
    parser.add_argument(
        "--soak", type=float, default=0.0, help="seconds of teaching and forgetting"
    )
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/serving.json"))
    parser.add_argument("--document", type=Path, default=Path("docs/serving.md"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        make_run(run)
        report: dict[str, Any] = {"machine": describe_serving(), "starting": starting(run)}
        with start_server(run) as server:
            report |= asyncio.run(measure_rates(server, arguments.seconds))
            if arguments.soak:
                report["soak"] = asyncio.run(soak(server, run, arguments.soak))
    SERVING_TABLE.publish(report, arguments.out, arguments.document)
    return 0


# Measurements


def starting(run: Path) -> dict[str, float]:
    """Measure the seconds to load a run with all its examples, without the imports."""
    start = time.perf_counter()
    with Classifier.load(run) as classifier:
        loaded = time.perf_counter() - start
        assert len(classifier) == EXAMPLES
    print(f"starting    {EXAMPLES} examples in {loaded:.2f} s")
    return {"examples": EXAMPLES, "seconds": loaded}


async def measure_rates(server: Server, seconds: float) -> dict[str, Any]:
    bodies = make_prediction_requests()
    await closed_loop(server, bodies, 16, min(3.0, seconds))  # warm
    report: dict[str, Any] = {"idle": {}, "taught": {}, "taught_without_pause": {}}
    for clients in (1, 16, 64):
        quiet = await closed_loop(server, bodies, clients, seconds)
        async with teaching(server, pause=1 / LESSONS) as taught:
            busy = await closed_loop(server, bodies, clients, seconds)
        again = await closed_loop(server, bodies, clients, seconds)  # idle, before and after
        quiet.seconds += again.seconds
        quiet.statuses += again.statuses
        quiet.took += again.took
        quiet.server_cpu += again.server_cpu
        report["idle"][str(clients)] = quiet.summary()
        report["taught"][str(clients)] = busy.summary() | {"lessons": taught.summary()}
        show(f"{clients} clients, idle", quiet)
        show(f"{clients} clients, taught", busy)
    async with teaching(server, pause=0.0) as taught:
        busy = await closed_loop(server, bodies, 16, seconds)
    report["taught_without_pause"]["16"] = busy.summary() | {"lessons": taught.summary()}
    show("16 clients, taught without pause", busy)
    held = report["idle"]["64"]["requests_a_second"]
    crowd = await open_loop(server, bodies, 3 * held, seconds)
    after = await closed_loop(server, bodies, 16, seconds)
    report["overload"] = {
        "offered_a_second": 3 * held,
        "during": crowd.summary(),
        "after": after.summary(),
    }
    show("three times the load", crowd)
    show("16 clients, after it", after)
    return report


async def closed_loop(server: Server, bodies: list[bytes], clients: int, seconds: float) -> Tally:
    """Run clients that each wait for a response before they send again."""
    tally, end = Tally(), time.perf_counter() + seconds

    async def one(offset: int) -> None:
        async with Client(server) as client:
            for body in itertools.islice(itertools.cycle(bodies), offset, None):
                start = time.perf_counter()
                if start >= end:
                    return
                status, _ = await client.send(body)
                tally.count(status, time.perf_counter() - start)

    start, before = time.perf_counter(), server.cpu_seconds
    await asyncio.gather(*(one(7 * i) for i in range(clients)))
    tally.took, tally.server_cpu = time.perf_counter() - start, server.cpu_seconds - before
    return tally


async def open_loop(server: Server, bodies: list[bytes], rate: float, seconds: float) -> Tally:
    """Send requests at random times, independently of the responses to earlier ones.

    Each request waits for one of many connections to be free.
    """
    tally, chance = Tally(), random.Random(0)
    free: asyncio.Queue[Client] = asyncio.Queue()
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(600):
            free.put_nowait(await stack.enter_async_context(Client(server)))

        async def one(body: bytes, due: float) -> None:
            client = await free.get()
            status, _ = await client.send(body)
            tally.count(status, time.perf_counter() - due)
            free.put_nowait(client)

        start, due, tasks = time.perf_counter(), 0.0, []
        before = server.cpu_seconds
        for body in itertools.cycle(bodies):
            due += chance.expovariate(rate)
            if due > seconds:
                break
            await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
            tasks.append(asyncio.create_task(one(body, start + due)))
        await asyncio.gather(*tasks)
        tally.took, tally.server_cpu = time.perf_counter() - start, server.cpu_seconds - before
    return tally


@contextlib.asynccontextmanager
async def teaching(server: Server, pause: float) -> AsyncIterator[Tally]:
    """Teach in the background, one call after the other.

    The lessons are prepared in advance: the querying clients share this process and would have to
    wait.
    """
    tally, bodies = Tally(), itertools.cycle(list(itertools.islice(lessons(), PREPARED)))

    async def teach() -> None:
        async with Client(server) as client:
            while True:
                start = time.perf_counter()
                status, answer = await client.send(next(bodies))
                assert status in (200, 429), answer
                tally.count(status, time.perf_counter() - start)
                await asyncio.sleep(max(0.0, pause - (time.perf_counter() - start)))

    start = time.perf_counter()
    task = asyncio.create_task(teach())
    try:
        yield tally
    finally:
        tally.took = time.perf_counter() - start
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def soak(server: Server, run: Path, seconds: float) -> dict[str, Any]:
    """Teach and forget continuously while other clients query; measure the server's resources."""
    samples: list[dict[str, float]] = []
    counts = Counter(lessons=0, taught=0, forgotten=0)
    start = time.perf_counter()

    async def teach() -> None:
        kept: list[int] = []
        async with Client(server) as client:
            for body in lessons():
                if time.perf_counter() - start > seconds:
                    return
                kept += await _send_until_answered(client, body)
                counts["lessons"] += 1
                if len(kept) > KEPT:
                    gone, kept = kept[: KEPT // 2], kept[KEPT // 2 :]
                    body = request("/forget", {"ids": gone})
                    counts["forgotten"] += len(await _send_until_answered(client, body))
                counts["taught"] = counts["forgotten"] + len(kept)

    async def watch() -> None:
        with tqdm(total=SAMPLES, desc=f"soak of {seconds:.0f} s", file=sys.stderr) as bar:
            for number in range(SAMPLES + 1):
                due = start + number * seconds / SAMPLES
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                samples.append(
                    _measure_held(server, run) | {"second": round(time.perf_counter() - start)}
                )
                bar.set_postfix_str(f"{samples[-1]['resident_mb']:.0f} MB", refresh=False)
                bar.update(bool(number))

    asked, _, _ = await asyncio.gather(
        closed_loop(server, make_prediction_requests(), ASKING, seconds), teach(), watch()
    )
    show(f"{ASKING} clients, soak", asked)
    return {
        "seconds": seconds,
        **counts,
        "kept_at_most": KEPT + 3,
        "predictions": asked.summary(),
        "samples": samples,
    }


async def _send_until_answered(client: Client, body: bytes) -> list[int]:
    """Send a request, retrying while the server is too busy; return the ids in the response."""
    while True:
        status, answer = await client.send(body)
        if status == 200:
            ids: list[int] = json.loads(answer)["ids"]
            return ids
        assert status == 429, answer
        await asyncio.sleep(1)


def _measure_held(server: Server, run: Path) -> dict[str, float]:
    files = sum(path.stat().st_size for path in run.glob("journal*"))
    return {"resident_mb": server.resident_bytes / 1e6, "journal_mb": files / 1e6}


def show(what: str, tally: Tally) -> None:
    found = tally.summary()
    print(
        f"{what:34} {found['requests_a_second']:7.0f} per second, "
        f"median {found['median_ms']:.1f} ms, 99% {found['p99_ms']:.1f} ms, "
        f"CPU {found['server_cpu_ms_a_request']:.2f} ms, {found['statuses']}",
        flush=True,
    )


def describe_serving() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "mbpa": mbpa.__version__,
        "memories": EXAMPLES,
        "labels": LABELS,
        "key_dim": DIM,
        "predictor": repr(PREDICTOR),
        "lessons_a_second": LESSONS,
    }


if __name__ == "__main__":
    sys.exit(main())
