"""The recall of an approximate memory: how it is counted, and a sample of live queries for it.

An entry counts as found if it is at most as far away as the true k-th neighbour, since any of
several equally near entries is a right answer. Equality means something only if both distances are
rounded alike, so both are computed by `measure_distances`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mbpa.memory.exact import search_all
from mbpa.memory.graph_index import get_serials, get_slots
from mbpa.memory.ranking import gather_rows, measure_each_query
from mbpa.memory.ring import Ints

MAX_MEASURED = 1024  # queries over which recall is averaged
MIN_MEASURED = 64  # queries before it is acted upon
MAX_RECENT = 2048  # queries that are remembered
MIN_RECENT = 256  # queries without which they say little about those to come
SAMPLES_PER_MEASUREMENT = 16  # queries that share a pass over the keys
MEASURING_SHARE = 0.01  # of the time may be spent on measuring


def find_true_neighbors(
    keys: Float[Tensor, "N D"], norms: Float[Tensor, "N"], queries: Float[Tensor, "B D"], k: int
) -> tuple[Int[Tensor, "B K"], Float[Tensor, "B K"]]:
    """Return the slots and distances of the k nearest of all keys, nearest first.

    Args:
        keys: in any floating dtype.
        norms: their squared norms; infinite for empty slots, whose distance is infinite, too.
        queries: at least one, in the dtype of the norms.
        k: at most the number of keys, and at least 1.
    """
    # The search rounds differently, so it must return a few more.
    slots = search_all(keys, norms, queries, min(len(keys), k + k // 8 + 8)).slots
    distances = measure_distances(keys, queries, slots.where(norms[slots].isfinite(), -1))
    nearest = distances.topk(k, largest=False)
    return slots.gather(1, nearest.indices), nearest.values


def measure_distances(
    keys: Float[Tensor, "N D"], queries: Float[Tensor, "B D"], slots: Int[Tensor, "B J"]
) -> Float[Tensor, "B J"]:
    """Return `Σ(h−q)²` of each query and the keys in its slots; infinite for slot −1."""

    def fetch(slots: Tensor) -> Tensor:
        return gather_rows(keys, slots.flatten()).to(queries.dtype).reshape(*slots.shape, -1)

    distances, _ = measure_each_query(queries, slots.clamp_min(0), fetch)
    return distances.masked_fill_(slots < 0, math.inf)


def count_hits(found: Float[Tensor, "B J"], true: Float[Tensor, "B K"]) -> Int[Tensor, "B"]:
    """Return how many of its true neighbours each query found.

    Args:
        found: distances of different entries that were found; infinite for none.
        true: distances of the neighbours to find; infinite for none.
    """
    is_true = true.isfinite()
    farthest = true.where(is_true, -math.inf).amax(1, keepdim=True)
    return (found <= farthest).sum(1).minimum(is_true.sum(1))


class Sample(NamedTuple):
    """A query whose candidates are to be compared with the true nearest entries."""

    query: Float[Tensor, "D"]
    found: Ints
    """Labels of the candidates."""
    k: int
    serial: int
    """Entries with this serial number or a later one did not exist yet."""


class Comparison(NamedTuple):
    """What a query found, and what it should have found."""

    sample: Sample
    slots: Ints
    """Slots of the candidates; any for none."""
    distances: Float[Tensor, "1 J"]
    """Their distances."""
    true_slots: Ints
    """Slots of the true nearest entries."""
    true_distances: Float[Tensor, "1 K"]
    """Their distances."""

    def measure_recall(self, labels: Ints) -> float | None:
        """Return the share of the true nearest entries that were found; `None` if none counts.

        Entries that were written or overwritten since the query was answered do not count.

        Args:
            labels: label of the entry that each slot holds now, or −1.
        """
        true, found = labels[self.true_slots], self.sample.found
        is_known = (true >= 0) & (get_serials(true) < self.sample.serial)
        if not is_known.any():
            return None
        is_kept = (found >= 0) & (labels[self.slots] == found)
        near = self.distances[:, torch.from_numpy(is_kept)]
        wanted = self.true_distances[:, torch.from_numpy(is_known)]
        return float(count_hits(near, wanted)) / wanted.shape[1]


def compare_samples(
    samples: Sequence[Sample], keys: Float[Tensor, "N D"], norms: Float[Tensor, "N"]
) -> list[Comparison]:
    """Compare what queries found with an exhaustive search, in one pass over the keys.

    Args:
        samples: at least one.
        keys: key in each slot.
        norms: squared norms of the keys; infinite for empty slots.
    """
    most = min(max(sample.k for sample in samples), len(keys))
    queries = torch.stack([sample.query for sample in samples])
    nearest, true = find_true_neighbors(keys, norms, queries, most)
    comparisons = []
    for row, sample in enumerate(samples):
        slots = np.where(sample.found < 0, -1, get_slots(sample.found))
        distances = measure_distances(keys, queries[row][None], torch.from_numpy(slots)[None])
        places = slice(row, row + 1), slice(sample.k)
        comparisons.append(
            Comparison(sample, slots, distances, nearest[places][0].numpy(), true[places])
        )
    return comparisons


class RecallMeter:
    """Chooses queries to measure, so rarely that measuring takes little time; not thread-safe."""

    def __init__(self) -> None:
        self._measured: deque[float] = deque(maxlen=MAX_MEASURED)
        self._recent: deque[Tensor] = deque(maxlen=MAX_RECENT)
        self.clear()

    def clear(self) -> None:
        """Start anew, because a search would now find other entries."""
        self.recall: float | None = None
        """Mean recall of the measured queries; `None` if there are none."""
        self._samples: list[Sample] = []
        self._measured.clear()
        self._offered = self._outside = 0
        self._interval_s = self._next_s = 0.0

    @property
    def standard_error(self) -> float:
        """The standard error of `recall`, which is the mean of a sample."""
        return float(np.std(self._measured)) / math.sqrt(max(1, len(self._measured)))

    @property
    def is_certain(self) -> bool:
        """Whether enough queries were measured to act upon the result."""
        return len(self._measured) >= MIN_MEASURED

    @property
    def is_due(self) -> bool:
        return len(self._samples) >= SAMPLES_PER_MEASUREMENT

    @property
    def outside_share(self) -> float:
        """Share of the queries that lay outside; 0 as long as too few were offered."""
        return self._outside / self._offered if self._offered >= MIN_RECENT else 0.0

    def offer(
        self,
        queries: Float[Tensor, "B D"],
        found: Int[np.ndarray, "B J"],
        k: int,
        serial: int,
        is_outside: Bool[np.ndarray, "B"],
    ) -> None:
        """Take one of these queries as a sample, if it is time for one.

        Args:
            queries: queries of a read.
            found: labels of the candidates of each query.
            k: number of neighbours that were asked for.
            serial: serial number of the next entry.
            is_outside: which queries were compared with all entries. There is nothing to measure:
                they found everything.
        """
        now = time.monotonic()
        if now < self._next_s or self.is_due:
            return
        self._next_s = now + self._interval_s
        row = self._offered % len(queries)
        self._offered += 1
        self._outside += int(is_outside[row])
        self._recent.append(queries[row].clone())
        if is_outside[row]:
            self._add([1.0])
        else:
            self._samples.append(Sample(queries[row].clone(), found[row].copy(), k, serial))

    def get_recent(self) -> list[Float[Tensor, "D"]]:
        """Return the last sampled queries; none if there were too few to tell how others are."""
        return list(self._recent) if len(self._recent) >= MIN_RECENT else []

    def take(self) -> list[Sample]:
        """Return the samples to measure, and forget them."""
        samples, self._samples = self._samples, []
        return samples

    def record(self, recalls: list[float], spent_s: float) -> None:
        """Add measured recalls, each of one query, and the time it took to measure them."""
        self._add(recalls)
        self._interval_s = spent_s / max(1, len(recalls)) / MEASURING_SHARE

    def _add(self, recalls: list[float]) -> None:
        self._measured.extend(recalls)
        self.recall = float(np.mean(self._measured)) if self._measured else None
