"""Coverage of a case: transitions between lines of chosen files, by `sys.settrace`.

`sys.monitoring` would be faster, but needs Python 3.12.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Hashable, Sequence
from types import FrameType, TracebackType
from typing import Any

HIGHEST_BUCKET = 4  # the buckets are counts of 1, 2–3, 4–7, and 8 or more
LINE_BITS = 20


class ArcTracer:
    """A context manager that collects (file, previous line, line).

    Args:
        paths: a file is traced if its path contains one of these, with `/` as separator.
        excluded: a file is not traced if its path contains one of these. Use this for threads that
            no case waits for, whose work would count for whichever case is running.
    """

    def __init__(self, paths: Sequence[str], excluded: Sequence[str] = ()) -> None:
        self._paths, self._excluded = tuple(paths), tuple(excluded)
        self._numbers: dict[str, int] = {}
        self._counts: dict[int, int] = {}

    def watch_new_threads(self) -> None:
        """Also trace threads started from now on."""
        threading.settrace(self._enter_frame)

    def unwatch_new_threads(self) -> None:
        threading.settrace(None)

    def __enter__(self) -> ArcTracer:
        self._counts.clear()
        sys.settrace(self._enter_frame)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        sys.settrace(None)

    def features(self) -> set[Hashable]:
        """Return the arcs since the last entry, each with the bucket of its count."""
        return {
            (arc, min(count.bit_length(), HIGHEST_BUCKET))
            for arc, count in list(self._counts.items())
        }

    def _number(self, path: str) -> int:
        """Return a number for a file to trace, -1 for others."""
        plain = path.replace("\\", "/")
        is_traced = any(part in plain for part in self._paths)
        if any(part in plain for part in self._excluded):
            is_traced = False
        self._numbers[path] = len(self._numbers) if is_traced else -1
        return self._numbers[path]

    def _enter_frame(self, frame: FrameType, event: str, argument: Any) -> Any:
        path = frame.f_code.co_filename
        number = self._numbers.get(path)
        if number is None:
            number = self._number(path)
        if number < 0:
            return None
        counts, previous = self._counts, frame.f_lineno

        def step(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal previous
            if event == "line":
                line = frame.f_lineno
                arc = ((number << LINE_BITS) | previous) << LINE_BITS | line
                counts[arc] = counts.get(arc, 0) + 1
                previous = line
            return step

        return step
