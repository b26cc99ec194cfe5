"""What the paper proves or claims about the method holds for the implementation."""

from __future__ import annotations

import copy
import itertools

import oracle
import pytest
import torch
from torch import Tensor, nn

import mbpa

PREDICTORS = {
    "parametric": mbpa.Parametric(),
    "adapted": mbpa.Adapted(mbpa.Gradient(0.5, 3, decay=0.1), k=4),
    "adapted by rmsprop": mbpa.Adapted(mbpa.RMSprop(0.1, 3), k=4),
    "adapted by adam": mbpa.Adapted(mbpa.Adam(0.1, 3), k=4),
    "one step": mbpa.Adapted(mbpa.Gradient(0.5, 1), k=4),
    "vote": mbpa.NeighborVote(k=4),
    "cache": mbpa.NeighborVote(mbpa.exp_dot(0.3), k=100, smoothing=0.1),
    "mixture": mbpa.Mixture(
        mbpa.Parametric(),
        mbpa.Adapted(mbpa.Gradient(0.5, 3), k=4),
        mbpa.NeighborVote(k=9),
        weights=(0.5, 0.3, 0.2),
    ),
}


def heads() -> dict[str, nn.Module]:
    torch.manual_seed(1)
    return {
        "linear": nn.Linear(5, 3),
        "mlp": nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)),
    }


class Constant(nn.Module):
    """A head with the same output for every key."""

    def __init__(self, outputs: Tensor) -> None:
        super().__init__()
        self.outputs = nn.Parameter(outputs)

    def forward(self, keys: Tensor) -> Tensor:
        return self.outputs.expand(len(keys), -1)


def model_with(
    head: nn.Module, predictor: mbpa.Predictor, keys: Tensor, values: Tensor
) -> mbpa.MbPA:
    memory = mbpa.ExactMemory(
        len(keys),
        keys.shape[1],
        dtype=keys.dtype,
        value_shape=tuple(values.shape[1:]),
        value_dtype=values.dtype,
    )
    model = mbpa.MbPA(head=head, memory=memory, predictor=predictor)
    model.write(keys, values)
    return model


def constant_heads(start: Tensor) -> list[tuple[nn.Module, tuple[str, ...] | None]]:
    """A constant through autograd, and a linear layer of which only the bias adapts."""
    linear = nn.Linear(2, len(start)).double()
    with torch.no_grad():
        linear.weight.zero_()
        linear.bias.copy_(start)
    return [(Constant(start.clone()), None), (linear, ("bias",))]


def test_attention_is_adaptation_of_a_constant_head_when_every_class_occurs() -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(12, 2, generator=generator, dtype=torch.float64)
    labels = torch.arange(12) % 3
    queries = torch.randn(5, 2, generator=generator, dtype=torch.float64)
    vote = model_with(Constant(torch.zeros(3).double()), mbpa.NeighborVote(k=12), keys, labels)
    for head, params in constant_heads(torch.tensor([0.3, -1.0, 0.5]).double()):
        rule = mbpa.Gradient(lr=2.0, steps=300)
        predictor = mbpa.Adapted(rule, k=12, kernel=mbpa.InverseDistance(), params=params)
        adapted = model_with(head, predictor, keys, labels)
        assert (adapted(queries).exp() - vote(queries).exp()).abs().max() <= 1e-9


def test_with_a_class_missing_the_difference_falls_as_one_over_lr_times_steps() -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(12, 2, generator=generator, dtype=torch.float64)
    labels = torch.arange(12) % 2  # class 2 never occurs
    queries = torch.randn(5, 2, generator=generator, dtype=torch.float64)
    vote = model_with(Constant(torch.zeros(3).double()), mbpa.NeighborVote(k=12), keys, labels)

    def difference(lr: float, steps: int) -> float:
        head, params = constant_heads(torch.zeros(3).double())[1]
        rule = mbpa.Gradient(lr=lr, steps=steps)
        predictor = mbpa.Adapted(rule, k=12, kernel=mbpa.InverseDistance(), params=params)
        adapted = model_with(head, predictor, keys, labels)
        return float((adapted(queries).exp() - vote(queries).exp()).abs().max())

    base = difference(1.0, 250)
    assert base < 1e-2
    assert difference(1.0, 1000) == pytest.approx(base / 4, rel=0.05)
    assert difference(2.0, 500) == pytest.approx(base / 4, rel=0.05)


