"""Products with weights that all queries share, on tensor cores, near the accuracy of float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from mbpa.adaptation.fused.arithmetic import dot_of_halves, split_halves
from mbpa.device import is_interpreted

ROWS, RESULTS, SIZES, WARPS, STAGES = 128, 128, 32, 8, 3


def split_pairs(numbers: Float[Tensor, "*S"]) -> Float[Tensor, "2 *S"]:
    """Split each number into two half-precision numbers that sum to it, to 2⁻¹⁷ at any scale."""
    high = numbers.to(pair_dtype())
    return torch.stack([high, (numbers - high).to(high.dtype)])


def join_pairs(pairs: Float[Tensor, "2 *S"]) -> Float[Tensor, "*S"]:
    """Return the numbers that `split_pairs` split."""
    return pairs[0].float() + pairs[1]


def pair_dtype() -> torch.dtype:
    """Return the dtype of pairs: bfloat16, or float32 in Triton's interpreter.

    The interpreter cannot multiply bfloat16. There a pair is the number itself and zero.
    """
    return torch.float32 if is_interpreted() else torch.bfloat16


def multiply_pairs(
    rows: Float[Tensor, "*B I"],
    matrix: Float[Tensor, "2 I O"],
    bias: Float[Tensor, "O"] | None = None,
) -> Float[Tensor, "*B O"]:
    """Return `rows @ matrix + bias`, where the matrix is given as pairs."""
    rows = rows.contiguous()
    _, size, width = matrix.shape
    result = rows.new_empty(*rows.shape[:-1], width)
    count = rows.numel() // size
    _product[(triton.cdiv(count, ROWS), triton.cdiv(width, RESULTS))](
        rows, matrix, matrix[1], result if bias is None else bias.contiguous(), result,
        count, size, width, matrix.stride(1), matrix.stride(2),
        BIAS=bias is not None, ROWS=ROWS, RESULTS=RESULTS, SIZES=SIZES,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return result


@triton.jit
def _product(
    rows, high, low, bias, result, count, size, width, down, across,
    BIAS: tl.constexpr, ROWS: tl.constexpr, RESULTS: tl.constexpr, SIZES: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o = tl.program_id(1) * RESULTS + tl.arange(0, RESULTS)
    total = tl.zeros((ROWS, RESULTS), tl.float32)
    for i0 in range(0, size, SIZES):
        i = i0 + tl.arange(0, SIZES)
        here = (r < count)[:, None] & (i < size)[None, :]
        numbers = tl.load(rows + r[:, None] * size + i[None, :], here, 0.0)
        row_high, row_low = split_halves(numbers, high.dtype.element_ty)
        here = (i < size)[:, None] & (o < width)[None, :]
        at = i[:, None] * down + o[None, :] * across
        shared_high, shared_low = tl.load(high + at, here, 0.0), tl.load(low + at, here, 0.0)
        total = dot_of_halves(row_high, row_low, shared_high, shared_low, total)
    if BIAS:
        total += tl.load(bias + o, o < width, 0.0)[None, :]
    here = (r < count)[:, None] & (o < width)[None, :]
    tl.store(result + r[:, None] * width + o[None, :], total, here)
