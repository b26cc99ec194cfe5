"""Any rule: every query in a chunk has its own parameters, and all are updated at once.

`solve_functional` takes any head and loss, through autograd. `solve_dense` takes a linear head,
whose gradient is Σ_k w_k (residual of k) h_kᵀ in closed form. Both run the steps of one query under
`vmap`. A head that `vmap` cannot run (recurrent layers, branches on values) is adapted query by
query, with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mbpa.adaptation.losses import CROSS_ENTROPY, compute_losses, compute_residual
from mbpa.adaptation.output_cache import StoredOutputs
from mbpa.adaptation.problem import Problem
from mbpa.device import ran_out_of_memory, takes_kernels
from mbpa.modules.sharing import share
from mbpa.rules import Adam, Params, RMSprop

Forward = Callable[[Params, Tensor], Tensor]
MAX_FUSED_NEIGHBORS = 128
Slope = Callable[[Params, Tensor, Tensor, Tensor], Params]


def solve_functional(problem: Problem) -> tuple[Float[Tensor, "B *C"], Float[Tensor, "B"]]:
    """Return the adapted outputs and norms of the change, computed by autograd."""
    start, forward = _split_head(problem)

    def objective(params: Params, keys: Tensor, values: Tensor, weights: Tensor) -> Tensor:
        return weights @ compute_losses(problem.loss, forward(params, keys), values)

    return _adapt_each(problem, start, forward, torch.func.grad(objective))


def square_each_slope(
    problem: Problem, directions: Float[Tensor, "B K *C"]
) -> tuple[Float[Tensor, "B K"], Float[Tensor, "B K *C"]]:
    """Return ‖∇_θ (outputs · direction)‖² of each neighbour before any step, and the outputs.

    The gradient is computed by autograd.
    """
    start, forward = _split_head(problem)

    def along(params: Params, key: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        outputs = forward(params, key[None])[0]
        return (outputs * direction).sum(), outputs

    def square(key: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        slopes, outputs = torch.func.grad(along, has_aux=True)(start, key, direction)
        return torch.stack([slope.square().sum() for slope in slopes.values()]).sum(), outputs

    # Process as many at once as there are queries, each of which will have its own parameters.
    inputs = [tensor.flatten(0, 1) for tensor in (problem.keys, directions)]
    found = _map_rows(problem, square, inputs, at_once=max(1, len(problem.queries)))
    squares, outputs = (each.unflatten(0, problem.weights.shape) for each in found)
    return squares, outputs


def _split_head(problem: Problem) -> tuple[Params, Forward]:
    """Return the parameters that adapt, and the head as a function of them."""
    shell = _copy_shell(problem.head)
    tensors = {
        name: tensor.detach().to(problem.dtype) if tensor.is_floating_point() else tensor
        for name, tensor in [*shell.named_parameters(), *shell.named_buffers()]
    }
    tensors = {name: _make_differentiable(tensor) for name, tensor in tensors.items()}
    start = {name: tensors.pop(name) for name in problem.adapting}

    def forward(params: Params, inputs: Tensor) -> Tensor:
        arguments = (inputs.clone(),)  # a head may work in place
        outputs: Tensor = torch.func.functional_call(shell, {**tensors, **params}, arguments)
        return outputs

    return start, forward


def solve_dense(
    problem: Problem, stored: StoredOutputs | None, want_change: bool
) -> tuple[Float[Tensor, "B C"], Float[Tensor, "B"] | None]:
    """Return the adapted outputs and norms of the change, for a linear head.

    The gradient is computed in closed form. `stored` holds raw outputs.
    """
    if is_dense_fused(problem) and not want_change:
        return _run_kernel(problem, stored), None
    assert problem.linear is not None  # the plan guarantees it
    head = problem.linear.widen(problem.dtype)
    loss = str(problem.loss)
    start = {name: getattr(head, name) for name in problem.adapting}

    def forward(params: Params, inputs: Tensor) -> Tensor:
        weight, bias = params.get("weight", head.weight), params.get("bias", head.bias)
        return nn.functional.linear(inputs, weight, bias)

    def slope(params: Params, keys: Tensor, values: Tensor, weights: Tensor) -> Params:
        slopes = weights[:, None] * compute_residual(loss, forward(params, keys), values)  # K C
        closed = {"weight": slopes.T @ keys, "bias": slopes.sum(0)}
        return {name: closed[name] for name in params}

    return _adapt_each(problem, start, forward, slope)


def is_dense_fused(problem: Problem) -> bool:
    """Return whether one kernel computes a whole step of `solve_dense`."""
    head, rule = problem.linear, problem.rule
    if head is None or not head.weight_adapts or type(rule) not in (RMSprop, Adam):
        return False
    if isinstance(rule, Adam) and rule.beta1**2 > 0.9 * rule.beta2:
        return False  # no bound on the move of a weight fits float16
    is_simple = problem.loss == CROSS_ENTROPY and problem.weights.shape[1] <= MAX_FUSED_NEIGHBORS
    return is_simple and takes_kernels(problem.outputs)


def _run_kernel(problem: Problem, stored: StoredOutputs | None) -> Float[Tensor, "B C"]:
    from mbpa.adaptation.fused.rmsprop_adam import adapt_dense_outputs

    assert problem.linear is not None
    head, rule = problem.linear.widen(problem.dtype), problem.rule
    assert isinstance(rule, RMSprop | Adam)
    rows = stored or StoredOutputs.make_for_call(head(problem.keys))
    return adapt_dense_outputs(
        rows.table,
        rows.unwritten,
        rows.index.contiguous(),
        head.weight,
        head.bias,
        problem.keys,
        problem.queries,
        problem.weights.contiguous(),
        problem.values.contiguous(),
        rule,
        bias_adapts=head.bias_adapts,
    )


def _adapt_each(
    problem: Problem, start: Params, forward: Forward, slope: Slope
) -> tuple[Tensor, Tensor]:
    def adapt(query: Tensor, keys: Tensor, values: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        params, state, rule = start, None, problem.step_rule
        for _ in range(rule.steps):
            grads = slope(params, keys, values, weights)
            params, state = rule.update(params, grads, start, state)
        squares = [(params[name] - start[name]).square().sum() for name in start]
        return forward(params, query[None])[0], torch.stack(squares).sum().sqrt()

    tensors = problem.queries, problem.keys, problem.values, problem.weights
    outputs, change = _map_rows(problem, adapt, tensors)
    return outputs, change


def _map_rows(
    problem: Problem,
    function: Callable[..., tuple[Tensor, ...]],
    tensors: Sequence[Tensor],
    at_once: int | None = None,
) -> tuple[Tensor, ...]:
    """Apply a function to each row of the tensors, all at once if the head supports `vmap`."""
    inputs = [_make_differentiable(tensor) for tensor in tensors]
    try:
        found: tuple[Tensor, ...] = torch.vmap(function, chunk_size=at_once)(*inputs)
    except RuntimeError as error:
        if ran_out_of_memory(error):
            raise
        warnings.warn(
            f"{type(problem.head).__name__} cannot be run for many queries at once, so they are "
            f"adapted one by one: {str(error).splitlines()[0]}",
            stacklevel=2,
        )
        return tuple(map(torch.stack, zip(*map(function, *inputs), strict=True)))
    return found


def _make_differentiable(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor created in inference mode, which autograd would refuse."""
    return tensor.clone() if tensor.is_inference() else tensor


def _copy_shell(head: nn.Module) -> nn.Module:
    """Return a copy of the head for this call alone.

    `functional_call` swaps the parameters of its module, which must be neither the user's nor
    another thread's.
    """
    shell = share(head, {})
    for module in shell.modules():
        module._parameters, module._buffers = dict(module._parameters), dict(module._buffers)
    return shell
