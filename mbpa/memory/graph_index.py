"""A graph of nearest neighbours (HNSW, by usearch) to which nodes are only ever added.

Replacing a node in place, as usearch can, leaves the links of its former neighbours pointing to a
key that is far from them, and recall falls with every turnover. Here an entry that was overwritten
or deleted stays in the graph as a way to its neighbours; whoever searches ignores it.

Keys are shifted and scaled before they are rounded, which changes no order of distances: 8 bits
then cover the range in which the keys are, whatever their norms.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from mbpa.errors import MissingExtraError
from mbpa.memory.huge_pages import use_huge_pages
from mbpa.memory.ring import Ints

Precision = Literal["float32", "bfloat16", "int8"]
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "int8")

SAMPLE_KEYS = 2048  # from which the range of the keys is estimated
CLIPPED_SHARE = 1e-4  # of numbers may be outside the range of 8 bits
LARGEST_INT8 = 127
FIRST_ADVICE = 10_000  # nodes from which on huge pages are asked for
ADVICE_FACTOR = 1.05  # by which a graph grows until they are asked for again
LARGEST_FLOAT = 1e6  # in units of the range; squares of it must not overflow


class GraphSettings(NamedTuple):
    """Settings of a graph, which cannot be changed once it has nodes."""

    precision: Precision
    connectivity: int
    """Links per node; usearch and the literature call it M."""
    expansion_add: int
    """Candidates considered for the links of a new node (efConstruction)."""


class Graph:
    """A graph with its own shift and scale of keys; not thread-safe.

    Args:
        settings: of this graph.
        sample: some keys like those that will be added; at least one.
    """

    def __init__(self, settings: GraphSettings, sample: Float[Tensor, "N D"]) -> None:
        rows = torch.linspace(0, len(sample) - 1, min(len(sample), SAMPLE_KEYS)).long()
        numbers = sample[rows].double().numpy()
        center = numbers.mean(0)
        spread = np.abs(numbers - center).ravel()
        place = int((1 - CLIPPED_SHARE) * (len(spread) - 1))
        reach = float(np.partition(spread, place)[place])
        if not reach:  # all keys are equal, or nearly all: assume that others have their size
            reach = float(np.abs(numbers).max()) or 1.0
        self._setup(settings, center, reach)
        self._index = _make_index(settings, sample.shape[1])

    def _setup(self, settings: GraphSettings, center: NDArray[np.float64], reach: float) -> None:
        self.settings = settings
        self._center, self._reach = center, reach
        self._shift = torch.from_numpy(center)
        self.is_sealed = False
        """Whether nothing may be added any more."""
        self._next_advice = FIRST_ADVICE
        self.live = 0
        """Number of nodes whose entries are still in the memory; kept by the memory."""

    def __len__(self) -> int:
        return len(self._index)

    def add(self, labels: Ints, keys: Float[Tensor, "N D"]) -> None:
        """Add nodes; no label may be in the graph already."""
        if len(labels):
            # With several threads, usearch leaves a few nodes that no search can find.
            self._index.add(labels.astype(np.uint64), self._round(keys), threads=1)
            if len(self) >= self._next_advice:
                use_huge_pages()
                self._next_advice = math.ceil(ADVICE_FACTOR * len(self))

    def search(
        self, queries: Float[Tensor, "B D"], count: int, *, expansion: int, threads: int
    ) -> Int[np.ndarray, "B J"]:
        """Return the labels of about the `count` nearest nodes of each query; −1 for none."""
        self._index.expansion_search = expansion
        found = self._index.search(self._round(queries), min(count, len(self)), threads=threads)
        labels: Ints = found.keys.reshape(len(queries), -1).astype(np.int64)
        if len(queries) > 1:
            labels[np.arange(labels.shape[1]) >= found.counts[:, None]] = -1
        return labels

    def _round(self, keys: Float[Tensor, "N D"]) -> NDArray[Any]:
        wide = torch.float64 if keys.dtype == torch.float64 else torch.float32
        scaled = (keys.to(wide) - self._shift.to(wide)) / self._reach
        if self.settings.precision == "int8":
            scaled = scaled.mul_(LARGEST_INT8).round_().clamp_(-LARGEST_INT8, LARGEST_INT8)
            return scaled.to(torch.int8).numpy()
        return scaled.clamp_(-LARGEST_FLOAT, LARGEST_FLOAT).float().numpy()

    # Copying and saving

    def __getstate__(self) -> dict[str, Any]:
        nodes = bytes(self._index.save())
        return {**vars(self), "_index": nodes, "is_sealed": False}  # a copy is in main memory

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._index = _make_index(self.settings, len(self._center))
        if state["_index"]:
            self._index.load(state["_index"])
            self._index.expansion_add = self.settings.expansion_add  # which loading forgets

    def save(self, path: Path) -> dict[str, Any]:
        """Write the nodes to a file, and return what `load` needs besides, as JSON values."""
        self._index.save(path)
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        return {"settings": list(self.settings), "reach": self._reach, "nodes": len(self)}

    @property
    def center(self) -> Float[Tensor, "D"]:
        """The point that keys are shifted by; `load` needs it."""
        return torch.from_numpy(self._center)

    @classmethod
    def load(
        cls, path: Path, described: dict[str, Any], center: Float[Tensor, "D"], *, mmap: bool
    ) -> Self:
        """Load a graph; if mapped into memory, nothing may be added to it."""
        graph = cls.__new__(cls)
        settings = GraphSettings(*described["settings"])
        graph._setup(settings, center.numpy(), described["reach"])
        graph._index = _make_index(settings, len(center))
        if mmap:
            graph._index.view(path)
        else:
            graph._index.load(path)
            graph._index.expansion_add = settings.expansion_add  # which loading forgets
        graph.is_sealed = mmap
        if len(graph) != described["nodes"]:
            raise ValueError(f"{path} must have {described['nodes']} nodes, got {len(graph)}")
        return graph


def require_usearch() -> None:
    """Raise `MissingExtraError` if usearch is not installed."""
    try:
        import usearch.index  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("usearch", "graph") from error


def _make_index(settings: GraphSettings, key_size: int) -> Any:
    from usearch.index import Index

    kinds = {"float32": "f32", "bfloat16": "bf16", "int8": "i8"}
    return Index(
        ndim=key_size,
        metric="l2sq",
        dtype=kinds[settings.precision],
        connectivity=settings.connectivity,
        expansion_add=settings.expansion_add,
        enable_key_lookups=False,
    )
