"""Locks, atomic writes and flushes, which keep files intact through crashes and power cuts.

This module uses the standard library only, so that the journal loads without torch.
"""

import contextlib
import errno
import hashlib
import json
import os
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if sys.platform != "win32":
    import fcntl

# Some network file systems (Lustre without -o flock) have no locks.
_CANNOT_LOCK = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}
_CANNOT_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EXDEV}
_EXCHANGE = 2  # RENAME_EXCHANGE on Linux, RENAME_SWAP on macOS
_AT_WORKING_DIRECTORY = -100  # AT_FDCWD


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
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


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


def flush_file(path: Path) -> None:
    """Flush the content of a file to disk, even if another process wrote it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def exchange(one: Path, other: Path) -> bool:
    """Swap the names of two files or directories atomically.

    Returns:
        Whether they were swapped: some systems and file systems do not support it.
    """
    if sys.platform == "win32":
        return False
    import ctypes  # imported here because it is slow and `import mbpa` does not need it

    library = ctypes.CDLL(None, use_errno=True)
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
    if sys.platform == "win32":
        return False
    kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    try:
        fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _CANNOT_LOCK:
            raise
        return False
    return True


def unlock(descriptor: int) -> None:
    """Release a lock; closing the file is not enough while a forked process has it open, too."""
    if sys.platform != "win32":
        with contextlib.suppress(OSError):
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
