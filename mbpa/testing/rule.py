"""The conformance suite of rules: a rule is pure, and batching it equals a loop over queries."""

from __future__ import annotations

import warnings
from itertools import pairwise

import torch
from torch import Tensor, nn

from mbpa.kernels import InverseDistance, neighbor_weights
from mbpa.memory import ExactMemory
from mbpa.model import MbPA
from mbpa.predictors import Adapted
from mbpa.rules import Params, Rule, require_rule
from mbpa.testing.claims import require, require_same

KERNEL = InverseDistance()  # of both the batched adaptation and the loop


def check_rule(rule: Rule) -> None:
    """Check that a rule, written for one query, gives the same results when batched.

    The results of `MbPA` are compared with an autograd loop over single queries, on a linear and a
    two-layer head, with cross-entropy and squared error, in float64 (to 1e-9) and in float32.

    Args:
        rule: the rule to check.

    Raises:
        AssertionError: a part of the contract is broken; the message names it.

    Example:
        >>> import mbpa
        >>> mbpa.testing.check_rule(mbpa.Gradient(lr=0.1, steps=5, decay=0.1))
    """
    require_rule(rule)
    for dtype in (torch.float64, torch.float32):
        _check_purity(rule, dtype)
        _check_zero_gradients(rule, dtype)
    for layers in (1, 2):
        for has_labels in (True, False):
            task = _Task(layers, has_labels, torch.float64)
            rounded = _Task(layers, has_labels, torch.float32)
            exact, inexact = task.run_loop(rule), rounded.run_loop(rule)
            require(bool(exact.isfinite().all()), "prediction of the loop", "finite", exact)
            # A rule that magnifies rounding (1e-7 in float32, 1e-16 in float64) may do so when
            # batched, too. By how much is chance, so the effect of changing the last digits of the
            # problem is measured as well.
            nudged = [_Task(layers, has_labels, torch.float64, nudge) for nudge in range(1, 9)]
            others = [inexact, *(each.run_loop(rule) for each in nudged)]
            drift = max(_measure_difference(each, exact) for each in others)
            _check_against_loop(rule, task, exact, tolerance=max(1e-9, 1e-7 * drift))
            _check_against_loop(rule, rounded, inexact, tolerance=max(1e-4, 3 * drift))


class _Task:
    """A small problem: a head of one or two layers, 20 entries, 5 queries of 6 neighbours each.

    Args:
        layers: number of layers of the head, 1 or 2.
        has_labels: whether values are labels, not regression targets.
        dtype: dtype of all numbers.
        nudge: if not 0, a seed for changing all numbers by at most the last digit of a float32.
    """

    neighbors = 6

    def __init__(self, layers: int, has_labels: bool, dtype: torch.dtype, nudge: int = 0) -> None:
        generator = torch.Generator().manual_seed(layers)
        nudges = torch.Generator().manual_seed(nudge)

        def draw(*shape: int) -> Tensor:
            # Draw in float64, so that the problem is the same in either dtype.
            exact = torch.randn(shape, generator=generator, dtype=torch.float64)
            by = 2 * torch.rand(shape, generator=nudges, dtype=torch.float64) - 1
            return (exact * (1 + 2**-23 * by) if nudge else exact).to(dtype)

        self.has_labels = has_labels
        modules = []
        for before, after in pairwise((4, 3) if layers == 1 else (4, 5, 3)):
            linear = nn.utils.skip_init(nn.Linear, before, after, dtype=dtype)
            linear.load_state_dict({"weight": draw(after, before), "bias": draw(after)})
            modules += [linear, nn.Tanh()]
        self.head = modules[0] if layers == 1 else nn.Sequential(*modules[:-1])
        labels = torch.randint(0, 3, (20,), generator=generator)
        values = labels if has_labels else draw(20, 3)
        self.memory = ExactMemory(
            20, 4, value_shape=values.shape[1:], value_dtype=values.dtype, dtype=dtype
        )
        self.memory.write(draw(20, 4), values)
        self.queries = draw(5, 4)

    def make_model(self, rule: Rule) -> MbPA:
        predictor = Adapted(rule, k=self.neighbors, kernel=KERNEL)
        return MbPA(head=self.head, memory=self.memory, predictor=predictor)

    def run_loop(self, rule: Rule) -> Tensor:
        """Return the predictions of the rule, computed one query after the other."""
        found = self.memory.read(self.queries, self.neighbors)
        weights = neighbor_weights(KERNEL, found)
        rows = zip(self.queries, found.keys, found.values, weights, strict=True)
        outputs = torch.stack([self._adapt(rule, *row) for row in rows])
        return outputs.log_softmax(1) if self.has_labels else outputs

    def _adapt(
        self, rule: Rule, query: Tensor, keys: Tensor, values: Tensor, weights: Tensor
    ) -> Tensor:
        start = {name: p.detach().clone() for name, p in self.head.named_parameters()}
        params: Params = start
        state = None
        for _ in range(rule.steps):
            leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
            outputs = torch.func.functional_call(self.head, leaves, (keys,))
            if self.has_labels:
                losses = nn.functional.cross_entropy(outputs, values, reduction="none")
            else:
                losses = (outputs - values).square().sum(1) / 2
            slopes = torch.autograd.grad(weights @ losses, list(leaves.values()))
            grads = dict(zip(leaves, slopes, strict=True))
            params, state = rule.update(_copy_params(leaves), grads, start, state)
        adapted: Tensor = torch.func.functional_call(self.head, dict(params), (query[None],))
        return adapted[0].detach()


