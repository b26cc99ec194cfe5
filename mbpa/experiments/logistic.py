"""A last layer fitted to the optimum, over frozen keys."""

from __future__ import annotations

import copy

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

MOST_ITERATIONS = 500
BETWEEN_LOOKS = 10  # iterations, after which it is seen whether that will do
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
        penalty: above zero.
        tolerance: how large the gradient of the mean loss may be in the end. One example of N can
            contribute no more than some 1/N to it: with a few among many it must be far below that.
        prior: where the penalties are none; zeros, unless it is told.
        balanced: every label counts the same in the sum (s_i is inverse to how many share the
            label); otherwise every example (s_i = 1).
    """
    counts = labels.bincount(minlength=start.out_features).clamp(min=1)
    shares = torch.ones(len(labels), device=labels.device)
    if balanced:
        present = int((labels.bincount() > 0).sum())
        shares = (len(labels) / (present * counts))[labels]
    objective = _Objective(keys, labels, shares, start.out_features, penalty, bias_penalty, prior)
    found = copy.deepcopy(start).requires_grad_(False)
    rows = _minimum(objective, _rows(start), tolerance).to(found.weight)
    found.weight.copy_(rows[:, :-1])
    found.bias.copy_(rows[:, -1])
    return found


def _rows(layer: nn.Linear) -> Float[Tensor, "C E"]:
    """Weights and, last, the bias of each output."""
    return torch.cat((layer.weight, layer.bias[:, None]), 1).detach().double()


class _Objective:
    """What is minimised, divided by the number of examples; in double precision, since in single
    its values near the minimum tell nothing apart. E = D + 1."""

    def __init__(
        self,
        keys: Float[Tensor, "N D"],
        labels: Int[Tensor, "N"],
        shares: Float[Tensor, "N"],
        classes: int,
        penalty: float,
        bias_penalty: float,
        prior: nn.Linear | None,
    ) -> None:
        self.parts = list(
            zip(*(each.split(AT_ONCE) for each in (keys, labels, shares)), strict=True)
        )
        self.count, size = len(labels), keys.shape[1] + 1
        self.penalties = torch.full((size,), penalty, dtype=torch.float64, device=keys.device)
        self.penalties[-1] = bias_penalty
        self.prior = self.penalties.new_zeros(classes, size) if prior is None else _rows(prior)

    def slope(self, rows: Float[Tensor, "C E"]) -> tuple[float, Float[Tensor, "C E"]]:
        """Its value and its gradient there."""
        away = rows - self.prior
        total = 0.5 * (self.penalties * away.square()).sum()
        slope = self.penalties * away
        layer = rows.clone().requires_grad_(True)
        for keys, labels, shares in self.parts:
            outputs = F.linear(keys.double(), layer[:, :-1], layer[:, -1])
            loss = shares.double() @ F.cross_entropy(outputs, labels, reduction="none")
            (grown,) = torch.autograd.grad(loss, layer)
            total, slope = total + loss.detach(), slope + grown
        return float(total) / self.count, slope / self.count

    def bend(self) -> Float[Tensor, "E E"]:
        """Its curvature in the parameters of one output, were all outputs equally probable."""
        found = torch.diag(self.penalties)
        for keys, _, shares in self.parts:
            inputs = F.pad(keys.double(), (0, 1), value=1.0)
            found += (shares[:, None] * inputs).mT @ inputs / len(self.prior)
        return found / self.count


def _minimum(
    objective: _Objective, start: Float[Tensor, "C E"], tolerance: float
) -> Float[Tensor, "C E"]:
    """By L-BFGS, in coordinates in which the curvature is about the same in all directions: keys
    have a mean and a few directions of their own, along which it is thousands of times that of
    others, and steps would be as small as those ask for."""
    lower = torch.linalg.cholesky(objective.bend())
    place = ((start - objective.prior) @ lower).requires_grad_(True)
    optimizer = torch.optim.LBFGS(
        [place],
        max_iter=BETWEEN_LOOKS,
        history_size=20,
        tolerance_grad=0,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def rows() -> Tensor:
        away: Tensor = torch.linalg.solve_triangular(lower, place.detach(), upper=False, left=False)
        return objective.prior + away

    def loss() -> float:
        value, slope = objective.slope(rows())
        grad = torch.linalg.solve_triangular(lower.mT, slope, upper=True, left=False)
        place.grad = grad.contiguous()
        return value

    for _ in range(MOST_ITERATIONS // BETWEEN_LOOKS):
        if float(objective.slope(rows())[1].abs().max()) <= tolerance:
            break
        optimizer.step(loss)
    return rows()
