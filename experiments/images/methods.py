"""The methods compared: their settings, the predictors they make, and what a search tries.

A method is an entry of `METHODS` together with the field of the config that holds its settings.
Runs, search, sensitivities and figures follow from that.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

import mbpa
from experiments.images.roots import Known, Roots, roots_of
from experiments.images.scale import Scale
from experiments.search import Grid


@dataclass(frozen=True, eq=False)
class Situation:
    """Everything that a method can use."""

    head: nn.Linear
    memory: mbpa.Memory
    scale: Scale
    old: int
    """Number of classes that the network knows; their labels are below this."""
    known: Known
    """The layer of square roots as it was before anything new arrived."""
    copies: int
    """How often one image may be in the memory."""

    @cached_property
    def roots(self) -> Roots:
        """The contents of the memory, as square roots of features."""
        return Roots.of(self.memory, self.known, self.copies)


class Settings(abc.ABC):
    """Settings of a method, in units of the scale of the keys."""

    @abc.abstractmethod
    def model(self, situation: Situation) -> Model:
        """Return the model that predicts in this situation."""


class Recalling(Settings):
    """Settings of a method that differs from the others only in its predictor."""

    @abc.abstractmethod
    def predictor(self, scale: Scale) -> mbpa.Predictor:
        """Return the predictor with these settings."""

    def model(self, situation: Situation) -> Model:
        predictor = self.predictor(situation.scale)
        return mbpa.MbPA(head=situation.head, memory=situation.memory, predictor=predictor)


@dataclass(frozen=True)
class Vote(Recalling):
    """A vote of the neighbours."""

    k: int = 50
    """Number of neighbours."""
    bandwidth: float = 0.0
    """Bandwidth of a Gaussian kernel, in units of the mean distance between nearest entries; 0
    selects the paper's inverse distance.
    """

    def __post_init__(self) -> None:
        if self.k < 1 or self.bandwidth < 0:
            raise ValueError(f"k must be at least 1, bandwidth not negative, got {self}")

    def predictor(self, scale: Scale) -> mbpa.Predictor:
        return mbpa.NeighborVote(_kernel(self.bandwidth, scale), k=self.k)


@dataclass(frozen=True)
class Mixed(Vote):
    """A mixture of the layer's probabilities and those of a vote."""

    weight: float = 0.5
    """Weight of the vote, between 0 and 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.weight <= 1:
            raise ValueError(f"weight must be between 0 and 1, got {self.weight}")

    def predictor(self, scale: Scale) -> mbpa.Predictor:
        vote = super().predictor(scale)
        return mbpa.Mixture(mbpa.Parametric(), vote, weights=(1 - self.weight, self.weight))


@dataclass(frozen=True)
class Local(Recalling):
    """An adaptation to the neighbours."""

    rule: Literal["rmsprop", "gradient"] = "gradient"
    lr: float = 0.1
    """Learning rate; for the rule `gradient` it is divided by the mean squared length of a key."""
    steps: int = 10
    """Number of adaptation steps."""
    k: int = 50
    """Number of neighbours."""
    bandwidth: float = 0.0
    """Bandwidth of the kernel, as in a vote."""
    decay: float = 0.0
    """Strength of the pull back to the layer's own parameters."""
    initial_square: float = 0.0
    """Initial second moment of RMSprop: 0 as in torch, 1 as in TensorFlow 1."""

    def __post_init__(self) -> None:
        if min(self.steps, self.k) < 1 or not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"steps and k must be at least 1, lr positive, got {self}")
        if min(self.bandwidth, self.decay, self.initial_square) < 0:
            raise ValueError(
                f"bandwidth, decay and initial_square must not be negative, got {self}"
            )

    def predictor(self, scale: Scale) -> mbpa.Adapted:
        rule: mbpa.Rule = mbpa.Gradient(self.lr / scale.length, self.steps, self.decay)
        if self.rule == "rmsprop":
            start = self.initial_square
            rule = mbpa.RMSprop(self.lr, self.steps, self.decay, initial_square=start)
        return mbpa.Adapted(rule, k=self.k, kernel=_kernel(self.bandwidth, scale))


@dataclass(frozen=True)
class Retrained(Settings):
    """A layer of square roots fitted to the memory, close to the network's original one; nothing is
    adapted.
    """

    penalty: float = 0.3
    """Penalty on changes of the layer, as in `Roots.retrained`."""

    def __post_init__(self) -> None:
        if not self.penalty > 0:
            raise ValueError(f"penalty must be positive, got {self.penalty}")

    def model(self, situation: Situation) -> mbpa.MbPA:
        return _of_roots(situation.roots, self.penalty, mbpa.Parametric())


