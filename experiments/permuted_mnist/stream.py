"""The stream: the images, their permutations, the order of tasks, and the stored examples."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from experiments import data
from experiments.experiment import Context
from experiments.permuted_mnist.config import POOL_IMAGES, PermutedMnistConfig

PIXELS, CLASSES = 784, 10


@dataclass(frozen=True, eq=False)
class Digits:
    """All images, as rows of pixels between 0 and 1."""

    pool: Float[Tensor, "P 784"]
    pool_labels: Int[Tensor, "P"]
    scored: Float[Tensor, "Q 784"]
    scored_labels: Int[Tensor, "Q"]


def load_digits(config: PermutedMnistConfig, context: Context) -> Digits:
    """Load MNIST; the images to score are its test set, or the end of its training set."""
    images = data.mnist(context.data_dir)
    rows = images.train.images.flatten(1).to(context.device).float() / 255
    labels = images.train.labels.to(context.device)
    scored, scored_labels = rows[POOL_IMAGES:], labels[POOL_IMAGES:]
    if config.part == "test":
        scored = images.test.images.flatten(1).to(context.device).float() / 255
        scored_labels = images.test.labels.to(context.device)
    order = torch.randperm(len(scored), generator=generator("scored")).to(context.device)
    return Digits(rows[:POOL_IMAGES], labels[:POOL_IMAGES], scored[order], scored_labels[order])


class Streams:
    """The streams of S seeds: permutations, the examples of each task, and which are stored."""

    def __init__(self, config: PermutedMnistConfig, digits: Digits) -> None:
        self.config, self.digits, self.device = config, digits, digits.pool.device
        self.permutations = self._draw("permutation", lambda g: torch.randperm(PIXELS, generator=g))
        chosen = self._draw("examples", lambda g: torch.randperm(POOL_IMAGES, generator=g))
        self.chosen: Int[Tensor, "S T E"] = chosen[..., : config.examples].contiguous()
        """The images of each task, in order of arrival."""
        self._lots = self._draw("kept", lambda g: torch.rand(config.examples, generator=g))

    def examples(self, task: int) -> tuple[Float[Tensor, "S E 784"], Int[Tensor, "S E"]]:
        """Return the examples of a task, in order of arrival."""
        chosen = self.chosen[:, task]
        permuted = [
            self.digits.pool[images][:, order]
            for images, order in zip(chosen, self.permutations[:, task], strict=True)
        ]
        return torch.stack(permuted), self.digits.pool_labels[chosen]

    def queries(
        self, seed: int, task: int, count: int
    ) -> tuple[Float[Tensor, "Q 784"], Int[Tensor, "Q"]]:
        """Return the images of a task to score. If they are not all, other tasks use other images,
        so that together they are as hard as the whole set.
        """
        total = len(self.digits.scored)
        chosen = torch.arange(task * count, (task + 1) * count, device=self.device) % total
        images = self.digits.scored[chosen][:, self.permutations[seed, task]]
        return images, self.digits.scored_labels[chosen]

    def positions_stored(self, n: int) -> Int[Tensor, "S T n"]:
        """Return the positions of the examples that are stored: of every `examples / n` that
        arrive, the one that drew the lowest lot. No task boundary needs to be known, and smaller
        memories are subsets of larger ones.
        """
        window = self.config.examples // n
        least = self._lots.view(*self._lots.shape[:2], n, window).argmin(3)
        return least + window * torch.arange(n, device=self.device)

    def at(
        self, seeds: Int[Tensor, "*B"], tasks: Int[Tensor, "*B"], places: Int[Tensor, "*B"]
    ) -> tuple[Float[Tensor, "*B 784"], Int[Tensor, "*B"]]:
        """Return single examples."""
        images = self.chosen[seeds, tasks, places]
        pixels = self.digits.pool[images].gather(-1, self.permutations[seeds, tasks])
        return pixels, self.digits.pool_labels[images]

    def _draw(self, what: str, draw: Callable[[torch.Generator], Tensor]) -> Tensor:
        rows = [
            torch.stack([draw(generator(seed, what, task)) for task in range(self.config.tasks)])
            for seed in self.config.seeds
        ]
        return torch.stack(rows).to(self.device)


@dataclass(frozen=True)
class Block:
    """A contiguous part of the stream from one task."""

    task: int
    start: int
    """Its first position in the task's order."""
    size: int


