"""Runs of mode `data` with each rank's counters, and the replay of what they should count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from ranks import run_ranks
from scenarios import SmallNet
from simulator import PlannerSettings, SimulatedWorld

from distcache.cli.compose import compose_overrides, to_config
from distcache.comm.world import close_world, open_world
from distcache.cost.traffic import RowFormat, replicated_bytes, sharded_bytes
from distcache.data.batch import BatchSource
from distcache.engine.groups import Placement, group_bags, make_groups, region_slots
from distcache.layout import TableSpec, group_tables
from distcache.optim import row_update
from distcache.parallel.base import OptimizerSpec
from distcache.parallel.cached import CachedParallel, CachedSettings
from distcache.step_plan import StepPlan
from distcache.trainer import build
from distcache.trainer.schedule import make_schedule


@dataclass(frozen=True)
class Run:
    """A short run. `data`: overrides of groups `data` and `model`; `slots`: C of each group;
    `evals`: an evaluation of two steps after every so many training steps, 0: none."""

    data: tuple[str, ...]
    slots: tuple[int, ...]
    placement: Placement
    optimizer: str = "adagrad"
    lookahead: int = 3
    prefetch: int = 1
    steps: int = 12
    evals: int = 0

    def source(self) -> tuple[BatchSource, list[TableSpec]]:
        """The data, and its tables."""
        config = to_config(compose_overrides(["trainer.device=cpu", *self.data]))
        source = build.build_source(config)
        return source, build.build_tables(config, source)

    def order(self, source: BatchSource) -> list[tuple[str, int]]:
        """The steps in order."""
        eval_steps = 2 if self.evals else 0
        schedule = make_schedule(source, 0, self.steps, self.evals or None, eval_steps)
        return list(schedule.order())


def mixed(source: BatchSource, tables: Sequence[TableSpec], share: float, **changes: Any):
    """The placement `mixed` with that share of each table's rows, the most frequent of a batch."""
    ids = source.train_batch(0, 0, 1).ids
    starts, hot = ids.offsets[:: ids.batch_size].tolist(), []
    for table, low, high in zip(tables, starts, starts[1:], strict=False):
        found, counts = np.unique(ids.values[low:high].numpy(), return_counts=True)
        first = found[np.argsort(-counts, kind="stable")]
        hot.append(np.sort(first[: max(1, round(share * table.rows))]).astype(np.int64))
    return Placement("mixed", hot=tuple(hot), **changes)


ROW_BYTES, REPLY_BYTES, HEADER_NUMBERS, CONTROL_NUMBERS = 4, 4, 8, 2
"""Of planning: a row asked for, an answer about it, numbers of a header besides counts, and of the
loss and the wish to stop."""


@dataclass(frozen=True)
class Region:
    """The replicated, or the sharded, rows of a step of one group. All int64.

    `asked` `[W, W]`: distinct rows that each rank (first index) names at each home; `rows` `[W]`:
    distinct rows of each home; `fetched`, `written` `[W]`: of them, rows that it reads from its
    store, and dirty rows that leave for them; `late` `[W, W]`: sharded rows that each home (first
    index) sends to each rank after the step before, None for replicated ones.
    """

    asked: np.ndarray
    rows: np.ndarray
    fetched: np.ndarray
    written: np.ndarray
    late: np.ndarray | None = None

    def sent(self, row: RowFormat) -> np.ndarray:
        """Bytes of rows and row gradients, int64 `[W, W]`, from rank (first index) to rank."""
        if self.late is None:
            home = (to_all(self.fetched), self.asked, to_all(self.rows))
            flow = sum(replicated_bytes(row, *home).values())
        else:
            flow = sum(sharded_bytes(row, self.late, self.asked.T, self.asked).values())
        return flow - np.diag(np.diag(flow))  # without what ranks keep


def to_all(rows: np.ndarray) -> np.ndarray:
    """What each home sends to every rank, `[W, W]` of `[W]`."""
    return np.repeat(rows[:, None], len(rows), axis=1)


def regions_of(plans: Sequence[StepPlan], written: Sequence[np.ndarray]) -> list[Region]:
    """What the plans of all ranks say; `written`: of replicated and of sharded rows, by home."""
    found, shards = [], [plan.shard for plan in plans]
    for place, plan in enumerate(plans):
        assert plan.source_counts == tuple(other.touched_counts[place] for other in plans)
    if len(written[0]):
        asked = np.array([plan.touched_counts for plan in plans])
        fetched = np.array([len(plan.fetch_rows) for plan in plans])
        found.append(Region(asked, np.array(plans[0].home_counts), fetched, written[0]))
    if shards[0] is None:
        return found
    for place, shard in enumerate(shards):
        assert shard.source_counts == tuple(other.counts[place] for other in shards)
        late = tuple(other.late.send_counts[place] for other in shards)
        assert shard.late.receive_counts == late
        if shard.early is not None:
            both = np.add(shard.early.send_counts, shard.late.send_counts)
            assert tuple(both) == shard.source_counts
    columns = [(s.counts, len(s.slots), len(s.fetch_rows), s.late.send_counts) for s in shards]
    asked, rows, fetched, late = map(np.array, zip(*columns, strict=True))
    return [*found, Region(asked, rows, fetched, written[1], late)]


class StepTraffic(NamedTuple):
    """What ranks send in a step of all groups, int64 `[W]` bytes by rank: of rows and row gradients
    (`sent`), of `planning`, and what homes read from and write to their stores for it."""

    kind: str
    sent: np.ndarray
    planning: np.ndarray
    host_read: np.ndarray
    host_written: np.ndarray


