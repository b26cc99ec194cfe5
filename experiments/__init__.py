"""The experiments and the framework they run in. Nothing in `mbpa` imports this package.

Each experiment can be read from top to bottom. `EXPERIMENTS` says where each one is defined, so
that listing them imports nothing; `experiment.find` imports one.
"""

EXPERIMENTS: dict[str, str] = {
    "illustration": "experiments.illustration:EXPERIMENT",
    "permuted-mnist": "experiments.permuted_mnist:EXPERIMENT",
    "permuted-mnist-der": "experiments.permuted_mnist.on_der:EXPERIMENT",
    "incremental-images": "experiments.images:INCREMENTAL",
    "unbalanced-images": "experiments.images:UNBALANCED",
    "image-neighbourhoods": "experiments.images:NEIGHBOURHOODS",
    "image-sensitivity": "experiments.images:SENSITIVITY",
    "language": "experiments.language:EXPERIMENT",
    "new-intents": "experiments.intents:EXPERIMENT",
    "teaching": "experiments.teaching:EXPERIMENT",
    "memory-language-model": "experiments.memory_language_model:EXPERIMENT",
}
"""Module and attribute by experiment name: those of the paper in its order, then our own."""
