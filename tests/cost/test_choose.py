"""Predictions, the choice among them, and the sweep over ranks."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
from cost_cases import DIM, ROWS, STATE, cluster, demand, settings

from distcache.cost.cluster import Link
from distcache.cost.predict import (
    Crossover,
    Settings,
    best_mixed,
    candidate_prefixes,
    choose_placement,
    compare,
    crossovers,
    powers_of_two,
    predict,
    ranks_per_node,
    winner,
)
from distcache.cost.traffic import (
    CACHED,
    HYBRID,
    MIXED,
    REPLICATED,
    SHARDED,
    TABLE_WISE,
    YARDSTICKS,
)
from distcache.errors import ConfigError

ALL = {f"t_cat_{index}": rows for index, rows in enumerate(ROWS)}


def bytes_of(placement: str, world: int, **rows: int) -> float:
    return predict(placement, demand(world), cluster(world), settings(), rows).collective_bytes


def test_mixed_lies_between_its_ends() -> None:
    world = 4
    none = predict(MIXED, demand(world), cluster(world), settings(), {})
    sharded = predict(SHARDED, demand(world), cluster(world), settings())
    assert none.collective_bytes == sharded.collective_bytes
    assert none.time == sharded.time and none.device_bytes == sharded.device_bytes
    everything = predict(MIXED, demand(world), cluster(world), settings(), ALL)
    replicated = predict(REPLICATED, demand(world), cluster(world), settings())
    assert everything.collective_bytes == pytest.approx(replicated.collective_bytes)
    assert everything.time.total == pytest.approx(replicated.time.total)
    some = [bytes_of(MIXED, world, t_cat_0=k) for k in (0, 10, 100, 1000)]
    assert some == sorted(some)
    with pytest.raises(ConfigError, match=r"t_cat_1=301, but the table has 300 rows"):
        bytes_of(MIXED, world, t_cat_1=301)


def test_replication_never_wins_on_bytes() -> None:
    for world in (2, 4, 16):
        found = choose_placement(demand(world), cluster(world), settings(4000), "bytes")
        assert found.placement == SHARDED and found.replicated_rows == {}
        costs = [p.collective_bytes for p in found.predictions if p.refused is None]
        assert costs[0] == min(costs)


def test_the_choice_has_the_least_predicted_time() -> None:
    world = 4
    for latency in (1e-7, 1e-2):  # a slow start favours what exchanges less often
        link = Link(1e8, latency)
        found = choose_placement(
            demand(world), replace(cluster(world), inside=link, overlap=0.0), settings(4000)
        )
        able = {p.placement: p.time.total for p in found.predictions if p.refused is None}
        assert able[found.placement] == min(able.values())
        assert found.predictions[0].placement == found.placement
        assert reasons(found.why) == {
            p.placement: pytest.approx(p.time.total * 1e3, rel=0.005) for p in found.predictions
        }
    again = choose_placement(
        demand(world), replace(cluster(world), inside=link, overlap=0.0), settings(4000)
    )
    assert again == found


def reasons(why: str) -> dict[str, float]:
    """The numbers that a choice gives for its placements, which need three digits each."""
    told = re.findall(r"(\w+) ([\d.,]+\d)(?=[, ]|$)", why.partition(": ")[2])
    assert all(len(number.replace(",", "").replace(".", "").lstrip("0")) >= 3 for _, number in told)
    return {name: float(number.replace(",", "")) for name, number in told}


def test_what_does_not_fit_is_never_chosen() -> None:
    world = 4
    small = predict(REPLICATED, demand(world), cluster(world), settings(400))
    assert small.refused is not None and "one home, which has 100 slots" in small.refused
    found = choose_placement(demand(world), cluster(world), settings(400), "bytes")
    assert found.placement == SHARDED
    tight = cluster(world, device_memory=1000)
    assert "device_memory=1,000" in str(predict(SHARDED, demand(world), tight, settings()).refused)
    with pytest.raises(ConfigError, match=r"no placement fits: sharded: needs .*replicated: needs"):
        choose_placement(demand(world), tight, settings())


def test_hybrid_needs_the_tables_on_the_devices() -> None:
    world, floats = 2, DIM + STATE
    found = predict(TABLE_WISE, demand(world), cluster(world), settings())
    shard = max(ROWS) * floats * 4  # the largest table alone fills one rank
    assert found.device_bytes == pytest.approx(shard + 2 * found.collective_bytes * 4 / 3)
    assert found.hits is None and found.traffic.host_in == 0
    tight = cluster(world, device_memory=shard)
    assert predict(TABLE_WISE, demand(world), tight, settings()).refused is not None


def test_state_at_home_sends_no_state_and_holds_it_once() -> None:
    world, warm = 4, settings(2000, fetched={REPLICATED: 50.0})
    everywhere = predict(REPLICATED, demand(world), cluster(world), warm)
    at_home = predict(REPLICATED, demand(world), cluster(world), replace(warm, state="home"))
    fills = 3 / 4 * 50 * STATE * 4
    assert everywhere.collective_bytes - at_home.collective_bytes == pytest.approx(fills)
    saved = 2000 * STATE * 4 * 3 / 4
    assert everywhere.device_bytes - at_home.device_bytes == pytest.approx(saved)
    assert everywhere.traffic.host_in == at_home.traffic.host_in == 50 / 4 * (DIM + STATE) * 4


def test_known_fetches_take_the_place_of_estimates() -> None:
    known = predict(SHARDED, demand(2), cluster(2), settings(fetched={SHARDED: 30.0}))
    assert known.hits is not None and known.hits.fetched == 30
    assert known.traffic.host_in == pytest.approx(15 * (DIM + STATE) * 4)


def test_faster_links_and_hidden_movement_make_faster_steps() -> None:
    world = 4
    base = predict(SHARDED, demand(world), cluster(world), settings())
    fast = replace(cluster(world), inside=Link(1e10, 1e-6))
    slow = replace(cluster(world), overlap=0.0)
    assert predict(SHARDED, demand(world), fast, settings()).time.total < base.time.total
    assert predict(SHARDED, demand(world), slow, settings()).time.total > base.time.total
    busy = replace(cluster(world), host=Link(1e5))  # the host link is what a step waits for
    waiting = predict(SHARDED, demand(world), busy, settings(400)).time
    assert waiting.total == waiting.host and waiting.waiting > 0
    for t in (base.time, waiting):
        assert t.compute + t.exposed + t.waiting == pytest.approx(t.total)


def test_prefixes_hold_the_likeliest_rows_and_half_the_slots() -> None:
    found = candidate_prefixes(demand(4), settings(2000))
    sums = [sum(rows.values()) for rows in found]
    assert len(found) > 5 and sums == sorted(sums) and sums[-1] <= 1000
    table = demand(4).groups[0].tables[0]
    one = found[len(found) // 2]["t_cat_0"]
    inside = table.rank[table.end <= one]
    outside = table.rank[table.start >= one]
    assert inside.min() >= outside.max()
    best = best_mixed(demand(4), cluster(4), settings(2000), "bytes")
    assert best is not None and best.replicated_rows in [
        {name: k for name, k in rows.items() if k} for rows in found
    ]


def test_yardsticks_never_win() -> None:
    point = compare(demand(4), cluster(4), settings(4000), "bytes")
    cheapest = min(point.predictions, key=lambda p: (p.collective_bytes, p.placement))
    assert point.best is not None and point.best.placement not in YARDSTICKS
    assert cheapest.collective_bytes == pytest.approx(point.best.collective_bytes)
    assert winner([p for p in point.predictions if p.placement in YARDSTICKS], "time") is None
    assert {p.placement for p in point.predictions} == {*CACHED, *HYBRID}


def test_a_sweep_finds_where_the_winner_changes() -> None:
    def at(world: int):
        # In a node starting an exchange is what takes time, and sharded has one more of them;
        # between nodes bytes do, of which it has the fewest.
        nodes = max(1, world // 4)
        found = cluster(world, nodes, collective_s=1e-4)
        return demand(world, nodes=nodes), found, settings(5340)

    points = [compare(*at(world), "time") for world in powers_of_two(32)]
    assert [point.world_size for point in points] == [1, 2, 4, 8, 16, 32]
    for found in crossovers(points, "time"):
        assert isinstance(found, Crossover) and found.old != found.new
        assert found.before <= found.at <= found.after == 2 * found.before
        there = next(p for p in points if p.world_size == found.before)
        assert there.best is not None and there.best.placement == found.old
    winners = [point.best.placement for point in points if point.best is not None]
    changes = sum(a != b for a, b in itertools.pairwise(winners))
    assert changes == len(crossovers(points, "time")) > 0
    assert (winners[1], winners[-1]) == (REPLICATED, SHARDED)


def test_ranks_are_spread_evenly_over_nodes() -> None:
    assert powers_of_two(1000) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert [ranks_per_node(world, 6) for world in (1, 4, 8, 64)] == [1, 4, 4, 4]
    assert ranks_per_node(48, 6) == 6


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cache.objective=money"):
        choose_placement(demand(2), cluster(2), settings(), "money")
    with pytest.raises(ConfigError, match=r"placement nowhere is unknown: choose replicated"):
        predict("nowhere", demand(2), cluster(2), settings())
    with pytest.raises(ConfigError, match=r"demand is of world_size=2, the cluster has 4"):
        predict(SHARDED, demand(2), cluster(4), settings())
    with pytest.raises(ConfigError, match=r"demand is of nodes of 1 ranks, the cluster has 2 on"):
        predict(SHARDED, demand(4, nodes=4), cluster(4, 2), settings())
    with pytest.raises(ConfigError, match=r"slots for 2 groups, but tables of 1 widths"):
        predict(SHARDED, demand(2), cluster(2), Settings((10, 10)))
