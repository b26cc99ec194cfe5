"""`MAP` is the optimum of the paper's equation 3: by Newton's method on explicit weights, by closed
forms where there are some, and as what gradient steps come to in the end."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from oracle import weigh
from peak import Peak
from torch import Tensor, nn

import mbpa
from mbpa.adaptation.engine import SOLVERS
from mbpa.adaptation.output_cache import StoredOutputs
from mbpa.adaptation.plan import make_plan
from mbpa.adaptation.problem import Problem
from mbpa.device import Throughput
from mbpa.modules.head import own_precision

CPU = Throughput(operations=2.0**37, bytes=2.0**35, call=2.0**-18)
DOUBLE, SINGLE = torch.float64, torch.float32
BOTH, WEIGHT, BIAS = ("weight", "bias"), ("weight",), ("bias",)


class Task:
    """A head, entries and queries; and the optimum of each query, found the slow way."""

    def __init__(
        self,
        *,
        classes: int = 3,
        size: int = 4,
        entries: int = 30,
        queries: int = 5,
        k: int = 8,
        scale: float = 1.0,
        has_labels: bool = True,
        dtype: torch.dtype = DOUBLE,
    ) -> None:
        draw = torch.Generator().manual_seed(classes * 1000 + size)
        randn = lambda *shape: torch.randn(*shape, generator=draw, dtype=DOUBLE).to(dtype)  # noqa: E731
        self.k, self.has_labels, self.dtype = k, has_labels, dtype
        self.head = nn.Linear(size, classes, dtype=dtype)
        self.head.load_state_dict({"weight": randn(classes, size), "bias": randn(classes)})
        self.keys, self.queries = scale * randn(entries, size), scale * randn(queries, size)
        labels = torch.randint(classes, (entries,), generator=draw)
        self.values = labels if has_labels else randn(entries, classes)

    def model(
        self,
        rule: mbpa.Rule,
        params: Sequence[str] | None = None,
        entries: int | None = None,
        k: int | None = None,
        **engine: int,
    ) -> mbpa.MbPA:
        values = self.values[:entries]
        memory = mbpa.ExactMemory(
            len(self.keys),
            self.keys.shape[1],
            value_shape=values.shape[1:],
            value_dtype=values.dtype,
            dtype=self.dtype,
        )
        predictor = mbpa.Adapted(rule, k=k or self.k, params=None if params is None else (*params,))
        model = mbpa.MbPA(
            head=self.head, memory=memory, predictor=predictor, engine=mbpa.Engine(**engine)
        )
        if len(values):
            model.write(self.keys[:entries], values)
        return model

    def optima(self, prior: float, params: Sequence[str] = BOTH) -> tuple[Tensor, Tensor]:
        """Outputs and norms of the change, in float64."""
        found = [self._optimum(query, prior, params) for query in self.queries.double()]
        outputs, changes = zip(*found, strict=True)
        return torch.stack(outputs), torch.stack(changes)

    def _optimum(self, query: Tensor, prior: float, params: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Newton's method on all the weights at once, with halved steps where it overshoots."""
        keys, distances = self.keys.double(), (self.keys.double() - query).square().sum(1)
        nearest = distances.argsort()[: self.k]
        weights, values = weigh(distances[nearest]), self.values[nearest]
        weight, bias = (p.detach().double() for p in self.head.parameters())
        before, classes = keys[nearest] @ weight.T + bias, len(bias)
        inputs, own = _features(keys[nearest], params), _features(query[None], params)

        def objective(change: Tensor) -> float:
            outputs = before + inputs @ change.T
            if self.has_labels:
                losses = nn.functional.cross_entropy(outputs, values, reduction="none")
            else:
                losses = (outputs - values).square().sum(1) / 2
            return float(weights @ losses + prior / 2 * change.square().sum())

        change = torch.zeros(classes, inputs.shape[1], dtype=DOUBLE)
        for _ in range(300):
            outputs = before + inputs @ change.T
            curvature = torch.eye(classes, dtype=DOUBLE).expand(self.k, -1, -1)
            residual = outputs - values if not self.has_labels else outputs.softmax(1)
            if self.has_labels:
                curvature = torch.diag_embed(residual) - residual[:, :, None] * residual[:, None]
                residual = residual - nn.functional.one_hot(values, classes)
            slope = torch.einsum("k,kc,kd->cd", weights, residual, inputs) + prior * change
            if float(slope.norm()) < 1e-13 * max(1.0, prior):
                break
            bend = torch.einsum("k,kab,kc,kd->acbd", weights, curvature, inputs, inputs)
            own_bend = prior * torch.eye(change.numel(), dtype=DOUBLE)
            system = bend.reshape(change.numel(), -1) + own_bend
            step = torch.linalg.solve(system, slope.flatten()).view_as(change)
            length, height = 1.0, objective(change)
            while objective(change - length * step) > height and length > 1e-6:
                length /= 2
            change = change - length * step
        assert float(slope.norm()) < 1e-11 * max(1.0, prior)
        return query @ weight.T + bias + (own @ change.T)[0], change.norm()


