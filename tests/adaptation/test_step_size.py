"""`Gradient(lr="auto")`: what a loop over the neighbours says, on every path, at every scale."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matrix import combine
from oracle import adapt_one, loss_of_each, nearest, weigh
from torch import Tensor, nn

import mbpa
from benchmarks.steps import STEPS_TABLE
from mbpa.adaptation import Problem
from mbpa.adaptation.engine import SOLVERS
from mbpa.adaptation.step_size import resolve_step_size
from mbpa.kernels import neighbor_weights

CLASSES, SIZE, ENTRIES, K = 4, 5, 30, 7


def rate_by_autograd(
    head: nn.Module, names: Sequence[str], keys: Tensor, values: Tensor, weights: Tensor
) -> float:
    """The formula as docs/tuning.md has it, one neighbour at a time."""
    pulled = surprise = 0.0
    has_labels = not values.is_floating_point()
    for key, value, weight in zip(keys, values, weights, strict=True):
        copied = copy.deepcopy(head)
        outputs = copied(key[None])[0]
        along = outputs.sum() / math.sqrt(outputs.numel())
        if has_labels:
            along = (outputs[value] - outputs.mean()) / math.sqrt(1 - 1 / len(outputs))
            surprise += float(weight * (1 - outputs.detach().softmax(0)[value]))
        along.backward()
        grads = [p.grad for name, p in copied.named_parameters() if name in names]
        pulled += float(weight * sum((g**2).sum() for g in grads if g is not None))
    return 2 / (max(surprise, 0.1) * pulled) if has_labels else 1 / pulled


def expected(
    head: nn.Module,
    rule: mbpa.Gradient,
    params: Sequence[str] | None,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Outputs of the adapted heads, query by query, with the rate of each."""
    names = params or [name for name, _ in head.named_parameters()]
    loss = "squared_error" if values.is_floating_point() else "cross_entropy"
    outputs = []
    for query in queries:
        index, distances = nearest(keys, query, K)
        near = keys[index], values[index], weigh(distances)
        own = replace(rule, lr=rate_by_autograd(head, names, *near))
        outputs.append(adapt_one(head, own, loss, params, *near)(query[None])[0].detach())
    return torch.stack(outputs)


