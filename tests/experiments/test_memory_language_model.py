"""The experiment on a language model with a memory, with a tiny network and made-up corpora."""

from __future__ import annotations

import json
import lzma
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_language_model import TEXT, make_model, make_tokenizer
from torch import Tensor, nn

import mbpa
from experiments.data.sources import MissingDataError
from experiments.experiment import find
from experiments.memory_language_model import EXPERIMENT
from experiments.memory_language_model.comparison import (
    Comparison,
    find_weight,
    measure_perplexity,
    mix,
)
from experiments.memory_language_model.config import PRESETS, MemoryLanguageConfig
from experiments.memory_language_model.figures import sections
from experiments.memory_language_model.fitting import Tables, fit_reaches, start_unrolled
from experiments.memory_language_model.library import BOTH, DOMAIN, Library
from experiments.memory_language_model.library import TEXT as SO_FAR
from experiments.memory_language_model.networks import (
    FineTuning,
    States,
    compute_states,
    fine_tune,
    get_head,
    make_head,
    plan_windows,
)
from experiments.memory_language_model.texts import Text, read_documents
from experiments.results import Record, Result, read_results
from experiments.running import Run, execute
from mbpa.language.gate import Neighborhood, Reach, ScaledAdapted

CPU = torch.device("cpu")
STAGES = ("choose", "test", "memories", "curves")
pytestmark = pytest.mark.filterwarnings("ignore:.*torch_dtype.*")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with corpora and a network."""
    root = tmp_path_factory.mktemp("memory-language-model")
    for split, times in {"train": 6, "valid": 2, "test": 2}.items():
        wiki, docs = root / "data" / "wikitext-2", root / "data" / "python-docs"
        for each in (wiki, docs):
            each.mkdir(parents=True, exist_ok=True)
        with lzma.open(wiki / f"wiki.{split}.tokens.xz", "wt", encoding="utf-8") as file:
            file.write(TEXT * times)
        with lzma.open(docs / f"{split}.jsonl.xz", "wt", encoding="utf-8") as file:
            for number in range(times):
                file.write(json.dumps({"path": f"{number}.rst", "text": TEXT}) + "\n")
    make_model().save_pretrained(root / "model")
    make_tokenizer().save_pretrained(root / "model")
    return root


def make_library(texts: tuple[int, ...] = (300, 80, 80), k: int = 64) -> Library:
    """Return a library of random states around one centre per token."""
    draws = torch.Generator().manual_seed(0)
    centers = 2 * torch.randn(30, 8, generator=draws)

    def make(count: int) -> States:
        labels = torch.randint(30, (count,), generator=draws)
        noise = torch.randn(count, 8, generator=draws)
        return States((centers[labels] + noise).half(), labels)

    head = nn.Linear(8, 30, bias=False).requires_grad_(False)
    head.weight.copy_(0.3 * torch.randn(30, 8, generator=draws))
    names = ("train", "valid", "test")
    return Library(head, {name: make(n) for name, n in zip(names, texts, strict=True)}, k)


def test_every_token_but_the_first_is_scored_once_with_enough_context() -> None:
    lengths = (100, 1, 7, 40)
    scored: list[int] = []
    for start, stop, first in plan_windows(lengths, 16):
        assert stop - start <= 16
        begin = max(place for place in (0, 100, 101, 108) if place <= start)
        assert first - start >= min(8, first - begin)
        scored += range(first, stop)
    firsts = {0, 100, 101, 108}
    assert scored == [place for place in range(148) if place not in firsts]


def test_states_are_those_of_the_model_within_a_window() -> None:
    model = make_model()
    ids = torch.tensor(make_tokenizer()(TEXT)["input_ids"])[:30]
    states = compute_states(model, Text(ids, (30,)), window=32, batch=2)
    with torch.no_grad():
        hidden = model.base_model(ids[None]).last_hidden_state[0, :-1]
    torch.testing.assert_close(states.keys.float(), hidden, atol=2e-2, rtol=2e-3)
    assert torch.equal(states.targets, ids[1:])


def test_fine_tuning_learns_the_text_and_leaves_the_network_alone() -> None:
    model = make_model()
    ids = torch.tensor(make_tokenizer()(TEXT)["input_ids"])
    text, before = Text(ids, (len(ids),)), model.lm_head.weight.detach().clone()

    def measure(network: nn.Module) -> float:
        states = compute_states(network, text, 32, 4)
        outputs = make_head(get_head(network), CPU)(states.keys.float())
        return float(nn.functional.cross_entropy(outputs, states.targets))

    tuned, seconds = fine_tune(model, text, 32, FineTuning(10, 1e-2, batch=2), seed=0)
    assert measure(tuned) < measure(model) - 0.5
    assert torch.equal(model.lm_head.weight, before)
    assert seconds > 0


def test_neighbours_from_the_text_lie_before_the_token() -> None:
    library = make_library()
    start = library.starts["valid"]
    found = library.find("valid", SO_FAR)
    for token, slots in enumerate(found.slots):
        there = slots[slots >= 0]
        assert len(there) == min(token, 64)
        assert ((there >= start) & (there < start + token)).all()


def test_neighbours_from_both_are_the_nearest_of_either() -> None:
    library = make_library()
    domain, text = library.find("valid", DOMAIN), library.find("valid", SO_FAR)
    both = library.find("valid", BOTH)
    expected = torch.cat([domain.distances, text.distances], 1).sort(1).values[:, :64]
    assert torch.equal(both.distances, expected)


def test_a_text_does_not_find_itself_in_the_domain() -> None:
    library, fresh = make_library(), make_library()
    library.add_texts()
    assert len(library.memory) > len(fresh.memory)
    for split in ("valid", "test"):
        assert torch.equal(library.find(split).slots, fresh.find(split).slots)


def test_scores_are_those_of_a_memory_read_directly() -> None:
    library, part = make_library(), mbpa.NeighborVote(k=16, smoothing=0.1)
    scores = library.score("valid", library.find("valid"), {"vote": part})
    model = mbpa.MbPA(head=library.head, memory=library.memory, predictor=part)
    states = library.states["valid"]
    direct = model(keys=states.keys.float()).gather(1, states.targets[:, None])[:, 0]
    torch.testing.assert_close(scores.parts["vote"].scores, direct)


def test_the_unrolled_adaptation_is_the_engine() -> None:
    library, reach = make_library(), Reach()
    found, rows = library.find("valid").first(16), torch.arange(20)
    context = library.make_context("valid", rows, found, 16)
    targets = library.states["valid"].targets[rows]
    unrolled = start_unrolled(library, Tables.make(library), context, targets)
    weights = reach.weigh(Neighborhood.measure(context))
    part = ScaledAdapted(reach, steps=5, k=16)
    scores = library.score("valid", found, {"part": part}, rows=rows).parts["part"].scores
    torch.testing.assert_close(unrolled.adapt(weights, 5), scores, atol=1e-3, rtol=1e-3)


def test_a_fitted_reach_predicts_better() -> None:
    library = make_library((300, 200, 20))

    def measure(reach: Reach) -> float:
        part = ScaledAdapted(reach, steps=3, k=16)
        scores = library.score("valid", library.find("valid"), {"part": part})
        return measure_perplexity(scores.parts["part"].scores)

    (fitted,) = fit_reaches(
        [library], "valid", DOMAIN, [Reach()], k=16, steps=3, updates=60, batch=64, lr=0.1
    )
    assert measure(fitted) < 0.9 * measure(Reach())


def test_the_best_weight_is_found() -> None:
    def log(*shares: float) -> Tensor:
        return torch.tensor(shares).log()

    model, other = log(0.5, 0.5), log(0.9, 0.0)
    weight, value = find_weight(model, other)
    assert 0 < weight < 1
    assert value == pytest.approx(measure_perplexity(mix(model, other, weight)))
    assert find_weight(model, log(0.9, 0.9))[0] == 1


@pytest.mark.heavy
def test_the_smoke_preset_runs_and_is_reported(folder: Path, tmp_path: Path) -> None:
    config = replace(PRESETS["smoke"], model=str(folder / "model"))
    run = Run(EXPERIMENT, "smoke", config, tmp_path)
    (result,) = execute(run, device=CPU, data_dir=folder / "data", progress=False)
    found = {
        (r["corpus"], r["method"], r.get("split"))
        for r in result.metrics
        if r["name"] == "perplexity"
    }
    for corpus in ("wikitext-2", "python-docs"):
        for method in ("model", "cache", "kNN-LM", "kNN-LM (gated)", "MbPA", "MbPA (gated)"):
            assert (corpus, method, "test") in found
    assert read_results(tmp_path, "memory-language-model")[0].metrics == result.metrics
    titles = [table.title for section in sections([result]) for table in section.tables]
    assert "WikiText-2, frozen network, memory of the domain" in titles
    assert any("by tokens read" in title for title in titles)


@pytest.mark.heavy
def test_an_interrupted_run_goes_on_where_it_was(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, corpora = str(folder / "model"), ("wikitext-2",)
    config = replace(PRESETS["smoke"], model=model, corpora=corpora, networks=("tuned-1",))
    ran, whole = list[str](), Comparison.run

    def run(comparison: Comparison, stage: str) -> None:
        ran.append(stage)
        if ran.count(stage) == 1:
            raise KeyboardInterrupt
        whole(comparison, stage)

    def start(out: Path) -> list[Record]:
        started = Run(EXPERIMENT, "smoke", config, out)
        (result,) = execute(started, device=CPU, data_dir=folder / "data", progress=False)
        return [each for each in result.metrics if "seconds" not in str(each["name"])]

    expected = start(tmp_path / "whole")
    monkeypatch.setattr(Comparison, "run", run)
    for _ in STAGES:
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path / "interrupted")
    assert start(tmp_path / "interrupted") == expected
    assert ran == [stage for stage in STAGES for _ in range(2)]


def test_missing_corpora_and_wrong_settings_are_named(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"python-docs is not in .*train\.jsonl"):
        read_documents("python-docs", "train", tmp_path)
    with pytest.raises(ValueError, match="networks must be among"):
        MemoryLanguageConfig(networks=("other",))
    with pytest.raises(ValueError, match="k must be at least every number of neighbours"):
        MemoryLanguageConfig(k=64)


def test_the_experiment_is_listed() -> None:
    assert find("memory-language-model") is EXPERIMENT


def test_committed_results_have_tables() -> None:
    results: list[Result] = read_results(
        Path(__file__).parents[2] / "results", "memory-language-model"
    )
    if not results:
        pytest.skip("it has not been run: python -m experiments run memory-language-model")
    assert sections(results)[0].tables
