"""What ranks of one node tell each other through shared memory is what gloo brings, however long,
in turn, and in whatever pace; a rank that has ended, failed or does not come is named; no
descriptor is left."""

from __future__ import annotations

import operator
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from protocol_cases import caught, warnings
from ranks import Job, run_ranks

from distcache.comm import mail as mails
from distcache.comm.link import PLANNING, CollectiveCounters, Link
from distcache.comm.mail import Mail, handle_of, open_handle
from distcache.comm.rendezvous import record_failure
from distcache.comm.world import World, close_world, open_world
from distcache.engine.exchange import Part, PlanExchange, Status, Verdict
from distcache.errors import PeerError

ROUNDS, _WIRE = 40, np.int32


def within(rank: int, size: int, work: Callable[[World], Any], timeout_s: float = 60.0) -> Any:
    """What `work` returns in a world of its own."""
    world = open_world("cpu", timeout_s=timeout_s)
    try:
        return work(world)
    finally:
        with suppress(Exception):  # where a rank has ended, the others cannot wait for it
            close_world(world, orderly=False)


Message = tuple[list[list[np.ndarray]], list[np.ndarray]]


def messages(rank: int, size: int) -> list[Message]:
    """Parts for each rank and common ones, of each round: from none to some that make boxes grow;
    what a rank says, every other one can draw too."""
    found, random = [], np.random.default_rng(5)
    for nth in range(ROUNDS):
        own, most = np.random.default_rng([7, rank, nth]), int(random.choice([1, 2, 300, 40_000]))
        drawn = [
            [
                own.integers(-(2**31), 2**31 - 1, length).astype(np.int32)
                for length in own.integers(0, most, own.integers(0, 4))
            ]
            for _ in range(size + 1)
        ]
        found.append((drawn[:-1], drawn[-1]))
    return found


def both_ways(world: World) -> tuple[int, int]:
    """All messages by mail and by gloo, in whatever pace; bytes counted by either."""
    counters, size = CollectiveCounters(), world.size
    link = Link(world, world.planning_group, CollectiveCounters(), "the planning group")
    mails._LEAST = 1 << 10
    mail, pace = Mail(world, counters, "the mail"), np.random.default_rng(world.rank)
    read = mail._read

    def slowly(*of: int) -> tuple[mails.Pieces, mails.Pieces]:
        time.sleep(float(pace.choice([0.0, 0.0, 0.004])))
        return read(*of)

    mail._read = slowly
    everyone = [messages(rank, size) for rank in range(size)]
    found = []
    for nth, said in enumerate(everyone[world.rank]):  # the next one is written while some read
        time.sleep(float(pace.choice([0.0, 0.0, 0.003])))
        found.append(mail.swap(*said, f"round {nth}"))
    for nth, (parts, common) in enumerate(everyone[world.rank]):
        outgoing = [joined([*own, *common]) for own in parts]
        theirs = [(own[nth][0][world.rank], own[nth][1]) for own in everyone]
        lengths = [len(joined([*own, *to_all])) for own, to_all in theirs]
        flat, sends = torch.from_numpy(joined(outgoing)), [len(to) for to in outgoing]
        came = link.start_all_to_all(flat, sends, lengths, PLANNING, "twin")().split(lengths)
        for pieces, twin, given in zip(found[nth], came, theirs, strict=True):
            np.testing.assert_array_equal(joined([*pieces[0], *pieces[1]]), twin.numpy())
            for own, to in zip(pieces, given, strict=True):
                assert [(len(piece), piece.dtype) for piece in own] == [(len(p), _WIRE) for p in to]
        mine = found[nth][world.rank]
        assert all(map(operator.is_, joined_lists(mine), joined_lists((parts[world.rank], common))))
    mail.close()
    return getattr(counters, PLANNING), getattr(link.counters, PLANNING)


def joined_lists(pieces: tuple[Sequence[np.ndarray], Sequence[np.ndarray]]) -> list[np.ndarray]:
    """Those for one, then those for all."""
    return [*pieces[0], *pieces[1]]


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """One array of all."""
    return np.concatenate([np.empty(0, np.int32), *parts])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_mail_brings_what_gloo_brings(size: int) -> None:
    """The same numbers and the same count of bytes, though one writes what all get once."""
    for by_mail, by_gloo in run_ranks(within, size, both_ways):
        assert by_mail == by_gloo > 0


DIES = ("ends", "writes", "meets", "opens nothing")
"""At which points a rank ends: before it has written, before it has taken a token, after that, and
as the last, before it opens the gate."""


def dies(mail: Mail, one: Message, how: str) -> None:
    """End at a point of the third message."""
    if how == "opens nothing":  # the last to come, which the others wait for then
        time.sleep(1)
    if how != "ends":
        mail._tell(*one, 0)
    if how in ("meets", "opens nothing"):
        assert mails._taken(mail._tokens[0]) == (how == "meets")
    os._exit(77)


def fails(world: World, how: str) -> list[str]:
    """What ranks say where rank 1 does not come to the third message, and to the one after it."""
    mail = Mail(world, CollectiveCounters(), "the mail")
    one = [[()] * world.size, [np.arange(3)]]
    for nth in range(2):
        mail.swap(*one, f"round {nth}")
    if world.rank == 1 and how != "late":
        if how in DIES:
            dies(mail, one, how)
        if how == "fails":
            record_failure(world.store, 1, ValueError("too bad"))
        time.sleep(30)
    if world.rank == 1:
        time.sleep(3)
        said = [world.store.get("distcache/waiting/the mail/0").decode()]
        return [*said, caught(lambda: mail.swap(*one, "round 2"))]
    if how == "meets":  # after the one that ends
        time.sleep(1)
    if how == "late":
        first = caught(lambda: mail.swap(*one, "round 2"))
        return [first, world.store.get("distcache/waiting/the mail/0").decode()]
    return [caught(partial(mail.swap, *one, f"round {nth}")) for nth in (2, 3)]


