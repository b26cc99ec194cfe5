"""Protocol and settings of the experiments on new image classes, with their presets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import mbpa
from experiments.images.methods import (
    METHODS,
    Kept,
    Local,
    Mixed,
    Model,
    Retrained,
    Settings,
    Situation,
    Vote,
)
from experiments.pretraining import Pretraining

EARLY = (0.01, 0.02, 0.03, 0.05, 0.075, 0.1)
"""Epochs after which everything is tested, at the beginning."""
LATER = (0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0)


@dataclass(frozen=True)
class ImagesConfig:
    """Half of the classes are known, then all arrive; only the last layer learns."""

    seeds: tuple[int, ...] = (1, 2, 3, 4)
    """One random half of the classes each; 0 is for choosing settings."""
    part: Literal["test", "validation"] = "test"
    """Which images are scored: the published ones, or training images that were held out."""
    dataset: Literal["tiny-imagenet", "imagenet"] = "tiny-imagenet"
    """Where the images come from; the run sheet for ImageNet is docs/imagenet.md."""
    size: int = 40
    """Of the images, in pixels. Up to 64 the network's first layer is one for small images."""
    enlarged: int = 56
    """To how many pixels images of Tiny ImageNet are enlarged for the network, if they have fewer;
    0: they are not."""
    classes: int = 200
    """That take part, chosen at random; half of them are known."""
    mirrored: bool = True
    """Whether features are the mean over an image and its mirror image."""
    shrunk: float = 6 / 7
    """Features are also the mean over the image and the image shrunk to this share of its side; 1:
    they are not."""
    held_out: int = 50
    """Training images of each class that are scored where `part` is validation, and not trained on
    then."""
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
    capacity: int = 100_000
    """Of the memory; an epoch of Tiny ImageNet, beyond which it would hold images twice."""
    scarce: float = 1.0
    """The share of their images that half of the new classes have."""
    vote: Vote = field(default_factory=Vote)
    mixture: Mixed = field(default_factory=Mixed)
    rmsprop: Local = field(default_factory=lambda: Local("rmsprop", lr=0.001))
    gradient: Local = field(default_factory=Local)
    retraining: Retrained = field(default_factory=Retrained)
    kept: Kept = field(default_factory=Kept)

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds must name at least one, none of them twice, got {self.seeds}")
        for name in ("batch", "scored", "capacity", "held_out"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        self._check_data()
        rising = list(self.points) == sorted(set(self.points))
        if not self.points or not rising or self.points[0] <= 0:
            raise ValueError(f"points must be positive and rising, got {self.points}")
        if not 0 < self.scarce <= 1:
            raise ValueError(f"scarce must be above 0 and at most 1, got {self.scarce}")

    def _check_data(self) -> None:
        """As far as is known without looking: a folder of ImageNet may be any part of it."""
        if self.size < 8:
            raise ValueError(f"size must be at least 8, got {self.size}")
        if self.enlarged < 0:
            raise ValueError(f"enlarged must not be negative, got {self.enlarged}")
        if not 0 < self.shrunk <= 1:
            raise ValueError(f"shrunk must be above 0 and at most 1, got {self.shrunk}")
        if self.pretraining.padding >= self.size:
            raise ValueError(
                f"pretraining.padding must be below size {self.size}, "
                f"got {self.pretraining.padding}"
            )
        if self.dataset == "imagenet":
            return
        if self.held_out > 400:
            raise ValueError(f"held_out must be at most 400 of a class's 500, got {self.held_out}")
        trained = self.classes // 2 * (500 - self.spared)
        if self.pretraining.batch > trained:
            raise ValueError(
                f"pretraining.batch must be at most {trained}, the images there are, "
                f"got {self.pretraining.batch}"
            )
        if not 2 <= self.classes <= 200:
            raise ValueError(f"classes must be between 2 and 200, got {self.classes}")

    @property
    def spared(self) -> int:
        """Training images of each class that are not trained on."""
        return self.held_out if self.part == "validation" else 0

    def settings(self, method: str) -> Settings:
        """Of one of the methods that have some."""
        found: Settings = getattr(self, METHODS[method].settings)
        return found

    def models(self, situation: Situation, with_own_layers: bool = True) -> dict[str, Model]:
        """The methods that are compared, in this situation; perhaps without those that have a layer
        of their own."""
        alone = mbpa.MbPA(head=situation.head, memory=situation.memory, predictor=mbpa.Parametric())
        return {
            name: self.settings(name).model(situation) if method.settings else alone
            for name, method in METHODS.items()
            if with_own_layers or not method.has_own_layer
        }
