"""Copies for all ranks in two levels: what one all-to-all brings, with less between nodes."""

from __future__ import annotations

import torch
from node_cases import open_nodes
from ranks import run_ranks

from distcache.comm.link import (
    ROWS,
    CollectiveCounters,
    Link,
    count_collectives,
    spread,
)
from distcache.comm.world import close_world


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
