"""From the config to parts."""

from __future__ import annotations

import pytest
import torch
from toy_parallel import toy_config

from distcache.data.batch import BatchCheck
from distcache.errors import ConfigError, DataError
from distcache.parallel.base import OptimizerSpec
from distcache.trainer import build
from distcache.trainer.schedule import make_schedule


def test_synthetic_data_tables_and_dense_model_fit_together():
    config = toy_config(
        data__table_rows=[50, 20],
        data__samples=100,
        data__dense_features=3,
        model__over_arch=[4, 1],
    )
    source = build.build_source(config)
    tables = build.build_tables(config, source)
    assert [(t.name, t.rows, t.dim, t.features) for t in tables] == [
        ("t_cat_0", 50, 4, ("cat_0",)),
        ("t_cat_1", 20, 4, ("cat_1",)),
    ]
    model = build.build_dense(config, tables, source.dense_features)
    batch = source.train_batch(0, 0, 1)
    assert batch.dense.dtype == torch.float64
    logits = model(batch.dense, torch.zeros(16, 8, dtype=torch.float64))
    assert logits.shape == (16,)
    again = build.build_dense(config, tables, source.dense_features)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_criteo_lines_have_26_tables(tmp_path):
    config = toy_config(data__name="criteo", data__table_rows=[10] * 26)
    line = "\t".join(["1", *["3"] * 13, *["0a"] * 26])
    (tmp_path / "day").write_text(f"{line}\n" * 14)
    config.data.path = str(tmp_path / "day")
    source = build.build_source(config)
    assert (source.steps_per_epoch, source.eval_batches) == (1, 1)
    assert len(build.build_tables(config, source)) == 26


def test_widths_of_tables():
    config = toy_config(model__table_dims=[4, 8])
    source = build.build_source(config)
    assert [table.dim for table in build.build_tables(config, source)] == [4, 8]
    config.model.table_dims = [4]
    with pytest.raises(ConfigError, match="1 widths for 2 tables"):
        build.build_tables(config, source)


def test_optimizer_and_rates():
    config = toy_config(
        optim__name="adam",
        optim__betas=[0.8, 0.9],
        optim__dense_lr=0.4,
        optim__embedding_lr=0.2,
        optim__warmup_steps=4,
        optim__decay_start=10,
        optim__decay_steps=10,
    )
    assert build.optimizer_spec(config) == OptimizerSpec("adam", betas=(0.8, 0.9))
    rates = build.build_rates(config)
    assert rates(1) == pytest.approx((0.2, 0.1))
    assert rates(7) == pytest.approx((0.4, 0.2))
    assert rates(15) == pytest.approx((0.1, 0.05))


def test_ids_outside_a_table_are_named_or_hashed():
    config = toy_config(data__table_rows=[50, 20], data__samples=100)
    source = build.build_source(config)
    small = build.build_tables(toy_config(data__table_rows=[50, 3]), source)
    small[1] = type(small[1])("t_cat_1", 3, 4, ("cat_1",))
    schedule = make_schedule(source, 0, 3, None, 0)
    with pytest.raises(DataError, match=r"cat_1.*t_cat_1"):
        list(map(BatchCheck(small, source.features, "error"), schedule.batches(source, 0, 1)))
    hashed = BatchCheck(small, source.features, "hash")
    for batch in map(hashed, schedule.batches(source, 0, 1)):
        assert int(batch.ids.values[16:].max()) < 3
