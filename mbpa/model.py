"""MbPA: a network, a memory and a predictor, bound together.

`p(y | x) = g_θˣ(f(x))`: `embed` is f, `head` is g, and θˣ comes from the entries nearest to f(x) in
the memory, for this one prediction. Neither module is ever changed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from mbpa.adaptation import Engine
from mbpa.checkpoint import load_checkpoint, save_checkpoint
from mbpa.errors import CheckpointError
from mbpa.explanation import Explanation
from mbpa.memory import Entries, ExactMemory, Memory, Neighbors
from mbpa.predictors import Context, Predictor
from mbpa.spec import build, custom_parts, describe
from mbpa.split import grow


class MbPA:
    """A network with an episodic memory that adapts its head, per query, at prediction time.

    Args:
        embed: from inputs to keys; default: inputs are keys.
        head: from keys to logits, or to values for regression. Both modules are used as they are,
            never written to, and must have no active dropout or training-mode batch norm
            (`split` gives copies that are always in eval mode).
        memory: where examples are kept; its key_dim is what the head takes.
        predictor: what to do with the neighbours.
        engine: limits for scratch and kept memory; the default suits most.

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
        if not isinstance(head, nn.Module):
            raise ValueError(f"head must be a torch.nn.Module, got {type(head).__name__}")
        self._embed = nn.Identity() if embed is None else embed
        self._head = head
        self._has_grown = False
        self._engine = engine or Engine()
        self.memory = memory
        self.predictor = predictor
        self._check_modes()
        self._output_shape = self._probed_output_shape()
        predictor.check(head, memory)

    @property
    def head(self) -> nn.Module:
        """The head in use: the one handed in, or after `grow` one of MbPA's own."""
        return self._head

    @property
    def classes(self) -> int:
        """How many labels the head knows."""
        if not self.memory.holds_labels:
            raise ValueError("classes is for labels, the memory holds regression targets")
        return self._output_shape[0]

    def __repr__(self) -> str:
        return f"MbPA(head={self._head}, memory={self.memory}, predictor={self.predictor})"

    # Predicting

    def embed(self, *inputs: Any, **named: Any) -> Float[Tensor, "..."]:
        """Keys of inputs, any number of leading dimensions before the key's own; no gradients."""
        self._check_modes()
        with torch.no_grad():
            keys = self._embed(*inputs, **named)
        shape = self.memory.key_shape
        if not isinstance(keys, Tensor) or keys.shape[max(0, keys.ndim - len(shape)) :] != shape:
            got = tuple(keys.shape) if isinstance(keys, Tensor) else type(keys).__name__
            raise ValueError(f"embeddings must end in the memory's key shape {shape}, got {got}")
        return keys

    def __call__(
        self, *inputs: Any, keys: Float[Tensor, "..."] | None = None, **named: Any
    ) -> Float[Tensor, "..."]:
        """Predictions for inputs, or for keys that `embed` gave: log-probabilities (…, C), or
        values for regression. Each comes from a head of its own, which is then forgotten."""
        flat, leading = self._flat_keys(inputs, named, keys)
        with _own_precision(flat):
            prediction = self.predictor(self._context(flat, self._read(flat)))
        return prediction.reshape(*leading, *self._output_shape)

    def explain(
        self,
        *inputs: Any,
        keys: Float[Tensor, "..."] | None = None,
        labels: Sequence[str] | None = None,
        **named: Any,
    ) -> Explanation:
        """Why the predictions for these inputs, or keys, come out as they do.

        Args:
            labels: names of the classes, to be printed in place of numbers.
        """
        flat, _ = self._flat_keys(inputs, named, keys)
        with _own_precision(flat):
            context = self._context(flat, self._read(flat))
            has_neighbors = bool(context.neighbors.mask.any())
            return Explanation(
                before=context.parametric,
                after=self.predictor(context),
                neighbors=context.neighbors,
                parts=tuple(self.predictor.parts(context)) if has_neighbors else (),
                has_labels=context.has_labels,
                labels=None if labels is None else tuple(labels),
            )

    # Learning

    def write(
        self,
        inputs: Any = None,
        values: Shaped[Tensor, "..."] | Sequence[Any] | None = None,
        *,
        keys: Float[Tensor, "..."] | None = None,
    ) -> Int[Tensor, "N"]:
        """Store examples, from inputs (embedded now) or from keys that `embed` gave; return ids.

        The paper's order in a training loop is to embed, update the network, then write the keys.
        """
        if values is None:
            raise ValueError("write needs values: write(inputs, values) or write(keys=, values=)")
        flat, leading = self._flat_keys(() if inputs is None else (inputs,), {}, keys)
        values = torch.as_tensor(values)
        expected = (*leading, *self.memory.value_shape)
        if tuple(values.shape) != expected:
            raise ValueError(
                f"values must have shape {expected}, one for each of the keys "
                f"{(*leading, *self.memory.key_shape)}, got {tuple(values.shape)}"
            )
        self.check_labels(values)
        return self.memory.write(flat, values.reshape(len(flat), *self.memory.value_shape))

    def score_then_write(
        self, inputs: Float[Tensor, "T ..."], labels: Int[Tensor, "T"]
    ) -> Float[Tensor, "T"]:
        """Log-probability of each label as if inputs came one by one, each written once scored.

        See `score_stream`, which does this for streams of any length.
        """
        keys = self.embed(inputs)
        self.check_labels(labels)
        k = max(1, self.predictor.k)
        with self.memory.lock, _own_precision(keys):
            neighbors = self.memory.read_causally(keys, labels, k, keys_for=self.predictor.keys_for)
            prediction = self.predictor(self._context(keys, neighbors))
            self.memory.write(keys, labels)
        return prediction.gather(1, labels.to(prediction.device)[:, None])[:, 0]

    def check_labels(self, values: Shaped[Tensor, "..."]) -> None:
        """Raise `ValueError` if the head does not know one of these labels."""
        if not self.memory.holds_labels or not values.numel():
            return
        if (label := int(values.max())) >= self.classes:
            raise ValueError(
                f"labels must be below {self.classes}, the classes the head knows, got {label}: "
                f"grow(classes={label + 1}) makes room"
            )

    def grow(self, classes: int, *, bias: float = 0.0) -> None:
        """Make room for labels the head has never seen.

        MbPA gets a head of its own, the old rows copied, the new ones of zero weight; the module
        handed in stays as it is (assign `model.head` to it to adopt the grown one).

        Args:
            classes: how many there are to be.
            bias: of the new rows.
        """
        if classes < self.classes:
            raise ValueError(f"classes must be at least {self.classes}, got {classes}")
        self._head = grow(self._head, classes, bias=bias)
        self._has_grown = True
        self._output_shape = self._probed_output_shape()

    def refresh(self, inputs_of: Callable[[Tensor], Any], *, batch_size: int = 256) -> None:
        """Embed every entry's input anew, after `embed` has been trained further.

        Predictions go on with the old keys meanwhile; the new ones take effect all at once.

        Args:
            inputs_of: gives the inputs of entries by their ids (a 1-d tensor).
        """
        ids = self.memory.entries().ids
        batches = [self.embed(inputs_of(batch)) for batch in ids.split(batch_size) if len(batch)]
        if not batches:
            return
        keys = torch.cat(batches)
        with self.memory.lock:
            still_there = self.memory.holds(ids)
            self.memory.replace_keys(ids[still_there], keys[still_there.to(keys.device)])

    # Saving

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write memory, predictor and, if it has grown, the head into a directory, atomically.

        The modules handed in are yours to save.
        """
        memory = self.memory
        with memory.lock:
            entries, next_id = memory.entries(), memory.next_id
        tensors = {"memory": dict(entries._asdict())}
        if self._has_grown:
            tensors["head"] = dict(self._head.state_dict())
        description = {
            "memory": {
                "type": type(memory).__name__,
                "capacity": memory.capacity,
                "key_dim": list(memory.key_shape),
                "value_shape": list(memory.value_shape),
                "value_dtype": str(memory.value_dtype).removeprefix("torch."),
                "dtype": str(memory.dtype).removeprefix("torch."),
                "next_id": next_id,
            },
            "predictor": describe(self.predictor),
            "grown_classes": self.classes if self._has_grown else None,
        }
        save_checkpoint(directory, tensors=tensors, description=description)

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
    ) -> MbPA:
        """The model that `save` wrote, around the same `embed` and `head` as when it was made.

        Args:
            memory: filled with the saved entries; needed if the saved one was of your own class.
            predictor: used in place of the saved one; needed if that had parts of your own.
        """
        checkpoint = load_checkpoint(directory)
        try:
            saved, grown = checkpoint.description["memory"], checkpoint.description["grown_classes"]
            if predictor is None:
                predictor = _saved_predictor(checkpoint.description["predictor"])
            if memory is None:
                memory = _saved_memory(saved, _device_of(head))
            stored = Entries(**checkpoint.tensors["memory"])
            entries = Entries(stored.ids, *(part.to(memory.device) for part in stored[1:]))
            memory.restore(entries, saved["next_id"])
        except (KeyError, TypeError, AttributeError) as error:
            manifest = os.path.join(directory, "manifest.json")
            raise CheckpointError(f"{manifest} does not describe an MbPA model") from error
        if grown is not None and head is not None:
            head = _saved_head(head, grown, checkpoint.tensors["head"])
        model = cls(embed, head, memory=memory, predictor=predictor, engine=engine)
        model._has_grown = grown is not None
        return model

    # Between the parts

    def _flat_keys(
        self, inputs: tuple[Any, ...], named: dict[str, Any], keys: Tensor | None
    ) -> tuple[Tensor, tuple[int, ...]]:
        """Keys (B, *key_shape) and the leading dimensions they had."""
        if (keys is None) == (not inputs and not named):
            raise ValueError("give inputs or keys=, one of the two")
        if keys is None:
            keys = self.embed(*inputs, **named)
        shape = self.memory.key_shape
        leading = tuple(keys.shape[: max(0, keys.ndim - len(shape))])
        if tuple(keys.shape) != (*leading, *shape):
            raise ValueError(f"keys must end in the shape {shape}, got {tuple(keys.shape)}")
        return keys.detach().reshape(math.prod(leading), *shape), leading

    def _read(self, keys: Float[Tensor, "B *D"]) -> Neighbors:
        k = max(1, self.predictor.k)
        return self.memory.read(keys, k, keys_for=self.predictor.keys_for)

    def _context(self, keys: Float[Tensor, "B *D"], neighbors: Neighbors) -> Context:
        """Everything a predictor needs to know of these queries."""
        self._check_modes()
        if self.memory.holds_labels and neighbors.values.numel():
            self.check_labels(torch.where(neighbors.mask, neighbors.values, 0))
        queries = keys.to(_dtype_of(self._head, keys.dtype))
        outputs = self._head(queries)
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        return Context(
            head=self._head,
            engine=self._engine,
            capacity=self.memory.capacity,
            has_labels=self.memory.holds_labels,
            queries=queries,
            outputs=outputs,
            parametric=outputs.log_softmax(1) if self.memory.holds_labels else outputs,
            neighbors=neighbors,
        )

    def _probed_output_shape(self) -> tuple[int, ...]:
        """Shape of one output, learnt by running the head on a key of zeros."""
        memory, device = self.memory, _device_of(self._head)
        if device is not None and device != memory.device:
            raise ValueError(f"memory must be on the head's device {device}, got {memory.device}")
        dtype = _dtype_of(self._head, torch.float32)
        key = torch.zeros(1, *memory.key_shape, dtype=dtype, device=memory.device)
        with _own_precision(key):
            try:
                shape = tuple(self._head(key).shape)
            except (RuntimeError, ValueError, IndexError) as error:
                raise ValueError(
                    f"the head must take keys of shape (B, {', '.join(map(str, key.shape[1:]))}), "
                    f"it says: {error}"
                ) from error
        if memory.holds_labels and len(shape) != 2:
            raise ValueError(f"a head for labels must give logits (B, C), got {('B', *shape[1:])}")
        if not memory.holds_labels and shape[1:] != memory.value_shape:
            raise ValueError(
                f"the head's outputs must have the targets' shape {memory.value_shape}, "
                f"got {shape[1:]}"
            )
        return shape[1:]

    def _check_modes(self) -> None:
        for name, module in (("embed", self._embed), ("head", self._head)):
            for path, part in module.named_modules() if isinstance(module, nn.Module) else ():
                if part.training and _is_random_or_updating(part):
                    raise ValueError(
                        f"{name} must be in eval mode, got an active {type(part).__name__} "
                        f"at {path or name!r}: call .eval(), or use mbpa.split"
                    )


@contextmanager
def _own_precision(keys: Tensor) -> Iterator[None]:
    """No gradients, and the head's own dtype even under autocast: adaptation wants no less.

    Inference mode is left, since inside it autograd may give zeros and tables made for later calls
    could not be filled by them.
    """
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(keys.device.type, enabled=False),
    ):
        yield


def _is_random_or_updating(module: nn.Module) -> bool:
    """Whether in training mode it would draw random numbers or change its buffers."""
    norms = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
    if isinstance(module, norms):
        return module.track_running_stats or isinstance(module, nn.modules.batchnorm._BatchNorm)
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        return module.dropout > 0
    return isinstance(module, nn.RReLU)


def _device_of(module: nn.Module | None) -> torch.device | None:
    return next((p.device for p in module.parameters()), None) if module is not None else None


def _dtype_of(module: nn.Module, default: torch.dtype) -> torch.dtype:
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), default)


def _saved_predictor(description: Any) -> Predictor:
    if custom := custom_parts(description):
        raise ValueError(
            f"the saved predictor has parts of your own, {', '.join(custom)}: pass predictor="
        )
    predictor = build(description)
    if not isinstance(predictor, Predictor):
        raise TypeError(f"not a predictor: {description}")
    return predictor


def _saved_head(head: nn.Module, classes: int, tensors: dict[str, Tensor]) -> nn.Module:
    grown = grow(head, classes)
    try:
        grown.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(f"head must be the one the model was saved with: {error}") from error
    return grown


def _saved_memory(saved: dict[str, Any], device: torch.device | None) -> Memory:
    if saved["type"] != ExactMemory.__name__:
        raise ValueError(f"the saved memory was a {saved['type']}: pass an empty one as memory=")
    return ExactMemory(
        saved["capacity"],
        saved["key_dim"],
        value_shape=saved["value_shape"],
        value_dtype=getattr(torch, saved["value_dtype"]),
        dtype=getattr(torch, saved["dtype"]),
        device=device or "cpu",
    )
