"""A small network for rows of numbers, and a model built from it and a list of examples.

The keys are the standardised features and, beside them, hidden units computed from these:

    key = [x, body(x)],    output = head(key)

So the head always sees the features themselves. What the hidden units have learnt not to look at,
which is common for classes that came later, is still there for the memory to tell apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Shaped
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from mbpa.memory import ExactMemory
from mbpa.model import MbPA
from mbpa.predictors import Predictor

DTYPE = torch.float64  # so that predictions hardly depend on how queries are batched
MAX_DEVIATION = 100.0  # of a feature from its mean, in standard deviations; beyond, it is clipped
MIN_DEVIATION = 1e-100  # smaller ones count as zero, so that squares of keys do not underflow
MIN_RELATIVE_SPREAD = 1e-12  # a feature that varies less, by its largest value, is constant
BATCHES_PER_EPOCH = 20
MIN_BATCH_SIZE, MAX_BATCH_SIZE = 32, 1024


def measure_columns(
    columns: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return mean and standard deviation of each column, leaving out NaN.

    The deviation of a constant column, and of one that is NaN throughout, is 1. Columns are scaled
    before they are squared, so that no finite numbers overflow.
    """
    is_known = ~np.isnan(columns)
    known = np.where(is_known, columns, 0.0)
    largest = np.abs(known).max(0, initial=0.0)
    largest[largest == 0] = 1.0
    scaled = known / largest
    counts = np.maximum(is_known.sum(0), 1)
    means = scaled.sum(0) / counts
    spreads = np.sqrt((np.where(is_known, scaled - means, 0.0) ** 2).sum(0) / counts)
    is_constant = spreads <= MIN_RELATIVE_SPREAD
    return means * largest, np.where(is_constant, 1.0, spreads * largest)


def standardize(
    columns: NDArray[np.float64], means: NDArray[np.float64], spreads: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return columns in standard deviations from their means, clipped; NaN becomes 0, the mean."""
    with np.errstate(over="ignore"):  # of differences of huge numbers, which are clipped
        deviations = (columns - means) / spreads
    deviations = np.clip(np.nan_to_num(deviations, nan=0.0), -MAX_DEVIATION, MAX_DEVIATION)
    deviations[np.abs(deviations) < MIN_DEVIATION] = 0.0
    return deviations


class Trunk(nn.Module):
    """Maps standardised features to keys: the features, then the units of the last hidden layer.

    Args:
        features: number of features.
        hidden_layer_sizes: units of each hidden layer; none: the features are the keys.
        generator: draws the initial weights.
    """

    def __init__(
        self, features: int, hidden_layer_sizes: Sequence[int], generator: torch.Generator
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        size = features
        for units in hidden_layer_sizes:
            layers += [make_linear(size, units, generator), nn.ReLU()]
            size = units
        self.body = nn.Sequential(*layers)
        self.key_dim = features + (size if layers else 0)

    def forward(self, features: Float[Tensor, "B F"]) -> Float[Tensor, "B D"]:
        return torch.cat([features, self.body(features)], 1) if len(self.body) else features


def make_linear(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    """Return a linear layer with torch's usual distribution of initial weights.

    Nothing is drawn from torch's global generator, so that threads do not disturb one another.
    """
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, inputs, outputs, dtype=DTYPE)
    limit = inputs**-0.5
    with torch.no_grad():
        layer.weight.uniform_(-limit, limit, generator=generator)
        layer.bias.uniform_(-limit, limit, generator=generator)
    return layer


def make_zero_linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a linear layer whose parameters are zero and need no gradients."""
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, inputs, outputs, dtype=DTYPE)
    for parameter in layer.requires_grad_(False).parameters():
        parameter.zero_()
    return layer


def train_network(
    features: Float[Tensor, "N F"],
    targets: Shaped[Tensor, "N *O"],
    outputs: int,
    loss: Literal["cross_entropy", "squared_error"],
    *,
    hidden_layer_sizes: Sequence[int],
    alpha: float,
    epochs: int,
    learning_rate: float,
    batch_size: int | None,
    seed: int,
) -> tuple[Trunk, nn.Linear]:
    """Train a network with Adam; the learning rate falls linearly to zero.

    Args:
        features: standardised, in float64.
        targets: labels from 0 to `outputs − 1`, or standardised targets (N, outputs).
        outputs: number of outputs.
        loss: cross-entropy for labels, squared error for targets.
        hidden_layer_sizes: as for `Trunk`.
        alpha: strength of the L2 penalty, `alpha / 2 · ‖weights‖²`; biases are free.
        epochs: passes over the rows.
        learning_rate: the first one.
        batch_size: rows per step; `None` for a twentieth of all, from 32 to 1024.
        seed: of the initial weights and of the order of the rows.
    """
    generator = torch.Generator().manual_seed(seed)
    count = len(features)
    trunk = Trunk(features.shape[1], hidden_layer_sizes, generator)
    head = make_linear(trunk.key_dim, outputs, generator)
    parameters = [*trunk.parameters(), *head.parameters()]
    weights = [each for each in parameters if each.ndim > 1]
    biases = [each for each in parameters if each.ndim == 1]
    groups: list[dict[str, Any]] = [{"params": weights, "weight_decay": alpha}, {"params": biases}]
    optimizer = torch.optim.Adam(groups, lr=learning_rate)
    size = batch_size or min(max(count // BATCHES_PER_EPOCH, MIN_BATCH_SIZE), MAX_BATCH_SIZE)
    steps = epochs * -(-count // size)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    compute_loss = functional.cross_entropy if loss == "cross_entropy" else functional.mse_loss
    for _ in range(epochs):
        for rows in torch.randperm(count, generator=generator).split(size):
            optimizer.zero_grad()
            compute_loss(head(trunk(features[rows])), targets[rows]).backward()
            optimizer.step()
            schedule.step()
    return trunk.requires_grad_(False), head.requires_grad_(False)


def build_model(
    head: nn.Linear,
    keys: Float[Tensor, "N D"],
    values: Shaped[Tensor, "N *O"],
    predictor: Predictor,
) -> MbPA:
    """Return a model whose memory holds exactly these examples, in this order.

    A model is built anew after every change of the examples. So it depends on nothing but them,
    to the bit: not on where an example was stored, nor on others that were removed.
    """
    memory = ExactMemory(
        max(1, len(keys)),
        head.in_features,
        value_shape=values.shape[1:],
        value_dtype=values.dtype,
        dtype=DTYPE,
    )
    model = MbPA(head=head, memory=memory, predictor=predictor)
    if len(keys):
        model.write(keys=keys, values=values)
    return model
