"""New image classes: splits, features, the stream, what is measured, the report."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import mbpa
from experiments.experiment import Context
from experiments.images import INCREMENTAL, NEIGHBOURHOODS, SENSITIVITY, UNBALANCED, run
from experiments.images import task as task_module
from experiments.images.incremental import (
    area,
    compare_models,
    describe_situation,
    fit_known_layer,
    follow_stream,
    make_head,
    predict_in_slices,
    run_split,
    select_scored,
    split_answers,
    stream_of,
)
from experiments.images.methods import (
    METHODS,
    BalancedAdaptation,
    MarginModel,
    PreservingAdaptation,
    RetrainedLayer,
    ScaledAdaptation,
    Situation,
    make_model,
)
from experiments.images.presets import PRESETS
from experiments.images.spacing import measure_spacing
from experiments.images.task import ImageTask, make_image_task
from experiments.images.whitening import (
    RIDGE_SHARE,
    SPREAD_SHARE,
    KnownLayer,
    Whitening,
    fit_whitening,
    translate_layer,
)
from experiments.methods import Scale, Vote, VoteMixture
from experiments.picture_sets import Held
from experiments.pretraining import Pretraining, features_of, make_resnet
from experiments.results import Record, Result
from experiments.workspace import Workspace

ROOT = Path(__file__).parents[2]
REHEARSING = replace(PRESETS["smoke"], pretraining=replace(PRESETS["smoke"].pretraining, width=2))
SMOKE = replace(REHEARSING, rehearsed=0)


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    folder = Path(os.environ.get("MBPA_DATA") or ROOT.parent / "shared" / "data")
    if not (folder / "tiny-imagenet").is_dir():
        pytest.skip(
            "needs Tiny ImageNet: python -m experiments data fetch tiny-imagenet, or MBPA_DATA"
        )
    work = tmp_path_factory.mktemp("images")
    return Context(torch.device("cpu"), folder, Workspace(work / "work"), False, work / "cache")


@pytest.fixture(scope="module")
def task(context: Context) -> ImageTask:
    return make_image_task(SMOKE, context, 1)


def of(records: list[Record], **fields: object) -> list[Record]:
    return [r for r in records if all(r.get(name) == value for name, value in fields.items())]


def test_half_of_the_classes_are_known_and_what_is_scored_is_never_trained_on(
    task: ImageTask,
) -> None:
    assert task.old == 3
    assert len(task.classes.unique()) == len(task.classes) == 6
    assert task.train_labels.bincount().tolist() == [500] * 6
    assert len(task.validation_labels) == 0
    assert task.test_labels.bincount().tolist() == [50] * 6
    assert task.weight.shape == (3, task.train.shape[1])


@pytest.mark.heavy
def test_images_are_held_out_where_they_are_scored(context: Context, tmp_path: Path) -> None:
    own = replace(context, workspace=Workspace(tmp_path / "work"), cache=tmp_path / "cache")
    task = make_image_task(replace(SMOKE, part="validation"), own, 1)
    assert task.train_labels.bincount().tolist() == [400] * 6
    assert task.validation_labels.bincount().tolist() == [100] * 6
    seen = {row.numpy().tobytes() for row in task.train}
    assert sum(row.numpy().tobytes() in seen for row in task.validation) == 0


def test_images_held_out_are_no_training_images() -> None:
    labels = torch.arange(40) % 4
    kept, held = task_module.split_held_out(labels, 3)
    assert sorted([*kept.tolist(), *held.tolist()]) == list(range(40))
    assert labels[held].bincount().tolist() == [3] * 4


@pytest.mark.heavy
def test_images_that_are_rehearsed_are_neither_trained_on_nor_in_the_stream(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = []

    def spied(settings: Pretraining, pictures: Held, classes: int, *rest: Any) -> Any:
        shown.append(pictures)
        return make_resnet(settings, classes, 40, 0).eval()

    monkeypatch.setattr(task_module, "pretrain", spied)
    config = replace(SMOKE, part="validation", rehearsed=30)
    own = replace(context, cache=tmp_path)
    made = make_image_task(config, own, 1)
    kept = make_image_task(config, own, 1)  # from the file
    assert len(shown) == 1
    assert shown[0].labels.bincount().tolist() == [370] * 3
    assert made.train_labels.bincount().tolist() == [370] * 3 + [400] * 3
    assert made.rehearsal is not None
    assert made.rehearsal_labels is not None
    assert made.rehearsal_labels.bincount().tolist() == [30] * 3  # known classes only
    assert torch.equal(made.rehearsal, kept.rehearsal)
    assert made.validation_labels.bincount().tolist() == [100] * 6
    everywhere = torch.cat([made.train, made.validation, made.rehearsal])
    assert len(everywhere.unique(dim=0)) > 0.99 * len(everywhere)  # no image is in two parts


def test_features_are_computed_once(
    task: ImageTask, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(task_module, "pretrain", fail)
    again = make_image_task(replace(SMOKE, lr=0.5, scarce=0.1), context, 1)
    assert torch.equal(again.train, task.train)
    assert (again.old, again.known) == (task.old, task.known)
    with pytest.raises(AssertionError, match="trained again"):
        make_image_task(SMOKE, context, 2)


@pytest.mark.heavy
def test_the_network_sees_nothing_that_is_scored_and_no_new_class(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = []

    def spied(settings: Pretraining, pictures: Held, classes: int, *rest: Any) -> Any:
        shown.append((pictures, classes))
        return make_resnet(settings, classes, 40, 0).eval()

    monkeypatch.setattr(task_module, "pretrain", spied)
    config = replace(SMOKE, pretraining=replace(SMOKE.pretraining, epochs=0))
    task = make_image_task(config, replace(context, cache=tmp_path), 1)
    ((pictures, classes),) = shown
    assert classes == 3
    assert pictures.labels.bincount().tolist() == [500] * 3
    network = make_resnet(config.pretraining, 3, 40, 0).eval()
    seen = features_of(network, pictures)
    for label in range(3):  # in the data set's order, whatever else is left out
        kept = seen[pictures.labels == label].half().float()
        assert torch.equal(kept, task.train[task.train_labels == label])


@pytest.mark.heavy
def test_damaged_features_are_computed_anew(context: Context, tmp_path: Path) -> None:
    own = replace(context, cache=tmp_path, workspace=Workspace(tmp_path / "work"))
    config = replace(SMOKE, classes=2, pretraining=replace(SMOKE.pretraining, epochs=0))
    before = make_image_task(config, own, 1)
    (path,) = tmp_path.glob("features-*.safetensors")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.warns(UserWarning, match="is damaged and will be recomputed"):
        after = make_image_task(config, own, 1)
    assert torch.equal(after.train, before.train)


def test_where_it_is_tested_does_not_change_what_is_learnt(task: ImageTask) -> None:
    often, once = (
        list(follow_stream(task, replace(SMOKE, points=points), 1))[-1].head.weight
        for points in ((0.013, 0.1, 0.2, 0.5), (0.5,))
    )
    assert torch.equal(often, once)


@pytest.mark.heavy
def test_other_splits_know_other_classes(context: Context, tmp_path: Path) -> None:
    context = replace(context, workspace=Workspace(tmp_path))  # with other networks
    config = replace(SMOKE, classes=2, pretraining=replace(SMOKE.pretraining, epochs=0, batch=50))
    splits = [make_image_task(config, context, seed).classes for seed in range(3)]
    assert len({tuple(sorted(split[:1].tolist())) for split in splits}) > 1
    assert len({tuple(sorted(split.tolist())) for split in splits}) == 1


def test_the_head_knows_what_it_knew_and_nothing_of_new_classes(task: ImageTask) -> None:
    head = make_head(task)
    assert head.weight.shape == (6, task.train.shape[1])
    assert torch.equal(head.weight[:3], task.weight)
    assert torch.equal(head.bias[:3], task.bias)
    assert head.weight[3:].abs().max() == head.bias[3:].abs().max() == 0


@pytest.mark.parametrize("scarce", [1.0, 0.1])
def test_an_epoch_shows_every_image_once(task: ImageTask, scarce: float) -> None:
    rows, orders = stream_of(task, replace(SMOKE, scarce=scarce), 1)
    first, second = next(orders), next(orders)
    assert sorted(first.tolist()) == sorted(second.tolist()) == sorted(rows.tolist())
    assert first.tolist() != second.tolist()
    counts = task.train_labels[first].bincount().tolist()
    assert counts == ([500] * 6 if scarce == 1 else [500] * 3 + [50] + [500] * 2)


def test_the_memory_holds_what_has_passed_and_the_layer_learns(task: ImageTask) -> None:
    config = replace(SMOKE, points=(0.1, 0.5, 1.5), capacity=2000)
    start = make_head(task)
    sizes, accuracies = [], []
    for moment in follow_stream(task, config, 1):
        entries = moment.memory.entries()
        known = {
            (row.numpy().tobytes(), int(label))
            for row, label in zip(task.train, task.train_labels, strict=True)
        }
        assert all(
            (key.numpy().tobytes(), int(value)) in known
            for key, value in zip(entries.keys, entries.values, strict=True)
        )
        sizes.append(len(moment.memory))
        right = moment.head(task.train).argmax(1) == task.train_labels
        accuracies.append(float(right.float().mean()))
    assert sizes == [320, 1472, 2000]  # whole batches of 64
    before = float((start(task.train).argmax(1) == task.train_labels).float().mean())
    assert accuracies[-1] > before


def test_everything_is_measured_at_every_point(task: ImageTask) -> None:
    records = run_split(task, SMOKE, 1)
    methods = {r["method"] for r in of(records, name="top1")}
    assert methods == set(METHODS) - {"MbPA (balanced)"}  # all classes have as many images
    for method in methods:
        for subset in ("novel", "pre-trained", "all"):
            found = of(records, name="top1", method=method, subset=subset)
            assert [r["epochs"] for r in found] == [0.1, 1.0]
            assert [r["epochs"] for r in of(records, name="auc", method=method, subset=subset)] == [
                0.1,
                1.0,
            ]
    assert len(of(records, name="pretrained_top1")) == 1
    assert [r["value"] for r in of(records, name="margin")] == [0.0, 0.0]  # without a rehearsal
    queries, answers = select_scored(task, SMOKE)
    moment = next(iter(follow_stream(task, SMOKE, 1)))
    right = 100 * float((moment.head(queries).argmax(1) == answers).double().mean())
    found = of(records, name="top1", method="parametric", subset="all", epochs=0.1)
    assert found[0]["value"] == pytest.approx(right)


def test_curves_begin_with_what_is_known_before_the_first_entry(task: ImageTask) -> None:
    records = run_split(task, SMOKE, 1)
    queries, answers = select_scored(task, SMOKE)
    known = 100 * float((make_head(task)(queries).argmax(1) == answers).double().mean())
    for method in SMOKE.methods:
        first = 0.0 if method == "memory only" else known
        (then,) = of(records, name="top1", method=method, subset="all", epochs=0.1)
        (area,) = of(records, name="auc", method=method, subset="all", epochs=0.1)
        assert area["value"] == pytest.approx((first + then["value"]) / 2)


def test_methods_that_share_a_retrieval_answer_as_they_would_alone(task: ImageTask) -> None:
    queries, answers = select_scored(task, SMOKE)
    moment = next(iter(follow_stream(task, SMOKE, 1)))
    situation = describe_situation(moment, task)
    settings = {
        "vote": Vote(5),
        "MbPA": ScaledAdaptation(lr=1.0, k=20),
        "kept": PreservingAdaptation(k=10),
    }
    models = {name: make_model(each, situation) for name, each in settings.items()}
    together = compare_models(models, queries, answers)
    for name, model in models.items():
        alone = model(queries).argmax(1) == answers
        assert (together[name] == alone).float().mean() > 0.99


def test_scarce_classes_are_a_subset_of_their_own(task: ImageTask) -> None:
    _, answers = select_scored(task, SMOKE)
    found = split_answers(task, replace(SMOKE, scarce=0.1), answers)
    assert set(answers[found["novel-scarce"]].tolist()) == {3}
    assert set(answers[found["novel-full"]].tolist()) == {4, 5}
    assert torch.equal(found["novel"], found["novel-scarce"] | found["novel-full"])
    assert set(split_answers(task, SMOKE, answers)) == {"novel", "pre-trained", "all"}


def test_areas_are_those_under_straight_lines() -> None:
    curve = [(0.0, 0.0), (0.1, 10.0), (1.0, 40.0)]
    assert area(curve, 0.1) == pytest.approx(5.0)
    assert area(curve, 1.0) == pytest.approx(0.1 * 5 + 0.9 * 25)


def test_a_split_that_is_done_is_not_done_again(
    context: Context, task: ImageTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = run(SMOKE, context)
    assert set(records) == {1}
    monkeypatch.setattr("experiments.images.run_split", None)
    assert run(SMOKE, context) == records


@pytest.mark.heavy
@pytest.mark.parametrize("experiment", [SENSITIVITY, NEIGHBOURHOODS], ids=lambda e: e.name)
def test_other_experiments_have_the_same_features(
    experiment: Any,
    task: ImageTask,
    context: Context,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(task_module, "pretrain", None)
    config = replace(experiment.presets["smoke"], pretraining=SMOKE.pretraining, rehearsed=0)
    (records,) = experiment.run(config, replace(context, workspace=Workspace(tmp_path))).values()
    assert {r["split"] for r in records} == {1}
    if experiment is NEIGHBOURHOODS:
        assert {"right_alone", "wrong_alone"} <= {r["name"] for r in records}
    else:
        assert {r["method"] for r in of(records, name="top1")} == set(SMOKE.methods)


@pytest.mark.heavy
def test_the_report_is_made_of_records_alone(task: ImageTask) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    for experiment, scarce in ((INCREMENTAL, 1.0), (UNBALANCED, 0.1)):
        config = replace(SMOKE, scarce=scarce)
        records = run_split(task, config, 1)
        told = json.loads(json.dumps(vars(config), default=vars))
        results = [
            Result(
                experiment.name, "smoke", seed, told, {}, 1.0, "python -m experiments run", records
            )
            for seed in (1, 2)
        ]
        (section,) = experiment.sections(results)
        assert {row[0] for row in section.tables[0].rows} >= set(config.methods)
        method = next(row for row in section.tables[0].rows if row[0] == "memory only")
        subset, epochs = ("novel-scarce", 1.0) if scarce < 1 else ("novel", 0.1)
        value = of(records, name="top1", method="memory only", subset=subset, epochs=epochs)
        assert method[1] == f"{float(value[0]['value'] or 0):.1f} ± 0.0"
        for figure in section.figures:
            canvas = Figure(figsize=figure.size, layout="constrained")
            figure.draw(canvas)
            canvas.canvas.draw()
            assert all(axis.lines for axis in canvas.axes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": ()}, "seeds must name at least one"),
        ({"classes": 500}, "classes must be between 2 and 200, got 500"),
        ({"points": (1.0, 0.1)}, "points must be positive and rising"),
        ({"scarce": 0.0}, "scarce must be above 0"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"scored": 0}, "scored must be at least 1, got 0"),
        ({"held_out": 500}, "held_out and rehearsed must be at most 400"),
        ({"rehearsed": -1}, "rehearsed must not be negative, got -1"),
        ({"rehearsed": 301}, "at most 400 of the 500 per class, got 100 and 301"),
        ({"shrunk": 0.0}, "shrunk must be above 0 and at most 1, got 0.0"),
        ({"shrunk": 1.2}, "shrunk must be above 0 and at most 1, got 1.2"),
        ({"classes": 2, "pretraining": Pretraining(batch=512)}, "at most 500"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMOKE, **change)


def test_settings_follow_the_scale_of_the_keys() -> None:
    rule = ScaledAdaptation(lr=2.0, bandwidth=0.5).predictor(Scale(4.0, 10.0)).rule
    assert isinstance(rule, mbpa.Gradient)
    assert rule.lr == pytest.approx(0.2)
    config = replace(SMOKE, vote=Vote(7, 0.5), mixture=VoteMixture(9, 0.25, weight=0.3))
    head = nn.Linear(3, 6)
    known = KnownLayer(Whitening(torch.zeros(3), torch.eye(3)), head)
    situation = Situation(head, mbpa.ExactMemory(1, 3), Scale(4.0, 10.0), 3, known, 1)
    situation.memory.write(torch.ones(1, 3), [4])
    found = {name: model.predictor for name, model in config.models(situation).items()}
    assert list(found) == list(config.methods)
    assert found["memory only"] == mbpa.NeighborVote(mbpa.gaussian(2.0), k=7)
    vote = mbpa.NeighborVote(mbpa.gaussian(1.0), k=9)
    assert found["mixture"] == mbpa.Mixture(mbpa.Parametric(), vote, weights=(0.7, 0.3))


def test_whitened_keys_spread_alike_within_known_classes_and_have_unit_length(
    task: ImageTask,
) -> None:
    is_known = task.train_labels < task.old
    features, labels = task.train[is_known], task.train_labels[is_known]
    whitening = fit_whitening(features, labels, images_per_chunk=700)  # of 1,500
    roots = features.double().sqrt()
    means = torch.stack([roots[labels == label].mean(0) for label in range(task.old)])
    apart = roots - means[labels]
    within = apart.mT @ apart / len(apart)
    shrunk = within + SPREAD_SHARE * within.diagonal().mean() * torch.eye(len(within))
    matrix = whitening.matrix.double()
    assert torch.allclose(matrix @ shrunk @ matrix, torch.eye(len(within)).double(), atol=1e-4)
    assert torch.allclose(whitening.center.double(), roots.mean(0), atol=1e-5)
    keys = (task.test.sqrt() - whitening.center) @ whitening.matrix
    assert torch.allclose(whitening(task.test), keys / keys.norm(dim=1, keepdim=True), atol=1e-5)


def test_features_that_do_not_differ_within_a_class_cannot_be_whitened() -> None:
    with pytest.raises(ValueError, match="must differ within a class, got 3 images of 2 classes"):
        fit_whitening(torch.full((3, 4), 0.3), torch.tensor([0, 0, 2]))


def test_a_layer_of_whitened_keys_says_what_the_layer_of_features_said(
    task: ImageTask,
) -> None:
    is_known = task.train_labels < task.old
    features, layer = task.train[is_known], make_head(task)
    labels = task.train_labels[is_known]
    whitening, found = translate_layer(layer, features, labels, images_per_chunk=700)
    with torch.no_grad():
        said, meant = found(whitening(features)), layer(features)
        unexplained = (said - meant)[:, :3].square().mean() / meant[:, :3].var(0).mean()
        assert unexplained < 0.2  # keys do not say how large the features were
        assert said[:, 3:].abs().max() < 1e-5  # of new classes neither says anything
        keys, others = whitening(features).double(), meant.double()
        keys = keys - keys.mean(0)
        spread = keys.mT @ keys
        ridge = RIDGE_SHARE * spread.diagonal().mean()
        slope = 2 * keys.mT @ (keys @ found.weight.double().mT - (others - others.mean(0)))
        slope = slope + 2 * ridge * found.weight.double().mT
        assert slope.abs().max() < 1e-3 * (keys.mT @ others).abs().max()  # it is least there
    assert fit_known_layer(task) is fit_known_layer(task)


def test_what_keeps_the_old_classes_adapts_a_layer_that_fits_the_memory(task: ImageTask) -> None:
    moment = next(iter(follow_stream(task, SMOKE, 1)))
    situation, queries = describe_situation(moment, task), task.test[:50]
    entries, whitened = moment.memory.entries(), situation.whitened_memory
    whitening, known = fit_known_layer(task)
    assert torch.equal(whitened.memory.entries().keys, whitening(entries.keys))
    assert torch.equal(whitened.memory.entries().values, entries.values)
    weight, bias = (
        tensor.detach().double().requires_grad_() for tensor in (known.weight, known.bias)
    )
    counts = entries.values.bincount(minlength=6)
    shares = len(entries.values) / (int((counts > 0).sum()) * counts[entries.values]).double()

    def loss(weight: Tensor, bias: Tensor) -> Tensor:
        logits = whitening(entries.keys).double() @ weight.mT + bias
        losses = functional.cross_entropy(logits, entries.values, reduction="none")
        away = (weight - known.weight).square().sum() + (bias - known.bias).square().sum()
        return shares @ losses + 0.2 / 2 * away

    found = whitened.retrain(0.2)
    slopes = torch.autograd.grad(loss(weight, bias), (weight, bias))
    there = found.weight.double().requires_grad_(), found.bias.double().requires_grad_()
    least = torch.autograd.grad(loss(*there), there)
    for begun, ended in zip(slopes, least, strict=True):
        assert ended.abs().max() < 0.02 * begun.abs().max()  # it is where the loss is least
    assert whitened.retrain(0.2) is found
    local = ScaledAdaptation(lr=2.0, steps=3, k=15, bandwidth=0.5)
    kept = PreservingAdaptation(penalty=0.2, lr=2.0, steps=3, k=15, bandwidth=0.5)
    predictor = local.predictor(Scale(measure_spacing(whitened.memory, 1), 1.0))
    model = mbpa.MbPA(head=found, memory=whitened.memory, predictor=predictor)
    keys = whitening(queries)
    made = make_model(kept, situation)
    assert isinstance(made, MarginModel)
    assert not made.margins.any()  # there is no rehearsal
    assert torch.allclose(made(queries).exp(), model(keys=keys).exp(), atol=1e-5)
    surer = torch.tensor([0.0, 0.0, 0.0, 2.0, 2.0, 2.0])
    expected = model(keys=keys).exp() * torch.exp(-surer)
    said = replace(made, margins=surer)(queries).exp()
    assert torch.allclose(said, expected / expected.sum(1, keepdim=True), atol=1e-5)
    only = make_model(RetrainedLayer(0.2), situation)(queries)
    assert torch.equal(only.argmax(1), found(keys).argmax(1))


def test_scarce_classes_have_a_method_that_weighs_neighbours_by_the_entries_of_their_class(
    task: ImageTask,
) -> None:
    config = replace(SMOKE, scarce=0.1, points=(1.0,), balanced=BalancedAdaptation(lr=2.0, k=30))
    assert set(config.methods) == set(METHODS)
    (moment,) = follow_stream(task, config, 1)
    situation, queries = describe_situation(moment, task), task.test[:40]
    models = config.models(situation)
    kernel = models["MbPA (balanced)"].predictor.kernel
    plain = ScaledAdaptation(lr=2.0, k=30).predictor(situation.scale)
    assert kernel == mbpa.Balanced(plain.kernel, 1.0)
    expected = mbpa.MbPA(
        head=situation.head, memory=situation.memory, predictor=replace(plain, kernel=kernel)
    )(queries)
    ((_, said),) = predict_in_slices(models, queries)
    assert torch.allclose(said["MbPA (balanced)"], expected, atol=1e-4)
    nothing = replace(config.balanced, power=0.0).predictor(situation.scale)
    unbalanced = mbpa.MbPA(head=situation.head, memory=situation.memory, predictor=plain)(queries)
    same = mbpa.MbPA(head=situation.head, memory=situation.memory, predictor=nothing)(queries)
    assert torch.allclose(same, unbalanced, atol=1e-5)
    scarce = 3  # the first of the new classes
    assert (expected - unbalanced)[:, scarce].mean() > 0


def test_rmsprop_starts_where_it_is_told_to() -> None:
    local = ScaledAdaptation("rmsprop", lr=0.01, steps=3, decay=0.1, initial_square=1.0)
    rule = local.predictor(Scale(4.0, 10.0)).rule
    assert rule == mbpa.RMSprop(0.01, 3, 0.1, initial_square=1.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (lambda: Vote(k=0), "k must be at least 1"),
        (lambda: VoteMixture(bandwidth=-1.0), "bandwidth not negative"),
        (lambda: VoteMixture(weight=1.5), "weight must be between 0 and 1, got 1.5"),
        (lambda: ScaledAdaptation(lr=0.0), "lr positive"),
        (lambda: ScaledAdaptation(decay=-0.1), "decay and initial_square must not be negative"),
        (lambda: BalancedAdaptation(power=1.5), "power must be between 0 and 1, got 1.5"),
        (lambda: PreservingAdaptation(lost=math.inf), "lost must be finite, got inf"),
        (lambda: PreservingAdaptation(lost=math.nan), "lost must be finite, got nan"),
        (lambda: PreservingAdaptation(penalty=0.0), "penalty must be positive, got 0.0"),
        (lambda: PreservingAdaptation(k=0), "k must be at least 1"),
    ],
)
def test_methods_refuse_settings_that_make_no_sense(
    settings: Callable[[], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        settings()
