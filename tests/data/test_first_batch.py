"""The first batch of two billion samples: what is read and held for it does not grow with them."""

from __future__ import annotations

import os
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from distcache.data.criteo import BatchSettings, CriteoArrays
from distcache.data.criteo_text import IDS, INTEGERS
from distcache.data.raw.settings import TERABYTE_ROWS, ArrayFile, Manifest, write_manifest

SAMPLES = 2_000_000_000
BATCH = 2048
PAGE, AROUND = 4096, 16
"""Bytes of a page, and the pages around a fault that the kernel maps when it has them."""


def make_sparse_folder(folder: Path, samples: int) -> int:
    """A folder as distcache.preprocess leaves it, of `samples` samples that are all zero, without
    counts; the bytes that its files seem to have. Raises OSError where the disk has no such files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arrays, total = {}, 0
    shapes = {"labels": (samples,), "dense": (samples, INTEGERS), "ids": (samples, IDS)}
    for name, dtype in (("labels", np.uint8), ("dense", np.float32), ("ids", np.int32)):
        path, shape, kind = folder / f"{name}.npy", shapes[name], np.dtype(dtype)
        with path.open("wb") as file:
            np.lib.format.write_array_header_1_0(
                file, {"descr": kind.str, "fortran_order": False, "shape": shape}
            )
            size = file.tell() + kind.itemsize * int(np.prod(shape))
            file.truncate(size)
        arrays[path.name] = ArrayFile(kind.str, shape, size, "not taken")
        total += size
    manifest = Manifest(
        samples=samples,
        train_samples=samples * 6 // 7,
        table_rows=TERABYTE_ROWS,
        mode="hash",
        multi_hot=None,
        arrays=arrays,
        inputs=[],
        skipped={"count": 0, "first": []},
        settings={},
        versions={},
    )
    write_manifest(folder, manifest.with_fingerprint())
    return total


def mapped_bytes(folder: Path) -> int:
    """Bytes of the folder's files that this process has in its memory maps now."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(".npy") and str(folder) in line
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


def forget(folder: Path) -> None:
    """Have the system drop the files' pages from memory."""
    for path in folder.glob("*.npy"):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def first_batches(folder: Path, batch: int, shuffle: bool) -> tuple[int, int]:
    """Open a folder and load its first batch and the epoch's last; bytes allocated and mapped."""
    forget(folder)
    tracemalloc.start()
    try:
        source = CriteoArrays(folder, BatchSettings(batch, shuffle=shuffle))
        source.train_batch(0, 0, 1).loaded()
        source.train_batch((source.steps_per_epoch or 1) - 1, 0, 1).loaded()
        return tracemalloc.get_traced_memory()[1], mapped_bytes(folder)
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Sparse arrays of 314 GB."""
    home = tmp_path_factory.mktemp("sparse")
    try:
        size = make_sparse_folder(home, SAMPLES)
    except OSError as error:
        pytest.skip(f"the file system takes no sparse files of 314 GB: {error}")
    assert size > 310e9
    assert sum(path.stat().st_blocks for path in home.glob("*.npy")) * 512 < 1 << 20
    return home


@pytest.mark.parametrize("shuffle", [True, False])
def test_opening_reads_pages_of_the_batch_alone(folder, shuffle):
    allocated, mapped = first_batches(folder, BATCH, shuffle)
    # Two batches of three arrays, each of two pools; and what the kernel maps around a page.
    pools = 2 * 256 * 4096 * (26 * 4 + 13 * 4 + 1)
    if shuffle:
        assert mapped <= pools < 2e-3 * 310e9
    else:  # neighbours share their pages
        assert mapped <= 2 * BATCH * (26 * 4 + 13 * 4 + 1) + 6 * 2 * AROUND * PAGE
    # Not a byte per thousand samples, let alone an index of them.
    assert allocated < 64 * BATCH * (26 + 13 + 1) < SAMPLES / 300


@pytest.mark.parametrize("shuffle", [True, False])
def test_any_step_of_any_epoch_is_as_near(folder, shuffle):
    source = CriteoArrays(folder, BatchSettings(BATCH, shuffle=shuffle))
    assert source.train_samples == 1_714_285_714
    steps = source.steps_per_epoch
    for step in (0, 12_345, steps - 1, steps, 3 * steps + 7):
        batch = source.train_batch(step, 1, 3).loaded()
        assert batch.dense.shape == (len(batch.labels), 13) and batch.epoch == step // steps
        assert not batch.dense.any() and not batch.ids.values.any()
    last = source.eval_batch(source.eval_batches - 1, 0, 1)
    assert last.global_size == (SAMPLES - source.train_samples) % BATCH
