"""Protocol and settings of the experiments on new image classes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from experiments.config_checks import check_minima, check_rising, check_seeds
from experiments.images.methods import (
    METHODS,
    BalancedAdaptation,
    ImageMethod,
    ImageMethodSettings,
    Model,
    PreservingAdaptation,
    RetrainedLayer,
    ScaledAdaptation,
    Situation,
    make_model,
)
from experiments.methods import Vote, VoteMixture
from experiments.pretraining import Pretraining

EARLY = (0.01, 0.02, 0.03, 0.05, 0.075, 0.1)
"""Epochs after which all methods are tested, early in the stream."""
LATER = (0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0)


@dataclass(frozen=True)
class ImagesConfig:
    """Half of the classes are known, then all arrive; only the last layer learns."""

    seeds: tuple[int, ...] = (1, 2, 3, 4)
    """Random seeds, one random half of the classes each; 0 is reserved for choosing settings."""
    part: Literal["test", "validation"] = "test"
    """Images to score: the published test images, or training images that were held out."""
    dataset: Literal["tiny-imagenet", "imagenet"] = "tiny-imagenet"
    """Source of the images; docs/imagenet.md describes how to run on ImageNet."""
    size: int = 40
    """Side of the images in pixels. Up to 64, the network's first layer is one for small images."""
    enlarged: int = 56
    """Side in pixels to which smaller images of Tiny ImageNet are enlarged; 0 disables this."""
    classes: int = 200
    """Number of classes, chosen at random; half of them are known."""
    mirrored: bool = True
    """Whether features are averaged over an image and its mirror image."""
    shrunk: float = 6 / 7
    """Average features over the image and a copy shrunk to this share of its side; 1: no copy."""
    held_out: int = 50
    """Training images per class that are scored, and not trained on, if `part` is validation."""
    rehearsed: int = 0
    """Training images per known class that are set aside for a rehearsal.
    The network is not trained on them, and they never arrive: `MbPA (kept)` chooses its margin by
    them. 0: it has no margin.
    """
    scored: int = 10_000
    """Maximum number of images to score."""
    pretraining: Pretraining = field(default_factory=Pretraining)
    points: tuple[float, ...] = EARLY + LATER
    """Epochs of all classes after which all methods are tested."""
    batch: int = 64
    """Images per step of the last layer."""
    lr: float = 0.1
    """Learning rate of SGD on the last layer; divided by the mean squared length of a key."""
    momentum: float = 0.9
    """Momentum of SGD on the last layer."""
    capacity: int = 100_000
    """Capacity of the memory.
    Presets have one epoch of Tiny ImageNet, beyond which images would be stored twice.
    """
    scarce: float = 1.0
    """Share of their images that half of the new classes have."""
    vote: Vote = field(default_factory=lambda: Vote(k=50))
    mixture: VoteMixture = field(default_factory=lambda: VoteMixture(k=50))
    rmsprop: ScaledAdaptation = field(default_factory=lambda: ScaledAdaptation("rmsprop", lr=0.001))
    gradient: ScaledAdaptation = field(default_factory=ScaledAdaptation)
    balanced: BalancedAdaptation = field(default_factory=BalancedAdaptation)
    retraining: RetrainedLayer = field(default_factory=RetrainedLayer)
    kept: PreservingAdaptation = field(default_factory=PreservingAdaptation)

    def __post_init__(self) -> None:
        check_seeds(self.seeds)
        check_minima(self, dict.fromkeys(("batch", "scored", "capacity", "held_out"), 1))
        self._check_data()
        check_rising("points", self.points)
        if not 0 < self.scarce <= 1:
            raise ValueError(f"scarce must be above 0 and at most 1, got {self.scarce}")

    def _check_data(self) -> None:
        """Check what can be known without reading data: a folder may hold any part of ImageNet."""
        if self.size < 8:
            raise ValueError(f"size must be at least 8, got {self.size}")
        for name in ("enlarged", "rehearsed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if not 0 < self.shrunk <= 1:
            raise ValueError(f"shrunk must be above 0 and at most 1, got {self.shrunk}")
        if self.pretraining.padding >= self.size:
            raise ValueError(
                f"pretraining.padding must be below size {self.size}, "
                f"got {self.pretraining.padding}"
            )
        if self.dataset == "imagenet":
            return
        if self.held_out + self.rehearsed > 400:
            raise ValueError(
                "held_out and rehearsed must be at most 400 of the 500 per class, "
                f"got {self.held_out} and {self.rehearsed}"
            )
        trained = self.classes // 2 * (500 - self.spared - self.rehearsed)
        if self.pretraining.batch > trained:
            raise ValueError(
                f"pretraining.batch must be at most {trained}, the number of training images, "
                f"got {self.pretraining.batch}"
            )
        if not 2 <= self.classes <= 200:
            raise ValueError(f"classes must be between 2 and 200, got {self.classes}")

    @property
    def spared(self) -> int:
        """Training images per class that are not trained on."""
        return self.held_out if self.part == "validation" else 0

    def settings(self, method: str) -> ImageMethodSettings:
        """Return the settings of a method that has some."""
        found: ImageMethodSettings = getattr(self, METHODS[method].settings)
        return found

    @property
    def methods(self) -> dict[str, ImageMethod]:
        """The methods to compare, by name."""
        is_scarce = self.scarce < 1
        return {name: each for name, each in METHODS.items() if is_scarce or not each.needs_scarce}

    def models(self, situation: Situation, with_own_layers: bool = True) -> dict[str, Model]:
        """Return the methods to compare in this situation, optionally without those that have a
        layer of their own.
        """
        return {
            name: make_model(self.settings(name) if method.settings else None, situation)
            for name, method in self.methods.items()
            if with_own_layers or not method.has_own_layer
        }
