"""Which words gain, and from which memories, when MbPA is added to an LSTM with a cache."""

from __future__ import annotations

import itertools
from collections import Counter

import torch
from jaxtyping import Float, Int
from torch import Tensor

from experiments.data import Corpus
from experiments.language.config import SoftmaxAdaptation
from experiments.language.corpus import frequencies
from experiments.language.passage import Retrieval
from experiments.results import Record
from mbpa.kernels import neighbor_weights

BUCKETS = 5
EXAMPLES = 8
CONTEXT = 8  # words shown before a token
REMEMBERED = 4  # words shown before a memory
MEMORIES = 2  # shown per token
TIMES_REMEMBERED = (0, 1, 2, 4, 8, 16, 64)  # smallest number in each bucket


def measure_improvements(
    corpus: Corpus,
    tokens: Int[Tensor, "T"],
    before: Float[Tensor, "T"],
    after: Float[Tensor, "T"],
) -> list[Record]:
    """Return by how many percent perplexity falls, in buckets of words by training frequency.

    The words of the text, most frequent first, are divided into buckets of equal size. Each bucket
    has the mean and standard deviation over its words, each with its own perplexity (paper,
    appendix), and the fall of the perplexity over all its tokens.
    """
    words, place = tokens.unique(return_inverse=True)
    counts = place.bincount(minlength=len(words)).double()

    def mean_of(logs: Tensor) -> Tensor:
        total = torch.zeros(len(words), dtype=torch.float64)
        return total.index_add_(0, place, logs.double()).div_(counts)

    lowered = 100 * (1 - (mean_of(before) - mean_of(after)).exp())
    frequency = frequencies(corpus)[words]
    order = frequency.sort(descending=True, stable=True).indices
    records: list[Record] = []
    for number, members in enumerate(order.tensor_split(BUCKETS), start=1):
        if not len(members):
            continue
        inside = torch.isin(place, members)
        told: Record = {
            "bucket": number,
            "words": len(members),
            "tokens": int(inside.sum()),
            "least_frequent": int(frequency[members].min()),
            "most_frequent": int(frequency[members].max()),
        }
        deviation = float(lowered[members].std(correction=0))
        overall = 100 * (1 - float((before - after)[inside].double().mean().exp()))
        records += [
            {**told, "name": "improvement", "value": float(lowered[members].mean())},
            {**told, "name": "improvement_deviation", "value": deviation},
            {**told, "name": "improvement_of_tokens", "value": overall},
        ]
    return records


def measure_improvements_by_memory(
    tokens: Int[Tensor, "T"],
    before: Float[Tensor, "T"],
    after: Float[Tensor, "T"],
    window: int,
) -> list[Record]:
    """Return by how many percent the perplexity falls, by how often the memory holds the word.

    Args:
        tokens: the words of the text.
        before: their log-probabilities by the method that the other one is compared with.
        after: their log-probabilities by the other method.
        window: number of most recent tokens that are remembered.
    """
    seen = count_before(tokens, window)
    gains = (after - before).double()
    records: list[Record] = []
    for least, most in itertools.pairwise((*TIMES_REMEMBERED, len(tokens) + 1)):
        inside = (seen >= least) & (seen < most)
        if not bool(inside.any()):
            continue
        told: Record = {"times_remembered": least, "tokens": int(inside.sum())}
        overall = 100 * (1 - float((-gains[inside].mean()).exp()))
        records.append({**told, "name": "improvement_by_memory", "value": overall})
    return records


def count_before(tokens: Int[Tensor, "T"], window: int) -> Int[Tensor, "T"]:
    """Return how often each token's word is among the `window` tokens before it."""
    counts: Counter[int] = Counter()
    words, found = tokens.tolist(), []
    for place, word in enumerate(words):
        if place > window:
            counts[words[place - window - 1]] -= 1
        found.append(counts[word])
        counts[word] += 1
    return torch.tensor(found)


def find_improved_words(
    corpus: Corpus,
    retrieval: Retrieval,
    local: SoftmaxAdaptation,
    before: Float[Tensor, "T"],
    after: Float[Tensor, "T"],
) -> list[Record]:
    """Return the tokens whose probability rose by the largest factor, each word once, with
    memories.
    """
    targets = retrieval.passage.targets.tolist()
    order = (after - before).argsort(descending=True).tolist()
    first_of_word: dict[int, int] = {}
    for position in order:
        first_of_word.setdefault(targets[position], position)
        if len(first_of_word) == EXAMPLES:
            break
    return [
        {
            "word": corpus.words[word],
            "context": _join_words(corpus, targets[max(0, position - CONTEXT) : position]),
            **_memories(corpus, retrieval, local, position, targets),
            "position": position,
            "before": float(before[position].exp()),
            "after": float(after[position].exp()),
            "name": "example",
            "value": float(after[position] - before[position]),
        }
        for word, position in first_of_word.items()
    ]


def _memories(
    corpus: Corpus,
    retrieval: Retrieval,
    local: SoftmaxAdaptation,
    position: int,
    targets: list[int],
) -> Record:
    """Describe the memories: the words before, the actual word, and its weight in percent. Those
    with the token's own word come first, by weight, since only they can have made it more probable.
    """
    at = range(position, position + 1)
    found = retrieval.neighbors(at, min(local.k, retrieval.window), retrieval.window + 1)
    weights = neighbor_weights(local.weighting, found)[0]
    moments, told = found.ids[0].tolist(), []
    by_weight = [p for p in weights.argsort(descending=True).tolist() if weights[p] > 0]
    has_word = {place: targets[moments[place]] == targets[position] for place in by_weight}
    by_weight.sort(key=lambda place: not has_word[place])
    for place in by_weight[:MEMORIES]:
        when = moments[place]
        text = _join_words(corpus, targets[max(0, when - REMEMBERED) : when])
        told.append(f"{text} → {corpus.words[targets[when]]} ({100 * weights[place]:.0f}%)")
    return {"memories": "; ".join(told), "with_the_word": sum(has_word.values())}


def _join_words(corpus: Corpus, numbers: list[int]) -> str:
    return " ".join(corpus.words[number] for number in numbers)
