"""A classifier answers by the examples it has, whatever happened before."""

from __future__ import annotations

import io
import random
import shutil
import sys
import threading
from pathlib import Path

import pytest
import torch
from runs import (
    OFFSET,
    PREDICTOR,
    SCALE,
    BrightnessEncoder,
    UnsteadyEncoder,
    WordEncoder,
    plain_picture,
    random_keys,
    write_picture_run,
    write_random_run,
    write_word_run,
)
from torch import nn

import mbpa
from mbpa.errors import RunError
from mbpa.memory import ExactMemory
from mbpa.modules.new_rows import NewRows
from mbpa.modules.split import grow
from mbpa.serve.adapted_model import AdaptedModel
from mbpa.serve.answers import Lesson
from mbpa.serve.classifier import Classifier
from mbpa.serve.input_checks import Limits
from mbpa.serve.journal import InputError, Journal, JournalError
from mbpa.serve.order_independent import SPARE_NEIGHBORS, LabelRows, OrderIndependentReader
from mbpa.serve.run_info import RunInfo, read_model
from mbpa.serve.taught_model import TaughtModel
from mbpa.teaching import TaughtClassifier

DIM = 16
QUERIES = random_keys(20, DIM, seed=7)


@pytest.fixture(scope="module", params=["zeros", "rows", "learner"])
def kind(request) -> str:
    """Whether new labels have rows of zeros, as in old runs, rows from their examples, or there is
    a learner.
    """
    return request.param


@pytest.fixture(scope="module")
def has_rows(kind) -> bool:
    return kind == "rows"


@pytest.fixture(scope="module")
def untaught(tmp_path_factory, kind):
    directory = tmp_path_factory.mktemp("runs") / "untaught"
    write_random_run(directory, key_dim=DIM, has_rows=kind == "rows", learns=kind == "learner")
    return directory


without_learner = pytest.mark.parametrize("kind", ["zeros", "rows"], indirect=True)


@pytest.fixture
def fresh(untaught, tmp_path):
    """Return a function that makes classifiers, each in its own run directory."""
    opened = []

    def make() -> Classifier:
        directory = tmp_path / f"run{len(opened)}"
        shutil.copytree(untaught, directory)
        opened.append(Classifier.load(directory))
        return opened[-1]

    yield make
    for classifier in opened:
        classifier.close()


def get_probabilities(classifier: Classifier) -> list:
    """Return the exact probability of every label."""
    return classifier.predict(keys=QUERIES, top=1000)


def lessons() -> list[Lesson]:
    """Some of old labels, some of new ones; equal keys, with equal and with different labels."""
    keys = random_keys(12, DIM, seed=3)
    names = ["zebra", "apple", "label 001"]
    some = [Lesson(names[i % 3], f"taught {i}", key) for i, key in enumerate(keys)]
    twins = [Lesson("apple", "twin", QUERIES[0]), Lesson("zebra", "twin", QUERIES[0])]
    return [*some, *twins, *twins]


def test_a_lesson_changes_the_next_answer(fresh):
    classifier = fresh()
    assert classifier.predict(keys=QUERIES[:1])[0].top[0][0] != "new"
    classifier.learn([Lesson("new", key=QUERIES[0])] * 3)
    assert classifier.predict(keys=QUERIES[:1])[0].label == "new"
    assert classifier.labels["new"] == 3


@pytest.mark.parametrize("seed", range(5))
def test_answers_do_not_depend_on_the_order_of_teaching(fresh, seed):
    first, second = fresh(), fresh()
    first.learn(lessons())
    shuffled = lessons()
    random.Random(seed).shuffle(shuffled)
    for lesson in shuffled:
        second.learn([lesson])
        get_probabilities(second)  # what is kept from answer to answer must not count
    assert get_probabilities(first) == get_probabilities(second)
    assert list(first.labels) == list(second.labels)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "predictor",
    [
        mbpa.Adapted(mbpa.Gradient(steps=5), k=9, kernel=mbpa.gaussian(0.4)),
        mbpa.Adapted(mbpa.MAP(prior=0.01), k=9),
        mbpa.Mixture(PREDICTOR, mbpa.NeighborVote(k=30), weights=(0.5, 0.5)),
    ],
    ids=["auto", "MAP", "mixture"],
)
def test_answers_of_other_predictors_do_not_depend_on_the_order_either(tmp_path, predictor):
    found = []
    for turn in (1, -1):
        run = tmp_path / f"run{turn}"
        write_random_run(run, key_dim=DIM, predictor=predictor)
        with Classifier.load(run) as classifier:
            for lesson in lessons()[::turn]:
                classifier.learn([lesson])
                get_probabilities(classifier)  # what is kept from answer to answer must not count
            found.append(get_probabilities(classifier))
    assert found[0] == found[1]


