"""Trials of a journal in separate processes, without torch.

``python -I -S journal_process.py learn|kills|faults|limits|power|visit …`` prints one JSON value
per line.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

# This file is run by its path, so the imports below need `sys.path` first (E402).
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from reliability import system_calls  # noqa: E402
from reliability.disk import Disk, restore  # noqa: E402
from reliability.system_calls import KILL, SHORT, Call, Verdict  # noqa: E402

if __name__ == "__main__":  # stub packages before the import below, to avoid theirs
    for name in ("mbpa", "mbpa.serve"):
        package = types.ModuleType(name)
        package.__path__ = [str(HERE.parent.joinpath(*name.split(".")))]
        sys.modules[name] = package
from mbpa.serve import database, journal  # noqa: E402


def say(value: Any) -> None:
    os.write(1, json.dumps(value).encode() + b"\n")


def set_limits(*, log: int, waste: int) -> None:
    """Lower the limits on the log and on waste, in bytes, so that some calls exceed them."""
    for module, name, limit in (
        (database, "_MAX_LOG_BYTES", log),
        (journal, "WASTE_BYTES", waste),
    ):
        assert limit < getattr(module, name), "the limit must be one that the module uses"
        setattr(module, name, limit)


# Killed at a random moment


def make_examples(call: int) -> list[tuple[str, str, None]]:
    """Return the examples of a call, from a few bytes to some pages each.

    Their texts show whether the call is complete or torn.
    """
    draw = random.Random(call)
    parts = draw.choice([1, 3, 20])
    return [
        (f"label {call % 7}", f"{call} {part} {parts} {'x' * draw.choice([0, 80, 9000])}", None)
        for part in range(parts)
    ]


def learn(path: Path) -> None:
    """Teach endlessly, starting after the last call found, and forget calls 100 numbers back."""
    set_limits(log=1 << 18, waste=1 << 16)
    with journal.Journal(path) as taught:
        ids: dict[int, list[int]] = {}
        for example in taught.examples():
            ids.setdefault(int(example.text.split()[0]), []).append(example.id)
        say(["open"])
        for call in itertools.count(max(ids, default=0) + 1):
            say(["learning", call])
            ids[call] = taught.learn(make_examples(call), request=str(call))
            say(["learned", call])
            for old in [old for old in ids if old <= call - 100]:
                say(["forgetting", old])
                taught.forget(ids.pop(old))
                say(["forgot", old])


def kills(path: Path, times: str, seed: str) -> None:
    """Kill a teaching process again and again, and check each time what it left behind.

    Prints the number of kills, acknowledged calls and calls in doubt every 100 kills.
    """
    draw, live, counts = random.Random(int(seed)), set[int](), Counter[str]()
    for number in range(1, int(times) + 1):
        said = kill_once(path, draw)
        live = check_against_what_was_said(path, said, live)
        counts["kills"] += 1
        counts["acknowledged"] += sum(what in ("learned", "forgot") for what, *_ in said)
        counts["in_doubt"] += bool(said) and said[-1][0] in ("learning", "forgetting")
        counts["while_opening"] += not said
        if number % 100 == 0 or number == int(times):
            say(counts)


def kill_once(path: Path, draw: random.Random) -> list[list[Any]]:
    """Kill a teaching process while it opens the journal, or later; return what it had printed."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(write, 1)
            learn(path)
        finally:
            os._exit(1)
    os.close(write)
    with open(read, "rb") as output:
        beginning = draw.random() < 0.2
        said = b"".join(output.readline() for _ in range(0 if beginning else draw.randint(1, 40)))
        time.sleep(draw.uniform(0, 0.02 if beginning else 0.003))
        os.kill(pid, signal.SIGKILL)
        said += output.read()
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL, (status, said)
    return [json.loads(line) for line in said.splitlines()]


def check_against_what_was_said(path: Path, said: list[list[Any]], live: set[int]) -> set[int]:
    """Check that the journal holds whole calls, as printed; the last may have been in progress.

    Returns the calls found.
    """
    told = Counter((what, *call) for what, *call in said)
    for what, (call,) in [(what, call) for what, *call in said if call]:
        live = live | {call} if what == "learned" else live - {call} if what == "forgot" else live
    doubtful = {
        call[0]
        for what, end in (("learning", "learned"), ("forgetting", "forgot"))
        for name, *call in told
        if name == what and (end, *call) not in told
    }
    assert len(doubtful) <= 1
    with journal.Journal(path) as taught:
        parts: dict[int, list[tuple[str, str | None, bytes | None]]] = {}
        for example in taught.examples():
            assert example.text is not None
            number = int(example.text.split()[0])
            parts.setdefault(number, []).append((example.label, example.text, example.key))
        for number, found in parts.items():
            assert found == make_examples(number), f"call {number} is torn, or present twice"
        assert live - doubtful <= set(parts) <= live | doubtful
        if said and said[-1][0] == "learning":  # the client repeats its request
            taught.learn(make_examples(said[-1][1]), request=str(said[-1][1]))
            parts[said[-1][1]] = []
        assert len(taught) == sum(len(make_examples(number)) for number in parts)
    return set(parts)


