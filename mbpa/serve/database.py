"""A file of SQLite that this process holds, and that is on the disk when it says so.

Once a write has failed nothing more is written until the file is opened anew: after a failed flush
the kernel may call pages clean that never reached the disk, and a second flush would then prove
nothing. Opening writes the log again, byte by byte, before it copies it into the database; that
does.
"""

import contextlib
import errno
import os
import sqlite3
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

if sys.platform != "win32":
    import fcntl

_APPLICATION = 0x6D627061  # "mbpa", in the header of the file
_LOG_BYTES = 4 << 20  # a longer log is copied into the database
_NOT_A_JOURNAL = "not a journal: use another path, or move the file away"
_UNLOCKED = "win32-none" if sys.platform == "win32" else "unix-none"


class JournalError(RuntimeError):
    """The journal cannot be opened, read or written; the message is a line on what to do."""


class InUseError(JournalError):
    """Another process has it open."""


@dataclass(frozen=True)
class Schema:
    """What makes the tables of a new file, and the format that they have."""

    format: int
    """Files of later ones are refused."""
    statements: tuple[str, ...]


class Database:
    """Statements, in transactions that are durable. Nothing here keeps threads apart.

    Args:
        path: of the file, created when missing; ``-wal`` and ``.lock`` stand beside it.

    Raises:
        JournalError: it is no such file, of a later format, damaged, in use by another process, or
            cannot be read or created.
    """

    def __init__(self, path: Path, schema: Schema) -> None:
        self.path, self._log = path, path.with_name(path.name + "-wal")
        self.read_only: str | None = None
        self._opened = contextlib.ExitStack()
        self._closed = False
        try:
            self._hold_lock()
            with self.reading():
                self._connect()
                self._check_format(schema)
                self._flush_all()
                ((problem,),) = self.rows("PRAGMA quick_check(1)")
                if problem != "ok":
                    where = problem.splitlines()[-1]
                    raise JournalError(f"{path}: damaged ({where}): restore it from a copy")
        except BaseException:
            self.close()
            raise

    def rows(self, statement: str, *arguments: str | bytes | int | None) -> list[Any]:
        return self._connection.execute(statement, arguments).fetchall()

    def size(self) -> int:
        ((pages,),), ((page,),) = self.rows("PRAGMA page_count"), self.rows("PRAGMA page_size")
        return int(pages * page)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        if self._closed:
            raise JournalError(f"{self.path} is closed: open it again")
        try:
            yield
        except sqlite3.Error as error:
            raise JournalError(f"{self.path}: {_advice(error)}") from error

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """An error of the disk in here ends all writing."""
        with self.reading():
            if self.read_only is not None:
                raise JournalError(self.read_only)
            try:
                yield
            except (sqlite3.Error, OSError) as error:
                raise self._fail(error) from error

    def _fail(self, error: sqlite3.Error | OSError) -> JournalError:
        self.read_only = f"{self.path} is read-only since a write failed: {_advice(error)}"
        return JournalError(self.read_only)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        self.rows("BEGIN IMMEDIATE")
        try:
            yield
            self.rows("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # some errors have rolled back by themselves
                self.rows("ROLLBACK")
            raise

    def give_back_free_pages(self) -> None:
        self._connection.executescript("PRAGMA incremental_vacuum")  # `execute` gives back one

    def shorten_log(self) -> None:
        """After a call that is durable either way, and so is acknowledged even if this fails."""
        try:
            if self._log.stat().st_size > _LOG_BYTES:
                self._copy_log()
        except (sqlite3.Error, OSError) as error:
            self._fail(error)

    def empty_log(self) -> None:
        self._copy_log()
        _flush(self._log)  # SQLite does not; a power cut might bring back what was in it

    def _copy_log(self) -> None:
        """Into the database, flushed; then the log is cut to nothing."""
        ((busy, _, _),) = self.rows("PRAGMA wal_checkpoint(TRUNCATE)")
        assert not busy, "somebody else reads what is locked exclusively"

    def close(self) -> None:
        self._closed = True
        self._opened.close()

    def _hold_lock(self) -> None:
        """One process writes, or several read; a killed one's lock is released with it."""
        if self.path.is_dir() or not self.path.parent.is_dir():
            raise JournalError(f"{self.path} must be a file in a directory that exists")
        beside = self.path.with_name(self.path.name + ".lock")
        try:
            lock = os.open(beside, os.O_RDWR | os.O_CREAT, 0o666)
            if self.path.exists() and not os.access(self.path, os.W_OK):
                self.read_only = f"{self.path} is read-only: allow writing to it and restart"
        except OSError as error:
            if not self.path.exists():
                message = f"{self.path} cannot be created ({error.strerror}): see to it and restart"
                raise JournalError(message) from error
            self.read_only = f"{self.path} is read-only ({error.strerror}): see to it and restart"
            if not beside.exists():
                return  # where nobody can write, nobody need be kept from it
            lock = os.open(beside, os.O_RDONLY)
        self._opened.callback(os.close, lock)
        _lock(lock, self.path, exclusive=self.read_only is None)
        self._opened.callback(_unlock, lock)

    def _connect(self) -> None:
        mode = "mode=rwc"
        if self.read_only is not None:  # SQLite would want to create a log, or lock what it reads
            mode = f"mode=ro&vfs={_UNLOCKED}" if self._log.exists() else "mode=ro&immutable=1"
        self._connection = sqlite3.connect(
            f"file:{quote(str(self.path.absolute()))}?{mode}",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            timeout=1.0,
        )
        self._opened.callback(self._connection.close)
        for setting in (
            "locking_mode = EXCLUSIVE",  # no reader elsewhere keeps the log from being emptied
            "synchronous = FULL",
            "secure_delete = ON",
            "temp_store = MEMORY",  # what is to be forgotten must not reach temporary files
            "wal_autocheckpoint = 0",  # SQLite would ignore its failure
        ):
            self.rows(f"PRAGMA {setting}")

    def _check_format(self, schema: Schema) -> None:
        """Look before writing: the file may be somebody else's."""
        ((application,),) = self.rows("PRAGMA application_id")
        ((format,),) = self.rows("PRAGMA user_version")
        ((tables,),) = self.rows("SELECT count(*) FROM sqlite_master")
        if application == 0 and tables == 0 and self.read_only is None:
            self.rows("PRAGMA auto_vacuum = INCREMENTAL")
            self.rows("PRAGMA journal_mode = WAL")
            with self.transaction():
                for statement in schema.statements:
                    self.rows(statement)
                self.rows(f"PRAGMA application_id = {_APPLICATION}")
                self.rows(f"PRAGMA user_version = {schema.format}")
        elif application != _APPLICATION:
            raise JournalError(f"{self.path}: {_NOT_A_JOURNAL}")
        elif format > schema.format:
            raise JournalError(
                f"{self.path} has format {format}, this version of mbpa reads up to "
                f"{schema.format}: use the version that wrote it, or a later one"
            )

    def _flush_all(self) -> None:
        """What an earlier process may not have flushed is, before anything is built on it."""
        if self.read_only is None:
            try:
                self.rows("PRAGMA journal_mode = WAL")  # somebody may have changed it
                _write_again(self._log)
                self.empty_log()
                _flush(self.path.parent)  # SQLite ignores failure; removed files might come back
            except (sqlite3.Error, OSError) as error:
                if _code(error) == sqlite3.SQLITE_CORRUPT:
                    raise
                self._fail(error)


def _lock(descriptor: int, path: Path, *, exclusive: bool) -> None:
    if sys.platform == "win32":
        return  # SQLite's own lock has to do there
    try:
        fcntl.flock(descriptor, fcntl.LOCK_NB | (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH))
    except BlockingIOError as error:
        holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
        message = f"{path} is in use by process {holder or '?'}: stop it, or use another path"
        raise InUseError(message) from error
    except OSError as error:
        message = f"{path} cannot be locked ({error.strerror}): keep it on a local disk"
        raise JournalError(message) from error
    if exclusive:
        with contextlib.suppress(OSError):  # it is for the message above only
            os.pwrite(descriptor, f"{os.getpid():<20}".encode(), 0)


def _unlock(descriptor: int) -> None:
    """Closing is not enough if a process forked meanwhile has inherited the descriptor."""
    if sys.platform != "win32":
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def _write_again(path: Path) -> None:
    """Flush even what the kernel wrongly calls clean, since an earlier flush failed."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        offset = 0
        while chunk := os.pread(descriptor, 1 << 20, offset):
            offset += os.pwrite(descriptor, chunk, offset)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flush(path: Path) -> None:
    if sys.platform == "win32":  # directories cannot be opened there
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that does not flush directories
            raise
    finally:
        os.close(descriptor)


def _code(error: Exception) -> int:
    """The primary code, such as SQLITE_IOERR for SQLITE_IOERR_FSYNC."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF


def _advice(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"the disk failed ({error.strerror}): see to it and restart"
    name = getattr(error, "sqlite_errorname", "?")
    advice = {
        sqlite3.SQLITE_NOTADB: _NOT_A_JOURNAL,
        sqlite3.SQLITE_CORRUPT: f"damaged ({error}): restore it from a copy",
        sqlite3.SQLITE_BUSY: "open in another program: close it there and restart",
        sqlite3.SQLITE_FULL: "the disk is full: free some space and restart",
        sqlite3.SQLITE_IOERR: f"the disk failed ({name}): see to it and restart",
        sqlite3.SQLITE_READONLY: "must not be written: allow that and restart",
        sqlite3.SQLITE_CANTOPEN: "cannot be opened: see to permissions and space, and restart",
    }
    return advice.get(_code(error), f"{error} ({name})")
