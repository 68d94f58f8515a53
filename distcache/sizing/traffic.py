"""Bytes per rank and step of each placement, device memory, and hits: formulas over counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from distcache.errors import StepTooLargeError
from distcache.layout import RowLayout, TableSpec
from distcache.planner.home import HomePlanner
from distcache.replay import HomeRun
from distcache.sizing.cluster import Cluster
from distcache.sizing.demand import Demand, GroupDemand, TableDemand

# -----------------------------------------------------------------------------
# Bytes per rank and step of each placement, as `comm.counters` counts them.
#
# Letters: s bytes of a row (D elements), k = (W-1)/W, q and Q distinct rows of a rank and of all, b
# samples per rank, M rows fetched by all homes. Rows have homes like independent uniform draws.
#
# | placement | stage | bytes that leave a rank |
# |---|---|---|
# | replicated | `row_gradients` to homes, `row_sums` to all | ksq, ksQ' |
# | | `fill`: fetched rows (with state, unless it lies at the home) | kM' (s + state) |
# | sharded | `early_rows` + `late_rows` to the ranks that named them | ksq |
# | | `row_gradients` back | ksq |
# | mixed | the prefix as replicated, the rest as sharded | |
# | table_wise | `pooled`, `pooled_gradients`: a vector per sample and feature | ksb each |
# | row_wise | the same as partial sums: reduce-scatter, all-gather | (W-1)sb each |
#
# Q' and M' are padded: W times the rows of the home that has most (`padded_rows`).
#
# A part of these bytes goes between N nodes of G ranks:
#
# | stage | pattern | bytes between nodes |
# |---|---|---|
# | `early_rows` + `late_rows`, row gradients, pooled vectors | EACH | (W-G)/(W-1) of them |
# | `fill`, `row_sums`, partial sums; dense gradients | RING; TREE | 1/G of them |

REPLICATED, SHARDED, MIXED = "replicated", "sharded", "mixed"
TABLE_WISE, ROW_WISE = "table_wise", "row_wise"
RESIDENT = "resident"

CACHED = (REPLICATED, SHARDED, MIXED)
"""Placements of `parallel=data`."""
HYBRID = (TABLE_WISE, ROW_WISE)
"""Tables sharded over the devices, whole or cut by rows, as TorchRec's pooled bags do it."""
# `RESIDENT`: every row on every device, which is what cached rows are compared with.

DENSE = "dense"


EACH, RING, TREE = "each", "ring", "tree"


@dataclass(frozen=True)
class Exchange:
    """One exchange of a step.

    `nbytes`: bytes that leave a rank, the mean over ranks; `busiest`: those of the busiest rank
    relative to it, sent or received; `pattern`: `EACH` rank to each other one, around a `RING`
    (reduce-scatter, all-gather), or up and down a `TREE` (all-reduce).
    """

    stage: str
    nbytes: float
    busiest: float = 1.0
    pattern: str = EACH


@dataclass(frozen=True)
class Traffic:
    """Traffic of one rank in a step: collectives in program order, bytes of rows over its host
    link, and of index tensors, which go to devices that have memory of their own."""

    exchanges: tuple[Exchange, ...]
    host_in: float = 0.0
    host_out: float = 0.0
    index_bytes: float = 0.0

    @property
    def collective_bytes(self) -> float:
        """Rows and row gradients that leave a rank: the counter of that name."""
        return sum(e.nbytes for e in self.exchanges if e.stage != DENSE)

    @property
    def dense_bytes(self) -> float:
        """Gradients of the dense part: `dense_collective_bytes`."""
        return sum(e.nbytes for e in self.exchanges if e.stage == DENSE)

    def by_link(self, cluster: Cluster) -> tuple[float, float]:
        """Return the parts of `collective_bytes` that stay inside the node and that leave it."""
        pairs = [split(e, cluster) for e in self.exchanges if e.stage != DENSE]
        return sum(inside for inside, _ in pairs), sum(between for _, between in pairs)

    def inter_node_bytes(self, cluster: Cluster) -> float:
        """Return all bytes that leave the node, dense gradients too: the counter of that name."""
        return sum(split(e, cluster)[1] for e in self.exchanges)


def split(exchange: Exchange, cluster: Cluster) -> tuple[float, float]:
    """Bytes of an exchange inside a rank's node and to other nodes.

    Peers are alike, so bytes go to them in equal shares; of a ring's (or tree's) hops one in each
    node leaves it.
    """
    peers, local = cluster.ranks - 1, cluster.local_ranks
    if peers == 0 or cluster.nodes == 1:
        return exchange.nbytes, 0.0
    leaving = (cluster.ranks - local) / peers if exchange.pattern == EACH else 1 / local
    return exchange.nbytes * (1 - leaving), exchange.nbytes * leaving


