"""Runs that are trained again with what they were taught, also while they are served."""

from __future__ import annotations

import itertools
import random
import signal
import threading
import time
from pathlib import Path

import pytest
from forks import Fork
from runs import WordEncoder, random_keys, write_random_run
from servers import Server, open_client, post, running

from mbpa import cli
from mbpa.serve import retraining, teaching
from mbpa.serve.answers import Lesson
from mbpa.serve.app import create_app
from mbpa.serve.backup import restore
from mbpa.serve.classifier import Classifier
from mbpa.serve.journal import ExampleFilter, InputError
from mbpa.serve.labelled_texts import LabelledTexts
from mbpa.serve.run_info import RunInfo

DIM = 16
QUERIES = random_keys(20, DIM, seed=3)
NEW = random_keys(30, DIM, seed=4)


@pytest.fixture
def run(tmp_path) -> Path:
    """A run of keys to which a label was taught."""
    write_random_run(tmp_path / "run", has_rows=True)
    with Classifier.load(tmp_path / "run") as classifier:
        classifier.learn([Lesson("new", f"new {i}", NEW[i]) for i in range(6)])
    return tmp_path / "run"


def models(run: Path) -> list[str]:
    return sorted(each.name for each in run.iterdir() if each.is_dir())


@pytest.mark.heavy
def test_a_retrained_run_answers_as_one_that_was_made_from_everything(tmp_path):
    draw, encoder = random.Random(0), WordEncoder()
    words = {label: [f"{label}{i}" for i in range(6)] for label in "abcdef"}
    drawn = [(label, draw.sample(own, 3)) for label, own in words.items() for _ in range(9)]
    pairs = list(dict.fromkeys((" ".join(chosen), label) for label, chosen in drawn))
    draw.shuffle(pairs)
    first = [each for each in pairs if each[1] != "f"]
    later = [each for each in pairs if each[1] == "f"]

    def make(some: list[tuple[str, str]], out: Path) -> None:
        texts, labels = zip(*some, strict=True)
        data = LabelledTexts(texts, labels, len(some), 0)
        teaching.write_new_run(teaching.teach(data, encoder), data, out)

    make(first, tmp_path / "run")
    make([*first, *later], tmp_path / "whole")
    queries = [" ".join(draw.sample(own, 2)) for own in words.values() for _ in range(4)]
    with Classifier.load(tmp_path / "run", text_encoder=encoder) as classifier:
        ids = classifier.learn([Lesson(label, text) for text, label in later], by="ana")
        assert "f" not in classifier.trained_labels
        info = retraining.retrain(classifier, tmp_path / "run")
        with Classifier.load(tmp_path / "whole", text_encoder=encoder) as whole:
            expected = whole.predict(queries)
            assert classifier.threshold == whole.threshold
        assert classifier.predict(queries) == expected
        assert "f" in classifier.trained_labels
        assert classifier.stats()["taught"] == 0
        listed = classifier.list_examples(ExampleFilter(label="f"), limit=99)
        assert [(each.id, each.by) for each in listed] == [(id, "ana") for id in ids]
        classifier.learn([Lesson("g", "g1 g2")])
        assert classifier.stats()["taught"] == 1
        before = classifier.predict(queries)
    assert models(tmp_path / "run") == [info.model]
    with Classifier.load(tmp_path / "run", text_encoder=encoder) as classifier:
        assert classifier.predict(queries) == before


