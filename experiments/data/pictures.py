"""Pictures: decoding with Pillow, and an ImageNet folder.

ImageNet does not fit into memory: its loader lists the files, `ImageFiles.read` decodes a few, and
`ImageFiles.stream` decodes many, in worker processes. A worker returns a description of a damaged
picture instead of raising, since an exception loses its type and message between processes.
"""

from __future__ import annotations

import functools
import hashlib
import io
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from experiments.data.read import Directory, damage_error
from experiments.data.sources import IMAGENET, DamagedDataError, data_dir
from mbpa.errors import MissingExtraError

_ENDINGS = (".jpeg", ".jpg", ".png")
_MIDDLE = 0.875  # share of the shorter side that is used
_STRETCH = 4 / 3  # largest ratio of the sides of a random crop
_CHECKED_AT_ONCE, _NAMED = 200, 5


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """Pictures that are too many to hold in memory."""

    paths: tuple[str, ...]
    labels: Int64[Tensor, "N"]

    def read(self, indices: Sequence[int], size: int) -> UInt8[Tensor, "B 3 {size} {size}"]:
        """Read some pictures: the shorter side is resized to `size` and the centre is cropped."""
        images = torch.empty((len(indices), 3, size, size), dtype=torch.uint8)

        def load(at: int, index: int) -> None:
            path = Path(self.paths[index])
            square = torch.from_numpy(rgb(path, path.read_bytes(), size).copy())
            images[at] = square.permute(2, 0, 1)

        with ThreadPoolExecutor() as pool:  # decoders release the GIL
            list(pool.map(load, range(len(indices)), indices))
        return images

    def select(self, rows: Int64[Tensor, "n"]) -> ImageFiles:
        """Return the files at `rows`."""
        rows = rows.cpu()
        return ImageFiles(tuple(self.paths[row] for row in rows.tolist()), self.labels[rows])

    def stream(
        self,
        wanted: Iterable[tuple[Int64[Tensor, "B"], Float[Tensor, "B 4"] | None]],
        size: int,
        processes: int | None = None,
        *,
        pin: bool = False,
    ) -> Iterator[UInt8[Tensor, "B {size} {size} 3"]]:
        """Yield one batch after the other, read ahead by worker processes.

        Args:
            wanted: for each batch the rows, and one random crop per picture as four numbers from 0
                to 1: share of its area, shape, and position; `None` takes the centre of each.
            processes: number of worker processes; by default one per core.
            pin: whether to use pinned memory, from which a GPU copies asynchronously.
        """
        tasks = (([self.paths[row] for row in rows.tolist()], crops) for rows, crops in wanted)
        work = functools.partial(_squares, size=size)
        for found in _in_processes(work, tasks, processes or cores(), pin=pin):
            if isinstance(found, str):
                raise DamagedDataError(found, ())
            yield found

    def verify(self, tick: Callable[[int], object] = lambda count: None) -> None:
        """Decode every picture completely, although at a reduced size.

        Args:
            tick: called repeatedly with the number of pictures just finished.

        Raises:
            DamagedDataError: some pictures cannot be read.
        """
        starts = range(0, len(self.paths), _CHECKED_AT_ONCE)
        tasks = (self.paths[start : start + _CHECKED_AT_ONCE] for start in starts)
        wrong: list[str] = []
        for start, found in zip(starts, _in_processes(_faults, tasks, cores()), strict=True):
            wrong += found
            tick(min(_CHECKED_AT_ONCE, len(self.paths) - start))
        if wrong:
            more = f"; and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
            raise DamagedDataError("; ".join(wrong[:_NAMED]) + more, ())


@dataclass(frozen=True, eq=False)
class ImageFolder:
    """An ImageNet folder; classes are numbered in the order of their wnids."""

    train: ImageFiles
    test: ImageFiles
    """The published validation images."""
    wnids: tuple[str, ...]

    def digest(self) -> str:
        """Return a digest of the names of all files, independent of where the folder is."""
        digest = hashlib.sha256()
        for part in (self.train, self.test):
            for path in part.paths:
                digest.update("/".join(Path(path).parts[-2:]).encode() + b"\0")
            digest.update(b"\0")
        return digest.hexdigest()


def imagenet(directory: Directory = None) -> ImageFolder:
    """Load ImageNet or a part of it: `imagenet/{train,val}/<wnid>/*.JPEG`."""
    root = data_dir(directory)
    folder = root / IMAGENET.name
    if not ((folder / "train").is_dir() and (folder / "val").is_dir()):
        raise IMAGENET.missing(root)
    wnids = {
        part: sorted(entry.name for entry in os.scandir(folder / part) if entry.is_dir())
        for part in ("train", "val")
    }
    if different := set(wnids["train"]) ^ set(wnids["val"]):
        raise damage_error(folder, f"{min(different)} is in only one of train/ and val/")
    train, test = (_files(folder / part, wnids["train"]) for part in ("train", "val"))
    return ImageFolder(train, test, tuple(wnids["train"]))


