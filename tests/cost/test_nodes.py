"""Bytes inside and between nodes, against rows that are drawn and routed over nodes one by one."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from cost_cases import DIM, cluster, demand, draw, layout, settings

from distcache.comm.world import Nodes
from distcache.cost.cluster import Cluster, Link
from distcache.cost.demand import GroupDemand
from distcache.cost.predict import exchange_seconds, predict
from distcache.cost.traffic import (
    EACH,
    MIXED,
    REPLICATED,
    SHARDED,
    SHARED,
    SPREAD,
    Exchange,
    Traffic,
    dense_exchange,
    replicated_exchanges,
    sharded_exchanges,
    split,
    total,
)

ITEM, STEPS = 4, 120
ROW = DIM * ITEM
SHAPES = [(4, 2), (6, 2), (6, 3), (3, 3), (5, 1)]
"""Ranks and nodes."""


class Routed:
    """Rows that ranks sent to mates and to other nodes, mean per rank and step."""

    def __init__(self, world: int, nodes: int) -> None:
        self.world, self.homes = world, layout(world).home
        self.nodes = Nodes((world // nodes,) * nodes)
        self.inside = self.between = 0

    def send(self, source: int, target: int, rows: int) -> None:
        if self.nodes.of(source) != self.nodes.of(target):
            self.between += rows
        elif source != target:
            self.inside += rows

    def to_all(self, rows: np.ndarray) -> None:
        """Each home's rows, once to each other node, and on inside it."""
        for home in range(self.world):
            count = int(np.count_nonzero(self.homes(rows) == home))
            for node in range(self.nodes.count):
                first = self.nodes.peer(home, node)
                self.send(home, first, count)
                for mate in self.nodes.ranks(node):
                    self.send(first, mate, count)

    def to_namers(self, named: list[np.ndarray]) -> None:
        """Each home's rows to the ranks that named them; on other nodes, to the first of them from
        the home's own index on, which hands them on."""
        for home in range(self.world):
            own = [rows[self.homes(rows) == home] for rows in named]
            for node in range(self.nodes.count):
                mates, first = self.nodes.ranks(node), self.nodes.peer(home, node)
                if home in mates:
                    for mate in mates:
                        self.send(home, mate, len(own[mate]))
                    continue
                here, there = np.empty(0, np.int64), first - mates.start
                for mate in (*mates[there:], *mates[:there]):
                    new = np.setdiff1d(own[mate], here)
                    self.send(home, mate, len(new))
                    self.inside += len(own[mate]) - len(new)
                    here = np.append(here, new)

    def to_homes(self, named: list[np.ndarray]) -> None:
        """A gradient of each row that a rank named, to its home."""
        for rank, rows in enumerate(named):
            for home, count in enumerate(np.bincount(self.homes(rows), minlength=self.world)):
                self.send(rank, home, int(count))

    def bytes(self, steps: int) -> tuple[float, float]:
        return tuple(ROW * rows / self.world / steps for rows in (self.inside, self.between))


