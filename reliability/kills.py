"""Kill a teaching process, and a whole server, at random moments; nothing acknowledged is lost.

Trials of the journal run in processes without torch (`journal_process`). Servers are forked from
this process, which has imported what they need, so that they spend most of the time being taught.
The oracle compares the responses that clients received with the files of the dead server.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reliability.trial import BrokenPromiseError, Trial

JOURNAL_PROGRAM = Path(__file__).with_name("journal_process.py")
CLIENTS = 3
LONGEST_ROUND_S = 0.6
LONGEST_REPLACEMENT_S = 0.25
RETRAINING_ROUNDS = 5  # rounds between kills of a process that replaces the run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--journal", type=int, default=10_000, help="number of kills of a process that teaches"
    )
    parser.add_argument("--server", type=int, default=200, help="number of kills of a server")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    memory = Path("/dev/shm")
    place = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        figures: dict[str, Any] = {}
        if arguments.journal:
            path = Path(folder) / "journal.sqlite"
            figures["journal"] = kill_journals(path, arguments.journal, arguments.seed)
        if arguments.server:
            figures["server"] = kill_servers(Path(folder), arguments.server, arguments.seed)
    return figures


def kill_journals(path: Path, times: int, seed: int) -> dict[str, int]:
    """Kill a process that teaches a journal, many times; return counts."""
    command = [sys.executable, "-I", "-S", str(JOURNAL_PROGRAM), "kills", str(path)]
    counts: dict[str, int] = {}
    with subprocess.Popen(
        [*command, str(times), str(seed)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            counts = json.loads(line)
            print(f"journal: {counts}", file=sys.stderr, flush=True)
    if process.returncode or counts.get("kills") != times:
        raise BrokenPromiseError(f"after {counts} (seed {seed}): see the traceback above")
    return counts


# Servers


@dataclass
class Call:
    """The state of one call to `learn`, and of the call that forgot it."""

    label: str
    ids: list[int] | None = None
    """Ids of the examples; `None` until the call is acknowledged."""
    is_forgotten: bool | None = False
    """Whether the examples were forgotten; `None`: requested, but not acknowledged."""


@dataclass
class Told:
    """The calls that clients have sent and the responses they received, by name of the call."""

    calls: dict[str, Call] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    broken: list[BrokenPromiseError] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def kill_servers(folder: Path, times: int, seed: int) -> dict[str, int]:
    """Kill servers while several clients teach them; return counts."""
    from reliability.small_run import write_small_run

    directory, draw, told = folder / "run", random.Random(seed), Told()
    write_small_run(directory)
    for number in range(1, times + 1):
        with _serve(directory) as (pid, port):
            stop = threading.Event()
            clients = [
                threading.Thread(target=_teach, args=(port, f"{number}-{i}", told, stop))
                for i in range(CLIENTS)
            ]
            for client in clients:
                client.start()
            time.sleep(draw.uniform(0, LONGEST_ROUND_S))
            os.kill(pid, signal.SIGKILL)
            stop.set()
            for client in clients:
                client.join()
        for error in told.broken:
            raise error
        _check(directory, told)
        if number % RETRAINING_ROUNDS == 0:
            _replace_and_kill(directory, draw, told)
        told.counts["kills"] = number
        if number % 10 == 0 or number == times:
            print(f"server: {dict(told.counts)}", file=sys.stderr, flush=True)
    return dict(told.counts)


@contextlib.contextmanager
def _serve(directory: Path) -> Any:
    """Fork a server from this process; yield its process id and port."""
    from mbpa.serve.server import serve

    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(write, 1)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            sys.stdout = os.fdopen(1, "w")
            serve(directory, port=0)
        finally:
            os._exit(1)
    os.close(write)
    try:
        with open(read) as output:
            port = next(
                (int(line.rsplit(":", 1)[1].split("/")[0]) for line in output if "http:" in line),
                None,
            )
            if port is None:
                raise BrokenPromiseError(f"{directory} could not be served after a kill")
            yield pid, port
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _teach(port: int, who: str, told: Told, stop: threading.Event) -> None:
    """Teach, forget and relabel until the server is gone."""
    from reliability.small_run import draw_keys

    draw, mine = random.Random(who), dict[str, Call]()
    keys = draw_keys(8, seed=2).tolist()
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as client:
        number = 0
        while not stop.is_set():
            number += 1
            name, label = f"{who}-{number}", f"taught {draw.randrange(4)}"
            known = [other for other, call in mine.items() if call.ids and not call.is_forgotten]
            action = draw.choice(["learn", "learn", "forget", "relabel"] if known else ["learn"])
            try:
                if action != "learn":
                    _forget(client, told, mine[draw.choice(known)])
                if action != "forget":
                    mine[name] = _learn(client, told, name, label, keys)
            except (OSError, http.client.HTTPException):
                return
            except BrokenPromiseError as error:
                told.broken.append(error)
                return


def _learn(client: Any, told: Told, name: str, label: str, keys: list[Any]) -> Call:
    examples = [{"label": label, "text": f"{name}/{i}", "embedding": keys[i]} for i in range(3)]
    call = told.calls[name] = Call(label)
    call.ids = _post(client, told, "/learn", {"examples": examples, "request": name})
    return call


def _forget(client: Any, told: Told, call: Call) -> None:
    call.is_forgotten = None
    _post(client, told, "/forget", {"ids": call.ids})
    call.is_forgotten = True


def _post(client: Any, told: Told, path: str, content: dict[str, Any]) -> list[int]:
    body = json.dumps(content).encode()
    while True:
        client.request("POST", path, body, {"Content-Type": "application/json"})
        response = client.getresponse()
        answer = json.loads(response.read())
        if response.status == 200:
            with told.lock:
                told.counts[f"acknowledged {path[1:]}"] += 1
            ids: list[int] = answer["ids"]
            return ids
        if response.status != 429:
            raise BrokenPromiseError(f"{path} answered {response.status}: {answer}")


def _check(directory: Path, told: Told) -> None:
    """Compare the journal with the responses to clients; it also settles calls in doubt."""
    from mbpa.serve.journal import Journal

    with Journal(directory / "journal.sqlite", create=False) as journal:
        taught = [each for each in journal.examples() if "/" in (each.text or "")]
    found: dict[str, list[int]] = {}
    texts = Counter(each.text for each in taught)
    for each in taught:
        name = str(each.text).partition("/")[0]
        found.setdefault(name, []).append(each.id)
        call = told.calls.get(name)
        if call is None or each.label != call.label or texts[each.text] != 1:
            raise BrokenPromiseError(f"{each} was never taught like this, or is present twice")
    for name, call in list(told.calls.items()):
        ids = found.get(name)
        if ids is not None and (len(ids) != 3 or (call.ids is not None and ids != call.ids)):
            raise BrokenPromiseError(f"call {name} is torn: {ids}, acknowledged {call.ids}")
        if ids is None and call.ids is not None and call.is_forgotten is False:
            raise BrokenPromiseError(f"call {name} was acknowledged with {call.ids}, but is lost")
        if ids is not None and call.is_forgotten:
            raise BrokenPromiseError(f"call {name} was forgotten, but is present")
        told.counts["in doubt"] += call.ids is None or call.is_forgotten is None
        if ids is None:
            del told.calls[name]
        else:
            call.ids, call.is_forgotten = ids, False


def _replace_and_kill(directory: Path, draw: random.Random, told: Told) -> None:
    """Kill a process that replaces the run; either the old or the new run must be complete."""
    from mbpa.serve.journal import Journal
    from mbpa.serve.run_directory import replace_directory
    from mbpa.serve.verification import check_run
    from reliability.small_run import write_small_run

    pid = os.fork()
    if pid == 0:
        try:
            with replace_directory(directory, replace=True) as new:
                write_small_run(new)
        finally:
            os._exit(0)
    time.sleep(draw.uniform(0, LONGEST_REPLACEMENT_S))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    check_run(directory)
    with Journal(directory / "journal.sqlite", create=False) as journal:
        is_new = not any("/" in (each.text or "") for each in journal.examples())
    told.counts["replacements"] += 1
    told.counts["replacements done"] += is_new and bool(told.calls)
    if is_new:
        told.calls.clear()
    _check(directory, told)


TRIAL = Trial(
    "kills",
    "kill a teaching process and a whole server at random moments; nothing acknowledged is lost",
    add_arguments,
    run,
)
