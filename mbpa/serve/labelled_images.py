"""Labelled pictures from one folder per label, or from a file with a column of paths."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from tqdm import tqdm

from mbpa.encoders.pictures import SUFFIXES, PictureError, standardize
from mbpa.errors import RunError
from mbpa.serve.input_checks import check_label
from mbpa.serve.journal import InputError
from mbpa.serve.labelled_texts import read_labelled_texts

MAX_OWN_PICTURE_PIXELS = 80_000_000  # more than in a request, since the files are the user's own


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """Distinct pairs of a picture, as returned by `pictures.standardize`, and its label."""

    takes: ClassVar[Literal["images"]] = "images"
    """Kind of the items, as in `Encoder.takes`."""
    images: tuple[bytes, ...]
    labels: tuple[str, ...]
    rows: int
    """Number of files named or found."""
    contradictions: int
    """Number of pictures with more than one label; all of them are kept."""
    strays: int = 0
    """Number of files whose suffix is not that of a picture, or that lie beside the sub-folders."""
    lessons: tuple[tuple[bytes, str], ...] = ()
    """Pictures and labels that were taught to an exported run after it was trained, in order."""

    @property
    def items(self) -> tuple[bytes, ...]:
        """Items to embed."""
        return self.images

    @property
    def duplicates(self) -> int:
        """Number of files left out because they repeat another one with the same label."""
        return self.rows - len(self.images)


def read_labelled_images(
    path: Path,
    *,
    column: str = "image",
    label: str = "label",
    encoding: str | None = None,
    progress: bool = False,
) -> LabelledImages:
    """Read labelled pictures.

    Args:
        path: a folder with one sub-folder per label, named after it; or a CSV or JSONL file with
            a column of paths, relative to the folder of the file.

    Raises:
        RunError: a file is invalid; the message names it.
    """
    strays, taught = 0, list[tuple[Path, str]]()
    if path.is_dir():
        found, strays = _find_pictures(path)
        rows = len(found)
    else:
        table = read_labelled_texts(
            path, text=column, label=label, encoding=encoding, option="image"
        )
        found = [
            (path.parent / name, label)
            for name, label in zip(table.texts, table.labels, strict=True)
        ]
        taught = [(path.parent / name, label) for name, label in table.lessons]
        rows = table.rows  # including duplicates, which the table leaves out
    pairs = dict.fromkeys(_read_pictures(found, progress))
    images, labels = zip(*pairs, strict=True)
    if len(set(labels)) == 1:
        raise RunError(f"{path} has only one label, {labels[0]!r}: at least two are needed")
    seen = Counter(picture for picture, _ in pairs)
    contradictions = sum(count > 1 for count in seen.values())
    lessons = tuple(_read_pictures(taught, progress))
    return LabelledImages(images, labels, rows, contradictions, strays, lessons)


def _find_pictures(root: Path) -> tuple[list[tuple[Path, str]], int]:
    """Return the pictures with their labels, sorted by path, and the number of other files."""
    found: list[tuple[Path, str]] = []
    strays = sum(each.is_file() and not _is_hidden(each.name) for each in root.iterdir())
    for folder in sorted(each for each in root.iterdir() if each.is_dir()):
        files = [
            file
            for file in sorted(folder.rglob("*"))
            if file.is_file() and not any(map(_is_hidden, file.relative_to(root).parts))
        ]
        pictures = [file for file in files if file.suffix.lower() in SUFFIXES]
        strays += len(files) - len(pictures)
        if pictures:
            _check_folder_name(folder)
        found += [(file, folder.name.strip()) for file in pictures]
    if not found:
        kinds = ", ".join(sorted(SUFFIXES))
        raise RunError(
            f"{root} has no pictures ({kinds}) in sub-folders; it must have one per label"
        )
    return found, strays


def _is_hidden(name: str) -> bool:
    """Return whether a file was created by the system: `._8.png` is not a picture, for example."""
    return name.startswith(".") or name == "__MACOSX"


def _check_folder_name(folder: Path) -> None:
    try:
        check_label(folder.name)
    except InputError as error:
        raise RunError(f"{str(folder)!r} cannot be a label: {error}") from error


def _read_pictures(
    found: Sequence[tuple[Path, str]], progress: bool
) -> Iterator[tuple[bytes, str]]:
    for path, label in tqdm(found, desc="reading", file=sys.stderr, disable=not progress):
        try:
            yield standardize(path.read_bytes(), max_pixels=MAX_OWN_PICTURE_PIXELS), label
        except OSError as error:
            raise RunError(f"{path} cannot be read: {error.strerror or error}") from error
        except PictureError as error:
            raise RunError(f"{path}: {error}") from error
