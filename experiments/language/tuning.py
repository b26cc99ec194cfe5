"""The search for settings, on the validation text alone.

There is one pass of states, one retrieval per memory size, and for every setting the weights of its
mixture are solved for. The cache comes first. Then comes MbPA: the paper's grid for one step, then
more steps and larger rates, and then, round after round until nothing gains any more, memory sizes,
neighbours, kernels, rates, steps and the pull back, each stage starting from the best so far. All
these are judged on the same tokens, spread evenly over the text, each with the memory that it would
have; the best are judged again on the whole text. The adaptations of the gated mixture are chosen
among those that were tried. Then come the optimum and the rest of the paper's grid, for comparison
only. Dynamic evaluation has a budget of its own, of the same size. It is judged on the beginning of
the text, and the best settings again on all of it. Once a budget is used up, its remaining stages
are cut, and the best of the settings tried is chosen. The comparison of the best on the whole text
has as much time again, and the choice for the gated mixture half as much.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import cached_property, partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from experiments.data import Corpus
from experiments.experiment import BySeed, Context
from experiments.language.config import (
    Cache,
    Dynamic,
    LanguageConfig,
    RecentAdaptation,
    SoftmaxAdaptation,
)
from experiments.language.corpus import read_corpus
from experiments.language.dynamic import AdamUpdate, DynamicEvaluation, Params, RMSUpdate, Update
from experiments.language.evaluation import (
    ADAM,
    BOTH,
    CACHE,
    DYNAMIC,
    GATED,
    LSTM,
    MBPA,
    first_word,
    load_gradient_scale,
)
from experiments.language.gating import (
    CACHE_PART,
    TokenScores,
    judge_mixture,
    score_components,
)
from experiments.language.grids import Grids
from experiments.language.network import LanguageModel
from experiments.language.passage import (
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
from experiments.language.search_figures import BEGINNING, SPREAD
from experiments.language.training import adam_state, train_or_load
from experiments.language.trials import Trial, Trials
from experiments.results import Record
from experiments.search import Search

MAX_STEPS_ON_TOP, MAX_COUNT_ON_TOP = 5, 128
"""Steps and neighbours that are fast enough on top of dynamic evaluation, every few tokens."""
GATE_PARTS = "first", "second", "third"
"""The adaptations of the gated mixture, in the order in which they are chosen."""


def make_search_config(config: LanguageConfig) -> LanguageConfig:
    """Return the config of a search: one network, and the fields to choose at their defaults."""
    fresh, dynamic = LanguageConfig(), config.dynamic
    return replace(
        config,
        seeds=config.seeds[:1],
        memory=fresh.memory,
        cache=fresh.cache,
        mbpa=fresh.mbpa,
        combined=fresh.combined,
        one_step=fresh.one_step,
        gate=replace(
            config.gate,
            first=RecentAdaptation(),
            second=RecentAdaptation(),
            third=RecentAdaptation(),
        ),
        dynamic=replace(
            dynamic,
            lr=fresh.dynamic.lr,
            decay=fresh.dynamic.decay,
            epsilon=fresh.dynamic.epsilon,
            segment=fresh.dynamic.segment,
            adam_lr=fresh.dynamic.adam_lr if dynamic.adam_lr else 0.0,
            mbpa=fresh.dynamic.mbpa,
        ),
    )


def tune(config: LanguageConfig, context: Context) -> BySeed:
    """Return records of all trials, and of the chosen settings."""
    config = make_search_config(config)
    return {None: search_settings(config, context, read_corpus(config, context))}


def search_settings(
    config: LanguageConfig,
    context: Context,
    corpus: Corpus,
    grids: Grids | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Record]:
    """Search stage by stage, with the network of the first seed; return all records.

    Args:
        grids: values to try; all by default.
        clock: returns the current time in seconds, for the budget.
    """
    model = train_or_load(config, corpus, context, config.seeds[0])
    with Search(context, budget_s=config.search.seconds, clock=clock) as search:
        language = LanguageSearch(config, context, corpus, model, search, grids or Grids())
        language.choose_cache()
        language.choose_mbpa()
        language.choose_gate()
        language.compare()
        search.grant(config.search.seconds)
        language.choose_dynamic()
    if search.left_out:
        stages = ", ".join(f"{stage} ({number})" for stage, number in search.left_out.items())
        print(
            f"mbpa: the budget of {config.search.seconds:g} s is used up; settings not tried, by "
            f"stage: {stages}",
            file=sys.stderr,
        )
    return search.records + [
        {"corpus": config.corpus, "stage": stage, "name": "settings_left_out", "value": number}
        for stage, number in search.left_out.items()
    ]


class LanguageSearch:
    """Chooses the settings of the cache, of MbPA and of dynamic evaluation."""

    def __init__(
        self,
        config: LanguageConfig,
        context: Context,
        corpus: Corpus,
        model: LanguageModel,
        search: Search,
        grids: Grids,
    ) -> None:
        self.config, self.context, self.corpus = config, context, corpus
        self.model, self.search, self.grids = model, search, grids
        tokens = corpus.valid.to(context.device)
        self.passage = passage = read_passage(model, tokens, first_word(corpus))
        step = max(1, len(passage) // config.search.tokens)
        self.positions = range(step - 1, len(passage), step)
        self.beginning = passage.targets[: config.search.dynamic_tokens]
        windows = [window for window in grids.windows if window <= len(passage)]
        self.windows = windows or [len(passage)]
        self.mbpa: Trials[Trial] = Trials(search, "MbPA", self._judge_mbpa, self._is_allowed)
        self._own = passage.own[step - 1 :: step]
        self._whole = range(len(passage))
        self._chosen_cache: Cache | None = None
        self._caches: dict[range, Tensor] = {}
        self._engine = engine_for(passage.keys.device, config.adapted_words)
        self._retrievals: dict[int, Retrieval] = {}
        self._scales: dict[int, list[Tensor]] = {}
        self._memory = min(self.windows)  # until one is chosen
        whole, beginning = len(passage), len(self.beginning)
        self._record(LSTM, whole, {}, perplexity(passage.own))
        if step > 1:
            self._record(LSTM, len(self._own), {"part": SPREAD}, perplexity(self._own))
        if beginning < whole:
            value = perplexity(passage.own[:beginning])
            self._record(LSTM, beginning, {"part": BEGINNING}, value)

    def choose_cache(self) -> None:
        """Choose window and scale."""
        trials = Trials(self.search, "cache", self._judge_cache)
        pairs = itertools.product(self.windows, self.grids.cache_scales)
        trials.try_new("windows and scales", [Cache(scale, window) for window, scale in pairs])
        if trials.tried:
            self._chosen_cache = trials.find_best()
            self._record_choices("cache.", asdict(self._chosen_cache))

    def choose_mbpa(self) -> None:
        """Choose a memory size, and settings of MbPA alone, beside the cache and on top of dynamic
        evaluation.
        """
        self._explore_mbpa()
        tried = self.mbpa.tried
        if not tried:
            return
        bests = []  # by memory size, which both mixtures share
        for window in sorted({trial.window for trial in tried}):
            mine = [trial for trial in tried if trial.window == window]
            bests.append([self.mbpa.find_best(mixture, mine) for mixture in (0, 1)])
        alone, beside = min(bests, key=lambda pair: tried[pair[0]][0] * tried[pair[1]][1])
        window = alone.window
        mine = [trial for trial in tried if trial.window == window]
        finalists = [
            self.mbpa.list_best(self.config.search.finalists, mixture, mine) for mixture in (0, 1)
        ]
        self.search.grant(self.config.search.seconds)
        finals = Trials(self.search, "MbPA", partial(self._judge_mbpa, positions=self._whole))
        finals.try_new("finalists", itertools.chain(*finalists))
        if len(finals.tried) == len({*finalists[0], *finalists[1]}):
            alone, beside = finals.find_best(0), finals.find_best(1)
        self._memory = window
        self._record_choices("", {"memory": window})
        self._record_choices("mbpa.", asdict(alone.local))
        self._record_choices("combined.", asdict(beside.local))
        single = [trial for trial in tried if trial.local.steps == 1]
        if single:
            self._record_choices("one_step.", asdict(self.mbpa.find_best(1, single).local))
        fast = [trial for trial in tried if _is_fast(trial.local)]
        if self.config.dynamic.on_top and fast:
            self._record_choices("dynamic.mbpa.", asdict(self.mbpa.find_best(1, fast).local))

    def choose_gate(self) -> None:
        """Choose the adaptations of the gated mixture, one after the other, among those tried."""
        if not self.mbpa.tried:
            return
        self.search.grant(self.config.search.seconds / 2)
        pool = {str(place): trial for place, trial in enumerate(self._list_pool())}
        scores = self._score_pool(pool)
        chosen: tuple[str, ...] = ()
        trials: Trials[tuple[str, ...]] = Trials(
            self.search, GATED, partial(self._judge_gate, scores, pool)
        )
        for part in GATE_PARTS:
            rest = [(*chosen, name) for name in pool if name not in chosen]
            trials.try_new(f"{part} adaptation", rest)
            best = trials.find_best() if trials.tried else (next(iter(pool)),)
            if best == chosen:
                break  # another adaptation gains nothing
            chosen = best
        for place, part in enumerate(GATE_PARTS):
            trial = pool[chosen[min(place, len(chosen) - 1)]]
            self._record_choices(f"gate.{part}.", {"memory": trial.window})
            self._record_choices(f"gate.{part}.local.", asdict(trial.local))

    def choose_dynamic(self) -> None:
        """Choose settings for the rule of Krause et al. and for Adam. If none was tried, the fields
        keep their values.
        """
        grids, start = self.grids, self.config.dynamic
        pulled = replace(start, decay=grids.dynamic_start_decay)
        pairs = [(epsilon, lr) for epsilon, rates in grids.dynamic_rates.items() for lr in rates]
        rms = Trials(self.search, DYNAMIC, partial(self._judge_dynamic, DYNAMIC))
        rms.try_new("rates", [replace(pulled, epsilon=epsilon, lr=lr) for epsilon, lr in pairs])
        rms.vary("pull", lambda best: [replace(best, decay=d) for d in grids.dynamic_decays])
        adam = Trials(self.search, ADAM, partial(self._judge_dynamic, ADAM))
        if start.adam_lr:
            adam.try_new("rates", [replace(start, adam_lr=rate) for rate in grids.adam_rates])
        rms.climb(
            grids.rounds,
            {
                "rates and pulls": self._change_rate_and_pull,
                "segments": self._change_segment,
                "ε": self._change_epsilon,
            },
        )
        for trials in (rms, adam):
            if trials.tried:
                self.search.grant(self.config.search.seconds)
                best = self._judge_finalists(trials)
                self._record_choices("dynamic.", _describe_dynamic(trials.name, best))

    def _judge_finalists(self, trials: Trials[Dynamic]) -> Dynamic:
        """Return the best of the best settings, judged on the whole text if there is time."""
        whole = partial(self._judge_dynamic, trials.name, text=self.passage.targets)
        finals = Trials(self.search, trials.name, whole)
        best = trials.list_best(self.config.search.finalists)
        finals.try_new("finalists", best)
        return (finals if len(finals.tried) == len(best) else trials).find_best()

    def _change_rate_and_pull(self, best: Dynamic) -> list[Dynamic]:
        factors = itertools.product(
            self.grids.dynamic_rate_factors, self.grids.dynamic_decay_factors
        )
        return [
            replace(best, lr=_round(a * best.lr), decay=_round(b * best.decay)) for a, b in factors
        ]

    def _change_segment(self, best: Dynamic) -> list[Dynamic]:
        options = itertools.product(self.grids.dynamic_segments, self.grids.dynamic_rate_factors)
        return [
            replace(best, segment=segment, lr=_round(a * best.lr))
            for segment, a in options
            if a >= 1  # lower rates are tried with ε
        ]

    def _change_epsilon(self, best: Dynamic) -> list[Dynamic]:
        factors = itertools.product(
            self.grids.dynamic_epsilon_factors, self.grids.dynamic_rate_factors
        )
        return [
            replace(best, epsilon=_round(a * best.epsilon), lr=_round(b * best.lr))
            for a, b in factors
        ]

    def compare(self) -> None:
        """Try settings for comparison only: the optimum, and several steps with the paper's numbers
        of neighbours and rates.
        """
        grids = self.grids
        if not self.mbpa.tried:
            return
        best = self.mbpa.find_best()
        optimum = best.change(rule="map", k=grids.optimum_count)  # keeps rate and steps of best
        self.mbpa.try_new("optimum", [optimum.change(prior=prior) for prior in grids.priors])
        window = min(best.window, max(grids.paper_windows))
        grid = itertools.product(grids.paper_steps, grids.paper_counts, grids.paper_rates)
        paper = [Trial(window, SoftmaxAdaptation(lr=lr, steps=steps, k=k)) for steps, k, lr in grid]
        self.mbpa.try_new("paper's grid for several steps", paper)

    def _explore_mbpa(self) -> None:
        grids, windows = self.grids, self.windows
        usual = [window for window in windows if window <= max(grids.paper_windows)]
        largest = max(usual or windows[:1])
        paper = [window for window in grids.paper_windows if window in windows] or [largest]
        one_step = itertools.product(paper, grids.paper_counts, grids.paper_rates)
        trials = [
            Trial(window, SoftmaxAdaptation(lr=lr, steps=1, k=k)) for window, k, lr in one_step
        ]
        self.mbpa.try_new("paper's grid for one step", trials)
        pairs = [(lr, 1) for lr in grids.one_step_rates]
        pairs += itertools.product(grids.rates, grids.steps)
        trials = [Trial(largest, replace(grids.start, lr=lr, steps=steps)) for lr, steps in pairs]
        self.mbpa.try_new("rates and steps", trials)
        self.mbpa.climb(
            grids.rounds,
            {
                "memory sizes": lambda best: [best._replace(window=w) for w in windows],
                "neighbours": lambda best: [best.change(k=k) for k in grids.counts],
                "kernels": self._change_kernel,
                "rates and steps again": self._change_rate_and_steps,
                "pull back": self._change_decay,
            },
        )

    def _list_pool(self) -> list[Trial]:
        """Return good adaptations that differ in reach: the best of all without and with the cache,
        then the best for each number of steps, kernel, number of neighbours and memory size.
        """
        found: dict[Trial, None] = {}
        kinds: tuple[Callable[[Trial], object], ...] = (
            lambda trial: trial.local.steps,
            lambda trial: (trial.local.kernel, trial.local.kernel_scale),
            lambda trial: trial.local.k,
            lambda trial: trial.window,
        )
        bests = []
        for kind in kinds:
            groups: dict[object, list[Trial]] = {}
            for trial in self.mbpa.tried:
                groups.setdefault(kind(trial), []).append(trial)
            bests += [self.mbpa.find_best(1, group) for group in groups.values()]
        by_worth = sorted(dict.fromkeys(bests), key=lambda trial: self.mbpa.tried[trial][1])
        found.update(dict.fromkeys(self.mbpa.find_best(mixture) for mixture in (0, 1)))
        found.update(dict.fromkeys(by_worth))
        return list(found)[: self.grids.gate_pool]

    def _score_pool(self, pool: Mapping[str, Trial]) -> TokenScores:
        parts = [
            score_components(
                self.model.decoder,
                self._retrieve(self._memory),
                {trial.window: self._retrieve(trial.window)},
                self.config.gate,
                {name: trial.reach},
                self._chosen_cache if name == "0" else None,
                self.positions,
                self._engine,
            )
            for name, trial in pool.items()
        ]
        return reduce(TokenScores.join, parts)

    def _is_allowed(self, trial: Trial) -> bool:
        """Return whether a run with these settings would be fast enough."""
        k = min(trial.local.k, trial.window)
        return k * trial.local.steps <= self.config.search.max_neighbor_steps

    def _change_kernel(self, best: Trial) -> list[Trial]:
        def measure() -> float:
            return float(self._retrieve(best.window).distances[1:, 0].sqrt().mean())

        near = self.search.judge(("mean distance of the nearest", best.window), measure)
        widths = [_round(width * near) for width in self.grids.bandwidths]
        return [
            best.change(kernel="uniform", kernel_scale=1.0),
            *(best.change(kernel="gaussian", kernel_scale=width) for width in widths),
            *(best.change(kernel="exp_dot", kernel_scale=f) for f in self.grids.dot_factors),
        ]

    def _change_rate_and_steps(self, best: Trial) -> list[Trial]:
        lr, steps = best.local.lr, best.local.steps
        factors = itertools.product(self.grids.rate_factors, self.grids.step_factors)
        return [best.change(lr=_round(a * lr), steps=max(1, round(b * steps))) for a, b in factors]

    def _change_decay(self, best: Trial) -> list[Trial]:
        decays = self.grids.decays if best.local.steps > 1 else ()
        return [best.change(decay=decay) for decay in decays]

    # Judgements: perplexities, which are also recorded

    def _judge_cache(self, cache: Cache) -> list[float]:
        def compute() -> list[float]:
            return [_mix(self._own, self._score_cache(cache, self.positions))]

        found = self.search.judge(cache, compute)
        setting = {"window": cache.window, "scale": cache.scale}
        self._record(CACHE, len(self.positions), setting, found[0])
        return found

    def _judge_mbpa(self, trial: Trial, positions: range | None = None) -> list[float]:
        """Return the perplexities without and with the cache, on the tokens of the search unless
        other positions are given.
        """
        at = positions or self.positions

        def compute() -> list[float]:
            predictor = trial.local.predictor(trial.window)
            retrieval, head = self._retrieve(trial.window), self.model.decoder
            adapted = score_adapted(head, retrieval, predictor, at, self._engine)
            own, cache = self.passage.own[at.start : at.stop : at.step], self._score_chosen(at)
            return [_mix(own, adapted), _mix(own, adapted, cache)]

        found = self.search.judge((trial, len(at)), compute)
        for method, value in zip((MBPA, BOTH), found, strict=True):
            setting = {"window": trial.window, **asdict(trial.local)}
            self._record(method, len(at), setting, value)
        return found

    def _judge_gate(
        self, scores: TokenScores, pool: Mapping[str, Trial], chosen: tuple[str, ...]
    ) -> list[float]:
        reaches = [pool[name] for name in chosen]
        names = (*chosen, *((CACHE_PART,) if self._chosen_cache is not None else ()))
        found = self.search.judge(
            ("gate", reaches), lambda: [judge_mixture(scores, names, self.config.gate)]
        )
        setting = {
            f"adaptation {place}": trial.describe() for place, trial in enumerate(reaches, 1)
        }
        self._record(GATED, len(self.positions), setting, found[0])
        return found

    def _judge_dynamic(
        self, method: str, settings: Dynamic, text: Tensor | None = None
    ) -> list[float]:
        """Return the perplexity on the beginning of the text, unless another part is given."""
        training = self.config.training
        text = self.beginning if text is None else text

        def make_update(params: Params) -> Update:
            if method == DYNAMIC:
                return RMSUpdate(params, self._find_gradient_scale(settings), settings)
            betas = training.beta1, training.beta2
            return AdamUpdate(params, settings.adam_lr, self._moments, *betas)

        def compute() -> list[float]:
            inputs = functional.pad(text[:-1], (1, 0), value=first_word(self.corpus))
            network = DynamicEvaluation(self.model, make_update, settings)
            return [perplexity(network.read(inputs, text).own)]

        found = self.search.judge((method, settings, len(text)), compute)
        self._record(method, len(text), _describe_dynamic(method, settings), found[0])
        return found

    def _score_chosen(self, positions: range) -> Tensor:
        """Return the scores of the chosen cache, or the LSTM's own before one is chosen."""
        cache = self._chosen_cache
        if cache is None:
            return self.passage.own[positions.start : positions.stop : positions.step]
        if positions not in self._caches:
            self._caches[positions] = self._score_cache(cache, positions)
        return self._caches[positions]

    def _score_cache(self, cache: Cache, positions: range) -> Tensor:
        return score_cache(self.passage, cache.window, (cache.scale,), positions)[0]

    def _retrieve(self, window: int) -> Retrieval:
        if window not in self._retrievals:
            most = max(*self.grids.counts, *self.grids.paper_counts)
            self._retrievals[window] = retrieve(self.passage, window, most)
        return self._retrievals[window]

    def _find_gradient_scale(self, settings: Dynamic) -> list[Tensor]:
        """Return the root mean square gradients, which depend on the length of a segment."""
        length = settings.segment
        if length not in self._scales:
            config = replace(self.config, dynamic=settings)
            self._scales[length] = load_gradient_scale(
                config, self.context, self.model, self.corpus, f"gradients-{length}"
            )
        return self._scales[length]

    @cached_property
    def _moments(self) -> dict[str, Any] | None:
        return adam_state(self.config, self.corpus, self.context, self.config.seeds[0])

    # Records

    def _record(self, method: str, tokens: int, setting: dict[str, Any], value: float) -> None:
        what: Record = {"method": method, "corpus": self.config.corpus, "split": "valid"}
        what |= {**setting, "tokens": tokens}
        self.search.record_trial(what, [{**what, "name": "perplexity", "value": value}])

    def _record_choices(self, prefix: str, values: dict[str, Any]) -> None:
        for name, value in values.items():
            self.search.record_choice(f"{prefix}{name}", value, corpus=self.config.corpus)


def _describe_dynamic(method: str, settings: Dynamic) -> dict[str, float]:
    """Return the fields that are chosen for a method."""
    if method == ADAM:
        return {"adam_lr": settings.adam_lr}
    names = "lr", "epsilon", "decay", "segment"
    return {name: getattr(settings, name) for name in names}


def _mix(*parts: Tensor) -> float:
    """Return the perplexity of a mixture of these components, with the best weights."""
    logs = torch.stack(parts)
    return perplexity(mix(logs, solve_weights(logs)))


def _is_fast(local: SoftmaxAdaptation) -> bool:
    return local.steps <= MAX_STEPS_ON_TOP and local.k <= MAX_COUNT_ON_TOP


def _round(number: float) -> float:
    """Round to three significant digits, as settings are recorded."""
    return float(f"{number:.3g}")
