"""Files uploaded by visitors, in a folder of bounded size that is deleted with the page.

Gradio deletes the files it remembers, but loses track of them when it is killed. It limits the size
of one file but not their total. It checks the login before it reads a body, so room is made when it
begins to read.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from starlette.exceptions import HTTPException

from mbpa.errors import RunError
from mbpa.serve.journal import InputError, Journal
from mbpa.serve.middleware import App, Message, Receive, Scope, Send, refuse

MOST_BYTES, MOST_FILES = 1 << 30, 4096  # total; beyond these the oldest files are deleted
AT_ONCE = 8  # concurrent uploads
SLOWEST = 600  # seconds for one upload to arrive
VARIABLE = "GRADIO_TEMP_DIR"  # the only way to set Gradio's folder


class _File(NamedTuple):
    written: float
    size: int
    path: Path


class Uploads:
    """The folder for uploads. Close it when no page uses it any more.

    Until then, an environment variable of the process names it.
    """

    def __init__(
        self, folder: Path, *, most_bytes: int = MOST_BYTES, most_files: int = MOST_FILES
    ) -> None:
        self.folder = folder.resolve()
        self._most_bytes, self._most_files = most_bytes, most_files
        self._coming: list[int] = []
        """Size of each upload in progress, in bytes."""
        self._before = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = str(self.folder)

    @classmethod
    def beside(cls, journal: Journal, most_bytes: int = MOST_BYTES) -> Uploads:
        """Create an empty folder beside a journal.

        Files found there were left by a killed process: the lock of the journal is ours.
        """
        folder = journal.path.with_name(f"{journal.path.name}-uploads")
        if journal.read_only is not None:  # other processes may read the journal, too
            return cls(Path(tempfile.mkdtemp(prefix="mbpa-uploads-")), most_bytes=most_bytes)
        try:
            if folder.is_symlink():  # its target is not ours
                folder.unlink()
            elif folder.exists():
                shutil.rmtree(folder)
            folder.mkdir(mode=0o700)
        except OSError as error:
            raise RunError(f"{folder} must be emptied for what visitors drop: {error}") from error
        return cls(folder, most_bytes=most_bytes)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        if os.environ.get(VARIABLE) == str(self.folder):
            del os.environ[VARIABLE]
            if self._before is not None:
                os.environ[VARIABLE] = self._before

    def path(self, named: str) -> Path:
        """Return the path of an uploaded file that a visitor names.

        Raises:
            InputError: the file does not exist, or lies outside the folder.
        """
        with contextlib.suppress(OSError, ValueError):
            path = Path(named).resolve()
            if path.is_relative_to(self.folder) and path.is_file():
                return path
        raise InputError("the picture is not there any more: drop it again")

    def drop(self, named: Iterable[str]) -> None:
        """Delete these uploaded files."""
        for each in named:
            with contextlib.suppress(InputError):
                self._delete(self.path(each))

    def _delete(self, path: Path) -> bool:
        """Delete a file; return whether it is gone."""
        try:
            path.unlink(missing_ok=True)
        except OSError:
            return False
        if path.parent != self.folder:
            with contextlib.suppress(OSError):  # the folder may hold another file
                path.parent.rmdir()
        return True

    def admit(self, size: int) -> None:
        """Admit an upload until `left` is called; raise `HTTPException` if there is no room."""
        if size > self._most_bytes:
            raise HTTPException(413, f"send at most {self._most_bytes:,} bytes at a time")
        if len(self._coming) >= AT_ONCE or sum(self._coming) + size > self._most_bytes:
            raise HTTPException(429, "too many uploads at once, try again")
        self._coming.append(size)

    def left(self, size: int) -> None:
        """Record that an upload has ended, successfully or not."""
        self._coming.remove(size)

    def make_room(self) -> None:
        """Make room for uploads in progress: delete the oldest files and abandoned partial ones."""
        most_bytes = self._most_bytes - sum(self._coming)
        files = sorted(_looked_at(self.folder.glob("*/*")))  # complete files have their own folders
        held, count = sum(file.size for file in files), len(files)
        for file in files:
            if held <= most_bytes and count <= self._most_files:
                break
            if self._delete(file.path):
                held, count = held - file.size, count - 1
        parts = _looked_at(path for path in self.folder.glob("*") if path.is_file())
        for part in parts:
            if part.written < time.time() - 2 * SLOWEST:
                self._delete(part.path)


def _looked_at(paths: Iterable[Path]) -> Iterator[_File]:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            told = path.stat()
            yield _File(told.st_mtime, told.st_size, path)


class Entrance:
    """Middleware that admits uploads below a path if there is room, and limits other bodies."""

    def __init__(self, app: App, path: str, uploads: Uploads, most: int) -> None:
        self._app, self._path, self._uploads, self._most = app, path, uploads, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(self._path):
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        size = int(headers.get(b"content-length", b"0"))  # the server refuses invalid numbers
        is_upload = scope["path"].rstrip("/").endswith("/upload")
        if b"transfer-encoding" in headers:
            await refuse(send, 411, "say how long the body is: Content-Length")
        elif is_upload:
            await self._uploaded(scope, receive, send, size)
        elif size > self._most:
            await refuse(send, 413, f"a body must have at most {self._most} bytes")
        else:
            await self._app(scope, receive, send)

    async def _uploaded(self, scope: Scope, receive: Receive, send: Send, size: int) -> None:
        is_in = is_answered = False

        async def answering(message: Message) -> None:
            nonlocal is_answered
            is_answered = True
            await send(message)

        async def receiving() -> Message:
            nonlocal is_in
            if not is_in:
                self._uploads.admit(size)
                is_in = True
                await asyncio.to_thread(self._uploads.make_room)
            return await receive()

        try:
            async with asyncio.timeout(SLOWEST) as limit:
                await self._app(scope, receiving, answering)
        except TimeoutError:
            if is_answered or not limit.expired():
                raise
            await refuse(send, 408, f"an upload must come within {SLOWEST} seconds")
        finally:
            if is_in:
                self._uploads.left(size)
