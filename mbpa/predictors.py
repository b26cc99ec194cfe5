"""Predictors, which turn the head's outputs and the query's neighbours into a prediction.

Each returns log-probabilities (B, C) if the memory holds labels, and values if it holds regression
targets. A query without neighbours gets exactly the parametric prediction, bit for bit.
"""

from __future__ import annotations

import abc
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mbpa.adaptation import (
    CROSS_ENTROPY,
    SQUARED_ERROR,
    Adaptation,
    Engine,
    Loss,
    Problem,
    require_convex,
)
from mbpa.kernels import Balanced, InverseDistance, Kernel, check_kernel, neighbor_weights
from mbpa.memory import Memory, Neighbors, validation
from mbpa.replay import assume
from mbpa.rules import AUTO, MAP, Gradient, Rule, require_rule


@dataclass(frozen=True, eq=False)
class Context:
    """The input of a predictor: B queries, the head's outputs for them, and their neighbours."""

    head: nn.Module
    engine: Engine
    has_labels: bool
    queries: Float[Tensor, "B *D"]
    outputs: Float[Tensor, "B *C"]
    """The head's outputs at the queries, in float32 at least."""
    parametric: Float[Tensor, "B *C"]
    """The prediction without a memory."""
    neighbors: Neighbors | None
    """The neighbours, or `None` if the predictor uses none."""

    def finish(self, outputs: Float[Tensor, "B *C"]) -> Float[Tensor, "B *C"]:
        """Convert outputs of a head to a prediction."""
        return outputs.log_softmax(1) if self.has_labels else outputs

    def nearest(self, k: int) -> Context:
        """Return this context with only the first k neighbours."""
        return replace(self, neighbors=self.neighbors and self.neighbors.first(k))

    @property
    def found(self) -> Neighbors:
        """The neighbours, for predictors that use some."""
        assert self.neighbors is not None
        return self.neighbors


@dataclass(frozen=True, eq=False)
class Part:
    """One predictor's contribution to a prediction; `explain` shows these."""

    name: str
    share: float
    """The weight of this part in the whole prediction."""
    prediction: Float[Tensor, "B *C"]
    weights: Float[Tensor, "B K"] | None = None
    """Weights of the neighbours, nearest first."""
    adaptation: Adaptation | None = None

    def rows(self, rows: slice) -> Part:
        """Return this part for some of the queries."""
        weights = None if self.weights is None else self.weights[rows]
        adaptation = None if self.adaptation is None else self.adaptation.rows(rows)
        return Part(self.name, self.share, self.prediction[rows], weights, adaptation)


class Predictor(abc.ABC):
    """The base class of predictors; call one on a `Context`, or leave that to `MbPA`."""

    k: int
    """The number of neighbours it uses."""

    @property
    def keys_for(self) -> int:
        """The number of neighbours whose keys it uses, too."""
        return 0

    @property
    def uses_label_counts(self) -> bool:
        """Whether neighbours must come with the counts of `Memory.count_labels`."""
        return False

    def check(self, head: nn.Module, memory: Memory) -> None:  # noqa: B027 (most accept any)
        """Raise `ValueError` if the predictor cannot work with this head and this memory.

        Args:
            head: maps keys to outputs.
            memory: the memory that neighbours are read from.
        """

    def __call__(self, context: Context) -> Float[Tensor, "B *C"]:
        """Return the prediction: log-probabilities (B, C), or values for regression.

        Args:
            context: queries with their outputs and neighbours.
        """
        if context.neighbors is None:
            return context.parametric
        found = context.neighbors.mask.any(1)
        if len(found) and assume(found.all()):
            return self._predict(context)
        if not found.any():
            return context.parametric
        prediction = self._predict(context)
        return torch.where(
            found.reshape(-1, *(1,) * (prediction.ndim - 1)), prediction, context.parametric
        )

    @abc.abstractmethod
    def _predict(self, context: Context) -> Float[Tensor, "B *C"]:
        """Return the prediction for queries that have neighbours; for the others any value."""

    @abc.abstractmethod
    def parts(self, context: Context) -> list[Part]:
        """Return the components of the prediction, with all details for an explanation.

        Args:
            context: queries with their outputs and neighbours.
        """


@dataclass(frozen=True)
class Parametric(Predictor):
    """The prediction of the unadapted head, without the memory."""

    k = 0

    def _predict(self, context: Context) -> Float[Tensor, "B *C"]:
        return context.parametric

    def parts(self, context: Context) -> list[Part]:
        return [Part("parametric", 1.0, context.parametric)]


