"""`Gradient(lr="auto")`: a step size for each query, from its own neighbours and from nothing else.

    α = 2 / (max(s̄, 0.1) Σ_k w_k ‖∇_θ o_k‖²),        s̄ = Σ_k w_k (1 − p_k(v_k)),

for cross-entropy, and 1 / Σ_k w_k ‖∇_θ o_k‖² for squared error. o_k is an output of neighbour k:
its label's against the mean of all, or for targets the mean, over the length of that direction. In
a linear head any gives ‖h_k‖² + 1, the 1 being the bias's, and the sum is the trace of the weighted
Gram matrix. Why, and how well it does, is in docs/tuning.md.

Plain steps, with momentum and decay or without, are linear in the weights w: α goes into them, and
every path computes what it would for a number.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mbpa.adaptation.losses import CROSS_ENTROPY
from mbpa.adaptation.mlp import squared_slopes
from mbpa.adaptation.output_cache import StoredOutputs
from mbpa.adaptation.per_query import each_squared_slope
from mbpa.adaptation.problem import Problem
from mbpa.rules import AUTO, Gradient

REACH = 2.0
"""Once the head says of neighbours in one place what share of them has each label, its loss curves
by at most 1 − Σ share², no more than s̄ if the head was no surer before: steps settle, up to 2."""
LEAST_SURPRISE = 0.1
"""Else what a head knows well would be learnt with steps that have no bound."""
SOME_BYTES = 1 << 26  # of outputs that are looked at, at a time


def is_open(problem: Problem) -> bool:
    """Whether the step size is yet to be found."""
    return isinstance(problem.rule, Gradient) and problem.rule.lr == AUTO


def settled(problem: Problem, stored: StoredOutputs | None, has_shares: bool) -> Problem:
    """The same with a step size that is a number, if it was left open.

    Args:
        stored: what the head says of the neighbours, if that is known.
        has_shares: whether those are probabilities.
    """
    rule = problem.rule
    if not is_open(problem):
        return problem
    assert isinstance(rule, Gradient)
    weights = problem.weights * _rates(problem, stored, has_shares)[:, None]
    return replace(problem, rule=replace(rule, lr=1.0), weights=weights)


def _rates(problem: Problem, stored: StoredOutputs | None, has_shares: bool) -> Float[Tensor, "B"]:
    squares, shares = _squares_and_shares(problem, stored, has_shares)
    slope = (problem.weights * squares).sum(1)
    if shares is not None:
        surprise = (problem.weights * (1 - shares)).sum(1)
        slope *= surprise.clamp_min_(LEAST_SURPRISE) / REACH
    # Where nothing can move, nothing does.
    return torch.where(slope > 0, 1 / slope.clamp_min(torch.finfo(slope.dtype).tiny), 0)


def _squares_and_shares(
    problem: Problem, stored: StoredOutputs | None, has_shares: bool
) -> tuple[Float[Tensor, "B K"], Float[Tensor, "B K"] | None]:
    """‖∇_θ o_k‖² of every neighbour and, of those with labels, the labels' probabilities."""
    is_labelled = problem.loss == CROSS_ENTROPY
    if head := problem.linear:
        squares = head.squared_lengths(problem.keys)
        return squares, _label_shares(problem, stored, has_shares) if is_labelled else None
    found = squared_slopes if problem.layers is not None else each_squared_slope
    squares, outputs = found(problem, _directions(problem))
    return squares, _softmax_at(outputs, problem.values) if is_labelled else None


def _label_shares(
    problem: Problem, stored: StoredOutputs | None, has_shares: bool
) -> Float[Tensor, "B K"]:
    """What a linear head gives to the neighbours' labels, some queries at a time."""
    assert problem.linear is not None
    if stored is not None and has_shares:
        return stored.picked(problem.values)
    a_query = max(1, problem.keys.shape[1] * problem.outputs.shape[1] * problem.dtype.itemsize)
    some = max(1, SOME_BYTES // a_query)
    parts = []
    for start in range(0, len(problem.queries), some):
        rows = slice(start, start + some)
        if stored is None:
            outputs = problem.linear(problem.keys[rows])
        else:
            outputs = stored.rows(rows).gathered(problem.at_queries[rows])[:, :-1]
        parts.append(_softmax_at(outputs, problem.values[rows]))
    return torch.cat(parts) if parts else problem.weights


def _softmax_at(
    outputs: Float[Tensor, "B K C"], labels: Int[Tensor, "B K"]
) -> Float[Tensor, "B K"]:
    logs = outputs.gather(-1, labels[..., None])[..., 0] - outputs.logsumexp(-1)
    return logs.exp_()


def _directions(problem: Problem) -> Float[Tensor, "B K *C"]:
    shape = *problem.weights.shape, *problem.outputs.shape[1:]
    count = math.prod(shape[2:])
    if problem.loss != CROSS_ENTROPY or count == 1:
        return problem.weights.new_full(shape, count**-0.5)
    directions = problem.weights.new_full(shape, -1 / count)
    directions.scatter_add_(-1, problem.values[..., None], torch.ones_like(directions[..., :1]))
    return directions.div_(math.sqrt(1 - 1 / count))
