"""Streams of steps: what planners say to one another; ends, stops and errors, drawn ones too, at
which all ranks do the same after the same step and can go on; rows that move beside the steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from placement_cases import KINDS, TABLES, placement_of
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
from ranks import Job, run_ranks
from scenarios import OPTIMIZERS, Scenario, make_mode, run_mode

from distcache.comm.world import World, close_world, open_world
from distcache.data.batch import Batch
from distcache.engine.exchange import Part, Status
from distcache.errors import PeerError
from distcache.parallel.cached import CachedSettings
from distcache.planner.victims import Policy

WINDOWS = [(0, 0), (2, 1), (8, 0), (0, 8), (8, 8)]
WORLD, STEPS = 3, 6


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


def spoken(rank: int, size: int, lookahead: int) -> list[str]:
    """What the planners' collectives of a short run were for."""
    world = open_world("cpu", "gloo", 60)
    mode = make(world, lookahead=lookahead)
    link, said = mode.tables.planner.link, []
    start = link.start_all_to_all

    def counted(tensor, send, receive, category, what):
        said.append(what)
        return start(tensor, send, receive, category, what)

    link.start_all_to_all = counted
    train(mode, batches(world, range(STEPS)))
    mode.close()
    close_world(world)
    return said


def test_rows_and_decisions_travel_together() -> None:
    both = [f"{what} of step {step}" for step in range(STEPS) for what in ("header", "plans")]
    # Step 3 is decided with the word that there is no step 6; the last two when that is known.
    end = ["header of step 6", "plans of step 3"]
    rest = [f"{what} of step {step}" for step in (4, 5) for what in ("header", "plans")]
    assert run_ranks(spoken, 2, 2) == [both + end + rest] * 2


def test_without_a_window_each_step_is_decided_before_the_next_is_asked_for() -> None:
    words = ("header", "plans") * 2
    own = [f"{what} of step {step}" for step in range(STEPS) for what in words]
    assert run_ranks(spoken, 2, 0) == [[*own, f"header of step {STEPS}"]] * 2


@pytest.mark.parametrize(("lookahead", "beyond"), [(0, 0), (1, 2), (3, 4)])
def test_how_far_the_batches_are_read(world: World, lookahead: int, beyond: int) -> None:
    """Through step + L, which the decision depends on, and one more that carries it to all."""
    mode, read = make(world, lookahead=lookahead), []

    def source():
        for batch in batches(world, range(STEPS)):
            read.append(batch.index)
            yield batch

    for step, planned in enumerate(mode.tables.planner.planned(source(), lambda: False)):
        assert planned.step == step == planned.batch.index
        assert read[-1] == min(step + beyond, STEPS - 1)
    assert read == list(range(STEPS))
    mode.close()


def talks(rank: int, size: int, case: str) -> tuple[str, bool, bool]:
    """One exchange in which ranks say different things: the error, if the ranks are not at the
    same point; else the verdict on what is asked, and whether anything is decided."""
    world = open_world("cpu", "gloo", 60)
    mode = make(world)
    asking, deciding = SAID[case](rank)
    told, error = None, ""
    if case == "other digests":
        mode.tables.planner._exchange._digest += rank
    try:
        told = mode.tables.planner._exchange.exchange(asking, deciding)
    except PeerError as caught:
        error = str(caught)
    mode.close()
    close_world(world, orderly=False)
    if told is None:
        return error, False, False
    return f"{told.asked.status.name}: {told.asked.message}", bool(told.named), bool(told.decided)


def failed(rank: int, step: int = 3) -> Part:
    """Rank 0 has no batch; rank 1 has none either, but stops."""
    if rank == 0:
        return Part(step, Status.ERROR, error=OSError("no batch"))
    return Part(step, Status.STOP)


SAID = {
    "one fails, one stops": lambda rank: (
        failed(rank),
        Part(0, Status.STOP if rank else Status.OK),
    ),
    "all stop": lambda rank: (Part(3, Status.STOP), Part(0, Status.STOP)),
    "other digests": lambda rank: (None, Part(0)),
    "at different steps": lambda rank: (failed(0, 3 + rank), None),
}


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("one fails, one stops", ("ERROR: OSError: no batch", False, False)),
        ("all stop", ("STOP: ", False, False)),
    ],
)
def test_nothing_is_delivered_once_a_rank_stops(case: str, expected: tuple) -> None:
    assert run_ranks(talks, 2, case) == [expected] * 2


def test_what_went_wrong_is_told_where_the_ranks_differ_too() -> None:
    for error, *_ in run_ranks(talks, 2, "at different steps"):
        assert "plans step 4 (error)" in error or "plans step 3 (error)" in error
        assert error.endswith("; rank 0 failed: OSError: no batch")


def test_decisions_that_differ_are_noticed() -> None:
    for error, *_ in run_ranks(talks, 2, "other digests"):
        assert "the ranks run different configurations" in error
        assert error.count("the decisions of step 0 with digest") == 2


NEVER = 99


