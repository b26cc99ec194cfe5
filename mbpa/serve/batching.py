"""Scheduling of the model's work: requests are cut into pieces, and pieces share the model fairly.

One thread runs the model. Pieces that arrive while it works form its next batch, so a batch is as
large as the load wants and nobody waits for others to come. A batch is bounded by the work that it
brings, and pieces are taken by fair queueing (Demers, Keshav and Shenker 1989): in the order in
which they would end if all requests were worked on at once, at equal speed. A small request waits
for about one batch, however much work larger requests have brought before it. Another thread
writes, so learning, which waits for the disk, holds up no answer.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

Piece = TypeVar("Piece")
Done = TypeVar("Done")

FORGETTING = 0.8  # weight that a measured pace keeps with each newer batch: about half a second
EQUALS = 4  # requests as large as itself that a request may have to share the model with


class Overloaded(Exception):
    """The request would have to wait too long; `retry_after_s` says when to try again."""

    def __init__(self, retry_after_s: float = 1.0) -> None:
        super().__init__("too many requests at once, try again")
        self.retry_after_s = retry_after_s


class Pace:
    """Measured seconds per unit of work: least squares through the origin, over recent batches.

    Large batches count most, so the fixed cost of a call is not mistaken for the cost of a unit.
    The first batch is not counted: it pays for what is set up once.

    Args:
        seconds: per unit, assumed until there is a measurement.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._is_warm = False
        self._squares = self._products = 0.0

    def measure(self, units: float, seconds: float) -> None:
        """Take note of a batch of so many units."""
        if units <= 0:
            return
        if not self._is_warm:
            self._is_warm = True
            return
        self._squares = FORGETTING * self._squares + units * units
        self._products = FORGETTING * self._products + units * seconds
        self.seconds = self._products / self._squares


@dataclass(eq=False)
class _Job(Generic[Piece, Done]):
    """A request: its pieces in order, and who waits for them."""

    pieces: Sequence[Piece]
    weights: Sequence[float]
    answered: asyncio.Future[list[Done]] = field(repr=False)
    results: list[Done] = field(default_factory=list)
    taken: int = 0
    """Pieces that the model has been given."""
    remaining: float = 0.0
    """Weight of the pieces that are not done yet."""
    has_failed: bool = False

    @property
    def is_wanted(self) -> bool:
        return not self.has_failed and not self.answered.cancelled()


