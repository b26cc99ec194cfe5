"""Fitting how kernel and step size follow from the query, by gradients through the adaptation.

The adaptation of a linear head is a differentiable function of the neighbours' weights. So the
coefficients of a `Reach` can be fitted like those of a network: unroll the steps, and lower the
mean −log p of the tokens of a validation text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from experiments.memory_language_model.library import Found, Library
from mbpa.language.gate import NEIGHBORHOOD_FEATURES, Neighborhood, Reach, weigh_neighbors
from mbpa.predictors import Context

OWN_TOP, NEIGHBOR_TOP = 64, 16  # most probable classes of query and neighbours that take part
ABSENT = -1e30
RIDGE = 1e-4
HEAD_ROWS = 4096


@dataclass(frozen=True, eq=False)
class Tables:
    """What is known about all entries: log Σ exp of the head's outputs, and the top classes."""

    log_sums: Float[Tensor, "N"]
    top: Int[Tensor, "N M"]

    @staticmethod
    @torch.no_grad()
    def make(library: Library) -> Tables:
        """Run the head over all entries."""
        sums, tops = [], []
        for keys in library.keys.split(HEAD_ROWS):
            outputs = library.head(keys.float())
            sums.append(outputs.logsumexp(1))
            tops.append(outputs.topk(min(NEIGHBOR_TOP, outputs.shape[1])).indices.int())
        return Tables(torch.cat(sums), torch.cat(tops))


@dataclass(frozen=True, eq=False)
class Unrolled:
    """The start of a batch of adaptations on a few classes each, ready to be unrolled."""

    outputs: Float[Tensor, "B L A"]
    """Outputs of the active classes at the neighbours and, last, at the query; then the rest."""
    pull: Float[Tensor, "B L K"]
    """Inner products of neighbours and query with the neighbours."""
    labels: Int[Tensor, "B K"]
    """Columns of the neighbours' labels."""
    target: Int[Tensor, "B"]
    """Column of the target; −1 if it is not active."""
    fixed: Float[Tensor, "B"]
    """Output of the target at the query by the unadapted head."""

    def adapt(self, weights: Float[Tensor, "B K"], steps: int) -> Float[Tensor, "B"]:
        """Return the adapted log-probabilities of the targets."""
        outputs, count = self.outputs, weights.shape[1]
        pull = self.pull * weights[:, None]
        moves = torch.ones(outputs.shape[-1], device=outputs.device, dtype=outputs.dtype)
        moves[-1] = 0  # the rest stays
        hot = torch.zeros_like(outputs[:, :count]).scatter_(2, self.labels[..., None], 1.0)
        for _ in range(steps):
            slopes = (outputs[:, :count].softmax(-1) - hot) * moves
            outputs = outputs - pull @ slopes
        last = outputs[:, -1]
        own = last.gather(1, self.target.clamp_min(0)[:, None])[:, 0]
        return own.where(self.target >= 0, self.fixed) - last.logsumexp(1)


@torch.no_grad()
def start_unrolled(
    library: Library, tables: Tables, context: Context, targets: Int[Tensor, "B"]
) -> Unrolled:
    """Compute outputs and inner products of a batch of adaptations."""
    found, outputs = context.found, context.outputs
    slots = found.slots.clamp_min(0)
    chosen = (
        torch.cat(
            [
                outputs.topk(min(OWN_TOP, outputs.shape[1])).indices,
                found.values,
                tables.top[slots].long().flatten(1),
            ],
            1,
        )
        .sort(1)
        .values
    )
    is_copy = nn.functional.pad(chosen[:, 1:] == chosen[:, :-1], (1, 0))
    chosen = chosen.masked_fill(is_copy, outputs.shape[1]).sort(1).values
    chosen = chosen[:, : int((~is_copy).sum(1).max())].contiguous()
    is_absent = chosen == outputs.shape[1]
    classes = chosen.masked_fill(is_absent, 0)
    weight = library.head.weight[classes]  # B A D
    keys = found.keys.to(outputs.dtype)
    at_keys = keys @ weight.mT
    if library.head.bias is not None:
        at_keys += library.head.bias[classes][:, None]
    logits = torch.cat([at_keys, outputs.gather(1, classes)[:, None]], 1)
    logits.masked_fill_(is_absent[:, None], ABSENT)
    sums = torch.cat([tables.log_sums[slots], outputs.logsumexp(1, keepdim=True)], 1)
    taken = (logits.logsumexp(-1) - sums).exp().clamp(max=1 - 1e-6)
    rest = sums + torch.log1p(-taken)
    place = torch.searchsorted(chosen, targets[:, None])[:, 0].clamp_max(chosen.shape[1] - 1)
    is_there = chosen.gather(1, place[:, None])[:, 0] == targets
    return Unrolled(
        outputs=torch.cat([logits, rest[..., None]], -1),
        pull=torch.cat([keys, context.queries[:, None]], 1) @ keys.mT,
        labels=torch.searchsorted(chosen, found.values),
        target=place.where(is_there, -1),
        fixed=outputs.gather(1, targets[:, None])[:, 0],
    )