def _features(keys: Tensor, params: Sequence[str]) -> Tensor:
    """What multiplies the parameters that adapt."""
    parts = {"weight": keys, "bias": torch.ones(len(keys), 1, dtype=keys.dtype)}
    return torch.cat([parts[name] for name in params], 1)


def finished(task: Task, outputs: Tensor) -> Tensor:
    return outputs.log_softmax(-1) if task.has_labels else outputs


def apart(some: Tensor, others: Tensor) -> float:
    return float((some.double() - others.double()).abs().max())


@pytest.mark.heavy
@pytest.mark.parametrize("params", [BOTH, WEIGHT, BIAS])
@pytest.mark.parametrize("prior", [1e-3, 0.1, 3.0])
@pytest.mark.parametrize("has_labels", [True, False])
def test_it_is_the_optimum_of_explicit_weights(
    has_labels: bool, prior: float, params: Sequence[str]
) -> None:
    task = Task(has_labels=has_labels)
    outputs, changes = task.optima(prior, params)
    why = task.model(mbpa.MAP(prior, tolerance=1e-9), params).explain(task.queries)
    assert apart(why.after, finished(task, outputs)) < 1e-8
    assert why.change is not None
    assert apart(why.change / changes, torch.ones(5)) < 1e-6


@pytest.mark.parametrize("params", [BOTH, BIAS])
@pytest.mark.parametrize("prior", [1e-3, 0.1])
@pytest.mark.parametrize("has_labels", [True, False])
def test_it_is_the_optimum_in_single_precision(
    has_labels: bool, prior: float, params: Sequence[str]
) -> None:
    task = Task(has_labels=has_labels, dtype=SINGLE)
    found = task.model(mbpa.MAP(prior), params)(task.queries)
    assert found.dtype == SINGLE
    assert apart(found, finished(task, task.optima(prior, params)[0])) < 1.5e-4


@pytest.mark.heavy
@pytest.mark.parametrize("prior", [1e-4, 1e-2])
def test_many_more_neighbours_than_dimensions_lose_no_precision(prior: float) -> None:
    task = Task(entries=60, k=40, queries=3, dtype=SINGLE)
    found = task.model(mbpa.MAP(prior))(task.queries)
    assert apart(found, task.optima(prior)[0].log_softmax(-1)) < 1.5e-4


@pytest.mark.heavy
@pytest.mark.parametrize("prior", [1e-6, 1e-4])
def test_nearly_certain_outputs_are_still_distinguished_in_single_precision(prior: float) -> None:
    """One class all around: the weaker the prior, the nearer 1 comes its probability."""
    task = Task(queries=3, dtype=SINGLE)
    task.values = torch.zeros_like(task.values)
    found = task.model(mbpa.MAP(prior))(task.queries)
    assert apart(found, task.optima(prior)[0].log_softmax(-1)) < 1.5e-4


