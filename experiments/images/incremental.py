"""All classes arrive: the last layer learns, the memory is filled, every method is tested."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

import mbpa
from experiments.errors import ExperimentError
from experiments.images.config import ImagesConfig
from experiments.images.methods import METHODS, MarginModel, Model, Rehearsal, Situation
from experiments.images.spacing import measure_spacing
from experiments.images.task import ImageTask
from experiments.images.whitening import KnownLayer, translate_layer
from experiments.measures import percent, split_labels
from experiments.methods import Scale
from experiments.results import Record, value_of

READ_BYTES = {"cuda": 1 << 32, "cpu": 1 << 28}  # neighbours' keys held at a time
AREA_EPOCHS = (0.1, 1.0, 3.0)
"""Epochs up to which the area under a learning curve is measured."""

Key = TypeVar("Key")


@dataclass(frozen=True, eq=False)
class Moment:
    """The state of the stream after a number of epochs."""

    epochs: float
    head: nn.Linear
    memory: mbpa.ExactMemory
    passed: Int[Tensor, "N"]
    """The training images seen so far, in order; the memory holds the last of them."""

    def rows_of(self, ids: Int[Tensor, "*S"]) -> Int[Tensor, "*S"]:
        """Return which training images these entries of the memory are."""
        return self.passed[len(self.passed) - self.memory.next_id + ids]

    def with_capacity(self, capacity: int) -> Moment:
        """Return this moment with a smaller memory, a copy that does not change as the stream goes
        on.
        """
        entries, key_size = self.memory.entries(), self.memory.key_size
        memory = mbpa.ExactMemory(capacity, key_size, device=self.memory.device)
        memory.write(entries.keys[-capacity:], entries.values[-capacity:])
        return Moment(self.epochs, self.head, memory, self.passed)


def stream_of(
    task: ImageTask, config: ImagesConfig, seed: int
) -> tuple[Int[Tensor, "N"], Iterator[Int[Tensor, "N"]]]:
    """Return the images to learn from, and an endless iterator over orders, one per epoch."""
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


def follow_stream(task: ImageTask, config: ImagesConfig, seed: int) -> Iterator[Moment]:
    """Learn from the stream, and yield at every point."""
    device = task.train.device
    head = make_head(task)
    memory = mbpa.ExactMemory(config.capacity, task.train.shape[1], device=device)
    optimizer = torch.optim.SGD(head.parameters(), config.lr / key_length(task), config.momentum)
    rows, orders = stream_of(task, config, seed)
    batches = [max(1, round(point * len(rows) / config.batch)) for point in config.points]
    if batches != sorted(set(batches)):
        raise ExperimentError(
            f"points {config.points} must be at least a batch apart: an epoch has "
            f"{len(rows) / config.batch:g} batches of {config.batch}"
        )
    epochs_needed = batches[-1] * config.batch // len(rows) + 1
    order = torch.cat([next(orders) for _ in range(epochs_needed)])
    seen = written = 0
    for point, stop in zip(config.points, batches, strict=True):  # whole batches only
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
        yield Moment(point, head, memory, order[:seen])


def make_head(task: ImageTask) -> nn.Linear:
    """Return the network's last layer, with rows of zeros for the classes it does not know."""
    classes, size = len(task.classes), task.weight.shape[1]
    head = nn.Linear(size, classes, device=task.weight.device)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.zero_()
        head.weight[: task.old] = task.weight
        head.bias[: task.old] = task.bias
    return head


def run_split(task: ImageTask, config: ImagesConfig, seed: int) -> list[Record]:
    """Return all measurements of one split."""
    queries, answers = select_scored(task, config)
    groups = split_answers(task, config, answers)
    shared: Record = {"split": seed, "part": config.part}
    start = make_head(task)(queries).argmax(1) == answers
    nothing = torch.zeros_like(start)  # what an empty memory gets right
    from_memory = {name for name, method in METHODS.items() if method.is_memory_alone}
    records: list[Record] = []
    margins: list[Record] = []
    for moment in follow_stream(task, config, seed):
        models = config.models(describe_situation(moment, task, config))
        at = {"epochs": moment.epochs}
        right = compare_models(models, queries, answers)
        records += record_accuracies(right, groups, {**shared, **at})
        margins += [
            {"method": name, **shared, **at, "name": "margin", "value": float(model.margins[-1])}
            for name, model in models.items()
            if isinstance(model, MarginModel)
        ]
    before = {name: nothing if name in from_memory else start for name in right}
    records += compute_areas(record_accuracies(before, groups, {**shared, "epochs": 0.0}) + records)
    known: Record = {"method": "parametric", "subset": "pre-trained", "epochs": 0.0, **shared}
    known |= {"made_on": task.made_on}
    return [*records, *margins, {**known, "name": "pretrained_top1", "value": 100 * task.known}]


def record_accuracies(
    right: Mapping[str, Bool[Tensor, "Q"]], groups: Mapping[str, Bool[Tensor, "Q"]], shared: Record
) -> list[Record]:
    """Return records of each method's accuracy on each subset, in percent."""
    return [
        {
            "method": method,
            "subset": subset,
            **shared,
            "name": "top1",
            "value": percent(hits[members]),
        }
        for method, hits in right.items()
        for subset, members in groups.items()
    ]


