"""Rows from the memory: the formula, and what it is for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mbpa.experiments.images import discriminant
from mbpa.experiments.images.discriminant import statistics, with_discriminants


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


def test_new_rows_of_the_true_model_stand_rightly_beside_trained_ones() -> None:
    """Old rows are the exact ones of the generating model: with scale 1 the new must fit them."""
    keys, labels, means, mixing = clusters(each=4000)
    exact = means @ torch.linalg.inv(mixing.mT @ mixing)
    head = nn.Linear(5, 6)
    with torch.no_grad():
        head.weight.copy_(exact).add_(torch.randn(5))  # what all rows have in common is free
        head.bias.copy_(-(exact * means).sum(1) / 2).add_(2.0)
        head.weight[3:], head.bias[3:] = 0, 0
    grown = with_discriminants(
        head, statistics(keys, labels, 6), old=3, shrinkage=1e-6, pull=0.0, scale=1.0, offset=0.0
    )
    assert torch.equal(grown.weight[:3], head.weight[:3])
    assert torch.equal(grown.bias[:3], head.bias[:3])
    right = (grown(keys).argmax(1) == labels).double().mean()
    bayes = (keys @ exact.mT - (exact * means).sum(1) / 2).argmax(1) == labels
    assert right > bayes.double().mean() - 0.005


def test_the_offset_takes_from_new_classes_alone() -> None:
    keys, labels, _, _ = clusters()
    head = nn.Linear(5, 6)
    found, settings = (
        statistics(keys, labels, 6),
        {"old": 3, "shrinkage": 0.1, "pull": 1.0, "scale": 0.5},
    )
    plain = with_discriminants(head, found, offset=0.0, **settings)(keys)
    surer = with_discriminants(head, found, offset=1.5, **settings)(keys)
    shift = torch.tensor([0.0, 0.0, 0.0, 1.5, 1.5, 1.5]).expand(len(keys), 6)
    torch.testing.assert_close(plain - surer, shift, atol=1e-4, rtol=1e-4)


def test_classes_without_entries_keep_their_rows() -> None:
    keys, labels, _, _ = clusters()
    head = nn.Linear(5, 6)
    some = (labels != 4) & (labels > 2)  # no old class at all, and not every new one
    grown = with_discriminants(
        head,
        statistics(keys[some], labels[some], 6),
        old=3,
        shrinkage=0.1,
        pull=1.0,
        scale=1.0,
        offset=0.0,
    )
    assert torch.equal(grown.weight[[0, 1, 2, 4]], head.weight[[0, 1, 2, 4]])
    assert not torch.equal(grown.weight[3], head.weight[3])


def test_one_entry_of_each_class_gives_finite_rows() -> None:
    keys, labels, _, _ = clusters(each=1)
    weight, bias = statistics(keys, labels, 6).rows(0.1, 1.0)
    assert weight.isfinite().all()
    assert bias.isfinite().all()
    assert ((keys.double() @ weight.mT + bias).argmax(1) == labels).all()
