"""The statement of a batch of adaptations, independent of how it is computed.

For each of B queries, with its K neighbours and their weights: start from the head's parameters,
let the rule lower Σ_k w_k loss(head(h_k), v_k), evaluate the adapted head at the query, discard it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from mbpa.adaptation.losses import CROSS_ENTROPY, SQUARED_ERROR, Loss
from mbpa.rules import MAP, Gradient, Rule

MAX_WIDENED_BYTES = 1 << 26  # of a weight that is converted to a higher precision at a time
SPLIT_DTYPES = torch.float32, torch.bfloat16  # of inputs and weight, for products of split inputs
ELEMENTWISE = (
    nn.ReLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.GELU,
    nn.SiLU,
    nn.ELU,
    nn.LeakyReLU,
    nn.Softplus,
)


@dataclass(frozen=True, eq=False)
class LinearHead:
    """A linear layer, `outputs = inputs Wᵀ + b`, and whether W and b adapt.

    W and b may have a lower precision than the inputs; outputs have that of the inputs.
    """

    weight: Float[Tensor, "C D"]
    bias: Float[Tensor, "C"] | None
    weight_adapts: bool
    bias_adapts: bool

    @staticmethod
    def find(module: nn.Module, adapting: tuple[str, ...]) -> LinearHead | None:
        """Return a module as a `LinearHead`, or `None` unless it is a plain `nn.Linear`.

        Args:
            module: the head.
            adapting: names of the parameters that adapt.
        """
        if type(module) is not nn.Linear or _does_more(module):
            return None
        bias = None if module.bias is None else module.bias.detach()
        adapts = [name in adapting for name in ("weight", "bias")]
        return LinearHead(module.weight.detach(), bias, *adapts)

    @property
    def adapts(self) -> bool:
        return self.weight_adapts or self.bias_adapts

    def __call__(self, inputs: Float[Tensor, "... D"]) -> Float[Tensor, "... C"]:
        weight, dtype = self.weight, inputs.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        if weight.dtype == dtype or weight.numel() * inputs.itemsize <= MAX_WIDENED_BYTES:
            return nn.functional.linear(inputs, weight.to(dtype), bias)
        outputs = multiply_narrow(inputs.flatten(0, -2), weight)
        outputs = outputs if bias is None else outputs.add_(bias)
        return outputs.view(*inputs.shape[:-1], len(weight))

    def widen(self, dtype: torch.dtype) -> LinearHead:
        """Return this head with parameters of this precision."""
        bias = None if self.bias is None else self.bias.to(dtype)
        return replace(self, weight=self.weight.to(dtype), bias=bias)

    def compute_squared_lengths(self, inputs: Float[Tensor, "*K D"]) -> Float[Tensor, "*K"]:
        """Return the squared lengths of what multiplies the adapting parameters.

        That is the inputs for the weight, 1 for the bias, or both.
        """
        lengths: Tensor = torch.linalg.vector_norm(inputs, dim=-1).square_()
        return self.weight_adapts * lengths + self.bias_adapts


@dataclass(frozen=True, eq=False)
class Problem:
    """A batch of adaptations: head, rule, queries and neighbours.

    All floating-point tensors share one device and dtype.
    """

    head: nn.Module
    rule: Rule | MAP
    loss: str | Loss
    adapting: tuple[str, ...]
    """Names of the head's parameters that adapt."""
    queries: Float[Tensor, "B *D"]
    outputs: Float[Tensor, "B *C"]
    """The head's outputs at the queries, before adaptation."""
    keys: Float[Tensor, "B K *D"]
    values: Shaped[Tensor, "B K *V"]
    weights: Float[Tensor, "B K"]
    dots: Float[Tensor, "B K"] | None = None
    """Inner products of the queries with their neighbours, if known."""

    @property
    def form(self) -> object:
        """Everything besides the head that a plan depends on; equal for problems of one form."""
        shapes = self.queries.shape, self.keys.shape, self.values.shape, self.outputs.shape
        # Not the rule itself: a user's own may be mutable or unhashable.
        has_rates = (bool(getattr(self.rule, name, 0)) for name in ("decay", "momentum"))
        rule = type(self.rule), getattr(self.rule, "steps", None), *has_rates
        kind = self.linear is None, self.layers is None, self.loss_name, self.adapting
        return shapes, kind, rule, self.dtype, self.queries.device

    @property
    def step_rule(self) -> Rule:
        """The rule, for paths that take steps."""
        assert isinstance(self.rule, Rule)  # the plan guarantees it
        return self.rule

    @property
    def gradient(self) -> Gradient:
        """The rule, for paths that take plain gradient steps."""
        assert isinstance(self.rule, Gradient)  # the plan guarantees it
        return self.rule

    @property
    def loss_name(self) -> str:
        """Name of the loss; "own" for a user's function."""
        return self.loss if isinstance(self.loss, str) else "own"

    @cached_property
    def dtype(self) -> torch.dtype:
        return self.outputs.dtype

    @cached_property
    def linear(self) -> LinearHead | None:
        """The head as a `LinearHead`, or `None` unless it is linear and the loss is built in."""
        if why_not_linear(self.head, self.loss, self.queries.shape[1:]):
            return None
        return LinearHead.find(self.head, self.adapting)

    @cached_property
    def at_queries(self) -> Float[Tensor, "B C"]:
        """A linear head's outputs at the queries, in the precision of the adaptation.

        `outputs` come from the head itself, whose precision may be lower.
        """
        assert self.linear is not None
        is_narrow = self.head.weight.dtype != self.dtype
        return self.linear(self.queries) if is_narrow else self.outputs

    @cached_property
    def layers(self) -> tuple[LinearHead | nn.Module, ...] | None:
        """The head's linear layers and activations in the order they run.

        `None` unless the head is a `Sequential` of nothing else and the loss is built in.
        """
        if type(self.head) is not nn.Sequential or self.queries.ndim != 2:
            return None
        if self.loss not in (CROSS_ENTROPY, SQUARED_ERROR):
            return None
        modules = list(self.head.named_modules(remove_duplicate=False))
        if not all(_is_layer(module) for _, module in modules):
            return None
        linear = [module for _, module in modules if type(module) is nn.Linear]
        tensors = [tensor for module in linear for tensor in module.parameters()]
        if not linear or len(set(tensors)) < len(tensors):  # tied parameters move together
            return None
        return tuple(
            self._linear_layer(name, module) if type(module) is nn.Linear else _make_pure(module)
            for name, module in modules
            if type(module) in (nn.Linear, *ELEMENTWISE)
        )

    def _linear_layer(self, name: str, module: nn.Linear) -> LinearHead:
        bias = None if module.bias is None else module.bias.detach().to(self.dtype)
        weight = module.weight.detach().to(self.dtype)
        adapts = [f"{name}.{kind}" in self.adapting for kind in ("weight", "bias")]
        return LinearHead(weight, bias, *adapts)

    def rows(self, rows: slice | Tensor) -> Problem:
        """Return the problem for some of the queries."""
        names = ("queries", "outputs", "keys", "values", "weights")
        parts: dict[str, Any] = {name: getattr(self, name)[rows] for name in names}
        return replace(self, **parts, dots=None if self.dots is None else self.dots[rows])


