"""The search for settings of dynamic evaluation, on the beginning of the validation text.

The best few are compared once more on a longer beginning: a rate that helps at first may lead the
network astray in the long run. (On Penn Treebank Adam's did, chosen on 10,000 tokens.)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn import functional

from mbpa.experiments.language.config import Dynamic, LanguageConfig
from mbpa.experiments.language.dynamic import (
    AdamUpdate,
    DynamicEvaluation,
    Params,
    RMSUpdate,
    Update,
)
from mbpa.experiments.language.evaluation import ADAM, DYNAMIC
from mbpa.experiments.language.ledger import Ledger
from mbpa.experiments.language.network import LanguageModel
from mbpa.experiments.language.passage import Passage, perplexity

RATES = {2e-3: (2.5e-4, 5e-4, 1e-3), 2e-4: (2e-5, 6e-5, 2e-4), 2e-5: (1e-5, 3e-5, 1e-4)}
"""By the ε that they go together with."""
DECAYS = (0.0, 0.002, 0.006, 0.1)
ADAM_RATES = (1e-5, 3e-5, 1e-4, 3e-4)
FINALISTS, LONGER = 3, 4
"""How many are compared on how many times as much text."""


@dataclass(frozen=True, eq=False)
class DynamicTrials:
    """Settings of dynamic evaluation, each judged by a text of its own pass."""

    config: LanguageConfig
    model: LanguageModel
    passage: Passage
    first: int
    scale: list[Tensor]
    moments: dict[str, Any] | None
    ledger: Ledger

    def choose(self) -> None:
        """The rule of Krause et al. and Adam; what cannot be afforded is not chosen, and stays as
        it is."""
        settings, fields = self.config.dynamic, ("lr", "epsilon", "decay")
        options = [replace(settings, epsilon=e, lr=lr) for e in RATES for lr in RATES[e]]
        found = self._tried(DYNAMIC, options, fields)
        if found:
            best = _best(found)
            rates = beyond(best.lr, RATES[best.epsilon])
            found |= self._tried(DYNAMIC, [replace(best, lr=lr) for lr in rates], fields)
            pulled = [replace(_best(found), decay=decay) for decay in DECAYS]
            found |= self._tried(DYNAMIC, pulled, fields)
            best = self._best_in_the_long_run(DYNAMIC, found, fields)
            for name in fields:
                self.ledger.chose(f"dynamic.{name}", getattr(best, name))
        if settings.adam_lr:
            self._choose_adam()

    def _choose_adam(self) -> None:
        def options(rates: Sequence[float]) -> list[Dynamic]:
            return [replace(self.config.dynamic, adam_lr=rate) for rate in rates]

        found = self._tried(ADAM, options(ADAM_RATES), ("adam_lr",))
        if found:
            rates = beyond(_best(found).adam_lr, ADAM_RATES)
            found |= self._tried(ADAM, options(rates), ("adam_lr",))
            best = self._best_in_the_long_run(ADAM, found, ("adam_lr",))
            self.ledger.chose("dynamic.adam_lr", best.adam_lr)

    def _best_in_the_long_run(
        self, method: str, found: dict[Dynamic, float], fields: tuple[str, ...]
    ) -> Dynamic:
        """Of the best few, by more of the text, as far as it can be afforded for all of them."""
        if len(self.passage) <= self.config.search.dynamic_tokens:
            return _best(found)
        finalists = sorted(found, key=lambda settings: found[settings])[:FINALISTS]
        longer = self._tried(method, finalists, fields, again=True)
        return _best(longer if len(longer) == len(finalists) else found)

    def _tried(
        self,
        method: str,
        options: Sequence[Dynamic],
        fields: tuple[str, ...],
        again: bool = False,
    ) -> dict[Dynamic, float]:
        """The perplexities of those that can be afforded.

        Args:
            again: by more of the text.
        """
        found: dict[Dynamic, float] = {}
        wanted = self.config.search.dynamic_tokens * (LONGER if again else 1)
        tokens = self.passage.targets[:wanted]
        weights = sum(p.numel() for p in self.model.parameters())
        for settings in options:
            cost = len(tokens) / settings.segment * (3e-4 + 3e-11 * weights)
            if self.ledger.affords(None if again else (method, settings), cost):
                compute = functools.partial(self._judge, method, tokens, settings)
                (value,) = self.ledger.known((method, settings, len(tokens)), compute)
                found[settings] = value
                told = {name: getattr(settings, name) for name in fields}
                self.ledger.tried(method, {**told, "tokens": len(tokens)}, value)
        return found

    def _judge(self, method: str, tokens: Tensor, settings: Dynamic) -> tuple[float]:
        training = self.config.training

        def make(params: Params) -> Update:
            if method == DYNAMIC:
                return RMSUpdate(params, self.scale, settings)
            betas = training.beta1, training.beta2
            return AdamUpdate(params, settings.adam_lr, self.moments, *betas)

        inputs = functional.pad(tokens[:-1], (1, 0), value=self.first)
        network = DynamicEvaluation(self.model, make, settings)
        value = perplexity(network.read(inputs, tokens).own)
        return (math.inf if math.isnan(value) else value,)


def beyond(rate: float, grid: Sequence[float]) -> list[float]:
    """One rate more, where this one is at an edge of a rising grid: by the factor of that edge."""
    if len(grid) < 2 or rate not in (grid[0], grid[-1]):
        return []
    neighbor = grid[1] if rate == grid[0] else grid[-2]
    return [float(f"{rate * rate / neighbor:.3g}")]


def _best(found: dict[Dynamic, float]) -> Dynamic:
    return min(found, key=lambda settings: found[settings])
