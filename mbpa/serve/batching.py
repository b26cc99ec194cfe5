"""Scheduling of the model's work: requests are cut into chunks that share it fairly.

One thread runs the model. Chunks that arrive while it works form its next batch, so the batch size
follows the load and no request waits for others to arrive. The work per batch is bounded, and
chunks are taken by fair queueing (Demers, Keshav and Shenker 1989): in the order in which they
would finish if all requests were processed at once, at equal speed. A small request waits for about
one batch, however much work larger requests have queued before it. Writes run in another thread,
so learning, which waits for the disk, delays no answer.
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

ChunkT = TypeVar("ChunkT")
ResultT = TypeVar("ResultT")

PACE_DECAY_PER_BATCH = (
    0.8  # factor on earlier measurements per newer batch: about half a second of history
)
MAX_EQUAL_REQUESTS = (
    4  # number of equally large requests that a request may have to share the model with
)


class Overloaded(Exception):
    """The request would have to wait too long; `retry_after_s` says when to try again."""

    def __init__(self, retry_after_s: float = 1.0) -> None:
        super().__init__("too many requests at once, try again")
        self.retry_after_s = retry_after_s


class Pace:
    """Measured seconds per unit of work: least squares through the origin, over recent batches.

    Large batches count most, so the fixed cost of a call is not mistaken for the cost of a unit.
    The first batch is not counted, because it includes one-time set-up.

    Args:
        seconds: seconds per unit assumed until there is a measurement.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._is_warm = False
        self._squares = self._products = 0.0

    def measure(self, units: float, seconds: float) -> None:
        """Record that a batch of `units` units took `seconds`."""
        if units <= 0:
            return
        if not self._is_warm:
            self._is_warm = True
            return
        self._squares = PACE_DECAY_PER_BATCH * self._squares + units * units
        self._products = PACE_DECAY_PER_BATCH * self._products + units * seconds
        self.seconds = self._products / self._squares


@dataclass(eq=False)
class _Job(Generic[ChunkT, ResultT]):
    """A request: its chunks in order, and the future that its caller awaits."""

    chunks: Sequence[ChunkT]
    weights: Sequence[float]
    answered: asyncio.Future[list[ResultT]] = field(repr=False)
    results: list[ResultT] = field(default_factory=list)
    taken: int = 0
    """Number of chunks passed to the model so far."""
    remaining: float = 0.0
    """Total weight of the chunks that are not done yet."""
    has_failed: bool = False

    @property
    def is_wanted(self) -> bool:
        return not self.has_failed and not self.answered.cancelled()


