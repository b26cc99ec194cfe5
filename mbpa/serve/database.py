"""A SQLite file that this process owns, whose acknowledged writes are on disk.

After a failed write nothing more is written until the file is opened again. After a failed flush
the kernel may mark pages as clean that never reached the disk, so a second flush would prove
nothing. Opening rewrites every byte of the log before copying it into the database, which does.

SQLite writes to the files it has opened and never checks that they are still the files in the
directory, so this is checked before a call is acknowledged. A forked process inherits the open
files and must neither use nor close them: SQLite would delete the log that its parent is using.
"""

import contextlib
import ctypes
import hashlib
import io
import os
import sqlite3
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from mbpa import files
from mbpa.serve.heap import return_free_memory
from mbpa.serve.journal_errors import (
    DAMAGE_CODES,
    NOT_A_JOURNAL,
    DamagedError,
    InUseError,
    JournalError,
    advise,
    get_error_code,
    translate_error,
)

_APPLICATION_ID = 0x6D627061  # "mbpa", in the header of the file
BACKUP_SUFFIX = "-backup"  # of the name of a copy while it is being made
_MAX_LOG_BYTES = 4 << 20  # a longer log is copied into the database
_UNLOCKED_VFS = "win32-none" if sys.platform == "win32" else "unix-none"
_MARK_OFFSET, _MARK_BYTES = 32, 37  # in the lock file, after the number of the process


@dataclass(frozen=True)
class Schema:
    """The tables of a file, and how to upgrade those of earlier formats."""

    format: int
    """Version of the format; files of later formats are refused."""
    tables: Mapping[str, str]
    """Columns of each table, in parentheses."""
    fill: Callable[["Database"], None]
    """Writes the first rows of a new file."""
    upgrade: Callable[["Database", int], None]
    """Converts the tables of an earlier file, whose format is passed to it, to this schema."""

    def create(self, database: "Database", *names: str) -> None:
        for name in names:
            database.rows(f"CREATE TABLE {name} {self.tables[name]}")


