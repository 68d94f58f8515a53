"""Predictions against the counters of real training runs, on one node and on two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scenarios import count_steps
from source_runs import summaries

from distcache.cli.compose import compose_overrides, to_config
from distcache.cost.cluster import Cluster, Link
from distcache.cost.demand import TableSource, counted_sources, demand_at, zipf_sources
from distcache.cost.predict import Prediction, Settings, predict
from distcache.cost.traffic import HYBRID
from distcache.trainer.build import build_source

ROWS, BATCH, STEPS = (3000, 400, 60), 64, 60
RUN = (
    "data=synthetic",
    f"data.table_rows=[{','.join(map(str, ROWS))}]",
    "data.zipf=1.05",
    "model.embedding_dim=4",
    "model.dense_arch=[8,4]",
    "model.over_arch=[8,1]",
    "optim=adagrad",
    "cache.state=replicated",
    f"trainer.steps={STEPS}",
    "trainer.eval_steps=0",
    "cache.rows=800",
    "cache.lookahead=4",
    "cache.prefetch=1",
)
PREFIXES = {"t_cat_0": 20, "t_cat_1": 30}
MIXED = "cache.replicated_rows={" + ",".join(f"{n}:{k}" for n, k in PREFIXES.items()) + "}"
LAYOUTS = {
    "replicated": ("parallel=data", "cache.placement=replicated"),
    "sharded": ("parallel=data", "cache.placement=sharded"),
    "mixed": ("parallel=data", "cache.placement=mixed", MIXED),
    "table_wise": ("parallel=hybrid", "parallel.sharding=table_wise"),
    "row_wise": ("parallel=hybrid", "parallel.sharding=row_wise"),
}


DENSE = (13 * 8 + 8) + (8 * 4 + 4) + (4 + 6) * 8 + 8 + (8 + 1)
"""Parameters of DLRM over three tables."""


def cluster(world: int, nodes: int = 1) -> Cluster:
    link = Link(1e9)
    return Cluster(world, link, link, link, nodes)


def by_law() -> list[TableSource]:
    return zipf_sources(ROWS, [4] * 3, [1.0] * 3, [1.05] * 3)


def by_counts(world: int) -> list[TableSource]:
    """The lookups of the steps that are trained."""
    size = f"data.global_batch_size={BATCH * world}"
    source = build_source(to_config(compose_overrides(["trainer.device=cpu", *RUN, size])))
    found = counted_sources(count_steps(source, range(STEPS)), [4] * 3)
    return [replace(own, name=f"t_cat_{place}") for place, own in enumerate(found)]


def predicted(layout: str, world: int, nodes: int, sources: list[TableSource]) -> Prediction:
    demand = demand_at(sources, [4] * 3, BATCH, world, world // nodes)
    settings = Settings((800,), window=4, prefetch=1, steps=STEPS, dense_parameters=DENSE)
    return predict(layout, demand, cluster(world, nodes), settings, PREFIXES)


def check(found: dict[str, Any], expected: Prediction, world: int, tolerance: float) -> None:
    """Bytes of a run are as predicted; `collective_bytes` within `tolerance`."""
    each = {key: value and value / STEPS for key, value in found.items() if key.endswith("bytes")}
    assert expected.collective_bytes == pytest.approx(each["collective_bytes"], rel=tolerance)
    dense = expected.traffic.dense_bytes
    assert dense == pytest.approx(each["dense_collective_bytes"], abs=1)
    if expected.hits is None:
        return
    fetched = found["rows_fetched"] / STEPS
    assert expected.hits.fetched == pytest.approx(fetched, rel=0.05)  # an estimate
    assert expected.hits.rate == pytest.approx(found["hit_rate"], abs=0.02)
    host = world * expected.traffic.host_in
    assert host == pytest.approx(each["host_to_device_bytes"], rel=0.05)


@pytest.mark.parametrize(
    ("world", "nodes"), [(2, 1), pytest.param(3, 1, marks=pytest.mark.slow), (4, 2)]
)
def test_bytes_are_those_of_runs(world: int, nodes: int, tmp_path: Path) -> None:
    """By the law and by counts; between nodes, where the counter has the dense gradients' share."""
    size = f"data.global_batch_size={BATCH * world}"
    runs = [(*RUN, size, *layout) for layout in LAYOUTS.values()]
    each = None if nodes == 1 else (world // nodes,) * nodes
    counted = by_counts(world)
    for layout, run in zip(LAYOUTS, summaries(runs, tmp_path, world, 240, each), strict=True):
        # Hybrid sends vectors, whose number is known; rows are expectations.
        tolerance = 1e-9 if layout in HYBRID else 0.03
        for sources in (by_law(), counted):
            found = predicted(layout, world, nodes, sources)
            check(run, found, world, tolerance)
        if nodes == 1:
            continue
        between, tolerance = run["inter_node_bytes"] / STEPS, max(tolerance, 1e-4)
        crossing = found.traffic.inter_node_bytes(cluster(world, nodes))
        assert crossing == pytest.approx(between, rel=tolerance)
        dense = found.traffic.dense_bytes / 2  # a ring through both nodes: one rank of two sends on
        assert found.between == pytest.approx(between - dense, rel=tolerance)
