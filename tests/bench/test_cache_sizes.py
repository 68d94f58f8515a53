"""The bench of cache sizes: runs that agree to the bit, whatever is cached."""

from __future__ import annotations

import json

from distcache.bench import cache_sizes

SMALL = ("data.table_rows=[300,40,7]", "model.dense_arch=[8,4]", "model.over_arch=[4,1]")


def test_sizes_take_turns_and_agree(tmp_path) -> None:
    out = tmp_path / "sizes.md"
    given = ("ratios=0.5,1.0", "width=4", "batch=24", "steps=14", "repetitions=1", f"out={out}")
    assert cache_sizes.main([*given, *SMALL, "trainer.eval_steps=2"]) == 0
    report = out.read_text()
    assert "have the same bits" in report and "data.table_rows" in report
    records = [json.loads(line) for line in out.with_suffix(".jsonl").read_text().splitlines()]
    runs = {r["cached"]: r for r in records if r["kind"] == "run"}
    assert list(runs) == ["0.5", "1.0", "resident"]
    assert len({r["state_digest"] for r in runs.values()}) == 1
    assert runs["0.5"]["cache_rows"] < runs["1.0"]["cache_rows"]
    assert 0 < runs["0.5"]["eval_auc"] < 1


def test_a_run_that_fails_is_shown(capsys) -> None:
    given = ["ratios=0.001", "width=4", "batch=24", "steps=3", "repetitions=1", *SMALL]
    assert cache_sizes.main(given) == 1
    said = capsys.readouterr().err
    assert "cached 0.001: the run failed" in said and "cache.rows=" in said
