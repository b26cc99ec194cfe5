"""Load and slow clients: accepted requests are answered in time, whatever else is requested.

The trial offers three times the load that a server can handle, and adds hundreds of clients that
send or read one byte at a time. Server and clients share this machine, so the clients cost as
little as possible: prepared bytes, one callback per response. Latency is measured from the moment
of sending; the delay of the clients themselves is reported beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import re
import socket
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.clients import (
    DIM,
    Client,
    Server,
    make_prediction_requests,
    make_run,
    request,
    start_server,
)
from reliability.trial import BrokenPromiseError, Trial

CLIENT_COUNTS = (64, 48, 32, 24, 16, 8)
NORMAL_CLIENTS = 8
OVERLOAD = 3.0  # multiple of the rate that the server can handle
MAX_RATIO = 2.0  # between 99th percentiles
MAX_CONNECTIONS = 1024
SLOW_KINDS = ("headers", "bodies", "readers")
SETTLE_S = 60.0  # time for the server to close connections
CALM_CORES = 0.1
UNREAD = b"GET /labels HTTP/1.1\r\nHost: x\r\n\r\n" * 10  # the responses fill a client's buffer
SLOW_HEAD = request("/predict", [0] * 1000).partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
LATE_S = 0.05  # a client that is this late is itself the bottleneck


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds per measurement")
    parser.add_argument("--slow", type=int, default=200, help="number of slow clients of each kind")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds of measurements")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all parts; report broken promises when all of them are done."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "run"
        make_run(directory)
        with start_server(directory) as server:
            report = asyncio.run(_measure(server, arguments))
    if broken := report["broken"]:
        raise BrokenPromiseError(f"{'; '.join(broken)}: {json.dumps(report)}")
    return report


async def _measure(server: Server, arguments: argparse.Namespace) -> dict[str, Any]:
    bodies = make_prediction_requests()
    await run_closed_loop(server, bodies, 16, min(3.0, arguments.seconds))  # warm
    alone = await run_closed_loop(server, bodies, 1, arguments.seconds)
    clients = await _find_saturation(server, bodies, min(5.0, arguments.seconds))
    rounds = [
        await _overload(server, bodies, clients, arguments.seconds) for _ in range(arguments.rounds)
    ]
    slow = {
        kind: await _beside_slow(server, bodies, kind, arguments.slow, arguments.seconds)
        for kind in SLOW_KINDS
    }
    ratios = [found["ratio"] for found in rounds]
    broken = []
    if statistics.median(ratios) > MAX_RATIO:
        broken.append(f"under load the 99th percentile is {ratios} times that without load")
    for kind, found in slow.items():
        if found["ratio"] > MAX_RATIO:
            broken.append(
                f"beside slow {kind} the 99th percentile is {found['ratio']} times as long"
            )
        if found["statuses"].keys() - {"200"}:
            broken.append(f"beside slow {kind} there were {found['statuses']}")
        if found["left_descriptors"] > 0 or found["left_threads"] > 0:
            broken.append(f"slow {kind} left descriptors or threads: {found}")
    return {
        "definition": f"without load: {clients} clients, each of which asks again when it is "
        f"answered; the largest of {CLIENT_COUNTS} of which (nearly) none is refused",
        "one_client": alone.summary(),
        "saturating_clients": clients,
        "rounds": rounds,
        "median_ratio": statistics.median(ratios),
        "slow_clients": slow,
        "broken": broken,
    }


# Overload


async def _find_saturation(server: Server, bodies: Sequence[bytes], seconds: float) -> int:
    """Return the largest number of clients of which (nearly) none is refused."""
    for clients in CLIENT_COUNTS:
        tally = await run_closed_loop(server, bodies, clients, seconds)
        if len(tally.seconds) >= 0.99 * tally.statuses.total():
            return clients
    return CLIENT_COUNTS[-1]


async def _overload(
    server: Server, bodies: Sequence[bytes], clients: int, seconds: float
) -> dict[str, Any]:
    """Offer more than the server can handle, between two measurements of what it can handle."""
    before = await run_closed_loop(server, bodies, clients, seconds)
    rate = OVERLOAD * len(before.seconds) / before.took_s
    offered = await run_open_loop(server, bodies, rate, seconds)
    after = await run_closed_loop(server, bodies, clients, seconds)
    usual_s = statistics.mean((before.percentile(0.99), after.percentile(0.99)))
    found = {
        "offered_per_second": round(rate),
        "without_load": before.summary(),
        "under_load": offered.summary(),
        "after_load": after.summary(),
        "ratio": round(offered.percentile(0.99) / usual_s, 2),
    }
    print(json.dumps(found), flush=True)
    return found


@dataclass
class Tally:
    """The outcomes of many requests."""

    seconds: list[float] = field(default_factory=list)
    """Latency of each answered request, from the moment of sending."""
    late: list[float] = field(default_factory=list)
    """Delay of each request behind its schedule, in seconds."""
    statuses: Counter[int] = field(default_factory=Counter)
    unsent: int = 0
    """Number of requests for which there was no free connection."""
    took_s: float = 0.0
    server_cpu_s: float = 0.0

    def count(self, status: int, seconds: float) -> None:
        self.statuses[status] += 1
        if status == 200:
            self.seconds.append(seconds)

    def percentile(self, share: float) -> float:
        """Return the latency, in seconds, that this share of the answers did not exceed."""
        return _percentile(self.seconds, share)

    def summary(self) -> dict[str, Any]:
        return {
            "answers_per_second": round(len(self.seconds) / self.took_s, 1),
            "median_ms": round(1e3 * self.percentile(0.5), 1),
            "p99_ms": round(1e3 * self.percentile(0.99), 1),
            "server_cores": round(self.server_cpu_s / self.took_s, 2),
            "client_late_p99_ms": round(1e3 * _percentile(self.late, 0.99), 1),
            "client_was_late": round(
                sum(late > LATE_S for late in self.late) / max(1, len(self.late)), 3
            ),
            "unsent": self.unsent,
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
        }


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values) or [0.0]
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Caller(asyncio.Protocol):
    """A connection that sends prepared requests, and reports each response to a callback."""

    def __init__(self, on_answer: Callable[[Caller, int, float], None]) -> None:
        self._on_answer, self._received, self._sent_s = on_answer, b"", 0.0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def send(self, body: bytes) -> None:
        assert self._transport is not None
        self._sent_s = time.perf_counter()
        self._transport.write(body)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, content = self._received.partition(b"\r\n\r\n")
        if separator and len(content) >= int(head.lower().split(b"content-length: ")[1].split()[0]):
            self._received = b""
            self._on_answer(self, int(head[9:12]), time.perf_counter() - self._sent_s)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


@contextlib.asynccontextmanager
async def open_connections(
    server: Server, count: int, on_answer: Callable[[Caller, int, float], None]
) -> AsyncIterator[list[Caller]]:
    """Open `count` connections, and close them at the end."""
    loop = asyncio.get_running_loop()
    callers = []
    try:
        for _ in range(count):
            _, caller = await loop.create_connection(
                lambda: Caller(on_answer), server.host, server.port
            )
            callers.append(caller)
        yield callers
    finally:
        for caller in callers:
            caller.close()


async def run_closed_loop(
    server: Server, bodies: Sequence[bytes], clients: int, seconds: float
) -> Tally:
    """Let each client send again as soon as it is answered; one that is refused waits briefly."""
    tally, turn, loop = Tally(), itertools.cycle(bodies), asyncio.get_running_loop()
    is_over = asyncio.Event()

    def on_answer(caller: Caller, status: int, took: float) -> None:
        tally.count(status, took)
        if is_over.is_set():
            return
        if status == 200:
            caller.send(next(turn))
        else:
            loop.call_later(0.05, caller.send, next(turn))

    async with open_connections(server, clients, on_answer) as callers:
        start, cpu = time.perf_counter(), server.cpu_seconds
        for caller in callers:
            caller.send(next(turn))
        await asyncio.sleep(seconds)
        is_over.set()
        tally.took_s = time.perf_counter() - start
        tally.server_cpu_s = server.cpu_seconds - cpu
        await asyncio.sleep(1.0)  # for requests in progress
    return tally


async def run_open_loop(
    server: Server, bodies: Sequence[bytes], rate: float, seconds: float
) -> Tally:
    """Send requests at random times, independently of the responses to earlier ones."""
    tally, turn, chance = Tally(), itertools.cycle(bodies), random.Random(0)
    free: list[Caller] = []

    def on_answer(caller: Caller, status: int, took: float) -> None:
        tally.count(status, took)
        free.append(caller)

    async with open_connections(server, MAX_CONNECTIONS, on_answer) as callers:
        free += callers
        start, cpu, due_s = time.perf_counter(), server.cpu_seconds, 0.0
        while due_s < seconds:
            due_s += chance.expovariate(rate)
            wait_s = start + due_s - time.perf_counter()
            if wait_s > 0 or len(tally.late) % 8 == 0:  # also lets the loop read responses
                await asyncio.sleep(max(0.0, wait_s))
            tally.late.append(max(0.0, time.perf_counter() - start - due_s))
            if free:
                free.pop().send(next(turn))
            else:
                tally.unsent += 1
        tally.took_s = time.perf_counter() - start
        tally.server_cpu_s = server.cpu_seconds - cpu
        await asyncio.sleep(2.0)
    return tally


# Slow clients


async def _beside_slow(
    server: Server, bodies: Sequence[bytes], kind: str, count: int, seconds: float
) -> dict[str, Any]:
    """Measure normal clients without slow ones, with them, and again without."""
    await asyncio.sleep(2.0)  # for earlier connections to be closed
    held = _measure_resources(server)
    before = await run_closed_loop(server, bodies, NORMAL_CLIENTS, seconds)
    async with _slow_clients(server, kind, count) as alive:
        beside = await run_closed_loop(server, bodies, NORMAL_CLIENTS, seconds)
        still_open = alive()
    after = await run_closed_loop(server, bodies, NORMAL_CLIENTS, seconds)
    left = await _wait_until_released(server, held)
    usual_s = statistics.mean((before.percentile(0.99), after.percentile(0.99)))
    found = {
        "slow_clients": count,
        "still_connected_at_the_end": still_open,
        "without_ms": round(1e3 * usual_s, 1),
        "beside_ms": round(1e3 * beside.percentile(0.99), 1),
        "ratio": round(beside.percentile(0.99) / usual_s, 2),
        "statuses": beside.summary()["statuses"],
        "left_descriptors": left["descriptors"] - held["descriptors"],
        "left_threads": left["threads"] - held["threads"],
        "resident_mb_more": round((left["resident"] - held["resident"]) / 1e6, 1),
    }
    print(kind, json.dumps(found), flush=True)
    return found


@contextlib.asynccontextmanager
async def _slow_clients(server: Server, kind: str, count: int) -> AsyncIterator[Callable[[], int]]:
    """Start clients that send or read one byte per second; yield a count of those connected."""
    tasks = [asyncio.create_task(_drip(server, kind)) for _ in range(count)]
    await _wait_until_calm(server)
    try:
        yield lambda: sum(not task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _wait_until_calm(server: Server) -> None:
    """Wait until a server has finished the work requested by slow clients."""
    give_up = time.monotonic() + SETTLE_S
    while time.monotonic() < give_up:
        before = server.cpu_seconds
        await asyncio.sleep(1.0)
        if server.cpu_seconds - before < CALM_CORES:
            return


async def _drip(server: Server, kind: str) -> None:
    """Act as one slow client until cancelled or disconnected."""
    taken = socket.socket()
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    taken.setblocking(False)
    loop = asyncio.get_running_loop()
    with taken, contextlib.suppress(OSError):
        await loop.sock_connect(taken, (server.host, server.port))
        if kind == "readers":
            await loop.sock_sendall(taken, UNREAD)
            while await loop.sock_recv(taken, 1):
                await asyncio.sleep(1.0)
            return
        await loop.sock_sendall(taken, SLOW_HEAD[:20] if kind == "headers" else SLOW_HEAD)
        while True:
            await asyncio.sleep(1.0)
            await loop.sock_sendall(taken, b"x" if kind == "headers" else b" ")


def _measure_resources(server: Server) -> dict[str, int]:
    """Return the numbers of descriptors and threads of a server, and its resident memory."""
    process = Path(f"/proc/{server.process.pid}")
    threads = re.search(r"^Threads:\s+(\d+)$", (process / "status").read_text(), re.MULTILINE)
    assert threads is not None
    return {
        "descriptors": len(list((process / "fd").iterdir())),
        "threads": int(threads[1]),
        "resident": server.resident_bytes,
    }


async def _wait_until_released(server: Server, held: dict[str, int]) -> dict[str, int]:
    """Wait until a server has no more descriptors than before; return what it holds then."""
    give_up = time.monotonic() + SETTLE_S
    async with Client(server) as client:
        await client.send(request("/predict", {"embeddings": [[1.0] + [0.0] * (DIM - 1)]}))
    while (left := _measure_resources(server))["descriptors"] > held["descriptors"]:
        if time.monotonic() > give_up:
            break
        await asyncio.sleep(0.5)
    return left


TRIAL = Trial(
    "load",
    "three times the load that a server can handle, and clients that send or read byte by byte",
    add_arguments,
    run,
)
