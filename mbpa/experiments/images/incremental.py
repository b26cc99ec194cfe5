"""All classes arrive: the last layer learns, the memory is filled, and every method is tested."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

import mbpa
from mbpa.experiments.images.config import ImagesConfig
from mbpa.experiments.images.task import Task
from mbpa.experiments.results import Record

MOST_QUERIES = {"cuda": 10_000, "cpu": 1_000}  # at a time
AREAS = (0.1, 1.0, 3.0)
"""Epochs up to which the area under a learning curve is measured."""


@dataclass(frozen=True, eq=False)
class Moment:
    """Everything as it is after so many epochs."""

    epochs: float
    head: nn.Linear
    memory: mbpa.ExactMemory


def stream_of(
    task: Task, config: ImagesConfig, seed: int
) -> tuple[Int[Tensor, "N"], Iterator[Int[Tensor, "N"]]]:
    """The images that there are to learn from, and the orders of one epoch after the other."""
    draws = torch.Generator().manual_seed(seed + 7)
    labels = task.train_labels.cpu()
    new = torch.arange(task.old, len(task.classes))
    scarce = new[: len(new) // 2] if config.scarce < 1 else new[:0]
    kept = []
    for label in range(len(task.classes)):
        rows = (labels == label).nonzero()[:, 0]
        if label in scarce:
            rows = rows[torch.randperm(len(rows), generator=draws)]
            rows = rows[: max(1, round(config.scarce * len(rows)))]
        kept.append(rows)
    rows = torch.cat(kept)

    def orders() -> Iterator[Int[Tensor, "N"]]:
        while True:
            yield rows[torch.randperm(len(rows), generator=draws)].to(task.train.device)

    return rows, orders()


def moments(task: Task, config: ImagesConfig, seed: int) -> Iterator[Moment]:
    """Learn, and stop at every point."""
    device = task.train.device
    head = grown_head(task)
    memory = mbpa.ExactMemory(config.capacity, task.train.shape[1], device=device)
    optimizer = torch.optim.SGD(head.parameters(), config.lr / key_length(task), config.momentum)
    rows, orders = stream_of(task, config, seed)
    batches = [max(1, round(point * len(rows) / config.batch)) for point in config.points]
    epochs_needed = batches[-1] * config.batch // len(rows) + 1
    order = torch.cat([next(orders) for _ in range(epochs_needed)])
    seen = written = 0
    for point, stop in zip(config.points, batches, strict=True):  # whole batches, wherever it stops
        while seen < stop * config.batch:
            batch = order[seen : seen + config.batch]
            loss = functional.cross_entropy(head(task.train[batch]), task.train_labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += len(batch)
        new = order[written:seen][-config.capacity :]
        memory.write(task.train[new], task.train_labels[new])
        written = seen
        yield Moment(point, head, memory)


def grown_head(task: Task) -> nn.Linear:
    """The network's last layer, with rows of zeros for the classes it does not know."""
    classes, size = len(task.classes), task.weight.shape[1]
    head = nn.Linear(size, classes, device=task.weight.device)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.zero_()
        head.weight[: task.old] = task.weight
        head.bias[: task.old] = task.bias
    return head


def run_split(task: Task, config: ImagesConfig, seed: int) -> list[Record]:
    """Everything that is measured of one split."""
    queries, answers = scored_part(task, config)
    length = key_length(task)
    groups = subsets(task, config, answers)
    records: list[Record] = []
    curves: dict[tuple[str, str], list[tuple[float, float]]] = {}
    start = grown_head(task)(queries).argmax(1) == answers
    for moment in moments(task, config, seed):
        right = answered(moment, config, queries, answers, length)
        for method, hits in right.items():
            for subset, members in groups.items():
                value = 100 * float(hits[members].double().mean())
                shared = _shared(config, seed, method, subset)
                records.append({**shared, "epochs": moment.epochs, "name": "top1", "value": value})
                before = (
                    0.0 if method == "memory only" else 100 * float(start[members].double().mean())
                )
                first = (0.0, before)  # a memory without entries knows nothing
                curves.setdefault((method, subset), [first]).append((moment.epochs, value))
    for (method, subset), curve in curves.items():
        shared = _shared(config, seed, method, subset)
        records += [
            {**shared, "epochs": upto, "name": "auc", "value": area(curve, upto)}
            for upto in AREAS
            if any(epochs == upto for epochs, _ in curve)
        ]
    known: Record = {"method": "parametric", "subset": "pre-trained", "epochs": 0.0}
    records.append({**known, "split": seed, "name": "pretrained_top1", "value": 100 * task.known})
    return records


