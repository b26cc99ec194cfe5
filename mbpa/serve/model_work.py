"""The model's work for a request, cut into pieces small enough to be scheduled fairly.

Each text or picture is encoded as a piece of its own; queries are answered once all items of the
request have keys.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mbpa.serve.answers import Answer, Reason
from mbpa.serve.classifier import Classifier

# Rough work of encoding a text: the default encoder reads at most 256 tokens of about four bytes.
BYTES_PER_TOKEN, READ_BYTES, ITEM_TOKENS = 4, 1024, 2
LEAST_STEP, FIRST_STEP, MAX_STEP = 8, 64, 1024  # queries answered at once
QUERY_WEIGHT, EXPLAIN_WEIGHT = 4, 8  # tokens that could be encoded in the time of one query
SLOW = 4  # multiple of the time limit above which the step is halved


@dataclass(eq=False)
class Asked:
    """The queries of one request: texts, pictures or keys."""

    items: tuple[str | bytes, ...]
    rows: Float[np.ndarray, "B D"] | None = None
    top: int = 1
    threshold: float | None = None
    wants_reasons: bool = False
    encoded: list[Tensor] = field(default_factory=list)
    """Keys of the items encoded so far."""

    @property
    def size(self) -> int:
        return len(self.items) if self.rows is None else len(self.rows)

    def keys(self, start: int, stop: int) -> Float[Tensor, "B D"]:
        """Return the keys of these queries, which must have been encoded."""
        if self.rows is None:
            return torch.stack(self.encoded[start:stop])
        return torch.from_numpy(self.rows[start:stop])


@dataclass(frozen=True, eq=False)
class Piece:
    """A unit of work for one request: encode an item, then answer queries."""

    asked: Asked
    item: int | None = None
    """Index of the item to encode, if any."""
    start: int = 0
    stop: int = 0
    """The piece answers the queries from `start` up to, not including, `stop`; none if they are
    equal. All items of the request are encoded before these are answered."""

    @property
    def size(self) -> int:
        """Number of queries that the piece answers."""
        return self.stop - self.start

    @property
    def units(self) -> float:
        """Work of encoding, in units of about one token."""
        if self.item is None:
            return 0.0
        item = self.asked.items[self.item]
        if isinstance(item, bytes):
            return 1.0
        read = min(len(item.encode(errors="replace")), READ_BYTES)
        return ITEM_TOKENS + read / BYTES_PER_TOKEN


def weigh(piece: Piece) -> float:
    """Return the work of a piece, in units of about one token."""
    return piece.units + piece.size * (
        EXPLAIN_WEIGHT if piece.asked.wants_reasons else QUERY_WEIGHT
    )


class Step:
    """The number of queries answered at once, doubled when they are quick and halved when slow.

    Answering many at once costs far less per query than answering few, so the step does not follow
    the time closely: it is halved only when answers take `SLOW` times the limit.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s, self.count = limit_s, FIRST_STEP

    def measure(self, count: int, seconds: float) -> None:
        """Adjust the step after `count` queries took `seconds`; ignore less than half a step."""
        if 2 * count < self.count:
            return
        if seconds > SLOW * self._limit_s:
            self.count = max(LEAST_STEP, self.count // 2)
        elif seconds < self._limit_s:
            self.count = min(MAX_STEP, 2 * self.count)


class ModelWork:
    """Cuts requests into pieces and processes the pieces.

    Args:
        part_s: approximate limit in seconds on answering the queries of one piece; the answers to
            a request that would take longer are cut into several pieces.
    """

    def __init__(self, classifier: Classifier, part_s: float) -> None:
        self._classifier = classifier
        self._predicted, self._explained = Step(part_s), Step(part_s)

    def cut(self, asked: Asked) -> list[Piece]:
        """Cut a request into pieces.

        All queries are answered at once, from one state of the memory, unless that would take
        longer than a batch may. Each single query is always answered from one state.
        """
        step = (self._explained if asked.wants_reasons else self._predicted).count
        starts = range(0, asked.size, step)
        answers = [Piece(asked, None, at, min(at + step, asked.size)) for at in starts]
        encodings = [Piece(asked, place) for place in range(len(asked.items))]
        if encodings and len(answers) == 1:
            encodings[-1] = replace(encodings[-1], stop=asked.size)
            return encodings
        return encodings + answers

    def handle(self, batch: list[Piece]) -> list[Sequence[Answer | Reason]]:
        """Encode all items at once, then answer all queries at once. Runs in the model's thread."""
        self._encode([piece for piece in batch if piece.item is not None])
        results: list[Sequence[Answer | Reason]] = [() for _ in batch]
        plain = [i for i, each in enumerate(batch) if each.size and not each.asked.wants_reasons]
        for i, answers in zip(plain, self._predict([batch[i] for i in plain]), strict=True):
            results[i] = answers
        for i, piece in enumerate(batch):
            if piece.size and piece.asked.wants_reasons:
                results[i] = self._explain(piece)
        return results

    def _encode(self, pieces: Sequence[Piece]) -> None:
        if not pieces:
            return
        items = [piece.asked.items[piece.item] for piece in pieces if piece.item is not None]
        for piece, key in zip(pieces, self._classifier.encode(items).cpu(), strict=True):
            piece.asked.encoded.append(key)

    def _predict(self, pieces: Sequence[Piece]) -> list[list[Answer]]:
        if not pieces:
            return []
        start = time.perf_counter()
        keys = torch.cat([piece.asked.keys(piece.start, piece.stop) for piece in pieces])
        top = max(piece.asked.top for piece in pieces)
        answers = iter(self._classifier.predict(keys=keys, top=top))
        found = [
            [self._fit(answer, piece.asked) for answer in islice(answers, piece.size)]
            for piece in pieces
        ]
        self._predicted.measure(len(keys), time.perf_counter() - start)
        return found

    def _explain(self, piece: Piece) -> Sequence[Reason]:
        start, asked = time.perf_counter(), piece.asked
        keys = asked.keys(piece.start, piece.stop)
        reasons = self._classifier.explain(keys=keys, top=asked.top, threshold=asked.threshold)
        self._explained.measure(piece.size, time.perf_counter() - start)
        return reasons

    def _fit(self, answer: Answer, asked: Asked) -> Answer:
        """Apply the threshold and number of labels of a request to an answer of a batch."""
        threshold = asked.threshold
        if threshold is None:
            threshold = self._classifier.threshold
        best = answer.top[0][0] if answer.top else None
        label = best if answer.confidence >= threshold else None
        return Answer(label, answer.confidence, answer.top[: asked.top])
