"""Rows that move beside the steps: the bits of one stage after the other, under random delays."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies
from oracle import OPTIMIZERS
from ranks import run_ranks
from scenarios import Outcome, Scenario, run_mode, table

from distcache.comm.world import World, close_world, open_world
from distcache.errors import DataError
from distcache.parallel.cached import CachedParallel
from distcache.parallel.cached_parts import CachedSettings
from distcache.store.direct import ACCESS

TABLES = (table("a", 300), table("b", 40, features=2), table("c", 7, dim=4), table("d", 1))
SHAKE_MS = 3.0
CORNERS = ((0, 0), (0, 8), (64, 0), (64, 8), (1, 1), (8, 1))


@pytest.fixture(scope="module")
def world():
    world = open_world("cpu", "gloo", 60)
    yield world
    close_world(world)


def case(optimizer: str = "adam", **changes: object) -> Scenario:
    spec, lr = OPTIMIZERS[optimizer]
    return replace(Scenario(TABLES, spec, lr, steps=20, weighted=True, last_batch=5), **changes)


def cached(lookahead: int, prefetch: int, **changes: object) -> CachedSettings:
    return CachedSettings("data", (216, 12), lookahead, prefetch, validate=True, **changes)


def same(one: Outcome, other: Outcome) -> None:
    """Bits, and every count that says what was moved."""
    assert one.losses == other.losses and one.state_digest == other.state_digest
    assert np.array_equal(one.cached, other.cached)
    for key in ("rows_fetched", "rows_written_back", "hit_rate", "collective_bytes"):
        assert one.summary[key] == other.summary[key], key


@settings(max_examples=12, deadline=None)
@given(
    lookahead=strategies.integers(0, 64),
    prefetch=strategies.integers(0, 8),
    optimizer=strategies.sampled_from(sorted(OPTIMIZERS)),
    evals=strategies.sampled_from((0, 3)),
    access=strategies.sampled_from(ACCESS),
)
@example(0, 0, "adam", 3, "staged")
@example(0, 8, "adagrad", 0, "zero_copy")
@example(64, 8, "sgd", 0, "zero_copy")
def test_overlapped_has_the_bits_of_serial(
    world, lookahead, prefetch, optimizer, evals, access
) -> None:
    chosen = cached(lookahead, prefetch, schedule="serial")
    serial = run_mode(world, case(optimizer), chosen, evals)
    shaken = replace(chosen, schedule="overlapped", shake_ms=SHAKE_MS, access=access)
    same(run_mode(world, case(optimizer), shaken, evals), serial)


def test_a_prefetch_that_moves_early_hides_movement(world: World) -> None:
    large = replace(case("sgd"), global_batch=200, steps=30)
    loose = CachedSettings("data", (320, 8), 4, 2)
    found = run_mode(world, large, loose).summary
    hidden, taken = found["stage_hidden_ms"], found["stage_ms"]
    assert {"ingest", "load", "plan", "write_back", "gather", "fill"} == set(hidden)
    assert all(0 <= hidden[name] <= taken[name] for name in hidden)
    assert "forward_backward" in taken and "wait" in taken
    serial = run_mode(world, large, replace(loose, schedule="serial")).summary
    assert "gather" not in serial["stage_hidden_ms"] and "plan" in serial["stage_hidden_ms"]


@pytest.mark.parametrize("mode", ["data", "host", "resident"])
def test_rows_read_in_place_have_the_bits_and_counts_of_staged_ones(world: World, mode) -> None:
    chosen = replace(cached(2, 1), mode=mode)
    staged = run_mode(world, case("adam"), chosen, 3)
    same(run_mode(world, case("adam"), replace(chosen, access="zero_copy"), 3), staged)


def shaken_ranks(rank: int, size: int, optimizer: str, ahead, evals: int) -> list[Outcome]:
    world = open_world("cpu", "gloo", 60)
    chosen = [cached(*pair, schedule="serial") for pair in ahead]
    chosen += [cached(*pair, shake_ms=SHAKE_MS) for pair in ahead]
    chosen += [CachedSettings("resident", schedule="serial")]
    found = [run_mode(world, case(optimizer), each, evals) for each in chosen]
    close_world(world)
    return found


def check_ranks(size: int, optimizer: str, ahead, evals: int) -> None:
    by_rank = run_ranks(shaken_ranks, size, optimizer, ahead, evals, timeout=500)
    for outcomes in by_rank:
        serial, shaken = outcomes[: len(ahead)], outcomes[len(ahead) : -1]
        for one, other in zip(serial, shaken, strict=True):
            same(other, one)
            assert one.losses == outcomes[-1].losses
            assert one.state_digest == outcomes[-1].state_digest


@pytest.mark.parametrize("size", [2, 3])
def test_overlapped_has_the_bits_of_serial_on_ranks(size: int) -> None:
    check_ranks(size, "rowwise_adagrad", ((3, 2), (0, 0), (1, 5)), 4)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_grid_of_windows_under_delays(size: int, optimizer: str) -> None:
    drawn = np.random.default_rng([size, *optimizer.encode()])
    ahead = (*CORNERS, *((int(drawn.integers(65)), int(drawn.integers(9))) for _ in range(6)))
    check_ranks(size, optimizer, ahead, 3)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_grid_of_windows_under_delays_at_one_rank(world: World, optimizer: str) -> None:
    drawn = np.random.default_rng([1, *optimizer.encode()])
    ahead = (*CORNERS, *((int(drawn.integers(65)), int(drawn.integers(9))) for _ in range(40)))
    resident = run_mode(world, case(optimizer), CachedSettings("resident", schedule="serial"))
    for pair in ahead:
        shaken = run_mode(world, case(optimizer), cached(*pair, shake_ms=SHAKE_MS))
        same(shaken, run_mode(world, case(optimizer), cached(*pair, schedule="serial")))
        assert shaken.state_digest == resident.state_digest


# --- ends -------------------------------------------------------------------------------------


def make(world: World, chosen: CachedSettings) -> CachedParallel:
    run = case("sgd")
    mode = CachedParallel(world, run.tables, run.features, run.model(), run.optimizer, chosen)
    mode.set_lr(0.1, 0.1)
    return mode


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("distcache-")]


def test_a_stream_that_is_left_early_goes_on_later(world: World) -> None:
    """Rows that moved ahead of the last step stay cached; the next stream has the same bits."""
    run = case("adagrad")
    whole = run_mode(world, run, cached(2, 3, schedule="serial"))
    mode = make_like(world, run, cached(2, 3, shake_ms=SHAKE_MS))
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


def make_like(world: World, run: Scenario, chosen: CachedSettings) -> CachedParallel:
    mode = CachedParallel(world, run.tables, run.features, run.model(), run.optimizer, chosen)
    mode.set_lr(run.lr, run.lr)
    return mode


def test_a_flush_in_the_middle_of_a_stream_changes_nothing(world: World) -> None:
    run = case("adam")
    whole = run_mode(world, run, cached(2, 3, schedule="serial"))
    mode = make_like(world, run, cached(2, 3, shake_ms=SHAKE_MS))
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


def test_bad_data_is_raised_after_all_steps_before_it(world: World) -> None:
    mode = make(world, cached(3, 2))
    run = case("sgd")

    def batches():
        yield from (run.batch(s) for s in range(7))
        raise DataError("line 8 is bad")

    done = 0
    with pytest.raises(DataError, match="line 8 is bad"):
        for step in mode.stream(batches()):
            mode.train_step(step)
            done += 1
    assert done == 7 and not mode.feed.failed and not threads()
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
    assert time.monotonic() - began < 20 and mode.feed.failed and not threads()
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
                mode.step.dense.start_sum = failing
            mode.train_step(step)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    took = time.monotonic() - began
    never.set()
    mode.close()
    close_world(world, orderly=False)
    return text, took, mode.feed.failed


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