class Plan:
    """What happens in one run, the same on all ranks: drawn from a seed."""

    def __init__(self, seed: int, world: int) -> None:
        rng = np.random.default_rng(seed)
        self.mode = str(rng.choice(["data", "data", "data", "host", "resident"]))
        self.policy = str(rng.choice(["lookahead", "lookahead", "lru", "lfu"]))
        self.lookahead, self.prefetch = int(rng.choice([0, 1, 3, 9])), int(rng.choice([0, 1, 3, 9]))
        self.lengths = rng.integers(0, STEPS + 1, world) if rng.random() < 0.4 else [STEPS] * world
        self.stop = int(rng.integers(0, STEPS)) if rng.random() < 0.5 else NEVER
        self.fail = int(rng.integers(0, STEPS)) if rng.random() < 0.4 else NEVER
        self.stopping, self.failing = (int(rank) for rank in rng.integers(0, world, 2))
        self.pauses = rng.choice([0.0, 0.0, 0.0, 0.02], (world, 2))
        self.kind = ""  # every other plan is of a placement
        if seed % 2:
            self.mode, self.kind = "data", KINDS[seed // 2 % len(KINDS)]

    @property
    def steps(self) -> int:
        """How many steps are trained."""
        return min(*self.lengths, self.fails, self.stop + 1, STEPS)

    @property
    def fails(self) -> int:
        """The step whose batch cannot be read (`NEVER`: the failing rank ends before it)."""
        return self.fail if self.fail < self.lengths[self.failing] else NEVER

    @property
    def raises(self) -> bool:
        """Whether all ranks raise; a stop or an end before the failing step comes first."""
        return self.fails == self.steps and self.stop + 1 > self.fails


def one(world: World, plan: Plan) -> tuple:
    how = {"mode": plan.mode, "policy": Policy(plan.policy)}
    if plan.kind:
        how |= {"placement": placement_of(plan.kind, CASE), "slots": (48, 12)}
    mode = make(world, plan.lookahead, plan.prefetch, **how)
    read_pause, step_pause = plan.pauses[world.rank]
    losses, error = [], ""

    def source() -> Iterator[Batch]:
        fail_at = plan.fails if world.rank == plan.failing else None
        steps = range(plan.lengths[world.rank])
        yield from batches(world, steps, fail_at=fail_at, pause=read_pause)

    try:
        for step in mode.stream(source()):
            wish = step.batch.index == plan.stop and world.rank == plan.stopping
            result = mode.train_step(step, stop=wish)
            losses.append(result.loss)
            time.sleep(step_pause)
            if result.stop:
                break
    except Exception as caught:
        error = type(caught).__name__
    first, threads = len(losses), planner_threads()
    for step in mode.stream(batches(world, range(first, STEPS))):
        losses.append(mode.train_step(step).loss)
    end = state(mode)
    mode.close()
    return first, threads, error, losses, end


def play(rank: int, size: int, seeds: range) -> dict:
    world = open_world("cpu", "gloo", 60)
    seen = {seed: one(world, Plan(seed, size)) for seed in seeds}
    close_world(world)
    return seen


def check(world: int, seeds: range) -> None:
    ends = Job(play, world, seeds).ends(60 + 10 * len(seeds))
    assert all(isinstance(end.value, dict) for end in ends), ends
    whole = {(tuple(losses), end) for seen in ends for *_, losses, end in seen.value.values()}
    assert len(whole) == 1
    for rank, seen in enumerate(ends):
        for seed, (first, threads, error, losses, _) in seen.value.items():
            plan = Plan(seed, world)
            assert (first, threads, len(losses)) == (plan.steps, 0, STEPS), (rank, seed)
            expected = "OSError" if rank == plan.failing else "PeerError"
            assert error == (expected if plan.raises else ""), (rank, seed)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_random_streams(world: int) -> None:
    check(world, range(8))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_many_random_streams(world: int) -> None:
    check(world, range(100, 180))


def test_the_plans_are_of_all_kinds() -> None:
    plans = [Plan(seed, 3) for seed in range(8)]
    assert any(plan.raises for plan in plans) and any(plan.stop < NEVER for plan in plans)
    assert len({plan.steps for plan in plans}) >= 3
    assert len({plan.kind for plan in plans}) == len(KINDS) + 1
    assert len({plan.mode for plan in plans}) == 3


SHAKE_MS = 3.0


def case(optimizer: str = "adam", **changes: object) -> Scenario:
    """Weighted bags of four tables, a short last batch; `changes` of it."""
    spec, lr = OPTIMIZERS[optimizer]
    return replace(Scenario(TABLES, spec, lr, steps=20, weighted=True, last_batch=5), **changes)


def cached(lookahead: int, prefetch: int, **changes: object) -> CachedSettings:
    """Mode `data` with few rows in the cache, every plan checked."""
    return CachedSettings("data", (216, 12), lookahead, prefetch, validate=True, **changes)


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("distcache-")]


def test_a_flush_in_the_middle_of_a_stream_changes_nothing(world: World) -> None:
    run = case("adam")
    whole = run_mode(world, run, cached(2, 3, schedule="serial"))
    mode = make_mode(world, run, cached(2, 3, shake_ms=SHAKE_MS))
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
    mode = make_mode(world, case("sgd"), CachedSettings("data", (180, 8), 3, 2))
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


def test_queues_stay_short_however_slow_training_is(world: World) -> None:
    read: list[int] = []
    run = case("sgd")

    def batches():
        for step in range(20):
            read.append(step)
            yield run.batch(step)

    mode = make_mode(world, case("sgd"), cached(1, 2))
    stream = mode.stream(batches())
    for step in stream:
        time.sleep(0.05)
        mode.train_step(step)
        # P + L steps ahead, the depth of the queue, and one in each thread's hand.
        assert len(read) <= step.batch.index + 1 + 1 + 2 + 2 + 3
    assert len(read) == 20
    mode.close()
