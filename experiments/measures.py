"""Measures of predictions: accuracy, calibration, detection of out-of-scope inputs, time.

Confidence is the probability of the predicted label.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

CALIBRATION_BINS = 15


def split_labels(labels: Int[Tensor, "Q"], old: int) -> dict[str, Bool[Tensor, "Q"]]:
    """Return which labels are new, old (known from the start), and all."""
    is_old = labels < old
    return {"novel": ~is_old, "pre-trained": is_old, "all": torch.ones_like(is_old)}


def percent(right: Bool[Tensor, "Q"]) -> float:
    """Return how many are true, in percent: the accuracy, if true means correct."""
    return 100 * float(right.double().mean())


def calibration_error(
    confidence: Float[Tensor, "Q"], right: Bool[Tensor, "Q"], bins: int = CALIBRATION_BINS
) -> float:
    """Return how far confidence is from accuracy, in percent: the mean over bins with (nearly)
    equal numbers of answers, from the least to the most confident.
    """
    order = confidence.argsort(stable=True)
    gaps = confidence.double()[order] - right.double()[order]
    parts = gaps.tensor_split(min(bins, len(gaps)))
    return 100 * sum(abs(float(part.sum())) for part in parts) / len(gaps)


def auroc(inside: Float[Tensor, "N"], outside: Float[Tensor, "M"]) -> float:
    """Return, in percent, how often a sentence in scope is answered with more confidence than one
    out of scope; a tie counts half.
    """
    ordered = outside.double().sort().values
    inside = inside.double()
    below = torch.searchsorted(ordered, inside, right=False)
    upto = torch.searchsorted(ordered, inside, right=True)
    wins = float((below + upto).double().sum()) / 2
    return 100 * wins / (len(inside) * len(outside))


def time_call(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the median time of some repeats, after one that is not counted."""
    taken = []
    for _ in range(repeats + 1):
        wait_for_device(device)
        start = time.perf_counter()
        work()
        wait_for_device(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def wait_for_device(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
