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
        )


def nearest_first(distances: Float[Tensor, "B J"], ids: Int[Tensor, "B J"]) -> Int[Tensor, "B J"]:
    """Positions in each row by rising distance, equally near ones from newest to oldest."""
    newest = ids.argsort(dim=1, descending=True)
    by_distance = distances.gather(1, newest).argsort(dim=1, stable=True)
    return newest.gather(1, by_distance)


def matmul_roundoff(dtype: torch.dtype, device: torch.device) -> float:
    """Unit roundoff of a matrix product, which for float32 depends on a global setting.

    `torch.get_float32_matmul_precision` refuses to answer once the setting was made for a backend.
    """
    if dtype == torch.float64:
        return torch.finfo(dtype).eps / 2
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    bits: int = {"tf32": 11, "bf16": 8}.get(backend.matmul.fp32_precision, 24)
    return 2.0**-bits
