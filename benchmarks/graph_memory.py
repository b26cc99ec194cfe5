"""`python -m benchmarks.graph_memory`: is an approximate memory of a million entries good enough?

Decides from which size on a CPU `GraphMemory` is worth its approximation. Keys are made like
sentence embeddings: unit vectors with the spectrum of covariances of all-MiniLM-L6-v2, in nested
groups (topics, intents, phrases) of varying width, one in ten of no group. Each turnover brings new
intents. Recall is the share of the true 50 nearest entries that a read finds. Times are given both
by the clock and, since other programs may be running, in seconds of this thread's processor time.

`--clinc150` compares the accuracy of taught CLINC150 with that of an exact memory instead.
"""

from __future__ import annotations

import argparse
import json
import os
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
from mbpa.memory.graph_index import PRECISIONS

KEY_DIM = 384
NEIGHBORS = 50
ENTRIES_PER_INTENT, ENTRIES_PER_PHRASE, INTENTS_PER_TOPIC = 120, 5, 15
TOPIC_WEIGHT, INTENT_WIDTH, PHRASE_WIDTH = 0.6, 0.8, 0.4
WIDTHS = 0.3, 1.7  # factors by which groups differ
OUTSIDE_SHARE = 0.1  # of the sentences belong to no intent
SPECTRUM = 0.7  # exponent with which variances fall
WRITTEN_AT_ONCE = 32
DRAWN_AT_ONCE = 50_000
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
        numbers: Array = random.standard_normal((count, KEY_DIM), dtype=np.float32)
        numbers *= self._scale
        return numbers


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.graph_memory", description=__doc__)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--turnovers", type=float, default=3.5)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--expansion", type=int, default=None, help="that searches begin with")
    parser.add_argument("--connectivity", type=int, default=None, help="links per node")
    parser.add_argument("--expansion-add", type=int, default=None, help="candidates for links")
    parser.add_argument("--parts", type=int, default=None, help="of a graph, one thread each")
    parser.add_argument("--clinc150", action="store_true", help="compare accuracy instead")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/mbpa/embeddings"))
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/graph-memory.json"))
    arguments = parser.parse_args()
    if arguments.clinc150:
        print(json.dumps(compare_accuracy(arguments.cache.expanduser()), indent=1))
        return 0
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
    named = {
        "expansion_search": arguments.expansion,
        "connectivity": arguments.connectivity,
        "expansion_add": arguments.expansion_add,
        "parts": arguments.parts,
    }
    named = {name: value for name, value in named.items() if value is not None}
    sentences = Sentences(entries, 0)
    memory = mbpa.GraphMemory(entries, KEY_DIM, precision=arguments.precision, **named)
    start = time.perf_counter()
    sizes = [min(DRAWN_AT_ONCE, entries - drawn) for drawn in range(0, entries, DRAWN_AT_ONCE)]
    keys = torch.cat([sentences.draw(size) for size in sizes])
    memory.write(keys, torch.zeros(entries, dtype=torch.int64))
    del keys
    wait_for_graph(memory)
    seconds = time.perf_counter() - start
    yield {"stage": "built", "seconds": seconds, "widths": memory.widths, **memory.settings}
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
    watch = Stopwatch()
    for key in one_by_one:
        with watch:
            memory.write(key[None], torch.zeros(1, dtype=torch.int64))
    yield {
        "stage": "one by one",
        "writes_per_s": len(one_by_one) / sum(watch.clock),
        "writes_per_processor_s": len(one_by_one) / sum(watch.processor),
    }
    memory.close()


def wait_for_graph(memory: mbpa.GraphMemory) -> None:
    start = time.perf_counter()
    while not memory.is_indexed:
        time.sleep(1)
        if time.perf_counter() - start > PROGRESS_S:
            print(f"building … {memory}", flush=True)
            start = time.perf_counter()
    memory.wait()


class Stopwatch:
    """Lists how long each run of a block took, by the clock and in time of this thread."""

    def __init__(self) -> None:
        self.clock: list[float] = []
        self.processor: list[float] = []

    def __enter__(self) -> None:
        self._start = time.perf_counter(), time.thread_time()

    def __exit__(self, *exception: object) -> None:
        self.clock.append(time.perf_counter() - self._start[0])
        self.processor.append(time.thread_time() - self._start[1])


class StolenTime:
    """How much of the processors' time went to other virtual machines since this was made."""

    def __init__(self) -> None:
        self._start = self._read()

    @property
    def share(self) -> float | None:
        """A number from 0 to 1; `None` where the system does not tell."""
        now = self._read()
        if self._start is None or now is None:
            return None
        stolen, total = (after - before for after, before in zip(now, self._start, strict=True))
        return stolen / max(1, total)

    def _read(self) -> tuple[int, int] | None:
        path = Path("/proc/stat")
        if not path.exists():
            return None
        ticks = [int(word) for word in path.read_text().splitlines()[0].split()[1:9]]
        return ticks[7], sum(ticks)  # user, nice, system, idle, iowait, irq, softirq, steal


