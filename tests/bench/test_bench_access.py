"""The bench of rows between store and device: its records, its report, and refused options."""

from __future__ import annotations

import json

import pytest
import torch

from distcache.bench import access

KINDS = {f"{way}, {kind}" for way in ("fetch", "write back") for kind in ("staged", "zero_copy")}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("state", [0, 3])
def test_a_report_of_both_ways(device: str, state: int, tmp_path, capsys) -> None:
    out = tmp_path / "access.md"
    given = [f"device={device}", "table_rows=500", "widths=4,16", "counts=30,900"]
    given += ["repetitions=3", f"state_width={state}", f"out={out}"]
    assert access.main(given) == 0
    lines = out.with_suffix(".jsonl").read_text().splitlines()
    head, *records = map(json.loads, lines)
    assert head["kind"] == "environment"
    assert [(r["width"], r["count"]) for r in records] == [(4, 30), (4, 500), (16, 30), (16, 500)]
    for record in records:
        rates = record["gigabytes_per_second"]
        assert set(rates) == KINDS and record["device"] == device
        assert all(rate["count"] == 3 and rate["min"] > 0 for rate in rates.values())
        assert set(record["ratio"]) == {"fetch", "write back"}
    assert "fetch: zero_copy / staged" in out.read_text()
    assert out.read_text() == capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_told(capfd) -> None:
    assert access.main(["device=cuda"]) == 1
    assert "cuda" in capfd.readouterr().err


def test_wrong_options_are_refused(capfd) -> None:
    for given in ("repetitions=0", "widths=0", "state_width=-1"):
        assert access.main(["device=cpu", given]) == 1
        assert given in capfd.readouterr().err
