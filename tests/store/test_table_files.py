"""Tables in files: as their formats say, block by block, and damaged ones named."""

from __future__ import annotations

import json
import struct
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from torch import Tensor

from distcache.errors import ConfigError, DataError, DistcacheError
from distcache.layout import TableSpec
from distcache.store import table_files
from distcache.store.table_files import (
    Stored,
    find_weights,
    read_ids,
    read_safetensors,
    write_tables,
)

ROWS, DIM = 23, 3
VALUES = torch.arange(ROWS * DIM, dtype=torch.float32).view(ROWS, DIM) / 7


def stored(seen: list) -> Stored:
    """The values as a table that notes the blocks that are read."""

    def block(start: int, stop: int) -> Tensor:
        seen.append((start, stop))
        return VALUES[start:stop]

    return Stored((ROWS, DIM), VALUES.dtype, block)


TABLE = Stored.of(VALUES)


@pytest.fixture(autouse=True)
def five_rows(monkeypatch) -> None:
    """A block has five rows."""
    monkeypatch.setattr(table_files, "BLOCK_BYTES", 5 * DIM * 4)


def written(path: Path, header: object, data: bytes) -> Path:
    """A file whose header is as it is given."""
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype: str, values: np.ndarray, begin: int = 0) -> dict:
    """A tensor in a header."""
    offsets = [begin, begin + values.nbytes]
    return {"dtype": dtype, "shape": list(values.shape), "data_offsets": offsets}


def test_a_file_is_what_the_format_says_in_blocks(tmp_path) -> None:
    seen: list[tuple[int, int]] = []
    write_tables(tmp_path, "safetensors", {"t/C1": stored(seen)})
    assert seen == [(0, 5), (5, 10), (10, 15), (15, 20), (20, 23)]
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    want = {"dtype": "F32", "shape": [ROWS, DIM], "data_offsets": [0, 4 * ROWS * DIM]}
    assert (path.name, header.pop("t/C1.weight")) == ("t%2FC1.safetensors", want)
    assert header == {"__metadata__": {"format": "pt"}} and length % 8 == 0
    assert data[8 + length :] == VALUES.numpy().tobytes()
    back = read_safetensors(tmp_path)["t/C1.weight"]
    assert torch.equal(back.block(4, 17), VALUES[4:17]) and back.shape == (ROWS, DIM)


def test_files_of_others_are_read_in_every_precision(tmp_path) -> None:
    half, single = np.full((2, 2), 0.5, np.float16), np.ones(3, np.float32)
    bits = (VALUES[:2].bfloat16().view(torch.int16)).numpy()
    parts = {"h": ("F16", half), "b": ("BF16", bits), "bias": ("F32", single), "n": ("I16", bits)}
    header, data = {}, b""
    for name, (dtype, values) in parts.items():
        header[name] = entry(dtype, values, len(data))
        data += values.tobytes()
    written(tmp_path / "a.safetensors", header, data)
    found = read_safetensors(tmp_path)
    assert list(found) == ["h", "b", "bias"]
    assert torch.equal(found["b"].block(0, 2), VALUES[:2].bfloat16())
    assert found["bias"].block(1, 3).tolist() == [1, 1]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[:5],
        lambda data: data[:-1],
        lambda data: data[:40],
        lambda data: struct.pack("<Q", 1 << 62) + data[8:],
        lambda data: data[:8] + b"\xff" + data[9:],
        lambda data: data.replace(b"[0, 276]", b"[4, 280]"),
        lambda data: data.replace(b"[0, 276]", b"[-4,272]"),
        lambda data: data.replace(b"[23, 3]", b"[23,-3]"),
        lambda data: data.replace(b"[23, 3]", b'["a",1]'),
        lambda data: data.replace(b'"F32"', b'["F"]'),
    ],
)
def test_a_damaged_file_is_named(tmp_path, spoil) -> None:
    write_tables(tmp_path, "safetensors", {"t": TABLE})
    path = tmp_path / "t.safetensors"
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(DataError, match=r"t\.safetensors is no whole safetensors file"):
        read_safetensors(tmp_path)


def test_a_folder_without_such_files_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors"):
        read_safetensors(tmp_path)


