"""The parts of the page on their own, and its HTTP interface."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import torch
from runs import PREDICTOR, WRONG_SENTENCE, WordEncoder, write_bank_run, write_random_run
from servers import open_client, running
from starlette.routing import Mount
from torch import nn
from visiting import collect_state, run_visits, visit_page

import mbpa
import mbpa.explorer
from benchmarks import mislabelled
from mbpa.explorer import actions, memory_map, rendering, review, taught_tab
from mbpa.explorer.actions import Actions
from mbpa.explorer.sessions import Session, Sessions
from mbpa.serve.answers import Answer, Lesson, NearExample, Reason
from mbpa.serve.app import create_app
from mbpa.serve.classifier import Classifier
from mbpa.serve.journal import Example, InputError
from mbpa.serve.settings import Settings

LUGGAGE = "suitcase is gone\n\nmy suitcase flew away\nsuitcase gone at the airport"


@pytest.fixture
def classifier(tmp_path: Path) -> Iterator[Classifier]:
    write_bank_run(tmp_path / "run")
    with Classifier.load(tmp_path / "run", text_encoder=WordEncoder()) as classifier:
        yield classifier


def test_taking_back_is_for_what_was_taught_and_what_is_still_there(classifier):
    untaught = collect_state(classifier)
    first, second = classifier.learn([Lesson("pin", "one"), Lesson("card", "two")])
    with pytest.raises(InputError, match="only what was taught"):
        run_visits(classifier, lambda actions: actions.take_back([1, first]))
    classifier.forget([second])
    done = run_visits(classifier, lambda actions: actions.take_back([first, second], by="ana"))
    assert done.description == "Took back 1 example of “pin”."
    assert collect_state(classifier) == untaught
    assert classifier.journal.audit(limit=1)[0].by == "ana"
    with pytest.raises(InputError, match="no longer exist"):
        run_visits(classifier, lambda actions: actions.take_back([first]))
    run_visits(classifier, lambda actions: actions.undo(done))
    assert classifier.examples("pin")[-1].text == "one"


def test_a_long_list_of_what_was_taught_is_shown_in_pages(classifier):
    ids = classifier.learn([Lesson("pin", f"pin {i}") for i in range(120)])

    async def visit(page: object) -> None:
        tab = taught_tab.TaughtTab.__new__(taught_tab.TaughtTab)
        tab._page, session = page, Session()
        for count, has_more in ((50, True), (100, True), (150, False)):
            listed, more, *_ = await tab.show_list(session, "all labels", "any time", count)
            assert [each.id for each in session.taught] == ids[::-1][:count]
            shown = re.findall(r'type="radio"[^>]*value="(\d+)"', listed)
            assert [int(id) for id in shown] == ids[::-1][:count]
            assert more.visible == has_more

    visit_page(classifier, visit)


@pytest.mark.slow
def test_the_command_asks_for_the_token_and_then_shows_the_page(tmp_path):
    write_random_run(tmp_path / "run")
    command = [sys.executable, "-m", "mbpa.cli", "explore", str(tmp_path / "run"), "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MBPA_TOKEN": "sesame"}
    started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    with started as process:
        try:
            lines = iter(process.stdout.readline, "")
            url = next(line for line in lines if "serving on" in line).split()[-1]
            assert url.endswith("/explore")
            with httpx.Client(follow_redirects=True, timeout=60) as client:
                _logs_in(client, url)
        finally:
            process.terminate()
    assert process.returncode == 0


def _logs_in(client: httpx.Client, url: str) -> None:
    assert client.get(url.replace("/explore", "/stats")).status_code == 401
    assert "random" not in client.get(url).text
    for path in ("config", "gradio_api/info"):
        assert client.get(f"{url}/{path}").status_code == 401
    assert client.post(f"{url}/gradio_api/queue/join", json={"data": []}).status_code == 401
    wrong = client.post(f"{url}/login", data={"username": "x", "password": "sesam"})
    assert wrong.status_code == 400
    right = client.post(f"{url}/login", data={"username": "x", "password": "sesame"})
    assert right.status_code == 200
    labels = {
        part["props"].get("label") for part in client.get(f"{url}/config").json()["components"]
    }
    assert {"Sentence", "Teach a label"} <= labels


def routes_of(app) -> Iterator[tuple[str, str]]:
    """Method and path of every route of an app, those of apps and routers within it included."""
    for route in app.routes:
        inner = getattr(route, "app", None)
        if isinstance(route, Mount):
            yield from ((method, route.path + path) for method, path in routes_of(inner))
        elif (router := getattr(route, "original_router", None)) is not None:
            yield from routes_of(router)
        else:
            yield from ((method, route.path) for method in route.methods or ())


OF_THE_LOGIN = {
    *(("GET", path) for path in ("/explore/", "/explore/theme.css")),
    *(("GET", f"/explore/{folder}/{{path:path}}") for folder in ("assets", "static")),
    *(("POST", path) for path in ("/explore/login", "/explore/login/")),
}


@pytest.mark.heavy
def test_without_a_login_nothing_of_the_page_is_answered_but_the_login(tmp_path):
    write_random_run(tmp_path / "run")
    with Classifier.load(tmp_path / "run") as classifier:
        app = asyncio.run(mount_page(classifier, token="sesame"))
        routes = {
            (method, path)
            for method, path in routes_of(app)
            if path.startswith("/explore") and method != "HEAD"
        }
        assert len(routes) > 60, "Gradio's own are among them"
        assert routes >= OF_THE_LOGIN
        with running(app) as url, open_client(url) as client:
            for method, path in sorted(routes - OF_THE_LOGIN):
                asked = re.sub(r"{[^}]*}", "x", path)
                with client.stream(method, asked) as answer:  # some never end
                    assert answer.status_code == 401, (method, asked)
            for path in ("/explore/made/up", "/explore/assets", "/explore/loginx"):
                assert client.get(path).status_code == 401
            assert client.get("/explore/gradio_api/app_id").status_code == 401
            assert "auth_required" in client.get("/explore/").text
            assert client.get("/explore/theme.css").status_code == 200
            right = {"username": "x", "password": "sesame"}
            assert client.post("/explore/login", data=right).status_code == 200
            assert client.get("/explore/gradio_api/app_id").status_code == 200
            with client.stream("GET", "/explore/gradio_api/heartbeat/x") as answer:
                assert next(answer.iter_text()).startswith("data: ALIVE")
            client.cookies.clear()
            assert client.get("/explore/gradio_api/app_id").status_code == 401


@pytest.mark.heavy
def test_the_page_has_so_many_requests_open_and_no_more(tmp_path):
    write_random_run(tmp_path / "run")
    with Classifier.load(tmp_path / "run") as classifier:
        app = asyncio.run(mount_page(classifier, page_requests=2))
        with running(app) as url, open_client(url) as client:
            beat = "/explore/gradio_api/heartbeat/x"
            with client.stream("GET", beat) as first, client.stream("GET", beat) as second:
                assert (first.status_code, second.status_code) == (200, 200)
                refused = client.get("/explore/theme.css")
                assert refused.status_code == 429
                assert refused.headers["retry-after"] == "1"
                assert client.get("/stats").status_code == 200, "the service itself is not full"
                assert "mbpa_page_requests 2.0" in client.get("/metrics").text
            give_up = time.monotonic() + 30
            while client.get("/explore/theme.css").status_code == 429:
                assert time.monotonic() < give_up
                time.sleep(0.05)


async def mount_page(classifier: Classifier, **settings):
    """An app with the page; within a loop, else Gradio makes loops and leaves them open."""
    from mbpa.explorer import page

    return page.mount(
        create_app(classifier, Settings(open_paths=(page.PATH,), **settings)), classifier
    )


def test_without_the_extra_its_name_is_reported(monkeypatch):
    """The extra that is named is the explorer's own, whichever package is missing."""
    for missing in ("gradio", "fastapi"):
        with monkeypatch.context() as patch:
            for name in list(sys.modules):
                if name.startswith(("mbpa.explorer", "mbpa.serve.app", missing)):
                    patch.delitem(sys.modules, name)
            patch.setitem(sys.modules, missing, None)
            patch.delattr(mbpa.explorer, "page", raising=False)
            patch.delattr(mbpa.explorer, "lessons", raising=False)
            with pytest.raises(mbpa.MissingExtraError, match=r"mbpa\[explore\]"):
                importlib.import_module("mbpa.explorer.page")


