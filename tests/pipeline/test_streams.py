"""Streams of steps: what planners say to one another; ends, stops and errors, drawn ones too, at
which all ranks do the same after the same step and can go on; rows that move beside the steps.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import timedelta

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
from torch import Tensor

from distcache.comm.world import World, close_world, open_world
from distcache.data.batch import Batch
from distcache.engine.exchange import ExchangeReply, Part, Status
from distcache.engine.pipeline import SWITCH_S, quick_switches
from distcache.engine.planning import Talk
from distcache.errors import PeerError
from distcache.parallel import cached as cached_modes
from distcache.parallel.cached import CachedSettings
from distcache.planner.victims import Policy

WORLD, STEPS = 3, 6


def misuse(world: World) -> dict:
    """What a caller may get wrong, on all ranks alike."""
    seen, mode = {}, make(world)
    stream = mode.stream(batches(world, range(6)))
    first = next(stream)
    seen["two at once"] = caught(lambda: next(mode.stream(batches(world, range(6)))))
    mode.train_step(first)
    seen["twice"] = caught(lambda: mode.train_step(first))
    next(stream)
    seen["skipped"] = caught(lambda: next(stream))
    seen["threads"] = planner_threads()
    seen["then"] = len(train(mode, batches(world, range(1, 6))))
    mode.tables.last_step += world.rank == 1
    seen["apart"] = caught(lambda: mode.tables.flush(6))
    mode.tables.last_step -= world.rank == 1
    stream = mode.stream(batches(world, range(6)))
    next(stream)
    mode.close()
    seen["threads"] += planner_threads()
    stream.close()
    odd = (CASE.batch(s, world.rank, world.size, ("train", "eval")[world.rank == 2]) for s in (0,))
    swapped = list(batches(world, range(2)))
    if world.rank == 0:
        swapped = [replace(b, ids=replace(b.ids, features=b.ids.features[::-1])) for b in swapped]
    for name, source in (("kinds", odd), ("features", iter(swapped))):
        mode = make(world)
        seen[name] = caught(lambda mode=mode, source=source: train(mode, source))
        mode.close()
    return seen


def alone(rank: int, size: int, action, *arguments: object, timeout_s: float = 60) -> object:
    """What `action` of the world and `arguments` gives, on each rank."""
    world = open_world("cpu", "gloo", timeout_s)
    found = action(world, *arguments)
    close_world(world, orderly=False)
    return found


def test_misuse_and_ranks_that_differ_are_refused() -> None:
    for rank, found in enumerate(run_ranks(alone, WORLD, misuse)):
        assert "another stream of this model is open" in found["two at once"]
        assert "step 0 is not due" in found["twice"]
        assert "step 1 of the stream was not run" in found["skipped"]
        assert (found["threads"], found["then"]) == (0, 5)
        assert found["apart"].startswith(
            "PeerError: the ranks have run different steps, so nothing"
        )
        assert "(rank 0: (5, 6), rank 1: (6, 6), rank 2: (5, 6))" in found["apart"]
        assert found["kinds"].startswith("PeerError: rank ")
        assert "(eval batch 0)" in found["kinds"] and "(train batch 0)" in found["kinds"]
        who = "DataError" if rank == 0 else "PeerError: stopped because rank 0 failed"
        assert found["features"].startswith(who) and "has the features" in found["features"]


def collectives(world: World) -> list[list[str]]:
    """Names of the planners' collectives in short runs, with a window and without."""
    runs = []
    for lookahead in (2, 0):
        mode = make(world, lookahead=lookahead)
        names: list[str] = []
        link = mode.tables.planner.link

        def named(*arguments, names=names, start=link.start_all_to_all):
            names.append(arguments[-1])
            return start(*arguments)

        link.start_all_to_all = named
        train(mode, batches(world, range(STEPS)))
        mode.close()
        runs.append(names)
    return runs


