"""`python -m benchmarks.streams`: `OnlineClassifier` and classifiers of River on drifting streams.

Decides when to prefer `OnlineClassifier`. Every example is predicted and then learnt (prequential
accuracy). All methods have their default settings, except that the nearest neighbours get a window
as large as the memory of `OnlineClassifier`. Methods that need it get standardised features. River
generates the streams or ships with them. The seed determines a generated stream, and the order of
the examples of the others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import random
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from river import datasets, forest, linear_model, multiclass, naive_bayes, neighbors, tree
from river.datasets import synth
from river.preprocessing import StandardScaler

from benchmarks.tables import DocumentTable, format_rows, format_spread
from mbpa.integrations.river import OnlineClassifier

SEEDS = (0, 1, 2)
LENGTH = 3000  # of generated streams; abrupt drift is in the middle
WINDOW = 1000  # examples that `OnlineClassifier` and the nearest neighbours hold
Example = tuple[dict[Any, Any], Any]


def join_halves(first: Any, second: Any) -> list[Example]:
    """Return a stream whose concept is replaced by another in the middle."""
    half = LENGTH // 2
    return [*first.take(half), *second.take(half)]


def shuffle(dataset: Iterable[Example], seed: int) -> list[Example]:
    examples = list(dataset)
    random.Random(seed).shuffle(examples)
    return examples


STREAMS: dict[str, Callable[[int], Sequence[Example]]] = {
    "SEA": lambda seed: join_halves(
        synth.SEA(0, noise=0.1, seed=seed), synth.SEA(2, noise=0.1, seed=seed + 100)
    ),
    "Sine": lambda seed: join_halves(synth.Sine(0, seed=seed), synth.Sine(1, seed=seed + 100)),
    "Hyperplane": lambda seed: list(
        synth.Hyperplane(seed=seed, n_drift_features=5, mag_change=0.005).take(LENGTH)
    ),
    "RBF": lambda seed: list(
        synth.RandomRBFDrift(
            seed_model=seed, seed_sample=seed, n_classes=4, change_speed=0.001
        ).take(LENGTH)
    ),
    "image segments": lambda seed: shuffle(datasets.ImageSegments(), seed),
    "phishing": lambda seed: shuffle(datasets.Phishing(), seed),
}
METHODS: dict[str, Callable[[int], Any]] = {
    "OnlineClassifier": lambda seed: OnlineClassifier(capacity=WINDOW),
    "LogisticRegression": lambda seed: (
        StandardScaler() | multiclass.OneVsRestClassifier(linear_model.LogisticRegression())
    ),
    "GaussianNB": lambda seed: naive_bayes.GaussianNB(),
    "KNNClassifier": lambda seed: (
        StandardScaler() | neighbors.KNNClassifier(engine=neighbors.LazySearch(window_size=WINDOW))
    ),
    "HoeffdingTreeClassifier": lambda seed: tree.HoeffdingTreeClassifier(),
    "HoeffdingAdaptiveTreeClassifier": lambda seed: tree.HoeffdingAdaptiveTreeClassifier(seed=seed),
    "ARFClassifier": lambda seed: forest.ARFClassifier(seed=seed),
}


def measure_accuracy(model: Any, stream: Sequence[Example]) -> tuple[float, float]:
    """Return the prequential accuracy, and the processor time per example in milliseconds."""
    right = 0
    start = time.process_time()
    for features, label in stream:
        right += model.predict_one(features) == label
        model.learn_one(features, label)
    took = time.process_time() - start
    return right / len(stream), 1e3 * took / len(stream)


def format_scores(report: dict[str, Any]) -> str:
    """Format the table of docs/integrations-river.md."""
    found = {(each["stream"], each["method"]): each for each in report["scores"]}
    streams = list(dict.fromkeys(stream for stream, _ in found))
    methods = list(dict.fromkeys(method for _, method in found))
    rows = [["accuracy in percent", *streams, "ms per example"]]
    for method in methods:
        cells = [found[stream, method] for stream in streams]
        times = [each for cell in cells for each in cell["milliseconds"]]
        accuracies = [format_spread([100 * each for each in c["accuracies"]], 1) for c in cells]
        rows.append([f"`{method}`", *accuracies, f"{sum(times) / len(times):.2g}"])
    return format_rows(rows) + (
        f"\n*Mean ± standard deviation of {len(report['seeds'])} seeds; River {report['river']}; "
        "processor time of one prediction and one lesson.*\n"
    )


STREAMS_TABLE = DocumentTable("streams", format_scores)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.streams", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/streams.json"))
    parser.add_argument("--document", type=Path, default=Path("docs/integrations-river.md"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    scores: list[dict[str, Any]] = []
    for (name, make_stream), (method, make) in itertools.product(STREAMS.items(), METHODS.items()):
        measured = [measure_accuracy(make(seed), make_stream(seed)) for seed in SEEDS]
        accuracies, times = (list(column) for column in zip(*measured, strict=True))
        row = {"stream": name, "method": method, "accuracies": accuracies, "milliseconds": times}
        scores.append(row)
        print(json.dumps(row), flush=True)
    report = {
        "machine": {"torch": str(torch.__version__), "python": platform.python_version()},
        "river": version("river"),
        "seeds": SEEDS,
        "scores": scores,
    }
    STREAMS_TABLE.publish(report, arguments.out, arguments.document)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
