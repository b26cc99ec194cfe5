"""Training an image network and reading its features, all on one device.

Images stay where the network is, as bytes; a batch is cropped, flipped and normalised there. With
CUDA the arithmetic is bfloat16 and channels come last.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn
from torch.nn import functional

from mbpa.experiments.experiment import Context
from mbpa.experiments.resnet import DEPTHS, ResNet


@dataclass(frozen=True)
class Pretraining:
    """How the network is trained before anything new arrives."""

    layers: int = 18
    """Of the ResNet: 18, 34 or 50."""
    width: int = 64
    """Channels of its first stage."""
    epochs: int = 40
    batch: int = 256
    lr: float = 0.2
    """Of stochastic gradient descent with momentum 0.9, at its highest: after two epochs, from
    where it falls as a half cosine."""
    weight_decay: float = 5e-4
    label_smoothing: float = 0.1
    padding: int = 4
    """By how many pixels a crop may be off the middle."""

    def __post_init__(self) -> None:
        if self.layers not in DEPTHS:
            raise ValueError(f"layers must be one of {tuple(DEPTHS)}, got {self.layers}")
        if min(self.width, self.batch) < 1 or min(self.epochs, self.padding) < 0:
            raise ValueError(f"width and batch must be at least 1, none negative, got {self}")


@dataclass(frozen=True, eq=False)
class Pictures:
    """Images on the device, and what they show."""

    images: UInt8[Tensor, "N 3 H W"]
    labels: Int[Tensor, "N"]

    def of_classes(self, classes: Int[Tensor, "C"]) -> Pictures:
        """Those of some classes, numbered by their place among these."""
        place = torch.full((int(self.labels.max()) + 1,), -1, device=self.labels.device)
        place[classes] = torch.arange(len(classes), device=place.device)
        chosen = (place[self.labels] >= 0).nonzero()[:, 0]
        return Pictures(self.images[chosen], place[self.labels[chosen]])


def normalised(images: UInt8[Tensor, "B 3 H W"]) -> Float[Tensor, "B 3 H W"]:
    """Numbers around zero, of the size of one."""
    return (images.float() - 117.0) / 66.0


def augmented(
    images: UInt8[Tensor, "B 3 H W"], padding: int, draws: torch.Generator
) -> UInt8[Tensor, "B 3 H W"]:
    """Each image moved by up to `padding` pixels either way, its edges mirrored; half of them seen
    in a mirror."""
    count, _, height, width = images.shape
    drawn = torch.randint(2 * padding + 1, (2, count, 1), generator=draws).to(images.device)
    mirrored = torch.randint(2, (count, 1), generator=draws).to(images.device) == 1
    rows = drawn[0] + torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device)
    columns = drawn[1] + torch.where(mirrored, columns.flip(0), columns)
    padded = functional.pad(images.float(), (padding,) * 4, mode="reflect").to(images.dtype)
    each = torch.arange(count, device=images.device)
    moved = padded.permute(0, 2, 3, 1)[each[:, None, None], rows[:, :, None], columns[:, None]]
    return moved.permute(0, 3, 1, 2)


def pretrained(
    settings: Pretraining,
    pictures: Pictures,
    classes: int,
    seed: int,
    context: Context,
    name: str,
) -> ResNet:
    """A network trained on these pictures; goes on where an interrupted run was last saved.

    Args:
        name: under which its state is kept.
    """
    network = initial_network(settings, classes, seed)
    network.to(context.device, memory_format=torch.channels_last)  # type: ignore[call-overload]  # a combination that torch has and its stubs lack
    optimizer = torch.optim.SGD(
        network.parameters(),
        lr=settings.lr,
        momentum=0.9,
        weight_decay=settings.weight_decay,
        nesterov=True,
    )
    kept, done = context.workspace.load(name), 0
    if kept is not None:
        network.load_state_dict(kept["network"])
        optimizer.load_state_dict(kept["optimizer"])
        done = kept["epochs"]
    with context.bar(settings.epochs, f"training {name}", "epochs", initial=done) as bar:
        for epoch in range(done, settings.epochs):
            _epoch(network, optimizer, settings, pictures, seed, epoch)
            bar.update()
            if (epoch + 1) % 10 == 0 or epoch + 1 == settings.epochs:
                state: dict[str, Any] = {"epochs": epoch + 1, "network": network.state_dict()}
                context.workspace.save(name, {**state, "optimizer": optimizer.state_dict()})
    return network.eval()


def initial_network(settings: Pretraining, classes: int, seed: int) -> ResNet:
    """Untrained; the caller's random numbers are left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ResNet(settings.layers, classes, small=True, width=settings.width)


def _epoch(
    network: ResNet,
    optimizer: torch.optim.Optimizer,
    settings: Pretraining,
    pictures: Pictures,
    seed: int,
    epoch: int,
) -> None:
    """All pictures once, in batches of one size; the few that are left over wait for another."""
    network.train()
    draws = torch.Generator().manual_seed(seed * 100_003 + epoch)
    order = torch.randperm(len(pictures.labels), generator=draws).to(pictures.labels.device)
    batches = order[: len(order) // settings.batch * settings.batch].split(settings.batch)
    for place, rows in enumerate(batches):
        rate = settings.lr * _share(epoch + place / len(batches), settings.epochs)
        for group in optimizer.param_groups:
            group["lr"] = rate
        images = augmented(pictures.images[rows], settings.padding, draws)
        with in_half(images.device):
            inputs = normalised(images).contiguous(memory_format=torch.channels_last)
            logits = network(inputs)
        loss = functional.cross_entropy(
            logits.float(), pictures.labels[rows], label_smoothing=settings.label_smoothing
        )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()


def _share(epoch: float, epochs: int) -> float:
    """Of the highest rate: rising over two epochs (or a fifth), then a half cosine down."""
    warm = min(2.0, epochs / 5)
    if epoch < warm:
        return max(epoch, 0.05) / warm
    return 0.5 * (1 + math.cos(math.pi * (epoch - warm) / (epochs - warm)))


@torch.no_grad()
def features_of(
    network: ResNet, images: UInt8[Tensor, "N 3 H W"], batch: int = 1000
) -> Float[Tensor, "N D"]:
    """What the last layer sees of each image, in float32."""
    parts = []
    for part in images.split(batch):
        with in_half(images.device):
            inputs = normalised(part).contiguous(memory_format=torch.channels_last)
            parts.append(network.features(inputs).float())
    return torch.cat(parts)


@contextlib.contextmanager
def in_half(device: torch.device) -> Iterator[None]:
    """bfloat16 where that is fast."""
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        yield


def accuracy(network: nn.Module, pictures: Pictures, batch: int = 1000) -> float:
    """On pictures whose labels are the network's own."""
    right = 0
    with torch.no_grad():
        for images, labels in zip(
            pictures.images.split(batch), pictures.labels.split(batch), strict=True
        ):
            with in_half(images.device):
                inputs = normalised(images).contiguous(memory_format=torch.channels_last)
                right += int((network(inputs).argmax(1) == labels).sum())
    return right / len(pictures.labels)
