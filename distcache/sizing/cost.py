"""Cost of a step: rows, bytes, seconds and memory of one placement, and the cheapest of all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from distcache.errors import ConfigError, unknown_value
from distcache.layout import split_slots
from distcache.sizing.cluster import Cluster, Compute, HostTimes
from distcache.sizing.demand import Demand
from distcache.sizing.traffic import (
    AT_HOME,
    CACHED,
    DENSE,
    HYBRID,
    MIXED,
    REPLICATED,
    RESIDENT,
    RING,
    SHARDED,
    TABLE_WISE,
    TREE,
    Exchange,
    Hits,
    Part,
    Traffic,
    cache_memory,
    dense_exchange,
    expected_hits,
    hybrid_exchanges,
    hybrid_memory,
    replicated_exchanges,
    sharded_exchanges,
    split,
)

# -----------------------------------------------------------------------------
# Seconds of a step: exposed latencies + bytes / bandwidth per link - what hides behind compute.
#
# A step lasts as long as the longest of six: its critical path (compute and the exchanges that
# compute waits for), all that its network sends, all that its host link moves, and the time of each
# of three host threads, which work on steps ahead: one launches training's kernels, one plans, one
# moves rows. Fills and rows that travel early hide on the network, all movement on the host link.

HIDDEN_STAGES = ("fill", "early_rows")
"""Exchanges of rows that the coming steps need: beside compute."""

BACKWARD_SHARE = 2 / 3
"""Share of a step's compute beside which DDP sums dense gradients (hybrid)."""


class HostSeconds(NamedTuple):
    """Seconds per step of the threads of a rank's host: training, which launches kernels, the
    planner, and the mover."""

    launch: float = 0.0
    planner: float = 0.0
    mover: float = 0.0


COMPUTE, LINK = "compute", "link"
BINDS = (COMPUTE, LINK, *HostSeconds._fields)
"""Names of the parts that a step can be as long as."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step. `dense`, `sparse`: what the rank computes; `exposed`: exchanges that
    compute waits for; `hidden`: exchanges beside compute; `host`: the host link; `threads`: those
    of its host; `waiting`: what network, host link or a thread take longer than the critical path;
    `total`: the step; `binds`: which of `BINDS` it is as long as."""

    dense: float
    sparse: float
    exposed: float
    hidden: float
    host: float
    waiting: float
    total: float
    threads: HostSeconds
    binds: str


def exchange_seconds(exchange: Exchange, cluster: Cluster) -> float:
    """Seconds of one exchange of the busiest rank: a collective, whose links work side by side."""
    if exchange.nbytes <= 0 or cluster.ranks == 1:
        return 0.0
    inside, between = (exchange.busiest * part for part in split(exchange, cluster))
    local = cluster.local_ranks
    nodes = cluster.nodes
    ways = {
        RING: (nodes * (local - 1), nodes),
        TREE: (2 * math.log2(local), 2 * math.log2(nodes)),
    }
    # Messages that follow one another on the way to ranks of its node, and of others.
    near, far = ways.get(exchange.pattern, (local - 1, cluster.ranks - local))
    seconds = [cluster.inside.seconds(inside, near if inside else 0)]
    if cluster.between is not None and between:
        seconds.append(cluster.between.seconds(between, far))
    return cluster.collective_s + max(seconds)


def step_time(
    traffic: Traffic,
    cluster: Cluster,
    compute: tuple[float, float],
    threads: HostSeconds,
    ddp: bool = False,
) -> StepTime:
    """The time of a step that moves `traffic` on `cluster` and computes its dense and its sparse
    part, seconds each, with what the `threads` of its host do; `ddp`: dense gradients hide behind
    backward.

    `cluster.overlap` is the share of what could hide that does: 1 where copies and collectives have
    engines of their own, 0 where they and the threads take the processor that computes.
    """
    dense, sparse = compute
    exposed, hidden = 0.0, 0.0
    for exchange in traffic.exchanges:
        seconds = exchange_seconds(exchange, cluster)
        behind = seconds if exchange.stage in HIDDEN_STAGES else 0.0
        if exchange.stage == DENSE and ddp:
            behind = min(seconds, BACKWARD_SHARE * dense)
        behind *= cluster.overlap
        hidden += behind
        exposed += seconds - behind
    host_in = traffic.host_in + cluster.overlap * traffic.index_bytes
    host = max(cluster.host.seconds(host_in), cluster.host.seconds(traffic.host_out))
    alone = 1 - cluster.overlap
    path = {COMPUTE: dense + sparse, LINK: exposed + alone * host}
    path |= {name: alone * seconds for name, seconds in threads._asdict().items()}
    ends = {LINK: max(exposed + hidden, host), **threads._asdict()}
    critical, longest = sum(path.values()), max(ends, key=ends.__getitem__)
    total = max(critical, ends[longest])
    binds = longest if total > critical else max(path, key=path.__getitem__)
    waiting = total - (dense + sparse + exposed)
    return StepTime(dense, sparse, exposed, hidden, host, waiting, total, threads, binds)


