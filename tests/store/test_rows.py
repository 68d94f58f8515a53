"""The row store in shared memory: the store contract, and what several ranks see."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from node_cases import open_nodes
from ranks import run_ranks
from store.store_contract import NARROW, WIDE, StoreContract, expected_weight

from distcache.comm.world import World, close_world, open_world
from distcache.errors import ConfigError, DistcacheError, MemoryTooSmallError, PlanError
from distcache.layout import RowLayout, TableSpec
from distcache.store import memory as available
from distcache.store.rows import RowStore, Store, create_stores, store_bytes


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


def two_nodes(rank: int, size: int, sizes: tuple[int, ...]) -> dict:
    """Nodes of `sizes` ranks: a store each, of the rows at home there."""
    world = open_nodes(rank, sizes)
    layout = RowLayout(NARROW, size)
    store = RowStore.create(layout, 1, torch.float32, world)
    store.initialise(7, [0, 1, 2], 0.5)
    rows = np.arange(60)
    homes = layout.home(rows)
    first = world.first_local
    mine = torch.from_numpy(rows[(homes >= first) & (homes < first + world.local_size)])
    weight, state = store.gather(mine)
    found = {
        "rows": mine.tolist(),
        "same": torch.equal(weight, expected_weight(layout, 7, [0, 1, 2])[mine]),
        "state": bool((state == 0.5).all()),
        "places": np.sort(store.part.places(mine.numpy())).tolist(),
        "bytes": store.nbytes == store_bytes([layout], [1], torch.float32, world),
        "store rows": len(store.weight),
    }
    dist.barrier(group=world.host_group)  # nobody writes before all have compared
    own = torch.from_numpy(rows[homes == rank])
    store.scatter(own, own[:, None].float().expand(-1, 4) + 100 * rank, torch.ones(len(own), 1))
    dist.barrier(group=world.host_group)
    want = mine[:, None] + 100 * torch.from_numpy(homes)[mine, None]
    found["scattered"] = torch.equal(store.gather(mine)[0], want.float().expand(-1, 4))
    foreign = next(row for row in rows.tolist() if row not in found["rows"])
    for wrong, message in ((foreign, f"row {foreign} is at home on rank"), (60, "row 60 is out")):
        with pytest.raises(PlanError, match=message):
            store.gather(torch.tensor([found["rows"][0], wrong]))
    with pytest.raises(PlanError, match="lies on 2 nodes"):
        store.table(0)
    store.close()
    close_world(world)
    return found


@pytest.mark.parametrize("sizes", [(2, 2), (1, 3)])
def test_each_node_has_the_rows_at_home_there(sizes: tuple[int, int]) -> None:
    results = run_ranks(two_nodes, 4, sizes)
    for found, size in zip(results, (sizes[0],) * sizes[0] + (sizes[1],) * sizes[1], strict=True):
        assert found["same"] and found["state"] and found["scattered"] and found["bytes"]
        assert found["store rows"] == 15 * size  # a share of 60 rows, and not one more
        assert found["places"] == list(range(15 * size))
    both = results[0]["rows"] + results[-1]["rows"]
    assert sorted(both) == list(range(60))


def too_large(rank: int, size: int) -> str:
    """A node's part is refused where its memory is too small, on all ranks."""
    world = open_nodes(rank, (1, 1))
    layout = RowLayout([TableSpec("odd", 1001, 64, ("x",))], size)
    room = 501 * 64 * 4 - rank  # one byte too few on the second node
    available.available_memory = lambda: room
    with pytest.raises(MemoryTooSmallError) as caught:
        create_stores([layout], [0], torch.float32, world)
    close_world(world)
    return str(caught.value)


def test_memory_of_a_node_must_hold_its_part() -> None:
    for message in run_ranks(too_large, 2):
        assert str(501 * 64 * 4) in message and "more nodes" in message
