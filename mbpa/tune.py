"""Choice of a predictor by its score on validation data, or on the memory's own entries.

The neighbours are read once, as many as any candidate needs, and serve all candidates.

Shapes: B queries at a time, Q in all, C classes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from mbpa.evaluation import LabelledQueries, QueryBatch, count_batch_rows, read_batches
from mbpa.kernels import Gaussian, InverseDistance, Kernel
from mbpa.memory import Neighbors, validation
from mbpa.model import MbPA
from mbpa.modules.head import own_precision
from mbpa.predictors import Adapted, Context, Mixture, Parametric, Predictor, in_short
from mbpa.rules import AUTO, Gradient

Objective = Literal["loss", "accuracy"]
MAX_PRINTED_TRIALS = 12


@dataclass(frozen=True)
class AdaptationGrid:
    """Adaptations with all combinations of these settings, for `tune`."""

    k: Sequence[int] = (10, 20, 50)
    """Numbers of neighbours."""
    lr: Sequence[float | Literal["auto"]] = (AUTO,)
    """Learning rates of gradient steps; "auto" derives one from each query's neighbours."""
    steps: Sequence[int] = (5, 20)
    """Numbers of gradient steps."""
    decay: Sequence[float] = (0.0,)
    """Strengths of the pull back to the head's parameters."""
    bandwidth: Sequence[float] = (0.0, 0.5, 1.0)
    """Bandwidths of a Gaussian kernel, in units of the mean distance from a query to its nearest
    neighbour; 0 stands for the inverse-distance kernel."""
    weight: Sequence[float] = (1.0, 0.75, 0.5)
    """Weights of the adaptation in a mixture with the head alone; 1 is the adaptation without a
    mixture."""

    def __post_init__(self) -> None:
        for field in fields(self):
            values = tuple(getattr(self, field.name))
            if not values:
                raise ValueError(f"{field.name} must have at least one value, got none")
            object.__setattr__(self, field.name, values)
        for value in (*self.bandwidth, *self.weight):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"bandwidth and weight must not be negative, got {value}")
        if max(self.weight) > 1:
            raise ValueError(f"weight must be at most 1, got {max(self.weight)}")
        if 0 in self.weight:
            raise ValueError("weight must be above 0: 0 is Parametric(), which is always tried")

    def make_adaptations(self, nearest: float) -> list[Adapted]:
        """Return the adaptations, without mixtures.

        Args:
            nearest: the unit of bandwidths.
        """
        kernels: list[Kernel] = [
            Gaussian(each * nearest) if each else InverseDistance() for each in self.bandwidth
        ]
        rules = [
            Gradient(lr, steps, decay)
            for lr, steps, decay in itertools.product(self.lr, self.steps, self.decay)
            if steps > 1 or decay == min(self.decay)  # decay has no effect in a single step
        ]
        every = itertools.product(self.k, kernels, rules)
        return [Adapted(rule, k, kernel) for k, kernel, rule in every]


@dataclass(frozen=True)
class Trial:
    """The scores of one predictor."""

    predictor: Predictor
    loss: float
    """Mean of −log p(label), or of half the squared error for regression targets."""
    accuracy: float | None
    """Share of labels predicted correctly, from 0 to 1; `None` for regression targets."""


@dataclass(frozen=True)
class Tuning:
    """The result of `tune`; print it for a table."""

    trials: tuple[Trial, ...]
    """All predictors that were tried, the best first."""
    objective: Objective
    """What the trials are ranked by."""
    queries: int
    """Number of queries that were scored."""
    left_out: bool
    """Whether the queries were entries of the memory itself, each left out in turn."""

    @property
    def best(self) -> Predictor:
        """The predictor with the best score."""
        return self.trials[0].predictor

    def __str__(self) -> str:
        asked = "entries, each left out of the memory in turn" if self.left_out else "queries"
        lines = [f"{len(self.trials)} predictors by {self.objective}, on {self.queries} {asked}"]
        for trial in self.trials[:MAX_PRINTED_TRIALS]:
            share = "" if trial.accuracy is None else f"{100 * trial.accuracy:6.1f}%"
            lines.append(f"{trial.loss:9.4f} {share}  {in_short(trial.predictor)}")
        if (more := len(self.trials) - MAX_PRINTED_TRIALS) > 0:
            lines.append(f"    and {more} more in trials")
        return "\n".join(lines)


