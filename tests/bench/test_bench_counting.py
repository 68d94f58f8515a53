"""The benches of counting and of predictions, at a small size."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_checks import of, read_report

from distcache.bench import counting, prediction


def test_counting(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "counting.md"
    words = ["table_rows=20000,50", "zipf=1.05", "batch=500", "batches=20", "repetitions=2"]
    assert counting.main([*words, "sketch=70000", f"out={out}"]) == 0
    _, records = read_report(out, counting.tables)
    found = {record["contender"]: record for record in of(records, "counting")}
    assert list(found) == ["exact", "exact, NumPy", "sketch, 70,000 B"]
    for name, record in found.items():
        assert record["ids"] == 20 * 500 * 2
        rate = record["million_ids_per_cpu_second"]
        assert rate["count"] == 2 and rate["min"] > 0
        assert (record["largest_error"] > 0) == (record["sketched_tables"] > 0) == ("sk" in name)
    assert found["exact"]["count_bytes"] == 8 * 20_050
    assert found["sketch, 70,000 B"]["count_bytes"] <= 70_000
    assert counting.main(["batches=0"]) == 1 and "batches=0" in capsys.readouterr().err


def test_predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = prediction.RunCase(
        "small",
        (
            *("data=synthetic", "data.table_rows=[5000,40]", "data.global_batch_size=128"),
            *("trainer.steps=40", "trainer.eval_steps=0", "cache.ratio=0.2"),
        ),
    )
    monkeypatch.setattr(prediction, "cases", lambda options, folder: [case])
    out = tmp_path / "prediction.md"
    assert prediction.main(["sample=0.5", f"out={out}"]) == 0
    _, records = read_report(out, prediction.tables)
    (record,) = of(records, "prediction")
    measured = record["measured"]
    for key in ("hit_rate", "hit_rate_lookups", "fetched"):
        assert record["predicted"][key] == pytest.approx(measured[key], rel=1e-9)
    assert record["predicted"]["distinct"] == pytest.approx(measured["distinct"], rel=0.02)
    assert record["predicted"]["counted_steps"] == record["steps"] == 40
    assert record["sampled"]["counted_steps"] == record["sampled"]["replayed_steps"] == 20
    assert "(+0.00 %)" in out.read_text()
