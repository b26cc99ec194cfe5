"""The engine that predictors call: it takes a problem and returns adapted outputs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mbpa.adaptation.active import count_numbers, pack_summary, solve_active, unpack_summary
from mbpa.adaptation.losses import CROSS_ENTROPY
from mbpa.adaptation.mlp import solve_mlp
from mbpa.adaptation.optimum import solve_optimum
from mbpa.adaptation.output_cache import OutputStore, StoredOutputs, table_bytes
from mbpa.adaptation.per_query import is_dense_fused, solve_dense, solve_functional
from mbpa.adaptation.plan import (
    ACTIVE,
    DENSE,
    FUNCTIONAL,
    MLP,
    ONE_STEP,
    OPTIMUM,
    PATHS,
    SPAN,
    Plan,
    can_be_active,
    make_plan,
)
from mbpa.adaptation.problem import ActiveReport, Adaptation, LinearHead, Problem
from mbpa.adaptation.span import compute_step_factors, solve_one_step, solve_span
from mbpa.adaptation.step_size import is_rate_open, resolve_step_size
from mbpa.device import Throughput, free_bytes, measure_throughput, ran_out_of_memory, takes_kernels
from mbpa.memory import Memory, Neighbors, validation
from mbpa.replay import assume

MAX_SCRATCH_BYTES = {"cpu": 1 << 29, "cuda": 1 << 33}  # by default
LARGE_SCRATCH_BYTES = 1 << 28  # only above this is it worth asking how much memory is free
MAX_PLANS = 1000  # remembered per head
MAX_TABLE_BYTES = 1 << 30
OLD_NAMES = {"layers": MLP}  # of paths, still accepted
WIDTH = 128  # most probable classes per neighbour that take part, if no error bound is needed
PROVED_WIDTHS = (64, 256)  # otherwise, tried in turn
LEAST_WIDTH = 16  # with fewer classes, the error may be large
MAX_HALF_ERROR = 1e-3  # largest error in log-probability that half-precision rows may cause

Solved = tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, ActiveReport | None]
Solver = Callable[[Problem, StoredOutputs | None, bool], Solved]


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
        tolerance: error in log-probability that is accepted for speed, for linear heads with many
            classes (docs/large-vocabularies.md). 0 computes exactly. A number adapts the classes
            that matter and proves for each query that no log-probability is wrong by more than
            this; a query for which that cannot be proved is computed exactly. `math.inf` adapts the
            classes that matter and proves nothing, which suits language models; `explain` then
            states the bound.
        width: for `tolerance=math.inf`, the number of most probable classes per neighbour that take
            part. Fewer take less time and memory: 24 halve the time on a CPU, with a mean error of
            about 1e-3 instead of 1e-4.
    """

    def __init__(
        self,
        scratch_bytes: int | None = None,
        store_bytes: int = MAX_TABLE_BYTES,
        *,
        half_store: bool = False,
        path: str | None = None,
        rates: Throughput | None = None,
        tolerance: float = 0.0,
        width: int = WIDTH,
    ) -> None:
        if path in OLD_NAMES:
            path = OLD_NAMES[path]
        paths = PATHS if tolerance == 0 else (*PATHS, ACTIVE)
        if path not in (None, *paths):
            raise ValueError(f"path must be None or one of {paths}, got {path!r}")
        if scratch_bytes is not None:
            scratch_bytes = validation.count("scratch_bytes", scratch_bytes)
        if not isinstance(tolerance, int | float) or not tolerance >= 0:
            raise ValueError(f"tolerance must be a number from 0, got {tolerance!r}")
        self._scratch_bytes, self._store_bytes = scratch_bytes, store_bytes
        self._path, self._rates, self._half_store = path, rates, half_store
        self._tolerance, self._width = tolerance, validation.count("width", width)
        self._plans: WeakKeyDictionary[nn.Module, dict[object, Plan]] = WeakKeyDictionary()
        self._raw = OutputStore(lambda outputs: outputs)
        self._probabilities = OutputStore(lambda outputs: outputs.softmax(-1))
        self._halves = OutputStore(lambda outputs: outputs.softmax(-1).half())
        self._summaries: dict[tuple[int, ...], OutputStore] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings, for `copy` and `pickle`; what is cached is computed anew."""
        return {
            "scratch_bytes": self._scratch_bytes,
            "store_bytes": self._store_bytes,
            "half_store": self._half_store,
            "path": self._path,
            "rates": self._rates,
            "tolerance": self._tolerance,
            "width": self._width,
        }

    def __setstate__(self, settings: dict[str, Any]) -> None:
        self.__init__(**settings)  # type: ignore[misc]  # a new engine

    def adapt(
        self, problem: Problem, neighbors: Neighbors, want_change: bool = False
    ) -> Adaptation:
        """Solve a problem.

        Args:
            problem: the batch of adaptations.
            neighbors: the neighbours in the problem, for looking up cached outputs.
            want_change: also compute ‖θˣ − θ‖ and, for an active vocabulary, the report.
        """
        widths = self._choose_widths(problem.outputs, neighbors.capacity)
        if widths and can_be_active(problem):
            rows = self._count_table_rows(problem, neighbors)
            # `explain` must take the path that the prediction took.
            if self._plan(problem, rows, want_change=False, width=widths[0]).path == ACTIVE:
                return self._adapt_actively(problem, neighbors, want_change, widths)
        return self._adapt_exactly(problem, neighbors, want_change)

    def keep_outputs(
        self, head: nn.Module, memory: Memory, ids: Int[Tensor, "N"], outputs: Float[Tensor, "N C"]
    ) -> None:
        """Keep what an active vocabulary needs to know about entries, given the head's outputs.

        Otherwise the head runs again when they are first read. Outputs of lower precision than
        float32, or for keys that the memory has rounded, are not accurate enough to be kept.

        Args:
            head: the head that computed the outputs.
            memory: the memory that holds the entries.
            ids: ids of the entries.
            outputs: the head's outputs at their keys.
        """
        is_exact = memory.dtype == memory.distance_dtype
        if not is_exact or outputs.dtype not in (torch.float32, torch.float64):
            return
        widths = self._choose_widths(outputs, memory.capacity)
        if widths:
            rows = pack_summary(outputs.clone(), widths)
            self._keep_summaries(head, memory, ids, rows, widths, outputs.dtype)

    def summarize(
        self, head: nn.Module, memory: Memory, keys: Float[Tensor, "N D"]
    ) -> Int[Tensor, "N W"] | None:
        """Return what an active vocabulary needs to know about entries with these keys.

        It depends on the head and the keys alone, so it may be saved with them; `keep_summaries`
        takes it. `None` if no active vocabulary would be used.

        Args:
            head: the head, which runs now.
            memory: the memory that will hold the entries.
            keys: their keys, which are rounded to the dtype of the memory.
        """
        linear, dtype = LinearHead.find(head, ()), memory.distance_dtype
        if linear is None:
            return None
        keys = keys.to(memory.dtype).to(dtype)
        widths = self._choose_widths(keys.new_empty(0, len(linear.weight)), memory.capacity)
        return self._summaries_for(widths).compute(linear, keys) if widths else None

    def keep_summaries(
        self, head: nn.Module, memory: Memory, ids: Int[Tensor, "N"], rows: Int[Tensor, "N W"]
    ) -> None:
        """Keep what `summarize` returned for entries, so that the head need not run again.

        Args:
            head: the head that was run.
            memory: the memory that holds the entries.
            ids: ids of the entries, one per row.
            rows: what `summarize` returned for them.
        """
        linear, dtype = LinearHead.find(head, ()), memory.distance_dtype
        if linear is None:
            return
        widths = self._choose_widths(
            rows.new_empty(0, len(linear.weight), dtype=dtype), memory.capacity
        )
        if widths and rows.shape[1] == count_numbers(widths) + widths[-1]:
            self._keep_summaries(head, memory, ids, rows, widths, dtype)

    def _keep_summaries(
        self,
        head: nn.Module,
        memory: Memory,
        ids: Int[Tensor, "N"],
        rows: Int[Tensor, "N W"],
        widths: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        linear = LinearHead.find(head, ())
        if linear is None:
            return
        with memory.lock:
            capacity, revision, slots = memory.capacity, memory.revision, memory.get_slots(ids)
        is_there = slots >= 0  # not overwritten by later entries of the same batch
        slots, ids = slots[is_there], ids.to(slots.device)[is_there]
        rows = rows[is_there.to(rows.device)]
        self._summaries_for(widths).put(linear, capacity, revision, ids, slots, rows, dtype)

    @contextmanager
    def trust_head(self) -> Iterator[None]:
        """Assume that the head does not change while the context is open.

        Otherwise every call compares the head's parameters with those that cached outputs were
        computed with, which takes some milliseconds on a CPU if the head is large.
        """
        stores = (self._raw, self._probabilities, self._halves, *self._summaries.values())
        with ExitStack() as stack:
            for store in stores:
                stack.enter_context(store.trust_head())
            yield

    def _adapt_exactly(
        self, problem: Problem, neighbors: Neighbors, want_change: bool, any_path: bool = False
    ) -> Adaptation:
        table_rows = self._count_table_rows(problem, neighbors)
        plan = self._plan(problem, table_rows, want_change, any_path)
        with ExitStack() as stack:
            stored = None
            if table_rows is not None and _uses_table(plan.path, problem):
                store = self._store_for(problem, plan.path)
                stored = _look_up(stack, store, problem, neighbors)
                if stored is not None and plan.path == ONE_STEP:
                    problem = resolve_step_size(problem, stored, has_shares=store is not self._raw)
                is_sure = stored is not None and _is_sure(problem, stored)
                if not is_sure:
                    plan, stored = self._plan(problem, None, want_change, any_path=True), None
            return self._solve_in_chunks(plan, SOLVERS[plan.path], problem, stored, want_change)

    def _adapt_actively(
        self,
        problem: Problem,
        neighbors: Neighbors,
        want_change: bool,
        widths: tuple[int, ...],
    ) -> Adaptation:
        """Adapt with active classes, and queries whose error may be too large with more of them."""
        is_proved = math.isfinite(self._tolerance)
        with ExitStack() as stack:
            stored = _look_up(stack, self._summaries_for(widths), problem, neighbors)
            if stored is None:
                return self._adapt_exactly(problem, neighbors, want_change, any_path=True)

            def adapt(part: Problem, kept: StoredOutputs, width: int) -> Adaptation:
                def solve(part: Problem, kept: StoredOutputs | None, want_change: bool) -> Solved:
                    assert kept is not None
                    summary = unpack_summary(kept.take(), widths, width, part.dtype)
                    return solve_active(part, summary, want_change, want_change or is_proved)

                plan = self._plan(part, None, want_change, path=ACTIVE, width=width)
                return self._solve_in_chunks(plan, solve, part, kept, want_change)

            adaptation = adapt(problem, stored, widths[0])
            for width in widths[1:]:
                unproved = self._find_unproved(adaptation)
                if len(unproved):
                    wider = adapt(problem.rows(unproved), stored.rows(unproved), width)
                    adaptation = adaptation.with_rows(unproved, wider)
        unproved = self._find_unproved(adaptation)
        if len(unproved):
            part, found = problem.rows(unproved), neighbors.rows(unproved)
            exact = self._adapt_exactly(part, found, want_change, any_path=True)
            exact = replace(exact, report=ActiveReport.make_exact(exact.outputs))
            adaptation = adaptation.with_rows(unproved, exact)
        return adaptation

    def _summaries_for(self, widths: tuple[int, ...]) -> OutputStore:
        make = partial(OutputStore, partial(pack_summary, widths=widths))
        return self._summaries.get(widths) or self._summaries.setdefault(widths, make())

    def _find_unproved(self, adaptation: Adaptation) -> Int[Tensor, "R"]:
        """Return the queries whose error may exceed the tolerance."""
        if adaptation.report is None:
            return torch.empty(0, dtype=torch.int64)
        return (adaptation.report.bound > self._tolerance).nonzero()[:, 0]

    def _choose_widths(self, outputs: Float[Tensor, "B *C"], capacity: int) -> tuple[int, ...]:
        """Return numbers of active classes per neighbour, to be tried in turn; none if exact."""
        if self._tolerance == 0 or outputs.ndim != 2:
            return ()
        widths = PROVED_WIDTHS if math.isfinite(self._tolerance) else (self._width,)
        numbers = self._store_bytes // max(1, capacity * outputs.itemsize)
        most = min(numbers - count_numbers(widths), outputs.shape[1] - 1)
        if most < LEAST_WIDTH:
            return ()
        return tuple(sorted({min(width, most) for width in widths}))

    def _count_table_rows(self, problem: Problem, neighbors: Neighbors) -> int | None:
        """Return the rows of a table of the head's outputs, or `None` if it would be too large."""
        fits = table_bytes(neighbors.capacity, problem.outputs) <= self._store_bytes
        return neighbors.capacity if fits else None

    def _plan(
        self,
        problem: Problem,
        table_rows: int | None,
        want_change: bool,
        any_path: bool = False,
        *,
        path: str | None = None,
        width: int | None = None,
    ) -> Plan:
        """Return a plan, made once for all problems of the same form."""
        device, path = problem.queries.device, path or (None if any_path else self._path)
        most = self._scratch_bytes or MAX_SCRATCH_BYTES["cuda" if device.type == "cuda" else "cpu"]

        def make(limit: int) -> Plan:
            rates = self._rates or measure_throughput(device)
            return make_plan(problem, table_rows, limit, rates, path, want_change, width)

        plans = self._plans.setdefault(problem.head, {})
        form = (problem.form, table_rows, want_change, path, width)
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
        self,
        plan: Plan,
        solve: Solver,
        problem: Problem,
        stored: StoredOutputs | None,
        want_change: bool,
    ) -> Adaptation:
        """Solve the problem in chunks of queries; use smaller chunks if memory runs out."""
        parts: list[Adaptation] = []
        start, chunk = 0, plan.chunk
        while start < len(problem.queries):
            part, kept = problem, stored
            if chunk < len(problem.queries):
                rows = slice(start, start + chunk)
                part, kept = problem.rows(rows), stored and stored.rows(rows)
            try:
                if plan.path == SPAN and is_rate_open(part) and kept is None:
                    assert part.linear is not None  # by the plan
                    kept = StoredOutputs.make_for_call(part.linear(part.keys))  # needed twice
                if plan.path != ACTIVE:  # which knows the probabilities of labels
                    part = resolve_step_size(part, kept, has_shares=False)
                solved = solve(part, kept, want_change)
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
            outputs, change, *report = solved
            parts.append(Adaptation(outputs, change, plan.path, plan.seconds, *report))
            start += len(part.queries)
        if chunk < plan.chunk:  # next time, start with the size that worked
            plans = self._plans.setdefault(problem.head, {})
            smaller = replace(plan, chunk=chunk, held=plan.held * chunk / plan.chunk)
            plans.update({form: smaller for form, known in plans.items() if known is plan})
        return Adaptation.concatenate(parts)

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
    return assume(compute_step_factors(problem).abs().sum(1).max() * 2.0**-11 <= MAX_HALF_ERROR)


def _solve_one_step(problem: Problem, stored: StoredOutputs | None, want_change: bool) -> Solved:
    assert stored is not None  # the plan takes one step only from stored outputs
    outputs = solve_one_step(problem, stored)
    return outputs, solve_span(problem, None, True)[1] if want_change else None


SOLVERS: dict[str, Solver] = {
    FUNCTIONAL: lambda problem, stored, want_change: solve_functional(problem),
    DENSE: solve_dense,
    SPAN: solve_span,
    ONE_STEP: _solve_one_step,
    MLP: lambda problem, stored, want_change: solve_mlp(problem, want_change),
    OPTIMUM: solve_optimum,
}
