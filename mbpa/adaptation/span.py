"""Linear head, gradient steps: exact without ever building a query's weights.

The change of the weights stays in the span of the neighbours, W_t − W = Σ_k a_k h_kᵀ, so A (K × C)
is kept in place of W (C × D). With Z0 the un-adapted outputs of the neighbours, G the Gram matrix
of what adapts and u its column for the query,

    A ← (1−β) A − α w ⊙ residual(Z0 + G A),        z(q) = W q + b + uᵀ A.

After one step from A = 0 only uᵀA is left of this, a sum over stored rows.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from mbpa.adaptation.losses import CROSS_ENTROPY, residual
from mbpa.adaptation.problem import LinearHead, Problem
from mbpa.adaptation.stored import StoredOutputs
from mbpa.rules import Gradient


def span(
    problem: Problem, stored: StoredOutputs | None, want_change: bool
) -> tuple[Float[Tensor, "B C"], Float[Tensor, "B"] | None]:
    """Adapted outputs, and the norm of the change if wanted; `stored` holds raw outputs."""
    head, rule = _linear_and_gradient(problem)
    start = head(problem.keys) if stored is None else stored.gathered()  # B K C
    gram = _products(head, problem.keys @ problem.keys.mT)  # B K K
    weights = problem.weights[..., None]
    velocity = weights * residual(str(problem.loss), start, problem.values)
    coefficients = -rule.lr * velocity  # A after the first step
    for _ in range(rule.steps - 1):
        outputs = torch.baddbmm(start, gram, coefficients)
        gradient = weights * residual(str(problem.loss), outputs, problem.values)
        velocity = gradient.add_(velocity, alpha=rule.momentum) if rule.momentum else gradient
        coefficients = coefficients.mul_(1 - rule.decay).sub_(velocity, alpha=rule.lr)
    moved = torch.einsum("bk,bkc->bc", _query_products(problem, head), coefficients)
    if not want_change:
        return problem.outputs + moved, None
    squared = (coefficients * (gram @ coefficients)).sum((1, 2))
    return problem.outputs + moved, squared.clamp_min(0).sqrt()


def one_step(problem: Problem, stored: StoredOutputs) -> Float[Tensor, "B C"]:
    """Adapted outputs after a single step; `stored` holds probabilities if the loss is
    cross-entropy, else raw outputs:

        z(q) = W q + b − α Σ_k w_k u_k (p_k − v_k),        v_k one-hot for labels
    """
    head, rule = _linear_and_gradient(problem)
    weights = rule.lr * problem.weights * _query_products(problem, head)
    outputs = problem.outputs - stored.weighted_sum(weights)
    if problem.loss == CROSS_ENTROPY:
        return outputs.scatter_add_(1, problem.values, weights)
    return outputs + torch.einsum("bk,bkc->bc", weights, problem.values)


def _linear_and_gradient(problem: Problem) -> tuple[LinearHead, Gradient]:
    assert problem.linear is not None  # the plan sends nothing else here
    assert isinstance(problem.rule, Gradient)
    return problem.linear, problem.rule


def _query_products(problem: Problem, head: LinearHead) -> Float[Tensor, "B K"]:
    return _products(head, torch.einsum("bkd,bd->bk", problem.keys, problem.queries))


def _products(head: LinearHead, products: Float[Tensor, "*B"]) -> Float[Tensor, "*B"]:
    """Inner products of what multiplies the adapting parameters: the key, 1 for the bias, both."""
    if not head.weight_adapts:
        products = torch.zeros_like(products)
    return products + 1 if head.bias_adapts else products
