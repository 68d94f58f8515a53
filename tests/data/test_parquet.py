"""Parquet as batches: orders, slices, values of columns, and everything that can be wrong."""

from __future__ import annotations

import hashlib
import math
import os
from pathlib import Path

import numpy as np
import parquet_files
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from batch_checks import check_slices
from parquet_files import ROWS, columns, source, write
from source_runs import digests, summaries

from distcache.data.hashing import key_of
from distcache.data.parquet_columns import ColumnRules
from distcache.data.row_group_order import RowGroupOrder
from distcache.data.samplers import SampleOrder
from distcache.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def hash_of(text: str, rows: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % rows


def bags_of(batch, feature: int) -> list[list[int]]:
    b, offsets = batch.ids.batch_size, batch.ids.offsets.tolist()
    values = batch.ids.values.tolist()
    return [values[offsets[feature * b + i] : offsets[feature * b + i + 1]] for i in range(b)]


def seen(stream, steps) -> list[int]:
    """Numbers of the samples (dense column x) in the order of training."""
    return [int(x) for s in steps for x in stream.train_batch(s, 0, 1).dense[:, 0].tolist()]


# --- order --------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [0, 1, 25, 1000])
def test_an_epoch_has_every_sample_once(window):
    sizes = [10, 3, 25, 1, 10, 10, 8]
    order = RowGroupOrder(sizes, 7, window)
    for epoch in range(3):
        found = []
        for start in range(0, 67, 9):
            blocks, samples = order.places(epoch, start, min(start + 9, 67))
            found += list(zip(blocks.tolist(), samples.tolist(), strict=True))
        every = [(block, at) for block, size in enumerate(sizes) for at in range(size)]
        assert sorted(found) == every
        assert (found == every) == (window == 0)
    if 0 < window < 67:
        assert order.widest <= window + 25


def test_windows_mix_their_blocks_and_no_others():
    order = RowGroupOrder([10] * 30, 3, 40)
    firsts = []
    for epoch in range(4):
        for window in range(7):
            blocks, _ = order.places(epoch, 40 * window, 40 * window + 40)
            assert len(set(blocks.tolist())) == 4
            firsts.append(tuple(sorted(set(blocks.tolist()))))
        blocks, _ = order.places(epoch, 35, 45)  # a batch over the edge of two windows
        assert len(set(blocks.tolist())) > 4 or len(blocks) == 10
    assert len(set(firsts)) > 20  # epochs differ


def test_one_window_is_the_order_of_all_samples():
    order = RowGroupOrder([10, 3, 25], 5, 38)
    blocks, samples = order.places(2, 4, 30)
    expected = SampleOrder(38, key_of(5, 0)).positions(2, 4, 30)
    assert (np.array([0, 10, 13])[blocks] + samples).tolist() == expected.tolist()


@pytest.mark.parametrize("shuffle_rows", [0, 20, 1 << 20])
def test_batches_are_the_same_for_any_number_of_ranks(tmp_path, shuffle_rows):
    for part in range(3):
        data = columns(41, seed=part)
        data["x"] = data["x"] + 41 * part
        write(tmp_path / f"part-{part * 5}.parquet", data)  # 0, 5, 10: numbers by value
    stream = source(str(tmp_path / "part-*.parquet"), shuffle_rows=shuffle_rows)
    train = 123 - math.ceil(123 / 7)
    assert (stream.steps_per_epoch, stream.eval_batches) == (math.ceil(train / 16), 2)
    for step in (0, 3, stream.steps_per_epoch - 1, stream.steps_per_epoch + 2):
        check_slices(stream, step, "train")
    check_slices(stream, 1, "eval")
    first = seen(stream, range(stream.steps_per_epoch))
    second = seen(stream, range(stream.steps_per_epoch, 2 * stream.steps_per_epoch))
    assert sorted(first) == sorted(second) == list(range(train))
    assert (first == second) == (shuffle_rows == 0)
    held_out = [int(x) for i in (0, 1) for x in stream.eval_batch(i, 0, 1).dense[:, 0].tolist()]
    assert held_out == list(range(train, 123))
    with pytest.raises(DataError, match="batch 2 of 2"):
        stream.eval_batch(2, 0, 1)
    again = source(str(tmp_path / "part-*.parquet"), shuffle_rows=shuffle_rows)
    assert seen(again, [9]) == seen(stream, [9])  # without having seen the steps before


def test_a_rank_reads_the_row_groups_of_its_slices(tmp_path):
    write(tmp_path / "a.parquet", columns(400), group=10)
    alone = source(tmp_path / "a.parquet", batch=40, shuffle_rows=80, held_out=0)
    decoded = []
    for rank in (0, 1):
        stream = source(tmp_path / "a.parquet", batch=40, shuffle_rows=80, held_out=0)
        for step in range(10):
            stream.train_batch(step, rank, 2)
        decoded.append(stream._ids.decoded)
        assert stream._rest.decoded == stream._ids.decoded
        assert sum(rows for _, rows in stream._ids._blocks.values()) <= 100
    for step in range(10):
        alone.train_batch(step, 0, 1)
    assert alone._ids.decoded == 40  # each row group once
    assert max(decoded) < 30


def test_dense_features_are_read_when_a_batch_is_loaded(tmp_path):
    stream = source(write(tmp_path / "a.parquet", columns(60)), 16)
    whole = stream.train_batch(1, 0, 1)
    stream = source(tmp_path / "a.parquet", 16)
    stream.deferred = True
    batch = stream.train_batch(1, 0, 1)
    assert stream._ids.decoded > 0 == stream._rest.decoded
    assert batch.dense.shape == (16, 2) and batch.dense.is_meta and batch.labels.is_meta
    assert torch.equal(batch.ids.values, whole.ids.values)
    assert torch.equal(batch.loaded().dense, whole.dense)
    assert torch.equal(batch.loaded().labels, whole.labels)


def test_held_out_files(tmp_path):
    write(tmp_path / "train.parquet", columns(30))
    write(tmp_path / "test.parquet", columns(12, seed=1))
    stream = source(tmp_path / "train.parquet", held_out_paths=str(tmp_path / "te*.parquet"))
    assert sorted(seen(stream, range(stream.steps_per_epoch))) == list(range(30))
    assert stream.eval_batch(0, 0, 1).dense[:, 0].tolist() == list(range(12))
    none = source(tmp_path / "train.parquet", held_out=0)
    assert (none.steps_per_epoch, none.eval_batches) == (2, 0)


# --- values -------------------------------------------------------------------------------------


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


# --- bad input ----------------------------------------------------------------------------------


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


# --- training -----------------------------------------------------------------------------------


def criteo_table(path: Path) -> pa.Table:
    """The sample as columns: label, I1 to I13 (nullable integers), C1 to C26 (nullable strings)."""
    fields = [line.split("\t") for line in path.read_text().splitlines()]
    names = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    made = {}
    for at, (name, values) in enumerate(zip(names, zip(*fields, strict=True), strict=True)):
        made[name] = [(value if at > 13 else int(value)) if value else None for value in values]
    return pa.table(made)


@pytest.mark.parametrize("world_size", [1, 2])
def test_criteo_through_parquet_has_the_digests_of_its_text(shared_data, tmp_path, world_size):
    text = shared_data / "criteo_kaggle_sample.txt"
    table = criteo_table(text)
    write(tmp_path / "one.parquet", table, 5000)
    write(tmp_path / "many.parquet", table, 100)
    rows = [1000 + 37 * i for i in range(26)]
    common = [
        f"data.table_rows={rows}",
        "data.global_batch_size=128",
        "trainer.eval_steps=3",
        "model.embedding_dim=4",
        "model.dense_arch=[8,4]",
        "model.over_arch=[8,1]",
        "cache.ratio=0.2",
        "optim=adagrad",
    ]
    parquet = [
        "data=parquet",
        f"data.dense_columns={[f'I{i}' for i in range(1, 14)]}",
        f"data.id_columns={[f'C{i}' for i in range(1, 27)]}",
        "data.string_ids=hex",
        "data.nulls=zero",
        "data.dense_transform=log1p",
    ]
    runs = [["data=criteo", f"data.path={text}"]]
    runs += [[*parquet, f"data.path={tmp_path / name}.parquet"] for name in ("one", "many")]
    runs += [[*parquet, f"data.path={tmp_path}/many.parquet", "data.shuffle_rows=300"]] * 2
    runs[-1] = [*runs[-1], "parallel=resident"]
    runs += [[*run, "data.shuffle=false"] for run in (runs[0], runs[3])]
    found = summaries([[*run, *common] for run in runs], tmp_path / "runs", world_size)
    assert digests(found[1]) == digests(found[0]) == digests(found[2])
    assert found[1]["eval_auc"] == found[0]["eval_auc"]
    assert digests(found[3]) == digests(found[4]) != digests(found[0])
    assert digests(found[5]) == digests(found[6]) != digests(found[0])  # file order


def test_weighted_bags_train_alike_in_all_modes(tmp_path):
    rng = np.random.default_rng(0)
    data = columns(120)
    data["w"] = [rng.uniform(0.5, 1.5, len(bag)).tolist() for bag in data["b"]]
    path = parquet_files.write(tmp_path / "a.parquet", data, 16)
    common = [
        "data=parquet",
        f"data.path={path}",
        "data.label_column=y",
        "data.dense_columns=[x,z]",
        "data.dense_transform=log1p",
        "data.id_columns=[a,b,c]",
        "data.weight_columns={b: w}",
        f"data.table_rows={list(ROWS)}",
        "data.global_batch_size=24",
        "data.shuffle_rows=40",
        "model.embedding_dim=4",
        "model.dense_arch=[8,4]",
        "model.over_arch=[8,1]",
        "cache.rows=256",
    ]
    modes = ("data", "resident", "host", "hybrid")
    found = summaries([[f"parallel={mode}", *common] for mode in modes], tmp_path / "runs", 2)
    assert digests(found[0]) == digests(found[1]) == digests(found[2])
    assert found[3]["final_loss"] == pytest.approx(found[0]["final_loss"], rel=1e-5)
