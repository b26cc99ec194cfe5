"""Passes of the descent to the optimum (`optimum.py`) on a GPU, each over all rows of outputs.

A row is a neighbour of a query. Sums over the rows of a query are left to the next pass, in which
every program adds up what the rows of its query have written.
"""

from __future__ import annotations

import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

MAX_CLASSES = 8192  # a program holds a row


Rows = Float[Tensor, "B K C"]


def find_residual(
    outputs: Rows,
    place: Rows,
    moved: Rows,
    move: Rows,
    residual: Rows,
    weights: Float[Tensor, "B K"],
    labels: Int[Tensor, "B K"],
    spreads: Float[Tensor, "B K"],
    left: Bool[Tensor, "B"],
    log_sums: Float[Tensor, "B K"],
) -> None:
    """Move outputs and place by as much as is safe, and compute weighted residuals and log Σ exp.

    Args:
        outputs: outputs of the neighbours, updated.
        place: coordinates of the parameters, updated.
        moved: how the last move changes outputs if taken in full.
        move: the last move.
        residual: written.
        weights: weights of the neighbours.
        labels: labels of the neighbours.
        spreads: difference between the largest and the smallest of `moved`.
        left: whether the query has not converged; otherwise it does not move.
        log_sums: written.
    """
    batch, count, classes = outputs.shape
    _find_residual[(batch * count,)](
        outputs, place, moved, move, residual, weights, labels, spreads, left, log_sums,
        count, classes, COUNT=triton.next_power_of_2(count), **_shape(classes),
    )  # fmt: skip


def measure_curvature(
    outputs: Rows,
    log_sums: Float[Tensor, "B K"],
    slopes: Rows,
    move: Rows,
    sloping: Rows,
    moved: Rows,
    weights: Float[Tensor, "B K"],
    figures: Float[Tensor, "6 B K"],
) -> None:
    """Compute for each row `∇·∇`, `∇·m`, `m·m`, and `J∇·H·J∇`, `Jm·H·Jm`, `J∇·H·Jm`.

    Args:
        outputs: outputs of the neighbours.
        log_sums: log Σ exp of them.
        slopes: ∇, the gradient.
        move: m, the last move.
        sloping: J∇, its effect on the outputs.
        moved: Jm, the effect of the last move.
        weights: weights of the neighbours, part of H, the curvature of the loss.
        figures: written.
    """
    batch, count, classes = outputs.shape
    _measure_curvature[(batch * count,)](
        outputs, log_sums, slopes, move, sloping, moved, weights, figures,
        batch * count, classes, **_shape(classes),
    )  # fmt: skip


def choose_move(
    slopes: Rows,
    move: Rows,
    sloping: Rows,
    moved: Rows,
    weights: Float[Tensor, "B K"],
    figures: Float[Tensor, "6 B K"],
    spreads: Float[Tensor, "B K"],
    prior: float,
) -> None:
    """Replace the last move by the next, which solves Newton's equations in a plane.

    Args:
        slopes: the gradient.
        move: the last move, updated.
        sloping: effect of the gradient on the outputs.
        moved: effect of the last move, updated.
        weights: weights of the neighbours.
        figures: those of `measure_curvature`.
        spreads: written: how far apart two outputs of a neighbour move, 0 without weight.
        prior: λ.
    """
    batch, count, classes = slopes.shape
    _choose_move[(batch * count,)](
        slopes, move, sloping, moved, weights, figures, spreads, batch * count, count, classes,
        prior, COUNT=triton.next_power_of_2(count), **_shape(classes),
    )  # fmt: skip


