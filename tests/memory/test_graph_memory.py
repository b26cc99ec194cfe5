"""Approximate memories: exact in everything but which entries are found, and that is measured."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mbpa
from benchmarks.graph_memory import Sentences
from mbpa.errors import CheckpointError, MissingExtraError
from mbpa.memory import GraphMemory, graph_index, graph_set, graph_widths, recall
from mbpa.memory.graph_index import Graph, GraphSettings
from mbpa.memory.graph_widths import GraphContent, Widths, calibrate, choose_widths
from mbpa.testing import check_memory

ROOT = Path(__file__).parents[2]
DIM = 24


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("precision", "background", "parts"),
    [
        ("int8", False, 1),
        ("int8", True, 2),
        ("bfloat16", True, 1),
        ("bfloat16", False, 3),
        ("float32", False, 2),
        ("float32", True, 4),
    ],
)
def test_the_contract_holds_with_a_graph_from_the_first_entry(
    precision: Any, background: bool, parts: int
) -> None:
    def make(capacity: int, key_dim: int) -> GraphMemory:
        return GraphMemory(
            capacity,
            key_dim,
            precision=precision,
            exact_below=0,
            background=background,
            parts=parts,
        )

    check_memory(make, exact=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_a_small_memory_is_exact(dtype: torch.dtype) -> None:
    check_memory(lambda capacity, key_dim: GraphMemory(capacity, key_dim, dtype=dtype))


def test_the_contract_holds_around_the_size_at_which_graphs_begin() -> None:
    check_memory(
        lambda capacity, key_dim: GraphMemory(capacity, key_dim, exact_below=5), exact=False
    )


def draw(count: int, seed: int, *, topics: int = 0) -> Tensor:
    """Return keys in clusters; `topics` selects other clusters."""
    centers = torch.randn(40, DIM, generator=torch.Generator().manual_seed(1000 + topics))
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(40, (count,), generator=generator)
    return centers[chosen] + 0.5 * torch.randn(count, DIM, generator=generator)


def make(capacity: int = 3000, **named: Any) -> GraphMemory:
    settings: dict[str, Any] = {"exact_below": 100, "background": False, "parts": 2, **named}
    return GraphMemory(capacity, DIM, **settings)


def fill(memory: GraphMemory, count: int, seed: int = 0, **named: Any) -> Tensor:
    return memory.write(draw(count, seed, **named), torch.arange(count))


def find_themselves(memory: GraphMemory) -> float:
    """Return the share of live entries that a query with their own key finds."""
    held = memory.entries()
    return float((memory.read(held.keys, 1).ids[:, 0] == held.ids).double().mean())


# Recall


@pytest.mark.parametrize("precision", ["int8", "bfloat16", "float32"])
def test_recall_stays_high_through_turnovers_and_stale_nodes_are_few(precision: Any) -> None:
    memory = make(1500, precision=precision)
    fill(memory, 1500)
    assert memory.is_indexed
    for turn in range(1, 7):  # three turnovers, each with other clusters
        for part in range(10):
            fill(memory, 75, 100 * turn + part, topics=turn // 2)
        assert memory.is_indexed
        assert memory.stale <= memory.capacity
        assert memory.measure_recall(draw(100, 7, topics=turn // 2), 20) >= 0.97
    assert find_themselves(memory) >= 0.999
    assert memory.rebuilds == 1  # only the first: a ring needs no more


@pytest.mark.heavy
def test_stale_nodes_of_deleted_entries_are_cleared_by_a_rebuild() -> None:
    memory = make()
    fill(memory, 2000)
    for turn in range(12):
        fill(memory, 500, turn)
        memory.delete(memory.ids[torch.randperm(len(memory))[:500]])
        assert memory.stale <= len(memory) + 500 + memory.exact_below
    assert memory.rebuilds > 2
    assert memory.measure_recall(draw(100, 7), 20) >= 0.97


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_neighbours_that_arrive_in_a_regular_order_are_in_all_parts(parts: int) -> None:
    """Otherwise a part would hold all the neighbours of a query, and return a share of them."""
    keys = torch.stack([draw(750, topic, topics=topic) + 20 * topic for topic in range(4)], 1)
    memory = make(3000, parts=parts, precision="float32")
    memory.write(keys.flatten(0, 1), torch.arange(3000))  # every fourth is of the same kind
    assert memory.is_indexed
    assert memory.measure_recall(keys[::10].flatten(0, 1), 40) >= 0.98


@pytest.mark.heavy
@pytest.mark.parametrize("parts", [2, 3, 4, 7])
@pytest.mark.parametrize("capacity", [1000, 1 << 16, 1 << 20])
def test_entries_at_regular_intervals_are_spread_over_the_parts(capacity: int, parts: int) -> None:
    serial = np.arange(3_000_000)
    labels = ((serial << graph_index.SLOT_BITS) | (serial % capacity)).astype(np.uint64)

    def check(places: Any) -> None:
        expected, deviation = len(places) / parts, (len(places) / parts * (1 - 1 / parts)) ** 0.5
        counts = np.bincount(places, minlength=parts)
        assert abs(counts - expected).max() < 5 * deviation

    for interval in (1, 2, 3, 4, 7, 64, 100, 1000, 1024, 1 << 16):  # written one by one
        alone = labels[::interval][:1000, None]
        check(np.concatenate([graph_index._spread(each, parts) for each in alone]))
    for size in (2, 32):  # written in batches
        batches = [graph_index._spread(each, parts) for each in labels[:20_000].reshape(-1, size)]
        shares = [np.bincount(each, minlength=parts) for each in batches]
        assert all(np.ptp(each) <= 1 for each in shares)  # no part keeps a batch waiting
        for interval in (1, 2, 3, 4, 7, 32, 64):
            check(np.concatenate(batches)[::interval])


@pytest.mark.parametrize("count", [1, 5, 20])
def test_parts_are_searched_side_by_side_and_one_after_the_other_alike(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    memory = make(parts=3)
    fill(memory, 2500)
    queries = draw(count, 9)
    found = memory.read(queries, 10)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert torch.equal(memory.read(queries, 10).ids, found.ids)
    fill(memory, 20, 1)
    assert find_themselves(memory) >= 0.999


def test_a_part_that_fails_fails_the_whole() -> None:
    graph = Graph(GraphSettings("float32", 8, 16, parts=3), draw(100, 0))
    graph.add(np.arange(100), draw(100, 0))
    graph._parts[2] = None
    with pytest.raises(TypeError):
        graph.search(draw(1, 1), 10, expansion=20, threads=1)


@pytest.mark.heavy
def test_recall_is_measured_on_live_queries_and_raised_to_the_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recall, "MEASURING_SHARE", 1e9)  # measure every query
    memory = make(
        precision="float32",  # which ranks no spare candidates
        connectivity=8,
        expansion_add=16,
        expansion_search=30,
        target_recall=0.99,
        parts=1,
    )
    fill(memory, 3000)
    assert memory.recall is None
    assert memory.measure_recall(draw(200, 5), 20) >= 0.98  # the graph was tried when it was built
    memory._graphs.widths = Widths(30, 30)
    assert memory.measure_recall(draw(200, 5), 20) < 0.975
    for seed in range(1500):
        memory.read(draw(1, seed), 20)
    assert memory.widths.near > 60
    measured = memory.measure_recall(draw(200, 5), 20)
    assert measured >= 0.98
    assert memory.recall is not None
    assert abs(memory.recall - measured) < 0.02


@pytest.mark.heavy
def test_a_search_is_narrowed_again_when_recall_is_more_than_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recall, "MEASURING_SHARE", 1e9)
    memory = make(expansion_search=16, target_recall=0.5)
    fill(memory, 3000)
    memory._graphs.widths = Widths(64, 64)
    for seed in range(1000):
        memory.read(draw(1, seed), 20)
        if memory.widths.near == 16:
            return
    raise AssertionError(memory.settings)


@pytest.mark.heavy
def test_measuring_takes_a_small_share_of_the_time() -> None:
    memory = make(8_000)
    fill(memory, 8_000)
    query, taken = draw(1, 1), 0
    measure = memory._measure

    def count(*arguments: Any) -> None:
        nonlocal taken
        taken += 1
        measure(*arguments)

    memory._measure = count  # type: ignore[method-assign]
    for _ in range(300):
        memory.read(query, 20)
    assert 1 <= taken <= 9  # of 18, if all reads were measured


@pytest.mark.heavy
def test_any_of_several_equally_near_entries_counts_as_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each key occurs three times, so most queries have more neighbours than k equally near."""
    monkeypatch.setattr(recall, "MEASURING_SHARE", 1e9)  # measure every query
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(0, 3, (1_000, 8), generator=generator).float()
    memory = GraphMemory(3_000, 8, exact_below=100, background=False, parts=2)
    memory.write(keys.repeat(3, 1), torch.arange(3_000))
    assert memory.widths.far < 200  # they were tried out
    queries = torch.randint(0, 3, (500, 8), generator=generator).float()
    assert memory.measure_recall(queries, 10) >= 0.98
    for query in queries:
        memory.read(query[None], 10)
    assert memory.widths.far < 200  # and not widened by recall on live queries
    assert memory.recall is not None
    assert memory.recall >= 0.98


