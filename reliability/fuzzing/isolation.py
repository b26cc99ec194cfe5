"""Work in forked processes: a crash, a hang or a limit ends only one of them and is reported."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import struct
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from reliability.fuzzing.mutators import MAX_CASE_BYTES

HANG_S = 60.0
POLL_S = 1.0
HEADER = struct.Struct("<QQ")  # number of announcements so far, size of the last one in bytes
NOTICE_BYTES = HEADER.size + MAX_CASE_BYTES

Announce = Callable[[bytes], None]
Work = Callable[[Announce], Any]
"""The work of a process: announce each case, try it, and return a value that can be pickled."""


class WorkerError(RuntimeError):
    """The code around the cases failed; the message has its traceback."""


@dataclass(frozen=True)
class Death:
    """The end of a process that returned nothing.

    Args:
        reason: the signal or exit status, or that it hung.
        announced: number of cases it had announced.
        last: the last of them, cut at `MAX_CASE_BYTES`.
    """

    reason: str
    announced: int
    last: bytes


@dataclass
class _Worker:
    """A running process, and memory shared with it."""

    work: Work
    notice: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, NOTICE_BYTES))
    announced: int = 0
    moved: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=self._serve, args=(theirs,), daemon=True)
        with warnings.catch_warnings():  # Python 3.12 warns about threads; the child uses none
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        theirs.close()

    def _serve(self, connection: Connection[Any, Any]) -> None:
        count = 0

        def announce(data: bytes) -> None:
            nonlocal count
            count += 1
            kept = data[:MAX_CASE_BYTES]
            self.notice[: HEADER.size + len(kept)] = HEADER.pack(count, len(kept)) + kept

        try:
            connection.send((True, self.work(announce)))
        except BaseException:
            connection.send((False, traceback.format_exc()))

    def is_hanging(self) -> bool:
        """Return whether no case was announced for `HANG_S` seconds."""
        (count, _) = HEADER.unpack(self.notice[: HEADER.size])
        if count != self.announced:
            self.announced, self.moved = count, time.monotonic()
        return time.monotonic() - self.moved > HANG_S

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def result(self, reason: str | None = None) -> Any:
        """Return the result of the work, or a `Death`."""
        answer = None
        if reason is None:
            with contextlib.suppress(EOFError):
                answer = self.connection.recv()
            self.process.join()
        self.connection.close()
        if answer is not None:
            is_done, value = answer
            if not is_done:
                raise WorkerError(value)
            return value
        count, size = HEADER.unpack(self.notice[: HEADER.size])
        code = self.process.exitcode
        last = bytes(self.notice[HEADER.size : HEADER.size + size])
        return Death(reason or f"exit status {code}", count, last)


def run_isolated(works: Iterable[tuple[Any, Work]], jobs: int = 1) -> Iterator[tuple[Any, Any]]:
    """Do each piece of work in a process of its own and yield its key and result.

    Args:
        works: pairs of a key and work; taken one by one, so that a result may lead to more work.
        jobs: number of processes that run at a time.

    Yields:
        The key, and the returned value or a `Death`.

    Raises:
        WorkerError: the work itself raised.
    """
    waiting = iter(works)
    running: dict[Any, tuple[Any, _Worker]] = {}
    try:
        while True:
            while len(running) < jobs and (pair := next(waiting, None)) is not None:
                worker = _Worker(pair[1])
                running[worker.connection] = pair[0], worker
            if not running:
                return
            for connection in wait(list(running), POLL_S):
                key, worker = running.pop(connection)
                yield key, worker.result()
            for connection in [each for each, (_, it) in running.items() if it.is_hanging()]:
                key, worker = running.pop(connection)
                worker.kill()
                yield key, worker.result(f"no answer for {HANG_S:.0f} s")
    finally:
        for _, worker in running.values():
            worker.kill()
