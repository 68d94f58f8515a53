"""Bytes of collectives: known payloads give known numbers, and the wrapper leaves no trace; copies
for all ranks in two levels bring what one all-to-all brings, with less between nodes.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from node_cases import open_nodes
from ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel

from distcache.comm.link import (
    COUNTED,
    ROWS,
    CollectiveCounters,
    Link,
    all_reduce_bytes,
    all_to_all_bytes,
    count_collectives,
    gather_bytes,
    spread,
    summing_hook,
)
from distcache.comm.world import close_world, open_world
from distcache.errors import DistcacheError


def test_formulas() -> None:
    assert [all_reduce_bytes(1200, w) for w in (1, 2, 3, 4)] == [0, 1200, 1600, 1800]
    assert [gather_bytes(1200, w) for w in (1, 2, 3, 4)] == [0, 600, 800, 900]
    assert all_to_all_bytes(80, [3, 5, 2], rank=1, world_size=3) == 40
    assert all_to_all_bytes(90, None, rank=1, world_size=3) == 60
    assert all_to_all_bytes(0, [0, 0, 0], rank=1, world_size=3) == 0


def test_direct_counts_and_an_unknown_category() -> None:
    counters = CollectiveCounters()
    rows = torch.zeros(10, 4)
    counters.count_all_to_all("collective_bytes", rows, [7, 3], rank=0, world_size=2)
    counters.count_all_reduce("dense_collective_bytes", rows, world_size=2)
    counters.count("planning_bytes", 5)
    assert counters.values() == {
        "collective_bytes": 3 * 16,
        "dense_collective_bytes": 160,
        "planning_bytes": 5,
    }
    with pytest.raises(DistcacheError, match="'bytes' is not a counter"):
        counters.count("bytes", 1)


def _call(name: str, rank: int, dtype: torch.dtype) -> None:
    """One collective with payloads of ten elements or, split unevenly, of 3 + 7."""
    ten, five = torch.ones(10, dtype=dtype), torch.zeros(5, dtype=dtype)
    if name in ("all_reduce", "broadcast"):
        arguments = (ten,) if name == "all_reduce" else (ten, 0)
        getattr(dist, name)(*arguments)
    elif name == "all_to_all_single":
        got = torch.zeros((3 if rank == 0 else 7) * 2, dtype=dtype)
        half = len(got) // 2
        dist.all_to_all_single(
            output=got, input=ten, output_split_sizes=[half, half], input_split_sizes=[3, 7]
        )
    elif name == "all_gather":
        dist.all_gather([five, torch.zeros(5, dtype=dtype)], torch.ones(5, dtype=dtype))
    elif name.startswith("all_gather"):
        getattr(dist, name)(ten, five, async_op=True).wait()
    elif name == "reduce_scatter":
        dist.reduce_scatter(five, [torch.ones(5, dtype=dtype), torch.ones(5, dtype=dtype)])
    elif name.startswith("reduce_scatter"):
        getattr(dist, name)(five, ten)


def _collectives(rank: int, size: int) -> list:
    world = open_world("cpu", "gloo", 30)
    before = {name: getattr(dist, name) for name in COUNTED if hasattr(dist, name)}
    seen = {}
    for name in before:
        if name == "all_to_all":  # gloo has none
            continue
        for dtype in (torch.float32, torch.int64):
            counters = CollectiveCounters()
            with count_collectives(counters):
                _call(name, rank, dtype)
            seen[name, str(dtype)] = counters.values()
    try:
        with count_collectives(CollectiveCounters()):
            raise KeyError
    except KeyError:
        pass
    restored = all(getattr(dist, name) is original for name, original in before.items())
    outside = CollectiveCounters()
    with count_collectives(outside):
        dist.broadcast_object_list([1], src=0)
        dist.all_reduce(torch.ones(3), group=world.host_group)
    hook = _hook(rank, world)
    close_world(world)
    return [seen, restored, outside.values(), hook]


def _hook(rank: int, world) -> tuple:
    counters = CollectiveCounters()
    model = DistributedDataParallel(torch.nn.Linear(4, 2, bias=False))
    model.register_comm_hook(world.device_group, summing_hook(counters))
    with count_collectives(counters):
        model(torch.full((1, 4), 1.0 + rank)).sum().backward()
    gradient = model.module.weight.grad.clone()
    del model
    return counters.values(), gradient.numpy().tolist()


def test_two_ranks_count_known_payloads() -> None:
    for rank, (seen, restored, outside, hook) in enumerate(run_ranks(_collectives, 2)):
        for (name, dtype), counted in seen.items():
            item = 4 if "float" in dtype else 8
            # All buffers have ten elements: half of them leave, twice half in an all-reduce.
            elements = {"all_reduce": 10, "all_to_all_single": 7 if rank == 0 else 3}.get(name, 5)
            mine, other = ("collective_bytes", "planning_bytes")[:: 1 if item == 4 else -1]
            expected = {mine: elements * item, other: 0, "dense_collective_bytes": 0}
            assert counted == expected, (name, dtype)
        assert len(seen) >= 2 * 7
        assert restored
        assert outside["collective_bytes"] == 12
        assert outside["planning_bytes"] == 0
        values, gradient = hook
        # Summed, not averaged: rank 0 gives ones, rank 1 twos; counted as dense alone.
        assert gradient == [[3.0] * 4] * 2
        assert values == {
            "collective_bytes": 0,
            "dense_collective_bytes": 8 * 4,
            "planning_bytes": 0,
        }


def spread_flat(link: Link, rows: torch.Tensor, counts: list[int], *about: str) -> torch.Tensor:
    """`spread` in one all-to-all: a copy for every rank."""
    size = link.world.size
    return link.all_to_all(rows.repeat(size, 1), [len(rows)] * size, counts, *about)


def both(rank: int, size: int, layouts: list[tuple[int, ...]]) -> list[dict]:
    """Bytes of both ways, for rows of several sizes, where they bring the same."""
    found = []
    for sizes in layouts:
        world = open_nodes(rank, sizes)
        bytes_of = {}
        for way in (spread, spread_flat):
            counters = CollectiveCounters(world.nodes, rank)
            link = Link(world, world.device_group, counters, "a test")
            brought = []
            for step in range(3):
                counts = [(3 * other + step) % 4 for other in range(size)]  # none, for some
                rows = torch.full((counts[rank], 2), float(rank)) + step
                brought.append(way(link, rows, counts, ROWS, "rows"))
                want = torch.cat([torch.full((c, 2), r + step) for r, c in enumerate(counts)])
                assert torch.equal(brought[-1], want.float()), (sizes, way, step)
            bytes_of[way.__name__] = counters.collective_bytes, counters.inter_node_bytes
        found.append(bytes_of)
        close_world(world)
    return found


def test_spread_brings_what_one_all_to_all_brings() -> None:
    layouts = [(4,), (2, 2), (1, 3), (2, 1, 1), (1, 1, 1, 1)]
    by_rank = run_ranks(both, 4, layouts)
    for at, sizes in enumerate(layouts):
        for way in ("spread", "spread_flat"):
            sent, between = (sum(found[at][way][i] for found in by_rank) for i in (0, 1))
            rows, copies, peers = 0, 0, 0
            for step in range(3):
                for rank in range(4):
                    own = next(s for n, s in enumerate(sizes) if rank < sum(sizes[: n + 1]))
                    count = (3 * rank + step) % 4
                    rows += 3 * count
                    copies += (4 - own) * count
                    peers += (len(sizes) - 1) * count
            assert sent == 8 * rows  # every rank gets every row once, either way
            want = copies if way == "spread_flat" else peers
            assert between == (8 * want if len(sizes) > 1 else 0), (sizes, way)


def counted(rank: int, size: int) -> list[int]:
    """What the wrapper of torch.distributed says goes between nodes."""
    world = open_nodes(rank, (2, 1))
    found = []
    ten, own = torch.ones(12), torch.ones(12)
    for call in (
        lambda dist: dist.all_reduce(ten),
        lambda dist: dist.all_to_all_single(own, ten),
        lambda dist: dist.all_to_all_single(
            own[: 3 * (rank + 1)], ten[:6], [rank + 1] * 3, [1, 2, 3]
        ),
        lambda dist: dist.all_reduce(ten.long()),
    ):
        with count_collectives(CollectiveCounters(world.nodes, rank)) as counters:
            call(torch.distributed)
        found.append(counters.inter_node_bytes)
    close_world(world)
    return found


def test_wrapped_collectives_count_what_leaves_the_node() -> None:
    first, second, third = run_ranks(counted, 3)
    assert first == [0, 16, 12, 0]
    assert second == [64, 16, 12, 0]
    assert third == [64, 32, 12, 0]
