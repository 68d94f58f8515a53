"""What is planned by itself: the replicated and the sharded rows of every group of tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distcache.pipeline.exchange import Decided
from distcache.planner.assemble import Request
from distcache.planner.home import HomeDecision
from distcache.planner.regions import ShardParts
from distcache.planner.slot_free import Planner


@dataclass(frozen=True)
class Region:
    """Rows of one group that lie the same way over the ranks, and the planner of this rank's home.

    `group`: index; `sharded`: whether homes alone cache the rows.
    """

    group: int
    planner: Planner
    sharded: bool = False


def requests_of(regions: Sequence[Region], requests: Sequence[Request]) -> list[Request]:
    """The request of every region; `requests`: by group."""
    found = []
    for region in regions:
        request = requests[region.group]
        found.append(Request(request.sharded if region.sharded else request.rows))
    return found


def sharded_part(region: int, decided: Decided, own: HomeDecision, early: bool) -> ShardParts:
    """What the exchange told about a region of sharded rows."""
    parts = decided.parts[region]
    replies, masks = tuple(part.reply for part in parts), tuple(part.masks for part in parts)
    rows, misses = decided.rows[:, region], decided.fetched[:, region]
    return ShardParts(
        own, replies, int(rows.sum()), int(misses.sum()), early, decided.routes, masks
    )