class Squashed(nn.Module):
    """A head that only autograd can take."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(SIZE, 6), nn.Linear(6, CLASSES)

    def forward(self, keys: Tensor) -> Tensor:
        return self.second(torch.sin(self.first(keys)))


HEADS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(SIZE, CLASSES),
    "no bias": lambda: nn.Linear(SIZE, CLASSES, bias=False),
    "mlp": lambda: nn.Sequential(
        nn.Linear(SIZE, 8), nn.Tanh(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, CLASSES)
    ),
    "any": Squashed,
}


def make_model(
    head: nn.Module,
    rule: mbpa.Rule,
    *,
    has_labels: bool = True,
    params: tuple[str, ...] | None = None,
    path: str | None = None,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
    kernel: mbpa.kernels.Kernel | None = None,
) -> tuple[mbpa.MbPA, Tensor, Tensor, Tensor]:
    """A model, its entries, and queries."""
    generator = torch.Generator().manual_seed(3)
    keys = scale * torch.randn(ENTRIES, SIZE, generator=generator, dtype=torch.float64)
    values = torch.randint(CLASSES, (ENTRIES,), generator=generator)
    if not has_labels:
        values = torch.randn(ENTRIES, CLASSES, generator=generator, dtype=torch.float64).to(dtype)
    queries = scale * torch.randn(6, SIZE, generator=generator, dtype=torch.float64)
    form = {} if has_labels else {"value_shape": (CLASSES,), "value_dtype": dtype}
    memory = mbpa.ExactMemory(ENTRIES, SIZE, dtype=dtype, **form)
    predictor = mbpa.Adapted(rule, k=K, params=params)
    if kernel is not None:
        predictor = replace(predictor, kernel=kernel)
    engine = mbpa.Engine(path=path)
    model = mbpa.MbPA(head=head, memory=memory, predictor=predictor, engine=engine)
    model.write(keys.to(dtype), values)
    return model, keys, values, queries


RULES = [mbpa.Gradient("auto", 5), mbpa.Gradient("auto", 3, decay=0.1, momentum=0.5)]


@pytest.mark.parametrize(
    ("has_labels", "rule"),
    combine((True, False), RULES, keep=lambda labels, rule: labels == (rule == RULES[0])),
    ids=str,
)
@pytest.mark.parametrize(
    ("name", "params", "path"),
    [
        ("linear", None, "span"),
        ("linear", None, "dense"),
        ("linear", None, "functional"),
        ("linear", ("weight",), "span"),
        ("linear", ("bias",), "span"),
        ("no bias", None, "span"),
        ("mlp", None, "mlp"),
        ("mlp", ("2.weight", "4.weight", "4.bias"), "mlp"),
        ("mlp", None, "functional"),
        ("any", None, "functional"),
        ("any", ("second.weight",), "functional"),
    ],
)
def test_every_path_takes_the_steps_of_the_loop(
    name: str, params: tuple[str, ...] | None, path: str, has_labels: bool, rule: mbpa.Gradient
) -> None:
    torch.manual_seed(1)
    head = HEADS[name]().double()
    model, keys, values, queries = make_model(
        head, rule, has_labels=has_labels, params=params, path=path
    )
    outputs = expected(head, rule, params, queries, keys, values)
    if has_labels:
        outputs = outputs.log_softmax(1)
    assert (model(queries) - outputs).abs().max() < 1e-9
    assert model.explain(queries).parts[0].adaptation.path == path
    assert (model(queries) - outputs).abs().max() < 1e-9  # now from outputs that are kept


@pytest.mark.parametrize("has_labels", [True, False])
@pytest.mark.parametrize("path", ["one step", "span", "mlp", "functional"])
def test_one_step_is_that_of_the_loop(path: str, has_labels: bool) -> None:
    torch.manual_seed(1)
    head = HEADS["mlp" if path == "mlp" else "linear"]().double()
    rule = mbpa.Gradient("auto")
    model, keys, values, queries = make_model(head, rule, has_labels=has_labels, path=path)
    outputs = expected(head, rule, None, queries, keys, values)
    outputs = outputs.log_softmax(1) if has_labels else outputs
    assert (model(queries) - outputs).abs().max() < 1e-9
    assert model.explain(queries).parts[0].adaptation.path == path


@pytest.mark.parametrize("steps", [1, 4])
def test_a_stream_is_scored_as_one_by_one(steps: int) -> None:
    """Neighbours may be of the same block, and not written yet."""
    keys, labels = torch.randn(40, SIZE).double(), torch.randint(CLASSES, (40,))
    head = nn.Linear(SIZE, CLASSES).double()
    scores = []
    for block in (1, 16):
        memory = mbpa.ExactMemory(25, SIZE, dtype=torch.float64)
        predictor = mbpa.Adapted(mbpa.Gradient("auto", steps), k=K)
        model = mbpa.MbPA(head=head, memory=memory, predictor=predictor)
        scores.append(mbpa.score_stream(model, keys, labels, block=block))
    assert (scores[0] - scores[1]).abs().max() < 1e-9


@pytest.mark.parametrize("name", HEADS)
def test_an_answer_does_not_depend_on_what_it_is_batched_with(name: str) -> None:
    model, *_, queries = make_model(HEADS[name]().double(), mbpa.Gradient("auto", 3))
    queries = torch.cat([queries, 100 * queries])
    alone = torch.cat([model(query[None]) for query in queries])
    assert (model(queries) - alone).abs().max() < 1e-9


# Scales


@pytest.mark.parametrize("scale", [1e-4, 1e4])
@pytest.mark.parametrize(("name", "params"), [("linear", ("weight",)), ("no bias", None)])
def test_units_of_keys_do_not_matter_where_no_bias_adapts(
    name: str, params: tuple[str, ...] | None, scale: float
) -> None:
    """Keys in other units, weights in the inverse: the same outputs before, the same after."""
    rule, found = mbpa.Gradient("auto", 8), []
    for factor in (1.0, scale):
        torch.manual_seed(1)
        head = HEADS[name]().double()
        with torch.no_grad():
            head.weight /= factor
        model, *_, queries = make_model(
            head, rule, params=params, scale=factor, kernel=mbpa.uniform()
        )
        found.append(model(queries))
    assert (found[0] - found[1]).abs().max() < 1e-9


def test_a_bias_is_one_more_number_in_every_key_that_is_one() -> None:
    rule = mbpa.Gradient("auto", 8)
    head = HEADS["linear"]().double()
    model, keys, values, queries = make_model(head, rule)
    wide = nn.Linear(SIZE + 1, CLASSES, bias=False).double()
    with torch.no_grad():
        wide.weight.copy_(torch.cat([head.weight, head.bias[:, None]], 1))
    memory = mbpa.ExactMemory(ENTRIES, SIZE + 1, dtype=torch.float64)
    other = mbpa.MbPA(head=wide, memory=memory, predictor=model.predictor)
    other.write(nn.functional.pad(keys, (0, 1), value=1.0), values)
    with_one = nn.functional.pad(queries, (0, 1), value=1.0)
    assert (model(queries) - other(with_one)).abs().max() < 1e-9


@pytest.mark.parametrize("has_labels", [True, False])
@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1e2, 1e4])
@pytest.mark.parametrize("name", HEADS)
def test_answers_are_finite_at_any_scale(name: str, scale: float, has_labels: bool) -> None:
    model, *_, queries = make_model(
        HEADS[name](),
        mbpa.Gradient("auto", 20),
        has_labels=has_labels,
        scale=scale,
        dtype=torch.float32,
    )
    assert model(queries.float()).isfinite().all()


def test_where_nothing_can_move_the_answer_is_the_heads() -> None:
    head = HEADS["no bias"]()
    memory = mbpa.ExactMemory(10, SIZE)
    model = mbpa.MbPA(head=head, memory=memory, predictor=mbpa.Adapted())
    queries = torch.randn(3, SIZE)
    assert model(queries).equal(head(queries).log_softmax(1))  # no entries
    model.write(torch.zeros(4, SIZE), torch.arange(4))
    assert model(queries).equal(head(queries).log_softmax(1))  # keys that no weight can see


@pytest.mark.parametrize("steps", [1, 20])
def test_single_precision_is_as_exact_as_the_loop(steps: int) -> None:
    torch.manual_seed(1)
    head, rule = HEADS["linear"](), mbpa.Gradient("auto", steps)
    model, keys, values, queries = make_model(head, rule, dtype=torch.float32)
    exact = expected(
        copy.deepcopy(head).double(),
        rule,
        None,
        queries.float().double(),
        keys.float().double(),
        values,
    )
    assert (model(queries.float()) - exact.log_softmax(1)).abs().max() < 1e-4


# Steps that are neither too long nor too short


def losses(model: mbpa.MbPA, queries: Tensor) -> Tensor:
    """The weighted loss of each query's neighbours, before and after each step."""
    predictor = model.predictor
    neighbors = model.memory.read(queries, predictor.k)
    weights = neighbor_weights(predictor.kernel, neighbors)
    names = [name for name, _ in model.head.named_parameters()]
    loss = "cross_entropy" if model.memory.holds_labels else "squared_error"
    rows = []
    for keys, values, each in zip(neighbors.keys, neighbors.values, weights, strict=True):
        rate = rate_by_autograd(model.head, names, keys, values, each)
        row = []
        for steps in range(predictor.rule.steps + 1):
            rule = mbpa.Gradient(rate, max(1, steps))
            head = adapt_one(model.head, rule, loss, None, keys, values, each)
            head = head if steps else model.head
            row.append((each * loss_of_each(loss, head(keys), values)).sum().detach())
        rows.append(torch.stack(row))
    return torch.stack(rows)