# What the desk does


@pytest.mark.heavy
def test_what_is_done_at_the_desk_can_be_undone(classifier):
    before = collect_state(classifier)
    (mislabelled,) = [each for each in classifier.examples() if each.text == WRONG_SENTENCE]
    changes = (
        lambda actions: actions.teach("luggage", LUGGAGE),
        lambda actions: actions.relabel(mislabelled.id, " card "),
        lambda actions: actions.forget(1),
    )
    for change in changes:
        done = run_visits(classifier, change)
        assert collect_state(classifier) != before
        run_visits(classifier, lambda actions, done=done: actions.undo(done))
        assert collect_state(classifier) == before
        (mislabelled,) = [each for each in classifier.examples() if each.text == WRONG_SENTENCE]


def test_undoing_brings_back_what_a_label_was_trained_to(classifier):
    """Each of its examples is forgotten and brought back, and then the last one once more."""
    asked = ["card late", "new pin", "euro loan"]
    before = classifier.predict(asked, top=10)

    async def visit(actions: Actions) -> None:
        for example in classifier.examples("pin"):
            await actions.undo(await actions.forget(example.id))
            assert classifier.predict(asked, top=10) == before
        ids = [each.id for each in classifier.examples("pin")]
        changes = [await actions.relabel(id, "loan") for id in ids]
        assert "pin" not in classifier.labels
        for change in reversed(changes):
            await actions.undo(change)
        assert classifier.predict(asked, top=10) == before
        assert "pin" in classifier.trained_labels

    run_visits(classifier, visit)


