"""Matrices of test cases, most of which run only with the slow tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def combine(*axes: Iterable[Any], keep: Callable[..., bool]) -> list[Any]:
    """Return all combinations as cases for `parametrize`; those not kept are marked slow."""
    return [
        pytest.param(*values, marks=() if keep(*values) else pytest.mark.slow)
        for values in itertools.product(*axes)
    ]
