"""Linear head, `MAP`: the exact optimum of the paper's equation 3, in the span of the neighbours.

Let G = R Rᵀ be the Gram matrix of the adapting inputs, λ the prior, and X (K × C) the change of the
parameters in an orthonormal basis of that span. The neighbours' outputs are L = L⁰ + R X, and

    F = Σ_k w_k loss(L_k, v_k) + λ/2 ‖X‖²,        ∇F = Rᵀ (w ⊙ residual(L)) + λ X.

Squared error gives a linear system. Cross-entropy takes conjugate gradients: Newton's equations are
solved in the plane of the gradient and the last move. Each move is as long as is guaranteed to
lower F, so there is neither a step size nor a line search.
"""

from __future__ import annotations

import warnings

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mbpa.adaptation.losses import SQUARED_ERROR, Loss
from mbpa.adaptation.output_cache import StoredOutputs
from mbpa.adaptation.problem import LinearHead, Problem, why_not_linear
from mbpa.adaptation.span import compute_adapting_products
from mbpa.device import takes_kernels
from mbpa.replay import refuse_recording
from mbpa.rules import MAP

BUFFERS = 9  # tensors of K × C numbers while cross-entropy is minimised
STEPS_PER_RESTART = 16  # a restart also recomputes the outputs from the coordinates
STEPS_PER_CHECK = 4  # for convergence on a GPU, where a check waits for the device
JITTER = 1e-14  # times K and the largest squared key: neighbours may be linearly dependent


def require_convex(head: nn.Module, loss: str | Loss, key_shape: tuple[int, ...]) -> None:
    """Raise `ValueError` unless `MAP` has a unique optimum that this module can compute."""
    if reason := why_not_linear(head, loss, key_shape):
        raise ValueError(
            "MAP needs a head that is one torch.nn.Linear, flat keys and a built-in loss, but "
            f"{reason}: use Gradient with decay, which takes any"
        )


def solve_optimum(
    problem: Problem, stored: StoredOutputs | None, want_change: bool
) -> tuple[Float[Tensor, "B C"], Float[Tensor, "B"] | None]:
    """Return the outputs at the optimum, and the norm of the change if `want_change`.

    `stored` holds raw outputs.
    """
    refuse_recording()  # it stops when all queries have converged
    head, rule = problem.linear, problem.rule
    assert head is not None  # the plan guarantees it
    assert isinstance(rule, MAP)
    rows = None if stored is None else stored.gather(problem.at_queries)[:, :-1]
    outputs = head(problem.keys) if rows is None else rows
    if problem.loss == SQUARED_ERROR:
        return _solve_ridge(problem, head, rule, outputs, want_change)
    basis, reach = _find_basis(problem, head)
    descent = _FusedDescent if _takes_kernel(outputs) else _Descent
    coordinates = descent(problem, rule, outputs, basis, reach.square().sum(1)).run()
    moved = torch.bmm(reach[:, None], coordinates)[:, 0]
    change = torch.linalg.vector_norm(coordinates, dim=(1, 2)) if want_change else None
    return problem.at_queries + moved, change


def _solve_ridge(
    problem: Problem,
    head: LinearHead,
    rule: MAP,
    outputs: Float[Tensor, "B K C"],
    want_change: bool,
) -> tuple[Float[Tensor, "B C"], Float[Tensor, "B"] | None]:
    """Solve for squared error: ΔW = Σ_k a_k h_kᵀ with `A = √w (√w G √w + λ)⁻¹ √w (V − L⁰)`.

    This form allows weights of zero. It is computed in float64, since with a small prior the matrix
    need not be positive definite in float32.
    """
    (gram, reach), roots = (
        _compute_products(problem, head),
        problem.weights.double().sqrt()[..., None],
    )
    system = gram * roots
    system.mul_(roots.mT).diagonal(dim1=1, dim2=2).add_(rule.prior)
    factor, failed = torch.linalg.cholesky_ex(system)
    if failed.any():
        raise ValueError(
            f"prior must be larger for keys of this length, got {rule.prior:g}, lost in rounding"
        )
    del system
    missing = (problem.values - outputs).double().mul_(roots)
    coefficients = torch.cholesky_solve(missing, factor).mul_(roots)
    moved = torch.bmm(reach[:, None], coefficients)[:, 0].to(problem.dtype)
    if not want_change:
        return problem.at_queries + moved, None
    squares = torch.bmm(gram, coefficients, out=missing).mul_(coefficients).sum((1, 2))
    return problem.at_queries + moved, squares.clamp_min(0).sqrt().to(problem.dtype)


def _compute_products(
    problem: Problem, head: LinearHead
) -> tuple[Float[Tensor, "B K K"], Float[Tensor, "B K"]]:
    """Return inner products of the neighbours with each other and with the query, in float64."""
    keys, queries = problem.keys.double(), problem.queries.double()
    to_queries = torch.bmm(keys, queries[..., None])[..., 0]
    return compute_adapting_products(head, keys @ keys.mT), compute_adapting_products(
        head, to_queries
    )


