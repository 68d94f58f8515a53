"""Rows that a device reads and writes in host memory: on the CPU, on a GPU where there is one."""

from __future__ import annotations

import math
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks

from distcache import ops
from distcache.comm.world import close_world, open_world
from distcache.engine.groups import make_groups
from distcache.engine.whole import make_stores
from distcache.errors import ConfigError, DistcacheError, MemoryTooSmallError, PlanError
from distcache.layout import RowLayout, TableSpec
from distcache.optim import row_update
from distcache.store import rows as direct
from distcache.store.rows import DirectRows, RowStore

LAYOUT = RowLayout([TableSpec("a", 50, 8, ("a",)), TableSpec("b", 7, 8, ("b",))], 1)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_read_and_written_in_place_are_those_of_the_store(world, device, width, dtype) -> None:
    store = RowStore(LAYOUT, width, dtype, world)
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
    rows_here.write(rows, weight + 1, None if state is None else state * 2)
    for mark in rows_here.marks():
        mark.event.synchronize()
    before[rows] += 1
    assert torch.equal(store.weight, before)
    assert width == 0 or store.state.sum() == 0.5 * 3 * (57 + 4)
    empty = rows_here.read(rows[:0])
    assert empty[0].shape == (0, 8)
    rows_here.write(rows[:0], *empty)
    for bad in ([57], [-1]):
        for use in (rows_here.read, lambda rows: rows_here.write(rows, weight[:1], state)):
            with pytest.raises(PlanError, match=rf"row {bad[0]} is outside \[0, 57\)"):
                use(torch.tensor(bad))
    assert torch.equal(store.weight, before)
    store.close()
    store.close()
    assert store.direct is None
    with pytest.raises(DistcacheError, match="the row store is closed"):
        rows_here.read(rows)


def on_gpu(weight: torch.Tensor, state: torch.Tensor | None = None) -> DirectRows:
    """Rows that lie at their own numbers."""
    return DirectRows(weight, state, lambda rows: rows, torch.device("cuda"))


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


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_memory_is_unlocked_when_the_device_is_through_and_before_it_goes(monkeypatch, how) -> None:
    calls = fake_gpu(monkeypatch)
    weight, state = torch.zeros(10, 4), torch.zeros(10, 2)
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
    weight, state = torch.zeros(10, 4), torch.zeros(10, 2)
    with pytest.raises(MemoryTooSmallError, match=r"lock 80 bytes .*\(error 2\): set store.access"):
        on_gpu(weight, state)
    assert calls[2:] == [("unregister", weight.data_ptr())], "the first stays locked"


@pytest.mark.parametrize("why", ["busy", "refused"])
def test_memory_that_cannot_be_let_go_of_stays_mapped(monkeypatch, caplog, why) -> None:
    """A device that hangs, or a driver in error: closing says so, and takes nobody's error away."""
    monkeypatch.setattr(direct, "_PATIENCE_S", 0.05)
    calls = fake_gpu(monkeypatch, refused=(2,) if why == "refused" else ())
    kept: list[torch.Tensor] = []
    monkeypatch.setattr(direct, "_kept", kept)
    weight, state = torch.zeros(10, 4), torch.zeros(10, 2)
    rows = on_gpu(weight, state)
    rows._events[0] = FakeEvent(math.inf if why == "busy" else 0)
    rows.close()
    assert len(calls) == (2 if why == "busy" else 3)
    assert [table.data_ptr() for table in kept] == [weight.data_ptr(), state.data_ptr()]
    said = "still used them" if why == "busy" else "error 2"
    assert "rows stay locked in host memory" in caplog.text and said in caplog.text


@pytest.mark.parametrize("what", ["reads", "writes"])
def test_what_does_not_work_is_found_at_once(monkeypatch, what) -> None:
    table, copy = torch.ones(3, 4), ops.copy_rows
    rows = DirectRows(table, None, lambda rows: rows, torch.device("cpu"))
    rows.try_out()
    assert table.eq(1).all()

    def wrong(source, at, target, to) -> None:
        copy(source, at, target, to)
        if (to is None) == (what == "reads"):
            target.fill_(7)

    monkeypatch.setattr(ops, "copy_rows", wrong)
    with pytest.raises(
        ConfigError, match=rf"cpu cannot read rows .*it {what} .*set store.access=st"
    ):
        rows.try_out()
    assert table.eq(1).all() == (what == "reads")


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
        on_gpu(host)
    monkeypatch.setattr(ops, "choice", lambda: "reference")
    with pytest.raises(ConfigError, match=r"ruled out by DISTCACHE_OPS: set store\.access=staged"):
        ops.copy_kernel()
