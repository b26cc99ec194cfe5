"""A layer from the memory: the formula, and what it is for."""

from __future__ import annotations

import pytest
import torch

from mbpa.experiments.images import discriminant
from mbpa.experiments.images.discriminant import discriminant_layer, statistics


def clusters(classes: int = 6, each: int = 200, size: int = 5):
    """Gaussian classes with one covariance."""
    draws = torch.Generator().manual_seed(0)
    mixing = torch.randn(size, size, generator=draws)
    means = 3 * torch.randn(classes, size, generator=draws)
    labels = torch.arange(classes).repeat_interleave(each)
    noise = torch.randn(len(labels), size, generator=draws) @ mixing
    return means[labels] + noise, labels, means, mixing


def test_rows_are_linear_discriminants() -> None:
    keys, labels, _, _ = clusters()
    weight, bias = statistics(keys, labels, 7).rows(0.5, 20.0)
    groups = [keys[labels == label].double() for label in range(6)]
    around = torch.cat([group - group.mean(0) for group in groups])
    scatter, freedom = around.mT @ around, len(keys) - 6
    guess = scatter.diagonal().mean() / freedom * torch.eye(5, dtype=torch.float64)
    covariance = (scatter + 0.5 * 5 * guess) / (freedom + 0.5 * 5)
    for label, group in enumerate(groups):
        mean = (200 * group.mean(0) + 20 * keys.double().mean(0)) / 220
        row = torch.linalg.inv(covariance) @ mean
        torch.testing.assert_close(weight[label], row, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(bias[label], -(row @ mean) / 2, rtol=1e-9, atol=1e-9)
    assert not weight[6].any()
    assert not bias[6].any()


def test_parts_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, labels, _, _ = clusters()
    whole = statistics(keys, labels, 6)
    monkeypatch.setattr(discriminant, "AT_ONCE", 7)
    parted = statistics(keys, labels, 6)
    torch.testing.assert_close(parted.means, whole.means)
    torch.testing.assert_close(parted.scatter, whole.scatter)


def test_the_layer_is_as_good_as_the_true_model_is() -> None:
    keys, labels, means, mixing = clusters(each=4000)
    exact = means @ torch.linalg.inv(mixing.mT @ mixing)
    layer = discriminant_layer(statistics(keys, labels, 6), shrinkage=1e-6, pull=0.0, scale=1.0)
    right = (layer(keys).argmax(1) == labels).double().mean()
    true = (keys @ exact.mT - (exact * means).sum(1) / 2).log_softmax(1)
    assert right > (true.argmax(1) == labels).double().mean() - 0.005
    assert (layer(keys).log_softmax(1).exp() - true.exp()).abs().max() < 0.1


def test_its_scale_says_how_sure_it_is() -> None:
    keys, labels, _, _ = clusters()
    found = statistics(keys, labels, 6)
    sure, unsure = (
        discriminant_layer(found, shrinkage=0.1, pull=1.0, scale=scale)(keys)
        for scale in (1.0, 0.25)
    )
    torch.testing.assert_close(unsure, 0.25 * sure, atol=1e-4, rtol=1e-4)


def test_classes_without_entries_are_never_the_answer() -> None:
    keys, labels, _, _ = clusters()
    some = (labels != 4) & (labels > 2)
    layer = discriminant_layer(
        statistics(keys[some], labels[some], 6), shrinkage=0.1, pull=1.0, scale=0.1
    )
    assert set(layer(keys).argmax(1).tolist()) == {3, 5}
    assert (layer(keys).log_softmax(1)[:, [0, 1, 2, 4]] < -1000).all()


def test_one_entry_of_each_class_gives_finite_rows() -> None:
    keys, labels, _, _ = clusters(each=1)
    weight, bias = statistics(keys, labels, 6).rows(0.1, 1.0)
    assert weight.isfinite().all()
    assert bias.isfinite().all()
    assert ((keys.double() @ weight.mT + bias).argmax(1) == labels).all()
