"""Dynamic evaluation: the network keeps learning from the text that it is tested on.

Each segment is first scored and then learnt from, by a copy of the network. There are two update
rules: Adam, as tried in the paper, and the RMS rule of Krause et al. (2018),

    θ ← θ − η g / (RMS_g + ε) + λ RMS_norm (θ_g − θ),        RMS_norm = RMS_g / mean(RMS_g),

where θ_g are the trained parameters and RMS_g is the root mean square of each one's gradient over
the training text. MbPA on top remembers states as they were when they were computed, and adapts the
current softmax layer.

A segment has only a few tokens, so on a GPU its operations are recorded once and then replayed.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

import mbpa
from experiments.language.config import Dynamic, SoftmaxAdaptation
from experiments.language.network import LanguageModel, products
from experiments.language.passage import Passage
from experiments.language.recording import Recorded

Params = Sequence[nn.Parameter]
MOST = 1e6  # bound on each component of a key


class Update(abc.ABC):
    """Rule by which parameters learn from their gradients."""

    @abc.abstractmethod
    def step(self) -> None:
        """Take one step along the current gradients."""

    def state(self) -> dict[str, Any]:
        """Return what the rule carries from step to step, besides the parameters."""
        return {}

    def resume(self, state: dict[str, Any]) -> None:  # noqa: B027 (most have no state)
        """Continue from a state returned by `state`."""


class RMSUpdate(Update):
    """The rule of Krause et al.; a parameter is never pulled beyond its trained value.

    Args:
        scale: root mean square gradient of each parameter.
    """

    def __init__(self, params: Params, scale: Sequence[Tensor], settings: Dynamic) -> None:
        self._params = list(params)
        self._start = [p.detach().clone() for p in params]
        self._rates = [settings.lr / (rms + settings.epsilon) for rms in scale]
        total = torch.stack([rms.sum() for rms in scale]).sum()
        mean = total / sum(rms.numel() for rms in scale)
        mean = mean.clamp_min(torch.finfo(mean.dtype).tiny)  # in case no parameter has a gradient
        self._pulls = [(settings.decay * rms / mean).clamp_max(1) for rms in scale]
        self._has_pull = settings.decay > 0

    @torch.no_grad()
    def step(self) -> None:
        parts = zip(self._params, self._start, self._rates, self._pulls, strict=True)
        for p, start, rate, pull in parts:
            assert p.grad is not None
            change = p.grad * rate
            if self._has_pull:
                change.addcmul_(start - p, pull, value=-1)
            p.sub_(change)


class AdamUpdate(Update):
    """Adam, starting with its moments from the end of training if they were kept.

    Args:
        moments: the optimiser's `state_dict()` after training, for the same parameters.
        beta1: as in training, for an optimiser without moments.
        beta2: likewise.
    """

    def __init__(
        self,
        params: Params,
        lr: float,
        moments: dict[str, Any] | None,
        beta1: float = 0.0,
        beta2: float = 0.999,
    ) -> None:
        on_gpu = params[0].is_cuda  # where the step is recorded
        self._optimizer = torch.optim.Adam(
            list(params), lr=lr, betas=(beta1, beta2), capturable=on_gpu
        )
        if moments is not None:
            mine = {"lr": lr, "weight_decay": 0.0, "capturable": on_gpu, "fused": None}
            groups = [{**group, **mine} for group in moments["param_groups"]]
            self.resume({**copy.deepcopy(moments), "param_groups": groups})

    def step(self) -> None:
        self._optimizer.step()

    def state(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def resume(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state)


def gradient_scale(
    model: LanguageModel, tokens: Int[Tensor, "T"], settings: Dynamic
) -> list[Tensor]:
    """Return the root mean square of each parameter's gradient over a text, without dropout."""
    model = trainable_copy(model)
    params = list(model.parameters())
    squares = [torch.zeros_like(p) for p in params]
    segment = min(settings.segment, max(1, len(tokens) - 1))
    batch = max(1, min(settings.statistics_batch, len(tokens) // (segment + 1)))
    places = tokens[: len(tokens) // batch * batch].view(batch, -1)
    inputs, targets = places[:, :-1], places[:, 1:]
    state, count = model.initial_state(batch), 0
    for start in range(0, inputs.shape[1] - segment + 1, segment):
        if count == settings.statistics:
            break
        part = slice(start, start + segment)
        states, state = model.states(inputs[:, part], state)
        state = state[0].detach(), state[1].detach()
        logits = model.decoder(states).flatten(0, 1)
        loss = functional.cross_entropy(logits, targets[:, part].flatten())
        with products("ieee", tokens.device):  # as in the forward pass
            grads = torch.autograd.grad(loss, params)
        for square, grad in zip(squares, grads, strict=True):
            square.addcmul_(grad, grad)
        count += 1
    return [(square / max(1, count)).sqrt() for square in squares]


@dataclass(frozen=True, eq=False)
class Read:
    """The scores of a part of a text."""

    keys: Float[Tensor, "T E"]
    own: Float[Tensor, "T"]
    adapted: Float[Tensor, "T"]
    """Log-probabilities from MbPA on top; without it, those of the network alone."""


class Segment:
    """Consecutive words, read by a network that learns from them. Everything that changes is
    changed in place, so that it can be recorded.
    """

    def __init__(self, model: LanguageModel, length: int) -> None:
        self.model, self.params = model, list(model.parameters())
        for p in self.params:
            p.grad = torch.zeros_like(p)
        hidden, cells = model.initial_state(1)
        self.state = hidden, cells.clone()
        self.words, self.answers = hidden.new_zeros(2, length, dtype=torch.long)
        self.keys = hidden.new_zeros(length, model.decoder.in_features)
        self.own = hidden.new_zeros(length)

    def read(self) -> None:
        """Read the words in `words`, and store their keys, log-probabilities and gradients."""
        keys, own = self.read_these(self.words, self.answers)
        self.keys.copy_(keys)
        self.own.copy_(own)

    def read_these(
        self, words: Int[Tensor, "S"], answers: Int[Tensor, "S"]
    ) -> tuple[Float[Tensor, "S E"], Float[Tensor, "S"]]:
        """Return keys and log-probabilities of any words, and store the gradients."""
        states, state = self.model.states(words[None], self.state)
        losses = functional.cross_entropy(self.model.decoder(states[0]), answers, reduction="none")
        with products("ieee", words.device):  # as in the forward pass
            grads = torch.autograd.grad(losses.mean(), self.params)
        for p, grad in zip(self.params, grads, strict=True):
            assert p.grad is not None
            p.grad.copy_(grad)
        for old, new in zip(self.state, state, strict=True):
            old.copy_(new.detach())
        # A learning rate that is far too large gives arbitrary keys; the memory accepts finite ones
        # only.
        keys = states[0].detach().nan_to_num(0.0, 0.0, 0.0).clamp(-MOST, MOST)
        return keys, -losses.detach()


class DynamicEvaluation:
    """A copy of a network that learns from each segment after scoring it.

    Args:
        make_update: returns the update rule for the copy's parameters.
        on_top: how MbPA adapts the current layer, if at all.
        memory: number of most recent tokens that MbPA remembers.
    """

    def __init__(
        self,
        model: LanguageModel,
        make_update: Callable[[Params], Update],
        settings: Dynamic,
        on_top: SoftmaxAdaptation | None = None,
        memory: int = 1,
    ) -> None:
        self._model = trainable_copy(model)
        self._segment = segment = Segment(self._model, settings.segment)
        self._update = update = make_update(segment.params)
        # These must not refer to this object: the cycle would keep it, with all its weights, alive.
        self._look: Callable[[], None] = segment.read
        self._learn: Callable[[], None] = update.step
        if segment.own.is_cuda:
            self._look, self._learn = Recorded(segment.read), Recorded(update.step)
        self._mbpa: mbpa.MbPA | None = None
        if on_top is not None:
            head = self._model.decoder
            self._mbpa = mbpa.MbPA(
                head=head,
                memory=mbpa.ExactMemory(memory, head.in_features, device=head.weight.device),
                predictor=on_top.predictor(memory),
                engine=mbpa.Engine(store_bytes=0),  # the layer changes too often to cache results
            )

    def read(self, inputs: Int[Tensor, "T"], targets: Int[Tensor, "T"]) -> Read:
        """Score a text and learn from it, continuing where the last call ended, at the end of a
        segment.
        """
        keys, own, adapted, segment = [], [], [], self._segment
        length = len(segment.words)
        for words, answers in zip(inputs.split(length), targets.split(length), strict=True):
            is_whole = len(words) == length  # false only at the end of a text
            if is_whole:
                segment.words.copy_(words)
                segment.answers.copy_(answers)
                self._look()
                found = segment.keys.clone(), segment.own.clone()
            else:
                found = segment.read_these(words, answers)
            keys.append(found[0])
            own.append(found[1])
            if self._mbpa is None:
                adapted.append(own[-1])
            else:
                adapted.append(self._mbpa.score_then_write(keys[-1], answers))
            if is_whole:
                self._learn()
            else:
                self._update.step()
        return Read(torch.cat(keys), torch.cat(own), torch.cat(adapted))

    def state(self) -> dict[str, Any]:
        """Return everything that `resume` needs, except what was read."""
        params, carried = [p.detach() for p in self._segment.params], self._segment.state
        return {"params": params, "carried": carried, "update": self._update.state()}

    @torch.no_grad()
    def resume(self, state: dict[str, Any], before: Passage) -> None:
        """Continue from a state returned by `state` after this much of the text."""
        for p, kept in zip(self._segment.params, state["params"], strict=True):
            p.copy_(kept)
        for part, kept in zip(self._segment.state, state["carried"], strict=True):
            part.copy_(kept)
        self._update.resume(state["update"])
        if self._mbpa is not None:
            self._mbpa.memory.write(before.keys, before.targets)


def trainable_copy(model: LanguageModel) -> LanguageModel:
    """Return a copy with its own weights, in training mode, which cuDNN requires for gradients
    (`LanguageModel.states` drops nothing in either mode).
    """
    model = copy.deepcopy(model).train().requires_grad_()
    model.lstm.flatten_parameters()
    return model
