"""The target for raw requests: method, path, headers and body, sent through the app in process.

A case is text similar to HTTP: `RUN METHOD PATH`, header lines, an empty line, the body. RUN
chooses one of three small runs, which take embeddings, texts or pictures.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from reliability.fuzzing.engine import Check, Target, summarise_message
from reliability.fuzzing.mutators import JSON_TOKENS, join_chunks, mutate_body, mutate_head
from reliability.trial import BrokenPromiseError

TOKEN = "open sesame"
MAX_BODY_BYTES = 1 << 16  # less than the size limit of a case, so that some bodies are too large
CHUNK_BYTES = 1000  # size of the pieces of a chunked body
MOST_EXAMPLES, FEWEST_EXAMPLES = 300, 3  # outside these limits a run is reset
CASES_BETWEEN_COMPARISONS = 64  # between comparisons of the memory with the journal
RUN_NAMES = ("keys", "texts", "images")
SCHEMA_PATHS = {"/predict": "Predictions", "/explain": "Explanations", "/learn": "LearnResult"}
SCHEMA_PATHS |= {"/forget": "ForgetResult", "/labels": "Labels", "/stats": "Stats"}
SCHEMA_PATHS |= {"/health": "Health"}


@dataclass(frozen=True)
class Call:
    """A request as a server would pass it to the app."""

    run: str
    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes

    @property
    def is_chunked(self) -> bool:
        return any(name == b"transfer-encoding" for name, _ in self.headers)


def parse_case(data: bytes) -> Call:
    """Read any bytes as a request, leaving out what no server would accept."""
    head, _, body = data.partition(b"\n\n")
    first, *lines = head.split(b"\n")
    words = (first.split(b" ") + [b""] * 3)[:3]
    run, method = (re.sub(rb"[^A-Za-z]", b"", word).decode() for word in words[:2])
    place = re.sub(rb"[^\x21-\x7e]", b"", words[2])
    path, _, query = place.partition(b"?")
    headers = []
    for line in lines[:20]:
        name, _, value = line.partition(b":")
        name = re.sub(rb"[^a-z0-9_-]", b"", name.lower())
        if name and name != b"content-length":
            headers.append((name, re.sub(rb"[\x00-\x08\x0a-\x1f\x7f]", b"", value).strip()))
    call = Call(
        run=run if run in RUN_NAMES else RUN_NAMES[zlib.crc32(run.encode()) % len(RUN_NAMES)],
        method=method.upper() or "GET",
        path=unquote("/" + path.decode().lstrip("/")),
        query=query,
        headers=headers,
        body=body,
    )
    if not call.is_chunked:
        headers.append((b"content-length", b"%d" % len(body)))
    return call


class Site:
    """A run behind its app, without a server.

    Args:
        source: the run in its initial state.
        directory: where the run is copied to.
        load: loads a classifier from a run directory.
    """

    def __init__(self, source: Path, directory: Path, load: Callable[[Path], Any]) -> None:
        self._source, self._directory, self._load = source, directory, load
        self._cases = 0
        self._loop = asyncio.new_event_loop()
        self._open()

    def _open(self) -> None:
        from mbpa.serve.app import create_app
        from mbpa.serve.settings import Settings

        shutil.rmtree(self._directory, ignore_errors=True)
        shutil.copytree(self._source, self._directory)
        self.classifier = self._load(self._directory)
        token = TOKEN if self._source.name == "images" else None
        settings = Settings(token=token, body_bytes=MAX_BODY_BYTES, window_s=0.0)
        self.app = create_app(self.classifier, settings)
        self._lifespan = self.app.router.lifespan_context(self.app)
        self._loop.run_until_complete(self._lifespan.__aenter__())

    def close(self) -> None:
        self._stop()
        self._loop.close()

    def _stop(self) -> None:
        self._loop.run_until_complete(self._lifespan.__aexit__(None, None, None))
        self.classifier.close()

    def check(self, call: Call) -> str:
        """Make the call; raise unless its response and its effect are as documented."""
        before = self.classifier.counts
        status, headers, body = self._loop.run_until_complete(self._request(call))
        after = self.classifier.counts
        outcome = f"{call.run} {status}"
        if status >= 500:
            raise BrokenPromiseError(f"answered {status}: {body[:200]!r}")
        is_unchanged = before == after and self.classifier.journal.change == after.change
        if not is_unchanged and (status != 200 or call.method != "POST"):
            raise BrokenPromiseError(f"answered {status}, but something changed")
        answer = self._check_answer(call, status, headers, body)
        if status >= 400:
            why = answer["error"].rpartition(": ")[2]  # without the location, which quotes input
            outcome = f"{outcome} {summarise_message(why)}"
        elif call.path in ("/learn", "/forget"):
            check_change(call, answer, before, after)
        self._cases += 1
        if self._cases % CASES_BETWEEN_COMPARISONS == 0:
            self.compare_journal()
        if not FEWEST_EXAMPLES <= after.examples <= MOST_EXAMPLES:
            self._stop()
            self._open()
        return outcome

    async def _request(self, call: Call) -> tuple[int, dict[bytes, bytes], bytes]:
        size = CHUNK_BYTES if call.is_chunked else max(1, len(call.body))
        pieces = [call.body[at : at + size] for at in range(0, len(call.body), size)] or [b""]
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            if not pieces:  # the client stays connected until it is answered
                await asyncio.Event().wait()
            body = pieces.pop(0)
            return {"type": "http.request", "body": body, "more_body": bool(pieces)}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "scheme": "http",
            "root_path": "",
            "state": {},
            "method": call.method,
            "path": call.path,
            "raw_path": call.path.encode("utf-8", "replace"),
            "query_string": call.query,
            "headers": list(call.headers),
            "client": ("127.0.0.1", 50_000),
            "server": ("127.0.0.1", 8000),
        }
        await self.app(scope, receive, send)
        if [message["type"] for message in sent[:1]] != ["http.response.start"]:
            raise BrokenPromiseError(f"no answer: {sent}")
        if sent[-1].get("more_body", False) or len(sent) < 2:
            raise BrokenPromiseError("the answer has no end")
        body = b"".join(message.get("body", b"") for message in sent[1:])
        return sent[0]["status"], dict(sent[0]["headers"]), body

    def _check_answer(
        self, call: Call, status: int, headers: dict[bytes, bytes], body: bytes
    ) -> dict[str, Any]:
        """Raise unless status and body match the OpenAPI description; return the JSON."""
        from mbpa.serve import schemas

        described = self.app.openapi()["paths"].get(template_of(call.path), {})
        operation = described.get(call.method.lower())
        if operation is not None and str(status) not in operation["responses"]:
            raise BrokenPromiseError(f"{call.method} {call.path} must not answer {status}")
        if status < 400 and call.path not in SCHEMA_PATHS:
            return {}
        if 300 <= status < 400:
            return {}
        if not headers.get(b"content-type", b"").startswith(b"application/json"):
            raise BrokenPromiseError(f"{status} is not answered in JSON: {headers}")
        answer: dict[str, Any] = json.loads(body, parse_constant=refuse_constant)
        model = getattr(schemas, "Error" if status >= 400 else SCHEMA_PATHS[call.path])
        model.model_validate_json(body, strict=True)
        if status < 400 and call.path in ("/predict", "/explain"):
            check_answers(json.loads(call.body), answer)
        return answer

    def compare_journal(self) -> None:
        """Raise unless the memory and the journal hold the same examples."""
        held = [(each.id, each.label, each.text) for each in self.classifier.examples()]
        kept = [(each.id, each.label, each.text) for each in self.classifier.journal.examples()]
        if held != kept:
            raise BrokenPromiseError("the memory and the journal hold different examples")


def refuse_constant(name: str) -> Any:
    raise BrokenPromiseError(f"an answer has {name}, which is not JSON")


def template_of(path: str) -> str:
    """Return the path as the OpenAPI description names it."""
    return re.sub(r"^/examples/[^/]+/image$", "/examples/{id}/image", path)


def check_answers(query: Any, answer: dict[str, Any]) -> None:
    """Raise unless each query has an answer with valid probabilities."""
    items = query.get("texts") or query.get("images") or query.get("embeddings")
    answers = answer.get("answers") or [each["answer"] for each in answer.get("reasons", [])]
    if len(answers) != len(items):
        raise BrokenPromiseError(f"{len(items)} queries have {len(answers)} answers")
    for each in answers:
        shares = [each["confidence"], *(named["probability"] for named in each["top"])]
        if not all(0 <= share <= 1.0001 for share in shares) or len(shares) > 101:
            raise BrokenPromiseError(f"probabilities must be between 0 and 1, got {shares}")


def check_change(call: Call, answer: dict[str, Any], before: Any, after: Any) -> None:
    """Raise unless the number of examples changed as the response says.

    A repeated lesson adds none.
    """
    count = len(answer["ids"])
    grown = after.examples - before.examples
    if call.path == "/forget":
        is_right = grown == -count
    else:
        is_right = grown == count or (grown == 0 and b"request" in call.body)
        is_right = is_right and count == len(json.loads(call.body)["examples"])
    if not is_right:
        raise BrokenPromiseError(f"{call.path} of {count} changed the count by {grown}")


# Seeds


def make_request_seeds() -> list[bytes]:
    """Return good requests of every kind, and some that must be refused."""
    from reliability.fuzzing.runs import plain_picture, random_keys

    keys = [[round(x, 6) for x in row] for row in random_keys(3, 4, seed=5).tolist()]
    picture = base64.b64encode(plain_picture("green")).decode()
    blank = base64.b64encode(join_chunks([(b"IHDR", bytes(13)), (b"IEND", b"")])).decode()
    calls: list[tuple[str, str, Any]] = [
        ("keys", "/predict", {"embeddings": keys, "top": 2, "threshold": 0.5}),
        ("keys", "/explain", {"embeddings": keys[:1]}),
        ("keys", "/learn", {"examples": [{"label": "new", "embedding": keys[0], "text": "x"}]}),
        ("keys", "/forget", {"ids": [1, 61]}),
        ("texts", "/predict", {"texts": ["apples and saws", "a plum"]}),
        ("texts", "/explain", {"texts": ["apples and saws"], "top": 1}),
        ("texts", "/learn", {"examples": [{"label": "fruit", "text": "a fig"}], "request": "r1"}),
        ("texts", "/forget", {"label": "fruit"}),
        ("images", "/predict", {"images": [picture]}),
        ("images", "/learn", {"examples": [{"label": "light", "image": picture}]}),
        ("images", "/explain", {"images": [f"data:image/png;base64,{picture}"]}),
        ("images", "/predict", {"images": [blank]}),
    ]
    head = "content-type: application/json"
    bearer = f"authorization: Bearer {TOKEN}"
    seeds = []
    for run, path, body in calls:
        more = f"\n{bearer}" if run == "images" else ""
        seeds.append(f"{run} POST {path}\n{head}{more}\n\n{json.dumps(body)}".encode())
    for path in ("/labels", "/stats", "/health", "/metrics", "/", "/docs", "/openapi.json", "/x"):
        seeds.append(f"texts GET {path}\n\n".encode())
    seeds += [
        f"images GET /examples/1/image\n{bearer}\n\n".encode(),
        b"images GET /stats\nauthorization: Bearer wrong\n\n",
        b"texts POST /predict\ntransfer-encoding: chunked\n\n" + b'{"texts": ["a plum"]}',
        b"texts POST /predict\ncontent-type: text/plain\n\n" + b'{"texts": ["a plum"]}',
    ]
    return seeds


@contextlib.contextmanager
def open_requests(directory: Path) -> Iterator[Check]:
    from mbpa.serve.classifier import Classifier
    from reliability.fuzzing import runs

    runs.write_random_run(directory / "keys", labels=3, examples=12, key_dim=4, has_rows=True)
    runs.write_word_run(directory / "texts")
    runs.write_picture_run(directory / "images")
    loads: dict[str, Callable[[Path], Any]] = {
        "keys": Classifier.load,
        "texts": lambda path: Classifier.load(path, text_encoder=runs.WordEncoder()),
        "images": lambda path: Classifier.load(path, image_encoder=runs.BrightnessEncoder()),
    }
    log = logging.getLogger("mbpa.serve")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)  # logged errors are raised here instead
    sites = {
        name: Site(directory / name, directory / f"{name}-served", loads[name])
        for name in RUN_NAMES
    }

    def check(data: bytes) -> str:
        call = parse_case(data)
        return sites[call.run].check(call)

    try:
        yield check
        for site in sites.values():
            site.compare_journal()
    finally:
        for site in sites.values():
            site.close()
        log.setLevel(level)


REQUEST_TOKENS = (
    *JSON_TOKENS,
    *(b'"texts"', b'"images"', b'"embeddings"', b'"examples"', b'"label"', b'"text"', b'"image"'),
    *(b'"embedding"', b'"ids"', b'"request"', b'"top"', b'"threshold"', b"/predict", b"/learn"),
    *(b"/forget", b"/explain", b"/examples/", b"/image", b"%2e%2e/", b"%00", b"%ff", b"?a=b"),
    *(
        b"GET",
        b"HEAD",
        b"OPTIONS",
        b"PUT",
        b"transfer-encoding: chunked\n",
        b"data:,",
        b"=" * 70_000,
    ),
    *(b"content-type: application/json; charset=utf-16", b"content-encoding: gzip", b"\n\n"),
)
REQUESTS = Target(
    name="requests",
    seeds=make_request_seeds,
    open=open_requests,
    traced=("mbpa/serve/", "mbpa/encoders/image.py"),
    untraced=("mbpa/serve/batching.py",),  # its thread waits for the next case
    tokens=REQUEST_TOKENS,
    mutators=(mutate_body, mutate_body, mutate_body, mutate_head),
    structured_share=0.8,
    memory_bytes=512 << 20,  # for a picture with the maximum number of pixels
    has_threads=True,
)
