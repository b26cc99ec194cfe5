"""`python -m benchmarks.avalanche_plugins`: what a memory adds to a strategy of Avalanche.

Decides when to prefer `MemoryPlugin` to replay, or to use both. A network learns ten digits in five
experiences of two digits each; its accuracy is measured on all ten after the last experience. Each
of three seeds determines the network's first weights and the order of the digits. Needs the extra
`avalanche`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import random
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.tables import DocumentTable, format_rows, format_spread
from experiments import data

SEEDS = (0, 1, 2)
TESTED_PER_DIGIT = 50
MEMORY = {"at": "classifier", "capacity": 200}
PLUGINS: dict[str, tuple[dict[str, Any] | None, int]] = {
    "none (`Naive`)": (None, 0),
    "`MemoryPlugin`": (MEMORY, 0),
    "`ReplayPlugin`": (None, 200),
    "both, 100 each": ({**MEMORY, "capacity": 100}, 100),
    "both, 200 each": (MEMORY, 200),
    # As many bytes as 200 pictures of MNIST:
    "`MemoryPlugin`, 1,568 keys without inputs": (
        {**MEMORY, "capacity": 1568, "keep_inputs": False},
        0,
    ),
    "`MemoryPlugin(None, …)`": ({**MEMORY, "at": None}, 0),
}
"""Arguments of `MemoryPlugin`, or `None`; number of examples that `ReplayPlugin` keeps, or 0."""


def read_mnist() -> tuple[Tensor, Tensor]:
    images = data.mnist().train
    return images.images.flatten(1) / 255, images.labels


def read_digits() -> tuple[Tensor, Tensor]:
    pixels, labels = load_digits(return_X_y=True)
    return torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)


TASKS: dict[str, tuple[Callable[[], tuple[Tensor, Tensor]], float, int]] = {
    "MNIST, rate 0.001": (read_mnist, 1e-3, 200),
    "8 × 8 digits, rate 0.01": (read_digits, 1e-2, 100),
}
"""Function that reads the data, rate of Adam, and number of training examples per digit."""


def make_benchmark(inputs: Tensor, labels: Tensor, count: int, seed: int) -> Any:
    """Return five experiences of two digits each, in an order that the seed determines."""
    from avalanche.benchmarks.scenarios.supervised import class_incremental_benchmark
    from avalanche.benchmarks.utils import DataAttribute, make_avalanche_dataset

    rows = [(labels == digit).nonzero()[:, 0] for digit in range(10)]
    parts = {
        "train": torch.cat([each[:count] for each in rows]),
        "test": torch.cat([each[count : count + TESTED_PER_DIGIT] for each in rows]),
    }
    datasets = {
        name: make_avalanche_dataset(
            TensorDataset(inputs[chosen], labels[chosen]),
            data_attributes=[DataAttribute(labels[chosen].tolist(), "targets")],
        )
        for name, chosen in parts.items()
    }
    order = random.Random(seed).sample(range(10), 10)
    return class_incremental_benchmark(datasets, num_experiences=5, class_order=order)


def make_plugins(name: str) -> list[Any]:
    from avalanche.training.plugins import ReplayPlugin

    from mbpa.integrations.avalanche import MemoryPlugin

    memory, replayed = PLUGINS[name]
    plugins = [] if memory is None else [MemoryPlugin(**memory)]
    return [*plugins, *([ReplayPlugin(mem_size=replayed)] if replayed else [])]


def measure_accuracy(
    benchmark: Any, inputs: int, rate: float, plugins: list[Any], seed: int
) -> float:
    """Train a network on all experiences; return its accuracy on the test examples of all."""
    from avalanche.evaluation.metrics import accuracy_metrics
    from avalanche.models import SimpleMLP
    from avalanche.training.plugins import EvaluationPlugin
    from avalanche.training.supervised import Naive

    torch.manual_seed(seed)
    random.seed(seed)
    network = SimpleMLP(num_classes=10, input_size=inputs, hidden_size=100)
    strategy = Naive(
        model=network,
        optimizer=torch.optim.Adam(network.parameters(), rate),
        criterion=nn.CrossEntropyLoss(),
        train_mb_size=32,
        train_epochs=2,
        eval_mb_size=100,
        plugins=plugins,
        evaluator=EvaluationPlugin(accuracy_metrics(stream=True), loggers=[]),
    )
    for experience in benchmark.train_stream:
        strategy.train(experience)
    found = strategy.eval(benchmark.test_stream)
    (accuracy,) = (each for name, each in found.items() if name.startswith("Top1_Acc_Stream"))
    return float(accuracy)


def format_scores(report: dict[str, Any]) -> str:
    """Format the table of docs/integrations-avalanche.md."""
    found = {(each["task"], each["plugins"]): each["accuracies"] for each in report["scores"]}
    rows = [["plugins", *TASKS]]
    for name in dict.fromkeys(name for _, name in found):
        cells = [[100 * each for each in found[task, name]] for task in TASKS]
        rows.append([name, *(format_spread(each, 1) for each in cells)])
    return format_rows(rows) + (
        f"\n*Accuracy in percent over all ten digits, mean ± standard deviation of "
        f"{len(report['seeds'])} orders; avalanche-lib {report['avalanche']}.*\n"
    )


AVALANCHE_TABLE = DocumentTable("avalanche", format_scores)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.avalanche_plugins", description=__doc__
    )
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/avalanche.json"))
    parser.add_argument("--document", type=Path, default=Path("docs/integrations-avalanche.md"))
    arguments = parser.parse_args()
    scores: list[dict[str, Any]] = []
    for (task, (read, rate, count)), name in itertools.product(TASKS.items(), PLUGINS):
        inputs, labels = read()
        accuracies = []
        for seed in SEEDS:
            benchmark = make_benchmark(inputs, labels, count, seed)
            size = inputs.shape[1]
            accuracies.append(measure_accuracy(benchmark, size, rate, make_plugins(name), seed))
        scores.append({"task": task, "plugins": name, "accuracies": accuracies})
        print(json.dumps(scores[-1]), flush=True)
    report = {
        "machine": {"torch": str(torch.__version__), "python": platform.python_version()},
        "avalanche": version("avalanche-lib"),
        "seeds": SEEDS,
        "scores": scores,
    }
    AVALANCHE_TABLE.publish(report, arguments.out, arguments.document)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
