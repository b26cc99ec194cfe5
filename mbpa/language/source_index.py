"""The documents whose tokens are in the memory, by name and by the ids of their entries."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from mbpa.language.run_directory import Source


class SourceIndex:
    """Documents in the order in which they were read, without their keys.

    The entries of a document have consecutive ids, from its first id on.
    """

    def __init__(self) -> None:
        self._sources: dict[str, Source] = {}
        self._first_ids: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._sources)

    def __iter__(self) -> Iterator[Source]:
        return iter(self._sources.values())

    def get(self, name: str) -> Source | None:
        """Return a document, or `None` if there is none of this name."""
        return self._sources.get(name)

    def require(self, name: str) -> Source:
        """Return a document; raise `ValueError` if there is none of this name."""
        if name not in self._sources:
            known = ", ".join(list(self._sources)[:5]) or "none"
            raise ValueError(f"source must be one that was read ({known}), got {name!r}")
        return self._sources[name]

    def add(self, source: Source, first_id: int) -> None:
        """Add a document whose entries were written last."""
        keys = source.keys.new_empty(len(source.keys), 0)  # the memory holds them
        self._sources[source.name] = replace(source, keys=keys, summaries=None)
        self._first_ids[source.name] = first_id

    def remove(self, name: str) -> None:
        """Remove a document."""
        del self._sources[name], self._first_ids[name]

    def renumber(self, name: str, number: int) -> None:
        """Set the number under which a document is stored."""
        self._sources[name] = replace(self._sources[name], number=number)

    def list_ids(self, name: str) -> Int[Tensor, "N"]:
        """Return the ids of a document's entries."""
        first = self._first_ids[name]
        return torch.arange(first, first + len(self._sources[name].keys))

    def locate(self, entry: int) -> tuple[Source, int]:
        """Return the document of an entry, and the position of its token there."""
        names, firsts = list(self._first_ids), list(self._first_ids.values())  # both ascend
        at = bisect.bisect_right(firsts, entry) - 1
        return self._sources[names[at]], entry - firsts[at] + 1