def blocks_of(config: PermutedMnistConfig, switches: bool) -> list[Block]:
    """Return task after task, or `switch_every` examples at a time with tasks in random order."""
    if not switches:
        return [Block(task, 0, config.examples) for task in range(config.tasks)]
    size, blocks = config.switch_every, []
    for start in range(0, config.examples, size):
        order = torch.randperm(config.tasks, generator=generator("order", start))
        blocks += [Block(task, start, size) for task in order.tolist()]
    return blocks


def generator(*what: object) -> torch.Generator:
    """Return a generator for one purpose, which gives the same numbers whenever it is created."""
    digest = hashlib.sha256(repr(what).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


class StoredExamples:
    """Stored and past examples, by their position in the whole stream.

    One example is stored out of every window of `examples / n` that has passed, so the j-th stored
    one is known without being written anywhere.
    """

    def __init__(self, streams: Streams, blocks: Sequence[Block]) -> None:
        self.streams, device = streams, streams.device
        config = streams.config
        self.starts = [0]
        """Number of examples that have passed before each block, and after the last."""
        for block in blocks:
            self.starts.append(self.starts[-1] + block.size)
        self.block_size = blocks[0].size
        self._tasks = torch.tensor([block.task for block in blocks], device=device)
        self._firsts = torch.tensor([block.start for block in blocks], device=device)
        self._windows = [config.examples // n for n in config.memory_per_task]
        most = max(config.memory_per_task)
        padded = [
            torch.nn.functional.pad(streams.positions_stored(n), (0, most - n))
            for n in config.memory_per_task
        ]
        self._places: Int[Tensor, "Z S T n"] = torch.stack(padded)

    def count(self, size: int, passed: int) -> int:
        """Return how many examples are stored after `passed` have passed."""
        return passed // self._windows[size]

    def positions(
        self, sizes: Int[Tensor, "*B"], seeds: Int[Tensor, "*B"], stored: Int[Tensor, "*B"]
    ) -> Int[Tensor, "*B"]:
        """Return the positions in the stream of the j-th stored examples."""
        window = torch.tensor(self._windows, device=sizes.device)[sizes]
        in_block = self.block_size // window
        block = stored // in_block
        of_task = self._firsts[block] // window + stored % in_block
        place = self._places[sizes, seeds, self._tasks[block], of_task]
        return block * self.block_size + place - self._firsts[block]

    def examples_at(
        self, seeds: Int[Tensor, "*B"], positions: Int[Tensor, "*B"]
    ) -> tuple[Float[Tensor, "*B 784"], Int[Tensor, "*B"]]:
        """Return the examples at these positions of the stream."""
        block = positions // self.block_size
        places = self._firsts[block] + positions % self.block_size
        return self.streams.at(seeds, self._tasks[block], places)

    def positions_in_memory(self, seed: int, size: int, passed: int) -> Int[Tensor, "N"]:
        """Return the positions of everything stored after `passed` examples have passed, in order
        of time.
        """
        stored = torch.arange(self.count(size, passed), device=self.streams.device)
        seeds, sizes = torch.full_like(stored, seed), torch.full_like(stored, size)
        return self.positions(sizes, seeds, stored)

    def memory(
        self, seed: int, size: int, passed: int
    ) -> tuple[Float[Tensor, "N 784"], Int[Tensor, "N"]]:
        """Return everything stored after `passed` examples have passed, in order of time."""
        positions = self.positions_in_memory(seed, size, passed)
        return self.examples_at(torch.full_like(positions, seed), positions)
