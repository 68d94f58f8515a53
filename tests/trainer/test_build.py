"""From the config to parts: sources, tables, model, rates, threads, the schedule."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from toy_parallel import ToySource, toy_config

from distcache.data.batch import BatchCheck
from distcache.errors import ConfigError, DataError
from distcache.parallel.base import OptimizerSpec
from distcache.trainer import build
from distcache.trainer.schedule import Schedule, make_schedule


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


def names(schedule: Schedule) -> str:
    """`t3` for training step 3, `e0` for evaluation batch 0."""
    return " ".join(f"{kind[0]}{index}" for kind, index in schedule.order())


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule(0, 3, None, 0), "t0 t1 t2"),
        (Schedule(0, 3, None, 2), "t0 t1 t2 e0 e1"),
        (Schedule(0, 5, 2, 1), "t0 t1 e0 t2 t3 e0 t4 e0"),
        (Schedule(0, 4, 2, 1), "t0 t1 e0 t2 t3 e0"),
        (Schedule(3, 5, 2, 1), "t3 e0 t4 e0"),
        (Schedule(5, 5, 2, 1), "e0"),
        (Schedule(7, 5, None, 0), ""),
        (Schedule(0, 0, None, 1), "e0"),
        (Schedule(0, 4, 2, 0), "t0 t1 t2 t3"),
    ],
)
def test_order(schedule, expected):
    assert names(schedule) == expected


def test_steps_null_is_one_epoch_and_more_repeats_it_with_ragged_batches():
    source = ToySource()
    assert make_schedule(source, 0, None, None, 0).steps == 6
    batches = list(make_schedule(source, 0, 13, None, 0).batches(source, 0, 1))
    assert [batch.epoch for batch in batches] == [0] * 6 + [1] * 6 + [2]
    assert [batch.global_size for batch in batches] == ([16] * 5 + [10]) * 2 + [16]


def test_held_out_batches_bound_an_evaluation():
    assert make_schedule(ToySource(), 0, 1, None, 9).eval_batches == 5
    assert make_schedule(ToySource(), 0, 1, None, 3).eval_batches == 3


def test_unlimited_data_wants_steps():
    source = ToySource()
    source.steps_per_epoch = source.eval_batches = None
    assert make_schedule(source, 0, 100, None, 8).eval_batches == 8
    with pytest.raises(ConfigError, match=r"trainer\.steps"):
        make_schedule(source, 0, None, None, 0)


def test_batches_are_drawn_when_asked_for():
    source = ToySource()
    stream = make_schedule(source, 0, 4, 1, 1).batches(source, 0, 1)
    assert source.drawn == []
    next(stream), next(stream)
    assert source.drawn == [("train", 0), ("eval", 0)]


@pytest.mark.parametrize(
    ("given", "outside", "local_size", "expected"),
    [
        ("auto", None, 1, 8),
        ("auto", None, 2, 4),
        ("auto", None, 16, 1),
        ("auto", "1", 2, 4),  # torchrun's own
        ("auto", "1", 1, 1),  # somebody's
        ("auto", "3", 2, 3),
        ("auto", "3,1", 1, 3),
        ("auto", "many", 4, 2),
        (5, "3", 2, 5),
        (1, None, 1, 1),
    ],
)
def test_threads(monkeypatch, given, outside, local_size, expected) -> None:
    monkeypatch.setattr(build.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if outside is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", outside)
    config = toy_config(trainer__threads=given)
    assert build.compute_threads(config, SimpleNamespace(local_size=local_size)) == expected


def test_more_threads_than_cores_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(build.os, "sched_getaffinity", lambda _: set(range(8)))
    with pytest.raises(ConfigError, match=r"trainer\.threads=9 .* 8 core\(s\)"):
        build.compute_threads(toy_config(trainer__threads=9), SimpleNamespace(local_size=1))
