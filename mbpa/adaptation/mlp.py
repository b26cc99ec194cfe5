"""MLP head, gradient steps: exact, without forming each query's weights.

Let x be the inputs of a layer and δ the weighted slopes of the loss by its outputs, with one row r
of each per neighbour and past step, and let a_r be factors known in advance. Then

    ΔW = Σ_r a_r δ_r x_rᵀ,        z(x) = W x + b + Σ_r a_r (x·x_r + 1) δ_r.

The lowest layer that adapts has the same inputs at every step, so K rows are its whole history. A
layer that is so small that its changed weights take fewer numbers than its history stores the
weights instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mbpa.adaptation.losses import residual
from mbpa.adaptation.problem import LinearHead, Problem
from mbpa.device import takes_kernels
from mbpa.rules import Gradient

Layer = LinearHead | nn.Module
MOST_FUSED = 32  # rows per query up to which our kernel combines them faster
FEWEST_FUSED = 64  # inputs and outputs from which our kernel multiplies faster


def layered(
    problem: Problem, want_change: bool
) -> tuple[Float[Tensor, "B C"], Float[Tensor, "B"] | None]:
    """Return the adapted outputs, and the norm of the change if `want_change`."""
    below, lowest_layer, above, rule = _parted(problem)
    keys, queries = problem.keys, problem.queries[:, None]
    for layer in below:
        keys, queries = _through(layer, keys), _through(layer, queries)
    lowest = _Lowest(lowest_layer, keys, rule)
    rates = _rates(rule, keys)
    upper = [_part(layer, keys, rates, rule) for layer in above]
    weights = problem.weights[..., None]
    for _ in range(rule.steps):
        outputs = lowest.outputs()
        for part in upper:
            outputs = part.forward(outputs)
        slopes = residual(str(problem.loss), outputs, problem.values).mul_(weights)
        for part in reversed(upper):
            slopes = part.backward(slopes)
        lowest.learn(slopes)
    outputs = lowest(queries)
    for part in upper:
        outputs = part(outputs)
    if not want_change:
        return outputs[:, 0], None
    adapting = [part for part in (lowest, *upper) if isinstance(part, _Adapting | _Whole)]
    squares = torch.stack([part.squared_change(keys.shape[1]) for part in adapting]).sum(0)
    return outputs[:, 0], squares.clamp_min(0).sqrt()


def squared_slopes(
    problem: Problem, directions: Float[Tensor, "B K C"]
) -> tuple[Float[Tensor, "B K"], Float[Tensor, "B K C"]]:
    """Return ‖∇_θ (outputs · direction)‖² of each neighbour before any step, and the outputs.

    The former is Σ ‖δ‖²(‖x‖² + 1) over the layers that adapt, where x are their inputs and δ is the
    direction propagated back to their outputs.
    """
    below, lowest, above, _ = _parted(problem)
    inputs = problem.keys
    for layer in below:
        inputs = _through(layer, inputs)
    upper = [
        _Frozen(layer) if isinstance(layer, LinearHead) else _Activation(layer) for layer in above
    ]
    lengths = [lowest.squared_lengths(inputs)]
    outputs = _through(lowest, inputs)
    for part in upper:
        if isinstance(part, _Frozen):
            lengths.append(part.layer.squared_lengths(outputs))
        outputs = part.forward(outputs)
    squares, slopes = torch.zeros_like(problem.weights), directions
    for part in reversed(upper):
        if isinstance(part, _Frozen):
            squares.addcmul_(slopes.square().sum(-1), lengths.pop())
        slopes = part.backward(slopes)
    return squares.addcmul_(slopes.square().sum(-1), lengths.pop()), outputs


class _Activation:
    """An elementwise function; its derivative needs its inputs or its outputs."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.derivative = module, DERIVATIVES[type(module)]

    def __call__(self, inputs: Float[Tensor, "B K I"]) -> Float[Tensor, "B K I"]:
        outputs: Tensor = self.module(inputs)
        self.kept = outputs if type(self.module) in BY_OUTPUT else inputs
        return outputs

    forward = __call__

    def backward(self, slopes: Float[Tensor, "B K I"]) -> Float[Tensor, "B K I"]:
        kept = self.kept
        del self.kept
        return self.derivative(self.module, slopes, kept)


