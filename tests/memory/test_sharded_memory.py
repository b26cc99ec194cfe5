"""A memory in several processes against one memory: the same answers, to the bit."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from process_group import Processes, start_processes
from torch import Tensor, nn

import mbpa
from mbpa.memory import ExactMemory, Neighbors
from mbpa.testing import check_memory

SIZES = (1, 2, 4)


@pytest.fixture(scope="module", params=SIZES)
def processes(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Processes]:
    with start_processes(request.param, tmp_path_factory.mktemp("group")) as started:
        yield started


def is_same(one: Tensor, other: Tensor) -> bool:
    """Compare bits, so that −0 is not 0."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    whole = [each.flatten().clone(memory_format=torch.contiguous_format) for each in (one, other)]
    return torch.equal(*(each.view(torch.uint8) for each in whole))


def require_same(found: Neighbors, expected: Neighbors) -> None:
    for field in fields(Neighbors):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(one, Tensor):
            real = expected.mask if field.name in ("keys", "values") else None
            if real is not None:  # padding is meaningless
                real = real[:, : one.shape[1]]
                one, other = one[real], other[real]
            assert is_same(one, other), field.name


# Random histories

CALLS = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 9)),
    st.tuples(st.just("delete"), st.integers(1, 4)),
    st.tuples(st.just("replace_keys"), st.integers(1, 3)),
    st.tuples(st.just("read"), st.integers(0, 5)),
    st.tuples(st.just("read_causally"), st.integers(1, 6)),
    st.tuples(st.sampled_from(("entries", "clear", "restore")), st.just(0)),
    st.tuples(st.just("resize"), st.integers(1, 30)),
)


@pytest.mark.heavy
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    calls=st.lists(CALLS, min_size=1, max_size=14),
    capacity=st.integers(1, 40),
    shape=st.sampled_from(((3,), (40,), (2, 5))),
    dtype=st.sampled_from((torch.float32, torch.float64, torch.bfloat16)),
    rounded=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_a_history_gives_the_neighbours_of_one_memory_to_the_bit(
    processes: Processes,
    calls: list[tuple[str, int]],
    capacity: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    rounded: bool,
    seed: int,
) -> None:
    torch.set_num_threads(1)
    draws = torch.Generator().manual_seed(seed)
    single = ExactMemory(capacity, shape, dtype=dtype)
    processes.call("make", capacity, shape, dtype=dtype)

    def draw(count: int) -> Tensor:
        keys = torch.randn(count, *shape, generator=draws, dtype=torch.float64)
        return (keys.round() if rounded else keys).to(dtype)  # rounded ones are often equally near

    def choose(count: int) -> Tensor:
        return single.ids[torch.randperm(len(single), generator=draws)[:count]]

    for name, count in calls:
        arguments: tuple[Any, ...]
        if name == "write":
            arguments = draw(count), torch.randint(9, (count,), generator=draws)
        elif name == "delete":
            arguments = (choose(count),)
        elif name == "replace_keys":
            ids = choose(count)
            arguments = ids, draw(len(ids))
        elif name == "read":
            arguments = draw(count), 1 + seed % 7
        elif name == "read_causally":
            arguments = draw(count), torch.randint(9, (count,), generator=draws), 1 + seed % 7
        elif name == "restore":
            arguments = single.entries(), single.next_id
        else:
            arguments = (count,) if name == "resize" else ()
        expected = getattr(single, name)(*arguments)
        for answer in processes.call(name, *arguments):
            if isinstance(expected, Neighbors):
                require_same(answer, expected)
            elif name == "entries":
                assert all(map(is_same, answer, expected))
            elif name == "write":
                assert torch.equal(answer, expected)
    assert processes.call("__len__") == [len(single)] * len(processes.pids)


@pytest.mark.heavy
def test_many_entries_are_searched_in_shares_and_give_the_same_neighbours(
    processes: Processes,
) -> None:
    torch.set_num_threads(1)
    draws = torch.Generator().manual_seed(1)
    single = ExactMemory(3000, 64)
    shares = processes.call("make", 3000, 64)
    assert sum(shares) == 3000
    assert max(shares) - min(shares) <= 1
    for _ in range(4):
        keys, values = torch.randn(1000, 64, generator=draws), torch.arange(1000)
        single.write(keys, values)
        processes.call("write", keys, values)
        gone = single.ids[torch.randperm(len(single), generator=draws)[:50]]
        single.delete(gone)
        processes.call("delete", gone)
    queries = torch.randn(33, 64, generator=draws)
    for keys_for in (None, 0, 5):
        expected = single.read(queries, 50, keys_for=keys_for)
        for found in processes.call("read", queries, 50, keys_for=keys_for):
            require_same(found, expected)


def test_each_process_reads_with_queries_of_its_own(processes: Processes) -> None:
    draws = torch.Generator().manual_seed(2)
    keys, values = torch.randn(100, 8, generator=draws), torch.arange(100)
    single = ExactMemory(100, 8)
    single.write(keys, values)
    processes.call("make", 100, 8)
    processes.call("write", keys, values)
    parts = [torch.randn(3 * rank, 8, generator=draws) for rank in range(len(processes.pids))]
    answers = processes.call_each([("read", (part, 5), {}) for part in parts])
    for part, found in zip(parts, answers, strict=True):
        require_same(found, single.read(part, 5))


