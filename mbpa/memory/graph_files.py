"""Saved graph memories: a directory with a manifest, raw keys, and one file per part of a graph.

Files have random names, and the manifest, which names them, is replaced by one rename. A save that
is killed at any moment therefore leaves the previous one loadable. Keys and graphs can be mapped
into memory instead of being read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from jaxtyping import Float
from torch import Tensor

from mbpa import files
from mbpa.errors import CheckpointError
from mbpa.memory.graph_index import Graph

FORMAT = 2

_MANIFEST = "graph-memory.json"
_FILE = re.compile(r"(keys|tensors|graph\d+(part\d+)?)-[0-9a-f]{32}\.(bin|safetensors|usearch)")


class SavedGraphs(NamedTuple):
    """The content of a saved graph memory."""

    description: dict[str, Any]
    tensors: dict[str, Tensor]
    keys: Float[Tensor, "N D"]
    """One row per slot of the memory; those that were never used are undefined."""
    graphs: list[Graph]


def write_saved(directory: str | os.PathLike[str], saved: SavedGraphs, used: int) -> None:
    """Replace what is saved in a directory; only the first `used` rows of the keys are written."""
    root, suffix = Path(directory).absolute(), uuid.uuid4().hex
    files.make_directory(root)
    before = [name for name in os.listdir(root) if _FILE.fullmatch(name)]
    described: dict[str, dict[str, Any]] = {}
    try:
        path = root / f"keys-{suffix}.bin"
        rows = saved.keys[:used].contiguous().view(torch.uint8)
        with open(path, "xb") as file:
            file.write(rows.numpy().data)
            # Never-used rows are a hole in the file, so that the whole tensor can be mapped.
            file.truncate(saved.keys.numel() * saved.keys.itemsize)
            file.flush()
            os.fsync(file.fileno())
        described[path.name] = _describe_file(path, rows.numel())
        path = root / f"tensors-{suffix}.safetensors"
        centers = {f"center{i}": graph.center for i, graph in enumerate(saved.graphs)}
        safetensors.torch.save_file({**saved.tensors, **centers}, path)
        files.flush_file(path)
        described[path.name] = _describe_file(path)
        graphs = []
        for i, graph in enumerate(saved.graphs):
            parts = range(graph.settings.parts)
            paths = [root / f"graph{i}part{part}-{suffix}.usearch" for part in parts]
            graphs.append({"files": [path.name for path in paths], **graph.save(paths)})
            described |= {path.name: _describe_file(path) for path in paths}
        manifest = {"format": FORMAT, "files": described, "graphs": graphs, **saved.description}
        files.flush_directory(root)
        files.write_durably(root / _MANIFEST, json.dumps(manifest, indent=1).encode())
    except BaseException:
        _remove(root, [name for name in os.listdir(root) if suffix in name])
        raise
    _remove(root, before)


def read_description(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the manifest of a saved memory."""
    path = Path(directory) / _MANIFEST
    try:
        found = json.loads(path.read_bytes())
        if found["format"] > FORMAT:
            raise CheckpointError(f"{path} was written by a newer version of mbpa")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} does not describe a saved GraphMemory: {error}") from error
    assert isinstance(found, dict)
    return found


def read_saved(
    directory: str | os.PathLike[str], description: dict[str, Any], *, mmap: bool
) -> SavedGraphs:
    """Return the content of a saved memory.

    Args:
        directory: in which it was saved.
        description: from `read_description`.
        mmap: map keys and graphs into memory, and compare only the sizes of files, not checksums.
    """
    root = Path(directory).absolute()
    for name, expected in description["files"].items():
        if not _FILE.fullmatch(name):
            raise CheckpointError(f"{root / _MANIFEST} names an unknown file {name!r}")
        _check_file(root / name, expected, read=not mmap)
    schema, names = description["schema"], list(description["files"])
    size = torch.Size(schema["key_dim"]).numel()
    shape, dtype = (schema["capacity"], size), getattr(torch, schema["dtype"])
    keys_path = root / next(name for name in names if name.startswith("keys-"))
    keys = torch.from_file(str(keys_path), shared=False, size=shape[0] * size, dtype=dtype)
    tensors_path = root / next(name for name in names if name.startswith("tensors-"))
    tensors = safetensors.torch.load_file(tensors_path)
    graphs = []
    for i, each in enumerate(description["graphs"]):
        parts = each["files"] if "files" in each else [each["file"]]  # the latter in format 1
        paths = [root / name for name in parts]
        graphs.append(Graph.load(paths, each, tensors.pop(f"center{i}"), mmap=mmap))
    keys = keys.reshape(shape)
    return SavedGraphs(description, tensors, keys if mmap else keys.clone(), graphs)


def _describe_file(path: Path, content_bytes: int | None = None) -> dict[str, Any]:
    size = path.stat().st_size
    content = size if content_bytes is None else content_bytes
    return {"bytes": size, "content_bytes": content, "sha256": _compute_digest(path, content)}


def _check_file(path: Path, expected: Mapping[str, Any], *, read: bool) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path} is missing") from error
    if size != expected["bytes"]:
        raise CheckpointError(f"{path} must have {expected['bytes']} bytes, got {size}")
    if read and _compute_digest(path, expected["content_bytes"]) != expected["sha256"]:
        raise CheckpointError(f"{path} was altered: its checksum differs")


def _compute_digest(path: Path, count: int) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while count > 0 and (part := file.read(min(count, 1 << 24))):
            digest.update(part)
            count -= len(part)
    return digest.hexdigest()


def _remove(root: Path, names: list[str]) -> None:
    for name in names:
        # On Windows a file that is mapped into memory cannot be removed; the next save tries again.
        with contextlib.suppress(PermissionError):
            (root / name).unlink(missing_ok=True)
    files.flush_directory(root)
