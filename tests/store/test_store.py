"""Host memory: what is available, on made-up /proc trees; shared memory that leaves nothing; the
row store in it: what it holds and refuses, what several ranks see, and rows that a device reads
and writes where they lie: on the CPU, on a GPU where there is one."""

from __future__ import annotations

import gc
import logging
import math
import os
import signal
import weakref
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from node_cases import open_nodes
from protocol_cases import caught
from ranks import run_ranks
from torch import Tensor

from distcache import ops
from distcache.comm.world import World, close_world, open_world
from distcache.engine.groups import TableGroup, make_groups
from distcache.engine.start import make_stores
from distcache.errors import ConfigError, DistcacheError, MemoryTooSmallError, PlanError
from distcache.layout import RowKind, RowLayout, TableSpec
from distcache.optim import row_update
from distcache.store import memory
from distcache.store import rows as direct
from distcache.store.rows import DirectRows, RowStore, initial_rows

KIB, MIB = 1 << 10, 1 << 20
V2 = [("/", "cg", "cgroup2 cgroup2 rw,nsdelegate")]
V1 = [("/", "cpu", "cgroup cgroup rw,cpu"), ("/", "mem", "cgroup cgroup rw,memory")]
UNLIMITED_V1 = (1 << 63) - 4096
MEMINFO = f"MemTotal:  99999999999 kB\nMemFree: 17 kB\nMemAvailable: {1 << 30} kB\nHugePages: 0\n"


def limits(most: object, use: int, version: int = 2, **more: object) -> dict[str, object]:
    """The files of a control group."""
    names = ("memory__max", "memory__current")
    if version == 1:
        names = ("memory__limit_in_bytes", "memory__usage_in_bytes")
    return dict(zip(names, (most, use), strict=True)) | more


STAT_V2 = f"anon {5 * MIB}\ninactive_file {20 * MIB}\nactive_file {8 * MIB}\nshmem {3 * MIB}"
STAT_V1 = f"inactive_file 1\ntotal_inactive_file {10 * MIB}\ntotal_active_file 0"
DOCKER_V1 = [("/docker/abc", "mem", "cgroup cgroup rw,memory")]
DOCKER_V2 = [("/docker/abc", "cg", "cgroup2 none rw")]


@pytest.mark.parametrize(
    ("lines", "mounts", "files", "expected_mib"),
    [
        (["0::/"], [], {}, 1 << 20),  # without limits it is MemAvailable
        (None, [], {}, 1 << 20),
        (["0::/job/rank"], V2, {"cg/job/rank": limits(100 * MIB, 30 * MIB)}, 70),
        (  # a parent is tighter
            ["0::/job/rank"],
            V2,
            {"cg/job/rank": limits("max", 30 * MIB), "cg/job": limits(100 * MIB, 90 * MIB)},
            10,
        ),
        (["0::/job"], V2, {"cg/job": limits(100 * MIB, 30 * MIB, memory__high=80 * MIB)}, 50),
        (  # page cache that can be had back is not use
            ["0::/job"],
            V2,
            {"cg/job": limits(100 * MIB, 60 * MIB, memory__stat=STAT_V2)},
            100 - (60 - 20 - 4),
        ),
        (["0::/job"], V2, {"cg/job": limits(10 * MIB, 11 * MIB)}, 0),
        (
            ["9:cpu:/other", "4:cpuset,memory:/slurm/job", "0::/"],
            V1,
            {
                "mem/slurm/job": limits(UNLIMITED_V1, 50 * MIB, 1, memory__stat=STAT_V1),
                "mem/slurm": limits(100 * MIB, 60 * MIB, 1, memory__stat=STAT_V1),
            },
            50,
        ),
        *(  # a container's own group is at the mount point, wherever the process says that it is
            ([f"4:memory:{path}"], DOCKER_V1, {"mem": limits(100 * MIB, 40 * MIB, 1)}, 60)
            for path in ("/docker/abc", "/../../elsewhere", "/docker", "/kube/pod")
        ),
        (["0::/docker/abc/inner"], DOCKER_V2, {"cg/inner": limits(5 * MIB, 0)}, 5),
        (["0::/job"], [("/", "c g", V2[0][2])], {"c g/job": limits(5 * MIB, MIB)}, 4),
        (
            ["4:memory:/a", "0::/b"],
            V1 + V2,
            {"mem/a": limits(50 * MIB, MIB, 1), "cg/b": limits(40 * MIB, MIB)},
            39,
        ),
        (["4:memory:/a"], V1, {"mem/a": limits(UNLIMITED_V1, 1 << 40, 1)}, 1 << 20),
    ],
)
def test_available_memory_is_the_tightest_limit(
    tmp_path: Path, lines: list | None, mounts: list, files: dict, expected_mib: int
) -> None:
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(MEMINFO)
    if lines is not None:
        (proc / "self/cgroup").write_text("".join(f"{line}\n" for line in lines))
    text = "22 1 0:5 / / rw,relatime shared:1 - ext4 /dev/root rw\n"
    for root, folder, kind in mounts:
        point = str(tmp_path / folder).replace(" ", "\\040")
        text += f"35 22 0:32 {root} {point} rw,nosuid shared:9 - {kind}\n"
    (proc / "self/mountinfo").write_text(text)
    for folder, own in files.items():
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for name, value in own.items():
            (tmp_path / folder / name.replace("__", ".")).write_text(f"{value}\n")
    assert memory.available_memory(proc) == expected_mib * MIB