def test_hits_are_counted_by_distance_and_at_most_as_many_as_there_are() -> None:
    inf = torch.inf
    found = torch.tensor([[1.0, 2.0, 2.0, 2.0], [1.0, 3.0, inf, inf], [1.0, 2.0, inf, inf]])
    true = torch.tensor([[1.0, 2.0, 2.0], [1.0, 2.0, 2.0], [inf, inf, inf]])
    assert recall.count_hits(found, true).tolist() == [3, 1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_true_neighbours_are_ranked_by_the_distances_that_reads_return(dtype: torch.dtype) -> None:
    """Keys far from the origin, whose squared norms round off more than their distances."""
    keys = (20 + draw(500, 0)).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    queries = (20 + draw(20, 1)).to(wide)
    norms = keys.to(wide).square().sum(1)
    norms[::7] = torch.inf  # empty slots
    slots, distances = recall.find_true_neighbors(keys, norms, queries, 30)
    every = (keys.to(wide) - queries[:, None]).square().sum(2).where(norms.isfinite(), torch.inf)
    assert torch.equal(distances, every.sort(1).values[:, :30])
    assert torch.equal(recall.measure_distances(keys, queries, slots), distances)
    assert recall.measure_distances(keys, queries, slots - slots - 1).isinf().all()


@pytest.mark.heavy
@pytest.mark.parametrize("precision", ["int8", "float32"])
@pytest.mark.parametrize("is_clustered", [False, True])
def test_queries_outside_all_entries_are_answered_by_an_exhaustive_search(
    precision: Any, is_clustered: bool
) -> None:
    memory = make(20_000, precision=precision, expansion_add=48)
    keys, queries = (
        draw(n, n)
        if is_clustered
        else torch.randn(n, DIM, generator=torch.Generator().manual_seed(n))
        for n in (20_000, 100)
    )
    memory.write(keys, torch.zeros(20_000, dtype=torch.int64))
    assert memory.measure_recall(queries, 20) >= 0.97
    for factor in (2, 5, 100):
        assert memory.measure_recall(factor * queries, 20) >= 0.95
    both = torch.cat([queries[:3], 5 * queries[:3]])
    found = memory.read(both, 20)
    assert torch.equal(found.ids[:3], memory.read(queries[:3], 20).ids)
    assert torch.equal(found.ids[3:], memory.read(5 * queries[:3], 20).ids)
    few, _ = memory.widths.find_far_and_outside(memory._graphs.search(queries, 20).distances)
    assert few.mean() < 0.5


@pytest.mark.parametrize("precision", ["int8", "bfloat16"])
def test_queries_in_groups_narrower_than_copies_are_rounded_are_not_outside(precision: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    groups = 10 * torch.randn(40, DIM, generator=generator)
    memory = make(4_000, precision=precision)
    places = torch.arange(4_100) % 40
    keys = groups[places] + 1e-3 * torch.randn(4_100, DIM, generator=generator)
    memory.write(keys[:4_000], places[:4_000])
    found = memory._graphs.search(keys[4_000:], 20)
    assert memory.widths.find_far_and_outside(found.distances)[1].mean() <= 0.05


@pytest.mark.heavy
def test_widths_are_tried_out_again_when_many_queries_lie_outside() -> None:
    """Otherwise every read would compare with all entries once the data have moved."""
    memory = make(2_000)
    fill(memory, 2_000)
    for seed in range(40):
        memory.write(10 * draw(50, seed), torch.arange(50))
    assert memory.rebuilds == 1
    for seed in range(300):
        memory.read(10 * draw(1, seed), 20)
    assert memory.rebuilds == 2
    assert memory.widths.limit is not None
    queries = 10 * draw(200, 7)
    found = memory._graphs.search(queries, 20)
    assert memory.widths.find_far_and_outside(found.distances)[1].mean() < 0.05
    for seed in range(600):
        memory.read(10 * draw(1, seed), 20)
    assert memory.rebuilds == 2


# What holds exactly


def test_neighbours_have_the_distances_and_order_of_an_exact_memory() -> None:
    approximate, exact = make(), mbpa.ExactMemory(3000, DIM)
    for memory in (approximate, exact):
        memory.write(draw(3000, 0), torch.arange(3000))
    queries = draw(50, 1)
    found, true = approximate.read(queries, 20), exact.read(queries, 20)
    same = found.ids == true.ids
    rows = same.all(1)
    assert rows.float().mean() > 0.8
    for name in ("distances", "dots", "values", "keys"):
        assert torch.equal(getattr(found, name)[rows], getattr(true, name)[rows])
    assert (found.distances.diff(dim=1) >= 0).all()


def test_the_content_does_not_depend_on_the_order_of_writes() -> None:
    keys, labels = draw(1000, 0), torch.arange(1000)
    some, other = make(), make()
    some.write(keys, labels)
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(1))
    for part in order.split(70):
        other.write(keys[part], labels[part])
    held = some.entries(), other.entries()
    place = [each.values.argsort() for each in held]
    assert torch.equal(held[0].keys[place[0]], held[1].keys[place[1]])
    # What both find of an entry is the same: its distance and its value.
    queries = draw(30, 2)
    one, two = some.read(queries, 20), other.read(queries, 20)
    for row in range(30):
        near = dict(zip(one.values[row].tolist(), one.distances[row].tolist(), strict=True))
        also = dict(zip(two.values[row].tolist(), two.distances[row].tolist(), strict=True))
        assert len(near.keys() & also.keys()) >= 15
        assert all(near[value] == also[value] for value in near.keys() & also.keys())


def test_a_deleted_entry_is_never_found_not_even_while_rebuilding() -> None:
    memory = make(background=True)
    fill(memory, 2000)
    gone = memory.ids[::3]
    keys = memory.get_keys(gone)
    memory.wait()
    memory.rebuild(wait=False)
    memory.delete(gone)
    found = memory.read(keys, 10)
    memory.wait()
    after = memory.read(keys, 10)
    assert not torch.isin(found.ids, gone).any()
    assert not torch.isin(after.ids, gone).any()


def test_after_a_rebuild_no_trace_of_a_deleted_key_is_saved(tmp_path: Path) -> None:
    memory = make()
    fill(memory, 1000)
    key = draw(1, 99)
    trace = next(iter(memory._graphs.graphs))._round(key).tobytes()
    secret = memory.write(key, torch.tensor([7]))

    def holds_trace(name: str) -> bool:
        memory.save(tmp_path / name)
        files = list((tmp_path / name).iterdir())
        parts = (trace, key.numpy().tobytes())
        return any(part in file.read_bytes() for file in files for part in parts)

    assert holds_trace("before")
    memory.delete(secret)
    assert holds_trace("deleted")  # as a stale node
    memory.rebuild()
    # The scale of a new graph differs a little, so compare with that of the new one, too.
    trace_now = next(iter(memory._graphs.graphs))._round(key).tobytes()
    assert not holds_trace("rebuilt")
    assert all(trace_now not in file.read_bytes() for file in (tmp_path / "rebuilt").iterdir())


# Rebuilding in the background


@pytest.mark.heavy
def test_writes_during_a_rebuild_are_in_the_graph_that_is_swapped_in() -> None:
    memory = make(4000, background=True)
    fill(memory, 3000)
    memory.wait()
    memory.rebuild(wait=False)
    with memory.lock:  # so that the swap must wait for these changes
        new = fill(memory, 600, 1)
        memory.delete(memory.ids[10:400])
        memory.replace_keys(memory.ids[:50], draw(50, 2))
    memory.wait()
    assert memory.is_indexed
    assert memory.holds(new).all()
    assert find_themselves(memory) == 1.0
    assert memory.measure_recall(draw(100, 3), 20) >= 0.97


@pytest.mark.heavy
def test_large_writes_are_added_to_the_graphs_that_are_there() -> None:
    memory = make(8000, background=True)
    for seed in range(4):
        fill(memory, 1500, seed)
    memory.wait()
    assert memory.is_indexed
    assert memory.stale == 0  # nothing was added twice
    assert sum(len(each) for each in memory._graphs.graphs) == 6000
    assert find_themselves(memory) >= 0.999


@pytest.mark.heavy
def test_readers_and_writers_go_on_during_rebuilds() -> None:
    memory = make(2000, background=True)
    fill(memory, 2000)
    errors: list[BaseException] = []
    stop = threading.Event()

    def work(act: Any) -> None:
        try:
            turn = 0
            while not stop.is_set():
                act(turn)
                turn += 1
        except BaseException as error:
            errors.append(error)

    def read(turn: int) -> None:
        found = memory.read(draw(3, turn), 10)
        assert found.mask.all()

    def write(turn: int) -> None:
        fill(memory, 20, turn)
        with memory.lock:
            memory.delete(memory.ids[::50])

    threads = [threading.Thread(target=work, args=(act,)) for act in (read, read, write)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        memory.rebuild()
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors
    memory.wait()
    assert find_themselves(memory) >= 0.999


def test_a_rebuild_of_content_that_is_gone_has_no_effect() -> None:
    memory = make(4000, background=True)
    fill(memory, 4000)
    memory.clear()
    assert len(memory.read(draw(2, 0), 5).ids[0]) == 0
    fill(memory, 300, 5)
    memory.wait()
    assert len(memory) == 300
    assert find_themselves(memory) == 1.0


def test_waiting_never_meets_work_that_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def start_late(thread: threading.Thread) -> None:
        time.sleep(0.02)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_late)
    memory = make(4000, background=True)
    fill(memory, 4000)
    first = memory._thread._thread
    memory.clear()  # the first job notices, ends, and begins the next
    fill(memory, 300)
    for _ in range(1000):
        if memory._thread._thread not in (first, None):
            break
        time.sleep(0.001)
    memory.wait()
    assert find_themselves(memory) == 1.0


def test_a_failed_rebuild_is_raised_by_the_next_change(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = make(background=True)
    with monkeypatch.context() as patch:

        def fail(*arguments: Any, **named: Any) -> None:
            raise MemoryError("no room for a graph")

        patch.setattr(Graph, "add", fail)
        fill(memory, 500)
        with pytest.raises(RuntimeError, match=r"in the background failed .*no room") as caught:
            memory.wait()
        assert isinstance(caught.value.__cause__, MemoryError)
        assert find_themselves(memory) == 1.0  # by exhaustive search
        fill(memory, 300)  # begins another
        while memory._thread.is_running:
            time.sleep(0.01)
        with pytest.raises(RuntimeError, match="all entries are intact"):
            fill(memory, 1)
        assert len(memory) == 800
    fill(memory, 1)
    memory.wait()
    assert memory.is_indexed


@pytest.mark.parametrize("change", ["write", "delete"])
def test_a_rebuild_that_cannot_begin_leaves_the_change_whole(
    monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    memory = GraphMemory(300, DIM, exact_below=100)
    ids = memory.write(torch.full((300, DIM), 5.0), torch.full((300,), 7))
    memory.wait()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    memory._wants_rebuild = True
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        if change == "write":
            memory.write(torch.ones(150, DIM), torch.ones(150, dtype=torch.int64))
        else:
            memory.delete(ids[:150])
        memory.read(torch.full((1, DIM), 5.0), 3)
    kept = memory.entries()
    is_old = torch.isin(kept.ids, ids)
    assert is_old.sum() == 150
    assert len(kept.ids) == (300 if change == "write" else 150)
    assert torch.equal(kept.values, torch.where(is_old, 7, 1))
    assert torch.equal(kept.keys[:, 0], torch.where(is_old, 5.0, 1.0))
    with pytest.raises(RuntimeError, match=r"can't start new thread.*all entries are intact"):
        memory.wait()


@pytest.mark.heavy
def test_a_memory_with_graphs_is_sent_to_a_new_process() -> None:
    memory = make(2_000, parts=1)
    fill(memory, 900)
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=find_oldest, args=(memory,), daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode == 0


def find_oldest(memory: GraphMemory) -> None:
    """Find the oldest entry by its key."""
    assert memory.is_indexed
    assert memory.read(memory.get_keys([0]), 1).ids == 0


def test_a_write_that_fails_in_the_graph_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = make()
    fill(memory, 3000)
    before = memory.entries()
    with monkeypatch.context() as patch:

        def fail(*arguments: Any) -> None:
            raise MemoryError

        patch.setattr(Graph, "add", fail)
        with pytest.raises(MemoryError):
            fill(memory, 10, 1)
    for some, other in zip(before, memory.entries(), strict=True):
        assert torch.equal(some, other)
    assert find_themselves(memory) >= 0.999


def run_script(script: str) -> str:
    prepared = f"import os, sys, time, torch, mbpa\n{script}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", prepared]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


BIG = """
memory = mbpa.GraphMemory(12_000, 64, exact_below=100)
memory.write(torch.randn(12_000, 64), torch.zeros(12_000, dtype=torch.int64))
"""


@pytest.mark.heavy
def test_a_process_can_end_during_a_rebuild() -> None:
    assert run_script(BIG + "print(memory._thread.is_running)") == "True\n"


@pytest.mark.heavy
def test_a_process_can_fork_during_a_rebuild() -> None:
    script = """
child = os.fork()
if child == 0:
    assert memory.read(torch.randn(2, 64), 5).mask.all()
    memory.write(torch.randn(3, 64), torch.zeros(3, dtype=torch.int64))
    memory.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
memory.write(torch.randn(3, 64), torch.zeros(3, dtype=torch.int64))
memory.wait()
print(memory.is_indexed, len(memory))
"""
    assert run_script(BIG + script) == "True 12000\n"


def test_closing_ends_the_work_in_the_background_and_keeps_the_entries() -> None:
    memory = GraphMemory(20_000, DIM, exact_below=100)
    fill(memory, 20_000)
    memory.close()
    assert not memory._thread.is_running
    assert not memory.is_indexed
    assert memory.read(memory.entries().keys[:5], 1).ids[:, 0].tolist() == [0, 1, 2, 3, 4]


# Saving


@pytest.mark.heavy
@pytest.mark.parametrize("mmap", [False, True])
def test_a_saved_memory_is_loaded_with_its_graphs(tmp_path: Path, mmap: bool) -> None:
    memory = make()
    fill(memory, 2500)
    for seed in range(10):
        fill(memory, 100, seed + 1)
    memory.delete(memory.ids[5:300:7])
    memory.save(tmp_path / "m")
    saved = {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()}
    loaded = GraphMemory.load(tmp_path / "m", mmap=mmap)
    assert loaded.is_indexed
    assert loaded.settings == memory.settings
    assert loaded.schema == memory.schema
    queries = draw(50, 3)
    for step in range(3):
        assert loaded.next_id == memory.next_id
        for some, other in zip(memory.entries(), loaded.entries(), strict=True):
            assert torch.equal(some, other)
        found, also = memory.read(queries, 10), loaded.read(queries, 10)
        assert (found.ids == also.ids).float().mean() > 0.97
        for each in (memory, loaded):
            fill(each, 200, 50 + step)
            each.delete(each.ids[::40])
    assert find_themselves(loaded) >= 0.999
    assert {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()} == saved


@pytest.mark.parametrize("mmap", [False, True])
def test_a_memory_saved_before_graphs_had_parts_is_loaded(tmp_path: Path, mmap: bool) -> None:
    memory = make(parts=1)
    fill(memory, 1000)
    memory.save(tmp_path)
    path = tmp_path / "graph-memory.json"
    manifest = json.loads(path.read_text())
    manifest["format"] = 1
    del manifest["settings"]["parts"]
    for described in manifest["graphs"]:
        described["settings"] = described["settings"][:3]
        (name,) = described.pop("files")
        described["file"] = name.replace("part0", "")
        (tmp_path / name).rename(tmp_path / described["file"])
        manifest["files"][described["file"]] = manifest["files"].pop(name)
    path.write_text(json.dumps(manifest))
    loaded = GraphMemory.load(tmp_path, mmap=mmap)
    assert loaded.is_indexed
    queries = draw(30, 3)
    assert torch.equal(loaded.read(queries, 10).ids, memory.read(queries, 10).ids)


def test_a_memory_saved_during_a_rebuild_is_whole(tmp_path: Path) -> None:
    memory = make(background=True)
    fill(memory, 2000)
    memory.save(tmp_path / "m")  # no graph yet, or just finished
    memory.wait()
    memory.rebuild(wait=False)
    fill(memory, 50, 1)
    memory.save(tmp_path / "m")
    loaded = GraphMemory.load(tmp_path / "m")
    loaded.rebuild()
    for some, other in zip(memory.entries(), loaded.entries(), strict=True):
        assert torch.equal(some, other)
    assert find_themselves(loaded) == 1.0
    memory.close()


def test_an_earlier_save_is_replaced(tmp_path: Path) -> None:
    memory = make()
    fill(memory, 500)
    memory.save(tmp_path / "m")
    (tmp_path / "m" / "notes.txt").write_text("mine")
    fill(memory, 5, 1)
    memory.save(tmp_path / "m")
    assert len(GraphMemory.load(tmp_path / "m")) == 505
    names = sorted(path.name.split("-")[0] for path in (tmp_path / "m").iterdir())
    assert names == ["graph", "graph0part0", "graph0part1", "keys", "notes.txt", "tensors"]


@pytest.mark.parametrize("part", ["keys", "tensors", "graph0part1"])
def test_altered_files_are_refused(tmp_path: Path, part: str) -> None:
    memory = make()
    fill(memory, 500)
    memory.save(tmp_path)
    path = next(tmp_path.glob(f"{part}-*"))
    content = bytearray(path.read_bytes())
    content[len(content) // 8] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="was altered"):
        GraphMemory.load(tmp_path)
    path.write_bytes(content[:-1])
    for mmap in (False, True):
        with pytest.raises(CheckpointError, match=r"must have \d+ bytes"):
            GraphMemory.load(tmp_path, mmap=mmap)
    path.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        GraphMemory.load(tmp_path)
    with pytest.raises(CheckpointError, match="does not describe a saved GraphMemory"):
        GraphMemory.load(tmp_path / "elsewhere")


def test_a_model_with_a_graph_memory_is_saved_and_loaded(tmp_path: Path) -> None:
    memory = make(500, target_recall=0.9)
    model = mbpa.MbPA(
        head=torch.nn.Linear(DIM, 10),
        memory=memory,
        predictor=mbpa.Adapted(mbpa.Gradient(lr=0.1, steps=2), k=5),
    )
    model.write(keys=draw(400, 0), values=torch.arange(400) % 10)
    model.save(tmp_path)
    loaded = mbpa.MbPA.load(tmp_path)
    assert isinstance(loaded.memory, GraphMemory)
    assert loaded.memory.settings == memory.settings
    torch.testing.assert_close(loaded(keys=draw(5, 1)), model(keys=draw(5, 1)))


# Sizes, forms and arguments


def test_growing_keeps_the_graphs_and_shrinking_makes_new_ones() -> None:
    memory = make(1000)
    fill(memory, 1300)
    memory.delete(memory.ids[::9])
    rebuilds, before = memory.rebuilds, memory.entries()
    memory.resize(2000)
    assert memory.rebuilds == rebuilds
    for some, other in zip(before, memory.entries(), strict=True):
        assert torch.equal(some, other)
    fill(memory, 1500, 3)
    assert len(memory) == 2000
    assert find_themselves(memory) >= 0.999
    memory.resize(700)
    assert len(memory) == 700
    assert find_themselves(memory) >= 0.999


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float64, 1e150), (torch.float32, 1e-10)])
@pytest.mark.parametrize("precision", ["int8", "float32"])
def test_keys_of_any_size_are_found(dtype: torch.dtype, scale: float, precision: Any) -> None:
    memory = make(dtype=dtype, precision=precision)
    keys = draw(1000, 0).to(dtype) * scale
    memory.write(keys, torch.arange(1000))
    assert memory.is_indexed
    assert find_themselves(memory) >= 0.999


