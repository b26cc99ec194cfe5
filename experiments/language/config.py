"""Protocol and settings of language modelling, with its presets."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import mbpa
from experiments.config_checks import check_finite, check_minima, check_seeds
from experiments.language.network import Dropouts
from experiments.tuned_settings import apply_tuned_settings
from mbpa.kernels import Kernel


@dataclass(frozen=True)
class NetworkSizes:
    """Sizes of the language model."""

    hidden: int = 1194
    """Number of units of the LSTM."""
    embedding: int = 268
    """Size of a word's vector, and of the input of the softmax layer."""

    def __post_init__(self) -> None:
        check_minima(self, dict.fromkeys(vars(self), 1))


@dataclass(frozen=True)
class TrainingSettings:
    """Training of the language model."""

    epochs: int = 400
    """Number of passes over the training text."""
    batch: int = 64
    """Number of positions of the text that are read in parallel; fewer if the text is too short."""
    bptt: int = 35
    """Number of tokens through which gradients are propagated back."""
    lr: float = 0.003
    """Learning rate of Adam."""
    beta1: float = 0.0
    """Adam's decay rate of the mean gradient; 0 after Melis et al. (2018)."""
    beta2: float = 0.999
    """Adam's decay rate of the mean squared gradient."""
    weight_decay: float = 3.55e-6
    """Factor of the weights that is added to the gradient of the mean loss per token."""
    clip: float = 0.286
    """Maximum norm of the gradient."""
    dropouts: Dropouts = field(default_factory=Dropouts)
    state_reset: float = 0.01
    """Probability that a sequence's state is reset between two batches."""
    averages: tuple[float, ...] = (0.9995, 0.9999, 0.99999)
    """Decay rates of averages of the weights.
    The rate is lower at first, so that an average covers at most about the last ninth of the steps.
    If there are several averages, the one that does best on the validation text is tested.
    """
    decay_from: float = 0.55
    """Share of the training after which the learning rate falls linearly."""
    decay_to: float = 0.01
    """Share of the learning rate that remains at the end."""
    activation_penalty: float = 2.0
    """Penalty on the mean square of the LSTM's output after dropout (Merity et al., 2018)."""
    temporal_penalty: float = 1.0
    """Penalty on the mean squared difference between its outputs at adjacent tokens."""
    precision: Literal["single", "half"] = "single"
    """Precision of the computation; parameters and their updates are always in single precision.
    `half` computes the LSTM in float16 and the softmax layer in bfloat16. A step for WikiText-2
    then takes 0.6 of its time on an H200, where `single` multiplies matrices in TF32.
    """

    def __post_init__(self) -> None:
        check_minima(self, {"epochs": 0, "batch": 1, "bptt": 1})
        check_finite(
            self,
            positive=("lr", "clip"),
            not_negative=("weight_decay", "activation_penalty", "temporal_penalty"),
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
    """The neural cache (Grave et al., 2017): a vote of all remembered tokens, by dot products."""

    scale: float = 0.2
    """Factor of the dot product of two states; the vote is the softmax of the product."""
    window: int = 0
    """Number of most recent tokens that vote; 0 uses as many as MbPA remembers."""

    def __post_init__(self) -> None:
        if self.window < 0:
            raise ValueError(f"window must not be negative, got {self.window}")
        check_finite(self, positive=("scale",))


@dataclass(frozen=True)
class SoftmaxAdaptation:
    """Adaptation of the softmax layer by MbPA."""

    rule: Literal["gradient", "rmsprop", "adam", "map"] = "gradient"
    """Update rule; `map` is the optimum itself, with a prior instead of rate, steps and decay."""
    lr: float = 1.0
    """Learning rate of the adaptation."""
    steps: int = 20
    """Number of adaptation steps."""
    k: int = 128
    """Number of neighbours; the whole memory if it holds fewer."""
    decay: float = 0.0
    """Strength of the pull back to the layer's own parameters."""
    prior: float = 0.1
    """Cost of moving the parameters, for the rule `map`."""
    kernel: Literal["inverse_distance", "gaussian", "exp_dot", "uniform"] = "inverse_distance"
    """Weighting of the neighbours."""
    kernel_scale: float = 1.0
    """Bandwidth of the Gaussian kernel, or factor of the dot product."""

    def __post_init__(self) -> None:
        if min(self.steps, self.k) < 1:
            raise ValueError(f"steps and k must be at least 1, got {self.steps} and {self.k}")
        check_finite(self, positive=("lr", "prior", "kernel_scale"), not_negative=("decay",))

    @property
    def weighting(self) -> Kernel:
        """The kernel that weights the neighbours."""
        if self.kernel == "gaussian":
            return mbpa.gaussian(self.kernel_scale)
        if self.kernel == "exp_dot":
            return mbpa.exp_dot(self.kernel_scale)
        return mbpa.uniform() if self.kernel == "uniform" else mbpa.inverse_distance()

    def predictor(self, memory: int) -> mbpa.Adapted:
        """Return the predictor for a memory of this size."""
        rule: mbpa.Rule | mbpa.MAP = mbpa.Gradient(self.lr, self.steps, self.decay)
        if self.rule == "map":
            rule = mbpa.MAP(self.prior, tolerance=1e-3)
        elif self.rule != "gradient":
            kind = mbpa.RMSprop if self.rule == "rmsprop" else mbpa.Adam
            rule = kind(self.lr, self.steps, self.decay)
        return mbpa.Adapted(rule, k=min(self.k, memory), kernel=self.weighting)


@dataclass(frozen=True)
class RecentAdaptation:
    """A memory size, and how MbPA adapts to the neighbours found there."""

    memory: int = 5000
    """Number of most recent tokens that are remembered."""
    local: SoftmaxAdaptation = field(default_factory=SoftmaxAdaptation)

    def __post_init__(self) -> None:
        check_minima(self, {"memory": 1})


@dataclass(frozen=True)
class GatedMixture:
    """The mixture whose weights are decided per token, by a gate fitted on the validation text.

    Its adaptations differ in reach: in how many neighbours they use, how sharply these are weighted
    and how far the steps go. The gate decides per token how much each of them counts.
    """

    first: RecentAdaptation = field(default_factory=RecentAdaptation)
    second: RecentAdaptation = field(default_factory=RecentAdaptation)
    third: RecentAdaptation = field(default_factory=RecentAdaptation)
    k: int = 32
    """Number of nearest neighbours from which the gate judges a token's surroundings."""
    ridge: float = 1e-4
    """Penalty on the gate's squared coefficients."""

    def __post_init__(self) -> None:
        check_minima(self, {"k": 1})
        check_finite(self, positive=(), not_negative=("ridge",))

    @property
    def reaches(self) -> dict[str, RecentAdaptation]:
        """The adaptations by name; those that equal an earlier one are left out."""
        named = {"first": self.first, "second": self.second, "third": self.third}
        earlier = {reach: name for name, reach in reversed(named.items())}
        return {name: reach for name, reach in named.items() if earlier[reach] == name}


@dataclass(frozen=True)
class Dynamic:
    """Dynamic evaluation: the whole network keeps learning while it is tested."""

    lr: float = 5e-4
    """Learning rate, a factor of the gradient divided by its root mean square in training."""
    decay: float = 0.02
    """Strength of the pull back to the trained weights per segment.
    It is multiplied by the root mean square of a weight's gradient, relative to the mean over all.
    """
    segment: int = 5
    """Number of tokens per step, and through which gradients are propagated back."""
    epsilon: float = 2e-3
    """Added to the root mean square gradient that divides the gradient.
    With much smaller values, the weights of words that were rare in training jump.
    """
    statistics: int = 5_000
    """Maximum number of steps through the training text that give the mean squares."""
    statistics_batch: int = 100
    """Number of positions of the training text that such a step reads in parallel."""
    adam_lr: float = 1e-4
    """Learning rate of Adam as an alternative rule; 0 skips this variant."""
    on_top: bool = True
    """Whether to try MbPA on top; slow, because the layer then changes with every segment."""
    mbpa: SoftmaxAdaptation = field(default_factory=lambda: SoftmaxAdaptation(steps=5, k=64))
    """Adaptation by MbPA on top of dynamic evaluation."""

    def __post_init__(self) -> None:
        if min(self.segment, self.statistics, self.statistics_batch) < 1:
            raise ValueError(
                f"segment, statistics and statistics_batch must be at least 1, got {self}"
            )
        check_finite(self, positive=("lr", "epsilon"), not_negative=("adam_lr", "decay"))


@dataclass(frozen=True)
class SearchBudget:
    """Budget of a search for settings."""

    tokens: int = 12_000
    """Tokens of the validation text, evenly spaced, on which the cache and MbPA are judged."""
    dynamic_tokens: int = 40_000
    """Tokens from the beginning of the validation text on which dynamic evaluation is judged."""
    finalists: int = 4
    """Number of settings of each method that are judged again, on the whole validation text."""
    seconds: float = 600.0
    """Seconds after which nothing more of a method is tried.
    The cache and MbPA share one budget, and dynamic evaluation has one of its own. The finalists of
    each method have as much again, and the gated mixture has half as much. A trial that has begun
    is completed; training does not count.
    """
    max_neighbor_steps: int = 16_384
    """Maximum number of neighbours times steps of MbPA; settings beyond it are not tried.
    It bounds the time of the runs that follow.
    """

    def __post_init__(self) -> None:
        for name in ("tokens", "dynamic_tokens", "finalists", "max_neighbor_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        check_finite(self, positive=("seconds",))


@dataclass(frozen=True)
class LanguageConfig:
    """A trained LSTM is tested on running text, with and without a memory of that text."""

    seeds: tuple[int, ...] = (0,)
    """Random seeds, one trained network each."""
    corpus: Literal["ptb", "wikitext-2", "own"] = "ptb"
    """Penn Treebank, WikiText-2, or your own text; the three files below, if given, imply `own`."""
    train: Path | None = None
    """Your own training text: UTF-8, words separated by white space, one sentence per line."""
    valid: Path | None = None
    """Your own text for choosing settings."""
    test: Path | None = None
    """Your own test text."""
    vocabulary: int = 30_000
    """Maximum number of distinct words; all others are mapped to the unknown word.
    Applies to your own text and the beginning of a corpus; a whole corpus has its own vocabulary.
    """
    tokens: int = 0
    """Tokens of the training text to use, from its beginning; 0 uses all."""
    scored_tokens: int = 0
    """Tokens of the validation and test texts to use, from their beginning; 0 uses all."""
    network: NetworkSizes = field(default_factory=NetworkSizes)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    memory: int = 5000
    """Number of most recent tokens that are remembered."""
    adapted_words: int = 0
    """Number of most probable words per neighbour whose outputs MbPA adapts; 0 adapts all words.
    With fewer words, predictions are faster but not exact; records of the run state the error.
    """
    cache: Cache = field(default_factory=Cache)
    mbpa: SoftmaxAdaptation = field(default_factory=SoftmaxAdaptation)
    combined: SoftmaxAdaptation = field(default_factory=SoftmaxAdaptation)
    """MbPA when mixed with the cache. Mixture weights are solved for on the validation text."""
    one_step: SoftmaxAdaptation = field(
        default_factory=lambda: SoftmaxAdaptation(lr=2.0, steps=1, k=256)
    )
    """MbPA with a single step, as in the paper, and the settings that are best for one step.
    The memory is the paper's. Used to show which words gain.
    """
    gate: GatedMixture = field(default_factory=GatedMixture)
    dynamic: Dynamic = field(default_factory=Dynamic)
    search: SearchBudget = field(default_factory=SearchBudget)

    def __post_init__(self) -> None:
        check_seeds(self.seeds)
        check_minima(self, {"vocabulary": 1, "tokens": 0, "scored_tokens": 0, "memory": 1})
        check_minima(self, {"adapted_words": 0})
        if self.scored_tokens == 1:  # the learning curve omits a text's first token
            raise ValueError("scored_tokens must be 0, for all, or at least 2, got 1")
        files = {name: getattr(self, name) for name in ("train", "valid", "test")}
        lacking = [f"--{name}" for name, path in files.items() if path is None]
        if 0 < len(lacking) < len(files) or (lacking and self.corpus == "own"):
            raise ValueError(
                "your own text needs the three files --train, --valid and --test, "
                f"missing: {', '.join(lacking)}"
            )
        if not lacking:
            object.__setattr__(self, "corpus", "own")


PAPER = apply_tuned_settings(
    LanguageConfig(
        # docs/paper.md explains how these were found.
        training=TrainingSettings(epochs=520, decay_to=0.25),
        adapted_words=64,
        search=SearchBudget(
            dynamic_tokens=10_000, finalists=3, seconds=130.0, max_neighbor_steps=12_800
        ),
    ),
    "language",
    "paper",
)
PRESETS = {
    "smoke": LanguageConfig(
        tokens=5_000,
        scored_tokens=500,
        network=NetworkSizes(hidden=32, embedding=16),
        training=TrainingSettings(epochs=1, batch=8, bptt=20),
        memory=200,
        mbpa=SoftmaxAdaptation(steps=5, k=20),
        combined=SoftmaxAdaptation(steps=2, k=20),
        dynamic=Dynamic(
            decay=0.002, statistics=20, statistics_batch=10, mbpa=SoftmaxAdaptation(steps=2, k=10)
        ),
        search=SearchBudget(tokens=20, dynamic_tokens=20, seconds=30.0, max_neighbor_steps=640),
    ),
    "quick": LanguageConfig(
        corpus="wikitext-2",
        vocabulary=5_000,
        tokens=200_000,
        scored_tokens=10_000,
        network=NetworkSizes(hidden=200, embedding=100),
        training=TrainingSettings(
            epochs=5,
            batch=16,
            averages=(0.99,),
            dropouts=Dropouts(words=0.0, input=0.2, recurrent=0.2, output=0.2, projected=0.1),
        ),
        memory=2_000,
        mbpa=SoftmaxAdaptation(lr=0.5, steps=1, k=128),
        combined=SoftmaxAdaptation(lr=0.5, steps=1, k=128),
        dynamic=Dynamic(decay=0.002, statistics=100, on_top=False),
        search=SearchBudget(tokens=100, dynamic_tokens=500, seconds=120.0, max_neighbor_steps=640),
    ),
    "paper": PAPER,
    "paper-wikitext-2": apply_tuned_settings(
        LanguageConfig(
            corpus="wikitext-2",
            network=NetworkSizes(hidden=1853, embedding=241),
            training=TrainingSettings(
                epochs=280,
                batch=128,
                weight_decay=1.1e-6,
                decay_to=0.25,
                dropouts=Dropouts(projected=0.4),
                precision="half",
            ),
            # The paper did not try Adam here either. On Penn Treebank, dynamic evaluation was
            # better mixed with the gated mixture, which is cheap, than with MbPA on top.
            dynamic=Dynamic(adam_lr=0.0, on_top=False),
            adapted_words=64,
            search=SearchBudget(
                tokens=6_000,
                dynamic_tokens=6_000,
                finalists=2,
                seconds=110.0,
                max_neighbor_steps=5_120,
            ),
        ),
        "language",
        "paper-wikitext-2",
    ),
}
