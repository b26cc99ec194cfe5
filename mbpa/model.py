"""MbPA: a network, a memory and a predictor combined into one model.

`p(y | x) = g_θˣ(f(x))`, where `embed` is f and `head` is g. The parameters θˣ are derived from the
entries in the memory nearest to f(x), for this one prediction. Neither module is ever changed.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from mbpa.adaptation import Engine, LinearHead
from mbpa.errors import StaleKeysWarning
from mbpa.explanation import Explanation
from mbpa.memory import Memory, Neighbors, validation
from mbpa.memory.neighbors import TENSORS
from mbpa.memory_module import MemoryModule, disable_compilation
from mbpa.model_state import SavedModel, save_model
from mbpa.modules.head import Head, device_of, dtype_of, own_precision
from mbpa.modules.split import grow
from mbpa.predictors import Context, Predictor
from mbpa.replay import assume, is_replayed
from mbpa.serialization import custom_parts, describe

MAX_READ_BYTES = 1 << 28  # of neighbours' keys at a time
MAX_DRIFT = 0.01  # of keys; half precision rounds them by less


@dataclass(frozen=True, eq=False)
class Comparison:
    """Predictions for B queries with and without the memory."""

    before: Float[Tensor, "B *C"]
    """By the unadapted head."""
    after: Float[Tensor, "B *C"]
    """By the model's predictor."""
    neighbors: Neighbors | None
    """`None` if the predictor uses none."""


