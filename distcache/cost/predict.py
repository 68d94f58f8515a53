"""One placement on one cluster: rows, bytes, seconds and device memory of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from distcache.cost.cluster import Cluster
from distcache.cost.demand import Demand, GroupDemand
from distcache.cost.traffic import (
    AT_HOME,
    CACHED,
    DENSE,
    EACH,
    HYBRID,
    MIXED,
    REPLICATED,
    RING,
    ROW_WISE_DEDUP,
    ROW_WISE_IDS,
    SHARED,
    SPREAD,
    TABLE_WISE,
    YARDSTICKS,
    Exchange,
    Hits,
    Traffic,
    cache_memory,
    dense_exchange,
    expected_hits,
    hybrid_exchanges,
    hybrid_memory,
    hybrid_rows,
    region_slots,
    replicated_exchanges,
    sharded_exchanges,
    split,
)
from distcache.errors import ConfigError

# -----------------------------------------------------------------------------
# Seconds of a step: exposed latencies + bytes / bandwidth per link - what hides behind compute.
#
# A step lasts as long as the longest of three: its critical path (compute and the exchanges that
# compute waits for), all that its network sends, and all that its host link moves. What hides is
# on
# the last two only: fills and rows that travel early, and all movement over the host link.

HIDDEN_STAGES = ("fill", "early_rows")
"""Exchanges of rows that the coming steps need: beside compute."""

BACKWARD_SHARE = 2 / 3
"""Of a step's compute; DDP sums dense gradients beside it (hybrid)."""


@dataclass(frozen=True)
class Work:
    """What a rank computes in a step: `lookups` ids, `updates` rows updated, `copies` rows copied
    on the device, `samples` through the dense part; `ddp`: dense gradients hide behind backward."""

    lookups: float
    updates: float
    copies: float
    samples: float
    ddp: bool = False


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step. `compute` = `dense` + `sparse`; `exposed`: exchanges that compute waits
    for; `hidden`: exchanges beside compute; `host`: the host link; `waiting`: what network or host
    link take longer than the critical path; `total`: the step."""

    dense: float
    sparse: float
    exposed: float
    hidden: float
    host: float
    waiting: float
    total: float

    @property
    def compute(self) -> float:
        """Time in which the rank computes."""
        return self.dense + self.sparse


def exchange_seconds(exchange: Exchange, cluster: Cluster) -> float:
    """One exchange, of the busiest rank: a collective, whose links work side by side.

    What crosses once for a node is handed on by a second one; in the first a rank sends its mates
    what it has itself, to each of the W - 1 peers as much.
    """
    if exchange.nbytes <= 0 or cluster.ranks == 1:
        return 0.0
    inside, between = (exchange.busiest * part for part in split(exchange, cluster))
    near, far = _messages(exchange.pattern, cluster)
    second = 0.0
    if exchange.pattern in (SPREAD, SHARED) and cluster.nodes > 1 and cluster.local_ranks > 1:
        own = exchange.busiest * exchange.nbytes * (cluster.local_ranks - 1) / (cluster.ranks - 1)
        second = cluster.collective_s + cluster.inside.seconds(inside - own, near)
        inside = own
    seconds = [cluster.inside.seconds(inside, near if inside else 0)]
    if cluster.between is not None and between:
        seconds.append(cluster.between.seconds(between, far))
    return cluster.collective_s + max(seconds) + second


def _messages(pattern: str, cluster: Cluster) -> tuple[float, float]:
    """Messages that follow one another on a rank's way to its node's ranks, and to other nodes."""
    local, nodes = cluster.local_ranks, cluster.nodes
    if pattern in (EACH, SHARED):
        return local - 1, cluster.ranks - local
    if pattern == SPREAD:
        return local - 1, nodes - 1
    if pattern == RING:
        return nodes * (local - 1), nodes
    return 2 * math.log2(local), 2 * math.log2(nodes)


def step_time(traffic: Traffic, work: Work, cluster: Cluster) -> StepTime:
    """The time of a step that moves `traffic` and computes `work` on `cluster`.

    `cluster.overlap` is the share of what could hide that does: 1 where copies and collectives have
    engines of their own, 0 where they take the processor that computes.
    """
    compute = cluster.compute
    dense = compute.sample_s * work.samples
    sparse = compute.lookup_s * work.lookups
    sparse += compute.update_s * work.updates + compute.copy_s * work.copies
    exposed, hidden = 0.0, 0.0
    for exchange in traffic.exchanges:
        seconds = exchange_seconds(exchange, cluster)
        behind = seconds if exchange.stage in HIDDEN_STAGES else 0.0
        if exchange.stage == DENSE and work.ddp:
            behind = min(seconds, BACKWARD_SHARE * dense)
        behind *= cluster.overlap
        hidden += behind
        exposed += seconds - behind
    host = max(cluster.host.seconds(traffic.host_in), cluster.host.seconds(traffic.host_out))
    serial = (1 - cluster.overlap) * host
    critical = dense + sparse + exposed + serial
    total = max(critical, exposed + hidden, host)
    return StepTime(dense, sparse, exposed, hidden, host, total - critical + serial, total)


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
    dense part; `fetched`: rows fetched per step over all homes, by placement, where they are known
    (from `planner.replay`) instead of estimated.
    """

    slots: tuple[int, ...]
    state: str = REPLICATED
    window: int = 8
    prefetch: int = 1
    steps: int | None = None
    itemsize: int = 4
    dense_parameters: int = 0
    fetched: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.state not in (REPLICATED, AT_HOME):
            raise ConfigError(
                f"cache.state={self.state} is unknown: choose {REPLICATED}, {AT_HOME}"
            )
        if not self.slots or min(self.slots) < 1:
            raise ConfigError(f"cache.rows: slots {self.slots}: give at least one for each group")
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"steps={self.steps}: give at least 1")


