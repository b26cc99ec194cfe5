"""Ways to train networks on a stream of tasks: plainly, or with a defence against forgetting.

A learner holds a stack of networks (`networks.Stack`) and takes one Adam step per batch. Learners
differ only in what they do besides. The contents of the buffers are decided elsewhere, so that
every method, ours included, stores exactly the same examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from experiments.networks import Parameters, Stack, cross_entropies


class Learner:
    """Plain training: each batch is seen once and nothing is stored.

    Args:
        stack: the networks, trained in place.
        lr: learning rate of Adam.
    """

    def __init__(self, stack: Stack, lr: float) -> None:
        self.stack = stack
        self.optimizer = torch.optim.Adam(stack.params, lr=lr, fused=True)

    def learn(self, inputs: Float[Tensor, "S B I"], labels: Int[Tensor, "S B"]) -> None:
        """Take one step on one batch per network."""
        # The loss is a sum over networks, so each network's gradient is that of its own loss.
        gradients = torch.autograd.grad(self._losses(inputs, labels).sum(), self.stack.params)
        self._step(list(gradients))

    def _losses(
        self, inputs: Float[Tensor, "S B I"], labels: Int[Tensor, "S B"]
    ) -> Float[Tensor, "S"]:
        return cross_entropies(self.stack(inputs), labels)

    def _step(self, gradients: Parameters) -> None:
        for param, gradient in zip(self.stack.params, gradients, strict=True):
            param.grad = gradient.contiguous()  # fused Adam silently requires contiguous gradients
        self.optimizer.step()

    # Checkpoints

    def state(self) -> dict[str, Tensor]:
        """Return the tensors from which `restore` rebuilds this learner."""
        tensors = {f"param.{i}": p.detach() for i, p in enumerate(self.stack.params)}
        for i, param in enumerate(self.stack.params):
            for name, value in self.optimizer.state[param].items():
                tensors[f"adam.{i}.{name}"] = value
        return tensors | {f"own.{name}": tensor for name, tensor in self._own().items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from the point at which `state` was called."""
        with torch.no_grad():
            for i, param in enumerate(self.stack.params):
                param.copy_(tensors[f"param.{i}"])
                kept: dict[str, Any] = {}
                for name, value in tensors.items():
                    if name.startswith(f"adam.{i}."):
                        step = name.endswith(".step") and not param.is_cuda
                        kept[name.split(".", 2)[2]] = value.cpu() if step else value.to(param)
                self.optimizer.state[param].update(kept)
        device = self.stack.params[0].device
        self._set_own(
            {name[4:]: t.to(device) for name, t in tensors.items() if name.startswith("own.")}
        )

    def _own(self) -> dict[str, Tensor]:
        return {}

    def _set_own(self, tensors: Mapping[str, Tensor]) -> None: ...


class EWC(Learner):
    """Elastic weight consolidation (Kirkpatrick et al. 2017): `½ λ Σ_t Σ_i F_ti (θ_i − θ*_ti)²`.

    F_t is the diagonal of the true Fisher information at the end of task t, with labels drawn from
    the network's own predictions. A sum of parabolas is itself a parabola, so two tensors represent
    all tasks exactly: `A = Σ F_t` and `B = Σ F_t θ*_t`, with gradient `λ (A θ − B)`.

    Args:
        strength: λ, one value per network.
    """

    def __init__(self, stack: Stack, lr: float, strength: Float[Tensor, "S"]) -> None:
        super().__init__(stack, lr)
        self.strength = strength
        self.precisions = [torch.zeros_like(param) for param in stack.params]
        self.pulls = [torch.zeros_like(param) for param in stack.params]

    def learn(self, inputs: Float[Tensor, "S B I"], labels: Int[Tensor, "S B"]) -> None:
        gradients = torch.autograd.grad(self._losses(inputs, labels).sum(), self.stack.params)
        with torch.no_grad():
            held = zip(gradients, self.precisions, self.stack.params, self.pulls, strict=True)
            self._step(
                [
                    slope + like(self.strength, param) * (precision * param - pull)
                    for slope, precision, param, pull in held
                ]
            )

    def consolidate(self, inputs: Float[Tensor, "S N I"], uniform: Float[Tensor, "S N"]) -> None:
        """Finish a task, given examples of it and one random number per example to draw labels
        with.
        """
        with torch.no_grad():
            fisher = diagonal_fisher(self.stack, inputs, uniform)
            for i, param in enumerate(self.stack.params):
                self.precisions[i] += fisher[i]
                self.pulls[i] += fisher[i] * param

    def _own(self) -> dict[str, Tensor]:
        both = {"precision": self.precisions, "pull": self.pulls}
        return {f"{name}.{i}": t for name, tensors in both.items() for i, t in enumerate(tensors)}

    def _set_own(self, tensors: Mapping[str, Tensor]) -> None:
        count = len(self.stack.params)
        self.precisions = [tensors[f"precision.{i}"] for i in range(count)]
        self.pulls = [tensors[f"pull.{i}"] for i in range(count)]


