"""Processes that make the same calls on a `ShardedMemory`, in one group of `torch.distributed`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forks import CONTEXT

import mbpa

TIMEOUT_S = 60


class Processes:
    """A group; every call is sent to all processes and returns their answers, by rank."""

    def __init__(self, pipes: Sequence[Connection], pids: Sequence[int]) -> None:
        self._pipes, self.pids = pipes, pids

    def call_each(self, requests: Sequence[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> Any:
        """Send one request to each process; exceptions are answers, too."""
        for pipe, request in zip(self._pipes, requests, strict=True):
            with suppress(ConnectionError):  # it has died, which its answer will say
                pipe.send(request)
        answers = []
        for pipe in self._pipes:
            try:
                answers.append(pipe.recv())
            except (EOFError, ConnectionError) as error:
                answers.append(error)
        return answers

    def call(self, name: str, *arguments: Any, **keywords: Any) -> Any:
        """Make the same call everywhere; raise the first exception."""
        answers = self.call_each([(name, arguments, keywords)] * len(self._pipes))
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def kill(self, rank: int) -> None:
        os.kill(self.pids[rank], signal.SIGKILL)


@contextmanager
def start_processes(size: int, folder: Path) -> Iterator[Processes]:
    """Start processes, and end them."""
    ends = [CONTEXT.Pipe() for _ in range(size)]
    workers = [
        CONTEXT.Process(target=_work, args=(theirs, str(folder / "store"), rank, size))
        for rank, (_, theirs) in enumerate(ends)
    ]
    for worker in workers:
        worker.start()
    for _, theirs in ends:
        theirs.close()
    try:
        yield Processes([ours for ours, _ in ends], [worker.pid or 0 for worker in workers])
    finally:
        for ours, _ in ends:
            ours.close()
        for worker in workers:
            worker.join(10)
            worker.kill()


def _work(pipe: Connection, store: str, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    memory: Any = None
    while True:
        try:
            name, arguments, keywords = pipe.recv()
        except EOFError:
            return
        answer: Any
        try:
            if name == "make":
                memory = mbpa.ShardedMemory(*arguments, **keywords)
                answer = memory.share
            elif name == "run":
                function, *rest = arguments
                answer = function(memory, *rest)
            else:
                answer = getattr(memory, name)
                answer = answer(*arguments, **keywords) if callable(answer) else answer
                answer = None if answer is memory else answer
        except Exception as error:
            answer = error
        pipe.send(answer)