@pytest.mark.parametrize("tolerance", [1.0, 1e-2, 1e-6])
@pytest.mark.parametrize(("scale", "prior"), [(0.05, 1e-3), (1.0, 0.01), (30.0, 1e-3)])
def test_outputs_are_within_the_tolerance(scale: float, prior: float, tolerance: float) -> None:
    task = Task(classes=5, scale=scale, queries=3)
    wanted = task.optima(prior)[0].log_softmax(-1)
    model = task.model(mbpa.MAP(prior, tolerance))
    assert apart(model(task.queries), wanted) <= math.sqrt(2) * tolerance


@pytest.mark.parametrize("dtype", [DOUBLE, SINGLE])
def test_a_head_that_is_sure_and_wrong_is_no_obstacle(dtype: torch.dtype) -> None:
    task = Task(dtype=dtype, queries=2)
    task.head.bias.data += torch.tensor([100.0, -70.0, 0.0])
    task.values = torch.ones_like(task.values)  # the class that it thinks least of
    found = task.model(mbpa.MAP(0.01))(task.queries)
    assert apart(found, task.optima(0.01)[0].log_softmax(-1)) < 2e-4


@pytest.mark.parametrize("has_labels", [True, False])
def test_gradient_steps_end_there(has_labels: bool) -> None:
    task, prior, lr = Task(has_labels=has_labels), 0.2, 0.1
    stepped = task.model(mbpa.Gradient(lr, steps=3000, decay=lr * prior))(task.queries)
    assert apart(task.model(mbpa.MAP(prior, 1e-9))(task.queries), stepped) < 1e-8


@pytest.mark.parametrize("has_labels", [True, False])
def test_a_strong_prior_leaves_the_head_as_it_is(has_labels: bool) -> None:
    task = Task(has_labels=has_labels)
    parametric = finished(task, task.head(task.queries).detach())
    distances = [
        apart(task.model(mbpa.MAP(prior))(task.queries), parametric)
        for prior in (1.0, 1e3, 1e6, 1e9)
    ]
    assert all(later <= earlier for earlier, later in itertools.pairwise(distances))
    assert distances[0] > 1e-2
    assert distances[-1] < 1e-7


def test_a_neighbour_of_two_classes_solves_an_equation_of_one_number() -> None:
    """A single neighbour with logit difference d: d = d⁰ + 2 (‖h‖² + 1) σ(−d) / prior."""
    task, prior = Task(classes=2, entries=1, k=1), 0.3
    task.values = torch.zeros_like(task.values)
    found = task.model(mbpa.MAP(prior, 1e-9))(task.queries)
    key, gain = task.keys[0], 1 + float(task.keys[0].square().sum())
    at_key, before = task.head(key).detach(), task.head(task.queries).detach()
    start = float(at_key[0] - at_key[1])
    low, high = start, start + 2 * gain / prior
    for _ in range(200):
        middle = (low + high) / 2
        is_below = start + 2 * gain / prior / (1 + math.exp(middle)) > middle
        low, high = (middle, high) if is_below else (low, middle)
    moved = (low - start) / gain * (task.queries @ key + 1)
    wanted = before[:, 0] - before[:, 1] + moved
    assert apart(found[:, 0] - found[:, 1], wanted) < 1e-8


def test_neighbours_that_agree_with_the_head_move_nothing() -> None:
    task = Task(has_labels=False)
    task.values = task.head(task.keys).detach()
    model = task.model(mbpa.MAP(1e-3))
    assert apart(model(task.queries), task.head(task.queries).detach()) < 1e-9


