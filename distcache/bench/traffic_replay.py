"""The replays of the traffic bench: synthetic ids through the planners of all ranks, no tensors."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from distcache.bench.report import Record
from distcache.cost.cluster import Cluster, Link
from distcache.cost.demand import Demand, demand_at, zipf_sources
from distcache.cost.predict import Choice, Settings, choose_placement, predict
from distcache.data.batch import Batch, BatchSource
from distcache.data.samplers import BatchSlice
from distcache.data.synthetic import SyntheticSource, SyntheticSpec, ZipfTables
from distcache.engine.groups import (
    MIXED,
    REPLICATED,
    SHARDED,
    Placement,
    TableGroup,
    group_bags,
    make_groups,
    region_slots,
)
from distcache.layout import RowLayout, TableSpec
from distcache.planner.policy import DEFAULT, Policy
from distcache.replay import Load, PlannerSettings, RowFormat, StepTraffic, TrafficPlanner

SPEED_STEPS, SPEED_REPEATS = 3, 3


@dataclass(frozen=True)
class TrafficSettings:
    """A run of mode `data`. `slots`: C per rank of each group; `state_widths`: S of each group;
    `itemsize`: bytes of an element."""

    world_size: int
    slots: tuple[int, ...]
    placement: Placement
    state_widths: tuple[int, ...]
    lookahead: int = 8
    prefetch: int = 1
    policy: Policy = DEFAULT
    itemsize: int = 4


def replay_traffic(
    source: BatchSource,
    tables: Sequence[TableSpec],
    settings: TrafficSettings,
    order: Iterable[tuple[str, int]],
) -> Iterator[StepTraffic]:
    """What every rank sends in each step; `order`: (`train` or `eval`, index) of the batches.

    Each rank takes its slice of a global batch, as in training. Memory: the index of all homes (8
    bytes per row, and what the policy keeps) and all their slots. Raises StepTooLargeError as
    training would.
    """
    world = settings.world_size
    groups = make_groups(tables, source.features, world)
    if world > 1:
        groups = settings.placement.groups(groups)
    planners = [
        TrafficPlanner(group.layout, _planner_settings(group, slots, settings))
        for group, slots in zip(groups, settings.slots, strict=True)
    ]
    formats = tuple(
        RowFormat(group.dim, state, settings.itemsize, settings.placement.state)
        for group, state in zip(groups, settings.state_widths, strict=True)
    )
    for kind, index in order:
        draw = source.train_batch if kind == "train" else source.eval_batch
        ids = [draw(index, rank, world).ids for rank in range(world)]
        found = []
        for group, planner in zip(groups, planners, strict=True):
            rows = [group_bags(group, part, torch.float32).rows for part in ids]
            found.append(planner.add(rows, kind))
        alone = settings.lookahead == 0
        yield from (StepTraffic(counts, formats, alone) for counts in zip(*found, strict=True))
    found = [planner.finish() for planner in planners]
    yield from (StepTraffic(counts, formats, alone=True) for counts in zip(*found, strict=True))


def _planner_settings(group: TableGroup, slots: int, settings: TrafficSettings) -> PlannerSettings:
    found, early = region_slots(group, slots), settings.placement.early
    return PlannerSettings(
        found.all,
        settings.lookahead,
        settings.prefetch,
        settings.policy,
        hot=group.hot,
        replicated=found.replicated,
        early=early and settings.prefetch > 0,
    )


@dataclass(frozen=True)
class Shape:
    """What is replayed: tables, b samples per rank, width D, C slots per rank, L and P."""

    table_rows: tuple[int, ...]
    zipf: float
    batch: int
    dim: int
    slots: int
    lookahead: int
    prefetch: int
    seed: int

    @property
    def tables(self) -> list[TableSpec]:
        """One for each feature."""
        return [
            TableSpec(f"t_cat_{i}", rows, self.dim, (f"cat_{i}",))
            for i, rows in enumerate(self.table_rows)
        ]

    def source(self, world: int) -> SyntheticSource:
        """Ids of W ranks."""
        spec = SyntheticSpec(
            self.table_rows, zipf=self.zipf, global_batch_size=self.batch * world, seed=self.seed
        )
        return _IdsAlone(spec)

    def hottest(self, share: float) -> tuple[np.ndarray, ...]:
        """The ids of each table, ascending, that are among the likeliest `share` of all rows."""
        wanted = max(1, round(share * sum(self.table_rows)))
        law = ZipfTables(self.table_rows, self.zipf, 0)
        each = [min(rows, wanted) for rows in self.table_rows]
        chance = [np.diff(law.mass_below(t, np.arange(n + 1))) for t, n in enumerate(each)]
        table = np.repeat(np.arange(len(each)), each)
        first = np.argsort(-np.concatenate(chance), kind="stable")[:wanted]
        counts = np.bincount(table[first], minlength=len(each))
        return self.of_ranks(counts.tolist())

    def of_ranks(self, counts: Sequence[int]) -> tuple[np.ndarray, ...]:
        """The likeliest ids of each table, so many, ascending."""
        source = self.source(1)
        return tuple(np.sort(source.hottest(t, count)) for t, count in enumerate(counts))

    def demand(self, world: int) -> Demand:
        """What a step of W ranks is expected to need."""
        tables = self.table_rows
        each = [self.dim] * len(tables), [1.0] * len(tables), [self.zipf] * len(tables)
        return demand_at(zipf_sources(tables, *each), [0] * len(tables), self.batch, world)

    def choice(self, world: int) -> Choice:
        """What `cache.placement=auto cache.objective=bytes` takes."""
        return choose_placement(self.demand(world), _cluster(world), self.settings, "bytes")

    @property
    def settings(self) -> Settings:
        """For predictions of a warm cache."""
        return Settings((self.slots,), window=self.lookahead, prefetch=self.prefetch)


def _cluster(world: int) -> Cluster:
    link = Link(1e10)
    return Cluster(world, link, link)  # bytes do not depend on it


class _IdsAlone(SyntheticSource):
    """The ids of the synthetic stream; dense features and labels take most of its time."""

    def take(self, samples: np.ndarray, part: BatchSlice) -> Batch:
        ids = self.ids_of(samples, part.span.epoch)
        return part.batch(torch.empty(len(samples), 0), ids, torch.empty(len(samples)))


@dataclass(frozen=True)
class Extent:
    """How long a replay is: twice the steps after which rows begin to leave are dropped, or, where
    none leave by then, steps of `warm_ids` ids; then `steps` are counted."""

    steps: int
    warm_ids: int


def placement_of(shape: Shape, name: str, share: float) -> tuple[Placement, dict[str, int]]:
    """A fixed placement by name, and the replicated rows of `mixed`, {table: K}."""
    if name != MIXED:
        return Placement(name), {}
    hot = shape.hottest(share)
    counts = {table.name: len(ids) for table, ids in zip(shape.tables, hot, strict=True)}
    return Placement(MIXED, hot=hot), counts


def replay_record(
    shape: Shape, world: int, name: str, placed: tuple[Placement, dict[str, int]], extent: Extent
) -> Record:
    """One replay, and what the cost model predicts of it."""
    placement, counts = placed
    settings = TrafficSettings(
        world, (shape.slots,), placement, (0,), shape.lookahead, shape.prefetch
    )
    order = (("train", step) for step in itertools.count())
    steps = replay_traffic(shape.source(world), shape.tables, settings, order)
    dropped, full, ids = 0, 0, 0
    least = shape.lookahead + shape.prefetch + 1
    for step in steps:
        dropped, ids = dropped + 1, ids + step.counts[0].ids
        if not full and step.written_back > 0:
            full = dropped
        warm = dropped >= 2 * full if full else ids >= extent.warm_ids
        if dropped >= least and warm:
            break
    found = list(itertools.islice(steps, extent.steps))
    expected = predict(placement.kind, shape.demand(world), _cluster(world), shape.settings, counts)
    return {
        "kind": "replay",
        "world": world,
        "placement": name,
        "hot_rows": sum(counts.values()),
        "dropped": dropped,
        "full": bool(full),
        "steps": len(found),
        **_means(found),
        "home_with_adam": _with_adam(shape.dim, found),
        "predicted": {
            "collective": expected.collective_bytes,
            "stages": {e.stage: e.nbytes for e in expected.traffic.exchanges},
            "host_read": expected.traffic.host_in,
        },
    }


def _means(steps: Sequence[StepTraffic]) -> Record:
    """Bytes per rank and step, by stage, and loads over the ranks."""
    count, world = len(steps), len(steps[0].sent)
    stages: dict[str, float] = {}
    for step in steps:
        for stage, flow in step.flows.items():
            stages[stage] = stages.get(stage, 0.0) + float(flow.sum()) / world / count
    loads = {
        "home_rows": Load.of(sum(step.home_rows for step in steps) / count),
        "sent": Load.of(sum(step.sent for step in steps) / count),
        "received": Load.of(sum(step.received for step in steps) / count),
        "planning": Load.of(sum(step.planning for step in steps) / count),
        "host_read": Load.of(sum(step.host_read for step in steps) / count),
    }
    return {
        "stages": stages,
        "fetched": sum(step.fetched for step in steps) / count,
        **{f"{key}_mean": load.mean for key, load in loads.items()},
        **{f"{key}_ratio": load.ratio for key, load in loads.items()},
    }


def _with_adam(dim: int, steps: Sequence[StepTraffic]) -> Record:
    """Bytes per rank and step of these replicated rows with Adam's state: on all ranks, at home."""
    found = {}
    for state in ("replicated", "home"):
        row = RowFormat(dim, 2 * dim, state=state)
        sent = [StepTraffic(step.counts, (row,)).sent for step in steps]
        found[state] = float(np.mean(sent))
    return found