class Batcher(Generic[ChunkT, ResultT]):
    """Runs `handle` on lists of chunks in a thread of its own; used from one event loop.

    Args:
        handle: returns one result per chunk.
        weight: returns the work of a chunk, by which requests share the model. It must always be
            the same for the same chunk, so that equal requests are handled in order of arrival.
        part: maximum weight of a batch; a single chunk may weigh more.
        part_s: seconds per batch at the recently measured pace. The maximum weight is raised to
            what can be done in this time, if that is more than `part`.
        batch: maximum number of chunks per batch.
        wait_s: estimated seconds that a request may have to wait for others. A request that takes
            long itself may also wait `MAX_EQUAL_REQUESTS` times as long as it takes. Further
            requests are refused with `Overloaded`.
        window_s: maximum seconds to wait until as many chunks have arrived as the last batch had.
            Clients that were just answered are about to send again, and handling them one by one
            would cost more. A single client never waits.
        name: name of the thread.
        pace: measures the seconds per unit of weight.
    """

    def __init__(
        self,
        handle: Callable[[list[ChunkT]], list[ResultT]],
        *,
        weight: Callable[[ChunkT], float],
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
        self._jobs: set[_Job[ChunkT, ResultT]] = set()
        self._queue: list[tuple[float, int, _Job[ChunkT, ResultT]]] = []
        """A heap of (virtual finish time of the job's next chunk, tie-breaking number, job)."""
        self._numbers = itertools.count()
        self._virtual_time = 0.0
        """Work that each request would have received if all shared the model equally."""
        self._waiting = 0
        self._light = 1.0
        """Weight of the lighter ones among recent requests."""
        self._some = threading.Condition()
        self._stopped = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def waiting(self) -> int:
        """Number of chunks not yet passed to the model."""
        return self._waiting

    def estimate_wait_s(self, most: float) -> float:
        """Return the seconds that a light request would have to wait for others.

        The estimate is low on purpose: a request refused by it would not be admitted later either.

        Args:
            most: weight that the request has at most.
        """
        with self._some:
            return self._pace.seconds * self._weigh_ahead(min(self._light, most))

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Finish the waiting chunks, then end the thread."""
        with self._some:
            self._stopped = True
            self._some.notify()
        await asyncio.to_thread(self._thread.join)

    async def __call__(self, chunks: Sequence[ChunkT]) -> list[ResultT]:
        """Return one result per chunk of a request. The chunks are handled in order.

        If the caller is cancelled, chunks not yet passed to the model are never handled.

        Raises:
            Overloaded: the request would have to wait too long, or the batcher was stopped.
        """
        if not chunks:
            return []
        assert self._loop is not None
        weights = [self._weight(chunk) for chunk in chunks]
        job = _Job(chunks, weights, self._loop.create_future(), remaining=sum(weights))
        with self._some:
            self._admit(job)
            self._jobs.add(job)
            self._waiting += len(chunks)
            self._push(job, self._virtual_time)
            self._some.notify()
        try:
            return await job.answered
        finally:
            if job.answered.cancelled():
                self._drop(job)

    def _admit(self, job: _Job[ChunkT, ResultT]) -> None:
        """Refuse a request that would have to wait too long."""
        if self._stopped:
            raise Overloaded
        ahead = self._weigh_ahead(job.remaining)
        excess_s = self._pace.seconds * (ahead - MAX_EQUAL_REQUESTS * job.remaining) - self._wait_s
        self._light = min(job.remaining, 1.1 * self._light)
        if self._jobs and excess_s > 0:
            raise Overloaded(excess_s)

    def _weigh_ahead(self, weight: float) -> float:
        """Return the weight of other work handled before a request of this weight is done.

        Fair queueing lets a larger request do no more work in that time than the smaller one has.
        """
        return sum(min(other.remaining, weight) for other in self._jobs)

    def _push(self, job: _Job[ChunkT, ResultT], start: float) -> None:
        finish = start + job.weights[job.taken]
        heapq.heappush(self._queue, (finish, next(self._numbers), job))

    def _drop(self, job: _Job[ChunkT, ResultT]) -> None:
        """Drop a request whose caller was cancelled; its entry in the heap is skipped later."""
        with self._some:
            if job in self._jobs:
                self._jobs.remove(job)
                self._waiting -= len(job.chunks) - job.taken

    def _run(self) -> None:
        assert self._loop is not None
        while True:
            is_busy = bool(self._queue)  # if not, idle time before the next batch is not counted
            end = time.perf_counter()
            if not (batch := self._next()):
                return
            start = end if is_busy else time.perf_counter()
            try:
                results = self._handle([job.chunks[place] for job, place in batch])
            except Exception as error:  # a fault of ours: the clients' input was checked
                failure = RuntimeError("the model failed")
                failure.__cause__ = error
                self._finish(batch, [], failure)
            else:
                self._finish(batch, results, None)
            weight = sum(job.weights[place] for job, place in batch)
            self._pace.measure(weight, time.perf_counter() - start)

    def _finish(
        self,
        batch: list[tuple[_Job[ChunkT, ResultT], int]],
        results: list[ResultT],
        failure: RuntimeError | None,
    ) -> None:
        """Record a handled batch, and answer the requests that are now complete."""
        assert self._loop is not None
        complete = dict.fromkeys(job for job, _ in batch)
        with self._some:
            for job, place in batch:
                job.remaining -= job.weights[place]
                job.has_failed = failure is not None
            for (job, _), result in zip(batch, results, strict=failure is None):
                job.results.append(result)
            for job in list(complete):
                if failure is None and len(job.results) < len(job.chunks):
                    del complete[job]
                elif job in self._jobs:
                    self._jobs.remove(job)
                    self._waiting -= len(job.chunks) - job.taken
        self._loop.call_soon_threadsafe(_answer, list(complete), failure)

    def _next(self) -> list[tuple[_Job[ChunkT, ResultT], int]]:
        """Return the next batch as (job, chunk index) pairs; empty once stopped and drained."""
        with self._some:
            while True:
                self._some.wait_for(lambda: self._queue or self._stopped)
                self._some.wait_for(
                    lambda: self._waiting >= self._last or self._stopped, self._window_s
                )
                batch = self._take()
                if batch or (not self._queue and self._stopped):
                    return batch

    def _take(self) -> list[tuple[_Job[ChunkT, ResultT], int]]:
        batch: list[tuple[_Job[ChunkT, ResultT], int]] = []
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
            if job.taken < len(job.chunks):
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


class SerialWorker:
    """Runs calls one at a time in a thread of its own; `most` bounds the calls in progress."""

    def __init__(self, most: int, name: str = "mbpa-writer") -> None:
        self._most, self._waiting = most, 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def __call__(self, call: Callable[[], ResultT]) -> ResultT:
        """Make the call and return its result; raise `Overloaded` if too many are waiting.

        The call is made even if the caller is cancelled, because a write that has begun cannot be
        undone.
        """
        if self._waiting >= self._most:
            raise Overloaded
        self._waiting += 1
        loop = asyncio.get_running_loop()
        done = loop.run_in_executor(self._pool, call)
        done.add_done_callback(self._release)
        return await asyncio.shield(done)

    def _release(self, done: asyncio.Future[Any]) -> None:
        self._waiting -= 1
        if not done.cancelled():
            done.exception()  # mark it as retrieved, in case the caller is gone

    async def stop(self) -> None:
        await asyncio.to_thread(self._pool.shutdown)
