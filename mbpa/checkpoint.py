"""Checkpoints on disk: a directory with ``manifest.json`` and safetensors payloads, no pickle.

Payload files are named after their content, so a save never touches a file that the current
manifest names. Replacing the manifest, which is a single rename, makes the new checkpoint current.
Every byte read back is verified: payloads against the manifest, the manifest by its own checksum.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import stat
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
import torch

from mbpa import files
from mbpa.errors import CheckpointError

FORMAT = 1

_MANIFEST = "manifest.json"
_LOCK = ".lock"
_GROUP = re.compile(r"[A-Za-z0-9_-]{1,128}")  # 128 keeps temporary names below the usual 255
_PAYLOAD = re.compile(r"[A-Za-z0-9_-]{1,128}-[0-9a-f]{16}\.safetensors")
_TEMPORARY = re.compile(rf"({re.escape(_MANIFEST)}|{_PAYLOAD.pattern})\.[0-9a-f]{{32}}\.tmp")
_FIELDS = {"mbpa": str, "files": dict, "description": dict, "sha256": str}
_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.uint8}
_DTYPES |= {torch.int8, torch.int16, torch.int32, torch.int64}
_DEPTH = 100  # far below the depth at which json runs out of stack, in any program that loads it
_ATTEMPTS, _PAUSE = 10, 0.01


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The result of ``load_checkpoint``: named groups of CPU tensors, and their description."""

    tensors: dict[str, dict[str, torch.Tensor]]
    description: dict[str, Any]


class _PayloadMissing(CheckpointError):
    """A payload is missing, possibly because a concurrent save has removed it: worth a retry."""


def save_checkpoint(
    directory: str | os.PathLike[str],
    *,
    tensors: Mapping[str, Mapping[str, torch.Tensor]],
    description: Mapping[str, Any],
) -> None:
    """Replace the checkpoint in ``directory`` with this one atomically.

    A save that is killed at any moment leaves the previous checkpoint loadable. So does a save
    that raises, with one exception: if the very last flush to disk fails, the new checkpoint is in
    place. Concurrent saves into one directory wait for each other where the file system supports
    ``flock``; elsewhere the caller must make sure that only one save runs at a time. Other files in
    the directory are left alone. The names ``manifest.json``, ``.lock`` and
    ``<group>-<16 hex digits>.safetensors`` are reserved.

    Args:
        directory: created, with its parents, if it does not exist.
        tensors: named groups of named tensors, on any device; each group becomes one payload file.
        description: JSON values with string keys; tuples are loaded as lists.

    Raises:
        ValueError: an argument cannot be stored, or a reserved name is in use; nothing has been
            written.
        OSError: the file system reported an error.
    """
    plain = _plain_json(description)
    _check_tensors(tensors)
    root = _make_directory(Path(directory).absolute())
    _refuse_foreign_manifest(root / _MANIFEST)
    with _lock(root):
        before = {name for name in os.listdir(root) if _PAYLOAD.fullmatch(name)}
        try:
            groups = {group: _write_group(root, group, named) for group, named in tensors.items()}
            files.flush_directory(root)  # the manifest must not reach the disk before its payloads
            files.write_durably(root / _MANIFEST, _manifest_text(groups, plain))
        except BaseException:
            # The manifest may or may not have been replaced (a KeyboardInterrupt can come at any
            # point), and after a failed flush the old one may come back: keep the payloads of both.
            _sweep(root, spare=before)
            raise
        _sweep(root, spare=())


def load_checkpoint(directory: str | os.PathLike[str]) -> Checkpoint:
    """Read and verify the checkpoint in ``directory``; safe while another process saves there.

    Raises:
        CheckpointError: a file is missing, unreadable, truncated, altered, or written by a newer
            mbpa; the message names it.
    """
    root = Path(directory).absolute()
    for _ in range(_ATTEMPTS - 1):
        try:
            return _load_once(root)
        except _PayloadMissing:
            # A save replaces the manifest, then removes the payloads of the old one. An unchanged
            # manifest proves nothing: the same content may have been saved again.
            time.sleep(_PAUSE)
    return _load_once(root)


# Checking arguments


def _plain_json(description: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(description, Mapping):
        raise ValueError(f"description must be a mapping, got {type(description).__name__}")
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(description), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"description must be JSON without NaN or Infinity: {error}") from error
    pending: list[tuple[int, Any]] = [(1, dict(description))]
    while pending:
        depth, value = pending.pop()
        if depth > _DEPTH:
            raise ValueError(f"description must be nested at most {_DEPTH} deep")
        if isinstance(value, dict):
            # json would turn the key 1 into "1", and a load would not return what was saved.
            if other := [key for key in value if not isinstance(key, str)]:
                raise ValueError(f"description must have string keys, got {other[0]!r}")
            pending.extend((depth + 1, item) for item in value.values())
        elif isinstance(value, list | tuple):
            pending.extend((depth + 1, item) for item in value)
    return plain


