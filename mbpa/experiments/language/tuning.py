"""The search for settings, on the validation text alone.

One pass of states, one retrieval a memory size, and for every setting the weights of its mixture
solved for. First the cache; then MbPA: the paper's grid for one step, then more steps and larger
rates, memory sizes, neighbours, kernels, the pull back, each from the best so far. Settings are
judged by tokens spread evenly over the text, each with the memory it would have, and those that do
best by more of them. Last come dynamic evaluation and the rest of the paper's grid.

What a setting costs is estimated beforehand, and what would exceed the allowance is left out, so
that what is tried does not depend on the speed of the day.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from mbpa.errors import ExperimentError
from mbpa.experiments.data import Corpus
from mbpa.experiments.experiment import BySeed, Context
from mbpa.experiments.language.config import Dynamic, LanguageConfig, Local
from mbpa.experiments.language.corpus import read_corpus
from mbpa.experiments.language.dynamic import (
    AdamUpdate,
    DynamicEvaluation,
    Params,
    RMSUpdate,
    Update,
    gradient_scale,
)
from mbpa.experiments.language.evaluation import ADAM, BOTH, CACHE, DYNAMIC, LSTM, MBPA, first_word
from mbpa.experiments.language.ledger import Ledger
from mbpa.experiments.language.network import LanguageModel
from mbpa.experiments.language.passage import (
    Passage,
    Retrieval,
    adapted_scores,
    cache_scores,
    engine_for,
    mixed,
    perplexity,
    read_passage,
    retrieved,
    solved_weights,
)
from mbpa.experiments.language.training import adam_state, trained
from mbpa.experiments.results import Record

# The paper's grid (appendix); weights of mixtures are solved for instead.
PAPER_WINDOWS, PAPER_COUNTS, PAPER_STEPS = (500, 1000, 5000), (256, 512), (1, 5, 10)
PAPER_RATES = (0.01, 0.1, 0.15, 0.2, 0.5, 1.0)
# Beyond it.
WINDOWS = (500, 1000, 2000, 5000, 10_000, 20_000)
SCALES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5)
RATES, STEPS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0), (5, 10, 20, 40)
ONE_STEP_RATES, COUNTS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0), (16, 32, 64, 256, 512)
BANDWIDTHS, FACTORS, DECAYS = (0.5, 0.7, 1.0, 1.5), (0.05, 0.2), (0.01, 0.03, 0.1)
OPTIMUM_COUNTS, PRIORS = (32, 64), (0.01, 0.03, 0.1, 0.3)
DYNAMIC_RATES, DYNAMIC_DECAYS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2e-3), (0.0, 0.002, 0.1)
NARROW_EPSILON = 2e-4, (2e-5, 6e-5, 2e-4)  # and the rates that go with it
ADAM_RATES = (3e-5, 1e-4, 3e-4, 1e-3)
OPTIMUM_STEPS = 1000  # of gradients that take as long as to solve for the optimum
FIRST, QUICK = Local(lr=1.0, steps=20, k=128), Local(lr=1.0, steps=5, k=64)
AROUND = ((0.7, 1.0), (1.4, 1.0), (1.0, 0.5), (1.0, 1.5), (0.7, 1.5), (1.4, 0.75))
"""Times the rate and the steps."""
FINALISTS = 2  # of each of the two mixtures, judged by more tokens, if possible all
WORTH = 1e-3  # of the perplexity, for which the mixture with the cache gets settings of its own
EXPLORING, FINISHING = 0.6, 0.8  # of the allowance, up to where settings are tried and judged
DEAREST = 0.08  # of the allowance, for one setting


class Trial(NamedTuple):
    """A memory size and a way to adapt."""

    window: int
    local: Local


class Judged(NamedTuple):
    """Perplexities with weights solved for."""

    alone: float
    """LSTM + MbPA."""
    beside: float
    """LSTM + MbPA + cache."""


def searched(config: LanguageConfig) -> LanguageConfig:
    """What a search runs with: one network, and all that it chooses as it is by default."""
    own, dynamic = LanguageConfig(), config.dynamic
    return replace(
        config,
        seeds=config.seeds[:1],
        memory=own.memory,
        cache=own.cache,
        mbpa=own.mbpa,
        combined=own.combined,
        dynamic=replace(
            own.dynamic,
            statistics=dynamic.statistics,
            statistics_batch=dynamic.statistics_batch,
            adam_lr=own.dynamic.adam_lr if dynamic.adam_lr else 0.0,
        ),
    )


def tune(config: LanguageConfig, context: Context) -> BySeed:
    """Records of all that was tried, and of what was chosen."""
    config = searched(config)
    return {None: search(config, context, read_corpus(config, context))}


def search(config: LanguageConfig, context: Context, corpus: Corpus) -> list[Record]:
    """Stage by stage, with the network of the first seed."""
    model = trained(config, corpus, context, config.seeds[0])
    moments = adam_state(config, corpus, context, config.seeds[0])
    first, device, seconds = first_word(corpus), context.device, config.search.seconds
    passage = read_passage(model, corpus.valid.to(device), first)
    with context.bar(round(seconds), "search", "estimated seconds") as bar:
        ledger = Ledger(context, config.corpus, seconds, bar)
        ledger.tried(LSTM, {"tokens": len(passage)}, perplexity(passage.own))
        trials = Trials(config, model, passage, ledger)
        trials.choose_cache()
        trials.explore()
        trials.choose_mbpa()
        scale = _gradient_scale(config, context, model, corpus)
        DynamicTrials(config, model, passage, first, scale, moments, ledger).choose()
        trials.finish_paper_grid()
        ledger.save()
    left_out: Record = {"name": "settings_left_out", "value": ledger.left_out}
    return [*ledger.records, left_out]


def _gradient_scale(
    config: LanguageConfig, context: Context, model: LanguageModel, corpus: Corpus
) -> list[Tensor]:
    """Computed once, also for a run that is interrupted."""
    kept, device = context.workspace.load("gradients"), context.device
    if kept is None:
        kept = {"scale": gradient_scale(model, corpus.train.to(device), config.dynamic)}
        context.workspace.save("gradients", kept)
    return [scale.to(device) for scale in kept["scale"]]


class Trials:
    """Settings of the cache and of MbPA."""

    def __init__(
        self, config: LanguageConfig, model: LanguageModel, passage: Passage, ledger: Ledger
    ) -> None:
        self.model, self.passage, self.ledger = model, passage, ledger
        self._retrievals: dict[int, Retrieval] = {}
        self._engine = engine_for(passage.keys.device)
        self._tried: dict[Trial, Judged] = {}
        self._cache = passage.own
        self.all = range(len(passage))
        step = max(1, len(passage) // config.search.tokens)
        self.sample = range(step - 1, len(passage), step)
        windows = [window for window in WINDOWS if window <= len(passage)]
        self.windows = windows or [len(passage)]

    # The cache

    def choose_cache(self) -> None:
        """Window and scale, by all tokens; then scales in between."""
        found: dict[tuple[int, float], float] = {}
        for window in self.windows:
            found |= self._caches(window, SCALES)
        window, scale = min(found, key=lambda pair: found[pair])
        found |= self._caches(window, (0.8 * scale, 1.25 * scale))
        window, scale = min(found, key=lambda pair: found[pair])
        scale = float(f"{scale:.3g}")
        self._cache = cache_scores(self.passage, window, (scale,), self.all)[0]
        self.ledger.chose("cache.scale", scale)
        self.ledger.chose("cache.window", window)

    def _caches(self, window: int, scales: tuple[float, ...]) -> dict[tuple[int, float], float]:
        def compute() -> list[float]:
            logs = cache_scores(self.passage, window, scales, self.all)
            return [self._mixture(self.all, one) for one in logs]

        values = self.ledger.known(("cache", window, scales), compute)
        for scale, value in zip(scales, values, strict=True):
            self.ledger.tried(
                CACHE, {"window": window, "scale": scale, "tokens": len(self.all)}, value
            )
        pairs = [(window, scale) for scale in scales]
        return dict(zip(pairs, values, strict=True))

    def _mixture(self, positions: range, *parts: Tensor) -> float:
        """The perplexity of the LSTM mixed with these, by the best weights."""
        rows = slice(positions.start, positions.stop, positions.step)
        logs = torch.stack([self.passage.own[rows], *parts])
        return perplexity(mixed(logs, solved_weights(logs)))

    # MbPA

    def explore(self) -> None:
        """From stage to stage, each from the best so far, by some tokens."""
        usual = [window for window in self.windows if window <= max(PAPER_WINDOWS)]
        largest = max(usual or self.windows[:1])
        paper = [window for window in PAPER_WINDOWS if window in self.windows] or [largest]
        one_step = itertools.product(paper, PAPER_COUNTS, PAPER_RATES)
        self._try(Trial(w, Local(lr=lr, steps=1, k=k)) for w, k, lr in one_step)
        wide = [(lr, 1) for lr in ONE_STEP_RATES] + list(itertools.product(RATES, STEPS))
        self._try(Trial(largest, replace(FIRST, lr=lr, steps=steps)) for lr, steps in wide)
        self._vary(lambda t: [t._replace(window=window) for window in self.windows])
        self._vary(lambda t: [_with(t, k=k) for k in COUNTS])
        self._vary(lambda t: [_with(t, **kernel) for kernel in self._kernels()])
        self._vary(lambda t: [_near(t, lr, steps) for lr, steps in AROUND])
        optima = itertools.product(OPTIMUM_COUNTS, PRIORS)
        start = _with(self._best(0), rule="map", lr=1.0, steps=1)
        self._try(_with(start, k=k, prior=prior) for k, prior in optima)
        self._vary(lambda t: [_with(t, decay=decay) for decay in DECAYS])

    def choose_mbpa(self) -> None:
        """For each mixture the best of what was tried; one for both where that does as well."""
        final = self._finalists()
        best = min(final, key=lambda trial: final[trial].alone)
        beside = min(final, key=lambda trial: final[trial].beside)
        if final[beside].beside > (1 - WORTH) * final[best].beside:
            beside = best
        self.ledger.chose("memory", best.window)
        for within, local in (
            ("mbpa", best.local),
            ("combined", beside.local),
            ("dynamic.mbpa", self._quickest()),
        ):
            for name, value in asdict(local).items():
                self.ledger.chose(f"{within}.{name}", value)

    def finish_paper_grid(self) -> None:
        """Several steps, with the paper's numbers of neighbours and rates."""
        window = min(self._best(0).window, max(PAPER_WINDOWS))
        grid = itertools.product(PAPER_STEPS[1:], PAPER_COUNTS, PAPER_RATES)
        self._try((Trial(window, Local(lr=lr, steps=t, k=k)) for t, k, lr in grid), share=1.0)

    def judge(self, trial: Trial, positions: range) -> Judged:
        """Of one setting, by these tokens."""

        def compute() -> list[float]:
            predictor = trial.local.predictor(trial.window)
            retrieval = self._retrieval(trial.window)
            head = self.model.decoder
            adapted = adapted_scores(head, retrieval, predictor, positions, self._engine)
            cache = self._cache[positions.start : positions.stop : positions.step]
            return [self._mixture(positions, adapted), self._mixture(positions, adapted, cache)]

        judged = Judged(*self.ledger.known((trial, positions), compute))
        setting = {"window": trial.window, **asdict(trial.local), "tokens": len(positions)}
        self.ledger.tried(MBPA, setting, judged.alone)
        self.ledger.tried(BOTH, setting, judged.beside)
        return judged

    def _try(self, trials: Iterable[Trial], share: float = EXPLORING) -> None:
        """Judge what can be afforded and has not been tried, by some tokens."""
        for trial in trials:
            cost = self._cost(trial, self.sample)
            most = DEAREST * self.ledger.allowance
            if trial not in self._tried and self.ledger.affords(cost, share if cost < most else 0):
                self._tried[trial] = self.judge(trial, self.sample)

    def _vary(self, options: Callable[[Trial], list[Trial]]) -> None:
        """Change the best of either mixture in one respect."""
        for best in (self._best(0), self._best(1)):
            self._try(options(best))

    def _best(self, mixture: int) -> Trial:
        """By its perplexity alone, 0, or beside the cache, 1."""
        if not self._tried:
            raise ExperimentError(
                f"search.seconds must allow for a setting, got {self.ledger.allowance}"
            )
        return min(self._tried, key=lambda trial: self._tried[trial][mixture])

    def _quickest(self) -> Local:
        """The best beside the cache of what can be done every few tokens, if there is such."""
        quick = {
            trial: judged.beside
            for trial, judged in self._tried.items()
            if trial.local.rule == "gradient" and trial.local.steps <= 5 and trial.local.k <= 128
        }
        return min(quick, key=lambda trial: quick[trial]).local if quick else QUICK

    def _finalists(self) -> dict[Trial, Judged]:
        """The best of either mixture with one memory, by as many tokens as can be afforded."""
        window = self._best(0).window
        mine = {t: judged for t, judged in self._tried.items() if t.window == window}
        ranked = [sorted(mine, key=lambda t: mine[t][mixture])[:FINALISTS] for mixture in (0, 1)]
        final = list(dict.fromkeys(itertools.chain(*ranked)))
        if self.sample == self.all:
            return mine
        for step in sorted({1, max(1, self.sample.step // 4), max(1, self.sample.step // 2)}):
            positions = range(step - 1, len(self.all), step)
            if self.ledger.affords(sum(self._cost(trial, positions) for trial in final), FINISHING):
                return {trial: self.judge(trial, positions) for trial in final}
        return mine

    def _kernels(self) -> list[dict[str, Any]]:
        distances = self._retrieval(self._best(0).window).distances[1:, 0]
        near = float(distances.sqrt().mean())
        widths = [float(f"{width * near:.3g}") for width in BANDWIDTHS]
        return [
            {"kernel": "uniform", "kernel_scale": 1.0},
            *({"kernel": "gaussian", "kernel_scale": width} for width in widths),
            *({"kernel": "exp_dot", "kernel_scale": factor} for factor in FACTORS),
        ]

    def _retrieval(self, window: int) -> Retrieval:
        if window not in self._retrievals:
            most = max(*COUNTS, *PAPER_COUNTS)
            self._retrievals[window] = retrieved(self.passage, window, most)
        return self._retrievals[window]

    def _cost(self, trial: Trial, positions: range) -> float:
        local, words = trial.local, self.model.decoder.out_features
        steps = OPTIMUM_STEPS if local.rule == "map" else local.steps
        return estimated_seconds(len(positions), min(local.k, trial.window), steps, words)


@dataclass(frozen=True, eq=False)
class DynamicTrials:
    """Settings of dynamic evaluation, judged by the beginning of the text."""

    config: LanguageConfig
    model: LanguageModel
    passage: Passage
    first: int
    scale: list[Tensor]
    moments: dict[str, Any] | None
    ledger: Ledger

    def choose(self) -> None:
        settings = self.config.dynamic
        narrow, rates = NARROW_EPSILON
        options = [replace(settings, lr=lr) for lr in DYNAMIC_RATES]
        options += [replace(settings, epsilon=narrow, lr=lr) for lr in rates]
        chosen, best = self._best(DYNAMIC, options, ("lr", "epsilon", "decay"))
        pulled = [replace(chosen, decay=decay) for decay in DYNAMIC_DECAYS]
        again, value = self._best(DYNAMIC, pulled, ("lr", "epsilon", "decay"))
        chosen = again if value < best else chosen
        for name in ("lr", "decay", "epsilon"):
            self.ledger.chose(f"dynamic.{name}", getattr(chosen, name))
        if settings.adam_lr:
            options = [replace(settings, adam_lr=lr) for lr in ADAM_RATES]
            adam, _ = self._best(ADAM, options, ("adam_lr",))
            self.ledger.chose("dynamic.adam_lr", adam.adam_lr)

    def _best(
        self, method: str, options: Sequence[Dynamic], fields: tuple[str, ...]
    ) -> tuple[Dynamic, float]:
        """The option that does best, and its perplexity; the first where none is affordable."""
        found: dict[Dynamic, float] = {}
        tokens = self.passage.targets[: self.config.search.dynamic_tokens]
        weights = sum(p.numel() for p in self.model.parameters())
        for settings in options:
            if self.ledger.affords(len(tokens) / settings.segment * (1e-3 + 1e-10 * weights)):
                compute = functools.partial(self._judge, method, tokens, settings)
                (value,) = self.ledger.known((method, settings, len(tokens)), compute)
                found[settings] = value
                told = {name: getattr(settings, name) for name in fields}
                self.ledger.tried(method, {**told, "tokens": len(tokens)}, value)
        best = min(found, key=lambda settings: found[settings], default=options[0])
        return best, found.get(best, math.inf)

    def _judge(self, method: str, tokens: Tensor, settings: Dynamic) -> tuple[float]:
        training = self.config.training

        def make(params: Params) -> Update:
            if method == DYNAMIC:
                return RMSUpdate(params, self.scale, settings)
            betas = training.beta1, training.beta2
            return AdamUpdate(params, settings.adam_lr, self.moments, *betas)

        inputs = functional.pad(tokens[:-1], (1, 0), value=self.first)
        network = DynamicEvaluation(self.model, make, settings)
        return (perplexity(network.read(inputs, tokens).own),)


def estimated_seconds(tokens: int, k: int, steps: int, words: int) -> float:
    """For adapting to `k` neighbours as many times, on one H200.

    Measured with 10,000 words: 1.2 µs a token at 128 neighbours and one step, 107 µs at twenty.
    """
    near, vocabulary = k / 128, words / 10_000
    each = 1.2e-6 * near if steps == 1 else 5.4e-6 * steps * max(near**2, near / 4)
    return 0.005 + 1.2 * tokens * vocabulary * each


def _with(trial: Trial, **changes: Any) -> Trial:
    return trial._replace(local=replace(trial.local, **changes))


def _near(trial: Trial, lr: float, steps: float) -> Trial:
    rate = float(f"{trial.local.lr * lr:.3g}")
    return _with(trial, lr=rate, steps=max(1, round(trial.local.steps * steps)))