def test_answers_are_the_same_after_a_restart(fresh):
    classifier = fresh()
    classifier.learn(lessons())
    classifier.forget(ids=[61, 3])
    before, directory = get_probabilities(classifier), classifier.journal.path.parent
    classifier.close()
    with Classifier.load(directory) as again:
        assert get_probabilities(again) == before
        assert again.stats() == classifier.stats() | {"change": again.journal.change}


def test_a_forgotten_example_was_never_taught(fresh):
    first, second = fresh(), fresh()
    first.learn(lessons()[:5])
    ids = second.learn([lessons()[9], *lessons()[:5], *lessons()[10:]])
    assert get_probabilities(first) != get_probabilities(second)
    gone = [ids[0], *ids[6:]]
    assert second.forget(ids=[*gone, 12345]) == gone
    assert get_probabilities(first) == get_probabilities(second)


def test_a_forgotten_label_was_never_taught(fresh):
    untouched, classifier = fresh(), fresh()
    for name in ("aaa", "mmm", "zzz"):
        classifier.learn([Lesson(name, key=key) for key in QUERIES[:4]])
    assert len(classifier.labels) == len(untouched.labels) + 3
    for name in ("mmm", "aaa", "zzz"):
        assert len(classifier.forget(label=name)) == 4
        assert name not in classifier.labels
    assert get_probabilities(classifier) == get_probabilities(untouched)
    assert classifier.forget(label="aaa") == []


@pytest.mark.parametrize("seed", range(3))
def test_only_what_is_there_counts(fresh, seed):
    """A classifier answers as one that was taught only the examples that are left."""
    chance = random.Random(seed)
    classifier, held = fresh(), {}
    for step in range(40):
        if held and chance.random() < 0.4:
            id = chance.choice(sorted(held))
            assert classifier.forget(ids=[id]) == [id]
            del held[id]
        else:
            lesson = Lesson(f"new {chance.randrange(5)}", f"{step}", QUERIES[chance.randrange(20)])
            (id,) = classifier.learn([lesson])
            held[id] = lesson
    other = fresh()
    other.learn(list(held.values()))
    assert get_probabilities(classifier) == get_probabilities(other)


def set_rows(head: nn.Linear, keys: torch.Tensor, labels: torch.Tensor, trained: int = 6) -> None:
    """Set the rows of new labels from their examples, one label at a time."""
    means = [keys[:60][labels[:60] == label].mean(0) for label in range(trained)]
    middle = sum(mean / mean.norm() for mean in means) / trained
    weight, bias = head.weight[:trained].mean(0), head.bias[:trained].mean()
    for label in range(trained, len(head.weight)):
        mean = keys[labels == label].mean(0)
        head.weight[label] = weight + SCALE * (mean / mean.norm() - middle)
        head.bias[label] = bias + OFFSET


