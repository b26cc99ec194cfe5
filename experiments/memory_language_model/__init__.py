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
from typing import Any

import torch
from torch import nn

from experiments.experiment import BySeed, Context, Experiment
from experiments.memory_language_model.comparison import Comparison
from experiments.memory_language_model.config import PRESETS, MemoryLanguageConfig
from experiments.memory_language_model.figures import sections
from experiments.memory_language_model.library import Library
from experiments.memory_language_model.networks import (
    FineTuning,
    States,
    compute_states,
    fine_tune,
    get_head,
    load_network,
    make_head,
    plan_windows,
)
from experiments.memory_language_model.texts import SPLITS, Text, read_text
from experiments.results import Record

__all__ = ["EXPERIMENT", "MemoryLanguageConfig", "run"]


def run(config: MemoryLanguageConfig, context: Context) -> BySeed:
    """Compare all methods, one network after the other; completed networks are not repeated."""
    base, tokenizer = load_network(config.model, context.device)
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
                    kept = {"records": run_network(network, base, texts, config, context, seed)}
                    context.workspace.save(f"{network}-{seed}", kept)
                records[seed] += kept["records"]
                bar.update()
    return records


def run_network(
    network: str,
    base: nn.Module,
    texts: dict[str, dict[str, Text]],
    config: MemoryLanguageConfig,
    context: Context,
    seed: int,
) -> list[Record]:
    """Return the records of one network on all corpora; completed stages are not repeated."""
    libraries, costs = {}, list[Record]()
    for corpus, parts in texts.items():
        name = f"{network}-{seed}-{corpus}"
        kept = context.workspace.load(name)
        if kept is None:
            kept = read_corpus(network, base, parts, config, context, seed, corpus)
            context.workspace.save(name, kept)
        states = {
            split: States(*(kept[kind][split].to(context.device) for kind in ("keys", "targets")))
            for split in parts
        }
        libraries[corpus] = Library(make_head(kept["head"], context.device), states, config.k)
        read = len(states["train"].targets)
        where: Record = {"corpus": corpus, "network": network, "method": "model"}
        costs += [
            {**where, "name": "training_seconds", "value": kept["training_seconds"]},
            {**where, "name": "reading_seconds", "value": kept["reading_seconds"]},
            {**where, "name": "tokens_read", "value": read},
            {**where, "name": "memory_bytes", "value": read * libraries[corpus].bytes_per_entry},
        ]
    with context.bar(0, network, "results") as bar:
        comparison = Comparison(network, libraries, config, lambda _: bar.update() and None)
        for stage in comparison.list_stages():
            name = f"{network}-{seed}-{stage}"
            kept = context.workspace.load(name)
            bar.set_description(f"{network}: {stage}")
            if kept is None:
                comparison.run(stage)
                context.workspace.save(name, comparison.get_state())
            else:
                comparison.set_state(kept)
    if context.device.type == "cuda":
        torch.cuda.empty_cache()
    return costs + comparison.records


def read_corpus(
    network: str,
    base: nn.Module,
    texts: dict[str, Text],
    config: MemoryLanguageConfig,
    context: Context,
    seed: int,
    corpus: str,
) -> dict[str, Any]:
    """Fine-tune a network on a corpus, unless it is frozen, and return its states along all texts.

    The result holds tensors and numbers only, as workspaces keep them.
    """
    model, training_seconds, device = base, 0.0, next(base.parameters()).device
    if network != "frozen":
        settings = choose_training(network, config)
        with context.bar(0, f"{network}: training on {corpus}", "updates") as bar:
            model, training_seconds = fine_tune(
                base, texts["train"], config.window, settings, seed, tick=bar.update
            )
    began, is_half = time.perf_counter(), network != "frozen" and device.type == "cuda"
    states = {}
    for split, text in texts.items():
        windows = sum(1 for _ in plan_windows(text.lengths, config.window))
        with context.bar(windows, f"{network}: reading {corpus}, {split}", "windows") as bar:
            states[split] = compute_states(
                model, text, config.window, config.batch, is_half=is_half, tick=bar.update
            )
    return {
        "head": get_head(model),
        "keys": {split: each.keys for split, each in states.items()},
        "targets": {split: each.targets for split, each in states.items()},
        "training_seconds": training_seconds,
        "reading_seconds": time.perf_counter() - began,
    }


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