# Every system call fails once

CALLS: list[Callable[[Any], list[int]]] = [
    lambda j: j.learn([("a", "text one", None), ("z", "text z", None)], request="first"),
    lambda j: j.forget([1]),
    lambda j: j.learn(
        [("a", "text two", None), ("b", None, b"4444"), ("a", "3" * 5000, None)], "2"
    ),
    lambda j: j.learn([("c", b"4" * 5000, None), ("b", "text five", b"1234")], request="long"),
    lambda j: j.forget(label="a"),
    lambda j: j.learn([("a", "text six", None)], request="last", restoring=True),
]


def contents(taught: Any) -> list[list[Any]]:
    return [
        [e.id, e.label, e.text or (e.image and e.image.decode()), e.key and e.key.decode()]
        + ["picture"] * (e.image is not None)
        + ["back"] * (e.id in taught.restored_ids)
        for e in taught.examples()
    ]


def states(directory: Path) -> list[list[list[Any]]]:
    """Return the contents of the journal before and after each of the calls if nothing fails."""
    with journal.Journal(directory / "clean.sqlite") as taught:
        return [contents(taught), *[call(taught) and contents(taught) for call in CALLS]]


def scenario(
    path: Path, report: int, expected: list[list[list[Any]]], *, close: bool = True
) -> None:
    """Make the remaining calls up to the first that fails; then read, and try one more write."""

    def tell(**what: Any) -> None:
        os.write(report, json.dumps(what).encode() + b"\n")

    set_limits(log=20_000, waste=4_000)
    try:
        taught = journal.Journal(path)
    except journal.JournalError as error:
        tell(closed=str(error))
        return
    resumed = expected.index(contents(taught))
    tell(resumed=resumed, read_only=taught.read_only)
    for call in CALLS[resumed:]:
        try:
            call(taught)
        except journal.JournalError as error:
            tell(error=str(error), read_only=taught.read_only, reads=contents(taught))
            try:
                taught.learn([("refused", "refused", None)])
            except journal.JournalError as again:
                tell(refused=str(again))
            break
        tell(acknowledged=True)
    tell(end=taught.read_only)
    if not close:
        os._exit(0)
    taught.close()


def fault(number: int, kind: str) -> Callable[[Call], Verdict]:
    """Return a verdict that fails the ``number``-th system call that counts for ``kind``.

    "flush" counts flushes, "short" counts writes, all other kinds every call that changes a file.
    """
    error = {"full": errno.ENOSPC, "kill": KILL, "short": SHORT}.get(kind, errno.EIO)
    seen = itertools.count(1)

    def verdict(call: Call) -> Verdict:
        only = {"flush": "sync", "short": "write"}.get(kind, call.name)
        if call.name == "report" or call.name != only:
            return None
        n = next(seen)
        return error if n == number or (n > number and kind in ("full", "dead")) else None

    return verdict


def faults(directory: Path, kind: str) -> None:
    """Print one line per call that can fail: what the process saw, and what the next one finds."""
    expected = states(directory)
    say(expected)
    for number in itertools.count(1):
        path = directory / f"{number}.sqlite"
        calls: list[Call] = []
        failed: list[str] = []
        decide = fault(number, kind)

        def verdict(
            call: Call, calls: Any = calls, failed: Any = failed, decide: Any = decide
        ) -> Any:
            answer = decide(call)
            calls.append(call)
            if answer is not None:
                closing = any(call.data.startswith(b'{"end"') for call in calls)
                what = f"{call.name} {Path(call.path).suffix or 'directory'}"
                failed.append(what + " while closing" * closing)
            return answer

        def child(report: int, path: Path = path) -> None:
            scenario(path, report, expected)

        output = system_calls.supervise(child, verdict)
        say({"failed": failed[0] if failed else None, **aftermath(path, output)})
        if not failed:
            return


