"""The layer-by-layer path for MLP heads equals the per-query autograd loop of `oracle.py`."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import oracle
import pytest
import torch
from matrix import combine
from peak import Peak
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import mbpa
from mbpa.adaptation.mlp import DERIVATIVES, estimate_mlp_cost, solve_mlp
from mbpa.adaptation.problem import ELEMENTWISE, Problem
from mbpa.modules.head import own_precision

INPUTS, CLASSES, QUERIES, K = 6, 4, 5, 7
SIZES = {1: (6, 4), 2: (6, 9, 4), 3: (6, 9, 5, 4), 4: (6, 9, 5, 8, 4)}
RULES = {
    "gradient": lambda steps: mbpa.Gradient(0.3, steps),
    "decay": lambda steps: mbpa.Gradient(0.3, steps, decay=0.2),
    "momentum": lambda steps: mbpa.Gradient(0.1, steps, momentum=0.8),
    "decay and momentum": lambda steps: mbpa.Gradient(0.1, steps, decay=0.1, momentum=0.8),
    "momentum as strong as what decay leaves": lambda steps: mbpa.Gradient(0.1, steps, 0.2, 0.8),
}
LOSSES = ["cross_entropy", "squared_error"]
ACTIVATIONS = {
    "relu": nn.ReLU,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
    "gelu by tanh": lambda: nn.GELU("tanh"),
    "silu": nn.SiLU,
    "silu in place": lambda: nn.SiLU(inplace=True),
    "elu": lambda: nn.ELU(0.7),
    "elu in place": lambda: nn.ELU(inplace=True),
    "leaky relu": lambda: nn.LeakyReLU(0.2),
    "leaky relu in place": lambda: nn.LeakyReLU(0.3, inplace=True),
    "softplus": lambda: nn.Softplus(2.0, 1.5),
    "identity": nn.Identity,
    "dropout": lambda: nn.Dropout(0.5),
    "flatten": nn.Flatten,
    "two": lambda: nn.Sequential(nn.SiLU(), nn.ReLU(inplace=True)),
}


def mlp(linear: int = 3, activation: str = "tanh", bias: bool = True) -> nn.Sequential:
    torch.manual_seed(3)
    sizes, modules = SIZES[linear], list[nn.Module]()
    for ins, outs in itertools.pairwise(sizes):
        modules += [nn.Linear(ins, outs, bias), ACTIVATIONS[activation]()]
    return nn.Sequential(*modules[:-1]).double().eval()


def problem_of(
    head: nn.Module,
    rule: mbpa.Rule,
    loss: str = "cross_entropy",
    params: tuple[str, ...] | None = None,
    *,
    k: int = K,
    shape: tuple[int, ...] = (INPUTS,),
) -> Problem:
    generator = torch.Generator().manual_seed(5)
    keys = torch.randn(QUERIES, k, *shape, generator=generator, dtype=torch.float64)
    queries = torch.randn(QUERIES, *shape, generator=generator, dtype=torch.float64)
    values = torch.randint(CLASSES, (QUERIES, k), generator=generator)
    if loss == "squared_error":
        values = torch.randn(QUERIES, k, CLASSES, generator=generator, dtype=torch.float64)
    weights = torch.rand(QUERIES, k, generator=generator, dtype=torch.float64)
    weights /= weights.sum(1, keepdim=True)
    adapting = params or tuple(name for name, _ in head.named_parameters())
    with torch.no_grad():
        outputs = head(queries.clone())
    return Problem(head, rule, loss, adapting, queries, outputs, keys, values, weights)


def in_float32(problem: Problem) -> Problem:
    tensors = ("queries", "outputs", "keys", "values", "weights")
    narrow = {name: getattr(problem, name) for name in tensors}
    narrow = {n: t.float() if t.is_floating_point() else t for n, t in narrow.items()}
    return replace(problem, head=copy.deepcopy(problem.head).float(), **narrow)


def loop(problem: Problem) -> tuple[Tensor, Tensor]:
    outputs, changes = [], []
    for query, keys, *neighbors in zip(
        problem.queries, problem.keys, problem.values, problem.weights, strict=True
    ):
        adapted = oracle.adapt_one(
            problem.head, problem.rule, problem.loss, problem.adapting, keys.clone(), *neighbors
        )
        moved = zip(adapted.parameters(), problem.head.parameters(), strict=True)
        changes.append(sum((new - old).square().sum() for new, old in moved).sqrt().detach())
        outputs.append(adapted(query[None].clone())[0].detach())
    return torch.stack(outputs), torch.stack(changes)


def solved(problem: Problem) -> tuple[Tensor, Tensor]:
    before = [p.detach().clone() for p in problem.head.parameters()]
    inputs = problem.keys.clone(), problem.queries.clone()
    with own_precision(problem.keys):
        outputs, change = solve_mlp(problem, True)
        alone, nothing = solve_mlp(problem, False)
    assert nothing is None
    assert torch.equal(outputs, alone)
    assert change is not None
    assert all(map(torch.equal, before, problem.head.parameters()))
    assert all(map(torch.equal, inputs, (problem.keys, problem.queries)))
    return outputs, change


def assert_equals_the_loop(problem: Problem) -> None:
    expected, expected_change = loop(problem)
    outputs, change = solved(problem)
    assert (expected - problem.outputs).abs().max() > 1e-3  # it does adapt
    assert (outputs - expected).abs().max() <= 1e-9
    assert (change - expected_change).abs().max() <= 1e-9
    narrow = in_float32(problem)
    tolerance = max(1e-4, 3 * float((loop(narrow)[0] - expected).abs().max()))
    outputs, change = solved(narrow)
    assert outputs.dtype == change.dtype == torch.float32
    assert (outputs - expected).abs().max() <= tolerance


@pytest.mark.parametrize(
    ("linear", "rule_name", "loss", "steps"),
    combine(
        SIZES,
        RULES,
        LOSSES,
        (1, 7),
        keep=lambda linear, rule, loss, steps: linear == 3 or (loss, steps) == (LOSSES[0], 7),
    ),
)
def test_it_equals_the_loop(linear: int, rule_name: str, loss: str, steps: int) -> None:
    assert_equals_the_loop(problem_of(mlp(linear), RULES[rule_name](steps), loss))


@pytest.mark.parametrize(
    ("activation", "loss"),
    combine(ACTIVATIONS, LOSSES, keep=lambda activation, loss: loss == "cross_entropy"),
)
def test_every_activation_equals_the_loop(activation: str, loss: str) -> None:
    rule = mbpa.Gradient(0.2, 5, decay=0.1, momentum=0.5)
    assert_equals_the_loop(problem_of(mlp(3, activation), rule, loss))


@pytest.mark.parametrize("steps", [1, 7])
@pytest.mark.parametrize(
    "params",
    [
        ("0.weight", "0.bias"),
        ("0.weight",),
        ("0.bias",),
        ("2.weight", "2.bias"),
        ("4.weight",),
        ("6.weight", "6.bias"),
        ("6.bias",),
        ("0.bias", "2.bias", "4.bias", "6.bias"),
        ("0.weight", "2.weight", "4.weight", "6.weight"),
        ("0.bias", "4.weight"),
        ("2.weight", "4.bias", "6.bias"),
    ],
)
def test_any_of_the_parameters_may_adapt(params: tuple[str, ...], steps: int) -> None:
    rule = mbpa.Gradient(0.3, steps, decay=0.1, momentum=0.5)
    assert_equals_the_loop(problem_of(mlp(4), rule, params=params))


def test_layers_without_a_bias_and_nested_ones_equal_the_loop() -> None:
    rule = mbpa.Gradient(0.3, 5, decay=0.1)
    assert_equals_the_loop(problem_of(mlp(3, bias=False), rule))
    relu = nn.ReLU(inplace=True)
    inner = nn.Sequential(nn.Flatten(), relu, nn.Linear(INPUTS, 8), relu, nn.Identity())
    head = nn.Sequential(inner, nn.Sequential(nn.Linear(8, CLASSES), nn.Softplus())).double()
    assert_equals_the_loop(problem_of(head, rule))
    assert_equals_the_loop(problem_of(head, rule, params=("1.0.weight",)))


def test_one_neighbor_is_enough() -> None:
    rule = mbpa.Gradient(0.3, 5, decay=0.1)
    assert_equals_the_loop(problem_of(mlp(), rule, k=1))


def test_padded_neighbors_do_not_count() -> None:
    problem = problem_of(mlp(), mbpa.Gradient(0.3, 5, decay=0.1, momentum=0.5))
    weights = problem.weights.clone()
    weights[:, -2:] = 0
    weights[0] = 0
    padded = replace(problem, weights=weights)
    assert_equals_the_loop(padded)
    outputs, change = solved(padded)
    assert (outputs[0] - problem.outputs[0]).abs().max() <= 1e-12
    assert change[0] == 0
    fewer = replace(
        padded, keys=padded.keys[:, :-2], values=padded.values[:, :-2], weights=weights[:, :-2]
    )
    assert (solved(fewer)[0] - outputs).abs().max() <= 1e-12


def test_queries_are_adapted_each_on_its_own() -> None:
    problem = problem_of(mlp(), mbpa.Gradient(0.3, 5))
    parts = [solved(problem.rows(slice(i, i + 1)))[0] for i in range(QUERIES)]
    assert (torch.cat(parts) - solved(problem)[0]).abs().max() <= 1e-12


@pytest.mark.parametrize("activation", ["relu in place", "gelu"])
def test_it_works_from_inside_inference_mode(activation: str) -> None:
    expected = loop(problem_of(mlp(3, activation), mbpa.Gradient(0.3, 5)))[0]
    with torch.inference_mode():
        problem = problem_of(mlp(3, activation), mbpa.Gradient(0.3, 5))
        assert problem.keys.is_inference()
        outputs, _ = solve_mlp(problem, False)
        assert (outputs - expected).abs().max() <= 1e-9
        assert (solved(problem)[0] - expected).abs().max() <= 1e-9


def test_a_head_of_half_precision_is_adapted_in_full() -> None:
    problem = in_float32(problem_of(mlp(), mbpa.Gradient(0.3, 5)))
    rounded = replace(problem, head=copy.deepcopy(problem.head).half())
    widened = replace(problem, head=copy.deepcopy(problem.head).half().float())
    assert torch.equal(solved(rounded)[0], solved(widened)[0])


def test_every_activation_it_takes_has_a_derivative() -> None:
    assert set(DERIVATIVES) == set(ELEMENTWISE)


def tied() -> nn.Module:
    head = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 4))
    head[2].weight = head[0].weight
    return head


def used_twice() -> nn.Module:
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(6, 4))


def hooked(register: str, place: str) -> nn.Module:
    head = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), nn.Linear(6, 4))
    getattr(head.get_submodule(place), register)(lambda *_: None)
    return head


def overridden() -> nn.Module:
    head = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 4))
    head[1].forward = torch.sin
    return head


def subclassed() -> nn.Module:
    class Twice(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return 2 * super().forward(inputs)

    return nn.Sequential(Twice(6, 6), nn.ReLU(), nn.Linear(6, 4))


REFUSED = {
    "a bare layer": lambda: nn.Linear(6, 4),
    "no layer": lambda: nn.Sequential(nn.ReLU(), nn.Tanh()),
    "tied parameters": tied,
    "a layer used twice": used_twice,
    "a hook": lambda: hooked("register_forward_hook", "0.0"),
    "a hook before": lambda: hooked("register_forward_pre_hook", "0.1"),
    "a hook on the whole": lambda: hooked("register_forward_hook", ""),
    "a hook on gradients": lambda: hooked("register_full_backward_hook", "1"),
    "a forward of its own": overridden,
    "a subclass": subclassed,
    "a parametrization": lambda: nn.Sequential(
        parametrizations.weight_norm(nn.Linear(6, 6)), nn.Linear(6, 4)
    ),
    "active dropout": lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(), nn.Linear(6, 4)).train(),
    "another layer": lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 4)),
    "a learnt activation": lambda: nn.Sequential(nn.Linear(6, 6), nn.PReLU(), nn.Linear(6, 4)),
    "another flattening": lambda: nn.Sequential(
        nn.Linear(6, 4), nn.Flatten(0), nn.Unflatten(0, (-1, 4))
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_heads_that_may_do_something_else_are_refused(what: str) -> None:
    head = REFUSED[what]().double()
    problem = problem_of(mlp(), mbpa.Gradient(0.1))
    assert problem.layers is not None
    assert replace(problem, head=head).layers is None


def test_keys_of_more_dimensions_and_losses_of_the_users_are_refused() -> None:
    head = nn.Sequential(nn.Flatten(), nn.Linear(6, 4)).double()
    assert problem_of(head, mbpa.Gradient(0.1)).layers is not None
    assert problem_of(head, mbpa.Gradient(0.1), shape=(2, 3)).layers is None
    problem = problem_of(head, mbpa.Gradient(0.1))
    assert replace(problem, loss=nn.functional.cross_entropy).layers is None


@pytest.mark.parametrize("adapting", ["all", "middle", "biases"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize(
    ("sizes", "k", "steps"),
    [
        ((784, 400, 400, 10), 10, 1),
        ((784, 400, 400, 10), 50, 2),
        ((64, 32, 10), 5, 20),
        ((32, 256, 16, 256, 10), 20, 3),
        ((20, 20, 1000), 10, 3),
    ],
)
def test_its_memory_is_estimated(
    sizes: tuple[int, ...], k: int, steps: int, activation: str, adapting: str
) -> None:
    problem = wide_problem(sizes, k, steps, activation, adapting)
    with own_precision(problem.keys):
        held = estimate_mlp_cost(problem)[2] * len(problem.queries)
        for want_change in (False, True):
            with Peak() as peak:
                solve_mlp(problem, want_change)
            assert 0.5 < held / peak.most < 2.0


def wide_problem(
    sizes: tuple[int, ...], k: int, steps: int, activation: str, adapting: str
) -> Problem:
    modules = list[nn.Module]()
    for ins, outs in itertools.pairwise(sizes):
        modules += [nn.Linear(ins, outs), ACTIVATIONS[activation]()]
    head = nn.Sequential(*modules[:-1])
    names = [name for name, _ in head.named_parameters()]
    middle = len(names) // 4 * 2
    params = {
        "all": names,
        "middle": names[middle : middle + 2],
        "biases": names[1::2],
    }[adapting]
    keys = torch.randn(8, k, sizes[0])
    values, weights = torch.randint(sizes[-1], (8, k)), torch.full((8, k), 1 / k)
    with torch.no_grad():
        outputs = head(keys[:, 0])
    rule = mbpa.Gradient(0.1, steps, decay=0.1)
    loss = "cross_entropy"
    return Problem(head, rule, loss, tuple(params), keys[:, 0], outputs, keys, values, weights)
