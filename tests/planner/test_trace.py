"""Traces: what batch sources and files of ids ask of every home, and what is no trace."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from plan_streams import make_layout

from distcache.data.batch import JaggedIds
from distcache.data.synthetic import SyntheticSource, SyntheticSpec
from distcache.errors import ConfigError, DataError
from distcache.layout import TableSpec
from distcache.trace import Recorder, read_steps, record_ids, record_source

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
        trace = record_ids(steps, most_bytes=1000)
    # A step has 10 distinct rows, of 12 bytes while they are recorded.
    assert trace.steps == 9
    assert "ends after 9 steps" in caplog.text and "1000 bytes" in caplog.text
    assert sum(array.nbytes for array in vars(trace.homes[1][0]).values()) < 1200
    assert record_ids(steps, most_bytes=10**6).steps == len(steps)


def test_ids_of_unknown_tables_are_recorded_and_bounded() -> None:
    steps = [np.array([5, 2**31 - 2, 5]), np.array([70_000, 5])]
    trace = record_ids(steps, worlds=(2,))
    assert trace.rows == 2**31 - 1
    assert sorted(np.concatenate([h.names for h in trace.homes[2]])) == [5, 70_000, 2**31 - 2]
    for ids, rows, problem in (
        ([[2**31 - 1]], None, "id 2147483647: a trace takes ids up to 2147483646"),
        ([[5], [5, -3]], None, "step 1 of the trace has the id -3: ids are not negative"),
        ([[9]], 9, "step 0 of the trace has the id 9: the table has 9 rows"),
        ([[]], None, "nothing to replay"),
    ):
        with pytest.raises(DataError, match=problem):
            record_ids([np.array(step, np.int64) for step in ids], rows)
    with pytest.raises(ConfigError, match=r"world sizes \[\]"):
        Recorder(9, [])
    with pytest.raises(ConfigError, match="3000000000 rows"):
        Recorder(3 * 10**9)


@pytest.mark.parametrize(
    ("held", "per_step", "steps"),
    [
        ("1 2\t3\n\n4\n5 6 7 8\n", None, [[1, 2, 3], [], [4], [5, 6, 7, 8]]),
        ("1 2\t3\n\n4\n5 6 7 8\n", 3, [[1, 2, 3], [4, 5, 6], [7, 8]]),
        ("1 2\t3\n\n4\n5 6 7 8\n", 8, [[1, 2, 3, 4, 5, 6, 7, 8]]),
        ("1 2\t3\n\n4\n5 6 7 8\n", 9, [[1, 2, 3, 4, 5, 6, 7, 8]]),
        (np.arange(6, dtype=np.int32).reshape(2, 3), None, [[0, 1, 2], [3, 4, 5]]),
        (np.arange(6, dtype=np.uint64).reshape(2, 3), 4, [[0, 1, 2, 3], [4, 5]]),
        (np.arange(5), 2, [[0, 1], [2, 3], [4]]),
    ],
)
def test_a_file_is_a_step_to_a_line_or_row_or_so_many_ids(
    tmp_path: Path, held: object, per_step: int | None, steps: list
) -> None:
    found = list(read_steps(*[written(tmp_path, held), *([per_step] if per_step else [])]))
    assert [step.tolist() for step in found] == steps
    assert all(step.dtype == np.int64 for step in found)


def written(folder: Path, held: object) -> Path:
    """A file of ids that holds this; None: no file."""
    file = folder / ("ids.txt" if held is None or isinstance(held, str) else "ids.npy")
    if isinstance(held, np.ndarray):
        np.save(file, held)
    elif held is not None:
        file.write_bytes(held.encode() if isinstance(held, str) else held)
    return file


@pytest.mark.parametrize(
    ("held", "problem"),
    [
        ("1 2\n3 -4\n", r"line 2: '-4' is not an id"),
        ("1.5\n", r"line 1: '1.5' is not an id"),
        ("1\n\nx7\n", r"line 3: 'x7' is not an id"),
        ("99999999999999999999\n", "line 1: '99999999999999999999' is not an id"),
        ("", "has no ids"),
        ("\n \n", "has no ids"),
        (None, "there is no such file of ids"),
        (b"1 2 3", "is not an array of ids"),
        (np.array([[1.5, 2]]), r"holds float64, its first value is 1.5: ids are integers"),
        (np.array([True]), "holds bool"),
        (np.array([[1, 2], [3, -4]]), "id 3 is -4: ids are not negative"),
        (np.array([1, 2]), r"has shape \[2\]: give \[steps, ids\], or \[ids\] and how many"),
        (np.zeros((2, 2, 2), int), r"has shape \[2, 2, 2\]"),
        (np.array([[2**63]], np.uint64), "holds 9223372036854775808: ids are int64"),
        (np.zeros((0, 3), int), "has no ids"),
    ],
)
def test_files_that_hold_no_ids(tmp_path: Path, held: object, problem: str) -> None:
    file = written(tmp_path, held)
    with pytest.raises(DataError, match=problem):
        list(read_steps(file))
    with pytest.raises(ConfigError, match="0 ids per step"):
        list(read_steps(file, 0))