AT_HOME = "home"
"""The optimizer state of replicated rows lies at their homes alone."""


def padded_rows(rows: float, varying: float, world_size: int) -> float:
    """Rows in the parts of an all-gather of `rows` distinct rows from their homes, of which each of
    `world_size` parts is as long as the largest one.

    `varying`: the variance of a home's rows, times W. The largest of W normal deviates is about one
    that a share (W - 3/8) / (W + 1/4) of them does not exceed (Blom 1958).
    """
    if world_size == 1:
        return rows
    deviate = NormalDist().inv_cdf((world_size - 0.375) / (world_size + 0.25))
    return rows + world_size * deviate * math.sqrt(varying / world_size)


def replicated_exchanges(
    group: GroupDemand, world_size: int, fetched: float, itemsize: int, state: str
) -> list[Exchange]:
    """A replicated group, of whose rows `fetched` are fetched in a step (over all homes).

    Rows are fetched with their state unless that lies at home, which sends back sums, or rows.
    """
    k, gradient = (world_size - 1) / world_size, group.dim * itemsize
    filled = group.row_bytes(itemsize, 0 if state == AT_HOME else group.state_width)
    back = group.row_bytes(itemsize) if state == AT_HOME else gradient
    # Of a table that is touched as a whole, homes have the same number of rows in each step.
    varying = sum(t.world_rows * (1 - t.world_rows / t.rows) for t in group.tables if t.rows)
    summed = padded_rows(group.world_rows, varying, world_size)
    return [
        Exchange("fill", k * padded_rows(fetched, fetched, world_size) * filled, pattern=RING),
        Exchange("row_gradients", k * group.rank_rows * gradient),
        Exchange("row_sums", k * summed * back, pattern=RING),
    ]


def sharded_exchanges(group: GroupDemand, world_size: int, itemsize: int) -> list[Exchange]:
    """A sharded group. Rows that some rank touched in the step before travel after its update."""
    row = group.row_bytes(itemsize)
    gradient = group.dim * itemsize
    k = (world_size - 1) / world_size
    return [
        Exchange("late_rows", k * group.late_rows * row),
        Exchange("early_rows", k * (group.rank_rows - group.late_rows) * row),
        Exchange("row_gradients", k * group.rank_rows * gradient),
    ]


def hybrid_exchanges(demand: Demand, layout: str, itemsize: int) -> list[Exchange]:
    """A hybrid layout of `HYBRID`, whose tables are read by one feature each."""
    world, batch = demand.world_size, demand.batch
    k = (world - 1) / world
    cut, whole, tables = 0.0, 0.0, 0
    for group in demand.groups:
        in_rows, kept = _cut(group, layout, world)
        cut += len(in_rows) * batch * group.dim * itemsize
        whole += len(kept) * batch * group.dim * itemsize
        tables += len(kept)
    found = []
    if tables:
        # The rank with most of the tables, relative to the mean: in one direction it sends their
        # vectors to all others, in the other it receives as much.
        busiest = math.ceil(tables / world) * world / tables
        found += [Exchange(s, k * whole, busiest) for s in ("pooled", "pooled_gradients")]
    if cut:
        stages = ("partial_sums", "partial_gradients")
        found += [Exchange(s, (world - 1) * cut, pattern=RING) for s in stages]
    return found


