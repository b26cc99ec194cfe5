"""Tiny ImageNet, as published or packed.

The packed form takes 40 MB instead of 120,000 files. `train.zip` and `val.zip` hold one WebP
picture per class, `<wnid>.webp`, whose tiles are the class's images reduced to 40x40, row by row,
in the order of their numbers. `classes.tsv` lists the classes in the order of the published
`wnids.txt`. Packing is lossy: results on the packed form are not comparable with those on 64x64.
"""

from __future__ import annotations

import abc
import io
import lzma
import os
import re
import sys
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import UInt8
from tqdm import tqdm

from experiments.data.files import lock_folder, verify_sums
from experiments.data.pictures import dimensions, pillow, rgb
from experiments.data.read import Directory, Images, ImageSet, damage_error
from experiments.data.sources import TINY_IMAGENET, DamagedDataError, DataError, data_dir
from mbpa.files import flush_directory

Split = Literal["train", "val"]
SPLITS: tuple[Split, ...] = ("train", "val")
ORIGINAL = "tiny-imagenet-200"
"""Name of the published folder."""
PACKED = ("val_annotations.txt.xz", "classes.tsv", "val.zip", "train.zip")
"""Files of the packed form in the order they are written: if the last exists, so do the others."""

_COLUMNS = "class_id\twnid\timagenet1k_index\tnames"
_TILE = 40  # tile size of packed zips without a comment
# Positions of the 200 classes among ImageNet's thousand, both in the order of their wnids.
_AMONG_THE_THOUSAND = (
    *(1, 25, 30, 32, 50, 61, 69, 71, 75, 76, 79, 99, 105, 107, 109, 113, 114, 115, 122, 123),
    *(128, 145, 146, 149, 151, 187, 207, 208, 235, 267, 281, 283, 285, 286, 291, 294, 301, 308),
    *(309, 311, 313, 314, 315, 319, 323, 325, 329, 338, 341, 345, 347, 349, 353, 354, 365, 367),
    *(372, 386, 387, 398, 400, 406, 411, 414, 421, 424, 425, 427, 430, 435, 436, 437, 438, 440),
    *(445, 447, 448, 457, 458, 462, 463, 466, 467, 470, 471, 474, 480, 485, 488, 492, 496, 500),
    *(508, 509, 511, 517, 525, 526, 532, 542, 543, 557, 562, 565, 567, 568, 570, 573, 576, 604),
    *(605, 612, 614, 619, 621, 625, 627, 635, 645, 652, 655, 675, 677, 678, 682, 683, 687, 704),
    *(707, 716, 720, 731, 733, 734, 735, 737, 739, 744, 747, 758, 760, 761, 765, 768, 774, 779),
    *(781, 786, 801, 806, 808, 811, 815, 817, 821, 826, 837, 839, 842, 845, 849, 850, 853, 862),
    *(866, 873, 874, 877, 879, 887, 888, 890, 899, 900, 909, 910, 917, 923, 924, 928, 929, 932),
    *(935, 938, 945, 947, 950, 951, 954, 957, 962, 963, 964, 967, 970, 972, 973, 975, 978, 988),
)


def tiny_imagenet(
    directory: Directory = None, *, size: int = _TILE, classes: Sequence[int] | None = None
) -> ImageSet:
    """Load Tiny ImageNet: 100,000 training and 10,000 test images, uint8 (N, 3, size, size).

    The images come from the packed form if it has this size, otherwise from the original 64x64
    images, resized if necessary. They are ordered by class and, within a class, by their numbers.

    Args:
        classes: load only these; their labels remain the original ones, 0 to 199.
    """
    form = form_in(data_dir(directory), size)
    chosen = list(range(len(form.wnids)) if classes is None else classes)
    if strange := [c for c in chosen if not 0 <= c < len(form.wnids)]:
        raise ValueError(f"classes must be from 0 to {len(form.wnids) - 1}, got {strange[0]}")
    train, test = (_load_split(form, split, chosen, size) for split in SPLITS)
    return ImageSet(train, test, form.names, form.title(size))


