"""Reading, scoring, writing and forgetting with a language model and its memory."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import weigh
from tiny_language_model import TEXT, make_model, make_tokenizer

import mbpa
from mbpa.errors import CheckpointError, RunError
from mbpa.language import MemoryLM
from mbpa.language.windows import plan_windows

pytestmark = pytest.mark.filterwarnings("ignore:.*torch_dtype.*")
OTHER = "The shop opens at nine. On Mondays it is closed, since the owner mends boats in the yard."


def make_lm(**settings: Any) -> MemoryLM:
    return MemoryLM(make_model(), make_tokenizer(), **settings)


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


@pytest.fixture
def lm(model: Any) -> MemoryLM:
    return MemoryLM(model, make_tokenizer(), capacity=2000)


def get_scores(lm: MemoryLM, text: str = TEXT) -> list[float]:
    return [token.log_prob for token in lm.score(text).tokens]


@torch.no_grad()
def score_by_hand(model: Any, text: str) -> list[float]:
    ids = torch.tensor([make_tokenizer()(text)["input_ids"]])
    found = model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])
    return [float(each) for each in found[:, 0]]


def adapt_by_hand(model: Any, read: str, text: str, lr: float, steps: int, k: int) -> list[float]:
    """Adapt the output layer to each token of a text with autograd, one token after the other."""
    tokenizer = make_tokenizer()
    ids = [torch.tensor([tokenizer(each)["input_ids"]]) for each in (read, text)]
    with torch.no_grad():
        states = [model.base_model(each).last_hidden_state[0].double() for each in ids]
    keys, labels = states[0][:-1].half().double(), ids[0][0, 1:]
    scores = []
    for query, target in zip(states[1][:-1], ids[1][0, 1:], strict=True):
        distances = (keys - query).square().sum(1)
        nearest = distances.argsort()[:k]
        weights = weigh(distances[nearest])
        weight = model.lm_head.weight.detach().double().clone().requires_grad_()
        for _ in range(steps):
            logits = keys[nearest] @ weight.T
            losses = torch.nn.functional.cross_entropy(logits, labels[nearest], reduction="none")
            (slope,) = torch.autograd.grad((weights * losses).sum(), weight)
            weight = (weight - lr * slope).detach().requires_grad_()
        scores.append(float((query @ weight.detach().T).log_softmax(0)[target]))
    return scores


def test_scores_equal_a_loop_of_autograd() -> None:
    model = make_model(initializer_range=0.6)  # probabilities as uneven as those of a real model
    rule = mbpa.Gradient(0.15, 6)
    lm = MemoryLM(model, make_tokenizer(), capacity=500, predictor=mbpa.Adapted(rule, k=8))
    lm.read(TEXT, source="heron")
    expected = adapt_by_hand(model, TEXT, OTHER, lr=0.15, steps=6, k=8)
    assert get_scores(lm, OTHER) == pytest.approx(expected, abs=1e-2)
    alone = torch.tensor([token.log_prob_alone for token in lm.score(OTHER).tokens])
    assert (alone - torch.tensor(expected)).abs().mean() > 0.2


def test_an_empty_memory_leaves_the_model_as_it_is(lm: MemoryLM, model: Any) -> None:
    tokens = lm.score(TEXT).tokens
    assert [token.log_prob for token in tokens] == [token.log_prob_alone for token in tokens]
    assert get_scores(lm) == pytest.approx(score_by_hand(model, TEXT), abs=1e-5)
    ids = torch.tensor([lm.encode(TEXT)])
    with torch.no_grad():
        assert torch.equal(lm.as_transformers()(ids).logits, model(ids).logits)


def test_a_text_that_was_read_is_predicted_better(lm: MemoryLM) -> None:
    before = lm.score(TEXT)
    info = lm.read(TEXT, source="heron.txt")
    after = lm.score(TEXT)
    assert after.perplexity < before.perplexity / 2
    assert after.perplexity_alone == before.perplexity_alone
    assert info.tokens == len(lm.encode(TEXT)) == len(lm) + 1
    assert [source.name for source in lm.sources()] == ["heron.txt"]
    assert after.bits_per_byte < after.bits_per_byte_alone


def test_token_texts_join_to_the_whole_text(lm: MemoryLM) -> None:
    first = lm.tokenizer.decode(lm.encode(TEXT)[:1])
    assert first + "".join(token.text for token in lm.score(TEXT).tokens) == TEXT


def test_the_model_is_never_changed(model: Any) -> None:
    before = copy.deepcopy(model.state_dict())
    lm = MemoryLM(model, make_tokenizer(), capacity=500)
    lm.read(TEXT, source="heron")
    lm.generate("The heron", max_new_tokens=3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(p.grad is not None for p in model.parameters())


def test_origins_name_the_place_in_the_document(lm: MemoryLM) -> None:
    lm.read(OTHER, source="shop.txt")
    lm.read(TEXT, source="heron.txt")
    ids = lm.encode(TEXT)
    for position, token in enumerate(lm.explain(TEXT, origins=3).tokens, 1):
        found = token.origins[0]
        # The same text was read: the very place is at distance 0, and followed by this token.
        assert (found.source, found.position, found.token) == ("heron.txt", position, token.id)
        assert found.distance < 0.2
        assert found.text == token.text
        assert lm.tokenizer.decode(ids[:position]).rstrip("\ufffd").endswith(found.before)


def test_origins_are_in_the_order_that_is_documented(lm: MemoryLM) -> None:
    lm.read(TEXT, source="heron")
    with torch.no_grad():
        states = lm.model.base_model(torch.tensor([lm.encode(TEXT)])).last_hidden_state[0]
    prediction = lm.predict(states[::8], want_weights=True)
    assert prediction.neighbors is not None
    # A kernel may be so sharp that all but the nearest weigh next to nothing.
    weights = torch.full(prediction.neighbors.values.shape, 1e-9)
    weights[:, 0], weights[:, 5], weights[:, 9] = 1.0, 3e-9, 0.0
    prediction = dataclasses.replace(prediction, weights=weights)
    for column in (5, 9, 20):
        tokens = prediction.neighbors.values[:, column].tolist()
        for token in lm.describe(prediction, tokens, 64):
            ranks = [(place.token != token.id, -place.weight) for place in token.origins]
            assert ranks == sorted(ranks)
        assert all(
            token.origins[0].token == token.id for token in lm.describe(prediction, tokens, 1)
        )


def test_what_is_read_later_does_not_change_an_earlier_score(lm: MemoryLM) -> None:
    lm.read(TEXT, source="heron")
    before = lm.score(OTHER)
    lm.read(OTHER, source="shop")
    assert lm.score(OTHER).perplexity < before.perplexity
    lm.forget("shop")
    assert lm.score(OTHER) == before


@pytest.mark.heavy
@pytest.mark.parametrize("is_saved", [False, True])
def test_a_forgotten_source_leaves_no_trace(model: Any, tmp_path: Path, is_saved: bool) -> None:
    never = MemoryLM(model, make_tokenizer(), capacity=2000)
    lm = MemoryLM(model, make_tokenizer(), capacity=2000)
    if is_saved:
        lm.save(tmp_path / "run")
    texts = {name: TEXT.replace("heron", name) for name in ("stork", "crane", "egret", "bittern")}
    for name, text in texts.items():
        lm.read(text, source=name)
        if name != "crane":
            never.read(text, source=name)
    lm.score(TEXT)
    lm.forget("crane")
    assert get_scores(lm) == get_scores(never)
    if is_saved:
        lm.close()
        lm = MemoryLM.load(tmp_path / "run", model, make_tokenizer())
        assert get_scores(lm) == get_scores(never)
        assert lm.explain(OTHER) == never.explain(OTHER)
    written = lm.generate("The", max_new_tokens=9), never.generate("The", max_new_tokens=9)
    assert written[0] == written[1]


def test_reading_a_source_again_replaces_it(lm: MemoryLM, tmp_path: Path) -> None:
    lm.save(tmp_path / "run")
    lm.read(OTHER, source="a")
    lm.read(TEXT, source="b")
    lm.read(TEXT, source="a")
    assert [source.name for source in lm.sources()] == ["b", "a"]
    assert len(lm) == 2 * (len(lm.encode(TEXT)) - 1)
    assert len(list((tmp_path / "run/sources").iterdir())) == 2


def test_reading_the_same_text_again_does_nothing(lm: MemoryLM) -> None:
    first = lm.read(TEXT, source="a")
    seen: list[int] = []
    assert lm.read(TEXT, source="a", progress=lambda done, total: seen.append(done)) == first
    assert not seen
    assert lm.has_read(TEXT, source="a")
    assert not lm.has_read(OTHER, source="a")


def test_a_document_can_be_prepared_while_another_thread_holds_the_memory(lm: MemoryLM) -> None:
    lm.read(OTHER, source="shop")
    with lm.hold(), ThreadPoolExecutor(1) as pool:
        reading = pool.submit(lm.prepare, TEXT, source="heron").result(timeout=60)
        known = pool.submit(lm.prepare, OTHER, source="shop").result(timeout=60)
    assert [source.name for source in lm.sources()] == ["shop"]
    assert known.keys is None
    lm.forget("shop")
    lm.store(reading)
    lm.store(known)  # the model runs on it after all
    again = make_lm(capacity=2000)
    again.read(TEXT, source="heron")
    again.read(OTHER, source="shop")
    assert lm.explain(TEXT) == again.explain(TEXT)


def test_a_document_whose_reading_is_ended_leaves_no_trace(lm: MemoryLM) -> None:
    def end(done: int, total: int) -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        lm.read(TEXT, source="heron", progress=end)
    assert not lm.sources()
    with pytest.raises(TimeoutError):
        lm.explain(TEXT, progress=end)


def test_the_most_probable_tokens_are_named(lm: MemoryLM) -> None:
    lm.read(TEXT, source="heron")
    written = lm.generate("The heron", max_new_tokens=12, top=3)
    for token in written.tokens:
        best = token.top[0]
        assert (best.id, best.log_prob) == (token.id, token.log_prob)
        assert best.text == token.text or not token.text
        assert token.top[0].log_prob >= token.top[1].log_prob >= token.top[2].log_prob
        assert len({each.text for each in token.top}) == 3
    scored = lm.explain("The heron" + written.text, top=3).tokens[-len(written.tokens) :]
    assert [each.top[0].id for each in scored] == [each.id for each in written.tokens]
    assert lm.generate([lm.encode("The heron")], max_new_tokens=12, top=3) == [written]


class Doubtful(mbpa.NeighborVote):
    """A predictor that the library does not know."""


@pytest.mark.parametrize("other", [None, mbpa.NeighborVote(mbpa.Gaussian(3.0), k=5)])
def test_a_run_keeps_its_predictor(
    model: Any, tmp_path: Path, other: mbpa.NeighborVote | None
) -> None:
    lm = MemoryLM(model, make_tokenizer(), capacity=2000, predictor=other)
    lm.read(OTHER, source="shop")
    lm.save(tmp_path / "run")
    lm.close()
    with MemoryLM.load(tmp_path / "run", model, make_tokenizer()) as loaded:
        assert get_scores(loaded) == get_scores(lm)


def test_a_predictor_of_ones_own_must_be_given_again(model: Any, tmp_path: Path) -> None:
    lm = MemoryLM(model, make_tokenizer(), capacity=2000, predictor=Doubtful(k=5))
    lm.read(OTHER, source="shop")
    lm.save(tmp_path / "run")
    lm.close()
    with pytest.raises(ValueError, match="parts of your own, Doubtful: pass predictor="):
        MemoryLM.load(tmp_path / "run", model, make_tokenizer())
    given = MemoryLM.load(tmp_path / "run", model, make_tokenizer(), predictor=Doubtful(k=5))
    assert get_scores(given) == get_scores(lm)


def test_a_run_is_complete_after_loading(model: Any, lm: MemoryLM, tmp_path: Path) -> None:
    lm.read(TEXT, source="before")
    lm.save(tmp_path / "run")
    lm.read(OTHER, source="after")
    expected, sources = lm.explain(TEXT), lm.sources()
    lm.close()
    again = MemoryLM.load(tmp_path / "run", model, make_tokenizer())
    assert again.sources() == sources
    assert again.explain(TEXT) == expected


def test_half_precision_in_memory_changes_nothing(model: Any) -> None:
    scores = []
    for half in (False, True):
        lm = MemoryLM(model, make_tokenizer(), capacity=500, half=half)
        lm.read(TEXT, source="heron")
        scores.append(get_scores(lm, OTHER))
    assert scores[0] == scores[1]


def test_another_model_is_refused(lm: MemoryLM, model: Any, tmp_path: Path) -> None:
    lm.read(TEXT, source="heron")
    lm.save(tmp_path / "run")
    lm.close()
    with pytest.raises(CheckpointError, match="another model"):
        MemoryLM.load(tmp_path / "run", make_model(seed=1), make_tokenizer())
    with pytest.raises(ValueError, match="give the model"):
        MemoryLM.load(tmp_path / "run")
    MemoryLM.load(tmp_path / "run", model, make_tokenizer())


def test_only_one_process_may_write(lm: MemoryLM, model: Any, tmp_path: Path) -> None:
    lm.save(tmp_path / "run")
    with pytest.raises(RunError, match="in use"):
        MemoryLM.load(tmp_path / "run", model, make_tokenizer())
    lm.read(TEXT, source="heron")
    reader = MemoryLM.load(tmp_path / "run", model, make_tokenizer(), writable=False)
    assert get_scores(reader) == get_scores(lm)
    with pytest.raises(RunError, match="holds a run"):
        make_lm().save(tmp_path / "run")


def test_a_damaged_file_is_named(lm: MemoryLM, model: Any, tmp_path: Path) -> None:
    lm.save(tmp_path / "run")
    lm.read(TEXT, source="heron")
    lm.close()
    (path,) = (tmp_path / "run/sources").iterdir()
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=path.name):
        MemoryLM.load(tmp_path / "run", model, make_tokenizer())
    path.write_bytes(content[:200])
    with pytest.raises(CheckpointError, match=path.name):
        MemoryLM.load(tmp_path / "run", model, make_tokenizer())


def test_a_failed_write_leaves_the_memory_as_it_was(
    lm: MemoryLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm.save(tmp_path / "run")
    lm.read(TEXT, source="heron")
    before = get_scores(lm, OTHER)

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", fail)
        with pytest.raises(OSError, match="No space"):
            lm.read(OTHER, source="shop")
        with pytest.raises(OSError, match="No space"):
            lm.read(OTHER, source="heron")
    assert get_scores(lm, OTHER) == before
    assert len(list((tmp_path / "run/sources").iterdir())) == 1
    lm.read(OTHER, source="shop")


@pytest.mark.parametrize("is_forgotten_first", [True, False])
def test_a_write_whose_name_was_not_flushed_does_not_come_back(
    lm: MemoryLM,
    model: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_forgotten_first: bool,
) -> None:
    lm.save(tmp_path / "run")
    lm.read(TEXT, source="heron")
    flush = os.fsync

    def fail_for_directories(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(5, "Input/output error")
        flush(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", fail_for_directories)
        for source in ("heron", "shop"):
            with pytest.raises(OSError, match="Input/output"):
                lm.read(OTHER, source=source)
        if is_forgotten_first:
            with pytest.raises(OSError, match="Input/output"):
                lm.forget("heron")
        assert [source.tokens for source in lm.sources()] == [len(lm.encode(TEXT))]
    lm.forget("heron")
    lm.read(TEXT, source="other")
    lm.close()
    again = MemoryLM.load(tmp_path / "run", model, make_tokenizer())
    assert [source.name for source in again.sources()] == ["other"]


@pytest.mark.heavy
def test_our_generation_equals_that_of_transformers(lm: MemoryLM) -> None:
    for text in (OTHER, TEXT):
        lm.read(text, source=text[:9])
        ids = torch.tensor([lm.encode("The heron")])
        theirs = lm.as_transformers().generate(
            ids, max_new_tokens=20, do_sample=False, pad_token_id=0
        )
        ours = lm.generate("The heron", max_new_tokens=20)
        assert [token.id for token in ours.tokens] == theirs[0, ids.shape[1] :].tolist()
        assert ours.text == lm.tokenizer.decode(theirs[0, ids.shape[1] :])


@pytest.mark.heavy
@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 2.0},
        {"no_repeat_ngram_size": 1},
        {"num_beams": 3},
        {"do_sample": True, "temperature": 0.6, "min_p": 0.5, "num_return_sequences": 2},
        {"stop_strings": ["e"], "max_time": 1e-4},
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_generation_ignores_how_the_model_would_generate_by_itself(
    settings: dict[str, Any], temperature: float
) -> None:
    model = make_model()
    model.generation_config.update(**settings)
    before = model.generation_config.to_dict()
    assert write_text(model, temperature) == write_text_by_default(temperature)
    assert model.generation_config.to_dict() == before


def write_text(model: Any, temperature: float) -> str:
    lm = MemoryLM(model, make_tokenizer(), capacity=500)
    lm.read(TEXT, source="heron")
    prompt = "The heron stands in the water. The heron"
    return lm.generate(prompt, max_new_tokens=20, temperature=temperature, seed=1).text


@functools.cache
def write_text_by_default(temperature: float) -> str:
    return write_text(make_model(), temperature)


def test_generation_repeats_what_was_read(lm: MemoryLM) -> None:
    predictor = mbpa.Adapted(mbpa.Gradient(4 / 32, 20), k=8, kernel=mbpa.Gaussian(1.0))
    lm = MemoryLM(lm.model, lm.tokenizer, capacity=500, predictor=predictor)
    lm.read(TEXT, source="heron")
    written = lm.generate(TEXT[:60], max_new_tokens=10, origins=2)
    assert TEXT[60:].startswith(written.text)
    assert written.tokens[0].origins[0].source == "heron"
    assert written.tokens[0].moved > 1
    assert written.finish_reason == "length"


@pytest.mark.heavy
def test_prompts_in_a_batch_are_independent(lm: MemoryLM) -> None:
    lm.read(TEXT, source="heron")
    prompts = ["The heron stands", "In the evening it flies home to", "A"]
    together = lm.generate(prompts, max_new_tokens=8)
    for prompt, written in zip(prompts, together, strict=True):
        alone = lm.generate(prompt, max_new_tokens=8)
        assert [token.id for token in alone.tokens] == [token.id for token in written.tokens]


def test_generation_stops_at_a_stop_string(lm: MemoryLM) -> None:
    lm.read(TEXT, source="heron")
    whole = lm.generate("The heron", max_new_tokens=20).text
    stop = whole[12:16]
    written = lm.generate("The heron", max_new_tokens=20, stop=["never", stop])
    assert written.finish_reason == "stop"
    assert written.text == whole[: whole.index(stop)]


def test_a_seed_makes_drawing_repeatable(lm: MemoryLM) -> None:
    lm.read(TEXT, source="heron")
    state = torch.random.get_rng_state()
    drawn = [
        lm.generate("The", max_new_tokens=8, temperature=1.5, seed=seed).text for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert torch.equal(torch.random.get_rng_state(), state)


def test_beams_and_pipelines_run_unmodified(lm: MemoryLM) -> None:
    from transformers import pipeline

    lm.read(TEXT, source="heron")
    adapted = lm.as_transformers()
    ids = torch.tensor([lm.encode("The heron")])
    beams = adapted.generate(ids, num_beams=3, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert beams.shape == (1, ids.shape[1] + 6)
    loss = adapted(ids, labels=ids).loss
    scores = torch.tensor(get_scores(lm, "The heron"))
    assert float(loss) == pytest.approx(-float(scores.mean()), abs=1e-5)
    write = pipeline("text-generation", model=adapted, tokenizer=lm.tokenizer)
    (made,) = write("The heron", max_new_tokens=5, do_sample=False, pad_token_id=0)
    expected = lm.generate("The heron", max_new_tokens=5)
    assert made["generated_text"] == "The heron" + expected.text


@pytest.mark.heavy
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}])
def test_long_texts_are_read_in_windows(changes: dict[str, Any]) -> None:
    model = make_model(**changes)
    lm = MemoryLM(model, make_tokenizer(), capacity=5000, window=48, context=16)
    text = TEXT + " " + OTHER + " " + TEXT.upper()
    seen: list[tuple[int, int]] = []
    lm.read(text, source="long", progress=lambda *each: seen.append(each))
    count = len(lm.encode(text))
    assert len(lm) == count - 1 == seen[-1][0] - 1 == seen[-1][1] - 1
    assert len(lm.score(text).tokens) == count - 1
    # A state is that of the window it was read in.
    ids = torch.tensor([lm.encode(text)])
    with torch.no_grad():
        second = model.base_model(ids[:, 32:80]).last_hidden_state[0, 16:]
    assert torch.equal(lm.memory.get_keys(list(range(48, 80))), second.half().float())


@pytest.mark.parametrize("length", [1, 5, 47, 48, 49, 80, 81, 500])
def test_windows_use_every_position_once(length: int) -> None:
    used = []
    for start, first, stop in plan_windows(length, 48, 16):
        assert stop - start <= 48
        assert first == 0 or first - start == 16
        used += range(first, stop)
    assert used == list(range(length))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda lm: lm.read("", source="a"), "at least two tokens, got 0"),
        (lambda lm: lm.read(TEXT, source=""), "source must be a name"),
        (lambda lm: lm.read([3, 10**6], source="a"), "token ids must be from 0"),
        (lambda lm: lm.read(TEXT * 9, source="a"), "must have at most 301 tokens"),
        (lambda lm: lm.score("A"), "at least two tokens"),
        (lambda lm: lm.forget("b"), "one that was read"),
        (lambda lm: lm.generate(""), "at least one token"),
        (lambda lm: lm.generate([]), "at least one prompt"),
        (lambda lm: lm.generate("A", max_new_tokens=0), "max_new_tokens must be"),
        (lambda lm: lm.generate("A", max_new_tokens=128), "at most 128 tokens"),
        (lambda lm: lm.generate("A", temperature=-1), "temperature must be"),
        (lambda lm: lm.generate("A", top_p=0), "top_p must be"),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(model: Any, call: Any, message: str) -> None:
    lm = MemoryLM(model, make_tokenizer(), capacity=300)
    with pytest.raises(ValueError, match=message):
        call(lm)
    assert not len(lm)
    assert not lm.sources()


@pytest.mark.heavy
def test_an_approximate_memory_is_kept_by_a_run(tmp_path: Path) -> None:
    lm, exact = make_lm(capacity=2000, memory="graph"), make_lm(capacity=2000)
    assert isinstance(lm.memory, mbpa.GraphMemory)
    for each in (lm, exact):
        each.read(TEXT, source="heron")
        each.read(OTHER, source="shop")
    assert get_scores(lm) == get_scores(exact)  # so few tokens are compared with all
    lm.forget("shop")
    lm.save(tmp_path / "run")
    lm.close()
    loaded = MemoryLM.load(tmp_path / "run", make_model(), make_tokenizer())
    assert isinstance(loaded.memory, mbpa.GraphMemory)
    exact.forget("shop")
    assert get_scores(loaded) == get_scores(exact)
    loaded.close()
    other = MemoryLM.load(tmp_path / "run", make_model(), make_tokenizer(), memory="exact")
    assert isinstance(other.memory, mbpa.ExactMemory)
    other.close()
