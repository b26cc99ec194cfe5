"""Mixtures of LSTM, MbPA and cache whose weights are decided per token.

A gate (`mbpa.language.gate`) looks at the network's prediction, at the nearest entries of the
memory and at what each component predicts, never at the word to come. Several adaptations of
different reach may be mixed, so the gate also decides per token how far to follow the memory.

Shapes: P tokens that are scored, M components besides the LSTM, F features of a gate, V words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

import mbpa
from experiments.language.config import Cache, GatedMixture, RecentAdaptation
from experiments.language.passage import (
    Retrieval,
    make_blocks,
    make_model,
    perplexity,
    predict_cache,
)
from mbpa.language.gate import (
    NEIGHBORHOOD_FEATURES,
    PREDICTION_FEATURES,
    Gate,
    fit_gate,
    measure_features,
)
from mbpa.predictors import Context

CACHE_PART = "cache"
FOLDS = 4
"""Number of parts of a text; a gate is judged on each part after it was fitted to the others."""


@dataclass(frozen=True, eq=False)
class TokenScores:
    """Scores of some tokens of a text by each component, and the features that a gate may use."""

    names: tuple[str, ...]
    """The components besides the LSTM."""
    surroundings: Float[Tensor, "P N"]
    """Features of the neighbours and of the LSTM's prediction."""
    features: Float[Tensor, "M P R"]
    """Features of each component's prediction."""
    own: Float[Tensor, "P"]
    """Log-probability of each word by the LSTM."""
    scores: Float[Tensor, "M P"]
    """Log-probability of each word by each component."""

    def select(self, names: Sequence[str]) -> tuple[Float[Tensor, "P F"], Float[Tensor, "P C"]]:
        """Return the inputs of a gate that mixes the LSTM with these components: features, and
        log-probabilities.
        """
        rows = [self.names.index(name) for name in names]
        features = [self.surroundings, *(self.features[row] for row in rows)]
        scores = [self.own, *(self.scores[row] for row in rows)]
        return torch.cat(features, 1), torch.stack(scores, 1)

    def join(self, other: TokenScores) -> TokenScores:
        """Return the scores of the components of both, for the same tokens."""
        return TokenScores(
            self.names + other.names,
            self.surroundings,
            torch.cat([self.features, other.features]),
            self.own,
            torch.cat([self.scores, other.scores]),
        )

    def to(self, device: torch.device | str) -> TokenScores:
        parts = (self.surroundings, self.features, self.own, self.scores)
        return TokenScores(self.names, *(part.to(device) for part in parts))


@torch.no_grad()
def score_components(
    head: nn.Linear,
    base: Retrieval,
    retrievals: Mapping[int, Retrieval],
    mixture: GatedMixture,
    reaches: Mapping[str, RecentAdaptation],
    cache: Cache | None,
    positions: range,
    engine: mbpa.Engine,
) -> TokenScores:
    """Score tokens with adaptations of several reaches, and with the cache if one is given.

    Args:
        head: the network's output layer.
        base: neighbours from which the gate judges a token's surroundings.
        retrievals: neighbours by memory size, for the memory of every reach.
        mixture: settings of the gate.
        reaches: the adaptations by name.
        cache: settings of the cache; `None` leaves it out.
        positions: positions of the tokens in the passage.
        engine: computes the adaptations.
    """
    passage = base.passage
    model = make_model(head, passage, mbpa.Parametric(), engine)
    names = (*reaches, *((CACHE_PART,) if cache is not None else ()))
    surroundings, features, scores, own = [], [], [], []
    blocks = list(make_blocks(positions, passage.keys.device))
    span = max((block[-1] - block[0] for block in blocks), default=0)
    for block in blocks:
        rows = slice(block.start, block.stop, block.step)
        targets = passage.targets[rows, None]
        predictions = [
            _adapt(model, retrievals[reach.memory], reach, block, span)
            for reach in reaches.values()
        ]
        if cache is not None:
            window = cache.window or base.window
            predictions.append(predict_cache(passage, window, cache.scale, block, len(head.bias)))
        k = min(mixture.k, base.window)
        around = _make_context(model, base, block, k, span)
        measured = measure_features(around, predictions, k)
        surroundings.append(measured[:, : len(NEIGHBORHOOD_FEATURES)])
        rest = measured[:, len(NEIGHBORHOOD_FEATURES) :]
        features.append(rest.unflatten(1, (len(names), len(PREDICTION_FEATURES))).transpose(0, 1))
        scores.append(torch.stack([each.gather(1, targets)[:, 0] for each in predictions]))
        own.append(passage.own[rows])
    found = torch.cat(scores, 1)
    return TokenScores(
        names,
        torch.cat(surroundings),
        torch.cat(features, 1),
        torch.cat(own),
        found.masked_fill(found.isnan(), -math.inf),
    )


def _make_context(
    model: mbpa.MbPA, retrieval: Retrieval, block: range, k: int, span: int
) -> Context:
    rows = slice(block.start, block.stop, block.step)
    neighbors = retrieval.neighbors(block, k, retrieval.window + span)
    return model.build_context(retrieval.passage.keys[rows], neighbors)


def _adapt(
    model: mbpa.MbPA, retrieval: Retrieval, reach: RecentAdaptation, block: range, span: int
) -> Float[Tensor, "B V"]:
    predictor = reach.local.predictor(reach.memory)
    prediction: Tensor = predictor(_make_context(model, retrieval, block, predictor.k, span))
    # NaN comes from a rate that is far too large.
    return prediction.masked_fill(prediction.isnan(), -math.inf)


def fit_mixture(scores: TokenScores, names: Sequence[str], mixture: GatedMixture) -> Gate:
    """Return the gate that gives these words the highest probability."""
    features, logs = scores.select(names)
    known = logs.isfinite().any(1)
    return fit_gate(features[known], logs[known], k=mixture.k, ridge=mixture.ridge)


def mix_gated(gate: Gate, scores: TokenScores, names: Sequence[str]) -> Float[Tensor, "P"]:
    """Return log-probabilities of a gated mixture, in double precision."""
    features, logs = scores.select(names)
    return (gate.weigh(features.double()) + logs.double()).logsumexp(1)


def judge_mixture(scores: TokenScores, names: Sequence[str], mixture: GatedMixture) -> float:
    """Return the perplexity of a gated mixture, by cross-validation over parts of the text."""
    logs = torch.empty_like(scores.own, dtype=torch.float64)
    for part in torch.arange(len(logs)).tensor_split(FOLDS):
        if not len(part):
            continue
        is_inside = torch.zeros(len(logs), dtype=torch.bool, device=logs.device)
        is_inside[part.to(logs.device)] = True
        gate = fit_mixture(_choose_tokens(scores, ~is_inside), names, mixture)
        logs[is_inside] = mix_gated(gate, _choose_tokens(scores, is_inside), names)
    return perplexity(logs)


def _choose_tokens(scores: TokenScores, chosen: Tensor) -> TokenScores:
    return TokenScores(
        scores.names,
        scores.surroundings[chosen],
        scores.features[:, chosen],
        scores.own[chosen],
        scores.scores[:, chosen],
    )
