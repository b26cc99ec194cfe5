"""Protocol and settings of language modelling, with its presets."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import mbpa
from experiments.language.network import Dropouts
from experiments.tuned_settings import tuned
from mbpa.kernels import Kernel


def _check_finite(
    settings: object, positive: tuple[str, ...], others: tuple[str, ...] = ()
) -> None:
    """Refuse numbers that are not finite, not positive, or, of the others, negative."""
    for name in (*positive, *others):
        value = getattr(settings, name)
        if not (math.isfinite(value) and (value > 0 if name in positive else value >= 0)):
            least = "positive" if name in positive else "not negative"
            raise ValueError(f"{name} must be finite and {least}, got {value}")


@dataclass(frozen=True)
class Network:
    """The sizes of the language model."""

    hidden: int = 1194
    """Units of the LSTM."""
    embedding: int = 268
    """Size of a word's vector, and of what the softmax layer sees."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


@dataclass(frozen=True)
class Training:
    """How the language model is trained."""

    epochs: int = 400
    """Passes over the training text."""
    batch: int = 64
    """Places of the text that are read side by side; fewer where the text is too short for them."""
    bptt: int = 35
    """Tokens through which gradients go back."""
    lr: float = 0.003
    """Of Adam."""
    beta1: float = 0.0
    """Adam's memory of gradients; none, after Melis et al. (2018)."""
    beta2: float = 0.999
    """Adam's memory of their squares."""
    weight_decay: float = 3.55e-6
    """Times the weights, added to the gradient of the mean loss of a token."""
    clip: float = 0.286
    """The longest a gradient may be."""
    dropouts: Dropouts = field(default_factory=Dropouts)
    state_reset: float = 0.01
    """How probably a sequence forgets what it read, from one batch to the next."""
    averages: tuple[float, ...] = (0.9995, 0.9999, 0.99999)
    """How much of an average of the weights a step keeps; at first less, so that none reaches
    beyond the last ninth or so of the steps. There may be several averages: what is tested is the
    one that does best on the validation text."""
    decay_from: float = 0.55
    """The share of the training from which the rate falls, in a line."""
    decay_to: float = 0.01
    """The share of the rate that is left at the end."""
    activation_penalty: float = 2.0
    """On the mean square of the LSTM's output after dropout (Merity et al., 2018)."""
    temporal_penalty: float = 1.0
    """On the mean square of the difference of its outputs at neighbouring tokens."""

    def __post_init__(self) -> None:
        for name, least in {"epochs": 0, "batch": 1, "bptt": 1}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        _check_finite(
            self,
            positive=("lr", "clip"),
            others=("weight_decay", "activation_penalty", "temporal_penalty"),
        )
        shares = {"beta1": (self.beta1,), "beta2": (self.beta2,), "averages": self.averages}
        for name, values in shares.items():
            if not values or not all(0 <= value < 1 for value in values):
                told = ", ".join(str(value) for value in values) or "none"
                raise ValueError(f"{name} must be at least 0 and below 1, got {told}")
        for name in ("state_reset", "decay_from", "decay_to"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class Cache:
    """The neural cache (Grave et al., 2017): a vote of all that is remembered, by dot products."""

    scale: float = 0.2
    """Times the dot product of two states; the vote is the softmax of that."""
    window: int = 0
    """How many of the last tokens vote; 0: as many as MbPA remembers."""

    def __post_init__(self) -> None:
        if self.window < 0:
            raise ValueError(f"window must not be negative, got {self.window}")
        _check_finite(self, positive=("scale",))


@dataclass(frozen=True)
class Local:
    """How MbPA adapts the softmax layer."""

    rule: Literal["gradient", "rmsprop", "adam", "map"] = "gradient"
    """`map`: the optimum itself, which has no rate, steps or decay but a prior."""
    lr: float = 1.0
    """Of the adaptation."""
    steps: int = 20
    """Of the adaptation."""
    k: int = 128
    """Neighbours; all of the memory where it holds fewer."""
    decay: float = 0.0
    """The pull back to the layer's own parameters."""
    prior: float = 0.1
    """Of the optimum: how much moving the parameters costs."""
    kernel: Literal["inverse_distance", "gaussian", "exp_dot", "uniform"] = "inverse_distance"
    """How neighbours are weighted."""
    kernel_scale: float = 1.0
    """The bandwidth of a Gaussian, or the factor of a dot product."""

    def __post_init__(self) -> None:
        if min(self.steps, self.k) < 1:
            raise ValueError(f"steps and k must be at least 1, got {self.steps} and {self.k}")
        _check_finite(self, positive=("lr", "prior", "kernel_scale"), others=("decay",))

    @property
    def weighting(self) -> Kernel:
        """Of the neighbours."""
        if self.kernel == "gaussian":
            return mbpa.gaussian(self.kernel_scale)
        if self.kernel == "exp_dot":
            return mbpa.exp_dot(self.kernel_scale)
        return mbpa.uniform() if self.kernel == "uniform" else mbpa.inverse_distance()

    def predictor(self, memory: int) -> mbpa.Adapted:
        """For a memory of this size."""
        rule: mbpa.Rule = mbpa.Gradient(self.lr, self.steps, self.decay)
        if self.rule == "map":
            rule = mbpa.MAP(self.prior, tolerance=1e-3)
        elif self.rule != "gradient":
            kind = mbpa.RMSprop if self.rule == "rmsprop" else mbpa.Adam
            rule = kind(self.lr, self.steps, self.decay)
        return mbpa.Adapted(rule, k=min(self.k, memory), kernel=self.weighting)


@dataclass(frozen=True)
class Dynamic:
    """Dynamic evaluation: the whole network goes on learning while it is tested."""

    lr: float = 5e-4
    """Of a step, times the gradient over the root of its mean square in training."""
    decay: float = 0.02
    """The pull back to the trained weights, a segment; times the root mean square of a weight's
    gradient, relative to the mean over all weights."""
    segment: int = 5
    """Tokens after which a step is made, and through which gradients go back."""
    epsilon: float = 2e-3
    """Beside the root of the mean square gradient, which divides the gradient; much smaller ones
    let words that were rare in training jump."""
    statistics: int = 5_000
    """Steps through the training text, at most, from which the mean squares are taken."""
    statistics_batch: int = 100
    """Places of the training text that such a step reads side by side."""
    adam_lr: float = 1e-4
    """Of Adam, in its place; 0: this is not tried."""
    on_top: bool = True
    """Whether MbPA is tried on top of it; the layer then changes every segment, and takes long."""
    mbpa: Local = field(default_factory=lambda: Local(steps=5, k=64))
    """How MbPA adapts on top of dynamic evaluation."""

    def __post_init__(self) -> None:
        if min(self.segment, self.statistics, self.statistics_batch) < 1:
            raise ValueError(
                f"segment, statistics and statistics_batch must be at least 1, got {self}"
            )
        _check_finite(self, positive=("lr", "epsilon"), others=("adam_lr", "decay"))


@dataclass(frozen=True)
class Search:
    """How much a search for settings may do."""

    tokens: int = 12_000
    """Of the validation text, evenly spread over it, with which most settings are judged."""
    dynamic_tokens: int = 10_000
    """From its beginning, with which rates of dynamic evaluation are judged; the best three, pulls
    at the best, and rates around it are then judged by four times as many, if there is time."""
    seconds: float = 300.0
    """Of one H200, as estimated beforehand; settings that would take longer are left out."""
    scoring_seconds: float = 150.0
    """Of one H200, estimated likewise, that MbPA may take to score both texts, of validation and of
    test, with its setting and with the one beside the cache, if that is another; what would take
    longer is not chosen."""

    def __post_init__(self) -> None:
        if min(self.tokens, self.dynamic_tokens) < 1:
            raise ValueError(f"tokens and dynamic_tokens must be at least 1, got {self}")
        _check_finite(self, positive=("seconds", "scoring_seconds"))


@dataclass(frozen=True)
class LanguageConfig:
    """A trained LSTM is tested on running text, with and without a memory of that text."""

    seeds: tuple[int, ...] = (0,)
    """One trained network each."""
    corpus: Literal["ptb", "wikitext-2", "own"] = "ptb"
    """Penn Treebank, WikiText-2, or the text of the three files below, which decide it if given."""
    train: Path | None = None
    """Your own text to learn from: UTF-8, words between white space, lines as sentences."""
    valid: Path | None = None
    """Your own text for choosing settings."""
    test: Path | None = None
    """Your own text to be tested on."""
    vocabulary: int = 30_000
    """The most words that are told apart, all others being unknown alike; for your own text, and
    for the beginning of a corpus. A whole one has its own."""
    tokens: int = 0
    """How much of the training text is used, from its beginning; 0: all."""
    scored_tokens: int = 0
    """How much of the texts for validation and test is used, from their beginning; 0: all."""
    network: Network = field(default_factory=Network)
    training: Training = field(default_factory=Training)
    memory: int = 5000
    """How many of the last tokens are remembered."""
    cache: Cache = field(default_factory=Cache)
    mbpa: Local = field(default_factory=Local)
    combined: Local = field(default_factory=Local)
    """MbPA where it is mixed with the cache. Weights of mixtures are solved for on validation."""
    dynamic: Dynamic = field(default_factory=Dynamic)
    search: Search = field(default_factory=Search)

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds must name at least one, none of them twice, got {self.seeds}")
        for name, least in {"vocabulary": 1, "tokens": 0, "scored_tokens": 0, "memory": 1}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.scored_tokens == 1:  # the learning curve leaves out the first of a text
            raise ValueError("scored_tokens must be 0, for all, or at least 2, got 1")
        files = {name: getattr(self, name) for name in ("train", "valid", "test")}
        lacking = [f"--{name}" for name, path in files.items() if path is None]
        if 0 < len(lacking) < len(files) or (lacking and self.corpus == "own"):
            raise ValueError(
                "your own text needs the three files --train, --valid and --test, "
                f"got no {' and no '.join(lacking)}"
            )
        if not lacking:
            object.__setattr__(self, "corpus", "own")


PAPER = tuned(
    LanguageConfig(
        # How these came about: docs/paper.md.
        training=Training(epochs=520, decay_to=0.25),
        search=Search(seconds=430.0),
    ),
    "language",
    "paper",
)
PRESETS = {
    "smoke": LanguageConfig(
        tokens=5_000,
        scored_tokens=500,
        network=Network(hidden=32, embedding=16),
        training=Training(epochs=1, batch=8, bptt=20),
        memory=200,
        mbpa=Local(steps=5, k=20),
        combined=Local(steps=2, k=20),
        dynamic=Dynamic(decay=0.002, statistics=20, statistics_batch=10, mbpa=Local(steps=2, k=10)),
        search=Search(tokens=20, dynamic_tokens=20, seconds=0.15, scoring_seconds=0.02),
    ),
    "quick": LanguageConfig(
        corpus="wikitext-2",
        vocabulary=5_000,
        tokens=200_000,
        scored_tokens=10_000,
        network=Network(hidden=200, embedding=100),
        training=Training(
            epochs=5,
            batch=16,
            averages=(0.99,),
            dropouts=Dropouts(words=0.0, input=0.2, recurrent=0.2, output=0.2, projected=0.1),
        ),
        memory=2_000,
        mbpa=Local(lr=0.5, steps=1, k=128),
        combined=Local(lr=0.5, steps=1, k=128),
        dynamic=Dynamic(decay=0.002, statistics=100, on_top=False),
        search=Search(tokens=100, dynamic_tokens=500, seconds=0.8, scoring_seconds=0.1),
    ),
    "paper": PAPER,
    "paper-wikitext-2": tuned(
        LanguageConfig(
            corpus="wikitext-2",
            network=Network(hidden=1853, embedding=241),
            training=Training(
                epochs=200,
                batch=128,
                weight_decay=1.1e-6,
                decay_to=0.1,
                dropouts=Dropouts(projected=0.4),
            ),
            # Adam the paper did not try here either; MbPA on top would take ten minutes.
            dynamic=Dynamic(adam_lr=0.0, on_top=False),
            search=Search(tokens=5_000, dynamic_tokens=5_000, seconds=250.0, scoring_seconds=210.0),
        ),
        "language",
        "paper-wikitext-2",
    ),
}