@dataclass(frozen=True)
class Adapted(Predictor):
    """The head after local adaptation to the neighbours: memory-based parameter adaptation.

    Args:
        rule: how the parameters change: `Gradient`, `RMSprop`, `Adam`, a `Rule` of your own, or
            `MAP`. Default: 20 gradient steps, whose size is derived from the neighbours.
        k: number of neighbours (according to the paper, performance saturates after 50).
        kernel: weights the neighbours by their distance. Default: `InverseDistance(power=4)`, which
            is more local than the paper's kernel, `InverseDistance()` (docs/tuning.md).
        loss: "cross_entropy", "squared_error", or a function of outputs (K, …) and values (K, …)
            that returns (K,). Default: the first for labels, the second for regression targets.
        params: names of the head's parameters to adapt (default: all).
    """

    rule: Rule | MAP = field(default_factory=lambda: Gradient(AUTO, steps=20))
    k: int = 50
    kernel: Kernel = field(default_factory=lambda: InverseDistance(power=4))
    loss: str | Loss | None = None
    params: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.rule, MAP):
            require_rule(self.rule)
        _check_neighbors(self)
        names = (CROSS_ENTROPY, SQUARED_ERROR)
        if self.loss is not None and self.loss not in names and not callable(self.loss):
            raise ValueError(f"loss must be one of {names} or a function, got {self.loss!r}")
        if callable(self.loss) and isinstance(self.rule, Gradient) and self.rule.lr == AUTO:
            raise ValueError(
                f"lr={AUTO!r} works with the losses {names} only: for your own, give lr a number"
            )
        if isinstance(self.params, str):
            raise ValueError(f"params must be a sequence of names, got the string {self.params!r}")
        if self.params is not None:
            object.__setattr__(self, "params", tuple(self.params))
            if not self.params:
                raise ValueError("params must name at least one parameter; None means all")

    @property
    def keys_for(self) -> int:
        return self.k

    @property
    def uses_label_counts(self) -> bool:
        return isinstance(self.kernel, Balanced)

    def check(self, head: nn.Module, memory: Memory) -> None:
        _check_balance(self, memory)
        names = [name for name, _ in head.named_parameters()]
        for name in self.params or ():
            if name not in names:
                raise ValueError(
                    f"params must be among the head's parameters {names}, got {name!r}"
                )
        if not names:
            raise ValueError(f"the head must have parameters to adapt, {head} has none")
        if self.loss == CROSS_ENTROPY and not memory.holds_labels:
            raise ValueError(f"loss {CROSS_ENTROPY!r} needs labels, the memory holds targets")
        if self.loss == SQUARED_ERROR and memory.holds_labels:
            raise ValueError(f"loss {SQUARED_ERROR!r} needs targets, the memory holds labels")
        if isinstance(self.rule, MAP):
            require_convex(head, self.loss or CROSS_ENTROPY, memory.key_shape)

    def _predict(self, context: Context) -> Float[Tensor, "B *C"]:
        return context.finish(self._adapt(context)[1].outputs)

    def parts(self, context: Context) -> list[Part]:
        weights, adaptation = self._adapt(context, want_change=True)
        return [Part("adapted", 1.0, context.finish(adaptation.outputs), weights, adaptation)]

    def _adapt(self, context: Context, want_change: bool = False) -> tuple[Tensor, Adaptation]:
        neighbors, dtype = context.found, context.outputs.dtype
        default = CROSS_ENTROPY if context.has_labels else SQUARED_ERROR
        weights = neighbor_weights(self.kernel, neighbors).to(dtype)
        values = neighbors.values if context.has_labels else neighbors.values.to(dtype)
        problem = Problem(
            head=context.head,
            rule=self.rule,
            loss=self.loss or default,
            adapting=self.params or tuple(name for name, _ in context.head.named_parameters()),
            queries=context.queries.to(dtype),
            outputs=context.outputs,
            keys=neighbors.keys.to(dtype),
            values=values,
            weights=weights,
            dots=neighbors.dots if neighbors.dots.dtype == context.queries.dtype == dtype else None,
        )
        return weights, context.engine.adapt(problem, neighbors, want_change)


