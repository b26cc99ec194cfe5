"""Windows over a text, so that every token is read with enough of the text before it."""

from __future__ import annotations

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
