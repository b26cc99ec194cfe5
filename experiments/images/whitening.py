"""Features made comparable across classes, and layers fitted to them from the contents of a memory.

A network's features are means of rectified numbers: none is negative, most are small, and a few
large ones dominate distances and steps. Their square roots are more alike. They are then divided by
how far they spread within a known class, so that directions in which images of one class differ a
lot no longer dominate, and scaled to unit length (docs/paper.md, 26).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

import mbpa
from experiments.images.spacing import measure_spacing
from experiments.logistic import fit_logistic
from experiments.methods import Scale

IMAGES_PER_CHUNK = 1 << 16  # images that are in double precision at a time
SPREAD_SHARE = 0.3  # share of the mean variance within a class, added in all directions
LEAST_VARIANCE = 1e-12  # share of the mean square that is no more than rounding
RIDGE_SHARE = 0.003  # share of the keys' mean variance, in the translation
RETRAINING_TOLERANCE = 3e-5  # of the balanced regression; below it, few answers in 10,000 change


@dataclass(frozen=True, eq=False)
class Whitening:
    """A function from features to keys of unit length: `k = M (√f − c) / ‖M (√f − c)‖`.

    Before they are scaled to unit length, the variance within a known class is about 1 in the
    directions in which it was large, and below that in all others.
    """

    center: Float[Tensor, "D"]
    """c, the mean over the images that the network was trained on."""
    matrix: Float[Tensor, "D D"]
    """M, symmetric: the inverse square root of the covariance within known classes, with a share of
    its mean variance added in all directions.
    """

    def __call__(self, features: Float[Tensor, "*N D"]) -> Float[Tensor, "*N D"]:
        """Return the keys of features."""
        return functional.normalize((_root(features) - self.center) @ self.matrix, dim=-1)


class KnownLayer(NamedTuple):
    """What is known before anything new arrives, in terms of whitened keys."""

    whitening: Whitening
    layer: nn.Linear
    """The network's last layer, as a layer of whitened keys."""


def fit_whitening(
    features: Float[Tensor, "N D"],
    labels: Int[Tensor, "N"],
    images_per_chunk: int = IMAGES_PER_CHUNK,
) -> Whitening:
    """Return the whitening by the covariance within classes, with a share of the mean variance
    added in all directions.

    Args:
        images_per_chunk: number of images that are in double precision at a time.

    Raises:
        ValueError: the features do not differ within any class.
    """
    count, size = features.shape
    sums = torch.zeros(int(labels.max()) + 1, size, dtype=torch.float64, device=features.device)
    squares = sums.new_zeros(size, size)
    pairs = zip(features.split(images_per_chunk), labels.split(images_per_chunk), strict=True)
    for part, answers in pairs:
        roots = _root(part).double()
        sums.index_add_(0, answers, roots)
        squares += roots.mT @ roots
    counts = labels.bincount(minlength=len(sums))
    within = (squares - (sums / counts.clamp_min(1)[:, None]).mT @ sums) / count
    mean_variance = float(within.diagonal().mean())
    if mean_variance <= LEAST_VARIANCE * float(squares.diagonal().mean()) / count:
        raise ValueError(
            f"features must differ within a class, got {count} images of {int((counts > 0).sum())} "
            f"classes with a mean variance of {mean_variance:g}"
        )
    within.diagonal().add_(SPREAD_SHARE * mean_variance)
    variances, directions = torch.linalg.eigh(within)
    matrix = directions * variances.rsqrt() @ directions.mT
    return Whitening((sums.sum(0) / count).to(features), matrix.to(features))


def translate_layer(
    layer: nn.Linear,
    features: Float[Tensor, "N D"],
    labels: Int[Tensor, "N"],
    images_per_chunk: int = IMAGES_PER_CHUNK,
) -> KnownLayer:
    """Return the layer of whitened keys whose outputs on these features are closest to those of
    `layer`: least squares with a small ridge.

    Args:
        labels: the classes of the images, by which they are whitened.
        images_per_chunk: number of images that are in double precision at a time.
    """
    whitening = fit_whitening(features, labels, images_per_chunk)

    def parts() -> Iterator[tuple[Tensor, Tensor]]:
        for part in features.split(images_per_chunk):
            yield whitening(part).double(), layer(part).double()

    with torch.no_grad():
        count, size = len(features), layer.in_features
        key = torch.zeros(size, dtype=torch.float64, device=features.device)
        answer = key.new_zeros(layer.out_features)
        for keys, said in parts():
            key += keys.sum(0) / count
            answer += said.sum(0) / count
        spread, shared = key.new_zeros(size, size), key.new_zeros(size, len(answer))
        for keys, said in parts():
            spread += (keys - key).mT @ (keys - key)
            shared += (keys - key).mT @ (said - answer)
        ridge = RIDGE_SHARE * spread.diagonal().mean() * torch.eye(size).to(spread)
        weight = torch.linalg.solve(spread + ridge, shared).mT
        found = nn.Linear(size, len(answer), device=key.device)
        found.weight.copy_(weight)
        found.bias.copy_(answer - weight @ key)
    return KnownLayer(whitening, found)


@dataclass(frozen=True, eq=False)
class WhitenedMemory:
    """The contents of a memory, with whitened keys."""

    memory: mbpa.ExactMemory
    known: KnownLayer
    """The network's last layer as it was before anything new arrived."""
    scale: Scale
    _retrained: dict[float, nn.Linear] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, memory: mbpa.Memory, known: KnownLayer, copies: int) -> Self:
        """Return the same entries with whitened keys.

        Args:
            copies: how often one image may be among the entries.
        """
        entries = memory.entries()
        own = mbpa.ExactMemory(len(memory), memory.key_size, device=memory.device)
        own.write(known.whitening(entries.keys), entries.values)
        return cls(own, known, Scale(near=measure_spacing(own, copies)))

    def retrain(self, penalty: float) -> nn.Linear:
        """Return the layer that fits the memory best, with all classes weighted equally: a logistic
        regression that stays close to the network's original layer.

        Args:
            penalty: on squared changes of weights and biases.
        """
        if penalty not in self._retrained:
            entries = self.memory.entries()
            self._retrained[penalty] = fit_logistic(
                self.known.layer,
                entries.keys,
                entries.values,
                penalty=penalty,
                bias_penalty=penalty,
                prior=self.known.layer,
                balanced=True,
                tolerance=RETRAINING_TOLERANCE,
            )
        return self._retrained[penalty]

    def model(self, penalty: float, predictor: mbpa.Predictor) -> mbpa.MbPA:
        """Return a model of features with the retrained layer of whitened keys."""
        layer = self.retrain(penalty)
        return mbpa.MbPA(self.known.whitening, layer, memory=self.memory, predictor=predictor)


def _root(features: Float[Tensor, "*N D"]) -> Float[Tensor, "*N D"]:
    return features.clamp(min=0).sqrt()
