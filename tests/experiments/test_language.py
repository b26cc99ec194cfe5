"""Language modelling, what is made of a network's states: methods, mixtures, search, report.

Everything is compared with a slow obvious version, on a slice of Penn Treebank and a tiny network.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
import json
import math
import os
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mbpa
from experiments import running
from experiments.data import Corpus
from experiments.experiment import Context, find
from experiments.language import (
    evaluation,
    figures,
    gating,
    passage,
    recording,
    tuning,
    words,
)
from experiments.language.config import (
    PRESETS,
    Cache,
    Dynamic,
    GatedMixture,
    LanguageConfig,
    RecentAdaptation,
    SearchBudget,
    SoftmaxAdaptation,
)
from experiments.language.corpus import frequencies, read_corpus
from experiments.language.dynamic import (
    AdamUpdate,
    DynamicEvaluation,
    Params,
    RMSUpdate,
    Update,
    gradient_scale,
)
from experiments.language.evaluation import METHODS, Text, evaluate, first_word, loop_scores
from experiments.language.figures import sections
from experiments.language.grids import Grids
from experiments.language.network import LanguageModel
from experiments.language.passage import (
    Passage,
    mix,
    perplexity,
    read_passage,
    retrieve,
    score_adapted,
    score_cache,
    score_vote,
    solve_weights,
)
from experiments.language.training import train_or_load
from experiments.language.words import find_improved_words, measure_improvements
from experiments.report import draw_figure, make_sections
from experiments.results import Record, Result, value_of
from experiments.tuned_settings import apply_settings
from experiments.workspace import Workspace
from tests.oracle import adapt_one

ROOT = Path(__file__).parents[2]
WINDOW, TOKENS = 40, 130
CONFIG = replace(
    PRESETS["smoke"],
    tokens=2_000,
    scored_tokens=TOKENS,
    memory=WINDOW,
    cache=Cache(scale=0.5),
    mbpa=SoftmaxAdaptation(lr=0.5, steps=3, k=8, decay=0.05),
    combined=SoftmaxAdaptation(lr=2.0, steps=1, k=12),
    dynamic=Dynamic(
        lr=1e-3,
        decay=0.02,
        epsilon=1e-3,
        statistics=8,
        statistics_batch=4,
        mbpa=SoftmaxAdaptation(lr=0.5, steps=2, k=6),
    ),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("language")


def context_in(folder: Path, name: str, workspace: type[Workspace] = Workspace) -> Context:
    data = Path(os.environ.get("MBPA_DATA") or ROOT.parent / "shared" / "data")
    if not (data / "ptb").is_dir():
        pytest.skip("needs Penn Treebank: python -m experiments data fetch ptb, or MBPA_DATA")
    return Context(torch.device("cpu"), data, workspace(folder / name), False, folder / "cache")


@pytest.fixture(scope="module")
def corpus(folder: Path) -> Corpus:
    return read_corpus(CONFIG, context_in(folder, "corpus"))


@pytest.fixture(scope="module")
def model(folder: Path, corpus: Corpus) -> LanguageModel:
    context = context_in(folder, "training")
    with context.workspace.alone():
        return train_or_load(CONFIG, corpus, context, 0)


@pytest.fixture(scope="module")
def text(model: LanguageModel, corpus: Corpus) -> Passage:
    return read_passage(model, corpus.valid, first_word(corpus))


def close(found: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=0, atol=tolerance)


# One pass of states, and the methods on it


def test_the_pass_of_states_is_what_the_network_says_word_by_word(
    model: LanguageModel, corpus: Corpus, text: Passage
) -> None:
    state, before = model.initial_state(1), first_word(corpus)
    assert corpus.words[before] == "<eos>"
    with torch.no_grad():
        for place, word in enumerate(corpus.valid.tolist()[:20]):
            logits, state = model(torch.tensor([[before]]), state)
            close(text.own[place], logits[0, 0].log_softmax(0)[word])
            before = word
    assert torch.equal(text.targets, corpus.valid)
    close(text.own, model.decoder(text.keys).log_softmax(1)[range(TOKENS), text.targets].detach())


@pytest.mark.parametrize(
    "local",
    [
        SoftmaxAdaptation(lr=2.0, steps=1, k=8),
        SoftmaxAdaptation(lr=0.5, steps=3, k=64, decay=0.1),
        SoftmaxAdaptation(lr=0.5, steps=2, k=5, kernel="gaussian", kernel_scale=0.7),
        SoftmaxAdaptation(rule="map", prior=0.2, k=5),
    ],
)
def test_mixtures_of_vectors_equal_the_librarys_stream(
    model: LanguageModel, text: Passage, local: SoftmaxAdaptation
) -> None:
    predictor = local.predictor(WINDOW)
    weights = (0.5, 0.3, 0.2)
    library = mbpa.MbPA(
        head=model.decoder,
        memory=mbpa.ExactMemory(WINDOW, text.keys.shape[1]),
        predictor=mbpa.Mixture(
            mbpa.Parametric(),
            predictor,
            mbpa.NeighborVote(mbpa.exp_dot(0.5), k=WINDOW),
            weights=weights,
        ),
    )
    expected = mbpa.score_stream(library, text.keys, text.targets, block=11)
    positions = range(len(text))
    retrieval = retrieve(text, WINDOW, 64)
    adapted = score_adapted(model.decoder, retrieval, predictor, positions, mbpa.Engine())
    cache = score_cache(text, WINDOW, (0.1, 0.5), positions)[1]
    found = mix(torch.stack([text.own, adapted, cache]), torch.tensor(weights))
    close(found, expected, 1e-3 if local.rule == "map" else 2e-5)  # to its tolerance


def test_memory_only_is_the_librarys_smoothed_vote(model: LanguageModel, text: Passage) -> None:
    local = SoftmaxAdaptation(k=8)
    smooth = mbpa.NeighborVote(local.weighting, k=8, smoothing=0.1)
    memory = mbpa.ExactMemory(WINDOW, text.keys.shape[1])
    library = mbpa.MbPA(head=model.decoder, memory=memory, predictor=smooth)
    vote = score_vote(retrieve(text, WINDOW, 8), local.weighting, 8, range(len(text)))
    even = torch.full_like(vote, -math.log(model.decoder.out_features))
    even[0] = text.own[0]
    found = mix(torch.stack([vote, even]), torch.tensor([0.9, 0.1]))
    close(found, mbpa.score_stream(library, text.keys, text.targets))


def test_adaptation_is_what_a_loop_of_autograd_does_for_each_token(
    model: LanguageModel, text: Passage
) -> None:
    local = CONFIG.mbpa
    predictor, positions = local.predictor(WINDOW), range(90, 110, 3)
    retrieval = retrieve(text, WINDOW, 8)
    found = score_adapted(model.decoder, retrieval, predictor, positions, mbpa.Engine())
    expected = []
    for place in positions:
        keys, values = (part[place - WINDOW : place] for part in (text.keys, text.targets))
        distances = (keys - text.keys[place]).square().sum(1)
        near = distances.argsort()[: local.k]
        weights = 1 / (1e-3 + distances[near])
        head = adapt_one(
            model.decoder,
            predictor.rule,
            "cross_entropy",
            None,
            keys[near],
            values[near],
            weights / weights.sum(),
        )
        expected.append(head(text.keys[place]).log_softmax(0)[text.targets[place]].detach())
    close(found, torch.stack(expected), 1e-4)
    close(loop_scores(model.decoder, retrieval, local, positions), found, 1e-4)


def test_some_tokens_have_the_scores_that_they_have_among_all(
    model: LanguageModel, text: Passage, monkeypatch: pytest.MonkeyPatch
) -> None:
    retrieval, predictor = retrieve(text, WINDOW, 12), CONFIG.combined.predictor(WINDOW)
    everything, some = range(len(text)), range(4, len(text), 5)
    monkeypatch.setattr(
        passage, "BLOCK_TOKENS", (32, 32)
    )  # several blocks, the windows of which overlap
    engine = mbpa.Engine(path="one step")  # which it takes only from rows that were kept
    for scores in (
        lambda positions: score_adapted(model.decoder, retrieval, predictor, positions, engine),
        lambda positions: score_cache(text, WINDOW, (0.3,), positions)[0],
        lambda positions: score_vote(retrieval, mbpa.inverse_distance(), 12, positions),
    ):
        close(scores(some), scores(everything)[4::5])


@pytest.mark.heavy
def test_no_score_depends_on_what_comes_later(
    model: LanguageModel, corpus: Corpus, folder: Path
) -> None:
    until = 71
    other = corpus.test.clone()
    other[until:] = corpus.test[until:].flip(0) + 1
    changed = replace(corpus, test=other % len(corpus.words))
    names = itertools.chain(*METHODS.values(), *evaluation.PAPER_WEIGHTS.values())
    parts = tuple(dict.fromkeys(name for name in names if name != "gated"))
    found, gated = [], []
    for name, each in (("causal", corpus), ("changed", changed)):
        context = context_in(folder, name)
        with context.workspace.alone():
            text = Text(model, each, CONFIG, context, 0, "test")
            found.append(text.parts(parts))
            gated.append(text.token_scores)
    same = (found[0] - found[1]).nan_to_num(0).abs() < 1e-6
    assert same[:, :until].all()
    for one, other in zip(*(each.select(each.names) for each in gated), strict=True):
        torch.testing.assert_close(one[:until], other[:until], atol=1e-5, rtol=0)
        assert not torch.allclose(one[until:], other[until:], atol=1e-3)
    # What a gate knows about a word does not depend on the word itself.
    features = [each.select(each.names)[0] for each in gated]
    torch.testing.assert_close(features[0][until], features[1][until], atol=1e-5, rtol=0)
    later = dict(zip(parts, (~same[:, until:]).any(1).tolist(), strict=True))
    assert [name for name in parts if not later[name]] == ["uniform"]


# Mixtures


def test_the_cache_predicts_all_words_as_it_scores_the_actual_one(
    text: Passage, corpus: Corpus
) -> None:
    for positions in (range(TOKENS), range(3, TOKENS, 7), range(1)):
        found = passage.predict_cache(text, WINDOW, 0.5, positions, len(corpus.words))
        rows = torch.tensor(list(positions))
        close(found.exp().sum(1), torch.ones(len(rows)))
        scored = score_cache(text, WINDOW, (0.5,), positions)[0]
        actual = found[range(len(rows)), text.targets[rows]]
        later = rows > 0  # the first token has no window
        close(actual[later].exp(), scored[later].exp())


@pytest.mark.heavy
def test_a_gate_mixes_what_the_slow_way_predicts(
    model: LanguageModel, corpus: Corpus, text: Passage
) -> None:
    reaches = {
        "near": RecentAdaptation(20, CONFIG.mbpa),
        "far": RecentAdaptation(WINDOW, CONFIG.combined),
    }
    mixture = GatedMixture(k=6)
    retrievals = {window: retrieve(text, window, 12) for window in (20, WINDOW)}
    positions = range(2, TOKENS, 3)
    scores = gating.score_components(
        model.decoder,
        retrievals[WINDOW],
        retrievals,
        mixture,
        reaches,
        Cache(0.5, WINDOW),
        positions,
        mbpa.Engine(),
    )
    assert scores.names == ("near", "far", "cache")
    for row, reach in enumerate(reaches.values()):
        found = retrievals[reach.memory]
        predictor = reach.local.predictor(reach.memory)
        slow = score_adapted(model.decoder, found, predictor, positions, mbpa.Engine())
        close(scores.scores[row], slow)
    close(scores.own, text.own[2::3])
    gate = gating.fit_mixture(scores, scores.names, mixture)
    mixed = gating.mix_gated(gate, scores, scores.names)
    features, logs = scores.select(scores.names)
    for place in range(0, len(mixed), 5):  # one token at a time
        table = torch.tensor(gate.coefficients, dtype=torch.float64)
        weights = (table @ features[place].double()).softmax(0)
        expected = float((weights * logs[place].double().exp()).sum().log())
        assert float(mixed[place]) == pytest.approx(expected, rel=1e-6)
    constant = torch.stack([scores.own, *scores.scores])
    best = perplexity(mix(constant, solve_weights(constant)))
    assert perplexity(mixed) < best  # it can do all that constant weights can
    assert gating.judge_mixture(scores, scores.names, mixture) > perplexity(mixed)  # unseen text


def test_adaptations_that_are_equal_are_mixed_once() -> None:
    one, other = RecentAdaptation(7), RecentAdaptation(8)
    assert GatedMixture(one, other, one).reaches == {"first": one, "second": other}
    assert GatedMixture(one, one, one).reaches == {"first": one}


def test_words_in_the_window_before_a_token_are_counted() -> None:
    tokens = torch.randint(0, 5, (200,), generator=torch.Generator().manual_seed(3))
    for window in (1, 7, 500):
        slow = [
            int((tokens[max(0, place - window) : place] == tokens[place]).sum())
            for place in range(len(tokens))
        ]
        assert words.count_before(tokens, window).tolist() == slow


@pytest.mark.heavy
def test_solved_weights_are_a_share_each_and_beat_a_grid() -> None:
    logs = torch.randn(3, 400).sub_(3)
    weights = solve_weights(logs)
    assert float(weights.min()) >= 0
    assert float(weights.sum()) == pytest.approx(1, abs=1e-12)
    best = perplexity(mix(logs, weights))
    grid = [(a / 20, b / 20) for a in range(21) for b in range(21 - a)]
    others = [perplexity(mix(logs, torch.tensor([a, b, 1 - a - b]).clamp(0))) for a, b in grid]
    assert best <= min(others)
    assert min(others) < 1.001 * best  # and it is the same hill
    for _ in range(3_000):  # expectation maximisation comes to the same place
        pulls = (logs.double() - mix(logs, weights)).exp().mean(1)
        torch.testing.assert_close(weights * pulls, weights, atol=1e-8, rtol=0)
        weights = weights * pulls


def test_diverged_scores_count_as_infinitely_bad(
    model: LanguageModel, corpus: Corpus, text: Passage, folder: Path
) -> None:
    assert perplexity(torch.tensor([math.nan, -1.0])) == math.inf
    assert perplexity(torch.full((3,), -1e5)) == math.inf
    wild = mbpa.Adapted(mbpa.Gradient(lr=1e38, steps=3), k=5)
    positions = range(len(text))
    found = score_adapted(model.decoder, retrieve(text, WINDOW, 5), wild, positions, mbpa.Engine())
    assert not found.isnan().any()
    logs = torch.stack([text.own, found])
    assert perplexity(mix(logs, solve_weights(logs))) <= perplexity(text.own) + 1e-6
    config = replace(CONFIG, dynamic=replace(CONFIG.dynamic, lr=1e30))
    context = context_in(folder, "wild")
    with context.workspace.alone():
        parts = Text(model, corpus, config, context, 0, "valid").parts(METHODS[evaluation.ALL])
    assert perplexity(mix(parts, solve_weights(parts))) == math.inf
    assert perplexity(parts[0]) == math.inf
    assert float(solve_weights(torch.full((2, 3), -math.inf)).sum()) == 1


def test_what_only_harms_gets_no_weight_and_twins_share() -> None:
    good = torch.randn(300).sub_(3)
    close(solve_weights(torch.stack([good - 2, good, good - 1])), torch.tensor([0.0, 1.0, 0.0]))
    twins = solve_weights(torch.stack([good, good]))
    assert float(twins.sum()) == pytest.approx(1)
    never = solve_weights(torch.stack([good, torch.full_like(good, -math.inf)]))
    close(never, torch.tensor([1.0, 0.0]))


# Dynamic evaluation


def naive_scale(model: LanguageModel, tokens: Tensor, settings: Dynamic) -> list[Tensor]:
    model = copy.deepcopy(model)
    places = tokens[: len(tokens) // 4 * 4].view(4, -1)
    state, squares = model.initial_state(4), [0.0 * p.detach() for p in model.parameters()]
    for step in range(settings.statistics):
        part = places[:, 5 * step : 5 * step + 6]
        model.zero_grad()
        logits, state = model(part[:, :-1], (state[0].detach(), state[1].detach()))
        loss = -logits.log_softmax(2).gather(2, part[:, 1:, None]).mean()
        loss.backward()
        squares = [s + p.grad**2 for s, p in zip(squares, model.parameters(), strict=True)]
    return [(square / settings.statistics) ** 0.5 for square in squares]


def test_dynamic_evaluation_is_the_published_rule_and_leaves_the_network_alone(
    model: LanguageModel, corpus: Corpus
) -> None:
    settings, start = CONFIG.dynamic, copy.deepcopy(model.state_dict())
    scale = gradient_scale(model, corpus.train, settings)
    for found, expected in zip(scale, naive_scale(model, corpus.train, settings), strict=True):
        torch.testing.assert_close(found, expected)
    tokens = corpus.valid[:43]
    inputs = torch.cat([torch.tensor([first_word(corpus)]), tokens[:-1]])
    found = DynamicEvaluation(model, lambda p: RMSUpdate(p, scale, settings), settings, None).read(
        inputs, tokens
    )

    learner = copy.deepcopy(model)
    trained_weights = [p.detach().clone() for p in learner.parameters()]
    mean = torch.cat([s.flatten() for s in scale]).mean()
    state, expected = learner.initial_state(1), []
    for begin in range(0, 43, 5):
        part = slice(begin, begin + 5)
        logits, state = learner(inputs[None, part], state)
        state = state[0].detach(), state[1].detach()
        logs = logits[0].log_softmax(1)[range(len(tokens[part])), tokens[part]]
        expected.append(logs.detach())
        learner.zero_grad()
        (-logs.mean()).backward()
        for p, was, rms in zip(learner.parameters(), trained_weights, scale, strict=True):
            step = settings.lr * p.grad / (rms + settings.epsilon)
            pull = (settings.decay * rms / mean).clamp(max=1) * (was - p.data)
            p.data = p.data - step + pull
    close(found.own, torch.cat(expected))
    plain = read_passage(model, tokens, first_word(corpus)).own
    close(found.own[:5], plain[:5])  # scored before anything is learnt
    assert (found.own[5:] - plain[5:]).abs().max() > 1e-3
    for name, value in model.state_dict().items():
        assert torch.equal(value, start[name])


@pytest.mark.parametrize(("tokens", "segment"), [(20, 5), (20, 50), (11, 5), (1, 5)])
def test_the_shortest_training_text_gives_a_rule_without_nan(
    model: LanguageModel, corpus: Corpus, tokens: int, segment: int
) -> None:
    settings = replace(CONFIG.dynamic, segment=segment, statistics_batch=100)
    scale = gradient_scale(model, corpus.train[:tokens], settings)
    assert all(bool(part.isfinite().all()) for part in scale)
    assert (float(scale[0].max()) > 0) == (tokens > 1)
    params = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    for p in params:
        p.grad = torch.zeros_like(p)
    RMSUpdate(params, scale, settings).step()
    assert all(bool(p.isfinite().all()) for p in params)


def test_mbpa_on_top_adapts_the_layer_as_it_is_to_keys_as_they_were(
    model: LanguageModel, corpus: Corpus
) -> None:
    local = SoftmaxAdaptation(lr=0.5, steps=2, k=6)
    settings = replace(CONFIG.dynamic, adam_lr=5e-3)
    tokens = corpus.valid[:30]
    inputs = torch.cat([torch.tensor([first_word(corpus)]), tokens[:-1]])
    heads: list[Any] = []

    class Watched(AdamUpdate):
        def step(self) -> None:
            heads.append(copy.deepcopy(network._model.decoder))  # as it was for this segment
            super().step()

    network = DynamicEvaluation(model, lambda p: Watched(p, 5e-3, None), settings, local, 12)
    found = network.read(inputs, tokens)
    for place in range(7, 30):
        keys, values = (part[max(0, place - 12) : place] for part in (found.keys, tokens))
        distances = (keys - found.keys[place]).square().sum(1)
        near = distances.argsort()[:6]
        weights = 1 / (1e-3 + distances[near])
        rule, weights = mbpa.Gradient(0.5, 2), weights / weights.sum()
        head = adapt_one(
            heads[place // 5], rule, "cross_entropy", None, keys[near], values[near], weights
        )
        close(found.adapted[place], head(found.keys[place]).log_softmax(0)[tokens[place]], 1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rule", ["rms", "adam", "adam with moments"])
@pytest.mark.parametrize("on_top", [None, SoftmaxAdaptation(lr=0.5, steps=2, k=6)])
def test_what_is_recorded_learns_as_what_is_not(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, rule: str, on_top: SoftmaxAdaptation | None
) -> None:
    torch.manual_seed(0)
    model, settings = LanguageModel(len(corpus.words), 24, 16).cuda(), CONFIG.dynamic
    scale = gradient_scale(model, corpus.train.cuda(), settings)
    tokens = corpus.valid[:113].cuda()  # the last segment is not whole
    inputs = torch.cat([torch.tensor([first_word(corpus)], device="cuda"), tokens[:-1]])
    trainer = torch.optim.Adam([p.detach().cpu().requires_grad_() for p in model.parameters()])
    for p in trainer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    trainer.step()
    moments = trainer.state_dict() if rule == "adam with moments" else None

    def make(params: Params) -> Update:
        if rule == "rms":
            return RMSUpdate(params, scale, replace(settings, lr=1e-3))
        return AdamUpdate(params, 1e-3, moments)

    found = []
    for first in (10**9, 3):
        monkeypatch.setattr(recording, "WARM_UP_CALLS", first)
        network = DynamicEvaluation(model, make, settings, on_top, 12)
        begun = network.read(inputs[:50], tokens[:50])  # ten segments, six of them replayed
        again = DynamicEvaluation(model, make, settings, on_top, 12)
        again.resume(network.state(), Passage(begun.keys, tokens[:50], begun.own))
        ended = again.read(inputs[50:], tokens[50:])
        found.append([torch.cat([getattr(r, n) for r in (begun, ended)]) for n in vars(begun)])
    plain = read_passage(model, tokens, first_word(corpus)).own
    for slowly, recorded in zip(*found, strict=True):
        torch.testing.assert_close(recorded, slowly, rtol=1e-3, atol=1e-4)
    assert (found[1][1][50:] - plain[50:]).abs().max() > 1e-3  # it has learnt


def test_a_network_that_has_been_evaluated_is_gone_with_its_last_reference(
    model: LanguageModel, corpus: Corpus
) -> None:
    settings = CONFIG.dynamic
    network = DynamicEvaluation(model, lambda p: AdamUpdate(p, 1e-3, None), settings, None)
    network.read(corpus.valid[:12], corpus.valid[1:13])
    gone, learner = weakref.ref(network), weakref.ref(network._model)
    gc.disable()  # which would find it in a cycle, too, but when it pleases
    try:
        del network
        assert gone() is None
        assert learner() is None
    finally:
        gc.enable()


def test_adam_goes_on_with_the_moments_of_training(model: LanguageModel, corpus: Corpus) -> None:
    params = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    trainer = torch.optim.Adam(params, lr=0.1, betas=(0.0, 0.9), weight_decay=0.5)
    for p in params:
        p.grad = torch.full_like(p, 4.0)
    trainer.step()
    kept = copy.deepcopy(trainer.state_dict())
    before = [p.detach().clone() for p in params]
    update = AdamUpdate(params, 1e-3, trainer.state_dict())
    for p in params:
        p.grad = torch.ones_like(p)
    update.step()
    for place, (p, was) in enumerate(zip(params, before, strict=True)):
        square = (0.9 * kept["state"][place]["exp_avg_sq"] + 0.1) / (1 - 0.9**2)
        close(p.detach(), was - 1e-3 / square.sqrt(), 1e-6)  # no weight decay
    assert trainer.state_dict()["state"][0]["step"] == kept["state"][0]["step"]


# Whole evaluations, interrupted and not


class Killed(BaseException):
    """Not an `Exception`: nothing may catch it."""


class Fragile(Workspace):
    """Dies after about every third save."""

    saves, every = 0, 3

    def save(self, name: str, state: Any) -> None:
        super().save(name, state)
        Fragile.saves += 1
        if Fragile.saves % Fragile.every == 0:
            raise Killed


def until_it_ends(work: Any) -> tuple[Any, int]:
    """Repeat work until it ends; return its result and how often it was killed."""
    for deaths in itertools.count():
        try:
            return work(), deaths
        except Killed:
            pass
    raise AssertionError


def untimed(records: list[Record]) -> list[Record]:
    return [r for r in records if r["name"] != "seconds"]


@pytest.fixture(scope="module")
def records(model: LanguageModel, corpus: Corpus, folder: Path) -> list[Record]:
    context = context_in(folder, "whole")
    with context.workspace.alone():
        return evaluate(model, corpus, CONFIG, context, 0)


def test_all_methods_are_scored_on_both_texts_with_weights_of_the_first(
    model: LanguageModel, corpus: Corpus, records: list[Record], folder: Path
) -> None:
    found = {(r["method"], r["split"]): r["value"] for r in records if r["name"] == "perplexity"}
    both = itertools.product((*METHODS, *evaluation.GATED_METHODS), ("valid", "test"))
    papers = itertools.product(evaluation.PAPER_WEIGHTS, ("test",))
    assert set(found) == {*both, *papers}
    assert all(r["corpus"] == "ptb" for r in records)
    first = first_word(corpus)
    valid, test = (read_passage(model, tokens, first) for tokens in (corpus.valid, corpus.test))
    assert found["LSTM", "test"] == pytest.approx(math.exp(-test.own.double().mean()), rel=1e-6)
    caches = [score_cache(t, WINDOW, (0.5,), range(TOKENS))[0] for t in (valid, test)]
    weights = solve_weights(torch.stack([valid.own, caches[0]]))
    expected = perplexity(mix(torch.stack([test.own, caches[1]]), weights))
    assert found["LSTM + cache", "test"] == pytest.approx(expected, rel=1e-6)
    assert found["LSTM + MbPA + cache", "valid"] <= found["LSTM + cache", "valid"] + 1e-9
    last = [r["method"] for r in records if r["name"] != "weight"][-7:-1]  # and one of Adam's
    assert set(last) == {evaluation.DYNAMIC, evaluation.ALL, evaluation.EVERYTHING}
    timed = {r["method"] for r in records if r["name"] == "seconds"}
    assert {"LSTM", "LSTM + cache", "LSTM + MbPA", evaluation.LOOP} == timed


def test_what_takes_long_can_be_left_out(
    model: LanguageModel, corpus: Corpus, folder: Path
) -> None:
    assert not PRESETS["quick"].dynamic.on_top
    dynamic = replace(CONFIG.dynamic, on_top=False, adam_lr=0.0)
    short = replace(corpus, valid=corpus.valid[:3], test=corpus.test[:2])
    context = context_in(folder, "less")
    with context.workspace.alone():
        found = evaluate(model, short, replace(CONFIG, dynamic=dynamic), context, 0)
    assert {r["method"] for r in found if r["name"] == "perplexity"} == {
        "LSTM",
        "LSTM + cache",
        "LSTM + MbPA",
        "LSTM + MbPA + cache",
        "memory only",
        "LSTM + dynamic evaluation",
        *evaluation.GATED_METHODS,
        evaluation.EVERYTHING,
        *evaluation.PAPER_WEIGHTS,
    }


@pytest.mark.heavy
def test_an_evaluation_that_is_killed_again_and_again_ends_with_the_same(
    model: LanguageModel,
    corpus: Corpus,
    records: list[Record],
    folder: Path,
) -> None:
    def work() -> list[Record]:
        context = context_in(folder, "killed", Fragile)
        with context.workspace.alone():
            return evaluate(model, corpus, CONFIG, context, 0, tokens_per_save=45)

    found, deaths = until_it_ends(work)
    assert deaths > 5
    for one, other in zip(untimed(found), untimed(records), strict=True):
        assert one.pop("value") == pytest.approx(other["value"], rel=1e-5)
        assert one.items() <= other.items()


def test_adapting_few_words_states_its_error(
    model: LanguageModel, corpus: Corpus, folder: Path
) -> None:
    def score(config: LanguageConfig, name: str) -> tuple[Tensor, dict[str, float]]:
        context = context_in(folder, name)
        with context.workspace.alone():
            text = evaluation.Text(model, corpus, config, context, 0, "test")
            compared = text.compare_with_all_words()
            return text.parts(("MbPA",))[0], {r["name"]: r["value"] for r in compared}

    exact, nothing = score(CONFIG, "all words")
    found, errors = score(replace(CONFIG, adapted_words=8), "few words")
    assert not nothing
    assert 0 < (found - exact).abs().mean() < 0.05
    assert errors == {
        "mean_error": pytest.approx(float((found - exact).abs().mean()), rel=1e-4),
        "largest_error": pytest.approx(float((found - exact).abs().max()), rel=1e-4),
        "mean_log_probability": pytest.approx(float(found.mean())),
        "exact_mean_log_probability": pytest.approx(float(exact.mean())),
    }


# Words


def test_words_are_put_into_equal_buckets_from_frequent_to_rare(corpus: Corpus) -> None:
    before, after = -torch.rand(2, TOKENS).double() - 1
    found = measure_improvements(corpus, corpus.test, before, after)
    means = [r for r in found if r["name"] == "improvement"]
    sizes = [int(str(r["words"])) for r in means]
    assert len(sizes) == 5
    assert max(sizes) - min(sizes) <= 1
    assert sum(sizes) == len(corpus.test.unique())
    assert sum(int(str(r["tokens"])) for r in means) == TOKENS
    for one, next_one in itertools.pairwise(means):
        assert one["least_frequent"] >= next_one["most_frequent"]

    counts, words = frequencies(corpus), sorted(set(corpus.test.tolist()))
    words.sort(key=lambda word: -int(counts[word]))  # stable, as it should be
    falls = []
    for word in words[: sizes[0]]:
        own = [math.exp(-float(logs[corpus.test == word].mean())) for logs in (before, after)]
        falls.append(100 * (1 - own[1] / own[0]))
    assert means[0]["value"] == pytest.approx(sum(falls) / len(falls))
    inside = torch.isin(corpus.test, torch.tensor(words[: sizes[0]]))
    ratio = math.exp(float(-after[inside].mean())) / math.exp(float(-before[inside].mean()))
    overall = next(r["value"] for r in found if r["name"] == "improvement_of_tokens")
    assert overall == pytest.approx(100 * (1 - ratio))


def test_examples_are_the_largest_gains_with_memories_from_before(
    corpus: Corpus, text: Passage
) -> None:
    after, before = -torch.rand(2, TOKENS).double() - 1
    retrieval = retrieve(text, WINDOW, 8)
    found = find_improved_words(corpus, retrieval, SoftmaxAdaptation(k=8), before, after)
    gains = (after - before).tolist()
    assert found[0]["value"] == pytest.approx(max(gains))
    words = [str(record["word"]) for record in found]
    assert len(set(words)) == len(words) == 8
    for record in found:
        place = int(str(record["position"]))
        assert corpus.words[text.targets[place]] == record["word"]
        own = [corpus.words[word] for word in text.targets[max(0, place - 8) : place]]
        assert record["context"] == " ".join(own)
        for memory in filter(None, str(record["memories"]).split("; ")):
            told, came = memory.rsplit(" (", 1)[0].split("→")
            seen = " ".join(
                corpus.words[w] for w in text.targets[max(0, place - WINDOW - 4) : place]
            )
            assert f"{told.strip()} {came.strip()}".strip() in seen
    raised = 0
    for record in found:  # first what has the word itself
        place = int(str(record["position"]))
        near = retrieval.neighbors(range(place, place + 1), 8, WINDOW + 1).ids[0]
        words = [corpus.words[word] for word in text.targets[near[near >= 0]]]
        assert record["with_the_word"] == words.count(str(record["word"]))
        if record["word"] in words:
            raised += 1
            assert f"→ {record['word']} (" in str(record["memories"]).split("; ")[0]
    assert raised > 0


# The search


SEARCHED = tuning.make_search_config(
    replace(CONFIG, search=SearchBudget(tokens=12, dynamic_tokens=40, max_neighbor_steps=60))
)
GRIDS = Grids(
    windows=(30, 60),
    cache_scales=(0.1, 0.5),
    paper_windows=(30, 60),
    paper_counts=(16,),
    paper_rates=(0.1, 1.0),
    paper_steps=(3,),
    start=SoftmaxAdaptation(lr=1.0, steps=3, k=8),
    one_step_rates=(0.5, 2.0),
    rates=(0.5, 2.0),
    steps=(3,),
    counts=(4, 20, 30),
    bandwidths=(1.0,),
    dot_factors=(0.2,),
    rate_factors=(0.7, 1.0),
    step_factors=(1.0, 1.5),
    decays=(0.05,),
    optimum_count=4,
    priors=(0.1,),
    dynamic_rates={2e-3: (5e-4, 1e-3), 2e-4: (6e-5,)},
    dynamic_decays=(0.0,),
    dynamic_rate_factors=(1.0, 2.0),
    dynamic_decay_factors=(1.0, 2.0),
    dynamic_epsilon_factors=(),
    dynamic_segments=(10,),
    rounds=3,
    gate_pool=4,
    adam_rates=(3e-5, 1e-4),
)


class Ticking:
    """A clock by which every judgement takes one second; it may interrupt the search."""

    def __init__(self, stop_after: int = -1) -> None:
        self.calls, self.stop_after = 0, stop_after

    def __call__(self) -> float:
        if self.calls == self.stop_after:
            raise KeyboardInterrupt
        self.calls += 1
        return float(self.calls)


def search_in(
    context: Context, corpus: Corpus, clock: Ticking, config: LanguageConfig = SEARCHED
) -> list[Record]:
    with context.workspace.alone():
        return tuning.search_settings(config, context, corpus, GRIDS, clock)


@pytest.fixture(scope="module")
def whole(model: LanguageModel, corpus: Corpus, folder: Path) -> list[Record]:
    return search_in(context_in(folder, "search"), corpus, Ticking())


def perplexities(records: list[Record], method: str) -> list[Record]:
    return [r for r in records if (r["name"], r.get("method")) == ("perplexity", method)]


def choices(records: list[Record]) -> dict[str, Any]:
    return {str(r["setting"]): r["value"] for r in records if r["name"] == "chosen"}


@pytest.mark.heavy
def test_an_interrupted_search_resumes_and_ends_with_the_same_records(
    corpus: Corpus, folder: Path, whole: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    context, computed = context_in(folder, "interrupted search"), [0]
    real = tuning.score_adapted

    def count(*arguments: Any) -> Tensor:
        computed[0] += 1
        return real(*arguments)

    monkeypatch.setattr(tuning, "score_adapted", count)
    for calls in (20, 60):
        with pytest.raises(KeyboardInterrupt):
            search_in(context, corpus, Ticking(calls))
    assert search_in(context, corpus, Ticking()) == whole
    assert computed[0] <= len(perplexities(whole, evaluation.MBPA)) + 2  # those interrupted
    monkeypatch.setattr(tuning, "score_adapted", lambda *_: pytest.fail("it was done"))
    assert search_in(context, corpus, Ticking()) == whole


def test_a_search_tries_everything_once_in_a_fixed_order(whole: list[Record]) -> None:
    tried = [r for r in whole if r["name"] == "perplexity"]
    named = [tuple((key, r[key]) for key in r if key != "value") for r in tried]
    assert len(set(named)) == len(named)
    assert {r["split"] for r in tried} == {"valid"}
    assert all(r["name"] in ("perplexity", "chosen") for r in whole)  # nothing was left out
    order = [str(r.get("setting", r.get("rule", r.get("method")))) for r in whole]
    stages = ("cache.scale", "mbpa.k", "gate.first.memory", "map", "dynamic.lr")
    places = [order.index(name) for name in stages]
    assert places == sorted(places)  # the optimum is for comparison only
    assert {r["tokens"] for r in tried if "scale" in r} == {13}
    judged = {r["tokens"] for r in tried if "rule" in r}
    assert judged == {13, TOKENS}  # the best again on all tokens
    mbpa = perplexities(whole, evaluation.MBPA)
    assert {r["kernel"] for r in mbpa} == {"inverse_distance", "uniform", "gaussian", "exp_dot"}
    assert {r["decay"] for r in mbpa} == {0.0, 0.05} or all(
        choices(whole)[f"{part}.steps"] == 1 for part in ("mbpa", "combined")
    )
    assert all(int(str(r["k"])) * int(str(r["steps"])) <= 60 for r in mbpa)


def test_the_chosen_settings_are_those_that_did_best(
    model: LanguageModel, text: Passage, whole: list[Record]
) -> None:
    chosen = choices(whole)
    settled = apply_settings(SEARCHED, chosen)
    assert settled.mbpa != SEARCHED.mbpa
    assert settled.dynamic.mbpa.steps <= 5
    cache = min(perplexities(whole, evaluation.CACHE), key=value_of)
    assert (settled.cache.window, settled.cache.scale) == (cache["window"], cache["scale"])
    positions = range(TOKENS)
    for method, local in ((evaluation.MBPA, settled.mbpa), (evaluation.BOTH, settled.combined)):
        tried = [r for r in perplexities(whole, method) if r["rule"] == "gradient"]
        mine = [r for r in tried if r["window"] == settled.memory]
        by_few = sorted((r for r in mine if r["tokens"] == 13), key=value_of)
        finalists = [r for r in mine if r["tokens"] == TOKENS]
        names = list(vars(local))
        assert [by_few[0][name] for name in names] in [[r[n] for n in names] for r in finalists]
        best = min(finalists, key=value_of)
        assert {name: best[name] for name in vars(local)} == vars(local)
        predictor = local.predictor(settled.memory)
        retrieval = retrieve(text, settled.memory, local.k)
        parts = [score_adapted(model.decoder, retrieval, predictor, positions, mbpa.Engine())]
        if method == evaluation.BOTH:
            window, scales = settled.cache.window, (settled.cache.scale,)
            parts.append(score_cache(text, window, scales, positions)[0])
        logs = torch.stack([text.own, *parts])
        found = perplexity(mix(logs, solve_weights(logs)))
        assert found == pytest.approx(value_of(best), rel=1e-4)


def test_the_memory_is_the_one_with_which_both_mixtures_do_best(whole: list[Record]) -> None:
    products = {}
    for window in (30, 60):
        products[window] = math.prod(
            min(
                value_of(r)
                for r in perplexities(whole, method)
                if (r["window"], r["rule"], r["tokens"]) == (window, "gradient", 13)
            )
            for method in (evaluation.MBPA, evaluation.BOTH)
        )
    assert choices(whole)["memory"] == min(products, key=lambda window: products[window])


def test_dynamic_evaluation_is_searched_until_nothing_gains_and_judged_on_all_text(
    whole: list[Record],
) -> None:
    names = ("lr", "epsilon", "decay", "segment")
    found = perplexities(whole, evaluation.DYNAMIC)
    tried, finals = (
        {tuple(r[name] for name in names): value_of(r) for r in found if r["tokens"] == tokens}
        for tokens in (40, TOKENS)
    )
    first = [(5e-4, 2e-3, 0.002, 5), (1e-3, 2e-3, 0.002, 5), (6e-5, 2e-4, 0.002, 5)]
    assert list(tried)[:3] == first
    lr, epsilon, *_ = min(first, key=lambda each: tried[each])
    assert list(tried)[3] == (lr, epsilon, 0.0, 5)
    lr, epsilon, decay, segment = min(tried, key=lambda each: tried[each])
    assert (2 * lr, epsilon, decay, segment) in tried
    assert (lr, epsilon, 2 * decay, segment) in tried
    assert {each[3] for each in tried} == {5, 10}
    assert list(finals) == sorted(tried, key=lambda each: tried[each])[: len(finals)]
    assert len(finals) == SEARCHED.search.finalists
    chosen = choices(whole)
    best = min(finals, key=lambda each: finals[each])
    assert tuple(chosen[f"dynamic.{name}"] for name in names) == best
    adam = perplexities(whole, evaluation.ADAM)
    assert [r["adam_lr"] for r in adam if r["tokens"] == 40] == [3e-5, 1e-4]
    final = [r for r in adam if r["tokens"] == TOKENS]
    assert len(final) == 2
    assert chosen["dynamic.adam_lr"] == min(final, key=value_of)["adam_lr"]
    alone = {r["tokens"]: r.get("part") for r in perplexities(whole, evaluation.LSTM)}
    assert alone == {TOKENS: None, 13: "spread", 40: "beginning"}


@pytest.mark.heavy
@pytest.mark.parametrize("seconds", [0.5, 4.0, 9.0])
def test_a_search_that_runs_out_of_time_chooses_from_what_it_tried(
    seconds: float,
    corpus: Corpus,
    folder: Path,
    whole: list[Record],
    capsys: pytest.CaptureFixture,
) -> None:
    config = replace(SEARCHED, search=replace(SEARCHED.search, seconds=seconds))
    context = context_in(folder, f"search of {seconds} s")
    few = search_in(context, corpus, Ticking(), config)
    explored = [r for r in few if r.get("tokens") == 13 and "window" in r]
    tried = [r for r in explored if r.get("method") != evaluation.BOTH]
    assert len(tried) == math.ceil(seconds)  # one second each
    assert [r for r in whole if r in tried] == tried
    # Dynamic evaluation has as many seconds of its own.
    dynamic = perplexities(few, evaluation.DYNAMIC) + perplexities(few, evaluation.ADAM)
    assert len([r for r in dynamic if r["tokens"] == 40]) == math.ceil(seconds)
    chosen = choices(few)
    assert ("memory" in chosen) == (seconds > 4)  # the cache comes first
    assert {"cache.window", "cache.scale"} <= set(chosen)
    assert "dynamic.lr" in chosen
    left_out = {r["stage"]: r["value"] for r in few if r["name"] == "settings_left_out"}
    assert left_out.get("LSTM + dynamic evaluation: rates", 0) == max(0, 3 - math.ceil(seconds))
    error = capsys.readouterr().err
    assert f"mbpa: the budget of {seconds:g} s is used up" in error
    assert all(f"{stage} ({number})" in error for stage, number in left_out.items())


def test_what_only_a_search_depends_on_makes_no_other_run() -> None:
    experiment, usual = find("language"), PRESETS["smoke"]
    other = replace(usual, search=SearchBudget(tokens=7))
    assert running.Run(experiment, "smoke", other, ROOT).label == "smoke"
    assert "custom" in running.Run(experiment, "smoke", other, ROOT, "tune").label
    assert "custom" in running.Run(experiment, "smoke", replace(other, memory=7), ROOT).label
    for preset in ("paper", "paper-wikitext-2"):
        other = replace(PRESETS[preset], search=SearchBudget(tokens=7))
        assert running.Run(experiment, preset, other, ROOT / "results").label == preset


def test_a_search_looks_at_nothing_that_it_is_to_choose() -> None:
    make = tuning.make_search_config
    changed = replace(CONFIG, memory=7, mbpa=SoftmaxAdaptation(lr=3.0), cache=Cache(scale=9.0))
    changed = replace(changed, dynamic=replace(CONFIG.dynamic, lr=0.5, mbpa=SoftmaxAdaptation(k=3)))
    assert make(changed) == make(CONFIG) == make(make(changed))
    for kept in ({"on_top": False}, {"statistics": 9}, {"adam_lr": 0.0}):
        dynamic = replace(CONFIG.dynamic, **kept)
        found = dataclasses.asdict(make(replace(CONFIG, dynamic=dynamic)).dynamic)
        assert kept.items() <= found.items()
    assert make(changed).network == CONFIG.network


# The report


def told_of(config: LanguageConfig) -> dict[str, Any]:
    """Return a config as it is written to result files."""
    told: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    return told


def test_the_report_has_the_papers_numbers_beside_ours(records: list[Record]) -> None:
    config = told_of(replace(CONFIG, tokens=0, scored_tokens=0, cache=Cache(window=1_500)))
    curve: list[Record] = [
        {"name": f"training_{split}_perplexity", "epochs": epoch, "value": 200.0 / epoch}
        for epoch in (1, 2)
        for split in ("train", "valid")
    ]
    result = Result("language", "smoke", 0, config, {}, 1.0, "mbpa", records + curve)
    main, words = sections([result, replace(result, seed=1)])
    table = main.tables[0]
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["LSTM + MbPA"][3:] == ["54.8", "54.3", "−5.3"]
    cited = "AWD-LSTM + dynamic evaluation (Krause et al., 2017)"
    assert rows[cited] == ["", "", "", "51.6", "51.1", "−6.6"]
    test = next(
        r["value"]
        for r in records
        if (r["name"], r["method"], r["split"]) == ("perplexity", "LSTM + MbPA", "test")
    )
    assert rows["LSTM + MbPA"][1] == f"{test:.1f} ± 0.0"
    by_frequency, compared, by_memory, shown = words.tables
    assert [len(by_frequency.rows), len(compared.rows), len(shown.rows)] == [5, 5, 8]
    assert len(compared.columns) == 1 + len(evaluation.COMPARED)
    tokens = [int(row[1].replace(",", "")) for row in by_memory.rows]
    assert sum(tokens) == TOKENS
    assert by_memory.rows[0][0] == "0"
    for figure in (*main.figures, *words.figures):
        assert draw_figure(figure)["svg"].startswith(b"<?xml")
    assert "The cache has a window of its own: 1,500 tokens." in main.text


@pytest.mark.parametrize(
    ("changes", "has_paper"),
    [({"tokens": 0, "scored_tokens": 0}, True), ({"tokens": 0}, False), ({}, False)],
)
def test_a_part_of_a_corpus_does_not_stand_beside_the_papers_numbers(
    records: list[Record], changes: dict[str, int], has_paper: bool
) -> None:
    config = told_of(replace(CONFIG, **changes))
    table = sections([Result("language", "x", 0, config, {}, 1.0, "mbpa", records)])[0].tables[0]
    assert (len(table.columns), len(table.rows)) == ((7, 20) if has_paper else (4, 12))
    assert ("Not to be compared" in table.note) == (not has_paper)
    assert table.note.startswith("Ours: one network." if has_paper else "One network.")


def test_the_loop_is_timed_for_gradients_where_mbpa_solves_for_the_optimum(
    model: LanguageModel, corpus: Corpus, folder: Path
) -> None:
    config = replace(
        CONFIG,
        mbpa=SoftmaxAdaptation(rule="map", steps=1, k=4),
        combined=SoftmaxAdaptation(rule="map", k=4),
    )
    short = replace(corpus, test=corpus.test[:10])
    context = context_in(folder, "optimum")
    with context.workspace.alone():
        text = Text(model, short, config, context, 0, "test")
        text.parts(METHODS[evaluation.BOTH] + METHODS[evaluation.MBPA])
        found = text.timings()
    (loop,) = (r for r in found if r["method"] == evaluation.LOOP)
    assert (loop["rule"], loop["steps"], loop["k"]) == ("gradient", 1, 4)
    result = Result("language", "x", 0, told_of(config), {}, 1.0, "mbpa", found)
    (times,) = figures._times(figures.Scores([result]))
    assert times.note == "MbPA: 4 neighbours, the optimum."
    (row,) = (row for row in times.rows if row[0] == evaluation.LOOP)
    assert "autograd, 1 step along gradients instead, neighbours" in row[1]


def test_the_report_of_a_search_draws_rates_and_steps(whole: list[Record]) -> None:
    config = told_of(SEARCHED)
    dynamic = perplexities(whole, evaluation.DYNAMIC)
    more: Record = {"stage": "MbPA: kernels", "name": "settings_left_out", "value": 3}
    older: Record = {"name": "settings_left_out", "value": 4}  # as searches used to write it
    diverged: Record = {**dynamic[0], "value": None}
    records = [more, older, diverged, *whole]
    result = Result("language", "tune-smoke", None, config, {}, 1.0, "mbpa", records)
    first, section = make_sections(find("language"), [result])
    assert first.tables[0].title == "Chosen settings"
    assert first.tables[0].note == "Settings that were not tried, for lack of time: 7."
    assert section.tables[0].note.endswith("Not tried for lack of time: MbPA: kernels (3).")
    rows = {row[0]: row[1:] for row in section.tables[0].rows}
    assert {"LSTM", "LSTM + cache", "LSTM + MbPA"} < set(rows)
    settings, tokens, alone, best = rows["LSTM + dynamic evaluation"]
    tried = [r for r in dynamic if r["tokens"] == 40]
    assert (settings, tokens) == (str(len(tried)), str(TOKENS))
    finals = [value_of(r) for r in dynamic if r["tokens"] == TOKENS]
    assert best == f"{min(finals):.2f}"
    (own,) = (value_of(r) for r in perplexities(whole, evaluation.LSTM) if "part" not in r)
    assert alone == f"{own:.2f}"
    assert draw_figure(section.figures[0])["svg"].startswith(b"<?xml")


def test_settings_that_make_no_sense_are_refused() -> None:
    for make, name in (
        (lambda: Cache(scale=0.0), "scale"),
        (lambda: SoftmaxAdaptation(k=0), "k"),
        (lambda: SoftmaxAdaptation(prior=0.0), "prior"),
        (lambda: Dynamic(segment=0), "segment"),
        (lambda: SearchBudget(seconds=0.0), "seconds"),
        (
            lambda: SearchBudget(max_neighbor_steps=0),
            "max_neighbor_steps must be at least 1, got 0",
        ),
        (lambda: SearchBudget(seconds=math.inf), "seconds must be finite and positive, got inf"),
        (lambda: SoftmaxAdaptation(prior=math.inf), "prior must be finite and positive, got inf"),
        (
            lambda: SoftmaxAdaptation(decay=math.nan),
            "decay must be finite and not negative, got nan",
        ),
        (lambda: Dynamic(lr=math.inf), "lr must be finite and positive, got inf"),
        (lambda: Dynamic(adam_lr=math.inf), "adam_lr must be finite and not negative, got inf"),
    ):
        with pytest.raises(ValueError, match=name):
            make()
    assert LanguageConfig().combined == SoftmaxAdaptation()
