"""Pictures: decoding them with Pillow, and a folder of ImageNet.

ImageNet does not fit into memory: its loader lists the files, and `ImageFiles.read` decodes some.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from mbpa.errors import MissingExtraError
from mbpa.experiments.data.read import Directory, damaged
from mbpa.experiments.data.sources import IMAGENET, data_dir

_ENDINGS = (".jpeg", ".jpg", ".png")


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """Pictures too many to hold at once."""

    paths: tuple[str, ...]
    labels: Int64[Tensor, "N"]

    def read(self, indices: Sequence[int], size: int) -> UInt8[Tensor, "B 3 {size} {size}"]:
        """Some of them: the shorter side brought to `size`, the middle cut out."""
        images = torch.empty((len(indices), 3, size, size), dtype=torch.uint8)

        def load(at: int, index: int) -> None:
            path = Path(self.paths[index])
            square = torch.from_numpy(rgb(path, path.read_bytes(), size).copy())
            images[at] = square.permute(2, 0, 1)

        with ThreadPoolExecutor() as pool:  # decoders do not hold Python's lock
            list(pool.map(load, range(len(indices)), indices))
        return images


@dataclass(frozen=True, eq=False)
class ImageFolder:
    """A folder of ImageNet; classes are numbered in the order of their wnids."""

    train: ImageFiles
    test: ImageFiles
    """The validation images."""
    wnids: tuple[str, ...]


def imagenet(directory: Directory = None) -> ImageFolder:
    """ImageNet, or any part of it: `imagenet/train/<wnid>/*.JPEG`, `imagenet/val/<wnid>/*.JPEG`."""
    root = data_dir(directory)
    folder = root / IMAGENET.name
    if not ((folder / "train").is_dir() and (folder / "val").is_dir()):
        raise IMAGENET.missing(root)
    wnids = {
        part: sorted(entry.name for entry in os.scandir(folder / part) if entry.is_dir())
        for part in ("train", "val")
    }
    if different := set(wnids["train"]) ^ set(wnids["val"]):
        raise damaged(folder, f"{min(different)} is in one of train/ and val/ alone")
    train, test = (_files(folder / part, wnids["train"]) for part in ("train", "val"))
    return ImageFolder(train, test, tuple(wnids["train"]))


def _files(folder: Path, wnids: Sequence[str]) -> ImageFiles:
    paths: list[str] = []
    counts = []
    for wnid in wnids:
        with os.scandir(folder / wnid) as entries:
            found = sorted(e.path for e in entries if e.name.lower().endswith(_ENDINGS))
        if not found:
            raise damaged(folder / wnid, "it holds no picture")
        paths += found
        counts.append(len(found))
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts, dtype=torch.int64))
    return ImageFiles(tuple(paths), labels)


# Pillow


def pillow() -> ModuleType:
    """`PIL.Image`, which only pictures need."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("Pillow", extra="images") from error
    return Image


def dimensions(path: Path, content: bytes) -> tuple[int, int]:
    """Width and height of an encoded picture; `path` is for the error."""
    width, height = _opened(path, content).size
    return int(width), int(height)


def rgb(path: Path, content: bytes, size: int | None = None) -> UInt8[np.ndarray, "h w 3"]:
    """A decoded picture; with `size`, the square in its middle reduced or enlarged to that."""
    picture = _opened(path, content)
    try:
        picture = picture.convert("RGB")
    except (OSError, SyntaxError) as error:  # Pillow's, for truncated and for broken pictures
        raise damaged(path, error) from error
    if size is not None and picture.size != (size, size):
        width, height = picture.size
        side = min(width, height)
        left, top = (width - side) / 2, (height - side) / 2
        box = (left, top, left + side, top + side)
        picture = picture.resize((size, size), pillow().Resampling.LANCZOS, box=box)
    return np.asarray(picture)


def _opened(path: Path, content: bytes) -> Any:
    try:
        return pillow().open(io.BytesIO(content))
    except (OSError, SyntaxError) as error:
        raise damaged(path, error) from error
