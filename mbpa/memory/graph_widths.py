"""How widely to search graphs: most queries need little, and those far from everything much more.

A query among many entries finds nearly all its neighbours with a narrow search. One that is far
from all entries has many that are almost equally near, and a narrow search misses a quarter of
them. So every query is searched for narrowly, and again, widely, if what was found is far away.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

MAX_WIDTH = 2048
STEP = 1.12  # factor between the widths that are tried
FAR_SHARE = 0.2  # of the queries are searched for again
RANK = 10  # of the neighbour whose distance tells whether a query is far away


class Widths(NamedTuple):
    """Candidates that a search considers; usearch and the literature call this number ef."""

    near: int
    far: int
    """The same for queries that are far away."""
    border: float = 0.0
    """Squared distance of a query's tenth neighbour beyond which it is far away."""

    def scale(self, factor: float, least: int) -> Widths:
        """Return wider or narrower searches, not below this width."""
        near, far = (
            min(MAX_WIDTH, max(least, math.ceil(factor * width))) for width in (self.near, self.far)
        )
        return self._replace(near=near, far=far)

    def find_far(
        self, distances: Float[np.ndarray, "B J"], candidates: int = 0
    ) -> Bool[np.ndarray, "B"]:
        """Return which queries to search for again.

        Args:
            distances: squared distances of what was found for each query.
            candidates: number of candidates that were asked for; a search is at least as wide.
        """
        if self.far <= max(self.near, candidates) or not distances.shape[1]:
            return np.zeros(len(distances), bool)
        rank = min(RANK, distances.shape[1]) - 1
        is_far: Bool[np.ndarray, "B"] = np.partition(distances, rank, 1)[:, rank] > self.border
        return is_far


def choose_widths(
    find: Callable[[Bool[np.ndarray, "B"], int], Int[np.ndarray, "_ J"]],
    expected: Int[np.ndarray, "B K"],
    distances: Float[np.ndarray, "B"],
    *,
    least: int,
    aim: float,
    should_stop: Callable[[], bool] = lambda: False,
) -> Widths:
    """Return the narrowest searches with which recall reaches the aim.

    Args:
        find: returns the labels found for some of B queries by searches of a width.
        expected: labels of the true neighbours of each query; −1 for none.
        distances: squared distance of each query's tenth neighbour.
        least: the narrowest width to try.
        aim: share of the expected neighbours to find.
        should_stop: whether to return at once, with any widths.
    """
    border = float(np.quantile(distances, 1 - FAR_SHARE))
    is_far, is_counted = distances > border, expected >= 0

    def count_hits(rows: Bool[np.ndarray, "B"], width: int) -> int:
        found = find(rows, width)
        hits = (expected[rows, :, None] == found[:, None]).any(2)
        return int((hits & is_counted[rows]).sum())

    def widen(rows: Bool[np.ndarray, "B"], width: int, wanted: float) -> tuple[int, int]:
        while (hits := count_hits(rows, width)) < wanted and width < MAX_WIDTH:
            if should_stop():
                break
            width = min(MAX_WIDTH, math.ceil(STEP * width))
        return width, hits

    near, hits = widen(~is_far, least, aim * int(is_counted[~is_far].sum()))
    if not is_far.any():
        return Widths(near, near)
    far, _ = widen(is_far, near, aim * int(is_counted.sum()) - hits)
    return Widths(near, far, border)
