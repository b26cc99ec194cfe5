"""New image classes: the search, sensitivities, the long run, neighbourhoods; without a network.

Features are drawn at random around a point for each class, so nothing has to be trained.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mbpa
from experiments import data
from experiments.experiment import Context
from experiments.images import (
    INCREMENTAL,
    NEIGHBOURHOODS,
    SENSITIVITY,
    UNBALANCED,
    neighbourhoods,
    sensitivity,
    tuning,
)
from experiments.images import task as task_module
from experiments.images.config import ImagesConfig
from experiments.images.incremental import (
    compare_models,
    describe_situation,
    follow_stream,
    run_split,
    select_scored,
)
from experiments.images.methods import (
    WITH_SETTINGS,
    BalancedAdaptation,
    ImageMethod,
    PreservingAdaptation,
    ScaledAdaptation,
    make_model,
)
from experiments.images.neighbourhood_figures import shown_in
from experiments.images.neighbourhoods import NeighbourhoodsConfig, choose_queries, number_images
from experiments.images.presets import (
    PAPER,
    PRESETS,
    SMOKE,
    copy_fields,
    count_images_per_epoch,
)
from experiments.images.sensitivity import Study, corrections
from experiments.images.task import ImageTask
from experiments.methods import Vote, VoteMixture
from experiments.results import Record, Result
from experiments.running import Run, execute
from experiments.workspace import Workspace

ROOT = Path(__file__).parents[2]
CLASSES, OLD, TRAIN, HELD, TEST, SIZE = 6, 3, 60, 20, 30, 16
NAMES = tuple(f"thing {number}, of some kind" for number in range(200))


@pytest.fixture(scope="module")
def task() -> ImageTask:
    draws = torch.Generator().manual_seed(3)
    centres = 2 * torch.rand(CLASSES, SIZE, generator=draws)
    classes = torch.tensor([40, 7, 12, 99, 3, 150])

    def part(each: int, more: int = 0) -> tuple[Tensor, Tensor]:
        counts = each + torch.arange(CLASSES) % (more + 1)
        labels = classes.argsort().repeat_interleave(counts)  # in the data set's order of classes
        noise = torch.randn(len(labels), SIZE, generator=draws)
        return (centres[labels] + 0.9 * noise).relu(), labels  # no feature is negative

    train, validation, test = part(TRAIN, 2), part(HELD), part(TEST)
    known = torch.nn.Linear(SIZE, OLD)
    with torch.no_grad():
        known.weight.copy_(centres[:OLD])
        known.bias.copy_(-centres[:OLD].square().sum(1) / 2)
    weight, bias = known.weight.detach(), known.bias.detach()
    return ImageTask(OLD, classes, *train, *validation, *test, weight, bias, 0.5)


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(torch.device("cpu"), tmp_path, Workspace(tmp_path / "work"), False, tmp_path)


@pytest.fixture
def _given(task: ImageTask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the given task instead of training a network."""
    for module in (sensitivity, neighbourhoods):
        monkeypatch.setattr(module, "make_image_task", lambda config, context, seed: task)


def of(records: list[Record], **fields: object) -> list[Record]:
    return [r for r in records if all(r.get(name) == value for name, value in fields.items())]


def result(name: str, config: Any, records: list[Record], seed: int = 1) -> Result:
    told = json.loads(json.dumps(vars(config), default=vars))
    return Result(name, "smoke", seed, told, {}, 1.0, f"python -m experiments run {name}", records)


def drawn(section: Any) -> Iterator[Any]:
    figures = pytest.importorskip("matplotlib.figure")
    for figure in section.figures:
        canvas = figures.Figure(figsize=figure.size, layout="constrained")
        figure.draw(canvas)
        canvas.canvas.draw()
        yield canvas


# The search


NEAR = {"k": (3, 8), "bandwidth": (0.0, 0.5)}
STEPS = {"lr": (0.01, 1.0), "initial_square": (0.0, 1.0)}
FEW = {
    "memory only": ImageMethod("", "vote", (NEAR,)),
    "mixture": ImageMethod("", "mixture", (NEAR, {"weight": (0.5, 0.3, 0.7)})),
    "MbPA (RMSprop)": ImageMethod("", "rmsprop", (STEPS, {"decay": (0.0, 0.1)})),
    "MbPA (gradient)": ImageMethod("", "gradient", ({"lr": (0.3, 3.0)}, {"steps": (1, 2)})),
    "MbPA (kept)": ImageMethod("", "kept", ({"k": (5, 20), "lr": (0.1, 3.0)},), keeps_old=True),
}
SEARCHED = replace(SMOKE, scored=40, rehearsed=0, rmsprop=ScaledAdaptation("rmsprop", steps=2, k=8))


