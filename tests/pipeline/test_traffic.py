"""The traffic of real runs, counted by every rank, is what the planner alone says: to the byte."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from criteo_lines import make_lines, write_lines
from traffic_runs import Run, counted, placements, replayed

from distcache.engine.groups import Placement

SYNTHETIC = (
    "data=synthetic",
    "data.table_rows=[3000,400,60]",
    "data.bag_size=[2,1,1]",
    "data.global_batch_size=64",
    "data.zipf=1.05",
    "model.table_dims=[4,8,4]",
)


def synthetic(folder: Path) -> Run:
    return Run(SYNTHETIC, (500, 200), Placement(), prefetch=2, evals=5)


def interactions(folder: Path) -> Run:
    rng = np.random.default_rng(0)
    lines = []
    for user in range(400):
        items = np.unique((1000 * rng.random(rng.integers(3, 12)) ** 3).astype(int))
        lines.append(" ".join(map(str, (user, *items))))
    path = folder / "interactions.txt"
    path.write_text("\n".join(lines) + "\n")
    data = ("data=interactions", f"data.path={path}", "data.global_batch_size=128")
    return Run((*data, "model.embedding_dim=8"), (700,), Placement(), "adam", lookahead=5)


def criteo(folder: Path) -> Run:
    path = write_lines(folder / "criteo.txt", make_lines(900))
    rows = f"data.table_rows=[{','.join(['300'] * 26)}]"
    data = ("data=criteo", f"data.path={path}", "data.global_batch_size=48", rows)
    return Run((*data, "model.embedding_dim=4"), (2400,), Placement(), "sgd", steps=10)


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


@pytest.mark.parametrize("make", [synthetic, interactions, criteo])
def test_two_ranks_in_every_placement(make, tmp_path: Path) -> None:
    runs = placements(make(tmp_path))
    check([*runs, replace(runs[0], lookahead=0, steps=6)], 2)
    written = [sum(step.host_written.sum() for step in replayed(run, 2)) for run in runs]
    assert all(written) or make is not synthetic, "nothing leaves the cache"


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    cases = [synthetic(tmp_path), criteo(tmp_path)]
    check([replace(run, steps=8) for case in cases for run in placements(case)[2:4]], 4)


def test_a_byte_off_is_seen(tmp_path: Path) -> None:
    run = replace(synthetic(tmp_path), placement=Placement("sharded"), steps=6, evals=0)
    (ranks,) = counted([run], 2)
    compare(run, ranks, 2)
    with pytest.raises(AssertionError, match="host_read"):
        compare(replace(run, optimizer="adam"), ranks, 2)
    ranks[1]["planning_bytes"] += 1
    with pytest.raises(AssertionError, match="planning_bytes"):
        compare(run, ranks, 2)
