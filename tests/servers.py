"""Servers for tests: `mbpa serve` in a process of its own, or an app in a thread of this one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

PATIENCE = 60.0


class Server:
    """`mbpa serve` as a child process."""

    def __init__(self, run: Path) -> None:
        command = [sys.executable, "-m", "mbpa.cli", "serve", str(run), "--port", "0"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MBPA_TOKEN": ""}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        self.said: list[str] = []
        self.url = self._announced()
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE)

    def _announced(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line)
            if "serving on " in line:
                return line.split("serving on ")[1].strip().removesuffix("/docs")
        raise AssertionError("it did not start: " + "".join(self.said))

    def kill(self) -> None:
        """As a power cut would."""
        self.process.send_signal(signal.SIGKILL)
        self._ended()

    def stop(self, by: signal.Signals = signal.SIGTERM) -> int:
        """As its owner would."""
        self.process.send_signal(by)
        return self._ended()

    def _ended(self) -> int:
        self.client.close()
        assert self.process.stdout is not None
        self.said += self.process.stdout.readlines()
        self.process.stdout.close()
        return self.process.wait(PATIENCE)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()


@contextlib.contextmanager
def running(app: FastAPI, **options: Any) -> Iterator[str]:
    """An app behind a port, in a thread; gives its address. Options are uvicorn's."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="on", **options))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        give_up = time.monotonic() + PATIENCE
        while not server.started and time.monotonic() < give_up and thread.is_alive():
            time.sleep(0.005)
        assert server.started
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
