"""Devices and stores of a world, in NumPy: who holds which version of a row.

Slots, movement, and the rows that travel are done as plans say; every value is the number of
updates that its row has seen, so whoever computes with an old one is found out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from plan_streams import shelves_of
from simulator import PlannerSettings, simulate

from distcache.layout import RowLayout
from distcache.planner.replicated_rows import ReplicatedRows
from distcache.step_plan import ShardPlan, StepPlan, Transfer, check_plan_fully

FREE = -1


@dataclass
class Counts:
    """Rows that came to ranks that named them, by when they travelled; fetched and moved slots."""

    early: int = 0
    late: int = 0
    fetched: int = 0
    evicted: int = 0


class Machine:
    """All devices over one store."""

    def __init__(self, layout: RowLayout, slots: int) -> None:
        self.layout, self.counts = layout, Counts()
        self.store = np.zeros(layout.rows, np.int64)
        self.row = np.full((layout.world_size, slots), FREE)
        """By rank and slot: the row there (FREE: none), and how many updates it has seen."""
        self.version = np.zeros_like(self.row)
        self.travelled: dict[int, list[dict[int, tuple[int, int]]]] = {}
        """By step and rank: for each place, the row that came there and its version."""

    def move(self, plans: list[StepPlan], busy: list[list[set[int]]], done: int) -> None:
        """Bring the rows of a step, when the steps up to `done` are applied."""
        for rank, plan in enumerate(plans):
            touched = slots_of(plan, "moved")
            for step in range(done + 1, plan.step):
                assert not touched & busy[step][rank], "movement touches a slot in flight"
        for rank, plan in enumerate(plans):
            self._evict(rank, plan, slice(None))
            if plan.shard is not None:
                self._evict(rank, plan.shard, rank)
        fetched = np.concatenate([plan.fetch_rows.numpy() for plan in plans])
        for rank, plan in enumerate(plans):
            self._fill(rank, plan.fetch_slots.numpy(), fetched)
            if plan.shard is not None:
                own = plan.shard.fetch_rows.numpy()
                self._fill(rank, plan.shard.fetch_slots.numpy(), own)
        self.travelled[plans[0].step] = [{} for _ in plans]
        if plans[0].shard is not None and plans[0].shard.early is not None:
            self.counts.early += self._send(plans, [plan.shard.early for plan in plans])

    def _evict(self, rank: int, part: StepPlan | ShardPlan, devices: slice | int) -> None:
        slots, rows = part.evict_slots.numpy(), part.evict_rows.numpy()
        assert (self.row[rank, slots] == rows).all()
        self.store[rows] = self.version[rank, slots]
        self.counts.evicted += len(rows)
        self.row[devices, slots] = FREE

    def _fill(self, rank: int, slots: np.ndarray, rows: np.ndarray) -> None:
        assert (self.row[rank, slots] == FREE).all()
        self.row[rank, slots], self.version[rank, slots] = rows, self.store[rows]
        self.counts.fetched += len(rows)

    def _send(self, plans: list[StepPlan], transfers: list[Transfer]) -> int:
        """Rows from every home to every rank that named them; how many came."""
        came, values = 0, []
        for rank, transfer in enumerate(transfers):
            slots = transfer.slots.numpy()
            assert (self.row[rank, slots] != FREE).all()
            values.append(np.stack((self.row[rank, slots], self.version[rank, slots]), axis=1))
        send = [transfer.send_counts for transfer in transfers]
        receive = [transfer.receive_counts for transfer in transfers]
        received = exchanged(values, send, receive)
        for rank, (transfer, incoming) in enumerate(zip(transfers, received, strict=True)):
            places = self.travelled[plans[0].step][rank]
            for place, value in zip(transfer.places.tolist(), incoming.tolist(), strict=True):
                assert place not in places, "a row came twice"
                places[place] = tuple(value)
            came += len(incoming)
        return came

    def run(self, plans: list[StepPlan], truth: np.ndarray) -> None:
        """Compute and apply a step; `truth` `[V]`: updates before it. Fails on a stale row."""
        if plans[0].shard is not None:
            self.counts.late += self._send(plans, [plan.shard.late for plan in plans])
        for rank, plan in enumerate(plans):
            used = plan.slots.numpy()
            rows = self.row[rank, used]
            assert (rows != FREE).all()
            assert (self.version[rank, used] == truth[rows]).all(), "stale row"
            places = self.travelled[plan.step][rank]
            assert sorted(places) == list(range(plan.leaf_rows - plan.distinct)), "a row is missing"
            for row, version in places.values():
                assert version == truth[row], "stale row from its home"
        named = [self.row[0, plans[0].slots.numpy()]]
        for rank, plan in enumerate(plans):
            self.version[rank, plan.slots.numpy()] += 1
            if plan.shard is not None:
                own = plan.shard.slots.numpy()
                self.version[rank, own] += 1
                named.append(self.row[rank, own])
        truth[np.concatenate(named)] += 1

    def flush(self) -> None:
        """Bring all that is cached to the store: each row from its home."""
        for rank, (rows, versions) in enumerate(zip(self.row, self.version, strict=True)):
            own = np.flatnonzero(rows != FREE)
            own = own[self.layout.home(rows[own]) == rank]
            self.store[rows[own]] = versions[own]


def exchanged(
    values: list[np.ndarray], send: list[tuple[int, ...]], receive: list[tuple[int, ...]]
) -> list[np.ndarray]:
    """What comes to each member in an all-to-all of `values`, each cut into `send` counts."""
    parts = [np.split(of, np.cumsum(counts)[:-1]) for of, counts in zip(values, send, strict=True)]
    lengths = [tuple(map(len, of)) for of in zip(*parts, strict=True)]
    assert lengths == list(map(tuple, receive)), "counts of the two ends differ"
    return [np.concatenate([of[to] for of in parts]) for to in range(len(values))]


def slots_of(plan: StepPlan, kinds: str) -> set[int]:
    """The slots of a device that a plan uses (`slots`), or that its movement changes (`moved`)."""
    names = ("slots",) if kinds == "slots" else ("fetch_slots", "evict_slots")
    parts = [part for part in (plan, plan.shard) if part is not None]
    return {slot for part in parts for name in names for slot in getattr(part, name).tolist()}


def replay(
    rows_by_step: list, layout: RowLayout, config: PlannerSettings, lag: Sequence[int] = ()
) -> Counts:
    """Run a stream whose step s moves `lag[s]` steps after it may (none: at once), and not later
    than it must. Fails on a stale row, a lost update, or a plan that breaks a law."""
    plans_by_step = list(simulate(layout, config, rows_by_step))
    lag = lag or [0] * len(plans_by_step)
    truth = np.zeros(layout.rows, np.int64)
    machine = Machine(layout, config.slots)
    busy = [[slots_of(plan, "slots") for plan in plans] for plans in plans_by_step]
    moved = 0
    for step, plans in enumerate(plans_by_step):
        while moved < len(plans_by_step):
            due = plans_by_step[moved][0].move_after + 1 + lag[moved]
            if min(due, moved) > step and moved > step:
                break
            assert plans_by_step[moved][0].move_after < step, "rows of a step move too late for it"
            machine.move(plans_by_step[moved], busy, step - 1)
            moved += 1
        check_step(plans_by_step, rows_by_step, step, layout, config)
        machine.run(plans, truth)
    machine.flush()
    expected = np.zeros(layout.rows, np.int64)
    for rows in rows_by_step:
        expected[np.unique(np.concatenate(rows))] += 1
    assert (machine.store == expected).all(), "a lost update"
    return machine.counts


def check_step(
    plans_by_step: list, rows_by_step: list, step: int, layout: RowLayout, config: PlannerSettings
) -> None:
    """One step's regions, order, sources and transfers against a plain computation."""
    plans, world = plans_by_step[step], layout.world_size
    rows = [part.tolist() for part in rows_by_step[step]]
    sharding = config.hot is not None
    hot = set(config.hot.tolist() if sharding else range(layout.rows))
    replicated, after = config.replicated if sharding else config.slots, plans[0].move_after
    assert after < step and (not sharding or step - config.prefetch - 1 <= after)
    urgent = {row for s in range(after + 1, step) for part in rows_by_step[s] for row in part}
    seen = list(dict.fromkeys(row for part in rows for row in part))
    homes = dict(zip(seen, layout.home(np.array(seen, np.int64)).tolist(), strict=True))
    among = ReplicatedRows(layout, config.hot) if sharding else None
    by_home = [[row for row in seen if homes[row] == home] for home in range(world)]

    def by_shelf(rows: list[int], number: Callable[[np.ndarray], np.ndarray]) -> list[int]:
        """Rows of one home by shelf, else as they come."""
        shelf = dict(
            zip(rows, shelves_of(number(np.array(rows, np.int64)), config.shelves), strict=True)
        )
        return sorted(rows, key=shelf.__getitem__)

    def near_on_shelves(rows: list[int]) -> list[int]:
        return by_shelf(rows, lambda of: among.local(of) if among else layout.local(of))

    near = [near_on_shelves([row for row in own if row in hot]) for own in by_home]
    tail = [by_shelf([row for row in own if row not in hot], layout.local) for own in by_home]
    parts = [part for plan in plans for part in (plan, plan.shard) if part is not None]
    fetched = {row for part in parts for row in part.fetch_rows.tolist()}
    for rank, plan in enumerate(plans):
        check_plan_fully(plan, config.slots)
        named = set(rows[rank])
        asked = list(dict.fromkeys(rows[rank]))
        mine = [by_shelf([row for row in asked if row in set(own)], layout.local) for own in tail]
        leaf = [row for own in (*near, *mine) for row in own]
        assert [leaf[i] for i in plan.positions] == rows[rank]
        assert plan.lookup_hits == sum(row not in fetched for row in rows[rank])
        assert plan.move_after == after and (plan.slots == plans[0].slots).all()
        assert (plan.slots[plan.home_slice(rank)] // max(1, replicated // world) == rank).all()
        for source, part in enumerate(split(plan.source_rows, plan.source_counts)):
            theirs = [row for row in dict.fromkeys(rows[source]) if row in set(near[rank])]
            assert [near[rank][i] for i in part] == near_on_shelves(theirs)
        shard = plan.shard
        if shard is None:
            assert not sharding and named <= hot
            continue
        assert list(shard.counts) == [len(own) for own in mine]
        assert shard.distinct == sum(map(len, tail))
        assert shard.misses == sum(len(p.shard.fetch_rows) for p in plans)
        assert all(slot in range(replicated, config.slots) for slot in shard.slots.tolist())
        assert len(shard.slots) == len(tail[rank])
        for source, part in enumerate(split(shard.source_rows, shard.source_counts)):
            theirs = [row for row in dict.fromkeys(rows[source]) if row in set(tail[rank])]
            theirs = by_shelf(theirs, layout.local)
            assert [tail[rank][i] for i in part] == theirs, "gradients of rows in another order"
        flat = [row for own in mine for row in own]
        if shard.early is None:
            assert not config.early and len(shard.late.places) == len(flat)
            continue
        early = {flat[i] for i in shard.early.places}
        assert early == set(flat) - urgent, "a row waits that need not, or does not that must"


def split(values: torch.Tensor, counts: Sequence[int]) -> list[list[int]]:
    """Values by rank."""
    return [part.tolist() for part in values.split(list(counts))]
