"""Notice that an embedding was trained on after the keys in a memory were computed with it.

Nothing else tells: fused optimisers and writes through `.data` leave no trace in torch's version
counters. So a few numbers of each weight matrix are compared with those at the last write. While a
network learns and writes by turns, as in the paper, its weights move between writes by design. Only
a movement since the last write that is several times as large is a sign that keys were forgotten.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from mbpa.memory import Memory

NUMBERS_PER_WEIGHT = 32
GOLDEN_RATIO = (5**0.5 - 1) / 2
TIME_SHARE = 0.01  # of the time until the next look, for the shorter of the last two looks
MIN_CHANGE = 0.05  # of a weight matrix, relative to its norm
MARGIN = 4.0  # by which a change exceeds those between writes
FIRST_WRITES = 8  # at which the embedding is looked at, however long that takes
FADING = 0.9  # of the largest change between writes, at each further write


class KeyWatch:
    """Compares an embedding with itself at the last write.

    Args:
        list_weights: returns the tensors on which the embedding depends.
        memory: the memory that holds the keys.
    """

    _seen: _Seen
    _content: tuple[int, int]
    """What the memory held at the last look."""
    _last_look_took_s = math.inf
    _first_writes_seen = 0
    _unseen_writes = 0
    """Writes since the last look at a write."""

    def __init__(self, list_weights: Callable[[], Iterable[Tensor]], memory: Memory) -> None:
        self._list_weights, self._memory = list_weights, memory
        self._look()  # the first one of a process takes longer than all others
        self.start_over()

    def start_over(self) -> None:
        """Take the keys in the memory for those of the embedding as it is now."""
        self._usual_change, self._has_told = 0.0, False
        self._next_look_s, self._first_writes_seen = 0.0, 0
        self._remember(self._look())

    @contextmanager
    def follow_conversion(self) -> Iterator[None]:
        """Keep what is remembered while memory and embedding are moved or converted."""
        is_ours = self._content == self._get_content()
        yield
        if is_ours:
            self._content = self._get_content()

    def note_write(self) -> None:
        """Remember that keys of the current embedding were written just now.

        The first writes are all looked at. Otherwise a training that wrote a few times could be
        over before the next look, and would seem to have followed the last write.
        """
        self._content = self._get_content()
        is_early = self._first_writes_seen < FIRST_WRITES
        if self._seen.counts and (is_early or time.monotonic() >= self._next_look_s):
            self._first_writes_seen += is_early
            before, now = self._seen, self._look()
            change = before.compare(now) / math.sqrt(1 + self._unseen_writes)
            self._usual_change = max(change, FADING * self._usual_change)
            self._remember(now)
        else:
            self._unseen_writes += 1

    def finds_stale_keys(self) -> bool:
        """Return whether the embedding has changed much since the last write; `True` only once.

        Mostly this costs nothing, since looks are rare.
        """
        if self._has_told or not self._seen.counts or time.monotonic() < self._next_look_s:
            return False
        now = self._look()
        # In n steps, a weight that wanders moves √n times as far as in one, one that drifts n times
        # as far. Estimating by √n and allowing for n is safe for both.
        usual = self._usual_change * (1 + self._unseen_writes)
        if self._seen.compare(now) <= max(MIN_CHANGE, MARGIN * usual):
            if self._unseen_writes:
                self._seen = now  # the change may all have come before those writes
                self._unseen_writes = 0
            return False
        if self._content != self._get_content():
            self.start_over()  # others have written, or replaced keys: their own affair
            return False
        self._has_told = len(self._memory) > 0
        return self._has_told

    def __getstate__(self) -> dict[str, Any]:
        is_ours = self._content == self._get_content()
        # Clocks of processes differ, and a copy of the memory has a revision of its own.
        return {**vars(self), "_next_look_s": 0.0, "_content": None if is_ours else (-1, -1)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._content = state["_content"] or self._get_content()

    def _get_content(self) -> tuple[int, int]:
        return self._memory.next_id, self._memory.revision

    def _remember(self, seen: _Seen) -> None:
        self._seen = seen
        self._unseen_writes = 0
        self._content = self._get_content()

    def _look(self) -> _Seen:
        """Return some numbers of each weight matrix, and wait before the next look."""
        start = time.monotonic()
        with torch.inference_mode(False), torch.no_grad():
            samples = [_sample(each) for each in self._list_weights() if _is_matrix(each)]
            if len({each.device for each in samples}) > 1:
                samples = [each.cpu() for each in samples]
            numbers = torch.cat(samples).double().cpu() if samples else torch.empty(0)
        now = time.monotonic()
        # One look may take long because the machine is busy. After a long pause, a network that
        # learnt and wrote by turns would seem to have changed after the last write.
        took_s = now - start
        self._next_look_s = now + min(took_s, self._last_look_took_s) / TIME_SHARE
        self._last_look_took_s = took_s
        return _Seen([len(each) for each in samples], numbers)


class _Seen(NamedTuple):
    """Some numbers of each weight matrix."""

    counts: list[int]
    numbers: Float[Tensor, "N"]

    def compare(self, now: _Seen) -> float:
        """Return the largest relative change of a weight matrix; 1 if there are others now."""
        if self.counts != now.counts:
            return 1.0
        if torch.equal(self.numbers, now.numbers):
            return 0.0
        pairs = zip(self.numbers.split(self.counts), now.numbers.split(now.counts), strict=True)
        changes = [(new - old).norm() / max(old.norm(), new.norm(), _TINY) for old, new in pairs]
        return float(torch.stack(changes).max())


_TINY = torch.tensor(1e-300, dtype=torch.float64)


def _is_matrix(weight: Tensor) -> bool:
    """Return whether this is a weight matrix. Biases and statistics may change a lot at first."""
    return weight.ndim > 1 and weight.is_floating_point() and not weight.is_meta


def _sample(weight: Tensor) -> Float[Tensor, "N"]:
    """Return numbers at places that are spread over rows and columns alike.

    At regular places they could all belong to one input, which may always be zero.
    """
    flat = weight.detach().flatten()
    places = torch.arange(min(len(flat), NUMBERS_PER_WEIGHT), dtype=torch.float64)
    places = (places * GOLDEN_RATIO % 1 * len(flat)).long()
    return flat[places.to(flat.device)].float()
