"""Every path equals the per-query autograd loop of `oracle.py`: all heads, rules, losses, steps."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import oracle
import pytest
import torch
from matrix import combine
from torch import Tensor, nn

import mbpa
from mbpa.adaptation.plan import make_plan
from mbpa.adaptation.problem import Problem

CLASSES, ENTRIES, K = 4, 40, 7


def make_head(kind: str) -> tuple[nn.Module, tuple[int, ...]]:
    torch.manual_seed(3)
    if kind == "linear":
        return nn.Linear(6, CLASSES), (6,)
    if kind == "linear without bias":
        return nn.Linear(6, CLASSES, bias=False), (6,)
    if kind == "mlp":
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES)), (6,)
    assert kind == "conv"
    layers = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, CLASSES)
    return nn.Sequential(*layers).eval(), (2, 4, 4)


RULES = {
    "gradient": lambda steps: mbpa.Gradient(0.1, steps),
    "gradient with decay": lambda steps: mbpa.Gradient(0.1, steps, decay=0.2),
    "momentum": lambda steps: mbpa.Gradient(0.05, steps, decay=0.1, momentum=0.8),
    "rmsprop": lambda steps: mbpa.RMSprop(0.05, steps, decay=0.1),
    "rmsprop from one": lambda steps: mbpa.RMSprop(0.5, steps, initial_square=1.0),
    "adam": lambda steps: mbpa.Adam(0.05, steps, decay=0.1),
    "user's rule": lambda steps: oracle.SignDescent(0.3, steps),
}
HEADS = ["linear", "linear without bias", "mlp", "conv"]
LOSSES = ["cross_entropy", "squared_error"]


def data(shape: tuple[int, ...], loss: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    keys = torch.randn(ENTRIES, *shape, generator=generator, dtype=torch.float64)
    queries = torch.randn(16, *shape, generator=generator, dtype=torch.float64)
    if loss == "squared_error":
        values = torch.randn(ENTRIES, CLASSES, generator=generator, dtype=torch.float64).to(dtype)
    else:
        values = torch.randint(CLASSES, (ENTRIES,), generator=generator)
    return keys.to(dtype), values, queries.to(dtype)


def make_model(
    head: nn.Module,
    keys: Tensor,
    values: Tensor,
    rule: mbpa.Rule,
    *,
    loss: object = None,
    params: tuple[str, ...] | None = None,
    power: float = 4,
    balance: float | None = None,
    engine: mbpa.Engine | None = None,
) -> mbpa.MbPA:
    memory = mbpa.ExactMemory(
        ENTRIES,
        tuple(keys.shape[1:]),
        dtype=keys.dtype,
        value_shape=tuple(values.shape[1:]),
        value_dtype=values.dtype,
    )
    plain = mbpa.InverseDistance(power=power)
    kernel = plain if balance is None else mbpa.Balanced(plain, balance)
    predictor = mbpa.Adapted(rule, k=K, kernel=kernel, loss=loss, params=params)
    model = mbpa.MbPA(head=head, memory=memory, predictor=predictor, engine=engine)
    model.write(keys, values)
    return model


def finished(outputs: Tensor, loss: str) -> Tensor:
    return outputs if loss == "squared_error" else outputs.log_softmax(1)


def paths_for(head: str, rule: mbpa.Rule) -> list[str | None]:
    paths: list[str | None] = [None, "functional"]
    if head.startswith("linear"):
        paths.append("dense")
        if isinstance(rule, mbpa.Gradient):
            paths += ["span"] + ["one step"] * (rule.steps == 1)
    return paths


def is_unlike_the_others(head: str, rule: str, loss: str, steps: int) -> bool:
    if steps == 1:  # where linear heads have one path more, and others none
        return head == "linear" and rule in ("gradient", "gradient with decay", "momentum")
    return head in ("linear", "mlp") or loss == "cross_entropy"


@pytest.mark.parametrize(
    ("head_name", "rule_name", "loss", "steps"),
    combine(HEADS, RULES, LOSSES, (1, 4), keep=is_unlike_the_others),
)
def test_every_path_equals_the_loop_in_float64(
    head_name: str, rule_name: str, loss: str, steps: int
) -> None:
    head, shape = make_head(head_name)
    head, rule = head.double(), RULES[rule_name](steps)
    keys, values, queries = data(shape, loss, torch.float64)
    outputs, changes = oracle.adapted_outputs(head, rule, loss, None, queries[:4], keys, values, K)
    expected = finished(outputs, loss)
    assert (expected - finished(head(queries[:4]), loss)).abs().max() > 1e-2  # it does adapt
    for path in paths_for(head_name, rule):
        model = make_model(head, keys, values, rule, engine=mbpa.Engine(path=path))
        assert (model(queries)[:4] - expected).abs().max() <= 1e-9, path
        assert (model(queries[:1]) - expected[:1]).abs().max() <= 1e-9, path
        why = model.explain(queries[:4])
        assert why.path == (path or why.path)
        assert (why.after - expected).abs().max() <= 1e-9, path
        assert (why.change - changes).abs().max() <= 1e-9, path


@pytest.mark.parametrize("power", [0.5, 1, 30])
@pytest.mark.parametrize("rule_name", ["gradient with decay", "adam"])
@pytest.mark.parametrize("head_name", ["linear", "mlp", "conv"])
def test_every_path_equals_the_loop_for_any_power(
    head_name: str, rule_name: str, power: float
) -> None:
    head, shape = make_head(head_name)
    head, rule = head.double(), RULES[rule_name](4)
    keys, values, queries = data(shape, "cross_entropy", torch.float64)
    near = head, rule, "cross_entropy", None, queries[:4], keys, values, K
    expected = oracle.adapted_outputs(*near, power)[0].log_softmax(1)
    for path in paths_for(head_name, rule):
        engine = mbpa.Engine(path=path)
        model = make_model(head, keys, values, rule, power=power, engine=engine)
        assert (model(queries)[:4] - expected).abs().max() <= 1e-9, path


@pytest.mark.parametrize(
    ("head_name", "rule_name", "loss", "steps"),
    combine(
        ("linear", "mlp", "conv"),
        ("momentum", "rmsprop", "adam", "user's rule"),
        LOSSES,
        (1, 7),
        keep=is_unlike_the_others,
    ),
)
def test_float32_is_as_close_to_the_float64_loop_as_a_float32_loop_is(
    head_name: str, rule_name: str, loss: str, steps: int
) -> None:
    head, shape = make_head(head_name)
    rule = RULES[rule_name](steps)
    arguments = head, rule, loss, None
    keys, values, queries = data(shape, loss, torch.float32)
    loop32 = finished(oracle.adapted_outputs(*arguments, queries[:4], keys, values, K)[0], loss)
    arguments = copy.deepcopy(head).double(), rule, loss, None
    wide = values.double() if values.is_floating_point() else values
    loop64 = finished(
        oracle.adapted_outputs(*arguments, queries[:4].double(), keys.double(), wide, K)[0], loss
    )
    tolerance = max(1e-4, 3 * float((loop32 - loop64).abs().max()))
    for path in paths_for(head_name, rule):
        model = make_model(head, keys, values, rule, engine=mbpa.Engine(path=path))
        outputs = model(queries)
        assert outputs.dtype == torch.float32
        assert (outputs[:4] - loop64).abs().max() <= tolerance, path
        assert (model(queries[:1]) - loop64[:1]).abs().max() <= tolerance, path


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("rule_name", ["momentum", "adam", "user's rule"])
@pytest.mark.parametrize(
    ("head_name", "params", "steps"),
    [
        ("linear", ("bias",), 1),
        ("linear", ("weight",), 1),
        ("linear", ("bias",), 3),
        ("linear", ("weight",), 3),
        ("mlp", ("2.weight", "2.bias"), 3),
        ("mlp", ("0.weight",), 3),
        ("conv", ("0.bias", "1.weight"), 3),
    ],
)
def test_only_the_chosen_parameters_adapt(
    head_name: str, params: tuple[str, ...], steps: int, rule_name: str, loss: str
) -> None:
    head, shape = make_head(head_name)
    head, rule = head.double(), RULES[rule_name](steps)
    keys, values, queries = data(shape, loss, torch.float64)
    expected = finished(
        oracle.adapted_outputs(head, rule, loss, params, queries[:3], keys, values, K)[0], loss
    )
    for path in paths_for(head_name, rule):
        engine = mbpa.Engine(path=path)
        model = make_model(head, keys, values, rule, params=params, engine=engine)
        assert (model(queries[:3]) - expected).abs().max() <= 1e-9, path


def test_a_users_own_loss_is_used() -> None:
    def focal(outputs: Tensor, values: Tensor) -> Tensor:
        log_probs = outputs.log_softmax(1).gather(1, values[:, None])[:, 0]
        return -((1 - log_probs.exp()) ** 2) * log_probs

    for head_name in HEADS:
        head, shape = make_head(head_name)
        head, rule = head.double(), mbpa.Gradient(0.5, 5)
        keys, values, queries = data(shape, "cross_entropy", torch.float64)
        outputs, _ = oracle.adapted_outputs(head, rule, focal, None, queries[:4], keys, values, K)
        model = make_model(head, keys, values, rule, loss=focal)
        assert (model(queries[:4]) - outputs.log_softmax(1)).abs().max() <= 1e-9
        plain = make_model(head, keys, values, rule)
        assert (model(queries[:4]) - plain(queries[:4])).abs().max() > 1e-3


def test_a_loss_that_returns_one_number_for_all_is_refused() -> None:
    head, _ = make_head("linear")
    keys, values, queries = data((6,), "cross_entropy", torch.float32)
    model = make_model(head, keys, values, mbpa.Gradient(0.1), loss=nn.functional.cross_entropy)
    with pytest.raises(ValueError, match=r"one number per neighbour, shape \(7,\), got \(\)"):
        model(queries)


@pytest.mark.parametrize("path", ["functional", "dense", "span", "one step"])
def test_chunks_of_any_size_agree(path: str) -> None:
    head, _ = make_head("linear")
    keys, values, queries = data((6,), "cross_entropy", torch.float64)
    rule = mbpa.Gradient(0.5, 1 if path == "one step" else 4)
    answers = []
    for scratch_bytes in (1, 50_000, 1 << 29):
        engine = mbpa.Engine(scratch_bytes=scratch_bytes, path=path)
        answers.append(make_model(head.double(), keys, values, rule, engine=engine)(queries))
    assert (answers[0] - answers[2]).abs().max() <= 1e-12
    assert (answers[1] - answers[2]).abs().max() <= 1e-12


@pytest.mark.parametrize("balance", [0.5, 1.0])
@pytest.mark.parametrize("rule_name", RULES)
@pytest.mark.parametrize("head_name", HEADS)
def test_every_path_equals_the_loop_with_weights_balanced_over_labels(
    head_name: str, rule_name: str, balance: float
) -> None:
    head, shape = make_head(head_name)
    head, rule = head.double(), RULES[rule_name](4)
    keys, values, queries = data(shape, "cross_entropy", torch.float64)
    values = torch.where(torch.arange(ENTRIES) < 30, 0, values)  # one label has most of the entries
    loop = (head, rule, "cross_entropy", None, queries[:3], keys, values, K)
    expected, changes = oracle.adapted_outputs(*loop, balance=balance)
    plain, _ = oracle.adapted_outputs(*loop)
    assert (expected.log_softmax(1) - plain.log_softmax(1)).abs().max() > 1e-3  # it does matter
    for path in paths_for(head_name, rule):
        engine = mbpa.Engine(path=path)
        model = make_model(head, keys, values, rule, balance=balance, engine=engine)
        assert (model(queries)[:3] - expected.log_softmax(1)).abs().max() <= 1e-9, path
        why = model.explain(queries[:3])
        assert (why.change - changes).abs().max() <= 1e-9, path
        assert (model.compare(queries[:3]).after - expected.log_softmax(1)).abs().max() <= 1e-9


def test_chunks_keep_to_the_scratch_budget() -> None:
    head, _ = make_head("linear")
    keys, values, queries = data((6,), "cross_entropy", torch.float32)
    model = make_model(head, keys, values, mbpa.Gradient(0.5, 3))
    context = model.build_context(queries, model.memory.read(queries, K))
    problems = []

    class Spy(mbpa.Engine):
        def adapt(self, problem, *rest, **named):
            problems.append(problem)
            return super().adapt(problem, *rest, **named)

    object.__setattr__(context, "engine", Spy())
    model.predictor(context)
    rates = mbpa.device.Throughput(1e11, 1e10, 1e-6)
    assert make_plan(problems[0], ENTRIES, 1 << 30, rates).chunk == len(queries)
    tight = make_plan(problems[0], ENTRIES, 4096, rates)
    assert 1 <= tight.chunk < 8
    assert tight.held <= 4096
    assert make_plan(problems[0], ENTRIES, 1, rates).chunk == 1


def test_stored_outputs_follow_the_memory_and_the_head() -> None:
    """Overwriting, deleting, re-keying, growing, training: none may leave a stale row in use."""
    torch.manual_seed(0)
    head = nn.Linear(5, 3).double()
    memory = mbpa.ExactMemory(20, 5, dtype=torch.float64)
    queries = torch.randn(8, 5, dtype=torch.float64)
    rules = mbpa.Gradient(0.7, 1), mbpa.Gradient(0.7, 3)
    kept = [
        mbpa.MbPA(head=head, memory=memory, predictor=mbpa.Adapted(rule, k=6)) for rule in rules
    ]

    def check() -> None:
        for model, rule in zip(kept, rules, strict=True):
            fresh = mbpa.MbPA(
                head=model.head,
                memory=memory,
                predictor=mbpa.Adapted(rule, k=6),
                engine=mbpa.Engine(path="functional"),
            )
            assert (model(queries) - fresh(queries)).abs().max() <= 1e-9

    def write(count: int) -> None:
        kept[0].write(torch.randn(count, 5, dtype=torch.float64), torch.randint(3, (count,)))

    write(15)
    check()
    write(10)  # overwrites
    check()
    memory.delete(memory.entries().ids[::2])
    write(3)  # into freed slots
    check()
    head.weight.data += 0.1  # leaves no trace in _version
    check()
    head.bias.data[1] -= 1e-3
    check()
    ids = memory.entries().ids
    memory.replace_keys(ids, torch.randn(len(ids), 5, dtype=torch.float64))
    check()
    memory.resize(9)
    check()
    memory.resize(30)
    write(20)
    check()
    memory.clear()
    write(7)
    check()
    for model in kept:
        model.grow(4)
    check()
    head.weight.data.zero_()  # no longer theirs
    check()


def test_no_table_is_kept_that_exceeds_its_budget() -> None:
    head, _ = make_head("linear")
    keys, values, queries = data((6,), "cross_entropy", torch.float64)
    rule = mbpa.Gradient(0.5, 1)
    small = mbpa.Engine(store_bytes=ENTRIES * CLASSES * 8 - 1)
    large = mbpa.Engine(store_bytes=ENTRIES * CLASSES * 8)
    without = make_model(head.double(), keys, values, rule, engine=small)
    with_table = make_model(head, keys, values, rule, engine=large)
    assert with_table.explain(queries).path == "one step"
    assert without.explain(queries).path != "one step"
    assert (without(queries) - with_table(queries)).abs().max() <= 1e-9


def test_a_rule_that_extends_gradient_is_not_taken_for_it() -> None:
    class Doubled(mbpa.Gradient):
        def update(self, params, grads, start, state):
            twice = {name: 2 * g for name, g in grads.items()}
            return super().update(params, twice, start, state)

    head, _ = make_head("linear")
    keys, values, queries = data((6,), "cross_entropy", torch.float64)
    doubled = make_model(head.double(), keys, values, Doubled(0.1, 3))
    plain = make_model(head, keys, values, mbpa.Gradient(0.2, 3))
    assert (doubled(queries) - plain(queries)).abs().max() <= 1e-9


def test_scalar_regression_targets_adapt() -> None:
    class Scalar(nn.Linear):
        def forward(self, keys: Tensor) -> Tensor:
            return super().forward(keys)[:, 0]

    torch.manual_seed(0)
    head = Scalar(6, 1).double()
    keys, queries = torch.randn(30, 6).double(), torch.randn(5, 6).double()
    model = make_model(head, keys, keys.sum(1), mbpa.Gradient(0.1, 5))
    vector = nn.Linear(6, 1).double()
    vector.load_state_dict(head.state_dict())
    twin = make_model(vector, keys, keys.sum(1, keepdim=True), mbpa.Gradient(0.1, 5))
    assert model(queries).shape == (5,)
    assert (model(queries) - twin(queries)[:, 0]).abs().max() <= 1e-9


def test_hooks_on_a_linear_head_are_respected() -> None:
    head, _ = make_head("linear")
    head.double().register_forward_hook(lambda module, args, output: 2 * output)
    keys, values, queries = data((6,), "cross_entropy", torch.float64)
    rule = mbpa.Gradient(0.5, 3)
    outputs, _ = oracle.adapted_outputs(
        head, rule, "cross_entropy", None, queries[:4], keys, values, K
    )
    model = make_model(head, keys, values, rule)
    assert model.explain(queries[:4]).path == "functional"
    assert (model(queries[:4]) - outputs.log_softmax(1)).abs().max() <= 1e-9


def test_half_precision_heads_and_keys_adapt_in_float32() -> None:
    head, _ = make_head("linear")
    keys, values, queries = data((6,), "cross_entropy", torch.float32)
    head = head.to(torch.bfloat16)
    model = make_model(head, keys.half(), values, mbpa.Gradient(0.5, 5))
    wide = copy.deepcopy(head).float()
    rounded = keys.half().float()
    outputs, _ = oracle.adapted_outputs(
        wide, model.predictor.rule, "cross_entropy", None, queries[:4].half().float(), rounded,
        values, K,
    )  # fmt: skip
    assert model(queries).dtype == torch.float32
    assert (model(queries[:4].half()) - outputs.log_softmax(1)).abs().max() < 0.05


def test_rules_and_losses_need_no_hash_and_may_change() -> None:
    @dataclass
    class Descent(mbpa.Rule):
        lr: float
        steps: int = 1

        def update(self, params, grads, start, state):
            return {name: p - self.lr * grads[name] for name, p in params.items()}, None

    @dataclass
    class Scaled:
        by: float

        def __call__(self, outputs: Tensor, values: Tensor) -> Tensor:
            return self.by * nn.functional.cross_entropy(outputs, values, reduction="none")

    head, _ = make_head("linear")
    keys, values, queries = data((6,), "cross_entropy", torch.float64)
    rule = Descent(0.1)
    model = make_model(head.double(), keys, values, rule, loss=Scaled(2.0))
    plain = make_model(head, keys, values, mbpa.Gradient(0.2))
    assert (model(queries) - plain(queries)).abs().max() <= 1e-9
    rule.steps = 5
    plain = make_model(head, keys, values, mbpa.Gradient(0.2, 5))
    assert (model(queries) - plain(queries)).abs().max() <= 1e-9


def test_heads_that_cannot_be_priced_are_still_adapted() -> None:
    class Cast(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs.float()

    torch.manual_seed(0)
    mixed = nn.Sequential(nn.Linear(6, 8).bfloat16(), Cast(), nn.Linear(8, CLASSES))
    keys, values, queries = data((6,), "cross_entropy", torch.float32)
    model = make_model(mixed, keys, values, mbpa.Gradient(0.1, 2), params=("2.weight",))
    assert model(queries).isfinite().all()


def test_a_head_with_hooks_is_not_taken_for_a_matrix() -> None:
    keys, values, queries = data((6,), "cross_entropy", torch.float32)

    def problem(head: nn.Module) -> Problem:
        neighbors = keys[None, :3], values[None, :3], torch.full((1, 3), 1 / 3)
        rule = mbpa.Gradient(0.1, 2)
        at_query = head(queries[:1]).detach()
        adapting = ("weight", "bias")
        return Problem(head, rule, "cross_entropy", adapting, queries[:1], at_query, *neighbors)

    head, _ = make_head("linear")
    assert problem(head).linear is not None
    for hook in ("forward_hook", "forward_pre_hook", "full_backward_hook"):
        head, _ = make_head("linear")
        getattr(head, f"register_{hook}")(lambda *arguments: None)
        assert problem(head).linear is None, hook


def test_all_paths_of_a_half_precision_head_agree() -> None:
    torch.manual_seed(0)
    head = nn.Linear(64, 4).bfloat16()
    keys, labels = torch.randn(50, 64), torch.randint(4, (50,))
    answers = []
    for path in ("functional", "dense", "span", "one step"):
        model = make_model(
            head,
            keys[:ENTRIES],
            labels[:ENTRIES],
            mbpa.Gradient(0.1),
            engine=mbpa.Engine(path=path),
        )
        answers.append(model(keys[:8] + 0.1))
    assert all((answer - answers[0]).abs().max() <= 1e-5 for answer in answers)


def test_outputs_of_a_broken_head_do_not_linger() -> None:
    head, _ = make_head("linear")
    keys, values, queries = data((6,), "cross_entropy", torch.float32)
    model = make_model(head, keys, values, mbpa.Gradient(0.1), engine=mbpa.Engine(path="one step"))
    before, weight = model(queries), head.weight.data.clone()
    head.weight.data.fill_(float("nan"))
    model(queries[:1])
    head.weight.data.copy_(weight)
    assert torch.equal(model(queries[:1]).isfinite().all(), torch.tensor(True))
    assert (model(queries) - before).abs().max() <= 1e-6


def test_a_path_that_is_asked_for_is_taken_or_refused() -> None:
    head, _ = make_head("linear")
    keys, values, queries = data((6,), "cross_entropy", torch.float32)
    engine = mbpa.Engine(path="one step", store_bytes=1)
    model = make_model(head, keys, values, mbpa.Gradient(0.1), engine=engine)
    with pytest.raises(ValueError, match=r"one of .* for this problem, got 'one step'"):
        model(queries)
    with pytest.raises(ValueError, match="scratch_bytes must be at least 1, got 0"):
        mbpa.Engine(scratch_bytes=0)
