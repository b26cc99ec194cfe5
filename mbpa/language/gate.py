"""Predictors of language models that decide per query how far to trust the memory.

`ScaledAdapted` is local adaptation whose kernel and step size follow from the query: a nearly exact
match deserves a sharp kernel and long steps, a crowd of distant neighbours does not. `Gated` mixes
the model with such predictions, `p = Σ_m λ_m p_m`, with weights λ = softmax(A f) that are linear in
features f of the query, its neighbours and the predictions. Both use quantities without a unit
only, such as ratios of distances and probabilities, so coefficients fitted with one memory can be
used with another.

Shapes: B queries, K neighbours, C classes, P predictions, F features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
PREDICTION_FEATURES = (
    "entropy",
    "log top probability",
    "has the same top class as the model",
    "log probability of its top class by the model",
    "divergence from the model",
)
"""Features of each prediction besides the model's, in the order of the coefficients."""
LEAST_DISTANCE = 1e-4  # added to relative squared distances, so that equal keys have a logarithm
LEAST_LOG_PROBABILITY = -20.0
BASE_RATE = 4.0  # times the mean squared norm of the neighbours: the step size for factor 1
SMALL_MEMORY_POWER = 3.0  # of the share of a gate's k neighbours that a small memory has
MAX_LOG_FACTOR = 4.0  # of sharpness and step size, either way


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
            row = _parse_row(name, getattr(self, name), len(NEIGHBORHOOD_FEATURES))
            object.__setattr__(self, name, row)
        for name in ("plausibility", "support"):
            object.__setattr__(self, name, validation.parse_number(name, getattr(self, name)))

    def weigh(self, around: Neighborhood) -> Float[Tensor, "B K"]:
        """Return the neighbours' weights, whose sum in each row is the step size of the query."""
        table = _make_tensor((self.sharpness, self.width, self.step), around.features)
        terms = _make_tensor(((self.plausibility, self.support),), around.features)[0]
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
        _require_labels(memory)
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
        _require_labels(memory)

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


@dataclass(frozen=True)
class Gate:
    """Mixing weights per query: the softmax of linear functions of features.

    Args:
        coefficients: one row per prediction, the model first. Each row has one number for each of
            the `NEIGHBORHOOD_FEATURES`, then one for each of the `PREDICTION_FEATURES` of the
            second prediction, of the third, and so on.
        k: number of nearest neighbours that the features are measured with.
    """

    coefficients: tuple[tuple[float, ...], ...]
    k: int = 64

    def __post_init__(self) -> None:
        if len(self.coefficients) < 2:
            raise ValueError(
                "coefficients must have a row for the model and one for each further prediction, "
                f"got {len(self.coefficients)} rows"
            )
        width = count_features(len(self.coefficients) - 1)
        rows = tuple(_parse_row("coefficients", row, width) for row in self.coefficients)
        object.__setattr__(self, "coefficients", rows)
        object.__setattr__(self, "k", validation.count("k", self.k))

    def weigh(self, features: Float[Tensor, "B F"]) -> Float[Tensor, "B P"]:
        """Return the logarithms of the mixing weights."""
        return (features @ _make_tensor(self.coefficients, features).T).log_softmax(1)


def count_features(predictions: int) -> int:
    """Return the number of features of a gate, given how many predictions it adds to the model."""
    return len(NEIGHBORHOOD_FEATURES) + predictions * len(PREDICTION_FEATURES)


def measure_features(
    context: Context, predictions: Sequence[Float[Tensor, "B C"]], k: int = 64
) -> Float[Tensor, "B F"]:
    """Return the features of a gate.

    Args:
        context: queries, the model's outputs and the neighbours.
        predictions: log-probabilities by each predictor besides the model; −∞ is allowed.
        k: number of nearest neighbours to measure.
    """
    model, around = context.parametric, Neighborhood.measure(context.nearest(k))
    top = model.argmax(1)
    columns = []
    for prediction in predictions:
        shares, (log_top, own_top) = prediction.exp(), prediction.max(1)
        entropy = torch.special.entr(shares).sum(1)
        columns += [
            entropy,
            log_top,
            (own_top == top).to(model.dtype),
            model.gather(1, own_top[:, None])[:, 0],
            -entropy - torch.linalg.vecdot(shares, model),
        ]
    limits = -LEAST_LOG_PROBABILITY
    measured = torch.stack(columns, 1).clamp(-limits, limits).nan_to_num(0.0)
    return torch.cat([around.features, measured], 1)


