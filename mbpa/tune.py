"""Choice of a predictor by its score on validation data, or on the memory's own entries.

Every entry, left out of the memory in turn, is a query whose answer is known. The neighbours are
read once, as many as any candidate needs, and serve all candidates.

Shapes: B queries at a time, Q in all, K neighbours, C classes.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from tqdm import tqdm

from mbpa.kernels import Kernel, gaussian, inverse_distance
from mbpa.memory import Neighbors, validation
from mbpa.memory.neighbors import TENSORS
from mbpa.model import READ_BYTES, MbPA
from mbpa.modules.head import own_precision
from mbpa.predictors import Adapted, Context, Mixture, Parametric, Predictor, in_short
from mbpa.rules import AUTO, Gradient

Objective = Literal["loss", "accuracy"]
SHOWN = 12  # trials printed per result


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
    queries: int
    left_out: bool
    """Whether the queries were entries of the memory itself, each left out in turn."""

    @property
    def best(self) -> Predictor:
        """The predictor with the best score."""
        return self.trials[0].predictor

    def __str__(self) -> str:
        asked = "entries, each left out of the memory in turn" if self.left_out else "queries"
        lines = [f"{len(self.trials)} predictors by {self.objective}, on {self.queries} {asked}"]
        for trial in self.trials[:SHOWN]:
            share = "" if trial.accuracy is None else f"{100 * trial.accuracy:6.1f}%"
            lines.append(f"{trial.loss:9.4f} {share}  {in_short(trial.predictor)}")
        if (more := len(self.trials) - SHOWN) > 0:
            lines.append(f"    and {more} more in trials")
        return "\n".join(lines)


class LeftOut(NamedTuple):
    """Entries, and the prediction for each by a memory that does not hold it."""

    ids: Int[Tensor, "Q"]
    values: Shaped[Tensor, "Q *V"]
    predictions: Float[Tensor, "Q *C"]
    """Log-probabilities, or values for regression targets."""


def tune(
    model: MbPA,
    x: Any = None,
    y: Shaped[Tensor, "Q *V"] | Sequence[Any] | None = None,
    *,
    keys: Float[Tensor, "Q *D"] | None = None,
    values: Shaped[Tensor, "Q *V"] | Sequence[Any] | None = None,
    predictors: Sequence[Predictor] | None = None,
    k: Sequence[int] = (10, 20, 50),
    lr: Sequence[float | Literal["auto"]] = (AUTO,),
    steps: Sequence[int] = (5, 20),
    decay: Sequence[float] = (0.0,),
    bandwidth: Sequence[float] = (0.0, 0.5, 1.0),
    weight: Sequence[float] = (1.0, 0.75, 0.5),
    objective: Objective = "loss",
    balanced: bool = False,
    queries: int = 1000,
    seed: int = 0,
    adopt: bool = False,
    progress: bool = False,
) -> Tuning:
    """Score predictors on validation data, or on the memory's own entries, and rank them.

    Without validation data, each entry is left out of the memory while it is predicted. A head
    that was trained on these entries then looks better than it is, so prefer separate validation
    data if you have some. The model's current predictor and `Parametric` are always tried, too.

    Args:
        model: the model to tune.
        x: validation inputs; default: the memory's own entries.
        y: labels or targets of `x`.
        keys: keys from `embed`, to be used instead of `x`.
        values: labels or targets of `keys`.
        predictors: predictors to try. By default, adaptations with all combinations of the
            following six arguments.
        k: numbers of neighbours.
        lr: learning rates of gradient steps; "auto" derives one from each query's neighbours.
        steps: numbers of gradient steps.
        decay: strengths of the pull back to the head's parameters.
        bandwidth: bandwidths of a Gaussian kernel, in units of the mean distance from a query to
            its nearest neighbour; 0 stands for the inverse-distance kernel.
        weight: weights of the adaptation in a mixture with the head alone; 1 is the adaptation
            without a mixture.
        objective: "loss", the mean of −log p or of half the squared error; or "accuracy", with
            ties broken by the loss.
        balanced: give every label the same total weight, however many queries have it. This suits
            new labels with few examples among others with many.
        queries: maximum number of entries or inputs to score; more are sampled at random.
        seed: seed of that sample.
        adopt: assign the best predictor to the model.
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
        >>> found = mbpa.tune(model, adopt=True)
        >>> model.predictor is found.best
        True
    """
    if objective not in ("loss", "accuracy"):
        raise ValueError(f"objective must be 'loss' or 'accuracy', got {objective!r}")
    if objective == "accuracy" and not model.memory.holds_labels:
        raise ValueError("accuracy is for labels, the memory holds regression targets")
    if balanced and not model.memory.holds_labels:
        raise ValueError("balanced is for labels, the memory holds regression targets")
    asked = _asked(model, x, y, keys, values)
    asked = _drawn(asked, validation.count("queries", queries), seed, balanced)
    grid = _Grid(tuple(k), tuple(lr), tuple(steps), tuple(decay), tuple(bandwidth), tuple(weight))
    search = _Search(model, grid if predictors is None else _listed(predictors))
    search.measure(asked)
    for block in _blocks(model, asked, search.k, search.keys_for, progress):
        search.score(*block)
    trials = search.trials(objective)
    if adopt:
        model.predictor = trials[0].predictor
    return Tuning(trials, objective, len(asked.keys), left_out=asked.ids is not None)


def leave_one_out(
    model: MbPA,
    predictor: Predictor | None = None,
    *,
    queries: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> LeftOut:
    """Predict each entry by the memory without it.

    Entries whose label gets a low probability are probably mislabelled. The predictions also serve
    to choose a threshold for abstaining.

    Args:
        model: the model whose entries are predicted.
        predictor: default: the model's own.
        queries: maximum number of entries, sampled at random; default: all.
        seed: seed of that sample.
        progress: show a progress bar on standard error.
    """
    predictor = predictor or model.predictor
    if queries is not None:
        validation.count("queries", queries)
    predictor.check(model._head.running, model.memory)
    asked = _drawn(_entries(model), queries, seed)
    found = []
    for keys, _, _, neighbors in _blocks(model, asked, predictor.k, predictor.keys_for, progress):
        with own_precision(keys):
            found.append(predictor(model._context(keys, neighbors).nearest(predictor.k)))
    assert asked.ids is not None
    return LeftOut(asked.ids, asked.values, torch.cat(found))


# Queries


class _Asked(NamedTuple):
    keys: Float[Tensor, "Q *D"]
    values: Shaped[Tensor, "Q *V"]
    ids: Int[Tensor, "Q"] | None
    """Ids of the entries if the queries are entries, else `None`."""
    shares: Float[Tensor, "Q"]
    """Weight of each query; the sum is Q."""


def _asked(model: MbPA, x: Any, y: Any, keys: Tensor | None, values: Any) -> _Asked:
    if x is None and keys is None:
        if y is not None or values is not None:
            raise ValueError("values need what they are of: give x and y, or keys= and values=")
        return _entries(model)
    if x is not None and (keys is not None or values is not None):
        raise ValueError("give x and y, or keys= and values=, one of the two")
    given = y if x is not None else values
    if given is None:
        raise ValueError("give the labels or targets too: x and y, or keys= and values=")
    if not len(model.memory):
        raise ValueError("the memory must hold entries to adapt to, it is empty")
    keys = model.embed(x) if keys is None else keys
    memory = model.memory
    given = validation.parse_values(given, memory.value_dtype)
    if not (keys.shape[1:] == memory.key_shape and len(keys)):
        expected = ("Q", *memory.key_shape)
        raise ValueError(f"keys must have shape {expected}, Q at least 1, got {tuple(keys.shape)}")
    if given.shape != (len(keys), *memory.value_shape):
        raise ValueError(
            f"values must have shape {(len(keys), *memory.value_shape)}, got {tuple(given.shape)}"
        )
    model.check_labels(given)
    return _Asked(keys, given.to(keys.device), None, torch.ones(len(keys)))


def _entries(model: MbPA) -> _Asked:
    ids, keys, values = model.memory.entries()
    if len(ids) < 2:
        raise ValueError(f"to leave one out, the memory must hold two entries, it holds {len(ids)}")
    model.check_labels(values)
    values = values.long() if model.memory.holds_labels else values
    return _Asked(keys, values, ids, torch.ones(len(ids)))


def _drawn(asked: _Asked, most: int | None, seed: int, balanced: bool = False) -> _Asked:
    """Sample at most `most` of the queries, in their original order, and set their weights."""
    keys, values, ids, shares = asked
    count = len(keys)
    order = torch.arange(count)
    if most is not None and count > most:
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        if balanced:  # take the first query of each label, then the second of each, and so on
            labels = values.cpu()[order]
            by_label = labels.argsort(stable=True)
            sizes = labels.bincount()
            ranks = torch.arange(count) - (sizes.cumsum(0) - sizes)[labels[by_label]]
            order = order[by_label[ranks.argsort(stable=True)]]
        order = order[:most].sort().values
    there = order.to(keys.device)
    if balanced:
        labels = values[there].cpu()
        sizes = labels.bincount()
        shares = len(order) / (int((sizes > 0).sum()) * sizes[labels].double())
    else:
        shares = shares[order]
    return _Asked(keys[there], values[there], None if ids is None else ids[order], shares)


Block = tuple[Float[Tensor, "B *D"], Shaped[Tensor, "B *V"], Float[Tensor, "B"], Neighbors]


def _blocks(model: MbPA, asked: _Asked, k: int, keys_for: int, progress: bool) -> Iterator[Block]:
    """Yield blocks of queries with their values, weights and at least the k nearest other entries.

    There may be fewer neighbours if the memory does not hold k.
    """
    memory, extra = model.memory, int(asked.ids is not None)
    k = max(1, k)
    keys_for = keys_for + extra if keys_for else 0
    rows = _at_once(model, keys_for)
    starts = range(0, len(asked.keys), rows)
    for start in tqdm(starts, desc="asking", unit="block", file=sys.stderr, disable=not progress):
        part = slice(start, start + rows)
        neighbors = memory.read(asked.keys[part], k + extra, keys_for=keys_for)
        if asked.ids is not None:
            neighbors = without(neighbors, asked.ids[part])
        yield asked.keys[part], asked.values[part], asked.shares[part], neighbors


def _at_once(model: MbPA, keys_for: int) -> int:
    """Return the number of queries per block."""
    key_bytes = model.memory.key_size * model.memory.distance_dtype.itemsize
    return min(256, max(1, READ_BYTES // (max(1, keys_for) * key_bytes)))  # for a bar that moves


def without(neighbors: Neighbors, ids: Int[Tensor, "B"]) -> Neighbors:
    """Remove from each query's neighbours the one with the given id.

    Where that id is not among them, the last neighbour is removed, so that all rows keep the same
    length.
    """
    width = neighbors.ids.shape[1]
    if width < 2:
        raise ValueError(f"there must be two neighbors to leave one out, got {width}")
    is_own = neighbors.ids == ids.to(neighbors.ids.device)[:, None]
    kept = is_own.to(torch.int8).argsort(dim=1, stable=True)[:, : width - 1]

    def of_others(tensor: Tensor) -> Tensor:
        places = kept[:, : max(0, tensor.shape[1] - 1)]  # only some neighbours may have keys
        places = places.reshape(*places.shape, *(1,) * (tensor.ndim - 2))
        return tensor.gather(1, places.expand(-1, -1, *tensor.shape[2:]))

    others: dict[str, Any] = {name: of_others(getattr(neighbors, name)) for name in TENSORS}
    return replace(neighbors, **others)


# Candidates


@dataclass(frozen=True)
class _Grid:
    """All combinations of settings of an adaptation; the data decide the unit of bandwidths."""

    k: tuple[int, ...]
    lr: tuple[float | Literal["auto"], ...]
    steps: tuple[int, ...]
    decay: tuple[float, ...]
    bandwidth: tuple[float, ...]
    weight: tuple[float, ...]

    def __post_init__(self) -> None:
        for name, values in vars(self).items():
            if not values:
                raise ValueError(f"{name} must name at least one value, got none")
        for value in (*self.bandwidth, *self.weight):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"bandwidth and weight must not be negative, got {value}")
        if max(self.weight) > 1:
            raise ValueError(f"weight must be at most 1, got {max(self.weight)}")
        if 0 in self.weight:
            raise ValueError("weight 0 is Parametric(), which is always tried")

    def predictors(self, nearest: float) -> list[Adapted]:
        kernels: list[Kernel] = [
            gaussian(each * nearest) if each else inverse_distance() for each in self.bandwidth
        ]
        rules = [
            Gradient(lr, steps, decay)
            for lr, steps, decay in itertools.product(self.lr, self.steps, self.decay)
            if steps > 1 or decay == min(self.decay)  # decay has no effect in a single step
        ]
        every = itertools.product(self.k, kernels, rules)
        return [Adapted(rule, k, kernel) for k, kernel, rule in every]


def _listed(predictors: Sequence[Predictor]) -> tuple[Predictor, ...]:
    for predictor in predictors:
        if not isinstance(predictor, Predictor):
            raise ValueError(f"predictors must be such, got {predictor!r}")
    if not predictors:
        raise ValueError("predictors must name at least one, got none")
    return tuple(predictors)


class _Search:
    """Sums of loss and accuracy over all queries, for every candidate."""

    def __init__(self, model: MbPA, wanted: _Grid | tuple[Predictor, ...]) -> None:
        self.model, self.wanted = model, wanted
        self.always: list[Predictor] = [model.predictor, Parametric()]
        known = [*self.always, *(wanted if isinstance(wanted, tuple) else wanted.predictors(1.0))]
        for predictor in known:
            predictor.check(model._head.running, model.memory)
        self.k = max(predictor.k for predictor in known)
        self.keys_for = max(predictor.keys_for for predictor in known)
        self.nearest: float | None = None  # the unit of bandwidths
        self.predictors: list[Predictor] = []
        self.sums: list[Tensor] = []
        self.count = 0

    def measure(self, asked: _Asked) -> None:
        """Measure the unit of bandwidths in advance, if the queries take more than one block."""
        if isinstance(self.wanted, tuple) or not any(self.wanted.bandwidth):
            return
        if len(asked.keys) <= _at_once(self.model, self.keys_for + 1):
            return
        found = [
            _to_nearest(neighbors)
            for *_, neighbors in _blocks(self.model, asked, self.k, keys_for=0, progress=False)
        ]
        self.nearest = _mean(torch.cat(found))

    def score(
        self,
        keys: Float[Tensor, "B *D"],
        values: Shaped[Tensor, "B *V"],
        shares: Float[Tensor, "B"],
        neighbors: Neighbors,
    ) -> None:
        """Add the scores of every candidate on one block of queries."""
        self.nearest = self.nearest or _mean(_to_nearest(neighbors))
        with own_precision(keys):
            context = self.model._context(keys, neighbors)
            for place, (predictor, prediction) in enumerate(self._predictions(context)):
                here = values.to(prediction.device), shares.to(prediction.device)
                found = _scores(prediction, *here, context.has_labels)
                if place == len(self.sums):
                    self.predictors.append(predictor)
                    self.sums.append(torch.zeros_like(found))
                self.sums[place] += found
        self.count += len(keys)

    def _predictions(self, context: Context) -> Iterator[tuple[Predictor, Tensor]]:
        given = self.wanted if isinstance(self.wanted, tuple) else ()
        for predictor in (*self.always, *given):
            yield predictor, predictor(context.nearest(predictor.k))
        if isinstance(self.wanted, _Grid):
            assert self.nearest is not None
            for adapted in self.wanted.predictors(self.nearest):
                prediction = adapted(context.nearest(adapted.k))
                for weight in self.wanted.weight:
                    yield _in_mixture(adapted, prediction, weight, context)

    def trials(self, objective: Objective) -> tuple[Trial, ...]:
        found: list[Trial] = []
        for place, (predictor, sums) in enumerate(zip(self.predictors, self.sums, strict=True)):
            if predictor in self.predictors[:place]:
                continue  # the model's current predictor may also be in the grid
            loss, right = (sums / self.count).tolist()
            has_labels = self.model.memory.holds_labels
            loss = loss if math.isfinite(loss) else math.inf
            found.append(Trial(predictor, loss, right if has_labels else None))
        by_accuracy = objective == "accuracy"
        return tuple(sorted(found, key=lambda t: (-(t.accuracy or 0) * by_accuracy, t.loss)))


def _in_mixture(
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


def _scores(
    prediction: Float[Tensor, "B *C"],
    values: Shaped[Tensor, "B *V"],
    shares: Float[Tensor, "B"],
    has_labels: bool,
) -> Float[Tensor, "2"]:
    """Return the weighted sums of losses and of correct predictions."""
    if has_labels:
        losses = -prediction.gather(1, values[:, None])[:, 0].double()
        right = (prediction.argmax(1) == values).double()
    else:
        losses = (prediction - values).double().square().flatten(1).sum(1) / 2
        right = torch.zeros_like(losses)
    return torch.stack([losses, right]) @ shares.double()


def _to_nearest(neighbors: Neighbors) -> Float[Tensor, "B"]:
    """Return the squared distance from each query to its nearest entry at a distance above 0.

    The result is infinite where there is none.
    """
    return neighbors.distances.masked_fill(neighbors.distances == 0, math.inf).amin(1)


def _mean(squares: Float[Tensor, "Q"]) -> float:
    """Return the mean of the finite distances, given their squares."""
    squares = squares[squares.isfinite()]
    return float(squares.sqrt().mean()) if len(squares) else 1.0  # all keys are in one place
