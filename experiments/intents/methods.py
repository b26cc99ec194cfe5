"""Classifiers that can be taught, behind one small interface, and their settings.

Settings make a `Classifier` from what is known at the start (`Start`). The classifier is then
taught and queried. Classifiers of other libraries fit in the same way: they may use the sentences'
texts where ours use the keys. `comparison` lists the methods that are compared.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

import mbpa
from experiments.intents import heads
from experiments.intents.task import Sentences
from experiments.logistic import fit_logistic
from experiments.methods import UNSCALED, PredictorSettings, Scale, Vote, make_kernel
from mbpa.encoders import text
from mbpa.teaching import Learner, fit_learner

SPARE_ENTRIES = 4096  # capacity of a memory for further examples
REGRESSION_TOLERANCE = 1e-6  # of the regression, where three new sentences are among ten thousand


@dataclass(frozen=True, eq=False)
class Start:
    """The starting point of a method: a classifier of the known intents, and its training data."""

    known: Sentences
    head: nn.Linear
    """Head over the known intents only."""
    intents: int
    """Number of intents, including those to come."""
    seed: int
    encoder: str = text.DEFAULT_ENCODER
    """Name of the encoder that made the keys."""
    head_epochs: int = 20
    head_lr: float = 0.03
    """How the head was trained."""

    @cached_property
    def learner(self) -> Learner:
        """A learner fitted to the known intents; several methods share it."""
        found = fit_learner(
            self.known.keys, self.known.labels, self.head, self._train_head, seed=self.seed
        )
        if found is None:
            raise ValueError(f"there must be enough intents for a rehearsal, got {self.old}")
        return found

    def _train_head(
        self, keys: Float[Tensor, "N D"], labels: Int[Tensor, "N"], classes: int
    ) -> nn.Linear:
        return heads.train_new_head(
            keys, labels, classes, epochs=self.head_epochs, lr=self.head_lr, seed=self.seed
        )

    @property
    def old(self) -> int:
        """Number of known intents; their labels are below this."""
        return self.head.out_features


class Classifier(abc.ABC):
    """A classifier that knows the intents of a start and can be taught examples of any intent."""

    @abc.abstractmethod
    def learn(self, new: Sentences) -> None:
        """Learn more examples, in addition to all previous ones."""

    @abc.abstractmethod
    def log_probs(self, queries: Sentences) -> Float[Tensor, "Q C"]:
        """Return the log-probability of every intent for each query. Implementations must not look
        at the queries' labels. If a method gives scores that are not probabilities, it must convert
        them itself.
        """

    def score_scope(self, queries: Sentences) -> Float[Tensor, "Q"]:
        """Return a score that tells queries of an intent from out-of-scope ones, which should have
        lower scores. By default this is the confidence.
        """
        return self.log_probs(queries).amax(1).exp()

    def decide(self, queries: Sentences, answered_share: float) -> Bool[Tensor, "Q"] | None:
        """Return which queries are answered if at most this share of out-of-scope ones may be;
        `None` if the method has no such setting.
        """
        return None


@dataclass(frozen=True)
class ClassifierSettings(abc.ABC):
    """Settings of a method that is more than a predictor with a memory."""

    @abc.abstractmethod
    def classifier(self, start: Start) -> Classifier:
        """Return the classifier as deployed, before anything new."""


# Heads


@dataclass(frozen=True)
class DeployedHead(ClassifierSettings):
    """The head as it was deployed; it cannot be taught."""

    def classifier(self, start: Start) -> Classifier:
        return RefittedHead(
            start, lambda _: heads.grow_head(start.head, start.intents), only_old=True
        )


@dataclass(frozen=True)
class HeadTraining(ClassifierSettings):
    """A head that is trained further, from its deployed state, whenever something is taught."""

    on: Literal["new", "everything"] = "everything"
    """Examples to train on: only the taught ones, or those of the known intents as well."""
    epochs: int = 5
    """Number of epochs, in batches of 256.
    On new examples alone, an epoch is one step on all of them.
    """
    lr: float = 0.01
    """Learning rate of Adam."""

    def __post_init__(self) -> None:
        if self.epochs < 1 or not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"epochs must be at least 1, lr positive, got {self}")

    def classifier(self, start: Start) -> RefittedHead:
        return RefittedHead(start, lambda new: self.head(start, new))

    def head(self, start: Start, new: Sentences) -> nn.Linear:
        """Return the head after the new examples."""
        given = new if self.on == "new" else start.known + new
        # Only the number of steps keeps the old intents from being forgotten, so it must not grow
        # with the number of examples.
        batch = max(1, len(new)) if self.on == "new" else heads.BATCH_EXAMPLES
        return heads.train_head(
            heads.grow_head(start.head, start.intents),
            given.keys,
            given.labels,
            epochs=self.epochs,
            lr=self.lr,
            seed=start.seed,
            batch=batch,
        )


@dataclass(frozen=True)
class LogisticRegression(ClassifierSettings):
    """Logistic regression on all examples, fit to the optimum whenever something is taught."""

    penalty: float = 1.0
    """Penalty on the weights, relative to a sum over sentences: the inverse of scikit-learn's C."""
    balanced: bool = False
    """Whether every intent has the same weight, instead of every sentence."""

    def __post_init__(self) -> None:
        if not self.penalty > 0:
            raise ValueError(f"penalty must be positive, got {self.penalty}")

    def classifier(self, start: Start) -> RefittedHead:
        last = heads.grow_head(start.head, start.intents)

        def fit(new: Sentences) -> nn.Linear:
            nonlocal last
            given = start.known + new
            # An intent without examples has no optimum: its bias would fall forever.
            present, labels = given.labels.unique(return_inverse=True)
            fitted = fit_logistic(
                heads.select_rows(last, present),
                given.keys,
                labels,
                penalty=self.penalty,
                balanced=self.balanced,
                tolerance=REGRESSION_TOLERANCE,
            )
            last = heads.replace_rows(last, present, fitted)
            return last

        return RefittedHead(start, fit)