def test_an_old_kernel_tells_free_memory_and_the_real_one_has_some(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemFree: 17 kB\n")
    assert memory.available_memory(tmp_path) == 17 * KIB
    assert MIB < memory.available_memory() < 1 << 50


def test_what_memory_does_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 3 * MIB)
    memory.require_memory(3 * MIB, "x", "y")
    says = (
        r"for the tables: needed 3.00 MiB \(3145729 bytes\), found 3.00 MiB \(3145728 bytes\) .*; "
        "use data.table_rows"
    )
    with pytest.raises(MemoryTooSmallError, match=says):
        memory.require_memory(3 * MIB + 1, "the tables", "use data.table_rows")
    for count, text in (
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.00 KiB (1024 bytes)"),
        (3 * (1 << 29), "1.50 GiB (1610612736 bytes)"),
        (1 << 60, "1024.00 PiB (1152921504606846976 bytes)"),
    ):
        assert memory.describe_bytes(count) == text


def failures(rank: int, size: int) -> list[str]:
    """One rank fails at a time; every rank gets an error, and the next attempt works."""
    world = open_world("cpu", timeout_s=60)
    seen: list[str] = []

    def attempt(bytes_wanted: int = 8192, **changed: object) -> None:
        """With other functions, here alone, of the module or of `os`."""
        with ExitStack() as patches:
            for name, value in changed.items():
                patches.enter_context(
                    patch.object(os if hasattr(os, name) else memory, name, value)
                )
            what = (bytes_wanted, world, "the tables", "use less")
            seen.append(caught(lambda: memory.share_memory(*what)) or "ok")

    def nowhere(name: str) -> int:
        return os.open("/nowhere/at/all", os.O_RDWR)

    first = rank == 0
    attempt(**({"available_memory": lambda: 100} if first else {}))
    attempt(**({"memfd_create": nowhere} if first else {}))
    attempt(**({"mmap": None} if rank == size - 1 else {}))  # an error that is no OSError
    attempt(8192 + rank)
    other = os.stat("/proc/self/exe")  # the creator's descriptor names another file elsewhere
    attempt(**({"fstat": lambda fd: other} if first else {}))
    attempt()
    links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    seen.append(str(sum("memfd:distcache" in link for link in links)))
    close_world(world)
    return seen


