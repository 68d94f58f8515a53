"""What fails on one rank alone, where its row of collectives has a place that others go past."""

from __future__ import annotations

import pytest
from ends import Job
from oracle import OPTIMIZERS
from popular_runs import make_popular, popularity_of
from scenarios import Scenario, table

from distcache.comm.world import close_world, open_world
from distcache.engine.planning import StreamPlanner
from distcache.parallel.cached import CachedSettings

TABLES = (table("a", 300), table("b", 40, features=2))
SLOTS = (240,)
LATE = 5
"""Steps whose plans are made before one cannot be."""


def fail_late(planner: StreamPlanner) -> None:
    """Let making a rank's plans of a step fail at last, once all homes have decided it."""
    make, calls = planner._plan, []

    def of(*args):
        calls.append(args)
        if len(calls) > LATE:
            raise ValueError("no room for a plan")
        return make(*args)

    planner._plan = of


def play(rank: int, size: int, what: str, schedule: str) -> str:
    world = open_world("cpu", "gloo", 60)
    spec, lr = OPTIMIZERS["sgd"]
    case = Scenario(TABLES, spec, lr, steps=40)
    settings = CachedSettings("data", SLOTS, 2, 1, schedule=schedule, validate=True)
    popularity = popularity_of(case, SLOTS, warm_start=1.0) if what == "warm start" else None
    told = ""
    mode = make_popular(world, case, settings, popularity)
    if rank == 1 and what == "plan":
        fail_late(mode.tables.planner)
    if rank == 1 and what == "warm start":

        def gather(rows, counts):
            raise ValueError("no room for rows")

        mode.rows[0].gather_rows = gather
    try:
        slices = (case.batch(step, rank, size) for step in range(case.steps))
        for step in mode.stream(slices):
            mode.train_step(step)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    mode.close()
    close_world(world, orderly=False)
    return told


@pytest.mark.parametrize("schedule", ["overlapped", "serial"])
@pytest.mark.parametrize("what", ["warm start", "plan"])
def test_the_others_hear_of_it_at_once(what: str, schedule: str) -> None:
    ends = Job(play, 2, what, schedule).ends(50)  # below the 60 s that ranks wait for each other
    assert ends[1].value.startswith("ValueError: no room for"), ends[1].value
    assert "stopped because rank 1 failed: ValueError: no room for" in ends[0].value
    assert [end.exitcode for end in ends] == [0, 0]
