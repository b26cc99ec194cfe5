"""The choice of a path for a problem, and of the number of queries per chunk.

The time of each applicable path is estimated from its operations, bytes and calls at the speed of
the device, and the fastest is chosen. All paths give the same result, so a bad estimate costs only
time. The peak scratch memory of a path is estimated, too, and determines the size of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from mbpa.adaptation.losses import CROSS_ENTROPY, SQUARED_ERROR, loss_per_neighbor
from mbpa.adaptation.mlp import layered_cost
from mbpa.adaptation.optimum import BUFFERS, require_convex
from mbpa.adaptation.output_cache import takes_product
from mbpa.adaptation.per_query import is_fused as is_dense_fused
from mbpa.adaptation.per_query import shell_of
from mbpa.adaptation.problem import Problem
from mbpa.adaptation.span import is_fused
from mbpa.device import Throughput
from mbpa.rules import MAP, Adam, Gradient, RMSprop, Rule

FUNCTIONAL, DENSE, SPAN, ONE_STEP, LAYERS = "functional", "dense", "span", "one step", "layers"
PATHS = FUNCTIONAL, DENSE, SPAN, ONE_STEP, LAYERS
OPTIMUM = "optimum"  # the only path of `MAP`, and used by no other rule
USUAL_STEPS = 30  # typical number of steps to the optimum, for estimates
CPU_BYTES = dict.fromkeys((SPAN, OPTIMUM), 1 << 23)
CPU_BYTES |= dict.fromkeys((DENSE, LAYERS, FUNCTIONAL), 1 << 26)
"""Bytes of scratch above which larger chunks are slower on a CPU. `span` and `optimum` pass over
their scratch at each step, and beyond this it does not fit the caches. The other paths allocate
anew, and beyond this the allocator returns memory to the system in between."""
NARROW = 16  # columns; a product with fewer takes just as long


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
    """
    prices = _prices(problem, table_rows, want_change)
    if path is not None and path not in prices:
        raise ValueError(f"path must be one of {sorted(prices)} for this problem, got {path!r}")
    limits = CPU_BYTES if problem.queries.device.type == "cpu" else {}
    chunks = {
        name: int(min(max_bytes, limits.get(name, max_bytes)) // price.held)
        for name, price in prices.items()
    }
    chunks = {name: max(1, min(len(problem.queries), chunk)) for name, chunk in chunks.items()}
    seconds = {name: price.seconds(rates, chunks[name]) for name, price in prices.items()}
    path = path or min(seconds, key=lambda name: seconds[name])
    return Plan(path, chunks[path], seconds, chunks[path] * prices[path].held)


def _prices(problem: Problem, table_rows: int | None, want_change: bool) -> dict[str, Price]:
    if isinstance(problem.rule, MAP):
        return {OPTIMUM: _optimum(problem, table_rows is not None)}
    prices = {FUNCTIONAL: _functional(problem)}
    is_gradient = type(problem.rule) is Gradient  # a subclass may update the parameters differently
    if problem.linear is not None:
        prices[DENSE] = _dense(problem, table_rows is not None, want_change)
        if is_gradient:
            prices[SPAN] = _span(problem, table_rows is not None, want_change)
        if is_gradient and problem.rule.steps == 1 and table_rows is not None:
            prices[ONE_STEP] = _one_step(problem, table_rows, want_change)
    elif problem.layers is not None and is_gradient:
        operations, moved, held = layered_cost(problem)
        calls = 60 + 10 * len(problem.layers) * problem.rule.steps
        prices[LAYERS] = Price(operations, moved, calls, held)
    return prices


def _functional(problem: Problem) -> Price:
    size, steps, count = problem.dtype.itemsize, problem.rule.steps, problem.keys.shape[1]
    traits = _traits_of(problem)
    updating, waiting = _copies(problem.rule, traits.adapting, traits.largest)
    slopes, gradients = count * traits.in_loss, size * traits.adapting
    is_labelled = problem.loss == CROSS_ENTROPY  # then both exist at once
    ending = slopes + gradients if is_labelled else max(slopes, gradients)
    beside = max(count * traits.in_head, ending)
    return Price(
        operations=6 * steps * count * traits.adapting,
        moved=steps * (12 * size * traits.adapting + 16 * count * traits.saved),
        calls=100 + 65 * len(problem.adapting) * steps,
        held=max(size * updating, size * waiting + count * traits.saved + beside),
    )


def _dense(problem: Problem, is_kept: bool, want_change: bool) -> Price:
    assert problem.linear is not None
    (classes, key), (_, count) = problem.linear.weight.shape, problem.weights.shape
    size, steps, table = problem.dtype.itemsize, problem.rule.steps, count * classes
    work = 4 * steps * count * classes * key
    if is_dense_fused(problem) and not want_change:
        from mbpa.adaptation.fused.rmsprop_adam import padded_sizes

        moments = 3 if isinstance(problem.rule, Adam) else 2
        rows, width, padded = padded_sizes(count, key, classes)
        held = moments * padded * (width + 16) + padded * rows + 2 * rows * width
        held += 0 if is_kept else table
        return Price(work / 4, 4 * 2 * moments * steps * padded * width, 10 + steps, 4 * held)
    sizes = problem.linear.weight_adapts * classes * key, problem.linear.bias_adapts * classes
    updating, waiting = _copies(problem.rule, sum(sizes), max(sizes))
    # The outputs, and for cross-entropy the softmax and its residual; then slopes and the gradient.
    outputs = 3 * table + 2 * count if problem.loss == CROSS_ENTROPY else 2 * table
    held = max(updating, waiting + max(outputs, table + classes * (key + 1)))
    moved = 12 * size * steps * classes * (key + 2 * count)
    return Price(work, moved, 60 + 25 * steps, size * held)


def _span(problem: Problem, is_kept: bool, want_change: bool) -> Price:
    count, classes = problem.weights.shape[1], problem.outputs.shape[1]
    rule, key, size = problem.rule, problem.queries.shape[1], problem.dtype.itemsize
    assert isinstance(rule, Gradient)
    table = (count + 1) * classes
    operations = 2 * count**2 * key + 2 * (count + 1) * table * rule.steps
    operations += 0 if is_kept else 2 * table * key
    if is_fused(problem) and not want_change:
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
    operations = 2 * count**2 * key + 2 * (count + 1) ** 2 * max(classes, NARROW) * full
    operations += 0 if is_kept else 2 * table * key
    return Price(operations, 8 * size * table * rule.steps, 45 + 4 * rule.steps, size * held)


def _one_step(problem: Problem, table_rows: int, want_change: bool) -> Price:
    count, classes = problem.weights.shape[1], problem.outputs.shape[1]
    key, size, batch = problem.queries.shape[1], problem.dtype.itemsize, len(problem.queries)
    is_kernel = is_fused(problem)
    is_product = takes_product(table_rows, count, batch) and not is_kernel
    spread = table_rows if is_product else 0
    results = 1 if is_kernel else 2 if problem.loss == CROSS_ENTROPY else 3
    held: float = size * max(3 * count, count + max(spread + classes, results * classes))
    if want_change:  # computed by the span path
        held = max(held, _span(problem, False, True).held)
    return Price(
        operations=2 * count * key + 2 * max(spread, count) * classes,
        moved=size * (count * key + (classes * spread / batch if spread else count * classes)),
        calls=8 if is_kernel else 25,
        held=held,
    )


def _optimum(problem: Problem, is_kept: bool) -> Price:
    require_convex(problem.head, problem.loss, problem.queries.shape[1:])
    count, classes = problem.weights.shape[1], problem.outputs.shape[1]
    key, size = problem.queries.shape[1], problem.dtype.itemsize
    table, gram = count * classes, count**2
    steps = USUAL_STEPS if problem.loss == CROSS_ENTROPY else 1
    operations = 2 * gram * key + 4 * count * table * steps
    operations += 0 if is_kept else 2 * table * key
    # The Gram matrix is computed and factored in float64, alongside the outputs.
    held = size * table + 16 * gram + max(8 * count * key, size * gram)
    if problem.loss == CROSS_ENTROPY:
        held = max(held, size * (BUFFERS * table + gram + classes))
    else:
        held = max(held, size * table + 16 * gram + max(8 * gram, 20 * table))
    return Price(operations, 40 * size * table * steps, 60 + 35 * steps, held)


COPIES = {Gradient: (2, 4, 2), RMSprop: (5, 6, 3), Adam: (6, 8, 4)}
"""Copies of the adapting parameters that `Rule.update` and its caller hold: at the peak of a first
step, at the peak of a later step, and between steps."""
OTHER_COPIES = 5, 7, 4  # a guess


def _copies(rule: Rule, adapting: int, largest: int) -> tuple[int, int]:
    """Return the numbers held at the peak of the updates, and during the gradient of a later step.

    The first includes the computation of the norm of the change after the last step.

    Args:
        rule: the rule whose `update` is called.
        adapting: number of adapting parameters.
        largest: number of elements in the largest of their tensors.
    """
    kinds = (COPIES[kind] for kind in type(rule).__mro__ if kind in COPIES)
    first, later, between = next(kinds, OTHER_COPIES)
    decays, pushes = (bool(getattr(rule, name, 0)) for name in ("decay", "momentum"))
    ending = between * adapting + 2 * largest
    if rule.steps == 1:
        return max(first * adapting + largest, (first + decays) * adapting, ending), 0
    return (later + decays + pushes) * adapting + largest, (between + pushes) * adapting


@dataclass(frozen=True)
class Traits:
    """Memory needs of a head when some of its parameters adapt through autograd."""

    adapting: int
    """Number of adapting parameters."""
    largest: int
    """Number of elements in the largest of their tensors."""
    saved: float
    """Bytes per neighbour that forward and backward save; `torch.func.grad` keeps all to the
    end."""
    in_head: float
    """Further bytes per neighbour at the peak in the head."""
    in_loss: float
    """Further bytes per neighbour at the peak in the loss."""


_known: WeakKeyDictionary[nn.Module, dict[object, Traits]] = WeakKeyDictionary()


def _traits_of(problem: Problem) -> Traits:
    """Return the memory needs of the problem's head, measured once per head by running autograd."""
    known = _known.setdefault(problem.head, {})
    key = problem.adapting, problem.loss_name, problem.dtype, problem.keys.shape[2:]
    if key not in known:
        sizes = [p.numel() for n, p in problem.head.named_parameters() if n in problem.adapting]
        try:
            one, three = _kept(problem, 1), _kept(problem, 3)
        except Exception:  # guess instead; a head that fails raises when it is run
            numbers = problem.keys[0, 0].numel() + problem.outputs[0].numel()
            one, three = (0.0,) * 3, (8.0 * problem.dtype.itemsize * numbers,) * 3
        each = [(more - less) / 2 for less, more in zip(one, three, strict=True)]
        known[key] = Traits(sum(sizes), max(sizes), *each)
    return known[key]


def _kept(problem: Problem, rows: int) -> tuple[float, float, float]:
    """Return `Traits.saved`, `in_head` and `in_loss` for `rows` neighbours in total.

    The numbers include a part that does not depend on `rows`. At its peak the head holds two more
    tensors of the largest size, and its inputs if they are not saved. The loss holds three tensors
    of the outputs' size for cross-entropy and four for squared error; a user's own loss is assumed
    to be like the latter.
    """
    saved: dict[int, int] = {}

    def save(tensor: Tensor) -> Tensor:
        storages.append(tensor.untyped_storage())  # kept alive, so that its address is not reused
        saved[storages[-1].data_ptr()] = storages[-1].nbytes()
        return tensor

    head = problem.head
    owned = dict([*head.named_parameters(), *head.named_buffers()])
    tensors = {name: tensor.detach().clone() for name, tensor in owned.items()}
    params = [tensors[name].requires_grad_() for name in problem.adapting]
    storages = [tensor.untyped_storage() for tensor in tensors.values()]
    own = {storage.data_ptr() for storage in storages}
    keys = problem.keys.new_zeros(rows, *problem.keys.shape[2:], dtype=params[0].dtype)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        outputs = torch.func.functional_call(shell_of(head), tensors, (keys,))
        by_head = set(saved)
        is_labelled = problem.loss == CROSS_ENTROPY
        loss = CROSS_ENTROPY if is_labelled else SQUARED_ERROR
        values = problem.values.new_zeros(rows) if is_labelled else torch.zeros_like(outputs)
        losses = loss_per_neighbor(loss, outputs, values)
        torch.autograd.grad(losses.sum(), params, create_graph=True, allow_unused=True)
    ends = {*own, keys.data_ptr(), outputs.data_ptr()}
    largest = max((saved[place] for place in by_head - ends), default=0)
    in_head = 2 * largest + (0 if keys.data_ptr() in saved else keys.nbytes)
    by_loss = [saved[place] for place in saved.keys() - by_head]
    in_loss = max(0, (3 if is_labelled else 4) - by_loss.count(outputs.nbytes)) * outputs.nbytes
    kept = sum(saved[place] for place in saved.keys() - own)
    wider = problem.dtype.itemsize / params[0].dtype.itemsize  # above 1 for a half-precision head
    return wider * kept, wider * in_head, wider * in_loss
