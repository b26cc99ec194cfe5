"""One random choice of the known intents: sentences, their keys, and how they are used.

Labels are numbered so that known intents come first. Examples of new intents are drawn from the
training sentences: the first n of one random order, so that those for few shots are among those for
more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from experiments import data
from experiments.experiment import Context
from mbpa.encoders import text

CORPORA: Mapping[str, tuple[float, Callable[..., data.IntentSet]]] = {
    "clinc150": (100 / 150, data.clinc150),
    "banking77": (50 / 77, data.banking77),
}
"""Share of the intents that is known, and the reader, by corpus."""
HELD_OUT_SENTENCES = 20
"""Training sentences per intent used for validation where a corpus publishes none for it."""

Part = Literal["test", "validation"]


@dataclass(frozen=True, eq=False)
class Sentences:
    """Sentences, their keys and their labels."""

    texts: tuple[str, ...]
    keys: Float[Tensor, "N D"]
    labels: Int[Tensor, "N"]

    def __len__(self) -> int:
        return len(self.texts)

    def select(self, rows: Int[Tensor, "M"]) -> Sentences:
        """Return the sentences at `rows`, in this order."""
        texts = tuple(self.texts[row] for row in rows.tolist())
        return Sentences(texts, self.keys[rows], self.labels[rows])

    def __add__(self, more: Sentences) -> Sentences:
        return Sentences(
            self.texts + more.texts,
            torch.cat([self.keys, more.keys]),
            torch.cat([self.labels, more.labels]),
        )


@dataclass(frozen=True, eq=False)
class IntentTask:
    """One split of one corpus, with the part to score; the other part is not included."""

    corpus: str
    names: tuple[str, ...]
    """Names of the intents, by label."""
    old: int
    """Number of intents known from the start; their labels are below this."""
    known: Sentences
    """All training sentences of the known intents."""
    new: Sentences
    """Training sentences of the new intents, in the order in which examples are drawn."""
    scored: Sentences
    outside: Sentences
    """Out-of-scope sentences of the part to score, with label −1; empty if the corpus has none."""

    def examples(self, shots: int, skipped: int = 0) -> Sentences:
        """Return `shots` examples of each new intent, after the first `skipped`."""
        rows = []
        for label in range(self.old, len(self.names)):
            found = (self.new.labels == label).nonzero()[:, 0][skipped : skipped + shots]
            if len(found) < shots:
                raise ValueError(
                    f"shots must be at most the sentences of {self.names[label]!r}, "
                    f"{skipped + len(found)} of them, got {skipped + shots}"
                )
            rows.append(found)
        return self.new.select(torch.cat(rows))


@dataclass(frozen=True)
class Size:
    """Maximum amount of a corpus to use."""

    intents: int = 1000
    """Number of intents."""
    sentences: int = 1000
    """Training sentences per intent."""
    scored: int = 1000
    """Sentences to score per intent."""

    def __post_init__(self) -> None:
        if self.intents < 4 or min(self.sentences, self.scored) < 1:
            raise ValueError(
                f"intents must be at least 4, sentences and scored at least 1, got {self}"
            )


@dataclass(frozen=True, eq=False)
class EmbeddedCorpus:
    """A corpus with the keys of its sentences, ready for any split."""

    name: str
    names: tuple[str, ...]
    train: Sentences
    scored: Sentences
    outside: Sentences


def require_corpora(names: Iterable[str], context: Context) -> None:
    """Raise `data.DataError` if a corpus is missing or damaged, before anything that takes long."""
    for name in names:
        CORPORA[name][1](context.data_dir)


def embed_corpus(
    name: str, part: Part, size: Size, encoder: text.TextEncoder, context: Context
) -> EmbeddedCorpus:
    """Read a corpus and embed its sentences, with one part to score; the other part is not used.

    Training sentences that also occur, word for word, among the sentences to score are removed.
    """
    _, reader = CORPORA[name]
    found = _shrink(reader(context.data_dir), size)
    train, scored, outside = _select_parts(found, part, size.scored)
    seen = set(scored.texts)
    fresh = [row for row, text in enumerate(train.texts) if text not in seen]
    train = _select_rows(train, torch.tensor(fresh))
    total = len(train.texts) + len(scored.texts) + len(outside)
    with context.bar(total, f"{name}: keys", "sentences") as bar:

        def embed(texts: tuple[str, ...], labels: Int[Tensor, "N"]) -> Sentences:
            keys = text.embed_items(encoder, texts, context.cache, tick=bar.update)
            return Sentences(texts, keys.to(context.device), labels.to(context.device))

        return EmbeddedCorpus(
            name,
            found.names,
            embed(train.texts, train.labels),
            embed(scored.texts, scored.labels),
            embed(outside, torch.full((len(outside),), -1)),
        )


def make_intent_task(corpus: EmbeddedCorpus, split: int) -> IntentTask:
    """Choose the known intents of this split, and the order in which examples are drawn."""
    draws = torch.Generator().manual_seed(split + 1)
    order = torch.randperm(len(corpus.names), generator=draws)
    old = round(len(corpus.names) * CORPORA[corpus.name][0])
    return divide_corpus(corpus, order, old, draws)


def divide_corpus(
    corpus: EmbeddedCorpus,
    order: Int[Tensor, "C"],
    old: int,
    draws: torch.Generator,
    left_out: int = 0,
) -> IntentTask:
    """Return the task in which the first intents of an order are known, and the next ones new.

    Args:
        order: numbers of the intents; those that are not in it do not take part.
        old: how many are known.
        draws: decides the order in which examples are drawn.
        left_out: how many of the last intents are neither known nor taught. What would be scored
            of them is out of scope.
    """
    device = corpus.train.labels.device
    place = torch.full((len(corpus.names),), len(corpus.names))
    place[order] = torch.arange(len(order))
    place = place.to(device)
    taught = len(order) - left_out
    shuffled = torch.randperm(len(corpus.train), generator=draws).to(device)
    train = _renumber(corpus.train.select(shuffled), place)
    scored = _renumber(corpus.scored, place)
    outside = scored.select(
        ((scored.labels >= taught) & (scored.labels < len(order))).nonzero()[:, 0]
    )
    return IntentTask(
        corpus=corpus.name,
        names=tuple(corpus.names[number] for number in order[:taught].tolist()),
        old=old,
        known=train.select((train.labels < old).nonzero()[:, 0]),
        new=train.select(((train.labels >= old) & (train.labels < taught)).nonzero()[:, 0]),
        scored=scored.select((scored.labels < taught).nonzero()[:, 0]),
        outside=corpus.outside
        + Sentences(outside.texts, outside.keys, torch.full_like(outside.labels, -1)),
    )


def _renumber(sentences: Sentences, place: Int[Tensor, "C"]) -> Sentences:
    return Sentences(sentences.texts, sentences.keys, place[sentences.labels])


def _shrink(found: data.IntentSet, size: Size) -> data.IntentSet:
    """Keep some random intents, the same in every split, and their first sentences."""
    draws = torch.Generator().manual_seed(0)
    chosen = torch.randperm(len(found.names), generator=draws)[: size.intents].sort().values
    place = torch.full((len(found.names),), -1)
    place[chosen] = torch.arange(len(chosen))

    def some(part: data.LabelledTexts, most: int) -> data.LabelledTexts:
        rows = [(part.labels == label).nonzero()[:, 0][:most] for label in chosen.tolist()]
        taken = _select_rows(part, torch.cat(rows).sort().values)
        return data.LabelledTexts(taken.texts, place[taken.labels])

    return data.IntentSet(
        some(found.train, size.sentences),
        some(found.valid, size.scored),
        some(found.test, size.scored),
        tuple(found.names[number] for number in chosen.tolist()),
        {part: texts[: size.scored * len(chosen)] for part, texts in found.out_of_scope.items()},
    )


def _select_parts(
    found: data.IntentSet, part: Part, scored: int
) -> tuple[data.LabelledTexts, data.LabelledTexts, tuple[str, ...]]:
    """Return the sentences to train on, those to score, and out-of-scope ones to score."""
    if part == "test":
        return found.train, found.test, found.out_of_scope.get("test", ())
    outside = found.out_of_scope.get("valid", ())
    if found.valid.texts:
        return found.train, found.valid, outside
    kept, held = _hold_out(found.train.labels, scored)
    return _select_rows(found.train, kept), _select_rows(found.train, held), outside


def _hold_out(labels: Int[Tensor, "N"], most: int) -> tuple[Int[Tensor, "K"], Int[Tensor, "H"]]:
    """Return rows to train on, and at most half of each intent's rows for validation."""
    draws = torch.Generator().manual_seed(0)
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique().tolist():
        rows = (labels == label).nonzero()[:, 0]
        some = torch.randperm(len(rows), generator=draws)[
            : min(most, HELD_OUT_SENTENCES, len(rows) // 2)
        ]
        held[rows[some]] = True
    return (~held).nonzero()[:, 0], held.nonzero()[:, 0]


def _select_rows(sentences: data.LabelledTexts, rows: Int[Tensor, "M"]) -> data.LabelledTexts:
    texts = tuple(sentences.texts[row] for row in rows.tolist())
    return data.LabelledTexts(texts, sentences.labels[rows])
