"""Rows of a linear head for labels that it was not trained on, in closed form from examples.

Let u_c be the direction of the mean key of label c, and ū, w̄, b̄ the means over the trained labels
of the directions, weights and biases. Then

    w_c = w̄ + scale · (u_c − ū),    b_c = b̄ + offset
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

NORM_TOLERANCE = 1e-2  # largest deviation of a key's norm from 1


@dataclass(frozen=True, eq=False)
class NewRows:
    """The formula for new rows: the means over the trained labels, and two hyper-parameters."""

    direction: Float[Tensor, "D"]
    weight: Float[Tensor, "D"]
    bias: Float[Tensor, ""]
    scale: float = 1.0
    offset: float = 0.0
    """Amount added to the mean bias; larger values favour new labels."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and self.scale >= 0 and math.isfinite(self.offset)):
            raise ValueError(
                f"scale must be finite and not negative, offset finite, "
                f"got {self.scale} and {self.offset}"
            )

    @classmethod
    def around(
        cls,
        weight: Float[Tensor, "C D"],
        bias: Float[Tensor, "C"],
        sums: Float[Tensor, "S D"],
        *,
        scale: float = 1.0,
        offset: float = 0.0,
    ) -> Self:
        """Create the formula from the means of a trained head.

        Args:
            weight: rows of the labels that the head was trained on.
            bias: biases of these labels.
            sums: for each of these labels that has keys, their sum; its length does not matter.
            scale: scale of the new rows around the mean.
            offset: added to the mean bias.
        """
        middle = functional.normalize(sums, dim=1).mean(0)
        return cls(middle, weight.mean(0), bias.mean(), scale, offset)

    def weights(self, sums: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        """Return the rows of new labels, each from the sum of the label's keys."""
        directions = functional.normalize(sums, dim=1)
        return self.weight + self.scale * (directions - self.direction)

    @property
    def biases(self) -> Float[Tensor, ""]:
        """The bias of every new row."""
        return self.bias + self.offset


def require_unit_norm(keys: Float[Tensor, "N D"], more: float = 0.0) -> None:
    """Raise `ValueError` unless all keys have norm 1; a run cannot store sums of other keys.

    Args:
        keys: the keys.
        more: tolerance besides the usual one.
    """
    norms = torch.linalg.vector_norm(keys, dim=1, dtype=torch.float64)
    off = (norms - 1).abs()
    if not (off <= NORM_TOLERANCE + more).all():  # written so that it also refuses NaN
        raise ValueError(f"keys must have norm 1, got {float(norms[off.argmax()]):.3g}")


def label_sums(
    keys: Float[Tensor, "N D"], labels: Int[Tensor, "N"], count: int
) -> Float[Tensor, "C D"]:
    """Return the sum of the keys of each label."""
    return keys.new_zeros(count, keys.shape[1]).index_add_(0, labels, keys)


def even_scale(weight: Float[Tensor, "C D"], sums: Float[Tensor, "S D"]) -> float:
    """Return the scale at which new rows lie as far from their mean as the trained rows do."""
    directions = functional.normalize(sums, dim=1)
    away = [(rows - rows.mean(0)).norm(dim=1).mean() for rows in (weight, directions)]
    return float(away[0] / away[1].clamp_min(1e-6))
