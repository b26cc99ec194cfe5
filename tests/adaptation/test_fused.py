"""The Triton kernels agree with plain torch; on a GPU, or otherwise in Triton's interpreter."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from matrix import combine
from torch import Tensor, nn

import mbpa
from mbpa.adaptation.mlp import solve_mlp
from mbpa.adaptation.output_cache import StoredOutputs
from mbpa.adaptation.per_query import is_dense_fused, solve_dense
from mbpa.adaptation.problem import Problem
from mbpa.adaptation.span import is_span_fused, solve_one_step, solve_span
from mbpa.device import runs_kernels
from mbpa.memory import two_stage
from mbpa.memory.two_stage import CoarseKeys
from mbpa.modules.head import own_precision


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a device on which kernels run."""
    if not torch.cuda.is_available():
        pytest.importorskip("triton")
        monkeypatch.setenv("MBPA_TRITON", "1")
    name = "cuda" if torch.cuda.is_available() else "cpu"
    with own_precision(torch.empty(0, device=name)):
        yield name


def make_problem(
    device: str,
    rule: mbpa.Rule,
    *,
    k: int,
    classes: int,
    size: int = 9,
    adapting: tuple[str, ...] = ("weight", "bias"),
    bias: bool = True,
    scale: float = 1.0,
    batch: int = 2,
) -> Problem:
    generator = torch.Generator().manual_seed(k + classes)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    torch.manual_seed(1)
    head = nn.Linear(size, classes, bias=bias).to(device)
    queries, keys = normal(batch, size) * scale, normal(batch, k, size) * scale
    weights = torch.rand(batch, k, generator=generator)
    weights[:, k // 2] = 0  # padding has no weight
    queries = queries.to(device)
    return Problem(
        head=head,
        rule=rule,
        loss="cross_entropy",
        adapting=adapting if bias else ("weight",),
        queries=queries,
        outputs=head(queries),
        keys=keys.to(device),
        values=torch.randint(classes, (batch, k), generator=generator).to(device),
        weights=(weights / weights.sum(1, keepdim=True)).to(device),
    )


def in_tables(problem: Problem) -> StoredOutputs:
    """Return the neighbours' outputs as a padded table, with two rows that are not written yet."""
    assert problem.linear is not None
    outputs = problem.linear(problem.keys).flatten(0, 1)
    table = torch.zeros(len(outputs) - 2, 16 * math.ceil(outputs.shape[1] / 16)).to(outputs)
    unwritten = table.new_zeros(2, table.shape[1])
    table[:, : outputs.shape[1]], unwritten[:, : outputs.shape[1]] = outputs[:-2], outputs[-2:]
    index = torch.arange(len(outputs), device=table.device).view(problem.weights.shape)
    width = outputs.shape[1]
    return StoredOutputs(table[:, :width], unwritten[:, :width], index)


def wide(problem: Problem) -> Problem:
    """Return the same problem in float64, which no kernel takes."""
    tensors = {
        name: getattr(problem, name).double() for name in ("queries", "outputs", "keys", "weights")
    }
    fields = {name: getattr(problem, name) for name in ("rule", "loss", "adapting", "values")}
    head = nn.Linear(*reversed(problem.head.weight.shape), bias=problem.head.bias is not None)
    head = head.to(problem.queries.device).double()
    head.load_state_dict(problem.head.state_dict())
    tensors["outputs"] = head(tensors["queries"]).detach()
    return Problem(head=head, **tensors, **fields)


def difference(outputs: Tensor, expected: Tensor) -> float:
    return float((outputs.double().log_softmax(1) - expected.log_softmax(1)).abs().max())


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("steps", "decay"), [(1, 0.0), pytest.param(2, 0.0, marks=pytest.mark.slow), (3, 0.2)]
)
# More classes than a program holds; rows to spare, none to spare, and more than one tile of them.
@pytest.mark.parametrize(
    ("k", "classes"),
    [
        *((5, 20), (16, 130), (150, 40)),
        *(
            pytest.param(*sizes, marks=pytest.mark.slow)
            for sizes in ((20, 130), (63, 64), (64, 130), (128, 70), (256, 33))
        ),
    ],
)
def test_span_steps_equal_torch(
    device: str, k: int, classes: int, steps: int, decay: float
) -> None:
    problem = make_problem(device, mbpa.Gradient(0.5, steps, decay), k=k, classes=classes)
    assert is_span_fused(problem)
    expected = solve_span(wide(problem), None, False)[0]
    assert difference(problem.outputs, expected) > 0.05  # it does adapt
    assert difference(solve_span(problem, None, False)[0], expected) < 2e-5
    assert difference(solve_span(problem, in_tables(problem), False)[0], expected) < 2e-5


