"""Products of float32 accuracy on tensor cores, and softmax over classes that no one program sees.

A float32 number is a float16 and the float16 nearest to what is left, exact to 2⁻²⁴ if it was first
scaled into the range of float16. Of the four products of such halves the smallest is left out, so
three passes at float16's rate have the accuracy of one in float32. Scales are powers of two.
Outputs are kept times log₂e, for which the hardware has the exponential.
"""

from __future__ import annotations

import triton
import triton.language as tl

RESIDUAL_SCALE = tl.constexpr(4096.0)  # residuals are between −1 and 1
LOG2_E = tl.constexpr(1.4426950408889634)
LOG2_E_HIGH = tl.constexpr(1.44269502162933349609375)  # the nearest of float32
LOG2_E_LOW = tl.constexpr(1.925963033500e-08)  # and what it lacks
NOTHING = tl.constexpr(-1e30)  # the output of a class or a neighbour that is not there
NO_PEAK = tl.constexpr(-4e30)  # less than that, in any unit


@triton.jit
def halves(numbers, TYPE: tl.constexpr = tl.float16):
    """Two numbers of half precision that sum to each number."""
    high = numbers.to(TYPE)
    return high, (numbers - high.to(tl.float32)).to(TYPE)


@triton.jit
def dot_of_halves(a_high, a_low, b_high, b_low, total):
    """`total + a b`, smallest terms first."""
    total = tl.dot(a_low, b_high, total)
    total = tl.dot(a_high, b_low, total)
    return tl.dot(a_high, b_high, total)


@triton.jit
def exact_dot_of_halves(a_high, a_low, b_high, b_low, nothing):
    """`a b`, the small terms added up apart: tensor cores cut off what does not fit a sum."""
    small = tl.dot(a_high, b_low, tl.dot(a_low, b_high, nothing))
    return tl.dot(a_high, b_high, nothing) + small


@triton.jit
def scale_for(largest):
    """The power of two that brings numbers up to `largest` below 2^12."""
    return tl.exp2(12.0 - tl.ceil(tl.log2(tl.maximum(largest, 1e-30))))


@triton.jit
def joined(peak, total, outputs):
    """Peaks and sums of exponentials of rows, with more columns taken in."""
    higher = tl.maximum(peak, tl.max(outputs, 1))
    total = total * tl.exp2(peak - higher) + tl.sum(tl.exp2(outputs - higher[:, None]), 1)
    return higher, total


@triton.jit
def merged_log_sum(peaks, sums, parts, stride, rows, PARTS: tl.constexpr):
    """`log₂ Σ 2^output` of each row, from the peaks and sums of its parts."""
    part = tl.arange(0, PARTS)
    at = part[:, None] * stride + rows[None, :]
    seen = (part < parts)[:, None]
    # Past the nearest cache, which does not see what other programs write.
    peak = tl.load(peaks + at, mask=seen, other=NO_PEAK, cache_modifier=".cg")
    total = tl.load(sums + at, mask=seen, other=0.0, cache_modifier=".cg")
    top = tl.max(peak, 0)
    return top + tl.log2(tl.sum(total * tl.exp2(peak - top[None, :]), 0))


@triton.jit
def exp(numbers):
    """`e^x` to the last bit or two. The hardware's power of two is as good only near zero: what is
    left of x log₂e beyond a whole number is computed without the rounding of the product."""
    whole = tl.floor(numbers * LOG2_E + 0.5)
    rest = tl.fma(numbers, LOG2_E_HIGH, -whole) + numbers * LOG2_E_LOW
    return tl.exp2(rest) * tl.exp2(whole)


@triton.jit
def merged_softmax(peaks, sums, parts, stride, rows, PARTS: tl.constexpr):
    """Peak of each row, and the inverse of its sum of exponentials, from those of its parts."""
    part = tl.arange(0, PARTS)
    at = part[:, None] * stride + rows[None, :]
    seen = (part < parts)[:, None]
    peak = tl.load(peaks + at, mask=seen, other=NO_PEAK)
    total = tl.load(sums + at, mask=seen, other=0.0)
    top = tl.max(peak, 0)
    return top, 1.0 / tl.sum(total * exp(tl.maximum(peak - top[None, :], -100.0)), 0)


@triton.jit
def scaled_residual(outputs, log_sum, weight, label, classes):
    """`w ⊙ (softmax − one-hot)` for neighbours as rows, `w` having a scale in it."""
    share = tl.exp2(outputs - log_sum[:, None])
    return weight[:, None] * tl.where(label[:, None] == classes[None, :], share - 1.0, share)


@triton.jit
def row_starts(table, extra, index, written, stride, is_row):
    """Where the rows of two tables start, those from `written` on being in the second."""
    row = tl.load(index, mask=is_row, other=0)
    return tl.where(row < written, table + row * stride, extra + (row - written) * stride)


@triton.jit
def scaled_outputs(starts, classes, here):
    """Outputs from rows of a table, times log₂e; exactly `NOTHING` where there is none, since at
    that size the rounding of a product would be no small difference."""
    outputs = tl.load(starts[:, None] + classes[None, :], mask=here, other=0.0) * LOG2_E
    return tl.where(here, outputs, NOTHING)
