"""The model's work for a request, cut into chunks small enough to be scheduled fairly.

Each text or picture is encoded as a chunk of its own; queries are answered once all items of the
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
BYTES_PER_TOKEN, MAX_READ_BYTES, TOKENS_PER_ITEM = 4, 1024, 2
MIN_QUERIES_AT_ONCE, FIRST_QUERIES_AT_ONCE, MAX_QUERIES_AT_ONCE = 8, 64, 1024
# Tokens that could be encoded in the time of one query.
QUERY_WEIGHT_TOKENS, EXPLAIN_WEIGHT_TOKENS = 4, 8
SLOW_FACTOR = 4  # multiple of the time limit above which fewer queries are answered at once


@dataclass(eq=False)
class ModelRequest:
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
class Chunk:
    """A unit of work for one request: encode an item, then answer queries."""

    request: ModelRequest
    item: int | None = None
    """Index of the item to encode, if any."""
    start: int = 0
    stop: int = 0
    """The chunk answers the queries from `start` up to, not including, `stop`; none if they are
    equal. All items of the request are encoded before these are answered."""

    @property
    def size(self) -> int:
        """Number of queries that the chunk answers."""
        return self.stop - self.start

    @property
    def units(self) -> float:
        """Work of encoding, in units of about one token."""
        if self.item is None:
            return 0.0
        item = self.request.items[self.item]
        if isinstance(item, bytes):
            return 1.0
        read = min(len(item.encode(errors="replace")), MAX_READ_BYTES)
        return TOKENS_PER_ITEM + read / BYTES_PER_TOKEN


def weigh(chunk: Chunk) -> float:
    """Return the work of a chunk, in units of about one token."""
    return chunk.units + chunk.size * (
        EXPLAIN_WEIGHT_TOKENS if chunk.request.wants_reasons else QUERY_WEIGHT_TOKENS
    )


class AnswerBatchSize:
    """The number of queries answered at once, doubled when they are quick and halved when slow.

    Answering many at once costs far less per query than answering few, so the number does not
    follow the time closely: it is halved only when answers take `SLOW_FACTOR` times the limit.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s, self.count = limit_s, FIRST_QUERIES_AT_ONCE

    def measure(self, count: int, seconds: float) -> None:
        """Adjust the number after `count` queries took `seconds`; ignore less than half of it."""
        if 2 * count < self.count:
            return
        if seconds > SLOW_FACTOR * self._limit_s:
            self.count = max(MIN_QUERIES_AT_ONCE, self.count // 2)
        elif seconds < self._limit_s:
            self.count = min(MAX_QUERIES_AT_ONCE, 2 * self.count)


class ModelWork:
    """Cuts requests into chunks and processes the chunks.

    Args:
        part_s: approximate limit in seconds on answering the queries of one chunk; the answers to
            a request that would take longer are cut into several chunks.
    """

    def __init__(self, classifier: Classifier, part_s: float) -> None:
        self._classifier = classifier
        self._predicting, self._explaining = AnswerBatchSize(part_s), AnswerBatchSize(part_s)

    def split_request(self, request: ModelRequest) -> list[Chunk]:
        """Cut a request into chunks.

        All queries are answered at once, from one state of the memory, unless that would take
        longer than a batch may. Each single query is always answered from one state.
        """
        step = (self._explaining if request.wants_reasons else self._predicting).count
        starts = range(0, request.size, step)
        answers = [Chunk(request, None, at, min(at + step, request.size)) for at in starts]
        encodings = [Chunk(request, place) for place in range(len(request.items))]
        if encodings and len(answers) == 1:
            encodings[-1] = replace(encodings[-1], stop=request.size)
            return encodings
        return encodings + answers

    def handle(self, batch: list[Chunk]) -> list[Sequence[Answer | Reason]]:
        """Encode all items at once, then answer all queries at once. Runs in the model's thread."""
        self._encode([chunk for chunk in batch if chunk.item is not None])
        results: list[Sequence[Answer | Reason]] = [() for _ in batch]
        plain = [i for i, each in enumerate(batch) if each.size and not each.request.wants_reasons]
        for i, answers in zip(plain, self._predict([batch[i] for i in plain]), strict=True):
            results[i] = answers
        for i, chunk in enumerate(batch):
            if chunk.size and chunk.request.wants_reasons:
                results[i] = self._explain(chunk)
        return results

    def _encode(self, chunks: Sequence[Chunk]) -> None:
        if not chunks:
            return
        items = [chunk.request.items[chunk.item] for chunk in chunks if chunk.item is not None]
        for chunk, key in zip(chunks, self._classifier.encode(items).cpu(), strict=True):
            chunk.request.encoded.append(key)

    def _predict(self, chunks: Sequence[Chunk]) -> list[list[Answer]]:
        if not chunks:
            return []
        start = time.perf_counter()
        keys = torch.cat([chunk.request.keys(chunk.start, chunk.stop) for chunk in chunks])
        top = max(chunk.request.top for chunk in chunks)
        answers = iter(self._classifier.predict(keys=keys, top=top))
        found = [
            [self._apply_options(answer, chunk.request) for answer in islice(answers, chunk.size)]
            for chunk in chunks
        ]
        self._predicting.measure(len(keys), time.perf_counter() - start)
        return found

    def _explain(self, chunk: Chunk) -> Sequence[Reason]:
        start, request = time.perf_counter(), chunk.request
        keys = request.keys(chunk.start, chunk.stop)
        reasons = self._classifier.explain(keys=keys, top=request.top, threshold=request.threshold)
        self._explaining.measure(chunk.size, time.perf_counter() - start)
        return reasons

    def _apply_options(self, answer: Answer, request: ModelRequest) -> Answer:
        """Apply the threshold and number of labels of a request to an answer of a batch."""
        label = answer.label
        if request.threshold is not None:
            best = answer.top[0][0] if answer.top else None
            label = best if answer.confidence >= request.threshold else None
        return replace(answer, label=label, top=answer.top[: request.top])