def limits(directory: Path) -> None:
    """Like `faults`, but with a limit on the size of files that grows by 1 KiB each time.

    Every system has such a limit.
    """
    expected = states(directory)
    say(expected)
    for size in range(0, 1 << 20, 1 << 10):
        path = directory / f"{size}.sqlite"
        read, report = os.pipe()
        pid = os.fork()
        if pid == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            scenario(path, report, expected)
            os._exit(0)
        os.close(report)
        with open(read, "rb") as pipe:
            output = pipe.read()
        os.waitpid(pid, 0)
        line = aftermath(path, output)
        clean = line["seen"][-1] == {"end": None}
        say({"failed": None if clean else "write .sqlite", **line})
        if clean:
            return


def aftermath(path: Path, output: bytes) -> dict[str, Any]:
    seen = [json.loads(line) for line in output.splitlines()]
    acknowledged = sum("acknowledged" in line for line in seen)
    with journal.Journal(path) as taught:
        found, writable = contents(taught), taught.read_only is None
        if acknowledged < len(CALLS):
            CALLS[acknowledged](taught)  # the client repeats its call
        settled = contents(taught)
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()
    return {
        "seen": seen, "acknowledged": acknowledged,
        "found": found, "writable": writable, "settled": settled,
    }  # fmt: skip


# The power fails


def power(directory: Path) -> None:
    """Cut the power after every call; then, for each flush, after it failed and a restart."""
    expected = states(directory)
    for failing in itertools.count():
        place = directory / str(failing)
        place.mkdir()
        trace: list[tuple[Call, Verdict]] = []
        syncs = itertools.count(1)

        def verdict(
            call: Call, trace: Any = trace, syncs: Any = syncs, n: int = failing
        ) -> Verdict:
            answer = errno.EIO if call.name == "sync" and next(syncs) == n else None
            trace.append((call, answer))
            return answer

        def child(report: int, path: Path = place / "cut.sqlite", n: int = failing) -> None:
            scenario(path, report, expected, close=n == 0)

        for _ in range(2):  # the second process continues where the first ended
            system_calls.supervise(child, verdict)
        if failing and not any(answer for _, answer in trace):
            return
        for done, data, found in cuts(trace, place, failing):
            taught = {example[2] for state in expected[:done] for example in state} - {None}
            gone = taught - {example[2] for example in expected[done]}
            say({
                "failing": failing, "acknowledged": done,
                "found": expected.index(found) if found in expected else found,
                "not gone": [text for text in gone if text.encode() in data],
            })  # fmt: skip


def cuts(
    trace: list[tuple[Call, Verdict]], place: Path, failing: int
) -> Iterator[tuple[int, bytes, list[list[Any]]]]:
    """Yield, per power cut, the acknowledged calls, all bytes on the disk, and the contents."""
    empty = place / "empty"
    empty.mkdir()
    disk = Disk(empty)
    draw, acknowledged, opening = random.Random(failing), 0, not failing
    for call, answer in trace:
        if call.name == "report":
            told = json.loads(call.data)
            acknowledged = told.get("resumed", acknowledged + ("acknowledged" in told))
            opening = not failing or "end" in told
        else:
            path = empty if Path(call.path) == place else empty / Path(call.path).name
            disk.do(replace(call, path=str(path)), answer)
        if not opening and call.name != "report":
            continue
        for kept in (0.0, 0.5):
            restored = place / "restored"
            restored.mkdir()
            files = disk.after_power_loss(draw, kept)
            restore(files, restored)
            with journal.Journal(restored / "cut.sqlite") as taught:
                yield acknowledged, b"".join(filter(None, files.values())), contents(taught)
            shutil.rmtree(restored)


# Read where nothing can be written


def visit(path: Path) -> None:
    """Open a journal as a user who must not write there."""
    if os.getuid() == 0:
        os.setuid(65534)
    try:
        with journal.Journal(path) as taught:
            say({"read_only": taught.read_only, "found": contents(taught)})
            taught.learn([("a", "refused", None)])
    except journal.JournalError as error:
        say({"error": str(error)})


if __name__ == "__main__":
    assert not {"torch", "numpy"} & set(sys.modules)
    mode, where, *rest = sys.argv[1:]
    place = Path(where).resolve()
    if mode == "available":
        say(system_calls.available())
    elif mode in ("faults", "kills"):
        {"faults": faults, "kills": kills}[mode](place, *rest)
    else:
        {"learn": learn, "limits": limits, "power": power, "visit": visit}[mode](place)
