"""Checks that the configs of several experiments share; each names the field and its value."""

from __future__ import annotations

import math
from collections.abc import Mapping


def check_seeds(seeds: tuple[int, ...]) -> None:
    """Require at least one seed, and none twice."""
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must name at least one, without duplicates, got {seeds}")


def check_minima(config: object, minima: Mapping[str, int]) -> None:
    """Require that fields are at least as large as given."""
    for name, least in minima.items():
        if getattr(config, name) < least:
            raise ValueError(f"{name} must be at least {least}, got {getattr(config, name)}")


def check_rising(name: str, values: tuple[float, ...]) -> None:
    """Require positive values, each larger than the one before."""
    if not values or list(values) != sorted(set(values)) or values[0] <= 0:
        raise ValueError(f"{name} must be positive and rising, got {values}")


def check_finite(
    config: object, positive: tuple[str, ...], not_negative: tuple[str, ...] = ()
) -> None:
    """Require that fields are finite, and positive or not negative."""
    for name in (*positive, *not_negative):
        value = getattr(config, name)
        if not (math.isfinite(value) and (value > 0 if name in positive else value >= 0)):
            least = "positive" if name in positive else "not negative"
            raise ValueError(f"{name} must be finite and {least}, got {value}")
