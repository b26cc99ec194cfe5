"""One pass of states over a text, and the scores of each method, token by token.

The states of a text are computed once (`Passage`), and so are the nearest entries of each token's
window (`Retrieval`). Every method and setting is then a vector (T,) of log-probabilities of the
actual tokens, and a mixture is a sum over such vectors. Nothing of size (T, V) is ever stored.

Shapes: T tokens of the text, P of them scored, E key size, K neighbours, V words, M methods mixed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

import mbpa
from experiments.language.network import LanguageModel
from mbpa.kernels import Kernel, neighbor_weights

TOKENS_PER_CHUNK = 2048  # tokens whose states are computed at once
BLOCK_TOKENS = 64, 2048  # tokens that a block of queries spans, on a CPU and on a GPU
MIN_GPU_QUERIES = 1024  # minimum queries per GPU call, however far apart
STORE_BYTES = 1 << 33  # for outputs on the window: 20,000 of 33,278 words take 2.7 GB
SCORES_PER_CHUNK = 1 << 26  # scores of queries against keys at a time


@dataclass(frozen=True, eq=False)
class Passage:
    """A text as the network reads it, word by word."""

    keys: Float[Tensor, "T E"]
    """The states before each word: inputs of the softmax layer, and keys of the memory."""
    targets: Int[Tensor, "T"]
    """The words of the text."""
    own: Float[Tensor, "T"]
    """Log-probability of each word according to the network alone."""

    def __len__(self) -> int:
        return len(self.targets)


def read_passage(model: LanguageModel, tokens: Int[Tensor, "T"], first: int) -> Passage:
    """Read a text from its beginning, carrying the state through all of it.

    Args:
        first: the word before the first one, the end of a line.
    """
    was_training = model.training
    model.eval()
    inputs = functional.pad(tokens[:-1], (1, 0), value=first)
    keys, own = [], []
    with torch.no_grad():
        state = model.initial_state(1)
        for words, targets in zip(
            inputs.split(TOKENS_PER_CHUNK), tokens.split(TOKENS_PER_CHUNK), strict=True
        ):
            states, state = model.states(words[None], state)
            keys.append(states[0].float())
            logits = model.decoder(states[0]).float()
            own.append(-functional.cross_entropy(logits, targets, reduction="none"))
    model.train(was_training)
    return Passage(torch.cat(keys), tokens, torch.cat(own))


# The nearest entries of each token's window


@dataclass(frozen=True, eq=False)
class Retrieval:
    """The nearest of the `window` tokens before each token; ids are positions in the text."""

    passage: Passage
    window: int
    ids: Int[Tensor, "T K"]
    """Positions of the neighbours; −1 where there are no more."""
    distances: Float[Tensor, "T K"]
    dots: Float[Tensor, "T K"]
    revision: int

    def neighbors(self, positions: range, k: int, capacity: int) -> mbpa.Neighbors:
        """Return the neighbours of these positions, as a memory would.

        Args:
            capacity: number of slots, enough for the windows of all positions together; the
                head's outputs for a neighbour are cached by slot from block to block.
        """
        rows = slice(positions.start, positions.stop, positions.step)
        ids = self.ids[rows, :k].long()
        mask, places = ids >= 0, ids.clamp_min(0)
        return mbpa.Neighbors(
            values=self.passage.targets[places],
            distances=self.distances[rows, :k],
            dots=self.dots[rows, :k],
            mask=mask,
            ids=ids,
            slots=torch.where(mask, ids % capacity, -1),
            keys=self.passage.keys[places],
            revision=self.revision,
            capacity=capacity,
        )


def retrieve(passage: Passage, window: int, k: int) -> Retrieval:
    """Read each token's window, as a memory of this size would hold it before the token."""
    device, k = passage.keys.device, min(k, window)
    memory = mbpa.ExactMemory(window, passage.keys.shape[1], device=device)
    span = _span(device)
    ids = torch.full((len(passage), k), -1, dtype=torch.int32, device=device)
    distances = torch.full((len(passage), k), math.inf, device=device)
    dots = torch.zeros(len(passage), k, device=device)
    revision = 0
    for start in range(0, len(passage), span):
        keys, values = (part[start : start + span] for part in (passage.keys, passage.targets))
        found = memory.read_causally(keys, values, k, keys_for=0)
        memory.write(keys, values)
        rows, width = slice(start, start + len(values)), found.ids.shape[1]
        ids[rows, :width] = found.ids.to(torch.int32)
        distances[rows, :width], dots[rows, :width] = found.distances, found.dots
        revision = found.revision  # constant, since no entry changes its key
    return Retrieval(passage, window, ids, distances, dots, revision)


