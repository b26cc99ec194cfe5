"""Labels that are renamed and merged: exact, durable, and over HTTP and on the command line."""

from __future__ import annotations

import random
import re
import shutil
import signal
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import Fork
from runs import WordEncoder, random_keys, write_random_run, write_word_run
from servers import get, open_client, post, running

import mbpa
from mbpa import cli
from mbpa.serve.answers import Lesson
from mbpa.serve.app import create_app
from mbpa.serve.audit import AuditEntry, apply_renames
from mbpa.serve.classifier import Classifier
from mbpa.serve.journal import InputError, Journal
from mbpa.serve.run_info import RunInfo, read_model, write_run

ROOT = Path(mbpa.__file__).parents[1]
QUERIES = random_keys(40, 16, seed=5)
NAMES = [f"label {i:03}" for i in (0, 1, 2)] + ["aardvark", "m", "zebra", "label 0005"]


@dataclass
class Expected:
    """What a run should hold, by the rules of the documentation."""

    info: RunInfo
    rows: list[str]
    """Name of each row of the head; a row that nothing can use has the name of none."""
    trained: dict[int, tuple[str, torch.Tensor]] = field(default_factory=dict)
    taught: dict[int, tuple[str, torch.Tensor]] = field(default_factory=dict)

    @property
    def labels(self) -> set[str]:
        return {label for label, _ in [*self.trained.values(), *self.taught.values()]}

    def has_row(self, label: str) -> bool:
        return label in {name for name, _ in self.trained.values()} and label in self.rows

    def change(self, label: str, new: str, ids: list[int]) -> None:
        """Rename or merge; `ids` are those that the classifier returned."""
        moved = [id for id, (own, _) in self.trained.items() if own == label]
        if self.has_row(new):
            keys = [self.trained.pop(id)[1] for id in sorted(moved)]
            fresh = sorted(set(ids) - set(self.taught))
            self.taught |= {id: (new, key) for id, key in zip(fresh, keys, strict=True)}
            self.rows = [f"gone {i}" if n == label else n for i, n in enumerate(self.rows)]
        else:
            for id in moved:
                self.trained[id] = (new, self.trained[id][1])
            if label in self.rows:
                self.rows = [f"gone {i}" if n == new else n for i, n in enumerate(self.rows)]
                self.rows[self.rows.index(label)] = new
        for id, (own, key) in self.taught.items():
            if own == label:
                self.taught[id] = (new, key)

    def write(self, run: Path, directory: Path, draw: random.Random) -> None:
        """Write a run that has had these names from the start, taught in any order."""
        model = read_model(run, self.info, "cpu")
        info = replace(self.info, labels=tuple(self.rows), trained_examples=len(self.trained))
        named = [(label, "text") for label, _ in self.trained.values()]
        keys = torch.stack([key for _, key in self.trained.values()])
        write_run(directory, info, model.head, model.method, named, keys, model.rows)
        lessons = [Lesson(label, "text", key) for label, key in self.taught.values()]
        draw.shuffle(lessons)
        with Classifier.load(directory) as classifier:
            for lesson in lessons:
                classifier.learn([lesson])


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(12))
def test_answers_are_those_of_a_run_that_had_the_names_from_the_start(tmp_path, seed):
    draw, run = random.Random(seed), tmp_path / "run"
    kinds: list[dict[str, Any]] = [
        {"labels": 3, "examples": 12},
        {"labels": 3, "examples": 12, "has_rows": True},
        {"labels": 6, "examples": 24, "learns": True},
    ]
    lessons = write_random_run(run, **kinds[seed % 3])
    info = RunInfo.read(run)
    expected = Expected(info, list(info.labels))
    expected.trained = {i: (each.label, each.key) for i, each in enumerate(lessons, 1)}
    classifier = Classifier.load(run)
    for step in range(30):
        kind, held = draw.random(), {**expected.trained, **expected.taught}
        if kind < 0.4:
            given = [Lesson(draw.choice(NAMES), "text", key) for key in random_keys(2, 16, step)]
            ids = classifier.learn(given)
            expected.taught |= {i: (e.label, e.key) for i, e in zip(ids, given, strict=True)}
        elif kind < 0.6 and len(expected.trained) > 1:
            ids = draw.sample(sorted(held), min(len(held), draw.choice([1, 1, 4])))
            ids = [id for id in ids if id not in expected.trained or len(expected.trained) > 5]
            classifier.forget(ids)
            for id in ids:
                expected.trained.pop(id, None)
                expected.taught.pop(id, None)
        else:
            label, new = draw.choice(sorted(expected.labels)), draw.choice(NAMES)
            if label == new:
                continue
            act = classifier.merge if new in expected.labels else classifier.rename
            expected.change(label, new, act(label, new))
        assert classifier.stats()["taught"] == len(expected.taught)
        if step % 6 == 5:
            require_equal(classifier, expected, run, tmp_path / f"fresh {step}", draw)
        if draw.random() < 0.1:
            classifier.close()
            classifier = Classifier.load(run)
    classifier.close()
    with Classifier.load(run) as classifier:
        require_equal(classifier, expected, run, tmp_path / "fresh", draw)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("size", "norm"), [(384, 1.0096), pytest.param(2118, 1.0, marks=pytest.mark.slow)]
)
def test_keys_whose_norm_rounding_moves_can_be_renamed(tmp_path, size, norm):
    write_random_run(tmp_path / "run", key_dim=size)
    with Classifier.load(tmp_path / "run") as classifier:
        key = torch.full((size,), norm * size**-0.5)
        ids = classifier.learn([Lesson("x", "text", key)])
        assert classifier.rename("x", "y") == ids
        renamed = classifier.predict(keys=key[None], top=9)
        assert renamed[0].label == "y"
    with Classifier.load(tmp_path / "run") as classifier:
        assert classifier.predict(keys=key[None], top=9) == renamed


