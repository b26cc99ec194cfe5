"""From a spreadsheet to a run: the contents of people's files, and what is made of them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import re
import resource
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from runs import BrightnessEncoder, WordEncoder, plain_picture

import mbpa
from mbpa import cli
from mbpa.errors import RunError
from mbpa.modules.split import grow
from mbpa.serve import run_directory, selection, teaching, training
from mbpa.serve.answers import Lesson
from mbpa.serve.classifier import Classifier
from mbpa.serve.labelled_images import LabelledImages, read_labelled_images
from mbpa.serve.labelled_texts import read_labelled_texts
from mbpa.serve.run_info import RUN_FORMAT, Model, RunInfo, read_model
from mbpa.serve.selection import Choice, Rehearsal
from mbpa.teaching.combination import find_break_even

GOOD = "text,label\nhow are you,greeting\nring me,call\n"


@pytest.fixture
def read(tmp_path):
    def reading(content: str | bytes, name: str = "data.csv", **options):
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return read_labelled_texts(path, **options)

    return reading


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (GOOD, "plain.csv"),
        (GOOD.replace("\n", "\r\n"), "windows.csv"),
        ("\ufeff" + GOOD, "mark.csv"),
        (GOOD.encode("utf-16"), "excel.csv"),
        (GOOD.replace(",", ";"), "german.csv"),
        (GOOD.replace(",", "\t"), "tabs.tsv"),
        (GOOD.replace("label", "category"), "one other column.csv"),
        (GOOD.replace("\n", "\n\n , \n"), "empty rows.csv"),
        (GOOD + "how are you,greeting\n", "duplicate.csv"),
        (GOOD + " ring me ,call \n", "spaces.csv"),
        (
            '{"text": "how are you", "label": "greeting"}\n\n{"label": "call", "text": "ring me"}',
            "lines.jsonl",
        ),
    ],
)
def test_files_as_people_have_them_are_read(read, content, name):
    data = read(content, name)
    assert data.texts == ("how are you", "ring me")
    assert data.labels == ("greeting", "call")
    assert data.duplicates == (name in ("duplicate.csv", "spaces.csv"))


def test_other_columns_and_encodings_are_named(read):
    content = "id,Frage,Thema\n1,schönen Tag,gruß\n2,ruf an,anruf\n".encode("cp1252")
    data = read(content, text="Frage", label="Thema", encoding="cp1252")
    assert data.texts == ("schönen Tag", "ruf an")


def test_texts_may_have_commas_and_lines(read):
    data = read('text,label\n"a, b\nand ""c""",x\nd,y\n')
    assert data.texts == ('a, b\nand "c"', "d")


def test_numbered_labels_are_labels(read):
    assert read('{"text": "a", "label": 0}\n{"text": "b", "label": 1}', "n.jsonl").labels == (
        *("0", "1"),
    )


def test_texts_with_several_labels_are_counted_and_kept(read):
    data = read(GOOD + "ring me,greeting\n")
    assert (len(data.texts), data.contradictions, data.duplicates) == (3, 1, 0)


@pytest.mark.parametrize(
    ("content", "name", "why"),
    [
        ("", "data.csv", "has no rows with a text and a label"),
        ("text,label\n", "data.csv", "has no rows with a text and a label"),
        ("a,b,c\n1,2,3\n", "data.csv", "no column 'text', only 'a', 'b', 'c': name .* --text NAME"),
        ("text,b,c\n1,2,3\n", "data.csv", "no column 'label', .*--label NAME"),
        (GOOD + "no label,\n", "data.csv", "line 4: 'label': a label must not be empty"),
        (GOOD + ",call\n", "data.csv", "line 4: 'text': a text must not be empty"),
        (GOOD + "\n\na,b,c\n", "data.csv", "line 6: more fields than the header has"),
        (GOOD + '"open,call\n', "data.csv", "line 4: unexpected end of data"),
        (GOOD + "a\x07b,call\n", "data.csv", r"line 4: 'text': .*control characters, got U\+0007"),
        (GOOD + "a\0b,call\n", "data.csv", "line 4: "),
        (GOOD.encode() + b"caf\xe9,x\n", "data.csv", "line 4: not UTF-8 text; .*--encoding cp1252"),
        ("text,label\na,x\nb,x\n", "data.csv", "only one label, 'x'"),
        ('"one\ntwo",label\n', "data.csv", "has no rows"),
        ('{"text": "a", "label": "x"}\n[1]', "data.jsonl", "line 2: must be a JSON object"),
        ('{"text": "a", "label": "x"}\n{', "data.jsonl", "line 2: must be a JSON object"),
        ('{"text": "a", "label": ["x"]}', "data.jsonl", "line 1: 'label' must be text, got"),
        ('{"text": 5, "label": "x"}', "data.jsonl", "line 1: 'text' must be text, got 5"),
        ("[" * 100_000, "data.jsonl", "line 1: must be a JSON object"),
        (GOOD + f"{'a' * 10_001},x\n", "data.csv", "line 4: 'text': .*at most 10000 characters"),
    ],
)
def test_unusable_files_are_refused_in_one_line(read, content, name, why):
    with pytest.raises(RunError, match=why) as refused:
        read(content, name)
    assert "\n" not in str(refused.value)


