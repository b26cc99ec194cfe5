"""Runs of pictures: taught from folders, served, asked and taught over HTTP and on the page."""

from __future__ import annotations

import asyncio
import base64
import gc
import html
import io
import json
import os
import re
import shlex
import shutil
from pathlib import Path

import browser
import gradio as gr
import httpx
import numpy as np
import pytest
import schemathesis
from digits import NAMES, in_base64, write_digits
from drawn_requests import LONG, draw_cases
from picture_files import file_of, png_of
from runs import WordEncoder, write_word_run
from servers import Server, get, open_client, post, running
from starlette.exceptions import HTTPException
from visiting import Visitor, collect_state, run_visits, visit_page

from mbpa import cli
from mbpa.encoders import image
from mbpa.encoders.pictures import count_pixels, standardize
from mbpa.errors import RunError
from mbpa.explorer import actions, page, review
from mbpa.explorer.actions import Change
from mbpa.explorer.page import ExplorerPage
from mbpa.explorer.review_tab import ReviewTab
from mbpa.explorer.sessions import Session
from mbpa.explorer.uploads import Uploads
from mbpa.serve import teaching
from mbpa.serve.answers import Answer, Lesson
from mbpa.serve.app import create_app
from mbpa.serve.classifier import Classifier
from mbpa.serve.input_checks import MAX_PIXELS_PER_CALL
from mbpa.serve.journal import InputError, Journal
from mbpa.serve.labelled_images import read_labelled_images
from mbpa.serve.run_info import JOURNAL_FILE

pytestmark = pytest.mark.heavy  # runs are made of pictures, and an encoder sees each

Image = pytest.importorskip("PIL.Image")
KNOWN, NEW = NAMES[:8], NAMES[8:]
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, list[Path]]:
    """Twenty-five of each digit."""
    return write_digits(tmp_path_factory.mktemp("digits") / "all", each=25)


@pytest.fixture(scope="module")
def untaught(files, tmp_path_factory) -> Path:
    """The run that `mbpa teach` makes from the digits zero to seven."""
    folder = tmp_path_factory.mktemp("untaught")
    for name in KNOWN:
        shutil.copytree(files[name][0].parent, folder / "digits" / name)
    (folder / "digits" / "one" / "Thumbs.db").write_bytes(b"of another program")
    options = ["--out", str(folder / "run"), "--cache", str(folder / "cache"), "--no-progress"]
    assert cli.main(["teach", str(folder / "digits"), *options]) == 0
    return folder / "run"


@pytest.fixture
def run(untaught, tmp_path) -> Path:
    return Path(shutil.copytree(untaught, tmp_path / "run"))


@pytest.fixture
def classifier(run):
    with Classifier.load(run) as found:
        yield found


@pytest.fixture(scope="module")
def client(untaught, tmp_path_factory):
    run = shutil.copytree(untaught, tmp_path_factory.mktemp("served") / "run")
    with (
        Classifier.load(run) as classifier,
        running(create_app(classifier)) as url,
        open_client(url) as client,
    ):
        yield client


def ask(client: httpx.Client, *paths: Path) -> list[dict]:
    answer = client.post("/predict", json={"images": [in_base64(path) for path in paths]})
    return answer.raise_for_status().json()["answers"]


# As somebody meets it


@pytest.mark.slow
def test_digits_that_it_never_saw_are_taught_over_http(run, files):
    """Three pictures each of "eight" and "nine", and more than half of the others are known, of
    which none was; also after a restart, and after they are forgotten they have never been."""
    asked = [path for name in NEW for path in files[name][3:]]
    with Server(run) as server:
        before = ask(server.client, *asked)
        assert not {answer["label"] for answer in before} & set(NEW)
        known = [files[name][0] for name in KNOWN]
        assert [answer["label"] for answer in ask(server.client, *known)] == list(KNOWN)
        examples = [
            {"label": name, "image": in_base64(path)} for name in NEW for path in files[name][:3]
        ]
        taught = server.client.post("/learn", json={"examples": examples})
        ids = taught.raise_for_status().json()["ids"]
        after = ask(server.client, *asked)
        right = [
            answer["label"] == path.parent.name for answer, path in zip(after, asked, strict=True)
        ]
        assert sum(right[:22]) > 11
        assert sum(right[22:]) > 11
        assert [answer["label"] for answer in ask(server.client, *known)] == list(KNOWN)
        assert server.stop() == 0, "".join(server.output)
        assert server.output[-1] == f"stopped; everything that was taught is in {run}\n"
        assert not any("Traceback" in line for line in server.output)
    pictures = [standardize(path.read_bytes()) for path in asked]
    with Classifier.load(run) as again:
        agrees(again.predict(pictures), after)
        again.forget(ids)
        agrees(again.predict(pictures), before)


