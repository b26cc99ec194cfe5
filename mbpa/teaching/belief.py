"""A Gaussian belief about each class, in closed form: the two-covariance model (PLDA).

Classes share one covariance W of their examples, and the class means vary with covariance B.
(Ioffe, "Probabilistic Linear Discriminant Analysis", 2006.) In coordinates z in which W is the
identity and B is diag(ψ), a class with n examples of mean z̄ predicts

    z ~ N(g z̄, diag v),    g = nψ / (1 + nψ),    v = 1 + ψ / (1 + nψ)

so a class with few examples is shrunk towards the centre and wide, one with many is sharp. The log
density is linear in (z², z), so a class is one row of weights.

`refine_belief` improves the coordinates by episodes in which some known classes play new ones.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

WITHIN_SHRINKAGE = 0.3  # of W towards a multiple of the identity
BETWEEN_SHRINKAGE = 0.1  # of ψ towards its mean: new classes also differ where known ones do not
TEMPERATURE = 0.2  # the coordinates are not independent, which the model assumes
MIN_EPISODES, MAX_EPISODES = 40, 200
EXAMPLES_PER_EPISODE = 5  # between these limits
LEARNING_RATE = 1e-3  # falls linearly to zero
QUERIES_PER_EPISODE = 256
MAX_MIXED = 384  # coordinates that are mixed, those in which class means differ most
NEW_FRACTION = 1 / 3  # of the classes play new ones in an episode
MAX_EXAMPLES = 10  # of a class that plays a new one


class BeliefRows(NamedTuple):
    """The log density of each class as weights: score = quadratic · z² + linear · z + bias."""

    quadratic: Float[Tensor, "C D"]
    linear: Float[Tensor, "C D"]
    bias: Float[Tensor, "C"]

    def score(self, points: Float[Tensor, "B D"]) -> Float[Tensor, "B C"]:
        """Return the scaled log density of each class at points in the belief's coordinates."""
        return points.square() @ self.quadratic.mT + points @ self.linear.mT + self.bias


@dataclass(frozen=True, eq=False)
class ClassBelief:
    """The coordinates z = (key − center) · transform, and the spread ψ of class means in them."""

    center: Float[Tensor, "D"]
    transform: Float[Tensor, "D D"]
    spread: Float[Tensor, "D"]
    temperature: Float[Tensor, ""]
    """Factor of all log densities."""
    new_offset: Float[Tensor, ""]
    """Amount added to the scores of classes that were not known at the start."""

    def locate(self, keys: Float[Tensor, "B D"]) -> Float[Tensor, "B D"]:
        """Return the coordinates of keys, or of means of keys."""
        return (keys - self.center) @ self.transform

    def make_rows(
        self, points: Float[Tensor, "C D"], counts: Float[Tensor, "C"], is_new: Bool[Tensor, "C"]
    ) -> BeliefRows:
        """Return one row per class, from the mean coordinates and the number of its examples."""
        mean, variance = self._predict(points, counts)
        constant = (mean.square() / variance + variance.log()).sum(1)
        scale = self.temperature
        bias = -0.5 * scale * constant + is_new * self.new_offset
        return BeliefRows(-0.5 * scale / variance, scale * mean / variance, bias)

    def score_pairs(
        self,
        points: Float[Tensor, "B D"],
        centers: Float[Tensor, "B D"],
        counts: Float[Tensor, "B"],
    ) -> Float[Tensor, "B"]:
        """Return the score of each point for a known class of its own."""
        mean, variance = self._predict(centers, counts)
        distance = ((points - mean).square() / variance + variance.log()).sum(1)
        return -0.5 * self.temperature * distance

    def _predict(
        self, points: Float[Tensor, "C D"], counts: Float[Tensor, "C"]
    ) -> tuple[Float[Tensor, "C D"], Float[Tensor, "C D"]]:
        certainty = counts[:, None] * self.spread
        return points * certainty / (1 + certainty), 1 + self.spread / (1 + certainty)

    def double(self) -> ClassBelief:
        """Return a copy in double precision."""
        return ClassBelief(*(getattr(self, each.name).double() for each in fields(self)))


def fit_belief(keys: Float[Tensor, "N D"], labels: Int[Tensor, "N"], classes: int) -> ClassBelief:
    """Estimate the belief from classes that all have examples, more in total than classes."""
    given = keys.double()
    counts = torch.bincount(labels, minlength=classes).double()
    means = average_by_label(given, labels, counts)
    center = means.mean(0)
    within = _compute_covariance(given - means[labels], len(given) - classes)
    size = within.shape[0]
    isotropic = within.trace().clamp_min(1e-12) / size * torch.eye(size, dtype=torch.float64)
    within = (1 - WITHIN_SHRINKAGE) * within + WITHIN_SHRINKAGE * isotropic
    whitening = torch.linalg.inv(torch.linalg.cholesky(within))
    between = _compute_covariance((means - center) @ whitening.mT, classes - 1)
    spread, directions = torch.linalg.eigh(between)
    spread = spread.clamp_min(0)
    spread = (1 - BETWEEN_SHRINKAGE) * spread + BETWEEN_SHRINKAGE * spread.mean()
    return ClassBelief(
        center.float(),
        (whitening.mT @ directions).float(),
        spread.clamp_min(1e-6).float(),
        torch.tensor(TEMPERATURE),
        torch.tensor(0.0),
    )


def average_by_label(
    keys: Float[Tensor, "N D"], labels: Int[Tensor, "N"], counts: Float[Tensor, "C"]
) -> Float[Tensor, "C D"]:
    """Return the mean key of each label."""
    sums = keys.new_zeros(len(counts), keys.shape[1]).index_add_(0, labels, keys)
    return sums / counts[:, None].to(keys.dtype)


