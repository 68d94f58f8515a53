"""How cached rows lie over the ranks: the regions of each group, and their slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from distcache.cache.state_slots import StateSlots
from distcache.comm.world import World
from distcache.pipeline.groups import TableGroup

REPLICATED, SHARDED, MIXED = "replicated", "sharded", "mixed"


@dataclass(frozen=True)
class Placement:
    """`kind`: `replicated`, `sharded` or `mixed`, see DESIGN, section 6; `state`: where the
    optimizer state of replicated rows lies, `replicated` or `home`; `hot`: for `mixed`, the
    replicated ids of each table, int64, ascending, and `digest` of them, which all ranks compare;
    `early`: rows that no step on its way changes travel before their step."""

    kind: str = REPLICATED
    state: str = REPLICATED
    hot: tuple[np.ndarray, ...] = field(default=(), compare=False, repr=False)
    digest: str = ""
    early: bool = True

    def on(self, world: World) -> Placement:
        """Itself; with one rank, where all placements are the same, `replicated`."""
        return self if world.size > 1 else Placement()

    def groups(self, groups: Sequence[TableGroup]) -> list[TableGroup]:
        """`groups` with their replicated rows."""
        return [replace(group, hot=self._hot(group)) for group in groups]

    def _hot(self, group: TableGroup) -> np.ndarray | None:
        if self.kind == REPLICATED:
            return None
        parts = [np.empty(0, np.int64)]
        if self.kind == MIXED:
            offsets = group.layout.offsets
            parts += [self.hot[t] + offsets[place] for place, t in enumerate(group.tables)]
        return np.sort(group.planned(np.concatenate(parts)))


@dataclass(frozen=True)
class RegionSlots:
    """Slots of one group on each device: `replicated` (a multiple of W) come first, a range for
    each home; then those of the device's own home."""

    replicated: int
    sharded: int = 0

    @property
    def all(self) -> int:
        """C."""
        return self.replicated + self.sharded

    def own_replicated(self, rank: int, world_size: int) -> slice:
        """The slots of the replicated rows of rank's home."""
        own = self.replicated // world_size
        return slice(rank * own, (rank + 1) * own)

    @property
    def own_sharded(self) -> slice:
        """The slots of the sharded rows of the device's home."""
        return slice(self.replicated, self.all)


def region_slots(group: TableGroup, slots: int) -> RegionSlots:
    """`slots` per device, C, over the regions of a group.

    Replicated hot rows get a slot each, as long as half of the slots are left for the sharded ones,
    which need no more than a home has rows.
    """
    layout = group.layout
    world, hot = layout.world_size, group.hot
    if hot is None:
        return RegionSlots(slots)
    most = int(np.bincount(layout.home(hot), minlength=world).max())
    replicated = min(most, slots // 2 // world) * world
    if len(hot) and not replicated:
        replicated = world  # a slot for each home
    return RegionSlots(replicated, max(1, min(slots - replicated, layout.local_rows)))


def state_slots(slots: RegionSlots, world: World, placement: Placement) -> StateSlots | None:
    """Which slots have optimizer state on this rank; None: all."""
    if placement.state == REPLICATED or not slots.replicated:
        return None
    own = slots.own_replicated(world.rank, world.size)
    return StateSlots(own.start, own.stop - own.start, slots.replicated)