TARGET_EPOCHS = 0.2


def search_in(
    context: Context,
    task: ImageTask,
    points: tuple[float, ...] = (0.2, 0.4),
    scored_images: int = tuning.SCORED_IMAGES,
) -> list[Record]:
    """Search few settings, judged at these points of the stream."""
    return tuning.search_settings(
        task,
        replace(tuning.make_search_config(SEARCHED), points=points),
        context,
        methods=FEW,
        layer_rates=(0.03, 0.3),
        target_epochs=TARGET_EPOCHS,
        scored_images=scored_images,
    )


def test_the_search_takes_what_did_best_on_images_that_were_held_out(
    task: ImageTask, context: Context
) -> None:
    records = search_in(context, task)
    settled = {str(r["setting"]): r["value"] for r in of(records, name="chosen")}
    assert {"lr", "vote.k", "mixture.weight", "rmsprop.initial_square", "gradient.steps"} <= set(
        settled
    )
    assert "gradient.initial_square" not in settled  # nothing was tried
    assert {r["initial_square"] for r in of(records, method="MbPA (RMSprop)")} == {0.0, 1.0}
    config = tuning.make_search_config(SEARCHED)
    config = replace(config, lr=float(settled["lr"] or 0), points=(0.2, 0.4))
    rows = torch.randperm(len(task.validation), generator=torch.Generator().manual_seed(0))
    queries, truth = task.validation[rows[: config.scored]], task.validation_labels[rows]
    for method, kind, names in (
        ("memory only", Vote, ("k", "bandwidth")),
        ("mixture", VoteMixture, ("k", "bandwidth", "weight")),  # it changes with the layer
    ):
        tried = of(records, name="top1", method=method)
        best = max(tried, key=lambda record: float(record["value"] or 0))
        field = WITH_SETTINGS[method].settings
        assert all(settled[f"{field}.{name}"] == best[name] for name in names)
        values = []
        for moment in follow_stream(task, config, tuning.SPLIT):
            settings = kind(**{name: best[name] for name in names})
            model = make_model(settings, describe_situation(moment, task))
            right = compare_models({"": model}, queries, truth[: config.scored])
            values.append(100 * float(right[""].double().mean()))
        assert best["value"] == pytest.approx(sum(values) / len(values))


