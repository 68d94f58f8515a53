"""Criteo batches: blocks of text read as line by line, all that can be wrong with a line; folders
by memory map."""

from __future__ import annotations

import gc
import gzip
import json
import logging
import math
import mmap
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from batch_sources import samples_of
from criteo_lines import (
    ROWS,
    damage,
    make_lines,
    parsed,
    preprocessed,
    read_plainly,
    with_fields,
    write_lines,
)

from distcache.data import criteo_text as parts
from distcache.data.criteo import CriteoArrays, CriteoSource, CriteoSpec
from distcache.data.criteo_folder import MLPERF_BAGS, bags
from distcache.data.criteo_text import parse_blocks
from distcache.data.files import MappedRows
from distcache.data.samplers import BlockOrder
from distcache.errors import ConfigError, DataError

LINES = make_lines(14, seed=5)
TEXT = b"\n".join(LINES) + b"\n"
THOUSANDS = range(0, 20_000, 1000)
LARGE = (*ROWS[:3], 2**33, *ROWS[4:])


@pytest.fixture(autouse=True)
def odd_lines_are_searched_for(monkeypatch):
    """Blocks of these few lines are halved too."""
    monkeypatch.setattr(parts, "_FEW", 2)


def source(path, on_bad_line: str = "error", rows=ROWS, **spec) -> CriteoSource:
    return CriteoSource(CriteoSpec(path, rows, on_bad_line=on_bad_line, **spec))


def same(found, expected) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(found, expected[:3], strict=True))


def check_block(text: bytes) -> list[int]:
    """The rows of a block in every form of ids are those of its lines; the bad lines."""
    for rows in (ROWS, LARGE, None):
        found, bad = [], []
        for part, _ in parse_blocks([text], rows, lambda line, error, bad=bad: bad.append(line)):
            found.append((part.labels, part.dense, part.ids))
            assert (part.missing is None) == (rows is not None)
        expected = read_plainly(text, rows)
        assert bad == expected[3]
        assert same([np.concatenate(kind) for kind in zip(*found, strict=True)], expected)
    return expected[3]


