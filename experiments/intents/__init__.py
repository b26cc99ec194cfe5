"""New intents: a text classifier over frozen sentence embeddings learns intents it never saw.

This experiment is ours, not the paper's: the everyday use of the method. A head knows two thirds of
the intents of CLINC150 or Banking77; the others arrive with a few examples each. Every method is
then tested on all intents: accuracy on the new and the old ones, calibration of its confidence, and
the cost of one more example and of one more prediction.
"""

from __future__ import annotations

from experiments.experiment import BySeed, Context, Experiment
from experiments.intents.config import PRESETS, IntentsConfig
from experiments.intents.figures import sections
from experiments.intents.incremental import embedding_times, run_method, start_of
from experiments.intents.task import embed_corpus, make_intent_task, require_corpora
from experiments.intents.tuning import make_search_config, tune
from mbpa.encoders import text

__all__ = ["EXPERIMENT", "IntentsConfig", "run", "tune"]


def run(config: IntentsConfig, context: Context) -> BySeed:
    """Run one corpus after the other, skipping methods already completed on a split."""
    config.require()
    require_corpora(config.corpora, context)
    records: BySeed = {seed: [] for seed in config.seeds}
    encoder = text.encoder(config.encoder, device=context.device)
    total = len(config.corpora) * len(config.seeds) * len(config.methods)
    with context.bar(total, "methods", "methods") as bar:
        for name in config.corpora:
            corpus = embed_corpus(name, config.part, config.size, encoder, context)
            for seed in config.seeds:
                place = f"{name}-{seed}"
                kept = context.workspace.load(place) or {"records": []}
                done = {record.get("method") for record in kept["records"]}
                task = make_intent_task(corpus, seed)
                start = start_of(task, config, seed)
                if config.peers and not done:
                    kept["records"] += embedding_times(encoder, task, seed)
                for method in config.methods:
                    if method not in done:
                        kept["records"] += run_method(task, start, config, method)
                        context.workspace.save(place, kept)
                    bar.update()
                records[seed] += kept["records"]
    return records


EXPERIMENT = Experiment(
    name="new-intents",
    summary="a text classifier learns new intents from a few examples each",
    reproduces="nothing in the paper; the method's everyday use",
    presets=PRESETS,
    run=run,
    sections=sections,
    searched=make_search_config,
    tune=tune,
)
