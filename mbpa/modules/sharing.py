"""Copies of modules that share their weights and nothing else.

A copy holds the same ``_parameters`` and ``_buffers`` dicts as its original, so it always has the
user's weights, even after they are replaced. Everything else, above all the training mode, is its
own.
"""

import copy
import functools
from types import CellType, FunctionType, MethodType
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

_SHARED = ("_parameters", "_buffers")
_HOOKS = {k for k, v in vars(nn.Module()).items() if isinstance(v, dict)} - {*_SHARED, "_modules"}
_HOLDERS = (list, tuple, dict, MethodType, FunctionType, functools.partial)


def share(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a copy of the module tree, in eval mode, that shares its parameters and buffers.

    Args:
        module: the original, which is not changed.
        memo: copies made so far, by ``id`` of the original; these are not copied again.
    """
    if id(module) in memo:
        return cast(nn.Module, memo[id(module)])
    _refuse_uncopyable(module)
    if unwrap(module) is not module:
        memo[id(module)] = share(unwrap(module), memo)
        return cast(nn.Module, memo[id(module)])
    # Not copy.copy: it would call __getstate__, from which classes may omit attributes.
    twin = object.__new__(type(module))
    memo[id(module)] = twin  # before the children, which may refer back to it
    for name, value in vars(module).items():
        vars(twin)[name] = value if name in _SHARED else _rewire(value, memo)
    for name in _HOOKS & vars(twin).keys():
        # Transformers installs hooks during a forward pass: they must stay with the copy.
        vars(twin)[name] = copy.copy(vars(twin)[name])
    if isinstance(module, nn.RNNBase):
        # torch writes to this list, in either module, and rebuilds it when parameters change.
        vars(twin)["_flat_weights"] = list(module._flat_weights)
    vars(twin)["_modules"] = {
        name: None if child is None else share(child, memo)
        for name, child in module._modules.items()
    }
    vars(twin)["training"] = False
    return twin


def _refuse_uncopyable(module: nn.Module) -> None:
    kind = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(f"modules must be Python, got a ScriptModule ({kind}): split its source")
    held = (*module._parameters.values(), *module._buffers.values())
    if any(is_lazy(t) for t in held if t is not None):
        raise ValueError(f"parameters must be initialised, got a lazy {kind}: run a batch first")


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside a wrapper of torch.compile or data parallelism.

    Copies run uncompiled and in one process.
    """
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return cast(nn.Module, module.module)
    compiled_from = module._modules.get("_orig_mod")
    return module if compiled_from is None else compiled_from


def _rewire(value: Any, memo: dict[int, Any]) -> Any:
    """Return ``value`` with the modules it holds replaced by their copies.

    The originals would run in the user's training mode. Modules are found in lists, tuples, dicts,
    bound methods (``self.act = self._act``), partials (with which accelerate replaces ``forward``)
    and closures (hooks that write to ``self``). A value that holds no module is shared.
    """
    if isinstance(value, nn.Module):
        return share(value, memo)
    if not isinstance(value, _HOLDERS):
        return value
    if id(value) not in memo:
        memo[id(value)] = value  # it may hold itself
        memo[id(value)] = _rebuild(value, memo)
    return memo[id(value)]


def _rebuild(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, FunctionType):
        return _rebuild_function(value, memo)
    if isinstance(value, dict):
        old = list(value.values())
    elif isinstance(value, MethodType):
        old = [value.__self__]
    elif isinstance(value, functools.partial):
        old = [value.func, value.args, value.keywords]
    else:
        old = list(value)
    new = [_rewire(v, memo) for v in old]
    if all(a is b for a, b in zip(old, new, strict=True)):
        return value
    if isinstance(value, MethodType):
        return MethodType(value.__func__, new[0])
    if isinstance(value, functools.partial):
        return functools.partial(new[0], *new[1], **new[2])
    if isinstance(value, tuple):
        return value._make(new) if hasattr(value, "_make") else tuple(new)
    rebuilt = copy.copy(value)
    for key, item in zip(value if isinstance(value, dict) else range(len(new)), new, strict=True):
        rebuilt[key] = item
    return rebuilt


def _rebuild_function(function: FunctionType, memo: dict[int, Any]) -> Any:
    # A compiled method, or model.compile(), is bound to the original: the copy runs it uncompiled.
    compiled_from = getattr(function, "_torchdynamo_orig_callable", None)
    if compiled_from is not None:
        plain = _rewire(compiled_from, memo)
        return function if plain is compiled_from else plain
    old = function.__closure__ or (), function.__defaults__, function.__kwdefaults__
    new = (
        tuple(_rewire_cell(c, memo) for c in old[0]),
        _rewire(old[1], memo),
        _rewire(old[2], memo),
    )
    if all(a is b for a, b in zip((*old[0], *old[1:]), (*new[0], *new[1:]), strict=True)):
        return function
    code, scope, name = function.__code__, function.__globals__, function.__name__
    rebuilt = FunctionType(code, scope, name, new[1], new[0])
    rebuilt.__kwdefaults__ = new[2]
    vars(rebuilt).update(vars(function))
    return rebuilt


def _rewire_cell(cell: CellType, memo: dict[int, Any]) -> CellType:
    try:
        content = cell.cell_contents
    except ValueError:  # not assigned yet
        return cell
    rewired = _rewire(content, memo)
    return cell if rewired is content else CellType(rewired)
