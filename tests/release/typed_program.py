"""A program of a user, for type checkers: what the public face returns has types, and no `Any`."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import torch
from torch import Tensor, nn

import mbpa
from mbpa.language import Generation, MemoryLM, Score, SourceInfo
from mbpa.memory import Entries, StoredMemory
from mbpa.teaching import Learner, Prediction, TaughtClassifier, fit_learner


def adapt(classifier: nn.Module, x: Tensor, y: Tensor, place: Path) -> Tensor:
    embed, head = mbpa.split(classifier, at="2")
    memory = mbpa.ExactMemory(capacity=1_000, key_dim=64)
    predictor = mbpa.Adapted(mbpa.Gradient(lr=0.1, steps=5, decay=0.1), k=20)
    model = mbpa.MbPA(embed, head, memory=memory, predictor=predictor)
    model.write(x, y)
    model.grow(classes=6)
    assert_type(model.classes, int)
    assert_type(model.memory, mbpa.Memory)
    why = model.explain(x)
    assert_type(why, mbpa.Explanation)
    model.save(place)
    again = mbpa.MbPA.load(place, embed, head)
    assert_type(again, mbpa.MbPA)
    return again(x)


def remember(keys: Tensor, values: Tensor) -> Tensor:
    memories: list[mbpa.Memory] = [
        mbpa.ExactMemory(capacity=100, key_dim=8, value_dtype=torch.float32),
        mbpa.GraphMemory(capacity=100, key_dim=8),
    ]
    for memory in memories:
        ids: Tensor = memory.write(keys, values)
        memory.delete(ids[:1])
        assert_type(len(memory), int)
    found = memories[0].read(keys, k=3)
    assert_type(found, mbpa.Neighbors)
    entries: type[Entries] = Entries
    print(entries, StoredMemory.__name__)
    distances: Tensor = found.distances
    return distances


def predict(head: nn.Linear, hidden: Tensor, targets: Tensor) -> Tensor:
    rules: list[mbpa.Rule] = [mbpa.RMSprop(lr=0.01), mbpa.Adam(lr=0.01), mbpa.Gradient()]
    predictors: list[mbpa.Predictor] = [
        mbpa.Parametric(),
        mbpa.NeighborVote(mbpa.ExpDot(0.2), k=100),
        mbpa.Adapted(rules[0], k=10, kernel=mbpa.Gaussian(1.0)),
        mbpa.Adapted(mbpa.MAP(prior=0.1), k=10, kernel=mbpa.InverseDistance(power=4)),
    ]
    mixture = mbpa.Mixture(*predictors, weights=(0.4, 0.2, 0.2, 0.2))
    model = mbpa.MbPA(
        head=head, memory=mbpa.ExactMemory(capacity=500, key_dim=16), predictor=mixture
    )
    grid = mbpa.AdaptationGrid(k=(5, 10), lr=("auto", 0.1))
    found = mbpa.tune(model, hidden, targets, candidates=grid)
    assert_type(found, mbpa.Tuning)
    assert_type(found.best, mbpa.Predictor)
    model.predictor = found.best
    return mbpa.score_stream(model, hidden, targets)


def teach(keys: Tensor, labels: Tensor, head: nn.Linear) -> list[str]:
    def train(keys: Tensor, labels: Tensor, classes: int) -> nn.Linear:
        return nn.Linear(keys.shape[1], classes)

    learner = fit_learner(keys, labels, head, train)
    if learner is None:
        return []
    assert_type(learner, Learner)
    names = tuple(f"label {number}" for number in range(head.out_features))
    classifier = TaughtClassifier(learner, names, max_lost_points=1.0)
    classifier.add(range(len(keys)), [names[int(each)] for each in labels], keys)
    prediction = classifier.predict(keys[:3])
    assert_type(prediction, Prediction)
    confidences: Tensor = prediction.log_confidences
    return [classifier.labels[int(row.argmax())] for row in confidences]


def read(model: nn.Module, tokenizer: object) -> str:
    lm = MemoryLM(model, tokenizer)
    assert_type(lm.read("The heron waits.", source="birds"), SourceInfo)
    score = lm.score("The heron waits.")
    assert_type(score, Score)
    assert_type(lm.sources(), list[SourceInfo])
    generation = lm.generate("The heron")
    assert_type(generation, Generation)
    return generation.text