@pytest.mark.parametrize("missing", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_ordinary_lines_take_the_fast_way(missing, end):
    lines = make_lines(300, missing=missing)
    for block in (end.join(lines), end.join(lines) + end):
        assert check_block(block) == []
        assert parts._parse_columns(block, ROWS) is not None
        found = parts._parse_columns(block, None)
        empty = [[field == b"" for field in line.split(b"\t")[14:]] for line in lines]
        assert found is not None
        assert (found.missing[:, None] >> np.arange(26) & 1).tolist() == empty


GOOD = [(5, value) for value in (b"-0", b"-12", b"0012", b"9" * 18, b"-" + b"9" * 18)]
GOOD += [(5, b"0" * zeros + b"1") for zeros in (17, 18, 30, 5000)]
GOOD += [(20, value) for value in (b"a", b"ABCDEF01", b"0000000001", b"123456789abcdef0", b"0")]
BAD = [(0, value) for value in (b"", b"2", b"01", b"00", b"-1", b"a", b"1\r")]
BAD += [(5, value) for value in (b"1" * 19, b"+1", b" 1", b"0x1", b"1e3", b"--1", b"-", b"1.0")]
BAD += [(5, value) for value in (b"a", b"1\r", b'"1"', b"\x00", b"\xff", b"9" * 30, b"1-")]
BAD += [(20, value) for value in (b"-1", b"x", b"0x1f", b" a", b"a\rb", b"\r", b"\x00", b"\xc3")]
BAD += [(39, value) for value in (b"a\tb", b"\t", b"a\r\r", b"-")]


@pytest.mark.parametrize(("field", "value"), GOOD + BAD)
def test_odd_fields(field, value):
    lines = make_lines(3)
    block = b"\n".join([lines[0], with_fields(lines[1], {field: value}), lines[2]]) + b"\n"
    assert check_block(block) == ([2] if (field, value) in BAD else [])


def test_long_ids_are_rows_and_no_values():
    lines = make_lines(3)
    block = b"\n".join([lines[0], with_fields(lines[1], {20: b"1" * 17}), lines[2]]) + b"\n"
    assert read_plainly(block, ROWS)[2][1, 6] == int("1" * 17, 16) % ROWS[6]
    errors = []
    list(parse_blocks([block], None, lambda line, error: errors.append((line, str(error)))))
    assert [line for line, _ in errors] == [2] and check_block(block) == [2]
    assert "field 21" in errors[0][1] and "16 digits" in errors[0][1]


BAD_LINES = {
    "missing field": ({}, b"\t".join(LINES[0].split(b"\t")[:-1]), "39 tab-separated fields inste"),
    "extra field": ({39: b"a\t"}, None, "41 tab-separated fields"),
    "empty line": ({}, b"", "1 tab-separated fields"),
    "label 2": ({0: b"2"}, None, r"field 1 \(label\) is '2', not 0 or 1"),
    "label empty": ({0: b""}, None, r"field 1 \(label\) is ''"),
    "integer": ({2: b"1.5"}, None, r"field 3 \(integer 2\) is '1\.5'"),
    "minus within": ({1: b"1-2"}, None, r"field 2 \(integer 1\) is '1-2'"),
    "long integer": ({1: b"1" * 19}, None, "at most 18 digits"),
    "not hex": ({15: b"xyz"}, None, r"field 16 \(id 2, feature cat_1\) is 'xyz', not hexadec"),
    "0x": ({39: b"0x1f"}, None, r"field 40 \(id 26, feature cat_25\) is '0x1f'"),
}


@pytest.mark.parametrize(("changes", "line", "message"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_malformed_line_is_named_or_skipped(tmp_path, caplog, changes, line, message):
    good = make_lines(20)
    bad = with_fields(good[3], changes) if line is None else line
    path = write_lines(tmp_path / "a.txt", [*good[:11], bad, *good[11:]])
    with pytest.raises(DataError, match=message) as error:
        source(path)
    assert f"{path}:12: " in str(error.value) and "data.on_bad_line=skip" in str(error.value)
    with caplog.at_level(logging.WARNING, logger="distcache"):
        stream = source(path, "skip")
    assert stream.bad_lines.count == 1
    assert "skipped 1 malformed lines" in caplog.text and f"{path}:12" in caplog.text
    assert stream.identity == source(write_lines(tmp_path / "b.txt", good)).identity


def test_values_of_fields(tmp_path):
    integers = [b"", b"-3", b"0", b"7", b"-0", b"9" * 18]
    ids = [b"", b"0", b"FFFFFFFF", b"ffffffff", b"0" * 26 + b"ff", b"1" * 20]
    changes = dict(enumerate(integers, 1)) | dict(enumerate(ids, 14)) | {0: b"1"}
    others = [with_fields(line, {0: b"0"}) for line in make_lines(6)]
    path = write_lines(tmp_path / "a.txt", [with_fields(LINES[0], changes), *others])
    large = (*ROWS[:2], 2**32, *ROWS[3:])
    batch = source(path, rows=large, global_batch_size=6, shuffle=False).train_batch(0, 0, 1)
    logs = [0.0, 0.0, 0.0, math.log(8), 0.0, math.log1p(10**18 - 1)]
    assert batch.loaded().dense[0, :6].tolist() == np.float32(logs).tolist()
    expected = [0, 0, 0xFFFFFFFF, 0xFFFFFFFF % ROWS[3], 255 % ROWS[4], int("1" * 20, 16) % ROWS[5]]
    assert batch.ids.values.reshape(26, 6)[:6, 0].tolist() == expected


def read_source(path: Path, on_bad_line: str):
    stream = source(path, on_bad_line)
    return list(stream._arrays.values()), stream.bad_lines.count


def read_part(path: Path, rows) -> tuple[list[np.ndarray], list[int]]:
    """The arrays of the whole (plain) file as a part, and the numbers of its malformed lines."""
    report, found = parsed(path, rows)
    return [found.labels, found.dense, found.ids], [line for line, _ in report.bad]


def check_plain(path: Path, text: bytes) -> None:
    """Both readers, in both ways with malformed lines, against line by line."""
    path.write_bytes(text)
    if text.startswith(b"\x1f\x8b"):
        return
    for rows in (ROWS, None):
        expected = read_plainly(text, rows)
        found, numbers = read_part(path, rows)
        assert same(found, expected) and numbers == expected[3][:10]
    expected = read_plainly(text, ROWS)
    if len(expected[0]) < 2:
        with pytest.raises(DataError, match=re.escape(str(path))):
            read_source(path, "skip")
        return
    found, skipped = read_source(path, "skip")
    assert same(found, expected) and skipped == len(expected[3])
    if expected[3]:
        with pytest.raises(DataError, match=re.escape(f"{path}:{expected[3][0]}: ")):
            read_source(path, "error")


def check_packed(path: Path, text: bytes) -> None:
    """A damaged gzip file is an error at a line, unless what was changed says nothing."""
    path.write_bytes(text)
    for on_bad_line in ("error", "skip"):
        try:
            found, _ = read_source(path, on_bad_line)
        except DataError as error:
            where = r"(:.* line \d+ |:\d+: | \(skipped: | is empty)"
            assert re.search(re.escape(str(path)) + where, str(error)), str(error)
        else:
            assert same(found, read_plainly(TEXT, ROWS))


@pytest.mark.parametrize(
    "seeds",
    [range(100), *(pytest.param(range(n, n + 1000), marks=pytest.mark.slow) for n in THOUSANDS)],
    ids=str,
)
def test_damaged_files(tmp_path, seeds):
    packed = gzip.compress(TEXT, mtime=0)
    for seed in seeds:
        dice = random.Random(seed)
        try:
            if seed % 5 == 4:
                check_packed(tmp_path / "a.gz", damage(packed, dice))
            else:
                check_plain(tmp_path / "a.txt", damage(TEXT, dice))
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error


@pytest.mark.parametrize("filler", [b"a", b"0", b"\t", b"-", b"\x00"])
def test_a_line_of_ten_megabytes(tmp_path, filler):
    long_field = LINES[0] + filler * 10_000_000
    for text in ([*LINES[:5], long_field, *LINES[5:]], [*LINES, long_field]):
        path, at = write_lines(tmp_path / "a.txt", text), text.index(long_field) + 1
        with pytest.raises(DataError, match=f"a.txt:{at}: the line is longer than 1,048,576"):
            read_source(path, "error")
        found, skipped = read_source(path, "skip")
        assert skipped == 1 and same(found, read_plainly(TEXT, ROWS))
        found, numbers = read_part(path, ROWS)
        assert numbers == [at] and same(found, read_plainly(TEXT, ROWS))


def folder_source(folder: Path, batch: int = 64, **spec) -> CriteoArrays:
    return CriteoArrays(CriteoSpec(folder, global_batch_size=batch, **spec))


def prepare(folder: Path, lines: list[bytes], **settings) -> tuple[Path, Path]:
    """A text file and the folder made from it."""
    text = write_lines(folder / "a.txt", lines)
    preprocessed(text, folder / "out", **settings)
    return text, folder / "out"


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> tuple[Path, Path]:
    return prepare(tmp_path_factory.mktemp("both"), make_lines(350))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("shuffle_block", [1, 4096])
def test_folders_give_the_batches_of_their_text(both, shuffle, shuffle_block, monkeypatch):
    monkeypatch.setattr("distcache.data.samplers.POOL_BLOCKS", 32)
    spec = {"global_batch_size": 64, "seed": 3, "shuffle": shuffle, "shuffle_block": shuffle_block}
    lines, arrays = source(both[0], **spec), CriteoArrays(CriteoSpec(both[1], **spec))
    assert arrays.table_rows == lines.table_rows == ROWS and arrays.steps_per_epoch == 5
    for kind, count in (("train_batch", 7), ("eval_batch", 1)):
        for step in range(count):
            one, other = (getattr(s, kind)(step, 1, 2).loaded() for s in (arrays, lines))
            assert samples_of(one) == samples_of(other) and one.first_sample == other.first_sample
            assert (one.global_size, one.epoch) == (other.global_size, other.epoch)
    if not shuffle:
        first = arrays.train_batch(0, 0, 1).ids.values.reshape(26, 64)
        assert np.array_equal(first.numpy(), np.load(both[1] / "ids.npy")[:64].T)
        held_out = arrays.eval_batch(0, 0, 1).ids.values.reshape(26, 50)  # the last seventh
        assert np.array_equal(held_out.numpy(), np.load(both[1] / "ids.npy")[300:].T)


def test_too_few_lines(tmp_path):
    with pytest.raises(DataError, match="1 good lines"):
        source(write_lines(tmp_path / "one.txt", make_lines(1)))
    skipped = r"0 good .* \(skipped: 2 malformed lines, the first .*d\.txt:1: 1 t"
    with pytest.raises(DataError, match=skipped):
        source(write_lines(tmp_path / "bad.txt", [b"bad", b"bad"]), on_bad_line="skip")


def test_text_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "distcache.data.criteo_text")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pyarrow, which is not installed.*distcache\[data\]"):
        source(write_lines(tmp_path / "a.txt", make_lines(9)))


def test_look_ahead_reads_ids_alone(both, monkeypatch):
    stream, read = folder_source(both[1]), []
    real = MappedRows.take
    monkeypatch.setattr(
        MappedRows,
        "take",
        lambda self, rows: read.append((self._file.path.name, len(rows))) or real(self, rows),
    )
    batches = [stream.train_batch(step, 1, 4) for step in range(3)]
    assert read == [("ids.npy", 16)] * 3
    batches[1].loaded()
    assert sorted(read[3:]) == [("dense.npy", 16), ("labels.npy", 16)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_source_that_is_dropped_lets_go_of_its_files(both, shuffle):
    def in_use() -> int:
        return Path("/proc/self/maps").read_text().count(f"{both[1]}/")

    before, handles = in_use(), len(os.listdir("/proc/self/fd"))
    stream = folder_source(both[1], shuffle=shuffle)
    batch = stream.train_batch(0, 0, 1).loaded()
    assert in_use() >= before + 3
    gc.disable()
    try:
        del stream, batch  # without waiting for the garbage collector
        assert in_use() == before and len(os.listdir("/proc/self/fd")) <= handles
    finally:
        gc.enable()


def test_bags_of_several_ids(tmp_path):
    _, folder = prepare(tmp_path, make_lines(70), multi_hot=MLPERF_BAGS)
    stream = folder_source(folder, 12, shuffle=False, table_rows=ROWS)
    with pytest.raises(ConfigError, match=r"data\.table_rows=.*was preprocessed to"):
        folder_source(folder, table_rows=[10] * 26)
    batch, ids = stream.train_batch(1, 0, 1), np.load(folder / "ids.npy")[12:24]
    assert len(batch.ids.values) == 12 * sum(MLPERF_BAGS) == 12 * 214
    for table, size in enumerate(MLPERF_BAGS):
        low, high = (int(batch.ids.offsets[12 * (table + more)]) for more in (0, 1))
        expected = bags(ids[:, table].astype(np.int64), table, ROWS[table], size)
        assert np.array_equal(batch.ids.values[low:high].reshape(12, size).numpy(), expected)
    every = stream.ids_of(np.arange(60), 0)
    low, high = (int(every.offsets[60 * at]) for at in (20, 21))
    seen = np.bincount(every.values[low:high].numpy(), minlength=ROWS[20])
    assert np.array_equal(stream.counts(20), seen)


def test_damage_is_named(tmp_path):
    _, folder = prepare(tmp_path, make_lines(70))
    labels = np.load(folder / "labels.npy", mmap_mode="r+")
    labels[13] = 77
    labels.flush()
    with pytest.raises(DataError, match=r"sample 13 has the label 77, not 0 or 1.*verify=true"):
        folder_source(folder, 16, shuffle=False).train_batch(0, 0, 1).loaded()
    stream = folder_source(folder, 16)
    batch = stream.train_batch(0, 0, 1)
    os.truncate(folder / "dense.npy", (folder / "dense.npy").stat().st_size - 1000)
    with pytest.raises(DataError, match=r"dense\.npy shrank while it was read"):
        batch.loaded()
    with pytest.raises(DataError, match=r"dense\.npy has .* run the same command of"):
        folder_source(folder)
    (folder / "ids.npy").unlink()
    with pytest.raises(DataError, match=r"ids\.npy cannot be read any more"):
        stream.train_batch(1, 0, 1)
    manifest = json.loads((folder / "manifest.json").read_text())
    for broken, message in (
        ("{", "cannot be read"),
        ("[]", "no manifest of python -m distcache.preprocess"),
        (json.dumps(manifest | {"format": 2}), "has format 2, .* reads format 1: run python"),
        (json.dumps({"format": 1}), "lacks or misspells"),
        (json.dumps(manifest | {"train_samples": 61}), "does not have its fingerprint"),
    ):
        (folder / "manifest.json").write_text(broken)
        with pytest.raises(DataError, match=message):
            folder_source(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"no manifest\.json.*unfinished"):
        folder_source(folder)


@pytest.mark.parametrize("shape", [(5000,), (5000, 26), (5000, 2, 3)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.int64])
def test_mapped_rows_are_those_of_the_array(tmp_path, shape, dtype):
    random = np.random.default_rng(0)
    array = random.integers(0, 200, shape).astype(dtype)
    np.save(tmp_path / "a.npy", array)
    rows = MappedRows(tmp_path / "a.npy", np.load(tmp_path / "a.npy", mmap_mode="r"))
    for wanted in (
        random.permutation(5000),  # more pieces than a system call takes
        np.arange(4999, -1, -1),
        np.array([7, 7, 8, 9, 9, 0, 4999]),
        np.repeat(np.arange(100, 3100), 2),
        np.empty(0, dtype=np.int64),
    ):
        taken = rows.take(wanted)
        assert taken.dtype == dtype and np.array_equal(taken, array[wanted])
    for wanted in ([5000], [-1]):
        with pytest.raises(IndexError):
            rows.take(np.array(wanted))


CUT = """
import os, sys
from pathlib import Path
import numpy as np
from distcache.data.files import InputFile, MappedRows
path, wanted = Path(sys.argv[1]), np.array(eval(sys.argv[2]))
rows = MappedRows(path, np.load(path, mmap_mode="r"))
check = InputFile.check_unchanged
def check_and_cut(self, stream=None):
    check(self, stream)
    os.truncate(path, 8192)
InputFile.check_unchanged = check_and_cut
rows.take(wanted)
"""


@pytest.mark.parametrize("wanted", ["[90_000]", "range(99_999, 0, -7)"])
def test_a_file_that_is_cut_between_check_and_read_is_an_error(tmp_path, wanted):
    """In a process of its own, which a page beyond the end would kill."""
    path = tmp_path / "a.npy"
    np.save(path, np.arange(100_000))
    words = [sys.executable, "-c", CUT, str(path), wanted]
    done = subprocess.run(words, capture_output=True, text=True)
    said = f"DataError: {path} shrank while it was read: 800,128 bytes at the start, 8,192 now"
    assert done.returncode == 1 and said in done.stderr


def mapped_bytes(path: Path) -> int:
    """Bytes of a file that this process has in its memory maps now."""
    maps = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    mine = [one for one in maps if one.splitlines()[:1] and one.splitlines()[0].endswith(str(path))]
    return sum(int(one.split("Rss:")[1].split()[0]) << 10 for one in mine)


@pytest.mark.parametrize("random", [True, False])
def test_of_a_large_file_only_the_pages_of_the_rows_that_are_taken_are_read(tmp_path, random):
    """Of 104 GB that are all zero."""
    path, shape, batch = tmp_path / "ids.npy", (1_000_000_000, 26), 2048
    with path.open("wb") as file:
        about = {"descr": "<i4", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, about)
        try:
            file.truncate(file.tell() + 104 * shape[0])
        except OSError as error:
            pytest.skip(f"the file system takes no sparse files of 104 GB: {error}")
    rows, order = MappedRows(path, np.load(path, mmap_mode="r")), np.arange(batch)
    if random:
        rows.advise(0, shape[0], mmap.MADV_RANDOM)
        order = BlockOrder(shape[0], 1, 4096).positions(0, 0, batch)
    assert rows.take(order).sum() == 0
    # Neighbours share their pages; the kernel maps those around a page (16 of 4096 bytes), too.
    assert mapped_bytes(path) <= (batch * 2 * 4096 if random else batch * 104 + 2 * 16 * 4096)