def test_renaming_and_merging_are_undone(classifier):
    asked = ["card late", "suitcase gone", "bag lost"]

    async def visit(actions: Actions) -> None:
        await actions.teach("luggage", LUGGAGE)
        await actions.teach("bag", "bag lost\nmy bag is late")
        before, answers = collect_state(classifier), classifier.predict(asked, top=10)
        for work, description in (
            (actions.rename("pin", " secret "), "Renamed “pin” to “secret”."),
            (actions.rename("luggage", "bags"), "Renamed “luggage” to “bags”."),
            (actions.merge("luggage", "bag"), "Merged 3 examples of “luggage” into “bag”."),
            (actions.merge("bag", "card"), "Merged 2 examples of “bag” into “card”."),
        ):
            change = await work
            assert change.description == description
            assert change.can_be_undone
            assert collect_state(classifier) != before
            await actions.undo(change)
            assert collect_state(classifier) == before
            assert classifier.predict(asked, top=10) == answers

    run_visits(classifier, visit)


def test_merging_a_trained_label_is_final(classifier):
    change = run_visits(classifier, lambda actions: actions.merge("pin", "card", by="ana"))
    assert not change.can_be_undone
    assert classifier.labels["card"] == 12
    assert classifier.journal.audit(limit=1)[0].by == "ana"
    session = Session(changes=[actions.Change("Earlier.")])
    session.record(change)
    assert session.changes == []


def test_what_was_taught_taken_back_and_brought_back_is_undone(classifier):
    """It is brought back under a new id, which the undoing of the lesson must know."""
    before, sessions = collect_state(classifier), Sessions(lambda name: name)
    session, other = (sessions.get_session(visitor(name)) for name in ("mine", "other"))

    async def visit(actions: Actions) -> None:
        session.record(await actions.teach("luggage", LUGGAGE))
        other.record(await actions.merge("luggage", "pin"))
        taken = await actions.take_back(session.changes[0].added[:2])
        sessions.renumber(await actions.undo(taken))
        sessions.renumber(await actions.undo(other.changes[0]))
        assert classifier.labels["luggage"] == 3
        await actions.undo(session.changes[0])

    run_visits(classifier, visit)
    assert collect_state(classifier) == before


def visitor(name: str) -> SimpleNamespace:
    """The request of a visitor, as far as sessions look at it."""
    return SimpleNamespace(session_hash=name, username=None)


def test_an_example_keeps_text_and_key_under_its_new_label(classifier):
    (mislabelled,) = [each for each in classifier.examples() if each.text == WRONG_SENTENCE]
    before = actions.get_lesson(classifier, mislabelled.id)
    done = run_visits(classifier, lambda actions: actions.relabel(mislabelled.id, "card"))
    after = actions.get_lesson(classifier, done.added[0])
    assert (after.label, after.text) == ("card", WRONG_SENTENCE)
    assert torch.equal(after.key, before.key)
    with pytest.raises(ValueError, match="no longer exists"):
        actions.get_lesson(classifier, mislabelled.id)


