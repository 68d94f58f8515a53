"""Rows that move beside the steps: the bits of one stage after the other, under random delays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from drawing import examples
from hypothesis import example, given, strategies
from oracle import OPTIMIZERS
from overlap_cases import SHAKE_MS, cached, case
from ranks import run_ranks
from scenarios import Outcome, run_mode

from distcache.comm.world import World, close_world, open_world
from distcache.parallel.cached import CachedSettings
from distcache.store.rows import ACCESS

CORNERS = ((0, 0), (0, 8), (64, 0), (64, 8), (1, 1), (8, 1))


@pytest.fixture(scope="module")
def world():
    world = open_world("cpu", "gloo", 60)
    yield world
    close_world(world)


def same(one: Outcome, other: Outcome) -> None:
    """Bits, and every count that says what was moved."""
    assert one.losses == other.losses and one.state_digest == other.state_digest
    assert np.array_equal(one.cached, other.cached)
    for key in ("rows_fetched", "rows_written_back", "hit_rate", "collective_bytes"):
        assert one.summary[key] == other.summary[key], key


@examples(12)
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
    planning = {"ingest", "load", "plan", "plan_exchange"}
    assert planning | {"write_back", "gather", "fill"} == set(hidden)
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
