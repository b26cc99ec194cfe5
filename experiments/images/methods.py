"""The methods compared: their settings, the predictors they make, and what a search tries.

A method is an entry of `METHODS` together with the field of the config that holds its settings.
Runs, search, sensitivities and figures follow from that.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

import mbpa
from experiments.images.whitening import KnownLayer, WhitenedMemory
from experiments.measures import percent
from experiments.methods import (
    UNSCALED,
    VOTE_WEIGHTS,
    ComparedMethod,
    PredictorSettings,
    Scale,
    make_kernel,
)
from experiments.search import Grid


@dataclass(frozen=True, eq=False)
class Rehearsal:
    """Images of known classes that nothing was trained on, with which a method can be tried."""

    queries: Float[Tensor, "R D"]
    answers: Int[Tensor, "R"]
    baselines: tuple[PredictorSettings | None, ...]
    """Settings of the methods with which accuracy is compared; `None` is the layer alone."""


@dataclass(frozen=True, eq=False)
class Situation:
    """Everything that a method can use."""

    head: nn.Linear
    memory: mbpa.Memory
    scale: Scale
    old: int
    """Number of classes that the network knows; their labels are below this."""
    known: KnownLayer
    """The network's last layer as it was before anything new arrived."""
    copies: int
    """How often one image may be in the memory."""
    rehearsal: Rehearsal | None = None

    @cached_property
    def rehearsed_baseline(self) -> float:
        """The accuracy of the best baseline on the images of the rehearsal, in percent."""
        assert self.rehearsal is not None
        queries, answers = self.rehearsal.queries, self.rehearsal.answers
        models = [make_model(settings, self) for settings in self.rehearsal.baselines]
        return max(percent(model(queries).argmax(1) == answers) for model in models)

    @cached_property
    def whitened_memory(self) -> WhitenedMemory:
        """The contents of the memory, with whitened keys."""
        return WhitenedMemory.of(self.memory, self.known, self.copies)


class ModelSettings(abc.ABC):
    """Settings of a method that differs from others in more than its predictor."""

    @abc.abstractmethod
    def model(self, situation: Situation) -> Model:
        """Return the model that predicts in this situation."""


@dataclass(frozen=True)
class ScaledAdaptation(PredictorSettings):
    """An adaptation to the neighbours, in units of the scale of the keys."""

    rule: Literal["rmsprop", "gradient"] = "gradient"
    """Update rule."""
    lr: float = 0.1
    """Learning rate; for the rule `gradient` it is divided by the mean squared length of a key."""
    steps: int = 10
    """Number of adaptation steps."""
    k: int = 50
    """Number of neighbours."""
    bandwidth: float = 0.0
    """Bandwidth of the kernel, as in a vote."""
    decay: float = 0.0
    """Strength of the pull back to the layer's own parameters."""
    initial_square: float = 0.0
    """Initial second moment of RMSprop: 0 as in torch, 1 as in TensorFlow 1."""

    def __post_init__(self) -> None:
        if min(self.steps, self.k) < 1 or not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"steps and k must be at least 1, lr positive, got {self}")
        if min(self.bandwidth, self.decay, self.initial_square) < 0:
            raise ValueError(
                f"bandwidth, decay and initial_square must not be negative, got {self}"
            )

    def predictor(self, scale: Scale = UNSCALED) -> mbpa.Adapted:
        rule: mbpa.Rule = mbpa.Gradient(self.lr / scale.length, self.steps, self.decay)
        if self.rule == "rmsprop":
            start = self.initial_square
            rule = mbpa.RMSprop(self.lr, self.steps, self.decay, initial_square=start)
        return mbpa.Adapted(rule, k=self.k, kernel=make_kernel(self.bandwidth, scale))


