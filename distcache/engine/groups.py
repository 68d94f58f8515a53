"""Tables of one model by group, their placement, and a batch's ids as rows and bags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from distcache.cache import StateSlots
from distcache.comm.world import World
from distcache.data.batch import JaggedIds
from distcache.errors import ConfigError, DataError
from distcache.layout import RowLayout, TableSpec, group_tables

# -----------------------------------------------------------------------------
# Tables of one model by group, and a batch's ids as rows and bags of each group.

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


@dataclass(frozen=True)
class GroupBags:
    """The ids of one local batch that read one group, K = F * b bags, feature-major.

    `features`: F; `rows`: int64 `[n]`, row numbers (NumPy); `offsets`: int64
    `[K + 1]`; `weights`: `[n]` or None; `scale`: `[K, 1]` (1 / bag length for mean bags) or None.
    """

    features: int
    rows: np.ndarray
    offsets: Tensor
    weights: Tensor | None
    scale: Tensor | None

    @cached_property
    def single(self) -> bool:
        """Whether every bag has one id, without a weight."""
        bags = self.offsets.shape[0] - 1
        if self.weights is not None or len(self.rows) != bags:
            return False
        return np.array_equal(self.offsets.numpy(), _counted(bags + 1))

    @cached_property
    def bag_of(self) -> np.ndarray:
        """The bag of each id, int64 `[n]`."""
        offsets = self.offsets.numpy()
        return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


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
    """The part of `ids` that reads `group`, as rows; `dtype` is that of weights and scales.

    NumPy: this runs on the planner's thread, where a torch operation would start a pool of threads
    beside that of training.
    """
    batch = ids.batch_size
    offsets, values, weights = ids.offsets, ids.values, ids.weights
    if len(group.features) != len(ids.features):
        offsets, values, weights = _select(ids, group.features)
    rows = _rows(group, values.numpy(), offsets.numpy()[:: max(batch, 1)])
    if weights is not None:
        weights = torch.from_numpy(weights.numpy().astype(_FLOATS[dtype], copy=False))
    scale = None
    if any(group.mean):
        scale = _scale(group, np.diff(offsets.numpy()), batch, dtype)
    return GroupBags(len(group.features), rows, offsets, weights, scale)


def _rows(group: TableGroup, ids: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The rows of `ids` by the layout's numbers; those of feature f are `edges[f : f + 2]`."""
    rows = np.empty(len(ids), dtype=np.int64)
    bounds = edges.tolist()
    if bounds[0] != 0 or bounds[-1] != len(ids):
        raise DataError(f"offsets go from {bounds[0]} to {bounds[-1]} for {len(ids)} ids")
    for offset, start, stop in zip(group.offsets, bounds, bounds[1:], strict=False):
        np.add(ids[start:stop], offset, out=rows[start:stop], dtype=np.int64)
    return rows


@lru_cache(maxsize=2)
def _counted(count: int) -> np.ndarray:
    """0, 1, ..., int64 `[count]`; nobody writes to it."""
    numbers = np.arange(count)
    numbers.flags.writeable = False
    return numbers


def _scale(group: TableGroup, lengths: np.ndarray, batch: int, dtype: torch.dtype) -> Tensor:
    """What makes means of sums: 1 / bag length, or 1 where the feature's bags are sums."""
    one = _FLOATS[dtype](1)
    counts = np.maximum(lengths, 1).astype(_FLOATS[dtype])
    scale = np.where(np.repeat(np.asarray(group.mean), batch), one / counts, one)
    return torch.from_numpy(scale).unsqueeze(1)


def _select(ids: JaggedIds, features: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Offsets, values and weights of some features, in order."""
    batch = ids.batch_size
    starts = ids.offsets[::batch] if batch else ids.offsets[:1].repeat(len(ids.features) + 1)
    spans = [slice(int(starts[f]), int(starts[f + 1])) for f in features]
    lengths = ids.offsets.diff().view(len(ids.features), batch)[list(features)].reshape(-1)
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets, _joined(ids.values, spans), _joined(ids.weights, spans)


def _joined(values: Tensor | None, spans: list[slice]) -> Tensor | None:
    """Some spans of `values`, in order; tables that no feature reads have none."""
    if values is None:
        return None
    return torch.cat([values[span] for span in spans]) if spans else values[:0]


def join_pooled(groups: Sequence[TableGroup], pooled: Sequence[Tensor]) -> Tensor:
    """Pooled bags `[b, F_g * D_g]` of every group -> `[b, sum of widths]` in feature order."""
    if len(groups) == 1:
        return pooled[0]
    columns: dict[int, Tensor] = {}
    for group, bags in zip(groups, pooled, strict=True):
        for place, feature in enumerate(group.features):
            columns[feature] = bags[:, place * group.dim : (place + 1) * group.dim]
    return torch.cat([columns[feature] for feature in sorted(columns)], dim=1)


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
        return np.sort(np.concatenate(parts))


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