# Scores of the methods: log-probabilities of the actual words


def engine_for(device: torch.device, adapted_words: int) -> mbpa.Engine:
    """Return an engine that caches the head's outputs for a whole window, if there is room for
    them.

    Args:
        device: device of the states.
        adapted_words: number of most probable words per neighbour that adapt; 0 adapts all words.
    """
    named: dict[str, Any] = {"store_bytes": STORE_BYTES} if device.type == "cuda" else {}
    if adapted_words:
        named |= {"tolerance": math.inf, "width": adapted_words}
    return mbpa.Engine(**named)


def score_adapted(
    head: nn.Linear,
    retrieval: Retrieval,
    predictor: mbpa.Adapted,
    positions: range,
    engine: mbpa.Engine,
) -> Float[Tensor, "P"]:
    """Return scores of heads that are each adapted to their own neighbours."""
    passage = retrieval.passage
    model = make_model(head, passage, predictor, engine)
    blocks = list(make_blocks(positions, passage.keys.device))
    reach = max((block[-1] - block[0] for block in blocks), default=0)
    scores = []
    for block in blocks:
        rows = slice(block.start, block.stop, block.step)
        neighbors = retrieval.neighbors(block, predictor.k, retrieval.window + reach)
        found = model(keys=passage.keys[rows], neighbors=neighbors)
        scores.append(found.gather(1, passage.targets[rows, None])[:, 0])
    found = torch.cat(scores)
    return found.masked_fill(found.isnan(), -math.inf)  # from a rate that is far too large


def make_model(
    head: nn.Linear, passage: Passage, predictor: mbpa.Predictor, engine: mbpa.Engine
) -> mbpa.MbPA:
    """Return a model whose neighbours are given with each call, so that its memory stays empty."""
    memory = mbpa.ExactMemory(1, passage.keys.shape[1], device=passage.keys.device)
    return mbpa.MbPA(head=head, memory=memory, predictor=predictor, engine=engine)


def score_vote(
    retrieval: Retrieval, kernel: Kernel, k: int, positions: range
) -> Float[Tensor, "P"]:
    """Return scores of the neighbours' vote, unsmoothed: −∞ where no neighbour has the word."""
    passage, scores = retrieval.passage, []
    for block in make_blocks(positions, passage.keys.device):
        rows = slice(block.start, block.stop, block.step)
        neighbors = retrieval.neighbors(block, k, retrieval.window + len(passage))
        same = neighbors.values == passage.targets[rows, None]
        share = (neighbor_weights(kernel, neighbors) * same).sum(1)
        scores.append(torch.where(neighbors.mask.any(1), share.log(), passage.own[rows]))
    return torch.cat(scores)


