"""The search for settings, on the validation text alone.

There is one pass of states, one retrieval per memory size, and for every setting the weights of its
mixture are solved for. The cache comes first. Then comes MbPA: the paper's grid for one step, then
more steps and larger rates, memory sizes, neighbours, kernels and the pull back, each starting from
the best so far. Settings are judged on tokens spread evenly over the text, each with the memory it
would have; expensive ones on a quarter of those, and the best ones on more of them. Of the settings
that do as well as the best, the fastest is chosen. Last come dynamic evaluation, the optimum and
the rest of the paper's grid. The cost of a setting is estimated beforehand, and settings that would
exceed the allowance are left out, so that what is tried does not depend on the machine's current
speed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.data import Corpus
from experiments.errors import ExperimentError
from experiments.experiment import BySeed, Context
from experiments.language.config import LanguageConfig, SearchBudget, SoftmaxAdaptation
from experiments.language.corpus import read_corpus
from experiments.language.dynamic_tuning import DynamicTrials, beyond
from experiments.language.evaluation import (
    BOTH,
    CACHE,
    LSTM,
    MBPA,
    first_word,
    load_gradient_scale,
)
from experiments.language.ledger import SPREAD, Ledger, three_digits
from experiments.language.network import LanguageModel
from experiments.language.passage import (
    Passage,
    Retrieval,
    engine_for,
    mix,
    perplexity,
    read_passage,
    retrieve,
    score_adapted,
    score_cache,
    solve_weights,
)
from experiments.language.training import adam_state, train_or_load
from experiments.results import Record

# The paper's grid (appendix); mixture weights are solved for instead.
PAPER_WINDOWS, PAPER_COUNTS, PAPER_STEPS = (500, 1000, 5000), (256, 512), (1, 5, 10)
PAPER_RATES = (0.01, 0.1, 0.15, 0.2, 0.5, 1.0)
# Beyond the paper's grid.
WINDOWS = (500, 1000, 2000, 5000, 10_000, 20_000)
SCALES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5)
RATES, STEPS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0), (5, 10, 20, 40)
ONE_STEP_RATES, COUNTS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0), (16, 32, 64, 256, 512)
BANDWIDTHS, FACTORS, DECAYS = (0.5, 0.7, 1.0, 1.5), (0.05, 0.2), (0.01, 0.03, 0.1)
OPTIMUM_COUNT, PRIORS = 32, (0.03, 0.1, 0.3)
OPTIMUM_STEPS = 2000  # gradient steps that take as long as solving for the optimum
FIRST = SoftmaxAdaptation(lr=1.0, steps=20, k=128)
AROUND = ((0.7, 1.0), (1.4, 1.0), (1.0, 0.5), (1.0, 1.5), (0.7, 1.5), (1.4, 0.75))
"""Factors of the rate and of the steps."""
FINALISTS = 3  # settings per mixture that are judged on more tokens, if possible all
WORTH = 1e-3  # relative perplexity; a smaller gain does not justify a slower setting
EXPLORING, FINISHING = 0.55, 0.75  # shares of the allowance spent by the end of each phase
DEAREST, DEAREST_COMPARED = 0.04, 0.1  # maximum share of the allowance per setting
CHEAP = 0.01  # seconds that any setting may take


class Trial(NamedTuple):
    """A memory size and a way to adapt."""

    window: int
    local: SoftmaxAdaptation


class Judged(NamedTuple):
    """Perplexities with mixture weights solved for."""

    alone: float
    """Perplexity of LSTM + MbPA."""
    beside: float
    """Perplexity of LSTM + MbPA + cache."""


def searched(config: LanguageConfig) -> LanguageConfig:
    """Return the config of a search: one network, and the fields to choose at their defaults."""
    own, dynamic = LanguageConfig(), config.dynamic
    return replace(
        config,
        seeds=config.seeds[:1],
        memory=own.memory,
        cache=own.cache,
        mbpa=own.mbpa,
        combined=own.combined,
        dynamic=replace(
            dynamic,
            lr=own.dynamic.lr,
            decay=own.dynamic.decay,
            epsilon=own.dynamic.epsilon,
            adam_lr=own.dynamic.adam_lr if dynamic.adam_lr else 0.0,
            mbpa=own.dynamic.mbpa,
        ),
    )


def tune(config: LanguageConfig, context: Context) -> BySeed:
    """Return records of all trials, and of the chosen settings."""
    config = searched(config)
    return {None: search(config, context, read_corpus(config, context))}


def search(config: LanguageConfig, context: Context, corpus: Corpus) -> list[Record]:
    """Search stage by stage, with the network of the first seed."""
    _check_affordable(config.search, len(corpus.valid) + len(corpus.test), len(corpus.words))
    model = train_or_load(config, corpus, context, config.seeds[0])
    moments = adam_state(config, corpus, context, config.seeds[0])
    first, device, seconds = first_word(corpus), context.device, config.search.seconds
    passage = read_passage(model, corpus.valid.to(device), first)
    with context.bar(100, "search, of its allowance", "%") as bar:
        ledger = Ledger(context, config.corpus, seconds, bar)
        ledger.tried(LSTM, {"tokens": len(passage)}, perplexity(passage.own))
        trials = Trials(config, model, passage, ledger, len(corpus.valid) + len(corpus.test))
        trials.choose_cache()
        trials.explore()
        trials.choose_mbpa()
        scale = load_gradient_scale(config, context, model, corpus, "gradients")
        DynamicTrials(config, model, passage, first, scale, moments, ledger).choose()
        trials.compare()
        ledger.save()
    left_out: Record = {"name": "settings_left_out", "value": ledger.left_out}
    return [*ledger.records, left_out]


def _check_affordable(allowed: SearchBudget, scored: int, words: int) -> None:
    """Refuse a search that could not choose anything, before a network is trained for it.

    Raises:
        ExperimentError: not even a single step is fast enough.
    """
    least = estimated_seconds(scored, FIRST.k, 1, words)
    if least > allowed.scoring_seconds:
        raise ExperimentError(
            f"MbPA takes {least:.2g} estimated seconds at least for {scored:,} tokens, and may "
            f"take {allowed.scoring_seconds:g}: pass --search.scoring-seconds {20 * least:.3g}"
        )


class Trials:
    """Settings of the cache and of MbPA.

    Args:
        scored: number of tokens that will be scored with the chosen settings.
    """

    def __init__(
        self,
        config: LanguageConfig,
        model: LanguageModel,
        passage: Passage,
        ledger: Ledger,
        scored: int,
    ) -> None:
        self.model, self.passage, self.ledger = model, passage, ledger
        self._retrievals: dict[int, Retrieval] = {}
        self._engine = engine_for(passage.keys.device)
        self._tried: dict[Trial, Judged] = {}  # on the sample
        self._judged: dict[tuple[Trial, range], Judged] = {}
        self._cache = passage.own
        self.all = range(len(passage))
        self._alone = {self.all}  # tokens on which the network alone was judged
        step = max(1, len(passage) // config.search.tokens)
        self.sample = range(step - 1, len(passage), step)
        self.quarter = self.sample[::4]
        self._ratios: Judged | None = None  # ratio of sample to quarter, for a good setting
        windows = [window for window in WINDOWS if window <= len(passage)]
        self.windows = windows or [len(passage)]
        self._scored, self._scoring_seconds = range(scored), config.search.scoring_seconds
        self._is_on_top = config.dynamic.on_top

    # The cache

    def choose_cache(self) -> None:
        """Choose window and scale on all tokens; then try scales in between."""
        found: dict[tuple[int, float], float] = {}
        for window in self.windows:
            found |= self._caches(window, SCALES)
        window, scale = min(found, key=lambda pair: found[pair])
        found |= self._caches(window, (0.8 * scale, 1.25 * scale))
        window, scale = min(found, key=lambda pair: found[pair])
        scale = three_digits(scale)
        self._cache = score_cache(self.passage, window, (scale,), self.all)[0]
        self.ledger.chose("cache.scale", scale)
        self.ledger.chose("cache.window", window)

    def _caches(self, window: int, scales: tuple[float, ...]) -> dict[tuple[int, float], float]:
        def compute() -> list[float]:
            logs = score_cache(self.passage, window, scales, self.all)
            return [self._mixture(self.all, one) for one in logs]

        values = self.ledger.known(("cache", window, scales), compute)
        for scale, value in zip(scales, values, strict=True):
            self.ledger.tried(
                CACHE, {"window": window, "scale": scale, "tokens": len(self.all)}, value
            )
        pairs = [(window, scale) for scale in scales]
        return dict(zip(pairs, values, strict=True))

    def _mixture(self, positions: range, *parts: Tensor) -> float:
        """Return the perplexity of the LSTM mixed with these components, with the best weights."""
        rows = slice(positions.start, positions.stop, positions.step)
        logs = torch.stack([self.passage.own[rows], *parts])
        return perplexity(mix(logs, solve_weights(logs)))

    # MbPA

    def explore(self) -> None:
        """Go from stage to stage, each starting from the best so far, judged on some tokens."""
        usual = [window for window in self.windows if window <= max(PAPER_WINDOWS)]
        largest = max(usual or self.windows[:1])
        paper = [window for window in PAPER_WINDOWS if window in self.windows] or [largest]
        one_step = itertools.product(paper, PAPER_COUNTS, PAPER_RATES)
        self._explore(Trial(w, SoftmaxAdaptation(lr=lr, steps=1, k=k)) for w, k, lr in one_step)
        wide = [(lr, 1) for lr in ONE_STEP_RATES] + list(itertools.product(RATES, STEPS))
        self._explore(Trial(largest, replace(FIRST, lr=lr, steps=steps)) for lr, steps in wide)
        self._vary(lambda t: [_with(t, lr=lr) for lr in beyond(t.local.lr, _rates(t.local))])
        self._vary(lambda t: [t._replace(window=window) for window in self.windows])
        self._vary(lambda t: [_with(t, k=k) for k in COUNTS])
        self._vary(lambda t: [_with(t, **kernel) for kernel in self._kernels()])
        self._vary(lambda t: [_near(t, lr, steps) for lr, steps in AROUND])
        self._vary(lambda t: [_with(t, decay=decay) for decay in DECAYS if t.local.steps > 1])

    def choose_mbpa(self) -> None:
        """Choose settings for MbPA alone and beside the cache: the fastest of those as good as the
        best.
        """
        alone, beside = self._quickest(self._finalists())
        self.ledger.chose("memory", alone.window)
        chosen = {"mbpa": alone.local, "combined": beside.local}
        if self._is_on_top and (on_top := self._best_on_top()) is not None:
            chosen["dynamic.mbpa"] = on_top
        for within, local in chosen.items():
            for name, value in asdict(local).items():
                self.ledger.chose(f"{within}.{name}", value)

    def compare(self) -> None:
        """Try what takes too long to be chosen: the optimum, and several steps with the paper's
        numbers of neighbours and rates.
        """
        best = self._best(0)
        optimum = _with(best, rule="map", k=OPTIMUM_COUNT)  # keeps rate and steps of best
        self._try((_with(optimum, prior=prior) for prior in PRIORS), 1.0, DEAREST_COMPARED)
        window = min(best.window, max(PAPER_WINDOWS))
        grid = itertools.product(PAPER_STEPS[1:], PAPER_COUNTS, PAPER_RATES)
        paper = (Trial(window, SoftmaxAdaptation(lr=lr, steps=t, k=k)) for t, k, lr in grid)
        self._try(paper, 1.0, DEAREST_COMPARED)

    def judge(self, trial: Trial, positions: range) -> Judged:
        """Judge one setting on these tokens, and record it the first time."""
        if (trial, positions) in self._judged:
            return self._judged[trial, positions]

        def compute() -> list[float]:
            predictor = trial.local.predictor(trial.window)
            retrieval = self._retrieval(trial.window)
            head = self.model.decoder
            adapted = score_adapted(head, retrieval, predictor, positions, self._engine)
            cache = self._cache[positions.start : positions.stop : positions.step]
            return [self._mixture(positions, adapted), self._mixture(positions, adapted, cache)]

        if positions not in self._alone:
            self._alone.add(positions)
            setting = {"tokens": len(positions), "part": SPREAD}
            self.ledger.tried(LSTM, setting, self._mixture(positions))
        judged = Judged(*self.ledger.known((trial, positions), compute))
        setting = {"window": trial.window, **asdict(trial.local), "tokens": len(positions)}
        self.ledger.tried(MBPA, setting, judged.alone)
        self.ledger.tried(BOTH, setting, judged.beside)
        self._judged[trial, positions] = judged
        return judged

    def _explore(self, trials: Iterable[Trial]) -> None:
        """Try settings that may be chosen: those that would score both texts fast enough."""
        for trial in trials:
            if self._cost(trial, self._scored) <= self._scoring_seconds:
                self._try([trial], EXPLORING, DEAREST)
            else:
                self.ledger.leave_out(trial)

    def _try(self, trials: Iterable[Trial], share: float, dearest: float) -> None:
        """Judge settings that are affordable and untried, on some tokens.

        Args:
            share: share of the allowance that may be spent by then.
            dearest: maximum share of the allowance for one setting.
        """
        most = max(CHEAP, dearest * self.ledger.allowance)
        for trial in trials:
            if trial in self._tried:
                continue
            cost = self._cost(trial, self.sample)
            is_dear = bool(self._tried) and (trial.local.rule == "map" or cost >= most)
            if is_dear:
                cost = self._cost(trial, self.quarter)
                if self._ratios is None:
                    cost += self._cost(self._best(0), self.quarter)
            if self.ledger.affords(trial, cost, share if cost < most else 0):
                judged = self._by_quarter(trial) if is_dear else self.judge(trial, self.sample)
                self._tried[trial] = judged

    def _by_quarter(self, trial: Trial) -> Judged:
        """Estimate the scores on the whole sample from those on a quarter, with the ratio of a good
        setting.
        """
        if self._ratios is None:
            best = self._best(0)
            whole, part = self._tried[best], self.judge(best, self.quarter)
            self._ratios = Judged(whole.alone / part.alone, whole.beside / part.beside)
        part = self.judge(trial, self.quarter)
        return Judged(part.alone * self._ratios.alone, part.beside * self._ratios.beside)

    def _vary(self, options: Callable[[Trial], list[Trial]]) -> None:
        """Vary the best setting of either mixture in one respect."""
        for best in (self._best(0), self._best(1)):
            self._explore(options(best))

    def _best(self, mixture: int) -> Trial:
        """Return the setting with the lowest perplexity alone (0) or beside the cache (1)."""
        if not self._tried:
            raise ExperimentError(
                "search.seconds and search.scoring_seconds must allow for a setting, got "
                f"{self.ledger.allowance} and {self._scoring_seconds}"
            )
        return min(self._tried, key=lambda trial: self._tried[trial][mixture])

    def _quickest(self, judged: dict[Trial, Judged]) -> tuple[Trial, Trial]:
        """Return the fastest pair, one setting per mixture or one for both, among those as good as
        the best; the better of equally fast ones. None takes too long to score both texts.
        """

        def seconds(pair: tuple[Trial, Trial]) -> float:
            return sum(self._cost(trial, self._scored) for trial in set(pair))

        def value(pair: tuple[Trial, Trial]) -> float:
            return judged[pair[0]].alone * judged[pair[1]].beside

        possible = itertools.product(judged, judged)
        pairs = [pair for pair in possible if seconds(pair) <= self._scoring_seconds]
        least = min(value(pair) for pair in pairs)
        good = [pair for pair in pairs if value(pair) <= (1 + WORTH) ** 2 * least]
        return min(good, key=lambda pair: (seconds(pair), value(pair)))

    def _best_on_top(self) -> SoftmaxAdaptation | None:
        """Return the best setting beside the cache that is fast enough to run every few tokens, if
        any.
        """
        quick = {
            trial: judged.beside
            for trial, judged in self._tried.items()
            if trial.local.rule == "gradient" and trial.local.steps <= 5 and trial.local.k <= 128
        }
        return min(quick, key=lambda trial: quick[trial]).local if quick else None

    def _finalists(self) -> dict[Trial, Judged]:
        """Judge the best of either mixture with one memory size, on as many tokens as can be
        afforded.
        """
        mine = min(self._by_window(), key=_least_of_both)
        ranked = [sorted(mine, key=lambda t: mine[t][mixture])[:FINALISTS] for mixture in (0, 1)]
        final = list(dict.fromkeys(itertools.chain(*ranked)))
        usual = self.sample.step
        for step in sorted({1, max(1, usual // 4), max(1, usual // 2), usual}):
            positions = range(step - 1, len(self.all), step)
            new = [trial for trial in final if (trial, positions) not in self._judged]
            cost = sum(self._cost(trial, positions) for trial in new)
            if self.ledger.affords(None, cost, FINISHING):
                return {trial: self.judge(trial, positions) for trial in final}
        return mine

    def _by_window(self) -> list[dict[Trial, Judged]]:
        """Return the trials grouped by memory size, which both mixtures share."""
        windows = {trial.window for trial in self._tried}
        return [{t: j for t, j in self._tried.items() if t.window == w} for w in sorted(windows)]

    def _kernels(self) -> list[dict[str, Any]]:
        distances = self._retrieval(self._best(0).window).distances[1:, 0]
        near = float(distances.sqrt().mean())
        widths = [three_digits(width * near) for width in BANDWIDTHS]
        return [
            {"kernel": "uniform", "kernel_scale": 1.0},
            *({"kernel": "gaussian", "kernel_scale": width} for width in widths),
            *({"kernel": "exp_dot", "kernel_scale": factor} for factor in FACTORS),
        ]

    def _retrieval(self, window: int) -> Retrieval:
        if window not in self._retrievals:
            most = max(*COUNTS, *PAPER_COUNTS)
            self._retrievals[window] = retrieve(self.passage, window, most)
        return self._retrievals[window]

    def _cost(self, trial: Trial, positions: range) -> float:
        local, words = trial.local, self.model.decoder.out_features
        steps = OPTIMUM_STEPS if local.rule == "map" else local.steps
        k, decays = min(local.k, trial.window), local.rule == "gradient" and local.decay > 0
        return estimated_seconds(len(positions), k, steps, words, decays)


def _least_of_both(judged: dict[Trial, Judged]) -> float:
    """Return how well a group of settings does, each mixture with its best setting."""
    return min(each.alone for each in judged.values()) * min(
        each.beside for each in judged.values()
    )


def estimated_seconds(tokens: int, k: int, steps: int, words: int, decays: bool = False) -> float:
    """Return the estimated seconds on one H200 for adapting to `k` neighbours, for this many
    tokens.

    Measured with 10,000 words: 1.2 µs per token at 128 neighbours and one step, 107 µs at twenty
    steps, 430 µs at sixty with a decay; forty steps take 1.6 ms at 256 neighbours and 10 ms at 512,
    since beyond 128 a Gram matrix no longer fits into one program. Ten steps take 53 µs at 128
    neighbours, 24 µs at 64 and 12 µs at 32, numbers in between as long as the next power of two;
    and 172 µs at 128 with 33,278 words.
    """
    near, vocabulary = k / 128, words / 10_000
    each = 1.2e-6 * near
    if steps > 1:
        near = 2.0 ** math.ceil(math.log2(max(k, 16))) / 128 if near < 1 else near
        each = 5.4e-6 * steps * (near**2.8 if near > 1 else near) * (1.35 if decays else 1)
    return 0.005 + 1.2 * tokens * vocabulary * each


def _rates(local: SoftmaxAdaptation) -> tuple[float, ...]:
    """Return the grid that a rate comes from."""
    return ONE_STEP_RATES if local.steps == 1 else RATES


def _with(trial: Trial, **changes: Any) -> Trial:
    return trial._replace(local=replace(trial.local, **changes))


def _near(trial: Trial, lr: float, steps: float) -> Trial:
    rate = three_digits(lr * trial.local.lr)
    return _with(trial, lr=rate, steps=max(1, round(trial.local.steps * steps)))
