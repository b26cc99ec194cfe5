"""The search for settings: one training with all candidates in parallel, then one retrieval.

Everything is judged by the mean accuracy on training images that no task draws from, after the last
task, with a seed that no run uses. The baselines' own settings come first. Then, on the networks so
chosen, comes the adaptation of MbPA: rate and steps, neighbours and kernel, rate and steps again,
and finally the pull back and the layers that adapt. Of all settings within a standard error of the
best of these, the cheapest is chosen.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor, nn
from tqdm import tqdm

import mbpa
from experiments import data
from experiments.baselines import EWC, DERPlusPlus, Learner, Replay
from experiments.experiment import BySeed, Context
from experiments.methods import make_kernel
from experiments.networks import Stack
from experiments.permuted_mnist.config import (
    SEARCH_SEED,
    PermutedMnistConfig,
    make_adapted,
    searched,
)
from experiments.permuted_mnist.scoring import memory_of, random_neighbors
from experiments.permuted_mnist.stream import CLASSES, PIXELS, generator
from experiments.permuted_mnist.training import Group, StackedNetwork, Training
from experiments.results import Record

STRENGTHS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1e3, 3e3, 1e4, 3e4)
ALPHAS, BETAS = (0.03, 0.1, 0.3, 1.0), (0.1, 0.25, 0.5, 1.0)
RATES, STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0), (1, 2, 5, 10, 20)
COUNTS, BANDWIDTHS = (5, 10, 20, 32, 64), (0.0, 1.0, 1.5, 2.0, 3.0, 5.0)
DECAYS, LAYERS = (0.0, 0.02, 0.1, 0.3), (1, 2, 3)
FIRST = {"k": 10, "bandwidth": 0.0, "decay": 0.0, "layers": 3}
TOLERANCE = 0.003  # in accuracy; below the standard error of the measurements
MOST_WORK = 320  # neighbours times steps; more would be too expensive
SAVE_EVERY = 10.0  # seconds
IMAGES = 250  # per task

Setting = dict[str, float]


def tune(config: PermutedMnistConfig, context: Context) -> BySeed:
    """Return records of all trials, and of the chosen settings."""
    data.require("mnist", context.data_dir)
    config = searched(config)
    training = Training(config, context, groups=_candidates(config, context))
    training.resume()
    with context.bar(config.tasks, "training candidates", "tasks", initial=training.done) as bar:
        while not training.is_over:
            training.learn_next()
            training.save(keep_all=True)
            bar.update()
    with context.bar(_evaluations(config), "search", "settings") as bar:
        search = Search(config, context, bar)
        _search_all(search, training)
    return {None: search.records}


def _candidates(config: PermutedMnistConfig, context: Context) -> list[Group]:
    """Return one network for every setting of a baseline."""
    sizes = range(len(config.memory_per_task))
    shape = PIXELS, config.hidden, config.hidden, CLASSES

    def stack(count: int) -> Stack:
        return Stack([SEARCH_SEED] * count, shape, context.device)

    def tensor(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=context.device)

    grid = [(size, *weights) for size in sizes for weights in itertools.product(ALPHAS, BETAS)]
    der = DERPlusPlus(
        stack(len(grid)),
        config.lr,
        tensor([alpha for _, alpha, _ in grid]),
        tensor([beta for *_, beta in grid]),
    )
    length = config.tasks * config.examples
    seen = torch.zeros(len(grid), length, CLASSES, device=context.device)
    return [
        Group("MLP", [StackedNetwork(0)], Learner(stack(1), config.lr)),
        Group(
            "EWC",
            [StackedNetwork(0)] * len(STRENGTHS),
            EWC(stack(len(STRENGTHS)), config.lr, tensor(STRENGTHS)),
        ),
        Group(
            "replay", [StackedNetwork(0, s) for s in sizes], Replay(stack(len(sizes)), config.lr)
        ),
        Group("DER++", [StackedNetwork(0, size) for size, *_ in grid], der, seen),
    ]


class Search:
    """The trials so far; nothing is tried twice, even if a run is resumed."""

    def __init__(self, config: PermutedMnistConfig, context: Context, bar: tqdm) -> None:
        self.config, self.context, self.bar = config, context, bar
        self.records: list[Record] = []
        state = context.workspace.load("search")
        self._known: dict[str, float] = {} if state is None else state["known"]
        self._tried: dict[tuple[str, int | None, tuple[tuple[str, float], ...]], float] = {}
        self._written: set[object] = set()
        self._saved = time.monotonic()

    def best(
        self,
        method: str,
        size: int | None,
        settings: Sequence[Setting],
        accuracy: Callable[[Setting], float],
    ) -> Setting:
        """Try all settings and return the best; the first of equals."""
        n = None if size is None else self.config.memory_per_task[size]
        found = []
        for setting in settings:
            identity = method, n, tuple(sorted(setting.items()))
            key = repr(identity)
            if key not in self._known:
                self._known[key] = accuracy(setting)
            self._tried[identity] = self._known[key]
            found.append(self._known[key])
            record: Record = {"method": method, "memory_per_task": n, **setting}
            if identity not in self._written:
                self._written.add(identity)
                self.records.append({**record, "name": "mean_accuracy", "value": found[-1]})
            self.bar.update()
            self.save()
        return settings[max(range(len(found)), key=lambda i: found[i])]

    def cheapest(self, method: str, size: int | None) -> Setting:
        """Return the cheapest of the adaptations tried that are as good as the best."""
        n = None if size is None else self.config.memory_per_task[size]
        tried = [
            (accuracy, dict(setting))
            for (other, m, setting), accuracy in self._tried.items()
            if (other, m) == (method, n)
        ]
        enough = max(accuracy for accuracy, _ in tried) - TOLERANCE
        _, best = min(
            (pair for pair in tried if pair[0] >= enough),
            key=lambda pair: (pair[1]["k"] * pair[1]["steps"], pair[1]["layers"], -pair[0]),
        )
        return best

    def choose(self, best: Setting, size: int | None, within: str = "") -> None:
        """Record the chosen values of fields of the config, or of a part of it."""
        n = None if size is None else self.config.memory_per_task[size]
        for name, value in best.items():
            chosen: Record = {"memory_per_task": n, "setting": within + name}
            self.records.append({**chosen, "name": "chosen", "value": value})

    def save(self) -> None:
        """Save the results from time to time."""
        if time.monotonic() - self._saved > SAVE_EVERY:
            self.context.workspace.save("search", {"known": self._known})
            self._saved = time.monotonic()


@dataclass(frozen=True, eq=False)
class Questions:
    """Images of all tasks, with their neighbours in a memory, read once."""

    queries: Tensor
    answers: Int[Tensor, "Q"]
    memory: mbpa.Memory
    nearest: mbpa.Neighbors
    drawn: mbpa.Neighbors
    """Neighbours drawn at random."""

    def accuracy(
        self, head: nn.Module, predictor: mbpa.Predictor, at_random: bool = False
    ) -> float:
        """Return a predictor's accuracy, the mean over tasks since all have equally many images."""
        model = mbpa.MbPA(head=head, memory=self.memory, predictor=predictor)
        found = model(keys=self.queries, neighbors=self.drawn if at_random else self.nearest)
        return float((found.argmax(1) == self.answers).double().mean())


