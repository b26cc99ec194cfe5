"""A transformers model that shares its weights with another, and whose output layer is adapted."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mbpa.modules.sharing import share

if TYPE_CHECKING:
    from mbpa.language.prediction import Prediction

ROWS = 256  # of a prediction at a time, each with a number per token


class AdaptedOutputs(nn.Module):
    """An output layer whose outputs are log-probabilities with the memory.

    While the memory is empty it is the layer of the model.

    Args:
        linear: output layer of the model.
        predict: returns predictions for states.
        watch: called with each prediction.
    """

    def __init__(
        self,
        linear: nn.Linear,
        predict: Callable[[Tensor], Prediction],
        watch: Callable[[Prediction], None] | None = None,
    ) -> None:
        super().__init__()
        # In a list, so that it is not a child whose parameters are counted twice.
        self._linear, self._predict, self._watch = [linear], predict, watch

    @property
    def weight(self) -> Tensor:
        return self._linear[0].weight

    @property
    def bias(self) -> Tensor | None:
        return self._linear[0].bias

    def forward(self, states: Float[Tensor, "*B D"]) -> Float[Tensor, "*B C"]:
        parts, flat = [], states.flatten(0, -2)
        for rows in flat.split(ROWS if self._watch is None else max(1, len(flat))):
            prediction = self._predict(rows)
            if self._watch is not None:
                self._watch(prediction)
            if prediction.neighbors is None:
                outputs: Tensor = self._linear[0](states)
                return outputs
            parts.append(prediction.adapted)
        outputs = parts[0] if len(parts) == 1 else torch.cat(parts)
        return outputs.view(*states.shape[:-1], -1)


def share_with_adapted_outputs(
    model: nn.Module,
    linear: nn.Linear,
    predict: Callable[[Tensor], Prediction],
    watch: Callable[[Prediction], None] | None = None,
) -> Any:
    """Return a copy of a model that shares its weights, with another output layer.

    Args:
        model: the model, which is not changed.
        linear: its output layer.
        predict: returns predictions for states.
        watch: called with each prediction.
    """
    return share(model, {id(linear): AdaptedOutputs(linear, predict, watch)})
