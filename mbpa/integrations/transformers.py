"""Classifiers of Hugging Face's transformers with a memory, and a Trainer that fills it.

A callback of transformers does not see the batches of the training loop. `MemoryTrainerMixin`
therefore extends `Trainer` where it is meant to be extended (`training_step`, `prediction_step`,
`save_model`) and passes the batches to a `MemoryCallback`. Neither the network nor the loop is
patched or hooked. Needs the extra `huggingface`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mbpa.adaptation import Engine
from mbpa.errors import MissingExtraError
from mbpa.integrations.examples import (
    IGNORED_LABEL,
    ExampleWriter,
    move_memory,
    require_one_process,
    require_shared_head,
    select_labelled,
)
from mbpa.memory import ExactMemory, Memory
from mbpa.memory.schema import parse_schema
from mbpa.model import MbPA
from mbpa.modules.head import device_of
from mbpa.modules.split import split
from mbpa.predictors import Adapted, Predictor

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint
except ImportError as error:
    raise MissingExtraError("transformers", extra="huggingface") from error

__all__ = [
    "MEMORY_FOLDER",
    "MemoryCallback",
    "MemoryTrainer",
    "MemoryTrainerMixin",
    "add_memory",
    "find_head",
    "load_memory",
    "predict_batch",
    "save_memory",
    "write_batch",
]

MEMORY_FOLDER = "mbpa"
"""The folder of the memory inside a directory that `save_pretrained` wrote."""
LABELS = "labels"
"""The name of the labels in a batch."""
_SEQUENCE, _TOKEN, _IMAGE = (
    f"For{kind}Classification" for kind in ("Sequence", "Token", "Image")
)  # how the names of the classes end


# A classifier with a memory


def add_memory(
    classifier: nn.Module,
    *,
    at: str | None = None,
    pooled: bool | None = None,
    capacity: int = 10_000,
    memory: Memory | None = None,
    predictor: Predictor | None = None,
    engine: Engine | None = None,
) -> MbPA:
    """Return a classifier of transformers with a memory, which shares the classifier's weights.

    Call the result with the classifier's inputs by keyword. The classifier is not changed, and the
    result follows it when it is trained. Predictions are log-probabilities (B, C), for token
    classification (B, T, C); for regression (`num_labels=1`) they are values (B, 1).

    Args:
        classifier: a model for sequence, token or image classification; any other model if `at` is
            given.
        at: name of the layer to adapt, which the keys are the inputs of. Default: the last linear
            layer with one output per label (`find_head`).
        pooled: whether the network runs this layer on every position of a sequence and picks one
            of them afterwards, as GPT-2 and Llama do for sequence classification; the key is then
            the input at the picked position. By default this is known from the architecture;
            where it is not, the first prediction is refused with an error that says so.
        capacity: maximum number of entries. The default takes 31 MB for keys of size 768.
        memory: used instead of an `ExactMemory` of that capacity; required if `at` is not a linear
            layer.
        predictor: turns the head's outputs and the neighbours into a prediction. Default:
            `Adapted()`.
        engine: as for `MbPA`.

    Raises:
        ValueError: there is no such layer, it is not clear which one to adapt, or the problem is
            one of several labels per input.
    """
    embed, head = _split(classifier, at, pooled)
    if memory is None:
        if not isinstance(head, nn.Linear):
            raise ValueError(
                f"at must name an nn.Linear unless a memory is given, got {at!r}, "
                f"a {type(head).__name__}"
            )
        is_regression = _is_regression(classifier, head)
        memory = ExactMemory(
            capacity,
            head.in_features,
            value_shape=(head.out_features,) if is_regression else (),
            value_dtype=torch.float32 if is_regression else torch.int64,
            device=device_of(head) or "cpu",
        )
    return MbPA(embed, head, memory=memory, predictor=predictor or Adapted(), engine=engine)


def find_head(classifier: nn.Module) -> str:
    """Return the name of the last linear layer of a classifier: `"classifier"`, `"score"` etc.

    Args:
        classifier: a model for sequence, token or image classification.

    Raises:
        ValueError: the model is no classifier, or it has no such layer, or more than one.
    """
    kind = type(classifier).__name__
    if not kind.endswith((_SEQUENCE, _TOKEN, _IMAGE)):
        raise ValueError(
            f"classifier must be a model for sequence, token or image classification, got {kind}: "
            "name its last layer with at="
        )
    inside = f"{getattr(classifier, 'base_model_prefix', '')}."
    linear = {
        name: layer.out_features
        for name, layer in classifier.named_modules()
        if isinstance(layer, nn.Linear) and not name.startswith(inside)
    }
    # As an attribute of a module, `config` has the type of a tensor or a module.
    labels = int(classifier.config.num_labels)  # type: ignore[union-attr,arg-type]
    found = [name for name, size in linear.items() if size == labels]
    if len({name.split(".")[0] for name in found}) != 1:
        raise ValueError(
            f"{kind} must have one linear layer with an output for each of its {labels} labels, "
            f"got {found or linear}: name the layer to adapt with at="
        )
    return str(found[-1])


def write_batch(model: MbPA, batch: Mapping[str, Any]) -> Int[Tensor, "N"]:
    """Write the examples of a batch to the memory and return their ids.

    Args:
        model: a model that `add_memory` or `load_memory` returned.
        batch: what the classifier takes, with `labels`; examples with the label −100 are left out.
    """
    inputs, labels = _split_batch(batch)
    if labels is None:
        raise ValueError(f"the batch must have {LABELS!r}, got {sorted(batch)}")
    keys, labels = select_labelled(model, model.embed(**inputs), labels)
    return model.write(keys=keys, values=labels)


def predict_batch(model: MbPA, batch: Mapping[str, Any]) -> Float[Tensor, "..."]:
    """Return the predictions for a batch; its labels, if it has any, are not used.

    Padding in a batch of tokens (`attention_mask` 0) is not adapted: it gets the prediction of the
    network alone.

    Args:
        model: a model that `add_memory` or `load_memory` returned.
        batch: what the classifier takes.
    """
    inputs, _ = _split_batch(batch)
    keys, mask = model.embed(**inputs), inputs.get("attention_mask")
    if keys.ndim == 2 or mask is None or mask.shape != keys.shape[:-1]:
        return model(keys=keys)
    chosen = mask.to(keys.device, torch.bool)
    adapted = model(keys=keys[chosen])
    with torch.no_grad():
        outputs = model.head(keys).to(adapted.dtype)
    whole: Tensor = outputs.log_softmax(-1) if model.memory.holds_labels else outputs
    return whole.masked_scatter(chosen[..., None], adapted)


def save_memory(model: MbPA, directory: str | os.PathLike[str]) -> None:
    """Save the memory beside a classifier, in the folder `MEMORY_FOLDER` of its directory.

    Args:
        model: a model that `add_memory` or `load_memory` returned.
        directory: the directory that `save_pretrained` of the classifier wrote, or will write.
    """
    model.save(Path(directory) / MEMORY_FOLDER)


def load_memory(
    classifier: nn.Module,
    directory: str | os.PathLike[str],
    *,
    at: str | None = None,
    pooled: bool | None = None,
    memory: Memory | None = None,
    predictor: Predictor | None = None,
    engine: Engine | None = None,
) -> MbPA:
    """Return a classifier, loaded from a directory, with the memory that was saved beside it.

    Args:
        classifier: the classifier, from `from_pretrained(directory)`.
        directory: the directory in which `save_memory` or a `MemoryTrainer` saved the memory.
        at: as for `add_memory`; must be given here if it was given there, as must `pooled`.
        pooled: as for `add_memory`.
        memory: as for `MbPA.load`.
        predictor: as for `MbPA.load`.
        engine: as for `MbPA.load`.
    """
    embed, head = _split(classifier, at, pooled)
    where, parts = Path(directory) / MEMORY_FOLDER, {"memory": memory, "predictor": predictor}
    # In `parts`, the memory and the predictor have one type for both.
    return MbPA.load(where, embed, head, engine=engine, **parts)  # type: ignore[arg-type]


def _split(
    classifier: nn.Module, at: str | None, pooled: bool | None
) -> tuple[nn.Module, nn.Module]:
    at = find_head(classifier) if at is None else at
    is_sequence = type(classifier).__name__.endswith(_SEQUENCE)
    if pooled is None and is_sequence and at.rsplit(".", 1)[-1] == "score":
        pooled = True
    return split(classifier, at, pooled=pooled)


def _is_regression(classifier: nn.Module, head: nn.Linear) -> bool:
    problem = getattr(getattr(classifier, "config", None), "problem_type", None)
    if problem == "multi_label_classification":
        raise ValueError(
            f"problem_type must be single_label_classification or regression, got {problem!r}: "
            "pass a memory and a predictor with a loss of your own"
        )
    is_sequence = type(classifier).__name__.endswith(_SEQUENCE)
    return problem == "regression" or (problem is None and is_sequence and head.out_features == 1)


def _split_batch(batch: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    if not isinstance(batch, Mapping):
        raise ValueError(f"a batch must be a mapping of named tensors, got {type(batch).__name__}")
    return {name: value for name, value in batch.items() if name != LABELS}, batch.get(LABELS)


# Training


class MemoryCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
    """Fills the memory of a model while a `MemoryTrainer` trains the network.

    The order is that of the paper: the examples of an update are embedded, the network is updated,
    then their keys are written. Keys are computed in eval mode, in a forward pass of their own.

    Args:
        model: what `add_memory` returned for the network that is trained. The Trainer may move the
            network; the memory then moves along.
        at_evaluation: whether `evaluate` and `predict` of the Trainer use the memory. It may be
            changed at any time.
    """

    def __init__(self, model: MbPA, *, at_evaluation: bool = True) -> None:
        self.model, self.at_evaluation = model, at_evaluation
        self._writer = ExampleWriter(model)

    def embed(self, batch: Mapping[str, Any]) -> None:
        """Embed a batch whose examples are to be written after the next update.

        Args:
            batch: what the classifier takes, with `labels`.
        """
        inputs, labels = _split_batch(batch)
        if labels is None:
            raise ValueError(f"batches for training must have {LABELS!r}, got {sorted(batch)}")
        self._writer.embed(inputs, labels)

    def restore(self, directory: str | os.PathLike[str]) -> None:
        """Replace the content of the memory with that saved beside a network.

        Args:
            directory: the directory of the network, which the Trainer loads by itself.
        """
        move_memory(self.model)
        memory = self.model.memory
        empty = ExactMemory(**parse_schema(memory.schema), device=memory.device)
        saved = MbPA.load(
            Path(directory) / MEMORY_FOLDER,
            head=self.model.head,
            memory=empty,
            predictor=self.model.predictor,
            allow_other_weights=True,  # the Trainer loads them afterwards
        ).memory
        memory.restore(saved.entries(), saved.next_id)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Check that the memory can be filled.
        require_one_process(args.world_size, "world_size")
        require_one_process(args.n_gpu, "n_gpu")
        require_shared_head(self.model, kwargs["model"])
        self._writer.discard()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Write the examples of the update.
        if not self._writer.is_pending:
            raise ValueError(
                "a MemoryCallback must be used with a MemoryTrainer, or a Trainer that derives "
                "from MemoryTrainerMixin: others do not pass batches to callbacks"
            )
        self._writer.write()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Restore the memory of the best checkpoint if the Trainer has restored its network.
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self.restore(state.best_model_checkpoint)


class MemoryTrainerMixin:
    """Extends a Trainer so that a `MemoryCallback` sees its batches.

    Use it with a Trainer of your own as `class MyTrainer(MemoryTrainerMixin, TheirTrainer)`; with
    transformers' own it is `MemoryTrainer`. Checkpoints and `save_model` include the memory, and
    resuming restores it.
    """

    args: Any  # of the Trainer, as are the next two
    callback_handler: Any
    _prepare_inputs: Any

    # Types are ignored where `super()` is the Trainer, which a mixin does not know.

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        # Train; if training resumes from a checkpoint, restore the memory from there, too.
        callback = self._memory_callback
        if resume_from_checkpoint:
            asked = resume_from_checkpoint
            output_dir = self.args.output_dir
            directory = get_last_checkpoint(output_dir) if asked is True else asked
            if directory is not None:  # otherwise the Trainer says so
                callback.restore(directory)
        return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]

    def training_step(
        self, model: nn.Module, inputs: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        # Embed the batch, then train on it.
        prepared = self._prepare_inputs(inputs)
        self._memory_callback.embed(prepared)
        return super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        # Predict with the memory; the loss is the cross entropy of these predictions.
        callback = self._memory_callback
        if not callback.at_evaluation:
            return super().prediction_step(  # type: ignore[misc]
                model, inputs, prediction_loss_only, ignore_keys=ignore_keys
            )
        move_memory(callback.model)
        prepared = self._prepare_inputs(inputs)
        predictions, labels = predict_batch(callback.model, prepared), prepared.get(LABELS)
        loss = None if labels is None else _compute_loss(callback.model, predictions, labels)
        return (loss, None, None) if prediction_loss_only else (loss, predictions, labels)

    def save_model(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        # Save the network, and the memory beside it.
        directory = self.args.output_dir if output_dir is None else output_dir
        save_memory(self._memory_callback.model, directory)  # first: what follows may upload it
        super().save_model(output_dir, *args, **kwargs)  # type: ignore[misc]

    @property
    def _memory_callback(self) -> MemoryCallback:
        callbacks = self.callback_handler.callbacks
        found = [each for each in callbacks if isinstance(each, MemoryCallback)]
        if len(found) != 1:
            raise ValueError(
                f"{type(self).__name__} must have one MemoryCallback among its callbacks, "
                f"got {len(found)}"
            )
        return found[0]


# mypy does not follow transformers.
class MemoryTrainer(MemoryTrainerMixin, Trainer):  # type: ignore[misc]
    """A `Trainer` whose `MemoryCallback` fills a memory, and that evaluates with the memory.

    The arguments are those of `transformers.Trainer`; one of the `callbacks` must be a
    `MemoryCallback`.
    """


def _compute_loss(model: MbPA, predictions: Tensor, labels: Tensor) -> Tensor:
    if not model.memory.holds_labels:
        return nn.functional.mse_loss(predictions, labels.reshape(predictions.shape))
    flat = predictions.reshape(-1, predictions.shape[-1])
    return nn.functional.nll_loss(flat, labels.reshape(-1).long(), ignore_index=IGNORED_LABEL)
