"""MLP head, gradient steps: exact, without forming each query's weights.

Let x be the inputs of a layer and δ the weighted slopes of the loss by its outputs, with one row r
of each per neighbour and past step, and let a_r be factors known in advance. Then

    ΔW = Σ_r a_r δ_r x_rᵀ,        z(x) = W x + b + Σ_r a_r (x·x_r + 1) δ_r.

The lowest layer that adapts has the same inputs at every step, so K rows are its whole history. A
layer that is so small that its changed weights take fewer numbers than its history stores the
weights instead.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mbpa.adaptation.losses import compute_residual
from mbpa.adaptation.problem import LinearHead, Problem
from mbpa.device import takes_kernels
from mbpa.rules import Gradient

Layer = LinearHead | nn.Module
MAX_FUSED_ROWS = 32  # rows per query up to which our kernel combines them faster
MIN_FUSED_SIZE = 64  # inputs and outputs from which our kernel multiplies faster


def solve_mlp(
    problem: Problem, want_change: bool
) -> tuple[Float[Tensor, "B C"], Float[Tensor, "B"] | None]:
    """Return the adapted outputs, and the norm of the change if `want_change`."""
    below, lowest_layer, above, rule = _divide_layers(problem)
    keys, queries = problem.keys, problem.queries[:, None]
    for layer in below:
        keys, queries = _run_layer(layer, keys), _run_layer(layer, queries)
    lowest = _Lowest(lowest_layer, keys, rule)
    rates = _compute_rates(rule, keys)
    upper = [_make_part(layer, keys, rates, rule) for layer in above]
    weights = problem.weights[..., None]
    for _ in range(rule.steps):
        outputs = lowest.compute_outputs()
        for part in upper:
            outputs = part.forward(outputs)
        slopes = compute_residual(str(problem.loss), outputs, problem.values).mul_(weights)
        for part in reversed(upper):
            slopes = part.backward(slopes)
        lowest.learn(slopes)
    outputs = lowest.apply(queries)
    for part in upper:
        outputs = part.apply(outputs)
    if not want_change:
        return outputs[:, 0], None
    squares = [lowest.square_change(keys.shape[1])]
    for part in upper:
        if isinstance(part, _AdaptingPart):
            squares.append(part.square_change(keys.shape[1]))
    return outputs[:, 0], torch.stack(squares).sum(0).clamp_min(0).sqrt()


def square_slopes(
    problem: Problem, directions: Float[Tensor, "B K C"]
) -> tuple[Float[Tensor, "B K"], Float[Tensor, "B K C"]]:
    """Return ‖∇_θ (outputs · direction)‖² of each neighbour before any step, and the outputs.

    The former is Σ ‖δ‖²(‖x‖² + 1) over the layers that adapt, where x are their inputs and δ is the
    direction propagated back to their outputs.
    """
    below, lowest, above, _ = _divide_layers(problem)
    inputs = problem.keys
    for layer in below:
        inputs = _run_layer(layer, inputs)
    upper = [
        _Frozen(layer) if isinstance(layer, LinearHead) else _Activation(layer) for layer in above
    ]
    lengths = [lowest.compute_squared_lengths(inputs)]
    outputs = _run_layer(lowest, inputs)
    for part in upper:
        if isinstance(part, _Frozen):
            lengths.append(part.layer.compute_squared_lengths(outputs))
        outputs = part.forward(outputs)
    squares, slopes = torch.zeros_like(problem.weights), directions
    for part in reversed(upper):
        if isinstance(part, _Frozen):
            squares.addcmul_(slopes.square().sum(-1), lengths.pop())
        slopes = part.backward(slopes)
    return squares.addcmul_(slopes.square().sum(-1), lengths.pop()), outputs


class _Part(abc.ABC):
    """A layer above the lowest one that adapts, while the steps of B queries are taken."""

    @abc.abstractmethod
    def forward(self, inputs: Float[Tensor, "B K I"]) -> Float[Tensor, "B K O"]:
        """Return the outputs for the neighbours, and keep what `backward` needs."""

    @abc.abstractmethod
    def backward(self, slopes: Float[Tensor, "B K O"]) -> Float[Tensor, "B K I"]:
        """Return the slopes by the inputs; if the layer adapts, take its step."""

    @abc.abstractmethod
    def apply(self, inputs: Float[Tensor, "B 1 I"]) -> Float[Tensor, "B 1 O"]:
        """Return the outputs for the queries after all steps."""


class _AdaptingPart(_Part):
    """A part whose layer adapts."""

    @abc.abstractmethod
    def square_change(self, count: int) -> Float[Tensor, "B"]:
        """Return ‖ΔW‖² + ‖Δb‖² of each query, using `count` rows of its history at a time."""


class _Activation(_Part):
    """An elementwise function; its derivative needs its inputs or its outputs."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._derivative = module, DERIVATIVES[type(module)]

    def forward(self, inputs: Float[Tensor, "B K I"]) -> Float[Tensor, "B K I"]:
        outputs = self.apply(inputs)
        self._kept = outputs if type(self._module) in BY_OUTPUT else inputs
        return outputs

    def backward(self, slopes: Float[Tensor, "B K I"]) -> Float[Tensor, "B K I"]:
        kept = self._kept
        del self._kept
        return self._derivative(self._module, slopes, kept)

    def apply(self, inputs: Float[Tensor, "B K I"]) -> Float[Tensor, "B K I"]:
        outputs: Tensor = self._module(inputs)
        return outputs


