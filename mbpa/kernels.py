"""Kernels: how much each neighbour counts, by its nearness to the query.

A kernel is called as `kernel(distances, dots)` with squared Euclidean distances and inner products,
both (B, K), and returns log-weights (B, K) up to a constant a row; `neighbor_weights` normalises
them. Any function of that form is a kernel. Ours are classes so that a checkpoint can name them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mbpa.memory import Neighbors, validation

Kernel = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class inverse_distance:
    """`1 / (ε + ‖h − q‖²)`, the paper's kernel; ε is on the squared distance."""

    epsilon: float = 1e-3

    def __post_init__(self) -> None:
        _make_plain(self, "epsilon")
        if self.epsilon <= 0:
            raise ValueError(f"epsilon must be positive, got {self.epsilon}")

    def __call__(
        self, distances: Float[Tensor, "B K"], dots: Float[Tensor, "B K"]
    ) -> Float[Tensor, "B K"]:
        return -(distances + self.epsilon).log()


@dataclass(frozen=True)
class gaussian:
    """`exp(−‖h − q‖² / 2σ²)`."""

    bandwidth: float

    def __post_init__(self) -> None:
        _make_plain(self, "bandwidth")
        if self.bandwidth <= 0:
            raise ValueError(f"bandwidth must be positive, got {self.bandwidth}")

    def __call__(
        self, distances: Float[Tensor, "B K"], dots: Float[Tensor, "B K"]
    ) -> Float[Tensor, "B K"]:
        return distances / (-2 * self.bandwidth**2)


@dataclass(frozen=True)
class exp_dot:
    """`exp(θ h·q)`: attention, and with the whole memory as neighbours the neural cache."""

    theta: float = 1.0

    def __post_init__(self) -> None:
        _make_plain(self, "theta")

    def __call__(
        self, distances: Float[Tensor, "B K"], dots: Float[Tensor, "B K"]
    ) -> Float[Tensor, "B K"]:
        return self.theta * dots


@dataclass(frozen=True)
class uniform:
    """Every neighbour counts the same."""

    def __call__(
        self, distances: Float[Tensor, "B K"], dots: Float[Tensor, "B K"]
    ) -> Float[Tensor, "B K"]:
        return torch.zeros_like(distances)


def neighbor_weights(kernel: Kernel, neighbors: Neighbors) -> Float[Tensor, "B K"]:
    """Weights of the neighbours, summing to 1 in each row; 0 for padding and in rows of padding."""
    logs = kernel(neighbors.distances, neighbors.dots)
    if logs.shape != neighbors.mask.shape:
        raise ValueError(
            f"a kernel must return log-weights of shape {tuple(neighbors.mask.shape)}, "
            f"got {tuple(logs.shape)}"
        )
    if (logs.isnan() & neighbors.mask).any():
        raise ValueError(f"a kernel must not return NaN, and {kernel} did")
    limits = torch.finfo(logs.dtype)  # infinite ones count the same, and finite ones beside them 0
    logs = logs.clamp(limits.min, limits.max).masked_fill(~neighbors.mask, -torch.inf)
    return logs.softmax(1).masked_fill(~neighbors.mask, 0)


def _make_plain(kernel: object, name: str) -> None:
    """Turn a field of a kernel into a plain float; `ValueError` if it is no finite number."""
    object.__setattr__(kernel, name, validation.parse_number(name, getattr(kernel, name)))