def speed_records(shape: Shape, worlds: Sequence[int]) -> list[Record]:
    """CPU seconds of planning and counting, by number of ranks: the least of interleaved turns."""
    layouts = {world: RowLayout(shape.tables, world) for world in worlds}
    seconds: dict[int, list[float]] = {world: [] for world in worlds}
    ids = dict.fromkeys(worlds, 0)
    for _ in range(SPEED_REPEATS):
        for world in worlds:
            stream = list(_rows(shape, layouts[world], SPEED_STEPS))
            ids[world] = sum(len(part) for ranks in stream for part in ranks)
            slots = min(shape.slots, layouts[world].local_rows)
            config = PlannerSettings(slots, 1, 1, hot=np.empty(0, np.int64))
            planner = TrafficPlanner(layouts[world], config)
            started = time.process_time()
            for rows in stream:
                planner.add(rows)
            planner.finish()
            seconds[world].append(time.process_time() - started)
    return [
        {"kind": "speed", "world": world, "ids": ids[world], "seconds": min(seconds[world])}
        for world in worlds
    ]


def _rows(shape: Shape, layout: RowLayout, steps: int) -> Iterator[list[np.ndarray]]:
    source, world = shape.source(layout.world_size), layout.world_size
    for step in range(steps):
        parts = [source.train_batch(step, rank, world).ids for rank in range(world)]
        yield [
            part.values.numpy() + np.repeat(layout.offsets[:-1], part.batch_size) for part in parts
        ]


