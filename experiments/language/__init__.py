"""Language modelling: a trained LSTM reads new text, with and without a memory of that text.

After section 4.3, table 2 and the appendix of the paper. The network is trained once for all
methods, which differ in how they use its states. Mixture weights and all other settings are chosen
on the validation text. Differences from the paper are listed in docs/paper.md.
"""

from __future__ import annotations

import contextlib

from experiments.data import Corpus
from experiments.experiment import BySeed, Context, Experiment, run_each_seed
from experiments.language.config import PRESETS, LanguageConfig
from experiments.language.corpus import read_corpus
from experiments.language.evaluation import evaluate
from experiments.language.figures import sections
from experiments.language.search_figures import search_sections
from experiments.language.training import (
    LSTM_THREADING_UNITS,
    adam_state,
    learning_curve,
    train_or_load,
)
from experiments.language.tuning import make_search_config, tune
from experiments.results import Record
from mbpa.device import use_one_thread

__all__ = ["EXPERIMENT", "LanguageConfig", "run", "tune"]


def run(config: LanguageConfig, context: Context) -> BySeed:
    """Run one network after the other; completed work is not repeated."""
    corpus = read_corpus(config, context)
    threads = (
        use_one_thread()
        if config.network.hidden < LSTM_THREADING_UNITS
        else contextlib.nullcontext()
    )

    def run_seed(seed: int) -> list[Record]:
        model = train_or_load(config, corpus, context, seed)
        moments = adam_state(config, corpus, context, seed)
        found = evaluate(model, corpus, config, context, seed, moments)
        return curve_records(config, corpus, context, seed) + found

    with threads:
        return run_each_seed(config.seeds, context, run_seed)


def curve_records(
    config: LanguageConfig, corpus: Corpus, context: Context, seed: int
) -> list[Record]:
    """Return the learning curve and the training time of a trained network."""
    curve, seconds = learning_curve(config, corpus, context, seed)
    where: Record = {"method": "LSTM", "corpus": config.corpus}
    records: list[Record] = [{**where, "name": "training_seconds", "value": seconds}]
    for point in curve:
        for split, value in (("train", point.train), ("valid", point.valid)):
            told: Record = {"split": split, "epochs": point.epochs, "value": value}
            records.append({**where, "name": f"training_{split}_perplexity", **told})
    return records


EXPERIMENT = Experiment(
    name="language",
    summary="an LSTM meets new text, and remembers the words that it has just read",
    reproduces="paper, section 4.3, table 2; appendix, words by frequency",
    presets=PRESETS,
    of_the_search=("search",),
    run=run,
    sections=sections,
    searched=make_search_config,
    tune=tune,
    search_sections=search_sections,
)