def tune(
    model: MbPA,
    inputs: Any = None,
    values: Shaped[Tensor, "Q *V"] | Sequence[Any] | None = None,
    *,
    keys: Float[Tensor, "Q *D"] | None = None,
    candidates: AdaptationGrid | Sequence[Predictor] | None = None,
    objective: Objective = "loss",
    balanced: bool = False,
    queries: int = 1000,
    seed: int = 0,
    progress: bool = False,
) -> Tuning:
    """Score predictors on validation data, or on the memory's own entries, and rank them.

    Without validation data, each entry is left out of the memory while it is predicted. A head
    that was trained on these entries then looks better than it is, so prefer separate validation
    data if you have some. The model's current predictor and `Parametric` are always tried, too.

    Args:
        model: the model to tune; it is not changed.
        inputs: validation inputs; default: the memory's own entries.
        values: labels or targets of the inputs or keys.
        keys: keys from `embed`, to be used instead of inputs.
        candidates: the predictors to try, or a grid of settings for adaptations; by default
            `AdaptationGrid()`.
        objective: "loss", the mean of −log p or of half the squared error; or "accuracy", with
            ties broken by the loss.
        balanced: give every label the same total weight, however many queries have it. This suits
            new labels with few examples among others with many.
        queries: maximum number of entries or inputs to score; more are sampled at random.
        seed: seed of that sample.
        progress: show a progress bar on standard error.

    Example:
        >>> import torch, mbpa
        >>> model = mbpa.MbPA(
        ...     head=torch.nn.Linear(2, 2),
        ...     memory=mbpa.ExactMemory(capacity=100, key_dim=2),
        ...     predictor=mbpa.Adapted(),
        ... )
        >>> _ = torch.manual_seed(0)
        >>> keys = torch.randn(50, 2)
        >>> ids = model.write(keys, (keys[:, 0] > 0).long())
        >>> model.predictor = mbpa.tune(model).best
    """
    if objective not in ("loss", "accuracy"):
        raise ValueError(f"objective must be 'loss' or 'accuracy', got {objective!r}")
    if objective == "accuracy" and not model.memory.holds_labels:
        raise ValueError("accuracy is for labels, the memory holds regression targets")
    if balanced and not model.memory.holds_labels:
        raise ValueError("balanced is for labels, the memory holds regression targets")
    asked = LabelledQueries.from_arguments(model, inputs, values, keys)
    asked = asked.sample(validation.count("queries", queries), seed, balanced)
    search = _Search(model, AdaptationGrid() if candidates is None else candidates)
    search.measure(asked)
    for batch in read_batches(model, asked, search.known, progress):
        search.score(batch)
    trials = search.rank_trials(objective)
    return Tuning(trials, objective, len(asked.keys), left_out=asked.ids is not None)


