"""Rows in and out of host memory: what indexing gives, whatever the width and number of threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st

from distcache.errors import PlanError
from distcache.ops.copies import RowTaker, put, put_rows, take_rows


@pytest.mark.parametrize("width", [1, 2, 3, 16, 17, 64, 511])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("count", [0, 1, 7, 900])
def test_rows_are_those_of_plain_indexing(width, dtype, count) -> None:
    rng = np.random.default_rng(width * 1000 + count)
    source = rng.standard_normal((1000, width)).astype(dtype)
    source[::7] = np.nan
    rows = rng.permutation(1000)[:count]
    out = np.empty((count, width), dtype)
    take_rows(source, rows, out)
    assert out.tobytes() == source[rows].tobytes()
    target, expected = source.copy(), source.copy()
    values = rng.standard_normal((count, width)).astype(dtype)
    put_rows(target, rows, values)
    expected[rows] = values
    assert target.tobytes() == expected.tobytes()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_share_a_large_gather(threads) -> None:
    rng = np.random.default_rng(threads)
    source = rng.standard_normal((5000, 64)).astype(np.float32)
    rows = rng.integers(0, 5000, 20_011)
    out = np.empty((len(rows), 64), np.float32)
    taker = RowTaker(threads)
    taker.take(source, rows, out)
    assert np.array_equal(out, source[rows])
    with pytest.raises(PlanError, match="row 5000 is outside"):
        taker.take(source, np.append(rows, 5000), np.empty((len(rows) + 1, 64), np.float32))
    taker.close()
    taker.close()


@pytest.mark.parametrize("bad", [-1, 10])
def test_a_row_outside_is_refused_before_anything_is_written(bad) -> None:
    target = np.zeros((10, 4), np.float32)
    with pytest.raises(PlanError, match=rf"row {bad} is outside \[0, 10\)"):
        put_rows(target, np.array([3, bad]), np.ones((2, 4), np.float32))
    assert not target.any()
    with pytest.raises(PlanError, match=f"row {bad}"):
        take_rows(target, np.array([bad]), np.empty((1, 4), np.float32))


@examples(100)
@given(st.integers(0, 2**32), st.sampled_from([torch.float32, torch.float64]), st.booleans())
def test_put_is_index_copy(seed: int, dtype: torch.dtype, strided: bool) -> None:
    """Also into a part of a larger table, and where values are not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    total, width, first = (int(n) for n in torch.randint(1, 40, (3,), generator=generator))
    table = torch.randn(total + first, width, generator=generator).to(dtype)
    count = int(torch.randint(0, total + 1, (1,), generator=generator))
    rows = torch.randperm(total, generator=generator)[:count]
    values = torch.randn(count, 2 * width, generator=generator).to(dtype)
    values = values[:, ::2] if strided else values[:, :width].contiguous()
    want = table.clone()
    want[first:].index_copy_(0, rows, values)
    part = table[first:]
    assert put(part, rows, values) is part
    assert torch.equal(table, want)


@pytest.mark.parametrize(
    "values", [torch.ones(2, 4), torch.ones(4, 4), torch.ones(3, 5), torch.ones(3, 4).double()]
)
def test_put_refuses_what_does_not_fit(values: torch.Tensor) -> None:
    table = torch.zeros(6, 4)
    with pytest.raises(PlanError, match=r"for [23] rows of float32"):
        put(table, torch.tensor([0, 2, 4]), values)
    with pytest.raises(PlanError, match=r"row 6 is outside \[0, 6\)"):
        put(table, torch.tensor([0, 6]), torch.ones(2, 4))
    assert not table.any()
