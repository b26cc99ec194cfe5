"""Linear head, gradient steps: exact, without forming each query's weights.

The change of the weights stays in the span of the neighbours, so the steps update their outputs L
(K × C) instead of W (C × D). With G the Gram matrix of the adapting inputs, and the query as one
more neighbour of weight zero,

    L ← (1−β) L + β L⁰ − α G (w ⊙ residual(L)),        z(q) = the query's row of L.

For a single step only that row is needed, and it is a sum over stored rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from mbpa.adaptation.losses import CROSS_ENTROPY
from mbpa.adaptation.output_cache import StoredOutputs
from mbpa.adaptation.problem import LinearHead, Problem
from mbpa.device import takes_kernels
from mbpa.rules import Gradient


def solve_span(
    problem: Problem, stored: StoredOutputs | None, want_change: bool
) -> tuple[Float[Tensor, "B C"], Float[Tensor, "B"] | None]:
    """Return the adapted outputs, and the norm of the change if `want_change`.

    `stored` holds raw outputs.
    """
    head, rule = _linear_and_gradient(problem)
    if is_span_fused(problem) and not want_change:
        from mbpa.adaptation.fused.span import adapt_span_outputs

        rows = stored or StoredOutputs.make_for_call(head(problem.keys))
        return adapt_span_outputs(
            rows.table,
            rows.unwritten,
            rows.index.contiguous(),
            problem.at_queries.contiguous(),
            problem.keys.contiguous(),
            problem.queries.contiguous(),
            problem.weights.contiguous(),
            problem.values.contiguous(),
            lr=rule.rate,
            steps=rule.steps,
            decay=rule.decay,
            weight_adapts=head.weight_adapts,
            bias_adapts=head.bias_adapts,
        ), None
    return _iterate(problem, stored, want_change)


def is_span_fused(problem: Problem) -> bool:
    """Return whether one kernel computes a whole step."""
    has_momentum = isinstance(problem.rule, Gradient) and problem.rule.momentum != 0
    is_simple = problem.loss == CROSS_ENTROPY and not has_momentum
    return is_simple and takes_kernels(problem.outputs)


def _iterate(
    problem: Problem, stored: StoredOutputs | None, want_change: bool
) -> tuple[Tensor, Tensor | None]:
    head, rule = _linear_and_gradient(problem)
    if stored is None:
        outputs = torch.cat([head(problem.keys), problem.at_queries[:, None]], 1)
    else:
        outputs = stored.gather(problem.at_queries)
    gram = compute_adapting_products(head, problem.keys @ problem.keys.mT)
    reach = multiply_queries(problem, head)
    return take_steps(
        outputs, gram, reach, problem.weights, _pad_targets(problem), rule, want_change
    )


def take_steps(
    outputs: Float[Tensor, "B L C"],
    gram: Float[Tensor, "B K K"],
    reach: Float[Tensor, "B K"],
    weights: Float[Tensor, "B K"],
    targets: Tensor,
    rule: Gradient,
    want_change: bool,
    *,
    has_rest: bool = False,
    watch: Callable[[Tensor, Tensor], None] | None = None,
) -> tuple[Float[Tensor, "B C"], Float[Tensor, "B"] | None]:
    """Return the adapted outputs at the queries, and the norm of the change if `want_change`.

    The last row of `outputs` is the query's: it moves, but does not affect the other rows.

    Args:
        outputs: unadapted outputs of the K neighbours and the query, overwritten.
        gram: inner products of the neighbours' adapting inputs.
        reach: inner products of the neighbours' adapting inputs with the query's.
        weights: weights of the neighbours.
        targets: labels (B, L, 1) or values (B, L, C); the last row does not matter.
        rule: the steps.
        want_change: also compute ‖θˣ − θ‖.
        has_rest: column 0 does not move; it stands for all classes that do not take part.
        watch: called before each step with the outputs and their softmax.
    """
    batch, count = weights.shape
    pull = outputs.new_zeros(batch, count + 1, count + 1)
    torch.mul(gram, weights[:, None], out=pull[:, :count, :count])
    torch.mul(reach, weights, out=pull[:, count, :count])
    start = outputs.clone() if rule.decay else outputs
    slopes = torch.empty_like(outputs)
    pushed = torch.zeros_like(outputs) if rule.momentum else None
    coefficients = velocity = outputs.new_zeros(()) if want_change else None
    for step in range(rule.steps):
        if watch is not None:
            watch(outputs, outputs.softmax(-1))
        _write_residual(outputs, targets, out=slopes)
        if has_rest:
            slopes[..., 0] = 0
        if coefficients is not None and velocity is not None:
            velocity = rule.momentum * velocity + weights[..., None] * slopes[:, :count]
            coefficients = (1 - rule.decay) * coefficients - rule.rate * velocity
        if pushed is None and step == rule.steps - 1:  # only the query's row is needed
            outputs, pull = outputs[:, count:].clone(), pull[:, count:]
            start = start[:, count:]
        if pushed is None:
            outputs.baddbmm_(pull, slopes, beta=1 - rule.decay, alpha=-rule.rate)
        else:
            pushed.baddbmm_(pull, slopes, beta=rule.momentum)
            outputs.mul_(1 - rule.decay).sub_(pushed, alpha=rule.rate)
        if rule.decay:
            outputs.add_(start, alpha=rule.decay)
    result = outputs[:, -1]
    if coefficients is None:
        return result, None
    squared = (coefficients * (gram @ coefficients)).sum((1, 2))
    return result, squared.clamp_min(0).sqrt()


def solve_one_step(problem: Problem, stored: StoredOutputs) -> Float[Tensor, "B C"]:
    """Return the adapted outputs after a single step:

        z(q) = W q + b − α Σ_k w_k u_k (p_k − v_k),        v_k one-hot for labels

    `stored` holds probabilities if the loss is cross-entropy, else raw outputs.
    """
    if takes_kernels(problem.outputs) and problem.loss == CROSS_ENTROPY:
        return _run_kernel(problem, stored)
    factors = compute_step_factors(problem)
    outputs = problem.at_queries - stored.sum_weighted(factors)
    if problem.loss == CROSS_ENTROPY:
        return outputs.scatter_add_(1, problem.values, factors)
    return outputs + torch.einsum("bk,bkc->bc", factors, problem.values)


def _run_kernel(problem: Problem, stored: StoredOutputs) -> Float[Tensor, "B C"]:
    from mbpa.adaptation.fused.row_sums import subtract_rows

    head, rule = _linear_and_gradient(problem)
    return subtract_rows(
        problem.at_queries.contiguous(),
        stored.table,
        stored.unwritten,
        stored.index.contiguous(),
        problem.weights.contiguous(),
        _get_dots(problem).contiguous(),
        problem.values.contiguous(),
        by_weight=rule.rate * head.weight_adapts,
        by_bias=rule.rate * head.bias_adapts,
    )


def compute_step_factors(problem: Problem) -> Float[Tensor, "B K"]:
    """Return α w_k u_k, the factor by which a neighbour's residual moves the query's outputs."""
    head, rule = _linear_and_gradient(problem)
    return rule.rate * problem.weights * multiply_queries(problem, head)


def _pad_targets(problem: Problem) -> Tensor:
    """Return the values with an additional row for the query, whose content does not matter."""
    if problem.loss == CROSS_ENTROPY:
        return functional.pad(problem.values, (0, 1))[..., None]
    return functional.pad(problem.values, (0, 0, 0, 1))


def _write_residual(outputs: Tensor, targets: Tensor, *, out: Tensor) -> None:
    """Write the derivative of the loss with respect to the outputs; integer targets are labels."""
    if targets.is_floating_point():
        torch.sub(outputs, targets, out=out)
    else:
        torch.softmax(outputs, -1, out=out)
        out.scatter_add_(-1, targets, out.new_full((), -1).expand(targets.shape))


def _linear_and_gradient(problem: Problem) -> tuple[LinearHead, Gradient]:
    assert problem.linear is not None  # the plan guarantees it
    assert isinstance(problem.rule, Gradient)
    return problem.linear, problem.rule


def multiply_queries(problem: Problem, head: LinearHead) -> Float[Tensor, "B K"]:
    """Return the inner products of the queries' and their neighbours' adapting inputs."""
    return compute_adapting_products(head, _get_dots(problem))


def _get_dots(problem: Problem) -> Float[Tensor, "B K"]:
    if problem.dots is not None:
        return problem.dots
    return torch.bmm(problem.keys, problem.queries[..., None])[..., 0]


def compute_adapting_products(
    head: LinearHead, of_keys: Float[Tensor, "*B"]
) -> Float[Tensor, "*B"]:
    """Return inner products of the adapting inputs, given those of the keys.

    The adapting inputs are what multiplies the adapting parameters: the key, 1 for the bias, or
    both.
    """
    if not head.weight_adapts:
        of_keys = torch.zeros_like(of_keys)
    return of_keys + 1 if head.bias_adapts else of_keys
