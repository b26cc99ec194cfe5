"""A small run without an encoder, which loads in milliseconds."""

from __future__ import annotations

from pathlib import Path

import torch

import mbpa
from mbpa.modules.new_rows import NewRows, label_sums
from mbpa.serve.run_info import RunInfo, write_run

KEY_DIM, LABELS, EXAMPLES = 16, 4, 24


def draw_keys(count: int, seed: int) -> torch.Tensor:
    """Draw keys of norm 1."""
    keys = torch.randn(count, KEY_DIM, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(keys, dim=1)


def write_small_run(directory: Path) -> None:
    """Write a run of random keys around the centres of a few labels."""
    places = draw_keys(LABELS, seed=0)
    numbers = torch.arange(EXAMPLES) % LABELS
    keys = torch.nn.functional.normalize(places[numbers] + 0.3 * draw_keys(EXAMPLES, 1), dim=1)
    head = torch.nn.Linear(KEY_DIM, LABELS)
    with torch.no_grad():
        head.weight.copy_(4 * (places - places.mean(0)))
        head.bias.zero_()
    names = tuple(f"trained {i}" for i in range(LABELS))
    info = RunInfo(
        key_dim=KEY_DIM, labels=names, trained_examples=EXAMPLES, threshold=0.3, encoder=None
    )
    rows = NewRows.around(
        head.weight, head.bias, label_sums(keys, numbers, LABELS), scale=3.0, offset=0.5
    )
    predictor = mbpa.Adapted(mbpa.Gradient(lr=5.0, steps=10), k=12)
    examples = [(names[number], f"text {i}") for i, number in enumerate(numbers.tolist())]
    write_run(directory, info, head, predictor, examples, keys, rows)
