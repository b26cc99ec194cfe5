"""Protocol and settings of permuted MNIST, with its presets."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import mbpa
from experiments.config_checks import check_minima, check_seeds
from experiments.methods import make_kernel
from experiments.tuned_settings import apply_tuned_settings

POOL_IMAGES = 50_000
"""Training images that tasks draw from; the following 10,000 are for choosing settings."""

SCORED_IMAGES = 10_000
"""Number of images to score, test or validation."""
LAYERS = ("0", "2", "4")
"""Names of the linear layers in `networks.sequential`."""

SEARCH_SEED = 1000
"""Seed of the search for settings; no run uses it."""
BY_SIZE = ("der_alpha", "der_beta", "vote_k", "vote_bandwidth")
LOCALS = ("alone", "random", "on_ewc", "on_replay", "on_der", "on_der_logits", "on_der_shortcut")
"""Fields of the config that have one value per memory size, and those composed of such fields."""

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class AdaptationBySize:
    """Adaptation by MbPA. Each field has one value, or one per memory size."""

    lr: tuple[float, ...] = (0.1,)
    """Learning rate of the adaptation."""
    steps: tuple[int, ...] = (5,)
    """Number of adaptation steps."""
    k: tuple[int, ...] = (10,)
    """Number of neighbours."""
    bandwidth: tuple[float, ...] = (0.0,)
    """Bandwidth of a Gaussian kernel on pixel distances; 0 selects the paper's inverse distance."""
    decay: tuple[float, ...] = (0.0,)
    """Strength of the pull back to the network's own parameters."""
    layers: tuple[int, ...] = (3,)
    """Number of layers that adapt, counted from the output; 1 to 3."""

    def __post_init__(self) -> None:
        if not all(math.isfinite(lr) and lr > 0 for lr in self.lr):
            raise ValueError(f"lr must be positive, got {self.lr}")
        for name in ("steps", "k", "layers"):
            if not all(value >= 1 for value in getattr(self, name)):
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not all(layers <= len(LAYERS) for layers in self.layers):
            raise ValueError(f"layers must be at most {len(LAYERS)}, got {self.layers}")
        for name in ("bandwidth", "decay"):
            if not all(value >= 0 for value in getattr(self, name)):
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")

    def predictor(self, size: int) -> mbpa.Adapted:
        """Return the predictor for the memory at this index among the sizes."""
        return make_adapted(**{name: of_size(values, size) for name, values in vars(self).items()})


def make_adapted(
    lr: float, steps: float, k: float, bandwidth: float, decay: float, layers: float
) -> mbpa.Adapted:
    """Return the predictor with these settings, for the networks of this experiment."""
    upper = LAYERS[len(LAYERS) - int(layers) :]
    return mbpa.Adapted(
        mbpa.Gradient(lr, int(steps), decay),
        k=int(k),
        kernel=make_kernel(bandwidth),
        params=tuple(f"{layer}.{kind}" for layer in upper for kind in ("weight", "bias")),
    )


