"""A batch that cannot be planned ends the run, but not what was trained before it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from distcache.comm.world import close_world, open_world
from distcache.config.tree import Config
from distcache.errors import DataError
from distcache.trainer import build
from distcache.trainer.trainer import Run, TrainResult


def config_of(resume: str | None = None) -> Config:
    config = Config()
    config.model.name, config.model.embedding_dim = "dlrm", 4
    config.model.dense_arch, config.model.over_arch = [8, 4], [8, 1]
    config.data.name, config.data.table_rows = "synthetic", [500, 60]
    config.data.global_batch_size, config.cache.rows = 16, 80
    config.parallel.mode, config.optim.name = "data", "adam"
    config.trainer.steps, config.trainer.resume = 12, resume
    config.run.digest = "true"
    return config


class OneBadBatch:
    """A source whose step 7 names an id beyond its table."""

    def __init__(self, source) -> None:
        self._source = source

    def __getattr__(self, name):
        return getattr(self._source, name)

    def train_batch(self, step, rank, world_size):
        batch = self._source.train_batch(step, rank, world_size)
        if step == 7:
            values = batch.ids.values.clone()
            values[0] = 10**6
            batch = replace(batch, ids=replace(batch.ids, values=values))
        return batch


def run(config: Config, world, folder, bad: bool) -> TrainResult:
    folder.mkdir()
    source = build.build_source(config)
    tables = build.build_tables(config, source)
    model = build.build_dense(config, tables, source.dense_features)
    mode = build.build_parallel(config, world, tables, model, source)
    source = OneBadBatch(source) if bad else source
    return Run(config, world, folder, source, tables, mode).go(build.build_rates(config))


def test_the_steps_before_a_bad_batch_are_saved(tmp_path) -> None:
    world = open_world("cpu", "gloo", 60)
    try:
        whole = run(config_of(), world, tmp_path / "whole", bad=False).summary
        with pytest.raises(DataError, match="1000000"):
            run(config_of(), world, tmp_path / "bad", bad=True)
        resumed = config_of(str(tmp_path / "bad"))
        found = run(resumed, world, tmp_path / "resumed", bad=False).summary
    finally:
        close_world(world)
    assert found["first_step"] == 7
    for key in ("loss_digest", "state_digest"):
        assert found[key] == whole[key]
    assert not (tmp_path / "bad" / "summary.json").exists()
    assert json.loads((tmp_path / "whole" / "summary.json").read_text())["steps"] == 12
