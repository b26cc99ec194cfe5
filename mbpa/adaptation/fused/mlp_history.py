"""Contribution of past steps to the outputs of an MLP's layer, or to the slopes by its inputs.

A program processes one query, and all columns of the result if they fit. It passes once over the
past rows. These are stored as pairs of bfloat16 numbers that sum to each number, which is exact to
2⁻¹⁷ at any scale and takes no work to split. The program stores its own rows in the same form.
"""

from __future__ import annotations

import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from mbpa.adaptation.fused.arithmetic import dot_of_halves, split_halves
from mbpa.adaptation.fused.shared_product import pair_dtype

ROWS, SIZES, WARPS, STAGES = 32, 64, 4, 3  # of the past and of their size, at a time
MAX_PROGRAM_RESULTS = 1 << 13  # numbers that a program adds up in registers


def add_past(
    total: Float[Tensor, "B K O"],
    given: Float[Tensor, "B K I"],
    like: Float[Tensor, "2 B R I"],
    added: Float[Tensor, "2 B R O"],
    rates: Float[Tensor, "S"],
    *,
    one: bool,
) -> None:
    """Compute `total_k += Σ_r rates_r (given_k · like_r + one) added_r` in place.

    The sum is over the first S past rows; `given` is stored as the next K rows of `like`.
    """
    (batch, count, size), (_, _, past, width) = given.shape, added.shape
    assert like.shape[2] == past  # both are indexed with one stride
    neighbors = max(16, triton.next_power_of_2(count))
    results = min(triton.next_power_of_2(width), max(16, MAX_PROGRAM_RESULTS // neighbors))
    _add_past[(batch, triton.cdiv(width, results))](
        total, given.contiguous(), like, like[1], added, added[1], rates,
        len(rates), past, count, size, width, ONE=float(one),
        COUNT=neighbors, ROWS=ROWS, SIZES=SIZES, RESULTS=results,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip


def allocate_pairs(
    keys: Float[Tensor, "B K D"], rows: int, size: int
) -> Float[Tensor, "2 B {rows} {size}"]:
    """Allocate room for rows of numbers that are split into pairs."""
    return keys.new_empty(2, len(keys), rows, size, dtype=pair_dtype())


@triton.jit(do_not_specialize=["seen", "count"])
def _add_past(
    total, given, like_high, like_low, added_high, added_low, rates,
    seen, past, count, size, width,
    ONE: tl.constexpr,
    COUNT: tl.constexpr, ROWS: tl.constexpr, SIZES: tl.constexpr, RESULTS: tl.constexpr,
):  # fmt: skip
    b, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k = tl.arange(0, COUNT)
    if part == 0:
        for i0 in range(0, size, SIZES):
            i = i0 + tl.arange(0, SIZES)
            here = (k < count)[:, None] & (i < size)[None, :]
            at = (b * count + k[:, None]) * size + i[None, :]
            high, low = split_halves(tl.load(given + at, here, 0.0), like_high.dtype.element_ty)
            at = (b * past + seen + k[:, None]) * size + i[None, :]
            tl.store(like_high + at, high, here)
            tl.store(like_low + at, low, here)
    o = part * RESULTS + tl.arange(0, RESULTS)
    in_result = (k < count)[:, None] & (o < width)[None, :]
    at_result = (b * count + k[:, None]) * width + o[None, :]
    result = tl.load(total + at_result, mask=in_result, other=0.0)
    for r0 in range(0, seen, ROWS):
        r = r0 + tl.arange(0, ROWS)
        row = b * past + r
        overlap = tl.zeros((COUNT, ROWS), tl.float32)
        for i0 in range(0, size, SIZES):
            i = i0 + tl.arange(0, SIZES)
            here = (k < count)[:, None] & (i < size)[None, :]
            at = (b * count + k[:, None]) * size + i[None, :]
            high, low = split_halves(
                tl.load(given + at, mask=here, other=0.0), like_high.dtype.element_ty
            )
            here = (r < seen)[:, None] & (i < size)[None, :]
            at = row[:, None] * size + i[None, :]
            old_high = tl.load(like_high + at, mask=here, other=0.0)
            old_low = tl.load(like_low + at, mask=here, other=0.0)
            overlap = dot_of_halves(high, low, tl.trans(old_high), tl.trans(old_low), overlap)
        rate = tl.load(rates + r, mask=r < seen, other=0.0)
        high, low = split_halves((overlap + ONE) * rate[None, :], like_high.dtype.element_ty)
        here = (r < seen)[:, None] & (o < width)[None, :]
        at = row[:, None] * width + o[None, :]
        old_high, old_low = tl.load(added_high + at, here, 0.0), tl.load(added_low + at, here, 0.0)
        result = dot_of_halves(high, low, old_high, old_low, result)
    tl.store(total + at_result, result, mask=in_result)
