"""The language model: one LSTM layer whose softmax shares its weights with the embedding.

The softmax sees a bias-free projection of the LSTM's output, as wide as the embedding (Melis et
al., 2018). Dropout masks for words, recurrent weights and layers are drawn once per batch, not once
per step, so that cuDNN still runs the recurrence; it requires the weights to be contiguous in
memory. Training may compute in half precision, with parameters and their gradients in float32.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

State = tuple[Float[Tensor, "1 B H"], Float[Tensor, "1 B H"]]
"""What an LSTM carries from one token to the next: its output and its cells."""
_ORDER = "weight_ih", "weight_hh", "bias_ih", "bias_hh"  # cuDNN's order
_GRADIENT_SCALE = 1024.0  # factor of gradients in float16, which would round small ones to zero


@dataclass(frozen=True)
class Dropouts:
    """Shares that are set to zero during training; the rest is scaled up."""

    words: float = 0.05
    """Share of the vocabulary that is dropped, for a whole batch."""
    input: float = 0.5
    """Share of a word's embedding that is dropped.
    Like those below, it is the same throughout a sequence.
    """
    recurrent: float = 0.5
    """Share of the LSTM's recurrent weights that is dropped, for a whole batch."""
    output: float = 0.4
    """Share of the LSTM's output that is dropped."""
    projected: float = 0.3
    """Share of the softmax layer's input that is dropped."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {value}")


class LanguageModel(nn.Module):
    """A network that predicts the next word.

    Args:
        vocabulary: number of words.
        hidden: number of units of the LSTM.
        embedding: size of a word's vector, and of the softmax layer's input.
    """

    def __init__(self, vocabulary: int, hidden: int, embedding: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, batch_first=True)
        self.projection = nn.Linear(hidden, embedding, bias=False)
        self.decoder = nn.Linear(embedding, vocabulary)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        self.embedding.weight = self.decoder.weight

    def initial_state(self, batch: int) -> State:
        """Return the state at the beginning of sequences."""
        zeros = self.projection.weight.new_zeros(1, batch, self.lstm.hidden_size)
        return zeros, zeros

    def states(
        self, tokens: Int[Tensor, "B T"], state: State
    ) -> tuple[Float[Tensor, "B T E"], State]:
        """Return the input of the softmax layer after each token, without dropout, in float32."""
        with products("ieee", tokens.device):
            outputs, (hidden, cells) = self.lstm(self.embedding(tokens), state)
            return self.projection(outputs), (hidden, cells)

    def forward(
        self, tokens: Int[Tensor, "B T"], state: State
    ) -> tuple[Float[Tensor, "B T V"], State]:
        """Return logits of the word after each token, likewise."""
        states, state = self.states(tokens, state)
        with products("ieee", tokens.device):
            return self.decoder(states), state

    def noisy(
        self,
        tokens: Int[Tensor, "B T"],
        state: State,
        drawn: Drawn,
        multiple: int,
        *,
        half: bool = False,
    ) -> Noisy:
        """Run the network with dropout.

        Args:
            multiple: widths are padded to a multiple of this while computing, without changing the
                result: tensor cores need aligned rows, and those of width 1853 are not.
            half: compute the LSTM in float16 and the softmax layer in bfloat16. The logits are then
                in bfloat16, the rest of the result in float32.
        """
        vectors = _widen(self.decoder.weight, multiple, 2)
        inputs = functional.embedding(tokens, vectors)
        if drawn.words is not None:
            inputs = inputs * drawn.words[tokens][..., None]
        inputs = _mask(inputs, drawn.input, multiple)
        carried = _widen(state[0], multiple), _widen(state[1], multiple)
        weights = side_by_side(self.lstm, drawn.recurrent, multiple, half=half)
        if half:
            inputs, carried = to_float16(inputs), (carried[0].half(), carried[1].half())
        outputs, hidden, cells = torch.lstm(
            inputs, carried, weights, True, 1, 0.0, True, False, True
        )  # has biases, layers, dropout, training, bidirectional, batch first
        if half:
            outputs, hidden, cells = from_float16(outputs), hidden.float(), cells.float()
        dropped = _mask(outputs, drawn.output, multiple)
        projected = functional.linear(dropped, _widen(self.projection.weight, multiple, 2))
        states = _mask(projected, drawn.projected, multiple)
        biases = _widen(self.decoder.bias, multiple, value=-math.inf)
        if half:
            states, vectors, biases = states.bfloat16(), vectors.bfloat16(), biases.bfloat16()
        units = self.lstm.hidden_size
        return Noisy(
            logits=functional.linear(states, vectors, biases),
            outputs=outputs[..., :units],
            dropped=dropped[..., :units],
            state=(hidden[..., :units], cells[..., :units]),
        )


@dataclass(frozen=True, eq=False)
class Drawn:
    """Dropout masks of one batch: factors that are zero for what is dropped."""

    words: Float[Tensor, "V"] | None
    input: Float[Tensor, "B 1 E"] | None
    recurrent: Float[Tensor, "G H"] | None
    output: Float[Tensor, "B 1 H"] | None
    projected: Float[Tensor, "B 1 E"] | None


@dataclass(frozen=True, eq=False)
class Noisy:
    """Outputs of a pass over a batch that training needs."""

    logits: Float[Tensor, "B T W"]
    """Logits of the word after each token; those beyond the vocabulary are −∞."""
    outputs: Float[Tensor, "B T H"]
    """Outputs of the LSTM."""
    dropped: Float[Tensor, "B T H"]
    """The same outputs after dropout."""
    state: State


def draw_masks(
    model: LanguageModel, batch: int, dropouts: Dropouts, source: torch.Generator
) -> Drawn:
    """Draw the dropout masks of the next batch.

    Args:
        source: a generator on the model's device.
    """
    units, (vocabulary, width) = model.lstm.hidden_size, model.decoder.weight.shape

    def factors(share: float, *shape: int) -> Tensor | None:
        if share == 0:
            return None
        empty = torch.empty(shape, device=source.device)
        return empty.bernoulli_(1 - share, generator=source).div_(1 - share)

    return Drawn(
        words=factors(dropouts.words, vocabulary),
        input=factors(dropouts.input, batch, 1, width),
        recurrent=factors(dropouts.recurrent, 4 * units, units),
        output=factors(dropouts.output, batch, 1, units),
        projected=factors(dropouts.projected, batch, 1, width),
    )


def side_by_side(
    lstm: nn.LSTM, recurrent: Float[Tensor, "G H"] | None, multiple: int, *, half: bool = False
) -> list[Tensor]:
    """Return the LSTM's weights, multiplied by factors for the recurrent ones, as parts of one
    contiguous tensor in cuDNN's order, in float16 if `half`. Gradients flow to the LSTM's own
    weights.

    Units that pad the width have zero weights and biases, so their cells and outputs are zero.
    """
    own: dict[str, Tensor] = {name: lstm.get_parameter(f"{name}_l0") for name in _ORDER}
    own["weight_hh"] = _mask(own["weight_hh"], recurrent)
    gates = []
    for weights in own.values():
        four = weights.unflatten(0, (4, lstm.hidden_size))
        gates.append(_widen(four, multiple, weights.dim()).flatten(0, 1))
    numbers = torch.cat([gate.flatten() for gate in gates])
    if half:
        numbers = to_float16(numbers)
    parts = numbers.split([gate.numel() for gate in gates])
    return [part.view(gate.shape) for part, gate in zip(parts, gates, strict=True)]


def to_float16(numbers: Tensor) -> Tensor:
    """Convert float32 to float16, and a gradient of `from_float16` back."""
    return _convert(numbers, torch.float16, 1 / _GRADIENT_SCALE)


def from_float16(numbers: Tensor) -> Tensor:
    """Convert float16 to float32, and the gradient to float16, multiplied by a constant so that
    small gradients are not rounded to zero. `to_float16` divides by it.
    """
    return _convert(numbers, torch.float32, _GRADIENT_SCALE)


def _convert(numbers: Tensor, dtype: torch.dtype, factor: float) -> Tensor:
    converted: Tensor = _Converted.apply(numbers, dtype, factor)  # type: ignore[no-untyped-call]  # torch's
    return converted


class _Converted(torch.autograd.Function):
    """A conversion whose gradient is multiplied by a factor, in float32, and converted back."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, dtype: torch.dtype, factor: float) -> Tensor:
        ctx.dtype, ctx.factor = numbers.dtype, factor
        return numbers.to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return (gradients[0].float() * ctx.factor).to(ctx.dtype), None, None


@contextlib.contextmanager
def products(precision: Literal["ieee", "tf32"], device: torch.device) -> Iterator[None]:
    """Set how a GPU multiplies float32 matrices; by default torch uses TF32 in LSTMs only."""
    if device.type != "cuda":
        yield
        return
    backends: tuple[Any, ...] = torch.backends.cuda.matmul, torch.backends.cudnn.rnn
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = precision
        yield
    finally:
        for backend, setting in zip(backends, before, strict=True):
            backend.fp32_precision = setting


def _mask(numbers: Tensor, factors: Tensor | None, multiple: int = 1) -> Tensor:
    """Multiply by factors, which are first padded to the width that the numbers already have."""
    return numbers if factors is None else numbers * _widen(factors, multiple)


def _widen(numbers: Tensor, multiple: int, dims: int = 1, value: float = 0.0) -> Tensor:
    """Pad the last `dims` dimensions to a multiple, with zeros or another value."""
    more = [-size % multiple for size in numbers.shape[-dims:]]
    padding = [side for each in reversed(more) for side in (0, each)]
    return functional.pad(numbers, padding, value=value) if any(more) else numbers
