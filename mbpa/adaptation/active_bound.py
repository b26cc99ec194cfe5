"""A bound on the error of an active vocabulary, computed alongside the steps.

A are the active classes, R all others. The approximation keeps the outputs of R constant. Exact
steps would move them, and with them the sums of exponentials, the gradients, and the outputs of A.
docs/large-vocabularies.md derives the bound. It holds for exact arithmetic; rounding comes on top.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from mbpa.rules import Gradient


class ErrorBound:
    """The bound for a batch of queries; call `advance` before each step, then `finish`.

    Rows are the K neighbours and, last, the query. Sums of exponentials are in units of their value
    over all classes before adaptation.

    Args:
        gram: inner products of the adapting inputs of all rows.
        weights: weights of the neighbours.
        rule: the gradient steps, without momentum.
        log_sums: log Σ exp of the unadapted outputs over all classes.
        rest: the probability of R before adaptation.
        largest: the largest probability that a class in R has at each neighbour.
        squares: the sum of squared probabilities over R.
    """

    def __init__(
        self,
        gram: Float[Tensor, "B L L"],
        weights: Float[Tensor, "B K"],
        rule: Gradient,
        log_sums: Float[Tensor, "B L"],
        rest: Float[Tensor, "B L"],
        largest: Float[Tensor, "B K"],
        squares: Float[Tensor, "B L"],
    ) -> None:
        self._gram, self._weights, self._rule = gram[:, :-1, :-1], weights, rule
        self._log_sums, self._rest, self._largest = log_sums, rest, largest
        roots, across = squares.clamp_min(0).sqrt(), gram[:, :, :-1]
        self._down, self._up = across.clamp_min(0), (-across).clamp_min(0)
        overlap = roots[:, :, None] * roots[:, None, :-1]
        self._mass_down, self._mass_up = self._down * overlap, self._up * overlap
        self._lengths = gram.diagonal(dim1=1, dim2=2).sqrt()
        self._pull = torch.zeros_like(weights)
        self._distance = weights.new_zeros(len(weights))

    def advance(
        self,
        log_sums: Float[Tensor, "B K"],
        squares: Float[Tensor, "B K"],
        steepness: Float[Tensor, "B K"],
    ) -> None:
        """Account for a step, given the state of the neighbours before it.

        Args:
            log_sums: log Σ exp of the outputs.
            squares: sums of squared probabilities over A.
            steepness: the largest p (1 − p) over A.
        """
        rate, keep = self._rule.rate, 1 - self._rule.decay
        sums = (log_sums - self._log_sums[:, :-1]).exp()
        fall, rise, lost, gained = (moved[:, :-1] for moved in self._move_rest())
        rest, lengths = self._rest[:, :-1], self._lengths[:, :-1]
        gap = lengths * self._distance[:, None]  # between exact and computed outputs of A
        slip = torch.maximum(lost / (sums - lost), gained / (sums + gained))
        error = (self._weights * slip * lengths * squares.sqrt()).sum(1)
        change = torch.maximum(gap, torch.maximum(fall, rise))
        growth = self._bound_growth(2 * steepness * torch.exp(4 * change))
        self._distance = growth * self._distance + rate * error
        least = (sums - rest) * torch.exp(-gap) + rest - lost
        ratio = rise.exp() / least  # of a probability in R to its value at the start
        self._pull = keep * self._pull + rate * self._weights * ratio

    def finish(self, log_sums: Float[Tensor, "B"]) -> tuple[Float[Tensor, "B"], Float[Tensor, "B"]]:
        """Return bounds on the errors of the query's log-probabilities: for A, and for all classes.

        Args:
            log_sums: log Σ exp of the query's adapted outputs.
        """
        sums = (log_sums - self._log_sums[:, -1]).exp()
        fall, rise, lost, gained = (moved[:, -1] for moved in self._move_rest())
        of_sum = torch.maximum(-torch.log1p(-lost / sums), torch.log1p(gained / sums))
        of_active = of_sum + 2**0.5 * self._lengths[:, -1] * self._distance
        bounds = torch.stack([of_active, of_active + torch.maximum(fall, rise)])
        of_active, of_all = bounds.nan_to_num(nan=torch.inf, posinf=torch.inf)
        return of_active, of_all

    def _move_rest(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return by how much outputs of R fall and rise at most, and by how much their sum does."""
        pull = self._pull[..., None]
        strongest = pull * self._largest[..., None]
        fall, rise = (self._down @ strongest)[..., 0], (self._up @ strongest)[..., 0]
        lost = torch.minimum((self._mass_down @ pull)[..., 0], -self._rest * torch.expm1(-fall))
        most = (self._mass_up @ pull)[..., 0] * rise.exp()
        gained = torch.minimum(most, self._rest * torch.expm1(rise))
        return fall, rise, lost, gained

    def _bound_growth(self, curvature: Float[Tensor, "B K"]) -> Float[Tensor, "B"]:
        """Return the most that a step multiplies an error of the parameters by.

        Args:
            curvature: bounds on the curvature of the loss at each neighbour's outputs.
        """
        rate, keep = self._rule.rate, 1 - self._rule.decay
        roots = (self._weights * curvature.clamp_max(0.5)).sqrt()
        hessian = roots[:, :, None] * self._gram * roots[:, None]
        trace = hessian.diagonal(dim1=1, dim2=2).sum(1)
        largest = torch.minimum(trace, torch.linalg.matrix_norm(hessian))
        return (rate * largest - keep).clamp_min(keep)
