"""Small demands, clusters and settings that the tests of the cost model share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from distcache.data.synthetic import ZipfTables
from distcache.layout import RowLayout, TableSpec
from distcache.popularity.statistics import Statistics, TableCounts
from distcache.sizing.cluster import Cluster, Compute, Link
from distcache.sizing.cost import Settings
from distcache.sizing.demand import Demand, TableSource, counted_sources, demand_at, zipf_sources
from distcache.sizing.traffic import Exchange

ROWS, BAGS, ZIPF = (5000, 300, 40), (1.0, 3.0, 2.0), (1.05, 0.8, 0.0)
DIM, STATE, BATCH = 8, 8, 64


def specs(rows: Sequence[int] = ROWS, dims: Sequence[int] = (DIM,) * 3) -> list[TableSpec]:
    """Tables t_cat_0, ..., each read by one feature."""
    pairs = enumerate(zip(rows, dims, strict=True))
    return [TableSpec(f"t_cat_{at}", count, dim, (f"cat_{at}",)) for at, (count, dim) in pairs]


def sources() -> list[TableSource]:
    """Three tables, one of them uniform."""
    return zipf_sources(specs(), BAGS, ZIPF)


def demand(world: int, batch: float = BATCH, state: int = STATE) -> Demand:
    """Their demand."""
    return demand_at(sources(), [state] * 3, batch, world)


def cluster(world: int, nodes: int = 1, **more) -> Cluster:
    """Slow enough links for bytes to matter."""
    link = Link(1e9, 1e-6)
    compute = Compute(1e-9, 2e-9, 1e-9, 1e-7)
    between = Link(1e7, 5e-6) if nodes > 1 else None
    return Cluster(world, link, link, between, nodes, compute=compute, **more)


def settings(slots: int = 2000, **more) -> Settings:
    """One group."""
    return Settings((slots,), **more)


def layout(world: int) -> RowLayout:
    """The rows of the three tables."""
    return RowLayout(specs(), world)


def draw(world: int, steps: int, seed: int = 0) -> list[list[np.ndarray]]:
    """Row numbers of each step and rank, drawn from the same laws; popular ids lie scattered."""
    generator = np.random.default_rng(seed)
    laws = [ZipfTables([rows], a, 7) for rows, a in zip(ROWS, ZIPF, strict=True)]
    offsets = layout(world).offsets
    found = []
    for _ in range(steps):
        ranks = []
        for _ in range(world):
            parts = []
            for table, bag in enumerate(BAGS):
                count = int(BATCH * bag)
                ids = laws[table].draw_ids(generator.random(count), np.array([count]))
                parts.append(ids + offsets[table])
            ranks.append(np.concatenate(parts))
        found.append(ranks)
    return found


def counted(steps: list[list[np.ndarray]], world: int = 1, batch: float = BATCH) -> Demand:
    """The demand of `world` ranks as the counts of drawn `steps` have it."""
    offsets = layout(1).offsets
    counts = np.bincount(np.concatenate([r for step in steps for r in step]), minlength=offsets[-1])
    tables = [
        TableCounts.of(f"cat_{table}", counts[low:high])
        for table, (low, high) in enumerate(pairwise(offsets))
    ]
    statistics = Statistics(tuple(tables), "ids", BATCH * sum(map(len, steps)))
    return demand_at(counted_sources(statistics, specs()), [STATE] * 3, batch, world)


def total(exchanges: Sequence[Exchange], stage: str) -> float:
    """Bytes of all exchanges of a stage."""
    return sum(e.nbytes for e in exchanges if e.stage == stage)
