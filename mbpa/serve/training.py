"""Training of a linear head from zero, with early stopping on held-out examples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

HELD_OUT_FRACTION = 0.1  # share of each label's examples


@dataclass(frozen=True)
class Training:
    """How the head is trained; the defaults suit sentence embeddings of unit norm."""

    lr: float = 0.1
    batch: int = 512
    epochs: int = 60
    patience: int = 4
    """Number of epochs without a better held-out loss after which training stops."""
    seed: int = 0


def choose_held_out(
    labels: Int[Tensor, "N"], generator: torch.Generator, share: float = HELD_OUT_FRACTION
) -> Bool[Tensor, "N"]:
    """Choose a share of each label's examples at random; none of labels with fewer than three."""
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique().tolist():
        places = (labels == label).nonzero()[:, 0]
        count = max(1, round(share * len(places))) if len(places) >= 3 else 0
        chosen[places[torch.randperm(len(places), generator=generator)[:count]]] = True
    return chosen


def train_head(
    keys: Float[Tensor, "N D"],
    labels: Int[Tensor, "N"],
    classes: int,
    training: Training,
    held: tuple[Float[Tensor, "H D"], Int[Tensor, "H"]],
) -> nn.Linear:
    """Train a linear head from zero with Adam; return it as it was at the least held-out loss.

    Since it starts from zero, the logits of each query sum to zero and stay so. A row of zeros
    added for a new label is therefore neither above nor below them on average.
    """
    head = nn.Linear(keys.shape[1], classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    optimizer = torch.optim.Adam(head.parameters(), lr=training.lr)
    generator = torch.Generator().manual_seed(training.seed)
    least, best, waited = float("inf"), head.state_dict(), 0
    for _ in range(training.epochs):
        for rows in torch.randperm(len(keys), generator=generator).split(training.batch):
            optimizer.zero_grad()
            functional.cross_entropy(head(keys[rows]), labels[rows]).backward()
            optimizer.step()
        waited += 1
        with torch.no_grad():
            loss = float(functional.cross_entropy(head(held[0]), held[1])) if len(held[1]) else 0.0
        if loss < least or not len(held[1]):
            best = {name: tensor.clone() for name, tensor in head.state_dict().items()}
            least, waited = loss, 0
        if waited >= training.patience:
            break
    head.load_state_dict(best)
    return head.eval().requires_grad_(False)