@without_learner
def test_answers_are_those_of_a_plain_model(fresh, has_rows):
    classifier = fresh()
    classifier.learn(lessons()[:12])  # no twins: a plain memory takes the newer one
    ids, keys = classifier.entries()
    names = list(classifier.labels)
    labels = {each.id: names.index(each.label) for each in classifier.examples()}
    saved = mbpa.checkpoint.load_checkpoint(classifier.journal.path.parent / "model")
    head = nn.Linear(DIM, 6)
    head.load_state_dict(saved.tensors["head"])
    numbers = torch.tensor([labels[id] for id in ids])
    head = grow(head, len(names)).requires_grad_(False)
    if has_rows:
        set_rows(head, keys, numbers)
    model = mbpa.MbPA(head=head, memory=mbpa.ExactMemory(len(ids), DIM), predictor=PREDICTOR)
    model.write(keys=keys, values=numbers)
    for answer, logs in zip(get_probabilities(classifier), model(keys=QUERIES), strict=True):
        ours = torch.tensor([dict(answer.top)[name] for name in names])
        torch.testing.assert_close(ours, logs.exp(), rtol=1e-4, atol=1e-5)


def test_the_same_request_teaches_once(fresh):
    classifier = fresh()
    ids = classifier.learn(lessons(), request="one")
    before = get_probabilities(classifier)
    assert classifier.learn(lessons(), request="one") == ids
    assert get_probabilities(classifier) == before
    classifier.forget(ids=ids[:1])
    assert classifier.learn(lessons(), request="one") == ids
    assert len(classifier) == 60 + len(ids) - 1


def test_a_request_is_known_by_its_texts_not_by_the_last_bits_of_their_keys(tmp_path):
    write_word_run(tmp_path / "run")
    encoder = UnsteadyEncoder()
    lessons = [Lesson("drink", "green tea"), Lesson("drink", "black tea")]
    assert not torch.equal(encoder(["green tea"]), encoder(["green tea"]))
    with Classifier.load(tmp_path / "run", text_encoder=encoder) as classifier:
        ids = classifier.learn(lessons, request="one")
        assert classifier.learn(lessons, request="one") == ids
        assert classifier.labels["drink"] == 2
        with pytest.raises(InputError, match="was used for other examples"):
            classifier.learn([lessons[0], Lesson("drink", "red tea")], request="one")


@pytest.mark.parametrize("limit", ["examples", "labels"])
def test_a_request_sent_again_needs_no_room(fresh, limit):
    lesson = Lesson("new", key=QUERIES[0])
    with fresh() as classifier:
        directory = classifier.journal.path.parent
        ids = classifier.learn([lesson], request="one")
        here = {"examples": len(classifier), "labels": len(classifier.labels)}[limit]
    with Classifier.load(directory, limits=Limits(**{limit: here})) as full:
        with pytest.raises(InputError, match=f"a run can hold at most {here} {limit}"):
            full.learn([Lesson("newer", key=QUERIES[0])])
        assert full.learn([lesson], request="one") == ids
        full.forget(label="new")
    with Classifier.load(directory, limits=Limits(**{limit: here - 1})) as full:
        assert full.learn([lesson], request="one") == ids, "even where it was forgotten since"


def test_a_trained_row_comes_back_with_an_example_that_it_was_trained_with(fresh):
    """No other example brings it back: nothing else is known of such a label."""
    classifier = fresh()
    before, stats = get_probabilities(classifier), classifier.stats()
    (first, *others) = [each.id for each in classifier.examples("label 002")]
    ids, keys = classifier.entries()
    lesson = Lesson("label 002", "text 2", keys[ids.index(first)])
    (back,) = classifier.learn([lesson])
    classifier.forget(ids=[first])
    assert get_probabilities(classifier) == before
    assert not classifier.was_trained_with(back)
    kept = [Lesson("label 002", None, keys[ids.index(id)]) for id in others]
    classifier.forget(ids=others)
    assert "label 002" not in classifier.trained_labels
    (*again,) = classifier.learn(kept, restoring=True)
    assert all(map(classifier.was_trained_with, again))
    assert get_probabilities(classifier) == before
    classifier.forget(ids=[back])
    classifier.learn([lesson], restoring=True)
    assert classifier.stats() == stats | {"change": classifier.counts.change}
    classifier.close()
    with Classifier.load(classifier.journal.path.parent) as started:
        assert get_probabilities(started) == before
        assert started.stats() == classifier.stats()
        started.forget(ids=again)
        started.forget(label="label 002")
        assert "label 002" not in started.labels


