"""Tables of one model by group: a batch's ids as rows and bags, how rows lie over the ranks, and
whether the cache has room for a step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from distcache.cache import StateSlots
from distcache.comm.world import World
from distcache.data.batch import JaggedIds, is_one_each, one_each
from distcache.errors import ConfigError, DataError, StepTooLargeError
from distcache.layout import RowLayout, TableSpec, group_tables, split_slots
from distcache.planner.home import Planner
from distcache.planner.replicated_rows import ReplicatedRows
from distcache.planner.request_loops import find_pieces
from distcache.planner.victims import DEFAULT, Policy
from distcache.store.rows import STAGED

log = logging.getLogger(__name__)

_FLOATS = {torch.float32: np.float32, torch.float64: np.float64}


@dataclass(frozen=True)
class TableGroup:
    """Tables of one width with one store, cache and plan.

    `tables`: indices into the model's tables; `features`: indices into the ids' features, in
    their order; `offsets` int64 `[F]`: first row of each feature's table; `mean` `[F]`: whether
    the feature's bags are means; `hot`: the replicated rows, int64 `[K]`, ascending, where others
    are sharded; None: all are replicated.
    """

    layout: RowLayout
    tables: tuple[int, ...]
    features: tuple[int, ...]
    offsets: np.ndarray
    mean: tuple[bool, ...]
    hot: np.ndarray | None = None

    @property
    def dim(self) -> int:
        """Width D."""
        return self.layout.dim

    @cached_property
    def hot_rows(self) -> ReplicatedRows | None:
        """`hot`, as its homes number them."""
        return None if self.hot is None else ReplicatedRows(self.layout, self.hot)

    @cached_property
    def by_table(self) -> tuple[np.ndarray, np.ndarray]:
        """The features by table, those of one in their order, int64 `[F]`; and int64 `[2, F]`, of
        each of these the first row of its table, and how many rows that has."""
        rows = dict(zip(self.layout.offsets.tolist(), self.layout.tables, strict=False))
        order = self.offsets.argsort(kind="stable")
        first = self.offsets[order]
        return order, np.array([first, [rows[at].rows for at in first.tolist()]])


@dataclass(frozen=True)
class GroupBags:
    """The ids of one local batch that read one group, K = F * b bags, feature-major.

    `features`: F; `ids`: int64 `[n]` (NumPy); `offsets`: int64 `[K + 1]`; `weights`: `[n]` or None;
    `divisors`: `[K, 1]`, the number of ids of each mean bag (at least 1) and 1 for each sum bag;
    None if there are no mean bags.
    """

    features: int
    ids: np.ndarray
    offsets: Tensor
    weights: Tensor | None
    divisors: Tensor | None
    pieces: np.ndarray | None = None
    """int64 `[5, F]`: the ids of each feature, by table; see `planner.request_loops.name_rows`."""

    @cached_property
    def single(self) -> bool:
        """Whether every bag has one id, without a weight."""
        return self.weights is None and is_one_each(self.offsets, len(self.ids))

    @cached_property
    def bag_of(self) -> np.ndarray:
        """The bag of each id, int64 `[n]`."""
        offsets = self.offsets.numpy()
        return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


@dataclass(frozen=True)
class Region:
    """Rows of one group that are placed alike over the ranks, with the planner of this rank's home.

    `group`: index; `sharded`: whether homes alone cache the rows.
    """

    group: int
    planner: Planner
    sharded: bool = False


def make_groups(
    tables: Sequence[TableSpec], features: Sequence[str], world_size: int
) -> list[TableGroup]:
    """Group `tables` by width for ids whose features come in the order `features`.

    Raises ConfigError for a feature that no table reads or that two tables read.
    """
    reader: dict[str, int] = {}
    for index, table in enumerate(tables):
        for feature in table.features:
            if feature in reader:
                raise ConfigError(
                    f"feature {feature!r} is read by tables {tables[reader[feature]].name!r} and "
                    f"{table.name!r}: give each its own copy of the feature"
                )
            reader[feature] = index
    missing = [feature for feature in features if feature not in reader]
    if missing:
        raise ConfigError(f"no table reads the features {missing}")
    groups = []
    for members in group_tables(tables):
        layout = RowLayout([tables[i] for i in members], world_size)
        own = [i for i, feature in enumerate(features) if reader[feature] in members]
        at = [members.index(reader[features[i]]) for i in own]
        groups.append(
            TableGroup(
                layout=layout,
                tables=tuple(members),
                features=tuple(own),
                offsets=layout.offsets[at],
                mean=tuple(layout.tables[i].pooling == "mean" for i in at),
            )
        )
    return groups


def group_bags(group: TableGroup, ids: JaggedIds, dtype: torch.dtype) -> GroupBags:
    """The part of `ids` that reads `group`; `dtype` is that of weights and scales.

    NumPy: this runs on a thread beside training, where a torch operation would start a pool of
    threads beside that of training.
    """
    batch = ids.batch_size
    offsets, values, weights = ids.offsets, ids.values, ids.weights
    if len(group.features) != len(ids.features):
        offsets, values, weights = _select(ids, group.features)
    own = values.numpy().astype(np.int64, copy=False)
    edges = np.ascontiguousarray(offsets.numpy())
    if edges[0] != 0 or edges[-1] != len(own):
        raise DataError(f"offsets go from {edges[0]} to {edges[-1]} for {len(own)} ids")
    if weights is not None:
        weights = torch.from_numpy(weights.numpy().astype(_FLOATS[dtype], copy=False))
    divisors = None
    if any(group.mean):
        divisors = _divisors(group, np.diff(edges), batch, dtype)
    pieces = None
    if batch:
        pieces = np.empty((5, len(group.features)), np.int64)
        find_pieces(edges, batch, *group.by_table, pieces)
    return GroupBags(len(group.features), own, offsets, weights, divisors, pieces)


def _divisors(group: TableGroup, lengths: np.ndarray, batch: int, dtype: torch.dtype) -> Tensor:
    """Return the divisors that make means of sums, see `GroupBags`; `lengths` int `[K]`."""
    one = _FLOATS[dtype](1)
    counts = np.maximum(lengths, 1).astype(_FLOATS[dtype])
    divisors = np.where(np.repeat(np.asarray(group.mean), batch), counts, one)
    return torch.from_numpy(divisors).unsqueeze(1)


def _select(ids: JaggedIds, features: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Offsets, values and weights of some features, in order."""
    batch = ids.batch_size
    starts = ids.offsets[::batch] if batch else ids.offsets[:1].repeat(len(ids.features) + 1)
    spans = [slice(int(starts[f]), int(starts[f + 1])) for f in features]
    values, weights = _joined(ids.values, spans), _joined(ids.weights, spans)
    if is_one_each(ids.offsets, len(ids.values), look=False):
        return one_each(len(values)), values, weights
    lengths = ids.offsets.diff().view(len(ids.features), batch)[list(features)].reshape(-1)
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets, values, weights


