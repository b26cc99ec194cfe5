"""The memory against a list of (id, key, value) and brute force over Σ(h−q)².

Keys are small integers wherever order matters: ties are frequent, and every distance is exact.
"""

import math
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from matrix import combine
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mbpa.memory import Entries, ExactMemory, Memory, Neighbors, backend, exact, ranking
from mbpa.testing import check_memory

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SMALL_KEYS = st.tuples(st.integers(-2, 2), st.integers(-2, 2))


def keys_of(points: list[tuple[int, int]], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(points, dtype=dtype).reshape(-1, 2)


def brute_force(keys: Tensor, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Positions and distances of the k nearest, the later first among equals, in the same dtype."""
    distances = (keys - queries[:, None]).square().sum(-1)
    order = distances.flip(1).argsort(dim=1, stable=True)[:, :k]
    order = len(keys) - 1 - order
    return order, distances.gather(1, order)


def snapshot(memory: Memory) -> tuple[Any, ...]:
    held = memory.entries()
    parts = (part.tolist() for part in held)
    return (*parts, len(memory), memory.next_id, memory.capacity, memory._ring.used)


def rows_of(found: Neighbors) -> list[list[tuple[Any, ...]]]:
    """Return (id, slot, distance, dot, value) of each neighbour, without padding."""
    columns = (found.ids, found.slots, found.distances, found.dots, found.values, found.mask)
    return [
        [entry[:-1] for entry in zip(*row, strict=True) if entry[-1]]
        for row in zip(*(column.tolist() for column in columns), strict=True)
    ]


# The contract


@pytest.mark.parametrize(
    "dtype", combine(DTYPES, keep=lambda dtype: dtype in (torch.float32, torch.bfloat16))
)
def test_the_contract_holds_for_keys_of_every_precision(dtype: torch.dtype) -> None:
    check_memory(lambda capacity, key_dim: ExactMemory(capacity, key_dim, dtype=dtype))


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, 3), torch.bfloat16),
        ((), torch.int8),
        pytest.param((), torch.float32, marks=pytest.mark.slow),
        pytest.param((2,), torch.float64, marks=pytest.mark.slow),
    ],
)
def test_the_contract_holds_for_values_of_any_shape(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    check_memory(
        lambda capacity, key_dim: ExactMemory(
            capacity, key_dim, value_shape=shape, value_dtype=dtype
        )
    )


class AgainstAList(RuleBasedStateMachine):
    """After any sequence of calls the memory holds what the list holds."""

    @initialize(capacity=st.integers(1, 6))
    def start(self, capacity: int) -> None:
        self.memory = ExactMemory(capacity, 2)
        self.listed: list[tuple[int, tuple[int, int], int]] = []
        self.next_id = 0

    @rule(points=st.lists(SMALL_KEYS, max_size=5))
    def write(self, points: list[tuple[int, int]]) -> None:
        self.write_all(points)

    @rule(points=st.lists(SMALL_KEYS, min_size=7, max_size=15))
    def write_more_than_fits(self, points: list[tuple[int, int]]) -> None:
        self.write_all(points)

    def write_all(self, points: list[tuple[int, int]]) -> None:
        ids = list(range(self.next_id, self.next_id + len(points)))
        values = torch.tensor(ids, dtype=torch.int64) + 1000
        assert self.memory.write(keys_of(points), values).tolist() == ids
        self.listed += [(i, point, i + 1000) for i, point in zip(ids, points, strict=True)]
        self.listed = self.listed[-self.memory.capacity :]
        self.next_id += len(points)

    @rule(query=SMALL_KEYS, k=st.integers(1, 8))
    def read(self, query: tuple[int, int], k: int) -> None:
        expected = sorted(
            (sum((a - b) ** 2 for a, b in zip(point, query, strict=True)), -i, value)
            for i, point, value in self.listed
        )[:k]
        found = self.memory.read(keys_of([query]), k)
        assert found.mask.all()
        assert [(d, -i, v) for i, _, d, _, v in rows_of(found)[0]] == expected

    @precondition(lambda self: self.listed)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        live = [i for i, _, _ in self.listed]
        gone = data.draw(st.lists(st.sampled_from(live), unique=True))
        self.memory.delete(gone)
        self.listed = [entry for entry in self.listed if entry[0] not in gone]

    @precondition(lambda self: self.listed)
    @rule(data=st.data())
    def replace_keys(self, data: st.DataObject) -> None:
        live = [i for i, _, _ in self.listed]
        moved = data.draw(st.lists(st.sampled_from(live), unique=True))
        points = [data.draw(SMALL_KEYS) for _ in moved]
        self.memory.replace_keys(moved, keys_of(points))
        new = dict(zip(moved, points, strict=True))
        self.listed = [(i, new.get(i, point), value) for i, point, value in self.listed]

    @rule()
    def clear(self) -> None:
        self.memory.clear()
        self.listed = []

    @rule(capacity=st.integers(1, 6))
    def resize(self, capacity: int) -> None:
        self.memory.resize(capacity)
        self.listed = self.listed[-capacity:]

    @rule()
    def save_and_restore(self) -> None:
        saved, next_id = self.memory.entries(), self.memory.next_id
        self.memory = ExactMemory(self.memory.capacity, 2)
        self.memory.restore(saved, next_id)

    @invariant()
    def holds_what_the_list_holds(self) -> None:
        ids, keys, values = (part.tolist() for part in self.memory.entries())
        points = [tuple(int(x) for x in key) for key in keys]
        assert list(zip(ids, points, values, strict=True)) == self.listed
        assert len(self.memory) == len(self.listed)
        assert self.memory.next_id == self.next_id


@pytest.mark.parametrize("examples", [60, pytest.param(300, marks=pytest.mark.slow)])
def test_any_sequence_of_calls_agrees_with_a_list(examples: int) -> None:
    run_state_machine_as_test(
        AgainstAList, settings=settings(max_examples=examples, stateful_step_count=25)
    )


@pytest.mark.heavy
@given(
    capacity=st.integers(1, 7),
    before=st.lists(SMALL_KEYS, max_size=10),
    deleted=st.sets(st.integers(0, 9), max_size=4),
    stream=st.lists(SMALL_KEYS, max_size=12),
    block=st.integers(1, 12),
    k=st.integers(1, 5),
    keys_for=st.none() | st.integers(0, 6),
)
def test_causal_reads_are_those_of_one_entry_at_a_time(
    capacity: int,
    before: list[tuple[int, int]],
    deleted: set[int],
    stream: list[tuple[int, int]],
    block: int,
    k: int,
    keys_for: int | None,
) -> None:
    one_by_one, blocked = ExactMemory(capacity, 2), ExactMemory(capacity, 2)
    for memory in (one_by_one, blocked):
        ids = memory.write(keys_of(before), torch.arange(len(before)))
        memory.delete([i for i in ids[-capacity:].tolist() if i in deleted])
    keys, values = keys_of(stream), torch.arange(len(stream)) + 100
    for start in range(0, max(1, len(stream)), block):
        part = slice(start, start + block)
        was, everything = snapshot(blocked), rows_of(blocked.read(torch.zeros(1, 2), capacity))[0]
        slots = {i: slot for i, slot, *_ in everything}
        found = blocked.read_causally(keys[part], values[part], k, keys_for=keys_for)
        assert snapshot(blocked) == was
        for row, (key, value) in enumerate(zip(keys[part], values[part], strict=True)):
            alone = one_by_one.read(key[None], k, keys_for=keys_for)
            expected = [(i, slots.get(i, -1), *rest) for i, _, *rest in rows_of(alone)[0]]
            assert rows_of(found)[row] == expected
            count = min(len(expected), found.keys.shape[1])
            assert torch.equal(found.keys[row, :count], alone.keys[0, :count])
            one_by_one.write(key[None], value[None])
        blocked.write(keys[part], values[part])
        assert snapshot(blocked) == snapshot(one_by_one)


# Order and distances are those of Σ(h−q)², whatever the matrix product does


@pytest.fixture(params=["highest", "high", "medium", "bf16 of one backend"])
def matmul_precision(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every way to ask for coarser float32 products; some CPUs ignore the request."""
    before = torch.get_float32_matmul_precision()
    if request.param in ("highest", "high", "medium"):
        torch.set_float32_matmul_precision(request.param)
        yield request.param
    else:
        setting = torch.backends.mkldnn.matmul.fp32_precision
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        yield request.param
        torch.backends.mkldnn.matmul.fp32_precision = setting
    torch.set_float32_matmul_precision(before)


SIZE = 64  # products of keys much shorter are never coarse on a CPU


def clustered_far_away(norm: float, spread: float) -> tuple[Tensor, Tensor]:
    """500 float32 keys in four tight clusters far from the origin, a fifth of them duplicates."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(4, SIZE, generator=generator)
    centres = centres / centres.norm(dim=1, keepdim=True) * norm
    keys = centres.repeat(100, 1) + spread * torch.randn(400, SIZE, generator=generator)
    keys = torch.cat([keys, keys[::4]])
    queries = centres.repeat(5, 1) + spread * torch.randn(20, SIZE, generator=generator)
    return keys, torch.cat([queries, keys[:10]])


def expansion_misranks(keys: Tensor, queries: Tensor, order: Tensor) -> bool:
    scores = keys.square().sum(1) - 2 * queries @ keys.T
    ranked = scores.topk(order.shape[1], largest=False).indices
    return not torch.equal(ranked.sort().values, order.sort().values)


def test_order_is_that_of_brute_force_where_only_coarse_products_misrank(
    matmul_precision: str,
) -> None:
    keys, queries = clustered_far_away(10.0, 0.05)
    order, distances = brute_force(keys, queries, 5)
    if not expansion_misranks(keys, queries, order):
        pytest.skip(f"float32 products are exact enough here with {matmul_precision}")
    memory = ExactMemory(len(keys), SIZE)
    memory.write(keys, torch.arange(len(keys)))
    found = memory.read(queries, 5)
    assert torch.equal(found.ids, order)
    assert torch.equal(found.distances, distances)


@pytest.mark.parametrize(("norm", "spread"), [(1e3, 1e-2), (1e4, 1e-1), (1e4, 1e-2), (30.0, 1e-3)])
def test_order_is_that_of_brute_force_where_the_expansion_misranks(
    norm: float, spread: float, matmul_precision: str
) -> None:
    keys, queries = clustered_far_away(norm, spread)
    order, distances = brute_force(keys, queries, 5)
    assert expansion_misranks(keys, queries, order), "too easy: the expansion alone would do"
    memory = ExactMemory(len(keys), SIZE)
    memory.write(keys, torch.arange(len(keys)))
    found = memory.read(queries, 5)
    assert torch.equal(found.ids, order)
    assert torch.equal(found.distances, distances)
    causal = memory.read_causally(queries, torch.arange(len(queries)), 5)
    together = torch.cat([keys, queries])
    for row in (0, 7, 29):  # full: each entry before it in the block has pushed out one
        window = together[row : len(keys) + row]
        order, distances = brute_force(window, queries[row : row + 1], 5)
        assert torch.equal(causal.ids[row], order[0] + row)
        assert torch.equal(causal.distances[row], distances[0])


def test_an_exact_match_has_distance_zero_however_long_the_keys() -> None:
    keys, _ = clustered_far_away(1e4, 1.0)
    memory = ExactMemory(len(keys), SIZE)
    memory.write(keys, torch.arange(len(keys)))
    assert memory.read(keys, 1).distances.eq(0).all()


class Counting(ExactMemory):
    """Records the number of candidates of every search."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self.reaches: list[int] = []
        super().__init__(*args, **named)

    def _nearest(self, queries: Tensor, k: int) -> Any:
        self.reaches.append(k)
        return super()._nearest(queries, k)


def test_easy_data_is_searched_once_and_ties_beyond_the_candidates_again() -> None:
    memory = Counting(1000, 4)
    memory.write(torch.randn(500, 4), torch.zeros(500, dtype=torch.int64))
    memory.read(torch.randn(10, 4), 10)
    assert len(memory.reaches) == 1
    memory.write(torch.ones(300, 4), torch.arange(300))
    found = memory.read(torch.ones(1, 4), 10)
    assert len(memory.reaches) > 2
    assert memory.reaches[-1] <= len(memory)
    assert found.values[0].tolist() == list(range(299, 289, -1))


def test_ties_for_the_last_place_go_to_the_newest_in_causal_reads_too() -> None:
    memory = ExactMemory(100, 2)
    ring_around = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]]).repeat(15, 1)
    ids = memory.write(torch.cat([torch.zeros(1, 2), ring_around]), torch.arange(61)).tolist()
    for found in (
        memory.read(torch.zeros(1, 2), 3),
        memory.read_causally(torch.zeros(1, 2), [0], 3),
    ):
        assert found.ids.tolist() == [[ids[0], ids[-1], ids[-2]]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_distances_of_half_precision_keys_are_computed_in_float32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    keys, queries = (torch.randn(n, 8, generator=generator) for n in (50, 7))
    memory = ExactMemory(50, 8, dtype=dtype)
    memory.write(keys, torch.arange(50))
    found = memory.read(queries, 6)
    order, distances = brute_force(keys.to(dtype).float(), queries, 6)
    assert found.distances.dtype == found.keys.dtype == torch.float32
    assert torch.equal(found.ids, order)
    assert torch.equal(found.distances, distances)
    assert torch.equal(memory.entries().keys, keys.to(dtype))


def test_autocast_does_not_coarsen_a_read() -> None:
    generator = torch.Generator().manual_seed(0)
    memory = ExactMemory(100, 8)
    memory.write(torch.randn(100, 8, generator=generator), torch.arange(100))
    queries = torch.randn(5, 8, generator=generator)
    expected = rows_of(memory.read(queries, 9))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert rows_of(memory.read(queries, 9)) == expected
        causal = memory.read_causally(queries, torch.arange(5), 9)
    assert rows_of(causal) == rows_of(memory.read_causally(queries, torch.arange(5), 9))


# Blocks and chunks


def test_small_blocks_and_chunks_find_what_one_block_finds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(-4, 5, (300, 6), generator=generator).float()
    queries = torch.randint(-4, 5, (20, 6), generator=generator).float()
    memory = ExactMemory(300, 6)
    ids = memory.write(keys, torch.arange(300))
    memory.delete(torch.cat([ids[:90], ids[100:300:3]]))  # whole blocks of nothing
    expected = [memory.read(queries, k) for k in (1, 7, 40, 200)]
    causal = memory.read_causally(queries, torch.arange(20), 7)
    blocks = 0

    def counted(*args: Any, **named: Any) -> Tensor:
        nonlocal blocks
        blocks += 1
        return mm(*args, **named)

    mm = torch.mm
    monkeypatch.setattr(torch, "mm", counted)
    for module in (backend, exact, ranking):
        monkeypatch.setattr(module, "SCRATCH_BYTES", 1000)
    for k, whole in zip((1, 7, 40, 200), expected, strict=True):
        found = memory.read(queries, k)
        assert rows_of(found) == rows_of(whole)
        assert torch.equal(found.keys, whole.keys)
    assert blocks > 100
    found = memory.read_causally(queries, torch.arange(20), 7)
    assert rows_of(found) == rows_of(causal)
    assert torch.equal(found.keys, causal.keys)


@pytest.mark.parametrize("count", [70_000, 70_001, 69_999, 300])
def test_the_smallest_scores_are_those_of_a_sort(count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(1000, (2, count), generator=generator).float()
    scores[0, 5:] = math.inf  # slots that are empty
    for k in (1, 9, 64):
        values, places = ranking.find_smallest(scores, k)
        assert torch.equal(values, scores.sort(dim=1).values[:, :k])
        assert torch.equal(scores.gather(1, places), values)
        assert all(len(row.unique()) == k for row in places)


class Lending(ExactMemory):
    """A backend without `_get_keys`, which returns its own storage."""

    _get_keys, _get_values = Memory._get_keys, Memory._get_values

    def _get(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        self.fetched = getattr(self, "fetched", 0) + len(slots)
        first = int(slots[0])
        if torch.equal(slots, torch.arange(first, first + len(slots))):
            return self._keys[first : first + len(slots)], self._values[first : first + len(slots)]
        return super()._get(slots)


def test_a_read_of_everything_fetches_each_key_once_and_finds_what_brute_force_finds() -> None:
    generator = torch.Generator().manual_seed(0)
    keys, queries = (torch.randn(n, 20, generator=generator) for n in (200, 30))
    memory = Lending(200, 20)
    memory.write(keys, torch.arange(200))
    for gone in ([], [0, 7, 199]):
        memory.delete(gone)
        live = memory.ids
        for k in (len(live), 150):
            memory.fetched = 0
            found = memory.read(queries, k, keys_for=2)
            assert memory.fetched <= 200 + 30 * (k + 2)  # for values and two keys of each
            order, distances = brute_force(keys[live], queries, k)
            assert torch.equal(found.ids, live[order])
            assert torch.equal(found.distances, distances)
            assert torch.equal(found.keys, keys[found.ids[:, :2]])
            torch.testing.assert_close(found.dots, (queries @ keys.T).gather(1, found.ids))


def test_a_read_does_not_write_to_what_a_backend_lends() -> None:
    memory = Lending(100, 3)
    keys = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
    memory.write(keys, torch.arange(100))
    for row in range(100):
        memory.read(keys[row : row + 1], 1)
    assert torch.equal(memory._keys, keys)


class ElementsMade(TorchDispatchMode):
    """Counts the elements of everything that torch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        in_place = func.__name__.split(".")[0].endswith("_")
        if isinstance(result, Tensor) and not in_place:
            self.count += result.numel()
        return result


def test_a_write_costs_the_same_however_full_the_memory() -> None:
    capacity = 200_000
    memory = ExactMemory(capacity, 4)
    few = torch.ones(5, 4), torch.arange(5)

    def elements_made() -> int:
        with ElementsMade() as made:
            memory.write(*few)
        return made.count

    def numpy_bytes() -> int:
        tracemalloc.start()
        memory.write(*few)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    when_empty = elements_made()
    memory.write(torch.zeros(capacity, 4), torch.zeros(capacity, dtype=torch.int64))
    assert elements_made() == when_empty
    assert numpy_bytes() < capacity  # one array over the slots would take eight times that


# What is kept, and what comes back


@pytest.mark.parametrize("shape", [(2, 3), (1, 4, 2), (6,)])
def test_keys_may_have_a_shape(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    keys, queries = (torch.randn(n, *shape, generator=generator) for n in (9, 4))
    memory, flat = ExactMemory(9, shape), ExactMemory(9, math.prod(shape))
    for memory_, keys_ in ((memory, keys), (flat, keys.flatten(1))):
        memory_.write(keys_, torch.arange(9))
    for read in (
        lambda m, q: m.read(q, 3, keys_for=2),
        lambda m, q: m.read_causally(q, torch.arange(4), 3, keys_for=2),
    ):
        found, expected = read(memory, queries), read(flat, queries.flatten(1))
        assert rows_of(found) == rows_of(expected)
        assert found.keys.shape == (4, 2, *shape)
        assert torch.equal(found.keys.flatten(2), expected.keys)
    assert torch.equal(memory.entries().keys, keys)
    copy = ExactMemory(9, shape)
    copy.restore(memory.entries(), memory.next_id)
    assert snapshot(copy) == snapshot(memory)


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_regression_targets_of_any_shape_come_back_unchanged(shape: tuple[int, ...]) -> None:
    targets = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0))
    memory = ExactMemory(5, 2, value_shape=shape, value_dtype=torch.float32)
    memory.write(torch.arange(10.0).reshape(5, 2), targets)
    assert torch.equal(memory.entries().values, targets)
    found = memory.read(torch.zeros(1, 2), 5)
    assert torch.equal(found.values[0], targets)
    assert not memory.holds_labels
    listed = ExactMemory(5, 2, value_shape=shape, value_dtype=torch.float32)
    listed.write(torch.arange(10.0).reshape(5, 2), targets.tolist())
    assert snapshot(listed) == snapshot(memory)


UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *UNSIGNED]
)
def test_labels_and_ids_may_come_in_any_integer_dtype(dtype: torch.dtype) -> None:
    memory = ExactMemory(3, 2)
    ids = memory.write(torch.zeros(3, 2), torch.tensor([0, 5, 127]).to(dtype))
    assert memory.entries().values.tolist() == [0, 5, 127]
    assert memory.entries().values.dtype == torch.int64
    assert memory.holds(torch.tensor([2, 3]).to(dtype)).tolist() == [True, False]
    memory.delete(ids[:2].to(dtype))
    assert memory.ids.tolist() == [2]


def test_unsigned_labels_that_do_not_fit_are_refused() -> None:
    memory, small = ExactMemory(3, 2), ExactMemory(3, 2, value_dtype=torch.int8)
    too_large = torch.tensor([2**63 + 1], dtype=torch.uint64)
    with pytest.raises(ValueError, match=f"labels must fit torch.int64, got {2**63 + 1} > "):
        memory.write(torch.zeros(1, 2), too_large)
    for dtype in UNSIGNED:
        with pytest.raises(ValueError, match=r"labels must fit torch\.int8, got 128 > 127"):
            small.write(torch.zeros(1, 2), torch.tensor([128]).to(dtype))
    assert len(memory) == len(small) == 0


def test_batches_of_nothing_are_fine() -> None:
    memory = ExactMemory(4, (2, 3))
    nothing, no_labels = torch.empty(0, 2, 3), torch.empty(0, dtype=torch.int64)
    for written in (0, 3):
        memory.write(torch.zeros(written, 2, 3), torch.arange(written))
        was = snapshot(memory)
        assert memory.write(nothing, no_labels).shape == (0,)
        memory.replace_keys([], nothing)
        memory.delete([])
        memory.delete(no_labels)
        assert memory.read(nothing, 2).keys.shape == (0, min(2, written), 2, 3)
        assert memory.read_causally(nothing, no_labels, 2).mask.shape[0] == 0
        assert memory.holds(no_labels).shape == (0,)
        assert snapshot(memory) == was
    memory.restore(Entries(no_labels, nothing, no_labels), 7)
    assert snapshot(memory)[:5] == ([], [], [], 0, 7)


def test_neither_side_can_change_the_other_afterwards() -> None:
    memory = ExactMemory(3, 2)
    keys, values = torch.ones(3, 2), torch.arange(3)
    ids = memory.write(keys, values)
    keys.zero_(), values.zero_(), ids.zero_()
    held, found = memory.entries(), memory.read(torch.ones(1, 2), 3)
    for part in (*held, found.keys, found.values, found.ids, found.distances):
        part.zero_()
    assert snapshot(memory)[:3] == ([0, 1, 2], [[1, 1]] * 3, [0, 1, 2])
    assert memory.read(torch.ones(1, 2), 3).values.tolist() == [[2, 1, 0]]


def test_nothing_that_comes_back_carries_gradients() -> None:
    memory = ExactMemory(3, 2)
    memory.write(torch.ones(2, 2, requires_grad=True), torch.arange(2))
    queries = torch.ones(1, 2, requires_grad=True)
    for found in (memory.read(queries, 2), memory.read_causally(queries, [0], 2)):
        assert not found.distances.requires_grad
        assert not found.keys.requires_grad


def test_a_slot_keeps_its_entry_until_that_is_overwritten_or_deleted() -> None:
    memory = ExactMemory(5, 2)
    memory.write(torch.zeros(4, 2), torch.arange(4))

    def slots() -> dict[int, int]:
        found = memory.read(torch.zeros(1, 2), 5)
        return dict(zip(found.ids[0].tolist(), found.slots[0].tolist(), strict=True))

    before = slots()
    memory.delete([1])
    memory.write(torch.zeros(3, 2), torch.arange(3))
    after = slots()
    assert {i: after[i] for i in (2, 3)} == {i: before[i] for i in (2, 3)}
    assert sorted(after.values()) == [0, 1, 2, 3, 4]
    assert after[4] == before[1]  # freed room first


def test_the_revision_rises_when_slots_or_keys_change_hands_under_the_same_ids() -> None:
    memory = ExactMemory(4, 2)
    memory.write(torch.zeros(4, 2), torch.arange(4))

    def revision() -> int:
        return memory.read(torch.zeros(1, 2), 1).revision

    seen = [revision()]
    memory.write(torch.zeros(2, 2), torch.arange(2))
    memory.delete([3])
    assert revision() == seen[0]
    changes: list[Callable[[], object]] = [
        lambda: memory.replace_keys([4], torch.ones(1, 2)),
        lambda: memory.resize(3),
        lambda: memory.restore(memory.entries(), memory.next_id),
        lambda: memory.to("cpu"),
        memory.clear,
    ]
    for change in changes:
        change()
        memory.write(torch.zeros(1, 2), [0])
        seen.append(revision())
    assert sorted(set(seen)) == seen


def test_it_says_what_it_is() -> None:
    memory = ExactMemory(9, (2, 3), value_shape=(4,), value_dtype=torch.float32)
    assert repr(memory) == (
        "ExactMemory(0 of 9 entries, keys of shape (2, 3), targets of shape (4,), "
        "torch.float32, cpu)"
    )
    assert "3 of 3 entries, keys of shape (2,), labels" in repr(filled(3))
    assert memory.to("cpu") is memory
    assert memory.resize(4) is memory


# Refusals: what must hold, what came; and nothing has changed


def filled(capacity: int = 4, **named: Any) -> ExactMemory:
    memory = ExactMemory(capacity, 2, **named)
    memory.write(torch.arange(6.0).reshape(3, 2), torch.arange(3))
    return memory


TWO = torch.zeros(2, 2)
LABELS = torch.arange(2)
BAD_KEYS: list[tuple[Any, str]] = [
    ([[0.0, 0.0]] * 2, "must be a tensor of a floating dtype, got list"),
    (TWO.long(), "must be a tensor of a floating dtype, got torch.int64"),
    (TWO.to(torch.complex64), "must be a tensor of a floating dtype, got torch.complex64"),
    (torch.zeros(2, 3), r"must have shape \(N, 2\), got \(2, 3\)"),
    (torch.zeros(2, 2, 1), r"must have shape \(N, 2\), got \(2, 2, 1\)"),
    (torch.zeros(2), r"must have shape \(N, 2\), got \(2,\)"),
    (torch.tensor(0.0), r"must have shape \(N, 2\), got \(\)"),
    (TWO.to("meta"), "must be on the memory's device cpu, got meta"),
    (torch.tensor([[0, 0], [0, math.nan]]), "must be finite in torch.float32, .* got NaN"),
    (torch.tensor([[0, 0], [0, -math.inf]]), "must be finite in torch.float32"),
    (TWO + 1e19, r"must be finite .* with squared norms below 4e\+37"),
    (TWO.double() + 1e300, "must be finite in torch.float32"),
]


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize(("keys", "text"), BAD_KEYS)
def test_bad_keys_are_refused_and_change_nothing(keys: Any, text: str) -> None:
    memory = filled()
    was = snapshot(memory)
    entries = Entries(LABELS, keys, LABELS)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("keys", lambda: memory.write(keys, LABELS)),
        ("keys", lambda: memory.replace_keys([0, 1], keys)),
        ("keys", lambda: memory.read_causally(keys, LABELS, 1)),
        ("keys", lambda: memory.restore(entries, 2)),
        ("queries", lambda: memory.read(keys, 1)),
    ]
    for name, call in calls:
        with pytest.raises(ValueError, match=f"{name} {text}"):
            call()
        assert snapshot(memory) == was


@pytest.mark.parametrize(
    ("dtype", "largest", "too_large"),
    [
        (torch.float16, 65504.0, 65520.0),
        (torch.bfloat16, 4e18, 1e19),
        (torch.float32, 4e18, 1e19),
        (torch.float64, 1e153, 1e154),
    ],
)
def test_keys_whose_distances_would_overflow_are_refused(
    dtype: torch.dtype, largest: float, too_large: float
) -> None:
    memory = ExactMemory(2, 2, dtype=dtype)
    far = torch.tensor([[largest, 0.0], [-largest, 0.0]], dtype=torch.float64)
    memory.write(far, LABELS)
    found = memory.read(far, 2)
    assert found.distances.isfinite().all()
    assert found.ids.tolist() == [[0, 1], [1, 0]]
    was = snapshot(memory)
    with pytest.raises(ValueError, match=f"keys must be finite in {dtype}"):
        memory.write(torch.full((1, 2), too_large, dtype=torch.float64), LABELS[:1])
    assert snapshot(memory) == was


@pytest.mark.parametrize(
    ("dtype", "least", "tiny"),
    [
        (torch.bfloat16, 1e-12, (9e-13, 1e-21, 1e-38)),
        (torch.float32, 1e-12, (9e-13, 1e-15, 1e-19, 1e-21, 1e-30, 1e-45)),
        (torch.float64, 1e-138, (6e-139, 1e-160, 1e-200, 5e-324)),
    ],
)
def test_keys_whose_distances_would_underflow_are_refused(
    dtype: torch.dtype, least: float, tiny: tuple[float, ...]
) -> None:
    memory = ExactMemory(9, 2, dtype=dtype)
    near = torch.tensor([[0.0, 0.0], [least, 0.0], [0.0, -least]], dtype=torch.float64)
    memory.write(near, torch.arange(3))
    assert memory.read(near, 1).ids.tolist() == [[0], [1], [2]]
    was = snapshot(memory)
    text = r"must be zero or have norms of at least .* got .*: scale them up"
    for norm in tiny:
        keys = torch.tensor([[1.0, 0.0], [0.0, norm]], dtype=torch.float64).to(dtype)
        for call in (
            partial(memory.write, keys, LABELS),
            partial(memory.replace_keys, [0, 1], keys),
            partial(memory.read, keys, 1),
            partial(memory.read_causally, keys, LABELS, 1),
        ):
            with pytest.raises(ValueError, match=text):
                call()
            assert snapshot(memory) == was
        saved = ExactMemory(9, 2, dtype=dtype)
        saved.restore(Entries(LABELS, keys, LABELS), 2)  # written before they were refused
        assert torch.equal(saved.entries().keys, keys)


@pytest.mark.parametrize("scale", [1e-12, 1e-11, 1e-8, 1.0, 1e10])
@pytest.mark.parametrize("other", [0.0, 1.0, 1e6])
def test_neighbours_of_small_keys_are_those_of_float64(scale: float, other: float) -> None:
    """Beside larger keys, too; the wrong order of two is within what rounding does to keys."""
    torch.manual_seed(0)
    keys = scale * (1 + torch.rand(300, 8))
    keys[100:] += other * scale * torch.randn(200, 8)
    queries = scale * (1 + torch.rand(50, 8))
    memory = ExactMemory(300, 8)
    memory.write(keys, torch.arange(300))
    found = memory.read(queries, 10)
    exact = (keys.double() - queries.double()[:, None]).square().sum(-1)
    nearest = exact.sort(dim=1).values[:, :10]
    of_found = exact.gather(1, found.ids)
    norms = queries.double().norm(dim=1, keepdim=True)
    lost = 8 * torch.finfo(torch.float32).eps * norms
    assert ((of_found.sqrt() - nearest.sqrt()).abs() <= lost).all()
    assert ((found.distances.double().sqrt() - of_found.sqrt()).abs() <= lost).all()


FLOATS: dict[str, Any] = {"value_dtype": torch.float16, "value_shape": (2,)}
BAD_VALUES: list[tuple[dict[str, Any], Any, str]] = [
    ({}, torch.zeros(2), "values must be labels of an integer dtype, got torch.float32"),
    ({}, [0.5, 1.0], "values must be labels of an integer dtype, got torch.float32"),
    ({}, torch.ones(2).bool(), "values must be labels of an integer dtype, got torch.bool"),
    (
        {},
        torch.ones(2).to(torch.complex64),
        "values must be labels of an integer dtype, got torch.complex64",
    ),
    *(
        ({}, names, "values must be whole numbers from 0, got strings; map names to numbers, or")
        for names in (["cat", "dog"], ("cat", 1), np.array(["cat", "dog"]), "cat", [["a"], ["b"]])
    ),
    ({}, [0, None], "values must be whole numbers from 0, in a tensor or a list: Could not infer"),
    ({}, [0, 2**63], "values must be whole numbers from 0, in a tensor or a list: Overflow"),
    (FLOATS, [["a", "b"]] * 2, "values must be numbers, got strings$"),
    ({}, LABELS[:, None], r"values must have shape \(N\), got \(2, 1\)"),
    ({}, torch.tensor(1), r"values must have shape \(N\), got \(\)"),
    ({}, torch.arange(3), "there must be one value per key, got 2 and 3"),
    ({}, torch.tensor([0, -3]), "labels must not be negative, got -3"),
    ({"value_dtype": torch.int8}, [0, 200], "labels must fit torch.int8, got 200 > 127"),
    (FLOATS, torch.zeros(2), r"values must have shape \(N, 2\), got \(2,\)"),
    (
        FLOATS,
        torch.zeros(2, 2).long(),
        "values must be targets of a floating dtype, got torch.int64",
    ),
    (FLOATS, torch.full((2, 2), math.nan), "values must be finite in torch"),
    (FLOATS, torch.full((2, 2), math.inf), "values must be finite in torch"),
    (FLOATS, torch.full((2, 2), 1e5), "values must be finite in torch"),
]


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize(("named", "values", "text"), BAD_VALUES)
def test_bad_values_are_refused_and_change_nothing(
    named: dict[str, Any], values: Any, text: str
) -> None:
    memory = ExactMemory(4, 2, **named)
    was = snapshot(memory)
    with pytest.raises(ValueError, match=text):
        memory.write(TWO, values)
    with pytest.raises(ValueError, match=text):
        memory.read_causally(TWO, values, 1)
    with pytest.raises(ValueError, match="values" if "one value per key" in text else text):
        memory.restore(Entries(LABELS, TWO, values), 2)
    assert snapshot(memory) == was


def entries(ids: Any) -> Entries:
    count = len(torch.as_tensor(ids).flatten())
    return Entries(torch.as_tensor(ids), torch.zeros(count, 2), torch.zeros(count).long())


BAD_CALLS: list[tuple[Callable[[Memory], object], str]] = [
    (lambda m: m.read(TWO, 0), "k must be at least 1, got 0"),
    (lambda m: m.read(TWO, -2), "k must be at least 1, got -2"),
    (lambda m: m.read(TWO, 1, keys_for=-1), "keys_for must be at least 0, got -1"),
    (lambda m: m.read_causally(TWO, LABELS, 0), "k must be at least 1, got 0"),
    (lambda m: m.read_causally(TWO, LABELS, 1, keys_for=-1), "keys_for must be at least 0"),
    (lambda m: m.delete([0, 3]), r"ids must belong to live entries, got unknown ids \[3\]"),
    (lambda m: m.delete([-1]), r"unknown ids \[-1\]"),
    (lambda m: m.delete(torch.tensor([1, 1])), r"ids must be distinct integers, got \[1, 1\]"),
    (lambda m: m.delete([0.5]), r"ids must be distinct integers, got \[0.5\]"),
    (lambda m: m.delete(["a"]), "ids must be integers, got strings"),
    (lambda m: m.delete("a"), "ids must be integers, got strings"),
    (lambda m: m.holds(torch.tensor([0.5])), r"ids must be distinct integers, got \[0.5\]"),
    (lambda m: m.read(TWO, True), "k must be a whole number, got True"),
    (lambda m: m.replace_keys([0, 9], TWO), r"unknown ids \[9\]"),
    (lambda m: m.replace_keys([0, 0], TWO), "ids must be distinct"),
    (lambda m: m.replace_keys([0], TWO), "there must be one key per id, got 1 ids and 2 keys"),
    (lambda m: m.resize(0), "capacity must be at least 1, got 0"),
    (lambda m: m.restore(entries(range(5)), 5), "at most capacity=4 of each, got 5 ids"),
    (lambda m: m.restore(entries([0, 0]), 5), "ids must ascend from 0 to below next_id=5"),
    (lambda m: m.restore(entries([2, 1]), 5), "ids must ascend"),
    (lambda m: m.restore(entries([-1, 1]), 5), "ids must ascend"),
    (lambda m: m.restore(entries([0, 5]), 5), "ids must ascend"),
    (lambda m: m.restore(entries(torch.zeros(0).long()), -1), "ids must ascend"),
    (lambda m: m.restore(entries([0.0, 1.0]), 5), "ids must be a row of torch.int64"),
    (lambda m: m.restore(entries([[0, 1]]), 5), r"ids must be a row .* of shape \(1, 2\)"),
    (lambda m: m.restore(entries(LABELS.int()), 5), "ids must be a row of torch.int64"),
    (
        lambda m: m.restore(entries([0, 1])._replace(ids=LABELS[:1]), 5),
        "got 1 ids, 2 keys, 2 values",
    ),
]


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize(("call", "text"), BAD_CALLS)
def test_bad_calls_are_refused_and_change_nothing(
    call: Callable[[Memory], object], text: str
) -> None:
    memory = filled()
    was = snapshot(memory)
    with pytest.raises(ValueError, match=text):
        call(memory)
    assert snapshot(memory) == was


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"capacity": 0}, "capacity must be at least 1, got 0"),
        ({"key_dim": 0}, "key_dim must be at least 1, got 0"),
        ({"key_dim": ()}, r"key_dim must have at least one dimension, got \(\)"),
        ({"key_dim": (2, 0)}, "key_dim must be at least 1, got 0"),
        ({"dtype": torch.int64}, "dtype must be one of .*, got torch.int64"),
        ({"dtype": torch.complex64}, "dtype must be one of .*, got torch.complex64"),
        ({"value_dtype": torch.bool}, r"value_dtype must be one of .* got torch.bool"),
        ({"value_dtype": torch.complex64}, "value_dtype must be one of"),
    ],
)
def test_an_impossible_memory_is_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ExactMemory(**{"capacity": 3, "key_dim": 2, **arguments})


def test_ids_of_overwritten_and_deleted_entries_are_unknown() -> None:
    memory = filled()
    memory.write(torch.zeros(3, 2), torch.arange(3))
    memory.delete(i for i in [3])
    assert (
        memory.holds(torch.arange(-1, 8)).tolist()
        == [False] * 3 + [True, False, True, True] + [False] * 2
    )
    for gone in (0, 1, 3):
        with pytest.raises(ValueError, match=rf"unknown ids \[{gone}\]"):
            memory.delete([gone])


# Threads


def test_holding_the_lock_makes_several_calls_one() -> None:
    memory = filled()
    started = threading.Event()

    def write() -> None:
        started.set()
        memory.write(torch.zeros(1, 2), [9])

    thread = threading.Thread(target=write)
    with memory.lock:
        thread.start()
        started.wait()
        thread.join(0.05)
        assert thread.is_alive()
        memory.delete(memory.entries().ids)
        assert len(memory) == 0
    thread.join()
    assert memory.entries().values.tolist() == [9]


def test_a_resize_that_fails_leaves_the_memory_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = ExactMemory(4, 2)
    memory.write(torch.eye(2), [0, 1])
    before = memory.entries()
    monkeypatch.setattr(ExactMemory, "_clear", lambda self: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(MemoryError):
        memory.resize(9)
    assert memory.capacity == 4
    assert all(torch.equal(a, b) for a, b in zip(before, memory.entries(), strict=True))
    assert memory.read(torch.eye(2), 2).ids.tolist() == [[0, 1], [1, 0]]


def test_a_write_that_fails_gives_out_no_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = ExactMemory(3, 2)
    monkeypatch.setattr(ExactMemory, "_put", lambda *a: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        memory.write(torch.zeros(5, 2), [0] * 5)
    assert memory.next_id == 0
    assert len(memory) == 0


@pytest.mark.usefixtures("unchecked_annotations")
def test_a_mask_is_no_list_of_ids() -> None:
    memory = ExactMemory(3, 2)
    memory.write(torch.eye(2), [0, 1])
    with pytest.raises(ValueError, match="distinct integers, got"):
        memory.delete(torch.tensor([True, False]))
    assert len(memory) == 2


def test_queries_are_not_rounded_to_the_precision_of_the_keys() -> None:
    memory = ExactMemory(3, 1, dtype=torch.bfloat16)
    memory.write(torch.ones(1, 1), [0])
    query = torch.tensor([[1.003]])
    assert float(memory.read(query, 1).distances) == float((query - 1).square())
    assert float(memory.read_causally(query, [0], 1).distances) == float((query - 1).square())
    half = ExactMemory(3, 1, dtype=torch.float16)
    half.write(torch.ones(1, 1), [0])
    assert float(half.read(torch.tensor([[1e5]]), 1).distances) == pytest.approx(99999.0**2)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_coarse_products_do_not_widen_the_search(precision: str) -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(4000, 128, generator=generator)
    memory = ExactMemory(4000, 128)
    memory.write(keys, torch.zeros(4000, dtype=torch.int64))
    queries, reaches = torch.randn(8, 128, generator=generator), []
    nearest = memory._nearest
    memory._nearest = lambda q, k: reaches.append(k) or nearest(q, k)
    expected = memory.read(queries, 10)
    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        found = memory.read(queries, 10)
    finally:
        torch.set_float32_matmul_precision(previous)
    assert torch.equal(found.ids, expected.ids)
    assert max(reaches) <= 4 * reaches[0]


def test_keys_of_entries_are_found_by_id_in_any_shape() -> None:
    memory = ExactMemory(3, (1, 2), dtype=torch.float16)
    keys = torch.arange(8.0).reshape(4, 1, 2)
    memory.write(keys, torch.arange(4))  # the first is overwritten
    assert memory.get_keys([3, 1]).equal(keys[[3, 1]])
    ids = torch.tensor([[2, 2], [3, 1]])
    assert memory.get_keys(ids).equal(keys[ids])
    assert memory.get_keys([]).shape == (0, 1, 2)
    with pytest.raises(ValueError, match=r"ids must belong to live entries, got unknown ids \[0\]"):
        memory.get_keys([0])
