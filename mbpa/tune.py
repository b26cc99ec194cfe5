"""Choose a predictor: by validation data, or where there is none by the memory's own entries.

Left out of the memory in turn, every entry is a query whose answer is known. One retrieval, with as
many neighbours as any predictor wants, serves all that are tried.

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
SHOWN = 12  # trials in a printed result


@dataclass(frozen=True)
class Trial:
    """How well one predictor did."""

    predictor: Predictor
    loss: float
    """The mean of −log p(label), or of half the squared error of targets."""
    accuracy: float | None
    """The share of labels that were right; none for targets."""


@dataclass(frozen=True)
class Tuning:
    """What `tune` found; print it for a table."""

    trials: tuple[Trial, ...]
    """All that was tried, the best first."""
    objective: Objective
    queries: int
    left_out: bool
    """Whether the queries were entries of the memory itself, each left out in turn."""

    @property
    def best(self) -> Predictor:
        """The predictor to use."""
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
    """Entries, and what is said of each by a memory without it."""

    ids: Int[Tensor, "Q"]
    values: Shaped[Tensor, "Q *V"]
    predictions: Float[Tensor, "Q *C"]
    """Log-probabilities, or values for targets."""


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
    """Try predictors, on validation data or on the memory's own entries; return what they did.

    Without data every entry that is asked about is left out of the memory for its own prediction.
    A head that was trained on these very entries then looks better than it is: prefer data of its
    own, where there is some. The model's predictor and `Parametric` are tried beside the others.

    Args:
        x, y: inputs and their labels or targets; or `keys` that `embed` gave, and `values`.
        predictors: to be tried, in place of adaptations with all combinations of the following.
        k: neighbours.
        lr: of gradient steps; "auto" follows each query's neighbours.
        steps: of the adaptation.
        decay: the pull back to the head's parameters.
        bandwidth: of a Gaussian kernel, in units of the mean distance from a query to its nearest
            neighbour; 0 is the inverse distance.
        weight: of the adaptation in a mixture with the head alone; 1 is the adaptation alone.
        objective: "loss", the mean of −log p or of half the squared error; or "accuracy", where
            loss decides among equals.
        balanced: let every label count the same, however many queries have it: for labels that have
            just been taught, among others with many examples.
        queries: at most so many entries or inputs are asked about, drawn at random.
        seed: of that draw.
        adopt: give the model the best predictor; else it is left as it is.
        progress: show a bar on standard error.

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
    """What is said of entries by the memory without them: probably wrong labels have a low
    probability, and thresholds for abstaining can be read off.

    Args:
        predictor: default: the model's own.
        queries: ask about so many at most, drawn at random; default: all.
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


# What is asked


class _Asked(NamedTuple):
    keys: Float[Tensor, "Q *D"]
    values: Shaped[Tensor, "Q *V"]
    ids: Int[Tensor, "Q"] | None
    """Of the entries, if the queries are entries."""
    shares: Float[Tensor, "Q"]
    """How much each counts; as many as there are in all."""


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
    """Some of them, in their order."""
    keys, values, ids, shares = asked
    count = len(keys)
    order = torch.arange(count)
    if most is not None and count > most:
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        if balanced:  # the first of each label, the second of each, and so on
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
    """Queries with their answers and at least the k nearest entries that are not themselves."""
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
    """Queries in a block."""
    key_bytes = model.memory.key_size * model.memory.distance_dtype.itemsize
    return min(256, max(1, READ_BYTES // (max(1, keys_for) * key_bytes)))  # for a bar that moves


def without(neighbors: Neighbors, ids: Int[Tensor, "B"]) -> Neighbors:
    """The neighbours of each query but the one of this id; where it is not among them, but the
    last, so that all have as many."""
    width = neighbors.ids.shape[1]
    if width < 2:
        raise ValueError(f"there must be two neighbors to leave one out, got {width}")
    is_own = neighbors.ids == ids.to(neighbors.ids.device)[:, None]
    kept = is_own.to(torch.int8).argsort(dim=1, stable=True)[:, : width - 1]

    def of_others(tensor: Tensor) -> Tensor:
        places = kept[:, : max(0, tensor.shape[1] - 1)]  # keys may be there for some only
        places = places.reshape(*places.shape, *(1,) * (tensor.ndim - 2))
        return tensor.gather(1, places.expand(-1, -1, *tensor.shape[2:]))

    others: dict[str, Any] = {name: of_others(getattr(neighbors, name)) for name in TENSORS}
    return replace(neighbors, **others)


# What is tried


@dataclass(frozen=True)
class _Grid:
    """Adaptations with all combinations of these; bandwidths in units that the data decide."""

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
            if steps > 1 or decay == min(self.decay)  # which does nothing in one step
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
    """Sums over all queries, for every predictor."""

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
        """Find the unit of bandwidths first, where one block does not tell it of all queries."""
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
        """Ask everyone about these queries."""
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
                continue  # the model's own may be in the grid
            loss, right = (sums / self.count).tolist()
            has_labels = self.model.memory.holds_labels
            loss = loss if math.isfinite(loss) else math.inf
            found.append(Trial(predictor, loss, right if has_labels else None))
        by_accuracy = objective == "accuracy"
        return tuple(sorted(found, key=lambda t: (-(t.accuracy or 0) * by_accuracy, t.loss)))


def _in_mixture(
    adapted: Adapted, prediction: Float[Tensor, "B *C"], weight: float, context: Context
) -> tuple[Predictor, Tensor]:
    """With the head alone; what `Mixture` gives, of parts that are known."""
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
    """The sum of losses, and how many are right."""
    if has_labels:
        losses = -prediction.gather(1, values[:, None])[:, 0].double()
        right = (prediction.argmax(1) == values).double()
    else:
        losses = (prediction - values).double().square().flatten(1).sum(1) / 2
        right = torch.zeros_like(losses)
    return torch.stack([losses, right]) @ shares.double()


def _to_nearest(neighbors: Neighbors) -> Float[Tensor, "B"]:
    """The squared distance from each query to its nearest entry elsewhere, if there is one."""
    return neighbors.distances.masked_fill(neighbors.distances == 0, math.inf).amin(1)


def _mean(squares: Float[Tensor, "Q"]) -> float:
    """Of distances that there are."""
    squares = squares[squares.isfinite()]
    return float(squares.sqrt().mean()) if len(squares) else 1.0  # all are in one place