def pack_tiny_imagenet(
    original: Path,
    folder: Path,
    *,
    size: int = _TILE,
    quality: int | None = 50,
    force: bool = False,
    progress: bool = False,
) -> tuple[Path, ...]:
    """Write the packed form of `original`, the published zip or its unpacked folder, to `folder`.

    Args:
        quality: quality of WebP, 0 to 100; `None` is lossless.
        force: replace files that were packed before.

    Returns:
        The files written.
    """
    source = _Original(original)
    folder.mkdir(parents=True, exist_ok=True)
    with (
        lock_folder(folder, progress=progress),
        tqdm(
            total=2 * len(source.wnids),
            desc="packing",
            unit=" classes",
            file=sys.stderr,
            disable=not progress,
        ) as bar,
    ):
        if (folder / PACKED[-1]).exists() and not force:
            raise DataError(f"{folder / PACKED[-1]} already exists: pass --force to replace it")
        annotations = lzma.compress(source.content("val/val_annotations.txt"))
        table = "".join(f"{row}\n" for row in (_COLUMNS, *_class_rows(source))).encode()
        return _write_packed(
            folder,
            lambda out: out.write(annotations),
            lambda out: out.write(table),
            _Tiles(source, "val", size, quality, bar.update).write,
            _Tiles(source, "train", size, quality, bar.update).write,
        )


def form_in(root: Path, size: int | None = None) -> Form:
    """Return the form in data directory `root` with this size, if given; prefer the packed one."""
    folder = root / TINY_IMAGENET.name
    packed = _Packed(folder) if (folder / PACKED[-1]).exists() else None
    if packed and size in (None, packed.size):
        return packed
    if (folder / ORIGINAL).is_dir():
        return _Original(folder / ORIGINAL)
    if packed:
        raise DataError(
            f"{folder} has images of {packed.size}x{packed.size}, not of {size}x{size}: "
            f"`python -m experiments data fetch {TINY_IMAGENET.name}` with another --data-dir gets "
            "the original images"
        )
    raise TINY_IMAGENET.missing(root)


class Form(abc.ABC):
    """A source of the images: the published form or the packed one."""

    wnids: tuple[str, ...]
    names: tuple[str, ...]
    paths: tuple[Path, ...]
    """The files or the folder that it consists of."""

    @abc.abstractmethod
    def count(self, split: Split, wnid: str) -> int:
        """Return the number of images of a class."""

    @abc.abstractmethod
    def read(self, split: Split, wnid: str, size: int) -> UInt8[np.ndarray, "n {size} {size} 3"]:
        """Read the images of a class, in the order of their numbers."""

    @abc.abstractmethod
    def title(self, size: int) -> str:
        """Return the name of the data set in reports."""

    @abc.abstractmethod
    def verify(self) -> None:
        """Compare every byte with the checksums stored with it, if there are any."""


