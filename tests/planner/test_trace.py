"""Traces: what batch sources ask of every home, and what is no trace."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from plan_streams import make_layout
from simulator import record_ids

from distcache.data.batch import JaggedIds
from distcache.data.synthetic import SyntheticSource, SyntheticSpec
from distcache.errors import ConfigError, DataError
from distcache.layout import TableSpec
from distcache.trace import Recorder, record_source

SPEC = SyntheticSpec([300, 40, 7], bag_size=[2, 1.5, 1], samples=50, global_batch_size=16)


def tables_of(source: SyntheticSource, dims: tuple[int, ...]) -> list[TableSpec]:
    parts = zip(source.features, source.table_rows, dims, strict=True)
    return [TableSpec(name, rows, dim, (name,)) for name, rows, dim in parts]


def test_counts_are_of_training_steps() -> None:
    source = SyntheticSource(SPEC)
    tables = tables_of(source, (4, 4, 4))
    order = [("train", 0), ("eval", 3), ("train", 1)]
    (trace,) = record_source(source, tables, (2, 1), order)
    layout = make_layout(347, 1)
    offsets = np.array([0, 300, 340])
    rows = []
    for step in (0, 1):
        ids = source.train_batch(step, 0, 1).ids
        per_feature = np.diff(ids.offsets.numpy()[:: ids.batch_size])
        rows.append(ids.values.numpy() + np.repeat(offsets, per_feature))
    expected = np.bincount(np.concatenate(rows), minlength=layout.rows)
    found, counts = trace.row_counts()
    assert trace.training.tolist() == [True, False, True]
    assert trace.ids == expected.sum() == counts.sum()
    assert (np.diff(found) > 0).all() and (expected[found] == counts).all()


def test_a_source_that_cannot_be_recorded() -> None:
    unlimited = SyntheticSource(SyntheticSpec([9], global_batch_size=4))
    tables = tables_of(unlimited, (4,))
    with pytest.raises(ConfigError, match="unlimited: say how many steps"):
        record_source(unlimited, tables)
    with pytest.raises(ConfigError, match=r"no table reads the features \['cat_0'\]"):
        record_source(unlimited, [TableSpec("t", 9, 4, ("other",))], order=[("train", 0)])

    class Wrong:
        features, steps_per_epoch = ("cat_0",), 1

        def train_batch(self, step: int, rank: int, world: int) -> object:
            batch = unlimited.train_batch(step, rank, world)
            ids = JaggedIds(("cat_0",), torch.tensor([9]), torch.tensor([0, 1]))
            return type(batch)(**{**vars(batch), "ids": ids})

    with pytest.raises(DataError, match="id 9 is not in table 'cat_0', which has 9 rows"):
        record_source(Wrong(), tables)


def test_memory_is_bounded_and_the_cut_is_told(caplog: pytest.LogCaptureFixture) -> None:
    steps = [np.arange(step, step + 10) for step in range(100)]
    with caplog.at_level(logging.WARNING):
        trace = record_ids(steps, 109, most_bytes=1000)
    # A step has 10 distinct rows, of 12 bytes while they are recorded.
    assert trace.steps == 9
    assert "ends after 9 steps" in caplog.text and "1000 bytes" in caplog.text
    assert sum(array.nbytes for array in vars(trace.homes[1][0]).values()) < 1200
    assert record_ids(steps, 109, most_bytes=10**6).steps == len(steps)


def test_what_cannot_be_recorded() -> None:
    for steps in ([[]], []):
        with pytest.raises(DataError, match="nothing to replay"):
            record_ids([np.array(step, np.int64) for step in steps], 9)
    with pytest.raises(ConfigError, match=r"world sizes \[\]"):
        Recorder(np.array([0, 9]), [])
    with pytest.raises(ConfigError, match="3000000000 rows"):
        Recorder(np.array([0, 3 * 10**9]))
