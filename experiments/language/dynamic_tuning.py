"""The search for settings of dynamic evaluation, on the beginning of the validation text.

The rates that do best there are compared again on a longer beginning. So are the pulls back to the
trained weights and, with the best of these, rates around the best one: what helps at first may lead
the network astray in the long run. (A rate of Adam chosen on 10,000 tokens did so on Penn
Treebank.)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.nn import functional

from experiments.language.config import Dynamic, LanguageConfig
from experiments.language.dynamic import (
    AdamUpdate,
    DynamicEvaluation,
    Params,
    RMSUpdate,
    Update,
)
from experiments.language.evaluation import ADAM, DYNAMIC, LSTM
from experiments.language.ledger import BEGINNING, Ledger, three_digits
from experiments.language.network import LanguageModel
from experiments.language.passage import Passage, perplexity

RATES = {2e-5: (1e-5, 3e-5, 1e-4), 2e-4: (2e-5, 6e-5, 2e-4), 2e-3: (2.5e-4, 5e-4, 1e-3)}
"""Rates to try, by the ε they are combined with; the first were best on two corpora."""
DECAY, DECAYS = 0.002, (0.0, 0.006, 0.02, 0.1)
"""The pull with which rates are first compared, and the others to try."""
AROUND = (0.5, 2.0)
"""Factors of the rate to try once the pull is chosen, since the two interact."""
ADAM_RATES = (1e-5, 3e-5, 1e-4, 3e-4)
FINALISTS, LONGER = 3, 4
"""How many rates are compared on the longer text, and how many times longer it is."""
FIELDS = {DYNAMIC: ("lr", "epsilon", "decay"), ADAM: ("adam_lr",)}
"""Fields that are chosen, by method."""


@dataclass(frozen=True, eq=False)
class DynamicTrials:
    """Settings of dynamic evaluation, each judged by its own pass over a text."""

    config: LanguageConfig
    model: LanguageModel
    passage: Passage
    first: int
    scale: list[Tensor]
    moments: dict[str, Any] | None
    ledger: Ledger
    _judged: dict[tuple[str, Dynamic, int], float] = field(default_factory=dict)

    def choose(self) -> None:
        """Choose settings for the rule of Krause et al. and for Adam; settings that cannot be
        afforded are not chosen, and the fields keep their values.
        """
        settings = self.config.dynamic
        for tokens in sorted({self._short, self._long} - {len(self.passage)}):
            value = perplexity(self.passage.own[:tokens])
            self.ledger.tried(LSTM, {"tokens": tokens, "part": BEGINNING}, value)
        first = replace(settings, decay=DECAY)
        options = [replace(first, epsilon=e, lr=lr) for e in RATES for lr in RATES[e]]
        found = self._tried(DYNAMIC, options)
        if found:
            best = _best(found)
            rates = beyond(best.lr, RATES[best.epsilon])
            found |= self._tried(DYNAMIC, [replace(best, lr=lr) for lr in rates])
            best = self._settled(DYNAMIC, _leading(found))
            pulled = [replace(best, decay=decay) for decay in DECAYS]
            best = self._settled(DYNAMIC, [best, *pulled])
            around = [replace(best, lr=three_digits(factor * best.lr)) for factor in AROUND]
            self._note(DYNAMIC, self._settled(DYNAMIC, [best, *around]))
        if settings.adam_lr:
            self._choose_adam()

    def _choose_adam(self) -> None:
        def options(rates: Sequence[float]) -> list[Dynamic]:
            return [replace(self.config.dynamic, adam_lr=rate) for rate in rates]

        found = self._tried(ADAM, options(ADAM_RATES))
        if found:
            found |= self._tried(ADAM, options(beyond(_best(found).adam_lr, ADAM_RATES)))
            self._note(ADAM, self._settled(ADAM, _leading(found)))

    def _note(self, method: str, best: Dynamic) -> None:
        for name in FIELDS[method]:
            self.ledger.chose(f"dynamic.{name}", getattr(best, name))

    @property
    def _short(self) -> int:
        return min(len(self.passage), self.config.search.dynamic_tokens)

    @property
    def _long(self) -> int:
        return min(len(self.passage), LONGER * self.config.search.dynamic_tokens)

    def _tried(self, method: str, options: Sequence[Dynamic]) -> dict[Dynamic, float]:
        """Return the perplexities of the affordable settings, on the shorter text."""
        return {
            settings: self._judge(method, settings, self._short)
            for settings in options
            if self.ledger.affords((method, settings), self._cost(settings, self._short))
        }

    def _settled(self, method: str, options: Sequence[Dynamic]) -> Dynamic:
        """Return the best setting on the longer text or, if there is not enough time to read it
        with all of them, on the shorter one. Return the first if there is no time for that either,
        or if the longer text chose it.
        """
        for tokens in (self._long, self._short):
            new = [each for each in options if (method, each, tokens) not in self._judged]
            if self.ledger.affords(None, sum(self._cost(each, tokens) for each in new)):
                return _best({each: self._judge(method, each, tokens) for each in options})
            if (method, options[0], tokens) in self._judged:
                break
        judged = {key[:2] for key in self._judged}
        for each in options:
            if (method, each) not in judged:
                self.ledger.leave_out((method, each))
        return options[0]

    def _cost(self, settings: Dynamic, tokens: int) -> float:
        weights = sum(p.numel() for p in self.model.parameters())
        return tokens / settings.segment * (3e-4 + 3e-11 * weights)

    def _judge(self, method: str, settings: Dynamic, tokens: int) -> float:
        """Return the perplexity of this many tokens, recorded once."""
        key = method, settings, tokens
        if key not in self._judged:
            compute = functools.partial(self._read, *key)
            (self._judged[key],) = self.ledger.known(key, compute)
            told = {name: getattr(settings, name) for name in FIELDS[method]}
            self.ledger.tried(method, {**told, "tokens": tokens}, self._judged[key])
        return self._judged[key]

    def _read(self, method: str, settings: Dynamic, tokens: int) -> tuple[float]:
        training, text = self.config.training, self.passage.targets[:tokens]

        def make(params: Params) -> Update:
            if method == DYNAMIC:
                return RMSUpdate(params, self.scale, settings)
            betas = training.beta1, training.beta2
            return AdamUpdate(params, settings.adam_lr, self.moments, *betas)

        inputs = functional.pad(text[:-1], (1, 0), value=self.first)
        network = DynamicEvaluation(self.model, make, settings)
        return (perplexity(network.read(inputs, text).own),)


def beyond(rate: float, grid: Sequence[float]) -> list[float]:
    """Return one more rate if this one is at an edge of a rising grid, extending it by its last
    ratio.
    """
    if len(grid) < 2 or rate not in (grid[0], grid[-1]):
        return []
    neighbor = grid[1] if rate == grid[0] else grid[-2]
    return [three_digits(rate * rate / neighbor)]


def _best(found: dict[Dynamic, float]) -> Dynamic:
    return min(found, key=lambda settings: found[settings])


def _leading(found: dict[Dynamic, float]) -> list[Dynamic]:
    """Return the few best settings, best first."""
    return sorted(found, key=lambda settings: found[settings])[:FINALISTS]
