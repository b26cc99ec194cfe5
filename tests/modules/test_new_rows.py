"""Rows in closed form agree with a loop over labels."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from mbpa.modules.new_rows import NewRows, even_scale, label_sums, require_unit_norm

KEYS = torch.randn(30, 5, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(30) % 6


def known_head() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(5, 4).requires_grad_(False)


def test_sums_are_those_of_each_label():
    sums = label_sums(KEYS, LABELS, 7)
    for label in range(6):
        torch.testing.assert_close(sums[label], KEYS[label == LABELS].sum(0))
    assert not sums[6].any()


def test_a_row_is_the_middle_and_the_way_from_there_to_the_mean_of_its_examples():
    head, sums = known_head(), label_sums(KEYS, LABELS, 6)
    made = NewRows.around(head.weight, head.bias, sums[:4], scale=7.0, offset=-1.5)
    found = made.weights(sums[4:])
    directions = [sums[label] / sums[label].norm() for label in range(6)]
    middle = sum(directions[:4]) / 4
    for row, direction in zip(found, directions[4:], strict=True):
        torch.testing.assert_close(row, sum(head.weight) / 4 + 7 * (direction - middle))
    torch.testing.assert_close(made.biases, sum(head.bias) / 4 - 1.5)
    torch.testing.assert_close(found, made.weights(100 * sums[4:]), msg="lengths do not matter")


def test_with_an_even_scale_rows_from_examples_lie_as_far_out_as_trained_ones():
    head, sums = known_head(), label_sums(KEYS, LABELS, 6)[:4]
    scale = even_scale(head.weight, sums)
    rows = NewRows.around(head.weight, head.bias, sums, scale=scale).weights(sums)
    reach = [(each - each.mean(0)).norm(dim=1).mean() for each in (rows, head.weight)]
    torch.testing.assert_close(*reach)


def test_keys_of_another_norm_are_refused():
    good = nn.functional.normalize(KEYS, dim=1)
    require_unit_norm(good)
    require_unit_norm(good[:0])
    require_unit_norm(good * 1.005)
    for factor, told in ((1000.0, "1e+03"), (0.9, "0.9"), (0.0, "0"), (float("nan"), "nan")):
        bad = good.clone()
        bad[17] *= factor
        with pytest.raises(ValueError, match=f"keys must have norm 1, got {re.escape(told)}$"):
            require_unit_norm(bad)


@pytest.mark.parametrize(
    ("scale", "offset"), [(-1.0, 0.0), (float("inf"), 0.0), (1.0, float("nan"))]
)
def test_impossible_settings_are_refused(scale, offset):
    head = known_head()
    with pytest.raises(ValueError, match=f"offset finite, got {scale} and {offset}"):
        NewRows.around(head.weight, head.bias, head.weight, scale=scale, offset=offset)
