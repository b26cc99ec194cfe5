"""Outputs of a linear head for each query's own selection of classes, on a GPU.

A program computes the outputs of a query's neighbours for one block of its classes. It reads rows
of the weight in place, and does no work if the query has no classes in its block.
"""

from __future__ import annotations

import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mbpa.adaptation.fused.arithmetic import NOTHING

BLOCK = 64
"""Classes per program; the number of columns must be a multiple of it."""
ROWS = 64  # neighbours per program


def compute_active_outputs(
    weight: Float[Tensor, "C D"],
    bias: Float[Tensor, "C"] | None,
    columns: Int[Tensor, "B A"],
    used: Int[Tensor, "B"],
    is_top: Bool[Tensor, "B K A"],
    keys: Float[Tensor, "B K D"],
    at_query: Float[Tensor, "B C"],
    log_units: Float[Tensor, "B K"],
) -> tuple[Float[Tensor, "B L A"], Float[Tensor, "B K"]]:
    """Return the outputs of the neighbours and, last, the query, and sums of exponentials.

    The sums are over the columns of each neighbour that are not marked.

    Args:
        weight: weight of the head.
        bias: bias of the head.
        columns: classes of each query; column 0 is reserved and does not count.
        used: number of columns of each query, including column 0; outputs of others are arbitrary.
        is_top: marks columns that the sums leave out.
        keys: keys of the neighbours.
        at_query: the head's outputs at the queries for all classes.
        log_units: logarithms of the units of the sums.
    """
    (batch, count, size), width = keys.shape, columns.shape[1]
    assert width % BLOCK == 0
    outputs = keys.new_empty(batch, count + 1, width)
    blocks = width // BLOCK
    sums = keys.new_empty(batch, blocks, count)
    _multiply[(batch, blocks, triton.cdiv(count, ROWS))](
        weight, weight if bias is None else bias, columns, used, is_top, keys, at_query, log_units,
        outputs, sums, count, size, width, len(weight), blocks,
        BIAS=bias is not None, ROWS=ROWS, BLOCK=BLOCK, SIZES=32, num_warps=4, num_stages=3,
    )  # fmt: skip
    return outputs, sums.sum(1)


@triton.jit
def _multiply(
    weight, bias, columns, used, is_top, keys, at_query, log_units, outputs, sums,
    count, size, width, classes, blocks,
    BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SIZES: tl.constexpr,
):  # fmt: skip
    b, block, tile = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    k = tile * ROWS + tl.arange(0, ROWS)
    c = block * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(used + b)
    sum_at = sums + (b * blocks + block) * count
    if block * BLOCK >= end:
        tl.store(sum_at + k, tl.zeros((ROWS,), tl.float32), mask=k < count)
        return
    is_row, is_real = k < count, (c > 0) & (c < end)
    row = tl.load(columns + b * width + c, mask=is_real, other=0).to(tl.int64)
    left_at, right_at = keys + (b * count + k) * size, weight + row * size
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for d0 in range(0, size, SIZES):
        d = d0 + tl.arange(0, SIZES)
        is_d = d < size
        left = tl.load(
            left_at[:, None] + d[None, :], mask=is_row[:, None] & is_d[None, :], other=0.0
        )
        right = tl.load(
            right_at[None, :] + d[:, None], mask=is_real[None, :] & is_d[:, None], other=0.0
        )
        total = tl.dot(left, right.to(tl.float32), total, input_precision="tf32x3")
    if BIAS:
        total += tl.load(bias + row, mask=is_real, other=0.0).to(tl.float32)[None, :]
    total = tl.where(is_real[None, :], total, NOTHING)
    at = outputs + (b * (count + 1) + k[:, None]) * width + c[None, :]
    tl.store(at, total, mask=is_row[:, None])
    top = tl.load(
        is_top + (b * count + k[:, None]) * width + c[None, :], mask=is_row[:, None], other=0
    )
    unit = tl.load(log_units + b * count + k, mask=is_row, other=0.0)
    # A marked output may be far above the unit.
    further = tl.exp(tl.where(top != 0, NOTHING, total - unit[:, None]))
    tl.store(sum_at + k, tl.sum(further, 1), mask=is_row)
    if tile == 0:
        own = tl.load(at_query + b * classes + row, mask=is_real, other=0.0)
        own = tl.where(is_real, own, NOTHING)
        tl.store(outputs + (b * (count + 1) + count) * width + c, own)
