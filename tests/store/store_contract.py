"""What every row store must do; a test class inherits this and gives `make`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from distcache.errors import PlanError
from distcache.layout import RowLayout, TableSpec
from distcache.store.rows import Store, initial_rows

# Width 100,000: a block is 2 rows, so that these tables span many blocks, the last one ragged.
WIDE = [TableSpec("a", 7, 100_000, ("a",)), TableSpec("b", 2, 100_000, ("b",))]
NARROW = [TableSpec("a", 50, 4, ("a",)), TableSpec("b", 1, 4, ("b",)), TableSpec("c", 9, 4, ("c",))]


def values(rows: int, width: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Random values of a store's dtype."""
    return torch.rand(rows, width, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def expected_weight(layout: RowLayout, seed: int, indices: list[int]) -> Tensor:
    """Initial weights of a whole group, drawn table by table at once."""
    drawn = [
        initial_rows(seed, index, table.rows, table.dim, 0, table.rows)
        for index, table in zip(indices, layout.tables, strict=True)
    ]
    return torch.cat(drawn)


class StoreContract:
    """Inherit and give `make(layout, state_width, dtype) -> Store`, of zeros."""

    def make(self, layout: RowLayout, state_width: int, dtype: torch.dtype) -> Store:
        raise NotImplementedError

    @pytest.fixture(params=[(0, torch.float32), (1, torch.float32), (8, torch.float64)])
    def store(self, request: pytest.FixtureRequest):
        state_width, dtype = request.param
        store = self.make(RowLayout(NARROW, 1), state_width, dtype)
        yield store
        store.close()

    def everything(self, store: Store) -> tuple[Tensor, Tensor | None]:
        return store.gather(torch.arange(store.layout.rows))

    def test_is_a_store(self, store: Store) -> None:
        assert isinstance(store, Store)

    def test_initial_values(self, store: Store) -> None:
        store.initialise(3, [5, 0, 2], 0.25)
        weight, state = self.everything(store)
        assert weight.dtype == store.dtype and weight.shape == (60, 4)
        assert torch.equal(weight, expected_weight(store.layout, 3, [5, 0, 2]).to(store.dtype))
        if store.state_width:
            assert torch.equal(state, torch.full((60, store.state_width), 0.25, dtype=store.dtype))
        else:
            assert state is None

    def test_initial_values_over_blocks(self) -> None:
        store = self.make(RowLayout(WIDE, 1), 1, torch.float32)
        store.initialise(1, [0, 1], 2.0)
        weight, state = self.everything(store)
        assert torch.equal(weight, expected_weight(store.layout, 1, [0, 1]))
        assert torch.equal(state, torch.full((9, 1), 2.0))
        store.close()

    def test_scatter_then_gather(self, store: Store) -> None:
        store.initialise(0, [0, 1, 2])
        weight, state = self.everything(store)
        rows = torch.tensor([59, 0, 50, 3, 49])
        new = values(5, 4, store.dtype, 1)
        new_state = values(5, store.state_width, store.dtype, 2) if store.state_width else None
        store.scatter(rows, new, new_state)
        weight[rows] = new
        got, got_state = self.everything(store)
        assert torch.equal(got, weight)
        if new_state is not None and state is not None:
            state[rows] = new_state
            assert torch.equal(got_state, state)

    def test_gather_into_given_tensors(self, store: Store) -> None:
        store.initialise(0, [0, 1, 2], 1.5)
        rows = torch.tensor([7, 7, 51])
        want, want_state = store.gather(rows)
        out = torch.full((3, 4), 9.0, dtype=store.dtype)
        out_state = None
        if store.state_width:
            out_state = torch.full((3, store.state_width), 9.0, dtype=store.dtype)
        got, got_state = store.gather(rows, (out, out_state))
        assert got.data_ptr() == out.data_ptr()
        assert torch.equal(out, want)
        if want_state is not None:
            assert got_state is out_state or got_state.data_ptr() == out_state.data_ptr()
            assert torch.equal(out_state, want_state)

    def test_gathered_rows_are_copies(self, store: Store) -> None:
        weight, _ = store.gather(torch.arange(3))
        weight += 1
        assert not torch.equal(store.gather(torch.arange(3))[0], weight)

    def test_no_rows(self, store: Store) -> None:
        weight, state = store.gather(torch.empty(0, dtype=torch.int64))
        assert weight.shape == (0, 4)
        store.scatter(torch.empty(0, dtype=torch.int64), weight, state)

    def test_tables_are_views_in_original_ids(self, store: Store) -> None:
        store.initialise(0, [0, 1, 2])
        whole, _ = self.everything(store)
        for index, (start, stop) in enumerate([(0, 50), (50, 51), (51, 60)]):
            weight, state = store.table(index)
            assert torch.equal(weight, whole[start:stop])
            assert (state is None) == (store.state_width == 0)
            if state is not None:
                assert state.shape == (stop - start, store.state_width)

    @pytest.mark.parametrize("bad", [-1, 60, 1 << 40])
    def test_row_out_of_range(self, store: Store, bad: int) -> None:
        rows = torch.tensor([1, bad, 2])
        state = torch.zeros(3, store.state_width, dtype=store.dtype) if store.state_width else None
        with pytest.raises(PlanError, match=str(bad)):
            store.gather(rows)
        with pytest.raises(PlanError, match=str(bad)):
            store.scatter(rows, torch.zeros(3, 4, dtype=store.dtype), state)

    def test_wrong_shapes_and_dtypes(self, store: Store) -> None:
        rows, good = torch.tensor([1, 2]), torch.zeros(2, 4, dtype=store.dtype)
        state = torch.zeros(2, store.state_width, dtype=store.dtype) if store.state_width else None
        other = torch.zeros(2, store.state_width + 1, dtype=store.dtype)
        before, _ = self.everything(store)
        for weight, wrong in [(good[:1], state), (good[:, :3], state), (good, other)]:
            with pytest.raises(PlanError):
                store.scatter(rows, weight + 1, wrong)
            with pytest.raises(PlanError):
                store.gather(rows, (weight, wrong))
        with pytest.raises(PlanError, match="weight"):
            store.scatter(rows, good.to(torch.bfloat16), state)
        with pytest.raises(PlanError, match="int64"):
            store.gather(rows.to(torch.int32))
        assert torch.equal(self.everything(store)[0], before)

    def test_close_twice_with_views_alive(self, store: Store) -> None:
        store.initialise(0, [0, 1, 2])
        weight, _ = store.table(0)
        as_numpy = weight.numpy()
        before = np.array(as_numpy)
        store.close()
        store.close()
        assert np.array_equal(as_numpy, before)
        weight += 1
        assert not np.array_equal(as_numpy, before)
