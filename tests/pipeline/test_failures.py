"""Ranks that raise, die or hang: the others name them within seconds, or within the timeout."""

from __future__ import annotations

import os
import signal
import time
from itertools import chain

import pytest
import torch.distributed as dist
from ends import End, Job
from protocol_cases import Raises, batches, caught, make, state, train

from distcache.comm.agreement import together
from distcache.comm.failure import cause_of
from distcache.comm.world import World, close_world, open_world

LONG_S, TIMEOUT_S = 60.0, 5.0
"""Where the end of a rank is seen at once, and where nothing but the time limit tells of it."""


def leave(world: World, error: Exception | None) -> tuple[int, str] | None:
    """End this rank as the command line does: record the failure, then leave."""
    cause = cause_of(world.store, world.rank, error) if error is not None else None
    close_world(world, orderly=error is None)
    return cause


def attempt(world: World, action) -> dict:
    """Run `action`; how it failed, the cause and how long it took."""
    began, error = time.monotonic(), None
    try:
        action()
    except Exception as caught_error:
        error = caught_error
    took = time.monotonic() - began
    said = "" if error is None else f"{type(error).__name__}: {error}"
    return {"error": said, "took": took, "cause": leave(world, error)}


def model_raises(rank: int, size: int, at_apply: bool) -> dict:
    world = open_world("cpu", "gloo", 60)
    model = Raises(2 if rank == 1 and not at_apply else None)
    mode = make(world, lookahead=1, prefetch=1, model=model)
    if at_apply and rank == 1:
        step = mode.dense_optimizer.step

        def failing() -> None:
            if int(mode.applied) == 3:
                raise ValueError("the optimizer fails in step 2")
            step()

        mode.dense_optimizer.step = failing
    losses: list[float] = []
    flushed: list[str] = []

    def go() -> None:
        try:
            for step in mode.stream(batches(world, range(6))):
                losses.append(mode.train_step(step).loss)
        finally:
            if at_apply:  # the ranks can still talk, and must not write different steps
                before = [rows.counts.rows_written_back for rows in mode.rows]
                flushed.append(caught(mode.flush))
                after = [rows.counts.rows_written_back for rows in mode.rows]
                flushed.append("same" if after == before else "written")

    seen = attempt(world, go)
    return seen | {"steps": len(losses), "flushed": flushed, "applied": int(mode.applied)}


def opened(dying: int, timeout_s: float = LONG_S) -> World:
    """A world that every rank has joined before the rank `dying` has it."""
    world = open_world("cpu", "gloo", timeout_s)
    if world.rank == dying:
        wait_for_others(world, "joined")
    else:
        tell(world, "joined")
    return world


def tell(world: World, what: str) -> None:
    world.store.set(f"test/{what}/{world.rank}", "")


def wait_for_others(world: World, what: str) -> None:
    """Until every other rank has told it."""
    world.store.wait([f"test/{what}/{rank}" for rank in range(world.size) if rank != world.rank])


def dies(rank: int, size: int, where: str, how: str) -> dict:
    """Rank 1 dies or hangs; the others wait in `where`."""
    world = opened(1, TIMEOUT_S if how == "hangs" else LONG_S)
    end = (lambda: os.kill(os.getpid(), signal.SIGKILL)) if how == "dies" else hang

    def go() -> None:
        if where == "together":
            together(world, end if rank == 1 else int)
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
    """`source`, whose first batch the others hear of."""
    for number, batch in enumerate(source):
        if number == 0:
            tell(world, "drawn")
        yield batch


def hang() -> None:
    time.sleep(20 * TIMEOUT_S)


