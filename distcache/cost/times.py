"""Seconds of a step: exposed latencies + bytes / bandwidth per link - what hides behind compute.

A step lasts as long as the longest of three: its critical path (compute and the exchanges that
compute waits for), all that its network sends, and all that its host link moves. What hides is on
the last two only: fills and rows that travel early, and all movement over the host link.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from distcache.cost.links import Cluster
from distcache.cost.traffic import DENSE, EACH, RING, SHARED, SPREAD, Exchange, Traffic, split

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
