"""Predictions against the counters of real training runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from source_runs import summaries

from distcache.cost.links import Cluster, Link
from distcache.cost.popularity import zipf_sources
from distcache.cost.predict import Prediction, Settings, predict
from distcache.cost.steps import demand_at
from distcache.cost.traffic import HYBRID

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


def predicted(layout: str, world: int, dense: int) -> Prediction:
    sources = zipf_sources(ROWS, [4] * 3, [1.0] * 3, [1.05] * 3)
    demand = demand_at(sources, [4] * 3, BATCH, world)
    link = Link(1e9)
    settings = Settings((800,), window=4, prefetch=1, steps=STEPS, dense_parameters=dense)
    return predict(layout, demand, Cluster(world, link, link), settings, PREFIXES)


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


@pytest.mark.parametrize("world", [2, 3])
def test_bytes_are_those_of_runs(world: int, tmp_path: Path) -> None:
    size = f"data.global_batch_size={BATCH * world}"
    runs = [(*RUN, size, *layout) for layout in LAYOUTS.values()]
    dense = (13 * 8 + 8) + (8 * 4 + 4) + (4 + 6) * 8 + 8 + (8 + 1)  # DLRM over three tables
    for layout, found in zip(LAYOUTS, summaries(runs, tmp_path, world), strict=True):
        # Hybrid sends vectors, whose number is known; rows are expectations.
        tolerance = 1e-9 if layout in HYBRID else 0.03
        check(found, predicted(layout, world, dense), world, tolerance)
