"""The order of device work, on streams that only keep clocks: what a GPU would be told."""

from __future__ import annotations

import threading
from collections import defaultdict
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest
import torch
from oracle import OPTIMIZERS
from ranks import run_ranks
from scenarios import Scenario, table

from distcache.comm.world import close_world, open_world
from distcache.engine import tables
from distcache.engine.groups import Placement
from distcache.parallel.cached import CachedParallel, CachedSettings
from distcache.store.rows import ACCESS
from distcache.streams import Mark, Streams

TABLES = (table("a", 300), table("b", 40, features=2))


class Clock(dict):
    """A vector clock that stands for a CUDA event, and is always over for the host."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class Clocks(Streams):
    """Each stream counts its work; a mark is a vector clock; waiting for it merges the clocks."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.ordered = True
        self.clocks: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self.lock, self.here = threading.Lock(), threading.local()

    @contextmanager
    def on(self, name):
        self.here.name = name
        yield

    def mark(self, name):
        with self.lock:
            self.clocks[name][name] += 1
            return Mark(Clock(self.clocks[name]))

    def after(self, name, marks):
        with self.lock:
            for mark in marks:
                for other, count in (mark.event or {}).items():
                    self.clocks[name][other] = max(self.clocks[name][other], count)

    def seconds(self, mark):
        return 0.0


def before(first: Mark, second: Mark) -> bool:
    """Whether the work up to `first` is over whenever that up to `second` is."""
    return all(second.event.get(name, 0) >= count for name, count in first.event.items())


@pytest.fixture(scope="module")
def world():
    world = open_world("cpu", "gloo", 60)
    yield world
    close_world(world)


@pytest.mark.parametrize("schedule", ["overlapped", "serial"])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("access", ACCESS)
def test_every_hand_over_is_ordered(world, monkeypatch, access, prefetch, schedule) -> None:
    monkeypatch.setattr(tables, "Streams", Clocks)
    spec, lr = OPTIMIZERS["adagrad"]
    case = Scenario(TABLES, spec, lr, steps=30)
    chosen = CachedSettings(
        "data", (130,), 2, prefetch, schedule=schedule, result_delay=2, access=access
    )
    mode = CachedParallel(world, TABLES, case.features, case.model(), spec, chosen)
    mode.set_lr(lr, lr)
    seen = {}
    for step in mode.stream(case.batch(s) for s in range(case.steps)):
        mode.train_step(step)
        seen[step.flight.step] = step.flight
    early = 0
    for number, flight in seen.items():
        at = {mark.name: mark for mark in flight.marks}
        chain = ["write_back", "gather", "fill", "forward_backward", "sync", "apply"]
        for one, other in pairwise(chain):
            assert before(at[one].end, at[other].start), (number, one, other)
        after = flight.move_after
        assert number - prefetch - 1 <= after < number
        if after >= 0:
            applied = {m.name: m for m in seen[after].marks}["apply"]
            assert before(applied.end, at["write_back"].start)
            assert before(applied.end, at["fill"].start)
        if number:
            last = {m.name: m for m in seen[number - 1].marks}["apply"]
            assert before(last.end, at["forward_backward"].start)
            # Rows that left with earlier steps may be read in place from where they were written.
            assert before(seen[number - 1].marks[0].end, at["fill"].start)
            # Overlapped: the movement does not wait for the step that runs beside it.
            early += not before(last.end, at["fill"].start)
    assert (early > 0) == (schedule == "overlapped" and prefetch > 0)
    mode.close()


HOT = tuple(np.arange(count) for count in (30, 6))
PLACEMENTS = (
    Placement("sharded"),
    Placement("sharded", early=False),
    Placement("replicated", "home"),
    Placement("mixed", "home", HOT),
)


def orders(rank: int, size: int, prefetch: int, schedule: str) -> list[tuple[int, int]]:
    """For every placement, the steps whose early rows, and whose fill, waited for no step before.

    Fails where work that changes rows is not ordered before work that reads them.
    """
    tables.Streams = Clocks  # type: ignore[misc]
    world = open_world("cpu", "gloo", 60)
    found = [order_of(world, placement, prefetch, schedule) for placement in PLACEMENTS]
    close_world(world)
    return found


def order_of(world, placement: Placement, prefetch: int, schedule: str) -> tuple[int, int]:
    spec, lr = OPTIMIZERS["adagrad"]
    case = Scenario(TABLES, spec, lr, steps=16)
    how = {"schedule": schedule, "result_delay": 2, "placement": placement}
    chosen = CachedSettings("data", (300,), 2, prefetch, **how)
    mode = CachedParallel(world, TABLES, case.features, case.model(), spec, chosen)
    mode.set_lr(lr, lr)
    seen = {}
    for step in mode.stream(case.batch(s, world.rank, world.size) for s in range(case.steps)):
        mode.train_step(step)
        seen[step.flight.step] = {mark.name: mark for mark in step.flight.marks}
        seen[step.flight.step]["after"] = step.flight.move_after
    early = filled = 0
    for number, at in seen.items():
        names = list(at)[:-1]  # but for "after"
        for one, other in pairwise(names):
            assert before(at[one].end, at[other].start), (number, one, other)
        moves = [name for name in ("write_back", "gather", "fill", "share_early") if name in at]
        if at["after"] >= 0:
            done = seen[at["after"]][names[-1]]
            assert all(before(done.end, at[name].start) for name in moves), number
        if number:
            done = seen[number - 1][names[-1]]
            reads = [name for name in ("share_late", "forward_backward") if name in at]
            assert all(before(done.end, at[name].start) for name in reads), (number, reads)
            early += "share_early" in at and not before(done.end, at["share_early"].start)
            filled += not before(done.end, at["fill"].start)
    mode.close()
    return early, filled


@pytest.mark.parametrize(
    ("prefetch", "schedule"), [(0, "overlapped"), (2, "overlapped"), (1, "serial")]
)
def test_rows_on_their_way_between_ranks_are_ordered(prefetch: int, schedule: str) -> None:
    for found in run_ranks(orders, 2, prefetch, schedule):
        overlaps = schedule == "overlapped" and prefetch > 0
        assert [early > 0 for early, _ in found] == [overlaps, False, False, overlaps]
        assert [filled > 0 for _, filled in found] == [overlaps] * len(PLACEMENTS)
