"""Predictions for queries whose answers are known: validation data, or the memory's own entries.

Every entry, left out of the memory in turn, is such a query.

Shapes: B queries at a time, Q in all, K neighbours, C classes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from tqdm import tqdm

from mbpa.memory import Neighbors, validation
from mbpa.memory.neighbors import TENSORS
from mbpa.model import MbPA
from mbpa.modules.head import own_precision
from mbpa.predictors import Predictor

MAX_BATCH_QUERIES = 256  # so that a progress bar moves


class LeftOut(NamedTuple):
    """Entries, and the prediction for each by a memory that does not hold it."""

    ids: Int[Tensor, "Q"]
    values: Shaped[Tensor, "Q *V"]
    predictions: Float[Tensor, "Q *C"]
    """Log-probabilities, or values for regression targets."""


def leave_one_out(
    model: MbPA,
    predictor: Predictor | None = None,
    *,
    queries: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> LeftOut:
    """Predict each entry by the memory without it.

    Entries whose label gets a low probability are probably mislabelled. The predictions also serve
    to choose a threshold for abstaining.

    Args:
        model: the model whose entries are predicted.
        predictor: default: the model's own.
        queries: maximum number of entries, sampled at random; default: all.
        seed: seed of that sample.
        progress: show a progress bar on standard error.
    """
    predictor = predictor or model.predictor
    if queries is not None:
        validation.count("queries", queries)
    model.check_predictor(predictor)
    entries = LabelledQueries.from_entries(model).sample(queries, seed)
    found = []
    for batch in read_batches(model, entries, [predictor], progress):
        with own_precision(batch.keys):
            context = model.build_context(batch.keys, batch.neighbors)
            found.append(predictor(context.nearest(predictor.k)))
    assert entries.ids is not None
    return LeftOut(entries.ids, entries.values, torch.cat(found))


class LabelledQueries(NamedTuple):
    """Queries and their labels or targets."""

    keys: Float[Tensor, "Q *D"]
    values: Shaped[Tensor, "Q *V"]
    ids: Int[Tensor, "Q"] | None
    """Ids of the entries if the queries are entries of the memory, else `None`."""
    weights: Float[Tensor, "Q"]
    """Weight of each query; the sum is Q."""

    @classmethod
    def from_arguments(
        cls, model: MbPA, inputs: Any, values: Any, keys: Tensor | None
    ) -> LabelledQueries:
        """Return the queries that a caller specified; without inputs and keys, all entries."""
        if inputs is None and keys is None:
            if values is not None:
                raise ValueError("values need inputs or keys=, whose labels or targets they are")
            return cls.from_entries(model)
        if inputs is not None and keys is not None:
            raise ValueError("give inputs or keys=, one of the two")
        if values is None:
            raise ValueError("give values, the labels or targets of the inputs or keys, too")
        memory = model.memory
        if not len(memory):
            raise ValueError("the memory must hold entries to adapt to, it is empty")
        keys = model.embed(inputs) if keys is None else keys
        values = validation.parse_values(values, memory.value_dtype)
        if not (keys.shape[1:] == memory.key_shape and len(keys)):
            expected = ("Q", *memory.key_shape)
            raise ValueError(
                f"keys must have shape {expected}, Q at least 1, got {tuple(keys.shape)}"
            )
        expected = len(keys), *memory.value_shape
        if values.shape != expected:
            raise ValueError(f"values must have shape {expected}, got {tuple(values.shape)}")
        model.check_labels(values)
        return cls(keys, values.to(keys.device), None, torch.ones(len(keys)))

    @classmethod
    def from_entries(cls, model: MbPA) -> LabelledQueries:
        """Return all entries of the memory."""
        ids, keys, values = model.memory.entries()
        if len(ids) < 2:
            raise ValueError(
                f"to leave one out, the memory must hold two entries, it holds {len(ids)}"
            )
        model.check_labels(values)
        values = values.long() if model.memory.holds_labels else values
        return cls(keys, values, ids, torch.ones(len(ids)))

    def sample(self, most: int | None, seed: int, balanced: bool = False) -> LabelledQueries:
        """Draw at most `most` of the queries at random, and keep their order.

        Args:
            most: `None` for all.
            seed: seed of the draw.
            balanced: draw as many queries of each label as possible, and give each label the same
                total weight.
        """
        count = len(self.keys)
        order = torch.arange(count)
        if most is not None and count > most:
            order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
            if balanced:  # take the first query of each label, then the second of each, and so on
                labels = self.values.cpu()[order]
                by_label = labels.argsort(stable=True)
                sizes = labels.bincount()
                ranks = torch.arange(count) - (sizes.cumsum(0) - sizes)[labels[by_label]]
                order = order[by_label[ranks.argsort(stable=True)]]
            order = order[:most].sort().values
        there = order.to(self.keys.device)
        weights = self.weights[order]
        if balanced:
            labels = self.values[there].cpu()
            sizes = labels.bincount()
            weights = len(order) / (int((sizes > 0).sum()) * sizes[labels].double())
        ids = None if self.ids is None else self.ids[order]
        return LabelledQueries(self.keys[there], self.values[there], ids, weights)


class QueryBatch(NamedTuple):
    """Some of the queries, and their neighbours among the other entries."""

    keys: Float[Tensor, "B *D"]
    values: Shaped[Tensor, "B *V"]
    weights: Float[Tensor, "B"]
    neighbors: Neighbors


def read_batches(
    model: MbPA,
    queries: LabelledQueries,
    predictors: Sequence[Predictor],
    progress: bool = False,
    *,
    with_keys: bool = True,
) -> Iterator[QueryBatch]:
    """Yield batches of queries with the neighbours that all predictors need, themselves excluded.

    There may be fewer neighbours if the memory does not hold as many.

    Args:
        model: holds the memory.
        queries: what is read; if they have ids, they are entries of the memory.
        predictors: determine how many neighbours are read, and whether labels are counted.
        progress: show a progress bar.
        with_keys: also read the keys that the predictors need.
    """
    memory, extra = model.memory, int(queries.ids is not None)
    k = max(predictor.k for predictor in predictors)
    keys_for = max(predictor.keys_for for predictor in predictors) if with_keys else 0
    keys_for = keys_for + extra if keys_for else 0
    counts_labels = any(predictor.uses_label_counts for predictor in predictors)
    rows = count_batch_rows(model, keys_for)
    starts = range(0, len(queries.keys), rows)
    for start in tqdm(starts, desc="scoring", unit="batch", file=sys.stderr, disable=not progress):
        part = slice(start, start + rows)
        with memory.lock:
            neighbors = memory.read(queries.keys[part], max(1, k) + extra, keys_for=keys_for)
            neighbors = memory.count_labels(neighbors) if counts_labels else neighbors
        if queries.ids is not None:
            neighbors = leave_out(neighbors, queries.ids[part], queries.values[part])
        yield QueryBatch(queries.keys[part], queries.values[part], queries.weights[part], neighbors)


def count_batch_rows(model: MbPA, keys_for: int) -> int:
    """Return the number of queries per batch, given how many keys each of them needs."""
    return min(MAX_BATCH_QUERIES, model.count_rows_per_read(keys_for))


def leave_out(
    neighbors: Neighbors, ids: Int[Tensor, "B"], values: Shaped[Tensor, "B *V"]
) -> Neighbors:
    """Remove from each query's neighbours the one with the given id, which has the given value.

    Where that id is not among them, the last neighbour is removed, so that all rows keep the same
    length. Counts of labels leave out the entry as well.
    """
    width = neighbors.ids.shape[1]
    if width < 2:
        raise ValueError(f"there must be two neighbors to leave one out, got {width}")
    is_own = neighbors.ids == ids.to(neighbors.ids.device)[:, None]
    kept = is_own.to(torch.int8).argsort(dim=1, stable=True)[:, : width - 1]

    def take_others(tensor: Tensor) -> Tensor:
        places = kept[:, : max(0, tensor.shape[1] - 1)]  # only some neighbours may have keys
        places = places.reshape(*places.shape, *(1,) * (tensor.ndim - 2))
        return tensor.gather(1, places.expand(-1, -1, *tensor.shape[2:]))

    others: dict[str, Any] = {name: take_others(getattr(neighbors, name)) for name in TENSORS}
    if neighbors.label_counts is not None:
        is_same = neighbors.values == values.to(neighbors.values.device)[:, None]
        others["label_counts"] = take_others((neighbors.label_counts - is_same.long()).clamp_min(1))
    return replace(neighbors, **others)