@pytest.mark.parametrize("seed", range(3))
def test_no_step_raises_a_squared_error(seed: int) -> None:
    torch.manual_seed(seed)
    head = HEADS["linear"]().double()
    model, *_, queries = make_model(head, mbpa.Gradient("auto", 8), has_labels=False)
    falls = losses(model, queries).diff(dim=1)
    assert (falls < 0).all()


@pytest.mark.parametrize("size", [0.1, 1.0, 10.0])
def test_no_step_raises_the_loss_of_neighbors_that_agree(size: float) -> None:
    """Whatever the head says: it is pushed one way, by keys whose inner products are positive."""
    head = HEADS["linear"]().double()
    with torch.no_grad():
        head.weight *= size
    memory = mbpa.ExactMemory(ENTRIES, SIZE, dtype=torch.float64)
    model = mbpa.MbPA(head=head, memory=memory, predictor=mbpa.Adapted(mbpa.Gradient("auto", 8)))
    model.write(torch.rand(ENTRIES, SIZE).double(), torch.full((ENTRIES,), 2))
    assert (losses(model, torch.rand(4, SIZE).double()).diff(dim=1) < 0).all()


def in_one_place(shares: tuple[int, ...], steps: int) -> tuple[mbpa.MbPA, Tensor]:
    """Entries with the same key and several labels, which a head has hardly heard of."""
    labels = torch.cat([torch.full((n,), label) for label, n in enumerate(shares)])
    key, head = torch.randn(SIZE).double(), nn.Linear(SIZE, len(shares)).double()
    with torch.no_grad():
        head.weight *= 0.1
        head.bias *= 0.1
    memory = mbpa.ExactMemory(len(labels), SIZE, dtype=torch.float64)
    predictor = mbpa.Adapted(mbpa.Gradient("auto", steps), kernel=mbpa.uniform())
    model = mbpa.MbPA(head=head, memory=memory, predictor=predictor)
    model.write(key.expand(len(labels), -1), labels)
    return model, key[None]


