"""Local adaptation and votes of language models whose kernel follows from the query.

A nearly exact match deserves a sharp kernel and long steps, a crowd of distant neighbours does not.
A `Reach` decides both, by functions that are linear in features of the query and its neighbours.
These have no unit (ratios of distances, probabilities), so coefficients fitted with one memory can
be used with another.

Shapes: B queries, K neighbours, C classes, F features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mbpa.adaptation import CROSS_ENTROPY, Adaptation, Problem
from mbpa.adaptation.problem import why_not_linear
from mbpa.memory import Memory, Neighbors, validation
from mbpa.predictors import Context, Part, Predictor
from mbpa.rules import Gradient
from mbpa.serialization import register

NEIGHBORHOOD_FEATURES = (
    "constant",
    "log relative distance of the nearest",
    "log ratio of the farthest and the nearest distance",
    "agreement of labels",
    "log probability of labels",
    "entropy of the model",
    "log top probability of the model",
)
"""Features that are known before any adaptation, in the order of the coefficients."""
LEAST_DISTANCE = 1e-4  # added to relative squared distances, so that equal keys have a logarithm
LEAST_LOG_PROBABILITY = -20.0
BASE_RATE = 4.0  # divided by the mean squared norm of the neighbours: the step size for factor 1
MAX_LOG_FACTOR = 4.0  # largest absolute logarithm of sharpness, width and step factor


@dataclass(frozen=True, eq=False)
class Neighborhood:
    """The neighbours of a batch of queries, in finite quantities without a unit."""

    mask: Tensor
    """(B, K): False for padding."""
    scale: Tensor
    """(B,): mean squared norm of the neighbours' keys."""
    relative: Tensor
    """(B, K): squared distances divided by the scale, plus `LEAST_DISTANCE`."""
    support: Tensor
    """(B, K): share of the neighbours that have the same label as this one."""
    plausibility: Tensor
    """(B, K): log-probability of each neighbour's label by the model at the query."""
    features: Tensor
    """(B, F): the `NEIGHBORHOOD_FEATURES`."""

    @staticmethod
    def measure(context: Context) -> Neighborhood:
        """Measure the neighbours of a context, which must hold labels."""
        found, model = context.found, context.parametric
        mask, labels = found.mask, found.values
        counts = mask.sum(1).clamp_min(1)
        norms = _compute_squared_norms(context.queries, found).to(model.dtype)
        scale = (norms.where(mask, 0).sum(1) / counts).clamp_min(torch.finfo(model.dtype).tiny)
        distances = found.distances.to(model.dtype).where(mask, 0)
        relative = distances / scale[:, None] + LEAST_DISTANCE
        same = (labels[:, :, None] == labels[:, None]) & mask[:, None]
        support = same.sum(2).to(model.dtype) / counts[:, None]
        plausibility = model.gather(1, labels)
        shares = plausibility.exp().where(mask, 0).sum(1) / counts
        nearest, farthest = relative.where(mask, torch.inf).amin(1), relative.amax(1)
        nearest = nearest.where(mask.any(1), LEAST_DISTANCE)
        farthest = farthest.maximum(nearest)
        features = torch.stack(
            [
                torch.ones_like(scale),
                nearest.log(),
                (farthest / nearest).log(),
                support.where(mask, 0).sum(1) / counts,
                shares.log().clamp_min(LEAST_LOG_PROBABILITY),
                torch.special.entr(model.exp()).sum(1),
                model.amax(1),
            ],
            1,
        )
        plausibility = plausibility.clamp_min(LEAST_LOG_PROBABILITY)
        return Neighborhood(mask, scale, relative, support, plausibility, features)


