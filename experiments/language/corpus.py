"""The text of a run: a published corpus or the user's own, whole or its beginning.

A published corpus that is used whole keeps its vocabulary. Otherwise the vocabulary consists of the
words of the training text, the most frequent ones if there are too many; all others are `UNKNOWN`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from experiments import data
from experiments.data import END_OF_LINE, Corpus
from experiments.errors import ExperimentError
from experiments.experiment import Context
from experiments.language.config import LanguageConfig

UNKNOWN = "<unk>"
PARTS = "train", "valid", "test"
# Minimum tokens per text. All are predicted, the first one after the end of a line; only the
# learning curve omits the first token of the validation text.
MIN_TOKENS = {"train": 20, "valid": 2, "test": 2}


def read_corpus(config: LanguageConfig, context: Context) -> Corpus:
    """Read the text that the settings select.

    Raises:
        DataError: a published corpus is missing or damaged.
        ExperimentError: the text cannot be used.
    """
    if config.corpus == "own":
        files = {name: getattr(config, name) for name in PARTS}
        sources = {name: f"--{name} {path}" for name, path in files.items()}
        texts = {
            name: _read_words(sources[name], files[name], _most(config, name)) for name in PARTS
        }
        return _number_words(texts, sources, config.vocabulary)
    data.require(config.corpus, context.data_dir)
    read = data.ptb if config.corpus == "ptb" else data.wikitext_2
    corpus = read(context.data_dir)
    cut = {name: getattr(corpus, name)[: _most(config, name)] for name in PARTS}
    if not config.tokens:
        return replace(corpus, **cut)
    texts = {name: [corpus.words[number] for number in cut[name].tolist()] for name in PARTS}
    sources = {name: f"the beginning of {config.corpus}, {name}," for name in PARTS}
    return _number_words(texts, sources, config.vocabulary)


def frequencies(corpus: Corpus) -> Int[Tensor, "V"]:
    """Return how often each word occurs in the training text."""
    return corpus.train.bincount(minlength=len(corpus.words))


def _most(config: LanguageConfig, name: str) -> int | None:
    """Return the number of tokens of this part to use, or `None` for all."""
    return (config.tokens if name == "train" else config.scored_tokens) or None


def _number_words(texts: dict[str, list[str]], sources: dict[str, str], most: int) -> Corpus:
    """Convert the texts to word ids, with the vocabulary of the training text.

    Args:
        sources: names of the texts in error messages.
        most: maximum number of words.
    """
    for name, text in texts.items():
        if all(word == END_OF_LINE for word in text):
            raise ExperimentError(f"{sources[name]} is empty: it must contain words")
        if len(text) < MIN_TOKENS[name]:
            raise ExperimentError(
                f"{sources[name]} must have at least {MIN_TOKENS[name]} tokens, "
                f"with one for the end of each line, got {len(text)}"
            )
    if set(texts["train"]) <= {END_OF_LINE, UNKNOWN}:
        raise ExperimentError(f"{sources['train']} must contain words other than {UNKNOWN}")
    words = _vocabulary(texts["train"], most)
    if not set(words) - {END_OF_LINE, UNKNOWN}:
        raise ExperimentError(
            f"{sources['train']} is too short to learn from: no word occurs twice"
        )
    known = set(words) - {END_OF_LINE, UNKNOWN}
    for name, text in texts.items():
        if known.isdisjoint(text):
            raise ExperimentError(
                f"{sources[name]} contains none of the {len(known)} words of {sources['train']}: "
                "both must have the same language and spelling"
            )
    numbers = {word: number for number, word in enumerate(words)}
    unknown = numbers[UNKNOWN]
    parts = {
        name: torch.tensor([numbers.get(word, unknown) for word in text], dtype=torch.int64)
        for name, text in texts.items()
    }
    return Corpus(**parts, words=words)


def _vocabulary(text: Sequence[str], most: int) -> tuple[str, ...]:
    """Return the most frequent words, in the order of their first occurrence, with `END_OF_LINE`
    and `UNKNOWN`.

    If all words would be known, those that occur once become unknown: a network that has never seen
    an unknown word cannot tell how probable the next one is.
    """
    counts = Counter(text)  # in order of first occurrence, which breaks ties
    ranked = [word for word, _ in counts.most_common() if word not in (END_OF_LINE, UNKNOWN)]
    known = set(ranked[:most])
    if len(known) == len(ranked) and UNKNOWN not in counts:
        known = {word for word in ranked if counts[word] > 1}
    known.add(END_OF_LINE)
    words = dict.fromkeys(word if word in known else UNKNOWN for word in counts)
    return tuple(words | dict.fromkeys((END_OF_LINE, UNKNOWN)))


def _read_words(source: str, path: Path, most: int | None) -> list[str]:
    """Read the first words of a file, every line ended by `END_OF_LINE`."""
    words: list[str] = []
    for line in _lines(source, path):
        words += (*line.split(), END_OF_LINE)
        if most and len(words) >= most:
            return words[:most]
    return words


def _lines(source: str, path: Path) -> Iterator[str]:
    try:
        with path.expanduser().open(encoding="utf-8-sig", newline="\n") as file:
            yield from file
    except UnicodeDecodeError as error:
        raise ExperimentError(f"{source} is not UTF-8 text ({error.reason})") from error
    except OSError as error:
        raise ExperimentError(f"{source} cannot be read: {error.strerror or error}") from error