class Database:
    """Durable transactions on one file, for one process and any number of its threads.

    Args:
        path: the file; files with the suffixes ``-wal`` and ``.lock`` lie beside it.
        create: create the file if it is missing.
        writable: if false, open the file for reading only and change nothing.

    Raises:
        JournalError: the file cannot be read or created.
        InUseError: another process has it open.
        DamagedError: it is damaged, or not a journal.
    """

    def __init__(
        self, path: Path, schema: Schema, *, create: bool = True, writable: bool = True
    ) -> None:
        path = Path(os.path.realpath(path))  # SQLite resolves links, too: they share one journal
        self.path, self._log = path, path.with_name(path.name + "-wal")
        self.read_only: str | None = None
        self.acknowledged = 0
        """The last change that any process has acknowledged, according to the lock file."""
        self._owner = os.getpid()
        self._access = threading.RLock()
        self._opened = contextlib.ExitStack()
        self._places: tuple[tuple[Path, os.stat_result], ...] = ()
        self._commits = 0
        self._closed = False
        self._lock: io.FileIO | None = None
        _OPEN.add(self)
        try:
            if not writable:
                self.read_only = f"{path} was opened for reading"
            self._hold_lock(create)
            with self.reading():
                self._connect()
                self._check_format(schema)
                self._flush_all()
                self._check_integrity()
                self._upgrade(schema)
                self._check_schema(schema)
                if self.read_only is None:
                    self._places = tuple((each, each.stat()) for each in (path, self._log))
        except BaseException:
            self.close()
            raise

    def rows(self, statement: str, *arguments: str | bytes | int | None) -> list[Any]:
        return self._connection.execute(statement, arguments).fetchall()

    def stream(self, statement: str, *arguments: str | bytes | int | None) -> sqlite3.Cursor:
        """Iterate over the rows one at a time, for tables too large to fetch at once.

        Close the result if not all rows are read: an open one keeps the log from being emptied.
        """
        return self._connection.execute(statement, arguments)

    def size(self) -> int:
        ((pages,),), ((page,),) = self.rows("PRAGMA page_count"), self.rows("PRAGMA page_size")
        return int(pages * page)

    def require_owner(self) -> None:
        """Raise `JournalError` in a process that was forked from the one that opened the file."""
        if os.getpid() != self._owner:
            raise JournalError(
                f"{self.path} was opened by process {self._owner}, from which this one was forked: "
                "open it after forking, or in a process of its own"
            )

    @contextlib.contextmanager
    def reading(self) -> Iterator[Self]:
        """Keep other threads out, and turn SQLite's errors into ours."""
        self.require_owner()  # first: a lock that was held during a fork is never released
        with self._access:
            if self._closed:
                raise JournalError(f"{self.path} is closed: open it again")
            try:
                yield self
            except sqlite3.Error as error:
                raise translate_error(self.path, error) from error
            except UnicodeDecodeError as error:  # raised by Python's module for damaged text
                message = f"{self.path}: damaged ({error}): restore it from a backup"
                raise DamagedError(message) from error

    @contextlib.contextmanager
    def writing(self) -> Iterator[Self]:
        """Like `reading`, but a disk error inside makes the database read-only."""
        with self.reading():
            if self.read_only is not None:
                raise JournalError(self.read_only)
            self._require_in_place()
            committed = self._commits
            try:
                yield self
            except (sqlite3.ProgrammingError, sqlite3.InterfaceError):
                raise  # SQLite rejected an argument: nothing was written
            except (sqlite3.Error, OSError) as error:
                raise self._fail(error) from error
            except BaseException:
                if self._commits != committed:  # our view of the file may be out of date
                    reason = f"{self.path} is read-only since a call was interrupted: open it again"
                    self.read_only = self.read_only or reason
                raise

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        self.rows("BEGIN IMMEDIATE")
        try:
            yield
            self._commits += 1  # before COMMIT: an interrupt may arrive right after it
            self.rows("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # some errors roll back by themselves
                self.rows("ROLLBACK")
            raise

    def acknowledge(self, change: int) -> None:
        """Make sure that what was committed is in the files of the directory.

        The number of the change is written to the lock file without a flush. Durability does not
        depend on it, but it shows later whether changes are missing. It is written after the log
        was flushed, so it never claims too much.
        """
        self._require_in_place()
        self.acknowledged = change
        if self._lock is not None:
            with contextlib.suppress(OSError):
                files.write_at(self._lock.fileno(), _make_mark(change), _MARK_OFFSET)

    def give_back_free_pages(self) -> None:
        """Shorten the file by its free pages, and return freed memory to the system."""
        self._connection.executescript("PRAGMA incremental_vacuum")  # `execute` frees only one page
        return_free_memory()  # else glibc keeps as much as the journal is long

    def shorten_log(self) -> None:
        """Copy a long log into the database. Called after a write that is durable either way."""
        try:
            if self._log.stat().st_size > _MAX_LOG_BYTES:
                self._copy_log()
        except (sqlite3.Error, OSError) as error:
            self._fail(error)

    def empty_log(self) -> None:
        """Copy the log into the database and empty it, so that a power cut brings nothing back."""
        self._copy_log()
        files.flush_file(self._log)  # SQLite does not

    def copy_to(self, place: Path) -> None:
        """Write a copy of the database, including what is in the log, to a new file, and flush it.

        Only the owner can read the copy. It needs no log of its own.
        """
        os.close(os.open(place, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        copy = sqlite3.connect(f"file://{_quote(place)}", uri=True, isolation_level=None)
        with contextlib.closing(copy):
            copy.execute("PRAGMA journal_mode = OFF")
            copy.execute("PRAGMA synchronous = OFF")  # it is flushed below
            self._connection.backup(copy)
        files.flush_file(place)

    def close(self) -> None:
        """Close the files. Does nothing in a forked process, since they belong to its parent."""
        if os.getpid() != self._owner:
            return
        with self._access:
            self._closed = True
            self._opened.close()

    # Inside

    def _copy_log(self) -> None:
        """Copy the log into the database, flush it, and truncate the log."""
        ((busy, _, _),) = self.rows("PRAGMA wal_checkpoint(TRUNCATE)")
        assert not busy, "another process reads a file that is locked exclusively"

    def _fail(self, error: sqlite3.Error | OSError) -> JournalError:
        self.read_only = f"{self.path} is read-only since a write failed: {advise(error)}"
        return JournalError(self.read_only)

    def _require_in_place(self) -> None:
        """Become read-only and raise if a file was removed or replaced; save the log first."""
        missing = self._find_missing()
        if not missing:
            return
        self.read_only = (
            f"{self.path} is read-only: {missing[0].name} was removed, moved or replaced while it "
            "was open: put it back and restart"
        )
        with contextlib.suppress(sqlite3.Error):
            self._copy_log()
        raise JournalError(self.read_only)

    def _find_missing(self) -> list[Path]:
        """Return those of our files that were moved, removed or replaced."""
        return [path for path, status in self._places if not files.is_at(path, status)]

    def _close_connection(self) -> None:
        """Close the connection, unless the log's name now belongs to another file.

        SQLite removes the log by its name on closing.
        """
        if self._log in self._find_missing() and self._log.exists():
            _keep_forever(self._connection)
        else:
            self._connection.close()

    def _hold_lock(self, create: bool) -> None:
        """Lock the file for one writer or several readers; a killed process releases its lock."""
        if self.path.is_dir() or not self.path.parent.is_dir():
            raise JournalError(f"{self.path} must be a file in an existing directory")
        beside = self.path.with_name(self.path.name + ".lock")
        if beside.is_dir():
            raise JournalError(f"{beside} must be a file, not a directory: move it away")
        self._lock = self._open_lock(beside)
        if self._lock is not None:
            self._opened.callback(self._lock.close)
            self._take_lock(self._lock.fileno())
            if not files.is_at(beside, os.fstat(self._lock.fileno())):  # replaced meanwhile
                self._opened.close()
                return self._hold_lock(create)
            self.acknowledged = _read_mark(self._lock.fileno())
        if self.path.exists():
            return None
        if not create or self.read_only is not None:
            raise DamagedError(f"{self.path} is missing: restore it from a backup")
        return self._create()

    def _open_lock(self, beside: Path) -> io.FileIO | None:
        """Open the lock file. If it cannot be written, the journal becomes read-only."""
        try:
            descriptor = os.open(beside, os.O_RDWR | os.O_CREAT | files.BINARY, 0o666)
        except OSError as error:
            if not self.path.exists():
                raise self._describe_failed_creation(error) from error
            self.read_only = f"{self.path} is read-only ({error.strerror}): fix this and restart"
            if not beside.exists():
                return None  # nobody can write here, so no lock is needed
            try:
                return io.FileIO(beside)
            except OSError as again:
                message = (
                    f"{beside} cannot be read ({again.strerror}): make it readable and restart"
                )
                raise JournalError(message) from again
        if self.read_only is None and self.path.exists() and not os.access(self.path, os.W_OK):
            self.read_only = f"{self.path} is read-only: make it writable and restart"
        return io.FileIO(descriptor, "r+")  # also closed when it is garbage-collected

    def _take_lock(self, descriptor: int) -> None:
        writes = self.read_only is None
        try:
            if not files.lock(descriptor, exclusive=writes):
                raise JournalError(f"{self.path} cannot be locked: move it to a local disk")
        except BlockingIOError as error:
            holder = files.read_at(descriptor, 20, 0).decode("ascii", "replace").strip()
            raise InUseError(
                f"{self.path} is in use by process {holder or '?'}: stop it, or use another path"
            ) from error
        except OSError as error:
            message = f"{self.path} cannot be locked ({error.strerror}): move it to a local disk"
            raise JournalError(message) from error
        self._opened.callback(files.unlock, descriptor)
        if writes:
            with contextlib.suppress(OSError):  # only the message above needs it
                files.write_at(descriptor, f"{os.getpid():<20}".encode(), 0)

    def _create(self) -> None:
        """Create an empty file that other users cannot read: it will hold people's texts."""
        self.acknowledge(0)  # discard the mark of an earlier journal of this name
        try:
            if self._lock is not None:
                os.fsync(self._lock.fileno())  # a power cut must not bring the earlier mark back
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        except OSError as error:
            raise self._describe_failed_creation(error) from error

    def _describe_failed_creation(self, error: OSError) -> JournalError:
        return JournalError(
            f"{self.path} cannot be created ({error.strerror}): fix this and restart"
        )

    def _connect(self) -> None:
        mode = "mode=rw"
        if self.read_only is not None:  # by default SQLite would create a log or lock the file
            mode = f"mode=ro&vfs={_UNLOCKED_VFS}" if self._log.exists() else "mode=ro&immutable=1"
        self._connection = sqlite3.connect(
            f"file://{_quote(self.path)}?{mode}",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            timeout=1.0,
        )
        self._opened.callback(self._close_connection)
        for setting in (
            "locking_mode = EXCLUSIVE",  # no other reader can keep the log from being emptied
            "synchronous = FULL",
            "secure_delete = ON",
            "temp_store = MEMORY",  # examples must not reach temporary files
            "wal_autocheckpoint = 0",  # SQLite would ignore a failed automatic checkpoint
        ):
            self.rows(f"PRAGMA {setting}")

    def _check_format(self, schema: Schema) -> None:
        """Create the tables of a new file; refuse files of other programs or later formats."""
        ((application,),) = self.rows("PRAGMA application_id")
        ((format,),) = self.rows("PRAGMA user_version")
        ((tables,),) = self.rows("SELECT count(*) FROM sqlite_master")
        if application == 0 and tables == 0 and self.read_only is None:
            if self.acknowledged:
                raise DamagedError(f"{self.path}: damaged (it is empty): restore it from a backup")
            self.rows("PRAGMA auto_vacuum = INCREMENTAL")
            self.rows("PRAGMA journal_mode = WAL")
            with self.transaction():
                schema.create(self, *schema.tables)
                schema.fill(self)
                self.rows(f"PRAGMA application_id = {_APPLICATION_ID}")
                self.rows(f"PRAGMA user_version = {schema.format}")
        elif application != _APPLICATION_ID:
            raise DamagedError(f"{self.path}: {NOT_A_JOURNAL}")
        elif format > schema.format:
            raise JournalError(
                f"{self.path} has format {format}, and this version of mbpa reads formats up to "
                f"{schema.format}: use the version that wrote it, or a later one"
            )

    def _flush_all(self) -> None:
        """Flush what an earlier process may have left unflushed, before relying on it.

        Also remove a copy that it had not finished, since it may hold what is forgotten later.
        """
        if self.read_only is None:
            try:
                self.path.with_name(self.path.name + BACKUP_SUFFIX).unlink(missing_ok=True)
                self.rows("PRAGMA journal_mode = WAL")  # another program may have changed it
                _write_again(self._log)
                self.empty_log()
                # SQLite ignores a failed directory flush, after which removed files might reappear.
                files.flush_directory(self.path.parent)
            except (sqlite3.Error, OSError) as error:
                if get_error_code(error) in DAMAGE_CODES:
                    raise
                self._fail(error)

    def _check_integrity(self) -> None:
        ((problem,),) = self.rows("PRAGMA integrity_check(1)")
        ((encoding,),) = self.rows("PRAGMA encoding")
        ((vacuum,),) = self.rows("PRAGMA auto_vacuum")
        if problem == "ok" and (encoding, vacuum) != ("UTF-8", 2):  # 2: INCREMENTAL
            problem = f"its header says {encoding}, {vacuum}"
        if problem != "ok":
            where = problem.splitlines()[-1]
            raise DamagedError(f"{self.path}: damaged ({where}): restore it from a backup")

    def _upgrade(self, schema: Schema) -> None:
        """Upgrade the tables of an earlier format; in memory if the file cannot be written."""
        ((format,),) = self.rows("PRAGMA user_version")
        if format == schema.format:
            return
        if self.read_only is not None:  # a copy in memory, so that it can be read all the same
            copy = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            self._connection.backup(copy)
            self._connection.close()
            self._connection = copy
        try:
            with self.transaction():
                schema.upgrade(self, format)
                self.rows(f"PRAGMA user_version = {schema.format}")
            if self.read_only is None:
                self.give_back_free_pages()
                self.empty_log()
        except (sqlite3.Error, OSError) as error:
            if self.read_only is not None or get_error_code(error) in DAMAGE_CODES:
                raise
            self._fail(error)  # such as a full disk: make the file readable at least
            self._upgrade(schema)

    def _check_schema(self, schema: Schema) -> None:
        """Compare the table definitions in the file with ours; altered ones count as damage."""
        found = dict(self.rows("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"))
        if found != {name: f"CREATE TABLE {name} {sql}" for name, sql in schema.tables.items()}:
            raise DamagedError(
                f"{self.path}: damaged (its tables differ): restore it from a backup"
            )

    def _abandon(self) -> None:
        """Drop the parent's files in a forked process without closing the database."""
        if hasattr(self, "_connection"):
            _keep_forever(self._connection)
        self._opened.pop_all()
        if self._lock is not None:
            self._lock.close()  # an open copy would keep the lock alive after the parent's end


_OPEN: "weakref.WeakSet[Database]" = weakref.WeakSet()


def _abandon_all() -> None:
    for database in list(_OPEN):
        database._abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)


def _keep_forever(connection: sqlite3.Connection) -> None:
    """Keep a connection from being closed, even when the interpreter exits."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


def _make_mark(change: int) -> bytes:
    number = b"%020d" % change
    return number + b" " + hashlib.blake2b(number, digest_size=8).hexdigest().encode()


def _read_mark(lock: int) -> int:
    """Read the last acknowledged change from a lock file; 0 if it is absent or damaged."""
    found = files.read_at(lock, _MARK_BYTES, _MARK_OFFSET)
    number = found[:20]
    return int(number) if number.isdigit() and found == _make_mark(int(number)) else 0


def _quote(path: Path) -> str:
    """Quote a path for a URI, whatever its bytes are."""
    place = os.path.abspath(path)
    if os.sep == "/":
        return quote(os.fsencode(place))
    return "/" + quote(place.replace(os.sep, "/"))  # C:\\run\\journal: /C%3A/run/journal


def _write_again(path: Path) -> None:
    """Rewrite and flush a file, including pages wrongly marked clean after a failed flush."""
    descriptor = os.open(path, os.O_RDWR | files.BINARY)
    try:
        offset = 0
        while chunk := files.read_at(descriptor, 1 << 20, offset):
            offset += files.write_at(descriptor, chunk, offset)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
