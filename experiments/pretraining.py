"""Training of an image network, on one device or several, and computation of its features.

With CUDA the arithmetic is bfloat16 and channels come last. Several devices means as many
processes, started by Lightning Fabric. Each takes its share of every batch and gradients are
averaged. Batch normalisation sees only the process's own share; the statistics of the first process
are kept.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from experiments.errors import ExperimentError
from experiments.experiment import Context
from experiments.picture_sets import (
    WHOLE,
    Held,
    Pictures,
    Share,
    normalise,
    paste_patches,
    recolour,
)
from experiments.resnet import DEPTHS, ResNet
from experiments.workspace import Workspace
from mbpa.errors import MissingExtraError

SMALL_PIXELS = 64  # pixels up to which the first layer keeps the size of the picture
EPOCH_SAVE_EVERY_S = 60.0  # seconds between saves of the training state


@dataclass(frozen=True)
class Pretraining:
    """Training of the network before anything new arrives."""

    layers: int = 34
    """Number of layers of the ResNet: 18, 34 or 50."""
    width: int = 64
    """Number of channels of its first stage."""
    epochs: int = 70
    """Number of passes over the pictures of the known classes."""
    batch: int = 256
    """Pictures per step, over all devices."""
    lr: float = 0.2
    """Highest learning rate of stochastic gradient descent with momentum 0.9.
    It is reached after two epochs and then falls as a half cosine.
    """
    weight_decay: float = 1e-3
    """Weight decay of SGD."""
    label_smoothing: float = 0.1
    """Share of the probability that training targets spread over all classes."""
    smallest_crop: float = 0.25
    """Minimum share of a picture's area that a crop shows; 0.08 is usual for ImageNet."""
    crop_side: float = 6 / 7
    """Side of a crop in pixels, as a share of that of a whole picture.
    Smaller crops take less time, and show objects as large as whole pictures (Touvron et al. 2019).
    """
    early_crop_side: float = 4 / 7
    """The same for the early epochs, in which the network learns what needs no fine detail."""
    early: float = 0.6
    """Share of the epochs that count as early."""
    padding: int = 4
    """Maximum shift in pixels of a picture of Tiny ImageNet that is not cropped."""
    colour: float = 0.3
    """Maximum change of contrast, brightness and saturation."""
    cutmix: float = 0.5
    """Probability that the pictures of a batch each contain a rectangle of another one."""
    devices: int = 1
    """Number of GPUs, or of processes on the CPU, that share every batch.
    More than one needs Lightning Fabric: pip install 'mbpa[experiments]'.
    """

    def __post_init__(self) -> None:
        if self.layers not in DEPTHS:
            raise ValueError(f"layers must be one of {tuple(DEPTHS)}, got {self.layers}")
        if min(self.width, self.batch, self.devices) < 1 or min(self.epochs, self.padding) < 0:
            raise ValueError(
                f"width, batch and devices must be at least 1, none negative, got {self}"
            )
        if self.batch % self.devices:
            raise ValueError(
                f"batch must be a multiple of devices, got {self.batch} and {self.devices}"
            )
        if not (self.lr > 0 and self.weight_decay >= 0 and 0 <= self.label_smoothing < 1):
            raise ValueError(
                "lr must be positive, weight_decay not negative, label_smoothing in [0, 1), "
                f"got {self.lr}, {self.weight_decay} and {self.label_smoothing}"
            )
        if not (0 <= self.cutmix <= 1 and 0 <= self.colour < 1):
            raise ValueError(
                f"cutmix and colour must be between 0 and 1, got {self.cutmix} and {self.colour}"
            )
        if not 0 <= self.early <= 1:
            raise ValueError(f"early must be between 0 and 1, got {self.early}")
        for name in ("smallest_crop", "crop_side", "early_crop_side"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1, got {getattr(self, name)}")

    def pixels(self, pictures: Pictures, epoch: int) -> int:
        """Return the side in pixels of what is seen of a picture in an epoch of training."""
        if self.smallest_crop == 1 and isinstance(pictures, Held):
            return pictures.size  # shifted, not cropped
        is_early = epoch < round(self.early * self.epochs)
        side = self.early_crop_side if is_early else self.crop_side
        return max(1, round(side * pictures.size))


def pretrain(
    settings: Pretraining,
    pictures: Pictures,
    classes: int,
    seed: int,
    context: Context,
    name: str,
    save_every_s: float = EPOCH_SAVE_EVERY_S,
) -> ResNet:
    """Return a network trained on these pictures, resuming from the last save of an interrupted
    run.

    Args:
        name: name under which its state is saved.
        save_every_s: seconds between saves; the state is saved at the end of an epoch.
    """
    job = _Job(settings, pictures, classes, seed, context, name, save_every_s)
    if settings.devices > 1:
        kept = context.workspace.load(name)
        if (kept["epochs"] if kept else 0) < settings.epochs:
            at_hand = replace(job, pictures=pictures.to(torch.device("cpu")))
            work = functools.partial(_process, job=at_hand)  # Fabric inspects arguments
            launch(work, settings.devices, context.device.type)
        # The processes left the trained network there. A new workspace reads it, since this one is
        # already counting the time.
        other = replace(context, workspace=Workspace(context.workspace.folder), progress=False)
        job = replace(job, context=other)
    return _train(job)


@dataclass(frozen=True, eq=False)
class _Job:
    """The arguments of `pretrain`."""

    settings: Pretraining
    pictures: Pictures
    classes: int
    seed: int
    context: Context
    name: str
    save_every_s: float


def launch(work: Callable[[Any], None], devices: int, kind: str) -> None:
    """Call `work` in this many new processes, each with its own `Fabric`.

    Args:
        work: must be picklable.
        kind: kind of the devices, `cuda` or `cpu`.

    Raises:
        MissingExtraError: Lightning Fabric is not installed.
        ExperimentError: there are not enough GPUs.
    """
    try:
        from lightning_fabric import Fabric
        from lightning_fabric.plugins.environments.lightning import LightningEnvironment
    except ImportError as error:
        raise MissingExtraError("Lightning Fabric", extra="experiments") from error
    if kind == "cuda" and devices > torch.cuda.device_count():
        raise ExperimentError(
            f"pretraining.devices asks for {devices} GPUs, there are {torch.cuda.device_count()}"
        )
    fabric = Fabric(
        accelerator=kind,
        devices=devices,
        strategy="ddp_spawn",  # a forked process could not use the GPUs
        plugins=[LightningEnvironment()],  # local processes, however this one started
    )
    fabric.launch(work)


def _process(fabric: Any, job: _Job) -> None:
    """Train in one of several processes; the first shows progress and saves the state."""
    progress = job.context.progress and fabric.is_global_zero
    context = replace(job.context, device=fabric.device, progress=progress)
    _train(replace(job, pictures=job.pictures.to(fabric.device), context=context), fabric)


def _train(job: _Job, fabric: Any = None) -> ResNet:
    settings, context, name = job.settings, job.context, job.name
    kept: dict[str, Any] = context.workspace.load(name) or {"epochs": 0}
    done, learner, recorded = kept["epochs"], _learner(job, fabric, kept), 0
    last_kept = time.monotonic()
    bar_of_epochs = context.bar(settings.epochs, f"training {name}", "epochs", initial=done)
    with _fastest_convolutions(), bar_of_epochs as bar:
        for epoch in range(done, settings.epochs):
            size = settings.pixels(job.pictures, epoch)
            if learner.records and size != recorded:
                if recorded:
                    learner = _learner(job, fabric, learner.state(epoch))
                    gc.collect()  # a recording refers to itself and holds memory
                _record(learner.own, settings.batch, size)
                recorded = size
            _epoch(learner, settings, job.pictures, job.seed, epoch)
            bar.update()
            due = epoch + 1 == settings.epochs or time.monotonic() - last_kept > job.save_every_s
            if learner.share.rank == 0 and due:
                context.workspace.save(name, learner.state(epoch + 1))
                last_kept = time.monotonic()
    trained = _make_network(job)  # without the memory of the recordings
    trained.load_state_dict(learner.own.state_dict())
    return trained.eval()


def _learner(job: _Job, fabric: Any, kept: Mapping[str, Any]) -> ShareLearner:
    """Return a learner that continues from a state or, without one, starts from the beginning."""
    network = _make_network(job)
    optimizer = torch.optim.SGD(
        network.parameters(),
        lr=job.settings.lr,
        momentum=0.9,
        weight_decay=job.settings.weight_decay,
        nesterov=True,
        fused=job.context.device.type == "cuda" or None,  # one pass over all parameters
    )
    if "network" in kept:
        network.load_state_dict(kept["network"])
        optimizer.load_state_dict(kept["optimizer"])
    if fabric is None:
        return ShareLearner(network, network, optimizer, records=job.context.device.type == "cuda")
    share = Share(fabric.global_rank, fabric.world_size)
    # The wrapped network averages the gradients of all processes in `backward`.
    return ShareLearner(network, fabric.setup(network), optimizer, fabric.backward, share)


def _make_network(job: _Job) -> ResNet:
    network = make_resnet(job.settings, job.classes, job.pictures.size, job.seed)
    network.to(job.context.device, memory_format=torch.channels_last)  # type: ignore[call-overload]  # a combination that torch has and its stubs lack
    return network


def make_resnet(settings: Pretraining, classes: int, size: int, seed: int) -> ResNet:
    """Return an untrained network; the caller's random state is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ResNet(settings.layers, classes, small=size <= SMALL_PIXELS, width=settings.width)


@dataclass(frozen=True, eq=False)
class ShareLearner:
    """A network that learns from its share of every batch."""

    own: ResNet
    network: nn.Module
    """The module to call; its parameters are those of the optimiser."""
    optimizer: torch.optim.Optimizer
    backward: Callable[[Tensor], None] = Tensor.backward
    share: Share = WHOLE
    records: bool = False
    """Whether its passes are recorded as CUDA graphs, once per size of pictures."""

    def learn(self, loss: Float[Tensor, ""], rate: float) -> None:
        """Take a step, with the mean gradient of all shares."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        self.backward(loss)
        self.optimizer.step()

    def state(self, epochs: int) -> dict[str, Any]:
        """Return the state from which `_learner` continues after this many epochs."""
        network, optimizer = self.own.state_dict(), self.optimizer.state_dict()
        return {"epochs": epochs, "network": network, "optimizer": optimizer}


def _record(network: ResNet, batch: int, size: int) -> None:
    """Record the forward and backward passes as CUDA graphs, in place: a GPU finishes a layer of
    small images faster than Python can launch the next one.
    """
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    sample = torch.zeros(batch, 3, size, size, device=network.fc.weight.device)
    sample = sample.contiguous(memory_format=torch.channels_last)
    network.train()
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)  # intended
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Attempting to run cuBLAS")  # from a new thread of torch
        torch.cuda.make_graphed_callables(network, (sample,))
    network.load_state_dict(before)  # recording changed the statistics of batch normalisation


