"""The plugin for Avalanche, with its real strategies on tensors of real digits."""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset
from torchvision_stand_in import import_avalanche

import mbpa

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of packages that Avalanche imports
    if import_avalanche() is None:
        pytest.skip("needs avalanche-lib: pip install 'mbpa[avalanche]'", allow_module_level=True)

from avalanche.benchmarks.scenarios.supervised import class_incremental_benchmark
from avalanche.benchmarks.utils import DataAttribute, make_avalanche_dataset
from avalanche.evaluation.metrics import accuracy_metrics
from avalanche.models import IncrementalClassifier, MTSimpleMLP, SimpleMLP
from avalanche.training.plugins import EvaluationPlugin, ReplayPlugin
from avalanche.training.supervised import Naive

from mbpa.integrations.avalanche import MemoryPlugin

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:avalanche", "ignore::UserWarning:avalanche"
)
PIXELS, LABELS = load_digits(return_X_y=True)
INPUTS = torch.tensor(PIXELS / 16, dtype=torch.float32)
DIGITS = torch.tensor(LABELS)


def make_benchmark() -> Any:
    """Return five experiences of two digits each, 1,000 examples for training, 500 for testing."""

    def make_dataset(rows: slice) -> Any:
        targets = [DataAttribute(DIGITS[rows].tolist(), "targets")]
        data = TensorDataset(INPUTS[rows], DIGITS[rows])
        return make_avalanche_dataset(data, data_attributes=targets)

    parts = {"train": make_dataset(slice(1000)), "test": make_dataset(slice(1000, 1500))}
    return class_incremental_benchmark(parts, num_experiences=5, class_order=list(range(10)))


def make_strategy(*plugins: Any, network: nn.Module | None = None, lr: float = 1e-2) -> Any:
    torch.manual_seed(0)
    random.seed(0)
    network = network or SimpleMLP(num_classes=10, input_size=64, hidden_size=64, drop_rate=0.2)
    return Naive(
        model=network,
        optimizer=torch.optim.Adam(network.parameters(), lr),
        criterion=nn.CrossEntropyLoss(),
        train_mb_size=32,
        train_epochs=2,
        eval_mb_size=100,
        plugins=list(plugins),
        evaluator=EvaluationPlugin(accuracy_metrics(stream=True), loggers=[]),
    )


def train(strategy: Any, benchmark: Any) -> None:
    for experience in benchmark.train_stream:
        strategy.train(experience)


def evaluate(strategy: Any, benchmark: Any) -> float:
    found = strategy.eval(benchmark.test_stream)
    return next(value for name, value in found.items() if name.startswith("Top1_Acc_Stream"))


def test_a_memory_keeps_classes_that_training_forgets() -> None:
    benchmark = make_benchmark()
    alone, plugin = make_strategy(lr=1e-3), MemoryPlugin("classifier", capacity=300)
    train(alone, benchmark)
    with_memory = make_strategy(plugin, lr=1e-3)
    train(with_memory, benchmark)
    for a, b in zip(alone.model.parameters(), with_memory.model.parameters(), strict=True):
        assert torch.equal(a, b)  # the plugin does not change the training
    forgotten, kept = evaluate(alone, benchmark), evaluate(with_memory, benchmark)
    assert kept > forgotten + 0.1
    predictions = plugin.model(INPUTS[1000:1500]).argmax(-1)
    assert kept == pytest.approx((predictions == DIGITS[1000:1500]).float().mean().item())


def test_a_memory_adds_to_replay_of_the_same_examples() -> None:
    benchmark = make_benchmark()
    replay = make_strategy(ReplayPlugin(mem_size=100))
    plugin = MemoryPlugin("classifier", capacity=100)
    both = make_strategy(ReplayPlugin(mem_size=100), plugin)
    train(replay, benchmark)
    train(both, benchmark)
    assert evaluate(both, benchmark) > evaluate(replay, benchmark) - 0.02


def test_keys_are_those_of_the_network_after_each_experience() -> None:
    benchmark, plugin = make_benchmark(), MemoryPlugin("classifier", capacity=150)
    strategy = make_strategy(plugin)
    for number, experience in enumerate(benchmark.train_stream, start=1):
        strategy.train(experience)
        network = copy.deepcopy(strategy.model).eval()
        entries = plugin.model.memory.entries()
        assert len(entries.ids) == 150
        with torch.no_grad():
            distances = torch.cdist(entries.keys, network.features(INPUTS[:1000]))
        distances[entries.values[:, None] != DIGITS[:1000]] = torch.inf
        assert distances.amin(1).max() < 1e-2  # each is the key of an example of its class
        assert set(entries.values.tolist()) == set(range(2 * number))
    per_experience = torch.bincount(plugin.model.memory.entries().values // 2, minlength=5)
    assert per_experience.min() > 10  # 30 each on average: a uniform sample, not the newest


def test_keys_stay_as_they_were_without_inputs() -> None:
    benchmark = make_benchmark()
    plugin = MemoryPlugin("classifier", capacity=1_000, keep_inputs=False)
    strategy = make_strategy(plugin)
    first, second, *_ = benchmark.train_stream
    strategy.train(first)
    before = plugin.model.memory.entries().keys
    strategy.train(second)
    assert torch.equal(plugin.model.memory.entries().keys[: len(before)], before)


@pytest.mark.parametrize("masking", [True, False])
def test_the_classifier_may_grow(masking: bool) -> None:
    network = SimpleMLP(num_classes=10, input_size=64, hidden_size=32, drop_rate=0.0)
    network.classifier = IncrementalClassifier(32, 2, masking=masking)
    at = "classifier" if masking else "classifier.classifier"
    benchmark, plugin = make_benchmark(), MemoryPlugin(at, capacity=100)
    strategy = make_strategy(plugin, network=network)
    for number, experience in enumerate(benchmark.train_stream, start=1):
        strategy.train(experience)
        if number in (1, 5):
            evaluate(strategy, benchmark)  # grows the classifier for all classes of the stream
    found = evaluate(strategy, benchmark)
    assert plugin.model.classes == 10
    predictions = plugin.model(INPUTS[1000:1500]).argmax(-1)
    assert found == pytest.approx((predictions == DIGITS[1000:1500]).float().mean().item())


def test_the_whole_network_may_be_adapted_with_inputs_as_keys() -> None:
    benchmark = make_benchmark()
    plugin = MemoryPlugin(None, capacity=200, predictor=mbpa.Adapted(k=10))
    network = SimpleMLP(num_classes=10, input_size=64, hidden_size=16, drop_rate=0.5)
    strategy = make_strategy(plugin, network=network)
    train(strategy, benchmark)
    assert evaluate(strategy, benchmark) > 0.6
    keys = {tuple(row.tolist()) for row in INPUTS[:1000]}
    assert all(tuple(key.tolist()) in keys for key in plugin.model.memory.entries().keys)


def test_a_network_that_needs_task_labels_is_refused() -> None:
    strategy = make_strategy(
        MemoryPlugin("classifier", capacity=10), network=MTSimpleMLP(input_size=64)
    )
    with pytest.raises(ValueError, match="must not need task labels, got the MultiTaskModule"):
        strategy.train(make_benchmark().train_stream[0])


def test_a_layer_that_is_not_there_is_refused() -> None:
    strategy = make_strategy(MemoryPlugin("head", capacity=10))
    with pytest.raises(ValueError, match="at must name a submodule of SimpleMLP, got 'head'"):
        strategy.train(make_benchmark().train_stream[0])
