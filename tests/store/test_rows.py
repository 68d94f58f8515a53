"""The row store in shared memory: the store contract, and what several ranks see."""

from __future__ import annotations

import dataclasses
import gc
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from store.store_contract import NARROW, WIDE, StoreContract, expected_weight

from distcache.comm.world import World, close_world, open_world
from distcache.errors import ConfigError, DistcacheError, MemoryTooSmallError
from distcache.layout import RowLayout, TableSpec
from distcache.store import available
from distcache.store.base import Store
from distcache.store.rows import RowStore, create_stores, store_bytes


@pytest.fixture(scope="module")
def world():
    world = open_world("cpu")
    yield world
    close_world(world)


class TestRowStore(StoreContract):
    @pytest.fixture(autouse=True)
    def use_world(self, world: World) -> None:
        self.world = world

    def make(self, layout: RowLayout, state_width: int, dtype: torch.dtype) -> Store:
        return RowStore.create(layout, state_width, dtype, self.world)


def mapped() -> int:
    """Mappings of shared memory of this process."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:distcache")


def open_files() -> int:
    """Open descriptors of shared memory of this process."""
    links = []
    for file in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(file.readlink()))
        except OSError:
            continue
    return sum("memfd:distcache" in link for link in links)


def test_mapping_goes_with_the_last_view(world: World) -> None:
    before, files = mapped(), open_files()
    store = RowStore.create(RowLayout(NARROW, 1), 2, torch.float32, world)
    view = store.table(1)[1]
    assert mapped() == before + 1
    store.close()
    assert mapped() == before + 1
    assert view.sum() == 0
    del view
    assert mapped() == before
    assert open_files() == files


def test_closed_store_says_so(world: World) -> None:
    store = RowStore.create(RowLayout(NARROW, 1), 2, torch.float32, world)
    store.close()
    with pytest.raises(DistcacheError, match="closed"):
        store.gather(torch.tensor([0]))


def test_store_bytes_by_hand(world: World) -> None:
    layouts = [RowLayout(NARROW, 1), RowLayout(WIDE, 1)]
    assert store_bytes([layouts[0]], [0], torch.float32) == 60 * 4 * 4
    # weights up to the next page (960 to 4096 bytes), then the state
    assert store_bytes([layouts[0]], [3], torch.float32) == 4096 + 60 * 3 * 4
    assert store_bytes([layouts[1]], [0], torch.float64) == 9 * 100_000 * 8
    both = store_bytes(layouts, [3, 0], torch.float64)
    assert both == 4096 + 60 * 3 * 8 + 9 * 100_000 * 8
    stores = create_stores(layouts, [3, 0], torch.float64, world)
    assert sum(store.nbytes for store in stores) == both
    for store in stores:
        store.close()


def test_all_groups_are_checked_before_the_first_is_made(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts = [RowLayout(NARROW, 1), RowLayout(WIDE, 1)]
    needed = store_bytes(layouts, [1, 1], torch.float32)
    made = []
    monkeypatch.setattr("os.memfd_create", lambda name: made.append(name))
    monkeypatch.setattr(available, "available_memory", lambda: needed - 1)
    with pytest.raises(MemoryTooSmallError) as caught:
        create_stores(layouts, [1, 1], torch.float32, world)
    assert str(needed) in str(caught.value) and str(needed - 1) in str(caught.value)
    assert "data.table_rows" in str(caught.value)
    assert made == []


def test_one_store_refused_before_it_is_made(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr("os.memfd_create", lambda name: made.append(name))
    huge = RowLayout([TableSpec("huge", 1 << 42, 128, ("x",))], 1)
    with pytest.raises(MemoryTooSmallError, match="128 \\+ 1 of state"):
        RowStore.create(huge, 1, torch.float32, world)
    assert made == []


def test_first_store_is_closed_when_the_second_fails(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = mapped()
    real, calls = available.available_memory, []

    def shrinking() -> int:
        calls.append(0)
        return real() if len(calls) < 3 else 0

    monkeypatch.setattr(available, "available_memory", shrinking)
    layouts = [RowLayout(NARROW, 1), RowLayout(NARROW, 1)]
    with pytest.raises(MemoryTooSmallError):
        create_stores(layouts, [0, 0], torch.float32, world)
    assert len(calls) == 3
    assert mapped() == before


def test_wrong_dtype_and_table_indices(world: World) -> None:
    with pytest.raises(ConfigError, match="float16"):
        RowStore.create(RowLayout(NARROW, 1), 0, torch.float16, world)
    store = RowStore.create(RowLayout(NARROW, 1), 0, torch.float32, world)
    with pytest.raises(ConfigError, match="2 table indices for 3 tables"):
        store.initialise(0, [0, 1])
    store.close()


def test_speed_of_initialisation_is_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    store = RowStore.create(RowLayout(NARROW, 1), 0, torch.float32, world)
    with caplog.at_level(logging.INFO, "distcache"):
        store.initialise(0, [0, 1, 2])
    assert "60 rows of 3 tables" in caplog.text and "GB/s" in caplog.text
    store.close()


def shared_by_ranks(rank: int, size: int) -> dict[str, object]:
    """All local ranks see one store: initial bits, then each writes its home rows."""
    world = open_world("cpu", timeout_s=60)
    layouts = [RowLayout(NARROW, size), RowLayout(WIDE, size)]
    narrow, wide = create_stores(layouts, [2, 0], torch.float64, world)
    narrow.initialise(7, [4, 2, 0], 0.1)
    wide.initialise(7, [1, 3], 0.0)
    same = [
        torch.equal(narrow.weight, expected_weight(layouts[0], 7, [4, 2, 0]).double()),
        torch.equal(wide.weight, expected_weight(layouts[1], 7, [1, 3]).double()),
        bool((narrow.state == 0.1).all()),
        wide.state is None,
    ]
    dist.barrier(group=world.host_group)  # nobody writes before all have compared
    rows = np.arange(60)
    mine = torch.from_numpy(rows[layouts[0].home(rows) == rank])
    weight = mine[:, None].double() * 10 + torch.arange(4) + rank * 1000
    narrow.scatter(mine, weight, weight[:, :2] + 0.5)
    dist.barrier(group=world.host_group)
    got, state = narrow.gather(torch.from_numpy(rows))
    inode = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd" in line]
    shared = sorted(line.split()[4] for line in inode)
    dist.barrier(group=world.host_group)
    narrow.close()
    wide.close()
    left = mapped()
    close_world(world)
    return {"same": same, "weight": got.numpy(), "state": state.numpy(), "inodes": shared} | {
        "left": left
    }


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_share_one_store(size: int) -> None:
    results = run_ranks(shared_by_ranks, size)
    rows = np.arange(60)
    home = RowLayout(NARROW, size).home(rows)
    want = rows[:, None] * 10.0 + np.arange(4) + home[:, None] * 1000.0
    for result in results:
        assert result["same"] == [True] * 4
        assert np.array_equal(result["weight"], want)
        assert np.array_equal(result["state"], want[:, :2] + 0.5)
        assert result["inodes"] == results[0]["inodes"]
        assert len(result["inodes"]) == 2
        assert result["left"] == 0


def two_nodes(rank: int, size: int) -> tuple[list[float], bool]:
    """Ranks 0, 1 and ranks 2, 3 are two nodes: a store each, both initialised whole."""
    world = open_world("cpu", timeout_s=60)
    world = dataclasses.replace(world, local_rank=rank % 2, local_size=2)
    store = RowStore.create(RowLayout(NARROW, size), 0, torch.float32, world)
    store.initialise(7, [0, 1, 2])
    same = torch.equal(store.weight, expected_weight(store.layout, 7, [0, 1, 2]))
    dist.barrier(group=world.host_group)
    store.scatter(torch.tensor([rank]), torch.full((1, 4), float(100 + rank)), None)
    dist.barrier(group=world.host_group)
    seen = store.gather(torch.arange(4))[0][:, 0].tolist()
    store.close()
    close_world(world)
    return [value for value in seen if value >= 100], same


def test_each_node_has_its_own_store() -> None:
    results = run_ranks(two_nodes, 4)
    assert [seen for seen, _ in results] == [[100, 101], [100, 101], [102, 103], [102, 103]]
    assert all(same for _, same in results)
