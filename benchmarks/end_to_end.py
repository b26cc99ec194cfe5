"""Complete predictions: adaptation against the kernel vote, and a stream of words.

Supports the claim that adapting costs little more than retrieving neighbours.
"""

from __future__ import annotations

import itertools
import lzma
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mbpa
from benchmarks.timing import time_in_turns
from experiments.measures import wait_for_device


def measure_prediction(batch: int, device: torch.device, budget: float) -> dict[str, Any]:
    """Measure C 200, D 512, K 50, T 10, N 20,000, in milliseconds per batch."""
    torch.manual_seed(0)
    head = nn.Linear(512, 200).to(device)
    memory = mbpa.ExactMemory(20_000, 512, device=device)
    memory.write(
        0.2 * torch.randn(20_000, 512, device=device), torch.randint(200, (20_000,), device=device)
    )
    adapted = mbpa.Adapted(mbpa.Gradient(0.1, 10), k=50)
    models = {
        name: mbpa.MbPA(head=head, memory=memory, predictor=predictor)
        for name, predictor in (("adapted", adapted), ("vote", mbpa.NeighborVote(k=50)))
    }
    batches = [0.2 * torch.randn(batch, 512, device=device) for _ in range(4)]
    turns = {name: itertools.count() for name in models}

    def predict(name: str) -> Callable[[], Tensor]:
        return lambda: models[name](keys=batches[next(turns[name]) % len(batches)])

    took = time_in_turns({name: predict(name) for name in models}, device, budget)
    return {
        "case": f"whole prediction, batch {batch}",
        "milliseconds": {name: 1e3 * each for name, each in took.items()},
        "adapted / vote": took["adapted"] / took["vote"],
    }


def measure_query(device: torch.device, budget: float) -> dict[str, Any]:
    """Measure one query at a time: C 150, D 384, K 50, T 20, in milliseconds."""
    torch.manual_seed(0)
    entries, size, classes = 1_000_000 if device.type == "cuda" else 20_000, 384, 150
    memory = mbpa.ExactMemory(entries, size, device=device)
    keys = torch.randn(entries, size, device=device)
    memory.write(keys, torch.randint(classes, (entries,), device=device))
    model = mbpa.MbPA(
        head=nn.Linear(size, classes).to(device),
        memory=memory,
        predictor=mbpa.Adapted(mbpa.Gradient(0.01, 20), k=50),
    )
    queries = torch.randn(16, 1, size, device=device)
    turn = itertools.count()
    norms = keys.square().sum(1)

    def next_query() -> Tensor:
        return queries[next(turn) % len(queries)]

    took = time_in_turns(
        {
            "whole": lambda: model(keys=next_query()),
            "read": lambda: memory.read(next_query(), 50),
            "addmm and topk": lambda: torch.addmm(norms, next_query(), keys.T, alpha=-2).topk(
                50, largest=False
            ),
        },
        device,
        budget,
    )
    return {
        "case": "one query",
        "sizes": [size, classes],
        "entries": entries,
        "k": 50,
        "steps": 20,
        "milliseconds": {name: 1e3 * each for name, each in took.items()},
    }


def measure_rules(device: torch.device, budget: float) -> dict[str, Any]:
    """Measure rules besides fixed steps: C 1,000, D 512, K 50, batch 256, in µs per query."""
    torch.manual_seed(0)
    entries, size, classes, batch = 400_000 if device.type == "cuda" else 20_000, 512, 1000, 256
    head = nn.Linear(size, classes).to(device)
    memory = mbpa.ExactMemory(entries, size, device=device)
    labels = torch.randint(classes, (entries,), device=device)
    memory.write(torch.randn(entries, size, device=device), labels)
    queries = torch.randn(batch, size, device=device)
    rules = {
        "20 steps": mbpa.Gradient(0.01, 20),
        "20 steps, auto": mbpa.Gradient(steps=20),
        "MAP(0.1)": mbpa.MAP(0.1),
    }
    models = {
        name: mbpa.MbPA(head=head, memory=memory, predictor=mbpa.Adapted(rule, k=50))
        for name, rule in rules.items()
    }
    works: dict[str, Callable[[], object]] = {
        name: lambda model=model: model(keys=queries) for name, model in models.items()
    }
    for work in works.values():  # so that everything is recorded that can be
        for _ in range(4):
            work()
    took = time_in_turns({**works, "read": lambda: memory.read(queries, 50)}, device, budget)
    micro = {name: 1e6 * each / batch for name, each in took.items()}
    return {
        "case": "rules",
        "sizes": [size, classes],
        "k": 50,
        "batch": batch,
        "entries": entries,
        "microseconds": micro,
        "without the read": {name: micro[name] - micro["read"] for name in rules},
    }


def measure_stream(device: torch.device, block: int) -> dict[str, Any]:
    """Measure all words of the PTB test set, N 5,000, K 256, T 1, states given, in seconds."""
    words, source = _load_words()
    classes, size = 10_000, 268
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(classes, size, generator=generator)
    states = _states(vectors, words).to(device)
    targets = words[1:].to(device)
    torch.manual_seed(0)
    head = nn.Linear(size, classes)
    nn.init.normal_(head.weight, std=size**-0.5, generator=generator)
    took, total = [], 0.0
    for _ in range(3):
        model = mbpa.MbPA(
            head=head.to(device),
            memory=mbpa.ExactMemory(5_000, size, device=device),
            predictor=mbpa.Adapted(mbpa.Gradient(1.0), k=256),
        )
        wait_for_device(device)
        start = time.perf_counter()
        scores = mbpa.score_stream(model, states, targets, block=block)
        total = float(scores.mean())
        took.append(time.perf_counter() - start)
    return {
        "case": "stream of words",
        "source": source,
        "tokens": len(targets),
        "block": block,
        "seconds": sorted(took)[1],
        "mean log-probability": total,
    }


def _load_words() -> tuple[Tensor, str]:
    path = Path(os.environ.get("MBPA_DATA") or ".") / "ptb" / "ptb.test.txt.xz"
    if not path.is_file():
        generator = torch.Generator().manual_seed(0)
        shares = 1 / torch.arange(1, 10_001).float()
        drawn = torch.multinomial(shares, 82_431, replacement=True, generator=generator)
        return drawn, "drawn by Zipf's law"
    with lzma.open(path, "rt", encoding="utf-8") as file:
        tokens = [token for line in file for token in [*line.split(), "<eos>"]]
    numbers: dict[str, int] = {}
    return torch.tensor([0] + [numbers.setdefault(t, len(numbers)) for t in tokens]), "PTB test set"


def _states(vectors: Tensor, words: Tensor) -> Tensor:
    """Return stand-ins for a network's states: running means of random word vectors."""
    state, states = torch.zeros(vectors.shape[1]), []
    for vector in vectors[words[:-1]]:
        state = 0.6 * state + 0.4 * vector
        states.append(state)
    return torch.stack(states)
