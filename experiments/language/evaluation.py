"""How well each method predicts the words of the validation and the test text.

Every method is a mixture of a few vectors of log-probabilities. Their weights are solved for on the
validation text and frozen, and so are the gates that decide weights per token; only then is the
test text scored, once. Each vector is saved to the workspace as soon as it is computed, so that a
run can be interrupted.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

import mbpa
from experiments.data import END_OF_LINE, Corpus
from experiments.experiment import Context
from experiments.language.config import LanguageConfig, RecentAdaptation, SoftmaxAdaptation
from experiments.language.dynamic import (
    AdamUpdate,
    DynamicEvaluation,
    Params,
    RMSUpdate,
    Update,
    gradient_scale,
)
from experiments.language.gating import (
    CACHE_PART,
    TokenScores,
    fit_mixture,
    mix_gated,
    score_components,
)
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
    score_vote,
    solve_weights,
)
from experiments.language.words import (
    find_improved_words,
    measure_improvements,
    measure_improvements_by_memory,
)
from experiments.measures import wait_for_device
from experiments.results import Record
from mbpa.kernels import neighbor_weights

Found = TypeVar("Found")

LSTM, CACHE, MBPA, BOTH = "LSTM", "LSTM + cache", "LSTM + MbPA", "LSTM + MbPA + cache"
MEMORY, DYNAMIC = "memory only", "LSTM + dynamic evaluation"
ADAM, ALL = "LSTM + dynamic evaluation (Adam)", "LSTM + dynamic evaluation + MbPA + cache"
GATED_CACHE, GATED_MBPA = "LSTM + cache, gated", "LSTM + MbPA, gated"
GATED = "LSTM + MbPA + cache, gated"
EVERYTHING = "LSTM + dynamic evaluation + MbPA + cache, gated"
PAPER_CACHE = "LSTM + cache, the paper's weights"
PAPER_BOTH = "LSTM + MbPA + cache, the paper's settings"
ONE_STEP = "LSTM + MbPA + cache, one step at our rate, the paper's weights"
LOOP, RETRIEVAL = "LSTM + MbPA, a loop over tokens", "retrieval"
METHODS = {
    LSTM: ("LSTM",),
    CACHE: ("LSTM", "cache"),
    MBPA: ("LSTM", "MbPA"),
    BOTH: ("LSTM", "MbPA beside the cache", "cache"),
    MEMORY: ("vote", "uniform"),
    DYNAMIC: ("dynamic",),
    ADAM: ("dynamic, Adam",),
    ALL: ("dynamic", "MbPA on dynamic", "cache on dynamic"),
    EVERYTHING: ("dynamic", "gated"),
}
"""The components of each method's mixture."""
GATED_METHODS = (GATED_CACHE, GATED_MBPA, GATED)
PAPER_WEIGHTS = {
    PAPER_CACHE: {"LSTM": 0.85, "cache": 0.15},
    PAPER_BOTH: {"LSTM": 0.75, "MbPA as in the paper": 0.1, "cache": 0.15},
    ONE_STEP: {"LSTM": 0.75, "MbPA with one step": 0.1, "cache": 0.15},
}
"""Mixtures with the weights that were best in the paper."""
PAPER_REACH = RecentAdaptation(5000, SoftmaxAdaptation(lr=0.15, steps=1, k=256))
"""The paper's memory and adaptation."""
COMPARED = {
    BOTH: CACHE,
    MBPA: LSTM,
    GATED: GATED_CACHE,
    PAPER_BOTH: PAPER_CACHE,
    ONE_STEP: PAPER_CACHE,
}
"""Methods whose gain is shown word by word, and what each is compared with."""
LOOPED_TOKENS = 200  # tokens from which the time of a loop is extrapolated
WARM_UP_TOKENS = 2048  # tokens
COMPARED_TOKENS = 2048  # tokens on which the error of adapting only some words is measured
TOKENS_PER_SAVE = 25_000  # tokens of dynamic evaluation between saves