@dataclass(frozen=True, init=False)
class Gated(Predictor):
    """A mixture of the model and other predictors, with weights that a gate decides per query.

    Args:
        mixed: the predictors besides the model, such as a `ScaledAdapted` and a `NeighborVote`.
        gate: decides the weights of the model and of these predictors, in this order.
    """

    mixed: tuple[Predictor, ...]
    gate: Gate

    def __init__(self, *mixed: Predictor, gate: Gate) -> None:
        for part in mixed:
            if not isinstance(part, Predictor):
                raise ValueError(f"a gated mixture must consist of predictors, got {part!r}")
        if not isinstance(gate, Gate):
            raise ValueError(f"gate must be a Gate, got {gate!r}")
        if len(gate.coefficients) != len(mixed) + 1:
            raise ValueError(
                f"the gate must weigh the model and {len(mixed)} predictors, "
                f"got {len(gate.coefficients)} rows of coefficients"
            )
        object.__setattr__(self, "mixed", tuple(mixed))
        object.__setattr__(self, "gate", gate)

    @property
    def k(self) -> int:  # type: ignore[override]  # derived where the others store it
        return max(self.gate.k, *(part.k for part in self.mixed))

    @property
    def keys_for(self) -> int:
        return max(part.keys_for for part in self.mixed)

    def check(self, head: nn.Module, memory: Memory) -> None:
        _require_labels(memory)
        for part in self.mixed:
            part.check(head, memory)

    def _predict(self, context: Context) -> Float[Tensor, "B C"]:
        predictions = [part(context.nearest(part.k)) for part in self.mixed]
        logs = self._weigh(context, predictions)
        mixture = context.parametric + logs[:, :1]
        for number, prediction in enumerate(predictions, start=1):
            mixture = torch.logaddexp(mixture, prediction + logs[:, number : number + 1])
        return mixture

    def _weigh(
        self, context: Context, predictions: Sequence[Float[Tensor, "B C"]]
    ) -> Float[Tensor, "B P"]:
        """Return the logarithms of the mixing weights, the model's first.

        Gates are fitted with large memories. If a memory has fewer entries than the gate's k, all
        of them are neighbours, however far they are, and features do not mean the same. So the
        predictions from the memory count less.
        """
        logs = self.gate.weigh(measure_features(context, predictions, self.gate.k))
        found = context.found.mask[:, : self.gate.k].sum(1, keepdim=True).clamp_min(1)
        trust = SMALL_MEMORY_POWER * (found / self.gate.k).log()
        return torch.cat([logs[:, :1], logs[:, 1:] + trust], 1).log_softmax(1)

    def parts(self, context: Context) -> list[Part]:
        """Return the components; the share of each is its mean weight over the queries."""
        found = [
            [Part("parametric", 1.0, context.parametric)],
            *(part.parts(context.nearest(part.k)) for part in self.mixed),
        ]
        predictions = [part(context.nearest(part.k)) for part in self.mixed]
        shares = self._weigh(context, predictions).exp().mean(0).tolist()
        return [
            replace(part, share=share * part.share)
            for share, parts in zip(shares, found, strict=True)
            for part in parts
        ]


def fit_gate(
    features: Float[Tensor, "N F"],
    scores: Float[Tensor, "N P"],
    *,
    k: int = 64,
    ridge: float = 1e-4,
    iterations: int = 200,
    weights: Float[Tensor, "N"] | None = None,
) -> Gate:
    """Fit a gate to predictions of a text: minimise the mean −log Σ_m λ_m p_m of its tokens.

    The fit is deterministic: L-BFGS from equal weights, on standardised features.

    Args:
        features: from `measure_features`, one row per token.
        scores: log-probability of the token that followed, by the model and each prediction.
        k: number of neighbours that the features were measured with.
        ridge: factor of the sum of squared coefficients of standardised features.
        iterations: maximum number of iterations.
        weights: weight of each token in the mean; by default all are equal.
    """
    parts, width = scores.shape[1], features.shape[1]
    if width != count_features(parts - 1):
        raise ValueError(
            f"features must have {count_features(parts - 1)} columns for {parts} predictions, "
            f"got {width}"
        )
    values = features.double()
    center, spread = values.mean(0), values.std(0, correction=0)
    center[0], spread[0] = 0.0, 1.0  # the constant
    spread = spread.where(spread > 1e-9, 1.0)
    values = (values - center) / spread
    logs = scores.double()
    shares = torch.ones_like(logs[:, 0]) if weights is None else weights.to(logs)
    shares = shares / shares.sum()
    free = torch.zeros(parts - 1, width, dtype=torch.float64, device=values.device)
    free.requires_grad_(True)
    optimizer = torch.optim.LBFGS(
        [free], max_iter=iterations, history_size=20, line_search_fn="strong_wolfe"
    )

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        mixing = nn.functional.pad(values @ free.T, (1, 0)).log_softmax(1)
        loss = -(mixing + logs).logsumexp(1) @ shares + ridge * free[:, 1:].square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(evaluate)
    table = free.detach() / spread
    table[:, 0] -= table[:, 1:] @ center[1:]
    rows = [[0.0] * width, *table.tolist()]
    return Gate(tuple(tuple(row) for row in rows), k)


