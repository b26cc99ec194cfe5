"""Exact search on a GPU in two stages: half-precision scores choose groups, distances rank them.

The first stage computes the smallest `‖h̃‖² − 2q̃·h̃` of every group of keys, with query and keys
rounded to half precision. The second compares the keys of the groups with the smallest of these by
Σ(h−q)². The effect of rounding is bounded by the known norms of the rounding errors,

    |q·h − q̃·h̃| ≤ ‖q − q̃‖ ‖h‖ + ‖q̃‖ ‖h − h̃‖,

so the result includes a lower bound on the distance of every key left out.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mbpa.memory.neighbors import Candidates
from mbpa.memory.ranking import find_smallest

MIN_KEYS = 1 << 14  # with fewer keys one plain product is as fast
MINIMA_BYTES = 1 << 30  # limits the number of queries at a time
MAX_SCALE_BITS = 50  # the product of two scales must not overflow
TARGET_BITS = 8  # the first keys are scaled to below 2^8; float16 ends at 2^16


class CoarseKeys:
    """A copy of a memory's keys in half precision, or the keys themselves if they are in it.

    Args:
        keys: the memory's own tensor of keys; the memory writes to it before it calls `update`.
    """

    def __init__(self, keys: Float[Tensor, "N D"]) -> None:
        self._keys = keys
        self._is_copy = keys.dtype == torch.float32
        self._rounded = torch.empty_like(keys, dtype=torch.float16) if self._is_copy else keys
        self.scale: float | None = None if self._is_copy else 1.0
        """Factor by which keys are multiplied before they are rounded."""
        self.lost: float = 0.0
        """The largest norm of a key's rounding error."""

    def update(self, slots: Int[Tensor, "N"], keys: Float[Tensor, "N D"]) -> None:
        """Update the copy after keys were written."""
        if not self._is_copy or not len(keys):
            return
        if self.scale is None:
            self.scale = float(_choose_scales(keys.flatten()[None]))
        rounded = (keys * self.scale).to(torch.float16)
        self._rounded[slots] = rounded
        lost = (keys - rounded.to(keys.dtype) / self.scale).norm(dim=1).amax()
        self.lost = max(self.lost, float(lost.nan_to_num(nan=math.inf, posinf=math.inf)))

    def clear(self, slots: Int[Tensor, "N"]) -> None:
        """Clear the keys in these slots."""
        if self._is_copy:
            self._rounded[slots] = 0

    def can_find(self, k: int, count: int) -> bool:
        """Return whether this is the faster way to find `k` of `count` entries."""
        return count >= MIN_KEYS and 64 * k <= count and math.isfinite(self.lost)

    def nearest(
        self, norms: Float[Tensor, "N"], queries: Float[Tensor, "B D"], k: int, count: int
    ) -> Candidates:
        """Return the nearest of the first `count` slots by true distance, in rising order."""
        rows = max(1, MINIMA_BYTES // (count // 4))
        parts = [self._nearest(norms[:count], part, k) for part in queries.split(rows)]
        if len(parts) == 1:
            slots, beyond, distances, dots = parts[0]
        else:
            slots, beyond, distances, dots = map(torch.cat, zip(*parts, strict=True))
        return Candidates(slots, beyond, (distances, dots))

    def _nearest(
        self, norms: Float[Tensor, "N"], queries: Float[Tensor, "B D"], k: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        from mbpa.memory.search_kernels import GROUP, group_minima, member_distances, member_slots

        count, size = len(norms), queries.shape[1]
        scales = _choose_scales(queries)
        rounded = (queries * scales).to(self._rounded.dtype)
        back = rounded.to(queries.dtype) / scales
        assert self.scale is not None  # there are entries
        minima = group_minima(
            self._rounded[:count], norms, rounded, 2 / (scales[:, 0] * self.scale)
        )
        least, groups = find_smallest(minima, k + k // 2 + 16)
        distances, dots = member_distances(self._keys[:count], norms, queries, groups)
        distances, chosen = distances.topk(k, largest=False)
        slots = member_slots(groups.gather(1, chosen // GROUP), chosen % GROUP)
        slots = slots.masked_fill(distances == math.inf, -1)
        # Lower bound for keys left out: such a key is either as far as `bound`, or has a norm of
        # at most ‖q‖ + √bound. The sums in the product are rounded, too.
        squares = queries.square().sum(1)
        bound, norm = least[:, -1] + squares, squares.sqrt()
        lost = (queries - back).norm(dim=1) + size * torch.finfo(torch.float32).eps * norm
        radius = norm + bound.clamp(0, torch.finfo(bound.dtype).max).sqrt()
        bound = bound - 2 * (lost * radius + (norm + lost) * self.lost)
        bound = bound.nan_to_num(nan=-math.inf, posinf=math.inf)
        beyond = torch.minimum(bound, distances[:, -1])
        return slots, beyond, distances, dots.gather(1, chosen)


def _choose_scales(numbers: Float[Tensor, "B D"]) -> Float[Tensor, "B 1"]:
    """Return the powers of two that scale each row to below 2^`TARGET_BITS`, within limits."""
    largest = numbers.abs().amax(1, keepdim=True)
    bits = (TARGET_BITS - largest.log2().ceil()).clamp(-MAX_SCALE_BITS, MAX_SCALE_BITS)
    return torch.exp2(bits).where(largest > 0, 1.0)
