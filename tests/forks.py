"""Child processes that start in milliseconds: forks of one process that has imported mbpa.

A process of its own imports torch for two seconds, which is longer than what most children do.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context, reduction
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[1]

# What `mbpa serve` imports, and what torch imports when it first makes an optimizer.
PRELOADED = ["torch", "torch._dynamo", "mbpa.cli", "mbpa.serve.app", "mbpa.serve.retraining"]
CONTEXT = get_context("forkserver")
"""Starts processes that have imported mbpa, for `multiprocessing`."""
CONTEXT.set_forkserver_preload(PRELOADED)


class Fork:
    """A child process that runs a script or, as `python -m` does, a module.

    Offers what the tests use of `subprocess.Popen`; `stdout` also has what is written to stderr.
    """

    def __init__(
        self,
        *arguments: object,
        script: str = "",
        module: str = "",
        cwd: Path = ROOT,
        environment: dict[str, str] | None = None,
    ) -> None:
        reading, writing = os.pipe()
        job = _Job(
            [module or "-c", *map(str, arguments)],
            script,
            module,
            str(cwd),
            {**os.environ, **(environment or {})},
        )
        self._process = CONTEXT.Process(target=_run, args=(job, reduction.DupFd(writing)))
        self._process.start()
        os.close(writing)
        self.stdout: IO[str] = os.fdopen(reading, encoding="utf-8")

    def finish(self) -> tuple[int, str]:
        """Wait for the end; return the exit code and what was printed."""
        with self.stdout:
            printed = self.stdout.read()
        return self.wait(), printed

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        with suppress(ProcessLookupError):  # it may have ended by itself, as with `Popen`
            os.kill(self._process.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"the process has not ended after {timeout} s")
        return self._process.exitcode


@dataclass(frozen=True)
class _Job:
    arguments: list[str]
    script: str
    module: str
    cwd: str
    environment: dict[str, str]


def _run(job: _Job, out: Any) -> None:
    """Do what a new interpreter would do, in the child."""
    descriptor = out.detach()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", buffering=1, closefd=False)
    os.chdir(job.cwd)
    os.environ.clear()
    os.environ.update(job.environment)
    sys.argv, sys.path = job.arguments, [job.cwd, str(ROOT), *sys.path]
    try:
        if job.module:
            runpy.run_module(job.module, run_name="__main__")
        else:
            exec(compile(job.script, "<script>", "exec"), {"__name__": "__main__"})
    finally:
        sys.stdout.flush()