@dataclass(frozen=True)
class Prediction:
    """What a step costs. Rows over all groups, bytes and seconds per rank and step.

    `replicated_rows`: {table: K} of `mixed`; `rank_rows`, `world_rows`: distinct rows of a rank and
    of all; `hits`: None for hybrid layouts, which fetch nothing; `inside`, `between`: of
    `traffic.collective_bytes`; `device_bytes`: of slots or shards, and buffers; `refused`: why it
    cannot run, None if it can.
    """

    placement: str
    world_size: int
    replicated_rows: dict[str, int]
    rank_rows: float
    world_rows: float
    hits: Hits | None
    traffic: Traffic
    inside: float
    between: float
    time: StepTime
    device_bytes: float
    refused: str | None = None

    @property
    def collective_bytes(self) -> float:
        """Rows and row gradients that leave a rank."""
        return self.traffic.collective_bytes

    @property
    def cost(self) -> dict[str, float]:
        """By objective: `time` (seconds of a step) and `bytes` (`collective_bytes`)."""
        return {"time": self.time.total, "bytes": self.collective_bytes}


def predict(
    placement: str,
    demand: Demand,
    cluster: Cluster,
    settings: Settings,
    replicated_rows: Mapping[str, int] | None = None,
) -> Prediction:
    """What a step of `demand` costs on `cluster` in a placement of `CACHED` or `HYBRID`.

    `replicated_rows`: {table: K} of `mixed`, others 0. Raises ConfigError for a placement that is
    none, K beyond a table, or a demand of another number of ranks, or of ranks of a node, than the
    cluster has.
    """
    if demand.world_size != cluster.ranks:
        raise ConfigError(
            f"the demand is of world_size={demand.world_size}, the cluster has {cluster.ranks} "
            "ranks: describe the same world"
        )
    if cluster.nodes > 1 and demand.local_ranks != cluster.local_ranks:
        raise ConfigError(
            f"the demand is of nodes of {demand.local_ranks} ranks, the cluster has "
            f"{cluster.local_ranks} on each: describe the same world"
        )
    if placement in HYBRID:
        return _hybrid(placement, demand, cluster, settings)
    if placement not in CACHED:
        raise ConfigError(f"placement {placement} is unknown: choose {', '.join(CACHED + HYBRID)}")
    if len(settings.slots) != len(demand.groups):
        raise ConfigError(
            f"slots for {len(settings.slots)} groups, but tables of {len(demand.groups)} widths: "
            "give as many"
        )
    prefixes = _prefixes(placement, demand, replicated_rows or {})
    return _cached(placement, demand, cluster, settings, prefixes)


def _prefixes(
    placement: str, demand: Demand, replicated_rows: Mapping[str, int]
) -> list[list[float]]:
    if placement == REPLICATED:
        return [[float(table.rows) for table in group.tables] for group in demand.groups]
    rows = replicated_rows if placement == MIXED else {}
    return demand.prefixes(dict(rows))


def _cached(
    placement: str,
    demand: Demand,
    cluster: Cluster,
    settings: Settings,
    prefixes: Sequence[Sequence[float]],
) -> Prediction:
    world, item = demand.world_size, settings.itemsize
    pairs = [g.split(k) for g, k in zip(demand.groups, prefixes, strict=True)]
    hot, cold = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    regions = [
        region_slots(h, c, slots, world)
        for h, c, slots in zip(hot, cold, settings.slots, strict=True)
    ]
    ahead = (settings.window, settings.prefetch, settings.steps)
    parts = [(g, slots, True) for g, (slots, _) in zip(hot, regions, strict=True)]
    parts += [(g, world * slots, False) for g, (_, slots) in zip(cold, regions, strict=True)]
    found = [expected_hits([group], [slots], *ahead) for group, slots, _ in parts]
    hits = Hits(*(sum(values) for values in zip(*map(_values, found), strict=True)))
    hits, scale = _known(hits, settings.fetched.get(placement))
    exchanges: list[Exchange] = []
    host_in = host_out = 0.0
    for (group, _, copied), own in zip(parts, found, strict=True):
        fetched = own.fetched * scale
        if copied:
            exchanges += replicated_exchanges(group, world, fetched, item, settings.state)
        else:
            exchanges += sharded_exchanges(group, world, item, cluster.nodes)
        row = (group.dim + group.state_width) * item
        host_in += fetched / world * row
        host_out += own.written_back * scale / world * row
    exchanges = [e for e in exchanges if e.nbytes > 0]
    exchanges.append(dense_exchange(settings.dense_parameters, world, item))
    traffic = Traffic(tuple(exchanges), host_in, host_out)
    work = _work(hot, cold, demand, settings.state)
    memory = cache_memory(hot, cold, regions, settings, world)
    names = [[table.name for table in group.tables] for group in demand.groups]
    replicated = {}
    if placement == MIXED:
        for group_names, group_rows in zip(names, prefixes, strict=True):
            replicated |= {n: int(k) for n, k in zip(group_names, group_rows, strict=True) if k}
    refused = _too_small(hot, cold, regions, world) or _too_large(memory, cluster)
    return Prediction(
        placement,
        world,
        replicated,
        demand.rank_rows,
        demand.world_rows,
        hits,
        traffic,
        *traffic.by_link(cluster),
        step_time(traffic, work, cluster),
        memory,
        refused,
    )


