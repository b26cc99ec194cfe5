"""A last layer from the memory alone, in closed form.

Linear discriminants: with the mean m_c of each class and the covariance S of entries around their
means, shared by all classes,

    w_c = S⁻¹ m_c,    b_c = −½ m_cᵀ S⁻¹ m_c.

Few entries tell little of either, so both begin somewhere: S at a multiple of the identity, which
counts like `shrinkage · D` entries, and each m_c at the mean of all, which counts like `pull`. No
row was trained, so those of classes the network knows have no head start over new ones (Hayes and
Kanan 2020 learn from a stream in this way).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

AT_ONCE = 1 << 16  # entries in float64
LEAST_SPREAD = 1e-3  # of a mean square
NEVER = -1e4  # the output of a class that there are no entries of


@dataclass(frozen=True, eq=False)
class Statistics:
    """All that discriminants need to know of some entries, in float64."""

    counts: Int[Tensor, "C"]
    means: Float[Tensor, "C D"]
    """Of a class without entries, zeros."""
    scatter: Float[Tensor, "D D"]
    """The sum of squares of entries around the means of their classes."""

    def rows(
        self, shrinkage: float, pull: float
    ) -> tuple[Float[Tensor, "C D"], Float[Tensor, "C"]]:
        """Weights and biases of all classes; of a class without entries, zeros."""
        size, counts, present = len(self.scatter), self.counts.double(), self.counts > 0
        freedom = max(1, int(self.counts.sum()) - int(present.sum()))
        least = LEAST_SPREAD * self.means.square().mean()  # one entry a class tells no spread
        spread = (self.scatter.diagonal().mean() / freedom).clamp(min=least)
        covariance = self.scatter.clone()
        covariance.diagonal().add_(shrinkage * size * spread)
        covariance /= freedom + shrinkage * size
        shares = counts[:, None] / counts.sum()
        middle = (shares * self.means).sum(0)
        trust = (counts / (counts + pull))[:, None]
        means = torch.where(present[:, None], middle + trust * (self.means - middle), 0)
        weight = torch.linalg.solve(covariance, means.mT).mT
        return weight, -(weight * means).sum(1) / 2


def statistics(keys: Float[Tensor, "M D"], labels: Int[Tensor, "M"], classes: int) -> Statistics:
    """Of entries and their classes."""
    sums = torch.zeros(classes, keys.shape[1], dtype=torch.float64, device=keys.device)
    for part, theirs in zip(keys.split(AT_ONCE), labels.split(AT_ONCE), strict=True):
        sums.index_add_(0, theirs, part.double())
    counts = torch.bincount(labels, minlength=classes)
    means = sums / counts.clamp(min=1)[:, None]
    scatter = sums.new_zeros(keys.shape[1], keys.shape[1])
    for part, theirs in zip(keys.split(AT_ONCE), labels.split(AT_ONCE), strict=True):
        around = part.double() - means[theirs]
        scatter.addmm_(around.mT, around)
    return Statistics(counts, means, scatter)


def discriminant_layer(
    found: Statistics, *, shrinkage: float, pull: float, scale: float
) -> nn.Linear:
    """The layer of these discriminants; it never answers with a class that it has not seen.

    Args:
        shrinkage: how much the first guess of the covariance counts, in entries a dimension.
        pull: how much the first guess of a mean counts, in entries.
        scale: of the outputs. At 1 it would be as sure as normal distributions are, which features
            are not.
    """
    present = found.counts > 0
    weight, bias = found.rows(shrinkage, pull)
    weight, bias = weight - weight[present].mean(0), bias - bias[present].mean()
    layer = nn.Linear(weight.shape[1], len(weight), device=weight.device)
    with torch.no_grad():
        layer.weight.copy_(torch.where(present[:, None], scale * weight, 0))
        layer.bias.copy_(torch.where(present, scale * bias, NEVER))
    return layer.requires_grad_(False)
