"""Measurement of a cluster by its own ranks: links, rows, the dense part and the host threads."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from distcache import ops
from distcache.comm import link as comm
from distcache.comm.link import ROWS, CollectiveCounters, run_on_all_ranks
from distcache.comm.world import World
from distcache.data.synthetic import SyntheticSource, SyntheticSpec
from distcache.engine.groups import RegionSlots, TableSettings, make_groups
from distcache.engine.planning import StreamPlanner, home_regions, planner_threads
from distcache.layout import TableSpec
from distcache.ops.reference import put_rows, take_rows
from distcache.optim import RowUpdate, row_update
from distcache.parallel.cached import CachedParallel, CachedSettings
from distcache.planner.victims import DEFAULT
from distcache.sizing.cluster import HOST, Cluster, Compute, HostTimes, Link
from distcache.sizing.cost import GROUP_LAUNCHES, LAUNCHES, RANK_LAUNCHES

# -----------------------------------------------------------------------------
# Links, row operations and the dense part.

_TABLE_BYTES = 64 << 20
"""Bytes of the host table that rows are read from at random."""

_ROWS = 20_000
"""Rows of one timed operation."""

_SMALL, _LARGE = 1 << 12, 1 << 22
"""Bytes that a rank sends to a peer, for latency and bandwidth."""


def measure(
    world: World, dim: int, update: RowUpdate, model: nn.Module, shape: tuple[int, int, int]
) -> Cluster:
    """Measure the cluster of the ranks that run: their links, rows of `dim` elements, and
    `model(dense [b, F], pooled [b, P]) -> logits [b]` on the world's device; `shape`: (b, F, P).

    All ranks call this at once and get the same numbers: the least of a few repetitions, then the
    mean over ranks. It takes about a second. Nodes with different numbers of ranks count as one.
    On a CPU all movement takes the cores that compute. The times of host threads are the defaults,
    `HOST`.
    """
    generator = torch.Generator().manual_seed(world.rank)
    nodes = world.nodes
    all_ranks = range(world.size)
    even = len(set(nodes.sizes)) == 1
    near = nodes.ranks(nodes.of(world.rank)) if even else all_ranks
    far = [rank for rank in all_ranks if rank not in near]
    seconds = [
        *_exchange_seconds(world, near),
        *_exchange_seconds(world, far),
        _host_seconds(world, dim, generator),
        *_device_row_seconds(world, dim, update, generator),
        _dense_seconds(world, model, shape),
    ]
    mean = np.mean(run_on_all_ranks(world, lambda: seconds), axis=0)
    few, many, far_few, far_many, host, lookup, updated, copied, sample = mean.tolist()

    def link(few: float, many: float, peers: int) -> Link:
        bandwidth = (_LARGE - _SMALL) * peers / max(many - few, 1e-9)
        return Link(bandwidth, few / peers, "measured")

    alone = Link(1e12, few, "measured")
    return Cluster(
        world.size,
        host=Link(_ROWS * dim * 4 / host, 0.0, "measured"),
        inside=link(few, many, len(near) - 1) if len(near) > 1 else alone,
        between=link(far_few, far_many, len(far)) if far else None,
        nodes=nodes.count if far else 1,
        compute=Compute(lookup / _ROWS, updated / _ROWS, copied / _ROWS, sample / shape[0]),
        collective_s=0.0,
        overlap=0.0 if world.device.type == "cpu" else 1.0,
        host_times=HOST,
    )


def timed(world: World, call: Callable[[], object], repeat: int = 7) -> float:
    """Return the least seconds of `repeat` calls, after one more to warm up. The least has the
    smallest share of other load."""
    seconds = []
    for _ in range(repeat + 1):
        start = time.perf_counter()
        call()
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def _exchange_seconds(world: World, peers: Sequence[int]) -> list[float]:
    """Return the seconds of two all-to-alls, in which each rank sends `_SMALL` and then `_LARGE`
    bytes to each of `peers`; 0 without another peer. All ranks call this, with as many peers each.
    """
    if not set(peers) - {world.rank}:
        return [0.0, 0.0]
    link = comm.Link(world, world.device_group, CollectiveCounters(), "the device group")
    seconds: list[float] = []

    def exchange(sent: Tensor, splits: list[int]) -> Tensor:
        return link.start_all_to_all(sent, splits, splits, ROWS, "a measurement")()

    for nbytes in (_SMALL, _LARGE):
        splits = [nbytes // 4 if rank in peers else 0 for rank in range(world.size)]
        sent = torch.zeros(sum(splits), device=world.device)
        dist.barrier(group=world.host_group)
        seconds.append(timed(world, partial(exchange, sent, splits)))
    return seconds


def _host_seconds(world: World, dim: int, generator: torch.Generator) -> float:
    """Return the seconds in which `_ROWS` random rows of host memory reach the device."""
    table = torch.zeros(_TABLE_BYTES // (4 * dim), dim)
    rows = torch.randint(len(table), (_ROWS,), generator=generator)
    staging = torch.empty(_ROWS, dim, pin_memory=world.device.type == "cuda")
    take = partial(torch.index_select, table, 0, rows, out=staging)
    return timed(world, lambda: take().to(world.device, non_blocking=True))


def _device_row_seconds(
    world: World, dim: int, update: RowUpdate, generator: torch.Generator
) -> tuple[float, float, float]:
    """Return the seconds of `_ROWS` rows: their lookup, forward and backward; their update; their
    copy."""
    device = world.device
    width = update.state_width(dim)
    cache = torch.zeros(4 * _ROWS, dim, device=device)
    state = torch.zeros(4 * _ROWS, width, device=device) if width else None
    slots = torch.randperm(len(cache), generator=generator)[:_ROWS].to(device)
    leaf = cache.index_select(0, slots)
    positions = torch.randint(_ROWS, (_ROWS,), generator=generator)
    order = torch.sort(positions, stable=True).indices
    touched = torch.unique(positions, return_counts=True)[1]
    segments = torch.cat([torch.zeros(1, dtype=torch.int64), touched.cumsum(0)])
    chunks = ops.chunks_for(segments, device)
    bags = torch.arange(_ROWS + 1, device=device)
    positions, order, segments = positions.to(device), order.to(device), segments.to(device)

    def lookup() -> None:
        pooled = ops.pooled_lookup(leaf, positions, bags)
        ops.row_gradients(pooled, bags[:-1], order, segments, None, chunks)

    rule = update.rule(0.1, 1)
    return (
        timed(world, lookup),
        timed(world, lambda: ops.update_rows(rule, cache, state, slots, leaf)),
        timed(world, lambda: cache.index_select(0, slots)),
    )


def _dense_seconds(world: World, model: nn.Module, shape: tuple[int, int, int]) -> float:
    """Return the seconds of one forward and backward pass of `model`."""
    batch, dense_features, pooled_width = shape
    dense = torch.zeros(batch, dense_features, device=world.device)
    pooled = torch.zeros(batch, pooled_width, device=world.device, requires_grad=True)
    labels = torch.zeros(batch, device=world.device)

    def step() -> None:
        model.zero_grad()
        binary_cross_entropy_with_logits(model(dense, pooled), labels).backward()

    return timed(world, step, 3)


# -----------------------------------------------------------------------------
# Times of the host threads on this machine.

AHEAD = (16, 1)
"""Window L and prefetch P of the planner and of the steps that are timed."""

_WARM, _TIMED = 12, 8
"""Steps before the timed ones, which fill the slots, and timed steps."""

_STEPS_IN_CACHE = 6
"""The timed planner has slots for the distinct rows of so many steps."""

_HOST_TABLE_BYTES = 256 << 20
_CALLS = 200

_FEW_SAMPLES, _FEW_ROWS = 64, 16
"""Samples of a rank, and rows of each table, in steps that measure the fixed time of a step."""


def measure_host(world: World, table_rows: Sequence[int], batch: int, dim: int) -> HostTimes:
    """Measure the times of this rank's host threads, for steps of `batch` samples with one id of
    each table and rows of `dim` elements. Called by all ranks at once; takes some seconds."""
    value = torch.zeros(1, device=world.device)

    def launch() -> None:
        for _ in range(_CALLS):
            value.add_(1.0)  # a small kernel, for which nothing waits

    source = SyntheticSource(SyntheticSpec(table_rows, global_batch_size=batch))
    launch_s = timed(world, launch) / _CALLS
    launches = LAUNCHES + GROUP_LAUNCHES + RANK_LAUNCHES * (world.size > 1)
    return HostTimes(
        launch_s=launch_s,
        id_s=_id_seconds(world, source),
        row_s=_host_row_seconds(world, dim),
        step_s=max(0.0, _step_seconds(world, len(table_rows), dim) - launches * launch_s),
        name="measured",
    )


def _id_seconds(world: World, source: SyntheticSource) -> float:
    """Return the seconds per id of a planner with as many threads as a run on this machine has. It
    plans the steps of `source` for one rank, with slots for `_STEPS_IN_CACHE` steps."""
    batches = [source.train_batch(step, 0, 1) for step in range(_WARM + _TIMED)]
    pairs = zip(source.features, source.table_rows, strict=True)
    tables = [TableSpec(f"t_{name}", rows, 1, (name,)) for name, rows in pairs]
    (group,) = make_groups(tables, source.features, 1)
    samples = _STEPS_IN_CACHE * batches[0].ids.batch_size
    distinct = sum(source.expected_distinct(table, samples) for table in range(len(tables)))
    slots = min(group.layout.rows, round(1.05 * distinct))
    window, prefetch = AHEAD
    one_rank = replace(world, rank=0, size=1, local_rank=0, local_size=1, node_sizes=())
    threads = planner_threads("auto", world)
    planner = StreamPlanner(
        comm.Link(one_rank, None, CollectiveCounters(), "a timed planner"),
        [group],
        home_regions([(group, RegionSlots(slots))], 0, prefetch, DEFAULT, [None]),
        [slots],
        TableSettings(lookahead=window, prefetch=prefetch, planner_threads=threads),
    )
    plans = planner.planned(itertools.cycle(batches), lambda: False)
    for _ in range(_WARM):
        next(plans)
    seconds = []
    for _ in range(_TIMED):
        start = time.perf_counter()
        next(plans)
        seconds.append(time.perf_counter() - start)
    plans.close()
    planner.close()
    return min(seconds) / len(batches[0].ids.values)


def _host_row_seconds(world: World, dim: int) -> float:
    """Return the seconds to gather a row of host memory, or to scatter it; the mean of both."""
    table = np.ones((max(1, _HOST_TABLE_BYTES // (4 * dim)), dim), dtype=np.float32)
    rows = np.random.default_rng(0).choice(len(table), min(_ROWS, len(table)), replace=False)
    some = np.empty((len(rows), dim), dtype=np.float32)
    gathered = timed(world, lambda: take_rows(table, rows, some))
    return (gathered + timed(world, lambda: put_rows(table, rows, some))) / (2 * len(rows))


class _LinearModel(nn.Module):
    """A model that computes next to nothing: `(dense [b, F], pooled [b, P]) -> logits [b]`."""

    def __init__(self, pooled_width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(pooled_width, 1)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        """Return the logits."""
        return self.layer(pooled).squeeze(1)


def _step_seconds(world: World, tables: int, dim: int) -> float:
    """Return the seconds of a training step of few samples on all ranks, with `tables` small tables
    that are cached whole."""
    samples = _FEW_SAMPLES * world.size
    source = SyntheticSource(SyntheticSpec([_FEW_ROWS] * tables, global_batch_size=samples))
    specs = [TableSpec(f"t_{name}", _FEW_ROWS, dim, (name,)) for name in source.features]
    slots = -(-_FEW_ROWS * tables // world.size) * world.size
    settings = CachedSettings("data", (slots,), *AHEAD)
    model = _LinearModel(tables * dim)
    mode = CachedParallel(world, specs, source.features, model, row_update("sgd", 0.1), settings)
    steps = itertools.count()
    batches = (source.train_batch(step, world.rank, world.size) for step in steps)
    stream = mode.stream(itertools.islice(batches, _WARM + _CALLS))
    for _ in range(_WARM):
        mode.train_step(next(stream))

    def train() -> None:
        for _ in range(_CALLS // 4):
            mode.train_step(next(stream))

    seconds = timed(world, train, 2) / (_CALLS // 4)
    stream.close()
    mode.close()
    return seconds