@pytest.mark.parametrize(
    ("how", "timeout_s", "said"),
    [
        ("ends", 60.0, "rank 1 ended without a word (its process has ended)"),
        ("writes", 60.0, "rank 1 ended without a word (its process has ended)"),
        ("opens nothing", 60.0, "rank 1 ended without a word (its process has ended)"),
        ("fails", 60.0, "stopped because rank 1 failed: ValueError: too bad"),
        ("hangs", 2.0, "rank 1 did not come within trainer.timeout_s=2, or ended (no word came)"),
    ],
)
def test_who_does_not_come_is_named(how: str, timeout_s: float, said: str) -> None:
    """Within seconds; and what comes later is not taken for what was missed."""
    began = time.monotonic()
    but = [] if how in DIES else [1]
    found = Job(_fails, 3, how, timeout_s).ends(60, but=but)
    assert time.monotonic() - began < 25
    for rank in (0, 2):
        first, then = found[rank].value
        assert first.startswith("PeerError: ") and said in first, first
        left = f"PeerError: rank {rank} left the mail: round 2: "
        assert then.startswith(left) and then.endswith(first.removeprefix("PeerError: ")), then


def test_a_message_that_is_there_comes_though_its_rank_has_ended() -> None:
    """Which had met the others, of whom another one was the last; the next message does not."""
    found = Job(_fails, 3, "meets", 60.0).ends(60)
    for rank in (0, 2):
        first, then = found[rank].value
        assert first == "" and "rank 1 ended without a word" in then, (first, then)


def _fails(rank: int, size: int, how: str, timeout_s: float) -> list[str]:
    return within(rank, size, lambda world: fails(world, how), timeout_s)


def test_a_rank_that_is_late_is_waited_for() -> None:
    """Longer than a slice: it says so, and goes on."""
    waited, late = run_ranks(_fails, 2, "late", 60.0)
    assert waited == ["", ""] and late == ["the mail: round 2", ""]


def closed_meanwhile(world: World) -> list[str]:
    """What the first rank says whose mail is closed while a thread waits for the other one's word:
    that message comes, and no other is taken."""
    mail, said = Mail(world, CollectiveCounters(), "the mail"), list[str]()
    one = [[()] * world.size, [np.arange(3)]]
    if world.rank == 0:
        thread = threading.Thread(target=lambda: said.append(caught(lambda: mail.swap(*one, "a"))))
        thread.start()
        time.sleep(0.3)
        mail.close()  # the thread has its descriptors still
        assert thread.is_alive()
        world.store.set("closed", "yes")
        thread.join(20)
        assert not mail._boxes
    else:
        world.store.wait(["closed"])
        said.append(caught(lambda: mail.swap(*one, "a")))
        mail.close()
    return [*said, caught(lambda: mail.swap(*one, "b"))]


def test_a_mail_is_not_closed_under_a_thread_that_waits() -> None:
    """A word could else go into whatever file has its descriptor's number then."""
    for rank, said in enumerate(run_ranks(within, 2, closed_meanwhile)):
        assert said == ["", f"PeerError: the mail is closed on rank {rank}"]


def held(world: World) -> list[tuple[int, int]]:
    """Descriptors, and mappings of mails, before one, while it is there, and when it is gone."""

    def seen() -> tuple[int, int]:
        mapped = Path("/proc/self/maps").read_text().count("distcache-mail")
        return len(os.listdir("/proc/self/fd")), mapped

    found = [seen()]
    mail = Mail(world, CollectiveCounters(), "the mail")
    for nth in range(2):
        mail.swap([()] * world.size, [np.arange(3)], f"round {nth}")
    found.append(seen())
    if world.rank:
        mail.close()
    else:
        del mail
    return [*found, seen()]


def test_no_descriptor_is_left() -> None:
    """Neither where it is closed nor where it is garbage."""
    for before, there, after in run_ranks(within, 3, held):
        assert before == after and before[0] < there[0] and (before[1], there[1]) == (0, 6)


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


def out_of_reach(world: World) -> tuple[str, bool, list[str]]:
    """What all ranks say where rank 1 cannot open what another one has; and whether an exchange of
    planners goes on without, with which warning."""
    if world.rank == 1:
        mails.open_handle = lambda handle, flags: os.open("/proc/0/fd/3", flags)
    said = caught(lambda: Mail(world, CollectiveCounters(), "the mail"))
    link = Link(world, world.planning_group, CollectiveCounters(), "the planning group")
    with warnings() as lines:
        exchange = PlanExchange(link, [1], 0)
    told = exchange.exchange(Part(0, Status.END))
    return said, told.asked == Verdict(Status.END, (0, 1)), lines


def test_ranks_that_cannot_reach_one_another_are_told() -> None:
    """On all of them, with what to do; their planners exchange over gloo."""
    for said, went_on, lines in run_ranks(within, 2, out_of_reach):
        assert "rank 1 cannot open what rank 0 tells others: " in said
        assert f"{PeerError.__name__}: " in said and "one process namespace" in said
        assert went_on and len(lines) == 1 and "exchange over gloo" in lines[0]