def _find_basis(
    problem: Problem, head: LinearHead
) -> tuple[Float[Tensor, "B K K"], Float[Tensor, "B K"]]:
    """Return neighbours and queries in an orthonormal basis of the neighbours' span."""
    gram, to_queries = _compute_products(problem, head)
    diagonal = gram.diagonal(dim1=1, dim2=2)
    diagonal += JITTER * gram.shape[1] * diagonal.amax(1, keepdim=True).clamp_min(1e-12)
    basis, _ = torch.linalg.cholesky_ex(gram)  # does not synchronise with a GPU
    reach = torch.linalg.solve_triangular(basis, to_queries[..., None], upper=False)[..., 0]
    return basis.to(problem.dtype), reach.to(problem.dtype)


class _Descent:
    """The state of the descent to the optimum of cross-entropy for B queries, updated in place."""

    def __init__(
        self,
        problem: Problem,
        rule: MAP,
        start: Float[Tensor, "B K C"],
        basis: Float[Tensor, "B K K"],
        reach: Float[Tensor, "B"],
    ) -> None:
        self.rule, self.start, self.basis = rule, start, basis
        self.weights, self.labels = problem.weights[..., None], problem.values[..., None]
        self.outputs = start.clone(memory_format=torch.contiguous_format)
        self.slopes, self.sloping, self.shares, self.scratch = (
            torch.empty_like(self.outputs) for _ in range(4)
        )
        # Coordinates of the parameters, the last move, and how that changed the outputs.
        self.place, self.move, self.moved = (torch.zeros_like(self.outputs) for _ in range(3))
        # The curvature of F is at least λ, so ‖∇F‖/λ bounds the distance to the optimum; `reach`
        # converts that to the outputs at the query.
        self.enough = (rule.tolerance * rule.prior) ** 2 / reach.clamp_min(_tiny(reach))
        self.left = torch.ones_like(self.enough, dtype=torch.bool)

    def run(self) -> Float[Tensor, "B K C"]:
        """Return the coordinates when every query has converged, or after the last allowed step."""
        every = STEPS_PER_CHECK if self.outputs.device.type == "cuda" else 1
        left, before = self.left, self.enough + torch.inf
        for step in range(self.rule.most_steps + 1):
            noise = self._renew() if step and step % STEPS_PER_RESTART == 0 else None
            steepness = self._find_slopes()
            left &= steepness > self.enough
            if noise is not None:  # stop below the noise once progress stalls
                left &= (steepness > noise) | (4 * steepness < before)
                before = steepness
            if step % every == 0 and not left.any():
                return self.place
            if step < self.rule.most_steps:
                self._step(steepness)
        if count := int(left.sum()):
            warnings.warn(
                f"after {self.rule.most_steps} steps {count} of {len(left)} queries are not "
                f"certain to be within {self.rule.tolerance:g} of the optimum; raise most_steps, "
                "tolerance or prior",
                stacklevel=2,
            )
        return self.place

    def _find_slopes(self) -> Float[Tensor, "B"]:
        """Compute ∇F and its effect on the outputs, and return ‖∇F‖²."""
        torch.softmax(self.outputs, -1, out=self.shares)
        residual = torch.mul(self.shares, self.weights, out=self.scratch)
        # 1 − p of the label is computed as the sum of the others, which is exact even if tiny.
        residual.scatter_(-1, self.labels, 0)
        residual.scatter_(-1, self.labels, -residual.sum(-1, keepdim=True))
        torch.baddbmm(self.place, self.basis.mT, residual, beta=self.rule.prior, out=self.slopes)
        torch.bmm(self.basis, self.slopes, out=self.sloping)
        return self._dot(self.slopes, self.slopes)

    def _step(self, steepness: Float[Tensor, "B"]) -> None:
        """Move the queries that have not converged."""
        by_slope, by_move = self._solve_plane(steepness)
        self.move.mul_(by_move).addcmul_(self.slopes, by_slope)
        self.moved.mul_(by_move).addcmul_(self.sloping, by_slope)
        # Along the move F'' grows at most by e^(R t), where R is the largest change of the
        # difference between two outputs of a neighbour. So F' is negative up to this t.
        spread = (self.moved.amax(-1) - self.moved.amin(-1)) * (self.weights[..., 0] > 0)
        self._advance(spread)

    def _advance(self, spread: Float[Tensor, "B K"]) -> None:
        """Take as much of the move as is certain to lower F."""
        most = spread.amax(1).clamp_min(_tiny(spread))
        length = (self.left * most.log1p() / most)[:, None, None]
        self.place.addcmul_(self.move, length)
        self.outputs.addcmul_(self.moved, length)

    def _solve_plane(
        self, steepness: Float[Tensor, "B"]
    ) -> tuple[Float[Tensor, "B 1 1"], Float[Tensor, "B 1 1"]]:
        """Solve Newton's equations in the plane of ∇F and the last move; return the two factors."""
        prior, tiny = self.rule.prior, _tiny(steepness)
        rise, size = self._dot(self.slopes, self.move), self._dot(self.move, self.move)
        bent = self._bend(self.moved)
        last = bent.mul_(self.moved).sum((1, 2)) + prior * size
        bent = self._bend(self.sloping)
        torch.mul(bent, self.sloping, out=self.shares)  # its values are no longer needed
        here = self.shares.sum((1, 2)) + prior * steepness
        both = bent.mul_(self.moved).sum((1, 2)) + prior * rise
        here, last = here.clamp_min(tiny), last.clamp_min(tiny)
        # Use ratios throughout: products of such small numbers underflow in float32.
        down, along = steepness / here, rise / last
        spare = 1 - (both / here) * (both / last)
        is_plane = spare > 16 * torch.finfo(spare.dtype).eps  # else the two are parallel
        spare = torch.where(is_plane, spare, 1)
        by_slope = torch.where(is_plane, (both / here) * along - down, -down) / spare
        by_move = torch.where(is_plane, (both / last) * down - along, 0) / spare
        return by_slope[:, None, None], by_move[:, None, None]

    def _bend(self, moved: Float[Tensor, "B K C"]) -> Float[Tensor, "B K C"]:
        """Return the change of the weighted residuals if the outputs move so, in `scratch`."""
        derivative = torch.ops.aten._softmax_backward_data.out  # p ⊙ (moved − p·moved), in one pass
        derivative(moved, self.shares, -1, moved.dtype, grad_input=self.scratch)
        return self.scratch.mul_(self.weights)

    def _renew(self) -> Float[Tensor, "B"]:
        """Restart the descent, remove accumulated rounding errors from the outputs, and return the
        squared norm of their effect on ∇F.

        Moves are conjugate as long as F is quadratic. It is not near the first moves, and the
        descent converges as fast as it can only once they are forgotten.
        """
        self.move.zero_()
        self.moved.zero_()
        torch.baddbmm(self.start, self.basis, self.place, out=self.sloping)
        torch.softmax(self.sloping, -1, out=self.shares)
        bent = self._bend(self.outputs.sub_(self.sloping))
        self.outputs, self.sloping = self.sloping, self.outputs
        torch.bmm(self.basis.mT, bent, out=self.slopes)
        return self._dot(self.slopes, self.slopes)

    def _dot(self, some: Float[Tensor, "B K C"], others: Float[Tensor, "B K C"]) -> Tensor:
        return torch.mul(some, others, out=self.scratch).sum((1, 2))