def _check_tensors(tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    for group, named in tensors.items():
        if not isinstance(group, str) or not _GROUP.fullmatch(group):
            raise ValueError(
                f"a group name must be 1 to 128 letters, digits, '_' or '-', got {group!r}"
            )
        if not isinstance(named, Mapping):
            raise ValueError(f"group {group} must be a mapping, got {type(named).__name__}")
        for name, tensor in named.items():
            _check_name(group, name)
            _check_tensor(f"{group}[{name!r}]", tensor)


def _check_tensor(where: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{where} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype not in _DTYPES:
        allowed = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in _DTYPES))
        raise ValueError(f"{where} must have one of the dtypes {allowed}; got {tensor.dtype}")
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
        raise ValueError(
            f"{where} must be dense and hold data, got layout {tensor.layout} on {tensor.device}"
        )


def _check_name(group: str, name: object) -> None:
    if not isinstance(name, str) or name == "__metadata__":  # safetensors' own key
        raise ValueError(
            f"a tensor name in {group} must be a string other than '__metadata__', got {name!r}"
        )
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a tensor name in {group} must be valid text, got {name!r}") from error


def _make_directory(root: Path) -> Path:
    try:
        files.make_directory(root)
    except (FileExistsError, NotADirectoryError) as error:
        raise ValueError(f"directory must be a directory or not exist yet, got {root}") from error
    return root


def _refuse_foreign_manifest(path: Path) -> None:
    """Raise `ValueError` if another program wrote this ``manifest.json``.

    A damaged manifest counts as ours and may be overwritten.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} must be a file or not exist yet")
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return
    if not isinstance(found, dict) or not found.keys() & {"mbpa", "sha256"}:
        raise ValueError(f"{path} must be an mbpa manifest or not exist yet, got another program's")


# Writing


@contextlib.contextmanager
def _lock(root: Path) -> Iterator[None]:
    # The file stays: if it were removed, two saves could lock two different files of the same name.
    descriptor = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        files.lock(descriptor, wait=True)  # saving must also work on file systems without locks
        yield
    finally:
        files.unlock(descriptor)
        os.close(descriptor)


def _write_group(root: Path, group: str, named: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    # Serialise to bytes instead of calling save_file. This takes a copy in memory, but the checksum
    # is that of the intended content, so it also detects a disk that stored something else.
    data = safetensors.torch.save(_storable(named))
    digest = hashlib.sha256(data).hexdigest()
    name = _payload_name(group, digest)
    files.replace_file(root / name, data)  # even if the file exists: it may be damaged
    return {"name": name, "bytes": len(data), "sha256": digest}


def _storable(named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return contiguous CPU tensors, no two of which share a storage (safetensors refuses that)."""
    result: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for name, tensor in named.items():
        dense = tensor.detach().cpu().resolve_neg().contiguous()
        if dense.untyped_storage().data_ptr() in storages:
            dense = dense.clone()
        storages.add(dense.untyped_storage().data_ptr())
        result[name] = dense
    return result


def _payload_name(group: str, digest: str) -> str:
    return f"{group}-{digest[:16]}.safetensors"


def _sweep(root: Path, *, spare: Collection[str]) -> None:
    """Remove our temporary files, and payloads named by neither the manifest nor ``spare``."""
    try:
        keep = {entry["name"] for entry in _read_manifest(root)["files"].values()}
        payloads = True
    except CheckpointError:
        # Without a manifest no payload is needed. An unreadable one may still be repaired by hand,
        # so its payloads stay.
        keep, payloads = set(), not os.path.lexists(root / _MANIFEST)
    with contextlib.suppress(OSError):
        for name in os.listdir(root):
            unnamed = payloads and name not in keep and name not in spare
            if _TEMPORARY.fullmatch(name) or (unnamed and _PAYLOAD.fullmatch(name)):
                # If this fails the checkpoint is still complete, and the next save tries again.
                with contextlib.suppress(OSError):
                    os.unlink(root / name)


# The manifest


def _manifest_text(groups: dict[str, dict[str, Any]], description: dict[str, Any]) -> bytes:
    try:
        version = importlib.metadata.version("mbpa")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    body = {"format": FORMAT, "mbpa": version, "files": groups, "description": description}
    return (json.dumps({**body, "sha256": files.digest_json(body)}, indent=2) + "\n").encode()