@dataclass(frozen=True)
class Reach:
    """How the kernel and the step size of a local adaptation follow from the query.

    With relative squared distances r_k, features f, and s = exp(sharpness · f),
    t = exp(width · f), the log-weight of a neighbour is

        −s log(r_k / r_1) − t (r_k − r_1) + plausibility · log p(label) + support · log share(label)

    up to a constant; p is the model's probability at the query, share that of the neighbours with
    the same label. Steps are exp(step · f) times `BASE_RATE` divided by the mean squared norm of
    the neighbours.

    Args:
        sharpness: coefficients of the `NEIGHBORHOOD_FEATURES`.
        width: likewise.
        step: likewise.
        plausibility: coefficient of the log-probability of the neighbour's label.
        support: coefficient of the log-share of the neighbour's label.
    """

    sharpness: tuple[float, ...] = (0.0,) * 7
    width: tuple[float, ...] = (-4.0, *(0.0,) * 6)
    step: tuple[float, ...] = (0.0,) * 7
    plausibility: float = 0.0
    support: float = 0.0

    def __post_init__(self) -> None:
        for name in ("sharpness", "width", "step"):
            row = parse_row(name, getattr(self, name), len(NEIGHBORHOOD_FEATURES))
            object.__setattr__(self, name, row)
        for name in ("plausibility", "support"):
            object.__setattr__(self, name, validation.parse_number(name, getattr(self, name)))

    def weigh(self, around: Neighborhood) -> Float[Tensor, "B K"]:
        """Return the neighbours' weights, whose sum in each row is the step size of the query."""
        table = make_tensor((self.sharpness, self.width, self.step), around.features)
        terms = make_tensor(((self.plausibility, self.support),), around.features)[0]
        return weigh_neighbors(around, table, terms)


def weigh_neighbors(
    around: Neighborhood, table: Float[Tensor, "3 F"], terms: Float[Tensor, "2"]
) -> Float[Tensor, "B K"]:
    """Return weights as `Reach.weigh` does; differentiable in the coefficients.

    Args:
        around: the neighbours.
        table: coefficients of sharpness, width and step.
        terms: coefficients of plausibility and support.
    """
    logs = (around.features @ table.T).clamp(-MAX_LOG_FACTOR, MAX_LOG_FACTOR)
    sharpness, width, step = logs.exp().unbind(1)
    nearest = around.relative.where(around.mask, torch.inf).amin(1, keepdim=True)
    nearest = nearest.where(around.mask.any(1, keepdim=True), 1.0)
    log_weights = (
        -sharpness[:, None] * (around.relative / nearest).log()
        - width[:, None] * (around.relative - nearest)
        + terms[0] * around.plausibility
        + terms[1] * around.support.clamp_min(1e-6).log()
    )
    lowest = torch.finfo(log_weights.dtype).min
    weights = log_weights.masked_fill(~around.mask, lowest).softmax(1).masked_fill(~around.mask, 0)
    return weights * (BASE_RATE * step / around.scale)[:, None]


@dataclass(frozen=True)
class ScaledAdapted(Predictor):
    """Local adaptation whose kernel and step size are decided per query by a `Reach`.

    It is `Adapted` with gradient steps, for linear heads and labels.

    Args:
        reach: decides kernel and step size.
        steps: number of gradient steps.
        k: number of neighbours.
    """

    reach: Reach = field(default_factory=Reach)
    steps: int = 20
    k: int = 64

    def __post_init__(self) -> None:
        if not isinstance(self.reach, Reach):
            raise ValueError(f"reach must be a Reach, got {self.reach!r}")
        for name in ("steps", "k"):
            object.__setattr__(self, name, validation.count(name, getattr(self, name)))

    @property
    def keys_for(self) -> int:
        return self.k

    def check(self, head: nn.Module, memory: Memory) -> None:
        require_labels(memory)
        if reason := why_not_linear(head, CROSS_ENTROPY, memory.key_shape):
            raise ValueError(f"a scaled adaptation needs a plain nn.Linear as head, but {reason}")

    def weigh(self, context: Context) -> Float[Tensor, "B K"]:
        """Return the neighbours' weights, which sum to 1."""
        return _normalize(self.reach.weigh(Neighborhood.measure(context)))

    def _predict(self, context: Context) -> Float[Tensor, "B C"]:
        return context.finish(self._adapt(context)[1].outputs)

    def parts(self, context: Context) -> list[Part]:
        weights, adaptation = self._adapt(context, want_change=True)
        prediction = context.finish(adaptation.outputs)
        return [Part("adapted", 1.0, prediction, _normalize(weights), adaptation)]

    def _adapt(self, context: Context, want_change: bool = False) -> tuple[Tensor, Adaptation]:
        neighbors, dtype = context.found, context.outputs.dtype
        weights = self.reach.weigh(Neighborhood.measure(context)).to(dtype)
        problem = Problem(
            head=context.head,
            rule=Gradient(1.0, self.steps),  # the weights include the step size
            loss=CROSS_ENTROPY,
            adapting=tuple(name for name, _ in context.head.named_parameters()),
            queries=context.queries.to(dtype),
            outputs=context.outputs,
            keys=neighbors.keys.to(dtype),
            values=neighbors.values,
            weights=weights,
            dots=neighbors.dots if neighbors.dots.dtype == context.queries.dtype == dtype else None,
        )
        return weights, context.engine.adapt(problem, neighbors, want_change)


