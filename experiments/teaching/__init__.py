"""The few-shot learner on data that played no part in choosing its settings.

This experiment is ours, not the paper's. `mbpa.teaching` and its baselines meet situations that
differ from those they were made in: whole domains are new, the known labels come from another
corpus, labels come one after another, one label in ten is wrong, keys are those of pictures or of
another sentence encoder. All settings are those of the experiment on new intents.
"""

from __future__ import annotations

from dataclasses import replace

from experiments.experiment import BySeed, Context, Experiment
from experiments.intents.config import PRESETS as INTENT_PRESETS
from experiments.intents.config import IntentsConfig
from experiments.intents.incremental import run_method, start_of
from experiments.intents.methods import Start, make_classifier
from experiments.intents.task import IntentTask
from experiments.measures import percent, split_labels
from experiments.results import Record
from experiments.teaching.config import PRESETS, TeachingConfig
from experiments.teaching.figures import sections
from experiments.teaching.situations import SITUATIONS

__all__ = ["EXPERIMENT", "TeachingConfig", "run"]


def run(config: TeachingConfig, context: Context) -> BySeed:
    """Run one situation after the other, skipping methods already completed with a seed."""
    for name in config.situations:
        SITUATIONS[name].require()
    records: BySeed = {seed: [] for seed in config.seeds}
    settings = replace(INTENT_PRESETS["paper"], shots=config.shots)
    total = len(config.situations) * len(config.seeds) * len(config.methods)
    with context.bar(total, "methods", "methods") as bar:
        for name in config.situations:
            situation = SITUATIONS[name]
            corpus = situation.read(config.size, context)
            for seed in config.seeds:
                place = f"{name}-{seed}"
                kept = context.workspace.load(place) or {"records": []}
                done = {record["method"] for record in kept["records"]}
                task = situation.make_task(name, corpus, seed, context)
                start = start_of(task, settings, seed)
                for method in config.methods:
                    if method not in done:
                        found = run_method(task, start, settings, method)
                        if situation.in_lessons:
                            found += run_lessons(task, start, settings, config, method)
                        kept["records"] += found
                        context.workspace.save(place, kept)
                    bar.update()
                records[seed] += kept["records"]
    return records


def run_lessons(
    task: IntentTask, start: Start, settings: IntentsConfig, config: TeachingConfig, method: str
) -> list[Record]:
    """Teach one new label after another; after some of them, test on all labels so far."""
    classifier = make_classifier(settings.settings(method), start)
    examples = task.examples(config.lesson_examples)
    records: list[Record] = []
    before = 0
    for lessons in config.lessons:
        if task.old + lessons > len(task.names):
            break
        is_next = (examples.labels >= task.old + before) & (examples.labels < task.old + lessons)
        classifier.learn(examples.select(is_next.nonzero()[:, 0]))
        before = lessons
        asked = task.scored.select((task.scored.labels < task.old + lessons).nonzero()[:, 0])
        found = classifier.log_probs(asked)[:, : task.old + lessons]  # others are still unknown
        right = found.argmax(1) == asked.labels
        for subset, members in split_labels(asked.labels, task.old).items():
            records.append(
                {
                    "corpus": task.corpus,
                    "method": method,
                    "lessons": lessons,
                    "split": start.seed,
                    "subset": subset,
                    "name": "top1",
                    "value": percent(right[members]),
                }
            )
    return records


EXPERIMENT = Experiment(
    name="teaching",
    summary="the few-shot learner in situations that it was not made for",
    reproduces="nothing in the paper; how far the learner's advantage holds",
    presets=PRESETS,
    run=run,
    sections=sections,
)