class _Frozen(_Part):
    """A linear layer that does not adapt."""

    def __init__(self, layer: LinearHead) -> None:
        self.layer, self._weights = layer, _SharedWeights(layer)

    def forward(self, inputs: Float[Tensor, "B K I"]) -> Float[Tensor, "B K O"]:
        return self._weights.forward(inputs)

    def backward(self, slopes: Float[Tensor, "B K O"]) -> Float[Tensor, "B K I"]:
        return self._weights.backward(slopes)

    def apply(self, inputs: Float[Tensor, "B 1 I"]) -> Float[Tensor, "B 1 O"]:
        return self._weights.forward(inputs)


class _Upper(_AdaptingPart):
    """A linear layer that adapts, with its history: every step adds K rows."""

    def __init__(
        self, layer: LinearHead, keys: Float[Tensor, "B K D"], rates: Float[Tensor, "R"]
    ) -> None:
        outs, ins = layer.weight.shape
        self._layer, self._weights, self._rates = layer, _SharedWeights(layer), rates
        self._slopes = keys.new_empty(len(keys), len(rates), outs)
        self._inputs = keys.new_empty(len(keys), len(rates), ins if layer.weight_adapts else 0)
        self._seen = 0

    def forward(self, inputs: Float[Tensor, "B K I"]) -> Float[Tensor, "B K O"]:
        if self._layer.weight_adapts:
            self._inputs[:, self._seen : self._seen + inputs.shape[1]] = inputs
        return self.apply(inputs)

    def backward(self, slopes: Float[Tensor, "B K O"]) -> Float[Tensor, "B K I"]:
        below, past = self._weights.backward(slopes), self._get_history()
        if self._layer.weight_adapts:
            below.baddbmm_((slopes @ past.slopes.mT).mul_(past.rates), past.inputs)
        self._slopes[:, self._seen : self._seen + slopes.shape[1]] = slopes
        self._seen += slopes.shape[1]
        return below

    def apply(self, inputs: Float[Tensor, "B K I"]) -> Float[Tensor, "B K O"]:
        return self._get_history().add_to(_run_layer(self._layer, inputs), inputs)

    def square_change(self, count: int) -> Float[Tensor, "B"]:
        return self._get_history().square(count)

    def _get_history(self) -> _History:
        rates = self._rates[len(self._rates) - self._seen :]
        return _History(
            self._layer, self._inputs[:, : self._seen], self._slopes[:, : self._seen], rates
        )


