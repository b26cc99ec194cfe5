"""A call that a GPU replays as a whole: it is done with many small parts sooner than Python has
named them."""

from __future__ import annotations

from collections.abc import Callable

import torch

FIRST = 3  # calls of a process, before one is recorded: libraries set themselves up in them


class Recorded:
    """A call that is made as it is a few times, then recorded as a CUDA graph and replayed.

    Args:
        call: reads and writes the same tensors each time.
        source: that it draws random numbers from, if it does.
    """

    def __init__(self, call: Callable[[], None], source: torch.Generator | None = None) -> None:
        self._call, self._source, self._made = call, source, 0
        self._stream = torch.cuda.Stream()
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self._graph is None and self._made < FIRST:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._call()
            torch.cuda.current_stream().wait_stream(self._stream)
            self._made += 1
            return
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            if self._source is not None:
                self._graph.register_generator_state(self._source)
            # Other threads may go on with what they do, such as saving.
            with torch.cuda.graph(
                self._graph, stream=self._stream, capture_error_mode="thread_local"
            ):
                self._call()
        self._graph.replay()
