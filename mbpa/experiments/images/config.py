"""Protocol and settings of the experiments on new image classes, with their presets."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import mbpa
from mbpa.experiments.pretraining import Pretraining

EARLY = (0.01, 0.02, 0.03, 0.05, 0.075, 0.1)
"""Epochs after which everything is tested, at the beginning."""
LATER = (0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0)


@dataclass(frozen=True)
class Vote:
    """A vote of the neighbours."""

    k: int = 50
    """Neighbours."""
    bandwidth: float = 0.0
    """Of a Gaussian kernel, in units of the mean distance between nearest entries; 0: the paper's
    inverse distance."""

    def __post_init__(self) -> None:
        if self.k < 1 or self.bandwidth < 0:
            raise ValueError(f"k must be at least 1, bandwidth not negative, got {self}")


@dataclass(frozen=True)
class Local:
    """An adaptation to the neighbours."""

    rule: Literal["rmsprop", "gradient"] = "gradient"
    lr: float = 0.1
    """For gradients, divided by the mean square of a key's length."""
    steps: int = 10
    """Of the adaptation."""
    k: int = 50
    """Neighbours."""
    bandwidth: float = 0.0
    """As that of a vote."""
    decay: float = 0.0
    """The pull back to the layer's own parameters."""

    def __post_init__(self) -> None:
        if min(self.steps, self.k) < 1 or not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"steps and k must be at least 1, lr positive, got {self}")


@dataclass(frozen=True)
class ImagesConfig:
    """Half of the classes are known, then all arrive; only the last layer learns."""

    seeds: tuple[int, ...] = (1, 2, 3, 4)
    """One random half of the classes each; 0 is for choosing settings."""
    part: Literal["test", "validation"] = "test"
    """Which images are scored: the published ones, or training images that were held out."""
    size: int = 40
    """Of the images, in pixels."""
    classes: int = 200
    held_out: int = 50
    """Training images of each class that are never trained on."""
    scored: int = 10_000
    """Images that are scored, at most."""
    pretraining: Pretraining = field(default_factory=Pretraining)
    points: tuple[float, ...] = EARLY + LATER
    """Epochs of all classes after which everything is tested."""
    batch: int = 64
    lr: float = 0.1
    """Of stochastic gradient descent on the last layer, divided by the mean square of a key's
    length."""
    momentum: float = 0.9
    capacity: int = 300_000
    """Of the memory."""
    scarce: float = 1.0
    """The share of their images that half of the new classes have."""
    vote: Vote = field(default_factory=Vote)
    mixture: Vote = field(default_factory=Vote)
    mixture_weight: float = 0.5
    """Of the vote in the mixture."""
    rmsprop: Local = field(default_factory=lambda: Local("rmsprop", lr=0.001))
    gradient: Local = field(default_factory=Local)

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds must name at least one, none of them twice, got {self.seeds}")
        for name in ("batch", "scored", "capacity", "held_out"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.held_out > 400:
            raise ValueError(f"held_out must be at most 400 of a class's 500, got {self.held_out}")
        trained = self.classes // 2 * (500 - self.held_out)
        if self.pretraining.batch > trained:
            raise ValueError(
                f"pretraining.batch must be at most {trained}, the images there are, "
                f"got {self.pretraining.batch}"
            )
        if not 2 <= self.classes <= 200:
            raise ValueError(f"classes must be between 2 and 200, got {self.classes}")
        rising = list(self.points) == sorted(set(self.points))
        if not self.points or not rising or self.points[0] <= 0:
            raise ValueError(f"points must be positive and rising, got {self.points}")
        if not 0 < self.scarce <= 1:
            raise ValueError(f"scarce must be above 0 and at most 1, got {self.scarce}")

    def predictors(self, near: float, length: float) -> dict[str, mbpa.Predictor]:
        """The methods that are compared.

        Args:
            near: the mean distance of the nearest neighbour.
            length: the mean square of a key's length.
        """
        mixed = voting(self.mixture, near)
        shares = 1 - self.mixture_weight, self.mixture_weight
        return {
            "parametric": mbpa.Parametric(),
            "memory only": voting(self.vote, near),
            "mixture": mbpa.Mixture(mbpa.Parametric(), mixed, weights=shares),
            "MbPA (RMSprop)": adapting(self.rmsprop, near, length),
            "MbPA (gradient)": adapting(self.gradient, near, length),
        }


def adapting(local: Local, near: float, length: float) -> mbpa.Adapted:
    """An adaptation with these settings, for keys of this scale."""
    rule: mbpa.Rule = mbpa.Gradient(local.lr / length, local.steps, local.decay)
    if local.rule == "rmsprop":
        rule = mbpa.RMSprop(local.lr, local.steps, local.decay)
    return mbpa.Adapted(rule, k=local.k, kernel=_kernel(local.bandwidth, near))


def voting(vote: Vote, near: float) -> mbpa.NeighborVote:
    """A vote with these settings, for distances of this scale."""
    return mbpa.NeighborVote(_kernel(vote.bandwidth, near), k=vote.k)


def _kernel(bandwidth: float, near: float) -> mbpa.kernels.Kernel:
    return mbpa.gaussian(bandwidth * near) if bandwidth else mbpa.inverse_distance()
