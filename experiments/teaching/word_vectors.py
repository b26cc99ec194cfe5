"""A second sentence encoder, of another kind: the mean of word vectors (WordLlama).

Its vectors are the token embeddings of a language model, trained further for similarity and reduced
to 256 numbers (https://github.com/dleemiller/WordLlama). The package contains them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from mbpa.encoders import text
from mbpa.errors import MissingExtraError

PACKAGE = "wordllama"


class WordVectors(text.TextEncoder):
    """The model that the package `wordllama` contains; nothing is downloaded.

    Raises:
        MissingExtraError: the package is not installed.
    """

    key_dim = 256

    def __init__(self) -> None:
        require_word_vectors()
        self.name = f"{PACKAGE} {importlib.metadata.version(PACKAGE)}"
        library = importlib.import_module(PACKAGE)
        self._model = library.WordLlama.load(dim=self.key_dim, disable_download=True)

    def __call__(self, texts: Sequence[str], /) -> Float[Tensor, "B D"]:
        if not texts:
            return torch.empty(0, self.key_dim)
        found = torch.from_numpy(self._model.embed(list(texts))).float()
        return functional.normalize(found, dim=1)


def require_word_vectors() -> None:
    """Check that the package is installed, without importing it."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise MissingExtraError(PACKAGE, extra="peers")
