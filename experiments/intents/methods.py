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
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

import mbpa
from experiments.intents import heads
from experiments.intents.task import Sentences
from experiments.logistic import logistic
from mbpa.encoders import text

ROOM = 4096  # capacity of a memory for further examples
TOLERANCE = 1e-6  # of the regression, where three new sentences are among ten thousand


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


@dataclass(frozen=True)
class Settings(abc.ABC):
    """Settings of a method."""

    @abc.abstractmethod
    def classifier(self, start: Start) -> Classifier:
        """Return the classifier as deployed, before anything new."""


# Heads


@dataclass(frozen=True)
class Parametric(Settings):
    """The head as it was deployed; it cannot be taught."""

    def classifier(self, start: Start) -> Classifier:
        return Refitted(start, lambda _: heads.grown(start.head, start.intents), only_old=True)


@dataclass(frozen=True)
class Trained(Settings):
    """A head that is trained further, from its deployed state, whenever something is taught."""

    on: Literal["new", "everything"] = "everything"
    """Examples to train on: only the taught ones, or those of the known intents as well."""
    epochs: int = 5
    """Number of epochs, in batches of 256; on new examples alone, an epoch is one step on all of
    them.
    """
    lr: float = 0.01
    """Learning rate of Adam."""

    def __post_init__(self) -> None:
        if self.epochs < 1 or not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"epochs must be at least 1, lr positive, got {self}")

    def classifier(self, start: Start) -> Refitted:
        return Refitted(start, lambda new: self.head(start, new))

    def head(self, start: Start, new: Sentences) -> nn.Linear:
        """Return the head after the new examples."""
        given = new if self.on == "new" else start.known + new
        # Only the number of steps keeps the old intents from being forgotten, so it must not grow
        # with the number of examples.
        batch = max(1, len(new)) if self.on == "new" else heads.BATCH
        return heads.trained(
            heads.grown(start.head, start.intents),
            given.keys,
            given.labels,
            epochs=self.epochs,
            lr=self.lr,
            seed=start.seed,
            batch=batch,
        )


@dataclass(frozen=True)
class Logistic(Settings):
    """Logistic regression on all examples, fitted to the optimum whenever something is taught."""

    penalty: float = 1.0
    """Penalty on the weights, relative to a sum over sentences: the inverse of scikit-learn's C."""
    balanced: bool = False
    """Whether every intent has the same weight, instead of every sentence."""

    def __post_init__(self) -> None:
        if not self.penalty > 0:
            raise ValueError(f"penalty must be positive, got {self.penalty}")

    def classifier(self, start: Start) -> Refitted:
        last = heads.grown(start.head, start.intents)

        def fitted(new: Sentences) -> nn.Linear:
            nonlocal last
            given = start.known + new
            last = logistic(
                last,
                given.keys,
                given.labels,
                penalty=self.penalty,
                balanced=self.balanced,
                tolerance=TOLERANCE,
            )
            return last

        return Refitted(start, fitted)


class Refitted(Classifier):
    """A head that is rebuilt from all new examples so far.

    Args:
        made: builds the head from these examples.
        only_old: whether the head must never predict a new intent.
    """

    def __init__(
        self, start: Start, made: Callable[[Sentences], nn.Linear], only_old: bool = False
    ) -> None:
        self._start, self._made, self._only_old = start, made, only_old
        self._new = start.known.chosen(torch.arange(0))
        self._head: nn.Linear = heads.grown(start.head, start.intents)

    def learn(self, new: Sentences) -> None:
        self._new = self._new + new
        self._head = self._made(self._new)

    def log_probs(self, queries: Sentences) -> Float[Tensor, "Q C"]:
        outputs: Tensor = self._head(queries.keys)
        if self._only_old:
            outputs[:, self._start.old :] = -torch.inf
        return outputs.log_softmax(1)


# Means


@dataclass(frozen=True)
class Means(Settings):
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


class Remembering(Classifier):
    """A memory of all sentences, and a predictor that reads it; new sentences are only written.

    Args:
        memory: filled with the known sentences, or more; by default a new one is made.
    """

    def __init__(
        self, start: Start, settings: Recalling, memory: mbpa.Memory | None = None
    ) -> None:
        if memory is None:
            memory = filled_memory(start.known)
        self.start, self.settings, self.memory = start, settings, memory
        self._predictor = settings.predictor()
        self.model = self._bound(heads.grown(start.head, start.intents))

    def learn(self, new: Sentences) -> None:
        self.memory.write(new.keys, new.labels)

    def log_probs(
        self, queries: Sentences, neighbors: mbpa.Neighbors | None = None
    ) -> Float[Tensor, "Q C"]:
        return self.model(keys=queries.keys, neighbors=neighbors)

    def _bound(self, head: nn.Linear) -> mbpa.MbPA:
        return mbpa.MbPA(head=head, memory=self.memory, predictor=self._predictor)


class WithRows(Remembering):
    """A classifier whose rows of new intents are their means, updated with every example."""

    settings: Rows

    def __init__(self, start: Start, settings: Rows, memory: mbpa.Memory | None = None) -> None:
        super().__init__(start, settings, memory)
        entries = self.memory.entries()
        self._sums = start.known.keys.new_zeros(start.intents, start.known.keys.shape[1])
        self._sums.index_add_(0, entries.values, entries.keys)
        self.model = self._bound(self._made())

    def learn(self, new: Sentences) -> None:
        super().learn(new)
        self._sums.index_add_(0, new.labels, new.keys)
        self.model = self._bound(self._made())

    def _made(self) -> nn.Linear:
        return heads.with_means(
            heads.grown(self.start.head, self.start.intents),
            self._sums,
            old=self.start.old,
            scale=self.settings.scale,
            offset=self.settings.offset,
        )


