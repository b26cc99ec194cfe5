"""Locks, atomic writes and flushes: what keeps files whole through crashes and power cuts.

Standard library only, so that the journal loads without torch.
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
    """Write a file so that readers see the old content or the new one, never a part.

    The content is on disk before it gets its name. The name itself is durable after
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
    """Replace a file, content and name, so that it survives a power cut from here on."""
    replace_file(path, content)
    flush_directory(path.parent)


def make_directory(path: Path) -> None:
    """Create a directory with its parents, so that all of them survive a power cut."""
    created = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in created:
        flush_directory(each.parent)


def flush_directory(path: Path) -> None:
    """Bring the names in a directory to disk: files created, renamed and removed there."""
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
    """Bring the content of a file to disk, whoever wrote it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def exchange(one: Path, other: Path) -> bool:
    """Swap the names of two files or directories in one step.

    Returns:
        Whether it was done: some systems and file systems cannot.
    """
    if sys.platform == "win32":
        return False
    import ctypes  # here: it takes a while, and `import mbpa` needs none of it

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
    """Lock an open file for this process; the lock ends with the process at the latest.

    Returns:
        Whether it is locked: some file systems have no locks.

    Raises:
        BlockingIOError: another process holds it, and `wait` is false.
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
    """Release a lock; closing is not enough while a forked process has the descriptor, too."""
    if sys.platform != "win32":
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)


# Identity


def is_at(path: Path, status: os.stat_result) -> bool:
    """Whether the file with this status is the one that the path names."""
    try:
        return os.path.samestat(os.stat(path), status)
    except OSError:
        return False


def digest_json(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the canonical JSON of a mapping, without its key ``sha256``."""
    body = {key: value for key, value in content.items() if key != "sha256"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
