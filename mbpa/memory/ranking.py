"""The order in which neighbours come, and how entries not written yet take part in it."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mbpa.memory.neighbors import Neighbors

SCRATCH_BYTES = 1 << 28  # keys gathered, or scores computed, at a time


class Block:
    """Entries not written yet, as neighbours of one another: each sees those before it."""

    def __init__(self, keys: Tensor, values: Tensor, ids: Tensor, since: Tensor) -> None:
        self.keys, self.values, self.ids = keys, values, ids
        hidden = (ids >= ids[:, None]) | (ids < since[:, None])
        rows = max(1, SCRATCH_BYTES // max(1, keys.nbytes))
        squares = [(keys - part[:, None]).square_().sum(-1) for part in keys.split(rows)]
        self.distances = torch.cat(squares).masked_fill_(hidden, math.inf)
        self.dots = keys @ keys.T

    def merged_into(self, past: Neighbors, k: int, keys_for: int | None) -> Neighbors:
        """The k nearest among the past's neighbours and the block's own."""
        count, old = past.mask.shape
        rows = torch.arange(count, device=self.ids.device)[:, None]
        ids = torch.cat([past.ids, self.ids.expand(count, -1)], 1)
        distances = torch.cat([past.distances, self.distances], 1)
        order = nearest_first(distances, ids)[:, :k]
        is_new, new = order >= old, (order - old).clamp_min(0)
        distances = distances[rows, order]
        mask = distances.isfinite()

        def merged(theirs: Tensor, ours: Tensor, width: int | None = None) -> Tensor:
            if not theirs.shape[1]:
                return ours[new[:, :width]]
            theirs = theirs[rows, order.clamp_max(theirs.shape[1] - 1)[:, :width]]
            chosen = is_new[:, :width].reshape(*theirs.shape[:2], *(1,) * (theirs.ndim - 2))
            return torch.where(chosen, ours[new[:, :width]], theirs)

        return Neighbors(
            values=merged(past.values, self.values),
            distances=distances,
            dots=torch.cat([past.dots, self.dots], 1)[rows, order],
            mask=mask,
            ids=torch.where(mask, ids[rows, order], -1),
            slots=torch.where(mask & ~is_new, merged(past.slots, self.ids), -1),
            keys=merged(past.keys, self.keys, keys_for if keys_for is not None else k),
            revision=past.revision,
            capacity=past.capacity,
        )


def nearest_first(distances: Float[Tensor, "B J"], ids: Int[Tensor, "B J"]) -> Int[Tensor, "B J"]:
    """Positions in each row by rising distance, equally near ones from newest to oldest."""
    newest = ids.argsort(dim=1, descending=True)
    by_distance = distances.gather(1, newest).argsort(dim=1, stable=True)
    return newest.gather(1, by_distance)


def expanded_scores(
    norms: Float[Tensor, "N"], queries: Float[Tensor, "B D"], keys: Float[Tensor, "N D"]
) -> Float[Tensor, "B N"]:
    """`‖h‖² − 2 q·h`, to within `score_error` even where torch is set to coarse products.

    A coarse product is exact for factors of few bits, so each factor is split in two such parts,
    and the product of the two small ones is left out.
    """
    bits = _product_bits(queries.dtype, queries.device)
    if bits >= 24:
        return torch.addmm(norms, queries, keys.T, alpha=-2)
    (large_q, small_q), (large_k, small_k) = _split(queries, bits), _split(keys, bits)
    scores = torch.addmm(norms, large_q, large_k.T, alpha=-2)
    return scores.addmm_(large_q, small_k.T, alpha=-2).addmm_(small_q, large_k.T, alpha=-2)


def score_error(key_size: int, dtype: torch.dtype, device: torch.device) -> float:
    """γ such that `expanded_scores` is off by at most γ(‖q‖ + ‖h‖)².

    (D + 8)u bounds sums of D products rounded to u; splitting adds what it leaves out or rounds.
    """
    roundoff = torch.finfo(dtype).eps / 2
    bits = _product_bits(dtype, device)
    return (key_size + 8) * roundoff + (4 * 2.0 ** (-2 * bits) if bits < 24 else 0.0)


def matmul_roundoff(dtype: torch.dtype, device: torch.device) -> float:
    """Unit roundoff of a matrix product, which for float32 depends on a global setting."""
    return 2.0 ** -_product_bits(dtype, device)


def _product_bits(dtype: torch.dtype, device: torch.device) -> int:
    # torch.get_float32_matmul_precision refuses to answer once a backend has its own setting.
    if dtype == torch.float64:
        return 53
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    bits: int = {"tf32": 11, "bf16": 8}.get(backend.matmul.fp32_precision, 24)
    return bits


def _split(numbers: Float[Tensor, "N D"], bits: int) -> tuple[Tensor, Tensor]:
    """Float32 numbers as a part of so many leading bits and the rest, both exact."""
    large = (numbers.view(torch.int32) & -(1 << (24 - bits))).view(torch.float32)
    return large, numbers - large
