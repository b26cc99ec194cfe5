"""One step on a GPU: a sum over cached rows, each of which is read once and never copied.

    z(q) ← z(q) − Σ_k a_k (p_k − y_k),        a_k = α w_k (h_k·q + 1)

A program processes one query and a block of classes, a few rows at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from mbpa.adaptation.fused.arithmetic import find_row_starts

CLASSES, ROWS = 1024, 4  # at a time


def subtract_rows(
    outputs: Float[Tensor, "B C"],
    table: Float[Tensor, "N C"],
    extra: Float[Tensor, "M C"],
    index: Int[Tensor, "B K"],
    weights: Float[Tensor, "B K"],
    dots: Float[Tensor, "B K"],
    labels: Int[Tensor, "B K"],
    *,
    by_weight: float,
    by_bias: float,
) -> Float[Tensor, "B C"]:
    """Return `outputs − Σ_k a_k (row_k − one-hot of label_k)`.

    Here a_k = w_k (by_weight h_k·q + by_bias). Rows from N on are those of `extra`.
    """
    result = torch.empty_like(outputs)
    classes = outputs.shape[1]
    _subtract_rows[(len(outputs), triton.cdiv(classes, CLASSES))](
        outputs, table, extra if len(extra) else table, index, weights, dots, labels, result,
        len(table), table.stride(0), classes, index.shape[1], by_weight, by_bias,
        CLASSES=CLASSES, ROWS=ROWS, num_warps=4,
    )  # fmt: skip
    return result


@triton.jit
def _subtract_rows(
    outputs, table, extra, index, weights, dots, labels, result,
    written, stride, classes, count, by_weight, by_bias,
    CLASSES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * CLASSES + tl.arange(0, CLASSES)
    is_c = c < classes
    total = tl.load(outputs + b * classes + c, mask=is_c, other=0.0)
    for k0 in range(0, count, ROWS):
        k = k0 + tl.arange(0, ROWS)
        is_k = k < count
        starts = find_row_starts(table, extra, index + b * count + k, written, stride, is_k)
        factor = tl.load(dots + b * count + k, mask=is_k, other=0.0) * by_weight + by_bias
        factor *= tl.load(weights + b * count + k, mask=is_k, other=0.0)
        here = is_k[:, None] & is_c[None, :]
        value = tl.load(starts[:, None] + c[None, :], mask=here, other=0.0).to(tl.float32)
        label = tl.load(labels + b * count + k, mask=is_k, other=-1)
        value -= tl.where(label[:, None] == c[None, :], 1.0, 0.0)
        total -= tl.sum(factor[:, None] * value, 0)
    tl.store(result + b * classes + c, total, mask=is_c)