def answered(
    moment: Moment,
    config: ImagesConfig,
    queries: Float[Tensor, "Q D"],
    answers: Int[Tensor, "Q"],
    length: float,
) -> dict[str, Bool[Tensor, "Q"]]:
    """Which queries each method gets right; one retrieval for all."""
    near = mean_nearest(moment.memory)
    return compared(moment, config.predictors(near, length), queries, answers)


def compared(
    moment: Moment,
    predictors: Mapping[str, mbpa.Predictor],
    queries: Float[Tensor, "Q D"],
    answers: Int[Tensor, "Q"],
) -> dict[str, Bool[Tensor, "Q"]]:
    """The same for any predictors."""
    models = {
        name: mbpa.MbPA(head=moment.head, memory=moment.memory, predictor=predictor)
        for name, predictor in predictors.items()
    }
    k = max(predictor.k for predictor in predictors.values())
    keys_for = max(predictor.keys_for for predictor in predictors.values())
    right: dict[str, list[Tensor]] = {name: [] for name in predictors}
    most = MOST_QUERIES[queries.device.type]
    for part, wanted in zip(queries.split(most), answers.split(most), strict=True):
        neighbors = moment.memory.read(part, k, keys_for=keys_for)
        for name, model in models.items():
            right[name].append(model(keys=part, neighbors=neighbors).argmax(1) == wanted)
    return {name: torch.cat(parts) for name, parts in right.items()}


def mean_nearest(memory: mbpa.Memory) -> float:
    """The scale of distances: how far some entries are from the nearest other one."""
    some = memory.entries().keys[:1000]
    return float(memory.read(some, 2, keys_for=0).distances[:, -1].sqrt().mean())


def key_length(task: Task) -> float:
    """The mean square of a key's length, over what the network was trained on."""
    return float(task.train[task.train_labels < task.old].square().sum(1).mean())


def scored_part(task: Task, config: ImagesConfig) -> tuple[Float[Tensor, "Q D"], Int[Tensor, "Q"]]:
    """The images that are scored; where not all are, a random part."""
    queries, answers = task.test, task.test_labels
    if config.part == "validation":
        queries, answers = task.validation, task.validation_labels
    order = torch.randperm(len(answers), generator=torch.Generator().manual_seed(0))
    chosen = order[: config.scored].to(answers.device)
    return queries[chosen], answers[chosen]


def subsets(
    task: Task, config: ImagesConfig, answers: Int[Tensor, "Q"]
) -> dict[str, Bool[Tensor, "Q"]]:
    """By which classes are known."""
    is_old = answers < task.old
    found = {"novel": ~is_old, "pre-trained": is_old, "all": torch.ones_like(is_old)}
    if config.scarce < 1:
        scarce = ~is_old & (answers < task.old + (len(task.classes) - task.old) // 2)
        found |= {"novel-scarce": scarce, "novel-full": ~is_old & ~scarce}
    return found


def area(curve: list[tuple[float, float]], upto: float) -> float:
    """The mean height of a curve of straight lines up to a point of it."""
    points = [point for point in curve if point[0] <= upto]
    total = sum(
        (right[0] - left[0]) * (left[1] + right[1]) / 2
        for left, right in itertools.pairwise(points)
    )
    return total / upto


def _shared(config: ImagesConfig, seed: int, method: str, subset: str) -> Record:
    return {"method": method, "subset": subset, "split": seed, "part": config.part}
