"""Predictions, the choice among them, the sweep over ranks; clusters and their links."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from sizing_cases import DIM, ROWS, STATE, cluster, demand, settings

from distcache.errors import ConfigError
from distcache.sizing.cluster import PRESETS, Cluster, Compute, Link, check_world, parse_link
from distcache.sizing.cost import (
    best_mixed,
    candidate_prefixes,
    choose_placement,
    compare,
    crossovers,
    predict,
    winner,
)
from distcache.sizing.traffic import MIXED, REPLICATED, SHARDED, TABLE_WISE, padded_rows

ALL = {f"t_cat_{index}": rows for index, rows in enumerate(ROWS)}
LINK = Link(1e9, 1e-6)


def test_mixed_lies_between_its_ends() -> None:
    step = demand(4), cluster(4), settings()
    none, everything = (predict(MIXED, *step, rows) for rows in ({}, ALL))
    sharded, replicated = (predict(kind, *step) for kind in (SHARDED, REPLICATED))
    assert none.cost["bytes"] == sharded.cost["bytes"]
    assert none.time == sharded.time and none.device_bytes == sharded.device_bytes
    assert everything.cost["bytes"] == pytest.approx(replicated.cost["bytes"])
    assert everything.time.total == pytest.approx(replicated.time.total)
    some = [predict(MIXED, *step, {"t_cat_0": k}).cost["bytes"] for k in (0, 10, 100, 1000)]
    assert some == sorted(some)


def test_the_choice_has_the_least_predicted_time() -> None:
    """And says so, with three digits of each placement's time."""
    for latency in (1e-7, 1e-2):  # a slow start favours what exchanges less often
        there = replace(cluster(4), inside=Link(1e8, latency), overlap=0.0)
        best, why = choose_placement(demand(4), there, settings(4000))
        every = compare(demand(4), there, settings(4000), "time", hybrid=False).predictions
        assert best in every and best.refused is None
        assert best.time.total == min(p.time.total for p in every if p.refused is None)
        told = re.findall(r"(\w+) ([\d.,]+\d)(?=[, ]|$)", why.partition(": ")[2])
        numbers = {name: number.replace(",", "") for name, number in told}
        assert min(len(n.replace(".", "").lstrip("0")) for n in numbers.values()) >= 3
        assert {name: float(number) for name, number in numbers.items()} == {
            p.placement: pytest.approx(p.time.total * 1e3, rel=0.005) for p in every
        }
        assert choose_placement(demand(4), there, settings(4000)) == (best, why)


def test_what_does_not_fit_is_never_chosen() -> None:
    small = predict(REPLICATED, demand(4), cluster(4), settings(400))
    assert small.refused is not None and "one home, which has 100 slots" in small.refused
    best, _ = choose_placement(demand(4), cluster(4), settings(400), "bytes")
    assert best.placement == SHARDED
    tight = cluster(4, device_memory=1000)
    assert "device_memory=1,000" in str(predict(SHARDED, demand(4), tight, settings()).refused)
    with pytest.raises(ConfigError, match=r"no placement fits: sharded: needs .*replicated: needs"):
        choose_placement(demand(4), tight, settings())


def test_hybrid_needs_the_tables_on_the_devices() -> None:
    found = predict(TABLE_WISE, demand(2), cluster(2), settings())
    shard = max(ROWS) * (DIM + STATE) * 4  # the largest table alone fills one rank
    assert found.device_bytes == pytest.approx(shard + 2 * found.cost["bytes"] * 4 / 3)
    assert found.hits is None and found.traffic.host_in == 0
    tight = cluster(2, device_memory=shard)
    assert predict(TABLE_WISE, demand(2), tight, settings()).refused is not None


def test_state_at_home_sends_no_state_and_holds_it_once() -> None:
    warm = settings(2000)
    everywhere, at_home = (
        predict(REPLICATED, demand(4), cluster(4), replace(warm, state=state))
        for state in ("replicated", "home")
    )
    fetched = everywhere.hits.fetched
    fills = 3 / 4 * padded_rows(fetched, fetched, 4) * STATE * 4
    assert everywhere.cost["bytes"] - at_home.cost["bytes"] == pytest.approx(fills)
    saved = 2000 * STATE * 4 * 3 / 4
    assert everywhere.device_bytes - at_home.device_bytes == pytest.approx(saved)
    assert everywhere.traffic.host_in == at_home.traffic.host_in > 0
    assert at_home.traffic.host_in == pytest.approx(fetched / 4 * (DIM + STATE) * 4)


def test_faster_links_and_hidden_movement_make_faster_steps() -> None:
    base, fast, slow, busy = (
        predict(SHARDED, demand(4), replace(cluster(4), **change), settings(slots)).time
        for change, slots in (
            ({}, 2000),
            ({"inside": Link(1e10, 1e-6)}, 2000),
            ({"overlap": 0.0}, 2000),
            ({"host": Link(1e5)}, 400),  # the host link is what a step waits for
        )
    )
    assert fast.total < base.total < slow.total
    assert busy.total == busy.host and busy.waiting > 0
    for t in (base, busy):
        assert t.dense + t.sparse + t.exposed + t.waiting == pytest.approx(t.total)


