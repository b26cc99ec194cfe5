"""`python -m benchmarks.vocabulary`: the active vocabulary on the states of a language model.

A memory holds the states of a causal language model along one text, with the token that follows as
the label; queries are states along another. Random states would say nothing, since the point is
that most tokens are improbable almost everywhere. Needs the extra `language`.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import mbpa
from benchmarks.timing import time_in_turns
from mbpa import Engine
from mbpa.language.pretrained import DEFAULT_MODEL, load_pretrained

WINDOW, STRIDE = 1024, 512  # tokens that the model sees; of each window the last are used
LR = 5.0  # divided by the mean squared norm of states
CASES = {"cuda": ((64, 20, 500), (128, 40, 500)), "cpu": ((64, 20, 1), (64, 20, 16))}
WIDE = 4096, 128_256, 32, 20, 256  # size, classes, neighbours, steps and batch of a large model


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vocabulary", description=__doc__)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--model", help="folder of a model; default: the one that installs offline")
    parser.add_argument(
        "--tokens",
        type=Path,
        nargs=2,
        metavar=("MEMORY", "QUERIES"),
        help=".npy files of token ids; default: WikiText-2 from MBPA_DATA",
    )
    parser.add_argument("--entries", type=int, default=700_000 if device == "cuda" else 16_000)
    parser.add_argument("--queries", type=int, default=2048 if device == "cuda" else 128)
    parser.add_argument("--device", default=device)
    parser.add_argument("--seconds", type=float, default=2.0, help="to spend on each timing")
    parser.add_argument("--out", type=Path, help="default: results/benchmarks/vocabulary-….json")
    arguments = parser.parse_args()
    chosen = torch.device(arguments.device)
    out = arguments.out or Path(f"results/benchmarks/vocabulary-{chosen.type}.json")
    states = read_states(arguments, chosen)
    print(f"{len(states.keys):,} entries, {len(states.queries):,} queries", flush=True)
    name = torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else "cpu"
    machine = {"device": name, "threads": torch.get_num_threads(), "torch": torch.__version__}
    report: dict[str, Any] = {"machine": machine, "parts": {"vocabulary": []}}

    def keep(result: dict[str, Any]) -> None:
        report["parts"]["vocabulary"].append(result)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(result), flush=True)

    for k, steps, batch in CASES[chosen.type]:
        keep(measure(states, k, steps, batch, arguments.seconds))
    if chosen.type == "cuda":
        size, classes, k, steps, batch = WIDE
        keep(measure(states.widen(size, classes), k, steps, batch, arguments.seconds))


@dataclass(frozen=True, eq=False)
class States:
    """States of a language model along two texts, the tokens that follow, and its output layer."""

    name: str
    head: nn.Linear
    keys: Tensor
    values: Tensor
    queries: Tensor
    targets: Tensor

    def widen(self, size: int, classes: int) -> States:
        """Return states and an output layer of a larger model's size, with logits like this one's.

        States and rows of the output layer are embedded isometrically, so all inner products stay.
        Further rows are copies of existing ones, times 0.9 and with noise. Weights are bfloat16.
        """
        weight = self.head.weight.detach()
        device, generator = weight.device, torch.Generator(weight.device).manual_seed(0)
        normal = torch.randn(size, weight.shape[1], device=device, generator=generator)
        basis = torch.linalg.qr(normal)[0].T
        copies = torch.randint(
            len(weight), (classes - len(weight),), device=device, generator=generator
        )
        noise = torch.randn(len(copies), weight.shape[1], device=device, generator=generator)
        rows = torch.cat([weight, 0.9 * weight[copies] + 0.1 * weight.std() * noise])
        head = nn.Linear(size, classes, bias=False, device=device, dtype=torch.bfloat16)
        head.weight.data = (rows @ basis).bfloat16()
        some = slice(100_000)
        return States(
            name=f"{self.name}, widened",
            head=head,
            keys=self.keys[some] @ basis,
            values=self.values[some],
            queries=self.queries[:512] @ basis,
            targets=self.targets[:512],
        )


def read_states(arguments: argparse.Namespace, device: torch.device) -> States:
    """Run the model along both texts."""
    network, tokenizer = load_pretrained(arguments.model, device=device)
    tokens = arguments.tokens
    if tokens is None:
        counts = {"train": arguments.entries, "valid": 30 * arguments.queries + WINDOW}
        ids = [
            tokenizer(_read_text(name, 8 * count))["input_ids"] for name, count in counts.items()
        ]
    else:
        ids = [np.load(path) for path in tokens]
    keys, values = _run(network, ids[0], arguments.entries, device)
    queries, targets = _run(network, ids[1], 30 * arguments.queries, device)
    chosen = torch.randperm(len(queries), generator=torch.Generator().manual_seed(0))
    chosen = chosen[: arguments.queries].to(device)
    weight = network.lm_head.weight.detach()
    head = nn.Linear(weight.shape[1], len(weight), bias=False, device=device)
    head.weight.data = weight.clone()
    name = Path(arguments.model or DEFAULT_MODEL).name
    return States(name, head, keys, values, queries[chosen], targets[chosen])


def _read_text(name: str, characters: int) -> str:
    if "MBPA_DATA" not in os.environ:
        raise SystemExit("set MBPA_DATA to the folder of data sets, or give --tokens")
    path = Path(os.environ["MBPA_DATA"]) / f"wikitext-2/wiki.{name}.tokens.xz"
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return file.read(characters)


def _run(network: Any, ids: Any, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return up to `count` states along a text, and the tokens that follow them."""
    text = torch.as_tensor(np.asarray(ids[: count + WINDOW], dtype=np.int64), device=device)
    states, following = [], []
    batch = 16 if device.type == "cuda" else 1
    starts = range(0, len(text) - WINDOW, STRIDE)
    for at in range(0, len(starts), batch):
        part = torch.stack([text[start : start + WINDOW] for start in starts[at : at + batch]])
        with torch.no_grad():
            hidden = network.model(part).last_hidden_state
        states.append(hidden[:, WINDOW - STRIDE - 1 : -1].flatten(0, 1))
        following.append(part[:, WINDOW - STRIDE :].flatten())
    return torch.cat(states)[:count], torch.cat(following)[:count]