def test_a_trained_label_goes_with_the_last_example_it_was_trained_with(fresh):
    classifier = fresh()
    classifier.learn([Lesson("label 002", key=QUERIES[0])])
    ids = [each.id for each in classifier.examples("label 002")]
    classifier.forget(ids=ids[:-1])
    assert classifier.labels["label 002"] == 1
    assert "label 002" not in classifier.trained_labels
    assert list(classifier.labels)[-1] == "label 002", "it stands among the new ones"
    classifier.forget(ids=ids[-1:])
    assert all("label 002" not in dict(answer.top) for answer in get_probabilities(classifier))


def head_alone(classifier: Classifier) -> list[dict[str, float]]:
    """Return the head's output for each query, by label."""
    return [dict(reason.before) for reason in classifier.explain(keys=QUERIES, top=1000)]


@without_learner
def test_a_trained_label_keeps_its_row_and_a_new_one_follows_its_examples(fresh, has_rows):
    classifier = fresh()
    before = head_alone(classifier)
    classifier.learn([Lesson("label 002", key=key) for key in QUERIES[:5]])
    assert head_alone(classifier) == before
    classifier.learn([Lesson("new", key=QUERIES[0])])
    once = head_alone(classifier)
    (second,) = classifier.learn([Lesson("new", key=QUERIES[1])])
    assert (head_alone(classifier) != once) == has_rows
    assert (once[0]["new"] > max(before[0].values()) / 2) == has_rows
    classifier.forget([second])
    assert head_alone(classifier) == once


def test_a_label_without_its_trained_examples_has_the_row_of_a_new_one(fresh):
    """The same examples give the same row under either name."""
    first, second = fresh(), fresh()
    lessons = [Lesson("label 002", key=key) for key in QUERIES[:3]]
    first.learn(lessons)
    for classifier in (first, second):
        classifier.forget(ids=[each.id for each in classifier.examples("label 002")][:10])
    second.learn([Lesson("label 00x", key=each.key) for each in lessons])
    renamed = [
        {name.replace("x", "2"): p for name, p in said.items()} for said in head_alone(second)
    ]
    assert head_alone(first) == renamed


@without_learner
def test_learning_and_forgetting_compute_the_rows_of_the_labels_concerned(
    fresh, has_rows, monkeypatch
):
    classifier, computed = fresh(), []
    classifier.learn([Lesson(f"new {i}", key=QUERIES[i]) for i in range(8)])
    weights = NewRows.weights

    def count_and_compute(self, sums):
        computed.append(len(sums))
        return weights(self, sums)

    monkeypatch.setattr(NewRows, "weights", count_and_compute)
    ids = classifier.learn([Lesson("new 3", key=QUERIES[9]), Lesson("label 001", key=QUERIES[9])])
    assert computed == [1] * has_rows
    classifier.forget(ids[:1])
    classifier.learn([Lesson("newer", key=QUERIES[9])])
    classifier.forget(label="newer")
    classifier.forget(ids[1:])
    assert computed == [1] * 3 * has_rows
    monkeypatch.setattr(ExactMemory, "entries", lambda memory: 1 / 0)  # nor is all of it looked at
    classifier.forget(classifier.learn([Lesson("new 3", key=QUERIES[9])]))


def test_rows_are_the_same_whatever_keys_came_and_went():
    """Floating-point sums would differ, since keys differ by orders of magnitude."""
    generator = torch.Generator().manual_seed(0)
    sizes = 10 ** torch.empty(300, DIM).uniform_(-12, 0, generator=generator)
    keys = random_keys(300, DIM, seed=5) * sizes
    middle = random_keys(1, DIM)[0]
    made = NewRows(middle, 2 * middle, torch.tensor(0.1), SCALE, OFFSET)
    plain, other = LabelRows(made), LabelRows(made)
    plain.add(["a"] * 200, keys[:200])
    order = torch.randperm(300, generator=generator).tolist()
    for place in order:
        other.add(["a"], keys[place : place + 1])
        other.weight("a")
    for place in order:
        if place >= 200:
            other.remove(["a"], keys[place : place + 1])
    assert torch.equal(plain.weight("a"), other.weight("a"))
    mean = keys[:200].double().mean(0)
    exact = 2 * middle + SCALE * (mean / mean.norm() - middle)
    torch.testing.assert_close(plain.weight("a"), exact.float())
    other.remove(["a"] * 200, keys[:200])
    assert torch.equal(other.weight("a"), LabelRows(made).weight("a"))


