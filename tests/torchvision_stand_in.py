"""A stand-in for torchvision, with which Avalanche can be imported where torchvision cannot.

Avalanche imports data sets and transforms of torchvision when it is itself imported. Benchmarks of
tensors use none of them, so empty classes of any name will do. Loggers that Avalanche imports
without using them (wandb, TensorBoard) are handled in the same way.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

STOOD_IN_FOR = ("torchvision", "wandb", "tensorboard", "torch.utils.tensorboard")


def import_avalanche() -> ModuleType | None:
    """Return Avalanche, imported with stand-ins for what is missing; `None` if it is missing."""
    if importlib.util.find_spec("avalanche") is None:
        return None
    # These look for torchvision when they are imported, and must not find the stand-in; unless they
    # cannot be imported without it, since there is a torchvision for another build of torch.
    for name in ("transformers", "torchmetrics"):
        if importlib.util.find_spec(name) is not None:
            _is_importable(name)
    finder = _Finder([name for name in STOOD_IN_FOR if not _is_importable(name)])
    sys.meta_path.insert(0, finder)
    try:
        return importlib.import_module("avalanche")
    finally:  # others look whether torchvision is there, and must not find this one
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if finder.serves(name)]:
            del sys.modules[name]


def _is_importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except (ImportError, RuntimeError):  # a wheel for another build of torch raises the latter
        for loaded in [each for each in sys.modules if f"{each}.".startswith(f"{name}.")]:
            del sys.modules[loaded]
        return False
    return True


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds empty modules for these names and everything below them."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def serves(self, name: str) -> bool:
        return any(f"{name}.".startswith(f"{each}.") for each in self.names)

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if self.serves(name) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _EmptyModule(ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__init__": lambda self, *args, **kwargs: None})
        setattr(self, name, made)
        return made
