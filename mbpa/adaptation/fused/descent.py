"""The descent to the optimum (`optimum.py`) on a GPU: one program per query, from start to end.

The program goes through the classes in blocks that hold all neighbours, so it can multiply a block
by the basis without passing it through memory. Each step goes through the classes three times:
`_choose_move` computes the move and how far apart it drives outputs, `_measure_outputs` the sums of
exponentials after the move, and `_find_slopes` takes the move and computes the gradient there and
its curvature. A query that has converged takes no further time, and the host need not wait for
anything until the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mbpa.adaptation.fused.arithmetic import choose_scale, dot_of_halves, split_halves

MAX_ROWS = 128  # neighbours that a block holds, with padding
MAX_ROWS_IN_LITTLE_MEMORY = 64  # the same if programs have less than this much shared memory:
LITTLE_MEMORY_BYTES = 160_000
MIN_QUERIES = 32  # for which a GPU is busy with one program each; fewer may have so many classes:
MAX_CLASSES_OF_FEW = 4096
NUMBERS_PER_WARP = 512  # of a block: more do not fit into registers
STAGES = 1
TINY = tl.constexpr(1.1754944e-38)


def can_descend(start: Float[Tensor, "B K C"]) -> bool:
    """Return whether `descend` takes outputs of this shape and is the fastest way."""
    batch, count, classes = start.shape
    most = MAX_ROWS
    if start.device.type == "cuda":
        properties = torch.cuda.get_device_properties(start.device)
        available = getattr(properties, "shared_memory_per_block_optin", 0)
        most = MAX_ROWS if available >= LITTLE_MEMORY_BYTES else MAX_ROWS_IN_LITTLE_MEMORY
    return count <= most and (batch >= MIN_QUERIES or classes <= MAX_CLASSES_OF_FEW)


def descend(
    start: Float[Tensor, "B K C"],
    basis: Float[Tensor, "B K K"],
    weights: Float[Tensor, "B K"],
    labels: Int[Tensor, "B K"],
    enough: Float[Tensor, "B"],
    prior: float,
    most_steps: int,
    steps_per_restart: int,
) -> tuple[Float[Tensor, "B K C"], Bool[Tensor, "B"]]:
    """Return the coordinates of the optimum of cross-entropy, and which queries are not there yet.

    Args:
        start: the head's outputs for the neighbours.
        basis: R, the neighbours in an orthonormal basis of their span.
        weights: weights of the neighbours.
        labels: labels of the neighbours.
        enough: squared norm of the gradient at which a query has converged.
        prior: λ.
        most_steps: maximum number of steps.
        steps_per_restart: number of steps after which the last move is forgotten.
    """
    batch, count, classes = start.shape
    rows = max(16, triton.next_power_of_2(count))
    warps = 4 if rows <= 64 else 8
    start = start.contiguous()
    outputs, slopes = start.clone(), torch.empty_like(start)
    place, move, moved = (torch.zeros_like(start) for _ in range(3))
    left = torch.empty_like(enough, dtype=torch.bool)
    _descend[(batch,)](
        start, outputs, place, slopes, move, moved,
        torch.nn.functional.pad(basis, (0, rows - count, 0, rows - count)),
        weights.contiguous(), labels.contiguous(), enough, left,
        count, classes, prior, most_steps, steps_per_restart,
        ROWS=rows, CLASSES=NUMBERS_PER_WARP * warps // rows, num_warps=warps, num_stages=STAGES,
    )  # fmt: skip
    return place, left


@triton.jit(do_not_specialize=["count", "most_steps", "steps_per_restart"])
def _descend(
    start, outputs, place, slopes, move, moved, basis, weights, labels, enough, left,
    count, classes, prior, most_steps, steps_per_restart,
    ROWS: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, ROWS)
    is_k = k < count
    weight = tl.load(weights + b * count + k, is_k, 0.0)
    label = tl.load(labels + b * count + k, is_k, 0).to(tl.int32)
    basis += b * ROWS * ROWS
    scale = choose_scale(tl.max(tl.abs(tl.load(basis + k[:, None] * ROWS + k[None, :]))))
    first = b * count * classes
    start, outputs, place = start + first, outputs + first, place + first
    slopes, move, moved = slopes + first, move + first, moved + first
    rows = k[:, None] * classes
    goal = tl.load(enough + b)
    step, is_left, goes_on = 0, True, True
    length, before, noise = 0.0, float("inf"), 0.0
    while goes_on:
        is_restart = step % steps_per_restart == 0
        if is_restart:
            peak, others, total, noise = _restart(
                start, outputs, place, slopes, move, moved, basis, scale, rows, k, count, classes,
                weight, label, length, ROWS, CLASSES,
            )  # fmt: skip
            length = 0.0
        else:
            peak, others, total = _measure_outputs(
                outputs, moved, rows, is_k, classes, label, length, ROWS, CLASSES
            )
        tl.debug_barrier()
        steepness, rise, here, last, both = _find_slopes(
            outputs, place, slopes, move, moved, basis, scale, rows, k, count, classes,
            weight, label, peak, others, total, length, prior, ROWS, CLASSES,
        )  # fmt: skip
        tl.debug_barrier()
        is_left = steepness > goal
        if is_restart:  # stop below the noise once progress stalls
            is_left = is_left & ((steepness > noise) | (4.0 * steepness < before))
            before = tl.where(step > 0, steepness, before)
        goes_on = is_left & (step < most_steps)
        if goes_on:
            by_slope, by_move = _solve_plane(steepness, rise, here, last, both)
            most = _choose_move(
                slopes, move, moved, basis, scale, rows, k, count, classes, weight,
                by_slope, by_move, ROWS, CLASSES,
            )  # fmt: skip
            tl.debug_barrier()
            # log(1 + x) / x, by the first terms of its series where the quotient is inaccurate.
            quotient = tl.log(1.0 + most) / tl.maximum(most, 1e-3)
            length = tl.where(most > 1e-3, quotient, 1.0 - most * (0.5 - most / 3.0))
            step += 1
    tl.store(left + b, is_left)


@triton.jit
def _load_basis(basis, k, down, across, scale):
    """Return the basis, or its transpose, scaled and in halves."""
    return split_halves(scale * tl.load(basis + k[:, None] * down + k[None, :] * across))


@triton.jit
def _multiply(high, low, scale, numbers):
    """Return the product of the basis, scaled and in halves, with other numbers."""
    own_scale = choose_scale(tl.max(tl.abs(numbers)))
    number_high, number_low = split_halves(own_scale * numbers)
    nothing = tl.zeros((high.shape[0], numbers.shape[1]), tl.float32)
    total = dot_of_halves(high, low, number_high, number_low, nothing)
    return total * ((1.0 / scale) * (1.0 / own_scale))


@triton.jit
def _measure_outputs(
    outputs, moved, rows, is_k, classes, label, length,
    ROWS: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """Return the peaks of the outputs after the move, and Σ exp without the label and in all."""
    peak = tl.full((ROWS,), -float("inf"), tl.float32)
    others, own = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    for first in range(0, classes, CLASSES):
        c = first + tl.arange(0, CLASSES)
        here, at = is_k[:, None] & (c < classes)[None, :], rows + c[None, :]
        output = tl.load(outputs + at, here, 0.0) + length * tl.load(moved + at, here, 0.0)
        peak, others, own, _, _ = _add_classes(output, c, classes, label, peak, others, own)
    return peak, others, others + own


@triton.jit
def _add_classes(output, c, classes, label, peak, others, own):
    """Update the peak and sums of exponentials of each row with further classes."""
    output = tl.where((c < classes)[None, :], output, -float("inf"))
    higher = tl.maximum(peak, tl.max(output, 1))
    share = tl.exp(output - higher[:, None])
    is_label = label[:, None] == c[None, :]
    shrink = tl.exp(peak - higher)
    others = others * shrink + tl.sum(tl.where(is_label, 0.0, share), 1)
    own = own * shrink + tl.sum(tl.where(is_label, share, 0.0), 1)
    return higher, others, own, share, shrink


@triton.jit
def _find_slopes(
    outputs, place, slopes, move, moved, basis, scale, rows, k, count, classes,
    weight, label, peak, others, total, length, prior, ROWS: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """Take the move, and find the gradient ∇ there.

    Returns:
        `∇·∇`, `∇·m`, and the curvatures of F along ∇, along the move m, and mixed.
    """
    down, down_low = _load_basis(basis, k, ROWS, 1, scale)
    up, up_low = _load_basis(basis, k, 1, ROWS, scale)
    # 1 − p of the label is computed as the sum of the others, which is exact even if tiny.
    inverse, own = 1.0 / total, -weight * (others / total)
    nothing = tl.zeros((ROWS,), tl.float32)
    steepness, rise, size = nothing, nothing, nothing
    # The sum of the shares of the classes so far, means of `∇` and `m` as they change outputs, and
    # sums of squares and products around the means, which lose nothing if one share is nearly 1.
    seen, mean_slope, mean_move = nothing, nothing, nothing
    here, last, both = nothing, nothing, nothing
    for first in range(0, classes, CLASSES):
        c = first + tl.arange(0, CLASSES)
        is_here, at = (k < count)[:, None] & (c < classes)[None, :], rows + c[None, :]
        # Load everything before the first store, so that the loads overlap.
        along, step = tl.load(moved + at, is_here, 0.0), tl.load(move + at, is_here, 0.0)
        output = tl.load(outputs + at, is_here, 0.0) + length * along
        new_place = tl.load(place + at, is_here, 0.0) + length * step
        tl.store(outputs + at, output, is_here)
        tl.store(place + at, new_place, is_here)
        output = tl.where((c < classes)[None, :], output, -float("inf"))
        share = tl.exp(output - peak[:, None]) * inverse[:, None]
        is_label = label[:, None] == c[None, :]
        residual = tl.where(is_label, own[:, None], weight[:, None] * share)
        slope = _multiply(up, up_low, scale, residual) + prior * new_place
        tl.store(slopes + at, slope, is_here)
        steepness += tl.sum(slope * slope, 1)
        rise += tl.sum(slope * step, 1)
        size += tl.sum(step * step, 1)
        sloping = _multiply(down, down_low, scale, slope)
        more = tl.sum(share, 1)
        own_slope = tl.sum(share * sloping, 1) / tl.maximum(more, TINY)
        own_move = tl.sum(share * along, 1) / tl.maximum(more, TINY)
        sloping -= own_slope[:, None]
        along -= own_move[:, None]
        own_slope -= mean_slope
        own_move -= mean_move
        part = more / tl.maximum(seen + more, TINY)
        here += tl.sum(share * sloping * sloping, 1) + own_slope * own_slope * (seen * part)
        last += tl.sum(share * along * along, 1) + own_move * own_move * (seen * part)
        both += tl.sum(share * sloping * along, 1) + own_slope * own_move * (seen * part)
        mean_slope += own_slope * part
        mean_move += own_move * part
        seen += more
    here = tl.sum(weight * here + prior * steepness, 0)
    last = tl.sum(weight * last + prior * size, 0)
    both = tl.sum(weight * both + prior * rise, 0)
    return tl.sum(steepness, 0), tl.sum(rise, 0), here, last, both


@triton.jit
def _solve_plane(steepness, rise, here, last, both):
    """Solve Newton's equations in the plane of ∇ and the last move; return the two factors."""
    here, last = tl.maximum(here, TINY), tl.maximum(last, TINY)
    # Use ratios throughout: products of such small numbers underflow in float32.
    down, along = steepness / here, rise / last
    spare = 1.0 - (both / here) * (both / last)
    is_plane = spare > 16 * 1.1920929e-07  # else the two are parallel
    spare = tl.where(is_plane, spare, 1.0)
    by_slope = tl.where(is_plane, (both / here) * along - down, -down) / spare
    return by_slope, tl.where(is_plane, (both / last) * down - along, 0.0) / spare


