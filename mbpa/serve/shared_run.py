"""A run whose description and model are stored in a database, beside its examples."""

from __future__ import annotations

import io
import tarfile
import tempfile
from pathlib import Path

import torch

from mbpa import files
from mbpa.errors import RunError
from mbpa.serve.run_info import RUN_FILE, Model, RunInfo, read_model


def pack_model(directory: Path) -> bytes:
    """Return the files of a model as an archive."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:") as archive:
        for path in sorted(directory.iterdir()):
            if not path.name.startswith("."):
                content = path.read_bytes()
                header = tarfile.TarInfo(path.name)
                header.size = len(content)
                archive.addfile(header, io.BytesIO(content))
    return packed.getvalue()


def unpack_model(packed: bytes, directory: Path) -> None:
    """Write the files of an archive to a new directory, durably.

    Raises:
        RunError: the archive is damaged.
    """
    files.make_directory(directory)
    try:
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r:") as archive:
            for member in archive:
                content = archive.extractfile(member)
                if content is None or Path(member.name).name != member.name:
                    raise RunError(f"the model in the database is damaged: {member.name!r}")
                files.replace_file(directory / member.name, content.read())
    except tarfile.TarError as error:
        raise RunError(f"the model in the database is damaged: {error}") from error
    files.flush_directory(directory)


def read_shared_model(
    name: str, run_file: bytes, packed: bytes, device: str | torch.device
) -> tuple[RunInfo, Model]:
    """Return the description and the model of a run in a database.

    Args:
        name: where they come from, for messages.
        run_file: content of `run.json`.
        packed: the model, as an archive.
        device: where it computes.
    """
    info = RunInfo.parse(run_file, f"{RUN_FILE} in {name}")
    with tempfile.TemporaryDirectory(prefix="mbpa-") as folder:
        unpack_model(packed, Path(folder) / info.model)
        return info, read_model(Path(folder), info, device)
