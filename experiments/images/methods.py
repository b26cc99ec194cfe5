"""The methods that are compared: their settings, the predictors they make, what a search tries.

A method is an entry of `METHODS` and the field of the config that holds its settings; runs, search,
sensitivities and figures follow from that.
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
    """What a method finds."""

    head: nn.Linear
    memory: mbpa.Memory
    scale: Scale
    old: int
    """Labels below this are of classes that the network knows."""
    known: Known
    """What a layer of roots knew before anything new arrived."""
    copies: int
    """How often an image may be in the memory."""

    @cached_property
    def roots(self) -> Roots:
        """What the memory holds, as square roots of features."""
        return Roots.of(self.memory, self.known, self.copies)


class Settings(abc.ABC):
    """What a method can be told, in units of the keys' scale."""

    @abc.abstractmethod
    def model(self, situation: Situation) -> Model:
        """That predicts in this situation."""


class Recalling(Settings):
    """Of a method that differs from the others in the predictor alone."""

    @abc.abstractmethod
    def predictor(self, scale: Scale) -> mbpa.Predictor:
        """That is told so."""

    def model(self, situation: Situation) -> Model:
        predictor = self.predictor(situation.scale)
        return mbpa.MbPA(head=situation.head, memory=situation.memory, predictor=predictor)


@dataclass(frozen=True)
class Vote(Recalling):
    """A vote of the neighbours."""

    k: int = 50
    """Neighbours."""
    bandwidth: float = 0.0
    """Of a Gaussian kernel, in units of the mean distance between nearest entries; 0: the paper's
    inverse distance."""

    def __post_init__(self) -> None:
        if self.k < 1 or self.bandwidth < 0:
            raise ValueError(f"k must be at least 1, bandwidth not negative, got {self}")

    def predictor(self, scale: Scale) -> mbpa.Predictor:
        return mbpa.NeighborVote(_kernel(self.bandwidth, scale), k=self.k)


@dataclass(frozen=True)
class Mixed(Vote):
    """A mixture of the layer's probabilities and a vote's."""

    weight: float = 0.5
    """Of the vote."""

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
    """For gradients, divided by the mean square of a key's length."""
    steps: int = 10
    """Of the adaptation."""
    k: int = 50
    """Neighbours."""
    bandwidth: float = 0.0
    """As that of a vote."""
    decay: float = 0.0
    """The pull back to the layer's own parameters."""
    initial_square: float = 0.0
    """Where the second moment of RMSprop starts: 0 as in torch, 1 as in TensorFlow 1."""

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
    """A layer of roots fitted to the memory, near the one that the network came with; nothing is
    adapted."""

    penalty: float = 0.3
    """As that of `Roots.retrained`."""

    def __post_init__(self) -> None:
        if not self.penalty > 0:
            raise ValueError(f"penalty must be positive, got {self.penalty}")

    def model(self, situation: Situation) -> mbpa.MbPA:
        return _of_roots(situation.roots, self.penalty, mbpa.Parametric())


@dataclass(frozen=True)
class Kept(Local):
    """An adaptation that keeps what the network knew: of a layer of roots fitted to the memory, and
    a new class must be surer than an old one."""

    lr: float = 0.3
    """Divided by the mean square of the length of an image's roots."""
    k: int = 50
    """Neighbours, by their roots."""
    bandwidth: float = 0.5
    """As that of a vote."""
    penalty: float = 0.15
    """As that of the retrained layer."""
    offset: float = 0.15
    """How much surer a new class must be, in logits."""

    def __post_init__(self) -> None:
        super().__post_init__()
        Retrained(self.penalty)  # refuses what that would
        if not math.isfinite(self.offset):
            raise ValueError(f"offset must be finite, got {self.offset}")

    def model(self, situation: Situation) -> HeldBack:
        roots = situation.roots
        adapted = _of_roots(roots, self.penalty, self.predictor(roots.scale))
        return HeldBack(adapted, self.held_back(situation))

    def held_back(self, situation: Situation) -> Float[Tensor, "C"]:
        """How much surer each class must be."""
        weight = situation.head.weight
        is_new = torch.arange(len(weight), device=weight.device) >= situation.old
        return is_new.to(weight.dtype) * self.offset


def _of_roots(roots: Roots, penalty: float, predictor: mbpa.Predictor) -> mbpa.MbPA:
    """With the retrained layer, for features."""
    layer = roots.retrained(penalty)
    return mbpa.MbPA(roots_of, layer, memory=roots.memory, predictor=predictor)


@dataclass(frozen=True, eq=False)
class HeldBack:
    """A model of which some classes must be surer than others."""

    model: mbpa.MbPA
    by: Float[Tensor, "C"]

    @property
    def predictor(self) -> mbpa.Predictor:
        """That needs neighbours."""
        return self.model.predictor

    @property
    def memory(self) -> mbpa.Memory:
        """That it reads."""
        return self.model.memory

    def embed(self, features: Float[Tensor, "B D"]) -> Float[Tensor, "B D"]:
        """Keys, as the memory has them."""
        return self.model.embed(features)

    def __call__(
        self, features: Float[Tensor, "B D"], *, neighbors: mbpa.Neighbors | None = None
    ) -> Float[Tensor, "B C"]:
        return (self.model(features, neighbors=neighbors) - self.by).log_softmax(1)


Model = mbpa.MbPA | HeldBack
"""What all methods come to."""


def _kernel(bandwidth: float, scale: Scale) -> mbpa.kernels.Kernel:
    return mbpa.gaussian(bandwidth * scale.near) if bandwidth else mbpa.inverse_distance()


@dataclass(frozen=True)
class Method:
    """One line of every comparison."""

    color: str
    """As in the paper: MbPA blue, the parametric model green, the mixture red."""
    settings: str = ""
    """The field of the config that holds them; empty: there are none."""
    stages: tuple[Grid, ...] = ()
    """What the search tries, one grid after the other, the rest as it was best so far."""
    is_memory_alone: bool = False
    """Whether it makes no use of the trained layer, and knows nothing before the first entry."""
    has_own_layer: bool = False
    """Whether it makes a layer from the memory, and no use of the one that goes on learning."""
    keeps_old: bool = False
    """Whether the search looks at how much it knows of new classes without losing old ones, in
    place of accuracy over all classes."""


NEIGHBOURS: Grid = {"k": (10, 20, 50, 100, 200), "bandwidth": (0.0, 0.3, 0.5, 0.7, 1.0)}
WEIGHTS: Grid = {"weight": tuple(place / 10 for place in range(1, 10))}
DECAYS: Grid = {"decay": (0.0, 0.02, 0.1)}
GRADIENT_STEPS: Grid = {"lr": (0.1, 0.3, 1.0, 3.0, 10.0), "steps": (1, 5, 10, 20)}
RMSPROP_STEPS: Grid = {
    "lr": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1),  # the larger ones for a start at 1
    "steps": (1, 5, 10, 20),
    "initial_square": (0.0, 1.0),
}
PENALTIES: Grid = {"penalty": (0.03, 0.1, 0.3, 1.0, 3.0)}
OFFSETS = tuple(place / 20 for place in range(31))  # the last of a grid: the rest serves for all
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
"""By the names that records have."""
WITH_SETTINGS = {name: method for name, method in METHODS.items() if method.settings}