def test_equal_keys_are_found_newest_first() -> None:
    memory = make()
    memory.write(torch.ones(300, DIM), torch.arange(300))
    memory.write(draw(700, 0), torch.arange(700))
    found = memory.read(torch.ones(1, DIM), 5)
    assert (found.distances == 0).all()
    assert found.ids[0].tolist() == sorted(found.ids[0].tolist(), reverse=True)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"target_recall": 1.0}, "target_recall must be between 0 and 1, got 1.0"),
        ({"exact_below": -1}, "exact_below must be at least 0, got -1"),
        ({"device": "meta"}, "device must be a CPU, got meta"),
        ({"capacity": 1 << 29}, "capacity must be at most 268435456, got 536870912"),
    ],
)
def test_impossible_arguments_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        GraphMemory(**{"capacity": 10, "key_dim": 2, **arguments})


def test_it_stays_on_the_cpu() -> None:
    memory = make()
    fill(memory, 200)
    with pytest.raises(ValueError, match="device must be a CPU, got meta"):
        memory.to("meta")
    assert find_themselves(memory) == 1.0


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "usearch.index", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'mbpa\[graph\]'"):
        GraphMemory(10, 2)


def test_labels_that_run_out_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_set, "MAX_SERIAL", 8000)
    memory = make(1000)
    for seed in range(20):
        fill(memory, 400, seed)
    assert memory.is_indexed
    assert find_themselves(memory) >= 0.999


