"""The user's embedding as MbPA runs it: in eval mode, whatever mode the network is in."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from mbpa.modules.sharing import share, unwrap
from mbpa.modules.split import Trunk


class Embedding:
    """An embedding, and what MbPA runs: for a module, a copy that is always in eval mode.

    Args:
        function: a module, or any other callable, which runs as it is.
        head: the head of the same network. Its weights do not count as those of the embedding,
            though a module that was split holds both.
    """

    def __init__(self, function: Callable[..., Tensor], head: nn.Module) -> None:
        self.function = function
        self.module = unwrap_all(function) if isinstance(function, nn.Module) else None
        # The copies that `split` makes of a layer share its dictionary of parameters.
        heads = [head, self.module.split_layer] if isinstance(self.module, Trunk) else [head]
        self._parameters_of_head = [m._parameters for each in heads for m in each.modules()]
        self.renew()

    def renew(self) -> None:
        """Make a new copy to run, after parameters were moved or replaced."""
        self.running: Callable[..., Tensor] = self.function
        if self.module is not None:
            self.running = share(self.module, {})

    def check_mode(self) -> None:
        """Raise `ValueError` if the owner of a method, in its mode, is random or changes itself.

        A method runs on the object that it is bound to, which no copy can stand in for: it may be
        half made, or hold the MbPA model.
        """
        owner = self.function.__self__ if isinstance(self.function, MethodType) else None
        for path, part in owner.named_modules() if isinstance(owner, nn.Module) else ():
            if part.training and _is_random_or_updating(part):
                raise ValueError(
                    f"embed must be in eval mode, got an active {type(part).__name__} at "
                    f"{path or 'embed'!r}: call .eval(), or pass a module or use mbpa.split, which "
                    "run in eval mode by themselves"
                )

    def weights(self) -> Iterator[Tensor]:
        """Yield the parameters and persistent buffers of a module, without those of the head."""
        of_head = {id(parameters) for parameters in self._parameters_of_head}
        for module in self.module.modules() if self.module is not None else ():
            if id(module._parameters) not in of_head:
                yield from _list_tensors(module)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "running"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.renew()


def unwrap_all(module: nn.Module) -> nn.Module:
    """Return the module inside any number of wrappers, whose names are no part of a state dict."""
    while (inner := unwrap(module)) is not module:
        module = inner
    return module


def list_weights(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and persistent buffers of a module and its submodules."""
    for each in module.modules():
        yield from _list_tensors(each)


def digest_weights(weights: Iterator[Tensor]) -> str | None:
    """Return a digest of these tensors: of dtypes, shapes and bytes, but not of names or devices.

    `None` if there are none, or some that cannot be read as plain numbers.
    """
    digest, count = hashlib.sha256(), 0
    for tensor in weights:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
            return None
        if tensor.is_meta or tensor.is_quantized:
            return None
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
        plain = tensor.detach().cpu().contiguous().flatten()
        digest.update(plain.view(torch.uint8).numpy().data if len(plain) else b"")
        count += 1
    return digest.hexdigest() if count else None


def _list_tensors(module: nn.Module) -> Iterator[Tensor]:
    buffers = (b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set)
    yield from (each for each in (*module._parameters.values(), *buffers) if each is not None)


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
