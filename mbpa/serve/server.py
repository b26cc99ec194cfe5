"""`mbpa serve`: serve a run over HTTP until stopped."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from mbpa.device import choose_device
from mbpa.encoders.own import OwnEncoder
from mbpa.errors import CheckpointError, MissingExtraError, RunError
from mbpa.language import MemoryLM
from mbpa.language.run_directory import is_language_run
from mbpa.serve.classifier import Classifier
from mbpa.serve.heap import return_free_memory_regularly, return_large_blocks
from mbpa.serve.journal import JournalError
from mbpa.serve.run_info import RunInfo

try:
    import uvicorn
    from fastapi import FastAPI

    from mbpa.serve.app import create_app
    from mbpa.serve.connections import WatchedProtocol, raise_file_limit
    from mbpa.serve.language_app import PAGE_PATH, create_language_app
    from mbpa.serve.settings import LanguageSettings, Settings
except ImportError as error:
    raise MissingExtraError("the HTTP service", extra="serve") from error

SHUTDOWN_TIMEOUT_S = 10  # for open requests to finish after a signal to stop
ENDING_TIMEOUT_S = 2  # of these, for requests that are ended early to be answered
STOP_SIGNALS = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGBREAK")  # the last: Ctrl-Break, on Windows only
    if hasattr(signal, name)
]


@dataclass(frozen=True)
class _Opened:
    """A run that is ready to be served."""

    app: FastAPI
    greeting: str
    """What was loaded, in a few words."""
    teaches: str
    """What anyone could teach if there were no token."""
    read_only: str | None = None
    """Why nothing can be learnt, if so."""
    on_stop: Callable[[], None] = lambda: None
    """Ends requests that take long; called some seconds after a signal to stop."""


def serve(
    directory: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    settings: Settings | None = None,
    threshold: float | None = None,
    device: str = "auto",
    encoder: OwnEncoder | None = None,
    database: str | None = None,
    page: Callable[[FastAPI, Classifier], FastAPI] | None = None,
    path: str = "/docs",
) -> None:
    """Load a run and serve it; return after a signal to stop, when everything is closed.

    Args:
        directory: the run: a classifier's, or a language model's.
        host: address to listen on.
        port: port to listen on; 0 for any.
        settings: the token and limits.
        threshold: confidence threshold to use in place of the run's; for classifiers only.
        device: "auto" (a GPU if there is one), "cpu" or "cuda".
        encoder: the user's own encoder that the run was made with; for classifiers only.
        database: address of the PostgreSQL database that holds the run; for classifiers only.
        page: mounts pages on the app of a classifier and returns it.
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
    if is_language_run(directory):
        if threshold is not None:
            raise RunError("a language run has no threshold")
        if encoder is not None:
            raise RunError("a language run has no encoder")
        if database is not None:
            raise RunError("a language run cannot be kept in a database")
        opening = _open_language_run(directory, settings, chosen)
        path = PAGE_PATH
    else:
        RunInfo.read(directory)  # report a faulty run first, before anything slow
        opening = _open_classifier(directory, settings, chosen, threshold, encoder, database, page)
    listener = _open_listener(host, port)
    with listener:
        print(f"loading {directory}", file=sys.stderr, flush=True)
        with opening as opened:
            _run(
                opened.app,
                listener,
                lambda: _announce(opened, listener, settings, path),
                opened.on_stop,
            )
    where = "the database" if database is not None else directory
    print(f"stopped; everything that was taught is in {where}", file=sys.stderr)


@contextmanager
def _open_classifier(
    directory: Path,
    settings: Settings,
    device: torch.device,
    threshold: float | None,
    encoder: OwnEncoder | None,
    database: str | None,
    page: Callable[[FastAPI, Classifier], FastAPI] | None,
) -> Iterator[_Opened]:
    try:
        classifier = Classifier.load(directory, device=device, encoder=encoder, database=database)
    except JournalError as error:
        raise RunError(str(error)) from error
    with classifier:
        if threshold is not None:
            classifier.threshold = threshold
        app = create_app(classifier, settings)
        yield _Opened(
            page(app, classifier) if page else app,
            greeting=f"{len(classifier)} examples of {len(classifier.labels)} labels",
            teaches="the classifier",
            read_only=classifier.journal.read_only,
        )


@contextmanager
def _open_language_run(
    directory: Path,
    settings: Settings,
    device: torch.device,
) -> Iterator[_Opened]:
    try:
        lm = MemoryLM.load(directory, device=device)
    except (ValueError, CheckpointError) as error:
        raise RunError(str(error)) from error
    try:
        app = create_language_app(lm, LanguageSettings(**vars(settings)))
        service = app.state.service
        number, tokens = len(service.sources), sum(each.tokens for each in service.sources)
        noun = "document" if number == 1 else "documents"
        yield _Opened(
            app,
            greeting=f"{service.name}, {number} {noun}, {tokens} tokens",
            teaches="the model",
            on_stop=service.end_all,
        )
    finally:
        lm.close()


def _open_listener(host: str, port: int) -> socket.socket:
    """Bind a socket.

    This is done before anything is loaded, so that a port in use is reported at once and not after
    half a minute.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # TCP is named explicitly: only then does asyncio send small responses without delay.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        # On Windows the first option would let two services share a port, and the second does not.
        reuse = "SO_REUSEADDR" if sys.platform != "win32" else "SO_EXCLUSIVEADDRUSE"
        listener.setsockopt(socket.SOL_SOCKET, getattr(socket, reuse), 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        why = getattr(error, "strerror", None) or error
        raise RunError(
            f"cannot listen on {host}, port {port} ({why}): choose another --port, or 0 for any"
        ) from error
    return listener


def _announce(opened: _Opened, listener: socket.socket, settings: Settings, path: str) -> None:
    host, port = listener.getsockname()[:2]
    where = f"[{host}]" if ":" in host else host
    print(opened.greeting)
    if opened.read_only:
        print(f"read-only: {opened.read_only}", file=sys.stderr)
    if not settings.requires_token and host not in ("127.0.0.1", "::1"):
        print(
            f"anyone who can reach this address can teach {opened.teaches}: set a token",
            file=sys.stderr,
        )
    print(f"serving on http://{where}:{port}{path}", flush=True)


class _Server(uvicorn.Server):
    """A server that calls `on_ready` once it accepts connections.

    If requests are still open some seconds after a signal to stop, it calls `on_stop`.
    """

    def __init__(
        self, config: uvicorn.Config, on_ready: Callable[[], None], on_stop: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._on_ready, self._on_stop = on_ready, on_stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        patience_s = SHUTDOWN_TIMEOUT_S - ENDING_TIMEOUT_S
        ending = asyncio.get_running_loop().call_later(patience_s, self._on_stop)
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()


def _run(
    app: FastAPI,
    listener: socket.socket,
    on_ready: Callable[[], None],
    on_stop: Callable[[], None],
) -> None:
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
    # Uvicorn raises the signal again when it is done, but the run must still be closed.
    before = {each: signal.signal(each, lambda *_: None) for each in STOP_SIGNALS}
    stop_returning = return_free_memory_regularly()
    try:
        _Server(config, on_ready, on_stop).run(sockets=[listener])
    finally:
        stop_returning.set()
        for each, handler in before.items():
            signal.signal(each, handler)
