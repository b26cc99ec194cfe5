"""Distances, the order of neighbours, and the ranking of entries that are not written yet.

On a CPU, keys are gathered and subtracted in pieces that stay in its cache. The arithmetic makes
three passes over them, and from main memory each pass would cost as much as the search itself. The
pieces share one scratch buffer, or are processed in place, since allocating new pages of memory
would cost as much again.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from mbpa.device import takes_kernels
from mbpa.memory.neighbors import Neighbors

SCRATCH_BYTES = 1 << 28  # keys gathered, or scores computed, at a time
CACHE_BYTES = 1 << 21  # the same on a CPU, per thread
NUMBERS_PER_THREAD = 1 << 15  # fewer are processed by one thread
QUERIES_PER_TILE = 64  # which share a pass over the keys


class Windows(NamedTuple):
    """The part of a memory that each of B queries may see."""

    since: Int[Tensor, "B"]
    """Id of the oldest entry that the query may see."""
    needed: Int[Tensor, "B"]
    """Number of neighbours to find."""

    def rows(self, rows: slice | Tensor) -> Windows:
        return Windows(self.since[rows], self.needed[rows])


class UnwrittenEntries:
    """Entries that are not written yet, as neighbours of one another: each sees those before it."""

    def __init__(
        self, queries: Tensor, keys: Tensor, values: Tensor, ids: Tensor, since: Tensor
    ) -> None:
        """Compute their distances from one another.

        Args:
            queries: the keys in the precision in which they were passed.
            keys: the keys as they will be stored.
            values: one value per entry.
            ids: ids that the entries will get, ascending.
            since: id of the oldest entry that each may see.
        """
        self.keys: Tensor = keys
        self.values: Tensor = values
        self.ids: Tensor = ids
        hidden = (ids >= ids[:, None]) | (ids < since[:, None])
        distances = compute_distances(queries, keys)
        self.distances: Tensor = distances.masked_fill_(hidden, math.inf)
        self.dots: Tensor = queries @ keys.T

    def merge_into(self, past: Neighbors, k: int, keys_for: int | None) -> Neighbors:
        """Return the k nearest among neighbours already in the memory and these entries."""
        count, old = past.mask.shape
        rows = torch.arange(count, device=self.ids.device)[:, None]
        ids = torch.cat([past.ids, self.ids.expand(count, -1)], 1)
        distances = torch.cat([past.distances, self.distances], 1)
        order = order_nearest_first(distances, ids)[:, :k]
        is_new, new = order >= old, (order - old).clamp_min(0)
        distances = distances[rows, order]
        mask = distances.isfinite()

        def merge(theirs: Tensor, ours: Tensor, width: int | None = None) -> Tensor:
            if not theirs.shape[1]:
                return ours[new[:, :width]]
            theirs = theirs[rows, order.clamp_max(theirs.shape[1] - 1)[:, :width]]
            chosen = is_new[:, :width].reshape(*theirs.shape[:2], *(1,) * (theirs.ndim - 2))
            return torch.where(chosen, ours[new[:, :width]], theirs)

        return Neighbors(
            values=merge(past.values, self.values),
            distances=distances,
            dots=torch.cat([past.dots, self.dots], 1)[rows, order],
            mask=mask,
            ids=torch.where(mask, ids[rows, order], -1),
            slots=torch.where(mask & ~is_new, merge(past.slots, self.ids), -1),
            keys=merge(past.keys, self.keys, keys_for if keys_for is not None else k),
            revision=past.revision,
            capacity=past.capacity,
        )


def order_nearest_first(
    distances: Float[Tensor, "B J"], ids: Int[Tensor, "B J"]
) -> Int[Tensor, "B J"]:
    """Return the positions in each row by rising distance, equally near ones newest first."""
    if distances.device.type != "cpu":
        if distances.dtype != torch.float32 or not ids.numel():
            return _order_by_distance_and_age(distances, ids)
        # Pack both into one integer: non-negative floats have the same order as their bits.
        age = (ids.amax() - ids).clamp_max((1 << 32) - 1)
        return (distances.view(torch.int32).to(torch.int64) << 32 | age).argsort(dim=1)
    rising, order = distances.sort(dim=1, stable=True)
    tied = rising[:, 1:] == rising[:, :-1]
    if tied.any():  # this check costs less than sorting everything twice
        ids_in_order = ids.gather(1, order)
        is_wrong = tied & (ids_in_order[:, 1:] > ids_in_order[:, :-1])
        rows = is_wrong.any(1).nonzero()[:, 0]
        order[rows] = _order_by_distance_and_age(distances[rows], ids[rows])
    return order


def _order_by_distance_and_age(distances: Tensor, ids: Tensor) -> Tensor:
    newest = ids.argsort(dim=1, descending=True)
    by_distance = distances.gather(1, newest).argsort(dim=1, stable=True)
    return newest.gather(1, by_distance)


def find_unsure(
    queries: Float[Tensor, "B D"],
    distances: Float[Tensor, "B K"],
    needed: Int[Tensor, "B"] | None,
    beyond: Float[Tensor, "B"] | None,
) -> Bool[Tensor, "B"]:
    """Return which rows may lack a neighbour: too few found, or one left out may be as near.

    An entry left out at distance d ≤ d_K has ‖h‖ ≤ ‖q‖ + √d_K, so the error of its
    ‖h‖² − 2q·h + ‖q‖² was at most γ(2‖q‖ + √d_K)², with γ from `bound_score_error`.
    """
    if needed is None:
        farthest = distances[:, -1]
    else:
        farthest = distances.gather(1, (needed - 1).clamp_min(0)[:, None])[:, 0]
    if beyond is None:
        unsure = farthest == math.inf
    else:
        gamma = bound_score_error(queries.shape[1], queries.dtype, queries.device)
        norms = queries.square().sum(1).sqrt()
        slack = gamma * (2 * norms + farthest.sqrt()).square()
        unsure = farthest + slack >= beyond  # also true where `farthest` is infinite
    if needed is not None:
        unsure &= needed > 0
    return unsure


def measure_candidates(
    queries: Float[Tensor, "B D"],
    slots: Int[Tensor, "B J"],
    slot_ids: Int[Tensor, "N"],
    live: int,
    fetch: Callable[[Tensor], Tensor],
) -> tuple[Float[Tensor, "B J"], Float[Tensor, "B J"]]:
    """Return `Σ(h−q)²` and `q·h` of each query and the keys in its slots.

    Args:
        queries: in the dtype of the distances.
        slots: slots of each query's candidates.
        slot_ids: ids of all slots; negative for slots whose key cannot be fetched.
        live: number of entries. The two ways to compute inner products round differently, so the
            choice must not depend on the number of slots, which saving and loading changes.
        fetch: returns keys (…, D) for slots (…), in new tensors.
    """
    if 2 * slots.shape[1] <= live or not len(slots):
        return measure_each_query(queries, slots, fetch)
    # Once for all queries, since most of them need most keys. Live entries in order of age: which
    # slots they are in, and what was deleted, must not change the rounding of a product.
    every = slot_ids.argsort()[len(slot_ids) - live :]
    places = torch.zeros_like(slot_ids).index_copy_(
        0, every, torch.arange(live, device=slots.device)
    )[slots]
    distances, dots = [], []
    for part in every.split(max(1, SCRATCH_BYTES // (queries.shape[1] * queries.itemsize))):
        keys = fetch(part)
        distances.append(compute_distances(queries, keys))
        dots.append(compute_scores(keys.new_zeros(len(keys)), queries, keys).mul_(-0.5))
    return torch.cat(distances, 1).gather(1, places), torch.cat(dots, 1).gather(1, places)


def measure_each_query(
    queries: Float[Tensor, "B D"], slots: Int[Tensor, "B J"], fetch: Callable[[Tensor], Tensor]
) -> tuple[Float[Tensor, "B J"], Float[Tensor, "B J"]]:
    """Return `Σ(h−q)²` and `q·h`, one query at a time; `fetch` returns keys in new tensors."""
    row_bytes = slots.shape[1] * queries.shape[1] * queries.itemsize
    rows = max(1, _get_piece_bytes(queries.device) // max(1, row_bytes))
    if len(queries) > rows:
        pairs = zip(queries.split(rows), slots.split(rows), strict=True)
        distances, dots = zip(*(measure_each_query(*pair, fetch) for pair in pairs), strict=True)
        return torch.cat(distances), torch.cat(dots)
    keys = fetch(slots)
    if keys.device.type != "cpu":
        products = torch.bmm(queries[:, None], keys.mT)[:, 0]
        return keys.sub_(queries[:, None]).square_().sum(-1), products
    # Not by `bmm`: it may wake threads, and rounds differently if there are more candidates.
    size = _count_unthreaded(keys)
    measured = [_measure(queries[:, None], part) for part in keys.split(size, 1)]
    if len(measured) == 1:
        return measured[0]
    distances, dots = zip(*measured, strict=True)
    return torch.cat(distances, 1), torch.cat(dots, 1)


def _measure(
    queries: Float[Tensor, "B 1 D"], keys: Float[Tensor, "B J D"]
) -> tuple[Float[Tensor, "B J"], Float[Tensor, "B J"]]:
    """Return `Σ(h−q)²` and `q·h`; overwrites the keys."""
    products = (keys * queries).sum(-1)
    return keys.sub_(queries).square_().sum(-1), products


def _count_unthreaded(keys: Float[Tensor, "B J D"]) -> int:
    """Return how many keys per query to process at a time.

    Torch passes an operation on `NUMBERS_PER_THREAD` numbers or more to several threads. For few
    more than that, waking a thread takes longer than all the arithmetic.
    """
    most = max(1, keys.shape[1])
    if keys.numel() > 4 * NUMBERS_PER_THREAD:
        return most
    return min(most, max(1, (NUMBERS_PER_THREAD - 1) // max(1, len(keys) * keys.shape[2])))


def gather_rows(rows: Shaped[Tensor, "N *D"], places: Int[Tensor, "M"]) -> Shaped[Tensor, "M *D"]:
    """Return the rows in these places, in a new tensor.

    A few are copied by one thread of a CPU. Others would wait actively when they are done, and keep
    a core from what comes next.
    """
    size = math.prod(rows.shape[1:])
    most = len(places) * size
    if rows.device.type != "cpu" or not NUMBERS_PER_THREAD <= most <= 4 * NUMBERS_PER_THREAD:
        return rows.index_select(0, places)
    found = rows.new_empty((len(places), *rows.shape[1:]))
    count = max(1, (NUMBERS_PER_THREAD - 1) // size)
    for some, out in zip(places.split(count), found.split(count), strict=True):
        torch.index_select(rows, 0, some, out=out)
    return found


def compute_distances(
    queries: Float[Tensor, "B D"], keys: Float[Tensor, "N D"]
) -> Float[Tensor, "B N"]:
    """Return `Σ(h−q)²` of every query and every key."""
    if takes_kernels(queries):
        from mbpa.memory.search_kernels import pair_distances

        return pair_distances(queries, keys)
    rows = max(1, min(len(queries), QUERIES_PER_TILE))
    size = max(1, _get_piece_bytes(keys.device) // (rows * keys.shape[1] * keys.itemsize))
    scratch = keys.new_empty(rows, min(size, len(keys)), keys.shape[1])

    def tile(queries: Tensor, keys: Tensor) -> Tensor:
        out = scratch[: len(queries), : len(keys)]
        return torch.sub(keys, queries[:, None], out=out).square_().sum(-1)

    columns = keys.split(size)
    return torch.cat(
        [torch.cat([tile(part, each) for each in columns], 1) for part in queries.split(rows)]
    )


def _get_piece_bytes(device: torch.device) -> int:
    if device.type != "cpu":
        return SCRATCH_BYTES
    return min(SCRATCH_BYTES, CACHE_BYTES * torch.get_num_threads())


def find_smallest(
    scores: Float[Tensor, "B N"], k: int
) -> tuple[Float[Tensor, "B k"], Int[Tensor, "B k"]]:
    """Return the k smallest scores of each row, in rising order, and their positions.

    They lie in the k groups with the smallest minima. A group is `size` scores that are `stride`
    apart, so that one vectorised pass finds all minima, and only few scores are left to sort.
    """
    count = scores.shape[1]
    size = math.isqrt(count // k)  # about as many minima as members of k groups
    if size < 4 or scores.numel() < 1 << 17:  # too few to group
        values, places = scores.topk(k, largest=False)
        return values, places
    stride = count // size
    grouped = scores[:, : size * stride].unflatten(1, (size, stride))
    groups = grouped.amin(1).topk(k, largest=False, sorted=False).indices
    members = grouped.gather(2, groups[:, None].expand(-1, size, -1)).flatten(1)
    members = torch.cat([members, scores[:, size * stride :]], 1)  # and those in no group
    values, chosen = members.topk(k, largest=False)
    in_group = chosen // k * stride + groups.gather(1, chosen % k)
    return values, in_group.where(chosen < size * k, chosen + size * (stride - k))


def full_precision(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context that disables autocast, or does nothing (which is faster) if it is off."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def compute_scores(
    norms: Float[Tensor, "N"], queries: Float[Tensor, "B D"], keys: Float[Tensor, "N D"]
) -> Float[Tensor, "B N"]:
    """Return `‖h‖² − 2 q·h`, even if torch uses reduced-precision products.

    `bound_score_error` bounds its error. A reduced-precision product is exact for factors of few
    bits. So each factor is split into two parts of few bits, and the product of the two small parts
    is left out.
    """
    bits = _count_product_bits(queries.dtype, queries.device)
    if bits >= 24 and queries.device.type == "cpu":
        # Up to 14 times as fast as `addmm`, which has no fast kernel on some CPUs.
        return torch.mm(queries, keys.T).mul_(-2).add_(norms)
    if bits >= 24:
        return torch.addmm(norms, queries, keys.T, alpha=-2)
    (large_q, small_q), (large_k, small_k) = _split(queries, bits), _split(keys, bits)
    scores = torch.addmm(norms, large_q, large_k.T, alpha=-2)
    return scores.addmm_(large_q, small_k.T, alpha=-2).addmm_(small_q, large_k.T, alpha=-2)


def bound_score_error(key_size: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return γ such that the error of `compute_scores` is at most γ(‖q‖ + ‖h‖)².

    (D + 8)u bounds the error of sums of D products with unit roundoff u. Splitting adds the part
    that it leaves out or rounds.
    """
    roundoff = torch.finfo(dtype).eps / 2
    bits = _count_product_bits(dtype, device)
    return (key_size + 8) * roundoff + (4 * 2.0 ** (-2 * bits) if bits < 24 else 0.0)


