"""The accuracy of every method on all tasks so far, with one retrieval per memory.

Each memory size has two memories with the same images as keys: one holds their labels, the other
the logits that the network trained by DER++ returned for them when they were stored. A third has
the outputs of that network's first layer as keys (`Shortcut`), computed from the same images.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

import mbpa
from experiments.measures import wait_for_device
from experiments.methods import make_kernel
from experiments.permuted_mnist.config import (
    AdaptationBySize,
    PermutedMnistConfig,
    of_size,
)
from experiments.permuted_mnist.stream import CLASSES, PIXELS, generator
from experiments.permuted_mnist.training import StackedNetwork, Training
from experiments.results import Record

MAX_QUERIES = {"cuda": 10_000, "cpu": 1_000}  # at a time
TOWARDS_LOGITS = "MbPA + DER++ (logits)"
WITH_SHORTCUT = "MbPA + DER++ (shortcut)"
DRAWN = ("random memories", "MbPA", "MbPA + EWC")
"""Methods with a memory that figures show after every task; the others are scored at the end."""
MethodAtSize = tuple[str, int | None]
"""A method, and the index of its memory among the sizes if it has one."""


@dataclass
class TaskScores:
    """The score of one method on the tasks so far."""

    right: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Number of correct answers, by task."""
    asked: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    seconds: float = 0.0

    def take(
        self,
        tasks: Int[Tensor, "Q"],
        answers: Int[Tensor, "Q"],
        predict: Callable[[], Float[Tensor, "Q C"]],
        before: float = 0.0,
    ) -> None:
        """Compare predictions with the answers, and time them; `before` is the time of their
        inputs.
        """
        start = now(answers.device)
        predictions = predict()
        self.seconds += before + now(answers.device) - start
        right = tasks[predictions.argmax(1) == answers].bincount(minlength=int(tasks.max()) + 1)
        for task, count in enumerate(tasks.bincount().tolist()):
            if count:
                self.right[task] += int(right[task])
                self.asked[task] += count

    @property
    def accuracies(self) -> dict[int, float]:
        """Accuracies, by task."""
        return {task: self.right[task] / self.asked[task] for task in self.right}


def score_methods(training: Training, place: int, images: int) -> dict[MethodAtSize, TaskScores]:
    """Score the methods of one seed, on this many images of every task so far.

    Before the last task, methods with a memory are left out unless their curves are drawn.
    """
    config = training.config
    scores: dict[MethodAtSize, TaskScores] = defaultdict(TaskScores)
    networks = copy_networks(training, place)
    sizes = range(len(config.memory_per_task))
    memories = {size: fill_memory(training, place, size) for size in sizes}
    logits = {size: read_stored_logits(training, place, size) for size in sizes}
    models = {
        size: {
            method: model
            for method, model in _models(config, networks, memory, logits[size], size).items()
            if training.is_over or method in DRAWN
        }
        for size, memory in memories.items()
    }
    shortcuts = {
        size: Shortcut(networks["DER++", size], memories[size].entries().keys, stored)
        for size, stored in logits.items()
        if stored is not None and training.is_over
    }
    for part, (tasks, queries, answers) in enumerate(list_questions(training, place, images)):
        for name, network in networks.items():
            scores[name].take(tasks, answers, partial(network, queries))
        for size, memory in memories.items():
            start = now(queries.device)
            k = max(model.predictor.k for model in models[size].values())
            neighbors = memory.read(queries, k)
            reading = now(queries.device) - start
            draws = generator(config.seeds[place], "random memories", size, training.done, part)
            for method, model in models[size].items():
                found, needed = neighbors, reading
                if method == "random memories":
                    start = now(queries.device)
                    found = random_neighbors(memory, queries, model.predictor.k, draws)
                    needed = now(queries.device) - start
                elif (stored := logits[size]) is not None and method == TOWARDS_LOGITS:
                    found = attach_logits(neighbors, stored)
                predict = partial(model, keys=queries, neighbors=found)
                if not part and queries.is_cuda:
                    predict()  # compile kernels before timing
                scores[method, size].take(tasks, answers, predict, needed)
            if shortcut := shortcuts.get(size):
                local = config.on_der_shortcut.predictor(size)
                predict = partial(shortcut.predict, local, queries)
                if not part and queries.is_cuda:
                    predict()
                scores[WITH_SHORTCUT, size].take(tasks, answers, predict)
    return scores


