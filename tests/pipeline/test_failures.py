"""Ranks that raise, die or hang, wherever they are: the others name them within seconds, or within
the timeout, and nobody goes on or writes what is the state of no step.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from itertools import chain

import pytest
import torch.distributed as dist
from placement_cases import fitting_slots, placement_of
from protocol_cases import CASE, SLOTS, Raises, batches, caught, make, state, train
from ranks import End, Job
from scenarios import popularity_of

from distcache.comm.link import Link, run_on_all_ranks
from distcache.comm.rendezvous import cause_of
from distcache.comm.world import World, close_world, open_world
from distcache.parallel.cached import CachedParallel

LONG_S, TIMEOUT_S = 60.0, 6.0
"""Where the end of a rank is seen at once, and where nothing but the time limit tells of it."""
LAST_WORD = 77
"""Exit code of the rank that vanishes in an exchange of rows."""

NO_ROOM = "MemoryError: no room"
LONE = ("apply", "gather", "load", "no data", "warm start", "plan", "plan, serial", "decide")
LONE = dict.fromkeys(LONE, NO_ROOM) | {"model": "ValueError: the model fails in step 2"}
"""What fails on rank 1 alone, and its error."""

EXCHANGES = {
    "early rows": ("sharded", "overlapped"),
    "late rows": ("sharded", "overlapped"),
    "sharded row gradients": ("sharded", "overlapped"),
    "updated rows": ("home", "overlapped"),
    "row gradients": ("mixed home", "overlapped"),
    "row sums": ("mixed", "overlapped"),
    "fill": ("mixed", "overlapped"),
    "late rows, serial": ("mixed", "serial"),
    "early rows, hangs": ("mixed", "overlapped"),
}
"""The exchange in which rank 1 vanishes, and the placement and schedule of the run."""


def attempt(world: World, action, mode: CachedParallel | None = None) -> dict:
    """Run `action`; how it failed, the cause and how long it took. The rank ends as the command
    line does: it records the failure, then leaves."""
    began, error = time.monotonic(), None
    try:
        action()
    except Exception as caught_error:
        error = caught_error
    took = time.monotonic() - began
    said = "" if error is None else f"{type(error).__name__}: {error}"
    cause = cause_of(world.store, world.rank, error) if error is not None else None
    if mode is not None:
        mode.close()
    close_world(world, orderly=error is None)
    return {"error": said, "took": took, "cause": cause}


def fails_from(owner: object, name: str, call: int) -> None:
    """From its `call`-th call on, a method raises."""
    body, calls = getattr(owner, name), []

    def failing(*arguments):
        calls.append(1)
        if len(calls) >= call:
            full()
        return body(*arguments)

    setattr(owner, name, failing)


def full() -> None:
    raise MemoryError("no room")


def drawn(world: World, what: str, never: threading.Event):
    """Batches: the ninth of rank 0 does not come, or the fifth of rank 1 cannot be loaded."""
    for batch in batches(world, range(20)):
        if world.rank == 0 and what == "no data" and batch.index == 8:
            never.wait(40)
        bad = world.rank == 1 and what == "load" and batch.index == 4
        yield replace(batch, load=full) if bad else batch


def lone(rank: int, size: int, name: str) -> dict:
    """Something fails on rank 1 alone."""
    what, _, serial = name.partition(", ")
    world, never, losses = open_world("cpu", "gloo", LONG_S), threading.Event(), []
    how: dict = {"schedule": serial or "overlapped"}
    how["model"] = Raises(2 if rank == 1 and what == "model" else None)
    if what == "warm start":
        how["popularity"] = popularity_of(CASE, SLOTS, warm_start=1.0)
    mode = make(world, 1, 1, **how)
    faults = {
        "apply": (mode.dense_optimizer, "step", 3),
        "gather": (mode.rows[0], "gather", 6),
        "no data": (mode.dense, "start_sum", 3),
        "warm start": (mode.rows[0], "gather_rows", 1),
        "plan": (mode.tables.planner, "_plan", 6),  # once all homes have decided the step
        "decide": (mode.tables.planner.regions[0].planner._ranking, "learn", 6),
    }
    if rank == 1 and what in faults:
        fails_from(*faults[what])

    def written() -> int:
        return sum(rows.counts.rows_written_back for rows in mode.rows)

    def go() -> None:
        try:
            for step in mode.stream(drawn(world, what, never)):
                losses.append(mode.train_step(step).loss)
        finally:
            if what == "apply":  # the ranks can still talk, and must not write different steps
                before, error = written(), caught(mode.flush)
                flushed.append((error, written() - before))

    flushed: list[tuple[str, int]] = []
    seen = attempt(world, go, mode) | {"flushed": flushed, "failed": mode.tables.failed}
    never.set()
    return seen | {"steps": len(losses), "applied": int(mode.applied)}


def vanishes(rank: int, size: int, name: str) -> dict:
    """Rank 1 vanishes in the middle of an exchange of rows."""
    kind, schedule = EXCHANGES[name]
    what, hangs = name.partition(",")[0], "hangs" in name
    world = open_world("cpu", "gloo", TIMEOUT_S if hangs else LONG_S)
    plain_start = Link._start

    def start(self, about, *arguments):
        named, _, step = about.rpartition(" ")
        if rank == 1 and named == what and int(step) >= 2:
            if not hangs:
                os._exit(LAST_WORD)
            hang()
        return plain_start(self, about, *arguments)

    Link._start = start  # type: ignore[method-assign]
    placement = placement_of(kind, CASE)
    slots = fitting_slots(CASE, size, placement)
    mode, again = make(world, 2, 1, slots=slots, placement=placement, schedule=schedule), []

    def go() -> None:
        try:
            train(mode, batches(world, range(6)))
        finally:
            again.append(caught(lambda: train(mode, batches(world, range(1)))))
            again.append(caught(mode.flush))

    return attempt(world, go, mode) | {"again": again}


def opened(dying: int, timeout_s: float = LONG_S) -> World:
    """A world that every rank has joined before the rank `dying` has it."""
    world = open_world("cpu", "gloo", timeout_s)
    if world.rank == dying:
        wait_for_others(world, "joined")
    else:
        tell(world, "joined")
    return world


def wait_for_others(world: World, what: str) -> None:
    """Until every other rank has told it."""
    world.store.wait([f"test/{what}/{rank}" for rank in range(world.size) if rank != world.rank])


def tell(world: World, what: str) -> None:
    world.store.set(f"test/{what}/{world.rank}", "")


def dies(rank: int, size: int, where: str, how: str) -> dict:
    """Rank 1 dies or hangs; the others wait in `where`."""
    world = opened(1, TIMEOUT_S if how == "hangs" else LONG_S)
    end = (lambda: os.kill(os.getpid(), signal.SIGKILL)) if how == "dies" else hang

    def go() -> None:
        if where == "together":
            run_on_all_ranks(world, end if rank == 1 else int)
            return
        mode = make(world, lookahead=1, prefetch=1)
        if where == "exchange":  # its next batch never comes, and the others' planners wait for it
            rest = ends(world, end) if rank == 1 else told(world, batches(world, range(2, 6)))
            train(mode, chain(batches(world, range(2)), rest))
        else:
            train(mode, batches(world, range(6)), at_step=lambda s: s == 2 and rank == 1 and end())

    return attempt(world, go)


def ends(world: World, action):
    """An iterator that does `action` instead of a batch, once the others have theirs."""
    wait_for_others(world, "drawn")
    yield action()


def told(world: World, source):
    """`source`, of whose first batch the others hear."""
    for batch in source:
        tell(world, "drawn")
        yield batch


def hang() -> None:
    time.sleep(20 * TIMEOUT_S)


def host_dies(rank: int, size: int) -> dict:
    """Rank 0, which serves the store, dies; the other waits in `run_on_all_ranks`."""
    world = opened(dying=0)
    work = (lambda: os.kill(os.getpid(), signal.SIGKILL)) if rank == 0 else int
    return attempt(world, lambda: run_on_all_ranks(world, work))


def host_dies_early(rank: int, size: int) -> str:
    """Rank 0 dies when the ranks have met and before there is any process group."""
    make_first = dist.init_process_group

    def init(*args, **kwargs) -> None:
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        make_first(*args, **kwargs)

    dist.init_process_group = init
    return caught(lambda: open_world("cpu", "gloo", LONG_S))


def late(rank: int, size: int) -> dict:
    """A rank that is slow, but in time: nobody fails."""
    world = open_world("cpu", "gloo", LONG_S)

    def go() -> None:
        mode = make(world)
        train(mode, batches(world, range(3)), at_step=lambda s: time.sleep(2.5 * (rank == s == 1)))
        state(mode)

    return attempt(world, go)


CASES = {
    **{f"lone {name}": (lone, 3 if name == "model" else 2, name) for name in LONE},
    **{f"vanishes {name}": (vanishes, 3, name) for name in EXCHANGES},
    "kill exchange": (dies, 3, "exchange", "dies"),
    "kill gradients": (dies, 3, "gradients", "dies"),
    "kill together": (dies, 2, "together", "dies"),
    "exchange hangs": (dies, 2, "exchange", "hangs"),
    "gradients hangs": (dies, 3, "gradients", "hangs"),
    "kill host": (host_dies, 2),
    "kill host early": (host_dies_early, 2),
    "late": (late, 2),
}


class CaseEnds(dict[str, list[End]]):
    """Ends of all ranks by case. Three cases run at a time, when a test asks for one of them; those
    that hang run together."""

    def __missing__(self, wanted: str) -> list[End]:
        names = sorted(CASES, key=lambda name: "hangs" not in name)
        start = names.index(wanted) // 3 * 3
        jobs = {
            name: Job(*CASES[name], agent="host" not in name) for name in names[start : start + 3]
        }
        for name, job in jobs.items():
            self[name] = job.ends(100, but=(1,) if "hangs" in name else ())
        return self[wanted]


@pytest.fixture(scope="module")
def all_ends() -> CaseEnds:
    """Ends of the cases, shared by the tests of this file."""
    return CaseEnds()


@pytest.mark.parametrize("name", LONE)
def test_what_fails_on_one_rank_reaches_the_others_within_seconds(all_ends, name: str) -> None:
    error = LONE[name]
    stages = {"model": "forward_backward of step 2", "gather": "gather of step 5"}
    note = f" (in stage {stages[name]})" if name in stages else ""
    for rank, end in enumerate(all_ends[f"lone {name}"]):
        assert end.exitcode == 0 and isinstance(end.value, dict), end
        if rank == 1:
            assert end.value["error"] == error
        else:
            assert end.value["error"].startswith("PeerError: "), end
            assert f"rank 1 failed: {error}{note}" in end.value["error"]
        cause = end.value["cause"]
        assert cause.rank == 1 and cause.text.startswith(f"{error}{note}")
        assert end.value["took"] < 30
    first, second, *_ = (end.value for end in all_ends[f"lone {name}"])
    if name == "model":
        assert [first["steps"], first["applied"]] == [second["steps"], second["applied"]] == [2, 2]
    assert name != "no data" or first["failed"]
    if name == "apply":  # after the step was agreed
        assert (first["steps"], second["steps"]) == (3, 2)
        for said, written in (*first["flushed"], *second["flushed"]):
            assert written == 0
            assert "failed half-way" in said or "rank 1 failed" in said


@pytest.mark.parametrize("name", EXCHANGES)
def test_after_a_rank_vanished_nobody_goes_on_or_writes(all_ends, name: str) -> None:
    ends = all_ends[f"vanishes {name}"]
    if "hangs" not in name:
        assert ends[1].value is None and ends[1].exitcode == LAST_WORD, ends[1]
    for end in (ends[0], ends[2]):
        assert end.exitcode == 0 and end.value["error"].startswith("PeerError: "), end
        if "hangs" not in name:
            assert "rank 1 ended without a word" in end.value["error"], end
        again, flushed = end.value["again"]
        assert "make it anew, then load a checkpoint" in again
        assert "go on from the last checkpoint" in flushed or "PeerError" in flushed


@pytest.mark.parametrize("where", ["exchange", "gradients", "together"])
def test_a_rank_that_dies_is_named(all_ends, where: str) -> None:
    ends = all_ends[f"kill {where}"]
    assert ends[1].value is None and ends[1].exitcode == -signal.SIGKILL
    for rank, end in enumerate(ends):
        if rank == 1:
            continue
        assert end.exitcode == 0
        assert end.value["error"].startswith("PeerError: "), end
        assert "rank 1 ended without a word" in end.value["error"]
        # Planner and loop both wait for the dead rank in an exchange: either may notice first.
        waited = {
            "exchange": ("planning group: headers of step 2", "device group"),
            "together": ("host group",),
        }
        assert any(at in end.value["error"] for at in waited.get(where, ("device group",)))
        assert "rank 2" not in end.value["error"].partition(";")[2]
        assert end.value["took"] < 30


def test_the_rank_that_serves_the_store_is_named_too(all_ends) -> None:
    error = all_ends["kill host"][1].value["error"]
    assert error.startswith("PeerError: rank 1 waited in the host group: int; rank 0 ended, and")
    early = all_ends["kill host early"][1].value
    assert early.startswith("PeerError: rank 1 of 2 could not join the others (")
    assert "ended while the job started" in early


@pytest.mark.parametrize("name", [name for name in CASES if "hangs" in name])
def test_a_rank_that_hangs_is_named(all_ends, name: str) -> None:
    for rank, end in enumerate(all_ends[name]):
        if rank == 1:
            continue
        assert end.value["error"].startswith("PeerError: "), end
        missing = end.value["error"].partition(";")[2]
        assert f"rank 1 did not come within trainer.timeout_s={TIMEOUT_S:g}" in missing
        assert "rank 2" not in missing and "rank 0" not in missing
        assert end.value["took"] > TIMEOUT_S - 1  # not before; `ends` bounds how long after


def test_a_slow_rank_is_waited_for(all_ends) -> None:
    assert [(end.value["error"], end.exitcode) for end in all_ends["late"]] == [("", 0)] * 2