def test_attention_is_adaptation_of_a_constant_head_for_regression() -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(12, 2, generator=generator, dtype=torch.float64)
    targets = torch.randn(12, 4, generator=generator, dtype=torch.float64)
    queries = torch.randn(5, 2, generator=generator, dtype=torch.float64)
    vote = model_with(Constant(torch.zeros(4).double()), mbpa.NeighborVote(k=12), keys, targets)
    for head, params in constant_heads(torch.tensor([3.0, -1.0, 0.5, 2.0]).double()):
        rule = mbpa.Gradient(lr=0.5, steps=60)
        predictor = mbpa.Adapted(rule, k=12, kernel=mbpa.InverseDistance(), params=params)
        adapted = model_with(head, predictor, keys, targets)
        assert (adapted(queries) - vote(queries)).abs().max() <= 1e-9


class PrintedEquation4(mbpa.Rule):
    """The contextual update with the signs that the paper prints."""

    def __init__(self, lr: float, steps: int, decay: float) -> None:
        self.lr, self.steps, self.decay = lr, steps, decay

    def update(self, params, grads, start, state):
        moved = {
            name: p + self.lr * grads[name] - self.decay * (start[name] - p)
            for name, p in params.items()
        }
        return moved, None


@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_every_step_lowers_the_weighted_loss_over_the_neighbours(head: str) -> None:
    torch.manual_seed(0)
    network = heads()[head].double()
    keys, labels = torch.randn(20, 5).double(), torch.randint(3, (20,))
    for query in torch.randn(6, 5).double():
        index, distances = oracle.nearest(keys, query, 5)
        near, wanted, weights = keys[index], labels[index], oracle.weigh(distances)
        losses = []
        for steps in range(5):
            rule = mbpa.Gradient(0.05, max(steps, 1))
            adapted = network
            if steps:
                adapted = oracle.adapt_one(
                    network, rule, "cross_entropy", None, near, wanted, weights
                )
                model = model_with(network, mbpa.Adapted(rule, k=5), keys, labels)
                expected = adapted(query[None]).log_softmax(1)
                assert (model(query[None]) - expected).abs().max() <= 1e-9
            with torch.no_grad():
                each = oracle.loss_of_each("cross_entropy", adapted(near), wanted)
            losses.append(float((weights * each).sum()))
        assert all(later < earlier for earlier, later in itertools.pairwise(losses))


@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_equation_4_as_printed_climbs_the_loss_and_flees_the_weights(head: str) -> None:
    torch.manual_seed(0)
    keys, labels = torch.randn(20, 5).double(), torch.randint(3, (20,))

    def loss_and_change(predictor: mbpa.Predictor) -> tuple[Tensor, Tensor]:
        """With each stored key as a query, whose one neighbour is that entry."""
        model = model_with(heads()[head].double(), predictor, keys, labels)
        why = model.explain(keys)
        return -why.after.gather(1, labels[:, None])[:, 0], why.change

    network = heads()[head].double()
    before = -network(keys).log_softmax(1).gather(1, labels[:, None])[:, 0]
    ours, printed = (
        [loss_and_change(mbpa.Adapted(rule(0.1, 4, decay=decay), k=1)) for decay in (0.0, 0.2)]
        for rule in (mbpa.Gradient, PrintedEquation4)
    )
    for (loss, _), (climbed, _) in zip(ours, printed, strict=True):
        assert (loss < before).all()
        assert (climbed > before).all()
    assert (ours[1][1] < ours[0][1]).all()  # decay pulls back
    assert (printed[1][1] > printed[0][1]).all()


def test_equation_10_as_printed_has_its_maximum_at_attention() -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(12, 2, generator=generator, dtype=torch.float64)
    labels = torch.arange(12) % 3
    query = torch.randn(1, 2, generator=generator, dtype=torch.float64)
    head = Constant(torch.zeros(3).double())
    model = model_with(head, mbpa.NeighborVote(k=12), keys, labels)
    why = model.explain(query)
    weights, values = why.weights[0], why.neighbors.values[0]

    def printed(logits: Tensor) -> float:
        return float((weights * (logits[values] - logits.logsumexp(0))).sum())

    attention = model(query)[0]
    for _ in range(20):
        nearby = attention + 0.1 * torch.randn(3, generator=generator, dtype=torch.float64)
        assert printed(nearby) < printed(attention)