def _check_against_loop(rule: Rule, task: _Task, expected: Tensor, tolerance: float) -> None:
    model, queries = task.make_model(rule), task.queries
    before = _format_params(task.head.state_dict())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a warning means that it ran query by query
            batched, again = model(queries), model(queries)
            alone, flipped = model(queries[:1]), model(queries.flip(0)).flip(0)
    except (RuntimeError, UserWarning) as error:
        raise AssertionError(
            "batching: expected a rule that runs for many queries at once, without branching on "
            f"the values of tensors or drawing random numbers, got {type(error).__name__}: {error}"
        ) from error
    require_same(
        "the head's parameters after adaptation", before, _format_params(task.head.state_dict())
    )
    require_same("dtype of the prediction", expected.dtype, batched.dtype)
    # As text, in which NaN equals NaN.
    fresh = "the same call again, state being fresh for every query"
    require_same(fresh, str(batched.tolist()), str(again.tolist()))
    for what, actual in (("5 queries", batched), ("1 query", alone), ("5, last first", flipped)):
        wanted = expected[: len(actual)]
        part = f"prediction in a batch of {what}, against the loop, to {tolerance:.0e}"
        close = _measure_difference(wanted, actual) <= tolerance
        require(close, part, wanted.tolist(), actual.tolist())


def _measure_difference(some: Tensor, others: Tensor) -> float:
    difference = (some - others).abs() / (1 + others.abs())
    # The loop in float32 may overflow where it does not in float64; ignore those numbers.
    return float(torch.where(some.isfinite(), difference, 0).max())


def _check_purity(rule: Rule, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    start: Params = {
        "weight": torch.randn(3, 4, generator=generator, dtype=dtype),
        "bias": torch.randn(3, generator=generator, dtype=dtype),
    }
    params, state = _copy_params(start), None
    for _ in range(min(rule.steps, 3)):
        grads = {
            name: torch.randn(p.shape, generator=generator, dtype=dtype)
            for name, p in params.items()
        }
        given = [_format_params(tensors) for tensors in (params, grads, start)]
        drawn = torch.get_rng_state()
        moved, next_state = rule.update(params, grads, start, state)
        again, _ = rule.update(params, grads, start, state)
        kept = [_format_params(tensors) for tensors in (params, grads, start)]
        for what, old, new in zip(("params", "grads", "start"), given, kept, strict=True):
            require_same(f"update leaves {what} as they are", old, new)
        unchanged = torch.equal(drawn, torch.get_rng_state())
        require(unchanged, "update draws no random numbers", "the same RNG state", "another")
        require_same(
            "update returns every parameter, of the same shape and dtype",
            _get_forms(params),
            _get_forms(moved),
        )
        require_same(
            "update with the same arguments again", _format_params(moved), _format_params(again)
        )
        params, state = dict(moved), next_state


def _check_zero_gradients(rule: Rule, dtype: torch.dtype) -> None:
    start: Params = {"weight": torch.ones(3, 4, dtype=dtype), "bias": torch.zeros(3, dtype=dtype)}
    params, state = start, None
    for _ in range(rule.steps):
        zeros = {name: torch.zeros_like(p) for name, p in params.items()}
        params, state = rule.update(params, zeros, start, state)
    finite = all(bool(p.isfinite().all()) for p in params.values())
    require(finite, "parameters after gradients of zero", "finite ones", _format_params(params))


def _copy_params(params: Params) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in params.items()}


def _format_params(params: Params) -> dict[str, str]:
    # As text, in which NaN equals NaN; `tolist` keeps every bit.
    return {name: str(p.tolist()) for name, p in params.items()}


def _get_forms(params: Params) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(p.shape), p.dtype) for name, p in params.items()}