@pytest.mark.parametrize(
    ("visit", "why"),
    [
        (lambda actions: actions.teach(" ", "suitcase"), "a label must not be empty"),
        (lambda actions: actions.teach("luggage", " \n "), "at least one example"),
        (lambda actions: actions.teach("luggage", "\n".join(map(str, range(257)))), "at most 256"),
        (lambda actions: actions.relabel(1, "card"), "already has"),
        (lambda actions: actions.relabel(999, "card"), "no longer exists"),
        (lambda actions: actions.forget(999), "no longer exists"),
        (lambda actions: actions.rename("pin", "card"), "merge them instead"),
        (lambda actions: actions.rename("pin", " "), "a label must not be empty"),
        (lambda actions: actions.rename("nothing", "new"), "there is no label"),
        (lambda actions: actions.merge("pin", "new"), "rename 'pin' instead"),
        (lambda actions: actions.ask(" "), "must not be empty"),
    ],
)
def test_what_cannot_be_done_changes_nothing(classifier, visit, why):
    before = classifier.journal.change
    with pytest.raises(ValueError, match=why):
        run_visits(classifier, visit)
    assert classifier.journal.change == before


def test_a_run_without_an_encoder_has_a_map_and_reviews_and_says_what_it_cannot(tmp_path):
    write_random_run(tmp_path / "run")
    with Classifier.load(tmp_path / "run") as classifier:
        assert memory_map.MemoryMap(classifier).draw().count("h0") == 60
        assert len(review.collect_opinions(classifier)) == 60
        with pytest.raises(InputError, match="without an encoder"):
            run_visits(classifier, lambda actions: actions.ask("a sentence"))


# What examples say of each other


def slow_votes(examples, keys, k):
    """(label, share, own, lead) of each example, by the definition."""
    unit = keys / keys.norm(dim=1, keepdim=True)
    for place, example in enumerate(examples):
        near = sorted(
            (-float(unit[place] @ unit[other]), other)
            for other in range(len(examples))
            if other != place
        )[:k]
        weights = torch.tensor([-20 * score for score, _ in near]).softmax(0).tolist()
        shares = Counter()
        for weight, (_, other) in zip(weights, near, strict=True):
            shares[examples[other].label] += weight
        (label, first), (_, second) = [*shares.most_common(2), ("", 0.0)][:2]
        yield label, first, shares[example.label], first - second


@pytest.mark.parametrize("count", [5, 90])
def test_votes_are_those_of_the_nearest_others(count):
    keys = 3 * torch.randn(count, 8)
    examples = [Example(7 + i, "abc"[i % 3], None, None) for i in range(count)]
    found = review.compute_votes(examples, keys)
    assert [each.example for each in found] == examples
    for each, expected in zip(found, slow_votes(examples, keys, 50), strict=True):
        assert each.label == expected[0]
        given = (each.share, each.own, each.lead)
        assert given == pytest.approx(expected[1:], abs=1e-5)


def test_a_wrong_label_is_found_and_the_others_are_not_doubted(classifier):
    found = review.find_mislabelled(review.collect_opinions(classifier))
    assert found[0].example.text == WRONG_SENTENCE
    assert (found[0].example.label, found[0].label) == ("loan", "card")
    assert all(each.label != each.example.label for each in found)
    doubts = [each.share - each.own for each in found]
    assert doubts == sorted(doubts, reverse=True)


def test_three_examples_that_lie_together_are_not_outvoted():
    crowd, few = torch.randn(200, 16), torch.randn(16) + 0.2 * torch.randn(3, 16)
    examples = [Example(i + 1, "many", None, None) for i in range(200)]
    examples += [Example(i + 201, "new", None, None) for i in range(3)]
    found = review.compute_votes(examples, torch.cat([crowd, few]))
    assert [each.label for each in found[-3:]] == ["new"] * 3
    assert not {201, 202, 203} & {each.example.id for each in review.find_mislabelled(found)}


def test_the_least_certain_come_first_and_large_memories_are_asked_in_part():
    examples = [Example(i + 1, "ab"[i % 2], None, None) for i in range(40)]
    found = review.compute_votes(examples, torch.randn(40, 4), most=10)
    assert len(found) == 10
    leads = [each.lead for each in review.sort_by_uncertainty(found)]
    assert leads == sorted(leads)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_where_there_is_nothing_to_compare_nothing_is_in_doubt(count):
    examples = [Example(i + 1, "only", None, None) for i in range(count)]
    found = review.compute_votes(examples, torch.randn(count, 4))
    assert len(found) == (count if count > 1 else 0)
    assert review.find_mislabelled(found) == []