def test_an_error_on_one_rank_reaches_all() -> None:
    first, second, third = run_ranks(failures, 3)
    assert first[0].startswith("MemoryTooSmallError: host memory is too small for the tables")
    for other in (second, third):
        assert other[0] == first[0].replace(": host", ": rank 0: host")
    assert first[1].startswith("MemoryTooSmallError: the system refused 8.00 KiB")
    assert second[1].startswith("MemoryTooSmallError: rank 0: the system refused")
    assert third[2].startswith("AttributeError")
    assert [ranks[2] for ranks in (first, second)] == [f"PeerError: rank 2: {third[2]}"] * 2
    assert first[3].startswith("PeerError: rank 1: rank 1 wants 8193 bytes")
    assert "rank 2 wants 8194 bytes" in third[3]
    for ranks in (first, second, third):
        assert "cannot map the node's shared memory" in ranks[4]
        assert "one process namespace" in ranks[4]
        assert ranks[5:] == ["ok", "0"]


def test_a_handle_opens_its_own_file_alone() -> None:
    """Where a process has ended and another one has its number, the file there is refused."""
    first = os.memfd_create("test")
    second = os.memfd_create("test")
    try:
        path, file = memory.handle_of(first)
        os.close(memory.open_handle((path, file)))
        with pytest.raises(FileNotFoundError, match="another process has this id here"):
            memory.open_handle((path, memory.handle_of(second)[1]))
        with pytest.raises(FileNotFoundError):
            memory.open_handle((f"{path}9999", file))
    finally:
        os.close(first)
        os.close(second)


def users(inode: str) -> list[str]:
    """Processes that map the anonymous file with this inode; its makers have closed it by then."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            lines = (process / "maps").read_text().splitlines()
            if any("memfd:distcache" in x and x.split()[4] == inode for x in lines):
                found.append(process.name)
    return found


def killed(rank: int, size: int, folder: str) -> None:
    """Fill shared memory, note who has it, and die without a chance to clean up."""
    world = open_world("cpu", timeout_s=60)
    shared = memory.share_memory(16 * MIB, world, "the tables", "use less")
    memory.tensor_in(shared, 0, (size, 16 * MIB // size // 8), torch.float64)[rank] = 1.0
    dist.barrier(group=world.host_group)
    line = next(x for x in Path("/proc/self/maps").read_text().splitlines() if "memfd:dist" in x)
    inode = line.split()[4]
    Path(folder, str(rank)).write_text(f"{inode} {len(users(inode))}")
    dist.barrier(group=world.host_group)
    os.kill(os.getpid(), signal.SIGKILL)


def test_sigkill_leaves_nothing(tmp_path: Path) -> None:
    """Memory that no process maps is the kernel's again: it has no name."""
    files = set(os.listdir("/dev/shm"))
    with pytest.raises(RuntimeError, match="exit code -9"):
        run_ranks(killed, 2, str(tmp_path))
    notes = [(tmp_path / str(rank)).read_text().split() for rank in range(2)]
    inode = notes[0][0]
    assert notes == [[inode, "2"]] * 2
    assert users(inode) == []
    assert not [name for name in set(os.listdir("/dev/shm")) - files if "distcache" in name]


# Width 100,000: a block is 2 rows, so that these tables span many blocks, the last one ragged.
WIDE = [TableSpec("a", 7, 100_000, ("a",)), TableSpec("b", 2, 100_000, ("b",))]
NARROW = [TableSpec("a", 50, 4, ("a",)), TableSpec("b", 1, 4, ("b",)), TableSpec("c", 9, 4, ("c",))]
LAYOUTS = [RowLayout(NARROW, 1), RowLayout(WIDE, 1)]
ROWS = torch.arange(60)


def expected_weight(layout: RowLayout, seed: int, indices: list[int]) -> Tensor:
    """Initial weights of a whole group, drawn table by table at once."""
    drawn = [
        initial_rows(seed, index, table.rows, table.dim, 0, table.rows)
        for index, table in zip(indices, layout.tables, strict=True)
    ]
    return torch.cat(drawn)