@dataclass(frozen=True)
class Kept(Local):
    """An adaptation that preserves what the network knew: it adapts a layer of square roots fitted
    to the memory, and a new class must be more confident than an old one to win.
    """

    lr: float = 0.3
    """Learning rate, divided by the mean squared length of an image's square roots."""
    k: int = 50
    """Number of neighbours, found by their square roots."""
    bandwidth: float = 0.5
    """Bandwidth of the kernel, as in a vote."""
    penalty: float = 0.15
    """Penalty on changes of the layer, as in the retrained one."""
    offset: float = 0.15
    """Margin in logits by which a new class must exceed an old one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        Retrained(self.penalty)  # raises the same errors
        if not math.isfinite(self.offset):
            raise ValueError(f"offset must be finite, got {self.offset}")

    def model(self, situation: Situation) -> HeldBack:
        roots = situation.roots
        adapted = _of_roots(roots, self.penalty, self.predictor(roots.scale))
        return HeldBack(adapted, self.held_back(situation))

    def held_back(self, situation: Situation) -> Float[Tensor, "C"]:
        """Return the margin of each class, in logits."""
        weight = situation.head.weight
        is_new = torch.arange(len(weight), device=weight.device) >= situation.old
        return is_new.to(weight.dtype) * self.offset


def _of_roots(roots: Roots, penalty: float, predictor: mbpa.Predictor) -> mbpa.MbPA:
    """Return a model of features with the retrained layer of square roots."""
    layer = roots.retrained(penalty)
    return mbpa.MbPA(roots_of, layer, memory=roots.memory, predictor=predictor)


@dataclass(frozen=True, eq=False)
class HeldBack:
    """A model in which some classes must exceed others by a margin."""

    model: mbpa.MbPA
    by: Float[Tensor, "C"]

    @property
    def predictor(self) -> mbpa.Predictor:
        """The predictor of the wrapped model."""
        return self.model.predictor

    @property
    def memory(self) -> mbpa.Memory:
        """The memory of the wrapped model."""
        return self.model.memory

    def embed(self, features: Float[Tensor, "B D"]) -> Float[Tensor, "B D"]:
        """Return the keys of features, as stored in the memory."""
        return self.model.embed(features)

    def __call__(
        self, features: Float[Tensor, "B D"], *, neighbors: mbpa.Neighbors | None = None
    ) -> Float[Tensor, "B C"]:
        return (self.model(features, neighbors=neighbors) - self.by).log_softmax(1)


Model = mbpa.MbPA | HeldBack
"""The common type of all methods' models."""


def _kernel(bandwidth: float, scale: Scale) -> mbpa.kernels.Kernel:
    return mbpa.gaussian(bandwidth * scale.near) if bandwidth else mbpa.inverse_distance()


@dataclass(frozen=True)
class Method:
    """One line of every comparison."""

    color: str
    """Colour in figures, as in the paper: MbPA blue, parametric model green, mixture red."""
    settings: str = ""
    """Field of the config that holds the settings; empty if there are none."""
    stages: tuple[Grid, ...] = ()
    """Grids that the search tries in turn, with all other settings at the best values so far."""
    is_memory_alone: bool = False
    """Whether the method ignores the trained layer, and so knows nothing before the first entry."""
    has_own_layer: bool = False
    """Whether the method builds a layer from the memory and ignores the one that keeps learning."""
    keeps_old: bool = False
    """Whether the search judges the method by its accuracy on new classes, subject to not losing
    old ones, instead of accuracy over all classes.
    """


NEIGHBOURS: Grid = {"k": (10, 20, 50, 100, 200), "bandwidth": (0.0, 0.3, 0.5, 0.7, 1.0)}
WEIGHTS: Grid = {"weight": tuple(place / 10 for place in range(1, 10))}
DECAYS: Grid = {"decay": (0.0, 0.02, 0.1)}
GRADIENT_STEPS: Grid = {"lr": (0.1, 0.3, 1.0, 3.0, 10.0), "steps": (1, 5, 10, 20)}
RMSPROP_STEPS: Grid = {
    "lr": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1),  # the larger ones suit a start at 1
    "steps": (1, 5, 10, 20),
    "initial_square": (0.0, 1.0),
}
PENALTIES: Grid = {"penalty": (0.03, 0.1, 0.3, 1.0, 3.0)}
OFFSETS = tuple(place / 20 for place in range(31))  # last in each grid: outputs are shared
KEPT_RATES: Grid = {"penalty": (0.07, 0.15, 0.3, 0.6), "lr": (0.1, 0.3, 1.0), "offset": OFFSETS}
KEPT_NEIGHBOURS: Grid = {"k": (20, 50, 100), "bandwidth": (0.3, 0.5, 0.7), "offset": OFFSETS}
KEPT_STEPS: Grid = {"lr": (0.1, 0.3, 1.0), "steps": (5, 10, 20), "offset": OFFSETS}
METHODS: dict[str, Method] = {
    "parametric": Method("#1b7837"),
    "memory only": Method("#e08214", "vote", (NEIGHBOURS,), is_memory_alone=True),
    "mixture": Method("#b2182b", "mixture", (NEIGHBOURS, WEIGHTS)),
    "MbPA (RMSprop)": Method(
        "#2166ac", "rmsprop", (RMSPROP_STEPS, NEIGHBOURS, RMSPROP_STEPS, DECAYS)
    ),
    "MbPA (gradient)": Method(
        "#67a9cf", "gradient", (GRADIENT_STEPS, NEIGHBOURS, GRADIENT_STEPS, DECAYS)
    ),
    "retrained": Method("#b8a1cf", "retraining", (PENALTIES,), has_own_layer=True),
    "MbPA (kept)": Method(
        "#762a83",
        "kept",
        (KEPT_RATES, KEPT_NEIGHBOURS, KEPT_STEPS),
        has_own_layer=True,
        keeps_old=True,
    ),
}
"""Methods by their names in records."""
WITH_SETTINGS = {name: method for name, method in METHODS.items() if method.settings}