def distinct(steps: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
    return [[np.unique(rows) for rows in step] for step in steps]


def by_link(exchanges: list[Exchange], shape: tuple[int, int]) -> tuple[float, float]:
    return Traffic(tuple(exchanges)).by_link(cluster(*shape))


def near(found: tuple[float, float], routed: Routed, steps: int) -> None:
    assert found == pytest.approx(routed.bytes(steps), rel=0.01)


@pytest.mark.parametrize("shape", SHAPES)
def test_replicated_rows_cross_once_for_each_node(shape: tuple[int, int]) -> None:
    world, nodes = shape
    group = demand(world, nodes=nodes).groups[0]
    steps = distinct(draw(world, STEPS, 3))
    sums, gradients = Routed(*shape), Routed(*shape)
    for step in steps:
        sums.to_all(np.unique(np.concatenate(step)))
        gradients.to_homes(step)
    filled, back, given = replicated_exchanges(group, world, 300.0, ITEM, "home")
    near(by_link([given], shape), sums, STEPS)
    near(by_link([back], shape), gradients, STEPS)
    shares = [split(e, cluster(*shape))[1] / e.nbytes for e in (filled, given)]
    assert shares[0] == pytest.approx(shares[1])
    assert filled.nbytes == pytest.approx((world - 1) / world * 300 * ROW)


@pytest.mark.parametrize("shape", SHAPES)
def test_sharded_rows_cross_once_for_each_node(shape: tuple[int, int]) -> None:
    world, nodes = shape
    group = demand(world, nodes=nodes).groups[0]
    steps = distinct(draw(world, STEPS + 1, 4))
    every, late = Routed(*shape), Routed(*shape)
    for before, step in itertools.pairwise(steps):
        changed = np.unique(np.concatenate(before))
        every.to_namers(step)
        late.to_namers([np.intersect1d(rows, changed) for rows in step])
    late_rows, early_rows, back = sharded_exchanges(group, world, ITEM, nodes)
    near(by_link([late_rows], shape), late, STEPS)
    near(by_link([late_rows, early_rows], shape), every, STEPS)
    gradients = Routed(*shape)
    for step in steps[1:]:
        gradients.to_homes(step)
    near(by_link([back], shape), gradients, STEPS)


def test_a_node_touches_more_rows_the_more_ranks_it_has() -> None:
    found = [demand(8, nodes=nodes).groups[0] for nodes in (8, 4, 2, 1)]
    rows = [group.node_rows for group in found]
    assert rows[0] == found[0].rank_rows == rows[3]  # of one node nobody asks
    assert rows[0] < rows[1] < rows[2] < found[0].world_rows
    assert [t.node is None for group in found for t in group.tables[:1]] == [
        True,
        False,
        False,
        True,
    ]
    parts: tuple[GroupDemand, GroupDemand] = found[2].split([100.0, 7.0, 40.0])
    for what in ("node_rows", "late_node_rows"):
        both = sum(getattr(part, what) for part in parts)
        assert both == pytest.approx(getattr(found[2], what))


def test_rows_of_nodes_that_do_not_hand_on_cross_for_each_rank() -> None:
    for world, pattern in ((128, SHARED), (130, EACH)):
        group = demand(world, nodes=2).groups[0]
        assert {e.pattern for e in sharded_exchanges(group, world, ITEM, 2)[:2]} == {pattern}


def test_predictions_have_the_sums_of_their_exchanges() -> None:
    shape, prefix = (8, 2), {"t_cat_0": 30, "t_cat_2": 40}
    there, each = cluster(*shape), demand(8, nodes=2)
    found = {p: predict(p, each, there, settings(), prefix) for p in (REPLICATED, SHARDED, MIXED)}
    for prediction in found.values():
        parts = prediction.inside + prediction.between
        assert parts == pytest.approx(prediction.collective_bytes)
        assert prediction.traffic.inter_node_bytes(there) == pytest.approx(prediction.between)
    hot, cold = each.groups[0].split([30.0, 0.0, 40.0])
    prediction = found[MIXED]
    want = sharded_exchanges(cold, 8, ITEM, 2)
    filled = total(prediction.traffic.exchanges, "fill")
    want += replicated_exchanges(hot, 8, 0.0, ITEM, REPLICATED)
    want.append(Exchange("fill", filled, pattern=SPREAD))
    assert prediction.between == pytest.approx(by_link(want, shape)[1])
    # Copies for every rank of the other node would be four times as many.
    sums = total(found[REPLICATED].traffic.exchanges, "row_sums")
    assert sums / 7 == pytest.approx(split(Exchange("", sums, pattern=SPREAD), there)[1])
    dense = dense_exchange(1000, 8)
    assert Traffic((dense,)).inter_node_bytes(there) == pytest.approx(dense.nbytes / 4)


def test_rows_are_handed_on_by_a_second_collective() -> None:
    there = Cluster(8, Link(1e9), Link(100.0, 0.5), Link(10.0, 2.0), 2, collective_s=7.0)
    # Of seven copies three go to mates and one to the other node, where three are made of it.
    first = max(3 * 0.5 + 300 / 100, 1 * 2.0 + 100 / 10)
    second = 3 * 0.5 + 300 / 100
    spread = Exchange("fill", 700.0, pattern=SPREAD)
    assert exchange_seconds(spread, there) == pytest.approx(7 + first + 7 + second)
    # Sharded rows go to whoever named them, but once to a node: 150 of 400 bytes are handed on.
    shared = Exchange("late_rows", 700.0, pattern=SHARED, crossing=250.0)
    first = max(3 * 0.5 + 300 / 100, 4 * 2.0 + 250 / 10)
    assert exchange_seconds(shared, there) == pytest.approx(7 + first + 7 + 3 * 0.5 + 150 / 100)
    quick = replace(there, between=Link(1e9))  # the first is over when mates have their copies
    for exchange, rest in ((spread, 300), (shared, 150)):
        expected = 7 + 3 * 0.5 + 300 / 100 + 7 + 3 * 0.5 + rest / 100
        assert exchange_seconds(exchange, quick) == pytest.approx(expected)
    for shape in ((8, 1), (8, 8)):  # one node, and nodes of one rank: from each to each
        flat = Cluster(8, Link(1e9), Link(100.0, 0.5), Link(10.0, 2.0), shape[1], collective_s=7.0)
        each = exchange_seconds(Exchange("fill", 700.0), flat)
        assert exchange_seconds(spread, flat) == pytest.approx(each)