def _compute_squared_norms(queries: Tensor, neighbors: Neighbors) -> Float[Tensor, "B K"]:
    """Return ‖h‖² of the neighbours, from ‖h − q‖² = ‖h‖² − 2 q·h + ‖q‖²."""
    dots = neighbors.dots
    squares = queries.to(dots.dtype).flatten(1).square().sum(1, keepdim=True)
    return (neighbors.distances + 2 * dots - squares).clamp_min(0)


def _normalize(weights: Float[Tensor, "B K"]) -> Float[Tensor, "B K"]:
    """Return the weights divided by their sum; rows of zeros stay."""
    return weights / weights.sum(1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)


def _make_tensor(rows: tuple[tuple[float, ...], ...], like: Tensor) -> Tensor:
    return _make_tensor_on(rows, like.dtype, like.device)


@lru_cache(maxsize=64)  # on a GPU, making a tensor from numbers cannot be recorded
def _make_tensor_on(
    rows: tuple[tuple[float, ...], ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(rows, dtype=dtype, device=device)


def _require_labels(memory: Memory) -> None:
    if not memory.holds_labels:
        raise ValueError("a gate is for labels, the memory holds regression targets")


def _parse_row(name: str, row: object, width: int) -> tuple[float, ...]:
    if not isinstance(row, list | tuple) or len(row) != width:
        raise ValueError(f"{name} must have {width} numbers, got {row!r}")
    numbers = tuple(validation.parse_number(name, number) for number in row)
    assert all(map(math.isfinite, numbers))
    return numbers


register(Reach, ScaledAdapted, ScaledVote, Gate, Gated)

_REACH = Reach(
    sharpness=(-0.2654, -0.4304, -0.1153, 0.8875, -0.05719, 0.02102, 0.2238),
    width=(-2.315, 0.324, 0.4094, -0.9086, -0.2306, 0.2187, -0.57),
    step=(0.4729, 0.1081, -0.1553, 0.9796, -0.0122, 0.09882, 0.1383),
    plausibility=-0.08812,
    support=0.1699,
)
_VOTE_REACH = Reach(
    sharpness=(1.934, 0.04856, -0.4023, 0.2748, -0.0769, 0.01802, 0.1658),
    width=(-3.689, -0.8799, 1.154, 0.1248, 0.11, 0.03616, -0.1469),
    plausibility=0.217,
    support=0.02452,
)
_GATE = Gate(
    (
        (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
        (
            -0.4522,
            -0.7111,
            -1.472,
            1.609,
            0.1937,
            0.1728,
            0.1622,
            0.1845,
            0.1414,
            -0.04175,
            0.04461,
            0.1465,
            -0.366,
            0.01501,
            -0.04823,
            -0.03413,
            0.1078,
        ),
        (
            -2.666,
            -1.359,
            -0.6696,
            1.166,
            0.3373,
            0.4446,
            -0.005257,
            0.03397,
            0.1043,
            -0.1252,
            -0.06118,
            0.06868,
            -1.036,
            -0.2058,
            -0.1227,
            -0.05591,
            -0.1299,
        ),
    )
)


def make_predictor() -> Gated:
    """Return the default predictor of language models with a memory.

    It mixes the model, an adaptation to 64 neighbours in 20 steps, and the vote of these
    neighbours. The reach was fitted on the validation texts of WikiText-2 and of Python's
    documentation together, with SmolLM2-135M and memories of 2.6 and 2.3 million tokens
    (`results/memory-language-model`). The gate was fitted to these memories and, with the same
    total weight, to memories of 20 tokens and more: parts of the same training texts, of the other
    corpus, and of the same text just before the tokens that were scored
    (`experiments.memory_language_model.default_gate`).
    """
    return Gated(ScaledAdapted(_REACH, steps=20, k=64), ScaledVote(_VOTE_REACH, k=64), gate=_GATE)