@pytest.fixture(params=[(0, torch.float32), (1, torch.float32), (8, torch.float64)])
def store(request: pytest.FixtureRequest, world: World):
    """A store of zeros; of no state, row-wise state, and state of float64."""
    store = RowStore(LAYOUTS[0], *request.param, world)
    yield store
    store.close()


def values(store: RowStore, count: int) -> tuple[Tensor, Tensor | None]:
    """Random weights and state of so many rows."""
    rng = torch.Generator().manual_seed(count)
    weight = torch.rand(count, 4, dtype=store.dtype, generator=rng)
    width = store.state_width
    return weight, torch.rand(count, width, dtype=store.dtype, generator=rng) if width else None


def test_initial_values_and_tables_in_original_ids(store: RowStore, caplog) -> None:
    with caplog.at_level(logging.INFO, "distcache"):
        store.initialise(3, [5, 0, 2], 0.25)
    assert "60 rows of 3 tables" in caplog.text and "GB/s" in caplog.text
    whole, state = store.gather(ROWS)
    assert whole.dtype == store.dtype and whole.shape == (60, 4)
    assert torch.equal(whole, expected_weight(store.layout, 3, [5, 0, 2]).to(store.dtype))
    assert (state is None) == (store.state_width == 0)
    assert state is None or (state.shape == (60, store.state_width) and (state == 0.25).all())
    for index, (start, stop) in enumerate([(0, 50), (50, 51), (51, 60)]):
        weight, state = store.table(index)
        assert torch.equal(weight, whole[start:stop])
        assert (state is None) == (store.state_width == 0)
        assert state is None or state.shape == (stop - start, store.state_width)
    weight += 1  # a view
    assert torch.equal(store.gather(ROWS[51:])[0], whole[51:] + 1)


def test_rows_are_written_and_copied_out(store: RowStore) -> None:
    store.initialise(0, [0, 1, 2])
    rows, (whole, whole_state) = torch.tensor([59, 0, 50, 3, 49]), store.gather(ROWS)
    new, new_state = values(store, 5)
    store.scatter(rows, new, new_state)
    whole[rows] = new  # a copy, not the store's
    out = torch.full((60, 4), 9.0, dtype=store.dtype), values(store, 60)[1]
    got, got_state = store.gather(ROWS, out)
    assert got.data_ptr() == out[0].data_ptr() and torch.equal(out[0], whole)
    if new_state is not None:
        whole_state[rows] = new_state
        assert torch.equal(got_state, whole_state) and torch.equal(out[1], whole_state)
    none, no_state = store.gather(ROWS[:0])
    assert none.shape == (0, 4)
    store.scatter(ROWS[:0], none, no_state)
    assert torch.equal(store.gather(torch.tensor([7, 7]))[0], whole[[7, 7]])


@pytest.mark.parametrize("bad", [-1, 60, 1 << 40])
def test_what_makes_no_sense_is_refused(store: RowStore, world: World, bad: int) -> None:
    rows, (good, state) = torch.tensor([1, bad, 2]), values(store, 3)
    with pytest.raises(PlanError, match=str(bad)):
        store.gather(rows)
    for at, weight in ((rows, good), (ROWS[:3], good[:, :3]), (ROWS[:3], good.half())):
        with pytest.raises(PlanError):
            store.scatter(at, weight, state)
    assert not store.gather(ROWS)[0].any()
    with pytest.raises(ConfigError, match="float16"):
        RowStore(LAYOUTS[0], 0, torch.float16, world)


