"""`mbpa backup` and `mbpa restore`: a run as one archive, also of a run that is being served.

The archive is a tar file of the run directory, with a copy of the journal as of one moment. The
checksums of the run's own files reveal damage to it, so restoring verifies the run before it takes
its place.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tarfile
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from mbpa import files
from mbpa.errors import RunError
from mbpa.serve.journal import BACKUP_SUFFIX, Journal
from mbpa.serve.run_directory import replace_directory, reporting_errors
from mbpa.serve.run_info import JOURNAL_FILE, RUN_FILE, RunInfo, is_model_directory
from mbpa.serve.verification import check_run

BYTES_PER_CHUNK = 1 << 18
_END = bytes(2 * tarfile.BLOCKSIZE)


@dataclass(frozen=True)
class _Part:
    """A file of the archive: its content, or an open file that holds it."""

    name: str
    content: bytes | io.FileIO
    size: int

    def make_header(self) -> bytes:
        header = tarfile.TarInfo(self.name)
        header.size, header.mode = self.size, 0o600
        return header.tobuf(tarfile.PAX_FORMAT)

    def count_padding(self) -> int:
        return -self.size % tarfile.BLOCKSIZE


class Archive:
    """A backup whose content is as of the time when it was made. Close it after use.

    Args:
        directory: the run.
        journal: its open journal.
        place: where to put the copy of the journal. On return the copy has no name any more, so
            that nothing of it stays behind if the process is killed.
    """

    def __init__(self, directory: Path, journal: Journal, place: Path) -> None:
        model = directory / RunInfo.read(directory).model
        named = sorted(each for each in model.iterdir() if not each.name.startswith("."))
        paths = [directory / RUN_FILE, *named]
        self._parts: list[_Part] = []
        for path in paths:
            content = path.read_bytes()
            name = path.relative_to(directory).as_posix()
            self._parts.append(_Part(name, content, len(content)))
        try:
            journal.copy_to(place)
            self._copy = io.FileIO(place)
        finally:
            with contextlib.suppress(OSError):  # another system keeps the name of an open file
                place.unlink()
        size = os.fstat(self._copy.fileno()).st_size
        self._parts.append(_Part(JOURNAL_FILE, self._copy, size))

    @property
    def size(self) -> int:
        """Size of the archive in bytes."""
        sizes = (len(part.make_header()) + part.size + part.count_padding() for part in self._parts)
        return sum(sizes) + len(_END)

    def __iter__(self) -> Iterator[bytes]:
        """Return the content of the archive, once; close it afterwards."""
        try:
            for part in self._parts:
                yield part.make_header()
                if isinstance(part.content, bytes):
                    yield part.content
                else:
                    while chunk := part.content.read(BYTES_PER_CHUNK):
                        yield chunk
                yield bytes(part.count_padding())
            yield _END
        finally:
            self.close()

    def close(self) -> None:
        self._copy.close()


def make_served_archive(journal: Journal) -> Archive:
    """Make the archive of a run that this process serves; writes wait for the copy."""
    place = journal.path.with_name(journal.path.name + BACKUP_SUFFIX)
    return Archive(journal.path.parent, journal, place)


def back_up(directory: Path, journal: Journal, out: Path) -> None:
    """Write the archive of a run to a file: all of it, or none."""
    with writing_whole(out) as file:
        place = out.with_name(f"{out.name}.{uuid.uuid4().hex}.tmp")
        for chunk in Archive(directory, journal, place):
            file.write(chunk)


@contextlib.contextmanager
def writing_whole(out: Path) -> Iterator[IO[bytes]]:
    """Yield a file that gets its name once it is complete and on disk; only its owner can read it.

    A killed process leaves at most a file whose name ends in .tmp.
    """
    temporary = out.with_name(f"{out.name}.{uuid.uuid4().hex}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        files.rename_over(temporary, out)
        files.flush_directory(out.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def restore(archive: Path, out: Path, *, replace: bool = False) -> Sequence[tuple[str, str]]:
    """Write the run of an archive to a directory; return what was verified, as `check_run` does.

    The run is verified before it takes its place.

    Raises:
        RunError: the archive cannot be read, is not a backup, or is damaged; or the directory is
            not free.
    """
    try:
        with tarfile.open(archive, "r:") as opened:
            return _restore_members(archive, opened, out, replace)
    except tarfile.TarError as error:
        raise RunError(f"{archive} is not a backup, or is damaged: {error}") from error


def _restore_members(
    archive: Path, opened: tarfile.TarFile, out: Path, replace: bool
) -> Sequence[tuple[str, str]]:
    with reporting_errors(out), replace_directory(out, replace=replace) as directory:
        for member in opened:
            if not member.isfile() or not _is_part(member.name):
                raise RunError(f"{archive} is not a backup of a run: it contains {member.name!r}")
            content = opened.extractfile(member)
            assert content is not None
            mode = 0o600 if member.name == JOURNAL_FILE else 0o644
            place = directory / member.name
            files.make_directory(place.parent)
            descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
            with content, open(descriptor, "wb") as file:
                shutil.copyfileobj(content, file)
                file.flush()
                os.fsync(file.fileno())
        for folder in [each for each in directory.iterdir() if each.is_dir()]:
            files.flush_directory(folder)
        try:
            return check_run(directory)
        except RunError as error:
            raise RunError(
                f"{archive} is damaged or incomplete, and nothing was restored: {error}"
            ) from error


def _is_part(name: str) -> bool:
    """Return whether a file of this name belongs into a run directory."""
    folder, _, file = name.rpartition("/")
    if not folder:
        return file in (RUN_FILE, JOURNAL_FILE)
    return is_model_directory(folder) and Path(file).name == file and file not in ("", ".", "..")
