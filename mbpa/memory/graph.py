"""Approximate nearest neighbours on a CPU, for memories of more than some 100,000 entries.

Candidates come from graphs of the keys; the base class ranks them by their exact distances. A graph
only grows: what is overwritten or deleted stays in it as a stale node (`graph_set`). New entries go
to the youngest graph, and when that has as many nodes as the memory has slots, another is begun. In
a ring the oldest entries go first, so the older graph empties and is dropped. When deletions leave
many stale nodes, or measured recall is too low, a background thread builds one graph of all entries
(`graph_building`), while new ones go to another; then it is swapped for the old ones. Entries that
are in no graph yet (in small memories, and after a bulk load) are found by exhaustive search, which
is exact.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from mbpa.memory import validation
from mbpa.memory.background import BackgroundThread
from mbpa.memory.base import Memory
from mbpa.memory.exact import search_all
from mbpa.memory.graph_building import GraphBuilder, StoppedError
from mbpa.memory.graph_files import SavedGraphs, read_description, read_saved, write_saved
from mbpa.memory.graph_index import (
    PRECISIONS,
    RANKED_CANDIDATES,
    SAMPLE_KEYS,
    SLOT_BITS,
    Graph,
    GraphSettings,
    Precision,
    get_slots,
    keep_nearest,
    require_usearch,
)
from mbpa.memory.graph_set import GraphSet
from mbpa.memory.graph_widths import GraphContent, Widths
from mbpa.memory.neighbors import Candidates, Holdings
from mbpa.memory.ranking import gather_rows
from mbpa.memory.recall import (
    RecallMeter,
    Sample,
    compare_samples,
    count_hits,
    find_true_neighbors,
    measure_distances,
)
from mbpa.memory.ring import Ints, Ring
from mbpa.memory.schema import parse_schema

MAX_GRAPHS = 3
MAX_PARTS = 4  # by default
MIN_STALE_NODES = 64
WIDENING, NARROWING = 1.25, 1 / 1.12  # factors of the width of searches
SPARE_SHARE = 0.5  # of the misses that the target allows; with fewer, searches are narrowed
STALE_SHARE = 0.25  # of nodes from which on a rebuild may raise recall
POOR_SHARE = 0.9  # of the target; if recall is below, any change may be the reason
MAX_OUTSIDE_SHARE = 0.1  # of the queries; with more, widths are tried out again on these

log = logging.getLogger("mbpa.memory")

_ROWS = ("_keys", "_values", "_norms")  # one per slot
_OWN = ("_thread", "_generation", "_meter")  # not in a copy


class GraphMemory(Memory):
    """A memory that finds most of the nearest entries, much faster than by comparing with all.

    Distances, their order, ids, overwriting and deletion are exact, as in any memory; only which
    entries are found is approximate. `recall` says how many. A query that is much farther from all
    entries than others is compared with all of them. So are all queries if no search of the graph
    reaches the target, as with very many copies of one key.

    Args:
        capacity: maximum number of entries; when full, the oldest are overwritten first.
        key_dim: size or shape of a key.
        value_shape: shape of one value; `()` for class labels.
        value_dtype: an integer dtype for class labels, a floating one for regression targets.
        dtype: dtype in which keys are stored and distances computed.
        device: must be a CPU.
        precision: of the copies of keys in the graph, which only choose candidates. 8 bits are the
            fastest and smallest, and lose little, unless keys have one or two dimensions or a few
            are hundreds of times as large as the others.
        target_recall: share of the true nearest neighbours to find. While the measured share is
            lower, graphs are rebuilt or searched more widely.
        exact_below: number of entries up to which reads compare with all of them, and are exact.
        connectivity: links per node (M).
        expansion_add: candidates considered for the links of a new node (efConstruction).
        expansion_search: least number of candidates that a search considers (ef). How many are
            needed is tried out when a graph is built, and corrected by recall; see `widths`.
        parts: number of indexes over which a graph is distributed; as many threads fill and search
            them side by side. Default: the number of threads that torch uses, at most 4.
        background: rebuild in a thread. Otherwise the call that makes it necessary waits.

    Example:
        >>> import torch, mbpa
        >>> memory = mbpa.GraphMemory(capacity=1_000_000, key_dim=384)
        >>> ids = memory.write(torch.randn(1_000, 384), torch.zeros(1_000, dtype=torch.int64))
        >>> memory.read(torch.randn(2, 384), k=50).ids.shape
        torch.Size([2, 50])
    """

    _saved: SavedGraphs
    """Content to attach to; only while `load` runs."""
    _graphs: GraphSet

    def __init__(
        self,
        capacity: int,
        key_dim: int | Sequence[int],
        *,
        value_shape: Sequence[int] = (),
        value_dtype: torch.dtype = torch.int64,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        precision: Precision = "int8",
        target_recall: float = 0.98,
        exact_below: int = 10_000,
        connectivity: int = 24,
        expansion_add: int = 128,
        expansion_search: int = 64,
        parts: int | None = None,
        background: bool = True,
    ) -> None:
        require_usearch()
        if precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
        if not 0 < target_recall < 1:
            raise ValueError(f"target_recall must be between 0 and 1, got {target_recall}")
        _require_cpu(torch.device(device))
        _require_slots(validation.count("capacity", capacity))
        self.target_recall = target_recall
        self.exact_below: int = validation.count("exact_below", exact_below, least=0)
        self._settings = GraphSettings(
            precision,
            validation.count("connectivity", connectivity, least=2),
            validation.count("expansion_add", expansion_add),
            min(MAX_PARTS, torch.get_num_threads())
            if parts is None
            else validation.count("parts", parts),
        )
        self._least_width: int = validation.count("expansion_search", expansion_search)
        self._background = background
        self._meter = RecallMeter()
        self.rebuilds: int = 0
        """Number of rebuilds that were completed."""
        super().__init__(
            capacity,
            key_dim,
            value_shape=value_shape,
            value_dtype=value_dtype,
            dtype=dtype,
            device=device,
        )
        self._thread = BackgroundThread(self._lock)

    # The state of the graphs

    @property
    def recall(self) -> float | None:
        """Share of the true nearest entries found by recent reads; `None` before any was measured.

        A sample of live queries is compared with an exhaustive search in the background. It starts
        anew whenever the graphs were rebuilt or are searched more widely. An entry counts as found
        if it is at most as far away as the true k-th neighbour. Takes no lock.
        """
        return self._meter.recall

    @property
    def is_indexed(self) -> bool:
        """Whether reads use the graphs. Otherwise they compare with all entries, and are exact."""
        with self._lock:
            return bool(self._graphs) and not self._graphs.unindexed

    @property
    def stale(self) -> int:
        """Number of nodes whose entries were overwritten or deleted."""
        with self._lock:
            return self._graphs.stale

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of the constructor beyond those of any memory, as JSON values."""
        return {
            **self._settings._asdict(),
            "target_recall": self.target_recall,
            "exact_below": self.exact_below,
            "expansion_search": self._least_width,
            "background": self._background,
        }

    @property
    def widths(self) -> Widths:
        """How many candidates searches consider: for most queries, and for those far away.

        If a graph was built while much was written, only that graph may be searched more widely.
        """
        with self._lock:
            return self._graphs.widths

    def measure_recall(self, queries: Float[Tensor, "B *D"], k: int) -> float:
        """Return the share of the true `k` nearest entries of these queries that a read finds.

        Args:
            queries: queries of shape (B, *D), compared with all entries.
            k: number of neighbours per query.
        """
        with self._lock:
            found = self.read(queries, k, keys_for=0)
            flat, count = self._parse_queries(queries), found.mask.shape[1]
            if not found.mask.numel():
                return 1.0
            used = self._used_slots
            keys, norms = self._keys[:used], self._norms[:used]
            _, true = find_true_neighbors(keys, norms, flat, count)
            hits = count_hits(measure_distances(keys, flat, found.slots), true)
            return float(hits.double().mean()) / count

    def rebuild(self, *, wait: bool = True) -> None:
        """Build one graph of all live entries, in which no deleted key is left.

        Args:
            wait: wait until it is in use. Do not hold the lock then.
        """
        self.wait()
        with self._lock:
            if not self._thread.is_running:
                self._begin_rebuild()
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait for what runs in the background; raise an error if it failed.

        Do not hold the lock, which the background needs to finish.
        """
        self._thread.wait()

    def close(self) -> None:
        """End what runs in the background; raise an error if it failed. Entries are kept."""
        self._thread.close()

    # Saving

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Save entries and graphs to a directory atomically; reads and writes wait.

        The graphs include rounded copies of stale keys, those of deleted entries among them. Call
        `rebuild` before if they must not reach the disk.

        Args:
            directory: directory to write; replaced as a whole if it exists.
        """
        with self._lock:
            self._prepare(change=False)
            used, slots = self._used_slots, self._ring.oldest(len(self))
            tensors = {
                "ids": torch.from_numpy(self._ring.ids(slots)),
                "slots": torch.from_numpy(slots),
                "values": self._values[:used],
                "norms": self._norms[:used],
                "labels": torch.from_numpy(self._graphs.labels[:used]),
                "homes": torch.from_numpy(self._graphs.number_homes(used)),
            }
            description = {
                "schema": self.schema,
                "settings": self.settings,
                "widths": list(self._graphs.widths),
                "next_id": self.next_id,
                "serial": self._graphs.serial,
            }
            tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
            saved = SavedGraphs(description, tensors, self._keys, self._graphs.graphs)
            write_saved(directory, saved, used)

    @classmethod
    def load(cls, directory: str | os.PathLike[str], *, mmap: bool = False) -> Self:
        """Load a memory that `save` wrote.

        Args:
            directory: in which it was saved; it is not changed by later writes.
            mmap: map keys and graphs into memory, so that only what is used is read from the disk.
                Checksums are then not verified.
        """
        described = read_description(directory)
        memory = cls.__new__(cls)
        memory._saved = read_saved(directory, described, mmap=mmap)
        # The constructor is called by hand, since it continues from what was saved.
        memory.__init__(**parse_schema(described["schema"]), **described["settings"])  # type: ignore[misc]
        return memory

    def _get_content(self) -> dict[str, Any]:
        used = self._used_slots
        rows = {name: getattr(self, name)[:used] for name in _ROWS}
        copied = {name: row.clone() for name, row in rows.items()}
        return {**self._copy_attributes("_slot_ids", *_OWN, *_ROWS), **copied}

    def _set_content(self, content: dict[str, Any]) -> None:
        rows = {name: content.pop(name) for name in _ROWS}
        self._thread = BackgroundThread(self._lock)
        self._generation, self._meter = object(), RecallMeter()
        super()._set_content(content)
        self._allocate()
        for name, stored in rows.items():
            getattr(self, name)[: len(stored)] = stored

    def _attach(self) -> Holdings | None:
        saved: SavedGraphs | None = vars(self).pop("_saved", None)
        if saved is None:
            return None
        tensors, used = saved.tensors, len(saved.tensors["values"])
        self._clear()
        self._keys = saved.keys
        self._values[:used], self._norms[:used] = tensors["values"], tensors["norms"]
        self._graphs.restore(
            saved.graphs,
            tensors["labels"].numpy(),
            tensors["homes"].numpy(),
            tensors["norms"].isfinite().numpy(),
            saved.description["serial"],
        )
        if widths := saved.description.get("widths"):  # not in older ones
            self._graphs.widths = Widths(*widths)
        return Holdings(tensors["ids"], saved.description["next_id"], tensors["slots"])

    # The hooks of `Memory`

    def _clear(self) -> None:
        self._allocate()
        self._graphs = GraphSet(self._settings, self.capacity, self._least_width)
        self._begin_anew()

    def _allocate(self) -> None:
        self._keys = torch.empty(self.capacity, self.key_size, dtype=self.dtype)
        self._values = torch.empty((self.capacity, *self.value_shape), dtype=self.value_dtype)
        self._norms = torch.full((self.capacity,), math.inf, dtype=self.distance_dtype)

    def _put(
        self, slots: Int[Tensor, "N"], keys: Float[Tensor, "N D"], values: Shaped[Tensor, "N *V"]
    ) -> None:
        if not len(slots):
            return
        self._thread.raise_failure()
        places, is_bulk = slots.numpy(), 2 * len(slots) >= self._graphs.entries
        added = None
        if self._graphs and not is_bulk and self._ensure_labels_for(len(places)):
            # The graph first: if that fails, nothing has changed.
            added = self._graphs.add(places, keys, partial(self._draw_keys, None))
        self._remove_nodes(slots)
        self._keys[slots], self._values[slots] = keys, values
        self._norms[slots] = keys.to(self.distance_dtype).square().sum(1)
        self._graphs.place(places, added)
        self._maintain()

    def _get(self, slots: Int[Tensor, "N"]) -> tuple[Float[Tensor, "N D"], Shaped[Tensor, "N *V"]]:
        return self._keys.index_select(0, slots), self._values.index_select(0, slots)

    def _get_keys(self, slots: Int[Tensor, "N"]) -> Float[Tensor, "N D"]:
        return gather_rows(self._keys, slots)

    def _get_values(self, slots: Int[Tensor, "N"]) -> Shaped[Tensor, "N *V"]:
        return self._values.index_select(0, slots)

    def _delete(self, slots: Int[Tensor, "N"]) -> None:
        self._thread.raise_failure()
        self._remove_nodes(slots)
        self._keys[slots] = 0
        self._values[slots] = 0
        self._norms[slots] = math.inf
        self._maintain()

    @property
    def _readable_slot(self) -> int:
        return 0

    def _move(self, capacity: int, device: torch.device) -> None:
        """Grow without moving entries, so that the graphs stay; otherwise start anew."""
        _require_cpu(device)
        _require_slots(capacity)
        if capacity < self.capacity:
            super()._move(capacity, device)
            return
        slots, used, next_id = self._ring.oldest(len(self)), self._used_slots, self._ring.next_id
        held = Holdings(torch.from_numpy(self._ring.ids(slots)), next_id, torch.from_numpy(slots))
        with torch.inference_mode(False):
            keys = torch.empty(capacity, self.key_size, dtype=self.dtype)
            values = torch.empty((capacity, *self.value_shape), dtype=self.value_dtype)
            norms = torch.full((capacity,), math.inf, dtype=self.distance_dtype)
        for grown, now in ((keys, self._keys), (values, self._values), (norms, self._norms)):
            grown[:used] = now[:used]
        self._keys, self._values, self._norms = keys, values, norms
        self._graphs.grow(capacity)
        self._ring = Ring(capacity)
        self._adopt(held)

    # Searching

    def _nearest(self, queries: Float[Tensor, "B D"], k: int) -> Candidates:
        graphs = self._graphs
        if graphs.unindexed or graphs.entries <= self.exact_below or 4 * k >= graphs.entries:
            return self._search_all(queries, k)
        found, is_outside = graphs.find(queries, self._settings.widen(k))
        labels = keep_nearest(found, RANKED_CANDIDATES * k)
        # Without the spare candidates that the base class asks for.
        asked = max(1, (k - 8) * 8 // 9)
        self._meter.offer(queries, labels, asked, graphs.serial, is_outside)
        slots = torch.from_numpy(np.where(labels < 0, -1, get_slots(labels)))
        if is_outside.any():
            rows = torch.from_numpy(is_outside)
            nearest = self._search_all(queries[rows], k).slots
            slots = torch.nn.functional.pad(slots, (0, max(0, k - slots.shape[1])), value=-1)
            slots[rows] = -1
            slots[rows, :k] = nearest
        if self._meter.is_due or self._meter.outside_share > MAX_OUTSIDE_SHARE:
            self._maintain()
        return Candidates(slots, None)

    def _search_all(self, queries: Float[Tensor, "B D"], k: int) -> Candidates:
        used = self._used_slots
        return search_all(self._keys[:used], self._norms[:used], queries, min(k, used))

    # Changing

    def _begin_anew(self) -> None:
        """Take note that there are other graphs now, or none."""
        self._generation = object()  # a rebuild of earlier content must not take effect
        self._wants_rebuild = False
        self._meter.clear()

    def _ensure_labels_for(self, count: int) -> bool:
        """Drop all graphs if there are no labels for so many nodes; return whether they stay."""
        if self._graphs.has_labels_for(count):
            return True
        self._graphs.forget()
        self._begin_anew()
        return False

    def _remove_nodes(self, slots: Int[Tensor, "N"]) -> None:
        """Make the nodes of the entries in these slots stale; some slots may be empty."""
        self._graphs.remove(slots[self._norms[slots].isfinite()].numpy())

    def _draw_keys(self, slots: Int[Tensor, "N"] | None) -> Float[Tensor, "M D"]:
        """Return some of the keys in these slots, by default all live ones, evenly spread."""
        if slots is None:
            slots = self._list_live()
        chosen = slots[:: max(1, len(slots) // SAMPLE_KEYS)]
        return self._keys[chosen]

    def _list_live(self) -> Int[Tensor, "N"]:
        """Return the slots that hold entries."""
        return self._norms.isfinite().nonzero()[:, 0]

    # Rebuilding

    def _maintain(self) -> None:
        """Begin what is due; an error is raised later, since a change is not over yet."""
        self._thread.attempt(self._begin_due_work)

    def _begin_due_work(self) -> None:
        """Begin a rebuild, or a measurement, if one is due and nothing else is running."""
        if not self._thread.is_free:
            return
        graphs, nodes = self._graphs, self._graphs.nodes
        has_many_stale = nodes > 2 * graphs.entries + max(self.exact_below, MIN_STALE_NODES)
        is_due = has_many_stale or len(graphs) > MAX_GRAPHS or self._wants_rebuild
        # If no width was enough, it may be now.
        is_due |= not graphs.widths.are_enough and graphs.changed > STALE_SHARE * nodes
        # Otherwise the new graph would be no better.
        is_due |= graphs.widths.are_enough and self._meter.outside_share > MAX_OUTSIDE_SHARE
        if graphs.entries > self.exact_below and (is_due or graphs.unindexed):
            self._begin_rebuild(only_unindexed=not is_due)
        elif self._meter.is_due:
            self._run(
                partial(self._measure, self._meter.take(), self._share_content(self._used_slots))
            )

    def _begin_rebuild(self, *, only_unindexed: bool = False) -> None:
        """Build a graph of all entries, or of those in none; new ones meanwhile go to another."""
        self._wants_rebuild = False
        live = self._list_live()
        if only_unindexed:
            live = live[torch.from_numpy(self._graphs.list_unindexed(live.numpy()))]
        if not len(live):
            self._graphs.drop_all()
            return
        self._ensure_labels_for(len(live))
        labels = self._graphs.label(live.numpy())
        old = [] if only_unindexed else self._graphs.numbers
        if self._background:
            self._graphs.begin(self._draw_keys(None))
        graph = Graph(self._settings, self._draw_keys(live))
        content = self._share_content(self.capacity)
        self._run(partial(self._rebuild, graph, old, content, live.numpy(), labels))

    def _share_content(self, slots: int) -> GraphContent:
        """Return what work in the background reads without the lock.

        Clearing and resizing replace these arrays, so it goes on reading the old ones.

        Args:
            slots: number of slots to read, from the first.
        """
        labels = self._graphs.labels[:slots]
        return GraphContent(self._generation, self._keys[:slots], self._norms[:slots], labels)

    def _rebuild(
        self,
        graph: Graph,
        old: list[int],
        content: GraphContent,
        slots: Ints,
        labels: Ints,
    ) -> None:
        """Fill a graph without the lock, then swap it for the old ones."""

        def should_stop() -> bool:
            return self._thread.is_stopping or self._generation is not content.generation

        builder = GraphBuilder(graph, content, should_stop, lambda: bool(self._graphs.unindexed))
        try:
            widths = builder.build(
                slots,
                labels,
                self._meter.get_recent,
                least_width=self._least_width,
                target_recall=self.target_recall,
            )
        except StoppedError:
            return
        with self._lock:
            if self._generation is not content.generation:
                return
            self._graphs.swap(graph, old, slots, labels)
            self._change_widths(lambda: self._graphs.adopt_widths(graph, widths))
            self.rebuilds += 1
            self._meter.clear()
            # If nothing of it is left, there was nothing to try widths out with.
            self._wants_rebuild |= self.widths.limit is None and not graph.live

    def _run(self, work: Callable[[], None]) -> None:
        """Run in the background, if allowed. The lock must be held."""
        if self._background:
            self._thread.start(work, then=self._maintain)
        else:
            work()

    # Measuring recall

    def _measure(self, samples: list[Sample], content: GraphContent) -> None:
        """Compare candidates with an exhaustive search, without the lock.

        Entries written since a query was answered are ignored, and so are those overwritten since.
        """
        start = time.perf_counter()
        comparisons = compare_samples(samples, content.keys, content.norms)
        with self._lock:
            if self._generation is not content.generation:
                return
            recalls = [each.measure_recall(self._graphs.labels) for each in comparisons]
            measured = [recall for recall in recalls if recall is not None]
            self._meter.record(measured, time.perf_counter() - start)
            self._act_on_recall()

    def _act_on_recall(self) -> None:
        """Search more widely if recall is too low, less so if it is more than high enough.

        Stale nodes take the place of live ones among the candidates, so if there are many of them,
        the graphs are rebuilt as well. They are also rebuilt if recall is very low and anything has
        changed since they were built: new keys may be out of the range of the copies.
        """
        recall = self._meter.recall
        if recall is None or not self._meter.is_certain:
            return
        missing, error = self.target_recall - recall, self._meter.standard_error
        spare = SPARE_SHARE * (1 - self.target_recall) - (1 - recall + error)
        if missing > error:
            if not self._graphs.scale_widths(WIDENING):  # they are as wide as can be
                self._change_widths(self._graphs.give_up)
            # A rebuild takes long: not for what may be chance.
            is_poor = recall < POOR_SHARE * self.target_recall
            has_many_stale = self._graphs.stale > STALE_SHARE * self._graphs.nodes
            may_help = has_many_stale or (is_poor and self._graphs.changed > 0)
            self._wants_rebuild = missing > 2 * error and may_help
            self._meter.clear()
        elif spare > 0 and self._graphs.scale_widths(NARROWING):
            self._meter.clear()

    def _change_widths(self, change: Callable[[], None]) -> None:
        """Change how widely graphs are searched, and say so if no width is enough any more."""
        were_enough = self._graphs.widths.are_enough
        change()
        if were_enough and not self._graphs.widths.are_enough:
            log.warning(
                "no search of the graph finds %g of the nearest entries: "
                "all queries are compared with all %d entries",
                self.target_recall,
                self._graphs.entries,
            )


def _require_cpu(device: torch.device) -> None:
    if device.type != "cpu":
        raise ValueError(f"device must be a CPU, got {device}: use ExactMemory on others")


def _require_slots(capacity: int) -> None:
    if capacity > 1 << SLOT_BITS:
        raise ValueError(f"capacity must be at most {1 << SLOT_BITS}, got {capacity}")
