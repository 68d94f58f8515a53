"""The bench of copied rows: its records, its report, and refused options."""

from __future__ import annotations

import pytest
import torch
from benchmark_checks import of, read_report

from benchmarks import rows

DIRECTIONS = ("fetch", "write back")
COPIES = {f"{way}, {kind}" for way in DIRECTIONS for kind in ("staged", "zero_copy")}
OURS = {"gather", "index_select", "scatter", "index_copy_"}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("state", [0, 3])
def test_a_report_of_both_parts(device: str, state: int, tmp_path) -> None:
    out, threads = tmp_path / "rows.md", torch.get_num_threads()
    given = [f"device={device}", "table_rows=500", "widths=4,16", "counts=30,900"]
    assert rows.main([*given, "repetitions=3", f"state_width={state}", f"out={out}"]) == 0
    assert torch.get_num_threads() == threads
    _, records = read_report(out, rows.BENCH)
    for part, names, where in ((rows.MEMORY, OURS, "cpu"), (rows.DEVICE, COPIES, device)):
        found = of(records, part)
        assert [(r["width"], r["count"]) for r in found] == [(4, 30), (4, 500), (16, 30), (16, 500)]
        for record in found:
            rates = record["gigabytes_per_second"]
            assert set(rates) == names and record["device"] == where
            assert all(rate["count"] == 3 and rate["min"] > 0 for rate in rates.values())
            assert set(record["ratio"]) == {own for own, _ in rows.PAIRS[part]}
    assert "fetch, zero_copy / fetch, staged" in out.read_text()
