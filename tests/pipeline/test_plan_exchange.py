"""The planners' conversation: two collectives for each step, and nothing read too early."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from protocol_cases import batches, make, train
from ranks import run_ranks

from distcache.comm.world import World, close_world, open_world
from distcache.engine.exchange import Part, Status
from distcache.errors import PeerError

STEPS = 6


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


@pytest.fixture
def world() -> Iterator[World]:
    world = open_world("cpu", "gloo", 60)
    yield world
    close_world(world)


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
