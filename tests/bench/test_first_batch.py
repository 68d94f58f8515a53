"""The first batch of two billion samples: what is read and held for it does not grow with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distcache.bench import first_batch as bench
from distcache.data.criteo import BatchSettings, CriteoArrays

SAMPLES = 2_000_000_000
BATCH = 2048
PAGE, AROUND = 4096, 16
"""Bytes of a page, and the pages around a fault that the kernel maps when it has them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Sparse arrays of 314 GB."""
    home = tmp_path_factory.mktemp("sparse")
    try:
        size = bench.make_sparse_folder(home, SAMPLES)
    except OSError as error:
        pytest.skip(f"the file system takes no sparse files of 314 GB: {error}")
    assert size > 310e9
    assert sum(path.stat().st_blocks for path in home.glob("*.npy")) * 512 < 1 << 20
    return home


@pytest.mark.parametrize("shuffle", [True, False])
def test_opening_reads_pages_of_the_batch_alone(folder, shuffle):
    found = bench.first_batches(folder, BATCH, shuffle)
    # Two batches of three arrays, each of two pools; and what the kernel maps around a page.
    pools = 2 * 256 * 4096 * (26 * 4 + 13 * 4 + 1)
    if shuffle:
        assert found["mapped_bytes"] <= pools < 2e-3 * 310e9
    else:  # neighbours share their pages
        assert found["mapped_bytes"] <= 2 * BATCH * (26 * 4 + 13 * 4 + 1) + 6 * 2 * AROUND * PAGE
    # Not a byte per thousand samples, let alone an index of them.
    assert found["allocated_bytes"] < 64 * BATCH * (26 + 13 + 1) < SAMPLES / 300


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


def test_the_bench_reports_and_cleans_up(tmp_path, capsys):
    out = tmp_path / "report.md"
    (tmp_path / "files").mkdir()
    arguments = ["samples=700,70000", "repetitions=2", f"folder={tmp_path / 'files'}", f"out={out}"]
    assert bench.main(arguments) == 0
    lines = [json.loads(line) for line in out.with_suffix(".jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["environment", *["opening"] * 8]
    assert all(line["first_batch_ms"] > 0 and line["mapped_bytes"] > 0 for line in lines[1:])
    assert str(tmp_path) not in out.read_text() and "| 70,000 |" in out.read_text()
    assert not list((tmp_path / "files").iterdir())
    assert bench.main(["samples=3"]) == 1 and "samples=[3]" in capsys.readouterr().err
