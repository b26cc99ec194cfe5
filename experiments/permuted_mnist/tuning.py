"""The search for settings: one training with all candidates in parallel, then one retrieval.

Everything is judged by the mean accuracy on training images that no task draws from, after the last
task, with a seed that no run uses. The baselines' own settings come first. Then, on the networks so
chosen, comes the adaptation of MbPA: rate and steps, neighbours and kernel, rate and steps again,
and finally the pull back and the layers that adapt. Of all settings within a standard error of the
best of these, the cheapest is chosen. On networks trained by DER++, differences are smaller: they
are measured on more images, and settings must be closer to the best.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

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
from experiments.permuted_mnist.scoring import (
    TOWARDS_LOGITS,
    WITH_SHORTCUT,
    Shortcut,
    attach_logits,
    fill_memory,
    hold_logits,
    random_neighbors,
    read_stored_logits,
)
from experiments.permuted_mnist.stream import CLASSES, PIXELS, generator
from experiments.permuted_mnist.training import Group, StackedNetwork, Training
from experiments.results import Record
from experiments.search import Search

ACCURACY_TOLERANCE = 0.003
"""Accuracy that a cheaper setting may lack; below the standard error of the measurements."""
MAX_NEIGHBOR_STEPS = 320
"""Maximum number of neighbours times steps; more would be too expensive."""
IMAGES_PER_TASK = 250
IMAGES_PER_TASK_ON_DER = 500
IMAGES_PER_TASK_FOR_NETWORKS = 2_500
"""Networks are quick to score without adaptation."""
TOLERANCE_ON_DER = 0.0003
"""The tolerance for adaptations on networks trained by DER++. All settings are tried on the same
images, and most of their predictions agree, so smaller differences are meaningful.
"""

Setting = dict[str, float]
METHOD_OF = {
    "alone": "MbPA",
    "on_ewc": "MbPA + EWC",
    "on_replay": "MbPA + replay",
    "on_der": "MbPA + DER++",
    "on_der_logits": TOWARDS_LOGITS,
    "on_der_shortcut": WITH_SHORTCUT,
}
START: Setting = {"k": 10, "bandwidth": 0.0, "decay": 0.0, "layers": 3}
"""The adaptation with which rates and steps are first compared."""
SHORTCUT_START: Setting = {"k": 10, "bandwidth": 5.0, "decay": 0.0, "layers": 1}
"""The same for one more layer, whose inputs have unit length on average."""


@dataclass(frozen=True)
class Grids:
    """Values that the search tries."""

    ewc_strengths: tuple[float, ...] = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1e3, 3e3, 1e4, 3e4)
    der_alphas: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
    der_betas: tuple[float, ...] = (0.03, 0.1, 0.25, 0.5, 1.0, 2.0)
    rates: tuple[float, ...] = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
    logit_rates: tuple[float, ...] = (3e-4, 1e-3, 2e-3, 3e-3, 5e-3, 0.01)
    """Rates of the adaptation to logits."""
    shortcut_rates: tuple[float, ...] = (0.1, 0.3, 1.0, 2.0)
    """Rates of the additional layer."""
    steps: tuple[int, ...] = (1, 2, 5, 10, 20)
    counts: tuple[int, ...] = (5, 10, 20, 32, 64, 128)
    """Numbers of neighbours."""
    bandwidths: tuple[float, ...] = (0.0, 1.0, 1.5, 2.0, 3.0, 5.0)
    decays: tuple[float, ...] = (0.0, 0.02, 0.1, 0.3)
    layers: tuple[int, ...] = (1, 2, 3)

    def pair_rates_with_steps(self, k: float, name: str = "") -> list[Setting]:
        """Return the rates and steps worth trying with this many neighbours, for the adaptation
        with this name.
        """
        own = {"on_der_logits": self.logit_rates, "on_der_shortcut": self.shortcut_rates}
        pairs = itertools.product(own.get(name, self.rates), self.steps)
        return [{"lr": lr, "steps": steps} for lr, steps in pairs if _is_affordable(k, steps)]

    def pair_counts_with_kernels(self, steps: float) -> list[Setting]:
        """Return the numbers of neighbours and kernels worth trying with this many steps."""
        pairs = itertools.product(self.counts, self.bandwidths)
        return [{"k": k, "bandwidth": width} for k, width in pairs if _is_affordable(k, steps)]

    def pair_decays_with_layers(self, name: str = "") -> list[Setting]:
        """Return the pulls back and the numbers of layers that adapt, for the adaptation with this
        name.
        """
        pairs = itertools.product(self.decays, (1,) if name == "on_der_shortcut" else self.layers)
        return [{"decay": decay, "layers": layers} for decay, layers in pairs]

    def pair_der_weights(self) -> list[Setting]:
        """Return the weights of DER++."""
        pairs = itertools.product(self.der_alphas, self.der_betas)
        return [{"der_alpha": alpha, "der_beta": beta} for alpha, beta in pairs]

    def pair_vote_settings(self) -> list[Setting]:
        """Return the numbers of neighbours and kernels of the vote."""
        pairs = itertools.product((1, *self.counts), self.bandwidths)
        return [{"vote_k": k, "vote_bandwidth": width} for k, width in pairs]

    def count_settings(self, sizes: int) -> int:
        """Return the maximum number of settings to try with this many memory sizes."""
        steps, kernels = len(self.rates) * len(self.steps), len(self.counts) * len(self.bandwidths)
        adaptation = 2 * steps + kernels + len(self.pair_decays_with_layers())
        fewer = 2 * len(self.steps) * (len(self.rates) - len(self.logit_rates))
        fewer += 2 * len(self.steps) * (len(self.rates) - len(self.shortcut_rates))
        fewer += len(self.decays) * (len(self.layers) - 1)
        others = len(self.pair_der_weights()) + len(self.pair_vote_settings()) + steps
        return len(self.ewc_strengths) + sizes * (6 * adaptation - fewer + others)


def _is_affordable(k: float, steps: float) -> bool:
    return k * steps <= MAX_NEIGHBOR_STEPS


def tune(config: PermutedMnistConfig, context: Context, grids: Grids | None = None) -> BySeed:
    """Return records of all trials, and of the chosen settings.

    Args:
        grids: values to try, by default those of the committed search.
    """
    data.require("mnist", context.data_dir)
    config, grids = searched(config), grids or Grids()
    training = Training(config, context, groups=_make_candidates(config, context, grids))
    training.resume()
    with context.bar(config.tasks, "training candidates", "tasks", initial=training.done) as bar:
        while not training.is_over:
            training.learn_next()
            training.save(keep_all=True)
            bar.update()
    expected = grids.count_settings(len(config.memory_per_task))
    with Search(context, expected_settings=expected) as search:
        MnistSearch(config, search, grids, training).choose_all()
    return {None: search.records}


def _make_candidates(config: PermutedMnistConfig, context: Context, grids: Grids) -> list[Group]:
    """Return one network for every setting of a baseline."""
    sizes = range(len(config.memory_per_task))
    shape = PIXELS, config.hidden, config.hidden, CLASSES

    def stack(count: int) -> Stack:
        return Stack([SEARCH_SEED] * count, shape, context.device)

    def tensor(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=context.device)

    strengths = grids.ewc_strengths
    weights = [weights for _ in sizes for weights in grids.pair_der_weights()]
    der = DERPlusPlus(
        stack(len(weights)),
        config.lr,
        tensor([each["der_alpha"] for each in weights]),
        tensor([each["der_beta"] for each in weights]),
    )
    der_networks = [StackedNetwork(0, size) for size in sizes for _ in grids.pair_der_weights()]
    length = config.tasks * config.examples
    seen = torch.zeros(len(weights), length, CLASSES, device=context.device)
    return [
        Group("MLP", [StackedNetwork(0)], Learner(stack(1), config.lr)),
        Group(
            "EWC",
            [StackedNetwork(0)] * len(strengths),
            EWC(stack(len(strengths)), config.lr, tensor(strengths)),
        ),
        Group(
            "replay", [StackedNetwork(0, s) for s in sizes], Replay(stack(len(sizes)), config.lr)
        ),
        Group("DER++", der_networks, der, seen),
    ]


@dataclass(frozen=True, eq=False)
class Questions:
    """Images of all tasks, with their neighbours in a memory, read once."""

    queries: Tensor
    answers: Int[Tensor, "Q"]
    memory: mbpa.Memory
    nearest: mbpa.Neighbors
    drawn: mbpa.Neighbors
    """Neighbours drawn at random."""

    def measure_accuracy(
        self, head: nn.Module, predictor: mbpa.Adapted | mbpa.NeighborVote, at_random: bool = False
    ) -> float:
        """Return a predictor's accuracy, the mean over tasks since all have equally many images."""
        model = mbpa.MbPA(head=head, memory=self.memory, predictor=predictor)
        found = model(keys=self.queries, neighbors=self.drawn if at_random else self.nearest)
        return _measure_accuracy(found, self.answers)

    def measure_accuracy_with_shortcut(self, shortcut: Shortcut) -> Callable[[mbpa.Adapted], float]:
        """Return a function that measures the same where one more layer of a head adapts alone."""
        count = min(self.nearest.mask.shape[1], len(shortcut.memory))
        near = shortcut.memory.read(shortcut.describe(self.queries), count)  # once for all

        def measure(predictor: mbpa.Adapted) -> float:
            return _measure_accuracy(shortcut.predict(predictor, self.queries, near), self.answers)

        return measure