def agrees(found: list[Answer], answers: list[dict]) -> None:
    assert [each.label for each in found] == [each["label"] for each in answers]
    shares = [each["confidence"] for each in answers]
    assert [each.confidence for each in found] == pytest.approx(shares, abs=1e-5)


def test_a_picture_is_shown_as_it_was_taught_until_it_is_forgotten(client, files):
    lesson = {"label": "eight", "image": in_base64(files["eight"][0])}
    (id,) = client.post("/learn", json={"examples": [lesson]}).raise_for_status().json()["ids"]
    shown = client.get(f"/examples/{id}/image")
    assert shown.headers["content-type"] == "image/png"
    assert shown.headers["cache-control"] == "no-store"
    pixels = np.asarray(Image.open(io.BytesIO(shown.content)))
    assert np.array_equal(pixels, np.asarray(Image.open(files["eight"][0])))
    client.post("/forget", json={"ids": [id]}).raise_for_status()
    gone = client.get(f"/examples/{id}/image")
    assert (gone.status_code, gone.json()) == (404, {"error": f"there is no example {id}"})


def test_an_answer_is_explained_by_pictures(client, files):
    body = {"images": [in_base64(files["five"][1])]}
    (reason,) = client.post("/explain", json=body).raise_for_status().json()["reasons"]
    nearest = reason["neighbors"][0]
    assert (nearest["label"], nearest["text"]) == ("five", None)
    assert nearest["distance"] == pytest.approx(0, abs=1e-3), "it is among the examples"
    shown = client.get(f"/examples/{nearest['id']}/image").content
    assert np.array_equal(
        np.asarray(Image.open(io.BytesIO(shown))), np.asarray(Image.open(files["five"][1]))
    )


def test_pictures_may_come_as_data_urls_in_lines_and_in_other_formats(client, files):
    plain = ask(client, files["two"][0])
    content = in_base64(files["two"][0])
    webp = file_of(Image.open(files["two"][0]), "WEBP", lossless=True)
    for sent in (
        f"data:image/png;base64,{content}",
        "\n".join(content[i : i + 76] for i in range(0, len(content), 76)),
        base64.b64encode(webp).decode(),
    ):
        answers = client.post("/predict", json={"images": [sent]}).json()["answers"]
        assert answers == plain


# What is refused


def encode_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


