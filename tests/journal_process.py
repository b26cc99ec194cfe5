"""What happens to a journal in processes of its own, without torch: started by ``test_journal``.

``python -I -S journal_process.py learn|faults|limits|power|visit …`` prints a JSON value a line.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import resource
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import system_calls  # noqa: E402
from system_calls import Call, Verdict  # noqa: E402

if __name__ == "__main__":  # without what these packages import
    for name in ("mbpa", "mbpa.serve"):
        package = types.ModuleType(name)
        package.__path__ = [str(HERE.parent.joinpath(*name.split(".")))]
        sys.modules[name] = package
from mbpa.serve import database, journal  # noqa: E402


def say(value: Any) -> None:
    os.write(1, json.dumps(value).encode() + b"\n")


def set_limits(*, log: int, waste: int) -> None:
    """Bytes, few enough for some calls to pass them."""
    for module, name, limit in (
        (database, "_LOG_BYTES", log),
        (journal, "_WASTE_BYTES", waste),
    ):
        assert limit < getattr(module, name), "it must be the one that is looked at"
        setattr(module, name, limit)


# Killed at a random moment


def numbered(call: int) -> list[tuple[str, str, None]]:
    """The examples of a call, to be recognised whole or torn: from one byte to some pages."""
    draw = random.Random(call)
    parts = draw.choice([1, 3, 20])
    return [
        (f"label {call % 7}", f"{call} {part} {parts} {'x' * draw.choice([0, 80, 9000])}", None)
        for part in range(parts)
    ]


def learn(path: Path) -> None:
    """Teach without end, from the call after the last, and forget what is 100 calls old."""
    set_limits(log=1 << 18, waste=1 << 16)
    with journal.Journal(path) as taught:
        ids: dict[int, list[int]] = {}
        for example in taught.examples():
            ids.setdefault(int(example.text.split()[0]), []).append(example.id)
        say(["open"])
        for call in itertools.count(max(ids, default=0) + 1):
            say(["learning", call])
            ids[call] = taught.learn(numbered(call), request=str(call))
            say(["learned", call])
            for old in [old for old in ids if old <= call - 100]:
                say(["forgetting", old])
                taught.forget(ids.pop(old))
                say(["forgot", old])


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
        + ["back"] * (e.id in taught.restored)
        for e in taught.examples()
    ]


def states(directory: Path) -> list[list[list[Any]]]:
    """What the journal holds before and after each of the calls when nothing fails."""
    with journal.Journal(directory / "clean.sqlite") as taught:
        return [contents(taught), *[call(taught) and contents(taught) for call in CALLS]]


def scenario(
    path: Path, report: int, expected: list[list[list[Any]]], *, close: bool = True
) -> None:
    """The calls still to be made, up to the first that fails; then reads, and one more write."""

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
    """Fails the ``number``-th call that changes a file or, as ``kind`` says, flushes one."""
    error = {"full": errno.ENOSPC, "kill": -1}.get(kind, errno.EIO)
    seen = itertools.count(1)

    def verdict(call: Call) -> Verdict:
        if call.name == "report" or (kind == "flush" and call.name != "sync"):
            return None
        n = next(seen)
        return error if n == number or (n > number and kind in ("full", "dead")) else None

    return verdict


def faults(directory: Path, kind: str) -> None:
    """One line for every call that can fail: what the process saw, and what the next one finds."""
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
    """As `faults`, by a limit on the size of files, which any system has: 1 KiB more each time."""
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
            CALLS[acknowledged](taught)  # the client asks again
        settled = contents(taught)
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()
    return {
        "seen": seen, "acknowledged": acknowledged,
        "found": found, "writable": writable, "settled": settled,
    }  # fmt: skip


# The power fails


class Disk:
    """What a disk holds if power fails: what was flushed, and any part of what was not."""

    def __init__(self) -> None:
        self.flushed: dict[str, bytes] = {}
        self.pending: dict[str, list[Call]] = {}
        self.names: list[Call] = []  # creations and removals that the directory may still lose

    def do(self, call: Call, verdict: Verdict) -> None:
        if call.name in ("write", "truncate"):
            self.pending.setdefault(call.path, []).append(call)
        elif call.name in ("open", "unlink"):
            self.names.append(call)
        elif call.name == "sync" and verdict is not None:
            self.pending.pop(call.path, None)  # the kernel now calls them clean
        elif call.name == "sync":
            for name in [n for n in self.names if call.path in (n.path, os.path.dirname(n.path))]:
                self.names.remove(name)
                self._rename(self.flushed, name)
            if call.path in self.flushed:
                for change in self.pending.pop(call.path, []):
                    self.flushed[call.path] = self._changed(self.flushed[call.path], change)

    def after_power_loss(self, draw: random.Random, kept: float) -> dict[str, bytes]:
        files = dict(self.flushed)
        for name in self.names:
            if draw.random() < kept:
                self._rename(files, name)
        for path in files:
            for change in self.pending.get(path, []):
                if change.name == "truncate":
                    if draw.random() < kept:
                        files[path] = self._changed(files[path], change)
                    continue
                for at in range(0, len(change.data), 512):  # a disk writes whole sectors
                    if draw.random() < kept:
                        part = Call("write", path, change.offset + at, change.data[at : at + 512])
                        files[path] = self._changed(files[path], part)
        return files

    @staticmethod
    def _rename(files: dict[str, bytes], name: Call) -> None:
        if name.name == "unlink":
            files.pop(name.path, None)
        else:
            files.setdefault(name.path, b"")

    @staticmethod
    def _changed(old: bytes, change: Call) -> bytes:
        if change.name == "truncate":
            return old[: change.offset].ljust(change.offset, b"\0")
        end = change.offset + len(change.data)
        return old[: change.offset].ljust(change.offset, b"\0") + change.data + old[end:]


def power(directory: Path) -> None:
    """Power fails before every call; then, for each flush, after it failed and a restart."""
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

        for _ in range(2):  # the second process goes on where the first ended
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
    """Calls acknowledged when power failed, all bytes then on the disk, and what they restore."""
    disk, draw, acknowledged, opening = Disk(), random.Random(failing), 0, not failing
    for call, answer in trace:
        if call.name == "report":
            told = json.loads(call.data)
            acknowledged = told.get("resumed", acknowledged + ("acknowledged" in told))
            opening = not failing or "end" in told
        else:
            disk.do(call, answer)
        if not opening and call.name != "report":
            continue
        for kept in (0.0, 0.5):
            restored = place / "restored"
            restored.mkdir()
            files = disk.after_power_loss(draw, kept)
            for name, data in files.items():
                (restored / Path(name).name).write_bytes(data)
            with journal.Journal(restored / "cut.sqlite") as taught:
                yield acknowledged, b"".join(files.values()), contents(taught)
            shutil.rmtree(restored)


# Read where nothing can be written


def visit(path: Path) -> None:
    """As a user who must not write there."""
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
    elif mode == "faults":
        faults(place, *rest)
    else:
        {"learn": learn, "limits": limits, "power": power, "visit": visit}[mode](place)
