"""The choice of a memory by a word, for commands and settings."""

from __future__ import annotations

from typing import Any, Literal

import torch

from mbpa.memory.base import Memory
from mbpa.memory.exact import ExactMemory
from mbpa.memory.graph import GraphMemory

MemoryKind = Literal["exact", "graph", "auto"]
"""How a memory searches: exactly, along a graph, or whichever suits the number of entries."""
MEMORY_KINDS: tuple[MemoryKind, ...] = ("exact", "graph", "auto")
AUTO_EXACT_BELOW = 100_000  # entries up to which an exhaustive search on a CPU is fast enough


def make_memory(
    kind: MemoryKind,
    capacity: int,
    key_dim: int,
    *,
    device: torch.device | str = "cpu",
    **form: Any,
) -> Memory:
    """Return an empty memory.

    Args:
        kind: "exact" for `ExactMemory`; "graph" for `GraphMemory`, which needs a CPU; "auto" for
            one that is exact on other devices, and on a CPU up to 100,000 entries.
        capacity: as in `Memory`.
        key_dim: as in `Memory`.
        device: as in `Memory`.
        form: further arguments of `Memory`.
    """
    if kind not in MEMORY_KINDS:
        raise ValueError(f"memory must be one of {', '.join(MEMORY_KINDS)}, got {kind!r}")
    if kind == "exact" or (kind == "auto" and torch.device(device).type != "cpu"):
        return ExactMemory(capacity, key_dim, device=device, **form)
    if kind == "auto":
        form["exact_below"] = AUTO_EXACT_BELOW
    return GraphMemory(capacity, key_dim, device=device, **form)