@triton.jit
def _choose_move(
    slopes, move, moved, basis, scale, rows, k, count, classes, weight, by_slope, by_move,
    ROWS: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """Replace the last move, and return how far apart it moves two outputs of a neighbour."""
    down, down_low = _load_basis(basis, k, ROWS, 1, scale)
    highest = tl.full((ROWS,), -float("inf"), tl.float32)
    lowest = tl.full((ROWS,), float("inf"), tl.float32)
    for first in range(0, classes, CLASSES):
        c = first + tl.arange(0, CLASSES)
        is_c = (c < classes)[None, :]
        here, at = (k < count)[:, None] & is_c, rows + c[None, :]
        step = by_move * tl.load(move + at, here, 0.0)
        step += by_slope * tl.load(slopes + at, here, 0.0)
        tl.store(move + at, step, here)
        change = _multiply(down, down_low, scale, step)
        tl.store(moved + at, change, here)
        highest = tl.maximum(highest, tl.max(tl.where(is_c, change, -float("inf")), 1))
        lowest = tl.minimum(lowest, tl.min(tl.where(is_c, change, float("inf")), 1))
    return tl.max(tl.where(weight > 0, highest - lowest, 0.0), 0)


@triton.jit
def _restart(
    start, outputs, place, slopes, move, moved, basis, scale, rows, k, count, classes,
    weight, label, length, ROWS: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """Take the move and forget it, and remove accumulated rounding errors from the outputs.

    Returns:
        what `_measure_outputs` returns, and the squared norm of the errors' effect on ∇.
    """
    down, down_low = _load_basis(basis, k, ROWS, 1, scale)
    up, up_low = _load_basis(basis, k, 1, ROWS, scale)
    nothing = tl.zeros((ROWS,), tl.float32)
    peak = tl.full((ROWS,), -float("inf"), tl.float32)
    others, own, mean = nothing, nothing, nothing
    for first in range(0, classes, CLASSES):
        c = first + tl.arange(0, CLASSES)
        here, at = (k < count)[:, None] & (c < classes)[None, :], rows + c[None, :]
        new_place = tl.load(place + at, here, 0.0) + length * tl.load(move + at, here, 0.0)
        output = tl.load(start + at, here, 0.0) + _multiply(down, down_low, scale, new_place)
        error = tl.load(outputs + at, here, 0.0) + length * tl.load(moved + at, here, 0.0) - output
        tl.store(place + at, new_place, here)
        tl.store(outputs + at, output, here)
        tl.store(slopes + at, error, here)  # until the gradient is computed
        tl.store(move + at, tl.zeros_like(error), here)
        tl.store(moved + at, tl.zeros_like(error), here)
        peak, others, own, share, shrink = _add_classes(
            output, c, classes, label, peak, others, own
        )
        mean = mean * shrink + tl.sum(share * error, 1)
    tl.debug_barrier()
    total = others + own
    mean /= total
    noise = nothing
    for first in range(0, classes, CLASSES):
        c = first + tl.arange(0, CLASSES)
        here, at = (k < count)[:, None] & (c < classes)[None, :], rows + c[None, :]
        share = tl.exp(tl.load(outputs + at, here, -float("inf")) - peak[:, None])
        error = tl.load(slopes + at, here, 0.0) - mean[:, None]
        bent = _multiply(up, up_low, scale, share * error * (weight / total)[:, None])
        noise += tl.sum(bent * bent, 1)
    return peak, others, total, tl.sum(noise, 0)
