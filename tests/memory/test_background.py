"""Work in the background: what its owner is told, and to whom it gives way."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from mbpa.memory.background import NICENESS, BackgroundThread


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities on Linux only")
def test_it_gives_way_to_all_other_threads() -> None:
    lock, seen = threading.RLock(), []
    before = os.getpriority(os.PRIO_PROCESS, 0)

    def work() -> None:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    def then() -> None:  # in the thread of the work, whose priority new threads inherit
        if len(seen) % 3:
            thread.start(work, then=then)

    thread = BackgroundThread(lock)
    for _ in range(2):
        with lock:
            thread.start(work, then=then)
        thread.wait()
    assert seen == [min(19, before + NICENESS)] * 6
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_a_failure_is_raised_once_and_stops_further_work() -> None:
    lock = threading.RLock()
    thread = BackgroundThread(lock)

    def fail() -> None:
        raise OSError("no room")

    with lock:
        thread.start(fail, then=lambda: None)
    with pytest.raises(RuntimeError, match=r"no room.*all entries are intact"):
        thread.wait()
    thread.wait()
    assert thread.is_free


def test_what_follows_the_work_may_start_more() -> None:
    lock, order = threading.RLock(), []
    thread = BackgroundThread(lock)

    def then() -> None:
        if len(order) < 3:
            thread.start(lambda: order.append(len(order)), then=then)

    with lock:
        then()
        assert thread.is_running
    thread.wait()
    assert order == [0, 1, 2]
    assert not thread.is_running


def test_closing_tells_the_work_to_end() -> None:
    lock, begun = threading.RLock(), threading.Event()
    thread = BackgroundThread(lock)

    def work() -> None:
        begun.set()
        while not thread.is_stopping:
            pass

    with lock:
        thread.start(work, then=lambda: None)
    assert begun.wait(10)
    thread.close()
    assert thread.is_free