# -----------------------------------------------------------------------------
# What a step asks of the threads of its host.

LAUNCHES, GROUP_LAUNCHES, RANK_LAUNCHES = 12, 6, 10
MOVES, GROUP_MOVES = 1, 7
"""Kernels that training's thread and autograd's launch, of a step, for each group of tables of one
width more, and with several ranks; kernels and copies of movement, in staging, of a step and for
each group: counted for DLRM with seven layers and SGD on the CUDA device of tests/fake_device, the
dense part's graph as one. Adagrad and Adam have up to four more."""

DENSE_LAUNCHES, FUSED_LAUNCHES = 52, 15
"""Kernels of mode `hybrid`: more of the dense part than with its graph, counted there too; and
those of a group, whose lookup and update are one, with the sorts of their backward: an estimate."""

INDEX_BYTES = (8, 8, 4, 8)
"""Bytes of index tensors that movement sends: for an id (its row's place, its place in the order of
occurrences), for a row of the plan (its slot, and again where it is fetched), for a row that the
rank names (where its occurrences begin), and for one of these where there are several ranks (its
place among all rows, and the home's own)."""


def host_seconds(demand: Demand, host_times: HostTimes, all_hits: Sequence[Hits]) -> HostSeconds:
    """Return the seconds per step of a rank's host threads, for cached or resident rows.

    `all_hits`: of the parts of all groups, over all ranks: their fetched and written-back rows are
    the rows that movers gather and scatter.
    """
    groups = len(demand.groups)
    ids = sum(group.lookups for group in demand.groups)
    moved = sum(hits.fetched + hits.written_back for hits in all_hits) / demand.world_size
    moves = MOVES + GROUP_MOVES * groups
    return HostSeconds(
        launch=host_times.step_s + host_times.launch_s * launches_of(demand, GROUP_LAUNCHES),
        planner=host_times.id_s * ids,
        mover=host_times.row_s * moved + host_times.launch_s * moves,
    )


def index_bytes(demand: Demand, parts: Sequence[Part]) -> float:
    """Return the bytes of index tensors that movement sends to a rank's device for one step. The
    plan of a rank has the rows of all ranks where they are replicated."""
    ids = sum(group.lookups for group in demand.groups)
    planned = sum(p.rows.world_rows if p.copied else p.rows.rank_rows for p in parts)
    requested = INDEX_BYTES[2] + INDEX_BYTES[3] * (demand.world_size > 1)
    return INDEX_BYTES[0] * ids + INDEX_BYTES[1] * planned + requested * demand.rank_rows


def launches_of(demand: Demand, group_launches: int) -> int:
    """Kernels of a training step, with so many for each group; the dense part is one of them."""
    several = RANK_LAUNCHES * (demand.world_size > 1)
    return LAUNCHES + group_launches * len(demand.groups) + several


# -----------------------------------------------------------------------------
# One placement on one cluster: rows, bytes, seconds and device memory of a step.

_KERNEL_WIDTH = 4
"""Elements that widths of FBGEMM's tables are multiples of."""


@dataclass(frozen=True)
class Settings:
    """A run, beside its ids and its cluster.

    `slots`: C per rank of each group; `state`: where the optimizer state of replicated rows lies,
    `replicated` (on every rank) or `home`; `window` L, `prefetch` P; `steps`: of the run, from an
    empty cache, None: a warm cache; `itemsize`: bytes of an element; `dense_parameters`: of the
    dense part.
    """

    slots: tuple[int, ...]
    state: str = REPLICATED
    window: int = 8
    prefetch: int = 1
    steps: int | None = None
    itemsize: int = 4
    dense_parameters: int = 0