def traffic_of(kind: str, pairs: Sequence[tuple[Region, RowFormat]], headers: int) -> StepTraffic:
    """`headers`: 2 for a step that is decided in an exchange that asks for no other step, with a
    header of its own: as the last L of a stream are, and all where L is 0."""
    return StepTraffic(
        kind,
        sum(region.sent(row).sum(1) for region, row in pairs),
        planning_sent([region for region, _ in pairs], headers),
        sum(region.fetched * row.stored_bytes for region, row in pairs),
        sum(region.written * row.stored_bytes for region, row in pairs),
    )


def planning_sent(regions: Sequence[Region], headers: int) -> np.ndarray:
    """Bytes of integers that each rank sends for a step: headers, requests and decisions, and the
    loss with a flag, on one node (on several, homes also send masks)."""
    world = len(regions[0].rows)
    if world == 1:
        return np.zeros(1, dtype=np.int64)
    flow = sum(region.asked * ROW_BYTES + region.asked.T * REPLY_BYTES for region in regions)
    for region in regions:
        if region.late is None:
            flow = flow + to_all(region.rows + region.fetched) * REPLY_BYTES
    numbers = HEADER_NUMBERS + len(regions) * (3 + world)
    left = flow.sum(1) - np.diag(flow)
    return left + 8 * (world - 1) * (headers * numbers + CONTROL_NUMBERS)


def replayed(run: Run, world: int) -> list[StepTraffic]:
    """What the planner alone says."""
    source, tables = run.source()
    update = row_update(run.optimizer, 0.0)
    dims = [tables[members[0]].dim for members in group_tables(tables)]
    groups, rows, worlds = make_groups(tables, source.features, world), [], []
    if world > 1:
        groups = run.placement.groups(groups)
    for group, slots, dim in zip(groups, run.slots, dims, strict=True):
        found = region_slots(group, slots)
        early = run.placement.early and run.prefetch > 0
        more = {"hot": group.hot, "replicated": found.replicated, "early": early}
        settings = PlannerSettings(found.all, run.lookahead, run.prefetch, **more)
        worlds.append(SimulatedWorld(group.layout, settings))
        rows.append(RowFormat(dim, update.state_width(dim), state=run.placement.state))
    kinds, steps = [], []

    def decided(plans: Sequence[list[StepPlan]], headers: int) -> None:
        """Note a step, of which the plans of each group are given."""
        groups = zip(plans, worlds, rows, strict=True)
        pairs = [(of, row) for own, home, row in groups for of in regions_of(own, home.written)]
        steps.append(traffic_of(kinds[len(steps)], pairs, headers))

    for kind, index in run.order(source):
        draw = source.train_batch if kind == "train" else source.eval_batch
        ids = [draw(index, rank, world).ids for rank in range(world)]
        kinds.append(kind)
        named = [[group_bags(group, part, torch.float32).rows for part in ids] for group in groups]
        added = [home.add(part, kind) for home, part in zip(worlds, named, strict=True)]
        for plans in zip(*added, strict=True):
            decided(plans, 2 if run.lookahead == 0 else 1)
    for plans in zip(*(home.finish() for home in worlds), strict=True):
        decided(plans, 2)
    return steps


def _train(rank: int, size: int, runs: Sequence[Run]) -> list[dict[str, Any]]:
    world = open_world("cpu", timeout_s=60)
    found = []
    for run in runs:
        source, tables = run.source()
        width = sum(table.dim for table in tables)
        spec = OptimizerSpec(run.optimizer)
        ahead = {"lookahead": run.lookahead, "prefetch": run.prefetch}
        settings = CachedSettings("data", run.slots, **ahead, placement=run.placement)
        model = SmallNet(source.dense_features, width)
        mode = CachedParallel(world, tables, source.features, model, spec, settings)
        mode.set_lr(0.01, 0.01)
        draw = {"train": source.train_batch, "eval": source.eval_batch}
        batches = (draw[kind](index, rank, size) for kind, index in run.order(source))
        for step in mode.stream(batches):
            mode.eval_step(step) if step.batch.kind == "eval" else mode.train_step(step)
        sent = {**mode.counters.values(), "summary": mode.summary()}
        sent["host_read"] = sum(of.counts.host_to_device_bytes for of in mode.rows)
        sent["host_written"] = sum(of.counts.device_to_host_bytes for of in mode.rows)
        found.append(sent)
        mode.close()
    close_world(world)
    return found


def counted(runs: Sequence[Run], world: int, timeout: float = 120) -> list[list[dict[str, Any]]]:
    """The counters of `runs`, one after the other: for each run, those of every rank."""
    by_rank = run_ranks(_train, world, list(runs), timeout=timeout)
    return [[by_rank[rank][place] for rank in range(world)] for place in range(len(runs))]


def placements(run: Run, share: float = 0.02) -> list[Run]:
    """`run` in every placement, with its state on every rank and at home."""
    source, tables = run.source()
    found = [Placement(), Placement("replicated", "home"), Placement("sharded")]
    found += [mixed(source, tables, share), mixed(source, tables, share, state="home")]
    found += [Placement("sharded", early=False)]
    homes = {"replicated": 1, "mixed": 2, "sharded": 2}  # a sharded row has a slot once
    slots = {kind: tuple(c // count for c in run.slots) for kind, count in homes.items()}
    return [replace(run, placement=p, slots=slots[p.kind]) for p in found]