class _Frozen:
    """A linear layer that does not adapt, above one that does."""

    def __init__(self, layer: LinearHead) -> None:
        self.layer, self.pairs = layer, None
        if min(layer.weight.shape) >= FEWEST_FUSED and takes_kernels(layer.weight):
            from mbpa.adaptation.fused import shared_product

            self.pairs, self._product = (
                shared_product.pairs_of(layer.weight),
                shared_product.product,
            )

    def __call__(self, inputs: Float[Tensor, "B K I"]) -> Float[Tensor, "B K O"]:
        if self.pairs is None:
            return _through(self.layer, inputs)
        return self._product(inputs, self.pairs.mT, self.layer.bias)

    forward = __call__

    def backward(self, slopes: Float[Tensor, "B K O"]) -> Float[Tensor, "B K I"]:
        if self.pairs is None:
            return (slopes.flatten(0, 1) @ self.layer.weight).view(*slopes.shape[:2], -1)
        return self._product(slopes, self.pairs)


class _Adapting(_Frozen):
    """A linear layer that adapts, with its history: R rows per query, and a factor for each."""

    inputs: Float[Tensor, "B R I"]
    slopes: Float[Tensor, "B R O"]
    rates: Float[Tensor, "R"]

    def __call__(self, inputs: Float[Tensor, "B K I"]) -> Float[Tensor, "B K O"]:
        return _through(self.layer, inputs).baddbmm_(self._overlaps(inputs), self.slopes)

    def squared_change(self, count: int) -> Float[Tensor, "B"]:
        """Return ‖ΔW‖² + ‖Δb‖² = Σ_r a_r δ_r · (ΔW x_r + Δb), using `count` rows at a time."""
        squares = self.slopes.new_zeros(len(self.slopes))
        rows = self.inputs.split(count, 1), self.slopes.split(count, 1), self.rates.split(count)
        for inputs, slopes, rates in zip(*rows, strict=True):
            moved = self._overlaps(inputs) @ self.slopes
            squares += torch.einsum("k,bko,bko->b", rates, slopes, moved)
        return squares

    def _overlaps(self, inputs: Float[Tensor, "B K J"]) -> Float[Tensor, "B K R"]:
        """Return a_r (x·x_r + 1), with x·x_r only if the weights adapt, and 1 if the bias does."""
        if not self.layer.weight_adapts:
            return self.rates.expand(*inputs.shape[:2], -1)
        products = inputs @ self.inputs.mT
        if not self.layer.bias_adapts:
            return products.mul_(self.rates)
        torch.addcmul(self.rates, products, self.rates, out=products)
        return products


class _Lowest(_Adapting):
    """The lowest layer that adapts; its inputs never change, so all steps add to the same rows."""

    def __init__(self, layer: LinearHead, keys: Float[Tensor, "B K I"], rule: Gradient) -> None:
        self.layer = layer  # no pairs: its weights are multiplied only twice
        self.start, self.rule = _through(layer, keys), rule
        self.inputs, self.rates = keys, keys.new_ones(keys.shape[1])
        self.slopes = self.velocity = torch.zeros_like(self.start)
        self.gram = self._overlaps(keys)

    def outputs(self) -> Float[Tensor, "B K O"]:
        return _combined(self.start, self.gram, self.slopes)

    def learn(self, slopes: Float[Tensor, "B K O"]) -> None:
        rule = self.rule
        self.velocity = slopes.add_(self.velocity, alpha=rule.momentum) if rule.momentum else slopes
        if rule.decay:
            self.slopes.mul_(1 - rule.decay)
        self.slopes.sub_(self.velocity, alpha=rule.rate)


