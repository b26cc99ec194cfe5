"""A network with a memory as one `nn.Module`: modes, moving, state dicts, copies.

The user's embedding and head are registered as submodules, so that everything that walks over
modules finds their parameters. What runs are copies of them that share their weights and are always
in eval mode (`mbpa.modules`). The memory is not a module, and may be a database. Its entries are
part of the state dict as long as the memory holds them itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ParamSpec, Self, TypeVar

import torch
from torch import Tensor, nn

from mbpa.adaptation import Engine
from mbpa.memory import Entries, Memory
from mbpa.modules.embedding import Embedding, unwrap_all
from mbpa.modules.head import Head
from mbpa.modules.key_watch import KeyWatch
from mbpa.modules.split import grow
from mbpa.replay import Replayer

NEXT_ID, GROWN_CLASSES = "memory.next_id", "grown_classes"
ENTRIES = tuple(f"memory.{name}" for name in Entries._fields)

P = ParamSpec("P")
T = TypeVar("T")


def disable_compilation(method: Callable[P, T]) -> Callable[P, T]:
    """Decorate a method so that `torch.compile` of surrounding code leaves it as it is.

    Locks, a memory that changes and choices by value are nothing to trace.
    """

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            plain: Callable[P, T] = torch.compiler.disable(method)  # which imports a lot
            return plain(*args, **kwargs)
        return method(*args, **kwargs)

    return run


class MemoryModule(nn.Module):
    """What `MbPA` is besides a predictor: an embedding, a head and a memory as one module.

    Args:
        embed: maps inputs to keys.
        head: maps keys to outputs.
        memory: stores the examples.
        engine: computes adaptations.
    """

    def __init__(
        self, embed: Callable[..., Tensor], head: nn.Module, memory: Memory, engine: Engine
    ) -> None:
        super().__init__()
        self._memory, self._engine, self._replayer = memory, engine, Replayer()
        self._embedding = Embedding(embed, head)
        if self._embedding.module is not None:
            self._modules["embedding"] = self._embedding.module
        self._use_head(Head.probe(head, memory))
        self._watch = KeyWatch(self._embedding.weights, memory)
        self._postponed: list[Callable[[], None]] | None = None  # while `load_state_dict` runs
        self._is_reloaded = False  # whether entries were loaded, but not yet the submodules
        self.register_load_state_dict_post_hook(_finish_loading)  # type: ignore[no-untyped-call]  # torch's

    def _use_head(self, head: Head) -> None:
        self._head = head
        self._modules["head"] = unwrap_all(head.module)

    @property
    def memory(self) -> Memory:
        """The memory that stores the examples."""
        return self._memory

    @property
    def embedding(self) -> Callable[..., Tensor]:
        """What was passed in as `embed`: a module, which is registered, or a function."""
        module = self._embedding.module
        return self._embedding.function if module is None else module

    @property
    def head(self) -> nn.Module:
        """The head in use: the module passed in, or after `grow` MbPA's own enlarged copy."""
        return self._head.module

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("embedding", "head"):  # nn.Module would register it, and nothing would run it
            raise AttributeError(f"{name} cannot be assigned: make another MbPA with it")
        super().__setattr__(name, value)

    # Modes

    def train(self, mode: bool = True) -> Self:
        """Set `training`, and nothing else: predictions are always those of eval mode.

        The modules passed in keep the mode that they are in; they are for you to switch.
        """
        if not isinstance(mode, bool):
            raise ValueError(f"mode must be True or False, got {mode!r}")
        self.training = mode
        return self

    # Moving and converting

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or convert parameters, buffers and the memory; torch calls this for `to` and others.

        The keys of a memory follow like a buffer, and so do regression targets. A memory that lives
        elsewhere keeps its dtype and only answers on another device.
        """
        memory = self._memory
        wanted = fn(torch.empty(0, dtype=memory.dtype, device=memory.device))
        dtype = wanted.dtype if memory.is_local and wanted.dtype != memory.dtype else None
        with memory.lock, self._watch.follow_conversion(), memory.undo_on_error():
            if dtype is not None or wanted.device != memory.device:
                memory.to(wanted.device, dtype=dtype)
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's
            self._renew_copies()
        return self

    def _renew_copies(self) -> None:
        self._embedding.renew()
        self._head = self._head.renew()

    # State dicts

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._head.is_ours:
            destination[prefix + GROWN_CLASSES] = torch.tensor(self._head.output_shape[0])
        if self._memory.is_local:
            with self._memory.lock:
                entries, next_id = self._memory.entries(), self._memory.next_id
            for name, tensor in zip(ENTRIES, entries, strict=True):
                destination[prefix + name] = tensor
            destination[prefix + NEXT_ID] = torch.tensor(next_id)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load weights and entries; if anything is refused, nothing has changed.

        The arguments are those of `nn.Module.load_state_dict`. Numbers are converted to the dtypes
        that the network and the memory have. The entries replace those in the memory, which keeps
        its capacity; there must be room for them. If the saved head was grown, the head is grown.
        """
        with self._memory.lock, self._undo_on_error():
            postponed: list[Callable[[], None]] = []
            self._postponed = postponed
            try:
                result = super().load_state_dict(state_dict, strict, assign)
            finally:
                self._postponed = None
            for replace_entries in postponed:
                replace_entries()
        if postponed:
            self._watch.start_over()
        return result

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load what is not in a submodule; torch calls this, also for a model inside a module."""
        state = dict(state_dict)
        grown = state.pop(prefix + GROWN_CLASSES, None)
        held = {name: state.pop(prefix + name, None) for name in (*ENTRIES, NEXT_ID)}
        super()._load_from_state_dict(
            state, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        errors = [] if grown is None else self._grow_for(grown)
        absent = [prefix + name for name, tensor in held.items() if tensor is None]
        if not self._memory.is_local:
            unexpected_keys += [prefix + name for name in held if prefix + name not in absent]
        elif absent:
            missing_keys += absent
        elif not errors:
            errors += self._take_entries(held)
        error_msgs += [f"{prefix}{error}" for error in errors]

    def _grow_for(self, grown: Any) -> list[str]:
        """Grow the head to as many classes as the saved one was grown to; return errors."""
        try:
            classes = _parse_count(grown)
            if not (self._head.is_ours and self._head.output_shape == (classes,)):
                head = grow(self.head, classes)
                self._use_head(Head.probe(head, self._memory, is_ours=True))
        except ValueError as error:
            return [f"head was grown to another number of classes: {error}"]
        return []

    def _take_entries(self, held: dict[str, Any]) -> list[str]:
        """Replace the entries, now or when everything else was loaded; return errors."""
        try:
            next_id = _parse_count(held[NEXT_ID])
            given = [held[name] for name in ENTRIES]
            if wrong := [each for each in given if not isinstance(each, Tensor)]:
                raise ValueError(f"entries must be tensors, got {type(wrong[0]).__name__}")
            entries = Entries(given[0], *(each.to(self._memory.device) for each in given[1:]))
            replace_entries = self._memory.prepare_restore(entries, next_id)
            if self._memory.holds_labels and len(entries.values):
                most, known = int(entries.values.max()), self._head.output_shape[0]
                if most >= known:
                    raise ValueError(f"labels must be below the head's {known}, got {most}")
        except ValueError as error:
            return [f"memory cannot be loaded: {error}"]
        if self._postponed is None:
            replace_entries()
            self._is_reloaded = True
        else:
            self._postponed.append(replace_entries)
        return []

    @contextmanager
    def _undo_on_error(self) -> Iterator[None]:
        """Undo changes of the network if the context is left by an exception."""
        head = self._head
        held: list[Any] = [each for m in self.modules() for each in (m._parameters, m._buffers)]
        before = [dict(each) for each in held]
        tensors = {id(t): t for each in before for t in each.values() if t is not None}
        copies = [(tensor, tensor.detach().clone()) for tensor in tensors.values()]
        try:
            yield
        except BaseException:
            for now, then in zip(held, before, strict=True):
                now.clear()
                now.update(then)
            with torch.no_grad():
                for tensor, copied in copies:
                    if not tensor.is_inference():  # such a tensor cannot have changed
                        tensor.copy_(copied)
            self._use_head(head)
            self._renew_copies()
            raise

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]  # torch's
        del state["_replayer"]
        return {**state, "_modules": dict(state["_modules"])}  # so that a copy can grow by itself

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's
        self._replayer = Replayer()


def _finish_loading(module: MemoryModule, keys: object) -> None:
    """Take over parameters that were replaced, after the submodules were loaded."""
    module._renew_copies()
    if module._is_reloaded:
        module._is_reloaded = False
        module._watch.start_over()


def _parse_count(number: Any) -> int:
    if not isinstance(number, Tensor) or number.numel() != 1 or number.is_floating_point():
        raise ValueError(f"a count must be a tensor of one whole number, got {number!r}")
    return int(number)