@pytest.mark.heavy
def test_a_search_that_is_interrupted_anywhere_ends_with_the_same_records(
    task: ImageTask, context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged, left = [0], [-1]
    real = tuning.Snapshot.score

    def score(snapshot: tuning.Snapshot, settings: Any) -> tuning.Score:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        judged[0] += 1
        return real(snapshot, settings)

    monkeypatch.setattr(tuning.Snapshot, "score", score)
    expected = search_in(context, task, points=(0.2,))
    total = judged[0]
    for stop in (*random.sample(range(total - 2), 3), total - 2):  # the last are of kept
        folder = tmp_path / f"interrupted-{stop}"
        left[0] = stop
        own = replace(context, workspace=Workspace(folder))
        with pytest.raises(KeyboardInterrupt):
            search_in(own, task, points=(0.2,))
        judged[0], left[0] = 0, -1
        assert search_in(own, task, points=(0.2,)) == expected
        assert judged[0] == total - stop  # nothing is judged twice


@pytest.fixture(scope="module")
def rehearsing(task: ImageTask) -> ImageTask:
    """The same task, with the held-out images of known classes set aside for a rehearsal."""
    is_known = task.validation_labels < OLD
    return replace(
        task,
        rehearsal=task.validation[is_known],
        rehearsal_labels=task.validation_labels[is_known],
    )


@pytest.mark.parametrize("lost", [-100.0, 0.0, 3.0, 8.0, 20.0, 200.0])
def test_the_margin_is_the_smallest_that_loses_no_more_than_allowed(
    rehearsing: ImageTask, lost: float
) -> None:
    config = replace(SMOKE, points=(0.4,), kept=PreservingAdaptation(k=20, lost=lost))
    (moment,) = follow_stream(rehearsing, config, 1)
    situation = describe_situation(moment, rehearsing, config)
    assert situation.rehearsal is not None
    queries, answers = situation.rehearsal.queries, situation.rehearsal.answers
    models = config.models(situation)

    def measure(model: Any) -> float:
        return 100 * float((model(queries).argmax(1) == answers).double().mean())

    baseline = max(measure(models[name]) for name in ("parametric", "memory only", "mixture"))
    kept = models["MbPA (kept)"]
    margin = float(kept.margins[-1])
    assert kept.margins.tolist() == [0.0] * OLD + [margin] * (CLASSES - OLD)
    highest = measure(replace(kept, margins=1e6 * _is_new()))
    assert measure(kept) >= min(baseline - lost, highest) - 1e-6
    if lost < 100:  # with any smaller one, more is lost
        less = measure(replace(kept, margins=(margin - 1e-3) * _is_new()))
        assert less < min(baseline - lost, highest)
    told = of(run_split(rehearsing, config, 1), method="MbPA (kept)", name="margin")
    assert [record["value"] for record in told] == [pytest.approx(margin)]  # negative ones, too
    alone = describe_situation(moment, rehearsing)  # without baselines there is no rehearsal
    assert not config.models(alone)["MbPA (kept)"].margins.any()


def _is_new() -> Tensor:
    return (torch.arange(CLASSES) >= OLD).float()


def test_what_is_to_keep_the_old_classes_is_judged_once_its_margin_is_rehearsed(
    rehearsing: ImageTask, context: Context
) -> None:
    config = replace(tuning.make_search_config(SEARCHED), points=(0.2, 0.4), rehearsed=HELD)
    records = tuning.search_settings(
        rehearsing,
        config,
        context,
        methods=FEW,
        layer_rates=(0.3,),
        target_epochs=TARGET_EPOCHS,
        scored_images=30,  # fewer than for those that keep the old classes
    )
    settled = {str(r["setting"]): r["value"] for r in of(records, name="chosen")}
    vote = Vote(int(settled["vote.k"] or 0), float(settled["vote.bandwidth"] or 0))
    mixed = VoteMixture(*(settled[f"mixture.{name}"] for name in ("k", "bandwidth", "weight")))
    config = replace(config, lr=0.3, points=(TARGET_EPOCHS,), vote=vote, mixture=mixed)
    rows = torch.randperm(len(rehearsing.validation), generator=torch.Generator().manual_seed(0))
    queries, truth = rehearsing.validation[rows[:40]], rehearsing.validation_labels[rows[:40]]
    (moment,) = follow_stream(rehearsing, config, tuning.SPLIT)
    situation = describe_situation(moment, rehearsing, config)
    tried = of(records, method="MbPA (kept)")
    assert {(r["k"], r["lr"]) for r in tried} == {(5, 0.1), (5, 3.0), (20, 0.1), (20, 3.0)}
    for trial in tried:
        settings = PreservingAdaptation(k=int(trial["k"] or 0), lr=float(trial["lr"] or 0))
        right = make_model(settings, situation)(queries).argmax(1) == truth
        assert (trial["name"], trial["subset"]) == ("top1", "all")
        assert trial["value"] == pytest.approx(100 * float(right.double().mean()))
    best = max(tried, key=lambda record: float(record["value"] or 0))
    assert (settled["kept.k"], settled["kept.lr"]) == (best["k"], best["lr"])


def test_the_balance_of_classes_is_searched_with_few_images_of_some(
    task: ImageTask, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "make_image_task", lambda config, context, seed: task)
    config = replace(UNBALANCED.presets["smoke"], batch=8, gradient=ScaledAdaptation(lr=3.0, k=15))
    records = tuning.tune_balance(config, context)[None]
    tried = {float(r["power"] or 0): float(r["value"] or 0) for r in of(records, name="top1")}
    assert set(tried) == {0.0, 0.25, 0.5, 0.75, 1.0}
    assert {r["method"] for r in of(records, name="top1")} == {"MbPA (balanced)"}
    (chosen,) = of(records, name="chosen")
    assert chosen["setting"] == "balanced.power"
    assert tried[float(chosen["value"] or 0)] == max(tried.values())
    searched = tuning.make_balance_search_config(config)
    assert searched == tuning.make_balance_search_config(searched)
    queries, truth = select_scored(task, searched)
    values = []
    for moment in follow_stream(task, searched, tuning.SPLIT):
        settings = BalancedAdaptation(**vars(config.gradient), power=0.5)
        model = make_model(settings, describe_situation(moment, task))
        values.append(100 * float((model(queries).argmax(1) == truth).double().mean()))
    assert tried[0.5] == pytest.approx(sum(values) / len(values))


def test_the_lead_over_the_layer_is_compared_split_by_split(task: ImageTask) -> None:
    config = replace(UNBALANCED.presets["smoke"], points=(0.5, 1.0))
    splits = [run_split(task, replace(config, lr=lr), 1) for lr in (0.1, 0.3)]
    results = [
        result("unbalanced-images", config, found, seed) for seed, found in enumerate(splits)
    ]
    (section,) = UNBALANCED.sections(results)
    leads = section.tables[1]
    assert [row[0] for row in leads.rows] == [n for n in config.methods if n != "parametric"]
    row = next(row for row in leads.rows if row[0] == "MbPA (balanced)")
    expected = []
    for found in splits:
        value = {
            (r["method"], r["subset"]): float(r["value"] or 0)
            for r in of(found, name="top1", epochs=1.0)
        }
        scarce, full = (
            value["MbPA (balanced)", subset] - value["parametric", subset]
            for subset in ("novel-scarce", "novel-full")
        )
        expected.append((scarce, full, scarce - full))
    for cell, values in zip(row[1:], zip(*expected, strict=True), strict=True):
        mean, deviation = map(float, cell.split(" ± "))
        assert mean == pytest.approx(statistics.fmean(values), abs=0.051)
        assert deviation == pytest.approx(statistics.stdev(values), abs=0.051)


def test_a_method_that_some_splits_lack_is_not_in_the_report(task: ImageTask) -> None:
    config = UNBALANCED.presets["smoke"]
    records = run_split(task, config, 1)
    older = [record for record in records if record["method"] != "MbPA (balanced)"]
    results = [result("unbalanced-images", config, found) for found in (older, records)]
    for table in UNBALANCED.sections(results)[0].tables:
        assert "MbPA (balanced)" not in {row[0] for row in table.rows}


def test_the_search_says_what_it_ran_with_and_forgets_what_was_chosen_before() -> None:
    tuned = replace(PAPER, lr=0.7, gradient=ScaledAdaptation(lr=9.0), seeds=(3,))
    asked = Run(INCREMENTAL, "paper", tuned, Path("results"), "tune").settings
    assert asked == tuning.make_search_config(PAPER) == tuning.make_search_config(asked)
    assert (asked.part, asked.seeds, asked.points) == ("validation", (0,), tuning.POINTS_EPOCHS)
    assert asked.gradient == ImagesConfig().gradient


def test_the_paper_preset_is_what_the_search_chose() -> None:
    path = ROOT / "results" / "incremental-images" / "tune-paper.json"
    if not path.exists():
        pytest.skip(
            "the search has not been run: experiments tune incremental-images --preset paper"
        )
    checked = 0
    for record in json.loads(path.read_text("utf-8"))["metrics"]:
        if record["name"] == "chosen":
            value: object = PRESETS["paper"]
            for part in record["setting"].split("."):
                value = getattr(value, part)
            assert value == record["value"], record
            checked += 1
    assert checked > 10


def test_all_experiments_have_the_settings_of_the_comparison() -> None:
    fields = ["lr", "momentum", *(method.settings for method in tuning.SEARCHED.values())]
    for experiment in (UNBALANCED, SENSITIVITY, NEIGHBOURHOODS):
        for name, config in experiment.presets.items():
            for field in fields:
                assert getattr(config, field) == getattr(PRESETS[name], field)
    for config in UNBALANCED.presets.values():  # besides the balance, there is no difference
        power = config.balanced.power
        assert config.balanced == BalancedAdaptation(**vars(config.gradient), power=power)


def test_memories_hold_one_epoch_of_images() -> None:
    for experiment in (INCREMENTAL, UNBALANCED, SENSITIVITY, NEIGHBOURHOODS):
        for config in experiment.presets.values():
            assert config.capacity == count_images_per_epoch(config)
    smoke = UNBALANCED.presets["smoke"]  # six classes, of which three are new, one of them scarce
    assert smoke.capacity == 3 * (500 - smoke.rehearsed) + 2 * 500 + 50


def test_images_that_are_stored_twice_do_not_change_the_scale(task: ImageTask) -> None:
    config = replace(SMOKE, points=(1.0, 3.0), capacity=10_000)
    for moment in follow_stream(task, config, 1):
        keys, situation = task.train[moment.passed.unique()], describe_situation(moment, task)
        whitened = situation.whitened_memory.known.whitening(keys)
        for each, scale in ((keys, situation.scale), (whitened, situation.whitened_memory.scale)):
            distances = torch.cdist(each, each).fill_diagonal_(torch.inf)
            near = float(distances.amin(1).mean())
            assert scale.near == pytest.approx(near, rel=0.02)  # of 1,000 entries
    assert len(moment.memory) > 2 * len(task.train)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("_given")
def test_all_of_it_runs_on_a_gpu_and_says_the_same(
    task: ImageTask, context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on(device: str) -> list[list[Record]]:
        where = torch.device(device)
        told = {n: v.to(where) if isinstance(v, Tensor) else v for n, v in vars(task).items()}
        there, place = ImageTask(**told), Workspace(tmp_path / device)
        monkeypatch.setattr(neighbourhoods, "make_image_task", lambda config, context, seed: there)
        monkeypatch.setattr(neighbourhoods, "class_names", lambda config, context: NAMES)
        own = replace(context, device=where, workspace=place)
        found = [search_in(own, there), run_split(there, SMOKE, 1)]
        return [*found, Study(there, SENSITIVE, 1).stream(), neighbourhoods.run(SHOWN, own)[1]]

    for ours, theirs in zip(on("cuda"), on("cpu"), strict=True):
        named = [{**record, "value": None} for record in ours if record["name"] != "chosen"]
        assert len(named) == sum(record["name"] != "chosen" for record in theirs)
        for mine, other in zip(ours, theirs, strict=True):
            if mine["name"] == "top1":
                assert mine["value"] == pytest.approx(other["value"], abs=3)  # few queries


# Sensitivities and the long run

SENSITIVE = replace(
    sensitivity.PRESETS["smoke"],
    at=(0.5,),
    capacities=(0.1, 0.4),
    counts=(1, 10, 1000),
    long=(0.5, 3.0),
    points=(0.1, 0.3),
    scored=60,
    explained=20,
    vote=Vote(8),
    mixture=VoteMixture(8),
    rmsprop=ScaledAdaptation("rmsprop", lr=0.01, steps=2, k=8),
    gradient=ScaledAdaptation(lr=1.0, steps=3, k=8),
)


@pytest.fixture(scope="module")
def records(task: ImageTask) -> list[Record]:
    return Study(task, SENSITIVE, 1).stream()


def test_a_smaller_memory_holds_the_last_of_the_stream(
    task: ImageTask, records: list[Record]
) -> None:
    moment = next(iter(follow_stream(task, replace(SENSITIVE, points=(0.5,)), 1)))
    sizes = dict.fromkeys(r["capacity"] for r in of(records, epochs=0.5) if "capacity" in r)
    assert list(sizes) == [37, 146, 192]  # a tenth, two fifths, and all that has passed
    small = moment.with_capacity(37)
    rows = moment.passed[-37:]
    assert torch.equal(small.memory.entries().keys, task.train[rows])
    assert torch.equal(small.rows_of(small.memory.ids), rows)
    study = Study(task, SENSITIVE, 1)
    predictor = SENSITIVE.vote.predictor(describe_situation(small, task).scale)
    memory = mbpa.ExactMemory(37, SIZE)
    memory.write(task.train[rows], task.train_labels[rows])
    said = mbpa.MbPA(head=moment.head, memory=memory, predictor=predictor)(study.queries)
    right = 100 * float((said.argmax(1) == study.answers).double().mean())
    (found,) = of(records, capacity=37, epochs=0.5, method="memory only", subset="all")
    assert found["value"] == pytest.approx(right)


def test_only_the_sizes_of_the_memory_go_beyond_its_capacity(task: ImageTask) -> None:
    config = replace(SENSITIVE, capacity=40, at=(0.5,), long=(0.5,), counts=(10,))
    found = Study(task, config, 1).stream()
    assert {r["capacity"] for r in found if "capacity" in r} == {37, 146}
    (small,) = of(found, method="memory only", subset="all", name="top1", k=10)
    moment = next(iter(follow_stream(task, replace(config, points=(0.5,)), 1)))
    assert len(moment.memory) == 40
    study = Study(task, config, 1)
    model = mbpa.MbPA(
        head=moment.head,
        memory=moment.memory,
        predictor=replace(config.vote, k=10).predictor(describe_situation(moment, task).scale),
    )
    right = 100 * float((model(study.queries).argmax(1) == study.answers).double().mean())
    assert small["value"] == pytest.approx(right)


def test_one_retrieval_serves_all_numbers_of_neighbours(
    task: ImageTask, records: list[Record]
) -> None:
    moment = next(iter(follow_stream(task, replace(SENSITIVE, points=(0.5,)), 1)))
    study, situation = Study(task, SENSITIVE, 1), describe_situation(moment, task)
    for method in (name for name in WITH_SETTINGS if name in SENSITIVE.methods):
        settings: Any = SENSITIVE.settings(method)
        for k in (1, 10) if hasattr(settings, "k") else ():
            model = make_model(replace(settings, k=k), situation)
            said = model(study.queries)
            right = 100 * float((said.argmax(1) == study.answers).double().mean())
            (found,) = of(records, method=method, k=k, epochs=0.5, subset="all")
            assert found["value"] == pytest.approx(right, abs=1)
    assert not of(records, k=1000)  # there are not as many


def test_the_long_run_measures_how_far_things_move(task: ImageTask, records: list[Record]) -> None:
    long = [r for r in records if not {"k", "capacity", "lr"} & set(r)]
    assert {r["epochs"] for r in long} == {0.5, 3.0}
    methods = {r["method"] for r in of(long, name="change")}
    assert methods == {"MbPA (RMSprop)", "MbPA (gradient)"}
    moment = next(iter(follow_stream(task, replace(SENSITIVE, points=(0.5,)), 1)))
    study, local = Study(task, SENSITIVE, 1), SENSITIVE.gradient
    model = mbpa.MbPA(
        head=moment.head,
        memory=moment.memory,
        predictor=local.predictor(describe_situation(moment, task).scale),
    )
    found = corrections(model, study.queries[:5])
    for query, change, divergence, other in zip(study.queries[:5], *found.values(), strict=True):
        head = torch.nn.Linear(SIZE, CLASSES)
        head.load_state_dict(moment.head.state_dict())
        start = [p.detach().clone() for p in head.parameters()]
        near = moment.memory.read(query[None], local.k)
        weights = 1 / (near.distances[0] + 1e-3)
        optimizer = torch.optim.SGD(head.parameters(), model.predictor.rule.lr)
        for _ in range(local.steps):
            losses = torch.nn.functional.cross_entropy(
                head(near.keys[0]), near.values[0], reduction="none"
            )
            optimizer.zero_grad()
            (weights / weights.sum() * losses).sum().backward()
            optimizer.step()
        moved = [p.detach() - s for p, s in zip(head.parameters(), start, strict=True)]
        assert change == pytest.approx(float(sum(m.square().sum() for m in moved)) ** 0.5, rel=1e-3)
        p, q = (each(query).detach().softmax(0) for each in (head, moment.head))
        assert divergence == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-2, abs=1e-5)
        assert other == 100 * (p.argmax() != q.argmax())


@pytest.mark.heavy
@pytest.mark.usefixtures("_given")
def test_a_pass_that_is_done_is_not_done_again(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(SENSITIVE, at=(0.2,), capacities=(0.1,), long=(0.2,), points=(0.2,))
    done: list[float] = []
    real = Study.rate

    def rate(study: Study, lr: float) -> list[Record]:
        if len(done) == 1:
            raise KeyboardInterrupt
        done.append(lr)
        return real(study, lr)

    elsewhere = replace(context, workspace=Workspace(context.cache / "elsewhere"))
    expected = sensitivity.run(config, elsewhere)
    monkeypatch.setattr(Study, "rate", rate)
    with pytest.raises(KeyboardInterrupt):
        sensitivity.run(config, context)
    monkeypatch.setattr(Study, "rate", real)
    monkeypatch.setattr(Study, "stream", None)
    assert sensitivity.run(config, context) == expected
    assert {r.get("lr") for r in expected[1]} == {None, *config.rates}


def test_the_report_of_sensitivities_says_when_the_layer_catches_up(
    task: ImageTask, records: list[Record]
) -> None:
    study = Study(task, SENSITIVE, 1)
    records = [*records, *(r for lr in SENSITIVE.rates for r in study.rate(lr))]
    higher = [{**r, "value": float(r["value"] or 0) + 2.0} for r in records]
    results = [
        result("image-sensitivity", SENSITIVE, found, seed)
        for seed, found in ((1, records), (2, higher))
    ]
    sections = SENSITIVITY.sections(results)
    caught, shrinks = sections[-1].tables
    mean = {
        (method, epochs): float(
            of(
                records,
                method=method,
                subset="all",
                epochs=epochs,
                name="top1",
                **dict.fromkeys(("capacity", "k", "lr")),
            )[0]["value"]
            or 0
        )
        for method in ("parametric", "memory only")
        for epochs in SENSITIVE.long
    }
    behind = [e for e in SENSITIVE.long if mean["memory only", e] > mean["parametric", e]]
    later = [e for e in SENSITIVE.long if e > max(behind, default=0)]
    row = next(row for row in caught.rows if row[0] == "memory only")
    assert row[3] == (f"{later[0]:g}" if later else "not within 3")
    (first,) = of(records, name="change", method="MbPA (gradient)", subset="novel", epochs=0.5)
    wanted = ["MbPA (gradient)", "change of the layer", "new classes"]
    row = next(row for row in shrinks.rows if row[:3] == wanted)
    mean, deviation = map(float, row[3].split(" ± "))
    assert mean == pytest.approx(float(first["value"] or 0) + 1, rel=0.01)
    assert deviation == pytest.approx(2**0.5, rel=0.02)
    assert [len(section.figures) for section in sections] == [1, 1, 1, 2]
    for section in sections:
        for canvas in drawn(section):
            assert all(axis.lines for axis in canvas.axes)
            assert canvas.legends


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"at": ()}, r"at must be positive and rising, got \(\)"),
        ({"counts": (5, 1)}, r"counts must be positive and rising, got \(5, 1\)"),
        ({"explained": 0}, "explained must be at least 1, got 0"),
        ({"points": (1.0, 0.1)}, "points must be positive and rising"),
    ],
)
def test_sensitivities_of_nothing_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SENSITIVE, **change)


