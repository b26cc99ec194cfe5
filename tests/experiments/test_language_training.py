"""The language model: its computation, training, caching, resuming, and the user's own text."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from experiments import cli
from experiments.data import END_OF_LINE, Corpus
from experiments.errors import ExperimentError
from experiments.experiment import Context
from experiments.language import curve_records, recording, training
from experiments.language.config import PRESETS, LanguageConfig, NetworkSizes, TrainingSettings
from experiments.language.corpus import UNKNOWN, frequencies, read_corpus
from experiments.language.network import (
    Drawn,
    Dropouts,
    LanguageModel,
    State,
    draw_masks,
    products,
    side_by_side,
)
from experiments.language.training import (
    TrainingRun,
    adam_state,
    learning_curve,
    measure_perplexity,
    rate_share,
    streams_of,
    train_or_load,
)
from experiments.workspace import Workspace

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
DROPPED = Dropouts(words=0.2, input=0.3, recurrent=0.4, output=0.3, projected=0.2)
TINY = LanguageConfig(
    network=NetworkSizes(hidden=12, embedding=8),
    training=TrainingSettings(
        epochs=3, batch=4, bptt=7, lr=0.01, averages=(0.9, 0.5), dropouts=DROPPED
    ),
)


def a_context(folder: Path) -> Context:
    return Context(CPU, None, Workspace(folder / "work"), False, folder / "cache")


def a_corpus(tokens: int = 300, words: int = 11, seed: int = 0) -> Corpus:
    draws = torch.Generator().manual_seed(seed)
    train, valid, test = (
        torch.randint(words, (n,), generator=draws) for n in (tokens, tokens // 2, tokens // 2)
    )
    return Corpus(train, valid, test, tuple(f"w{i}" for i in range(words)))


def a_model(words: int = 11, hidden: int = 5, embedding: int = 3) -> LanguageModel:
    model = LanguageModel(words, hidden, embedding)
    torch.nn.init.normal_(model.decoder.bias)
    torch.nn.init.normal_(model.decoder.weight)
    return model


def by_hand(
    model: LanguageModel, tokens: Tensor, state: State, drawn: Drawn | None = None
) -> tuple[Tensor, Tensor, State]:
    """Compute the network token by token from the equations of an LSTM."""
    lstm, units = model.lstm, model.lstm.hidden_size
    recurrent = lstm.weight_hh_l0
    if drawn is not None and drawn.recurrent is not None:
        recurrent = recurrent * drawn.recurrent
    rows, outputs, ends = [], [], []
    for b, sequence in enumerate(tokens):
        h, c = state[0][0, b], state[1][0, b]
        for word in sequence:
            x = model.embedding.weight[word]
            if drawn is not None:
                x = x * drawn.words[word] * drawn.input[b, 0]
            gates = lstm.weight_ih_l0 @ x + lstm.bias_ih_l0 + recurrent @ h + lstm.bias_hh_l0
            i, f, o = (gates[g * units : (g + 1) * units].sigmoid() for g in (0, 1, 3))
            c = f * c + i * gates[2 * units : 3 * units].tanh()
            h = o * c.tanh()
            outputs.append(h)
            seen = model.projection.weight @ (h if drawn is None else h * drawn.output[b, 0])
            rows.append(seen if drawn is None else seen * drawn.projected[b, 0])
        ends.append((h, c))
    shape = *tokens.shape, -1
    end = tuple(torch.stack([pair[part] for pair in ends])[None] for part in (0, 1))
    return torch.stack(rows).view(shape), torch.stack(outputs).view(shape), (end[0], end[1])


def gradients(model: LanguageModel, loss: Tensor) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {n: g for n, g in zip(named, found, strict=True) if g is not None}


# What the network computes


def test_states_are_those_of_an_lstm_written_by_hand() -> None:
    model = a_model()
    tokens, start = torch.randint(11, (2, 6)), (torch.randn(1, 2, 5), torch.randn(1, 2, 5))
    expected, _, end = by_hand(model, tokens, start)
    first, between = model.states(tokens[:, :4], start)
    second, state = model.states(tokens[:, 4:], between)
    torch.testing.assert_close(torch.cat([first, second], 1), expected)
    torch.testing.assert_close(state, end)
    logits, _ = model(tokens, start)
    torch.testing.assert_close(logits, expected @ model.decoder.weight.T + model.decoder.bias)


@pytest.mark.parametrize("multiple", [1, 8])
def test_what_is_dropped_is_the_same_through_a_sequence_and_gradients_reach_the_weights(
    multiple: int,
) -> None:
    model = a_model()
    tokens, start = torch.randint(11, (3, 6)), (torch.randn(1, 3, 5), torch.randn(1, 3, 5))
    drawn = draw_masks(model, 3, DROPPED, torch.Generator().manual_seed(1))
    noisy = model.noisy(tokens, start, drawn, multiple)
    states, outputs, end = by_hand(model, tokens, start, drawn)
    torch.testing.assert_close(noisy.outputs, outputs)
    torch.testing.assert_close(noisy.dropped, outputs * drawn.output)
    torch.testing.assert_close(noisy.state, end)
    logits = model.decoder(states)
    torch.testing.assert_close(noisy.logits[..., :11], logits)
    assert noisy.logits.shape[-1] % multiple == 0
    assert noisy.logits[..., 11:].exp().sum() == 0
    targets = torch.randint(11, (3, 6))

    def loss(logits: Tensor, outputs: Tensor) -> Tensor:
        return functional.cross_entropy(logits.mT, targets) + outputs.square().sum()

    got = gradients(model, loss(noisy.logits, noisy.outputs))
    expected = gradients(model, loss(logits, outputs))
    names = {"lstm.weight_hh_l0", "lstm.bias_hh_l0", "embedding.weight", "decoder.bias"}
    assert names < set(got)
    for name, grad in expected.items():
        torch.testing.assert_close(got[name], grad, msg=name)
    assert got["lstm.weight_hh_l0"][drawn.recurrent == 0].abs().max() == 0


def test_half_precision_rounds_but_loses_no_gradient() -> None:
    """Gradients of a mean over many tokens are too small for float16, unless they are scaled."""
    model = a_model(words=50, hidden=32, embedding=16)
    tokens, start = torch.randint(50, (40, 30)), model.initial_state(40)
    targets = torch.randint(50, (40, 30))
    drawn = draw_masks(model, 40, DROPPED, torch.Generator().manual_seed(1))

    def run(half: bool) -> tuple[Tensor, dict[str, Tensor]]:
        noisy = model.noisy(tokens, start, drawn, 8, half=half)
        loss = functional.cross_entropy(noisy.logits.flatten(0, 1), targets.flatten()) / 1e3
        return noisy.outputs, gradients(model, loss)

    outputs, got = run(half=True)
    exact, expected = run(half=False)
    assert outputs.dtype == torch.float32
    torch.testing.assert_close(outputs, exact, atol=2e-3, rtol=0)
    assert not torch.equal(outputs, exact)
    for name, gradient in expected.items():
        assert got[name].dtype == torch.float32
        assert (got[name] - gradient).norm() < 0.02 * gradient.norm(), name


def test_training_in_half_precision_learns(tmp_path: Path) -> None:
    finals = {}
    for precision in ("single", "half"):
        config = replace(TINY, training=replace(TINY.training, precision=precision))
        run = TrainingRun(config, a_corpus(), a_context(tmp_path / precision), 0, "x")
        run.finish()
        assert all(parameter.dtype == torch.float32 for parameter in run.parameters)
        finals[precision] = run.curve[-1].valid
    assert finals["half"] == pytest.approx(finals["single"], rel=0.02)
    assert finals["half"] != finals["single"]


def test_without_dropouts_training_computes_what_testing_does() -> None:
    model = a_model()
    tokens, start = torch.randint(11, (2, 4)), model.initial_state(2)
    drawn = draw_masks(model, 2, Dropouts(0, 0, 0, 0, 0), torch.Generator())
    torch.testing.assert_close(model.noisy(tokens, start, drawn, 1).logits, model(tokens, start)[0])


def test_as_much_is_dropped_as_was_asked_for_and_the_mean_is_kept() -> None:
    model = a_model(words=5000, hidden=100, embedding=64)
    drawn = draw_masks(model, 40, DROPPED, torch.Generator().manual_seed(0))
    shapes = {
        "words": (5000,),
        "input": (40, 1, 64),
        "recurrent": (400, 100),
        "output": (40, 1, 100),
        "projected": (40, 1, 64),
    }
    for name, share in vars(DROPPED).items():
        factors = getattr(drawn, name)
        assert factors.shape == shapes[name]
        assert float((factors == 0).float().mean()) == pytest.approx(share, abs=0.03)
        assert factors.max() == pytest.approx(1 / (1 - share))
    again = draw_masks(model, 40, DROPPED, torch.Generator().manual_seed(0))
    assert torch.equal(again.recurrent, drawn.recurrent)


def test_weights_for_cudnn_lie_side_by_side() -> None:
    """In one piece of memory, from its beginning, without gaps, as cuDNN wants them."""
    lstm = a_model().lstm
    for multiple, units, width in ((1, 5, 3), (8, 8, 8)):
        parts = side_by_side(lstm, None, multiple)
        assert [tuple(part.shape) for part in parts] == [
            (4 * units, width),
            (4 * units, units),
            (4 * units,),
            (4 * units,),
        ]
        place = 0
        for part in parts:
            assert part.is_contiguous()
            assert part.storage_offset() == place
            assert part.untyped_storage().data_ptr() == parts[0].untyped_storage().data_ptr()
            place += part.numel()


def test_softmax_and_embedding_are_one_matrix_that_learns_from_both() -> None:
    model = a_model()
    assert model.decoder.weight is model.embedding.weight
    tokens, targets = torch.randint(11, (2, 4)), torch.randint(11, (8,))
    drawn = draw_masks(model, 2, Dropouts(0, 0, 0, 0, 0), torch.Generator())
    start, weight = model.initial_state(2), model.decoder.weight
    states = model.states(tokens, start)[0].flatten(0, 1)

    def loss(matrix: Tensor, seen: Tensor) -> Tensor:
        return functional.cross_entropy(seen @ matrix.T + model.decoder.bias, targets)

    as_softmax = torch.autograd.grad(loss(weight, states.detach()), weight)[0]
    as_embedding = torch.autograd.grad(loss(weight.detach(), states), weight, retain_graph=True)[0]
    logits = model.noisy(tokens, start, drawn, 1).logits.flatten(0, 1)
    both = torch.autograd.grad(functional.cross_entropy(logits, targets), weight)[0]
    assert min(as_softmax.abs().max(), as_embedding.abs().max()) > 1e-3
    torch.testing.assert_close(both, as_softmax + as_embedding)


def test_the_networks_are_as_large_as_the_papers() -> None:
    millions = {}
    for preset, words in (("paper", 10_000), ("paper-wikitext-2", 33_278)):
        model = LanguageModel(words, **vars(PRESETS[preset].network))
        millions[preset] = sum(p.numel() for p in model.parameters()) / 1e6
    assert millions == {
        "paper": pytest.approx(10.0, abs=0.05),
        "paper-wikitext-2": pytest.approx(24.0, abs=0.1),
    }


def test_long_texts_are_read_at_more_places() -> None:
    tokens = (2, 100, 350, 10_000, 73_760, 217_646)
    assert [streams_of(count) for count in tokens] == [1, 1, 3, 32, 32, 94]


def test_settings_of_products_are_put_back() -> None:
    backends = torch.backends.cuda.matmul, torch.backends.cudnn.rnn
    before = [backend.fp32_precision for backend in backends]
    with contextlib.suppress(KeyError), products("ieee", torch.device("cuda")):
        assert [backend.fp32_precision for backend in backends] == ["ieee", "ieee"]
        raise KeyError
    assert [backend.fp32_precision for backend in backends] == before


# Perplexity


def test_perplexity_is_that_of_a_loop_over_tokens() -> None:
    count = training.SCORED_TOKENS_PER_CHUNK + 10  # two chunks
    model, tokens = a_model(), torch.randint(11, (count + 1,))
    state, total = model.initial_state(1), 0.0
    for word, following in itertools.pairwise(tokens):
        with torch.no_grad():
            states, _, state = by_hand(model, word.view(1, 1), state)
            logits = model.decoder(states[0, 0])
        total -= float(logits.log_softmax(0)[following])
    assert measure_perplexity(model, tokens, CPU) == pytest.approx(
        math.exp(total / count), rel=1e-5
    )


def test_perplexity_of_streams_is_that_of_texts_that_begin_anew() -> None:
    model, tokens = a_model(), torch.randint(11, (32,))
    parts = [measure_perplexity(model, tokens[start : start + 11], CPU) for start in (0, 10, 20)]
    expected = math.exp(sum(map(math.log, parts)) / 3)
    assert measure_perplexity(model, tokens, CPU, streams=3) == pytest.approx(expected, rel=1e-5)


# Training


def test_an_epoch_reads_the_text_once_in_order_from_another_word_each_time(tmp_path: Path) -> None:
    corpus = replace(a_corpus(), train=torch.arange(300) % 11)
    corpus = replace(corpus, train=torch.arange(301), words=tuple(map(str, range(301))))
    run = TrainingRun(TINY, corpus, a_context(tmp_path), 0, "x")
    assert (run.batch, run.length, run.steps_an_epoch) == (4, 75, 10)
    firsts = set()
    for epoch in range(3):
        run.steps = epoch * run.steps_an_epoch
        run._begin_epoch()
        assert torch.equal((run.inputs + 1) % 301, run.targets)
        assert torch.equal((run.inputs[:, :-1] + 1) % 301, run.inputs[:, 1:])
        assert len(run.inputs.unique()) == 300
        firsts.add(int(run.inputs[0, 0]))
    assert len(firsts) == 3


@pytest.mark.parametrize("tokens", [20, 33])
def test_a_text_that_is_short_for_its_batches_is_learnt_from_all_the_same(
    tmp_path: Path, tokens: int
) -> None:
    config = replace(TINY, training=TrainingSettings(epochs=1, batch=64, bptt=35))
    model = train_or_load(config, a_corpus(tokens), a_context(tmp_path), 0)
    before = training._initial(config, a_corpus(tokens), 0)
    assert not torch.equal(model.decoder.weight, before.decoder.weight)


def test_the_rate_is_constant_and_then_falls_in_a_line(tmp_path: Path) -> None:
    half = TrainingSettings(decay_from=0.5)
    shares = [rate_share(done, half) for done in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert shares == pytest.approx([1, 1, 1, 0.505, 0.01])
    assert rate_share(0.75, replace(half, decay_to=0.2)) == pytest.approx(0.6)
    assert rate_share(1.0, TrainingSettings(decay_from=1.0)) == 1.0
    run = TrainingRun(TINY, a_corpus(), a_context(tmp_path), 0, "x")
    run._begin_epoch()
    rates = []
    for run.steps in (0, 15, 29):  # of 30
        run._step()
        rates.append(run.optimizer.param_groups[0]["lr"])
    expected = [0.01 * rate_share(steps / 30, TINY.training) for steps in (0, 15, 29)]
    assert rates == pytest.approx(expected)
    assert rates[2] < rates[1]


def test_an_average_keeps_a_share_of_itself_at_every_step(tmp_path: Path) -> None:
    config = replace(TINY, training=replace(TINY.training, averages=(0.9, 0.2)))
    run = TrainingRun(config, a_corpus(), a_context(tmp_path), 0, "x")
    run._begin_epoch()
    start = [p.detach().clone() for p in run.model.parameters()]
    expected = [start, start]
    for step in range(1, 6):
        run._step()
        shares = (min(share, step / (step + 9)) for share in (0.9, 0.2))
        expected = [
            [
                share * old + (1 - share) * new.detach()
                for old, new in zip(average, run.model.parameters(), strict=True)
            ]
            for share, average in zip(shares, expected, strict=True)
        ]
    for average, parts in zip(run.averages, expected, strict=True):
        for found, wanted in zip(average.parameters(), parts, strict=True):
            torch.testing.assert_close(found, wanted)
        assert average.decoder.weight is average.embedding.weight
    assert not torch.equal(run.averages[0].decoder.weight, run.averages[1].decoder.weight)


@pytest.mark.parametrize("better", [0, 1])
def test_the_best_of_several_averages_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, better: int
) -> None:
    run = TrainingRun(TINY, a_corpus(), a_context(tmp_path), 0, "x")
    run._begin_epoch()
    while run.steps < run.steps_an_epoch:
        run._step()
    said = {id(run.averages[better]): 5.0, id(run.averages[1 - better]): math.nan}
    monkeypatch.setattr(training, "measure_perplexity", lambda model, *rest: said[id(model)])
    run._end_epoch()
    assert run.curve[-1].valid == 5.0
    for name, parameter in run.averages[better].named_parameters():
        assert torch.equal(run.best[name], parameter), name
    assert not torch.equal(run.best["embedding.weight"], run.averages[1 - better].embedding.weight)


def test_the_loss_is_the_mean_of_a_token_and_the_penalties(tmp_path: Path) -> None:
    corpus, nothing = a_corpus(), Dropouts(0, 0, 0, 0, 0)
    settings = replace(TINY.training, dropouts=nothing, state_reset=0.0)
    losses = {}
    for name, alpha, beta in (("none", 0.0, 0.0), ("both", 3.0, 5.0)):
        changed = replace(settings, activation_penalty=alpha, temporal_penalty=beta)
        run = TrainingRun(replace(TINY, training=changed), corpus, a_context(tmp_path), 0, "x")
        run._begin_epoch()
        losses[name] = run._loss(run.inputs[:, :7], run.targets[:, :7]).item()
    tokens, start = run.inputs[:, :7], run.model.initial_state(4)
    states, outputs, end = by_hand(run.model, tokens, start)
    plain = functional.cross_entropy(
        run.model.decoder(states).flatten(0, 1), run.targets[:, :7].flatten()
    )
    changes = (outputs[:, 1:] - outputs[:, :-1]).square().mean()
    assert losses["none"] == pytest.approx(plain.item(), rel=1e-5)
    expected = plain + 3 * outputs.square().mean() + 5 * changes
    assert losses["both"] == pytest.approx(expected.item(), rel=1e-5)
    assert float(run.loss) == pytest.approx(plain.item(), rel=1e-5)
    torch.testing.assert_close(run.state, end)
    assert not run.state[0].requires_grad


def test_states_are_forgotten_as_often_as_asked_for(tmp_path: Path) -> None:
    always = replace(TINY, training=replace(TINY.training, state_reset=1.0))
    run = TrainingRun(always, a_corpus(), a_context(tmp_path), 0, "x")
    run._begin_epoch()
    run.state = torch.ones(1, 4, 12), torch.ones(1, 4, 12)
    source = torch.Generator()
    source.set_state(run.source.get_state())
    run._loss(run.inputs[:, :7], run.targets[:, :7])
    drawn = draw_masks(run.model, 4, DROPPED, source)
    fresh = run.model.noisy(run.inputs[:, :7], run.model.initial_state(4), drawn, 1)
    torch.testing.assert_close(run.state, fresh.state)


def test_what_repeats_itself_is_learnt(tmp_path: Path) -> None:
    text = torch.arange(600) % 12
    corpus = Corpus(text, text[:200], text[:200], tuple(map(str, range(12))))
    mild = Dropouts(words=0.0, input=0.1, recurrent=0.1, output=0.1, projected=0.1)
    settings = replace(TINY.training, epochs=4, dropouts=mild, clip=1.0, lr=0.02)
    config = LanguageConfig(network=NetworkSizes(hidden=24, embedding=16), training=settings)
    model = train_or_load(config, corpus, a_context(tmp_path), 0)
    assert measure_perplexity(model, corpus.test, CPU) < 1.5  # chance is 12
    assert not model.training
    curve, seconds = learning_curve(config, corpus, a_context(tmp_path), 0)
    assert [point.epochs for point in curve] == [1, 2, 3, 4]
    assert curve[-1].valid < 1.5 < curve[0].train
    assert seconds > 0


@pytest.mark.heavy
def test_the_weights_that_did_best_are_kept_also_by_a_run_that_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = Dropouts(0, 0, 0, 0, 0)
    settings = replace(TINY.training, epochs=6, lr=0.05, clip=5.0, averages=(0.5,), dropouts=none)
    config, corpus = replace(TINY, training=settings), a_corpus()  # nothing but chance to learn
    whole = train_or_load(config, corpus, a_context(tmp_path / "whole"), 0)
    curve = [
        point.valid for point in learning_curve(config, corpus, a_context(tmp_path / "whole"), 0)[0]
    ]
    assert 1.05 * min(curve) < curve[-1]
    assert measure_perplexity(whole, corpus.valid, CPU) == pytest.approx(min(curve), rel=1e-6)
    monkeypatch.setattr(training, "TrainingRun", Interrupted)
    resumed, interruptions = None, 0
    while resumed is None:
        try:
            resumed = train_or_load(config, corpus, a_context(tmp_path), 0)
        except KeyboardInterrupt:
            interruptions += 1
    assert interruptions >= 8  # in sixty steps
    for name, parameter in whole.named_parameters():
        assert torch.equal(resumed.get_parameter(name), parameter), name


def test_a_training_that_diverges_says_so(tmp_path: Path) -> None:
    config = replace(TINY, training=replace(TINY.training, lr=1e30))
    with pytest.raises(ExperimentError, match=r"diverged after 1 epochs: pass a --training\.lr"):
        train_or_load(config, a_corpus(), a_context(tmp_path), 0)


# Interruptions and the cache


class Interrupted(TrainingRun):
    """A training that saves after every step and is interrupted after seven."""

    taken = 0

    def _step(self) -> None:
        if self.taken == 7:
            raise KeyboardInterrupt
        super()._step()
        self._saved_at = -math.inf  # the next save is overdue
        self.taken += 1


def test_an_interrupted_training_ends_as_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, corpus = replace(TINY, training=replace(TINY.training, beta1=0.5)), a_corpus()
    whole = train_or_load(config, corpus, a_context(tmp_path / "whole"), 3)
    monkeypatch.setattr(training, "TrainingRun", Interrupted)
    interruptions = 0
    while True:
        torch.rand(interruptions + 1)  # nobody else's random numbers matter
        try:
            resumed = train_or_load(config, corpus, a_context(tmp_path), 3)
            break
        except KeyboardInterrupt:
            interruptions += 1
    assert interruptions >= 4  # in 30 steps: within epochs, too
    for name, parameter in whole.named_parameters():
        assert torch.equal(resumed.get_parameter(name), parameter), name
    once, often = (
        learning_curve(config, corpus, a_context(folder), 3)[0]
        for folder in (tmp_path / "whole", tmp_path)
    )
    assert once == often
    states = [adam_state(config, corpus, a_context(f), 3) for f in (tmp_path / "whole", tmp_path)]
    for place in range(len(list(whole.parameters()))):
        one, other = (state["state"][place] for state in states)
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_recorded_steps_are_the_steps_that_were_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, found = a_corpus(), {}
    for name, first, class_ in (
        ("step by step", 10**9, TrainingRun),
        ("recorded", 3, TrainingRun),
        ("interrupted", 3, Interrupted),
    ):
        monkeypatch.setattr(recording, "WARM_UP_CALLS", first)
        monkeypatch.setattr(training, "TrainingRun", class_)
        place = replace(a_context(tmp_path / name), device=torch.device("cuda"))
        while name not in found:
            with contextlib.suppress(KeyboardInterrupt):
                found[name] = train_or_load(TINY, corpus, place, 3)
    untrained = LanguageModel(11, 12, 8).cuda()
    for name, parameter in found["step by step"].named_parameters():
        for other in ("recorded", "interrupted"):
            torch.testing.assert_close(
                found[other].get_parameter(name), parameter, rtol=1e-2, atol=1e-3
            )
        assert (untrained.get_parameter(name) - parameter).abs().max() > 0.01  # which is not near


def test_kept_work_of_another_text_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "TrainingRun", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        train_or_load(TINY, a_corpus(), a_context(tmp_path), 0)
    assert a_context(tmp_path).workspace.load("training-0") is not None
    monkeypatch.undo()
    other = a_corpus(seed=1)
    got = train_or_load(TINY, other, a_context(tmp_path), 0)
    fresh = train_or_load(TINY, other, a_context(tmp_path / "fresh"), 0)
    assert torch.equal(got.decoder.weight, fresh.decoder.weight)


def test_a_network_is_trained_once_for_all_that_ask_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, corpus = a_context(tmp_path), a_corpus()
    before = train_or_load(TINY, corpus, context, 0)

    def fail(*_: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(training, "TrainingRun", fail)
    shorter = replace(corpus, test=corpus.test[:20])
    again = train_or_load(replace(TINY, memory=7, seeds=(0, 1)), shorter, context, 0)
    assert torch.equal(again.decoder.weight, before.decoder.weight)
    assert again.decoder.weight.requires_grad
    for config, text, seed in (
        (TINY, corpus, 1),
        (TINY, a_corpus(seed=5), 0),
        (TINY, replace(corpus, valid=corpus.valid[:50]), 0),  # decides when it was best
        (replace(TINY, training=replace(TINY.training, lr=0.02)), corpus, 0),
        (replace(TINY, network=NetworkSizes(hidden=12, embedding=9)), corpus, 0),
    ):
        with pytest.raises(AssertionError, match="trained again"):
            train_or_load(config, text, context, seed)


def test_seeds_give_networks_of_their_own_and_leave_other_random_numbers_alone(
    tmp_path: Path,
) -> None:
    context, corpus, before = a_context(tmp_path), a_corpus(), torch.get_rng_state()
    models = [train_or_load(TINY, corpus, context, seed) for seed in (0, 1)]
    assert not torch.equal(models[0].decoder.weight, models[1].decoder.weight)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_damaged_network_is_trained_anew(tmp_path: Path) -> None:
    before = train_or_load(TINY, a_corpus(), a_context(tmp_path), 0)
    (path,) = (tmp_path / "cache").glob("language-*.safetensors")
    path.write_bytes(path.read_bytes()[:500])
    with pytest.warns(UserWarning, match="is damaged and will be recomputed"):
        after = train_or_load(TINY, a_corpus(), a_context(tmp_path), 0)
    assert torch.equal(after.decoder.weight, before.decoder.weight)


@pytest.mark.parametrize("beta1", [0.0, 0.5])
def test_adam_can_go_on_where_training_ended(tmp_path: Path, beta1: float) -> None:
    config = replace(TINY, training=replace(TINY.training, beta1=beta1))
    run = TrainingRun(config, a_corpus(), a_context(tmp_path), 0, "x")
    run.finish()
    model = train_or_load(config, a_corpus(), a_context(tmp_path), 0)
    optimizer = torch.optim.Adam(model.parameters(), betas=(beta1, 0.999))
    optimizer.load_state_dict(adam_state(config, a_corpus(), a_context(tmp_path), 0))
    generator = torch.Generator().manual_seed(0)
    for own, copied in zip(run.model.parameters(), model.parameters(), strict=True):
        own.grad = torch.randn(own.shape, generator=generator)
        copied.grad = own.grad.clone()
        copied.data.copy_(own.data)
    for each in (run.optimizer, optimizer):
        for group in each.param_groups:
            group["lr"], group["weight_decay"] = 0.01, 0.0
        each.step()
    for own, copied in zip(run.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(copied, own)


def test_no_epochs_leave_the_network_as_it_was(tmp_path: Path) -> None:
    config = replace(TINY, training=replace(TINY.training, epochs=0))
    model = train_or_load(config, a_corpus(), a_context(tmp_path), 0)
    assert torch.equal(
        model.decoder.weight, training._initial(config, a_corpus(), 0).decoder.weight
    )
    assert adam_state(config, a_corpus(), a_context(tmp_path), 0) is None
    assert learning_curve(config, a_corpus(), a_context(tmp_path), 0)[0] == []


def test_the_learning_curve_is_among_the_records(tmp_path: Path) -> None:
    train_or_load(TINY, a_corpus(), a_context(tmp_path), 0)
    records = curve_records(TINY, a_corpus(), a_context(tmp_path), 0)
    curve, _ = learning_curve(TINY, a_corpus(), a_context(tmp_path), 0)
    assert [point.epochs for point in curve] == [1, 2, 3]
    for name in ("train", "valid"):
        found = [r for r in records if r["name"] == f"training_{name}_perplexity"]
        assert [r["value"] for r in found] == [getattr(point, name) for point in curve]
        assert {r["split"] for r in found} == {name}


# Texts


def own_config(folder: Path, train: str, valid: str, test: str = "", **more: int) -> LanguageConfig:
    texts = {"train": train, "valid": valid, "test": test or valid}
    for name, text in texts.items():
        (folder / name).write_bytes(text.encode())
    return LanguageConfig(
        train=folder / "train", valid=folder / "valid", test=folder / "test", **more
    )


def test_own_text_is_numbered_by_its_most_frequent_words(tmp_path: Path) -> None:
    train = "b a c a\r\n  b\ta d a\n\na b c b e f g h i j k"
    config = own_config(tmp_path, train, "a x\nc", "k b", vocabulary=3)
    assert config.corpus == "own"
    corpus = read_corpus(config, a_context(tmp_path))
    assert corpus.words == ("b", "a", "c", END_OF_LINE, UNKNOWN)
    words = [corpus.words[number] for number in corpus.train.tolist()]
    assert words[:12] == [
        "b",
        "a",
        "c",
        "a",
        END_OF_LINE,
        "b",
        "a",
        UNKNOWN,
        "a",
        END_OF_LINE,
        END_OF_LINE,
        "a",
    ]
    assert [corpus.words[n] for n in corpus.valid.tolist()] == [
        "a",
        UNKNOWN,
        END_OF_LINE,
        "c",
        END_OF_LINE,
    ]
    assert [corpus.words[n] for n in corpus.test.tolist()] == [UNKNOWN, "b", END_OF_LINE]
    counts = dict(zip(corpus.words, frequencies(corpus).tolist(), strict=True))
    assert counts == {"b": 4, "a": 5, "c": 2, END_OF_LINE: 4, UNKNOWN: 8}


def test_words_that_occur_once_teach_what_is_unknown_where_nothing_else_does(
    tmp_path: Path,
) -> None:
    train = "a b a b c d\n" * 3 + "once e e\n"
    corpus = read_corpus(own_config(tmp_path, train, "a"), a_context(tmp_path))
    assert corpus.words == ("a", "b", "c", "d", END_OF_LINE, UNKNOWN, "e")
    with_unknown = train + "<unk>\n"
    corpus = read_corpus(own_config(tmp_path, with_unknown, "a"), a_context(tmp_path))
    assert corpus.words == ("a", "b", "c", "d", END_OF_LINE, "once", "e", UNKNOWN)


def test_own_text_can_be_cut_and_may_begin_with_a_mark_of_its_encoding(tmp_path: Path) -> None:
    config = own_config(
        tmp_path, "\ufeff" + "aä b\n" * 50, "aä b b\n" * 9, tokens=30, scored_tokens=5
    )
    corpus = read_corpus(config, a_context(tmp_path))
    assert corpus.words[:2] == ("aä", "b")
    assert (len(corpus.train), len(corpus.valid), len(corpus.test)) == (30, 5, 5)


GOOD = "the cat sat on the mat and the dog sat on the cat\n" * 40
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "cannot be read: No such file"),
    "directory": (lambda path: path.mkdir(), "cannot be read: Is a directory"),
    "empty": (lambda path: path.write_text(""), "is empty"),
    "blank": (lambda path: path.write_text("\n \n\n" * 30), "is empty"),
    "latin": (lambda path: path.write_bytes(GOOD.encode() + b"caf\xe9\n"), "is not UTF-8 text"),
    "binary": (lambda path: path.write_bytes(bytes(range(256)) * 9), "is not UTF-8 text"),
    "foreign": (lambda path: path.write_text("le chat dort\n" * 9), "contains none of the"),
}


def typed(folder: Path, *more: str) -> list[str]:
    for name in ("train", "valid", "test"):
        path = folder / f"{name}.txt"
        more += (f"--{name}", str(path))
    words = ["run", "language", "--preset", "smoke", "--out", str(folder / "results")]
    return [*words, "--no-progress", *more]


@pytest.mark.heavy
@pytest.mark.parametrize("part", ["train", "valid", "test"])
@pytest.mark.parametrize("wrong", REFUSED)
def test_own_text_that_cannot_be_used_is_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], part: str, wrong: str
) -> None:
    for name in ("train", "valid", "test"):
        (tmp_path / f"{name}.txt").write_text(GOOD)
    make, message = REFUSED[wrong]
    (tmp_path / f"{part}.txt").unlink()
    make(tmp_path / f"{part}.txt")
    assert cli.main(typed(tmp_path)) == 2
    told = capsys.readouterr().err
    assert told.startswith("experiments: ")
    assert message in told
    assert f"{part}.txt" in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("one two\n", "must have at least 20 tokens, with one for the end of each line, got 3"),
        (" ".join(f"word{i}" for i in range(30)), "no word occurs twice"),
        ("<unk> <unk>\n" * 30, "must contain words other than <unk>"),
    ],
)
def test_a_training_text_that_teaches_nothing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    for name, content in (("train", text), ("valid", GOOD), ("test", GOOD)):
        (tmp_path / f"{name}.txt").write_text(content)
    assert cli.main(typed(tmp_path)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [["--train", "a"], ["--valid", "a", "--test", "b"], ["--corpus", "own"]],
)
def test_own_text_needs_all_three_files(
    capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    assert cli.main(["run", "language", *flags]) == 2
    told = capsys.readouterr().err
    assert "your own text needs the three files --train, --valid and --test" in told


@pytest.mark.heavy
def test_own_text_of_one_line_runs_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.txt").write_text(GOOD.replace("\n", " "), "utf-8")
    (tmp_path / "valid.txt").write_text("the cat sat on the sofa", "utf-8")
    (tmp_path / "test.txt").write_text("the dog sat on the cat", "utf-8")
    assert cli.main(typed(tmp_path)) == 0, capsys.readouterr().err
    (path,) = (tmp_path / "results" / "language").glob("custom-*-seed0.json")
    result = json.loads(path.read_text())
    assert result["config"]["corpus"] == "own"
    found = [r for r in result["metrics"] if (r["name"], r.get("method")) == ("perplexity", "LSTM")]
    assert {r["split"] for r in found} == {"valid", "test"}
    assert {r["corpus"] for r in found} == {"own"}
    assert all(1 < r["value"] < 40 for r in found)
    command = cli.parse(result["command"].split()[3:])
    assert command.settings.train == tmp_path / "train.txt"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dropouts(input=1.0), "input must be at least 0 and below 1, got 1.0"),
        (lambda: NetworkSizes(hidden=0), "hidden must be at least 1, got 0"),
        (lambda: TrainingSettings(bptt=0), "bptt must be at least 1, got 0"),
        (lambda: TrainingSettings(lr=math.inf), "lr must be finite and positive, got inf"),
        (
            lambda: TrainingSettings(averages=(0.5, 1.0)),
            r"averages must be at least 0 .*, got 0\.5, 1\.0",
        ),
        (
            lambda: TrainingSettings(averages=()),
            r"averages must be at least 0 and below 1, got none",
        ),
        (lambda: TrainingSettings(decay_to=1.5), r"decay_to must be between 0 and 1, got 1\.5"),
        (lambda: TrainingSettings(decay_from=1.5), r"decay_from must be between 0 and 1, got 1\.5"),
        (
            lambda: TrainingSettings(weight_decay=-1.0),
            "weight_decay must be finite and not negative",
        ),
        (lambda: LanguageConfig(seeds=()), "seeds must name at least one"),
        (lambda: LanguageConfig(tokens=-1), "tokens must be at least 0, got -1"),
        (lambda: LanguageConfig(scored_tokens=1), "scored_tokens must be 0, for all, or at least"),
    ],
)
def test_impossible_settings_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.heavy
def test_the_beginning_of_a_corpus_has_the_words_that_occur_there(tmp_path: Path) -> None:
    folder = Path(os.environ.get("MBPA_DATA") or ROOT.parent / "shared" / "data")
    if not (folder / "ptb").is_dir():
        pytest.skip("needs the Penn Treebank: python -m experiments data fetch ptb, or MBPA_DATA")
    context = replace(a_context(tmp_path), data_dir=folder)
    whole = read_corpus(LanguageConfig(scored_tokens=100), context)
    assert (len(whole.train), len(whole.valid), len(whole.words)) == (929_589, 100, 10_000)
    part = read_corpus(LanguageConfig(tokens=3000, scored_tokens=100, vocabulary=200), context)
    counts = Counter(whole.words[n] for n in whole.train[:3000].tolist())
    assert len(part.words) == 202
    assert set(part.words) <= set(counts)
    kept = [counts[word] for word in part.words if word not in (END_OF_LINE, UNKNOWN)]
    assert (
        sorted(kept)
        == sorted(n for w, n in counts.items() if w not in (END_OF_LINE, UNKNOWN))[-200:]
    )
    for name in ("train", "valid", "test"):
        shorter, longer = getattr(part, name).tolist(), getattr(whole, name).tolist()
        for got, own in zip(shorter, longer[:3000], strict=True):
            word = whole.words[own]
            assert part.words[got] == (word if word in part.words else UNKNOWN)
