"""Atomic writing of a run directory: it appears as a whole or not at all, and no data is lost.

A new run is written to a hidden directory beside its destination and flushed. Then it is renamed,
or exchanged with the run that it replaces, in one step.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mbpa import files
from mbpa.errors import RunError
from mbpa.serve.journal import BACKUP_SUFFIX, DamagedError, InUseError, Journal, JournalError
from mbpa.serve.run_info import JOURNAL_FILE, RUN_FILE, RunInfo, is_model_directory

RUN_PARTS = {
    RUN_FILE,
    *(JOURNAL_FILE + end for end in ("", "-wal", "-shm", "-journal", ".lock", BACKUP_SUFFIX)),
}
"""Names of the files of a run directory, besides its models; anything else belongs to the user and
is never removed."""


def require_free(out: Path, *, replace: bool) -> None:
    """Raise `RunError` if a run cannot be written to `out`, or if doing so would lose anything.

    With `replace`, an existing run may be lost, and nothing else.
    """
    with reporting_errors(out):
        place = _find_place(out)
        _check_free(place, replace)
        above = next(each for each in place.parents if each.exists())
        if not above.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(above, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@contextmanager
def reporting_errors(out: Path) -> Iterator[None]:
    """Turn errors of the disk or the journal into a `RunError` of one line."""
    try:
        yield
    except (OSError, JournalError) as error:
        why = getattr(error, "strerror", None) or error
        raise RunError(f"{out} cannot be written ({why}): choose another directory") from error


@contextmanager
def replace_directory(out: Path, *, replace: bool) -> Iterator[Path]:
    """Yield a new directory that takes the place of `out` on success.

    If `out` is a symbolic link, its target is replaced and the link stays.
    """
    require_free(out, replace=replace)
    place = _find_place(out)
    files.make_directory(place.parent)
    _remove_leftovers(place)
    new = _name_beside(place, "new")
    new.mkdir()
    try:
        with _hold_lock(new):
            yield new
            files.flush_directory(new)
            old = _take_place(new, place, replace)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    files.flush_directory(place.parent)  # before anything of the old run is removed
    if old is not None:
        shutil.rmtree(old)


def remove_unused_models(directory: Path, info: RunInfo) -> None:
    """Remove models that were replaced, or that a killed process left; errors are ignored."""
    with contextlib.suppress(OSError):
        for found in directory.iterdir():
            if is_model_directory(found.name) and found.name != info.model:
                shutil.rmtree(found, ignore_errors=True)


def _find_place(out: Path) -> Path:
    """Resolve the symbolic links of a path, whether its target exists or not."""
    place = Path(os.path.realpath(out))
    if place.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return place


def _check_free(out: Path, replace: bool) -> None:
    if out.exists() and not out.is_dir():
        raise RunError(f"{out} is a file; --out must name a directory")
    there = {path.name for path in out.iterdir()} if out.is_dir() else set()
    foreign = sorted(each for each in there - RUN_PARTS if not is_model_directory(each))
    if foreign:
        raise RunError(
            f"{out} contains {foreign[0]}, which is not part of a run: choose another directory"
        )
    if there and RUN_FILE not in there:
        raise RunError(f"{out} is neither empty nor a run: choose another directory")
    if there and not replace:
        raise RunError(
            f"{out} is a run, and what it was taught would be lost: use --again to replace it"
        )
    with _keep_unserved(out):
        pass


@contextmanager
def _keep_unserved(out: Path) -> Iterator[None]:
    """Keep other processes from serving a run while it is replaced.

    They would acknowledge lessons that are then lost.
    """
    with ExitStack() as held:
        if (out / JOURNAL_FILE).exists():
            try:
                held.enter_context(Journal(out / JOURNAL_FILE))
            except InUseError as error:
                raise RunError(str(error)) from error
            except DamagedError:  # it cannot be served either
                pass
        yield


def _take_place(new: Path, place: Path, replace: bool) -> Path | None:
    """Move a run to its destination; return where its predecessor is now, if there was one."""
    _check_free(place, replace)  # again, since another process may have written here meanwhile
    if not place.exists():
        new.rename(place)
        return None
    # Closing a journal removes files by name, and after the exchange the name belongs to the new
    # run. So the old journal is not open during the exchange; only its lock is held.
    lock = place / f"{JOURNAL_FILE}.lock"
    with _hold_lock(lock) if lock.exists() else contextlib.nullcontext():
        return new if files.exchange(new, place) else _replace_in_two_steps(new, place)


def _replace_in_two_steps(new: Path, place: Path) -> Path:
    """Replace a directory where names cannot be exchanged; return where the old one is now.

    A power cut between the two steps leaves the old one there, and nothing at the destination.
    """
    old = _name_beside(place, "old")
    place.rename(old)
    try:
        new.rename(place)
    except OSError:
        old.rename(place)
        raise
    return old


def _name_beside(place: Path, kind: str) -> Path:
    return place.with_name(f".{place.name}.{uuid.uuid4().hex}.{kind}")


def _remove_leftovers(place: Path) -> None:
    """Remove what killed processes left beside a run; restore a run that was half replaced."""
    ours = re.compile(rf"\.{re.escape(place.name)}\.[0-9a-f]{{32}}\.(new|old)")
    for found in [each for each in place.parent.iterdir() if ours.fullmatch(each.name)]:
        if found.suffix == ".old" and not place.exists() and (found / RUN_FILE).exists():
            found.rename(place)
            files.flush_directory(place.parent)
            continue
        with (
            contextlib.suppress(OSError),
            _hold_lock(found),
        ):  # another process may still write there
            shutil.rmtree(found)


@contextmanager
def _hold_lock(path: Path) -> Iterator[None]:
    """Hold the lock of a file or directory; raise `BlockingIOError` if another process does."""
    if sys.platform == "win32":  # directories cannot be opened there, nor renamed with an open file
        yield
    else:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            files.lock(descriptor)
            yield
        finally:
            files.unlock(descriptor)
            os.close(descriptor)
