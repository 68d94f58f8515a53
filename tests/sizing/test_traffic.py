"""Predicted bytes, against rows that are drawn and routed over ranks and nodes one by one."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from sizing_cases import BATCH, DIM, STATE, cluster, demand, draw, layout, settings, total

from distcache.comm.world import Nodes
from distcache.sizing.cluster import Cluster, Link
from distcache.sizing.cost import exchange_seconds, predict
from distcache.sizing.traffic import (
    CACHED,
    HYBRID,
    RING,
    ROW_WISE,
    Exchange,
    Part,
    Traffic,
    cache_memory,
    hybrid_exchanges,
    padded_rows,
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
    """Rows that ranks sent inside their nodes and to other ones, mean per rank and step."""

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
        """Each home's rows to all ranks, round the ring in parts of the largest home's size."""
        most = int(np.bincount(self.homes(rows), minlength=self.world).max())
        for rank in range(self.world):
            self.send(rank, (rank + 1) % self.world, (self.world - 1) * most)

    def to_requesters(self, named: list[np.ndarray]) -> None:
        """Each home's rows to the ranks that named them."""
        for rank, rows in enumerate(named):
            for home, count in enumerate(np.bincount(self.homes(rows), minlength=self.world)):
                self.send(home, rank, int(count))

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
def test_bytes_inside_and_between_nodes(shape: tuple[int, int]) -> None:
    world = shape[0]
    group = demand(world).groups[0]
    there = cluster(*shape)
    steps = [[np.unique(rows) for rows in step] for step in draw(world, STEPS + 1, 4)]
    sums, gradients, every, late = (Routed(*shape) for _ in range(4))
    for before, step in itertools.pairwise(steps):
        sums.to_all(np.unique(np.concatenate(step)))
        gradients.to_homes(step)
        every.to_requesters(step)
        changed = np.unique(np.concatenate(before))
        late.to_requesters([np.intersect1d(rows, changed) for rows in step])
    late_rows, early_rows, back = sharded_exchanges(group, world, ITEM)
    late.is_about(late_rows)
    every.is_about(late_rows, early_rows)
    gradients.is_about(back)
    for state, width in (("home", ROW), ("replicated", ROW + STATE * ITEM)):
        filled, back, given = replicated_exchanges(group, world, 300.0, ITEM, state)
        sums.is_about(given)
        gradients.is_about(back)
        shares = [split(e, there)[1] / e.nbytes for e in (filled, given)]
        assert shares[0] == pytest.approx(shares[1])
        assert filled.nbytes == (world - 1) / world * padded_rows(300.0, 300.0, world) * width


def test_links_of_an_exchange_work_side_by_side() -> None:
    there = Cluster(8, Link(1e9), Link(100.0, 0.5), Link(10.0, 2.0), 2, collective_s=7.0)
    # Of seven messages from each to each, three stay in the node; round the ring one hop in four
    # leaves it, and there are six hops inside of nodes and two between them.
    each = Exchange("late_rows", 700.0)
    ring = Exchange("fill", 700.0, pattern=RING)
    assert exchange_seconds(each, there) == pytest.approx(7 + 4 * 2.0 + 400 / 10)
    assert exchange_seconds(ring, there) == pytest.approx(7 + 2 * 2.0 + 175 / 10)
    quick = replace(there, between=Link(1e9))
    assert exchange_seconds(each, quick) == pytest.approx(7 + 3 * 0.5 + 300 / 100)
    assert exchange_seconds(ring, quick) == pytest.approx(7 + 6 * 0.5 + 525 / 100)


@pytest.mark.parametrize("world", [2, 3, 8, 32])
@pytest.mark.parametrize("rows", [300, 3000])
def test_an_all_gather_is_padded_to_the_largest_part(world: int, rows: int) -> None:
    homes = np.random.default_rng(0).integers(0, world, (4000, rows))
    largest = [np.bincount(drawn, minlength=world).max() for drawn in homes]
    assert padded_rows(rows, rows, world) == pytest.approx(world * np.mean(largest), rel=0.04)
    assert padded_rows(rows, rows, 1) == rows
