"""Several nodes, each with its part of the rows: the bits of one node with the same ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from node_cases import open_nodes
from oracle import OPTIMIZERS
from popular_runs import popularity_of
from ranks import run_ranks
from scenarios import Outcome, Scenario, run_mode, table

from distcache.comm.world import close_world
from distcache.engine.groups import Placement
from distcache.parallel.cached import CachedSettings

TABLES = (table("a", 300), table("b", 40, features=2), table("c", 7, dim=4), table("d", 1))
SLOTS = (236, 68)
HOT = tuple(np.arange(count) for count in (20, 5, 1, 0))
PLACEMENTS = [
    pytest.param(Placement(), id="replicated"),
    pytest.param(Placement("sharded"), id="sharded"),
    pytest.param(Placement("mixed", "home", hot=HOT), id="mixed, state at home"),
]
Job = tuple[Scenario, CachedSettings, bool]


def scenario(optimizer: str) -> Scenario:
    spec, lr = OPTIMIZERS[optimizer]
    return Scenario(TABLES, spec, lr, steps=12, weighted=True, last_batch=3)


def jobs(placement: Placement) -> list[Job]:
    """Scenarios, settings, and whether rows are numbered by popularity."""
    adam, sgd = scenario("adam"), scenario("sgd")
    data = CachedSettings("data", SLOTS, 6, 2, validate=True, placement=placement)
    found = [
        (adam, data, False),
        (adam, replace(data, schedule="serial"), True),
        (replace(sgd, empty_ranks=True), data, False),
    ]
    if placement == Placement():  # the others have none
        found += [(sgd, CachedSettings(mode), False) for mode in ("host", "resident")]
    return found


def run_jobs(
    rank: int, size: int, layouts: list[tuple[int, ...]], placement: Placement
) -> list[list[Outcome]]:
    """The outcomes of all jobs, for nodes of each of `layouts`."""
    found = []
    for sizes in layouts:
        world = open_nodes(rank, sizes)
        found.append([])
        for case, settings, popular in jobs(placement):
            popularity = popularity_of(case, SLOTS, warm_start=0.5) if popular else None
            found[-1].append(run_mode(world, case, settings, 5, popularity))
        close_world(world)
    return found


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param([(2,), (1, 1)], id="2 ranks", marks=pytest.mark.slow),
        pytest.param([(3,), (1, 2), (1, 1, 1)], id="3 ranks"),
        pytest.param([(4,), (2, 2), (1, 3)], id="4 ranks", marks=pytest.mark.slow),
    ],
)
def test_nodes_have_the_bits_of_one(layouts: list[tuple[int, ...]], placement: Placement) -> None:
    by_rank = run_ranks(run_jobs, sum(layouts[0]), layouts, placement, timeout=200)
    for rank, (one, *several) in enumerate(by_rank):
        for nodes in several:
            for job, (mine, want) in enumerate(zip(nodes, one, strict=True)):
                assert mine.losses == want.losses, (rank, job)
                assert np.array_equal(mine.cached, want.cached), (rank, job)
                if rank == 0:
                    assert mine.state_digest == want.state_digest, job
                assert want.summary["inter_node_bytes"] is None
                assert mine.summary["inter_node_bytes"] > 0


def run_with_evaluations(rank: int, size: int) -> dict:
    world = open_nodes(rank, (1,) * size)
    settings = CachedSettings("data", SLOTS, 6, 2, placement=Placement("sharded"))
    found = run_mode(world, scenario("sgd"), settings, evals=3).summary
    close_world(world)
    return found


def test_what_evaluation_sends_between_nodes_is_not_counted() -> None:
    """Of a rank alone on its node all bytes leave the node: both counters are of training alone."""
    for summary in run_ranks(run_with_evaluations, 2, timeout=60):
        sent = summary["collective_bytes"] + summary["dense_collective_bytes"]
        assert 0 <= summary["inter_node_bytes"] - sent <= 1  # means over ranks, rounded down