def test_an_example_restored_under_a_new_label_counts_as_after_a_restart(tmp_path):
    write_random_run(tmp_path / "run", examples=12)
    with Classifier.load(tmp_path / "run") as classifier:
        ids, found = classifier.entries()
        key = dict(zip(ids, found, strict=True))[1]
        classifier.forget([1])
        classifier.learn([Lesson("x", "text", key)], restoring=True)
        classifier.forget(classifier.merge("label 001", "x")[:-1])
        before = classifier.predict(keys=QUERIES, top=99), classifier.trained_labels
    with Classifier.load(tmp_path / "run") as classifier:
        assert (classifier.predict(keys=QUERIES, top=99), classifier.trained_labels) == before


def require_equal(
    classifier: Classifier, expected: Expected, run: Path, place: Path, draw: random.Random
) -> None:
    """Compare a classifier with one that has had the names from the start."""
    expected.write(run, place, draw)
    with Classifier.load(place) as fresh:
        assert classifier.labels == fresh.labels
        assert classifier.trained_labels == fresh.trained_labels
        assert classifier.predict(keys=QUERIES, top=9) == fresh.predict(keys=QUERIES, top=9)
        assert classifier.stats()["taught"] == fresh.stats()["taught"]


def test_a_renamed_trained_label_keeps_its_answers_and_ids(tmp_path):
    write_random_run(tmp_path / "run", has_rows=True)
    with Classifier.load(tmp_path / "run") as classifier:
        before = classifier.predict(keys=QUERIES, top=6)
        ids = [each.id for each in classifier.examples("label 002")]
        assert classifier.rename(" label 002", "a new name ") == ids
        new = {"label 002": "a new name"}
        for answer, earlier in zip(classifier.predict(keys=QUERIES, top=6), before, strict=True):
            assert answer.confidence == earlier.confidence
            assert answer.top == tuple((new.get(each, each), p) for each, p in earlier.top)
        classifier.forget(label="a new name")
        classifier.learn([Lesson("label 002", "text", QUERIES[0])])  # a label of its own
        assert "label 002" not in classifier.trained_labels


def test_a_row_that_was_left_behind_is_not_used_again():
    def entry(action: str, label: str, new: str) -> AuditEntry:
        return AuditEntry(1, 0, None, action, 1, 1, label, new)

    changes = [entry("merge", "a", "b"), entry("rename", "b", "c"), entry("rename", "x", "b")]
    assert apply_renames(("a", "b", "d"), changes) == ("\n0", "c", "d")
    assert apply_renames(("a", "b"), [entry("rename", "a", "b")]) == ("b", "\n1")
    swapped = [entry("rename", "a", "t"), entry("rename", "b", "a"), entry("rename", "t", "b")]
    assert apply_renames(("a", "b"), swapped) == ("b", "a")


