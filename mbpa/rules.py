"""Rules: how an adaptation changes the parameters, θ → θˣ, given gradients of the weighted loss.

A `Rule` takes steps. It is written for ONE query; the library batches it. `MAP` takes none: it
states an optimum, which the library solves for. `Adapted` accepts either.

Symbols are those of the paper: α is `lr`, and β is `decay`, which pulls θˣ back to θ. The pull is
applied separately from the gradient step:

    θˣ ← θˣ − α · direction(∇) − β (θˣ − θ)        `steps` times, from θˣ = θ

The pull is zero at θˣ = θ, so `decay` has no effect when `steps` is 1.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor

from mbpa.memory import validation

Params = Mapping[str, Tensor]
AUTO: Final = "auto"


class Rule(abc.ABC):
    """The base class of rules that take `steps` steps. Implement `update`.

    Example:
        >>> import mbpa
        >>> class SignDescent(mbpa.Rule):
        ...     steps = 3
        ...     def update(self, params, grads, start, state):
        ...         return {name: p - 0.1 * grads[name].sign() for name, p in params.items()}, None
    """

    steps: int

    @abc.abstractmethod
    def update(
        self, params: Params, grads: Params, start: Params, state: Any
    ) -> tuple[Params, Any]:
        """Take one step for one query.

        This function is pure: it returns new tensors and draws no random numbers. It must not
        branch on the values of tensors, since many queries run through it at once.

        Args:
            params: the parameters adapted so far, by name.
            grads: gradient of the weighted loss at `params`, by name.
            start: the parameters before adaptation, by name.
            state: the state that the previous step returned; `None` in the first step.

        Returns:
            The new parameters and the state for the next step.
        """


@dataclass(frozen=True)
class Gradient(Rule):
    """Gradient steps: `v ← μv + ∇`, `θˣ ← θˣ − αv − β(θˣ − θ)`. The paper's rule has μ = 0.

    Args:
        lr: α. "auto" chooses one for each query, based on how strongly its neighbours pull at the
            parameters (docs/tuning.md). It works with cross-entropy or squared error, and with any
            head.
        steps: number of steps.
        decay: β, the pull back to θ per step; no effect in a single step.
        momentum: μ.
    """

    lr: float | Literal["auto"] = AUTO
    steps: int = 1
    decay: float = 0.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if self.lr == AUTO and type(self) is Gradient:  # a subclass may use gradients differently
            _check_rates(self, "decay", "momentum")
        else:
            _check_rates(self, "lr", "decay", "momentum")

    @property
    def rate(self) -> float:
        """The value of `lr` if it is a number; raises `NotImplementedError` for "auto"."""
        if isinstance(self.lr, str):
            raise NotImplementedError(
                f"lr={self.lr!r} needs a query's neighbours, which only Adapted knows; to use this "
                "rule elsewhere, give lr a number"
            )
        return self.lr

    def update(
        self, params: Params, grads: Params, start: Params, state: Any
    ) -> tuple[Params, Any]:
        velocity = grads
        if self.momentum and state is not None:
            velocity = {name: self.momentum * state[name] + grads[name] for name in grads}
        return _move(params, velocity, start, self.rate, self.decay), velocity


@dataclass(frozen=True)
class RMSprop(Rule):
    """RMSprop as in `torch.optim`, with a decoupled pull back to θ.

    Args:
        lr: α.
        steps: number of steps.
        decay: β, the pull back to θ per step; no effect in a single step.
        smoothing: decay rate of the second moment (`alpha` in torch).
        epsilon: added to the root of the second moment.
        initial_square: initial value of the second moment: 0 as in torch, or 1 as in TensorFlow 1,
            which makes the first steps smaller by orders of magnitude.
    """

    lr: float
    steps: int = 1
    decay: float = 0.0
    smoothing: float = 0.99
    epsilon: float = 1e-8
    initial_square: float = 0.0

    def __post_init__(self) -> None:
        _check_rates(self, "lr", "decay", "smoothing", "epsilon", "initial_square")
        if self.smoothing > 1:
            raise ValueError(f"smoothing must be at most 1, got {self.smoothing}")

    def update(
        self, params: Params, grads: Params, start: Params, state: Any
    ) -> tuple[Params, Any]:
        if state is None:
            state = {name: torch.full_like(g, self.initial_square) for name, g in grads.items()}
        squares = {
            name: self.smoothing * state[name] + (1 - self.smoothing) * g.square()
            for name, g in grads.items()
        }
        scaled = {name: g / (squares[name].sqrt() + self.epsilon) for name, g in grads.items()}
        return _move(params, scaled, start, self.lr, self.decay), squares


@dataclass(frozen=True)
class Adam(Rule):
    """Adam as in `torch.optim`, with a decoupled pull back to θ (not towards zero).

    Args:
        lr: α.
        steps: number of steps.
        decay: β, the pull back to θ per step; no effect in a single step.
        beta1: decay rate of the first moment, below 1.
        beta2: decay rate of the second moment, below 1.
        epsilon: added to the root of the second moment.
    """

    lr: float
    steps: int = 1
    decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        _check_rates(self, "lr", "decay", "beta1", "beta2", "epsilon")
        if not (self.beta1 < 1 and self.beta2 < 1):
            raise ValueError(f"beta1 and beta2 must be below 1, got {self.beta1}, {self.beta2}")

    def update(
        self, params: Params, grads: Params, start: Params, state: Any
    ) -> tuple[Params, Any]:
        if state is None:
            zeros = {name: torch.zeros_like(g) for name, g in grads.items()}
            state = 0, zeros, zeros
        step, means, squares = state[0] + 1, state[1], state[2]
        means = {n: self.beta1 * means[n] + (1 - self.beta1) * g for n, g in grads.items()}
        squares = {
            n: self.beta2 * squares[n] + (1 - self.beta2) * g.square() for n, g in grads.items()
        }
        rescale = (1 - self.beta2**step) ** 0.5
        scaled = {
            name: (mean / (1 - self.beta1**step)) / (squares[name].sqrt() / rescale + self.epsilon)
            for name, mean in means.items()
        }
        return _move(params, scaled, start, self.lr, self.decay), (step, means, squares)


@dataclass(frozen=True)
class MAP:
    """The exact optimum, which `Gradient` steps with `decay = lr · prior` converge to:

        θˣ = argmin Σ_k w_k loss(head(h_k), v_k) + prior/2 ‖θˣ − θ‖²

    This is the paper's equation 3, and the prior is the only hyper-parameter: there is no step size
    and no number of steps. The head must be a single linear layer and the loss cross-entropy or
    squared error, for which the optimum is unique.

    It is used in place of a `Rule`, but takes no steps: the library solves for the optimum, using
    products of the neighbours.

    Args:
        prior: cost of moving the parameters, above 0. Without it, neighbours that can be told
            apart have no optimum. A large prior leaves the head nearly unchanged.
        tolerance: largest Euclidean distance between the outputs at a query and those of the
            optimum (log-probabilities are within √2 times that), unless rounding errors are larger.
            Squared error is solved directly.
        most_steps: maximum number of conjugate-gradient steps; if they do not reach `tolerance`, a
            warning says so.
    """

    prior: float
    tolerance: float = 1e-4
    most_steps: int = 1000

    def __post_init__(self) -> None:
        object.__setattr__(self, "most_steps", validation.count("most_steps", self.most_steps))
        for name in ("prior", "tolerance"):
            must = "be a finite number above 0"
            number = validation.parse_number(name, getattr(self, name), must)
            if number <= 0:
                raise ValueError(f"{name} must {must}, got {number!r}")
            object.__setattr__(self, name, number)


def require_rule(rule: Rule) -> None:
    """Raise `ValueError` unless `rule` is a `Rule` with at least one step."""
    if not isinstance(rule, Rule):
        raise ValueError(f"rule must be a mbpa.Rule, got {rule!r}")
    steps = getattr(rule, "steps", None)
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be an integer of at least 1, got {steps}")


def _move(params: Params, direction: Params, start: Params, lr: float, decay: float) -> Params:
    moved = {name: p - lr * direction[name] for name, p in params.items()}
    if decay:
        moved = {name: p - decay * (params[name] - start[name]) for name, p in moved.items()}
    return moved


def _check_rates(rule: Rule, *names: str) -> None:
    object.__setattr__(rule, "steps", validation.count("steps", rule.steps))
    for name in names:
        given = getattr(rule, name)
        hint = ' (or "auto", for Gradient itself)' if isinstance(given, str) else ""
        must = f"be a finite number, not negative{hint}"
        rate = validation.parse_number(name, given, must)
        if rate < 0:
            raise ValueError(f"{name} must {must}, got {given!r}")
        object.__setattr__(rule, name, rate)
