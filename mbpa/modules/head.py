"""The user's head as MbPA runs it: in eval mode, in its own dtype, and never changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mbpa.memory import Memory
from mbpa.modules.sharing import share


@dataclass(frozen=True, eq=False)
class Head:
    """A head, and the copy that MbPA runs, which is always in eval mode."""

    module: nn.Module
    running: nn.Module
    output_shape: tuple[int, ...]
    is_ours: bool

    @classmethod
    def probe(cls, module: nn.Module, memory: Memory, is_ours: bool = False) -> Head:
        """Create a `Head`, running it on a key of zeros to check it and find its output shape."""
        running = share(module, {})
        device = device_of(running)
        if device is not None and device != memory.device:
            raise ValueError(f"memory must be on the head's device {device}, got {memory.device}")
        dtype = dtype_of(running, torch.float32)
        key = torch.zeros(1, *memory.key_shape, dtype=dtype, device=memory.device)
        takes = f"the head must take keys of shape (B, {', '.join(map(str, memory.key_shape))})"
        with own_precision(key):
            try:
                output = running(key)
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                raise ValueError(f"{takes}, but it raised: {error}") from error
        if not isinstance(output, Tensor) or output.shape[:1] != (1,):
            got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(f"{takes} and give a tensor (B, …), for one key it gave {got}")
        shape = tuple(output.shape[1:])
        if memory.holds_labels and len(shape) != 1:
            raise ValueError(f"a head for labels must give logits (B, C), got {('B', *shape)}")
        if not memory.holds_labels and shape != memory.value_shape:
            raise ValueError(
                f"the head's outputs must have the targets' shape {memory.value_shape}, got "
                f"{shape}: make the memory with value_shape={shape}"
            )
        return cls(module, running, shape, is_ours)

    def renew(self) -> Head:
        """Return the head with a new copy to run, after its parameters were moved or replaced."""
        return replace(self, running=share(self.module, {}))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "running"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, running=share(state["module"], {}))


@contextmanager
def own_precision(keys: Tensor) -> Iterator[None]:
    """Disable gradients and autocast, since adaptation needs at least the head's own precision.

    Inference mode is disabled, too. Inside it autograd may return zeros, and later calls could not
    write to tables created in it.
    """
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(keys.device.type, enabled=False),
    ):
        yield


def device_of(module: nn.Module | None) -> torch.device | None:
    return next((p.device for p in module.parameters()), None) if module is not None else None


def dtype_of(module: nn.Module, default: torch.dtype) -> torch.dtype:
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), default)
