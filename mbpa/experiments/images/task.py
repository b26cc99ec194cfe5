"""One random half of the classes: a network that knows them, and what it makes of all images."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from mbpa.experiments import data, pretraining, resnet
from mbpa.experiments.experiment import Context
from mbpa.experiments.images.config import ImagesConfig
from mbpa.experiments.pretraining import Pictures, accuracy, features_of, pretrained
from mbpa.experiments.results import write_whole

FORMAT = 1  # of the kept features


@dataclass(frozen=True, eq=False)
class Task:
    """Features of all images. Labels below `old` are of classes that the network knows."""

    old: int
    classes: Int[Tensor, "C"]
    """The data set's number of each class, the known ones first."""
    train: Float[Tensor, "N D"]
    train_labels: Int[Tensor, "N"]
    validation: Float[Tensor, "V D"]
    validation_labels: Int[Tensor, "V"]
    test: Float[Tensor, "Q D"]
    test_labels: Int[Tensor, "Q"]
    weight: Float[Tensor, "O D"]
    bias: Float[Tensor, "O"]
    known: float
    """The network's accuracy on test images of the classes it knows, before anything new."""


def make_task(config: ImagesConfig, context: Context, seed: int) -> Task:
    """Trained and computed once for all runs that ask for the same."""
    path = context.cache / f"features-{_fingerprint(config, context, seed)}.safetensors"
    tensors = _read(path, context.device)
    if tensors is not None:
        old, known = int(tensors.pop("old")), float(tensors.pop("known"))
        return Task(old=old, known=known, **tensors)
    task = _computed(config, context, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {name: torch.as_tensor(value).cpu() for name, value in vars(task).items()}
    write_whole(path, save({name: tensor.contiguous() for name, tensor in kept.items()}))
    return task


def _read(path: Path, device: torch.device) -> dict[str, Tensor] | None:
    """What was kept, if it is whole."""
    try:
        return load_file(path, device=str(device))
    except FileNotFoundError:
        return None
    except SafetensorError:
        warnings.warn(f"{path} is damaged and is computed anew", stacklevel=2)
        return None


def _fingerprint(config: ImagesConfig, context: Context, seed: int) -> str:
    """Of all that the features depend on."""
    names = "size", "classes", "held_out"
    told: dict[str, Any] = {name: getattr(config, name) for name in names} | {
        "seed": seed,
        "format": FORMAT,
    }
    told |= {"torch": str(torch.__version__), "device": context.device.type}
    told["data"] = str(data.data_dir(context.data_dir).resolve())
    told["code"] = [inspect.getsource(module) for module in (pretraining, resnet)]
    told["pretraining"] = dataclasses.asdict(config.pretraining)
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def _computed(config: ImagesConfig, context: Context, seed: int) -> Task:
    data.require("tiny-imagenet", context.data_dir)
    chosen = torch.randperm(200, generator=torch.Generator().manual_seed(0))[: config.classes]
    images = data.tiny_imagenet(
        context.data_dir, size=config.size, classes=chosen.sort().values.tolist()
    )
    shuffled = torch.randperm(config.classes, generator=torch.Generator().manual_seed(seed + 1))
    classes, old = chosen[shuffled].to(context.device), config.classes // 2
    kept, held = _parts(images.train.labels, config.held_out)
    everything = Pictures(
        images.train.images.to(context.device), images.train.labels.to(context.device)
    )
    train = Pictures(everything.images[kept], everything.labels[kept])
    test = Pictures(images.test.images.to(context.device), images.test.labels.to(context.device))
    known = train.of_classes(classes[:old])
    network = pretrained(config.pretraining, known, old, seed, context, f"split-{seed}")
    features = features_of(network, everything.images)
    place = torch.zeros(200, dtype=torch.int64, device=context.device)
    place[classes] = torch.arange(len(classes), device=place.device)
    return Task(
        old=old,
        classes=classes,
        train=features[kept],
        train_labels=place[train.labels],
        validation=features[held],
        validation_labels=place[everything.labels[held]],
        test=features_of(network, test.images),
        test_labels=place[test.labels],
        weight=network.fc.weight.detach().float(),
        bias=network.fc.bias.detach().float(),
        known=accuracy(network, test.of_classes(classes[:old])),
    )


def _parts(labels: Int[Tensor, "N"], held_out: int) -> tuple[Tensor, Tensor]:
    """Images to train on, and those held out; the same for every split."""
    draws = torch.Generator().manual_seed(0)
    kept, held = [], []
    for label in labels.unique().tolist():
        rows = (labels == label).nonzero()[:, 0]
        rows = rows[torch.randperm(len(rows), generator=draws)]
        held.append(rows[:held_out])
        kept.append(rows[held_out:])
    return torch.cat(kept).sort().values, torch.cat(held).sort().values