def hybrid_record(shape: Shape, world: int) -> Record:
    """What hybrid table-wise sends, exactly: pooled vectors and their gradients; ids and lengths.

    Whole tables as mode `hybrid` deals them, the largest first, each to the rank that holds least.
    A rank with t of the T tables sends t vectors for each sample of the other ranks, and T - t
    gradients, and as many ids (8 bytes) and lengths (4), for each of its own samples.
    """
    held = tables_of_ranks(shape.table_rows, world)
    count, vector = len(shape.table_rows), shape.batch * shape.dim * 4
    sent = held * vector * (world - 1) + (count - held) * vector
    load = Load.of(sent)
    index = (count - held) * shape.batch * (8 + 4)
    return {
        "kind": "hybrid",
        "world": world,
        "sent_mean": load.mean,
        "sent_ratio": load.ratio,
        "planning_mean": float(index.mean()),
        "without_tables": int((held == 0).sum()),
        "most_tables": int(held.max()),
    }


def tables_of_ranks(table_rows: Sequence[int], world: int) -> np.ndarray:
    """How many whole tables each rank holds; int64 `[W]`."""
    load, held = [0] * world, np.zeros(world, dtype=np.int64)
    for rows in sorted(table_rows, reverse=True):
        rank = load.index(min(load))
        load[rank] += rows
        held[rank] += 1
    return held


PLACEMENTS = (REPLICATED, SHARDED, MIXED)
"""Fixed placements that are replayed."""