@pytest.mark.parametrize("dtype", [DOUBLE, SINGLE])
@pytest.mark.parametrize("has_labels", [True, False])
def test_entries_stored_twice_count_twice(has_labels: bool, dtype: torch.dtype) -> None:
    """Their Gram matrix is singular, and nothing breaks."""
    task = Task(entries=6, k=6, has_labels=has_labels, dtype=dtype)
    once = task.model(mbpa.MAP(0.05, 1e-5))(task.queries)
    task.keys, task.values = task.keys.repeat(2, 1), task.values.repeat(2, *[1] * (not has_labels))
    twice = task.model(mbpa.MAP(0.05, 1e-5), k=12)(task.queries)
    assert apart(once, twice) < 5e-5


@pytest.mark.parametrize("has_labels", [True, False])
def test_padding_and_neighbours_of_no_weight_count_for_nothing(has_labels: bool) -> None:
    task, rule = Task(has_labels=has_labels), mbpa.MAP(0.05, 1e-9)
    short = task.model(rule, entries=4)
    assert apart(short(task.queries), task.model(rule, entries=4, k=4)(task.queries)) < 1e-8

    def only_near(distances: Tensor, dots: Tensor) -> Tensor:
        logs = -4 * (1e-3 + distances).log()
        return logs.masked_fill(torch.arange(logs.shape[1]) >= 3, -math.inf)

    model = task.model(rule)
    model.predictor = mbpa.Adapted(rule, k=8, kernel=only_near)
    assert apart(model(task.queries), task.model(rule, k=3)(task.queries)) < 1e-8


def test_queries_without_neighbours_get_the_parametric_prediction_to_the_bit() -> None:
    task = Task(dtype=SINGLE)
    model = task.model(mbpa.MAP(0.1), entries=0)
    assert torch.equal(model(task.queries), task.head(task.queries).log_softmax(1).detach())
    # In a stream the first has none and the others do.
    hidden, targets = task.keys[:10], task.values[:10]
    scores = mbpa.score_stream(model, hidden, targets)
    one_by_one = task.model(mbpa.MAP(0.1), entries=0)
    singly = [
        mbpa.score_stream(one_by_one, hidden[t : t + 1], targets[t : t + 1]) for t in range(10)
    ]
    first = task.head(hidden[:1]).log_softmax(1)[0, targets[0]].detach()
    assert float(scores[0]) == pytest.approx(float(first), abs=1e-6)
    assert apart(scores, torch.cat(singly)) < 2e-4


@pytest.mark.parametrize("has_labels", [True, False])
def test_batches_and_chunks_give_the_same(has_labels: bool) -> None:
    task = Task(classes=7, size=12, entries=80, queries=9, has_labels=has_labels)
    rule = mbpa.MAP(0.01, 1e-8)
    model = task.model(rule)
    at_once = model(task.queries)
    singly = torch.cat([model(query[None]) for query in task.queries])
    in_chunks = task.model(rule, scratch_bytes=20_000)(task.queries)
    assert apart(at_once, singly) < 1e-7
    assert apart(at_once, in_chunks) < 1e-7


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keys_are_adapted_in_single_precision(dtype: torch.dtype) -> None:
    task = Task(dtype=dtype)
    found = task.model(mbpa.MAP(0.1))(task.queries)
    assert found.dtype == SINGLE
    assert apart(found, task.optima(0.1)[0].log_softmax(-1)) < 2e-4


def test_labels_the_head_has_never_seen_are_learnt() -> None:
    task = Task()
    model = task.model(mbpa.MAP(1e-3))
    model.grow(classes=4)
    model.write(keys=task.queries, values=torch.full((5,), 3))
    assert model(task.queries).argmax(1).tolist() == [3] * 5


def test_an_explanation_names_the_way() -> None:
    task = Task()
    why = task.model(mbpa.MAP(0.1)).explain(task.queries)
    assert why.path == "optimum"
    assert "path: optimum, estimated" in str(why[0])


