"""A mixture for language models that decides per query how far to trust the memory.

`Gated` mixes the model with predictions from the memory, `p = Σ_m λ_m p_m`, with weights
λ = softmax(A f) that are linear in features f of the query, its neighbours and the predictions.
Like the features of `scaled_predictors`, these have no unit, so coefficients fitted with one memory
can be used with another.

Shapes: B queries, C classes, P predictions, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mbpa.language.scaled_predictors import (
    LEAST_LOG_PROBABILITY,
    NEIGHBORHOOD_FEATURES,
    Neighborhood,
    Reach,
    ScaledAdapted,
    ScaledVote,
    make_tensor,
    parse_row,
    require_labels,
    weigh_neighbors,
)
from mbpa.memory import Memory, validation
from mbpa.predictors import Context, Part, Predictor
from mbpa.serialization import register

__all__ = [
    "NEIGHBORHOOD_FEATURES",
    "PREDICTION_FEATURES",
    "SMALL_MEMORY_POWER",
    "Gate",
    "Gated",
    "Neighborhood",
    "Reach",
    "ScaledAdapted",
    "ScaledVote",
    "count_features",
    "fit_gate",
    "make_predictor",
    "measure_features",
    "weigh_neighbors",
]

PREDICTION_FEATURES = (
    "entropy",
    "log top probability",
    "has the same top class as the model",
    "log probability of its top class by the model",
    "divergence from the model",
)
"""Features of each prediction besides the model's, in the order of the coefficients."""
SMALL_MEMORY_POWER = 3.0  # of the share of a gate's k neighbours that a small memory has


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
        rows = tuple(parse_row("coefficients", row, width) for row in self.coefficients)
        object.__setattr__(self, "coefficients", rows)
        object.__setattr__(self, "k", validation.count("k", self.k))

    def weigh(self, features: Float[Tensor, "B F"]) -> Float[Tensor, "B P"]:
        """Return the logarithms of the mixing weights."""
        return (features @ make_tensor(self.coefficients, features).T).log_softmax(1)


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

    @property
    def uses_label_counts(self) -> bool:
        return any(part.uses_label_counts for part in self.mixed)

    def check(self, head: nn.Module, memory: Memory) -> None:
        require_labels(memory)
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


register(Gate, Gated)

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
