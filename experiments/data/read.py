"""Loaders for digits and texts: one per data set, from a data directory to tensors and tuples.

Files are read as published or as `name.xz`. Missing files raise `MissingDataError`, unreadable ones
`DamagedDataError`. Loaders do not compare the content with the published one: `check` does.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from experiments.data.sources import (
    BANKING77,
    CLINC150,
    MNIST,
    PTB,
    PYTHON_DOCS,
    WIKITEXT_2,
    DamagedDataError,
    DataSet,
    data_dir,
)

Directory = str | os.PathLike[str] | None

# Names of the parts: ours, and those in the files of MNIST and CLINC150.
_IDX_PARTS = {"train": "train", "test": "t10k"}
_CLINC_PARTS = {"train": "train", "valid": "val", "test": "test"}
_UNREADABLE = (
    gzip.BadGzipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    ValueError,
    KeyError,
    TypeError,
)

END_OF_LINE = "<eos>"
"""The token at the end of every line of a corpus."""


@dataclass(frozen=True, eq=False)
class Images:
    """Images and their classes."""

    images: UInt8[Tensor, "N *shape"]
    """Shape (N, height, width), or (N, 3, height, width) in colour."""
    labels: Int64[Tensor, "N"]


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images for training and testing."""

    train: Images
    test: Images
    """Test images; the labelled validation images where test labels are not public."""
    names: tuple[str, ...]
    """Names of the classes."""
    title: str
    """Name of the data set in reports."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Running text as word ids; every line ends with `END_OF_LINE`."""

    train: Int64[Tensor, "T_train"]
    valid: Int64[Tensor, "T_valid"]
    test: Int64[Tensor, "T_test"]
    words: tuple[str, ...]
    """Words by id, in the order of their first occurrence in the training text."""


@dataclass(frozen=True)
class Documents:
    """Texts by file name, in the order of the names."""

    train: dict[str, str]
    valid: dict[str, str]
    test: dict[str, str]


@dataclass(frozen=True, eq=False)
class LabelledTexts:
    """Sentences and their intents."""

    texts: tuple[str, ...]
    labels: Int64[Tensor, "N"]


@dataclass(frozen=True, eq=False)
class IntentSet:
    """Sentences for training and testing intent classifiers."""

    train: LabelledTexts
    valid: LabelledTexts
    """Validation sentences; empty where none are published."""
    test: LabelledTexts
    names: tuple[str, ...]
    """Names of the intents."""
    out_of_scope: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Sentences without an intent, under the keys `train`, `valid` and `test`."""
    domains: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Intents of each domain."""


def mnist(directory: Directory = None) -> ImageSet:
    """Load MNIST: 60,000 training and 10,000 test images of digits, uint8 (N, 28, 28)."""
    parts = {}
    for part, file in _IDX_PARTS.items():
        images = _idx(directory, f"{file}-images-idx3-ubyte.gz", dimensions=3)
        labels = _idx(directory, f"{file}-labels-idx1-ubyte.gz", dimensions=1)
        if len(images) != len(labels):
            folder = data_dir(directory) / MNIST.name
            raise damage_error(folder, f"{len(images)} {part} images, {len(labels)} labels")
        parts[part] = Images(images, labels.long())
    return ImageSet(**parts, names=tuple("0123456789"), title="MNIST")


def ptb(directory: Directory = None) -> Corpus:
    """Load the Penn Treebank as prepared by Mikolov: 10,000 words."""
    return _corpus(PTB, directory, "ptb.{}.txt")


def wikitext_2(directory: Directory = None) -> Corpus:
    """Load WikiText-2, tokenised by words: 33,278 different ones."""
    return _corpus(WIKITEXT_2, directory, "wiki.{}.tokens")


def read_wikitext_2(split: str, directory: Directory = None) -> str:
    """Read a split of WikiText-2, `train`, `valid` or `test`, as one text."""
    path, content = _content(WIKITEXT_2, directory, f"wiki.{split}.tokens")
    with _sound(path):
        return content.decode()


def python_docs(directory: Directory = None) -> Documents:
    """Load the sources of Python's documentation: 497 files in three splits."""
    parts = {}
    for part in ("train", "valid", "test"):
        path, content = _content(PYTHON_DOCS, directory, f"{part}.jsonl")
        with _sound(path):
            lines = map(json.loads, filter(None, content.split(b"\n")))
            parts[part] = {line["path"]: line["text"] for line in lines}
    return Documents(**parts)


