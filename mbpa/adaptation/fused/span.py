"""The span path on a GPU. With L the outputs of a query's neighbours and G their Gram matrix,

    L ← L + β(L⁰ − L) − α G r,        r = w ⊙ (softmax L − Y),

where the query is one more neighbour, of weight zero, whose row of L is the result. Programs share
a query's classes and exchange the sums of exponentials of each neighbour's outputs. `_resident`
keeps its block of L in registers and waits for the other programs of its query at every step. If
there are too many classes or neighbours for that, `_step` takes one step per launch and passes L
through memory once; more than `MOST_ROWS` neighbours take several programs, which read one buffer
and write another. If neighbours fill all rows there, the query's outputs z are updated separately:
z ← z + β(z⁰ − z) − α uᵀ r, with u its products with the neighbours.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from mbpa.adaptation.fused.arithmetic import (
    LOG2_E,
    NO_PEAK,
    NOTHING,
    RESIDUAL_SCALE,
    add_columns,
    choose_scale,
    dot_of_halves,
    find_row_starts,
    load_scaled_outputs,
    merge_log_sums,
    scale_residual,
    split_halves,
)
from mbpa.device import is_interpreted

MOST_ROWS = 128  # rows of the Gram matrix that one program holds
RESIDENT_CLASSES = 64  # classes per program that waits for others
PROGRAMS = 1024  # enough to keep a GPU busy
UNEVEN_PROGRAMS = 4096  # the same if their work differs
STEEP = tl.constexpr(60.0)  # binary orders by which sums may change per step without a new peak


class Launch(NamedTuple):
    """Launch parameters of a step that passes outputs through memory."""

    classes: int
    """Classes per block; a program holds one block at a time."""
    warps: int
    stages: int


FEW_ROWS, MANY_ROWS, SEVERAL_TILES = Launch(64, 4, 2), Launch(32, 4, 2), Launch(32, 4, 1)
"""Launch parameters for up to 64 rows, for up to `MOST_ROWS`, and for several tiles of rows."""


class Layout(NamedTuple):
    """The distribution of a query's neighbours over programs."""

    rows: int
    """Rows per tile of the Gram matrix."""
    tiles: int
    beside: bool
    """Whether the neighbours leave no row for the query."""
    resident: bool
    """Whether a program's outputs stay in its registers; this requires a row for the query."""


