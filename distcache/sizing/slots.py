"""Slots of the cache and its hot rows, from the keys of a user and statistics."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distcache.comm.link import run_on_all_ranks, run_on_rank0
from distcache.comm.world import World
from distcache.engine.groups import (
    REPLICATED,
    TableGroup,
    enough_slots,
    region_slots,
    smallest_cache_rows,
)
from distcache.errors import ConfigError, human_bytes
from distcache.layout import TableSpec, group_tables
from distcache.optim import RowUpdate
from distcache.planner.victims import AUTO, Policy
from distcache.popularity.curve import LIKELY, Curve, room_for
from distcache.popularity.slots import (
    BY_CURVE,
    StepCurves,
    cache_bytes,
    cache_slots,
    given_rows,
    listed,
    slots_by_curve,
)
from distcache.popularity.statistics import Popularity, Statistics
from distcache.store.memory import describe_bytes

log = logging.getLogger(__name__)

WARM_START = 0.5
"""`cache.warm_start=auto` where there are statistics: most of these rows save a fetch later, of the
next half most do not (docs/popularity.md). Rows that are pinned all come first: they stay."""


@dataclass(frozen=True)
class SlotPlan:
    """`slots`: C of each group; `hot_rows`: for each table, how many of its most frequent rows lie
    in the cache first (0 where nothing says so)."""

    slots: tuple[int, ...]
    hot_rows: tuple[int, ...]


@dataclass(frozen=True)
class CacheRequest:
    """A user's settings of a cache of `tables`. With ranks its slots and placement follow.

    `keys`: has the keys of group `cache` as attributes (`CacheConfig`, or the settings of a
    collection); `batch`: samples of a step over all ranks; `itemsize`: bytes of an element;
    `window`: L; `prefetch`: P, as slots are planned for; `objective`: that a placement minimises;
    `dense_parameters`: of the dense part; `expected`: distinct rows of each group that P + 2 steps,
    whose rows are on the device at once, are expected to name, empty where that is not known.
    """

    tables: Sequence[TableSpec]
    keys: Any
    update: RowUpdate
    batch: int
    itemsize: int
    window: Any
    prefetch: int
    objective: str
    dense_parameters: int = 0
    expected: tuple[float, ...] = ()

    @property
    def policy(self) -> Policy:
        """The policy, which orders the rows that leave."""
        return Policy.of(self.keys)

    @property
    def state(self) -> str:
        """The place of the optimizer state of replicated rows, with `auto` resolved."""
        if self.keys.state != AUTO:
            return self.keys.state
        # The library's sums are on all ranks: then so is the state.
        return REPLICATED if self.keys.reduction == "native" else self.update.state_place

    def groups(self, world_size: int) -> list[tuple[int, int, int]]:
        """Return (V, D, S) of each group, D and S as elements of `itemsize` bytes. S is the state
        of a slot on one of `world_size` ranks: a share if the homes of replicated rows keep it."""
        shared = self.state == "home" and self.keys.placement == REPLICATED
        homes = world_size if shared else 1
        groups = []
        for members in group_tables(self.tables):
            rows = sum(self.tables[table].rows for table in members)
            first = self.tables[members[0]]
            state = -(-self.update.state_width(first.dim) // homes)
            groups.append((rows, first.width(self.itemsize), state))
        return groups

    def plan(self, world_size: int, statistics: Statistics | None) -> SlotPlan:
        """Return the slots of one of `world_size` ranks, by group and table. Pure.

        `statistics`: of the tables, in order. `proportional` gives each group slots by its rows,
        `by_curve` by `slots_by_curve`; the hot rows are the likeliest of each group, as many as it
        has slots. A mapping gives the hot rows of each table, and their group as many slots. Raises
        ConfigError where the split does not fit the tables or the size.
        """
        keys, members, item = self.keys, group_tables(self.tables), self.itemsize
        expected: Sequence[float] = self.expected
        if not isinstance(keys.split, str):
            return self._as_given(world_size, statistics)
        if not expected and statistics is not None and self.batch > 1 and self._by_default:
            samples = min(self.batch * (self.prefetch + 2), statistics.samples)
            expected = [StepCurves.of(statistics, own, samples).expected for own in members]
        sizes = self.groups(world_size)
        slots = cache_slots(keys.rows, keys.ratio, keys.bytes, sizes, item, world_size, expected)
        if statistics is None:
            return SlotPlan(tuple(slots), (0,) * len(self.tables))
        if keys.split == BY_CURVE:
            steps = [StepCurves.of(statistics, own, self.batch) for own in members]
            allowed = keys.bytes or cache_bytes(slots, sizes, item)
            row_bytes = [(dim + state) * item for _, dim, state in sizes]
            slots = slots_by_curve(steps, row_bytes, allowed, world_size)
        return SlotPlan(tuple(slots), self.first_rows(slots, statistics))

    @property
    def _by_default(self) -> bool:
        """True if none of the three sizes is given."""
        return self.keys.rows is None and self.keys.ratio is None and self.keys.bytes is None

    def _as_given(self, world_size: int, statistics: Statistics | None) -> SlotPlan:
        """Return the slots of a user's split: one for each row, rounded up to a multiple of W.

        Its total may not exceed `cache.rows` or `cache.bytes`, and every group has a row, and as
        many slots as a step is expected to need, where that is known.
        """
        keys, tables, slots = self.keys, self.tables, list[int]()
        hot = given_rows(keys.split, tables)
        for members in group_tables(tables):
            total = sum(hot[table] for table in members)
            names = ", ".join(tables[table].name for table in members[:10])
            if total == 0:
                raise ConfigError(
                    f"cache.split gives no row to the tables of width {tables[members[0]].dim} "
                    f"({names}), which have slots of their own: give them the rows of a step at "
                    "least"
                )
            slots.append(-(-total // world_size) * world_size)
            needed = 0.0
            if statistics is not None:
                needed = StepCurves.of(statistics, members, self.batch).expected
            if needed > slots[-1]:
                raise ConfigError(
                    f"cache.split gives {slots[-1]} slots to the tables of {names}, but a step is "
                    f"expected to need {needed:.0f} of their rows at once: give them more, or "
                    "lower data.global_batch_size"
                )
        if keys.ratio is not None:
            raise ConfigError(
                f"cache.ratio={keys.ratio} and rows by table (cache.split) contradict each other: "
                "leave cache.ratio out"
            )
        size = cache_bytes(slots, self.groups(world_size), self.itemsize)
        for key, total in {"rows": sum(hot), "bytes": size}.items():
            limit = getattr(keys, key)
            if limit is not None and total > limit:
                raise ConfigError(
                    f"cache.split gives the tables {total} {key}, more than cache.{key}={limit}: "
                    f"give fewer rows, or set cache.{key}={total} or more"
                )
        return SlotPlan(tuple(slots), tuple(hot))

    def first_rows(
        self, slots: Sequence[int], statistics: Statistics, pinned_at: int | None = None
    ) -> tuple[int, ...]:
        """Return for each table the number of its rows that are among the likeliest of its group.

        `slots`: C of each group, which has as many of these rows; `pinned_at`: no more than may
        stay in the cache of so many ranks for good, where the remaining slots hold the other rows
        of P + 1 steps at once.
        """
        counts = dict[int, int]()
        for members, count in zip(group_tables(self.tables), slots, strict=True):
            step = StepCurves.of(statistics, members, self.batch)
            if pinned_at is None:
                rows = step.likeliest(count)
            else:
                rows = step.pinned(count, self.prefetch + 1, pinned_at)
            counts |= dict(zip(members, rows, strict=True))
        return tuple(counts[table] for table in range(len(self.tables)))

    def decide_slots(
        self, world: World, read: Callable[[], Statistics | None]
    ) -> tuple[tuple[int, ...], Popularity | None]:
        """Return C of each group, and the popularity of rows if `read` gives their statistics.

        Called by all ranks; raises ConfigError on all of them.
        """
        keys = self.keys
        results = list[Statistics | None]()
        run_on_all_ranks(world, lambda: results.append(read()))
        statistics = results[0]

        def planned() -> tuple[SlotPlan, tuple[int, ...] | None]:
            plan = self.plan(world.size, statistics)
            if statistics is None or self.policy.ranking != "static":
                return plan, None
            return plan, self.first_rows(plan.slots, statistics, world.size)

        plan, pinned = run_on_rank0(world, planned)
        if world.is_first:
            log.info(self._size_line(plan.slots, world.size))
        if statistics is None:
            return plan.slots, None
        if world.is_first:
            self._report(plan, statistics, world.size)
        warm = keys.warm_start
        if warm == AUTO:
            warm = WARM_START if pinned is None else 1.0
        classes = self.policy.needs_popularity
        return plan.slots, Popularity(statistics, plan.hot_rows, float(warm), classes, pinned)

    def _size_line(self, slots: Sequence[int], world_size: int) -> str:
        """Return the size of the cache, rows and bytes of one rank, for the log."""
        sizes = self.groups(world_size)
        count = sum(slots)
        rows = sum(of_group for of_group, _, _ in sizes)
        device_bytes = human_bytes(cache_bytes(slots, sizes, self.itemsize))
        if count >= rows:
            return f"all {rows:,} rows are cached: {device_bytes} on each rank"
        return (
            f"{count:,} of {rows:,} rows are cached on each rank ({100 * count / rows:.1f} %, "
            f"{device_bytes}); cache.rows, cache.ratio or cache.bytes gives another size"
        )

    def _report(self, plan: SlotPlan, statistics: Statistics, world_size: int) -> None:
        """Log each table's hot rows, the largest first."""
        lines = [f"{'table':<24} {'rows':>13} {'hot rows':>11} {'share':>7} {'lookups':>8}  bytes"]
        sizes = [0] * len(self.tables)
        for members, own in zip(group_tables(self.tables), self.groups(world_size), strict=True):
            for place in members:
                sizes[place] = cache_bytes([plan.hot_rows[place]], [own], self.itemsize)
        for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
            table, hot = self.tables[place], plan.hot_rows[place]
            named = Curve.of(statistics.tables[place]).top(hot)
            lines.append(
                f"{table.name:<24} {table.rows:>13,} {hot:>11,} {hot / table.rows:>7.2%} "
                f"{named:>8.1%}  {describe_bytes(sizes[place])}"
            )
        log.info("the cache of %s slots by table:\n%s", listed(plan.slots), "\n".join(lines))

    def of_all_homes(
        self, world: World, slots: Sequence[int], popularity: Popularity | None
    ) -> Popularity | None:
        """Return `popularity` for rows that only their homes cache: W ranks hold W times as many as
        one has slots. Rows that were given by table stay as they are.

        `slots`: C of each group. Called by all ranks.
        """
        if popularity is None or not isinstance(self.keys.split, str) or world.size == 1:
            return popularity
        of = ([count * world.size for count in slots], popularity.statistics)
        hot, pinned = run_on_rank0(world, lambda: self.first_rows(*of)), popularity.pinned_rows
        if pinned is not None:
            pinned = run_on_rank0(world, lambda: self.first_rows(*of, world.size))
        return replace(popularity, hot_rows=hot, pinned_rows=pinned)


def warn_if_too_small(
    named: Sequence[float], groups: Sequence[TableGroup], slots: Sequence[int], batch: int
) -> bool:
    """Warn before training if the slots will hardly hold a step. Return True if they will not.

    `named`: distinct rows of each group that a step is expected to name, empty if that is not
    known; `slots`: C by group; `batch`: global batch size B.
    """
    short = []
    enough = []
    for group, count, rows in zip(groups, slots, named, strict=False):
        world, room = group.layout.world_size, region_slots(group, count)
        mean = rows / world
        fullest = max(1, math.ceil(room_for(mean, mean, LIKELY)))
        needs, has = min(fullest, group.layout.local_rows), room.replicated // world + room.sharded
        enough.append(enough_slots(group, needs if group.hot is None else 0, needs))
        if needs > has:
            short.append((needs / has, needs, group.dim, has))
    if short:
        log.warning(
            "the cache is likely too small: a batch of %d samples is expected to name about %d "
            "distinct rows of one home (tables of width %d), which has %d slots; a step that "
            "does not fit is refused. Set cache.rows=%d or more, or lower data.global_batch_size",
            batch,
            *max(short)[1:],
            smallest_cache_rows(groups, enough),
        )
    return bool(short)
