"""The plan: what it says of memory is so, budgets are kept, and clear cases take the clear path."""

from __future__ import annotations

import inspect
import itertools
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from peak import Peak
from torch import Tensor, nn

import mbpa
from mbpa.adaptation import losses, output_cache, per_query, span
from mbpa.adaptation.engine import SOLVERS, Solved
from mbpa.adaptation.output_cache import StoredOutputs
from mbpa.adaptation.plan import PATHS, make_plan
from mbpa.adaptation.problem import Problem
from mbpa.device import Throughput
from mbpa.modules.head import own_precision

CPU = Throughput(operations=2.0**37, bytes=2.0**35, call=2.0**-18)  # of two cores
RULES: dict[str, Callable[[int], mbpa.Rule]] = {
    "gradient": lambda steps: mbpa.Gradient(0.1, steps),
    "decay": lambda steps: mbpa.Gradient(0.1, steps, decay=0.1),
    "momentum": lambda steps: mbpa.Gradient(0.1, steps, momentum=0.5),
    "decay and momentum": lambda steps: mbpa.Gradient(0.1, steps, decay=0.1, momentum=0.5),
    "rmsprop": lambda steps: mbpa.RMSprop(0.1, steps, decay=0.1),
    "adam": lambda steps: mbpa.Adam(0.1, steps),
}
LOSSES = ["cross_entropy", "squared_error"]
SHAPES = [  # K, C, D
    (1, 100, 100),
    (2, 2000, 64),
    (5, 30, 512),
    (50, 10, 64),
    (50, 1000, 128),
    (200, 3, 4),
    (200, 10, 32),
    (200, 2000, 16),
]


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What checks annotations holds a function's arguments for as long as it runs."""
    for module in (losses, per_query, span, output_cache):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__:
                monkeypatch.setattr(module, name, inspect.unwrap(function))


