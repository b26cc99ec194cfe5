"""Files on disk: checksums, and a lock that admits one writer at a time.

Unpacking writes a `SHA256SUMS` file to the folder, in the format of the `sha256sum` command, so
that later damage can be detected.
"""

from __future__ import annotations

import contextlib
import hashlib
import lzma
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from experiments.data.sources import DamagedDataError, File
from mbpa.files import lock

SUMS = "SHA256SUMS"


def find_mismatch(path: Path, file: File) -> str | None:
    """Return how the content of `path` differs from `file`, or `None`; `.xz` is decompressed."""
    try:
        with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as stream:
            found, size = _digest_stream(stream)
    except (lzma.LZMAError, EOFError) as error:
        return f"it cannot be unpacked ({error})"
    if file.size is not None and size != file.size:
        return f"it has {size:,} bytes instead of {file.size:,}"
    if found != file.sha256:
        return f"its SHA-256 is {found[:12]}… instead of {file.sha256[:12]}…"
    return None


def write_sums(folder: Path, sums: dict[str, str]) -> None:
    """Write the SHA-256 sums of the files in `folder`, by their names relative to it."""
    lines = (f"{digest}  {name}\n" for name, digest in sorted(sums.items()))
    (folder / SUMS).write_text("".join(lines), "utf-8")


def verify_sums(folder: Path) -> bool:
    """Compare the files in `folder` with its recorded sums; return False if there are none."""
    if not (folder / SUMS).is_file():
        return False
    for line in (folder / SUMS).read_text("utf-8").splitlines():
        expected, _, name = line.partition("  ")
        path = folder / name
        if not path.is_file():
            raise DamagedDataError(f"{path} is missing", (folder,))
        with path.open("rb") as stream:
            if _digest_stream(stream)[0] != expected:
                raise DamagedDataError(f"{path} is not what was unpacked", (folder,))
    return True


def _digest_stream(stream: BinaryIO | lzma.LZMAFile) -> tuple[str, int]:
    """Return the SHA-256 and the number of bytes."""
    digest, size = hashlib.sha256(), 0
    while block := stream.read(1 << 20):
        digest.update(block)
        size += len(block)
    return digest.hexdigest(), size


@contextlib.contextmanager
def lock_folder(folder: Path, *, progress: bool = False) -> Iterator[None]:
    """Lock `folder` for one writer: others wait until this process finishes or dies.

    Some network file systems have no locks; there, users must run one process at a time.
    """
    with (folder / ".lock").open("ab") as file:
        try:
            lock(file.fileno())
        except BlockingIOError:
            if progress:
                print(f"waiting for another process in {folder}", file=sys.stderr)
            lock(file.fileno(), wait=True)
        yield