def test_what_cannot_be_renamed_changes_nothing(tmp_path):
    write_random_run(tmp_path / "run")
    with Classifier.load(tmp_path / "run") as classifier:
        for act, label, new, why in (
            (classifier.rename, "none", "other", "there is no label 'none'"),
            (classifier.rename, "label 000", "label 001", "already a label 'label 001': merge"),
            (classifier.rename, "label 000", " ", "a label must not be empty"),
            (classifier.merge, "label 000", "other", "there is no label 'other': rename"),
            (classifier.merge, "none", "label 000", "there is no label 'none'"),
            (classifier.merge, "label 000", "label 000", "already called 'label 000'"),
        ):
            with pytest.raises(InputError, match=why):
                act(label, new)
        assert classifier.journal.change == 1
        assert classifier.journal.read_only is None


# The journal


def test_requests_restored_examples_and_teachers_survive_a_rename(tmp_path):
    two = [("a", "one", None), ("a", "two", None)]
    with Journal(tmp_path / "j") as journal:
        journal.learn(two, request="r", by="ana")
        journal.learn([("b", "three", None)])
        journal.learn([("a", "four", None)], restoring=True)
        assert journal.rename("a", "b", by="bob") == {1: 1, 2: 2, 4: 4}
        assert journal.rename("none", "b") == {}
    for _ in range(2):
        with Journal(tmp_path / "j") as journal:
            assert journal.labels() == {"b": 4}
            assert journal.restored_ids == {4}
            assert journal.learn(two, request="r") == [1, 2]
            entry = journal.audit(limit=1)[0]
            assert (entry.action, entry.by, entry.label, entry.new_label, entry.count) == (
                *("rename", "bob", "a", "b", 3),
            )
    with Journal(tmp_path / "j") as journal:
        assert journal.rename("b", "c", last_trained=1) == {1: 5, 2: 2, 3: 3, 4: 4}
        assert journal.restored_ids == frozenset()
        texts = [(each.id, each.text) for each in journal.examples()]
        assert texts == [(2, "two"), (3, "three"), (4, "four"), (5, "one")]
        assert journal.learn([("d", "five", None)]) == [6]