@dataclass(frozen=True)
class Prediction:
    """Cost of one placement, per rank and step.

    `device_bytes`: of slots or shards, and buffers; `refused`: why it cannot run, None if it can;
    `hits`: over all groups, None for hybrid layouts, which fetch nothing; `replicated_rows`:
    {table: K} of `mixed`.
    """

    placement: str
    traffic: Traffic
    time: StepTime
    device_bytes: float
    refused: str | None = None
    hits: Hits | None = None
    replicated_rows: dict[str, int] = field(default_factory=dict)

    @property
    def cost(self) -> dict[str, float]:
        """By objective: `time` (seconds of a step) and `bytes` (rows and row gradients that
        leave a rank)."""
        return {"time": self.time.total, "bytes": self.traffic.collective_bytes}


def predict(
    placement: str,
    demand: Demand,
    cluster: Cluster,
    settings: Settings,
    replicated_rows: Mapping[str, int] | None = None,
) -> Prediction:
    """Predict a step of `demand` on `cluster` in a placement of `CACHED` or `HYBRID`, or
    `RESIDENT`.

    `replicated_rows`: {table: K} of `mixed`, others 0. Raises ConfigError for a placement that is
    none, or a demand of another number of ranks than the cluster has.
    """
    if demand.world_size != cluster.ranks:
        raise ConfigError(
            f"the demand is of {demand.world_size} ranks, the cluster has {cluster.ranks}: "
            "describe the same world"
        )
    if placement in HYBRID:
        return _hybrid(placement, demand, cluster, settings)
    if placement == RESIDENT:
        settings = replace(settings, slots=tuple(group.rows for group in demand.groups))
    elif placement not in CACHED:
        raise unknown_value("placement", placement, CACHED + HYBRID)
    rows: Mapping[str, int] = {}
    if placement in (REPLICATED, RESIDENT):
        rows = {table.name: table.rows for table in demand.tables}
    elif placement == MIXED and replicated_rows:
        rows = replicated_rows
    return _cached(placement, demand, cluster, settings, rows)