BAD = {
    "no base64": ("a picture?", "must be a file encoded in base64"),
    "a damaged character": ("iVBORw0K*", "must be a file encoded in base64"),
    "letters that are none": ("ⅣⅤⅥⅦ", "must be a file encoded in base64"),
    "no picture": (encode_base64(b"hello"), "must be a PNG, JPEG, WEBP, GIF or BMP file"),
    "a document": (encode_base64(b"%PDF-1.7 "), "must be a PNG, JPEG, WEBP, GIF or BMP file"),
    "a part of one": (encode_base64(png_of(20, 20)[:60]), "cannot be read"),
    "a bomb": (encode_base64(png_of(6_000, 6_000)), "at most 32,000,000 pixels"),
    "a larger bomb": (encode_base64(png_of(60_000, 60_000)), "at most 32,000,000 pixels"),
    "many bytes": (encode_base64(b"\x89PNG" + b"\0" * 6_000_000), "at most 6,000,000 bytes"),
    "nothing": ("", "at least 1 character"),
    "no text": (5, "valid string"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_picture_is_refused_in_words_and_changes_nothing(client, what, files):
    picture, why = BAD[what]
    before = client.get("/stats").json()
    bodies = {
        "/predict": {"images": [picture]},
        "/explain": {"images": [picture]},
        "/learn": {"examples": [{"label": "a", "image": picture}]},
    }
    for path, body in bodies.items():
        answer = client.post(path, json=body)
        assert answer.status_code == 422, answer.text
        assert why in answer.json()["error"]
    good = in_base64(files["one"][0])
    if picture and isinstance(picture, str) and len(picture) < 1_000_000:
        answer = client.post("/predict", json={"images": [good, picture]})
        assert answer.status_code == 422
    assert client.get("/stats").json() == before


def test_many_bombs_below_the_limit_are_refused_together(client):
    picture = encode_base64(png_of(5_000, 5_000))
    answer = client.post("/predict", json={"images": [picture] * 3})
    assert answer.status_code == 422
    assert "64,000,000 pixels in total, got 75,000,000" in answer.json()["error"]


def test_texts_are_not_pictures_and_pictures_are_no_texts(client, tmp_path, files):
    picture = in_base64(files["one"][0])
    for path, body in (
        ("/predict", {"texts": ["seven"]}),
        ("/explain", {"texts": ["seven"]}),
        ("/learn", {"examples": [{"label": "a", "text": "seven"}]}),
    ):
        answer = client.post(path, json=body)
        assert (answer.status_code, answer.json()) == (
            422,
            {"error": "this run takes images, not texts"},
        )
    both = {"label": "a", "text": "seven", "image": picture}
    assert client.post("/learn", json={"examples": [both]}).status_code == 422
    write_word_run(tmp_path / "words")
    with (
        Classifier.load(tmp_path / "words", text_encoder=WordEncoder()) as words,
        running(create_app(words)) as url,
    ):
        for path, body in (
            ("/predict", {"images": [picture]}),
            ("/explain", {"images": [picture]}),
            ("/learn", {"examples": [{"label": "a", "image": picture}]}),
        ):
            answer = post(url + path, json=body)
            assert (answer.status_code, answer.json()) == (
                422,
                {"error": "this run takes texts, not images"},
            )
        assert get(f"{url}/examples/1/image").status_code == 404
        assert len(words) == 4


@pytest.mark.parametrize("id", ["0", "-1", "x", "9" * 30])
def test_an_example_has_a_number(client, id):
    assert client.get(f"/examples/{id}/image").status_code == 422


def test_a_run_of_pictures_keeps_to_its_description(run):
    with Classifier.load(run) as classifier, running(create_app(classifier)) as url:
        described = get(f"{url}/openapi.json").json()["components"]["schemas"]
        assert set(described["Query"]["properties"]) == {"images", "embeddings", "top", "threshold"}
        others = {"/labels", "/stats", "/health", "/metrics", "/forget", "/backup", "/retrain"}
        drawn = draw_cases(schemathesis.openapi.from_url(f"{url}/openapi.json"), others)
        assert {path for path, status in drawn if status == 422} >= {"/predict", "/learn"}
        assert {status for path, status in drawn if path == "/examples/{id}/image"} >= {404}
        assert not LONG or ("/examples/{id}/image", 200) in drawn
        assert len(classifier) == len(classifier.journal)


def test_the_commands_of_its_page_work(run):
    with Classifier.load(run) as classifier, running(create_app(classifier)) as url:
        page = get(f"{url}/docs").text
        commands = re.findall(r"<pre>(.*?)</pre>", page, re.DOTALL)
        split = [shlex.split(html.unescape(each).replace("\\\n", "")) for each in commands]
        bodies = {httpx.URL(parts[2]).path: parts[-1] for parts in split if "-d" in parts}
        for path in ("/predict", "/explain", "/learn", "/forget"):
            answer = post(url + path, content=bodies[path], headers=JSON)
            assert answer.status_code == 200, answer.text
        assert "<code>images</code>" in page
        assert "<code>texts</code>" not in page


# What is kept, and what is not


def test_a_forgotten_picture_is_in_no_file(run, files):
    noise = np.random.default_rng(0).integers(0, 256, (400, 300, 3)).astype(np.uint8)
    large = standardize(file_of(Image.fromarray(noise)))
    small = standardize(files["eight"][0].read_bytes())
    with Classifier.load(run) as classifier:
        ids = classifier.learn([Lesson("eight", image=small), Lesson("noise", image=large)])
        assert [classifier.image(id) for id in ids] == [small, large]
        held = b"".join(path.read_bytes() for path in run.glob(f"{JOURNAL_FILE}*"))
        assert small in held, "so that it would be found below"
        classifier.forget(ids)
        assert [classifier.image(id) for id in ids] == [None, None]
        left = b"".join(path.read_bytes() for path in run.glob(f"{JOURNAL_FILE}*"))
    assert small not in left
    pieces = [large[at : at + 64] for at in range(200, len(large) - 64, 64)]
    assert len(pieces) > 500
    assert not any(piece in left for piece in pieces)


def test_a_picture_without_its_key_is_embedded_at_the_start(run, files):
    small = standardize(files["eight"][0].read_bytes())
    with Journal(run / JOURNAL_FILE) as journal:
        (id,) = journal.learn([("eight", small, None)])
    with Classifier.load(run) as classifier:
        (reason,) = classifier.explain([small])
        near = reason.neighbors[0]
        assert (near.id, near.label, near.text) == (id, "eight", None)
        assert near.distance == pytest.approx(0, abs=1e-3)


def test_a_request_sent_again_teaches_no_picture_twice(classifier, files):
    small, other = (standardize(path.read_bytes()) for path in files["eight"][:2])
    first = classifier.learn([Lesson("eight", image=small)], request="once")
    assert classifier.learn([Lesson("eight", image=small)], request="once") == first
    with pytest.raises(InputError, match="used for other examples"):
        classifier.learn([Lesson("eight", image=other)], request="once")
    assert classifier.labels["eight"] == 1


def test_what_is_done_at_the_desk_to_a_picture_can_be_undone(classifier, files, tmp_path):
    def list_pictures() -> set:
        return {(each.label, classifier.image(each.id)) for each in classifier.examples()}

    before = collect_state(classifier), list_pictures()
    eights = files["eight"][:3]
    (tmp_path / "none.png").write_bytes(b"none")
    for change in (
        lambda actions: actions.teach("eight", [*eights, eights[0]]),
        lambda actions: actions.relabel(1, "eight"),
        lambda actions: actions.forget(2),
    ):
        done = run_visits(classifier, change)
        assert list_pictures() != before[1]
        run_visits(classifier, lambda actions, done=done: actions.undo(done))
        assert (collect_state(classifier), list_pictures()) == before
    with pytest.raises(InputError, match=r"picture 2 of 2: a picture must be a PNG"):
        run_visits(
            classifier, lambda actions: actions.teach("eight", [eights[0], tmp_path / "none.png"])
        )
    assert (collect_state(classifier), list_pictures()) == before
    assert len(actions.make_thumbnails(classifier, [3, 999])) == 1


def test_pictures_are_read_one_at_a_time_so_that_large_ones_may_be_many(classifier, tmp_path):
    """Together they have more pixels than one HTTP call may send."""
    large = [tmp_path / f"{shade}.png" for shade in (40, 120, 200)]
    for path in large:
        Image.new("L", (5000, 5000), int(path.stem)).save(path)
    assert sum(count_pixels(path.read_bytes()) for path in large) > MAX_PIXELS_PER_CALL
    done = run_visits(classifier, lambda actions: actions.teach("grey", large))
    assert len(done.added) == 3


def test_pictures_are_counted_before_one_is_read(classifier, tmp_path):
    missing = [tmp_path / f"{number}.png" for number in range(257)]
    with pytest.raises(InputError, match="at most 256 examples at a time, got 257"):
        run_visits(classifier, lambda actions: actions.teach("eight", missing))
    with pytest.raises(InputError, match="picture 1 of 256: it is no longer available"):
        run_visits(classifier, lambda actions: actions.teach("eight", missing[:256]))


# What people have


def test_a_run_of_pictures_says_what_it_is(untaught):
    content = json.loads((untaught / "run.json").read_text())
    assert (content["format"], content["takes"], content["encoder"]) == (
        7,
        "images",
        "efficientnet-lite0",
    )
    assert content["summary"]["accuracy"] > 0.6


def write(path: Path, colour: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), colour).save(path)


def test_folders_and_tables_of_pictures_are_read(tmp_path):
    for name in ("warm/red.png", "warm/deep/orange.PNG", "warm/same.png", "cold/blue.jpg"):
        write(tmp_path / "all" / name, "red" if "same" in name else Path(name).stem)
    write(tmp_path / "all" / "cold" / "contradicts.png", "red")
    write(tmp_path / "all" / ".cache" / "x.png", "red")
    (tmp_path / "all" / "empty").mkdir()
    (tmp_path / "all" / "warm" / "notes.txt").write_text("mine")
    write(tmp_path / "all" / "of_no_label.png", "green")
    (tmp_path / "all" / ".hidden").write_text("not counted")
    album = read_labelled_images(tmp_path / "all")
    assert album.labels == ("cold", "cold", "warm", "warm")
    assert (album.rows, album.duplicates, album.contradictions, album.strays) == (5, 1, 1, 2)
    table = tmp_path / "all" / "table.csv"
    table.write_text("file,kind\nwarm/red.png,hot\ncold/blue.jpg,cool\n")
    rows = read_labelled_images(table, column="file", label="kind")
    assert rows.labels == ("hot", "cool")
    assert rows.images == (album.images[3], album.images[0])


@pytest.mark.parametrize(
    ("there", "why"),
    [
        ((), "has no pictures .* in sub-folders; it must have one per label"),
        (("red.png",), "has no pictures .* in sub-folders"),
        (("a/red.png", "a/blue.png"), "only one label, 'a'"),
        (("a/red.png", "b/broken.png"), r"broken\.png: a picture must be a PNG"),
        (("a/red.png", "b\x07/blue.png"), "cannot be a label: .*control"),
    ],
    ids=["nothing", "no folders", "one label", "a broken one", "a bell"],
)
def test_unusable_folders_are_refused_in_one_line(tmp_path, there, why):
    for name in there:
        write(tmp_path / "all" / name, "red")
        if "broken" in name:
            (tmp_path / "all" / name).write_bytes(b"nothing")
    (tmp_path / "all").mkdir(exist_ok=True)
    with pytest.raises(RunError, match=why) as refused:
        read_labelled_images(tmp_path / "all")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("image,label\nnone.png,a\nred.png,b\n", r"none\.png cannot be read: No such file"),
        ("file,label\nred.png,a\n", "no column 'image', .* --image NAME"),
        ("image,label\nred.png,\n", "line 2: 'label': a label must not be empty"),
    ],
)
def test_unusable_tables_of_pictures_are_refused_in_one_line(tmp_path, content, why, capsys):
    write(tmp_path / "red.png", "red")
    (tmp_path / "table.csv").write_text(content)
    options = ["--image", "image", "--out", str(tmp_path / "run"), "--no-progress"]
    assert cli.main(["teach", str(tmp_path / "table.csv"), *options]) == 2
    said = capsys.readouterr().err
    assert re.search(why, said)
    assert said.count("\n") == 1