class _FusedUpper(_AdaptingPart):
    """The same as `_Upper` in one kernel, which takes past rows as pairs in half precision."""

    def __init__(
        self, layer: LinearHead, keys: Float[Tensor, "B K D"], rates: Float[Tensor, "R"]
    ) -> None:
        from mbpa.adaptation.fused import mlp_history, shared_product

        self._add_past, self._join_pairs = mlp_history.add_past, shared_product.join_pairs
        self._layer, self._weights, self._rates = layer, _SharedWeights(layer), rates
        (outs, ins), rows = layer.weight.shape, len(rates) + 1  # one more for the query
        self._slopes = mlp_history.allocate_pairs(keys, rows, outs)  # 2 B R O
        self._inputs = mlp_history.allocate_pairs(keys, rows, ins)  # 2 B R I
        self._seen = 0

    def forward(self, inputs: Float[Tensor, "B K I"]) -> Float[Tensor, "B K O"]:
        return self.apply(inputs)

    def backward(self, slopes: Float[Tensor, "B K O"]) -> Float[Tensor, "B K I"]:
        below = self._weights.backward(slopes)
        past = self._slopes, self._inputs, self._get_rates()
        self._add_past(below, slopes, *past, one=False)
        self._seen += slopes.shape[1]
        return below

    def apply(self, inputs: Float[Tensor, "B K I"]) -> Float[Tensor, "B K O"]:
        outputs = self._weights.forward(inputs)
        past = self._inputs, self._slopes, self._get_rates()
        self._add_past(outputs, inputs, *past, one=self._layer.bias_adapts)
        return outputs

    def square_change(self, count: int) -> Float[Tensor, "B"]:
        parts = []
        some = max(1, self._inputs.shape[1] // 16)  # queries whose pairs are joined at a time
        for inputs, slopes in zip(
            self._inputs.split(some, 1), self._slopes.split(some, 1), strict=True
        ):
            history = _History(
                self._layer,
                self._join_pairs(inputs[:, :, : self._seen]),
                self._join_pairs(slopes[:, :, : self._seen]),
                self._get_rates(),
            )
            parts.append(history.square(count))
        return torch.cat(parts)

    def _get_rates(self) -> Float[Tensor, "R"]:
        return self._rates[len(self._rates) - self._seen :]


class _Whole(_AdaptingPart):
    """A small linear layer that adapts; it stores the change of each query's weights instead."""

    def __init__(self, layer: LinearHead, keys: Float[Tensor, "B K D"], rule: Gradient) -> None:
        self._weights, self._rule = _SharedWeights(layer), rule
        sizes = {"weight": tuple(layer.weight.shape), "bias": (len(layer.weight), 1)}
        adapts = {"weight": layer.weight_adapts, "bias": layer.bias_adapts}
        shapes = {name: (len(keys), *sizes[name]) for name in sizes if adapts[name]}
        self._change = {name: keys.new_zeros(shape) for name, shape in shapes.items()}
        self._velocity = {n: c.clone() for n, c in self._change.items()} if rule.momentum else {}

    def forward(self, inputs: Float[Tensor, "B K I"]) -> Float[Tensor, "B K O"]:
        self._inputs = inputs
        return self.apply(inputs)

    def backward(self, slopes: Float[Tensor, "B K O"]) -> Float[Tensor, "B K I"]:
        below, inputs, rule = self._weights.backward(slopes), self._inputs, self._rule
        del self._inputs
        if "weight" in self._change:
            _combine(below, slopes, self._change["weight"], out=below)
        for name, change in self._change.items():
            factor = inputs if name == "weight" else None
            if rule.momentum:
                _add_products(self._velocity[name], slopes, factor, rule.momentum, 1)
                change.mul_(1 - rule.decay).sub_(self._velocity[name], alpha=rule.rate)
            else:
                _add_products(change, slopes, factor, 1 - rule.decay, -rule.rate)
        return below

    def apply(self, inputs: Float[Tensor, "B K I"]) -> Float[Tensor, "B K O"]:
        outputs = self._weights.forward(inputs)
        if "weight" in self._change:
            outputs.baddbmm_(inputs, self._change["weight"].mT)
        return outputs.add_(self._change["bias"].mT) if "bias" in self._change else outputs

    def square_change(self, count: int) -> Float[Tensor, "B"]:
        squares = [change.flatten(1).square().sum(1) for change in self._change.values()]
        return torch.stack(squares).sum(0)


class _Lowest:
    """The lowest layer that adapts; its inputs never change, so all steps add to the same rows."""

    def __init__(self, layer: LinearHead, keys: Float[Tensor, "B K I"], rule: Gradient) -> None:
        self._layer, self._rule, self._start = layer, rule, _run_layer(layer, keys)
        self._velocity = torch.zeros_like(self._start)
        self._history = _History(layer, keys, self._velocity, keys.new_ones(keys.shape[1]))
        self._gram = self._history.overlap(keys)

    def compute_outputs(self) -> Float[Tensor, "B K O"]:
        """Return the outputs for the neighbours."""
        return _combine(self._start, self._gram, self._history.slopes)

    def learn(self, slopes: Float[Tensor, "B K O"]) -> None:
        rule, total = self._rule, self._history.slopes
        if rule.momentum:
            self._velocity = slopes.add_(self._velocity, alpha=rule.momentum)
        else:
            self._velocity = slopes
        if rule.decay:
            total.mul_(1 - rule.decay)
        total.sub_(self._velocity, alpha=rule.rate)

    def apply(self, inputs: Float[Tensor, "B 1 I"]) -> Float[Tensor, "B 1 O"]:
        """Return the outputs for the queries after all steps."""
        return self._history.add_to(_run_layer(self._layer, inputs), inputs)

    def square_change(self, count: int) -> Float[Tensor, "B"]:
        return self._history.square(count)


class _SharedWeights:
    """Products with a layer's own weights, which all queries share; by a kernel if it is faster."""

    def __init__(self, layer: LinearHead) -> None:
        self._layer, self._pairs = layer, None
        if min(layer.weight.shape) >= MIN_FUSED_SIZE and takes_kernels(layer.weight):
            from mbpa.adaptation.fused import shared_product

            self._pairs = shared_product.split_pairs(layer.weight)
            self._multiply = shared_product.multiply_pairs

    def forward(self, inputs: Float[Tensor, "B K I"]) -> Float[Tensor, "B K O"]:
        if self._pairs is None:
            return _run_layer(self._layer, inputs)
        return self._multiply(inputs, self._pairs.mT, self._layer.bias)

    def backward(self, slopes: Float[Tensor, "B K O"]) -> Float[Tensor, "B K I"]:
        if self._pairs is None:
            return (slopes.flatten(0, 1) @ self._layer.weight).view(*slopes.shape[:2], -1)
        return self._multiply(slopes, self._pairs)


class _History(NamedTuple):
    """The change of a layer's parameters: R rows per query, and a factor a_r for each."""

    layer: LinearHead
    inputs: Float[Tensor, "B R I"]
    slopes: Float[Tensor, "B R O"]
    rates: Float[Tensor, "R"]

    def add_to(
        self, outputs: Float[Tensor, "B K O"], inputs: Float[Tensor, "B K I"]
    ) -> Float[Tensor, "B K O"]:
        """Add the effect of the change to the outputs for these inputs, in place."""
        return outputs.baddbmm_(self.overlap(inputs), self.slopes)

    def overlap(self, inputs: Float[Tensor, "B K J"]) -> Float[Tensor, "B K R"]:
        """Return a_r (x·x_r + 1), with x·x_r only if the weights adapt, and 1 if the bias does."""
        if not self.layer.weight_adapts:
            return self.rates.expand(*inputs.shape[:2], -1)
        products = inputs @ self.inputs.mT
        if not self.layer.bias_adapts:
            return products.mul_(self.rates)
        torch.addcmul(self.rates, products, self.rates, out=products)
        return products

    def square(self, count: int) -> Float[Tensor, "B"]:
        """Return ‖ΔW‖² + ‖Δb‖² = Σ_r a_r δ_r · (ΔW x_r + Δb), using `count` rows at a time."""
        squares = self.slopes.new_zeros(len(self.slopes))
        rows = self.inputs.split(count, 1), self.slopes.split(count, 1), self.rates.split(count)
        for inputs, slopes, rates in zip(*rows, strict=True):
            moved = self.overlap(inputs) @ self.slopes
            squares += torch.einsum("k,bko,bko->b", rates, slopes, moved)
        return squares


def estimate_mlp_cost(problem: Problem) -> tuple[float, float, float]:
    """Return operations, bytes moved and peak bytes of scratch, per query."""
    below, lowest, above, rule = _divide_layers(problem)
    count, steps, classes = problem.keys.shape[1], rule.steps, problem.outputs.shape[1]
    earlier = count * steps * (steps - 1) // 2  # past rows, summed over the steps
    outs, ins = lowest.weight.shape
    operations = 2 * count * (ins * outs + count * ins + steps * count * outs)
    moved = count * (ins + 8 * steps * (outs + classes))
    held = count * ((3 if steps > 1 else 2) * outs + count + (ins if below else 0))
    kept, passing = 0, 3 * outs  # kept by activations; peak including temporaries
    for outs, ins, layer in _shapes(above):
        operations += 4 * steps * count * ins * outs
        moved += steps * count * (11 * ins + 6 * outs)
        kept += ins  # as if an activation preceded each layer
        is_small = _is_small(layer, count, rule)
        rank = count * (steps - 1) if layer.weight_adapts and not is_small else 0
        passing = max(passing, kept + ins + max(ins, outs + rank) + classes, kept + 3 * outs)
        if is_small:
            operations += 6 * steps * count * ins * outs
            moved += 4 * steps * ins * outs
            held += (1 + (rule.momentum != 0)) * (ins + 1) * outs
        elif layer.adapts:
            operations += 4 * count * earlier * (ins + outs)
            moved += 2 * earlier * (ins + outs + count)
            held += count * steps * (outs + (ins if layer.weight_adapts else 0))
    held += count * passing
    for outs, ins, _ in _shapes(below):
        operations += 2 * (count + 1) * ins * outs
        moved += (count + 1) * (ins + 3 * outs)
        held = max(held, (count + 1) * 2 * outs)
    return operations, moved * problem.dtype.itemsize, held * problem.dtype.itemsize


def _shapes(layers: Sequence[Layer]) -> list[tuple[int, int, LinearHead]]:
    return [(*layer.weight.shape, layer) for layer in layers if isinstance(layer, LinearHead)]


def _divide_layers(
    problem: Problem,
) -> tuple[Sequence[Layer], LinearHead, Sequence[Layer], Gradient]:
    """Return the layers below the lowest that adapts, that layer, those above it, and the rule."""
    layers, rule = problem.layers, problem.rule
    assert layers is not None  # the plan guarantees it
    assert isinstance(rule, Gradient)
    for place, layer in enumerate(layers):
        if isinstance(layer, LinearHead) and layer.adapts:
            return layers[:place], layer, layers[place + 1 :], rule
    raise AssertionError("something adapts")


def _make_part(
    layer: Layer, keys: Float[Tensor, "B K D"], rates: Float[Tensor, "R"], rule: Gradient
) -> _Part:
    if not isinstance(layer, LinearHead):
        return _Activation(layer)
    if not layer.adapts:
        return _Frozen(layer)
    if _is_small(layer, keys.shape[1], rule):
        return _Whole(layer, keys, rule)
    is_fused = layer.weight_adapts and takes_kernels(keys)
    return (_FusedUpper if is_fused else _Upper)(layer, keys, rates)


def _is_small(layer: LinearHead, count: int, rule: Gradient) -> bool:
    """Return whether passes over the change of a query's weights are faster than over its history.

    The change is passed over once forward, once backward and twice for the step; the history twice,
    with half of its final length on average.
    """
    outs, ins = layer.weight.shape
    passes = 7 if rule.momentum else 4
    return layer.weight_adapts and passes * ins * outs < count * (rule.steps - 1) * (ins + outs)


def _add_products(
    total: Float[Tensor, "B O J"],
    slopes: Float[Tensor, "B K O"],
    inputs: Float[Tensor, "B K J"] | None,
    beta: float,
    alpha: float,
) -> None:
    """Compute `β total + α Σ_k slopes_k inputs_kᵀ` in place; `None` stands for a bias's ones."""
    if inputs is None:
        total.mul_(beta).add_(slopes.sum(1)[..., None], alpha=alpha)
    else:
        _combine(total, slopes.mT, inputs, beta, alpha, out=total)


def _combine(
    base: Float[Tensor, "B K O"],
    left: Float[Tensor, "B K R"],
    right: Float[Tensor, "B R O"],
    beta: float = 1,
    alpha: float = 1,
    out: Float[Tensor, "B K O"] | None = None,
) -> Float[Tensor, "B K O"]:
    """Return `β base + α left right`, by a kernel if the inner dimension R is small."""
    if left.shape[2] > MAX_FUSED_ROWS or not takes_kernels(base):
        if out is None:
            return torch.baddbmm(base, left, right, beta=beta, alpha=alpha)
        return out.baddbmm_(left, right, beta=beta, alpha=alpha)
    from mbpa.adaptation.fused.small_products import combine_rows

    out = torch.empty_like(base) if out is None else out
    combine_rows(base, left, right, beta, alpha, out)
    return out


def _compute_rates(rule: Gradient, keys: Float[Tensor, "B K I"]) -> Float[Tensor, "R"]:
    """Return the effect of a slope on the parameters n steps later, the oldest slope first.

    It is −α Σ_j (1−β)ⁿ⁻ʲ μʲ.
    """
    rates = [-rule.rate]
    for age in range(1, rule.steps):
        rates.append((1 - rule.decay) * rates[-1] - rule.rate * rule.momentum**age)
    rows = torch.tensor(rates[::-1], dtype=keys.dtype).repeat_interleave(keys.shape[1])
    return rows.to(keys.device, non_blocking=True)


def _run_layer(layer: Layer, inputs: Float[Tensor, "B K I"]) -> Float[Tensor, "B K O"]:
    """Apply a layer to the neighbours of all queries in one product."""
    outputs: Tensor = layer(inputs.flatten(0, 1))
    return outputs.view(*inputs.shape[:2], -1)


aten: Any = torch.ops.aten
DERIVATIVES: dict[type[nn.Module], Callable[[Any, Tensor, Tensor], Tensor]] = {
    nn.ReLU: lambda _, slopes, y: aten.threshold_backward(slopes, y, 0),
    nn.Tanh: lambda _, slopes, y: aten.tanh_backward(slopes, y),
    nn.Sigmoid: lambda _, slopes, y: aten.sigmoid_backward(slopes, y),
    nn.GELU: lambda f, slopes, x: aten.gelu_backward(slopes, x, approximate=f.approximate),
    nn.SiLU: lambda _, slopes, x: aten.silu_backward(slopes, x),
    nn.ELU: lambda f, slopes, x: aten.elu_backward(slopes, f.alpha, 1, 1, False, x),
    nn.LeakyReLU: lambda f, slopes, x: aten.leaky_relu_backward(slopes, x, f.negative_slope, False),
    nn.Softplus: lambda f, slopes, x: aten.softplus_backward(slopes, x, f.beta, f.threshold),
}
"""The functions that autograd itself runs, by activation; their arguments are the activation, the
slopes by its outputs, and the tensor that it kept."""
BY_OUTPUT = (nn.ReLU, nn.Tanh, nn.Sigmoid)  # these keep their outputs y, the others their inputs x