@dataclass(frozen=True)
class BalancedAdaptation(ScaledAdaptation):
    """An adaptation in which neighbours of a class with few entries have more weight."""

    power: float = 1.0
    """The weight of a neighbour is divided by this power of the number of entries of its class."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.power <= 1:
            raise ValueError(f"power must be between 0 and 1, got {self.power}")

    def predictor(self, scale: Scale = UNSCALED) -> mbpa.Adapted:
        kernel = mbpa.Balanced(make_kernel(self.bandwidth, scale), self.power)
        return replace(super().predictor(scale), kernel=kernel)


@dataclass(frozen=True)
class RetrainedLayer(ModelSettings):
    """A layer of whitened keys fitted to the memory, close to the network's original one; nothing
    is adapted.
    """

    penalty: float = 0.3
    """Penalty on changes of the layer, as in `WhitenedMemory.retrain`."""

    def __post_init__(self) -> None:
        if not self.penalty > 0:
            raise ValueError(f"penalty must be positive, got {self.penalty}")

    def model(self, situation: Situation) -> mbpa.MbPA:
        return situation.whitened_memory.model(self.penalty, mbpa.Parametric())


@dataclass(frozen=True)
class PreservingAdaptation(ScaledAdaptation, ModelSettings):
    """An adaptation that preserves what the network knew: it adapts a layer of whitened keys fitted
    to the memory, and shifts the balance between new and old classes by a margin, so that no more
    is lost on the old ones than allowed, and no less is gained on the new ones than that permits.
    """

    lr: float = 1.0
    """Learning rate; keys have unit length."""
    steps: int = 5
    """Number of adaptation steps."""
    k: int = 50
    """Number of neighbours, found by their whitened keys."""
    bandwidth: float = 0.3
    """Bandwidth of the kernel, as in a vote."""
    penalty: float = 0.3
    """Penalty on changes of the layer, as in the retrained one."""
    lost: float = 1.0
    """Points by which the accuracy on the images of a rehearsal may be below the best baseline's.
    The margin is the smallest with which this holds. Without a rehearsal there is no margin.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        RetrainedLayer(self.penalty)  # raises the same errors
        if not math.isfinite(self.lost):
            raise ValueError(f"lost must be finite, got {self.lost}")

    def model(self, situation: Situation) -> MarginModel:
        whitened, margin = situation.whitened_memory, 0.0
        adapted = whitened.model(self.penalty, self.predictor(whitened.scale))
        if situation.rehearsal is not None:
            queries, answers = situation.rehearsal.queries, situation.rehearsal.answers
            wanted = situation.rehearsed_baseline - self.lost
            margin = find_margin(adapted(queries), answers, situation.old, wanted)
        weight = situation.head.weight
        is_new = torch.arange(len(weight), device=weight.device) >= situation.old
        return MarginModel(adapted, is_new.to(weight.dtype) * margin)


TIE_MARGIN = 1e-5  # in logits; without it, rounding would decide the tie at the margin


def find_margin(
    outputs: Float[Tensor, "R C"], answers: Int[Tensor, "R"], old: int, wanted: float
) -> float:
    """Return the smallest margin with which images of known classes are classified as accurately as
    wanted; if no margin achieves that, the smallest with the highest accuracy.

    A negative margin favours new classes. If every margin is enough, the smallest with which one
    image is classified correctly.

    Args:
        outputs: outputs for these images, without a margin.
        answers: their classes, all below `old`.
        old: number of known classes, which are the first columns of the outputs.
        wanted: accuracy in percent.
    """
    best, said = outputs[:, :old].max(1)
    # An image counts as right if the margin is at least the lead of its best new class.
    leads = (outputs[:, old:].amax(1) - best)[said == answers].sort().values
    if not len(leads):
        return 0.0
    needed = math.ceil(wanted / 100 * len(answers) - 1e-9)
    return float(leads[min(max(needed, 1), len(leads)) - 1]) + TIE_MARGIN


@dataclass(frozen=True, eq=False)
class MarginModel:
    """A model in which some classes must exceed others by a margin."""

    model: mbpa.MbPA
    margins: Float[Tensor, "C"]
    """How much is subtracted from the logit of each class."""

    @property
    def predictor(self) -> mbpa.Predictor:
        """The predictor of the wrapped model."""
        return self.model.predictor

    @property
    def memory(self) -> mbpa.Memory:
        """The memory of the wrapped model."""
        return self.model.memory

    def embed(self, features: Float[Tensor, "B D"]) -> Float[Tensor, "B D"]:
        """Return the keys of features, as stored in the memory."""
        return self.model.embed(features)

    def __call__(
        self, features: Float[Tensor, "B D"], *, neighbors: mbpa.Neighbors | None = None
    ) -> Float[Tensor, "B C"]:
        return (self.model(features, neighbors=neighbors) - self.margins).log_softmax(1)


