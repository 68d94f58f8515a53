"""Milliseconds per step of the whole plan: `python -m benchmarks.planner`, or under torchrun
for several ranks.

Each rank's planner plans a click stream in steady eviction as it does beside training, exchange
included, in turns with `np.unique`, which only finds a batch's distinct rows.
`against=<another checkout>` compares the planning threads of two checkouts instead, beside training
without a dense model.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from benchmarks import against
from benchmarks.modes import RowCounts
from benchmarks.report import RATIOS, Bench, Column, Record, Section, of_kind, option, show_spread
from benchmarks.step import StepOptions, row_count
from benchmarks.turns import SIZES, BatchBank, Contender, Feed, Turns, compose_setting, opened_world
from distcache.comm.link import CollectiveCounters, Link, host_link
from distcache.comm.world import World
from distcache.config.tree import Config
from distcache.engine import planning
from distcache.engine.groups import (
    MIXED,
    REPLICATED,
    SHARDED,
    Placement,
    TableGroup,
    TableSettings,
    group_bags,
    make_groups,
    region_slots,
)
from distcache.errors import ConfigError
from distcache.planner.victims import DEFAULT
from distcache.popularity.slots import cache_slots
from distcache.sizing.resolve import resolve_placement
from distcache.trainer import build

BATCHES_AHEAD = 3
"""Batches that a planner reads beyond the window of the step that it plans, at most."""


@dataclass(frozen=True)
class PlannerOptions:
    """Keys of the command line."""

    size: str = option("kaggle", "tables", choices=tuple(SIZES))
    batch: int = option(16384, "samples of a step over all ranks", minimum=1)
    placements: tuple[str, ...] = option(
        (REPLICATED,), "with one rank all are replicated", choices=(REPLICATED, SHARDED, MIXED)
    )
    share: float = option(0.0005, "share of all rows, the hottest ones, that mixed replicates")
    steps: int = option(10, "steps of each contender in a repetition", minimum=1)
    repetitions: int = option(7, "turns of each contender", minimum=1)
    warmup: int = option(400, "most steps before; they end once every miss evicts", minimum=1)
    threads: int = option(1, "torch threads of a rank", minimum=1)
    against: str = option("", "another checkout, whose planner takes turns with this one's")
    ranks: int = option(1, "ranks of each checkout with against=; else use torchrun", minimum=1)
    out: str = option("", "the report, a .md file; JSON lines go beside it")


def measure(options: PlannerOptions, overrides: tuple[str, ...]) -> list[Record]:
    """Return all records of the report; called by every rank."""
    sizes = (f"data.global_batch_size={options.batch}", *overrides)
    config = compose_setting(options.size, sizes)
    if options.against:
        return measure_against(options, overrides)
    if not 0 < options.share < 1:
        raise ConfigError(f"share={options.share} must lie between 0 and 1")
    with opened_world("cpu") as world:
        contenders, bank = build_contenders(options, config, world)
        with closing(Turns(contenders, world, bank)) as turns:
            turns.warm_up(1, options.warmup)
            return turns.run(options.repetitions, 0, options.steps)


def measure_against(options: PlannerOptions, overrides: tuple[str, ...]) -> list[Record]:
    """Compare two checkouts in training without a dense model; keep the planning threads."""
    step_options = StepOptions(
        size=options.size,
        batch=options.batch,
        modes=("data",),
        model="embeddings",
        widths=(4,),
        steps=options.steps,
        lead=0,
        repetitions=options.repetitions,
        warmup=options.warmup,
        threads=options.threads,
        against=options.against,
        ranks=options.ranks,
    )
    sizes = (f"data.global_batch_size={options.batch}", *overrides)
    config = compose_setting(options.size, sizes)
    records = against.measure_steps(step_options, config, overrides)
    return [record for record in records if record.get("thread", "planning") == "planning"]


def build_contenders(
    options: PlannerOptions, config: Config, world: World
) -> tuple[list[Contender], BatchBank]:
    """Build a planner for each placement, and the contender of `np.unique`."""
    source = build.build_source(config)
    tables = build.build_tables(config, source)
    (group,) = make_groups(tables, source.features, world.size)
    cache = config.cache
    sizes = [(group.layout.rows, group.dim, 0)]
    slots = cache_slots(cache.rows, cache.ratio, cache.bytes, sizes, 4, world.size)
    bank = BatchBank(source, world.rank, world.size)
    contenders: list[Contender] = []
    for kind in options.placements if world.size > 1 else (REPLICATED,):
        share = options.share if kind == MIXED else None
        placed_cache = replace(cache, placement=kind, replicated_share=share, state="replicated")
        parallel = replace(config.parallel, mode="data")
        placed = replace(config, cache=placed_cache, parallel=parallel)
        placement = resolve_placement(placed, world, (tables, slots, None), source, nn.Identity())
        placed_group = placement.groups([group])[0] if world.size > 1 else group
        contenders.append(PlanContender(kind, (placed_group, slots[0]), config, world, bank.feed()))
    contenders.append(UniqueContender(group, bank.feed()))
    return contenders, bank


class PlanContender(Contender):
    """This rank's planner in a placement; all ranks step alike."""

    def __init__(
        self,
        kind: str,
        placed: tuple[TableGroup, int],
        config: Config,
        world: World,
        feed: Feed,
    ) -> None:
        """Take the group of tables and the device's slots, the same in each placement."""
        self.name = f"plan, {kind}"
        self.ids = 0
        group, device_slots = placed
        lookahead = int(config.cache.lookahead)
        prefetch = int(config.cache.prefetch)
        self.steps_ahead = 1 + lookahead + prefetch + BATCHES_AHEAD
        self._world = world
        self._rows = RowCounts()
        self._table_rows = group.layout.rows
        self._counters = CollectiveCounters()
        slots = region_slots(group, device_slots)
        self._regions = planning.home_regions(
            [(group, slots)], world.rank, prefetch, DEFAULT, [None]
        )
        self._planner = planning.StreamPlanner(
            Link(world, world.planning_group, self._counters, "the planning group"),
            [group],
            self._regions,
            [slots.all],
            TableSettings(lookahead=lookahead, prefetch=prefetch, placement=Placement(kind)),
        )
        self._plans = self._planner.planned(feed, lambda: False)

    def step(self) -> None:
        """See `Contender.step`."""
        plans = next(self._plans).plans
        self._planner.settle()  # the next exchange of this process group may be another's
        self._rows.add(plans)
        self.ids = sum(len(plan.positions) for plan in plans)

    def meters(self) -> dict[str, Mapping[str, float]]:
        """See `Contender.meters`."""
        sent = {"planning": self._counters.planning_bytes}
        return {"rows_per_step": dict(self._rows.sums), "sent_per_step": sent}

    def is_steady(self) -> bool:
        """Return True if every row that the last step fetched evicted one."""
        return self._rows.is_steady

    def summary(self) -> Record:
        """Return size and slots of the index of all owners together."""
        index = sum(region.planner.index_bytes for region in self._regions)
        slots = sum(region.planner.slots for region in self._regions)
        of_ranks = host_link(self._world).gather_objects((index, slots), "sizes of the index")
        index, slots = (sum(values) for values in zip(*of_ranks, strict=True))
        return {"ids": self.ids, "bytes_per_row": index / self._table_rows, "slots": slots}


