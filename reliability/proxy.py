"""A TCP proxy that cuts, holds and delays the traffic of its connections."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Literal, Self

Mode = Literal["pass", "cut", "hold"]
CHUNK_BYTES = 1 << 16
TICK_S = 0.02


class Proxy:
    """Forwards connections to a port of this machine. Use it as a context manager.

    Its `mode` can be changed at any time: "cut" ends all connections and refuses new ones, "hold"
    keeps them open and forwards nothing, as a network that loses every packet. `delay_s` is added
    to each chunk that is forwarded.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self.mode: Mode = "pass"
        self.delay_s = 0.0
        self._is_closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_closed = True
        self._listener.close()
        for thread in self._threads:
            thread.join(5.0)

    def _accept(self) -> None:
        self._listener.settimeout(TICK_S)
        while not self._is_closed:
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            if self.mode == "cut":
                client.close()
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self._target), timeout=5.0)
            except OSError:
                client.close()
                continue
            for one, other in ((client, server), (server, client)):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                thread = threading.Thread(target=self._forward, args=(one, other), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        source.settimeout(TICK_S)
        with contextlib.suppress(OSError), source, target:
            while not self._is_closed and self.mode != "cut":
                if self.mode == "hold":
                    time.sleep(TICK_S)
                    continue
                try:
                    chunk = source.recv(CHUNK_BYTES)
                except TimeoutError:
                    continue
                if not chunk:
                    return
                time.sleep(self.delay_s)
                while self.mode == "hold" and not self._is_closed:
                    time.sleep(TICK_S)
                target.sendall(chunk)
