"""A thread that does one job at a time, from a queue of limited length; jobs can be ended early."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from mbpa.serve.batching import Overloaded

ResultT = TypeVar("ResultT")
PACE_DECAY_PER_JOB = 0.8  # factor on the durations of earlier jobs per newer job


class Ended(Exception):
    """The job was ended before it was done."""

    def __init__(self) -> None:
        super().__init__("the service is stopping, try again")


class Job(Generic[ResultT]):
    """Work that a `ModelThread` does; await `answered` for the result."""

    def __init__(self, call: Callable[[Job[ResultT]], ResultT]) -> None:
        self._call, self._loop = call, asyncio.get_running_loop()
        self._ended = threading.Event()
        self.answered: asyncio.Future[ResultT] = self._loop.create_future()
        # Mark an exception as seen, in case nobody waits any more.
        self.answered.add_done_callback(lambda done: done.cancelled() or done.exception())

    @property
    def is_ended(self) -> bool:
        """Whether nobody wants the result any more."""
        return self._ended.is_set()

    def check(self) -> None:
        """Raise `Ended` if nobody wants the result any more; long work calls this regularly."""
        if self.is_ended:
            raise Ended

    def run(self) -> None:
        """Do the work, and pass the result to the event loop."""
        result: Any = None
        failure: Exception | None = None
        try:
            self.check()
            result = self._call(self)
        except Exception as error:
            failure = error
        self.answer(result, failure)

    def answer(self, result: Any, failure: Exception | None) -> None:
        """Pass the result to whoever awaits it; from any thread."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._answer, result, failure)

    def _answer(self, result: Any, failure: Exception | None) -> None:
        if self.answered.done():
            return
        if failure is not None:
            self.answered.set_exception(failure)
        else:
            self.answered.set_result(result)

    def mark_ended(self) -> None:
        self._ended.set()


class ModelThread:
    """Does jobs one at a time in a thread of its own.

    Args:
        most: the most jobs that may wait; further ones are refused with `Overloaded`.
        name: name of the thread.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._some = threading.Condition()
        self._urgent: deque[Job[Any]] = deque()
        self._usual: deque[Job[Any]] = deque()
        self._running: Job[Any] | None = None
        self._is_stopped = False
        self._job_s = 1.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def waiting(self) -> int:
        """Number of jobs that have not begun."""
        return len(self._urgent) + len(self._usual)

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        """End all jobs and the thread."""
        with self._some:
            self._is_stopped = True
        self.end_all()
        with self._some:
            self._some.notify()
        await asyncio.to_thread(self._thread.join)

    def submit(
        self, call: Callable[[Job[ResultT]], ResultT], *, is_urgent: bool = False
    ) -> Job[ResultT]:
        """Queue a call, which is given its job; from the event loop.

        Args:
            call: the work.
            is_urgent: do it before all others, and never refuse it: for work that takes
                milliseconds.

        Raises:
            Overloaded: too many jobs are waiting.
            Ended: the thread was stopped.
        """
        job = Job(call)
        with self._some:
            if self._is_stopped:
                raise Ended
            # If none is running, the thread is about to take the first.
            if not is_urgent and len(self._usual) + (self._running is not None) > self._most:
                raise Overloaded(self._job_s)
            (self._urgent if is_urgent else self._usual).append(job)
            self._some.notify()
        return job

    def end(self, job: Job[Any]) -> None:
        """End a job whose result nobody wants; if it has begun, it ends at its next `check`."""
        job.mark_ended()
        with self._some:
            for queue in (self._urgent, self._usual):
                if job in queue:
                    queue.remove(job)
                    job.answer(None, Ended())

    def end_all(self) -> None:
        """End all jobs."""
        with self._some:
            jobs = [*self._urgent, *self._usual, *([self._running] if self._running else [])]
        for job in jobs:
            self.end(job)

    def _run(self) -> None:
        while True:
            with self._some:
                self._some.wait_for(lambda: self._urgent or self._usual or self._is_stopped)
                if not self._urgent and not self._usual:
                    return
                job = (self._urgent or self._usual).popleft()
                self._running = job
            start = time.perf_counter()
            job.run()
            took = time.perf_counter() - start
            self._job_s = PACE_DECAY_PER_JOB * self._job_s + (1 - PACE_DECAY_PER_JOB) * took
            with self._some:
                self._running = None
