"""`mbpa serve`, `mbpa explore` and `mbpa check`: what one does with a run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from mbpa.cli.command import Command
from mbpa.errors import MissingExtraError, RunError


@dataclass(frozen=True)
class Serve(Command):
    """Serve a run over HTTP: predict, learn, explain, forget; documented at /docs."""

    directory: tyro.conf.Positional[Path]
    """What `mbpa teach` wrote."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all, and then with a token."""
    port: int = 8000
    """Port to listen on; 0: any free one, which is printed."""
    token: str | None = None
    """A password of your choice: requests must then carry the header `Authorization: Bearer
    TOKEN`, all but those for /health and /docs, and the page asks for it. By default the value of
    the environment variable MBPA_TOKEN, which lists of processes do not show; without either,
    nobody is asked for one."""
    threshold: float | None = None
    """Confidence below which it abstains; by default the one that was fitted."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto: on a GPU if there is one."""

    def run(self) -> int:
        from mbpa.serve import server
        from mbpa.serve.settings import Settings

        server.serve(
            self.directory,
            host=self.host,
            port=self.port,
            settings=Settings(token=self._asked_for()),
            threshold=self.threshold,
            device=self.device,
        )
        return 0

    def _asked_for(self) -> str | None:
        """The token. An empty option is a variable that was not set, and would let everybody in."""
        if self.token == "":
            raise RunError("--token must not be empty; leave it out to ask nobody for one")
        return self.token or os.environ.get("MBPA_TOKEN") or None


@dataclass(frozen=True)
class Explore(Serve):
    """Serve a run with a page on top: ask, see why, teach, undo, review what it was taught."""

    def run(self) -> int:
        try:
            from mbpa.explorer import page
            from mbpa.serve import server
            from mbpa.serve.settings import Settings
        except MissingExtraError as error:
            raise MissingExtraError("what the page needs", extra="explore") from error

        server.serve(
            self.directory,
            host=self.host,
            port=self.port,
            settings=Settings(token=self._asked_for(), open_paths=(page.PATH,)),
            threshold=self.threshold,
            device=self.device,
            page=page.mount,
            path=page.PATH,
        )
        return 0


@dataclass(frozen=True)
class Check(Command):
    """Verify a run: every check sum of its files, and that they fit each other.

    Changes nothing. A run is also verified whenever it is served.
    """

    directory: tyro.conf.Positional[Path]
    """What `mbpa teach` wrote."""

    def run(self) -> int:
        from mbpa.serve.verification import check_run

        for name, what in check_run(self.directory):
            print(f"{name:10} {what}")
        print(f"{self.directory} is whole")
        return 0
