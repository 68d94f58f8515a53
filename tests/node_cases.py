"""Ranks of this machine as if they were on several nodes, each with a store of its own."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from distcache.comm.world import World, open_world


def place_of(rank: int, sizes: Sequence[int]) -> dict[str, int]:
    """What torchrun tells a rank of its place on nodes of `sizes` ranks."""
    firsts = list(accumulate(sizes, initial=0))
    node = bisect_right(firsts, rank) - 1
    return {"LOCAL_RANK": rank - firsts[node], "LOCAL_WORLD_SIZE": sizes[node], "GROUP_RANK": node}


def open_nodes(rank: int, sizes: Sequence[int], timeout_s: float = 60) -> World:
    """The world of ranks on nodes of `sizes` ranks, as torchrun's agents there would start them."""
    os.environ.update({name: str(value) for name, value in place_of(rank, sizes).items()})
    return open_world("cpu", "gloo", timeout_s)