def _cached(
    placement: str,
    demand: Demand,
    cluster: Cluster,
    settings: Settings,
    rows: Mapping[str, int],
) -> Prediction:
    world, item, state = demand.world_size, settings.itemsize, settings.state
    parts: list[Part] = []
    for group, slots in zip(demand.groups, settings.slots, strict=True):
        hot, cold = group.split([rows.get(table.name, 0) for table in group.tables])
        homes = (-(-hot.rows // world), -(-group.rows // world))  # rows are spread evenly
        shared, own = split_slots(slots, *homes, world) if cold.rows else (slots, 0)
        parts += [Part(hot, shared, True), Part(cold, own, False)]
    parts.sort(key=lambda part: not part.copied)
    found, exchanges, host_in, host_out = list[Hits](), list[Exchange](), 0.0, 0.0
    for part in parts:
        ahead = (settings.window, settings.prefetch, settings.steps)
        own = expected_hits(part.rows, part.slots * (1 if part.copied else world), *ahead)
        if placement == RESIDENT:
            own = Hits(own.touched, 0.0, 0.0)
        if part.copied:
            exchanges += replicated_exchanges(part.rows, world, own.fetched, item, state)
        else:
            exchanges += sharded_exchanges(part.rows, world, item)
        row = part.rows.row_bytes(item, part.rows.state_width)
        host_in += own.fetched / world * row
        host_out += own.written_back / world * row
        found.append(own)
    hits = Hits(*map(sum, zip(*found, strict=True)))
    exchanges = [e for e in exchanges if e.nbytes > 0]
    exchanges.append(dense_exchange(settings.dense_parameters, world, item))
    threads = host_seconds(demand, cluster.host_times, found)
    traffic = Traffic(tuple(exchanges), host_in, host_out, index_bytes(demand, parts))
    sparse = _row_seconds(parts, state, world, cluster.compute)
    compute = cluster.compute.sample_s * demand.batch, sparse
    time = step_time(traffic, cluster, compute, threads)
    memory = cache_memory(parts, world, item, state)
    replicated = {}
    if placement == MIXED:
        replicated = {t.name: int(rows[t.name]) for t in demand.tables if rows.get(t.name)}
    refused = _too_small(parts, world) or _too_large(memory, cluster)
    return Prediction(placement, traffic, time, memory, refused, hits, replicated)


def _row_seconds(parts: Sequence[Part], state: str, world: int, compute: Compute) -> float:
    """Replicated rows are copied into the step's leaf and updated on every rank (with their state
    at home, by their homes, and copied by the others); sharded ones are gathered by their homes
    and received, there and back, and updated once."""
    lookups = updates = copies = 0.0
    for part in parts:
        near, every = part.rows.rank_rows, part.rows.world_rows
        lookups += part.rows.lookups
        if part.copied:
            at_home = state == AT_HOME and world > 1
            updates += every / world if at_home else every
            copies += every * (2 if at_home else 1) + (2 * near if world > 1 else 0)
        else:
            updates += every / world
            copies += (4 if world > 1 else 1) * near
    return compute.lookup_s * lookups + (compute.update_s * updates + compute.copy_s * copies)


def _hybrid(layout: str, demand: Demand, cluster: Cluster, settings: Settings) -> Prediction:
    world, item = demand.world_size, settings.itemsize
    exchanges = [e for e in hybrid_exchanges(demand, layout, item) if e.nbytes > 0]
    busiest = max([e.busiest for e in exchanges if layout == TABLE_WISE], default=1.0)
    dense = dense_exchange(settings.dense_parameters, world, item)
    traffic = Traffic((*exchanges, dense))
    lookups = sum(group.lookups for group in demand.groups)
    updates, each = demand.world_rows / world, cluster.compute
    sparse = busiest * (each.lookup_s * lookups + each.update_s * updates)
    launches = DENSE_LAUNCHES + launches_of(demand, FUSED_LAUNCHES)
    host_times = cluster.host_times
    threads = HostSeconds(host_times.step_s + host_times.launch_s * launches)
    time = step_time(traffic, cluster, (each.sample_s * demand.batch, sparse), threads, ddp=True)
    largest, memory = hybrid_memory(demand, layout, item, exchanges)
    refused = _too_large(memory, cluster)
    odd = [group.dim for group in demand.groups if group.dim % _KERNEL_WIDTH]
    if odd:
        refused = f"width {odd[0]} is no multiple of {_KERNEL_WIDTH}, which FBGEMM's kernels need"
    elif refused is not None:
        refused += f" (the fullest rank holds {largest:,.0f} rows)"
    return Prediction(layout, traffic, time, memory, refused)


def _too_large(memory: float, cluster: Cluster) -> str | None:
    if cluster.device_memory is None or memory <= cluster.device_memory:
        return None
    return f"needs {memory:,.0f} bytes of device_memory={cluster.device_memory:,}"


def _too_small(parts: Sequence[Part], world: int) -> str | None:
    """Why training would refuse steps: a home's rows, with six deviations, exceed its slots.

    A home of replicated rows has C / W slots, one of sharded rows all C.
    """
    for part in parts:
        slots = part.slots / world if part.copied else float(part.slots)
        _, _, needed = part.rows.buffers(world)
        needed = math.ceil(min(needed, math.ceil(part.rows.rows / world)))
        if part.rows.rows and needed > slots:
            return (
                f"a step may name {needed:,} rows of one home, which has {int(slots):,} slots: "
                "give more cache rows, or a smaller batch"
            )
    return None


# -----------------------------------------------------------------------------
# Which placement is the cheapest: `cache.placement=auto`, and the best replicated prefix K.

OBJECTIVES = ("time", "bytes")
"""Values of `cache.objective`: seconds of a step, or bytes that leave a rank."""

_THRESHOLDS = 25
"""Prefixes that are tried, by how likely a rank touches a row."""

_MOST_OF_CACHE = 0.5
"""At most this share of the slots is for replicated rows of `mixed`."""

_CLEARLY = 0.01
"""`mixed` has a parameter to go wrong: it is chosen where it saves at least this share."""


def choose_placement(
    demand: Demand, cluster: Cluster, settings: Settings, objective: str = "time"
) -> tuple[Prediction, str]:
    """The placement of cached rows with the lowest predicted cost on `cluster`, and why, in a
    sentence.

    `demand`: of one step, by `demand_at`; `objective`: `time` or `bytes`. Compares sharded,
    replicated and mixed at its best K. Placements that would be refused (too few slots, too little
    device memory) are out; the first of equals in that order wins, and mixed only where it saves
    one per cent. Pure and deterministic: ranks that call it with equal arguments choose alike.
    Raises ConfigError where no placement fits, with the reason of each.
    """
    found = compare(demand, cluster, settings, objective, hybrid=False)
    best, found = found.best, found.predictions
    if best is None:
        reasons = "; ".join(f"{p.placement}: {p.refused}" for p in found)
        raise ConfigError(f"cache.placement=auto: no placement fits: {reasons}")
    order = [best, *(p for p in found if p is not best)]
    units = {"time": ("ms per step", 1e3), "bytes": ("KiB per rank and step", 1 / 1024)}
    (unit, scale), texts = units[objective], []
    for p in order:
        cost = p.cost[objective] * scale  # three digits that count, or more
        digits = max(2, min(9, 2 - math.floor(math.log10(cost or 1.0))))
        texts.append(f"{p.placement} {cost:,.{digits}f}{' (refused)' * bool(p.refused)}")
    why = f"predicted {unit}: {', '.join(texts)}"
    return best, why


def winner(predictions: Sequence[Prediction], objective: str) -> Prediction | None:
    """The cheapest that can run; None if none can. Earlier ones win ties, `mixed` only clearly."""
    able = [p for p in predictions if p.refused is None]

    def handicapped(prediction: Prediction) -> tuple[float, bool]:
        mixed = prediction.placement == MIXED
        return prediction.cost[objective] / (1 - _CLEARLY if mixed else 1.0), mixed

    return min(able, key=handicapped, default=None)


def best_mixed(
    demand: Demand, cluster: Cluster, settings: Settings, objective: str = "time"
) -> Prediction | None:
    """`mixed` with the best replicated prefixes; None where no prefix makes a difference.

    Prefixes follow one threshold for all tables: the rows that a rank touches with at least that
    probability in a step. So the sweep has one parameter, and K of each table follows.
    """
    tried = candidate_prefixes(demand, settings)
    found = [predict(MIXED, demand, cluster, settings, rows) for rows in tried]
    return min(found, key=lambda p: (p.refused is not None, p.cost[objective]), default=None)


def candidate_prefixes(demand: Demand, settings: Settings) -> list[dict[str, int]]:
    """{table: K} for falling thresholds, as long as a group's prefixes take at most half its slots.

    Neither nothing nor everything is among them.
    """
    likely = [float(t.rank.max()) for t in demand.tables if len(t.rank)]
    least = [float(t.rank[t.rank > 0].min()) for t in demand.tables if (t.rank > 0).any()]
    if not least or max(likely) <= 0:
        return []
    found: list[dict[str, int]] = []
    for threshold in np.geomspace(max(likely) * 0.999, min(least), _THRESHOLDS):
        rows = {}  # of each table the longest prefix of rows that are as likely
        for t in demand.tables:
            likelier = int(np.append(t.rank >= threshold, False).argmin())
            rows[t.name] = round(float(np.append(0.0, t.end)[likelier]))
        for group, slots in zip(demand.groups, settings.slots, strict=True):
            if sum(rows[t.name] for t in group.tables) > _MOST_OF_CACHE * slots:
                return found
        whole = sum(rows.values()) == sum(t.rows for t in demand.tables)
        if any(rows.values()) and not whole and (not found or rows != found[-1]):
            found.append(rows)
    return found


@dataclass(frozen=True)
class Point:
    """All placements at one number of ranks. `best`: the winner by the objective, None where
    nothing can run."""

    cluster: Cluster
    demand: Demand
    predictions: tuple[Prediction, ...]
    best: Prediction | None

    def of(self, placement: str) -> Prediction | None:
        """The prediction of a placement; None where it was not made."""
        return next((p for p in self.predictions if p.placement == placement), None)


def compare(
    demand: Demand,
    cluster: Cluster,
    settings: Settings,
    objective: str,
    replicated_rows: Mapping[str, int] | None = None,
    hybrid: bool = True,
) -> Point:
    """Every placement of cached rows, mixed with `replicated_rows` (None: at its best K, where it
    has one), and every hybrid layout, where these are asked for."""
    found = [predict(name, demand, cluster, settings) for name in (SHARDED, REPLICATED)]
    if replicated_rows is not None:
        found.append(predict(MIXED, demand, cluster, settings, replicated_rows))
    elif mixed := best_mixed(demand, cluster, settings, objective):
        found.append(mixed)
    found += [predict(name, demand, cluster, settings) for name in HYBRID if hybrid]
    return Point(cluster, demand, tuple(found), winner(found, objective))


class Crossover(NamedTuple):
    """Between `before` and `after` ranks the cheapest layout changes from `old` to `new`."""

    before: int
    after: int
    old: str
    new: str


def crossovers(points: Sequence[Point]) -> list[Crossover]:
    """Return the changes of the winner from one point to the next."""
    return [
        Crossover(one.cluster.ranks, other.cluster.ranks, one.best.placement, other.best.placement)
        for one, other in itertools.pairwise(points)
        if one.best and other.best and one.best.placement != other.best.placement
    ]
