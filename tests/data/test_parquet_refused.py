"""Parquet as batches: every value, column, file and setting that is refused."""

from __future__ import annotations

import math
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from parquet_files import columns, seen, source, write

from distcache.data.parquet_files import ColumnRules
from distcache.errors import ConfigError, DataError

pytestmark = pytest.mark.usefixtures("one_thread")


def with_column(name, values):
    return lambda data: data | {name: values}


BAD_VALUES = {
    "label 2": (with_column("y", [0, 1, 2, 0]), r"row 3, column 'y': the label is 2, not 0 or 1"),
    "label null": (with_column("y", [0, None, 1, 0]), r"row 2, column 'y': the label is null"),
    "label half": (with_column("y", [0.5, 1, 1, 0]), r"row 1, column 'y': the label is 0\.5"),
    "negative id": (with_column("a", [1, 2, 3, -4]), r"row 4, column 'a': id -4 is not in its t"),
    "large id": (with_column("a", [1, 2, 50, 4]), r"row 3, column 'a': id 50 .* 50 rows .*hash"),
    "id in a list": (with_column("a", [[1], [], [2, 99], []]), r"row 3, column 'a': id 99"),
    "infinite": (with_column("x", [1, 2, math.inf, 4.0]), r"row 3, column 'x': inf"),
}


@pytest.mark.parametrize(("change", "message"), BAD_VALUES.values(), ids=BAD_VALUES)
def test_bad_values_are_named_with_file_row_and_column(tmp_path, change, message):
    path = write(tmp_path / "a.parquet", change(columns(4)), group=2)
    stream = source(path, 4, held_out=0)
    with pytest.raises(DataError, match=message) as error:
        stream.train_batch(0, 0, 1)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("value", [1e300, -4e38, float("inf"), float("-inf")])
def test_what_float32_cannot_hold_is_an_error(tmp_path, value):
    data = columns(12)
    data["x"][5] = value
    path = write(tmp_path / "a.parquet", data)
    with pytest.raises(DataError, match=r"row 6, column 'x': .* is not a finite number of float32"):
        source(path, 12, held_out=0).train_batch(0, 0, 1)
    rules = ColumnRules(log1p=True)  # what float32 does not hold, its logarithm may
    if value == 1e300:
        dense = source(path, 12, held_out=0, shuffle_rows=0, rules=rules).train_batch(0, 0, 1).dense
        assert dense[5, 0].item() == pytest.approx(300 * np.log(10))


def test_a_file_that_is_rewritten_while_it_is_open_is_an_error(tmp_path):
    path = write(tmp_path / "a.parquet", columns(60))
    stream = source(path, 10, held_out=0, shuffle_rows=0)
    stream.train_batch(0, 0, 1)
    os.utime(path, ns=(1, 1))
    with pytest.raises(DataError, match=r"a\.parquet changed while it was read"):
        stream.train_batch(3, 0, 1)


def test_not_hexadecimal(tmp_path):
    data = columns(4) | {"a": ["0", "a", "0x1", "b"]}
    rules = ColumnRules(string_ids="hex")
    stream = source(write(tmp_path / "a.parquet", data), 4, held_out=0, rules=rules)
    with pytest.raises(DataError, match=r"row 3, column 'a': '0x1' is not hexadecimal"):
        stream.train_batch(0, 0, 1)


BAD_WEIGHTS = {
    "too few": ([[1.0], [1.0, 2.0], [1.0]], r"row 3, column 'w': 1 weights for 2 ids"),
    "scalar": ([1.0, 1.0, 1.0], "the weights are one number per sample, the ids are a list"),
    "null": ([[1.0], [1.0, 2.0], [1.0, None]], r"row 3, column 'w': there is no value"),
    "infinite": ([[1.0], [1.0, 2.0], [1.0, math.inf]], r"row 3, column 'w': the weight inf"),
}


@pytest.mark.parametrize(("weights", "message"), BAD_WEIGHTS.values(), ids=BAD_WEIGHTS)
def test_bad_weights(tmp_path, weights, message):
    data = columns(3) | {"a": [[1], [1, 2], [3, 4]], "w": weights}
    stream = source(write(tmp_path / "a.parquet", data), 3, held_out=0, weight_columns={"a": "w"})
    with pytest.raises(DataError, match=message):
        stream.train_batch(0, 0, 1)


BAD_SCHEMAS = {
    "missing": ("a", None, r"no column 'a', which data\.id_columns names; it has: y, x, z, b, c"),
    "float id": ("a", [1.0] * 4, r"column 'a' \(data\.id_columns\) is double; it must be integer"),
    "list label": ("y", [[1]] * 4, r"column 'y' \(data\.label_column\) holds lists"),
    "list dense": ("x", [[1.0]] * 4, r"column 'x' \(data\.dense_columns\) holds lists"),
    "string dense": ("x", ["1"] * 4, r"column 'x' \(data\.dense_columns\) is string"),
    "date label": ("y", pa.array([0] * 4, pa.date32()), r"is date32\[day\]; it must be integer"),
}


