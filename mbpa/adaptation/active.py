"""Linear head with many classes, gradient steps: only the classes that matter take part.

The active classes of a query are the labels of its neighbours, the most probable classes at each
neighbour, and those at the query itself, according to the unadapted head. All other classes keep
their outputs. Together they count as one more class of constant output, the rest, so that sums of
exponentials stay those over all classes. The cost does not depend on the number of classes.

What must be known about a neighbour (its most probable classes, its sum of exponentials, and how
large the probabilities of the other classes are) does not depend on the query, so it is computed
once per entry and kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from mbpa.adaptation.active_bound import ErrorBound
from mbpa.adaptation.problem import ActiveReport, LinearHead, Problem
from mbpa.adaptation.span import (
    compute_adapting_products,
    is_span_fused,
    multiply_queries,
    take_steps,
)
from mbpa.adaptation.step_size import resolve_by_shares
from mbpa.replay import refuse_recording

ABSENT = -1e30  # output of a class that is not there; finite, so that products with 0 are 0
REST = -1  # stands for all classes that are not active
COLUMN_MULTIPLE = 64  # classes that a kernel processes at a time


@dataclass(frozen=True, eq=False)
class Summary:
    """What is kept of the head's outputs at the neighbours."""

    log_sums: Float[Tensor, "B K"]
    """log Σ exp over all classes."""
    log_rests: Float[Tensor, "B K"]
    """log Σ exp over the classes that are not in `top`. A difference would be inaccurate."""
    largest: Float[Tensor, "B K"]
    """The largest probability of a class that is not in `top`."""
    squares: Float[Tensor, "B K"]
    """The sum of squared probabilities over the classes that are not in `top`."""
    top: Int[Tensor, "B K M"]
    """The M most probable classes."""


def pack_summary(outputs: Float[Tensor, "N C"], widths: tuple[int, ...]) -> Int[Tensor, "N W"]:
    """Return the summary of each row of outputs as integers: bits of its numbers, then class ids.

    Args:
        outputs: outputs of the head, overwritten.
        widths: numbers of most probable classes for which `unpack_summary` will be called, in
            ascending order.
    """
    top = outputs.topk(widths[-1])
    peak = top.values[:, :1]
    shares = outputs.sub_(peak).exp_()
    total = shares.sum(-1, keepdim=True)
    log_sums = peak + total.log()
    shares.scatter_(-1, top.indices, 0)
    log_rest = peak + shares.sum(-1, keepdim=True).log_()
    largest = shares.amax(-1, keepdim=True) / total
    squares = shares.square_().sum(-1, keepdim=True) / total.square()
    # For the smaller widths, count the classes from there to the largest width as well.
    numbers = [log_sums]
    for width in widths:
        more = top.values[:, width:]
        between = (more - log_sums).exp()
        numbers.append(torch.cat([more, log_rest], -1).logsumexp(-1, keepdim=True))
        numbers.append(torch.cat([between, largest], -1).amax(-1, keepdim=True))
        numbers.append(between.square().sum(-1, keepdim=True) + squares)
    bits = torch.int64 if outputs.dtype == torch.float64 else torch.int32
    return torch.cat([torch.cat(numbers, -1).view(bits), top.indices.to(bits)], -1)


def unpack_summary(
    packed: Int[Tensor, "B K W"], widths: tuple[int, ...], width: int, dtype: torch.dtype
) -> Summary:
    """Return the summary for one of the widths that `pack_summary` was given.

    Args:
        packed: what `pack_summary` returned.
        widths: the widths it was given.
        width: one of them.
        dtype: dtype of the outputs it was given.
    """
    count, level = count_numbers(widths), 1 + 3 * widths.index(width)
    numbers = packed[..., :count].contiguous().view(dtype)
    return Summary(
        log_sums=numbers[..., 0],
        log_rests=numbers[..., level],
        largest=numbers[..., level + 1],
        squares=numbers[..., level + 2],
        top=packed[..., count : count + width].long(),
    )


def count_numbers(widths: tuple[int, ...]) -> int:
    """Return how many numbers a packed summary holds besides class ids."""
    return 1 + 3 * len(widths)


@dataclass(frozen=True, eq=False)
class Columns:
    """The classes that take part: column 0 is the rest, then come the active classes in order."""

    classes: Int[Tensor, "B A"]
    """The class of each column; columns without one repeat the first active class."""
    is_active: Bool[Tensor, "B A"]
    used: Int[Tensor, "B"]
    """The number of columns up to the last active class."""
    labels: Int[Tensor, "B K"]
    """The columns of the neighbours' labels."""
    is_top: Bool[Tensor, "B K A"]
    """Whether the column's class is among the most probable at the neighbour."""


