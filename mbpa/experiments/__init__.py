"""The experiments and the frame they run in; nothing else in mbpa imports these.

One readable file an experiment. `EXPERIMENTS` says where each is, so that naming them all costs
nothing; `experiment.find` imports one.
"""

EXPERIMENTS: dict[str, str] = {
    "illustration": "mbpa.experiments.illustration:EXPERIMENT",
    "permuted-mnist": "mbpa.experiments.permuted_mnist:EXPERIMENT",
    "incremental-images": "mbpa.experiments.images:INCREMENTAL",
    "unbalanced-images": "mbpa.experiments.images:UNBALANCED",
    "image-neighbourhoods": "mbpa.experiments.images:NEIGHBOURHOODS",
    "image-sensitivity": "mbpa.experiments.images:SENSITIVITY",
    "language": "mbpa.experiments.language:EXPERIMENT",
    "new-intents": "mbpa.experiments.intents:EXPERIMENT",
}
"""Module and attribute, by name, in the order of the paper; then our own."""