def _search_all(search: Search, training: Training) -> None:
    """Search the baselines, then MbPA on each of them."""
    config, images = search.config, min(IMAGES, search.config.test_images)
    parts = [training.streams.queries(0, task, images) for task in range(config.tasks)]
    queries = torch.cat([part[0] for part in parts])
    answers = torch.cat([part[1] for part in parts])
    stacks = {group.method: group.learner.stack for group in training.groups}

    def chosen(
        method: str, size: int | None, fields: tuple[str, ...], grid: Sequence[tuple[float, ...]]
    ) -> nn.Sequential:
        """Return the network with the best setting; networks are ordered by memory size."""
        networks = [stacks[method].network((size or 0) * len(grid) + i) for i in range(len(grid))]
        settings = [dict(zip(fields, values, strict=True)) for values in grid]

        def accuracy(setting: Setting) -> float:
            right = networks[settings.index(setting)](queries).argmax(1) == answers
            return float(right.double().mean())

        best = search.best(method, size, settings, accuracy)
        search.choose(best, size)
        return networks[settings.index(best)]

    ewc = chosen("EWC", None, ("ewc_strength",), [(strength,) for strength in STRENGTHS])
    weights = list(itertools.product(ALPHAS, BETAS))
    for size in range(len(config.memory_per_task)):
        heads = {
            "alone": stacks["MLP"].network(0),
            "on_ewc": ewc,
            "on_replay": stacks["replay"].network(size),
            "on_der": chosen("DER++", size, ("der_alpha", "der_beta"), weights),
        }
        memory = memory_of(training, 0, size)
        count = min(max(COUNTS), len(memory))
        drawn = random_neighbors(
            memory, queries, count, generator(SEARCH_SEED, "random memories", size)
        )
        nearest = memory.read(queries, count)
        _search_memory(search, Questions(queries, answers, memory, nearest, drawn), size, heads)


