"""`python -m benchmarks.serving`: how many requests a service takes, and how long each waits.

Decides: batch and queue sizes, what the model's thread may cost, whether teaching may be noticed.
Server and client share this machine. The server is `mbpa serve` in a process of its own; the
clients are coroutines here that send prepared bytes, so that they cost as little as can be.
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
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import mbpa
from mbpa.serve.classifier import Classifier
from mbpa.serve.run import RunInfo, write_run

EXAMPLES, LABELS, DIM = 15_000, 150, 384
PREDICTOR = mbpa.Adapted(mbpa.Gradient(lr=10.0, steps=20), k=20)
LESSONS = 10  # a second, while it is taught at a steady pace
BODIES = 500  # different requests


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument(
        "--soak", type=float, default=0.0, help="seconds of teaching and forgetting"
    )
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/serving.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        make_run(run)
        report: dict[str, Any] = {"machine": machine(), "starting": starting(run)}
        with served(run) as server:
            report |= asyncio.run(measured(server, arguments.seconds))
            if arguments.soak:
                report["soak"] = asyncio.run(soaked(server, run, arguments.soak))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"written to {arguments.out}")
    return 0


# The run and its server


def make_run(directory: Path) -> None:
    """Places on the sphere, examples around them, a head that knows the places."""
    generator = torch.Generator().manual_seed(0)
    places = torch.nn.functional.normalize(torch.randn(LABELS, DIM, generator=generator), dim=1)
    numbers = torch.arange(EXAMPLES) % LABELS
    keys = near(places[numbers], generator)
    head = torch.nn.Linear(DIM, LABELS)
    with torch.no_grad():
        head.weight.copy_(20 * (places - places.mean(0)))
        head.bias.zero_()
    names = tuple(f"label {i:03}" for i in range(LABELS))
    info = RunInfo(
        key_dim=DIM, labels=names, trained_examples=EXAMPLES, threshold=0.5, encoder=None
    )
    examples = [(names[number], None) for number in numbers.tolist()]
    write_run(directory, info, head, PREDICTOR, examples, keys)


def near(places: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Keys about as far from their place as a sentence from its intent."""
    noise = torch.randn(places.shape, generator=generator) / DIM**0.5
    return torch.nn.functional.normalize(places + noise, dim=1)


def starting(run: Path) -> dict[str, float]:
    """Seconds until a run with all its examples can answer, without the imports."""
    start = time.perf_counter()
    with Classifier.load(run) as classifier:
        loaded = time.perf_counter() - start
        assert len(classifier) == EXAMPLES
    print(f"starting    {EXAMPLES} examples in {loaded:.2f} s")
    return {"examples": EXAMPLES, "seconds": loaded}


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen[str]
    host: str
    port: int

    @property
    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def served(run: Path) -> Iterator[Server]:
    command = [sys.executable, "-m", "mbpa.cli", "serve", str(run), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if "serving on http://" in line:
                host, port = line.split("http://")[1].split("/")[0].split(":")
                yield Server(process, host, int(port))
                break
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        process.stdout.close()


# Clients


class Client:
    """One connection, over which requests go one after the other."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def __aenter__(self) -> Client:
        self._reader, self._writer = await asyncio.open_connection(
            self._server.host, self._server.port
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def send(self, request: bytes) -> tuple[int, bytes]:
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        status = int(head[9:12])
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        return status, await self._reader.readexactly(length)


def request(path: str, content: Any) -> bytes:
    body = json.dumps(content).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def predictions() -> list[bytes]:
    generator = torch.Generator().manual_seed(1)
    places = torch.nn.functional.normalize(torch.randn(BODIES, DIM, generator=generator), dim=1)
    return [request("/predict", {"embeddings": [row]}) for row in _rounded(places)]


def lessons() -> Iterator[bytes]:
    """Three examples of a label, again and again, of labels old and new."""
    generator = torch.Generator().manual_seed(2)
    for number in itertools.count():
        keys = torch.nn.functional.normalize(torch.randn(3, DIM, generator=generator), dim=1)
        label = f"label {number % LABELS:03}" if number % 2 else f"new {number % 20}"
        yield request(
            "/learn", {"examples": [{"label": label, "embedding": row} for row in _rounded(keys)]}
        )


def _rounded(keys: torch.Tensor) -> list[list[float]]:
    return [[round(number, 7) for number in row] for row in keys.tolist()]


@dataclass
class Tally:
    """What came of many requests."""

    seconds: list[float] = field(default_factory=list)
    """Of those that were answered."""
    statuses: Counter[int] = field(default_factory=Counter)
    took: float = 0.0
    server_cpu: float = 0.0

    def count(self, status: int, seconds: float) -> None:
        self.statuses[status] += 1
        if status == 200:
            self.seconds.append(seconds)

    def summary(self) -> dict[str, Any]:
        ordered = sorted(self.seconds) or [float("nan")]
        return {
            "requests_a_second": len(self.seconds) / self.took,
            "median_ms": 1e3 * statistics.median(ordered),
            "p99_ms": 1e3 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
            "server_cpu_ms_a_request": 1e3 * self.server_cpu / max(1, self.statuses.total()),
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
        }


# Measurements


async def measured(server: Server, seconds: float) -> dict[str, Any]:
    bodies = predictions()
    await closed_loop(server, bodies, 16, min(3.0, seconds))  # warm
    report: dict[str, Any] = {"idle": {}, "taught": {}, "taught_without_pause": {}}
    for clients in (1, 16, 64):
        quiet = await closed_loop(server, bodies, clients, seconds)
        async with teaching(server, pause=1 / LESSONS) as taught:
            busy = await closed_loop(server, bodies, clients, seconds)
        again = await closed_loop(server, bodies, clients, seconds)  # idle, on both sides of it
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
    """Clients that each wait for an answer before they ask again."""
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
    """Requests that come when they come, whatever became of those before; each waits for a free
    one of very many connections."""
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
    """Somebody who teaches meanwhile, one call after the other."""
    tally, bodies = Tally(), lessons()

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


async def soaked(server: Server, run: Path, seconds: float) -> dict[str, Any]:
    """Teach and forget without end, and look at what it holds."""
    samples, bodies, lesson = [], itertools.cycle(predictions()), lessons()
    taught: list[int] = []
    end = time.perf_counter() + seconds
    async with Client(server) as client:
        for turn in itertools.count():
            if time.perf_counter() > end:
                break
            taught += json.loads((await client.send(next(lesson)))[1])["ids"]
            await client.send(next(bodies))
            if len(taught) > 3000:
                gone, taught = taught[:1500], taught[1500:]
                await client.send(request("/forget", {"ids": gone}))
            if turn % 500 == 0:
                files = sum(path.stat().st_size for path in run.glob("journal*"))
                samples.append((server.resident_bytes, files))
    settled = samples[len(samples) // 3 :]
    print(f"soak        {turn} lessons, journal {samples[-1][1] / 1e6:.0f} MB")
    return {
        "seconds": seconds,
        "lessons": turn,
        "resident_bytes": [memory for memory, _ in settled],
        "journal_bytes": [size for _, size in settled],
    }


def show(what: str, tally: Tally) -> None:
    found = tally.summary()
    print(
        f"{what:34} {found['requests_a_second']:7.0f} a second, median {found['median_ms']:.1f} ms,"
        f" 99% {found['p99_ms']:.1f} ms, CPU {found['server_cpu_ms_a_request']:.2f} ms,"
        f" {found['statuses']}",
        flush=True,
    )


def machine() -> dict[str, Any]:
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