class _Upper(_Adapting):
    """Any other layer that adapts; every step adds K rows."""

    def __init__(
        self, layer: LinearHead, keys: Float[Tensor, "B K D"], rates: Float[Tensor, "R"]
    ) -> None:
        super().__init__(layer)
        outs, ins = layer.weight.shape
        self.all_rates = rates
        self.all_slopes = keys.new_empty(len(keys), len(rates), outs)
        self.all_inputs = keys.new_empty(len(keys), len(rates), ins if layer.weight_adapts else 0)
        self._look_back(0)

    def forward(self, inputs: Float[Tensor, "B K I"]) -> Float[Tensor, "B K O"]:
        if self.layer.weight_adapts:
            self.all_inputs[:, self.seen : self.seen + inputs.shape[1]] = inputs
        return self(inputs)

    def backward(self, slopes: Float[Tensor, "B K O"]) -> Float[Tensor, "B K I"]:
        below = super().backward(slopes)
        if self.layer.weight_adapts:
            below.baddbmm_((slopes @ self.slopes.mT).mul_(self.rates), self.inputs)
        self.all_slopes[:, self.seen : self.seen + slopes.shape[1]] = slopes
        self._look_back(self.seen + slopes.shape[1])
        return below

    def _look_back(self, seen: int) -> None:
        self.seen, self.rates = seen, self.all_rates[len(self.all_rates) - seen :]
        self.inputs, self.slopes = self.all_inputs[:, :seen], self.all_slopes[:, :seen]


