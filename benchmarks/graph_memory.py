"""`python -m benchmarks.graph_memory`: is an approximate memory of a million entries good enough?

Decides from which size on a CPU `GraphMemory` is worth its approximation. Keys are made like
sentence embeddings: unit vectors with the spectrum of covariances of all-MiniLM-L6-v2, in nested
groups (topics, intents, phrases) of varying width, one in ten of no group. Each turnover brings new
intents. Recall is the share of the true 50 nearest entries that a read finds.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import mbpa

KEY_DIM = 384
NEIGHBORS = 50
ENTRIES_PER_INTENT, ENTRIES_PER_PHRASE, INTENTS_PER_TOPIC = 120, 5, 15
TOPIC_WEIGHT, INTENT_WIDTH, PHRASE_WIDTH = 0.6, 0.8, 0.4
WIDTHS = 0.3, 1.7  # factors by which groups differ
OUTSIDE_SHARE = 0.1  # of the sentences belong to no intent
SPECTRUM = 0.7  # exponent with which variances fall
WRITTEN_AT_ONCE = 32
WRITES_PER_READ = 100
PROGRESS_S = 30.0

Array = NDArray[np.float32]


class Sentences:
    """Random keys of one period, and queries like them."""

    def __init__(self, entries: int, seed: int) -> None:
        same = np.random.default_rng(0)  # topics last, intents come and go
        self._random = np.random.default_rng([1, seed])
        scale = np.arange(1, KEY_DIM + 1) ** -SPECTRUM
        self._scale = np.sqrt(scale / scale.sum()).astype(np.float32)
        intents = max(1, entries // ENTRIES_PER_INTENT)
        phrases = max(1, entries // ENTRIES_PER_PHRASE)
        topics = self._normal(same, max(1, intents // INTENTS_PER_TOPIC))
        draw = self._random
        place = topics[draw.integers(0, len(topics), intents)] * TOPIC_WEIGHT
        place += self._normal(draw, intents) * np.float32(np.sqrt(1 - TOPIC_WEIGHT**2))
        width = draw.uniform(*WIDTHS, intents).astype(np.float32)
        chosen = draw.integers(0, intents, phrases)
        self._phrases = place[chosen]
        self._phrases += (
            INTENT_WIDTH * width[chosen][:, None] * self._normal(draw, phrases)
        ).astype(np.float32)
        self._widths = (PHRASE_WIDTH * draw.uniform(*WIDTHS, phrases)).astype(np.float32)

    def draw(self, count: int) -> Tensor:
        chosen = self._random.integers(0, len(self._phrases), count)
        keys = self._phrases[chosen]
        keys += self._widths[chosen][:, None] * self._normal(self._random, count)
        outside = np.flatnonzero(self._random.random(count) < OUTSIDE_SHARE)
        keys[outside] = self._normal(self._random, len(outside))
        return torch.from_numpy(keys / np.linalg.norm(keys, axis=1, keepdims=True))

    def _normal(self, random: np.random.Generator, count: int) -> Array:
        return random.standard_normal((count, KEY_DIM), dtype=np.float32) * self._scale


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.graph_memory", description=__doc__)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--turnovers", type=float, default=3.5)
    parser.add_argument("--queries", type=int, default=300)
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--expansion", type=int, default=None, help="that searches begin with")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/graph-memory.json"))
    arguments = parser.parse_args()
    report: dict[str, Any] = {
        "machine": {
            "processor": platform.machine(),
            "threads": torch.get_num_threads(),
            "torch": str(torch.__version__),
        },
        "entries": arguments.entries,
        "precision": arguments.precision,
        "stages": [],
    }
    for stage in run_stages(arguments):
        print(json.dumps(stage), flush=True)
        report["stages"].append(stage)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def run_stages(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    entries = arguments.entries
    named = {} if arguments.expansion is None else {"expansion_search": arguments.expansion}
    sentences = Sentences(entries, 0)
    memory = mbpa.GraphMemory(entries, KEY_DIM, precision=arguments.precision, **named)
    start = time.perf_counter()
    for written in range(0, entries, 50_000):
        count = min(50_000, entries - written)
        with memory.lock:
            memory.write(sentences.draw(count), torch.zeros(count, dtype=torch.int64))
    wait_for_graph(memory)
    yield {"stage": "built", "seconds": time.perf_counter() - start}
    yield {"stage": "fresh", **measure(memory, sentences, arguments.queries, exact=True)}
    done = 0.0
    while done < arguments.turnovers:
        sentences = Sentences(entries, 1 + int(done))
        is_last = done + 1 >= arguments.turnovers
        if done == 2:  # with a rebuild of everything in the background
            memory.rebuild(wait=False)
        rates = write(memory, sentences, entries // 2)
        done += 0.5
        figures = measure(memory, sentences, arguments.queries, exact=is_last)
        yield {"stage": f"{done} turnovers", **rates, **figures}
        if done >= arguments.turnovers:
            break
        rates = write(memory, sentences, entries - entries // 2)
        done += 0.5
        figures = measure(memory, sentences, arguments.queries, exact=is_last)
        yield {"stage": f"{done} turnovers", **rates, **figures}
    memory.wait()
    one_by_one = sentences.draw(2_000)
    start = time.perf_counter()
    for key in one_by_one:
        memory.write(key[None], torch.zeros(1, dtype=torch.int64))
    rate = len(one_by_one) / (time.perf_counter() - start)
    yield {"stage": "one by one", "writes_per_s": rate}
    memory.close()


def wait_for_graph(memory: mbpa.GraphMemory) -> None:
    start = time.perf_counter()
    while not memory.is_indexed:
        time.sleep(1)
        if time.perf_counter() - start > PROGRESS_S:
            print(f"building … {memory}", flush=True)
            start = time.perf_counter()
    memory.wait()


def write(memory: mbpa.GraphMemory, sentences: Sentences, count: int) -> dict[str, Any]:
    """Write entries in small batches with reads in between, and return how fast it went."""
    in_writes, in_reads, reads, shown = 0.0, 0.0, 0, time.perf_counter()
    rebuilds = memory.rebuilds
    for start in range(0, count, WRITTEN_AT_ONCE):
        size = min(WRITTEN_AT_ONCE, count - start)
        keys, values = sentences.draw(size), torch.zeros(size, dtype=torch.int64)
        before = time.perf_counter()
        memory.write(keys, values)
        in_writes += time.perf_counter() - before
        if (start + size) // WRITES_PER_READ > start // WRITES_PER_READ:
            query = sentences.draw(1)
            before = time.perf_counter()
            memory.read(query, NEIGHBORS)
            in_reads, reads = in_reads + time.perf_counter() - before, reads + 1
        if time.perf_counter() - shown > PROGRESS_S:
            shown = time.perf_counter()
            print(f"written {start} of {count}, {start / in_writes:.0f} a second", flush=True)
    return {
        "writes_per_s": count / in_writes,
        "read_ms_between_writes": 1e3 * in_reads / max(1, reads),
        "rebuilds": memory.rebuilds - rebuilds,
    }


def measure(
    memory: mbpa.GraphMemory, sentences: Sentences, count: int, *, exact: bool
) -> dict[str, Any]:
    queries = sentences.draw(count)
    batches = queries.split(32)
    recall = float(np.mean([memory.measure_recall(batch, NEIGHBORS) for batch in batches]))
    took = time_reads(memory, queries)
    figures: dict[str, Any] = {
        "recall": recall,
        "recall_on_live_queries": memory.recall,
        "read_ms_median": 1e3 * float(np.median(took)),
        "read_ms_p99": 1e3 * float(np.quantile(took, 0.99)),
        "stale": memory.stale,
        "expansion_search": memory.settings["expansion_search"],
    }
    if exact:
        other = mbpa.ExactMemory(memory.capacity, KEY_DIM)
        held = memory.entries()
        other.restore(held, memory.next_id)
        del held
        exact_ms = 1e3 * float(np.median(time_reads(other, queries[:30])))
        figures |= {"exact_ms_median": exact_ms, "faster": exact_ms / figures["read_ms_median"]}
    return figures


def time_reads(memory: mbpa.Memory, queries: Tensor) -> list[float]:
    took = []
    for query in queries:
        start = time.perf_counter()
        memory.read(query[None], NEIGHBORS)
        took.append(time.perf_counter() - start)
    return took


if __name__ == "__main__":
    raise SystemExit(main())
