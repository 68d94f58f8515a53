"""Runs of mode `data` with each rank's counters, and the replay of what they should count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from ranks import run_ranks
from scenarios import SmallNet

from distcache.cli.compose import compose_overrides, to_config
from distcache.comm.world import close_world, open_world
from distcache.data.batch import BatchSource
from distcache.engine.groups import Placement, group_bags, make_groups, region_slots
from distcache.layout import TableSpec, group_tables
from distcache.optim import row_update
from distcache.parallel.base import OptimizerSpec
from distcache.parallel.cached import CachedParallel, CachedSettings
from distcache.replay import PlannerSettings, RowFormat, StepTraffic, TrafficPlanner
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
    starts = ids.offsets[:: ids.batch_size].tolist()
    hot = []
    for place, table in enumerate(tables):
        values = ids.values[starts[place] : starts[place + 1]].numpy()
        found, counts = np.unique(values, return_counts=True)
        first = found[np.argsort(-counts, kind="stable")]
        hot.append(np.sort(first[: max(1, round(share * table.rows))]).astype(np.int64))
    return Placement("mixed", hot=tuple(hot), **changes)


def replayed(run: Run, world: int) -> list[StepTraffic]:
    """What the planner alone says."""
    source, tables = run.source()
    update = row_update(run.optimizer, 0.0)
    dims = [tables[members[0]].dim for members in group_tables(tables)]
    groups, bytes_of, planners = make_groups(tables, source.features, world), [], []
    if world > 1:
        groups = run.placement.groups(groups)
    for group, slots, dim in zip(groups, run.slots, dims, strict=True):
        found = region_slots(group, slots)
        settings = PlannerSettings(
            found.all,
            run.lookahead,
            run.prefetch,
            hot=group.hot,
            replicated=found.replicated,
            early=run.placement.early and run.prefetch > 0,
        )
        planners.append(TrafficPlanner(group.layout, settings))
        bytes_of.append(RowFormat(dim, update.state_width(dim), state=run.placement.state))
    counts = []
    for kind, index in run.order(source):
        draw = source.train_batch if kind == "train" else source.eval_batch
        ids = [draw(index, rank, world).ids for rank in range(world)]
        rows = [[group_bags(group, part, torch.float32).rows for part in ids] for group in groups]
        added = [planner.add(part, kind) for planner, part in zip(planners, rows, strict=True)]
        counts += [(step, run.lookahead == 0) for step in zip(*added, strict=True)]
    left = [planner.finish() for planner in planners]
    counts += [(step, True) for step in zip(*left, strict=True)]
    return [StepTraffic(step, tuple(bytes_of), alone) for step, alone in counts]


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
        moved = [of.counts for of in mode.rows]
        found.append(
            {
                **mode.counters.values(),
                "host_read": sum(count.host_to_device_bytes for count in moved),
                "host_written": sum(count.device_to_host_bytes for count in moved),
                "summary": mode.summary(),
            }
        )
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