class Batcher(Generic[Piece, Done]):
    """Runs `handle` on lists of pieces in a thread of its own; used from one event loop.

    Args:
        handle: gives one result per piece.
        weight: work of a piece, by which requests share the model. Always the same for the same
            piece, so that equal requests are handled in the order in which they came.
        part: weight of a batch; a single piece may weigh more.
        part_s: or what is done in so many seconds, by the pace of late, if that is more.
        batch: maximum number of pieces per batch.
        wait_s: estimated seconds that a request may have to wait for others; a request that takes
            long itself may wait for `EQUALS` times as long as it takes. Further requests are
            refused with `Overloaded`.
        window_s: seconds for as many pieces to gather as there were in the last batch: clients who
            were answered are about to ask again, and one by one they would cost more. A client
            that is alone never waits.
        name: of the thread.
        pace: seconds per weight, measured and estimated.
    """

    def __init__(
        self,
        handle: Callable[[list[Piece]], list[Done]],
        *,
        weight: Callable[[Piece], float],
        part: float,
        part_s: float,
        batch: int,
        wait_s: float,
        window_s: float = 0.0,
        name: str = "mbpa-model",
        pace: Pace | None = None,
    ) -> None:
        self._handle, self._weight = handle, weight
        self._pace = Pace(1e-3) if pace is None else pace
        self._part, self._part_s, self._batch = part, part_s, batch
        self._wait_s, self._window_s = wait_s, window_s
        self._last = 1
        self._jobs: set[_Job[Piece, Done]] = set()
        self._queue: list[tuple[float, int, _Job[Piece, Done]]] = []
        """A heap: virtual finish time of a job's next piece, and a number that settles ties."""
        self._numbers = itertools.count()
        self._virtual_time = 0.0
        """Work that each request would have had done if they shared the model equally."""
        self._waiting = 0
        self._usual = 1.0
        """Weight of requests of late."""
        self._some = threading.Condition()
        self._stopped = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def waiting(self) -> int:
        """Pieces that the model has not been given yet."""
        return self._waiting

    def estimate_wait_s(self) -> float:
        """Return the seconds that a request of the usual weight would have to wait for others."""
        with self._some:
            return self._pace.seconds * self._weigh_ahead(self._usual)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Finish what is waiting, then end the thread."""
        with self._some:
            self._stopped = True
            self._some.notify()
        await asyncio.to_thread(self._thread.join)

    async def __call__(self, pieces: Sequence[Piece]) -> list[Done]:
        """Return the result of each piece of a request, of which the pieces are handled in order.

        If the caller is cancelled, pieces that the model has not been given are never handled.

        Raises:
            Overloaded: the request would have to wait too long, or the batcher was stopped.
        """
        if not pieces:
            return []
        assert self._loop is not None
        weights = [self._weight(piece) for piece in pieces]
        job = _Job(pieces, weights, self._loop.create_future(), remaining=sum(weights))
        with self._some:
            self._admit(job)
            self._jobs.add(job)
            self._waiting += len(pieces)
            self._push(job, self._virtual_time)
            self._some.notify()
        try:
            return await job.answered
        finally:
            if job.answered.cancelled():
                self._drop(job)

    def _admit(self, job: _Job[Piece, Done]) -> None:
        """Refuse a request that would have to wait too long."""
        if self._stopped:
            raise Overloaded
        ahead = self._weigh_ahead(job.remaining)
        excess_s = self._pace.seconds * (ahead - EQUALS * job.remaining) - self._wait_s
        self._usual = 0.9 * self._usual + 0.1 * job.remaining
        if self._jobs and excess_s > 0:
            raise Overloaded(excess_s)

    def _weigh_ahead(self, weight: float) -> float:
        """Return the weight of what is handled before a request of this weight is done: of a larger
        one, fair queueing lets no more pass than the smaller brings."""
        return sum(min(other.remaining, weight) for other in self._jobs)

    def _push(self, job: _Job[Piece, Done], start: float) -> None:
        finish = start + job.weights[job.taken]
        heapq.heappush(self._queue, (finish, next(self._numbers), job))

    def _drop(self, job: _Job[Piece, Done]) -> None:
        """Forget a request that nobody waits for; its entry in the heap is skipped later."""
        with self._some:
            if job in self._jobs:
                self._jobs.remove(job)
                self._waiting -= len(job.pieces) - job.taken

    def _run(self) -> None:
        assert self._loop is not None
        while True:
            is_busy = bool(self._queue)  # else the time until the next batch is nobody's
            end = time.perf_counter()
            if not (batch := self._next()):
                return
            start = end if is_busy else time.perf_counter()
            try:
                results = self._handle([job.pieces[place] for job, place in batch])
            except Exception as error:  # ours, not the clients': what they sent was checked
                failure = RuntimeError("the model failed")
                failure.__cause__ = error
                self._finish(batch, [], failure)
            else:
                self._finish(batch, results, None)
            weight = sum(job.weights[place] for job, place in batch)
            self._pace.measure(weight, time.perf_counter() - start)

    def _finish(
        self,
        batch: list[tuple[_Job[Piece, Done], int]],
        results: list[Done],
        failure: RuntimeError | None,
    ) -> None:
        """Take note of a batch that was handled, and answer the requests that are complete."""
        assert self._loop is not None
        complete = dict.fromkeys(job for job, _ in batch)
        with self._some:
            for job, place in batch:
                job.remaining -= job.weights[place]
                job.has_failed = failure is not None
            for (job, _), result in zip(batch, results, strict=failure is None):
                job.results.append(result)
            for job in list(complete):
                if failure is None and len(job.results) < len(job.pieces):
                    del complete[job]
                elif job in self._jobs:
                    self._jobs.remove(job)
                    self._waiting -= len(job.pieces) - job.taken
        self._loop.call_soon_threadsafe(_answer, list(complete), failure)

    def _next(self) -> list[tuple[_Job[Piece, Done], int]]:
        """Return the next batch, pieces by job and place; empty when there will be no more."""
        with self._some:
            while True:
                self._some.wait_for(lambda: self._queue or self._stopped)
                self._some.wait_for(
                    lambda: self._waiting >= self._last or self._stopped, self._window_s
                )
                batch = self._take()
                if batch or (not self._queue and self._stopped):
                    return batch

    def _take(self) -> list[tuple[_Job[Piece, Done], int]]:
        batch: list[tuple[_Job[Piece, Done], int]] = []
        room = max(self._part, self._part_s / self._pace.seconds)
        while self._queue and len(batch) < self._batch:
            finish, _, job = self._queue[0]
            if not job.is_wanted:
                heapq.heappop(self._queue)
                continue
            weight = job.weights[job.taken]
            if batch and weight > room:
                break
            heapq.heappop(self._queue)
            batch.append((job, job.taken))
            room -= weight
            self._virtual_time += weight / max(1, len(self._jobs))
            job.taken += 1
            self._waiting -= 1
            if job.taken < len(job.pieces):
                self._push(job, finish)
        self._last = max(1, len(batch))
        return batch


def _answer(jobs: list[_Job[Any, Any]], failure: RuntimeError | None) -> None:
    for job in jobs:
        if job.answered.done():
            continue
        if failure is not None:
            job.answered.set_exception(failure)
        else:
            job.answered.set_result(job.results)


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