def evaluate(
    model: LanguageModel,
    corpus: Corpus,
    config: LanguageConfig,
    context: Context,
    seed: int,
    moments: dict[str, Any] | None = None,
    *,
    tokens_per_save: int = TOKENS_PER_SAVE,
) -> list[Record]:
    """Return the perplexities of all methods on both texts, and the other records of the report.

    Args:
        moments: the `state_dict()` of the Adam that trained the model, if it was kept.
        tokens_per_save: tokens of dynamic evaluation between two saves.
    """
    texts = {
        split: Text(model, corpus, config, context, seed, split, moments, tokens_per_save)
        for split in ("valid", "test")
    }
    tried = {ALL: config.dynamic.on_top, ADAM: config.dynamic.adam_lr > 0}
    methods = [name for name in METHODS if tried.get(name, True)]
    # Those that share a pass with MbPA on top take longest, so they come last.
    last = [method for method in (DYNAMIC, ALL, EVERYTHING) if method in methods]
    weights: dict[str, Tensor] = {}
    count = 2 * (len(methods) + len(GATED_METHODS))
    with context.bar(count, f"scoring, seed {seed}", "methods") as bar:
        records = _score_texts(texts, [m for m in methods if m not in last], weights, bar)
        gated = _score_gated(texts, bar)
        records += gated.records
        records += _word_records(texts["test"], weights, gated.logs) + texts["test"].timings()
        records += texts["test"].compare_with_all_words()
        records += _score_texts(texts, last, weights, bar)
    return records + _weight_records(config, methods, weights, moments is not None)


def _score_texts(
    texts: dict[str, Text], methods: Sequence[str], weights: dict[str, Tensor], bar: tqdm
) -> list[Record]:
    """Score both texts; the weights solved for on the first are added to `weights`."""
    records: list[Record] = []
    for (split, text), name in itertools.product(texts.items(), methods):
        logs = text.parts(METHODS[name])
        if split == "valid":
            weights[name] = solve_weights(logs)
        where: Record = {"method": name, "corpus": text.config.corpus, "split": split}
        value = perplexity(mix(logs, weights[name]))
        records.append({**where, "name": "perplexity", "value": value})
        bar.update()
    return records


class Gated(NamedTuple):
    """Scores of the gated mixtures."""

    records: list[Record]
    logs: dict[str, Tensor]
    """Log-probabilities of the words of the test text, by method."""


def _score_gated(texts: dict[str, Text], bar: tqdm) -> Gated:
    """Fit gates on the validation text, and score both texts with them."""
    config = texts["valid"].config
    reaches = tuple(config.gate.reaches)
    parts = {
        GATED_CACHE: (CACHE_PART,),
        GATED_MBPA: reaches,
        GATED: (*reaches, CACHE_PART),
    }
    found = Gated([], {})
    for method, names in parts.items():
        gate = fit_mixture(texts["valid"].token_scores, names, config.gate)
        for split, text in texts.items():
            logs = mix_gated(gate, text.token_scores, names)
            where: Record = {"method": method, "corpus": config.corpus, "split": split}
            found.records.append({**where, "name": "perplexity", "value": perplexity(logs)})
            if method == GATED:
                text.add_part("gated", logs)
            if split == "test":
                found.logs[method] = logs
            bar.update()
    return found


def _word_records(test: Text, weights: dict[str, Tensor], gated: dict[str, Tensor]) -> list[Record]:
    """Return which words gain from MbPA, and the perplexities with the paper's weights."""
    logs = {name: mix(test.parts(METHODS[name]), weights[name]) for name in weights} | gated
    for name, shares in PAPER_WEIGHTS.items():
        logs[name] = mix(test.parts(tuple(shares)), torch.tensor(list(shares.values())))
    records: list[Record] = []
    for after, before in COMPARED.items():
        found = measure_improvements(
            test.corpus, test.tokens.cpu(), logs[before].cpu(), logs[after].cpu()
        )
        window = test.config.memory
        found += measure_improvements_by_memory(
            test.tokens.cpu(), logs[before].cpu(), logs[after].cpu(), window
        )
        if after == BOTH:
            found += find_improved_words(
                test.corpus, test.retrieval, test.config.combined, logs[before], logs[after]
            )
        where: Record = {"method": after, "against": before, "corpus": test.config.corpus}
        records += [{**where, "split": test.split, **record} for record in found]
    for name in PAPER_WEIGHTS:
        where = {"method": name, "corpus": test.config.corpus, "split": test.split}
        records.append({**where, "name": "perplexity", "value": perplexity(logs[name])})
    return records