class _Search:
    """Sums of loss and accuracy over all queries, for every candidate."""

    def __init__(self, model: MbPA, candidates: AdaptationGrid | Sequence[Predictor]) -> None:
        self._model = model
        self._grid = candidates if isinstance(candidates, AdaptationGrid) else None
        given = () if isinstance(candidates, AdaptationGrid) else _check_predictors(candidates)
        self._listed: list[Predictor] = [model.predictor, Parametric(), *given]
        self.known = [*self._listed, *(self._grid.make_adaptations(1.0) if self._grid else ())]
        """All candidates, with bandwidths that are not yet multiplied by their unit."""
        for predictor in self.known:
            model.check_predictor(predictor)
        self._nearest: float | None = None  # the unit of bandwidths
        self._predictors: list[Predictor] = []
        self._sums: list[Tensor] = []
        self._count = 0

    def measure(self, queries: LabelledQueries) -> None:
        """Measure the unit of bandwidths in advance, if the queries take more than one batch."""
        if self._grid is None or not any(self._grid.bandwidth):
            return
        keys_for = max(predictor.keys_for for predictor in self.known)
        if len(queries.keys) <= count_batch_rows(self._model, keys_for + 1):
            return
        found = [
            _square_nearest(batch.neighbors)
            for batch in read_batches(self._model, queries, self.known, with_keys=False)
        ]
        self._nearest = _average_distance(torch.cat(found))

    def score(self, batch: QueryBatch) -> None:
        """Add the scores of every candidate on one batch of queries."""
        self._nearest = self._nearest or _average_distance(_square_nearest(batch.neighbors))
        with own_precision(batch.keys):
            context = self._model.build_context(batch.keys, batch.neighbors)
            for place, (predictor, prediction) in enumerate(self._predict(context)):
                device = prediction.device
                values, weights = batch.values.to(device), batch.weights.to(device)
                found = _sum_scores(prediction, values, weights, context.has_labels)
                if place == len(self._sums):
                    self._predictors.append(predictor)
                    self._sums.append(torch.zeros_like(found))
                self._sums[place] += found
        self._count += len(batch.keys)

    def _predict(self, context: Context) -> Iterator[tuple[Predictor, Tensor]]:
        for predictor in self._listed:
            yield predictor, predictor(context.nearest(predictor.k))
        if self._grid is not None:
            assert self._nearest is not None
            for adapted in self._grid.make_adaptations(self._nearest):
                prediction = adapted(context.nearest(adapted.k))
                for weight in self._grid.weight:
                    yield _mix(adapted, prediction, weight, context)

    def rank_trials(self, objective: Objective) -> tuple[Trial, ...]:
        """Return all candidates with their scores, the best first."""
        found: list[Trial] = []
        for place, (predictor, sums) in enumerate(zip(self._predictors, self._sums, strict=True)):
            if predictor in self._predictors[:place]:
                continue  # the model's current predictor may also be in the grid
            loss, right = (sums / self._count).tolist()
            has_labels = self._model.memory.holds_labels
            loss = loss if math.isfinite(loss) else math.inf
            found.append(Trial(predictor, loss, right if has_labels else None))
        by_accuracy = objective == "accuracy"
        return tuple(sorted(found, key=lambda t: (-(t.accuracy or 0) * by_accuracy, t.loss)))


def _check_predictors(predictors: Sequence[Predictor]) -> Sequence[Predictor]:
    for predictor in predictors:
        if not isinstance(predictor, Predictor):
            raise ValueError(f"candidates must be predictors, got {predictor!r}")
    if not predictors:
        raise ValueError("candidates must have at least one predictor, got none")
    return predictors


def _mix(
    adapted: Adapted, prediction: Float[Tensor, "B *C"], weight: float, context: Context
) -> tuple[Predictor, Tensor]:
    """Mix a known prediction with the head's, as `Mixture` would, without computing it again."""
    if weight == 1:
        return adapted, prediction
    mixture = Mixture(Parametric(), adapted, weights=(1 - weight, weight))
    if not context.has_labels:
        return mixture, (1 - weight) * context.parametric + weight * prediction
    own, adapting = math.log(1 - weight), math.log(weight)
    return mixture, torch.logaddexp(context.parametric + own, prediction + adapting)


def _sum_scores(
    prediction: Float[Tensor, "B *C"],
    values: Shaped[Tensor, "B *V"],
    weights: Float[Tensor, "B"],
    has_labels: bool,
) -> Float[Tensor, "2"]:
    """Return the weighted sums of losses and of correct predictions."""
    if has_labels:
        losses = -prediction.gather(1, values[:, None])[:, 0].double()
        right = (prediction.argmax(1) == values).double()
    else:
        losses = (prediction - values).double().square().flatten(1).sum(1) / 2
        right = torch.zeros_like(losses)
    return torch.stack([losses, right]) @ weights.double()


def _square_nearest(neighbors: Neighbors) -> Float[Tensor, "B"]:
    """Return the squared distance from each query to its nearest entry at a distance above 0.

    The result is infinite where there is none.
    """
    return neighbors.distances.masked_fill(neighbors.distances == 0, math.inf).amin(1)


def _average_distance(squares: Float[Tensor, "Q"]) -> float:
    """Return the mean of the finite distances, given their squares."""
    squares = squares[squares.isfinite()]
    return float(squares.sqrt().mean()) if len(squares) else 1.0  # all keys are in one place
