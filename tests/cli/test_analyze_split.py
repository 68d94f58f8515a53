"""What analyze replays is what a run with the same keys would do: its P, and its split."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distcache.analyze import main
from distcache.cli.compose import compose_overrides, to_config
from distcache.comm.world import close_world, open_world
from distcache.trainer.trainer import train

RUN = (
    *("data=synthetic", "data.table_rows=[3000,500,40]", "data.global_batch_size=64"),
    *("model=dcn_v2", "model.table_dims=[16,16,32]", "model.dense_arch=[8,4]"),
    *("model.over_arch=[8,1]", "model.cross_layers=1", "model.cross_rank=2"),
    *("trainer.steps=30", "trainer.device=cpu", "trainer.log_level=ERROR", "run.save=false"),
)


def simulated(folder: Path, *words: str) -> dict[tuple[str, int], float]:
    """Rows fetched per step by policy and slots over all groups."""
    given = [*RUN, "simulate=true", "analyze.policies=[lookahead]", f"output={folder}"]
    assert main([*given, *words]) == 0
    cases = json.loads((folder / "report.json").read_text())["simulated"]
    return {(case["label"], sum(case["slots"])): case["fetched"] for case in cases}


def test_each_size_has_its_own_prefetch(tmp_path: Path) -> None:
    up = simulated(tmp_path / "up", "analyze.sizes=[0.05,0.5]")
    down = simulated(tmp_path / "down", "analyze.sizes=[0.5,0.05]")
    assert up == down and len(up) == 4


def test_statistics_are_those_that_are_counted(tmp_path: Path) -> None:
    words = ("cache.tail=frequency", "cache.split=by_curve", "analyze.sizes=[0.3]")
    found = simulated(tmp_path / "counted", *words)
    ((label, slots), fetched) = next(item for item in found.items() if item[0][0] != "MIN")
    assert "lfu" in label  # analyze.policies=[lookahead] has the default tail
    run = (*RUN, "cache.split=by_curve", "cache.ratio=0.3", "cache.warm_start=0")
    folder = tmp_path / "run"
    folder.mkdir()
    world = open_world("cpu", timeout_s=60)
    try:
        words = [*run, f"cache.statistics={tmp_path / 'counted'}"]
        summary = train(to_config(compose_overrides(words)), world, folder).summary
    finally:
        close_world(world)
    assert summary["cache_rows"] == slots
    assert summary["rows_fetched"] == pytest.approx(fetched)
    least = next(value for (name, _), value in found.items() if name == "MIN")
    assert least <= fetched
