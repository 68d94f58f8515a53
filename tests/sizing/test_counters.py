"""Predictions against the counters of real training runs, on one node and on two."""

from __future__ import annotations

from pathlib import Path

import pytest
from scenarios import count_steps
from sizing_cases import specs
from source_runs import NET, configured, summaries

from distcache.sizing.cluster import Cluster, Link
from distcache.sizing.cost import Settings, predict
from distcache.sizing.demand import counted_sources, demand_at, zipf_sources
from distcache.sizing.traffic import HYBRID
from distcache.trainer.build import build_source

ROWS, BATCH, STEPS = (3000, 400, 60), 64, 60
RUN = (
    *("data=synthetic", f"data.table_rows={list(ROWS)}".replace(" ", ""), "data.zipf=1.05", *NET),
    *("optim=adagrad", "cache.state=replicated", "cache.rows=800", "cache.lookahead=4"),
    *("cache.prefetch=1", f"trainer.steps={STEPS}", "trainer.eval_steps=0"),
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


@pytest.mark.parametrize(
    ("world", "nodes"),
    [*(pytest.param(size, 1, marks=pytest.mark.slow) for size in (2, 3)), (4, 2)],
)
def test_bytes_are_those_of_runs(world: int, nodes: int, tmp_path: Path) -> None:
    """By the law and by counts of the lookups that are trained; between nodes, where the counter
    has the dense gradients' share."""
    size, link, local = f"data.global_batch_size={BATCH * world}", Link(1e9), world // nodes
    there = Cluster(world, link, link, link, nodes)
    settings = Settings((800,), window=4, prefetch=1, steps=STEPS, dense_parameters=DENSE)
    source = build_source(configured("trainer.device=cpu", *RUN, size))
    tables = specs(ROWS, [4] * 3)
    counted = counted_sources(count_steps(source, range(STEPS)), tables)
    law = zipf_sources(tables, [1.0] * 3, [1.05] * 3)
    demands = [demand_at(own, [4] * 3, BATCH, world) for own in (law, counted)]
    runs = [(*RUN, size, *layout) for layout in LAYOUTS.values()]
    each = None if nodes == 1 else (local,) * nodes
    for layout, run in zip(LAYOUTS, summaries(runs, tmp_path, world, 240, each), strict=True):
        # Hybrid sends vectors, whose number is known; rows are expectations.
        tolerance = 1e-9 if layout in HYBRID else 0.03
        per_step = {key: run[key] and run[key] / STEPS for key in run if key.endswith("bytes")}
        for demand in demands:
            found = predict(layout, demand, there, settings, PREFIXES)
            sent = per_step["collective_bytes"]
            assert found.cost["bytes"] == pytest.approx(sent, rel=tolerance)
            dense = found.traffic.dense_bytes
            assert dense == pytest.approx(per_step["dense_collective_bytes"], abs=1)
            if found.hits is not None:
                fetched = run["rows_fetched"] / STEPS
                assert found.hits.fetched == pytest.approx(fetched, rel=0.05)  # an estimate
                assert found.hits.rate == pytest.approx(run["hit_rate"], abs=0.02)
                host = per_step["host_to_device_bytes"]
                assert world * found.traffic.host_in == pytest.approx(host, rel=0.05)
        if nodes > 1:
            between, tolerance = per_step["inter_node_bytes"], max(tolerance, 1e-4)
            crossing = found.traffic.inter_node_bytes(there)
            assert crossing == pytest.approx(between, rel=tolerance)
            ring = dense / 2  # through both nodes: one rank of two sends on
            _, leaving = found.traffic.by_link(there)
            assert leaving == pytest.approx(between - ring, rel=tolerance)