def test_the_report_names_what_was_left_out(tmp_path):
    for label, colours in {"warm": ("red", "orange"), "cold": ("blue", "navy")}.items():
        for colour in colours:
            write(tmp_path / "all" / label / f"{colour}.png", colour)
    shutil.copy(tmp_path / "all" / "warm" / "red.png", tmp_path / "all" / "warm" / "again.png")
    (tmp_path / "all" / "cold" / "notes.txt").write_text("mine")
    album = read_labelled_images(tmp_path / "all")
    made = teaching.teach(album, image.encoder())
    said = teaching.report(made, album)
    assert "examples   4 of 2 labels\nleft out   1 duplicate picture\n" in said
    assert "           1 file that is not a picture of a label\n" in said


# The page


def test_a_picture_is_called_one_whatever_lies_near_it(classifier, files):
    """Examples that were taught by embeddings have no pictures."""
    small = standardize(files["two"][0].read_bytes())
    key = classifier.encode([small])[0]
    for label in list(classifier.labels):
        classifier.forget(label=label)
    classifier.learn([Lesson(label, key=key) for label in ("a", "b")])

    async def visit(shown: ExplorerPage):
        path = upload(classifier, files["two"][0])
        return await shown.show_answer([str(path)])

    answer, _, drawn, _ = visit_page(classifier, visit)
    assert "your picture" in answer
    assert drawn.count("your picture") == 2, "beside it and below it"
    assert "your sentence" not in drawn


