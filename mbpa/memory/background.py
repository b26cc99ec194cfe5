"""Work in a background thread that shares a lock with its owner.

There is at most one thread per owner, and it gives way to others. It must have ended before the
interpreter does, and it does not exist in a forked process, whose locks must be free all the same.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable

NICENESS = 5  # added to that of the process: a third of the time that another busy thread gets


class BackgroundThread:
    """Runs one piece of work at a time in a thread, and keeps its exception for the owner.

    It keeps no reference to the owner, which is freed as soon as nobody else refers to it.

    Args:
        lock: the owner's lock.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self.is_stopping = False
        """Whether the work that is running is to end early, and no other may begin."""
        self._lock = lock
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        _instances.add(self)

    @property
    def is_running(self) -> bool:
        return self._thread is not None

    @property
    def is_free(self) -> bool:
        """Whether other work may begin: nothing is running, nothing failed, nobody closes it."""
        return self._thread is None and self._failure is None and not self.is_stopping

    def start(self, work: Callable[[], None], *, then: Callable[[], None]) -> None:
        """Begin to work; `raise_failure` and `wait` raise its exceptions.

        The lock must be held, so that the work cannot end before it is known to have begun.

        Args:
            work: called without the lock.
            then: called with the lock when the work has ended; it may start more.
        """

        def run() -> None:
            try:
                _give_way()
                work()
            except BaseException as error:
                self._failure = error
            with self._lock:
                self._thread = None
                try:
                    then()
                except BaseException as error:
                    self._failure = error

        thread = threading.Thread(target=run, name="mbpa-graph-memory", daemon=True)
        thread.start()
        # Not before: whoever waits without the lock must not meet it unstarted.
        self._thread = thread

    def attempt(self, work: Callable[[], None]) -> None:
        """Call `work`, which may start a thread; keep its exception like that of work in a thread.

        For callers who are in the middle of a change, which an exception would leave half done.
        """
        try:
            work()
        except BaseException as error:
            self._failure = error

    def wait(self) -> None:
        """Wait until nothing is running; raise an error if it failed. Do not hold the lock."""
        while True:
            if (thread := self._thread) is not None:
                thread.join()
                continue
            with self._lock:  # held while one piece of work follows another
                if self._thread is None:
                    break
        self.raise_failure()

    def close(self) -> None:
        """End what is running; raise an error if it failed. Do not hold the lock."""
        self.is_stopping = True
        try:
            self.wait()
        finally:
            self.is_stopping = False

    def raise_failure(self) -> None:
        """Raise an error, once, if the last work failed."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise RuntimeError(
                f"work on the graph in the background failed ({failure!r}); all entries are intact"
            ) from failure


def _give_way() -> None:
    """Let other threads go first where there are more of them than processors."""
    if sys.platform == "linux":  # elsewhere, only whole processes have a priority
        # Not from that of this thread: it is inherited from the work that this follows.
        niceness = os.getpriority(os.PRIO_PROCESS, os.getpid()) + NICENESS
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


_instances: weakref.WeakSet[BackgroundThread] = weakref.WeakSet()
_locked: list[BackgroundThread] = []


def _close_all() -> None:
    for each in list(_instances):
        with contextlib.suppress(RuntimeError):
            each.close()


def _lock_all() -> None:
    for each in list(_instances):
        each._lock.acquire()
        _locked.append(each)


def _unlock_all() -> None:
    while _locked:
        _locked.pop()._lock.release()


def _unlock_in_child() -> None:
    for each in _locked:
        each._thread = None
    _unlock_all()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_lock_all, after_in_parent=_unlock_all, after_in_child=_unlock_in_child
    )