Model = mbpa.MbPA | MarginModel
"""The common type of all methods' models."""
ImageMethodSettings = PredictorSettings | ModelSettings
"""The common type of all methods' settings."""


def make_model(settings: ImageMethodSettings | None, situation: Situation) -> Model:
    """Return the model with these settings; without settings, the layer alone."""
    if isinstance(settings, ModelSettings):
        return settings.model(situation)
    predictor = mbpa.Parametric() if settings is None else settings.predictor(situation.scale)
    return mbpa.MbPA(head=situation.head, memory=situation.memory, predictor=predictor)


@dataclass(frozen=True)
class ImageMethod(ComparedMethod):
    """A method; colours are those of the paper: MbPA blue, parametric model green, mixture red."""

    is_memory_alone: bool = False
    """Whether the method ignores the trained layer, and so knows nothing before the first entry."""
    has_own_layer: bool = False
    """Whether the method builds a layer from the memory and ignores the one that keeps learning."""
    needs_scarce: bool = False
    """Whether the method is compared only where some classes have fewer images than others."""


NEIGHBOURS: Grid = {"k": (10, 20, 50, 100, 200), "bandwidth": (0.0, 0.3, 0.5, 0.7, 1.0)}
DECAYS: Grid = {"decay": (0.0, 0.02, 0.1)}
GRADIENT_STEPS: Grid = {"lr": (0.1, 0.3, 1.0, 3.0, 10.0), "steps": (1, 5, 10, 20)}
RMSPROP_STEPS: Grid = {
    "lr": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1),  # the larger ones suit a start at 1
    "steps": (1, 5, 10, 20),
    "initial_square": (0.0, 1.0),
}
PENALTIES: Grid = {"penalty": (0.03, 0.1, 0.3, 1.0, 3.0)}
BALANCES: Grid = {"power": (0.0, 0.25, 0.5, 0.75, 1.0)}
KEPT_RATES: Grid = {"penalty": (0.1, 0.2, 0.3, 0.45, 0.7), "lr": (0.3, 1.0, 3.0)}
KEPT_NEIGHBOURS: Grid = {"k": (20, 50, 100), "bandwidth": (0.2, 0.3, 0.4, 0.5)}
KEPT_STEPS: Grid = {"lr": (0.3, 1.0, 3.0), "steps": (2, 5, 10, 20)}
METHODS: dict[str, ImageMethod] = {
    "parametric": ImageMethod("#1b7837"),
    "memory only": ImageMethod("#e08214", "vote", (NEIGHBOURS,), is_memory_alone=True),
    "mixture": ImageMethod("#b2182b", "mixture", (NEIGHBOURS, VOTE_WEIGHTS)),
    "MbPA (RMSprop)": ImageMethod(
        "#2166ac", "rmsprop", (RMSPROP_STEPS, NEIGHBOURS, RMSPROP_STEPS, DECAYS)
    ),
    "MbPA (gradient)": ImageMethod(
        "#67a9cf", "gradient", (GRADIENT_STEPS, NEIGHBOURS, GRADIENT_STEPS, DECAYS)
    ),
    "MbPA (balanced)": ImageMethod("#01665e", "balanced", (BALANCES,), needs_scarce=True),
    "retrained": ImageMethod("#b8a1cf", "retraining", (PENALTIES,), has_own_layer=True),
    "MbPA (kept)": ImageMethod(
        "#762a83",
        "kept",
        (KEPT_RATES, KEPT_NEIGHBOURS, KEPT_STEPS),
        has_own_layer=True,
        keeps_old=True,
    ),
}
"""Methods by their names in records."""
WITH_SETTINGS = {name: method for name, method in METHODS.items() if method.settings}
