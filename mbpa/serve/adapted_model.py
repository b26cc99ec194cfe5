"""A served model that adapts its head to the nearest examples, per query.

It serves runs without a learner: those with too few examples for a rehearsal, those with a head of
the user's own, and earlier ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

import mbpa
from mbpa.device import Throughput
from mbpa.memory import MemoryKind, make_memory
from mbpa.modules.new_rows import NewRows
from mbpa.modules.split import grow
from mbpa.serve.answers import NearExample
from mbpa.serve.example_index import IndexedExample
from mbpa.serve.order_independent import LabelRows, OrderIndependentReader
from mbpa.serve.served_model import ExplainedJudgement, Judgement, ServedModel, Sources

# Fixed, not measured: a restart must not choose another way to compute the same result.
FIXED_THROUGHPUT = Throughput(operations=2.0**36, bytes=2.0**33, call=2.0**-19)


class AdaptedModel(ServedModel):
    """A trained head that grows and shrinks with the labels of the examples, and adapts to them.

    Not thread-safe.

    Args:
        head: the trained head, with one row per label in `trained_labels`.
        rows: how to make rows for other labels; `None`: they are zero.
        keeps_rows: the trained labels keep their rows even without examples.
        memory: kind of memory for the examples. With "graph", and from 100,000 examples on with
            "auto", which of them are found may depend on the order in which they were added.
    """

    def __init__(
        self,
        head: nn.Linear,
        trained_labels: Sequence[str],
        predictor: mbpa.Predictor,
        rows: NewRows | None = None,
        *,
        keeps_rows: bool = False,
        memory: MemoryKind = "exact",
    ) -> None:
        super().__init__()
        self._head, self._all_trained_labels = head, trained_labels
        self._predictor, self._keeps_rows = predictor, keeps_rows
        self._rows = None if rows is None else LabelRows(rows)
        # Nothing is stored, since stored rows would depend on history.
        self._engine = mbpa.Engine(store_bytes=0, rates=FIXED_THROUGHPUT)
        self._device = head.weight.device
        self._memory = make_memory(memory, 1024, head.in_features, device=self._device)
        self._reader = OrderIndependentReader(self._memory)
        self._trained_labels: tuple[str, ...] = ()
        self._new_labels: tuple[str, ...] = ()
        self._model: mbpa.MbPA | None = None

    def split_labels(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return self._trained_labels, self._new_labels

    def set_trained_labels(self, labels: Sequence[str]) -> None:
        self._all_trained_labels = labels

    @property
    def recall(self) -> float | None:
        return self._memory.recall if isinstance(self._memory, mbpa.GraphMemory) else None

    def get_keys(self, ids: Sequence[int]) -> Float[Tensor, "N D"]:
        return self._memory.get_keys([self.index.examples[id].entry for id in ids])

    # Answering

    def __call__(self, keys: Float[Tensor, "B D"]) -> Judgement:
        if self._model is None:
            return Judgement(keys.new_empty(len(keys), 0))
        return Judgement(self._model(keys=keys, neighbors=self._read(keys)))

    def explain(self, keys: Float[Tensor, "B D"]) -> ExplainedJudgement:
        assert self._model is not None
        why = self._model.explain(keys=keys, neighbors=self._read(keys))
        sources = [self._list_sources(why[i]) for i in range(len(keys))]
        return ExplainedJudgement(Judgement(why.after), why.before, self.labels, sources)

    def _read(self, keys: Float[Tensor, "B D"]) -> mbpa.Neighbors | None:
        if not self._predictor.k:
            return None
        counted = self._predictor.uses_label_counts
        return self._reader.read(keys, self._predictor.k, with_label_counts=counted)

    def _list_sources(self, why: mbpa.Explanation) -> Sources:
        """Return the examples behind the answer to one query, and how far the parameters moved."""
        if why.neighbors is None or why.weights is None:
            return (), 0.0
        rows = zip(
            why.neighbors.ids[0].tolist(),
            why.weights[0].tolist(),
            why.neighbors.distances[0].sqrt().tolist(),
            strict=True,
        )
        near = []
        for entry, weight, distance in rows:
            id = self.index.ids[entry]
            example = self.index.examples[id]
            near.append(NearExample(id, example.label, example.text, weight, distance))
        return tuple(near), 0.0 if why.change is None else float(why.change[0])

    # Learning

    def make_room(self, examples: int) -> None:
        held = len(self.index.examples)
        if held + examples > self._memory.capacity:
            self._memory.resize(2 * (held + examples))

    def add(
        self,
        ids: Sequence[int],
        named: Sequence[tuple[str, str | None]],
        keys: Float[Tensor, "N D"],
        trained: Collection[int],
    ) -> None:
        numbers = [self.index.number(label) for label, _ in named]
        entries = self._memory.write(keys, torch.tensor(numbers, dtype=torch.int64)).tolist()
        for id, (label, text), entry in zip(ids, named, entries, strict=True):
            self.index.add(id, IndexedExample(label, text, entry, id in trained))
        labels = [label for label, _ in named]
        if self._rows is not None:
            self._rows.add(labels, keys)
        self._rebind(labels)

    def remove(self, ids: Iterable[int]) -> None:
        here = [id for id in ids if id in self.index.examples]
        labels = [self.index.examples[id].label for id in here]
        entries = [self.index.remove(id) for id in here]
        if self._rows is not None:
            self._rows.remove(labels, self._memory.get_keys(entries))
        self._memory.delete(entries)
        self._rebind(labels)

    def _rebind(self, changed: Iterable[str]) -> None:
        """Update the head, labels and columns to the current examples.

        Args:
            changed: labels whose examples have changed.
        """
        trained, new = self.index.split(self._all_trained_labels, keeps_rows=self._keeps_rows)
        if (trained, new) != (self._trained_labels, self._new_labels):
            self._trained_labels, self._new_labels = trained, new
            self._model = self._build_model()
        elif self._model is not None:
            self._write_rows(self._model.head, changed)
        self._reader.columns = self.index.columns(self.labels).to(self._device)

    def _build_model(self) -> mbpa.MbPA | None:
        """Return a model of the memory and a head for the current labels; `None` without labels."""
        if not self.labels:
            return None
        head = grow(self._copy_trained_rows(), len(self.labels)).requires_grad_(False)
        self._write_rows(head, self._new_labels)
        return mbpa.MbPA(
            head=head, memory=self._memory, predictor=self._predictor, engine=self._engine
        )

    def _write_rows(self, head: nn.Module, labels: Iterable[str]) -> None:
        """Set the rows of those of these labels that the head was not trained with."""
        rows, new = self._rows, set(self._new_labels)
        here = sorted(new.intersection(labels))
        if rows is None or not here:
            return
        assert isinstance(head, nn.Linear)
        first = len(self._trained_labels)
        places = torch.tensor([first + bisect_left(self._new_labels, label) for label in here])
        with torch.no_grad():
            weights = torch.stack([rows.weight(label) for label in here])
            head.weight[places] = weights.to(self._device)
            head.bias[places] = rows.bias.to(self._device)

    def _copy_trained_rows(self) -> nn.Linear:
        """Return a head with the trained rows of the remaining labels, or else one row of zeros."""
        places = {label: row for row, label in enumerate(self._all_trained_labels)}
        rows = [places[label] for label in self._trained_labels]
        head = nn.Linear(self._head.in_features, max(1, len(rows)), device=self._device)
        with torch.no_grad():
            for own, trained in ((head.weight, self._head.weight), (head.bias, self._head.bias)):
                own.zero_()[: len(rows)] = trained[torch.tensor(rows, dtype=torch.int64)]
        return head