def upload(classifier: Classifier, path: Path) -> Path:
    """Copy a file to where Gradio puts uploads."""
    folder = folder_of(classifier) / "abc"
    folder.mkdir(exist_ok=True)
    return Path(shutil.copy(path, folder))


def test_what_cannot_be_shown_is_reported_and_a_change_that_was_made_is_shown_as_such(
    classifier, files
):
    """The journal with the pictures is closed after the change."""
    opinions = review.collect_opinions(classifier)[:3]

    async def visit(shown: ExplorerPage):
        with shown.blocks:
            tab = ReviewTab(shown, "list", review.sort_by_uncertainty)
        session = Session(queues={"list": opinions})
        whole = await tab.show_list(session)
        path = upload(classifier, files["two"][0])
        classifier.journal.close()
        for work in (
            shown.make_thumbnails([1]),
            shown.show_answer([str(path)]),
            tab.show_list(session),
        ):
            with pytest.raises(gr.Error, match="is closed"):
                await work
        found = await tab.finish_change(session, opinions[0], Change("It was done."), [str(path)])
        assert len(found) == len(whole) + len(shown.change_outputs)
        return session, found[len(whole)], await shown.update_after(session, "And this.", [])

    session, said, after = visit_page(classifier, visit)
    assert "It was done." in said
    assert [change.description for change in session.changes] == ["It was done."]
    assert session.queues["list"] == opinions[1:]
    assert "And this." in after[0]


