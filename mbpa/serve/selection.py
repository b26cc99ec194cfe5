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
from mbpa.serve.training import Training, held_out, trained_head

REHEARSALS = 3
ASKED = 0.25  # share of each old label's examples used as queries in a rehearsal
SHOTS = 3  # examples per new label in a rehearsal
NEW = 1 / 3  # share of the labels that are new in a rehearsal
# Share of the rehearsed queries of old labels that may be lost, or one query. On other queries the
# loss is larger.
MOST_LOST = 0.003


@dataclass(frozen=True)
class Manner:
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


START = Manner(reach=0.0, offset=0.0, lr="auto", steps=20)
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
    """See `Manner`."""
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


def rehearsed(
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
        staged(keys, labels, held_out(labels, generator, ASKED), training, generator)
        for _ in range(REHEARSALS)
    ]
    there = [task for task in tasks if task is not None]
    return choose(there, progress) if there else None


def staged(
    keys: Float[Tensor, "N D"],
    labels: Int[Tensor, "N"],
    held: Bool[Tensor, "N"],
    training: Training,
    generator: torch.Generator,
    most_queries: int = 1000,
) -> Rehearsal | None:
    """Set up a rehearsal that treats some labels as new; `None` if there are too few examples."""
    counts = labels.bincount()
    rich = (counts > SHOTS).nonzero()[:, 0]
    new = rich[torch.randperm(len(rich), generator=generator)[: int(NEW * len(counts))]]
    if not len(new) or len(counts) - len(new) < 2:
        return None
    is_new = torch.isin(labels, new)
    order = torch.cat([torch.tensor(sorted(set(range(len(counts))) - set(new.tolist()))), new])
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    numbered, known = places[labels], len(order) - len(new)
    shots = torch.cat([_some(labels == label, SHOTS, generator) for label in new])
    fit = ~held & ~is_new
    head = trained_head(
        keys[fit], numbered[fit], known, training, (keys[held & ~is_new], numbered[held & ~is_new])
    )
    unused = is_new.clone()
    unused[shots] = False
    old = _some(held & ~is_new, most_queries, generator)
    asked = torch.cat([old, _some(unused, most_queries // 2, generator)])
    if not 0 < len(old) < len(asked):
        return None
    in_memory = torch.cat([fit.nonzero()[:, 0], shots])
    return Rehearsal(
        head, keys[in_memory], numbered[in_memory], keys[asked], numbered[asked], len(order)
    )


def _some(wanted: Bool[Tensor, "N"], most: int, generator: torch.Generator) -> Int[Tensor, "S"]:
    places = wanted.nonzero()[:, 0]
    return places[torch.randperm(len(places), generator=generator)[:most]]


def choose(tasks: Sequence[Rehearsal], progress: bool = False) -> Choice:
    """Return the settings with the best mean score over the rehearsals."""
    trials = [_Trials(task) for task in tasks]
    found, score = START, _mean(trials, START)
    known = max(fmean(each.alone for each in trials), score.old)
    most_lost = max(MOST_LOST, 1 / sum(each.old_queries for each in trials)) + 1e-9

    def worth(score: Score) -> tuple[float, float, float]:
        """Rank by accuracy on new labels, but first penalise losing too many old answers."""
        return min(0.0, score.old - known + most_lost), score.new, -score.loss

    total = sum(math.prod(map(len, grid.values())) for grid in GRIDS)
    with tqdm(total=total, desc="rehearsing", file=sys.stderr, disable=not progress) as bar:
        for grid in GRIDS:
            for manner in _varied(found, grid):
                another = _mean(trials, manner)
                if worth(another) > worth(score):
                    found, score = manner, another
                bar.update()
    nearest = fmean(each.nearest for each in trials)
    return Choice(_predictor(found, nearest), found.reach, found.offset, score)


def _varied(manner: Manner, grid: Grid) -> Iterator[Manner]:
    for values in itertools.product(*grid.values()):
        yield replace(manner, **dict(zip(grid, values, strict=True)))


def _mean(trials: Sequence[_Trials], manner: Manner) -> Score:
    return Score(*map(fmean, zip(*(each.score(manner) for each in trials), strict=True)))


def _predictor(manner: Manner, nearest: float) -> mbpa.Predictor:
    width = manner.bandwidth * nearest
    kernel = mbpa.gaussian(width) if width else mbpa.inverse_distance()
    return mbpa.Adapted(mbpa.Gradient(manner.lr, manner.steps), k=manner.k, kernel=kernel)


class _Trials:
    """Scores many settings on one rehearsal; the neighbours of its queries are read only once."""

    def __init__(self, task: Rehearsal) -> None:
        self._task, self._old = task, task.head.out_features
        memory = mbpa.ExactMemory(len(task.keys), task.keys.shape[1])
        memory.write(task.keys, task.labels)
        most = max(k for grid in GRIDS for k in grid.get("k", (START.k,)))
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

    def score(self, manner: Manner) -> Score:
        rows = replace(self._rows, scale=manner.reach * self._even, offset=manner.offset)
        assert isinstance(self._head, nn.Linear)
        with torch.no_grad():
            self._head.weight[self._old :] = rows.weights(self._new_sums)
            self._head.bias[self._old :] = rows.biases
        self._model.predictor = _predictor(manner, self.nearest)
        logs = self._model(keys=self._task.queries, neighbors=self._neighbors)
        loss = float(functional.nll_loss(logs, self._task.answers))
        return self._shares(logs.argmax(1))._replace(loss=loss)

    def _shares(self, said: Int[Tensor, "Q"]) -> Score:
        right = (said == self._task.answers).double()
        return Score(float(right[self._is_new].mean()), float(right[~self._is_new].mean()), 0.0)
