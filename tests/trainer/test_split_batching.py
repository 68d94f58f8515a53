"""Whole runs with `data.batching=split`: one result for every cache and mode, near `as_is`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hot_cold_cases import RUN, SYNTHETIC, counted
from ranks import run_ranks

from distcache.cli.compose import compose_overrides, to_config
from distcache.comm.world import close_world, open_world
from distcache.data.synthetic import SyntheticSource, SyntheticSpec
from distcache.errors import ConfigError
from distcache.trainer.trainer import train

QUIET = ("trainer.device=cpu", "trainer.log_level=ERROR", "optim.dense_lr=0.05")
SPLIT = "data.batching=split"


def run(world, home: Path, *overrides: str) -> dict[str, Any]:
    config = to_config(compose_overrides([*RUN, *QUIET, *overrides]))
    home.mkdir(parents=True, exist_ok=True)
    summary = train(config, world, home).summary
    return summary | {"digests": (summary["loss_digest"], summary["state_digest"])}


def play(rank: int, size: int, folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    home, world = Path(folder), open_world("cpu", timeout_s=60)
    known = f"cache.statistics={home / 'counted'}"
    jobs = {
        "resident": ("parallel=resident",),
        "host": ("parallel=host",),
        "data": ("cache.prefetch=0",),
        "tight": ("cache.rows=200", "data.hot_rows=60", "cache.prefetch=0"),
        "tight, not warm": ("cache.rows=200", "data.hot_rows=60", "cache.warm_start=0"),
        "tight, resident": ("parallel=resident", "data.hot_rows=60"),
        "as_is": ("data.batching=as_is",),
    }
    seen = {name: run(world, home / name, known, SPLIT, *job) for name, job in jobs.items()}
    try:
        run(world, home / "resumed", known, "data.batching=as_is",
            f"trainer.resume={home / 'data'}")  # fmt: skip
    except ConfigError as error:
        seen["refused"] = str(error)
    close_world(world)
    return seen


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_one_result_for_every_cache(world: int, tmp_path: Path) -> None:
    counted(SyntheticSource(SyntheticSpec(**SYNTHETIC)), tmp_path / "counted")
    for seen in run_ranks(play, world, str(tmp_path), timeout=240):
        assert seen["data"]["digests"] == seen["resident"]["digests"] == seen["host"]["digests"]
        tight = [seen[name]["digests"] for name in seen if name.startswith("tight")]
        assert len(set(tight)) == 1 and tight[0] != seen["data"]["digests"]
        for name in ("data", "tight"):
            assert seen[name]["final_loss"] == pytest.approx(seen["as_is"]["final_loss"], rel=1e-4)
            assert seen[name]["early_steps"] > 0.9  # warm: the hot rows were there
            assert 0.05 < seen[name]["hot_samples"] < 0.95
            assert seen[name]["stage_ms"]["forward_backward_hot"] > 0
        assert seen["host"]["early_steps"] < 0.1
        assert seen["as_is"]["early_steps"] is None
        assert "data.batching was split, is not set" in seen["refused"]