def _read_manifest(root: Path) -> dict[str, Any]:
    """Return the verified manifest; callers need not check types or names again."""
    path = root / _MANIFEST
    try:
        with _open_regular(path) as file:
            text = file.read().decode()
        manifest = json.loads(text)
    except (FileNotFoundError, NotADirectoryError) as error:
        what = "no manifest in this directory" if root.is_dir() else f"{root} is not a directory"
        raise CheckpointError(f"{path}: missing: {what}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: must be JSON text, got: {error}") from error
    _check_manifest(path, manifest)
    for group, entry in manifest["files"].items():
        _check_entry(path, group, entry)
    checked: dict[str, Any] = manifest
    return checked


def _check_manifest(path: Path, manifest: Any) -> None:
    if not isinstance(manifest, dict):
        raise CheckpointError(f"{path}: must be a JSON object, got {type(manifest).__name__}")
    found = manifest.get("format")
    if type(found) is not int or found < 1:
        raise CheckpointError(f"{path}: 'format' must be a positive integer, got {found!r}")
    if found > FORMAT:  # checked before any field that a newer format might have changed
        raise CheckpointError(
            f"{path}: written by a newer mbpa (format {found}, this one reads up to {FORMAT}): "
            "upgrade mbpa"
        )
    for field, kind in _FIELDS.items():
        if not isinstance(manifest.get(field), kind):
            raise CheckpointError(
                f"{path}: altered: lacks {field!r}, or it is not a {kind.__name__}"
            )
    try:
        digest = files.digest_json(manifest)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: altered: {error}") from error
    if digest != manifest["sha256"]:
        raise CheckpointError(f"{path}: altered: sha256 must be {manifest['sha256']}, got {digest}")


def _check_entry(path: Path, group: str, entry: Any) -> None:
    """Check one file entry: even a manifest with a valid checksum may name an arbitrary file."""
    where = f"{path}: the file of group {group!r}"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where} must be an object, got {entry!r}")
    size, digest = entry.get("bytes"), entry.get("sha256")
    if type(size) is not int or size < 0:
        raise CheckpointError(f"{where} must have 'bytes' of 0 or more, got {size!r}")
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise CheckpointError(f"{where} must have a 'sha256' of 64 hex digits, got {digest!r}")
    name, expected = entry.get("name"), _payload_name(group, digest)
    if name != expected or not _GROUP.fullmatch(group):
        raise CheckpointError(f"{where} must have the plain file name {expected!r}, got {name!r}")


# Reading


def _load_once(root: Path) -> Checkpoint:
    manifest = _read_manifest(root)
    entries: dict[str, dict[str, Any]] = manifest["files"]
    with contextlib.ExitStack() as stack:
        # Open all files before reading any: an open file remains readable when a later save
        # removes it.
        opened = {
            group: stack.enter_context(_open_payload(root / entry["name"]))
            for group, entry in entries.items()
        }
        tensors = {
            group: _read_payload(root / entry["name"], opened[group], entry)
            for group, entry in entries.items()
        }
    return Checkpoint(tensors=tensors, description=manifest["description"])


def _open_regular(path: Path) -> BinaryIO:
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would block forever
        raise CheckpointError(f"{path}: must be a regular file")
    return open(path, "rb")


def _open_payload(path: Path) -> BinaryIO:
    try:
        return _open_regular(path)
    except FileNotFoundError as error:
        raise _PayloadMissing(f"{path}: missing, though {_MANIFEST} names it") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def _read_payload(path: Path, file: BinaryIO, entry: dict[str, Any]) -> dict[str, torch.Tensor]:
    try:
        size = os.fstat(file.fileno()).st_size
        if size != entry["bytes"]:
            raise CheckpointError(
                f"{path}: truncated or extended: must have {entry['bytes']} bytes, got {size}"
            )
        data = file.read()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    # Parse the same bytes that are hashed, so that nothing unverified is ever used.
    digest = hashlib.sha256(data).hexdigest()
    if digest != entry["sha256"]:
        raise CheckpointError(f"{path}: altered: sha256 must be {entry['sha256']}, got {digest}")
    try:
        named = safetensors.torch.load(data)
    except MemoryError:
        raise
    except Exception as error:  # SafetensorError, or anything torch raises for a malformed header
        raise CheckpointError(f"{path}: must be safetensors, got: {error}") from error
    return dict(sorted(named.items()))  # safetensors' own order differs from run to run
