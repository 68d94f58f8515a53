"""Training by the kernels: a cache has the bits of `resident`, and the reference agrees closely.

On a machine without a GPU they run in Triton's interpreter, on CPU tensors.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scenarios import OPTIMIZERS, Scenario, run_mode, table

from distcache import ops
from distcache.comm.world import close_world, open_world
from distcache.ops.long_segments import CHUNK
from distcache.parallel.cached import CachedSettings
from distcache.store.rows import ZERO_COPY

pytest.importorskip("triton", reason="Triton is not installed")
TABLES = (table("a", 60), table("b", 9, features=2), table("c", 7, dim=6), table("d", 1))


@pytest.fixture(scope="module")
def world():
    world = open_world("auto", "auto", 60)
    if world.device.type == "cpu" and not ops.triton_bodies().INTERPRETED:
        pytest.skip("no GPU, and Triton was imported without TRITON_INTERPRET=1")
    yield world
    close_world(world)


@pytest.mark.parametrize(
    "optimizer", ["adam", pytest.param("rowwise_adagrad", marks=pytest.mark.slow)]
)
def test_a_cache_has_the_bits_of_resident(world, optimizer, monkeypatch):
    spec, lr = OPTIMIZERS[optimizer]
    case = Scenario(TABLES, spec, lr, steps=5, bag=4, weighted=True, global_batch=40)
    per_step = [len(case.batch(step).ids.values) for step in range(case.steps)]
    assert min(per_step) > 5 * CHUNK  # table d has one row, read by one of five features
    plain = run_mode(world, case, CachedSettings("resident"))
    monkeypatch.setenv(ops.VARIABLE, "triton")
    ops.choice.cache_clear()
    names = ("pooled_lookup", "row_gradients", "update_rows", "put", "copy_rows")
    calls = dict.fromkeys(names, 0)
    try:
        for name in calls:
            monkeypatch.setattr(ops.triton_bodies(), name, counted(name, calls))
        resident = run_mode(world, case, CachedSettings("resident"))
        tight = CachedSettings("data", (65, 7), 2, 1, validate=True)
        cached = run_mode(world, case, tight)
        assert calls.pop("copy_rows") == calls.pop("put") > 0
        assert min(calls.values()) == 2 * case.steps * 2  # runs, steps, groups of tables
        calls["copy_rows"] = calls["put"] = 0
        in_place = run_mode(world, case, replace(tight, access=ZERO_COPY))
        read_and_written = calls["copy_rows"] - calls["put"]
        assert read_and_written > 2 * case.steps  # groups of tables, a read each, and writes
    finally:
        ops.choice.cache_clear()
    assert 0 < cached.summary["hit_rate"] < 1
    assert cached.losses == in_place.losses == resident.losses
    assert cached.state_digest == in_place.state_digest == resident.state_digest
    torch.testing.assert_close(resident.losses, plain.losses, rtol=1e-5, atol=1e-6)
    for name, weight in plain.tables.items():
        torch.testing.assert_close(
            torch.from_numpy(resident.tables[name]), torch.from_numpy(weight), rtol=1e-4, atol=1e-5
        )


def counted(name, calls):
    """The kernel's body, its calls counted."""
    body = getattr(ops.triton_bodies(), name)

    def call(*arguments):
        calls[name] += 1
        return body(*arguments)

    return call