@pytest.mark.heavy
def test_what_is_taught_forgotten_and_renamed_while_it_trains_is_kept(run):
    with Classifier.load(run) as classifier:
        snapshot = classifier.take_snapshot()
        info = retraining.train(run, classifier.info, snapshot)
        classifier.forget(label="label 001")
        classifier.learn([Lesson("later", "text", NEW[20])])
        labels = set(classifier.labels)
        retraining.change_over(classifier, run, info)
        assert set(classifier.labels) == labels
        assert classifier.stats()["taught"] == 1
        assert {"later", "label 001"}.isdisjoint(classifier.trained_labels)
        after = classifier.predict(keys=QUERIES, top=9)
        classifier.rename("new", "renamed")
        snapshot = classifier.take_snapshot()
        info = retraining.train(run, classifier.info, snapshot)
        classifier.rename("renamed", "again")
        with pytest.raises(InputError, match="renamed meanwhile: train again"):
            retraining.change_over(classifier, run, info)
        classifier.rename("again", "new")
        assert classifier.predict(keys=QUERIES, top=9) == after
    with Classifier.load(run) as classifier:
        assert classifier.predict(keys=QUERIES, top=9) == after
        assert len(models(run)) == 1, "the model that was not used is removed"


@pytest.mark.heavy
def test_a_run_that_gets_a_learner_takes_keys_of_norm_one_from_then_on(tmp_path):
    write_random_run(tmp_path / "run", learns=False)
    long = [Lesson("long", "text", 2 * NEW[0])]
    with Classifier.load(tmp_path / "run") as classifier:
        snapshot = classifier.take_snapshot()
        info = retraining.train(tmp_path / "run", classifier.info, snapshot)
        ids = classifier.learn(long)
        with pytest.raises(InputError, match="must have norm 1"):
            retraining.change_over(classifier, tmp_path / "run", info)
        classifier.forget(ids)
        retraining.change_over(classifier, tmp_path / "run", info)
        with pytest.raises(InputError, match="must have norm 1"):
            classifier.learn(long)
        with pytest.raises(InputError, match="must have norm 1"):
            classifier.predict(keys=2 * QUERIES)
        answers = classifier.predict(keys=QUERIES)
        assert len(classifier.learn([Lesson("new", "text", NEW[0])])) == 1
    with Classifier.load(tmp_path / "run") as classifier:
        classifier.forget(label="new")
        assert classifier.predict(keys=QUERIES) == answers


@pytest.mark.heavy
def test_what_cannot_be_trained_is_said_in_a_line(run, capsys):
    with Classifier.load(run) as classifier:
        for label in list(classifier.labels)[1:]:
            classifier.forget(label=label)
    before = RunInfo.read(run)
    assert cli.main(["retrain", str(run), "--no-progress"]) == 2
    assert capsys.readouterr().err == "mbpa: at least two labels are needed to train\n"
    with Classifier.load(run) as classifier, running(create_app(classifier)) as url:
        answer = post(f"{url}/retrain")
        assert (answer.status_code, answer.json()["error"]) == (
            422,
            "training failed: at least two labels are needed to train",
        )
        assert cli.main(["retrain", str(run)]) == 2
        assert "give the URL of the service" in capsys.readouterr().err
    assert RunInfo.read(run) == before


@pytest.mark.heavy
def test_a_service_changes_over_and_every_answer_is_of_one_of_the_two(run, tmp_path, capsys):
    with Classifier.load(run) as classifier, running(create_app(classifier)) as url:
        asked = {"embeddings": [QUERIES[0].tolist()], "top": 9}
        before = post(f"{url}/predict", json=asked).json()
        seen: list[dict] = []
        failures: list[str] = []
        stopping = threading.Event()

        def ask() -> None:
            with open_client(url) as client:
                while not stopping.is_set():
                    answer = client.post("/predict", json=asked)
                    if answer.status_code != 200:
                        failures.append(answer.text)
                    seen.append(answer.json())
                    time.sleep(0.05)  # leave the processor to the training

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        training = threading.Thread(target=lambda: cli.main(["retrain", url]))
        training.start()
        time.sleep(1.0)
        assert post(f"{url}/retrain").json() == {
            "error": "it is being trained already: wait until that is done"
        }
        training.join()
        after = post(f"{url}/predict", json=asked).json()
        time.sleep(0.3)
        stopping.set()
        for thread in threads:
            thread.join()
        assert not failures
        heads = [tell_head(each, before, after) for each in seen]
        assert set(heads) == {0, 1}
        changes = sum(one != other for one, other in itertools.pairwise(heads))
        assert changes <= 2 * len(threads), "once the new head answers, the old one does not"
        assert "trained with 66 examples of 7 labels" in capsys.readouterr().out
        assert cli.main(["backup", url, "--out", str(tmp_path / "run.tar")]) == 0
    restore(tmp_path / "run.tar", tmp_path / "restored")
    with Classifier.load(run) as one, Classifier.load(tmp_path / "restored") as other:
        assert one.predict(keys=QUERIES, top=9) == other.predict(keys=QUERIES, top=9)
        assert "new" in other.trained_labels