@dataclass(frozen=True, eq=False)
class ActiveReport:
    """How much the active vocabulary left out, per query."""

    sizes: Int[Tensor, "B"]
    """The number of active classes; all of them if the query was adapted exactly."""
    rest: Float[Tensor, "B"]
    """The adapted probability of all other classes together."""
    active_bound: Float[Tensor, "B"]
    """No log-probability of an active class is wrong by more than this, apart from rounding."""
    bound: Float[Tensor, "B"]
    """No log-probability of any class is wrong by more than this, apart from rounding."""

    @staticmethod
    def make_exact(outputs: Float[Tensor, "B C"]) -> ActiveReport:
        """Return the report on queries that were adapted exactly."""
        sizes = torch.full(outputs.shape[:1], outputs.shape[1], device=outputs.device)
        return ActiveReport(sizes, *torch.zeros_like(outputs[:, :3]).unbind(1))

    @staticmethod
    def concatenate(parts: Sequence[ActiveReport]) -> ActiveReport:
        """Concatenate the reports on several batches of queries."""
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        return ActiveReport(*map(torch.cat, columns))

    def rows(self, rows: slice) -> ActiveReport:
        """Return the report on some of the queries."""
        return ActiveReport(*(column[rows] for column in vars(self).values()))

    def with_rows(self, rows: Int[Tensor, "R"], other: ActiveReport) -> ActiveReport:
        """Return this report with the given rows replaced by the rows of `other`."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return ActiveReport(*(old.index_copy(0, rows, new) for old, new in pairs))


@dataclass(frozen=True, eq=False)
class Adaptation:
    """The solution of a `Problem`."""

    outputs: Float[Tensor, "B *C"]
    """The adapted heads' outputs at their queries."""
    change: Float[Tensor, "B"] | None
    """‖θˣ − θ‖ of each query, if requested."""
    path: str
    """Name of the path that computed it."""
    seconds: dict[str, float]
    """Estimated seconds per query, for each path that could have computed it."""
    report: ActiveReport | None = None
    """What an active vocabulary left out, if one was used and a report was requested."""

    def rows(self, rows: slice) -> Adaptation:
        """Return the solution for some of the queries."""
        change = None if self.change is None else self.change[rows]
        report = None if self.report is None else self.report.rows(rows)
        return replace(self, outputs=self.outputs[rows], change=change, report=report)

    def with_rows(self, rows: Int[Tensor, "R"], other: Adaptation) -> Adaptation:
        """Return this solution with the given rows replaced by the rows of `other`."""
        change, report = self.change, self.report
        if change is not None and other.change is not None:
            change = change.index_copy(0, rows, other.change)
        if report is not None and other.report is not None:
            report = report.with_rows(rows, other.report)
        outputs = self.outputs.index_copy(0, rows, other.outputs)
        return replace(self, outputs=outputs, change=change, report=report)

    @staticmethod
    def concatenate(parts: Sequence[Adaptation]) -> Adaptation:
        """Concatenate the solutions for several batches of queries, computed by one path."""
        if len(parts) == 1:
            return parts[0]
        changes = [part.change for part in parts if part.change is not None]
        reports = [part.report for part in parts if part.report is not None]
        return replace(
            parts[0],
            outputs=torch.cat([part.outputs for part in parts]),
            change=torch.cat(changes) if changes else None,
            report=ActiveReport.concatenate(reports) if reports else None,
        )


