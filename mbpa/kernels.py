"""Kernels, which weight each neighbour by how near it is to the query.

A kernel is called as `kernel(distances, dots)` with squared Euclidean distances and inner products,
both of shape (B, K). It returns log-weights (B, K) up to a constant per row; `neighbor_weights`
normalises them. Any function of that form is a kernel. Those defined here are classes, so that they
can be compared, printed and saved. `Balanced` wraps a kernel and takes a third argument: for each
neighbour, the number of entries in the memory that have its label.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mbpa.memory import Neighbors, validation
from mbpa.replay import assume

PlainKernel = Callable[[Tensor, Tensor], Tensor]
"""A kernel of distances and inner products alone."""


@dataclass(frozen=True)
class InverseDistance:
    """The inverse of the squared distance to a power, `1 / (ε + ‖h − q‖²)ᵖ`.

    With p = 1, the default, this is the paper's kernel. A higher power is more local: a neighbour
    at twice the distance has 4ᵖ times less weight. As long as ε is small beside the squared
    distances, the weights do not depend on the units of the keys, so one power suits keys of any
    scale, where the bandwidth of a Gaussian must follow the scale.

    Args:
        epsilon: ε, above 0, in units of the squared distance.
        power: p, above 0. It applies to the squared distance: p = 1 is 1/d², p = 4 is 1/d⁸.
    """

    epsilon: float = 1e-3
    power: float = 1.0

    def __post_init__(self) -> None:
        for name in ("epsilon", "power"):
            _parse_field(self, name)
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    def __call__(
        self, distances: Float[Tensor, "B K"], dots: Float[Tensor, "B K"]
    ) -> Float[Tensor, "B K"]:
        return -self.power * (distances + self.epsilon).log()


@dataclass(frozen=True)
class Gaussian:
    """The Gaussian kernel, `exp(−‖h − q‖² / 2σ²)`.

    Args:
        bandwidth: σ, above 0, in units of the distance (not squared).
    """

    bandwidth: float

    def __post_init__(self) -> None:
        _parse_field(self, "bandwidth")
        if self.bandwidth <= 0:
            raise ValueError(f"bandwidth must be positive, got {self.bandwidth}")

    def __call__(
        self, distances: Float[Tensor, "B K"], dots: Float[Tensor, "B K"]
    ) -> Float[Tensor, "B K"]:
        return distances / (-2 * self.bandwidth**2)


@dataclass(frozen=True)
class ExpDot:
    """The kernel of attention, `exp(θ h·q)`; with the whole memory as neighbours, a neural cache.

    Args:
        theta: θ, the inverse temperature.
    """

    theta: float = 1.0

    def __post_init__(self) -> None:
        _parse_field(self, "theta")

    def __call__(
        self, distances: Float[Tensor, "B K"], dots: Float[Tensor, "B K"]
    ) -> Float[Tensor, "B K"]:
        return self.theta * dots


@dataclass(frozen=True)
class Uniform:
    """The kernel that gives every neighbour the same weight."""

    def __call__(
        self, distances: Float[Tensor, "B K"], dots: Float[Tensor, "B K"]
    ) -> Float[Tensor, "B K"]:
        return torch.zeros_like(distances)


@dataclass(frozen=True)
class Balanced:
    """A kernel divided by a power of the number of entries with the neighbour's label.

    The weight is `k(h, q) / countᵖ`. Labels with many entries otherwise outvote those with few.
    With p = 1, if all entries are neighbours and equally near, all labels have the same total
    weight. The counts are those at the time of the read: entries that were overwritten or deleted
    no longer count. They do not affect which entries are the k nearest.

    Args:
        kernel: the kernel k, which weighs neighbours by their distance.
        power: the exponent p, from 0 to 1; with 0 the counts have no effect.

    Example:
        >>> import torch, mbpa
        >>> memory = mbpa.ExactMemory(capacity=10, key_dim=1)
        >>> ids = memory.write(torch.tensor([[1.0], [1.0], [1.0], [1.0]]), [0, 0, 0, 1])
        >>> vote = mbpa.NeighborVote(mbpa.Balanced(mbpa.InverseDistance()), k=4)
        >>> model = mbpa.MbPA(head=torch.nn.Linear(1, 2), memory=memory, predictor=vote)
        >>> model(torch.tensor([[0.0]])).exp()
        tensor([[0.5000, 0.5000]])
    """

    kernel: PlainKernel
    power: float = 1.0

    def __post_init__(self) -> None:
        check_kernel(self.kernel)
        if isinstance(self.kernel, Balanced):
            raise ValueError(f"kernel must not be balanced already, got {self.kernel}")
        _parse_field(self, "power")
        if not 0 <= self.power <= 1:
            raise ValueError(f"power must be between 0 and 1, got {self.power}")

    def __call__(
        self,
        distances: Float[Tensor, "B K"],
        dots: Float[Tensor, "B K"],
        label_counts: Int[Tensor, "B K"],
    ) -> Float[Tensor, "B K"]:
        logs = self.kernel(distances, dots)
        return logs - self.power * label_counts.to(logs.dtype).log()


Kernel: TypeAlias = PlainKernel | Balanced
"""What predictors take as a kernel."""


# Earlier names of the classes, which still work.
inverse_distance: TypeAlias = InverseDistance
gaussian: TypeAlias = Gaussian
exp_dot: TypeAlias = ExpDot
uniform: TypeAlias = Uniform


def neighbor_weights(kernel: Kernel, neighbors: Neighbors) -> Float[Tensor, "B K"]:
    """Return the weights of the neighbours, which sum to 1 in each row.

    Padding has weight 0, so a row that consists of padding alone sums to 0.
    """
    if isinstance(kernel, Balanced):
        if neighbors.label_counts is None:
            raise ValueError(
                f"{kernel} needs the label counts of neighbors: memory.count_labels(neighbors)"
            )
        logs = kernel(neighbors.distances, neighbors.dots, neighbors.label_counts)
    else:
        logs = kernel(neighbors.distances, neighbors.dots)
    if logs.shape != neighbors.mask.shape:
        raise ValueError(
            f"a kernel must return log-weights of shape {tuple(neighbors.mask.shape)}, "
            f"got {tuple(logs.shape)}"
        )
    if not assume(~(logs.isnan() & neighbors.mask).any()):
        raise ValueError(f"a kernel must not return NaN, got NaN from {kernel}")
    # After the clamp, infinite log-weights share the weight equally, and finite ones get 0.
    limits = torch.finfo(logs.dtype)
    logs = logs.clamp(limits.min, limits.max).masked_fill(~neighbors.mask, -torch.inf)
    return logs.softmax(1).masked_fill(~neighbors.mask, 0)


def check_kernel(kernel: object) -> None:
    """Raise `ValueError` unless this is a function or an instance of a kernel."""
    if not callable(kernel) or isinstance(kernel, type):
        raise ValueError(
            f"kernel must be a function or an instance, such as mbpa.Uniform(), got {kernel!r}"
        )


def _parse_field(kernel: object, name: str) -> None:
    """Convert a field of a kernel to a plain float; raise `ValueError` unless it is finite."""
    object.__setattr__(kernel, name, validation.parse_number(name, getattr(kernel, name)))
