"""Square roots of features, and layers made for these from what a memory holds.

A network's features are means of rectified numbers: none is negative, most are small, and a few
large ones decide all distances and steps. Their square roots are more alike, and a layer of them
learns more of a new class from the same few images.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

import mbpa
from mbpa.experiments.logistic import logistic

RIDGE = 0.03  # of the translation, as a share of the roots' mean variance
SOME = 1_000  # entries, whose distances tell those of all
TOLERANCE = 3e-5  # of the regression; classes weigh the same, and accuracies stand still by then


class Scale(NamedTuple):
    """Of the keys, so that settings mean the same for every network."""

    near: float
    """The mean distance between an entry of the memory and the nearest other one."""
    length: float
    """The mean square of a key's length."""


class Known(NamedTuple):
    """What there is of roots before anything new arrives."""

    layer: nn.Linear
    length: float
    """The mean square of a key's length."""


def roots_of(features: Float[Tensor, "*N D"]) -> Float[Tensor, "*N D"]:
    """What a layer of roots sees."""
    return features.clamp(min=0).sqrt()


def translated(layer: nn.Linear, features: Float[Tensor, "N D"]) -> Known:
    """The layer of roots that says of these features most nearly what a layer of features says:
    least squares, with a small ridge."""
    with torch.no_grad():
        keys, said = roots_of(features).double(), layer(features).double()
        key, answer = keys.mean(0), said.mean(0)
        spread = (keys - key).mT @ (keys - key)
        ridge = RIDGE * spread.diagonal().mean() * torch.eye(len(key), device=keys.device)
        weight = torch.linalg.solve(spread + ridge, (keys - key).mT @ (said - answer)).mT
        found = nn.Linear(len(key), len(answer), device=keys.device)
        found.weight.copy_(weight)
        found.bias.copy_(answer - weight @ key)
    return Known(found, float(keys.square().sum(1).mean()))


@dataclass(frozen=True, eq=False)
class Roots:
    """What a memory holds, as roots."""

    memory: mbpa.ExactMemory
    known: nn.Linear
    """The layer as it was before anything new arrived."""
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
        return cls(own, known.layer, Scale(nearness(own, copies), known.length))

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
                self.known,
                entries.keys,
                entries.values,
                penalty=penalty * self.scale.length,
                bias_penalty=penalty,
                prior=self.known,
                balanced=True,
                tolerance=TOLERANCE,
            )
        return self._retrained[penalty]


def nearness(memory: mbpa.Memory, copies: int) -> float:
    """The mean distance between an entry and the nearest other one; an image that is there several
    times is not its own neighbour."""
    found = memory.read(memory.entries().keys[:SOME], copies + 1, keys_for=0).distances
    nearest = found.masked_fill(found == 0, torch.inf).amin(1)
    nearest = nearest[nearest.isfinite()]
    return float(nearest.sqrt().mean()) if len(nearest) else 1.0  # all keys are the same