def get_matmul_roundoff(dtype: torch.dtype, device: torch.device) -> float:
    """Return the unit roundoff of a matrix product; for float32 it depends on a global setting."""
    return 2.0 ** -_count_product_bits(dtype, device)


def _count_product_bits(dtype: torch.dtype, device: torch.device) -> int:
    # torch.get_float32_matmul_precision raises once a backend has its own setting.
    if dtype == torch.float64:
        return 53
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    bits: int = {"tf32": 11, "bf16": 8}.get(backend.matmul.fp32_precision, 24)
    return bits


def _split(numbers: Float[Tensor, "N D"], bits: int) -> tuple[Tensor, Tensor]:
    """Split float32 numbers into their `bits` leading bits and the rest, both exact."""
    large = (numbers.view(torch.int32) & -(1 << (24 - bits))).view(torch.float32)
    return large, numbers - large


# Counting labels


def count_equal(ordered: Int[Tensor, "M"], wanted: Int[Tensor, "*W"]) -> Int[Tensor, "*W"]:
    """Return how often each wanted number occurs in `ordered`, which is sorted."""
    last = torch.searchsorted(ordered, wanted, right=True)
    return last - torch.searchsorted(ordered, wanted)


def count_equal_between(
    numbers: Int[Tensor, "N"],
    wanted: Int[Tensor, "B K"],
    first: Int[Tensor, "B"],
    last: Int[Tensor, "B"],
) -> Int[Tensor, "B K"]:
    """Return how often each wanted number occurs in `numbers[first:last]`, with the bounds of its
    row.
    """
    distinct, ranks = numbers.unique(return_inverse=True)
    size = len(numbers) + 1
    # Sorted by number, then by place: equal numbers between two places lie next to each other.
    ordered = (ranks * size + torch.arange(len(numbers), device=numbers.device)).sort().values
    start = torch.searchsorted(distinct, wanted) * size
    counts = torch.searchsorted(ordered, start + last[:, None])
    return counts - torch.searchsorted(ordered, start + first[:, None])