def test_keys_of_a_run_with_rows_or_a_learner_have_norm_one(fresh, kind):
    classifier = fresh()
    long = [Lesson("new", key=2 * QUERIES[0])]
    if kind == "zeros":
        assert len(classifier.learn(long)) == 1
        return
    with pytest.raises(InputError, match="must have norm 1, as the run's own have, got 2"):
        classifier.learn(long)


def test_where_nothing_is_left_it_abstains(fresh):
    classifier = fresh()
    for label in list(classifier.labels):
        classifier.forget(label=label)
    answer = classifier.predict(keys=QUERIES[:1])[0]
    assert (answer.label, answer.confidence, answer.top) == (None, 0.0, ())
    assert classifier.explain(keys=QUERIES[:1])[0].neighbors == ()
    classifier.learn([Lesson("first", key=QUERIES[0])])
    assert classifier.predict(keys=QUERIES[:1])[0].label == "first"


def test_it_abstains_below_the_threshold(fresh):
    classifier = fresh()
    for answer in classifier.predict(keys=QUERIES, threshold=0.5):
        assert answer.abstains == (answer.confidence < 0.5)
        assert answer.label == (None if answer.abstains else answer.top[0][0])
    assert not any(answer.abstains for answer in classifier.predict(keys=QUERIES, threshold=0.0))
    assert any(answer.abstains for answer in classifier.predict(keys=QUERIES, threshold=1.0))


def test_an_explanation_names_the_examples_behind_an_answer(fresh, kind):
    classifier = fresh()
    (id,) = classifier.learn([Lesson("new", "a text", QUERIES[0])])
    reason = classifier.explain(keys=QUERIES[:1], top=7)[0]
    assert dict(reason.answer.top) == pytest.approx(
        dict(get_probabilities(classifier)[0].top), rel=1e-4
    )
    nearest = reason.neighbors[0]
    assert (nearest.id, nearest.label, nearest.text) == (id, "new", "a text")
    assert nearest.distance == pytest.approx(0, abs=1e-3)
    assert sum(near.weight for near in reason.neighbors) == pytest.approx(1, rel=1e-5)
    assert (reason.change > 0) == (kind != "learner")
    assert sum(share for _, share in reason.before) == pytest.approx(1, rel=1e-5)
    assert dict(reason.before).get("new", 0.0) < dict(reason.answer.top)["new"]
    assert ("new" in dict(reason.before)) == (kind != "learner")


@pytest.mark.parametrize(
    ("lesson", "why"),
    [
        (Lesson(" ", key=QUERIES[0]), "label must not be empty"),
        (Lesson("x" * 201, key=QUERIES[0]), "at most 200 characters"),
        (Lesson("a\nb", key=QUERIES[0]), "control characters, got U\\+000A"),
        (Lesson("x", "\ud800", QUERIES[0]), "control characters, got U\\+D800"),
        (Lesson("x", "", QUERIES[0]), "text must not be empty"),
        (Lesson("x", key=QUERIES[0][:3]), "must have 16 numbers"),
        (Lesson("x", key=QUERIES[0] * torch.nan), "finite"),
        (Lesson("x"), "neither text nor key"),
        (Lesson("x", "text"), "takes embeddings only: it was made without an encoder"),
    ],
)
def test_an_impossible_lesson_changes_nothing(fresh, lesson, why):
    classifier = fresh()
    before = get_probabilities(classifier)
    with pytest.raises(ValueError, match=why):
        classifier.learn([Lesson("good", key=QUERIES[0]), lesson])
    assert get_probabilities(classifier) == before
    assert "good" not in classifier.journal.labels()


