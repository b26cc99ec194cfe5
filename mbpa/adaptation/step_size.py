"""`Gradient(lr="auto")`: a step size for each query, computed from its own neighbours alone.

    α = 2 / (max(s̄, 0.1) Σ_k w_k ‖∇_θ o_k‖²),        s̄ = Σ_k w_k (1 − p_k(v_k)),

for cross-entropy, and 1 / Σ_k w_k ‖∇_θ o_k‖² for squared error. o_k is the output of neighbour k
along a unit direction: its label's output against the mean of all, or for targets the mean. In a
linear head every direction gives ‖h_k‖² + 1, where 1 is for the bias, and the sum is the trace of
the weighted Gram matrix. docs/tuning.md explains why, and measures how well it works.

Gradient steps, with or without momentum and decay, are linear in the weights w. So α is multiplied
into them, and every path computes as with a fixed step size.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mbpa.adaptation.losses import CROSS_ENTROPY
from mbpa.adaptation.mlp import square_slopes
from mbpa.adaptation.output_cache import StoredOutputs
from mbpa.adaptation.per_query import square_each_slope
from mbpa.adaptation.problem import Problem
from mbpa.rules import AUTO, Gradient

REACH = 2.0
"""Factor of the step size. When the head predicts, for neighbours with equal keys, the share of
each label among them, the curvature of the loss is at most 1 − Σ share². That is at most s̄ if the
head was no more certain before, so steps converge for factors up to 2."""
LEAST_SURPRISE = 0.1
"""Lower bound on s̄: without it, the step size for labels that the head knows well has no bound."""
CHUNK_BYTES = 1 << 26  # outputs processed at a time


def is_rate_open(problem: Problem) -> bool:
    """Return whether the step size is "auto" and has not been computed yet."""
    return isinstance(problem.rule, Gradient) and problem.rule.lr == AUTO


def resolve_step_size(problem: Problem, stored: StoredOutputs | None, has_shares: bool) -> Problem:
    """Return the problem with a numeric step size; unchanged if it already has one.

    Args:
        problem: the batch of adaptations.
        stored: the head's outputs for the neighbours, if known.
        has_shares: whether these are probabilities.
    """
    if not is_rate_open(problem):
        return problem
    return _set_rates(problem, *_compute_squares_and_shares(problem, stored, has_shares))


def resolve_by_shares(problem: Problem, shares: Float[Tensor, "B K"]) -> Problem:
    """Return the problem of a linear head with a numeric step size.

    Args:
        problem: the batch of adaptations.
        shares: the probabilities of the neighbours' labels.
    """
    if not is_rate_open(problem):
        return problem
    assert problem.linear is not None
    return _set_rates(problem, problem.linear.compute_squared_lengths(problem.keys), shares)


def _set_rates(
    problem: Problem, squares: Float[Tensor, "B K"], shares: Float[Tensor, "B K"] | None
) -> Problem:
    rule = problem.rule
    assert isinstance(rule, Gradient)
    weights = problem.weights * _compute_rates(problem, squares, shares)[:, None]
    return replace(problem, rule=replace(rule, lr=1.0), weights=weights)


def _compute_rates(
    problem: Problem, squares: Float[Tensor, "B K"], shares: Float[Tensor, "B K"] | None
) -> Float[Tensor, "B"]:
    slope = (problem.weights * squares).sum(1)
    if shares is not None:
        surprise = (problem.weights * (1 - shares)).sum(1)
        slope *= surprise.clamp_min_(LEAST_SURPRISE) / REACH
    # A slope of zero means that no step can change anything.
    return torch.where(slope > 0, 1 / slope.clamp_min(torch.finfo(slope.dtype).tiny), 0)


def _compute_squares_and_shares(
    problem: Problem, stored: StoredOutputs | None, has_shares: bool
) -> tuple[Float[Tensor, "B K"], Float[Tensor, "B K"] | None]:
    """Return ‖∇_θ o_k‖² of every neighbour and, for cross-entropy, its label's probability."""
    is_labelled = problem.loss == CROSS_ENTROPY
    if head := problem.linear:
        squares = head.compute_squared_lengths(problem.keys)
        return squares, _compute_label_shares(problem, stored, has_shares) if is_labelled else None
    square = square_slopes if problem.layers is not None else square_each_slope
    squares, outputs = square(problem, _make_directions(problem))
    return squares, _softmax_at(outputs, problem.values) if is_labelled else None


def _compute_label_shares(
    problem: Problem, stored: StoredOutputs | None, has_shares: bool
) -> Float[Tensor, "B K"]:
    """Return the probabilities of the neighbours' labels by a linear head, in chunks of queries."""
    assert problem.linear is not None
    if stored is not None and has_shares:
        return stored.pick(problem.values)
    query_bytes = max(1, problem.keys.shape[1] * problem.outputs.shape[1] * problem.dtype.itemsize)
    chunk = max(1, CHUNK_BYTES // query_bytes)
    parts = []
    for start in range(0, len(problem.queries), chunk):
        rows = slice(start, start + chunk)
        if stored is None:
            outputs = problem.linear(problem.keys[rows])
        else:
            outputs = stored.rows(rows).gather(problem.at_queries[rows])[:, :-1]
        parts.append(_softmax_at(outputs, problem.values[rows]))
    return torch.cat(parts) if parts else problem.weights


def _softmax_at(
    outputs: Float[Tensor, "B K C"], labels: Int[Tensor, "B K"]
) -> Float[Tensor, "B K"]:
    logs = outputs.gather(-1, labels[..., None])[..., 0] - outputs.logsumexp(-1)
    return logs.exp_()


def _make_directions(problem: Problem) -> Float[Tensor, "B K *C"]:
    shape = *problem.weights.shape, *problem.outputs.shape[1:]
    count = math.prod(shape[2:])
    if problem.loss != CROSS_ENTROPY or count == 1:
        return problem.weights.new_full(shape, count**-0.5)
    directions = problem.weights.new_full(shape, -1 / count)
    directions.scatter_add_(-1, problem.values[..., None], torch.ones_like(directions[..., :1]))
    return directions.div_(math.sqrt(1 - 1 / count))
