"""Square roots of features, and layers fitted to them from the contents of a memory.

A network's features are means of rectified numbers: none is negative, most are small, and a few
large ones dominate distances and steps. Their square roots are more alike. In manual trials a layer
of square roots learnt more about a new class from the same few images (docs/paper.md, 26).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

import mbpa
from experiments.images.spacing import measure_spacing
from experiments.logistic import fit_logistic
from experiments.methods import Scale

IMAGES_PER_CHUNK = 1 << 16  # images whose roots are in double precision at a time
RIDGE_SHARE = 0.03  # share of the roots' mean variance, in the translation
RETRAINING_TOLERANCE = 3e-5  # of the balanced regression; accuracies no longer change


class KnownLayer(NamedTuple):
    """A layer of square roots before anything new arrives."""

    layer: nn.Linear
    length: float
    """Mean squared length of an image's square roots."""


def roots_of(features: Float[Tensor, "*N D"]) -> Float[Tensor, "*N D"]:
    """Return the inputs of a layer of square roots."""
    return features.clamp(min=0).sqrt()


def translate_layer(
    layer: nn.Linear,
    features: Float[Tensor, "N D"],
    images_per_chunk: int = IMAGES_PER_CHUNK,
) -> KnownLayer:
    """Return the layer of square roots whose outputs on these features are closest to those of
    `layer`: least squares with a small ridge.

    Args:
        images_per_chunk: number of images whose roots are in double precision at a time.
    """

    def parts() -> Iterator[tuple[Tensor, Tensor]]:
        for part in features.split(images_per_chunk):
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
        ridge = RIDGE_SHARE * spread.diagonal().mean() * torch.eye(size).to(spread)
        weight = torch.linalg.solve(spread + ridge, shared).mT
        found = nn.Linear(size, len(answer), device=key.device)
        found.weight.copy_(weight)
        found.bias.copy_(answer - weight @ key)
    return KnownLayer(found, length)


@dataclass(frozen=True, eq=False)
class Roots:
    """The contents of a memory, as square roots."""

    memory: mbpa.ExactMemory
    layer: nn.Linear
    """The layer as it was before anything new arrived."""
    scale: Scale
    _retrained: dict[float, nn.Linear] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, memory: mbpa.Memory, known: KnownLayer, copies: int) -> Self:
        """Return the same entries as square roots, with the network's original layer.

        Args:
            copies: how often one image may be among the entries.
        """
        entries = memory.entries()
        own = mbpa.ExactMemory(len(memory), memory.key_size, device=memory.device)
        own.write(roots_of(entries.keys), entries.values)
        return cls(own, known.layer, Scale(measure_spacing(own, copies), known.length))

    def retrain(self, penalty: float) -> nn.Linear:
        """Return the layer that fits the memory best, with all classes weighted equally: a logistic
        regression that stays close to the network's original layer.

        Args:
            penalty: on squared changes of the biases and, multiplied by the mean squared length
                of a key, on squared changes of the weights.
        """
        if penalty not in self._retrained:
            entries = self.memory.entries()
            self._retrained[penalty] = fit_logistic(
                self.layer,
                entries.keys,
                entries.values,
                penalty=penalty * self.scale.length,
                bias_penalty=penalty,
                prior=self.layer,
                balanced=True,
                tolerance=RETRAINING_TOLERANCE,
            )
        return self._retrained[penalty]