@pytest.mark.parametrize("plant", mislabelled.KINDS.values(), ids=list(mislabelled.KINDS))
def test_the_labels_that_the_benchmark_plants_are_wrong(plant):
    keys = nn.functional.normalize(torch.randn(200, 8), dim=1)
    labels, places = torch.arange(200) % 12, torch.randperm(200)[:50]
    given = plant(keys, labels, places, torch.Generator().manual_seed(0))
    assert (given != labels[places]).all()
    assert set(given.tolist()) <= set(range(12))
    if plant is mislabelled.of_a_near_one:
        for place, label in zip(places, given, strict=True):
            ranks = (keys @ keys[place])[labels != labels[place]].sort(descending=True).values
            assert (keys @ keys[place])[labels == label].max() >= ranks[
                mislabelled.NEAR_EXAMPLES - 1
            ]


def test_average_precision_is_the_mean_precision_at_what_is_found():
    hits = torch.tensor([True, False, True, True, False])
    assert mislabelled.average_precision(hits) == pytest.approx((1 / 1 + 2 / 3 + 3 / 4) / 3)


def test_an_opinion_that_came_to_nothing_is_settled_all_the_same():
    """The list may be rebuilt between a click and its effect."""
    from mbpa.explorer.sessions import Session

    first, second = (
        review.Opinion(Example(id, "a", None, None), "b", 0.6, 0.1, 0.5) for id in (1, 2)
    )
    session = Session(queues={"list": [second]})
    session.remove("list", first)
    assert session.queues["list"] == [second]
    session.remove("list", second)
    session.remove("another", second)
    assert session.queues["list"] == []


def test_what_stands_in_a_list_is_escaped(classifier):
    from mbpa.explorer.review_tab import ReviewTab
    from mbpa.explorer.sessions import Session

    found = [
        review.Opinion(Example(id, "a", text, None), "b", 0.6, 0.1, 0.5)
        for id, text in enumerate((EVIL, None, "x" * 5000))
    ]

    async def visit(page):
        with page.blocks:
            tab = ReviewTab(page, "list", review.sort_by_uncertainty)
        return await tab.show_list(Session(queues={"list": found}))

    listed, *_ = visit_page(classifier, visit)
    rows = ET.fromstring(listed).findall("label")
    shown = [row.find("div/div").text for row in rows]
    assert shown[:2] == [EVIL, "example 1"]
    assert len(shown[2]) == 601
    assert ["checked" in row.find("input").attrib for row in rows] == [True, False, False]


# Pictures

EVIL = '<script>alert("&")</script>'
STATS = {"examples": 1234, "labels": 5, "taught": 6, "read_only": None}


def a_reason(label: str = "b_c", text: str | None = "sentence") -> Reason:
    near = tuple(NearExample(i, label, text, weight=0.1 * i, distance=0.5) for i in range(1, 9))
    after = ((label, 0.7), ("a", 0.2), ("d", 0.1))
    before = (("a", 0.6), ("d", 0.3), ("e", 0.1))
    return Reason(Answer(label, 0.7, after), before, near, change=1.25)


def pictures_of(reason: Reason) -> list[str]:
    places = {near.id: (10.0 * near.id, 20.0) for near in reason.neighbors}
    labels = {near.id: near.label for near in reason.neighbors}
    example = Example(1, reason.neighbors[0].label, reason.neighbors[0].text, None)
    return [
        rendering.render_answer(reason, 0.5),
        rendering.render_memories(reason),
        memory_map.draw_map(places, labels, (5.0, 5.0), reason),
        rendering.render_opinion(review.Opinion(example, reason.answer.top[0][0], 0.6, 0.1, 0.5)),
        rendering.render_note(example.label),
        rendering.render_title({**STATS, "read_only": example.label}),
        rendering.render_message(example.label),
        rendering.render_label(example.label, 3, is_trained=False),
        rendering.render_rows(example.label, [list_row(example)], "1", "nothing"),
    ]


def list_row(example: Example, thumbs: Mapping[int, str] = rendering.NO_THUMBS) -> rendering.Row:
    shown = rendering.describe_example(example.id, example.text, thumbs, 600)
    return rendering.Row(str(example.id), (example.label,), shown)