class UniqueContender(Contender):
    """`np.unique` of a batch's rows, which only finds the distinct ones."""

    name = "np.unique"

    def __init__(self, group: TableGroup, feed: Feed) -> None:
        self._group = group
        self._feed = feed
        self._prepared: deque[np.ndarray] = deque()

    def prepare(self, steps: int) -> None:
        """See `Contender.prepare`."""
        while len(self._prepared) < steps:
            bags = group_bags(self._group, next(self._feed).ids, torch.float32)
            rows = bags.ids.copy()
            for start, stop, first in bags.pieces[:3].T:
                rows[start:stop] += first
            self._prepared.append(rows)

    def step(self) -> None:
        """See `Contender.step`."""
        rows = self._prepared.popleft()
        np.unique(rows)
        self._ids = len(rows)

    def summary(self) -> Record:
        """Return the ids of a step."""
        return {"ids": self._ids}


SECTIONS = (
    Section(
        "Milliseconds per step",
        "Median [quartiles] over all steps, by the clock; W ranks work side by side, and each "
        "rank's ids count.",
        "mode",
        (
            Column("contender", "mode"),
            Column("ranks", "world_size"),
            Column("step ms", "step_ms", show_spread()),
            Column("M ids/s", lambda r: r["ids"] / r["step_ms"]["median"] / 1e3, ".2f"),
        ),
    ),
    RATIOS,
    Section(
        "Index, stream and exchange",
        "The index is that of all owners together; rows are per step, evictions of one owner. "
        "Bytes are of integers (headers, requests, decisions) that a rank sends for a step, the "
        "mean of all ranks.",
        lambda records: [r for r in of_kind(records, "mode") if "bytes_per_row" in r],
        (
            Column("contender", "mode"),
            Column("ranks", "world_size"),
            Column("B per row", "bytes_per_row", ".2f"),
            Column("slots", "slots", ","),
            row_count("distinct", "distinct"),
            row_count("misses", "misses"),
            row_count("evictions", "evictions"),
            Column("steady", "is_steady", str),
            Column("bytes sent", lambda r: r["sent_per_step"]["planning"], ",.0f"),
        ),
    ),
    *against.SECTIONS,
)

BENCH = Bench("Planner", PlannerOptions, measure, SECTIONS, takes_overrides=True)
main = BENCH.main

if __name__ == "__main__":
    sys.exit(main())
