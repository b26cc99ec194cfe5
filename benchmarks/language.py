"""`python -m benchmarks.language`: how fast a language model writes with a memory.

Compares `MemoryLM.generate` with `generate` of the model alone, in one process and in turns. Needs
the extra `language`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.timing import time_in_turns
from mbpa.language import MemoryLM

PROMPT = "The function returns a list of all names that were found in the directory, and"
NEW_TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.language", description=__doc__)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--run", type=Path, help="run directory written by `mbpa lm read`")
    parser.add_argument("--model", help="folder of a model; default: the one that installs offline")
    parser.add_argument(
        "--tokens", type=Path, help=".npy file of token ids to read, if there is no run"
    )
    parser.add_argument("--entries", type=int, default=100_000, help="tokens to read of that file")
    parser.add_argument("--device", default=device)
    parser.add_argument("--seconds", type=float, default=20.0, help="to spend on each timing")
    parser.add_argument("--out", type=Path, help="default: results/benchmarks/language-….json")
    arguments = parser.parse_args()
    out = arguments.out or Path(f"results/benchmarks/language-{arguments.device}.json")
    lm, read_s = open_model(arguments)
    took = time_in_turns(make_writers(lm), torch.device(arguments.device), arguments.seconds)
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    report = {
        "machine": {
            "device": name, "threads": torch.get_num_threads(), "torch": torch.__version__
        },
        "parts": {
            "language": {
                "entries": len(lm),
                "new_tokens": NEW_TOKENS,
                "seconds_to_read": read_s,
                "tokens_per_second": {case: NEW_TOKENS / each for case, each in took.items()},
                "share_of_speed_alone": took["alone"] / took["with memory"],
            }
        },
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report["parts"], indent=2))


def open_model(arguments: argparse.Namespace) -> tuple[MemoryLM, float | None]:
    """Return the model with its memory, and how long reading took if it was done now."""
    if arguments.run is not None:
        return MemoryLM.load(arguments.run, device=arguments.device, writable=False), None
    if arguments.tokens is None:
        raise SystemExit("give --run, or --tokens")
    lm = MemoryLM(arguments.model, device=arguments.device)
    tokens = np.load(arguments.tokens)[: arguments.entries].astype(np.int64)
    start = time.perf_counter()
    lm.read(torch.from_numpy(tokens), source="text")
    return lm, time.perf_counter() - start


def make_writers(lm: MemoryLM) -> dict[str, Callable[[], Any]]:
    """Return functions that write as many tokens, without and with the memory."""
    from transformers import GenerationConfig

    ids = torch.tensor([lm.encode(PROMPT)], device=lm.memory.device)
    config = GenerationConfig(
        max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
    )
    adapted = lm.as_transformers()

    def write(model: Any) -> None:
        model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)

    def write_with_memory() -> None:
        with lm.hold():
            write(adapted)

    return {"alone": lambda: write(lm.model), "with memory": write_with_memory}


if __name__ == "__main__":
    main()