def _measure_accuracy(found: Float[Tensor, "Q 10"], answers: Int[Tensor, "Q"]) -> float:
    return float((found.argmax(1) == answers).double().mean())


class MnistSearch:
    """Chooses the settings of the baselines, then those of MbPA on each of them."""

    def __init__(
        self, config: PermutedMnistConfig, search: Search, grids: Grids, training: Training
    ) -> None:
        self.config, self.search, self.grids, self.training = config, search, grids, training
        self._stacks = {group.method: group.learner.stack for group in training.groups}

    def choose_all(self) -> None:
        """Choose all settings, one memory size after the other."""
        strengths: list[Setting] = [{"ewc_strength": value} for value in self.grids.ewc_strengths]
        ewc = self._choose_network("EWC", None, strengths)
        for size in range(len(self.config.memory_per_task)):
            heads = {
                "alone": self._stacks["MLP"].network(0),
                "on_ewc": self._stacks["EWC"].network(ewc),
                "on_replay": self._stacks["replay"].network(size),
            }
            self._choose_for_memory(size, heads)
            self._choose_on_der(size)

    def _choose_network(self, method: str, size: int | None, settings: Sequence[Setting]) -> int:
        """Return the index of the network with the best setting; networks are ordered by size."""
        first = (size or 0) * len(settings)
        parts = [self._ask(IMAGES_PER_TASK_FOR_NETWORKS, task) for task in range(self.config.tasks)]

        def measure(setting: Setting) -> float:
            network = self._stacks[method].network(first + settings.index(setting))
            right = [network(queries).argmax(1) == answers for queries, answers in parts]
            return float(torch.cat(right).double().mean())

        best = _find_best(self._try(method, size, settings, measure))
        self._record_choice(best, size)
        return first + settings.index(best)

    def _choose_on_der(self, size: int) -> None:
        """Choose the weights of DER++, and the adaptations of its network to labels and logits."""
        index = self._choose_network("DER++", size, self.grids.pair_der_weights())
        head = self._stacks["DER++"].network(index)
        labels = self._read_memory(size, IMAGES_PER_TASK_ON_DER)
        logits = read_stored_logits(self.training, 0, size, index)
        assert logits is not None  # DER++ is among the candidates
        towards = replace(
            labels,
            memory=hold_logits(labels.memory, logits),
            nearest=attach_logits(labels.nearest, logits),
        )
        shortcut = Shortcut(head, labels.memory.entries().keys, logits)
        measures: dict[str, Callable[[mbpa.Adapted], float]] = {
            "on_der": partial(labels.measure_accuracy, head),
            "on_der_logits": partial(towards.measure_accuracy, head),
            "on_der_shortcut": labels.measure_accuracy_with_shortcut(shortcut),
        }
        for name, measure in measures.items():
            best = self._choose_adaptation(measure, name, size, TOLERANCE_ON_DER)
            self._record_choice(best, size, f"{name}.")

    def _choose_for_memory(self, size: int, heads: dict[str, nn.Sequential]) -> None:
        """Choose vote and adaptation, with the memory of one size."""
        questions = self._read_memory(size, IMAGES_PER_TASK)

        def vote(setting: Setting) -> float:
            kernel = make_kernel(setting["vote_bandwidth"])
            voting = mbpa.NeighborVote(kernel, k=int(setting["vote_k"]))
            return questions.measure_accuracy(heads["alone"], voting)

        votes = self._try("kernel vote", size, self.grids.pair_vote_settings(), vote)
        self._record_choice(_find_best(votes), size)
        chosen = {
            name: self._choose_adaptation(partial(questions.measure_accuracy, head), name, size)
            for name, head in heads.items()
        }
        for name, best in chosen.items():
            self._record_choice(best, size, f"{name}.")
        best = chosen["alone"]
        steps = self.grids.pair_rates_with_steps(best["k"])
        tried = self._try(
            "random memories",
            size,
            [best | setting for setting in steps],
            lambda setting: questions.measure_accuracy(
                heads["alone"], make_adapted(**setting), at_random=True
            ),
        )
        self._record_choice(_find_cheapest(tried), size, "random.")

    def _ask(self, images: int, task: int) -> tuple[Float[Tensor, "Q 784"], Int[Tensor, "Q"]]:
        """Return images of a task, and their labels."""
        return self.training.streams.queries(0, task, min(images, self.config.test_images))

    def _read_memory(self, size: int, images: int) -> Questions:
        """Read as many neighbours as any setting needs, for this many images per task."""
        parts = [self._ask(images, task) for task in range(self.config.tasks)]
        queries, answers = (torch.cat(each) for each in zip(*parts, strict=True))
        memory = fill_memory(self.training, 0, size)
        count = min(max(self.grids.counts), len(memory))
        draws = generator(SEARCH_SEED, "random memories", size)
        drawn = random_neighbors(memory, queries, count, draws)
        return Questions(queries, answers, memory, memory.read(queries, count), drawn)

    def _choose_adaptation(
        self,
        measure: Callable[[mbpa.Adapted], float],
        name: str,
        size: int,
        tolerance: float = ACCURACY_TOLERANCE,
    ) -> Setting:
        """Return the cheapest of the adaptations tried that are as good as the best."""
        grids, method = self.grids, METHOD_OF[name]
        best = SHORTCUT_START if name == "on_der_shortcut" else START
        tried: list[tuple[Setting, float]] = []
        stages: tuple[Callable[[], list[Setting]], ...] = (
            lambda: grids.pair_rates_with_steps(best["k"], name),
            lambda: grids.pair_counts_with_kernels(best["steps"]),
            lambda: grids.pair_rates_with_steps(best["k"], name),
            lambda: grids.pair_decays_with_layers(name),
        )
        for list_settings in stages:
            found = self._try(
                method,
                size,
                [best | setting for setting in list_settings()],
                lambda setting: measure(make_adapted(**setting)),
            )
            best = _find_best(found)
            tried += found
        return _find_cheapest(tried, tolerance)

    def _try(
        self,
        method: str,
        size: int | None,
        settings: Sequence[Setting],
        measure: Callable[[Setting], float],
    ) -> list[tuple[Setting, float]]:
        """Return the accuracy of each setting, and record it."""
        n = None if size is None else self.config.memory_per_task[size]

        def judge(setting: Setting) -> float:
            identity = method, n, tuple(sorted(setting.items()))
            accuracy = self.search.judge(identity, lambda: measure(setting))
            record: Record = {"method": method, "memory_per_task": n, **setting}
            record |= {"name": "mean_accuracy", "value": accuracy}
            self.search.record_trial(identity, [record])
            return accuracy

        return self.search.try_settings(method, settings, judge)

    def _record_choice(self, best: Setting, size: int | None, within: str = "") -> None:
        """Record the chosen values of fields of the config, or of a part of it."""
        n = None if size is None else self.config.memory_per_task[size]
        for name, value in best.items():
            self.search.record_choice(within + name, value, memory_per_task=n)


def _find_best(tried: Sequence[tuple[Setting, float]]) -> Setting:
    """Return the most accurate setting; the first of equals."""
    return max(tried, key=lambda pair: pair[1])[0]


def _find_cheapest(
    tried: Sequence[tuple[Setting, float]], tolerance: float = ACCURACY_TOLERANCE
) -> Setting:
    """Return the cheapest of the settings that are about as accurate as the best."""
    enough = max(accuracy for _, accuracy in tried) - tolerance
    best, _ = min(
        (pair for pair in tried if pair[1] >= enough),
        key=lambda pair: (pair[0]["k"] * pair[0]["steps"], pair[0]["layers"], -pair[1]),
    )
    return dict(sorted(best.items()))
