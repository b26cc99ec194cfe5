"""Kernels for exact search on a GPU: half-precision scores of groups of keys, and distances.

The product `q·h` never leaves the chip: for every group of `GROUP` keys, only the smallest score is
written. A group consists of every `SPREAD`-th key of a part of one tile, because the layout of the
matrix product holds these in one thread.
"""

from __future__ import annotations

import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

GROUP, SPREAD = 16, 8
KEYS, QUERIES, SIZES = 256, 128, 64  # per tile
PAIRED = 64  # queries, and keys, per tile of distances


def group_minima(
    keys: Float[Tensor, "N D"],
    norms: Float[Tensor, "N"],
    queries: Float[Tensor, "B D"],
    scales: Float[Tensor, "B"],
) -> Float[Tensor, "B G"]:
    """Return the smallest `‖h‖² − scale · q·h` of each group of keys, for every query.

    Keys and queries are in half precision.
    """
    count, size = keys.shape
    groups = triton.cdiv(count, KEYS) * (KEYS // GROUP)
    minima = norms.new_empty(len(queries), groups)
    rows = min(QUERIES, max(16, triton.next_power_of_2(len(queries))))
    tiles = triton.cdiv(len(queries), rows)
    _group_minima[(tiles * triton.cdiv(count, KEYS),)](
        keys, norms, queries, scales, minima, count, len(queries), size, groups, tiles,
        QUERIES=rows, KEYS=KEYS, SIZES=SIZES, GROUP=GROUP, SPREAD=SPREAD,
        num_warps=8 if rows > 64 else 4, num_stages=3,
    )  # fmt: skip
    return minima


def pair_distances(
    queries: Float[Tensor, "B D"], keys: Float[Tensor, "N D"]
) -> Float[Tensor, "B N"]:
    """Return Σ(h−q)² of every query and every key."""
    distances = queries.new_empty(len(queries), len(keys))
    grid = triton.cdiv(len(keys), PAIRED), triton.cdiv(len(queries), PAIRED)
    _pair_distances[grid](
        queries.T.contiguous(), keys.T.contiguous(), distances,
        len(queries), len(keys), queries.shape[1], PAIRED=PAIRED, num_warps=4,
    )  # fmt: skip
    return distances


def member_slots(groups: Int[Tensor, "*B"], places: Int[Tensor, "*B"]) -> Int[Tensor, "*B"]:
    """Return the slots of keys, given their groups and their places in the group."""
    tile, group = groups // (KEYS // GROUP), groups % (KEYS // GROUP)
    first = tile * KEYS + group // SPREAD * (GROUP * SPREAD) + group % SPREAD
    return first + SPREAD * places


def member_distances(
    keys: Float[Tensor, "N D"],
    norms: Float[Tensor, "N"],
    queries: Float[Tensor, "B D"],
    groups: Int[Tensor, "B J"],
) -> tuple[Float[Tensor, "B M"], Float[Tensor, "B M"]]:
    """Return Σ(h−q)² and q·h of the keys in these groups, group by group.

    The distance is infinite where the norm is, and beyond the last key.
    """
    batch, count = groups.shape
    distances, dots = norms.new_empty(2, batch, count * GROUP)
    _member_distances[(batch, count)](
        keys, norms, queries, groups, distances, dots, len(keys), keys.shape[1], count,
        KEYS=KEYS, GROUP=GROUP, SPREAD=SPREAD, SIZES=128, num_warps=4,
    )  # fmt: skip
    return distances, dots


@triton.jit
def _group_minima(
    keys, norms, queries, scales, minima, count, batch, size, groups, tiles,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, SIZES: tl.constexpr,
    GROUP: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    # Consecutive programs share a tile of keys, so that it is read once.
    pid = tl.program_id(0)
    tile = (pid // tiles).to(tl.int64)
    b = pid % tiles * QUERIES + tl.arange(0, QUERIES)
    n = tile * KEYS + tl.arange(0, KEYS)
    is_b, is_n = b < batch, n < count
    products = tl.zeros((QUERIES, KEYS), tl.float32)
    for d0 in range(0, size, SIZES):
        d = d0 + tl.arange(0, SIZES)
        is_d = d < size
        query = tl.load(
            queries + b[:, None] * size + d[None, :], mask=is_b[:, None] & is_d[None, :], other=0.0
        )
        key = tl.load(
            keys + n[None, :] * size + d[:, None], mask=is_n[None, :] & is_d[:, None], other=0.0
        )
        products = tl.dot(query, key, products)
    norm = tl.load(norms + n, mask=is_n, other=float("inf"))
    scale = tl.load(scales + b, mask=is_b, other=0.0)
    scores = norm[None, :] - scale[:, None] * products
    # In the layout of the product, one thread holds columns that are 8 apart.
    least = tl.min(tl.reshape(scores, (QUERIES, KEYS // (GROUP * SPREAD), GROUP, SPREAD)), 2)
    least = tl.reshape(least, (QUERIES, KEYS // GROUP))
    g = tile * (KEYS // GROUP) + tl.arange(0, KEYS // GROUP)
    tl.store(minima + b.to(tl.int64)[:, None] * groups + g[None, :], least, mask=is_b[:, None])


@triton.jit
def _pair_distances(queries, keys, distances, batch, count, size, PAIRED: tl.constexpr):
    b = tl.program_id(1) * PAIRED + tl.arange(0, PAIRED)
    n = tl.program_id(0) * PAIRED + tl.arange(0, PAIRED)
    is_b, is_n = b < batch, n < count
    total = tl.zeros((PAIRED, PAIRED), tl.float32)
    for d in range(size):
        query = tl.load(queries + d * batch + b, mask=is_b, other=0.0)
        key = tl.load(keys + d * count + n, mask=is_n, other=0.0)
        apart = key[None, :].to(tl.float32) - query[:, None]
        total += apart * apart
    at = b.to(tl.int64)[:, None] * count + n[None, :]
    tl.store(distances + at, total, mask=is_b[:, None] & is_n[None, :])


@triton.jit
def _member_distances(
    keys, norms, queries, groups, distances, dots, count, size, chosen,
    KEYS: tl.constexpr, GROUP: tl.constexpr, SPREAD: tl.constexpr, SIZES: tl.constexpr,
):  # fmt: skip
    b, j = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group = tl.load(groups + b * chosen + j)
    tile, group = group // (KEYS // GROUP), group % (KEYS // GROUP)
    place = tl.arange(0, GROUP)
    slot = tile * KEYS + group // SPREAD * (GROUP * SPREAD) + group % SPREAD + SPREAD * place
    norm = tl.load(norms + slot, mask=slot < count, other=float("inf"))
    is_key = norm < float("inf")
    total = tl.zeros((GROUP, SIZES), tl.float32)
    products = tl.zeros((GROUP, SIZES), tl.float32)
    for d0 in range(0, size, SIZES):
        d = d0 + tl.arange(0, SIZES)
        is_d = d < size
        query = tl.load(queries + b * size + d, mask=is_d, other=0.0)
        key = tl.load(
            keys + slot[:, None] * size + d[None, :],
            mask=is_key[:, None] & is_d[None, :], other=0.0,
        )  # fmt: skip
        key = key.to(tl.float32)
        apart = tl.where(is_d[None, :], key - query[None, :], 0.0)
        total += apart * apart
        products += key * query[None, :]
    at = (b * chosen + j) * GROUP + place
    tl.store(distances + at, tl.where(is_key, tl.sum(total, 1), float("inf")))
    tl.store(dots + at, tl.sum(products, 1))
