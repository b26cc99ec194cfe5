"""Methods that several experiments compare: their settings, the predictors they make, how they are
listed.

Settings are fields of a config, so they are plain numbers. Those that are distances or learning
rates can be in units of the scale of the keys, which makes them comparable across networks.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import NamedTuple

import mbpa
from experiments.search import Grid
from mbpa.kernels import PlainKernel

VOTE_WEIGHTS: Grid = {"weight": tuple(place / 10 for place in range(1, 10))}
"""Weights of the vote in a `VoteMixture` that a search tries."""


class Scale(NamedTuple):
    """The scale of the keys, the unit of several settings."""

    near: float = 1.0
    """Mean distance between an entry of the memory and the nearest other one; the unit of
    bandwidths.
    """
    length: float = 1.0
    """Mean squared length of a key; learning rates of gradient steps are divided by it."""


UNSCALED = Scale()
"""The scale of settings that are given as they are used."""


def make_kernel(bandwidth: float, scale: Scale = UNSCALED) -> PlainKernel:
    """Return a Gaussian kernel, or the paper's inverse distance if the bandwidth is 0."""
    return mbpa.gaussian(bandwidth * scale.near) if bandwidth else mbpa.inverse_distance()


@dataclass(frozen=True)
class PredictorSettings(abc.ABC):
    """Settings of a method that differs from others only in its predictor."""

    @abc.abstractmethod
    def predictor(self, scale: Scale = UNSCALED) -> mbpa.Predictor:
        """Return the predictor with these settings."""


@dataclass(frozen=True)
class Vote(PredictorSettings):
    """A vote of the neighbours."""

    k: int = 20
    """Number of neighbours."""
    bandwidth: float = 0.0
    """Bandwidth of a Gaussian kernel; 0 selects the paper's inverse distance.
    It is in units of the keys' scale if they have one.
    """

    def __post_init__(self) -> None:
        if self.k < 1 or self.bandwidth < 0:
            raise ValueError(f"k must be at least 1, bandwidth not negative, got {self}")

    def predictor(self, scale: Scale = UNSCALED) -> mbpa.Predictor:
        return mbpa.NeighborVote(make_kernel(self.bandwidth, scale), k=self.k)


@dataclass(frozen=True)
class VoteMixture(Vote):
    """A mixture of the network's own probabilities and those of a vote."""

    weight: float = 0.5
    """Weight of the vote, between 0 and 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.weight <= 1:
            raise ValueError(f"weight must be between 0 and 1, got {self.weight}")

    def predictor(self, scale: Scale = UNSCALED) -> mbpa.Predictor:
        vote = super().predictor(scale)
        return mbpa.Mixture(mbpa.Parametric(), vote, weights=(1 - self.weight, self.weight))


@dataclass(frozen=True)
class ComparedMethod:
    """One line of every comparison in an experiment."""

    color: str
    """Colour in figures."""
    settings: str = ""
    """Field of the config that holds the settings; empty if there is none."""
    stages: tuple[Grid, ...] = ()
    """Grids that the search tries in turn, with all other settings at the best values so far."""
    keeps_old: bool = False
    """Whether the method limits what is lost on old labels. Searches judge it in their own ways."""
