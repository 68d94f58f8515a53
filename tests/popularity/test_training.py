"""Whole runs with `cache.statistics`: the same bits whatever is made of them, resumed too."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks
from scenarios import count_steps
from source_runs import digests

from distcache.cli.compose import compose_overrides, to_config
from distcache.comm.world import close_world, open_world
from distcache.config.checks import check
from distcache.errors import ConfigError
from distcache.popularity.statistics import write_statistics
from distcache.trainer.build import build_source
from distcache.trainer.trainer import train

ROWS, DIMS = [700, 90, 30], [8, 4, 8]
BASE = (
    "data=synthetic",
    f"data.table_rows={ROWS}",
    "data.bag_size=[2.0,1,3]",
    "data.global_batch_size=32",
    "data.samples=960",
    "data.zipf=1.2",
    "model=dcn_v2",
    f"model.table_dims={DIMS}",
    "model.dense_arch=[8]",
    "model.over_arch=[8,1]",
    "model.cross_layers=1",
    "model.cross_rank=4",
    "optim=adagrad",
    "cache.bytes=16000",
    "cache.state=replicated",  # at home, so many bytes would hold more rows than were counted
    "trainer.device=cpu",
    "trainer.log_level=WARNING",
    "trainer.steps=16",
    "trainer.eval_every=6",
    "trainer.eval_steps=2",
    "run.digest=true",
)


def config_of(*overrides: str):
    return to_config(compose_overrides([*BASE, *overrides]))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """Statistics of the first ten steps, and of five others."""
    found = {}
    for name, steps in (("one", range(10)), ("other", range(20, 25))):
        path = tmp_path_factory.mktemp(name)
        write_statistics(path, count_steps(build_source(config_of()), steps))
        found[name] = str(path)
    return found


GIVEN = ("cache.split={t_cat_0:250,cat_1:60,t_cat_2:30}", "cache.bytes=null")
FOUND = ("cache.placement=auto", "cache.objective=bytes")  # sharded rows need the fewest
RUNS = {
    "cold": ("cache.warm_start=0",),
    "warm": ("cache.warm_start=1",),
    "auto": (),
    "by_curve": ("cache.split=by_curve",),
    "static": ("cache.policy=static",),
    "frequency": ("cache.tail=frequency",),
    "sharded_static": ("cache.placement=sharded", "cache.bytes=8000", "cache.policy=static"),
    "found_sharded": (*FOUND, "cache.bytes=8000", "cache.warm_start=1"),
    "first": ("trainer.steps=7",),
}
"""Runs with statistics."""


def several(rank: int, size: int, folders: dict[str, str], home: str) -> dict[str, Any]:
    world = open_world("cpu", timeout_s=60)
    counts = f"cache.statistics={folders['one']}"
    runs = {"plain": (), "given": GIVEN, "sharded_given": ("cache.placement=sharded", *GIVEN)}
    runs |= {name: (counts, *words) for name, words in RUNS.items()}
    first = f"trainer.resume={home}/first"
    runs["resumed"] = (f"cache.statistics={folders['other']}", first)
    runs["resumed_without"] = (first,)
    found = {}
    for name, words in runs.items():
        config = config_of("run.save=true", *words)
        check(config)
        folder = Path(home) / name
        folder.mkdir(parents=True, exist_ok=True)
        found[name] = train(config, world, folder).summary
    found["refused"] = []
    for wrong in ("cache.split={t_cat_0:9000}", "data.table_rows=[700,90,31]"):
        with pytest.raises(ConfigError) as caught:
            train(config_of(counts, wrong), world, Path(home))
        found["refused"].append(str(caught.value))
    close_world(world)
    return found


@pytest.mark.parametrize("batching", ["as_is", "hot_cold"])
def test_a_table_that_nothing_looks_up(batching: str, tmp_path) -> None:
    """It has no hot row, and changes nothing for the others."""
    counted = count_steps(build_source(config_of()), range(10))
    empty = replace(counted.tables[1], counts=np.zeros(ROWS[1], np.int64), lookups=0, distinct=0)
    tables = (counted.tables[0], empty, counted.tables[2])
    write_statistics(tmp_path / "counts", replace(counted, tables=tables))
    world = open_world("cpu", timeout_s=60)
    try:
        how = (f"cache.statistics={tmp_path / 'counts'}", f"data.batching={batching}")
        summary = train(config_of("data.bag_size=[2.0,0,3]", *how), world, tmp_path).summary
    finally:
        close_world(world)
    assert summary["steps"] == 16 and summary["hot_rows_by_table"]["t_cat_1"] == 0
    assert summary["hot_rows_by_table"]["t_cat_0"] > 0


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_every_use_of_statistics_trains_the_same_model(world, folders, tmp_path) -> None:
    ranks = run_ranks(several, world, folders, str(tmp_path), timeout=200)
    for many, other in [rank.pop("refused") for rank in ranks]:
        assert "the table has 700 rows" in many
        assert re.search(r"of tables with.*fingerprint \w{16}.*: fingerprint", other)
    found = ranks[0]
    plain = found.pop("plain")
    found.pop("first")
    for name, summary in found.items():
        assert digests(summary) == digests(plain), name
        assert summary["eval_auc"] == plain["eval_auc"], name
    assert plain["warm_start_rows"] is None and plain["hot_rows_by_table"] is None
    assert found["cold"]["warm_start_rows"] == 0
    assert found["cold"]["rows_fetched"] == plain["rows_fetched"], "counts alone change nothing"
    assert found["warm"]["warm_start_rows"] > 0.8 * found["warm"]["cache_rows"]
    assert 0.4 < found["auto"]["warm_start_rows"] / found["auto"]["cache_rows"] <= 0.5
    assert found["static"]["warm_start_rows"] > 0.8 * found["static"]["cache_rows"]
    assert found["warm"]["rows_fetched"] < plain["rows_fetched"]
    assert found["resumed"]["warm_start_rows"] > 0
    for name in ("sharded_static", "found_sharded"):
        held = world * found[name]["cache_rows"]
        assert 0.8 * held < found[name]["warm_start_rows"] <= held, name
    hot = found["warm"]["hot_rows_by_table"]
    assert list(hot) == ["t_cat_0", "t_cat_1", "t_cat_2"]
    assert found["given"]["cache_rows"] == 250 + 30 + 60
    assert found["by_curve"]["hot_rows_by_table"] != hot