class OnRetrained(Remembering):
    """A classifier whose head is trained further whenever something is taught, as in `Trained`."""

    settings: LocalOnRetrained

    def __init__(
        self, start: Start, settings: LocalOnRetrained, memory: mbpa.Memory | None = None
    ) -> None:
        super().__init__(start, settings, memory)
        self._new = start.known.chosen(torch.arange(0))

    def learn(self, new: Sentences) -> None:
        super().learn(new)
        self._new = self._new + new
        self.use(self.settings.retraining.head(self.start, self._new))

    def use(self, head: nn.Linear) -> None:
        """Replace the head."""
        self.model = self._bound(head)


def filled_memory(sentences: Sentences) -> mbpa.ExactMemory:
    """Return a memory of these sentences, with room for more."""
    memory = mbpa.ExactMemory(
        len(sentences) + ROOM, sentences.keys.shape[1], device=sentences.keys.device
    )
    memory.write(sentences.keys, sentences.labels)
    return memory


class Recalling(Settings):
    """Settings of a predictor."""

    @abc.abstractmethod
    def predictor(self) -> mbpa.Predictor:
        """Return the predictor with these settings."""

    def classifier(self, start: Start, memory: mbpa.Memory | None = None) -> Remembering:
        return Remembering(start, self, memory)


@dataclass(frozen=True)
class Vote(Recalling):
    """A vote of the neighbours."""

    k: int = 20
    """Number of neighbours."""
    bandwidth: float = 0.0
    """Bandwidth of a Gaussian kernel; 0 selects the paper's inverse distance."""

    def __post_init__(self) -> None:
        if self.k < 1 or self.bandwidth < 0:
            raise ValueError(f"k must be at least 1, bandwidth not negative, got {self}")

    def predictor(self) -> mbpa.Predictor:
        return mbpa.NeighborVote(_kernel(self.bandwidth), k=self.k)


@dataclass(frozen=True)
class Mixed(Vote):
    """A mixture of the head's probabilities and those of a vote."""

    weight: float = 0.5
    """Weight of the vote, between 0 and 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.weight <= 1:
            raise ValueError(f"weight must be between 0 and 1, got {self.weight}")

    def predictor(self) -> mbpa.Predictor:
        shares = (1 - self.weight, self.weight)
        return mbpa.Mixture(mbpa.Parametric(), super().predictor(), weights=shares)


@dataclass(frozen=True)
class Local(Vote):
    """Gradient steps of adaptation to the neighbours."""

    lr: float = 10.0
    steps: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 1 or not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"steps must be at least 1, lr positive, got {self}")

    def predictor(self) -> mbpa.Predictor:
        rule = mbpa.Gradient(self.lr, self.steps)
        return mbpa.Adapted(rule, k=self.k, kernel=_kernel(self.bandwidth))


@dataclass(frozen=True)
class Untold(Recalling):
    """An adaptation without settings: the library's defaults, with steps that follow the
    neighbours.
    """

    def predictor(self) -> mbpa.Predictor:
        return mbpa.Adapted()


@dataclass(frozen=True)
class AutoStep(Vote):
    """Steps that follow the neighbours; number and weighting of the neighbours are set."""

    def predictor(self) -> mbpa.Predictor:
        return mbpa.Adapted(k=self.k, kernel=_kernel(self.bandwidth))


@dataclass(frozen=True)
class Optimum(Vote):
    """The optimum of the adaptation, `mbpa.MAP`."""

    prior: float = 1e-3

    def predictor(self) -> mbpa.Predictor:
        rule = mbpa.MAP(self.prior, tolerance=1e-3)  # accuracies are the same with less
        return mbpa.Adapted(rule, k=self.k, kernel=_kernel(self.bandwidth))


@dataclass(frozen=True)
class LocalOnRetrained(Local):
    """Local adaptation of a head that is first trained on all examples."""

    retraining: Trained = field(default_factory=Trained)

    def classifier(self, start: Start, memory: mbpa.Memory | None = None) -> OnRetrained:
        return OnRetrained(start, self, memory)


@dataclass(frozen=True)
class Rows(Recalling):
    """Rows of new intents in closed form (`heads.with_means`); nothing is adapted."""

    scale: float = 15.0
    """Scale of the new rows."""
    offset: float = 1.0
    """How much new intents are favoured, in logits."""

    def __post_init__(self) -> None:
        if not (self.scale > 0 and math.isfinite(self.offset)):
            raise ValueError(f"scale must be positive, offset finite, got {self}")

    def predictor(self) -> mbpa.Predictor:
        return mbpa.Parametric()

    def classifier(self, start: Start, memory: mbpa.Memory | None = None) -> WithRows:
        return WithRows(start, self, memory)


@dataclass(frozen=True)
class LocalRows(Rows, Local):
    """Rows in closed form, followed by local adaptation."""

    lr: float = 3.0
    steps: int = 5

    def __post_init__(self) -> None:
        Rows.__post_init__(self)
        Local.__post_init__(self)

    def predictor(self) -> mbpa.Predictor:
        return Local.predictor(self)


def _kernel(bandwidth: float) -> mbpa.kernels.Kernel:
    return mbpa.gaussian(bandwidth) if bandwidth else mbpa.inverse_distance()