def solve_active(
    problem: Problem, summary: Summary, want_change: bool, want_report: bool
) -> tuple[Float[Tensor, "B C"], Float[Tensor, "B"] | None, ActiveReport | None]:
    """Return the adapted outputs and, if wanted, the norms of the change and a report."""
    head = problem.linear
    assert head is not None  # the plan guarantees it
    problem, summary, own_top = _replace_unused(problem, summary)
    columns = _choose_columns(problem, summary, own_top)
    log_sums = torch.cat([summary.log_sums, problem.at_queries.logsumexp(-1, keepdim=True)], 1)
    outputs = _start_outputs(problem, head, summary, columns, want_change or want_report)
    at_labels = outputs[:, :-1].gather(-1, columns.labels[..., None])[..., 0]
    problem = resolve_by_shares(problem, (at_labels - summary.log_sums).exp_())
    bound = None
    if want_report:
        bound = _start_bound(problem, head, summary, outputs, log_sums, columns)
    if _takes_kernel(problem, want_change, want_report):
        adapted, change = _run_kernel(problem, head, outputs, columns, bound), None
    else:
        adapted, change = _iterate(problem, head, outputs, columns, bound, want_change)
    # Columns without an active class write what the first one writes.
    adapted_or_first = adapted.where(columns.is_active, adapted[:, 1:2])
    result = problem.at_queries.scatter(1, columns.classes, adapted_or_first)
    if bound is None:
        return result, change, None
    sums = result.logsumexp(-1)
    rest = (adapted[:, 0] - sums).exp()
    return result, change, ActiveReport(columns.used - 1, rest, *bound.finish(sums))


def _replace_unused(
    problem: Problem, summary: Summary
) -> tuple[Problem, Summary, Int[Tensor, "B M"]]:
    """Put the query in place of neighbours without weight, such as padding, which are arbitrary.

    Also return the most probable classes at the query.
    """
    at_queries, is_used = problem.at_queries, problem.weights != 0
    packed = pack_summary(at_queries.clone(), (summary.top.shape[-1],))[:, None]
    own = unpack_summary(packed, (summary.top.shape[-1],), summary.top.shape[-1], problem.dtype)
    summary = Summary(
        log_sums=summary.log_sums.where(is_used, own.log_sums),
        log_rests=summary.log_rests.where(is_used, own.log_rests),
        largest=summary.largest.where(is_used, own.largest),
        squares=summary.squares.where(is_used, own.squares),
        top=summary.top.where(is_used[..., None], own.top),
    )
    keys = problem.keys.where(is_used[..., None], problem.queries[:, None])
    values = problem.values.where(is_used, own.top[..., 0])
    return replace(problem, keys=keys, values=values, dots=None), summary, own.top[:, 0]


