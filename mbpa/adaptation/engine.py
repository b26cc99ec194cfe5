"""Adaptation as the predictors see it: a problem goes in, adapted outputs come out."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from mbpa.adaptation.losses import CROSS_ENTROPY
from mbpa.adaptation.per_query import dense, functional
from mbpa.adaptation.plan import DENSE, FUNCTIONAL, ONE_STEP, SPAN, Plan, make_plan
from mbpa.adaptation.problem import Adaptation, Problem
from mbpa.adaptation.span import one_step, span
from mbpa.adaptation.stored import OutputStore, StoredOutputs
from mbpa.memory import Neighbors

SCRATCH_BYTES = 1 << 29
STORE_BYTES = 1 << 30


class Engine:
    """Computes adaptations for one head and one memory, keeping what can be used again.

    Args:
        scratch_bytes: what a chunk of queries may take while it is adapted.
        store_bytes: what each table of kept head outputs may take.
        path: compute everything this way ("functional", "dense", "span", "one step") rather than
            the cheapest way; a `ValueError` where that cannot be done.
    """

    def __init__(
        self,
        scratch_bytes: int = SCRATCH_BYTES,
        store_bytes: int = STORE_BYTES,
        path: str | None = None,
    ) -> None:
        if path not in (None, FUNCTIONAL, DENSE, SPAN, ONE_STEP):
            raise ValueError(f"path must be None or the name of one, got {path!r}")
        self._scratch_bytes = scratch_bytes
        self._store_bytes = store_bytes
        self._path = path
        self._raw = OutputStore(lambda outputs: outputs)
        self._probabilities = OutputStore(lambda outputs: outputs.softmax(-1))

    def adapt(
        self, problem: Problem, neighbors: Neighbors, want_change: bool = False
    ) -> Adaptation:
        """Solve the problem, whose neighbours these are."""
        row_bytes = problem.outputs[0].numel() * problem.dtype.itemsize
        can_store = neighbors.capacity * row_bytes <= self._store_bytes
        rows = neighbors.capacity if can_store else None
        plan = make_plan(problem, rows, self._scratch_bytes, self._path)
        if plan.path == FUNCTIONAL or plan.path == DENSE:
            solve = functional if plan.path == FUNCTIONAL else dense
            return Adaptation(*solve(problem, plan.chunk), plan.path, plan.seconds)
        assert problem.linear is not None  # what is left is for linear heads
        lookup: AbstractContextManager[StoredOutputs | None] = nullcontext()
        if can_store:
            is_final = plan.path == ONE_STEP and problem.loss == CROSS_ENTROPY
            store = self._probabilities if is_final else self._raw
            lookup = store.lookup(problem.linear, neighbors, problem.keys)
        with lookup as stored:
            parts = [
                _solved(problem.rows(rows), plan, stored and stored.rows(rows), want_change)
                for start in range(0, len(problem.queries), plan.chunk)
                for rows in [slice(start, start + plan.chunk)]
            ]
        outputs = torch.cat([part[0] for part in parts])
        changes = [part[1] for part in parts if part[1] is not None]
        return Adaptation(outputs, torch.cat(changes) if changes else None, plan.path, plan.seconds)


def _solved(
    problem: Problem, plan: Plan, stored: StoredOutputs | None, want_change: bool
) -> tuple[Tensor, Tensor | None]:
    if plan.path == SPAN:
        return span(problem, stored, want_change)
    assert stored is not None  # the plan takes one step only from stored outputs
    outputs = one_step(problem, stored)
    return outputs, span(problem, None, True)[1] if want_change else None
