"""Several nodes, each with its part of the rows: the bits of one node with the same ranks, and of
sharded rows, which ranks of a node share, the bytes that ids say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from unittest.mock import patch

import numpy as np
import pytest
from node_cases import open_nodes
from ranks import run_ranks
from scenarios import Scenario, finish, make_mode, run_mode, table

from distcache.comm.world import Nodes, World, close_world
from distcache.engine.groups import Placement, TableGroup, group_bags, make_groups
from distcache.parallel.base import OptimizerSpec
from distcache.parallel.cached import CachedSettings
from distcache.planner import shard as relays

TABLES = (table("a", 300), table("b", 40, features=2), table("c", 7, dim=4))
CASE = Scenario(TABLES, OptimizerSpec("adagrad"), steps=10, global_batch=48, last_batch=3)
SLOTS = (160, 16)
WORLD = 4
PLACEMENTS = {
    "sharded": Placement("sharded"),
    "mixed": Placement("mixed", "home", hot=tuple(np.arange(count) for count in (20, 5, 1))),
    "all late": Placement("sharded", early=False),
}
SHARING = CachedSettings("data", SLOTS, 3, 2, validate=True)
ROOMY = CachedSettings("data", (280, 16), 6, 2, validate=True)
RUNS = {name: replace(SHARING, placement=own) for name, own in PLACEMENTS.items()} | {
    "replicated": ROOMY,
    "state at home": replace(ROOMY, placement=Placement(state="home"), schedule="serial"),
    "host": CachedSettings("host"),
    "resident": CachedSettings("resident"),
}


@dataclass(frozen=True)
class Run:
    """A run's losses and digest, what this rank has cached, and what it sent, bytes by counter."""

    losses: list[float]
    state: str
    cached: np.ndarray
    sent: dict[str, int]


def run_all(
    rank: int, size: int, ways: Sequence[tuple[tuple[int, ...], bool]]
) -> list[dict[str, Run]]:
    """Every run on nodes of each shape of `ways`; whether they hand rows on."""
    found = []
    for sizes, hand_on in ways:
        world = open_nodes(rank, sizes)
        with patch.object(relays, "MOST_RANKS", relays.MOST_RANKS if hand_on else 1):
            names = RUNS if hand_on else PLACEMENTS
            found.append({name: run_one(world, RUNS[name]) for name in names})
        close_world(world)
    return found


def run_one(world: World, settings: CachedSettings) -> Run:
    """A run whose counters are read when it is over."""
    mode = make_mode(world, CASE, settings)
    batches = (CASE.batch(step, world.rank, world.size) for step in range(CASE.steps))
    losses = [mode.train_step(step).loss for step in mode.stream(batches)]
    outcome, counters = finish(mode, CASE, losses), mode.counters
    sent = counters.values() | {"inter_node_bytes": counters.inter_node_bytes}
    return Run(outcome.losses, outcome.state_digest, outcome.cached, sent)


def named_rows(placement: Placement) -> Iterator[tuple[TableGroup, list[np.ndarray]]]:
    """For each step and group: the distinct sharded rows that each rank names."""
    groups = placement.groups(make_groups(CASE.tables, CASE.features, WORLD))
    for step in range(CASE.steps):
        ids = [CASE.batch(step, rank, WORLD).ids for rank in range(WORLD)]
        for group in groups:
            rows = [np.unique(group_bags(group, part, CASE.dtype).rows) for part in ids]
            yield group, [part[~np.isin(part, group.hot)] for part in rows]


def by_hand(placement: Placement, sizes: tuple[int, ...]) -> Counter:
    """Bytes between nodes of sharded rows, of those that ranks of a node share, and of masks.

    `direct`, `once`: rows to who named them, from their homes alone or once to each node;
    `gradients`: of rows, to their homes; `masks`: what homes tell, between nodes and in all.
    """
    nodes, found = Nodes(sizes), Counter()
    for group, named in named_rows(placement):
        homes = [group.layout.home(rows) for rows in named]
        for node, home in np.ndindex(len(sizes), WORLD):
            if home in nodes.ranks(node):
                continue
            parts = [named[rank][homes[rank] == home] for rank in nodes.ranks(node)]
            asked, row = sum(map(len, parts)), 4 * group.dim
            found["direct"] += row * asked
            found["gradients"] += row * asked
            found["once"] += row * len(np.unique(np.concatenate(parts)))
            if len(parts) > 1:  # a byte for each row, in whole int32 numbers
                found["masks"] += sum(4 * -(-len(part) // 4) for part in parts)
    return found


WAYS = [((4,), True), ((2, 2), True), ((1, 3), True), ((2, 2), False), ((1, 3), False)]


@pytest.fixture(scope="module")
def by_way() -> dict[tuple, dict[str, list[Run]]]:
    """The runs of every rank, by way and name."""
    by_rank = run_ranks(run_all, WORLD, WAYS, timeout=200)
    return {
        way: {name: [of_rank[at][name] for of_rank in by_rank] for name in by_rank[0][at]}
        for at, way in enumerate(WAYS)
    }


def total(runs: list[Run], counter: str) -> int:
    return sum(run.sent[counter] for run in runs)


@pytest.mark.parametrize("name", RUNS)
def test_nodes_have_the_bits_of_one(by_way: dict, name: str) -> None:
    one = by_way[(4,), True][name]
    for way in WAYS:
        for rank, run in enumerate(by_way[way].get(name, ())):
            assert run.losses == one[rank].losses
            assert rank or run.state == one[0].state, "rank 0 has the whole tables"
            assert np.array_equal(run.cached, one[rank].cached), (way, rank)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_bytes_of_shared_rows(by_way: dict, name: str) -> None:
    one = by_way[(4,), True][name]
    for sizes in ((2, 2), (1, 3)):
        on, off, want = (
            *(by_way[sizes, way][name] for way in (True, False)),
            by_hand(PLACEMENTS[name], sizes),
        )
        for runs in (on, off):
            for counter in ("collective_bytes", "dense_collective_bytes"):
                assert total(runs, counter) == total(one, counter), (sizes, counter)
        saved = total(off, "inter_node_bytes") - total(on, "inter_node_bytes")
        assert 0 < saved == want["direct"] - want["once"]
        told = total(on, "planning_bytes") - total(off, "planning_bytes")
        assert 0 < told == want["masks"]
        assert total(off, "planning_bytes") == total(one, "planning_bytes")
        if name == "mixed":
            continue
        last = (np.cumsum(sizes) - 1).tolist()
        dense = sum(on[rank].sent["dense_collective_bytes"] for rank in last)
        between = want["once"] + want["gradients"] + dense
        assert total(on, "inter_node_bytes") == between


def run_with_evaluations(rank: int, size: int) -> dict:
    world = open_nodes(rank, (1,) * size)
    found = run_mode(world, CASE, RUNS["sharded"], evals=3).summary
    close_world(world)
    return found


def test_what_evaluation_sends_between_nodes_is_not_counted() -> None:
    """Of a rank alone on its node all bytes leave the node: both counters are of training alone."""
    for summary in run_ranks(run_with_evaluations, 2, timeout=60):
        sent = summary["collective_bytes"] + summary["dense_collective_bytes"]
        assert 0 <= summary["inter_node_bytes"] - sent <= 1  # means over ranks, rounded down
