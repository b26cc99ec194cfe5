"""MbPA on top of DER++: what a memory adds to a network that already replays it.

Only DER++ is trained, which takes minutes on two cores if few examples are stored. DER++ stores
logits with its examples. MbPA adapts its networks to the same examples, towards their labels, their
logits, or through one more layer, and stores nothing more.
"""

from __future__ import annotations

from dataclasses import replace

from experiments import data
from experiments.experiment import BySeed, Context, Experiment
from experiments.permuted_mnist.config import PRESETS, PermutedMnistConfig, select_sizes
from experiments.permuted_mnist.figures import sections_on_der
from experiments.permuted_mnist.scoring import record_scores, score_methods
from experiments.permuted_mnist.training import Training, make_der_group


def run(config: PermutedMnistConfig, context: Context) -> BySeed:
    """Run all repetitions in parallel, and return records by seed."""
    data.require("mnist", context.data_dir)
    training = Training(config, context, groups=[make_der_group(config, context)])
    training.resume()
    total = config.tasks + len(config.seeds)
    with context.bar(total, "MbPA on DER++", "steps", initial=training.done) as bar:
        while not training.is_over:
            training.learn_next()
            training.save(keep_all=True)
            bar.update()
        for place, seed in enumerate(config.seeds):
            if not training.records[seed]:
                scores = score_methods(training, place, config.test_images)
                training.records[seed] = record_scores(training, scores)
                training.save(keep_all=True)
            bar.update()
    return {seed: training.records[seed] for seed in config.seeds}


def _without_switching(config: PermutedMnistConfig) -> PermutedMnistConfig:
    return replace(config, switching=False)


EXPERIMENT = Experiment(
    name="permuted-mnist-der",
    summary="what MbPA adds to networks that DER++ has trained",
    reproduces="nothing; DER++ is later than the paper",
    presets={
        "smoke": _without_switching(PRESETS["smoke"]),
        "quick": replace(select_sizes(PRESETS["quick"], (100,)), seeds=(0, 1)),
        "paper": _without_switching(PRESETS["paper"]),
        "paper-100": _without_switching(select_sizes(PRESETS["paper"], (100,))),
    },
    run=run,
    sections=sections_on_der,
)
