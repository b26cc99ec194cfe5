"""A served model that adapts its head, with an exact and with an approximate memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mbpa
from mbpa.memory import recall
from mbpa.serve import adapted_model
from mbpa.serve.adapted_model import AdaptedModel

LABELS = tuple("abcdefgh")
DIM = 16


def draw(count: int, seed: int) -> tuple[Tensor, list[tuple[str, None]]]:
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(len(LABELS), DIM, generator=torch.Generator().manual_seed(0))
    chosen = torch.randint(len(LABELS), (count,), generator=generator)
    keys = centers[chosen] + 0.7 * torch.randn(count, DIM, generator=generator)
    named: list[tuple[str, None]] = [(LABELS[each], None) for each in chosen.tolist()]
    return nn.functional.normalize(keys), named


@pytest.fixture
def graph_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make memories of the kind "graph" use their graphs from 100 entries on."""
    make = adapted_model.make_memory

    def make_small(kind: Any, *arguments: Any, **named: Any) -> mbpa.Memory:
        if kind == "graph":
            named |= {"exact_below": 100, "background": False}
        return make(kind, *arguments, **named)

    monkeypatch.setattr(adapted_model, "make_memory", make_small)


def make_model(memory: Any) -> AdaptedModel:
    torch.manual_seed(0)
    predictor = mbpa.Adapted(mbpa.Gradient(lr=0.5, steps=3), k=20)
    return AdaptedModel(nn.Linear(DIM, len(LABELS)), LABELS, predictor, memory=memory)


def teach(model: AdaptedModel, first: int, keys: Tensor, named: list[tuple[str, None]]) -> None:
    ids = range(first, first + len(keys))
    model.make_room(len(keys))
    model.add(list(ids), named, keys, ())


@pytest.mark.usefixtures("graph_of_few")
def test_an_approximate_memory_answers_like_an_exact_one() -> None:
    keys, named = draw(3000, 1)
    queries = draw(500, 2)[0]
    answers = []
    for kind in ("exact", "graph"):
        model = make_model(kind)
        for start in range(0, 3000, 500):  # grows on the way
            teach(model, 1 + start, keys[start : start + 500], named[start : start + 500])
        answers.append(model(queries).logs)
    assert (answers[0].argmax(1) == answers[1].argmax(1)).double().mean() >= 0.998
    assert ((answers[0] - answers[1]).abs().amax(1) < 1e-4).double().mean() > 0.9


@pytest.mark.heavy
@pytest.mark.usefixtures("graph_of_few")
def test_recall_is_known_of_a_graph_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall, "MEASURING_SHARE", 1e9)  # measure every query
    keys, named = draw(1500, 1)
    for kind in ("exact", "graph"):
        model = make_model(kind)
        teach(model, 1, keys, named)
        for query in draw(64, 2)[0]:
            model(query[None])
        assert (model.recall is None) == (kind == "exact")
    assert model.recall is not None
    assert model.recall > 0.9


@pytest.mark.heavy
@pytest.mark.usefixtures("graph_of_few")
def test_forgotten_examples_leave_no_trace_in_the_content() -> None:
    keys, named = draw(1500, 1)
    more, more_named = draw(1000, 3)
    queries = draw(300, 2)[0]
    plain, model = make_model("graph"), make_model("graph")
    teach(plain, 1, keys, named)
    teach(model, 1, keys, named)
    teach(model, 5001, more, more_named)
    model.remove(range(5001, 6001))
    assert model.index.examples.keys() == plain.index.examples.keys()
    assert model.split_labels() == plain.split_labels()
    assert torch.equal(model.get_keys(range(1, 1501)), plain.get_keys(range(1, 1501)))
    sources = model.explain(queries).sources
    assert all(near.id <= 1500 for each, _ in sources for near in each)
    same = (model(queries).logs - plain(queries).logs).abs().amax(1) < 1e-4
    assert same.double().mean() > 0.9
