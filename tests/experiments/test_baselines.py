"""Every baseline does what its paper says, network by network, checked against slow versions."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.baselines import (
    AGEM,
    EWC,
    Batch,
    DERPlusPlus,
    Learner,
    Replay,
    diagonal_fisher,
    project_gradients,
)
from experiments.networks import Stack, make_mlp

SIZES, SEEDS, LR = (6, 9, 7, 4), (3, 8), 0.01
CPU = torch.device("cpu")


def stack() -> Stack:
    return Stack(SEEDS, SIZES, CPU)


def examples(seed: int, count: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = len(SEEDS), count
    inputs = torch.randn(*shape, SIZES[0], generator=generator)
    return inputs, torch.randint(SIZES[-1], shape, generator=generator)


def each(values: float | list[float]) -> Tensor:
    return torch.tensor(values).expand(len(SEEDS)).clone()


def trained_alone(place: int, losses: list) -> nn.Sequential:
    """One network with torch.optim, a step for each function from the network to a loss."""
    network = make_mlp(SEEDS[place], SIZES)
    optimizer = torch.optim.Adam(network.parameters(), lr=LR)
    for loss in losses:
        optimizer.zero_grad()
        loss(network).backward()
        optimizer.step()
    return network


def assert_same(network: nn.Module, other: nn.Module, tolerance: float = 1e-5) -> None:
    for mine, theirs in zip(network.parameters(), other.parameters(), strict=True):
        assert (mine - theirs).abs().max() < tolerance


def test_networks_of_a_stack_are_those_they_would_be_alone() -> None:
    learner = Learner(stack(), LR)
    batches = [examples(seed) for seed in range(20)]
    for inputs, labels in batches:
        learner.learn(inputs, labels)
    for place in range(len(SEEDS)):
        losses = [
            lambda net, x=x[place], y=y[place]: functional.cross_entropy(net(x), y)
            for x, y in batches
        ]
        assert_same(learner.stack.network(place), trained_alone(place, losses))
    moved = learner.stack.network(0)[0].weight - make_mlp(SEEDS[0], SIZES)[0].weight
    assert moved.abs().max() > 0.05


def test_the_same_seed_is_the_same_network_in_any_company() -> None:
    alone = Stack([8], SIZES, CPU).network(0)
    assert_same(alone, stack().network(1), tolerance=1e-12)


def drawn_labels(network: nn.Module, inputs: Tensor, uniform: Tensor) -> Tensor:
    """The first label whose share, added to those before it, exceeds the number."""
    labels = []
    for shares, number in zip(network(inputs).softmax(1), uniform, strict=True):
        added = list(itertools.accumulate(shares.tolist()))
        labels.append(next(label for label, upto in enumerate(added) if upto > float(number)))
    return torch.tensor(labels)


def test_fisher_is_that_of_single_examples() -> None:
    networks, (inputs, _) = stack(), examples(1)
    uniform = torch.rand(inputs.shape[:2], generator=torch.Generator().manual_seed(2))
    fisher = diagonal_fisher(networks, inputs, uniform)
    for place in range(len(SEEDS)):
        network = make_mlp(SEEDS[place], SIZES)
        labels = drawn_labels(network, inputs[place], uniform[place])
        expected = [torch.zeros_like(param) for param in network.parameters()]
        for image, label in zip(inputs[place], labels, strict=True):
            loss = functional.cross_entropy(network(image[None]), label[None])
            for total, slope in zip(
                expected, torch.autograd.grad(loss, list(network.parameters())), strict=True
            ):
                total += slope.square() / len(labels)
        for mine, slow in zip(fisher, expected, strict=True):
            found = mine[place].T if slow.ndim == 2 else mine[place]
            assert torch.allclose(found, slow, rtol=1e-4, atol=1e-9)


def test_labels_are_drawn_as_often_as_the_network_says() -> None:
    """Squares of the output bias's slope: with labels as predicted their mean is p (1 − p)."""
    networks = stack()
    inputs = examples(1, count=1)[0].expand(-1, 20_000, -1)
    uniform = (torch.arange(20_000) + 0.5)[None].expand(2, -1) / 20_000
    bias = diagonal_fisher(networks, inputs, uniform)[-1]
    shares = networks(inputs[:, :1])[:, 0].softmax(-1)
    assert torch.allclose(bias, shares * (1 - shares), atol=1e-4)


