"""RMSprop and Adam on a linear head: one kernel per step over every query's own weights.

A program processes one query and a block of classes. It computes the residuals from the neighbours'
outputs after the last step. Then it passes once over its rows of weights and moments to take the
step, and in the same pass multiplies the new weights with the neighbours, which gives the outputs
for the next step. The last step multiplies with the query instead and writes no weights; the first
reads the head's own. Everything is padded with zeros to whole blocks, so that the loop needs no
masks.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from mbpa.adaptation.fused.arithmetic import (
    NOTHING,
    choose_scale,
    dot_of_halves,
    exact_dot_of_halves,
    exp,
    find_row_starts,
    merge_softmax,
    split_halves,
)
from mbpa.rules import Adam, RMSprop

CLASSES, SIZES, WARPS, STAGES = 64, 64, 4, 2
HIGHEST_BITS = 15  # float16 ends below 2^16


def adapt_dense_outputs(
    table: Float[Tensor, "N C"],
    extra: Float[Tensor, "M C"],
    index: Int[Tensor, "B K"],
    weight: Float[Tensor, "C D"],
    bias: Float[Tensor, "C"] | None,
    keys: Float[Tensor, "B K D"],
    queries: Float[Tensor, "B D"],
    weights: Float[Tensor, "B K"],
    labels: Int[Tensor, "B K"],
    rule: RMSprop | Adam,
    *,
    bias_adapts: bool,
) -> Float[Tensor, "B C"]:
    """Return the adapted outputs at the queries for cross-entropy.

    The weights adapt, and the bias does if `bias_adapts`.

    Args:
        table: outputs of the head, one row per entry.
        extra: further outputs, which are rows N, N+1, …
        index: the rows of each query's neighbours.
        weight: the head's weights.
        bias: the head's bias, if it has one.
        keys: keys of the neighbours.
        queries: keys of the queries.
        weights: weights of the neighbours.
        labels: labels of the neighbours.
        rule: the rule, with its hyper-parameters.
        bias_adapts: whether the bias adapts.
    """
    (batch, count, size), classes = keys.shape, table.shape[1]
    rows, width, padded = pad_sizes(count, size, classes)
    parts = padded // CLASSES
    key_scale = _power_of_two(12 - keys.abs().amax((1, 2)).clamp_min(1e-30).log2())
    farthest = weight.abs().amax() + rule.lr * rule.steps * _longest_move(rule)
    weight_scale = _power_of_two(HIGHEST_BITS - farthest.log2())
    scaled = functional.pad(keys * key_scale[:, None, None], (0, width - size, 0, rows - count))
    key_high = scaled.half()
    key_low = scaled.sub_(key_high).half()
    own = weight.new_zeros(padded, width + 16)  # the bias in the column after the weights
    own[:classes, :size] = weight
    if bias is not None:
        own[:classes, width] = bias
    state = [own.new_empty(batch, *own.shape) for _ in range(3 if isinstance(rule, Adam) else 2)]
    outputs = own.new_empty(batch, len(own), rows)
    peaks, sums = own.new_empty(2, 2, batch, parts, rows)
    result = own.new_empty(batch, classes)
    rows_of = table, extra if len(extra) else table, index, len(table), table.stride(0)
    shape = {"ROWS": rows, "CLASSES": CLASSES, "num_warps": WARPS}
    _start[(batch, parts)](*rows_of, outputs, peaks[0], sums[0], count, classes, **shape)
    for step in range(rule.steps):
        here, there = step % 2, 1 - step % 2
        _step[(batch, parts)](
            outputs, own, state[0], state[1], state[-1],
            key_high, key_low, key_scale, weight_scale, functional.pad(queries, (0, width - size)),
            weights, labels, peaks[here], sums[here], peaks[there], sums[there], result,
            count, classes, width, rule.lr, rule.decay, *_moments(rule, step + 1), rule.epsilon,
            PARTS=triton.next_power_of_2(parts), FIRST=step == 0, LAST=step == rule.steps - 1,
            DECAY=rule.decay != 0, MEAN=isinstance(rule, Adam), BIAS=bias_adapts,
            **shape, SIZES=SIZES, num_stages=STAGES,
        )  # fmt: skip
    return result


def pad_sizes(count: int, size: int, classes: int) -> tuple[int, int, int]:
    """Return the numbers of neighbours, key size and classes, each rounded up to whole blocks."""
    rows = max(16, triton.next_power_of_2(count))
    return rows, SIZES * triton.cdiv(size, SIZES), CLASSES * triton.cdiv(classes, CLASSES)


def _moments(rule: RMSprop | Adam, step: int) -> tuple[float, ...]:
    """Return decay rates of both moments, their corrections, and the second's initial value."""
    if isinstance(rule, Adam):
        fixes = 1 / (1 - rule.beta1**step), 1 / math.sqrt(1 - rule.beta2**step)
        return rule.beta1, rule.beta2, *fixes, 0.0
    return 0.0, rule.smoothing, 1.0, 1.0, rule.initial_square


