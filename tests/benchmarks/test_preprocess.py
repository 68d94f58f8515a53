"""The bench of preprocessing at a small size, its lines and what it sees of memory."""

from __future__ import annotations

import numpy as np
from benchmark_checks import of, read_report
from criteo_lines import read_plainly

from benchmarks import preprocess as bench
from distcache.data.criteo_folder import KAGGLE_ROWS


def test_lines_are_good_and_as_described(tmp_path) -> None:
    count = bench.write_lines(tmp_path / "a.txt", 700_000)
    text = (tmp_path / "a.txt").read_bytes()
    assert len(text) >= 700_000 and text.count(b"\n") == count
    labels, dense, ids, bad = read_plainly(text, None)
    assert not bad and 0.2 < labels.mean() < 0.3
    assert 0.02 < (ids[:, 0] == 0).mean() < 0.04 and 0.35 < (ids[:, 18] == 0).mean() < 0.45
    assert len(np.unique(ids[:, 2])) > len(np.unique(ids[:, 0])) > len(np.unique(ids[:, 8]))
    assert len(np.unique(ids[:, 8])) <= KAGGLE_ROWS[8] + 1
    assert (dense[:, 0] == 0).mean() > 0.2
    assert bench.write_lines(tmp_path / "b.txt", 700_000) == count
    assert (tmp_path / "b.txt").read_bytes() == text


def test_the_bench_reports_and_cleans_up(tmp_path) -> None:
    out = tmp_path / "report.md"
    (tmp_path / "files").mkdir()
    arguments = ["bytes=300000", "jobs=vocabulary", "repetitions=2", f"folder={tmp_path / 'files'}"]
    assert bench.main([*arguments, f"out={out}"]) == 0
    _, records = read_report(out, bench.BENCH)
    first, second = of(records, "job")
    assert first["job"] == "vocabulary" and first["core_seconds"] > 0
    assert first["peak_bytes"] > first["peak_own_bytes"] > 0
    assert first["output_bytes"] == second["output_bytes"] > 0
    assert str(tmp_path) not in out.read_text() and "MB/s per core" in out.read_text()
    assert not list((tmp_path / "files").iterdir())
