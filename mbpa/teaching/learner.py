"""Preparation of a learner from the labels known at the start, by rehearsing its use.

In a rehearsal, a head and a belief are fitted without a third of the labels, which are then taught
with a few examples each. Queries of these labels, and held-out examples of the others, show how
far each witness can be trusted (`combination`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from mbpa.teaching.belief import ClassBelief, average_by_label, fit_belief, refine_belief
from mbpa.teaching.combination import (
    Combination,
    Evidence,
    RehearsedEvidence,
    fit_combination,
)
from mbpa.teaching.example_store import measure_cosines, round_keys

REHEARSALS = 3  # each label plays new in one of them
EXAMPLE_COUNTS = (1, 2, 3, 5, 10)  # of each new label in a rehearsal
HELD_OUT_FRACTION = 0.2  # of each old label's examples, used as queries
MAX_QUERIES_PER_LABEL = 20
MIN_LABELS = 6
MIN_EXAMPLES_PER_NEW_LABEL = 4

HeadTrainer = Callable[[Float[Tensor, "N D"], Int[Tensor, "N"], int], nn.Linear]
"""Trains a linear head on keys and labels below a number of classes."""


@dataclass(frozen=True, eq=False)
class Learner:
    """What is fitted before the first lesson, and stays fixed: the head, the belief, the weights.

    Everything is on the CPU.
    """

    head: nn.Linear
    """Head over the labels known at the start."""
    belief: ClassBelief
    """Gaussian belief about the classes, from which rows for new labels follow."""
    combination: Combination
    """How the witnesses of a label are weighted, and the gate between known and new labels."""

    def tensors(self) -> dict[str, Tensor]:
        """Return everything besides the head by name, to be saved in a checkpoint."""
        belief = {each.name: getattr(self.belief, each.name) for each in fields(self.belief)}
        return {**belief, **self.combination.tensors()}

    @classmethod
    def from_tensors(cls, head: nn.Linear, tensors: Mapping[str, Tensor]) -> Self:
        """Restore a learner from its head and the result of `tensors`.

        Args:
            head: head over the labels known at the start.
            tensors: everything else, by name.

        Raises:
            KeyError: a tensor is missing.
            ValueError: a tensor does not fit the head.
        """
        belief = ClassBelief(**{each.name: tensors[each.name] for each in fields(ClassBelief)})
        combination = Combination(**{each.name: tensors[each.name] for each in fields(Combination)})
        size = (head.in_features, head.in_features)
        if belief.transform.shape != size:
            raise ValueError(
                f"transform must have shape {size}, got {tuple(belief.transform.shape)}"
            )
        return cls(head, belief, combination)


def fit_learner(
    keys: Float[Tensor, "N D"],
    labels: Int[Tensor, "N"],
    head: nn.Linear,
    train_head: HeadTrainer,
    *,
    seed: int = 0,
    tick: Callable[[], object] = lambda: None,
) -> Learner | None:
    """Fit a learner; return `None` if there are too few labels or examples for a rehearsal.

    Args:
        keys: examples of the known labels, with unit norm.
        labels: their labels, rows of the head; each row has at least one example.
        head: the head trained on them.
        train_head: trains another head in the same way, on some of the labels: called with keys,
            labels from 0 on, and the number of labels; returns a head with so many rows.
        seed: seed of the choice of labels that play new.
        tick: called after each of the `REHEARSALS` and at the end.
    """
    counts = torch.bincount(labels, minlength=head.out_features)
    rich = (counts >= MIN_EXAMPLES_PER_NEW_LABEL).nonzero()[:, 0]
    if len(rich) < MIN_LABELS or not bool((counts > 0).all()):
        return None
    keys, labels = round_keys(keys.detach().cpu().float()), labels.cpu()
    generator = torch.Generator().manual_seed(seed)
    order = rich[torch.randperm(len(rich), generator=generator)]
    rehearsed: list[RehearsedEvidence] = []
    for number, new in enumerate(order.tensor_split(REHEARSALS)):
        rehearsed += _rehearse(keys, labels, new, train_head, generator, seed + number)
        tick()
    combination = fit_combination(rehearsed, generator)
    belief = fit_belief(keys, labels, head.out_features)
    belief = refine_belief(belief, keys, labels, head.out_features, seed=seed)
    tick()
    return Learner(head, belief, combination)


def _rehearse(
    keys: Float[Tensor, "N D"],
    labels: Int[Tensor, "N"],
    new: Int[Tensor, "M"],
    train_head: HeadTrainer,
    generator: torch.Generator,
    seed: int,
) -> Iterator[RehearsedEvidence]:
    """Yield evidence with each number of examples of these new labels, and with mixed numbers."""
    counts = torch.bincount(labels)
    is_new_label = torch.zeros(len(counts), dtype=torch.bool)
    is_new_label[new] = True
    old = (~is_new_label).nonzero()[:, 0]
    places = torch.empty_like(counts)
    places[old], places[new] = torch.arange(len(old)), torch.arange(len(new))
    ranks, is_new = _rank_within_labels(labels, generator), is_new_label[labels]
    held = ~is_new & (ranks < (HELD_OUT_FRACTION * counts[labels]).round())
    fitted = ~is_new & ~held
    # The first examples of a new label are taught, at most half of them; the next are asked.
    limits = (counts // 2).clamp_max(max(EXAMPLE_COUNTS))
    asked = is_new & (ranks >= limits[labels])
    asked &= ranks < (limits + MAX_QUERIES_PER_LABEL)[labels]
    from_old = held & (ranks < MAX_QUERIES_PER_LABEL)
    queries = torch.cat([from_old.nonzero()[:, 0], asked.nonzero()[:, 0]])
    known, known_labels = keys[fitted], places[labels[fitted]]
    belief = fit_belief(known, known_labels, len(old))
    belief = refine_belief(belief, known, known_labels, len(old), seed=seed)
    head = train_head(known, known_labels, len(old))
    if head.out_features != len(old):
        raise ValueError(
            f"train_head must return a head with a row for each of the {len(old)} labels it is "
            f"asked for, got {head.out_features} rows"
        )
    old_part = _observe_old(belief, head, known, known_labels, keys[queries])
    for count in (*EXAMPLE_COUNTS, None):
        wanted = torch.full_like(counts, count or 0)
        if count is None:
            drawn = torch.randint(len(EXAMPLE_COUNTS), counts.shape, generator=generator)
            wanted = torch.tensor(EXAMPLE_COUNTS)[drawn]
        taught = is_new & (ranks < torch.minimum(wanted, limits)[labels])
        new_part = _observe_new(
            belief, keys[taught], places[labels[taught]], len(new), keys[queries]
        )
        yield RehearsedEvidence(
            Evidence(*old_part, *new_part), places[labels[queries]], is_new[queries], count
        )


def _rank_within_labels(labels: Int[Tensor, "N"], generator: torch.Generator) -> Int[Tensor, "N"]:
    """Return each example's position in a random order of its label's examples."""
    shuffled = torch.randperm(len(labels), generator=generator)
    order = shuffled[labels[shuffled].argsort(stable=True)]
    counts = torch.bincount(labels)
    ranks = torch.empty_like(labels)
    ranks[order] = torch.arange(len(labels)) - (counts.cumsum(0) - counts)[labels[order]]
    return ranks


def _observe_old(
    belief: ClassBelief,
    head: nn.Linear,
    keys: Float[Tensor, "M D"],
    labels: Int[Tensor, "M"],
    queries: Float[Tensor, "B D"],
) -> tuple[Float[Tensor, "B O"], Float[Tensor, "B O"], Float[Tensor, "B O"]]:
    classes = head.out_features
    is_new = torch.zeros(classes, dtype=torch.bool)
    beliefs = _score_belief(belief, keys, labels, is_new, queries)
    with torch.no_grad():
        logs = head(queries).log_softmax(1)
    return beliefs, measure_cosines(queries, keys, labels, classes), logs


def _observe_new(
    belief: ClassBelief,
    keys: Float[Tensor, "M D"],
    labels: Int[Tensor, "M"],
    classes: int,
    queries: Float[Tensor, "B D"],
) -> tuple[Float[Tensor, "B N"], Float[Tensor, "B N"], Float[Tensor, "N"]]:
    is_new = torch.ones(classes, dtype=torch.bool)
    beliefs = _score_belief(belief, keys, labels, is_new, queries)
    counts = torch.bincount(labels, minlength=classes).float()
    return beliefs, measure_cosines(queries, keys, labels, classes), counts


def _score_belief(
    belief: ClassBelief,
    keys: Float[Tensor, "M D"],
    labels: Int[Tensor, "M"],
    is_new: Bool[Tensor, "C"],
    queries: Float[Tensor, "B D"],
) -> Float[Tensor, "B C"]:
    counts = torch.bincount(labels, minlength=len(is_new)).float()
    points = belief.locate(average_by_label(keys, labels, counts))
    return belief.make_rows(points, counts, is_new).score(belief.locate(queries))