def adapt_span_outputs(
    table: Float[Tensor, "N C"],
    extra: Float[Tensor, "M C"],
    index: Int[Tensor, "B K"],
    at_query: Float[Tensor, "B C"],
    keys: Float[Tensor, "B K D"],
    queries: Float[Tensor, "B D"],
    weights: Float[Tensor, "B K"],
    labels: Int[Tensor, "B K"],
    *,
    lr: float,
    steps: int,
    decay: float,
    weight_adapts: bool,
    bias_adapts: bool,
    used: Int[Tensor, "B"] | None = None,
    figures: Float[Tensor, "T 3 B K"] | None = None,
) -> Float[Tensor, "B C"]:
    """Return the adapted outputs at the queries for cross-entropy.

    Args:
        table: outputs of the head, one row per entry.
        extra: further outputs, which are rows N, N+1, …
        index: the rows of each query's neighbours.
        at_query: the head's unadapted outputs at the queries.
        keys: keys of the neighbours.
        queries: keys of the queries.
        weights: weights of the neighbours.
        labels: labels of the neighbours.
        lr: α.
        steps: number of gradient steps.
        decay: β, the pull back to the start per step.
        weight_adapts: whether the head's weights adapt.
        bias_adapts: whether the head's bias adapts.
        used: number of classes of each query; the others are ignored, and their results arbitrary.
            If given, class 0 does not move: it stands for all classes that do not take part.
        figures: filled with log Σ exp, Σ p² and max p (1 − p) of each neighbour before each step,
            the latter two without class 0; only if `has_figures`.
    """
    (batch, count), classes, new = index.shape, table.shape[1], weights.new_empty
    has_rest = used is not None
    rows, tiles, beside, resident = _lay_out(count, classes, weights.device, has_rest)
    padded = tiles * rows
    gram = new(2, batch, padded, padded, dtype=torch.float16)
    factors, products = new(batch, 3), new(batch, padded)
    arrived = new(batch, dtype=torch.int32)
    longest = weights
    if tiles > 1:  # the query is a row of the Gram matrix, too
        norms = torch.linalg.vector_norm(keys, dim=-1).amax(1)
        longest = torch.maximum(norms, torch.linalg.vector_norm(queries, dim=-1))
    _gram[(batch, tiles, tiles)](
        keys, queries, weights, longest, gram, factors, products, arrived,
        count, keys.shape[2], padded, lr, lr * (1 + decay * steps),
        WEIGHT=weight_adapts, BIAS=bias_adapts, BESIDE=beside, TILES=tiles, ROWS=rows, SIZES=32,
        num_warps=4 if rows <= 64 else 8,
    )  # fmt: skip
    sources = table, extra if len(extra) else table, index, at_query, len(table), table.stride(0)
    neighbors = gram, factors, products, weights, labels
    if resident:
        parts = triton.cdiv(classes, RESIDENT_CLASSES)
        result = torch.empty_like(at_query)
        sums = new(2, steps, batch, parts, padded)
        _resident[(batch * parts,)](
            *sources, result, *neighbors, sums, arrived, batch, parts, count, classes, steps, decay,
            PARTS=triton.next_power_of_2(parts), DECAY=decay != 0,
            ROWS=rows, CLASSES=RESIDENT_CLASSES, num_warps=4 if rows <= 64 else 8, num_stages=1,
        )  # fmt: skip
        return result
    launch = SEVERAL_TILES if tiles > 1 else MANY_ROWS if rows > 64 else FEW_ROWS
    blocks = triton.cdiv(classes, launch.classes)
    programs = UNEVEN_PROGRAMS if has_rest else PROGRAMS
    parts = triton.cdiv(blocks, triton.cdiv(blocks, max(1, programs // (batch * tiles))))
    outputs = new(batch, padded, blocks * launch.classes)
    sums, sizes = new(2, 2, batch, parts, padded), (count, classes, blocks)
    shape = {"BESIDE": beside, "ROWS": rows, "CLASSES": launch.classes, "num_warps": launch.warps}
    shape["REST"] = has_rest
    ends = index if used is None else used
    assert figures is None or tiles == 1  # by has_figures
    seen = new(2, batch, parts, padded) if figures is not None else sums
    _start[(batch, parts, tiles)](*sources, outputs, sums, ends, *sizes, **shape)
    spare = torch.empty_like(outputs) if tiles > 1 else outputs
    result = at_query.clone() if beside else at_query
    for step in range(steps):
        last = beside and step == steps - 1
        _step[(batch, parts, 1 if last else tiles)](
            *sources, outputs, spare, result, *neighbors, sums, ends, seen, *sizes, step % 2, decay,
            PARTS=triton.next_power_of_2(parts), TILES=tiles, DECAY=decay != 0, LAST=last,
            SEEN=figures is not None, num_stages=launch.stages, **shape,
        )  # fmt: skip
        if figures is not None:
            figures[step] = _merge_figures(sums[:, step % 2], seen)[..., :count]
        outputs, spare = spare, outputs
    return result if beside else outputs[:, count, :classes] / LOG2_E.value


def has_figures(count: int) -> bool:
    """Return whether `adapt_span_outputs` can fill `figures` for this number of neighbours."""
    return count <= MOST_ROWS


def _merge_figures(
    sums: Float[Tensor, "2 B P K"], seen: Float[Tensor, "2 B P K"]
) -> Float[Tensor, "3 B K"]:
    """Return log Σ exp, Σ p² and max p (1 − p) of each row from those of its parts."""
    peaks, totals = sums
    log_sums = (peaks / LOG2_E.value + totals.log()).logsumexp(1)
    return torch.stack([log_sums, seen[0].sum(1), seen[1].amax(1)])


def scratch_bytes(count: int, classes: int, steps: int, device: torch.device) -> int:
    """Return the bytes of scratch that `adapt_span_outputs` takes per query."""
    rows, tiles, _, resident = _lay_out(count, classes, device)
    held = 4 * (rows * tiles) ** 2 + 4 * classes
    if resident:
        return held + 8 * steps * triton.cdiv(classes, RESIDENT_CLASSES) * rows
    return held + 4 * (1 if tiles == 1 else 2) * tiles * rows * classes


def _lay_out(count: int, classes: int, device: torch.device, has_rest: bool = False) -> Layout:
    rows = max(16, triton.next_power_of_2(count + 1))
    # Programs that wait for others cannot stop early when a query has fewer classes.
    if (
        not has_rest
        and rows <= MOST_ROWS
        and triton.cdiv(classes, RESIDENT_CLASSES) <= _count_waiting(device)
    ):
        return Layout(rows, 1, beside=False, resident=True)
    rows = min(MOST_ROWS, max(16, triton.next_power_of_2(count)))
    tiles = triton.cdiv(count, rows)
    return Layout(rows, tiles, beside=count == tiles * rows, resident=False)


def _count_waiting(device: torch.device) -> int:
    """Return how many programs may wait for each other; all of them must run at the same time."""
    if is_interpreted():
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count // 4


@triton.jit
def _gram(
    keys, queries, weights, longest, gram, factors, products, arrived,
    count, size, padded, lr, most_lr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, BESIDE: tl.constexpr, TILES: tl.constexpr,
    ROWS: tl.constexpr, SIZES: tl.constexpr,
):  # fmt: skip
    """Compute halves of the scaled Gram matrix of what adapts, with the query as row `count`.

    If there is no such row, compute its products with the neighbours instead. Also compute how far
    an output may move in a step. Weights sum to 1, or to a query's own step size, which is moved
    into `lr`, since residuals have to fit float16.
    """
    b, across, down = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    i, j = across * ROWS + tl.arange(0, ROWS), down * ROWS + tl.arange(0, ROWS)
    is_i, is_j = i <= count, j <= count
    queries += b * size
    rows_i = tl.where(i < count, keys + (b * count + i) * size, queries)
    rows_j = tl.where(j < count, keys + (b * count + j) * size, queries)
    dots = tl.zeros((ROWS, ROWS), tl.float32)
    at_query = tl.zeros((ROWS,), tl.float32)
    if WEIGHT:
        for d0 in range(0, size, SIZES):
            d = d0 + tl.arange(0, SIZES)
            is_d = d < size
            left = tl.load(
                rows_i[:, None] + d[None, :], mask=is_i[:, None] & is_d[None, :], other=0.0
            )
            right = tl.load(
                rows_j[None, :] + d[:, None], mask=is_j[None, :] & is_d[:, None], other=0.0
            )
            dots = tl.dot(left, right, dots, input_precision="tf32x3")
            if BESIDE:
                query = tl.load(queries + d, mask=is_d, other=0.0)
                at_query += tl.sum(left * query[None, :], 1)
    if BIAS:
        dots += 1.0
        at_query += 1.0
    if TILES == 1:
        most = tl.max(tl.max(tl.abs(dots), 1), 0)
    else:
        norm = tl.load(longest + b)
        most = norm * norm + 1.0
    scale = choose_scale(most)
    high, low = split_halves(tl.where(is_i[:, None] & is_j[None, :], dots * scale, 0.0))
    at = gram + (b * padded + i[:, None]) * padded + j[None, :]
    tl.store(at, high)
    tl.store(at + tl.num_programs(0).to(tl.int64) * padded * padded, low)
    if down == 0:
        total = tl.zeros((ROWS,), tl.float32)
        for k0 in range(0, count, ROWS):
            k = k0 + tl.arange(0, ROWS)
            total += tl.load(weights + b * count + k, mask=k < count, other=0.0)
        share = tl.sum(total, 0)
        if BESIDE:
            tl.store(products + b * padded + i, at_query * (share * (-lr / RESIDUAL_SCALE)))
        if across == 0:
            tl.store(factors + 3 * b, 1.0 / scale * (share * (-lr * LOG2_E / RESIDUAL_SCALE)))
            tl.store(factors + 3 * b + 1, most * (share * (most_lr * LOG2_E)))
            tl.store(factors + 3 * b + 2, 1.0 / tl.where(share > 0.0, share, 1.0) * RESIDUAL_SCALE)
            tl.store(arrived + b, 0)


@triton.jit
def _sources(
    table, extra, index, at_query, written, stride, b, k, count, classes, BESIDE: tl.constexpr
):  # fmt: skip
    """Return where the outputs of each row start, and which rows exist."""
    starts = find_row_starts(table, extra, index + b * count + k, written, stride, k < count)
    is_row = k < count
    if not BESIDE:
        starts, is_row = tl.where(k == count, at_query + b * classes, starts), k <= count
    return starts, is_row


@triton.jit(do_not_specialize=["written", "batch", "steps"])
def _resident(
    table, extra, index, at_query, written, stride, result,
    gram, factors, products, weights, labels, sums, arrived,
    batch, parts, count, classes, steps, decay,
    PARTS: tl.constexpr, DECAY: tl.constexpr, ROWS: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    b, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    k = tl.arange(0, ROWS)
    c = part * CLASSES + tl.arange(0, CLASSES)
    gram += b * ROWS * ROWS + k[:, None] * ROWS + k[None, :]
    left_high, left_low = tl.load(gram), tl.load(gram + batch.to(tl.int64) * ROWS * ROWS)
    factor, is_steep = tl.load(factors + 3 * b), tl.load(factors + 3 * b + 1) > STEEP
    to_halves = tl.load(factors + 3 * b + 2)
    weight = tl.load(weights + b * count + k, mask=k < count, other=0.0) * to_halves
    label = tl.load(labels + b * count + k, mask=k < count, other=-1).to(tl.int32)
    starts, is_row = _sources(
        table, extra, index, at_query, written, stride, b, k, count, classes, False
    )
    here = is_row[:, None] & (c < classes)[None, :]
    output = load_scaled_outputs(starts, c, here)
    log_sum = tl.maximum(tl.max(output, 1), NOTHING)  # a class may be ruled out with −inf
    for step in range(steps):
        peak = log_sum
        if is_steep:
            peak = tl.maximum(tl.max(output, 1), NOTHING)
        total = tl.sum(tl.exp2(output - peak[:, None]), 1)
        if PARTS == 1:
            log_sum = peak + tl.log2(total)
        else:
            # Each step has its own buffer, so that nothing is overwritten while it is still read.
            peaks = sums + (step * batch + b) * parts * ROWS
            totals = peaks + steps.to(tl.int64) * batch * parts * ROWS
            tl.store(peaks + part * ROWS + k, peak)
            tl.store(totals + part * ROWS + k, total)
            tl.debug_barrier()
            tl.atomic_add(arrived + b, 1, sem="release")
            while tl.atomic_add(arrived + b, 0, sem="acquire") < (step + 1) * parts:
                pass
            log_sum = merge_log_sums(peaks, totals, parts, ROWS, k, PARTS)
        high, low = split_halves(scale_residual(output, log_sum, weight, label, c))
        moved = dot_of_halves(left_high, left_low, high, low, tl.zeros_like(output))
        if DECAY:
            first = load_scaled_outputs(starts, c, here)
            output = tl.where(here, (1.0 - decay) * output + decay * first, output)
        output += factor * moved
    is_query = (k == count)[:, None] & (c < classes)[None, :]
    at = result + b * classes + c[None, :] + tl.zeros_like(k)[:, None]
    tl.store(at, output / LOG2_E, mask=is_query)


@triton.jit(do_not_specialize=["written"])
def _start(
    table, extra, index, at_query, written, stride, outputs, sums, ends,
    count, classes, blocks,
    REST: tl.constexpr, BESIDE: tl.constexpr, ROWS: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """Gather the neighbours' outputs, and compute peak and sum of exponentials of each part."""
    b, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    k = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    padded = tl.num_programs(2) * ROWS
    starts, is_row = _sources(
        table, extra, index, at_query, written, stride, b, k, count, classes, BESIDE
    )
    peak = tl.full((ROWS,), NO_PEAK, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    each = tl.cdiv(blocks, parts)
    classes_here = tl.load(ends + b).to(tl.int32) if REST else classes
    end = tl.minimum((part + 1) * each, tl.cdiv(classes_here, CLASSES))
    for block in range(part * each, end):
        c = block * CLASSES + tl.arange(0, CLASSES)
        here = is_row[:, None] & (c < classes)[None, :]
        output = load_scaled_outputs(starts, c, here)
        tl.store(outputs + (b * padded + k[:, None]) * blocks * CLASSES + c[None, :], output)
        peak, total = add_columns(peak, total, output)
    at = sums + (b * parts + part) * padded + k
    tl.store(at, peak)
    tl.store(at + 2 * tl.num_programs(0).to(tl.int64) * parts * padded, total)


@triton.jit(do_not_specialize=["written", "turn"])
def _step(
    table, extra, index, at_query, written, stride, old, new, result,
    gram, factors, products, weights, labels, sums, ends, seen, count, classes, blocks, turn, decay,
    PARTS: tl.constexpr, TILES: tl.constexpr, DECAY: tl.constexpr, LAST: tl.constexpr,
    REST: tl.constexpr, SEEN: tl.constexpr, BESIDE: tl.constexpr, ROWS: tl.constexpr,
    CLASSES: tl.constexpr,
):  # fmt: skip
    b, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    batch = tl.num_programs(0).to(tl.int64)
    tile, padded, width = tl.program_id(2), TILES * ROWS, blocks * CLASSES
    row = tl.arange(0, ROWS)
    k = tile * ROWS + row
    factor, is_steep = tl.load(factors + 3 * b), tl.load(factors + 3 * b + 1) > STEEP
    to_halves = tl.load(factors + 3 * b + 2)
    whole = batch * parts * padded
    old_peaks, new_peaks = sums + turn * whole, sums + (1 - turn) * whole
    old_peaks += b * parts * padded
    old_sums = old_peaks + 2 * whole
    old += b * padded * width
    new += b * padded * width
    gram += (b * padded + k[:, None]) * padded + row[None, :]
    to_low = batch * padded * padded
    own_log_sum = merge_log_sums(old_peaks, old_sums, parts, padded, k, PARTS)
    if TILES == 1:  # the same for all blocks
        log_sum = own_log_sum
        weight = tl.load(weights + b * count + k, mask=k < count, other=0.0) * to_halves
        label = tl.load(labels + b * count + k, mask=k < count, other=-1).to(tl.int32)
        if BESIDE:
            product = tl.load(products + b * padded + k)
        if not LAST:
            left_high, left_low = tl.load(gram), tl.load(gram + to_low)
    if DECAY:
        starts, is_row = _sources(
            table, extra, index, at_query, written, stride, b, k, count, classes, BESIDE
        )
    peak = own_log_sum
    if is_steep:
        peak = tl.full((ROWS,), NO_PEAK, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    each = tl.cdiv(blocks, parts)
    classes_here = tl.load(ends + b).to(tl.int32) if REST else classes
    if SEEN:
        square, steepness = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    end = tl.minimum((part + 1) * each, tl.cdiv(classes_here, CLASSES))
    for block in range(part * each, end):
        c = block * CLASSES + tl.arange(0, CLASSES)
        moved = tl.zeros((ROWS, CLASSES), tl.float32)
        shift = tl.zeros((CLASSES,), tl.float32)
        output = tl.zeros((ROWS, CLASSES), tl.float32)
        for other in tl.static_range(TILES):
            j = other * ROWS + row
            if TILES > 1:
                log_sum = merge_log_sums(old_peaks, old_sums, parts, padded, j, PARTS)
                weight = tl.load(weights + b * count + j, mask=j < count, other=0.0)
                weight *= to_halves
                label = tl.load(labels + b * count + j, mask=j < count, other=-1).to(tl.int32)
                if BESIDE:
                    product = tl.load(products + b * padded + j)
                if not LAST:
                    left_high = tl.load(gram + other * ROWS)
                    left_low = tl.load(gram + to_low + other * ROWS)
            output = tl.load(old + j[:, None] * width + c[None, :])
            residual = scale_residual(output, log_sum, weight, label, c, REST)
            if SEEN:
                share = tl.where((c > 0)[None, :], tl.exp2(output - log_sum[:, None]), 0.0)
                square += tl.sum(share * share, 1)
                steepness = tl.maximum(steepness, tl.max(share * (1.0 - share), 1))
            if BESIDE:
                shift += tl.sum(product[:, None] * residual, 0)
            if not LAST:
                high, low = split_halves(residual)
                moved = dot_of_halves(left_high, left_low, high, low, moved)
        if BESIDE and tile == 0:
            at, is_c = b * classes + c, c < classes
            value = tl.load(result + at, mask=is_c, other=0.0)
            if DECAY:
                shift += decay * (tl.load(at_query + at, mask=is_c, other=0.0) - value)
            tl.store(result + at, value + shift, mask=is_c)
        if not LAST:
            at = k[:, None] * width + c[None, :]
            if TILES > 1:
                output = tl.load(old + at)
            if DECAY:
                here = is_row[:, None] & (c < classes)[None, :]
                first = load_scaled_outputs(starts, c, here)
                output = tl.where(here, (1.0 - decay) * output + decay * first, output)
            changed = output + factor * moved
            tl.store(new + at, changed)
            if is_steep:
                peak, total = add_columns(peak, total, changed)
            else:
                total += tl.sum(tl.exp2(changed - peak[:, None]), 1)
    if SEEN:
        at = seen + (b * parts + part) * padded + k
        tl.store(at, square)
        tl.store(at + whole, steepness)
    if not LAST:
        at = new_peaks + (b * parts + part) * padded + k
        tl.store(at, peak)
        tl.store(at + 2 * whole, total)
