"""Rows that a device reads and writes in host memory: on the CPU, on a GPU where there is one."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ranks import run_ranks

from distcache import ops
from distcache.comm.world import World, close_world, open_world
from distcache.errors import ConfigError, DistcacheError, MemoryTooSmallError, PlanError
from distcache.layout import RowLayout, TableSpec
from distcache.optim.rows import row_update
from distcache.pipeline.build import make_stores
from distcache.pipeline.groups import make_groups
from distcache.store.direct import DirectRows
from distcache.store.rows import RowStore

LAYOUT = RowLayout([TableSpec("a", 50, 8, ("a",)), TableSpec("b", 7, 8, ("b",))], 1)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def world():
    world = open_world("cpu")
    yield world
    close_world(world)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_read_and_written_in_place_are_those_of_the_store(world, device, width, dtype) -> None:
    store = RowStore.create(LAYOUT, width, dtype, world)
    store.initialise(3, (0, 1), 0.5)
    store.open_to(torch.device(device))
    direct = store.direct
    rows = torch.tensor([56, 0, 13, 50])
    weight, state = direct.read(rows)
    expected = store.gather(rows)
    assert torch.equal(weight.cpu(), expected[0]) and weight.device.type == device
    assert state is None if width == 0 else torch.equal(state.cpu(), expected[1])
    before = store.weight.clone()
    direct.write(rows, weight + 1, None if state is None else state * 2)
    direct.wait()
    before[rows] += 1
    assert torch.equal(store.weight, before)
    assert width == 0 or store.state.sum() == 0.5 * 3 * (57 + 4)
    empty = direct.read(rows[:0])
    assert empty[0].shape == (0, 8)
    direct.write(rows[:0], *empty)
    assert torch.equal(store.weight, before)
    store.close()
    store.close()
    assert store.direct is None


def test_wrong_use_is_refused(world: World) -> None:
    store = RowStore.create(LAYOUT, 2, torch.float32, world)
    assert store.direct is None
    store.open_to(torch.device("cpu"))
    direct = store.direct
    for rows in ([57], [-1]):
        with pytest.raises(PlanError, match=rf"row {rows[0]} is outside \[0, 57\)"):
            direct.read(torch.tensor(rows))
        with pytest.raises(PlanError, match="outside"):
            direct.write(torch.tensor(rows), torch.zeros(1, 8), torch.zeros(1, 2))
    with pytest.raises(PlanError, match="weight of 1 rows"):
        direct.write(torch.tensor([0]), torch.zeros(1, 7), torch.zeros(1, 2))
    with pytest.raises(PlanError, match="state of 1 rows"):
        direct.write(torch.tensor([0]), torch.zeros(1, 8), None)
    store.close()


def same(rows: np.ndarray) -> np.ndarray:
    return rows


def fake_gpu(monkeypatch, refused_from: int) -> list[tuple]:
    """Calls of the CUDA runtime, of which registrations fail from number `refused_from` on."""
    calls: list[tuple] = []

    def register(address: int, nbytes: int, flags: int) -> int:
        calls.append(("register", address, nbytes, flags))
        return 2 if len(calls) > refused_from else 0

    def unregister(address: int) -> int:
        calls.append(("unregister", address))
        return 0

    runtime = SimpleNamespace(
        cudaHostRegister=register,
        cudaHostUnregister=unregister,
        cudaGetErrorString=lambda error: f"error {error}",
    )
    monkeypatch.setattr(ops, "triton_bodies", lambda: ops)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append(("wait",)))
    return calls


def test_memory_is_locked_once_and_let_go_after_the_device(monkeypatch) -> None:
    calls = fake_gpu(monkeypatch, 9)
    weight, state = torch.zeros(10, 4), torch.zeros(10, 2)
    rows = DirectRows(weight, state, same, torch.device("cuda"))
    rows.close()
    rows.close()
    first, second = weight.data_ptr(), state.data_ptr()
    assert calls == [
        ("register", first, 160, 3),
        ("register", second, 80, 3),
        ("wait",),
        ("unregister", first),
        ("unregister", second),
    ]


def test_memory_that_cannot_be_locked_is_told_with_a_way_out(monkeypatch) -> None:
    calls = fake_gpu(monkeypatch, 1)
    weight, state = torch.zeros(10, 4), torch.zeros(10, 2)
    with pytest.raises(MemoryTooSmallError, match=r"lock 80 bytes .*\(error 2\): set store.access"):
        DirectRows(weight, state, same, torch.device("cuda"))
    assert calls[-1] == ("unregister", weight.data_ptr()), "the first stays locked"


def refused_on_one(rank: int, size: int) -> list[str]:
    """What ranks say if the second one's host locks no memory; then whether memory is mapped."""
    world = open_world("cpu", "gloo", 60)
    groups = make_groups(LAYOUT.tables, ("a", "b"), size)
    if rank == 1:

        def refuse(self, device) -> None:
            raise MemoryTooSmallError("no lock here")

        RowStore.open_to = refuse  # type: ignore[method-assign]
    try:
        make_stores(world, groups, row_update("sgd", 0.0), torch.float32, 0, "zero_copy")
    except DistcacheError as error:
        found = [f"{type(error).__name__}: {error}"]
    close_world(world)
    return found


def test_one_rank_that_is_refused_ends_all() -> None:
    ranks = run_ranks(refused_on_one, 2)
    assert all("no lock here" in text for (text,) in ranks), ranks


def test_a_host_table_and_a_gpu_take_a_kernel(monkeypatch) -> None:
    host, device = torch.zeros(3, 4), torch.zeros(2, 4, device="meta")
    monkeypatch.setattr(ops, "triton_bodies", lambda: None)
    with pytest.raises(ConfigError, match=r"Triton, which is not installed: set store\.access=st"):
        ops.copy_rows(host, torch.tensor([0, 1]), device, None)
    with pytest.raises(ConfigError, match="not installed"):
        DirectRows(host, None, same, torch.device("cuda"))
    monkeypatch.setattr(ops, "choice", lambda: "reference")
    with pytest.raises(ConfigError, match=r"ruled out by DISTCACHE_OPS: set store\.access=staged"):
        ops.copy_kernel()


def test_the_numbers_are_those_of_numpy(world: World) -> None:
    rng = np.random.default_rng(0)
    table = torch.from_numpy(rng.random((40, 5)))
    direct = DirectRows(table, None, same, torch.device("cpu"))
    places = rng.permutation(40)[:11]
    assert np.array_equal(direct.read(torch.from_numpy(places))[0].numpy(), table.numpy()[places])
