"""`mbpa serve`: serve a run over HTTP until stopped."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from mbpa.device import choose_device
from mbpa.errors import MissingExtraError, RunError
from mbpa.serve.classifier import Classifier
from mbpa.serve.heap import return_free_memory_regularly, return_large_blocks
from mbpa.serve.journal import JournalError
from mbpa.serve.run_info import RunInfo

try:
    import uvicorn
    from fastapi import FastAPI

    from mbpa.serve.app import create_app
    from mbpa.serve.connections import WatchedProtocol, raise_file_limit
    from mbpa.serve.settings import Settings
except ImportError as error:
    raise MissingExtraError("the HTTP service", extra="serve") from error

SHUTDOWN_TIMEOUT_S = 10  # for open requests to finish after a signal to stop


def serve(
    directory: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    settings: Settings | None = None,
    threshold: float | None = None,
    device: str = "auto",
    page: Callable[[FastAPI, Classifier], FastAPI] | None = None,
    path: str = "/docs",
) -> None:
    """Load a run and serve it; return after a signal to stop, when everything is closed.

    Args:
        threshold: confidence threshold to use in place of the run's.
        device: "auto" (a GPU if there is one), "cpu" or "cuda".
        page: mounts pages on the app and returns it.
        path: path of the page in the URL that is printed when the service is ready.

    Raises:
        RunError: the run cannot be served, the address is not available, or there is no such
            device.
    """
    settings = settings or Settings()
    return_large_blocks()
    if "OMP_NUM_THREADS" not in os.environ:  # keep one core for reading and answering requests
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))
    if threshold is not None and not 0 <= threshold <= 1:
        raise RunError(f"threshold must be between 0 and 1, got {threshold}")
    try:
        chosen = choose_device(device)
    except ValueError as error:
        raise RunError(str(error)) from error
    RunInfo.read(directory)  # report a faulty run first, before anything slow
    listener = _open_listener(host, port)
    with listener:
        print(f"loading {directory}", file=sys.stderr, flush=True)
        try:
            classifier = Classifier.load(directory, device=chosen)
        except JournalError as error:
            raise RunError(str(error)) from error
        with classifier:
            if threshold is not None:
                classifier.threshold = threshold
            app = create_app(classifier, settings)
            app = page(app, classifier) if page else app
            _run(app, listener, lambda: _announce(classifier, listener, settings, path))
    print(f"stopped; everything that was taught is in {directory}", file=sys.stderr)


def _open_listener(host: str, port: int) -> socket.socket:
    """Bind a socket.

    This is done before anything is loaded, so that a port in use is reported at once and not after
    half a minute.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # TCP is named explicitly: only then does asyncio send small responses without delay.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        why = getattr(error, "strerror", None) or error
        raise RunError(
            f"cannot listen on {host}, port {port} ({why}): choose another --port, or 0 for any"
        ) from error
    return listener


def _announce(
    classifier: Classifier, listener: socket.socket, settings: Settings, path: str
) -> None:
    host, port = listener.getsockname()[:2]
    where = f"[{host}]" if ":" in host else host
    print(f"{len(classifier)} examples of {len(classifier.labels)} labels")
    if reason := classifier.journal.read_only:
        print(f"read-only: {reason}", file=sys.stderr)
    if settings.token is None and host not in ("127.0.0.1", "::1"):
        print(
            "anyone who can reach this address can teach the classifier: set a token",
            file=sys.stderr,
        )
    print(f"serving on http://{where}:{port}{path}", flush=True)


class _Server(uvicorn.Server):
    """A server that calls `on_ready` once it accepts connections."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()


def _run(app: FastAPI, listener: socket.socket, on_ready: Callable[[], None]) -> None:
    raise_file_limit()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    config = uvicorn.Config(
        app,
        http=WatchedProtocol,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
        backlog=1024,
    )
    # The model's thread needs the interpreter lock between any two operations. At the default
    # switch interval of 5 ms, a busy event loop would make it wait longer than it works.
    sys.setswitchinterval(5e-4)
    # Uvicorn raises the signal again when it is done, but the classifier must still be closed.
    before = {
        each: signal.signal(each, lambda *_: None) for each in (signal.SIGTERM, signal.SIGINT)
    }
    stop_returning = return_free_memory_regularly()
    try:
        _Server(config, on_ready).run(sockets=[listener])
    finally:
        stop_returning.set()
        for each, handler in before.items():
            signal.signal(each, handler)