@pytest.mark.parametrize(("name", "values", "message"), BAD_SCHEMAS.values(), ids=BAD_SCHEMAS)
def test_a_column_that_is_missing_or_of_another_type(tmp_path, name, values, message):
    good = write(tmp_path / "a.parquet", columns(4))
    data = columns(4) | {name: values}
    bad = write(tmp_path / "b.parquet", {k: v for k, v in data.items() if v is not None})
    with pytest.raises(DataError, match=message) as error:
        source([good, bad])
    assert str(bad) in str(error.value)


def test_files_of_two_schemas_and_a_column_twice(tmp_path):
    first = write(tmp_path / "a.parquet", columns(4))
    second = write(tmp_path / "b.parquet", columns(4) | {"a": [[1]] * 4})
    with pytest.raises(DataError, match=rf"{second}: column 'a'.* but int64 in {first}"):
        source([first, second])
    table = pa.table(columns(4))
    twice = table.append_column("a", table.column("a"))
    with pytest.raises(DataError, match="2 columns 'a'"):
        source(write(tmp_path / "c.parquet", twice))


def test_files_that_are_not_there_or_no_parquet(tmp_path):
    with pytest.raises(DataError, match=r"data\.path=.*none\*: there is no such file and nothing"):
        source(str(tmp_path / "none*"))
    with pytest.raises(DataError, match=r"is a folder, not a file; .*glob such as"):
        source(tmp_path)
    good = write(tmp_path / "a.parquet", columns(60))
    for name, content in (("empty", b""), ("text", b"a,b\n1,2\n"), ("cut", good.read_bytes()[:-9])):
        bad = tmp_path / f"{name}.parquet"
        bad.write_bytes(content)
        what = "is no Parquet file that can be read" if content else "is empty"
        with pytest.raises(DataError, match=f"{bad} {what}"):
            source([good, bad])


def test_damaged_pages_vanished_and_changed_files(tmp_path):
    path = write(tmp_path / "a.parquet", columns(60))
    content = bytearray(path.read_bytes())
    whole = bytes(content)
    content[4:400] = b"\xff" * 396
    path.write_bytes(content)
    stream = source(path, 60, held_out=0)
    with pytest.raises(DataError, match=rf"{path} is no Parquet file that can be read"):
        stream.train_batch(0, 0, 1)
    path.write_bytes(whole)
    stream = source(path, 60, held_out=0)
    stream.files._open.clear()  # as if other files had been read in between
    path.unlink()
    with pytest.raises(DataError, match=rf"{path} cannot be read any more"):
        stream.train_batch(0, 0, 1)
    path.write_bytes(whole)
    stream = source(path, 60, held_out=0)
    stream.files._open.clear()
    path.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=r"shrank while it was read"):
        stream.train_batch(0, 0, 1)


def test_files_and_row_groups_without_rows(tmp_path):
    empty = pa.table(columns(3)).slice(0, 0)
    nothing = write(tmp_path / "a.parquet", empty)
    with pytest.raises(DataError, match="no rows in any row group"):
        source(nothing)
    mixed = tmp_path / "b.parquet"
    some = pa.table(columns(3))
    with pq.ParquetWriter(mixed, some.schema) as writer:
        for table in (some, some.slice(0, 0), some):
            writer.write_table(table)
    stream = source([nothing, mixed], 6, held_out=0, shuffle_rows=0)
    assert seen(stream, [0]) == [0, 1, 2, 0, 1, 2]
    assert stream.files.row_groups[-1].first_row == 3
    with pytest.raises(DataError, match="leaves nothing to train on"):
        source(write(tmp_path / "c.parquet", columns(1)), held_out=0.5)


def test_settings_that_contradict(tmp_path):
    path = write(tmp_path / "a.parquet", columns(4))
    for changes, message in (
        ({"table_rows": (1, 2)}, "data.id_columns has 3 columns, data.table_rows 2"),
        ({"id_columns": ("a", "a", "c")}, "names 'a' twice"),
        ({"weight_columns": {"q": "w"}}, "gives weights to 'q'"),
        ({"held_out": 1.0}, "data.held_out=1.0"),
        ({"rules": ColumnRules(nulls="skip")}, "data.nulls='skip'"),
        ({"rules": ColumnRules(string_ids="md5")}, "data.string_ids='md5'"),
    ):
        with pytest.raises(ConfigError, match=message):
            source(path, **changes)