def diagonal_fisher(
    stack: Stack, inputs: Float[Tensor, "S N I"], uniform: Float[Tensor, "S N"]
) -> Parameters:
    """Return `F_i = E_x E_y~p(y|x) (∂ log p(y|x) / ∂θ_i)²`, with one y drawn per x by a number in
    [0, 1).

    The gradient of one example with respect to a layer's weights is `x δᵀ`. Its squares are `x²
    (δ²)ᵀ`, and their mean is a single matrix product, so no per-example gradient is ever built.
    """
    outputs = stack.layers(inputs)
    shares = outputs[-1].softmax(-1)
    below_drawn = shares.cumsum(-1) <= uniform[..., None]
    drawn = below_drawn.sum(-1).clamp_max(shares.shape[-1] - 1)
    slopes = shares - functional.one_hot(drawn, shares.shape[-1])
    count = inputs.shape[1]
    fisher: Parameters = []
    for layer in reversed(range(len(outputs))):
        below = outputs[layer - 1].relu() if layer else inputs
        squares = slopes.square()
        fisher += [squares.sum(1) / count, below.square().mT @ squares / count]  # bias, weight
        slopes = (slopes @ stack.params[2 * layer].mT) * (below > 0) if layer else slopes
    return fisher[::-1]


@dataclass(frozen=True, eq=False)
class Batch:
    """Examples from the buffers, one row per network."""

    inputs: Float[Tensor, "S B I"]
    labels: Int[Tensor, "S B"]
    logits: Float[Tensor, "S B C"] | None = None
    """The network's outputs when the examples were stored, for methods that use them."""


class Rehearsing(Learner):
    """A learner that receives examples from its buffer with every batch."""

    batches = 1
    """Number of independent buffer batches needed per step."""

    def rehearse(
        self,
        inputs: Float[Tensor, "S B I"],
        labels: Int[Tensor, "S B"],
        stored: tuple[Batch, ...],
    ) -> None:
        """Take one step on a new batch and on stored examples."""
        loss = self._losses(inputs, labels) + self._rehearsal_loss(stored)
        self._step(list(torch.autograd.grad(loss.sum(), self.stack.params)))

    def _rehearsal_loss(self, stored: tuple[Batch, ...]) -> Float[Tensor, "S"]:
        raise NotImplementedError


class Replay(Rehearsing):
    """Experience replay: the loss on a buffer batch is added to the loss on the new batch."""

    def _rehearsal_loss(self, stored: tuple[Batch, ...]) -> Float[Tensor, "S"]:
        return cross_entropies(self.stack(stored[0].inputs), stored[0].labels)


class DERPlusPlus(Rehearsing):
    """Dark experience replay ++ (Buzzega et al. 2020): `α ‖z − z_stored‖² + β CE`, where each term
    has a batch of its own and z_stored are the logits at the time the example was stored.

    Args:
        alpha: weight of the squared distance between logits, averaged over batch and classes; one
            value per network.
        beta: weight of the cross-entropy of the labels, one value per network.
    """

    batches = 2

    def __init__(
        self, stack: Stack, lr: float, alpha: Float[Tensor, "S"], beta: Float[Tensor, "S"]
    ) -> None:
        super().__init__(stack, lr)
        self.alpha, self.beta = alpha, beta

    def _rehearsal_loss(self, stored: tuple[Batch, ...]) -> Float[Tensor, "S"]:
        first, second = stored
        assert first.logits is not None  # the buffers of this learner store logits
        apart = (self.stack(first.inputs) - first.logits).square().mean((1, 2))
        right = cross_entropies(self.stack(second.inputs), second.labels)
        return self.alpha * apart + self.beta * right


class AGEM(Rehearsing):
    """Averaged gradient episodic memory (Chaudhry et al. 2019): if a gradient would raise the loss
    on a buffer batch, its component that does so is removed:

        g ← g − (g·r / r·r) r   where g·r < 0 and r is the gradient on the buffer batch
    """

    def rehearse(
        self,
        inputs: Float[Tensor, "S B I"],
        labels: Int[Tensor, "S B"],
        stored: tuple[Batch, ...],
    ) -> None:
        params, (old,) = self.stack.params, stored
        new = torch.autograd.grad(self._losses(inputs, labels).sum(), params)
        reference = torch.autograd.grad(self._losses(old.inputs, old.labels).sum(), params)
        self._step(project_gradients(list(new), list(reference)))


def project_gradients(gradients: Parameters, reference: Parameters) -> Parameters:
    """Return each network's gradient without its component against the reference gradient."""
    dot = sum((g * r).flatten(1).sum(1) for g, r in zip(gradients, reference, strict=True))
    square = sum(r.flatten(1).square().sum(1) for r in reference)
    assert isinstance(dot, Tensor)
    assert isinstance(square, Tensor)
    against: Bool[Tensor, "S"] = (dot < 0) & (square > 0)
    factor = torch.where(against, dot / square.clamp_min(1e-30), torch.zeros_like(dot))
    return [g - like(factor, g) * r for g, r in zip(gradients, reference, strict=True)]


def like(each: Float[Tensor, "S"], params: Float[Tensor, "S ..."]) -> Float[Tensor, "S ..."]:
    """Reshape one number per network so that it broadcasts over the parameters."""
    return each.view(-1, *(1,) * (params.ndim - 1))