def compute_areas(records: list[Record]) -> list[Record]:
    """Return records of the areas under the curves that these records form."""
    curves: dict[tuple[object, object], list[Record]] = {}
    for record in records:
        curves.setdefault((record["method"], record["subset"]), []).append(record)
    found: list[Record] = []
    for points in curves.values():
        curve = [(float(str(point["epochs"])), value_of(point)) for point in points]
        found += [
            {**points[0], "epochs": upto, "name": "auc", "value": area(curve, upto)}
            for upto in AREA_EPOCHS
            if any(epochs == upto for epochs, _ in curve)
        ]
    return found


def compare_models(
    models: Mapping[Key, Model], queries: Float[Tensor, "Q D"], answers: Int[Tensor, "Q"]
) -> dict[Key, Bool[Tensor, "Q"]]:
    """Return which queries each model gets right."""
    right: dict[Key, list[Tensor]] = {name: [] for name in models}
    for rows, found in predict_in_slices(models, queries):
        for name, log_probs in found.items():
            right[name].append(log_probs.argmax(1) == answers[rows])
    return {name: torch.cat(parts) for name, parts in right.items()}


def predict_in_slices(
    models: Mapping[Key, Model], queries: Float[Tensor, "Q D"]
) -> Iterator[tuple[slice, dict[Key, Float[Tensor, "B C"]]]]:
    """Yield each model's predictions, for a slice of the queries at a time; models that share a
    memory share a retrieval.
    """
    groups: dict[mbpa.Memory, dict[Key, Model]] = {}
    for name, model in models.items():
        groups.setdefault(model.memory, {})[name] = model
    most = most_queries(queries, max(1, *(model.predictor.keys_for for model in models.values())))
    for start in range(0, len(queries), most):
        part = queries[start : start + most]
        said: dict[Key, Tensor] = {}
        for group in groups.values():
            said |= _of_one_memory(group, part)
        yield slice(start, start + most), {name: said[name] for name in models}


def _of_one_memory(
    models: Mapping[Key, Model], queries: Float[Tensor, "B D"]
) -> dict[Key, Float[Tensor, "B C"]]:
    """Return each model's predictions; all share one memory and compute their keys alike."""
    k = max(model.predictor.k for model in models.values())
    keys_for = max(model.predictor.keys_for for model in models.values())
    one = next(iter(models.values()))
    neighbors = one.memory.read(one.embed(queries), max(1, k), keys_for=keys_for)
    return {name: model(queries, neighbors=neighbors) for name, model in models.items()}


def most_queries(queries: Float[Tensor, "Q D"], k: int) -> int:
    """Return how many queries to process at a time, with the keys of `k` neighbours each."""
    return max(1, READ_BYTES[queries.device.type] // (k * queries.shape[1] * queries.itemsize))


def describe_situation(
    moment: Moment, task: ImageTask, config: ImagesConfig | None = None
) -> Situation:
    """Return everything that methods can use at this moment.

    Args:
        moment: the stream so far.
        task: the task that it is a stream of.
        config: settings of the baselines in a rehearsal; without it there is no rehearsal.
    """
    copies = int(moment.passed[-len(moment.memory) :].bincount().max())
    scale = Scale(measure_spacing(moment.memory, copies), key_length(task))
    known, rehearsal = fit_known_layer(task), None
    if config is not None and task.rehearsal is not None and task.rehearsal_labels is not None:
        baselines = None, config.vote, config.mixture
        rehearsal = Rehearsal(task.rehearsal, task.rehearsal_labels, baselines)
    return Situation(moment.head, moment.memory, scale, task.old, known, copies, rehearsal)


def fit_known_layer(task: ImageTask) -> KnownLayer:
    """Return the network's last layer as a layer of whitened keys, fitted to what the network was
    trained on.
    """
    if task not in _KNOWN:
        is_known = task.train_labels < task.old
        features, labels = task.train[is_known], task.train_labels[is_known]
        _KNOWN[task] = translate_layer(make_head(task), features, labels)
    return _KNOWN[task]


_KNOWN: WeakKeyDictionary[ImageTask, KnownLayer] = WeakKeyDictionary()  # freed with their task


def key_length(task: ImageTask) -> float:
    """Return the mean squared length of a key, over what the network was trained on."""
    return float(task.train[task.train_labels < task.old].square().sum(1).mean())


def select_scored(
    task: ImageTask, config: ImagesConfig
) -> tuple[Float[Tensor, "Q D"], Int[Tensor, "Q"]]:
    """Return the images to score, and their classes."""
    queries, answers = task.test, task.test_labels
    if config.part == "validation":
        queries, answers = task.validation, task.validation_labels
    rows = draw_scored_rows(config, answers)
    return queries[rows], answers[rows]


def draw_scored_rows(config: ImagesConfig, labels: Int[Tensor, "N"]) -> Int[Tensor, "Q"]:
    """Return which images to score: all, or a random part of them."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return order[: config.scored].to(labels.device)


def split_answers(
    task: ImageTask, config: ImagesConfig, answers: Int[Tensor, "Q"]
) -> dict[str, Bool[Tensor, "Q"]]:
    """Return which queries belong to new, old and all classes, and to scarce new ones if there are
    any.
    """
    found = split_labels(answers, task.old)
    if config.scarce < 1:
        is_old = found["pre-trained"]
        scarce = ~is_old & (answers < task.old + (len(task.classes) - task.old) // 2)
        found |= {"novel-scarce": scarce, "novel-full": ~is_old & ~scarce}
    return found


def area(curve: list[tuple[float, float]], upto: float) -> float:
    """Return the mean height of a piecewise linear curve up to one of its points."""
    points = [point for point in curve if point[0] <= upto]
    total = sum(
        (right[0] - left[0]) * (left[1] + right[1]) / 2
        for left, right in itertools.pairwise(points)
    )
    return total / upto
