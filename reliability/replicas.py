"""Replicas around one database: killed, cut off from it, and compared with a reference.

Kills: three replicas serve one run, four writers teach and forget over HTTP, and at random moments
a replica, a writer, the backend of a connection or the whole database is killed. Writers repeat
each call until it is acknowledged. In the end the replicas must agree to the bit, and hold exactly
what the writers' records say, which a dictionary in plain Python keeps.

Histories: clients that share the positions of their answers, or ask for the latest state, must see
one linearizable service, whichever replica answers.

Cuts: one replica reaches the database through a proxy that cuts, holds and delays.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import http.client
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from reliability import histories
from reliability.linearizability import Verdict, check_history
from reliability.postgres import PostgresServer
from reliability.proxy import Proxy
from reliability.small_run import draw_keys, write_small_run
from reliability.trial import BrokenPromiseError, Trial

REPLICAS, WRITERS = 3, 4
START_LIMIT_S, SETTLE_LIMIT_S = 60.0, 120.0
KILLS = {"replica": 5, "writer": 4, "terminated backend": 2, "killed backend": 1, "database": 2}
SHOWN_RECORDS = 12  # last records of a writer that failed, for the error message
MAX_PAUSE_S = 1.0  # between two kills
LESSONS_PER_KILL = 2  # least number acknowledged per kill, so that a slow machine tests as much
LONGEST_CUT_S = 4.0
QUERIES = draw_keys(6, seed=11).tolist()

# Processes are forked from one that has imported what replicas need.
_context = multiprocessing.get_context("forkserver")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=500, help="number of kills")
    parser.add_argument("--histories", type=int, default=100, help="number of histories")
    parser.add_argument("--cuts", type=int, default=30, help="number of cuts of the network")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    figures: dict[str, Any] = {"seed": arguments.seed}
    if arguments.kills:
        figures["kills"] = kill_replicas(arguments.kills, arguments.seed)
    if arguments.histories:
        figures["histories"] = check_histories(arguments.histories, arguments.seed)
    if arguments.cuts:
        figures["cuts"] = cut_network(arguments.cuts, arguments.seed)
    return figures


# Replicas


class Replica:
    """`mbpa serve RUN --database URL` in a process that can be killed and started again."""

    def __init__(self, run: Path, url: str) -> None:
        self._run, self._url, self.port = run, url, _find_free_port()
        self._process: Any = None

    def start(self) -> None:
        """Start the process, without waiting for it."""
        self._process = _context.Process(target=_serve, args=(self._run, self._url, self.port))
        self._process.start()

    def wait(self) -> None:
        """Wait until it answers."""
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.ask("GET", "/health")[0] == 200:
                    return
            if time.monotonic() > deadline or not self._process.is_alive():
                raise BrokenPromiseError(f"replica on port {self.port} does not start")
            time.sleep(0.05)

    def is_alive(self) -> bool:
        return bool(self._process.is_alive())

    def describe(self) -> str:
        """Return what it says of itself, and where its threads are."""
        try:
            told = str([self.ask("GET", path)[1] for path in ("/health", "/stats")])
        except (OSError, http.client.HTTPException, ValueError) as error:
            told = repr(error)
        if self.is_alive():
            os.kill(self._process.pid, signal.SIGUSR1)
            time.sleep(1)
        path = _stacks_path(self._run, self.port)
        return f"{told}\n{path.read_text() if path.exists() else ''}"

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.join(15)
            self._process.kill()
            self._process.join()

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, Any]:
        """Send a request over a connection of its own; return status, JSON and headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            return send(connection, method, path, body, headers)


def send(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
) -> tuple[int, Any, Any]:
    """Send a request and return the status, the JSON and the headers of the answer."""
    content = None if body is None else json.dumps(body)
    connection.request(
        method, path, content, {"Content-Type": "application/json", **(headers or {})}
    )
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read()), answer.headers


def _serve(run: Path, url: str, port: int) -> None:
    from mbpa.serve.server import serve

    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    stacks = _stacks_path(run, port).open("w")
    faulthandler.register(signal.SIGUSR1, stacks)
    while True:
        try:
            serve(run, port=port, database=url)
        except Exception:  # the database may be away; an operator would start it again
            time.sleep(0.2)
        else:
            return


def _stacks_path(run: Path, port: int) -> Path:
    return run.parent / f"stacks-{port}"


