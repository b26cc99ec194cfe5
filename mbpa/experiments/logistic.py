"""A last layer fitted to the optimum, over frozen keys."""

from __future__ import annotations

import copy

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

MOST_ITERATIONS = 500
AT_ONCE = 1 << 17  # examples whose outputs are held


def logistic(
    start: nn.Linear,
    keys: Float[Tensor, "N D"],
    labels: Int[Tensor, "N"],
    *,
    penalty: float,
    balanced: bool,
    tolerance: float,
    prior: nn.Linear | None = None,
    bias_penalty: float = 0.0,
) -> nn.Linear:
    """Multinomial logistic regression: the minimum of

        Σ_i s_i loss_i + penalty/2 ‖weight − prior's‖² + bias_penalty/2 ‖bias − prior's‖².

    There is one minimum, so where the search for it starts matters for the time alone, if it goes
    on to the end.

    Args:
        tolerance: how large the gradient of the mean loss may be in the end. One example of N can
            contribute no more than some 1/N to it: with a few among many it must be far below that.
        prior: where the penalties are none; zeros, unless it is told.
        balanced: every label counts the same in the sum (s_i is inverse to how many share the
            label); otherwise every example (s_i = 1).
    """
    head = copy.deepcopy(start).requires_grad_(True)
    counts = labels.bincount(minlength=head.out_features).clamp(min=1)
    shares = torch.ones(len(labels), device=labels.device)
    if balanced:
        present = int((labels.bincount() > 0).sum())
        shares = (len(labels) / (present * counts))[labels]
    weight, bias = (0.0, 0.0) if prior is None else (prior.weight.detach(), prior.bias.detach())
    optimizer = torch.optim.LBFGS(
        head.parameters(),
        max_iter=MOST_ITERATIONS,
        history_size=20,
        tolerance_grad=tolerance,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    parts = list(zip(*(each.split(AT_ONCE) for each in (keys, labels, shares)), strict=True))

    def loss() -> Tensor:
        optimizer.zero_grad()
        total = penalty / 2 * (head.weight - weight).square().sum()
        total = (total + bias_penalty / 2 * (head.bias - bias).square().sum()) / len(labels)
        total.backward()
        for inputs, targets, counted in parts:
            losses = F.cross_entropy(head(inputs), targets, reduction="none")
            part = counted @ losses / len(labels)
            part.backward()
            total = total.detach() + part.detach()
        return total

    optimizer.step(loss)
    return head.requires_grad_(False)
