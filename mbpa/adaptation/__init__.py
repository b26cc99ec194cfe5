"""Computation of adaptations: several paths with the same result, and a plan that chooses one."""

from mbpa.adaptation.engine import Engine
from mbpa.adaptation.losses import CROSS_ENTROPY, SQUARED_ERROR, Loss
from mbpa.adaptation.optimum import require_convex
from mbpa.adaptation.problem import Adaptation, LinearHead, Problem

__all__ = [
    "CROSS_ENTROPY",
    "SQUARED_ERROR",
    "Adaptation",
    "Engine",
    "LinearHead",
    "Loss",
    "Problem",
    "require_convex",
]
