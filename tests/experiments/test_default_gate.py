"""The fit of the default gate of language models, on random states."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mbpa
from experiments.memory_language_model import default_gate
from experiments.memory_language_model.networks import States
from experiments.memory_language_model.texts import CORPORA, SPLITS
from mbpa.language.gate import Gated, make_predictor

DIM, CLASSES = 8, 20


def draw_states(count: int, seed: int) -> States:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(count, DIM, generator=generator)
    return States(keys, keys[:, :4].argmax(1) + 4 * (keys[:, 4:].argmax(1)))


@pytest.fixture
def states(monkeypatch):
    monkeypatch.setattr(default_gate, "SIZES", (20, 100))
    for name in ("TEXT_MEMORIES", "SMALL_MEMORIES"):
        monkeypatch.setattr(default_gate, name, 1)
    for name in ("TOKENS_AFTER", "SMALL_TOKENS", "LARGE_TOKENS", "WHOLE_TOKENS"):
        monkeypatch.setattr(default_gate, name, 100)
    counts = {"train": 300, "valid": 300, "test": 300}
    return {
        (corpus, split): draw_states(counts[split], seed)
        for seed, (corpus, split) in enumerate((c, s) for c in CORPORA for s in SPLITS)
    }


@pytest.mark.heavy
def test_the_gate_that_is_fitted_lowers_the_perplexity(states):
    head = nn.Linear(DIM, CLASSES).requires_grad_(False)
    found = default_gate.score_situations(head, states, "valid")
    assert {each.size for each in found} == {20, 100, 300}
    assert {each.kind for each in found} == {"domain", "other", "text"}
    gate = default_gate.fit(found)
    changes = default_gate.compare(default_gate.score_situations(head, states, "test"), gate)
    assert changes["wikitext-2, domain, all"]["change_percent"] < -20


@pytest.mark.heavy
def test_a_situation_is_mixed_as_the_predictor_mixes(states):
    head = nn.Linear(DIM, CLASSES).requires_grad_(False)
    memory = mbpa.ExactMemory(20, DIM)
    given = default_gate.draw_memories(states, "valid", torch.Generator().manual_seed(1))
    corpus, kind, _, read, asked = next(given)
    memory.write(read.keys, read.targets)
    predictor = make_predictor()
    assert isinstance(predictor, Gated)
    model = mbpa.MbPA(head=head, memory=memory, predictor=predictor)
    expected = model(keys=asked.keys).gather(1, asked.targets[:, None])[:, 0]
    first = default_gate.score_situations(head, states, "valid")[0]
    assert (first.corpus, first.kind, first.size) == (corpus, kind, 20)
    torch.testing.assert_close(first.mix(predictor.gate), expected, rtol=0, atol=1e-3)
