"""Kernels give the weights of their formulas; the weights are normalised and masked."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import mbpa
from mbpa.kernels import neighbor_weights


def neighbors(capacity: int = 10) -> tuple[mbpa.Neighbors, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    query = torch.randn(1, 3, generator=generator, dtype=torch.float64)
    memory = mbpa.ExactMemory(capacity, 3, dtype=torch.float64)
    memory.write(keys, torch.zeros(8, dtype=torch.int64))
    found = memory.read(query, k=5)
    return found, found.keys[0], query[0]


@pytest.mark.parametrize(
    ("kernel", "formula"),
    [
        (mbpa.inverse_distance(), lambda h, q: 1 / (1e-3 + ((h - q) ** 2).sum())),
        (mbpa.inverse_distance(0.5), lambda h, q: 1 / (0.5 + ((h - q) ** 2).sum())),
        (mbpa.InverseDistance(power=4), lambda h, q: 1 / (1e-3 + ((h - q) ** 2).sum()) ** 4),
        (mbpa.InverseDistance(0.5, 0.5), lambda h, q: 1 / (0.5 + ((h - q) ** 2).sum()).sqrt()),
        (mbpa.gaussian(0.7), lambda h, q: torch.exp(-((h - q) ** 2).sum() / (2 * 0.7**2))),
        (mbpa.exp_dot(0.2), lambda h, q: torch.exp(0.2 * (h * q).sum())),
        (mbpa.uniform(), lambda h, q: torch.tensor(1.0).double()),
        (lambda d, s: -d.sqrt(), lambda h, q: torch.exp(-((h - q) ** 2).sum().sqrt())),
    ],
)
def test_weights_follow_the_formula(kernel: object, formula: object) -> None:
    found, keys, query = neighbors()
    values = torch.stack([formula(key, query) for key in keys])
    weights = neighbor_weights(kernel, found)
    assert (weights[0] - values / values.sum()).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_power_one_is_the_papers_kernel_to_the_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    distances = torch.rand(50, 20, generator=generator, dtype=dtype) ** 8 * 100
    distances[0, :3] = torch.tensor([0.0, 1 - 1e-3, torch.inf])
    for kernel in (mbpa.InverseDistance(), mbpa.InverseDistance(power=1)):
        assert kernel(distances, distances).equal(-(distances + 1e-3).log())


def test_the_weights_of_a_power_hardly_depend_on_the_units_of_keys() -> None:
    """In contrast to those of a Gaussian kernel."""
    distances = torch.tensor([[1.0, 2.0, 3.0]]).double()
    for scale in (0.1, 10.0):
        for power in (1, 4, 8):
            kernel = mbpa.InverseDistance(1e-12, power)
            scaled = kernel(scale**2 * distances, distances).softmax(1)
            assert (scaled - kernel(distances, distances).softmax(1)).abs().max() < 1e-9
        other = mbpa.Gaussian(1.0)
        scaled = other(scale**2 * distances, distances).softmax(1)
        assert (scaled - other(distances, distances).softmax(1)).abs().max() > 0.1


@pytest.mark.parametrize("scale", [1e-10, 1.0, 1e15])
def test_a_high_power_is_finite_at_any_distance(scale: float) -> None:
    memory = mbpa.ExactMemory(10, 2)
    memory.write(scale * torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]]), [0, 1, 2])
    weights = neighbor_weights(mbpa.InverseDistance(power=50), memory.read(torch.zeros(1, 2), 3))
    assert weights.sum() == pytest.approx(1)
    if scale == 1e-10:  # far below ε, so that all are as near
        assert weights.tolist() == [pytest.approx([1 / 3] * 3)]
    else:
        assert weights.tolist() == [pytest.approx([1, 0, 0], abs=1e-3)]


def test_padding_gets_no_weight_and_a_row_of_padding_sums_to_zero() -> None:
    memory = mbpa.ExactMemory(10, 2)
    stream = torch.tensor([[0.0, 0.0], [1.0, 0.0], [5.0, 5.0]])
    found = memory.read_causally(stream, [0, 0, 0], k=3)
    kernels = mbpa.inverse_distance(), mbpa.InverseDistance(power=4), mbpa.gaussian(1e-3)
    for kernel in (*kernels, mbpa.exp_dot(), mbpa.uniform()):
        weights = neighbor_weights(kernel, found)
        assert weights.sum(1).tolist() == pytest.approx([0, 1, 1])
        assert (weights[~found.mask] == 0).all()


def test_a_kernel_that_underflows_everywhere_counts_all_the_same() -> None:
    memory = mbpa.ExactMemory(10, 2)
    memory.write(torch.tensor([[1e15, 0.0], [0.0, 1e15]]), [0, 0])
    found = memory.read(torch.zeros(1, 2), k=2)
    weights = neighbor_weights(lambda distances, dots: -distances.square(), found)
    assert weights.tolist() == [[0.5, 0.5]]


def test_an_infinite_weight_takes_all() -> None:
    memory = mbpa.ExactMemory(10, 2)
    memory.write(torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]]), [0, 1, 0])
    found = memory.read(torch.zeros(1, 2), k=3)
    assert neighbor_weights(lambda d, s: -d.log(), found).tolist() == [[0.5, 0.5, 0.0]]
    for kernel in (mbpa.InverseDistance(1e-50), mbpa.InverseDistance(1e-50, power=4)):
        assert neighbor_weights(kernel, found).tolist() == [[0.5, 0.5, 0.0]]


def test_balanced_weights_are_divided_by_how_often_a_label_occurs() -> None:
    memory = mbpa.ExactMemory(10, 1, dtype=torch.float64)
    memory.write(torch.tensor([[1.0], [1.0], [2.0], [1.0], [3.0]]).double(), [7, 7, 7, 7, 2])
    found = memory.count_labels(memory.read(torch.zeros(1, 1).double(), 5))
    assert found.label_counts is not None
    assert found.label_counts.tolist() == [[4, 4, 4, 4, 1]]
    for power in (0.0, 0.3, 1.0):
        plain = 1 / (1e-3 + torch.tensor([1.0, 1.0, 1.0, 4.0, 9.0]).double())
        expected = plain / torch.tensor([4.0, 4.0, 4.0, 4.0, 1.0]).double() ** power
        weights = neighbor_weights(mbpa.Balanced(mbpa.InverseDistance(), power), found)
        assert (weights[0] - expected / expected.sum()).abs().max() < 1e-12
    assert found.first(2).label_counts.tolist() == [[4, 4]]
    twice = mbpa.Neighbors.concatenate([found, found])
    assert twice.rows(slice(1, 2)).label_counts.tolist() == found.label_counts.tolist()


def test_a_neighbour_that_was_removed_since_the_read_counts_itself() -> None:
    memory = mbpa.ExactMemory(10, 1)
    ids = memory.write(torch.tensor([[1.0], [1.0], [1.0]]), [0, 0, 1])
    found = memory.read(torch.zeros(1, 1), 3)
    memory.delete(ids[2:])
    counted = memory.count_labels(found)
    assert counted.label_counts is not None
    assert sorted(counted.label_counts[0].tolist()) == [1, 2, 2]
    weights = neighbor_weights(mbpa.Balanced(mbpa.Uniform()), counted)
    assert sorted(weights[0].tolist()) == pytest.approx([0.25, 0.25, 0.5])


def test_labels_can_only_be_counted_in_a_memory_of_labels() -> None:
    memory = mbpa.ExactMemory(10, 2, value_dtype=torch.float32)
    memory.write(torch.ones(1, 2), torch.ones(1))
    with pytest.raises(ValueError, match="for labels, the memory holds regression targets"):
        memory.count_labels(memory.read(torch.ones(1, 2), 1))


def test_bad_kernels_are_refused() -> None:
    found, _, _ = neighbors()
    with pytest.raises(ValueError, match=r"needs the label counts of neighbors: memory.count_lab"):
        neighbor_weights(mbpa.Balanced(mbpa.Uniform()), found)
    with pytest.raises(ValueError, match=r"log-weights of shape \(1, 5\), got \(1,\)"):
        neighbor_weights(lambda distances, dots: distances.sum(1), found)
    with pytest.raises(ValueError, match="must not return NaN"):
        neighbor_weights(lambda distances, dots: (-distances).log(), found)
    with pytest.raises(ValueError, match="epsilon must be positive, got 0"):
        mbpa.inverse_distance(0.0)
    with pytest.raises(ValueError, match="power must be positive, got 0"):
        mbpa.InverseDistance(power=0.0)
    with pytest.raises(ValueError, match="power must be a finite number, got inf"):
        mbpa.InverseDistance(power=math.inf)
    with pytest.raises(ValueError, match=r"bandwidth must be positive, got -1"):
        mbpa.gaussian(-1.0)