def write(memory: mbpa.GraphMemory, sentences: Sentences, count: int) -> dict[str, Any]:
    """Write entries in small batches with reads in between, and return how fast it went."""
    writes, reads, shown, rebuilds = Stopwatch(), Stopwatch(), time.perf_counter(), memory.rebuilds
    stolen = StolenTime()
    for start in range(0, count, WRITTEN_AT_ONCE):
        size = min(WRITTEN_AT_ONCE, count - start)
        keys, values = sentences.draw(size), torch.zeros(size, dtype=torch.int64)
        with writes:
            memory.write(keys, values)
        if (start + size) // WRITES_PER_READ > start // WRITES_PER_READ:
            query = sentences.draw(1)
            with reads:
                memory.read(query, NEIGHBORS)
        if time.perf_counter() - shown > PROGRESS_S:
            shown = time.perf_counter()
            print(
                f"written {start} of {count}, {start / sum(writes.clock):.0f} a second", flush=True
            )
    return {
        "writes_per_s": count / sum(writes.clock),
        "writes_per_processor_s": count / sum(writes.processor),
        "read_ms_between_writes": 1e3 * float(np.median(reads.clock)),
        "stolen_while_writing": stolen.share,
        "rebuilds": memory.rebuilds - rebuilds,
    }


def measure(
    memory: mbpa.GraphMemory, sentences: Sentences, count: int, *, exact: bool
) -> dict[str, Any]:
    queries = sentences.draw(count)
    batches = queries.split(32)
    recall = float(np.mean([memory.measure_recall(batch, NEIGHBORS) for batch in batches]))
    memory.wait()  # for the comparison of live queries, which takes one percent of the time
    stolen = StolenTime()
    took = time_reads(memory, queries)
    figures: dict[str, Any] = {
        "recall": recall,
        "recall_on_live_queries": memory.recall,
        "read_ms_median": 1e3 * float(np.median(took.clock)),
        "read_ms_mean": 1e3 * float(np.mean(took.clock)),
        "read_ms_p99": 1e3 * float(np.quantile(took.clock, 0.99)),
        "read_processor_ms_median": 1e3 * float(np.median(took.processor)),
        "stale": memory.stale,
        "widths": memory.widths,
        "load": os.getloadavg()[0],
        "stolen": stolen.share,
    }
    if exact:
        other = mbpa.ExactMemory(memory.capacity, KEY_DIM)
        held = memory.entries()
        other.restore(held, memory.next_id)
        del held
        took = time_reads(other, queries[:30])
        clock, processor = float(np.median(took.clock)), float(np.median(took.processor))
        figures["exact_ms_median"] = 1e3 * clock
        figures["exact_processor_ms_median"] = 1e3 * processor
        figures["times_faster"] = 1e3 * clock / figures["read_ms_median"]
        figures["times_less_processor"] = 1e3 * processor / figures["read_processor_ms_median"]
    return figures


def time_reads(memory: mbpa.Memory, queries: Tensor) -> Stopwatch:
    watch = Stopwatch()
    for query in queries:
        with watch:
            memory.read(query[None], NEIGHBORS)
    return watch


def compare_accuracy(cache: Path) -> dict[str, Any]:
    """Return test accuracies with a memory of all training sentences of CLINC150, in percent."""
    from experiments import data
    from mbpa.encoders import text
    from mbpa.serve.training import Training, train_head

    sentences, encoder = data.clinc150(), text.encoder()
    parts = [
        (text.embed_items(encoder, part.texts, cache), part.labels)
        for part in (sentences.train, sentences.valid, sentences.test)
    ]
    (keys, labels), held, (queries, answers) = parts
    head = train_head(keys, labels, len(sentences.names), Training(), held)
    predictors = {
        "adapted head": mbpa.Adapted(mbpa.Gradient(lr="auto", steps=20), k=NEIGHBORS),
        "vote": mbpa.NeighborVote(mbpa.Gaussian(0.3), k=NEIGHBORS),
    }
    report: dict[str, Any] = {"entries": len(keys), "queries": len(queries)}
    for name, predictor in predictors.items():
        memories: dict[str, mbpa.Memory] = {"exact": mbpa.ExactMemory(len(keys), KEY_DIM)}
        for precision in PRECISIONS:
            memories[precision] = mbpa.GraphMemory(
                len(keys), KEY_DIM, precision=precision, exact_below=0, background=False
            )
        for kind, memory in memories.items():
            model = mbpa.MbPA(head=head, memory=memory, predictor=predictor)
            model.write(keys=keys, values=labels)
            right = (
                torch.cat([model(keys=part).argmax(1) for part in queries.split(256)]) == answers
            )
            report[f"{name}, {kind}"] = 100 * float(right.double().mean())
            if isinstance(memory, mbpa.GraphMemory):
                report[f"recall, {kind}"] = memory.measure_recall(queries[:500], NEIGHBORS)
    return report


if __name__ == "__main__":
    raise SystemExit(main())
