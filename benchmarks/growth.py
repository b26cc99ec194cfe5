"""`python -m benchmarks.growth`: what a memory costs as it grows, to 10 or 100 million entries.

Decides which memory fits which machine: bytes, milliseconds per read and writes per second, by
number of entries. Keys have 384 dimensions and lie in 1,000 clusters. A read returns the 50 nearest
entries; recall compares with an exhaustive search in float64. On a GPU keys are stored in float16.
Table and picture of the document are made from all reports in the folder.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import platform
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mbpa
from benchmarks.retrieval import some_keys
from benchmarks.tables import format_rows, replace_block, round_number
from benchmarks.timing import time_in_turns
from experiments.measures import wait_for_device

KEY_DIM = 384
NEIGHBORS = 50
BATCHES = 1, 64
WRITTEN_AT_ONCE = 1 << 18
QUERIES_CHECKED = 4
SIZES = {
    "cpu": (10_000, 100_000, 1_000_000, 3_000_000, 10_000_000),
    "cuda": (10_000, 100_000, 1_000_000, 10_000_000, 30_000_000, 100_000_000),
}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MEMORIES = "exact", "graph"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    found = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=SIZES, default=found)
    parser.add_argument("--memory", choices=MEMORIES, default="exact")
    parser.add_argument("--dtype", choices=DTYPES, help="of keys; float16 on a GPU")
    parser.add_argument("--sizes", type=int, nargs="+", help="numbers of entries")
    parser.add_argument("--seconds", type=float, default=2.0, help="per measurement")
    parser.add_argument("--results", type=Path, default=Path("results/benchmarks"))
    parser.add_argument("--document", type=Path, default=Path("docs/memories.md"))
    parser.add_argument("--figure", type=Path, default=Path("docs/growth.png"))
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    dtype = arguments.dtype or ("float16" if device.type == "cuda" else "float32")
    out = arguments.results / f"growth-{arguments.memory}-{device.type}-{dtype}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "machine": describe_machine(device),
        "memory": arguments.memory,
        "dtype": dtype,
        "key size": KEY_DIM,
        "k": NEIGHBORS,
        "sizes": [],
    }
    for entries in arguments.sizes or SIZES[device.type]:
        figures = measure_size(arguments.memory, entries, DTYPES[dtype], device, arguments.seconds)
        print(json.dumps(figures), flush=True)
        report["sizes"].append(figures)
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    reports = read_reports(arguments.results)
    page = arguments.document.read_text("utf-8")
    arguments.document.write_text(replace_block(page, "growth", format_reports(reports)), "utf-8")
    draw_curves(reports, arguments.figure)
    print(f"written to {out}, {arguments.document} and {arguments.figure}")
    return 0


def describe_machine(device: torch.device) -> dict[str, Any]:
    is_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_gpu else platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
    }


def measure_size(
    kind: str, entries: int, dtype: torch.dtype, device: torch.device, seconds: float
) -> dict[str, Any]:
    """Fill a memory and return its figures."""
    gc.collect()
    held = count_bytes(device)
    memory = make_memory(kind, entries, dtype, device)
    start = time.perf_counter()
    for keys in draw_keys(entries, dtype, device):
        memory.write(keys, torch.zeros(len(keys), dtype=torch.int64, device=device))
    if isinstance(memory, mbpa.GraphMemory):
        while not memory.is_indexed and entries > memory.exact_below:
            time.sleep(0.1)
        memory.wait()
    wait_for_device(device)
    filled = time.perf_counter() - start
    figures: dict[str, Any] = {
        "entries": entries,
        # Small memories fit into pages that the process holds already.
        "bytes": max(count_bytes(device) - held, entries * KEY_DIM * dtype.itemsize),
        "seconds to fill": filled,
        "milliseconds": {str(batch): time_reads(memory, batch, seconds) for batch in BATCHES},
        "writes per second": time_writes(memory, dtype),
        "recall": measure_recall(memory, entries, dtype),
    }
    memory.close()
    return figures


def make_memory(kind: str, entries: int, dtype: torch.dtype, device: torch.device) -> mbpa.Memory:
    if kind == "graph":
        return mbpa.GraphMemory(entries, KEY_DIM, dtype=dtype)
    return mbpa.ExactMemory(entries, KEY_DIM, dtype=dtype, device=device)


def draw_keys(entries: int, dtype: torch.dtype, device: torch.device) -> Iterator[Tensor]:
    """Yield all keys in blocks; the same ones whenever it is called."""
    for block, start in enumerate(range(0, entries, WRITTEN_AT_ONCE)):
        count = min(WRITTEN_AT_ONCE, entries - start)
        yield some_keys("clustered", count, KEY_DIM, device, 1 + block).to(dtype)


def draw_queries(count: int, turn: int, device: torch.device) -> Tensor:
    return some_keys("clustered", count, KEY_DIM, device, -1 - turn)


def time_reads(memory: mbpa.Memory, batch: int, seconds: float) -> float:
    """Return the median time of a read, in milliseconds per batch."""
    batches = [draw_queries(batch, turn, memory.device) for turn in range(4)]
    turns = iter(range(1 << 30))

    def read() -> object:
        return memory.read(batches[next(turns) % len(batches)], NEIGHBORS)

    return 1e3 * time_in_turns({"read": read}, memory.device, seconds)["read"]


def time_writes(memory: mbpa.Memory, dtype: torch.dtype) -> float:
    """Return how many entries per second a full memory takes, 1,000 at once."""
    rates = []
    for keys in draw_last_writes(dtype, memory.device):
        values = torch.zeros(len(keys), dtype=torch.int64, device=memory.device)
        wait_for_device(memory.device)
        start = time.perf_counter()
        memory.write(keys, values)
        wait_for_device(memory.device)
        rates.append(len(keys) / (time.perf_counter() - start))
    return rates[-1]


def measure_recall(memory: mbpa.Memory, entries: int, dtype: torch.dtype) -> float:
    """Return the share of the true nearest that a read finds, among the keys first written.

    The last keys overwrote the first ones; ids say which.
    """
    queries = draw_queries(QUERIES_CHECKED, 20, memory.device)
    found = memory.read(queries, NEIGHBORS)
    overwritten = memory.next_id - entries
    best = torch.full((len(queries), NEIGHBORS), torch.inf, dtype=torch.float64)
    best, ids = best.to(memory.device), torch.full(best.shape, -1).to(memory.device)
    start = 0
    blocks = draw_keys(entries, dtype, memory.device)
    for keys in itertools.chain(blocks, draw_last_writes(dtype, memory.device)):
        block_ids = torch.arange(start, start + len(keys), device=memory.device)
        start += len(keys)
        keys, block_ids = keys[block_ids >= overwritten], block_ids[block_ids >= overwritten]
        for part, part_ids in zip(keys.split(1 << 16), block_ids.split(1 << 16), strict=True):
            wide = part.double()
            distances = torch.stack([(wide - q.double()).square().sum(1) for q in queries])
            best, place = torch.cat([best, distances], 1).topk(NEIGHBORS, 1, largest=False)
            all_ids = torch.cat([ids, part_ids.expand(len(queries), -1)], 1)
            ids = all_ids.gather(1, place)
    pairs = zip(found.ids.to(ids.device), ids, strict=True)
    hits = sum(int(torch.isin(row, true).sum()) for row, true in pairs)
    return hits / ids.numel()


def draw_last_writes(dtype: torch.dtype, device: torch.device) -> Iterator[Tensor]:
    """Yield what `time_writes` writes."""
    for turn in (10, 11):
        yield draw_queries(1_000, turn, device).to(dtype)


def count_bytes(device: torch.device) -> int:
    """Return how many bytes this process holds on the device."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this system does not say how much memory a process holds")