@contextlib.contextmanager
def run_replicas(run: Path, urls: Sequence[str]) -> Iterator[list[Replica]]:
    """Start replicas, and stop them in the end."""
    os.environ["OMP_NUM_THREADS"] = "1"
    _context.set_forkserver_preload(["mbpa.serve.server", "mbpa.serve.postgres_journal"])
    replicas = [Replica(run, url) for url in urls]
    try:
        for each in replicas:
            each.start()
        for each in replicas:
            each.wait()
        yield replicas
    finally:
        for each in replicas:
            each.stop()


def require_equal(replicas: Sequence[Replica]) -> dict[str, Any]:
    """Wait until all replicas are at one position; return their answers, which must be equal."""
    deadline = time.monotonic() + SETTLE_LIMIT_S
    while True:
        found = []
        for each in replicas:
            with contextlib.suppress(OSError, http.client.HTTPException):
                found.append(_read_answers(each))
        positions = {answers["position"] for answers in found}
        if len(found) == len(replicas) and len(positions) == 1:
            break
        if time.monotonic() > deadline:
            raise BrokenPromiseError(f"the replicas do not reach one position, but {positions}")
        time.sleep(0.2)
    for answers in found[1:]:
        if answers != found[0]:
            raise BrokenPromiseError(f"replicas differ at position {answers['position']}")
    return found[0]


def _read_answers(replica: Replica) -> dict[str, Any]:
    latest = {"X-MbPA-Position": "latest"}
    body = {"embeddings": QUERIES, "top": 100, "threshold": 0}
    answers = {}
    for path in ("/predict", "/explain"):
        status, answers[path], _ = replica.ask("POST", path, body, latest)
        if status != 200:
            raise http.client.HTTPException(f"{path} answered {status}")
    answers["/labels"] = replica.ask("GET", "/labels", None, latest)[1]
    stats = replica.ask("GET", "/stats", None, latest)[1]
    return answers | {"position": stats["change"], "examples": stats["examples"]}


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# Kills