def test_addresses_of_pictures_are_escaped():
    reason, thumbs = a_reason(), dict.fromkeys(range(9), f'"{EVIL}')
    places = {near.id: (10.0 * near.id, 20.0) for near in reason.neighbors}
    for picture in (
        rendering.render_answer(reason, 0.5, thumbs[0]),
        rendering.render_memories(reason, thumbs),
        memory_map.draw_map(places, {}, (5.0, 5.0), reason, thumbs),
        rendering.render_rows("list", [list_row(Example(1, "a", None, None), thumbs)], None, ""),
    ):
        ET.fromstring(picture)
        assert "<script" not in picture


@pytest.mark.parametrize("text", [EVIL, None, "x" * 5000])
def test_pictures_are_well_formed_whatever_is_written_in_them(text):
    for picture in pictures_of(a_reason(EVIL, text)):
        ET.fromstring(picture.replace("&nbsp;", ""))  # what is not escaped would not parse
        assert "<script" not in picture
        assert len(picture) < 20_000


def test_bars_show_before_and_after():
    assert rendering.list_bars(a_reason()) == [
        ("b_c", 0.0, 0.7),
        ("a", 0.6, 0.2),
        ("d", 0.3, 0.1),
        ("e", 0.1, 0.0),
    ]
    shown = rendering.render_answer(a_reason(), 0.5)
    assert "width: 70.0%" in shown
    assert "width: 60.0%" in shown
    assert "the same label" not in shown
    assert re.search(r"Without the examples below: <b>a</b>,\s+60% sure", shown)


def test_what_a_learner_answers_is_compared_with_training_alone():
    reason = a_reason()
    reason = dataclasses.replace(
        reason, answer=dataclasses.replace(reason.answer, in_scope=0.9), change=0.0
    )
    shown = rendering.render_answer(reason, 0.5)
    assert re.search(r"From training alone: <b>a</b>,\s+60% sure", shown)
    assert "90% likely to belong to one of the labels" in shown
    memories = rendering.render_memories(reason)
    assert "similar" in memories
    assert "influence" not in memories


def test_symbols_are_in_tooltips_only():
    shown = rendering.render_answer(a_reason(), 0.5)
    assert "by 1.25." in shown
    assert 'title="‖θˣ − θ‖' in shown
    text = "".join(ET.fromstring(shown).itertext())
    assert not re.search(r"[‖θ<>·…]", text)
    unmoved = dataclasses.replace(a_reason(), change=0.0)
    assert "adjusted" not in rendering.render_answer(unmoved, 0.5)


def test_colours_stand_for_the_place_of_a_label():
    reason = a_reason()
    colours = list(rendering.assign_colours(reason).values())
    assert colours == [
        rendering.FIRST_COLOUR,
        rendering.SECOND_COLOUR,
        rendering.OTHER_COLOUR,
        rendering.OTHER_COLOUR,
    ]
    other = dataclasses.replace(reason, answer=Answer("d", 0.9, (("d", 0.9), ("b_c", 0.1))))
    assert rendering.assign_colours(other)["d"] == rendering.FIRST_COLOUR
    drawn = memory_map.draw_map({1: (5.0, 5.0)}, {1: "b_c"}, (1.0, 1.0), reason)
    assert set(re.findall(r"background: ([^\"]+)", drawn)) == {
        "var(--body-text-color)",
        *colours,
    }


def test_similarity_is_the_cosine_of_keys():
    first, second = nn.functional.normalize(torch.randn(2, 8), dim=1)
    for other in (second, -second, first):
        cosine = float(first @ other)
        distance = float((first - other).norm())
        assert rendering.compute_similarity(distance) == pytest.approx(max(0, cosine), abs=1e-6)


@pytest.mark.parametrize(
    ("label", "parts"),
    [
        ("card_payment", ["card_", "payment"]),
        ("a/b.c-d:e", ["a/", "b.", "c-", "d:", "e"]),
        ("cardPayment Late", ["card", "Payment Late"]),
        ("one word", ["one word"]),
    ],
)
def test_lines_break_between_the_words_of_a_label(label, parts):
    assert rendering.allow_breaks(label).split("<wbr/>") == parts


