"""Presets of the experiments on new image classes.

The settings of `PAPER` were chosen by `experiments tune incremental-images --preset paper --adopt`.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from experiments.images.config import ImagesConfig
from experiments.pretraining import Pretraining
from experiments.tuned_settings import apply_tuned_settings

LIGHT: dict[str, Any] = {
    "layers": 18,
    "weight_decay": 5e-4,
    "smallest_crop": 1.0,
    "colour": 0.0,
    "cutmix": 0.0,
}
"""Training of small networks for a few epochs, with less regularisation: they see little data."""
SMOKE = ImagesConfig(
    seeds=(1,),
    enlarged=0,
    mirrored=False,
    shrunk=1.0,
    classes=6,
    held_out=100,
    rehearsed=10,
    scored=120,
    pretraining=Pretraining(width=4, epochs=1, batch=100, **LIGHT),
    points=(0.1, 1.0),
    capacity=2_970,
)
PAPER = apply_tuned_settings(
    ImagesConfig(rehearsed=25, capacity=97_500), "incremental-images", "paper"
)
QUICK = replace(
    PAPER,
    seeds=(1,),
    classes=20,
    scored=1_000,
    pretraining=Pretraining(width=16, epochs=8, batch=128, **LIGHT),
    enlarged=0,
    mirrored=False,
    shrunk=1.0,
    points=(0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 3.0),
    lr=3.0,  # because an epoch has a tenth of the steps
    capacity=9_750,
)
PRESETS = {"smoke": SMOKE, "quick": QUICK, "paper": PAPER}


def count_images_per_epoch(config: ImagesConfig) -> int:
    """Return the images of Tiny ImageNet per epoch, which a memory can hold without duplicates."""
    each, known = 500 - config.spared, config.classes // 2
    new = config.classes - known
    few = new // 2 if config.scarce < 1 else 0
    many = (new - few) * each + few * round(config.scarce * each)
    return many + known * (each - config.rehearsed)


def copy_fields(config: ImagesConfig) -> dict[str, Any]:
    """Return the fields that an experiment with additional fields takes over."""
    return {field.name: getattr(config, field.name) for field in fields(ImagesConfig)}
