"""Concurrent clients of a real server, whose recorded histories must be linearizable.

Threads teach, forget and query one `mbpa serve` process at the same time. Some requests are cut off
before their response, and some are repeated by another client under the same request id. Every
response reveals part of the state that it was computed from: `/explain` names all examples,
`/predict` names all labels, `/labels` and `/stats` count them. Counters and ids are shared by all
labels, so a history cannot be split by label; it is checked as a whole.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch import nn

import mbpa
from mbpa.serve.client import POSITION_HEADER
from mbpa.serve.follower import LATEST
from mbpa.serve.run_info import RunInfo, write_run
from reliability.linearizability import Event, Verdict, check_history
from reliability.trial import BrokenPromiseError, Trial

KEY_DIM = 8
TRAINED_LABELS = ("trained 0", "trained 1")
TRAINED_EXAMPLES = 4
NEIGHBORS = 500  # more than there are examples: /explain names all of them
LABELS_PER_HISTORY = 4
LOST_SHARE = 0.06  # share of requests whose connection is cut before the response
START_LIMIT_S = 120.0
ANSWER_LIMIT_S = 60.0
IDLE_LOOKS = 3
IDLE_PAUSE_S = 0.02
SHOWN_EVENTS = 25


# The specification


class Request(NamedTuple):
    """A named call to learn that took effect: its first id, and the labels of its examples."""

    name: str
    first: int
    labels: tuple[str, ...]


class ServiceState(NamedTuple):
    """The state of the service, as far as its responses show it.

    Args:
        live: id and label of every example.
        change: number of writes.
    """

    live: frozenset[tuple[int, str]]
    next_id: int
    change: int
    requests: frozenset[Request] = frozenset()


class Lesson(NamedTuple):
    """The argument of learn: the labels of its examples, and a request id."""

    labels: tuple[str, ...]
    request: str | None = None


class Acknowledged(NamedTuple):
    """The result of learn: the ids and the number of labels; `None` if that is left open."""

    ids: tuple[int, ...]
    labels: int | None


class Counted(NamedTuple):
    """The result of stats."""

    examples: int
    labels: int
    change: int


REFUSED = "refused"


def step_service(state: ServiceState, event: Event) -> ServiceState | None:
    """Return the state after an operation, or `None` if its result contradicts the state before.

    Kinds: "learn" takes a `Lesson` and returns `Acknowledged`; "forget" takes ids (a tuple) or a
    label (a string) and returns the ids that existed. The others take nothing: "explain" returns
    the ids of all examples, "predict" all labels, "labels" counts by label, "count" the number of
    labels, "stats" `Counted`.
    """
    if event.kind == "learn":
        after, result = _learn(state, event.argument)
    elif event.kind == "forget":
        after, result = _forget(state, event.argument)
    else:
        after, result = state, _look(state, event.kind)
    if isinstance(event.result, Acknowledged) and event.result.labels is None:
        result = isinstance(result, Acknowledged) and result._replace(labels=None)
    return after if event.is_lost or event.result == result else None


def _learn(state: ServiceState, lesson: Lesson) -> tuple[ServiceState, Any]:
    for known in state.requests:
        if known.name == lesson.request:
            if known.labels != lesson.labels:
                return state, REFUSED
            ids = range(known.first, known.first + len(known.labels))
            return state, Acknowledged(tuple(ids), _count_labels(state))
    ids = range(state.next_id, state.next_id + len(lesson.labels))
    requests = state.requests
    if lesson.request is not None:
        requests |= {Request(lesson.request, state.next_id, lesson.labels)}
    after = ServiceState(
        state.live | set(zip(ids, lesson.labels, strict=True)),
        state.next_id + len(lesson.labels),
        state.change + 1,
        requests,
    )
    return after, Acknowledged(tuple(ids), _count_labels(after))


def _forget(
    state: ServiceState, argument: tuple[int, ...] | str
) -> tuple[ServiceState, tuple[int, ...]]:
    if isinstance(argument, str):
        gone = {each for each in state.live if each[1] == argument}
    else:
        wanted = frozenset(argument)
        gone = {each for each in state.live if each[0] in wanted}
    ids = tuple(sorted(id for id, _ in gone))
    if not gone:
        return state, ids
    return state._replace(live=state.live - gone, change=state.change + 1), ids


def _look(state: ServiceState, kind: str) -> Any:
    if kind == "explain":
        return frozenset(id for id, _ in state.live)
    if kind == "predict":
        return frozenset(label for _, label in state.live)
    if kind == "labels":
        return frozenset(Counter(label for _, label in state.live).items())
    if kind == "count":
        return _count_labels(state)
    if kind == "stats":
        return Counted(len(state.live), _count_labels(state), state.change)
    raise ValueError(f"kind must be one that the service has, got {kind!r}")


def _count_labels(state: ServiceState) -> int:
    return len({label for _, label in state.live})


def separate_counts(history: Sequence[Event]) -> list[Event]:
    """Return the history with the label counts of learn as separate, simultaneous reads."""
    separate = []
    for event in history:
        if isinstance(event.result, Acknowledged):
            read = replace(event, kind="count", argument=None, result=event.result.labels)
            separate.append(read)
            event = replace(event, result=event.result._replace(labels=None))
        separate.append(event)
    return separate


def leave_counts_open(history: Sequence[Event]) -> list[Event]:
    """Return the history without the label counts of learn.

    A replica counts after it has applied a lesson, and perhaps later ones of others with it.
    """
    return [
        replace(event, result=event.result._replace(labels=None))
        if isinstance(event.result, Acknowledged)
        else event
        for event in history
    ]


# The server


def write_small_run(directory: Path) -> None:
    """Write a run that takes keys only and has four examples of two labels."""
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(KEY_DIM, len(TRAINED_LABELS))
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    info = RunInfo(
        key_dim=KEY_DIM,
        labels=TRAINED_LABELS,
        trained_examples=TRAINED_EXAMPLES,
        threshold=0.0,
        encoder=None,
    )
    named = [(TRAINED_LABELS[number % 2], None) for number in range(TRAINED_EXAMPLES)]
    keys = torch.randn(TRAINED_EXAMPLES, KEY_DIM, generator=generator)
    predictor = mbpa.Adapted(mbpa.Gradient(lr=0.5, steps=2), k=NEIGHBORS)
    write_run(directory, info, head, predictor, named, nn.functional.normalize(keys, dim=1))


@contextlib.contextmanager
def serve(run: Path) -> Iterator[int]:
    """Run `mbpa serve` in a process of its own and yield its port."""
    command = [sys.executable, "-m", "mbpa.cli", "serve", str(run), "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MBPA_TOKEN": ""}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    guard = threading.Timer(START_LIMIT_S, process.kill)
    guard.start()
    assert process.stdout is not None
    drain = threading.Thread(target=process.stdout.read, daemon=True)
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            if "serving on " in line:
                break
        else:
            raise BrokenPromiseError(f"the server did not start: {''.join(said)}")
        guard.cancel()
        drain.start()
        yield int(line.split("serving on ")[1].rsplit(":", 1)[1].split("/")[0])
    finally:
        guard.cancel()
        process.send_signal(signal.SIGTERM)
        process.wait(ANSWER_LIMIT_S)
        if drain.ident is not None:
            drain.join()
        process.stdout.close()


class Positions:
    """The highest position in the log of all replicas that any client has seen.

    Args:
        asks_latest: requests ask for everything that was acknowledged before them instead.
    """

    def __init__(self, *, asks_latest: bool = False) -> None:
        self._asks_latest, self._lock, self._highest = asks_latest, threading.Lock(), 0

    def make_headers(self) -> dict[str, str]:
        """Return the headers of a request that must know as much."""
        return {POSITION_HEADER: LATEST if self._asks_latest else str(self._highest)}

    def add(self, answer: http.client.HTTPResponse) -> None:
        """Note the position of an answer."""
        with self._lock:
            self._highest = max(self._highest, int(answer.headers[POSITION_HEADER]))


class Connection:
    """A connection to the server; the next request after a cut reconnects.

    Args:
        ports: ports of the server, or of replicas, of which each request goes to a random one.
        positions: what the clients of replicas have seen.
    """

    def __init__(self, ports: Sequence[int], positions: Positions | None = None) -> None:
        self._all = [
            http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_LIMIT_S) for port in ports
        ]
        self._http, self._positions = self._all[0], positions

    def ask(self, path: str, body: Any = None) -> tuple[int, Any]:
        """Send a request, wait, and return the status and the JSON of the response."""
        self.send(path, body)
        answer = self._http.getresponse()
        content = answer.read()
        if self._positions is not None:
            self._positions.add(answer)
        is_json = answer.headers.get_content_type() == "application/json"
        return answer.status, json.loads(content) if is_json else content.decode()

    def send(self, path: str, body: Any = None) -> None:
        """Send a request without waiting for a response."""
        self._http = random.choice(self._all)
        headers = {} if self._positions is None else self._positions.make_headers()
        if body is None:
            self._http.request("GET", path, headers=headers)
        else:
            headers["Content-Type"] = "application/json"
            self._http.request("POST", path, json.dumps(body), headers)

    def disconnect(self) -> None:
        """Close the connection, even during a request."""
        for each in self._all:
            each.close()


# Clients


class Shared:
    """Data shared by the clients of a history."""

    def __init__(self, number: int, seed: str) -> None:
        self.labels = tuple(f"history {number} {seed} {n}" for n in range(LABELS_PER_HISTORY))
        self._lock = threading.Lock()
        self._ids: list[int] = []
        self._named: list[tuple[Lesson, Any]] = []

    def add_ids(self, ids: Sequence[int]) -> None:
        with self._lock:
            self._ids += ids

    def draw_ids(self, random: Random) -> list[int]:
        """Draw ids of recently added examples, which may have been forgotten since."""
        with self._lock:
            recent = self._ids[-12:]
        return random.sample(recent, min(len(recent), random.choice((1, 1, 2)))) or [10**9]

    def add_named(self, lesson: Lesson, body: Any) -> None:
        with self._lock:
            self._named.append((lesson, body))

    def draw_named(self, random: Random) -> tuple[Lesson, Any] | None:
        """Draw a lesson with a request id that some client has sent or is sending."""
        with self._lock:
            return random.choice(self._named[-6:]) if self._named else None


class Client(threading.Thread):
    """Sends random requests, one after the other, and records them.

    Args:
        operations: number of requests.
        begin: barrier at which all clients wait for one another.
    """

    def __init__(
        self,
        number: int,
        connection: Connection,
        shared: Shared,
        random: Random,
        operations: int,
        begin: threading.Barrier,
    ) -> None:
        super().__init__(name=f"client {number}", daemon=True)
        self._number, self._shared, self._random = number, shared, random
        self._operations, self._begin = operations, begin
        self._connection = connection
        self.events: list[Event] = []
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            self._begin.wait()
            for _ in range(self._operations):
                self._operate()
        except Exception as error:
            self.failure = error
        finally:
            self._connection.disconnect()

    def _operate(self) -> None:
        kind, argument, body = self._draw()
        is_lost = self._random.random() < LOST_SHARE
        called = time.monotonic_ns()
        if is_lost:
            self._connection.send(f"/{kind}", body)
            time.sleep(self._random.choice((0, 0, 0.001, 0.005)))
            self._connection.disconnect()
            self.events.append(Event(self._number, kind, argument, called))
            return
        status, answer = self._connection.ask(f"/{kind}", body)
        returned = time.monotonic_ns()
        result: Any = REFUSED
        if status == 422 and kind == "learn":
            pass  # the request id was used for other examples before
        elif status == 200:
            result = read_result(kind, answer)
        else:
            raise BrokenPromiseError(f"{kind} {body}: got {status} {answer}")
        if isinstance(result, Acknowledged):
            self._shared.add_ids(result.ids)
        self.events.append(Event(self._number, kind, argument, called, returned, result))

    def _draw(self) -> tuple[str, Any, Any]:
        """Draw the kind, argument and body of a request."""
        random, shared = self._random, self._shared
        kinds = {"learn": 28, "again": 8, "other": 3, "forget": 20, "forget label": 4}
        kinds |= {"predict": 9, "explain": 9, "labels": 9, "stats": 10}
        kind = random.choices(list(kinds), list(kinds.values()))[0]
        if kind == "forget":
            ids = shared.draw_ids(random)
            return "forget", tuple(ids), {"ids": ids}
        if kind == "forget label":
            label = random.choice(shared.labels)
            return "forget", label, {"label": label}
        if kind in ("predict", "explain"):
            body = {"embeddings": [self._draw_key()], "top": 100, "threshold": 0}
            return kind, None, body
        if kind in ("labels", "stats"):
            return kind, None, None
        named = None if kind == "learn" else shared.draw_named(random)
        if named is None:
            return self._draw_lesson()
        lesson, body = named
        if kind == "again":
            return "learn", lesson, body
        # The same for every client: the specification tells lessons apart by their labels alone.
        more = {"label": shared.labels[0], "embedding": body["examples"][0]["embedding"]}
        other = Lesson((*lesson.labels, shared.labels[0]), lesson.request)
        return "learn", other, {**body, "examples": [*body["examples"], more]}

    def _draw_lesson(self) -> tuple[str, Lesson, Any]:
        random = self._random
        labels = tuple(random.choices(self._shared.labels, k=random.choice((1, 1, 2, 3))))
        body: dict[str, Any] = {
            "examples": [{"label": label, "embedding": self._draw_key()} for label in labels]
        }
        if random.random() < 0.5:
            return "learn", Lesson(labels), body
        body["request"] = f"{self._shared.labels[0]} {random.getrandbits(48)}"
        lesson = Lesson(labels, body["request"])
        self._shared.add_named(lesson, body)
        return "learn", lesson, body

    def _draw_key(self) -> list[float]:
        numbers = [self._random.gauss(0, 1) for _ in range(KEY_DIM)]
        length = sum(number**2 for number in numbers) ** 0.5
        return [number / length for number in numbers]


def read_result(kind: str, answer: Any) -> Any:
    """Return the part of a response that the specification covers."""
    if kind == "learn":
        return Acknowledged(tuple(answer["ids"]), answer["labels"])
    if kind == "forget":
        return tuple(answer["ids"])
    if kind == "explain":
        return frozenset(each["id"] for each in answer["reasons"][0]["neighbors"])
    if kind == "predict":
        return frozenset(each["label"] for each in answer["answers"][0]["top"])
    if kind == "labels":
        return frozenset((each["label"], each["examples"]) for each in answer["labels"])
    return Counted(answer["examples"], answer["labels"], answer["change"])


# Histories


def record_history(
    ports: Sequence[int],
    number: int,
    seed: int,
    clients: int,
    operations: int,
    positions: Positions | None = None,
) -> tuple[ServiceState, list[Event]]:
    """Run clients against a server in its initial state; return that state and their records.

    Args:
        ports: ports of the server, or of its replicas.
        number: number of the history.
        seed: seed of all requests.
        clients: number of clients.
        operations: number of requests per client.
        positions: what the clients of replicas have seen.
    """
    shared = Shared(number, str(seed))
    start = read_start(Connection(ports, positions))
    begin = threading.Barrier(clients)
    threads = [
        Client(
            n,
            Connection(ports, positions),
            shared,
            Random(f"{seed}/{number}/{n}"),
            operations,
            begin,
        )
        for n in range(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for thread in threads:
        if thread.failure is not None:
            raise thread.failure
    clean(ports, shared.labels, positions)
    return start, [event for thread in threads for event in thread.events]


def read_start(connection: Connection) -> ServiceState:
    """Return the state of an idle server; teaching and forgetting an example shows the next id."""
    example = {"label": TRAINED_LABELS[0], "embedding": [1.0] + [0.0] * (KEY_DIM - 1)}
    (id,) = connection.ask("/learn", {"examples": [example]})[1]["ids"]
    connection.ask("/forget", {"ids": [id]})
    counts = connection.ask("/stats")[1]
    if counts["examples"] != TRAINED_EXAMPLES:
        raise BrokenPromiseError(f"an idle server must hold nothing but its run, got {counts}")
    connection.disconnect()
    live = ((number + 1, TRAINED_LABELS[number % 2]) for number in range(TRAINED_EXAMPLES))
    return ServiceState(frozenset(live), id + 1, counts["change"])


def clean(ports: Sequence[int], labels: Sequence[str], positions: Positions | None = None) -> None:
    """Wait until no request is in progress, including lost ones, and forget these labels."""
    connection = Connection(ports, positions)
    each_server = [Connection([port], positions) for port in ports]
    idle, seen = 0, -1
    give_up = time.monotonic() + ANSWER_LIMIT_S
    while idle < IDLE_LOOKS:
        if time.monotonic() > give_up:
            raise BrokenPromiseError("all requests must end, but some are still in progress")
        time.sleep(IDLE_PAUSE_S)
        inside = [_read_metric(each, "mbpa_in_flight") for each in each_server]
        change = connection.ask("/stats")[1]["change"]
        # 1: the request for the metrics
        idle = idle + 1 if set(inside) == {1} and change == seen else 0
        seen = change
    for label in labels:
        connection.ask("/forget", {"label": label})
    for each in (connection, *each_server):
        each.disconnect()


def _read_metric(connection: Connection, name: str) -> float:
    for line in connection.ask("/metrics")[1].splitlines():
        if line.startswith(f"{name} "):
            return float(line.split()[1])
    raise BrokenPromiseError(f"there must be a metric {name}")


def describe_violation(history: Sequence[Event], order: Sequence[int]) -> str:
    """Describe the end of the longest explained order, and the operations that cannot follow."""
    explained = [history[index] for index in order]
    rest = [event for index, event in enumerate(history) if index not in set(order)]
    ends = [event.returned for event in rest if event.returned is not None]
    stuck = [event for event in rest if event.called <= min(ends)]
    lines = [f"{len(order)} of {len(history)} operations can be explained, the last of them:"]
    lines += [f"  {event}" for event in explained[-SHOWN_EVENTS:]]
    lines += ["one of these must come next, and none can:"]
    lines += [f"  {event}" for event in stuck]
    return "\n".join(lines)


# The trial


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=100, help="number of histories")
    parser.add_argument("--clients", type=int, default=8, help="number of clients")
    parser.add_argument("--operations", type=int, default=40, help="operations per client")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds to check each history")
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests")
    parser.add_argument(
        "--separate-counts",
        action="store_true",
        help="allow the label count in a response of /learn to be from another moment than the ids",
    )


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    kinds: Counter[str] = Counter()
    verdicts: Counter[str] = Counter()
    slowest, lost, overlaps, failures = 0.0, 0, 0, []
    with tempfile.TemporaryDirectory(prefix="histories-") as place:
        write_small_run(Path(place) / "run")
        with serve(Path(place) / "run") as port:
            for number in range(arguments.count):
                start, history = record_history(
                    [port], number, arguments.seed, arguments.clients, arguments.operations
                )
                kinds += Counter(event.kind for event in history)
                lost += sum(event.is_lost for event in history)
                overlaps += _count_overlaps(history)
                if arguments.separate_counts:
                    history = separate_counts(history)
                begin = time.monotonic()
                check = check_history(history, start, step_service, arguments.limit)
                slowest = max(slowest, time.monotonic() - begin)
                verdicts[check.verdict.value] += 1
                print(f"history {number}: {check.verdict.value}, {check.tried} states", flush=True)
                if check.verdict is Verdict.VIOLATION:
                    failures.append(f"history {number}: {describe_violation(history, check.order)}")
    passed = verdicts[Verdict.LINEARIZABLE.value]
    if passed < arguments.count:
        raise BrokenPromiseError(
            f"{arguments.count - passed} of {arguments.count} histories did not pass "
            f"({dict(verdicts)}), seed {arguments.seed}\n" + "\n".join(failures[:1])
        )
    return {
        "seed": arguments.seed,
        "histories": arguments.count,
        "clients": arguments.clients,
        "operations": sum(kinds.values()),
        "overlapping_pairs": overlaps,
        "lost_answers": lost,
        "separate_counts": arguments.separate_counts,
        "kinds": dict(sorted(kinds.items())),
        "verdicts": dict(verdicts),
        "slowest_check_seconds": round(slowest, 2),
    }


def _count_overlaps(history: Sequence[Event]) -> int:
    """Count the pairs of operations that overlap in time."""
    ended = [event for event in history if event.returned is not None]
    ended.sort(key=lambda event: event.called)
    pairs = 0
    for place, event in enumerate(ended):
        for later in ended[place + 1 :]:
            if event.returned is not None and later.called > event.returned:
                break
            pairs += 1
    return pairs


TRIAL = Trial(
    name="histories",
    summary="histories of concurrent clients, checked for linearizability",
    add_arguments=_add_arguments,
    run=_run,
)
