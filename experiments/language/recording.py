"""A call that a GPU replays as a whole, because it finishes many small operations faster than
Python can launch them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

WARM_UP_CALLS = 3  # calls before recording, in which libraries initialise themselves


class Recorded:
    """A call that runs normally a few times, and is then recorded as a CUDA graph and replayed.

    Args:
        call: reads and writes the same tensors each time.
        source: the generator it draws random numbers from, if any.
    """

    def __init__(self, call: Callable[[], None], source: torch.Generator | None = None) -> None:
        self._call, self._source, self._made = call, source, 0
        self._stream = torch.cuda.Stream()
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self._graph is None and self._made < WARM_UP_CALLS:
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
            # Other threads may continue their work meanwhile, such as saving.
            with torch.cuda.graph(
                self._graph, stream=self._stream, capture_error_mode="thread_local"
            ):
                self._call()
        self._graph.replay()