@dataclass(frozen=True)
class PermutedMnistConfig:
    """Protocol and settings.

    The settings were chosen by `experiments tune permuted-mnist` on training images that no task
    draws from, with a seed that no run uses.
    """

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Random seeds, one repetition each: permutations, images, their order, initial weights."""
    tasks: int = 20
    """Number of permutations, learnt one after the other."""
    examples: int = 10_000
    """Number of examples per task."""
    memory_per_task: tuple[int, ...] = (100, 500, 1000, 5000)
    """Examples stored out of every `examples`, by memory size; each must divide `examples`."""
    test_images: int = 10_000
    """Images scored per task after the last task; at most 10,000."""
    curve_images: int = 1_000
    """Images scored per task after every task before the last."""
    part: Literal["test", "validation"] = "test"
    """Images to score: the test images, or training images held out for choosing settings."""
    hidden: int = 400
    """Number of units of each of the two hidden layers."""
    epochs: int = 2
    """Passes over a task before the next arrives. Examples are stored during the last pass."""
    batch: int = 50
    """Examples per batch, and stored examples that are rehearsed with each batch."""
    lr: float = 1e-3
    """Learning rate of Adam."""
    fisher_images: int = 2_000
    """Images of the completed task from which EWC computes the Fisher information."""
    ewc_strength: float = 100.0
    """Strength of EWC: λ in `½ λ Σ F (θ − θ*)²`."""
    der_alpha: tuple[float, ...] = (0.5,)
    """Weight of the stored logits in DER++; one value, or one per memory size."""
    der_beta: tuple[float, ...] = (1.0,)
    """Weight of the stored labels in DER++; one value, or one per memory size."""
    vote_k: tuple[int, ...] = (1,)
    """Number of neighbours that vote."""
    vote_bandwidth: tuple[float, ...] = (0.0,)
    """Bandwidth of the vote's kernel; 0 selects the paper's inverse distance."""
    alone: AdaptationBySize = field(default_factory=AdaptationBySize)
    """MbPA on the plain MLP."""
    random: AdaptationBySize = field(default_factory=AdaptationBySize)
    """The control that adapts to memories drawn at random."""
    on_ewc: AdaptationBySize = field(default_factory=AdaptationBySize)
    """MbPA on the network trained by EWC."""
    on_replay: AdaptationBySize = field(default_factory=AdaptationBySize)
    """MbPA on the network trained by replay."""
    on_der: AdaptationBySize = field(default_factory=AdaptationBySize)
    """MbPA on the network trained by DER++."""
    on_der_logits: AdaptationBySize = field(default_factory=lambda: AdaptationBySize(lr=(0.001,)))
    """The same, but adapting to the stored logits of the neighbours by squared error, not to their
    labels. Rates are smaller, since logits are farther apart than probabilities.
    """
    on_der_shortcut: AdaptationBySize = field(
        default_factory=lambda: AdaptationBySize(
            lr=(1.0,), steps=(10,), k=(32,), bandwidth=(5.0,), layers=(1,)
        )
    )
    """The same, but only one more layer adapts, from the outputs of the first layer to the logits;
    neighbours are found by these outputs, in units of their mean length.
    """
    switching: bool = True
    """Also run a stream whose task changes every `switch_every` examples."""
    switch_every: int = 500
    """Number of examples between changes of the task."""

    def __post_init__(self) -> None:
        check_seeds(self.seeds)
        if not self.memory_per_task:
            raise ValueError("memory_per_task must have at least one value, got none")
        counts = "tasks", "examples", "hidden", "epochs", "batch", "fisher_images", "switch_every"
        check_minima(self, dict.fromkeys(counts, 1))
        for n in self.memory_per_task:
            if not 1 <= n <= self.examples or self.examples % n:
                raise ValueError(f"memory_per_task must divide examples {self.examples}, got {n}")
        if self.examples % self.batch or self.switch_every % self.batch:
            raise ValueError(
                f"batch must divide examples {self.examples} and switch_every "
                f"{self.switch_every}, got {self.batch}"
            )
        if self.examples % self.switch_every:
            raise ValueError(
                f"switch_every must divide examples {self.examples}, got {self.switch_every}"
            )
        if not 1 <= self.examples <= POOL_IMAGES:
            raise ValueError(f"examples must be between 1 and {POOL_IMAGES}, got {self.examples}")
        if self.switching and any(
            self.switch_every % (self.examples // n) for n in self.memory_per_task
        ):
            raise ValueError(
                f"switch_every must be a multiple of examples / memory_per_task, "
                f"got {self.switch_every}, {self.examples} and {self.memory_per_task}"
            )
        for name in ("test_images", "curve_images"):
            if not 1 <= getattr(self, name) <= SCORED_IMAGES:
                raise ValueError(f"{name} must be 1 to {SCORED_IMAGES}, got {getattr(self, name)}")
        sizes = len(self.memory_per_task)
        for name in BY_SIZE:
            _check_sizes(name, getattr(self, name), sizes)
        for name in LOCALS:
            for setting, values in vars(getattr(self, name)).items():
                _check_sizes(f"{name}.{setting}", values, sizes)


def searched(config: PermutedMnistConfig) -> PermutedMnistConfig:
    """Return the config that the search runs with."""
    fresh = PermutedMnistConfig()
    names = "ewc_strength", *BY_SIZE, *LOCALS
    untuned: dict[str, Any] = {name: getattr(fresh, name) for name in names}
    return replace(config, seeds=(SEARCH_SEED,), part="validation", switching=False, **untuned)


def of_size(values: tuple[Number, ...], size: int) -> Number:
    """Return the value for the memory at this index among the sizes."""
    return values[size] if len(values) > 1 else values[0]


def _check_sizes(name: str, values: tuple[object, ...], sizes: int) -> None:
    if len(values) not in (1, sizes):
        raise ValueError(
            f"{name} must have one value, or {sizes}, one per memory size; got {values}"
        )


def select_sizes(config: PermutedMnistConfig, sizes: tuple[int, ...]) -> PermutedMnistConfig:
    """Return the config for some of its memory sizes, with their settings."""
    places = [config.memory_per_task.index(n) for n in sizes]

    def select(values: tuple[Number, ...]) -> tuple[Number, ...]:
        return tuple(of_size(values, place) for place in places)

    changes: dict[str, Any] = {name: select(getattr(config, name)) for name in BY_SIZE}
    for name in LOCALS:
        settings = vars(getattr(config, name))
        changes[name] = AdaptationBySize(
            **{field: select(values) for field, values in settings.items()}
        )
    return replace(config, memory_per_task=sizes, **changes)


PAPER = apply_tuned_settings(PermutedMnistConfig(), "permuted-mnist", "paper")
PRESETS = {
    "smoke": PermutedMnistConfig(
        seeds=(0,),
        tasks=3,
        examples=500,
        memory_per_task=(10, 50),
        test_images=100,
        curve_images=100,
        hidden=32,
        epochs=1,
        fisher_images=100,
        switch_every=100,
    ),
    "quick": replace(
        select_sizes(PAPER, (100, 1000)),
        seeds=(0,),
        tasks=5,
        test_images=1000,
        curve_images=250,
        fisher_images=1000,
        switching=False,
    ),
    "paper": PAPER,
}