# A model


def predict_in_parts(memory: Any, state: dict[str, Tensor], inputs: Tensor) -> Tensor:
    """Write some examples, then predict this process's part of the others."""
    body, head = nn.Linear(6, 4), nn.Linear(4, 3)
    nn.Sequential(body, head).load_state_dict(state)
    model = mbpa.MbPA(body, head, memory=memory, predictor=mbpa.Adapted(k=5))
    model.write(inputs[:40], torch.arange(40) % 3)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return model(inputs[40:][rank::size])


def test_a_model_predicts_as_with_one_memory(processes: Processes) -> None:
    torch.manual_seed(0)
    state = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)).state_dict()
    inputs = torch.randn(57, 6)
    torch.set_num_threads(1)
    expected = predict_in_parts(ExactMemory(30, 4), state, inputs)
    processes.call("make", 30, 4)
    answers = processes.call("run", predict_in_parts, state, inputs)
    for rank, found in enumerate(answers):
        torch.testing.assert_close(found, expected[rank :: len(answers)])


def score_text(memory: Any, keys: Tensor, tokens: Tensor) -> Tensor:
    head = nn.Linear(4, 5)
    with torch.no_grad():
        head.weight.copy_(torch.arange(20.0).reshape(5, 4) / 20)
        head.bias.zero_()
    model = mbpa.MbPA(nn.Identity(), head, memory=memory, predictor=mbpa.Adapted(k=4))
    return mbpa.score_stream(model, keys, tokens, block=8)


def test_a_stream_is_scored_as_with_one_memory(processes: Processes) -> None:
    draws = torch.Generator().manual_seed(3)
    keys, tokens = torch.randn(40, 4, generator=draws), torch.randint(5, (40,), generator=draws)
    torch.set_num_threads(1)
    expected = score_text(ExactMemory(20, 4), keys, tokens)
    processes.call("make", 20, 4)
    for found in processes.call("run", score_text, keys, tokens):
        assert torch.equal(found, expected)


# Calls that differ, and processes that die


def test_calls_that_differ_are_refused_everywhere_and_change_nothing(tmp_path: Path) -> None:
    with start_processes(2, tmp_path) as both:
        both.call("make", 10, 2)
        keys, values = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([5, 6])
        both.call("write", keys, values)
        pairs: tuple[tuple[tuple[Any, ...], tuple[Any, ...], str], ...] = (
            (("write", keys, values), ("write", keys + 1, values), "the same arguments"),
            (("write", keys, values), ("write", keys, values + 1), "the same arguments"),
            (("write", keys, values), ("write", keys[:1], values[:1]), "the same arguments"),
            (("delete", [0]), ("delete", [1]), "the same arguments"),
            (("read", keys, 1), ("read", keys, 2), "the same arguments"),
            (("read", keys, 1), ("delete", [0]), "the same calls"),
        )
        for one, other, message in pairs:
            answers = both.call_each([(call[0], call[1:], {}) for call in (one, other)])
            for answer in answers:
                assert isinstance(answer, ValueError), (one, other, answer)
                assert message in str(answer)
        for found in both.call("entries"):
            assert found.ids.tolist() == [0, 1]
            assert torch.equal(found.keys, keys)
        answers = both.call_each([("make", (10, 2), {}), ("make", (11, 2), {})])
        assert all("the same arguments" in str(answer) for answer in answers)


def test_a_process_that_dies_is_an_error_for_the_others_and_not_a_hang(tmp_path: Path) -> None:
    with start_processes(3, tmp_path) as three:
        three.call("make", 30, 2)
        keys, values = torch.randn(20, 2), torch.arange(20)
        three.call("write", keys, values)
        three.kill(1)
        for _ in range(2):  # and again, without asking the group
            begin = time.monotonic()
            answers = three.call_each([("read", (keys, 3), {})] * 3)
            assert time.monotonic() - begin < 20
            for rank in (0, 2):
                assert isinstance(answers[rank], ConnectionError), answers[rank]
                assert "has died or does not answer" in str(answers[rank])


# One process


def test_without_a_group_the_error_says_what_to_do() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="init_process_group first"):
        mbpa.ShardedMemory(10, 2)


@pytest.mark.heavy
def test_a_group_of_one_fulfils_the_contract_of_a_memory(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        check_memory(lambda capacity, key_dim: mbpa.ShardedMemory(capacity, key_dim))
    finally:
        dist.destroy_process_group()


@pytest.mark.heavy
def test_the_example_in_the_docs_runs_with_torchrun(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "memories.md").read_text("utf-8")
    code = text.split("<!-- torchrun -->\n```python\n")[1].split("```")[0]
    (tmp_path / "example.py").write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for rank in (0, 1):
        assert f"process {rank} holds 500 of 1000 slots and predicts {4 + rank}" in done.stdout