def test_the_line_of_a_row_is_where_it_begins(read):
    with pytest.raises(RunError, match="line 5: 'label'"):
        read('text,label\n"a\nb\nc",x\nd,\n')


# Pictures


def write_pictures(root: Path, *names: str) -> None:
    """Write one picture per name, each of another colour."""
    pytest.importorskip("PIL")
    for name, colour in zip(names, ("red", "blue", "green", "yellow"), strict=False):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(plain_picture(colour))


def test_what_systems_put_beside_pictures_is_none(tmp_path):
    write_pictures(tmp_path, "a/red.png", "a/deep/blue.png", "b/green.png")
    for name in ("a/._red.png", "a/.DS_Store", "a/.trash/x.png", "__MACOSX/a/._red.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"no picture")
    (tmp_path / "b" / "__MACOSX").mkdir()
    (tmp_path / "b" / "__MACOSX" / "x.png").write_bytes(b"no picture")
    album = read_labelled_images(tmp_path)
    assert album.labels == ("a", "a", "b")
    assert (album.rows, album.duplicates, album.strays) == (3, 0, 0)


def test_rows_of_a_table_of_pictures_that_stand_there_twice_are_counted(tmp_path):
    write_pictures(tmp_path, "red.png", "blue.png")
    (tmp_path / "copy.png").write_bytes((tmp_path / "red.png").read_bytes())
    rows = ["red.png,a", "blue.png,b", "red.png,a", "copy.png,a", "red.png,b"]
    (tmp_path / "table.csv").write_text("\n".join(["image,label", *rows]))
    album = read_labelled_images(tmp_path / "table.csv")
    assert album.labels == ("a", "b", "b")
    assert (album.rows, album.duplicates, album.contradictions) == (5, 2, 1)


# Teaching

WORDS = ["red", "blue", "iron", "oak", "rain", "sun", "sea", "hill", "bread", "salt"]


def sentences(label: int, count: int, chance: random.Random) -> list[str]:
    own = [f"word{label}x{i}" for i in range(4)]
    return [
        " ".join([*chance.sample(own, 2), *chance.sample(WORDS, 2), f"n{i}"]) for i in range(count)
    ]


def spreadsheet(tmp_path, *, labels: int, each: int):
    chance = random.Random(0)
    rows = [(text, f"l{i}") for i in range(labels) for text in sentences(i, each, chance)]
    path = tmp_path / "data.csv"
    path.write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
    return read_labelled_texts(path)


def make_run(tmp_path: Path, labels: int):
    data = spreadsheet(tmp_path, labels=labels, each=20)
    made = teaching.teach(data, WordEncoder(), cache=tmp_path / "cache")
    teaching.write_new_run(made, data, tmp_path / "run")
    return tmp_path / "run", made, data


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("taught"), labels=9)


@pytest.fixture(scope="module")
def taught_few(tmp_path_factory):
    """Too few labels for a learner."""
    return make_run(tmp_path_factory.mktemp("few"), labels=5)


def test_what_was_taught_is_answered(taught):
    run, made, _ = taught
    chance = random.Random(1)
    asked = [(f"l{i}", text) for i in range(9) for text in sentences(i, 5, chance)]
    with Classifier.load(run, text_encoder=WordEncoder()) as classifier:
        answers = classifier.predict([text for _, text in asked], threshold=0.0)
        right = [answer.label == label for answer, (label, _) in zip(answers, asked, strict=True)]
        assert sum(right) >= 0.9 * len(right)
        assert made.info.summary["accuracy"] >= 0.9
        assert len(classifier) == 180
        assert classifier.threshold == made.info.threshold


