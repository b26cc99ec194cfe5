"""Pictures and labels as people have them: a folder a label, or a file with a column of paths."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from tqdm import tqdm

from mbpa.encoders import image
from mbpa.errors import RunError
from mbpa.serve.answers import check_label
from mbpa.serve.journal import InputError
from mbpa.serve.labelled_texts import read_spreadsheet

MOST_PIXELS = 80_000_000  # of a file of one's own


@dataclass(frozen=True, eq=False)
class Album:
    """Distinct pairs of a picture, as `mbpa.encoders.image.kept` gives it, and its label."""

    takes: ClassVar[Literal["images"]] = "images"
    """What an encoder of its items takes."""
    images: tuple[bytes, ...]
    labels: tuple[str, ...]
    rows: int
    """Files that were named or found."""
    contradictions: int
    """Pictures that come with more than one label; all of them are kept."""
    strays: int = 0
    """Files that are no pictures by their names, or lie beside the sub-folders."""

    @property
    def items(self) -> tuple[bytes, ...]:
        """What is to be embedded."""
        return self.images

    @property
    def duplicates(self) -> int:
        """Files that show what another one shows, under the same label, and were left out."""
        return self.rows - len(self.images)


def read_album(
    path: Path,
    *,
    column: str = "image",
    label: str = "label",
    encoding: str | None = None,
    progress: bool = False,
) -> Album:
    """Read pictures: those in the sub-folders of a folder, whose names are the labels, or those
    whose paths, beginning at its own folder, a CSV or JSONL file has in a column.

    Raises:
        RunError: naming the file that cannot be.
    """
    strays = 0
    if path.is_dir():
        found, strays = _in_folders(path)
        rows = len(found)
    else:
        table = read_spreadsheet(path, text=column, label=label, encoding=encoding, option="image")
        found = [
            (path.parent / name, label)
            for name, label in zip(table.texts, table.labels, strict=True)
        ]
        rows = table.rows  # it has left out those that stand there twice
    pairs = dict.fromkeys(_read(found, progress))
    images, labels = zip(*pairs, strict=True)
    if len(set(labels)) == 1:
        raise RunError(f"{path} has one label only, {labels[0]!r}: there is nothing to tell apart")
    seen = Counter(picture for picture, _ in pairs)
    contradictions = sum(count > 1 for count in seen.values())
    return Album(images, labels, rows, contradictions, strays)


def _in_folders(root: Path) -> tuple[list[tuple[Path, str]], int]:
    """Pictures with their labels, by name, and how many other files there are."""
    found: list[tuple[Path, str]] = []
    strays = sum(each.is_file() and not _is_hidden(each.name) for each in root.iterdir())
    for folder in sorted(each for each in root.iterdir() if each.is_dir()):
        files = [
            file
            for file in sorted(folder.rglob("*"))
            if file.is_file() and not any(map(_is_hidden, file.relative_to(root).parts))
        ]
        pictures = [file for file in files if file.suffix.lower() in image.SUFFIXES]
        strays += len(files) - len(pictures)
        if pictures:
            _check(folder)
        found += [(file, folder.name.strip()) for file in pictures]
    if not found:
        kinds = ", ".join(sorted(image.SUFFIXES))
        raise RunError(
            f"{root} has no pictures ({kinds}) in sub-folders; it must have one for each label"
        )
    return found, strays


def _is_hidden(name: str) -> bool:
    """What systems put beside people's files: `._8.png` is no picture, whatever it is called."""
    return name.startswith(".") or name == "__MACOSX"


def _check(folder: Path) -> None:
    try:
        check_label(folder.name)
    except InputError as error:
        raise RunError(f"{str(folder)!r} cannot be a label: {error}") from error


def _read(found: Sequence[tuple[Path, str]], progress: bool) -> Iterator[tuple[bytes, str]]:
    for path, label in tqdm(found, desc="reading", file=sys.stderr, disable=not progress):
        try:
            yield image.kept(path.read_bytes(), most_pixels=MOST_PIXELS), label
        except OSError as error:
            raise RunError(f"{path} cannot be read: {error.strerror or error}") from error
        except image.PictureError as error:
            raise RunError(f"{path}: {error}") from error
