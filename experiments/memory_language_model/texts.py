"""The texts of the experiment as token ids: one sequence per document."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from experiments.data.read import python_docs, read_wikitext_2

CORPORA = ("wikitext-2", "python-docs")
SPLITS = ("train", "valid", "test")


@dataclass(frozen=True, eq=False)
class Text:
    """The tokens of one split, document after document."""

    ids: Int[Tensor, "N"]
    lengths: tuple[int, ...]
    """Number of tokens of each document."""

    def cut(self, tokens: int) -> Text:
        """Return the first documents, the last one cut, with at most this many tokens; 0: all."""
        if not tokens or tokens >= len(self.ids):
            return self
        lengths, left = [], tokens
        for length in self.lengths:
            lengths.append(min(length, left))
            left -= lengths[-1]
            if not left:
                break
        return Text(self.ids[:tokens], tuple(lengths))


def read_documents(corpus: str, split: str, directory: Path | None) -> list[str]:
    """Read the documents of one split: WikiText-2 as one text, the documentation by file.

    Raises:
        DataError: the file is missing or damaged.
    """
    if corpus == "wikitext-2":
        return [read_wikitext_2(split, directory)]
    documents: dict[str, str] = getattr(python_docs(directory), split)
    return list(documents.values())


def read_text(
    corpus: str, split: str, tokenizer: Any, directory: Path | None, cache: Path, tokens: int
) -> Text:
    """Return the first tokens of a split; the ids of the whole split are kept in the cache.

    Args:
        corpus: one of `CORPORA`.
        split: one of `SPLITS`.
        tokenizer: a tokenizer of transformers; called only if the cache lacks the ids.
        directory: folder of the data sets.
        cache: folder for token ids.
        tokens: maximum number of tokens; 0 for all.
    """
    path = cache / f"{corpus}-{split}.npz"
    if not path.exists():
        documents = read_documents(corpus, split, directory)
        ids = [
            tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            for text in documents
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(
            path,
            ids=np.concatenate([np.asarray(each, dtype=np.int32) for each in ids]),
            lengths=np.array([len(each) for each in ids]),
        )
    with np.load(path) as kept:
        whole = torch.from_numpy(kept["ids"].astype(np.int64))
        return Text(whole, tuple(map(int, kept["lengths"]))).cut(tokens)
