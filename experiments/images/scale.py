"""The scale of keys, the unit of several settings."""

from __future__ import annotations

from typing import NamedTuple

import torch

import mbpa

SOME = 1_000  # entries used to estimate the spacing


class Scale(NamedTuple):
    """The scale of the keys, which makes settings comparable across networks."""

    near: float
    """Mean distance between an entry of the memory and the nearest other one."""
    length: float
    """Mean squared length of a key."""


def spacing(memory: mbpa.Memory, copies: int) -> float:
    """Return the mean distance between an entry and the nearest other one; copies of the same image
    do not count as neighbours.
    """
    found = memory.read(memory.entries().keys[:SOME], copies + 1, keys_for=0).distances
    nearest = found.masked_fill(found == 0, torch.inf).amin(1)
    nearest = nearest[nearest.isfinite()]
    return float(nearest.sqrt().mean()) if len(nearest) else 1.0  # all keys are equal
