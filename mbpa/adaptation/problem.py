"""One batch of adaptations, stated without a word on how it will be computed.

For each of B queries, with its K neighbours and their weights: start from the head's parameters,
let the rule lower Σ_k w_k loss(head(h_k), v_k), evaluate the adapted head at the query, forget it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from mbpa.adaptation.losses import CROSS_ENTROPY, SQUARED_ERROR, Loss
from mbpa.rules import Rule


@dataclass(frozen=True, eq=False)
class LinearHead:
    """`outputs = inputs Wᵀ + b`, and which of the two adapt."""

    weight: Float[Tensor, "C D"]
    bias: Float[Tensor, "C"] | None
    weight_adapts: bool
    bias_adapts: bool

    def __call__(self, inputs: Float[Tensor, "... D"]) -> Float[Tensor, "... C"]:
        return nn.functional.linear(inputs, self.weight, self.bias)


@dataclass(frozen=True, eq=False)
class Problem:
    """What is to be adapted, to what, by which rule. Tensors share a device and a float dtype."""

    head: nn.Module
    rule: Rule
    loss: str | Loss
    adapting: tuple[str, ...]
    """Names of the head's parameters that adapt."""
    queries: Float[Tensor, "B *D"]
    outputs: Float[Tensor, "B *C"]
    """The head's outputs at the queries, before adaptation."""
    keys: Float[Tensor, "B K *D"]
    values: Shaped[Tensor, "B K *V"]
    weights: Float[Tensor, "B K"]

    @cached_property
    def dtype(self) -> torch.dtype:
        return self.outputs.dtype

    @cached_property
    def linear(self) -> LinearHead | None:
        """The head as a matrix, where it is one and its loss has a derivative in closed form."""
        head = self.head
        if type(head) is not nn.Linear or self.queries.ndim != 2:
            return None
        if self.loss not in (CROSS_ENTROPY, SQUARED_ERROR):
            return None
        if head._forward_hooks or head._forward_pre_hooks or "forward" in vars(head):
            return None  # it may do something else
        bias = None if head.bias is None else head.bias.detach().to(self.dtype)
        weight = head.weight.detach().to(self.dtype)
        return LinearHead(weight, bias, "weight" in self.adapting, "bias" in self.adapting)

    @cached_property
    def activation_bytes(self) -> int:
        """What autograd keeps of the head's forward for one neighbour."""
        kept = 0

        def keep(tensor: Tensor) -> Tensor:
            nonlocal kept
            kept += 0 if isinstance(tensor, nn.Parameter) else tensor.nbytes
            return tensor

        dtype = next(self.head.parameters()).dtype
        key = self.keys[:1, 0].to(dtype, copy=True)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            self.head(key)
        return kept

    def rows(self, rows: slice) -> Problem:
        """The same for some of the queries."""
        tensors = ("queries", "outputs", "keys", "values", "weights")
        return replace(self, **{name: getattr(self, name)[rows] for name in tensors})


@dataclass(frozen=True, eq=False)
class Adaptation:
    """What came of it."""

    outputs: Float[Tensor, "B *C"]
    """The adapted heads' outputs at their queries."""
    change: Float[Tensor, "B"] | None
    """‖θˣ − θ‖ of each query, where it was asked for."""
    path: str
    """How it was computed."""
    seconds: dict[str, float]
    """What that and each other way was estimated to take for a query."""

    def rows(self, rows: slice) -> Adaptation:
        """What came of it for some of the queries."""
        change = None if self.change is None else self.change[rows]
        return replace(self, outputs=self.outputs[rows], change=change)