def test_chosen_rows_as_parquet_in_blocks(tmp_path) -> None:
    seen: list[tuple[int, int]] = []
    ids = np.array([0, 3, 17, 18])
    tables = {"t": stored(seen), "none": TABLE}
    write_tables(tmp_path, "parquet", tables, {"t": ids, "none": ids[:0]})
    assert seen == [(0, 5), (15, 20)]
    found = parquet.read_table(tmp_path / "t.parquet")
    assert found.schema.field("id").type == pa.int64()
    assert found.schema.field("vector").type == pa.list_(pa.float32(), DIM)
    assert found["id"].to_pylist() == ids.tolist()
    assert found["vector"].to_pylist() == VALUES[ids].tolist()
    assert parquet.read_table(tmp_path / "none.parquet").num_rows == 0


def test_all_rows_of_float64_as_parquet(tmp_path) -> None:
    write_tables(tmp_path, "parquet", {"t": Stored.of(VALUES.double())})
    found = parquet.read_table(tmp_path / "t.parquet")
    assert found["id"].to_pylist() == list(range(ROWS))
    assert found["vector"].to_pylist() == VALUES.tolist()


@pytest.mark.parametrize("format", ["safetensors", "parquet"])
def test_what_cannot_be_written_leaves_the_older_file(tmp_path, format) -> None:
    (tmp_path / f"t.{format}").write_text("older")

    def block(start: int, stop: int) -> Tensor:
        raise OSError(28, "No space left on device")

    with pytest.raises(DistcacheError, match=rf"t\.{format} cannot be written: No space left"):
        write_tables(tmp_path, format, {"t": Stored((ROWS, DIM), torch.float32, block)})
    assert [path.read_text() for path in tmp_path.iterdir()] == ["older"]


def test_rows_are_chosen_for_parquet_alone(tmp_path) -> None:
    for how in (("safetensors", {"t": TABLE}, {"t": np.arange(2)}), ("csv", {})):
        with pytest.raises(ConfigError, match=r"one of safetensors, parquet"):
            write_tables(tmp_path, *how)


def test_ids_come_from_text(tmp_path) -> None:
    path = tmp_path / "ids"
    path.write_text("22\n4\n\n0\n4\n")
    assert read_ids(path, ROWS).tolist() == [0, 4, 22]
    path.write_text("")
    assert read_ids(path, ROWS).dtype == np.int64 and not len(read_ids(path, ROWS))


@pytest.mark.parametrize("what", ["4\nx\n", "1.5\n", "-1\n", "23\n", "9" * 30, "PAR1\0"])
def test_what_is_no_id_is_refused(tmp_path, what) -> None:
    path = tmp_path / "ids"
    path.write_text(what)
    with pytest.raises(DataError, match=r"(?s)rows=.*ids cannot be used.*one id, 0 to 22, a line"):
        read_ids(path, ROWS)


# --- what tables start from ----------------------------------------------------------------------

SPECS = [TableSpec(name, ROWS, DIM, (name,)) for name in ("t", "u")]
find = partial(find_weights, tables=SPECS)


@pytest.mark.parametrize("name", ["t", "t.weight", "embedding_bags.t.weight", "m.a.t.weight"])
def test_a_table_is_found_by_its_name(name) -> None:
    found, said = find({name: TABLE, "wt.weight": TABLE, "x": TABLE}, names={})
    assert list(found) == [0] and found[0].shape == (ROWS, DIM)
    assert said == "1 of 2 tables; not stored: u"


def test_names_say_which_is_which_and_fewer_rows_are_told() -> None:
    few = Stored.of(VALUES[:9])
    found, said = find({"y": TABLE, "m.x.weight": few}, names={"u": "x", "t": "y"})
    assert list(found) == [0, 1] and said == "2 of 2 tables; grown: u (the first 9 of 23 rows)"


@pytest.mark.parametrize(
    ("tensors", "names", "says"),
    [
        ({"t": VALUES[:, :2]}, {}, r"'t' has 23 rows x 3 and cannot start from 't', 23 x 2"),
        ({"t": torch.zeros(24, 3)}, {}, r"cannot start from 't', 24 x 3"),
        ({"t": torch.zeros(3)}, {}, r"cannot start from 't', 3: "),
        ({"a.t.weight": VALUES, "b.t.weight": VALUES}, {}, r"^t: not one table and one"),
        ({"t": VALUES}, {"u": "y"}, r"^y: not one table .* t, u, and stored is t$"),
        ({"t": VALUES}, {"v": "t"}, r"^v: not one table"),
        ({"x": VALUES}, {}, r"^t, u: not one table"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tensors, names, says) -> None:
    with pytest.raises(ConfigError, match=says):
        find({name: Stored.of(values) for name, values in tensors.items()}, names=names)