@pytest.mark.heavy
def test_far_queries_are_searched_for_more_widely() -> None:
    sentences = Sentences(6_000, 0)  # one in ten is of no group
    memory = GraphMemory(
        6_000,
        384,
        precision="float32",  # which ranks no spare candidates
        connectivity=12,
        expansion_add=48,
        expansion_search=16,
        parts=1,
        exact_below=0,
        background=False,
    )
    memory.write(sentences.draw(6_000), torch.zeros(6_000, dtype=torch.int64))
    queries, widths = sentences.draw(1_000), memory.widths
    assert widths.far > 3 * widths.near
    assert memory.measure_recall(queries, 20) >= 0.98
    is_far, _ = widths.find_far_and_outside(memory._graphs.search(queries, 20).distances)
    assert 0.1 < is_far.mean() < 0.3
    far = queries[torch.from_numpy(is_far)]
    found = memory.measure_recall(far, 20)
    memory._graphs.widths = Widths(widths.near, widths.near)
    assert memory.measure_recall(far, 20) < found - 0.1


def test_widths_are_saved_and_copied(tmp_path: Path) -> None:
    memory = make(3_000)
    fill(memory, 3_000)
    for widths in (Widths(70, 300), Widths(70, 300, 0.25, 2.5)):
        memory._graphs.widths = widths
        memory.save(tmp_path / "saved")
        assert GraphMemory.load(tmp_path / "saved").widths == widths
        assert copy.deepcopy(memory).widths == widths


