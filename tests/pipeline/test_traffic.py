"""The traffic of real runs, counted by every rank, is what the planner alone says: to the byte."""

from __future__ import annotations

from dataclasses import replace

import pytest
from traffic_runs import Run, counted, placements, replayed

from distcache.engine.groups import Placement

DATA = (
    "data=synthetic",
    "data.table_rows=[3000,400,60]",
    "data.bag_size=[2,1,1]",
    "data.global_batch_size=64",
    "data.zipf=1.05",
    "model.table_dims=[4,8,4]",
)


def compare(run: Run, ranks: list[dict], world: int) -> None:
    """Each rank's counters of a run are those of its replay; rows leave the cache."""
    steps = [step for step in replayed(run, world) if step.kind == "train"]
    assert len(steps) == run.steps
    total = {
        "collective_bytes": sum(step.sent for step in steps),
        "planning_bytes": sum(step.planning for step in steps),
        "host_read": sum(step.host_read for step in steps),
        "host_written": sum(step.host_written for step in steps),
    }
    for key, expected in total.items():
        assert [rank[key] for rank in ranks] == expected.tolist(), f"{key} of {run.placement}"
    assert ranks[0]["summary"]["collective_bytes"] == total["collective_bytes"].sum() // world
    assert total["collective_bytes"].all(), "nothing was sent"


def check(runs: list[Run], world: int) -> None:
    for run, ranks in zip(runs, counted(runs, world), strict=True):
        compare(run, ranks, world)


def run_of(optimizer: str) -> Run:
    """Two widths, bags and evaluations."""
    return Run(DATA, (500, 200), Placement(), optimizer, AHEAD[optimizer], prefetch=2, evals=5)


AHEAD = {"adagrad": 3, "adam": 5, "sgd": 3}


@pytest.mark.parametrize(
    "optimizer",
    ["adagrad", *(pytest.param(name, marks=pytest.mark.slow) for name in ("adam", "sgd"))],
)
def test_two_ranks_in_every_placement(optimizer: str) -> None:
    runs = placements(run_of(optimizer))
    check([*runs, replace(runs[0], lookahead=0, steps=6)], 2)
    written = [sum(step.host_written.sum() for step in replayed(run, 2)) for run in runs]
    assert all(written), "nothing leaves the cache"


@pytest.mark.slow
def test_four_ranks() -> None:
    cases = [run_of("adagrad"), run_of("sgd")]
    check([replace(run, steps=8) for case in cases for run in placements(case)[2:4]], 4)
