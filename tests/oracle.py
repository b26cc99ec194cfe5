"""The slow obvious version: for each query a copy of the head, autograd, and torch's optimisers.

Written without a line of the library's computations, so that agreement means something.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import mbpa


class SignDescent(mbpa.Rule):
    """A user's rule: signed gradients, with a step that shrinks, and a memory of the last sign."""

    def __init__(self, lr: float, steps: int) -> None:
        self.lr, self.steps = lr, steps

    def update(self, params, grads, start, state):
        step, last = state if state is not None else (1, {name: 0 * g for name, g in grads.items()})
        moved = {
            name: p - self.lr / step * (grads[name] + 0.5 * last[name]).tanh()
            for name, p in params.items()
        }
        return moved, (step + 1, grads)


def nearest(keys: Tensor, query: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Indices and squared distances of the k nearest keys, the later first among equals."""
    distances = (keys - query).square().flatten(1).sum(1)
    listed = distances.tolist()
    order = sorted(range(len(keys)), key=lambda i: (listed[i], -i))[:k]
    return torch.tensor(order), distances[order]


def weigh(distances: Tensor, power: float = 4.0, counts: Tensor | float = 1.0) -> Tensor:
    """Weights of neighbours at these squared distances; the default power is that of `Adapted`.

    They are divided by `counts`, one number per neighbour.
    """
    weights = 1 / (1e-3 + distances) ** power / counts
    return weights / weights.sum()


def count_labels(values: Tensor, index: Tensor) -> Tensor:
    """Number of entries that have the label of each of the entries at these places."""
    listed = values.tolist()
    return torch.tensor([listed.count(listed[place]) for place in index.tolist()])


def adapted_outputs(
    head: nn.Module,
    rule: mbpa.Rule,
    loss: str | Callable[[Tensor, Tensor], Tensor],
    params: Sequence[str] | None,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    k: int,
    power: float = 4.0,
    balance: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Outputs of the adapted heads and norms of their changes, one query at a time.

    The weights of neighbours are divided by the number of entries with their label, to the power
    `balance`.
    """
    outputs, changes = [], []
    for query in queries:
        index, distances = nearest(keys, query, k)
        counts = count_labels(values, index).double() ** balance if balance else 1.0
        weights = weigh(distances, power, counts)
        adapted = adapt_one(head, rule, loss, params, keys[index], values[index], weights)
        squares = [
            (new - old).square().sum()
            for new, old in zip(adapted.parameters(), head.parameters(), strict=True)
        ]
        changes.append(torch.stack(squares).sum().sqrt().detach())
        outputs.append(adapted(query[None])[0].detach())
    return torch.stack(outputs), torch.stack(changes)


def adapt_one(head, rule, loss, params, keys, values, weights):
    adapted = copy.deepcopy(head)
    moving = {n: p for n, p in adapted.named_parameters() if params is None or n in params}
    start = {name: p.detach().clone() for name, p in moving.items()}
    optimiser = optimiser_for(rule, list(moving.values()))
    decay = getattr(rule, "decay", 0.0)
    for _ in range(rule.steps):
        adapted.zero_grad()
        (weights * loss_of_each(loss, adapted(keys), values)).sum().backward()
        before = {name: p.detach().clone() for name, p in moving.items()} if decay else {}
        optimiser()
        for name in before:
            moving[name].data -= decay * (before[name] - start[name])
    return adapted


def loss_of_each(loss, outputs, values):
    if loss == "cross_entropy":
        return outputs.exp().sum(1).log() - outputs[torch.arange(len(values)), values]
    if loss == "squared_error":
        return 0.5 * ((outputs - values) ** 2).sum(1)
    return loss(outputs, values)


def optimiser_for(rule: mbpa.Rule, params: list[nn.Parameter]) -> Callable[[], None]:
    if isinstance(rule, mbpa.Gradient):
        return torch.optim.SGD(params, lr=rule.lr, momentum=rule.momentum).step
    if isinstance(rule, mbpa.Adam):
        betas = (rule.beta1, rule.beta2)
        return torch.optim.Adam(params, lr=rule.lr, betas=betas, eps=rule.epsilon).step
    if isinstance(rule, mbpa.RMSprop):
        optimiser = torch.optim.RMSprop(params, rule.lr, rule.smoothing, rule.epsilon)
        if rule.initial_square:
            for p in params:
                optimiser.state[p] = {
                    "step": torch.tensor(0.0),
                    "square_avg": torch.full_like(p, rule.initial_square),
                }
        return optimiser.step
    assert isinstance(rule, SignDescent)
    return _SignDescentByHand(rule.lr, params)


class _SignDescentByHand:
    def __init__(self, lr: float, params: list[nn.Parameter]) -> None:
        self.lr, self.params, self.step = lr, params, 0
        self.last = [torch.zeros_like(p) for p in params]

    def __call__(self) -> None:
        self.step += 1
        for i, p in enumerate(self.params):
            p.data -= self.lr / self.step * torch.tanh(p.grad + 0.5 * self.last[i])
            self.last[i] = p.grad.clone()