def test_a_folder_for_uploads_is_the_runs_own(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "letter.txt").write_text("mine")
    folder = tmp_path / "journal.sqlite-uploads"
    folder.symlink_to(tmp_path / "elsewhere")
    with Journal(tmp_path / "journal.sqlite") as journal:
        uploads = Uploads.create_beside(journal)
        assert uploads.folder == folder.resolve()
        assert folder.stat().st_mode & 0o777 == 0o700
        uploads.close()
        assert not folder.exists()
        folder.write_text("in the way")
        with pytest.raises(RunError, match="uploads cannot be emptied"):
            Uploads.create_beside(journal)
    assert (tmp_path / "elsewhere" / "letter.txt").read_text() == "mine"


def test_the_oldest_uploads_go_when_there_are_too_many(tmp_path):
    uploads = Uploads(tmp_path, max_bytes=1000, max_files=5)
    try:
        files = [tmp_path / str(number) / "x.png" for number in range(5)]
        for number, path in enumerate(files):
            path.parent.mkdir()
            path.write_bytes(b"x" * 180)
            os.utime(path, (1e9 + number, 1e9 + number))
        (tmp_path / "stale").write_bytes(b"part of what did not come to its end")
        os.utime(tmp_path / "stale", (1e9, 1e9))
        (tmp_path / "coming").write_bytes(b"part of what comes")
        uploads.admit(300)
        uploads.make_room()
        assert [path.exists() for path in files] == [False, False, True, True, True]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3", "4", "coming"]
        uploads.admit(500)
        uploads.make_room()
        assert [path.exists() for path in files] == [False, False, False, False, True]
        for size, status in ((1001, 413), (201, 429)):
            with pytest.raises(HTTPException) as refused:
                uploads.admit(size)
            assert refused.value.status_code == status
        uploads.release(300)
        uploads.admit(201)
        few = Uploads(tmp_path, max_files=0)
        few.make_room()
        assert not files[4].exists()
        few.close()
    finally:
        uploads.close()
    assert not tmp_path.exists()
    assert "GRADIO_TEMP_DIR" not in os.environ


