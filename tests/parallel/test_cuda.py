"""The path on a GPU: the bits of `resident` there, the CPU's numbers, and nobody who waits.

Run by hand where there is a GPU (`-m gpu`); the same order of work is tested on the CPU in
tests/pipeline/test_stream_order.py, and late results in tests/trainer/test_trainer.py.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from placement_cases import KINDS, Job, check_groups, fitting_slots, placement_of, run_job, run_jobs
from ranks import run_ranks
from scenarios import OPTIMIZERS, Scenario, make_mode, run_mode, table

from distcache.comm.world import World, close_world, open_world
from distcache.engine.groups import Placement
from distcache.parallel.cached import CachedSettings
from distcache.store.rows import ACCESS

pytestmark = pytest.mark.gpu

TABLES = (table("a", 3000, dim=64), table("b", 40, dim=64, features=2), table("c", 700, dim=64))
DOUBLE = {"dtype": torch.float64}


def case(optimizer: str, **changes: object) -> Scenario:
    spec, lr = OPTIMIZERS[optimizer]
    chosen = Scenario(TABLES, spec, lr, steps=40, global_batch=256, weighted=True, last_batch=5)
    return replace(chosen, **changes)


@pytest.fixture(scope="module")
def world():
    world = open_world("cuda", "auto", 60)
    yield world
    close_world(world)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_schedule_has_the_bits_of_resident(world: World, optimizer: str) -> None:
    spec = case(optimizer)
    jobs = [Job(spec, CachedSettings("resident", schedule="serial"))]
    for lookahead, prefetch, schedule, access, how in (
        (8, 1, "overlapped", "staged", None),
        (0, 0, "overlapped", "staged", None),
        (4, 3, "overlapped", "staged", None),
        (8, 1, "serial", "staged", None),
        (8, 1, "overlapped", "zero_copy", None),
        (2, 0, "overlapped", "zero_copy", None),
        (8, 1, "overlapped", "staged", {"warm_start": 1.0}),
    ):
        chosen = {"schedule": schedule, "access": access, "cuda_graph": prefetch == 1}
        settings = CachedSettings("data", (2000,), lookahead, prefetch, **chosen)
        jobs.append(Job(spec, settings, 7, how))
    jobs.append(Job(spec, CachedSettings("host")))
    outcomes = [run_job(world, job) for job in jobs]
    check_groups([[outcomes]], [jobs])
    assert all(0 < found.summary["hit_rate"] < 1 for found in outcomes[1:-1])
    assert outcomes[-2].summary["warm_start_rows"] > 1000


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_ranks_that_share_a_gpu_agree_with_the_cpu(size: int, optimizer: str) -> None:
    jobs = [[Job(case(optimizer, **DOUBLE), CachedSettings("data", (2400,), 4, 2, **DOUBLE))]]
    gpu, cpu = (
        run_ranks(run_jobs, size, jobs, device, timeout=300)[0][0][0] for device in ("cuda", "cpu")
    )
    assert np.allclose(gpu.losses, cpu.losses, rtol=1e-9, atol=0)
    for name, rows in gpu.tables.items():
        assert np.allclose(rows, cpu.tables[name], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(("size", "optimizer"), [(2, "adam"), (3, "rowwise_adagrad")])
def test_every_placement_has_the_bits_of_resident(size: int, optimizer: str) -> None:
    spec = case(optimizer, **DOUBLE)
    jobs = [Job(spec, CachedSettings("resident", schedule="serial", **DOUBLE))]
    for prefetch, kind in enumerate(KINDS):
        placement = placement_of(kind, spec)
        slots = tuple(count + 60 for count in fitting_slots(spec, size, placement, 7))
        how = {"placement": placement, "access": ACCESS[prefetch % 2], **DOUBLE}
        jobs.append(Job(spec, CachedSettings("data", slots, 4, prefetch, validate=True, **how), 7))
    check_groups(run_ranks(run_jobs, size, [jobs], "cuda", timeout=300), [jobs])


@contextmanager
def own_waits(asked: bool) -> Iterator[list[str]]:
    """What torch warns of the calling thread's synchronising calls, where that is `asked`.

    Mode and warnings are the whole process', in which movement may wait: its own are left out.
    """
    seen: list[str] = []
    here = threading.get_ident()

    def shown(message: Warning | str, *about: object) -> None:
        # Turning the mode on warns too, that it is a prototype.
        if threading.get_ident() == here and "synchronizing CUDA operation" in str(message):
            seen.append(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = shown  # type: ignore[assignment]
        torch.cuda.set_sync_debug_mode("warn" if asked else "default")
        try:
            yield seen
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("access", ACCESS)
@pytest.mark.parametrize("kind", ["", *KINDS])
def test_the_training_loop_never_waits_for_the_device(
    world: World, kind: str, access: str, monkeypatch
) -> None:
    """torch warns of every synchronising call; the loop's thread makes none in a steady step.

    Two ranks cannot share a GPU without gloo, which waits: the placements run on one rank here.
    """
    spec = case("adagrad", steps=60)
    monkeypatch.setattr(CachedSettings, "placed", lambda self, world: self.placement)
    placement = placement_of(kind, spec) if kind else Placement()
    where = {"placement": placement, "access": access}
    how = CachedSettings("data", (2000,), 8, 1, cuda_graph=True, **where)
    mode = make_mode(world, spec, how)
    allocated: list[int] = []
    for step in mode.stream(spec.batch(s) for s in range(spec.steps)):
        steady = 20 <= step.batch.index < spec.steps - 2
        with own_waits(steady) as waits:
            mode.train_step(step)
        assert not waits, waits[:3]
        if steady:
            allocated.append(torch.cuda.memory_reserved(world.device))
    assert len(set(allocated[10:])) == 1, "the allocator grew in steady steps"
    mode.close()


def test_device_memory_is_what_the_parts_add_up_to(world: World) -> None:
    """On the same ids over tables that are larger, too."""
    small, peaks = case("adam", steps=30), []
    for growth in (1, 1, 50):
        spec = replace(small, tables=tuple(replace(t, rows=growth * t.rows) for t in TABLES))
        object.__setattr__(spec, "batch", small.batch)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(world.device)
        before = torch.cuda.memory_allocated(world.device)
        found = run_mode(world, spec, CachedSettings("data", (2000,), 4, 1))
        peaks.append(torch.cuda.max_memory_allocated(world.device) - before)
        slots = 2000 * (64 + 128) * 4
        assert slots < peaks[-1]
        summary = found.summary
        assert summary["peak_device_bytes"] >= summary["embedding_device_bytes"] >= slots
    assert peaks[2] <= 1.01 * peaks[1]