@pytest.mark.parametrize("adapting", [("weight",), ("bias",)])
@pytest.mark.parametrize("classes", [20, 130])
def test_span_steps_of_some_parameters_equal_torch(
    device: str, adapting: tuple[str, ...], classes: int
) -> None:
    rule = mbpa.Gradient(0.5, 3)
    problem = make_problem(device, rule, k=16, classes=classes, adapting=adapting)
    assert (
        difference(solve_span(problem, None, False)[0], solve_span(wide(problem), None, False)[0])
        < 2e-5
    )


@pytest.mark.heavy
@pytest.mark.parametrize("classes", [20, 130])
@pytest.mark.parametrize("scale", [1e-3, 6.0, 30.0])
def test_steep_and_flat_steps_equal_torch(device: str, scale: float, classes: int) -> None:
    """Outputs may move by hundreds in a step, so peaks are found anew; tiny keys are rescaled."""
    rule = mbpa.Gradient(1.0, 3, 0.1)
    problem = make_problem(device, rule, k=6, classes=classes, scale=scale)
    expected = solve_span(wide(problem), None, False)[0]
    moved = float(expected.abs().max())
    assert difference(solve_span(problem, None, False)[0], expected) < max(2e-5, 4e-6 * moved)


@pytest.mark.heavy
@pytest.mark.parametrize("k", [6, 150])
def test_queries_far_longer_than_their_neighbours_lose_no_precision(device: str, k: int) -> None:
    problem = make_problem(device, mbpa.Gradient(0.01, 3), k=k, classes=20)
    problem = replace(problem, queries=30 * problem.queries)
    problem = replace(problem, outputs=problem.head(problem.queries))
    expected = solve_span(wide(problem), None, False)[0]
    assert difference(solve_span(problem, None, False)[0], expected) < 1e-4


@pytest.mark.heavy
@pytest.mark.parametrize("classes", [20, 130])
def test_keys_of_zero_change_nothing(device: str, classes: int) -> None:
    rule = mbpa.Gradient(0.5, 3)
    problem = make_problem(device, rule, k=6, classes=classes, adapting=("weight",), scale=0.0)
    assert difference(solve_span(problem, None, False)[0], problem.outputs.double()) < 1e-6


@pytest.mark.heavy
@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_classes_that_are_ruled_out_stay_so(device: str, decay: float) -> None:
    problem = make_problem(device, mbpa.Gradient(0.5, 3, decay), k=6, classes=200)
    problem.head.bias.data[64:128] = -math.inf
    problem = replace(problem, outputs=problem.head(problem.queries), values=problem.values % 64)
    expected = solve_span(wide(problem), None, False)[0].log_softmax(1)
    outputs = solve_span(problem, None, False)[0].log_softmax(1)
    assert (outputs[:, 64:128] == -math.inf).all()
    seen = expected.isfinite()
    assert (outputs[seen] - expected[seen]).abs().max() < 2e-5