def clinc150(directory: Directory = None) -> IntentSet:
    """Load CLINC150: 150 intents in alphabetical order, ten domains, and out-of-scope sentences."""
    path, pairs = _json(CLINC150, directory, "data_full.json")
    with _sound(path):
        names = tuple(sorted({intent for _, intent in pairs["train"]}))
        parts = {part: _sentences(names, pairs[key]) for part, key in _CLINC_PARTS.items()}
        outside = {
            part: tuple(text for text, _ in pairs[f"oos_{key}"])
            for part, key in _CLINC_PARTS.items()
        }
    path, groups = _json(CLINC150, directory, "domains.json")
    with _sound(path):
        domains = {domain: tuple(intents) for domain, intents in dict(groups).items()}
    return IntentSet(**parts, names=names, out_of_scope=outside, domains=domains)


def banking77(directory: Directory = None) -> IntentSet:
    """Load Banking77: 77 intents in the order of the published list; no validation sentences."""
    names = tuple(_json(BANKING77, directory, "categories.json")[1])
    parts = {}
    for part in ("train", "test"):
        path, content = _content(BANKING77, directory, f"{part}.csv")
        with _sound(path):
            rows = csv.DictReader(io.StringIO(content.decode(), newline=""))
            parts[part] = _sentences(names, [(row["text"], row["category"]) for row in rows])
    return IntentSet(parts["train"], _sentences(names, []), parts["test"], names)


# Reading one file


def locate(folder: Path, name: str) -> Path | None:
    """Return the file of this name, plain or as `name.xz`, or `None`."""
    return next((path for end in ("", ".xz") if (path := folder / (name + end)).is_file()), None)


def damage_error(path: Path, why: object) -> DamagedDataError:
    """Return the error for a file whose content cannot be understood."""
    return DamagedDataError(f"{path} is damaged: {why}", (path,))


def _content(data_set: DataSet, directory: Directory, name: str) -> tuple[Path, bytes]:
    root = data_dir(directory)
    path = locate(root / data_set.name, name)
    if path is None:
        raise data_set.missing(root, name)
    with _sound(path):
        content = path.read_bytes()
        return path, lzma.decompress(content) if path.suffix == ".xz" else content


@contextmanager
def _sound(path: Path) -> Iterator[None]:
    """Turn errors raised while parsing into errors about damage to `path`."""
    try:
        yield
    except _UNREADABLE as error:
        raise damage_error(path, f"{type(error).__name__}: {error}") from error


def _json(data_set: DataSet, directory: Directory, name: str) -> tuple[Path, Any]:
    path, content = _content(data_set, directory, name)
    with _sound(path):
        return path, json.loads(content)


def _idx(directory: Directory, name: str, dimensions: int) -> UInt8[Tensor, "..."]:
    """Read an array of bytes in MNIST's format: two zeros, type 8, rank, sizes, values."""
    path, content = _content(MNIST, directory, name)
    with _sound(path):
        data = gzip.decompress(content)
        header = 4 + 4 * dimensions
        if data[:4] != bytes((0, 0, 8, dimensions)):
            raise ValueError(f"begins with {data[:4].hex()}")
        shape = tuple(int(size) for size in np.frombuffer(data[4:header], ">u4"))
        values = np.frombuffer(data, np.uint8, offset=header).reshape(shape)
    return torch.from_numpy(values.copy())


def _corpus(data_set: DataSet, directory: Directory, pattern: str) -> Corpus:
    numbers: dict[str, int] = {}
    parts = {}
    for part in ("train", "valid", "test"):
        path, content = _content(data_set, directory, pattern.format(part))
        with _sound(path):
            lines = content.decode().split("\n")[:-1]  # the last line ends with a newline too
            tokens = [word for line in lines for word in (*line.split(), END_OF_LINE)]
            if part == "train":
                numbers = {word: number for number, word in enumerate(dict.fromkeys(tokens))}
            parts[part] = torch.tensor([numbers[word] for word in tokens], dtype=torch.int64)
    return Corpus(**parts, words=tuple(numbers))


def _sentences(names: tuple[str, ...], pairs: list[Any]) -> LabelledTexts:
    numbers = {name: number for number, name in enumerate(names)}
    labels = torch.tensor([numbers[intent] for _, intent in pairs], dtype=torch.int64)
    return LabelledTexts(tuple(text for text, _ in pairs), labels)
