"""One split of one corpus: every method is taught a few examples at a time, and tested."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from functools import partial
from statistics import median

import torch
from jaxtyping import Float
from torch import Tensor

from experiments.intents import heads
from experiments.intents.config import IntentsConfig
from experiments.intents.methods import Classifier, Start, make_classifier
from experiments.intents.peers import Peer
from experiments.intents.task import IntentTask
from experiments.measures import (
    auroc,
    calibration_error,
    percent,
    split_labels,
    time_call,
    wait_for_device,
)
from experiments.results import Record
from mbpa.encoders import text

TIMED_EXAMPLES = 3  # examples taught singly, to time them
SLOW_S = 0.5  # seconds; timing stops after a slower example
REPEATS = {1: 20, 256: 3}  # repeats of a measurement, by batch size
ANSWERED_SHARE = 0.05  # of out-of-scope sentences may be answered, where a method can be told so
EMBEDDING = "embed_microseconds"


def start_of(task: IntentTask, config: IntentsConfig, split: int) -> Start:
    """Return the deployed classifier: a head trained on the known intents."""
    head = heads.train_new_head(
        task.known.keys,
        task.known.labels,
        task.old,
        epochs=config.head_epochs,
        lr=config.head_lr,
        seed=split,
    )
    return Start(
        task.known,
        head,
        len(task.names),
        split,
        config.encoder,
        config.head_epochs,
        config.head_lr,
    )


def teach(
    classifier: Classifier, task: IntentTask, shots: tuple[int, ...]
) -> Iterator[tuple[int, Classifier]]:
    """Yield the classifier after each number of examples per new intent."""
    before = 0
    for count in shots:
        classifier.learn(task.examples(count - before, skipped=before))
        before = count
        yield count, classifier


def run_method(task: IntentTask, start: Start, config: IntentsConfig, method: str) -> list[Record]:
    """Return the records of one method, by number of examples."""
    records: list[Record] = []
    settings = config.settings(method)
    starts_over = isinstance(settings, Peer) and settings.starts_over
    parts = [(shots,) for shots in config.shots] if starts_over else [config.shots]
    for shots, classifier in itertools.chain.from_iterable(
        teach(make_classifier(settings, start), task, part) for part in parts
    ):
        shared: Record = {
            "corpus": task.corpus,
            "method": method,
            "shots": shots,
            "split": start.seed,
        }
        records += [{**shared, **record} for record in _score_classifier(classifier, task)]
    return records + [{**shared, **record} for record in _time_classifier(classifier, task, shots)]


def _score_classifier(classifier: Classifier, task: IntentTask) -> Iterator[Record]:
    found = classifier.log_probs(task.scored)
    right = found.argmax(1) == task.scored.labels
    for subset, members in split_labels(task.scored.labels, task.old).items():
        yield {"subset": subset, "name": "top1", "value": percent(right[members])}
    confidence = confidences(found)
    error = calibration_error(confidence, right)
    yield {"subset": "all", "name": "calibration_error", "value": error}
    if len(task.outside):
        inside, outside = map(classifier.score_scope, (task.scored, task.outside))
        yield {"name": "out_of_scope_auroc", "value": auroc(inside, outside)}
        for name, queries in (("answered", task.scored), ("answered_out_of_scope", task.outside)):
            answered = classifier.decide(queries, ANSWERED_SHARE)
            if answered is not None:
                yield {"name": name, "value": percent(answered)}


def _time_classifier(classifier: Classifier, task: IntentTask, shots: int) -> Iterator[Record]:
    """Time predictions, given keys, and learning one more example."""
    device = task.known.keys.device
    for batch, repeats in REPEATS.items():
        queries = task.scored.select(torch.arange(batch) % len(task.scored))
        taken = time_call(partial(classifier.log_probs, queries), repeats, device)
        yield {"batch": batch, "name": "predict_microseconds", "value": 1e6 * taken / batch}
    more, taken_each = task.examples(1, skipped=shots), []
    for row in range(min(TIMED_EXAMPLES, len(more))):
        one = more.select(torch.tensor([row]))
        wait_for_device(device)
        begin = time.perf_counter()
        classifier.learn(one)
        classifier.log_probs(one)  # includes work that `learn` defers
        wait_for_device(device)
        taken_each.append(time.perf_counter() - begin)
        if taken_each[-1] > SLOW_S:
            break
    yield {"name": "learn_seconds", "value": median(taken_each)}


def confidences(log_probs: Float[Tensor, "Q C"]) -> Float[Tensor, "Q"]:
    """Return the probability of each predicted label."""
    return log_probs.amax(1).exp()


def embedding_times(encoder: text.TextEncoder, task: IntentTask, split: int) -> list[Record]:
    """Time the embedding of sentences, which methods that receive sentences do first."""
    records: list[Record] = []
    for batch, repeats in REPEATS.items():
        queries = task.scored.select(torch.arange(batch) % len(task.scored))
        taken = time_call(partial(encoder, queries.texts), repeats, task.known.keys.device)
        shared: Record = {"corpus": task.corpus, "split": split, "batch": batch}
        records.append({**shared, "name": EMBEDDING, "value": 1e6 * taken / batch})
    return records