def mapped() -> int:
    """Mappings of shared memory of this process."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:distcache")


def open_files() -> int:
    """Open descriptors of shared memory of this process."""
    links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return sum("memfd:distcache" in link for link in links)


def test_the_mapping_goes_with_the_last_view(world: World) -> None:
    before, files = mapped(), open_files()
    store = RowStore(LAYOUTS[0], 2, torch.float32, world)
    view = store.table(1)[1]
    assert mapped() == before + 1
    store.close()
    store.close()
    assert mapped() == before + 1 and view.sum() == 0
    with pytest.raises(DistcacheError, match="closed"):
        store.gather(torch.tensor([0]))
    del view
    assert mapped() == before and open_files() == files


def stores_of(
    world: World, layouts: list[RowLayout], widths: list[int], dtype: torch.dtype
) -> list[RowStore]:
    """Stores of these layouts and widths of state."""
    own = iter(widths)
    update: Any = SimpleNamespace(state_width=lambda dim: next(own), initial_state=lambda dim: 0.0)
    groups = [
        TableGroup(layout, tuple(range(len(layout.tables))), (), layout.offsets[:0], ())
        for layout in layouts
    ]
    return make_stores(world, groups, update, dtype, 0, "staged")


def bytes_of(world: World, *how: Any) -> int:
    """Of all stores of these layouts, widths of state and dtype."""
    stores = stores_of(world, *how)
    for store in stores:
        store.close()
    return sum(store.nbytes for store in stores)


def test_store_bytes_by_hand(world: World) -> None:
    assert bytes_of(world, LAYOUTS[:1], [0], torch.float32) == 60 * 4 * 4
    # weights up to the next page (960 to 4096 bytes), then the state
    assert bytes_of(world, LAYOUTS[:1], [3], torch.float32) == 4096 + 60 * 3 * 4
    assert bytes_of(world, LAYOUTS[1:], [0], torch.float64) == 9 * 100_000 * 8
    both = bytes_of(world, LAYOUTS, [3, 0], torch.float64)
    assert both == 4096 + 60 * 3 * 8 + 9 * 100_000 * 8


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_share_a_large_gather_and_scatter(world: World, threads: int) -> None:
    store = RowStore(RowLayout([TableSpec("t", 5000, 64, ("t",))], 1), 0, torch.float32, world)
    store.initialise(3, [0])
    store._threads = threads
    rows = torch.from_numpy(np.random.default_rng(threads).integers(0, 5000, 20_011))
    assert torch.equal(store.gather(rows)[0], store.weight[rows])
    with pytest.raises(PlanError, match="row 5000 is outside"):
        store.gather(torch.cat([rows, torch.tensor([5000])]))
    generator = torch.Generator().manual_seed(threads)
    places = torch.randperm(5000, generator=generator)[:4500]
    values = torch.randn(4500, 64, generator=generator)
    expected = store.weight.clone()
    wrong = places.clone()
    wrong[-1] = 5000
    with pytest.raises(PlanError, match="row 5000 is outside"):
        store.scatter(wrong, values, None)
    assert torch.equal(store.weight, expected), "nothing is written"
    expected[places] = values
    store.scatter(places, values, None)
    assert torch.equal(store.weight, expected)
    store.close()


def test_memory_is_refused_before_it_is_made(world: World, monkeypatch) -> None:
    """All groups are checked as one; where only the second fails, the first is closed."""
    needed = bytes_of(world, LAYOUTS, [1, 1], torch.float32)
    before, real, made, looks = mapped(), memory.available_memory, [], []
    with monkeypatch.context() as changed:
        changed.setattr("os.memfd_create", lambda name: made.append(name))
        huge = RowLayout([TableSpec("huge", 1 << 42, 128, ("x",))], 1)
        with pytest.raises(MemoryTooSmallError, match="128 \\+ 1 of state"):
            RowStore(huge, 1, torch.float32, world)
        changed.setattr(memory, "available_memory", lambda: needed - 1)
        with pytest.raises(MemoryTooSmallError, match=rf"{needed} .*{needed - 1} .*table_rows"):
            stores_of(world, LAYOUTS, [1, 1], torch.float32)
    assert made == []

    def shrinking() -> int:
        looks.append(0)
        return real() if len(looks) < 3 else 0

    monkeypatch.setattr(memory, "available_memory", shrinking)
    with pytest.raises(MemoryTooSmallError):
        stores_of(world, LAYOUTS[:1] * 2, [0, 0], torch.float32)
    assert len(looks) == 3 and mapped() == before


def shared_by_ranks(rank: int, size: int) -> tuple:
    """All local ranks see one store: initial bits, then each writes its home rows."""
    world = open_world("cpu", timeout_s=60)
    layouts = [RowLayout(NARROW, size), RowLayout(WIDE, size)]
    narrow, wide = stores_of(world, layouts, [2, 0], torch.float64)
    narrow.initialise(7, [4, 2, 0], 0.1)
    wide.initialise(7, [1, 3], 0.0)
    assert torch.equal(narrow.weight, expected_weight(layouts[0], 7, [4, 2, 0]).double())
    assert torch.equal(wide.weight, expected_weight(layouts[1], 7, [1, 3]).double())
    assert (narrow.state == 0.1).all() and wide.state is None
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
    assert mapped() == 0
    close_world(world)
    return got.numpy(), state.numpy(), shared


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_share_one_store(size: int) -> None:
    results = run_ranks(shared_by_ranks, size)
    rows = np.arange(60)
    home = RowLayout(NARROW, size).home(rows)
    want = rows[:, None] * 10.0 + np.arange(4) + home[:, None] * 1000.0
    for weight, state, inodes in results:
        assert np.array_equal(weight, want) and np.array_equal(state, want[:, :2] + 0.5)
        assert inodes == results[0][2] and len(inodes) == 2


def several_nodes(rank: int, size: int, sizes: tuple[int, ...]) -> tuple[list[int], str]:
    """A store for each node of `sizes` ranks, of the rows at home there: these rows, and what is
    said where the last node's memory is a byte too small."""
    world = open_nodes(rank, sizes)
    layout = RowLayout(NARROW, size)
    store = RowStore(layout, 1, torch.float32, world)
    store.initialise(7, [0, 1, 2], 0.5)
    rows = np.arange(60)
    homes = layout.home(rows)
    first, count = world.first_local, world.local_size
    mine = torch.from_numpy(rows[(homes >= first) & (homes < first + count)])
    weight, state = store.gather(mine)
    assert torch.equal(weight, expected_weight(layout, 7, [0, 1, 2])[mine]) and (state == 0.5).all()
    assert np.sort(store.part.places(mine.numpy())).tolist() == list(range(15 * count))
    assert store.nbytes == sum(store.part.bytes(1, torch.float32))
    assert len(store.weight) == 15 * count  # a share of 60 rows, and not one more
    dist.barrier(group=world.host_group)  # nobody writes before all have compared
    own = torch.from_numpy(rows[homes == rank])
    store.scatter(own, own[:, None].float().expand(-1, 4) + 100 * rank, torch.ones(len(own), 1))
    dist.barrier(group=world.host_group)
    want = mine[:, None] + 100 * torch.from_numpy(homes)[mine, None]
    assert torch.equal(store.gather(mine)[0], want.float().expand(-1, 4))
    foreign = next(row for row in rows.tolist() if row not in mine)
    for wrong, message in ((foreign, f"row {foreign} is at home on rank"), (60, "row 60 is out")):
        with pytest.raises(PlanError, match=message):
            store.gather(torch.tensor([mine[0], wrong]))
    with pytest.raises(PlanError, match="lies on 2 nodes"):
        store.table(0)
    store.close()
    needed = 251 * count * 64 * 4  # of 1001 rows, ragged
    memory.available_memory = lambda: needed - (world.nodes.of(rank) == 1)
    with pytest.raises(MemoryTooSmallError) as caught:
        odd = RowLayout([TableSpec("odd", 1001, 64, ("x",))], size)
        stores_of(world, [odd], [0], torch.float32)
    close_world(world)
    return mine.tolist(), str(caught.value)