@pytest.mark.parametrize("shares", [(3, 1), (2, 1, 1), (5, 4, 1), (1, 1, 1, 1)])
def test_neighbors_that_disagree_are_fitted_to_their_shares(shares: tuple[int, ...]) -> None:
    model, query = in_one_place(shares, steps=200)
    ends = torch.tensor(shares).double() / sum(shares)
    assert (model(query)[0].exp() - ends).abs().max() < 0.01


def test_between_two_labels_that_are_as_frequent_swings_do_not_grow() -> None:
    """The one case where a step of this size is just short enough."""
    for steps in (1, 20, 201):
        model, query = in_one_place((1, 1), steps)
        before = model.head(query).softmax(1)[0, 0] - 0.5
        after = model(query)[0, 0].exp() - 0.5
        assert after.abs() < before.abs()


@pytest.mark.parametrize("size", [0.1, 1.0, 10.0])
def test_a_first_step_moves_no_output_by_more_than_two(size: float) -> None:
    """For a query and neighbours of one length."""
    head = nn.Linear(SIZE, CLASSES).double()
    with torch.no_grad():
        head.weight *= size
    memory = mbpa.ExactMemory(ENTRIES, SIZE, dtype=torch.float64)
    predictor = mbpa.Adapted(mbpa.Gradient("auto"), k=K)
    model = mbpa.MbPA(head=head, memory=memory, predictor=predictor)
    unit = nn.functional.normalize(torch.randn(ENTRIES + 50, SIZE).double(), dim=1)
    model.write(unit[:ENTRIES], torch.randint(CLASSES, (ENTRIES,)))
    moved = model.explain(unit[ENTRIES:]).parts[0].adaptation.outputs - head(unit[ENTRIES:])
    assert 0.1 < moved.abs().max() <= 2


# The kernels of a GPU, or else in Triton's interpreter


