"""The methods that are compared: their settings, the predictors they make, what a search tries.

A method is an entry of `METHODS` and the field of the config that holds its settings; runs, search,
sensitivities and figures follow from that.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from torch import nn

import mbpa
from mbpa.experiments.images.discriminant import Statistics, statistics, with_discriminants


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
    def predictor(self, scale: Scale) -> mbpa.Predictor:
        """That is told so."""

    def head(self, situation: Situation) -> nn.Linear:
        """The layer it works on."""
        return situation.head

    def model(self, situation: Situation) -> mbpa.MbPA:
        """That predicts in this situation."""
        predictor = self.predictor(situation.scale)
        return mbpa.MbPA(head=self.head(situation), memory=situation.memory, predictor=predictor)


@dataclass(frozen=True)
class Vote(Settings):
    """A vote of the neighbours."""

    k: int = 50
    """Neighbours."""
    bandwidth: float = 0.0
    """Of a Gaussian kernel, in units of the mean distance between nearest entries; 0: the paper's
    inverse distance."""

    def __post_init__(self) -> None:
        if self.k < 1 or self.bandwidth < 0:
            raise ValueError(f"k must be at least 1, bandwidth not negative, got {self}")

    def predictor(self, scale: Scale) -> mbpa.NeighborVote:
        return mbpa.NeighborVote(_kernel(self.bandwidth, scale), k=self.k)


@dataclass(frozen=True)
class Mixed(Settings):
    """A mixture of the layer's probabilities and a vote's."""

    k: int = 50
    """Neighbours."""
    bandwidth: float = 0.0
    """As that of a vote."""
    weight: float = 0.5
    """Of the vote."""

    def __post_init__(self) -> None:
        Vote(self.k, self.bandwidth)  # refuses what a vote would
        if not 0 <= self.weight <= 1:
            raise ValueError(f"weight must be between 0 and 1, got {self.weight}")

    def predictor(self, scale: Scale) -> mbpa.Mixture:
        vote = Vote(self.k, self.bandwidth).predictor(scale)
        return mbpa.Mixture(mbpa.Parametric(), vote, weights=(1 - self.weight, self.weight))


@dataclass(frozen=True)
class Local(Settings):
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
class Rows(Settings):
    """The rows of new classes from the memory, in closed form (`discriminant`); a new class has to
    be surer than an old one. Nothing is adapted."""

    shrinkage: float = 1.0
    """How much the first guess of the covariance counts, in entries a dimension."""
    pull: float = 10.0
    """How much the first guess of a class's mean counts, in entries."""
    row_scale: float = 0.5
    """Of the new rows' outputs, beside those of the trained rows."""
    offset: float = 2.0
    """By which a new class must be surer."""

    def __post_init__(self) -> None:
        if not (self.shrinkage > 0 and self.row_scale > 0 and math.isfinite(self.offset)):
            raise ValueError(f"shrinkage and row_scale must be positive, offset finite, got {self}")
        if not self.pull >= 0:
            raise ValueError(f"pull must not be negative, got {self.pull}")

    def head(self, situation: Situation) -> nn.Linear:
        return with_discriminants(
            situation.head,
            situation.statistics,
            old=situation.old,
            shrinkage=self.shrinkage,
            pull=self.pull,
            scale=self.row_scale,
            offset=self.offset,
        )

    def predictor(self, scale: Scale) -> mbpa.Predictor:
        return mbpa.Parametric()


@dataclass(frozen=True)
class Kept(Rows, Local):
    """An adaptation of the layer with rows from the memory, to keep what the network knew."""

    lr: float = 1.0
    """Divided by the mean square of a key's length."""
    bandwidth: float = 0.7
    """As that of a vote."""

    def __post_init__(self) -> None:
        Rows.__post_init__(self)
        Local.__post_init__(self)

    def predictor(self, scale: Scale) -> mbpa.Adapted:
        return Local.predictor(self, scale)


def _kernel(bandwidth: float, scale: Scale) -> mbpa.kernels.Kernel:
    return mbpa.gaussian(bandwidth * scale.near) if bandwidth else mbpa.inverse_distance()


Grid = Mapping[str, tuple[float, ...]]
"""Values of some settings, to be tried in all combinations."""


@dataclass(frozen=True)
class Method:
    """One line of every comparison."""

    color: str
    """As in the paper: MbPA blue, the parametric model green, the mixture red."""
    settings: str = ""
    """The field of the config that holds them; empty: there are none."""
    stages: tuple[Grid, ...] = ()
    """What the search tries, one grid after the other, the rest as it was best so far."""
    keeps_old: bool = False
    """How the search judges it: by accuracy over all classes, or over the new ones as long as the
    old ones do not suffer."""


NEIGHBOURS: Grid = {"k": (10, 20, 50, 100, 200), "bandwidth": (0.0, 0.3, 0.5, 0.7, 1.0)}
WEIGHTS: Grid = {"weight": tuple(place / 10 for place in range(1, 10))}
DECAYS: Grid = {"decay": (0.0, 0.02, 0.1)}
GRADIENT_STEPS: Grid = {"lr": (0.1, 0.3, 1.0, 3.0, 10.0), "steps": (1, 5, 10, 20)}
RMSPROP_STEPS: Grid = {
    "lr": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1),  # the larger ones for a start at 1
    "steps": (1, 5, 10, 20),
    "initial_square": (0.0, 1.0),
}
OFFSETS = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0)
ROWS: Grid = {"row_scale": (0.125, 0.25, 0.5, 1.0), "offset": OFFSETS}
FIRST_GUESSES: Grid = {"shrinkage": (0.3, 1.0, 3.0), "pull": (3.0, 10.0, 30.0), "offset": OFFSETS}
KEPT_STEPS: Grid = {"lr": (0.1, 0.3, 1.0, 3.0), "steps": (5, 10), "offset": OFFSETS}
METHODS: dict[str, Method] = {
    "parametric": Method("#1b7837"),
    "memory only": Method("#e08214", "vote", (NEIGHBOURS,)),
    "mixture": Method("#b2182b", "mixture", (NEIGHBOURS, WEIGHTS)),
    "MbPA (RMSprop)": Method(
        "#2166ac", "rmsprop", (RMSPROP_STEPS, NEIGHBOURS, RMSPROP_STEPS, DECAYS)
    ),
    "MbPA (gradient)": Method(
        "#67a9cf", "gradient", (GRADIENT_STEPS, NEIGHBOURS, GRADIENT_STEPS, DECAYS)
    ),
    "rows alone": Method("#b8a1cf", "rows", (ROWS, FIRST_GUESSES, ROWS), keeps_old=True),
    "MbPA (kept)": Method(
        "#762a83",
        "kept",
        (ROWS, FIRST_GUESSES, KEPT_STEPS, NEIGHBOURS, ROWS, DECAYS),
        keeps_old=True,
    ),
}
"""By the names that records have."""
WITH_SETTINGS = {name: method for name, method in METHODS.items() if method.settings}
