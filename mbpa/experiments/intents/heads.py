"""Heads over frozen keys: trained for some epochs, fitted to the optimum, or made of means."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from mbpa.rows import NewRows
from mbpa.split import grow

BATCH = 256
MOST_ITERATIONS = 200
TOLERANCE = 3e-5  # of the gradient of the mean loss; accuracies stand still long before


def grown(head: nn.Linear, outputs: int) -> nn.Linear:
    """A copy with room for more labels; rows of zeros."""
    more = grow(head, outputs)
    assert isinstance(more, nn.Linear)
    return more.requires_grad_(False)


def trained(
    head: nn.Linear,
    keys: Float[Tensor, "N D"],
    labels: Int[Tensor, "N"],
    *,
    epochs: int,
    lr: float,
    seed: int,
    batch: int = BATCH,
) -> nn.Linear:
    """A copy of the head after some epochs of Adam, the rate falling in a straight line to zero."""
    head = grown(head, head.out_features).requires_grad_(True)
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


def logistic(
    start: nn.Linear,
    keys: Float[Tensor, "N D"],
    labels: Int[Tensor, "N"],
    *,
    penalty: float,
    balanced: bool,
) -> nn.Linear:
    """Multinomial logistic regression: the minimum of Σ_i s_i loss_i + penalty/2 ‖weight‖².

    There is one minimum, so where the search for it starts matters for the time alone.

    Args:
        balanced: every label counts the same in the sum (s_i is inverse to how many share the
            label); otherwise every sentence (s_i = 1).
    """
    head = grown(start, start.out_features).requires_grad_(True)
    counts = labels.bincount(minlength=head.out_features).clamp(min=1)
    shares = torch.ones(len(labels), device=labels.device)
    if balanced:
        present = int((labels.bincount() > 0).sum())
        shares = (len(labels) / (present * counts))[labels]
    optimizer = torch.optim.LBFGS(
        head.parameters(),
        max_iter=MOST_ITERATIONS,
        history_size=20,
        tolerance_grad=TOLERANCE,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        losses = F.cross_entropy(head(keys), labels, reduction="none")
        total = shares @ losses + penalty / 2 * head.weight.square().sum()
        mean = total / len(labels)
        mean.backward()
        return mean

    optimizer.step(loss)
    return head.requires_grad_(False)


def with_means(
    head: nn.Linear,
    sums: Float[Tensor, "C D"],
    *,
    old: int,
    scale: float,
    offset: float,
) -> nn.Linear:
    """A copy in which the rows of labels from `old` on are made of the sums of their keys
    (`mbpa.rows`), where there are examples."""
    present = sums.square().sum(1) > 0
    made = NewRows.around(
        head.weight[:old], head.bias[:old], sums[:old][present[:old]], scale=scale, offset=offset
    )
    is_new = present & (torch.arange(len(sums), device=sums.device) >= old)
    copy = grown(head, head.out_features)
    with torch.no_grad():
        rows = made.weights(sums).to(copy.weight.dtype)
        copy.weight.copy_(torch.where(is_new[:, None], rows, copy.weight))
        copy.bias.copy_(torch.where(is_new, made.biases, copy.bias))
    return copy
