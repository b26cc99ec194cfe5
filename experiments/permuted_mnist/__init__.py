"""Permuted MNIST: twenty tasks in sequence, each the digits under another order of the pixels.

After section 4.1 and figure 3 of the paper: an MLP learns one task after the other and forgets the
first while it learns the last. After each task, every method is tested on all tasks so far. MbPA
stores a few examples of the stream. Neither it nor the other rehearsing methods know where a task
ends; EWC has to. Differences from the paper are numbered in docs/paper.md.
"""

from __future__ import annotations

import contextlib

from experiments import data
from experiments.experiment import BySeed, Context, Experiment
from experiments.permuted_mnist.config import (
    PRESETS,
    AdaptationBySize,
    PermutedMnistConfig,
    searched,
)
from experiments.permuted_mnist.figures import sections
from experiments.permuted_mnist.scoring import record_scores, score_methods
from experiments.permuted_mnist.training import Training
from experiments.permuted_mnist.tuning import tune
from mbpa.device import use_one_thread

MLP_THREADING_UNITS = 100  # units from which a second thread helps
__all__ = ["EXPERIMENT", "AdaptationBySize", "PermutedMnistConfig", "run", "tune"]


def run(config: PermutedMnistConfig, context: Context) -> BySeed:
    """Run all repetitions in parallel, and return records by seed."""
    data.require("mnist", context.data_dir)
    streams = [False, True] if config.switching else [False]
    records: BySeed = {seed: [] for seed in config.seeds}
    threads = use_one_thread() if config.hidden < MLP_THREADING_UNITS else contextlib.nullcontext()
    with threads, context.bar(len(streams) * config.tasks, "permuted MNIST", "tasks") as bar:
        for switches in streams:
            training = Training(config, context, switches)
            training.resume()
            bar.update(training.done // training.blocks_a_task)
            while not training.is_over:
                training.learn_next()
                if training.done % training.blocks_a_task:
                    continue
                if training.is_over or not switches:
                    images = config.test_images if training.is_over else config.curve_images
                    for place, seed in enumerate(config.seeds):
                        scores = score_methods(training, place, images)
                        training.records[seed] += record_scores(training, scores)
                training.save()
                bar.update()
            for seed in config.seeds:
                records[seed] += training.records[seed]
    return records


EXPERIMENT = Experiment(
    name="permuted-mnist",
    summary="twenty tasks in sequence: what is forgotten, and what a memory brings back",
    reproduces="paper, section 4.1, figure 3",
    presets=PRESETS,
    run=run,
    sections=sections,
    searched=searched,
    tune=tune,
)
