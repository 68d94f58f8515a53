"""What this machine reaches, for predictions: links, row operations and the dense part, timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from distcache import ops
from distcache.comm import link as comm
from distcache.comm.link import ROWS, CollectiveCounters
from distcache.comm.world import World
from distcache.cost.cluster import Cluster, Compute, Link
from distcache.optim import RowUpdate

_TABLE_BYTES = 64 << 20
_ROWS = 20_000
_SMALL, _LARGE = 1 << 12, 1 << 22
"""Bytes that a rank sends to a peer, for latency and bandwidth."""


@dataclass(frozen=True)
class Measured:
    """Seconds and bytes per second of one rank while all ranks do the same.

    `inside`: to the ranks of its node, None: alone there; `latency_s`: of an exchange with all of
    them that sends next to nothing; `between`: to the ranks of other nodes, None on one node. Where
    nodes have different numbers of ranks they count as one.
    """

    inside: float | None
    latency_s: float
    host: float
    compute: Compute
    between: Link | None = None

    def cluster(self, world: World) -> Cluster:
        """A cluster of this world's ranks. On a CPU all movement takes the cores that compute."""
        nodes = 1 if self.between is None else world.nodes.count
        peers = max(world.size // nodes - 1, 1)
        inside = Link(self.inside or 1e12, self.latency_s / peers, "measured")
        return Cluster(
            world.size,
            Link(self.host, 0.0, "measured"),
            inside,
            self.between,
            nodes,
            compute=self.compute,
            collective_s=0.0,
            overlap=0.0 if world.device.type == "cpu" else 1.0,
        )


@dataclass(frozen=True)
class DensePart:
    """`model(dense [b, dense_features], pooled [b, pooled_width]) -> logits [b]`, on the world's
    device, for `batch` samples (b)."""

    model: nn.Module
    dense_features: int
    pooled_width: int
    batch: int


def measure(world: World, dim: int, update: RowUpdate, part: DensePart) -> Measured:
    """Time the links, rows of `dim` elements, and the dense part; all ranks call this.

    The least of a few repetitions, then the mean over ranks: all ranks get the same numbers.
    Takes about a second.
    """
    generator = torch.Generator().manual_seed(world.rank)
    mates, others = _near_and_far(world)
    alone = len(mates) == 1
    near = [0.0, 0.0] if alone else _exchange_seconds(world, mates)
    far = _exchange_seconds(world, others) if others else [0.0, 0.0]
    host = _host_seconds(world, dim, generator)
    lookup, updated, copied = _row_seconds(world, dim, update, generator)
    sample = _dense_seconds(world, part)
    timed = [*near, *far, host, lookup, updated, copied, sample]
    own = torch.tensor(timed, dtype=torch.float64)
    if world.size > 1:
        dist.all_reduce(own, group=world.host_group)
    *links, host, lookup, updated, copied, sample = (own / world.size).tolist()
    near, far = links[:2], links[2:]
    inside = None if alone else _bandwidth(near, len(mates) - 1)
    between = None
    if others:
        between = Link(_bandwidth(far, len(others)), far[0] / len(others), "measured")
    compute = Compute(lookup / _ROWS, updated / _ROWS, copied / _ROWS, sample / part.batch)
    return Measured(inside, near[0], _ROWS * dim * 4 / host, compute, between)


def _near_and_far(world: World) -> tuple[range, list[int]]:
    """The ranks of this node, and the others; where nodes have different numbers of ranks all are
    of one."""
    nodes, every = world.nodes, range(world.size)
    near = every if len(set(nodes.sizes)) > 1 else nodes.ranks(nodes.of(world.rank))
    return near, [rank for rank in every if rank not in near]


def _bandwidth(seconds: Sequence[float], peers: int) -> float:
    """Bytes per second from what `_exchange_seconds` gave."""
    return (_LARGE - _SMALL) * peers / max(seconds[1] - seconds[0], 1e-9)


def _timed(world: World, call: Callable[[], object], repeat: int = 7) -> float:
    """Least seconds of a call, after one that does not count: without what other load adds."""
    taken = []
    for _ in range(repeat + 1):
        _wait(world)
        start = time.perf_counter()
        call()
        _wait(world)
        taken.append(time.perf_counter() - start)
    return min(taken[1:])


def _wait(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def _exchange_seconds(world: World, peers: Sequence[int]) -> list[float]:
    """Of all-to-alls in which each rank sends `_SMALL`, and `_LARGE`, bytes to each of `peers`;
    where these are its node's they are the node's own."""
    link = comm.Link(world, world.device_group, CollectiveCounters(), "the device group")
    here = world.nodes.ranks(world.nodes.of(world.rank))
    inside, found = all(rank in here for rank in peers), []
    for nbytes in (_SMALL, _LARGE):
        splits = [nbytes // 4 if rank in peers else 0 for rank in range(world.size)]
        sent = torch.zeros(sum(splits), device=world.device)
        near, what = splits[here.start : here.stop], "a measurement"
        dist.barrier(group=world.host_group)
        if inside:
            call = partial(link.within_node, sent, near, near, ROWS, what)
        else:
            call = partial(link.all_to_all, sent, splits, splits, ROWS, what)
        found.append(_timed(world, call))
    return found


def _host_seconds(world: World, dim: int, generator: torch.Generator) -> float:
    """Rows read at random from host memory to the device."""
    table = torch.zeros(_TABLE_BYTES // (4 * dim), dim)
    rows = torch.randint(len(table), (_ROWS,), generator=generator)
    staging = torch.empty(_ROWS, dim, pin_memory=world.device.type == "cuda")

    def fetch() -> Tensor:
        torch.index_select(table, 0, rows, out=staging)
        return staging.to(world.device, non_blocking=True)

    return _timed(world, fetch)


def _row_seconds(
    world: World, dim: int, update: RowUpdate, generator: torch.Generator
) -> tuple[float, float, float]:
    """Of `_ROWS` rows: a lookup, forward and backward; an update; a copy."""
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
        _timed(world, lookup),
        _timed(world, lambda: ops.update_rows(rule, cache, state, slots, leaf)),
        _timed(world, lambda: cache.index_select(0, slots)),
    )


def _dense_seconds(world: World, part: DensePart) -> float:
    batch, model = part.batch, part.model
    dense = torch.zeros(batch, part.dense_features, device=world.device)
    pooled = torch.zeros(batch, part.pooled_width, device=world.device, requires_grad=True)
    labels = torch.zeros(batch, device=world.device)

    def step() -> None:
        model.zero_grad()
        binary_cross_entropy_with_logits(model(dense, pooled), labels).backward()

    return _timed(world, step, 3)