def test_a_checkpoint_keeps_it(tmp_path) -> None:
    task = Task()
    model = task.model(mbpa.MAP(prior=0.25, tolerance=1e-5, most_steps=77))
    model.save(tmp_path / "kept")
    again = mbpa.MbPA.load(tmp_path / "kept", head=task.head)
    assert again.predictor == model.predictor
    assert torch.equal(again(task.queries), model(task.queries))


@pytest.mark.parametrize("prior", [0, -1.0, math.inf, math.nan, "strong"])
def test_a_prior_must_be_above_zero(prior, unchecked_annotations: None) -> None:
    with pytest.raises(ValueError, match="prior must be a finite number above 0, got"):
        mbpa.MAP(prior)


def test_a_tolerance_and_a_number_of_steps_must_be_above_zero() -> None:
    with pytest.raises(ValueError, match=r"tolerance must be a finite number above 0, got 0\.0"):
        mbpa.MAP(0.1, tolerance=0.0)
    with pytest.raises(ValueError, match="most_steps must be at least 1, got 0"):
        mbpa.MAP(0.1, most_steps=0)


def own_loss(outputs: Tensor, values: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, values, reduction="none")


def test_heads_and_losses_without_one_optimum_are_refused_when_they_are_bound() -> None:
    rule, flat = mbpa.MAP(0.1), mbpa.ExactMemory(10, 4)
    layers = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3))
    shaped = mbpa.ExactMemory(10, (2, 4), value_shape=(2, 3), value_dtype=SINGLE)
    hooked = nn.Linear(4, 3)
    hooked.register_forward_hook(lambda module, inputs, outputs: 2 * outputs)
    cases = [
        (layers, flat, mbpa.Adapted(rule), "the head is a Sequential"),
        (hooked, flat, mbpa.Adapted(rule), "hooks"),
        (nn.Linear(4, 3), shaped, mbpa.Adapted(rule), r"keys have shape \(2, 4\)"),
        (nn.Linear(4, 3), flat, mbpa.Adapted(rule, loss=own_loss), "the loss is own_loss"),
    ]
    for head, memory, predictor, reason in cases:
        for asked in (predictor, mbpa.Mixture(mbpa.Parametric(), predictor, weights=(0.5, 0.5))):
            with pytest.raises(ValueError, match=f"^MAP needs .*{reason}.*: use Gradient with"):
                mbpa.MbPA(head=head, memory=memory, predictor=asked)


def test_what_was_not_bound_is_refused_when_it_is_used() -> None:
    head = nn.Sequential(nn.Linear(4, 3))
    gradient = mbpa.Adapted(mbpa.Gradient(0.1))
    model = mbpa.MbPA(head=head, memory=mbpa.ExactMemory(10, 4), predictor=gradient)
    model.write(torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]))
    model.predictor = mbpa.Adapted(mbpa.MAP(0.1))
    with pytest.raises(ValueError, match="MAP needs a head that is one"):
        model(torch.randn(2, 4))


def test_another_path_is_refused() -> None:
    task = Task()
    predictor = mbpa.Adapted(mbpa.MAP(0.1))
    memory = task.model(mbpa.MAP(0.1)).memory
    engine = mbpa.Engine(path="span")
    model = mbpa.MbPA(head=task.head, memory=memory, predictor=predictor, engine=engine)
    with pytest.raises(ValueError, match=r"path must be one of \['optimum'\].*got 'span'"):
        model(task.queries)


@pytest.mark.usefixtures("unchecked_annotations")
def test_it_takes_no_steps_so_it_is_no_rule() -> None:
    assert not hasattr(mbpa.MAP, "update")
    with pytest.raises(ValueError, match=r"rule must be a mbpa\.Rule, got MAP"):
        mbpa.testing.check_rule(mbpa.MAP(0.1))


def test_too_few_steps_are_reported() -> None:
    task = Task(scale=5.0)
    with pytest.warns(UserWarning, match=r"after 2 steps \d of 5 queries are not certain"):
        task.model(mbpa.MAP(1e-3, most_steps=2))(task.queries)