@pytest.mark.parametrize("widths", [[70, 300, 0.25], None])
def test_a_memory_saved_before_there_were_all_widths_is_loaded(
    tmp_path: Path, widths: list[float] | None
) -> None:
    memory = make()
    fill(memory, 1000)
    memory.save(tmp_path)
    path = tmp_path / "graph-memory.json"
    manifest = json.loads(path.read_text())
    assert len(manifest["widths"]) == 4
    del manifest["widths"]
    if widths is not None:
        manifest["widths"] = widths
    path.write_text(json.dumps(manifest))
    loaded = GraphMemory.load(tmp_path)
    assert loaded.widths == (Widths(70, 300, 0.25) if widths else Widths(64, 64))
    assert loaded.widths.limit is None  # as before, until graphs are built again
    assert loaded.measure_recall(draw(50, 3), 10) >= 0.95
    loaded.rebuild()
    assert loaded.widths.limit is not None


def test_widths_reach_the_aim_in_sum_and_for_near_queries() -> None:
    """Near queries find everything; a far one finds `width` of its 100 neighbours."""
    expected, distances = np.full(10, 100), np.arange(10.0)

    def count_found(rows: Any, width: int) -> int:
        return sum(100 if number < 8 else min(100, width) for number in np.flatnonzero(rows))

    target = 11 / 12  # widths are chosen so that recall is 0.95: six tenths of the misses
    widths = choose_widths(count_found, expected, distances, limit=13.5, least=10, target=target)
    assert widths.near == 10
    assert widths.border == pytest.approx(7.2)
    assert 75 <= widths.far <= 75 * 1.12  # (8 · 100 + 2 · 75) / 1000 = 0.95
    assert widths.limit == 13.5
    assert widths.find_far_and_outside(np.array([[7.0] * 10, [7.5] * 10]))[0].tolist() == [
        False,
        True,
    ]
    is_far, is_outside = widths.find_far_and_outside(
        np.array([[7.0] * 10, [13.0] * 10, [14.0] * 10])
    )
    assert is_far.tolist() == [False, True, False]
    assert is_outside.tolist() == [False, False, True]
    few = np.array([[7.0] * 9 + [np.inf]])  # stale nodes hide the others
    assert widths.find_far_and_outside(few)[1].tolist() == [False]
    narrower = choose_widths(count_found, expected, distances, limit=8.5, least=10, target=target)
    assert narrower.far < widths.far  # the last query is outside, and not searched for
    assert widths._replace(limit=None).find_far_and_outside(np.full((1, 10), 99.0))[1].tolist() == [
        False
    ]
    assert widths.scale(2, 10)[:2] == (20, 2 * widths.far)
    assert widths.scale(0.01, 10)[:2] == (10, 10)
    equal = choose_widths(count_found, expected, np.ones(10), limit=1.5, least=10, target=target)
    assert equal.near == equal.far