class _FusedDescent(_Descent):
    """The same on a GPU, with three passes per step; the move is taken in the pass after it."""

    def __init__(
        self,
        problem: Problem,
        rule: MAP,
        start: Float[Tensor, "B K C"],
        basis: Float[Tensor, "B K K"],
        reach: Float[Tensor, "B"],
    ) -> None:
        super().__init__(problem, rule, start, basis, reach)
        self.row_weights = problem.weights.contiguous()
        self.row_labels = problem.values.contiguous()
        self.spreads = torch.zeros_like(self.row_weights)
        self.log_sums = torch.empty_like(self.row_weights)
        self.figures = self.row_weights.new_empty(6, *self.row_weights.shape)

    def _find_slopes(self) -> Float[Tensor, "B"]:
        from mbpa.adaptation.fused.descent import find_residual, measure_curvature

        find_residual(
            self.outputs, self.place, self.moved, self.move, self.scratch,
            self.row_weights, self.row_labels, self.spreads, self.left, self.log_sums,
        )  # fmt: skip
        prior = self.rule.prior
        torch.baddbmm(self.place, self.basis.mT, self.scratch, beta=prior, out=self.slopes)
        torch.bmm(self.basis, self.slopes, out=self.sloping)
        measure_curvature(
            self.outputs, self.log_sums, self.slopes, self.move, self.sloping, self.moved,
            self.row_weights, self.figures,
        )  # fmt: skip
        return self.figures[0].sum(-1)

    def _step(self, steepness: Float[Tensor, "B"]) -> None:
        from mbpa.adaptation.fused.descent import choose_move

        choose_move(
            self.slopes, self.move, self.sloping, self.moved,
            self.row_weights, self.figures, self.spreads, self.rule.prior,
        )  # fmt: skip

    def _renew(self) -> Float[Tensor, "B"]:
        self._advance(self.spreads)
        self.spreads.zero_()
        return super()._renew()


def _takes_kernel(outputs: Float[Tensor, "B K C"]) -> bool:
    if not takes_kernels(outputs):
        return False
    from mbpa.adaptation.fused.descent import MAX_CLASSES

    return outputs.shape[2] <= MAX_CLASSES


def _tiny(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).tiny
