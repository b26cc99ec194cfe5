"""Which way to compute a problem, and how many queries at a time.

Each path that can do it is priced from counted operations and bytes moved a query, at rough rates
of the device; the cheapest is taken. All paths agree, so a bad guess costs time and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

from mbpa.adaptation.problem import Problem
from mbpa.adaptation.stored import takes_product
from mbpa.rules import Gradient

RATES = {"cpu": (5e10, 1e10), "cuda": (4e13, 3e12)}  # operations and bytes a second
FUNCTIONAL, DENSE, SPAN, ONE_STEP = "functional", "dense", "span", "one step"
VMAP_OVERHEAD = 3  # of autograd's saved tensors and small kernels, over the closed form


@dataclass(frozen=True)
class Plan:
    """A path, the number of queries in a chunk, and why."""

    path: str
    chunk: int
    seconds: dict[str, float]
    """Estimated for a query, by each path that could have been taken."""


def make_plan(
    problem: Problem, table_rows: int | None, max_bytes: int, path: str | None = None
) -> Plan:
    """The cheapest path for the problem, in chunks that keep within `max_bytes` of scratch.

    Args:
        table_rows: rows of the table that keeps the un-adapted outputs of memory entries from call
            to call; `None` if there is none.
        max_bytes: scratch memory; at least one query is taken at a time whatever it says.
        path: take this one; a `ValueError` if it cannot compute the problem.
    """
    prices = _prices(problem, table_rows)
    operations, bandwidth = RATES.get(problem.queries.device.type, RATES["cpu"])
    seconds = {name: p.operations / operations + p.moved / bandwidth for name, p in prices.items()}
    if path is not None and path not in prices:
        raise ValueError(f"path must be one of {sorted(prices)} for this problem, got {path!r}")
    path = path or min(seconds, key=lambda name: seconds[name])
    chunk = max(1, min(len(problem.queries), int(max_bytes // prices[path].held)))
    return Plan(path, chunk, seconds)


@dataclass(frozen=True)
class _Price:
    operations: float
    moved: float
    held: float
    """Bytes of scratch a query."""


def _prices(problem: Problem, table_rows: int | None) -> dict[str, _Price]:
    size, steps = problem.dtype.itemsize, problem.rule.steps
    count = problem.keys.shape[1]
    outputs, key = problem.outputs[0].numel(), problem.queries[0].numel()
    adapting = sum(p.numel() for n, p in problem.head.named_parameters() if n in problem.adapting)
    work = 4 * steps * count * adapting
    moved = size * steps * 8 * adapting
    held = size * (8 * adapting + 16 * count * (key + outputs))
    if problem.linear is None:
        held += 3 * count * problem.activation_bytes
        return {FUNCTIONAL: _Price(VMAP_OVERHEAD * work, VMAP_OVERHEAD * moved, held)}
    prices = {
        FUNCTIONAL: _Price(VMAP_OVERHEAD * work, VMAP_OVERHEAD * moved, held),
        DENSE: _Price(work, moved, held),
    }
    if type(problem.rule) is not Gradient:  # a subclass may move the parameters otherwise
        return prices
    table = count * outputs
    gram = 2 * count * count * key
    inputs = 0 if table_rows is not None else 2 * table * key
    products = 2 * count * table * (steps - 1)
    prices[SPAN] = _Price(
        gram + inputs + products, size * table * 6 * steps, size * (6 * table + 2 * count * count)
    )
    if steps == 1 and table_rows is not None:
        spread = table_rows if takes_product(table_rows, count) else 0
        prices[ONE_STEP] = _Price(
            2 * count * key + 2 * max(spread, count) * outputs,
            size * (count * key + (0 if spread else table)),
            size * (4 * outputs + 2 * spread),
        )
    return prices
