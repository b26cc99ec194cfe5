"""The form of a memory's entries: shapes, dtypes and device, and therefore what it accepts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from mbpa.memory import validation


class EntryForm:
    """Shape, dtype and device of keys and values; `Memory` documents the arguments."""

    def __init__(
        self,
        key_dim: int | Sequence[int],
        value_shape: Sequence[int],
        value_dtype: torch.dtype,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.key_shape: tuple[int, ...] = validation.parse_shape("key_dim", key_dim)
        if not self.key_shape:
            raise ValueError("key_dim must have at least one dimension, got ()")
        self.value_shape: tuple[int, ...] = validation.parse_shape(
            "value_shape", value_shape, least=0
        )
        self.value_dtype: torch.dtype = validation.check_value_dtype(value_dtype)
        self.dtype: torch.dtype = validation.check_key_dtype(dtype)
        self._device = torch.empty(0, device=device).device  # "cuda" → "cuda:0"

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def key_size(self) -> int:
        return math.prod(self.key_shape)

    @property
    def distance_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def holds_labels(self) -> bool:
        """Whether the values are class labels, not regression targets."""
        return not self.value_dtype.is_floating_point

    @property
    def kind(self) -> str:
        """A description of the values for messages."""
        return "labels" if self.holds_labels else f"targets of shape {self.value_shape}"

    def _parse_keys(self, keys: Tensor, *, allow_tiny: bool = False) -> Float[Tensor, "N D"]:
        form = self.key_shape, self.dtype, self.device
        return validation.parse_keys(keys, "keys", *form, allow_tiny=allow_tiny)

    def _parse_queries(self, queries: Tensor) -> Float[Tensor, "N D"]:
        """Return valid queries in `distance_dtype`; only stored keys are rounded to `dtype`."""
        wide = self.distance_dtype
        return validation.parse_keys(queries, "queries", self.key_shape, wide, self.device)

    def _parse_values(self, values: Tensor | Sequence[Any]) -> Shaped[Tensor, "N *V"]:
        return validation.parse_stored_values(
            values, self.value_shape, self.value_dtype, self.device
        )

    def _parse_entries(self, keys: Tensor, values: Tensor | Sequence[Any]) -> tuple[Tensor, Tensor]:
        flat, stored = self._parse_keys(keys), self._parse_values(values)
        if len(flat) != len(stored):
            raise ValueError(f"there must be one value per key, got {len(flat)} and {len(stored)}")
        return flat, stored


def check_schema(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise `ValueError` if entries are stored in another form than a memory would give them.

    Args:
        stored: the form that was stored, by name.
        wanted: the form that the memory would give.
    """
    for name, value in wanted.items():
        if stored.get(name) != value:
            raise ValueError(
                f"{name} must be {stored.get(name)!r}, as in the stored memory, got {value!r}"
            )


def parse_schema(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with which a memory of this schema is made."""
    return {
        "capacity": stored["capacity"],
        "key_dim": stored["key_dim"],
        "value_shape": stored["value_shape"],
        "value_dtype": getattr(torch, stored["value_dtype"]),
        "dtype": getattr(torch, stored["dtype"]),
    }