def multiply_narrow(
    inputs: Float[Tensor, "N D"], weight: Float[Tensor, "C D"]
) -> Float[Tensor, "N C"]:
    """Return `inputs weightᵀ` in the inputs' precision, without a copy of the weight in it.

    On a GPU, float32 inputs are split into three bfloat16 numbers each, which is exact to 2⁻²⁴.
    Otherwise the weight is converted in parts.
    """
    if weight.device.type == "cuda" and (inputs.dtype, weight.dtype) == SPLIT_DTYPES:
        high = inputs.to(weight.dtype)
        middle = (inputs - high).to(weight.dtype)
        low = (inputs - high - middle).to(weight.dtype)
        parts = torch.cat([low, middle, high])
        products = torch.mm(parts, weight.mT, out_dtype=inputs.dtype).view(3, len(inputs), -1)
        return products.sum(0)
    rows = max(1, MAX_WIDENED_BYTES // (weight.shape[1] * inputs.itemsize))
    outputs = inputs.new_empty(len(inputs), len(weight))
    for start in range(0, len(weight), rows):
        part = weight[start : start + rows].to(inputs.dtype)
        torch.mm(inputs, part.mT, out=outputs[:, start : start + rows])
    return outputs


def why_not_linear(head: nn.Module, loss: str | Loss, key_shape: tuple[int, ...]) -> str | None:
    """Return why the closed form for linear heads does not apply, or `None` if it does.

    It applies to a plain `nn.Linear`, flat keys and a built-in loss.
    """
    if type(head) is not nn.Linear:
        return f"the head is a {type(head).__name__}"
    if _does_more(head):
        return "the head has hooks or a forward of its own"
    if len(key_shape) != 1:
        return f"keys have shape {tuple(key_shape)}"
    if loss not in (CROSS_ENTROPY, SQUARED_ERROR):
        return f"the loss is {getattr(loss, '__qualname__', loss)}"
    return None


def _does_more(module: nn.Module) -> bool:
    """Return whether hooks or a replaced `forward` change what the module computes."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in hooks) or "forward" in vars(module)


def _is_layer(module: nn.Module) -> bool:
    """Return whether `Problem.layers` supports this module, for flat inputs."""
    if _does_more(module):
        return False
    if type(module) is nn.Dropout:
        return not module.training
    if type(module) is nn.Flatten:
        return module.start_dim in (1, -1) and module.end_dim in (1, -1)
    return type(module) in (nn.Sequential, nn.Linear, nn.Identity, *ELEMENTWISE)


def _make_pure(activation: nn.Module) -> nn.Module:
    """Return the activation, or a copy of it that does not modify its input."""
    if getattr(activation, "inplace", False):
        activation = copy.copy(activation)
        activation.inplace = False  # type: ignore[assignment]  # torch types only tensors, modules
    return activation