# Neighbourhoods

SHOWN = NeighbourhoodsConfig(
    **copy_fields(SMOKE)
    | {
        "points": (0.2,),
        "held_out": HELD,
        "scored": 180,
        "vote": Vote(60),
        "mixture": VoteMixture(60),
    }
    | {"rmsprop": ScaledAdaptation("rmsprop", lr=0.01, steps=10, k=15)},
    queries=4,
    shown=5,
)


def test_queries_are_chosen_by_rule() -> None:
    draws = torch.Generator().manual_seed(0)
    for count in (1, 3, 50):
        gains = torch.rand(200, generator=draws)
        answers = torch.randint(0, 8, (200,), generator=draws)
        eligible = torch.rand(200, generator=draws) < 0.3
        of_class = {
            label: [q for q in range(200) if eligible[q] and answers[q] == label]
            for label in range(8)
        }
        best = [max(found, key=lambda q: gains[q]) for found in of_class.values() if found]
        expected = sorted(best, key=lambda q: -gains[q])[:count]
        assert choose_queries(gains, answers, eligible, count) == expected


def test_images_are_named_as_the_data_set_counts(task: ImageTask) -> None:
    counts = TRAIN + HELD + torch.arange(CLASSES) % 3
    everything = task.classes.sort().values.repeat_interleave(counts)
    kept, held = task_module.split_held_out(everything, HELD)
    for part, rows in (("train", kept), ("validation", held)):
        labels = getattr(task, f"{part}_labels")
        for row, number in enumerate(number_images(task, part).tolist()):
            of_class = (everything == task.classes[labels[row]]).nonzero()[:, 0]
            assert of_class[number] == rows[row]
    expected = [number for _ in range(CLASSES) for number in range(TEST)]
    assert number_images(task, "test").tolist() == expected
    kept, held, aside = task_module.split_images(everything, task.classes[:OLD], HELD, 5)
    labels = task.classes.argsort()[torch.searchsorted(task.classes.sort().values, everything)]
    other = replace(
        task,
        train=task.train[: len(kept)],
        train_labels=labels[kept],
        validation_labels=labels[held],
        rehearsal=task.train[: len(aside)],
        rehearsal_labels=labels[aside],
    )
    for row, number in enumerate(number_images(other, "train").tolist()):
        of_class = (everything == task.classes[other.train_labels[row]]).nonzero()[:, 0]
        assert of_class[number] == kept[row]


