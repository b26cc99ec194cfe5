"""Errors of the journal, and what SQLite's and the system's errors mean to its users.

Standard library only.
"""

import sqlite3
from pathlib import Path

DAMAGE_CODES = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
NOT_A_JOURNAL = "not a journal: use another path, or move the file away"


class JournalError(RuntimeError):
    """The journal cannot be opened, read or written; the message says in one line what to do."""


class InUseError(JournalError):
    """Another process has the journal open."""


class DamagedError(JournalError):
    """The files do not hold what was written, or are not a journal at all."""


class UnavailableError(JournalError):
    """The database cannot be used at the moment; what failed can be tried again."""


def get_error_code(error: Exception) -> int:
    """Return the primary error code, such as SQLITE_IOERR for SQLITE_IOERR_FSYNC."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF


def translate_error(path: Path, error: sqlite3.Error) -> JournalError:
    """Return our error for one of SQLite's."""
    code = get_error_code(error)
    if code == sqlite3.SQLITE_BUSY:
        return InUseError(f"{path} is in use by another program: stop it, or use another path")
    kind = DamagedError if code in DAMAGE_CODES else JournalError
    return kind(f"{path}: {advise(error)}")


def advise(error: Exception) -> str:
    """Say in one line what is wrong and what to do."""
    if isinstance(error, OSError):
        return f"the disk failed ({error.strerror}): check it and restart"
    name = getattr(error, "sqlite_errorname", "?")
    advice = {
        sqlite3.SQLITE_NOTADB: NOT_A_JOURNAL,
        sqlite3.SQLITE_CORRUPT: f"damaged ({error}): restore it from a backup",
        sqlite3.SQLITE_FULL: "the disk is full: free some space and restart",
        sqlite3.SQLITE_IOERR: f"the disk failed ({name}): check it and restart",
        sqlite3.SQLITE_READONLY: "cannot be written: make it writable and restart",
        sqlite3.SQLITE_CANTOPEN: "cannot be opened: check permissions and free space, and restart",
    }
    return advice.get(get_error_code(error), f"{error} ({name})")
