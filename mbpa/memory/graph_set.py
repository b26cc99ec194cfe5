"""The graphs of a memory: which node stands for the entry in each slot, and how they are searched.

A node has a label: a serial number and the slot of its entry. It is current if its label is the one
that the slot has now; all others are stale. New nodes go to the youngest graph, and a graph without
current nodes is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mbpa.memory.graph_index import (
    SLOT_BITS,
    Found,
    Graph,
    GraphSettings,
    drop_stale,
    join_found,
)
from mbpa.memory.graph_widths import Widths, scale_widths
from mbpa.memory.ring import Ints

MAX_SERIAL = 1 << (63 - SLOT_BITS)
QUERIES_PER_THREAD = 8  # fewer are searched for by one thread
MOST_SHARE = 0.9  # of the entries; the widths that a graph of so many needs are used for all graphs


class Added(NamedTuple):
    """Nodes of a graph that do not stand for the entries in their slots yet."""

    graph: Graph
    number: int
    labels: Ints


class GraphSet:
    """Graphs whose nodes are the entries of one memory; not thread-safe.

    Args:
        settings: of all graphs.
        capacity: number of slots of the memory.
        least_width: least number of candidates that a search considers.
    """

    def __init__(self, settings: GraphSettings, capacity: int, least_width: int) -> None:
        self.settings, self.least_width = settings, least_width
        self.widths = Widths(least_width, least_width)
        """How widely graphs are searched that have no widths of their own."""
        self.entries = 0
        """Number of entries in the memory."""
        self._forget(capacity)

    def forget(self) -> None:
        """Drop all graphs; the entries are then in none. The arrays are new ones."""
        self._forget(len(self.labels))

    def _forget(self, capacity: int) -> None:
        self._graphs: dict[int, Graph] = {}  # by number, the youngest last
        self.labels: Ints = np.full(capacity, -1, np.int64)
        """Label of the node that stands for the entry in each slot; −1 for none."""
        self._homes: Ints = np.full(capacity, -1, np.int64)  # number of its graph; −1 for none
        self.unindexed = self.entries
        """Number of entries that are in no graph."""
        self.changed = 0
        """Number of nodes that were added or became stale since the last `swap`."""
        self.serial = self._next_number = 0

    def drop_all(self) -> None:
        """Drop all graphs of a memory without entries."""
        self._graphs.clear()

    def __len__(self) -> int:
        """Return the number of graphs."""
        return len(self._graphs)

    @property
    def graphs(self) -> list[Graph]:
        """The graphs, the youngest last."""
        return list(self._graphs.values())

    @property
    def numbers(self) -> list[int]:
        """Numbers of the graphs, by which `swap` finds them later."""
        return list(self._graphs)

    @property
    def nodes(self) -> int:
        """Number of nodes of all graphs."""
        return sum(map(len, self._graphs.values()))

    @property
    def stale(self) -> int:
        """Number of nodes whose entries were overwritten or deleted."""
        return sum(len(graph) - graph.live for graph in self._graphs.values())

    # Entries come and go

    def has_labels_for(self, count: int) -> bool:
        """Return whether there are serial numbers for so many nodes more."""
        return self.serial + count < MAX_SERIAL - len(self.labels)

    def begin(self, sample: Float[Tensor, "N D"]) -> None:
        """Begin a graph for what will be added.

        Args:
            sample: some keys like those that will be added.
        """
        self._graphs[self._next_number] = Graph(self.settings, sample)
        self._next_number += 1

    def add(
        self,
        slots: Ints,
        keys: Float[Tensor, "N D"],
        draw_sample: Callable[[], Float[Tensor, "M D"]],
    ) -> Added:
        """Add nodes to the youngest graph; `place` makes them stand for the entries in their slots.

        Args:
            slots: one per node.
            keys: keys of shape (N, D).
            draw_sample: returns some keys, if another graph has to be begun.
        """
        young = next(reversed(self._graphs.values()))
        if young.is_sealed or len(young) >= len(self.labels):
            self.begin(draw_sample())
        number, young = next(reversed(self._graphs.items()))
        labels = self._make_labels(slots)
        young.add(labels, keys)
        self.changed += len(labels)
        return Added(young, number, labels)

    def place(self, slots: Ints, added: Added | None) -> None:
        """Take note of new entries in empty slots, and of their nodes if they have any."""
        self.entries += len(slots)
        if added is None:
            self.unindexed += len(slots)
            return
        self.labels[slots], self._homes[slots] = added.labels, added.number
        added.graph.live += len(slots)

    def remove(self, slots: Ints) -> None:
        """Make the nodes of the entries in these slots stale, and drop graphs of stale nodes only.

        Args:
            slots: slots that hold entries.
        """
        numbers, counts = np.unique(self._homes[slots], return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            if number < 0:
                self.unindexed -= count
                continue
            self._graphs[number].live -= count
            if not self._graphs[number].live and number != next(reversed(self._graphs)):
                del self._graphs[number]
        self.labels[slots] = self._homes[slots] = -1
        self.entries -= len(slots)
        self.changed += len(slots)

    def label(self, slots: Ints) -> Ints:
        """Return the labels of the entries in these slots, new ones if they have none."""
        unknown = slots[self.labels[slots] < 0]
        self.labels[unknown] = self._make_labels(unknown)
        return self.labels[slots]

    def list_unindexed(self, slots: Ints) -> Bool[np.ndarray, "N"]:
        """Return which of the entries in these slots are in no graph."""
        return self._homes[slots] < 0

    def swap(self, graph: Graph, old: list[int], slots: Ints, labels: Ints) -> None:
        """Put a new graph in the place of others.

        Args:
            graph: the new graph.
            old: numbers of the graphs that it replaces.
            slots: slots of its nodes.
            labels: labels of its nodes; those of slots that have another label by now are stale.
        """
        slots = slots[self.labels[slots] == labels]
        self.unindexed -= int(self.list_unindexed(slots).sum())
        number, graph.live = self._next_number, len(slots)
        self._next_number += 1
        self._homes[slots] = number
        # The young graph last, or none if nothing was written meanwhile.
        young = {n: each for n, each in self._graphs.items() if n not in old and len(each)}
        self._graphs = {number: graph, **young}
        self.changed = sum(map(len, young.values()))

    def _make_labels(self, slots: Ints) -> Ints:
        labels: Ints = ((self.serial + np.arange(len(slots))) << SLOT_BITS) | slots
        self.serial += len(slots)
        return labels

    # Searching

    def find(
        self, queries: Float[Tensor, "B D"], count: int
    ) -> tuple[Found, Bool[np.ndarray, "B"]]:
        """Return candidates for each query, and which queries are outside.

        Args:
            queries: queries of shape (B, D).
            count: least number of candidates among the current entries, if so many can be found.
        """
        found = self.search(queries, count)
        used = [self.widths.of_searches]
        used += [each.own_widths for each in self._graphs.values() if each.own_widths]
        near, far = (min(near for near, _ in used), max(far for _, far in used))
        widths = self.widths._replace(near=near, far=far)
        is_far, is_outside = widths.find_far_and_outside(found.distances, count)
        if is_far.any():
            again = queries[torch.from_numpy(is_far)]
            found.labels[is_far], found.distances[is_far] = self.search(again, count, are_far=True)
        return found, is_outside

    def search(self, queries: Float[Tensor, "B D"], count: int, *, are_far: bool = False) -> Found:
        """Search all graphs, with the width for near or for far queries."""
        threads = 1 if len(queries) < QUERIES_PER_THREAD else torch.get_num_threads()
        found = join_found(
            [
                graph.search_live(
                    queries,
                    count,
                    width=(graph.own_widths or self.widths.of_searches)[are_far],
                    live=graph.live,
                    entries=self.entries,
                    threads=threads,
                )
                for graph in self._graphs.values()
                if len(graph)
            ]
        )
        drop_stale(found, self.labels)
        return found

    # How widely to search

    def adopt_widths(self, graph: Graph, widths: Widths | None) -> None:
        """Search as widely as was tried out with a new graph, or as before if this is not known.

        If much was written meanwhile, the nearest entries of recent queries tend to be in another
        graph, and those in the new one are farther away and harder to find. This says nothing about
        other graphs.
        """
        before = self.widths
        widths = widths or before
        if before.limit is None or widths.limit is None or graph.live > MOST_SHARE * self.entries:
            self.widths = widths
            return
        border, limit = min(before.border, widths.border), max(before.limit, widths.limit)
        self.widths = before._replace(border=border, limit=limit)
        graph.own_widths = widths.of_searches

    def scale_widths(self, factor: float) -> bool:
        """Search all graphs more or less widely; return whether this was possible."""
        least, widths = self.least_width, self.widths.scale(factor, self.least_width)
        has_changed, self.widths = widths != self.widths, widths
        for graph in self._graphs.values():
            if own := graph.own_widths:
                graph.own_widths = scale_widths(own, factor, least)
                has_changed |= graph.own_widths != own
        return has_changed

    def give_up(self) -> None:
        """Have all queries compared with all entries."""
        self.widths = self.widths.give_up(self.least_width)

    # Growing, copying, saving

    def grow(self, capacity: int) -> None:
        """Make room for more slots. The arrays are new ones."""
        self.labels, self._homes = _pad(self.labels, capacity), _pad(self._homes, capacity)

    def number_homes(self, used: int) -> Ints:
        """Return the index in `graphs` of the graph of each entry in the first slots; −1 for none.

        Args:
            used: number of slots.
        """
        places = {number: place for place, number in enumerate(self._graphs)}
        homes = [places.get(number, -1) for number in self._homes[:used].tolist()]
        return np.array(homes, np.int64)

    def restore(
        self,
        graphs: Sequence[Graph],
        labels: Ints,
        homes: Ints,
        is_live: Bool[np.ndarray, "U"],
        serial: int,
    ) -> None:
        """Continue with saved graphs.

        Args:
            graphs: the youngest last.
            labels: label of each of the first slots, or −1.
            homes: index in `graphs` of the graph of each entry, or −1.
            is_live: which of the slots hold an entry.
            serial: next serial number.
        """
        used, capacity = len(labels), len(self.labels)
        self.entries = int(is_live.sum())
        self._forget(capacity)
        self.labels[:used], self._homes[:used] = labels, homes
        self._graphs = dict(enumerate(graphs))
        self.serial, self._next_number = serial, len(graphs)
        for number, graph in self._graphs.items():
            graph.live = int((is_live & (homes == number)).sum())
        self.unindexed = int((is_live & (homes < 0)).sum())

    def __getstate__(self) -> dict[str, Any]:
        """Return the content without the slots that were never used."""
        used = 1 + int(np.flatnonzero(self.labels >= 0).max(initial=-1))
        rows = {"labels": self.labels[:used], "_homes": self._homes[:used]}
        return {**vars(self), **rows, "capacity": len(self.labels)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        capacity = state.pop("capacity")
        vars(self).update(state)
        self.grow(capacity)


def _pad(numbers: Ints, length: int) -> Ints:
    return np.concatenate([numbers, np.full(length - len(numbers), -1, np.int64)])