@pytest.mark.parametrize("classes", [20, 600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_step_from_stored_rows_equals_torch(
    device: str, classes: int, dtype: torch.dtype
) -> None:
    problem = make_problem(device, mbpa.Gradient(0.5), k=7, classes=classes)
    rows = in_tables(problem)
    tables = [part.softmax(-1).to(dtype) for part in (rows.table, rows.unwritten)]
    outputs = solve_one_step(problem, StoredOutputs(*tables, rows.index))
    expected = solve_span(wide(problem), None, False)[0]
    assert difference(outputs, expected) < (2e-5 if dtype == torch.float32 else 1e-3)


def begun_with(problem: Problem, first: int) -> Problem:
    """Return the problem with its neighbours rotated, which changes the order of all sums."""
    names = "keys", "values", "weights", "dots"
    given = {name: getattr(problem, name) for name in names}
    return replace(
        problem, **{name: v if v is None else v.roll(-first, 1) for name, v in given.items()}
    )


RULES = {
    "rmsprop": mbpa.RMSprop(0.01, 3, decay=0.1, initial_square=1.0),
    "rmsprop from zero": mbpa.RMSprop(0.01, 2),
    "rmsprop, one step": mbpa.RMSprop(0.01, 1),
    "adam": mbpa.Adam(0.02, 3, decay=0.1),
    "adam without epsilon": mbpa.Adam(0.02, 2, epsilon=0.0),
}


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("sizes", "rule"),
    combine(
        [(5, 9, 20, True), (5, 9, 20, False), (20, 70, 130, True), (65, 16, 5, True)],
        RULES,
        keep=lambda sizes, rule: sizes == (5, 9, 20, True) or rule in ("rmsprop", "adam"),
    ),
)
def test_elementwise_rules_equal_torch(
    device: str, sizes: tuple[int, int, int, bool], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    k, size, classes, bias = sizes
    problem = make_problem(
        device,
        RULES[rule],
        k=k,
        classes=classes,
        size=size,
        bias=bias,
        batch=64 if device == "cuda" else 2,
    )
    assert is_dense_fused(problem)
    expected = solve_dense(wide(problem), None, False)[0]
    assert difference(problem.outputs, expected) > 0.01  # it does adapt
    outputs = [
        solve_dense(problem, None, False)[0],
        solve_dense(problem, in_tables(problem), False)[0],
    ]
    monkeypatch.setenv("MBPA_TRITON", "0")
    # Where moments start at zero, the sign of a tiny slope decides: float32 itself is that far off,
    # and how far is chance: sums are taken in several orders, and the worst of them counts.
    itself = [solve_dense(begun_with(problem, first), None, False)[0] for first in range(min(k, 8))]
    tolerance = max(1e-4, 3 * max(difference(each, expected) for each in itself))
    assert max(difference(each, expected) for each in outputs) < tolerance


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("shape", "adapting"),
    combine(
        [((9, 33, 20, 5), 7, 7), ((5, 70, 150, 130, 3), 1, 4)],
        ("all", "weights", "biases", "upper"),
        keep=lambda shape, adapting: shape[1] == 7 or adapting in ("all", "biases"),
    ),
)
def test_mlp_steps_equal_torch(
    device: str,
    shape: tuple[tuple[int, ...], int, int],
    adapting: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes, k, steps = shape
    past = pytest.importorskip("mbpa.adaptation.fused.mlp_history")
    torch.manual_seed(0)
    linear = [nn.Linear(ins, outs) for ins, outs in itertools.pairwise(sizes)]
    head = nn.Sequential(*(module for layer in linear for module in (layer, nn.Tanh()))).to(device)
    if len(sizes) > 4:  # a bias that is a column of something
        column = torch.randn(sizes[2], 2, device=device)[:, 0]
        head[2].bias = nn.Parameter(column)
    names = [name for name, _ in head.named_parameters()]
    parts = {"all": names, "weights": names[::2], "biases": names[1::2], "upper": names[2:]}
    keys, labels = torch.randn(2, k, sizes[0], device=device), torch.randint(3, (2, k))
    problem = Problem(
        head=head,
        rule=mbpa.Gradient(0.5, steps, decay=0.1, momentum=0.5),
        loss="cross_entropy",
        adapting=tuple(parts[adapting]),
        queries=keys[:, 0],
        outputs=head(keys[:, 0]).detach(),
        keys=keys,
        values=labels.to(device),
        weights=torch.full((2, k), 1 / k, device=device),
    )
    calls = []
    add_past = past.add_past
    monkeypatch.setattr(past, "add_past", lambda *a, **b: calls.append(add_past(*a, **b)))
    outputs, change = solve_mlp(problem, True)
    assert bool(calls) == (adapting != "biases" and (len(sizes) > 4 or adapting != "upper"))
    monkeypatch.setenv("MBPA_TRITON", "0")
    expected, expected_change = solve_mlp(problem, True)
    assert change is not None
    assert expected_change is not None
    assert (expected - problem.outputs).abs().max() > 0.05  # it does adapt
    assert (outputs - expected).abs().max() < 3e-5
    assert (change - expected_change).abs().max() < 3e-5


def test_adam_that_forgets_squares_faster_than_means_is_left_to_torch(device: str) -> None:
    problem = make_problem(device, mbpa.Adam(1.0, 8, beta2=0.1), k=5, classes=20)
    assert not is_dense_fused(problem)


def test_large_steps_do_not_overflow(device: str) -> None:
    rule = mbpa.RMSprop(30.0, 3, initial_square=1.0)
    problem = make_problem(device, rule, k=4, classes=6, scale=20.0)
    expected = solve_dense(wide(problem), None, False)[0]
    outputs = solve_dense(problem, None, False)[0]
    assert ((outputs - expected).abs() / expected.abs().max()).max() < 1e-5


def clusters(count: int, size: int) -> Tensor:
    centers = torch.randn(7, size) * 3
    return centers[torch.randint(7, (count,))] + 0.01 * torch.randn(count, size)


KEYS = {
    "random": lambda count, size: torch.randn(count, size),
    "clustered": clusters,
    "far from the origin": lambda count, size: 100 + torch.randn(count, size),
    "tiny": lambda count, size: 1e-6 * torch.randn(count, size),
    "hardly there": lambda count, size: 3e-11 * torch.randn(count, size),
    "beyond half precision": lambda count, size: 1e6 * torch.randn(count, size),
    "duplicates": lambda count, size: torch.randn(count, size).round(),
}


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("kind", "dtype"),
    combine(
        KEYS,
        (torch.float32, torch.float16, torch.bfloat16),
        keep=lambda kind, dtype: dtype == torch.float32 or kind == "clustered",
    ),
)
def test_coarse_search_finds_the_nearest(device: str, kind: str, dtype: torch.dtype) -> None:
    if kind in ("beyond half precision", "hardly there") and dtype == torch.float16:
        pytest.skip("float16 ends at 65,504, and has nothing between 0 and 6e-8")
    torch.manual_seed(0)
    keys = KEYS[kind](600, 5).to(device, dtype)
    queries = torch.cat(
        [KEYS[kind](1, 5).to(device), keys[250:251].float(), -50 * keys[:1].float()]
    )
    norms = keys.float().square().sum(1)
    norms[150:170] = math.inf  # deleted
    coarse = CoarseKeys(keys)
    coarse.update(torch.arange(600, device=device), keys)
    found = coarse.nearest(norms, queries, 6, len(keys))
    distances = (keys.float() - queries[:, None]).square().sum(-1)
    distances[:, 150:170] = math.inf
    nearest = distances.sort(dim=1).values[:, :6]
    assert found.measured is not None
    assert torch.allclose(found.measured[0], distances.gather(1, found.slots), rtol=1e-5)
    assert found.beyond is not None
    is_sure = nearest <= found.beyond[:, None]
    if (kind, dtype) == ("random", torch.float32):  # where rounding matters little
        assert is_sure[:, :3].all()
    assert torch.allclose(found.measured[0][is_sure], nearest[is_sure], rtol=1e-5)
    left_out = distances.scatter(1, found.slots, math.inf)
    assert (left_out >= found.beyond[:, None] * (1 - 1e-5)).all()


@pytest.mark.heavy
def test_a_large_memory_is_searched_coarsely(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_stage, "MIN_KEYS", 100)
    torch.manual_seed(0)
    keys = KEYS["duplicates"](800, 5)
    memory = mbpa.ExactMemory(750, 5, device=device)
    ids = memory.write(keys.to(device), torch.zeros(800, dtype=torch.int64))
    memory.delete(ids[300:340])
    queries = torch.cat([KEYS["duplicates"](1, 5), keys[500:501], -50 * keys[:1]]).to(device)
    found = memory.read(queries, 3)
    entries = memory.entries()
    distances = (entries.keys - queries[:, None]).square().sum(-1)
    newest_first = distances.flip(1).argsort(dim=1, stable=True)[:, :3]
    assert torch.equal(found.ids, entries.ids.to(device).flip(0)[newest_first])
    assert torch.allclose(found.distances, distances.flip(1).gather(1, newest_first), rtol=1e-5)


def test_coarse_search_is_not_used_for_keys_beyond_the_scale_of_the_first(device: str) -> None:
    keys = torch.cat([1e-4 * torch.randn(300, 5), 1e4 * torch.randn(300, 5)]).to(device)
    keys[0] = 0
    coarse, slots = CoarseKeys(keys), torch.arange(600, device=device)
    for start, stop, can_find in ((0, 300, True), (300, 600, False)):
        coarse.update(slots[start:stop], keys[start:stop])
        assert coarse.can_find(4, two_stage.MIN_KEYS) == can_find


def test_kernels_can_be_disabled(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    assert runs_kernels(torch.device(device))
    monkeypatch.setenv("MBPA_TRITON", "0")
    assert not runs_kernels(torch.device(device))


@pytest.mark.heavy
def test_rows_in_half_precision_are_used_only_where_they_are_sure_enough(device: str) -> None:
    torch.manual_seed(0)
    head = nn.Linear(6, 4).to(device)
    keys, labels = torch.randn(40, 6, device=device), torch.randint(4, (40,), device=device)
    queries = torch.randn(8, 6, device=device)

    def model(lr: float, half: bool) -> mbpa.MbPA:
        model = mbpa.MbPA(
            head=head,
            memory=mbpa.ExactMemory(40, 6, device=device),
            predictor=mbpa.Adapted(mbpa.Gradient(lr), k=7),
            engine=mbpa.Engine(half_store=half, path="one step"),
        )
        model.write(keys, labels)
        return model

    small = model(0.05, True)
    apart = (small(queries) - model(0.05, False)(queries)).abs().max()
    assert small.explain(queries).path == "one step"
    assert 0 < apart < 1e-3
    large = model(5.0, True)
    assert large.explain(queries).path != "one step"
    assert (large(queries) - model(5.0, False)(queries)).abs().max() < 1e-4
