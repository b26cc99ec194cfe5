"""The spacing of the entries of a memory, in which bandwidths are measured."""

from __future__ import annotations

import torch

import mbpa

SAMPLED_ENTRIES = 1_000  # from which the spacing is estimated


def measure_spacing(memory: mbpa.Memory, copies: int) -> float:
    """Return the mean distance between an entry and the nearest other one; copies of the same image
    do not count as neighbours.
    """
    found = memory.read(memory.entries().keys[:SAMPLED_ENTRIES], copies + 1, keys_for=0).distances
    nearest = found.masked_fill(found == 0, torch.inf).amin(1)
    nearest = nearest[nearest.isfinite()]
    return float(nearest.sqrt().mean()) if len(nearest) else 1.0  # all keys are equal
