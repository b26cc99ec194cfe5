"""Exact retrieval: `Memory.read` against one matrix product and a top-k, and against the truth.

Shows the cost of exactness: a large batch is even faster, a small one pays for additional calls.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

import mbpa
from benchmarks.timing import time_in_turns
from mbpa.memory import backend

KINDS = "random", "clustered"


def some_keys(kind: str, count: int, size: int, device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    if kind == "random":
        return normal(count, size)
    same = torch.Generator(device).manual_seed(0)
    centers = 2 * torch.randn(1000, size, generator=same, device=device)
    chosen = torch.randint(1000, (count,), generator=generator, device=device)
    return centers[chosen] + 0.5 * normal(count, size)


def measure_retrieval(
    kind: str, entries: int, size: int, k: int, batch: int, device: torch.device, budget: float
) -> dict[str, Any]:
    """Measure a read of float32 keys, in milliseconds per batch."""
    memory = mbpa.ExactMemory(entries, size, device=device)
    keys = some_keys(kind, entries, size, device, 1)
    memory.write(keys, torch.zeros(entries, dtype=torch.int64, device=device))
    batches = [some_keys(kind, batch, size, device, 2 + turn) for turn in range(4)]
    norms, turn = keys.square().sum(1), iter(range(1 << 30))

    def queries() -> Tensor:
        return batches[next(turn) % len(batches)]

    def plain() -> object:
        return torch.addmm(norms, queries(), keys.T, alpha=-2).topk(k, largest=False)

    found = memory.read(batches[0][:32], k)
    missed = recall_lost(found.ids, keys, batches[0][:32], k)
    took = time_in_turns(
        {
            "read, no keys": lambda: memory.read(queries(), k, keys_for=0),
            "read": lambda: memory.read(queries(), k),
            "addmm + topk": plain,
        },
        device,
        budget,
    )
    half = 2 if device.type == "cuda" else 4
    return {
        "case": f"{kind} keys",
        "entries": entries,
        "key size": size,
        "k": k,
        "batch": batch,
        "recall": 1 - missed,
        "searched again": measure_repeats(memory, batches[0], k),
        "milliseconds": {name: 1e3 * each for name, each in took.items()},
        "operations": 2.0 * batch * entries * size,
        "bytes": float(half * entries * size),
    }


def recall_lost(ids: Tensor, keys: Tensor, queries: Tensor, k: int) -> float:
    """Return the share of the true nearest neighbours, by Σ(h−q)² in float64, not found."""
    lost = 0
    for row, query in zip(ids, queries, strict=True):
        best = torch.cat(
            [(part.double() - query.double()).square().sum(1) for part in keys.split(1 << 20)]
        )
        true = best.topk(k, largest=False).indices
        lost += k - int(torch.isin(row.to(true.device), true).sum())
    return lost / (k * len(queries))


def measure_repeats(memory: mbpa.Memory, queries: Tensor, k: int) -> float:
    """Return the share of queries for which the first search was not certain."""
    again, find_unsure = 0, backend.find_unsure

    def count(*arguments: Any) -> Tensor:
        nonlocal again
        is_unsure = find_unsure(*arguments)
        again += int(is_unsure.sum())
        return is_unsure

    backend.find_unsure = count
    try:
        memory.read(queries, k, keys_for=0)
    finally:
        backend.find_unsure = find_unsure
    return min(1.0, again / len(queries))


def measure_millions(
    kind: str, entries: int, size: int, device: torch.device, budget: float
) -> dict[str, Any]:
    """Measure float16 keys, millions of them: writing when empty and full, latencies, recall."""
    memory = mbpa.ExactMemory(entries, size, dtype=torch.float16, device=device)
    labels = torch.zeros(1 << 18, dtype=torch.int64, device=device)
    rates = []
    written, seed = 0, 0
    while written < entries:
        count = min(len(labels), entries - written)
        keys = some_keys(kind, count, size, device, seed).half()
        rates.append(_write_rate(memory, keys, labels[:count], device))
        written, seed = written + count, seed + 1
    when_full = _write_rate(memory, keys, labels[: len(keys)], device)
    took = {}
    for batch in (1, 64, 1024):
        batches = [some_keys(kind, batch, size, device, 1000 + turn) for turn in range(4)]
        turn = iter(range(1 << 30))
        work = {"": lambda b=batches, t=turn: memory.read(b[next(t) % 4], 50, keys_for=0)}
        took[str(batch)] = 1e3 * time_in_turns(work, device, budget)[""]
    queries = batches[0][:16]
    entries_held = memory.entries()
    found = memory.read(queries, 50)
    place = torch.searchsorted(entries_held.ids.to(device), found.ids)
    return {
        "case": f"{kind} keys, float16",
        "entries": entries,
        "key size": size,
        "k": 50,
        "recall": 1 - recall_lost(place, entries_held.keys, queries, 50),
        "searched again": measure_repeats(memory, batches[0], 50),
        "writes a second, empty": rates[1],
        "writes a second, full": when_full,
        "milliseconds by batch": took,
        "bytes": float(2 * entries * size),
    }


def _write_rate(memory: mbpa.Memory, keys: Tensor, labels: Tensor, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    memory.write(keys, labels)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return len(keys) / (time.perf_counter() - start)