class MbPA(MemoryModule):
    """A network with an episodic memory that adapts its head to each query at prediction time.

    A model is an `nn.Module`: it can be moved, copied, pickled, put into another module, and its
    state dict holds the weights of the network and the entries of the memory. Predictions have no
    gradients and are those of eval mode, whatever mode the model or the modules passed in are in.

    Args:
        embed: maps inputs to keys. By default inputs are used as keys. A module is registered as
            the submodule `embedding`; a function or method runs as it is.
        head: maps keys to logits, or to values for regression. It is registered as the submodule
            `head`. Neither module is written to by predicting, writing or growing.
        memory: stores the examples; its `key_dim` must be the head's input size.
        predictor: turns the head's outputs and the neighbours into a prediction.
        engine: limits for scratch and cache memory; the default suits most uses.

    Example:
        >>> import torch, mbpa
        >>> model = mbpa.MbPA(
        ...     head=torch.nn.Linear(2, 3),
        ...     memory=mbpa.ExactMemory(capacity=100, key_dim=2),
        ...     predictor=mbpa.Adapted(mbpa.Gradient(lr=1.0, steps=10), k=5),
        ... )
        >>> ids = model.write(torch.eye(2), torch.tensor([0, 2]))
        >>> model(torch.eye(2)).argmax(1)
        tensor([0, 2])
    """

    def __init__(
        self,
        embed: Callable[..., Tensor] | None = None,
        head: nn.Module | None = None,
        *,
        memory: Memory,
        predictor: Predictor,
        engine: Engine | None = None,
    ) -> None:
        for name, part, kind in (
            ("head", head, nn.Module),
            ("memory", memory, Memory),
            ("predictor", predictor, Predictor),
        ):
            if not isinstance(part, kind):
                raise ValueError(f"{name} must be a {kind.__name__}, got {part!r}")
        assert head is not None  # by the check above
        super().__init__(
            nn.Identity() if embed is None else embed, head, memory, engine or Engine()
        )
        self._embedding.check_mode()
        self.predictor = predictor
        self.warns_of_stale_keys = True
        """Whether to warn if `embed` was trained on after the entries were written."""
        self.check_predictor(predictor)

    __call__: Callable[..., Float[Tensor, "..."]]  # as `forward`

    @property
    def classes(self) -> int:
        """The number of classes that the head outputs."""
        if not self.memory.holds_labels:
            raise ValueError("classes is for labels, the memory holds regression targets")
        return self._head.output_shape[0]

    def __repr__(self) -> str:
        return f"MbPA(head={self.head}, memory={self.memory}, predictor={self.predictor})"

    # Predicting

    @disable_compilation
    def embed(self, *inputs: Any, **named: Any) -> Float[Tensor, "..."]:
        """Return the keys of inputs, without gradients.

        Keys may have any number of leading dimensions before the memory's key shape.

        Args:
            inputs: passed to the embedding.
            named: passed to it, too.
        """
        self._embedding.check_mode()
        try:
            with torch.no_grad():
                keys = self._embedding.running(*inputs, **named)
        except RuntimeError as error:  # from the network, which alone knows what inputs it accepts
            given = [each.shape for each in (*inputs, *named.values()) if isinstance(each, Tensor)]
            error.add_note(f"raised by embed, given shapes {[tuple(shape) for shape in given]}")
            raise
        shape = self.memory.key_shape
        if not isinstance(keys, Tensor) or keys.shape[max(0, keys.ndim - len(shape)) :] != shape:
            got = tuple(keys.shape) if isinstance(keys, Tensor) else type(keys).__name__
            raise ValueError(f"embeddings must end in the memory's key shape {shape}, got {got}")
        return keys

    @disable_compilation
    def forward(
        self,
        *inputs: Any,
        keys: Float[Tensor, "..."] | None = None,
        neighbors: Neighbors | None = None,
        **named: Any,
    ) -> Float[Tensor, "..."]:
        """Return predictions for inputs: log-probabilities (…, C), or values for regression.

        Each query gets its own adapted head, which is discarded afterwards.

        Args:
            inputs: passed to `embed`.
            keys: keys from `embed`, to be used instead of inputs.
            neighbors: neighbours of these queries, if they have been read before: one
                `memory.read` serves any number of predictors and heads.
            named: further arguments of `embed`.
        """
        flat, leading = self._flatten_keys(inputs, named, keys)
        if keys is None:
            self._warn_of_stale_keys()

        def compute(keys: Tensor) -> tuple[Tensor, ...]:
            return (self._predict(keys, neighbors),)

        with own_precision(flat):
            if neighbors is not None:
                neighbors = self._trim_neighbors(neighbors, len(flat))
            form = self._find_form(flat) if neighbors is None and is_replayed(flat) else None
            if form is None:
                (prediction,) = compute(flat)
            else:
                with self.memory.lock:
                    (prediction,) = self._replayer.run(form, compute, flat)
        return prediction.reshape(*leading, *prediction.shape[1:])

    @disable_compilation
    def compare(self, keys: Float[Tensor, "B *D"]) -> Comparison:
        """Return predictions with and without the memory, and the neighbours.

        Args:
            keys: keys from `embed`; few enough for one read (`count_rows_per_read`).
        """
        flat, _ = self._flatten_keys((), {}, keys)

        def compare(keys: Tensor) -> Comparison:
            found = self._read(keys)
            context = self.build_context(keys, found)
            return Comparison(context.parametric, self.predictor(context), found)

        def compute(keys: Tensor) -> tuple[Tensor, ...]:
            both = compare(keys)
            found = both.neighbors
            tensors = [] if found is None else [getattr(found, name) for name in TENSORS]
            return both.before, both.after, *tensors

        with self.memory.lock, own_precision(flat):
            form = self._find_form(flat) if is_replayed(flat) else None
            if form is None:
                return compare(flat)
            before, after, *tensors = self._replayer.run(("compare", form), compute, flat)
            neighbors = None
            if tensors:
                named = dict(zip(TENSORS, tensors, strict=True))
                revision, capacity = self.memory.revision, self.memory.capacity
                neighbors = Neighbors(**named, revision=revision, capacity=capacity)
        return Comparison(before, after, neighbors)

    def _predict(
        self, keys: Float[Tensor, "B *D"], neighbors: Neighbors | None
    ) -> Float[Tensor, "B *C"]:
        rows = self.count_rows_per_read(self.predictor.keys_for)
        parts = []
        for start in range(0, max(1, len(keys)), rows):
            chunk = slice(start, start + rows)
            found = self._read(keys[chunk]) if neighbors is None else neighbors.rows(chunk)
            parts.append(self.predictor(self.build_context(keys[chunk], found)))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _find_form(self, keys: Float[Tensor, "B *D"]) -> Hashable | None:
        """Return what a prediction depends on besides values on the GPU; `None` if unknown.

        It is known for a linear head and parts of this library, but not for code of the user, nor
        for label counts, whose tensors are made anew after each write.
        """
        if self.predictor.uses_label_counts:
            return None
        layout, description = self.memory.layout, describe(self.predictor)
        head = LinearHead.find(self._head.running, ())
        if layout is None or head is None or custom_parts(description):
            return None
        places = head.weight.data_ptr(), None if head.bias is None else head.bias.data_ptr()
        backend = torch.backends.cuda.matmul.fp32_precision
        return keys.shape, keys.dtype, layout, repr(description), head.weight.dtype, places, backend

    @disable_compilation
    def explain(
        self,
        *inputs: Any,
        keys: Float[Tensor, "..."] | None = None,
        neighbors: Neighbors | None = None,
        labels: Sequence[str] | None = None,
        **named: Any,
    ) -> Explanation:
        """Explain the predictions for these inputs.

        Args:
            inputs: passed to `embed`.
            keys: keys from `embed`, to be used instead of inputs.
            neighbors: neighbours of these queries, if they have been read before.
            labels: names of the classes, to be printed instead of numbers.
            named: further arguments of `embed`.
        """
        flat, _ = self._flatten_keys(inputs, named, keys)
        if keys is None:
            self._warn_of_stale_keys()
        with own_precision(flat):
            if neighbors is None:
                neighbors = self._read(flat)
            else:
                neighbors = self._trim_neighbors(neighbors, len(flat))
            context = self.build_context(flat, neighbors)
            has_neighbors = context.neighbors is not None and bool(context.neighbors.mask.any())
            return Explanation(
                before=context.parametric,
                after=self.predictor(context),
                neighbors=context.neighbors,
                parts=tuple(self.predictor.parts(context)) if has_neighbors else (),
                has_labels=context.has_labels,
                labels=None if labels is None else tuple(labels),
            )

    # For predictors other than the model's own

    def check_predictor(self, predictor: Predictor) -> None:
        """Raise `ValueError` if a predictor cannot work with this head and this memory.

        Args:
            predictor: the predictor to check.
        """
        predictor.check(self._head.running, self.memory)

    def count_rows_per_read(self, keys_for: int) -> int:
        """Return how many queries to read at a time, given how many keys each of them needs.

        Args:
            keys_for: number of neighbours per query whose keys are read, too.
        """
        key_bytes = self.memory.key_size * self.memory.distance_dtype.itemsize
        return max(1, MAX_READ_BYTES // max(1, keys_for * key_bytes))

    def build_context(self, keys: Float[Tensor, "B *D"], neighbors: Neighbors | None) -> Context:
        """Return the input of a predictor: the queries, the head's outputs, the neighbours.

        One context serves any number of predictors.

        Args:
            keys: keys of the queries, from `embed`.
            neighbors: their neighbours, from `memory.read`; `None` for predictors without any.
        """
        head, has_labels = self._head, self.memory.holds_labels
        if neighbors is not None and has_labels:
            labels = neighbors.values.to(torch.int64).masked_fill(~neighbors.mask, 0)
            if not assume(((labels >= 0) & (labels < self.classes)).all()):
                self.check_labels(labels)
            neighbors = replace(neighbors, values=labels)
        queries = keys.to(dtype_of(head.running, keys.dtype))
        outputs = head.running(queries.clone())  # a head may work in place
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        return Context(
            head=head.running,
            engine=self._engine,
            has_labels=has_labels,
            queries=queries,
            outputs=outputs,
            parametric=outputs.log_softmax(1) if has_labels else outputs,
            neighbors=neighbors,
        )

    # Learning

    @disable_compilation
    def write(
        self,
        *inputs: Any,
        values: Shaped[Tensor, "..."] | Sequence[Any] | None = None,
        keys: Float[Tensor, "..."] | None = None,
        outputs: Float[Tensor, "..."] | None = None,
        **named: Any,
    ) -> Int[Tensor, "N"]:
        """Store examples in the memory and return their ids.

        The paper's order in a training loop is to embed, update the network, then write the keys.

        Args:
            inputs: passed to `embed` and embedded now. If `values` is not given by name, the last
                of them are the values: `write(x, y)`.
            values: labels or targets, one per input.
            keys: keys from `embed`, to be used instead of inputs.
            outputs: the head's outputs at these inputs, if you have just computed them, in float32
                at least. They save an engine with a `tolerance` from running the head when the
                examples are first read.
            named: further arguments of `embed`.
        """
        if values is None and len(inputs) > 1:
            *inputs, values = inputs  # type: ignore[assignment]  # a list will do
        if values is None:
            raise ValueError("write needs values: write(inputs, values) or write(keys=, values=)")
        flat, leading = self._flatten_keys(tuple(inputs), named, keys)
        values = validation.parse_values(values, self.memory.value_dtype)
        expected = (*leading, *self.memory.value_shape)
        if tuple(values.shape) != expected:
            raise ValueError(
                f"values must have shape {expected}, one for each of the keys "
                f"{(*leading, *self.memory.key_shape)}, got {tuple(values.shape)}; the memory "
                f"holds {self.memory.kind}"
            )
        self.check_labels(values)
        known = None if outputs is None else self._flatten_outputs(outputs, leading)
        with self.memory.lock:
            ids = self.memory.write(flat, values.reshape(len(flat), *self.memory.value_shape))
            if known is not None:
                with own_precision(flat):
                    self._engine.keep_outputs(self._head.running, self.memory, ids, known)
            self._note_write()
        return ids

    @disable_compilation
    def score_then_write(
        self, inputs: Float[Tensor, "T ..."], labels: Int[Tensor, "T"] | Sequence[int]
    ) -> Float[Tensor, "T"]:
        """Score each label as if inputs arrived one by one and each was written after scoring.

        Returns the log-probability of each label. `score_stream` does this for streams of any
        length.

        Args:
            inputs: T inputs in order of time, passed to `embed`.
            labels: the label of each input.
        """
        keys = self.embed(inputs)
        labels = validation.parse_labels(labels).to(keys.device)
        self.check_labels(labels)
        k = max(1, self.predictor.k)
        with self.memory.lock, own_precision(keys):
            neighbors = self.memory.read_causally(keys, labels, k, keys_for=self.predictor.keys_for)
            if self.predictor.uses_label_counts:
                neighbors = self.memory.count_labels(neighbors, labels)
            prediction = self.predictor(self.build_context(keys, neighbors))
            scores = prediction.gather(1, labels[:, None])[:, 0]
            self.memory.write(keys, labels)
            self._note_write()
        return scores

    def check_labels(self, values: Shaped[Tensor, "..."]) -> None:
        """Raise `ValueError` if the memory holds labels and these are not whole numbers from 0 to
        `classes − 1`.

        Args:
            values: labels of any shape.
        """
        if not self.memory.holds_labels:
            return
        labels = validation.parse_labels(values)
        if labels.numel() and (label := int(labels.max())) >= self.classes:
            raise ValueError(
                f"labels must be below {self.classes}, the classes the head knows, got {label}: "
                f"grow(classes={label + 1}) makes room"
            )

    def grow(self, classes: int, *, bias: float = 0.0) -> None:
        """Add output rows for labels that the head does not know yet.

        MbPA replaces its head with its own enlarged copy: the old rows are copied, the new ones
        have zero weights. The module passed in stays as it is; to use the enlarged head in your
        network, assign `model.head` to the layer there.

        Args:
            classes: the new number of classes.
            bias: the bias of the new rows.
        """
        classes = validation.count("classes", classes, least=self.classes)
        grown = Head.probe(grow(self.head, classes, bias=bias), self.memory, is_ours=True)
        if grown.output_shape[0] != classes:
            raise ValueError(
                f"the last linear layer of the head must give its outputs; grown to {classes}, "
                f"the head still gives {grown.output_shape[0]}"
            )
        self._use_head(grown)

    def refresh(self, inputs_of: Callable[[Tensor], Any], *, batch_size: int = 256) -> None:
        """Recompute the keys of all entries after `embed` has been trained further.

        Meanwhile predictions use the old keys; the new ones take effect all at once.

        Args:
            inputs_of: returns the inputs of the entries with the given ids (a 1-d tensor).
            batch_size: number of entries embedded at a time.
        """
        ids = self.memory.ids
        if len(ids):
            keys = torch.cat([self._embed_again(inputs_of, part) for part in ids.split(batch_size)])
            with self.memory.lock:
                still_there = self.memory.holds(ids)
                self.memory.replace_keys(ids[still_there], keys[still_there.to(keys.device)])
        self._watch.start_over()

    def check_keys(self, inputs_of: Callable[[Tensor], Any], *, count: int = 64) -> float:
        """Return how far stored keys are from those that `embed` gives now, and warn if far.

        Args:
            inputs_of: returns the inputs of the entries with the given ids (a 1-d tensor).
            count: number of entries to embed again, evenly spread over the memory.

        Returns:
            The largest distance between an old and a new key, relative to the larger of their
            norms: 0 if nothing has changed, about 1 if they have nothing in common.
        """
        ids = self.memory.ids
        count = min(validation.count("count", count), len(ids))
        if not count:
            return 0.0
        chosen = ids[torch.linspace(0, len(ids) - 1, count).long()]
        new = self._embed_again(inputs_of, chosen).flatten(1).double()
        old = self.memory.get_keys(chosen).flatten(1).double().to(new.device)
        size = torch.maximum(old.norm(dim=1), new.norm(dim=1)).clamp_min(1e-300)
        drift = float(((new - old).norm(dim=1) / size).max())
        if drift > MAX_DRIFT:
            _warn(f"keys in the memory differ from those that embed gives now by up to {drift:.0%}")
        return drift

    def _embed_again(self, inputs_of: Callable[[Tensor], Any], ids: Tensor) -> Tensor:
        keys = self.embed(inputs_of(ids))
        if len(keys) != len(ids):
            raise ValueError(
                f"inputs_of must return one input per id, got {len(keys)} for {len(ids)} ids"
            )
        return keys

    def _note_write(self) -> None:
        if self.warns_of_stale_keys:
            self._watch.note_write()

    def _warn_of_stale_keys(self) -> None:
        if self.warns_of_stale_keys and self._watch.finds_stale_keys():
            _warn("embed was trained on after the last entries were written")

    # Saving

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Save the memory, the predictor and a linear or grown head to a directory atomically.

        Other modules are not saved; that is up to the caller. A digest of their weights is, so that
        `load` notices if it is given others. `mbpa serve` serves the directory of a model with a
        linear head.

        Args:
            directory: directory to write; replaced as a whole if it exists.
        """
        save_model(directory, self.memory, self.predictor, self._embedding, self._head)

    @classmethod
    def load(
        cls,
        directory: str | os.PathLike[str],
        embed: Callable[..., Tensor] | None = None,
        head: nn.Module | None = None,
        *,
        memory: Memory | None = None,
        predictor: Predictor | None = None,
        engine: Engine | None = None,
        allow_other_weights: bool = False,
    ) -> MbPA:
        """Load a model that `save` wrote; `embed` must be the one that it was created with.

        Args:
            directory: the directory passed to `save`.
            embed: as in the constructor.
            head: as in the constructor, before any `grow`; by default the saved one. Required if
                that was not linear.
            memory: filled with the saved entries; required if the saved memory was of a custom
                class.
            predictor: used instead of the saved one; required if that had custom parts.
            engine: as in the constructor.
            allow_other_weights: accept an `embed` and a `head` with other weights than those that
                the model was saved with. After an `embed` with other weights, call `refresh`.

        Raises:
            ValueError: `embed` or `head` has other weights.
        """
        saved = SavedModel.read(directory)
        if not allow_other_weights:
            saved.check_weights(embed, head)
        if predictor is None:
            predictor = saved.restore_predictor()
        is_grown = saved.grown_classes is not None
        grown = saved.grow_head(head) if is_grown and head is not None else None
        memory = saved.fill(memory, device_of(head))
        model = cls(
            embed,
            saved.make_head() if head is None else head,
            memory=memory,
            predictor=predictor,
            engine=engine,
        )
        if grown is not None:
            model._use_head(Head.probe(grown, memory, is_ours=True))
        else:
            model._head = replace(model._head, is_ours=is_grown)
        return model

    # Between the parts

    def _flatten_keys(
        self, inputs: tuple[Any, ...], named: dict[str, Any], keys: Tensor | None
    ) -> tuple[Tensor, tuple[int, ...]]:
        """Return keys as (B, *key_shape), and the leading dimensions they had."""
        if (keys is None) == (not inputs and not named):
            raise ValueError("give inputs or keys=, one of the two")
        if keys is None:
            keys = self.embed(*inputs, **named)
        shape = self.memory.key_shape
        leading = tuple(keys.shape[: max(0, keys.ndim - len(shape))])
        if tuple(keys.shape) != (*leading, *shape):
            raise ValueError(f"keys must end in the shape {shape}, got {tuple(keys.shape)}")
        return keys.detach().reshape(math.prod(leading), *shape), leading

    def _flatten_outputs(self, outputs: Tensor, leading: tuple[int, ...]) -> Tensor:
        """Return the head's outputs as (B, *output_shape)."""
        if not isinstance(outputs, Tensor) or not outputs.is_floating_point():
            got = outputs.dtype if isinstance(outputs, Tensor) else type(outputs).__name__
            raise ValueError(f"outputs must be a tensor of a floating dtype, got {got}")
        expected = (*leading, *self._head.output_shape)
        if tuple(outputs.shape) != expected or outputs.device != self.memory.device:
            raise ValueError(
                f"outputs must have shape {expected} and be on {self.memory.device}, "
                f"got {tuple(outputs.shape)} on {outputs.device}"
            )
        if not outputs.logsumexp(-1).isfinite().all():
            raise ValueError("outputs must be finite, got NaN or infinite ones")
        return outputs.detach().reshape(math.prod(leading), *self._head.output_shape)

    def _read(self, keys: Float[Tensor, "B *D"]) -> Neighbors | None:
        if not self.predictor.k:
            return None
        with self.memory.lock:
            found = self.memory.read(keys, self.predictor.k, keys_for=self.predictor.keys_for)
            return self.memory.count_labels(found) if self.predictor.uses_label_counts else found

    def _trim_neighbors(self, neighbors: Neighbors, queries: int) -> Neighbors:
        """Return as many of the neighbours as the predictor uses; `ValueError` if too few."""
        k, keys_for = self.predictor.k, self.predictor.keys_for
        (count, width), with_keys = neighbors.mask.shape, neighbors.keys.shape[1]
        if count != queries:
            raise ValueError(f"neighbors must be those of {queries} queries, got those of {count}")
        if width < min(k, len(self.memory)) or with_keys < min(keys_for, width):
            raise ValueError(
                f"the predictor needs {k} neighbors and the keys of {keys_for}, got {width} "
                f"and the keys of {with_keys}"
            )
        if self.predictor.uses_label_counts and neighbors.label_counts is None:
            neighbors = self.memory.count_labels(neighbors)
        return neighbors.first(k)


def _warn(what: str) -> None:
    """Warn about stale keys, at the line outside of this library that led to it."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _OURS:
        frame, level = frame.f_back, level + 1
    warnings.warn(
        f"{what}, so similar inputs may no longer have similar keys: call model.refresh(inputs_of) "
        "to compute the keys anew, or model.check_keys(inputs_of) to see how far they are; "
        "model.warns_of_stale_keys = False turns this warning off",
        StaleKeysWarning,
        stacklevel=level,
    )


_OURS = {"mbpa", "torch"}
