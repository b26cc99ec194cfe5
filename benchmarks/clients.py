"""A run to serve, its server, and clients that cost as little as possible."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import mbpa
from mbpa.modules.new_rows import NewRows, label_sums
from mbpa.serve.run_info import RunInfo, write_run

EXAMPLES, LABELS, DIM = 15_000, 150, 384
PREDICTOR = mbpa.Adapted(mbpa.Gradient(lr=10.0, steps=20), k=20)
DISTINCT_REQUESTS = 500

# The run and its server


def make_run(directory: Path) -> None:
    """Write a run: centres on the sphere, examples around them, and a head that fits them."""
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
    sums = label_sums(keys, numbers, LABELS)
    rows = NewRows.around(head.weight, head.bias, sums, scale=15.0, offset=1.0)
    write_run(directory, info, head, PREDICTOR, examples, keys, rows)


def near(places: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw keys about as far from their centres as sentences are from their intents."""
    noise = torch.randn(places.shape, generator=generator) / DIM**0.5
    return torch.nn.functional.normalize(places + noise, dim=1)


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
def start_server(run: Path) -> Iterator[Server]:
    command = [sys.executable, "-m", "mbpa.cli", "serve", str(run), "--port", "0"]
    # In a session of its own, so that an interrupt of the client does not reach the server.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if "serving on http://" in line:
                host, port = line.split("http://")[1].split("/")[0].split(":")
                yield Server(process, host, int(port))
                break
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        finally:
            process.kill()  # in case it has not ended by itself
            process.stdout.close()


# Clients


class Client:
    """A connection that sends one request after the other."""

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


def make_prediction_requests() -> list[bytes]:
    generator = torch.Generator().manual_seed(1)
    places = torch.nn.functional.normalize(
        torch.randn(DISTINCT_REQUESTS, DIM, generator=generator), dim=1
    )
    return [request("/predict", {"embeddings": [row]}) for row in _round_keys(places)]


def lessons() -> Iterator[bytes]:
    """Yield requests that each teach three examples of a label, old or new, endlessly."""
    generator = torch.Generator().manual_seed(2)
    for number in itertools.count():
        keys = torch.nn.functional.normalize(torch.randn(3, DIM, generator=generator), dim=1)
        label = f"label {number % LABELS:03}" if number % 2 else f"new {number % 20}"
        yield request(
            "/learn",
            {"examples": [{"label": label, "embedding": row} for row in _round_keys(keys)]},
        )


def _round_keys(keys: torch.Tensor) -> list[list[float]]:
    return [[round(number, 7) for number in row] for row in keys.tolist()]


@dataclass
class Tally:
    """The outcomes of many requests."""

    seconds: list[float] = field(default_factory=list)
    """Latency of each answered request."""
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
