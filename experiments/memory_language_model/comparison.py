"""The comparison for one network: settings are chosen on validation texts, then tests are scored.

All methods share states and neighbours. Every gate has the same form and features, for kNN-LM as
for MbPA.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

import mbpa
from experiments.memory_language_model.config import MemoryLanguageConfig
from experiments.memory_language_model.fitting import fit_reaches
from experiments.memory_language_model.library import BOTH, DOMAIN, TEXT, Library, TextScores
from experiments.results import Record
from mbpa.language.gate import (
    Gate,
    Reach,
    ScaledAdapted,
    ScaledVote,
    fit_gate,
    make_predictor,
)
from mbpa.predictors import Predictor

MODEL = "model"
KNN, KNN_GATED, KNN_FITTED = "kNN-LM", "kNN-LM (gated)", "kNN-LM (fitted kernel, gated)"
PLAIN, PLAIN_GATED = "MbPA (one reach)", "MbPA (one reach, gated)"
ALONE, GATED = "MbPA", "MbPA (gated)"
WITH_VOTE = "MbPA + kNN (gated)"
SHARED, SHARED_VOTE = "MbPA (one gate)", "MbPA + kNN (one gate)"
CACHE, KNN_CACHE = "cache", "kNN-LM + cache (gated)"
GATED_CACHE, ALL_CACHE = "MbPA + cache (gated)", "MbPA + kNN + cache (gated)"
HURT_NATS = 1.0
STARTS = [Reach(), Reach(sharpness=(1.4, *(0.0,) * 6), step=(0.5, *(0.0,) * 6))]
CACHE_THETAS = (0.1, 0.3, 1.0, 3.0)
BUCKETS = 5
Say = Callable[[str], None]
Scores = Float[Tensor, "N"]


@dataclass(eq=False)
class Chosen:
    """What was chosen on the validation text of one corpus."""

    k: int = 0
    weight: float = 0.0
    bandwidth: float = 0.0
    """In units of the mean squared norm of keys; 0 for the inverse distance."""
    gated_k: int = 0
    gated_bandwidth: float = 0.0
    vote: Reach = field(default_factory=Reach)
    plain_weight: float = 1.0
    gates: dict[str, Gate] = field(default_factory=dict)

    @staticmethod
    def restore(fields: Mapping[str, Any]) -> Chosen:
        """Return what `asdict` turned into plain values."""
        gates = {method: Gate(**each) for method, each in fields["gates"].items()}
        return Chosen(**{**fields, "vote": Reach(**fields["vote"]), "gates": gates})


@dataclass(eq=False)
class Comparison:
    """One network on all corpora.

    Args:
        network: its name in records.
        libraries: the corpora by name.
        config: the settings.
        say: called with a line about each result.
    """

    network: str
    libraries: dict[str, Library]
    config: MemoryLanguageConfig
    say: Say = print
    records: list[Record] = field(default_factory=list)
    chosen: dict[str, Chosen] = field(default_factory=dict)
    reaches: dict[str, list[Reach]] = field(default_factory=dict)
    """Reaches by adaptation."""
    shared_vote: Reach = field(default_factory=Reach)

    def add(self, corpus: str, method: str, name: str, value: float, **more: Any) -> None:
        """Add a record, and print it."""
        self.records.append(
            {
                "corpus": corpus,
                "network": self.network,
                "method": method,
                **more,
                "name": name,
                "value": value,
            }
        )
        where = ", ".join(f"{key} {value}" for key, value in more.items())
        self.say(f"{corpus}, {self.network}, {method}, {where}: {name} {value:.5g}")

    def list_stages(self) -> list[str]:
        """Return the names of the stages, each of which can be run once those before it are."""
        extra = {"memories": self.config.memories, "curves": self.config.curves}
        return ["choose", "test", *(stage for stage, is_wanted in extra.items() if is_wanted)]

    def run(self, stage: str) -> None:
        """Run a stage: choose on the validation texts, score the test texts, or more figures."""
        stages = {
            "choose": self._choose,
            "test": self._test,
            "memories": self._compare_memories,
            "curves": self._draw_curves,
        }
        stages[stage]()

    def get_state(self) -> dict[str, Any]:
        """Return what the stages so far have found, as plain values."""
        return {
            "records": self.records,
            "chosen": {corpus: asdict(each) for corpus, each in self.chosen.items()},
            "reaches": {
                name: [asdict(each) for each in found] for name, found in self.reaches.items()
            },
            "shared_vote": asdict(self.shared_vote),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `get_state` returned."""
        self.records = list(state["records"])
        self.chosen = {corpus: Chosen.restore(each) for corpus, each in state["chosen"].items()}
        self.reaches = {
            name: [Reach(**each) for each in found] for name, found in state["reaches"].items()
        }
        self.shared_vote = Reach(**state["shared_vote"])

    def _choose(self) -> None:
        for corpus, library in self.libraries.items():
            began = time.perf_counter()
            library.find("valid")
            _synchronize(library)
            seconds = time.perf_counter() - began
            self.say(f"{corpus}: searched {library.count('valid')} tokens in {seconds:.1f} s")
            self.chosen[corpus] = Chosen()
            self._choose_knn(corpus)
            self._choose_gated_knn(corpus)
        self._fit_reaches()
        valid = {corpus: self._fit_gates(corpus) for corpus in self.libraries}
        self._fit_shared_gates(valid)
        for corpus, scores in valid.items():
            self._report(corpus, "valid", scores)

    def _test(self) -> None:
        for corpus, library in self.libraries.items():
            scores = library.score("test", library.find("test"), self._make_parts(corpus))
            self._report(corpus, "test", scores)

    # Choosing

    def _choose_knn(self, corpus: str) -> None:
        """Choose neighbours, bandwidth and weight of a kNN-LM with one constant weight."""
        library, chosen = self.libraries[corpus], self.chosen[corpus]
        found, targets = library.find("valid"), library.states["valid"].targets
        model = library.score("valid", found, {}).model
        best = math.inf
        for bandwidth in (0.0, *self.config.bandwidths):
            for k in self.config.knn_k:
                shares = []
                for rows in torch.arange(len(targets), device=library.device).split(16384):
                    weights = _weigh(found.distances[rows, :k], bandwidth * library.scale)
                    labels = library.labels[found.slots[rows, :k].long()]
                    shares.append((weights * (labels == targets[rows, None])).sum(1))
                votes = torch.cat(shares).log()
                weight, value = find_weight(model, votes)
                if value < best:
                    best = value
                    chosen.k, chosen.bandwidth, chosen.weight = k, bandwidth, weight
        self.say(
            f"{corpus}: {KNN} k {chosen.k} bandwidth {chosen.bandwidth} weight {chosen.weight}: "
            f"{best:.4f}; model {measure_perplexity(model):.4f}"
        )

    def _choose_gated_knn(self, corpus: str) -> None:
        """Choose neighbours and bandwidth of a gated kNN-LM, on a part of the text."""
        library, chosen, config = self.libraries[corpus], self.chosen[corpus], self.config
        rows = _spread_rows(library, "valid", config.search_tokens)
        settings = {
            f"{k} {bandwidth}": (k, bandwidth)
            for k in config.gated_knn_k
            for bandwidth in (0.0, *config.bandwidths)
        }
        parts = {name: _make_vote(library, *setting) for name, setting in settings.items()}
        scores = library.score("valid", library.find("valid"), parts, rows=rows)
        values = {name: _fit(scores, name)[1] for name in settings}
        best = min(values, key=values.__getitem__)
        chosen.gated_k, chosen.gated_bandwidth = settings[best]
        self.say(f"{corpus}: {KNN_GATED} " + ", ".join(f"{n}: {v:.3f}" for n, v in values.items()))
        (chosen.vote,) = fit_reaches(
            [library],
            "valid",
            DOMAIN,
            [Reach()],
            k=config.vote_k,
            steps=1,
            updates=config.vote_updates,
            batch=512,
            is_vote=True,
        )

    def _fit_reaches(self) -> None:
        libraries, config = list(self.libraries.values()), self.config
        for name in config.adaptations:
            k, steps, count = parse_adaptation(name)
            began, losses = time.perf_counter(), list[float]()
            starts, updates = STARTS[:count], config.updates
            if self.network != "frozen":
                default: Any = make_predictor().mixed[0]
                starts, updates = [default.reach, *starts[1:]], config.tuned_updates
            self.reaches[name] = fit_reaches(
                libraries,
                "valid",
                DOMAIN,
                starts,
                k=k,
                steps=steps,
                updates=updates,
                batch=max(1, config.fit_batch * 64 * 20 // (k * steps)),
                tick=losses.append,
            )
            tenth = max(1, len(losses) // 10)
            means = [sum(losses[at : at + tenth]) / tenth for at in range(0, len(losses), tenth)]
            self.say(f"reach {name}: {[round(mean, 3) for mean in means]}")
            self.say(f"  {self.reaches[name]} in {time.perf_counter() - began:.0f} s")
        (self.shared_vote,) = fit_reaches(
            libraries,
            "valid",
            DOMAIN,
            [Reach()],
            k=64,
            steps=1,
            updates=config.vote_updates,
            batch=512,
            is_vote=True,
        )
        self.say(f"vote: {self.shared_vote}")

    def _make_parts(self, corpus: str) -> dict[str, Predictor]:
        """Return the predictors to be mixed with the model, with what was chosen."""
        library, chosen = self.libraries[corpus], self.chosen[corpus]
        return {
            "vote": _make_vote(library, chosen.gated_k, chosen.gated_bandwidth),
            "constant vote": _make_vote(library, chosen.k, chosen.bandwidth),
            "fitted vote": ScaledVote(chosen.vote, self.config.vote_k),
            "shared vote": ScaledVote(self.shared_vote, 64),
            "plain": self._make_plain(library),
            **self._make_adapted(),
        }

    def _make_adapted(self, *names: str) -> dict[str, Predictor]:
        """Return the predictors of some adaptations, by default of all."""
        made: dict[str, Predictor] = {}
        for name in names or self.config.adaptations:
            k, steps, _ = parse_adaptation(name)
            for number, reach in enumerate(self.reaches[name]):
                made[f"{name} {number}"] = ScaledAdapted(reach, steps, k)
        return made

    def _make_plain(self, library: Library, k: int = 64, steps: int = 20) -> Predictor:
        rule = mbpa.Gradient(self.config.rate / library.scale, steps)
        return mbpa.Adapted(rule, k=k, kernel=mbpa.InverseDistance())

    def _list_mixtures(self) -> dict[str, tuple[str, ...]]:
        """Return the predictors that each gated method mixes with the model."""
        found: dict[str, tuple[str, ...]] = {
            KNN_GATED: ("vote",),
            KNN_FITTED: ("fitted vote",),
            PLAIN_GATED: ("plain",),
        }
        for place, name in enumerate(self.config.adaptations):
            setting = "" if place == 0 else f", {name}"
            names = tuple(self._make_adapted(name))
            found[GATED + setting] = names
            found[WITH_VOTE + setting] = (*names, "vote")
            found[f"{WITH_VOTE}, fitted kernel{setting}"] = (*names, "fitted vote")
            found[f"{SHARED}{setting}"] = names
            found[f"{SHARED_VOTE}{setting}"] = (*names, "shared vote")
        return found

    def _fit_gates(self, corpus: str) -> TextScores:
        """Fit the gates of one corpus, and return its scored validation text."""
        library, chosen = self.libraries[corpus], self.chosen[corpus]
        scores = library.score("valid", library.find("valid"), self._make_parts(corpus))
        for method, names in self._list_mixtures().items():
            if not method.startswith((SHARED, SHARED_VOTE)):
                chosen.gates[method] = _fit(scores, *names)[0]
        chosen.plain_weight = find_weight(scores.model, scores.parts["plain"].scores)[0]
        return scores

    def _fit_shared_gates(self, valid: Mapping[str, TextScores]) -> None:
        """Fit gates on the scored validation texts of all corpora together."""
        for method, names in self._list_mixtures().items():
            if not method.startswith((SHARED, SHARED_VOTE)):
                continue
            stacked = [scores.stack(*names) for scores in valid.values()]
            device = stacked[0][0].device
            features, scores = (
                torch.cat([pair[place].to(device) for pair in stacked]) for place in (0, 1)
            )
            gate = fit_gate(features, scores)
            self.say(f"{method}: {gate}")
            for chosen in self.chosen.values():
                chosen.gates[method] = gate

    # Reporting

    def _score_methods(self, corpus: str, scores: TextScores) -> dict[str, Scores]:
        """Return the log-probabilities of all tokens by every method."""
        chosen, parts = self.chosen[corpus], scores.parts
        found = {
            MODEL: scores.model,
            KNN: mix(scores.model, parts["constant vote"].scores, chosen.weight),
            PLAIN: mix(scores.model, parts["plain"].scores, chosen.plain_weight),
            ALONE: parts[f"{self.config.adaptations[0]} 0"].scores,
        }
        for method, names in self._list_mixtures().items():
            features, stacked = scores.stack(*names)
            found[method] = (chosen.gates[method].weigh(features) + stacked).logsumexp(1)
        return found

    def _report(self, corpus: str, split: str, scores: TextScores) -> None:
        library = self.libraries[corpus]
        for method, logs in self._score_methods(corpus, scores).items():
            self.add(corpus, method, "perplexity", measure_perplexity(logs), split=split)
            lost = float((scores.model - logs > HURT_NATS).double().mean())
            self.add(corpus, method, "share_hurt", lost, split=split)
            if split == "test":
                for number, mean in enumerate(self._average_buckets(library, split, logs)):
                    self.add(corpus, method, "bucket_nats", mean, split=split, bucket=number)
        for name, seconds in scores.seconds.items():
            micros = 1e6 * seconds / library.count(split)
            self.add(corpus, name, "microseconds", micros, split=split)

    def _average_buckets(self, library: Library, split: str, logs: Scores) -> list[float]:
        """Return the mean −log p by frequency of the token in the training text, rarest first.

        Buckets have the same number of tokens of the scored text.
        """
        counts = library.states["train"].targets.bincount(minlength=library.head.out_features)
        order = counts[library.states[split].targets].argsort(stable=True)
        return [float(-part.double().mean()) for part in logs[order].chunk(BUCKETS)]

    # Further figures

    def _compare_memories(self) -> None:
        """Compare memories of the domain, of the text read so far, and of both; and the cache."""
        main = self.config.adaptations[0]
        for corpus, library in self.libraries.items():
            library.add_texts()
            gates: dict[tuple[str, str], Gate] = {}
            caches: dict[str, tuple[Any, ...]] = {}
            for split in ("valid", "test"):
                scored: dict[str, TextScores] = {}
                for source in (TEXT, BOTH):
                    parts: dict[str, Predictor] = {
                        "adapted": self._make_adapted(main)[f"{main} 0"],
                        "vote": ScaledVote(self.shared_vote, 64),
                    }
                    if source == TEXT:
                        thetas = CACHE_THETAS if split == "valid" else (caches["cache"][0],)
                        parts |= {
                            f"cache {theta}": mbpa.NeighborVote(
                                mbpa.ExpDot(theta * 20 / library.scale), k=self.config.k
                            )
                            for theta in thetas
                        }
                    scored[source] = library.score(split, library.find(split, source), parts)
                text = scored[TEXT]
                if split == "valid":
                    tried = {
                        theta: find_weight(text.model, text.parts[f"cache {theta}"].scores)
                        for theta in CACHE_THETAS
                    }
                    theta = min(tried, key=lambda each: tried[each][1])
                    caches["cache"] = theta, tried[theta][0]
                    self.say(f"{corpus}: cache {tried}")
                theta, weight = caches["cache"]
                cache = text.parts[f"cache {theta}"]
                logs = mix(text.model, cache.scores, weight)
                self._add_memory(corpus, CACHE, split, TEXT, text.model, logs)
                for source, scores in scored.items():
                    for method, names in {
                        "kNN-LM (gated)": ("vote",),
                        GATED: ("adapted",),
                        WITH_VOTE: ("adapted", "vote"),
                    }.items():
                        self._gate_memory(corpus, method, split, source, scores, names, gates)
                parts_there = {**scored[BOTH].parts, "cache": cache}
                with_cache = TextScores(scored[BOTH].model, scored[BOTH].around, parts_there)
                for method, names in {
                    KNN_CACHE: ("vote", "cache"),
                    GATED_CACHE: ("adapted", "cache"),
                    ALL_CACHE: ("adapted", "vote", "cache"),
                }.items():
                    self._gate_memory(corpus, method, split, BOTH, with_cache, names, gates)

    def _gate_memory(
        self,
        corpus: str,
        method: str,
        split: str,
        source: str,
        scores: TextScores,
        names: tuple[str, ...],
        gates: dict[tuple[str, str], Gate],
    ) -> None:
        if split == "valid":
            gates[method, source] = _fit(scores, *names)[0]
        features, stacked = scores.stack(*names)
        logs = (gates[method, source].weigh(features) + stacked).logsumexp(1)
        self._add_memory(corpus, method, split, source, scores.model, logs)

    def _add_memory(
        self, corpus: str, method: str, split: str, source: str, model: Scores, logs: Scores
    ) -> None:
        value = measure_perplexity(logs)
        self.add(corpus, method, "perplexity", value, split=split, memory=source)
        hurt = float((model - logs > HURT_NATS).double().mean())
        self.add(corpus, method, "share_hurt", hurt, split=split, memory=source)

    def _draw_curves(self) -> None:
        """Score a part of the validation text with less memory, other K and other T."""
        config = self.config
        (reach,), (k, steps, _) = (
            self.reaches[config.adaptations[0]],
            parse_adaptation(config.adaptations[0]),
        )
        for corpus, library in self.libraries.items():
            rows = _spread_rows(library, "valid", config.curve_tokens)
            domain = library.find("valid")
            total = library.count("train")
            for tokens in (*(each for each in config.sizes if each < total), total):
                found = domain if tokens == total else library.restrict("valid", tokens, 256, rows)
                parts: dict[str, Predictor] = {
                    GATED: ScaledAdapted(reach, steps, k),
                    KNN_GATED: ScaledVote(self.shared_vote, 64),
                }
                scores = library.score("valid", found, parts, rows=rows)
                for method in parts:
                    value = _fit(scores, method)[1]
                    self.add(corpus, method, "curve", value, split="valid", tokens_read=tokens)
                value = _fit(scores, GATED, KNN_GATED)[1]
                self.add(corpus, WITH_VOTE, "curve", value, split="valid", tokens_read=tokens)
            self._vary(
                corpus,
                rows,
                {
                    **{("k", each): ScaledAdapted(reach, steps, each) for each in config.curve_k},
                    **{("steps", t): ScaledAdapted(reach, t, k) for t in config.curve_steps},
                },
            )

    def _vary(
        self, corpus: str, rows: Tensor, settings: Mapping[tuple[str, int], Predictor]
    ) -> None:
        library = self.libraries[corpus]
        for (name, value), part in settings.items():
            scores = library.score("valid", library.find("valid"), {"part": part}, rows=rows)
            more: dict[str, Any] = {"split": "valid", name: value}
            self.add(corpus, GATED, "curve", _fit(scores, "part")[1], **more)
            micros = 1e6 * scores.seconds["part"] / len(rows)
            self.add(corpus, GATED, "curve_microseconds", micros, **more)


def parse_adaptation(name: str) -> tuple[int, int, int]:
    """Return neighbours, steps and number of adaptations that a name such as 64x20x2 stands for."""
    k, steps, *count = map(int, name.split("x"))
    return k, steps, count[0] if count else 1


def measure_perplexity(logs: Scores) -> float:
    """Return exp of the mean −log p."""
    return math.exp(-float(logs.double().mean()))


def mix(model: Scores, other: Scores, weight: float) -> Scores:
    """Return log((1 − weight) p_model + weight p_other)."""
    if weight == 1:
        return other
    return torch.logaddexp(model + math.log1p(-weight), other + math.log(weight))


def find_weight(model: Scores, other: Scores) -> tuple[float, float]:
    """Return the best constant weight of the second prediction, in percent, and the perplexity."""
    found = [
        (measure_perplexity(mix(model, other, percent / 100)), percent / 100)
        for percent in range(2, 101, 2)
    ]
    value, weight = min(pair for pair in found if not math.isnan(pair[0]))
    return weight, value


def _fit(scores: TextScores, *names: str) -> tuple[Gate, float]:
    """Return a gate fitted to scores, and the perplexity with it."""
    features, stacked = scores.stack(*names)
    gate = fit_gate(features, stacked)
    return gate, measure_perplexity((gate.weigh(features) + stacked).logsumexp(1))


def _make_vote(library: Library, k: int, bandwidth: float) -> Predictor:
    if not bandwidth:
        return mbpa.NeighborVote(k=k)
    return mbpa.NeighborVote(mbpa.Gaussian(math.sqrt(bandwidth * library.scale / 2)), k=k)


def _weigh(distances: Float[Tensor, "B K"], bandwidth: float) -> Float[Tensor, "B K"]:
    logs = -distances / bandwidth if bandwidth else -(distances + 1e-3).log()
    return logs.softmax(1)


def _spread_rows(library: Library, split: str, tokens: int) -> Tensor:
    """Return tokens spread evenly over a text."""
    count = library.count(split)
    every = max(1, count // tokens) if tokens else 1
    return torch.arange(0, count, every, device=library.device)


def _synchronize(library: Library) -> None:
    if library.device.type == "cuda":
        torch.cuda.synchronize()