def test_ewc_pulls_as_the_sum_over_tasks_does(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = EWC(stack(), LR, each([30.0, 300.0]))
    anchors: list[tuple[list[Tensor], list[Tensor]]] = []
    for task in range(3):
        learner.learn(*examples(task))
        inputs, _ = examples(10 + task)
        uniform = torch.rand(inputs.shape[:2], generator=torch.Generator().manual_seed(task))
        fisher = [f.detach().clone() for f in diagonal_fisher(learner.stack, inputs, uniform)]
        anchors.append(([p.detach().clone() for p in learner.stack.params], fisher))
        learner.consolidate(inputs, uniform)
    inputs, labels = examples(7)
    params = learner.stack.params
    logits = learner.stack(inputs)
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    total = loss.view(labels.shape).mean(1)
    for means, fisher in anchors:
        for param, mean, precision in zip(params, means, fisher, strict=True):
            squares = (precision * (param - mean).square()).flatten(1).sum(1)
            total = total + 0.5 * learner.strength * squares
    expected = torch.autograd.grad(total.sum(), params)
    seen: list[Tensor] = []
    monkeypatch.setattr(learner, "_step", seen.extend)
    learner.learn(inputs, labels)
    for slope, slow in zip(seen, expected, strict=True):
        assert torch.allclose(slope, slow, rtol=1e-3, atol=1e-5)
    assert any(
        (s - e).abs().max() > 1e-3
        for s, e in zip(seen, _plain(inputs, labels, learner), strict=True)
    )


def _plain(inputs: Tensor, labels: Tensor, learner: Learner) -> tuple[Tensor, ...]:
    losses = learner._losses(inputs, labels).sum()
    return torch.autograd.grad(losses, learner.stack.params)


@pytest.mark.heavy
def test_ewc_keeps_what_matters_to_the_first_task() -> None:
    first, second = examples(1, count=60), examples(2, count=60)
    kept = {}
    for strength in (0.0, 1e4):
        learner = EWC(stack(), LR, each(strength))
        for _ in range(100):
            learner.learn(*first)
        uniform = torch.rand(first[1].shape, generator=torch.Generator().manual_seed(0))
        learner.consolidate(first[0], uniform)
        for _ in range(100):
            learner.learn(*second)
        kept[strength] = float((learner.stack(first[0]).argmax(-1) == first[1]).float().mean())
    assert kept[1e4] > kept[0.0] + 0.2


def test_replay_adds_the_loss_on_what_is_stored() -> None:
    learner = Replay(stack(), LR)
    new, old = examples(1), examples(2)
    for _ in range(3):
        learner.rehearse(*new, (Batch(*old),))
    for place in range(len(SEEDS)):

        def loss(network: nn.Module, place: int = place) -> Tensor:
            parts = [(x[place], y[place]) for x, y in (new, old)]
            return sum(functional.cross_entropy(network(x), y) for x, y in parts)

        assert_same(learner.stack.network(place), trained_alone(place, [loss] * 3))


def test_der_is_its_definition() -> None:
    learner = DERPlusPlus(stack(), LR, each([0.3, 2.0]), each([0.5, 1.5]))
    new, first, second = examples(1), examples(2), examples(3)
    logits = torch.randn(2, 12, 4, generator=torch.Generator().manual_seed(4))
    for _ in range(3):
        learner.rehearse(*new, (Batch(*first, logits), Batch(*second, None)))
    for place in range(len(SEEDS)):

        def loss(network: nn.Module, place: int = place) -> Tensor:
            distance = functional.mse_loss(network(first[0][place]), logits[place])
            right = functional.cross_entropy(network(second[0][place]), second[1][place])
            own = functional.cross_entropy(network(new[0][place]), new[1][place])
            return own + learner.alpha[place] * distance + learner.beta[place] * right

        assert_same(learner.stack.network(place), trained_alone(place, [loss] * 3))


def flat(gradients: list[Tensor], place: int) -> Tensor:
    return torch.cat([slope[place].flatten() for slope in gradients])


def test_a_gem_takes_away_what_points_against_the_reference_and_nothing_else() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4, 5), (3, 5)]
    new = [torch.randn(shape, generator=generator) for shape in shapes]
    old = [torch.randn(shape, generator=generator) for shape in shapes]
    agreeing = flat(new, 0) @ flat(old, 0) >= 0
    if not agreeing:
        old = [torch.cat([-o[:1], o[1:]]) for o in old]
    if flat(new, 1) @ flat(old, 1) >= 0:
        old = [torch.cat([o[:1], -o[1:2], o[2:]]) for o in old]
    old = [torch.cat([o[:2], 0 * o[2:]]) for o in old]  # and one that has nothing to say
    found = project_gradients(new, old)
    assert torch.equal(flat(found, 0), flat(new, 0))
    g, r = flat(new, 1), flat(old, 1)
    assert torch.allclose(flat(found, 1), g - (g @ r) / (r @ r) * r, atol=1e-6)
    assert abs(float(flat(found, 1) @ r)) < 1e-4
    assert torch.equal(flat(found, 2), flat(new, 2))


def test_a_gem_steps_along_the_projected_gradient() -> None:
    learner = AGEM(stack(), LR)
    new, old = examples(1), examples(2)
    params = learner.stack.params
    gradients = [
        list(torch.autograd.grad(learner._losses(*batch).sum(), params)) for batch in (new, old)
    ]
    expected = [
        param.detach() - LR * slope.sign()  # what Adam does first, but for its epsilon
        for param, slope in zip(params, project_gradients(*gradients), strict=True)
    ]
    learner.rehearse(*new, (Batch(*old),))
    for param, wanted, slope in zip(params, expected, project_gradients(*gradients), strict=True):
        sure = slope.abs() > 1e-4
        assert torch.allclose(param[sure], wanted[sure], atol=1e-5)


@pytest.mark.parametrize("kind", ["plain", "EWC"])
def test_a_restored_learner_goes_on_as_if_nothing_had_happened(kind: str) -> None:
    def make() -> Learner:
        return Learner(stack(), LR) if kind == "plain" else EWC(stack(), LR, each(100.0))

    def train(learner: Learner, seeds: range) -> None:
        for seed in seeds:
            inputs, labels = examples(seed)
            learner.learn(inputs, labels)
            if isinstance(learner, EWC):
                learner.consolidate(inputs, torch.full(labels.shape, 0.5))

    whole, first, second = make(), make(), make()
    train(whole, range(6))
    train(first, range(3))
    second.restore({name: tensor.clone() for name, tensor in first.state().items()})
    train(second, range(3, 6))
    for mine, theirs in zip(second.stack.params, whole.stack.params, strict=True):
        assert torch.equal(mine, theirs)