def measure(states: States, k: int, steps: int, batch: int, seconds: float) -> dict[str, Any]:
    """Measure time and error of active vocabularies against the exact adaptation."""
    lr = LR / float(states.keys.square().sum(1).mean())
    memory = mbpa.ExactMemory(len(states.keys), states.keys.shape[1], device=states.keys.device)
    memory.write(states.keys, states.values)
    neighbors = memory.read(states.queries.to(states.head.weight.dtype).float(), k)

    def make(tolerance: float) -> Callable[[slice], Tensor]:
        predictor = mbpa.Adapted(mbpa.Gradient(lr, steps), k=k)
        model = mbpa.MbPA(
            head=states.head,
            memory=memory,
            predictor=predictor,
            engine=Engine(tolerance=tolerance),
        )
        models[tolerance] = model
        return lambda rows: model(keys=states.queries[rows], neighbors=neighbors.rows(rows))

    models: dict[float, mbpa.MbPA] = {}
    predict = {tolerance: make(tolerance) for tolerance in (0.0, math.inf, 5e-2, 1e-2)}

    def score(tolerance: float) -> Tensor:
        parts = []
        for start in range(0, len(states.queries), 256):
            rows = slice(start, start + 256)
            found = predict[tolerance](rows).gather(1, states.targets[rows, None])
            parts.append(found[:, 0])
        return torch.cat(parts)

    scores = {tolerance: score(tolerance) for tolerance in predict}  # also fills caches
    took = time_in_turns(
        {
            str(tolerance): (lambda each=each: each(slice(0, batch)))
            for tolerance, each in predict.items()
        },
        states.keys.device,
        seconds,
    )
    error = (scores[math.inf] - scores[0.0]).abs()
    some = slice(0, min(256, len(states.queries)))

    def explain(tolerance: float) -> Any:
        explanation = models[tolerance].explain(
            keys=states.queries[some], neighbors=neighbors.rows(some)
        )
        adaptation = explanation.parts[0].adaptation
        assert adaptation is not None
        assert adaptation.report is not None
        return adaptation.report

    report, proved = (
        explain(math.inf),
        {tolerance: explain(tolerance) for tolerance in (5e-2, 1e-2)},
    )
    classes = len(states.head.weight)
    return {
        "case": states.name,
        "sizes": [states.keys.shape[1], classes],
        "dtype": str(states.head.weight.dtype).removeprefix("torch."),
        "k": k,
        "steps": steps,
        "batch": batch,
        "entries": len(states.keys),
        "microseconds": {
            name: 1e6 * took[str(tolerance)] / batch
            for name, tolerance in (
                ("exact", 0.0),
                ("active", math.inf),
                ("within 0.05", 5e-2),
                ("within 0.01", 1e-2),
            )
        },
        "active classes": float(report.sizes.float().mean()),
        "probability of others": float(report.rest.mean()),
        "error": {
            "mean": float(error.mean()),
            "99%": float(error.quantile(0.99)),
            "largest": float(error.max()),
        },
        "perplexity": {
            "exact": math.exp(-float(scores[0.0].double().mean())),
            "active": math.exp(-float(scores[math.inf].double().mean())),
        },
        "bound below 0.05": float((report.bound < 5e-2).float().mean()),
        "bound below 0.01": float((report.bound < 1e-2).float().mean()),
        "not exact within": {
            str(tolerance): float((each.sizes < classes).float().mean())
            for tolerance, each in proved.items()
        },
        "largest error within 0.05": float((scores[5e-2] - scores[0.0]).abs().max()),
    }


if __name__ == "__main__":
    main()