def _longest_move(rule: RMSprop | Adam) -> float:
    """Return a bound on the move of a weight in a step, divided by `lr`.

    It compares |∇| with the root of its mean square. For Adam the mean square must decay more
    slowly than the mean, which `is_dense_fused` guarantees.
    """
    if isinstance(rule, Adam):
        forgotten = 1 - rule.beta1 / math.sqrt(rule.beta2)
        return 2 / (forgotten * math.sqrt(1 - rule.beta2))
    return 2 / math.sqrt(max(1 - rule.smoothing, 1e-14))


def _power_of_two(exponent: Tensor) -> Tensor:
    return torch.exp2(exponent.floor().clamp(-100, 100))


@triton.jit
def _start(
    table, extra, index, written, stride, outputs, peaks, sums, count, classes,
    ROWS: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """Gather the neighbours' outputs, and compute peak and sum of exponentials per block."""
    b, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    k = tl.arange(0, ROWS)
    c = part * CLASSES + tl.arange(0, CLASSES)
    starts = find_row_starts(table, extra, index + b * count + k, written, stride, k < count)
    here = (k < count)[:, None] & (c < classes)[None, :]
    output = tl.load(starts[:, None] + c[None, :], mask=here, other=NOTHING)
    tl.store(outputs + (b * parts * CLASSES + c[None, :]) * ROWS + k[:, None], output)
    peak = tl.max(output, 1)
    at = (b * parts + part) * ROWS + k
    tl.store(peaks + at, peak)
    tl.store(sums + at, tl.sum(exp(tl.maximum(output - peak[:, None], -100.0)), 1))


@triton.jit
def _step(
    outputs, own, moved, squares, means, key_high, key_low, key_scale, weight_scale, queries,
    weights, labels, old_peaks, old_sums, new_peaks, new_sums, result,
    count, classes, width, lr, decay, first, second, mean_fix, square_fix, initial, epsilon,
    PARTS: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, DECAY: tl.constexpr,
    MEAN: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, CLASSES: tl.constexpr, SIZES: tl.constexpr,
):  # fmt: skip
    b, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    k = tl.arange(0, ROWS)
    c = part * CLASSES + tl.arange(0, CLASSES)
    at_parts = b * parts * ROWS
    top, inverse = merge_softmax(old_peaks + at_parts, old_sums + at_parts, parts, ROWS, k, PARTS)
    neighbor_weight = tl.load(weights + b * count + k, mask=k < count, other=0.0)
    label = tl.load(labels + b * count + k, mask=k < count, other=-1).to(tl.int32)
    at_outputs = outputs + (b * parts * CLASSES + c[:, None]) * ROWS + k[None, :]
    # As accurate as possible: if moments start at zero, tiny slopes determine whole steps.
    share = exp(tl.maximum(tl.load(at_outputs) - top[None, :], -100.0)) * inverse[None, :]
    residual = neighbor_weight[None, :] * tl.where(label[None, :] == c[:, None], share - 1.0, share)
    # Each class has its own scale, so that residuals stay accurate even if all are small.
    scale_residuals = choose_scale(tl.max(tl.abs(residual), 1))
    residual_high, residual_low = split_halves(residual * scale_residuals[:, None])
    scale_keys, scale_weights = tl.load(key_scale + b), tl.load(weight_scale)
    unscale = 1.0 / (scale_residuals * scale_keys)
    stride = width + 16
    own_row, row = c * stride, (b * parts * CLASSES + c) * stride
    own_bias = tl.load(own + own_row + width)
    new_bias = own_bias
    if BIAS:
        new_bias = _take_step(
            own + own_row + width, moved + row + width, squares + row + width, means + row + width,
            tl.sum(residual, 1), lr, decay, first, second, mean_fix, square_fix, initial, epsilon,
            FIRST, LAST, DECAY, MEAN,
        )  # fmt: skip
    new_outputs = tl.zeros((CLASSES, ROWS), tl.float32)
    at_query = new_bias
    for d0 in range(0, width, SIZES):
        d = d0 + tl.arange(0, SIZES)
        at_keys = (b * ROWS + k[:, None]) * width + d[None, :]
        high, low = tl.load(key_high + at_keys), tl.load(key_low + at_keys)
        slope = exact_dot_of_halves(
            residual_high, residual_low, high, low, tl.zeros((CLASSES, SIZES), tl.float32)
        )
        at = row[:, None] + d[None, :]
        value = _take_step(
            own + own_row[:, None] + d[None, :], moved + at, squares + at, means + at,
            slope * unscale[:, None], lr, decay, first, second, mean_fix, square_fix,
            initial, epsilon, FIRST, LAST, DECAY, MEAN,
        )  # fmt: skip
        if LAST:
            query = tl.load(queries + b * width + d)
            at_query += tl.sum(value * query[None, :], 1)
        else:
            value_high, value_low = split_halves(value * scale_weights)
            new_outputs = dot_of_halves(
                value_high, value_low, tl.trans(high), tl.trans(low), new_outputs
            )
    if LAST:
        tl.store(result + b * classes + c, at_query, mask=c < classes)
    else:
        new_outputs = new_outputs / (scale_keys * scale_weights) + new_bias[:, None]
        new_outputs = tl.where((c < classes)[:, None], new_outputs, NOTHING)
        tl.store(at_outputs, new_outputs)
        peak = tl.max(new_outputs, 0)
        at = (b * parts + part) * ROWS + k
        tl.store(new_peaks + at, peak)
        apart = tl.maximum(new_outputs - peak[None, :], -100.0)
        tl.store(new_sums + at, tl.sum(exp(apart), 0))


@triton.jit
def _take_step(
    own, moved, squares, means, slope, lr, decay, first, second, mean_fix, square_fix,
    initial, epsilon,
    FIRST: tl.constexpr, LAST: tl.constexpr, DECAY: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """Return the parameters after a step; store them and their moments unless it is the last."""
    if FIRST:
        value = tl.load(own)
        square = second * initial + (1.0 - second) * slope * slope
    else:
        value = tl.load(moved)
        square = second * tl.load(squares) + (1.0 - second) * slope * slope
    mean = slope
    if MEAN:
        mean = (1.0 - first) * slope
        if not FIRST:
            mean += first * tl.load(means)
    size = tl.maximum(tl.sqrt(square) * square_fix + epsilon, 1e-37)
    root = tl.rsqrt(size)  # its square is the inverse
    change = -lr * mean_fix * mean * (root * root)
    if DECAY and not FIRST:
        change -= decay * (value - tl.load(own))
    value += change
    if not LAST:
        tl.store(moved, value)
        tl.store(squares, square)
        if MEAN:
            tl.store(means, mean)
    return value
