"""Examples in the batches of a training loop: embedded before an update, written after it.

This is the paper's order. The integrations with training loops share it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mbpa.model import MbPA
from mbpa.modules.head import device_of

IGNORED_LABEL = -100
"""The label of positions that do not count, as in torch's cross entropy."""


class ExampleWriter:
    """Writes the examples of training batches to the memory of a model, in the paper's order.

    Call `embed` for every batch before the network is updated, and `write` after the update. With
    gradient accumulation there are several batches per update.

    Args:
        model: its embedding must share the weights of the network that is trained (`mbpa.split`).
    """

    def __init__(self, model: MbPA) -> None:
        self.model = model
        self._pending: list[tuple[Tensor, Tensor]] = []

    @property
    def is_pending(self) -> bool:
        """Whether there are examples that were embedded and are not written yet."""
        return bool(self._pending)

    def embed(self, inputs: Any, labels: Any) -> None:
        """Embed a batch, in eval mode whatever mode the network is in.

        Args:
            inputs: one input, a tuple of positional ones, or a mapping of those by keyword.
            labels: one label or target per key; those equal to `IGNORED_LABEL` are left out.
        """
        move_memory(self.model)
        self._pending.append(select_labelled(self.model, embed_inputs(self.model, inputs), labels))

    def write(self) -> None:
        """Write the examples that were embedded since the last call."""
        pending, self._pending = self._pending, []
        for keys, labels in pending:
            if len(keys):
                self.model.write(keys=keys, values=labels)

    def discard(self) -> None:
        """Forget examples that are not written yet, as after a training that was interrupted."""
        self._pending = []


def embed_inputs(model: MbPA, inputs: Any) -> Tensor:
    """Return the keys of one input, a tuple of positional inputs, or a mapping of named ones."""
    if isinstance(inputs, Mapping):
        return model.embed(**inputs)
    return model.embed(*inputs) if isinstance(inputs, tuple) else model.embed(inputs)


def select_labelled(model: MbPA, keys: Tensor, labels: Any) -> tuple[Tensor, Tensor]:
    """Return keys (N, D) and labels (N, …) of the examples whose label is not to be ignored."""
    memory = model.memory
    leading = keys.shape[: keys.ndim - len(memory.key_shape)]
    labels = torch.as_tensor(labels, device=keys.device).detach()
    expected = (*leading, *memory.value_shape)
    if labels.numel() != math.prod(expected):
        raise ValueError(f"labels must have shape {expected}, got {tuple(labels.shape)}")
    keys = keys.reshape(-1, *memory.key_shape)
    labels = labels.reshape(-1, *memory.value_shape)
    if not memory.holds_labels or labels.is_floating_point():  # the latter are refused by `write`
        return keys.clone(), labels.clone()
    counts = labels.to(torch.int64) != IGNORED_LABEL  # −100 as an unsigned byte would be 156
    return keys[counts], labels[counts]


def move_memory(model: MbPA) -> None:
    """Move the memory to the device of the head, to which a training loop may have moved it."""
    device = device_of(model.head)
    if device is not None and device != model.memory.device:
        model.memory.to(device)


def require_one_process(processes: int, what: str) -> None:
    """Raise `ValueError` if training is distributed: each process would fill its own memory."""
    if processes > 1:
        raise ValueError(
            f"a memory is filled by one process on one device, got {what}={processes}: train "
            "without a memory and write the examples afterwards"
        )


def require_shared_head(model: MbPA, network: nn.Module) -> None:
    """Raise `ValueError` if training `network` would not train the head of `model`."""
    trained = {id(parameter) for parameter in network.parameters()}
    if not all(id(parameter) in trained for parameter in model.head.parameters()):
        raise ValueError(
            f"the head of the MbPA must be a layer of the {type(network).__name__} that is "
            "trained, got another one: split this network (not a copy), and grow after training"
        )
