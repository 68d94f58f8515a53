"""Spreads, ratios and the two files of a report."""

from __future__ import annotations

import pytest
from bench_checks import check_spread, read_report

from distcache.bench.report import Report, Table, header, to_markdown, write_report
from distcache.bench.spread import ratios, rotated, shown, spread
from distcache.errors import ConfigError


def one_table(records):
    rows = [(record["name"], f"{record['value']:.1f}") for record in records]
    return [Table("Numbers", "What they are.", ("name", "value"), rows)]


def test_spread_and_ratios():
    values = [3.0, 1.0, 2.0, 10.0]
    check_spread(spread(values), values)
    assert spread([]) == {
        "min": None,
        "q1": None,
        "median": None,
        "q3": None,
        "max": None,
        "count": 0,
    }
    assert shown(spread([1.0, 2.0, 3.0])) == "2.00 [1.50, 2.50]"
    assert shown(spread([])) == "-"
    assert ratios([2.0, 9.0], [4.0, 3.0]) == [0.5, 3.0]
    with pytest.raises(ValueError, match="zip"):
        ratios([1.0], [1.0, 2.0])


def test_everyone_is_first_once():
    names = ["a", "b", "c"]
    assert [rotated(names, turn)[0] for turn in range(4)] == ["a", "b", "c", "a"]
    assert all(sorted(rotated(names, turn)) == names for turn in range(4))


def test_both_files_tell_the_same(tmp_path):
    records = [{"kind": "number", "name": "a", "value": 1.26}]
    report = Report("Title", "a.module", ("x=1",), {"x": (1, 2)}, records, one_table)
    head = header("a.module", ("x=1",), report.settings, 1)
    out, lines = write_report(report, head, tmp_path / "new" / "report.md")
    assert lines == tmp_path / "new" / "report.jsonl"
    _, read = read_report(out, one_table)
    assert read == records
    text = to_markdown(report, head)
    assert "| a | 1.3 |" in text
    assert "`python -m a.module x=1`" in text
    assert "x=1,2" in text
    assert header("m", (), {}, 2)["command"][:4] == [
        "torchrun",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    report = Report("Title", "m", (), {}, [], lambda records: [])
    with pytest.raises(ConfigError, match="out="):
        write_report(report, header("m", (), {}, 1), tmp_path / "file" / "r.md")
