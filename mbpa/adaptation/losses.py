"""Losses of neighbours' outputs against their values, one number per neighbour.

The derivatives of the two built-in losses are known in closed form, which the fast paths rely on. A
user's own loss goes through autograd.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn import functional

Loss = Callable[[Tensor, Tensor], Tensor]
CROSS_ENTROPY, SQUARED_ERROR = "cross_entropy", "squared_error"


def compute_losses(
    loss: str | Loss, outputs: Float[Tensor, "K *C"], values: Shaped[Tensor, "K *V"]
) -> Float[Tensor, "K"]:
    """Return the loss of each output: −log p(value), ½‖output − value‖², or the user's own."""
    if loss == CROSS_ENTROPY:
        return functional.cross_entropy(outputs, values, reduction="none")
    if loss == SQUARED_ERROR:
        return (outputs - values).square().reshape(len(outputs), -1).sum(1) / 2
    assert callable(loss)  # checked by Adapted
    losses = loss(outputs, values)
    if losses.shape != outputs.shape[:1]:
        raise ValueError(
            f"loss must return one number per neighbour, shape {tuple(outputs.shape[:1])}, "
            f"got {tuple(losses.shape)}"
        )
    return losses


def compute_residual(
    loss: str, outputs: Float[Tensor, "*K C"], values: Shaped[Tensor, "*V"]
) -> Float[Tensor, "*K C"]:
    """Return the derivative of a built-in loss with respect to the output.

    That is softmax − one-hot for cross-entropy, and output − value for squared error.
    """
    if loss == SQUARED_ERROR:
        return outputs - values
    return subtract_one_hot(outputs.softmax(-1), values)


def subtract_one_hot(
    probabilities: Float[Tensor, "*K C"], labels: Shaped[Tensor, "*K"]
) -> Float[Tensor, "*K C"]:
    ones = torch.ones_like(labels, dtype=probabilities.dtype)
    return probabilities.scatter_add(-1, labels[..., None], -ones[..., None])