def _epoch(
    learner: ShareLearner, settings: Pretraining, pictures: Pictures, seed: int, epoch: int
) -> None:
    """Train on all pictures once, in batches of equal size; the remaining few wait for another
    epoch.
    """
    learner.network.train()
    draws = torch.Generator().manual_seed(seed * 100_003 + epoch)
    order = torch.randperm(len(pictures.labels), generator=draws)
    batches = len(order) // settings.batch
    arriving = pictures.augment(
        order[: batches * settings.batch],
        settings.batch,
        draws,
        padding=settings.padding,
        smallest_crop=settings.smallest_crop,
        size=settings.pixels(pictures, epoch),
        share=learner.share,
    )
    for place, (images, labels) in enumerate(arriving):
        inputs, own = normalise(images), 1.0
        if settings.colour:
            inputs = recolour(inputs, settings.colour, draws, learner.share)
        if settings.cutmix and float(torch.rand((), generator=draws)) < settings.cutmix:
            inputs, own = paste_patches(inputs, draws)
        with in_half(images.device):
            logits = learner.network(inputs.contiguous(memory_format=torch.channels_last)).float()
        loss = own * functional.cross_entropy(
            logits, labels, label_smoothing=settings.label_smoothing
        )
        if own < 1:
            loss = loss + (1 - own) * functional.cross_entropy(
                logits, labels.roll(1), label_smoothing=settings.label_smoothing
            )
        learner.learn(loss, settings.lr * _rate_share(epoch + place / batches, settings.epochs))


