"""Ends, stops and errors of streams: all ranks do the same after the same step, and can go on."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from ends import Job
from protocol_cases import (
    CASE,
    batches,
    caught,
    make,
    planner_threads,
    state,
    train,
    warnings,
)

from distcache.comm.world import World, close_world, open_world

WINDOWS = [(0, 0), (2, 1), (8, 0), (0, 8), (8, 8)]
WORLD = 3


def ends(world: World) -> dict:
    """Iterators of different lengths, also mixed with evaluation."""
    seen = {}
    for name, lengths, evals in (
        ("first", (2, 4, 6), False),
        ("last", (5, 4, 3), False),
        ("empty", (4, 0, 4), False),
        ("evals", (6, 2, 6), True),
    ):
        for lookahead, prefetch in ((0, 0), (8, 2)) if name == "first" else ((2, 1),):
            mode = make(world, lookahead, prefetch)
            with warnings() as lines:
                losses = train(mode, batches(world, range(lengths[world.rank]), evals=evals))
            seen[name, lookahead] = len(losses), lines, planner_threads()
            mode.close()
    return seen


def stops(world: World) -> dict:
    """A stop asked by one rank; then a second stream of the same mode goes on."""
    seen = {}
    whole = make(world)
    losses = train(whole, batches(world, range(6)))
    seen["whole"] = losses, state(whole)
    whole.close()
    cases = [("data", *window) for window in WINDOWS]
    for mode_name, lookahead, prefetch in [*cases, ("host", 2, 1), ("resident", 2, 1)]:
        mode = make(world, lookahead, prefetch, mode=mode_name)
        slow = world.rank == (lookahead + prefetch) % WORLD
        losses = train(
            mode,
            batches(world, range(6), pause=0.05 * (slow and prefetch == 0)),
            stop_at=2 if world.rank == 1 else None,
            pause=0.05 * (slow and prefetch > 0),
        )
        first = len(losses), planner_threads()
        losses += train(mode, batches(world, range(3, 6)))
        seen[mode_name, lookahead, prefetch] = first, losses, state(mode)
        mode.close()
    return seen


def errors(world: World) -> dict:
    """A batch that one rank cannot read: nobody goes on alone, and all may flush and go on."""
    seen = {}
    for lookahead, prefetch in WINDOWS:
        mode, losses = make(world, lookahead, prefetch), []
        source = batches(world, range(6), fail_at=3 if world.rank == 1 else None)

        def go(mode=mode, losses=losses, source=source) -> None:
            for step in mode.stream(source):
                losses.append(mode.train_step(step).loss)

        began = time.monotonic()
        error = caught(go)
        took, count = time.monotonic() - began, len(losses)
        middle = state(mode)
        losses += train(mode, batches(world, range(3, 6)))
        seen[lookahead, prefetch] = error, took, count, middle, losses, state(mode)
        mode.close()
    short = make(world)
    train(short, batches(world, range(3)))
    seen["three"] = state(short)
    short.close()
    return seen


def misuse(world: World) -> dict:
    """What a caller may get wrong, on all ranks alike."""
    seen = {}
    mode = make(world)
    stream = mode.stream(batches(world, range(6)))
    first = next(stream)
    seen["two at once"] = caught(lambda: next(mode.stream(batches(world, range(6)))))
    mode.train_step(first)
    seen["twice"] = caught(lambda: mode.train_step(first))
    next(stream)
    seen["skipped"] = caught(lambda: next(stream))
    seen["threads"] = planner_threads()
    losses = train(mode, batches(world, range(1, 6)))
    seen["then"] = len(losses), state(mode)
    stream = mode.stream(batches(world, range(6)))
    next(stream)
    mode.close()
    seen["closed"] = planner_threads()
    stream.close()
    mode = make(world)
    kind = "eval" if world.rank == 2 else "train"
    odd = (CASE.batch(step, world.rank, world.size, kind) for step in range(3))
    seen["kinds"] = caught(lambda: train(mode, odd))
    mode.close()
    mode = make(world)
    swapped = (
        replace(b, ids=replace(b.ids, features=b.ids.features[::-1]))
        for b in batches(world, range(2))
    )
    seen["features"] = caught(
        lambda: train(mode, swapped if world.rank == 0 else batches(world, range(2)))
    )
    mode.close()
    return seen


def settings(world: World) -> dict:
    """Ranks that were given different settings."""
    seen, odd = {}, world.rank == 2
    wider = tuple(replace(t, rows=t.rows + odd) for t in CASE.tables)
    for name, changes in {
        "lookahead": {"lookahead": 5 if odd else 4},
        "slots": {"slots": (51, 6) if odd else (48, 6)},
        "fingerprint": {"fingerprint": int(odd)},
        "table": {"tables": wider},
    }.items():
        seen[name] = caught(lambda changes=changes: make(world, **changes))
    return seen


PARTS = (ends, stops, errors, misuse, settings)


def run(rank: int, size: int) -> dict:
    world = open_world("cpu", "gloo", 60)
    seen = {part.__name__: part(world) for part in PARTS}
    close_world(world)
    return seen


@pytest.fixture(scope="module")
def seen() -> list[dict]:
    """What every rank saw in each part."""
    ends = Job(run, WORLD).ends(200)
    assert all(isinstance(end.value, dict) for end in ends), ends
    return [end.value for end in ends]


def part(seen: list[dict], name: str) -> list[dict]:
    return [rank[name] for rank in seen]


def test_streams_end_at_the_first_end_and_say_whose(seen: list[dict]) -> None:
    shortest = {"first": ("rank 0", 2), "last": ("rank 2", 3), "empty": ("rank 1", 0)}
    shortest["evals"] = ("rank 1", 4)
    for rank, found in enumerate(part(seen, "ends")):
        for (name, lookahead), (steps, lines, threads) in found.items():
            who, count = shortest[name]
            assert steps == (2 if name == "evals" else count), (rank, name, lookahead)
            assert threads == 0
            if f"rank {rank}" == who:
                assert not lines
            else:
                assert len(lines) == 1 and f"{who} ended after {count} batches" in lines[0]


def test_a_stop_is_after_the_same_step_and_the_next_stream_goes_on(seen: list[dict]) -> None:
    whole = seen[0]["stops"]["whole"]
    for found in part(seen, "stops"):
        assert found["whole"] == whole
        stopped = {case: value for case, value in found.items() if case != "whole"}
        assert len(stopped) == len(WINDOWS) + 2
        for case, (first, losses, end) in stopped.items():
            assert first == (3, 0), case
            assert (losses, end) == whole, case


def test_a_data_error_is_raised_by_all_after_the_same_step(seen: list[dict]) -> None:
    for rank, found in enumerate(part(seen, "errors")):
        three = found["three"]
        finals = set()
        for window in WINDOWS:
            error, took, count, middle, losses, end = found[window]
            if rank == 1:
                assert error == "OSError: no batch 3 for rank 1"
            else:
                text = "stopped because rank 1 failed: OSError: no batch 3 for rank 1"
                assert error == f"PeerError: {text}"
            assert took < 30
            assert count == 3 and len(losses) == 6, window
            assert middle == three, window
            finals.add((end, *losses))
        assert len(finals) == 1


def test_misuse_is_refused(seen: list[dict]) -> None:
    for rank, found in enumerate(part(seen, "misuse")):
        assert "another stream of this model is open" in found["two at once"]
        assert "step 0 is not due" in found["twice"]
        assert "step 1 of the stream was not run" in found["skipped"]
        assert found["threads"] == 0 and found["closed"] == 0
        assert found["then"] == (5, found["then"][1])
        assert found["kinds"].startswith("PeerError: rank ")
        assert "(eval batch 0)" in found["kinds"] and "(train batch 0)" in found["kinds"]
        who = "DataError" if rank == 0 else "PeerError: stopped because rank 0 failed"
        assert found["features"].startswith(who) and "has the features" in found["features"]


def test_different_settings_are_named_with_both_values(seen: list[dict]) -> None:
    for found in part(seen, "settings"):
        assert found["lookahead"].startswith("ConfigError: the ranks differ")
        assert "'lookahead' is 4 on ranks 0, 1 and 5 on rank 2" in found["lookahead"]
        assert "(48, 6) on ranks 0, 1 and (51, 6) on rank 2" in found["slots"]
        assert "'fingerprint' is 0 on ranks 0, 1 and 1 on rank 2" in found["fingerprint"]
        assert "rows=60" in found["table"] and "rows=61" in found["table"]
