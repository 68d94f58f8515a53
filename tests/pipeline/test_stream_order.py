"""The order of device work, on streams that only keep clocks: what a GPU would be told."""

from __future__ import annotations

import threading
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from ranks import run_ranks
from scenarios import OPTIMIZERS, Scenario, make_mode, table

from distcache.comm.world import close_world, open_world
from distcache.engine import tables
from distcache.engine.groups import Placement
from distcache.engine.step import DeviceSpan
from distcache.parallel.cached import CachedSettings
from distcache.store.rows import ACCESS
from distcache.streams import Streams

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
    def use(self, name):
        self.here.name = name
        yield

    def record_event(self, name, timed=False):
        with self.lock:
            self.clocks[name][name] += 1
            return Clock(self.clocks[name])

    def wait_events(self, name, marks):
        with self.lock:
            for mark in marks:
                for other, count in (mark or {}).items():
                    self.clocks[name][other] = max(self.clocks[name][other], count)

    def event_time(self, mark):
        return 0.0


def before(first: Clock, second: Clock) -> bool:
    """Whether the work up to `first` is over whenever that up to `second` is."""
    return all(second.get(name, 0) >= count for name, count in first.items())


HOT = tuple(np.arange(count) for count in (30, 6))
PLACEMENTS = (
    Placement("sharded"),
    Placement("sharded", early=False),
    Placement("replicated", "home"),
    Placement("mixed", "home", HOT),
)
Marks = dict[str, DeviceSpan]
ON_HOST = ("gather", "scatter")


def marks_of(world, **how: object) -> tuple[dict[int, Marks], dict[int, int]]:
    """Where the device work of each stage of each step was, and `move_after` of each step.

    Fails where work that changes rows is not ordered before work that reads them.
    """
    spec, lr = OPTIMIZERS["adagrad"]
    case = Scenario(TABLES, spec, lr, steps=20)
    chosen = replace(CachedSettings("data", (130,), 2, result_delay=2), **how)
    mode = make_mode(world, case, chosen)
    seen, after = {}, {}
    for step in mode.stream(case.batch(s, world.rank, world.size) for s in range(case.steps)):
        mode.train_step(step)
        marks = [mark for mark in step.context.marks if mark.name not in ON_HOST]
        seen[step.context.step] = {mark.name: mark for mark in marks}
        after[step.context.step] = step.context.move_after
    mode.close()
    for number, at in seen.items():
        for one, other in pairwise(at):
            assert before(at[one].end, at[other].start), (number, one, other)
        assert number - chosen.prefetch - 1 <= after[number] < number
        moves = [name for name in ("write_back", "fill", "share_early") if name in at]
        reads = [name for name in ("share_late", "forward_backward") if name in at]
        if after[number] >= 0:
            done = list(seen[after[number]].values())[-1]
            assert all(before(done.end, at[name].start) for name in moves), number
        if number:
            done = list(seen[number - 1].values())[-1]
            assert all(before(done.end, at[name].start) for name in reads), (number, reads)
            # Rows that left with earlier steps may be read in place from where they were written.
            assert before(seen[number - 1]["write_back"].end, at["fill"].start)
    return seen, after


def overlapping(seen: dict[int, Marks], stage: str) -> bool:
    """Whether some step's `stage` did not wait for the step that ran beside it."""
    pairs = ((list(seen[n - 1].values())[-1], seen[n]) for n in seen if n)
    return any(stage in at and not before(last.end, at[stage].start) for last, at in pairs)


@pytest.mark.parametrize("schedule", ["overlapped", "serial"])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_every_hand_over_is_ordered(monkeypatch, prefetch: int, schedule: str) -> None:
    monkeypatch.setattr(tables, "Streams", Clocks)
    world = open_world("cpu", "gloo", 60)
    stages = ["write_back", "fill", "forward_backward", "sync", "apply"]
    for access in ACCESS:
        seen, _ = marks_of(world, prefetch=prefetch, schedule=schedule, access=access)
        assert all(list(at) == stages for at in seen.values())
        assert overlapping(seen, "fill") == (schedule == "overlapped" and prefetch > 0)
    close_world(world)


def on_ranks(rank: int, size: int) -> None:
    """In every placement early rows, and fills, go beside the steps where they may."""
    tables.Streams = Clocks  # type: ignore[misc]
    world = open_world("cpu", "gloo", 60)
    for prefetch, schedule in ((0, "overlapped"), (2, "overlapped"), (1, "serial")):
        beside = schedule == "overlapped" and prefetch > 0
        for placement, early in zip(PLACEMENTS, (True, False, False, True), strict=True):
            how = {"prefetch": prefetch, "schedule": schedule, "placement": placement}
            seen, _ = marks_of(world, slots=(300,), **how)
            found = overlapping(seen, "share_early"), overlapping(seen, "fill")
            assert found == (early and beside, beside), how
    close_world(world)


def test_rows_on_their_way_between_ranks_are_ordered() -> None:
    run_ranks(on_ranks, 2)