def test_rows_and_decisions_travel_together() -> None:
    """Two collectives each time. Without a window each step is decided before the next one is asked
    for; with one, decisions are sent while the rows of a later step are taken in."""

    def both(steps: Iterable[int]) -> list[str]:
        return [f"{part} of step {step}" for step in steps for part in ("headers", "plans")]

    # The decisions on step 2 travel with the end, in place of step 6; the last three after it.
    window = both([*range(STEPS + 1), *range(3, STEPS)])
    none = both([step for step in range(STEPS) for _ in range(2)])
    end = f"headers of step {STEPS}"  # with nothing to decide, and nothing to follow
    assert run_ranks(alone, 2, collectives) == [[window, [*none, end]]] * 2


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


def talks(world: World) -> dict[str, str | tuple]:
    """Exchanges in which ranks say different things: the error, if the ranks are not at the same
    point; else the verdict on what is asked, and whether anything is decided."""
    found = {}
    for case, parts in SAID.items():
        mode = make(world)
        exchange = mode.tables.planner._exchange
        exchange._digest += world.rank if case == "other digests" else 0
        try:
            told = exchange.exchange(*parts(world.rank))
            asked = f"{told.asked.status.name}: {told.asked.message}"
            found[case] = asked, bool(told.named), bool(told.decided)
        except PeerError as error:
            found[case] = str(error)
        mode.close()
    return found


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


def test_nothing_is_delivered_once_a_rank_stops_and_ranks_that_differ_are_told_why() -> None:
    for found in run_ranks(alone, 2, talks):
        assert found["one fails, one stops"] == ("ERROR: OSError: no batch", False, False)
        assert found["all stop"] == ("STOP: ", False, False)
        error = found["at different steps"]
        assert "plans step 4 (error)" in error or "plans step 3 (error)" in error
        assert error.endswith("; rank 0 failed: OSError: no batch")
        assert "the ranks run different configurations" in found["other digests"]
        assert found["other digests"].count("the decisions of step 0 with digest") == 2


def starts_of_movement(world: World) -> list[int]:
    """For each step, the step after which its rows may move."""
    mode = make(world, lookahead=3, prefetch=5)
    steps = batches(world, range(12))
    found = [step.move_after for step in mode.tables.planner.planned(steps, lambda: False)]
    mode.close()
    return found


def test_movement_waits_for_the_last_uses_of_the_victims_of_all_homes() -> None:
    """So all ranks move a step after the same one; with slots to spare it could be earlier."""
    first, other = run_ranks(alone, 2, starts_of_movement)
    assert first == other
    assert any(after > step - 6 for step, after in enumerate(first) if step >= 6)


def left(world: World) -> str:
    """How planning ends where rank 0 leaves its stream after a step, and rank 1 does not."""
    mode, made = make(world), []

    def go() -> None:
        planned = mode.tables.planner.planned
        for step in planned(batches(world, range(STEPS)), lambda: bool(made) and world.rank == 0):
            made.append(step)

    said = caught(go)
    mode.close()
    return said