def score_cache(
    passage: Passage, window: int, scales: Sequence[float], positions: range
) -> Float[Tensor, "S P"]:
    """Return scores of the neural cache alone, `softmax(θ h·h_i)` over the whole window, for
    several θ.

    Equal to `NeighborVote(exp_dot(θ), k=window)`, which would sort entries needlessly.
    """
    size = max(
        1, min(_span(passage.keys.device) // positions.step, SCORES_PER_CHUNK // (window + 1))
    )
    parts = []
    for start in range(0, len(positions), size):
        block = positions[start : start + size]
        rows, seen, hidden, dots = _compare_with_window(passage, window, block)
        other = passage.targets[rows, None] != passage.targets[seen]
        own = passage.own[rows]
        for scale in scales:
            logs = (scale * dots).masked_fill(hidden, -math.inf)
            share = logs.masked_fill(other, -math.inf).logsumexp(1) - logs.logsumexp(1)
            parts.append(torch.where(rows > 0, share, own))
    return torch.stack([torch.cat(parts[place :: len(scales)]) for place in range(len(scales))])


def predict_cache(
    passage: Passage, window: int, scale: float, positions: range, words: int
) -> Float[Tensor, "P V"]:
    """Return the neural cache's log-probabilities of all words: −∞ for those not in the window.

    For the first token of a text, whose window is empty, all words are equally probable.
    """
    size = max(1, SCORES_PER_CHUNK // (window + 1))
    parts = []
    for start in range(0, len(positions), size):
        block = positions[start : start + size]
        rows, seen, hidden, dots = _compare_with_window(passage, window, block)
        weights = (scale * dots).masked_fill(hidden, -math.inf).softmax(1)
        shares = weights.new_zeros(len(block), words)
        shares.index_add_(1, passage.targets[seen], weights)
        parts.append(torch.where(rows[:, None] > 0, shares.log(), -math.log(words)))
    return torch.cat(parts)


def _compare_with_window(
    passage: Passage, window: int, positions: range
) -> tuple[Tensor, slice, Tensor, Tensor]:
    """Compare the keys at some positions with those of all entries in their windows.

    Returns:
        The P positions as a tensor; the range of all W entries that are in some window; whether
        each is outside the window of a position, of shape (P, W); and the dot products (P, W).
    """
    oldest = max(0, positions[0] - window)
    seen = slice(oldest, positions[-1])
    device = passage.keys.device
    rows = torch.arange(positions.start, positions.stop, positions.step, device=device)
    age = rows[:, None] - torch.arange(oldest, positions[-1], device=device)
    return rows, seen, (age < 1) | (age > window), passage.keys[rows] @ passage.keys[seen].T


def make_blocks(positions: range, device: torch.device) -> Iterator[range]:
    """Yield blocks of positions whose windows overlap strongly."""
    size = max(1, _span(device) // positions.step)
    size = size if device.type == "cpu" else max(MIN_GPU_QUERIES, size)
    for start in range(0, len(positions), size):
        yield positions[start : start + size]


def _span(device: torch.device) -> int:
    return BLOCK_TOKENS[device.type != "cpu"]


# Mixtures


def mix(logs: Float[Tensor, "M P"], weights: Float[Tensor, "M"]) -> Float[Tensor, "P"]:
    """Return log-probabilities of a mixture, in double precision."""
    return (logs.double() + weights.double().log()[:, None].to(logs.device)).logsumexp(0)


def perplexity(logs: Float[Tensor, "P"]) -> float:
    """Return the perplexity; infinite if it is undefined."""
    found = float((-logs.double().mean()).exp())
    return math.inf if math.isnan(found) else found


def solve_weights(logs: Float[Tensor, "M P"]) -> Float[Tensor, "M"]:
    """Return the weights with which a mixture gives these words the highest probability.

    With p = P λ, −mean log p + Σ λ is convex, and its minimum over λ ≥ 0 has Σ λ = 1. It is found
    by Newton's method. Each step solves a quadratic problem with λ ≥ 0 exactly, by trying every set
    of weights that may be positive: there are few.
    """
    count = len(logs)
    logs = logs[:, logs.isfinite().any(0)].double()
    shares = (logs - logs.amax(0)).exp().T  # P M; the scale of a row does not matter
    weights = shares.new_full((count,), 1 / count)
    if not len(shares):
        return weights.cpu()
    supports = [
        list(some)
        for size in range(1, count + 1)
        for some in itertools.combinations(range(count), size)
    ]

    def loss(at: Tensor) -> float:
        return float(at.sum() - (shares @ at).log().mean())

    for _ in range(100):
        ratios = shares / (shares @ weights)[:, None]
        slope = (1 - ratios.mean(0)).cpu()
        curve = (ratios.T @ ratios / len(ratios)).cpu() + 1e-12 * torch.eye(count).double()
        now = weights.cpu()
        if float(slope.min()) > -1e-9 and float((now * slope).abs().max()) < 1e-9:
            break
        step = (_least(curve, curve @ now - slope, supports) - now).to(weights.device)
        length, before = 1.0, loss(weights)
        promised = 1e-4 * float(step.cpu() @ slope)
        while loss(weights + length * step) > before + length * promised and length > 1e-6:
            length /= 2
        weights = (weights + length * step).clamp_min(0)
    return (weights / weights.sum()).cpu()


def _least(
    curve: Float[Tensor, "M M"], linear: Float[Tensor, "M"], supports: list[list[int]]
) -> Float[Tensor, "M"]:
    """Return the y ≥ 0 that minimises ½ yᵀ curve y − linearᵀ y."""
    best, least = torch.zeros_like(linear), 0.0
    for some in supports:
        y = torch.zeros_like(linear)
        y[some] = torch.linalg.solve(curve[some][:, some], linear[some])
        value = float(0.5 * y @ curve @ y - linear @ y)
        if float(y.min()) >= 0 and value < least:
            best, least = y, value
    return best
