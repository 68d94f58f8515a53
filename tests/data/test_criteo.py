"""Criteo batches: of text and of preprocessed folders, read by memory map, damage noticed."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import tracemalloc
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from batch_sources import samples_of
from criteo_lines import ROWS, make_lines, preprocessed, write_lines

from distcache.data.criteo import CriteoArrays, CriteoSource, CriteoSpec
from distcache.data.files import MappedRows, write_json
from distcache.data.raw.settings import (
    IDS,
    INTEGERS,
    MLPERF_BAGS,
    TERABYTE_ROWS,
    ArrayFile,
    Manifest,
    bags,
)
from distcache.errors import ConfigError, DataError


def text_source(path, **spec) -> CriteoSource:
    return CriteoSource(CriteoSpec(path, ROWS, **spec))


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
    lines, arrays = text_source(both[0], **spec), CriteoArrays(CriteoSpec(both[1], **spec))
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
    one = write_lines(tmp_path / "one.txt", make_lines(1))
    with pytest.raises(DataError, match="1 good lines"):
        text_source(one)
    skipped = r"0 good .* \(skipped: 2 malformed lines, the first .*d\.txt:1: 1 t"
    with pytest.raises(DataError, match=skipped):
        text_source(write_lines(tmp_path / "bad.txt", [b"bad", b"bad"]), on_bad_line="skip")


def test_text_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "distcache.data.raw.parts")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pyarrow, which is not installed.*distcache\[data\]"):
        text_source(write_lines(tmp_path / "a.txt", make_lines(9)))


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
        ("[]", "not a manifest of format 1"),
        (json.dumps(manifest | {"format": 2}), "not a manifest of format 1"),
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


SAMPLES, BATCH = 2_000_000_000, 2048


@pytest.fixture(scope="module")
def sparse(tmp_path_factory) -> Path:
    """A folder as distcache.preprocess leaves it, 314 GB that are all zero, without counts."""
    folder, arrays = tmp_path_factory.mktemp("sparse"), {}
    shapes = {"labels": (SAMPLES,), "dense": (SAMPLES, INTEGERS), "ids": (SAMPLES, IDS)}
    for (name, shape), dtype in zip(shapes.items(), ("|u1", "<f4", "<i4"), strict=True):
        with (folder / f"{name}.npy").open("wb") as file:
            about = {"descr": dtype, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, about)
            size = file.tell() + np.dtype(dtype).itemsize * int(np.prod(shape))
            try:
                file.truncate(size)
            except OSError as error:
                pytest.skip(f"the file system takes no sparse files of 314 GB: {error}")
        arrays[f"{name}.npy"] = ArrayFile(dtype, shape, size, "not taken")
    skipped = {"count": 0, "first": []}
    about = (SAMPLES, SAMPLES * 6 // 7, TERABYTE_ROWS, "hash", None, arrays, [], skipped, {}, {})
    write_json(folder / "manifest.json", asdict(Manifest(*about).with_fingerprint()))
    return folder


def mapped_bytes(folder: Path) -> int:
    """Bytes of the folder's files that this process has in its memory maps now."""
    maps = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    mine = [one for one in maps if re.match(rf"\S+ .*{folder}/\w+\.npy\n", one)]
    return sum(int(one.split("Rss:")[1].split()[0]) << 10 for one in mine)


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_first_batch_of_two_billion_samples(sparse, shuffle):
    """What is read and held for it does not grow with them."""
    for path in sparse.glob("*.npy"):  # their pages may be in memory from the other test
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    tracemalloc.start()
    try:
        stream = folder_source(sparse, BATCH, shuffle=shuffle)
        stream.train_batch(0, 0, 1).loaded()
        stream.train_batch(stream.steps_per_epoch - 1, 0, 1).loaded()
        allocated, held = tracemalloc.get_traced_memory()[1], mapped_bytes(sparse)
    finally:
        tracemalloc.stop()
    # Two batches of three arrays, each of two pools; or neighbours, which share their pages, and
    # what the kernel maps around a page (16 of 4096 bytes).
    sample = 26 * 4 + 13 * 4 + 1
    assert held <= (2 * 256 * 4096 * sample if shuffle else 2 * BATCH * sample + 6 * 2 * 16 * 4096)
    # Not a byte per thousand samples, let alone an index of them.
    assert allocated < 64 * BATCH * (26 + 13 + 1) < SAMPLES / 300
