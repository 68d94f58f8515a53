"""The published cache benchmark at a small size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import cache

SMALL = ("device=cpu", "rows=2000", "batch=100", "width=8", "warmup=8", "steps=3", "blocks=2")


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_every_variant_is_measured_and_a_cache_too_small_for_a_step_is_refused(
    optimizer: str, tmp_path: Path
) -> None:
    out = tmp_path / "cache.md"
    more = ("modes=staged,zero_copy,bag", "slots=1.2x,100", "planner_threads=1", "traced=2")
    assert cache.main([*SMALL, *more, f"optimizer={optimizer}", f"out={out}"]) == 0
    records = [json.loads(line) for line in out.with_suffix(".jsonl").read_text().splitlines()]
    variants = [record for record in records if record["kind"] == "variant"]
    assert [record["mode"].split()[0] for record in variants] == ["staged", "zero_copy", "bag"]
    for record in variants[:2]:
        assert len(record["block_ms"]) == 2 and record["steady"]
        assert record["misses"] == record["evictions"] > 0
        assert record["stage_ms"]["plan"] > 0 and record["traced_stage_ms"]["ingest"] > 0
    assert variants[0]["misses"] == variants[1]["misses"]
    failed = [record["error"] for record in records if record["kind"] == "failed"]
    assert len(failed) == 2 and all("needs" in error for error in failed)
    assert "published: DynamicEmb, in HBM" in out.read_text()