def _files(folder: Path, wnids: Sequence[str]) -> ImageFiles:
    paths: list[str] = []
    counts = []
    for wnid in wnids:
        with os.scandir(folder / wnid) as entries:
            found = sorted(e.path for e in entries if e.name.lower().endswith(_ENDINGS))
        if not found:
            raise damage_error(folder / wnid, "it contains no pictures")
        paths += found
        counts.append(len(found))
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts, dtype=torch.int64))
    return ImageFiles(tuple(paths), labels)


# Parallel work


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Calls(Dataset[Any]):
    """A function in the form of a dataset, as DataLoader's workers require."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __getitem__(self, task: Any) -> Any:
        return self.function(task)


def _in_processes(
    function: Callable[[Any], Any], tasks: Iterable[Any], processes: int, *, pin: bool = False
) -> Iterator[Any]:
    """Yield the results of a function for one task after the other, in order."""
    loader = DataLoader(
        _Calls(function),
        batch_size=None,
        sampler=tasks,
        num_workers=processes,
        pin_memory=pin,
        multiprocessing_context="fork" if sys.platform == "linux" else None,  # starts at once
        generator=torch.Generator(),  # keeps the global one untouched
    )
    with warnings.catch_warnings():
        # The children only decode, on one thread, so none can wait for a lock held at the fork.
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
        arriving = iter(loader)
    yield from arriving


def _squares(
    task: tuple[list[str], Float[Tensor, "B 4"] | None], size: int
) -> UInt8[Tensor, "B {size} {size} 3"] | str:
    """Return a batch, or a description of what is wrong with one of its pictures."""
    paths, crops = task
    images = np.empty((len(paths), size, size, 3), np.uint8)
    try:
        for at, path in enumerate(paths):
            crop = None if crops is None else crops[at].tolist()
            images[at] = _square(Path(path), size, crop)
    except DamagedDataError as error:
        return str(error)
    return torch.from_numpy(images)


def _square(path: Path, size: int, crop: list[float] | None) -> UInt8[np.ndarray, "size size 3"]:
    def box(width: int, height: int) -> tuple[float, float, float, float]:
        return random_box(width, height, *crop) if crop else middle_box(width, height)

    picture = _open(path, _read_bytes(path))
    (width, height), (left, top, right, bottom) = picture.size, box(*picture.size)
    # JPEG can be decoded at a half, a quarter or an eighth of its size, if that is large enough.
    wanted = math.ceil(width * size / (right - left)), math.ceil(height * size / (bottom - top))
    picture.draft("RGB", wanted)
    picture = _convert_to_rgb(path, picture)
    bilinear = pillow().Resampling.BILINEAR
    return np.asarray(picture.resize((size, size), bilinear, box=box(*picture.size)))


def middle_box(
    width: int, height: int, share: float = _MIDDLE
) -> tuple[float, float, float, float]:
    """Return left, top, right and bottom of the central square.

    Args:
        share: side of the square, as a share of the shorter side of the picture.
    """
    side = share * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_box(
    width: int, height: int, share: float, shape: float, x: float, y: float
) -> tuple[float, float, float, float]:
    """Return the box of a crop with this share of the area, or less where it would not fit.

    Args:
        shape: from 0, higher than wide, to 1, wider than high.
        x: from 0, at the left, to 1, at the right.
        y: from 0, at the top, to 1, at the bottom.
    """
    stretch = _STRETCH ** (2 * shape - 1)  # ratio of width to height
    across = min(float(width), math.sqrt(share * width * height * stretch))
    down = min(float(height), math.sqrt(share * width * height / stretch))
    left, top = x * (width - across), y * (height - down)
    return left, top, min(left + across, width), min(top + down, height)


def _faults(paths: Sequence[str]) -> list[str]:
    """Return a description of each picture that cannot be read."""
    found = []
    for name in paths:
        path = Path(name)
        try:
            picture = _open(path, _read_bytes(path))
            picture.draft("RGB", (1, 1))
            _convert_to_rgb(path, picture)
        except DamagedDataError as error:
            found.append(str(error))
    return found


# Pillow


def pillow() -> ModuleType:
    """Import `PIL.Image`, which only pictures need."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("Pillow", extra="images") from error
    return Image


def dimensions(path: Path, content: bytes) -> tuple[int, int]:
    """Return width and height of an encoded picture; `path` is used in errors only."""
    width, height = _open(path, content).size
    return int(width), int(height)


def rgb(path: Path, content: bytes, size: int | None = None) -> UInt8[np.ndarray, "h w 3"]:
    """Decode a picture; with `size`, crop the central square and resize it."""
    picture = _convert_to_rgb(path, _open(path, content))
    if size is not None and picture.size != (size, size):
        width, height = picture.size
        box = middle_box(width, height, share=1.0)
        picture = picture.resize((size, size), pillow().Resampling.LANCZOS, box=box)
    return np.asarray(picture)


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise damage_error(path, error.strerror) from error


def _open(path: Path, content: bytes) -> Any:
    try:
        return pillow().open(io.BytesIO(content))
    except pillow().UnidentifiedImageError as error:
        raise damage_error(path, "it is not a picture") from error
    except (OSError, SyntaxError) as error:
        raise damage_error(path, error) from error


def _convert_to_rgb(path: Path, picture: Any) -> Any:
    try:
        return picture.convert("RGB")
    except (OSError, SyntaxError) as error:  # raised by Pillow for truncated and broken pictures
        raise damage_error(path, error) from error