@pytest.mark.heavy
@pytest.mark.parametrize(("k", "scale"), [(5, 1e-3), (20, 1.0), (128, 1e3), (150, 1e-3)])
def test_the_fused_span_takes_weights_that_sum_to_a_step_size(
    k: int, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.cuda.is_available():
        pytest.importorskip("triton")
        monkeypatch.setenv("MBPA_TRITON", "1")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    head = nn.Linear(SIZE, 20, bias=False).to(device)
    with torch.no_grad():
        head.weight /= scale
    queries, keys = scale * torch.randn(2, SIZE), scale * torch.randn(2, k, SIZE)
    weights = torch.rand(2, k)
    problem = Problem(
        head=head,
        rule=mbpa.Gradient("auto", 4, decay=0.1),
        loss="cross_entropy",
        adapting=("weight",),
        queries=queries.to(device),
        outputs=head(queries.to(device)).detach(),
        keys=keys.to(device),
        values=torch.randint(20, (2, k)).to(device),
        weights=(weights / weights.sum(1, keepdim=True)).to(device),
    )
    found = SOLVERS["span"](resolve_step_size(problem, None, False), None, False)[0]
    monkeypatch.setenv("MBPA_TRITON", "0")
    names = "queries", "outputs", "keys", "weights"
    wide = {name: getattr(problem, name).double() for name in names}
    wide["outputs"] = copy.deepcopy(head).double()(wide["queries"]).detach()
    exact = replace(problem, head=copy.deepcopy(head).double(), **wide)
    outputs = SOLVERS["span"](resolve_step_size(exact, None, False), None, False)[0]
    assert (outputs - exact.outputs).abs().max() > 0.1  # it does adapt
    assert (found.log_softmax(1) - outputs.log_softmax(1)).abs().max() < 2e-5


# Where it may stand


def test_it_is_the_default() -> None:
    rule, kernel = mbpa.Gradient("auto", steps=20), mbpa.InverseDistance(1e-3, power=4)
    assert mbpa.Adapted() == mbpa.Adapted(rule, k=50, kernel=kernel)
    assert mbpa.NeighborVote() == mbpa.NeighborVote(mbpa.InverseDistance(1e-3, power=1), k=50)
    assert mbpa.Gradient(steps=5) == mbpa.Gradient("auto", 5)


def test_a_checkpoint_remembers_it(tmp_path) -> None:
    head = HEADS["linear"]().double()
    model, *_, queries = make_model(head, mbpa.Gradient("auto", 3, decay=0.1))
    model.save(tmp_path)
    loaded = mbpa.MbPA.load(tmp_path, head=head)
    assert loaded.predictor == model.predictor
    assert loaded(queries).equal(model(queries))


def own_loss(outputs: Tensor, values: Tensor) -> Tensor:
    return (outputs.sum(1) - values).abs()


@pytest.mark.usefixtures("unchecked_annotations")
def test_it_is_refused_where_it_means_nothing() -> None:
    class Halved(mbpa.Gradient):
        """May do anything with its gradients."""

    for rule in (mbpa.RMSprop, mbpa.Adam, Halved):
        with pytest.raises(ValueError, match=r"lr must be a finite number.*, got 'auto'"):
            rule("auto")
    with pytest.raises(ValueError, match=r"lr must be .* for Gradient itself.*, got 'best'"):
        mbpa.Gradient("best")
    with pytest.raises(ValueError, match="give lr a number"):
        mbpa.Adapted(loss=own_loss)
    with pytest.raises(NotImplementedError, match="give lr a number"):
        mbpa.Gradient("auto").update({}, {}, {}, None)


def test_the_table_of_the_document_is_that_of_the_results() -> None:
    root = Path(mbpa.__file__).parents[1]
    page = (root / "docs" / "tuning.md").read_text("utf-8")
    report = json.loads((root / "results" / "steps.json").read_text("utf-8"))
    assert STEPS_TABLE.refresh(page, report) == page, "run `python -m benchmarks.steps --only`"
    for kind, by_steps in report["kinds"].items():  # the claim: as good as a step that was tuned
        found = by_steps["20 steps"]
        if found["measure"] == "accuracy":
            assert found["auto"] > found["tuned"] - 2, kind
        else:
            assert found["auto"] < 1.01 * found["tuned"], kind
