"""Validation of arguments. Bad input raises `ValueError`, saying what must hold and what it got."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from functools import cache
from numbers import Real
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from mbpa.replay import assume

KEY_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
LABEL_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def count(name: str, number: int, least: int = 1) -> int:
    """Return `number` as a plain int if it is a whole number of at least `least`."""
    try:
        if _is_bool(number):
            raise TypeError("a truth value is no number")
        whole = operator.index(number)
    except TypeError:
        raise ValueError(f"{name} must be a whole number, got {number!r}") from None
    if whole < least:
        raise ValueError(f"{name} must be at least {least}, got {whole}")
    return whole


def parse_number(name: str, number: Any, must: str = "be a finite number") -> float:
    """Return a finite number, also one of numpy or torch, as a plain float that can be saved."""
    plain = number.item() if getattr(number, "ndim", None) == 0 else number
    if _is_bool(plain) or not isinstance(plain, Real) or not math.isfinite(plain):
        raise ValueError(f"{name} must {must}, got {number!r}")
    return float(plain)


def _is_bool(number: Any) -> bool:
    return isinstance(number, bool) or getattr(number, "dtype", None) == torch.bool


def parse_shape(name: str, size: Any, least: int = 1) -> tuple[int, ...]:
    """Return a shape as a tuple; a single number is a shape with one dimension."""
    sizes = size if isinstance(size, tuple | list | torch.Size) else (size,)
    return tuple(count(name, each, least) for each in sizes)


def check_key_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return `dtype` if keys can have it."""
    if dtype not in KEY_DTYPES:
        raise ValueError(f"dtype must be one of {KEY_DTYPES}, got {dtype}")
    return dtype


def check_value_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return `dtype` if labels or regression targets can have it."""
    if dtype not in LABEL_DTYPES and dtype not in KEY_DTYPES:
        raise ValueError(
            f"value_dtype must be one of {LABEL_DTYPES} for labels or of {KEY_DTYPES} for "
            f"regression targets, got {dtype}"
        )
    return dtype


def parse_keys(
    keys: Tensor,
    name: str,
    key_shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    allow_tiny: bool = False,
) -> Float[Tensor, "N D"]:
    """Return keys as rows of `dtype`, if they are finite and have norms in the valid range.

    Squares of differences must neither overflow nor underflow. Above the smallest valid norm, the
    effect of underflow on a distance is smaller than that of rounding the keys themselves. Zero
    keys are exact.

    Args:
        keys: shape (N, *key_shape).
        name: name of the argument, for error messages.
        key_shape: shape of one key.
        dtype: dtype of the result.
        device: device that the keys must be on.
        allow_tiny: accept keys below the smallest norm, which old saved memories may contain.
    """
    if not isinstance(keys, Tensor) or not keys.is_floating_point():
        got = keys.dtype if isinstance(keys, Tensor) else type(keys).__name__
        raise ValueError(f"{name} must be a tensor of a floating dtype, got {got}")
    if keys.shape[1:] != key_shape or keys.ndim == 0:
        expected = ", ".join(map(str, ("N", *key_shape)))
        raise ValueError(f"{name} must have shape ({expected}), got {tuple(keys.shape)}")
    if keys.device != device:
        raise ValueError(f"{name} must be on the memory's device {device}, got {keys.device}")
    flat = keys.detach().flatten(1).to(dtype)
    wide, least, limit = _find_norm_limits(dtype)
    squares = flat.to(wide).square().sum(1)
    if not assume(((squares < limit) & (squares >= least)).all()):
        if not (squares < limit).all():
            raise ValueError(
                f"{name} must be finite in {dtype}, with squared norms below {limit:.0e}; "
                "got NaN, infinite or larger ones"
            )
        is_tiny = (squares < least) & flat.any(1)
        if not allow_tiny and is_tiny.any():
            norm = torch.linalg.vector_norm(flat[is_tiny][0], dtype=torch.float64)
            raise ValueError(
                f"{name} must be zero or have norms of at least {least**0.5:.0e}, since squares of "
                f"smaller differences are lost in {wide}; got {norm:.1e}: scale them up"
            )
    return flat


@cache
def _find_norm_limits(dtype: torch.dtype) -> tuple[torch.dtype, float, float]:
    """Return the dtype for squared norms of keys, and the smallest and largest valid ones."""
    wide = torch.promote_types(dtype, torch.float32)
    limits = torch.finfo(wide)
    return wide, limits.tiny / limits.eps**2, limits.max / 8


def parse_stored_values(
    values: Tensor | Sequence[Any],
    value_shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Shaped[Tensor, "N *V"]:
    """Return values in the memory's dtype and on its device, if they have shape (N, *V)."""
    values = parse_values(values, dtype)
    if values.shape == (0,):
        values = values.reshape(0, *value_shape)
    if values.shape[1:] != value_shape or values.ndim == 0:
        expected = ", ".join(map(str, ("N", *value_shape)))
        raise ValueError(f"values must have shape ({expected}), got {tuple(values.shape)}")
    return values.detach().to(device, dtype)


