"""What a memory accepts. Bad input is a `ValueError` that says what must hold and what came."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

KEY_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
LABEL_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def count(name: str, number: int, least: int = 1) -> int:
    """A whole number of at least `least`, as a plain int."""
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
    """A finite number as a plain float, of numpy and torch, too: only plain ones can be saved."""
    plain = number.item() if getattr(number, "ndim", None) == 0 else number
    if _is_bool(plain) or not isinstance(plain, Real) or not math.isfinite(plain):
        raise ValueError(f"{name} must {must}, got {number!r}")
    return float(plain)


def _is_bool(number: Any) -> bool:
    return isinstance(number, bool) or getattr(number, "dtype", None) == torch.bool


def shape(name: str, size: Any, least: int = 1) -> tuple[int, ...]:
    """A shape, of which a number is the only dimension."""
    sizes = size if isinstance(size, tuple | list | torch.Size) else (size,)
    return tuple(count(name, each, least) for each in sizes)


def key_dtype(dtype: torch.dtype) -> torch.dtype:
    """A dtype for keys."""
    if dtype not in KEY_DTYPES:
        raise ValueError(f"dtype must be one of {KEY_DTYPES}, got {dtype}")
    return dtype


def value_dtype(dtype: torch.dtype) -> torch.dtype:
    """A dtype for labels or for regression targets."""
    if dtype not in LABEL_DTYPES and dtype not in KEY_DTYPES:
        raise ValueError(
            f"value_dtype must be one of {LABEL_DTYPES} for labels or of {KEY_DTYPES} for "
            f"regression targets, got {dtype}"
        )
    return dtype


def flat_keys(
    keys: Tensor, name: str, key_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "N D"]:
    """Keys as rows in the given dtype, finite and small enough that no distance overflows."""
    if not isinstance(keys, Tensor) or not keys.is_floating_point():
        got = keys.dtype if isinstance(keys, Tensor) else type(keys).__name__
        raise ValueError(f"{name} must be a tensor of a floating dtype, got {got}")
    if keys.shape[1:] != key_shape or keys.ndim == 0:
        expected = ", ".join(map(str, ("N", *key_shape)))
        raise ValueError(f"{name} must have shape ({expected}), got {tuple(keys.shape)}")
    if keys.device != device:
        raise ValueError(f"{name} must be on the memory's device {device}, got {keys.device}")
    flat = keys.detach().flatten(1).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    limit = torch.finfo(wide).max / 8
    if not (flat.to(wide).square().sum(1) < limit).all():
        raise ValueError(
            f"{name} must be finite in {dtype}, with squared norms below {limit:.0e}; "
            "got NaN, infinite or larger ones"
        )
    return flat


def stored_values(
    values: Tensor | Sequence[Any],
    value_shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Shaped[Tensor, "N *V"]:
    """Values in the memory's dtype and on its device."""
    values = torch.as_tensor(values)
    if values.shape == (0,) and values.dtype == torch.float32:
        values = values.to(dtype).reshape(0, *value_shape)  # an empty list says nothing of dtype
    if values.shape[1:] != value_shape or values.ndim == 0:
        expected = ", ".join(map(str, ("N", *value_shape)))
        raise ValueError(f"values must have shape ({expected}), got {tuple(values.shape)}")
    if dtype in LABEL_DTYPES:
        _check_labels(values, dtype)
    elif not values.is_floating_point():
        raise ValueError(f"values must be targets of a floating dtype, got {values.dtype}")
    elif not values.to(dtype).isfinite().all():
        raise ValueError(f"values must be finite in {dtype}, got NaN or infinite ones")
    return values.detach().to(device, dtype)


def _check_labels(labels: Tensor, dtype: torch.dtype) -> None:
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(
            f"values must be labels of an integer dtype, got {labels.dtype}; for regression make "
            "the memory with value_shape= and a floating value_dtype="
        )
    if not labels.numel():
        return
    wide, most = labels.to(torch.int64), torch.iinfo(dtype).max
    if (least := int(wide.min())) < 0:
        raise ValueError(f"labels must not be negative, got {least}")
    if (largest := int(wide.max())) > most:
        raise ValueError(f"labels must fit {dtype}, got {largest} > {most}")


def distinct_ids(ids: Tensor | Iterable[int]) -> Tensor:
    """Ids as a row of int64 on the CPU."""
    wanted = torch.as_tensor(ids if isinstance(ids, Tensor) else list(ids)).flatten().cpu()
    is_whole = not wanted.is_floating_point() and wanted.dtype != torch.bool
    if len(wanted) and not (is_whole and len(wanted.unique()) == len(wanted)):
        raise ValueError(f"ids must be distinct integers, got {wanted.tolist()[:8]}")
    return wanted.to(torch.int64)