def test_queries_for_which_no_search_is_wide_enough_are_compared_with_all_entries() -> None:
    expected, distances = np.full(10, 100), np.arange(10.0)

    def choose(near: int, far: int) -> Widths:
        def count_found(rows: Any, width: int) -> int:
            return sum(near if number < 8 else far for number in np.flatnonzero(rows))

        return choose_widths(count_found, expected, distances, limit=13.5, least=10, target=0.9)

    everything = choose(80, 100)
    assert everything[:2] == (10, 10)
    assert not everything.are_enough
    assert everything.find_far_and_outside(np.zeros((1, 10)))[1].tolist() == [True]
    only_far = choose(95, 50)
    assert only_far.limit == only_far.border
    assert not only_far.are_enough
    assert only_far.find_far_and_outside(np.array([[7.0] * 10, [7.5] * 10]))[1].tolist() == [
        False,
        True,
    ]
    assert choose(95, 80).limit == 13.5  # 0.95 · 0.8 + 0.8 · 0.2 > 0.9
    assert choose(95, 80).are_enough


@pytest.mark.heavy
def test_many_copies_of_one_key_do_not_lower_recall(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The zero vector is near to everything, and links among its copies lead nowhere else."""
    monkeypatch.setattr(recall, "MEASURING_SHARE", 1e9)  # measure every query
    generator = torch.Generator().manual_seed(0)
    keys, queries = (torch.randn(n, DIM, generator=generator) for n in (6_000, 300))
    keys[:1_200] = 0
    memory = make(6_000, parts=1)
    memory.write(keys, torch.arange(6_000))
    for has_been_enough in (False, True):
        if has_been_enough:  # live queries must show that it no longer is
            memory._graphs.widths = Widths(graph_widths.MAX_WIDTH, graph_widths.MAX_WIDTH)
            memory._meter.clear()
            assert memory.measure_recall(queries, 20) < 0.9
        for query in queries:
            memory.read(query[None], 20)
        assert not memory.widths.are_enough
        assert "no search of the graph finds 0.98" in caplog.text
        caplog.clear()
        assert memory.measure_recall(queries, 20) >= 0.98
        assert memory.recall is not None
        assert memory.recall >= 0.98
    assert memory.rebuilds == 1


@pytest.mark.heavy
def test_widths_need_not_be_enough_for_the_few_neighbours_that_a_graph_has() -> None:
    """49 of the 50 neighbours of each query are in another graph; this one is hard to search."""
    generator = torch.Generator().manual_seed(0)
    inside, queries = (torch.randn(n, DIM, generator=generator) for n in (6_000, 200))
    inside[:1_200] = 0
    others = queries.repeat(49, 1) + 0.01 * torch.randn(49 * 200, DIM, generator=generator)
    keys = torch.cat([others, inside])
    labels = np.arange(len(keys))
    nodes = labels[len(others) :]
    graph = Graph(GraphSettings("float32", 16, 64), inside)
    graph.add(nodes, inside)
    content = GraphContent(object(), keys, keys.square().sum(1), labels)
    named: dict[str, Any] = {"least": 64, "target": 0.95, "should_stop": lambda: False}
    widths = calibrate(graph, content, nodes, queries, are_keys=False, **named)
    assert widths is not None
    assert widths.are_enough
    assert widths.near == 64
    content.norms[: len(others)] = torch.inf  # as if they had never been written
    widths = calibrate(graph, content, nodes, queries, are_keys=False, **named)
    assert widths is not None
    assert not widths.are_enough


@pytest.mark.heavy
def test_widths_are_tried_out_as_reads_search_when_much_was_deleted_meanwhile() -> None:
    """What was deleted while a graph was built counts neither as found nor as missed."""
    generator = torch.Generator().manual_seed(0)
    keys, queries = (torch.randn(n, DIM, generator=generator) for n in (6_000, 400))
    how: dict[str, Any] = {"connectivity": 6, "expansion_add": 12, "expansion_search": 8}
    memory = make(6_000, precision="float32", parts=1, **how)
    ids = memory.write(keys, torch.zeros(6_000, dtype=torch.int64))
    nodes = memory._graphs.labels.copy()
    memory.delete(ids[::2])
    assert memory.stale == 3_000
    widths = calibrate(
        memory._graphs.graphs[0],
        memory._share_content(6_000),
        nodes,
        queries[:200],
        are_keys=False,
        least=8,
        target=0.98,
        should_stop=lambda: False,
    )
    assert widths is not None
    assert widths.are_enough
    memory._graphs.widths = widths
    assert memory.measure_recall(queries[200:], 50) >= 0.98


def test_the_cheaper_of_two_ways_to_reach_the_aim_is_chosen() -> None:
    """Wider searches gain more for far queries than for near ones, or the other way round."""
    expected, distances = np.full(10, 1000), np.arange(10.0)

    def choose(near: Any, far: Any) -> Widths:
        def count_found(rows: Any, width: int) -> int:
            return sum((near if row < 8 else far)(width) for row in np.flatnonzero(rows))

        return choose_widths(count_found, expected, distances, limit=13.5, least=10, target=0.95)

    far_gains = choose(lambda w: 965 + w // 20, lambda w: min(1000, 900 + w))
    assert far_gains.near == 10
    assert 90 <= far_gains.far <= 90 * 1.12  # (8 · 965 + 2 · 990) / 10000 = 0.97
    far_costs = choose(lambda w: 940 + w, lambda w: 900 + w // 20)
    assert 30 <= far_costs.near <= 30 * 1.12  # near queries alone reach the aim
    assert far_costs.far > 1_400


def test_the_widths_of_a_graph_of_few_entries_are_its_own(tmp_path: Path) -> None:
    """Beside writes of another period a graph is built whose entries are far from new queries."""
    memory = make(1_000)
    memory.write(torch.randn(1_000, DIM), torch.zeros(1_000, dtype=torch.int64))
    memory.wait()
    old, young = memory.widths, Graph(memory._settings, torch.randn(10, DIM))
    assert old.limit is not None
    for share, expected in ((0.95, None), (0.5, (300, 900))):
        young.live, young.own_widths = int(share * 1_000), None
        memory._graphs.widths = old
        memory._graphs.adopt_widths(young, Widths(300, 900, 5.0, 10.0))
        assert young.own_widths == expected
        assert memory.widths[2:] == (
            (5.0, 10.0) if expected is None else (min(5.0, old.border), max(10.0, old.limit))
        )
        assert memory.widths[:2] == ((300, 900) if expected is None else old[:2])
    memory._graphs.graphs[0].own_widths = 300, 900
    searched = []

    def search(graph: Graph, *arguments: Any, expansion: int, **named: Any) -> Any:
        searched.append(expansion)
        return original(graph, *arguments, expansion=expansion, **named)

    original = Graph.search
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Graph, "search", search)
        memory.save(tmp_path / "saved")
        for each in (memory, GraphMemory.load(tmp_path / "saved"), copy.deepcopy(memory)):
            searched.clear()
            each._graphs.search(torch.randn(2, DIM), 10)
            each._graphs.search(torch.randn(2, DIM), 10, are_far=True)
            assert searched == [300, 900]
            searched.clear()
            each._graphs.widths = Widths(64, 64, border=0.0)  # every query is far away
            each.read(torch.randn(2, DIM), 10)
            assert searched == [300, 900]
    assert memory._graphs.scale_widths(2.0)
    assert memory._graphs.graphs[0].own_widths == (600, 1_800)


@pytest.mark.heavy
def test_queries_that_find_less_than_others_are_answered() -> None:
    """Tight groups with few links: some nodes cannot be reached, and searches find fewer nodes."""
    generator = torch.Generator().manual_seed(0)
    groups = 10 * torch.randn(40, DIM, generator=generator)
    memory = make(4_000, connectivity=3, expansion_add=4, expansion_search=4, parts=3)
    places = torch.arange(4_000) % 40
    keys = groups[places] + 0.01 * torch.randn(4_000, DIM, generator=generator)
    memory.write(keys, places)
    memory.wait()
    memory._graphs.widths = Widths(4, 200, 0.0)  # every query is far away
    for count in (1, 2, 3, 9):
        found = memory.read(keys[:count] + 1e-3, 60)
        assert found.ids.shape == (count, 60)
        assert (found.distances.diff(dim=1)[found.mask[:, 1:]] >= 0).all()
    mixed = torch.cat([keys[:7], 5 * torch.randn(1, DIM, generator=generator)])
    memory._graphs.widths = Widths(4, 200, 1.0)  # only the last one is
    alone = memory.read(mixed[7:], 20)
    assert torch.equal(memory.read(mixed, 20).ids[7], alone.ids[0])


# Keys and queries that are out of the range of copies in 8 bits


def test_queries_beyond_the_range_of_the_copies_are_outside() -> None:
    """Their own copies are not: in the range, they would pass for near."""
    memory = make(6_000, parts=1)
    fill(memory, 6_000)
    for distance in (10, 1_000):
        queries = draw(100, 1)
        queries[:, 0] += distance
        assert memory.measure_recall(queries, 20) >= 0.97


@pytest.mark.heavy
def test_a_bulk_of_other_data_is_found_beside_what_was_there() -> None:
    memory = make(10_000, parts=1)
    fill(memory, 5_000)
    other = [10 * draw(n, seed) + 100 for n, seed in ((5_000, 1), (100, 2))]
    memory.write(other[0], torch.arange(5_000))
    assert memory.measure_recall(other[1], 20) >= 0.97


@pytest.mark.heavy
@pytest.mark.parametrize("shift", [3, 20])
def test_graphs_are_rebuilt_for_keys_that_drift_out_of_their_range(
    monkeypatch: pytest.MonkeyPatch, shift: int
) -> None:
    monkeypatch.setattr(recall, "MEASURING_SHARE", 1e9)  # measure every query
    memory = make(20_000, parts=1)
    fill(memory, 4_000)
    for seed in range(20):
        memory.write(shift + draw(200, seed), torch.zeros(200, dtype=torch.int64))
    for query in shift + draw(300, 50):
        memory.read(query[None], 20)
    assert memory.measure_recall(shift + draw(100, 51), 20) >= 0.97


@pytest.mark.heavy
def test_a_low_target_is_reached_again_after_a_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies in bfloat16 are too coarse far away from where they were taken, however wide."""
    monkeypatch.setattr(recall, "MEASURING_SHARE", 1e9)  # measure every query
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(40, 24, generator=generator)

    def draw_around(count: int, shift: float = 0.0) -> Tensor:
        chosen = torch.randint(40, (count,), generator=generator)
        return shift + centers[chosen] + 0.5 * torch.randn(count, 24, generator=generator)

    how: dict[str, Any] = {"target_recall": 0.8, "precision": "bfloat16", "parts": 1}
    memory = GraphMemory(20_000, 24, exact_below=100, background=False, **how)
    memory.write(draw_around(4_000), torch.zeros(4_000, dtype=torch.int64))
    for _ in range(20):
        memory.write(draw_around(200, 200), torch.zeros(200, dtype=torch.int64))
    assert memory.measure_recall(draw_around(100, 200), 20) < 0.75
    for query in draw_around(300, 200):
        memory.read(query[None], 20)
    assert memory.measure_recall(draw_around(100, 200), 20) >= 0.8


@pytest.mark.heavy
def test_deleted_copies_of_a_key_do_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Widths were tried out while the copies were among the answers."""
    monkeypatch.setattr(recall, "MEASURING_SHARE", 1e9)  # measure every query
    generator = torch.Generator().manual_seed(0)
    keys, queries = (torch.randn(n, 64, generator=generator) for n in (4_000, 400))
    memory = GraphMemory(10_000, 64, exact_below=500, parts=1, background=False)
    copies = memory.write(torch.zeros(300, 64), torch.zeros(300, dtype=torch.int64))
    memory.write(keys, torch.zeros(4_000, dtype=torch.int64))
    memory.delete(copies)
    assert memory.measure_recall(queries[300:], 20) < 0.9
    for query in queries[:300]:
        memory.read(query[None], 20)
    assert memory.measure_recall(queries[300:], 20) >= 0.97


def test_all_queries_are_outside_if_no_width_is_enough_however_few_were_found() -> None:
    none = Widths(64, 64, 1.0, -1.0)
    assert none.find_far_and_outside(np.full((3, 10), np.inf))[1].all()


def test_far_queries_of_older_graphs_remain_far_beside_a_new_one() -> None:
    memory = make(1_000)
    memory.write(torch.randn(1_000, DIM), torch.zeros(1_000, dtype=torch.int64))
    graph = Graph(memory._settings, torch.randn(10, DIM))
    for border, limit in ((5.0, 500.0), (500.0, 5_000.0)):
        memory._graphs.widths, graph.live = Widths(64, 900, 30.0, 90.0), 500
        memory._graphs.adopt_widths(graph, Widths(100, 200, border, limit))
        assert memory.widths == Widths(64, 900, min(30.0, border), limit)


def test_widths_start_anew_in_a_memory_that_was_cleared() -> None:
    memory = make(3_000, expansion_search=70)
    fill(memory, 3_000)
    assert memory.widths.limit is not None
    memory.clear()
    assert memory.widths == Widths(70, 70)
    assert Widths(3_000, 3_000).scale(1.25, 3_000)[:2] == (3_000, 3_000)