def fit_reaches(
    libraries: Sequence[Library],
    split: str,
    source: str,
    starts: Sequence[Reach],
    *,
    k: int,
    steps: int,
    updates: int,
    batch: int = 256,
    lr: float = 0.03,
    is_vote: bool = False,
    seed: int = 0,
    tick: Callable[[float], object] = lambda _: None,
) -> list[Reach]:
    """Fit reaches on a text of one or more corpora, together with a simple gate that mixes them.

    Args:
        libraries: the corpora, which take turns.
        split: name of the text.
        source: which neighbours to use.
        starts: where to start; several reaches specialise if their starts differ.
        k: number of neighbours.
        steps: number of gradient steps of the adaptation.
        updates: number of updates of the coefficients.
        batch: number of tokens per update.
        lr: learning rate of Adam, which decays linearly to zero.
        is_vote: fit the kernel of a vote instead of an adaptation.
        seed: seed of the order of tokens.
        tick: called with the loss after each update.
    """
    device = libraries[0].device
    draws = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(each.count(split), generator=draws).to(device) for each in libraries]
    found: list[Found] = [each.find(split, source).first(k) for each in libraries]
    # Standardised features let one learning rate fit all coefficients.
    center, spread = _measure_spread(libraries, split, found, orders)
    coefficients = [
        _standardise(
            torch.tensor([each.sharpness, each.width, each.step]).to(device), center, spread
        )
        for each in starts
    ]
    terms = [torch.tensor([each.plausibility, each.support]).to(device) for each in starts]
    gate = torch.zeros(len(starts), len(NEIGHBORHOOD_FEATURES), device=device)
    gate[:, 0] = 1.0
    free = [part.requires_grad_(True) for part in (*coefficients, *terms, gate)]
    optimizer = torch.optim.Adam(free, lr=lr, betas=(0.9, 0.99))
    tables = [None if is_vote else Tables.make(library) for library in libraries]
    for update in range(updates):
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 - update / updates)
        turn = update % len(libraries)
        library, order = libraries[turn], orders[turn]
        begin = update // len(libraries) * batch % max(1, len(order) - batch + 1)
        rows = order[begin : begin + batch]
        targets = library.states[split].targets[rows]
        context = library.make_context(split, rows, found[turn], 0 if is_vote else k)
        around, known = Neighborhood.measure(context), tables[turn]
        unrolled = None if known is None else start_unrolled(library, known, context, targets)
        scores = [context.parametric.gather(1, targets[:, None])[:, 0]]
        for table, more in zip(coefficients, terms, strict=True):
            weights = weigh_neighbors(around, _unstandardise(table, center, spread), more)
            if unrolled is None:
                hits = (context.found.values == targets[:, None]) & around.mask
                shares = (weights * hits).sum(1) / weights.sum(1)
                scores.append(shares.clamp_min(1e-9).log())
            else:
                scores.append(unrolled.adapt(weights, steps))
        trust = ((around.features - center) / spread) @ gate.T
        trust = nn.functional.pad(trust, (1, 0)).log_softmax(1)
        loss = -(trust + torch.stack(scores, 1)).logsumexp(1).mean()
        varying = (*(table[:, 1:] for table in coefficients), *terms)
        optimizer.zero_grad()
        (loss + RIDGE * sum(part.square().sum() for part in varying)).backward()
        nn.utils.clip_grad_norm_(free, 1.0)
        optimizer.step()
        tick(float(loss.detach()))
    fitted = []
    for table, more in zip(coefficients, terms, strict=True):
        sharpness, width, step = _unstandardise(table.detach(), center, spread).tolist()
        fitted.append(Reach(tuple(sharpness), tuple(width), tuple(step), *more.tolist()))
    return fitted


def _measure_spread(
    libraries: Sequence[Library], split: str, found: list[Found], orders: list[Tensor]
) -> tuple[Tensor, Tensor]:
    parts = []
    for library, near, order in zip(libraries, found, orders, strict=True):
        with torch.no_grad():
            context = library.make_context(split, order[:2048], near, 0)
            parts.append(Neighborhood.measure(context).features)
    features = torch.cat(parts)
    center, spread = features.mean(0), features.std(0)
    center[0], spread[0] = 0.0, 1.0
    return center, spread.where(spread > 1e-6, 1.0)


def _standardise(table: Tensor, center: Tensor, spread: Tensor) -> Tensor:
    scaled = table * spread
    constant = table[:, :1] + (table[:, 1:] * center[1:]).sum(1, keepdim=True)
    return torch.cat([constant, scaled[:, 1:]], 1)


def _unstandardise(table: Tensor, center: Tensor, spread: Tensor) -> Tensor:
    scaled = table / spread
    constant = table[:, :1] - (scaled[:, 1:] * center[1:]).sum(1, keepdim=True)
    return torch.cat([constant, scaled[:, 1:]], 1)
