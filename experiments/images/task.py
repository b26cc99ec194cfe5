"""One random half of the classes: a network that knows them, and its features of all images."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors.torch import save
from torch import Tensor

from experiments import data, picture_sets, pretraining, resnet
from experiments.data import pictures as reading
from experiments.data import tiny_imagenet
from experiments.errors import ExperimentError
from experiments.experiment import Context
from experiments.images.config import ImagesConfig
from experiments.picture_sets import Held, Pictures, Streamed, index_labels
from experiments.pretraining import features_of, pretrain
from experiments.results import environment
from experiments.tensor_cache import read_cached
from mbpa.files import write_durably

FEATURES_FORMAT = 2  # version of the feature files


@dataclass(frozen=True, eq=False)
class ImageTask:
    """Features of all images. Labels below `old` belong to classes that the network knows."""

    old: int
    classes: Int[Tensor, "C"]
    """The data set's number of each class, known classes first."""
    train: Float[Tensor, "N D"]
    train_labels: Int[Tensor, "N"]
    validation: Float[Tensor, "V D"]
    validation_labels: Int[Tensor, "V"]
    test: Float[Tensor, "Q D"]
    test_labels: Int[Tensor, "Q"]
    weight: Float[Tensor, "O D"]
    bias: Float[Tensor, "O"]
    known: float
    """The network's accuracy on test images of its known classes, before anything new."""
    made_on: str = ""
    """The device the network was trained on, and the version of torch there."""
    rehearsal: Float[Tensor, "R D"] | None = None
    """Images of known classes that are set aside; `None` if there are none."""
    rehearsal_labels: Int[Tensor, "R"] | None = None


def make_image_task(config: ImagesConfig, context: Context, seed: int) -> ImageTask:
    """Load or compute the features, once for all runs with the same settings. The file also serves
    another machine with the same images.
    """
    path = context.cache / f"features-{_fingerprint(config, context, seed)}.safetensors"
    task = _read_features(path, context.device)
    if task is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, _serialize(_compute_task(config, context, seed)))
        task = _read_features(path, context.device)  # so that the first run sees the same rounding
        assert task is not None, "it has just been written"
    return task


HALVED = "train", "validation", "test", "rehearsal"
"""Features stored in half precision, which is finer than a GPU's arithmetic that computes them."""


def _serialize(task: ImageTask) -> bytes:
    tensors = {name: value for name, value in vars(task).items() if isinstance(value, Tensor)}
    tensors |= {name: tensors[name].half() for name in HALVED if name in tensors}
    told = {"old": str(task.old), "known": repr(task.known), "made_on": task.made_on}
    return save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, told)


def _read_features(path: Path, device: torch.device) -> ImageTask | None:
    """Read stored features; return `None` if the file is missing or damaged."""

    def read(file: Any) -> ImageTask:
        notes = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no dict
        tensors |= {name: tensors[name].float() for name in HALVED if name in tensors}
        known = float(notes["known"])
        return ImageTask(old=int(notes["old"]), known=known, made_on=notes["made_on"], **tensors)

    return read_cached(path, device, read)


def _fingerprint(config: ImagesConfig, context: Context, seed: int) -> str:
    """Return a digest of everything the features depend on."""
    names = "dataset", "size", "enlarged", "mirrored", "shrunk", "classes", "spared", "rehearsed"
    told: dict[str, Any] = {name: getattr(config, name) for name in names} | {
        "seed": seed,
        "format": FEATURES_FORMAT,
    }
    if config.dataset == "imagenet":
        told["files"] = data.imagenet(context.data_dir).digest()
    else:
        folder = data.data_dir(context.data_dir) / "tiny-imagenet"
        told["files"] = sorted((path.name, path.stat().st_size) for path in folder.glob("*.*"))
    modules = pretraining, resnet, picture_sets, reading, tiny_imagenet, sys.modules[__name__]
    told["code"] = [inspect.getsource(module) for module in modules]
    told["pretraining"] = dataclasses.asdict(config.pretraining)
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def _compute_task(config: ImagesConfig, context: Context, seed: int) -> ImageTask:
    chosen, everything, test = _SOURCES[config.dataset](config, context)
    shuffled = torch.randperm(config.classes, generator=torch.Generator().manual_seed(seed + 1))
    classes, old = chosen[shuffled].to(context.device), config.classes // 2
    kept, held, aside = split_images(
        everything.labels.cpu(), classes[:old].cpu(), config.spared, config.rehearsed
    )
    known = everything.select(kept).of_classes(classes[:old])
    network = pretrain(config.pretraining, known, old, seed, context, f"split-{seed}")
    labels, test_labels = (index_labels(part.labels, classes) for part in (everything, test))
    with context.bar(len(labels) + len(test_labels), "features", "pictures") as bar:
        features, test_features = (
            features_of(
                network, part, tick=bar.update, mirrored=config.mirrored, shrunk=config.shrunk
            )
            for part in (everything, test)
        )
    with torch.no_grad():
        familiar = test_labels < old
        right = network.fc(test_features[familiar]).argmax(1) == test_labels[familiar]
    return ImageTask(
        old=old,
        classes=classes,
        train=features[kept],
        train_labels=labels[kept],
        validation=features[held],
        validation_labels=labels[held],
        test=test_features,
        test_labels=test_labels,
        weight=network.fc.weight.detach().float(),
        bias=network.fc.bias.detach().float(),
        known=float(right.double().mean()),
        made_on="{device}, torch {torch}".format(**environment(context.device)),
        rehearsal=features[aside] if config.rehearsed else None,
        rehearsal_labels=labels[aside] if config.rehearsed else None,
    )