def parse_values(
    values: Tensor | Sequence[Any], dtype: torch.dtype, name: str = "values"
) -> Shaped[Tensor, "*N"]:
    """Return values of any shape, if they fit `dtype`: labels as int64, targets unchanged."""
    if dtype in LABEL_DTYPES:
        return parse_labels(values, dtype, name)
    targets = _parse_tensor(values, name, "numbers")
    if not targets.is_floating_point():
        raise ValueError(f"{name} must be targets of a floating dtype, got {targets.dtype}")
    if not targets.to(dtype).isfinite().all():
        raise ValueError(f"{name} must be finite in {dtype}, got NaN or infinite ones")
    return targets


def parse_labels(
    labels: Tensor | Sequence[Any], dtype: torch.dtype = torch.int64, name: str = "labels"
) -> Shaped[Tensor, "*N"]:
    """Return labels of any integer dtype as int64, if they are not negative and fit `dtype`."""
    given = _parse_tensor(
        labels, name, "whole numbers from 0", "; map names to numbers, or use `mbpa teach`"
    )
    if given.shape == (0,) and given.dtype == torch.float32:
        return given.to(torch.int64)  # an empty list has no dtype of its own
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise ValueError(
            f"{name} must be labels of an integer dtype, got {given.dtype}; for regression make "
            "the memory with value_shape= and a floating value_dtype="
        )
    whole, most = given.to(torch.int64), torch.iinfo(dtype).max  # no min, max for unsigned
    if not whole.numel():
        return whole
    if (least := int(whole.min())) < 0:
        if given.dtype == torch.uint64:
            raise ValueError(f"labels must fit {dtype}, got {least + 2**64} > {most}")
        raise ValueError(f"labels must not be negative, got {least}")
    if (largest := int(whole.max())) > most:
        raise ValueError(f"labels must fit {dtype}, got {largest} > {most}")
    return whole


def parse_ids(ids: Tensor | Iterable[int]) -> Shaped[Tensor, "N"]:
    """Return ids as a 1-d tensor of int64 on the CPU."""
    given = ids if isinstance(ids, Tensor | str) else list(ids)
    wanted = _parse_tensor(given, "ids", "integers").flatten().cpu()
    if wanted.numel() and (
        wanted.is_floating_point() or wanted.is_complex() or wanted.dtype == torch.bool
    ):
        raise ValueError(f"ids must be distinct integers, got {wanted.tolist()[:8]}")
    return wanted.to(torch.int64)


def parse_distinct_ids(ids: Tensor | Iterable[int]) -> Shaped[Tensor, "N"]:
    """Return ids as a 1-d tensor of int64 on the CPU, if they are distinct."""
    wanted = parse_ids(ids)
    if len(wanted.unique()) != len(wanted):
        raise ValueError(f"ids must be distinct integers, got {wanted.tolist()[:8]}")
    return wanted


def _parse_tensor(numbers: Any, name: str, kind: str, hint: str = "") -> Tensor:
    """Return numbers as a tensor; raise our own `ValueError` if torch cannot convert them."""
    try:
        return torch.as_tensor(numbers)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        if _has_strings(numbers):
            raise ValueError(f"{name} must be {kind}, got strings{hint}") from None
        raise ValueError(f"{name} must be {kind}, in a tensor or a list: {error}") from error


def _has_strings(numbers: Any) -> bool:
    if isinstance(numbers, np.ndarray):
        return numbers.dtype.kind in "US" or any(map(_has_strings, numbers.flat))
    if isinstance(numbers, list | tuple):
        return any(map(_has_strings, numbers))
    return isinstance(numbers, str | bytes)


def require_float32_keys(store: str, dtype: torch.dtype) -> None:
    """Raise `ValueError` if keys of this dtype would be rounded in a store of float32 vectors."""
    if dtype == torch.float64:
        raise ValueError(
            f"dtype must be at most float32, in which {store} stores keys, got {dtype}"
        )