def _joined(values: Tensor | None, spans: list[slice]) -> Tensor | None:
    """Some spans of `values`, in order; tables that no feature reads have none."""
    if values is None:
        return None
    return torch.cat([values[span] for span in spans]) if spans else values[:0]


# -----------------------------------------------------------------------------
# How cached rows lie over the ranks: the regions of each group, and their slots.

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
        return np.sort(np.concatenate(parts))


@dataclass(frozen=True)
class TableSettings:
    """How rows are cached, planned and summed; the same on all ranks.

    `mode`: `data` caches C rows per rank over the node's store, `resident` has every row on every
    device, `host` keeps none; `slots`: C of each group (only mode `data` reads it); `lookahead`: L;
    `prefetch`: P; `reduction`: `ordered` or `native`; `dtype` of rows; `validate`: check every law
    of every plan; `fingerprint`: a number that must agree over the ranks; `schedule`: `overlapped`
    or `serial`; `placement`: of cached rows in mode `data`; `access`: `staged` or `zero_copy`;
    `pooled`: lookups give bags, else the row of every id; `planner_threads`: of this rank, which
    alone may differ.
    """

    mode: str = "data"
    slots: Sequence[int] = ()
    lookahead: int = 8
    prefetch: int = 1
    policy: Policy = DEFAULT
    reduction: str = "ordered"
    seed: int = 0
    dtype: torch.dtype = torch.float32
    validate: bool = False
    fingerprint: int = 0
    schedule: str = "overlapped"
    placement: Placement = field(default_factory=Placement)
    access: str = STAGED
    pooled: bool = True
    planner_threads: int = 1

    def placed(self, world: World) -> Placement:
        """How rows lie; the modes without a cache have them on every rank, and on one rank all
        placements are the same."""
        return self.placement if self.mode == "data" and world.size > 1 else Placement()

    def shares_early(self, world: World) -> bool:
        """Whether sharded rows may travel before the step that reads them."""
        placed = self.placed(world)
        return placed.kind != REPLICATED and placed.early and self.prefetch > 0


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
    """`slots` per device, C, over the regions of a group (`split_slots`)."""
    layout, hot = group.layout, group.hot_rows
    if hot is None:
        return RegionSlots(slots)
    most = int(hot.sizes.max())
    return RegionSlots(*split_slots(slots, most, layout.local_rows, layout.world_size))


