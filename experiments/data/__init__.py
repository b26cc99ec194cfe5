"""Data sets: their sources, download and verification, and one loader per data set.

A data directory (`data_dir`) holds one directory per data set. Loaders take it as an argument or
find it themselves, and return tensors. If data is missing, they raise `MissingDataError`, whose
message says what to do.
"""

from experiments.data.download import Fetched, Patience, fetch
from experiments.data.integrity import Finding, check, is_present, require
from experiments.data.pictures import ImageFiles, ImageFolder, imagenet
from experiments.data.read import (
    END_OF_LINE,
    Corpus,
    Documents,
    Images,
    ImageSet,
    IntentSet,
    LabelledTexts,
    banking77,
    clinc150,
    mnist,
    ptb,
    python_docs,
    read_wikitext_2,
    wikitext_2,
)
from experiments.data.sources import (
    SETS,
    Archive,
    DamagedDataError,
    DataError,
    DataSet,
    File,
    MissingDataError,
    data_dir,
)
from experiments.data.tiny_imagenet import pack_tiny_imagenet, tiny_imagenet

__all__ = [
    "END_OF_LINE",
    "SETS",
    "Archive",
    "Corpus",
    "DamagedDataError",
    "DataError",
    "DataSet",
    "Documents",
    "Fetched",
    "File",
    "Finding",
    "ImageFiles",
    "ImageFolder",
    "ImageSet",
    "Images",
    "IntentSet",
    "LabelledTexts",
    "MissingDataError",
    "Patience",
    "banking77",
    "check",
    "clinc150",
    "data_dir",
    "fetch",
    "imagenet",
    "is_present",
    "mnist",
    "pack_tiny_imagenet",
    "ptb",
    "python_docs",
    "read_wikitext_2",
    "require",
    "tiny_imagenet",
    "wikitext_2",
]
