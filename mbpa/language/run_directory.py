"""The directory of a language run: a manifest, and one file per source that was read.

Each file is written atomically and is on disk before the call returns. So a crash loses only the
source that was being read, and forgetting a source means removing its file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from mbpa import files
from mbpa.errors import CheckpointError, RunError

MANIFEST, SOURCES, LOCK = "language.json", "sources", "lock"
FORMAT = 1
_FILE_NAME = re.compile(r"(\d{8})\.safetensors")
_UNFINISHED_MANIFEST = re.compile(re.escape(MANIFEST) + r"\.[0-9a-f]{32}\.tmp")


@dataclass(frozen=True, eq=False)
class Source:
    """A document in the memory: its tokens, and the state of the model before each of them."""

    name: str
    text_digest: str
    """SHA-256 of the token ids, by which a document that was read before is recognised."""
    tokens: Int[Tensor, "T"]
    keys: Float[Tensor, "N D"]
    """States before the last N tokens: all but the first."""
    summaries: Int[Tensor, "N W"] | None
    """What an active vocabulary needs to know about each state."""
    read_at: float
    """When it was read, in seconds since 1970."""
    number: int = -1
    """Position in the order of reading; −1 until the source is stored."""


@dataclass(frozen=True)
class SourceEntry:
    """What is known about a stored source without loading it."""

    name: str
    tokens: int
    read_at: float
    number: int
    replaces: int
    """Number of the source that it replaced, or −1."""


def is_language_run(directory: str | os.PathLike[str]) -> bool:
    """Return whether a directory holds a language run."""
    return (Path(directory) / MANIFEST).is_file()


class RunDirectory:
    """A directory that holds what a language model has read.

    Args:
        root: the directory, which must hold a run; `create` makes one.
        writable: take the lock that `add` and `remove` need. Only one process may hold it.
    """

    def __init__(self, root: str | os.PathLike[str], *, writable: bool = True) -> None:
        self.root: Path = Path(root).absolute()
        self.manifest: dict[str, Any] = _read_manifest(self.root)
        self._lock_file = _take_lock(self.root) if writable else None
        if writable:
            self._remove_remains()
        self._next_number = max(self._list_files(), default=-1) + 1
        self._unwanted: set[int] = set()
        """Files that belong to no source, and whose removal is not known to be on disk."""

    @staticmethod
    def create(
        root: str | os.PathLike[str], settings: Mapping[str, Any], sources: Iterable[Source] = ()
    ) -> tuple[RunDirectory, list[Source]]:
        """Create a run with these settings, which `manifest` returns later, and these sources.

        It is a run only when everything is on disk. What an earlier call left that failed is
        replaced.

        Returns:
            The run, and the sources with their numbers.

        Raises:
            RunError: the directory holds a run already, or something else.
        """
        root = Path(root).absolute()
        require_new(root)
        files.make_directory(root / SOURCES)
        lock = _take_lock(root)
        try:
            _refuse_run(root)  # with the lock, so that no other process makes one meanwhile
            for path in (*root.glob(f"{MANIFEST}.*.tmp"), *(root / SOURCES).iterdir()):
                path.unlink()
            stored = [
                _write_source(_make_path(root, number), source, number, replaces=-1)
                for number, source in enumerate(sources)
            ]
            _write_manifest(root, {"format": FORMAT, **settings})
        finally:
            files.unlock(lock)
            os.close(lock)
        return RunDirectory(root), stored

    def set_model(self, name: str | None) -> None:
        """Record where the model is found now; it must be the same model."""
        self._require_lock()
        if name != self.manifest["model"]:
            self.manifest = _write_manifest(self.root, {**self.manifest, "model": name})

    def __len__(self) -> int:
        return len(self._list_files())

    @property
    def is_writable(self) -> bool:
        return self._lock_file is not None

    def close(self) -> None:
        """Release the lock."""
        if self._lock_file is not None:
            files.unlock(self._lock_file)
            os.close(self._lock_file)
            self._lock_file = None

    def add(self, source: Source, *, replaces: int = -1) -> Source:
        """Store a source and return it with its number; on return it would survive a power cut.

        Args:
            source: the source.
            replaces: number of the source that it replaces, in the same instant.
        """
        self._require_lock()
        self._remove_unwanted()
        number = self._next_number
        self._next_number = number + 1
        try:
            stored = _write_source(self._path(number), source, number, replaces)
        except BaseException:
            # The file may be there, if only its name could not be flushed.
            self._unwanted.add(number)
            with contextlib.suppress(OSError):
                self._remove_unwanted()
            raise
        if replaces >= 0:
            # From now on the new file counts, and the old one goes before anything else changes.
            self._unwanted.add(replaces)
            with contextlib.suppress(OSError):
                self._remove_unwanted()
        return stored

    def remove(self, number: int) -> None:
        """Remove a source; on return it would stay removed after a power cut."""
        self._require_lock()
        self._remove_unwanted()
        self._path(number).unlink(missing_ok=True)  # an earlier call may have failed after this
        files.flush_directory(self.root / SOURCES)

    def _remove_unwanted(self) -> None:
        for number in self._unwanted:
            self._path(number).unlink(missing_ok=True)
        if self._unwanted:
            files.flush_directory(self.root / SOURCES)
            self._unwanted.clear()

    def load(self) -> Iterator[Source]:
        """Return all sources in the order in which they were read.

        Raises:
            CheckpointError: a file is damaged.
            FileNotFoundError: another process has removed a file meanwhile: load again.
        """
        for entry in self.list_sources():
            yield _read_source(self._path(entry.number), entry.number)

    def list_sources(self) -> list[SourceEntry]:
        """Return what is known about all sources without loading them, in order of reading.

        Raises:
            CheckpointError: a file is damaged.
        """
        entries = self._read_entries()
        # A crash may have come between the two halves of a replacement.
        replaced = {entry.replaces for entry in entries}
        if self.is_writable:
            for entry in entries:
                if self._path(entry.replaces).exists():
                    _read_source(self._path(entry.number), entry.number)  # raises if it is damaged
                    self.remove(entry.replaces)
        entries = [entry for entry in entries if entry.number not in replaced]
        names = [entry.name for entry in entries]
        if twice := {name for name in names if names.count(name) > 1}:
            raise CheckpointError(
                f"{self.root / SOURCES} holds two files of {min(twice)}: remove one of them"
            )
        return entries

    def _read_entries(self) -> list[SourceEntry]:
        """Read all entries; if one vanishes, list again, since what replaces it is there by now."""
        while True:
            with contextlib.suppress(FileNotFoundError):
                return [
                    _read_entry(self._path(number), number) for number in sorted(self._list_files())
                ]

    def _remove_remains(self) -> None:
        """Remove files that a process left behind which was killed while it wrote them."""
        for path in (self.root / SOURCES).glob("*.tmp"):
            path.unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return _make_path(self.root, number)

    def _list_files(self) -> list[int]:
        try:
            names = os.listdir(self.root / SOURCES)
        except OSError as error:
            raise CheckpointError(f"{self.root / SOURCES} cannot be read: {error}") from error
        return [int(found[1]) for name in names if (found := _FILE_NAME.fullmatch(name))]

    def _require_lock(self) -> None:
        if not self.is_writable:
            raise RunError(f"{self.root} was opened for reading only")


def require_new(root: Path) -> None:
    """Raise `RunError` if a directory holds a run already, or anything else."""
    if not root.exists():
        return
    names = sorted(os.listdir(root)) if root.is_dir() else []
    if not root.is_dir() or not all(map(_may_replace, names)):
        _refuse_run(root)
        held = f", but it holds {', '.join(names[:3])}{', …' if names[3:] else ''}" if names else ""
        raise RunError(f"{root} must be a new or an empty directory{held}")


def _refuse_run(root: Path) -> None:
    if is_language_run(root):
        raise RunError(f"{root} holds a run already: choose another directory")


def _may_replace(name: str) -> bool:
    """Return whether a call of `create` that failed, or was killed, may have left this file."""
    return name in {SOURCES, LOCK} or _UNFINISHED_MANIFEST.fullmatch(name) is not None


def _make_path(root: Path, number: int) -> Path:
    return root / SOURCES / f"{number:08d}.safetensors"


def _write_source(path: Path, source: Source, number: int, replaces: int) -> Source:
    """Write the file of a source and return the source with its number."""
    tensors = {"tokens": source.tokens, "keys": source.keys}
    if source.summaries is not None:
        tensors["summaries"] = source.summaries
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {
        "name": source.name,
        "text_digest": source.text_digest,
        "read_at": str(source.read_at),
        "number": str(number),
        "replaces": str(replaces),
    }
    metadata["sha256"] = _digest(metadata, tensors)
    files.write_durably(path, save(tensors, metadata))
    return replace(source, number=number)


def make_source(
    name: str,
    tokens: Int[Tensor, "T"],
    keys: Float[Tensor, "N D"],
    summaries: Int[Tensor, "N W"] | None,
) -> Source:
    """Return a source that was read now."""
    return Source(name, digest_tokens(tokens), tokens.cpu(), keys, summaries, read_at=time.time())


def digest_tokens(tokens: Int[Tensor, "T"]) -> str:
    """Return the SHA-256 of token ids."""
    return hashlib.sha256(tokens.cpu().to(torch.int32).numpy().tobytes()).hexdigest()


def _read_manifest(root: Path) -> dict[str, Any]:
    path = root / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise RunError(f"{root} holds no language run: `mbpa lm read` makes one") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else manifest
        raise CheckpointError(f"{path} must have format {FORMAT}, got {found}: update mbpa")
    if manifest.get("sha256") != files.digest_json(manifest):
        raise CheckpointError(f"{path} was altered")
    return manifest


def _write_manifest(root: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Write a manifest with the digest of its content, and return it."""
    manifest = {**content, "sha256": files.digest_json(content)}
    text = json.dumps(manifest, indent=2, allow_nan=False) + "\n"
    files.write_durably(root / MANIFEST, text.encode())
    return manifest


