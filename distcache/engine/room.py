"""Whether the cache has room for a step: expected before training, refused while it runs."""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from distcache.engine.exchange import Decided
from distcache.engine.groups import TableGroup, region_slots
from distcache.errors import StepTooLargeError
from distcache.planner.assemble import Request
from distcache.planner.home import HomeDecision, Planner
from distcache.planner.shard import ShardParts
from distcache.popularity.curve import LIKELY, room_for

# -----------------------------------------------------------------------------
# What is planned by itself: the replicated and the sharded rows of every group of tables.


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


# -----------------------------------------------------------------------------
# Whether the cache has room for a step: expected before training, refused while it runs.

log = logging.getLogger(__name__)

_LATER = "later ones may need more"


class Expecting(Protocol):
    """What a batch source knows about its ids before any is drawn."""

    def lookups_per_sample(self, table: int) -> float:
        """Mean ids that a sample looks up in `table`."""
        ...

    def expected_distinct(self, table: int, lookups: int) -> float:
        """Expected distinct rows of `table` among `lookups` ids of it."""
        ...


def smallest_cache_rows(groups: Sequence[TableGroup], slots: Sequence[int]) -> int:
    """The smallest `cache.rows` that gives each group at least `slots` on a device.

    `cache.rows` is split over the groups by their rows, and rounded up there to a multiple of W.
    """
    total, found = sum(group.layout.rows for group in groups), 1
    for count, group in zip(slots, groups, strict=True):
        world = group.layout.world_size
        found = max(found, (-(-count // world) - 1) * world * total // group.layout.rows + 1)
    return found


def enough_slots(group: TableGroup, replicated: int, sharded: int) -> int:
    """Slots of a device, C, from which on every home holds that many `replicated` and `sharded`
    rows.

    Of mixed rows, at most half of C is for the replicated ones, and no more than they are.
    """
    world, hot = group.layout.world_size, group.hot
    if hot is None:
        return replicated * world
    if not len(hot):
        return sharded
    fullest = int(np.bincount(group.layout.home(hot), minlength=world).max())
    return max(2 * world * max(replicated, 1), min(2 * sharded, sharded + world * fullest))


def too_large(
    step: int,
    kind: str,
    groups: Sequence[TableGroup],
    rows: np.ndarray,
    regions: Sequence[Region],
) -> StepTooLargeError:
    """Why `step` is refused and how to avoid it.

    `kind`: of its batch; `rows`: its distinct rows int64 `[W, regions]`.
    """
    slots = [region.planner.slots for region in regions]
    home, place = np.unravel_index(np.argmax(rows / np.asarray(slots)), rows.shape)
    needs, has, region = int(rows[home, place]), slots[place], regions[place]
    group = groups[region.group]
    what = "" if kind == "train" else " (evaluation)"
    lie = "" if group.hot is None else ("sharded " if region.sharded else "replicated ")
    on_device = has * (1 if region.sharded else len(rows))
    way_out = _way_out(groups, _enough_rows(groups, rows, regions))
    return StepTooLargeError(
        f"step {step}{what} needs {needs} distinct {lie}rows of home rank {home}, which has {has} "
        f"slots of {on_device} on each device (tables of width {group.dim}): set {way_out}, or "
        f"lower data.global_batch_size{_other_split(groups)}",
        rows=needs,
        slots=has,
    )


def _way_out(groups: Sequence[TableGroup], enough: int | None) -> str:
    """What to set; `enough`: of `_enough_rows`."""
    keys = "cache.replicated_rows, cache.replicated_share"
    if not any(group.hot is not None and len(group.hot) for group in groups):
        return f"cache.rows={enough} or more (the smallest that holds this step; {_LATER})"
    if enough is None:
        return f"other rows to replicate ({keys}; no cache.rows holds this step with these)"
    return (
        f"cache.rows={enough} or more (which holds this step with these replicated rows; "
        f"{_LATER}), or other rows to replicate ({keys})"
    )


def _enough_rows(
    groups: Sequence[TableGroup], rows: np.ndarray, regions: Sequence[Region]
) -> int | None:
    """`cache.rows` from which on a step of `rows`, int64 `[W, regions]`, finds room; None where no
    slots are enough, for a group gets no more than it has rows."""
    needs = np.zeros((len(groups), 2), dtype=np.int64)
    for column, region in enumerate(regions):
        needs[region.group, int(region.sharded)] = rows[:, column].max()
    slots = [enough_slots(g, *need) for g, need in zip(groups, needs.tolist(), strict=True)]
    most = [group.layout.world_size * group.layout.local_rows for group in groups]
    if any(count > limit for count, limit in zip(slots, most, strict=True)):
        return None
    return smallest_cache_rows(groups, slots)


def _other_split(groups: Sequence[TableGroup]) -> str:
    """A way out that tables of several widths have."""
    return "" if len(groups) == 1 else "; cache.split=by_curve shares slots out by need"


def warn_if_too_small(
    source: object, groups: Sequence[TableGroup], slots: Sequence[int], batch: int
) -> bool:
    """Warn before training if the slots will hardly hold a step; whether they will not.

    `source`: a batch source, which knows its expected rows if it is `Expecting`, with one feature
    for each table of the model, in their order; `slots`: C by group; `batch`: global batch size B.
    """
    if not all(hasattr(source, name) for name in ("lookups_per_sample", "expected_distinct")):
        return False
    means = [_expected_rows(source, group, batch) for group in groups]  # type: ignore[arg-type]
    rooms = [_rooms(*of_group) for of_group in zip(groups, slots, means, strict=True)]
    short = [(room, g) for g, found in enumerate(rooms) for room in found if room.needs > room.has]
    if short:
        worst, place = max(short, key=lambda pair: pair[0].needs / pair[0].has)
        enough = [_enough_for(group, mean) for group, mean in zip(groups, means, strict=True)]
        log.warning(
            "the cache is likely too small: a batch of %d samples is expected to name about %d "
            "%s of one home (tables of width %d), which has %d slots; a step that "
            "does not fit is refused. Set cache.rows=%d or more, or lower data.global_batch_size",
            batch,
            worst.needs,
            worst.what,
            groups[place].dim,
            worst.has,
            smallest_cache_rows(groups, enough),
        )
    return bool(short)


@dataclass(frozen=True)
class _Room:
    """Rows that a home is expected to need at once, and its slots for them."""

    what: str
    needs: int
    has: int


def _rooms(group: TableGroup, slots: int, mean: float) -> list[_Room]:
    """What a home needs and has, of C `slots` on a device, for `mean` distinct rows in a batch.

    Of mixed rows all together, and the sharded ones that are left where a batch names all that are
    replicated.
    """
    world, most = group.layout.world_size, group.layout.local_rows

    def fullest(rows: float) -> int:
        return min(most, max(1, math.ceil(room_for(rows, rows, LIKELY))))

    if group.hot is None:
        return [_Room("distinct rows", fullest(mean), slots // world)]
    found, hot = region_slots(group, slots), len(group.hot)
    left = fullest(max(0.0, mean - hot / world))
    rooms = [_Room("distinct rows", fullest(mean), found.replicated // world + found.sharded)]
    return [*rooms, _Room("sharded rows or more", left, found.sharded)] if hot else rooms


def _enough_for(group: TableGroup, mean: float) -> int:
    """Slots of a device, C, in whole homes, that give every home the room it needs; or all."""
    world, most = group.layout.world_size, group.layout.world_size * group.layout.local_rows

    def holds(slots: int) -> bool:
        return all(room.needs <= room.has for room in _rooms(group, slots, mean))

    found = -(-bisect_left(range(1, most), True, key=holds) // world) * world
    while found < most and not holds(found):  # K is in whole homes too
        found += world
    return found


def _expected_rows(source: Expecting, group: TableGroup, batch: int) -> float:
    """About how many distinct rows of a group one global batch has, per home."""
    total = sum(
        source.expected_distinct(table, round(batch * source.lookups_per_sample(table)))
        for table in group.tables
    )
    return total / group.layout.world_size