@pytest.fixture
def opened(classifier):
    """A client of the page; a killed process has left a picture in its folder."""
    folder_of(classifier).mkdir()
    (folder_of(classifier) / "left.png").write_bytes(b"a secret")

    async def mount_page():
        return page.mount(create_app(classifier), classifier)

    app = asyncio.run(mount_page())
    with running(app) as url, open_client(url + page.PATH) as client:
        yield client
    gc.collect()


@pytest.mark.slow
def test_what_is_dropped_stays_no_longer_than_it_must(opened, classifier, files, tmp_path):
    folder = folder_of(classifier)
    assert list(folder.iterdir()) == [], "emptied at the start"
    assert folder.stat().st_mode & 0o077 == 0, "for nobody else to read"
    upload = {"files": files["eight"][0].open("rb")}
    (path,) = opened.post("/gradio_api/upload", files=upload).raise_for_status().json()
    upload["files"].close()
    assert Path(path).is_relative_to(folder)
    assert Path(path).read_bytes() == files["eight"][0].read_bytes()
    assert "your picture" in show_picture(opened, path)
    for elsewhere in (files["eight"][1], tmp_path / "none", f"{folder}/../{JOURNAL_FILE}"):
        assert "drop it again" in show_picture(opened, str(elsewhere))
    assert "drop it again" in show_picture(opened, "http://elsewhere.example/x.png")
    assert [each for each in folder.rglob("*") if each.is_file()] == [Path(path)]
    for hidden in (
        classifier.journal.path,
        f"{folder}/../{JOURNAL_FILE}",
        f"{folder}/%2e%2e/{JOURNAL_FILE}",
    ):
        assert opened.get(f"/gradio_api/file={hidden}").status_code in (403, 404)


def show_picture(client: httpx.Client, path: str) -> str:
    """Return the page's answer to a picture."""
    parts = client.get("/config").raise_for_status().json()
    (place,) = [
        each["id"] for each in parts["components"] if each["props"].get("label") == "Picture"
    ]
    asking = next(
        each["id"] for each in parts["dependencies"] if [place, "upload"] in each["targets"]
    )
    file = {"path": path, "meta": {"_type": "gradio.FileData"}}
    call = {"data": [file], "fn_index": asking, "session_hash": "visitor"}
    client.post("/gradio_api/queue/join", json=call).raise_for_status()
    with client.stream("GET", "/gradio_api/queue/data?session_hash=visitor") as events:
        for line in events.iter_lines():
            if "process_completed" in line:
                return line
    raise AssertionError("no answer")


@pytest.mark.slow
def test_bodies_for_the_page_are_bounded(opened):
    whole = opened.post("/gradio_api/queue/join", content=b" " * (9 << 20), headers=JSON)
    assert (whole.status_code, whole.json()) == (
        413,
        {"error": "the body must have at most 8388608 bytes"},
    )
    unsaid = opened.post("/gradio_api/upload", content=iter([b"x"]))
    assert unsaid.status_code == 411


@pytest.mark.slow
def test_the_page_of_a_run_of_texts_takes_no_files(tmp_path):
    write_word_run(tmp_path / "words")
    with Classifier.load(tmp_path / "words", text_encoder=WordEncoder()) as words:

        async def mount_page():
            return page.mount(create_app(words), words)

        with running(asyncio.run(mount_page())) as url:
            sent = post(f"{url}{page.PATH}/gradio_api/upload", files={"files": b"x"})
        assert sent.status_code == 413
        assert not folder_of(words).exists()
    gc.collect()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # Playwright's pipe to its driver