def tell_head(answered: dict, *known: dict) -> int:
    """Return which of the known answers this is; other batches round the last bits differently."""
    (answer,) = answered["answers"]
    matching = []
    for place, other in enumerate(known):
        (expected,) = other["answers"]
        pairs = zip(answer["top"], expected["top"], strict=True)
        differences = [abs(own["probability"] - its["probability"]) for own, its in pairs]
        names = [each["label"] for each in answer["top"]]
        is_same = names == [each["label"] for each in expected["top"]] and max(differences) < 1e-5
        matching += [place] * (is_same and answer["label"] == expected["label"])
    (found,) = matching  # of exactly one
    return found


RETRAINING = """
import sys
from pathlib import Path
from mbpa.serve import retraining
from mbpa.serve.classifier import Classifier
run = Path(sys.argv[1])
with Classifier.load(run) as classifier:
    info = retraining.train(run, classifier.info, classifier.take_snapshot())
    print("trained", flush=True)
    while True:
        model = info.model
        retraining.change_over(classifier, run, info)
        info = retraining.train(run, classifier.info, classifier.take_snapshot())
        print("again", flush=True)
"""


@pytest.mark.heavy
@pytest.mark.parametrize("rounds", [3, pytest.param(12, marks=pytest.mark.slow)])
def test_a_kill_while_training_or_changing_over_leaves_a_run_that_serves(run, rounds):
    draw = random.Random(0)
    with Classifier.load(run) as classifier:
        before = classifier.predict(keys=QUERIES, top=9)
    answers = [before]
    for round in range(rounds):
        process = Fork(run, script=RETRAINING)
        process.stdout.readline()
        if round:
            time.sleep(draw.random() * 0.3)
        process.send_signal(signal.SIGKILL)
        process.stdout.close()
        process.wait()
        assert cli.main(["check", str(run)]) == 0
        with Classifier.load(run) as classifier:
            found = classifier.predict(keys=QUERIES, top=9)
            assert len(classifier) == 66
        if found not in answers:
            answers.append(found)
        assert len(models(run)) == 1
    assert len(answers) <= 2, "training with the same examples gives the same head"


@pytest.mark.heavy
def test_a_killed_service_leaves_a_run_that_serves(run):
    with Server(run) as server:
        before = server.client.post("/predict", json={"embeddings": QUERIES.tolist()}).json()
        threading.Thread(target=_retrain, args=(server.url,), daemon=True).start()
        time.sleep(2.0)
        example = {"label": "late", "embedding": NEW[9].tolist(), "text": "t"}
        server.client.post("/learn", json={"examples": [example]}).raise_for_status()
        server.kill()
    with Server(run) as server:
        labels = {each["label"] for each in server.client.get("/labels").json()["labels"]}
        assert "late" in labels
        server.client.post("/forget", json={"label": "late"}).raise_for_status()
        asked = server.client.post("/predict", json={"embeddings": QUERIES.tolist()})
        assert asked.raise_for_status().json() == before
        assert server.stop() == 0


def _retrain(url: str) -> None:
    try:
        post(f"{url}/retrain")
    except Exception as error:
        print(f"as expected: {error}")
