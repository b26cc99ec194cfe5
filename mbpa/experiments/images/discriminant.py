"""Rows of the last layer for classes that it was not trained on, from the memory in closed form.

Linear discriminants: with the mean m_c of each class and the covariance S of entries around their
means, shared by all classes and shrunk towards a multiple of the identity,

    w_c = S⁻¹ m_c,    b_c = −½ m_cᵀ S⁻¹ m_c.

Such rows are known up to what all have in common, so those of new classes are taken relative to the
mean of the old classes' and put beside the trained rows relative to the mean of these.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

AT_ONCE = 1 << 16  # entries in float64
LEAST_SPREAD = 1e-3  # of a mean square


@dataclass(frozen=True, eq=False)
class Statistics:
    """All that discriminants need to know of some entries, in float64."""

    counts: Int[Tensor, "C"]
    means: Float[Tensor, "C D"]
    """Of a class without entries, zeros."""
    covariance: Float[Tensor, "D D"]
    """Of entries around the means of their classes."""

    def rows(self, shrinkage: float) -> tuple[Float[Tensor, "C D"], Float[Tensor, "C"]]:
        """Weights and biases of all classes; of a class without entries, zeros."""
        covariance = self.covariance.clone()
        least = LEAST_SPREAD * self.means.square().mean()  # one entry a class tells no spread
        covariance.diagonal().add_(shrinkage * covariance.diagonal().mean().clamp(min=least))
        weight = torch.linalg.solve(covariance, self.means.mT).mT
        return weight, -(weight * self.means).sum(1) / 2


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
    return Statistics(counts, means, scatter / max(1, len(labels) - int((counts > 0).sum())))


def with_discriminants(
    head: nn.Linear,
    found: Statistics,
    *,
    old: int,
    shrinkage: float,
    scale: float,
    offset: float,
) -> nn.Linear:
    """The layer with new rows for the classes from `old` on that there are entries of; a copy.

    Args:
        shrinkage: how much of the mean variance is added to every variance.
        scale: of the new rows' outputs, beside those of trained rows.
        offset: subtracted from the new rows' outputs: how much surer a new class must be.
    """
    present = found.counts > 0
    known = torch.arange(len(present), device=present.device) < old
    anchors = present & known if (present & known).any() else present
    weight, bias = found.rows(shrinkage)
    grown = nn.Linear(head.in_features, head.out_features, device=head.weight.device)
    with torch.no_grad():
        for new, rows, trained, less in (
            (grown.weight, weight, head.weight, 0.0),
            (grown.bias, bias, head.bias, offset),
        ):
            moved = scale * (rows - rows[anchors].mean(0)) + trained.double()[known].mean(0) - less
            is_new = (present & ~known).reshape(-1, *(1,) * (rows.ndim - 1))
            new.copy_(torch.where(is_new, moved.to(new.dtype), trained))
    return grown.requires_grad_(False)
