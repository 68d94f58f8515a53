"""Ranks that do not share a clock learn how far theirs is from rank 0's."""

from __future__ import annotations

import time

from ranks import run_ranks

from distcache.comm.world import close_world, open_world
from distcache.engine.tracing import SharedClock, machine, share_clock

WRONG_S = (0.0, 5_000.25, -123.5)


def shared(rank: int, size: int, machines: list[str]) -> tuple[SharedClock, float, float]:
    """The clock of this rank, and a moment that all ranks share, on its own and on rank 0's."""
    world = open_world("cpu", "gloo", 60)
    clock = share_clock(world, lambda: time.perf_counter() + WRONG_S[rank], machines[rank])
    true = time.perf_counter()
    close_world(world)
    return clock, true + WRONG_S[rank], true + WRONG_S[0]


def test_the_offset_is_wrong_by_at_most_what_it_says() -> None:
    for (clock, mine, first), wrong in zip(
        run_ranks(shared, 3, ["here", "there", "far"]), WRONG_S, strict=True
    ):
        assert abs(clock.offset_s + wrong) <= clock.error_s + 1e-9
        assert clock.error_s < 1.0
        assert abs(clock.since_start(mine) - (first - clock.start_s)) <= clock.error_s + 1e-9
        assert (clock.error_s > 0) == (wrong != 0.0)


def test_ranks_of_one_machine_are_not_asked() -> None:
    """Rank 2 says that it is where rank 0 is, so its clock is taken as it is."""
    found = run_ranks(shared, 3, ["here", "there", "here"])
    starts = {clock.start_s for clock, _, _ in found}
    assert len(starts) == 1
    assert [clock.error_s > 0 for clock, _, _ in found] == [False, True, False]
    assert found[2][0].offset_s == 0.0


def names(rank: int, size: int) -> str:
    return machine()


def test_processes_of_one_machine_say_so() -> None:
    one, other = run_ranks(names, 2)
    assert one == other == machine()