def _choose_columns(problem: Problem, summary: Summary, own_top: Int[Tensor, "B M"]) -> Columns:
    """Choose the active classes of each query: labels, and the most probable ones of all rows."""
    refuse_recording()  # their number is needed
    batch, classes = problem.at_queries.shape
    top, labels = summary.top.flatten(1), problem.values
    is_chosen = torch.zeros(batch, classes, dtype=torch.bool, device=top.device)
    is_chosen.scatter_(1, torch.cat([top, own_top, labels], 1), True)
    used = is_chosen.sum(1) + 1
    rows, found = is_chosen.nonzero(as_tuple=True)
    place = torch.arange(1, len(rows) + 1, device=rows.device)
    place -= (used - 1).cumsum(0).sub_(used - 1)[rows]
    widest = -(-int(used.max()) // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
    ordered = found.new_full((batch, widest), classes)
    ordered[:, 0] = REST
    ordered[rows, place] = found
    is_active = (ordered != REST) & (ordered != classes)
    places = torch.searchsorted(ordered, top).view(summary.top.shape)
    is_top = torch.zeros(*labels.shape, widest, dtype=torch.bool, device=top.device)
    return Columns(
        classes=ordered.where(is_active, ordered[:, 1:2]),
        is_active=is_active,
        used=used,
        labels=torch.searchsorted(ordered, labels),
        is_top=is_top.scatter_(2, places, True),
    )


def _start_outputs(
    problem: Problem,
    head: LinearHead,
    summary: Summary,
    columns: Columns,
    want_all: bool,
) -> Float[Tensor, "B L A"]:
    """Return the unadapted outputs of all columns, for the neighbours and, last, the query.

    Unless `want_all`, columns beyond the used ones may be arbitrary.
    """
    if is_span_fused(problem):
        from mbpa.adaptation.fused.active_outputs import compute_active_outputs

        outputs, further = compute_active_outputs(
            head.weight.contiguous(),
            head.bias,
            columns.classes,
            columns.used,
            columns.is_top,
            problem.keys.contiguous(),
            problem.at_queries.contiguous(),
            summary.log_rests,
        )
        if want_all:
            outputs.masked_fill_(~columns.is_active[:, None], ABSENT)
    else:
        batch, count = problem.weights.shape
        outputs = problem.keys.new_empty(batch, count + 1, columns.classes.shape[1])
        weight = functional.embedding(columns.classes, head.weight).to(problem.dtype)
        torch.bmm(problem.keys, weight.mT, out=outputs[:, :-1])
        if head.bias is not None:
            outputs[:, :-1] += head.bias[columns.classes][:, None]
        outputs[:, -1] = problem.at_queries.gather(1, columns.classes)
        outputs.masked_fill_(~columns.is_active[:, None], ABSENT)
        beyond = outputs[:, :-1].masked_fill(columns.is_top, ABSENT)
        further = (beyond - summary.log_rests[..., None]).exp_().sum(-1)
    # Active classes that are not in `top` are no longer part of the rest. Rounding may make them
    # more than all of it.
    rests = summary.log_rests + torch.log1p(-further.clamp_max(1))
    outputs[:, :-1, 0] = rests.clamp_min_(ABSENT)
    own_rest = problem.at_queries.scatter(1, columns.classes, -torch.inf).logsumexp(-1)
    outputs[:, -1, 0] = own_rest.clamp_min_(ABSENT)
    return outputs


def _takes_kernel(problem: Problem, want_change: bool, want_report: bool) -> bool:
    """Return whether a kernel takes the steps."""
    if not is_span_fused(problem) or want_change:
        return False
    from mbpa.adaptation.fused.span import has_figures

    return not want_report or has_figures(problem.weights.shape[1])


def _run_kernel(
    problem: Problem,
    head: LinearHead,
    outputs: Float[Tensor, "B L A"],
    columns: Columns,
    bound: ErrorBound | None,
) -> Float[Tensor, "B A"]:
    from mbpa.adaptation.fused.span import adapt_span_outputs

    rule, (batch, rows, _) = problem.gradient, outputs.shape
    figures = None if bound is None else outputs.new_empty(rule.steps, 3, batch, rows - 1)
    table = outputs.flatten(0, 1)
    index = torch.arange(len(table), device=table.device).view(batch, rows)
    adapted = adapt_span_outputs(
        table,
        table[:0],
        index[:, :-1].contiguous(),
        outputs[:, -1].contiguous(),
        problem.keys.contiguous(),
        problem.queries.contiguous(),
        problem.weights.contiguous(),
        columns.labels,
        lr=rule.rate,
        steps=rule.steps,
        decay=rule.decay,
        weight_adapts=head.weight_adapts,
        bias_adapts=head.bias_adapts,
        used=columns.used,
        figures=figures,
    )
    if bound is not None and figures is not None:
        for log_sums, squares, steepness in figures:
            bound.advance(log_sums, squares, steepness)
    return adapted


def _iterate(
    problem: Problem,
    head: LinearHead,
    outputs: Float[Tensor, "B L A"],
    columns: Columns,
    bound: ErrorBound | None,
    want_change: bool,
) -> tuple[Float[Tensor, "B A"], Float[Tensor, "B"] | None]:
    def advance(outputs: Tensor, shares: Tensor) -> None:
        assert bound is not None
        active = shares[:, :-1, 1:]
        steepness = (active * (1 - active)).amax(-1)
        bound.advance(outputs[:, :-1].logsumexp(-1), active.square().sum(-1), steepness)

    return take_steps(
        outputs,
        compute_adapting_products(head, problem.keys @ problem.keys.mT),
        multiply_queries(problem, head),
        problem.weights,
        functional.pad(columns.labels, (0, 1))[..., None],
        problem.gradient,
        want_change,
        has_rest=True,
        watch=None if bound is None else advance,
    )


def _start_bound(
    problem: Problem,
    head: LinearHead,
    summary: Summary,
    outputs: Float[Tensor, "B L A"],
    log_sums: Float[Tensor, "B L"],
    columns: Columns,
) -> ErrorBound:
    shares = (outputs - log_sums[..., None]).exp_()
    rest, active = shares[..., 0], shares[:, :-1, 1:]
    largest = torch.minimum(summary.largest, rest[:, :-1])
    squares = summary.squares - active.square().masked_fill(columns.is_top[..., 1:], 0).sum(-1)
    squares = torch.minimum(squares.clamp_min_(0), largest * rest[:, :-1])
    at_query = (problem.at_queries - log_sums[:, -1:]).exp_()
    at_query.scatter_(1, columns.classes, 0)
    inputs = torch.cat([problem.keys, problem.queries[:, None]], 1)
    return ErrorBound(
        compute_adapting_products(head, inputs @ inputs.mT),
        problem.weights,
        problem.gradient,
        log_sums,
        rest,
        largest,
        torch.cat([squares, at_query.square_().sum(1, keepdim=True)], 1),
    )
