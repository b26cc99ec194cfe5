"""A second sentence encoder, of another kind: the mean of word vectors (WordLlama).

Its vectors are the token embeddings of a language model, trained further for similarity and reduced
to 256 numbers (https://github.com/dleemiller/WordLlama). The package contains them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.resources
import importlib.util
from collections.abc import Sequence

import torch
from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from mbpa.encoders import text
from mbpa.errors import MissingExtraError

PACKAGE = "wordllama"
TOKENIZER = "tokenizers/l2_supercat_tokenizer_config.json"
WEIGHTS = "weights/l2_supercat_256.safetensors"


class WordVectors(text.TextEncoder):
    """The model that the package `wordllama` contains; nothing is downloaded.

    Raises:
        MissingExtraError: the package is not installed.
    """

    key_dim = 256

    def __init__(self) -> None:
        require_word_vectors()
        self.name = f"{PACKAGE} {importlib.metadata.version(PACKAGE)}"
        folder = importlib.resources.files(PACKAGE)
        tokenizers = importlib.import_module("tokenizers")
        self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER))
        self._tokenizer.no_padding()
        self._vectors = load_file(str(folder / WEIGHTS))["embedding.weight"].float()

    def __call__(self, texts: Sequence[str], /) -> Float[Tensor, "B D"]:
        found = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        keys = torch.zeros(len(texts), self.key_dim)
        for row, tokens in enumerate(found):
            if tokens.ids:
                keys[row] = self._vectors[tokens.ids].mean(0)
        return functional.normalize(keys, dim=1)


def require_word_vectors() -> None:
    """Check that the package is installed, without importing it."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise MissingExtraError(PACKAGE, extra="peers")
