"""Predictions against the counters of real training runs, on one node and on two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from counting import count_steps
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


def predicted(
    layout: str, world: int, nodes: int = 1, sources: list[TableSource] | None = None
) -> Prediction:
    sources = sources or by_law()
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


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_bytes_are_those_of_runs(world: int, tmp_path: Path) -> None:
    size = f"data.global_batch_size={BATCH * world}"
    runs = [(*RUN, size, *layout) for layout in LAYOUTS.values()]
    counted = by_counts(world)
    for layout, found in zip(LAYOUTS, summaries(runs, tmp_path, world), strict=True):
        # Hybrid sends vectors, whose number is known; rows are expectations.
        tolerance = 1e-9 if layout in HYBRID else 0.03
        for sources in (by_law(), counted):
            check(found, predicted(layout, world, sources=sources), world, tolerance)


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Summaries by layout, of two nodes of two ranks."""
    runs = [(*RUN, f"data.global_batch_size={BATCH * 4}", *layout) for layout in LAYOUTS.values()]
    found = summaries(runs, tmp_path_factory.mktemp("nodes"), 4, 240, (2, 2))
    return dict(zip(LAYOUTS, found, strict=True))


def test_bytes_on_two_nodes_are_those_of_runs(two_nodes: dict[str, dict[str, Any]]) -> None:
    for layout, found in two_nodes.items():
        check(found, predicted(layout, 4, 2), 4, 1e-9 if layout in HYBRID else 0.03)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_between_nodes_are_those_of_runs(
    layout: str, two_nodes: dict[str, dict[str, Any]]
) -> None:
    """The counter has the dense gradients' share, too."""
    found, expected = two_nodes[layout], predicted(layout, 4, 2)
    tolerance = 1e-4 if layout in HYBRID else 0.03
    between = found["inter_node_bytes"] / STEPS
    assert expected.traffic.inter_node_bytes(cluster(4, 2)) == pytest.approx(between, rel=tolerance)
    dense = expected.traffic.dense_bytes / 2  # a ring through both nodes: one rank of two sends on
    assert expected.between == pytest.approx(between - dense, rel=tolerance)
