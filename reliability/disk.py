"""A model of what a disk may hold after a power cut, given the preceding system calls.

Changes of names belong to directories, changes of contents to files; both may be lost unless they
were flushed. A rename changes one or two directories in one step. Any part of the unflushed changes
may survive, in any order: names one by one, contents by sectors of 512 bytes, sizes one by one.

Standard library only.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from pathlib import Path

from reliability.system_calls import Call, Verdict

SECTOR_BYTES = 512


@dataclass(eq=False)
class File:
    """A file: its flushed content, and the changes not flushed yet."""

    flushed: bytes = b""
    pending: list[Call] = field(default_factory=list)

    def content(self, draw: random.Random, kept: float) -> bytes:
        """Return a possible content if each pending change survives with this probability."""
        content = self.flushed
        for change in self.pending:
            if change.name == "truncate":
                content = apply_change(content, change) if draw.random() < kept else content
                continue
            for at in range(0, len(change.data), SECTOR_BYTES):
                if draw.random() < kept:
                    part = change.data[at : at + SECTOR_BYTES]
                    moved = Call("write", change.path, change.offset + at, part)
                    content = apply_change(content, moved)
        return content

    def flush(self) -> None:
        for change in self.pending:
            self.flushed = apply_change(self.flushed, change)
        self.pending.clear()


@dataclass(eq=False)
class Directory:
    """A directory: its flushed names, and its current ones."""

    flushed: dict[str, File | Directory] = field(default_factory=dict)
    now: dict[str, File | Directory] = field(default_factory=dict)


Step = list[tuple[Directory, str, File | Directory | None]]
"""Names that change together: the directory, the name, and what it refers to afterwards."""


class Disk:
    """Follows system calls below one directory.

    Args:
        root: the directory; its initial contents count as flushed.
    """

    def __init__(self, root: Path) -> None:
        self._path = os.path.realpath(root)
        self._root = _read(Path(self._path))
        self._steps: list[Step] = []

    def do(self, call: Call, verdict: Verdict = None) -> None:
        """Apply one call; `verdict` is the error that it failed with, if any."""
        if call.name == "sync":
            self._sync(call.path, verdict)
            return
        if verdict is not None and verdict > 0:
            return
        if call.name in ("write", "truncate", "fallocate"):
            file = self._find(call.path)
            if isinstance(file, File) and call.name != "fallocate":
                file.pending.append(call)
        elif call.name == "open":
            self._open(call)
        elif call.name == "mkdir":
            if self._find(call.path) is None:  # mkdir fails if the name exists
                self._change((call.path, Directory()))
        elif call.name != "exchange" and self._find(call.path) is None:
            return
        elif call.name == "unlink":
            self._change((call.path, None))
        elif call.name == "rename":
            self._change((call.path, None), (call.other, self._find(call.path)))
        elif call.name == "exchange":
            one, other = self._find(call.path), self._find(call.other)
            self._change((call.path, other), (call.other, one))

    def after_power_loss(self, draw: random.Random, kept: float) -> dict[str, bytes | None]:
        """Return paths below the root with their contents; `None` for directories.

        Args:
            kept: probability that an unflushed change survives.
        """
        names = _Names()
        for step in self._steps:
            if draw.random() < kept:
                names.apply(step)
        return dict(names.walk(self._root, "", draw, kept))

    # Inside

    def _sync(self, path: str, verdict: Verdict) -> None:
        node = self._find(path)
        if isinstance(node, File) and verdict is not None:
            node.pending.clear()  # the kernel now treats these pages as clean
        if verdict is not None or node is None:
            return
        if isinstance(node, File):
            node.flush()
        flushed = [step for step in self._steps if _concerns(step, node)]
        names = {(id(directory), name) for step in flushed for directory, name, _ in step}
        for step in list(self._steps):  # changes of the same name keep their order
            if step in flushed or any((id(d), name) in names for d, name, _ in step):
                self._steps.remove(step)
                for directory, name, child in step:
                    _put(directory.flushed, name, child)

    def _open(self, call: Call) -> None:
        file = self._find(call.path)
        if file is None:
            self._change((call.path, File()))
        elif call.cuts and isinstance(file, File):
            file.pending.append(Call("truncate", call.path, 0))

    def _change(self, *names: tuple[str, File | Directory | None]) -> None:
        step: Step = []
        for path, child in names:
            parent = self._find(os.path.dirname(path))
            if isinstance(parent, Directory):
                step.append((parent, os.path.basename(path), child))
        for directory, name, child in step:
            _put(directory.now, name, child)
        if step:
            self._steps.append(step)

    def _find(self, path: str) -> File | Directory | None:
        relative = os.path.relpath(os.path.normpath(path), self._path)
        node: File | Directory | None = self._root
        for part in [] if relative == "." else relative.split(os.sep):
            node = node.now.get(part) if isinstance(node, Directory) else None
        return node


class _Names:
    """The names of all directories after some of the pending steps."""

    def __init__(self) -> None:
        self._changed: dict[int, dict[str, File | Directory]] = {}

    def apply(self, step: Step) -> None:
        for directory, name, child in step:
            _put(self._of(directory), name, child)

    def walk(
        self, directory: Directory, prefix: str, draw: random.Random, kept: float
    ) -> list[tuple[str, bytes | None]]:
        found: list[tuple[str, bytes | None]] = []
        for name, node in self._of(directory).items():
            if isinstance(node, Directory):
                found.append((prefix + name, None))
                found += self.walk(node, f"{prefix}{name}/", draw, kept)
            else:
                found.append((prefix + name, node.content(draw, kept)))
        return found

    def _of(self, directory: Directory) -> dict[str, File | Directory]:
        return self._changed.setdefault(id(directory), dict(directory.flushed))


def apply_change(old: bytes, change: Call) -> bytes:
    """Return the content of a file after a write, or after a change of its size."""
    if change.name == "truncate":
        return old[: change.offset].ljust(change.offset, b"\0")
    end = change.offset + len(change.data)
    return old[: change.offset].ljust(change.offset, b"\0") + change.data + old[end:]


def restore(files: dict[str, bytes | None], root: Path) -> None:
    """Write a tree of files into an empty directory."""
    for name, content in files.items():
        if content is None:
            (root / name).mkdir(parents=True, exist_ok=True)
        else:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)


def _concerns(step: Step, node: File | Directory) -> bool:
    """Return whether flushing this file or directory flushes these names."""
    return any(node in (directory, child) for directory, _, child in step)


def _put(names: dict[str, File | Directory], name: str, child: File | Directory | None) -> None:
    if child is None:
        names.pop(name, None)
    else:
        names[name] = child


def _read(path: Path) -> Directory:
    directory = Directory()
    for entry in path.iterdir():
        node = _read(entry) if entry.is_dir() else File(entry.read_bytes())
        directory.flushed[entry.name] = directory.now[entry.name] = node
    return directory
