"""Fetching a data set: download, verify, unpack, move into place.

A file gets its final name only after its checksum has been verified. A download grows as
`name.part`, and the next attempt, by this process or another, resumes from it. An archive is
unpacked into a scratch folder and moved from there. Only one process at a time works on a data set;
the others wait.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import re
import shutil
import stat
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tqdm import tqdm

from experiments.data.files import find_mismatch, lock_folder, write_sums
from experiments.data.integrity import Finding, check
from experiments.data.read import Directory, locate
from experiments.data.sources import Archive, DataError, DataSet, File, data_dir
from mbpa.files import flush_directory

_SCRATCH = ".unpacking"
_BLOCK_BYTES = 1 << 16
_SLACK_BYTES = 16 << 20  # bytes that must remain free on the file system
_RETRIED_STATUSES = {
    408,
    425,
    429,
    500,
    502,
    503,
    504,
}  # statuses that may differ on the next attempt
# Some hosts refuse Python's default user agent. Compressed transfers would report wrong sizes.
_HEADERS = {"User-Agent": "Mozilla/5.0 (compatible; mbpa)", "Accept-Encoding": "identity"}


@dataclass(frozen=True)
class Fetched:
    """The outcome of `fetch`."""

    name: str
    folder: Path
    was_there: bool
    """Whether a valid copy was already present, so that nothing was done."""
    detail: str
    """Description of the contents, such as the number of images."""
    seconds: float


@dataclass(frozen=True)
class Patience:
    """How long to wait for a server, and how often to retry."""

    timeout: float = 30.0
    """Seconds to wait for data before a connection is considered broken."""
    attempts: int = 4
    """Consecutive attempts without progress before the next address is tried."""
    pause: float = 1.0
    """Seconds to wait after the first failure; doubled after each further one."""


class _Unreachable(DataError):
    """No address delivered the expected file."""


class _Refused(Exception):
    """This address will not deliver the file, so retrying is useless."""


class _Broken(Exception):
    """The transfer ended early; another attempt may resume it."""


def fetch(
    data_set: DataSet,
    directory: Directory = None,
    *,
    force: bool = False,
    progress: bool = False,
    patience: Patience | None = None,
) -> Fetched:
    """Fetch the missing parts of a data set, verify them, and put them in place in `directory`.

    Args:
        force: replace files that are damaged; otherwise they cause an error.
        progress: show a bar on standard error, and what is being waited for.

    Raises:
        DataError: the data cannot be fetched, or damaged files are in its place. Valid files are
            kept.
    """
    started = time.perf_counter()
    folder = data_dir(directory) / data_set.name
    finding = _refuse_damage(check(data_set, directory), force)
    was_there = finding.status == "good"
    if not was_there:
        if not data_set.can_be_fetched:
            raise data_set.missing(folder.parent)
        folder.mkdir(parents=True, exist_ok=True)
        with lock_folder(folder, progress=progress):
            finding = _refuse_damage(check(data_set, directory), force)  # others were at work
            if finding.status != "good":
                _Work(data_set, folder, patience or Patience(), progress).run(finding)
                finding = check(data_set, directory)
                if finding.status != "good":
                    raise DataError(f"{data_set.name} was fetched, but {finding.detail}")
    seconds = time.perf_counter() - started
    return Fetched(data_set.name, folder, was_there, finding.detail, seconds)


def _refuse_damage(finding: Finding, force: bool) -> Finding:
    if finding.status == "damaged" and not force:
        raise DataError(
            f"{finding.detail}: nothing was changed; pass --force to replace it, or remove it"
        )
    return finding


@dataclass(frozen=True)
class _Work:
    """One data set being fetched into its folder, whose lock is held."""

    data_set: DataSet
    folder: Path
    patience: Patience
    progress: bool

    def run(self, finding: Finding) -> None:
        """Fetch the files that `finding` lists as missing, and replace those it lists as wrong."""
        placed = self._place(finding)
        for path in finding.wrong:
            if path not in placed and path != self.folder:
                _remove(path)

    def _place(self, finding: Finding) -> set[Path]:
        """Fetch file by file if possible, otherwise from the archive; return the paths placed."""
        archive, failure = self.data_set.archive, ""
        if self.data_set.files:
            try:
                return self._place_files(finding)
            except _Unreachable as error:
                if archive is None:
                    raise
                failure = f"{error}; "
        if archive is None:
            raise self.data_set.missing(self.folder.parent)
        try:
            return self._place_archive(archive)
        except _Unreachable as error:
            raise _Unreachable(f"{failure}{error}") from error

    def _place_files(self, finding: Finding) -> set[Path]:
        placed = set()
        for file in self.data_set.files:
            if file.name in finding.lacking or locate(self.folder, file.name) in finding.wrong:
                target = self.folder / file.name
                os.replace(self._download(file), target)
                flush_directory(self.folder)
                placed.add(target)
        return placed

    def _place_archive(self, archive: Archive) -> set[Path]:
        """Unpack beside the final place, then move; if interrupted, unpacking restarts from the
        zip.
        """
        path = self.folder / archive.file.name
        if not path.exists() or find_mismatch(path, archive.file):
            os.replace(self._download(archive.file), path)
        scratch = self.folder / _SCRATCH
        _remove(scratch)
        self._unpack(path, scratch)
        placed = set()
        for entry in sorted((scratch / archive.inside).iterdir()):
            target = self.folder / entry.name
            if target.is_dir():  # a folder cannot be replaced atomically
                os.rename(target, scratch / f"{entry.name}.replaced")
            os.replace(entry, target)
            placed.add(target)
        flush_directory(self.folder)
        path.unlink()
        _remove(scratch)
        return placed

    def _unpack(self, path: Path, scratch: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            members = [m for m in archive.infolist() if not m.is_dir()]
            for member in members:
                _refuse_escape(path, member)
            self._require_space(sum(member.file_size + 4096 for member in members))
            sums: dict[str, dict[str, str]] = {}
            for member in self._bar(members, unit=" files", desc=f"unpacking {path.name}"):
                top, _, rest = member.filename.partition("/")
                sums.setdefault(top, {})[rest] = _extract(archive, member, scratch)
        for top, of_files in sums.items():
            if (scratch / top).is_dir():
                write_sums(scratch / top, of_files)
        if hasattr(os, "sync"):
            os.sync()  # one sync: flushing each of 100,000 files would take minutes

    def _download(self, file: File) -> Path:
        """Return a verified `name.part`, from the first address that delivers it."""
        part = self.folder / f"{file.name}.part"
        failures = []
        for address in file.addresses:
            self._say(f"{file.name}: asking {urllib.parse.urlsplit(address).hostname}")
            for _ in range(2):
                resumed = part.exists()
                try:
                    self._transfer(address, file, part)
                except _Refused as refused:
                    failures.append(f"{address} ({refused})")
                    break
                if (why := find_mismatch(part, file)) is None:
                    return part
                part.unlink()
                if not resumed:  # otherwise the fault may be in the resumed part
                    failures.append(f"{address} ({why})")
                    break
        tried = "; ".join(failures)
        raise _Unreachable(
            f"{self.data_set.name}: {file.name} could not be downloaded from {tried}"
        )

    def _transfer(self, address: str, file: File, part: Path) -> None:
        """Complete `part`, in as many attempts as `patience` allows."""
        failures, furthest = 0, _measure_size(part)
        while True:
            try:
                return self._attempt(address, file, part)
            except _Broken as broken:
                failures = 1 if _measure_size(part) > furthest else failures + 1
                furthest = max(furthest, _measure_size(part))
                if failures >= self.patience.attempts:
                    raise _Refused(str(broken)) from broken
                pause = self.patience.pause * 2 ** (failures - 1)
                self._say(f"{file.name}: {broken}; retrying in {pause:g} s")
                time.sleep(pause)

    def _attempt(self, address: str, file: File, part: Path) -> None:
        if file.size is not None and _measure_size(part) > file.size:
            part.unlink()
        start = _measure_size(part)
        if start and start == file.size:
            return
        self._require_space((file.size or 0) - start)
        with contextlib.ExitStack() as stack:
            response = self._answer(address, start, part)
            if response is None:
                return
            stack.enter_context(response)
            start, total = _extent(response, start, part)
            if file.size is not None and total not in (None, file.size):
                raise _Refused(f"it has {total:,} bytes instead of {file.size:,}")
            out = stack.enter_context(part.open("ab" if start else "wb"))
            bar = stack.enter_context(
                self._bar(None, unit="B", desc=file.name, total=total, initial=start)
            )
            while block := _receive(response):
                out.write(block)
                bar.update(len(block))
                if file.size is not None and out.tell() > file.size:
                    raise _Refused(f"it has more than {file.size:,} bytes")
            out.flush()
            os.fsync(out.fileno())
        expected = file.size if total is None else total
        if expected is not None and _measure_size(part) < expected:
            raise _Broken(f"it ended after {_measure_size(part):,} of {expected:,} bytes")

    def _answer(self, address: str, start: int, part: Path) -> http.client.HTTPResponse | None:
        """Request the bytes from `start` on; return `None` if there are none."""
        headers = _HEADERS | ({"Range": f"bytes={start}-"} if start else {})
        request = urllib.request.Request(address, headers=headers)
        try:
            response: http.client.HTTPResponse = urllib.request.urlopen(
                request, timeout=self.patience.timeout
            )
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 416 and start:
                    if error.headers.get("Content-Range") == f"bytes */{start}":
                        return None
                    part.unlink()
                    raise _Broken("the part is longer than the file") from error
                kind = _Broken if error.code in _RETRIED_STATUSES else _Refused
                raise kind(f"HTTP {error.code} {error.reason}") from error
        except (OSError, http.client.HTTPException) as error:
            raise _Broken(str(getattr(error, "reason", error)) or repr(error)) from error
        return response

    def _require_space(self, needed: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if free < needed + _SLACK_BYTES:
            raise DataError(
                f"{self.data_set.name} needs {(needed + _SLACK_BYTES) / 1e6:,.0f} MB more in "
                f"{self.folder}, which has {free / 1e6:,.0f} MB left"
            )

    def _say(self, line: str) -> None:
        if self.progress:
            print(line, file=sys.stderr, flush=True)

    def _bar(self, iterable: object, **options: object) -> tqdm:
        often = 0.2 if sys.stderr.isatty() else 10.0
        return tqdm(
            iterable,
            unit_scale=options["unit"] == "B",
            file=sys.stderr,
            mininterval=often,
            disable=not self.progress,
            **options,
        )


# Transfers


def _extent(response: http.client.HTTPResponse, start: int, part: Path) -> tuple[int, int | None]:
    """Return where the response starts (0 if the server sends everything) and the file's size."""
    if response.status == 206:
        told = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
        if told is None or int(told[1]) != start:
            part.unlink()
            raise _Broken("the server sent a different range than requested")
        return start, None if told[2] == "*" else int(told[2])
    length = response.headers.get("Content-Length", "")
    return 0, int(length) if length.isdecimal() else None


def _receive(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read1(_BLOCK_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise _Broken(str(error) or repr(error)) from error


# Archives and files


def _refuse_escape(path: Path, member: zipfile.ZipInfo) -> None:
    name = PurePosixPath(member.filename)
    leaves = name.is_absolute() or ".." in name.parts or re.search(r"[\\:]", member.filename)
    if leaves or stat.S_ISLNK(member.external_attr >> 16):
        raise DataError(f"{path} is refused: {member.filename!r} would leave the folder")


def _extract(archive: zipfile.ZipFile, member: zipfile.ZipInfo, scratch: Path) -> str:
    """Write one file of an archive and return its SHA-256."""
    target = scratch / member.filename
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with archive.open(member) as source, target.open("wb") as out:
        while block := source.read(_BLOCK_BYTES):
            digest.update(block)
            out.write(block)
    return digest.hexdigest()


def _measure_size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
