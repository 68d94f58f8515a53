"""Predicted bytes, against all-to-alls of drawn rows that are counted as `comm.counters` does."""

from __future__ import annotations

import numpy as np
import pytest
from cost_cases import BATCH, DIM, ROWS, STATE, cluster, demand, settings

from distcache.comm.link import all_reduce_bytes, all_to_all_bytes, gather_bytes
from distcache.cost.cluster import Cluster
from distcache.cost.demand import Demand
from distcache.cost.predict import predict
from distcache.cost.traffic import (
    CACHED,
    HYBRID,
    REPLICATED,
    RING,
    ROW_WISE,
    ROW_WISE_DEDUP,
    ROW_WISE_IDS,
    SHARDED,
    TABLE_WISE,
    Exchange,
    dense_exchange,
    hybrid_exchanges,
    replicated_exchanges,
    split,
    total,
)

ITEM = 4


def sent(counts: np.ndarray, width: int) -> float:
    """Mean bytes per rank of an all-to-all that sends `counts[from][to]` rows of `width` floats."""
    world = len(counts)
    each = [
        all_to_all_bytes(int(row.sum()) * width * ITEM, row.tolist(), rank, world)
        for rank, row in enumerate(counts)
    ]
    return float(np.mean(each))


@pytest.mark.parametrize("state", ["replicated", "home"])
def test_fills_are_copies_of_what_homes_fetch(state: str) -> None:
    world, fetched = 4, np.array([7, 0, 3, 10])
    width = DIM + (STATE if state == "replicated" else 0)
    counted = sent(np.repeat(fetched[:, None], world, axis=1), width)
    found = replicated_exchanges(demand(world).groups[0], world, 20.0, ITEM, state)
    assert total(found, "fill") == pytest.approx(counted)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_hybrid_bytes_are_those_of_the_collectives(world: int) -> None:
    found, vectors = demand(world), BATCH * DIM * ITEM
    tables = len(ROWS)
    whole = [tables // world + (rank < tables % world) for rank in range(world)]
    pooled = np.mean([count * gather_bytes(world * vectors, world) for count in whole])
    table_wise = hybrid_exchanges(found, TABLE_WISE, ITEM)
    assert total(table_wise, "pooled") == pytest.approx(pooled)
    assert total(table_wise, "pooled_gradients") == pytest.approx(pooled)
    row_wise = hybrid_exchanges(found, ROW_WISE, ITEM)
    summed = tables * gather_bytes(world * vectors, world)  # of the whole buffer, [W b, D]
    for stage in ("partial_sums", "partial_gradients"):
        assert total(row_wise, stage) == pytest.approx(summed)
    lookups = found.groups[0].lookups * DIM * ITEM * (world - 1) / world
    for exchange in hybrid_exchanges(found, ROW_WISE_IDS, ITEM):
        assert exchange.nbytes == pytest.approx(lookups)
    unique = found.rank_rows * DIM * ITEM * (world - 1) / world
    for exchange in hybrid_exchanges(found, ROW_WISE_DEDUP, ITEM):
        assert exchange.nbytes == pytest.approx(unique)


def test_tables_too_small_for_row_shards_stay_whole() -> None:
    found = hybrid_exchanges(demand(64), ROW_WISE, ITEM)
    vectors = BATCH * DIM * ITEM  # 300 and 40 rows leave some of 64 ranks without one
    assert total(found, "partial_sums") == pytest.approx(63 * vectors)
    assert total(found, "pooled") == pytest.approx(63 / 64 * 2 * vectors)


def test_dense_gradients_are_all_reduced() -> None:
    for world in (1, 2, 7):
        counted = all_reduce_bytes(1000 * ITEM, world)
        assert dense_exchange(1000, world).nbytes == pytest.approx(counted, abs=1)


def test_one_rank_sends_nothing() -> None:
    for placement in (*CACHED, *HYBRID):
        found = predict(placement, demand(1), cluster(1), settings(dense_parameters=1000))
        assert found.collective_bytes == 0 and found.traffic.dense_bytes == 0
        assert found.time.exposed == found.time.hidden == 0


def test_formulas_of_the_design() -> None:
    world = 8
    found, k = demand(world), 7 / 8
    s = DIM * ITEM
    with_cache = settings(sum(ROWS) + world)  # warm, and of all rows: nothing is fetched

    def bytes_of(placement: str) -> float:
        return predict(placement, found, cluster(world), with_cache).collective_bytes

    q, whole = found.rank_rows, found.world_rows
    assert bytes_of(SHARDED) == pytest.approx(2 * k * s * q)
    assert bytes_of(REPLICATED) == pytest.approx(k * s * (q + whole))
    assert bytes_of(TABLE_WISE) == pytest.approx(2 * k * s * BATCH * len(ROWS))


def test_bytes_between_nodes_are_those_of_remote_peers() -> None:
    found = Cluster(8, *[cluster(8).inside] * 3, nodes=2)
    inside, between = split(Exchange("rows", 700.0), found)
    assert (inside, between) == (pytest.approx(300), pytest.approx(400))  # 3 and 4 of 7 peers
    ring = split(Exchange("dense", 800.0, pattern=RING), found)
    assert ring == (pytest.approx(600), pytest.approx(200))  # a hop of four leaves the node
    assert split(Exchange("rows", 700.0), cluster(8)) == (700.0, 0.0)
    prediction = predict(SHARDED, demand(8, nodes=2), found, settings())
    assert prediction.inside + prediction.between == pytest.approx(prediction.collective_bytes)


def test_lookups_of_no_one_cost_nothing() -> None:
    empty = demand(4, batch=1e-12)
    assert isinstance(empty, Demand)
    found = predict(SHARDED, empty, cluster(4), settings())
    assert found.collective_bytes == pytest.approx(0, abs=1e-6)