def _search_memory(
    search: Search, questions: Questions, size: int, heads: dict[str, nn.Sequential]
) -> None:
    """Search vote and adaptation, with the memory of one size."""

    def vote(setting: Setting) -> float:
        kernel = make_kernel(setting["vote_bandwidth"])
        voting = mbpa.NeighborVote(kernel, k=int(setting["vote_k"]))
        return questions.accuracy(heads["alone"], voting)

    votes = [
        {"vote_k": k, "vote_bandwidth": width}
        for k, width in itertools.product((1, *COUNTS), BANDWIDTHS)
    ]
    search.choose(search.best("kernel vote", size, votes, vote), size)
    found = {name: _adapted(search, questions, name, size, head) for name, head in heads.items()}
    for name, best in found.items():
        search.choose(best, size, f"{name}.")
    best = found["alone"]
    settings = [best | {"lr": lr, "steps": steps} for lr, steps in _steps(int(best["k"]))]
    search.choose(
        search.best(
            "random memories",
            size,
            settings,
            lambda setting: questions.accuracy(
                heads["alone"], make_adapted(**setting), at_random=True
            ),
        ),
        size,
        "random.",
    )


def _adapted(
    search: Search, questions: Questions, name: str, size: int, head: nn.Sequential
) -> Setting:
    """Search rate and steps, neighbours and kernel, rate and steps again, pull and layers."""
    method = {"alone": "MbPA", "on_ewc": "MbPA + EWC", "on_replay": "MbPA + replay"}.get(
        name, "MbPA + DER++"
    )
    best: Setting = dict(FIRST)

    def accuracy(setting: Setting) -> float:
        return questions.accuracy(head, make_adapted(**setting))

    for stage in ("steps", "neighbours", "steps", "layers"):
        if stage == "steps":
            settings = [best | {"lr": lr, "steps": steps} for lr, steps in _steps(int(best["k"]))]
        elif stage == "neighbours":
            settings = [
                best | {"k": k, "bandwidth": width}
                for k, width in itertools.product(COUNTS, BANDWIDTHS)
                if k * best["steps"] <= MOST_WORK
            ]
        else:
            pairs = itertools.product(DECAYS, LAYERS)
            settings = [best | {"decay": decay, "layers": layers} for decay, layers in pairs]
        best = search.best(method, size, settings, accuracy)
    return search.cheapest(method, size)


def _steps(k: int) -> list[tuple[float, int]]:
    """Return the rates and steps worth trying with this many neighbours."""
    return [pair for pair in itertools.product(RATES, STEPS) if k * pair[1] <= MOST_WORK]


def _evaluations(config: PermutedMnistConfig) -> int:
    """Return the maximum number of settings to try."""
    each = 2 * len(RATES) * len(STEPS) + len(COUNTS) * len(BANDWIDTHS)
    each += len(DECAYS) * len(LAYERS)
    votes = (1 + len(COUNTS)) * len(BANDWIDTHS)
    a_size = len(ALPHAS) * len(BETAS) + votes + 4 * each + len(RATES) * len(STEPS)
    return len(STRENGTHS) + len(config.memory_per_task) * a_size