def _take_lock(root: Path) -> int:
    descriptor = os.open(root / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        files.lock(descriptor)
    except BlockingIOError:
        os.close(descriptor)
        raise RunError(
            f"{root} is in use: stop the process that uses it, or close its MemoryLM"
        ) from None
    return descriptor


def _digest(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of everything that a file holds, except for the digest itself."""
    plain = {name: value for name, value in metadata.items() if name != "sha256"}
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read_entry(path: Path, number: int) -> SourceEntry:
    with _refuse_damage(path), safe_open(path, "pt") as file:
        metadata, shape = file.metadata(), file.get_slice("tokens").get_shape()
        if metadata["number"] != str(number):
            raise CheckpointError(f"{path} was renamed: it is number {metadata['number']}")
        return SourceEntry(
            name=metadata["name"],
            tokens=shape[0],
            read_at=float(metadata["read_at"]),
            number=number,
            replaces=int(metadata["replaces"]),
        )


def _read_source(path: Path, number: int) -> Source:
    with _refuse_damage(path), safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no dict
        if metadata["sha256"] != _digest(metadata, tensors):
            raise CheckpointError(f"{path} is damaged: its content has changed")
        return Source(
            name=metadata["name"],
            text_digest=metadata["text_digest"],
            tokens=tensors["tokens"],
            keys=tensors["keys"],
            summaries=tensors.get("summaries"),
            read_at=float(metadata["read_at"]),
            number=number,
        )


@contextlib.contextmanager
def _refuse_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except (SafetensorError, KeyError, ValueError, TypeError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