def _compute_covariance(rows: Float[Tensor, "N D"], freedom: int) -> Float[Tensor, "D D"]:
    return rows.mT @ rows / max(1, freedom)


def refine_belief(
    belief: ClassBelief,
    keys: Float[Tensor, "N D"],
    labels: Int[Tensor, "N"],
    classes: int,
    *,
    seed: int,
    episodes: int | None = None,
) -> ClassBelief:
    """Improve the belief by Adam on episodes, by default more of them for more examples.

    In an episode a third of the classes have 1 to 10 examples, and queries of all classes are
    classified. A query of any other class is left out of its own class's mean. The changes learnt
    are z ← (z + zD) eˢ, ψ, the temperature and the offset of new classes. D concerns at most
    `MAX_MIXED` coordinates, so that the time does not grow with the square of the key size.
    """
    if episodes is None:
        episodes = min(max(len(keys) // EXAMPLES_PER_EPISODE, MIN_EPISODES), MAX_EPISODES)
    generator = torch.Generator().manual_seed(seed)
    points = belief.locate(keys)
    draws = _Episodes(points, labels, classes, generator)
    mixed = min(MAX_MIXED, points.shape[1])
    mixing = torch.zeros(mixed, mixed, requires_grad=True)
    scale = torch.zeros_like(belief.spread, requires_grad=True)
    spread = belief.spread.log().requires_grad_(True)
    temperature = belief.temperature.log().requires_grad_(True)
    offset = belief.new_offset.clone().requires_grad_(True)
    optimizer = torch.optim.Adam([mixing, scale, spread, temperature, offset], lr=LEARNING_RATE)
    for step in range(episodes):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - step / episodes)
        current = replace(
            belief, spread=spread.exp(), temperature=temperature.exp(), new_offset=offset
        )
        queries, answers, means, counts, is_new = draws.draw()
        moved = torch.cat([points[queries], means])
        moved = _mix_last(moved, mixing) * scale.exp()
        asked, centers = moved[: len(queries)], moved[len(queries) :]
        scores = current.make_rows(centers, counts, is_new).score(asked)
        old = (~is_new[answers]).nonzero()[:, 0]
        own, count = answers[old], counts[answers[old]]
        others = (count[:, None] * centers[own] - asked[old]) / (count[:, None] - 1)
        scores = scores.index_put((old, own), current.score_pairs(asked[old], others, count - 1))
        optimizer.zero_grad()
        functional.cross_entropy(scores, answers).backward()
        optimizer.step()
    with torch.no_grad():
        transform = _mix_last(belief.transform, mixing) * scale.exp()
        return ClassBelief(
            belief.center, transform, spread.exp(), temperature.exp(), offset.detach()
        )


def _mix_last(points: Float[Tensor, "N D"], mixing: Float[Tensor, "R R"]) -> Float[Tensor, "N D"]:
    """Return z + zD, where D concerns the last coordinates only, which have the largest ψ."""
    first, last = points.split([points.shape[1] - len(mixing), len(mixing)], 1)
    return torch.cat([first, last + last @ mixing], 1)


class _Episodes:
    """Draws episodes: which classes play new, their examples, and queries of all classes."""

    def __init__(
        self,
        points: Float[Tensor, "N D"],
        labels: Int[Tensor, "N"],
        classes: int,
        generator: torch.Generator,
    ) -> None:
        self._points, self._labels, self._generator = points, labels, generator
        self._counts = torch.bincount(labels, minlength=classes)
        self._means = average_by_label(points, labels, self._counts.to(points.dtype))
        self._rows = labels.argsort(stable=True)  # by class
        self._first = self._counts.cumsum(0) - self._counts
        self._rich = (self._counts >= 2).nonzero()[:, 0]  # can play new, and be asked about

    def draw(
        self,
    ) -> tuple[
        Int[Tensor, "Q"],
        Int[Tensor, "Q"],
        Float[Tensor, "C D"],
        Float[Tensor, "C"],
        Bool[Tensor, "C"],
    ]:
        """Return rows of queries, their classes, and mean, count and newness of each class."""
        generator, most = self._generator, int(self._counts.max())
        order = torch.randperm(len(self._rich), generator=generator)
        new = self._rich[order[: max(1, int(len(order) * NEW_FRACTION))]]
        wanted = torch.randint(1, MAX_EXAMPLES + 1, (len(new),), generator=generator)
        taken = torch.minimum(wanted, self._counts[new] - 1)
        ranks = torch.rand(len(new), most, generator=generator)
        ranks[torch.arange(most) >= self._counts[new][:, None]] = 2  # there is no such example
        places = ranks.topk(min(MAX_EXAMPLES, most), 1, largest=False).indices
        is_used = torch.arange(places.shape[1]) < taken[:, None]
        rows = self._rows[(self._first[new][:, None] + places).clamp_max(len(self._rows) - 1)]
        means, counts = self._means.clone(), self._counts.to(self._points.dtype)
        shares = is_used.to(self._points.dtype) / taken[:, None]
        means[new] = (self._points[rows] * shares[:, :, None]).sum(1)
        counts[new] = taken.to(counts.dtype)
        is_new = torch.zeros(len(counts), dtype=torch.bool)
        is_new[new] = True
        can_ask = self._counts[self._labels] >= 2
        can_ask[rows[is_used]] = False
        asked = can_ask.nonzero()[:, 0]
        chosen = torch.randint(len(asked), (QUERIES_PER_EPISODE,), generator=generator)
        queries = asked[chosen]
        return queries, self._labels[queries], means, counts, is_new