def state_slots(slots: RegionSlots, world: World, placement: Placement) -> StateSlots | None:
    """Which slots have optimizer state on this rank; None: all."""
    if placement.state == REPLICATED or not slots.replicated:
        return None
    own = slots.own_replicated(world.rank, world.size)
    return StateSlots(own.start, own.stop - own.start, slots.replicated)


# -----------------------------------------------------------------------------
# Whether the cache has room for a step: expected before training, refused while it runs.


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
    world, hot = group.layout.world_size, group.hot_rows
    if hot is None:
        return replicated * world
    if not (fullest := int(hot.sizes.max())):
        return sharded
    return max(2 * world * max(replicated, 1), min(2 * sharded, sharded + world * fullest))


def too_large(
    step: int,
    kind: str,
    groups: Sequence[TableGroup],
    rows: np.ndarray,
    regions: Sequence[Region],
) -> StepTooLargeError:
    """Why `step` is refused and how to avoid it.

    `kind`: of its batch; `rows`: the slots that it needs, int64 `[W, regions]`.
    """
    slots = [region.planner.slots for region in regions]
    home, place = np.unravel_index(np.argmax(rows / np.asarray(slots)), rows.shape)
    needs, has, region = int(rows[home, place]), slots[place], regions[place]
    group = groups[region.group]
    what = "" if kind == "train" else " (evaluation)"
    lie = "" if group.hot is None else ("sharded " if region.sharded else "replicated ")
    on_device = has * (1 if region.sharded else len(rows))
    split = "; cache.split={table: rows} gives each width its slots, by_curve by need"
    split = split if len(groups) > 1 else ""
    return StepTooLargeError(
        f"step {step}{what} needs {needs} slots at home rank {home} for its distinct {lie}rows, "
        f"where {has} are, of {on_device} on each device (tables of width {group.dim}): set "
        f"{_way_out(groups, rows, regions)}, or lower data.global_batch_size{split}",
        rows=needs,
        slots=has,
    )


def _way_out(groups: Sequence[TableGroup], rows: np.ndarray, regions: Sequence[Region]) -> str:
    """What to set, that a step of `rows`, int64 `[W, regions]`, finds room."""
    needs = np.zeros((len(groups), 2), dtype=np.int64)
    for column, region in enumerate(regions):
        needs[region.group, int(region.sharded)] = rows[:, column].max()
    slots = [enough_slots(g, *need) for g, need in zip(groups, needs.tolist(), strict=True)]
    most = [group.layout.world_size * group.layout.local_rows for group in groups]
    keys, later = "cache.replicated_rows, cache.replicated_share", "later ones may need more"
    enough = f"cache.rows={smallest_cache_rows(groups, slots)} or more"
    if not any(group.hot is not None and len(group.hot) for group in groups):
        return f"{enough} (which holds this step; {later})"
    if any(count > limit for count, limit in zip(slots, most, strict=True)):
        # A group gets no more slots than it has rows.
        return f"other rows to replicate ({keys}; no cache.rows holds this step with these)"
    return (
        f"{enough} (which holds this step with these replicated rows; {later}), or other rows to "
        f"replicate ({keys})"
    )
