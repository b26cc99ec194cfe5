"""Scoring of streams: predict item t from the items before it, then write it to the memory.

Items are scored in blocks, which is as fast as a batch. Within a block every item still sees
exactly what it would see one at a time: it sees the items before it in the block, and not the
entries that those overwrite.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from mbpa.memory import validation
from mbpa.model import MbPA


def score_stream(
    model: MbPA,
    inputs: Float[Tensor, "T ..."],
    targets: Int[Tensor, "T"] | Sequence[int],
    *,
    block: int | None = None,
    progress: bool = False,
) -> Float[Tensor, "T"]:
    """Return the log-probability of each target, predicted before it is written to the memory.

    Item t sees the initial content of the memory and the items before t, at most `capacity` entries
    in all. Afterwards the memory also holds the stream; if a block fails, it holds everything
    before that block.

    Args:
        model: its memory must hold labels.
        inputs: the items in order of time; embedded block by block.
        targets: the label of each item; whole numbers from 0, of any integer dtype.
        block: number of items scored at once; the scores do not depend on it. Default: 64, or
            2,048 if the memory is on a GPU.
        progress: show a progress bar on standard error.
    """
    if block is None:
        block = 64 if model.memory.device.type == "cpu" else 2048
    block = validation.count("block", block)
    if not model.memory.holds_labels:
        raise ValueError("score_stream scores labels, the memory holds regression targets")
    targets = validation.parse_values(targets, model.memory.value_dtype, "targets")
    if targets.shape != inputs.shape[:1]:
        raise ValueError(
            f"targets must have shape {tuple(inputs.shape[:1])}, got {tuple(targets.shape)}"
        )
    model.check_labels(targets)
    starts: Iterable[int] = range(0, len(targets), block)
    if progress:
        starts = tqdm(starts, desc="scoring", unit="block", file=sys.stderr)
    scores = [
        model.score_then_write(inputs[start : start + block], targets[start : start + block])
        for start in starts
    ]
    return torch.cat(scores) if scores else torch.empty(0, device=targets.device)
