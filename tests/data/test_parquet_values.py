"""Parquet as batches: values of columns, lists, strings, nulls, weights, ids that are too large."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pyarrow as pa
import pytest
import torch
from batch_checks import check_slices
from parquet_files import ROWS, columns, source, write

from distcache.data.parquet_files import ColumnRules
from distcache.errors import DataError

pytestmark = pytest.mark.usefixtures("one_thread")


def hash_of(text: str, rows: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % rows


def bags_of(batch, feature: int) -> list[list[int]]:
    b, offsets = batch.ids.batch_size, batch.ids.offsets.tolist()
    values = batch.ids.values.tolist()
    return [values[offsets[feature * b + i] : offsets[feature * b + i + 1]] for i in range(b)]


def test_values_of_columns(tmp_path):
    data = columns(20)
    stream = source(write(tmp_path / "a.parquet", data), batch=20, shuffle_rows=0, held_out=0)
    batch = stream.train_batch(0, 0, 1)
    assert batch.labels.tolist() == data["y"].tolist()
    assert torch.equal(batch.dense[:, 1], torch.from_numpy(data["z"]))
    assert bags_of(batch, 0) == [[a] for a in data["a"].tolist()]
    assert bags_of(batch, 1) == [[hash_of(str(w), ROWS[1]) for w in bag] for bag in data["b"]]
    assert bags_of(batch, 2) == [[c] for c in data["c"].tolist()]
    assert batch.ids.weights is None
    assert hash_of("w1", 1000) == 242  # the hash is stated, and stays


PAIRS = pa.array([[1, 2], [3, 4], [5, 6], [0, 0], [7, 8], [9, 9]])
LISTS = [PAIRS.cast(t) for t in (pa.list_(pa.int32()), pa.large_list(pa.uint64()))]
LISTS += [PAIRS.cast(pa.list_(pa.int8(), 2))]
LISTS += [pa.ListArray.from_arrays(PAIRS.offsets, PAIRS.values.dictionary_encode())]


@pytest.mark.parametrize("values", LISTS, ids=lambda values: str(values.type))
def test_kinds_of_lists(tmp_path, values):
    data = columns(6) | {"a": values}
    stream = source(write(tmp_path / "a.parquet", data, 4), 6, shuffle_rows=0, held_out=0)
    assert bags_of(stream.train_batch(0, 0, 1), 0) == data["a"].to_pylist()


@pytest.mark.parametrize("type_", [pa.string(), pa.large_string(), pa.binary(), None], ids=str)
@pytest.mark.parametrize("string_ids", ["hash", "hex"])
def test_strings_become_ids(tmp_path, type_, string_ids):
    words = ["ff", "", "0A", "1" * 20, "ff", "FFFFFFFFFFFFFFFFF"]
    data = columns(6)
    data["a"] = pa.array(words).cast(type_) if type_ else pa.array(words).dictionary_encode()
    rules = ColumnRules(string_ids=string_ids)
    stream = source(
        write(tmp_path / "a.parquet", data, 4),
        6,
        id_columns=("a",),
        table_rows=(10**6,),
        shuffle_rows=0,
        held_out=0,
        rules=rules,
    )
    convert = hash_of if string_ids == "hash" else lambda word, rows: int(word or "0", 16) % rows
    expected = [[convert(word, 10**6)] for word in words]
    assert bags_of(stream.train_batch(0, 0, 1), 0) == expected


def test_nulls(tmp_path):
    data = columns(4)
    data["x"] = pa.array([None, 1.5, math.nan, 2.0])
    data["a"] = pa.array([3, None, 4, None])
    data["b"] = pa.array([["w1", None], None, [], [None]])
    path = write(tmp_path / "a.parquet", data, 3)
    common = {"batch": 4, "shuffle_rows": 0, "held_out": 0}
    zero = source(path, **common, rules=ColumnRules(nulls="zero")).train_batch(0, 0, 1)
    assert zero.dense[:, 0].tolist() == [0, 1.5, 0, 2]
    assert bags_of(zero, 0) == [[3], [0], [4], [0]]
    assert bags_of(zero, 1) == [[hash_of("w1", 1000), 0], [], [], [0]]
    empty = source(path, **common, rules=ColumnRules(nulls="empty")).train_batch(0, 0, 1)
    assert bags_of(empty, 0) == [[3], [], [4], []]
    assert bags_of(empty, 1) == [[hash_of("w1", 1000)], [], [], []]
    with pytest.raises(DataError, match=r"a\.parquet, row 1, column 'x'.*data\.nulls=zero"):
        source(path, **common, id_columns=("c",), table_rows=(7,)).train_batch(0, 0, 1)
    for column, row in (("a", 2), ("b", 2)):
        stream = source(path, **common, dense_columns=("z",), id_columns=(column,), table_rows=(9,))
        with pytest.raises(DataError, match=rf"row {row}, column '{column}'.*null"):
            stream.train_batch(0, 0, 1)


def test_weights(tmp_path):
    data = columns(5)
    data["a"] = pa.array([[1, 2], [], [3], None, [4, None]])
    data["w"] = pa.array([[0.5, 2.0], [], [1.0], None, [4.0, 8.0]])
    data["v"] = pa.array([1, 2, 3, 4, None])
    path = write(tmp_path / "a.parquet", data, 3)
    stream = source(
        path,
        5,
        weight_columns={"a": "w", "c": "v"},
        shuffle_rows=0,
        held_out=0,
        rules=ColumnRules(nulls="empty"),
        dtype=torch.float64,
    )
    batch = stream.train_batch(0, 0, 1)
    lengths = batch.ids.offsets.diff().reshape(3, 5).sum(1).tolist()
    a, b, c = batch.ids.weights.split(lengths)
    assert a.tolist() == [0.5, 2.0, 1.0, 4.0] and c.tolist() == [1, 2, 3, 4, 0]
    assert b.tolist() == [1.0] * lengths[1] and batch.ids.weights.dtype == torch.float64
    check_slices(stream, 0, "train")
    nobody = stream.train_batch(0, 0, 9)
    assert nobody.ids.batch_size == 0 and len(nobody.ids.weights) == 0


def test_log_of_dense_and_no_dense(tmp_path):
    data = columns(7)
    data["x"] = pa.array([-3, None, 0, 7, 10**18, 1, 2])
    path = write(tmp_path / "a.parquet", data)
    rules = ColumnRules(nulls="zero", log1p=True)
    common = {"batch": 7, "shuffle_rows": 0, "held_out": 0, "dtype": torch.float64}
    batch = source(path, **common, dense_columns=("x",), rules=rules).train_batch(0, 0, 1)
    expected = np.float32([0, 0, 0, math.log(8), math.log1p(10**18)]).tolist()
    assert batch.dense[:5, 0].tolist() == expected and batch.dense.dtype == torch.float64
    none = source(path, **common, dense_columns=())
    assert none.dense_features == 1 and none.train_batch(0, 0, 1).dense.tolist() == [[1.0]] * 7


def test_ids_outside_their_table_are_taken_modulo_if_asked(tmp_path):
    data = columns(4)
    data["a"] = pa.array([-1, 50, 2**62, 3])
    data["c"] = pa.array([2**64 - 1, 0, 7, 1], type=pa.uint64())
    stream = source(
        write(tmp_path / "a.parquet", data),
        4,
        shuffle_rows=0,
        held_out=0,
        rules=ColumnRules(on_bad_id="hash"),
    )
    batch = stream.train_batch(0, 0, 1)
    assert bags_of(batch, 0) == [[49], [0], [2**62 % 50], [3]]
    assert bags_of(batch, 2) == [[(2**64 - 1) % 7], [0], [0], [1]]
