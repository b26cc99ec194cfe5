"""The methods that are compared: their settings, the predictors they make, what a search tries.

A method is an entry of `METHODS` and the field of the config that holds its settings; runs, search,
sensitivities and figures follow from that.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

import mbpa
from mbpa.experiments.images.discriminant import Statistics, discriminant_layer, statistics
from mbpa.experiments.searching import Grid


class Scale(NamedTuple):
    """Of the keys, so that settings mean the same for every network."""

    near: float
    """The mean distance between an entry of the memory and the nearest other one."""
    length: float
    """The mean square of a key's length."""


@dataclass(frozen=True, eq=False)
class Situation:
    """What a method finds."""

    head: nn.Linear
    memory: mbpa.Memory
    scale: Scale
    old: int
    """Labels below this are of classes that the network knows."""

    @cached_property
    def statistics(self) -> Statistics:
        """Of the memory's entries."""
        entries = self.memory.entries()
        return statistics(entries.keys, entries.values, self.head.out_features)


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
class Discriminants(Settings):
    """A layer from the memory in closed form (`discriminant`); nothing is adapted."""

    shrinkage: float = 0.3
    """How much the first guess of the covariance counts, in entries a dimension."""
    pull: float = 3.0
    """How much the first guess of a class's mean counts, in entries."""

    def __post_init__(self) -> None:
        if not (self.shrinkage > 0 and self.pull >= 0):
            raise ValueError(f"shrinkage must be positive, pull not negative, got {self}")

    def model(self, situation: Situation) -> mbpa.MbPA:
        layer = discriminant_layer(
            situation.statistics, shrinkage=self.shrinkage, pull=self.pull, scale=1.0
        )
        return mbpa.MbPA(head=layer, memory=situation.memory, predictor=mbpa.Parametric())


@dataclass(frozen=True)
class Kept(Local):
    """An adaptation that keeps what the network knew: of the layer from the memory, mixed with the
    trained one, and a new class must be surer than an old one."""

    lr: float = 3.0
    """Divided by the mean square of a key's length."""
    k: int = 100
    """Neighbours."""
    bandwidth: float = 0.5
    """As that of a vote."""
    shrinkage: float = 0.3
    """As that of discriminants."""
    pull: float = 3.0
    """As that of discriminants."""
    scale: float = 0.1
    """Of the discriminants' outputs."""
    weight: float = 0.5
    """Of the adapted layer's probabilities, beside the trained one's."""
    offset: float = 0.4
    """How much surer a new class must be that has no entries yet, in logits."""
    entries: float = 1e9
    """Of a new class, after which it must be half as much surer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        Discriminants(self.shrinkage, self.pull)  # refuses what these would
        if not (self.scale > 0 and self.entries > 0 and math.isfinite(self.offset)):
            raise ValueError(f"scale and entries must be positive, offset finite, got {self}")
        if not 0 < self.weight < 1:
            raise ValueError(f"weight must be between 0 and 1, got {self.weight}")

    def model(self, situation: Situation) -> WithTrained:
        layer = discriminant_layer(
            situation.statistics, shrinkage=self.shrinkage, pull=self.pull, scale=self.scale
        )
        memory, predictor = situation.memory, self.predictor(situation.scale)
        return WithTrained(
            adapted=mbpa.MbPA(head=layer, memory=memory, predictor=predictor),
            trained=mbpa.MbPA(head=situation.head, memory=memory, predictor=mbpa.Parametric()),
            weight=self.weight,
            held_back=self.held_back(situation),
        )

    def held_back(self, situation: Situation) -> Float[Tensor, "C"]:
        """How much surer each class must be."""
        counts = situation.statistics.counts
        less = self.offset / (1 + counts / self.entries)
        is_new = torch.arange(len(counts), device=counts.device) >= situation.old
        return torch.where(is_new, less, 0).to(situation.head.weight.dtype)


@dataclass(frozen=True, eq=False)
class WithTrained:
    """A mixture of two models that differ in their layers, some classes held back."""

    adapted: mbpa.MbPA
    trained: mbpa.MbPA
    weight: float
    """Of the adapted one."""
    held_back: Float[Tensor, "C"]

    @property
    def predictor(self) -> mbpa.Predictor:
        """That needs neighbours."""
        return self.adapted.predictor

    @property
    def memory(self) -> mbpa.Memory:
        """Of both."""
        return self.adapted.memory

    def __call__(
        self, *, keys: Float[Tensor, "B D"], neighbors: mbpa.Neighbors | None = None
    ) -> Float[Tensor, "B C"]:
        said = torch.logaddexp(
            math.log(self.weight) + self.adapted(keys=keys, neighbors=neighbors),
            math.log(1 - self.weight) + self.trained(keys=keys),
        )
        return (said - self.held_back).log_softmax(1)


Model = mbpa.MbPA | WithTrained
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
    keeps_old: bool = False
    """Whether the search asks of it, beside accuracy over all classes, that old ones do not
    suffer."""


NEIGHBOURS: Grid = {"k": (10, 20, 50, 100, 200), "bandwidth": (0.0, 0.3, 0.5, 0.7, 1.0)}
WEIGHTS: Grid = {"weight": tuple(place / 10 for place in range(1, 10))}
DECAYS: Grid = {"decay": (0.0, 0.02, 0.1)}
GRADIENT_STEPS: Grid = {"lr": (0.1, 0.3, 1.0, 3.0, 10.0), "steps": (1, 5, 10, 20)}
RMSPROP_STEPS: Grid = {
    "lr": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1),  # the larger ones for a start at 1
    "steps": (1, 5, 10, 20),
    "initial_square": (0.0, 1.0),
}
GUESSES: Grid = {"shrinkage": (0.1, 0.3, 1.0), "pull": (1.0, 3.0, 10.0)}
OFFSETS = tuple(place / 10 for place in range(13))  # the last of a grid: the rest serves for all
KEPT_RATES: Grid = {"scale": (0.05, 0.1, 0.2), "lr": (1.0, 3.0, 10.0), "offset": OFFSETS}
KEPT_NEIGHBOURS: Grid = {"k": (50, 100, 200), "bandwidth": (0.3, 0.5, 0.7), "offset": OFFSETS}
KEPT_WEIGHTS: Grid = {"weight": (0.3, 0.4, 0.5, 0.6, 0.7), "offset": OFFSETS}
KEPT_GUESSES: Grid = {**GUESSES, "offset": OFFSETS}
KEPT_LATER: Grid = {"entries": (30.0, 100.0, 300.0, 1e9), "offset": OFFSETS}
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
    "discriminants": Method("#b8a1cf", "discriminants", (GUESSES,), is_memory_alone=True),
    "MbPA (kept)": Method(
        "#762a83",
        "kept",
        (KEPT_RATES, KEPT_NEIGHBOURS, KEPT_WEIGHTS, KEPT_GUESSES, KEPT_LATER),
        keeps_old=True,
    ),
}
"""By the names that records have."""
WITH_SETTINGS = {name: method for name, method in METHODS.items() if method.settings}
