"""Rows that move beside the steps: streams that are left, flushed, slow, or fail on one rank."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from oracle import OPTIMIZERS
from placement_cases import TABLES
from ranks import run_ranks
from scenarios import Scenario, run_mode

from distcache.comm.world import World, close_world, open_world
from distcache.parallel.cached import CachedParallel, CachedSettings

SHAKE_MS = 3.0


def case(optimizer: str = "adam", **changes: object) -> Scenario:
    """Weighted bags of four tables, a short last batch; `changes` of it."""
    spec, lr = OPTIMIZERS[optimizer]
    return replace(Scenario(TABLES, spec, lr, steps=20, weighted=True, last_batch=5), **changes)


def cached(lookahead: int, prefetch: int, **changes: object) -> CachedSettings:
    """Mode `data` with few rows in the cache, every plan checked."""
    return CachedSettings("data", (216, 12), lookahead, prefetch, validate=True, **changes)


@pytest.fixture(scope="module")
def world():
    world = open_world("cpu", "gloo", 60)
    yield world
    close_world(world)


def make(world: World, chosen: CachedSettings, run: Scenario | None = None) -> CachedParallel:
    run = run or case("sgd")
    mode = CachedParallel(world, run.tables, run.features, run.model(), run.optimizer, chosen)
    mode.set_lr(run.lr, run.lr)
    return mode


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("distcache-")]


def test_a_stream_that_is_left_early_goes_on_later(world: World) -> None:
    """Rows that moved ahead of the last step stay cached; the next stream has the same bits."""
    run = case("adagrad")
    whole = run_mode(world, run, cached(2, 3, schedule="serial"))
    mode = make(world, cached(2, 3, shake_ms=SHAKE_MS), run)
    losses: list[float] = []
    for stop in (3, 4, 11, 20):
        stream = mode.stream(run.batch(s) for s in range(len(losses), run.steps))
        for step in stream:
            losses.append(mode.train_step(step).loss)
            if len(losses) == stop:
                break
        stream.close()
        assert not threads()
        mode.flush()
    assert losses == whole.losses
    for index, spec in enumerate(run.tables):
        found = mode.table_block(index, 0, spec.rows).numpy()
        assert np.array_equal(found, whole.tables[spec.name])
    mode.close()


def test_a_flush_in_the_middle_of_a_stream_changes_nothing(world: World) -> None:
    run = case("adam")
    whole = run_mode(world, run, cached(2, 3, schedule="serial"))
    mode = make(world, cached(2, 3, shake_ms=SHAKE_MS), run)
    losses = []
    for step in mode.stream(run.batch(s) for s in range(run.steps)):
        losses.append(mode.train_step(step).loss)
        if step.batch.index % 4 == 1:
            mode.flush()
    assert losses == whole.losses
    mode.flush()
    found = mode.table_block(0, 0, 300).numpy()
    assert np.array_equal(found, whole.tables["a"])
    mode.close()


@pytest.mark.parametrize("stage", ["write_back", "gather", "fill"])
def test_a_movement_that_fails_names_its_stage_and_step(world: World, stage: str) -> None:
    mode = make(world, CachedSettings("data", (180, 8), 3, 2))
    rows, run = mode.rows[0], case("sgd")
    body, calls = getattr(rows, stage), []

    def failing(*arguments):
        calls.append(1)
        if len(calls) == 5:
            raise MemoryError("no room")
        return body(*arguments)

    setattr(rows, stage, failing)
    began = time.monotonic()
    with pytest.raises(MemoryError, match="no room") as caught:
        for step in mode.stream(run.batch(s) for s in range(20)):
            mode.train_step(step)
    assert caught.value.__notes__ == [f"in stage {stage} of step 4"]
    assert time.monotonic() - began < 20 and mode.tables.failed and not threads()
    mode.close()


def broken_movement(rank: int, size: int) -> tuple[str, float]:
    """Rank 1's movement fails; what every rank raises, and after how long."""
    world = open_world("cpu", "gloo", 60)
    mode = make(world, cached(3, 2))
    run, body, calls = case("sgd"), mode.rows[0].gather, []

    def failing(*arguments):
        calls.append(1)
        if rank == 1 and len(calls) == 6:
            raise MemoryError("no room")
        return body(*arguments)

    mode.rows[0].gather = failing
    began, text = time.monotonic(), ""
    try:
        for step in mode.stream(run.batch(s, rank, size) for s in range(20)):
            mode.train_step(step)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    took = time.monotonic() - began
    mode.close()
    close_world(world, orderly=False)
    return text, took


def test_the_other_ranks_hear_of_a_movement_that_fails() -> None:
    (other, took), (own, _) = run_ranks(broken_movement, 2)
    assert own == "MemoryError: no room"
    assert "rank 1 failed: MemoryError: no room (in stage gather of step 5)" in other
    assert took < 30


def blocked_source(rank: int, size: int) -> tuple[str, float, bool]:
    """Rank 1's model fails while rank 0's data do not come; what each raises, and when."""
    world = open_world("cpu", "gloo", 60)
    mode = make(world, cached(1, 1))
    run, never = case("sgd"), threading.Event()

    def batches():
        for step in range(20):
            if rank == 0 and step == 6:
                never.wait(40)
            yield run.batch(step, rank, size)

    def failing(*arguments):
        raise MemoryError("no room")

    began, text = time.monotonic(), ""
    try:
        for step in mode.stream(batches()):
            if rank == 1 and step.batch.index == 2:
                mode.dense.start_sum = failing
            mode.train_step(step)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    took = time.monotonic() - began
    never.set()
    mode.close()
    close_world(world, orderly=False)
    return text, took, mode.tables.failed


def test_a_rank_whose_data_do_not_come_hears_of_a_failure() -> None:
    (other, took, failed), (own, _, _) = run_ranks(blocked_source, 2)
    assert own == "MemoryError: no room" and failed
    assert other.startswith("PeerError: stopped because rank 1 failed: MemoryError: no room")
    assert took < 25


def test_queues_stay_short_however_slow_training_is(world: World) -> None:
    read: list[int] = []
    run = case("sgd")

    def batches():
        for step in range(20):
            read.append(step)
            yield run.batch(step)

    mode = make(world, cached(1, 2))
    stream = mode.stream(batches())
    for step in stream:
        time.sleep(0.05)
        mode.train_step(step)
        # P + L steps ahead, the depth of the queue, and one in each thread's hand.
        assert len(read) <= step.batch.index + 1 + 1 + 2 + 2 + 3
    assert len(read) == 20
    mode.close()
