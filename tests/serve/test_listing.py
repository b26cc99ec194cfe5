"""What a run holds and who taught it: `GET /examples`, the audit trail, and `mbpa export`."""

from __future__ import annotations

import csv
import json
import random
import re
import shutil
from pathlib import Path

import pytest
from runs import (
    BrightnessEncoder,
    WordEncoder,
    plain_picture,
    write_picture_run,
    write_random_run,
    write_word_run,
)
from servers import get, open_client, post, running

from mbpa import cli
from mbpa.errors import RunError
from mbpa.serve import teaching
from mbpa.serve.answers import Lesson
from mbpa.serve.app import create_app
from mbpa.serve.classifier import Classifier
from mbpa.serve.export import RunSource, export_examples
from mbpa.serve.journal import ExampleFilter, InputError, Journal
from mbpa.serve.labelled_images import read_labelled_images
from mbpa.serve.labelled_texts import LabelledTexts, read_labelled_texts
from mbpa.serve.settings import Settings, read_tokens

UNAUDITED = Path(__file__).parents[1] / "files" / "unaudited-run"
QUERIES = ["a robin", "saw and plum", "apples", "sings a hammer", "nothing known"]


class Clock:
    """A clock that tests set, in seconds."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def run(tmp_path) -> Path:
    write_word_run(tmp_path / "run")
    return tmp_path / "run"


def load(run: Path) -> Classifier:
    return Classifier.load(run, text_encoder=WordEncoder())


def list_ids(journal: Journal, **options) -> list[int]:
    wanted = ExampleFilter(
        **{name: options.pop(name) for name in list(options) if name in vars(ExampleFilter())}
    )
    return [each.id for each in journal.list_examples(wanted, **({"limit": 100} | options))]


# The journal


def test_an_example_says_who_taught_it_and_when(tmp_path):
    clock = Clock()
    with Journal(tmp_path / "j", clock=clock) as journal:
        journal.learn([("a", "one", None), ("b", "two", None)], by="ana")
        clock.now = 2_000.5
        journal.learn([("a", "three", None)], restoring=True)
    for _ in range(2):
        with Journal(tmp_path / "j") as journal:
            found = journal.list_examples(ExampleFilter(), limit=9)
            assert [(each.text, each.taught_ms, each.by) for each in found] == [
                ("one", 1_000_000, "ana"),
                ("two", 1_000_000, "ana"),
                ("three", 2_000_500, None),
            ]
            assert [each.is_trained for each in found] == [False, False, True]


def test_the_audit_trail_has_an_entry_per_change_newest_first(tmp_path):
    clock = Clock()
    with Journal(tmp_path / "j", clock=clock) as journal:
        journal.learn([("a", "one", None), ("b", "two", None)], by="ana", request="r")
        journal.learn([("a", "one", None), ("b", "two", None)], by="bob", request="r")  # again
        clock.now += 1
        journal.forget(label="b", by="bob")
        journal.forget([2], by="bob")  # it is gone
    with Journal(tmp_path / "j") as journal:
        found = [
            (e.change, e.time_ms, e.by, e.action, e.first, e.count) for e in journal.audit(limit=9)
        ]
        assert found == [
            (2, 1_001_000, "bob", "forget", 2, 1),
            (1, 1_000_000, "ana", "learn", 1, 2),
        ]
        assert [each.change for each in journal.audit(limit=1)] == [2]
        assert [each.change for each in journal.audit(limit=1, before=2)] == [1]


def test_filters_are_combined_and_pages_join(tmp_path):
    """Against a list of tuples as the model."""
    draw, clock, model = random.Random(0), Clock(), []
    with Journal(tmp_path / "j", clock=clock) as journal:
        for call in range(40):
            clock.now += draw.choice([0, 1, -3, 10])  # clocks are set back at times
            labels = draw.choices("ab", k=draw.randint(1, 4))
            ids = journal.learn([(each, f"{call}", None) for each in labels])
            model += [
                (id, each, int(clock.now * 1000)) for id, each in zip(ids, labels, strict=True)
            ]
            if call % 3 == 0:
                gone = journal.forget([draw.choice(model)[0]])
                model = [each for each in model if each[0] not in gone]
        for label in (None, "a"):
            for since_ms in (None, *(draw.choice(model)[2] for _ in range(3)), 10**9):
                for is_trained in (None, False, True):
                    expected = [
                        id
                        for id, own, time_ms in model
                        if label in (None, own)
                        and (since_ms is None or time_ms >= since_ms)
                        and is_trained in (None, id <= 9)
                    ]
                    options = {"label": label, "since_ms": since_ms, "is_trained": is_trained}
                    for newest_first in (False, True):
                        pages, after = [], None
                        options |= {"last_trained": 9, "newest_first": newest_first, "limit": 7}
                        while page := list_ids(journal, **options, after=after):
                            pages, after = pages + page, page[-1]
                        assert pages == (expected[::-1] if newest_first else expected)
        journal.forget(label="a")  # the log can still be emptied
    assert not (tmp_path / "j-wal").exists()


def test_only_the_newest_changes_are_kept_and_those_of_examples_that_are_left(tmp_path):
    with Journal(tmp_path / "j", audited_changes=20) as journal:
        journal.learn([("a", "kept", None)], by="ana")
        for call in range(100):
            journal.forget(journal.learn([("b", str(call), None)], by="bob"))
            entries = journal.audit(limit=1000)
            assert [each.change for each in entries[:20]] == list(
                range(journal.change, max(0, journal.change - 20), -1)
            )
            assert len(entries) <= 24
            assert entries[-1].by == "ana"
        assert [each.by for each in journal.list_examples(ExampleFilter(), limit=9)] == ["ana"]
        for call in range(60):
            journal.learn([("c", str(call), None)], by=f"{call}")
    with Journal(tmp_path / "j", audited_changes=20) as journal:
        found = journal.list_examples(ExampleFilter(label="c"), limit=100)
        assert [(each.text, each.by) for each in found] == [(str(c), str(c)) for c in range(60)]


def test_a_run_from_before_the_audit_trail_answers_as_it_did(tmp_path):
    """With a remembered request, a forgotten example and a restored one."""
    expected = json.loads(UNAUDITED.with_suffix(".json").read_text())
    run = Path(shutil.copytree(UNAUDITED, tmp_path / "run"))
    for _ in range(2):  # it is upgraded, then opened again
        with load(run) as classifier:
            found = classifier.list_examples(ExampleFilter(), limit=99)
            assert [[e.id, e.label, e.text] for e in found] == expected["examples"]
            assert [e.id for e in found if not e.is_trained] == expected["taught"]
            assert {(e.taught_ms, e.by) for e in found} == {(None, None)}
            assert classifier.journal.change == expected["change"]
            assert classifier.journal.audit(limit=9) == []
            answers = [[each.label, each.confidence] for each in classifier.predict(QUERIES)]
            assert answers == [[label, pytest.approx(p)] for label, p in expected["answers"]]
    with load(run) as classifier:
        birds = [Lesson("bird", "a red robin"), Lesson("bird", "a robin sings")]
        assert classifier.learn(birds, request="birds") == [5, 6]
        with pytest.raises(InputError, match="other examples"):
            classifier.learn(birds[:1], request="birds")
        (id,) = classifier.learn(birds[:1])
        (listed,) = classifier.list_examples(ExampleFilter(since_ms=1), limit=9)
        assert listed.id == id


def test_counters_that_were_altered_before_an_upgrade_are_noticed(tmp_path):
    run = Path(shutil.copytree(UNAUDITED, tmp_path / "run"))
    content = (run / "journal.sqlite").read_bytes()
    assert content.count(b"a ripe plum") == 1
    (run / "journal.sqlite").write_bytes(content.replace(b"a ripe plum", b"a ripe plug"))
    with pytest.raises(Exception, match="example 2 was altered"):
        load(run)


# Over HTTP


def test_examples_are_listed_by_page_and_filtered(run):
    with (
        load(run) as classifier,
        running(create_app(classifier)) as url,
        open_client(url) as client,
    ):
        examples = [{"label": " bird ", "text": f"robin {i}"} for i in range(5)]
        ids = client.post("/learn", json={"examples": examples}).raise_for_status().json()["ids"]

        def fetch(**query) -> dict:
            return client.get("/examples", params=query).raise_for_status().json()

        everything = fetch()
        assert [each["id"] for each in everything["examples"]] == [1, 2, 3, 4, *ids]
        assert everything["cursor"] is None
        first = everything["examples"][0]
        assert (first["label"], first["text"], first["origin"]) == (
            *("fruit", "apples and pears", "trained"),
        )
        assert [each["id"] for each in fetch(origin="taught")["examples"]] == ids
        assert [each["id"] for each in fetch(label="tool")["examples"]] == [3, 4]
        assert fetch(label="none")["examples"] == []
        when = everything["examples"][-1]["taught_at"]
        assert first["taught_at"] < when
        assert [each["id"] for each in fetch(since=when)["examples"]] == ids
        page = fetch(order="newest", limit=2)
        assert [each["id"] for each in page["examples"]] == ids[:-3:-1]
        client.post("/forget", json={"ids": [page["cursor"]]}).raise_for_status()
        page = fetch(order="newest", limit=4, cursor=page["cursor"])
        assert [each["id"] for each in page["examples"]] == [*ids[2::-1], 4]
        assert [each["id"] for each in fetch(limit=8)["examples"]] == [1, 2, 3, 4, *ids[:3], ids[4]]
        for query, why in (
            ("limit=0", "limit: Input should be greater than or equal to 1"),
            ("since=yesterday", "since: "),
            ("since=2026-01-01T00:00:00", "since: Input should have timezone info"),
            ("origin=stolen", "origin: Input should be 'trained' or 'taught'"),
            ("lable=bird", "lable: unknown field; did you mean label"),
            ("label=%00", "must not contain control characters"),
            ("cursor=x", "cursor: Input should be a valid integer"),
        ):
            answer = client.get(f"/examples?{query}")
            assert answer.status_code == 422
            assert why in answer.json()["error"]
            assert "\n" not in answer.json()["error"]


# Who it was


def test_changes_are_recorded_with_the_name_of_the_token(run, tmp_path, capsys):
    settings = Settings(token="plain secret", tokens={"ana": "first secret", "bob": "other secret"})
    with load(run) as classifier, running(create_app(classifier, settings)) as url:

        def send(secret: str, path: str, body: dict) -> None:
            headers = {"Authorization": f"Bearer {secret}"}
            post(f"{url}{path}", json=body, headers=headers).raise_for_status()

        robin = {"label": "bird", "text": "a robin"}
        send("first secret", "/learn", {"examples": [robin, robin]})
        send("other secret", "/forget", {"ids": [5]})
        send("plain secret", "/learn", {"examples": [robin]})
        assert get(f"{url}/audit").status_code == 401
        wrong = {"Authorization": "Bearer ana"}  # the name is no token
        assert get(f"{url}/audit", headers=wrong).status_code == 401
        with open_client(url, headers={"Authorization": "Bearer other secret"}) as client:
            page = client.get("/audit", params={"limit": 3}).raise_for_status().json()
            known = [(e["by"], e["action"], e["first"], e["count"]) for e in page["changes"]]
            assert known == [
                ("token", "learn", 7, 1),
                ("bob", "forget", 5, 1),
                ("ana", "learn", 5, 2),
            ]
            rest = client.get("/audit", params={"cursor": page["cursor"]}).json()
            assert [(e["by"], e["count"]) for e in rest["changes"]] == [(None, 4)]
            assert rest["cursor"] is None
            birds = client.get("/examples", params={"label": "bird"}).json()["examples"]
            assert [each["by"] for each in birds] == ["ana", "token"]
        assert cli.main(["audit", url, "--token", "first secret", "--limit", "1"]) == 0
        assert re.fullmatch(r"\S+Z  token +learn +example 7\n", capsys.readouterr().out)
    assert cli.main(["audit", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1:3] for line in lines[1:]] == [
        *(["bob", "forget"], ["ana", "learn"], ["-", "learn"]),
    ]
    assert lines[2].endswith("2 examples from 5 on")
    assert cli.main(["audit", str(run), "--limit", "0"]) == 2
    stored = b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())
    assert b"ana" in stored
    assert b"secret" not in stored


def test_a_visitor_gives_the_name_of_the_token_or_any_name_for_the_one_without():
    settings = Settings(token="plain", tokens={"ana": "first", "bob": "other"})
    for user, password, name in (
        ("ana", "first", "ana"),
        ("ana", "other", None),
        ("bob", "plain", None),  # else anyone could act in the name of bob
        ("carl", "first", None),
        ("carl", "plain", "token"),
        ("token", "plain", "token"),
        ("", "", None),
    ):
        assert settings.find_visitor_name(user, password) == name
        if name is not None:
            assert settings.name_visitor(user) == name
    assert "first" not in repr(settings)


def test_a_file_of_tokens_is_read_and_errors_do_not_repeat_tokens(tmp_path, run, capsys):
    path = tmp_path / "tokens"
    path.write_text("# of the office\n\nana  s3cret\nbob\tother\n")
    assert read_tokens(path) == {"ana": "s3cret", "bob": "other"}
    for content, why in (
        ("ana s3cret more\n", "line 1: must be a name and a token"),
        ("ana s3cret\ns3cret\n", "line 2: must be a name and a token"),
        ("ana s3cret\nana other\n", "line 2: the name must be unique"),
        ("token s3cret\n", "line 1: the name must be unique, other than 'token'"),
        ("ana s3cret\nbob s3cret\n", "line 2: two names must not have the same token"),
        ("#\n", "has no tokens"),
    ):
        path.write_text(content)
        assert cli.main(["serve", str(run), "--tokens", str(path), "--port", "0"]) == 2
        printed = capsys.readouterr().err
        assert why in printed
        assert "s3cret" not in printed
    assert cli.main(["serve", str(run), "--tokens", str(tmp_path / "none")]) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err


# Export


def read_labelled_rows(path: Path) -> list[str]:
    with open(path, newline="", encoding="utf-8") as file:
        return [row["text"] for row in csv.DictReader(file)]


def export(run: Path, out: Path, **options) -> int:
    with RunSource(run) as source:
        return export_examples(source, out, **options)


def make_run(data, encoder, out: Path) -> None:
    teaching.write_new_run(teaching.teach(data, encoder), data, out)


def words(draw: random.Random, label: str, count: int) -> list[tuple[str, str]]:
    own = [f"{label}{i}" for i in range(6)]
    return [
        (" ".join([*draw.sample(own, 3), f"w{draw.randint(0, 9)}"]), label) for _ in range(count)
    ]


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["taught.csv", "taught.jsonl"])
def test_an_export_taught_again_answers_the_same(tmp_path, name):
    draw, encoder = random.Random(0), WordEncoder()
    pairs = list(dict.fromkeys(p for label in "abcdef" for p in words(draw, label, 12)))
    draw.shuffle(pairs)
    texts, labels = zip(*pairs, strict=True)
    data = LabelledTexts(texts, labels, len(pairs), 0)
    make_run(data, encoder, tmp_path / "run")
    queries = [text for label in "abcdefgh" for text, _ in words(draw, label, 6)]
    with load(tmp_path / "run") as classifier:
        taught = [*words(draw, "g", 3), *words(draw, "a", 2), *words(draw, "h", 4), pairs[0]]
        taught += [(' padded, "quoted"\r\nand\tlong ', "g"), taught[0]]  # and one twice
        for text, label in taught:
            classifier.learn([Lesson(label, text)])
        classifier.forget(label="h")
        before, held = classifier.predict(queries), classifier.labels
    out = tmp_path / name
    assert export(tmp_path / "run", out) == sum(held.values())
    again = read_labelled_texts(out)
    assert (again.texts, again.labels) == (texts, labels)
    assert len(again.lessons) == len(taught) - 4
    make_run(again, encoder, tmp_path / "copy")
    with load(tmp_path / "copy") as copy:
        assert copy.labels == held
        assert copy.predict(queries) == before
        assert copy.stats()["taught"] == len(again.lessons)


def test_taught_pictures_are_exported_to_a_folder_and_taught_again(tmp_path):
    pytest.importorskip("PIL")
    write_picture_run(tmp_path / "run")
    with Classifier.load(tmp_path / "run", image_encoder=BrightnessEncoder()) as classifier:
        classifier.learn([Lesson("grey", image=plain_picture("grey")) for _ in range(2)])
        held = classifier.labels
    assert export(tmp_path / "run", tmp_path / "taught.csv") == 6
    with open(tmp_path / "taught.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["image"] == "taught-pictures/1.png"
    data = read_labelled_images(tmp_path / "taught.csv")
    assert data.images[0] == plain_picture("black")
    make_run(data, BrightnessEncoder(), tmp_path / "copy")
    with Classifier.load(tmp_path / "copy", image_encoder=BrightnessEncoder()) as copy:
        assert copy.labels == held


def test_only_what_was_taught_is_exported_on_request_and_trained_with_if_alone(run, tmp_path):
    with load(run) as classifier:
        classifier.learn([Lesson("bird", "a robin"), Lesson("fish", "a cod")])
    out = tmp_path / "taught.csv"
    assert export(run, out, origin="taught") == 2
    data = read_labelled_texts(out)
    assert (data.texts, data.lessons) == (("a robin", "a cod"), ())
    assert export(run, out, label="fish") == 1


def test_the_command_exports_a_run_or_a_service(run, tmp_path, capsys):
    out = tmp_path / "taught.csv"
    assert cli.main(["export", str(run), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"wrote 4 examples to {out}\n"
    first = out.read_bytes()
    assert cli.main(["export", str(run), "--out", str(out)]) == 2
    assert "exists: use --again to replace it" in capsys.readouterr().err
    with load(run) as classifier, running(create_app(classifier)) as url:
        assert cli.main(["export", url, "--out", str(out), "--again"]) == 0
        assert out.read_bytes() == first
        classifier.learn([Lesson("bird", "a robin")])
        capsys.readouterr()
        out.unlink()
        assert cli.main(["export", str(run), "--out", str(out)]) == 2
        assert "give the URL of the service in place of the directory" in capsys.readouterr().err
        options = ["--out", str(out), "--origin", "taught"]
        assert cli.main(["export", url, *options]) == 0
        assert ",taught," in out.read_text("utf-8")
        assert read_labelled_rows(out) == ["a robin"]
    assert cli.main(["export", url, "--out", str(out), "--again"]) == 2
    assert f"{url} cannot be reached" in capsys.readouterr().err


def test_what_cannot_be_exported_is_said_in_a_line(run, tmp_path):
    with pytest.raises(RunError, match="no example matches"):
        export(run, tmp_path / "out.csv", label="none")
    assert not (tmp_path / "out.csv").exists()
    write_random_run(tmp_path / "keys")
    with pytest.raises(RunError, match="made without an encoder"):
        export(tmp_path / "keys", tmp_path / "out.csv")
    with pytest.raises(RunError, match="is not a run"):
        RunSource(tmp_path)