class RefittedHead(Classifier):
    """A head that is rebuilt from all new examples so far.

    Args:
        made: builds the head from these examples.
        only_old: whether the head must never predict a new intent.
    """

    def __init__(
        self, start: Start, made: Callable[[Sentences], nn.Linear], only_old: bool = False
    ) -> None:
        self._start, self._make_head, self._only_old = start, made, only_old
        self._new = start.known.select(torch.arange(0))
        self._head: nn.Linear = heads.grow_head(start.head, start.intents)

    def learn(self, new: Sentences) -> None:
        self._new = self._new + new
        self._head = self._make_head(self._new)

    def log_probs(self, queries: Sentences) -> Float[Tensor, "Q C"]:
        outputs: Tensor = self._head(queries.keys)
        if self._only_old:
            outputs[:, self._start.old :] = -torch.inf
        return outputs.log_softmax(1)


# Means


@dataclass(frozen=True)
class ClassMeans(ClassifierSettings):
    """The intent with the nearest mean, by angle."""

    sharpness: float = 20.0
    """Factor that turns cosines into logits."""

    def __post_init__(self) -> None:
        if not self.sharpness > 0:
            raise ValueError(f"sharpness must be positive, got {self.sharpness}")

    def classifier(self, start: Start) -> NearestMean:
        return NearestMean(start, self.sharpness)


class NearestMean(Classifier):
    """Sums of keys, one per intent."""

    def __init__(self, start: Start, sharpness: float) -> None:
        self._sharpness = sharpness
        self.sums = start.known.keys.new_zeros(start.intents, start.known.keys.shape[1])
        self.learn(start.known)

    def learn(self, new: Sentences) -> None:
        self.sums.index_add_(0, new.labels, new.keys)

    def log_probs(self, queries: Sentences) -> Float[Tensor, "Q C"]:
        known = self.sums.square().sum(1) > 0
        outputs = self._sharpness * queries.keys @ F.normalize(self.sums, dim=1).mT
        return outputs.masked_fill(~known, -torch.inf).log_softmax(1)


# Memories


class MemoryClassifier(Classifier):
    """A memory of all sentences, and a predictor that reads it; new sentences are only written.

    Args:
        memory: filled with the known sentences, or more; by default a new one is made.
    """

    def __init__(
        self, start: Start, settings: PredictorSettings, memory: mbpa.Memory | None = None
    ) -> None:
        if memory is None:
            memory = make_memory(start.known)
        self.start, self.settings, self.memory = start, settings, memory
        self._predictor = settings.predictor()
        self.model = self._bind(heads.grow_head(start.head, start.intents))

    def learn(self, new: Sentences) -> None:
        self.memory.write(new.keys, new.labels)

    def log_probs(
        self, queries: Sentences, neighbors: mbpa.Neighbors | None = None
    ) -> Float[Tensor, "Q C"]:
        return self.model(keys=queries.keys, neighbors=neighbors)

    def _bind(self, head: nn.Linear) -> mbpa.MbPA:
        return mbpa.MbPA(head=head, memory=self.memory, predictor=self._predictor)


class MeanRowsClassifier(MemoryClassifier):
    """A classifier whose rows of new intents are their means, updated with every example."""

    settings: MeanRows

    def __init__(self, start: Start, settings: MeanRows, memory: mbpa.Memory | None = None) -> None:
        super().__init__(start, settings, memory)
        entries = self.memory.entries()
        self._sums = start.known.keys.new_zeros(start.intents, start.known.keys.shape[1])
        self._sums.index_add_(0, entries.values, entries.keys)
        self.model = self._bind(self._make_head())

    def learn(self, new: Sentences) -> None:
        super().learn(new)
        self._sums.index_add_(0, new.labels, new.keys)
        self.model = self._bind(self._make_head())

    def _make_head(self) -> nn.Linear:
        return heads.add_mean_rows(
            heads.grow_head(self.start.head, self.start.intents),
            self._sums,
            old=self.start.old,
            scale=self.settings.scale,
            offset=self.settings.offset,
        )


