"""Predicted bytes, against rows that are drawn and routed over ranks and nodes one by one."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from cost_cases import BATCH, DIM, STATE, cluster, demand, draw, layout, settings, total

from distcache.comm.world import Nodes
from distcache.cost.cluster import Cluster, Link
from distcache.cost.predict import exchange_seconds, predict
from distcache.cost.traffic import (
    CACHED,
    EACH,
    HYBRID,
    ROW_WISE,
    SHARED,
    SPREAD,
    Exchange,
    Part,
    Traffic,
    cache_memory,
    hybrid_exchanges,
    replicated_exchanges,
    sharded_exchanges,
    split,
)

ITEM, STEPS = 4, 120
ROW = DIM * ITEM
SHAPES = [(4, 2), (6, 2), (6, 3), (3, 3), (5, 1)]
"""Ranks and nodes."""


def test_tables_too_small_for_row_shards_stay_whole() -> None:
    found, vectors = hybrid_exchanges(demand(64), ROW_WISE, ITEM), BATCH * ROW
    assert total(found, "partial_sums") == pytest.approx(63 * vectors)
    # 300 and 40 rows leave some of 64 ranks without one
    assert total(found, "pooled") == pytest.approx(63 / 64 * 2 * vectors)


def test_one_rank_sends_nothing() -> None:
    for placement in (*CACHED, *HYBRID):
        alone = predict(placement, demand(1), cluster(1), settings(dense_parameters=1000))
        assert alone.traffic.collective_bytes == 0 and alone.traffic.dense_bytes == 0
        assert alone.time.exposed == alone.time.hidden == 0


def test_halves_are_moved_in_half_of_the_bytes_and_their_gradients_are_not() -> None:
    """State travels and lies beside them as it is."""
    wide = demand(4).groups[0]
    half = replace(wide, stored=torch.float16)
    for state in ("replicated", "home"):
        one, other = (replicated_exchanges(own, 4, 10.0, ITEM, state) for own in (wide, half))
        kept = 0 if state == "home" else STATE * ITEM
        assert total(one, "fill") / total(other, "fill") == (ROW + kept) / (ROW / 2 + kept)
        assert total(one, "row_gradients") == total(other, "row_gradients") > 0
        back = 2 if state == "home" else 1  # updated rows, or sums
        assert total(one, "row_sums") == back * total(other, "row_sums")
    one, other = (sharded_exchanges(own, 4, ITEM) for own in (wide, half))
    assert total(one, "early_rows") == 2 * total(other, "early_rows") > 0
    assert total(one, "row_gradients") == total(other, "row_gradients")
    for copied in (True, False):
        one, other = (cache_memory([Part(own, 9, copied)], 4, ITEM, "") for own in (wide, half))
        assert one - other == 9 * ROW / 2


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

    def is_about(self, *exchanges: Exchange) -> None:
        """Bytes inside and between nodes are as predicted."""
        shape = self.world, self.nodes.count
        found = Traffic(exchanges).by_link(cluster(*shape))
        sent = (ROW * rows / self.world / STEPS for rows in (self.inside, self.between))
        assert found == pytest.approx(tuple(sent), rel=0.01)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_cross_once_for_each_node(shape: tuple[int, int]) -> None:
    world, nodes = shape
    group, there = demand(world, nodes=nodes).groups[0], cluster(*shape)
    steps = [[np.unique(rows) for rows in step] for step in draw(world, STEPS + 1, 4)]
    sums, gradients, every, late = (Routed(*shape) for _ in range(4))
    for before, step in itertools.pairwise(steps):
        sums.to_all(np.unique(np.concatenate(step)))
        gradients.to_homes(step)
        every.to_namers(step)
        changed = np.unique(np.concatenate(before))
        late.to_namers([np.intersect1d(rows, changed) for rows in step])
    late_rows, early_rows, back = sharded_exchanges(group, world, ITEM, nodes)
    late.is_about(late_rows)
    every.is_about(late_rows, early_rows)
    gradients.is_about(back)
    for state, width in (("home", ROW), ("replicated", ROW + STATE * ITEM)):
        filled, back, given = replicated_exchanges(group, world, 300.0, ITEM, state)
        sums.is_about(given)
        gradients.is_about(back)
        shares = [split(e, there)[1] / e.nbytes for e in (filled, given)]
        assert shares[0] == pytest.approx(shares[1])
        assert filled.nbytes == pytest.approx((world - 1) / world * 300 * width)


def test_rows_of_nodes_that_do_not_hand_on_cross_for_each_rank() -> None:
    for world, pattern in ((128, SHARED), (130, EACH)):
        group = demand(world, nodes=2).groups[0]
        assert {e.pattern for e in sharded_exchanges(group, world, ITEM, 2)[:2]} == {pattern}


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
    for nodes in (1, 8):  # one node, and nodes of one rank: from each to each
        flat = replace(there, nodes=nodes)
        each = exchange_seconds(Exchange("fill", 700.0), flat)
        assert exchange_seconds(spread, flat) == pytest.approx(each)
