"""Square roots of features, and layers made for these from what a memory holds.

A network's features are means of rectified numbers: none is negative, most are small, and a few
large ones decide distances and steps. Their square roots are more alike, and in trials by hand a
layer of them learnt more of a new class from the same few images (docs/paper.md, 26).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

import mbpa
from experiments.images.scale import Scale, spacing
from experiments.logistic import logistic

AT_ONCE = 1 << 16  # images whose roots are held in double precision
RIDGE = 0.03  # of the translation, as a share of the roots' mean variance
TOLERANCE = 3e-5  # of the regression; classes weigh the same, and accuracies stand still by then


class Known(NamedTuple):
    """What there is of roots before anything new arrives."""

    layer: nn.Linear
    length: float
    """The mean square of the length of an image's roots."""


def roots_of(features: Float[Tensor, "*N D"]) -> Float[Tensor, "*N D"]:
    """What a layer of roots sees."""
    return features.clamp(min=0).sqrt()


def translated(layer: nn.Linear, features: Float[Tensor, "N D"]) -> Known:
    """The layer of roots that says of these features most nearly what a layer of features says:
    least squares, with a small ridge."""

    def parts() -> Iterator[tuple[Tensor, Tensor]]:
        for part in features.split(AT_ONCE):
            yield roots_of(part).double(), layer(part).double()

    with torch.no_grad():
        count, size = len(features), layer.in_features
        key = torch.zeros(size, dtype=torch.float64, device=features.device)
        answer = key.new_zeros(layer.out_features)
        for keys, said in parts():
            key += keys.sum(0) / count
            answer += said.sum(0) / count
        spread, shared, length = key.new_zeros(size, size), key.new_zeros(size, len(answer)), 0.0
        for keys, said in parts():
            spread += (keys - key).mT @ (keys - key)
            shared += (keys - key).mT @ (said - answer)
            length += float(keys.square().sum()) / count
        ridge = RIDGE * spread.diagonal().mean() * torch.eye(size).to(spread)
        weight = torch.linalg.solve(spread + ridge, shared).mT
        found = nn.Linear(size, len(answer), device=key.device)
        found.weight.copy_(weight)
        found.bias.copy_(answer - weight @ key)
    return Known(found, length)


@dataclass(frozen=True, eq=False)
class Roots:
    """What a memory holds, as roots."""

    memory: mbpa.ExactMemory
    layer: nn.Linear
    """As it was before anything new arrived."""
    scale: Scale
    _retrained: dict[float, nn.Linear] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, memory: mbpa.Memory, known: Known, copies: int) -> Self:
        """The same entries, and the layer that the network came with.

        Args:
            copies: how often an image may be among the entries.
        """
        entries = memory.entries()
        own = mbpa.ExactMemory(len(memory), memory.key_size, device=memory.device)
        own.write(roots_of(entries.keys), entries.values)
        return cls(own, known.layer, Scale(spacing(own, copies), known.length))

    def retrained(self, penalty: float) -> nn.Linear:
        """The layer that fits the memory best, all classes counting alike: a logistic regression
        that stays near the one that the network came with.

        Args:
            penalty: on the squares of changes of biases, and, times the mean square of a key's
                length, of weights.
        """
        if penalty not in self._retrained:
            entries = self.memory.entries()
            self._retrained[penalty] = logistic(
                self.layer,
                entries.keys,
                entries.values,
                penalty=penalty * self.scale.length,
                bias_penalty=penalty,
                prior=self.layer,
                balanced=True,
                tolerance=TOLERANCE,
            )
        return self._retrained[penalty]