@pytest.fixture
def gallery(task: ImageTask) -> list[Record]:
    *_, moment = follow_stream(task, SHOWN, 1)
    return neighbourhoods.Gallery(task, SHOWN, 1, moment, NAMES).records()


def test_what_is_shown_only_mbpa_got_right(task: ImageTask, gallery: list[Record]) -> None:
    shown = shown_in(result("image-neighbourhoods", SHOWN, gallery))
    assert 1 <= len(shown) <= 4
    gains = [float(each.query["value"] or 0) for each in shown]
    assert gains == sorted(gains, reverse=True)
    assert len({each.query["class"] for each in shown}) == len(shown)
    for each in shown:
        truth = each.query["label"]
        assert truth == f"thing {each.query['class']}"
        assert each.answer("MbPA (RMSprop)") == truth
        assert each.answer("parametric") != truth
        before, after = (each.probability(m, truth) for m in ("parametric", "MbPA (RMSprop)"))
        gain = torch.tensor(after / before).log()
        assert each.query["value"] == pytest.approx(float(gain), rel=1e-4)
        weights = [float(r["value"] or 0) for r in each.neighbours]
        assert len(weights) == 5
        assert weights == sorted(weights, reverse=True)  # the kernel falls with the distance
        assert sum(weights) < 1