def _shape(classes: int) -> dict[str, int]:
    width = triton.next_power_of_2(classes)
    return {"CLASSES": width, "num_warps": min(16, max(1, width // 256))}


@triton.jit
def _find_residual(
    outputs, place, moved, move, residual, weights, labels, spreads, left, log_sums,
    count, classes, COUNT: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b = row // count
    k = tl.arange(0, COUNT)
    most = tl.max(tl.load(spreads + b * count + k, mask=k < count, other=0.0), 0)
    # log(1 + x) / x, by the first terms of its series where the quotient would be inaccurate.
    quotient = tl.log(1.0 + most) / tl.maximum(most, 1e-3)
    length = tl.where(most > 1e-3, quotient, 1.0 - most * (0.5 - most / 3.0))
    length = tl.where(tl.load(left + b) != 0, length, 0.0)
    c = tl.arange(0, CLASSES)
    is_c, at = c < classes, row * classes + c
    new_place = tl.load(place + at, mask=is_c, other=0.0)
    new_place += length * tl.load(move + at, mask=is_c, other=0.0)
    tl.store(place + at, new_place, mask=is_c)
    output = tl.load(outputs + at, mask=is_c, other=-float("inf"))
    output += length * tl.load(moved + at, mask=is_c, other=0.0)
    tl.store(outputs + at, output, mask=is_c)
    peak = tl.max(output, 0)
    share = tl.exp(output - peak)
    total = tl.sum(share, 0)
    tl.store(log_sums + row, peak + tl.log(total))
    # 1 − p of the label is computed as the sum of the others, which is exact even if tiny.
    is_label = c == tl.load(labels + row)
    others = tl.where(is_label, 0.0, share)
    slope = tl.where(is_label, -tl.sum(others, 0), others) * (tl.load(weights + row) / total)
    tl.store(residual + at, slope, mask=is_c)


@triton.jit
def _measure_curvature(
    outputs, log_sums, slopes, move, sloping, moved, weights, figures, rows, classes,
    CLASSES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CLASSES)
    is_c, at = c < classes, row * classes + c
    slope = tl.load(slopes + at, mask=is_c, other=0.0)
    step = tl.load(move + at, mask=is_c, other=0.0)
    figures += row
    tl.store(figures, tl.sum(slope * slope, 0))
    tl.store(figures + rows, tl.sum(slope * step, 0))
    tl.store(figures + 2 * rows, tl.sum(step * step, 0))
    output = tl.load(outputs + at, mask=is_c, other=-float("inf"))
    share = tl.exp(output - tl.load(log_sums + row))
    down = tl.load(sloping + at, mask=is_c, other=0.0)
    along = tl.load(moved + at, mask=is_c, other=0.0)
    weight = tl.load(weights + row)
    bent = share * (down - tl.sum(share * down, 0))
    tl.store(figures + 3 * rows, weight * tl.sum(bent * down, 0))
    tl.store(figures + 5 * rows, weight * tl.sum(bent * along, 0))
    bent = share * (along - tl.sum(share * along, 0))
    tl.store(figures + 4 * rows, weight * tl.sum(bent * along, 0))


@triton.jit
def _sum_figure(figures, index, rows, start, k, count):
    return tl.sum(tl.load(figures + index * rows + start + k, mask=k < count, other=0.0), 0)


@triton.jit
def _choose_move(
    slopes, move, sloping, moved, weights, figures, spreads, rows, count, classes, prior,
    COUNT: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start, k = row // count * count, tl.arange(0, COUNT)
    steepness = _sum_figure(figures, 0, rows, start, k, count)
    rise = _sum_figure(figures, 1, rows, start, k, count)
    size = _sum_figure(figures, 2, rows, start, k, count)
    here = _sum_figure(figures, 3, rows, start, k, count) + prior * steepness
    last = _sum_figure(figures, 4, rows, start, k, count) + prior * size
    both = _sum_figure(figures, 5, rows, start, k, count) + prior * rise
    here, last = tl.maximum(here, 1.1754944e-38), tl.maximum(last, 1.1754944e-38)
    # Use ratios throughout: products of such small numbers underflow in float32.
    down, along = steepness / here, rise / last
    spare = 1.0 - (both / here) * (both / last)
    is_plane = spare > 16 * 1.1920929e-07  # else the two are parallel
    spare = tl.where(is_plane, spare, 1.0)
    by_slope = tl.where(is_plane, (both / here) * along - down, -down) / spare
    by_move = tl.where(is_plane, (both / last) * down - along, 0.0) / spare
    c = tl.arange(0, CLASSES)
    is_c, at = c < classes, row * classes + c
    step = by_move * tl.load(move + at, mask=is_c, other=0.0)
    tl.store(move + at, step + by_slope * tl.load(slopes + at, mask=is_c, other=0.0), mask=is_c)
    change = by_move * tl.load(moved + at, mask=is_c, other=0.0)
    change += by_slope * tl.load(sloping + at, mask=is_c, other=0.0)
    tl.store(moved + at, change, mask=is_c)
    widest = tl.max(tl.where(is_c, change, -float("inf")), 0)
    spread = widest - tl.min(tl.where(is_c, change, float("inf")), 0)
    tl.store(spreads + row, tl.where(tl.load(weights + row) > 0, spread, 0.0))
