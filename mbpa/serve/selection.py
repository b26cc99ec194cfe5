"""Selection of how a run adapts and makes rows for new labels, by rehearsing its use.

In a rehearsal, a head is trained without some of the labels, which are then taught with a few
examples each. The chosen settings answer most queries of these labels correctly while losing hardly
any correct answers to the others.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

import mbpa
from mbpa.modules.new_rows import NewRows, even_scale, label_sums
from mbpa.modules.split import grow
from mbpa.serve.training import Training, choose_held_out, train_head

REHEARSALS = 3
QUERY_FRACTION = 0.25  # of each old label's examples, used as queries in a rehearsal
EXAMPLES_PER_NEW_LABEL = 3  # in a rehearsal
NEW_LABEL_FRACTION = 1 / 3  # of the labels are new in a rehearsal
# Of the rehearsed queries of old labels, at most this fraction, or one query, may be lost. On other
# queries the loss is larger.
MAX_LOST_FRACTION = 0.003


@dataclass(frozen=True)
class Candidate:
    """One combination of settings to try."""

    reach: float
    """Distance of new rows from the mean of the trained rows, relative to that of trained rows.
    1: equally far; 0: all new rows are at the mean."""
    offset: float
    lr: float | Literal["auto"]
    steps: int
    k: int = 20
    bandwidth: float = 0.5
    """Bandwidth of a Gaussian kernel, relative to the mean distance to the nearest example. 0 means
    the inverse-distance kernel."""


FIRST_CANDIDATE = Candidate(reach=0.0, offset=0.0, lr="auto", steps=20)
Grid = Mapping[str, Sequence[Any]]
GRIDS: tuple[Grid, ...] = (
    {"lr": ("auto", 10.0)},  # adaptation alone; new rows stay at the mean of the trained ones
    {
        "reach": (0.5, 0.75, 1.0, 1.5),
        "offset": (0.0, 1.0, 2.0, 3.0),
        "lr": (1.0, 3.0),
        "steps": (5,),
    },
    {"k": (10, 20, 50), "bandwidth": (0.0, 0.25, 0.5, 1.0)},
    {"offset": tuple(half / 2 for half in range(-2, 11))},
)
"""Grids searched one after the other; other settings keep the best values found so far."""


class Score(NamedTuple):
    """Shares of correct answers for new and old labels, and the mean −log p(label) over all."""

    new: float
    old: float
    loss: float


@dataclass(frozen=True)
class Choice:
    """The best settings found, and their score."""

    predictor: mbpa.Predictor
    reach: float
    offset: float
    """See `Candidate`."""
    score: Score


@dataclass(frozen=True)
class Rehearsal:
    """A head trained on some of the labels, a memory that also has a few examples of the others,
    and queries of both kinds."""

    head: nn.Linear
    keys: Float[Tensor, "M D"]
    labels: Int[Tensor, "M"]
    queries: Float[Tensor, "Q D"]
    answers: Int[Tensor, "Q"]
    classes: int


def rehearse(
    keys: Float[Tensor, "N D"],
    labels: Int[Tensor, "N"],
    training: Training,
    generator: torch.Generator,
    progress: bool = False,
) -> Choice | None:
    """Choose settings by several rehearsals, each with different new labels and held-out examples.

    Returns `None` if there are too few examples for a rehearsal.
    """
    tasks = [
        stage_rehearsal(
            keys, labels, choose_held_out(labels, generator, QUERY_FRACTION), training, generator
        )
        for _ in range(REHEARSALS)
    ]
    there = [task for task in tasks if task is not None]
    return choose(there, progress) if there else None


def stage_rehearsal(
    keys: Float[Tensor, "N D"],
    labels: Int[Tensor, "N"],
    held: Bool[Tensor, "N"],
    training: Training,
    generator: torch.Generator,
    most_queries: int = 1000,
) -> Rehearsal | None:
    """Set up a rehearsal that treats some labels as new; `None` if there are too few examples."""
    counts = labels.bincount()
    rich = (counts > EXAMPLES_PER_NEW_LABEL).nonzero()[:, 0]
    new = rich[
        torch.randperm(len(rich), generator=generator)[: int(NEW_LABEL_FRACTION * len(counts))]
    ]
    if not len(new) or len(counts) - len(new) < 2:
        return None
    is_new = torch.isin(labels, new)
    order = torch.cat([torch.tensor(sorted(set(range(len(counts))) - set(new.tolist()))), new])
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    numbered, known = places[labels], len(order) - len(new)
    shots = torch.cat(
        [_sample(labels == label, EXAMPLES_PER_NEW_LABEL, generator) for label in new]
    )
    fit = ~held & ~is_new
    head = train_head(
        keys[fit], numbered[fit], known, training, (keys[held & ~is_new], numbered[held & ~is_new])
    )
    unused = is_new.clone()
    unused[shots] = False
    old = _sample(held & ~is_new, most_queries, generator)
    asked = torch.cat([old, _sample(unused, most_queries // 2, generator)])
    if not 0 < len(old) < len(asked):
        return None
    in_memory = torch.cat([fit.nonzero()[:, 0], shots])
    return Rehearsal(
        head, keys[in_memory], numbered[in_memory], keys[asked], numbered[asked], len(order)
    )


def _sample(wanted: Bool[Tensor, "N"], most: int, generator: torch.Generator) -> Int[Tensor, "S"]:
    places = wanted.nonzero()[:, 0]
    return places[torch.randperm(len(places), generator=generator)[:most]]


def choose(
    tasks: Sequence[Rehearsal],
    progress: bool = False,
    max_lost_fraction: float = MAX_LOST_FRACTION,
) -> Choice:
    """Return the settings with the best mean score over the rehearsals.

    Args:
        max_lost_fraction: fraction of the queries of old labels for which a correct answer may be
            lost; one query may always be lost.
    """
    trials = [_Scorer(task) for task in tasks]
    found, score = FIRST_CANDIDATE, _average_scores(trials, FIRST_CANDIDATE)
    known = max(fmean(each.alone for each in trials), score.old)
    max_lost = max(max_lost_fraction, 1 / sum(each.old_queries for each in trials)) + 1e-9

    def worth(score: Score) -> tuple[float, float, float]:
        """Rank by accuracy on new labels, but first penalise losing too many old answers."""
        return min(0.0, score.old - known + max_lost), score.new, -score.loss

    total = sum(math.prod(map(len, grid.values())) for grid in GRIDS)
    with tqdm(total=total, desc="rehearsing", file=sys.stderr, disable=not progress) as bar:
        for grid in GRIDS:
            for candidate in _vary(found, grid):
                another = _average_scores(trials, candidate)
                if worth(another) > worth(score):
                    found, score = candidate, another
                bar.update()
    nearest = fmean(each.nearest for each in trials)
    return Choice(_make_predictor(found, nearest), found.reach, found.offset, score)


def _vary(candidate: Candidate, grid: Grid) -> Iterator[Candidate]:
    for values in itertools.product(*grid.values()):
        yield replace(candidate, **dict(zip(grid, values, strict=True)))


def _average_scores(trials: Sequence[_Scorer], candidate: Candidate) -> Score:
    return Score(*map(fmean, zip(*(each.score(candidate) for each in trials), strict=True)))


def _make_predictor(candidate: Candidate, nearest: float) -> mbpa.Predictor:
    width = candidate.bandwidth * nearest
    kernel = mbpa.gaussian(width) if width else mbpa.inverse_distance()
    return mbpa.Adapted(mbpa.Gradient(candidate.lr, candidate.steps), k=candidate.k, kernel=kernel)


class _Scorer:
    """Scores many settings on one rehearsal; the neighbours of its queries are read only once."""

    def __init__(self, task: Rehearsal) -> None:
        self._task, self._old = task, task.head.out_features
        memory = mbpa.ExactMemory(len(task.keys), task.keys.shape[1])
        memory.write(task.keys, task.labels)
        most = max(k for grid in GRIDS for k in grid.get("k", (FIRST_CANDIDATE.k,)))
        self._neighbors = memory.read(task.queries, min(most, len(memory)))
        self.nearest = float(self._neighbors.distances[:, 0].sqrt().mean())
        self._head = grow(task.head, task.classes)
        self._model = mbpa.MbPA(head=self._head, memory=memory, predictor=mbpa.Parametric())
        sums = label_sums(task.keys, task.labels, task.classes)
        self._new_sums, weight = sums[self._old :], task.head.weight
        self._even = even_scale(weight, sums[: self._old])
        self._rows = NewRows.around(weight, task.head.bias, sums[: self._old])
        self._is_new = task.answers >= self._old
        self.old_queries = int((~self._is_new).sum())
        self.alone = self._shares(task.head(task.queries).argmax(1)).old
        """Share of queries of old labels that the head alone answers correctly."""

    def score(self, candidate: Candidate) -> Score:
        rows = replace(self._rows, scale=candidate.reach * self._even, offset=candidate.offset)
        assert isinstance(self._head, nn.Linear)
        with torch.no_grad():
            self._head.weight[self._old :] = rows.weights(self._new_sums)
            self._head.bias[self._old :] = rows.biases
        self._model.predictor = _make_predictor(candidate, self.nearest)
        logs = self._model(keys=self._task.queries, neighbors=self._neighbors)
        loss = float(functional.nll_loss(logs, self._task.answers))
        return self._shares(logs.argmax(1))._replace(loss=loss)

    def _shares(self, predicted: Int[Tensor, "Q"]) -> Score:
        right = (predicted == self._task.answers).double()
        return Score(float(right[self._is_new].mean()), float(right[~self._is_new].mean()), 0.0)
