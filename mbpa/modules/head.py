"""The user's modules as MbPA runs them: in eval mode, in their own dtype, and never changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mbpa.memory import Memory
from mbpa.modules.sharing import share
from mbpa.modules.split import Trunk


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


def eval_copy(embed: Callable[..., Tensor]) -> Callable[..., Tensor]:
    if isinstance(embed, nn.Module) and not isinstance(embed, Trunk):  # a trunk already is one
        return share(embed, {})
    return embed


def check_mode(name: str, module: object) -> None:
    """Raise `ValueError` if the module, in its current mode, is random or changes its buffers."""
    module = getattr(module, "__self__", module)  # the owner of a bound method
    for path, part in module.named_modules() if isinstance(module, nn.Module) else ():
        if part.training and _is_random_or_updating(part):
            raise ValueError(
                f"{name} must be in eval mode, got an active {type(part).__name__} "
                f"at {path or name!r}: call .eval(), or use mbpa.split"
            )


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


def _is_random_or_updating(module: nn.Module) -> bool:
    """Return whether the module draws random numbers or changes its buffers in training mode."""
    norms = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
    if isinstance(module, norms):
        return module.track_running_stats or isinstance(module, nn.modules.batchnorm._BatchNorm)
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        return module.dropout > 0
    return isinstance(module, nn.RReLU)


def device_of(module: nn.Module | None) -> torch.device | None:
    return next((p.device for p in module.parameters()), None) if module is not None else None


def dtype_of(module: nn.Module, default: torch.dtype) -> torch.dtype:
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), default)
