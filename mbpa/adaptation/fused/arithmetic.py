"""Products of float32 accuracy on tensor cores, and softmax over classes in several programs.

A float32 number is split into a float16 and the float16 nearest to the remainder, which is exact to
2⁻²⁴ if the number was scaled into the range of float16. Of the four products of such halves the
smallest is left out, so three passes at float16's speed have the accuracy of one in float32. Scales
are powers of two. Outputs are stored times log₂e, because the hardware computes powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

RESIDUAL_SCALE = tl.constexpr(4096.0)  # residuals are between −1 and 1
LOG2_E = tl.constexpr(1.4426950408889634)
LOG2_E_HIGH = tl.constexpr(1.44269502162933349609375)  # the nearest float32
LOG2_E_LOW = tl.constexpr(1.925963033500e-08)  # and its remainder
NOTHING = tl.constexpr(-1e30)  # the output for a missing class or neighbour
NO_PEAK = tl.constexpr(-4e30)  # less than that, in any unit


@triton.jit
def split_halves(numbers, TYPE: tl.constexpr = tl.float16):
    """Split each number into two half-precision numbers that sum to it."""
    high = numbers.to(TYPE)
    return high, (numbers - high.to(tl.float32)).to(TYPE)


@triton.jit
def dot_of_halves(a_high, a_low, b_high, b_low, total):
    """Return `total + a b`, adding the smallest terms first."""
    total = tl.dot(a_low, b_high, total)
    total = tl.dot(a_high, b_low, total)
    return tl.dot(a_high, b_high, total)


@triton.jit
def exact_dot_of_halves(a_high, a_low, b_high, b_low, nothing):
    """Return `a b`; small terms are summed separately, since tensor cores truncate sums."""
    small = tl.dot(a_high, b_low, tl.dot(a_low, b_high, nothing))
    return tl.dot(a_high, b_high, nothing) + small


@triton.jit
def choose_scale(largest):
    """Return the power of two that scales numbers up to `largest` to at most 2^12."""
    return tl.exp2(12.0 - tl.ceil(tl.log2(tl.maximum(largest, 1e-30))))


@triton.jit
def add_columns(peak, total, outputs):
    """Update the peaks and sums of exponentials of rows with further columns."""
    higher = tl.maximum(peak, tl.max(outputs, 1))
    total = total * tl.exp2(peak - higher) + tl.sum(tl.exp2(outputs - higher[:, None]), 1)
    return higher, total


@triton.jit
def merge_log_sums(peaks, sums, parts, stride, rows, PARTS: tl.constexpr):
    """Return `log₂ Σ 2^output` of each row, from the peaks and sums of its parts."""
    part = tl.arange(0, PARTS)
    at = part[:, None] * stride + rows[None, :]
    seen = (part < parts)[:, None]
    # Bypass the first-level cache, which does not see what other programs write.
    peak = tl.load(peaks + at, mask=seen, other=NO_PEAK, cache_modifier=".cg")
    total = tl.load(sums + at, mask=seen, other=0.0, cache_modifier=".cg")
    top = tl.max(peak, 0)
    return top + tl.log2(tl.sum(total * tl.exp2(peak - top[None, :]), 0))


@triton.jit
def exp(numbers):
    """Return `e^x`, accurate to the last bit or two.

    The hardware's power of two is that accurate only near zero. So the fractional part of x log₂e
    is computed without the rounding of the product.
    """
    whole = tl.floor(numbers * LOG2_E + 0.5)
    rest = tl.fma(numbers, LOG2_E_HIGH, -whole) + numbers * LOG2_E_LOW
    return tl.exp2(rest) * tl.exp2(whole)


@triton.jit
def merge_softmax(peaks, sums, parts, stride, rows, PARTS: tl.constexpr):
    """Return the peak of each row and the inverse of its sum of exponentials, from its parts."""
    part = tl.arange(0, PARTS)
    at = part[:, None] * stride + rows[None, :]
    seen = (part < parts)[:, None]
    peak = tl.load(peaks + at, mask=seen, other=NO_PEAK)
    total = tl.load(sums + at, mask=seen, other=0.0)
    top = tl.max(peak, 0)
    return top, 1.0 / tl.sum(total * exp(tl.maximum(peak - top[None, :], -100.0)), 0)


@triton.jit
def scale_residual(outputs, log_sum, weight, label, classes, REST: tl.constexpr = False):
    """Return `w ⊙ (softmax − one-hot)` with neighbours as rows; `w` includes a scale.

    With REST, class 0 does not move.
    """
    share = tl.exp2(outputs - log_sum[:, None])
    if REST:
        share = tl.where((classes > 0)[None, :], share, 0.0)
    return weight[:, None] * tl.where(label[:, None] == classes[None, :], share - 1.0, share)


@triton.jit
def find_row_starts(table, extra, index, written, stride, is_row):
    """Return where the rows of two tables start; rows from `written` on are in the second."""
    row = tl.load(index, mask=is_row, other=0)
    return tl.where(row < written, table + row * stride, extra + (row - written) * stride)


@triton.jit
def load_scaled_outputs(starts, classes, here):
    """Return outputs from rows of a table, times log₂e; exactly `NOTHING` where there is none.

    At the size of `NOTHING`, the rounding of a product would not be a small difference.
    """
    outputs = tl.load(starts[:, None] + classes[None, :], mask=here, other=0.0) * LOG2_E
    return tl.where(here, outputs, NOTHING)
