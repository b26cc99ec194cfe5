"""Requests on their way to the model: gathered while it works, answered together.

One thread runs the model. What arrives meanwhile waits and is its next batch, so a batch is as
large as the load wants and nobody waits for others to come. The thread that writes is another, so
that learning, which waits for the disk, holds up no answer.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

Work = TypeVar("Work")
Done = TypeVar("Done")


class Overloaded(Exception):
    """Too many are waiting already."""


@dataclass(eq=False)
class _Waiting(Generic[Work, Done]):
    """A piece of work, and who waits for it."""

    work: Work
    size: int
    answered: asyncio.Future[Done] = field(repr=False)


class Batcher(Generic[Work, Done]):
    """Runs `handle` on lists of work in a thread of its own; used from one event loop.

    Args:
        handle: gives one result a piece of work.
        batch: most that is handled at once, by size.
        most: that may wait, by size.
        window: seconds for as many to gather as there were in the last batch: those who were
            answered are about to ask again, and one by one they would cost more. Somebody who
            is alone never waits.
    """

    def __init__(
        self,
        handle: Callable[[list[Work]], list[Done]],
        *,
        batch: int,
        most: int,
        window: float = 0.0,
    ) -> None:
        self._handle, self._batch, self._most, self._window = handle, batch, most, window
        self._last = 1
        self._waiting: deque[_Waiting[Work, Done]] = deque()
        self._some = threading.Condition()
        self._size = 0
        self._stopped = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="mbpa-model", daemon=True)

    @property
    def waiting(self) -> int:
        return self._size

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Answer what is waiting, then end the thread."""
        with self._some:
            self._stopped = True
            self._some.notify()
        await asyncio.to_thread(self._thread.join)

    async def __call__(self, work: Work, size: int) -> Done:
        """The result of a piece of work; `Overloaded` if it cannot wait for its turn."""
        assert self._loop is not None
        waiting: _Waiting[Work, Done] = _Waiting(work, size, self._loop.create_future())
        with self._some:
            if self._stopped or (self._size and self._size + size > self._most):
                raise Overloaded
            self._size += size
            self._waiting.append(waiting)
            self._some.notify()
        return await waiting.answered

    def _run(self) -> None:
        assert self._loop is not None
        while batch := self._next():
            batch = [each for each in batch if not each.answered.cancelled()]  # gone meanwhile
            try:
                results: list[Any] = self._handle([each.work for each in batch]) if batch else []
            except Exception as error:  # of ours, not of those who asked: theirs was checked
                failure = RuntimeError("the model failed")
                failure.__cause__ = error
                results = [failure] * len(batch)
            self._loop.call_soon_threadsafe(_answer, batch, results)

    def _next(self) -> list[_Waiting[Work, Done]]:
        """As much as is waiting and fits a batch; empty when there will be no more."""
        with self._some:
            self._some.wait_for(lambda: self._waiting or self._stopped)
            self._some.wait_for(lambda: self._size >= self._last or self._stopped, self._window)
            batch = [self._waiting.popleft()] if self._waiting else []
            size = sum(each.size for each in batch)
            while self._waiting and size + self._waiting[0].size <= self._batch:
                batch.append(self._waiting.popleft())
                size += batch[-1].size
            self._size -= size
            self._last = min(size, self._batch)
            return batch


def _answer(batch: list[_Waiting[Any, Any]], results: list[Any]) -> None:
    for each, result in zip(batch, results, strict=True):
        if each.answered.done():
            continue
        if isinstance(result, Exception):
            each.answered.set_exception(result)
        else:
            each.answered.set_result(result)


class Writer:
    """Runs calls one after the other in a thread of its own; a few may wait."""

    def __init__(self, most: int, name: str = "mbpa-writer") -> None:
        self._most, self._waiting = most, 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def __call__(self, call: Callable[[], Done]) -> Done:
        """What the call returns; `Overloaded` if it cannot wait for its turn.

        It is made even if whoever asked goes away: half of what was said cannot be taken back.
        """
        if self._waiting >= self._most:
            raise Overloaded
        self._waiting += 1
        loop = asyncio.get_running_loop()
        done = loop.run_in_executor(self._pool, call)
        done.add_done_callback(self._finished)
        return await asyncio.shield(done)

    def _finished(self, done: asyncio.Future[Any]) -> None:
        self._waiting -= 1
        if not done.cancelled():
            done.exception()  # seen, if nobody is there any more to see it

    async def stop(self) -> None:
        await asyncio.to_thread(self._pool.shutdown)