class _FusedUpper(_Upper):
    """The same computed by one kernel, which takes past rows as pairs in half precision."""

    past_inputs: Float[Tensor, "2 B R I"]
    past_slopes: Float[Tensor, "2 B R O"]

    def __init__(
        self, layer: LinearHead, keys: Float[Tensor, "B K D"], rates: Float[Tensor, "R"]
    ) -> None:
        from mbpa.adaptation.fused import mlp_history, shared_product

        _Frozen.__init__(self, layer)
        self._add_past, self._joined = mlp_history.add_past, shared_product.joined
        (outs, ins), self.all_rates = layer.weight.shape, rates
        rows = len(rates) + 1  # one more for the query
        self.past_slopes = mlp_history.room_for_pairs(keys, rows, outs)
        self.past_inputs = mlp_history.room_for_pairs(keys, rows, ins)
        self._look_back(0)

    def __call__(self, inputs: Float[Tensor, "B K I"]) -> Float[Tensor, "B K O"]:
        outputs = _Frozen.__call__(self, inputs)
        past = self.past_inputs, self.past_slopes, self.rates
        self._add_past(outputs, inputs, *past, one=self.layer.bias_adapts)
        return outputs

    forward = __call__

    def backward(self, slopes: Float[Tensor, "B K O"]) -> Float[Tensor, "B K I"]:
        below = _Frozen.backward(self, slopes)
        past = self.past_slopes, self.past_inputs, self.rates
        self._add_past(below, slopes, *past, one=False)
        self._look_back(self.seen + slopes.shape[1])
        return below

    def squared_change(self, count: int) -> Float[Tensor, "B"]:
        parts = []
        some = max(1, len(self.past_inputs[0]) // 16)  # queries whose pairs are joined at a time
        for inputs, slopes in zip(
            self.past_inputs.split(some, 1), self.past_slopes.split(some, 1), strict=True
        ):
            self.inputs = self._joined(inputs[:, :, : self.seen])
            self.slopes = self._joined(slopes[:, :, : self.seen])
            parts.append(super().squared_change(count))
        del self.inputs, self.slopes
        return torch.cat(parts)

    def _look_back(self, seen: int) -> None:
        self.seen, self.rates = seen, self.all_rates[len(self.all_rates) - seen :]


class _Whole(_Frozen):
    """Any other layer that adapts and is small; it stores the change of each query's weights."""

    def __init__(self, layer: LinearHead, keys: Float[Tensor, "B K D"], rule: Gradient) -> None:
        super().__init__(layer)
        self.rule = rule
        sizes = {"weight": tuple(layer.weight.shape), "bias": (len(layer.weight), 1)}
        adapts = {"weight": layer.weight_adapts, "bias": layer.bias_adapts}
        shapes = {name: (len(keys), *sizes[name]) for name in sizes if adapts[name]}
        self.change = {name: keys.new_zeros(shape) for name, shape in shapes.items()}
        self.velocity = {n: c.clone() for n, c in self.change.items()} if rule.momentum else {}

    def __call__(self, inputs: Float[Tensor, "B K I"]) -> Float[Tensor, "B K O"]:
        outputs = super().__call__(inputs)
        if "weight" in self.change:
            outputs.baddbmm_(inputs, self.change["weight"].mT)
        return outputs.add_(self.change["bias"].mT) if "bias" in self.change else outputs

    def forward(self, inputs: Float[Tensor, "B K I"]) -> Float[Tensor, "B K O"]:
        self.inputs = inputs
        return self(inputs)

    def backward(self, slopes: Float[Tensor, "B K O"]) -> Float[Tensor, "B K I"]:
        below, inputs, rule = super().backward(slopes), self.inputs, self.rule
        del self.inputs
        if "weight" in self.change:
            _combined(below, slopes, self.change["weight"], out=below)
        for name, change in self.change.items():
            factor = inputs if name == "weight" else None
            if rule.momentum:
                _add_products(self.velocity[name], slopes, factor, rule.momentum, 1)
                change.mul_(1 - rule.decay).sub_(self.velocity[name], alpha=rule.rate)
            else:
                _add_products(change, slopes, factor, 1 - rule.decay, -rule.rate)
        return below

    def squared_change(self, count: int) -> Float[Tensor, "B"]:
        squares = [change.flatten(1).square().sum(1) for change in self.change.values()]
        return torch.stack(squares).sum(0)


def layered_cost(problem: Problem) -> tuple[float, float, float]:
    """Return operations, bytes moved and peak bytes of scratch, per query."""
    below, lowest, above, rule = _parted(problem)
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


def _parted(problem: Problem) -> tuple[Sequence[Layer], LinearHead, Sequence[Layer], Gradient]:
    """Return the layers below the lowest that adapts, that layer, those above it, and the rule."""
    layers, rule = problem.layers, problem.rule
    assert layers is not None  # the plan guarantees it
    assert isinstance(rule, Gradient)
    for place, layer in enumerate(layers):
        if isinstance(layer, LinearHead) and layer.adapts:
            return layers[:place], layer, layers[place + 1 :], rule
    raise AssertionError("something adapts")


def _part(
    layer: Layer, keys: Float[Tensor, "B K D"], rates: Float[Tensor, "R"], rule: Gradient
) -> _Activation | _Frozen:
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
        _combined(total, slopes.mT, inputs, beta, alpha, out=total)


def _combined(
    base: Float[Tensor, "B K O"],
    left: Float[Tensor, "B K R"],
    right: Float[Tensor, "B R O"],
    beta: float = 1,
    alpha: float = 1,
    out: Float[Tensor, "B K O"] | None = None,
) -> Float[Tensor, "B K O"]:
    """Return `β base + α left right`, by a kernel if the inner dimension R is small."""
    if left.shape[2] > MOST_FUSED or not takes_kernels(base):
        if out is None:
            return torch.baddbmm(base, left, right, beta=beta, alpha=alpha)
        return out.baddbmm_(left, right, beta=beta, alpha=alpha)
    from mbpa.adaptation.fused.small_products import combine

    out = torch.empty_like(base) if out is None else out
    combine(base, left, right, beta, alpha, out)
    return out


def _rates(rule: Gradient, keys: Float[Tensor, "B K I"]) -> Float[Tensor, "R"]:
    """Return the effect of a slope on the parameters n steps later, the oldest slope first.

    It is −α Σ_j (1−β)ⁿ⁻ʲ μʲ.
    """
    rates = [-rule.rate]
    for age in range(1, rule.steps):
        rates.append((1 - rule.decay) * rates[-1] - rule.rate * rule.momentum**age)
    rows = torch.tensor(rates[::-1], dtype=keys.dtype).repeat_interleave(keys.shape[1])
    return rows.to(keys.device, non_blocking=True)


def _through(layer: Layer, inputs: Float[Tensor, "B K I"]) -> Float[Tensor, "B K O"]:
    """Apply a layer to the neighbours of all queries in one product."""
    outputs: Tensor = layer(inputs.flatten(0, 1))
    return outputs.view(*inputs.shape[:2], -1)


aten = torch.ops.aten
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
