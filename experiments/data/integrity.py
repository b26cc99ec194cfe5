"""Whether a data set is present and valid: first its checksums, then its structure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from experiments.data.files import find_mismatch
from experiments.data.pictures import imagenet
from experiments.data.read import (
    Corpus,
    Directory,
    IntentSet,
    banking77,
    clinc150,
    locate,
    mnist,
    ptb,
    python_docs,
    wikitext_2,
)
from experiments.data.sources import (
    SETS,
    DamagedDataError,
    DataSet,
    MissingDataError,
    data_dir,
)
from experiments.data.tiny_imagenet import ORIGINAL, PACKED, SPLITS, form_in

Counts = Mapping[str, int]


@dataclass(frozen=True)
class Finding:
    """The outcome of `check`."""

    name: str
    status: Literal["good", "missing", "incomplete", "damaged"]
    detail: str
    """One line: what the copy contains, what it lacks, or what is wrong."""
    lacking: tuple[str, ...] = ()
    """Names of missing files."""
    wrong: tuple[Path, ...] = ()
    """Files and folders whose content is wrong."""


def check(data_set: DataSet, directory: Directory = None) -> Finding:
    """Verify the copy of `data_set` in `directory`, including every byte that has a checksum."""
    root = data_dir(directory)
    folder = root / data_set.name
    paths = {file.name: locate(folder, file.name) for file in data_set.files}
    wrong = {
        path: why
        for file in data_set.files
        if (path := paths[file.name]) and (why := find_mismatch(path, file))
    }
    lacking = tuple(name for name, path in paths.items() if path is None)
    if wrong:
        detail = "; ".join(f"{path}: {why}" for path, why in wrong.items())
        return Finding(data_set.name, "damaged", detail, lacking, tuple(wrong))
    if lacking:
        status: Literal["missing", "incomplete"] = (
            "missing" if len(lacking) == len(paths) else "incomplete"
        )
        detail = f"{folder} has no {', '.join(lacking)}"
        return Finding(data_set.name, status, detail, lacking)
    return _check_structure(data_set, root)


def require(name: str, directory: Directory = None) -> None:
    """Raise an error unless a data set is present and valid, before an experiment uses it.

    Raises:
        MissingDataError: all or part of the data set is missing.
        DamagedDataError: some of its content is wrong.
    """
    data_set, root = SETS[name], data_dir(directory)
    found = check(data_set, root)
    if found.status in ("missing", "incomplete"):
        raise data_set.missing(root, *found.lacking[:1])
    if found.status == "damaged":
        way = f"`python -m experiments data fetch {name} --force` replaces it"
        raise DamagedDataError(f"{found.detail}; {way}", found.wrong)


def is_present(data_set: DataSet, directory: Directory = None) -> bool:
    """Return whether the files exist, regardless of their content: fast enough for a table."""
    folder = data_dir(directory) / data_set.name
    if data_set.files:
        return all(locate(folder, file.name) for file in data_set.files)
    marks = {"tiny-imagenet": (PACKED[-1], f"{ORIGINAL}/wnids.txt"), "imagenet": ("train",)}
    return any((folder / mark).exists() for mark in marks.get(data_set.name, ()))


def _check_structure(data_set: DataSet, root: Path) -> Finding:
    """Load the data set, or as much as is needed to count its parts, and compare the counts."""
    if data_set.name not in _COUNTERS:
        return Finding(data_set.name, "good", f"{len(data_set.files)} files")
    try:
        counts = _COUNTERS[data_set.name](root)
    except MissingDataError as error:
        return Finding(data_set.name, "missing", str(error))
    except DamagedDataError as error:
        return Finding(data_set.name, "damaged", str(error), wrong=error.paths)
    folder = root / data_set.name
    for what, expected in data_set.counts.items():
        if counts.get(what) != expected:
            detail = f"{folder} has {counts.get(what, 0):,} {what} instead of {expected:,}"
            blamed = form_in(root).paths if data_set.name == "tiny-imagenet" else (folder,)
            return Finding(data_set.name, "damaged", detail, wrong=blamed)
    detail = ", ".join(f"{count:,} {what}" for what, count in counts.items())
    return Finding(data_set.name, "good", detail)


def _count_mnist(root: Path) -> Counts:
    images = mnist(root)
    _check_labels(root / "mnist", images.train.labels.max().item(), len(images.names))
    _check_labels(root / "mnist", images.test.labels.max().item(), len(images.names))
    return {
        "training images": len(images.train.images),
        "test images": len(images.test.images),
        "classes": len(images.names),
    }


def _count_tokens(load: Callable[[Path], Corpus]) -> Callable[[Path], Counts]:
    def count(root: Path) -> Counts:
        corpus = load(root)
        return {
            "training tokens": len(corpus.train),
            "validation tokens": len(corpus.valid),
            "test tokens": len(corpus.test),
            "words": len(corpus.words),
        }

    return count


def _count_documents(root: Path) -> Counts:
    documents = python_docs(root)
    return {
        "training files": len(documents.train),
        "validation files": len(documents.valid),
        "test files": len(documents.test),
    }


def _count_intents(load: Callable[[Path], IntentSet]) -> Callable[[Path], Counts]:
    def count(root: Path) -> Counts:
        intents = load(root)
        counts = {
            "training sentences": len(intents.train.texts),
            "validation sentences": len(intents.valid.texts),
            "test sentences": len(intents.test.texts),
            "out-of-scope sentences": sum(map(len, intents.out_of_scope.values())),
            "intents": len(intents.names),
            "domains": len(intents.domains),
        }
        return {what: count for what, count in counts.items() if count}

    return count


def _count_tiny_imagenet(root: Path) -> Counts:
    form = form_in(root)
    form.verify()
    train, val = ([form.count(split, wnid) for wnid in form.wnids] for split in SPLITS)
    for counts in (train, val):
        if len(set(counts)) > 1:
            fewest = form.wnids[counts.index(min(counts))]
            raise DamagedDataError(f"{form.paths[0]} has too few images of {fewest}", form.paths)
    return {
        "training images": sum(train),
        "validation images": sum(val),
        "classes": len(form.wnids),
    }


def _count_imagenet(root: Path) -> Counts:
    folder = imagenet(root)
    for path in (*folder.train.paths, *folder.test.paths):
        if not Path(path).stat().st_size:
            raise DamagedDataError(f"{path} is empty", (Path(path),))
    return {
        "training images": len(folder.train.paths),
        "validation images": len(folder.test.paths),
        "classes": len(folder.wnids),
    }


def _check_labels(folder: Path, largest: float, classes: int) -> None:
    if largest >= classes:
        raise DamagedDataError(f"{folder} has the label {largest:.0f}", (folder,))


_COUNTERS: Mapping[str, Callable[[Path], Counts]] = {
    "mnist": _count_mnist,
    "ptb": _count_tokens(ptb),
    "wikitext-2": _count_tokens(wikitext_2),
    "python-docs": _count_documents,
    "clinc150": _count_intents(clinc150),
    "banking77": _count_intents(banking77),
    "tiny-imagenet": _count_tiny_imagenet,
    "imagenet": _count_imagenet,
}