@pytest.mark.parametrize("sizes", [(2, 2), (1, 3)])
def test_each_node_has_the_rows_at_home_there(sizes: tuple[int, int]) -> None:
    results = run_ranks(several_nodes, 4, sizes)
    assert sorted(results[0][0] + results[-1][0]) == list(range(60))
    for _, message in results:
        assert str(251 * sizes[1] * 64 * 4) in message and "more nodes" in message


DIRECT = RowLayout([TableSpec("a", 50, 8, ("a",)), TableSpec("b", 7, 8, ("b",))], 1)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_read_and_written_in_place_are_those_of_the_store(world, device, width, dtype) -> None:
    store = RowStore(DIRECT, width, dtype, world)
    store.initialise(3, (0, 1), 0.5)
    assert store.direct is None
    store.open_to(torch.device(device))
    rows_here = store.direct
    rows = torch.tensor([56, 0, 13, 50])
    weight, state = rows_here.read(rows)
    expected = store.gather(rows)
    assert torch.equal(weight.cpu(), expected[0]) and weight.device.type == device
    assert state is None if width == 0 else torch.equal(state.cpu(), expected[1])
    before = store.weight.clone()
    new = weight + 1, None if state is None else state * 2
    memory = torch.empty(4 * store.kind.nbytes, dtype=torch.uint8, device=device)
    for part, values in zip(store.kind.parts(memory), new, strict=True):
        if part is not None:
            part.copy_(values)
    rows_here.put(rows, memory)()
    for mark in rows_here.marks():
        mark.synchronize()
    before[rows] += 1
    assert torch.equal(store.weight, before)
    assert width == 0 or store.state.sum() == 0.5 * 3 * (57 + 4)
    empty = rows_here.read(rows[:0])
    assert empty[0].shape == (0, 8)
    rows_here.put(rows[:0], memory[:0])
    for bad in ([57], [-1]):
        for use in (rows_here.read, lambda rows: rows_here.put(rows, memory[: store.kind.nbytes])):
            with pytest.raises(PlanError, match=rf"row {bad[0]} is outside \[0, 57\)"):
                use(torch.tensor(bad))
    assert torch.equal(store.weight, before)
    store.close()
    store.close()
    assert store.direct is None
    with pytest.raises(DistcacheError, match="the row store is closed"):
        rows_here.read(rows)