def _rate_share(epoch: float, epochs: int) -> float:
    """Return the share of the highest rate: rising over two epochs (or a fifth), then a half
    cosine.
    """
    warm = min(2.0, epochs / 5)
    if epoch < warm:
        return max(epoch, 0.05) / warm
    return 0.5 * (1 + math.cos(math.pi * (epoch - warm) / (epochs - warm)))


@torch.no_grad()
def features_of(
    network: ResNet,
    pictures: Pictures,
    most: int = 1000,
    tick: Callable[[int], object] = lambda count: None,
    mirrored: bool = False,
    shrunk: float = 1.0,
) -> Float[Tensor, "N D"]:
    """Return the input of the last layer for each picture, in float32.

    Args:
        most: maximum number of pictures at a time.
        tick: called repeatedly with the number of pictures just finished.
        mirrored: average over the picture and its mirror image.
        shrunk: average over the picture and the picture shrunk to this share of its side.
    """
    device = pictures.labels.device
    found = torch.empty(len(pictures.labels), network.feature_size, device=device)
    done = 0
    for part in pictures.in_order(most):
        with in_half(device):
            views = [normalise(part)]
            if shrunk < 1:
                side = max(1, round(shrunk * pictures.size))
                views.append(functional.interpolate(views[0], (side, side), mode="bilinear"))
            if mirrored:
                views += [view.flip(3) for view in views]
            seen = [
                network.features(view.contiguous(memory_format=torch.channels_last))
                for view in views
            ]
            found[done : done + len(part)] = torch.stack(seen).mean(0)
        done += len(part)
        tick(len(part))
    return found


@contextlib.contextmanager
def _fastest_convolutions() -> Iterator[None]:
    """Let cuDNN find the fastest convolutions for the current sizes by trial."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextlib.contextmanager
def in_half(device: torch.device) -> Iterator[None]:
    """Use bfloat16 where it is fast."""
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        yield
