"""Rows of a linear head for labels that it was not trained with, in closed form from examples.

With u_c the direction of the mean key of label c, and ū, w̄, b̄ the means over the trained labels of
directions, of weights and of biases:

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

NORM_TOLERANCE = 1e-2  # by which the norm of a key may differ from 1


@dataclass(frozen=True, eq=False)
class NewRows:
    """How rows are made: the means over the trained labels, and two numbers to choose."""

    direction: Float[Tensor, "D"]
    weight: Float[Tensor, "D"]
    bias: Float[Tensor, ""]
    scale: float = 1.0
    offset: float = 0.0
    """How much a new label is favoured."""

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
        """Around the middle of a head.

        Args:
            weight, bias: of the labels it was trained with.
            sums: of the keys of each of these labels, where there are some; their lengths do not
                matter.
        """
        middle = functional.normalize(sums, dim=1).mean(0)
        return cls(middle, weight.mean(0), bias.mean(), scale, offset)

    def weights(self, sums: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        """Rows of labels, each from the sum of its keys."""
        directions = functional.normalize(sums, dim=1)
        return self.weight + self.scale * (directions - self.direction)

    @property
    def biases(self) -> Float[Tensor, ""]:
        """The same for all of them."""
        return self.bias + self.offset


def require_unit_norm(keys: Float[Tensor, "N D"]) -> None:
    """`ValueError` for keys of another norm, whose sums a run cannot hold."""
    norms = torch.linalg.vector_norm(keys, dim=1, dtype=torch.float64)
    off = (norms - 1).abs()
    if not (off <= NORM_TOLERANCE).all():  # so that NaN is refused, too
        raise ValueError(f"keys must have norm 1, got {float(norms[off.argmax()]):.3g}")


def label_sums(
    keys: Float[Tensor, "N D"], labels: Int[Tensor, "N"], count: int
) -> Float[Tensor, "C D"]:
    """The sum of the keys of each label."""
    return keys.new_zeros(count, keys.shape[1]).index_add_(0, labels, keys)


def even_scale(weight: Float[Tensor, "C D"], sums: Float[Tensor, "S D"]) -> float:
    """The scale by which rows from sums of keys lie as far from their middle as trained rows do."""
    directions = functional.normalize(sums, dim=1)
    away = [(rows - rows.mean(0)).norm(dim=1).mean() for rows in (weight, directions)]
    return float(away[0] / away[1].clamp_min(1e-6))