def test_the_bytes_of_what_is_forgotten_are_in_no_file_after_renames(tmp_path):
    draw, kept = random.Random(0), dict[int, bytes]()
    path = tmp_path / "j"

    def read_all() -> bytes:
        return b"".join(each.read_bytes() for each in tmp_path.glob("j*"))

    with Journal(path, waste_bytes=1 << 14) as journal:
        for _ in range(60):
            marks = [f"<{draw.getrandbits(60)}>" for _ in range(draw.randint(1, 20))]
            padding = "x" * draw.choice([0, 30, 900, 6000])
            rows = [(draw.choice("abc"), mark + padding, None) for mark in marks]
            ids = journal.learn(rows)
            kept |= dict(zip(ids, (mark.encode() for mark in marks), strict=True))
            if draw.random() < 0.5:
                last = draw.choice([None, draw.choice(sorted(kept))])
                name = draw.choice(["b", "a name that is a good deal longer " * 4])
                moved = journal.rename(draw.choice("abc"), name, last_trained=last)
                kept = {moved.get(id, id): mark for id, mark in kept.items()}
            gone = journal.forget(draw.sample(sorted(kept), draw.randint(0, len(kept) // 2)))
            kept = {id: mark for id, mark in kept.items() if id not in gone}
            assert set(re.findall(rb"<\d+>", read_all())) == set(kept.values())
    with Journal(path) as journal:
        assert len(journal) == len(kept)


RENAMING = """
import sys
from pathlib import Path
from mbpa.serve.journal import Journal
with Journal(Path(sys.argv[1])) as journal:
    names = ["one", "a longer name of a label"] * 10_000
    label = next(iter(journal.labels()))
    for new in names[names.index(label) + 1:]:
        journal.rename(label, new)
        label = new
        print(journal.change, flush=True)
"""


def test_a_kill_leaves_the_old_name_or_the_new_one(tmp_path):
    path, draw = tmp_path / "j", random.Random(0)
    with Journal(path) as journal:
        journal.learn([("one", f"text {i}" * 50, None) for i in range(200)])
    done = 0
    for _ in range(8):
        process = Fork(path, script=RENAMING)
        wanted = draw.randint(1, 20)
        said = [int(process.stdout.readline()) for _ in range(wanted)]
        process.send_signal(signal.SIGKILL)
        said += [int(line) for line in process.stdout if line.endswith("\n")]
        process.stdout.close()
        process.wait()
        with Journal(path) as journal:
            assert list(journal.labels().values()) == [200]
            assert journal.change in (said[-1], said[-1] + 1)
            done = journal.change
    assert done > 40


# Over HTTP, and on the command line


def test_labels_are_renamed_and_merged_over_http(tmp_path):
    write_word_run(tmp_path / "run")
    with (
        Classifier.load(tmp_path / "run", text_encoder=WordEncoder()) as classifier,
        running(create_app(classifier)) as url,
        open_client(url) as client,
    ):
        robin = {"label": "bird", "text": "a robin"}
        client.post("/learn", json={"examples": [robin]}).raise_for_status()

        def labels() -> dict[str, tuple[int, bool]]:
            found = client.get("/labels").json()["labels"]
            return {each["label"]: (each["examples"], each["trained"]) for each in found}

        answer = client.post("/labels/rename", json={"label": "bird", "to": " birds "})
        assert answer.raise_for_status().json() == {"examples": 1}
        assert labels() == {"fruit": (2, True), "tool": (2, True), "birds": (1, False)}
        answer = client.post("/predict", json={"texts": ["a robin"]})
        assert answer.json()["answers"][0]["label"] == "birds"
        client.post("/labels/merge", json={"label": "tool", "into": "birds"}).raise_for_status()
        assert labels() == {"fruit": (2, True), "birds": (3, True)}
        client.post("/labels/merge", json={"label": "birds", "into": "fruit"}).raise_for_status()
        assert labels() == {"fruit": (5, True)}
        assert client.get("/stats").json()["taught"] == 3
        actions = [each["action"] for each in client.get("/audit").json()["changes"]]
        assert actions == ["merge", "rename", "rename", "learn", "learn"]
        for path, body, why in (
            ("rename", {"label": "fruit", "to": "a\0b"}, "control characters"),
            ("rename", {"label": "none", "to": "b"}, "there is no label 'none'"),
            ("merge", {"label": "fruit", "to": "b"}, "unknown field"),
            ("merge", {"label": "fruit", "into": "b"}, "there is no label 'b': rename"),
        ):
            answer = client.post(f"/labels/{path}", json=body)
            assert answer.status_code == 422
            assert why in answer.json()["error"]
        assert get(f"{url}/labels/rename").status_code == 405
        assert post(f"{url}/labels/rename").status_code == 422


def test_the_commands_rename_and_merge_in_a_run_or_a_service(tmp_path, capsys):
    run = tmp_path / "run"
    write_word_run(run)
    assert cli.main(["rename", str(run), "fruit", "food"]) == 0
    assert capsys.readouterr().out == "2 examples have the label 'food'\n"
    assert cli.main(["merge", str(run), "fruit", "tool"]) == 2
    assert "mbpa: there is no label 'fruit'\n" in capsys.readouterr().err
    assert cli.main(["rename", str(run), "food", ""]) == 2
    assert "must not be empty" in capsys.readouterr().err
    served = Path(shutil.copytree(run, tmp_path / "served"))
    assert cli.main(["merge", str(run), "food", "tool"]) == 0
    with (
        Classifier.load(served, text_encoder=WordEncoder()) as classifier,
        running(create_app(classifier)) as url,
    ):
        assert cli.main(["merge", str(served), "food", "tool"]) == 2
        assert "give the URL of the service" in capsys.readouterr().err
        assert cli.main(["merge", url, "food", "tool"]) == 0
        assert capsys.readouterr().out == "2 examples moved to the label 'tool'\n"
        assert classifier.labels == {"tool": 4}
    for each in (run, served):
        with Classifier.load(each, text_encoder=WordEncoder()) as classifier:
            assert classifier.labels == {"tool": 4}
        assert cli.main(["audit", str(each), "--limit", "1"]) == 0
        assert "'food' to 'tool', 2 examples" in capsys.readouterr().out
