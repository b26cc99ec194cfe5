"""Locks, atomic writes and flushes, which keep files intact through crashes and power cuts.

This module uses the standard library only, so that the journal loads without torch. It is also the
place where Windows differs from other systems (docs/platforms.md).
"""

import contextlib
import errno
import hashlib
import json
import os
import random
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

BINARY = getattr(os, "O_BINARY", 0)
"""Flag for `os.open`, without which Windows translates line ends in what is read or written."""

# Some network file systems (Lustre without -o flock) have no locks.
_CANNOT_LOCK = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}
_CANNOT_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EXDEV}
_EXCHANGE = 2  # RENAME_EXCHANGE on Linux, RENAME_SWAP on macOS
_AT_WORKING_DIRECTORY = -100  # AT_FDCWD
# On Windows a file cannot be replaced while another process has it open, if only to read it.
_REPLACE_TIMEOUT_S, _RETRY_INTERVAL_S = 5.0, 0.02
# Windows locks ranges of bytes, and nobody else can read them: so these lie beyond any content. It
# knows exclusive locks only. A reader locks one of the bytes, and a writer locks all of them.
_LOCK_OFFSET, _LOCK_BYTES = 1 << 30, 256


# Writing


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that readers see either the old content or the new, never a mixture.

    The content is on disk before the file gets its name. The name itself is durable after
    `flush_directory(path.parent)`.
    """
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        rename_over(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def rename_over(path: Path, target: Path) -> None:
    """Rename a file over another; wait a little where a reader of the other forbids it."""
    patience = time.monotonic() + (_REPLACE_TIMEOUT_S if sys.platform == "win32" else 0.0)
    while True:
        try:
            return os.replace(path, target)
        except PermissionError:
            if time.monotonic() >= patience:
                raise
            time.sleep(_RETRY_INTERVAL_S)


def write_durably(path: Path, content: bytes) -> None:
    """Replace a file; on return both its content and its name would survive a power cut."""
    replace_file(path, content)
    flush_directory(path.parent)


def make_directory(path: Path) -> None:
    """Create a directory with its parents, so that all of them survive a power cut."""
    created = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in created:
        flush_directory(each.parent)


def flush_directory(path: Path) -> None:
    """Flush a directory to disk, so that files created, renamed or removed there stay so."""
    if sys.platform != "win32":  # where directories cannot be opened
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system that does not flush directories
                raise
        finally:
            os.close(descriptor)


def flush_file(path: Path) -> None:
    """Flush the content of a file to disk, even if another process wrote it."""
    # Windows flushes only files that may be written to.
    descriptor = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def exchange(one: Path, other: Path) -> bool:
    """Swap the names of two files or directories atomically.

    Returns:
        Whether they were swapped: some systems and file systems do not support it.
    """
    import ctypes  # imported here because it is slow and `import mbpa` does not need it

    try:
        library = ctypes.CDLL(None, use_errno=True)
    except TypeError:  # Windows
        return False
    paths = os.fsencode(one), os.fsencode(other)
    if hasattr(library, "renameat2"):
        here = _AT_WORKING_DIRECTORY
        failed = library.renameat2(here, paths[0], here, paths[1], _EXCHANGE)
    elif hasattr(library, "renamex_np"):
        failed = library.renamex_np(*paths, _EXCHANGE)
    else:
        return False
    if failed and (code := ctypes.get_errno()) not in _CANNOT_EXCHANGE:
        raise OSError(code, os.strerror(code), str(one), None, str(other))
    return not failed


# Locks


def lock(descriptor: int, *, exclusive: bool = True, wait: bool = False) -> bool:
    """Lock an open file for this process; the lock ends when the process does, if not before.

    Args:
        descriptor: of the open file.
        exclusive: take an exclusive lock, not one that is shared with other readers.
        wait: wait for a lock that another process holds.

    Returns:
        Whether the file is locked: some file systems do not support locks.

    Raises:
        BlockingIOError: another process holds the lock, and `wait` is false.
    """
    try:
        _take_lock(descriptor, exclusive, wait)
    except OSError as error:
        if error.errno not in _CANNOT_LOCK:
            raise
        return False
    return True


def unlock(descriptor: int) -> None:
    """Release a lock; closing the file is not enough while a forked process has it open, too."""
    with contextlib.suppress(OSError):
        _release_lock(descriptor)


if sys.platform == "win32":

    def read_at(descriptor: int, count: int, offset: int) -> bytes:
        """Read bytes of an open file from `offset` on; no other thread must use the descriptor."""
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, count)

    def write_at(descriptor: int, content: bytes, offset: int) -> int:
        """Write to an open file from `offset` on; no other thread must use the descriptor."""
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.write(descriptor, content)

    _locked: dict[int, tuple[int, int]] = {}  # first byte and number of bytes, by descriptor

    def _take_lock(descriptor: int, exclusive: bool, wait: bool) -> None:
        while not any(
            _lock_bytes(descriptor, place, count) for place, count in _list_ranges(exclusive)
        ):
            if not wait:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            time.sleep(_RETRY_INTERVAL_S)

    def _list_ranges(exclusive: bool) -> list[tuple[int, int]]:
        """Return the ranges of bytes of which one is to be locked."""
        if exclusive:
            return [(_LOCK_OFFSET, _LOCK_BYTES)]
        places = range(_LOCK_OFFSET, _LOCK_OFFSET + _LOCK_BYTES)
        return [(place, 1) for place in random.sample(places, _LOCK_BYTES)]

    def _lock_bytes(descriptor: int, place: int, count: int) -> bool:
        os.lseek(descriptor, place, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, count)
        except PermissionError:
            return False
        _locked[descriptor] = place, count
        return True

    def _release_lock(descriptor: int) -> None:
        if descriptor in _locked:
            place, count = _locked.pop(descriptor)
            os.lseek(descriptor, place, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_UNLCK, count)

else:

    def read_at(descriptor: int, count: int, offset: int) -> bytes:
        """Read bytes of an open file from `offset` on."""
        return os.pread(descriptor, count, offset)

    def write_at(descriptor: int, content: bytes, offset: int) -> int:
        """Write to an open file from `offset` on."""
        return os.pwrite(descriptor, content, offset)

    def _take_lock(descriptor: int, exclusive: bool, wait: bool) -> None:
        kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)

    def _release_lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


# Identity


def is_at(path: Path, status: os.stat_result) -> bool:
    """Return whether `path` names the file that has this status."""
    try:
        return os.path.samestat(os.stat(path), status)
    except OSError:
        return False


def digest_json(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the canonical JSON of a mapping, without its key ``sha256``."""
    body = {key: value for key, value in content.items() if key != "sha256"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
