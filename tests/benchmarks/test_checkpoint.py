"""The bench of checkpoints at a small size: what it leaves."""

from __future__ import annotations

import pytest
from benchmark_checks import of, read_report

from benchmarks import checkpoint

SMALL = ["rows=4000", "batch=32", "repetitions=2", "steps=2", "width=8"]


@pytest.mark.slow
def test_files_and_steps_have_their_yardsticks_and_nothing_is_left(tmp_path):
    out, folder = tmp_path / "checkpoint.md", tmp_path / "files"
    folder.mkdir()
    assert checkpoint.main([*SMALL, f"folder={folder}", f"out={out}"]) == 0
    _, records = read_report(out, checkpoint.BENCH)
    who = {"save", "restore", "plain write", "plain read", "copy, checksum"}
    assert {record["who"] for record in of(records, "rate")} == who
    for record in of(records, "rate"):
        assert record["rate"]["min"] > 0 and record["gigabytes"] > 5040 * 8 * 8 / 1e9
    for record in of(records, "ratio"):
        assert record["ratio"]["count"] == 2
        assert record["numerator"] in {"save", "restore", "beside a write"}
    alone, beside = of(records, "step")
    assert alone["steps"] == 4 <= beside["steps"] + 2 and beside["pause_ms"]["count"] == 2
    assert list(folder.iterdir()) == []
