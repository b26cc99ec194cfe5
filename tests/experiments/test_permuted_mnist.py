"""Permuted MNIST: the stream, what is stored of it, the scores, resuming, the report."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import mbpa
from experiments.experiment import Context
from experiments.permuted_mnist import EXPERIMENT, on_der, run, tune, tuning
from experiments.permuted_mnist.config import (
    PRESETS,
    SEARCH_SEED,
    AdaptationBySize,
    PermutedMnistConfig,
    of_size,
    searched,
)
from experiments.permuted_mnist.figures import ON_DER, sections, sections_on_der
from experiments.permuted_mnist.scoring import (
    Shortcut,
    attach_logits,
    copy_networks,
    fill_memory,
    hold_logits,
    list_questions,
    random_neighbors,
    read_stored_logits,
    score_methods,
)
from experiments.permuted_mnist.stream import StoredExamples, Streams, blocks_of, load_digits
from experiments.permuted_mnist.training import Training
from experiments.results import Record, Result, read_results
from experiments.workspace import Workspace

ROOT = Path(__file__).parents[2]
METHODS = ["MLP", "EWC", "replay", "DER++", "A-GEM", "kernel vote", "random memories", "MbPA"]
METHODS += ["MbPA + EWC", "MbPA + replay", "MbPA + DER++", "MbPA + DER++ (logits)"]
METHODS += ["MbPA + DER++ (shortcut)"]
DRAWN_AFTER_EVERY_TASK = {*METHODS[:5], "random memories", "MbPA", "MbPA + EWC"}
TINY = replace(
    PRESETS["smoke"],
    examples=200,
    memory_per_task=(10, 40),
    hidden=24,
    test_images=60,
    curve_images=30,
    batch=20,
    switch_every=40,
    epochs=2,
    fisher_images=50,
    alone=AdaptationBySize(lr=(0.1, 0.2), steps=(3,), k=(5,), bandwidth=(2.0,)),
)


@pytest.fixture(scope="module")
def data_dir() -> Path:
    folder = Path(os.environ.get("MBPA_DATA") or ROOT.parent / "shared" / "data")
    if not (folder / "mnist").is_dir():
        pytest.skip("needs MNIST: python -m experiments data fetch mnist, or MBPA_DATA")
    return folder


@pytest.fixture
def context(data_dir: Path, tmp_path: Path) -> Context:
    return Context(torch.device("cpu"), data_dir, Workspace(tmp_path / "work"), progress=False)


@pytest.fixture(scope="module")
def records(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    """The records of one tiny run."""
    workspace = Workspace(tmp_path_factory.mktemp("run") / "work")
    return run(TINY, Context(torch.device("cpu"), data_dir, workspace, progress=False))[0]


@pytest.fixture(scope="module")
def training(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """A finished training on all tasks."""
    workspace = Workspace(tmp_path_factory.mktemp("training") / "work")
    training = Training(TINY, Context(torch.device("cpu"), data_dir, workspace, progress=False))
    while not training.is_over:
        training.learn_next()
    return training


def of(records: list[Record], **fields: object) -> list[Record]:
    return [r for r in records if all(r.get(name) == value for name, value in fields.items())]


def untimed(records: list[Record]) -> list[Record]:
    return [r for r in records if r["name"] != "microseconds_per_prediction"]


# The stream


@pytest.fixture(scope="module")
def streams(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Streams:
    config = replace(TINY, seeds=(4, 0))
    workspace = Workspace(tmp_path_factory.mktemp("streams"))
    context = Context(torch.device("cpu"), data_dir, workspace, progress=False)
    return Streams(config, load_digits(config, context))


def test_a_task_is_one_permutation_for_training_and_testing_alike(streams: Streams) -> None:
    images, labels = streams.examples(1)
    queries, answers = streams.queries(1, 1, 60)
    order = streams.permutations[1, 1]
    assert sorted(order.tolist()) == list(range(784))
    assert torch.equal(images[1], streams.digits.pool[streams.chosen[1, 1]][:, order])
    assert torch.equal(labels[1], streams.digits.pool_labels[streams.chosen[1, 1]])
    assert torch.equal(queries, streams.digits.scored[60:120][:, order])
    assert torch.equal(answers, streams.digits.scored_labels[60:120])
    rows = {tuple(row.tolist()) for row in streams.permutations.flatten(0, 1)}
    assert len(rows) == 6  # two seeds, three tasks, all of them different


def test_a_seed_sees_the_same_in_any_company(streams: Streams) -> None:
    alone = Streams(replace(TINY, seeds=(0,)), streams.digits)
    assert torch.equal(alone.permutations[0], streams.permutations[1])
    assert torch.equal(alone.chosen[0], streams.chosen[1])
    assert torch.equal(alone.positions_stored(10)[0], streams.positions_stored(10)[1])


@pytest.mark.heavy
def test_what_is_scored_is_never_trained_on(context: Context) -> None:
    """Test images come from the test files, validation images from the end of the training set."""
    test = load_digits(TINY, context)
    validation = load_digits(replace(TINY, part="validation"), context)
    assert len(test.pool) == 50_000
    assert len(test.scored) == len(validation.scored) == 10_000
    trained = {row.numpy().tobytes() for row in test.pool}
    for digits in (test, validation):
        shared = sum(row.numpy().tobytes() in trained for row in digits.scored)
        assert shared < 5  # MNIST itself has a few images twice


def test_one_example_of_every_window_is_stored_and_fewer_are_a_part_of_more(
    streams: Streams,
) -> None:
    few, many = streams.positions_stored(10), streams.positions_stored(40)
    assert torch.equal(few // 20, torch.arange(10).expand_as(few))
    assert torch.equal(many // 5, torch.arange(40).expand_as(many))
    for fewer, more in zip(few.flatten(0, 1), many.flatten(0, 1), strict=True):
        assert set(fewer.tolist()) <= set(more.tolist())


@pytest.mark.parametrize("switches", [False, True])
def test_every_example_of_every_task_passes_once(streams: Streams, switches: bool) -> None:
    blocks = blocks_of(streams.config, switches)
    seen = [(b.task, place) for b in blocks for place in range(b.start, b.start + b.size)]
    assert sorted(seen) == list(itertools.product(range(3), range(200)))
    if switches:
        assert all(block.size == 40 for block in blocks)
        assert len({block.task for block in blocks[:3]}) == 3


@pytest.mark.parametrize("switches", [False, True])
def test_only_what_has_passed_is_ever_stored(streams: Streams, switches: bool) -> None:
    blocks = blocks_of(streams.config, switches)
    kept = StoredExamples(streams, blocks)
    passing = [(b.task, place) for b in blocks for place in range(b.start, b.start + b.size)]
    for size, n in enumerate(streams.config.memory_per_task):
        stored = {
            (task, place)
            for task in range(3)
            for place in streams.positions_stored(n)[1, task].tolist()
        }
        for passed in (0, 40, 120, 240, 600):
            images, labels = kept.memory(1, size, passed)
            expected = [pair for pair in passing[:passed] if pair in stored]
            assert len(images) == kept.count(size, passed) == len(expected) == passed * n // 200
            for image, label, (task, place) in zip(images, labels, expected, strict=True):
                wanted, answers = streams.examples(task)
                assert torch.equal(image, wanted[1, place])
                assert label == answers[1, place]


@pytest.mark.heavy
def test_rehearsed_examples_have_passed_and_bring_the_logits_of_their_time(
    context: Context,
) -> None:
    training = Training(TINY, context)
    for _ in range(2):
        training.learn_next()
    group = next(group for group in training.groups if group.method == "DER++")
    assert group.logits is not None
    group.logits.copy_(torch.arange(group.logits.shape[1])[None, :, None])  # where it was seen
    draws = torch.rand(2, len(group.networks), 3000)
    for batch in training._draw_stored(group, draws, 300):
        assert batch.logits is not None
        for network, row in zip(group.networks, range(len(group.networks)), strict=True):
            positions = batch.logits[row, :, 0].long()
            assert int(positions.max()) < 300
            n = TINY.memory_per_task[network.size or 0]
            assert len(positions.unique()) == 300 * n // 200  # all that are stored
            images, labels = training.kept.examples_at(torch.zeros_like(positions), positions)
            assert torch.equal(images, batch.inputs[row])
            assert torch.equal(labels, batch.labels[row])


# The run


@pytest.mark.heavy
def test_on_der_alone_every_method_scores_as_beside_all_others(
    records: list[Record], context: Context
) -> None:
    config = replace(TINY, switching=False)
    stopping = replace(context, workspace=StoppingWorkspace(context.workspace.folder))
    with pytest.raises(Stopped):
        on_der.run(config, stopping)
    found = untimed(on_der.run(config, context)[0])
    expected = [
        record
        for method in ("DER++", *ON_DER)
        for record in untimed(of(records, method=method))
        if record["tasks_seen"] == config.tasks
    ]
    assert sorted(found, key=str) == sorted(expected, key=str)
    told = json.loads(json.dumps(vars(config), default=vars))
    result = Result("permuted-mnist-der", "smoke", 0, told, {}, 1.0, "", found)
    (section,) = sections_on_der([result])
    assert [row[0] for row in section.tables[0].rows] == ["DER++", *ON_DER]
    value = of(found, name="mean_accuracy", method="DER++", memory_per_task=40)[0]["value"]
    assert section.tables[0].rows[0][2] == f"{100 * float(value or 0):.2f}"


def test_every_method_is_scored_at_the_end_and_every_curve_after_every_task(
    records: list[Record],
) -> None:
    sequence = of(records, stream="sequence", name="mean_accuracy", split="test")
    assert {r["method"] for r in sequence} == set(METHODS)
    for method in METHODS:
        sizes = [None] if method in ("MLP", "EWC") else [10, 40]
        seen = (1, 2, 3) if method in DRAWN_AFTER_EVERY_TASK else (3,)
        found = [(r["tasks_seen"], r["memory_per_task"]) for r in of(sequence, method=method)]
        assert sorted(found, key=str) == sorted(itertools.product(seen, sizes), key=str)
    assert all(0 <= float(r["value"] or 0) <= 1 for r in sequence)
    switching = of(records, stream="switching", name="mean_accuracy")
    assert {"MLP", "EWC", "EWC, told every switch", "MbPA"} <= {r["method"] for r in switching}
    for record in of(records, name="mean_accuracy", tasks_seen=3, stream="sequence"):
        same = {name: record[name] for name in ("method", "memory_per_task", "stream")}
        tasks = [float(r["value"] or 0) for r in of(records, name="accuracy", **same)]
        assert len(tasks) == 3
        assert sum(tasks) / 3 == pytest.approx(record["value"])


class Stopped(Exception):
    """Stops a run halfway."""


class StoppingWorkspace(Workspace):
    """A workspace that stops the run after two saves."""

    saves_left = 2

    def save(self, name: str, state: Mapping[str, Any]) -> None:
        super().save(name, state)
        self.saves_left -= 1
        if not self.saves_left:
            raise Stopped


@pytest.mark.heavy
def test_a_stopped_run_ends_with_the_records_of_a_whole_one(
    records: list[Record], context: Context
) -> None:
    stopping = replace(context, workspace=StoppingWorkspace(context.workspace.folder))
    with pytest.raises(Stopped):
        run(TINY, stopping)
    assert untimed(run(TINY, context)[0]) == untimed(records)


def test_scores_are_those_of_each_method_on_its_own(training: Training) -> None:
    """Sharing one retrieval between methods and tasks changes no score."""
    scores = score_methods(training, 0, 60)
    networks, memory = copy_networks(training, 0), fill_memory(training, 0, 1)
    assert len(memory) == 3 * 40
    alone = mbpa.MbPA(head=networks["MLP", None], memory=memory, predictor=TINY.alone.predictor(1))
    on_replay = mbpa.MbPA(
        head=networks["replay", 1], memory=memory, predictor=TINY.on_replay.predictor(1)
    )
    for name, model in {("MbPA", 1): alone, ("MbPA + replay", 1): on_replay}.items():
        for task in range(3):
            queries, answers = training.streams.queries(0, task, 60)
            right = float((model(queries).argmax(1) == answers).double().mean())
            assert scores[name].accuracies[task] == pytest.approx(right, abs=0.04)
    parametric = networks["EWC", None]
    for task in range(3):
        queries, answers = training.streams.queries(0, task, 60)
        right = float((parametric(queries).argmax(1) == answers).double().mean())
        assert scores["EWC", None].accuracies[task] == pytest.approx(right)
    assert sum(len(answers) for _, _, answers in list_questions(training, 0, 60)) == 180


@pytest.mark.heavy
def test_logits_to_adapt_to_are_those_of_the_time_of_storing(
    training: Training,
) -> None:
    """The model of the method `(logits)` is a plain one on a memory of logits."""
    networks, memory = copy_networks(training, 0), fill_memory(training, 0, 1)
    group = next(group for group in training.groups if group.method == "DER++")
    index = [network.size for network in group.networks].index(1)
    logits = read_stored_logits(training, 0, 1)
    assert logits is not None
    assert group.logits is not None
    images, _ = training.kept.memory(0, 1, 600)
    for entry in (0, 41, 119):
        position = next(
            position
            for position in range(600)
            if torch.equal(
                training.kept.examples_at(torch.tensor(0), torch.tensor(position))[0],
                images[entry],
            )
        )
        assert torch.equal(logits[entry], group.logits[index, position])
    queries, answers = training.streams.queries(0, 2, 60)
    targets = hold_logits(memory, logits)
    model = mbpa.MbPA(
        head=networks["DER++", 1], memory=targets, predictor=TINY.on_der_logits.predictor(1)
    )
    shared = attach_logits(memory.read(queries, 10), logits)
    assert torch.allclose(model(keys=queries, neighbors=shared), model(queries), atol=1e-5)
    right = float((model(queries).argmax(1) == answers).double().mean())
    found = score_methods(training, 0, 60)["MbPA + DER++ (logits)", 1].accuracies[2]
    assert found == pytest.approx(right, abs=0.04)
    before = (networks["DER++", 1](memory.entries().keys) - logits).square().mean()
    nearer = mbpa.MbPA(
        head=networks["DER++", 1],
        memory=targets,
        predictor=mbpa.Adapted(mbpa.Gradient(0.01, 5), k=1),
    )
    assert (nearer(memory.entries().keys) - logits).square().mean() < 0.9 * before


def test_a_shortcut_adapts_to_what_the_network_lacks_of_the_stored_logits(
    training: Training,
) -> None:
    network, memory = copy_networks(training, 0)["DER++", 1], fill_memory(training, 0, 1)
    images, logits = memory.entries().keys, read_stored_logits(training, 0, 1)
    assert logits is not None
    shortcut = Shortcut(network, images, logits)
    queries, answers = training.streams.queries(0, 2, 60)
    local = mbpa.Adapted(mbpa.Gradient(0.5, 3), k=7, kernel=mbpa.gaussian(2.0))
    lengths = network[:2](images).square().sum(1)
    keys, asked = (network[:2](each) / lengths.mean().sqrt() for each in (images, queries))
    expected = []
    with torch.no_grad():
        for query, key in zip(queries, asked, strict=True):  # step by step, one query at a time
            squares = (keys - key).square().sum(1)
            near = squares.argsort()[:7]
            weights = (-squares[near] / (2 * 2.0**2)).softmax(0)
            layer = torch.zeros(10, keys.shape[1])
            for _ in range(3):
                output = network(images[near]) + keys[near] @ layer.T
                layer -= 0.5 * (weights[:, None] * (output - logits[near])).T @ keys[near]
            expected.append(network(query) + layer @ key)
    found = shortcut.predict(local, queries)
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-3, rtol=1e-3)
    given = shortcut.memory.read(shortcut.describe(queries), 20)
    torch.testing.assert_close(shortcut.predict(local, queries, given), found)
    scores = score_methods(training, 0, 60)["MbPA + DER++ (shortcut)", 1]
    right = shortcut.predict(TINY.on_der_shortcut.predictor(1), queries).argmax(1) == answers
    assert scores.accuracies[2] == pytest.approx(float(right.double().mean()), abs=0.04)


def test_memories_at_random_are_entries_of_the_memory(training: Training) -> None:
    memory = fill_memory(training, 0, 1)
    queries, _ = training.streams.queries(0, 0, 50)
    found = random_neighbors(memory, queries, 30, torch.Generator().manual_seed(0))
    entries = memory.entries()
    assert torch.equal(found.keys, entries.keys[found.ids])
    assert torch.equal(found.values, entries.values[found.ids])
    assert torch.allclose(found.distances, (found.keys - queries[:, None]).square().sum(-1))
    assert len(found.ids.unique()) == len(memory)
    nearest = memory.read(queries, 30)
    assert found.distances.mean() > 1.05 * nearest.distances.mean()


def kept_states(out: Path) -> set[tuple[str, int]]:
    """Return every state that a run has saved, with the time of its last change."""
    manifests = list(out.glob("permuted-mnist/.unfinished/*/*/manifest.json"))
    found = set()
    for manifest in manifests:
        with contextlib.suppress(FileNotFoundError):  # it is being replaced
            found.add((str(manifest), manifest.stat().st_mtime_ns))
    return found


@pytest.mark.slow
def test_a_killed_run_ends_with_what_it_would_have_found(data_dir: Path, tmp_path: Path) -> None:
    """The run is killed at random moments and started again until it finishes."""
    settings = {"tasks": 3, "examples": 200, "hidden": 24, "batch": 20, "test-images": 60}
    settings |= {"curve-images": 30, "switch-every": 40, "fisher-images": 50}
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    flags += ["--memory-per-task", "10", "40"]

    def command(out: Path) -> list[str]:
        start = "import sys; from experiments.cli import main; sys.exit(main())"
        words = ["run", "permuted-mnist", "--preset", "smoke", *flags, "--out", str(out)]
        return [sys.executable, "-c", start, *words, "--data-dir", str(data_dir), "--no-progress"]

    subprocess.run(command(tmp_path / "whole"), check=True, cwd=ROOT, capture_output=True)
    draws, kills = random.Random(0), 0
    for saves in (1, 2, 0):  # killed at some moment after so many more states were kept
        process = subprocess.Popen(
            command(tmp_path / "killed"), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        before = kept_states(tmp_path / "killed")
        while process.poll() is None and len(kept_states(tmp_path / "killed") - before) < saves:
            time.sleep(0.02)
        time.sleep(draws.uniform(0, 0.3))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.communicate()
    subprocess.run(command(tmp_path / "killed"), check=True, cwd=ROOT, capture_output=True)
    whole, killed = (read_results(tmp_path / name) for name in ("whole", "killed"))
    assert kills > 1
    assert untimed(killed[0].metrics) == untimed(whole[0].metrics)


# Settings and the report


def test_the_paper_preset_is_what_the_search_chose() -> None:
    path = ROOT / "results" / "permuted-mnist" / "tune-paper.json"
    config, checked = PRESETS["paper"], 0
    for record in json.loads(path.read_text("utf-8"))["metrics"]:
        if record["name"] != "chosen":
            continue
        value: object = config
        for part in record["setting"].split("."):
            value = getattr(value, part)
        if isinstance(value, tuple):
            value = of_size(value, config.memory_per_task.index(record["memory_per_task"]))
        assert value == record["value"], record
        checked += 1
    assert checked > 100


GRIDS = tuning.Grids(
    ewc_strengths=(1.0, 100.0),
    der_alphas=(0.3,),
    der_betas=(0.5, 1.0),
    rates=(0.1, 0.3),
    logit_rates=(0.001, 0.01),
    shortcut_rates=(0.3, 1.0),
    steps=(1, 3),
    counts=(5, 10),
    bandwidths=(0.0, 2.0),
    decays=(0.0, 0.1),
    layers=(1, 3),
)


@pytest.mark.heavy
def test_the_search_chooses_on_images_of_its_own_and_resumes_where_it_was(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = tune(TINY, context, GRIDS)[None]
    chosen = {(r["setting"], r["memory_per_task"]): r["value"] for r in of(records, name="chosen")}
    assert ("ewc_strength", None) in chosen
    assert {(f"alone.{name}", n) for name in vars(AdaptationBySize()) for n in (10, 40)} <= set(
        chosen
    )
    tried = of(records, method="EWC", name="mean_accuracy")
    best = max(tried, key=lambda record: float(record["value"] or 0))
    assert chosen["ewc_strength", None] == best["ewc_strength"]
    adapted = of(records, method="MbPA", memory_per_task=40, name="mean_accuracy")
    setting = {name: chosen[f"alone.{name}", 40] for name in vars(AdaptationBySize())}
    taken = float(of(adapted, **setting)[0]["value"] or 0)
    assert taken >= max(float(r["value"] or 0) for r in adapted) - tuning.ACCURACY_TOLERANCE
    towards_logits = of(records, method="MbPA + DER++ (logits)", memory_per_task=40)
    setting = {name: chosen[f"on_der_logits.{name}", 40] for name in vars(AdaptationBySize())}
    taken = float(of(towards_logits, **setting)[0]["value"] or 0)
    best_value = max(float(r["value"] or 0) for r in towards_logits)
    assert taken >= best_value - tuning.TOLERANCE_ON_DER
    assert {r["lr"] for r in towards_logits} == set(GRIDS.logit_rates)
    with_shortcut = of(records, method="MbPA + DER++ (shortcut)", memory_per_task=40)
    assert {r["lr"] for r in with_shortcut} == set(GRIDS.shortcut_rates)
    assert {r["layers"] for r in with_shortcut} == {1}
    assert chosen["on_der_shortcut.lr", 40] in GRIDS.shortcut_rates
    most = GRIDS.count_settings(len(TINY.memory_per_task))
    assert most // 2 < len(of(records, name="mean_accuracy")) <= most

    def fail(*_: object) -> None:
        raise AssertionError("done again")

    monkeypatch.setattr(Training, "learn_next", fail)
    monkeypatch.setattr(tuning.Questions, "measure_accuracy", fail)
    assert tune(TINY, context, GRIDS)[None] == records


def test_the_report_is_made_of_records_alone(records: list[Record]) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    config = json.loads(json.dumps(vars(TINY), default=vars))
    results = [
        Result(
            "permuted-mnist", "smoke", seed, config, {}, 1.0, "python -m experiments run", records
        )
        for seed in (0, 1)
    ]
    parts = sections(results)
    table = parts[0].tables[0]
    assert [row[0] for row in table.rows] == METHODS
    mbpa_row = next(row for row in table.rows if row[0] == "MbPA")
    value = of(
        records,
        stream="sequence",
        method="MbPA",
        memory_per_task=40,
        tasks_seen=3,
        name="mean_accuracy",
    )[0]["value"]
    assert mbpa_row[2] == f"{100 * float(value or 0):.2f} ± 0.00"
    assert len(parts[0].tables[1].rows) == 5  # the claims
    gains = parts[0].tables[2]
    assert [row[0] for row in gains.rows] == METHODS[-3:]
    alone, both = (
        float(
            of(
                records,
                stream="sequence",
                method=method,
                memory_per_task=10,
                tasks_seen=3,
                name="mean_accuracy",
            )[0]["value"]
            or 0
        )
        for method in ("DER++", "MbPA + DER++ (logits)")
    )
    assert gains.rows[1][1].startswith(f"{100 * (both - alone):+.2f} ± 0.00, least ")
    stored = {row[0]: float(row[1]) for row in parts[1].tables[0].rows}
    network = 4 * (784 * 24 + 24 + 24 * 24 + 24 + 240 + 10) / 1e6
    assert stored["EWC as published, parameters and Fisher of every task"] == pytest.approx(
        6 * network, abs=0.06
    )
    assert "EWC, told every switch" in [row[0] for row in parts[2].tables[0].rows]
    for figure in parts[0].figures:
        canvas = Figure(figsize=figure.size, layout="constrained")
        figure.draw(canvas)
        canvas.canvas.draw()
        assert any(axis.lines or axis.collections for axis in canvas.axes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": ()}, "seeds must name at least one"),
        ({"memory_per_task": (3,)}, "memory_per_task must divide examples 200, got 3"),
        ({"batch": 30}, "batch must divide examples 200"),
        ({"switch_every": 60}, "switch_every must divide examples 200, got 60"),
        ({"test_images": 20_000}, "test_images must be 1 to 10000, got 20000"),
        ({"der_alpha": (1.0, 2.0, 3.0)}, "der_alpha must have one value, or 2"),
        ({"alone": AdaptationBySize(k=(1, 2, 3))}, "alone.k must have one value, or 2"),
        ({"seeds": (1, 1)}, "without duplicates"),
        ({"memory_per_task": ()}, "memory_per_task must have at least one value"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"tasks": 0}, "tasks must be at least 1, got 0"),
        ({"memory_per_task": (4,)}, "switch_every must be a multiple of .* got 40"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **change)


@pytest.mark.parametrize(
    "change",
    [{"k": (0,)}, {"lr": (float("nan"),)}, {"steps": (0,)}, {"layers": (4,)}, {"decay": (-1.0,)}],
)
def test_adaptations_that_make_no_sense_are_refused(change: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        AdaptationBySize(**change)


def test_a_search_says_what_it_looked_at_and_does_not_depend_on_what_it_chose() -> None:
    asked = searched(PRESETS["paper"])
    assert (asked.part, asked.seeds, asked.switching) == ("validation", (SEARCH_SEED,), False)
    changed = replace(
        PRESETS["paper"], ewc_strength=7.0, alone=AdaptationBySize(k=(3,)), vote_k=(9,)
    )
    assert searched(changed) == asked
    assert searched(replace(changed, hidden=300)) != asked


def test_claims_without_evidence_are_not_called_true(records: list[Record]) -> None:
    config = json.loads(json.dumps(vars(TINY), default=vars))
    results = [
        Result("permuted-mnist", "smoke", 0, config, {}, 1.0, "python -m experiments run", records)
    ]
    claims = {row[0]: row[1] for row in sections(results)[0].tables[1].rows}
    assert claims["MbPA beats EWC for n > 100"] == "no such n"


def test_five_sizes_of_memory_can_be_drawn(records: list[Record]) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    sizes = (10, 20, 40, 50, 100)
    more = [
        {**record, "memory_per_task": size}
        for record in records
        for size in sizes
        if record["memory_per_task"] == 10
    ]
    plain = [record for record in records if record["memory_per_task"] is None]
    config = json.loads(json.dumps(vars(replace(TINY, switching=False)), default=vars))
    config["memory_per_task"] = list(sizes)
    results = [
        Result("permuted-mnist", "x", 0, config, {}, 1.0, "python -m experiments run", plain + more)
    ]
    for figure in sections(results)[0].figures:
        figure.draw(Figure(figsize=figure.size, layout="constrained"))


def test_the_presets_are_what_the_protocol_asks_for() -> None:
    paper = PRESETS["paper"]
    assert (paper.tasks, paper.examples, paper.test_images) == (20, 10_000, 10_000)
    assert paper.memory_per_task == (100, 500, 1000, 5000)
    assert len(paper.seeds) >= 5
    assert SEARCH_SEED not in paper.seeds
    assert isinstance(EXPERIMENT.presets["quick"], PermutedMnistConfig)


@pytest.mark.heavy
def test_an_altered_data_file_stops_the_run_in_one_line(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from experiments.cli import main

    copy = tmp_path / "data" / "mnist"
    shutil.copytree(data_dir / "mnist", copy)
    words = ["run", "permuted-mnist", "--preset", "smoke", "--out", str(tmp_path / "results")]
    words += ["--data-dir", str(tmp_path / "data"), "--no-progress"]
    images = copy / "t10k-images-idx3-ubyte.gz"
    content = bytearray(images.read_bytes())
    content[1000] ^= 1
    images.chmod(0o644)
    images.write_bytes(content)
    assert main(words) == 2
    altered = capsys.readouterr().err.strip()
    images.unlink()
    assert main(words) == 2
    missing = capsys.readouterr().err.strip()
    assert altered.count("\n") == missing.count("\n") == 0
    assert "t10k-images-idx3-ubyte.gz" in altered
    assert altered.endswith("`python -m experiments data fetch mnist --force` replaces it")
    assert "mnist is not in" in missing
    assert (
        "`python -m experiments data fetch mnist`, or point MBPA_DATA or --data-dir at" in missing
    )
    assert not list((tmp_path / "results").glob("*/*.json"))
