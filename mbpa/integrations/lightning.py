"""A callback of Lightning that fills a memory while a network is trained, and evaluates with it.

It works with the Trainer of `lightning` and with that of `pytorch_lightning`. Needs the extra
`lightning`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mbpa.errors import MissingExtraError
from mbpa.integrations.examples import (
    ExampleWriter,
    embed_inputs,
    move_memory,
    require_one_process,
    require_shared_head,
    select_labelled,
)
from mbpa.memory import Entries
from mbpa.memory.schema import check_schema
from mbpa.model import MbPA

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback
    except ImportError as error:
        raise MissingExtraError("lightning", extra="lightning") from error

__all__ = ["MemoryCallback", "unpack_batch"]


def unpack_batch(batch: Any) -> tuple[Any, Any]:
    """Return the inputs and the labels of a batch.

    Args:
        batch: a pair of inputs and labels, or a mapping with `labels`.
    """
    if isinstance(batch, Mapping) and "labels" in batch:
        return {name: value for name, value in batch.items() if name != "labels"}, batch["labels"]
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    got = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
    raise ValueError(
        f"a batch must be a pair of inputs and labels, or a mapping with 'labels', got {got}: "
        "pass unpack="
    )


class MemoryCallback(Callback):  # type: ignore[misc]  # lightning is not followed
    """Fills the memory of a model during `fit`, and evaluates with it.

    The order is that of the paper: the examples of an update are embedded, the network is updated,
    then their keys are written. Keys are computed in eval mode, in a forward pass of their own.
    With gradient accumulation, the examples of all batches of an update are written after it.

    Checkpoints include the memory, and resuming from one restores it bit for bit.

    Args:
        model: an `MbPA` around the network that is trained (`mbpa.split`). Lightning may move the
            network; the memory then moves along.
        unpack: returns the inputs and the labels of a batch. Inputs may be one tensor, a tuple of
            positional arguments of the network, or a mapping of keyword arguments. Labels −100 are
            left out. Default: `unpack_batch`.
        metric: name under which validation and test log the accuracy of predictions with the
            memory (for regression: the mean squared error), with `val_` or `test_` before it.
            `None` to predict without the memory only.
    """

    def __init__(
        self,
        model: MbPA,
        *,
        unpack: Callable[[Any], tuple[Any, Any]] = unpack_batch,
        metric: str | None = "memory",
    ) -> None:
        super().__init__()
        self.model, self.unpack, self.metric = model, unpack, metric
        self._writer = ExampleWriter(model)
        self._updates = 0

    def predict(self, batch: Any) -> Tensor:
        """Return the predictions for a batch with the memory: log-probabilities, or values.

        Args:
            batch: a batch as in training; its labels are not used.
        """
        move_memory(self.model)
        prediction: Tensor = self.model(keys=embed_inputs(self.model, self.unpack(batch)[0]))
        return prediction

    # Filling

    def setup(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        # Check that there is one process.
        require_one_process(trainer.world_size, "world_size")

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        # Check that training reaches the head of the model.
        require_shared_head(self.model, pl_module)
        self._writer.discard()
        self._updates = trainer.global_step

    def on_train_batch_start(
        self, trainer: Any, pl_module: nn.Module, batch: Any, batch_idx: int
    ) -> None:
        # Embed the batch.
        self._writer.embed(*self.unpack(batch))

    def on_train_batch_end(
        self, trainer: Any, pl_module: nn.Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Write the examples of an update.
        if trainer.global_step != self._updates:
            self._updates = trainer.global_step
            self._writer.write()

    def on_train_epoch_end(self, trainer: Any, pl_module: nn.Module) -> None:
        # Write what is left if the network is updated by means that Lightning does not count.
        self._writer.write()

    # Evaluating

    def on_validation_batch_end(
        self,
        trainer: Any,
        pl_module: nn.Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        # Log how good the predictions with the memory are.
        self._log("val_", pl_module, batch)

    def on_test_batch_end(
        self,
        trainer: Any,
        pl_module: nn.Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        # Log how good the predictions with the memory are.
        self._log("test_", pl_module, batch)

    def _log(self, prefix: str, pl_module: Any, batch: Any) -> None:
        if self.metric is None:
            return
        move_memory(self.model)
        inputs, labels = self.unpack(batch)
        keys, labels = select_labelled(self.model, embed_inputs(self.model, inputs), labels)
        if not len(keys):
            return
        predictions = self.model(keys=keys)
        if self.model.memory.holds_labels:
            name, values = f"{prefix}{self.metric}_accuracy", predictions.argmax(-1) == labels
        else:
            name, values = f"{prefix}{self.metric}_mse", (predictions - labels).square()
        mean = values.to(torch.float32).mean()
        pl_module.log(name, mean, on_step=False, on_epoch=True, batch_size=len(keys))

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        # Return the content of the memory, for a checkpoint.
        memory = self.model.memory
        with memory.lock:
            entries = {name: part.cpu() for name, part in memory.entries()._asdict().items()}
            return {"schema": memory.schema, "next_id": memory.next_id, "entries": entries}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Restore the content of the memory, which must have the form of the saved one.
        memory = self.model.memory
        check_schema(state_dict["schema"], memory.schema)
        entries = Entries(**state_dict["entries"])
        keys, values = entries.keys.to(memory.device), entries.values.to(memory.device)
        memory.restore(Entries(entries.ids, keys, values), state_dict["next_id"])
        self._writer.discard()
