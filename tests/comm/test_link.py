"""Bytes of collectives: known payloads give known numbers, and the wrapper leaves no trace; copies
for all ranks in two levels bring what one all-to-all brings, once to every node.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from node_cases import open_nodes
from ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel

from distcache.comm.link import (
    COUNTED,
    DENSE,
    PLANNING,
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
from distcache.comm.world import close_world


def test_formulas() -> None:
    assert [all_reduce_bytes(1200, w) for w in (1, 2, 3, 4)] == [0, 1200, 1600, 1800]
    assert [gather_bytes(1200, w) for w in (1, 2, 3, 4)] == [0, 600, 800, 900]
    assert all_to_all_bytes(80, [3, 5, 2], rank=1, world_size=3) == 40
    assert all_to_all_bytes(90, None, rank=1, world_size=3) == 60
    assert all_to_all_bytes(0, [0, 0, 0], rank=1, world_size=3) == 0


def _call(name: str, rank: int, dtype: torch.dtype) -> None:
    """One collective of three ranks with payloads of twelve elements."""
    twelve, four = torch.ones(12, dtype=dtype), torch.ones(4, dtype=dtype)
    fours = [torch.zeros(4, dtype=dtype) for _ in range(3)]
    call = getattr(dist, name)
    if name in ("all_reduce", "broadcast"):
        call(*((twelve,) if name == "all_reduce" else (twelve, 0)))
    elif name == "all_to_all_single":
        sizes = [[2, 4, 6][rank]] * 3
        out = torch.zeros(sum(sizes), dtype=dtype)
        call(output=out, input=twelve, output_split_sizes=sizes, input_split_sizes=[2, 4, 6])
    elif name in ("all_gather", "reduce_scatter"):
        call(*((fours, four) if name == "all_gather" else (four, fours)))
    else:
        gathers = name.startswith("all_gather")
        call(*((twelve, four) if gathers else (four, twelve)), async_op=True).wait()


def _collectives(rank: int, size: int) -> tuple:
    """What is counted of each collective, on nodes of two ranks and of one."""
    world = open_nodes(rank, (2, 1))
    before = {name: getattr(dist, name) for name in COUNTED if hasattr(dist, name)}
    seen = {}
    for name in before:
        if name == "all_to_all":  # gloo has none
            continue
        for dtype in (torch.float32, torch.int64):
            counters = CollectiveCounters(world.nodes, rank)
            with count_collectives(counters):
                _call(name, rank, dtype)
            seen[name, dtype] = counters.values(), counters.inter_node_bytes
    try:
        with count_collectives(CollectiveCounters()):
            raise KeyError
    except KeyError:
        pass
    assert all(getattr(dist, name) is original for name, original in before.items())
    outside, hooked = CollectiveCounters(), CollectiveCounters()
    with count_collectives(outside):
        dist.broadcast_object_list([1], src=0)
        dist.all_reduce(torch.ones(3), group=world.host_group)
    model = DistributedDataParallel(torch.nn.Linear(4, 2, bias=False))
    model.register_comm_hook(world.device_group, summing_hook(hooked))
    with count_collectives(hooked):
        model(torch.full((1, 4), 1.0 + rank)).sum().backward()
    gradient = model.module.weight.grad.tolist()
    del model
    close_world(world)
    return seen, outside.values(), hooked.values(), gradient


def test_known_payloads_are_counted() -> None:
    for rank, (seen, outside, hooked, gradient) in enumerate(run_ranks(_collectives, 3)):
        assert len(seen) >= 2 * 7
        for (name, dtype), (counted, between) in seen.items():
            # Two thirds of a buffer leave, twice that in an all-reduce; a ring's last rank of a
            # node hands all of it on.
            elements = {"all_reduce": 16, "all_to_all_single": [10, 8, 6][rank]}.get(name, 8)
            beyond = (
                [6, 6, 6][rank] if name == "all_to_all_single" else [0, elements, elements][rank]
            )
            mine, other = (ROWS, PLANNING) if dtype.is_floating_point else (PLANNING, ROWS)
            assert counted == {mine: elements * dtype.itemsize, other: 0, DENSE: 0}, (name, dtype)
            assert between == (beyond * 4 if dtype.is_floating_point else 0), (name, dtype)
        assert outside == {ROWS: 16, PLANNING: 0, DENSE: 0}
        # Summed, not averaged: the ranks give ones, twos and threes; counted as dense alone.
        assert gradient == [[6.0] * 4] * 2
        assert hooked == {ROWS: 0, PLANNING: 0, DENSE: 8 * 4 * 2 * 2 // 3}


def spread_on_nodes(rank: int, size: int, layouts: list[tuple[int, ...]]) -> list[tuple[int, int]]:
    """Bytes sent, and between nodes, where rows of several sizes come as one all-to-all's do."""
    found = []
    for sizes in layouts:
        world = open_nodes(rank, sizes)
        counters = CollectiveCounters(world.nodes, rank)
        link = Link(world, world.device_group, counters, "a test")
        for step in range(3):
            counts = [(3 * other + step) % 4 for other in range(size)]  # none, for some
            rows = torch.full((counts[rank], 2), float(rank)) + step
            brought = spread(link, rows, counts, ROWS, "rows")
            want = torch.cat([torch.full((c, 2), r + step) for r, c in enumerate(counts)])
            assert torch.equal(brought, want.float()), (sizes, step)
        found.append((counters.collective_bytes, counters.inter_node_bytes))
        close_world(world)
    return found


def test_spread_sends_rows_to_every_rank_and_once_to_every_node() -> None:
    layouts = [(4,), (2, 2), (1, 3), (2, 1, 1), (1, 1, 1, 1)]
    by_rank = run_ranks(spread_on_nodes, 4, layouts)
    rows = sum((3 * rank + step) % 4 for rank in range(4) for step in range(3))
    for sizes, *of_ranks in zip(layouts, *by_rank, strict=True):
        sent, between = map(sum, zip(*of_ranks, strict=True))
        assert (sent, between) == (8 * 3 * rows, 8 * (len(sizes) - 1) * rows), sizes
