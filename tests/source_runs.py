"""Whole training runs over a source, from command-line overrides, in one set of processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from node_cases import open_nodes
from ranks import run_ranks

from distcache.cli.compose import compose_overrides, to_config
from distcache.comm.world import World, close_world
from distcache.config.tree import Config
from distcache.trainer.trainer import train

NET = ("model.embedding_dim=4", "model.dense_arch=[8,4]", "model.over_arch=[8,1]")
"""The smallest dense network of the runs."""

SMALL = ("trainer.device=cpu", "trainer.log_level=WARNING", "run.save=false", "trainer.steps=null")


def configured(*overrides: str) -> Config:
    return to_config(compose_overrides(overrides))


def run(world: World, home: Path, *overrides: str) -> dict[str, Any]:
    """The summary of one run in `home`; all ranks call this."""
    home.mkdir(parents=True, exist_ok=True)
    return train(configured(*overrides), world, home).summary


def _runs(
    rank: int, world_size: int, runs: Sequence[Sequence[str]], folder: str, nodes: Sequence[int]
) -> list[dict]:
    world = open_nodes(rank, nodes)
    summaries = []
    for number, overrides in enumerate(runs):
        home = Path(folder) / f"w{world_size}-{number}"
        summaries.append(run(world, home, *SMALL, *overrides))
    close_world(world)
    return summaries


def summaries(
    runs: Sequence[Sequence[str]],
    folder: Path,
    world_size: int = 1,
    timeout: float = 120,
    nodes: Sequence[int] | None = None,
) -> list[dict[str, Any]]:
    """The summaries of runs with these overrides, one after the other, at `world_size` ranks;
    `nodes`: ranks of each node, None: all on one."""
    more = (list(runs), str(folder), nodes or (world_size,))
    return run_ranks(_runs, world_size, *more, timeout=timeout)[0]


def digests(summary: dict[str, Any]) -> tuple[str, str]:
    """What must be the same bits."""
    return summary["loss_digest"], summary["state_digest"]