def test_prefixes_hold_the_likeliest_rows_and_half_the_slots() -> None:
    found = candidate_prefixes(demand(4), settings(2000))
    sums = [sum(rows.values()) for rows in found]
    assert len(found) > 5 and sums == sorted(sums) and sums[-1] <= 1000
    table = demand(4).groups[0].tables[0]
    one = found[len(found) // 2]["t_cat_0"]
    assert table.rank[table.end <= one].min() >= table.rank[table.start >= one].max()
    best = best_mixed(demand(4), cluster(4), settings(2000), "bytes")
    assert best is not None and best.replicated_rows in [
        {name: k for name, k in rows.items() if k} for rows in found
    ]


def test_mixed_wins_only_where_it_saves_one_per_cent() -> None:
    sharded = predict(SHARDED, demand(4), cluster(4), settings(4000))
    for factor, best in ((0.989, MIXED), (0.991, SHARDED), (1.1, SHARDED)):
        time = replace(sharded.time, total=factor * sharded.time.total)
        found = [sharded, replace(sharded, placement=MIXED, time=time)]
        for order in (found, found[::-1]):
            assert winner(order, "time").placement == best
        assert winner(found[1:], "time").placement == MIXED


def test_a_sweep_finds_where_the_winner_changes() -> None:
    points = []
    for world in (1, 2, 4, 8, 16, 32):
        # Inside a node the start of an exchange takes the time, and table-wise has the fewest of
        # them; between nodes bytes do, and sharded sends the fewest.
        nodes = max(1, world // 4)
        there = cluster(world, nodes, collective_s=1e-4)
        points.append(compare(demand(world), there, settings(5340), "time"))
    changes = crossovers(points)
    for found in changes:
        assert found.after == 2 * found.before
        there = next(p for p in points if p.cluster.ranks == found.before)
        assert there.best is not None and there.best.placement == found.old != found.new
    winners = [point.best.placement for point in points if point.best is not None]
    assert sum(a != b for a, b in itertools.pairwise(winners)) == len(changes) > 0
    assert (winners[1], winners[-1]) == (TABLE_WISE, SHARDED)


WRONG_LINKS = (
    ("nvlink9", r"inside=nvlink9: no such link: give a preset \(pcie4, .*400gbe\)"),
    (None, r"inside=None"),
    ({"latency": 1e-6}, r"inside=.* missing mandatory value: bandwidth: give a preset"),
    ({"bandwidth": "fast"}, r"inside=.* Value 'fast' .*could not be converted to Float: give"),
    ({"bandwidth": 1, "speed": 2}, r"inside=.* Key 'speed' not in 'Link': give"),
)
BANDWIDTHS = {0.0: "0.0", -1.0: "-1.0", math.nan: "nan", math.inf: "inf", "fast": "fast"}
WRONG = (
    (predict, ("nowhere", demand(2), cluster(2)), "nowhere is unknown: choose replicated"),
    (predict, (SHARDED, demand(2), cluster(4)), "of 2 ranks, the cluster has 4: describe"),
    (Cluster, (8, LINK, LINK, LINK, 3), "nodes=3 does not divide world_size=8"),
    (Cluster, (8, LINK, LINK, None, 2), "nodes=2, and the bandwidth between them is missing"),
    (Cluster, (0, LINK, LINK), "world_size=0"),
    (partial(Cluster, overlap=2), (1, LINK, LINK), "overlap=2"),
    *(
        (Cluster, (1, LINK, Link(value)), f"inside.bandwidth={said}: it must be above 0: give byt")
        for value, said in BANDWIDTHS.items()
    ),
    (Cluster, (1, Link(1.0, -1.0), LINK), r"host.latency=-1.0: it must be at least 0"),
    (partial(Cluster, compute=Compute(0, -1)), (1, LINK, LINK), r"compute.update_s=-1"),
    *((parse_link, ("inside", value), said) for value, said in WRONG_LINKS),
)


@pytest.mark.parametrize(("make", "given", "said"), WRONG)
def test_what_makes_no_sense_is_refused(make: Callable, given: tuple, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make(*given, *[settings()] * (make is predict))


def test_links_are_named_or_described() -> None:
    assert parse_link("inside", "NVLink4") == PRESETS["nvlink4"]
    described = parse_link("inside", {"bandwidth": "300e9", "latency": 5e-6})
    assert (described.bandwidth, described.latency) == (300e9, 5e-6)
    assert parse_link("host", {"bandwidth": 1e9}).latency == 0
    # What the specifications say, multiplied out, in bytes per second.
    for name, bandwidth in {"pcie4": 16 * 16e9 / 8, "pcie5": 16 * 32e9 / 8}.items():
        assert PRESETS[name].bandwidth == pytest.approx(bandwidth * 128 / 130, rel=0.001)
    for name, bandwidth in {"nvlink3": 12 * 25e9, "nvlink4": 18 * 25e9}.items():
        assert PRESETS[name].bandwidth == bandwidth
    for gigabits in (100, 200, 400):
        assert PRESETS[f"{gigabits}gbe"].bandwidth == gigabits * 1e9 / 8
    assert LINK.seconds(1e6, 3) == pytest.approx(3e-6 + 1e-3)
    assert LINK.seconds(0, 3) == 0
    assert LINK.shared(4).seconds(1e6) == pytest.approx(1e-6 + 4e-3)


@pytest.mark.parametrize(
    ("nodes", "sizes", "said"),
    [
        (2, (4,), r"world_size=8 on nodes=2, but 4 ranks run .*: describe world_size=4 and"),
        (2, (8,), r"nodes=2, but 8 ranks run on the nodes: describe world_size=8 and nodes=1"),
        (2, (5, 3), r"5, 3 ranks run .* which count as one: describe world_size=8 and nodes=1"),
        (2, (4, 2, 2), r"4, 2, 2 ranks run .* which count as one: describe .* nodes=1"),
        (2, (4, 4), None),
        (1, (5, 3), None),  # nodes of different sizes are described as one
        (1, (4, 2, 2), None),
    ],
)
def test_a_cluster_describes_the_world_that_runs(nodes, sizes, said) -> None:
    found = Cluster(8, LINK, LINK, LINK, nodes)
    if said is None:
        return check_world(found, sizes)
    with pytest.raises(ConfigError, match=said):
        check_world(found, sizes)