@dataclass(frozen=True)
class ScaledVote(Predictor):
    """The weighted share of each label among the neighbours, with the kernel of a `Reach`.

    Args:
        reach: decides the kernel; its steps are not used.
        k: number of neighbours.
    """

    reach: Reach = field(default_factory=Reach)
    k: int = 64

    def __post_init__(self) -> None:
        if not isinstance(self.reach, Reach):
            raise ValueError(f"reach must be a Reach, got {self.reach!r}")
        object.__setattr__(self, "k", validation.count("k", self.k))

    def check(self, head: nn.Module, memory: Memory) -> None:
        require_labels(memory)

    def _predict(self, context: Context) -> Float[Tensor, "B C"]:
        return self._vote(context)[1]

    def parts(self, context: Context) -> list[Part]:
        weights, prediction = self._vote(context)
        return [Part("vote", 1.0, prediction, weights)]

    def _vote(self, context: Context) -> tuple[Tensor, Tensor]:
        weights = self.reach.weigh(Neighborhood.measure(context)).to(context.outputs.dtype)
        weights = _normalize(weights)
        shares = torch.zeros_like(context.outputs)
        return weights, shares.scatter_add_(1, context.found.values, weights).log()


def _compute_squared_norms(queries: Tensor, neighbors: Neighbors) -> Float[Tensor, "B K"]:
    """Return ‖h‖² of the neighbours, from ‖h − q‖² = ‖h‖² − 2 q·h + ‖q‖²."""
    dots = neighbors.dots
    squares = queries.to(dots.dtype).flatten(1).square().sum(1, keepdim=True)
    return (neighbors.distances + 2 * dots - squares).clamp_min(0)


def _normalize(weights: Float[Tensor, "B K"]) -> Float[Tensor, "B K"]:
    """Return the weights divided by their sum; rows of zeros stay."""
    return weights / weights.sum(1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)


def make_tensor(rows: tuple[tuple[float, ...], ...], like: Tensor) -> Tensor:
    """Return coefficients as a tensor with the dtype and device of another one."""
    return _make_tensor_on(rows, like.dtype, like.device)


@lru_cache(maxsize=64)  # on a GPU, making a tensor from numbers cannot be recorded
def _make_tensor_on(
    rows: tuple[tuple[float, ...], ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(rows, dtype=dtype, device=device)


def require_labels(memory: Memory) -> None:
    """Raise `ValueError` unless the values of a memory are labels."""
    if not memory.holds_labels:
        raise ValueError("the memory must hold labels, got regression targets")


def parse_row(name: str, row: object, width: int) -> tuple[float, ...]:
    """Return a row of coefficients; raise `ValueError` unless it has `width` finite numbers."""
    if not isinstance(row, list | tuple) or len(row) != width:
        raise ValueError(f"{name} must have {width} numbers, got {row!r}")
    numbers = tuple(validation.parse_number(name, number) for number in row)
    assert all(map(math.isfinite, numbers))
    return numbers


register(Reach, ScaledAdapted, ScaledVote)