class RetrainedClassifier(MemoryClassifier):
    """A classifier whose head is trained further, as in `HeadTraining`, whenever something is
    taught.
    """

    settings: AdaptationOnRetrained

    def __init__(
        self, start: Start, settings: AdaptationOnRetrained, memory: mbpa.Memory | None = None
    ) -> None:
        super().__init__(start, settings, memory)
        self._new = start.known.select(torch.arange(0))

    def learn(self, new: Sentences) -> None:
        super().learn(new)
        self._new = self._new + new
        self.use(self.settings.retraining.head(self.start, self._new))

    def use(self, head: nn.Linear) -> None:
        """Replace the head."""
        self.model = self._bind(head)


def make_memory(sentences: Sentences) -> mbpa.ExactMemory:
    """Return a memory of these sentences, with room for more."""
    memory = mbpa.ExactMemory(
        len(sentences) + SPARE_ENTRIES, sentences.keys.shape[1], device=sentences.keys.device
    )
    memory.write(sentences.keys, sentences.labels)
    return memory


@dataclass(frozen=True)
class GradientAdaptation(Vote):
    """Gradient steps of adaptation to the neighbours."""

    lr: float = 10.0
    """Learning rate of the adaptation."""
    steps: int = 20
    """Number of adaptation steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 1 or not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"steps must be at least 1, lr positive, got {self}")

    def predictor(self, scale: Scale = UNSCALED) -> mbpa.Predictor:
        rule = mbpa.Gradient(self.lr, self.steps)
        return mbpa.Adapted(rule, k=self.k, kernel=make_kernel(self.bandwidth, scale))


@dataclass(frozen=True)
class DefaultAdaptation(PredictorSettings):
    """An adaptation without settings: the paper's kernel, the library's other defaults, and steps
    that follow the neighbours.
    """

    def predictor(self, scale: Scale = UNSCALED) -> mbpa.Predictor:
        return mbpa.Adapted(kernel=mbpa.InverseDistance())


@dataclass(frozen=True)
class AutoStepAdaptation(Vote):
    """Steps that follow the neighbours; number and weighting of the neighbours are set."""

    def predictor(self, scale: Scale = UNSCALED) -> mbpa.Predictor:
        return mbpa.Adapted(k=self.k, kernel=make_kernel(self.bandwidth, scale))


@dataclass(frozen=True)
class OptimalAdaptation(Vote):
    """The optimum of the adaptation, `mbpa.MAP`."""

    prior: float = 1e-3
    """Cost of moving the parameters."""

    def predictor(self, scale: Scale = UNSCALED) -> mbpa.Predictor:
        rule = mbpa.MAP(self.prior, tolerance=1e-3)  # accuracies are the same with less
        return mbpa.Adapted(rule, k=self.k, kernel=make_kernel(self.bandwidth, scale))


@dataclass(frozen=True)
class AdaptationOnRetrained(GradientAdaptation):
    """Local adaptation of a head that is first trained on all examples."""

    retraining: HeadTraining = field(default_factory=HeadTraining)


@dataclass(frozen=True)
class MeanRows(PredictorSettings):
    """Rows of new intents in closed form (`heads.add_mean_rows`); nothing is adapted."""

    scale: float = 15.0
    """Scale of the new rows."""
    offset: float = 1.0
    """How much new intents are favoured, in logits."""

    def __post_init__(self) -> None:
        if not (self.scale > 0 and math.isfinite(self.offset)):
            raise ValueError(f"scale must be positive, offset finite, got {self}")

    def predictor(self, scale: Scale = UNSCALED) -> mbpa.Predictor:
        return mbpa.Parametric()


@dataclass(frozen=True)
class AdaptedMeanRows(MeanRows, GradientAdaptation):
    """Rows in closed form, followed by local adaptation."""

    lr: float = 3.0
    steps: int = 5

    def __post_init__(self) -> None:
        MeanRows.__post_init__(self)
        GradientAdaptation.__post_init__(self)

    def predictor(self, scale: Scale = UNSCALED) -> mbpa.Predictor:
        return GradientAdaptation.predictor(self, scale)


# From settings to classifiers

IntentMethodSettings = ClassifierSettings | PredictorSettings
"""The common type of all methods' settings."""


def make_classifier(settings: IntentMethodSettings, start: Start) -> Classifier:
    """Return the classifier as deployed, before anything new."""
    if isinstance(settings, ClassifierSettings):
        return settings.classifier(start)
    return make_memory_classifier(settings, start)


def make_memory_classifier(
    settings: PredictorSettings, start: Start, memory: mbpa.Memory | None = None
) -> MemoryClassifier:
    """Return the classifier with a memory that these settings describe.

    Args:
        memory: filled with the known sentences, or more; by default a new one is made.
    """
    if isinstance(settings, MeanRows):
        return MeanRowsClassifier(start, settings, memory)
    if isinstance(settings, AdaptationOnRetrained):
        return RetrainedClassifier(start, settings, memory)
    return MemoryClassifier(start, settings, memory)