# Sources of the images: the data set's numbers of the participating classes, their training images
# and their test images, labelled with these numbers.

Source = tuple[Int[Tensor, "C"], Pictures, Pictures]


def _load_tiny_imagenet(config: ImagesConfig, context: Context) -> Source:
    data.require("tiny-imagenet", context.data_dir)
    chosen = _draw_classes(200, config)
    images = data.tiny_imagenet(
        context.data_dir, size=config.size, classes=chosen.sort().values.tolist()
    )
    train, test = (
        Held(part.images, part.labels).to(context.device).enlarge(config.enlarged)
        for part in (images.train, images.test)
    )
    return chosen, train, test


def _load_imagenet(config: ImagesConfig, context: Context) -> Source:
    folder = data.imagenet(context.data_dir)
    chosen = _draw_classes(len(folder.wnids), config)
    train, test = (
        part.select(torch.isin(part.labels, chosen).nonzero()[:, 0])
        for part in (folder.train, folder.test)
    )
    counts = train.labels.bincount(minlength=len(folder.wnids))
    _check_counts({folder.wnids[number]: int(counts[number]) for number in chosen.tolist()}, config)
    _verify(config, context, train, test)
    return (
        chosen,
        Streamed(train, train.labels.to(context.device), config.size),
        Streamed(test, test.labels.to(context.device), config.size),
    )


def _check_counts(counts: Mapping[str, int], config: ImagesConfig) -> None:
    """Refuse settings for which an ImageNet folder has too few classes or images."""
    if not 2 <= config.classes <= len(counts):
        raise ExperimentError(
            f"classes must be between 2 and {len(counts)}, the number of folders, "
            f"got {config.classes}"
        )
    scarcest = min(counts, key=lambda wnid: counts[wnid])
    if not counts[scarcest]:
        raise ExperimentError(f"{scarcest} has no training images")
    if config.spared + config.rehearsed >= counts[scarcest]:
        aside = f" and rehearsed {config.rehearsed}" if config.rehearsed else ""
        raise ExperimentError(
            f"held_out must be below {counts[scarcest]}, the training images of {scarcest}, "
            f"got {config.held_out}{aside}"
        )
    scarce = sorted(counts.values())[: config.classes // 2]
    fewest = sum(scarce) - len(scarce) * (config.spared + config.rehearsed)
    if config.pretraining.batch > fewest:
        raise ExperimentError(
            f"pretraining.batch must be at most {fewest}, the number of images in the smaller half "
            f"of the classes, got {config.pretraining.batch}"
        )


def _verify(config: ImagesConfig, context: Context, *parts: data.ImageFiles) -> None:
    """Read all pictures once before the long work; a set that passed is not read again."""
    paths = "\0".join(os.path.abspath(path) for part in parts for path in part.paths)
    digest = hashlib.sha256(paths.encode()).hexdigest()[:16]
    mark = context.cache / f"verified-{digest}-{config.classes}"
    if mark.exists():
        return
    with context.bar(sum(len(part.paths) for part in parts), "checking", "pictures") as bar:
        for part in parts:
            part.verify(bar.update)
    mark.parent.mkdir(parents=True, exist_ok=True)
    write_durably(mark, b"")


def _draw_classes(there: int, config: ImagesConfig) -> Int[Tensor, "C"]:
    """Return the participating classes, the same in every split."""
    return torch.randperm(there, generator=torch.Generator().manual_seed(0))[: config.classes]


_SOURCES: dict[str, Callable[[ImagesConfig, Context], Source]] = {
    "tiny-imagenet": _load_tiny_imagenet,
    "imagenet": _load_imagenet,
}


def split_images(
    labels: Int[Tensor, "N"], known: Int[Tensor, "O"], held_out: int, rehearsed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return images to train on, images held out, and images of known classes set aside."""
    kept, held = split_held_out(labels, held_out)
    is_known = torch.isin(labels[kept], known)
    rows = kept[is_known]
    stays, aside = split_held_out(labels[rows], rehearsed)
    return torch.cat([kept[~is_known], rows[stays]]).sort().values, held, rows[aside]


def split_held_out(labels: Int[Tensor, "N"], held_out: int) -> tuple[Tensor, Tensor]:
    """Return images to train on and images held out, the same for every split."""
    draws = torch.Generator().manual_seed(0)
    kept, held = [], []
    for label in labels.unique().tolist():
        rows = (labels == label).nonzero()[:, 0]
        rows = rows[torch.randperm(len(rows), generator=draws)]
        held.append(rows[:held_out])
        kept.append(rows[held_out:])
    return torch.cat(kept).sort().values, torch.cat(held).sort().values
