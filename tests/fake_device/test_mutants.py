"""Tests of the tests: without a wait, a hand-over or a recorded stream, bits change, and where it
is about slots, clocks complain under every scheduler.

Each of `LAWS` is what the package does at one place. Left out, it changes the digest of a run under
some scheduler, and that of `resident` is kept with it under all. Not among them, as no run depends
on them:

* `Streams.record_stream`: what movement has made is held until its step ends, and what takes its
  memory comes after that;
* `Streams.wait_events` of the moves of a step that nobody runs ahead of: one stream does it all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fake_device import process
from fake_device.clocks import watched
from fake_device.fake_cuda import DEVICE
from fake_device.runs import Training, trained
from fake_device.test_fake_device import drop_in, loop
from fake_device.test_work import grown, left_early
from scenarios import OPTIMIZERS, Scenario, table

from distcache.cache import StagingRing
from distcache.comm.link import Link
from distcache.engine import gradients
from distcache.engine.groups import Placement
from distcache.engine.movement import RowMover
from distcache.engine.pipeline import StepStream
from distcache.parallel.cached import CachedSettings
from distcache.store.rows import DirectRows
from distcache.streams import COMMUNICATION, COMPUTE, COPY_IN, COPY_OUT, Streams

SPEC, LR = OPTIMIZERS["adagrad"]
CASE = Scenario((table("a", 300), table("b", 40, features=2)), SPEC, LR, steps=24)
RESIDENT = Training(CASE, CachedSettings("resident", result_delay=CASE.steps))
SCHEDULES = [(name, seed) for seed in (1, 2, 3) for name in ("lazy", "moody", "random")]


def data(
    prefetch: int = 1,
    access: str = "staged",
    slots: int = 180,
    placement: str = "replicated",
    graph: bool = False,
) -> Training:
    """A run of mode `data`, whose losses are all read in the end."""
    how = {"access": access, "result_delay": CASE.steps, "placement": Placement(placement)}
    how |= {"cuda_graph": graph}
    return Training(CASE, CachedSettings("data", (slots,), 2, prefetch, **how))


def nothing(*given: Any, **named: Any) -> None:
    """What a step of the package does that is left out."""


@contextmanager
def without_after(name: str) -> Iterator[None]:
    """Streams whose `after` does nothing for the stream of this name."""
    after = Streams.wait_events

    def changed(self: Streams, of: str, marks: Any) -> None:
        if of != name:
            after(self, of, marks)

    with patch.object(Streams, "wait_events", changed):
        yield


LEFT = {"optimizer": "adagrad", "access": "staged"}


@contextmanager
def unmarked(of: type, method: str) -> Iterator[None]:
    """A method that is handed no mark."""
    call = getattr(of, method)

    def changed(self: Any, *given: Any, **named: Any) -> Any:
        return call(self, *(None if isinstance(g, torch.cuda.Event) else g for g in given), **named)

    with patch.object(of, method, changed):
        yield


def stream_of_the_collection(self: Streams, name: str) -> Any:
    """The stream of a name, whatever is current."""
    return self._side_streams.get(name) or torch.cuda.default_stream()


@dataclass(frozen=True)
class Law:
    """What is left out, in which run, over how many ranks; `raced`: whether clocks see it."""

    out: Callable[[], Any]
    run: Any
    ranks: int = 1
    raced: bool = True


def no_records() -> Any:
    """No stream is made known to the allocator."""
    from fake_device.fake_torch import FakeTensor  # where the device is

    return patch.object(FakeTensor, "record_stream", nothing)


def no_waits() -> Any:
    """No stream waits for a collective."""
    from fake_device.fake_nccl import Issued

    return patch.object(Issued, "wait", nothing)


@contextmanager
def copied_from_numpy() -> Iterator[None]:
    """Index tensors go to the device from NumPy's view of a part of pinned memory, for which torch
    records no event."""
    packed = gradients.packed

    def changed(tensors: Any, pinned: bool) -> Any:
        parcel, starts = packed([torch.zeros(1), *tensors], pinned)
        first = starts[1]
        view = torch.from_numpy(parcel.numpy()[first:])
        return view, [start - first for start in starts[1:]]

    with patch.object(gradients, "packed", changed):
        yield


def lacks(of: Any, method: str, does: Callable = nothing) -> Callable[[], Any]:
    """Leaves out a method."""
    return partial(patch.object, of, method, does)


@contextmanager
def unsettled() -> Iterator[None]:
    """On one rank exchanges of gradients do not wait for rows that move, which come after them."""
    issue, settle, at_sums = RowMover.issue, StepStream.wait_until_issued, Event()

    def late(self: RowMover, *given: Any) -> None:
        if self._link.world.rank:
            at_sums.wait(0.2)  # of the first steps none comes before their rows
            at_sums.clear()
            time.sleep(0.02)
        issue(self, *given)

    def settled(self: StepStream) -> Any:
        return at_sums.set() if self._world.rank else settle(self)

    with (
        patch.object(RowMover, "issue", late),
        patch.object(StepStream, "wait_until_issued", settled),
    ):
        yield


LAWS = {
    "after: compute": Law(partial(without_after, COMPUTE), data()),
    "after: compute, replayed": Law(partial(without_after, COMPUTE), data(graph=True)),
    "after: communication": Law(
        partial(without_after, COMMUNICATION), data(placement="sharded"), 2
    ),
    "after: copy_in": Law(partial(without_after, COPY_IN), data()),
    "after: copy_out": Law(partial(without_after, COPY_OUT), data()),
    "what applied steps are marked by": Law(partial(unmarked, StepStream, "release"), data()),
    "what leaves": Law(lacks(Streams, "synchronize"), data(), raced=False),
    "staging buffers": Law(
        partial(unmarked, StagingRing, "release"), data(3, slots=300), raced=False
    ),
    "pinned memory of a copy": Law(copied_from_numpy, data(), raced=False),
    "what leaves in place": Law(
        lacks(DirectRows, "marks", lambda self: []), data(access="zero_copy"), raced=False
    ),
    "results": Law(lacks(Link, "settle"), data(), raced=False),
    "memory of a cache that grows": Law(no_records, grown, raced=False),
    "the stream of the loop": Law(
        lacks(Streams, "_stream", stream_of_the_collection), loop(1, "staged", own_stream=15)
    ),
    "who issues first": Law(unsettled, replace(data(), backend="nccl"), 2, raced=False),
    "collectives": Law(no_waits, replace(data(), backend="nccl"), 2, raced=False),
    "the end": Law(lacks(Streams, "drain"), LEFT, raced=False),
}


def ends(call: tuple[str, Any]) -> tuple[str, list[str]]:
    """The digest of a run without a law ("": with all), or the error that it ended with; and
    what the clocks have seen."""
    name, run = call
    with LAWS[name].out() if name else nullcontext(), watched() as watch:
        try:
            return digest_of(run), watch.races
        except Exception as error:
            return repr(error), watch.races


def digest_of(run: Any) -> str:
    """Of whatever a law is about."""
    if isinstance(run, Training):
        return trained(run).digest
    if run is grown:
        return str(grown())
    before = len(DEVICE.streams)
    return drop_in(run)[1] if "settings" in run else str(any(left_early(run)[before:]))


def seen(
    guard: Path, names: list[str], under: list[tuple[str, int]], whole: bool = True
) -> dict[str, list[bool]]:
    """Whether bits change without each law, under each scheduler. Fails where they do with it
    (`whole`: looks), and where clocks do not know."""
    found = {}
    for ranks in (1, 2):
        laws = {name: LAWS[name] for name in names if LAWS[name].ranks == ranks}
        calls, each = [("", RESIDENT)] * bool(laws), [process.LAZY] * bool(laws)
        for name, law in laws.items():
            intact = whole or not isinstance(law.run, Training)
            calls += [("", law.run)] * intact + [(name, law.run)] * len(under)
            each += under[:1] * intact + under
        ended = process.run(guard, ends, calls, ranks, under=each) if laws else []
        first = [digest for digest, races in ended[0]] if laws else []
        for (name, run), by_rank in list(zip(calls, ended, strict=True))[1:]:
            digest, races = by_rank[0]
            if not name:
                right = digest if not isinstance(run, Training) else first[0]
                assert not races and digest == right, (run, digest, races[:1])
                continue
            right = first[0] if isinstance(run, Training) else right
            assert any(races for _, races in by_rank) is LAWS[name].raced, name
            found.setdefault(name, []).append(digest != right)
    return found


def test_most_laws_are_seen(guard: Path) -> None:
    """By the laziest device."""
    found = seen(guard, list(LAWS), [process.LAZY], whole=False)
    assert [name for name, of in found.items() if not any(of)] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", LAWS)
def test_every_law_is_seen(guard: Path, name: str) -> None:
    (found,) = seen(guard, [name], SCHEDULES).values()
    print(name, dict(zip(SCHEDULES, found, strict=True)))
    assert any(found)
