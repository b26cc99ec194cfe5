"""The situations: which labels are known, which are taught, and what is out of scope.

None of them played a part in choosing the settings of any method, except for the sentences of
CLINC150 and Banking77 themselves, in other splits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from experiments import data
from experiments.experiment import Context
from experiments.intents.task import (
    EmbeddedCorpus,
    IntentTask,
    Sentences,
    Size,
    divide_corpus,
    embed_corpus,
)
from experiments.teaching.word_vectors import WordVectors, require_word_vectors
from mbpa.encoders import base, image, text
from mbpa.encoders.pictures import encode_file, import_pillow

NEW_DOMAINS = 3  # of the ten domains of CLINC150
WRONG_FRACTION = 0.1  # of the labels in a noisy situation
DIGITS = Size(intents=10, sentences=100, scored=200)
PHOTOGRAPHS = Size(intents=70, sentences=60, scored=50)

Roles = tuple[Int[Tensor, "C"], int, int]
"""An order of labels, the number of known ones at its start, and of those left out at its end."""


@dataclass(frozen=True)
class Situation:
    """A data set with keys, and the roles of its labels."""

    title: str
    about: str
    """One sentence for the report."""
    read: Callable[[Size, Context], EmbeddedCorpus]
    assign: Callable[[EmbeddedCorpus, torch.Generator, Context], Roles]
    wrong_fraction: float = 0.0
    """Fraction of the examples, both known and taught, that have another label of their kind."""
    uses_word_vectors: bool = False
    in_lessons: bool = False
    """Whether labels are also taught one after another."""

    def require(self) -> None:
        """Raise `MissingExtraError` if its encoder is not installed."""
        if self.uses_word_vectors:
            require_word_vectors()

    def make_task(
        self, name: str, corpus: EmbeddedCorpus, seed: int, context: Context
    ) -> IntentTask:
        """Assign the roles of this seed."""
        draws = torch.Generator().manual_seed(seed + 1)
        order, old, left_out = self.assign(corpus, draws, context)
        task = replace(divide_corpus(corpus, order, old, draws, left_out), corpus=name)
        if not self.wrong_fraction:
            return task
        return replace(
            task,
            known=mislabel(task.known, range(old), self.wrong_fraction, draws),
            new=mislabel(task.new, range(old, len(task.names)), self.wrong_fraction, draws),
        )


def mislabel(
    sentences: Sentences, labels: range, fraction: float, draws: torch.Generator
) -> Sentences:
    """Give a random fraction of sentences another one of these labels."""
    is_wrong = torch.rand(len(sentences), generator=draws) < fraction
    shift = torch.randint(1, len(labels), (len(sentences),), generator=draws) * is_wrong
    shifted = sentences.labels - labels.start + shift.to(sentences.labels.device)
    return Sentences(sentences.texts, sentences.keys, labels.start + shifted % len(labels))


# Data


def _read_sentences(
    name: str, make_encoder: Callable[[], text.TextEncoder], size: Size, context: Context
) -> EmbeddedCorpus:
    return embed_corpus(name, "test", size, make_encoder(), context)


def _read_both_corpora(size: Size, context: Context) -> EmbeddedCorpus:
    """Return Banking77 followed by CLINC150; an intent of the same name in both is two labels."""
    known, new = (
        _read_sentences(name, text.encoder, size, context) for name in ("banking77", "clinc150")
    )
    first = len(known.names)

    def shift(sentences: Sentences) -> Sentences:
        return replace(sentences, labels=sentences.labels + first)

    return EmbeddedCorpus(
        "banking77 and clinc150",
        tuple(f"{corpus.name}: {name}" for corpus in (known, new) for name in corpus.names),
        known.train + shift(new.train),
        known.scored + shift(new.scored),
        new.outside,
    )


def _read_digits(size: Size, context: Context) -> EmbeddedCorpus:
    return _embed_pictures("digits", data.mnist(context.data_dir), _least(size, DIGITS), context)


def _read_photographs(size: Size, context: Context) -> EmbeddedCorpus:
    size = _least(size, PHOTOGRAPHS)
    chosen = torch.randperm(200, generator=torch.Generator().manual_seed(0))[: size.intents]
    found = data.tiny_imagenet(context.data_dir, classes=chosen.sort().values.tolist())
    return _embed_pictures("tiny-imagenet", found, size, context)


def _least(one: Size, other: Size) -> Size:
    return Size(
        min(one.intents, other.intents),
        min(one.sentences, other.sentences),
        min(one.scored, other.scored),
    )


def _embed_pictures(
    name: str, found: data.ImageSet, size: Size, context: Context
) -> EmbeddedCorpus:
    """Return the first pictures of each class with the keys of the image encoder."""
    classes = found.train.labels.unique()[: size.intents]
    encoder = image.encoder(device=context.device)

    def embed(part: data.Images, most: int, kind: str) -> Sentences:
        rows = torch.cat([(part.labels == label).nonzero()[:, 0][:most] for label in classes])
        files = [_encode_picture(part.images[row]) for row in rows.tolist()]
        with context.bar(len(files), f"{name}: keys", "pictures") as bar:
            keys = base.embed_items(encoder, files, context.cache, tick=bar.update)
        labels = torch.searchsorted(classes, part.labels[rows])
        texts = tuple(f"{kind} picture {row}" for row in rows.tolist())
        return Sentences(texts, keys.to(context.device), labels.to(context.device))

    train = embed(found.train, size.sentences, "training")
    return EmbeddedCorpus(
        name,
        tuple(found.names[label] for label in classes.tolist()),
        train,
        embed(found.test, size.scored, "test"),
        train.select(torch.arange(0)),
    )


def _encode_picture(pixels: UInt8[Tensor, "..."]) -> bytes:
    """Return a picture file; grey pictures get three equal channels."""
    pixels = pixels.expand(3, *pixels.shape) if pixels.ndim == 2 else pixels
    content = np.ascontiguousarray(pixels.movedim(0, 2).numpy())
    return encode_file(import_pillow().fromarray(content))


# Roles of labels


def _split_randomly(
    corpus: EmbeddedCorpus, draws: torch.Generator, _: Context, *, old: float, left_out: float = 0.0
) -> Roles:
    """Assign random roles; `old` and `left_out` are fractions of the labels."""
    count = len(corpus.names)
    order = torch.randperm(count, generator=draws)
    return order, round(old * count), round(left_out * count)


def _split_by_domain(corpus: EmbeddedCorpus, draws: torch.Generator, context: Context) -> Roles:
    domains = sorted(data.clinc150(context.data_dir).domains.items())
    new = torch.randperm(len(domains), generator=draws)[:NEW_DOMAINS].tolist()
    taught = {intent for number in new for intent in domains[number][1]}
    order = torch.randperm(len(corpus.names), generator=draws).tolist()
    order.sort(key=lambda label: corpus.names[label] in taught)
    return torch.tensor(order), sum(name not in taught for name in corpus.names), 0


def _split_by_corpus(corpus: EmbeddedCorpus, _: torch.Generator, __: Context) -> Roles:
    old = sum(name.startswith("banking77: ") for name in corpus.names)
    return torch.arange(len(corpus.names)), old, 0


_clinc150 = partial(_read_sentences, "clinc150", text.encoder)
_banking77 = partial(_read_sentences, "banking77", text.encoder)
_two_thirds = partial(_split_randomly, old=100 / 150)
_left_out = partial(_split_randomly, old=45 / 77, left_out=8 / 77)

SITUATIONS: dict[str, Situation] = {
    "clinc150": Situation(
        "CLINC150",
        "two thirds of the intents are known, in splits that are new",
        _clinc150,
        _two_thirds,
        in_lessons=True,
    ),
    "banking77": Situation(
        "Banking77",
        "45 intents are known, 24 new, and 8 left out, which are out of scope",
        _banking77,
        _left_out,
    ),
    "clinc150-domains": Situation(
        "CLINC150, new domains",
        f"all intents of {NEW_DOMAINS} of the ten domains are new, so nothing like them is known",
        _clinc150,
        _split_by_domain,
    ),
    "banking77-to-clinc150": Situation(
        "Banking77 → CLINC150",
        "Banking77 is known, and all of CLINC150 is new (its banking intents resemble known ones)",
        _read_both_corpora,
        _split_by_corpus,
    ),
    "clinc150-noisy": Situation(
        "CLINC150, noisy",
        "as CLINC150, but one in ten examples has a wrong label: known ones that of another known "
        "intent, taught ones that of another new intent",
        _clinc150,
        _two_thirds,
        wrong_fraction=WRONG_FRACTION,
    ),
    "banking77-noisy": Situation(
        "Banking77, noisy",
        "as Banking77, with wrong labels likewise",
        _banking77,
        _left_out,
        wrong_fraction=WRONG_FRACTION,
    ),
    "digits": Situation(
        "digits",
        "MNIST, 100 training pictures of each digit: 6 are known, 3 new, 1 out of scope",
        _read_digits,
        partial(_split_randomly, old=0.6, left_out=0.1),
    ),
    "tiny-imagenet": Situation(
        "Tiny ImageNet",
        "70 classes of Tiny ImageNet, 60 training pictures each: 40 known, 20 new, 10 out of scope",
        _read_photographs,
        partial(_split_randomly, old=4 / 7, left_out=1 / 7),
    ),
    "clinc150-wordllama": Situation(
        "CLINC150, WordLlama",
        "as CLINC150, with the mean of word vectors as keys",
        partial(_read_sentences, "clinc150", WordVectors),
        _two_thirds,
        uses_word_vectors=True,
    ),
    "banking77-wordllama": Situation(
        "Banking77, WordLlama",
        "as Banking77, with the mean of word vectors as keys",
        partial(_read_sentences, "banking77", WordVectors),
        _left_out,
        uses_word_vectors=True,
    ),
}
"""Situations by their names in records."""
