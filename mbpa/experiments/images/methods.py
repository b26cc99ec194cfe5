"""The methods that are compared: their settings, the predictors they make, what a search tries.

A method is an entry of `METHODS` and the field of the config that holds its settings; runs, search,
sensitivities and figures follow from that.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

import mbpa
from mbpa.experiments.logistic import logistic
from mbpa.experiments.searching import Grid

TOLERANCE = 3e-5  # of the regression; classes weigh the same, and accuracies stand still by then


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
    known: nn.Linear
    """The layer as it was before anything new arrived."""
    _retrained: dict[float, nn.Linear] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def counts(self) -> Int[Tensor, "C"]:
        """Of each class's entries in the memory."""
        return self.memory.entries().values.bincount(minlength=self.head.out_features)

    def retrained(self, penalty: float) -> nn.Linear:
        """The layer that fits the memory best, all classes counting alike; see `Retrained`."""
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
    """A layer fitted to the memory, a logistic regression that stays near the layer as it was
    before anything new arrived; nothing is adapted."""

    penalty: float = 0.3
    """On the squares of changes of biases, and, times the mean square of a key's length, of
    weights."""

    def __post_init__(self) -> None:
        if not self.penalty > 0:
            raise ValueError(f"penalty must be positive, got {self.penalty}")

    def model(self, situation: Situation) -> mbpa.MbPA:
        layer = situation.retrained(self.penalty)
        return mbpa.MbPA(head=layer, memory=situation.memory, predictor=mbpa.Parametric())


@dataclass(frozen=True)
class Kept(Local):
    """An adaptation that keeps what the network knew: of a layer fitted to the memory, and a new
    class must be surer than an old one."""

    lr: float = 1.0
    """Divided by the mean square of a key's length."""
    k: int = 100
    """Neighbours."""
    bandwidth: float = 0.5
    """As that of a vote."""
    penalty: float = 0.3
    """As that of the retrained layer."""
    offset: float = 0.4
    """How much surer a new class must be that has no entries yet, in logits."""
    entries: float = 1e9
    """Of a new class, after which it must be half as much surer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        Retrained(self.penalty)  # refuses what that would
        if not (self.entries > 0 and math.isfinite(self.offset)):
            raise ValueError(f"entries must be positive, offset finite, got {self}")

    def model(self, situation: Situation) -> HeldBack:
        adapted = mbpa.MbPA(
            head=situation.retrained(self.penalty),
            memory=situation.memory,
            predictor=self.predictor(situation.scale),
        )
        return HeldBack(adapted, self.held_back(situation))

    def held_back(self, situation: Situation) -> Float[Tensor, "C"]:
        """How much surer each class must be."""
        counts = situation.counts
        less = self.offset / (1 + counts / self.entries)
        is_new = torch.arange(len(counts), device=counts.device) >= situation.old
        return torch.where(is_new, less, 0).to(situation.head.weight.dtype)


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

    def __call__(
        self, *, keys: Float[Tensor, "B D"], neighbors: mbpa.Neighbors | None = None
    ) -> Float[Tensor, "B C"]:
        return (self.model(keys=keys, neighbors=neighbors) - self.by).log_softmax(1)


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
PENALTIES: Grid = {"penalty": (0.03, 0.1, 0.3, 1.0, 3.0)}
OFFSETS = tuple(place / 10 for place in range(21))  # the last of a grid: the rest serves for all
KEPT_RATES: Grid = {"penalty": (0.1, 0.3, 1.0), "lr": (0.3, 1.0, 3.0), "offset": OFFSETS}
KEPT_NEIGHBOURS: Grid = {"k": (50, 100, 200), "bandwidth": (0.3, 0.5, 0.7), "offset": OFFSETS}
KEPT_STEPS: Grid = {"lr": (0.3, 1.0, 3.0), "steps": (5, 10, 20), "offset": OFFSETS}
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
    "retrained": Method("#b8a1cf", "retraining", (PENALTIES,), has_own_layer=True),
    "MbPA (kept)": Method(
        "#762a83",
        "kept",
        (KEPT_RATES, KEPT_NEIGHBOURS, KEPT_STEPS, KEPT_LATER),
        has_own_layer=True,
        keeps_old=True,
    ),
}
"""By the names that records have."""
WITH_SETTINGS = {name: method for name, method in METHODS.items() if method.settings}
