"""A last layer fitted to the optimum, over frozen keys."""

from __future__ import annotations

import copy

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

MOST_ITERATIONS = 500
BETWEEN_LOOKS = 10  # iterations between tests for convergence
EXAMPLES_PER_CHUNK = 1 << 15  # examples held in double precision at a time, with their outputs


def fit_logistic(
    start: nn.Linear,
    keys: Float[Tensor, "N D"],
    labels: Int[Tensor, "N"],
    *,
    penalty: float,
    balanced: bool,
    tolerance: float,
    prior: nn.Linear | None = None,
    bias_penalty: float = 0.0,
    examples_per_chunk: int = EXAMPLES_PER_CHUNK,
) -> nn.Linear:
    """Return a multinomial logistic regression, the minimum of

        Σ_i s_i loss_i + penalty/2 ‖weight − prior's‖² + bias_penalty/2 ‖bias − prior's‖².

    Its probabilities do not depend on the starting point, provided that the minimisation converges
    and all labels occur (without a penalty on biases, a label that does not occur has no minimum).

    Args:
        penalty: must be positive.
        tolerance: maximum gradient at the end, divided by N. One example contributes no more than
            about 1/N to it, so with a few examples among many it must be far below that. The search
            ends earlier if double precision, or 500 iterations, do not reach it.
        prior: the layer at which the penalties vanish; zeros by default.
        balanced: whether every label has the same weight in the sum (s_i is inversely proportional
            to the number of examples with that label); otherwise every example has (s_i = 1).
        examples_per_chunk: number of examples held in double precision at a time.
    """
    if not (penalty > 0 and len(labels)):
        raise ValueError(f"penalty must be above zero, with examples, got {penalty}, {len(labels)}")
    counts = labels.bincount(minlength=start.out_features).clamp(min=1)
    shares = torch.ones(len(labels), device=labels.device)
    if balanced:
        present = int((labels.bincount() > 0).sum())
        shares = (len(labels) / (present * counts))[labels]
    found = copy.deepcopy(start).requires_grad_(False)
    with torch.no_grad():
        origin = torch.zeros_like(_join_rows(start)) if prior is None else _join_rows(prior)
        penalties = origin.new_full((origin.shape[1],), penalty)
        penalties[-1] = bias_penalty
        objective = _Objective(keys, labels, shares, origin, penalties, examples_per_chunk)
        rows = _minimum(objective, _join_rows(start), tolerance * len(labels)).to(found.weight)
        found.weight.copy_(rows[:, :-1])
        found.bias.copy_(rows[:, -1])
    return found


def _join_rows(layer: nn.Linear) -> Float[Tensor, "C E"]:
    """Return the weights and, last, the bias of each output."""
    return torch.cat((layer.weight, layer.bias[:, None]), 1).detach().double()


class _Objective:
    """The function to minimise, in double precision, since its values near the minimum are
    indistinguishable in single precision. Rows have one entry per dimension of a key and, last, one
    for the bias.
    """

    def __init__(
        self,
        keys: Float[Tensor, "N D"],
        labels: Int[Tensor, "N"],
        shares: Float[Tensor, "N"],
        origin: Float[Tensor, "C E"],
        penalties: Float[Tensor, "E"],
        examples_per_chunk: int,
    ) -> None:
        self.origin, self.penalties = origin, penalties
        parts = (each.split(examples_per_chunk) for each in (keys.detach(), labels, shares))
        self._parts = list(zip(*parts, strict=True))

    def slope(self, rows: Float[Tensor, "C E"]) -> tuple[float, Float[Tensor, "C E"]]:
        """Return the value and the gradient at `rows`."""
        away = rows - self.origin
        total, slope = (self.penalties * away.square()).sum() / 2, self.penalties * away
        for keys, labels, shares in self._parts:
            inputs = _with_ones(keys)
            logs = F.linear(inputs, rows).log_softmax(1)
            total -= shares.double() @ logs.gather(1, labels[:, None])[:, 0]
            surplus = logs.exp_().scatter_add_(1, labels[:, None], -torch.ones_like(logs[:, :1]))
            slope += (surplus * shares[:, None]).mT @ inputs
        return float(total), slope

    def bend(self) -> Float[Tensor, "E E"]:
        """Return the approximate curvature for one output's parameters, if all were equally
        probable.
        """
        found = torch.diag(self.penalties)
        for keys, _, shares in self._parts:
            inputs = _with_ones(keys)
            found += (shares[:, None] * inputs).mT @ inputs / len(self.origin)
        return found


def _with_ones(keys: Float[Tensor, "N D"]) -> Float[Tensor, "N E"]:
    return F.pad(keys.double(), (0, 1), value=1.0)


def _minimum(
    objective: _Objective, start: Float[Tensor, "C E"], tolerance: float
) -> Float[Tensor, "C E"]:
    """Minimise by L-BFGS, in coordinates in which the curvature is about equal in all directions.
    The keys have a mean and a few directions along which the curvature is thousands of times larger
    than elsewhere, and which would otherwise limit the steps.
    """
    lower = torch.linalg.cholesky(objective.bend())
    place = (start - objective.origin) @ lower
    optimizer = torch.optim.LBFGS(
        [place],
        max_iter=BETWEEN_LOOKS,
        max_eval=25 * BETWEEN_LOOKS,
        history_size=20,
        tolerance_grad=0,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def rows() -> Tensor:
        away: Tensor = torch.linalg.solve_triangular(lower, place, upper=False, left=False)
        return objective.origin + away

    def loss() -> float:
        value, slope = objective.slope(rows())
        grad = torch.linalg.solve_triangular(lower.mT, slope, upper=True, left=False)
        place.grad = grad.contiguous()
        return value

    for _ in range(MOST_ITERATIONS // BETWEEN_LOOKS):
        before = place.clone()
        optimizer.step(loss)
        is_there = float(objective.slope(rows())[1].abs().max()) <= tolerance
        if is_there or torch.equal(place, before):
            break
    return rows()
