"""The choice of a path for a problem, and of the number of queries per chunk.

The time of each applicable path is estimated from its operations, bytes and calls at the speed of
the device, and the fastest is chosen. All paths give the same result, except for `active`, which is
used only if an error is tolerated. So a bad estimate costs only time. The peak scratch memory of a
path is estimated roughly, too, and determines the size of a chunk. If it is too low and memory runs
out, the engine halves the chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mbpa.adaptation.losses import CROSS_ENTROPY
from mbpa.adaptation.mlp import estimate_mlp_cost
from mbpa.adaptation.optimum import BUFFERS, require_convex
from mbpa.adaptation.output_cache import takes_product
from mbpa.adaptation.per_query import is_dense_fused
from mbpa.adaptation.problem import Problem
from mbpa.adaptation.span import is_span_fused
from mbpa.device import Throughput
from mbpa.rules import MAP, Adam, Gradient, RMSprop, Rule

FUNCTIONAL, DENSE, SPAN, ONE_STEP, MLP = "functional", "dense", "span", "one step", "mlp"
PATHS = FUNCTIONAL, DENSE, SPAN, ONE_STEP, MLP
ACTIVE = "active"  # the only path that is not exact
OPTIMUM = "optimum"  # the only path of `MAP`, and used by no other rule
TYPICAL_STEPS = 30  # typical number of steps to the optimum, for estimates
MAX_CPU_CHUNK_BYTES = dict.fromkeys((SPAN, ACTIVE, OPTIMUM), 1 << 23)
MAX_CPU_CHUNK_BYTES |= dict.fromkeys((DENSE, MLP, FUNCTIONAL), 1 << 26)
"""Bytes of scratch above which larger chunks are slower on a CPU. `span` and `optimum` pass over
their scratch at each step, and beyond this it does not fit the caches. The other paths allocate
anew, and beyond this the allocator returns memory to the system in between."""
MIN_COLUMNS = 16  # a product with fewer columns takes just as long


@dataclass(frozen=True)
class Plan:
    """A path, the number of queries per chunk, and the estimates behind the choice."""

    path: str
    chunk: int
    seconds: dict[str, float]
    """Estimated seconds per query, for each applicable path."""
    held: float
    """Estimated peak scratch of a chunk, in bytes."""


@dataclass(frozen=True)
class Price:
    """Estimated cost of one path, per query unless stated otherwise."""

    operations: float
    moved: float
    """Bytes read and written."""
    calls: float
    """Calls of torch functions or kernels, per chunk."""
    held: float
    """Peak scratch, in bytes."""

    def seconds(self, rates: Throughput, chunk: int) -> float:
        work = self.operations / rates.operations + self.moved / rates.bytes
        return work + self.calls * rates.call / chunk


def make_plan(
    problem: Problem,
    table_rows: int | None,
    max_bytes: int,
    rates: Throughput,
    path: str | None = None,
    want_change: bool = False,
    width: int | None = None,
) -> Plan:
    """Return the fastest path for the problem, in chunks that use at most `max_bytes` of scratch.

    Args:
        problem: the batch of adaptations.
        table_rows: rows of the table that caches the unadapted outputs of memory entries between
            calls; `None` if there is none.
        max_bytes: limit on scratch memory; a chunk has at least one query regardless.
        rates: speed of the device.
        path: use this path; raises `ValueError` if it cannot compute the problem.
        want_change: also compute the norm of the change, for which some paths need more memory.
        width: most probable classes per neighbour in an active vocabulary; `None` if the result
            must be exact.
    """
    prices = _price_paths(problem, table_rows, want_change)
    if width is not None and can_be_active(problem):
        prices[ACTIVE] = _price_active(problem, width, want_change)
    if path is not None and path not in prices:
        raise ValueError(f"path must be one of {sorted(prices)} for this problem, got {path!r}")
    limits = MAX_CPU_CHUNK_BYTES if problem.queries.device.type == "cpu" else {}
    chunks = {
        name: int(min(max_bytes, limits.get(name, max_bytes)) // price.held)
        for name, price in prices.items()
    }
    chunks = {name: max(1, min(len(problem.queries), chunk)) for name, chunk in chunks.items()}
    seconds = {name: price.seconds(rates, chunks[name]) for name, price in prices.items()}
    path = path or min(seconds, key=lambda name: seconds[name])
    return Plan(path, chunks[path], seconds, chunks[path] * prices[path].held)


def _price_paths(problem: Problem, table_rows: int | None, want_change: bool) -> dict[str, Price]:
    if isinstance(problem.rule, MAP):
        return {OPTIMUM: _price_optimum(problem, table_rows is not None)}
    prices = {FUNCTIONAL: _price_functional(problem)}
    is_gradient = type(problem.rule) is Gradient  # a subclass may update the parameters differently
    if problem.linear is not None:
        prices[DENSE] = _price_dense(problem, table_rows is not None, want_change)
        if is_gradient:
            prices[SPAN] = _price_span(problem, table_rows is not None, want_change)
        if is_gradient and problem.step_rule.steps == 1 and table_rows is not None:
            prices[ONE_STEP] = _price_one_step(problem, table_rows, want_change)
    elif problem.layers is not None and is_gradient:
        operations, moved, held = estimate_mlp_cost(problem)
        calls = 60 + 10 * len(problem.layers) * problem.step_rule.steps
        prices[MLP] = Price(operations, moved, calls, held)
    return prices


def _price_functional(problem: Problem) -> Price:
    size, count, rule = problem.dtype.itemsize, problem.keys.shape[1], problem.step_rule
    adapting, activations = _count_adapting(problem), count * _count_activations(problem)
    return Price(
        operations=6 * rule.steps * count * adapting,
        moved=12 * size * rule.steps * (adapting + 2 * activations),
        calls=100 + 65 * len(problem.adapting) * rule.steps,
        held=size * (_count_copies(rule) * adapting + 3 * activations),
    )


def _price_dense(problem: Problem, is_kept: bool, want_change: bool) -> Price:
    assert problem.linear is not None
    (classes, key), (_, count) = problem.linear.weight.shape, problem.weights.shape
    size, table, rule = problem.dtype.itemsize, count * classes, problem.step_rule
    steps = rule.steps
    work = 4 * steps * count * classes * key
    if is_dense_fused(problem) and not want_change:
        from mbpa.adaptation.fused.rmsprop_adam import pad_sizes

        moments = 3 if isinstance(rule, Adam) else 2
        rows, width, padded = pad_sizes(count, key, classes)
        held = moments * padded * (width + 16) + padded * rows + 2 * rows * width
        held += 0 if is_kept else table
        return Price(work / 4, 4 * 2 * moments * steps * padded * width, 10 + steps, 4 * held)
    held = _count_copies(rule) * _count_adapting(problem) + 3 * table
    moved = 12 * size * steps * classes * (key + 2 * count)
    return Price(work, moved, 60 + 25 * steps, size * held)


def _price_span(problem: Problem, is_kept: bool, want_change: bool) -> Price:
    count, classes = problem.weights.shape[1], problem.outputs.shape[1]
    rule, key, size = problem.rule, problem.queries.shape[1], problem.dtype.itemsize
    assert isinstance(rule, Gradient)
    table = (count + 1) * classes
    operations = 2 * count**2 * key + 2 * (count + 1) * table * rule.steps
    operations += 0 if is_kept else 2 * table * key
    if is_span_fused(problem) and not want_change:
        from mbpa.adaptation.fused.span import scratch_bytes

        held = scratch_bytes(count, classes, rule.steps, problem.queries.device)
        held += 0 if is_kept else 4 * table
        return Price(operations / 4, 8 * table * rule.steps, 6 + rule.steps, held)
    # Outputs and slopes; depending on rule and loss also the start, the velocity, padded values.
    is_labelled = problem.loss == CROSS_ENTROPY
    buffers = 2 + (rule.decay != 0) + (rule.momentum != 0) + (not is_labelled)
    held = buffers * table + classes + 2 * (count + 1) ** 2 + 2 * count
    if want_change:  # coefficients and velocity: the old, the new and temporaries
        held += (4 if rule.steps == 1 else 5) * count * classes
    full = rule.steps - (rule.momentum == 0)  # the last step moves only the query's row
    operations = 2 * count**2 * key + 2 * (count + 1) ** 2 * max(classes, MIN_COLUMNS) * full
    operations += 0 if is_kept else 2 * table * key
    return Price(operations, 8 * size * table * rule.steps, 45 + 4 * rule.steps, size * held)


def can_be_active(problem: Problem) -> bool:
    """Return whether an active vocabulary applies to this problem."""
    rule, has_labels = problem.rule, problem.loss == CROSS_ENTROPY
    is_plain = type(rule) is Gradient and rule.momentum == 0 and rule.decay <= 1
    return is_plain and has_labels and problem.linear is not None


def _price_active(problem: Problem, width: int, want_change: bool) -> Price:
    count, classes = problem.weights.shape[1], problem.outputs.shape[1]
    key, size, steps = problem.queries.shape[1], problem.dtype.itemsize, problem.step_rule.steps
    # Neighbours share most of their classes: the union grows with the root of their number.
    active = min(classes, width * math.sqrt(count + 1))
    table = (count + 1) * active
    passes = 2 if want_change else 1
    operations = 2 * count**2 * key + 2 * table * key + 2 * passes * (count + 1) * table * steps
    moved = size * (4 * classes + 3 * active * key + 4 * passes * table * steps)
    held = size * (classes + 2 * active * key + (3 + 2 * passes) * table + 8 * count * width)
    return Price(operations, moved, 80 + (4 + 36 * (passes - 1)) * steps, held)


def _price_one_step(problem: Problem, table_rows: int, want_change: bool) -> Price:
    count, classes = problem.weights.shape[1], problem.outputs.shape[1]
    key, size, batch = problem.queries.shape[1], problem.dtype.itemsize, len(problem.queries)
    is_kernel = is_span_fused(problem)
    is_product = takes_product(table_rows, count, batch) and not is_kernel
    spread = table_rows if is_product else 0
    results = 1 if is_kernel else 2 if problem.loss == CROSS_ENTROPY else 3
    held: float = size * max(3 * count, count + max(spread + classes, results * classes))
    if want_change:  # computed by the span path
        held = max(held, _price_span(problem, False, True).held)
    return Price(
        operations=2 * count * key + 2 * max(spread, count) * classes,
        moved=size * (count * key + (classes * spread / batch if spread else count * classes)),
        calls=8 if is_kernel else 25,
        held=held,
    )


def _price_optimum(problem: Problem, is_kept: bool) -> Price:
    require_convex(problem.head, problem.loss, problem.queries.shape[1:])
    count, classes = problem.weights.shape[1], problem.outputs.shape[1]
    key, size = problem.queries.shape[1], problem.dtype.itemsize
    table, gram = count * classes, count**2
    steps = TYPICAL_STEPS if problem.loss == CROSS_ENTROPY else 1
    operations = 2 * gram * key + 4 * count * table * steps
    operations += 0 if is_kept else 2 * table * key
    # The Gram matrix is computed and factored in float64, alongside the outputs.
    held = size * table + 16 * gram + max(8 * count * key, size * gram)
    if problem.loss == CROSS_ENTROPY:
        held = max(held, size * (BUFFERS * table + gram + classes))
    else:
        held = max(held, size * table + 16 * gram + max(8 * gram, 20 * table))
    return Price(operations, 40 * size * table * steps, 60 + 35 * steps, held)


COPIES: dict[type[Rule], int] = {Gradient: 4, RMSprop: 6, Adam: 8}
OTHER_COPIES = 8  # a guess, for a user's own rule


def _count_copies(rule: Rule) -> int:
    """Return roughly how many copies of the adapting parameters exist at the peak of a step."""
    return next((COPIES[kind] for kind in type(rule).__mro__ if kind in COPIES), OTHER_COPIES)


def _count_adapting(problem: Problem) -> int:
    return sum(p.numel() for n, p in problem.head.named_parameters() if n in problem.adapting)


def _count_activations(problem: Problem) -> int:
    """Return roughly how many numbers the head computes for one neighbour.

    These are the key and the outputs of every layer that has a weight. A convolution is assumed to
    have as many positions as the key. Autograd holds about three times as many numbers at its peak.
    """
    shape = problem.keys.shape[2:]
    positions = math.prod(shape[1:])
    weights = [p for p in problem.head.parameters() if p.ndim > 1]
    return math.prod(shape) + sum(len(p) * (positions if p.ndim > 2 else 1) for p in weights)