# Table and picture


def read_reports(folder: Path) -> list[dict[str, Any]]:
    """Read all reports of growth in the folder, in order of their names."""
    return [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("growth-*.json"))]


def format_reports(reports: Sequence[dict[str, Any]]) -> str:
    """Return the table of the document."""
    rows = [["memory", "entries", "GB", "ms, alone", "ms, batch of 64", "writes/s", "recall"]]
    for report in reports:
        for size in report["sizes"]:
            alone, together = (size["milliseconds"][str(batch)] for batch in BATCHES)
            numbers = size["bytes"] / 1e9, alone, together, size["writes per second"]
            recall = f"{100 * size['recall']:.1f}%"
            measured = map(round_number, numbers)
            rows.append([describe_report(report), f"{size['entries']:,}", *measured, recall])
    return format_rows(rows)


def describe_report(report: dict[str, Any]) -> str:
    name, machine = {"exact": "`ExactMemory`", "graph": "`GraphMemory`"}, report["machine"]
    device, threads = machine["device"], machine["threads"]
    if "NVIDIA" not in device:
        device += f", {threads} {'core' if threads == 1 else 'cores'}"
    return f"{name[report['memory']]}, {report['dtype']}, {device}"


def draw_curves(reports: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw times and bytes by number of entries."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (times, sizes) = pyplot.subplots(1, 2, figsize=(10, 4))
    for report in reports:
        label = describe_report(report).replace("`", "")
        entries = [size["entries"] for size in report["sizes"]]
        alone = [size["milliseconds"]["1"] for size in report["sizes"]]
        times.loglog(entries, alone, "o-", label=label)
        sizes.loglog(entries, [size["bytes"] / 1e9 for size in report["sizes"]], "o-", label=label)
    times.set_ylabel("milliseconds per read of one query")
    sizes.set_ylabel("GB")
    for panel in (times, sizes):
        panel.set_xlabel("entries of 384 dimensions")
        panel.grid(alpha=0.3)
    times.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    raise SystemExit(main())
