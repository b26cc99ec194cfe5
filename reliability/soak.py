"""Endurance: an hour of everything that clients do, while the server's resources are measured.

Clients teach, forget, predict, explain, send invalid requests, break off connections and are slow,
against `mbpa serve` in a process of its own. Its memory, descriptors, threads and journal are
measured every ten seconds. The load is modest, so that the trial can run beside other work: server
and clients together are throttled to half a core.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.clients import (
    DIM,
    Client,
    Server,
    lessons,
    make_prediction_requests,
    make_run,
    request,
    start_server,
)
from reliability.trial import BrokenPromiseError, Trial

SAMPLE_S = 10.0
WARM_UP_MINUTES = 10.0  # after this, memory must not grow
LEAST_MINUTES = 20.0  # shorter soaks are not judged
MAX_GROWTH_MB_PER_HOUR = 1.0
MAX_CORES = 0.5
MAX_RATE = 25.0  # operations per second
KEPT_EXAMPLES = 120  # taught examples to keep; beyond this, the older half is forgotten
SLOW_CLIENTS = 6
QUIET_S = 60.0  # time for the server to close connections when all clients are gone
BAD_BODIES = (
    b"{",
    b'{"embeddings": [[1.0]]}',
    b'{"texts": ["a"]}',
    b'{"embedings": []}',
    b'{"embeddings": [[' + b"9" * 5000 + b"]]}",
)
# Only memory allocated by the process is judged: which pages of files (libraries, the journal) are
# resident, and shared with whom, depends on the kernel and on other processes.
GROWING = ("anonymous_mb", "resident_mb", "pss_mb", "private_mb", "descriptors", "threads")
Samples = list[dict[str, float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=60.0, help="length of the trial")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the operations and their order"
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the soak; if it is interrupted, the report says so and holds the results so far."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "run"
        make_run(directory)
        with start_server(directory) as server:
            partial = arguments.out / "soak.partial.json"
            soak = _Soak(server, directory, random.Random(arguments.seed), partial)
            figures = asyncio.run(soak.run(arguments.minutes))
    partial.unlink(missing_ok=True)
    if figures["broken"]:
        raise BrokenPromiseError(f"{'; '.join(figures['broken'])}: {json.dumps(figures)}")
    return figures


class _Soak:
    """One soak of one server.

    Args:
        partial: file to which the results so far are written every minute.
    """

    def __init__(
        self, server: Server, directory: Path, chance: random.Random, partial: Path
    ) -> None:
        self._server, self._directory, self._chance = server, directory, chance
        self._partial = partial
        self._samples: Samples = []
        self._done: Counter[str] = Counter()
        self._statuses: Counter[str] = Counter()
        self._kept: list[int] = []
        self._rate = MAX_RATE
        self._predictions = itertools.cycle(make_prediction_requests())
        self._lessons = lessons()
        self._stop = asyncio.Event()
        self._start = 0.0

    async def run(self, minutes: float) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(each, self._stop.set)
        await self._warm_up()
        before = await self._look_when_quiet()
        self._start = time.perf_counter()
        tasks = [
            asyncio.create_task(self._act()),
            asyncio.create_task(self._watch()),
            *(asyncio.create_task(self._be_slow(place)) for place in range(SLOW_CLIENTS)),
        ]
        is_interrupted = await _wait_for_any(self._stop, tasks, 60 * minutes)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        failures = [each for each in ended if isinstance(each, Exception)]
        after = None if self._server.process.poll() is not None else await self._look_when_quiet()
        return self._report(minutes, is_interrupted, failures, before, after)

    # Operations of clients

    async def _warm_up(self) -> None:
        """Do each kind of operation a few times, so that one-time set-up is done."""
        for operation in 5 * self._operations:
            await operation()

    @property
    def _operations(self) -> list[Callable[[], Awaitable[None]]]:
        """Kinds of operations, repeated in proportion to their frequency."""
        often = [self._predict] * 12
        return [*often, self._explain, self._teach, self._send_bad, self._break_off, self._look_up]

    async def _act(self) -> None:
        """Do one operation after the other, at the allowed rate."""
        while True:
            pause = asyncio.create_task(asyncio.sleep(1 / self._rate))
            await self._chance.choice(self._operations)()
            await pause

    async def _call(self, what: str, sent: bytes) -> bytes:
        async with Client(self._server) as client:
            status, answer = await client.send(sent)
        self._done[what] += 1
        self._statuses[f"{what} {status}"] += 1
        if status >= 500:
            raise BrokenPromiseError(f"{what} was answered {status}: {answer[:200]!r}")
        return answer if status == 200 else b""

    async def _predict(self) -> None:
        await self._call("predict", next(self._predictions))

    async def _explain(self) -> None:
        key = [1.0] + [0.0] * (DIM - 1)
        await self._call("explain", request("/explain", {"embeddings": [key] * 4}))

    async def _teach(self) -> None:
        if answer := await self._call("teach", next(self._lessons)):
            self._kept += json.loads(answer)["ids"]
        if len(self._kept) > KEPT_EXAMPLES:
            half = KEPT_EXAMPLES // 2
            gone, self._kept = self._kept[:half], self._kept[half:]
            await self._call("forget", request("/forget", {"ids": gone}))

    async def _send_bad(self) -> None:
        body = self._chance.choice(BAD_BODIES)
        path = self._chance.choice(("/predict", "/learn", "/forget", "/explain"))
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        await self._call("bad", f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    async def _look_up(self) -> None:
        path = self._chance.choice(("/stats", "/labels", "/metrics", "/nothing", "/docs"))
        await self._call("look up", f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())

    async def _break_off(self) -> None:
        """Send a part of a request, or all of a large one, and disconnect."""
        row = [1.0] + [0.0] * (DIM - 1)
        sent = request("/predict", {"embeddings": [row] * 32})
        _, writer = await asyncio.open_connection(self._server.host, self._server.port)
        writer.write(sent[: self._chance.choice((10, 100, len(sent) // 2, len(sent)))])
        await asyncio.sleep(0.01)
        writer.transport.abort()
        self._done["break off"] += 1

    async def _be_slow(self, place: int) -> None:
        """Send headers or a body, or read a response, at one byte per second, repeatedly."""
        whole = next(self._predictions)
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(self._server.host, self._server.port)
                try:
                    await _drip(reader, writer, whole, kind=place % 3)
                finally:
                    writer.transport.abort()
            self._done["slow client given up"] += 1
            await asyncio.sleep(1.0)

    # Resources of the server

    async def _watch(self) -> None:
        cpu = self._cpu_seconds()
        for number in itertools.count():
            due = self._start + number * SAMPLE_S
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            found = look_at(self._server, self._directory)
            spent, cpu = self._cpu_seconds() - cpu, self._cpu_seconds()
            cores = spent / SAMPLE_S if number else 0.0
            minute = (time.perf_counter() - self._start) / 60
            self._samples.append({"minute": round(minute, 3), **found, "cores": round(cores, 3)})
            if cores:
                wanted = self._rate * min(1.2, MAX_CORES / cores)
                self._rate = min(MAX_RATE, max(1.0, wanted))
            if number % 6 == 0:
                self._tell()

    def _cpu_seconds(self) -> float:
        own = os.times()
        return self._server.cpu_seconds + own.user + own.system

    def _tell(self) -> None:
        """Print the progress, and save it in case this process is killed."""
        last = self._samples[-1]
        print(
            f"{last['minute']:6.1f} min  {sum(self._done.values()):7} operations  "
            f"resident {last['resident_mb']:.1f}  its own {last['anonymous_mb']:.1f} MB  "
            f"{last['descriptors']:.0f} descriptors  {last['threads']:.0f} threads  "
            f"journal {last['journal_mb']:.1f} MB  {last['cores']:.2f} cores",
            file=sys.stderr,
            flush=True,
        )
        self._partial.parent.mkdir(parents=True, exist_ok=True)
        self._partial.write_text(json.dumps({"samples": self._samples}) + "\n", encoding="utf-8")

    async def _look_when_quiet(self) -> dict[str, float]:
        """Wait until connections are closed, and return the resources of the server then."""
        give_up = time.monotonic() + QUIET_S
        least = look_at(self._server, self._directory)
        last_change = time.monotonic()
        while time.monotonic() < give_up and time.monotonic() - last_change < 12.0:
            await asyncio.sleep(1.0)
            found = look_at(self._server, self._directory)
            if found["descriptors"] != least["descriptors"]:
                last_change = time.monotonic()
            least = found
        return least

    def _report(
        self,
        minutes: float,
        is_interrupted: bool,
        failures: Sequence[Exception],
        before: dict[str, float],
        after: dict[str, float] | None,
    ) -> dict[str, Any]:
        settled = [each for each in self._samples if each["minute"] >= WARM_UP_MINUTES]
        is_long = minutes >= LEAST_MINUTES and not is_interrupted
        fitted = settled if is_long else self._samples
        growth = {name: fit_growth(find_least(fitted, name)) for name in GROWING}
        broken = [f"{type(each).__name__}: {each}" for each in failures]
        if after is None:
            broken.append("the server ended by itself")
        elif is_long:
            broken += list(_find_growth(growth, before, after))
        return {
            "minutes": minutes,
            "was_interrupted": is_interrupted,
            "is_judged": is_long,
            "operations": dict(self._done),
            "statuses": dict(sorted(self._statuses.items())),
            "quiet_before": before,
            "quiet_after": after,
            "growth_per_hour": growth,
            "mean_cores": round(
                sum(each["cores"] for each in self._samples) / max(1, len(self._samples)), 3
            ),
            "broken": broken,
            "samples": self._samples,
        }


def _find_growth(
    growth: dict[str, dict[str, float]], before: dict[str, float], after: dict[str, float]
) -> Iterator[str]:
    found = growth["anonymous_mb"]
    if found["slope"] > MAX_GROWTH_MB_PER_HOUR:
        yield f"memory grows by {found['slope']} ± {found['error']} MB per hour"
    for name in ("descriptors", "threads"):
        if after[name] > before[name]:
            yield f"{name}: {before[name]:.0f} before, {after[name]:.0f} after"


def find_least(samples: Samples, name: str) -> list[tuple[float, float]]:
    """Return the time in hours and the least value of each full minute.

    The memory of a process goes up and down, here by the size of all keys, and a sample catches
    either level by chance. Memory that is never released shows in the least of several samples.
    """
    grouped = itertools.groupby(samples, key=lambda each: int(each["minute"]))
    minutes = [(minute / 60, [each[name] for each in group]) for minute, group in grouped]
    return [(hour, min(values)) for hour, values in minutes if len(values) > 30 / SAMPLE_S]


async def _wait_for_any(
    stop: asyncio.Event, tasks: Sequence[asyncio.Task[None]], seconds: float
) -> bool:
    """Wait until the time is over, a task ends, or `stop` is set; return whether it is set."""
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({stopped, *tasks}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    return stop.is_set()


async def _drip(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, whole: bytes, kind: int
) -> None:
    """Be slow with the headers, the body or the response, until the server disconnects."""
    head, _, _ = whole.partition(b"\r\n\r\n")
    start = (20, len(head) + 10, len(whole))[kind]
    writer.write(whole[:start])
    for place in itertools.count(start):
        if kind == 2:
            if not await reader.read(1):
                return
        else:
            writer.write(whole[place : place + 1])
            await writer.drain()
            if reader.at_eof():
                return
        await asyncio.sleep(1.0)


def look_at(server: Server, directory: Path) -> dict[str, float]:
    """Return the memory, descriptors and threads of a server, and the size of its journal."""
    process = Path(f"/proc/{server.process.pid}")
    rollup = dict(re.findall(r"^(\w+):\s+(\d+) kB$", (process / "smaps_rollup").read_text(), re.M))
    threads = re.search(r"^Threads:\s+(\d+)$", (process / "status").read_text(), re.MULTILINE)
    assert threads is not None
    private = int(rollup["Private_Clean"]) + int(rollup["Private_Dirty"])
    files = sum(path.stat().st_size for path in directory.glob("journal*") if path.is_file())
    return {
        "resident_mb": round(int(rollup["Rss"]) * 1024 / 1e6, 2),
        "pss_mb": round(int(rollup["Pss"]) * 1024 / 1e6, 2),
        "private_mb": round(private * 1024 / 1e6, 2),
        "anonymous_mb": round((int(rollup["Anonymous"]) + int(rollup["Swap"])) * 1024 / 1e6, 3),
        "descriptors": float(len(list((process / "fd").iterdir()))),
        "threads": float(threads[1]),
        "journal_mb": round(files / 1e6, 2),
    }


def fit_growth(points: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Fit a line by least squares; return its slope, the standard error, and the spread around it.

    The error assumes independent samples, which those of memory are not quite.
    """
    if len(points) < 3:
        return {"slope": 0.0, "error": 0.0, "spread": 0.0}
    count = len(points)
    middle_x = sum(x for x, _ in points) / count
    middle_y = sum(y for _, y in points) / count
    width = sum((x - middle_x) ** 2 for x, _ in points)
    slope = sum((x - middle_x) * (y - middle_y) for x, y in points) / width
    squares = sum((y - middle_y - slope * (x - middle_x)) ** 2 for x, y in points)
    spread = math.sqrt(squares / (count - 2))
    error = spread / math.sqrt(width)
    return {"slope": round(slope, 3), "error": round(error, 3), "spread": round(spread, 3)}


TRIAL = Trial(
    "soak",
    "an hour of all kinds of requests: memory, descriptors and threads must not grow",
    add_arguments,
    run,
)
