"""How widely to search graphs: most queries need little, and those far from everything much more.

A query among many entries finds nearly all its neighbours with a narrow search. One that is far
from all entries has many that are almost equally near, and a narrow search misses a quarter of
them. So every query is searched for narrowly, and again, widely, if what was found is far away. If
it is farther away than that of nearly all queries with which the widths were tried out, nothing is
known about the width it needs. Such a query is outside, and is compared with all entries. So are
queries for which no width is enough: a graph with many copies of one key is hard to search, and in
very few dimensions copies that are rounded to 8 bits are too coarse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mbpa.memory.graph_index import (
    RANKED_CANDIDATES,
    Found,
    Graph,
    drop_stale,
    get_slots,
    keep_nearest,
)
from mbpa.memory.recall import count_hits, find_true_neighbors, measure_distances
from mbpa.memory.ring import Ints

MAX_WIDTH = 2048
STEP = 1.12  # factor between the widths that are tried
FAR_SHARE = 0.2  # of the queries are searched for again
OUTSIDE_SHARE = 0.01  # of the queries at most are compared with all entries
OUTSIDE_FACTOR = 1.5  # by which squared distances must exceed those of the other queries
QUERIES_PER_ROUNDED = 8  # queries per query whose distance from rounded copies is measured
RANK = 10  # of the neighbour whose distance tells whether a query is far away
CALIBRATION_NEIGHBORS = 50  # per query with which widths are tried out
MAX_SPARED, MIN_PER_SPARED = 2048, 10  # keys to try widths out with, and entries per such key
AIMED_SHARE = 0.6  # of the misses that the target allows: the aim when widths are tried out


class Widths(NamedTuple):
    """Candidates that a search considers; usearch and the literature call this number ef."""

    near: int
    far: int
    """The same for queries that are far away."""
    border: float = 0.0
    """Squared distance of a query's tenth neighbour beyond which it is far away."""
    limit: float | None = None
    """Squared distance of a query's tenth neighbour beyond which it is outside; `None` for none.
    Negative if all queries are compared with all entries, since no search is wide enough.
    """

    @property
    def of_searches(self) -> tuple[int, int]:
        """The widths for near and for far queries."""
        return self.near, self.far

    @property
    def are_enough(self) -> bool:
        """Whether all queries but rare ones can be searched for in graphs."""
        return self.limit is None or self.limit > self.border

    def scale(self, factor: float, least: int) -> Widths:
        """Return wider or narrower searches, not below this width."""
        near, far = scale_widths(self.of_searches, factor, least)
        return self._replace(near=near, far=far)

    def give_up(self, least: int) -> Widths:
        """Return widths with which all queries are compared with all entries."""
        return self._replace(near=least, far=least, limit=-1.0)

    def find_far_and_outside(
        self, distances: Float[np.ndarray, "B J"], candidates: int = 0
    ) -> tuple[Bool[np.ndarray, "B"], Bool[np.ndarray, "B"]]:
        """Return which queries to search for again, and which of the others are outside.

        Args:
            distances: squared distances of what was found for each query.
            candidates: number of candidates that were asked for; a search is at least as wide.
        """
        none, can_widen = np.zeros(len(distances), bool), self.far > max(self.near, candidates)
        if self.limit is not None and self.limit < 0:
            return none, ~none
        if not distances.shape[1] or (not can_widen and self.limit is None):
            return none, none
        ranked = _rank_distances(distances)
        # Not where fewer were found, which says nothing about distances.
        limit = math.inf if self.limit is None else self.limit
        is_outside = (ranked > limit) & (ranked < math.inf)
        return (ranked > self.border) & ~is_outside if can_widen else none, is_outside


def scale_widths(widths: tuple[int, int], factor: float, least: int) -> tuple[int, int]:
    """Return wider or narrower searches for near and far queries, not below this width."""
    near, far = (max(least, min(MAX_WIDTH, math.ceil(factor * width))) for width in widths)
    return near, far


def _rank_distances(distances: Float[np.ndarray, "B J"]) -> Float[np.ndarray, "B"]:
    """Return the distance of each query's tenth neighbour, or of the last if there are fewer."""
    rank = min(RANK, distances.shape[1]) - 1
    ranked: Float[np.ndarray, "B"] = np.partition(distances, rank, 1)[:, rank]
    return ranked


class GraphContent(NamedTuple):
    """What is read of a memory without its lock, to build a graph or to measure recall."""

    generation: object
    """Another one as soon as what is made of this content is of no use."""
    keys: Float[Tensor, "N D"]
    norms: Float[Tensor, "N"]
    """Squared norms of the keys; infinite for empty slots."""
    labels: Ints
    """Label of the entry in each slot, or −1."""