@pytest.mark.parametrize("loss", ["cross_entropy", "squared_error"])
@pytest.mark.parametrize("shape", [(2, 2000, 64), (20, 300, 32), (50, 100, 64), (200, 3, 4)])
@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("want_change", [True, False])
def test_its_memory_is_estimated(
    shape: tuple[int, int, int], loss: str, is_kept: bool, want_change: bool
) -> None:
    (k, classes, size), queries = shape, 3
    head, keys = nn.Linear(size, classes), torch.randn(queries, k, size)
    values = torch.randint(classes, (queries, k))
    if loss == "squared_error":
        values = torch.randn(queries, k, classes)
    weights = torch.full((queries, k), 1 / k)
    rule = mbpa.MAP(0.1, tolerance=10.0)
    with own_precision(keys):
        outputs = head(keys[:, 0])
        problem = Problem(head, rule, loss, BOTH, keys[:, 0], outputs, keys, values, weights)
        rows = None
        if is_kept:
            table = torch.rand(300, classes)
            rows = StoredOutputs(table, table[:0], torch.randint(300, (queries, k)))
        plan = make_plan(problem, 300 if is_kept else None, 1 << 24, CPU, None, want_change)
        with Peak() as peak:
            SOLVERS[plan.path](problem, rows, want_change)
    assert plan.path == "optimum"
    assert plan.chunk == queries
    assert 0.5 < plan.held / peak.most < 2.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [DOUBLE, SINGLE])
@pytest.mark.parametrize("has_labels", [True, False])
def test_a_gpu_gives_the_same(has_labels: bool, dtype: torch.dtype) -> None:
    task = Task(classes=20, size=12, entries=100, k=30, has_labels=has_labels, dtype=dtype)
    values, rule = task.values.cuda(), mbpa.MAP(0.05, tolerance=1e-5)
    memory = mbpa.ExactMemory(
        *(100, 12),
        value_shape=values.shape[1:],
        value_dtype=values.dtype,
        dtype=dtype,
        device="cuda",
    )
    here = task.model(rule)(task.queries)
    predictor = mbpa.Adapted(rule, k=30)
    model = mbpa.MbPA(head=copy.deepcopy(task.head).cuda(), memory=memory, predictor=predictor)
    model.write(task.keys.cuda(), values)
    there = model(task.queries.cuda())
    assert there.device.type == "cuda"
    assert apart(here, there.cpu()) < 1e-4


# Triton's interpreter takes 10 ms per neighbour, query and step; a weak prior needs more steps. The
# first case takes more than STEPS_PER_RESTART of them.
@pytest.mark.heavy
@pytest.mark.parametrize(
    ("queries", "k", "classes", "scale", "prior"),
    [
        (2, 3, 33, 4.0, 1.0),
        (2, 5, 300, 1.0, 1.0),
        *(
            pytest.param(3, *sizes, 0.05, marks=pytest.mark.slow)
            for sizes in ((5, 7, 1.0), (17, 33, 4.0), (20, 300, 1.0))
        ),
    ],
)
def test_kernels_give_the_same(
    queries: int,
    k: int,
    classes: int,
    scale: float,
    prior: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        pytest.importorskip("triton")
    torch.manual_seed(k)
    head = nn.Linear(12, classes).to(device)
    keys, asked = (scale * torch.randn(count, 12, device=device) for count in (60, queries))
    values, results = torch.randint(classes, (60,), device=device), {}
    for kernels in ("0", "1"):
        monkeypatch.setenv("MBPA_TRITON", kernels)
        model = mbpa.MbPA(
            head=head,
            memory=mbpa.ExactMemory(60, 12, device=device),
            predictor=mbpa.Adapted(mbpa.MAP(prior), k=k),
        )
        model.write(keys=keys, values=values)
        results[kernels] = model(keys=asked)
    torch.testing.assert_close(results["1"], results["0"], rtol=1e-4, atol=1e-4)