@dataclass(frozen=True)
class NeighborVote(Predictor):
    """The weighted mean of the neighbours' values: attention over the memory.

    With `InverseDistance` this is the paper's memory-only prediction. With `ExpDot` it is
    attention, and with `ExpDot` and the whole memory as neighbours it is the neural cache.

    Args:
        kernel: weights the neighbours by their distance; by default the paper's.
        k: number of neighbours.
        smoothing: share of the probability, from 0 to 1, spread evenly over all classes. Without
            it, a class that no neighbour has gets probability zero, so the perplexity may be
            infinite.
    """

    kernel: Kernel = field(default_factory=InverseDistance)
    k: int = 50
    smoothing: float = 0.0

    def __post_init__(self) -> None:
        _check_neighbors(self)
        smoothing = validation.parse_number("smoothing", self.smoothing)
        object.__setattr__(self, "smoothing", smoothing)
        if not 0 <= self.smoothing <= 1:
            raise ValueError(f"smoothing must be between 0 and 1, got {self.smoothing}")

    @property
    def uses_label_counts(self) -> bool:
        return isinstance(self.kernel, Balanced)

    def check(self, head: nn.Module, memory: Memory) -> None:
        _check_balance(self, memory)
        if self.smoothing and not memory.holds_labels:
            raise ValueError("smoothing is for labels, the memory holds regression targets")

    def _predict(self, context: Context) -> Float[Tensor, "B *C"]:
        return self._vote(context)[1]

    def parts(self, context: Context) -> list[Part]:
        weights, prediction = self._vote(context)
        return [Part("vote", 1.0, prediction, weights)]

    def _vote(self, context: Context) -> tuple[Tensor, Tensor]:
        weights = neighbor_weights(self.kernel, context.found).to(context.outputs.dtype)
        values = context.found.values
        if not context.has_labels:
            return weights, torch.einsum("bk,bk...->b...", weights, values.to(weights.dtype))
        shares = torch.zeros_like(context.outputs).scatter_add_(1, values, weights)
        if self.smoothing:
            shares = (1 - self.smoothing) * shares + self.smoothing / shares.shape[1]
        return weights, shares.log()


@dataclass(frozen=True, init=False)
class Mixture(Predictor):
    """A mixture of predictors, `p = Σ_m λ_m p_m`; for regression the weighted sum of values.

    It is computed in log space. One read of the memory serves all predictors: each uses the first
    k neighbours, for its own k.

    Args:
        mixed: the predictors.
        weights: λ, one per predictor; not negative, with sum 1.
    """

    mixed: tuple[Predictor, ...]
    weights: tuple[float, ...]

    def __init__(self, *mixed: Predictor, weights: Sequence[float]) -> None:
        for part in mixed:
            if not isinstance(part, Predictor):
                raise ValueError(f"a mixture must consist of predictors, got {part!r}")
        if not mixed or len(mixed) != len(weights):
            raise ValueError(
                f"a mixture needs one weight per predictor, got {len(mixed)} predictors "
                f"and {len(weights)} weights"
            )
        shares = tuple(validation.parse_number("weights", weight) for weight in weights)
        total = math.fsum(shares)
        if min(shares) < 0 or abs(total - 1) > 1e-6:
            raise ValueError(
                f"weights must not be negative and sum to 1, got {shares}, sum {total}"
            )
        object.__setattr__(self, "mixed", tuple(mixed))
        object.__setattr__(self, "weights", shares)

    @property
    def k(self) -> int:  # type: ignore[override]  # derived where the others store it
        return max(part.k for part in self.mixed)

    @property
    def keys_for(self) -> int:
        return max(part.keys_for for part in self.mixed)

    @property
    def uses_label_counts(self) -> bool:
        return any(part.uses_label_counts for part in self.mixed)

    def check(self, head: nn.Module, memory: Memory) -> None:
        for part in self.mixed:
            part.check(head, memory)

    def _predict(self, context: Context) -> Float[Tensor, "B *C"]:
        predictions = [part(context.nearest(part.k)) for part in self.mixed]
        shares = context.outputs.new_tensor(self.weights)
        stacked = torch.stack(predictions)  # M B *C
        if not context.has_labels:
            return torch.einsum("m,m...->...", shares, stacked)
        return (stacked + shares.log()[:, None, None]).logsumexp(0)

    def parts(self, context: Context) -> list[Part]:
        return [
            replace(part, share=share * part.share)
            for predictor, share in zip(self.mixed, self.weights, strict=True)
            for part in predictor.parts(context.nearest(predictor.k))
        ]


def _check_neighbors(predictor: Adapted | NeighborVote) -> None:
    object.__setattr__(predictor, "k", validation.count("k", predictor.k))
    check_kernel(predictor.kernel)


def _check_balance(predictor: Adapted | NeighborVote, memory: Memory) -> None:
    if predictor.uses_label_counts and not memory.holds_labels:
        raise ValueError(f"{predictor.kernel} is for labels, the memory holds regression targets")


def in_short(part: object) -> str:
    """Return a predictor, rule or kernel as readable text, with long numbers in three digits."""

    def shorten(found: re.Match[str]) -> str:
        number = float(found[0])
        return f"{number:.3g}" if number < 1000 else f"{number:.0f}"

    return re.sub(r"\d+\.\d{3,}(e[+-]?\d+)?", shorten, str(part))
