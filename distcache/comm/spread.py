"""One rank's rows to all ranks, each sent once to every other node and spread inside it.

Over a network that several ranks of a node share, a copy for each of them would cross it as often;
inside a node there is shared memory or NVLink. (The two levels of hierarchical all-gathers, as
NCCL's and HSDP's.) What arrives, and its order, is that of one all-to-all among all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distcache.comm.link import Link
from distcache.comm.nodes import Nodes


def spread(link: Link, rows: Tensor, counts: Sequence[int], category: str, what: str) -> Tensor:
    """This rank's `rows` `[counts[rank], ...]` to all ranks; all ranks' rows, in rank order.

    Called by all ranks with the same `counts`; returns `[sum(counts), ...]`. `link` is one of the
    device group, whose order of use holds for the node's group too. `category`, `what`: as
    `Link.all_to_all`.
    """
    world = link.world
    if world.size == 1:
        return rows
    if world.nodes.count == 1:
        return spread_flat(link, rows, counts, category, what)
    nodes, rank = world.nodes, world.rank
    node = nodes.of(rank)
    mates = [mate for mate in nodes.ranks(node) if mate != rank]
    taken = {mate: _taken(nodes, mate, node) for mate in nodes.ranks(node)}

    to = {*mates, *(nodes.peer(rank, other) for other in range(nodes.count) if other != node)}
    came_from = {*mates, *taken[rank]}
    send = [len(rows) if other in to else 0 for other in range(world.size)]
    receive = [counts[other] if other in came_from else 0 for other in range(world.size)]
    first = link.all_to_all(_copies(rows, len(to)), send, receive, category, what)
    parts = list(first.split(receive))
    parts[rank] = rows
    if mates:
        foreign = torch.cat([rows[:0], *(parts[other] for other in taken[rank])])
        send = [0 if mate == rank else len(foreign) for mate in taken]
        passed = [() if mate == rank else tuple(others) for mate, others in taken.items()]
        receive = [sum(counts[other] for other in others) for others in passed]
        second = link.within_node(
            _copies(foreign, len(mates)), send, receive, category, f"{what}, inside the node"
        )
        others = [other for part in passed for other in part]
        for other, part in zip(others, second.split([counts[o] for o in others]), strict=True):
            parts[other] = part
    return torch.cat(parts)


def _taken(nodes: Nodes, rank: int, node: int) -> list[int]:
    """The ranks of other nodes whose rows `rank` takes for its `node`, in rank order."""
    size = nodes.firsts[-1] + nodes.sizes[-1]
    own = nodes.ranks(node)
    return [other for other in range(size) if other not in own and nodes.peer(other, node) == rank]


def _copies(rows: Tensor, count: int) -> Tensor:
    """`rows`, `count` times one after the other."""
    return rows.repeat(count, *[1] * (rows.dim() - 1))


def spread_flat(
    link: Link, rows: Tensor, counts: Sequence[int], category: str, what: str
) -> Tensor:
    """`spread` in one all-to-all: a copy for every rank; what one node does, and the slow twin."""
    size = link.world.size
    return link.all_to_all(_copies(rows, size), [len(rows)] * size, counts, category, what)
