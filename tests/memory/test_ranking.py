"""What `mbpa.memory.ranking` promises about rounding, and about copies of rows."""

from __future__ import annotations

import pytest
import torch

from mbpa.memory.ranking import NUMBERS_PER_THREAD, gather_rows, measure_each_query


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("key_dim", [1, 7, 384, 1000])
def test_the_number_of_candidates_changes_no_bit(dtype: torch.dtype, key_dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(700, key_dim, dtype=dtype, generator=generator)
    queries = torch.randn(3, key_dim, dtype=dtype, generator=generator)
    slots = torch.stack([torch.randperm(len(keys), generator=generator) for _ in queries])

    def fetch(slots: torch.Tensor) -> torch.Tensor:
        return keys[slots]

    distances, dots = measure_each_query(queries, slots, fetch)
    for count in (1, 2, 50, 128, 400):
        some_distances, some_dots = measure_each_query(queries, slots[:, :count], fetch)
        assert torch.equal(some_distances, distances[:, :count])
        assert torch.equal(some_dots, dots[:, :count])
    for row, query in enumerate(queries):  # nor does the number of queries
        alone = measure_each_query(query[None], slots[row, None], fetch)
        assert torch.equal(alone[0][0], distances[row])
        assert torch.equal(alone[1][0], dots[row])
    expected = (keys[slots].double() * queries[:, None].double()).sum(-1)
    torch.testing.assert_close(dots.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (384,), (4, 100), (NUMBERS_PER_THREAD + 1,)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_rows_are_copied_in_any_number(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    rows = torch.arange(50).reshape(50, *(1,) * len(shape)).expand(50, *shape).to(dtype)
    for count in (0, 1, 3, 84, 86, 128, 342, 500):
        places = torch.arange(count) % 50
        found = gather_rows(rows, places)
        assert torch.equal(found, rows[places])
        found.zero_()
    assert rows[1].min() == 1