def order_for_calibration(count: int) -> tuple[Ints, int]:
    """Return an order of entries in which those to calibrate with come last, and their number."""
    spared = min(count // MIN_PER_SPARED, MAX_SPARED)
    is_spared = np.zeros(count, bool)
    is_spared[np.linspace(0, count - 1, spared).astype(int)] = True
    return np.argsort(is_spared, kind="stable"), int(is_spared.sum())


def calibrate(
    graph: Graph,
    content: GraphContent,
    nodes: Ints,
    queries: Float[Tensor, "B D"],
    *,
    are_keys: bool,
    least: int,
    target: float,
    should_stop: Callable[[], bool],
) -> Widths | None:
    """Return how widely to search a new graph so that recall is above the target.

    Args:
        graph: graph to search.
        content: entries of the memory, of which the graph has some.
        nodes: labels of the nodes of the graph.
        queries: queries to try widths out with, in the dtype of the distances.
        are_keys: whether the queries are keys of entries that are not in the graph.
        least: the narrowest width to try.
        target: share of the true nearest entries to find.
        should_stop: whether to return at once, with any widths.

    Returns:
        Widths, or `None` if none of the neighbours of the queries is in the graph.
    """
    if not len(queries) or not len(graph):
        return None
    used = int(get_slots(nodes).max()) + 1
    k = min(CALIBRATION_NEIGHBORS, used)
    keys, norms = content.keys[:used], content.norms[:used]
    nearest, distances = find_true_neighbors(keys, norms, queries, k)
    ranked = distances[:, min(RANK - 1 + are_keys, k - 1)]  # a key is the nearest entry of itself
    is_usable = ranked.isfinite()  # not if there are fewer entries, or it is too large a number
    queries, nearest, distances, ranked = (
        each[is_usable] for each in (queries, nearest, distances, ranked)
    )
    # Other neighbours were spared, written meanwhile, or are in another graph, and are taken to be
    # found there. Where most are, the few in this graph are far away, and need not all be found.
    is_node = torch.from_numpy(np.isin(content.labels[nearest.numpy()], nodes))
    expected = distances.where(is_node, math.inf)
    count = distances.isfinite().sum(1)
    elsewhere = count - is_node.sum(1)
    if not is_node.any():
        return None
    needed = k + k // 8 + 8  # as a read asks for
    live = int((content.labels[get_slots(nodes)] == nodes).sum())
    entries = int(norms.isfinite().sum())

    def search(chosen: Float[Tensor, "_ D"], width: int) -> Found:
        found = graph.search_live(
            chosen,
            graph.settings.widen(needed),
            width=width,
            live=live,
            entries=entries,
            threads=1,
        )
        drop_stale(found, content.labels)
        return found

    def count_found(rows: Bool[np.ndarray, "B"], width: int) -> int:
        chosen = torch.from_numpy(rows)
        found = search(queries[chosen], width)
        labels = keep_nearest(found, RANKED_CANDIDATES * needed)
        slots = torch.from_numpy(np.where(labels < 0, -1, get_slots(labels)))
        found_distances = measure_distances(keys, queries[chosen], slots)
        return int((count_hits(found_distances, expected[chosen]) + elsewhere[chosen]).sum())

    # Rounded copies of keys that are very near have greater distances; some tell how much greater.
    rounded = _rank_distances(search(queries[::QUERIES_PER_ROUNDED], least).distances)
    rounded[np.isinf(rounded)] = 0  # fewer were found
    usual = max(np.quantile(each, 1 - OUTSIDE_SHARE) for each in (rounded, ranked.numpy()))
    return choose_widths(
        count_found,
        count.numpy(),
        ranked.numpy(),
        limit=OUTSIDE_FACTOR * float(usual),
        least=least,
        target=target,
        should_stop=should_stop,
    )


def choose_widths(
    count_found: Callable[[Bool[np.ndarray, "B"], int], int],
    expected: Int[np.ndarray, "B"],
    distances: Float[np.ndarray, "B"],
    *,
    limit: float,
    least: int,
    target: float,
    should_stop: Callable[[], bool] = lambda: False,
) -> Widths:
    """Return the searches of least cost with which recall is somewhat above the target.

    For near queries alone, recall is between the target and that aim. What they miss, far queries
    can make up for: they are few, and often gain more by wider searches. Queries for which no
    search is wide enough to reach the target are compared with all entries.

    Args:
        count_found: returns how many true neighbours of some of B queries are found by searches of
            a width.
        expected: number of true neighbours of each query.
        distances: squared distance of each query's tenth neighbour.
        limit: such a distance beyond which a query is outside, and not searched for in graphs.
        least: the narrowest width to try.
        target: share of the expected neighbours to find.
        should_stop: whether to return at once, with any widths.
    """
    aim = 1 - AIMED_SHARE * (1 - target)
    border = float(np.quantile(distances, 1 - FAR_SHARE))
    is_near = distances <= border
    is_far = ~is_near & (distances <= limit)

    def try_widths(rows: Bool[np.ndarray, "B"]) -> Iterator[tuple[int, int]]:
        """Yield widths in ascending order, and how many neighbours they find."""
        width = least
        yield width, count_found(rows, width)
        while width < MAX_WIDTH and not should_stop():
            width = min(MAX_WIDTH, math.ceil(STEP * width))
            yield width, count_found(rows, width)

    count = int(expected[is_near].sum())
    usable = []  # for near queries
    for near, hits in try_widths(is_near):
        if hits >= target * count:
            usable.append((near, hits))
        if hits >= aim * count:
            break
    widths = Widths(near, near, border, limit)
    if not usable:
        return widths.give_up(least)
    if not is_far.any():
        return widths
    count += int(expected[is_far].sum())
    best, cost = None, math.inf  # cost: candidates per query
    for far, more in try_widths(is_far):
        while usable and usable[-1][1] + more >= aim * count:
            near = usable.pop()[0]
            if near + FAR_SHARE * far < cost:
                best, cost = widths._replace(near=near, far=max(near, far)), near + FAR_SHARE * far
        if not usable or least + FAR_SHARE * far > cost:
            break
    if best is not None:
        return best
    if hits + more < target * count:
        return widths._replace(limit=border)
    return widths._replace(far=far)