def test_a_stream_that_one_rank_has_left_is_refused_on_the_others() -> None:
    first, other = run_ranks(alone, 2, left)
    assert first == ""
    assert other.startswith("PeerError: rank 0 stopped reading its stream after ")
    assert "but rank 1 goes on: stop all ranks after the same step" in other


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
        self.evals = bool(rng.random() < 0.3)
        self.kind = ""  # every other plan is of a placement
        if seed % 2:
            self.mode, self.kind = "data", KINDS[seed // 2 % len(KINDS)]
        self.threads = [1 + (seed // 2 + rank) % 3 for rank in range(world)]
        """Of each rank that plan."""

    @property
    def steps(self) -> int:
        """How many steps are trained."""
        return min(*self.lengths, self.fails, self.stop + 1, STEPS)

    @property
    def fails(self) -> int:
        """The step whose batch cannot be read (`NEVER`: the failing rank ends before it; or, where
        only its dense features cannot, some rank, so that nobody loads them)."""
        known = min(self.lengths) if self.fail % 2 else self.lengths[self.failing]
        return self.fail if self.fail < known else NEVER

    def warning(self, rank: int) -> list[str]:
        """What a rank is told whose data go on where those of others end."""
        who = [f"rank {r}" for r, length in enumerate(self.lengths) if length == self.steps]
        if self.raises or not who or self.lengths[rank] == self.steps:
            return []
        count = self.steps * (1 + self.evals)
        return [
            f"the data of {', '.join(who)} ended after {count} batches, this rank's did not: all "
            "ranks end there"
        ]

    @property
    def raises(self) -> bool:
        """Whether all ranks raise; a stop or an end before the failing step comes first."""
        return self.fails == self.steps and self.stop + 1 > self.fails


def one(world: World, plan: Plan) -> tuple:
    how = {
        "mode": plan.mode,
        "policy": Policy(plan.policy),
        "planner_threads": plan.threads[world.rank],
    }
    if plan.kind:
        how |= {"placement": placement_of(plan.kind, CASE), "slots": (48, 12)}
    mode = make(world, plan.lookahead, plan.prefetch, **how)
    read_pause, step_pause = plan.pauses[world.rank]
    fail_at = plan.fail if world.rank == plan.failing else None
    steps = range(plan.lengths[world.rank])
    source, losses = batches(world, steps, fail_at, plan.evals, read_pause), []

    def go() -> None:
        for step in mode.stream(source):
            if step.batch.kind == "eval":
                mode.eval_step(step)
                continue
            wish = step.batch.index == plan.stop and world.rank == plan.stopping
            result = mode.train_step(step, wish)
            losses.append(result.loss)
            time.sleep(step_pause)
            if result.stop:
                break

    with warnings() as lines:
        error = caught(go)
    ended = len(losses), planner_threads(), error, lines, state(mode)
    losses += train(mode, batches(world, range(len(losses), STEPS)))
    whole = (*losses, state(mode))
    mode.close()
    return *ended, whole


def play(world: World, seeds: range) -> dict:
    return {seed: one(world, Plan(seed, world.size)) for seed in seeds}


def check(world: int, seeds: range) -> None:
    """All ranks end after the same step, for the same reason, which they tell; they have what a
    run so long leaves, and go on as if nothing had been."""
    ends = Job(alone, world, play, seeds).ends(60 + 10 * len(seeds))
    assert all(isinstance(end.value, dict) for end in ends), ends
    middles: dict[int, set] = {}
    assert len({whole for seen in ends for *_, whole in seen.value.values()}) == 1
    for rank, seen in enumerate(ends):
        for seed, (first, threads, error, lines, middle, whole) in seen.value.items():
            plan, where = Plan(seed, world), (rank, seed)
            assert (first, threads, len(whole)) == (plan.steps, 0, STEPS + 1), where
            middles.setdefault(first, set()).add(middle)
            expected = f"OSError: no batch {plan.fail} for rank {plan.failing}"
            if rank != plan.failing:
                expected = f"PeerError: stopped because rank {plan.failing} failed: {expected}"
            assert error == (expected if plan.raises else ""), where
            late = plan.raises and plan.fail % 2
            if plan.stop >= plan.steps and not late:  # else planners may have read to the end
                assert lines == plan.warning(rank), where
    assert all(len(same) == 1 for same in middles.values())


@pytest.mark.parametrize("world", [1, 2, 3])
def test_random_streams(world: int) -> None:
    check(world, range(8))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_many_random_streams(world: int) -> None:
    check(world, range(100, 180))


class Watched:
    """Batches, and which threads read them; `reads`: how many have been asked for."""

    def __init__(self, source: Iterator[Batch], pause: float = 0.0) -> None:
        self._source, self._pause, self.reading = source, pause, threading.Lock()
        self.threads: set[str] = set()
        self.reads, self.more = 0, threading.Condition()

    def __iter__(self) -> Iterator[Batch]:
        self.threads.add(threading.current_thread().name)
        return self

    def __next__(self) -> Batch:
        assert self.reading.acquire(blocking=False), "two threads read at the same time"
        self.threads.add(threading.current_thread().name)
        with self.more:
            self.reads += 1
            self.more.notify_all()
        time.sleep(self._pause)
        try:
            return next(self._source)
        finally:
            self.reading.release()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_thread_beside_the_planner_reads_while_it_plans(world, count) -> None:
    """And always the same one; where the planner is alone, it reads."""
    mode = make(world, planner_threads=count)
    source, exchange = Watched(batches(world, range(STEPS))), mode.tables.planner._exchange
    plain, beside = exchange.exchange, []

    def exchanged(asking: Part | None, deciding: Part | None = None) -> ExchangeReply:
        if asking is not None and asking.context is not None:
            with source.more:  # until the batch after this one is being read
                more = source.more.wait_for(
                    lambda: source.reads > asking.step + 1, 30 if count > 1 else 0
                )
            beside.append(more)
        return plain(asking, deciding)

    exchange.exchange = exchanged
    losses = train(mode, source)
    assert beside == [count > 1] * STEPS and source.reads == STEPS + 1
    assert source.threads == {"distcache-part" if count > 1 else "distcache-planner"}
    mode.close()
    twin = make(world)
    assert losses == train(twin, batches(world, range(STEPS)))
    twin.close()


PATIENCE_S = 4.0
"""How long the ranks of `talk` wait for one another, seconds."""


def impatient(rank: int, size: int, action) -> object:
    """`alone` of ranks that wait no longer than `PATIENCE_S` for one another."""
    return alone(rank, size, action, timeout_s=PATIENCE_S)


def talk(world: World) -> tuple:
    """Of each step: whether the exchange after it had begun before its own rows were taken in; the
    threads that exchange; the losses. Rank 0 plans with two threads, rank 1 with one, and training
    stands still for longer than ranks wait for one another."""
    mode, more = make(world, planner_threads=2 - world.rank), threading.Condition()
    planner, begun, names, beside = mode.tables.planner, list[int](), set[str](), list[bool]()
    plain_exchange, plain_taking = planner._exchange.exchange, planner._taken_in

    def exchanged(asking: Part | None, deciding: Part | None) -> ExchangeReply:
        names.add(threading.current_thread().name)
        with more:
            begun.extend([asking.step] if asking else [])
            more.notify_all()
        return plain_exchange(asking, deciding)

    def taken_in(over: Talk, decide: bool) -> list:
        if over.asking is not None and over.asking.context is not None:
            following = over.asking.step + 1
            with more:
                beside.append(more.wait_for(lambda: following in begun, 30))
        return plain_taking(over, decide)

    planner._exchange.exchange, planner._taken_in = exchanged, taken_in
    pauses = {1: 1.5 * PATIENCE_S}
    steps = batches(world, range(STEPS))
    losses = train(mode, steps, at_step=lambda step: time.sleep(pauses.get(step, 0)))
    mode.close()
    return beside, names, losses


def test_a_thread_beside_the_planner_talks_while_it_plans() -> None:
    """On every rank, however many plan there: an exchange that has begun on one rank waits for
    nothing but the batches of the others."""
    one, other = run_ranks(impatient, 2, talk)
    assert one == other and one[:2] == ([True] * STEPS, {"distcache-talk"})


def fails_as_it_stops(world: World) -> tuple:
    """What planning says where, in one exchange, rank 0 stops, rank 1 has no batch, and rank 1
    could not decide the step that is due; and which steps were planned."""
    mode, stops, made = make(world, lookahead=1), [], []

    def source() -> Iterator[Batch]:
        for batch in batches(world, range(12)):
            if batch.index == 5:
                stops.append(world.rank == 0)
                raise OSError("no batch")
            bad = world.rank == 1 and batch.index == 2
            yield replace(batch, load=nothing_to_load) if bad else batch

    def go() -> None:
        for step in mode.tables.planner.planned(source(), lambda: any(stops)):
            made.append(step.step)

    said = caught(go)
    if world.rank == 0:
        world.store.set("said", "")
    else:  # rank 0, whose store it is, may end as soon as it has said so
        caught(lambda: world.store.wait(["said"], timedelta(seconds=20)))
    mode.close()
    return said, made


def nothing_to_load() -> Batch:
    raise OSError("no features")


def test_a_rank_that_stops_hears_that_another_could_not_decide() -> None:
    """While that one still lives, and would let it wait."""
    (first, made), (other, planned) = run_ranks(alone, 2, fails_as_it_stops)
    assert first == "PeerError: stopped because rank 1 failed: OSError: no features"
    assert other == "OSError: no features" and made == planned == [0, 1]


def read_on(world: World) -> tuple:
    """A stream that ends with another rank's data, and one that is left, while rank 0 reads."""
    mode, pause = make(world, planner_threads=2), 0.5 * (world.rank == 0)
    source = Watched(batches(world, range(4 if world.rank else 20)), pause)
    losses = train(mode, source)
    ended = planner_threads(), source.reading.locked()
    source = Watched(batches(world, range(4, 20)), pause)
    losses += train(mode, source, stop_at=5)
    ended += planner_threads(), source.reading.locked()
    losses += train(mode, batches(world, range(6, 8)))
    found = len(losses), ended, state(mode)
    mode.close()
    return found


def test_a_stream_has_ended_when_no_batch_is_being_read() -> None:
    one, other = run_ranks(alone, 2, read_on)
    assert one == other and one[:2] == (4 + 2 + 2, (0, False, 0, False))


def ended_elsewhere(world: World) -> tuple:
    """A stream that ends with the data of rank 0, while rank 1 waits for a batch that comes only
    once all steps are trained: how many they are, and whether it came then."""
    mode, may, came = make(world, planner_threads=2), threading.Event(), []

    def source() -> Iterator[Batch]:
        yield from batches(world, range(4 + world.rank))
        if world.rank:
            came.append(may.wait(30))

    steps = 0
    for step in mode.stream(source()):
        mode.train_step(step)
        steps += 1
        if steps == 4:
            may.set()
    mode.close()
    return steps, came


def test_the_end_of_another_ranks_data_waits_for_no_batch() -> None:
    assert run_ranks(alone, 2, ended_elsewhere) == [(4, []), (4, [True])]


def test_a_batch_that_does_not_come_holds_up_no_closing(world, monkeypatch) -> None:
    monkeypatch.setattr(cached_modes, "STOP_S", 0.5)
    mode = make(world, planner_threads=2)
    waits, may, closed = threading.Event(), threading.Event(), threading.Event()

    def source() -> Iterator[Batch]:
        yield from batches(world, range(6))
        waits.set()
        may.wait(60)

    with warnings() as lines:
        for step in mode.stream(source()):
            mode.train_step(step)
            if step.batch.index == 1:
                assert waits.wait(20)
                break
    assert "the planner did not end within 0.5 s" in lines[0]
    closing = threading.Thread(target=lambda: (mode.close(), closed.set()))
    closing.start()
    assert closed.wait(20)
    may.set()
    closing.join()


def test_steps_are_let_go_of_whatever_the_schedule(world) -> None:
    for schedule in ("serial", "overlapped"):
        mode, contexts = make(world, schedule=schedule), []
        for step in mode.stream(batches(world, range(9))):
            mode.train_step(step)
            contexts.append(weakref.ref(step.context))
            if step.batch.index == 8:
                gc.collect()
                assert [context() is None for context in contexts[:2]] == [True, True], schedule
        del step
        assert not any(context() for context in contexts), (
            schedule
        )  # nobody waits for the collector
        mode.close()


def test_slots_that_changed_are_noted_once_though_no_row_leaves(world: World) -> None:
    run = case("adam")
    for settings in (CachedSettings("data", (4000, 4000), 3, 1), CachedSettings("resident")):
        mode = make_mode(world, run, settings)
        for step in mode.stream(run.batch(s) for s in range(run.steps)):
            mode.train_step(step)
        assert len(mode.rows[0].cache._changed) < 8, settings.mode
        mode.close()


def case(optimizer: str = "adam", **changes: object) -> Scenario:
    """Weighted bags of four tables, a short last batch; `changes` of it."""
    spec, lr = OPTIMIZERS[optimizer]
    return replace(Scenario(TABLES, spec, lr, steps=20, weighted=True, last_batch=5), **changes)


def cached(lookahead: int, prefetch: int, **changes: object) -> CachedSettings:
    """Mode `data` with few rows in the cache, every plan checked."""
    return CachedSettings("data", (216, 12), lookahead, prefetch, validate=True, **changes)


def test_a_flush_in_the_middle_of_a_stream_changes_nothing(world: World) -> None:
    run = case("adam")
    whole = run_mode(world, run, cached(2, 3, schedule="serial"))
    mode = make_mode(world, run, cached(2, 3))
    cache, dirty_slots = mode.rows[0].cache, mode.rows[0].cache.dirty_slots

    def behind() -> None:  # so that rows are on their way at any time
        time.sleep(3e-3 * (threading.current_thread().name == "distcache-movement"))

    def dirty() -> Tensor:
        held = cache.slot_row.copy()
        time.sleep(0.02)
        assert np.array_equal(held, cache.slot_row), "rows moved during a flush"
        return dirty_slots()

    mode.tables.delay_hook, cache.dirty_slots = behind, dirty
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


def held_up(world: World, prefetch: int) -> tuple[list[float], list[float], int]:
    """The losses of a run whose rows leave as late as they may, and come as early; those of one
    whose rows move between the steps; and how many rows have left."""
    mode, run = make_mode(world, case("adam"), cached(2, prefetch)), case("adam")
    mover, tables = mode.tables._mover, mode.tables
    synced, ready = [threading.Event() for _ in range(64)], [threading.Event() for _ in range(64)]
    prepare, issue, land, sync = mover.prepare, mover.issue, mover.land, tables.start_sum

    def prepared(context, *how) -> None:
        prepare(context, *how)
        ready[context.step].set()

    def issued(context, *how) -> None:
        assert context.gathered and context.lookups  # nothing to do but to enqueue
        issue(context, *how)

    def landed(context, *how) -> None:
        """Not before the exchange of the step whose opening has let it go."""
        before = context.step - max(prefetch, 1)
        assert before < 0 or synced[before].wait(30), "an exchange waits for what leaves"
        land(context, *how)

    def exchanged(context, *how):
        synced[context.step].set()
        return sync(context, *how)

    mover.prepare, mover.issue, mover.land, tables.start_sum = prepared, issued, landed, exchanged
    losses = []
    for step in mode.stream(run.batch(s, world.rank, world.size) for s in range(run.steps)):
        number = step.context.step
        if 0 < number < run.steps - prefetch:  # its rows may move once this step is opened
            assert ready[number + prefetch].wait(30), "what comes waits to be let go"
        losses.append(mode.train_step(step).loss)
    written = mode.summary()["rows_written_back"]
    mode.close()
    twin = make_mode(world, run, cached(2, prefetch, schedule="serial"))
    steps = twin.stream(run.batch(s, world.rank, world.size) for s in range(run.steps))
    serial = [twin.train_step(step).loss for step in steps]
    twin.close()
    return losses, serial, written


@pytest.mark.parametrize("prefetch", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_gradients_wait_for_no_rows_on_their_way_to_or_from_the_store(prefetch: int) -> None:
    """Only for the issue of the ranks' exchanges, of the movement that was let go."""
    for losses, serial, written in run_ranks(alone, 2, held_up, prefetch):
        assert losses == serial and written > 20


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


def test_the_last_thread_to_leave_restores_how_long_a_turn_is() -> None:
    before = sys.getswitchinterval()
    with quick_switches():
        with quick_switches():
            assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    assert sys.getswitchinterval() == before
    try:
        sys.setswitchinterval(1e-5)  # whoever wants even shorter turns keeps them
        with quick_switches():
            assert sys.getswitchinterval() == pytest.approx(1e-5)
    finally:
        sys.setswitchinterval(before)
