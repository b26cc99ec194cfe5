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
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mbpa.errors import RunError
from mbpa.serve.example_journal import ExampleJournal
from mbpa.serve.journal import InputError, Journal
from mbpa.serve.middleware import refuse

MAX_TOTAL_BYTES, MAX_FILES = 1 << 30, 4096  # beyond these, the oldest files are deleted
MAX_CONCURRENT_UPLOADS = 8
UPLOAD_TIMEOUT_S = 600
FOLDER_VARIABLE = "GRADIO_TEMP_DIR"  # the only way to set Gradio's folder


class _File(NamedTuple):
    written: float
    size: int
    path: Path


class Uploads:
    """The folder for uploads. Close it when no page uses it any more.

    Until then, an environment variable of the process names it.
    """

    def __init__(
        self, folder: Path, *, max_bytes: int = MAX_TOTAL_BYTES, max_files: int = MAX_FILES
    ) -> None:
        self.folder = folder.resolve()
        self._max_bytes, self._max_files = max_bytes, max_files
        self._coming: list[int] = []
        """Size of each upload in progress, in bytes."""
        self._before = os.environ.get(FOLDER_VARIABLE)
        os.environ[FOLDER_VARIABLE] = str(self.folder)

    @classmethod
    def create_beside(cls, journal: ExampleJournal, max_bytes: int = MAX_TOTAL_BYTES) -> Uploads:
        """Create an empty folder beside a journal.

        Files found there were left by a killed process: the lock of the journal is ours.
        """
        if not isinstance(journal, Journal) or journal.read_only is not None:
            # Other processes may use the journal, too.
            return cls(Path(tempfile.mkdtemp(prefix="mbpa-uploads-")), max_bytes=max_bytes)
        folder = journal.path.with_name(f"{journal.path.name}-uploads")
        try:
            if folder.is_symlink():  # its target is not ours
                folder.unlink()
            elif folder.exists():
                shutil.rmtree(folder)
            folder.mkdir(mode=0o700)
        except OSError as error:
            raise RunError(f"{folder} cannot be emptied for uploads: {error}") from error
        return cls(folder, max_bytes=max_bytes)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        if os.environ.get(FOLDER_VARIABLE) == str(self.folder):
            del os.environ[FOLDER_VARIABLE]
            if self._before is not None:
                os.environ[FOLDER_VARIABLE] = self._before

    def path(self, named: str) -> Path:
        """Return the path of an uploaded file that a visitor names.

        Raises:
            InputError: the file does not exist, or lies outside the folder.
        """
        with contextlib.suppress(OSError, ValueError):
            path = Path(named).resolve()
            if path.is_relative_to(self.folder) and path.is_file():
                return path
        raise InputError("the picture is no longer available: drop it again")

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
        """Admit an upload until `release` is called; raise `HTTPException` if there is no room."""
        if size > self._max_bytes:
            raise HTTPException(413, f"an upload must have at most {self._max_bytes:,} bytes")
        if (
            len(self._coming) >= MAX_CONCURRENT_UPLOADS
            or sum(self._coming) + size > self._max_bytes
        ):
            raise HTTPException(429, "too many uploads at once, try again")
        self._coming.append(size)

    def release(self, size: int) -> None:
        """Record that an upload has ended, successfully or not."""
        self._coming.remove(size)

    def make_room(self) -> None:
        """Make room for uploads in progress: delete the oldest files and abandoned partial ones."""
        max_bytes = self._max_bytes - sum(self._coming)
        files = sorted(_list_files(self.folder.glob("*/*")))  # complete files have own folders
        held, count = sum(file.size for file in files), len(files)
        for file in files:
            if held <= max_bytes and count <= self._max_files:
                break
            if self._delete(file.path):
                held, count = held - file.size, count - 1
        parts = _list_files(path for path in self.folder.glob("*") if path.is_file())
        for part in parts:
            if part.written < time.time() - 2 * UPLOAD_TIMEOUT_S:
                self._delete(part.path)


def _list_files(paths: Iterable[Path]) -> Iterator[_File]:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            yield _File(status.st_mtime, status.st_size, path)


class UploadMiddleware:
    """Middleware that admits uploads below a path if there is room, and limits other bodies."""

    def __init__(self, app: ASGIApp, path: str, uploads: Uploads, max_body_bytes: int) -> None:
        self._app, self._path, self._uploads = app, path, uploads
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(self._path):
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        size = int(headers.get(b"content-length", b"0"))  # the server refuses invalid numbers
        is_upload = scope["path"].rstrip("/").endswith("/upload")
        if b"transfer-encoding" in headers:
            await refuse(send, 411, "the header Content-Length is required")
        elif is_upload:
            await self._receive_upload(scope, receive, send, size)
        elif size > self._max_body_bytes:
            await refuse(send, 413, f"the body must have at most {self._max_body_bytes} bytes")
        else:
            await self._app(scope, receive, send)

    async def _receive_upload(self, scope: Scope, receive: Receive, send: Send, size: int) -> None:
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
            async with asyncio.timeout(UPLOAD_TIMEOUT_S) as limit:
                await self._app(scope, receiving, answering)
        except TimeoutError:
            if is_answered or not limit.expired():
                raise
            await refuse(send, 408, f"an upload must arrive within {UPLOAD_TIMEOUT_S} seconds")
        finally:
            if is_in:
                self._uploads.release(size)