def mlp(*sizes: int, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    modules = list[nn.Module]()
    for ins, outs in itertools.pairwise(sizes):
        modules += [nn.Linear(ins, outs), activation()]
    return nn.Sequential(*modules[:-1])


def conv(ins: int, hidden: int, outs: int) -> nn.Module:
    """Of pictures of 6 × 6."""
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


def assert_foretold(
    problem: Problem, path: str, rows: int | None = None, want_change: bool = False
) -> None:
    plan = make_plan(problem, rows, 1 << 24, CPU, path, want_change)
    chunk, stored = problem.rows(slice(0, plan.chunk)), stored_for(problem, rows)
    some = None if stored is None else stored.rows(slice(0, plan.chunk))
    with own_precision(problem.keys), Peak() as peak:
        SOLVERS[path](chunk, some, want_change)
    if peak.most > 10_000 * plan.chunk:
        assert 0.8 < plan.held / peak.most < 1.25


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_scratch_that_paths_for_linear_heads_take_is_foretold(
    shape: tuple[int, int, int], loss: str, rule: str, steps: int
) -> None:
    k, classes, size = shape
    for params in (["weight", "bias"], ["weight"], ["bias"]):
        head = nn.Linear(size, classes)
        problem = problem_of(head, RULES[rule](steps), k, (size,), loss=loss, params=params)
        assert_foretold(problem, "functional")
        assert_foretold(problem, "dense")
        if isinstance(problem.rule, mbpa.Gradient):
            for rows, want_change in itertools.product([None, 1000], [False, True]):
                assert_foretold(problem, "span", rows, want_change)
        if isinstance(problem.rule, mbpa.Gradient) and steps == 1:
            for rows, want_change in itertools.product([300, 5000], [False, True]):
                assert_foretold(problem, "one step", rows, want_change)


@pytest.mark.parametrize("path", ["functional", "dense", "span", "one step"])
def test_the_scratch_is_foretold_in_double_precision(path: str) -> None:
    rule = mbpa.Gradient(0.1, 1 if path == "one step" else 3)
    problem = problem_of(nn.Linear(64, 50), rule, 20, (64,), dtype=torch.float64)
    assert_foretold(problem, path, 1000 if path == "one step" else None)


HEADS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[str] | None]] = {
    "relu": (lambda: mlp(100, 200, 300, 10), (100,), None),
    "gelu": (lambda: mlp(100, 200, 300, 10, activation=nn.GELU), (100,), None),
    "first layer": (lambda: mlp(100, 200, 300, 10), (100,), ["0.weight", "0.bias"]),
    "last layer": (lambda: mlp(100, 200, 300, 10), (100,), ["4.weight", "4.bias"]),
    "biases": (lambda: mlp(100, 200, 300, 10), (100,), ["0.bias", "2.bias", "4.bias"]),
    "weights": (lambda: mlp(100, 200, 300, 10), (100,), ["0.weight", "2.weight", "4.weight"]),
    "many classes": (lambda: mlp(20, 20, 1000), (20,), None),
    "deep": (lambda: mlp(*[64] * 7), (64,), None),
    "conv": (lambda: conv(3, 8, 10), (3, 6, 6), None),
    "batch norm alone": (lambda: conv(3, 8, 10), (3, 6, 6), ["1.weight", "1.bias"]),
    "after conv": (lambda: conv(3, 8, 10), (3, 6, 6), ["4.weight", "4.bias"]),
}


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("rule", ["gradient", "decay and momentum", "rmsprop", "adam"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("head", HEADS)
def test_the_scratch_that_other_heads_take_is_foretold(
    head: str, loss: str, rule: str, steps: int
) -> None:
    make, shape, params = HEADS[head]
    for k in (1, 60):
        problem = problem_of(make(), RULES[rule](steps), k, shape, loss=loss, params=params)
        assert_foretold(problem, "functional")


def test_a_frozen_head_is_planned_as_any_other() -> None:
    head = mlp(100, 200, 300, 10).requires_grad_(False)
    assert_foretold(problem_of(head, mbpa.Gradient(0.1, 3), 100, (100,)), "functional")


def test_the_plan_leaves_the_head_alone() -> None:
    problem = problem_of(conv(3, 8, 10), mbpa.Gradient(0.1), 5, (3, 6, 6))
    before = {name: tensor.clone() for name, tensor in problem.head.state_dict().items()}
    make_plan(problem, None, 1 << 24, CPU)
    after = problem.head.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert all(p.grad is None for p in problem.head.parameters())


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


def watched(monkeypatch: pytest.MonkeyPatch, path: str) -> list[tuple[int, int]]:
    """How many queries each call of this path's solver got, and its peak memory."""
    seen, solver = list[tuple[int, int]](), SOLVERS[path]

    def watch(problem: Problem, stored: StoredOutputs | None, want_change: bool) -> Solved:
        with Peak() as peak:
            solved = solver(problem, stored, want_change)
        seen.append((len(problem.queries), peak.most))
        return solved

    monkeypatch.setitem(SOLVERS, path, watch)
    return seen


@pytest.mark.parametrize("scratch_bytes", [200_000, 1_000_000, 3_000_000])
@pytest.mark.parametrize("path", PATHS)
def test_a_budget_is_kept(path: str, scratch_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    head = mlp(32, 40, 50) if path == "layers" else nn.Linear(32, 50)
    rule = mbpa.Gradient(0.1, 1 if path == "one step" else 3, decay=0.1)
    seen = watched(monkeypatch, path)
    model, queries = model_of(head, rule, mbpa.Engine(scratch_bytes, path=path))
    model(queries)
    assert model.explain(queries).path == path  # and finds the change as well
    assert sum(count for count, _ in seen) % len(queries) == 0
    assert max(most for _, most in seen) <= 1.25 * scratch_bytes


@pytest.mark.parametrize("path", PATHS)
def test_one_query_is_taken_at_a_time_where_none_fits(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = mlp(32, 40, 50) if path == "layers" else nn.Linear(32, 50)
    seen = watched(monkeypatch, path)
    model, queries = model_of(head, mbpa.Gradient(0.1), mbpa.Engine(1, path=path))
    model(queries)
    assert [count for count, _ in seen] == [1] * len(queries)


ALLOCATOR = "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you"
ANOTHER = "[enforce fail at alloc_cpu.cpp:113] data. DefaultCPUAllocator: not enough memory: you"
OUT_OF_MEMORY = {
    "torch": lambda: torch.OutOfMemoryError("CUDA out of memory."),
    "python": MemoryError,
    "the CPU's": lambda: RuntimeError(ALLOCATOR),
    "another CPU's": lambda: RuntimeError(ANOTHER),  # on aarch64
}


def limited(
    monkeypatch: pytest.MonkeyPatch, path: str, most: int, error: Callable[[], Exception]
) -> list[int]:
    """Let the path's solver fail for more than so many queries; the sizes of chunks tried."""
    tried, solver = list[int](), SOLVERS[path]

    def solve(problem: Problem, stored: StoredOutputs | None, want_change: bool) -> Solved:
        tried.append(len(problem.queries))
        if len(problem.queries) > most:
            raise error()
        return solver(problem, stored, want_change)

    monkeypatch.setitem(SOLVERS, path, solve)
    return tried


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", OUT_OF_MEMORY)
def test_too_large_a_chunk_is_tried_again_in_smaller_ones(
    kind: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = mlp(32, 40, 50) if path == "layers" else nn.Linear(32, 50)
    model, queries = model_of(head.double(), mbpa.Gradient(0.1), mbpa.Engine(path=path))
    expected = model(queries)
    tried = limited(monkeypatch, path, 10, OUT_OF_MEMORY[kind])
    with pytest.warns(UserWarning, match="out of memory; adapting (32|16|8) queries"):
        outputs = model(queries)
    assert tried == [64, 32, 16] + [8] * 8
    assert (outputs - expected).abs().max() <= 1e-12


@pytest.mark.parametrize("kind", OUT_OF_MEMORY)
def test_memory_that_does_not_suffice_for_one_query_is_an_error(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, queries = model_of(nn.Linear(8, 5), mbpa.Gradient(0.1, 3), mbpa.Engine(path="span"))
    tried = limited(monkeypatch, "span", 0, OUT_OF_MEMORY[kind])
    with (
        pytest.warns(UserWarning, match="out of memory"),
        pytest.raises(type(OUT_OF_MEMORY[kind]())),
    ):
        model(queries)
    assert tried == [64, 32, 16, 8, 4, 2, 1]


def test_another_error_is_raised_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, queries = model_of(nn.Linear(8, 5), mbpa.Gradient(0.1, 3), mbpa.Engine(path="span"))
    tried = limited(monkeypatch, "span", 0, lambda: RuntimeError("something else"))
    with pytest.raises(RuntimeError, match="something else"):
        model(queries)
    assert tried == [64]


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
        mbpa.adaptation.plan.CPU_BYTES.clear()  # which would keep the chunks small

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
    assert choice(wide, mbpa.Gradient(0.1, 10), 10, 16) == "layers"
    assert choice(narrow, mbpa.Gradient(0.1, 2), 5, 1) == "layers"
    assert choice(narrow, mbpa.Gradient(0.1, 50), 50, 64) == "layers"
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


def test_given_rates_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mbpa.adaptation.engine.measure_throughput", None)
    model, queries = model_of(nn.Linear(8, 5), mbpa.Gradient(0.1, 3), mbpa.Engine(rates=CPU))
    assert model(queries).isfinite().all()


def test_the_path_is_the_users_to_choose() -> None:
    head, rule = nn.Linear(8, 5).double(), mbpa.Gradient(0.1, 1)
    answers = []
    for path in ("functional", "dense", "span", "one step"):
        model, queries = model_of(head, rule, mbpa.Engine(path=path, rates=CPU))
        assert model.explain(queries).path == path
        answers.append(model(queries))
    assert all((answer - answers[0]).abs().max() <= 1e-9 for answer in answers)


def test_a_path_that_cannot_be_taken_is_refused() -> None:
    with pytest.raises(ValueError, match=r"path must be None or one of .*, got 'fast'"):
        mbpa.Engine(path="fast")
    for path, head, rule in [
        ("layers", nn.Linear(8, 5), mbpa.Gradient(0.1)),
        ("one step", nn.Linear(8, 5), mbpa.Gradient(0.1, 2)),
        ("span", nn.Linear(8, 5), mbpa.Adam(0.1)),
        ("dense", mlp(8, 6, 5), mbpa.Gradient(0.1)),
    ]:
        model, queries = model_of(head, rule, mbpa.Engine(path=path, rates=CPU))
        with pytest.raises(ValueError, match=f"for this problem, got '{path}'"):
            model(queries)


def test_one_query_that_does_not_fit_after_many_that_did_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    solve, sizes = SOLVERS["span"], list[int]()

    def refuse_the_last(problem: Problem, kept: StoredOutputs | None, want: bool) -> Solved:
        sizes.append(len(problem.queries))
        if len(problem.queries) == 1:
            raise MemoryError
        return solve(problem, kept, want)

    monkeypatch.setitem(SOLVERS, "span", refuse_the_last)
    head, rule = nn.Linear(64, 50), mbpa.Gradient(0.1, 3)
    held = make_plan(problem_of(head, rule, 10, (64,)), 200, 1, CPU, "span").held
    engine = mbpa.Engine(scratch_bytes=int(63.5 * held), path="span")
    model, queries = model_of(head, rule, engine)
    with pytest.raises(MemoryError):
        model(queries)
    assert sizes == [63, 1]