def test_too_many_new_labels_at_once_are_refused(fresh):
    classifier = fresh()
    with pytest.raises(ValueError, match="100 new labels, got 101"):
        classifier.learn([Lesson(f"l{i}", key=QUERIES[0]) for i in range(101)])
    assert len(classifier) == 60


def test_texts_are_embedded_once_and_their_keys_kept(tmp_path):
    encoder = WordEncoder()
    write_word_run(tmp_path / "run")
    with Classifier.load(tmp_path / "run", text_encoder=encoder) as classifier:
        classifier.learn([Lesson("drink", "green tea"), Lesson("drink", "black tea with milk")])
        assert classifier.predict(["some tea"])[0].label == "drink"
        kept = [each.key for each in classifier.journal.examples()]
    assert kept[4] == encoder(["green tea"])[0].numpy().tobytes()
    with Classifier.load(tmp_path / "run", text_encoder=encoder) as classifier:
        assert classifier.predict(["some tea"])[0].label == "drink"


# Pictures


@pytest.fixture
def album(tmp_path):
    pytest.importorskip("PIL")
    write_picture_run(tmp_path / "album")
    with Classifier.load(tmp_path / "album", image_encoder=BrightnessEncoder()) as classifier:
        yield classifier


def test_an_image_encoder_of_ones_own_takes_the_place_of_the_runs(album):
    directory = album.journal.path.parent
    assert album.takes == "images"
    (id,) = album.learn([Lesson("wide", image=plain_picture("grey", width=80))])
    asked = [plain_picture("gray", width=60, height=10), plain_picture("black")]
    assert [each.label for each in album.predict(asked)] == ["wide", "dark"]
    album.close()
    with Classifier.load(directory, image_encoder=BrightnessEncoder()) as again:
        assert again.image(id) == plain_picture("grey", width=80)

    class Other(BrightnessEncoder):
        name = "other"

    with pytest.raises(
        RunError, match="made with the encoder brightness, whose files have changed"
    ):
        Classifier.load(directory, image_encoder=Other())


def save_picture(picture, kind: str, **options) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def photographs() -> list[tuple[str, bytes]]:
    """Files from elsewhere, and the error of each."""
    from PIL import Image, PngImagePlugin

    small, large = Image.new("RGB", (300, 200), "red"), Image.new("RGB", (513, 20), "red")
    icon = Image.new("RGB", (30, 20), "red")
    camera = Image.Exif()
    camera[0x0110] = "a camera"
    before, after = PngImagePlugin.PngInfo(), PngImagePlugin.PngInfo()
    before.add_text("Author", "somebody")
    after.add(b"tEXt", b"Author\0somebody", after_idat=True)
    size, beside = "got one of 513 × 20 pixels", "metadata or other data beside the pixels"
    unread, damaged = "got no readable PNG or JPEG file", "got a file that is damaged"
    plain = save_picture(small, "JPEG")
    return [
        (size, save_picture(large, "JPEG")),
        (size, save_picture(large, "PNG")),
        (beside, save_picture(small, "JPEG", exif=camera)),
        (beside, save_picture(icon, "PNG", exif=camera)),
        (beside, save_picture(icon, "PNG", pnginfo=before)),
        (beside, save_picture(icon, "PNG", pnginfo=after)),
        (beside, save_picture(small, "JPEG", comment=b"holiday")),
        (beside, plain[:2] + b"\xff\xe5\x00\x08secret" + plain[2:]),  # a segment of anybody's
        (unread, save_picture(small, "GIF")),
        (unread, b"no picture"),
        (damaged, save_picture(icon, "PNG")[:-20]),
    ]


def test_only_pictures_as_they_are_kept_are_learnt(album):
    """Otherwise the location of a photograph might end up on disk."""
    from mbpa.encoders.pictures import standardize

    for why, file in photographs():
        for key in (None, album.encode([plain_picture("red")])[0]):
            with pytest.raises(
                InputError,
                match=rf"the form that mbpa\.encoders\.pictures\.standardize returns, .*{why}",
            ):
                album.learn([Lesson("red", key=key, image=file)])
    assert len(album.journal) == 4
    for _, file in photographs()[:-2]:
        album.learn([Lesson("red", image=standardize(file))])
    assert album.labels["red"] == 9


