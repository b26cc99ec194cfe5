"""Training of all networks on the stream, in parallel."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from experiments.baselines import AGEM, EWC, Batch, DERPlusPlus, Learner, Rehearsing, Replay
from experiments.experiment import Context
from experiments.networks import Stack
from experiments.permuted_mnist.config import PermutedMnistConfig, of_size
from experiments.permuted_mnist.stream import (
    CLASSES,
    PIXELS,
    StoredExamples,
    Streams,
    blocks_of,
    generator,
    load_digits,
)
from experiments.results import Record

TOLD = "EWC, told every switch"
TASK_SAVE_EVERY_S = 30.0  # seconds; small states are saved after every task
QUICKLY_SAVED = 1 << 26  # bytes


@dataclass(frozen=True)
class StackedNetwork:
    """One of the networks trained in parallel."""

    seed: int
    """Its index among the seeds."""
    size: int | None = None
    """The index of its buffer among the memory sizes."""


@dataclass(eq=False)
class Group:
    """The networks of one method, and the learner that trains them."""

    method: str
    networks: list[StackedNetwork]
    learner: Learner
    logits: Float[Tensor, "S N 10"] | None = None
    """Logits of each example of the stream when it passed; for `DER++`."""


def make_groups(config: PermutedMnistConfig, context: Context, switches: bool) -> list[Group]:
    """Return all groups to train. Networks with the same seed start alike."""
    alone = [StackedNetwork(seed) for seed in range(len(config.seeds))]
    sized = _list_networks_by_size(config)

    def stack(networks: list[StackedNetwork]) -> Stack:
        return _make_stack(config, context, networks)

    def ewc() -> EWC:
        strength = torch.full((len(alone),), config.ewc_strength, device=context.device)
        return EWC(stack(alone), config.lr, strength)

    groups = [
        Group("MLP", alone, Learner(stack(alone), config.lr)),
        Group("EWC", alone, ewc()),
    ]
    if switches:
        groups.append(Group(TOLD, alone, ewc()))
    groups.append(Group("replay", sized, Replay(stack(sized), config.lr)))
    if not switches:
        groups.append(make_der_group(config, context))
        groups.append(Group("A-GEM", sized, AGEM(stack(sized), config.lr)))
    return groups


def make_der_group(config: PermutedMnistConfig, context: Context) -> Group:
    """Return the networks to train by DER++."""
    networks = _list_networks_by_size(config)

    def each(values: tuple[float, ...]) -> Float[Tensor, "S"]:
        chosen = [of_size(values, network.size or 0) for network in networks]
        return torch.tensor(chosen, device=context.device)

    stack = _make_stack(config, context, networks)
    der = DERPlusPlus(stack, config.lr, each(config.der_alpha), each(config.der_beta))
    length = config.tasks * config.examples
    seen = torch.zeros(len(networks), length, CLASSES, device=context.device)
    return Group("DER++", networks, der, seen)


def _list_networks_by_size(config: PermutedMnistConfig) -> list[StackedNetwork]:
    """Return one network per memory size and seed."""
    return [
        StackedNetwork(seed, size)
        for size in range(len(config.memory_per_task))
        for seed in range(len(config.seeds))
    ]


def _make_stack(
    config: PermutedMnistConfig, context: Context, networks: list[StackedNetwork]
) -> Stack:
    seeds = [config.seeds[network.seed] for network in networks]
    return Stack(seeds, (PIXELS, config.hidden, config.hidden, CLASSES), context.device)


class Training:
    """The training of all networks on the stream; it can be stopped after any block."""

    def __init__(
        self,
        config: PermutedMnistConfig,
        context: Context,
        switches: bool = False,
        groups: list[Group] | None = None,
    ) -> None:
        self.config, self.context, self.switches = config, context, switches
        self.streams = Streams(config, load_digits(config, context))
        self.blocks = blocks_of(config, switches)
        self.blocks_a_task = len(self.blocks) // config.tasks
        self.groups = make_groups(config, context, switches) if groups is None else groups
        self.kept = StoredExamples(self.streams, self.blocks)
        self.done = 0
        """Number of blocks that have been learnt."""
        self.records: dict[int, list[Record]] = {seed: [] for seed in config.seeds}
        self._name = "switching" if switches else "sequence"
        self._saved = time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether the whole stream has been learnt."""
        return self.done == len(self.blocks)

    @property
    def tasks_seen(self) -> int:
        """Number of tasks seen: one more than the highest task of which something was seen."""
        return 1 + max(block.task for block in self.blocks[: self.done])

    def learn_next(self) -> None:
        """Learn one more block, with every method."""
        block = self.blocks[self.done]
        images, labels = self.streams.examples(block.task)
        here = slice(block.start, block.start + block.size)
        for group in self.groups:
            self._learn(group, images[:, here], labels[:, here])
        self.done += 1
        for group in self.groups:
            if isinstance(group.learner, EWC):
                self._consolidate(group, group.learner)

    def _learn(
        self, group: Group, images: Float[Tensor, "S E 784"], labels: Int[Tensor, "S E"]
    ) -> None:
        batch, passes, size = self.config.batch, self.config.epochs, images.shape[1]
        device = images.device
        orders = self._orders(size).to(device)
        each_seed = torch.arange(len(images), device=device)[:, None]
        seed_of = torch.tensor([network.seed for network in group.networks], device=device)
        draws = self._draws(group, passes * size).to(device)
        before = self.kept.starts[self.done]
        for start in range(0, passes * size, batch):
            rows = orders[:, start : start + batch]
            inputs, answers = images[each_seed, rows][seed_of], labels[each_seed, rows][seed_of]
            passed = start - (passes - 1) * size  # in the last pass over the block
            if group.logits is not None and passed >= 0:
                with torch.no_grad():
                    at = slice(before + passed, before + passed + batch)
                    group.logits[:, at] = group.learner.stack(inputs)
            stored = self._draw_stored(
                group, draws[..., start : start + batch], before + max(0, passed)
            )
            if stored and isinstance(group.learner, Rehearsing):
                group.learner.rehearse(inputs, answers, stored)
            else:
                group.learner.learn(inputs, answers)

    def _draw_stored(
        self, group: Group, draws: Float[Tensor, "J S B"], passed: int
    ) -> tuple[Batch, ...]:
        """Return batches of what is stored after `passed` examples, one row per network."""
        networks = [(network.size or 0, network.seed) for network in group.networks]
        counts = [self.kept.count(size, passed) for size, _ in networks]
        if not len(draws) or not min(counts):
            return ()
        sizes, seeds = (
            torch.tensor(networks, device=draws.device).T[..., None].expand(2, *draws.shape[1:])
        )
        batches = []
        for uniform in draws:
            count = torch.tensor(counts, device=draws.device)[:, None]
            positions = self.kept.positions(sizes, seeds, (uniform * count).long())
            logits = group.logits
            if logits is not None:
                logits = logits.gather(1, positions[..., None].expand(-1, -1, CLASSES))
            batches.append(Batch(*self.kept.examples_at(seeds, positions), logits))
        return tuple(batches)

    def _orders(self, size: int) -> Int[Tensor, "S P"]:
        """Return the order in which a block is seen: shuffled, but in the last pass by arrival."""
        return torch.stack(
            [
                torch.cat(
                    [
                        torch.randperm(size, generator=generator(seed, "order", self.done, epoch))
                        for epoch in range(1, self.config.epochs)
                    ]
                    + [torch.arange(size)]
                )
                for seed in self.config.seeds
            ]
        )

    def _draws(self, group: Group, count: int) -> Float[Tensor, "J S P"]:
        """Return random numbers for all batches that the method rehearses."""
        if not isinstance(group.learner, Rehearsing):
            return torch.empty(0, len(group.networks), count)
        drawn = [
            torch.rand(
                group.learner.batches,
                count,
                generator=generator(
                    self.config.seeds[network.seed], group.method, network.size, self.done
                ),
            )
            for network in group.networks
        ]
        return torch.stack(drawn, 1)

    def _consolidate(self, group: Group, learner: EWC) -> None:
        """Tell EWC that a task is over. If tasks keep changing, their ends are not known, and a
        task is assumed to be as long as before; the group `TOLD` is instead told of every change.
        """
        told = group.method == TOLD
        if not told and self.done % self.blocks_a_task:
            return
        span = (
            self.kept.starts[self.done]
            - self.kept.starts[self.done - (1 if told else self.blocks_a_task)]
        )
        count = min(span, self.config.fisher_images)
        seeds = [self.config.seeds[network.seed] for network in group.networks]
        ago = torch.stack(
            [
                torch.randperm(span, generator=generator(seed, "fisher", self.done))[:count]
                for seed in seeds
            ]
        ).to(self.streams.device)
        seed_of = torch.tensor([n.seed for n in group.networks], device=ago.device)[:, None]
        inputs, _ = self.kept.examples_at(
            seed_of.expand_as(ago), self.kept.starts[self.done] - 1 - ago
        )
        uniform = torch.stack(
            [torch.rand(count, generator=generator(seed, "labels", self.done)) for seed in seeds]
        )
        learner.consolidate(inputs, uniform.to(inputs.device))

    # Saving and resuming

    def resume(self) -> None:
        """Continue from the last save of an interrupted run, if there is one."""
        state = self.context.workspace.load(self._name)
        if state is None:
            return
        self.done = state["done"]
        self.records = {int(seed): found for seed, found in state["records"].items()}
        for group in self.groups:
            if group.method not in state:
                continue  # the stream is over, so only records are needed
            group.learner.restore(state[group.method]["learner"])
            if group.logits is not None:
                group.logits.copy_(state[group.method]["logits"])

    def save(self, keep_all: bool = False) -> None:
        """Save the state, if that is quick or the last save was long ago.

        Args:
            keep_all: also save the networks of a stream that is over.
        """
        states: dict[str, dict[str, Any]] = {}
        size = 0
        for group in () if self.is_over and not keep_all else self.groups:
            state = group.learner.state()
            size += sum(tensor.nbytes for tensor in state.values())
            states[group.method] = {"learner": state}
            if group.logits is not None:
                size += group.logits.nbytes
                states[group.method]["logits"] = group.logits
        is_soon = time.monotonic() - self._saved < TASK_SAVE_EVERY_S
        if size > QUICKLY_SAVED and is_soon and not self.is_over:
            return
        records = {str(seed): found for seed, found in self.records.items()}
        self.context.workspace.save(self._name, {"done": self.done, "records": records, **states})
        self._saved = time.monotonic()
