"""The predictions of a request: the cluster that was asked for, and the sweep over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from distcache.cache.size import cache_slots
from distcache.cli.plan_measure import DENSE_FEATURES, dense_layers
from distcache.cli.plan_request import Request
from distcache.cost.choose import winner
from distcache.cost.demand import Demand
from distcache.cost.links import Cluster, Compute, device_compute
from distcache.cost.predict import Prediction, Settings, predict
from distcache.cost.steps import demand_at
from distcache.cost.sweep import (
    Crossover,
    Point,
    compare,
    crossovers,
    powers_of_two,
    ranks_per_node,
    sweep,
)
from distcache.cost.traffic import MIXED
from distcache.models import build_model
from distcache.run.measure import Measured

ITEMSIZE = 4
"""Bytes of an element: float32."""


@dataclass(frozen=True)
class Plan:
    """What was predicted. `here`: for `cluster`, which was asked for; `points`: the sweep;
    `dense_parameters` of the dense part; `measured`: this machine, None: presets; `warnings`."""

    request: Request
    cluster: Cluster
    here: Point
    points: tuple[Point, ...]
    crossovers: tuple[Crossover, ...]
    dense_parameters: int
    measured: Measured | None
    warnings: tuple[str, ...]


class Worlds:
    """Demand, cluster and settings of a request at any number of ranks."""

    def __init__(self, request: Request, measured: Measured | None, on_cpu: bool) -> None:
        self.request, self.measured, self.on_cpu = request, measured, on_cpu
        options = request.options
        self.dense = options.dense_parameters
        if self.dense < 0:
            self.dense = default_parameters([source.dim for source in request.sources])
        widest = max(request.sources, key=lambda source: source.lookups * source.dim)
        state = request.update.state_width(widest.dim)
        self.compute: Compute = (
            device_compute(options.device, widest.dim, state, self.dense)
            if measured is None
            else measured.compute
        )

    def at(self, world: int) -> tuple[Demand, Cluster, Settings]:
        """Those of W = `world` ranks, `batch` samples on each, as many to a node as asked for."""
        request, options = self.request, self.request.options
        local = ranks_per_node(world, options.world_size // options.nodes)
        return self._of(world, world // local, request)

    def here(self) -> tuple[Demand, Cluster, Settings]:
        """Those that were asked for."""
        options = self.request.options
        return self._of(options.world_size, options.nodes, self.request)

    def _of(self, world: int, nodes: int, request: Request) -> tuple[Demand, Cluster, Settings]:
        options = request.options
        each = (request.sources, request.state_widths, options.batch)
        demand = demand_at(*each, world, world // nodes)
        groups = [(g.rows, g.dim, g.state_width) for g in demand.groups]
        rows = options.cache_rows or None
        ratio = None if rows else options.cache_ratio
        slots = cache_slots(rows, ratio, None, groups, ITEMSIZE, world)
        settings = Settings(
            tuple(slots),
            request.state,
            options.lookahead,
            options.prefetch,
            options.steps or None,
            ITEMSIZE,
            self.dense,
        )
        return demand, self._cluster(world, nodes), settings

    def _cluster(self, world: int, nodes: int) -> Cluster:
        request = self.request
        local = world // nodes
        between = request.between.shared(max(local / (request.options.cards or local), 1.0))
        cluster = Cluster(
            world,
            request.host,
            request.inside,
            between,
            nodes,
            request.device_memory,
            self.compute,
        )
        if self.measured is None:
            return cluster
        found = self.measured
        return replace(
            cluster,
            host=replace(request.host, bandwidth=found.host, latency=0.0, name="measured"),
            inside=request.inside  # one rank has no link to measure
            if found.inside is None
            else replace(
                request.inside,
                bandwidth=found.inside,
                latency=found.latency_s / (request.options.measure_ranks - 1),
                name="measured",
            ),
            collective_s=0.0,
            overlap=0.0 if self.on_cpu else 1.0,
        )


def make_plan(request: Request, measured: Measured | None, on_cpu: bool) -> Plan:
    """Predict everything. Raises ConfigError for K beyond a table, or a world that is none."""
    worlds, options = Worlds(request, measured, on_cpu), request.options
    demand, cluster, settings = worlds.here()
    here = compare(demand, cluster, settings, options.objective)
    if request.replicated_rows is not None:
        own = predict(MIXED, demand, cluster, settings, request.replicated_rows)
        others = tuple(p for p in here.predictions if p.placement != MIXED)
        ordered = _ordered((*others, own))
        here = replace(here, predictions=ordered, best=winner(ordered, options.objective))
    points = sweep(powers_of_two(options.most_ranks), worlds.at, options.objective)
    return Plan(
        request,
        cluster,
        here,
        tuple(points),
        tuple(crossovers(points, options.objective)),
        worlds.dense,
        measured,
        tuple(_warnings(request, [*points, here])),
    )


def default_parameters(dims: Sequence[int]) -> int:
    """Parameters of the DLRM that `measure=true` times, over tables of the mean width."""
    width = max(1, round(sum(dims) / len(dims)))
    with torch.device("meta"):
        model: Any = build_model("dlrm", DENSE_FEATURES, [width] * len(dims), *dense_layers(width))
    return sum(parameter.numel() for parameter in model.parameters())


def _ordered(predictions: Sequence[Prediction]) -> tuple[Prediction, ...]:
    """`mixed` third again."""
    rest = [p for p in predictions if p.placement != MIXED]
    mixed = [p for p in predictions if p.placement == MIXED]
    return (*rest[:2], *mixed, *rest[2:])


def _warnings(request: Request, points: Sequence[Point]) -> list[str]:
    """What the predictions cannot know."""
    found = []
    most = max(point.world_size for point in points)
    short = [
        source.name
        for source in request.sources
        if source.counted is not None
        and source.lookups * request.options.batch * most > source.counted
    ]
    if short:
        found.append(
            f"the statistics count fewer lookups than one step of {most} ranks makes in "
            f"{len(short)} of {len(request.sources)} tables: their distinct rows of all ranks are "
            "a lower bound there; count more samples"
        )
    return found