class _Original(Form):
    """The published form: a folder, or the zip that holds it."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise DataError(f"{path} does not exist")
        self._path, self.paths = path, (path,)
        self._zip = zipfile.ZipFile(path) if path.is_file() else None
        words = dict(line.split("\t", 1) for line in self._lines("words.txt"))
        self.wnids = tuple(self._lines("wnids.txt"))
        self.names = tuple(words.get(wnid, wnid) for wnid in self.wnids)
        self._files: dict[tuple[str, str], list[str]] = {
            (split, wnid): [] for split in SPLITS for wnid in self.wnids
        }
        for line in self._lines("val/val_annotations.txt"):
            file, wnid = line.split("\t")[:2]
            self._add("val", wnid, f"val/images/{file}")
        for name in self._training_names():
            self._add("train", name.split("/")[1], name)
        for files in self._files.values():
            files.sort(key=lambda name: int(re.findall(r"\d+", name)[-1]))

    def count(self, split: Split, wnid: str) -> int:
        return len(self._files[split, wnid])

    def read(self, split: Split, wnid: str, size: int) -> UInt8[np.ndarray, "n {size} {size} 3"]:
        images = np.empty((self.count(split, wnid), size, size, 3), np.uint8)
        for at, name in enumerate(self._files[split, wnid]):
            images[at] = rgb(self._path / name, self.content(name), size)
        return images

    def title(self, size: int) -> str:
        return f"Tiny ImageNet, {size}x{size}"

    def verify(self) -> None:
        if verify_sums(self._path):
            return
        for name in (name for names in self._files.values() for name in names):
            content = self.content(name)
            if not (
                content.startswith(b"\xff\xd8") and content.rstrip(b"\0").endswith(b"\xff\xd9")
            ):
                raise damage_error(self._path, f"{name} is not a complete JPEG picture")

    def content(self, name: str) -> bytes:
        """Read a file by its name inside the published folder."""
        try:
            if self._zip:
                return self._zip.read(f"{ORIGINAL}/{name}")
            return (self._path / name).read_bytes()
        except (FileNotFoundError, KeyError, zipfile.BadZipFile) as error:
            raise damage_error(self._path, f"{name} is missing or broken") from error

    def _lines(self, name: str) -> list[str]:
        return self.content(name).decode().split("\n")[:-1]

    def _add(self, split: Split, wnid: str, name: str) -> None:
        if (split, wnid) not in self._files:
            raise damage_error(self._path, f"{name} belongs to {wnid}, which is not in wnids.txt")
        self._files[split, wnid].append(name)

    def _training_names(self) -> list[str]:
        if self._zip:
            names = [name.removeprefix(f"{ORIGINAL}/") for name in self._zip.namelist()]
        else:
            found = (self._path / "train").glob("*/images/*.JPEG")
            names = [path.relative_to(self._path).as_posix() for path in found]
        return [name for name in names if re.fullmatch(r"train/\w+/images/\w+\.JPEG", name)]


class _Packed(Form):
    """The form that `pack_tiny_imagenet` writes; the comment of a zip gives the tile size."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.paths = tuple(path for name in PACKED if (path := folder / name).exists())
        try:
            self._zips = {split: zipfile.ZipFile(folder / f"{split}.zip") for split in SPLITS}
            lines = (folder / "classes.tsv").read_text("utf-8").splitlines()
        except (FileNotFoundError, UnicodeDecodeError, zipfile.BadZipFile) as error:
            raise self._damage_error(error) from error
        rows = [line.split("\t") for line in lines[1:]]
        if lines[0] != _COLUMNS or any(len(row) != 4 for row in rows):
            raise self._damage_error(f"the columns of classes.tsv are not {_COLUMNS.split()}")
        self.wnids = tuple(row[1] for row in rows)
        self.names = tuple(row[3] for row in rows)
        comment = self._zips["train"].comment
        if comment != self._zips["val"].comment:
            raise self._damage_error("train.zip and val.zip were not packed together")
        told = re.fullmatch(rb"(\d+)x\1 (lossless|lossy)", comment)
        self.size = int(told[1]) if told else _TILE
        self._kept = "packed without loss" if told and told[2] == b"lossless" else "recompressed"

    def count(self, split: Split, wnid: str) -> int:
        width, height = dimensions(*self._webp(split, wnid))
        if width % self.size or height % self.size:
            raise self._damage_error(f"{split}.zip has a {wnid}.webp of {width}x{height}")
        return width * height // self.size**2

    def read(self, split: Split, wnid: str, size: int) -> UInt8[np.ndarray, "n {size} {size} 3"]:
        picture = rgb(*self._webp(split, wnid))
        rows, columns = (side // size for side in picture.shape[:2])
        tiles = picture.reshape(rows, size, columns, size, 3).swapaxes(1, 2)
        return tiles.reshape(-1, size, size, 3)  # from (rows, columns, size, size, 3)

    def title(self, size: int) -> str:
        return f"Tiny ImageNet, {size}x{size}, {self._kept}"

    def verify(self) -> None:
        for split, archive in self._zips.items():
            if wrong := archive.testzip():
                raise self._damage_error(f"{wrong} in {split}.zip has a wrong checksum")

    def _webp(self, split: Split, wnid: str) -> tuple[Path, bytes]:
        try:
            content = self._zips[split].read(f"{wnid}.webp")
        except (KeyError, zipfile.BadZipFile) as error:
            raise self._damage_error(error) from error
        return self._folder / f"{split}.zip" / f"{wnid}.webp", content

    def _damage_error(self, why: object) -> DamagedDataError:
        return DamagedDataError(f"{self._folder} is damaged: {why}", self.paths)


def _load_split(form: Form, split: Split, classes: list[int], size: int) -> Images:
    counts = torch.tensor([form.count(split, form.wnids[c]) for c in classes], dtype=torch.int64)
    ends = counts.cumsum(0).tolist()
    images = torch.empty((int(counts.sum()), 3, size, size), dtype=torch.uint8)

    def load(c: int, end: int) -> None:
        tiles = torch.from_numpy(form.read(split, form.wnids[c], size).copy())
        images[end - len(tiles) : end] = tiles.permute(0, 3, 1, 2)

    with ThreadPoolExecutor() as pool:  # decoders release the GIL
        list(pool.map(load, classes, ends))
    return Images(images, torch.tensor(classes, dtype=torch.int64).repeat_interleave(counts))


# Packing


def _class_rows(source: Form) -> list[str]:
    places: dict[str, int] = {}
    if len(source.wnids) == len(_AMONG_THE_THOUSAND):
        places = dict(zip(sorted(source.wnids), _AMONG_THE_THOUSAND, strict=True))
    return [
        f"{number}\t{wnid}\t{places.get(wnid, '')}\t{name}"
        for number, (wnid, name) in enumerate(zip(source.wnids, source.names, strict=True))
    ]


@dataclass(frozen=True)
class _Tiles:
    """One split being written to a zip."""

    source: Form
    split: Split
    size: int
    quality: int | None
    packed: Callable[[], object]
    """Called after each class."""

    def write(self, out: io.BufferedWriter) -> None:
        kept = "lossless" if self.quality is None else "lossy"
        with (
            zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive,
            ThreadPoolExecutor() as pool,
        ):
            archive.comment = f"{self.size}x{self.size} {kept}".encode()
            pictures = pool.map(self._webp, self.source.wnids)
            for wnid, picture in zip(self.source.wnids, pictures, strict=True):
                archive.writestr(zipfile.ZipInfo(f"{wnid}.webp"), picture)  # no time: same bytes
                self.packed()

    def _webp(self, wnid: str) -> bytes:
        tiles = self.source.read(self.split, wnid, self.size)
        count, size = len(tiles), self.size
        if not count:
            raise DataError(f"{wnid} has no {self.split} image to pack")
        columns = next(c for c in range(1, count + 1) if c * c >= count and count % c == 0)
        grid = tiles.reshape(count // columns, columns, size, size, 3).swapaxes(1, 2)
        picture = pillow().fromarray(grid.reshape(-1, columns * size, 3))
        buffer = io.BytesIO()
        if self.quality is None:
            picture.save(buffer, "WEBP", lossless=True)
        else:
            picture.save(buffer, "WEBP", quality=self.quality)
        return buffer.getvalue()


def _write_packed(
    folder: Path, *writers: Callable[[io.BufferedWriter], object]
) -> tuple[Path, ...]:
    """Write all files of `PACKED`, then rename them; the last rename makes the form valid."""
    partial = [folder / f"{name}.part" for name in PACKED]
    try:
        for path, write in zip(partial, writers, strict=True):
            with path.open("wb") as out:
                write(out)
                out.flush()
                os.fsync(out.fileno())
        (folder / PACKED[-1]).unlink(missing_ok=True)
        final = tuple(path.replace(folder / path.stem) for path in partial)
    finally:
        for path in partial:
            path.unlink(missing_ok=True)
    flush_directory(folder)
    return final
