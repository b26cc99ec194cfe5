"""Which way to compute a problem, and how many queries at a time.

Each path that can do it is priced from counted operations and bytes moved a query, at rough rates
of the device; the cheapest is taken. All paths agree, so a bad guess costs time and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

from mbpa.adaptation.problem import Problem
from mbpa.rules import Gradient

RATES = {"cpu": (5e10, 1e10), "cuda": (4e13, 3e12)}  # operations and bytes a second
FUNCTIONAL, DENSE, SPAN, ONE_STEP = "functional", "dense", "span", "one step"
VMAP_OVERHEAD = 3  # of autograd's saved tensors and small kernels, over the closed form


@dataclass(frozen=True)
class Plan:
    """A path, the number of queries in a chunk, and why."""

    path: str
    chunk: int
    reason: str


def make_plan(problem: Problem, can_store: bool, max_bytes: int) -> Plan:
    """The cheapest path for the problem, in chunks that keep within `max_bytes` of scratch.

    Args:
        can_store: whether the neighbours' un-adapted outputs may be kept from call to call.
        max_bytes: scratch memory; at least one query is taken at a time whatever it says.
    """
    prices = _prices(problem, can_store)
    operations, bandwidth = RATES.get(problem.queries.device.type, RATES["cpu"])
    seconds = {path: p.operations / operations + p.moved / bandwidth for path, p in prices.items()}
    path = min(seconds, key=lambda path: seconds[path])
    chunk = max(1, min(len(problem.queries), int(max_bytes // prices[path].held)))
    ranking = ", ".join(
        f"{name} {value * 1e6:.3g} µs"
        for name, value in sorted(seconds.items(), key=lambda i: i[1])
    )
    return Plan(path, chunk, f"estimated a query: {ranking}; {chunk} at a time")


@dataclass(frozen=True)
class _Price:
    operations: float
    moved: float
    held: float
    """Bytes of scratch a query."""


def _prices(problem: Problem, can_store: bool) -> dict[str, _Price]:
    size, steps = problem.dtype.itemsize, problem.rule.steps
    count = problem.keys.shape[1]
    outputs, key = problem.outputs[0].numel(), problem.queries[0].numel()
    adapting = sum(p.numel() for n, p in problem.head.named_parameters() if n in problem.adapting)
    work = 4 * steps * count * adapting
    moved = size * steps * 8 * adapting
    held = size * (8 * adapting + 16 * count * (key + outputs))
    prices = {FUNCTIONAL: _Price(VMAP_OVERHEAD * work, VMAP_OVERHEAD * moved, held)}
    if problem.linear is None:
        return prices
    prices[DENSE] = _Price(work, moved, held)
    if type(problem.rule) is not Gradient:  # a subclass may move the parameters otherwise
        return prices
    table = count * outputs
    gram = 2 * count * count * key
    inputs = 0 if can_store else 2 * table * key
    products = 2 * count * table * (steps - 1)
    prices[SPAN] = _Price(
        gram + inputs + products, size * table * 6 * steps, size * (6 * table + 2 * count * count)
    )
    if steps == 1 and can_store:
        prices[ONE_STEP] = _Price(
            2 * count * (key + outputs), size * (table + count * key), size * 4 * outputs
        )
    return prices
