"""The experiments and the frame they run in; nothing else in mbpa imports these.

One readable file an experiment. `EXPERIMENTS` says where each is, so that naming them all costs
nothing; `experiment.find` imports one.
"""

EXPERIMENTS: dict[str, str] = {
    "illustration": "experiments.illustration:EXPERIMENT",
    "permuted-mnist": "experiments.permuted_mnist:EXPERIMENT",
    "incremental-images": "experiments.images:INCREMENTAL",
    "unbalanced-images": "experiments.images:UNBALANCED",
    "image-neighbourhoods": "experiments.images:NEIGHBOURHOODS",
    "image-sensitivity": "experiments.images:SENSITIVITY",
    "language": "experiments.language:EXPERIMENT",
    "new-intents": "experiments.intents:EXPERIMENT",
}
"""Module and attribute, by name, in the order of the paper; then our own."""
