"""Five kinds of keys, each with a head that can learn something from a memory of them.

Embeddings of digits, pixels as input of an MLP, features of a ResNet, sentence embeddings of unit
norm, states of an LSTM. Each has queries for choosing settings, queries for testing, and their
neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import mbpa
from experiments import data, networks
from experiments.experiment import Context
from experiments.images import incremental, presets, task
from experiments.language import config as language
from experiments.language.corpus import read_corpus
from experiments.language.evaluation import first_word
from experiments.language.passage import read_passage, retrieve
from experiments.language.training import train_or_load
from experiments.workspace import Workspace
from mbpa.demo import digits

MOST_NEIGHBORS = 128


@dataclass(frozen=True, eq=False)
class KeyQueries:
    """Queries with their answers and neighbours."""

    keys: Tensor
    answers: Tensor
    neighbors: mbpa.Neighbors


@dataclass(frozen=True, eq=False)
class KeySituation:
    """One head with its validation and test queries."""

    head: nn.Module
    validation: KeyQueries
    test: KeyQueries


def make_situation(
    head: nn.Module, memory: mbpa.Memory, parts: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> KeySituation:
    """Return a situation in which all queries read the same memory."""
    found = [
        KeyQueries(keys, answers, memory.read(keys, MOST_NEIGHBORS)) for keys, answers in parts
    ]
    return KeySituation(head, *found)


def embed_digits(cache: Path) -> Iterator[KeySituation]:
    """Yield the digits of `mbpa demo`: five known, five new, after 100 examples of all ten."""
    settings = digits.DigitsConfig(examples=(100,))
    images = digits.load_images()
    for seed in range(4):
        here = digits.make_task(images, settings, seed)
        other = digits.make_task(images, replace(settings, part="validation"), seed)
        embed, head = mbpa.split(digits.pretrain(here, settings, seed), at="output")
        memory = mbpa.ExactMemory(len(here.stream_labels), settings.width)
        model = mbpa.MbPA(embed, head, memory=memory, predictor=mbpa.Parametric())
        model.grow(classes=len(digits.NAMES))
        optimizer = torch.optim.RMSprop(model.head.parameters(), lr=settings.finetuning_lr)
        keys = model.embed(here.stream_images)
        for key, label in zip(keys.split(1), here.stream_labels.split(1), strict=True):
            _step(optimizer, functional.cross_entropy(model.head(key), label))
        model.write(keys=keys, values=here.stream_labels)
        parts = [(model.embed(part.queries), part.answers) for part in (other, here)]
        yield make_situation(model.head, memory, (parts[0], parts[1]))


def pixels(cache: Path) -> Iterator[KeySituation]:
    """Yield Permuted MNIST: an MLP after five tasks in turn, with 1,000 examples of each stored."""
    tasks, examples, kept, scored = 5, 10_000, 1_000, 100
    images = data.mnist()
    rows, test = (part.images.flatten(1).float() / 255 for part in (images.train, images.test))
    generator = torch.Generator().manual_seed(0)
    network = networks.make_mlp(0, (784, 400, 400, 10))
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    memory = mbpa.ExactMemory(tasks * kept, 784)
    validation, tested = [], []
    for number in range(tasks):
        order = torch.randperm(784, generator=generator)
        chosen = torch.randperm(50_000, generator=generator)[:examples]
        for _ in range(2):
            for batch in chosen[torch.randperm(examples, generator=generator)].split(50):
                logits = network(rows[batch][:, order])
                _step(optimizer, functional.cross_entropy(logits, images.train.labels[batch]))
        memory.write(rows[chosen[:kept]][:, order], images.train.labels[chosen[:kept]])
        own = slice(scored * number, scored * (number + 1))
        held = slice(50_000 + own.start, 50_000 + own.stop)
        validation.append((rows[held][:, order], images.train.labels[held]))
        tested.append((test[own][:, order], images.test.labels[own]))
    parts = [tuple(map(torch.cat, zip(*part, strict=True))) for part in (validation, tested)]
    yield make_situation(network, memory, (parts[0], parts[1]))


def features(cache: Path) -> Iterator[KeySituation]:
    """Yield features of a small ResNet: ten known and ten new classes, early in an epoch of all."""
    settings = replace(presets.QUICK, points=(0.1,), part="validation")  # so that some are held out
    here = task.make_image_task(settings, _context(cache), seed=1)
    moment = next(iter(incremental.moments(here, settings, seed=1)))
    chosen = torch.randperm(len(here.test), generator=torch.Generator().manual_seed(0))[:1_000]
    parts = (here.validation, here.validation_labels), (here.test[chosen], here.test_labels[chosen])
    yield make_situation(moment.head, moment.memory, parts)


def sentences(cache: Path) -> Iterator[KeySituation]:
    """Yield CLINC150: 100 known intents, 50 new ones with three examples each."""
    from mbpa.encoders.text import embed_items, encoder

    known, shots, scored = 100, 3, 1_000
    intents = data.clinc150()
    generator = torch.Generator().manual_seed(0)
    place = torch.randperm(len(intents.names), generator=generator)
    encode, parts = encoder(), {}
    for name in ("train", "valid", "test"):
        part = getattr(intents, name)
        some = torch.randperm(len(part.texts), generator=generator)
        some = some if name == "train" else some[:scored]
        texts = [part.texts[number] for number in some.tolist()]
        parts[name] = embed_items(encode, texts, cache), place[part.labels[some]]
    keys, labels = parts["train"]
    is_known = labels < known
    rank = torch.stack([(labels[: i + 1] == label).sum() for i, label in enumerate(labels)])
    head = _train_head(keys[is_known], labels[is_known], known)
    memory = mbpa.ExactMemory(len(keys), keys.shape[1])
    model = mbpa.MbPA(head=head, memory=memory, predictor=mbpa.Parametric())
    model.grow(classes=len(intents.names))
    written = is_known | (rank <= shots)
    memory.write(keys[written], labels[written])
    yield make_situation(model.head, memory, (parts["valid"], parts["test"]))


def states(cache: Path) -> Iterator[KeySituation]:
    """Yield states of the language experiment's LSTM (preset quick), with 2,000 words stored."""
    settings, context = language.PRESETS["quick"], _context(cache)
    corpus = read_corpus(settings, context)
    model = train_or_load(settings, corpus, context, seed=0)
    found = []
    for tokens in (corpus.valid, corpus.test):
        passage = read_passage(model, tokens, first_word(corpus))
        retrieval = retrieve(passage, settings.memory, MOST_NEIGHBORS)
        positions = range(settings.memory, len(passage), 8)
        rows = slice(positions.start, positions.stop, positions.step)
        neighbors = retrieval.neighbors(positions, MOST_NEIGHBORS, len(passage))
        found.append(KeyQueries(passage.keys[rows], passage.targets[rows], neighbors))
    yield KeySituation(model.decoder, *found)


KINDS: dict[str, Callable[[Path], Iterator[KeySituation]]] = {
    "digits": embed_digits,
    "MNIST pixels": pixels,
    "image features": features,
    "sentences": sentences,
    "LSTM states": states,
}


def _context(cache: Path) -> Context:
    return Context(torch.device("cpu"), None, Workspace(cache / "work"), False, cache)


def _train_head(keys: Tensor, labels: Tensor, classes: int) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = nn.Linear(keys.shape[1], classes)
        optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
        for _ in range(20):
            for batch in torch.randperm(len(keys)).split(100):
                _step(optimizer, functional.cross_entropy(head(keys[batch]), labels[batch]))
    return head


def _step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
