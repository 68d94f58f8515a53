"""What ranks of one node tell each other through shared memory is what gloo brings, however long,
in turn, and in whatever pace; a rank that has ended, failed or does not come is named; no
descriptor is left."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
from protocol_cases import caught
from ranks import Job, run_ranks

from distcache.comm import mail as mails
from distcache.comm.link import PLANNING, CollectiveCounters, Link
from distcache.comm.mail import Mail, handle_of, open_handle
from distcache.comm.rendezvous import record_failure
from distcache.comm.world import World, close_world, open_world
from distcache.engine.exchange import PlanExchange
from distcache.errors import PeerError

ROUNDS = 40


def within(rank: int, size: int, work: Callable[[World], Any], timeout_s: float = 60.0) -> Any:
    """What `work` returns in a world of its own."""
    world = open_world("cpu", timeout_s=timeout_s)
    try:
        return work(world)
    finally:
        with suppress(Exception):  # where a rank has ended, the others cannot wait for it
            close_world(world, orderly=False)


def messages(rank: int, size: int) -> list[tuple]:
    """Of each round: whether it is a header of so many numbers, or parts for each rank and common
    ones; lengths from none to some that make boxes grow, of all ranks alike drawn."""
    found, random = [], np.random.default_rng(5)
    for nth in range(ROUNDS):
        own = np.random.default_rng([7, rank, nth])
        if nth % 2 == 0:
            found.append(("header", own.integers(-(2**60), 2**60, random.integers(1, 90))))
            continue
        most = int(random.choice([1, 2, 300, 40_000]))

        def drawn(own=own, most=most) -> list[np.ndarray]:
            lengths = own.integers(0, most, own.integers(0, 4))
            return [own.integers(-(2**31), 2**31 - 1, n).astype(np.int32) for n in lengths]

        found.append(("parts", [drawn() for _ in range(size)], drawn()))
    return found


def both_ways(world: World) -> tuple[int, int]:
    """All messages by mail and by gloo, in whatever pace; bytes counted by either."""
    counters, link = CollectiveCounters(), host_group(world)
    mail, pace = Mail(world, counters, "the mail"), np.random.default_rng(world.rank)
    exchange = PlanExchange(link, [1], 0)
    exchange.close()
    exchange._mail = None  # as with several nodes
    everyone = [messages(rank, world.size) for rank in range(world.size)]
    link.counters.reset()
    for nth, (kind, *said) in enumerate(everyone[world.rank]):
        time.sleep(float(pace.choice([0.0, 0.0, 0.003])))
        if kind == "header":
            found, expected = mail.gather(*said, "a"), exchange._gather(*said, "b")
        else:
            found = mail.swap(*said, "a")
            sent = [(of[nth][1][world.rank], of[nth][2]) for of in everyone]
            lengths = [[len(part) for part in (*own, *all_get)] for own, all_get in sent]
            pieces = exchange._swap(*said, lengths, "b")
            expected = [np.concatenate([*of, np.empty(0, np.int32)]) for of in pieces]
        for mine, other in zip(found, expected, strict=True):
            assert mine.dtype == other.dtype
            np.testing.assert_array_equal(mine, other)
    mail.close()
    return getattr(counters, PLANNING), getattr(link.counters, PLANNING)


def host_group(world: World) -> Link:
    """A counting link of the planning group."""
    return Link(world, world.planning_group, CollectiveCounters(), "the planning group")


@pytest.mark.parametrize("size", [2, 3, 4])
def test_mail_brings_what_gloo_brings(size: int) -> None:
    """The same numbers and the same count of bytes, though one writes what all get once."""
    for by_mail, by_gloo in run_ranks(within, size, both_ways):
        assert by_mail == by_gloo > 0


def fails(world: World, how: str) -> list[str]:
    """What ranks say where rank 1 does not come to the third message, and to the one after it."""
    mail = Mail(world, CollectiveCounters(), "the mail")
    one = np.arange(3)
    for nth in range(2):
        mail.gather(one, f"header {nth}")
    if world.rank == 1 and how != "late":
        if how == "ends":
            os._exit(77)
        if how == "fails":
            record_failure(world.store, 1, ValueError("too bad"))
        time.sleep(30)
    if world.rank == 1:
        time.sleep(3)
        return [caught(lambda: mail.gather(one, "header 2"))]
    return [caught(partial(mail.gather, one, f"header {nth}")) for nth in (2, 3)]


@pytest.mark.parametrize(
    ("how", "timeout_s", "said"),
    [
        ("ends", 60.0, "rank 1 ended without a word (its process has ended)"),
        ("fails", 60.0, "stopped because rank 1 failed: ValueError: too bad"),
        ("hangs", 2.0, "rank 1 did not come within trainer.timeout_s=2, or ended (no word came)"),
    ],
)
def test_who_does_not_come_is_named(how: str, timeout_s: float, said: str) -> None:
    """Within seconds; and what comes later is not taken for what was missed."""
    began = time.monotonic()
    but = [] if how == "ends" else [1]
    found = Job(_fails, 3, how, timeout_s).ends(60, but=but)
    assert time.monotonic() - began < 25
    for rank in (0, 2):
        first, then = found[rank].value
        assert first.startswith("PeerError: ") and said in first, first
        left = f"PeerError: rank {rank} left the mail: header 2: "
        assert then.startswith(left) and then.endswith(first.removeprefix("PeerError: ")), then


def _fails(rank: int, size: int, how: str, timeout_s: float) -> list[str]:
    return within(rank, size, lambda world: fails(world, how), timeout_s)


def test_a_rank_that_is_late_is_waited_for() -> None:
    """Longer than a slice: it says so, and goes on."""
    assert run_ranks(_fails, 2, "late", 60.0)[1] == [""]


def held(world: World) -> tuple[int, int, int]:
    """Descriptors before a mail, while it is there, and when it is gone."""
    found = [len(os.listdir("/proc/self/fd"))]
    mail = Mail(world, CollectiveCounters(), "the mail")
    found.append(len(os.listdir("/proc/self/fd")))
    if world.rank:
        mail.close()
    del mail
    found.append(len(os.listdir("/proc/self/fd")))
    return tuple(found)


def test_no_descriptor_is_left() -> None:
    """Neither where it is closed nor where it is garbage."""
    for before, there, after in run_ranks(within, 3, held):
        assert before == after < there


def test_handles_are_of_one_file_alone() -> None:
    """Where a process has ended and another has its number, what it has there is refused."""
    first, second = (os.memfd_create("test") for _ in range(2))
    try:
        path, file = handle_of(first)
        os.close(open_handle((path, file), os.O_RDWR))
        with pytest.raises(FileNotFoundError, match="another process has this id here"):
            open_handle((path, handle_of(second)[1]), os.O_RDWR)
        with pytest.raises(FileNotFoundError):
            open_handle((f"{path}9999", file), os.O_RDWR)
    finally:
        os.close(first)
        os.close(second)


def out_of_reach(world: World) -> str:
    """What all ranks say where rank 1 cannot open what another one has."""
    if world.rank == 1:
        mails.open_handle = lambda handle, flags: os.open("/proc/0/fd/3", flags)
    return caught(lambda: Mail(world, CollectiveCounters(), "the mail"))


def test_ranks_that_cannot_reach_one_another_are_told() -> None:
    """On all of them, with what to do."""
    for said in run_ranks(within, 2, out_of_reach):
        assert "rank 1 cannot open what rank 0 tells others: " in said
        assert f"{PeerError.__name__}: " in said and "one process namespace" in said
