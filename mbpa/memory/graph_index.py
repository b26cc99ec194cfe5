"""Graphs of nearest neighbours (HNSW, by usearch) to which nodes are only ever added.

Replacing a node in place, as usearch can, leaves the links of its former neighbours pointing to a
key that is far from them, and recall falls with every turnover. Here an entry that was overwritten
or deleted stays in the graph as a way to its neighbours; whoever searches ignores it.

A graph consists of parts of about the same size, each an index of its own, which threads fill and
search side by side. With two parts on two cores, a million entries are added in two thirds of the
time, and a search takes about 60% of the time.

Keys are shifted and scaled before they are rounded, which changes no order of distances: 8 bits
then cover the range in which the keys are, whatever their norms.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeVar

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
Result = TypeVar("Result")

SLOT_BITS = 28  # of a label; the others are a serial number
SPARE_CANDIDATES = 1.5  # searched for per candidate needed: rounded copies mix up near ones
RANKED_CANDIDATES = 2  # ranked at most per candidate needed; parts and graphs find more together
SAMPLE_KEYS = 2048  # from which the range of the keys is estimated
CLIPPED_SHARE = 1e-4  # of numbers may be outside the range of 8 bits
LARGEST_INT8 = 127
FIRST_ADVICE = 10_000  # nodes from which on huge pages are asked for
ADVICE_FACTOR = 1.05  # by which a graph grows until they are asked for again
LARGEST_FLOAT = 1e6  # in units of the range; squares of it must not overflow
MAX_DEVIATIONS = 3.0  # standard deviations by which a part's nearest nodes may exceed its share
HASH_FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # those of SplitMix64


class GraphSettings(NamedTuple):
    """Settings of a graph, which cannot be changed once it has nodes."""

    precision: Precision
    connectivity: int
    """Links per node; usearch and the literature call it M."""
    expansion_add: int
    """Candidates considered for the links of a new node (efConstruction)."""
    parts: int = 1
    """Indexes over which nodes are distributed."""

    def widen(self, needed: int) -> int:
        """Return how many candidates to search for."""
        return math.ceil(SPARE_CANDIDATES * needed) if self.precision == "int8" else needed


def get_slots(labels: Ints) -> Ints:
    """Return the slots in these labels; any slot if a label is −1."""
    slots: Ints = labels & ((1 << SLOT_BITS) - 1)
    return slots


def get_serials(labels: Ints) -> Ints:
    """Return the serial numbers in these labels."""
    serials: Ints = labels >> SLOT_BITS
    return serials


class Found(NamedTuple):
    """Nodes that searches found for B queries."""

    labels: Int[np.ndarray, "B J"]
    """−1 for none."""
    distances: Float[np.ndarray, "B J"]
    """Squared, of the rounded copies of the keys."""


def join_found(found: Sequence[Found]) -> Found:
    """Return what several searches for the same queries found."""
    return Found(*(np.concatenate(each, 1) for each in zip(*found, strict=True)))


def drop_stale(found: Found, labels: Ints) -> None:
    """Remove candidates that were overwritten or deleted.

    Args:
        found: candidates, changed in place.
        labels: label of the current entry in each slot, or −1.
    """
    slots = get_slots(found.labels) % len(labels)
    is_stale = (found.labels < 0) | (labels[slots] != found.labels)
    found.labels[is_stale], found.distances[is_stale] = -1, np.inf


def keep_nearest(found: Found, count: int) -> Int[np.ndarray, "B J"]:
    """Return the labels of at most `count` nodes per query, in any order."""
    if found.labels.shape[1] <= count:
        return found.labels
    nearest = np.argpartition(found.distances, count - 1, 1)[:, :count]
    return np.take_along_axis(found.labels, nearest, 1)


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
        self._parts = _make_parts(settings, sample.shape[1])

    def _setup(self, settings: GraphSettings, center: NDArray[np.float64], reach: float) -> None:
        self.settings = settings
        self._center, self._reach = center, reach
        self._shift = torch.from_numpy(center)
        self.is_sealed = False
        """Whether nothing may be added any more."""
        self._next_advice = FIRST_ADVICE
        self.live = 0
        """Number of nodes whose entries are still in the memory; kept by the memory."""
        self.own_widths: tuple[int, int] | None = None
        """Widths of searches for near and for far queries, if they are not those that the memory
        has for all graphs; kept by the memory.
        """

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def add(
        self, labels: Ints, keys: Float[Tensor, "N D"], *, use_all_threads: bool = True
    ) -> None:
        """Add nodes; no label may be in the graph already.

        Args:
            labels: one per node.
            keys: keys of shape (N, D).
            use_all_threads: fill the parts side by side, in one thread each; otherwise one by one.
        """
        if not len(labels):
            return
        rounded, unsigned = self._round(keys), labels.astype(np.uint64)
        place = _spread(unsigned, len(self._parts))

        def fill(number: int) -> None:
            chosen = place == number
            if chosen.any():
                # With several threads, usearch leaves a few nodes that no search can find.
                self._parts[number].add(unsigned[chosen], rounded[chosen], threads=1)

        _run_for_each(
            fill, range(len(self._parts)), side_by_side=use_all_threads and len(labels) > 1
        )
        if len(self) >= self._next_advice:
            use_huge_pages()
            self._next_advice = math.ceil(ADVICE_FACTOR * len(self))

    def search_live(
        self,
        queries: Float[Tensor, "B D"],
        count: int,
        *,
        width: int,
        live: int,
        entries: int,
        threads: int,
    ) -> Found:
        """Return so many of the nearest nodes that about `count` of them are live.

        The search is only wider if there are more nodes than entries in the memory: otherwise the
        nearest live nodes are as near to the query among all nodes as they would be if the others
        were live, too.

        Args:
            queries: queries of shape (B, D).
            count: number of live nodes, of all parts together.
            width: candidates considered by the search of each part.
            live: number of nodes that are not stale.
            entries: number of entries in the memory, in this graph or not.
            threads: as for `search`.
        """
        nodes = len(self)
        excess = max(1.0, nodes / max(1, entries))
        more = math.ceil((2 - live / nodes) * excess * count)
        return self.search(queries, more, expansion=math.ceil(excess * width), threads=threads)

    def search(
        self, queries: Float[Tensor, "B D"], count: int, *, expansion: int, threads: int
    ) -> Found:
        """Return about the `count` nearest nodes of each query.

        Args:
            queries: queries of shape (B, D).
            count: number of nodes, of all parts together.
            expansion: candidates considered by the search of each part, or more if more are needed.
            threads: threads that search a part. With one, all parts are searched side by side,
                otherwise one after the other.
        """
        rounded, share = self._round(queries), 1 / len(self._parts)
        beyond = self._measure_beyond(queries)
        most = math.ceil(count * share + MAX_DEVIATIONS * math.sqrt(count * share * (1 - share)))

        def find(part: Any) -> Found:
            shape = len(queries), min(most, count, len(part))
            part.expansion_search = max(expansion, shape[1])
            found = part.search(rounded, shape[1], threads=threads)
            keys = found.keys.reshape(len(queries), -1)  # for one query, only what was found
            counts = found.counts if len(queries) > 1 else np.array([keys.shape[1]])
            is_found = np.arange(keys.shape[1]) < counts[:, None]
            near = found.distances.reshape(keys.shape)[is_found].astype(np.float64)
            labels, distances = np.full(shape, -1, np.int64), np.full(shape, np.inf)
            labels[:, : keys.shape[1]][is_found] = keys[is_found]
            distances[:, : keys.shape[1]][is_found] = near * self._unit**2
            return Found(labels, distances + beyond[:, None])

        used = [part for part in self._parts if len(part)]
        found = _run_for_each(find, used, side_by_side=threads == 1)
        return join_found(found)

    @property
    def _unit(self) -> float:
        """The length that is one in the copies of keys."""
        return self._reach / LARGEST_INT8 if self.settings.precision == "int8" else self._reach

    def _measure_beyond(self, queries: Float[Tensor, "B D"]) -> Float[np.ndarray, "B"]:
        """Return the squared distance of each query from the range of the copies.

        Copies cannot leave this range, so a query is at least so much farther away from all nodes
        than its own copy.
        """
        largest = self._reach if self.settings.precision == "int8" else LARGEST_FLOAT * self._reach
        shifted = (queries.double() - self._shift).abs_()
        beyond: Float[np.ndarray, "B"] = (shifted - largest).clamp_min_(0).square_().sum(1).numpy()
        return beyond

    def _round(self, keys: Float[Tensor, "N D"]) -> NDArray[Any]:
        wide = torch.float64 if keys.dtype == torch.float64 else torch.float32
        scaled = (keys.to(wide) - self._shift.to(wide)) / self._reach
        if self.settings.precision == "int8":
            scaled = scaled.mul_(LARGEST_INT8).round_().clamp_(-LARGEST_INT8, LARGEST_INT8)
            return scaled.to(torch.int8).numpy()
        return scaled.clamp_(-LARGEST_FLOAT, LARGEST_FLOAT).float().numpy()

    # Copying and saving

    def __getstate__(self) -> dict[str, Any]:
        nodes = [bytes(part.save()) for part in self._parts]
        state = {**vars(self), "_parts": nodes, "is_sealed": False}  # a copy is in main memory
        del state["_shift"]  # a tensor would be put into shared memory on its way to a new process
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._shift = torch.from_numpy(self._center)
        self._parts = _make_parts(self.settings, len(self._center))
        for part, nodes in zip(self._parts, state["_parts"], strict=True):
            if nodes:
                part.load(nodes)
                part.expansion_add = self.settings.expansion_add  # which loading forgets

    def save(self, paths: Sequence[Path]) -> dict[str, Any]:
        """Write each part to a file; return what else `load` needs, as JSON values."""
        for part, path in zip(self._parts, paths, strict=True):
            part.save(path)
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        described = {"settings": list(self.settings), "reach": self._reach, "nodes": len(self)}
        return {**described, "own_widths": self.own_widths}

    @property
    def center(self) -> Float[Tensor, "D"]:
        """The point that keys are shifted by; `load` needs it."""
        return torch.from_numpy(self._center)

    @classmethod
    def load(
        cls,
        paths: Sequence[Path],
        described: dict[str, Any],
        center: Float[Tensor, "D"],
        *,
        mmap: bool,
    ) -> Self:
        """Load a graph; if mapped into memory, nothing may be added to it."""
        graph = cls.__new__(cls)
        settings = GraphSettings(*described["settings"])
        graph._setup(settings, center.numpy(), described["reach"])
        graph._parts = _make_parts(settings, len(center))
        for part, path in zip(graph._parts, paths, strict=True):
            if mmap:
                part.view(path)
            else:
                part.load(path)
                part.expansion_add = settings.expansion_add  # which loading forgets
        graph.is_sealed = mmap
        if own_widths := described.get("own_widths"):  # older files have none
            graph.own_widths = own_widths[0], own_widths[1]
        if len(graph) != described["nodes"]:
            files = ", ".join(map(str, paths))
            raise ValueError(f"{files} must have {described['nodes']} nodes, got {len(graph)}")
        return graph


def require_usearch() -> None:
    """Raise `MissingExtraError` if usearch is not installed."""
    try:
        import usearch.index  # noqa: F401 (checks that it is installed)
    except ImportError as error:
        raise MissingExtraError("usearch", "graph") from error


def _make_parts(settings: GraphSettings, key_size: int) -> list[Any]:
    from usearch.index import Index

    kinds = {"float32": "f32", "bfloat16": "bf16", "int8": "i8"}
    return [
        Index(
            ndim=key_size,
            metric="l2sq",
            dtype=kinds[settings.precision],
            connectivity=settings.connectivity,
            expansion_add=settings.expansion_add,
            enable_key_lookups=False,
        )
        for _ in range(settings.parts)
    ]


def _spread(labels: NDArray[np.uint64], parts: int) -> Ints:
    """Return a part for each label, equally often but for one, in an order without a pattern.

    Equally often, because those who wait for a batch wait for its largest share.
    """
    mixed = _hash(labels)
    ranks = mixed.argsort().argsort()
    return (ranks + int(mixed[0] % np.uint64(parts))) % parts


def _hash(labels: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a hash of each label, in which no pattern of the labels remains."""
    shift = np.uint64(31)
    mixed = labels ^ (labels >> shift)
    for factor in HASH_FACTORS:
        mixed = mixed * np.uint64(factor)
        mixed = mixed ^ (mixed >> shift)
    return mixed


def _run_for_each(
    work: Callable[[Any], Result], items: Sequence[Any], *, side_by_side: bool
) -> list[Result]:
    """Return the result for each item, computed in a thread per item or one after the other.

    If threads cannot be started, the calling thread does their work.
    """
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def run(place: int) -> None:
        try:
            results[place] = work(items[place])
        except BaseException as error:
            errors.append(error)

    threads = []
    for place in range(1, len(items) if side_by_side else 0):
        thread = threading.Thread(target=run, args=(place,), name="mbpa-graph-part", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there are too many, or the interpreter is ending
            break
        threads.append(thread)
    for place in (0, *range(1 + len(threads), len(items))):
        run(place)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[place] for place in range(len(items))]
