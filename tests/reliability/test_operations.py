"""The trial of random operations: it passes our service, and finds what is wrong with others."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from mbpa.serve.classifier import Classifier
from reliability.operations import (
    KEY_DIM,
    LABELS,
    TRIAL,
    Operation,
    Plan,
    Source,
    encode_text,
    open_session,
    run_episode,
)
from reliability.reference import Outcome, Reference, ReferenceExample, explain_misplaced
from reliability.trial import BrokenPromiseError

UNIT = np.eye(KEY_DIM, dtype=np.float32)


def learn(label: str, text: str, request: str | None = None) -> dict:
    return {"examples": [{"label": label, "text": text}], "request": request}


def find_mismatch(kind: type[Classifier], seed: int = 0, count: int = 300) -> str:
    with pytest.raises(BrokenPromiseError) as found:
        asyncio.run(run_episode(seed, 0, count, kind=kind))
    return str(found.value)


# The service


def test_random_operations_agree_with_the_reference():
    figures = TRIAL.run(argparse.Namespace(count=200, seed=8))
    assert figures["operations"] == 200
    assert figures["mismatches"] == 0
    assert figures["farthest_from_float64"] < 1e-5
    for kind in ("learn", "forget", "predict", "explain", "refused", "compared with float64"):
        assert figures["counts"][kind] > 0


def test_every_kind_of_bad_request_is_refused_and_changes_nothing():
    async def refuse_all() -> int:
        random = Random(0)
        async with open_session(Plan.draw(random)) as session:
            bad = Source(random, session.reference, size=20).list_bad_requests()
            for operation in bad:
                await session.apply(operation)
            await session.apply(Operation("restart"))
            return len(bad)

    assert asyncio.run(refuse_all()) > 70


def test_a_seed_gives_the_same_operations_again():
    def draw(seed: int) -> list[str]:
        random = Random(seed)
        plan = Plan.draw(random)
        source = Source(random, Reference(LABELS, plan.trained, encode_text), plan.size)
        return [str(source.draw()) for _ in range(50)]

    assert draw(1) == draw(1) != draw(2)


# Services that are broken


class Remembering(Classifier):
    """Acknowledges a request to forget, but keeps the examples."""

    def forget(self, ids=(), label=None) -> list[int]:
        wanted = {*ids}
        label = label and label.strip()
        return [each.id for each in self.examples() if each.id in wanted or each.label == label]


class Repeating(Classifier):
    """Writes a repeated request twice."""

    def learn(self, lessons, *, request=None, restoring=False) -> list[int]:
        return super().learn(lessons, restoring=restoring)


class Drifting(Classifier):
    """Gives answers that depend slightly on how much was written before."""

    def predict(self, items=None, *, keys=None, **options):
        drift = 1 - 1e-9 * self.counts.change
        answers = super().predict(items, keys=keys, **options)
        return [
            replace(
                answer,
                confidence=drift * answer.confidence,
                top=tuple((label, drift * share) for label, share in answer.top),
            )
            for answer in answers
        ]


class Swapping(Classifier):
    """Names the two nearest neighbours in the wrong order."""

    def explain(self, items=None, *, keys=None, **options):
        reasons = super().explain(items, keys=keys, **options)
        return [
            replace(each, neighbors=(*each.neighbors[1::-1], *each.neighbors[2:]))
            for each in reasons
        ]


@pytest.mark.heavy
@pytest.mark.parametrize("kind", [Remembering, Repeating, Drifting, Swapping])
def test_broken_services_are_caught_and_the_way_there_is_shrunk(kind):
    found = find_mismatch(kind)
    assert found.startswith("seed 0, episode 0, step ")
    shown = found.split("shrunk to ")[1]
    assert int(shown.split(" operations")[0]) <= 3


# The reference


@pytest.fixture
def reference() -> Reference:
    trained = [
        ReferenceExample(label, "apple", encode_text("apple"), is_trained=True) for label in LABELS
    ]
    return Reference(LABELS, trained, encode_text)


def test_labels_are_trained_ones_in_their_order_then_new_ones_by_name(reference):
    for label in ("b", "a"):
        reference.learn(learn(label, "pear"))
    reference.learn(learn(LABELS[1], "pear"))
    reference.forget({"ids": [2]})
    trained = [label for label in LABELS if label != LABELS[1]]
    assert reference.labels == [*trained, "a", "b", LABELS[1]]
    assert reference.count() == {
        "examples": 7,
        "taught": 3,
        "labels": 7,
        "new_labels": 3,
        "change": 5,
    }


def test_a_request_id_is_refused_with_other_examples(reference):
    first = reference.learn(learn("a", "pear", "r"))
    assert reference.learn(learn(" a ", "pear", "r")) == first
    assert reference.learn(learn("a", "plum", "r")) == Outcome(422)
    reference.forget({"ids": first.body["ids"]})
    assert reference.learn(learn("a", "pear", "r")).body["ids"] == first.body["ids"]
    assert reference.learn(learn("a", "plum", "r")) == Outcome(422)


def test_neighbours_are_checked_for_order_copies_and_what_was_left_out(reference):
    reference.examples = {
        1: ReferenceExample("a", None, UNIT[0], is_trained=False),
        2: ReferenceExample("b", None, UNIT[0], is_trained=False),
        3: ReferenceExample("a", None, UNIT[0], is_trained=False),
        4: ReferenceExample("a", None, UNIT[1], is_trained=False),
    }

    def explain(*found: int, k: int = 4) -> str:
        return explain_misplaced(reference, UNIT[0], found, k) or ""

    assert explain(3, 1, 2, 4) == ""
    assert explain(3, 1, k=2) == ""
    assert "must come as [3, 1, 2]" in explain(1, 3, 2, 4)
    assert "must come as [3, 1, 2]" in explain(3, 2, k=2)
    assert "neighbour 4 is farther than 2" in explain(3, 1, 4, 2)
    assert "example 2 is nearer than neighbour 4" in explain(3, 1, 4, k=3)
    assert "must be 3 distinct neighbours" in explain(3, 3, 1, k=3)
    assert "neighbours [9] do not exist" in explain(3, 9, k=2)
