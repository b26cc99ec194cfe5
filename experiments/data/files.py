"""Files on disk: their check sums, and one writer at a time.

A folder gets a `SHA256SUMS` when it is unpacked, in the format of the command `sha256sum`, so that
damage done later can be found.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import lzma
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from experiments.data.sources import DamagedDataError, File

if sys.platform != "win32":
    import fcntl

SUMS = "SHA256SUMS"

# Some network file systems have no locks; there, one process at a time is up to the user.
_CANNOT_LOCK = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}


def mismatch(path: Path, file: File) -> str | None:
    """How the content of `path` differs from `file`, if it does; `.xz` is looked into."""
    try:
        with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as stream:
            found, size = _digest(stream)
    except (lzma.LZMAError, EOFError) as error:
        return f"it cannot be unpacked ({error})"
    if file.size is not None and size != file.size:
        return f"it has {size:,} bytes instead of {file.size:,}"
    if found != file.sha256:
        return f"its SHA-256 is {found[:12]}… instead of {file.sha256[:12]}…"
    return None


def write_sums(folder: Path, sums: dict[str, str]) -> None:
    """Note the SHA-256 of the files of `folder`, by their names inside it."""
    lines = (f"{digest}  {name}\n" for name, digest in sorted(sums.items()))
    (folder / SUMS).write_text("".join(lines), "utf-8")


def verify_sums(folder: Path) -> bool:
    """Compare the files of `folder` with its noted sums; False if it has none."""
    if not (folder / SUMS).is_file():
        return False
    for line in (folder / SUMS).read_text("utf-8").splitlines():
        expected, _, name = line.partition("  ")
        path = folder / name
        if not path.is_file():
            raise DamagedDataError(f"{path} is missing", (folder,))
        with path.open("rb") as stream:
            if _digest(stream)[0] != expected:
                raise DamagedDataError(f"{path} is not what was unpacked", (folder,))
    return True


def _digest(stream: BinaryIO | lzma.LZMAFile) -> tuple[str, int]:
    """SHA-256 and number of bytes."""
    digest, size = hashlib.sha256(), 0
    while block := stream.read(1 << 20):
        digest.update(block)
        size += len(block)
    return digest.hexdigest(), size


@contextlib.contextmanager
def alone(folder: Path, *, progress: bool = False) -> Iterator[None]:
    """Be the only writer in `folder`: others wait until this process is done, or dead."""
    with (folder / ".lock").open("ab") as lock:
        if sys.platform != "win32":
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _CANNOT_LOCK:
                    if progress:
                        print(f"waiting for another process in {folder}", file=sys.stderr)
                    fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def flush_folder(folder: Path) -> None:
    """Make renames survive a power cut, where folders can be opened."""
    if sys.platform != "win32":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
