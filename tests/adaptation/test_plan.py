"""The plan: estimates of memory are roughly right, budgets are kept, running out of memory costs a
warning, and clear cases take the clear path."""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from peak import Peak
from torch import Tensor, nn

import mbpa
from mbpa.adaptation.engine import SOLVERS
from mbpa.adaptation.output_cache import StoredOutputs
from mbpa.adaptation.plan import PATHS, make_plan
from mbpa.adaptation.problem import Problem
from mbpa.device import Throughput
from mbpa.modules.head import own_precision

CPU = Throughput(operations=2.0**37, bytes=2.0**35, call=2.0**-18)  # of two cores
RULES: dict[str, mbpa.Rule] = {
    "gradient": mbpa.Gradient(0.1, 1),
    "gradient, decay and momentum": mbpa.Gradient(0.1, 3, decay=0.1, momentum=0.5),
    "rmsprop": mbpa.RMSprop(0.1, 2, decay=0.1),
    "adam": mbpa.Adam(0.1, 3),
}
LOSSES = ["cross_entropy", "squared_error"]
SHAPES = [(2, 2000, 64), (50, 1000, 128), (200, 10, 32)]  # K, C, D


def mlp(*sizes: int, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    modules = list[nn.Module]()
    for ins, outs in itertools.pairwise(sizes):
        modules += [nn.Linear(ins, outs), activation()]
    return nn.Sequential(*modules[:-1])


def conv(ins: int, hidden: int, outs: int) -> nn.Module:
    """Return a head for pictures of 6 × 6."""
    return nn.Sequential(
        nn.Conv2d(ins, hidden, 3),
        nn.BatchNorm2d(hidden),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(hidden * 16, outs),
    ).eval()


def problem_of(
    head: nn.Module,
    rule: mbpa.Rule,
    k: int,
    shape: tuple[int, ...],
    *,
    queries: int = 3,
    loss: str = "cross_entropy",
    params: Sequence[str] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Problem:
    torch.manual_seed(0)
    head = head.to(dtype)
    keys = torch.randn(queries, k, *shape, dtype=dtype)
    with torch.no_grad():
        outputs = head(keys[:, 0].clone())
    values = torch.randint(outputs.shape[1], (queries, k))
    if loss == "squared_error":
        values = torch.randn(queries, k, outputs.shape[1], dtype=dtype)
    weights = torch.full((queries, k), 1 / k, dtype=dtype)
    adapting = tuple(params or [name for name, _ in head.named_parameters()])
    return Problem(head, rule, loss, adapting, keys[:, 0], outputs, keys, values, weights)


def stored_for(problem: Problem, rows: int | None) -> StoredOutputs | None:
    if rows is None:
        return None
    table = torch.rand(rows, problem.outputs.shape[1], dtype=problem.dtype)
    return StoredOutputs(table, table[:0], torch.randint(rows, problem.weights.shape))


def check_estimate(
    problem: Problem, path: str, rows: int | None = None, want_change: bool = False
) -> None:
    """Check that the estimate of the peak memory is roughly right."""
    plan = make_plan(problem, rows, 1 << 24, CPU, path, want_change)
    chunk, stored = problem.rows(slice(0, plan.chunk)), stored_for(problem, rows)
    some = None if stored is None else stored.rows(slice(0, plan.chunk))
    with own_precision(problem.keys), Peak() as peak:
        SOLVERS[path](chunk, some, want_change)
    assert 0.5 < plan.held / peak.most < 2.5, (path, rows, want_change)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_memory_of_a_linear_head_is_estimated(
    shape: tuple[int, int, int], loss: str, rule: str
) -> None:
    k, classes, size = shape
    problem = problem_of(nn.Linear(size, classes), RULES[rule], k, (size,), loss=loss)
    check_estimate(problem, "functional")
    check_estimate(problem, "dense")
    if isinstance(problem.rule, mbpa.Gradient):
        for rows, want_change in itertools.product([None, 1000], [False, True]):
            check_estimate(problem, "span", rows, want_change)
        if problem.rule.steps == 1:
            for rows, want_change in itertools.product([300, 5000], [False, True]):
                check_estimate(problem, "one step", rows, want_change)


HEADS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[str] | None]] = {
    "relu": (lambda: mlp(100, 200, 300, 10), (100,), None),
    "gelu": (lambda: mlp(100, 200, 300, 10, activation=nn.GELU), (100,), None),
    "last layer": (lambda: mlp(100, 200, 300, 10), (100,), ["4.weight", "4.bias"]),
    "many classes": (lambda: mlp(20, 20, 1000), (20,), None),
    "conv": (lambda: conv(3, 8, 10), (3, 6, 6), None),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("head", HEADS)
def test_the_memory_of_other_heads_is_estimated(head: str, rule: str) -> None:
    make, shape, params = HEADS[head]
    for k, loss in ((1, "cross_entropy"), (60, "squared_error")):
        problem = problem_of(make(), RULES[rule], k, shape, loss=loss, params=params)
        check_estimate(problem, "functional")


@pytest.mark.parametrize("path", ["functional", "dense", "span", "one step"])
def test_the_estimate_depends_on_the_precision(path: str) -> None:
    rule = mbpa.Gradient(0.1, 1 if path == "one step" else 3)
    problem = problem_of(nn.Linear(64, 50), rule, 20, (64,), dtype=torch.float64)
    check_estimate(problem, path, 1000 if path == "one step" else None)


def model_of(
    head: nn.Module, rule: mbpa.Rule, engine: mbpa.Engine, k: int = 10, entries: int = 200
) -> tuple[mbpa.MbPA, Tensor]:
    torch.manual_seed(0)
    size = next(head.parameters()).shape[1]
    memory = mbpa.ExactMemory(entries, size, dtype=next(head.parameters()).dtype)
    model = mbpa.MbPA(head=head, memory=memory, predictor=mbpa.Adapted(rule, k=k), engine=engine)
    keys, labels = torch.randn(entries, size), torch.randint(model.classes, (entries,))
    model.write(keys.to(memory.dtype), labels)
    return model, torch.randn(64, size).to(memory.dtype)


def head_for(path: str) -> nn.Module:
    return mlp(32, 40, 300) if path == "mlp" else nn.Linear(32, 300)


def peak_of(model: mbpa.MbPA, queries: Tensor) -> int:
    """Return the peak memory of a call, given the neighbours and the cached outputs of the head."""
    neighbors = model.memory.read(queries, model.predictor.k)
    model(queries, neighbors=neighbors)
    with Peak() as peak:
        model(queries, neighbors=neighbors)
    return peak.most


@pytest.mark.heavy
@pytest.mark.parametrize("path", PATHS)
def test_a_budget_is_kept(path: str) -> None:
    rule = mbpa.Gradient(0.1, 1 if path == "one step" else 3, decay=0.1)
    peaks = []
    for scratch_bytes in (1 << 19, 1 << 40):
        engine = mbpa.Engine(scratch_bytes, path=path, rates=CPU)
        model, queries = model_of(head_for(path), rule, engine)
        peaks.append(peak_of(model, queries))
        assert model.explain(queries[:1]).path == path
    results = 64 * 300 * 4  # bytes of the head's outputs, the adapted outputs and their softmax
    assert peaks[0] < 4 * results + 2 * (1 << 19)
    assert path == "one step" or peaks[1] > 2 * peaks[0]


@pytest.mark.parametrize("path", PATHS)
def test_one_query_at_a_time_gives_the_same(path: str) -> None:
    head, rule = head_for(path).double(), mbpa.Gradient(0.1)
    model, queries = model_of(head, rule, mbpa.Engine(path=path, rates=CPU))
    alone, _ = model_of(head, rule, mbpa.Engine(1, path=path, rates=CPU))  # not even one fits
    assert (alone(queries[:9]) - model(queries[:9])).abs().max() <= 1e-12


ALLOCATOR = "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you"
ANOTHER = "[enforce fail at alloc_cpu.cpp:113] data. DefaultCPUAllocator: not enough memory: you"
OUT_OF_MEMORY: dict[str, Callable[[], Exception]] = {
    "torch": lambda: torch.OutOfMemoryError("CUDA out of memory."),
    "python": MemoryError,
    "the CPU's": lambda: RuntimeError(ALLOCATOR),
    "another CPU's": lambda: RuntimeError(ANOTHER),  # on aarch64
}


def call_with_limit(
    model: mbpa.MbPA, queries: Tensor, limit: float, error: Callable[[], Exception] = MemoryError
) -> tuple[Tensor, list[str]]:
    """Return the prediction if memory ends at a limit, and the texts of the warnings."""
    neighbors = model.memory.read(queries, model.predictor.k)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Peak(limit, error):
            outputs = model(queries, neighbors=neighbors)
    return outputs, [str(each.message) for each in caught]


def check_halving(path: str, error: Callable[[], Exception]) -> None:
    rule = mbpa.Gradient(0.1, 1 if path == "one step" else 3)
    engine = mbpa.Engine(1 << 40, path=path, rates=CPU)
    model, queries = model_of(head_for(path).double(), rule, engine)
    queries = queries[:48]
    expected, peak = model(queries), peak_of(model, queries)
    results = 48 * 300 * 8
    outputs, texts = call_with_limit(model, queries, max(4 * results, 0.6 * peak), error)
    assert texts
    assert all("out of memory; adapting" in text for text in texts)
    assert (outputs - expected).abs().max() <= 1e-12
    again, texts = call_with_limit(model, queries, max(4 * results, 0.6 * peak), error)
    assert not texts, "the size that worked is remembered"
    assert torch.equal(again, outputs)


@pytest.mark.parametrize("path", ["functional", "dense", "span", "mlp"])
def test_too_large_a_chunk_is_tried_again_in_smaller_ones(path: str) -> None:
    check_halving(path, MemoryError)


@pytest.mark.parametrize("kind", OUT_OF_MEMORY)
def test_every_kind_of_memory_error_is_known(kind: str) -> None:
    check_halving("span", OUT_OF_MEMORY[kind])


@pytest.mark.parametrize("kind", OUT_OF_MEMORY)
def test_memory_that_does_not_suffice_for_one_query_is_an_error(kind: str) -> None:
    engine = mbpa.Engine(1 << 40, path="span", rates=CPU, store_bytes=0)
    model, queries = model_of(nn.Linear(8, 300), mbpa.Gradient(0.1, 3), engine)
    limit = 4 * 4 * 300 * 4  # enough for the head's own outputs, not for those of 10 neighbours
    neighbors = model.memory.read(queries[:4], 10)
    with (
        pytest.warns(UserWarning, match="out of memory; adapting [12] queries"),
        pytest.raises(type(OUT_OF_MEMORY[kind]())),
        Peak(limit, OUT_OF_MEMORY[kind]),
    ):
        model(queries[:4], neighbors=neighbors)


def test_another_error_is_raised_at_once() -> None:
    engine = mbpa.Engine(1 << 40, path="span", rates=CPU, store_bytes=0)
    model, queries = model_of(nn.Linear(8, 300), mbpa.Gradient(0.1, 3), engine)
    with pytest.raises(RuntimeError, match="something else"):
        call_with_limit(model, queries, 4 * 64 * 300 * 4, lambda: RuntimeError("something else"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits an address space as Linux does")
def test_memory_that_really_runs_out_costs_a_warning_and_nothing_else() -> None:
    script = """
        import resource, warnings
        import torch
        from torch import nn
        import mbpa

        torch.set_num_threads(1)
        torch.manual_seed(0)
        memory = mbpa.ExactMemory(1000, 64, dtype=torch.float64)
        rule, rates = mbpa.Gradient(0.1, 1), mbpa.device.Throughput(1e11, 1e10, 1e-6)
        head, predictor = nn.Linear(64, 3000).double(), mbpa.Adapted(rule, k=20)
        mbpa.adaptation.plan.MAX_CPU_CHUNK_BYTES.clear()  # which would keep the chunks small

        def adapted(scratch_bytes):
            engine = mbpa.Engine(scratch_bytes, path="dense", rates=rates)
            model = mbpa.MbPA(head=head, memory=memory, predictor=predictor, engine=engine)
            return model(queries)

        memory.write(torch.randn(1000, 64).double(), torch.randint(3000, (1000,)))
        queries = torch.randn(256, 64).double()
        expected = adapted(1 << 26)
        with open("/proc/self/statm") as file:
            taken = int(file.read().split()[0]) * resource.getpagesize()
        limit = taken + (1 << 28)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            outputs = adapted(1 << 40)
        assert any("out of memory; adapting" in str(w.message) for w in given), given
        assert (outputs - expected).abs().max() <= 1e-12
        print("fine after", len(given))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.startswith("fine after"), done.stderr


def choice(
    head: nn.Module,
    rule: mbpa.Rule,
    k: int,
    queries: int = 64,
    rows: int | None = 1000,
    rates: Throughput = CPU,
) -> str:
    size = next(head.parameters()).shape[1]
    problem = problem_of(head, rule, k, (size,), queries=queries)
    return make_plan(problem, rows, 1 << 29, rates).path


def test_clear_cases_take_the_clear_path() -> None:
    imagenet = nn.Linear(512, 1000)
    assert choice(imagenet, mbpa.Gradient(0.1, 10), 50, 2) == "span"
    assert choice(imagenet, mbpa.Gradient(0.1, 1), 50, 2) == "one step"
    assert choice(imagenet, mbpa.Gradient(0.1, 1), 50, 2, rows=None) == "span"
    assert choice(imagenet, mbpa.RMSprop(0.1, 2), 50, 2) == "dense"
    assert choice(nn.Linear(64, 2000), mbpa.Gradient(1.0, 1), 256, 2) == "one step"
    assert choice(nn.Linear(4, 3), mbpa.Gradient(0.1, 50), 200, 64) == "dense"
    assert choice(nn.Linear(4, 3), mbpa.Gradient(0.1, 50), 200, 1) == "span"
    wide, narrow = mlp(784, 400, 400, 10), mlp(64, 32, 10)
    assert choice(wide, mbpa.Gradient(0.1, 10), 10, 16) == "mlp"
    assert choice(narrow, mbpa.Gradient(0.1, 2), 5, 1) == "mlp"
    assert choice(narrow, mbpa.Gradient(0.1, 50), 50, 64) == "mlp"
    assert choice(wide, mbpa.Adam(0.1, 10), 10, 4) == "functional"


def test_the_choice_follows_the_rates() -> None:
    head, rule = nn.Linear(8, 3), mbpa.Gradient(0.1, 50)
    slow_calls = replace(CPU, call=1e-3)
    assert choice(head, rule, 200, 64, rates=CPU) == "dense"
    assert choice(head, rule, 200, 64, rates=slow_calls) == "span"
    model, queries = model_of(head, rule, mbpa.Engine(rates=CPU), k=200)
    assert model.explain(queries).path == "dense"
    assert (
        model_of(head, rule, mbpa.Engine(rates=slow_calls), k=200)[0].explain(queries).path
        == "span"
    )


def test_the_path_is_the_users_to_choose() -> None:
    head, rule = nn.Linear(8, 5).double(), mbpa.Gradient(0.1, 1)
    answers = []
    for path in ("functional", "dense", "span", "one step"):
        model, queries = model_of(head, rule, mbpa.Engine(path=path, rates=CPU))
        assert model.explain(queries[:1]).path == path
        answers.append(model(queries))
    assert all((answer - answers[0]).abs().max() <= 1e-9 for answer in answers)


def test_the_path_for_mlp_heads_may_have_its_earlier_name() -> None:
    engine = mbpa.Engine(path="layers", rates=CPU)
    model, queries = model_of(mlp(8, 6, 5), mbpa.Gradient(0.1, 2), engine)
    assert model.explain(queries).path == "mlp"


def test_a_path_that_cannot_be_taken_is_refused() -> None:
    with pytest.raises(ValueError, match=r"path must be None or one of .*, got 'fast'"):
        mbpa.Engine(path="fast")
    for path, head, rule in [
        ("mlp", nn.Linear(8, 5), mbpa.Gradient(0.1)),
        ("one step", nn.Linear(8, 5), mbpa.Gradient(0.1, 2)),
        ("span", nn.Linear(8, 5), mbpa.Adam(0.1)),
        ("dense", mlp(8, 6, 5), mbpa.Gradient(0.1)),
    ]:
        model, queries = model_of(head, rule, mbpa.Engine(path=path, rates=CPU))
        with pytest.raises(ValueError, match=f"for this problem, got '{path}'"):
            model(queries)
