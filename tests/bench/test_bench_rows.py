"""The bench of gathers and scatters: its records, its report, and refused options."""

from __future__ import annotations

import json

from distcache.bench import rows


def test_a_report_of_both_directions(tmp_path, capsys) -> None:
    out = tmp_path / "rows.md"
    given = ["table_rows=500", "widths=4,16", "counts=30", "repetitions=3", f"out={out}"]
    assert rows.main(given) == 0
    head, *records = [
        json.loads(line) for line in out.with_suffix(".jsonl").read_text().splitlines()
    ]
    assert head["kind"] == "environment"
    assert [(r["width"], r["count"]) for r in records] == [(4, 30), (16, 30)]
    for record in records:
        assert set(record["gigabytes_per_second"]) == {
            "gather", "index_select", "scatter", "index_copy_",
        }  # fmt: skip
        assert all(
            s["count"] == 3 and s["min"] > 0 for s in record["gigabytes_per_second"].values()
        )
        assert set(record["ratio"]) == {"gather", "scatter"}
    assert "gather / index_select" in out.read_text()
    assert out.read_text() == capsys.readouterr().out


def test_wrong_options_are_refused(capfd) -> None:
    assert rows.main(["repetitions=0"]) == 1
    assert rows.main(["widths=0"]) == 1
    assert rows.main(["table_rows=900000000000", "widths=64"]) == 1
    assert "900000000000 rows of 64" in capfd.readouterr().err
