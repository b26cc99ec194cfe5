"""The scale of keys, in units of which settings are told."""

from __future__ import annotations

from typing import NamedTuple

import torch

import mbpa

SOME = 1_000  # entries, whose distances tell those of all


class Scale(NamedTuple):
    """Of the keys, so that settings mean the same for every network."""

    near: float
    """The mean distance between an entry of the memory and the nearest other one."""
    length: float
    """The mean square of a key's length."""


def spacing(memory: mbpa.Memory, copies: int) -> float:
    """The mean distance between an entry and the nearest other one; an image that is there several
    times is not its own neighbour."""
    found = memory.read(memory.entries().keys[:SOME], copies + 1, keys_for=0).distances
    nearest = found.masked_fill(found == 0, torch.inf).amin(1)
    nearest = nearest[nearest.isfinite()]
    return float(nearest.sqrt().mean()) if len(nearest) else 1.0  # all keys are the same