def on_gpu(weight: Tensor, state: Tensor | None = None) -> DirectRows:
    """Rows that lie at their own numbers."""
    kind = RowKind(weight.shape[1], 0 if state is None else 2, weight.dtype, weight.dtype)
    return DirectRows(weight, state, kind, lambda rows: rows, torch.device("cuda"))


class FakeEvent:
    """The end of work on a stream, reached after so many looks at it."""

    def __init__(self, looks: float = 0) -> None:
        self.looks = looks

    def query(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def fake_gpu(monkeypatch, refused: tuple[int, ...] = ()) -> list[tuple]:
    """Calls of the CUDA runtime; those with the numbers `refused` fail."""
    calls: list[tuple] = []

    def call(name: str):
        def note(*arguments: int) -> int:
            calls.append((name, *arguments))
            return 2 if len(calls) - 1 in refused else 0

        return note

    runtime = SimpleNamespace(
        cudaHostRegister=call("register"),
        cudaHostUnregister=call("unregister"),
        cudaGetErrorString=lambda error: f"error {error}",
    )
    monkeypatch.setattr(ops, "triton_bodies", lambda: ops)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return calls


def tables() -> tuple[Tensor, Tensor]:
    return torch.zeros(10, 4), torch.zeros(10, 2)


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_memory_is_unlocked_when_the_device_is_through_and_before_it_goes(monkeypatch, how) -> None:
    calls = fake_gpu(monkeypatch)
    weight, state = tables()
    first, second, alive = weight.data_ptr(), state.data_ptr(), weakref.ref(weight)
    rows = on_gpu(weight, state)
    event = rows._events[7] = FakeEvent(looks=3)
    del weight, state
    assert calls == [("register", first, 160, 3), ("register", second, 80, 3)]
    assert alive() is not None
    if how == "closed":
        rows.close()
        rows.close()
    else:
        del rows
    assert calls[2:] == [("unregister", second), ("unregister", first)]
    assert event.looks == -1 and alive() is None, "the tables are still held"


def test_memory_that_cannot_be_locked_is_told_with_a_way_out(monkeypatch) -> None:
    calls = fake_gpu(monkeypatch, refused=(1,))
    weight, state = tables()
    with pytest.raises(MemoryTooSmallError, match=r"lock 80 bytes .*\(error 2\): set store.access"):
        on_gpu(weight, state)
    assert calls[2:] == [("unregister", weight.data_ptr())], "the first stays locked"


@pytest.mark.parametrize(
    ("looks", "refused", "said"), [(math.inf, (), "still used them"), (0, (2,), "error 2")]
)
def test_memory_that_cannot_be_let_go_of_stays_mapped(
    monkeypatch, caplog, looks, refused, said
) -> None:
    """A device that hangs, or a driver in error: closing says so, and takes nobody's error away."""
    kept: list[Tensor] = []
    monkeypatch.setattr(direct, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(direct, "_kept", kept)
    calls, (weight, state) = fake_gpu(monkeypatch, refused), tables()
    rows = on_gpu(weight, state)
    rows._events[0] = FakeEvent(looks)
    rows.close()
    assert len(calls) == 2 + len(refused)
    assert [table.data_ptr() for table in kept] == [weight.data_ptr(), state.data_ptr()]
    assert "rows stay locked in host memory" in caplog.text and said in caplog.text


@pytest.mark.parametrize("what", ["reads", "writes"])
def test_what_does_not_work_is_found_at_once(monkeypatch, what) -> None:
    table, copy = torch.ones(3, 4), ops.copy_rows
    kind = RowKind(4, 0, table.dtype, table.dtype)
    rows = DirectRows(table, None, kind, lambda rows: rows, torch.device("cpu"))
    rows.try_out()
    assert table.eq(1).all()

    def wrong(source, at, target, to) -> None:
        copy(source, at, target, to)
        if (to is None) == (what == "reads"):
            target.fill_(7)

    monkeypatch.setattr(ops, "copy_rows", wrong)
    with pytest.raises(ConfigError, match=rf"cpu cannot read rows .*it {what} .*set store.acc"):
        rows.try_out()
    assert table.eq(1).all() == (what == "reads")


def refused_on_one(rank: int, size: int) -> str:
    """What ranks say if the second one's host locks no memory."""
    world = open_world("cpu", "gloo", 60)
    groups = make_groups(DIRECT.tables, ("a", "b"), size)

    def refuse(self, device) -> None:
        raise MemoryTooSmallError("no lock here")

    if rank == 1:
        RowStore.open_to = refuse  # type: ignore[method-assign]
    with pytest.raises(DistcacheError) as caught:
        make_stores(world, groups, row_update("sgd", 0.0), torch.float32, 0, "zero_copy")
    close_world(world)
    return str(caught.value)


def test_one_rank_that_is_refused_ends_all() -> None:
    assert all("no lock here" in text for text in run_ranks(refused_on_one, 2))


def test_a_host_table_and_a_gpu_take_a_kernel(monkeypatch) -> None:
    host, device = torch.zeros(3, 4), torch.zeros(2, 4, device="meta")
    monkeypatch.setattr(ops, "triton_bodies", lambda: None)
    with pytest.raises(ConfigError, match=r"Triton, which is not installed: set store\.access=st"):
        ops.copy_rows(host, torch.tensor([0, 1]), device, None)
    with pytest.raises(ConfigError, match="not installed"):
        on_gpu(host)
    monkeypatch.setattr(ops, "choice", lambda: "reference")
    with pytest.raises(ConfigError, match=r"ruled out by DISTCACHE_OPS: set store\.access=staged"):
        ops.copy_kernel()
