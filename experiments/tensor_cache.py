"""Reading tensors that an earlier run left in the cache."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open

Content = TypeVar("Content")


def read_cached(path: Path, device: torch.device, read: Callable[[Any], Content]) -> Content | None:
    """Return what `read` finds in a safetensors file; `None` if the file is missing or damaged.

    Args:
        read: called with the open file.
    """
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            return read(file)
    except FileNotFoundError:
        return None
    except SafetensorError:
        warnings.warn(f"{path} is damaged and will be recomputed", stacklevel=3)
        return None
