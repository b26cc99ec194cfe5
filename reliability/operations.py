"""Random operations on the service, with each response compared with a plain reference model.

The app runs in this process: requests pass through its middleware, parsers and handlers without a
socket. A trial is a series of episodes. Each has a run of its own, made in one of several ways, and
operations drawn from the seed. Discrete results must equal the reference exactly. Probabilities
must lie within `TOLERANCE` of a float64 computation, and must equal, to the bit, those of a
classifier that was taught only the current examples, in another order.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import mbpa
from mbpa.encoders.text import TextEncoder
from mbpa.modules.new_rows import NewRows, label_sums
from mbpa.serve.answers import Answer, Lesson, Reason
from mbpa.serve.app import create_app
from mbpa.serve.classifier import Classifier
from mbpa.serve.run_info import RunInfo, write_run
from mbpa.serve.settings import Settings
from reliability.reference import (
    Expected,
    Key,
    Method,
    Oracle,
    Reference,
    ReferenceExample,
    explain_misplaced,
)
from reliability.trial import BrokenPromiseError, Trial

OPERATIONS_PER_EPISODE = 1000
TOLERANCE = 1e-5  # for probabilities and weights, against float64
SPREAD_FACTOR = 10.0  # allowed ratio of float32 errors to random perturbations of that size
PROGRESS_EVERY_S = 5.0
SHRINKING_LIMIT_S = 120.0
SHOWN_OPERATIONS = 30
SHOWN_CHARACTERS = 400
MAX_TOP = 100
KEY_DIM = 16
LABELS = tuple(f"label {number:03}" for number in range(5))
EXAMPLES_PER_LABEL = 6
WORDS = (
    *("apple", "pear", "plum", "saw", "hammer", "nail", "red"),
    *("green", "loud", "soft", "fast", "slow", "north", "south"),
)
NEW_LABELS = (
    *("pizza", "Pizza", "taxi", "weather", "a", "b", "zebra", "label 0000", "0"),
    *("Ärger", "A\u0308rger", "订单", "🙂", "\u200b", "x y", "z" * 200),
)
METHODS = (
    Method(lr=5.0, steps=10, k=12),
    Method(lr=1.0, steps=5, k=20, bandwidth=0.5, has_rows=True),
    Method(lr="auto", steps=20, k=10, has_rows=True, scale=1.5, offset=-0.5),
    Method(lr=3.0, steps=5, k=50, bandwidth=0.25, has_rows=True, offset=2.0),
    Method(lr="auto", steps=20, k=20, bandwidth=0.5),
    Method(lr=0.5, steps=8, k=8, decay=0.05, momentum=0.5, has_rows=True),
)
SIZES = (20, 60, 60, 150, 150, 400, 1200)  # approximate numbers of examples in an episode


# Runs


@cache
def encode_word(word: str) -> tuple[int, ...]:
    """Return integers for a word, from its hash; their sums are exact in any order."""
    return tuple(byte - 128 for byte in hashlib.sha256(word.encode()).digest()[:KEY_DIM])


@cache
def encode_text(text: str) -> Key:
    """Return the key of a text: a bag of its words, of unit norm."""
    total = np.array([encode_word(word) for word in text.lower().split()]).sum(0)
    key: Key = (total / np.linalg.norm(total)).astype(np.float32)
    return key


class BagEncoder(TextEncoder):
    """An encoder by bags of words: the order of words does not matter."""

    name, key_dim = "bag", KEY_DIM

    def __call__(self, texts: Sequence[str]) -> Tensor:
        return torch.from_numpy(np.stack([encode_text(text) for text in texts]))


@dataclass(frozen=True, eq=False)
class Plan:
    """The start of an episode: how the run adapts, its trained head and its examples."""

    method: Method
    threshold: float
    size: int
    weight: Tensor
    bias: Tensor
    trained: tuple[ReferenceExample, ...]

    @classmethod
    def draw(cls, random: Random) -> Plan:
        """Draw a plan at random."""
        generator = torch.Generator().manual_seed(random.getrandbits(32))
        texts = [" ".join(random.choices(WORDS, k=3)) for _ in range(len(LABELS))]
        trained = [
            ReferenceExample(label, text, encode_text(text), is_trained=True)
            for label, first in zip(LABELS, texts, strict=True)
            for _ in range(EXAMPLES_PER_LABEL)
            for text in (f"{first} {' '.join(random.choices(WORDS, k=2))}",)
        ]
        random.shuffle(trained)
        return cls(
            method=random.choice(METHODS),
            threshold=random.choice((0.0, 0.3, 0.6)),
            size=random.choice(SIZES),
            weight=2 * torch.randn(len(LABELS), KEY_DIM, generator=generator),
            bias=torch.randn(len(LABELS), generator=generator),
            trained=tuple(trained),
        )

    def write(self, directory: Path, trained: Sequence[ReferenceExample]) -> None:
        """Write a run directory with the planned head and these examples."""
        method = self.method
        head = nn.Linear(KEY_DIM, len(LABELS))
        with torch.no_grad():
            head.weight.copy_(self.weight)
            head.bias.copy_(self.bias)
        kernel = mbpa.gaussian(method.bandwidth) if method.bandwidth else mbpa.inverse_distance()
        rule = mbpa.Gradient(method.lr, method.steps, method.decay, method.momentum)
        info = RunInfo(
            key_dim=KEY_DIM,
            labels=LABELS,
            trained_examples=len(trained),
            threshold=self.threshold,
            encoder=BagEncoder.name,
            fingerprint=BagEncoder().fingerprint,
        )
        write_run(
            directory,
            info,
            head,
            mbpa.Adapted(rule, k=method.k, kernel=kernel),
            [(each.label, each.text) for each in trained],
            stack_keys([each.key for each in trained]),
            self._make_rows(head) if method.has_rows else None,
        )

    def _make_rows(self, head: nn.Linear) -> NewRows:
        keys = stack_keys([each.key for each in self.trained])
        columns = torch.tensor([LABELS.index(each.label) for each in self.trained])
        sums = label_sums(keys, columns, len(LABELS))
        scale, offset = self.method.scale, self.method.offset
        weight, bias = head.weight.detach(), head.bias.detach()
        return NewRows.around(weight, bias, sums, scale=scale, offset=offset)


def stack_keys(keys: Sequence[Key]) -> Tensor:
    """Return keys as a tensor of shape (N, D), including N = 0."""
    return torch.from_numpy(np.array(keys, np.float32).reshape(-1, KEY_DIM))


# Operations


@dataclass(frozen=True)
class Operation:
    """A request, or another event in the life of a service.

    Args:
        kind: the path of a request without its slash, "restart" or "compare".
        body: a JSON value; bytes are sent unchanged.
        refusal: the status with which any service must refuse the request, whatever its state.
        seed: seed of the choices that the operation leaves open.
    """

    kind: str
    body: Any = None
    refusal: int | None = None
    method: str = "POST"
    content_type: bytes = b"application/json"
    seed: int = 0
    why: str = ""

    def __str__(self) -> str:
        body = repr(self.body) if isinstance(self.body, bytes) else json.dumps(self.body)
        if len(body) > SHOWN_CHARACTERS:
            body = f"{body[:SHOWN_CHARACTERS]}..."
        return f"{self.kind} {self.why}{'' if self.body is None else body}"


class Source:
    """Draws operations that suit the current state.

    Args:
        reference: the current state; read, never changed.
        size: approximate number of examples to maintain.
    """

    def __init__(self, random: Random, reference: Reference, size: int) -> None:
        self._random, self._reference, self._size = random, reference, size
        self._named: list[dict[str, Any]] = []
        self._keys: list[list[float]] = []

    def draw(self) -> Operation:
        """Draw the next operation."""
        random = self._random
        has_many = len(self._reference.examples) > self._size
        kinds: dict[Callable[[], Operation], float] = {
            self._learn: 8 if has_many else 22,
            self._repeat: 4,
            self._reuse: 2,
            self._forget: 22 if has_many else 8,
            self._predict: 20,
            self._explain: 6,
            self._look: 12,
            self._refuse: 22,
            self._restart: 0.25,
            self._compare: 0.35,
        }
        make = random.choices(list(kinds), list(kinds.values()))[0]
        return make()

    # Well-formed requests

    def _learn(self) -> Operation:
        random = self._random
        few = random.choices((1, 2, 3, 8, 40), (50, 20, 15, 10, 1 + self._size / 100))[0]
        body: dict[str, Any] = {"examples": [self._example() for _ in range(few)]}
        if random.random() < 0.4:
            body["request"] = self._name()
            self._named.append(body)
            del self._named[:-50]
        return Operation("learn", body)

    def _name(self) -> str:
        name = f"request {self._random.getrandbits(40)}"
        return self._random.choice((name, name, name, name.ljust(200, "é"), f"\x00\n{name}"))

    def _repeat(self) -> Operation:
        if not self._named:
            return self._learn()
        body = self._random.choice(self._named)
        if self._random.random() < 0.2:  # the same examples in another form
            body = {**body, "examples": [self._say_again(each) for each in body["examples"]]}
        return Operation("learn", body, why="again ")

    def _say_again(self, example: dict[str, Any]) -> dict[str, Any]:
        if "text" in example and self._random.random() < 0.5:
            return {"label": example["label"], "text": example["text"]}
        padded = f" {example['label']}\u2003"
        return {**example, "label": padded if len(padded) <= 200 else example["label"]}

    def _reuse(self) -> Operation:
        """Draw a request that reuses a request id with other examples."""
        if not self._named:
            return self._learn()
        random, body = self._random, self._random.choice(self._named)
        examples = list(body["examples"])
        place = random.randrange(len(examples))
        match random.randrange(4):
            case 0:
                examples.append(self._example())
            case 1:
                examples[place] = {**examples[place], "label": f"not {random.random()}"}
            case 2:
                examples[place] = {"label": examples[place]["label"], "embedding": self._key()}
            case 3:
                examples = examples[::-1]
        return Operation("learn", {**body, "examples": examples}, why="reusing a request id ")

    def _forget(self) -> Operation:
        random = self._random
        here = list(self._reference.examples)
        if random.random() < 0.15:
            return Operation("forget", {"label": self._label()})
        count = random.choice((1, 1, 1, 2, 5, 1 + len(here) // 8))
        if random.random() < 0.03:
            count = len(here)  # everything
        ids = random.sample(here, min(len(here), count))
        if random.random() < 0.3:
            ids += [
                self._reference.last_id + random.randrange(1, 9),
                2**62,
                random.randrange(1, 99),
            ]
        if random.random() < 0.1:
            ids += ids
        return Operation("forget", {"ids": ids or [1]})

    def _predict(self) -> Operation:
        random = self._random
        body = self._query(random.choices((1, 2, 3, 16), (70, 15, 10, 2))[0])
        return Operation("predict", body, seed=random.getrandbits(16))

    def _explain(self) -> Operation:
        return Operation("explain", self._query(self._random.choice((1, 1, 1, 2, 4))))

    def _query(self, count: int) -> dict[str, Any]:
        random = self._random
        body: dict[str, Any]
        if random.random() < 0.35:
            body = {"texts": [self._text() for _ in range(count)]}
        else:
            body = {"embeddings": [self._key() for _ in range(count)]}
        if random.random() < 0.4:
            body["top"] = random.choice((1, 2, 7, MAX_TOP))
        if random.random() < 0.4:
            body["threshold"] = random.choice((0, 0.0, 0.25, 0.5, 0.9, 1, None))
        return body

    def _look(self) -> Operation:
        return Operation(self._random.choice(("labels", "stats", "health")), method="GET")

    def _restart(self) -> Operation:
        return Operation("restart")

    def _compare(self) -> Operation:
        random = self._random
        count = random.choice((1, 1, 3, 16))
        body = {"embeddings": [self._key() for _ in range(count)]}
        return Operation("compare", body, seed=random.getrandbits(32))

    # Parts

    def _example(self) -> dict[str, Any]:
        random = self._random
        example: dict[str, Any] = {"label": self._label()}
        match random.randrange(3):
            case 0:
                example["text"] = self._text()
            case 1:
                example["embedding"] = self._key()
            case 2:
                example |= {"text": self._text(), "embedding": self._key()}
        return example

    def _label(self) -> str:
        random = self._random
        label = random.choice(NEW_LABELS if random.random() < 0.65 else LABELS)
        is_padded = len(label) < 190 and random.random() < 0.05
        return f"\u00a0 {label} " if is_padded else label

    def _text(self) -> str:
        random = self._random
        words = random.choices(WORDS, k=random.choice((1, 2, 3, 5)))
        if random.random() < 0.02:
            words = [" \n\t".join(words), "ß🙂\u200b", "x" * random.choice((1, 9000))]
        return " ".join(words)

    def _key(self) -> list[float]:
        """Draw a key of unit norm; many are equally near to others, or copies of earlier ones."""
        random = self._random
        kind = random.random()
        if kind < 0.15 and self._keys:
            return random.choice(self._keys)
        if kind < 0.3 and self._reference.examples:
            held: list[float] = random.choice(list(self._reference.examples.values())).key.tolist()
            return held
        if kind < 0.5:  # keys and distances between them are exact in float32
            key = [0.0] * KEY_DIM
            for place in random.sample(range(KEY_DIM), 4):
                key[place] = random.choice((0.5, -0.5))
            return key
        if kind < 0.53:
            key = [0] * KEY_DIM
            key[random.randrange(KEY_DIM)] = random.choice((1, -1))
            return key
        drawn = np.array([random.gauss(0, 1) for _ in range(KEY_DIM)])
        if kind < 0.7 and self._keys:  # very near to an earlier key
            drawn = np.array(random.choice(self._keys)) + 10 ** random.uniform(-8, -2) * drawn
        drawn *= random.choice((1, 1, 1, 1.009, 0.991)) / np.linalg.norm(drawn)
        near: list[float] = drawn.astype(np.float32).tolist()
        self._keys.append(near)
        del self._keys[:-100]
        return near

    # Requests that no service may accept

    def _refuse(self) -> Operation:
        return self._random.choice(self.list_bad_requests())

    def list_bad_requests(self) -> list[Operation]:
        """Return one request of each kind that must be refused and change nothing."""
        return [
            replace(Operation(kind, body, status, *rest), why=f"({why}) ")
            for why, (kind, body, status, *rest) in self._describe_bad_requests().items()
        ]

    def _describe_bad_requests(self) -> dict[str, tuple[Any, ...]]:
        """Return path, body and status by name, with method and type where they are unusual."""
        good = self._example()
        label, key, text = good["label"], self._key(), self._text()
        asks = self._random.choice(("predict", "explain"))
        many = {"predict": 257, "explain": 17}[asks]
        valid = json.dumps({"examples": [good]}).encode()

        def teach(**wrong: Any) -> tuple[str, Any, int]:
            examples = [good, {"label": label, "text": text, **wrong}, good]
            return "learn", {"examples": examples}, 422

        return {
            "cut off": ("learn", valid[:-3], 400),
            "empty body": ("learn", b"", 422),
            "not UTF-8": ("learn", valid.replace(b'"label"', b'"label\xff"'), 400),
            "too deep": ("learn", b"[" * 100_000, 400),
            "number too long": ("forget", b'{"ids": [' + b"1" * 5000 + b"]}", 400),
            "single quotes": ("forget", b"{'ids': [1]}", 400),
            "two values": ("learn", valid + valid, 400),
            "plain text": ("learn", valid, 422, "POST", b"text/plain"),
            "an array": ("learn", [good], 422),
            "null": ("learn", None, 422),
            "a string": ("forget", "ids", 422),
            "no such path": ("nothing", {}, 404),
            "no such method": ("learn", {}, 405, "GET", b""),
            "reading by POST": ("labels", {}, 405),
            "no examples": ("learn", {"examples": []}, 422),
            "examples missing": ("learn", {}, 422),
            "257 examples": ("learn", {"examples": [good] * 257}, 422),
            "101 labels": self._too_many_labels(),
            "misspelt field": ("learn", {"examples": [good], "requst": "a"}, 422),
            "misspelt part": teach(txt="a"),
            "label missing": ("learn", {"examples": [good, {"text": text}]}, 422),
            "label alone": ("learn", {"examples": [good, {"label": label}]}, 422),
            "label empty": teach(label=""),
            "label of spaces": teach(label=" \u2003 "),
            "label null": teach(label=None),
            "label a number": teach(label=3),
            "label too long": teach(label="x" * 201),
            "label with a line break": teach(label="a\nb"),
            "label with NUL": teach(label="a\0"),
            "label with a surrogate": teach(label="a\ud800"),
            "text empty": teach(text=""),
            "text of spaces": teach(text=" \n\t"),
            "text too long": teach(text="x" * 10_001),
            "text with a bell": teach(text="a\a"),
            "text with C1": teach(text="a\x85b"),
            "text with a surrogate": teach(text="\udfff"),
            "picture beside a text": teach(image="QUJD"),
            "picture": ("learn", {"examples": [good, {"label": label, "image": "QUJD"}]}, 422),
            "key too short": teach(embedding=key[:-1]),
            "key too long": teach(embedding=[*key, 0.0]),
            "key empty": teach(embedding=[]),
            "key of norm 2": teach(embedding=[2 * number for number in key]),
            "key of zeros": teach(embedding=[0] * KEY_DIM),
            "key with NaN": teach(embedding=[float("nan"), *key[1:]]),
            "key with infinity": teach(embedding=[float("inf"), *key[1:]]),
            "key too large": teach(embedding=[1e300, *key[1:]]),
            "key with a string": teach(embedding=["1", *key[1:]]),
            "key with a boolean": teach(embedding=[True] + [0] * (KEY_DIM - 1)),
            "key nested": teach(embedding=[[number] for number in key]),
            "request empty": ("learn", {"examples": [good], "request": ""}, 422),
            "request too long": ("learn", {"examples": [good], "request": "r" * 201}, 422),
            "request a number": ("learn", {"examples": [good], "request": 7}, 422),
            "request a surrogate": ("learn", {"examples": [good], "request": "\ud800"}, 422),
            "nothing to forget": ("forget", {}, 422),
            "both ids and label": ("forget", {"ids": [1], "label": label}, 422),
            "no ids": ("forget", {"ids": []}, 422),
            "id 0": ("forget", {"ids": [1, 0]}, 422),
            "id below 0": ("forget", {"ids": [1, -1]}, 422),
            "id too large": ("forget", {"ids": [1, 2**62 + 1]}, 422),
            "id a string": ("forget", {"ids": [1, "1"]}, 422),
            "id a fraction": ("forget", {"ids": [1, 1.5]}, 422),
            "id a float": ("forget", {"ids": [1.0]}, 422),
            "id a boolean": ("forget", {"ids": [True]}, 422),
            "10,001 ids": ("forget", {"ids": [1] * 10_001}, 422),
            "forgotten label empty": ("forget", {"label": " "}, 422),
            "forgotten label with NUL": ("forget", {"label": "\0"}, 422),
            "no queries": (asks, {"texts": []}, 422),
            "nothing asked": (asks, {"top": 1}, 422),
            "two kinds of queries": (asks, {"texts": [text], "embeddings": [key]}, 422),
            "pictures asked": (asks, {"images": ["QUJD"]}, 422),
            "too many texts": (asks, {"texts": [text] * many}, 422),
            "too many keys": (asks, {"embeddings": [key] * many}, 422),
            "ragged keys": (asks, {"embeddings": [key, key[:-1]]}, 422),
            "asked key of norm 2": (asks, {"embeddings": [key, [2 * each for each in key]]}, 422),
            "asked text of spaces": (asks, {"texts": [text, " "]}, 422),
            "top 0": (asks, {"texts": [text], "top": 0}, 422),
            "top 101": (asks, {"texts": [text], "top": 101}, 422),
            "top a string": (asks, {"texts": [text], "top": "3"}, 422),
            "top null": (asks, {"texts": [text], "top": None}, 422),
            "threshold below 0": (asks, {"texts": [text], "threshold": -1e-9}, 422),
            "threshold above 1": (asks, {"texts": [text], "threshold": 1.0001}, 422),
            "threshold NaN": (asks, {"texts": [text], "threshold": float("nan")}, 422),
            "threshold a boolean": (asks, {"texts": [text], "threshold": True}, 422),
            "text is one string": (asks, {"texts": text}, 422),
        }

    def _too_many_labels(self) -> tuple[str, Any, int]:
        examples = [{"label": f"one of 101: {n}", "text": "apple"} for n in range(101)]
        return "learn", {"examples": examples}, 422


# A service and its reference

Contents = Mapping[int, ReferenceExample]
"""Examples by id."""


class Session:
    """A service in this process together with its reference; use `open_session`.

    Args:
        directory: for the run and for other runs that it is compared with.
        kind: class of the served classifier; tests serve broken ones.
    """

    def __init__(self, plan: Plan, directory: Path, kind: type[Classifier] = Classifier) -> None:
        self._plan, self._directory, self._kind = plan, directory, kind
        self._run = directory / "run"
        plan.write(self._run, plan.trained)
        self.reference = Reference(LABELS, plan.trained, encode_text)
        self._oracle = Oracle(
            plan.method,
            plan.weight.double().numpy(),
            plan.bias.double().numpy(),
            LABELS,
            plan.trained,
        )
        self._opened = AsyncExitStack()
        self._head: tuple[int, Any] = (-1, None)
        self.counts: Counter[str] = Counter()
        self.worst = 0.0

    async def start(self) -> None:
        """Load the run and start its app."""
        classifier = self._opened.enter_context(
            self._kind.load(self._run, text_encoder=BagEncoder())
        )
        self._classifier = classifier
        self._app = create_app(classifier, Settings(window_s=0.0))
        await self._opened.enter_async_context(self._app.router.lifespan_context(self._app))

    async def stop(self) -> None:
        """Stop the app and close the run."""
        await self._opened.aclose()

    async def apply(self, operation: Operation) -> None:
        """Apply an operation to both and compare; `BrokenPromiseError` says what differs."""
        self.counts[operation.kind if operation.refusal is None else "refused"] += 1
        if operation.kind == "restart":
            await self.stop()
            await self.start()
            await self._check_all()
            await self._compare(Operation("compare", {"embeddings": [[1] + [0] * (KEY_DIM - 1)]}))
            return
        if operation.kind == "compare":
            await self._check_all()
            await self._compare(operation)
            return
        status, body = await self._send(operation)
        if operation.refusal is not None:
            _require_refused(status, body, operation.refusal)
            await self._check_stats()
        elif operation.kind in ("learn", "forget"):
            self._check_change(operation, status, body)
        elif operation.kind in ("predict", "explain"):
            _require_equal("status", status, 200)
            await self._check_answers(operation, body)
        elif operation.kind == "labels":
            _require_equal("labels", body, self.reference.count_labels())
        elif operation.kind == "stats":
            await self._check_stats()
        else:
            _require_equal("health", body, {"status": "ok", "reason": None})

    # Talking to the app

    async def _send(self, operation: Operation) -> tuple[int, Any]:
        body = operation.body
        if not isinstance(body, bytes):
            body = b"" if operation.method == "GET" else json.dumps(body).encode()
        headers = [(b"host", b"service"), (b"content-length", b"%d" % len(body))]
        if operation.content_type:
            headers.append((b"content-type", operation.content_type))
        path = f"/{operation.kind}"
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": operation.method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        sent: list[Any] = []

        pieces = [body]

        async def receive() -> dict[str, Any]:
            if not pieces:  # the client stays connected until it is answered
                await asyncio.Event().wait()
            return {"type": "http.request", "body": pieces.pop(), "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        await self._app(scope, receive, send)
        content = b"".join(each.get("body", b"") for each in sent)
        return sent[0]["status"], json.loads(content)

    async def _ask(self, path: str, body: Any = None) -> Any:
        operation = Operation(path, body, method="GET" if body is None else "POST")
        status, answer = await self._send(operation)
        _require_equal(f"status of {path}", status, 200)
        return answer

    # Comparing discrete results

    def _check_change(self, operation: Operation, status: int, body: Any) -> None:
        change = self.reference.learn if operation.kind == "learn" else self.reference.forget
        outcome = change(operation.body)
        if outcome.status == 422:
            _require_refused(status, body, 422)
            self.counts["refused reuse"] += 1
        elif (status, body) != outcome:
            raise BrokenPromiseError(f"{operation.kind}: got {status} {body}, not {outcome}")

    async def _check_stats(self) -> None:
        expected = {
            **self.reference.count(),
            "read_only": None,
            "threshold": self._plan.threshold,
            "takes": "texts",
            "encoder": BagEncoder.name,
            "key_dim": KEY_DIM,
            "recall": None,
            "waiting": 0,
        }
        _require_equal("stats", await self._ask("stats"), expected)

    async def _check_all(self) -> None:
        await self._check_stats()
        _require_equal("labels", await self._ask("labels"), self.reference.count_labels())
        held = {
            id: (each.label, each.text, each.key.tobytes())
            for id, each in self.reference.examples.items()
        }
        ids, keys = self._classifier.entries()
        bits = {id: key.numpy().tobytes() for id, key in zip(ids, keys, strict=True)}
        listed = {
            each.id: (each.label, each.text, bits[each.id]) for each in self._classifier.examples()
        }
        _require_equal("examples in the memory", listed, held)
        kept = {
            each.id: (each.label, each.text, each.key)
            for each in self._classifier.journal.examples()
        }
        _require_equal("examples in the journal", kept, held)

    # Comparing answers

    async def _check_answers(self, operation: Operation, body: Any) -> None:
        asked = operation.body
        queries = _read_queries(asked)
        if operation.kind == "explain":
            reasons = body["reasons"]
            answers = [each["answer"] for each in reasons]
        else:
            answers = body["answers"]
        _require_equal("number of answers", len(answers), len(queries))
        for answer in answers:
            self._check_form(asked, answer)
        if operation.kind == "predict":
            if operation.seed % 8 or len(queries) > 4 or not self.reference.examples:
                return
            again = await self._ask("explain", asked)
            reasons = again["reasons"]
            _require_equal("answers of explain", [each["answer"] for each in reasons], answers)
        for query, reason in zip(queries, reasons, strict=True):
            self._check_reason(query, reason)

    def _check_form(self, asked: Any, answer: Any) -> None:
        """Check what must hold for any answer, whatever the numbers."""
        labels = self.reference.labels
        top = answer["top"]
        shares = [each["probability"] for each in top]
        threshold = asked.get("threshold")
        threshold = self._plan.threshold if threshold is None else threshold
        best = top[0]["label"] if top and answer["confidence"] >= threshold else None
        _require_equal("label", answer["label"], best)
        _require_equal("abstains", answer["abstains"], best is None)
        _require_equal("confidence", answer["confidence"], shares[0] if shares else 0.0)
        _require_equal("length of top", len(top), min(asked.get("top", 3), len(labels)))
        named = [each["label"] for each in top]
        is_ranked = all(a >= b for a, b in pairwise(shares))
        if len({*named}) != len(named) or not {*named} <= {*labels} or not is_ranked:
            raise BrokenPromiseError(f"top must name known labels by probability, got {top}")

    def _check_reason(self, query: Key, reason: Any) -> None:
        reference = self.reference
        if not reference.examples:
            empty: Any = {
                "label": None,
                "confidence": 0.0,
                "abstains": True,
                "top": [],
                "in_scope": None,
            }
            nothing = {"answer": empty, "before": [], "neighbors": [], "change": 0.0}
            _require_equal("reason without examples", reason, nothing)
            return
        near = reason["neighbors"]
        found = [each["id"] for each in near]
        if wrong := explain_misplaced(reference, query, found, self._plan.method.k):
            raise BrokenPromiseError(wrong)
        known = [reference.examples[id] for id in found]
        _require_equal(
            "neighbours",
            [(each["label"], each["text"]) for each in near],
            [(each.label, each.text) for each in known],
        )
        labels = reference.labels
        if self._head[0] != reference.change:
            self._head = reference.change, self._oracle.build_head(reference)
        self.counts["compared with float64"] += 1
        problem = query, known, labels, self._head[1]
        expected = self._oracle.predict(*problem)
        _require_near("weight", [each["weight"] for each in near], expected.weights)
        _require_near("distance", [each["distance"] for each in near], expected.distances)
        try:
            self.worst = max(self.worst, _check_numbers(labels, reason, expected, TOLERANCE))
        except BrokenPromiseError:
            spread = self._oracle.measure_spread(*problem)
            if spread < TOLERANCE / SPREAD_FACTOR:
                raise
            self.counts["compared with float64, ill-conditioned"] += 1
            _check_numbers(labels, reason, expected, SPREAD_FACTOR * spread)

    # Comparing with a classifier that has no history

    async def _compare(self, operation: Operation) -> None:
        """Compare with a new run taught the current examples in random order, to the bit."""
        random = Random(operation.seed)
        keys = operation.body["embeddings"]
        texts = [" ".join(random.choices(WORDS, k=2)) for _ in range(3)]
        queries: list[Any] = [{"embeddings": keys}, {"texts": texts}]
        with tempfile.TemporaryDirectory(dir=self._directory) as place:
            fresh, contents = self._teach_anew(Path(place) / "run", random)
            with fresh:
                for query in queries:
                    await self._compare_query(query, fresh, contents)

    async def _compare_query(self, query: Any, fresh: Classifier, contents: Contents) -> None:
        keys = stack_keys(_read_queries(query))
        body = {**query, "top": MAX_TOP, "threshold": 0.0}
        got = (await self._ask("predict", body))["answers"]
        answers = fresh.predict(keys=keys, top=MAX_TOP, threshold=0.0)
        _require_equal("bits of answers", got, [_describe_answer(each) for each in answers])
        got = (await self._ask("explain", body))["reasons"]
        reasons = fresh.explain(keys=keys, top=MAX_TOP, threshold=0.0)
        _require_equal(
            "bits of reasons",
            [_strip_ids(each, self.reference.examples) for each in got],
            [_describe_reason(each, contents) for each in reasons],
        )

    def _teach_anew(self, run: Path, random: Random) -> tuple[Classifier, Contents]:
        examples = list(self.reference.examples.values())
        random.shuffle(examples)
        trained = [each for each in examples if each.is_trained]
        taught = [each for each in examples if not each.is_trained]
        self._plan.write(run, trained)
        fresh = Classifier.load(run, text_encoder=BagEncoder())
        start = 0
        while start < len(taught):
            part = taught[start : start + random.choice((1, 7, 100, 1000))]
            lessons = [
                Lesson(each.label, each.text, torch.from_numpy(each.key.copy())) for each in part
            ]
            fresh.learn(lessons)
            start += len(part)
        return fresh, dict(enumerate([*trained, *taught], 1))


def _check_numbers(
    labels: Sequence[str], reason: Any, expected: Expected, tolerance: float
) -> float:
    """Compare probabilities and their ranks; return the largest difference."""
    scale = max(1.0, expected.change)
    off = _require_near("change", [reason["change"] / scale], [expected.change / scale], tolerance)
    columns = {label: column for column, label in enumerate(labels)}
    for what, top, shares in (
        ("before", reason["before"], expected.before),
        ("after", reason["answer"]["top"], expected.after),
    ):
        given = [each["probability"] for each in top]
        own = [shares[columns[each["label"]]] for each in top]
        ranked = np.sort(shares)[::-1][: len(top)]
        off = max(
            off,
            _require_near(f"probability {what}", given, own, tolerance),
            _require_near(f"rank {what}", own, ranked, tolerance),
        )
    return off


def _require_near(
    what: str, given: Sequence[float], expected: Any, tolerance: float = TOLERANCE
) -> float:
    off = float(np.abs(np.asarray(given) - np.asarray(expected)).max())
    if not off <= tolerance:
        raise BrokenPromiseError(f"{what} is off by {off:.3g}: {given}, not {list(expected)}")
    return off


def _read_queries(body: Any) -> list[Key]:
    if body.get("texts") is not None:
        return [encode_text(text) for text in body["texts"]]
    return [np.array(key, np.float32) for key in body["embeddings"]]


def _describe_answer(answer: Answer) -> dict[str, Any]:
    """Return an answer in the form that the service sends."""
    return {
        "label": answer.label,
        "confidence": answer.confidence,
        "abstains": answer.abstains,
        "in_scope": answer.in_scope,
        "top": [{"label": label, "probability": share} for label, share in answer.top],
    }


def _describe_reason(reason: Reason, contents: Contents) -> dict[str, Any]:
    """Return a reason without ids and texts, which depend on the order of teaching."""
    return {
        "answer": _describe_answer(reason.answer),
        "before": [{"label": label, "probability": share} for label, share in reason.before],
        "neighbors": [
            (contents[each.id].content, each.weight, each.distance) for each in reason.neighbors
        ],
        "change": reason.change,
    }


def _strip_ids(reason: Any, contents: Contents) -> dict[str, Any]:
    neighbors = [
        (contents[each["id"]].content, each["weight"], each["distance"])
        for each in reason["neighbors"]
    ]
    return {**reason, "neighbors": neighbors}


def _require_equal(what: str, got: Any, expected: Any) -> None:
    if got != expected:
        raise BrokenPromiseError(f"{what} must be {expected}, got {got}")


def _require_refused(status: int, body: Any, expected: int) -> None:
    if status != expected or not isinstance(body, dict) or not isinstance(body.get("error"), str):
        raise BrokenPromiseError(
            f"must be refused with {expected} and one line of text, got {status} {body}"
        )


@asynccontextmanager
async def open_session(plan: Plan, kind: type[Classifier] = Classifier) -> AsyncIterator[Session]:
    """Start a service on a run written as planned, and delete it afterwards."""
    with tempfile.TemporaryDirectory(prefix="operations-") as place:
        session = Session(plan, Path(place), kind)
        await session.start()
        try:
            yield session
        finally:
            await session.stop()


# Episodes


@dataclass
class Tally:
    """Counts of what was done so far."""

    counts: Counter[str] = field(default_factory=Counter)
    operations: int = 0
    episodes: int = 0
    worst: float = 0.0


async def run_episode(
    seed: int,
    number: int,
    count: int,
    tick: Callable[[], None] = lambda: None,
    kind: type[Classifier] = Classifier,
) -> Session:
    """Draw and apply operations on a new run.

    Args:
        tick: called after every operation.
        kind: class of the served classifier.

    Raises:
        BrokenPromiseError: a response is wrong; the message ends with a short way to reproduce it.
    """
    random = Random(f"{seed}/{number}")
    plan = Plan.draw(random)
    done: list[Operation] = []
    async with open_session(plan, kind) as session:
        source = Source(random, session.reference, plan.size)
        try:
            for _ in range(count):
                done.append(source.draw())
                await session.apply(done[-1])
                tick()
            return session
        except Exception as error:
            failure = error
    shrunk, why = await shrink(plan, done, failure, kind)
    shown = "\n".join(f"  {each}" for each in shrunk[-SHOWN_OPERATIONS:])
    raise BrokenPromiseError(
        f"seed {seed}, episode {number}, step {len(done)}, {plan.method}, threshold "
        f"{plan.threshold}: {str(failure)[:1000]}\nshrunk to {len(shrunk)} operations, the last "
        f"of which gives {type(why).__name__}: {str(why)[:2000]}\n{shown}"
    ) from failure


async def replay(
    plan: Plan, operations: Sequence[Operation], kind: type[Classifier]
) -> tuple[int, Exception] | None:
    """Apply these operations to a new run; return where and how they fail, or `None`."""
    async with open_session(plan, kind) as session:
        for place, operation in enumerate(operations):
            try:
                await session.apply(operation)
            except Exception as error:
                return place, error
    return None


async def shrink(
    plan: Plan,
    operations: list[Operation],
    failure: Exception,
    kind: type[Classifier],
    limit_s: float = SHRINKING_LIMIT_S,
) -> tuple[list[Operation], Exception]:
    """Leave out ever smaller parts of the operations as long as the rest still fails somewhere."""
    give_up = time.monotonic() + limit_s
    size = len(operations) // 2
    while size:
        start = 0
        while start < len(operations) - 1 and time.monotonic() < give_up:
            fewer = operations[:start] + operations[start + size :]
            failed = await replay(plan, fewer, kind) if fewer else None
            if failed is None:
                start += size
            else:
                operations, failure = fewer[: failed[0] + 1], failed[1]
        size //= 2
    return operations, failure


async def run_episodes(seed: int, count: int) -> Tally:
    """Run episodes until `count` operations are done."""
    tally, begin = Tally(), time.monotonic()
    said = begin

    def tick() -> None:
        nonlocal said
        tally.operations += 1
        now = time.monotonic()
        if now - said > PROGRESS_EVERY_S:
            said = now
            rate = tally.operations / (now - begin)
            print(
                f"{tally.operations} of {count} operations, episode {tally.episodes + 1}, "
                f"{rate:.0f} per second, farthest from float64: {tally.worst:.1e}",
                flush=True,
            )

    while tally.operations < count:
        few = min(OPERATIONS_PER_EPISODE, count - tally.operations)
        session = await run_episode(seed, tally.episodes, few, tick)
        tally.episodes += 1
        tally.counts += session.counts
        tally.worst = max(tally.worst, session.worst)
    return tally


# The trial


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=200_000, help="number of operations")
    parser.add_argument("--seed", type=int, default=0, help="seed of the operations")


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    sys.setswitchinterval(5e-4)  # the same as in `mbpa serve`
    start = time.monotonic()
    tally = asyncio.run(run_episodes(arguments.seed, arguments.count))
    return {
        "seed": arguments.seed,
        "operations": tally.operations,
        "episodes": tally.episodes,
        "operations_per_second": round(tally.operations / (time.monotonic() - start), 1),
        "mismatches": 0,
        "farthest_from_float64": tally.worst,
        "counts": dict(sorted(tally.counts.items())),
    }


TRIAL = Trial(
    name="operations",
    summary="random operations on the service, compared with a plain model of it",
    add_arguments=_add_arguments,
    run=_run,
)
