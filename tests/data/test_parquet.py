"""Parquet as batches: what columns mean, what is read when, and everything that is refused."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from batch_sources import PARQUET_ROWS as ROWS
from batch_sources import columns, samples_of, seen, write
from batch_sources import parquet_source as source
from criteo_lines import damage

from distcache.data.parquet import ParquetSource
from distcache.errors import ConfigError, DataError

WHOLE = {"shuffle_rows": 0, "held_out": 0}


def held(stream):
    """Samples of the row groups whose ids are decoded."""
    return int(stream._ids._rows[list(stream._ids._held)].sum())


def hash_of(text: str, rows: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % rows


def bags_of(batch, feature: int) -> list[list[int]]:
    b, offsets = batch.ids.batch_size, batch.ids.offsets.tolist()
    values = batch.ids.values.tolist()
    return [values[offsets[feature * b + i] : offsets[feature * b + i + 1]] for i in range(b)]


def test_values_of_columns(tmp_path):
    data = columns(20)
    stream = source(write(tmp_path / "a.parquet", data), batch=20, **WHOLE)
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
    stream = source(write(tmp_path / "a.parquet", data, 4), 6, **WHOLE)
    assert bags_of(stream.train_batch(0, 0, 1), 0) == data["a"].to_pylist()


FLOATS = [pa.float64(), pa.float32(), pa.float16(), pa.dictionary(pa.int8(), pa.float64())]


@pytest.mark.parametrize("type_", FLOATS, ids=str)
def test_whole_floats_are_ids_and_missing_ones_follow_the_rule(tmp_path, type_):
    inner = type_.value_type if pa.types.is_dictionary(type_) else type_
    numbers = pa.array(np.float16([3, math.nan, 7, 0, 49, 0]), from_pandas=False).cast(inner)
    numbers = pa.array([*numbers.to_pylist()[:3], None, *numbers.to_pylist()[4:]], inner)
    numbers = numbers.dictionary_encode() if inner is not type_ else numbers
    good = write(tmp_path / "a.parquet", columns(4))  # whose ids are integers
    path = write(tmp_path / "b.parquet", columns(6) | {"a": numbers}, 4)
    expected = {"zero": [[3], [0], [7], [0], [49], [0]], "empty": [[3], [], [7], [], [49], [0]]}
    for nulls, bags in expected.items():
        batch = source([good, path], 10, nulls=nulls, **WHOLE).train_batch(0, 0, 1)
        assert bags_of(batch, 0)[4:] == bags


@pytest.mark.parametrize("type_", [pa.string(), pa.large_string(), pa.binary(), None], ids=str)
def test_strings_become_ids(tmp_path, type_):
    words = ["ff", "", "0A", "1" * 20, "ff", "FFFFFFFFFFFFFFFFF"]
    strings = pa.array(words).cast(type_) if type_ else pa.array(words).dictionary_encode()
    path = write(tmp_path / "a.parquet", columns(6) | {"a": strings}, 4)
    for string_ids, convert in (
        ("hash", hash_of),
        ("hex", lambda word, n: int(word or "0", 16) % n),
    ):
        how = {"id_columns": ("a",), "table_rows": (10**6,), "string_ids": string_ids}
        batch = source(path, 6, **how, **WHOLE).train_batch(0, 0, 1)
        assert bags_of(batch, 0) == [[convert(word, 10**6)] for word in words]


def test_nulls(tmp_path):
    data = columns(4)
    data["x"] = pa.array([None, 1.5, math.nan, 2.0])
    data["a"] = pa.array([3, None, 4, None])
    data["b"] = pa.array([["w1", None], None, [], [None]])
    path = write(tmp_path / "a.parquet", data, 3)
    common = {"batch": 4, **WHOLE}
    zero = source(path, **common, nulls="zero").train_batch(0, 0, 1)
    assert zero.dense[:, 0].tolist() == [0, 1.5, 0, 2]
    assert bags_of(zero, 0) == [[3], [0], [4], [0]]
    assert bags_of(zero, 1) == [[hash_of("w1", 1000), 0], [], [], [0]]
    empty = source(path, **common, nulls="empty").train_batch(0, 0, 1)
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
        **WHOLE,
        nulls="empty",
        dtype=torch.float64,
    )
    batch = stream.train_batch(0, 0, 1)
    lengths = batch.ids.offsets.diff().reshape(3, 5).sum(1).tolist()
    a, b, c = batch.ids.weights.split(lengths)
    assert a.tolist() == [0.5, 2.0, 1.0, 4.0] and c.tolist() == [1, 2, 3, 4, 0]
    assert b.tolist() == [1.0] * lengths[1] and batch.ids.weights.dtype == torch.float64
    nobody = stream.train_batch(0, 0, 9)
    assert nobody.ids.batch_size == 0 and len(nobody.ids.weights) == 0


def test_log_of_dense_and_no_dense(tmp_path):
    data = columns(7)
    data["x"] = pa.array([-3, None, 0, 7, 1e300, 1, 2])
    path = write(tmp_path / "a.parquet", data)
    rules = {"nulls": "zero", "dense_transform": "log1p"}
    common = {"batch": 7, **WHOLE, "dtype": torch.float64}
    batch = source(path, **common, dense_columns=("x",), **rules).train_batch(0, 0, 1)
    expected = np.float32([0, 0, 0, math.log(8), math.log1p(1e300)]).tolist()
    assert batch.dense[:5, 0].tolist() == expected and batch.dense.dtype == torch.float64
    none = source(path, **common, dense_columns=())
    assert none.dense_features == 1 and none.train_batch(0, 0, 1).dense.tolist() == [[1.0]] * 7


def test_ids_outside_their_table_are_taken_modulo_if_asked(tmp_path):
    data = columns(4)
    data["a"] = pa.array([-1, 50, 2**62, 3])
    data["c"] = pa.array([2**64 - 1, 0, 7, 1], type=pa.uint64())
    path = write(tmp_path / "a.parquet", data)
    stream = source(path, 4, **WHOLE, on_bad_id="hash")
    batch = stream.train_batch(0, 0, 1)
    assert bags_of(batch, 0) == [[49], [0], [2**62 % 50], [3]]
    assert bags_of(batch, 2) == [[(2**64 - 1) % 7], [0], [0], [1]]


def test_what_is_held_out(tmp_path):
    for part in range(3):
        data = columns(41, seed=part)
        data["x"] = data["x"] + 41 * part
        write(tmp_path / f"part-{part * 5}.parquet", data)  # 0, 5, 10: numbers by value
    write(tmp_path / "test.parquet", columns(12, seed=1))

    def numbers(path, **how) -> tuple[list[int], list[int]]:
        stream = source(path, 60, shuffle_rows=20, **how)
        evals = [stream.eval_batch(at, 0, 1) for at in range(stream.eval_batches)]
        held_out = [int(x) for batch in evals for x in batch.dense[:, 0].tolist()]
        return sorted(seen(stream, range(stream.steps_per_epoch))), held_out

    train, first = 123 - math.ceil(123 / 7), tmp_path / "part-0.parquet"
    every = numbers(str(tmp_path / "part-*.parquet"))
    assert every == (list(range(train)), list(range(train, 123)))
    given = numbers(first, held_out_paths=str(tmp_path / "te*.parquet"))
    assert given == (list(range(41)), list(range(12)))
    assert numbers(first, held_out=0) == (list(range(41)), [])


def test_a_rank_reads_the_row_groups_of_its_slices(tmp_path):
    write(tmp_path / "a.parquet", columns(400), group=10)
    how = {"batch": 40, "shuffle_rows": 80, "held_out": 0}
    alone = source(tmp_path / "a.parquet", make=ParquetSource, **how)
    decoded = []
    for rank in (0, 1):
        stream = source(tmp_path / "a.parquet", **how)
        for step in range(10):
            stream.train_batch(step, rank, 2)
        decoded.append(stream._ids.decoded)
        assert stream._rest.decoded == stream._ids.decoded
        assert held(stream) <= 100  # of a window of at most 90 samples, and one
    for step in range(10):
        alone.train_batch(step, 0, 1)
    assert alone._ids.decoded == 40  # each row group once
    assert not alone._rest.decoded  # dense features are read when a batch is loaded
    assert max(decoded) < 30


def test_row_groups_of_uneven_sizes_are_decoded_once_within_the_samples_of_a_window(tmp_path):
    for at in range(3):
        write(tmp_path / f"{at}.parquet", columns(400, seed=at), group=400)
        write(tmp_path / f"{at}-small.parquet", columns(80, seed=9 + at), group=4)
    stream = source(tmp_path / "*.parquet", make=ParquetSource, batch=40, shuffle_rows=80)
    most = []
    for step in range(stream.steps_per_epoch):
        stream.train_batch(step, 0, 1)
        most.append(held(stream))
    assert max(most) <= 80 + 400 + 400  # of three that have 400
    assert stream._ids.decoded <= 3 + 3 * 20


NOT_FLOAT32 = r"row 3, column 'x': .* is not a finite number of float32"
BAGS, WEIGHTED = {"a": [[1], [1, 2], [3, 4], []]}, {"weight_columns": {"a": "w"}}
HEX = {"string_ids": "hex", "id_columns": ("a",), "table_rows": (50,)}


def weights(third) -> dict:
    return BAGS | {"w": [[1.0], [1.0, 2.0], third, []]}


HASH = {"on_bad_id": "hash"}
BAD_VALUES = {
    "label 2": ({"y": [0, 1, 2, 0]}, {}, r"row 3, column 'y': the label is 2, not 0 or 1"),
    "label null": ({"y": [0, None, 1, 0]}, {}, r"row 2, column 'y': the label is null"),
    "label half": ({"y": [0.5, 1, 1, 0]}, {}, r"row 1, column 'y': the label is 0\.5"),
    "negative id": ({"a": [1, 2, 3, -4]}, {}, r"row 4, column 'a': id -4 is not in its table"),
    "large id": ({"a": [1, 2, 50, 4]}, {}, r"row 3, column 'a': id 50 .* 50 rows .*hash"),
    "id in a list": ({"a": [[1], [], [2, 99], []]}, {}, r"row 3, column 'a': id 99"),
    "NaN": ({"x": [1, math.nan, 3.0, 4.0]}, {}, r"row 2, column 'x': the value is NaN"),
    "null": ({"x": [1, None, 3.0, 4.0]}, {}, r"row 2, column 'x': there is no value \(null\)"),
    "infinite": ({"x": [1, 2, math.inf, 4.0]}, {}, NOT_FLOAT32),
    "large": ({"x": [1, 2, 1e300, 4.0]}, {}, NOT_FLOAT32),
    "negative": ({"x": [1, 2, -4e38, 4.0]}, {}, NOT_FLOAT32),
    "fraction": ({"a": [1.0, 2.5, 3.0, None]}, {}, r"row 2, column 'a': id 2\.5 is not a whole"),
    "infinite id": ({"a": [1.0, 2.0, -math.inf, 3.0]}, HASH, r"row 3, column 'a': id -inf is not"),
    "float beyond 2^53": (
        {"a": [1.0, 2.0**53, 3.0, 4.0]},
        HASH,
        r"row 2, .* whole number below 2\^53",
    ),
    "float32 beyond 2^24": (
        {"a": np.float32([1, 2, 3, 2**24])},
        HASH,
        r"row 4, .* whole number below 2\^24",
    ),
    "float beyond the table": (
        {"a": [1.0, 2.0, 50.0, 4.0]},
        {},
        r"row 3, column 'a': id 50 is not in",
    ),
    "missing float id": ({"a": [1.0, None, 3.0, 4.0]}, {}, r"row 2, column 'a': there is no value"),
    "NaN as id": ({"a": [1.0, 2.0, math.nan, 4.0]}, {}, r"row 3, column 'a': there is no value"),
    "fraction in a list": ({"a": [[1.0], [2.0, 0.5], [], []]}, {}, r"row 2, column 'a': id 0\.5"),
    "no hex": ({"a": ["0", "a", "0x1", "b"]}, HEX, r"row 3, column 'a': '0x1' is not hexadecimal"),
    "too few weights": (weights([1.0]), WEIGHTED, r"row 3, column 'w': 1 weights for 2 ids"),
    "scalar weights": (
        BAGS | {"w": [1.0] * 4},
        WEIGHTED,
        r"row 2, column 'w': 1 weights for 2 ids",
    ),
    "null weight": (weights([1.0, None]), WEIGHTED, r"row 3, column 'w': there is no value"),
    "infinite weight": (
        weights([1.0, math.inf]),
        WEIGHTED,
        r"row 3, column 'w': inf is not a finite",
    ),
}


@pytest.mark.parametrize(("data", "settings", "message"), BAD_VALUES.values(), ids=BAD_VALUES)
def test_bad_values_are_named_with_file_row_and_column(tmp_path, data, settings, message):
    path = write(tmp_path / "a.parquet", columns(4) | data, group=2)
    with pytest.raises(DataError, match=message) as error:
        source(path, 4, held_out=0, **settings).train_batch(0, 0, 1)
    assert str(path) in str(error.value)


BAD_SCHEMAS = {
    "missing": ("a", None, r"no column 'a', which data\.id_columns names; it has: y, x, z, b, c"),
    "date id": ("a", pa.array([0] * 4, pa.date32()), r"'a' \(data\.id_columns\) is date32"),
    "list label": ("y", [[1]] * 4, r"column 'y' \(data\.label_column\) holds lists"),
    "list dense": ("x", [[1.0]] * 4, r"column 'x' \(data\.dense_columns\) holds lists"),
    "string dense": ("x", ["1"] * 4, r"column 'x' \(data\.dense_columns\) is string"),
    "another": ("a", [[1]] * 4, r"b\.parquet: column 'a'.* but int64 in .*a\.parquet"),
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


def test_a_column_twice(tmp_path):
    table = pa.table(columns(4))
    twice = table.append_column("a", table.column("a"))
    with pytest.raises(DataError, match="2 columns 'a'"):
        source(write(tmp_path / "a.parquet", twice))
    with pytest.raises(ConfigError, match="names 'a' twice"):
        source(tmp_path / "a.parquet", id_columns=("a", "a", "c"))


def test_files_that_are_no_parquet(tmp_path):
    good = write(tmp_path / "a.parquet", columns(60))
    for name, content in (("text", b"a,b\n1,2\n"), ("cut", good.read_bytes()[:-9])):
        bad = tmp_path / f"{name}.parquet"
        bad.write_bytes(content)
        with pytest.raises(DataError, match=f"{bad} is no Parquet file that can be read"):
            source([good, bad])


def test_damaged_pages_vanished_and_changed_files(tmp_path):
    path = write(tmp_path / "a.parquet", columns(60))
    content = bytearray(path.read_bytes())
    whole = bytes(content)
    content[4:400] = b"\xff" * 396
    for change, opened, message in (
        (lambda: None, False, "is no Parquet file that can be read"),
        (path.unlink, False, "cannot be read any more"),
        (lambda: path.write_bytes(whole[:-1]), False, "shrank while it was read"),
        (lambda: os.utime(path, ns=(1, 1)), True, "was written to while it was read"),
    ):
        path.write_bytes(content if "Parquet" in message else whole)
        stream = source(path, 60, held_out=0)
        if not opened:
            stream.files._opened.cache_clear()  # as if other files had been read in between
        change()
        with pytest.raises(DataError, match=rf"{path} {message}"):
            stream.train_batch(0, 0, 1)


def test_files_without_page_checksums_are_no_matter_of_the_log(tmp_path, caplog):
    caplog.set_level(logging.INFO, "distcache")
    pq.write_table(pa.table(columns(60)), tmp_path / "a.parquet", write_page_checksum=False)
    source(tmp_path / "a.parquet")
    assert "1 Parquet files" in caplog.text and "checksum" not in caplog.text


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


def everything(path: Path) -> list[tuple]:
    """All that training and evaluation see of a Parquet file."""
    stream = source(path)
    batches = [stream.train_batch(step, 0, 1) for step in range(stream.steps_per_epoch or 0)]
    batches += [stream.eval_batch(index, 0, 1) for index in range(stream.eval_batches or 0)]
    return [sample for batch in batches for sample in samples_of(batch)]


@pytest.mark.parametrize(
    "seeds", [range(250), pytest.param(range(250, 5000), marks=pytest.mark.slow)], ids=str
)
def test_damaged_files_give_a_named_error_or_the_intact_values(tmp_path, seeds):
    """Pages have checksums, so that nothing but the intact values may come out."""
    good, bad = tmp_path / "good.parquet", tmp_path / "bad.parquet"
    write(good, columns(40))
    pq.write_table(pq.read_table(good), good, row_group_size=10, write_page_checksum=True)
    whole, content = everything(good), good.read_bytes()
    for seed in seeds:
        bad.write_bytes(damage(content, random.Random(seed)))
        try:
            assert everything(bad) == whole, seed
        except DataError as error:
            assert str(bad) in str(error), seed
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
