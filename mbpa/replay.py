"""Replay of computations on a GPU, for small batches, whose time is mostly that of launches.

A computation that was requested in the same form a few times is recorded as a CUDA graph, which one
call replays. The decisions of a recorded computation are fixed, so code that depends on values on
the GPU asks `assume` whether they are as usual. After a replay all assumptions are checked at once;
if one was wrong, the result is computed anew without the recording. MBPA_REPLAY=0 turns this off.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

REPEATS = 3  # calls of the same form before it is recorded
MAX_BATCH = 256  # larger ones keep a GPU busy anyway
MAX_FORMS = 16  # remembered at a time; recordings hold memory

Compute = Callable[[Tensor], tuple[Tensor, ...]]


@dataclass
class _Assumptions:
    conditions: list[Tensor] = field(default_factory=list)
    checks: list[Callable[[], bool]] = field(default_factory=list)


class _Local(threading.local):
    assumptions: _Assumptions | None = None


_LOCAL = _Local()


class CannotRecordError(RuntimeError):
    """A computation cannot be recorded."""


def assume(condition: Tensor) -> bool:
    """Return whether a condition holds that nearly always does.

    While a computation is recorded, return True without looking.
    """
    if _LOCAL.assumptions is None:
        return bool(condition)
    _LOCAL.assumptions.conditions.append(condition)
    return True


def assume_later(check: Callable[[], bool]) -> None:
    """While a computation is recorded: replay it only as long as `check()` is true."""
    if _LOCAL.assumptions is not None:
        _LOCAL.assumptions.checks.append(check)


def refuse_recording() -> None:
    """While a computation is recorded: give up, since its steps depend on values on the GPU."""
    if is_recording():
        raise CannotRecordError


def is_recording() -> bool:
    """Return whether this thread is recording a computation."""
    return _LOCAL.assumptions is not None


def is_replayed(inputs: Tensor) -> bool:
    """Return whether a computation with these inputs is worth recording."""
    is_small = inputs.device.type == "cuda" and 0 < len(inputs) <= MAX_BATCH
    return is_small and not is_recording() and os.environ.get("MBPA_REPLAY") != "0"


class Replayer:
    """Runs computations, and replays those that are requested repeatedly."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forms: OrderedDict[Hashable, int | _Recording] = OrderedDict()

    def run(self, form: Hashable, compute: Compute, inputs: Tensor) -> tuple[Tensor, ...]:
        """Return `compute(inputs)`.

        Args:
            form: everything besides the values of `inputs`, and of tensors that are modified in
                place, that the result depends on.
            compute: the computation; it must not have side effects.
            inputs: on a GPU.
        """
        if is_recording():
            return compute(inputs)
        with self._lock:
            known = self._forms.pop(form, 0)
            if isinstance(known, int) and known == REPEATS:
                known = _record(compute, inputs) or REPEATS + 1
            elif isinstance(known, int) and known < REPEATS:
                known += 1
            self._forms[form] = known
            if len(self._forms) > MAX_FORMS:
                self._forms.popitem(last=False)
            outputs = known.replay(inputs) if isinstance(known, _Recording) else None
        return compute(inputs) if outputs is None else outputs


@dataclass
class _Recording:
    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    outputs: tuple[Tensor, ...]
    is_valid: Tensor
    checks: list[Callable[[], bool]]

    def replay(self, inputs: Tensor) -> tuple[Tensor, ...] | None:
        """Return the outputs for these inputs, or `None` if an assumption was wrong."""
        if not all(check() for check in self.checks):
            return None
        with torch.inference_mode(False), torch.no_grad():
            self.inputs.copy_(inputs)
            self.graph.replay()
            outputs = tuple(output.clone() for output in self.outputs)
        return outputs if bool(self.is_valid) else None


def _record(compute: Compute, inputs: Tensor) -> _Recording | None:
    """Return a recording, or `None` if the computation cannot be recorded."""
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(False):
        kept = inputs.detach().clone()
    try:
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch.cuda.device(inputs.device),
            _collect() as assumptions,
            torch.cuda.graph(graph, capture_error_mode="thread_local"),
        ):
            outputs = compute(kept)
            conditions = [condition.view(1) for condition in assumptions.conditions]
            nothing = torch.empty(0, dtype=torch.bool, device=kept.device)
            is_valid = torch.cat([*conditions, nothing]).all()
    except RuntimeError:  # of CUDA, or CannotRecordError
        torch.cuda.synchronize(inputs.device)
        return None
    return _Recording(graph, kept, outputs, is_valid, assumptions.checks)


@contextmanager
def _collect() -> Iterator[_Assumptions]:
    _LOCAL.assumptions = _Assumptions()
    try:
        yield _LOCAL.assumptions
    finally:
        _LOCAL.assumptions = None
