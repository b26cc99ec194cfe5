"""A check that a concurrent history is linearizable: the search of Wing & Gong, improved by Lowe.

A history is linearizable if each operation can be assigned one moment between its call and its
return, so that a sequential specification explains every result. Starting from the earliest call,
the search tries each operation that was called before any other remaining one returned. It
remembers every visited pair of a set of operations and the state after them, and does not try it
again (G. Lowe, "Testing for linearizability", 2017; porcupine does the same).
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

State = TypeVar("State", bound=Hashable)
STEPS_PER_LOOK_AT_THE_CLOCK = 1024


@dataclass(frozen=True)
class Event:
    """One operation of a history.

    Args:
        called: time of the call, on a clock that all clients share.
        returned: time of the return; `None` if it never returned, so that it may have taken effect
            at any time after the call, or not at all.
        result: the result, as far as the specification covers it; meaningless if it never returned.
    """

    client: int
    kind: str
    argument: Any
    called: int
    returned: int | None = None
    result: Any = None

    @property
    def is_lost(self) -> bool:
        return self.returned is None


class Verdict(enum.Enum):
    """The verdict on a history."""

    LINEARIZABLE = "linearizable"
    VIOLATION = "not linearizable"
    UNDECIDED = "undecided"


class Check(NamedTuple):
    """The outcome of a search.

    Args:
        order: indices into the history: an order that explains it, or else the longest order found
            that explains a part of it.
        tried: number of pairs of a set of operations and a state that were visited.
    """

    verdict: Verdict
    order: tuple[int, ...]
    tried: int


@dataclass(eq=False)
class _Entry:
    """A call or a return, in a doubly linked list."""

    index: int
    is_call: bool
    matching: _Entry | None = None
    before: _Entry | None = None
    after: _Entry | None = None


Step = Callable[[State, Event], State | None]
"""The specification: returns the state after an operation; `None` if its result is impossible."""


def check_history(
    history: Sequence[Event], start: State, step: Step[State], limit_s: float = 60.0
) -> Check:
    """Search for an order that explains a history.

    Args:
        start: the state before the history.
        step: the specification, which must be deterministic. For an operation without a result it
            returns the state after it, whatever the result was.
        limit_s: seconds after which the verdict is `UNDECIDED`.
    """
    return _Search(history, start, step).run(time.monotonic() + limit_s)


class _Search(Generic[State]):
    def __init__(self, history: Sequence[Event], start: State, step: Step[State]) -> None:
        self._history, self._step, self._state = history, step, start
        self._head = _link(history)
        self._returns_left = sum(not event.is_lost for event in history)
        self._chosen: list[tuple[_Entry, State]] = []
        self._done = 0  # one bit per operation
        self._seen: set[tuple[int, State]] = set()
        self._longest: tuple[int, ...] = ()

    def run(self, give_up: float) -> Check:
        entry, steps = self._head.after, 0
        while self._returns_left:
            steps += 1
            if steps % STEPS_PER_LOOK_AT_THE_CLOCK == 0 and time.monotonic() > give_up:
                return Check(Verdict.UNDECIDED, self._longest, len(self._seen))
            if entry is not None and entry.is_call:
                entry = self._head.after if self._choose(entry) else entry.after
            elif self._chosen:
                entry = self._take_back().after
            else:
                return Check(Verdict.VIOLATION, self._longest, len(self._seen))
        return Check(Verdict.LINEARIZABLE, self._order(), len(self._seen))

    def _order(self) -> tuple[int, ...]:
        return tuple(entry.index for entry, _ in self._chosen)

    def _choose(self, entry: _Entry) -> bool:
        """Choose an operation as the next one if it is possible and leads to an unvisited state."""
        after = self._step(self._state, self._history[entry.index])
        if after is None or (entry.matching is None and after == self._state):
            return False  # a lost operation that changed nothing can be left out
        reached = self._done | 1 << entry.index, after
        if reached in self._seen:
            return False
        self._seen.add(reached)
        self._chosen.append((entry, self._state))
        self._done, self._state = reached
        _unlink(entry)
        if entry.matching is not None:
            _unlink(entry.matching)
            self._returns_left -= 1
        if len(self._chosen) > len(self._longest):
            self._longest = self._order()
        return True

    def _take_back(self) -> _Entry:
        entry, self._state = self._chosen.pop()
        self._done ^= 1 << entry.index
        if entry.matching is not None:
            _relink(entry.matching)
            self._returns_left += 1
        _relink(entry)
        return entry


def _link(history: Sequence[Event]) -> _Entry:
    """Link calls and returns by time; at equal times calls come first, which allows more orders."""
    timed = []
    for index, event in enumerate(history):
        call = _Entry(index, is_call=True)
        timed.append((event.called, 0, call))
        if event.returned is not None:
            call.matching = _Entry(index, is_call=False)
            timed.append((event.returned, 1, call.matching))
    head = last = _Entry(-1, is_call=False)
    for _, _, entry in sorted(timed, key=lambda each: each[:2]):
        last.after, entry.before = entry, last
        last = entry
    return head


def _unlink(entry: _Entry) -> None:
    assert entry.before is not None
    entry.before.after = entry.after
    if entry.after is not None:
        entry.after.before = entry.before


def _relink(entry: _Entry) -> None:
    assert entry.before is not None
    entry.before.after = entry
    if entry.after is not None:
        entry.after.before = entry
