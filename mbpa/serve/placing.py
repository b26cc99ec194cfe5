"""Where a run is written: it is there as a whole or not at all, and nothing is lost by it."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mbpa.errors import RunError
from mbpa.serve.database import InUseError, JournalError
from mbpa.serve.journal import Journal
from mbpa.serve.run import JOURNAL, MODEL, RUN


def require_free(out: Path, *, replace: bool) -> None:
    """Raise `RunError` if nothing can be written there, or if anything would be lost by writing a
    run; with `replace` a run may be, and nothing else."""
    with writable(out):
        _check_free(out, replace)
        above = next(each for each in Path(os.path.abspath(out)).parents if each.exists())
        if not above.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(above, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@contextmanager
def writable(out: Path) -> Iterator[None]:
    """What the disk says of it, in a line."""
    try:
        yield
    except (OSError, JournalError) as error:
        why = getattr(error, "strerror", None) or error
        raise RunError(f"{out} cannot be written ({why}): name another --out") from error


def _check_free(out: Path, replace: bool) -> None:
    if out.exists() and not out.is_dir():
        raise RunError(f"{out} is a file; --out must name a directory")
    there = {path.name for path in out.iterdir()} if out.is_dir() else set()
    foreign = sorted(n for n in there if n not in (RUN, MODEL) and not n.startswith(JOURNAL))
    if foreign:
        raise RunError(f"{out} holds {foreign[0]}, which is no part of a run: name another --out")
    if there and RUN not in there:
        raise RunError(f"{out} is not empty, and no run: name another --out")
    if there and not replace:
        raise RunError(f"{out} is a run: what was taught there would be lost; --again replaces it")
    with _not_served(out):
        pass


@contextmanager
def _not_served(out: Path) -> Iterator[None]:
    """Keep others from serving a run: they would go on and acknowledge what nobody finds again."""
    with ExitStack() as held:
        if (out / JOURNAL).exists():
            try:
                held.enter_context(Journal(out / JOURNAL))
            except InUseError as error:
                raise RunError(str(error)) from error
            except JournalError:  # what cannot be read cannot be served either
                pass
        yield


@contextmanager
def in_its_place(out: Path, *, replace: bool) -> Iterator[Path]:
    """A new directory that takes the place of `out` if all goes well."""
    out = Path(os.path.abspath(out))
    require_free(out, replace=replace)
    out.parent.mkdir(parents=True, exist_ok=True)
    new = out.with_name(f".{out.name}.{uuid.uuid4().hex}.new")
    try:
        new.mkdir()
        yield new
        if not out.exists():
            new.rename(out)
            return
        old = out.with_name(f".{out.name}.{uuid.uuid4().hex}.old")
        with _not_served(out):
            out.rename(old)
        try:
            new.rename(out)
        except OSError:
            old.rename(out)
            raise
        shutil.rmtree(old)
    finally:
        shutil.rmtree(new, ignore_errors=True)
