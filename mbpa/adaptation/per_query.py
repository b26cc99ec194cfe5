"""Any rule: every query in a chunk has its own parameters, and all are updated at once.

`functional` takes any head and loss, through autograd. `dense` takes a linear head, whose gradient
is Σ_k w_k (residual of k) h_kᵀ in closed form. Both run the steps of one query under `vmap`. A head
that `vmap` cannot run (recurrent layers, branches on values) is adapted query by query, with a
warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mbpa.adaptation.losses import CROSS_ENTROPY, loss_per_neighbor, residual
from mbpa.adaptation.output_cache import StoredOutputs
from mbpa.adaptation.problem import Problem
from mbpa.device import ran_out_of_memory, takes_kernels
from mbpa.modules.sharing import share
from mbpa.rules import Adam, Params, RMSprop

Forward = Callable[[Params, Tensor], Tensor]
MOST_FUSED = 128  # neighbours
Slope = Callable[[Params, Tensor, Tensor, Tensor], Params]


def functional(problem: Problem) -> tuple[Float[Tensor, "B *C"], Float[Tensor, "B"]]:
    """Return the adapted outputs and norms of the change, computed by autograd."""
    start, forward = _pure_head(problem)

    def objective(params: Params, keys: Tensor, values: Tensor, weights: Tensor) -> Tensor:
        return weights @ loss_per_neighbor(problem.loss, forward(params, keys), values)

    return _each_adapted(problem, start, forward, torch.func.grad(objective))


def each_squared_slope(
    problem: Problem, directions: Float[Tensor, "B K *C"]
) -> tuple[Float[Tensor, "B K"], Float[Tensor, "B K *C"]]:
    """Return ‖∇_θ (outputs · direction)‖² of each neighbour before any step, and the outputs.

    The gradient is computed by autograd.
    """
    start, forward = _pure_head(problem)

    def along(params: Params, key: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        outputs = forward(params, key[None])[0]
        return (outputs * direction).sum(), outputs

    def squared(key: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        slopes, outputs = torch.func.grad(along, has_aux=True)(start, key, direction)
        return torch.stack([slope.square().sum() for slope in slopes.values()]).sum(), outputs

    # Process as many at once as there are queries, each of which will have its own parameters.
    inputs = [tensor.flatten(0, 1) for tensor in (problem.keys, directions)]
    found = _mapped(problem, squared, inputs, at_once=max(1, len(problem.queries)))
    squares, outputs = (each.unflatten(0, problem.weights.shape) for each in found)
    return squares, outputs


def _pure_head(problem: Problem) -> tuple[Params, Forward]:
    """Return the parameters that adapt, and the head as a function of them."""
    shell = shell_of(problem.head)
    tensors = {
        name: tensor.detach().to(problem.dtype) if tensor.is_floating_point() else tensor
        for name, tensor in [*shell.named_parameters(), *shell.named_buffers()]
    }
    tensors = {name: _differentiable(tensor) for name, tensor in tensors.items()}
    start = {name: tensors.pop(name) for name in problem.adapting}

    def forward(params: Params, inputs: Tensor) -> Tensor:
        arguments = (inputs.clone(),)  # a head may work in place
        outputs: Tensor = torch.func.functional_call(shell, {**tensors, **params}, arguments)
        return outputs

    return start, forward


def dense(
    problem: Problem, stored: StoredOutputs | None, want_change: bool
) -> tuple[Float[Tensor, "B C"], Float[Tensor, "B"] | None]:
    """Return the adapted outputs and norms of the change, for a linear head.

    The gradient is computed in closed form. `stored` holds raw outputs.
    """
    if is_fused(problem) and not want_change:
        return _fused(problem, stored), None
    head = problem.linear
    assert head is not None  # the plan guarantees it
    loss = str(problem.loss)
    start = {name: getattr(head, name) for name in problem.adapting}

    def forward(params: Params, inputs: Tensor) -> Tensor:
        weight, bias = params.get("weight", head.weight), params.get("bias", head.bias)
        return nn.functional.linear(inputs, weight, bias)

    def slope(params: Params, keys: Tensor, values: Tensor, weights: Tensor) -> Params:
        slopes = weights[:, None] * residual(loss, forward(params, keys), values)  # K C
        closed = {"weight": slopes.T @ keys, "bias": slopes.sum(0)}
        return {name: closed[name] for name in params}

    return _each_adapted(problem, start, forward, slope)


def is_fused(problem: Problem) -> bool:
    """Return whether one kernel computes a whole step of `dense`."""
    head, rule = problem.linear, problem.rule
    if head is None or not head.weight_adapts or type(rule) not in (RMSprop, Adam):
        return False
    if isinstance(rule, Adam) and rule.beta1**2 > 0.9 * rule.beta2:
        return False  # no bound on the move of a weight fits float16
    is_simple = problem.loss == CROSS_ENTROPY and problem.weights.shape[1] <= MOST_FUSED
    return is_simple and takes_kernels(problem.outputs)


def _fused(problem: Problem, stored: StoredOutputs | None) -> Float[Tensor, "B C"]:
    from mbpa.adaptation.fused.rmsprop_adam import dense_outputs

    head, rule = problem.linear, problem.rule
    assert head is not None
    assert isinstance(rule, RMSprop | Adam)
    rows = stored or StoredOutputs.of_each(head(problem.keys))
    return dense_outputs(
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


def _each_adapted(
    problem: Problem, start: Params, forward: Forward, slope: Slope
) -> tuple[Tensor, Tensor]:
    def adapted(query: Tensor, keys: Tensor, values: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        params, state = start, None
        for _ in range(problem.rule.steps):
            grads = slope(params, keys, values, weights)
            params, state = problem.rule.update(params, grads, start, state)
        squares = [(params[name] - start[name]).square().sum() for name in start]
        return forward(params, query[None])[0], torch.stack(squares).sum().sqrt()

    tensors = problem.queries, problem.keys, problem.values, problem.weights
    outputs, change = _mapped(problem, adapted, tensors)
    return outputs, change


def _mapped(
    problem: Problem,
    function: Callable[..., tuple[Tensor, ...]],
    tensors: Sequence[Tensor],
    at_once: int | None = None,
) -> tuple[Tensor, ...]:
    """Apply a function to each row of the tensors, all at once if the head supports `vmap`."""
    inputs = [_differentiable(tensor) for tensor in tensors]
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


def _differentiable(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor created in inference mode, which autograd would refuse."""
    return tensor.clone() if tensor.is_inference() else tensor


def shell_of(head: nn.Module) -> nn.Module:
    """Return a copy of the head for this call alone.

    `functional_call` swaps the parameters of its module, which must be neither the user's nor
    another thread's.
    """
    shell = share(head, {})
    for module in shell.modules():
        module._parameters, module._buffers = dict(module._parameters), dict(module._buffers)
    return shell