@pytest.mark.parametrize("rule", [mbpa.Gradient, mbpa.RMSprop, mbpa.Adam])
@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_decay_is_inert_at_one_step(rule: type, head: str) -> None:
    torch.manual_seed(0)
    keys, labels, queries = torch.randn(20, 5), torch.randint(3, (20,)), torch.randn(6, 5)
    plain = model_with(heads()[head], mbpa.Adapted(rule(0.1, 1), k=5), keys, labels)
    decayed = model_with(heads()[head], mbpa.Adapted(rule(0.1, 1, decay=0.9), k=5), keys, labels)
    assert torch.equal(plain(queries), decayed(queries))
    plain = model_with(heads()[head], mbpa.Adapted(rule(0.1, 2), k=5), keys, labels)
    decayed = model_with(heads()[head], mbpa.Adapted(rule(0.1, 2, decay=0.9), k=5), keys, labels)
    assert not torch.equal(plain(queries), decayed(queries))


def test_the_change_vanishes_as_the_head_fits_its_memories() -> None:
    torch.manual_seed(0)
    keys, queries = torch.randn(60, 5).double(), torch.randn(8, 5).double()
    labels = (keys @ torch.randn(5, 3).double()).argmax(1)
    head = nn.Linear(5, 3).double()
    predictor = mbpa.Adapted(mbpa.Gradient(0.5, 5), k=6)
    model = model_with(head, predictor, keys, labels)
    optimiser = torch.optim.LBFGS(head.parameters(), lr=1, max_iter=20)

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(head(keys), labels)
        loss.backward()
        return loss

    changes, effects = [], []
    for _ in range(5):
        why = model.explain(queries)
        changes.append(float(why.change.mean()))
        effects.append(float((why.after.exp() - why.before.exp()).abs().mean()))
        optimiser.step(closure)
    assert changes[-1] < 1e-3 * changes[0]
    assert effects[-1] < 1e-3 * effects[0]


def test_a_head_that_fits_regression_targets_exactly_does_not_move() -> None:
    torch.manual_seed(0)
    head = nn.Linear(5, 2).double()
    keys = torch.randn(30, 5).double()
    model = model_with(
        head, mbpa.Adapted(mbpa.Gradient(0.5, 4), k=6), keys, head(keys).detach().clone()
    )
    assert float(model.explain(torch.randn(4, 5).double()).change.max()) < 1e-14


@pytest.mark.parametrize("head", ["linear", "mlp"])
@pytest.mark.parametrize("name", PREDICTORS)
def test_an_empty_memory_gives_the_parametric_prediction_to_the_bit(name: str, head: str) -> None:
    torch.manual_seed(0)
    network = heads()[head]
    memory = mbpa.ExactMemory(20, 5)
    model = mbpa.MbPA(head=network, memory=memory, predictor=PREDICTORS[name])
    queries = torch.randn(6, 5)
    with torch.no_grad():
        expected = network(queries).log_softmax(1)
    assert torch.equal(model(queries), expected)
    ids = model.write(torch.randn(10, 5), torch.randint(3, (10,)))
    if name != "parametric":
        assert not torch.equal(model(queries), expected)
    memory.delete(ids)
    assert torch.equal(model(queries), expected)


@pytest.mark.parametrize("head", ["linear", "mlp"])
@pytest.mark.parametrize("name", PREDICTORS)
def test_no_call_changes_a_module_or_draws_random_numbers(name: str, head: str) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), heads()[head])
    embed, tail = mbpa.split(network.train(), at="3")
    before = copy.deepcopy(network.state_dict())
    model = mbpa.MbPA(embed, tail, memory=mbpa.ExactMemory(20, 5), predictor=PREDICTORS[name])
    inputs, labels = torch.randn(12, 4), torch.randint(3, (12,))
    random_state = torch.get_rng_state()
    model.write(inputs, labels)
    model(inputs)
    model.explain(inputs)
    mbpa.score_stream(model, inputs, labels, block=5)
    model.grow(4)
    model(inputs)
    assert torch.equal(random_state, torch.get_rng_state())
    after = network.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert all(module.training for module in network.modules())
    assert all(p.grad is None for p in network.parameters())


def test_the_answer_does_not_depend_on_the_rest_of_the_batch_or_on_earlier_calls() -> None:
    torch.manual_seed(0)
    keys, labels = torch.randn(30, 5).double(), torch.randint(3, (30,))
    queries = torch.randn(6, 5).double()
    for name, predictor in PREDICTORS.items():
        model = model_with(heads()["mlp"].double(), predictor, keys, labels)
        once = model(queries)
        one_by_one = torch.cat([model(query[None]) for query in queries.flip(0)]).flip(0)
        assert (once - one_by_one).abs().nan_to_num(0).max() <= 1e-9, name
        assert torch.equal(once, model(queries)), name