def test_a_lesson_is_of_a_text_or_of_a_picture(album, tmp_path):
    both = Lesson("x", "a text", image=plain_picture("red"))
    write_word_run(tmp_path / "words")
    with Classifier.load(tmp_path / "words", text_encoder=WordEncoder()) as words:
        for classifier in (album, words):
            with pytest.raises(InputError, match="an example of 'x' has both text and image"):
                classifier.learn([both])
            assert len(classifier) == len(classifier.journal) == 4


def test_a_start_reads_no_pictures_that_it_has_keys_of(album):
    without_key = plain_picture("green")
    directory = album.journal.path.parent
    album.close()
    with Journal(directory / "journal.sqlite") as journal:
        journal.learn([("green", without_key, None)])
    read = []

    class WatchedJournal(Journal):
        def examples(self, *given, **options):
            found = list(super().examples(*given, **options))
            read.extend(each.image for each in found)
            return iter(found)

    info, journal = RunInfo.read(directory), WatchedJournal(directory / "journal.sqlite")
    model = read_model(directory, info, "cpu")
    with Classifier(info, model, journal, BrightnessEncoder()) as again:
        assert read == [None] * 4 + [without_key]
        assert again.labels["green"] == 1
        assert again.image(1) == plain_picture("black")


def test_readers_see_a_lesson_whole_or_not_at_all(fresh):
    """Answers while it is taught are those of some number of lessons, which never falls."""
    steps, teacher, oracle = 12, fresh(), fresh()
    pair = [Lesson("new", key=QUERIES[0]), Lesson("new", key=QUERIES[1])]

    def share(classifier: Classifier) -> float:
        return dict(classifier.predict(keys=QUERIES[:1], top=1000)[0].top).get("new", 0.0)

    possible = [share(oracle)]
    for _ in range(steps):
        oracle.learn(pair)
        possible.append(share(oracle))
    seen: list[list[float]] = [[], []]
    done = threading.Event()

    def read(into: list[float]) -> None:
        while not done.is_set():
            into.append(share(teacher))

    readers = [threading.Thread(target=read, args=(into,)) for into in seen]
    for reader in readers:
        reader.start()
    for step in range(steps):
        teacher.learn(pair)
        assert share(teacher) == possible[step + 1]
    done.set()
    for reader in readers:
        reader.join()
    for shares in seen:
        lessons_seen = [possible.index(share) for share in shares]
        assert lessons_seen == sorted(lessons_seen)


@pytest.mark.heavy
def test_counts_are_those_of_whole_calls(fresh):
    """Readers see the state before or after a call, never within one."""
    classifier, done, seen = fresh(), threading.Event(), set()
    many = [Lesson(f"new {i}", key=QUERIES[i % 20]) for i in range(60)]

    def look() -> None:
        while not done.is_set():
            stats = classifier.stats()
            names = ("examples", "taught", "labels", "new_labels", "change")
            seen.add(tuple(stats[name] for name in names))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    reader = threading.Thread(target=look)
    reader.start()
    expected = {(60, 0, 6, 0, 1)}
    try:
        for turn in range(12):
            ids = classifier.learn(many)
            expected.add((120, 60, 66, 60, 2 * turn + 2))
            classifier.forget(ids)
            expected.add((60, 0, 6, 0, 2 * turn + 3))
    finally:
        done.set()
        reader.join()
        sys.setswitchinterval(interval)
    assert len(seen) > 2
    assert seen <= expected