def _values(hits: Hits) -> tuple[float, float, float]:
    return hits.touched, hits.fetched, hits.written_back


def _known(hits: Hits, fetched: float | None) -> tuple[Hits, float]:
    """`hits` with the known number of fetched rows, and that over the estimated one."""
    if fetched is None:
        return hits, 1.0
    scale = fetched / hits.fetched if hits.fetched else 1.0
    return replace(hits, fetched=fetched, written_back=hits.written_back * scale), scale


def _work(
    hot: Sequence[GroupDemand], cold: Sequence[GroupDemand], demand: Demand, state: str
) -> Work:
    """Replicated rows are copied into the step's leaf and updated on every rank (with their state
    at home, by their homes, and copied by the others); sharded ones are gathered by their homes
    and received, there and back, and updated once."""
    world = demand.world_size
    near, all_near = (sum(getattr(g, n) for g in hot) for n in ("rank_rows", "world_rows"))
    far, all_far = (sum(getattr(g, n) for g in cold) for n in ("rank_rows", "world_rows"))
    updates, copies = all_near, all_near
    if world > 1:
        copies += 2 * near
    if state == AT_HOME and world > 1:
        updates, copies = all_near / world, copies + all_near
    updates += all_far / world
    copies += (4 if world > 1 else 1) * far
    lookups = sum(group.lookups for group in demand.groups)
    return Work(lookups, updates, copies, demand.batch)


def _hybrid(layout: str, demand: Demand, cluster: Cluster, settings: Settings) -> Prediction:
    world, item = demand.world_size, settings.itemsize
    exchanges = [e for e in hybrid_exchanges(demand, layout, item) if e.nbytes > 0]
    busiest = max([e.busiest for e in exchanges if layout == TABLE_WISE], default=1.0)
    dense = dense_exchange(settings.dense_parameters, world, item)
    traffic = Traffic((*exchanges, dense))
    lookups = sum(group.lookups for group in demand.groups)
    copies = 0.0
    if layout in (ROW_WISE_IDS, ROW_WISE_DEDUP):  # rows arrive, then are looked up
        copies = 4 * (lookups if layout == ROW_WISE_IDS else demand.rank_rows)
    updates = demand.world_rows / world
    work = Work(busiest * lookups, busiest * updates, copies, demand.batch, ddp=True)
    largest = hybrid_rows(demand, layout)
    memory = hybrid_memory(demand, layout, settings, exchanges)
    refused = _too_large(memory, cluster)
    odd = [group.dim for group in demand.groups if group.dim % _KERNEL_WIDTH]
    if odd and layout not in YARDSTICKS:
        refused = f"width {odd[0]} is no multiple of {_KERNEL_WIDTH}, which FBGEMM's kernels need"
    elif refused is not None:
        refused += f" (the fullest rank holds {largest:,.0f} rows)"
    return Prediction(
        layout,
        world,
        {},
        demand.rank_rows,
        demand.world_rows,
        None,
        traffic,
        *traffic.by_link(cluster),
        step_time(traffic, work, cluster),
        memory,
        refused,
    )


def _too_large(memory: float, cluster: Cluster) -> str | None:
    if cluster.device_memory is None or memory <= cluster.device_memory:
        return None
    return f"needs {memory:,.0f} bytes of device_memory={cluster.device_memory:,}"


def _too_small(
    hot: Sequence[GroupDemand],
    cold: Sequence[GroupDemand],
    regions: Sequence[tuple[int, int]],
    world: int,
) -> str | None:
    """Why training would refuse steps: a home's rows, with six deviations, exceed its slots.

    A home of replicated rows has C / W slots, one of sharded rows all C.
    """
    for near, far, (shared, own) in zip(hot, cold, regions, strict=True):
        for group, slots in ((near, shared / world), (far, float(own))):
            _, _, needed = group.buffers(world)
            needed = math.ceil(min(needed, math.ceil(group.rows / world)))
            if group.rows and needed > slots:
                return (
                    f"a step may name {needed:,} rows of one home, which has {int(slots):,} slots: "
                    "give more cache rows, or a smaller batch"
                )
    return None