class Writer:
    """A process that teaches and forgets, and records what it asks for and what is acknowledged."""

    def __init__(self, folder: Path, number: int, ports: Sequence[int]) -> None:
        self._folder, self._number, self._ports, self._life = folder, number, ports, 0
        self._process: Any = None

    def start(self) -> None:
        self._life += 1
        name = f"{self._number}-{self._life}"
        self._record = self._folder / f"{name}.jsonl"
        arguments = name, self._record, self._ports, self._folder / "stop"
        self._process = _context.Process(target=_write, args=arguments)
        self._process.start()

    def kill(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.join()

    def join(self) -> None:
        self._process.join(SETTLE_LIMIT_S)
        if self._process.exitcode != 0:
            ended = f"a writer ended with {self._process.exitcode}"
            if self._process.exitcode is None:
                ended = f"a writer has not ended after {SETTLE_LIMIT_S:g} s"
            last = self._record.read_text().splitlines()[-SHOWN_RECORDS:]
            raise BrokenPromiseError("; ".join([ended, "its last records", *last]))


class Record:
    """A file of JSON lines that keeps what was written if the process is killed."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def add(self, *line: Any) -> None:
        os.write(self._file, json.dumps(line).encode() + b"\n")


def _write(who: str, path: Path, ports: Sequence[int], stop: Path) -> None:
    """Teach and forget until the file `stop` appears, repeating each call until it succeeds."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    draw, record, mine = random.Random(who), Record(path), dict[str, list[int]]()
    keys, number = draw_keys(8, seed=2).tolist(), 0
    connections = [http.client.HTTPConnection("127.0.0.1", port, timeout=20) for port in ports]
    while not stop.exists():
        number += 1
        if mine and draw.random() < 0.4:
            name = draw.choice(list(mine))
            ids = mine.pop(name)
            record.add("forget", name)
            _insist(draw, connections, "/forget", {"ids": ids}, record)
            record.add("forgotten", name)
            continue
        name, label = f"{who}-{number}", f"taught {draw.randrange(4)}"
        count = draw.choice([1, 1, 3])
        examples = [
            {"label": label, "text": f"{name}/{i}", "embedding": draw.choice(keys)}
            for i in range(count)
        ]
        record.add("learn", name, label, count)
        answer = _insist(
            draw, connections, "/learn", {"examples": examples, "request": name}, record
        )
        record.add("learnt", name, answer["ids"])
        mine[name] = answer["ids"]


def _insist(
    draw: random.Random,
    connections: Sequence[http.client.HTTPConnection],
    path: str,
    body: Any,
    record: Record,
) -> Any:
    """Repeat a call, to any replica, until it is acknowledged."""
    while True:
        connection = draw.choice(connections)
        try:
            status, answer, _ = send(connection, "POST", path, body)
        except (OSError, http.client.HTTPException, ValueError):
            connection.close()
            record.add("failed")
            time.sleep(0.02)
            continue
        if status == 200:
            return answer
        if status not in (429, 503):
            record.add("broken", path, status, answer)
            raise BrokenPromiseError(f"{path} answered {status}: {answer}")
        record.add("refused", status, answer.get("error"))
        time.sleep(0.05)


def kill_replicas(times: int, seed: int) -> dict[str, Any]:
    """Kill replicas, writers, backends and the database; return counts."""
    draw, counts = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as place, PostgresServer() as database:
        folder = Path(place)
        write_small_run(folder / "run")
        _copy(folder / "run", database.url)
        with run_replicas(folder / "run", [database.url] * REPLICAS) as replicas:
            writers = [
                Writer(folder, number, [each.port for each in replicas])
                for number in range(WRITERS)
            ]
            start = time.monotonic()
            with _explaining_failures(writers, replicas, database):
                for writer in writers:
                    writer.start()
                for number in range(1, times + 1):
                    _wait_for_lessons(folder, LESSONS_PER_KILL * number)
                    time.sleep(draw.uniform(0, MAX_PAUSE_S))
                    kind = draw.choices(list(KILLS), list(KILLS.values()))[0]
                    _kill(kind, draw, replicas, writers, database)
                    counts[kind] += 1
                    if number % 20 == 0:
                        print(f"kills: {number} {dict(counts)}", file=sys.stderr, flush=True)
                minutes = (time.monotonic() - start) / 60
                (folder / "stop").touch()
                for writer in writers:
                    writer.join()
            for each in replicas:
                each.wait()
            answers = require_equal(replicas)
            calls = compare_with_records(folder, replicas[0])
            _require_others_equal(folder, database.url, answers)
    return {
        "kills": times,
        "by_kind": dict(sorted(counts.items())),
        "minutes": round(minutes, 1),
        "replicas": REPLICAS,
        "writers": WRITERS,
        "position": answers["position"],
        "examples": answers["examples"],
        **calls,
    }


@contextlib.contextmanager
def _explaining_failures(
    writers: Sequence[Writer], replicas: Sequence[Replica], database: PostgresServer
) -> Iterator[None]:
    """Add to a broken promise what replicas and database say, and end the writers."""
    try:
        yield
    except BrokenPromiseError as error:
        told = [str(error), *(each.describe() for each in replicas), database.read_log()[-4000:]]
        raise BrokenPromiseError("\n\n".join(told)) from error
    finally:
        for writer in writers:
            writer.kill()


def _wait_for_lessons(folder: Path, count: int) -> None:
    """Wait until the writers have recorded `count` acknowledged lessons in all."""
    deadline = time.monotonic() + SETTLE_LIMIT_S
    while sum(path.read_text().count('["learnt"') for path in folder.glob("*.jsonl")) < count:
        if time.monotonic() > deadline:
            raise BrokenPromiseError(
                f"{count} lessons must be acknowledged within {SETTLE_LIMIT_S:g} s, got fewer"
            )
        time.sleep(0.05)


def _kill(
    kind: str,
    draw: random.Random,
    replicas: Sequence[Replica],
    writers: Sequence[Writer],
    database: PostgresServer,
) -> None:
    if kind == "replica":
        replica = draw.choice(replicas)
        replica.kill()
        replica.start()
    elif kind == "writer":
        writer = draw.choice(writers)
        writer.kill()
        writer.start()
    elif kind == "database":
        database.kill()
        time.sleep(draw.uniform(0, 1))
        database.start()
    else:
        _end_backend(draw, database, is_killed=kind == "killed backend")


def _end_backend(draw: random.Random, database: PostgresServer, *, is_killed: bool) -> None:
    """End the process of one of the connections; if killed, the server ends all the others, too."""
    import psycopg

    select = "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'mbpa %'"
    with contextlib.suppress(psycopg.OperationalError, ProcessLookupError):
        pids = [pid for (pid,) in database.execute(select)]
        if pids:
            os.kill(draw.choice(pids), signal.SIGKILL if is_killed else signal.SIGTERM)


def _copy(run: Path, url: str) -> None:
    from mbpa.serve.journal_copy import copy_to_database

    copy_to_database(run, url)


def compare_with_records(folder: Path, replica: Replica) -> dict[str, int]:
    """Compare what a replica holds with what the writers have recorded; return counts."""
    lessons, counts = read_records(folder)
    held: dict[str, list[dict[str, Any]]] = {}
    for example in _list_examples(replica):
        if "/" in (example["text"] or ""):
            held.setdefault(example["text"].partition("/")[0], []).append(example)
    for name, examples in held.items():
        lesson = lessons.get(name)
        texts = [each["text"] for each in examples]
        if lesson is None or texts != [f"{name}/{i}" for i in range(lesson["count"])]:
            raise BrokenPromiseError(f"{name} is torn, doubled, or was never taught: {texts}")
        if {each["label"] for each in examples} != {lesson["label"]}:
            raise BrokenPromiseError(f"{name} was taught with another label")
        ids = [each["id"] for each in examples]
        if lesson["ids"] is not None and ids != lesson["ids"]:
            raise BrokenPromiseError(f"{name} was acknowledged with {lesson['ids']}, not {ids}")
        if lesson["forgotten"] is True:
            raise BrokenPromiseError(f"{name} was forgotten, and is there")
    for name, lesson in lessons.items():
        is_due = lesson["ids"] is not None and lesson["forgotten"] is False
        if is_due and name not in held:
            raise BrokenPromiseError(f"{name} was acknowledged, and is lost")
    return counts


def read_records(folder: Path) -> tuple[dict[str, dict[str, Any]], dict[str, int]]:
    """Return the lessons by name, and counts of calls."""
    lessons: dict[str, dict[str, Any]] = {}
    counts = Counter[str]()
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            kind, *rest = json.loads(line)
            if kind == "learn":
                name, label, count = rest
                lessons[name] = {"label": label, "count": count, "ids": None, "forgotten": False}
            elif kind == "learnt":
                lessons[rest[0]]["ids"] = rest[1]
                counts["acknowledged_lessons"] += 1
            elif kind == "forget":
                lessons[rest[0]]["forgotten"] = None  # asked for, not acknowledged
            elif kind == "forgotten":
                lessons[rest[0]]["forgotten"] = True
                counts["acknowledged_forgets"] += 1
            elif kind == "broken":
                raise BrokenPromiseError(f"a call was answered with {rest}")
            else:
                counts[f"{kind}_calls"] += 1
    counts["in_doubt"] = sum(
        each["ids"] is None or each["forgotten"] is None for each in lessons.values()
    )
    return lessons, dict(counts)


def _list_examples(replica: Replica) -> Iterator[dict[str, Any]]:
    cursor: int | None = 0
    while cursor is not None:
        path = f"/examples?limit=1000&cursor={cursor}"
        status, page, _ = replica.ask("GET", path, None, {"X-MbPA-Position": "latest"})
        if status != 200:
            raise BrokenPromiseError(f"{path} answered {status}: {page}")
        yield from page["examples"]
        cursor = page["cursor"]


def _require_others_equal(folder: Path, url: str, answers: dict[str, Any]) -> None:
    """Require that the database is intact, and that a copy in files answers as the replicas do."""
    from mbpa.serve.journal_copy import copy_to_directory
    from mbpa.serve.postgres_verification import check_database

    check_database(url, folder / "run")
    copy_to_directory(url, folder / "copy")
    with histories.serve(folder / "copy") as port:
        alone = Replica(folder / "copy", "")
        alone.port = port
        found = _read_answers(alone)
    if found != answers:
        raise BrokenPromiseError("a copy in files answers otherwise than the replicas")


# Histories


def check_histories(
    count: int, seed: int, clients: int = 8, operations: int = 20
) -> dict[str, Any]:
    """Record histories of clients that share positions, or ask for the latest; check each."""
    verdicts = Counter[str]()
    with tempfile.TemporaryDirectory() as place, PostgresServer() as database:
        histories.write_small_run(Path(place) / "run")
        _copy(Path(place) / "run", database.url)
        with run_replicas(Path(place) / "run", [database.url] * REPLICAS) as replicas:
            ports = [each.port for each in replicas]
            for number in range(count):
                positions = histories.Positions(asks_latest=number % 2 == 1)
                start, history = histories.record_history(
                    ports, number, seed, clients, operations, positions
                )
                history = histories.leave_counts_open(history)
                check = check_history(history, start, histories.step_service, 600.0)
                verdicts[check.verdict.value] += 1
                print(f"history {number}: {check.verdict.value}", file=sys.stderr, flush=True)
                if check.verdict is Verdict.VIOLATION:
                    raise BrokenPromiseError(histories.describe_violation(history, check.order))
    if verdicts[Verdict.LINEARIZABLE.value] < count:
        raise BrokenPromiseError(f"{dict(verdicts)} of {count} histories")
    return {
        "histories": count,
        "clients": clients,
        "operations": count * clients * operations,
        "verdicts": dict(verdicts),
    }


# Cuts


class CutOff:
    """What a replica answered while its database was away."""

    def __init__(self) -> None:
        self.counts = Counter[str]()
        self.worst_refusal_s = self.worst_read_s = self.worst_recovery_s = 0.0
        self.highest_stale_s = 0.0

    def read(self, replica: Replica) -> None:
        """Predict, which must always work."""
        body = {"embeddings": QUERIES[:1]}
        start = time.monotonic()
        status, answer, headers = replica.ask("POST", "/predict", body)
        self.worst_read_s = max(self.worst_read_s, time.monotonic() - start)
        if status != 200:
            raise BrokenPromiseError(f"/predict answered {status} during a cut: {answer}")
        self.highest_stale_s = max(self.highest_stale_s, float(headers.get("X-MbPA-Stale", 0)))
        self.counts["predictions"] += 1

    def teach(self, replica: Replica, name: str) -> bool:
        """Teach an example; return whether it was acknowledged."""
        example = {"label": "cut", "text": f"{name}/0", "embedding": QUERIES[0]}
        start = time.monotonic()
        status, answer, headers = replica.ask(
            "POST", "/learn", {"examples": [example], "request": name}
        )
        self.worst_refusal_s = max(self.worst_refusal_s, time.monotonic() - start)
        if status == 503 and headers.get("Retry-After") is None:
            raise BrokenPromiseError("503 must say when to try again")
        if status not in (200, 503):
            raise BrokenPromiseError(f"/learn answered {status} during a cut: {answer}")
        self.counts[f"lessons {status}"] += 1
        return status == 200


def cut_network(times: int, seed: int) -> dict[str, Any]:
    """Cut, hold and delay the network between a replica and its database; return counts."""
    draw, found = random.Random(seed), CutOff()
    acknowledged: list[str] = []
    with (
        tempfile.TemporaryDirectory() as place,
        PostgresServer() as database,
        Proxy(database.port) as proxy,
    ):
        write_small_run(Path(place) / "run")
        _copy(Path(place) / "run", database.url)
        urls = [database.make_url(port=proxy.port), database.url]
        with run_replicas(Path(place) / "run", urls) as (cut_off, other):
            for number in range(times):
                kind = ("cut", "hold", "slow")[number % 3]
                _disturb(kind, draw, proxy, found, (cut_off, other), number, acknowledged)
                print(f"cut {number}: {dict(found.counts)}", file=sys.stderr, flush=True)
            answers = require_equal((cut_off, other))
            texts = Counter(each["text"] for each in _list_examples(cut_off))
    wrong = [name for name in acknowledged if texts[f"{name}/0"] != 1]
    if wrong or max(texts.values()) > 1:
        raise BrokenPromiseError(f"lost or doubled: {wrong[:3]}")
    return {
        "cuts": times,
        "acknowledged": len(acknowledged),
        "position": answers["position"],
        "longest_prediction_s": round(found.worst_read_s, 2),
        "longest_lesson_s": round(found.worst_refusal_s, 2),
        "longest_recovery_s": round(found.worst_recovery_s, 2),
        "highest_stale_s": found.highest_stale_s,
        **found.counts,
    }


def _disturb(
    kind: str,
    draw: random.Random,
    proxy: Proxy,
    found: CutOff,
    replicas: tuple[Replica, Replica],
    number: int,
    acknowledged: list[str],
) -> None:
    cut_off, other = replicas
    if kind == "slow":
        proxy.delay_s = draw.uniform(0.01, 0.2)
    else:
        proxy.mode = "cut" if kind == "cut" else "hold"
    until, step, pending = time.monotonic() + draw.uniform(0.2, LONGEST_CUT_S), 0, list[str]()
    while time.monotonic() < until or step < 2:
        step += 1
        name = f"{number}-{step}"
        found.read(cut_off)
        (acknowledged if found.teach(cut_off, name) else pending).append(name)
        if found.teach(other, f"{name}-other"):
            acknowledged.append(f"{name}-other")
    proxy.mode, proxy.delay_s = "pass", 0.0
    start = time.monotonic()
    for name in pending:  # repeated until it is acknowledged; some were stored before
        while not found.teach(cut_off, name):
            if time.monotonic() - start > SETTLE_LIMIT_S:
                raise BrokenPromiseError("the replica does not recover from a cut")
            time.sleep(0.05)
        found.worst_recovery_s = max(found.worst_recovery_s, time.monotonic() - start)
        acknowledged.append(name)


TRIAL = Trial(
    "replicas",
    "kill replicas, writers and the database, cut the network, and check histories of clients",
    add_arguments,
    run,
)
