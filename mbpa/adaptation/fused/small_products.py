"""Combinations of a few rows per query: products too thin for a matrix library, in full float32."""

from __future__ import annotations

import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

MAX_SUMS = 1 << 12  # numbers that a program adds up in registers
WARPS = 4


def combine_rows(
    base: Float[Tensor, "B K O"],
    left: Float[Tensor, "B K R"],
    right: Float[Tensor, "B R O"],
    beta: float,
    alpha: float,
    out: Float[Tensor, "B K O"],
) -> None:
    """Write `β base + α left right` to `out`, which may be `base`."""
    (batch, count, inner), width = left.shape, right.shape[2]
    rows = triton.next_power_of_2(count)
    results = min(triton.next_power_of_2(width), max(16, MAX_SUMS // rows))
    _combine[(batch, triton.cdiv(width, results))](
        base, left, right.contiguous(), out, left.stride(0), left.stride(1), left.stride(2),
        count, inner, width, beta, alpha, COUNT=rows, RESULTS=results, num_warps=WARPS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count", "inner", "beta", "alpha"])
def _combine(
    base, left, right, out, apart, down, across, count, inner, width, beta, alpha,
    COUNT: tl.constexpr, RESULTS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    k, o = tl.arange(0, COUNT), tl.program_id(1) * RESULTS + tl.arange(0, RESULTS)
    total = tl.zeros((COUNT, RESULTS), tl.float32)
    for r in range(inner):
        factor = tl.load(left + b * apart + k * down + r * across, k < count, 0.0)
        row = tl.load(right + (b * inner + r) * width + o, o < width, 0.0)
        total += factor[:, None] * row[None, :]
    at = (b * count + k[:, None]) * width + o[None, :]
    here = (k < count)[:, None] & (o < width)[None, :]
    tl.store(out + at, tl.load(base + at, here, 0.0) * beta + total * alpha, here)