def host_dies(rank: int, size: int) -> dict:
    """Rank 0, which serves the store, dies; the other waits in `together`."""
    world = opened(dying=0)
    work = (lambda: os.kill(os.getpid(), signal.SIGKILL)) if rank == 0 else int
    return attempt(world, lambda: together(world, work))


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
    "raises": (model_raises, 3, False),
    "applies": (model_raises, 2, True),
    "kill exchange": (dies, 3, "exchange", "dies"),
    "kill gradients": (dies, 3, "gradients", "dies"),
    "kill together": (dies, 2, "together", "dies"),
    "hang exchange": (dies, 2, "exchange", "hangs"),
    "hang gradients": (dies, 3, "gradients", "hangs"),
    "kill host": (host_dies, 2),
    "kill host early": (host_dies_early, 2),
    "late": (late, 2),
}


@pytest.fixture(scope="module")
def all_ends() -> dict[str, list[End]]:
    """How every rank of every case ended; cases run a few at a time."""
    found, names = {}, list(CASES)
    for start in range(0, len(names), 5):
        jobs = {
            name: Job(*CASES[name], agent="host" not in name) for name in names[start : start + 5]
        }
        for name, job in jobs.items():
            found[name] = job.ends(100, but=(1,) if name.startswith("hang") else ())
    return found


def test_an_error_in_a_step_reaches_the_others_within_seconds(all_ends) -> None:
    for rank, end in enumerate(all_ends["raises"]):
        assert end.exitcode == 0, end
        if rank == 1:
            assert end.value["error"] == "ValueError: the model fails in step 2"
        else:
            assert end.value["error"].startswith("PeerError: "), end
            assert "rank 1 failed: ValueError: the model fails in step 2" in end.value["error"]
            assert "in stage forward_backward of step 2" in end.value["error"]
        text = "ValueError: the model fails in step 2 (in stage forward_backward of step 2)"
        assert (end.value["cause"].rank, end.value["cause"].text) == (1, text)
        assert end.value["steps"] == 2 and end.value["applied"] == 2
        assert end.value["took"] < 30


def test_an_error_after_a_step_was_agreed(all_ends) -> None:
    other, failing = all_ends["applies"]
    assert failing.value["error"] == "ValueError: the optimizer fails in step 2"
    assert "rank 1 failed: ValueError: the optimizer fails" in other.value["error"]
    assert other.value["steps"] == 3 and failing.value["steps"] == 2
    for end in (other, failing):
        error, written = end.value["flushed"]
        assert written == "same"
        assert "failed half-way" in error or "rank 1 failed" in error


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
            "exchange": ("planning group: header of step 2", "device group"),
            "together": ("host group",),
        }
        assert any(at in end.value["error"] for at in waited.get(where, ("device group",)))
        assert "rank 2" not in end.value["error"].partition(";")[2]
        assert end.value["took"] < 30


def test_the_rank_that_serves_the_store_is_named_too(all_ends) -> None:
    error = all_ends["kill host"][1].value["error"]
    assert error.startswith("PeerError: rank 1 waited in the host group: int; rank 0 ended, and")


def test_a_rank_that_dies_while_the_job_starts(all_ends) -> None:
    error = all_ends["kill host early"][1].value
    assert error.startswith("PeerError: rank 1 of 2 could not join the others (")
    assert "ended while the job started" in error


@pytest.mark.parametrize("where", ["exchange", "gradients"])
def test_a_rank_that_hangs_is_named(all_ends, where: str) -> None:
    ends = all_ends[f"hang {where}"]
    for rank, end in enumerate(ends):
        if rank == 1:
            continue
        assert end.value["error"].startswith("PeerError: rank "), end
        missing = end.value["error"].partition(";")[2]
        assert f"rank 1 did not come within trainer.timeout_s={TIMEOUT_S:g}" in missing
        assert "rank 2" not in missing and "rank 0" not in missing
        assert end.value["took"] > TIMEOUT_S - 1  # not before; run_ranks bounds how long after


def test_a_slow_rank_is_waited_for(all_ends) -> None:
    assert [end.value["error"] for end in all_ends["late"]] == ["", ""]
    assert [end.exitcode for end in all_ends["late"]] == [0, 0]