def test_a_visitor_drops_pictures_teaches_and_undoes(classifier, files, tmp_path):
    from playwright.sync_api import sync_playwright

    chromium = browser.find_or_skip()

    async def mount_page():
        return page.mount(create_app(classifier), classifier)

    app = asyncio.run(mount_page())
    with (
        running(app) as url,
        sync_playwright() as driver,
        driver.chromium.launch(
            executable_path=chromium.program, env=chromium.environment
        ) as opened,
    ):
        visitor = Visitor(opened, url)  # which leads to the page
        _asks_teaches_and_undoes(visitor, classifier, files)
        assert count_uploads(classifier) == 1, (
            "what is asked; what was taught is in the journal alone"
        )
        _reviews(visitor, classifier)
        _drops_what_is_no_picture(visitor, tmp_path / "broken.png")
    gc.collect()  # here, where what is left open is no error
    assert not folder_of(classifier).exists()
    assert "GRADIO_TEMP_DIR" not in os.environ
    assert visitor.troubles == []
    assert visitor.hosts == {url.removeprefix("http://")}


def folder_of(classifier: Classifier) -> Path:
    """Return the folder of uploads."""
    return classifier.journal.path.with_name(f"{JOURNAL_FILE}-uploads")


def count_uploads(classifier: Classifier) -> int:
    return sum(path.is_file() for path in folder_of(classifier).rglob("*"))


def drop(visitor: Visitor, label: str, *paths: Path) -> None:
    place = visitor.page.locator(".drop").filter(has_text=label).locator("input[type=file]")
    place.set_input_files([str(path) for path in paths])


def _asks_teaches_and_undoes(visitor: Visitor, classifier: Classifier, files) -> None:
    page = visitor.page
    lessons = [standardize(path.read_bytes()) for path in files["eight"][:3]]
    ids = classifier.learn([Lesson("eight", image=each) for each in lessons])
    answers = classifier.predict([standardize(path.read_bytes()) for path in files["eight"]])[3:]
    classifier.forget(ids)
    enough = [answer.label for answer in answers].index("eight")  # that three are enough for
    asked = files["eight"][3 + enough]
    drop(visitor, "Picture", asked)
    page.locator("#answer .bars").wait_for()
    before = visitor.everything
    assert visitor.answer in KNOWN
    assert page.locator("#answer img").evaluate("each => each.naturalWidth") == 28
    assert page.locator("#memories img").count() == 6
    assert page.locator("#map image").count() == len(classifier.explain(lessons)[0].neighbors)
    page.get_by_role("textbox", name="Teach a label").fill("eight")
    drop(visitor, "Examples", *files["eight"][:3])
    page.locator(".drop").filter(has_text="002").wait_for()
    visitor.press("Teach", "Taught 3 examples of the new label “eight”.")
    assert visitor.answer == "eight"
    assert classifier.journal.labels()["eight"] == 3
    visitor.press("Undo", "Undone")
    assert visitor.everything == before
    label = page.get_by_role("combobox", name="Wrong?")
    label.fill("eight")
    label.press("Enter")
    visitor.press("Correct it", "Taught 1 example of the new label “eight”.")
    assert visitor.answer == "eight"
    (taught,) = classifier.examples("eight")
    assert classifier.image(taught.id) == standardize(asked.read_bytes())


def _reviews(visitor: Visitor, classifier: Classifier) -> None:
    page = visitor.page
    page.get_by_role("tab", name="Least certain").click()
    shown = page.locator(".list img").filter(visible=True).first
    shown.wait_for()
    assert shown.evaluate("each => each.naturalWidth") == 28
    count = len(classifier)
    visitor.press("Forget this example", "Forgot one example of")
    assert len(classifier) == count - 1
    visitor.press("Undo", "Undone: Forgot one")
    assert len(classifier) == count


def _drops_what_is_no_picture(visitor: Visitor, path: Path) -> None:
    path.write_bytes(b"no picture")
    visitor.page.get_by_role("tab", name="Ask and teach").click()
    visitor.page.locator(".drop").get_by_role("button", name="Clear").click()
    visitor.page.locator("#answer").get_by_text("Drop a picture").wait_for()
    drop(visitor, "Picture", path)
    visitor.page.get_by_text("A picture must be a PNG").wait_for()
