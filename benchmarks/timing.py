"""Timing in one process: the candidates take turns, and the median over many turns counts."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping

import torch

from experiments.measures import wait_for_device

Work = Callable[[], object]


def time_in_turns(
    works: Mapping[str, Work], device: torch.device, budget: float
) -> dict[str, float]:
    """Return the median time of each candidate; they take turns.

    Each gets at least `budget` seconds and 5 turns, within limits on the total. GPU times come from
    events. Turns alternate between candidates, so that inputs are not in the cache.
    """
    took: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
        work()
    wait_for_device(device)
    start = time.perf_counter()
    for turn in itertools.count():
        for name, work in works.items():
            slow = turn >= 5 and sum(took[name]) > budget
            if not slow:
                took[name].append(_once(work, device))
        if turn >= 4 and all(sum(each) > budget for each in took.values()):
            break
        if turn >= 2 and time.perf_counter() - start > 20 * budget:
            break
        if turn >= 200:
            break
    return {name: statistics.median(each) for name, each in took.items()}


def _once(work: Work, device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
