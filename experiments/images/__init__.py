"""New image classes: a network that knows half of the classes meets all of them.

After section 4.2, table 1, figures 4 and 5 and the appendix of the paper. The paper used ImageNet;
here it is Tiny ImageNet at 40x40 pixels. The network is trained on a random half of the classes.
After that only its last layer learns, from a stream of all classes. The paper's methods use that
layer and a memory of the same stream, and differ only in the predictor; ours build a layer from the
memory.
"""

from __future__ import annotations

from dataclasses import replace

from experiments.experiment import BySeed, Context, Experiment, run_each_seed
from experiments.images import neighbourhoods, sensitivity
from experiments.images.config import ImagesConfig
from experiments.images.figures import incremental_sections, unbalanced_sections
from experiments.images.incremental import run_split
from experiments.images.methods import BalancedAdaptation
from experiments.images.neighbourhood_figures import neighbourhood_sections
from experiments.images.presets import PRESETS, count_images_per_epoch
from experiments.images.sensitivity_figures import sensitivity_sections
from experiments.images.task import make_image_task
from experiments.images.tuning import (
    make_balance_search_config,
    make_search_config,
    tune,
    tune_balance,
)
from experiments.results import Record
from experiments.tuned_settings import apply_tuned_settings

__all__ = [
    "INCREMENTAL",
    "NEIGHBOURHOODS",
    "SENSITIVITY",
    "UNBALANCED",
    "ImagesConfig",
    "run",
    "tune",
]

UNBALANCED_NAME = "unbalanced-images"
SCARCE = 0.1
UNTIL_TWENTY = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 12.5, 15.0, 17.5, 20.0)


def run(config: ImagesConfig, context: Context) -> BySeed:
    """Run one split after the other, skipping those already completed."""
    with context.bar(len(config.seeds), "splits", "splits") as bar:

        def run_seed(seed: int) -> list[Record]:
            return run_split(make_image_task(config, context, seed), config, seed)

        return run_each_seed(config.seeds, context, run_seed, tick=bar.update)


def make_unbalanced(name: str, preset: ImagesConfig) -> ImagesConfig:
    """Return a preset in which some new classes have few images.

    With `paper`, the settings of `MbPA (balanced)` are those that a search with such data chose.
    """
    config = replace(
        preset,
        scarce=SCARCE,
        points=UNTIL_TWENTY if name == "paper" else preset.points,
        capacity=count_images_per_epoch(replace(preset, scarce=SCARCE)),
        balanced=BalancedAdaptation(**vars(preset.gradient)),
    )
    return apply_tuned_settings(config, UNBALANCED_NAME, name) if name == "paper" else config


INCREMENTAL = Experiment(
    name="incremental-images",
    summary="a network that knows half of the classes meets all of them",
    reproduces="paper, section 4.2, table 1, figure 4",
    presets=PRESETS,
    run=run,
    sections=incremental_sections,
    searched=make_search_config,
    tune=tune,
)

UNBALANCED = Experiment(
    name=UNBALANCED_NAME,
    summary="the same, with a tenth of the data for half of the new classes",
    reproduces="paper, section 4.2.1, figure 5 left",
    presets={name: make_unbalanced(name, preset) for name, preset in PRESETS.items()},
    run=run,
    sections=unbalanced_sections,
    searched=make_balance_search_config,
    tune=tune_balance,
)

NEIGHBOURHOODS = Experiment(
    name="image-neighbourhoods",
    summary="images that only MbPA gets right, and the neighbours it adapted to",
    reproduces="paper, section 4.2.1, figure 5 right",
    presets=neighbourhoods.PRESETS,
    run=neighbourhoods.run,
    sections=neighbourhood_sections,
)

SENSITIVITY = Experiment(
    name="image-sensitivity",
    summary="size of the memory, number of neighbours, rate of the last layer, and the long run",
    reproduces="paper, appendix, figures on memory size, learning rate and neighbours",
    presets=sensitivity.PRESETS,
    run=sensitivity.run,
    sections=sensitivity_sections,
)
