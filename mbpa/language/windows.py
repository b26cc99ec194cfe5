"""Windows over a text, so that every token is read with enough of the text before it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Window(NamedTuple):
    """The model runs on tokens `start` to `stop`; states from position `first` on are used."""

    start: int
    first: int
    stop: int


def plan_windows(length: int, window: int, context: int) -> list[Window]:
    """Return windows that together use each position of a text once.

    Each position is read with at least `context` tokens before it, or all there are.

    Args:
        length: number of tokens in the text.
        window: the most tokens that the model sees at a time.
        context: by how many tokens windows overlap.
    """
    if not 0 <= context < window:
        raise ValueError(f"context must be from 0 to below window={window}, got {context}")
    windows = [Window(0, 0, min(window, length))]
    while windows[-1].stop < length:
        first = windows[-1].stop
        windows.append(Window(first - context, first, min(first - context + window, length)))
    return windows


def group_windows(windows: list[Window], size: int) -> Iterator[list[Window]]:
    """Yield windows of the same length together, at most `size` of them."""
    group: list[Window] = []
    for window in windows:
        length = window.stop - window.start
        if group and (len(group) == size or group[0].stop - group[0].start != length):
            yield group
            group = []
        group.append(window)
    if group:
        yield group