def test_neighbours_are_the_images_that_were_stored(task: ImageTask, gallery: list[Record]) -> None:
    *_, moment = follow_stream(task, SHOWN, 1)
    numbered = {part: number_images(task, part).tolist() for part in ("train", "test")}

    def row_of(part: str, record: Record) -> int:
        labels = getattr(task, f"{part}_labels").tolist()
        (found,) = (
            row
            for row, (label, number) in enumerate(zip(labels, numbered[part], strict=True))
            if (int(task.classes[label]), number) == (record["class"], record["image"])
        )
        return found

    for each in shown_in(result("image-neighbourhoods", SHOWN, gallery)):
        query = task.test[row_of("test", each.query)]
        stored = task.train[moment.passed]
        nearest = (stored - query).square().sum(1).argsort()[:5]
        expected = moment.passed[nearest].tolist()
        assert [row_of("train", r) for r in each.neighbours] == expected
        near = moment.passed[(stored - query).square().sum(1).argsort()[:15]]
        assert each.near["value"] == len(task.train_labels[near].unique())


def test_neighbourhoods_are_drawn_with_images_where_there_are_some(
    gallery: list[Record], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    results = [result("image-neighbourhoods", SHOWN, gallery)]
    (section,) = NEIGHBOURHOODS.sections(results)
    shown = shown_in(results[0])
    assert len(section.tables[0].rows) == len(shown)
    monkeypatch.setenv("MBPA_DATA", str(tmp_path))
    (canvas,) = drawn(section)
    assert len(canvas.axes) == len(shown) * 7  # the query, five neighbours, the bars
    assert not any(axis.images for axis in canvas.axes)
    words = {text.get_text().replace("\n", " ") for axis in canvas.axes for text in axis.texts}
    assert {str(r["label"]) for each in shown for r in each.neighbours} <= words

    pixels = torch.randint(0, 256, (1200, 3, 4, 4), dtype=torch.uint8)
    labels = torch.arange(200).repeat_interleave(6)
    images = data.Images(pixels.repeat(20, 1, 1, 1), labels.repeat(20))
    monkeypatch.setattr(data, "tiny_imagenet", lambda **_: data.ImageSet(images, images, NAMES, ""))
    (canvas,) = drawn(section)
    assert sum(bool(axis.images) for axis in canvas.axes) == len(shown) * 6
    query = shown[0].query
    expected = images.images[images.labels == query["class"]][int(query["image"] or 0)]
    assert (canvas.axes[0].images[0].get_array() == expected.permute(1, 2, 0).numpy()).all()


def test_where_nothing_can_be_shown_the_report_says_so_in_words(gallery: list[Record]) -> None:
    nothing = [r for r in gallery if str(r["name"]).endswith("_alone")]
    (section,) = NEIGHBOURHOODS.sections([result("image-neighbourhoods", SHOWN, nothing)])
    assert not section.figures
    assert "alone is right about" in section.text[0]


def test_only_an_adaptation_can_be_shown() -> None:
    with pytest.raises(ValueError, match="adapting must be one of"):
        replace(SHOWN, adapting="mixture")
    with pytest.raises(ValueError, match="queries and shown must be at least 1"):
        replace(SHOWN, queries=0)


@pytest.mark.heavy
@pytest.mark.usefixtures("_given")
@pytest.mark.parametrize("experiment", [SENSITIVITY, NEIGHBOURHOODS], ids=lambda e: e.name)
def test_smoke_presets_run(
    experiment: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = data.Images(torch.zeros(0, 3, 40, 40, dtype=torch.uint8), torch.zeros(0).long())
    named = data.ImageSet(nothing, nothing, NAMES, "")
    monkeypatch.setattr(data, "tiny_imagenet", lambda *_, **__: named)
    config = replace(experiment.presets["smoke"], held_out=HELD, scored=60)
    run = Run(experiment, "smoke", config, tmp_path)
    (found,) = execute(run, device=torch.device("cpu"), progress=False, say=lambda line: None)
    assert found.metrics
    for section in experiment.sections([found]):
        list(drawn(section))
