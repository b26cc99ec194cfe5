"""Heads over frozen keys: trained for some epochs, or made of means."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from mbpa.modules.new_rows import NewRows
from mbpa.modules.split import grow

BATCH_EXAMPLES = 256


def grow_head(head: nn.Linear, outputs: int) -> nn.Linear:
    """Return a copy with rows of zeros for additional labels."""
    more = grow(head, outputs)
    assert isinstance(more, nn.Linear)
    return more.requires_grad_(False)


def select_rows(head: nn.Linear, rows: Int[Tensor, "R"]) -> nn.Linear:
    """Return a head of these rows, in this order."""
    weight, bias = head.weight[rows], head.bias[rows]
    part = nn.Linear(head.in_features, len(rows), device=weight.device, dtype=weight.dtype)
    part.load_state_dict({"weight": weight, "bias": bias})
    return part.requires_grad_(False)


def replace_rows(head: nn.Linear, rows: Int[Tensor, "R"], part: nn.Linear) -> nn.Linear:
    """Return a copy in which `part` takes the place of these rows."""
    copy = grow_head(head, head.out_features)
    copy.weight[rows], copy.bias[rows] = part.weight, part.bias
    return copy


def train_new_head(
    keys: Float[Tensor, "N D"],
    labels: Int[Tensor, "N"],
    classes: int,
    *,
    epochs: int,
    lr: float,
    seed: int,
) -> nn.Linear:
    """Train a head from zero with `train_head`."""
    empty = nn.Linear(keys.shape[1], classes, device=keys.device)
    with torch.no_grad():
        empty.weight.zero_()
        empty.bias.zero_()
    return train_head(empty, keys, labels, epochs=epochs, lr=lr, seed=seed)


def train_head(
    head: nn.Linear,
    keys: Float[Tensor, "N D"],
    labels: Int[Tensor, "N"],
    *,
    epochs: int,
    lr: float,
    seed: int,
    batch: int = BATCH_EXAMPLES,
) -> nn.Linear:
    """Return a copy of the head after training with Adam, the learning rate falling linearly to
    zero.
    """
    head = grow_head(head, head.out_features).requires_grad_(True)
    optimizer = torch.optim.Adam(head.parameters(), lr=lr)
    draws, taken = torch.Generator().manual_seed(seed), 0
    steps = epochs * math.ceil(len(labels) / batch)
    for _ in range(epochs):
        for rows in torch.randperm(len(labels), generator=draws).to(labels.device).split(batch):
            for group in optimizer.param_groups:
                group["lr"] = lr * (1 - taken / steps)
            optimizer.zero_grad()
            F.cross_entropy(head(keys[rows]), labels[rows]).backward()
            optimizer.step()
            taken += 1
    return head.requires_grad_(False)


def add_mean_rows(
    head: nn.Linear,
    sums: Float[Tensor, "C D"],
    *,
    old: int,
    scale: float,
    offset: float,
) -> nn.Linear:
    """Return a copy in which the rows of labels from `old` on are computed from the sums of their
    keys (`mbpa.modules.new_rows`), for labels that have examples.
    """
    present = sums.square().sum(1) > 0
    made = NewRows.around(
        head.weight[:old], head.bias[:old], sums[:old][present[:old]], scale=scale, offset=offset
    )
    is_new = present & (torch.arange(len(sums), device=sums.device) >= old)
    copy = grow_head(head, head.out_features)
    with torch.no_grad():
        rows = made.weights(sums).to(copy.weight.dtype)
        copy.weight.copy_(torch.where(is_new[:, None], rows, copy.weight))
        copy.bias.copy_(torch.where(is_new, made.biases, copy.bias))
    return copy