def _weight_records(
    config: LanguageConfig,
    methods: Sequence[str],
    weights: dict[str, Tensor],
    has_moments: bool,
) -> list[Record]:
    records: list[Record] = [
        {
            "method": name,
            "corpus": config.corpus,
            "split": "valid",
            "part": part,
            "name": "weight",
            "value": float(weight),
        }
        for name in methods
        if len(METHODS[name]) > 1
        for part, weight in zip(METHODS[name], weights[name].tolist(), strict=True)
    ]
    if ADAM in methods:
        told: Record = {"method": ADAM, "corpus": config.corpus, "name": "has_moments_of_training"}
        records.append({**told, "value": int(has_moments)})
    return records


def first_word(corpus: Corpus) -> int:
    """Return the word before the first word of a text: the end of a line."""
    return corpus.words.index(END_OF_LINE) if END_OF_LINE in corpus.words else 0


@dataclass(eq=False)
class Text:
    """One of the texts, and the scores of the methods' components, each computed on demand."""

    model: LanguageModel
    corpus: Corpus
    config: LanguageConfig
    context: Context
    seed: int
    split: str
    moments: dict[str, Any] | None = None
    tokens_per_save: int = TOKENS_PER_SAVE

    @cached_property
    def tokens(self) -> Int[Tensor, "T"]:
        tokens: Tensor = getattr(self.corpus, self.split)
        return tokens.to(self.context.device)

    @cached_property
    def passage(self) -> Passage:
        first = first_word(self.corpus)
        return self._time(LSTM, lambda: read_passage(self.model, self.tokens, first))

    @cached_property
    def retrieval(self) -> Retrieval:
        k = max(self.config.mbpa.k, self.config.combined.k, self.config.gate.k)
        return self._time(RETRIEVAL, lambda: retrieve(self.passage, self.config.memory, k))

    @cached_property
    def token_scores(self) -> TokenScores:
        """Scores of the components of the gated mixtures, and the features of their gates."""
        gate, kept, device = self.config.gate, self._kept.get("gated"), self.context.device
        if kept is None:
            windows = {reach.memory for reach in gate.reaches.values()}
            retrievals = {window: self._retrieve(window) for window in windows}
            kept = score_components(
                self.model.decoder,
                self.retrieval,
                retrievals,
                gate,
                gate.reaches,
                self.config.cache,
                self.positions,
                self._engine,
            ).to("cpu")
            names = "surroundings", "features", "own", "scores"
            self._kept["gated"] = {name: getattr(kept, name) for name in names}
            self._save()
        else:
            kept = TokenScores((*gate.reaches, CACHE_PART), **kept)
        return kept.to(device)

    def _retrieve(self, window: int) -> Retrieval:
        reaches = [*self.config.gate.reaches.values(), PAPER_REACH]
        k = max((reach.local.k for reach in reaches if reach.memory == window), default=1)
        k = max(k, self.config.one_step.k) if window == PAPER_REACH.memory else k
        return retrieve(self.passage, window, k)

    @cached_property
    def _engine(self) -> mbpa.Engine:
        return engine_for(self.context.device, self.config.adapted_words)

    @cached_property
    def positions(self) -> range:
        return range(len(self.tokens))

    @cached_property
    def _kept(self) -> dict[str, Any]:
        kept = self.context.workspace.load(self._name("scores"))
        return kept or {"parts": {}, "seconds": {}}

    def parts(self, names: tuple[str, ...]) -> Float[Tensor, "M T"]:
        """Return log-probabilities of the words, one row per component."""
        return torch.stack([self._part(name).to(self.context.device) for name in names])

    def add_part(self, name: str, scores: Float[Tensor, "T"]) -> None:
        """Add a component that was computed elsewhere."""
        self._kept["parts"][name] = scores.cpu()

    def timings(self) -> list[Record]:
        """Return seconds for the whole text; for MbPA and the cache, given the states.

        The loop takes as many gradient steps as the settings name, even if MbPA itself uses another
        rule; its record says so.
        """
        where: Record = {"corpus": self.config.corpus, "split": self.split, "name": "seconds"}
        local = replace(self.config.mbpa, rule="gradient")
        if LOOP not in self._kept["seconds"]:
            positions, head = self.positions[-LOOPED_TOKENS:], self.model.decoder
            retrieval = self.retrieval
            self._time(LOOP, lambda: loop_scores(head, retrieval, local, positions))
            self._kept["seconds"][LOOP] *= len(self.positions) / len(positions)
            self._save()
        seconds = dict(self._kept["seconds"])
        seconds[MBPA] += seconds.pop(RETRIEVAL)
        of: dict[str, Record] = {LOOP: {"rule": local.rule, "steps": local.steps, "k": local.k}}
        return [
            {"method": name, **where, **of.get(name, {}), "value": value}
            for name, value in seconds.items()
        ]

    def compare_with_all_words(self) -> list[Record]:
        """Return how much log-probabilities change if only some words adapt instead of all, for the
        last tokens of the text.
        """
        config, device = self.config, self.context.device
        if not config.adapted_words:
            return []
        predictor = config.mbpa.predictor(config.memory)
        positions, head = self.positions[-COMPARED_TOKENS:], self.model.decoder
        found, exact = (
            score_adapted(head, self.retrieval, predictor, positions, engine)
            for engine in (self._engine, engine_for(device, 0))
        )
        errors, count = (found - exact).abs(), len(positions)
        where: Record = {"method": MBPA, "corpus": config.corpus, "split": self.split}
        values = {
            "mean_error": errors.mean(),
            "largest_error": errors.max(),
            "mean_log_probability": found.mean(),
            "exact_mean_log_probability": exact.mean(),
        }
        return [
            {**where, "tokens": count, "name": name, "value": float(value)}
            for name, value in values.items()
        ]

    def _part(self, name: str) -> Tensor:
        kept: dict[str, Tensor] = self._kept["parts"]
        if name not in kept:
            for each, found in self._compute(name).items():
                kept[each] = found.masked_fill(found.isnan(), -math.inf).cpu()
            self._save()
        return kept[name]

    def _compute(self, name: str) -> dict[str, Tensor]:
        """Return the component of this name, and those computed with it."""
        config = self.config
        if name == "LSTM":
            return {name: self.passage.own}
        if name == "cache":
            passage = self.passage
            return {name: self._time(CACHE, lambda: self._cache(passage))}
        if name == "MbPA":
            _ = self.retrieval  # timed separately
            if self.context.device.type == "cuda":  # compile kernels before timing
                self._mbpa(config.mbpa, self.positions[:WARM_UP_TOKENS])
            return {name: self._time(MBPA, lambda: self._mbpa(config.mbpa, self.positions))}
        if name == "MbPA beside the cache":
            if config.combined == config.mbpa:
                return {name: self._part("MbPA")}
            return {name: self._mbpa(config.combined, self.positions)}
        if name in ("MbPA as in the paper", "MbPA with one step"):
            adaptations = {
                "MbPA as in the paper": PAPER_REACH.local,
                "MbPA with one step": config.one_step,
            }
            retrieval, window = self._retrieve(PAPER_REACH.memory), PAPER_REACH.memory
            return {
                each: score_adapted(
                    self.model.decoder,
                    retrieval,
                    local.predictor(window),
                    self.positions,
                    self._engine,
                )
                for each, local in adaptations.items()
            }
        if name == "vote":
            k = min(config.mbpa.k, config.memory)
            return {name: score_vote(self.retrieval, config.mbpa.weighting, k, self.positions)}
        if name == "uniform":
            even = torch.full_like(self.passage.own, -math.log(len(self.corpus.words)))
            even[:1] = self.passage.own[:1]  # before there is a memory, the network decides
            return {name: even}
        if name == "dynamic, Adam":
            return {name: self._dynamic(self._adam, "adam")[0].own}
        assert name in METHODS[ALL], name  # `gated` comes from `add_part`
        on_top = config.dynamic.mbpa if config.dynamic.on_top else None
        passage, adapted = self._dynamic(self._rms, "rms", on_top)
        parts = {"dynamic": passage.own}
        if on_top is not None:
            parts |= {"MbPA on dynamic": adapted, "cache on dynamic": self._cache(passage)}
        return parts

    def _cache(self, passage: Passage) -> Tensor:
        config = self.config
        window = config.cache.window or config.memory
        return score_cache(passage, window, (config.cache.scale,), self.positions)[0]

    def _mbpa(self, local: SoftmaxAdaptation, positions: range) -> Tensor:
        predictor, head = local.predictor(self.config.memory), self.model.decoder
        return score_adapted(head, self.retrieval, predictor, positions, self._engine)

    # Dynamic evaluation

    def _rms(self, params: Params) -> Update:
        name = f"gradients-{self.seed}"  # shared by both texts
        scale = load_gradient_scale(self.config, self.context, self.model, self.corpus, name)
        return RMSUpdate(params, scale, self.config.dynamic)

    def _adam(self, params: Params) -> Update:
        training = self.config.training
        betas = training.beta1, training.beta2
        return AdamUpdate(params, self.config.dynamic.adam_lr, self.moments, *betas)

    def _dynamic(
        self,
        make_update: Callable[[Params], Update],
        kind: str,
        on_top: SoftmaxAdaptation | None = None,
    ) -> tuple[Passage, Tensor]:
        """Return the text as read by a network that keeps learning, and MbPA's scores on top."""
        name, config, device = self._name(f"dynamic-{kind}"), self.config, self.context.device
        network = DynamicEvaluation(self.model, make_update, config.dynamic, on_top, config.memory)
        inputs = functional.pad(self.tokens[:-1], (1, 0), value=first_word(self.corpus))
        width = self.model.decoder.in_features
        read = {
            "keys": torch.empty(0, width, device=device),
            "own": torch.empty(0, device=device),
            "adapted": torch.empty(0, device=device),
        }
        kept = self.context.workspace.load(name)
        if kept is not None:
            read = {each: tensor.to(device) for each, tensor in kept["read"].items()}
            done = len(read["own"])
            network.resume(kept["network"], Passage(read["keys"], self.tokens[:done], read["own"]))
        piece = max(1, self.tokens_per_save // config.dynamic.segment) * config.dynamic.segment
        for start in range(len(read["own"]), len(inputs), piece):
            part = slice(start, start + piece)
            found = network.read(inputs[part], self.tokens[part])
            read = {each: torch.cat([read[each], getattr(found, each)]) for each in read}
            self.context.workspace.save(name, {"read": read, "network": network.state()})
        return Passage(read["keys"], self.tokens, read["own"]), read["adapted"]

    # Bookkeeping

    def _time(self, method: str, work: Callable[[], Found]) -> Found:
        wait_for_device(self.context.device)
        start = time.perf_counter()
        found = work()
        wait_for_device(self.context.device)
        self._kept["seconds"].setdefault(method, time.perf_counter() - start)
        return found

    def _save(self) -> None:
        self.context.workspace.save(self._name("scores"), self._kept)

    def _name(self, what: str) -> str:
        return f"{what}-{self.seed}-{self.split}"


def load_gradient_scale(
    config: LanguageConfig, context: Context, model: LanguageModel, corpus: Corpus, name: str
) -> list[Tensor]:
    """Return the gradient scale, computed once even if a run is interrupted, and saved under
    `name`.
    """
    kept, device = context.workspace.load(name), context.device
    if kept is None:
        kept = {"scale": gradient_scale(model, corpus.train.to(device), config.dynamic)}
        context.workspace.save(name, kept)
    return [scale.to(device) for scale in kept["scale"]]


def loop_scores(
    head: nn.Linear, retrieval: Retrieval, local: SoftmaxAdaptation, positions: range
) -> Float[Tensor, "P"]:
    """Adapt in the most obvious way: for each token a copy of the layer, and autograd.

    Used only to compare times, with the neighbours given.
    """
    passage, scores = retrieval.passage, []
    predictor = local.predictor(retrieval.window)
    for position in positions:
        at = range(position, position + 1)
        near = retrieval.neighbors(at, predictor.k, retrieval.window + 1)
        weights = neighbor_weights(predictor.kernel, near)[0]
        start = [p.detach() for p in (head.weight, head.bias)]
        params = [p.clone().requires_grad_() for p in start]
        optimizer = torch.optim.SGD(params, lr=local.lr)
        for _ in range(local.steps):
            before = [p.detach().clone() for p in params]
            losses = functional.cross_entropy(
                functional.linear(near.keys[0], *params), near.values[0], reduction="none"
            )
            optimizer.zero_grad()
            (weights * losses).sum().backward()
            optimizer.step()
            with torch.no_grad():
                for p, last, first in zip(params, before, start, strict=True):
                    p.sub_(local.decay * (last - first))
        with torch.no_grad():
            logits = functional.linear(passage.keys[position], *params)
            scores.append(logits.log_softmax(0)[passage.targets[position]])
    return torch.stack(scores)
