"""A language model with a memory: it reads a corpus once and predicts similar texts better.

This experiment is ours, after section 4.3 of the paper and after kNN-LM: keys are the states of a
causal language model before its output layer, values the tokens that follow. The network is frozen,
or fine-tuned on the same corpus. Settings and gates are chosen on the whole validation text; the
whole test text is scored with them. Penn Treebank takes no part: in the usual files it has neither
capital letters nor numbers, and every rare word is `<unk>`, which is not text that such a model
knows.
"""

from __future__ import annotations

import time

import torch

from experiments.experiment import BySeed, Context, Experiment
from experiments.memory_language_model.comparison import Comparison
from experiments.memory_language_model.config import PRESETS, MemoryLanguageConfig
from experiments.memory_language_model.figures import sections
from experiments.memory_language_model.library import Library
from experiments.memory_language_model.networks import (
    FineTuning,
    compute_states,
    fine_tune,
    get_head,
    load_network,
    load_tokenizer,
)
from experiments.memory_language_model.texts import SPLITS, Text, read_text
from experiments.results import Record

__all__ = ["EXPERIMENT", "MemoryLanguageConfig", "run"]


def run(config: MemoryLanguageConfig, context: Context) -> BySeed:
    """Compare all methods, one network after the other; completed networks are not repeated."""
    tokenizer = load_tokenizer(config.model)
    name = (config.model or "default").strip("/").replace("/", "-")
    texts = {
        corpus: {
            split: read_text(
                corpus,
                split,
                tokenizer,
                context.data_dir,
                context.cache / "tokens" / name,
                config.tokens if split == "train" else config.scored_tokens,
            )
            for split in SPLITS
        }
        for corpus in config.corpora
    }
    records: BySeed = {}
    with context.bar(len(config.seeds) * len(config.networks), "networks", "networks") as bar:
        for seed in config.seeds:
            records[seed] = []
            for network in config.networks:
                kept = context.workspace.load(f"{network}-{seed}")
                if kept is None:
                    kept = {"records": run_network(network, texts, config, context, seed)}
                    context.workspace.save(f"{network}-{seed}", kept)
                records[seed] += kept["records"]
                bar.update()
    return records


def run_network(
    network: str,
    texts: dict[str, dict[str, Text]],
    config: MemoryLanguageConfig,
    context: Context,
    seed: int,
) -> list[Record]:
    """Return the records of one network on all corpora."""
    libraries, costs = {}, list[Record]()
    for corpus, parts in texts.items():
        where: Record = {"corpus": corpus, "network": network, "method": "model"}
        model, seconds = load_network(config.model, context.device), 0.0
        if network != "frozen":
            settings = choose_training(network, config)
            model, seconds = fine_tune(model, parts["train"], config.window, settings, seed)
        costs.append({**where, "name": "training_seconds", "value": seconds})
        began, is_half = time.perf_counter(), network != "frozen" and context.device.type == "cuda"
        states = {
            split: compute_states(model, text, config.window, config.batch, is_half=is_half)
            for split, text in parts.items()
        }
        libraries[corpus] = Library(get_head(model), states, config.k)
        read = len(states["train"].targets)
        costs += [
            {**where, "name": "reading_seconds", "value": time.perf_counter() - began},
            {**where, "name": "tokens_read", "value": read},
            {**where, "name": "memory_bytes", "value": read * libraries[corpus].bytes_per_entry},
        ]
    with context.bar(0, network, "figures") as bar:
        comparison = Comparison(network, libraries, config, lambda _: bar.update() and None)
        comparison.run()
        if config.memories:
            comparison.run_memories()
        if config.curves:
            comparison.run_curves()
    if context.device.type == "cuda":
        torch.cuda.empty_cache()
    return costs + comparison.records


def choose_training(network: str, config: MemoryLanguageConfig) -> FineTuning:
    """Return how a network is fine-tuned: tuned-1, tuned-3 or lora."""
    if network == "lora":
        return FineTuning(epochs=1, lr=config.lora_lr, lora=True)
    return FineTuning(epochs=int(network.removeprefix("tuned-")), lr=config.lr)


EXPERIMENT = Experiment(
    name="memory-language-model",
    summary="a language model reads a corpus once, and predicts similar texts better",
    reproduces="nothing in the paper; section 4.3 with a model of today",
    presets=PRESETS,
    run=run,
    sections=sections,
)