@pytest.mark.parametrize("copies", [1, SPARE_NEIGHBORS, 5 * SPARE_NEIGHBORS])
def test_equally_near_entries_come_in_an_order_of_their_content(copies):
    """However many there are: which of them are among the nearest must not depend on their age."""
    keys = torch.cat([QUERIES[:1].expand(copies, -1), QUERIES[1:]])
    values = torch.cat([torch.arange(copies) % 3, torch.arange(19)])
    found = []
    for seed in range(4):
        order = torch.randperm(len(keys), generator=torch.Generator().manual_seed(seed))
        memory = mbpa.ExactMemory(200, DIM)
        memory.write(random_keys(30, DIM, seed=9), torch.zeros(30, dtype=torch.int64))
        memory.write(keys[order], values[order])
        memory.delete(range(30))
        read = OrderIndependentReader(memory).read(QUERIES[:3], 5)
        found.append((read.values, read.distances, read.dots, read.keys))
    for other in found[1:]:
        for one, another in zip(found[0], other, strict=True):
            assert torch.equal(one, another)
    exact = ((QUERIES[:3, None] - keys) ** 2).sum(-1).sort(1).values[:, :5]
    torch.testing.assert_close(found[0][1], exact)


def test_an_order_independent_read_counts_labels_as_they_were_written():
    keys = random_keys(6, DIM, seed=1)
    memory = mbpa.ExactMemory(10, DIM)
    memory.write(keys, [2, 2, 2, 0, 0, 1])
    reader = OrderIndependentReader(memory)
    reader.columns = torch.tensor([7, 7, 4])  # two labels share a column
    found = reader.read(QUERIES[:3], 6, with_label_counts=True)
    expected = {0: 3, 1: 3, 2: 3, 3: 2, 4: 2, 5: 1}
    assert found.label_counts.tolist() == [
        [expected[id] for id in row] for row in found.ids.tolist()
    ]


def test_a_directory_that_is_no_run_is_refused(tmp_path, untaught):
    with pytest.raises(
        RunError, match=r"is not a run \(it has no run\.json\): create one with `mbpa teach`"
    ):
        Classifier.load(tmp_path)
    damaged = tmp_path / "damaged"
    shutil.copytree(untaught, damaged)
    Path(damaged / "run.json").write_text("{")
    with pytest.raises(RunError, match=r"run\.json is damaged"):
        Classifier.load(damaged)
    shutil.rmtree(damaged)
    shutil.copytree(untaught, damaged)
    shutil.rmtree(damaged / "model")
    with pytest.raises(RunError, match=r"the model in .* cannot be used"):
        Classifier.load(damaged)


def test_keys_of_another_size_are_refused_and_the_journal_is_let_go(untaught, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(untaught, run)
    with Journal(run / "journal.sqlite") as journal:
        (id,) = journal.learn([("x", None, b"\0" * 4)])
    for _ in range(2):  # were it still open, the second would say so
        with pytest.raises(RunError, match=f"that of example {id} has 1 numbers"):
            Classifier.load(run)


def test_what_the_memory_could_not_take_is_not_acknowledged_again_before_a_start(
    fresh, kind, monkeypatch
):
    classifier = fresh()
    lesson = [Lesson("new", key=QUERIES[0])]
    place = TaughtClassifier if kind == "learner" else mbpa.ExactMemory
    name = "add" if kind == "learner" else "write"
    write = getattr(place, name)

    def once(*given, **options):
        monkeypatch.setattr(place, name, write)
        raise MemoryError("no room")

    monkeypatch.setattr(place, name, once)
    with pytest.raises(MemoryError):
        classifier.learn(lesson, request="a")
    before = get_probabilities(classifier)
    for again in ("a", "b", None):
        with pytest.raises(JournalError, match="the memory was not updated after a write: restart"):
            classifier.learn(lesson, request=again)
    with pytest.raises(JournalError):
        classifier.forget(label="new")
    assert get_probabilities(classifier) == before
    directory = classifier.journal.path.parent
    classifier.close()
    with Classifier.load(directory) as restarted:
        assert restarted.counts.labels["new"] == 1
        (id,) = restarted.learn(lesson, request="a")
        assert [each.id for each in restarted.journal.examples() if each.label == "new"] == [id]


def test_room_is_made_before_anything_is_promised(fresh, monkeypatch):
    classifier = fresh()
    for model in (AdaptedModel, TaughtModel):
        monkeypatch.setattr(model, "make_room", lambda model, examples: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        classifier.learn([Lesson("new", key=QUERIES[0])])
    monkeypatch.undo()
    assert "new" not in classifier.journal.labels()
    assert classifier.journal.read_only is None
