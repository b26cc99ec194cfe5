"""What examples say of each other: which are in doubt, which probably have a wrong label.

Each example is left out of the memory in turn, and the nearest of the others vote on it. The vote
and not the head is asked, because the head was made with the example in question: trained with it,
or, of a label that was taught since, given a row that is the mean of its examples, of which this is
one. The vote is asked without it, and is the same for both; wrong labels it finds about as well
(`benchmarks/mislabelled.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

import mbpa
from mbpa.serve.classifier import Classifier
from mbpa.serve.journal import Example
from mbpa.tune import leave_one_out

# So steep that three examples which lie together outvote all that lie around them.
VOTE = mbpa.NeighborVote(mbpa.exp_dot(20.0), k=50)
MOST = 10_000  # examples that are asked about; of larger memories a part, drawn at random


@dataclass(frozen=True)
class Opinion:
    """What the others say of an example."""

    example: Example
    label: str
    """Most probable by the vote."""
    share: float
    """Of the vote for that."""
    own: float
    """Of the vote for the label that the example has."""
    lead: float
    """By which that label is ahead of the next: how certain the vote is."""

    @property
    def doubt(self) -> float:
        """How much more speaks for the other label; negative if they agree with its own."""
        return self.share - self.own if self.label != self.example.label else -self.own


def opinions(classifier: Classifier, most: int = MOST) -> list[Opinion]:
    """Of the examples in the memory as it is now, in order of ids."""
    examples = {each.id: each for each in classifier.examples()}
    ids, keys = classifier.entries()
    here = [row for row, id in enumerate(ids) if id in examples]  # others come and go meanwhile
    return votes([examples[ids[row]] for row in here], keys[here], most)


def votes(
    examples: Sequence[Example], keys: Float[Tensor, "M D"], most: int = MOST
) -> list[Opinion]:
    """What the nearest others of each example, by the angle between keys, say of it."""
    if len(examples) < 2:
        return []
    keys = nn.functional.normalize(keys, dim=1)
    names = sorted({each.label for each in examples})
    numbers = {name: number for number, name in enumerate(names)}
    own = torch.tensor([numbers[each.label] for each in examples], device=keys.device)
    memory = mbpa.ExactMemory(len(keys), keys.shape[1], device=keys.device)
    places = {id: place for place, id in enumerate(memory.write(keys, own).tolist())}
    head = nn.Linear(keys.shape[1], max(2, len(names)), device=keys.device)  # is not asked
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


def least_certain(found: Iterable[Opinion]) -> list[Opinion]:
    """Where the vote is most divided first: what a person says of these teaches most."""
    return sorted(found, key=lambda each: (each.lead, each.example.id))


def probably_mislabelled(found: Iterable[Opinion]) -> list[Opinion]:
    """Those for which the others would choose another label, the clearest cases first."""
    doubted = [each for each in found if each.doubt > 0]
    return sorted(doubted, key=lambda each: (-each.doubt, each.example.id))