def test_an_answer_that_abstains_says_so():
    reason = a_reason()
    unsure = Reason(Answer(None, 0.7, reason.answer.top), reason.before, reason.neighbors, 1.0)
    shown = " ".join(rendering.render_answer(unsure, 0.8).split())
    assert "Not sure" in shown
    assert "only 70% sure. It answers when it is at least 80% sure" in shown
    assert "Not sure" not in rendering.render_answer(reason, 0.5)


def test_the_weightiest_memories_are_shown_first():
    shown = rendering.render_memories(a_reason())
    weights = [int(each) for each in re.findall(r"influence (\d+)%", shown)]
    assert weights == [80, 70, 60, 50, 40, 30]
    assert "and 2 more" in shown


def test_percentages_say_nothing_that_is_not_so():
    shares = (0.0, 0.0001, 0.004, 0.0996, 0.5, 0.994, 0.9999, 1.0)
    shown = [rendering.format_percent(share) for share in shares]
    assert shown == [
        *("0%", "under 0.1%", "0.4%", "10%", "50%", "99%", "over 99%", "100%"),
    ]


def test_the_map_shows_the_principal_components():
    keys = torch.randn(60, 7) * torch.tensor([1.0, 5.0, 1.0, 2.0, 0.1, 0.1, 0.1])
    places = memory_map.Plane.fit(keys)(keys)
    centred = (keys - keys.mean(0)).double()
    expected = centred @ torch.linalg.svd(centred, full_matrices=False).Vh[:2].T
    for shown, axis in zip(places.T, expected.T, strict=True):
        assert abs(torch.corrcoef(torch.stack([shown, axis]))[0, 1]) > 1 - 1e-9
    assert places.min() >= 0
    assert (places <= torch.tensor([memory_map.WIDTH, memory_map.HEIGHT])).all()


@pytest.mark.parametrize("keys", [torch.ones(3, 4), torch.arange(4.0)[:, None], torch.ones(1, 2)])
def test_keys_that_lie_on_a_line_or_a_point_have_a_map(keys):
    assert memory_map.Plane.fit(keys)(keys).isfinite().all()


def test_nothing_on_the_map_moves_when_something_is_taught(classifier):
    shown = memory_map.MemoryMap(classifier)
    before = Counter(re.findall(r"M\d+ \d+h0", shown.draw()))
    assert before.total() == len(classifier)
    run_visits(classifier, lambda actions: actions.teach("luggage", LUGGAGE))
    after = Counter(re.findall(r"M\d+ \d+h0", shown.draw()))
    assert before <= after
    assert after.total() == len(classifier)


def test_the_map_is_that_of_the_memory(classifier):
    shown = memory_map.MemoryMap(classifier)
    shown.draw()
    for label in list(classifier.labels):
        classifier.forget(label=label)
    assert "empty" in shown.draw()
    run_visits(classifier, lambda actions: actions.teach("luggage", LUGGAGE))
    assert shown.draw().count("h0") == 3


def test_a_map_drawn_while_something_is_taught_is_not_kept(classifier):
    """For a moment a new example is in the journal but not in the memory."""
    shown, journal = memory_map.MemoryMap(classifier), classifier.journal
    shown.draw()
    learn = journal.learn

    def learn_and_draw(*arguments, **named):
        ids = learn(*arguments, **named)
        shown.draw()
        return ids

    journal.learn = learn_and_draw
    run_visits(classifier, lambda actions: actions.teach("luggage", LUGGAGE))
    assert shown.draw().count("h0") == len(classifier)


def test_the_map_marks_a_query_and_its_neighbours(classifier):
    reason = run_visits(classifier, lambda actions: actions.ask("card late"))
    drawn = ET.fromstring(memory_map.MemoryMap(classifier).draw("card late", reason))
    circles = [each for each in drawn.iter("circle") if each.get("class") != "query"]
    assert len(circles) == len(reason.neighbors) == PREDICTOR.k
    (query,) = [each for each in drawn.iter("circle") if each.get("class") == "query"]
    same = [each for each in circles if each[0].text == "card: card late"]
    assert same[0].get("cx") == query.get("cx")
    assert query[0].text == "your sentence"


def test_a_large_memory_is_shown_in_part():
    places = {id: (float(id % 500), 7.0) for id in range(1, 10_051)}
    drawn = memory_map.draw_map(places, dict.fromkeys(places, "a"), None, None)
    assert drawn.count("h0") == memory_map.MAX_MAP_POINTS
