"""The state of a run on disk, from which a killed run resumes.

A named state is a checkpoint directory (`mbpa.checkpoint`): tensors in safetensors, everything else
in a JSON tree that says where the tensors belong. The lock is released when the process that holds
it dies.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from experiments.errors import ExperimentError
from mbpa import files
from mbpa.checkpoint import load_checkpoint, save_checkpoint
from mbpa.errors import CheckpointError

_LOCK = ".lock"


class Workspace:
    """Named states in a folder of their own; use it inside `with workspace.alone():`."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._start = time.perf_counter()
        self._seconds_before = 0.0
        self._saved_here: set[str] = set()

    @property
    def seconds(self) -> float:
        """Seconds spent so far, including those of interrupted runs on the loaded states."""
        return self._seconds_before + time.perf_counter() - self._start

    def load(self, name: str) -> dict[str, Any] | None:
        """Return the state saved under this name, tensors on the CPU; `None` if there is none.

        A damaged state counts as none: it is removed, and a line on stderr says so.
        """
        path = self._path(name)
        if not (path / "manifest.json").exists():  # none, or killed before the first was complete
            return None
        try:
            checkpoint = load_checkpoint(path)
            content = _unpack(checkpoint.description["tree"], checkpoint.tensors["state"])
            seconds, state = content["seconds"], content["state"]
        except (CheckpointError, KeyError, TypeError, ValueError) as error:
            print(f"mbpa: saved work is damaged and will be redone: {error}", file=sys.stderr)
            shutil.rmtree(path, ignore_errors=True)
            return None
        if name not in self._saved_here:
            self._seconds_before = max(self._seconds_before, seconds)
        loaded: dict[str, Any] = state
        return loaded

    def save(self, name: str, state: Mapping[str, Any]) -> None:
        """Replace the state of this name atomically, even if the process is killed.

        Args:
            name: letters, digits, `_`, `-`.
            state: tensors, JSON values and non-finite floats in dicts (of string or int keys),
                lists and tuples; all are restored unchanged. A torch optimiser's or module's
                `state_dict()` and a generator's `get_state()` can be stored directly.

        Raises:
            ValueError: it holds something else.
        """
        tensors: dict[str, Tensor] = {}
        tree = _pack({"seconds": self.seconds, "state": state}, tensors, name)
        save_checkpoint(self._path(name), tensors={"state": tensors}, description={"tree": tree})
        self._saved_here.add(name)

    def discard(self) -> None:
        """Remove everything atomically: a half-removed state must not pass for saved work."""
        gone = self.folder.with_name(f"{self.folder.name}.gone")
        shutil.rmtree(gone, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            self.folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
        with contextlib.suppress(OSError):  # other runs may be using it
            self.folder.parent.rmdir()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Create the folder and lock it for this process.

        Raises:
            ExperimentError: another process holds the lock.
            OSError: the folder cannot be created or written to.
        """
        descriptor = _lock_of(self.folder)
        try:
            yield
        finally:
            os.close(descriptor)

    def is_begun(self) -> bool:
        """Return whether an interrupted run left a state."""
        return any(self.folder.glob("*/manifest.json"))

    def _path(self, name: str) -> Path:
        if not name or not all(c.isalnum() or c in "_-" for c in name):
            raise ValueError(f"name must be letters, digits, '_' or '-', got {name!r}")
        return self.folder / name


# A state as JSON and tensors. Values that JSON cannot express become objects with one key, so that
# every object of the tree is one of these.


def _pack(value: object, tensors: dict[str, Tensor], where: str) -> Any:
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value
        return {"tensor": name}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, Mapping):
        for key in value:
            if type(key) not in (str, int):
                raise ValueError(f"{where} must have keys that are strings or ints, got {key!r}")
        items = value.items()
        return {"dict": [[key, _pack(v, tensors, f"{where}[{key!r}]")] for key, v in items]}
    if isinstance(value, list | tuple):
        packed = [_pack(v, tensors, f"{where}[{i}]") for i, v in enumerate(value)]
        return packed if isinstance(value, list) else {"tuple": packed}
    raise ValueError(f"{where} must be a tensor or JSON, got {type(value).__name__}")


def _unpack(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, list):
        return [_unpack(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "float":
        return float(content)
    if kind == "tuple":
        return tuple(_unpack(item, tensors) for item in content)
    return {key: _unpack(item, tensors) for key, item in content}


def _lock_of(folder: Path) -> int:
    """Lock the folder and return the lock's descriptor, which is still that of the file in the
    folder.
    """
    attempts = 0
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:
            attempts += 1
            if attempts > 100:
                raise  # it cannot be created at all
            continue  # another process has just finished and removed the folder
        try:
            files.lock(descriptor)
        except OSError as error:
            os.close(descriptor)
            raise ExperimentError(
                "another process is working on this run: wait for it, or stop it, "
                "and run the same command again"
            ) from error
        if files.is_at(folder / _LOCK, os.fstat(descriptor)):
            return descriptor
        os.close(descriptor)
