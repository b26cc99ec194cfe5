"""The paper's figure 2 in numbers: the adapted network beats the network, and attention."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import mbpa
from experiments import cli, illustration
from experiments.experiment import Context
from experiments.illustration import EXPERIMENT, IllustrationConfig, adapt_function
from experiments.results import Record, Result, read_results
from experiments.workspace import Workspace

METHODS = ("parametric", "attention", "MbPA")
SMOKE = EXPERIMENT.presets["smoke"]
TINY = replace(SMOKE, mbpa_steps=5, queries=20, figure_points=11)


def context(folder: Path) -> Context:
    return Context(torch.device("cpu"), None, Workspace(folder), progress=False)


def error(records: list[Record], method: str) -> float:
    (value,) = [
        record["value"]
        for record in records
        if (record["method"], record["name"]) == (method, "mean_squared_error")
    ]
    return value


def points(records: list[Record], method: str, name: str) -> dict[float, float]:
    found = [r for r in records if (r["method"], r["name"]) == (method, name)]
    return {record["x"]: record["value"] for record in found}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[int | None, list[Record]]:
    config = replace(EXPERIMENT.presets["quick"], seeds=(0, 1, 2))
    return illustration.run(config, context(tmp_path_factory.mktemp("work")))


def test_the_adapted_network_beats_the_network_and_attention(records) -> None:
    means = {m: statistics.fmean(error(r, m) for r in records.values()) for m in METHODS}
    assert means["MbPA"] < 0.5 * means["attention"]
    assert means["MbPA"] < 0.5 * means["parametric"]
    for found in records.values():
        assert error(found, "MbPA") < min(error(found, "attention"), error(found, "parametric"))


def test_the_network_cannot_explain_all_memories_and_the_adapted_one_can(records) -> None:
    memories = points(records[0], "memory", "entry")
    config = EXPERIMENT.presets["quick"]
    scene = illustration._Scene.draw(config, 0, torch.device("cpu"))
    predictors = config.predictors()
    misses = {
        method: (scene.model(predictors[method])(scene.x) - scene.y).abs().max().item()
        for method in ("parametric", "MbPA")
    }
    assert len(memories) == config.points
    assert misses["parametric"] > 0.3
    assert misses["MbPA"] < 0.5 * misses["parametric"]


def test_at_the_query_of_the_figure_the_three_are_in_the_order_of_the_paper(records) -> None:
    query = EXPERIMENT.presets["quick"].figure_query
    (truth,) = points(records[0], "truth", "prediction").values()
    off = {m: abs(points(records[0], m, "prediction")[query] - truth) for m in METHODS}
    assert off["MbPA"] < 0.2 < min(off["attention"], off["parametric"])
    weights = [r["weight"] for r in records[0] if r["name"] == "entry" and r["weight"] is not None]
    assert len(weights) == EXPERIMENT.presets["quick"].mbpa_k
    assert sum(weights) == pytest.approx(1, abs=1e-4)


def test_the_adapted_function_is_the_one_the_library_predicts_with() -> None:
    config = replace(SMOKE, mbpa_steps=20)
    scene = illustration._Scene.draw(config, 3, torch.device("cpu"))
    model = scene.model(config.predictors()["MbPA"])
    before = [p.clone() for p in scene.head.parameters()]
    for x in (-1.7, 0.0, 1.2):
        query = torch.tensor([[x]])
        torch.testing.assert_close(adapt_function(model, query)(query), model(query))
    assert all(map(torch.equal, before, scene.head.parameters()))


def test_far_from_the_query_its_adapted_network_is_not_what_others_get(records) -> None:
    everywhere = points(records[0], "MbPA", "curve")
    for_the_query = points(records[0], "MbPA", "adapted for the query")
    assert everywhere.keys() == for_the_query.keys()
    assert max(abs(everywhere[x] - for_the_query[x]) for x in everywhere) > 0.3


@pytest.mark.heavy
def test_the_same_seed_gives_the_same_records_and_disturbs_no_random_numbers(tmp_path) -> None:
    torch.manual_seed(5)
    first = illustration.run(TINY, context(tmp_path / "a"))
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), drawn)
    assert illustration.run(TINY, context(tmp_path / "b")) == first
    other = illustration.run(replace(TINY, seeds=(1, 0)), context(tmp_path / "c"))
    assert other[0] == first[0]
    assert error(other[1], "MbPA") != error(first[0], "MbPA")


def test_seeds_that_are_done_are_not_done_again(tmp_path, monkeypatch) -> None:
    config = replace(TINY, seeds=(0, 1))
    first = illustration.run(config, context(tmp_path))
    monkeypatch.setattr(illustration, "_measure_seed", lambda *_: pytest.fail("it was done"))
    assert illustration.run(config, context(tmp_path)) == first


def test_the_search_tries_every_setting_and_resumes_where_it_was(tmp_path, monkeypatch) -> None:
    grids = {
        "attention": {"attention_k": (1, 5)},
        "MbPA": {"mbpa_lr": (0.05, 5.0), "mbpa_steps": (1, 5)},
    }
    found = illustration.tune(SMOKE, context(tmp_path), grids=grids)[None]
    monkeypatch.setattr(illustration._Scene, "error", lambda *_: pytest.fail("it was done"))
    assert illustration.tune(SMOKE, context(tmp_path), grids=grids)[None] == found
    tried = [r for r in found if r["name"] == "mean_squared_error"]
    assert len(tried) == 6
    chosen = {r["setting"]: r["value"] for r in found if r["name"] == "chosen"}
    best = min((r for r in tried if r["method"] == "MbPA"), key=lambda r: r["value"])
    assert (chosen["mbpa_lr"], chosen["mbpa_steps"]) == (best["mbpa_lr"], best["mbpa_steps"])
    assert chosen["mbpa_lr"] == 0.05


def test_the_settings_are_what_the_search_chose() -> None:
    folder = Path(__file__).parents[2] / "results"
    (search,) = [r for r in read_results(folder, "illustration") if r.preset == "tune-paper"]
    chosen = {r["setting"]: r["value"] for r in search.metrics if r["name"] == "chosen"}
    assert set(chosen) == {name for grid in illustration.GRIDS.values() for name in grid}
    assert chosen == {name: getattr(EXPERIMENT.presets["paper"], name) for name in chosen}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": ()}, "seeds must name at least one"),
        ({"points": 1}, "points must be at least 2, got 1"),
        ({"figure_query": 3.0}, "figure_query must be between"),
    ],
)
def test_impossible_settings_are_refused(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        IllustrationConfig(**changes)


@pytest.mark.heavy
def test_the_report_is_drawn_from_results_alone(tmp_path, monkeypatch, capsys) -> None:
    out = str(tmp_path / "results")
    assert (
        cli.main(["run", "illustration", "--preset", "smoke", "--out", out, "--no-progress"]) == 0
    )
    assert "mean squared error" in capsys.readouterr().out
    for name in ("ExactMemory", "MbPA"):
        monkeypatch.setattr(mbpa, name, lambda *_, **__: pytest.fail("nothing is computed"))
    assert cli.main(["report", out, "--out", str(tmp_path / "report")]) == 0
    assert (tmp_path / "report" / "illustration.png").stat().st_size > 10_000
    page = (tmp_path / "report" / "index.html").read_text()
    value = error(read_results(Path(out), "illustration")[0].metrics, "MbPA")
    assert f'<td class="number">{value:.4f}</td>' in page


def test_without_the_seed_of_the_figure_there_is_a_table_alone(tmp_path) -> None:
    found = illustration.run(replace(TINY, seeds=(7,)), context(tmp_path))
    result = Result("illustration", "smoke", 7, {"queries": 50}, {}, 1.0, "mbpa", found[7])
    (section,) = EXPERIMENT.sections([result])
    assert not section.figures
    assert [row[0] for row in section.tables[0].rows] == list(METHODS)