def record_scores(training: Training, scores: dict[MethodAtSize, TaskScores]) -> list[Record]:
    """Return the records of scores."""
    config = training.config
    records: list[Record] = []
    for (method, size), score in scores.items():
        accuracies = score.accuracies
        shared: Record = {
            "stream": "switching" if training.switches else "sequence",
            "method": method,
            "memory_per_task": None if size is None else config.memory_per_task[size],
            "tasks_seen": len(accuracies),
            "split": config.part,
        }
        mean = sum(accuracies.values()) / len(accuracies)
        records.append({**shared, "name": "mean_accuracy", "value": mean})
        if training.is_over:
            cost = 1e6 * score.seconds / sum(score.asked.values())
            records.append({**shared, "name": "microseconds_per_prediction", "value": cost})
            records += [
                {**shared, "task": task, "name": "accuracy", "value": value}
                for task, value in accuracies.items()
            ]
    return records


def list_questions(
    training: Training, place: int, images: int
) -> Iterator[tuple[Int[Tensor, "Q"], Float[Tensor, "Q 784"], Int[Tensor, "Q"]]]:
    """Yield tasks, images and labels of every task so far, in batches that suit the device."""
    most = MAX_QUERIES[training.streams.device.type]
    at_once = max(1, most // images)
    for first in range(0, training.tasks_seen, at_once):
        tasks = range(first, min(first + at_once, training.tasks_seen))
        parts = [training.streams.queries(place, task, images) for task in tasks]
        queries, answers = (torch.cat(each) for each in zip(*parts, strict=True))
        counted = torch.tensor(tasks, device=answers.device).repeat_interleave(len(parts[0][1]))
        columns = counted, queries, answers
        yield from zip(*(column.split(most) for column in columns), strict=True)


def copy_networks(training: Training, place: int) -> dict[MethodAtSize, nn.Sequential]:
    """Return a copy of every network of a seed."""
    return {
        (group.method, network.size): group.learner.stack.network(i)
        for group in training.groups
        for i, network in enumerate(group.networks)
        if network.seed == place
    }


def fill_memory(training: Training, place: int, size: int) -> mbpa.ExactMemory:
    """Return a memory of everything stored so far."""
    keys, labels = training.kept.memory(place, size, training.kept.starts[training.done])
    memory = mbpa.ExactMemory(len(keys), PIXELS, device=keys.device)
    memory.write(keys, labels)
    return memory


def read_stored_logits(
    training: Training, place: int, size: int, index: int | None = None
) -> Float[Tensor, "N 10"] | None:
    """Return the logits that DER++ stored with the examples in the memory; `None` without DER++.

    Args:
        index: the network among those trained by DER++; by default the first with this seed and
            this memory.
    """
    for group in training.groups:
        if group.logits is None:
            continue
        if index is None:
            index = group.networks.index(StackedNetwork(place, size))
        passed = training.kept.starts[training.done]
        return group.logits[index, training.kept.positions_in_memory(place, size, passed)]
    return None


def hold_logits(memory: mbpa.Memory, logits: Float[Tensor, "N 10"]) -> mbpa.ExactMemory:
    """Return a memory with the same keys that holds logits instead of labels."""
    keys = memory.entries().keys
    targets = mbpa.ExactMemory(
        len(keys), PIXELS, value_shape=(CLASSES,), value_dtype=logits.dtype, device=keys.device
    )
    targets.write(keys, logits)
    return targets


def attach_logits(neighbors: mbpa.Neighbors, logits: Float[Tensor, "N 10"]) -> mbpa.Neighbors:
    """Return neighbours that were read from a memory of labels, with their logits as values."""
    return replace(neighbors, values=logits[neighbors.ids.to(logits.device)])


class Shortcut:
    """A network with one more layer, which alone adapts: from its first layer to its logits.

    Without neighbours this layer is zero. It adapts to what the network now lacks of the logits
    that were stored with them. They are found by the outputs of the first layer, which are computed
    with the network as it is now, so nothing more is stored.

    Args:
        network: an MLP.
        images: the stored images.
        logits: what was stored with them.
    """

    def __init__(
        self,
        network: nn.Sequential,
        images: Float[Tensor, "N 784"],
        logits: Float[Tensor, "N 10"],
    ) -> None:
        self.network = network
        with torch.no_grad():
            outputs, missing = network[:2](images), logits - network(images)
        self._unit = outputs.square().sum(1).mean().sqrt().clamp_min(1e-6)
        self._layer = nn.Linear(outputs.shape[1], CLASSES, bias=False, device=images.device)
        nn.init.zeros_(self._layer.weight)
        self.memory = mbpa.ExactMemory(
            len(images),
            outputs.shape[1],
            value_shape=(CLASSES,),
            value_dtype=logits.dtype,
            device=images.device,
        )
        self.memory.write(outputs / self._unit, missing)

    @torch.no_grad()
    def describe(self, images: Float[Tensor, "Q 784"]) -> Float[Tensor, "Q H"]:
        """Return the keys of images."""
        keys: Tensor = self.network[:2](images) / self._unit
        return keys

    @torch.no_grad()
    def predict(
        self,
        local: mbpa.Adapted,
        images: Float[Tensor, "Q 784"],
        neighbors: mbpa.Neighbors | None = None,
    ) -> Float[Tensor, "Q 10"]:
        """Return logits after an adaptation; its choice of layers does not matter."""
        model = mbpa.MbPA(
            head=self._layer, memory=self.memory, predictor=replace(local, params=None)
        )
        logits: Tensor = self.network(images)
        return logits + model(keys=self.describe(images), neighbors=neighbors)


def _models(
    config: PermutedMnistConfig,
    networks: dict[MethodAtSize, nn.Sequential],
    memory: mbpa.Memory,
    logits: Float[Tensor, "N 10"] | None,
    size: int,
) -> dict[str, mbpa.MbPA]:
    """Return all models with a memory of this size, on the networks there are."""
    heads: dict[str, tuple[nn.Sequential, mbpa.Predictor]] = {}
    if (plain := networks.get(("MLP", None))) is not None:
        kernel = make_kernel(of_size(config.vote_bandwidth, size))
        vote = mbpa.NeighborVote(kernel, k=of_size(config.vote_k, size))
        heads |= {
            "kernel vote": (plain, vote),
            "random memories": (plain, config.random.predictor(size)),
            "MbPA": (plain, config.alone.predictor(size)),
        }
    for method, local in adaptations_on_top(config).items():
        network = networks.get((method, size), networks.get((method, None)))
        if network is not None:
            heads[f"MbPA + {method}"] = network, local.predictor(size)
    models = {
        method: mbpa.MbPA(head=head, memory=memory, predictor=predictor)
        for method, (head, predictor) in heads.items()
    }
    if logits is not None:
        models[TOWARDS_LOGITS] = mbpa.MbPA(
            head=networks["DER++", size],
            memory=hold_logits(memory, logits),
            predictor=config.on_der_logits.predictor(size),
        )
    return models


def adaptations_on_top(config: PermutedMnistConfig) -> dict[str, AdaptationBySize]:
    """Return the methods that MbPA is put on top of, and how it adapts there."""
    return {"EWC": config.on_ewc, "replay": config.on_replay, "DER++": config.on_der}


def random_neighbors(
    memory: mbpa.Memory, queries: Float[Tensor, "Q D"], k: int, draws: torch.Generator
) -> mbpa.Neighbors:
    """Return entries drawn at random instead of the nearest."""
    entries = memory.entries()
    drawn = torch.randint(len(memory), (len(queries), k), generator=draws).to(queries.device)
    keys = entries.keys[drawn]
    return mbpa.Neighbors(
        values=entries.values[drawn],
        distances=(keys - queries[:, None]).square().sum(-1),
        dots=torch.einsum("qkd,qd->qk", keys, queries),
        mask=torch.ones_like(drawn, dtype=torch.bool),
        ids=entries.ids.to(drawn.device)[drawn],
        slots=torch.full_like(drawn, -1),
        keys=keys,
        revision=-1,
        capacity=memory.capacity,
    )


def now(device: torch.device) -> float:
    """Return the time, after waiting for the device to finish all its work."""
    wait_for_device(device)
    return time.perf_counter()
