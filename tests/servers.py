"""Servers for tests: `mbpa serve` in a process of its own, or an app in a thread of this one."""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from forks import ROOT, Fork

TIMEOUT_S = 60.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MBPA_TOKEN": ""}


def open_client(url: str, **options: Any) -> httpx.Client:
    """Return a client that loads no certificates, which would take longer than most requests."""
    return httpx.Client(base_url=url, verify=False, **{"timeout": TIMEOUT_S, **options})


def send(method: str, url: str | httpx.URL, **options: Any) -> httpx.Response:
    """Send one request over a connection of its own."""
    with open_client("") as client:
        return client.request(method, url, **options)


get, post = functools.partial(send, "GET"), functools.partial(send, "POST")


class Server:
    """`mbpa serve` as a child process."""

    def __init__(self, run: Path | str, *options: str, cwd: Path = ROOT) -> None:
        command = ("serve", run, "--port", "0", *options)
        self._follow(Fork(*command, module="mbpa.cli", cwd=cwd, environment=ENVIRONMENT))

    @classmethod
    def of_script(cls, path: Path, *arguments: str) -> Server:
        """Return a server that a Python script starts, in the folder of the script."""
        server = cls.__new__(cls)
        script, folder = path.read_text("utf-8"), path.parent
        server._follow(Fork(*arguments, script=script, cwd=folder, environment=ENVIRONMENT))
        return server

    def _follow(self, process: Fork) -> None:
        self.process = process
        self.output: list[str] = []
        self.url = self._wait_for_url()
        self.client = open_client(self.url)

    def _wait_for_url(self) -> str:
        for line in self.process.stdout:
            self.output.append(line)
            if "serving on " in line:
                page = line.split("serving on ")[1].strip()
                return page.removesuffix("/docs").removesuffix("/page")
        raise AssertionError("the server did not start: " + "".join(self.output))

    def kill(self) -> None:
        """End the process as a power cut would."""
        self.process.send_signal(signal.SIGKILL)
        self._wait_for_end()

    def stop(self, by: signal.Signals = signal.SIGTERM) -> int:
        """Stop the server as its owner would; return the exit code."""
        self.process.send_signal(by)
        return self._wait_for_end()

    def _wait_for_end(self) -> int:
        self.client.close()
        self.output += self.process.stdout.readlines()
        self.process.stdout.close()
        return self.process.wait(TIMEOUT_S)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()


@contextlib.contextmanager
def running(app: FastAPI, **options: Any) -> Iterator[str]:
    """Run an app in a thread; yield its address. The options are uvicorn's."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="on", **options))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while not server.started and time.monotonic() < deadline and thread.is_alive():
            time.sleep(0.005)
        assert server.started
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