def _cut(
    group: GroupDemand, layout: str, world_size: int
) -> tuple[list[TableDemand], list[TableDemand]]:
    """The tables that a hybrid layout cuts by rows, and those that stay whole; TorchRec's cuts them
    where shards of ceil(rows / W) leave no rank without."""
    cut: tuple[list[TableDemand], list[TableDemand]] = ([], [])
    for table in group.tables:
        splits = -(-table.rows // world_size) * (world_size - 1) < table.rows
        cut[layout == TABLE_WISE or not splits].append(table)
    return cut


def dense_exchange(parameters: int, world_size: int, itemsize: int = 4) -> Exchange:
    """The all-reduce of the dense gradients."""
    nbytes = 2 * (world_size - 1) / world_size * parameters * itemsize
    return Exchange(DENSE, nbytes, pattern=TREE)


# -----------------------------------------------------------------------------
# Device memory of a placement: slots or shards, and the buffers of a step.


@dataclass(frozen=True)
class Part:
    """Rows of a group that lie alike, `copied` on every rank or each at its home alone, and the
    `slots` of a rank for them."""

    rows: GroupDemand
    slots: int
    copied: bool


def cache_memory(parts: Sequence[Part], world_size: int, itemsize: int, state: str) -> float:
    """Bytes of slots with their state, and of the rows and gradients of a step.

    A step holds a copy of its rows and their gradients: of all ranks' rows where they are
    replicated, of the own ones and, at their home, those that come from others where they are
    sharded. There is room to spare (`room_for`). `state`: where that of replicated rows lies.
    """
    nbytes = 0.0
    for part in parts:
        dim, held = part.rows.dim, part.rows.state_width * 1.0
        rank_rows, world_rows, home_rows = part.rows.buffers(world_size)
        kept = 2 * world_rows if part.copied else 3 * rank_rows + home_rows
        if part.copied and state == AT_HOME:
            held /= world_size
        nbytes += part.slots * part.rows.row_bytes(itemsize, held) + dim * itemsize * kept
    return nbytes


def hybrid_memory(
    demand: Demand, layout: str, itemsize: int, exchanges: Sequence[Exchange]
) -> tuple[int, float]:
    """The rows on the fullest rank, and the bytes of its shards with their state, and of what a
    step sends and receives.

    Whole tables go, the largest first, each to the rank that holds least.
    """
    most, floats = 0, 0
    for group in demand.groups:
        cut, whole = _cut(group, layout, demand.world_size)
        load = [0] * min(demand.world_size, max(len(whole), 1))
        for rows in sorted((table.rows for table in whole), reverse=True):
            load[load.index(min(load))] += rows
        rows = max(load) + sum(math.ceil(table.rows / demand.world_size) for table in cut)
        most, floats = most + rows, floats + rows * (group.dim + group.state_width)
    return most, floats * itemsize + 2 * sum(e.nbytes * e.busiest for e in exchanges)


# -----------------------------------------------------------------------------
# How many rows of a step a cache holds already, from popularity alone.
#
# Rows are touched independently from step to step (the independent reference model). The planner of
# policy `lookahead` with tail `lfu` keeps the rows that are used again within its window, and
# beside them those used most often: once popularity is learnt, the most popular rows stay for good,
# and the others pass through. Of the steps before that, `miniature` tells. Where ids are at hand,
# `replay` counts what this estimates.


class Hits(NamedTuple):
    """Per step, over all homes: `touched` distinct rows, of which `fetched` are missing, and
    `written_back` rows that leave for them."""

    touched: float
    fetched: float
    written_back: float

    @property
    def rate(self) -> float:
        """Hit rate of distinct rows; 1 where none is touched."""
        return 1.0 - self.fetched / self.touched if self.touched else 1.0


def expected_hits(
    group: GroupDemand, slots: float, window: int, prefetch: int, steps: int | None = None
) -> Hits:
    """The hits of a cache of `slots` distinct rows of `group`, over all homes.

    `window` L, `prefetch` P; `steps`: of a run that starts with an empty cache, where every first
    use is a fetch, and rows that leave are fetched again: as often as in a miniature of its first
    steps, and from there on as once it is warm. None: once it is warm.
    """
    met = [table.met for table in group.tables] or [(np.empty(0), np.empty(0))]
    rows, chance = (np.concatenate(parts) for parts in zip(*met, strict=True))
    order = np.argsort(-chance, kind="stable")  # the likeliest first; those never touched left out
    rows, chance = rows[order], np.minimum(chance[order], 1.0)
    used = (rows > 0) & (chance > 0)
    rows, chance = rows[used], chance[used]
    touched = float(rows @ chance)
    if touched == 0:
        return Hits(0.0, 0.0, 0.0)
    inside, missing = _warm(rows, chance, slots, window, prefetch)
    missed = float((1.0 - inside) @ missing)
    if steps is None:
        return Hits(touched, missed, missed)

    def seen(steps: int) -> np.ndarray:
        return rows * (1.0 - (1.0 - chance) ** steps)

    if (every := float(seen(steps).sum())) <= slots:  # nothing leaves
        return Hits(touched, every / steps, 0.0)
    fetched = missed * steps + float(inside @ seen(steps))  # were popularity known from the start
    small = miniature(rows, chance, slots, (window, prefetch), steps)
    if small is not None:
        played, again = small
        fetched += float((1.0 - inside) @ seen(played)) + again - missed * played
    return Hits(touched, fetched / steps, max(fetched - slots, 0.0) / steps)


def _warm(
    rows: np.ndarray, chance: np.ndarray, slots: float, window: int, prefetch: int
) -> tuple[np.ndarray, np.ndarray]:
    """A warm cache, by bucket, float64 `[k]`: the share of rows that stay for good, and the rows of
    a step that a cache without them would not have.

    Static rows hit always, the others where they are used again soon.

    A row that passes through stays P + 1 steps, or until its next use if that is at most
    G = P + 1 + L steps away: so the planner sees it when the row might leave.
    """
    kept, static = prefetch + 1 + window, 0.0
    while True:
        rest = (1.0 - chance) ** kept
        stays = 1.0 - rest + chance * rest * (prefetch + 1 - kept)
        passing = rows * np.minimum(stays, 1.0)  # shares of the time in the cache
        ends = np.concatenate(([0.0], np.cumsum(rows)))
        room = ends + passing.sum() - np.concatenate(([0.0], np.cumsum(passing)))
        if room[0] <= slots or kept == prefetch + 1:
            break
        kept -= 1  # the slots do not hold all rows of the window: what is used last goes
    if room[0] < slots:
        static = float(np.interp(slots, room, ends))
    inside = np.clip((static - ends[:-1]) / rows, 0.0, 1.0)
    return inside, rows * chance * (1.0 - chance) ** kept


# -----------------------------------------------------------------------------
# What the planner does with drawn rows: a small copy of a run from its first step on.
#
# Where popularity must be learnt, rows are kept that a planner who knew it would not keep, and the
# other way round. How often depends on all of the policy, so the policy itself decides here: a
# share R of the rows, drawn by their popularity, and R times the slots (Waldspurger et al., "Cache
# modeling and optimization using miniature simulations", USENIX ATC 2017).

USES = 400_000
"""Uses of rows that are drawn at most."""

_SLOTS = 1000
"""Slots that the copy has at least; it has fewer steps where it would have fewer slots."""

_SURE = 8.0
"""Rows are drawn with at most so many uses in a step: as good as always named."""


def miniature(
    rows: np.ndarray, chance: np.ndarray, slots: float, ahead: tuple[int, int], steps: int
) -> tuple[int, float] | None:
    """The default policy over at most `steps` steps from an empty cache of `slots` slots: over how
    many, and the rows fetched again, as they had left, scaled up.

    `rows[i]` rows are touched by a step with probability `chance[i]` each, independently; float64
    `[k]`; `ahead`: L and P. The same input gives the same counts. None where a step has more rows
    than slots.
    """
    rate = np.minimum(-np.log1p(-np.minimum(chance, 1.0 - 1e-12)), _SURE)
    uses = float(rows @ rate)
    least = min(_SLOTS / slots, 1.0)
    steps = int(min(steps, max(USES / (least * uses), 1.0)))
    share = min(USES / (steps * uses), 1.0)
    drawn = _draw(rows * share, rate, steps)
    total = max((int(rows.max()) + 1 for rows in drawn if len(rows)), default=1)
    layout = RowLayout([TableSpec("drawn", total, 1, ("drawn",))], 1)
    window, prefetch = ahead
    run = HomeRun(HomePlanner(layout, 0, max(round(slots * share), 1), prefetch))
    try:
        decided = run.over((("train", rows) for rows in drawn), window)
        fetched = sum(len(decision.fetch) for decision, *_ in decided)
    except StepTooLargeError:
        return None
    return steps, (fetched - len(np.unique(np.concatenate(drawn)))) / share


def _draw(rows: np.ndarray, rate: np.ndarray, steps: int) -> list[np.ndarray]:
    """Distinct rows of every step, numbered 0, 1, ...; int64.

    A row that each step names a Poisson number of times, `rate` on average, is named at all with
    its Q, each time independently. Of buckets of less than a row, every so many have one.
    """
    rng = np.random.default_rng(0)
    ends = np.floor(np.cumsum(rows) + 0.5)
    whole = np.diff(ends, prepend=0.0)
    number = rng.poisson(whole * rate * steps)
    bucket = np.repeat(np.arange(len(rows)), number)
    row = (ends - whole)[bucket] + np.floor(rng.random(len(bucket)) * whole[bucket])
    step = rng.integers(0, steps, len(bucket))
    _, row = np.unique(row, return_inverse=True)
    step, row = np.divmod(np.unique(step * (len(row) + 1) + row), len(row) + 1)
    return np.split(row, np.searchsorted(step, np.arange(1, steps)))
