"""A rank that vanishes in the middle of an exchange of rows: the others name it, in time."""

from __future__ import annotations

import os
import time

import pytest
from ends import End, Job
from placement_cases import fitting_slots, placement_of
from protocol_cases import CASE, batches, caught, make, train

from distcache.comm.link import Link
from distcache.comm.world import close_world, open_world

LONG_S, TIMEOUT_S = 60.0, 6.0
"""Where the end of a rank is seen at once, and where nothing but the time limit tells of it."""
LAST_WORD = 77
"""Exit code of the rank that vanishes."""

CASES = {
    "early rows": ("sharded", "overlapped"),
    "late rows": ("sharded", "overlapped"),
    "sharded row gradients": ("sharded", "overlapped"),
    "updated rows": ("home", "overlapped"),
    "row gradients": ("mixed home", "overlapped"),
    "row sums": ("mixed", "overlapped"),
    "fill": ("mixed", "overlapped"),
    "late rows, serial": ("mixed", "serial"),
    "early rows, hangs": ("mixed", "overlapped"),
    "late rows, hangs": ("sharded", "overlapped"),
}
"""The exchange in which rank 1 vanishes, and the placement and schedule of the run."""


def play(rank: int, size: int, name: str) -> dict:
    kind, schedule = CASES[name]
    what, vanishes = name.partition(",")[0], "hangs" not in name
    world = open_world("cpu", "gloo", LONG_S if vanishes else TIMEOUT_S)
    exchange = Link.start_all_to_all

    def start_all_to_all(self, tensor, send, receive, category, about):
        named, _, step = about.rpartition(" ")
        if rank == 1 and named == what and int(step) >= 2:
            if vanishes:
                os._exit(LAST_WORD)
            time.sleep(20 * TIMEOUT_S)
        return exchange(self, tensor, send, receive, category, about)

    Link.start_all_to_all = start_all_to_all  # type: ignore[method-assign]
    placement = placement_of(kind, CASE)
    slots = fitting_slots(CASE, size, placement)
    mode = make(world, 2, 1, slots=slots, placement=placement, schedule=schedule)
    error = caught(lambda: train(mode, batches(world, range(6))))
    again = caught(lambda: train(mode, batches(world, range(1)))), caught(mode.flush)
    mode.close()
    close_world(world, orderly=False)
    return {"error": error, "again": again}


@pytest.fixture(scope="module")
def all_ends() -> dict[str, list[End]]:
    """How every rank of every case ended; cases run two at a time."""
    found, names = {}, list(CASES)
    for start in range(0, len(names), 2):
        jobs = {name: Job(play, 3, name) for name in names[start : start + 2]}
        for name, job in jobs.items():
            found[name] = job.ends(100, but=(1,) if "hangs" in name else ())
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_others_name_the_rank_in_time(all_ends, name: str) -> None:
    ends = all_ends[name]
    if "hangs" not in name:
        assert ends[1].value is None and ends[1].exitcode == LAST_WORD, ends[1]
    for rank in (0, 2):
        value = ends[rank].value
        assert isinstance(value, dict), value
        assert value["error"].startswith("PeerError: "), value
        if "hangs" in name:
            missing = value["error"].partition(";")[2]
            assert f"rank 1 did not come within trainer.timeout_s={TIMEOUT_S:g}" in missing, value
            assert "rank 0" not in missing and "rank 2" not in missing, value
        else:
            assert "rank 1 ended without a word" in value["error"], value
        assert ends[rank].exitcode == 0


@pytest.mark.parametrize("name", CASES)
def test_nobody_goes_on_or_writes_what_is_the_state_of_no_step(all_ends, name: str) -> None:
    for rank in (0, 2):
        again, flushed = all_ends[name][rank].value["again"]
        assert "cannot go on; load a checkpoint" in again
        assert "go on from the last checkpoint" in flushed or "PeerError" in flushed