def test_a_label_can_be_added_to_it(taught):
    run, _, _ = taught
    chance = random.Random(2)
    lessons = [Lesson("new", text) for text in sentences(50, 4, chance)]
    with Classifier.load(run, text_encoder=WordEncoder()) as classifier:
        ids = classifier.learn(lessons)
        answers = classifier.predict(sentences(50, 20, chance), threshold=0.0)
        assert sum(answer.label == "new" for answer in answers) >= 8
        classifier.forget(ids=ids)
        answers = classifier.predict(sentences(50, 20, chance), threshold=0.0)
        assert not any(answer.label == "new" for answer in answers)


@pytest.mark.heavy
def test_teaching_twice_gives_the_same(taught, tmp_path):
    _, made, data = taught
    again = teaching.teach(data, WordEncoder())
    assert torch.equal(again.model.head.weight, made.model.head.weight)
    assert again.info == made.info
    before, after = made.model.method.tensors(), again.model.method.tensors()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_run_is_not_replaced_unless_that_is_asked_for(taught, tmp_path):
    _, made, data = taught
    out = tmp_path / "run"
    teaching.write_new_run(made, data, out)
    with pytest.raises(RunError, match="is a run, and what it was taught would be lost"):
        teaching.write_new_run(made, data, out)
    with Classifier.load(out, text_encoder=WordEncoder()) as classifier:
        classifier.learn([Lesson("new", "taught since")])
    teaching.write_new_run(made, data, out, replace=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    with Classifier.load(out, text_encoder=WordEncoder()) as classifier:
        assert "new" not in classifier.labels


@pytest.mark.parametrize("is_run", [True, False])
def test_what_is_no_part_of_a_run_is_never_deleted(taught, tmp_path, monkeypatch, is_run):
    _, made, data = taught
    out = tmp_path / "mine"
    out.mkdir()
    if is_run:
        teaching.write_new_run(made, data, out)
    (out / "notes.txt").write_text("years of work")
    for asked in (out, Path(".")):
        monkeypatch.chdir(out)
        with pytest.raises(RunError, match=r"contains notes\.txt, which is not part of a run"):
            teaching.write_new_run(made, data, asked, replace=True)
    assert (out / "notes.txt").read_text() == "years of work"
    if not is_run:
        (out / "notes.txt").rename(out / "model")
        with pytest.raises(RunError, match="is neither empty nor a run"):
            teaching.write_new_run(made, data, out, replace=True)


def test_a_run_may_be_replaced_from_within(taught, tmp_path, monkeypatch):
    _, made, data = taught
    teaching.write_new_run(made, data, tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run")
    teaching.write_new_run(made, data, Path("."), replace=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    Classifier.load(tmp_path / "run", text_encoder=WordEncoder()).close()


def test_a_run_that_is_served_is_not_replaced(taught, tmp_path):
    """Its server would continue and acknowledge examples that nobody finds again."""
    _, made, data = taught
    out = tmp_path / "run"
    teaching.write_new_run(made, data, out)
    with Classifier.load(out, text_encoder=WordEncoder()) as served:
        with pytest.raises(RunError, match="in use by process"):
            run_directory.require_free(out, replace=True)
        with pytest.raises(RunError, match="in use by process"):
            teaching.write_new_run(made, data, out, replace=True)
        served.learn([Lesson("new", "taught meanwhile")])
    with Classifier.load(out, text_encoder=WordEncoder()) as again:
        assert again.labels["new"] == 1
    teaching.write_new_run(made, data, out, replace=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_run_that_cannot_be_finished_leaves_nothing(taught, tmp_path):
    _, made, data = taught
    (tmp_path / "run").mkdir()
    fewer = dataclasses.replace(made, keys=made.keys[1:])
    with pytest.raises(ValueError, match="zip"):
        teaching.write_new_run(fewer, data, tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.parametrize(("labels", "each"), [(2, 1), (3, 2), (2, 4), (300, 1), (40, 3)])
def test_few_examples_and_many_labels_are_enough(tmp_path, labels, each):
    data = spreadsheet(tmp_path, labels=labels, each=each)
    made = teaching.teach(data, WordEncoder(), training=training.Training(epochs=5))
    teaching.write_new_run(made, data, tmp_path / "run")
    assert teaching.report(made, data)
    with Classifier.load(tmp_path / "run", text_encoder=WordEncoder()) as classifier:
        assert len(classifier.labels) == labels
        assert classifier.predict(data.texts[:1], threshold=0.0)[0].label in data.labels


def test_held_out_examples_are_a_share_of_each_label():
    labels = torch.tensor([0] * 40 + [1] * 3 + [2] * 2 + [3])
    held = training.choose_held_out(labels, torch.Generator().manual_seed(0))
    assert [int(held[labels == label].sum()) for label in range(4)] == [4, 1, 0, 0]


def test_the_threshold_leaves_most_right_answers_over_wrong_ones():
    chance = random.Random(0)
    for _ in range(50):
        count = chance.randrange(1, 12)
        confidence = torch.tensor([chance.choice([0.1, 0.3, 0.5, 0.7, 0.9]) for _ in range(count)])
        right = torch.tensor([chance.random() < 0.5 for _ in range(count)])

        def gain(threshold: float, confidence=confidence, right=right) -> int:
            answered = confidence >= threshold
            return int(right[answered].sum()) - int((~right[answered]).sum())

        best = max(gain(threshold) for threshold in [0.0, *confidence.tolist()])
        assert gain(find_break_even(confidence, right)) == best


def test_bad_data_ends_the_command_with_a_line(tmp_path, capsys):
    (tmp_path / "data.csv").write_text("a,b,c\n1,2,3\n")
    assert cli.main(["teach", str(tmp_path / "data.csv"), "--out", str(tmp_path / "run")]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("mbpa: ")
    assert "no column 'text'" in printed
    assert printed.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_files_that_are_not_there_or_cannot_be_written_are_named_in_a_line(tmp_path, capsys):
    (tmp_path / "data.csv").write_text(GOOD)
    (tmp_path / "file").write_text("mine")
    options = ["--no-progress", "--cache", str(tmp_path / "cache"), "--out"]
    none, below = tmp_path / "none.csv", tmp_path / "file" / "run"
    assert cli.main(["teach", str(none), *options, str(tmp_path / "run")]) == 2
    assert cli.main(["teach", str(tmp_path / "data.csv"), *options, str(below)]) == 2
    assert cli.main(["teach", str(tmp_path / "data.csv"), *options, "/proc/mbpa/run"]) == 2
    first, second, third = capsys.readouterr().err.splitlines()
    assert first == f"mbpa: {none} cannot be read: No such file or directory"
    assert second == f"mbpa: {below} cannot be written (Not a directory): choose another directory"
    assert re.fullmatch(
        r"mbpa: /proc/mbpa/run cannot be written \(.*\): choose another directory", third
    )


def test_a_disk_that_fails_at_the_end_is_told_in_a_line(taught, tmp_path):
    _, made, data = taught
    (tmp_path / "full").mkdir()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(
            RunError, match=r"run cannot be written \(.*\): choose another directory"
        ):
            teaching.write_new_run(made, data, tmp_path / "full" / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list((tmp_path / "full").iterdir())


def test_keys_of_another_norm_are_not_taught(taught, tmp_path):
    """Their sums would overflow silently."""

    class Long(WordEncoder):
        def __call__(self, texts):
            return 1000 * super().__call__(texts)

    _, made, data = taught
    with pytest.raises(ValueError, match=r"keys must have norm 1, got 1e\+03"):
        teaching.teach(data, Long())
    long = dataclasses.replace(made, keys=1000 * made.keys)
    with pytest.raises(ValueError, match=r"keys must have norm 1, got 1e\+03"):
        teaching.write_new_run(long, data, tmp_path / "run")
    assert not list(tmp_path.iterdir())
    plain = Model(made.model.head, teaching.DEFAULT_PREDICTOR)
    teaching.write_new_run(dataclasses.replace(long, model=plain), data, tmp_path / "run")


def test_an_encoder_must_take_what_is_taught(taught):
    _, _, data = taught
    with pytest.raises(ValueError, match="the encoder brightness takes images, not texts"):
        teaching.teach(data, BrightnessEncoder())


@pytest.mark.parametrize(
    ("added", "told"),
    [
        ("", ""),
        ("ring me,call\n", "left out   1 duplicate row\n"),
        ("ring me,call\n" * 2, "left out   2 duplicate rows\n"),
        ("ring me,greeting\n", "note       1 text has several labels\n"),
        (
            "ring me,greeting\nhow are you,call\nring me,call\n",
            "left out   1 duplicate row\nnote       2 texts have several labels\n",
        ),
    ],
)
def test_the_report_counts_what_was_left_out(taught, read, added, told):
    _, made, _ = taught
    data = read(GOOD + added)
    lines = f"examples   {len(data.texts)} of 9 labels\n{told}held out"
    assert teaching.report(made, data).startswith(lines)


def test_files_that_are_no_pictures_are_left_out_in_words(taught):
    _, made, _ = taught
    for strays, told in (
        (0, ""),
        (1, "left out   1 file that is not a picture of a label\n"),
        (2, "left out   2 files that are not pictures of a label\n"),
    ):
        data = LabelledImages((b"a", b"b"), ("x", "y"), 2, 0, strays)
        assert teaching.report(made, data).startswith(f"examples   2 of 9 labels\n{told}held out")


def test_a_run_describes_itself(taught):
    run, _, _ = taught
    content = json.loads((run / "run.json").read_text())
    assert content["format"] == 7
    assert content["takes"] == "texts"
    assert content["mbpa"] == mbpa.__version__
    assert content["labels"] == [f"l{i}" for i in range(9)]
    assert content["summary"]["held_out"] == 18


def test_the_rehearsal_asks_for_labels_that_its_head_does_not_know():
    keys = torch.nn.functional.normalize(torch.randn(90, 8), dim=1)
    labels = torch.arange(90) % 6
    generator = torch.Generator().manual_seed(0)
    held = training.choose_held_out(labels, generator)
    task = selection.stage_rehearsal(keys, labels, held, training.Training(epochs=2), generator)
    assert (task.head.out_features, task.classes) == (4, 6)
    new = task.labels >= 4
    assert task.labels[new].bincount().tolist()[4:] == [3, 3]
    rows = {tuple(key) for key in task.keys.tolist()}
    assert not rows & {tuple(key) for key in task.queries.tolist()}
    pairs = itertools.chain(
        zip(task.keys, task.labels, strict=True), zip(task.queries, task.answers, strict=True)
    )
    place = {tuple(key): int(label) for key, label in zip(keys.tolist(), labels, strict=True)}
    seen = {(place[tuple(key.tolist())], int(number)) for key, number in pairs}
    assert len(seen) == 6, "each label has one number"
    assert task.answers.bincount().tolist() == [2, 2, 2, 2, 12, 12], "all that are left"


def confusable_task() -> Rehearsal:
    """Labels that overlap."""
    draws = torch.Generator().manual_seed(0)
    labels = torch.arange(900) % 18
    places = torch.nn.functional.normalize(torch.randn(18, 8, generator=draws), dim=1)
    keys = places[labels] + 0.35 * torch.randn(900, 8, generator=draws)
    keys = torch.nn.functional.normalize(keys, dim=1)
    held = training.choose_held_out(labels, draws, 0.25)
    task = selection.stage_rehearsal(keys, labels, held, training.Training(), draws)
    assert task is not None
    return task


def shares_by_hand(task: Rehearsal, choice: Choice) -> tuple[float, float]:
    """Return the shares of correct answers for new and old labels, by a model built by hand."""
    old = task.head.out_features
    directions = []
    for label in range(task.classes):
        mean = task.keys[task.labels == label].mean(0)
        directions.append(mean / mean.norm())
    middle, weight = torch.stack(directions[:old]).mean(0), task.head.weight
    away = torch.stack(directions[:old]) - middle
    scale = (weight - weight.mean(0)).norm(dim=1).mean() / away.norm(dim=1).mean()
    head = grow(task.head, task.classes).requires_grad_(False)
    for label in range(old, task.classes):
        out = choice.reach * scale * (directions[label] - middle)
        head.weight[label] = weight.mean(0) + out
        head.bias[label] = task.head.bias.mean() + choice.offset
    memory = mbpa.ExactMemory(len(task.keys), task.keys.shape[1])
    model = mbpa.MbPA(head=head, memory=memory, predictor=choice.predictor)
    model.write(keys=task.keys, values=task.labels)
    right = (model(keys=task.queries).argmax(1) == task.answers).double()
    return float(right[task.answers >= old].mean()), float(right[task.answers < old].mean())


@pytest.mark.heavy
def test_rehearsals_choose_for_new_labels_as_long_as_old_ones_are_kept():
    task = confusable_task()
    choice = selection.choose([task], max_lost_fraction=0.02)
    new, old = shares_by_hand(task, choice)
    assert (choice.score.new, choice.score.old) == pytest.approx((new, old), abs=0.005)
    is_old = task.answers < task.head.out_features
    alone = (task.head(task.queries).argmax(1) == task.answers)[is_old].double().mean()
    assert float(alone) - choice.score.old <= 0.02
    careless = selection.choose([task], max_lost_fraction=1.0)
    assert careless.score.new > choice.score.new
    assert careless.score.old < choice.score.old


def test_the_learner_is_kept_in_the_run(taught):
    run, made, _ = taught
    kept, given = read_model(run, made.info, "cpu").method.tensors(), made.model.method.tensors()
    assert sorted(kept) == sorted(given)
    assert all(torch.equal(kept[name], given[name]) for name in given)


@pytest.mark.heavy
def test_what_is_answered_out_of_scope_can_be_limited(taught, taught_few, tmp_path):
    _, made, data = taught
    careful = teaching.teach(data, WordEncoder(), max_answered_out_of_scope=0.01)
    assert careful.info.threshold == pytest.approx(
        made.model.method.combination.find_threshold(0.01)
    )
    assert careful.info.threshold > made.info.threshold
    teaching.write_new_run(careful, data, tmp_path / "run")
    assert RunInfo.read(tmp_path / "run").max_answered_out_of_scope == 0.01
    with pytest.raises(ValueError, match="there must be at least 6 labels"):
        teaching.teach(taught_few[2], WordEncoder(), max_answered_out_of_scope=0.01)


def test_rows_of_new_labels_are_kept_in_the_run(taught_few, tmp_path):
    run, made, data = taught_few
    kept, given = read_model(run, made.info, "cpu").rows, made.model.rows
    assert (kept.scale, kept.offset) == (given.scale, given.offset)
    assert kept.scale > 0
    for name in ("direction", "weight", "bias"):
        assert torch.equal(getattr(kept, name), getattr(given, name))
    torch.testing.assert_close(kept.weight, made.model.head.weight.mean(0))
    before = dataclasses.replace(made, model=made.model._replace(rows=None))
    teaching.write_new_run(before, data, tmp_path / "run")
    assert read_model(tmp_path / "run", made.info, "cpu").rows is None


@pytest.mark.parametrize("format", [1, 3])
def test_runs_of_earlier_formats_are_opened_and_later_ones_refused(taught_few, tmp_path, format):
    """Formats 1 to 3 had no check sum."""
    run, made, _ = taught_few
    earlier = Path(shutil.copytree(run, tmp_path / "earlier"))
    content = json.loads((run / "run.json").read_text())
    del content["sha256"]
    if format == 1:
        del content["takes"]
    (earlier / "run.json").write_text(json.dumps(content | {"format": format}))
    with Classifier.load(earlier, text_encoder=WordEncoder()) as classifier:
        assert classifier.info == made.info
        assert read_model(earlier, made.info, "cpu").rows is not None
    (earlier / "run.json").write_text(json.dumps(content | {"format": RUN_FORMAT + 1}))
    with pytest.raises(RunError, match="written by a newer mbpa: upgrade mbpa"):
        Classifier.load(earlier, text_encoder=WordEncoder())


def test_a_changed_value_in_the_description_of_a_run_is_noticed(taught, tmp_path):
    run, _, _ = taught
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    content = json.loads((run / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps(content))  # the same in other words
    RunInfo.read(copy)
    for change in ({"threshold": 0.123}, {"format": 3}, {"labels": content["labels"][::-1]}):
        (copy / "run.json").write_text(json.dumps(content | change))
        with pytest.raises(RunError, match=r"run\.json is damaged"):
            RunInfo.read(copy)


def test_a_single_picture_is_no_spreadsheet(tmp_path, capsys):
    path = tmp_path / "8.PNG"
    path.write_bytes(b"\x89PNG\r\n\x1a\n")
    assert cli.main(["teach", str(path), "--out", str(tmp_path / "run")]) == 2
    assert "8.PNG is a picture: pass a folder" in capsys.readouterr().err


def test_a_workbook_is_to_be_saved_as_csv(tmp_path):
    path = tmp_path / "intents.xlsx"
    with zipfile.ZipFile(path, "w") as book:
        book.writestr("xl/workbook.xml", "<workbook/>")
    with pytest.raises(RunError, match=r"intents\.xlsx is a workbook: save the sheet as CSV"):
        read_labelled_texts(path)
