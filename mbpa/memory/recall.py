"""The recall of an approximate memory, measured on a sample of live queries."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from mbpa.memory.ring import Ints

MAX_MEASURED = 1024  # queries over which recall is averaged
MIN_MEASURED = 64  # queries before it is acted upon
MAX_RECENT = 2048  # queries that are remembered
SAMPLES_PER_MEASUREMENT = 16  # queries that share a pass over the keys
MEASURING_SHARE = 0.01  # of the time may be spent on measuring


class Sample(NamedTuple):
    """A query whose candidates are to be compared with the true nearest entries."""

    query: Float[Tensor, "D"]
    found: Ints
    """Labels of the candidates."""
    k: int
    serial: int
    """Entries with this serial number or a later one did not exist yet."""


class RecallMeter:
    """Chooses queries to measure, so rarely that measuring takes little time; not thread-safe."""

    def __init__(self) -> None:
        self._measured: deque[float] = deque(maxlen=MAX_MEASURED)
        self._recent: deque[Tensor] = deque(maxlen=MAX_RECENT)
        self.clear()

    def clear(self) -> None:
        """Start anew, because a search would now find other entries."""
        self._samples: list[Sample] = []
        self._measured.clear()
        self._interval_s = self._next_s = 0.0

    @property
    def recall(self) -> float | None:
        return float(np.mean(self._measured)) if self._measured else None

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

    def offer(
        self, queries: Float[Tensor, "B D"], found: Int[np.ndarray, "B J"], k: int, serial: int
    ) -> None:
        """Take one of these queries as a sample, if it is time for one."""
        now = time.monotonic()
        if now < self._next_s or self.is_due:
            return
        self._next_s = now + self._interval_s
        row = len(self._samples) % len(queries)
        self._recent.append(queries[row].clone())
        self._samples.append(Sample(queries[row].clone(), found[row].copy(), k, serial))

    def get_recent(self) -> list[Float[Tensor, "D"]]:
        """Return the last sampled queries."""
        return list(self._recent)

    def take(self) -> list[Sample]:
        """Return the samples to measure, and forget them."""
        samples, self._samples = self._samples, []
        return samples

    def record(self, recalls: list[float], spent_s: float) -> None:
        """Add measured recalls, each of one query, and the time it took to measure them."""
        self._measured.extend(recalls)
        self._interval_s = spent_s / max(1, len(recalls)) / MEASURING_SHARE
