"""Settings that a search has tried, and the variations of the best of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar

from experiments.language.config import RecentAdaptation, SoftmaxAdaptation
from experiments.search import Search

Setting = TypeVar("Setting")


class Trial(NamedTuple):
    """A memory size and a way to adapt."""

    window: int
    local: SoftmaxAdaptation

    def change(self, **changes: Any) -> Trial:
        """Return the trial with other settings of the adaptation."""
        return self._replace(local=replace(self.local, **changes))

    @property
    def reach(self) -> RecentAdaptation:
        return RecentAdaptation(self.window, self.local)

    def describe(self) -> str:
        """Describe the settings in words, for a record."""
        local = self.local
        how = f"{local.rule}, {local.steps} steps at rate {local.lr:g}"
        if local.decay:
            how += f" with a pull back of {local.decay:g}"
        if local.rule == "map":
            how = f"map with a prior of {local.prior:g}"
        return f"{local.k} of {self.window} tokens; {how}; {local.kernel} {local.kernel_scale:g}"


@dataclass(frozen=True, eq=False)
class Trials(Generic[Setting]):
    """Settings of one method that were tried, and the perplexities of its mixtures."""

    search: Search
    name: str
    judge: Callable[[Setting], Sequence[float]]
    is_allowed: Callable[[Setting], bool] = lambda setting: True
    tried: dict[Setting, Sequence[float]] = field(default_factory=dict)

    def try_new(self, stage: str, settings: Iterable[Setting]) -> None:
        """Try settings that are allowed and were not tried yet."""
        allowed = filter(self.is_allowed, dict.fromkeys(settings))
        new = [setting for setting in allowed if setting not in self.tried]
        self.tried.update(self.search.try_settings(f"{self.name}: {stage}", new, self.judge))

    def vary(self, stage: str, list_options: Callable[[Setting], Iterable[Setting]]) -> None:
        """Try variations of the best setting of each mixture."""
        self.try_new(stage, itertools.chain(*map(list_options, self._find_bests())))

    def find_best(self, mixture: int = 0, among: Iterable[Setting] | None = None) -> Setting:
        """Return the setting with the lowest perplexity; the first of equals."""
        return self.list_best(1, mixture, among)[0]

    def list_best(
        self, count: int, mixture: int = 0, among: Iterable[Setting] | None = None
    ) -> list[Setting]:
        """Return the settings with the lowest perplexities, the best first."""
        options = self.tried if among is None else among
        return sorted(options, key=lambda setting: self.tried[setting][mixture])[:count]

    def climb(
        self,
        rounds: int,
        stages: Mapping[str, Callable[[Setting], Iterable[Setting]]],
    ) -> None:
        """Try all variations of the best settings, round after round, until no round finds better
        ones or all rounds are over.
        """
        for _ in range(rounds):
            before = dict.fromkeys(self._find_bests())
            for stage, list_options in stages.items():
                self.vary(stage, list_options)
            if dict.fromkeys(self._find_bests()) == before:
                break

    def _find_bests(self) -> list[Setting]:
        mixtures = range(min(map(len, self.tried.values()), default=0))
        return [self.find_best(mixture) for mixture in mixtures]
