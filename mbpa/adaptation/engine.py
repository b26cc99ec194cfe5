"""The engine that predictors call: it takes a problem and returns adapted outputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from mbpa.adaptation.losses import CROSS_ENTROPY
from mbpa.adaptation.mlp import solve_mlp
from mbpa.adaptation.optimum import solve_optimum
from mbpa.adaptation.output_cache import OutputStore, StoredOutputs, table_bytes
from mbpa.adaptation.per_query import is_dense_fused, solve_dense, solve_functional
from mbpa.adaptation.plan import (
    DENSE,
    FUNCTIONAL,
    MLP,
    ONE_STEP,
    OPTIMUM,
    PATHS,
    SPAN,
    Plan,
    make_plan,
)
from mbpa.adaptation.problem import Adaptation, Problem
from mbpa.adaptation.span import compute_step_factors, solve_one_step, solve_span
from mbpa.adaptation.step_size import is_rate_open, resolve_step_size
from mbpa.device import Throughput, free_bytes, measure_throughput, ran_out_of_memory, takes_kernels
from mbpa.memory import Neighbors, validation

MAX_SCRATCH_BYTES = {"cpu": 1 << 29, "cuda": 1 << 33}  # by default
LARGE_SCRATCH_BYTES = 1 << 28  # only above this is it worth asking how much memory is free
MAX_PLANS = 1000  # remembered per head
MAX_TABLE_BYTES = 1 << 30
OLD_NAMES = {"layers": MLP}  # of paths, still accepted
MAX_HALF_ERROR = 1e-3  # largest error in log-probability that half-precision rows may cause

Solved = tuple[Tensor, Tensor | None]


class Engine:
    """The engine that computes adaptations for one head and one memory, and caches what it can.

    Args:
        scratch_bytes: memory that a chunk of queries may take while it is adapted. Default: half of
            the free memory, at most 512 MiB on a CPU and 8 GiB on a GPU. If memory runs out
            nevertheless, chunks get smaller, with a warning.
        store_bytes: memory that each table of cached head outputs may take.
        half_store: on a GPU, cache probabilities for one-step adaptation in half precision, which
            takes half the memory and time. They are used only if the log-probabilities are
            guaranteed to be within 1e-3; other calls compute the outputs anew.
        path: compute everything by this path ("functional", "dense", "span", "one step" or
            "mlp") instead of the fastest one; raises `ValueError` if the path cannot compute a
            problem. (`MAP` has only one path, "optimum".)
        rates: speed of the device, for choosing the fastest path; measured if not given.
    """

    def __init__(
        self,
        scratch_bytes: int | None = None,
        store_bytes: int = MAX_TABLE_BYTES,
        *,
        half_store: bool = False,
        path: str | None = None,
        rates: Throughput | None = None,
    ) -> None:
        if path in OLD_NAMES:
            path = OLD_NAMES[path]
        if path not in (None, *PATHS):
            raise ValueError(f"path must be None or one of {PATHS}, got {path!r}")
        if scratch_bytes is not None:
            scratch_bytes = validation.count("scratch_bytes", scratch_bytes)
        self._scratch_bytes, self._store_bytes = scratch_bytes, store_bytes
        self._path, self._rates, self._half_store = path, rates, half_store
        self._plans: WeakKeyDictionary[nn.Module, dict[object, Plan]] = WeakKeyDictionary()
        self._raw = OutputStore(lambda outputs: outputs)
        self._probabilities = OutputStore(lambda outputs: outputs.softmax(-1))
        self._halves = OutputStore(lambda outputs: outputs.softmax(-1), torch.float16)

    def adapt(
        self, problem: Problem, neighbors: Neighbors, want_change: bool = False
    ) -> Adaptation:
        """Solve a problem.

        Args:
            problem: the batch of adaptations.
            neighbors: the neighbours in the problem, for looking up cached outputs.
            want_change: also compute ‖θˣ − θ‖.
        """
        can_store = table_bytes(neighbors.capacity, problem.outputs) <= self._store_bytes
        plan = self._plan(problem, neighbors.capacity if can_store else None, want_change)
        with ExitStack() as stack:
            stored = None
            if can_store and _uses_table(plan.path, problem):
                store = self._store_for(problem, plan.path)
                stored = _look_up(stack, store, problem, neighbors)
                if stored is not None and plan.path == ONE_STEP:
                    problem = resolve_step_size(problem, stored, has_shares=store is not self._raw)
                is_sure = stored is not None and _is_sure(problem, stored)
                if not is_sure:
                    plan, stored = self._plan(problem, None, want_change, any_path=True), None
            parts = self._solve_in_chunks(plan, problem, stored, want_change)
        if len(parts) == 1:
            return Adaptation(*parts[0], plan.path, plan.seconds)
        outputs = torch.cat([part[0] for part in parts])
        changes = [part[1] for part in parts if part[1] is not None]
        return Adaptation(outputs, torch.cat(changes) if changes else None, plan.path, plan.seconds)

    def _plan(
        self,
        problem: Problem,
        table_rows: int | None,
        want_change: bool,
        any_path: bool = False,
    ) -> Plan:
        """Return a plan, made once for all problems of the same form."""
        device, path = problem.queries.device, None if any_path else self._path
        most = self._scratch_bytes or MAX_SCRATCH_BYTES["cuda" if device.type == "cuda" else "cpu"]

        def make(limit: int) -> Plan:
            rates = self._rates or measure_throughput(device)
            return make_plan(problem, table_rows, limit, rates, path, want_change)

        plans = self._plans.setdefault(problem.head, {})
        form = (problem.form, table_rows, want_change, any_path)
        plan = plans.get(form)
        if plan is None:
            if len(plans) >= MAX_PLANS:
                plans.clear()
            plan = plans[form] = make(most)
        if self._scratch_bytes is not None or plan.held <= LARGE_SCRATCH_BYTES:
            return plan
        left = free_bytes(device) // 2
        return plan if plan.held <= left else make(left)

    def _solve_in_chunks(
        self, plan: Plan, problem: Problem, stored: StoredOutputs | None, want_change: bool
    ) -> list[Solved]:
        """Solve the problem in chunks of queries; use smaller chunks if memory runs out."""
        parts: list[Solved] = []
        start, chunk = 0, plan.chunk
        while start < len(problem.queries):
            part, kept = problem, stored
            if chunk < len(problem.queries):
                rows = slice(start, start + chunk)
                part, kept = problem.rows(rows), stored and stored.rows(rows)
            try:
                part = resolve_step_size(part, kept, has_shares=False)
                solved = SOLVERS[plan.path](part, kept, want_change)
            except (RuntimeError, MemoryError) as error:
                if len(part.queries) == 1 or not ran_out_of_memory(error):
                    raise
                chunk = len(part.queries) // 2
                warnings.warn(
                    f"out of memory; adapting {chunk} queries at a time. To start with smaller "
                    f"chunks, set Engine(scratch_bytes=) below {plan.held:.0f}",
                    stacklevel=2,
                )
                continue
            parts.append(solved)
            start += len(part.queries)
        if chunk < plan.chunk:  # next time, start with the size that worked
            plans = self._plans.setdefault(problem.head, {})
            smaller = replace(plan, chunk=chunk, held=plan.held * chunk / plan.chunk)
            plans.update({form: smaller for form, known in plans.items() if known is plan})
        return parts

    def _store_for(self, problem: Problem, path: str) -> OutputStore:
        if path != ONE_STEP or problem.loss != CROSS_ENTROPY:
            return self._raw
        if self._half_store and takes_kernels(problem.outputs) and not is_rate_open(problem):
            return self._halves
        return self._probabilities


def _uses_table(path: str, problem: Problem) -> bool:
    return path in (SPAN, ONE_STEP, OPTIMUM) or (path == DENSE and is_dense_fused(problem))


def _look_up(
    stack: ExitStack, store: OutputStore, problem: Problem, neighbors: Neighbors
) -> StoredOutputs | None:
    """Return the cached outputs of the neighbours, or `None` if there is no memory for a cache."""
    assert problem.linear is not None  # only outputs of linear heads are cached
    try:
        return stack.enter_context(store.lookup(problem.linear, neighbors, problem.keys))
    except (RuntimeError, MemoryError) as error:
        if not ran_out_of_memory(error):
            raise
        warnings.warn(
            "out of memory; the head's outputs for memory entries are not cached between calls. "
            "To turn the cache off, set Engine(store_bytes=0)",
            stacklevel=2,
        )
        return None


def _is_sure(problem: Problem, stored: StoredOutputs) -> bool:
    """Return whether the stored rows, which may have half precision, are accurate enough."""
    if stored.table.dtype == problem.dtype:
        return True
    return float(compute_step_factors(problem).abs().sum(1).max()) * 2.0**-11 <= MAX_HALF_ERROR


def _solve_one_step(problem: Problem, stored: StoredOutputs | None, want_change: bool) -> Solved:
    assert stored is not None  # the plan takes one step only from stored outputs
    outputs = solve_one_step(problem, stored)
    return outputs, solve_span(problem, None, True)[1] if want_change else None


SOLVERS: dict[str, Callable[[Problem, StoredOutputs | None, bool], Solved]] = {
    FUNCTIONAL: lambda problem, stored, want_change: solve_functional(problem),
    DENSE: solve_dense,
    SPAN: solve_span,
    ONE_STEP: _solve_one_step,
    MLP: lambda problem, stored, want_change: solve_mlp(problem, want_change),
    OPTIMUM: solve_optimum,
}
