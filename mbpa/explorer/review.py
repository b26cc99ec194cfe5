"""Votes of examples on each other: which are uncertain, which are probably mislabelled.

Each example is left out of the memory in turn, and its nearest neighbours vote on its label. The
vote is used rather than the head, because the head was made with the example in question: it was
trained with it or, for a label taught since, has a row that is the mean of its examples, including
this one. The vote excludes the example and treats both cases alike. It finds wrong labels about as
well (`benchmarks/mislabelled.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

import mbpa
from mbpa.evaluation import leave_one_out
from mbpa.serve.classifier import Classifier
from mbpa.serve.journal import Example

# The kernel is so steep that three examples close together outvote all those around them.
VOTE = mbpa.NeighborVote(mbpa.exp_dot(20.0), k=50)
MAX_VOTED_EXAMPLES = 10_000  # examples to vote on; larger memories are sampled at random


@dataclass(frozen=True)
class Opinion:
    """The vote of the other examples on one example."""

    example: Example
    label: str
    """The label with the largest share of the vote."""
    share: float
    """Share of the vote for `label`."""
    own: float
    """Share of the vote for the label that the example has."""
    lead: float
    """Lead of `label` over the next label: how certain the vote is."""

    @property
    def doubt(self) -> float:
        """Excess of the share of the other label over its own; negative if the vote agrees."""
        return self.share - self.own if self.label != self.example.label else -self.own


def collect_opinions(classifier: Classifier, most: int = MAX_VOTED_EXAMPLES) -> list[Opinion]:
    """Return the votes on the examples currently in the memory, in order of ids."""
    examples = {each.id: each for each in classifier.examples()}
    ids, keys = classifier.entries()
    here = [row for row, id in enumerate(ids) if id in examples]  # some may change meanwhile
    return compute_votes([examples[ids[row]] for row in here], keys[here], most)


def compute_votes(
    examples: Sequence[Example], keys: Float[Tensor, "M D"], most: int = MAX_VOTED_EXAMPLES
) -> list[Opinion]:
    """Let the nearest other examples, by the angle between keys, vote on each example."""
    if len(examples) < 2:
        return []
    keys = nn.functional.normalize(keys, dim=1)
    names = sorted({each.label for each in examples})
    numbers = {name: number for number, name in enumerate(names)}
    own = torch.tensor([numbers[each.label] for each in examples], device=keys.device)
    memory = mbpa.ExactMemory(len(keys), keys.shape[1], device=keys.device)
    places = {id: place for place, id in enumerate(memory.write(keys, own).tolist())}
    head = nn.Linear(keys.shape[1], max(2, len(names)), device=keys.device)  # unused
    left_out = leave_one_out(mbpa.MbPA(head=head, memory=memory, predictor=VOTE), queries=most)
    shares = left_out.predictions.exp()
    asked = [examples[places[id]] for id in left_out.ids.tolist()]
    found = []
    best = shares.topk(2, dim=1)
    for example, row, (first, second), (top, _) in zip(
        asked, shares.tolist(), best.values.tolist(), best.indices.tolist(), strict=True
    ):
        label = names[top] if top < len(names) else example.label
        own_share = row[numbers[example.label]]
        found.append(Opinion(example, label, first, own_share, first - second))
    return sorted(found, key=lambda each: each.example.id)


def sort_by_uncertainty(found: Iterable[Opinion]) -> list[Opinion]:
    """Sort by falling uncertainty of the vote: labels for these examples teach most."""
    return sorted(found, key=lambda each: (each.lead, each.example.id))


def find_mislabelled(found: Iterable[Opinion]) -> list[Opinion]:
    """Return the examples for which the vote prefers another label, the clearest cases first."""
    doubted = [each for each in found if each.doubt > 0]
    return sorted(doubted, key=lambda each: (-each.doubt, each.example.id))
