"""Predictions of a language model with a memory, and what they say about single tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mbpa.kernels import InverseDistance, neighbor_weights
from mbpa.language.scaled_predictors import ScaledAdapted
from mbpa.language.tokens import Alternative, Origin, Token
from mbpa.memory import Neighbors
from mbpa.predictors import Adapted, Context, Predictor


@dataclass(frozen=True, eq=False)
class Prediction:
    """Log-probabilities of the next token at some states."""

    alone: Float[Tensor, "B C"]
    adapted: Float[Tensor, "B C"]
    neighbors: Neighbors | None
    """The nearest entries; `None` if the memory is empty."""
    weights: Float[Tensor, "B K"] | None = None
    """Their weights, if these were asked for."""


def describe_tokens(
    prediction: Prediction,
    tokens: Sequence[int],
    locate: Callable[[int, float, float], Origin],
    *,
    origins: int,
    top: int,
) -> list[Token]:
    """Return what a prediction says about tokens, one per row, without their text.

    Args:
        prediction: prediction for B places of a text.
        tokens: ids of the tokens that followed, one per place.
        locate: returns where an entry of the memory comes from, given its id, weight and distance.
        origins: the most similar places to return per token.
        top: how many of the most probable tokens to return per place.
    """
    index = torch.tensor(tokens, device=prediction.adapted.device)[:, None]
    adapted = prediction.adapted.gather(1, index)[:, 0].tolist()
    alone = prediction.alone.gather(1, index)[:, 0].tolist()
    places = [
        tuple(locate(*place) for place in row) for row in _rank_origins(prediction, index, origins)
    ]
    found = prediction.adapted.topk(min(top, prediction.adapted.shape[1]))
    best = zip(found.indices.tolist(), found.values.tolist(), strict=True)
    return [
        Token(token, "", after, before, origin, _list_alternatives(*row))
        for token, after, before, origin, row in zip(
            tokens, adapted, alone, places, best, strict=True
        )
    ]


def weigh_adapted_neighbors(predictor: Predictor, context: Context) -> Float[Tensor, "B K"]:
    """Return the weights that a predictor gives to the neighbours it adapts to."""
    for part in (predictor, *getattr(predictor, "mixed", ())):
        nearest = context.nearest(part.k)
        if isinstance(part, ScaledAdapted):
            return part.weigh(nearest)
        if isinstance(part, Adapted):
            return neighbor_weights(part.kernel, nearest.found)
    return neighbor_weights(InverseDistance(), context.found)


def _rank_origins(
    prediction: Prediction, tokens: Tensor, count: int
) -> list[list[tuple[int, float, float]]]:
    """Return id, weight and distance of entries per row: those of the same token first, by weight.

    Args:
        prediction: the prediction.
        tokens: the token that followed in each row, of shape (B, 1).
        count: the most entries per row.
    """
    neighbors, weights = prediction.neighbors, prediction.weights
    if neighbors is None or weights is None or not count:
        return [[] for _ in tokens]
    same = neighbors.mask & (neighbors.values == tokens)
    ranked = weights.masked_fill(~neighbors.mask, -1).argsort(descending=True, stable=True)
    # Not by a sum with the weights, which would round them.
    order = same.gather(1, ranked).to(torch.int8).argsort(descending=True, stable=True)
    best = ranked.gather(1, order[:, :count]).cpu()
    columns = zip(
        neighbors.ids.cpu().gather(1, best).tolist(),
        weights.cpu().gather(1, best).tolist(),
        neighbors.distances.sqrt().cpu().gather(1, best).tolist(),
        strict=True,
    )
    return [[place for place in zip(*row, strict=True) if place[0] >= 0] for row in columns]


def _list_alternatives(ids: list[int], log_probs: list[float]) -> tuple[Alternative, ...]:
    return tuple(Alternative(i, "", p) for i, p in zip(ids, log_probs, strict=True))
